"""Windows that do not overlap: where each is as long as the step between two, or shorter, ranks need no neighbours.

    avg_pool2d(f32[8, 3, 32@tp, 32], 2)             blocks of 2 rows give a row each: f32[8, 3, 16@tp, 16]
    convolution(f32[1, 8, 16, 64@tp], stride 4)     windows of 4 columns that lie side by side: f32[1, 8, 4, 16@tp]

A dim of windows that tile is free: `stride` indices of the image make one index of the result. Windows that overlap
leave the dim whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.tensor.call import Call
from spmd.tensor.rules.rule import Dims, Factor


def tiles(image: Sequence[int], windows: Sequence[int], kernel, call: Call) -> tuple[Dims, Dims]:
    """The dims of an image and of its windows, given the sizes of both: a factor for each dim where windows tile it.

    kernel: the length of a window in each dim. The call has stride, padding and dilation.
    """
    n = len(image)
    kernel = _per_dim(kernel, n)
    stride, padding, dilation = (_per_dim(call[name], n) for name in ("stride", "padding", "dilation"))
    stride = stride or kernel
    inner, outer = [], []
    for d, (size, count, k, s) in enumerate(zip(image, windows, kernel, stride, strict=True)):
        reach = (dilation[d] if dilation else 1) * (k - 1) + 1
        tiled = reach <= s and not (padding and padding[d]) and size == count * s
        inner.append(Factor(f"x{d}", s) if tiled else None)
        outer.append(Factor(f"x{d}") if tiled else None)
    return tuple(inner), tuple(outer)


def _per_dim(value, n: int) -> tuple[int, ...]:
    """An argument with one number for each dim; a single number counts for all. Empty where it is not given."""
    values = tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
    return values * n if len(values) == 1 else values
