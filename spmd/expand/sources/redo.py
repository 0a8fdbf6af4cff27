"""Writes to Python values that a step has made while it was captured, made again behind its program.

    redo([Write("S.ready", SLOTS, S, {"ready": False}, {"ready": True})])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from spmd.expand.sources.kinds import NOTHING, Kind, is_same


class Write(NamedTuple):
    """A value that has other contents behind a step. path: as the user would write it. old, new: the contents."""

    path: str
    kind: Kind
    of: Any
    old: Any
    new: Any


def redo(writes: Iterable[Write]) -> None:
    """Write again what a step has written; what it left alone stays as it is now."""
    for each in writes:
        new = each.new
        if isinstance(new, dict):
            now = each.kind.contents(each.of)
            new = {k: now.get(k, x) if is_same(each.old.get(k, NOTHING), x) else x for k, x in new.items()}
        each.kind.put(each.of, new)
