"""What a compiled step says of a program before it runs: that it would send, and where random numbers begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.expand.captured import Captured
from spmd.expand.draws import Draws
from spmd.tensor.modes import explicit
from spmd.tensor.recipes import stream

if TYPE_CHECKING:
    from spmd.expand.bound_program import BoundProgram


def check_explicit(what: str, bound: BoundProgram) -> None:
    """In explicit mode, refuse a program that sends: the user wrote none of its collectives."""
    if explicit.is_on() and (sent := bound.program.moved):
        nbytes = sum(c.nbytes for c in sent)
        explicit.check_message(
            what, f"send {len(sent)} collectives, {nbytes:,} bytes a rank",
            "A compiled step places them itself: run it under spmd.explicit(False).",
        )  # fmt: skip


def random_state(captured: Captured) -> str:
    """The state of the random numbers as text, empty for a program without draws. The ranks compare it."""
    draws = any(isinstance(i, Draws) for i in captured.inputs)
    return f"random numbers: {stream.get_rng_state()}" if draws else ""
