"""`interpolate` in a trace: torch finds the new size in C++, which makes numbers of all sizes, the batch among them.

    F.interpolate(x, scale_factor=2)  ->  upsample_nearest2d(x, [2 * x.shape[2], 2 * x.shape[3]], 2.0, 2.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

OPS = {
    ("nearest", 1): aten.upsample_nearest1d.default, ("nearest", 2): aten.upsample_nearest2d.default,
    ("nearest", 3): aten.upsample_nearest3d.default, ("linear", 1): aten.upsample_linear1d.default,
    ("bilinear", 2): aten.upsample_bilinear2d.default, ("bicubic", 2): aten.upsample_bicubic2d.default,
    ("trilinear", 3): aten.upsample_trilinear3d.default,
    ("nearest-exact", 1): aten._upsample_nearest_exact1d.default,
    ("nearest-exact", 2): aten._upsample_nearest_exact2d.default,
    ("nearest-exact", 3): aten._upsample_nearest_exact3d.default,
}  # fmt: skip
"""By the mode and the number of dims behind the batch and the channels."""


def interpolate(
    input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Any:  # fmt: skip
    """What torch's function gives. NotImplemented where that has something to say, and for what needs no help."""
    n = input.ndim - 2
    op, given = OPS.get((mode, n)), _each(size if scale_factor is None else scale_factor, n)
    is_plain = antialias is False and not recompute_scale_factor and (size is None) != (scale_factor is None)
    if op is None or given is None or not is_plain or (align_corners is not None and "nearest" in mode):
        return NotImplemented
    corners = () if "nearest" in mode else (bool(align_corners),)
    if scale_factor is None:
        return op(input, given, *corners)
    scales = [float(s) for s in given]
    return op(input, [_scaled(n, s) for n, s in zip(input.shape[2:], scales, strict=True)], *corners, *scales)


def _each(value: Any, n: int) -> list[Any] | None:
    """The value of each of n dims; None where it has another number of them."""
    values = list(value) if isinstance(value, Sequence) else [value] * n
    return values if len(values) == n else None


def _scaled(n: Any, scale: float) -> Any:
    # A size may be a symbol, and stays one where no part of an index is cut off.
    return n * int(scale) if scale.is_integer() else int(n * scale)
