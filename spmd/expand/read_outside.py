"""What a step reads of the world outside the process: files, folders, other processes.

    def step(model, x):
        return model(x) * float(open("scale.txt").read())      # a program would have the number of the first call

While a step is captured, that is an error, which names the line: the functions that read have stand-ins
(`spmd.expand.asked`). What is read of code, such as by an import or for the text of a warning, is not the step's, and
nor is what torch opens for itself. A file that is written alone is left to the step, which writes it once, when it is
captured. Left out: what code in C opens by itself, and sockets. (Python would tell of files, too, by its audit events;
but who listens to them is called at each `id`, for ever.)
"""

from __future__ import annotations

import importlib
import inspect
import io
import linecache
import os
import pkgutil
import subprocess
import tokenize
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from spmd.expand.user_code import SPMD_FOLDER, at_user_line, current_frames

READING: dict[types.ModuleType, dict[str, str]] = {
    io: {"open": "opens"},
    os: {
        "open": "opens", "listdir": "lists", "scandir": "lists", "stat": "asks os.stat of", "lstat": "asks os.lstat of",
        "access": "asks os.access of", "readlink": "asks os.readlink of", "system": "runs", "posix_spawn": "runs",
    },
}  # fmt: skip
"""Functions that read, with what a step does that calls them. `builtins.open` is the one of `io`."""

PROCESS = subprocess.Popen
"""The class whose objects are other processes."""


def refused(does: str, args: tuple) -> RuntimeError:
    """The error of a step that reads something outside. does: what it does to the first of these arguments."""
    what = f" {os.fspath(args[0])!r}" if args and isinstance(args[0], (str, bytes, os.PathLike)) else ""
    return RuntimeError(
        f"the step {does}{what}, and its program would have what was there at the first call for ever; do it before "
        f"the step, and pass what it needs as an argument{at_user_line(current_frames())}"
    )


def reads(does: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether one of these functions reads: a file may be opened to be written alone, or may have been opened before.
    """
    if does != "opens":
        return True
    how = kwargs.get("mode", kwargs.get("flags", args[1] if len(args) > 1 else "r"))
    is_written = how & os.O_ACCMODE == os.O_WRONLY if isinstance(how, int) else not ("r" in how or "+" in how)
    return not is_written and not (args and isinstance(args[0], int))


def _folder(module: types.ModuleType) -> str:
    return str(Path(module.__file__).parent) + os.sep


_OF_CODE = (
    "<frozen importlib", _folder(importlib),
    *(module.__file__ for module in (linecache, tokenize, inspect, traceback, warnings, pkgutil)),
)
"""Code that reads code, and what is known of packages."""

_FOR_THE_STEP = torch.serialization.__file__, torch.hub.__file__
"""Files of torch that read what their callers ask for."""


def who_reads(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame for which the code of a frame reads."""
    while frame is not None and frame.f_code.co_filename.startswith(_FOR_THE_STEP):
        frame = frame.f_back
    return frame


def reads_code(frame: types.FrameType | None) -> bool:
    """Whether code is being read, by what runs in the trace."""
    while frame is not None and not frame.f_code.co_filename.startswith(SPMD_FOLDER):
        if frame.f_code.co_filename.startswith(_OF_CODE):
            return True
        frame = frame.f_back
    return False
