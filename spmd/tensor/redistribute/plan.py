"""Plans: the cheapest moves from one spec to another.

`states.py` has where a plan may go, `search.py` how the cheapest is found, `bounds.py` what none can go below. A plan
is a function of two specs, and of the links that are in their mesh: the same on every rank, with no rank's data in it.
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

import torch

from spmd import _torch
from spmd.comm import AsyncTensor, Transport, transport, unless_written
from spmd.mesh import DeviceMesh, Machine, MeshTopoInfo
from spmd.mesh.rank import players
from spmd.tensor import deterministic
from spmd.tensor.placement import Partial, Placement
from spmd.tensor.redistribute.bounds import lower_bound
from spmd.tensor.redistribute.moves import AllReduce, At, Move, ReduceInOrder, ReduceScatter, Scale, ToPartial, View
from spmd.tensor.redistribute.simpler import simplest
from spmd.tensor.redistribute.states import Space, spec_of_state
from spmd.tensor.redistribute.strided import through_strides
from spmd.tensor.spec import Order, Spec, spec_of

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
    def axes(self) -> tuple[int, ...]:
        return self.move.axes

    @property
    def sends(self) -> bool:
        return self.move.sends

    @cached_property
    def cost(self) -> float:
        """Modelled microseconds."""
        return self.priced(self.before.mesh.topology)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that one rank hands to the collective (the largest rank's)."""
        return self.move.nbytes(self.before, self.after)

    def received(self, coordinate: tuple[int, ...]) -> int:
        """Bytes that the rank at the coordinate gets from others."""
        return self.move.received(self.before, self.after, coordinate)

    @property
    def peak_bytes(self) -> int:
        """Bytes of memory on the rank with most, while the move runs."""
        return self.move.peak(self.before, self.after)

    def priced(self, topology: MeshTopoInfo) -> float:
        """Modelled microseconds of the move over other links than its mesh's."""
        return self.move.cost(self.before, self.after, topology)

    def show(self, mesh: DeviceMesh, operand: object) -> str:
        """The move of this operand as code, axes by name."""
        return str(self).replace("(", f"({operand}, ", 1)

    def __str__(self):
        return self.move.show(self.before, self.after)

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
        by = transport()
        if players() is not None:  # who asks once for each rank where it is
            return by.step(self._start_here, self._finish_here, local)
        move, at = self.move, At(self.before, self.after, self.before.mesh.get_coordinate(), by)
        return by.step(lambda x: move.start(x, at), lambda y: move.finish(y, at), local)

    def launched(self, local, *shown_by, view: Step | None = None) -> AsyncTensor:
        """The move under way: the block after it, which waits for itself when it is read. shown_by: whose block it is,
        through which it could be written to as well. view: how what comes is to be seen."""
        if (made := _made.get()) is not None:
            made += [self] if view is None else [self, view]
        at, by = self.before.mesh.get_coordinate(), transport()
        with torch.no_grad():
            sent = self.start(local, at, by)

        def receive(y):
            y = self.finish(y, at, by)
            return y if view is None else view.start(y, at, by)

        for each in (local, *shown_by) if self.kind != "all_reduce" else ():  # which takes a copy first
            receive = unless_written(each, receive, self.kind)
        after = (view or self).after
        return AsyncTensor(sent, after.local_shape(at), after.dtype, receive)

    def _start_here(self, local):
        return self.start(local, self.before.mesh.get_coordinate(), transport())

    def _finish_here(self, y):
        return self.finish(y, self.before.mesh.get_coordinate(), transport())


@dataclass(frozen=True)
class Plan:
    """The moves that take a tensor from spec `src` to spec `dst`, with what they cost. Prints as a short table."""

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
        """Bytes that the rank at the coordinate gets from others, over the wire."""
        return sum(step.received(coordinate) for step in self.steps)

    @cached_property
    def bytes_per_rank(self) -> int:
        """Bytes that the busiest rank gets from others, over the wire."""
        return max(map(self.received, self.src.mesh.coordinates()))

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes of memory that the rank with most needs at once: blocks before and after a move, and what is packed."""
        return max([step.peak_bytes for step in self.steps], default=self.src.local_nbytes)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that some rank gets from others whatever the plan."""
        return lower_bound(self.src, self.dst)

    @cached_property
    def _reduces(self) -> bool:
        return any(isinstance(step.move, (AllReduce, ReduceScatter)) for step in self.steps)

    @property
    def as_made(self) -> Plan:
        """The plan that is made here: this one, or in deterministic mode that which adds in the order of the ranks."""
        return plan(self.src, self.dst, inf, True) if self._reduces and deterministic.is_on() else self

    def run(self, local):
        """Carry the plan out on this rank's block."""
        for step in self.as_made.steps if self._reduces else self.steps:
            local = step(local)
        return local

    def launch(self, local, *shown_by):
        """The same, without waiting for the last move if it sends: what comes is an AsyncTensor then."""
        steps = self.as_made.steps
        view = steps[-1] if steps and isinstance(steps[-1].move, View) else None
        steps = steps if view is None else steps[:-1]
        if not steps or not steps[-1].sends or players() is not None or _torch.is_tracing(local):
            return self.run(local)
        *first, last = steps
        for step in first:
            local = step(local)
        return last.launched(local, *(shown_by if not first else ()), view=view)

    def __str__(self):
        lines = [f"{self.src} -> {self.dst}"]
        width = max([len(str(s.after)) for s in self.steps], default=0)
        for s in self.steps:
            most = max(map(s.received, self.src.mesh.coordinates()))
            lines.append(f"  {s!s:<28} {s.after!s:<{width}} {most:>12,} B {s.cost:>9.1f} us")
        lines.append(
            f"  {self.bytes_per_rank:,} bytes a rank of at least {self.lower_bound_bytes:,}, "
            f"{self.modelled_us:.1f} us, {self.peak_bytes:,} bytes of memory"
        )
        return "\n".join(lines)


_plans: dict[tuple[Spec, Spec, float, bool], Plan] = {}
_planning = threading.RLock()  # ranks that are threads ask for one plan at once: one of them makes it
MOST_PLANS = 16384


def forget() -> None:
    """Make every plan anew; nothing but time depends on it."""
    with _planning:
        _plans.clear()


def plan(src: Spec, dst: Spec, max_bytes: float = inf, in_rank_order: bool = False) -> Plan:
    """The cheapest moves from src to dst, two specs of one tensor on one mesh, each with at most so much memory.

    in_rank_order: add up what is to be reduced in the order of the ranks; the result is then the same to the bit
    whatever the plan, and the moves are no longer the cheapest.

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
    """The cheapest moves that take a tensor of this global shape from the placements `src` to `dst`; nothing is sent.

    src_order, dst_order: for a dim that several axes shard, in which order, the outermost first: {0: ("tp", "dp")}. In
    that of the mesh where it is not said. topology: other links than the mesh's. max_memory: bytes that a rank may use
    for its block before and after a move and for what is packed meanwhile; ValueError where no plan keeps within them.

    in_rank_order: add up what is to be reduced in the order of the ranks, so that the result is the same to the bit
    whatever the plan; these moves are not the cheapest.

    `DTensor.redistribute` makes exactly these moves.

    >>> from spmd import Replicate, Shard, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> print(plan_redistribute(mesh, (64, 8), torch.float32, [Shard(0), Shard(0)], [Replicate(), Shard(0)]))
    f32[64@dp,tp, 8] -> f32[64@tp, 8]
      exchange(dp,tp)              f32[64@tp, 8]          512 B      10.8 us
      512 bytes a rank of at least 512, 10.8 us, 1,536 bytes of memory
    """
    mesh = mesh if topology is None else mesh.with_topology(topology)
    specs = [
        spec_of(mesh, placements, shape, dtype, order=order) for placements, order in ((src, src_order), (dst,
        dst_order))
    ]
    return plan(*specs, inf if max_memory is None else max_memory, in_rank_order)


def _planned(src: Spec, dst: Spec, max_bytes: float, in_rank_order: bool) -> Plan:
    if src.mesh != dst.mesh or src.shape != dst.shape or src.dtype != dst.dtype:
        raise ValueError(f"no plan from {src!r} to {dst!r}: mesh, shape and dtype must be equal")
    if src.stride != dst.stride:
        src = dst.with_layout(src.dims, src.units, src.partial)
    return Plan(src, dst, tuple(_steps(src, dst, max_bytes, in_rank_order)))


def redistribute_cost(current: Spec, target: Spec) -> float:
    """The modelled time, in microseconds, of the cheapest way from one spec of a tensor to another on the same mesh."""
    return plan(current, target).modelled_us


def _steps(src: Spec, dst: Spec, max_bytes: float, in_rank_order: bool) -> Iterator[Step]:
    spec = src
    for scaled in _scaled(src, dst):
        axes = tuple(a for a, kind in spec.partial if scaled.on(a).reduce_op != kind)
        yield Step(Scale(axes), spec, scaled)
        spec = scaled
    owed = tuple(a for a, kind in spec.partial if dst.on(a) != Partial(kind))
    if in_rank_order and owed:
        step = Step(ReduceInOrder(owed), spec, _lands(spec, dst, owed))
        if step.peak_bytes > max_bytes:
            raise _too_much(src, dst, max_bytes, step.peak_bytes)
        yield step
        spec = step.after
    space = Space(spec, dst, src.mesh.topology)
    ways = simplest(space, max_bytes)
    strided = through_strides(spec, dst, src.mesh.topology, ways, max_bytes)
    if strided:
        yield from (Step(*link) for link in strided)
        return
    if ways is None:
        raise _too_much(src, dst, max_bytes, plan(src, dst, inf, in_rank_order).peak_bytes)
    for way in ways:
        after = spec_of_state(space, way.to, src if spec is src else spec, dst)
        if after is not spec:
            yield Step(way.move(way.axes), spec, after)
        spec = after
    if spec is not dst:
        yield from _made_partial(spec, dst)


def _too_much(src: Spec, dst: Spec, max_bytes: float, least: int) -> ValueError:
    return ValueError(
        f"no plan from {src} to {dst} keeps within {max_bytes:,.0f} bytes a rank; without a limit it takes {least:,}"
    )


def _lands(src: Spec, dst: Spec, owed: tuple[int, ...]) -> Spec:
    """Where sums that are done in order go: to the target, if it only cuts what each rank has by these axes."""
    bare = dst.with_layout(dst.dims, dst.units, [p for p in src.partial if p[0] not in owed])
    pairs = zip(src.dims, dst.dims, src.units, dst.units, strict=True)
    nested = all(y[: len(x)] == x and (not x or u == v) for x, y, u, v in pairs)
    added = sorted(a for x, y in zip(src.dims, dst.dims, strict=True) for a in y[len(x) :])
    return bare if nested and added == sorted(owed) else reduced(src, owed)


def reduced(src: Spec, axes: tuple[int, ...]) -> Spec:
    """The spec with these axes reduced, into shards of a dim that they divide if there is one: that moves least."""
    kept = [p for p in src.partial if p[0] not in axes]
    if not axes or not src.ndim:
        return src.with_layout(src.dims, src.units, kept)
    n = prod(src.mesh.shape[a] for a in axes)
    dim = max(range(src.ndim), key=lambda d: (src.units[d] == 1 and src.shape[d] % n == 0, src.shape[d], -d))
    return src.with_layout([(*own, *axes) if d == dim else own for d, own in enumerate(src.dims)], src.units, kept)


def _scaled(src: Spec, dst: Spec) -> Iterator[Spec]:
    """src with the sums and averages that stay Partial as dst has them: first the one kind, then the other."""
    want = dict(dst.partial)
    partial = dict(src.partial)
    for kind in ("avg", "sum"):
        turned = {a: kind for a, k in partial.items() if {k, want.get(a)} == {"sum", "avg"} and want[a] == kind}
        if turned:
            partial |= turned
            yield dst.with_layout(src.dims, src.units, tuple(partial.items()))


def _made_partial(spec: Spec, dst: Spec) -> Iterator[Step]:
    """What makes axes Partial: all at once, for a block need not lie in that without some of its axes.

    Where sums and averages are made, averages are sums first.
    """
    have = dict(spec.partial)
    new = {a: kind for a, kind in dst.partial if a not in have}
    kind = next(iter(new.values())) if len(set(new.values())) == 1 else "sum"
    dims = [tuple(a for a in sharding if a not in new) for sharding in spec.dims]
    after = dst.with_layout(dims, spec.units, (*have.items(), *((a, kind) for a in new)))
    yield Step(ToPartial(tuple(new), kind), spec, after)
    if after is not dst:
        yield Step(Scale(tuple(a for a in new if new[a] != kind)), after, dst)
