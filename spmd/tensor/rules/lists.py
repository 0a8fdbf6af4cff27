"""Ops on lists of tensors, done one tensor at a time: `_foreach_*`, and the fused optimiser steps.

    _foreach_add_(params, grads, alpha=-lr)   ->   add_(p, g, alpha=-lr) for each

What a list op saves is launches, and a program has none to save. So each becomes the op its name says, of which the
book has a rule; a fused optimiser step becomes the arithmetic it stands for. Norms are reduced together (`totals`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.rules.totals import foreach_norm, owing_alike

aten = torch.ops.aten

BOUND = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""The same for these, when the other side is a number."""

KEYWORDS = {"addcmul": ("value",), "addcdiv": ("value",)}
"""Last arguments that are by keyword for one tensor."""


def per_tensor(op, *args, **kwargs):
    """Run a `_foreach_` op tensor by tensor: the i-th of every list, and what is no list as it is."""
    base, suffix = _base(op)
    length = next(len(a) for a in args if isinstance(a, (list, tuple)))
    names = [a.name for a in _torch.arguments(op)]
    rows = [[_item(n, a, i) for n, a in zip(names, args, strict=False)] for i in range(length)]
    out = [_one(base, suffix, row, kwargs) for row in rows]
    if not _torch.returns_nothing(op):
        return out
    torch.autograd.graph.increment_version(args[0])  # no kernel of autograd's does it for a list
    return None


def _base(op) -> tuple[str, str]:
    """The name of the op for one tensor, and "_" if it writes."""
    name = _torch.qualified_name(op).removeprefix("aten::_foreach_")
    base = name.removesuffix("_")
    return base, name[len(base) :]


def _item(name: str, a: Any, i: int) -> Any:
    """The i-th of a list, also of a list of numbers that comes as one tensor."""
    return a[i] if isinstance(a, (list, tuple)) or name == "scalars" else a


def _one(base: str, suffix: str, args: list, kwargs: dict[str, Any]) -> torch.Tensor:
    if base in BOUND and not isinstance(args[1], torch.Tensor):
        base = BOUND[base]
    named = dict(zip(KEYWORDS.get(base, ()), args[3:], strict=False))
    positional = args[: len(args) - len(named)]
    kwargs = {k: _number(v) for k, v in named.items()} | kwargs
    if suffix and not hasattr(aten, base + suffix):
        return args[0].copy_(getattr(aten, base)(*positional, **kwargs))
    return getattr(aten, base + suffix)(*positional, **kwargs)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# ---- fused optimiser steps --------------------------------------------------------------------


def fused_adam(op, params, grads, firsts, seconds, peaks, steps, **options):
    """One step of Adam or AdamW (by the op's name) for every parameter; functional or in place, as the op is."""
    decoupled = "adamw" in _torch.qualified_name(op)
    rows = _rows(params, _unscaled(grads, **options), firsts, seconds, peaks, steps)
    new = [_adam(*row, decoupled=decoupled, **options) for row in rows]
    return _deliver(op, (params, grads, firsts, seconds, peaks), new, **options)


def _adam(
    p, g, m, v, peak, step, *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, decoupled, **_
):  # fmt: skip
    sent = g
    g = -g if maximize else g
    if weight_decay != 0 and decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay != 0:
        g = g + p * weight_decay
    m = torch.lerp(m, g, 1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    peak = torch.maximum(peak, v) if amsgrad else peak
    count = step.to(torch.float64)
    slope = lr / (1 - beta1**count)
    scale = (1 - beta2**count).sqrt()
    spread = ((peak if amsgrad else v).sqrt() / scale.to(v.dtype)) + eps
    return p - (m / spread) * slope.to(p.dtype), sent, m, v, peak


def fused_sgd(op, params, grads, buffers, **options):
    """One step of SGD for every parameter."""
    new = [_sgd(*row, **options) for row in _rows(params, _unscaled(grads, **options), buffers)]
    return _deliver(op, (params, grads, buffers), new, **options)


def _sgd(p, g, buffer, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step, **_):
    sent = g
    g = -g if maximize else g
    if weight_decay != 0:
        g = g + p * weight_decay
    if momentum != 0:
        buffer = g.clone() if is_first_step else buffer * momentum + g * (1 - dampening)
        g = g + buffer * momentum if nesterov else buffer
    return p - g * lr, sent, buffer


def fused_adagrad(op, params, grads, sums, steps, **options):
    """One step of Adagrad for every parameter; the steps, counted before, are given back as they are."""
    lists = (params, grads, sums) if _torch.overload_name(op) == "tensor_lr" else (params, grads, sums, steps)
    rows = _rows(params, _unscaled(grads, **options), sums, steps)
    return _deliver(op, lists, [_adagrad(*row, **options) for row in rows], **options)


def _adagrad(p, g, total, step, *, lr, lr_decay, weight_decay, eps, maximize, **_):
    sent = g
    g = -g if maximize else g
    if weight_decay != 0:
        g = g + p * weight_decay
    total = total + g * g
    slope = lr / (1 + (step.to(torch.float64) - 1) * lr_decay)
    return p - g / (total.sqrt() + eps) * slope.to(p.dtype), sent, total, step


def _rows(params: Sequence, *lists: Sequence) -> list[tuple]:
    """The i-th of every list; lists that the options leave empty give None."""
    return [(p, *(values[i] if len(values) else None for values in lists)) for i, p in enumerate(params)]


def _unscaled(grads: Sequence, *, grad_scale=None, **_) -> Sequence:
    """The gradients of the loss itself, where it was scaled."""
    return grads if grad_scale is None else [g / grad_scale for g in grads]


def _deliver(op, old: Sequence[Sequence], new: Sequence[tuple], *, found_inf=None, **_):
    """Write the new values into the old ones, or give them as lists, as the op does; the old ones, if `found_inf`."""
    if found_inf is not None:
        new = [[_unless(found_inf, a, i, x) for a, x in zip(old, row, strict=False)] for i, row in enumerate(new)]
    if not _torch.returns_nothing(op):
        return tuple([row[k] for row in new] if len(values) else [] for k, values in enumerate(old))
    for k, values in enumerate(old):
        for target, row in zip(values, new, strict=False):
            if row[k] is not target:
                target.copy_(row[k])
    return None


def _unless(found_inf, values: Sequence, i: int, new):
    return new if not len(values) or new is values[i] else torch.where(found_inf == 0, new, values[i])


def unscale(op, grads, found_inf, inv_scale):
    """Gradients of a scaled loss as those of the loss; `found_inf` becomes 1 where one of them is infinite or NaN.

    A maximum of maxima that ranks still owe is owed as well, and reduced once.
    """
    wrong = [torch.isfinite(g).logical_not().any() for g in grads]
    found = found_inf
    for places in owing_alike(wrong):
        some = functools.reduce(torch.maximum, [wrong[i] for i in places])
        found = torch.maximum(found, some.to(found_inf.dtype))
    new = [g * inv_scale for g in grads]
    if not _torch.returns_nothing(op):
        return new, found
    for g, x in zip(grads, new, strict=True):
        g.copy_(x)
    found_inf.copy_(found)
    return None


# ---- the table --------------------------------------------------------------------------------

FUSED = {
    "_fused_adam": fused_adam,
    "_fused_adamw": fused_adam,
    "_fused_sgd": fused_sgd,
    "_fused_adagrad": fused_adagrad,
}


def list_decompositions() -> dict[_torch.OpOverload, Callable]:
    """A decomposition for every list op that has a name for one tensor."""
    table: dict[_torch.OpOverload, Callable] = {}
    for op in _torch.list_ops():
        fused = FUSED.get(_torch.qualified_name(op).removeprefix("aten::").removesuffix("_"))
        if fused or hasattr(aten, _base(op)[0]):
            table[op] = _bound(fused or per_tensor, op)
    for op in (aten._amp_foreach_non_finite_check_and_unscale, aten._amp_foreach_non_finite_check_and_unscale_):
        table[op.default] = _bound(unscale, op.default)
    table[aten._foreach_norm.Scalar] = foreach_norm
    return table


def _bound(fn: Callable, op) -> Callable:
    return lambda *args, **kwargs: fn(op, *args, **kwargs)


def _is_elementwise(op: _torch.OpOverload) -> bool:
    name = _torch.qualified_name(op).removeprefix("aten::_foreach_").removesuffix("_")
    return name not in ("norm", "max", "powsum")


ELEMENTWISE_LISTS = frozenset(filter(_is_elementwise, _torch.list_ops()))
"""Ops that do the same to each element of each tensor, so that blocks that lie alike can be done as they are."""
