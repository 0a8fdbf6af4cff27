"""DTensor: a tensor with the global shape, of which this rank holds a block.

    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Replicate()])
    y = x @ w                     # any op gives what it gives on the global tensors
    y.full_tensor()               # the whole of it, on every rank

Ops go through `spmd.tensor.dispatch`; autograd runs above it, so the backward is made of the same ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd import _torch
from spmd.comm import transport
from spmd.mesh import DeviceMesh
from spmd.tensor.dispatch import dispatch
from spmd.tensor.placement import REPLICATE, Placement
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Spec, check_placements, replicated, spec_of


class DTensor(torch.Tensor):
    """A distributed tensor. Make one with `distribute_tensor` or `DTensor.from_local`."""

    _local_tensor: torch.Tensor
    _spec: Spec
    _orphan: bool  # a view that had to be copied: it no longer shows its base

    __slots__ = ("_local_tensor", "_orphan", "_spec")
    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    def __new__(cls, local_tensor: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        out = _torch.wrapper_tensor(cls, local_tensor, spec.shape, spec.stride, requires_grad)
        out._local_tensor, out._spec, out._orphan = local_tensor, spec, False
        return out

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return dispatch(op, args, kwargs or {}, cls)

    def __repr__(self):
        return f"DTensor({self._spec}, local={self._local_tensor!r})"

    def __reduce_ex__(self, protocol):
        return _rebuilt, (self._local_tensor, self._spec, self.requires_grad)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.placements

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> DTensor:
        """The DTensor of which this rank holds `local_tensor`, placed so (replicated where not given).

        Without `shape` the blocks are taken to be equal; give the global shape where they are not. `run_check`
        compares what the ranks give: shapes and dtypes must fit one global tensor.

        Raises ValueError where the local shape is not the one that the global shape gives this rank.
        """
        placements = placements or [REPLICATE] * device_mesh.ndim
        spec = _spec_from_local(local_tensor, device_mesh, placements, shape, stride)
        if run_check:
            _check_ranks_fit(local_tensor, spec)
        return _FromLocal.apply(local_tensor, spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's block. `grad_placements`: how the gradients that come back lie; as this tensor, by default.

        A Partial gives its unreduced part; its gradient is taken as replicated.
        """
        if not torch.is_grad_enabled():
            return self._local_tensor
        spec = self._spec if grad_placements is None else _placed(self._spec, grad_placements)
        return _ToLocal.apply(self, spec)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """The same global tensor, lying otherwise, by the cheapest moves. Differentiable."""
        if device_mesh is not None and device_mesh != self._spec.mesh:
            raise NotImplementedError(
                f"redistribute from {self._spec.mesh!r} to {device_mesh!r}: only moves within one mesh are supported"
            )
        return _Redistribute.apply(self, _placed(self._spec, placements or [REPLICATE] * self._spec.mesh.ndim))

    def full_tensor(self) -> torch.Tensor:
        """The whole global tensor, on every rank."""
        return self.redistribute().to_local()


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Place a global tensor on a mesh: every rank keeps its block of what the mesh's first rank has.

    `src_data_rank`: the rank within each axis whose data is the truth; None takes every rank's own `tensor`, which
    must then be equal everywhere, and sends nothing.

    Raises ValueError for a Partial, or a placement on a dim that the tensor has not.
    """
    placements = placements or [REPLICATE] * device_mesh.ndim
    target = spec_of(device_mesh, placements, tensor.shape, tensor.dtype)
    if target.partial:
        raise ValueError(f"distribute_tensor: {list(placements)} has a Partial; give Shard or Replicate")
    whole = tensor.detach().contiguous()
    if src_data_rank is not None:
        whole = _from_first(whole, device_mesh, src_data_rank)
    local = plan(replicated(target), target).run(whole)
    if local is tensor.detach() or local.data_ptr() == tensor.data_ptr():
        local = local.clone()
    return DTensor(local, target, requires_grad=tensor.requires_grad)


def _from_first(tensor: torch.Tensor, mesh: DeviceMesh, src: int) -> torch.Tensor:
    collectives = transport()
    for axis, n in enumerate(mesh.shape):
        if n > 1 and tensor.numel():
            sent = collectives.broadcast(tensor, src, collectives.group(mesh, axis))
            tensor = collectives.wait_tensor(sent)
    return tensor


# ---- specs ------------------------------------------------------------------------------------


def _placed(spec: Spec, placements: Sequence[Placement]) -> Spec:
    return spec_of(spec.mesh, placements, spec.shape, spec.dtype)


def _spec_from_local(local, mesh, placements, shape, stride) -> Spec:
    if shape is None:
        shape = list(local.shape)
        for axis, p in enumerate(check_placements(mesh, placements, local.ndim)):
            if p.is_shard():
                shape[p.dim] *= mesh.shape[axis]
    spec = spec_of(mesh, placements, shape, local.dtype, stride=stride)
    want = spec.local_shape(mesh.get_coordinate())
    if tuple(local.shape) != want:
        raise ValueError(
            f"from_local: this rank's block of {spec} has shape {list(want)}, but a tensor of {list(local.shape)} was "
            "given; pass the global shape with shape="
        )
    return spec


def _check_ranks_fit(local: torch.Tensor, spec: Spec) -> None:
    mine = (tuple(spec.shape), str(local.dtype), tuple(local.shape))
    every = transport().gather_objects(mine, spec.mesh)
    for coordinate, (shape, dtype, block) in zip(spec.mesh.coordinates(), every, strict=True):
        if (shape, dtype) != every[0][:2] or block != spec.local_shape(coordinate):
            raise ValueError(
                f"from_local: the rank at {coordinate} gives {dtype} {list(block)}, which is no block of {spec}; "
                "check the local shapes, or pass the global one with shape="
            )


# ---- autograd ---------------------------------------------------------------------------------


class _FromLocal(torch.autograd.Function):
    """The block of the cotangent; for a Partial every rank's term has the whole one, an average's a share of it."""

    @staticmethod
    def forward(ctx, local, spec):
        ctx.spec = spec
        return DTensor(local.view_as(local), spec)

    @staticmethod
    def backward(ctx, grad):
        spec = ctx.spec
        strict = [kind for _, kind in spec.partial if kind not in ("sum", "avg")]
        if strict:
            raise NotImplementedError(f"the gradient of from_local with Partial({strict[0]!r}) is not supported yet")
        share = 1.0
        for axis, kind in spec.partial:
            share /= spec.mesh.shape[axis] if kind == "avg" else 1
        local = plan(grad._spec, grad._spec.with_layout(spec.dims, spec.units)).run(grad._local_tensor)
        return (local if share == 1.0 else local * share), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, spec):
        ctx.spec = spec.with_layout(spec.dims, spec.units) if spec is x._spec else spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        return DTensor(grad, ctx.spec), None


class _Redistribute(torch.autograd.Function):
    """Globally the identity. The cotangent goes to where the input lies, and never becomes Partial again."""

    @staticmethod
    def forward(ctx, x, target):
        ctx.spec = x._spec.with_layout(x._spec.dims, x._spec.units)
        local = plan(x._spec, target).run(x._local_tensor)
        if local is x._local_tensor:
            return DTensor(local.view_as(local), x._spec)
        return DTensor(local, target)

    @staticmethod
    def backward(ctx, grad):
        have = grad._spec
        target = have.with_layout(ctx.spec.dims, ctx.spec.units)
        return DTensor(plan(have, target).run(grad._local_tensor), target), None


def _rebuilt(local: torch.Tensor, spec: Spec, requires_grad: bool) -> DTensor:
    return DTensor(local, spec, requires_grad=requires_grad)
