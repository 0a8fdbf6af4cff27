"""The families of rules. Each is a short function, and its name says why its ops belong together.

    pointwise(call of add(f32[8, 4], f32[4]))           0 1, 1 -> 0 1      every dim is free
    reduction(call of sum(f32[8, 4], [1]), "sum")       0 1 -> 0           dim 1 leaves a Partial
    one_dim_whole(call of softmax(f32[8, 4], 1))        0 _ -> 0 _         dim 1 is whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import prod

import torch

from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.laws import COPIES, IGNORES_VALUES
from spmd.tensor.rules.rule import Dims, Factor, Law, Rule
from spmd.tensor.spec import Spec


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


def _broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of tensors of these shapes together. torch has this, too, and imports sympy for it: a second.

    >>> _broadcast_shape([(4, 1), (3,), ()])
    (4, 3)
    """
    sizes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return tuple(reversed([next((n for n in each if n != 1), 1) for each in sizes]))


def pointwise(call: Call, law: tuple[Law, ...] = ()) -> Rule | None:
    """Every dim of the result is free. A dim of an operand that is broadcast has no factor.

    There is no rule if the result does not have the broadcast shape of the operands: then the op is not pointwise.
    """
    shape = call.outs[0].shape if call.outs[0] is not None else None
    if shape != _broadcast_shape([x.shape for x in call.tensors]):
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
    """A view: runs of dims with equal products form a group. One dim of each side of a group is tied to one of the
    other.

    These are the leading dims; or another pair, if that keeps the shards of an inner or packed dim where they are.
    """
    x, dst = call.tensors[0], call.outs[0].shape
    ins, outs = list(whole_dims(x.ndim)), list(whole_dims(len(dst)))
    for left, right in groups(x.shape, dst):
        p = next((d for d in left if x.shape[d] != 1), None)
        q = next((d for d in right if dst[d] != 1), None)
        if p is None or q is None:
            continue
        p, q = _kept_shards(x, left, dst, right) or (p, q)
        ins[p], outs[q] = _tie(p, _around(x.shape, left, p), _around(dst, right, q))
    return Rule((tuple(ins),), (tuple(outs),), None, COPIES, sizes=sizes)


def _kept_shards(x: Spec, left: range, dst: Sequence[int], right: range) -> tuple[int, int] | None:
    """The first pair of dims that can be tied so that the shards of x stay where they are; None if there is none."""
    for p in left:
        if x.dims[p] and x.shape[p] != 1:
            for q in right:
                pair = _around(x.shape, left, p), _around(dst, right, q)
                if dst[q] != 1 and _can_tie(x.shape[p], *pair) and x.aligned(p, _tie(p, *pair)[0].units):
                    return p, q
    return None


def _around(shape: Sequence[int], run: range, d: int) -> tuple[int, int]:
    """How many elements of a run of dims one index of dim d has outside, and how many inside of it."""
    return prod(shape[i] for i in run if i < d), prod(shape[i] for i in run if i > d)


def _tie(name: int, left: tuple[int, int], right: tuple[int, int]) -> tuple[Factor, Factor]:
    """The factors of two dims of one group, given what is around each.

    The group is so many blocks as both dims have outside of them, and a shard may begin only at a common multiple of
    what they have inside.
    """
    (outer_p, inner_p), (outer_q, inner_q) = left, right
    blocks, unit = _lcm(outer_p, outer_q), _lcm(inner_p, inner_q)
    return Factor(name, unit // inner_p, blocks // outer_p), Factor(name, unit // inner_q, blocks // outer_q)


def _can_tie(size: int, left: tuple[int, int], right: tuple[int, int]) -> bool:
    """Whether a dim of this size consists of whole blocks and units, if it is tied so."""
    factor, _ = _tie(0, left, right)
    return size % (factor.blocks * factor.unit) == 0


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
