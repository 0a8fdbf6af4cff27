"""Compare a compiled step with the same step on one device call by call: results, errors, and what a module keeps.

    check(Model, step, [(x, 0.5), (x, 0.1)])

Numbers are compared by their types and digits, tensors by their values. `x` of a call is cut by its rows; in the way
"sharded" the parameters are cut, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import spmd
from spmd import DTensor, LocalTensorMode, Shard
from spmd.expand.state import own_attributes

WAYS = ("dp", "sharded")
X = torch.linspace(-2.0, 3.0, 32, dtype=torch.float64).reshape(8, 4)


class Plain(nn.Module):
    """A module with a weight of ones."""

    def __init__(self, **own: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        for name, x in own.items():
            self.register_buffer(name, x) if isinstance(x, torch.Tensor) else setattr(self, name, x)


def compiled(step: Callable, way: str, **options: Any) -> Any:
    """The step for four ranks. To be called within simulated ranks."""
    mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    params = {"params": {"*weight": {"dp": Shard(0)}}} if way == "sharded" else {}
    return spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}, **params, **options)


def check(make: Callable, step: Callable, calls: Sequence[tuple], way: str = "dp", captures: int | None = None) -> Any:
    """Compare the calls. make: makes the first argument. captures: how many the step makes at most."""
    with LocalTensorMode(4):
        ours, theirs = make(), make()
        run = compiled(step, way)
        for i, call in enumerate(calls):
            want, got = outcome(step, theirs, *copy.deepcopy(call)), outcome(run, ours, *copy.deepcopy(call))
            same(got, want, f"call {i}")
            same(kept(ours), kept(theirs), f"after call {i}")
        return run


def outcome(step: Callable, *args: Any) -> Any:
    """What a call gives, or the error that it raises."""
    try:
        return step(*args)
    except (ArithmeticError, ValueError, LookupError, TypeError) as error:
        return type(error), str(error)


def kept(model: Any) -> dict[str, Any]:
    """What a module keeps: its tensors, and its attributes that are none of torch's."""
    if not isinstance(model, nn.Module):
        return {}
    own = {name: x for name, x in own_attributes(model) if name not in ("_modules", "training")}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **own}


def same(got: Any, want: Any, where: str) -> None:
    """Raise AssertionError where two values are not the same."""
    if isinstance(want, torch.Tensor):
        got = got.full_tensor() if isinstance(got, DTensor) else got
        got = got.reconcile() if hasattr(got, "reconcile") else got
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        torch.testing.assert_close(got.detach(), want.detach(), equal_nan=True, msg=lambda text: f"{where}: {text}")
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            same(got[key], want[key], f"{where}: {key}")
    elif isinstance(want, list | tuple):
        assert type(got) is type(want) and len(got) == len(want), f"{where}: {got!r} and not {want!r}"
        for i, each in enumerate(want):
            same(got[i], each, f"{where}[{i}]")
    else:
        assert (type(got), repr(got)) == (type(want), repr(want)), f"{where}: {got!r} and not {want!r}"
