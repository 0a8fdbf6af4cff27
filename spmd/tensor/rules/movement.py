"""Rows that move elements: for each dim of the result, the dim of the operand that it shows."""

from __future__ import annotations

from spmd import _torch
from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.families import all_whole, broadcast, dims_whole, moved, pointwise, reshaped
from spmd.tensor.rules.laws import FILLS, FILLS_ZERO, MOVES, MOVES_ALL
from spmd.tensor.rules.networks import is_zero
from spmd.tensor.rules.rule import Factor, Rule

# ---- sources: which dim of the operand each dim of the result shows ---------------------------


def permuted(call: Call, n: int) -> list:
    return [d % n for d in call["dims"]]


def transposed(call: Call, n: int) -> list:
    shown = list(range(n))
    if n:
        a, b = call["dim0"], call["dim1"]
        shown[a], shown[b] = shown[b], shown[a]
    return shown


def reversed_dims(call: Call, n: int) -> list:
    return list(range(n))[::-1]


def unsqueezed(call: Call, n: int) -> list:
    d = call["dim"] % (n + 1)
    return [*range(d), None, *range(d, n)]


def without_dim(call: Call, n: int) -> list:
    (gone,) = dims_of(call["dim"], n)
    return [d for d in range(n) if d != gone]


def with_dim_whole(call: Call, n: int) -> list:
    shut = dims_of(call["dim"], n)
    return [None if d in shut else d for d in range(n)]


def diagonal(call: Call, n: int) -> list:
    return [*_off_diagonal(call, n), None]


def _off_diagonal(call: Call, n: int) -> list[int]:
    """The dims of a tensor of n dims that its diagonal keeps, in order."""
    return [d for d in range(n) if d not in (call["dim1"] % n, call["dim2"] % n)]


# ---- rules ------------------------------------------------------------------------------------


def squeezed(call: Call) -> Rule | None:
    """`squeeze.dims` drops dims of size 1. Without dims it would drop those whose *local* size is 1.

    The same holds for a dim that is named but longer, so it is whole.
    """
    if _torch.overload_name(call.op) != "dims":
        return None
    x = call.tensors[0]
    dims = tuple(d % x.ndim for d in call["dim"]) if x.ndim else ()  # here [] names none
    dropped = [d for d in dims if x.shape[d] == 1]
    return moved(call, lambda n: [None if d in dims else d for d in range(n) if d not in dropped])


def sliced(call: Call) -> Rule:
    """The dim is whole; a slice that takes all of it takes all of every shard."""
    return pointwise(call, MOVES) if _takes_all(call) else moved(call, lambda n: with_dim_whole(call, n))


def _takes_all(call: Call) -> bool:
    start, end, step = call["start"], call["end"], call["step"]
    size = call.tensors[0].shape[call["dim"]]
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= size)) and step == 1


def put_back(call: Call) -> Rule:
    """The gradient of slice and select: zeros of the input's shape, with the gradient in its place."""
    shown = len(call.outs[0].shape)
    (shut,) = dims_of(call["dim"], shown)
    out = tuple(None if d == shut else Factor(d) for d in range(shown))
    grad = out if call.tensors[0].ndim == shown else out[:shut] + out[shut + 1 :]
    return Rule((grad,), (out,), laws=MOVES, sizes="input_sizes")  # zero is its own sum, max and product


def diagonal_of(call: Call) -> Rule:
    """`diag_embed`: zeros with the last dim on a diagonal of two new ones."""
    return Rule(*_on_diagonal(call), laws=MOVES)


def diagonal_put_back(call: Call) -> Rule:
    """The gradient of `diagonal`: the same, in a shape that is given."""
    return Rule(*_on_diagonal(call), laws=MOVES, sizes="input_sizes")


def _on_diagonal(call: Call):
    """What is put on a diagonal keeps its other dims."""
    n = len(call.outs[0].shape)
    kept = _off_diagonal(call, n)
    out = tuple(Factor(d) if d in kept else None for d in range(n))
    return ((*map(Factor, kept), None),), (out,)


def viewed(call: Call) -> Rule | None:
    """`view.dtype` reads bits: no rule."""
    if call["dtype"] is not None:
        return None
    return reshaped(call, "shape" if call.name == "reshape" else "size")


def expanded(call: Call) -> Rule:
    """Dims that are not stretched are free."""
    shape = call.outs[0].shape
    ins = broadcast(call.tensors[0].shape, shape)
    kept = {f.name for f in ins if f}
    return Rule((ins,), (tuple(Factor(d) if d in kept else None for d in range(len(shape))),), laws=MOVES, sizes="size")


def repeated(call: Call) -> Rule:
    """Dims that are repeated once are free."""
    repeats, n = call["repeats"], call.tensors[0].ndim
    out = tuple(Factor(d) if r == 1 and d >= len(repeats) - n else None for d, r in enumerate(repeats))
    return Rule((out[len(repeats) - n :],), (out,), laws=MOVES)


def rolled(call: Call) -> Rule:
    """Without dims the tensor is rolled as if it were flat."""
    shut = dims_of(call["dims"], call.tensors[0].ndim)
    return dims_whole(call, shut, MOVES)


def padded(call: Call) -> Rule:
    """The padded dims are whole. `pad` counts them from the last: before, after."""
    pad, n = call["pad"], call.tensors[0].ndim
    shut = [n - 1 - i // 2 for i, p in enumerate(pad) if not is_zero(p)]
    return dims_whole(call, shut, FILLS_ZERO if is_zero(call["value"]) else FILLS)


def joined(call: Call) -> Rule:
    """The dim along which tensors are joined is whole. An empty 1-D tensor among others is skipped by torch."""
    n = len(call.outs[0].shape)
    if any(x.ndim != n for x in call.tensors):
        return all_whole(call)
    return dims_whole(call, dims_of(call["dim"], n), MOVES_ALL)


def stacked(call: Call) -> Rule:
    n = len(call.outs[0].shape)
    new = call["dim"] % n
    out = tuple(None if d == new else Factor(d) for d in range(n))
    return Rule((out[:new] + out[new + 1 :],) * len(call.tensors), (out,), laws=MOVES_ALL)
