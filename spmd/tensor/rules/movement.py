"""Rules of ops that rearrange or copy elements. Most say, for each dim of the result, which dim of the operand it is.

    permuted(call of permute(x, [2, 0, 1]), 3)     [2, 0, 1]
    unsqueezed(call of unsqueeze(x, 1), 2)         [0, None, 1]     a new dim
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from spmd import _torch
from spmd.comm.chunk import split_unit
from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.families import broadcast, dims_whole, pointwise, rearranged, reshaped
from spmd.tensor.rules.index_counts import place_within
from spmd.tensor.rules.laws import COPIES, COPIES_FROM_ALL, FILLS_CONSTANT, FILLS_ZERO, REPLACES
from spmd.tensor.rules.networks import is_zero
from spmd.tensor.rules.rule import CountArguments, Dims, Factor, Rule, laws
from spmd.tensor.spec import Spec

# ---- sources: which dim of the operand each dim of the result is ------------------------------


def permuted(call: Call, n: int) -> list:
    return [d % n for d in call["dims"]]


def transposed(call: Call, n: int) -> list:
    sources = list(range(n))
    if n:
        a, b = call["dim0"], call["dim1"]
        sources[a], sources[b] = sources[b], sources[a]
    return sources


def reversed_dims(call: Call, n: int) -> list:
    return list(range(n))[::-1]


def unsqueezed(call: Call, n: int) -> list:
    d = call["dim"] % (n + 1)
    return [*range(d), None, *range(d, n)]


def without_dim(call: Call, n: int) -> list:
    (dropped,) = dims_of(call["dim"], n)
    return [d for d in range(n) if d != dropped]


def with_dim_whole(call: Call, n: int) -> list:
    whole = dims_of(call["dim"], n)
    return [None if d in whole else d for d in range(n)]


def diagonal(call: Call, n: int) -> list:
    return [*_kept_by_diagonal(call, n), None]


def _kept_by_diagonal(call: Call, n: int) -> list[int]:
    """The dims of a tensor of n dims that its diagonal keeps, in order: all except `dim1` and `dim2`."""
    return [d for d in range(n) if d not in (call["dim1"] % n, call["dim2"] % n)]


# ---- rules ------------------------------------------------------------------------------------


def squeezed(call: Call) -> Rule | None:
    """`squeeze.dims` drops the dims of size 1. `squeeze` without dims would drop the dims of *local* size 1: no rule.

    A dim that is named but is longer than 1 is whole, because its local size may be 1.
    """
    if _torch.overload_name(call.op) != "dims":
        return None
    x = call.tensors[0]
    dims = tuple(d % x.ndim for d in call["dim"]) if x.ndim else ()  # here [] names none
    dropped = [d for d in dims if x.shape[d] == 1]
    return rearranged(call, lambda n: [None if d in dims else d for d in range(n) if d not in dropped])


def sliced(call: Call) -> Rule:
    """The dim is whole. If the slice takes all of the dim, or blocks of a packed dim, each rank takes of its shard.

    A sharded dim is packed for it: of the third of 8 equal parts each rank takes its share where it has a share of each
    part, `Shard(0, blocks=8)`. Of every 8th index each rank takes of its shard, if that has all 8 of each.
    """
    if _takes_all(call):
        return pointwise(call, COPIES)
    x = call.tensors[0]
    d = call["dim"] % x.ndim
    dims = tuple(map(Factor, range(x.ndim)))
    if _takes_one_of_each(call, x, d):
        return Rule((_with(dims, d, Factor(d, call["step"])),), (dims,), laws=COPIES)
    blocks = split_unit(x.units[d])[0]
    taken = blocks_between(x.shape[d], blocks, call["start"], call["end"], call["step"])
    if not taken and (blocks := _parts(x, d, call.outs[0].shape[d])) > 1:
        taken = blocks_between(x.shape[d], blocks, call["start"], call["end"], call["step"])
        dims = _where_they_are(x, dims)
    if not taken:
        return rearranged(call, lambda n: with_dim_whole(call, n))
    ends = CountArguments(("start", "end"), d)
    return Rule((of_blocks(dims, d, blocks),), (of_blocks(dims, d, taken),), laws=COPIES, counts=ends)


def _parts(x: Spec, d: int, length: int) -> int:
    """How many parts of a length a dim has, if each rank that shards it may have some of each part; else 1."""
    return x.shape[d] // length if x.dims[d] and length >= ranks_of(x, d) and x.shape[d] % length == 0 else 1


def ranks_of(x: Spec, d: int) -> int:
    """How many ranks share a dim."""
    return prod(x.mesh.shape[axis] for axis in x.dims[d])


def _where_they_are(x: Spec, dims: Dims) -> Dims:
    """The factors of dims that are sharded: rows that are packed to be cut stay with the ranks that have rows."""
    return tuple([factor if axes else None for factor, axes in zip(dims, x.dims, strict=True)])


def _takes_one_of_each(call: Call, x: Spec, d: int) -> bool:
    """Whether a slice takes one of each `step` indices of a sharded dim, from the first ones to the last."""
    start, end, step = call["start"] or 0, call["end"], call["step"]
    whole = end is None or (type(end) is int and end >= x.shape[d])
    cut = type(step) is int and type(start) is int and 0 <= start < step and x.shape[d] % step == 0
    return bool(x.dims[d]) and step > 1 and whole and cut


def _takes_all(call: Call) -> bool:
    start, end, step = call["start"], call["end"], call["step"]
    size = call.tensors[0].shape[call["dim"]]
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= size)) and step == 1


def blocks_between(size: int, blocks: int, start: int | None, end: int | None, step: int) -> int:
    """How many of the blocks of a dim a slice takes; 0 where it cuts through one, or the dim is one block.

    >>> blocks_between(12, 3, 4, None, 1), blocks_between(12, 3, 4, 10, 1)
    (2, 0)
    """
    given = [x for x in (start, end) if x is not None]
    if blocks == 1 or step != 1 or not all(type(x) is int for x in given):
        return 0
    first, last = place_within(start or 0, size), size if end is None else place_within(end, size)
    period = size // blocks
    return max(0, last - first) // period if first % period == last % period == 0 else 0


def of_blocks(dims: Dims, d: int, blocks: int) -> Dims:
    """The dims, with the factor of dim d so many times in it."""
    return _with(dims, d, Factor(dims[d].name, 1, blocks))


def _with(dims: Dims, d: int, factor: Factor) -> Dims:
    return (*dims[:d], factor, *dims[d + 1 :])


def divided(call: Call) -> Rule:
    """`split_with_sizes`: the dim is whole, except where every part is some blocks of a packed dim.

    A sharded dim may be packed for it.
    """
    x, sizes = call.tensors[0], call["split_sizes"]
    d = call["dim"] % x.ndim
    blocks = split_unit(x.units[d])[0]
    dims = tuple(map(Factor, range(x.ndim)))
    if blocks == 1 or not _are_blocks(sizes, x.shape[d] // blocks):
        blocks = _parts(x, d, gcd(*sizes)) if all(type(n) is int and n for n in sizes) else 1
        dims = _where_they_are(x, dims)
    if blocks == 1:
        return rearranged(call, lambda n: with_dim_whole(call, n))
    outs = tuple(of_blocks(dims, d, n * blocks // x.shape[d]) for n in sizes)
    return Rule((of_blocks(dims, d, blocks),), outs, laws=COPIES, counts=CountArguments(("split_sizes",), d))


def _are_blocks(sizes: Sequence, length: int) -> bool:
    return all(type(n) is int and n and n % length == 0 for n in sizes)


def slice_gradient(call: Call) -> Rule:
    """The gradient of slice and select: zeros of the input's shape, with the gradient in the selected place.

    The dim is whole, except where the gradient of a slice is sharded, and is as long as one or more blocks of the
    result of which each is sharded so. Then the result is packed.
    """
    grad, n = call.tensors[0], len(call.outs[0].shape)
    (d,) = dims_of(call["dim"], n)
    out, counts = tuple(map(Factor, range(n))), None
    if grad.ndim == n and (blocks := _blocks_of_gradient(call, d)):
        counts = CountArguments(("start", "end"), d, of_result=True)
        given, out = of_blocks(out, d, split_unit(grad.units[d])[0]), of_blocks(out, d, blocks)
    else:
        out = (*out[:d], None, *out[d + 1 :])
        given = out if grad.ndim == n else out[:d] + out[d + 1 :]
    return Rule((given,), (out,), laws=COPIES, sizes="input_sizes", counts=counts)  # zero is its own sum, max, product


def _blocks_of_gradient(call: Call, d: int) -> int:
    """Of how many blocks the result is, each as long as one block of the sharded gradient of a slice; 0 if of none."""
    grad, size = call.tensors[0], call.outs[0].shape[d]
    if not grad.dims[d] or not grad.shape[d]:
        return 0
    period = grad.shape[d] // split_unit(grad.units[d])[0]
    if size % period or not blocks_between(size, size // period, call["start"], call["end"], call["step"]):
        return 0
    return size // period


def diagonal_of(call: Call) -> Rule:
    """`diag_embed`: zeros, with the last dim of the operand on a diagonal of two new dims."""
    return Rule(*_diagonal_dims(call), laws=COPIES)


def diagonal_gradient(call: Call) -> Rule:
    """The gradient of `diagonal`: as `diag_embed`, but an argument gives the shape of the result."""
    return Rule(*_diagonal_dims(call), laws=COPIES, sizes="input_sizes")


def diagonal_replaced(call: Call) -> Rule:
    """`diagonal_scatter`: the two dims of the diagonal are whole."""
    (ins,), out = _diagonal_dims(call)
    return Rule((out[0], ins), out, laws=REPLACES)


def _diagonal_dims(call: Call):
    """The dims of an operand that is put on a diagonal, and of the result. All other dims are tied."""
    n = len(call.outs[0].shape)
    kept = _kept_by_diagonal(call, n)
    out = tuple(Factor(d) if d in kept else None for d in range(n))
    return ((*map(Factor, kept), None),), (out,)


def viewed(call: Call) -> Rule | None:
    """`view.dtype` reinterprets bits and has no rule."""
    if call["dtype"] is not None:
        return None
    return reshaped(call, "shape" if call.name == "reshape" else "size")


def expanded(call: Call) -> Rule:
    """The dims that are not broadcast are free."""
    shape = call.outs[0].shape
    ins = broadcast(call.tensors[0].shape, shape)
    kept = {f.name for f in ins if f}
    out = tuple(Factor(d) if d in kept else None for d in range(len(shape)))
    return Rule((ins,), (out,), laws=COPIES, sizes="size")


def repeated(call: Call) -> Rule:
    """The dims that are repeated once are free."""
    repeats, n = call["repeats"], call.tensors[0].ndim
    out = tuple(Factor(d) if r == 1 and d >= len(repeats) - n else None for d, r in enumerate(repeats))
    return Rule((out[len(repeats) - n :],), (out,), laws=COPIES)


def rolled(call: Call) -> Rule:
    """The rolled dims are whole. Without dims the tensor is rolled as if it were flat, and all dims are whole."""
    whole = dims_of(call["dims"], call.tensors[0].ndim)
    return dims_whole(call, whole, COPIES)


def padded(call: Call) -> Rule:
    """The padded dims are whole. `pad` has two numbers for each dim, before and after it, starting at the last dim."""
    pad, n = call["pad"], call.tensors[0].ndim
    whole = [n - 1 - i // 2 for i, p in enumerate(pad) if not is_zero(p)]
    return dims_whole(call, whole, FILLS_ZERO if is_zero(call["value"]) else FILLS_CONSTANT)


def concatenated(call: Call) -> Rule:
    """The dim along which tensors are concatenated is whole.

    torch skips an empty 1-D tensor among tensors of more dims, as every cache of `transformers` begins with one. It
    has no factor, so it does not tie the dims of the others.
    """
    n = len(call.outs[0].shape)
    skipped = [x.ndim != n for x in call.tensors]
    whole = dims_of(call["dim"], n) if skipped.count(False) > 1 else ()  # else it is a copy of the one that is left
    out = tuple(None if d in whole else Factor(d) for d in range(n))
    law = COPIES_FROM_ALL
    if any(skipped):
        law = laws(f"sum avg max min product: {' '.join('r' if skip else 'p' for skip in skipped)} -> p")
    elif whole and n and (blocks := _blocks_joined(call, *whole)):
        out = tuple(map(Factor, range(n)))
        ins = tuple(of_blocks(out, *whole, k) for k in blocks)
        return Rule(ins, (of_blocks(out, *whole, sum(blocks)),), laws=law)
    return Rule(tuple((None,) if skip else out for skip in skipped), (out,), laws=law)


def _blocks_joined(call: Call, d: int) -> list[int]:
    """Of how many blocks each of the tensors is that are concatenated along a dim; empty if of none.

    A block is what the tensors that are sharded along the dim consist of. They must all be sharded alike, and all
    tensors must have whole blocks.
    """
    units = [split_unit(x.units[d]) for x in call.tensors]
    cuts = {(x.dims[d], unit, x.shape[d] // n) for x, (n, unit) in zip(call.tensors, units, strict=True) if x.dims[d]}
    if len(cuts) != 1:
        return []
    ((_, _, period),) = cuts
    blocks = [x.shape[d] // period if period else 0 for x in call.tensors]
    return blocks if all(n and n * period == x.shape[d] for n, x in zip(blocks, call.tensors, strict=True)) else []


def stacked(call: Call) -> Rule:
    n = len(call.outs[0].shape)
    new = call["dim"] % n
    out = tuple(None if d == new else Factor(d) for d in range(n))
    return Rule((out[:new] + out[new + 1 :],) * len(call.tensors), (out,), laws=COPIES_FROM_ALL)
