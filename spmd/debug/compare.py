"""Compare a DTensor with a tensor of one device, by the blocks of all simulated ranks.

    f32[8@dp, 16]              the block of each rank is compared with its rows
    f32[8@dp, 16] +sum@tp      the sum of the blocks along tp is compared with its rows

No moves are used, because a move might itself be wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch

from spmd import _torch
from spmd.mesh.rank import simulated_by
from spmd.sim import LocalTensor
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.redistribute.boxes import cut_one, narrowed, relative_to, simple
from spmd.tensor.spec import Spec

TOLERANCES = {
    torch.float64: (1e-7, 1e-7), torch.complex128: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5), torch.complex64: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5),
}  # fmt: skip
"""Relative and absolute tolerances by dtype: those of torch.testing.assert_close. Other dtypes must be equal."""


@dataclass(frozen=True)
class Tolerance:
    """How much numbers may differ. None: the entry of TOLERANCES for the dtype."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        rtol, atol = TOLERANCES.get(dtype, (0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


@dataclass(frozen=True)
class Gap:
    """How far a distributed tensor is from the tensor of one device.

    max_abs: the largest absolute difference. It is at the global index `at` on `rank`, where one device has `want` and
    the ranks have `got`. max_rel: the largest relative difference, which may be elsewhere. ranks: all ranks with wrong
    elements. unlike, count: the wrong elements on `rank`, and all its elements. For a Partial, the elements of a rank
    are those of the sum (or other reduction) over the ranks along the partial's axes.
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
            f"{_number_text(self.want)} on one device, {_number_text(self.got)} distributed; "
            f"{self.unlike} of {self.count} elements there, on {ranks}"
        )


def difference(want: torch.Tensor, x: torch.Tensor, tolerance: Tolerance) -> Gap | str | None:
    """How a DTensor, or a plain tensor of the simulation, differs from one device's tensor. None if it does not."""
    if tuple(x.shape) != tuple(want.shape) or x.dtype != want.dtype:
        return f"{_metadata_text(want)} on one device, {_metadata_text(x)} distributed"
    wrong = _wrong_shape(x) if isinstance(x, DTensor) else None
    if wrong is not None:
        return wrong
    gaps = [gap for box in _boxes(x) if (gap := _gap(want, box, tolerance)) is not None]
    if not gaps:
        return None
    worst = max(gaps, key=lambda gap: gap.max_abs)
    ranks = tuple(sorted({rank for gap in gaps for rank in gap.ranks}))
    return Gap(**{**vars(worst), "ranks": ranks, "max_rel": max(gap.max_rel for gap in gaps)})


def overwrite(want: torch.Tensor, x: torch.Tensor) -> None:
    """Write the values of one device's tensor into a distributed tensor. A Partial is left unchanged."""
    if not isinstance(x, DTensor) or x._spec.partial:
        return
    with _torch.no_modes(), simulated_by(None), torch.no_grad():
        for rank, block in _blocks(x._local_tensor, x._spec.mesh.ranks).items():
            box = x._spec.box(x._spec.mesh.coordinate_of(rank))
            block.copy_(cut_one(want, want.shape, box))
    x._note_write()


# ---- from blocks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A box of the global tensor: where it starts, its value, and the ranks that have it; together, for a Partial."""

    ranks: tuple[int, ...]
    start: tuple[int, ...]
    value: torch.Tensor


def _blocks(x: torch.Tensor, ranks: Sequence[int]) -> dict[int, torch.Tensor]:
    return x.local if isinstance(x, LocalTensor) else dict.fromkeys(ranks, x)


def _wrong_shape(x: DTensor) -> str | None:
    """The first block whose shape is not the spec's, in words. None if there is none."""
    spec = x._spec
    for rank, block in _blocks(x._local_tensor, spec.mesh.ranks).items():
        shape = spec.local_shape(spec.mesh.coordinate_of(rank))
        if tuple(block.shape) != shape:
            return f"rank {rank} holds a block of {list(block.shape)}, but {spec} gives it {list(shape)}"
    return None


def _boxes(x: torch.Tensor) -> Iterator[Box]:
    if not isinstance(x, DTensor):
        for rank, block in _blocks(x, [0]).items():
            yield Box((rank,), (0,) * block.ndim, block)
        return
    spec, blocks = x._spec, _blocks(x._local_tensor, x._spec.mesh.ranks)
    groups: dict[tuple, list[int]] = defaultdict(list)
    axes = {axis for axis, _ in spec.partial}
    for rank in spec.mesh.ranks:
        at = spec.mesh.coordinate_of(rank)
        groups[tuple(-1 if axis in axes else i for axis, i in enumerate(at))].append(rank)
    for ranks in groups.values():
        box = spec.box(spec.mesh.coordinate_of(ranks[0]))
        value = _reduced(spec, [blocks[rank] for rank in ranks])
        for part in simple(box):
            start = tuple(side[0] for side in part)
            yield Box(tuple(ranks), start, narrowed(value, relative_to(part, box), value.shape))


def _reduced(spec: Spec, blocks: list[torch.Tensor]) -> torch.Tensor:
    if not spec.partial:
        return blocks[0]
    kinds = {kind for _, kind in spec.partial}
    total = REDUCED["sum" if "avg" in kinds else kinds.pop()](torch.stack(blocks))
    averaged = prod(spec.mesh.shape[axis] for axis, kind in spec.partial if kind == "avg")
    return (total / averaged if averaged > 1 else total).to(spec.dtype)


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0), "product": lambda x: x.prod(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0),
}  # fmt: skip


# ---- two plain tensors ------------------------------------------------------------------------


def _gap(want: torch.Tensor, box: Box, tolerance: Tolerance) -> Gap | None:
    rtol, atol = tolerance.of(want.dtype)
    expected, actual = want[_slices(box.start, box.value)], box.value
    unlike = ~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    if not unlike.any():
        return None
    differences = torch.where(unlike, _distance(expected, actual), 0.0)
    at = tuple(int(i) for i in torch.unravel_index(differences.argmax(), differences.shape))
    relative = torch.where(differences > 0, differences / expected.abs().double(), 0.0)
    index = tuple(start + i for start, i in zip(box.start, at, strict=True))
    return Gap(
        differences[at].item(), relative.nan_to_num(nan=inf).max().item(), index, box.ranks[0], box.ranks,
        expected[at].item(), actual[at].item(), int(unlike.sum()), unlike.numel(),
    )  # fmt: skip


def _slices(start: Iterable[int], like: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, like.shape, strict=True))


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=inf)


def _metadata_text(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _number_text(x: Any) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)
