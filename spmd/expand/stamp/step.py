"""What a step reaches before it is traced, so that it can be put back where it has to be traced a second time."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

from spmd.expand.closed_over import search_of
from spmd.expand.stamp.reach import Code, Reach
from spmd.expand.stamp.watch import USER, kind_of_file
from spmd.expand.state import State


def reach_of_step(fn: Callable, state: State) -> Reach:
    """What a step and the modules of its state reach: what their code names, and what that names in turn."""
    forwards = [kind.forward for kind in {type(m): None for m in state.submodules()} if _is_of_user(kind.forward)]
    found = [f for each in (fn, *forwards) if not isinstance(each, nn.Module) for f in search_of(each).functions]
    functions = list({id(f): f for f in (*found, *forwards) if _is_of_user(f)}.values())
    codes = {Code(f.__code__, f.__globals__) for f in functions}
    return Reach.of(codes, state.submodules(), functions=[fn, *functions])


def _is_of_user(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and kind_of_file(function.__code__.co_filename) == USER
