"""A bucket: several all-reduces over one axis sent as one.

Gradients are many and most are small; a collective costs its latency each time. The tensors are laid one after the
other in one buffer, reduced, and cut apart again. Element for element the sums are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from spmd.comm import Transport, transport
from spmd.mesh import DeviceMesh, MeshTopoInfo, cost
from spmd.tensor.redistribute.moves import AllReduce, At
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec


@dataclass(frozen=True)
class Bucket:
    """All-reduces of the same axes, kinds and dtype, made by one collective; stands in a program as a `Step` does."""

    steps: tuple[Step, ...]

    kind: ClassVar[str] = "all_reduce"
    sends: ClassVar[bool] = True
    __name__: ClassVar[str] = "bucket"

    @property
    def axes(self) -> tuple[int, ...]:
        return self.steps[0].axes

    @property
    def before(self) -> tuple[Spec, ...]:
        return tuple(step.before for step in self.steps)

    @property
    def after(self) -> tuple[Spec, ...]:
        return tuple(step.after for step in self.steps)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def tensors(self) -> int:
        return len(self.steps)

    @property
    def cost(self) -> float:
        return self.priced(self.before[0].mesh.topology)

    def priced(self, topology: MeshTopoInfo) -> float:
        """Modelled microseconds of the one collective, and of the buffer that is filled for it."""
        return cost.all_reduce_cost(self.nbytes, self.axes, topology) + cost.copy_cost(self.nbytes, topology)

    def show(self, mesh: DeviceMesh, operand: object) -> str:
        return f"all_reduce({operand}, {','.join(map(mesh.axis_name, self.axes))})"

    def start(self, xs, coordinate: tuple[int, ...], transport: Transport):
        """Launch the reduction of these blocks, one for each step."""
        at = self._at(coordinate, transport)
        flat = torch.cat([xs[i].reshape(-1) for i in range(len(self.steps))], 0)
        return self._reduce.start(flat, at)

    def finish(self, y, coordinate: tuple[int, ...], transport: Transport) -> list:
        """Wait, and cut the buffer into the reduced blocks."""
        shapes = [step.after.local_shape(coordinate) for step in self.steps]
        pieces = self._reduce.finish(y, self._at(coordinate, transport)).split([prod(s) for s in shapes], 0)
        return [pieces[i].view(shape) for i, shape in enumerate(shapes)]

    def __call__(self, xs) -> list:
        """Make the reductions on this rank's blocks, now."""
        return transport().step(self._start_here, self._finish_here, xs)

    def _start_here(self, xs):
        return self.start(xs, self.before[0].mesh.get_coordinate(), transport())

    def _finish_here(self, y) -> list:
        return self.finish(y, self.before[0].mesh.get_coordinate(), transport())

    @property
    def _reduce(self) -> AllReduce:
        return AllReduce(self.axes)

    def _at(self, coordinate: tuple[int, ...], transport: Transport) -> At:
        """The buffer as a tensor of this rank: partial on the axis, and of the length that this rank's blocks have."""
        length = sum(prod(spec.local_shape(coordinate)) for spec in self.before)
        first = self.before[0]
        partial = [(a, kind) for a, kind in first.partial if a in self.axes]
        flat = Spec.of(first.mesh, (length,), first.dtype, partial=partial)
        return At(flat, flat.with_layout(flat.dims, flat.units), coordinate, transport)
