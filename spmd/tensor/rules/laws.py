"""The laws of Partials: which reductions an op commutes with. Each law has its proof beside it.

    BILINEAR = laws("sum avg: p r -> p", ...)    (a + b) c = a c + b c: `mm(partial, replicated)` is a Partial

A law such as `p r -> p` reads: if the first operand is a Partial and the second is replicated, the result is a Partial.
See `spmd.tensor.rules.rule.laws`. The laws here are about numbers. Dtypes restrict them (an integer has no average, a
bool has no sum). One function, `lawful`, checks that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from spmd.tensor.call import Call
from spmd.tensor.rules.rule import Law, Rule, laws, letters_for

# ---- an operand's values go to the result unchanged -------------------------------------------

COPIES = laws("sum avg max min product: p -> p...")  # reduce and then copy = copy and then reduce
COPIES_FIRST = laws("sum avg max min product: p r... -> p")  # the same; the other operands say only where to copy
COPIES_FROM_ALL = laws("sum avg max min product: p... -> p")  # each element of the result comes from one operand
COPIES_SECOND = laws(
    "sum avg max min product: r p -> p",  # copy_ reads only the second operand
    "sum avg max min product: p p -> p",
)
SELECTS = laws(
    "sum avg max min product: r p p -> p",  # where(c, x, y) takes x or y, the same on every rank
    "avg max min: r p r -> p",  # and y = avg(y, y) = max(y, y) = min(y, y)
    "avg max min: r r p -> p",
)
SELECTS_OR_CONST = laws("avg max min: r p -> p")  # where(c, x, 2.0): 2.0 = avg(2.0, 2.0), but not their sum
FILLS_CONSTANT = laws("avg max min: p r... -> p")  # masked_fill, pad: a constant is its own avg, max and min
FILLS_ZERO = laws("sum avg max min product: p r... -> p")  # and zero is also its own sum and product
IGNORES_VALUES = laws("sum avg max min product: p r... -> r")  # zeros_like, fill: they do not read the first operand

# ---- linear -----------------------------------------------------------------------------------

LINEAR = laws("sum avg: p -> p")  # f(a + b) = f(a) + f(b)
SHIFTING = laws("avg: p -> p")  # avg(a + c, b + c) = avg(a, b) + c; a sum would count c twice
ADDITIVE = laws(
    "sum avg: p p -> p",  # (a + b) + (c + d) = (a + c) + (b + d)
    "avg: p r -> p",  # c = avg(c, c); a sum would count it twice
    "avg: r p -> p",
)
REAL_AND_IMAGINARY = laws("sum avg: p p -> p")  # (a + ib) + (c + id) = (a + c) + i(b + d)
BILINEAR = laws(
    "sum avg: p r -> p",  # (a + b) c = a c + b c; p p has cross terms
    "sum avg: r p -> p",
)
LINEAR_IN_FIRST = laws("sum avg: p r... -> p...")  # gradients of f: g -> g f'(x), all other operands fixed
LINEAR_BUT_LAST = laws("sum avg: p r... -> p r")  # nll loss: linear in the scores; the total weight does not use them
LINEAR_IN_THIRD = laws("sum avg: r r p r... -> p r...")  # attention: weights @ v; logsumexp does not depend on v
LERP = laws(
    "sum avg: p p -> p",  # (1 - w) a + w b
    "avg: p r -> p",
    "avg: r p -> p",
    "sum avg: p p r -> p",  # the same with a weight that is a tensor
    "avg: p r r -> p",
    "avg: r p r -> p",
    "avg: r r p -> p",  # affine in the weight: a + w (b - a)
)
ADDCMUL = laws(
    "sum avg: p p r -> p",  # x + v (y z): linear in (x, y)
    "sum avg: p r p -> p",  # and in (x, z)
    "avg: p r r -> p",
    "avg: r p r -> p",
    "avg: r r p -> p",
)
ADDCDIV = laws(
    "sum avg: p p r -> p",  # x + v y / z: linear in (x, y), not in z
    "avg: p r r -> p",
    "avg: r p r -> p",
)
BIASED = laws(
    "sum avg: p r -> p",  # conv(x, w)
    "sum avg: r p -> p",
    "sum avg: p r p -> p",  # conv(x, w) + b: linear in (x, b)
    "sum avg: r p p -> p",  # and in (w, b)
    "avg: p r r -> p",
    "avg: r p r -> p",
    "avg: r r p -> p",
)
SCATTER_ADD = laws(
    "sum avg: p r p -> p",  # x plus moved y: linear in (x, y)
    "avg: p r r -> p",
    "avg: r r p -> p",
)
SCATTER = laws(
    "sum avg max min product: p r p -> p",  # each element comes from x or from y
    "avg max min: p r r -> p",
    "avg max min: r r p -> p",
)
REPLACES = laws(
    "sum avg max min product: p p -> p",  # the same, with places that no index says
    "avg max min: p r -> p",
    "avg max min: r p -> p",
)

# ---- monotone ---------------------------------------------------------------------------------

RISING = laws("max min: p -> p")  # f(max(a, b)) = max(f(a), f(b))
FALLING = laws("max min: p -> q")  # f(max(a, b)) = min(f(a), f(b))
RISING_IN_FIRST = laws("max min: p r... -> p")  # clamp: rising in its first operand, with any bounds
RISING_IN_EACH = laws("max min: p r -> p", "max min: r p -> p")  # rising in each operand
MAX_OF_TWO = laws("max: p p -> p")  # max(max(a, b), max(c, d)) = max(max(a, c), max(b, d))
MIN_OF_TWO = laws("min: p p -> p")
MAX_OVER = laws("max: p -> p")  # a maximum of maxima, in any order
MIN_OVER = laws("min: p -> p")
PRODUCT_OVER = laws("product: p -> p")  # a product of products, in any order


# ---- dtypes -----------------------------------------------------------------------------------


def lawful(rule: Rule, call: Call) -> tuple[Law, ...]:
    """The laws of a rule, without the reduce kinds that the dtypes of this call's Partials do not allow."""
    dtypes = [tuple([x and x.dtype for x in side]) for side in (call.tensors, call.outs)]
    return _lawful(rule.laws, len(rule.ins), len(rule.outs), *dtypes)


@lru_cache(maxsize=4096)
def _lawful(
    laws: tuple[Law, ...], ins: int, outs: int, given: tuple[torch.dtype, ...], made: tuple[torch.dtype | None, ...]
) -> tuple[Law, ...]:
    """The laws for so many operands and results of these dtypes."""
    found = []
    for law in laws:
        kinds = tuple([k for k in law.kinds if _allowed(k, law, ins, outs, given, made)])
        found += [replace(law, kinds=kinds)] if kinds else []
    return tuple(found)


def _allowed(
    kind: str, law: Law, n_ins: int, n_outs: int, given: tuple[torch.dtype, ...], made: tuple[torch.dtype | None, ...]
) -> bool:
    ins, outs = letters_for(law.ins, n_ins), letters_for(law.outs, n_outs)
    if ins is None or outs is None:
        return False
    src = [dtype for letter, dtype in zip(ins, given, strict=True) if letter != "r"]
    dst = [dtype for letter, dtype in zip(outs, made, strict=True) if letter != "r" and dtype is not None]
    wraps = "q" in outs and not all(map(inexact, dst))  # neg of an unsigned 0 is 0, but neg of 1 is 255
    return _ALLOWS[kind](src, dst) and not wraps


def inexact(dtype: torch.dtype) -> bool:
    """Whether a dtype has floats or complex numbers. Integers are rounded by every op that scales them."""
    return dtype.is_floating_point or dtype.is_complex


def _widens(src, dst) -> bool:
    """Floats become floats that are at least as wide. A sum of rounded terms is not the rounded sum, above all where
    terms cancel."""
    return all(map(inexact, src)) and all(torch.promote_types(s, d) == d for s in src for d in dst)


def _one_integer(src, dst) -> bool:
    """All have the same integer dtype, so sums wrap around in the same way before and after the op."""
    return len({*src, *dst}) <= 1 and torch.bool not in src


def _ordered(src, dst) -> bool:
    """Rounding to a float keeps the order. Wrapping to an integer does not, and complex numbers have no order."""
    return not any(t.is_complex for t in [*src, *dst]) and all(t.is_floating_point or {t} == set(src) for t in dst)


_ALLOWS = {
    "sum": lambda src, dst: _widens(src, dst) or _one_integer(src, dst),
    "avg": _widens,  # an integer has no average
    "product": lambda src, dst: len({*src, *dst}) <= 1 and not any(t is torch.bool or t.is_complex for t in src),
    "max": _ordered,
    "min": _ordered,
}
