"""Is this DTensor that tensor? Read off the blocks of all simulated ranks, without a move that might be wrong itself.

    f32[8@dp, 16]              the block of each rank against its rows
    f32[8@dp, 16] +sum@tp      the sum of the blocks along tp against its rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch

from spmd import _torch
from spmd.mesh.rank import played_by
from spmd.sim import LocalTensor
from spmd.tensor.dtensor import DTensor
from spmd.tensor.spec import Spec

TOLERANCES = {
    torch.float64: (1e-7, 1e-7), torch.complex128: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5), torch.complex64: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5),
}  # fmt: skip
"""Relative and absolute, by dtype: those of torch.testing.assert_close. What is not here must be equal."""


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be apart; None: as TOLERANCES says for the dtype."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        rtol, atol = TOLERANCES.get(dtype, (0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


@dataclass(frozen=True)
class Gap:
    """How far a distributed tensor is from the one of one device.

    `max_abs`, at the global index `at` on `rank`, where one device has `want` and the ranks `got`; `max_rel` may be
    elsewhere. `ranks`: all that have wrong elements; `unlike` of `count`: how many of this rank's are. Of a Partial a
    rank's elements are those of the reduction with the ranks it shares them with.
    """

    max_abs: float
    max_rel: float
    at: tuple[int, ...]
    rank: int
    ranks: tuple[int, ...]
    want: Any
    got: Any
    unlike: int
    count: int

    def __str__(self) -> str:
        ranks = f"rank {self.rank}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        return (
            f"max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g} at {list(self.at)} on rank {self.rank}: "
            f"{_number(self.want)} on one device, {_number(self.got)} distributed; "
            f"{self.unlike} of {self.count} elements there, on {ranks}"
        )


def difference(want: torch.Tensor, x: torch.Tensor, tolerance: Tolerance) -> Gap | str | None:
    """How a DTensor, or a plain tensor of the simulation, differs from what one device has; None where it does not."""
    if tuple(x.shape) != tuple(want.shape) or x.dtype != want.dtype:
        return f"{_meta(want)} on one device, {_meta(x)} distributed"
    misfit = _misfit(x) if isinstance(x, DTensor) else None
    if misfit is not None:
        return misfit
    gaps = [gap for part in _parts(x) if (gap := _gap(want, part, tolerance)) is not None]
    if not gaps:
        return None
    worst = max(gaps, key=lambda gap: gap.max_abs)
    ranks = tuple(sorted({rank for gap in gaps for rank in gap.ranks}))
    return Gap(**{**vars(worst), "ranks": ranks, "max_rel": max(gap.max_rel for gap in gaps)})


def take_over(want: torch.Tensor, x: torch.Tensor) -> None:
    """Write what one device has into a distributed tensor that is no Partial."""
    if not isinstance(x, DTensor) or x._spec.partial:
        return
    with _torch.no_modes(), played_by(None), torch.no_grad():
        for rank, own in _blocks(x._local_tensor, x._spec.mesh.ranks).items():
            at = x._spec.mesh.coordinate_of(rank)
            start = (x._spec.block(dim, at)[0] for dim in range(x._spec.ndim))
            own.copy_(want[_cut(start, own)])


# ---- from blocks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Some rows and columns of the global tensor, and the ranks that have them (together)."""

    ranks: tuple[int, ...]
    start: tuple[int, ...]
    value: torch.Tensor


def _blocks(x: torch.Tensor, ranks: Sequence[int]) -> dict[int, torch.Tensor]:
    return x.local if isinstance(x, LocalTensor) else dict.fromkeys(ranks, x)


def _misfit(x: DTensor) -> str | None:
    """What is wrong with the shapes of the blocks."""
    spec = x._spec
    for rank, own in _blocks(x._local_tensor, spec.mesh.ranks).items():
        shape = spec.local_shape(spec.mesh.coordinate_of(rank))
        if tuple(own.shape) != shape:
            return f"rank {rank} holds a block of {list(own.shape)}, but {spec} gives it {list(shape)}"
    return None


def _parts(x: torch.Tensor) -> Iterator[Part]:
    if not isinstance(x, DTensor):
        for rank, own in _blocks(x, [0]).items():
            yield Part((rank,), (0,) * own.ndim, own)
        return
    spec, blocks = x._spec, _blocks(x._local_tensor, x._spec.mesh.ranks)
    shared: dict[tuple, list[int]] = defaultdict(list)
    axes = {axis for axis, _ in spec.partial}
    for rank in spec.mesh.ranks:
        at = spec.mesh.coordinate_of(rank)
        shared[tuple(-1 if axis in axes else i for axis, i in enumerate(at))].append(rank)
    for ranks in shared.values():
        at = spec.mesh.coordinate_of(ranks[0])
        start = tuple(spec.block(dim, at)[0] for dim in range(spec.ndim))
        yield Part(tuple(ranks), start, _reduced(spec, [blocks[rank] for rank in ranks]))


def _reduced(spec: Spec, blocks: list[torch.Tensor]) -> torch.Tensor:
    if not spec.partial:
        return blocks[0]
    kinds = {kind for _, kind in spec.partial}
    whole = REDUCED["sum" if "avg" in kinds else kinds.pop()](torch.stack(blocks))
    averaged = prod(spec.mesh.shape[axis] for axis, kind in spec.partial if kind == "avg")
    return (whole / averaged if averaged > 1 else whole).to(spec.dtype)


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0), "product": lambda x: x.prod(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0),
}  # fmt: skip


# ---- two plain tensors ------------------------------------------------------------------------


def _gap(want: torch.Tensor, part: Part, tolerance: Tolerance) -> Gap | None:
    rtol, atol = tolerance.of(want.dtype)
    ours, theirs = want[_cut(part.start, part.value)], part.value
    unlike = ~torch.isclose(theirs, ours, rtol=rtol, atol=atol, equal_nan=True)
    if not unlike.any():
        return None
    apart = torch.where(unlike, _distance(ours, theirs), 0.0)
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    relative = torch.where(apart > 0, apart / ours.abs().double(), 0.0)
    index = tuple(start + i for start, i in zip(part.start, at, strict=True))
    return Gap(
        apart[at].item(), relative.nan_to_num(nan=inf).max().item(), index, part.ranks[0], part.ranks,
        ours[at].item(), theirs[at].item(), int(unlike.sum()), unlike.numel(),
    )  # fmt: skip


def _cut(start: Iterable[int], like: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, like.shape, strict=True))


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=inf)


def _meta(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _number(x: Any) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)
