"""The ranks agree on a program before it runs.

    every rank: capture, expand                   the texts are equal: the program is used
    rank 0 with stamps, rank 1 under a profiler   they are not: all ranks capture again, plainly, and compare again

Whether calls of equal modules can be stamped depends on what a process can see (docs/design/first-call.md). A program
with stamps does the same as one without, in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spmd.comm import RanksDiffer, agree
from spmd.expand.captured import Captured
from spmd.expand.kept.archive import Kept
from spmd.expand.kept.library import Wanted
from spmd.expand.program import Program
from spmd.expand.saying import random_state
from spmd.mesh import DeviceMesh


@dataclass(frozen=True)
class Made:
    """A program, its capture, and the call that it was made for. kept: what was found, where it was not made now.
    may_differ: whether a plain capture may give another text."""

    wanted: Wanted
    captured: Captured
    source: Program | Kept
    may_differ: bool

    @property
    def kept(self) -> Kept | None:
        """What was found; None for a program that was made now."""
        return self.source if isinstance(self.source, Kept) else None

    @property
    def program(self) -> Program:
        """The program, which is read now if it was found with the code of this rank."""
        return self.source.program if isinstance(self.source, Kept) else self.source


def agreed(make: Callable[[bool], Made], mesh: DeviceMesh, title: str) -> Made:
    """What `make(False)` gives, if all ranks have the same, or what `make(True)` gives, which stamps nothing.

    Raises on all ranks if one rank fails, or if their programs differ without stamps, too.
    """
    try:
        return _compared(make, False, mesh, title)
    except RanksDiffer as error:
        if not any(text.endswith(_OF_STAMPS) for text in error.values):
            raise
    return _compared(make, True, mesh, title)


_OF_STAMPS = "captured with stamps, or kept by an earlier process"


def _compared(make: Callable[[bool], Made], plainly: bool, mesh: DeviceMesh, title: str) -> Made:
    made, text, key, error = None, "", b"", None
    try:
        made = make(plainly)
        if mesh.size() > 1:
            text, key = random_state(made.captured), made.source.fingerprint.encode()
    except Exception as e:
        error = e
    agree(text, mesh, title, error, more=lambda: _shown(made, plainly), key=key)
    return made


def _shown(made: Made | None, plainly: bool) -> str:
    """The program as text, and whether it may differ."""
    if made is None:
        return ""
    return f"{made.program}\n{_OF_STAMPS if made.may_differ and not plainly else ''}"
