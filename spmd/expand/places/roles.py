"""What the nodes of a captured step are for: which compute, which update, and which are gradients.

    forward and backward    compute: they lead to a gradient, to what the step returns, or to a buffer
    update                  the rest: it leads to the new values of parameters and of optimiser state alone

Nothing here knows the names of ops. The capture says which nodes were made while autograd's engine ran (the odd
phases), and where the engine handed over the gradient of a parameter (`MARK`). All else follows from who reads whom.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from spmd import _torch
from spmd.expand.loops.loop import Loop
from spmd.expand.phases import NEW_VALUE
from spmd.expand.places.places import Places
from spmd.expand.state import Slot
from spmd.tensor.spec import Spec

MARK = torch.ops.spmd.gradient.default
"""The op that a capture puts where a backward pass has made the gradient of a parameter: (gradient, its path)."""


def phase_of(node: fx.Node) -> int:
    """Which pass made a node: 0 the first forward, 1 the first backward, 2 what comes then, and so on."""
    return node.meta.get("phase", 0)


def in_backward(node: fx.Node) -> bool:
    """Whether a backward pass made the node."""
    return phase_of(node) % 2 == 1


@dataclass(frozen=True)
class Roles:
    """The roles of a captured graph.

    parameters: the path of each placeholder that is a parameter, and of each value that an optimiser's step has given
    to one. gradients: by the path of a parameter, the values of
    its gradient in order: one for each backward pass, and the sums of several. more_follow: whether later passes add to
    the last of these, or make others, as in the body of a loop. in_bodies: for each loop, what computes in its body.
    given: the gradients among the placeholders, with their paths.
    """

    compute: frozenset[fx.Node] = frozenset()
    parameters: dict[fx.Node, str] = field(default_factory=dict)
    gradients: dict[str, list[fx.Node]] = field(default_factory=dict)
    more_follow: bool = False
    in_bodies: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    given: dict[fx.Node, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Sequence[object], outputs: Sequence[object]) -> Roles:
        """inputs, outputs: what each placeholder and each output is; a `Slot` for a tensor of the state."""
        returned = list(zip(graph.output_node().args[0], outputs, strict=True))
        versions = versions_in(graph)
        new = {n for n, o in returned if _is(o, "parameter") and n.op == "call_function"} | set(versions)
        seen = [n for n, o in returned if not _is(o, "parameter", "optimizer", "hyper") and n not in new]
        compute, in_bodies = _computing(graph, seen, new)
        named = [(n, i) for n, i in zip(placeholders(graph), inputs, strict=True) if isinstance(i, Slot)]
        parameters = {n: i.path for n, i in named if i.kind == "parameter"} | versions
        grads = {n: i.path for n, i in named if i.kind == "grad"}
        return cls(compute, parameters, _gradients(graph, grads), in_bodies=in_bodies, given=grads)

    @classmethod
    def of_body(
        cls, graph: fx.Graph, compute: frozenset[fx.Node], parameters: dict[fx.Node, str],
        gradients: dict[fx.Node, str],
    ) -> Roles:  # fmt: skip
        """Of the body of a loop. parameters, gradients: those among its inputs, by their paths."""
        of = _gradients(graph, gradients)
        return cls(compute, parameters | versions_in(graph), of, more_follow=True, given=gradients)


def gradient_places(roles: Roles, places: Mapping[str, Places]) -> dict[fx.Node, Spec]:
    """Where gradients go as soon as they are made: the gradient of each pass, or of all passes together.

    A gradient that is reduced in another dtype than it is kept in goes there before it is cast.
    """
    found = {}
    for path, values in roles.gradients.items():
        of = places[path]
        for n in values:
            is_last = n is values[-1] and not roles.more_follow
            if of.reduces_each or is_last or n.meta["val"].dtype != of.stored.dtype:
                found[n] = of.gradient
    return found


def widened(node: fx.Node) -> bool:
    """Whether a node casts a gradient to a wider dtype, to be reduced in it.

    Then its terms are cast, and not their sum, though the sum has fewer bytes to reduce: terms in bfloat16 that are
    added in bfloat16 lose what the wider dtype is for.
    """
    if node.target is not torch.ops.aten._to_copy.default or not _is_added_up(node):
        return False
    made, given = node.meta["val"].dtype, node.args[0].meta["val"].dtype
    return made.is_floating_point and made.itemsize > given.itemsize


def _is_added_up(node: fx.Node) -> bool:
    """Whether a node is a gradient, or added to others to be one: that of a parameter with several readers."""
    while not any(n.target is MARK for n in node.users):
        if [n.target for n in node.users] != [torch.ops.aten.add.Tensor]:
            return False
        (node,) = node.users
    return True


def before_widened(graph: fx.Graph) -> frozenset[fx.Node]:
    """The values from which gradients are cast to a wider dtype, and those of which they are views for nobody else."""
    found: set[fx.Node] = set()
    for node in filter(widened, graph.nodes):
        value = node.args[0]
        found.add(value)
        while len(value.users) == 1 and value.target in _VIEWS:
            value = value.args[0]
            found.add(value)
    return frozenset(found)


_VIEWS = {
    torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.view.default,
    torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.squeeze.dim,
}  # fmt: skip


def scattered_first(spec: Spec, final: Spec) -> tuple[Spec, ...]:
    """The specs that a gradient passes through on its way to its place: sums are scattered before others are reduced.

    f64[64, 16] +sum@rep +sum@dp -> f64[64@dp, 16] +sum@rep -> f64[64@dp, 16]. Where a tensor is small, one reduction of
    all of it is faster than these two. But gradients travel together, and then only bytes count.
    """
    scattering = {a for axes in final.dims for a in axes}
    left = [(a, kind) for a, kind in spec.partial if a not in scattering]
    last = spec.with_layout(final.dims, final.units)
    first = spec.with_layout(final.dims, final.units, left)
    return (last,) if len(left) in (0, len(spec.partial)) else (first, last)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def _is(what: object, *kinds: str) -> bool:
    return isinstance(what, Slot) and what.kind in kinds


def versions_in(graph: fx.Graph) -> dict[fx.Node, str]:
    """The values that optimisers' steps have given to parameters, with the paths of these."""
    return {n: n.meta[NEW_VALUE] for n in graph.nodes if NEW_VALUE in n.meta and n.op == "call_function"}


def _computing(
    graph: fx.Graph, roots: Iterable[object], stop: Container[fx.Node]
) -> tuple[frozenset[fx.Node], dict[fx.Node, frozenset[fx.Node]]]:
    """Backward passes, the roots, and everything that they are computed from, but not what is behind the nodes of
    `stop`; and the same of the body of each loop."""
    found = {n for n in roots if isinstance(n, fx.Node)}
    in_bodies: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if isinstance(node.target, Loop):
            loop, results = node.target, [n for n in node.users if n in found]
            in_bodies[node] = inside = _computing_in_body(loop, {loop.output_of(n.args[1]) for n in results})
            found.add(node)
            inputs = loop.for_all(placeholders(loop.body))
            found.update(n for n, given in zip(node.args, inputs, strict=True) if given in inside)
        elif node not in stop and (node in found or (in_backward(node) and not _is_of_loop(node))):
            found.add(node)
            found.update(_torch.operands_of(node))
    return frozenset(found.difference(stop)), in_bodies


def _computing_in_body(loop: Loop, wanted: set[int]) -> frozenset[fx.Node]:
    """The same of a body. wanted: the outputs that are read behind the loop to compute."""
    outputs, carried = loop.body.output_node().args[0], placeholders(loop.body)[loop.invariants :][: loop.carried]
    stop = versions_in(loop.body)
    while True:
        found, _ = _computing(loop.body, [outputs[i] for i in wanted], stop)
        read = {i for i, n in enumerate(carried) if n in found}
        if read <= wanted:
            return found
        wanted = wanted | read


def _is_of_loop(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0].target, Loop)


def _shapes_are_one(node: fx.Node) -> bool:
    """Whether the op gives a tensor of the shape that all its operands have."""
    values = [n.meta.get("val") for n in (node, *_torch.operands_of(node))]
    return len({getattr(value, "shape", None) for value in values}) == 1


def _gradients(graph: fx.Graph, given: dict[fx.Node, str]) -> dict[str, list[fx.Node]]:
    """Gradients by parameter: where they are marked, and what a backward pass computes of nothing else, such as sums.

    What has another shape, such as a norm that a hook takes, is no gradient.

    given: the gradients that earlier steps left.
    """
    of, found = dict(given), {}
    summed: dict[tuple, str] = {}  # what a loop carries and gives
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            firsts = node.args[node.target.invariants :][: node.target.carried]
            summed |= {(node, i): of[n] for i, n in enumerate(firsts) if n in of}
            continue
        paths = {of.get(n) for n in _torch.operands_of(node)}
        if node.target is operator.getitem and node.args in summed:
            of[node] = summed[node.args]
        elif node.target is MARK:
            of[node] = node.args[1]
        elif in_backward(node) and len(paths) == 1 and None not in paths and _shapes_are_one(node):
            of[node] = paths.pop()
        else:
            continue
        found.setdefault(of[node], []).append(node)
    return found
