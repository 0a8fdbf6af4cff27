"""Two threads that exchange on one process group at once are an error: their numbers would be mixed.

A thread may hand over to another: one that waits in `join`, or for a queue, is not inside an exchange. The stack of a
thread says whether it is. It is read only where another thread exchanges than the last time; so an exchange costs no
more than the comparison of two numbers. Threads of autograd exchange for a thread that waits for them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path
from types import FrameType

import torch

from spmd import _torch
from spmd.mesh.rank import current_rank, is_rank_overridden

last = threading.get_ident()
"""The thread that exchanged last; 0 where none did, or after an error."""

_refused: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_lock = threading.Lock()

_SPMD = Path(__file__).resolve().parents[1]
_EXCHANGES = tuple(str(_SPMD / part) for part in ("comm", "mesh", "tensor/redistribute", "expand/compile.py"))
_LIBRARY = (str(_SPMD), str(Path(torch.__file__).resolve().parent), "<")


def changed() -> None:
    """Note that another thread exchanges than the last time. RuntimeError if that one is still inside an exchange."""
    global last
    if is_rank_overridden() or _torch.in_backward():
        return
    me = threading.current_thread()
    with _lock:
        running = sys._current_frames()
        others = [t for t in threading.enumerate() if t is not me and (t.ident == last or t in _refused)]
        if me in _refused or any(_is_inside_exchange(running.get(t.ident)) for t in others):
            last = 0
            _refused.update([me, *others])
            raise RuntimeError(_message(me.name, others[0].name if others else "another one"))
        last = me.ident


def leave() -> None:
    """Note that this thread goes on with groups of its own."""
    global last
    if last == threading.get_ident():
        last = 0


def _is_inside_exchange(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame is inside an exchange that it began."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        if frame.f_code.co_filename.startswith(_EXCHANGES):
            return True
        frame = frame.f_back
    return False


def _message(one: str, other: str) -> str:
    return (
        f"rank {current_rank()}: the threads {one!r} and {other!r} exchange at once on the groups of one mesh, and "
        "their numbers would be mixed. Let one thread communicate, or give each other one groups of its own: make "
        "spmd.comm.OwnGroups(mesh, name) on all ranks, and use it as a `with` block in the thread."
    )
