"""Plans: the cheapest moves from one spec to another.

A plan is found by Dijkstra's algorithm over specs: the neighbours of a spec are what one move makes of it.
Only moves towards the target are looked at - an axis is sliced, scattered or exchanged into the dim where the
target wants it, or gathered - so that the search stays small; gathering all and slicing again is always a
way, so there is always a plan. Ties go to fewer moves, then to the order in which moves are listed: the plan
is the same on every rank.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

from spmd.comm import Transport, transport
from spmd.mesh import DeviceMesh, MeshTopoInfo
from spmd.tensor.redistribute.moves import AllGather, AllReduce, AllToAll, At, Move, ReduceScatter, Slice, ToPartial
from spmd.tensor.spec import Spec

_made: ContextVar[list[Step] | None] = ContextVar("spmd_steps_made", default=None)


@contextmanager
def steps_made() -> Iterator[list[Step]]:
    """What eager ops move inside the block, in order: a list that grows."""
    steps: list[Step] = []
    around, token = _made.get(), _made.set(steps)
    try:
        yield steps
    finally:
        _made.reset(token)
        if around is not None:
            around += steps


@dataclass(frozen=True)
class Step:
    """One move of a plan with the specs around it."""

    move: Move
    before: Spec
    after: Spec

    tensors: ClassVar[int] = 1
    __name__: ClassVar[str] = "step"

    @property
    def kind(self) -> str:
        return self.move.kind

    @property
    def axis(self) -> int:
        return self.move.axis

    @property
    def sends(self) -> bool:
        return self.move.sends

    @property
    def cost(self) -> float:
        return self.priced(self.before.mesh.topology)

    @property
    def nbytes(self) -> int:
        return self.move.nbytes(self.before, self.after)

    def priced(self, topology: MeshTopoInfo) -> float:
        """Modelled microseconds of the move over other links than its mesh's."""
        return self.move.cost(self.before, self.after, topology)

    def show(self, mesh: DeviceMesh, operand: object) -> str:
        """The move of this operand as code, axes by name."""
        return self.move.show(mesh).replace("(", f"({operand}, ", 1)

    def start(self, x, coordinate: tuple[int, ...], transport: Transport):
        """Launch the move on the block of the rank at the coordinate."""
        return self.move.start(x, At(self.before, self.after, coordinate, transport))

    def finish(self, y, coordinate: tuple[int, ...], transport: Transport):
        """The block after the move, from what `start` gave."""
        return self.move.finish(y, At(self.before, self.after, coordinate, transport))

    def __call__(self, local):
        """Make the move on this rank's block, now."""
        if (made := _made.get()) is not None:
            made.append(self)
        return transport().step(self._start_here, self._finish_here, local)

    def _start_here(self, local):
        return self.start(local, self.before.mesh.get_coordinate(), transport())

    def _finish_here(self, y):
        return self.finish(y, self.before.mesh.get_coordinate(), transport())


@dataclass(frozen=True)
class Plan:
    """The moves that take a tensor from spec `src` to spec `dst`, with their modelled time."""

    src: Spec
    dst: Spec
    steps: tuple[Step, ...]

    @property
    def modelled_us(self) -> float:
        return sum(step.cost for step in self.steps)

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(step.move for step in self.steps)

    def run(self, local):
        """Carry the plan out on this rank's block."""
        for step in self.steps:
            local = step(local)
        return local

    def __str__(self):
        mesh = self.src.mesh
        lines = [f"{s.move.show(mesh):<32} {s.after}   {s.cost:.1f} us" for s in self.steps]
        return "\n".join([str(self.src), *("  " + line for line in lines)])


@functools.lru_cache(maxsize=16384)
def plan(src: Spec, dst: Spec) -> Plan:
    """The cheapest moves from src to dst, two specs of one tensor on one mesh.

    >>> from spmd.mesh import DeviceMesh
    >>> from spmd.tensor.spec import parse_spec
    >>> mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
    >>> [m.show(mesh) for m in plan(parse_spec("f32[8@tp, 8]", mesh), parse_spec("f32[8, 8@tp]", mesh)).moves]
    ['all_to_all(tp, 0, 1)']
    """
    if src.mesh != dst.mesh or src.shape != dst.shape or src.dtype != dst.dtype:
        raise ValueError(f"no plan from {src!r} to {dst!r}: mesh, shape and dtype must be equal")
    if src.stride != dst.stride:
        src = dst.with_layout(src.dims, src.units, src.partial)
    return Plan(src, dst, _cheapest(src, dst))


def redistribute_cost(current: Spec, target: Spec) -> float:
    """The modelled time, in microseconds, of the cheapest way from one spec of a tensor to another on the same mesh."""
    return plan(current, target).modelled_us


def _cheapest(src: Spec, dst: Spec) -> tuple[Step, ...]:
    count = itertools.count()
    queue = [(0.0, 0, next(count), src, ())]
    done: set[Spec] = set()
    while queue:
        us, n, _, spec, steps = heapq.heappop(queue)
        if spec is dst:
            return steps
        if spec in done:
            continue
        done.add(spec)
        for move in _towards(spec, dst):
            after = move.apply(spec)
            if after is not None and after not in done:
                step = Step(move, spec, after)
                heapq.heappush(queue, (us + step.cost, n + 1, next(count), after, (*steps, step)))
    raise RuntimeError(f"no plan from {src} to {dst}: this is a fault in spmd, please report it")


def _towards(spec: Spec, dst: Spec) -> Iterator[Move]:
    """The moves that may be part of a shortest way to dst."""
    home = {axis: (dim, dst.units[dim]) for dim, axes in enumerate(dst.dims) for axis in axes}
    for axis in range(spec.mesh.ndim):
        if spec.mesh.shape[axis] == 1:
            continue
        have, want = spec.on(axis), dst.on(axis)
        if have.is_replicate() and axis in home:
            yield Slice(axis, *home[axis])
        elif have.is_replicate() and want.is_partial():
            yield ToPartial(axis, want.reduce_op)
        elif have.is_partial() and have != want:
            yield AllReduce(axis)
            if axis in home:
                yield ReduceScatter(axis, *home[axis])
        elif have.is_shard():
            yield AllGather(axis, have.dim)
            if axis in home and home[axis][0] != have.dim:
                yield AllToAll(axis, have.dim, *home[axis])
