"""Packed shards that follow from the graph: where a value is cut into equal blocks of a dim, or made of them.

    q, k, v = (x @ w).split(1024, -1)      3072 is 3 blocks of 1024, and f32[512, 3x1024@tp] is a layout of the product

The weight, the product and the gradient may be packed then, as they may where the user packs the weight. Nothing else
says so: the rule of a split has its dim whole, unless what it is given is packed (`tensor/rules/movement.py`). So the
rule is asked once more, for operands in blocks. Blocks are found by sizes and rules, and not by names of ops. Only dims
of a size that something given has, such as a weight, are packed: halves that are turned, as by a rotary embedding, are
cut where nothing is stored.

A view makes dims and cuts nothing: heads are no blocks of a weight. But where the new dim is taken apart afterwards, as
`x.view(..., 3, 1024).unbind(-2)` does, the view has cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import gcd, prod
from typing import Protocol

from torch import fx

from spmd import _torch
from spmd.expand.choose.choice import Packing
from spmd.tensor.call import Call
from spmd.tensor.placement import REPLICATE, Placement, Shard
from spmd.tensor.rules.families import groups
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import Spec, placed

FAR = 8
"""Views, transpositions and copies between a view and what takes its new dim apart."""


class Asked(Protocol):
    """An op with its rule: its node and operands, its call on replicated operands, and the rows of its rule."""

    operands: list[fx.Node]
    call: Call
    rows: Sequence[Row]

    @property
    def node(self) -> fx.Node: ...


Ask = Callable[..., tuple[Call, Sequence[Row]]]
"""The call of a node for these specs of its operands, and the rows of its rule (`Choosers.call`)."""


def packings_of(asked: Iterable[Asked], ask: Ask, sizes: Collection[int], shortest: int) -> list[Packing]:
    """How ops cut dims of these sizes into blocks that are at least so long."""
    block: dict[int, int] = {}
    for op in asked:
        for size, length in _cuts(op, ask, sizes):
            block[size] = gcd(block.get(size, 0), length)
    return [Packing(size, size // length) for size, length in block.items() if shortest <= length < size]


def _cuts(op: Asked, ask: Ask, sizes: Collection[int]) -> Iterator[tuple[int, int]]:
    """The sizes of dims that an op cuts or joins, of these sizes, with the length of the blocks."""
    shapes = _shapes(op.call)
    first, made = shapes[0], shapes[len(op.call.tensors)]
    is_taken_apart = made is not None and len(made) > len(first) and prod(made) == prod(first)  # no `expand`
    if _torch.is_view(op.call.op) and is_taken_apart:
        yield from [each for each in _cuts_of_view(op.node, first, made, ask) if each[0] in sizes]
        return
    for d in range(len(first)):
        lengths = {shape[d] for shape in shapes if shape is not None and len(shape) == len(first)}
        size = max(lengths)
        if len(lengths) > 1 and size in sizes and 0 not in lengths and _is_whole(op, size, d):
            yield size, gcd(*lengths)


def _shapes(call: Call) -> list[tuple[int, ...] | None]:
    """The shapes of operands and results; None for a result that is no tensor."""
    return [*[tuple(x.shape) for x in call.tensors], *[None if x is None else tuple(x.shape) for x in call.outs]]


def _is_whole(op: Asked, size: int, d: int | None = None) -> bool:
    """Whether some tensor has a dim of this size, or its dim d, that no row shards as one."""
    return any(
        n == size and d in (None, k) and all((*row.ins, *row.outs)[i] != Shard(k) for row in op.rows)
        for i, shape in enumerate(_shapes(op.call)) for k, n in enumerate(shape or ())
    )  # fmt: skip


# ---- views ------------------------------------------------------------------------------------


def _cuts_of_view(node: fx.Node, src: tuple[int, ...], dst: tuple[int, ...], ask: Ask) -> Iterator[tuple[int, int]]:
    """The dims that a view splits up whose outermost part is taken apart."""
    for left, right in groups(src, dst):
        long = [d for d in right if dst[d] != 1]
        if len(left) == 1 and len(long) > 1 and _is_taken_apart(node, long[0], ask, FAR):
            yield src[left[0]], src[left[0]] // dst[long[0]]


def _is_taken_apart(value: fx.Node, d: int, ask: Ask, far: int) -> bool:
    """Whether an op takes indices of a dim, right after the value or after views of it."""
    return far > 0 and any(_takes_apart(reader, value, d, ask, far) for reader in value.users)


def _takes_apart(reader: fx.Node, value: fx.Node, d: int, ask: Ask, far: int) -> bool:
    if not isinstance(reader.target, _torch.OpOverload) or len(reader.all_input_nodes) != 1:
        return False
    call, rows = ask(reader)
    outs = [row.outs[0] for row in rows if row.ins[0] == Shard(d)]
    if not outs:
        shape = value.meta["val"].shape
        return _torch.is_view(call.op) and all(x is not None and _has_some(x.shape, shape, d) for x in call.outs)
    return isinstance(outs[0], Shard) and _is_taken_apart(reader, outs[0].dim, ask, far - 1)


def _has_some(part: Sequence[int], whole: Sequence[int], d: int) -> bool:
    """Whether this is the shape of a tensor without a dim, or with some indices of it."""
    before, after = list(whole[:d]), list(whole[d + 1 :])
    return list(part) in [before + after, *[[*before, k, *after] for k in range(1, whole[d])]]


# ---- rows -------------------------------------------------------------------------------------


def in_blocks(op: Asked, packing: Packing) -> Iterator[tuple[Placement, ...]]:
    """How the operands of an op may be shards of blocks, where its rule has a dim of this size whole. What a view joins
    may be sharded by any of its dims, such as the heads of q, k and v."""
    length, tensors, made = packing.size // packing.blocks, op.call.tensors, op.call.outs[0]
    joins = len(tensors) == 1 and made is not None and len(made.shape) < tensors[0].ndim
    for d in range(max([x.ndim for x in tensors])) if _is_whole(op, packing.size) else ():
        cut = [d < x.ndim and x.shape[d] > 0 and x.shape[d] % length == 0 for x in tensors]
        if any(cut):
            pairs = zip(tensors, cut, strict=True)
            yield tuple(Shard(d, blocks=x.shape[d] // length) if is_cut else REPLICATE for x, is_cut in pairs)
        elif joins:
            yield (Shard(d),)


def rows_of_blocks(op: Asked, ins: tuple[Placement, ...], packing: Packing, axis: int, ask: Ask) -> list[Row]:
    """The rows with packed shards that the rule of an op has for operands that lie so on an axis."""
    of = zip(op.operands, op.call.tensors, ins, strict=True)
    given = {n: _on(spec, p, axis) for n, spec, p in of}
    return [row for row in ask(op.node, given)[1] if packs(row, op.call, packing)]


def _on(spec: Spec, p: Placement, axis: int) -> Spec:
    return placed(spec, [p if a == axis else REPLICATE for a in range(spec.mesh.ndim)])


def packs(row: Row, call: Call, packing: Packing) -> bool:
    """Whether a row shards a dim that is packed so."""
    placements: tuple[Placement, ...] = (*row.ins, *row.outs)
    return any(
        isinstance(p, Shard) and shape is not None and (shape[p.dim], p.blocks) == (packing.size, packing.blocks)
        for p, shape in zip(placements, _shapes(call), strict=True)
    )
