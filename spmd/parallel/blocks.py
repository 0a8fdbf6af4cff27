"""ComputesWithBlocks: a module whose own forward computes with this rank's blocks of its own parameters.

    weights [experts, 2 f@tp, d], [experts, d, f@tp]      experts of which each rank has some features
    input whole  ->  the module's own forward  ->  a part of each sum  ->  all-reduced

So a module that is no layer of its own kind can stand between layers by columns and by rows: experts in one tensor,
norms of this rank's heads, attention with a parameter for each head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.parallel.boundary import entering, leaving
from spmd.parallel.style import ParallelStyle
from spmd.tensor.annotations.constraint import capturing
from spmd.tensor.eager.dtensor import DTensor, distribute_tensor
from spmd.tensor.placement import REPLICATE, Partial, Placement


class ComputesWithBlocks(ParallelStyle):
    """A module that computes with this rank's blocks of its own parameters; those of modules in it are left alone.

    placements: of its own parameters, by name; the others are replicated. Each rank uses these for what it computes, so
    their gradients are summed over the ranks. is_sum: whether what it computes of whole inputs is a part of a sum over
    the ranks. Then gradients of its inputs and its output are all-reduced, and it cannot be captured by a compiled step
    unless it can on one device.

    >>> from spmd import Shard
    >>> ComputesWithBlocks({"down_proj": Shard(-1)}, is_sum=True)
    ComputesWithBlocks(down_proj: Shard(-1), is_sum=True)
    """

    def __init__(self, placements: Mapping[str, Placement], *, is_sum: bool = False):
        self.placements, self.is_sum = dict(placements), is_sum

    def __repr__(self):
        said = [f"{name}: {p}" for name, p in self.placements.items()] + ["is_sum=True"] * self.is_sum
        return f"ComputesWithBlocks({', '.join(said)})"

    def params(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: self.placements.get(name, REPLICATE) for name, _ in module.named_parameters(recurse=False)}

    def check(self, module: nn.Module, name: str) -> None:
        """ValueError for a parameter that the module does not have, or not with as many equal packs."""
        own = dict(module.named_parameters(recurse=False))
        for key, p in self.placements.items():
            if key not in own:
                raise ValueError(f"{self}: {name!r} has no parameter {key!r}; it has {', '.join(own) or 'none'}")
            if p.is_shard() and not -own[key].ndim <= p.dim < own[key].ndim:
                raise ValueError(f"{self}: {name}.{key} is {list(own[key].shape)} and has no dim {p.dim}")
            if p.is_shard() and own[key].shape[p.dim] % p.blocks:
                raise ValueError(
                    f"{self}: {name}.{key} is {list(own[key].shape)}, whose dim {p.dim} is no {p.blocks} equal blocks"
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameters(module, device_mesh, self.params(module), self.src_data_rank)
        module.__class__ = _with_blocks(type(module))
        module._blocks_style, module._blocks_mesh = self, device_mesh
        return module


def place_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], src_data_rank: int | None
) -> None:
    """Place a module's own parameters on a mesh of one axis, each by its name."""
    for name, placement in placements.items():
        p = module.get_parameter(name)
        placed = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=src_data_rank)
        module.register_parameter(name, _torch.take_grad_dtype(nn.Parameter(placed, requires_grad=p.requires_grad), p))


class ModuleOfBlocks(nn.Module):
    """What a module is that computes with its blocks."""

    _blocks_style: ComputesWithBlocks
    _blocks_mesh: DeviceMesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if capturing() is not None:  # tensors are global, and so are parameters
            return super().forward(*args, **kwargs)
        style, mesh = self._blocks_style, self._blocks_mesh
        if style.is_sum:
            args = tuple(_used_in_part(x, mesh) for x in args)
            kwargs = {name: _used_in_part(x, mesh) for name, x in kwargs.items()}
        blocks = {name: block_of(p) for name, p in self._parameters.items() if p is not None}
        with parameters_are(self, blocks):
            out = super().forward(*args, **kwargs)
        return leaving(out, mesh, Partial(), REPLICATE, use_local=True) if style.is_sum else out


@functools.lru_cache(maxsize=1024)
def _with_blocks(cls: type) -> type:
    return type(f"{cls.__name__}OfBlocks", (ModuleOfBlocks, cls), {"__module__": cls.__module__})


def block_of(p: torch.Tensor) -> torch.Tensor:
    """This rank's block of a parameter. Of one that all ranks have, each uses it for a part: gradients are added up."""
    if not isinstance(p, DTensor):
        return p
    return p.to_local(grad_placements=[x if x.is_shard() else Partial() for x in p.placements])


class UsedInPart(ParallelStyle):
    """A layer that all ranks have, and of whose last features each rank uses what it computes for a part of the heads.

    So their gradients are sums over the ranks. features: how many. Those before them enter layers by columns, which sum
    gradients themselves; such are the compressed keys and values of DeepSeek, and their keys with positions.

    >>> UsedInPart(64)
    UsedInPart(64)
    """

    def __init__(self, features: int):
        self.features = features

    def __repr__(self):
        return f"UsedInPart({self.features})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hand_out(_: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            if capturing() is not None:
                return output
            summed, used = output.split([output.shape[-1] - self.features, self.features], -1)
            return torch.cat([summed, _used_in_part(used, device_mesh)], -1)

        module.register_forward_hook(hand_out)
        return module


def _used_in_part(x: Any, mesh: DeviceMesh) -> Any:
    """A whole input of which each rank computes a part of a sum: its gradient is a sum over the ranks."""
    if not isinstance(x, torch.Tensor):
        return x
    if not x.is_floating_point():
        return x.full_tensor() if isinstance(x, DTensor) else x
    return entering(x, mesh, REPLICATE, REPLICATE).to_local(grad_placements=[Partial()])


@contextmanager
def parameters_are(module: nn.Module, blocks: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the module has these parameters of its own."""
    kept = dict(module._parameters)
    module._parameters.update(blocks)
    try:
        yield
    finally:
        module._parameters.update(kept)
