"""The CTC loss in a program, where the lengths are tensors, whose values only the run knows.

    ctc_loss(f32[T, N@dp, C], i64[N@dp, S], i64[N@dp], i64[N@dp])  ->  f32[N@dp], f32[N@dp, T, 2 S + 1]

torch makes the second result, the sums over paths that the gradient needs, as wide as the longest target. Here it is as
wide as the targets may be. So the ops are our own: they read the lengths where they run, and their shapes do not
depend on them. The targets may be one long list of all sequences; then each rank has all of it and all lengths, and
finds its part by the place where its block begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.ctc import batched, over_batch
from spmd.tensor.recipes.recipe import Coordinate, Recipe
from spmd.tensor.spec import Spec

aten = torch.ops.aten
_library = torch.library.Library("spmd", "FRAGMENT")
_GIVEN = "Tensor x, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_OPTIONS = "int start, int blank, bool zero_infinity"
_library.define(f"ctc_loss({_GIVEN}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(f"ctc_loss_backward(Tensor grad, {_GIVEN}, Tensor loss, Tensor alpha, {_OPTIONS}) -> Tensor")
_ops = torch.ops.spmd


def ctc_loss(
    x: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor, blank: int = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """[T, N, C], [N, S] or [targets], [N], [N]  ->  [N]: the loss of each sequence, with its gradient."""
    return _CtcLoss.apply(x, targets, input_lengths, target_lengths, blank, zero_infinity)


class _CtcLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, targets, input_lengths, target_lengths, blank, zero_infinity):
        loss, alpha = _ops.ctc_loss(x, targets, input_lengths, target_lengths, 0, blank, zero_infinity)
        ctx.save_for_backward(x, targets, input_lengths, target_lengths, loss, alpha)
        ctx.options = 0, blank, zero_infinity
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _ops.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


# ---- the ops ----------------------------------------------------------------------------------


def _own(x: torch.Tensor, targets: torch.Tensor, lengths: list[torch.Tensor], start: int) -> tuple:
    """The targets and lengths of the sequences of x: those from `start` on."""
    own = [each.tolist()[start : start + x.shape[1]] for each in lengths]
    if targets.ndim == 1:
        first = int(lengths[1][:start].sum())
        targets = targets[first : first + sum(own[1])]
    return targets, *own


def _width(targets: torch.Tensor) -> Any:
    return 2 * targets.shape[-1] + 1


@torch.library.impl(_library, "ctc_loss", "CompositeExplicitAutograd")
def _loss(x, targets, input_lengths, target_lengths, start, blank, zero_infinity):
    width = _width(targets)
    if not x.shape[1]:
        return _loss_without_data(x, targets)
    own = _own(x, targets, [input_lengths, target_lengths], start)
    loss, alpha = aten._ctc_loss.default(x, *own, blank, zero_infinity)
    return loss, aten.constant_pad_nd.default(alpha, [0, width - alpha.shape[2]])


@torch.library.impl(_library, "ctc_loss_backward", "CompositeExplicitAutograd")
def _gradient(grad, x, targets, input_lengths, target_lengths, loss, alpha, start, blank, zero_infinity):
    if not x.shape[1]:
        return torch.zeros_like(x)
    own = _own(x, targets, [input_lengths, target_lengths], start)
    alpha = alpha[:, :, : 2 * max(own[2]) + 1].contiguous()
    return aten._ctc_loss_backward.default(grad, x, *own, loss, alpha, blank, zero_infinity)


@torch.library.impl(_library, "ctc_loss", "Meta")
def _loss_without_data(x, targets, *_):
    steps, batch, _ = x.shape
    return x.new_empty(batch), x.new_empty(batch, steps, _width(targets))


@torch.library.impl(_library, "ctc_loss_backward", "Meta")
def _gradient_without_data(grad, x, *_):
    return torch.empty_like(x)


# ---- recipes ----------------------------------------------------------------------------------


def _ins(call: Call) -> tuple[tuple[Spec, ...], Callable[[Spec], Spec]]:
    """The scores, the targets and the lengths where a rank needs them; and how a tensor of sequences is placed."""
    x, targets = call["x"], call["targets"]
    axes, unit = over_batch(x)

    def sequences(spec: Spec) -> Spec:
        return batched(spec, axes, unit)

    of_targets = sequences if targets.ndim > 1 else lambda spec: spec.moved_to(((),))
    rest = [of_targets(call[name]) for name in ("targets", "input_lengths", "target_lengths")]
    return (batched(x, axes, unit, 1), *rest), sequences


def _statics(call: Call) -> tuple:
    return call["targets"].ndim == 1, call["blank"], call["zero_infinity"]


def loss_of_blocks(call: Call) -> Recipe:
    ins, sequences = _ins(call)
    outs = tuple(sequences(Spec.of(ins[0].mesh, o.shape, o.dtype, stride=o.stride)) for o in call.outs)
    return Recipe(ins, outs, local_ctc_loss_of, ins[0], _statics(call))


def gradient_of_blocks(call: Call) -> Recipe:
    ins, sequences = _ins(call)
    grad, *kept = (sequences(call[name]) for name in ("grad", "loss", "alpha"))
    out = ins[0].with_tensor(ins[0].shape)
    return Recipe((grad, *ins, *kept), (out,), local_ctc_loss_gradient, ins[0], _statics(call))


def _options(recipe: Recipe, at: Coordinate) -> tuple:
    is_list, *rest = recipe.statics
    return recipe.table.block(1, at)[0] if is_list else 0, *rest


def local_ctc_loss_of(recipe: Recipe, at: Coordinate, x, targets, input_lengths, target_lengths) -> tuple:
    out = _ops.ctc_loss.default(x, targets, input_lengths, target_lengths, *_options(recipe, at))
    return out[0], out[1]


def local_ctc_loss_gradient(recipe: Recipe, at: Coordinate, *blocks) -> tuple:
    return (_ops.ctc_loss_backward.default(*blocks, *_options(recipe, at)),)


RECIPES: dict[Any, Callable[[Call], Recipe]] = {
    _ops.ctc_loss.default: loss_of_blocks,
    _ops.ctc_loss_backward.default: gradient_of_blocks,
}
