"""The line of the user's code that an error is about, among the frames of torch, spmd and Python's own library."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

from spmd.comm.user_line import is_library
from spmd.expand.bytecode import loops

LIBRARY_FOLDERS = tuple(str(Path(f).parent) + os.sep for f in (torch.__file__, Path(__file__).parent, os.__file__))
"""Folders of torch, spmd and Python's own library."""

SPMD_FOLDER = str(Path(__file__).parents[1]) + os.sep
OPTIMIZERS = str(Path(torch.optim.__file__).parent) + os.sep


def is_users(file: str) -> bool:
    """Whether code of this file may be the user's: it is not torch's, spmd's or Python's, nor was it made by any."""
    return not file.startswith(LIBRARY_FOLDERS) and os.path.isfile(file)


def in_user_code(error: BaseException) -> str:
    """For an error message: the user's line where the error was raised."""
    return at_user_line(reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]))


def ended_in_user_code(error: BaseException) -> bool:
    """Whether the error was raised as far as code that belongs neither to torch nor to spmd, which caught it."""
    frame = next(iter(traceback.walk_tb(error.__traceback__)), (None,))[0]
    return frame is not None and not frame.f_code.co_filename.startswith(LIBRARY_FOLDERS)


def current_frames() -> Iterator[FrameType]:
    """The frames of the running code, the innermost first."""
    return (frame for frame, _ in traceback.walk_stack(None))


def at_user_line(frames: Iterable[FrameType]) -> str:
    """For an error message: the innermost of these frames that belongs neither to torch nor to spmd.

    Where another library's or torch's own Python code is further in, such as an optimiser's, its line is named, too.
    """
    inside = ""
    for frame in frames:
        where = frame.f_code.co_filename
        if where.startswith(SPMD_FOLDER):
            continue
        if where.startswith(LIBRARY_FOLDERS):
            if not inside and where.startswith(OPTIMIZERS):
                inside = f"\n  which runs {_line_of(frame)}"
        elif os.path.isfile(where):  # asked of few frames, for it asks the disk
            return f"\n  at {_line_of(frame)}{inside}"
    return ""


def short_place(frames: Iterable[FrameType]) -> str:
    """For a text in a program, which is the same on all hosts: the innermost of these frames that is the user's."""
    found = next((frame for frame in frames if is_users(frame.f_code.co_filename)), None)
    return "" if found is None else f" at {os.path.basename(found.f_code.co_filename)}:{found.f_lineno}"


def is_in_loop(outermost: CodeType) -> bool:
    """Whether code of the user's runs in a loop, inside of the function of this code."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if not is_library(frame.f_code.co_filename) and any(frame.f_lasti in loop for loop in loops(frame.f_code)):
            return True
        frame = frame.f_back
    return False


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
