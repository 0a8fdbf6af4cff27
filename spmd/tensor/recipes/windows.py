"""Windows along sharded dims: which rows a rank needs for its windows, and which windows see its rows.

    Windows(size=8, count=8, reach=3, stride=1, padding=1)    of 8 rows on 4 ranks: windows 2, 3 see rows 1 to 4

An image is cut into windows by convolutions and pooling. A block of windows sees an interval of rows, and a block of
rows is seen by an interval of windows. Either interval is got by a halo (`spmd.tensor.redistribute.halo`). The result
of an op is in the blocks of `torch.chunk`, whatever the blocks of its operands are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmd.tensor.call import Call
from spmd.tensor.redistribute.halo import HaloPlan, Interval, intervals_of, place_of, plan_with_halos, sum_of_halos
from spmd.tensor.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class Windows:
    """The windows along one dim: `count` windows of an image of `size` rows.

    reach: from the first to the last row of a window, both counted. padding: how many rows before the image the first
    window begins.
    """

    size: int
    count: int
    reach: int
    stride: int
    padding: int

    def rows(self, windows: Interval) -> Interval:
        """The rows that these windows see, some of them perhaps before or behind the image.

        >>> Windows(8, 8, 3, 1, 1).rows((0, 2))
        (-1, 3)
        """
        first, end = windows
        if first == end:
            return 0, 0
        return first * self.stride - self.padding, (end - 1) * self.stride - self.padding + self.reach

    def over(self, rows: Interval) -> Interval:
        """The windows that see some of these rows.

        >>> Windows(8, 8, 3, 1, 1).over((2, 4))
        (1, 5)
        """
        start, stop = rows
        if start == stop:
            return 0, 0
        first = max(0, -(-(start + self.padding - self.reach + 1) // self.stride))
        end = min(self.count, (stop - 1 + self.padding) // self.stride + 1)
        return (first, end) if first < end else (0, 0)


def hull(a: Interval, b: Interval) -> Interval:
    """The shortest interval with all rows of both.

    >>> hull((2, 4), (3, 6)), hull((0, 0), (3, 6))
    ((2, 6), (3, 6))
    """
    if a[0] == a[1] or b[0] == b[1]:
        return b if a[0] == a[1] else a
    return min(a[0], b[0]), max(a[1], b[1])


Along = tuple[tuple[int, Windows], ...]
"""For each sharded dim that is cut into windows: the dim, and its windows."""


def windows_of(call: Call, image: Sequence[int], counts: Sequence[int]) -> list[Windows]:
    """The windows along each dim of an image of these sizes, with so many windows.

    The call has `stride` and `padding`, perhaps `dilation`, and a kernel or its size.
    """
    n = len(image)
    kernel = call["weight"].shape[2:] if call["weight"] is not None else per_dim(call["kernel_size"], n)
    stride = per_dim(call["stride"], n) if call["stride"] else kernel
    padding, dilation = per_dim(call["padding"], n), per_dim(call["dilation"] or 1, n)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    return [Windows(*each) for each in zip(image, counts, reach, stride, padding, strict=True)]


def along_shards(windows: Sequence[Windows], lead: int, sharded: Spec) -> Along:
    """The windows along the dims that are sharded. lead: the number of dims before those of the image."""
    return tuple((lead + d, w) for d, w in enumerate(windows) if sharded.dims[lead + d])


def tile(along: Along, image: Spec) -> bool:
    """Whether the windows lie side by side, and none lies across two blocks of the image: so no rank needs a halo.

    The rules keep such windows, too (`spmd.tensor.rules.tiles`).
    """
    side_by_side = all(w.reach <= w.stride and not w.padding and w.size == w.count * w.stride for _, w in along)
    return side_by_side and all(image.aligned(dim, w.stride) for dim, w in along)


def per_dim(value, n: int) -> tuple[int, ...]:
    """An argument with one number for each of n dims; a single number counts for all."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * n if len(values) == 1 else values


def unpadded(values: Sequence[int], along: Along, lead: int) -> tuple[int, ...]:
    """The padding for a rank's own rows: none along the dims of `along`, whose blocks have all rows."""
    sharded = {dim for dim, _ in along}
    return tuple(0 if lead + d in sharded else value for d, value in enumerate(values))


# ---- intervals of blocks ----------------------------------------------------------------------


def interval_of(spec: Spec, dim: int, at: Sequence[int]) -> Interval:
    """The rows of a rank's block."""
    return intervals_of(spec, dim)[place_of(spec, dim, at)]


def rows_plan(src: Spec, dst: Spec, along: Along, windows: Spec, own: bool = False, fill: float = 0) -> HaloPlan:
    """The plan of an image that gives each rank the rows of its windows, which have the layout `windows`.

    own: and the rows of its own block.
    """
    wanted = {dim: [w.rows(each) for each in intervals_of(windows, dim)] for dim, w in along}
    return plan_with_halos(src, dst, _with_own(wanted, dst) if own else wanted, fill)


def sum_of_rows(image: Spec, along: Along, windows: Spec) -> HaloPlan:
    """The plan that adds up, in the layout `image`, what the ranks have for the rows of their windows."""
    return sum_of_halos(image, {dim: [w.rows(each) for each in intervals_of(windows, dim)] for dim, w in along})


def windows_plan(src: Spec, dst: Spec, along: Along, rows: Spec, own: bool = False) -> HaloPlan:
    """The plan of a tensor of windows that gives each rank those that see its rows, which have the layout `rows`."""
    wanted = {dim: [w.over(each) for each in intervals_of(rows, dim)] for dim, w in along}
    return plan_with_halos(src, dst, _with_own(wanted, dst) if own else wanted)


def _with_own(wanted: dict[int, list[Interval]], spec: Spec) -> dict[int, list[Interval]]:
    return {d: [hull(a, b) for a, b in zip(each, intervals_of(spec, d), strict=True)] for d, each in wanted.items()}


# ---- blocks -----------------------------------------------------------------------------------


def part(x, dim: int, start: int, stop: int):
    """Some rows of a block."""
    return aten.slice.Tensor(x, dim, start, stop)


def reframed(x, ndim: int, frames: dict[int, tuple[Interval, Interval]]):
    """x with other rows along some dims: it has the rows of the first interval, and gets those of the second.

    Zeros stand for the rows that it does not have.
    """
    pads = {}
    for dim, ((start, stop), (first, end)) in frames.items():
        a = min(max(start, first), stop)
        b = max(a, min(stop, end))
        x = x if (a, b) == (start, stop) else part(x, dim, a - start, b - start)
        pads[dim] = (a - first, end - b) if a < b else (0, end - first)
    if not any(map(any, pads.values())):
        return x
    return aten.constant_pad_nd.default(x, [n for d in reversed(range(ndim)) for n in pads.get(d, (0, 0))])
