"""Which parameters a group takes, where their blocks lie, and how they become DTensors.

A plain parameter becomes `[Shard(dim)]` on the mesh, or `[Replicate(), Shard(dim)]` on one of two axes; with state over
both, its blocks are shared out once more, among the copies. One that is a DTensor on another axis, as by tensor
parallelism, becomes one on both: the blocks of that axis are shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from math import prod

import torch
from torch import nn

from spmd import _torch
from spmd.comm import transport
from spmd.comm.chunk import split_unit
from spmd.mesh import DeviceMesh, per_rank
from spmd.parallel.fully_sharded.bucket import Bucket, Managed, Over, Policies
from spmd.parallel.fully_sharded.group import MANAGED
from spmd.parallel.fully_sharded.memory import Layout, own_blocks
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.identity import become, check_can_become
from spmd.tensor.placement import Shard
from spmd.tensor.spec import Spec

ShardPlacement = Callable[[nn.Parameter], Shard | None]


def managed_by(roots: Sequence[nn.Module], ignored: Set[int]) -> list[Managed]:
    """The parameters of these modules that no group has yet, each once with all its places."""
    found: dict[int, Managed] = {}
    taken: dict[int, str] = {}
    for name, module in _modules(roots):
        others = getattr(module, MANAGED, None) is not None
        for key, p in module._parameters.items():
            if p is None or id(p) in ignored:
                continue
            path = f"{name}.{key}".lstrip(".")
            if others:
                taken.setdefault(id(p), path)
            else:
                m = found.setdefault(id(p), Managed(path, p, []))
                m.places.append((module, key))
                if path != m.name:
                    m.others.append(path)
    for i, m in found.items():
        _check(m, taken.get(i))
    return list(found.values())


def _modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()
    for root in roots:
        yield from root.named_modules(memo=seen)


def _check(m: Managed, elsewhere: str | None) -> None:
    """ValueError for a parameter that cannot be shared out."""
    if elsewhere is not None:
        raise ValueError(
            f"fully_shard: {m.name} is the same parameter as {elsewhere}, which a group of its own gathers already. "
            "Parameters that are tied have to be in one group: fully_shard([one, other])."
        )
    if nn.parameter.is_lazy(m.parameter):
        raise ValueError(f"fully_shard: {m.name} has no shape yet; run the module once before")
    if m.parameter.ndim == 0:
        raise ValueError(f"fully_shard: {m.name} is a number and has no dim to shard; make it a tensor of shape [1]")


# ---- where blocks lie -------------------------------------------------------------------------


def buckets_of(
    managed: Sequence[Managed], over: Over, placement: ShardPlacement | None, policies: Policies
) -> list[Bucket]:
    """The parameters in buckets, a bucket for each dtype; they are DTensors then, and what they were before.

    Those on the meta device have buckets of their own: nothing is made of them yet.
    """
    joined: dict[int, DeviceMesh] = {}
    placed = [_placed(m, over, placement, joined) for m in managed]
    check_can_become("fully_shard", [(m.name, m.parameter) for m in managed])
    made = []
    for kind in dict.fromkeys(map(_kind, managed)):
        mine = [(m, *place) for m, place in zip(managed, placed, strict=True) if _kind(m) == kind]
        ms, stored, computed, dims = (list(column) for column in zip(*mine, strict=True))
        layout = Layout(stored, computed, dims, over.stored, prod(over.mesh.shape[a] for a in over.stored))
        made.append(_bucket(ms, over, layout, policies))
    return made


def _kind(m: Managed) -> tuple[torch.dtype, bool]:
    return m.parameter.dtype, m.parameter.is_meta


def _bucket(managed: list[Managed], over: Over, layout: Layout, policies: Policies) -> Bucket:
    bucket = Bucket(over, managed, layout, policies)
    with torch.no_grad():
        blocks = [_on_device(_block(m.parameter.detach()), over.mesh) for m in managed]
        bucket.take(own_blocks(layout, blocks))
        for m, spec in zip(managed, layout.stored, strict=True):
            _become_sharded(m, spec)
            m.shard = m.parameter._local_tensor
    return bucket


def _become_sharded(m: Managed, spec: Spec) -> None:
    p = m.parameter
    if p.grad is not None:
        raise ValueError(f"fully_shard: {m.name} has a gradient; call zero_grad() before")
    new = DTensor(m.shard, spec, requires_grad=p.requires_grad)
    if isinstance(p, DTensor):
        new = nn.Parameter(new.detach(), p.requires_grad)  # its shape and mesh change: another object
        _torch.take_grad_dtype(new, p)
        for module, key in m.places:
            module._parameters[key] = new
        m.parameter = new
    else:
        become(p, new)


def _block(p: torch.Tensor) -> torch.Tensor:
    return p._local_tensor if isinstance(p, DTensor) else p


def _on_device(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return x if x.is_meta or x.device.type == mesh.device_type else x.to(mesh.device_type)


def _placed(
    m: Managed, over: Over, placement: ShardPlacement | None, joined: dict[int, DeviceMesh]
) -> tuple[Spec, Spec | None, int]:
    """The spec of the shards, that of what is computed with, and the dim that the bucket shards."""
    p = m.parameter
    dim = _dim(m, placement)
    if not isinstance(p, DTensor):
        dims = [over.stored if d == dim else () for d in range(p.ndim)]
        return Spec.of(over.mesh, p.shape, p.dtype, dims=dims), None, dim
    spec, n = p._spec, prod(over.mesh.shape[a] for a in over.stored)
    if spec.partial or not _can_be_cut(spec, dim, n):
        raise ValueError(
            f"fully_shard: {m.name} is {spec}, whose dim {dim} cannot be shared out among {n} ranks again; shard "
            "it without units, in blocks that divide, or call fully_shard before"
        )
    mesh = joined.setdefault(id(spec.mesh), _joined(over.mesh, spec.mesh))
    dims = [tuple(a + over.mesh.ndim for a in axes) for axes in spec.dims]
    dims[dim] += over.stored
    return Spec.of(mesh, spec.shape, p.dtype, dims=dims, units=spec.units), spec, dim


def _can_be_cut(spec: Spec, dim: int, n: int) -> bool:
    """Whether all ranks' blocks of a dim can be cut again: packed ones evenly, and none in units."""
    blocks, unit = split_unit(spec.units[dim])
    ranks = n * prod(spec.mesh.shape[axis] for axis in spec.dims[dim])
    return not spec.dims[dim] or (unit == 1 and (blocks == 1 or spec.shape[dim] // blocks % ranks == 0))


def _dim(m: Managed, placement: ShardPlacement | None) -> int:
    said = placement(m.parameter) if placement is not None else None
    if said is None:
        return 0
    if not isinstance(said, Shard) or said.units != 1:
        raise ValueError(f"shard_placement_fn gave {said!r} for {m.name}; give a Shard(dim), or None for Shard(0)")
    if not -m.parameter.ndim <= said.dim < m.parameter.ndim:
        raise ValueError(f"shard_placement_fn gave {said} for {m.name}, which has {m.parameter.ndim} dims")
    return said.dim % m.parameter.ndim


def _joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of both: for each rank of the outer mesh, the inner mesh through it. The ranks tell each other."""
    if outer.device_type != inner.device_type:
        raise ValueError(f"fully_shard: a parameter is on {inner!r}, and the mesh is {outer!r}; use one device type")
    rows = transport().gather_objects(inner.ranks, outer)
    return _mesh_of(rows, outer, inner)


@per_rank
def _mesh_of(rows: Sequence[Sequence[int]], outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    flat = [rank for row in rows for rank in row]
    if len(set(flat)) < len(flat):
        raise ValueError(f"fully_shard: a parameter is on {inner!r}, which has ranks in common with {outer!r}")
    ranks = torch.tensor(flat).reshape(*outer.shape, *inner.shape)
    names = (*outer.axis_names, *inner.axis_names) if outer.mesh_dim_names and inner.mesh_dim_names else None
    return DeviceMesh(outer.device_type, ranks, mesh_dim_names=names)
