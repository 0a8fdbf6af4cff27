"""The price of a row on one axis of the mesh: the moves that it makes, the moves that it leaves, and the work.

    linear(f32[16, 128, 256@tp], f32[1024@tp, 256])      1024 is free: a gather of 2 MB
                                                         256 is summed: an all-to-all of 1 MB, and 8 MB to be reduced

A price is in microseconds, by the links of the mesh. It has three parts:

    made    the moves of the operands: the latency of each, and the bytes that the fullest rank sends or receives
    owed    the moves that the results still need. Where the axis shards an operand, results may stay sharded: a Partial
            owes a reduce-scatter. Where it shards none, a Partial owes an all-reduce, and a shard owes its gather, so
            no op shards a tensor that nobody asked to shard. Several owed moves are often done as one, so each has
            half of the latency
    work    the share of the op that is left to the busiest rank, where the axis shards an operand, beyond the share
            that this rank has of the operands. A byte of it costs a quarter of a byte that is sent

So a dim that is needed whole gives its shards to the dim where they spread best. If that dim has size 1, one rank
receives all of the bytes and does all of the work. Where calls are so small that only latency counts, the row of the
fewest moves is the cheapest: data-parallel gradients are reduced, and activations are not gathered instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

from spmd.comm.chunk import Unit, split_unit
from spmd.mesh import MeshTopoInfo, cost
from spmd.tensor.call import Call, TensorMeta
from spmd.tensor.placement import Placement, Shard
from spmd.tensor.redistribute.all_ranks import common, interval_arrays
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import Spec

WORK = 0.25
"""The price of a byte that a rank reads or writes, in bytes that it sends."""

DELAYED = 0.5
"""The latency of a move that is owed, as a part of the latency of one that is made."""


class Price(NamedTuple):
    """The price of a row on an axis. Prices are compared field by field.

    us: microseconds. moves: how many moves, made and owed. made: how many moves, made.
    """

    forbidden: bool
    us: float
    moves: int
    made: int


FORBIDDEN = Price(True, inf, 0, 0)
FREE = Price(False, 0.0, 0, 0)


def price(call: Call, choice: Sequence[Row], axis: int, row: Row, most: float = inf) -> Price:
    """The price of a row on an axis, given the rows of the other axes. most: microseconds above which any price will
    do that is above, too: then what operands take is enough, to which the rest only adds."""
    first = call.first_use or range(len(row.ins))
    wanted = {(f, want): i for i, (f, want) in enumerate(zip(first, row.ins, strict=True))}
    made = [_Made.of(call, choice, axis, i, want) for (_, want), i in wanted.items()]
    us, steps = sum([m.us for m in made]), sum([m.steps for m in made])
    if round(us, 6) > most:
        return Price(False, round(us, 6), steps, steps)
    sharded = is_sharded(call, axis)
    owed = [_owed_us(call, choice, axis, j, p, sharded) for j, p in enumerate(row.outs) if call.outs[j]]
    us = us + sum(owed) + (_work_us(call, choice, axis, row) if sharded else 0.0)
    # Rounded: sums that are equal on paper must tie, and alike on every machine.
    return Price(False, round(us, 6), steps + sum([us > 0 for us in owed]), steps)


def is_sharded(call: Call, axis: int) -> bool:
    """Whether the axis shards some operand."""
    return any(x.on(axis).is_shard() for x in call.tensors)


def matches(spec: Spec, axis: int, want: Placement) -> bool:
    """Whether an operand has the placement that the row wants. Blocks of a shard must begin at the row's units."""
    have = spec.on(axis)
    if not (isinstance(have, Shard) and isinstance(want, Shard)):
        return have == want
    return have.dim == want.dim and spec.aligned(have.dim, want.units)


# ---- made -------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """The move of one operand on one axis. steps: 1, or 0 if it sends nothing and copies little."""

    us: float = 0.0
    steps: int = 0

    @staticmethod
    def of(call: Call, choice: Sequence[Row], axis: int, i: int, want: Placement) -> _Made:
        """An operand is moved while it is smallest: before other axes gather it, and after they slice it."""
        spec, topology = call.tensors[i], call.mesh.topology
        have = spec.on(axis)
        if matches(spec, axis, want):
            return NOT_MADE
        if want.is_partial() and have.is_replicate() and _is_long(call, spec):
            return _Made(latency_us(axis, topology), 1)  # a copy, which takes as long as the op itself
        if have.is_replicate() or (want.is_partial() and _is_alone(spec, axis)):
            return NOT_MADE
        others = [a for a, row in enumerate(choice) if a != axis and (spec.on(a).is_shard() or row.ins[i].is_shard())]
        return _sent(spec, axis, want, prod([call.mesh.shape[a] for a in others]))


@lru_cache(maxsize=4096)
def _sent(spec: Spec, axis: int, want: Placement, shards: int) -> _Made:
    """The move of an operand that other axes cut into so many shards. It is asked for again where rows of other axes
    have changed, and many ops have the same operands."""
    us = _sent_us(spec, axis, want, spec.nbytes / shards, spec.mesh.shape[axis])
    return _Made(latency_us(axis, spec.mesh.topology) + us, 1)


NOT_MADE = _Made()


def _is_long(call: Call, spec: Spec) -> bool:
    """Whether a tensor has as many bytes as the results."""
    return spec.nbytes >= sum([_nbytes(out) for out in call.outs if out is not None])


def _is_alone(spec: Spec, axis: int) -> bool:
    """Whether the axis shards a dim of which the first rank has all, such as a dim of size 1."""
    have = spec.on(axis)
    return isinstance(have, Shard) and fullest(spec.shape[have.dim], have.units, spec.mesh.shape[axis]) == 1


def _sent_us(spec: Spec, axis: int, want: Placement, nbytes: float, n: int) -> float:
    """Microseconds of the bytes that the fullest rank sends or receives, when an operand of `nbytes` is moved."""
    have, topology = spec.on(axis), spec.mesh.topology
    after = fullest(spec.shape[want.dim], want.units, n) if isinstance(want, Shard) else 1.0
    if not isinstance(have, Shard):
        if want.is_shard():
            return _bytes_us(cost.reduce_scatter_cost, n * after * nbytes, axis, topology)
        return _bytes_us(cost.all_reduce_cost, nbytes, axis, topology)
    before = fullest(spec.shape[have.dim], have.units, n)
    if not isinstance(want, Shard):
        return _bytes_us(cost.all_gather_cost, n * before * nbytes, axis, topology)
    if want.dim == have.dim:
        sent = _lacking(spec, axis, want.units) * nbytes
    else:
        sent = max(after * (1 - before), before * (1 - after)) * nbytes
    return _bytes_us(cost.all_to_all_cost, sent * n / (n - 1), axis, topology)


@lru_cache(maxsize=4096)
def fullest(size: int, unit: Unit, n: int) -> float:
    """The share of a dim that the fullest of n ranks has.

    >>> fullest(8, 1, 4), fullest(5, 1, 4), fullest(1, 1, 4), fullest(30, 5, 4)
    (0.25, 0.4, 1.0, 0.3333333333333333)
    """
    blocks, inner = split_unit(unit)
    length = size // blocks
    units = length // inner if inner and length % inner == 0 else length
    return -(-units // n) / units if units else 1.0


def _lacking(spec: Spec, axis: int, unit: Unit) -> float:
    """The share of a dim that the busiest rank lacks, when its blocks must begin at multiples of another unit."""
    have = spec.on(axis)
    size, n = spec.shape[have.dim], (spec.mesh.shape[axis],)
    held, wanted = [interval_arrays(size, each, (0,), n) for each in (have.units, unit)]
    return float((wanted.lengths() - common(held, wanted)).max()) / size


# ---- owed -------------------------------------------------------------------------------------


def _owed_us(call: Call, choice: Sequence[Row], axis: int, j: int, placement: Placement, sharded: bool) -> float:
    """Microseconds of the bytes of the move that a result owes."""
    if placement.is_replicate() or (placement.is_shard() and sharded):
        return 0.0
    shards = prod(call.mesh.shape[a] for a, row in enumerate(choice) if a != axis and row.outs[j].is_shard())
    nbytes, topology = _nbytes(call.outs[j]) / shards, call.mesh.topology
    reduction = cost.reduce_scatter_cost if sharded else cost.all_reduce_cost
    collective = cost.all_gather_cost if placement.is_shard() else reduction
    return DELAYED * latency_us(axis, topology) + _bytes_us(collective, nbytes, axis, topology)


# ---- work -------------------------------------------------------------------------------------


def _work_us(call: Call, choice: Sequence[Row], axis: int, row: Row) -> float:
    """Microseconds that the busiest rank of the axis reads and writes, beyond its share of the operands as they are."""
    n = call.mesh.shape[axis]
    before = min([fullest(x.shape[p.dim], p.units, n) for x in call.tensors if isinstance(p := x.on(axis), Shard)])
    if (excess := share(call, axis, row) - before) <= 0:
        return 0.0
    nbytes = sum([x.nbytes for x in call.tensors]) + sum([_nbytes(out) for out in call.outs if out is not None])
    others = prod(call.mesh.shape[a] for a, other in enumerate(choice) if a != axis and other.factor is not None)
    return _bytes_us(cost.all_gather_cost, WORK * excess * nbytes / others, axis, call.mesh.topology)


def share(call: Call, axis: int, row: Row) -> float:
    """The share of the work of an op that the busiest rank of an axis does, if the op runs by this row.

    It is the share that the rank has of the tensor of which it has least.
    """
    n = call.mesh.shape[axis]
    tensors = [*zip(call.tensors, row.ins, strict=True), *zip(call.outs, row.outs, strict=True)]
    return min([fullest(x.shape[p.dim], p.units, n) for x, p in tensors if isinstance(p, Shard) and x], default=1.0)


def leaves_all_to_one(call: Call, axis: int, row: Row) -> bool:
    """Whether the ranks of an axis share the largest operand, and by this row some rank does all of the work.

    An operand whose bytes take less time than the latency of a move is left out: nothing is lost by it.
    """
    largest, topology = max(call.tensors, key=lambda x: x.nbytes), call.mesh.topology
    have = largest.on(axis)
    if not isinstance(have, Shard) or fullest(largest.shape[have.dim], have.units, call.mesh.shape[axis]) == 1:
        return False
    counts = _bytes_us(cost.all_gather_cost, largest.nbytes, axis, topology) > latency_us(axis, topology)
    return counts and share(call, axis, row) == 1


# ---- links ------------------------------------------------------------------------------------


def latency_us(axis: int, topology: MeshTopoInfo) -> float:
    """Microseconds that a move takes though it sends no bytes."""
    return cost.all_gather_cost(0, axis, topology)


def _bytes_us(collective: Callable[..., float], nbytes: float, axis: int, topology: MeshTopoInfo) -> float:
    """Microseconds that the bytes of a collective take, without its latency."""
    return collective(nbytes, axis, topology) - collective(0, axis, topology)


def _nbytes(out: TensorMeta) -> int:
    return prod(out.shape) * out.dtype.itemsize
