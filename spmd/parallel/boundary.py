"""What crosses the boundary of a module that is parallel: plain blocks outside, DTensors inside.

    x, this rank's block of [Shard(1)]   ->   DTensor [Shard(1)]   ->   DTensor [Replicate()]       `entering`
    DTensor [Partial()]                  ->   DTensor [Shard(1)]   ->   this rank's block           `leaving`

In a compiled step tensors are global, and what is said of them is a constraint (`spmd.constrain`).

A tensor that enters several modules one after the other enters once: queries, keys and values are made of one DTensor.
So it is moved once, and the three terms of its gradient are added up before they are reduced.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.constraint import capturing
from spmd.tensor.eager.constrain import constrain
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import Placement


def entering(
    x: torch.Tensor, mesh: DeviceMesh, layout: Placement | None, desired: Placement | None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """A tensor on the way in, as `desired`. layout: how a plain tensor lies; None leaves it plain.

    shape: the global shape of a plain tensor, where it is known; otherwise all blocks are taken as equal.
    """
    if capturing() is not None:
        return _constrained(x, mesh, desired)
    key = mesh, layout, desired, shape
    found = _last.result(x, key)
    if found is None:
        found = _moved(x, mesh, layout, desired, shape)
        _last.keep(x, key, found)
    return found


class _Last(threading.local):
    """What entered last, and what it became. Neither is kept alive: what no backward needs is made again."""

    def __init__(self):
        self.entry = None

    def result(self, x: torch.Tensor, key: tuple) -> torch.Tensor | None:
        """What `x` became when it entered so, if it still has the same values and the same history."""
        if self.entry is None or self.entry[0]() is not x or self.entry[1] != (*key, _state(x)):
            return None
        return self.entry[2]()

    def keep(self, x: torch.Tensor, key: tuple, made: torch.Tensor) -> None:
        self.entry = weakref.ref(x), (*key, _state(x)), weakref.ref(made)


_last = _Last()


def _state(x: torch.Tensor) -> tuple:
    """What tells whether values, or what autograd is to know of them, have changed."""
    memory = (x, x._local_tensor) if isinstance(x, DTensor) else (x,)  # users write into blocks, too
    written = tuple([None if m.is_inference() else m._version for m in memory])
    return written, x.requires_grad and torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def leaving(
    x: torch.Tensor, mesh: DeviceMesh, layout: Placement | None, desired: Placement | None, use_local: bool
) -> torch.Tensor:
    """A tensor on the way out, as `desired`; if `use_local`, this rank's block. layout: how a plain tensor lies."""
    out = _constrained(x, mesh, desired) if capturing() is not None else _moved(x, mesh, layout, desired)
    return out.to_local() if use_local and isinstance(out, DTensor) else out


def _moved(
    x: torch.Tensor, mesh: DeviceMesh, layout: Placement | None, desired: Placement | None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    if not isinstance(x, DTensor):
        if layout is None:
            return x
        x = DTensor.from_local(x, mesh, [layout], shape=shape)
    if x.device_mesh != mesh:
        raise ValueError(f"a parallel module on {mesh!r} was given {x._spec} on {x.device_mesh!r}; move it before")
    return x if desired is None else x.redistribute(placements=[desired], async_op=True)


def _constrained(x: torch.Tensor, mesh: DeviceMesh, desired: Placement | None) -> torch.Tensor:
    """The global tensor with a constraint on the axis of the mesh; other axes of the step's mesh stay open."""
    if desired is None:
        return x
    of_step, axis = capturing().mesh, mesh.axis_name(0)
    others = [name for name in of_step.axis_names if name != axis]
    return constrain(x, dict.fromkeys(others) | {axis: desired})


def as_tuple(x: Any) -> tuple:
    """The entries of a tuple or list; of anything else one."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)
