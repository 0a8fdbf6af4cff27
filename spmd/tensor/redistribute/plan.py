"""Plans: the cheapest moves from one spec to another.

    f32[8@tp, 8] -> f32[8, 8@tp]        all_to_all(tp, 0, 1), 48 bytes a rank

`states.py` says which layouts a plan may pass through, `search.py` finds the cheapest plan, and `bounds.py` says how
many bytes no plan can go below. A plan is a function of two specs and of the links of their mesh. It reads no data of
any rank, so it is the same on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import ClassVar

import numpy as np
import torch

from spmd import _torch
from spmd.comm import AsyncTensor, Transport, transport, unless_written
from spmd.comm.check import compare_move
from spmd.comm.listen import refuse_torchs_mode
from spmd.mesh import DeviceMesh, Machine, MeshTopoInfo
from spmd.mesh.rank import rank_simulator
from spmd.tensor.modes import deterministic
from spmd.tensor.placement import Partial, Placement
from spmd.tensor.redistribute.all_ranks import of_rank
from spmd.tensor.redistribute.bounds import lower_bound
from spmd.tensor.redistribute.collective_moves import AllReduce, ReduceInOrder, ReduceScatter
from spmd.tensor.redistribute.fewest_moves import simplest
from spmd.tensor.redistribute.moves import Move, MoveContext, Parts, Scale, ToPartial, View
from spmd.tensor.redistribute.states import Space, spec_of_state
from spmd.tensor.redistribute.strided import through_strides
from spmd.tensor.spec import Order, Spec, spec_of

_made: ContextVar[list[Step] | None] = ContextVar("spmd_steps_made", default=None)


@contextmanager
def steps_made() -> Iterator[list[Step]]:
    """The moves that eager ops make inside the block, in order: a list that grows."""
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
    def axes(self) -> tuple[int, ...]:
        return self.move.axes

    @property
    def sends(self) -> bool:
        return self.move.sends

    @property
    def reduces(self) -> bool:
        """Whether it makes a sum of terms."""
        return isinstance(self.move, (AllReduce, ReduceInOrder, ReduceScatter))

    @cached_property
    def cost(self) -> float:
        """Modelled microseconds."""
        return self.priced(self.before.mesh.topology)

    @cached_property
    def parts(self) -> Parts:
        """Modelled microseconds of its parts."""
        return self.parts_over(self.before.mesh.topology)

    def parts_over(self, topology: MeshTopoInfo) -> Parts:
        """Modelled microseconds of its parts, over other links than those of its mesh."""
        return self.move.parts(self.before, self.after, topology)

    @property
    def latency_us(self) -> float:
        """What the collective takes however few bytes are sent."""
        return self.latency_over(self.before.mesh.topology)

    def latency_over(self, topology: MeshTopoInfo) -> float:
        """The same over other links than those of its mesh."""
        return self.move.collective_us(0.0, topology) if self.sends else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that one rank hands to the collective (the largest rank's)."""
        return self.move.nbytes(self.before, self.after)

    def received(self, coordinate: tuple[int, ...]) -> int:
        """Bytes that the rank at the coordinate receives from others."""
        return of_rank(self.received_by_all, coordinate)

    @cached_property
    def received_by_all(self) -> np.ndarray | int:
        """Bytes that each rank receives from others, as an array that broadcasts to the shape of the mesh."""
        return self.move.received(self.before, self.after)

    @property
    def peak_bytes(self) -> int:
        """Bytes of memory that the busiest rank needs while the move runs."""
        return self.move.peak(self.before, self.after)

    def priced(self, topology: MeshTopoInfo) -> float:
        """Modelled microseconds of the move over other links than those of its mesh."""
        return self.move.cost(self.before, self.after, topology)

    def show(self, mesh: DeviceMesh, operand: object) -> str:
        """The move of this operand as code, axes by name."""
        return str(self).replace("(", f"({operand}, ", 1)

    def __str__(self):
        return self.move.show(self.before, self.after)

    @cached_property
    def in_full(self) -> str:
        """The move with the specs around it, by which ranks compare what they do."""
        return f"{self}: {self.before} -> {self.after}"

    def start(self, x, coordinate: tuple[int, ...], transport: Transport):
        """Launch the move on the block of the rank at the coordinate."""
        return self.move.start(x, MoveContext(self.before, self.after, coordinate, transport))

    def finish(self, y, coordinate: tuple[int, ...], transport: Transport):
        """The block after the move, from the result of `start`."""
        return self.move.finish(y, MoveContext(self.before, self.after, coordinate, transport))

    def __call__(self, local):
        """Make the move on this rank's block now."""
        if (made := _made.get()) is not None:
            made.append(self)
        by = transport()
        if self.sends:
            refuse_torchs_mode(simulated=False)
        if by.compares and self.sends:
            by = compare_move(by, self.in_full, self.before.mesh, local)
        if rank_simulator() is not None:  # simulated ranks: each asks for its own coordinate
            return by.step(self._start_here, self._finish_here, local)
        move, at = self.move, MoveContext(self.before, self.after, self.before.mesh.get_coordinate(), by)
        return by.step(lambda x: move.start(x, at), lambda y: move.finish(y, at), local)

    def launched(self, local, *shown_by, view: Step | None = None) -> AsyncTensor:
        """Launch the move; the result is the block after it, which waits for itself when it is read.

        shown_by: other tensors through which the block could be written to. view: a `View` to apply to the result.
        """
        if (made := _made.get()) is not None:
            made += [self] if view is None else [self, view]
        at, by = self.before.mesh.get_coordinate(), transport()
        if by.compares:
            by = compare_move(by, self.in_full, self.before.mesh, local)
        with torch.no_grad():
            sent = self.start(local, at, by)

        def receive(y):
            y = self.finish(y, at, by)
            return y if view is None else view.start(y, at, by)

        for each in (local, *shown_by) if self.kind != "all_reduce" else ():  # it sends a copy
            receive = unless_written(each, receive, self.kind)
        after = (view or self).after
        return AsyncTensor(sent, after.local_shape(at), after.dtype, receive)

    def _start_here(self, local):
        return self.start(local, self.before.mesh.get_coordinate(), transport())

    def _finish_here(self, y):
        return self.finish(y, self.before.mesh.get_coordinate(), transport())


@dataclass(frozen=True)
class Plan:
    """The moves that take a tensor from spec `src` to spec `dst`, and their costs. Prints as a short table."""

    src: Spec
    dst: Spec
    steps: tuple[Step, ...]

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(step.move for step in self.steps)

    @cached_property
    def modelled_us(self) -> float:
        """Microseconds, one move after the other."""
        return sum(step.cost for step in self.steps)

    def received(self, coordinate: tuple[int, ...]) -> int:
        """Bytes that the rank at the coordinate receives from others over the wire."""
        return sum(step.received(coordinate) for step in self.steps)

    @cached_property
    def bytes_per_rank(self) -> int:
        """Bytes that the busiest rank receives from others over the wire."""
        return int(np.max(sum([step.received_by_all for step in self.steps], 0)))

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes of memory that the busiest rank needs at once: blocks before and after a move, packed elements."""
        return max([step.peak_bytes for step in self.steps], default=self.src.local_nbytes)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that some rank receives from others, whatever the plan is."""
        return lower_bound(self.src, self.dst)

    @cached_property
    def reduces(self) -> bool:
        """Whether terms are added on the way."""
        return any(isinstance(step.move, (AllReduce, ReduceScatter)) for step in self.steps)

    @property
    def effective(self) -> Plan:
        """The plan that runs here: this one, or in deterministic mode the one that adds in the order of the ranks."""
        return plan(self.src, self.dst, inf, True) if self.reduces and deterministic.is_on() else self

    def run(self, local):
        """Carry the plan out on this rank's block."""
        for step in self.effective.steps if self.reduces else self.steps:
            local = step(local)
        return local

    def launch(self, local, *shown_by):
        """As `run`, but without waiting for the last move if it sends. Then the result is an AsyncTensor."""
        steps = self.effective.steps
        view = steps[-1] if steps and isinstance(steps[-1].move, View) else None
        steps = steps if view is None else steps[:-1]
        if not steps or not steps[-1].sends or rank_simulator() is not None or _torch.is_tracing(local):
            return self.run(local)
        *first, last = steps
        for step in first:
            local = step(local)
        return last.launched(local, *(shown_by if not first else ()), view=view)

    @property
    def instead(self) -> Spec:
        """The spec from which the plan would send nothing."""
        return self.dst

    def __str__(self):
        lines = [f"{self.src} -> {self.dst}"]
        width = max([len(str(s.after)) for s in self.steps], default=0)
        for s in self.steps:
            most = int(np.max(s.received_by_all))
            lines.append(f"  {s!s:<28} {s.after!s:<{width}} {most:>12,} B {s.cost:>9.1f} us")
        lines.append(
            f"  {self.bytes_per_rank:,} bytes a rank of at least {self.lower_bound_bytes:,}, "
            f"{self.modelled_us:.1f} us, {self.peak_bytes:,} bytes of memory"
        )
        return "\n".join(lines)


_plans: dict[tuple[Spec, Spec, float, bool], Plan] = {}
_planning = threading.RLock()  # ranks that are threads ask for one plan at once: only one makes it
MOST_PLANS = 16384


def forget() -> None:
    """Forget all plans, so that each is made again; only time depends on it."""
    with _planning:
        _plans.clear()


def plan(src: Spec, dst: Spec, max_bytes: float = inf, in_rank_order: bool = False) -> Plan:
    """The cheapest moves from src to dst, two specs of one tensor on one mesh.

    max_bytes: memory that each move may need on a rank.
    in_rank_order: add the terms of reductions in the order of the ranks. The result is then the same to the bit,
    whatever the plan is, but the moves are not the cheapest.

    >>> from spmd.mesh import DeviceMesh
    >>> from spmd.tensor.spec import parse_spec
    >>> mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
    >>> print(plan(parse_spec("f32[8@tp, 8]", mesh), parse_spec("f32[8, 8@tp]", mesh)))
    f32[8@tp, 8] -> f32[8, 8@tp]
      all_to_all(tp, 0, 1)         f32[8, 8@tp]           48 B       8.4 us
      48 bytes a rank of at least 48, 8.4 us, 256 bytes of memory
    """
    key = src, dst, max_bytes, in_rank_order
    found = _plans.get(key)
    if found is None:
        with _planning:
            found = _plans.get(key)
            if found is None:
                while len(_plans) >= MOST_PLANS:
                    del _plans[next(iter(_plans))]
                found = _plans[key] = _planned(src, dst, max_bytes, in_rank_order)
    return found


def plan_redistribute(
    mesh: DeviceMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    src: Sequence[Placement],
    dst: Sequence[Placement],
    *,
    src_order: Order | None = None,
    dst_order: Order | None = None,
    topology: MeshTopoInfo | Machine | str | None = None,
    max_memory: int | None = None,
    in_rank_order: bool = False,
) -> Plan:
    """The cheapest moves that take a tensor of this global shape from the placements `src` to `dst`. It sends nothing.

    src_order, dst_order: for a dim that several axes shard, these axes, outermost first: {0: ("tp", "dp")}. The default
    is the order of the mesh.
    topology: other links than those of the mesh.
    max_memory: bytes that a rank may use for its block before and after a move and for packed elements. ValueError if
    no plan keeps within them.
    in_rank_order: add the terms of reductions in the order of the ranks. The result is then the same to the bit,
    whatever the plan is, but the moves are not the cheapest.

    `DTensor.redistribute` makes exactly these moves.

    >>> from spmd import Replicate, Shard, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> print(plan_redistribute(mesh, (64, 8), torch.float32, [Shard(0), Shard(0)], [Replicate(), Shard(0)]))
    f32[64@dp,tp, 8] -> f32[64@tp, 8]
      exchange(dp,tp)              f32[64@tp, 8]          512 B      10.8 us
      512 bytes a rank of at least 512, 10.8 us, 1,536 bytes of memory
    """
    mesh = mesh if topology is None else mesh.with_topology(topology)
    ends = (src, src_order), (dst, dst_order)
    specs = [spec_of(mesh, placements, shape, dtype, order=order) for placements, order in ends]
    return plan(*specs, inf if max_memory is None else max_memory, in_rank_order)


def _planned(src: Spec, dst: Spec, max_bytes: float, in_rank_order: bool) -> Plan:
    if src.mesh != dst.mesh or src.shape != dst.shape or src.dtype != dst.dtype:
        raise ValueError(f"no plan from {src!r} to {dst!r}: mesh, shape and dtype must be equal")
    if src.stride != dst.stride:
        src = dst.with_layout(src.dims, src.units, src.partial)
    return Plan(src, dst, tuple(_steps(src, dst, max_bytes, in_rank_order)))


def redistribute_cost(current_spec: Spec, target_spec: Spec) -> float:
    """Modelled microseconds of the cheapest plan from one spec of a tensor to another on the same mesh."""
    return plan(current_spec, target_spec).modelled_us


def _steps(src: Spec, dst: Spec, max_bytes: float, in_rank_order: bool) -> Iterator[Step]:
    spec = src
    for scaled in _rescaled(src, dst):
        axes = tuple(a for a, kind in spec.partial if scaled.on(a).reduce_op != kind)
        yield Step(Scale(axes), spec, scaled)
        spec = scaled
    owed = tuple(a for a, kind in spec.partial if dst.on(a) != Partial(kind))
    if in_rank_order and owed:
        step = Step(ReduceInOrder(owed), spec, _after_ordered_reduction(spec, dst, owed))
        if step.peak_bytes > max_bytes:
            raise _memory_error(src, dst, max_bytes, step.peak_bytes)
        yield step
        spec = step.after
    space = Space(spec, dst, src.mesh.topology)
    edges = simplest(space, max_bytes)
    strided = through_strides(spec, dst, src.mesh.topology, edges, max_bytes)
    if strided:
        yield from (Step(*link) for link in strided)
        return
    if edges is None:
        raise _memory_error(src, dst, max_bytes, plan(src, dst, inf, in_rank_order).peak_bytes)
    for edge in edges:
        after = spec_of_state(space, edge.to, src if spec is src else spec, dst)
        if after is not spec:
            yield Step(edge.move(edge.axes), spec, after)
        spec = after
    if spec is not dst:
        yield from _partial_steps(spec, dst)


def _memory_error(src: Spec, dst: Spec, max_bytes: float, least: int) -> ValueError:
    return ValueError(
        f"no plan from {src} to {dst} keeps within {max_bytes:,.0f} bytes a rank; without a limit it takes {least:,}"
    )


def _after_ordered_reduction(src: Spec, dst: Spec, owed: tuple[int, ...]) -> Spec:
    """The spec after a reduction in rank order: the target, if it only adds these axes inside those of src."""
    bare = dst.with_layout(dst.dims, dst.units, [p for p in src.partial if p[0] not in owed])
    pairs = zip(src.dims, dst.dims, src.units, dst.units, strict=True)
    nested = all(y[: len(x)] == x and (not x or u == v) for x, y, u, v in pairs)
    added = sorted(a for x, y in zip(src.dims, dst.dims, strict=True) for a in y[len(x) :])
    return bare if nested and added == sorted(owed) else after_reduction(src, owed)


def after_reduction(src: Spec, axes: tuple[int, ...]) -> Spec:
    """The spec after these axes are reduced into shards, if possible of a dim that they divide: that sends least."""
    kept = [p for p in src.partial if p[0] not in axes]
    if not axes or not src.ndim:
        return src.with_layout(src.dims, src.units, kept)
    n = prod(src.mesh.shape[a] for a in axes)
    dim = max(range(src.ndim), key=lambda d: (src.units[d] == 1 and src.shape[d] % n == 0, src.shape[d], -d))
    return src.with_layout([(*own, *axes) if d == dim else own for d, own in enumerate(src.dims)], src.units, kept)


def _rescaled(src: Spec, dst: Spec) -> Iterator[Spec]:
    """The specs on the way to the sums and averages of dst, for axes that stay Partial: averages first, then sums."""
    want = dict(dst.partial)
    partial = dict(src.partial)
    for kind in ("avg", "sum"):
        turned = {a: kind for a, k in partial.items() if {k, want.get(a)} == {"sum", "avg"} and want[a] == kind}
        if turned:
            partial |= turned
            yield dst.with_layout(src.dims, src.units, tuple(partial.items()))


def _partial_steps(spec: Spec, dst: Spec) -> Iterator[Step]:
    """The moves that make axes Partial.

    All axes in one move, because a block is not always inside the block that some of its axes alone give. If both sums
    and averages are made, averages are sums first.
    """
    have = dict(spec.partial)
    new = {a: kind for a, kind in dst.partial if a not in have}
    kind = next(iter(new.values())) if len(set(new.values())) == 1 else "sum"
    dims = [tuple(a for a in sharding if a not in new) for sharding in spec.dims]
    after = dst.with_layout(dims, spec.units, (*have.items(), *((a, kind) for a in new)))
    yield Step(ToPartial(tuple(new), kind), spec, after)
    if after is not dst:
        yield Step(Scale(tuple(a for a in new if new[a] != kind)), after, dst)
