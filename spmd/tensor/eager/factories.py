"""Factories of DTensors: each rank makes its own block, and nothing is sent.

    spmd.zeros(8, 16, device_mesh=mesh, placements=[Shard(0), Replicate()])

Inside of `with mesh:` the mesh may be left out. The arguments are those of the functions of `torch.distributed.tensor`
with the same names. A random tensor is the same global tensor on any mesh (`spmd.tensor.recipes.random`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.mesh import DeviceMesh, or_current, per_rank
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import REPLICATE, Placement
from spmd.tensor.spec import Spec, spec_of

Placements = Sequence[Placement] | None


def zeros(
    *size, requires_grad: bool = False, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None, placements: Placements = None,
) -> DTensor:  # fmt: skip
    """A DTensor of zeros of this global size, replicated where no placements are given.

    >>> from spmd.mesh import DeviceMesh
    >>> zeros(2, 3, device_mesh=DeviceMesh("cpu", [0]))
    DTensor(f32[2, 3], local=tensor([[0., 0., 0.],
            [0., 0., 0.]]))
    """
    return _make(torch.zeros, (), size, requires_grad, dtype, layout, device_mesh, placements)


def ones(
    *size, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided, requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None, placements: Placements = None,
) -> DTensor:  # fmt: skip
    """A DTensor of ones; see `zeros`."""
    return _make(torch.ones, (), size, requires_grad, dtype, layout, device_mesh, placements)


def empty(
    *size, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided, requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None, placements: Placements = None,
) -> DTensor:  # fmt: skip
    """A DTensor of uninitialised memory; see `zeros`."""
    return _make(torch.empty, (), size, requires_grad, dtype, layout, device_mesh, placements)


def full(
    size, fill_value, *, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
    requires_grad: bool = False, device_mesh: DeviceMesh | None = None, placements: Placements = None,
) -> DTensor:  # fmt: skip
    """A DTensor of one number; see `zeros`."""
    dtype = torch.full((), fill_value).dtype if dtype is None else dtype
    return _make(torch.full, (fill_value,), (size,), requires_grad, dtype, layout, device_mesh, placements)


def rand(
    *size, requires_grad: bool = False, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None, placements: Placements = None,
) -> DTensor:  # fmt: skip
    """A DTensor of random numbers from [0, 1), the same global tensor on any mesh; see `zeros` and `manual_seed`."""
    out = _make(torch.empty, (), size, False, dtype, layout, device_mesh, placements, name="rand")
    return out.uniform_().requires_grad_(requires_grad)


def randn(
    *size, requires_grad: bool = False, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None, placements: Placements = None,
) -> DTensor:  # fmt: skip
    """A DTensor of normal random numbers, the same global tensor on any mesh; see `zeros` and `manual_seed`."""
    out = _make(torch.empty, (), size, False, dtype, layout, device_mesh, placements, name="randn")
    return out.normal_().requires_grad_(requires_grad)


def _make(
    make: Callable[..., torch.Tensor], value: tuple, size: tuple, requires_grad: bool, dtype: torch.dtype | None,
    layout: torch.layout, mesh: DeviceMesh | None, placements: Placements, name: str | None = None,
) -> DTensor:  # fmt: skip
    name = name or make.__name__
    mesh = or_current(mesh, name)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name}: device_mesh is {mesh!r}; give the mesh of the tensor")
    if layout is not torch.strided:
        raise NotImplementedError(f"{name}: layout {layout}; a DTensor is strided")
    placements = [REPLICATE] * mesh.ndim if placements is None else placements
    spec = spec_of(mesh, placements, _size(name, size), dtype or torch.get_default_dtype())
    if spec.partial:
        raise ValueError(f"{name}: {spec} would be Partial; give Shard or Replicate")
    return DTensor(_make_block(make, value, spec), spec, requires_grad=requires_grad)


def _size(name: str, size: tuple) -> tuple[int, ...]:
    """The global size: (2, 3) for the arguments `(2, 3)` and for `((2, 3),)`."""
    size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    if not all(isinstance(n, int) and n >= 0 for n in size):
        raise ValueError(f"{name}: size {size} must be ints of at least 0")
    return size


@per_rank
def _make_block(make: Callable[..., torch.Tensor], value: tuple[Any, ...], spec: Spec) -> torch.Tensor:
    mesh = spec.mesh
    if mesh.get_coordinate() is None:
        raise RuntimeError(f"{make.__name__}: rank {mesh.get_rank()} is not in {mesh!r}; call it on its ranks only")
    return make(spec.local_shape(mesh.get_coordinate()), *value, dtype=spec.dtype, device=mesh.device_type)
