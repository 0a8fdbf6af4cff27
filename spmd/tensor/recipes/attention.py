"""Recipes for attention whose queries are sharded along time. Each rank computes the rows that it has.

    attention(q f32[b, h, T@cp, d], k f32[b, h, T@cp, d], v)          keys and values are gathered over cp
    its gradient                                                     those of keys and values are sums over cp

A causal mask depends on where the rank's rows are. They see all keys before them, and of the keys at their own places
those that are not later: two calls of the kernel, of which only the second is causal. Their results are merged by the
logarithms of their sums (`merged`); so no mask is made. Where ranks can have heads instead, which is sometimes less to
send, the rule of the op is taken: `lower.is_cheaper_by_rule`.

Left out: kernels other than the CPU's, which return more than the sums; they have the rule alone.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe, owed_sums
from spmd.tensor.rules.movement import ranks_of
from spmd.tensor.spec import Spec

aten = torch.ops.aten
KERNEL = aten._scaled_dot_product_flash_attention_for_cpu.default
GRADIENTS = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Axes = tuple[int, ...]


# ---- specs ------------------------------------------------------------------------------------


def attention(call: Call) -> Recipe | None:
    q = call["query"]
    if not _has_sharded_rows(call):
        return None
    out, sums = (Spec.of(q.mesh, o.shape, o.dtype, stride=o.stride, dims=q.dims[: len(o.shape)]) for o in call.outs)
    statics = call["is_causal"], call["scale"]
    return Recipe((_rows(q), *_keys(call), *_masks(call)), (out, sums), local_attention, _rows(q), statics)


def attention_backward(call: Call) -> Recipe | None:
    q = call["query"]
    if not _has_sharded_rows(call):
        return None
    of_rows = tuple(_rows(call[name], q) for name in ("grad_out", "query", "out", "logsumexp"))
    keys = _keys(call)
    owed = owed_sums(q.dims[2])
    outs = of_rows[1], *(Spec.of(x.mesh, x.shape, x.dtype, dims=x.dims, partial=owed) for x in keys)
    g, rows, out, sums = of_rows
    statics = call["is_causal"], call["scale"]
    return Recipe((g, rows, *keys, out, sums, *_masks(call)), outs, local_gradients, rows, statics)


def _has_sharded_rows(call: Call) -> bool:
    """Whether ranks have different rows of whole heads, and may have the keys and values that belong to them."""
    q, k, v = (call[name] for name in ("query", "key", "value"))
    if not q.dims[2] or q.dims[3] or q.partial or call["dropout_p"] != 0 or 0 in (*q.shape, *k.shape):
        return False
    if q.shape[3] != v.shape[3] or k.shape[:2] != v.shape[:2] or k.shape[0] != q.shape[0]:
        return False
    ranks = ranks_of(q, 1)
    return ranks == 1 or q.shape[1] == k.shape[1] or k.shape[1] % ranks == 0


def _rows(x: Spec, like: Spec | None = None) -> Spec:
    """A tensor of batch, heads and rows, laid out as the queries are."""
    return x.moved_to((like or x).dims[: x.ndim], (1,) * x.ndim)


def _keys(call: Call) -> tuple[Spec, Spec]:
    q = call["query"]
    return tuple(call[name].moved_to((*q.dims[:2], (), ()), (1,) * 4) for name in ("key", "value"))


def _masks(call: Call) -> tuple[Spec, ...]:
    """The mask, if there is one: its dims that are not broadcast are laid out as those of the queries."""
    q, mask = call["query"], call["attn_mask"]
    if mask is None:
        return ()
    lead = zip(mask.shape[:-1], q.shape[3 - mask.ndim + 1 : 3], q.dims[3 - mask.ndim + 1 : 3], strict=True)
    dims = (*(axes if n == whole else () for n, whole, axes in lead), ())
    return (mask.moved_to(dims, (1,) * mask.ndim),)


# ---- of a rank --------------------------------------------------------------------------------


def local_attention(recipe: Recipe, at: Coordinate, q, k, v, mask=None) -> tuple:
    causal, scale = recipe.statics
    if not prod(recipe.outs[0].local_shape(at)):
        return tuple(aten.new_zeros.default(q, list(x.local_shape(at)), dtype=x.dtype) for x in recipe.outs)
    found = [
        KERNEL(q, _part(k, keys), _part(v, keys), 0.0, is_causal, attn_mask=mask, scale=scale)
        for keys, is_causal in _parts(recipe, at, causal)
    ]
    if len(found) == 1:
        return found[0][0], found[0][1]
    low, high = (spec.dtype for spec in recipe.outs)
    out, sums = merged(*[y for x in found for y in (_cast(x[0], low, high), x[1])])
    return _cast(out, high, low), sums


def _cast(x, have: torch.dtype, want: torch.dtype):
    return x if have == want else aten._to_copy.default(x, dtype=want)


def local_gradients(recipe: Recipe, at: Coordinate, g, q, k, v, out, sums, mask=None) -> tuple:
    causal, scale = recipe.statics
    if not prod(recipe.outs[0].local_shape(at)):
        return tuple(aten.new_zeros.default(q, list(x.local_shape(at))) for x in recipe.outs)
    parts = _parts(recipe, at, causal)
    found = [
        GRADIENTS(g, q, _part(k, keys), _part(v, keys), out, sums, 0.0, is_causal, attn_mask=mask, scale=scale)
        for keys, is_causal in parts
    ]
    of_q = found[0][0] if len(found) == 1 else aten.add.Tensor(found[0][0], found[1][0])
    after = recipe.ins[2].shape[2] - parts[-1][0][1]
    return of_q, *(_joined([x[i] for x in found], after) for i in (1, 2))


def _parts(recipe: Recipe, at: Coordinate, causal: bool) -> list[tuple[tuple[int, int], bool]]:
    """Which keys the rank's rows see, and whether a row sees only those up to its own place."""
    keys = recipe.ins[2 if recipe.local is local_gradients else 1].shape[2]
    if not causal:
        return [((0, keys), False)]
    start, n = recipe.table.block(2, at)
    parts = [((0, min(start, keys)), False), ((start, min(start + n, keys)), True)]
    return [(each, is_causal) for each, is_causal in parts if each[0] < each[1]]


def _part(x, keys: tuple[int, int]):
    return aten.slice.Tensor(x, 2, *keys)


def _joined(parts: list, after: int):
    """The gradients of all keys: those that come after the rank's rows have none."""
    whole = parts[0] if len(parts) == 1 else aten.cat.default(parts, 2)
    return aten.contiguous.default(aten.constant_pad_nd.default(whole, [0, 0, 0, after]) if after else whole)


def merged(out, sums, other, other_sums) -> tuple:
    """Attention to two sets of keys, from that to each: out [b, h, t, d], and the logarithms of sums [b, h, t].

    Results and sums have one dtype. Sums of minus infinity are those of no keys.

    >>> merged(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf))
    (tensor([[[[1., 1.]]]]), tensor([[[0.]]]))
    """
    part = aten.sigmoid.default(aten.sub.Tensor(other_sums, sums))
    part = aten.nan_to_num.default(part, 0.0)  # where no keys are seen at all; a result that is no number stays so
    return aten.lerp.Tensor(out, other, aten.unsqueeze.default(part, -1)), aten.logaddexp.default(sums, other_sums)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {KERNEL: attention, GRADIENTS: attention_backward}
