"""Micro-batches of a pipeline whose rows the ranks of a stage share out.

    first stage     whole rows of all ranks    ->  this rank's rows
    in between      this rank's rows           ->  this rank's rows
    last stage      this rank's rows           ->  a DTensor, of which the loss is computed

Data-parallel modules compute with plain rows, and average gradients over the ranks. There is one loss, and its
gradients are sums; so within such a module they are as many times as large, and what goes to the stage before is not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from spmd._torch import pytree
from spmd.mesh import DeviceMesh, per_rank
from spmd.parallel.fully_sharded.fully_shard import groups_in
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import Shard


def share_out(module: nn.Module, mesh: DeviceMesh, is_first: bool, is_last: bool) -> None:
    """Let a stage's module take and give rows as above, by hooks."""
    averages = hasattr(module, "no_sync") or any(True for _ in groups_in(module))

    def before(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        args = pytree.tree_map(partial(_given, mesh=mesh, is_whole=is_first, averages=averages), args)
        return args, pytree.tree_map(partial(_given, mesh=mesh, is_whole=True, averages=averages), kwargs)

    def behind(_: nn.Module, args: tuple, output: Any) -> Any:
        return pytree.tree_map(partial(_result, mesh=mesh, is_last=is_last, averages=averages), output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(behind)


def _given(x: Any, mesh: DeviceMesh, is_whole: bool, averages: bool) -> Any:
    """An argument, as the module gets it. is_whole: whether it has the rows of all ranks."""
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        return x
    part = _own_rows(_checked(x, mesh), mesh) if is_whole else x
    return _scaled(part, 1 / mesh.size()) if averages else _placed(part, mesh)


def _result(x: Any, mesh: DeviceMesh, is_last: bool, averages: bool) -> Any:
    """A result, as the next stage or the loss function gets it."""
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, DTensor):
        return x if is_last else x.redistribute(mesh, [Shard(0)] * mesh.ndim).to_local()
    part = _scaled(x, mesh.size()) if averages else x
    return _placed(part, mesh) if is_last else part


def _checked(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if not x.ndim or x.shape[0] % mesh.size():
        raise ValueError(
            f"PipelineStage: a micro-batch of {list(x.shape)} for {mesh.size()} ranks, which do not divide its rows; "
            "give a batch that the number of micro-batches times the ranks divides, or pad it"
        )
    return x


@per_rank
def _own_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    n = x.shape[0] // mesh.size()
    return x.narrow(0, mesh.ranks.index(mesh.get_rank()) * n, n)


def _placed(part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(part, mesh, [Shard(0)] * mesh.ndim)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return _ScaledGradient.apply(x, factor) if x.requires_grad and factor != 1 else x


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None
