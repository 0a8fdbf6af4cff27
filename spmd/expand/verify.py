"""Verify a program: that each value follows from its operands, and each output is what the program says.

    all_reduce over tp of f32[8] +sum@dp      ProgramFault, "move": nothing is owed on tp
    relu(f32[8] +sum@dp) -> f32[8] +sum@dp    ProgramFault, "op": no row of the rule of relu has these placements

It is asked after expansion and after every pass, so that a fault is found where it was made, and before anything is
sent. The nodes are taken one by one; nothing is run and no coordinate is read. Of an op it asks whether some rows of
its rule give these results of these operands (`spmd.tensor.lower.follows`), of a move whether it leads from the one
spec to the other (`spmd.tensor.redistribute.legal`). That an op is another one than the user wrote is not seen, if it
has the same rows and makes tensors of the same shapes and dtypes.

The graph that a rank runs is verified by `spmd.expand.verify_bound`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.local_ops import SAFE_LOCALLY, LocalCount, LocalShape, UnlessEmpty
from spmd.expand.loops.loop import Loop
from spmd.expand.nodes import described_call
from spmd.tensor.cache import Cache
from spmd.tensor.call import READS_VALUE, SCALAR, Call, TensorMeta
from spmd.tensor.lower.follows import why_not
from spmd.tensor.recipes.host import from_host, on_host, to_host
from spmd.tensor.recipes.random import Draw
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.recipes.updates import TENSORS, WRITTEN, adamw
from spmd.tensor.redistribute import legal
from spmd.tensor.redistribute.bucket import Bucket, bucket_key
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.meta import makes_with_numbers
from spmd.tensor.spec import Spec

Named = Sequence[tuple[str, Spec | None]]
Found = Iterable[tuple[str, str]]
"""Faults: the name of each, and what is wrong."""


class ProgramFault(RuntimeError):
    """A program that would not give what one device gives: a fault of a pass, or of spmd.

    fault: its name. node: where it is.
    """

    def __init__(self, fault: str, node: fx.Node, why: str):
        super().__init__(
            f"fault in the program, {fault!r}: {why}; at {node.format_node() or node.name}. Nothing was sent. If a "
            "pass of yours rewrote the program, look there; else please report it with the program's text"
        )
        self.fault, self.node = fault, node


def verify_graph(
    graph: fx.Graph, constants: Mapping[str, torch.Tensor], inputs: Named, outputs: Named,
    owed: frozenset[str] = frozenset(), ask_torch: bool = True,
) -> None:  # fmt: skip
    """Raise a `ProgramFault` for the first node that is not right.

    constants, inputs, outputs, owed: as in `Program`. ask_torch: whether torch is asked for the shapes and dtypes of
    results; not for a program that this version of torch was asked about before, for it takes a second to be ready.

    The names of faults: order, input, constant, move, unread, op, size, count, metadata, factory, value, item, recipe,
    update, draw, blocks, loop, host copy, wait, kept, fetched twice, output, partial output, home.
    """
    given, known, there = iter(inputs), set(), set()
    for node in graph.nodes:
        operands = _torch.operands_of(node)
        if not known.issuperset(operands):
            raise ProgramFault("order", node, "an operand is made after it is read")
        known.add(node)
        if node.target is to_host or node.target is on_host:  # a move or a bucket has the hash of all that it sends
            there.add(node)
        if node.op == "placeholder":
            found = _input(node, next(given, None))
        elif node.op == "get_attr":
            found = _constant(node, constants)
        elif node.op == "output":
            found = _outputs(node, inputs, outputs, owed)
        else:
            found = _call(node, ask_torch, not there.isdisjoint(operands))
        for fault, why in found:
            raise ProgramFault(fault, node, why)


def _spec(node: fx.Node) -> Any:
    return node.meta.get("spec")


def _same(a: Spec | None, b: Spec | None) -> bool:
    """Whether two specs differ at most in strides."""
    if a is b or a is None or b is None:
        return a is b
    return (a.mesh, a.shape, a.dtype) == (b.mesh, b.shape, b.dtype) and a.same_layout(b)


# ---- the ends ---------------------------------------------------------------------------------


def _input(node: fx.Node, given: tuple[str, Spec | None] | None) -> Found:
    if given is None:
        yield "input", "the program has fewer inputs than placeholders"
    elif _spec(node) is not given[1]:
        yield "input", f"{given[0]} is {given[1]}, and its placeholder says {_spec(node)}"


def _constant(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> Found:
    spec, value = _spec(node), constants.get(node.target)
    if value is None:
        yield "constant", f"there is no constant {node.target}"
    elif not spec.is_replicated or (spec.shape, spec.dtype) != (tuple(value.shape), value.dtype):
        yield "constant", f"every rank has all of it, and it says {spec}"


def _outputs(node: fx.Node, inputs: Named, outputs: Named, owed: frozenset[str]) -> Found:
    homes = dict(inputs)
    if len(node.args[0]) != len(outputs):
        yield "output", f"{len(node.args[0])} values for {len(outputs)} outputs"
        return
    for value, (name, spec) in zip(node.args[0], outputs, strict=True):
        if isinstance(value, fx.Node) and not _same(_spec(value), spec):
            yield "output", f"{name} is {spec}, and its value is {_spec(value)}"
        if spec is not None and spec.partial and name not in owed:
            yield "partial output", f"{name} is {spec}: a reduction is owed"
        home = homes.get(name)
        if home is not None and spec is not None and home.shape == spec.shape and not spec.same_layout(home):
            yield "home", f"{name} came as {home} and leaves as {spec}"


# ---- calls ------------------------------------------------------------------------------------


def _call(node: fx.Node, ask_torch: bool, reads_host: bool) -> Found:
    """reads_host: whether an operand is what a copy to host memory gives."""
    target = node.target
    if reads_host and target is not on_host and target is not from_host:
        return (("host copy", "it reads what is in host memory, and only a copy from there may"),)
    if isinstance(target, _torch.OpOverload):  # most nodes
        return _op(node, ask_torch)
    if target is operator.getitem:
        return _item(node)
    check = _check_of(type(target))
    if check is not None:
        return check(node, ask_torch) if check in (_op, _loop) else check(node)
    return _FUNCTIONS[target](node) if target in _FUNCTIONS else ()


@lru_cache(maxsize=256)
def _check_of(kind: type) -> Callable[[fx.Node], Found] | None:
    """The check of a node whose target is of this type."""
    return next((check for each, check in _CHECKS.items() if issubclass(kind, each)), None)


def _move(node: fx.Node) -> Found:
    step, have = node.target, _spec(node.args[0])
    if not node.users and step.sends:
        yield "unread", "it sends what nobody reads"
    if not _same(have, step.before):
        yield "move", f"it moves {step.before}, and its operand is {have}"
    elif _spec(node) is not step.after:
        yield "move", f"it gives {step.after}, and the program says {_spec(node)}"
    elif why := legal.fault(step):
        yield "move", why


def _bucket(node: fx.Node) -> Found:
    bucket, have = node.target, tuple(map(_spec, node.args[0]))
    if not node.users:
        yield "unread", "it sends what nobody reads"
    if len(have) != len(bucket.before) or not all(map(_same, have, bucket.before)) or _spec(node) != bucket.after:
        yield "move", "its steps are not those of its operands and results"
    keys = set(map(bucket_key, bucket.steps))
    if len(keys) > 1 or None in keys:
        yield "move", "tensors of several groups, kinds or dtypes are in one bucket"
    for step in bucket.steps:
        if why := legal.fault(step):
            yield "move", why


def _item(node: fx.Node) -> Found:
    of, index = node.args
    if isinstance(_spec(of), tuple) and _spec(node) is not _spec(of)[index]:
        yield "item", f"result {index} is {_spec(of)[index]}, and the program says {_spec(node)}"


def _given_specs(node: fx.Node, ins: Sequence[Spec | None], outs: Any, fault: str) -> Found:
    have = tuple(map(_spec, _operands(node)))
    if len(have) != len(ins) or not all(map(_same, have, ins)):
        yield fault, f"its operands must be {_text(ins)}, and are {_text(have)}"
    mine, outs = _results(node), outs if isinstance(outs, tuple) else (outs,)
    if len(mine) != len(outs) or not all(map(_same, mine, outs)):
        yield fault, f"its results are {_text(outs)}, and the program says {_text(mine)}"


def _recipe(node: fx.Node) -> Found:
    return _given_specs(node, node.target.given, node.target.made, "recipe")


def _local_map(node: fx.Node) -> Found:
    return _given_specs(node, node.target.call.ins, node.target.outs, "blocks")


def _local_map_gradient(node: fx.Node) -> Found:
    of = node.target.of
    return _given_specs(node, (*of.outs, *of.cotangents), of.grads, "blocks")


def _loop(node: fx.Node, ask_torch: bool = True) -> Found:
    """Whether a loop gives its body what this expects, and each round leaves what the next one does. The body is a
    program, and is verified as one."""
    loop, body = node.target, node.target.body
    specs = [spec for _, spec in body.inputs]
    if len(node.args) != loop.operands or len(body.outputs) != loop.outputs or loop.times < 1:
        yield "loop", f"it has {len(node.args)} operands, and runs {loop.times} times with {loop.operands}"
        return
    yield from _given_specs(node, loop.for_all(specs), loop.results([spec for _, spec in body.outputs]), "loop")
    carried = specs[loop.invariants :][: loop.carried]
    for into, (name, spec) in zip(carried, body.outputs, strict=False):
        if spec is not into:
            yield "loop", f"{name} comes as {into} and leaves each round as {spec}"
    body.verify(ask_torch)


def _update(node: fx.Node) -> Found:
    """Whether the tensors of a fused update lie alike, and the ranks have counted the same steps."""
    *tensors, step = map(_spec, node.args[:TENSORS])
    outs = tuple([tensors[i] for i in WRITTEN])
    yield from _given_specs(node, tuple(map(_spec, _operands(node))), outs, "update")
    first = tensors[0]
    if first.partial or not all(_same(x, first) for x in tensors):
        yield "update", f"its tensors must lie alike and owe no sum, and are {_text(tensors)}"
    if not step.is_replicated:
        yield "update", f"the number of steps is {step}, which no rank has whole"


def _draw(node: fx.Node) -> Found:
    if _spec(node) is not node.target.spec or _spec(node).partial:
        yield "draw", f"it draws {node.target.spec}, and the program says {_spec(node)}"


# ---- copies to host memory --------------------------------------------------------------------


def _to_host(node: fx.Node) -> Found:
    (x,) = node.args
    yield from _given_specs(node, (_spec(x),), _spec(x), "host copy")
    if [n.target for n in node.users] != [on_host]:
        yield "wait", f"one wait must follow the copy, and {_names(node.users)} read it"


def _on_host(node: fx.Node) -> Found:
    copied, x = node.args
    yield from _given_specs(node, (_spec(x),) * 2, _spec(x), "host copy")
    if copied.target is not to_host or copied.args[0] is not x:
        yield "host copy", f"it waits for a copy of {x.name}, and is given {copied.format_node() or copied.name}"
    if late := [n for n in readers(x) if node < n]:
        yield "kept", f"{x.name} is to be freed behind it, and is read by {_names(late)}"
    if [n.target for n in node.users] != [from_host]:
        fault = "fetched twice" if all(n.target is from_host for n in node.users) and node.users else "wait"
        yield (fault if node.users else "unread"), f"one copy back must follow, and there are {_names(node.users)}"


def _from_host(node: fx.Node) -> Found:
    (kept,) = node.args
    if kept.target is not on_host:
        yield "wait", f"{kept.name} is no value whose copy to host memory was waited for"
        return
    if not node.users:
        yield "unread", "it fetches what nobody reads"
    yield from _given_specs(node, (_spec(kept),), _spec(kept), "host copy")


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a value and of its views."""
    for user in node.users:
        yield user
        if is_view(user):
            yield from readers(user)


def is_view(node: fx.Node) -> bool:
    """Whether the result of an op of a program may have the memory of its operand."""
    op = node.target
    return op in AS_LOWERED or (isinstance(op, _torch.OpOverload) and _torch.is_view(op))


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(n.name for n in nodes) or "none"


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order. A node that occurs twice is listed twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _results(node: fx.Node) -> tuple[Spec | None, ...]:
    spec = _spec(node)
    return spec if isinstance(spec, tuple) else (spec,)


def _text(specs: Sequence[Spec | None]) -> str:
    return ", ".join(map(str, specs))


# ---- ops --------------------------------------------------------------------------------------

AS_LOWERED = {safe: op for op, safe in SAFE_LOCALLY.items()}

_verified = Cache(maxsize=8192, decided_by_rules=True)
"""What was found of a call with its results: the name of a fault and what is wrong, or two empty texts."""


def _op(node: fx.Node, ask_torch: bool = True) -> Found:
    key = ask_torch, described_call(node, _spec), _spec(node)
    try:
        fault, why = _verified.get(key, lambda: _op_fault(node, ask_torch))
    except TypeError:  # an argument that has no hash
        fault, why = _op_fault(node, ask_torch)
    return ((fault, why),) if fault else ()


def _op_fault(node: fx.Node, ask_torch: bool) -> tuple[str, str]:
    op, outs = node.target, _results(node)
    skips_empty = isinstance(op, UnlessEmpty)
    if skips_empty:
        if op.outs != outs:
            return "op", f"its results are {_text(op.outs)}, and the program says {_text(outs)}"
        op = op.op
    operands = [spec for spec in map(_spec, _operands(node)) if spec is not None]
    if not operands:
        whole = all(spec is None or spec.is_replicated for spec in outs)
        return ("", "") if whole else ("factory", f"every rank makes all of it, and the program says {_text(outs)}")
    if op in READS_VALUE:
        whole = all(spec.is_replicated for spec in operands)
        return ("", "") if whole else ("value", f"a number is read of {_text(operands)}, which no rank has whole")
    return _lowered_fault(node, AS_LOWERED.get(op, op), outs, skips_empty, ask_torch)


def _lowered_fault(
    node: fx.Node, op: Any, outs: tuple[Spec | None, ...], skips_empty: bool, ask_torch: bool
) -> tuple[str, str]:
    shapes: list[LocalShape] = []
    counts: list[LocalCount] = []

    def globally(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return SCALAR if _spec(x) is None else _spec(x)
        if isinstance(x, LocalShape):
            shapes.append(x)
            return list(x.spec.shape)
        if isinstance(x, LocalCount):
            counts.append(x)
            return list(x.value) if isinstance(x.value, (tuple, list)) else x.value
        return x

    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), globally)
    metadata = tuple(spec and TensorMeta(spec.shape, spec.stride, spec.dtype) for spec in outs)
    call = Call(op, args, dict(kwargs), metadata)
    if why := _size_fault(call, shapes, outs):
        return "size", why
    if why := _count_fault(call, counts, outs):
        return "count", why
    if ask_torch and (why := _metadata_fault(call, outs)):
        return "metadata", why
    why = why_not(call, outs, skips_empty)
    return ("op", f"{_text(call.tensors)} -> {_text(outs)}: {why}") if why else ("", "")


def _size_fault(call: Call, shapes: Sequence[LocalShape], outs: Sequence[Spec | None]) -> str:
    """Whether an argument that is the size of a result stands for the local size of that result."""
    rule = rule_of(call)
    sized = rule is not None and rule.sizes is not None
    want = [outs[rule.sized]] if sized else []
    have = [shape.spec for shape in shapes]
    if len(have) == len(want) and all(map(_same, have, want)):
        return ""
    return f"it is given the size of {_text(have) or 'no result'}, and its result is {_text(outs)}"


def _count_fault(call: Call, counts: Sequence[LocalCount], outs: Sequence[Spec | None]) -> str:
    """Whether the arguments that count indices of a dim stand for those of the right tensor."""
    rule = rule_of(call)
    want = rule.counts if rule is not None else None
    if want is None:
        return "it is given numbers of indices that a rank has, and its rule reads none" if counts else ""
    spec = outs[0] if want.of_result else call.tensors[0]
    given = [name for name in want.names if call[name] is not None]
    if len(counts) == len(given) and all(x.counts.dim == want.dim and _same(x.counts.spec, spec) for x in counts):
        return ""
    return f"{' and '.join(given)} must count indices of dim {want.dim} of {spec}"


def _metadata_fault(call: Call, outs: Sequence[Spec | None]) -> str:
    """Whether torch gives tensors of these shapes and dtypes."""
    have = [(spec.shape, spec.dtype) if spec else None for spec in outs]
    made = makes_with_numbers(have, call.op, call.args, dict(call.kwargs), torch.device(call.mesh.device_type))
    return "" if made else f"it does not make tensors of the shapes and dtypes of {_text(outs)}"


_FUNCTIONS: dict[Any, Callable[[fx.Node], Found]] = {
    adamw: _update, to_host: _to_host, on_host: _on_host, from_host: _from_host,
}  # fmt: skip
_CHECKS = {
    Step: _move, Bucket: _bucket, Recipe: _recipe, Draw: _draw, LocalMapOp: _local_map,
    LocalMapGradientOp: _local_map_gradient, UnlessEmpty: _op, Loop: _loop,
}  # fmt: skip
