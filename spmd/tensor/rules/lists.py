"""Decompositions of ops on lists of tensors into ops on one tensor: `_foreach_*`, and the fused optimiser steps.

    _foreach_add_(params, grads, alpha=-lr)   ->   add_(p, g, alpha=-lr) for each parameter

A list op exists to save kernel launches, and a program has none to save. So each list op becomes the op in its name,
for which the book has a rule. A fused optimiser step becomes the arithmetic of the step. The norms of many tensors are
reduced together (`totals`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.rules.totals import foreach_norm, group_by_owed_reduction

aten = torch.ops.aten

WITH_NUMBER = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""The op to use instead of these if the other operand is a number."""

KEYWORDS = {"addcmul": ("value",), "addcdiv": ("value",)}
"""The last arguments of a list op that the op on one tensor takes by keyword."""


def per_tensor(op, *args, **kwargs):
    """Run a `_foreach_` op tensor by tensor, with the i-th item of every list. Other arguments are passed on as given.
    """
    base, suffix = _base(op)
    length = next(len(a) for a in args if isinstance(a, (list, tuple)))
    names = [a.name for a in _torch.arguments(op)]
    rows = [[_item(n, a, i) for n, a in zip(names, args, strict=False)] for i in range(length)]
    out = [_run_one(base, suffix, row, kwargs) for row in rows]
    if not _torch.returns_nothing(op):
        return out
    torch.autograd.graph.increment_version(args[0])  # autograd has no kernel that does it for a list
    return None


def _base(op) -> tuple[str, str]:
    """The name of the op for one tensor, and "_" if it writes."""
    name = _torch.qualified_name(op).removeprefix("aten::_foreach_")
    base = name.removesuffix("_")
    return base, name[len(base) :]


def _item(name: str, a: Any, i: int) -> Any:
    """The i-th item of a list. A list of numbers may be given as one tensor."""
    return a[i] if isinstance(a, (list, tuple)) or name == "scalars" else a


def _run_one(base: str, suffix: str, args: list, kwargs: dict[str, Any]) -> torch.Tensor:
    if base in WITH_NUMBER and not isinstance(args[1], torch.Tensor):
        base = WITH_NUMBER[base]
    named = dict(zip(KEYWORDS.get(base, ()), args[3:], strict=False))
    positional = args[: len(args) - len(named)]
    kwargs = {k: _number(v) for k, v in named.items()} | kwargs
    if suffix and not hasattr(aten, base + suffix):
        return args[0].copy_(getattr(aten, base)(*positional, **kwargs))
    return getattr(aten, base + suffix)(*positional, **kwargs)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# ---- fused optimiser steps --------------------------------------------------------------------


def fused_adam(op, params, grads, firsts, seconds, max_seconds, steps, **options):
    """One step of Adam or AdamW (by the op's name) for every parameter, functional or in place like the op.

    firsts and seconds are the moments of the gradients, max_seconds the largest second moments so far (amsgrad).
    """
    decoupled = "adamw" in _torch.qualified_name(op)
    if isinstance(options["lr"], torch.Tensor):  # the kernel computes 1 - lr * decay in doubles
        options["lr"] = options["lr"].to(torch.float64)
    rows = _rows(params, _unscaled(grads, **options), firsts, seconds, max_seconds, steps)
    new = [_adam_step(*row, decoupled=decoupled, **options) for row in rows]
    return _write_or_return(op, (params, grads, firsts, seconds, max_seconds), new, **options)


def _adam_step(
    p, g, m, v, max_v, step, *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, decoupled, **_
):  # fmt: skip
    given_grad = g
    g = -g if maximize else g
    if weight_decay != 0 and decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay != 0:
        g = g + p * weight_decay
    m = torch.lerp(m, g, 1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    max_v = torch.maximum(max_v, v) if amsgrad else max_v
    n_steps = step.to(torch.float64)
    step_size = lr / (1 - beta1**n_steps)
    scale = (1 - beta2**n_steps).sqrt()
    spread = ((max_v if amsgrad else v).sqrt() / scale.to(v.dtype)) + eps
    return p - (m / spread) * step_size.to(p.dtype), given_grad, m, v, max_v


def fused_sgd(op, params, grads, buffers, **options):
    """One step of SGD for every parameter."""
    new = [_sgd_step(*row, **options) for row in _rows(params, _unscaled(grads, **options), buffers)]
    return _write_or_return(op, (params, grads, buffers), new, **options)


def _sgd_step(p, g, buffer, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step, **_):
    given_grad = g
    g = -g if maximize else g
    if weight_decay != 0:
        g = g + p * weight_decay
    if momentum != 0:
        buffer = g.clone() if is_first_step else buffer * momentum + g * (1 - dampening)
        g = g + buffer * momentum if nesterov else buffer
    return p - g * lr, given_grad, buffer


def fused_adagrad(op, params, grads, sums, steps, **options):
    """One step of Adagrad for every parameter. The step counts were increased before, and are returned unchanged."""
    lists = (params, grads, sums) if _torch.overload_name(op) == "tensor_lr" else (params, grads, sums, steps)
    rows = _rows(params, _unscaled(grads, **options), sums, steps)
    return _write_or_return(op, lists, [_adagrad_step(*row, **options) for row in rows], **options)


def _adagrad_step(p, g, total, step, *, lr, lr_decay, weight_decay, eps, maximize, **_):
    given_grad = g
    g = -g if maximize else g
    if weight_decay != 0:
        g = g + p * weight_decay
    total = total + g * g
    step_size = lr / (1 + (step.to(torch.float64) - 1) * lr_decay)
    return p - g / (total.sqrt() + eps) * step_size.to(p.dtype), given_grad, total, step


def _rows(params: Sequence, *lists: Sequence) -> list[tuple]:
    """The i-th item of every list, for each i. For a list that is empty, because an option is off, it is None."""
    return [(p, *(values[i] if len(values) else None for values in lists)) for i, p in enumerate(params)]


def _unscaled(grads: Sequence, *, grad_scale=None, **_) -> Sequence:
    """The gradients of the unscaled loss."""
    return grads if grad_scale is None else [g / grad_scale for g in grads]


def _write_or_return(op, old: Sequence[Sequence], new: Sequence[tuple], *, found_inf=None, **_):
    """Write the new values into the old tensors, or return them as lists, like the op. Skip the step if `found_inf`."""
    if found_inf is not None:
        new = [[_skip_if_inf(found_inf, a, i, x) for a, x in zip(old, row, strict=False)] for i, row in enumerate(new)]
    if not _torch.returns_nothing(op):
        return tuple([row[k] for row in new] if len(values) else [] for k, values in enumerate(old))
    for k, values in enumerate(old):
        for target, row in zip(values, new, strict=False):
            if row[k] is not target:
                target.copy_(row[k])
    return None


def _skip_if_inf(found_inf, values: Sequence, i: int, new):
    return new if not len(values) or new is values[i] else torch.where(found_inf == 0, new, values[i])


def unscale(op, grads, found_inf, inv_scale):
    """The gradients of the unscaled loss. `found_inf` becomes 1 if an element of a gradient is infinite or NaN.

    Whether a gradient has one is an owed maximum over the ranks. A maximum of owed maxima is owed, too, and is reduced
    once.
    """
    not_finite = [torch.isfinite(g).logical_not().any() for g in grads]
    found = found_inf
    for group in group_by_owed_reduction(not_finite):
        in_group = functools.reduce(torch.maximum, [not_finite[i] for i in group])
        found = torch.maximum(found, in_group.to(found_inf.dtype))
    new = [g * inv_scale for g in grads]
    if not _torch.returns_nothing(op):
        return new, found
    for g, x in zip(grads, new, strict=True):
        g.copy_(x)
    found_inf.copy_(found)
    return None


def update_scale(op, scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval):
    """The scale of the next loss: less where a gradient was infinite or NaN, more after so many steps without."""
    overflow, in_a_row = found_inf != 0, growth_tracker + 1
    grow = in_a_row == growth_interval
    grown = scale * growth_factor
    larger = torch.where(torch.isfinite(grown) & grow, grown, scale)
    new = torch.where(overflow, scale * backoff_factor, larger)
    count = torch.where(overflow | grow, torch.zeros_like(in_a_row), in_a_row)
    if op is aten._amp_update_scale.default:
        return new, count
    growth_tracker.copy_(count)
    return scale.copy_(new)


# ---- the table --------------------------------------------------------------------------------

FUSED = {
    "_fused_adam": fused_adam,
    "_fused_adamw": fused_adam,
    "_fused_sgd": fused_sgd,
    "_fused_adagrad": fused_adagrad,
}


def list_decompositions() -> dict[_torch.OpOverload, Callable]:
    """The decompositions of all fused optimiser steps, and of every list op with an op of that name for one tensor."""
    table: dict[_torch.OpOverload, Callable] = {}
    for op in _torch.list_ops():
        fused = FUSED.get(_torch.qualified_name(op).removeprefix("aten::").removesuffix("_"))
        if fused or hasattr(aten, _base(op)[0]):
            table[op] = _bind_op(fused or per_tensor, op)
    for op in (aten._amp_foreach_non_finite_check_and_unscale, aten._amp_foreach_non_finite_check_and_unscale_):
        table[op.default] = _bind_op(unscale, op.default)
    for op in (aten._amp_update_scale, aten._amp_update_scale_):
        table[op.default] = _bind_op(update_scale, op.default)
    table[aten._foreach_norm.Scalar] = foreach_norm
    return table


def _bind_op(fn: Callable, op) -> Callable:
    return lambda *args, **kwargs: fn(op, *args, **kwargs)


def _is_elementwise(op: _torch.OpOverload) -> bool:
    name = _torch.qualified_name(op).removeprefix("aten::_foreach_").removesuffix("_")
    return name not in ("norm", "max", "powsum")


ELEMENTWISE_LISTS = frozenset(filter(_is_elementwise, _torch.list_ops()))
"""Ops that do the same to each element of each tensor. Tensors with equal placements need only their local blocks."""
