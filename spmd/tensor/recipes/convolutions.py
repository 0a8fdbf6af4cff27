"""Recipes for convolutions of an image whose height, width or depth is sharded. Each rank receives a halo.

    convolution(f32[1, 8, 16, 64@tp], f32[8, 8, 3, 3])       a column from each neighbour, then 16 columns of the result
    convolution_backward(...)                                a column of the gradient from each neighbour; the gradients
                                                             of weight and bias are sums over tp

Forward, a rank gets the rows that its windows see. Backward, it gets the gradients of all windows that see its own
rows: so the gradient of these rows is complete, and nothing has to be sent back. Where there are many more channels
behind the convolution than before it, the rows of the image and their gradients are fewer bytes: then a rank gets the
rows that its windows see, and sends their gradients back. In a transposed convolution image and windows change places.
Channels may be sharded over other axes at the same time, if there is one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe, owed_sums
from spmd.tensor.recipes.windows import (
    Along,
    along_shards,
    hull,
    interval_of,
    part,
    reframed,
    rows_plan,
    sum_of_rows,
    tile,
    unpadded,
    windows_of,
    windows_plan,
)
from spmd.tensor.redistribute.halo import Interval
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.spec import Spec

aten = torch.ops.aten
Axes = tuple[int, ...]


@dataclass(frozen=True)
class Layouts:
    """How the operands of a convolution are laid out.

    n, o, c: the axes of the batch, of the channels that come out, and of those that go in. places: those of the dims of
    image and result, and along: their windows. lead: the operand whose blocks are kept.
    """

    n: Axes
    o: Axes
    c: Axes
    places: tuple[Axes, ...]
    along: Along
    lead: Spec

    def spec(self, x: Spec, channels: Axes, partial: Sequence[int] = ()) -> Spec:
        """The spec of an image or a result, of shape and dtype of x. The blocks of the lead stay as they are."""
        units = (self.lead.units[0], 1, *(self.lead.units[2:] if x is self.lead else (1,) * len(self.places)))
        dims = (self.n, channels, *self.places)
        return Spec.of(x.mesh, x.shape, x.dtype, dims=dims, units=units, partial=owed_sums(partial))

    def kernel(self, w: Spec, transposed: bool, partial: Sequence[int] = ()) -> Spec:
        """The spec of the weight, or of its gradient."""
        channels = (self.c, self.o) if transposed else (self.o, self.c)
        dims = (*channels, *((),) * (w.ndim - 2))
        return Spec.of(w.mesh, w.shape, w.dtype, dims=dims, partial=owed_sums(partial))

    @property
    def summed(self) -> Axes:
        """The axes whose ranks have other windows."""
        return self.n + tuple(a for axes in self.places for a in axes)


def _layouts(call: Call, x: Spec, y: Spec) -> Layouts | None:
    """The layouts for an input x and a result y. None if none of the two is sharded along a dim of the image."""
    lead = x if any(x.dims[2:]) else y
    if not any(lead.dims[2:]) or 0 in (*x.shape, *y.shape, *call["weight"].shape):
        return None
    used = {a for axes in lead.dims[2:] for a in axes}

    def unused(axes: Axes) -> Axes:
        found = tuple(a for a in axes if a not in used)
        used.update(found)
        return found

    n, o, c = unused(lead.dims[0]), (), ()
    if call["groups"] == 1:  # a convolution of a block of channels would need another number of groups
        ins, outs = call["weight"].dims[:2] if call["transposed"] else call["weight"].dims[1::-1]
        o = unused(outs or y.dims[1])
        c = unused(x.dims[1] or ins) if call["bias"] is None else ()
    image, windows = (y, x) if call["transposed"] else (x, y)
    along = along_shards(windows_of(call, image.shape[2:], windows.shape[2:]), 2, lead)
    if tile(along, image):
        return None
    return Layouts(n, o, c, lead.dims[2:], along, lead)


def _options(call: Call, along: Along) -> tuple:
    """Stride, padding, dilation, whether it is transposed, output padding and groups, for the rows of a rank."""
    padding, more = (unpadded(call[name], along, 2) for name in ("padding", "output_padding"))
    return (*map(tuple, (call["stride"], padding, call["dilation"])), call["transposed"], more, call["groups"])


# ---- forward ----------------------------------------------------------------------------------


def convolution(call: Call) -> Recipe | None:
    x, w, bias, (out,) = call["input"], call["weight"], call["bias"], call.outs
    y = Spec.of(x.mesh, out.shape, out.dtype)
    found = _layouts(call, x, y)
    if found is None:
        return None
    given, result = found.spec(x, found.c), found.spec(y, found.o, found.c)
    plan_of, local = (windows_plan, local_transposed) if call["transposed"] else (rows_plan, local_convolution)
    biases = () if bias is None else (bias.moved_to((found.o,)),)
    ins = (given, found.kernel(w, call["transposed"]), *biases)
    halos = (plan_of(x, given, found.along, result), *(None,) * (len(ins) - 1))
    return Recipe(ins, (result,), local, given, (found.along, _options(call, found.along)), halos)


def local_convolution(recipe: Recipe, at: Coordinate, x, w, bias=None) -> tuple:
    (along, options), (out,) = recipe.statics, recipe.outs
    if _is_thin(at, recipe.ins[0]) or _is_empty(at, out):
        return (_zeros(x, out, at),)
    for dim, windows in along:
        start, stop = windows.rows(interval_of(out, dim, at))
        x = part(x, dim, 0, stop - start)
    return (_in_order(aten.convolution.default(x, w, bias, *options)),)


def local_transposed(recipe: Recipe, at: Coordinate, x, w, bias=None) -> tuple:
    (along, options), (out,) = recipe.statics, recipe.outs
    frames, nothing = {}, _is_thin(at, recipe.ins[0], out)
    for dim, windows in along:
        rows = interval_of(out, dim, at)
        got = windows.over(rows)
        x, seen = part(x, dim, 0, got[1] - got[0]), windows.rows(got)
        frames[dim] = (seen, rows)
        nothing |= got[0] == got[1]
    y = _zeros(x, out, at) if nothing else reframed(aten.convolution.default(x, w, None, *options), out.ndim, frames)
    if bias is not None:
        y = aten.add.Tensor(y, aten.view.default(bias, [1, -1, *[1] * (out.ndim - 2)]))
    return (_in_order(y),)


# ---- backward ---------------------------------------------------------------------------------


def convolution_backward(call: Call) -> Recipe | None:
    y, x, w, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    found = _layouts(call, x, y)
    if found is None:
        return None
    transposed, along = call["transposed"], found.along
    image, grad, kernel = found.spec(x, found.c), found.spec(y, found.o), found.kernel(w, transposed)
    sums = ()
    if transposed:
        halos, local = (rows_plan(y, grad, along, image, own=mask[2]), None, None), local_gradients_of_transposed
    else:
        halos, local = (windows_plan(y, grad, along, image, own=mask[2]), None, None), local_gradients
        of_image = (None, rows_plan(x, image, along, grad), None)
        into = (sum_of_rows(image, along, grad), None, None) if mask[0] else ()
        if not found.o and _nbytes((*of_image, *into), y, grad) < _nbytes(halos, x, image):
            halos, sums, local = of_image, into, local_gradients_by_image
    results = found.spec(x, found.c, found.o), found.kernel(w, transposed, found.summed), _bias(call, found)
    outs = tuple(spec if wanted else None for spec, wanted in zip(results, mask, strict=True))
    statics = (along, _options(call, along), tuple(mask))
    return Recipe((grad, image, kernel), outs, local, image, statics, halos, sums=sums)


def _nbytes(halos: tuple[Plan | None, ...], other: Spec, target: Spec) -> int:
    """The bytes of the plans with halos, and of the plan of the operand that has none."""
    return sum(p.bytes_per_rank for p in (*halos, plan(other, target)) if p is not None)


def _bias(call: Call, found: Layouts) -> Spec | None:
    out = call.outs[2]
    return out and Spec.of(call.mesh, out.shape, out.dtype, dims=(found.o,), partial=owed_sums(found.summed))


def local_gradients(recipe: Recipe, at: Coordinate, g, x, w) -> tuple:
    """From the gradients of all windows that see the rank's rows. The image stands among zeros."""
    (along, _, mask), (grad, image, _) = recipe.statics, recipe.ins
    frames, own, nothing = {}, {}, False
    for dim, windows in along:
        rows, mine = interval_of(image, dim, at), interval_of(grad, dim, at)
        got = hull(windows.over(rows), mine) if mask[2] else windows.over(rows)
        g, seen = part(g, dim, 0, got[1] - got[0]), windows.rows(got)
        frames[dim], own[dim] = (rows, seen), (mine[0] - got[0], mine[1] - got[0])
        nothing |= got[0] == got[1]
    return (*_kernel_gradients(recipe, at, g, x, w, nothing, frames), _bias_gradient(recipe, at, g, own))


def local_gradients_of_transposed(recipe: Recipe, at: Coordinate, g, x, w) -> tuple:
    """From the gradients of all rows that the rank's windows add to."""
    (along, _, mask), (grad, image, _) = recipe.statics, recipe.ins
    seen, own, nothing = g, {}, False
    for dim, windows in along:
        rows, mine = windows.rows(interval_of(image, dim, at)), interval_of(grad, dim, at)
        got = hull(rows, mine) if mask[2] else rows
        seen, own[dim] = part(seen, dim, rows[0] - got[0], rows[1] - got[0]), (mine[0] - got[0], mine[1] - got[0])
        nothing |= rows[0] == rows[1]
    return (*_kernel_gradients(recipe, at, seen, x, w, nothing), _bias_gradient(recipe, at, g, own))


def local_gradients_by_image(recipe: Recipe, at: Coordinate, g, x, w) -> tuple:
    """From the rows that the rank's windows see. The gradients of rows of other ranks are sent back to these."""
    (along, _, mask), grad, made, own, frames = recipe.statics, recipe.ins[0], recipe.made[0], {}, {}
    for dim, windows in along:
        start, stop = interval_of(grad, dim, at)
        first, end = windows.rows((start, stop))
        x, own[dim] = part(x, dim, 0, end - first), (0, stop - start)
        frames[dim] = (0, end - first), (0, made.local_shape(at)[dim]) if mask[0] else (0, 0)
    back, of_weight = _kernel_gradients(recipe, at, g, x, w, nothing := _is_empty(at, grad))
    if back is not None and not nothing:
        back = reframed(back, made.ndim, frames)
    return back, of_weight, _bias_gradient(recipe, at, g, own)


Frames = dict[int, tuple[Interval, Interval]]


def _kernel_gradients(recipe: Recipe, at: Coordinate, g, x, w, nothing: bool, frames: Frames | None = None) -> tuple:
    """The gradients of the image and of the weight, None where they are not wanted.

    nothing: the rank has no windows. frames: along these dims, the rank's rows of the image and those that g is about.
    """
    (_, options, mask), (grad, image, _) = recipe.statics, recipe.ins
    frames = frames or {}
    if nothing or _is_thin(at, grad, image):
        return tuple(spec and _zeros(w, spec, at) for spec in recipe.made[:2])
    if not any(mask[:2]):
        return None, None
    x = reframed(x, image.ndim, frames)
    of_image, of_weight, _ = aten.convolution_backward.default(g, x, w, None, *options, [*mask[:2], False])
    if mask[0]:
        of_image = _in_order(reframed(of_image, image.ndim, {d: (seen, rows) for d, (rows, seen) in frames.items()}))
    return of_image if mask[0] else None, _in_order(of_weight) if mask[1] else None


def _bias_gradient(recipe: Recipe, at: Coordinate, g, own: dict[int, Interval]):
    """The sum of the rank's own gradients, which are these rows of g; None if it is not wanted."""
    if not recipe.statics[2][2]:
        return None
    for dim, (start, stop) in own.items():
        g = part(g, dim, start, stop)
    return aten.sum.dim_IntList(g, [d for d in range(recipe.ins[0].ndim) if d != 1])


# ---- of a rank --------------------------------------------------------------------------------


def _zeros(x, spec: Spec, at: Coordinate):
    return aten.new_zeros.default(x, list(spec.local_shape(at)))


def _in_order(x):
    """x with its dims in memory in their order, as the specs say. Kernels keep the order of one of the operands."""
    return aten.contiguous.default(x)


def _is_empty(at: Coordinate, spec: Spec) -> bool:
    """Whether the rank has no elements of a tensor."""
    return not prod(spec.local_shape(at))


def _is_thin(at: Coordinate, *specs: Spec) -> bool:
    """Whether the rank has no images or no channels of some tensor: the kernels refuse that."""
    return any(not prod(spec.local_shape(at)[:2]) for spec in specs)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
