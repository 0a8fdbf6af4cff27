"""A constraint: how a value is to lie, as the user says it for a value that is no input, parameter or result.

    {"tp": Shard(2)}                 shards of dim 2 over tp; an axis that is left out replicates
    {"tp": Shard(2), "dp": None}     the same, and dp stays as it is found best

`spmd.constrain` says it in the code of a step, and `placements=` of `spmd.compile` by the name of a module or by a line
of code. Both mean the same: where the value is made it is moved there, and its readers take it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.patterns import PlacementsByAxis, in_mesh_order
from spmd.tensor.placement import Partial, Placement, Shard
from spmd.tensor.spec import Spec, check_placements, placed

OPEN = None
"""In the place of a placement: this axis is not said."""


@dataclass(frozen=True)
class Constraint:
    """A placement for each axis of the mesh, or `OPEN`. said: by what words, for errors and printed programs."""

    placements: tuple[Placement | None, ...]
    said: str = field(default="constrain", compare=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: PlacementsByAxis, said: str) -> Constraint:
        """Checked as far as it can be without a tensor. `said` is what errors begin with."""
        if isinstance(placements, Mapping):
            _check_axes(mesh, placements, said)
        found = in_mesh_order(mesh, placements, said)
        for axis, p in enumerate(found):
            if isinstance(p, Partial):
                raise ValueError(
                    f"{said}: {p!r} on {mesh.axis_name(axis)}: a sum that is still owed cannot be asked for; use "
                    "Shard(dim), Replicate(), or None to leave the axis open"
                )
            if p is not OPEN and not isinstance(p, Placement):
                raise TypeError(
                    f"{said}: the placement on {mesh.axis_name(axis)} is {p!r}; use Shard(dim), Replicate(), or None "
                    "to leave the axis open"
                )
        return cls(found, said)

    @property
    def is_complete(self) -> bool:
        """Whether it says where the value is on every axis."""
        return OPEN not in self.placements

    def spec(self, spec: Spec) -> Spec:
        """The spec that a tensor of this spec gets: on axes that are open its own placements.

        ValueError for a dim that the tensor does not have.
        """
        wanted = [own if p is OPEN else p for p, own in zip(self.placements, spec.placements, strict=True)]
        try:
            return placed(spec, check_placements(spec.mesh, wanted, spec.ndim))
        except ValueError as error:
            raise ValueError(f"{self.said}: {error}; it is {spec}") from None

    def of_tensor(self, ndim: int) -> Constraint:
        """The same with dims counted from the front, of a tensor with so many dims, all of which are there."""
        counted = (p.at(p.dim % ndim) if isinstance(p, Shard) else p for p in self.placements)
        return replace(self, placements=tuple(counted))

    def with_dim(self, dim: int, ndim: int) -> Constraint:
        """The same constraint of a tensor that has one dim more, at `dim`, as inside vmap. ndim: with that dim."""
        return replace(self, placements=tuple(_beside(p, dim, ndim) for p in self.placements))

    def __str__(self):
        return ", ".join("open" if p is OPEN else repr(p) for p in self.placements)


def _beside(p: Placement | None, dim: int, ndim: int) -> Placement | None:
    if not isinstance(p, Shard):
        return p
    at = p.dim % (ndim - 1) if ndim > 1 else p.dim
    return p.at(at + (at >= dim))


def _check_axes(mesh: DeviceMesh, placements: Mapping, said: str) -> None:
    """ValueError for an axis that is named twice, as by its name and by its number."""
    named: dict[int, object] = {}
    for key in placements:
        try:
            axis = mesh.axis(key)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from None
        if axis in named:
            raise ValueError(f"{said}: {named[axis]!r} and {key!r} are one axis of the mesh; say it once")
        named[axis] = key


# ---- in a capture -----------------------------------------------------------------------------

Write = Callable[[torch.Tensor, Constraint], torch.Tensor]


@dataclass(frozen=True)
class Capturing:
    """Where constraints of global tensors are recorded. write: the tensor with a constraint, as an op of the graph."""

    mesh: DeviceMesh
    write: Write


_capturing: ContextVar[Capturing | None] = ContextVar("spmd_constraints_captured", default=None)


@contextmanager
def captured_by(mesh: DeviceMesh | None, write: Write) -> Iterator[None]:
    """Inside, global tensors that are constrained are handed to `write`. Without a mesh constraints mean nothing."""
    token = _capturing.set(None if mesh is None else Capturing(mesh, write))
    try:
        yield
    finally:
        _capturing.reset(token)


def capturing() -> Capturing | None:
    """The capture that runs here; None outside of one."""
    return _capturing.get()


def placements_text(mesh: DeviceMesh, placements: Sequence[Placement | None]) -> str:
    """Placements as a user would write them: a dict by axis name.

    >>> placements_text(DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp")), [None, Shard(1)])
    "{'dp': None, 'tp': Shard(1)}"
    """
    said = {mesh.axis_name(a): p for a, p in enumerate(placements) if p is OPEN or not p.is_replicate()}
    return repr(said)
