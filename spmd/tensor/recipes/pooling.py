"""Recipes for pooling and padding of an image whose height, width or depth is sharded. Each rank receives a halo.

    max_pool2d_with_indices(f32[1, 8, 16, 64@tp], 3, 1, 1)      a column from each neighbour; the indices are global
    avg_pool2d(f32[1, 8, 16, 64@tp], 2)                         windows that do not overlap: nothing is sent
    constant_pad_nd(f32[8@tp], [1, 1])                          all blocks begin a row earlier

Backward, a rank gets the averages' gradients of all windows that see its own rows. Those of maxima would need their
indices; so there a rank adds them up among the rows that its windows see, and sends other ranks' rows back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf, prod
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe
from spmd.tensor.recipes.windows import (
    Windows,
    along_shards,
    interval_of,
    part,
    per_dim,
    reframed,
    rows_plan,
    sum_of_rows,
    tile,
    unpadded,
    windows_of,
    windows_plan,
)
from spmd.tensor.redistribute.halo import Interval
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def _lead(call: Call, x: Spec) -> int:
    """The number of dims before those of the image: batch and channels."""
    return x.ndim - (3 if "3d" in call.name else 2)


def _laid_out(like: Spec, x: Any, lead: int) -> Spec:
    """The spec of an image or a result x: sharded as `like`, in canonical blocks along the dims of the image."""
    units = (*like.units[:lead], *(like.units[lead:] if x is like else (1,) * (like.ndim - lead)))
    return Spec.of(like.mesh, x.shape, x.dtype, dims=like.dims, units=units)


def _is_shared(x: Spec, lead: int, *others: Any) -> bool:
    return any(x.dims[lead:]) and not any(0 in t.shape for t in (x, *others))


def _kernel(call: Call, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Length and stride of the windows in each of n dims."""
    kernel = per_dim(call["kernel_size"], n)
    return kernel, per_dim(call["stride"], n) if call["stride"] else kernel


# ---- maxima -----------------------------------------------------------------------------------


def max_pool(call: Call) -> Recipe | None:
    x, outs, lead = call["self"], call.outs, _lead(call, call["self"])
    if not _is_shared(x, lead, *outs):
        return None
    windows = windows_of(call, x.shape[lead:], outs[0].shape[lead:])
    along, given = along_shards(windows, lead, x), _laid_out(x, x, lead)
    results = tuple(_laid_out(x, out, lead) for out in outs)
    padding, dilation = (per_dim(call[name], len(windows)) for name in ("padding", "dilation"))
    lowest = -inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    options = (*_kernel(call, len(windows)), unpadded(padding, along, lead), dilation, call["ceil_mode"])
    halo = rows_plan(x, given, along, results[0], fill=lowest)
    return Recipe((given,), results, local_max_pool, given, (call.op, along, options), (halo,))


def local_max_pool(recipe: Recipe, at: Coordinate, x) -> tuple:
    (op, along, options), (out, _) = recipe.statics, recipe.outs
    shape = out.local_shape(at)
    if not prod(shape):
        return tuple(aten.new_zeros.default(x, list(shape), dtype=spec.dtype) for spec in recipe.outs)
    lead, rows = out.ndim - len(options[0]), {}
    for dim, windows in along:
        rows[dim] = start, stop = windows.rows(interval_of(out, dim, at))
        x = part(x, dim, 0, stop - start)
    values, indices = op(x, *options)
    sizes = recipe.table.shape[lead:]
    lengths = [rows[d][1] - rows[d][0] if d in rows else n for d, n in enumerate(recipe.table.shape)][lead:]
    places = _places(indices, lengths)
    for dim, (start, _) in rows.items():
        places[dim - lead] = _first_in_image(aten.add.Scalar(places[dim - lead], start), options[3][dim - lead], start)
    return values, _numbered(places, sizes)


def _first_in_image(place, dilation: int, start: int):
    """If all of a window is -inf, its first row counts; if that is padding, its first row in the image."""
    if start >= 0:
        return place
    return aten.where.self(aten.lt.Scalar(place, 0), aten.remainder.Scalar(place, dilation), place)


def _places(indices, sizes: Sequence[int]) -> list:
    """The place along each dim of an image of these sizes, from the number of an element."""
    places = []
    for size in reversed(sizes):
        places.insert(0, aten.remainder.Scalar(indices, size))
        indices = aten.floor_divide.default(indices, size)
    return places


def _numbered(places: Sequence, sizes: Sequence[int]):
    """The number of an element of an image of these sizes, from its place along each dim."""
    number = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        number = aten.add.Tensor(aten.mul.Scalar(number, size), place)
    return number


def max_pool_backward(call: Call) -> Recipe | None:
    g, x, indices = call["grad_output"], call["self"], call["indices"]
    lead = _lead(call, x)
    like = x if any(x.dims[lead:]) else g
    if not _is_shared(like, lead, x, g):
        return None
    along = along_shards(windows_of(call, x.shape[lead:], g.shape[lead:]), lead, like)
    image, grad, numbers = (_laid_out(like, t, lead) for t in (x, g, indices))
    sums = (sum_of_rows(image, along, grad),)
    return Recipe((grad, x, numbers), (image,), local_max_pool_backward, grad, (along, lead), sums=sums)


def local_max_pool_backward(recipe: Recipe, at: Coordinate, g, x, indices) -> tuple:
    """Each gradient is added to the place that its index names, among the rows that the rank's windows see."""
    (along, lead), (made,), (image,) = recipe.statics, recipe.made, recipe.outs
    shape = made.local_shape(at)
    if not prod(shape) or not prod(recipe.table.local_shape(at)):
        return (aten.new_zeros.default(g, list(shape)),)
    places = _places(indices, image.shape[lead:])
    for dim, windows in along:
        start, _ = windows.rows(interval_of(recipe.table, dim, at))
        places[dim - lead] = aten.sub.Scalar(places[dim - lead], start)
    zeros = aten.new_zeros.default(g, [*shape[:lead], prod(shape[lead:])])
    numbers, g = (aten.reshape.default(t, [*shape[:lead], -1]) for t in (_numbered(places, shape[lead:]), g))
    return (aten.reshape.default(aten.scatter_add.default(zeros, lead, numbers, g), list(shape)),)


# ---- averages ---------------------------------------------------------------------------------


def avg_pool(call: Call) -> Recipe | None:
    x, (out,), lead = call["self"], call.outs, _lead(call, call["self"])
    if not _is_shared(x, lead, out) or not x.dtype.is_floating_point:  # averages of whole numbers are rounded
        return None
    windows = windows_of(call, x.shape[lead:], out.shape[lead:])
    along, given, result = along_shards(windows, lead, x), _laid_out(x, x, lead), _laid_out(x, out, lead)
    if tile(along, x):
        return None
    halo = rows_plan(x, given, along, result)
    statics = (call.op, along, tuple(windows), _divisor(call), _sums(call, windows, along, lead))
    return Recipe((given,), (result,), local_avg_pool, given, statics, (halo,))


def _sums(call: Call, windows: Sequence[Windows], along, lead: int) -> tuple:
    """The options of an average with which it is a sum."""
    padding = unpadded(per_dim(call["padding"], len(windows)), along, lead)
    return (*_kernel(call, len(windows)), padding, call["ceil_mode"], True, 1)


def _divisor(call: Call) -> int | bool:
    """The number to divide all sums by; or else whether padding counts."""
    given = call["divisor_override"]
    return call["count_include_pad"] if given is None else int(given)


def local_avg_pool(recipe: Recipe, at: Coordinate, x) -> tuple:
    (op, along, windows, divisor, options), (out,) = recipe.statics, recipe.outs
    if not prod(out.local_shape(at)):
        return (aten.new_zeros.default(x, list(out.local_shape(at))),)
    for dim, w in along:
        start, stop = w.rows(interval_of(out, dim, at))
        x = part(x, dim, 0, stop - start)
    lead = out.ndim - len(windows)
    intervals = [interval_of(out, lead + d, at) for d in range(len(windows))]
    return (_divided(op(x, *options), windows, intervals, divisor),)


def _divided(y, windows: Sequence[Windows], intervals: Sequence[Interval], divisor: int | bool):
    """The sums of these windows, divided by how many elements each of them has."""
    if type(divisor) is int:
        return aten.div.Scalar(y, divisor)
    total = 1
    for d, (w, (first, end)) in enumerate(zip(windows, intervals, strict=True)):
        counts = [_count(w, i, divisor) for i in range(first, end)]
        runs = [aten.new_full.default(y, [len(list(run))], count) for count, run in groupby(counts)]
        along = aten.view.default(aten.cat.default(runs), [-1, *[1] * (len(windows) - 1 - d)])
        total = along if d == 0 else aten.mul.Tensor(total, along)
    return aten.div.Tensor(y, total)


def _count(w: Windows, i: int, with_padding: bool) -> int:
    """The rows of the i-th window. Rows behind the padding never count."""
    start = i * w.stride - w.padding
    stop = min(start + w.reach, w.size + w.padding)
    return stop - start if with_padding else min(stop, w.size) - max(start, 0)


def avg_pool_backward(call: Call) -> Recipe | None:
    g, x = call["grad_output"], call["self"]
    lead = _lead(call, x)
    like = x if any(x.dims[lead:]) else g
    if not _is_shared(like, lead, x, g) or not x.dtype.is_floating_point:
        return None
    windows = windows_of(call, x.shape[lead:], g.shape[lead:])
    along, image, grad = along_shards(windows, lead, like), _laid_out(like, x, lead), _laid_out(like, g, lead)
    if tile(along, image):
        return None
    statics = (call.op, along, tuple(windows), _divisor(call), _sums(call, windows, along, lead))
    halos = (windows_plan(g, grad, along, image), None)
    return Recipe((grad, x), (image,), local_avg_pool_backward, image, statics, halos)


def local_avg_pool_backward(recipe: Recipe, at: Coordinate, g, x) -> tuple:
    (op, along, windows, divisor, options), image = recipe.statics, recipe.table
    lead, shape, frames, nothing = image.ndim - len(windows), list(image.local_shape(at)), {}, False
    intervals = [(0, w.count) for w in windows]
    for dim, w in along:
        rows = interval_of(image, dim, at)
        first, end = intervals[dim - lead] = w.over(rows)
        g, frames[dim], nothing = part(g, dim, 0, end - first), (w.rows((first, end)), rows), nothing or first == end
    if nothing or not prod(shape):
        return (aten.new_zeros.default(g, shape),)
    g = _divided(g, windows, intervals, divisor)
    seen = [frames[d][0][1] - frames[d][0][0] if d in frames else n for d, n in enumerate(shape)]
    return (reframed(op(g, aten.new_zeros.default(g, seen), *options), image.ndim, frames),)


# ---- padding ----------------------------------------------------------------------------------


def pad(call: Call) -> Recipe | None:
    """A padded dim is shifted: each rank has the rows of its block of the result, which may be a neighbour's."""
    x, (out,), n = call["self"], call.outs, call["self"].ndim
    pads = [(0, 0)] * n
    for i in range(len(call["pad"]) // 2):
        pads[n - 1 - i] = tuple(call["pad"][2 * i : 2 * i + 2])
    shifted = [d for d in range(n) if any(pads[d]) and x.dims[d]]
    if not shifted or 0 in (*x.shape, *out.shape):
        return None
    along = tuple((d, Windows(x.shape[d], out.shape[d], 1, 1, pads[d][0])) for d in shifted)
    given = x.moved_to(x.dims, x.units)
    units = tuple(1 if d in shifted else unit for d, unit in enumerate(x.units))
    result = Spec.of(x.mesh, out.shape, out.dtype, dims=x.dims, units=units)
    rest = tuple(p for d in reversed(range(n)) for p in ((0, 0) if d in shifted else pads[d]))
    halo = rows_plan(x, given, along, result, fill=call["value"])
    return Recipe((given,), (result,), local_pad, given, (along, rest, call["value"]), (halo,))


def local_pad(recipe: Recipe, at: Coordinate, x) -> tuple:
    (along, pads, value), (out,) = recipe.statics, recipe.outs
    for dim, _ in along:
        start, stop = interval_of(out, dim, at)
        x = part(x, dim, 0, stop - start)
    return (aten.constant_pad_nd.default(x, pads, value),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool3d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.max_pool3d_with_indices_backward.default: max_pool_backward,
    aten.avg_pool2d.default: avg_pool,
    aten.avg_pool3d.default: avg_pool,
    aten.avg_pool2d_backward.default: avg_pool_backward,
    aten.avg_pool3d_backward.default: avg_pool_backward,
    aten.constant_pad_nd.default: pad,
}
