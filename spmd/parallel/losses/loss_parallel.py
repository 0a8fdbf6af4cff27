"""loss_parallel: cross-entropy of logits whose classes are sharded, with torch's name and meaning.

DTensors need no context for it: the softmax over a sharded dim is two sums over ranks, and each target is looked up on
the rank that has it. What the context adds is what torch says of plain targets: they are this rank's block, laid out as
the logits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import REPLICATE, Placement


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross-entropy of DTensors takes plain targets: this rank's block, laid out as the logits without classes.

    Plain class weights are taken as replicated. The classes may be sharded over any axes, and other dims over others.

    >>> from spmd import DeviceMesh, Shard, distribute_tensor
    >>> logits = distribute_tensor(torch.zeros(2, 4), DeviceMesh("cpu", [0]), [Shard(1)])
    >>> with loss_parallel():
    ...     F.cross_entropy(logits, torch.tensor([0, 3])).full_tensor()
    tensor(1.3863)
    """
    with _Targets():
        yield


class _Targets(TorchFunctionMode):
    """Makes DTensors of the plain tensors that a cross-entropy of DTensors is given."""

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if fn is F.cross_entropy:
            args, kwargs = _placed(args, kwargs)
        return fn(*args, **kwargs)


_NAMES = ("input", "target", "weight")


def _placed(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    given = dict(zip(_NAMES, args, strict=False)) | {name: kwargs.pop(name) for name in _NAMES if name in kwargs}
    logits, target, weight = (given.get(name) for name in _NAMES)
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        if not isinstance(target, DTensor):
            at = [_of_target(p, logits, target) for p in logits.placements]
            given["target"] = DTensor.from_local(target, mesh, at, shape=_shape(logits, target))
        if isinstance(weight, torch.Tensor) and not isinstance(weight, DTensor):
            given["weight"] = DTensor.from_local(weight, mesh)
    return tuple(given[name] for name in _NAMES if name in given) + tuple(args[len(_NAMES) :]), kwargs


def _shape(logits: DTensor, target: torch.Tensor) -> tuple[int, ...]:
    """The global shape of the targets: that of the logits, and without the dim of classes where they are numbers."""
    classes = _classes(logits)
    return logits.shape if target.is_floating_point() else (*logits.shape[:classes], *logits.shape[classes + 1 :])


def _of_target(p: Placement, logits: DTensor, target: torch.Tensor) -> Placement:
    """The placement of targets on an axis where the logits have this one."""
    classes = _classes(logits)
    if not p.is_shard() or target.is_floating_point():
        return p
    return REPLICATE if p.dim == classes else p.at(p.dim - (p.dim > classes))


def _classes(logits: DTensor) -> int:
    return 1 if logits.ndim > 1 else 0
