"""DTensors that are made in code that Dynamo traces: one node of its graph, which makes the DTensor of a plain tensor.

    DTensor.from_local      spec_number(mesh, placements, sizes, ...)      called while Dynamo traces: a constant
                            from_block(x, number)                          the node
    distribute_tensor       target_number(mesh, placements, sizes, ...)
                            shared_out(x, number)

Sizes and strides of the block become constants, as the spec has them: blocks of another shape are traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.mesh import DeviceMesh, current_rank
from spmd.tensor.eager.block_specs import spec_from_block
from spmd.tensor.eager.conversions import block_gradient_spec, is_differentiated, to_dtensor
from spmd.tensor.placement import Partial, Placement, Replicate, Shard
from spmd.tensor.spec import Spec, spec_of

_KINDS = {kind.__name__: kind for kind in (Shard, Replicate, Partial)}

_targets: list[tuple[Spec, Callable, int | None]] = []
"""By number: the spec of a tensor that is shared out, the function that does so, and the rank whose data is used."""

_specs: list[tuple[Spec, type, Spec | None]] = []
"""By number: a spec, the class DTensor, and the spec of the gradient where it was given.

Dynamo bounds how often code is traced."""


def traced_from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, shape: Sequence[int] | None,
    stride: Sequence[int] | None, grad_placements: Sequence[Placement] | None, dtensor: type,
) -> Any:  # fmt: skip
    """`DTensor.from_local`, written in what Dynamo can trace."""
    places, gradient = [None if ps is None else tuple([plain(p) for p in ps]) for ps in (placements, grad_placements)]
    block = _constants(local.shape), _constants(local.stride()), local.dtype
    given = [None if sizes is None else _constants(sizes) for sizes in (shape, stride)]
    return from_block(local, spec_number((mesh,), places, gradient, *block, *given, dtensor))


def plain(placement: Placement) -> tuple:
    """The name of its class and its fields: Dynamo passes no frozen objects on."""
    return placement.__class__.__name__, *[getattr(placement, name) for name in placement.__match_args__]


def placement_of(plain: tuple) -> Placement:
    """The placement of what `plain` made of it."""
    name, *fields = plain
    return _KINDS[name](*fields)


def _constants(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes as plain ints, by which Dynamo guards its code: it guards the ends of a range."""
    return tuple([range(n, n + 1)[0] for n in sizes])


@_torch.constant_in_dynamo
def spec_number(mesh_alone, places, gradient, sizes, strides, dtype, shape, stride, dtensor) -> int:
    """The number of the spec that a block of these sizes and strides gives."""
    _torch.kept_whole_in_dynamo(from_block)
    _torch.add_dynamo_guard(current_rank)
    placements, grad_placements = (
        None if ps is None else list(map(placement_of, ps)) for ps in (places, gradient)
    )
    block = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    spec = spec_from_block(block, mesh_alone[0], placements, shape, stride)
    _specs.append((spec, dtensor, block_gradient_spec(spec, grad_placements)))
    return len(_specs) - 1


def from_block(local: torch.Tensor, number: int) -> Any:
    """The DTensor of a block. Dynamo keeps a call of this as one node."""
    spec, dtensor, gradient = _specs[number]
    if local.device.type not in (spec.mesh.device_type, "meta"):
        local = local.to(spec.mesh.device_type)
    if is_differentiated(local):
        return to_dtensor(local, spec, dtensor, gradient)
    return dtensor(local.view_as(local), spec)


def traced_distribute(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, src: int | None,
    distribute: Callable,
) -> Any:  # fmt: skip
    """`distribute_tensor`, written in what Dynamo can trace. distribute: `distributed` of the module of DTensor."""
    if tensor.requires_grad:
        raise RuntimeError(
            "distribute_tensor makes a leaf, and compiled code cannot make one of a tensor that requires a gradient: "
            "distribute it before, or write DTensor.from_local(x, mesh, [Replicate()]).redistribute(...)"
        )
    places = None if placements is None else tuple([plain(p) for p in placements])
    return shared_out(tensor, target_number((mesh,), places, _constants(tensor.shape), tensor.dtype, src, distribute))


@_torch.constant_in_dynamo
def target_number(mesh_alone, places, sizes, dtype, src, distribute) -> int:
    """The number of the spec that a tensor of this size gets."""
    _torch.kept_whole_in_dynamo(shared_out)
    _torch.add_dynamo_guard(current_rank)
    (mesh,) = mesh_alone
    placements = [Replicate()] * mesh.ndim if places is None else [_KINDS[name](*fields) for name, *fields in places]
    _targets.append((spec_of(mesh, placements, sizes, dtype), distribute, src))
    return len(_targets) - 1


def shared_out(tensor: torch.Tensor, number: int) -> Any:
    """The DTensor of a global tensor. Dynamo keeps a call of this as one node."""
    target, distribute, src = _targets[number]
    return distribute(tensor, target, src)
