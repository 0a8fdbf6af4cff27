"""What a step reads of the world outside the process: files, folders, other processes, sockets.

    def step(model, x):
        return model(x) * float(open("scale.txt").read())      # a program would have the number of the first call

While a step is captured, that is an error, which names the line. Python tells of each file that is opened (its audit
events), whoever opens it; what it does not tell of has stand-ins (`spmd.expand.asked`). What is read of code, such as
by an import or for the text of a warning, is not the step's, and nor is what torch opens for itself. A file that is
written alone is left to the step, which writes it once, when it is captured.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import linecache
import os
import pkgutil
import sys
import threading
import tokenize
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from spmd import _torch
from spmd.expand.user_code import SPMD_FOLDER, at_user_line, current_frames

OUTSIDE = "stat", "lstat", "access", "readlink"
"""Functions of `os` that read, and of which Python does not tell."""

EVENTS = {
    "open": "opens", "os.listdir": "lists", "os.scandir": "lists", "os.system": "runs", "subprocess.Popen": "runs",
    "os.posix_spawn": "runs", "os.fork": "runs", "socket.connect": "connects to", "sqlite3.connect": "opens",
    "mmap.__new__": "maps",
}  # fmt: skip
"""What Python tells of, with what a step does then."""


def refused(does: str, args: tuple) -> RuntimeError:
    """The error of a step that reads something outside. does: what it does to the first of these arguments."""
    what = f" {os.fspath(args[0])!r}" if args and isinstance(args[0], (str, bytes, os.PathLike)) else ""
    return RuntimeError(
        f"the step {does}{what}, and its program would have what was there at the first call for ever; do it before "
        f"the step, and pass what it needs as an argument{at_user_line(current_frames())}"
    )


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, in this thread, what the step reads outside is an error; also where the step goes on after it."""
    _listen()
    before, _here.watch = getattr(_here, "watch", None), (watch := _Watch())
    try:
        yield
    finally:
        _here.watch = before
    if watch.error is not None:
        raise watch.error


class _Watch:
    """The first error of a step."""

    error: RuntimeError | None = None

    def tell(self, event: str, args: tuple) -> None:
        if _reads(event, args) and _is_of_step(sys._getframe(2)):
            error = refused(EVENTS[event], args)
            self.error = self.error or error
            raise error


_here = threading.local()
_listening: list[bool] = []


def _listen() -> None:
    """Listen to what Python tells, from the first capture on: it cannot be ended."""
    if not _listening:
        _listening.append(True)
        sys.addaudithook(_hear)


def _hear(event: str, args: tuple) -> None:
    if event in EVENTS and (watch := getattr(_here, "watch", None)) is not None:
        watch.tell(event, args)


def _reads(event: str, args: tuple) -> bool:
    """Whether a file is opened to be read; all other events are of what reads."""
    if event != "open":
        return True
    path, mode, flags = args
    if isinstance(path, int):  # it was opened before
        return False
    if isinstance(mode, str):
        return "r" in mode or "+" in mode
    return not isinstance(flags, int) or flags & os.O_ACCMODE != os.O_WRONLY


def _folder(module: types.ModuleType) -> str:
    return str(Path(module.__file__).parent) + os.sep


_OF_CODE = (
    "<frozen importlib", _folder(importlib),
    *(module.__file__ for module in (linecache, tokenize, inspect, traceback, warnings, pkgutil)),
)
"""Code that reads code, and what is known of packages."""

_FOR_THE_STEP = torch.serialization.__file__, torch.hub.__file__
"""Files of torch that read what their callers ask for."""


def _is_of_step(frame: types.FrameType | None) -> bool:
    """Whether code of the user, or of a package that it calls, reads."""
    while frame is not None and frame.f_code.co_filename.startswith(_FOR_THE_STEP):
        frame = frame.f_back
    return _torch.asked_by_user(frame) and not reads_code(frame)


def reads_code(frame: types.FrameType | None) -> bool:
    """Whether code is being read, by what runs in the trace."""
    while frame is not None and not frame.f_code.co_filename.startswith(SPMD_FOLDER):
        if frame.f_code.co_filename.startswith(_OF_CODE):
            return True
        frame = frame.f_back
    return False
