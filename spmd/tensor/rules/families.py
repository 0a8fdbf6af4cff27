"""The families of rules. Each is a short function, and its name says why its ops belong together.

    pointwise(call of add(f32[8, 4], f32[4]))           0 1, 1 -> 0 1      every dim is free
    reduction(call of sum(f32[8, 4], [1]), "sum")       0 1 -> 0           dim 1 leaves a Partial
    one_dim_whole(call of softmax(f32[8, 4], 1))        0 _ -> 0 _         dim 1 is whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.laws import COPIES, IGNORES_VALUES
from spmd.tensor.rules.rule import Dims, Factor, Law, Rule


def factors(*names) -> Dims:
    """Dims with these factor names; None stays None."""
    return tuple(None if n is None else Factor(n) for n in names)


def whole_dims(ndim: int) -> Dims:
    return (None,) * ndim


# ---- contraction ------------------------------------------------------------------------------


def contraction(call: Call, equation: str, law: tuple[Law, ...] = ()) -> Rule:
    """The rule of an op of fixed rank, written as an einsum: `m k, k n -> m n`. `_` is a whole dim."""
    ins, outs = (tuple(_parse_term(t) for t in side.split(",")) for side in equation.split("->"))
    return Rule(ins[: len(call.tensors)], outs, "sum", law)


def _parse_term(text: str) -> Dims:
    return factors(*(None if f == "_" else f for f in text.split()))


def rule_by_name(call: Call, ins: dict[str, Dims], outs: Sequence[Dims | None], **options) -> Rule:
    """A rule from the dims of the operands by argument name. Operands and results that are None are left out.

    An operand that is not listed is whole.
    """
    in_dims = tuple(ins.get(name, whole_dims(x.ndim)) for name, x in call.named_tensors)
    out_dims = tuple(dims if meta is not None else None for dims, meta in zip(outs, call.outs, strict=True))
    return Rule(in_dims, out_dims, **options)


# ---- pointwise --------------------------------------------------------------------------------


def pointwise(call: Call, law: tuple[Law, ...] = ()) -> Rule | None:
    """Every dim of the result is free. A dim of an operand that is broadcast has no factor.

    There is no rule if the result does not have the broadcast shape of the operands: then the op is not pointwise.
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
    return pointwise(call, IGNORES_VALUES)


def new(call: Call) -> Rule:
    """A new tensor of any shape. The op reads nothing of the operand, so a result of another shape is the same on
    every rank, whatever the placements of the operand are."""
    x, out = call.tensors[0].shape, call.outs[0].shape
    dims = tuple(map(Factor, range(len(x))))
    return Rule((dims,), (dims if x == out else None,), "sum", IGNORES_VALUES, sizes="size")


def new_strided(call: Call) -> Rule:
    """A new tensor with given strides. Those of a block would be others, so the result is the same on every rank."""
    dims = tuple(map(Factor, range(call.tensors[0].ndim)))
    return Rule((dims,), (None,), "sum", IGNORES_VALUES)


def broadcast(shape: Sequence[int], to: Sequence[int]) -> Dims:
    """The factors of a tensor of `shape` that is broadcast to `to`: one for each dim, None where the dim is broadcast.

    >>> broadcast((1, 4), (2, 3, 4))
    (None, 2)
    """
    lead = len(to) - len(shape)
    return tuple(Factor(lead + d) if n == to[lead + d] else None for d, n in enumerate(shape))


# ---- reduction --------------------------------------------------------------------------------


def reduction(call: Call, kind: str | None = None, law: tuple[Law, ...] = (), nonempty: bool = False) -> Rule:
    """The dims that `dim` names are reduced to a Partial of this kind. If kind is None, they are whole.

    `nonempty`: a reduction of no elements is an error, so no rank may have an empty shard of these dims.
    """
    n = call.tensors[0].ndim
    if (kind, call.outs[0].dtype) == ("sum", torch.bool) or (kind == "product" and call.outs[0].dtype.is_complex):
        kind = None  # bools have no sum, and no backend multiplies complex numbers
    reduced = dims_of(call["dim"], n)
    kept = [d for d in range(n) if d not in reduced]
    ins = tuple(Factor(d) if d in kept or kind else None for d in range(n))
    outs = tuple(
        tuple(Factor(d) if d in kept else None for d in range(n)) if len(o.shape) == n else factors(*kept)
        for o in call.outs
    )
    return Rule((ins,), outs, kind, law, nonempty=frozenset(reduced if kind and nonempty else ()))


# ---- some dims whole --------------------------------------------------------------------------


def dims_whole(call: Call, whole: Sequence[int], law: tuple[Law, ...] = ()) -> Rule:
    """These dims are whole and all others free, in every operand and result with as many dims as the first operand."""
    n = call.tensors[0].ndim

    def free(ndim: int) -> Dims:
        return tuple(None if d in whole else Factor(d) for d in range(n)) if ndim == n else whole_dims(ndim)

    outs = tuple(None if o is None else free(len(o.shape)) for o in call.outs)
    return Rule(tuple(free(x.ndim) for x in call.tensors), outs, None, law)


def all_whole(call: Call) -> Rule:
    """All dims are whole: every operand is replicated."""
    outs = tuple(None if o is None else whole_dims(len(o.shape)) for o in call.outs)
    return Rule(tuple(whole_dims(x.ndim) for x in call.tensors), outs)


def one_dim_whole(call: Call, arg: str = "dim", law: tuple[Law, ...] = ()) -> Rule:
    """The dim (or dims) that `arg` names is whole: softmax, cumsum, sort."""
    return dims_whole(call, dims_of(call[arg], call.tensors[0].ndim), law)


def last_dims_whole(call: Call, last: int, law: tuple[Law, ...] = ()) -> Rule:
    """The last few dims are whole: triu, tril."""
    n = call.tensors[0].ndim
    return dims_whole(call, range(n - last, n), law)


# ---- rearrangements ---------------------------------------------------------------------------


def rearranged(call: Call, source: Callable[[int], Sequence[int | None]]) -> Rule:
    """A rearrangement of dims: `source(ndim)` lists, for each dim of the result, the dim of the input it comes from."""
    n = call.tensors[0].ndim
    sources = source(n)
    ins = tuple(Factor(d) if d in sources else None for d in range(n))
    return Rule((ins,), (factors(*sources),) * len(call.outs), None, COPIES)


def reshaped(call: Call, sizes: str = "size") -> Rule:
    """A view: runs of dims with equal products form a group. The leading dims of a group's two sides are tied.

    The leading dims of a group, of sizes n and m, have gcd(n, m) blocks of rows in common. A shard may begin only where
    such a block begins. The units of the factor say so.
    """
    src, dst = call.tensors[0].shape, call.outs[0].shape
    ins, outs = list(whole_dims(len(src))), list(whole_dims(len(dst)))
    for left, right in groups(src, dst):
        p = next((d for d in left if src[d] != 1), None)
        q = next((d for d in right if dst[d] != 1), None)
        if p is None or q is None:
            continue
        unit_in, unit_out = _units(src, left, p, dst, right, q)
        ins[p], outs[q] = Factor(p, unit_in), Factor(p, unit_out)
    return Rule((tuple(ins),), (tuple(outs),), None, COPIES, sizes=sizes)


def _units(src, left, p, dst, right, q) -> tuple[int, int]:
    """How many rows of the leading dim of each side make one common block.

    A block has as many elements as the least common multiple of the elements of a row on either side.
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
    """The shortest runs of dims of two shapes that have equal products. There are none for empty tensors.

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
