"""Rules of the ops of neural networks. Their dims have a meaning: batch, head, channel, token.

    convolution     n c x, o c k -> n o x       batch n and output channels o are free, input channels c are summed
    attention       b h t d, ... -> b h t d     batch b and head h are free, time t and d are whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isinf
from numbers import Number

from spmd.tensor.call import Call
from spmd.tensor.rules.families import all_whole, dims_whole, factors, pointwise, reduction, rule_by_name, whole_dims
from spmd.tensor.rules.laws import (
    ADDITIVE,
    BIASED,
    BILINEAR,
    FILLS_CONSTANT,
    FILLS_ZERO,
    LINEAR,
    LINEAR_BUT_LAST,
    LINEAR_IN_FIRST,
    LINEAR_IN_THIRD,
    SHIFTING,
)  # fmt: skip
from spmd.tensor.rules.rule import Dims, Factor, Law, Rule, laws
from spmd.tensor.rules.tiles import tiles

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`


def is_zero(x) -> bool:
    """Whether x is a number that is known to be zero now. A number that is known only at run time is not."""
    return isinstance(x, Number) and x == 0


# ---- pointwise, with a condition --------------------------------------------------------------


def addition(call: Call) -> Rule | None:
    """`add`, `sub` and `rsub` count a number once for each term of a sum, unless it is zero, as in `sum(losses)`."""
    return pointwise(call, ADDITIVE + (LINEAR if is_zero(call["other"]) else SHIFTING))


def multiplication(call: Call) -> Rule | None:
    """`mul` is linear in each operand, but not if the other is an infinite number: 3 inf - 1 inf is NaN, 2 inf is inf.
    """
    by = call["other"]
    return pointwise(call, () if isinstance(by, float) and isinf(by) else BILINEAR + LINEAR)


def division(call: Call) -> Rule | None:
    """`div` is linear in the dividend, unless it rounds, or divides by zero."""
    linear = call["rounding_mode"] is None and not is_zero(call["other"])
    return pointwise(call, LINEAR + laws("sum avg: p r -> p") if linear else ())


def masked_fill(call: Call) -> Rule:
    return pointwise(call, FILLS_ZERO if is_zero(call["value"]) else FILLS_CONSTANT)


def extremum(call: Call, kind: str, law: tuple[Law, ...]) -> Rule:
    """`max` is three ops: of all elements, along a dim with indices, and of two tensors."""
    if len(call.tensors) == 2:
        return pointwise(call)
    return reduction(call, kind, law, nonempty=True) if len(call.outs) == 1 else reduction(call)


def trilinear(call: Call) -> Rule:
    """`sum of i1 * i2 * i3` over some dims, each operand with new dims of size 1: a bilinear layer, and its gradients.
    """
    n = call["i1"].ndim + len(call["expand1"])
    ins = tuple(factors(*(d for d in range(n) if d not in call[f"expand{k}"])) for k in (1, 2, 3))
    out = factors(*(d for d in range(n) if d not in call["sumdim"]))
    return Rule(ins, (out,), "sum", laws("sum avg: p r r -> p", "sum avg: r p r -> p", "sum avg: r r p -> p"))


def histogram(call: Call) -> Rule:
    """`histc`: each rank counts its own elements. Without given limits, the bins depend on all elements: all is whole.
    """
    low, high, n = call["min"], call["max"], call.tensors[0].ndim
    if not (isinstance(low, Number) and isinstance(high, Number) and low < high):
        return all_whole(call)
    return Rule((factors(*range(n)),), (whole_dims(1),), "sum")


def histogram_of_points(call: Call) -> Rule:
    """`_histogramdd_from_bin_cts`: each rank counts its own points, if the limits of the bins are given.

    All coordinates of a point are whole. A density is divided by all counts.
    """
    x, (out,) = call["self"], call.outs
    if call["range"] is None or call["density"] or x.ndim < 2:
        return all_whole(call)
    points = factors(*range(x.ndim - 1))
    return rule_by_name(call, {"self": (*points, None), "weight": points}, (whole_dims(len(out.shape)),), kind="sum")


def segments(call: Call) -> Rule:
    """`segment_reduce` and its gradient: the dims behind the one that is cut into segments are free."""
    axis = call["axis"] % call["data"].ndim

    def dims(shape: tuple[int, ...]) -> Dims:
        return tuple(Factor(d) if d > axis else None for d in range(len(shape)))

    ins = dict.fromkeys(("data", "grad", "output"), dims(call["data"].shape))
    return rule_by_name(call, ins, (dims(call.outs[0].shape),))


# ---- losses -----------------------------------------------------------------------------------


def nll(call: Call) -> Rule:
    """Batch and pixels are free, or summed. A mean needs the global weight, see `decompositions`."""
    x, target = call["self"], call["target"]
    if x.ndim == 1 or call["reduction"] == MEAN:
        return all_whole(call)
    at = factors(*range(target.ndim))
    # Without a reduction the total weight is zero, the same on every rank.
    outs = (at, None) if call["reduction"] == NONE else ((), ())
    return rule_by_name(call, {"self": _with_class(at), "target": at}, outs, kind="sum", laws=LINEAR_BUT_LAST)


def nll_backward(call: Call) -> Rule:
    """The gradient of a row needs only that row. A mean divides by `total_weight`, which is an operand."""
    x, target = call["self"], call["target"]
    if x.ndim == 1:
        return all_whole(call)
    at = factors(*range(target.ndim))
    grad = at if call["reduction"] == NONE else ()
    ins = {"grad_output": grad, "self": _with_class(at), "target": at}
    return rule_by_name(call, ins, (_with_class(at),), laws=LINEAR_IN_FIRST)


def _with_class(target: Dims) -> Dims:
    """The dims of the scores: those of the target, and the class dim, which is whole, in second place."""
    return (target[0], None, *target[1:])


def pointwise_loss(call: Call) -> Rule:
    """The mse loss and other losses per element. A sum or a mean is decomposed."""
    return pointwise(call) if call["reduction"] == NONE else all_whole(call)


def pointwise_loss_backward(call: Call) -> Rule:
    """grad_output may be one number. A mean divides by the local number of elements, so it is decomposed."""
    return all_whole(call) if call["reduction"] == MEAN else pointwise(call, LINEAR_IN_FIRST)


def row_loss(call: Call) -> Rule:
    """Margin losses and their gradients: rows are free, all classes of a row are whole.

    A sum or a mean is decomposed: of no rows, the kernels leave a sum as it is in memory.
    """
    n, backward = call["self"].shape[:1], call["grad_output"] is not None
    if call["self"].ndim != 2 or call["reduction"] not in ((NONE, SUM) if backward else (NONE,)):
        return all_whole(call)

    def dims(shape: tuple[int, ...]) -> Dims:
        return (Factor("n"), *whole_dims(len(shape) - 1)) if shape[:1] == n else whole_dims(len(shape))

    ins = tuple(whole_dims(1) if name == "weight" else dims(x.shape) for name, x in call.named_tensors)
    return Rule(ins, tuple(dims(o.shape) for o in call.outs), laws=LINEAR_IN_FIRST if backward else ())


# ---- norms ------------------------------------------------------------------------------------


def normalised(call: Call) -> Rule:
    """The leading dims are free. `normalized_shape` is the shape of the others, which are those of weight and bias."""
    x = call["input"]
    lead = _lead(call, x.ndim)
    outs = [_leading_dims(lead, len(o.shape)) for o in call.outs]
    return rule_by_name(call, {"input": _leading_dims(lead, x.ndim)}, outs)


def normalised_backward(call: Call) -> Rule:
    """The gradients of weight and bias are sums over the leading dims."""
    x = call["input"]
    lead = _lead(call, x.ndim)
    rows = _leading_dims(lead, x.ndim)
    stat = {name: _leading_dims(lead, t.ndim) for name, t in call.named_tensors if name in ("mean", "rstd")}
    weight_dims = whole_dims(x.ndim - lead)
    return rule_by_name(
        call, {"grad_out": rows, "input": rows, **stat}, (rows, weight_dims, weight_dims)[: len(call.outs)],
        kind="sum", laws=LINEAR_IN_FIRST,
    )  # fmt: skip


def _lead(call: Call, ndim: int) -> int:
    """The number of leading dims, which are not normalised."""
    return ndim - len(call["normalized_shape"])


def _leading_dims(lead: int, ndim: int) -> Dims:
    """A factor for each leading dim; the others are whole."""
    return (*map(Factor, range(lead)), *whole_dims(ndim - lead))


def batch_normed(call: Call) -> Rule:
    """Channels are free. The other dims are free in evaluation and whole in training (or decomposed, see `norms`).

    The kernels crash on an empty image.
    """
    x, training = call["input"], _is_training(call)
    image = tuple(Factor(d) if d == 1 or not training else None for d in range(x.ndim))
    ins = {name: factors(1) for name, t in call.named_tensors if name != "input" and t.shape == x.shape[1:2]}
    outs = [image, *(factors(1) if o is not None and o.shape == x.shape[1:2] else None for o in call.outs[1:])]
    return rule_by_name(call, ins | {"input": image}, outs, nonempty=frozenset(range(x.ndim)))


def batch_normed_backward(call: Call) -> Rule:
    """As `batch_normed`. The gradients of weight and bias are sums over all dims except the channels."""
    x, training = call["input"], _is_training(call)
    image = tuple(Factor(d) if d == 1 or not training else None for d in range(x.ndim))
    ins = {name: factors(1) for name, t in call.named_tensors if t.shape == x.shape[1:2]}
    ins |= {"input": image, "grad_out": image}
    return rule_by_name(
        call, ins, (image, factors(1), factors(1)), kind="sum", laws=LINEAR_IN_FIRST, nonempty=frozenset(range(x.ndim))
    )  # fmt: skip


def _is_training(call: Call) -> bool:
    """The value of the op's argument. Ops without such an argument are for training."""
    given = [call[name] for name in ("training", "train") if call[name] is not None]
    return given != [False]


def weight_normed(call: Call) -> Rule:
    """Each slice along `dim` has its own norm, so that dim is free, also in the gradient.

    The kernels divide by the number of slices, so no shard may be empty.
    """
    n = call.tensors[0].ndim
    rule = dims_whole(call, [d for d in range(n) if d != call["dim"] % n])
    return replace(rule, nonempty=frozenset(rule.factors))


# ---- convolution ------------------------------------------------------------------------------


def convolution(call: Call) -> Rule:
    """`n c x, o c k -> n o x`: batch and output channels are free. Input channels are summed if there is no bias.

    Windows that do not overlap are free, too (`tiles`). A convolution without channels raises an error, or its result
    loses the dims of the image.
    """
    if 0 in call["input"].shape[:2] or 0 in call["weight"].shape:
        return all_whole(call)
    n, o, c = _channels(call)
    c = c if call["bias"] is None else None
    x, y = _places(call, call["input"].shape, call.outs[0].shape)
    ins = {"input": (n, c, *x), "bias": (o,), "weight": _kernel(call, o, c)}
    return rule_by_name(call, ins, ((n, o, *y),), kind="sum", laws=BIASED, nonempty=_nonempty(x))


def convolution_backward(call: Call) -> Rule:
    """The batch is summed in the gradients of weight and bias, the output channels in the gradient of the input.

    So are windows that do not overlap. Input channels are free in the gradients of input and weight. The gradient of
    the bias has no input channels, and would be counted once for each rank; so they are whole if it is wanted. Of no
    images the kernel gives the bias a gradient of the size in `bias_sizes`.
    """
    n, o, c = _channels(call)
    c = c if call.outs[2] is None else None
    x, y = _places(call, call["input"].shape, call["grad_output"].shape)
    image, kernel = (n, c, *x), _kernel(call, o, c)
    ins = {"grad_output": (n, o, *y), "input": image, "weight": kernel}
    outs = (image, kernel, (o,))
    rule = rule_by_name(call, ins, outs, kind="sum", laws=LINEAR_IN_FIRST, nonempty=_nonempty(x))
    return rule if call.outs[2] is None else replace(rule, sizes="bias_sizes", sized=2)


def _nonempty(places: Dims) -> frozenset:
    """Channels, and the dims of the image: the kernels raise an error where they are empty."""
    return frozenset(["o", "c", *(f.name for f in places if f)])


def _places(call: Call, x: Sequence[int], y: Sequence[int]) -> tuple[Dims, Dims]:
    """The dims of the image and of the result that are places. In a transposed convolution the result has the windows.
    """
    kernel = call["weight"].shape[2:]
    if not call["transposed"]:
        return tiles(x[2:], y[2:], kernel, call)
    windowed, places = tiles(y[2:], x[2:], kernel, call)
    return places, windowed


def _channels(call: Call) -> tuple[Factor | None, ...]:
    """Batch, output channel and input channel. With groups the channels are whole.

    A convolution of a block of channels would need another number of groups.
    """
    if call["groups"] != 1:
        return Factor("n"), None, None
    return Factor("n"), Factor("o"), Factor("c")


def _kernel(call: Call, o, c) -> Dims:
    """The dims of the weight. In a transposed convolution the input channels are first."""
    first = (c, o) if call["transposed"] else (o, c)
    return (*first, *whole_dims(call["weight"].ndim - 2))


# ---- attention --------------------------------------------------------------------------------


def attention(call: Call) -> Rule | None:
    """In `b h t d` batch and head are free; time and the head's inner dim are whole.

    With dropout there is no rule, because each shard would draw the same numbers.
    """
    if not _is_plain(call):
        return None
    dims, dims_of_shape = _head_dims(call)
    outs = [dims_of_shape(o.shape) if i < 2 and o is not None else None for i, o in enumerate(call.outs)]
    return rule_by_name(call, dims, outs, laws=LINEAR_IN_THIRD, nonempty=_nonempty_heads(call))


def attention_backward(call: Call) -> Rule | None:
    """As `attention`. The gradient of a bias that several heads or batches share is a sum over them."""
    if not _is_plain(call):
        return None
    dims, dims_of_shape = _head_dims(call)
    outs = [dims_of_shape(o.shape) if o is not None else None for o in call.outs]
    return rule_by_name(call, dims, outs, kind="sum", laws=LINEAR_IN_FIRST, nonempty=_nonempty_heads(call))


def _is_plain(call: Call) -> bool:
    """Whether the call draws no random numbers and returns no debug output."""
    return is_zero(call["dropout_p"]) and not call["return_debug_mask"]


def _nonempty_heads(call: Call) -> frozenset:
    """No rank may have an empty shard of the heads: the kernels divide by their number (on CPU the process dies).

    The CPU kernel accepts an empty batch. Whether other kernels do is not known.
    """
    return frozenset("h") if "for_cpu" in call.name else frozenset("bh")


MASKS = ("attn_mask", "attn_bias")
HEADED = ("query", "key", "value", "out", "logsumexp", "grad_out", "grad_out_", *MASKS)


def _head_dims(call: Call):
    """The dims of every operand that has heads, and a function from a shape that begins with batch and head to dims.

    If key and value have fewer heads than the query, each of theirs belongs to a group of heads of the query, and the
    groups stay together. A single head of theirs is broadcast, as heads of a mask may be.
    """
    lead, keys = call["query"].shape[:2], call["key"].shape[:2]
    same = keys == call["value"].shape[:2]
    batch = Factor("b") if same and keys[0] == lead[0] else None
    heads: dict[int, Factor] = {}
    if same and keys[1] > 1 and lead[1] % keys[1] == 0:
        heads = {keys[1]: Factor("h"), lead[1]: Factor("h", lead[1] // keys[1])}
    elif same and keys[1] == 1:
        heads = {lead[1]: Factor("h")}

    def dims_of_shape(shape) -> Dims:
        """Batch and head are free. What is broadcast over the heads has no factor there."""
        return (batch if shape[0] == lead[0] else None, heads.get(shape[1]), *whole_dims(len(shape) - 2))

    headed = [(name, x) for name, x in call.named_tensors if name in HEADED]
    return {name: dims_of_shape(x.shape) for name, x in headed if name not in MASKS or x.ndim == 4}, dims_of_shape
