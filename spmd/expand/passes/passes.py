"""Passes by name, in the order that is asked for, each verified, and judged by the clock where it promises time.

    spmd.compile(step, mesh, passes=("numbers_late", Buckets(mb=100), "schedule", my_pass))
    print(step.program.reports[-1])

    schedule      bits stay    taken      25,872.5 -> 19,406.2 us, 4,562,447,714 -> 4,562,447,714 bytes

A pass is a function from program to program. Those with a name are values, which say whether bits may change, and
whether they are *judged*: the program that a judged pass makes is replayed (`spmd.expand.timeline`), and where it is
not faster, or needs more memory than the one that the pass was given, that one is used. A function of the user is not
judged; nothing is known of its bits. `verify()` follows each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from spmd.expand.passes.bucket import KINDS, bucketed
from spmd.expand.passes.chunks import PIECES, chunked
from spmd.expand.passes.fewer_moves import fewer_moves
from spmd.expand.passes.fused_norms import fused_norms
from spmd.expand.passes.fused_updates import OF_FUSED, fused
from spmd.expand.passes.late_numbers import compute_numbers_late
from spmd.expand.passes.offload import offloaded, readers_first
from spmd.expand.passes.packed import in_buckets
from spmd.expand.passes.report import Figures, Noted, Report
from spmd.expand.passes.schedule import best_order, reordered, schedule
from spmd.expand.program import Program
from spmd.expand.timeline.replay import bound_us


@dataclass(frozen=True)
class NumbersLate:
    """Computes single numbers just before their first reader, so that their reductions can travel together."""

    name: ClassVar[str] = "numbers_late"
    same_bits: ClassVar[bool] = True
    judged: ClassVar[bool] = False

    def __call__(self, program: Program, own: bool = False) -> Program:
        return compute_numbers_late(program, own)


@dataclass(frozen=True)
class Buckets:
    """Sends collectives of equal kind, axes, reduction and dtype together.

    mb: megabytes of a bucket; by default those at which a tenth of the time is latency. first_mb: of the first bucket
    of reductions; by default an eighth. kinds: which collectives. keeps_memory: whether buckets by hand, too, are
    only as large as leaves the most bytes that are alive what they are.
    """

    mb: float | None = None
    first_mb: float | None = None
    kinds: tuple[str, ...] = KINDS
    keeps_memory: bool = False
    name: ClassVar[str] = "buckets"
    same_bits: ClassVar[bool] = True
    judged: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not all(size is None or size >= 0 for size in (self.mb, self.first_mb)):
            raise ValueError(f"{self}: give megabytes of at least 0, or None for sizes by the cost model")
        if unknown := set(self.kinds) - set(KINDS):
            raise ValueError(f"{self}: no buckets of {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")

    def __call__(self, program: Program, own: bool = False) -> Program:
        return bucketed(program, self.mb, self.first_mb, self.kinds, self.keeps_memory, own)


@dataclass(frozen=True)
class BucketsByKind:
    """`Buckets` of several sizes as one pass, so that what all of them have written is checked once: the kinds of the
    first are sent in their buckets, then those of the next."""

    parts: tuple[Buckets, ...]
    name: ClassVar[str] = "buckets"
    same_bits: ClassVar[bool] = True
    judged: ClassVar[bool] = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of all of its parts."""
        return tuple([kind for part in self.parts for kind in part.kinds])

    def __call__(self, program: Program, own: bool = False) -> Program:
        for part in self.parts:
            new = part(program, own)
            own, program = own or new.graph is not program.graph, new
        return program


@dataclass(frozen=True)
class Schedule:
    """Orders ops and launches. memory: bytes that may be alive; by default what the program needs as it comes."""

    memory: int | None = None
    name: ClassVar[str] = "schedule"
    same_bits: ClassVar[bool] = True
    judged: ClassVar[bool] = True

    def __call__(self, program: Program) -> Program:
        return schedule(program, self.memory)


class _Noting:
    """A pass that says what it did, and what it left alone."""

    def __call__(self, program: Program) -> Program:
        return self.noted(program).program

    def noted(self, program: Program) -> Noted:
        """The program, and what was done."""
        raise NotImplementedError


@dataclass(frozen=True)
class FewerMoves(_Noting):
    """Leaves out what is moved twice, back and forth, round about, or for nobody.

    reductions: whether an all-reduce may become a reduce-scatter, say, which may add up in another order.
    """

    reductions: bool = False
    name: ClassVar[str] = "fewer_moves"
    judged: ClassVar[bool] = True

    @property
    def same_bits(self) -> bool:
        return not self.reductions

    def noted(self, program: Program) -> Noted:
        """The program, and what was done."""
        return fewer_moves(program, self.reductions)


@dataclass(frozen=True)
class Chunks(_Noting):
    """Cuts products and the collectives beside them into pieces that overlap, where the replay says it pays.

    pieces: how many are tried; one takes backward products apart. Each row is made of what it was made of, but the
    kernel for a product of fewer rows may be another one.
    """

    pieces: tuple[int, ...] = PIECES
    name: ClassVar[str] = "chunks"
    same_bits: ClassVar[bool] = False
    judged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.pieces or min(self.pieces) < 1:
            raise ValueError(f"{self}: give the numbers of pieces that are tried, such as (2, 4), each at least 1")

    def noted(self, program: Program) -> Noted:
        """The program, and what was cut."""
        return chunked(program, self.pieces)


TOGETHER = (KINDS, tuple([kind for kind in KINDS if kind != "reduce_scatter"]))
"""What `Overlap` sends in buckets; the second where the first does not fit into the memory, since the terms of
reductions wait beside what was gathered."""


@dataclass(frozen=True)
class Overlap:
    """Buckets and a schedule together, or a schedule alone: whichever is the fastest within the memory.

    memory: as in `Schedule`.
    """

    memory: int | None = None
    kinds: ClassVar[tuple[str, ...]] = KINDS
    name: ClassVar[str] = "overlap"
    same_bits: ClassVar[bool] = True
    judged: ClassVar[bool] = True

    def __call__(self, program: Program) -> Program:
        work = program.work
        if not any(task.sends for task in work.tasks):
            return program
        limit = max(work.memory(range(len(work.tasks)))) if self.memory is None else self.memory
        for kinds in TOGETHER:
            late = compute_numbers_late(program)
            packed = bucketed(late, kinds=kinds, own=late is not program)
            together = best_order(packed.work, limit)
            if together is not None:
                break
        if together is None or together.us > bound_us(work) * (1 + NO_DIFFERENCE):
            alone = best_order(work, limit)
            if alone is not None and (together is None or alone.us < together.us * (1 - NO_DIFFERENCE)):
                return reordered(program, alone.order)
        return program if together is None else reordered(packed, together.order, own=packed is not program)


@dataclass(frozen=True)
class FusedUpdates(_Noting):
    """Makes one op of the chain that updates a parameter, where there is a kernel for it: AdamW and Adam on the CPU.

    asked: whether only those are fused whose optimiser was given `fused=True`; then that is not judged.
    """

    asked: bool = False
    name: ClassVar[str] = "fused_updates"
    same_bits: ClassVar[bool] = False

    @property
    def judged(self) -> bool:
        return not self.asked

    def noted(self, program: Program) -> Noted:
        """The program, and how many updates were fused."""
        return fused(program, OF_FUSED) if self.asked else fused(program)


@dataclass(frozen=True)
class FusedNorms(_Noting):
    """Takes the roots of norms that are stacked, as `clip_grad_norm_` does, by one op."""

    name: ClassVar[str] = "fused_norms"
    same_bits: ClassVar[bool] = True
    judged: ClassVar[bool] = False

    def noted(self, program: Program) -> Noted:
        """The program, and how many roots are taken together."""
        return fused_norms(program)


@dataclass(frozen=True)
class Offload(_Noting):
    """Sends what waits for the backward to host memory, whatever it costs. least_mb: smaller values stay."""

    least_mb: float = 0.0
    name: ClassVar[str] = "offload"
    same_bits: ClassVar[bool] = True
    judged: ClassVar[bool] = False

    def noted(self, program: Program) -> Noted:
        """The program, and what was sent."""
        return offloaded(program, self.least_mb)


NO_DIFFERENCE = 5e-3
"""Of two programs whose times differ by less than this part, the one that sends fewer collectives is taken."""

Pass = (
    FewerMoves | Chunks | NumbersLate | Buckets | BucketsByKind | Schedule | Overlap | FusedUpdates | FusedNorms
    | Offload | Callable[[Program], Program]
)  # fmt: skip

NAMED = (FewerMoves, Chunks, NumbersLate, Buckets, Schedule, Overlap, FusedUpdates, FusedNorms, Offload)
PASSES: dict[str, Pass] = {each.name: each() for each in NAMED}
"""The passes that have a name."""


def checked_passes(given: Sequence[Pass | str]) -> tuple[Pass, ...]:
    """Passes given by name or as functions. ValueError for a name that no pass has, TypeError for what is no pass."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f'compile: passes is {given!r}; give a list of passes, such as ("numbers_late", "schedule")')
    return tuple(map(_checked, given))


def _checked(one: Pass | str) -> Pass:
    if isinstance(one, str):
        if one not in PASSES:
            raise ValueError(f"compile: there is no pass {one!r}; those with a name are {', '.join(PASSES)}")
        return PASSES[one]
    if not callable(one) or isinstance(one, type):
        raise TypeError(f"compile: {one!r} is no pass; give a name or a function from Program to Program")
    return one


def usual_passes(device_type: str, bucket_mb: float | None, keeps_memory: bool = False) -> tuple[Pass, ...]:
    """The passes where none are given. keeps_memory: whether they may not need more memory than the program as it came.

    Where a device sends beside its computing, buckets and order are chosen by the replay. On the CPU all-reduces are
    sent in buckets, and so are the gathers and reduce-scatters of parameters in shards as far as there is memory.
    Updates are fused for optimisers that are given `fused=True`, and for others by name only: where a gradient is next
    to nothing, Adam makes a whole step of a rounding.
    """
    if bucket_mb is None:
        return ()
    if device_type == "cuda":
        return (Overlap(),)
    sums = Buckets(bucket_mb, 1.0, ("all_reduce",), keeps_memory)
    shards = Buckets(bucket_mb, bucket_mb, ("reduce_scatter", "all_gather"), keeps_memory=True)
    return NumbersLate(), BucketsByKind((sums, shards)), FusedUpdates(asked=True)


OURS = (NumbersLate, Buckets, BucketsByKind, Schedule, Overlap, _Noting)
"""Passes that leave the graph that they are given alone."""


def with_passes(program: Program, passes: Sequence[Pass], own: bool = False) -> Program:
    """The program after these passes, each verified, with a report of each.

    own: whether the given program is not needed any more, so that its graph can be changed.
    """
    for each in passes:
        new = _after(program, each, own)
        own = isinstance(each, OURS) and (own or new.graph is not program.graph)  # a pass of the user may keep it
        program = new
    return program


def _noted(program: Program, one: Pass, own: bool) -> Noted:
    if isinstance(one, _Noting):
        return one.noted(program)
    new = one(program, own) if isinstance(one, (NumbersLate, Buckets, BucketsByKind)) else one(program)
    packs = isinstance(one, (Buckets, BucketsByKind, Overlap)) and new is not program
    return Noted(new, *in_buckets(new, one.kinds)) if packs else Noted(new)


def _after(program: Program, one: Pass, own: bool) -> Program:
    name = getattr(one, "name", getattr(one, "__name__", type(one).__name__))
    noted = _noted(program, one, own)
    new = noted.program
    if not isinstance(new, Program):
        raise TypeError(f"the pass {name} returned a {type(new).__name__}, and must return a Program")
    new, same_bits = readers_first(new), getattr(one, "same_bits", None)
    if new is not program or not isinstance(one, OURS):  # a user's pass may have changed the graph that it was given
        new.verify()
    report = Report(name, same_bits, new is not program, did=noted.did, left=noted.left)
    if not getattr(one, "judged", False):
        return replace(new, reports=(*program.reports, report))
    figures = Figures.of(program), Figures.of(new)
    why = _why_not(new is program, *figures, getattr(one, "memory", None))
    report = replace(report, taken=not why, why_not=why, before=figures[0], after=figures[1])
    return replace(program if why else new, reports=(*program.reports, report))


def _why_not(unchanged: bool, before: Figures, after: Figures, allowed: int | None) -> str:
    """Why the program as it came is used; empty if the new one is."""
    if unchanged:
        return "nothing to change"
    if after.us >= before.us:
        return "it would not be faster"
    return "it would need more memory" if after.peak > max(before.peak, allowed or 0) else ""
