"""A tensor of the state on a slice of the step's mesh, such as experts on their axis: other axes have copies of it.

    experts  f32[8@ep, 16, 4] on mesh["ep"]   ->   f32[8@ep, 16, 4] on mesh, replicated over dp

Every rank has its block already. That the copies are equal is believed, as it is of plain tensors.
"""

from __future__ import annotations

import torch

from spmd.mesh import DeviceMesh
from spmd.tensor.spec import Spec, spec_of_value


def present_spec(t: torch.Tensor, mesh: DeviceMesh) -> Spec | None:
    """The spec that a tensor has, of one on a slice of the mesh that on the whole of it; None for a plain tensor."""
    spec = spec_of_value(t)
    if spec is None or spec.mesh == mesh or not _is_slice(spec.mesh, mesh):
        return spec
    dims = [tuple(_axis(spec, a, mesh) for a in axes) for axes in spec.dims]
    partial = [(_axis(spec, a, mesh), kind) for a, kind in spec.partial]
    return Spec.of(mesh, spec.shape, spec.dtype, stride=spec.stride, dims=dims, units=spec.units, partial=partial)


def _is_slice(part: DeviceMesh, mesh: DeviceMesh) -> bool:
    names = tuple(name for name in mesh.axis_names if name in part.axis_names)
    return names == tuple(part.axis_names) and mesh[names] == part


def _axis(spec: Spec, axis: int, mesh: DeviceMesh) -> int:
    return mesh.axis(spec.mesh.axis_name(axis))
