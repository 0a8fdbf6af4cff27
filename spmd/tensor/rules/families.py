"""The families of rules: one short function each, named for the reason its ops belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.laws import MOVES, UNREAD
from spmd.tensor.rules.rule import Dims, Factor, Law, Rule


def named(*names) -> Dims:
    """Dims from factor names; None stays None."""
    return tuple(None if n is None else Factor(n) for n in names)


def whole(ndim: int) -> Dims:
    return (None,) * ndim


# ---- contraction ------------------------------------------------------------------------------


def contraction(call: Call, equation: str, law: tuple[Law, ...] = ()) -> Rule:
    """A fixed-rank op written as an einsum: `m k, k n -> m n`; `_` is a whole dim."""
    ins, outs = (tuple(_read(t) for t in side.split(",")) for side in equation.split("->"))
    return Rule(ins[: len(call.tensors)], outs, "sum", law)


def _read(text: str) -> Dims:
    return named(*(None if f == "_" else f for f in text.split()))


def by_name(call: Call, ins: dict[str, Dims], outs: Sequence[Dims | None], added: str = "", **options) -> Rule:
    """A rule whose operands are given by argument name; operands and results that are None are left out.

    An operand that is not listed is whole. added: the one to which the rest is added.
    """
    given = tuple(ins.get(name, whole(x.ndim)) for name, x in call.named_tensors)
    kept = tuple(dims if meta is not None else None for dims, meta in zip(outs, call.outs, strict=True))
    to = frozenset(i for i, (name, _) in enumerate(call.named_tensors) if name == added)
    return Rule(given, kept, added=to, **options)


# ---- pointwise --------------------------------------------------------------------------------


def pointwise(call: Call, law: tuple[Law, ...] = ()) -> Rule | None:
    """Every dim of the result is free; an operand that is stretched has no tie there.

    No rule for a result of another shape than the operands': that op is not pointwise.
    """
    shape = call.outs[0].shape if call.outs[0] is not None else None
    if shape != tuple(torch.broadcast_shapes(*(x.shape for x in call.tensors))):
        return None
    return Rule(
        tuple(broadcast(x.shape, shape) for x in call.tensors),
        tuple(None if o is None else broadcast(o.shape, shape) for o in call.outs),
        laws=law,
    )


def like(call: Call) -> Rule | None:
    """A new tensor of the operand's shape, whose values are not read: zeros_like, fill."""
    return pointwise(call, UNREAD)


def new(call: Call) -> Rule:
    """A new tensor of any shape. Nothing of the operand is read, so a result of another shape is the same
    on every rank, however the operand lies."""
    x, out = call.tensors[0].shape, call.outs[0].shape
    dims = tuple(map(Factor, range(len(x))))
    return Rule((dims,), (dims if x == out else None,), "sum", UNREAD, sizes="size")


def broadcast(shape: Sequence[int], to: Sequence[int]) -> Dims:
    """Factors of a tensor of `shape` broadcast to `to`: one per dim, none where it is stretched.

    >>> broadcast((1, 4), (2, 3, 4))
    (None, 2)
    """
    lead = len(to) - len(shape)
    return tuple(Factor(lead + d) if n == to[lead + d] else None for d, n in enumerate(shape))


# ---- reduction --------------------------------------------------------------------------------


def reduction(call: Call, kind: str | None = None, law: tuple[Law, ...] = (), nonempty: bool = False) -> Rule:
    """The dims that `dim` names are summed to a Partial of this kind; whole when there is none.

    `nonempty`: the reduction of nothing is an error, so no rank may be left without an element.
    """
    n = call.tensors[0].ndim
    if (kind, call.outs[0].dtype) == ("sum", torch.bool) or (kind == "product" and call.outs[0].dtype.is_complex):
        kind = None  # there is no sum of bools, and no backend for products of complex numbers
    gone = dims_of(call["dim"], n)
    kept = [d for d in range(n) if d not in gone]
    ins = tuple(Factor(d) if d in kept or kind else None for d in range(n))
    outs = tuple(
        tuple(Factor(d) if d in kept else None for d in range(n)) if len(o.shape) == n else named(*kept)
        for o in call.outs
    )
    return Rule((ins,), outs, kind, law, nonempty=frozenset(gone if kind and nonempty else ()))


# ---- some dims whole --------------------------------------------------------------------------


def dims_whole(call: Call, shut: Sequence[int], law: tuple[Law, ...] = ()) -> Rule:
    """These dims are whole, all others free, in every operand and result of the first operand's rank."""
    n = call.tensors[0].ndim

    def free(ndim: int) -> Dims:
        return tuple(None if d in shut else Factor(d) for d in range(n)) if ndim == n else whole(ndim)

    outs = tuple(None if o is None else free(len(o.shape)) for o in call.outs)
    return Rule(tuple(free(x.ndim) for x in call.tensors), outs, None, law)


def all_whole(call: Call) -> Rule:
    """No dim is free: every operand is replicated."""
    outs = tuple(None if o is None else whole(len(o.shape)) for o in call.outs)
    return Rule(tuple(whole(x.ndim) for x in call.tensors), outs)


def one_dim_whole(call: Call, arg: str = "dim", law: tuple[Law, ...] = ()) -> Rule:
    """The dim (or dims) that `arg` names is whole: softmax, cumsum, sort."""
    return dims_whole(call, dims_of(call[arg], call.tensors[0].ndim), law)


def last_dims_whole(call: Call, last: int, law: tuple[Law, ...] = ()) -> Rule:
    """The last few dims are whole: triu, pooling."""
    n = call.tensors[0].ndim
    return dims_whole(call, range(n - last, n), law)


# ---- movement ---------------------------------------------------------------------------------


def moved(call: Call, source: Callable[[int], Sequence[int | None]]) -> Rule:
    """A rearrangement: `source(ndim)` lists, for each dim of the result, the input dim it shows."""
    n = call.tensors[0].ndim
    shown = source(n)
    ins = tuple(Factor(d) if d in shown else None for d in range(n))
    return Rule((ins,), (named(*shown),) * len(call.outs), None, MOVES)


def reshaped(call: Call, sizes: str = "size") -> Rule:
    """A view: runs of dims with equal products form a group, tied by the leading dim of each side.

    The leading dims of a group share gcd(n, m) blocks of rows; a shard boundary must fall on one of them, which
    the units of the factor say.
    """
    src, dst = call.tensors[0].shape, call.outs[0].shape
    ins, outs = list(whole(len(src))), list(whole(len(dst)))
    for left, right in groups(src, dst):
        p = next((d for d in left if src[d] != 1), None)
        q = next((d for d in right if dst[d] != 1), None)
        if p is None or q is None:
            continue
        unit_in, unit_out = _units(src, left, p, dst, right, q)
        ins[p], outs[q] = Factor(p, unit_in), Factor(p, unit_out)
    return Rule((tuple(ins),), (tuple(outs),), None, MOVES, sizes=sizes)


def _units(src, left, p, dst, right, q) -> tuple[int, int]:
    """How many rows of each side's leading dim make one common block.

    A row of dim p has `inner` elements; a block is the least common multiple of the two sides' rows.
    """
    a = prod(src[d] for d in left if d > p)
    b = prod(dst[d] for d in right if d > q)
    block = _lcm(a, b)
    return block // a, block // b


def _lcm(a: int, b: int) -> int:
    x, y = a, b
    while y:
        x, y = y, x % y
    return a // x * b if x else 0


def groups(src: Sequence[int], dst: Sequence[int]) -> list[tuple[range, range]]:
    """The runs of dims of two shapes whose products are equal; none for empty tensors.

    >>> groups((6, 5, 8), (30, 2, 4))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    out: list[tuple[range, range]] = []
    i = j = 0
    while prod(src) and i < len(src) and j < len(dst):
        i0, j0, a, b = i, j, src[i], dst[j]
        while a != b:
            if a < b:
                i += 1
                a *= src[i]
            else:
                j += 1
                b *= dst[j]
        i, j = i + 1, j + 1
        out.append((range(i0, i), range(j0, j)))
    return out
