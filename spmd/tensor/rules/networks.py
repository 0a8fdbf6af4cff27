"""Rows for the ops of networks, whose dims mean something: batch, head, channel, token."""

from __future__ import annotations

from dataclasses import replace
from math import isinf
from numbers import Number

from spmd.tensor.call import Call
from spmd.tensor.rules.families import all_whole, by_name, dims_whole, named, pointwise, reduction, whole
from spmd.tensor.rules.laws import (
    BIASED,
    BILINEAR,
    FILLS,
    FILLS_ZERO,
    LINEAR_BUT_LAST,
    LINEAR_IN_FIRST,
    LINEAR_IN_THIRD,
    SCALING,
)  # fmt: skip
from spmd.tensor.rules.rule import Dims, Factor, Law, Rule, laws

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`


def is_zero(x) -> bool:
    """A number known now to be zero; one known only when the program runs is not."""
    return isinstance(x, Number) and x == 0


# ---- pointwise, with a condition --------------------------------------------------------------


def product(call: Call) -> Rule | None:
    """`mul` is linear in each operand; by an infinite number it is not, for 3 inf - 1 inf is no number and 2 inf is."""
    by = call["other"]
    return pointwise(call, () if isinstance(by, float) and isinf(by) else BILINEAR + SCALING)


def division(call: Call) -> Rule | None:
    """`div` is linear in the dividend, unless it rounds, or divides by zero."""
    linear = call["rounding_mode"] is None and not is_zero(call["other"])
    return pointwise(call, SCALING + laws("sum avg: p r -> p") if linear else ())


def masked_fill(call: Call) -> Rule:
    return pointwise(call, FILLS_ZERO if is_zero(call["value"]) else FILLS)


def extreme(call: Call, kind: str, law: tuple[Law, ...]) -> Rule:
    """`max` is three ops: of all elements, along a dim with the indices, and of two tensors."""
    if len(call.tensors) == 2:
        return pointwise(call)
    return reduction(call, kind, law, nonempty=True) if len(call.outs) == 1 else reduction(call)


def trilinear(call: Call) -> Rule:
    """`sum of i1 * i2 * i3` over some dims, in each of them seen with new dims: a bilinear layer, and its gradients."""
    n = call["i1"].ndim + len(call["expand1"])
    ins = tuple(named(*(d for d in range(n) if d not in call[f"expand{k}"])) for k in (1, 2, 3))
    out = named(*(d for d in range(n) if d not in call["sumdim"]))
    return Rule(ins, (out,), "sum", laws("sum avg: p r r -> p", "sum avg: r p r -> p", "sum avg: r r p -> p"))


def histogram(call: Call) -> Rule:
    """`histc`: ranks count their own, if it is said between which numbers; else that depends on all of them."""
    low, high, n = call["min"], call["max"], call.tensors[0].ndim
    if not (isinstance(low, Number) and isinstance(high, Number) and low < high):
        return all_whole(call)
    return Rule((named(*range(n)),), (whole(1),), "sum")


# ---- losses -----------------------------------------------------------------------------------


def nll(call: Call) -> Rule:
    """Batch and pixels are free, or summed; a mean needs the global weight, see `decompositions`."""
    x, target = call["self"], call["target"]
    if x.ndim == 1 or call["reduction"] == MEAN:
        return all_whole(call)
    at = named(*range(target.ndim))
    # Unreduced, the total weight is a zero that nothing was added to: the same on every rank.
    outs = (at, None) if call["reduction"] == NONE else ((), ())
    return by_name(call, {"self": _with_class(at), "target": at}, outs, kind="sum", laws=LINEAR_BUT_LAST)


def nll_backward(call: Call) -> Rule:
    """The gradient of each row needs only that row; a mean divides by `total_weight`, which is an operand."""
    x, target = call["self"], call["target"]
    if x.ndim == 1:
        return all_whole(call)
    at = named(*range(target.ndim))
    grad = at if call["reduction"] == NONE else ()
    ins = {"grad_output": grad, "self": _with_class(at), "target": at}
    return by_name(call, ins, (_with_class(at),), laws=LINEAR_IN_FIRST)


def _with_class(target: Dims) -> Dims:
    """The dims of the scores: those of the target with the class dim, whole, in second place."""
    return (target[0], None, *target[1:])


def pointwise_loss(call: Call) -> Rule:
    """mse and its kin; a sum or a mean is decomposed."""
    return pointwise(call) if call["reduction"] == NONE else all_whole(call)


def pointwise_loss_backward(call: Call) -> Rule:
    """grad_output may be one number; a mean divides by the local element count, and is decomposed."""
    return all_whole(call) if call["reduction"] == MEAN else pointwise(call, LINEAR_IN_FIRST)


# ---- norms ------------------------------------------------------------------------------------


def normalised(call: Call) -> Rule:
    """The leading dims are free; `normalized_shape` names the others, which weight and bias have."""
    x = call["input"]
    lead = _lead(call, x.ndim)
    return by_name(call, {"input": _rows_of(lead, x.ndim)}, [_rows_of(lead, len(o.shape)) for o in call.outs])


def normalised_backward(call: Call) -> Rule:
    """Gradients of weight and bias are sums over the leading dims."""
    x = call["input"]
    lead = _lead(call, x.ndim)
    rows = _rows_of(lead, x.ndim)
    stat = {name: _rows_of(lead, t.ndim) for name, t in call.named_tensors if name in ("mean", "rstd")}
    of_weight = whole(x.ndim - lead)
    return by_name(
        call, {"grad_out": rows, "input": rows, **stat}, (rows, of_weight, of_weight)[: len(call.outs)],
        kind="sum", laws=LINEAR_IN_FIRST,
    )  # fmt: skip


def _lead(call: Call, ndim: int) -> int:
    return ndim - len(call["normalized_shape"])


def _rows_of(lead: int, ndim: int) -> Dims:
    return (*map(Factor, range(lead)), *whole(ndim - lead))


def batch_normed(call: Call) -> Rule:
    """Channels are free. The rest is too, in evaluation; in training it is seen whole (or spelled out, see `norms`).

    The kernels die of an empty image.
    """
    x, training = call["input"], _is_training(call)
    image = tuple(Factor(d) if d == 1 or not training else None for d in range(x.ndim))
    ins = {name: named(1) for name, t in call.named_tensors if name != "input" and t.shape == x.shape[1:2]}
    outs = [image, *(named(1) if o is not None and o.shape == x.shape[1:2] else None for o in call.outs[1:])]
    return by_name(call, ins | {"input": image}, outs, nonempty=frozenset(range(x.ndim)))


def batch_normed_backward(call: Call) -> Rule:
    """As `batch_normed`; gradients of weight and bias are sums over all but the channels."""
    x, training = call["input"], _is_training(call)
    image = tuple(Factor(d) if d == 1 or not training else None for d in range(x.ndim))
    ins = {name: named(1) for name, t in call.named_tensors if t.shape == x.shape[1:2]}
    ins |= {"input": image, "grad_out": image}
    return by_name(
        call, ins, (image, named(1), named(1)), kind="sum", laws=LINEAR_IN_FIRST, nonempty=frozenset(range(x.ndim))
    )  # fmt: skip


def _is_training(call: Call) -> bool:
    """What the argument says; ops without one are made for training."""
    said = [call[name] for name in ("training", "train") if call[name] is not None]
    return said != [False]


def weight_normed(call: Call) -> Rule:
    """Each slice along `dim` has a length of its own: that dim is free, in the gradient too.

    The kernels divide by the number of slices.
    """
    n = call.tensors[0].ndim
    rule = dims_whole(call, [d for d in range(n) if d != call["dim"] % n])
    return replace(rule, nonempty=frozenset(rule.factors))


# ---- convolution ------------------------------------------------------------------------------


def convolution(call: Call) -> Rule:
    """`n c x, o c k -> n o x`: batch and output channels are free, input channels summed if there is no bias.

    A convolution without channels is an error, or drops the image's dims.
    """
    if 0 in call["input"].shape[:2] or 0 in call["weight"].shape:
        return all_whole(call)
    n, o, c = _channels(call)
    c = c if call["bias"] is None else None
    ins = {"input": _image(n, c, call["input"].ndim), "bias": (o,), "weight": _kernel(call, o, c)}
    out = _image(n, o, len(call.outs[0].shape))
    return by_name(call, ins, (out,), kind="sum", laws=BIASED, nonempty=frozenset("oc"))


def convolution_backward(call: Call) -> Rule:
    """The batch is summed in the gradients of weight and bias, output channels in that of the input.

    Input channels are free in both gradients that have them; the bias has none, and would be counted once a rank.
    """
    n, o, c = _channels(call)
    c = c if call.outs[2] is None else None
    image, kernel = _image(n, c, call["input"].ndim), _kernel(call, o, c)
    ins = {"grad_output": _image(n, o, call["grad_output"].ndim), "input": image, "weight": kernel}
    return by_name(call, ins, (image, kernel, (o,)), kind="sum", laws=LINEAR_IN_FIRST, nonempty=frozenset("oc"))


def _channels(call: Call) -> tuple[Factor | None, ...]:
    """Batch, output and input channel. With groups, a block of channels is none of its own.

    `groups` would have to be the local one.
    """
    if call["groups"] != 1:
        return Factor("n"), None, None
    return Factor("n"), Factor("o"), Factor("c")


def _image(n, channel, ndim: int) -> Dims:
    return (n, channel, *whole(ndim - 2))


def _kernel(call: Call, o, c) -> Dims:
    """Of a transposed convolution the input channels come first."""
    first = (c, o) if call["transposed"] else (o, c)
    return (*first, *whole(call["weight"].ndim - 2))


# ---- attention --------------------------------------------------------------------------------


def attention(call: Call) -> Rule | None:
    """Batch and head are free, `b h t d`; time and the head's own dim are whole.

    With dropout there is no rule: each shard would draw the same numbers.
    """
    if not _is_plain(call):
        return None
    dims, tied = _heads(call)
    outs = [tied(o.shape) if i < 2 and o is not None else None for i, o in enumerate(call.outs)]
    return by_name(call, dims, outs, laws=LINEAR_IN_THIRD, nonempty=_filled(call))


def attention_backward(call: Call) -> Rule | None:
    """As `attention`; the gradient of a bias that several heads or batches share is a sum over them."""
    if not _is_plain(call):
        return None
    dims, tied = _heads(call)
    outs = [tied(o.shape) if o is not None else None for o in call.outs]
    return by_name(call, dims, outs, kind="sum", laws=LINEAR_IN_FIRST, nonempty=_filled(call))


def _is_plain(call: Call) -> bool:
    """No random numbers, and no debug output."""
    return is_zero(call["dropout_p"]) and not call["return_debug_mask"]


def _filled(call: Call) -> frozenset:
    """No rank may be left without a head: the kernels divide by their number (on CPU the process dies).

    Without a batch the CPU's kernel has nothing to do; others are not asked.
    """
    return frozenset("h") if "for_cpu" in call.name else frozenset("bh")


MASKS = ("attn_mask", "attn_bias")
HEADED = ("query", "key", "value", "out", "logsumexp", "grad_out", "grad_out_", *MASKS)


def _heads(call: Call):
    """The dims of every operand that has heads, and how a shape that begins with batch and head is tied to them.

    Where key and value have fewer heads than the query, a block of query heads does not go with a block of them.
    """
    lead = call["query"].shape[:2]
    same = [all(call[name].shape[d] == lead[d] for name in ("key", "value")) for d in range(2)]

    def tied(shape) -> Dims:
        """A mask that is stretched over the heads has no head of its own."""
        free = [Factor("bh"[d]) if same[d] and shape[d] == lead[d] else None for d in range(2)]
        return (*free, *whole(len(shape) - 2))

    named = [(name, x) for name, x in call.named_tensors if name in HEADED]
    return {name: tied(x.shape) for name, x in named if name not in MASKS or x.ndim == 4}, tied
