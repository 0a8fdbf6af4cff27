"""torch's CommDebugMode, which counts the collectives that it sees; and the names under which it counts."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _python_dispatch


def counted_name(kind: str) -> Any:
    """The op that stands for a kind of collective in the counts of CommDebugMode: `c10d_functional.all_reduce`."""
    return getattr(torch.ops.c10d_functional, kind)


def is_counted_by_torch(*, on_the_stack: bool) -> bool:
    """Whether the running code was called by a CommDebugMode of torch, which then does not see what the code calls.

    on_the_stack: also where the mode is on, and sees what the code calls.
    """
    module = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    if module is None:
        return False
    if on_the_stack and any(
        isinstance(mode, module.CommDebugMode) for mode in _python_dispatch._get_current_dispatch_mode_stack()
    ):
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and frame.f_code.co_filename == module.__file__:
            return True
        frame = frame.f_back
    return False
