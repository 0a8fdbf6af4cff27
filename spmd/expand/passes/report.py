"""What a pass did to a program, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmd.expand.timeline.replay import step_us

if TYPE_CHECKING:
    from spmd.expand.program import Program


@dataclass(frozen=True)
class Figures:
    """A program in figures: its simulated step, the most bytes that are alive, and how many collectives it sends."""

    us: float
    peak: int
    collectives: int

    @classmethod
    def of(cls, program: Program) -> Figures:
        """The figures of a program."""
        peak = max(program.work.memory(range(len(program.work.tasks))), default=0)
        return cls(step_us(program.work), peak, len(program.moved))


@dataclass(frozen=True)
class Freed:
    """What is freed and computed again, or waits in host memory: the op, its bytes, the microseconds that it takes, or
    that its copies are waited for, and the user's line."""

    name: str
    nbytes: int
    us: float
    line: str = ""
    to_host: bool = False

    def __str__(self):
        where = f" at {self.line}" if self.line else ""
        way = "to host" if self.to_host else "again"
        return f"{way}: {self.name} {self.nbytes:,} bytes, {self.us:,.1f} us{where}"


@dataclass(frozen=True)
class Noted:
    """The program that a pass made, what it did, and what it left alone and why, in sentences."""

    program: Program
    did: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a pass did.

    same_bits: whether results stay the same to the bit; None where that is not known. taken: whether its program is
    used. why_not: why not. before, after: the figures of the program that it was given and of the one that it made,
    where it is judged by them. freed: what is computed again, and what is sent to host memory, each in order of the
    program. did, left: as in `Noted`.
    """

    name: str
    same_bits: bool | None
    taken: bool
    why_not: str = ""
    before: Figures | None = None
    after: Figures | None = None
    freed: tuple[Freed, ...] = ()
    did: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self):
        bits = {True: "bits stay", False: "bits may change", None: "bits unknown"}[self.same_bits]
        verdict = "taken" if self.taken else f"not taken: {self.why_not or 'nothing to change'}"
        lines = [f"{self.name:<20} {bits:<16} {verdict}{self._figures_text()}"]
        lines += [f"  {each}" for each in self.freed]
        lines += [*(f"  {each}" for each in self.did), *(f"  left alone: {each}" for each in self.left)]
        return "\n".join(lines)

    def _figures_text(self) -> str:
        if self.before is None or self.after is None:
            return ""
        pairs = [(self.before.us, self.after.us, "us", ".1f"), (self.before.peak, self.after.peak, "bytes", "")]
        return "".join(f", {a:,{form}} -> {b:,{form}} {unit}" for a, b, unit, form in pairs)
