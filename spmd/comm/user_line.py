"""The line of the user's code that is running, for messages and for comparing ranks."""

from __future__ import annotations

import functools
import os.path
import sys
from pathlib import Path

import torch

_LIBRARY = (str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent), "<")


def caller() -> str:
    """The innermost line of code outside of torch and spmd, as `train.py:12`."""
    return call_site()[0]


def call_site() -> tuple[str, object]:
    """`caller()`, and the op that this line calls on DTensors; None where it calls a function instead."""
    frame, below = sys._getframe(1), None
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, below = frame.f_back, frame
    op = below.f_locals.get("op") if below is not None and below.f_code.co_name == "__torch_dispatch__" else None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", op


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file belongs to torch or spmd, or is no real file."""
    return file.startswith(_LIBRARY) or "/contextlib.py" in file or "/functools.py" in file
