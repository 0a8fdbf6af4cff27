"""Updates of parameters of one kind are captured once and stamped.

    96 weights f32[256, 256] with the same options and state    ->    the step is traced for two, and stamped for 94

While a step of an optimiser of torch runs in a capture, its groups hold two parameters of each kind alone. Afterwards
the nodes that it left are divided: those that read the one parameter, its gradient and its state, and those that read
the other. If they are apart and alike, the update of a parameter reads nothing of another parameter, and the nodes are
written again for all others of the kind. If not, `Coupled` is raised, and the capture begins again without stamps.

Kinds that differ in nothing but how long their dims are, are a *family*. Two parameters of its first kind are traced,
and one of each other kind: its nodes have to be those of the first kind, but for shapes. Else `CoupledKinds` is raised,
and the capture begins again with two of each kind.

A kind is what the code of torch's optimisers can tell apart: the group, the metadata of parameter, gradient and
state, and the state that is no tensor. An optimiser of the user's may do as it likes by name or number of a parameter;
it is traced in full. So is a step with a closure or with hooks, which would see the groups, and a differentiable one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from spmd import _torch
from spmd.expand.equal_counts import EqualCounts
from spmd.expand.guards import guard_key
from spmd.expand.stamp.parts import Coupled, Part, differing, metadata, parts_of, stamp

TRACED = 2
"""How many parameters of a kind are traced: two show that neither reads what is the other's."""


class CoupledKinds(Coupled):
    """The update of a parameter depends on how long its dims are, by more than the shapes of its values."""


@contextlib.contextmanager
def updates_stamped(counts: EqualCounts, by_family: bool = True) -> Iterator[None]:
    """Inside, in a capture by this thread, steps of optimisers are traced for two parameters of each kind, or, of kinds
    that differ in lengths alone, of one. counts: those of the trace.

    Raises Coupled if they are found to depend on each other: then the capture is to be done without. CoupledKinds: it
    is to be done without families.
    """
    narrowed: dict[int, _Narrowed] = {}
    thread = threading.get_ident()

    def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        mode = _torch.proxy_mode() if threading.get_ident() == thread else None
        if mode is not None and id(optimizer) in narrowed:
            raise Coupled("a step calls a step of the same optimiser")
        if mode is not None and _is_of_torch_alone(optimizer, args, kwargs):
            with _torch.no_function_modes():
                narrowed[id(optimizer)] = _Narrowed.of(optimizer, mode.tracer, counts, by_family)

    def after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == thread and id(optimizer) in narrowed:
            with _torch.no_function_modes():
                narrowed.pop(id(optimizer)).stamp()

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
        if narrowed:
            raise Coupled("a step of an optimiser was left by an error, and the error was caught")
    finally:
        for handle in handles:
            handle.remove()


def _is_of_torch_alone(optimizer: Optimizer, args: tuple, kwargs: dict) -> bool:
    """Whether the step that begins is torch's own code, and none of the user's runs in it."""
    return (
        _torch.is_torchs_own(optimizer)
        and all(hook.__module__.startswith("spmd.") for hook in _torch.step_hooks(optimizer))
        and len(args) == 1
        and not any(x is not None for x in kwargs.values())
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


# ---- one step ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Own:
    """A parameter with what is its own: itself, its gradient and its state, by name, with their present values and
    nodes."""

    parameter: torch.Tensor
    tensors: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    nodes: dict[str, fx.Node]

    @property
    def pattern(self) -> tuple[int, ...]:
        """Which of the tensors have one node."""
        nodes = list(self.nodes.values())
        return tuple(map(nodes.index, nodes))


def _tensors(optimizer: Optimizer, p: torch.Tensor) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(p, {})
    return {".": p, ".grad": p.grad} | {k: x for k, x in state.items() if isinstance(x, torch.Tensor)}


@dataclass(frozen=True)
class _Kind:
    """Parameters of one kind. traced: how many of them. like: the kind of which two show that parameters are apart."""

    owns: list[_Own]
    traced: int
    like: _Kind | None = None


@dataclass(frozen=True)
class _Narrowed:
    """A step of an optimiser whose groups hold the parameters that are traced. groups: all parameters of each group.

    last: the last node before the step. What is made of counts alone is the same number for all of a kind: it is in no
    part, and is not written again.
    """

    optimizer: Optimizer
    tracer: fx.Tracer
    counts: EqualCounts
    groups: list[list[torch.Tensor]]
    kinds: list[_Kind]
    last: fx.Node | None

    @classmethod
    def of(cls, optimizer: Optimizer, tracer: fx.Tracer, counts: EqualCounts, by_family: bool) -> _Narrowed:
        kinds = _kinds(optimizer, tracer, counts, by_family)
        left_out = {id(own.parameter) for kind in kinds for own in kind.owns[kind.traced :]}
        groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in left_out]
        return cls(optimizer, tracer, counts, groups, kinds, next(iter(reversed(tracer.graph.nodes)), None))

    def stamp(self) -> None:
        """Give the groups all their parameters again, and update those that the step did not see."""
        for group, params in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = params
        kinds = [kind for kind in self.kinds if len(kind.owns) > kind.traced]
        if not kinds:
            return
        traced = [_Traced.of(own, self.optimizer, self.tracer) for k in self.kinds for own in k.owns[: k.traced]]
        new = self._new_nodes()
        shared = self.counts.write_once(new)
        parts = parts_of([n for n in new if n not in shared], [each.sides for each in traced])
        found = {id(one.own.parameter): (one, part) for one, part in zip(traced, parts, strict=True)}
        for kind in kinds:
            one, *others = (found[id(own.parameter)] for own in kind.owns[: kind.traced])
            if kind.like is not None:
                _check_alike(found[id(kind.like.owns[0].parameter)], one, self.tracer, _metadata_but_lengths)
            for other in others:
                _check_alike(one, other, self.tracer, metadata)
        for kind in kinds:
            self._update(kind.owns[kind.traced :], *found[id(kind.owns[0].parameter)])

    def _new_nodes(self) -> list[fx.Node]:
        """The nodes that the step has made."""
        node = self.last.next if self.last is not None else next(iter(self.tracer.graph.nodes))
        found = []
        while node.op != "root":
            found.append(node)
            node = node.next
        return found

    def _update(self, owns: Sequence[_Own], like: _Traced, part: Part) -> None:
        """Write the nodes of the part again for other parameters, and give their tensors the values."""
        nodes = []
        for own in owns:
            env = {a: own.nodes[name] for name, a in like.own.nodes.items()}
            stamp(part, env)
            nodes += [env.get(like.nodes[name], like.nodes[name]) for name in like.changed]
        values = [_torch.from_functional(x) for x in like.changed.values()]
        new = iter(_torch.stand_ins(values * len(owns), nodes, self.tracer))
        for own in owns:
            self._give(own, {name: next(new) for name in like.changed})
            kept = self.optimizer.state.get(like.own.parameter, {})
            if others := {k: x for k, x in kept.items() if not isinstance(x, torch.Tensor)}:
                self.optimizer.state[own.parameter].update(others)

    def _give(self, own: _Own, values: dict[str, torch.Tensor]) -> None:
        """Give the tensors of a parameter these values. What it does not have yet is new state."""
        written = [name for name in values if name in own.tensors]
        for name in written:
            _torch.write_functional(own.tensors[name], values[name])
        torch.autograd.graph.increment_version([own.tensors[name] for name in written])
        made = {name: _torch.to_functional(x) for name, x in values.items() if name not in own.tensors}
        if made:
            self.optimizer.state[own.parameter].update(made)


@dataclass(frozen=True)
class _Traced:
    """A parameter that the step has updated. nodes: of its tensors now. changed: those that have new values."""

    own: _Own
    nodes: dict[str, fx.Node]
    changed: dict[str, torch.Tensor]

    @classmethod
    def of(cls, own: _Own, optimizer: Optimizer, tracer: fx.Tracer) -> _Traced:
        now = _tensors(optimizer, own.parameter)
        nodes = {name: _torch.node_of(_torch.from_functional(x), tracer) for name, x in now.items() if x is not None}
        replaced = any(now.get(name) is not x for name, x in own.tensors.items())
        if replaced or None in nodes.values():
            raise Coupled("the step gave a parameter another gradient or other tensors of state")
        changed = {name: x for name, x in now.items() if nodes[name] is not own.nodes.get(name)}
        return cls(own, nodes, changed)

    @property
    def sides(self) -> tuple[Sequence[fx.Node], Sequence[fx.Node]]:
        return list(self.own.nodes.values()), [self.nodes[name] for name in self.changed]


_Update = tuple[_Traced, Part]
"""What the step did to a parameter, and the nodes that it left."""


def _check_alike(one: _Update, other: _Update, tracer: fx.Tracer, compared: Callable[[Any], Any]) -> None:
    """Raise if two updates differ. compared: what is compared of the values of two nodes."""
    error = Coupled if compared is metadata else CoupledKinds
    if list(one[0].changed) != list(other[0].changed):
        raise error("the step changed other tensors of one parameter than of another of its kind")
    with _torch.no_modes():
        where = differing(one[1], other[1], lambda name: getattr(tracer.root, name), compared)
    if where:
        raise error(f"the updates of two parameters of one kind differ: {where}")


def _metadata_but_lengths(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.ndim
    return metadata(value)


# ---- kinds ------------------------------------------------------------------------------------


def _kinds(optimizer: Optimizer, tracer: fx.Tracer, counts: EqualCounts, by_family: bool) -> list[_Kind]:
    """The parameters that have a gradient, by kind. Each alone if some of them share tensors or memory."""
    found: dict[Hashable, list[_Own]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is None:
                continue
            tensors = _tensors(optimizer, p)
            values = {name: _torch.from_functional(x) for name, x in tensors.items()}
            nodes = {name: _torch.node_of(x, tracer) for name, x in values.items()}
            if None in nodes.values():
                return []
            own = _Own(p, tensors, values, nodes)
            found.setdefault((number, _kind(optimizer, own, counts)), []).append(own)
    owns = [own for kind in found.values() for own in kind]
    return _with_families(optimizer, found, by_family) if _are_apart(owns) else []


def _with_families(optimizer: Optimizer, found: dict[Hashable, list[_Own]], by_family: bool) -> list[_Kind]:
    """Kinds, and of how many of their parameters the update is traced."""
    first: dict[Hashable, _Kind] = {}
    kinds = []
    for (group, kind), owns in found.items():
        family = (group, _family(kind)) if by_family and "foreach" in optimizer.param_groups[group] else None
        like = first.get(family)
        kinds.append(_Kind(owns, TRACED if like is None else 1, like))
        if family is not None and len(owns) >= TRACED:
            first.setdefault(family, kinds[-1])
    return kinds


def _kind(optimizer: Optimizer, own: _Own, counts: EqualCounts) -> tuple:
    """What torch's optimisers can tell of a parameter, its gradient and its state, and how its counts are made."""
    others = {k: x for k, x in optimizer.state.get(own.parameter, {}).items() if not isinstance(x, torch.Tensor)}
    ways = tuple(map(counts.way, own.nodes.values()))
    tensors = ((name, *_metadata(x, own.values[name])) for name, x in own.tensors.items())
    return (own.pattern, ways), guard_key(others), *tensors


def _family(kind: tuple) -> Hashable:
    """A kind without the lengths of dims: what optimisers that compute with elements can tell.

    Those have a form for many tensors at once (`foreach`), and state that has the shape of the parameter. What has
    another shape, such as a sum of rows, depends on lengths.
    """
    pattern, others, *tensors = kind
    own_shape = tensors[0][-3]
    of_elements = all(shape in (own_shape, ()) for *_, shape, _, _ in tensors)
    if not of_elements:
        return kind
    return pattern, others, *((*flags, len(shape), known) for *flags, shape, _, known in tensors)


def _metadata(x: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    known = _torch.known_value(value)
    # A gradient may have sizes of the batch: those that are known to be the parameter's, strides of dims of size 1.
    shape, stride = (tuple(map(_torch.size_key, sizes)) for sizes in (x.shape, x.stride()))
    return x.dtype, x.device, x.requires_grad, x.is_leaf, shape, stride, known


def _are_apart(owns: Sequence[_Own]) -> bool:
    """Whether no tensor, node or memory is of two parameters."""
    of: dict[Any, int] = {}
    for i, own in enumerate(owns):
        memories = (_torch.memory_of(x) for x in own.tensors.values())
        if any(of.setdefault(key, i) != i for key in chain(own.nodes.values(), memories)):
            return False
    return True
