"""A bucket: several all-reduces over one axis, sent as one.

    g1: f32[8, 8] +sum@dp, g2: f32[8] +sum@dp      one all-reduce of 72 elements

A model has many gradients, most of them small, and each collective costs its latency. So the tensors are put one after
the other into one buffer, the buffer is reduced, and it is cut into tensors again. Each element has the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from spmd.comm import Transport, transport
from spmd.mesh import DeviceMesh, MeshTopoInfo, cost
from spmd.tensor.redistribute.collective_moves import AllReduce
from spmd.tensor.redistribute.moves import MoveContext, Parts
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec


@dataclass(frozen=True)
class Bucket:
    """All-reduces of the same axes, kinds and dtype in one collective. In a program it stands where a `Step` does."""

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
        """Modelled microseconds of the one collective, and of filling its buffer."""
        return sum(self._parts(topology))

    @property
    def parts(self) -> Parts:
        """Modelled microseconds of its parts."""
        return self._parts(self.before[0].mesh.topology)

    @property
    def latency_us(self) -> float:
        """What the collective takes however few bytes are sent."""
        return self.steps[0].latency_us

    def _parts(self, topology: MeshTopoInfo) -> Parts:
        return Parts(cost.all_reduce_cost(self.nbytes, self.axes, topology), cost.copy_cost(self.nbytes, topology))

    def show(self, mesh: DeviceMesh, operand: object) -> str:
        return f"all_reduce({operand}, {','.join(map(mesh.axis_name, self.axes))})"

    def start(self, xs, coordinate: tuple[int, ...], transport: Transport):
        """Launch the reduction of these blocks, one for each step."""
        ctx = self._context(coordinate, transport)
        flat = torch.cat([xs[i].reshape(-1) for i in range(len(self.steps))], 0)
        return self._reduce.start(flat, ctx)

    def finish(self, y, coordinate: tuple[int, ...], transport: Transport) -> list:
        """Wait, and cut the buffer into the reduced blocks."""
        shapes = [step.after.local_shape(coordinate) for step in self.steps]
        pieces = self._reduce.finish(y, self._context(coordinate, transport)).split([prod(s) for s in shapes], 0)
        return [pieces[i].view(shape) for i, shape in enumerate(shapes)]

    def __call__(self, xs) -> list:
        """Reduce this rank's blocks now."""
        return transport().step(self._start_here, self._finish_here, xs)

    def _start_here(self, xs):
        return self.start(xs, self.before[0].mesh.get_coordinate(), transport())

    def _finish_here(self, y) -> list:
        return self.finish(y, self.before[0].mesh.get_coordinate(), transport())

    @property
    def _reduce(self) -> AllReduce:
        return AllReduce(self.axes)

    def _context(self, coordinate: tuple[int, ...], transport: Transport) -> MoveContext:
        """The context of the buffer's all-reduce: the buffer is Partial on the axes, as long as this rank's blocks."""
        length = sum(prod(spec.local_shape(coordinate)) for spec in self.before)
        first = self.before[0]
        partial = [(a, kind) for a, kind in first.partial if a in self.axes]
        flat = Spec.of(first.mesh, (length,), first.dtype, partial=partial)
        return MoveContext(flat, flat.with_layout(flat.dims, flat.units), coordinate, transport)
