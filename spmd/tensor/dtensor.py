"""DTensor: a tensor with the global shape, of which this rank holds a block.

    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Replicate()])
    y = x @ w                     # any op gives what it gives on the global tensors
    y.full_tensor()               # the whole of it, on every rank

Ops go through `spmd.tensor.dispatch`; autograd runs above it, so the backward is made of the same ops. Only where
plain tensors become DTensors, and back, has autograd to be told what the ranks' gradients have to do with each other:

    from_local, Shard or Replicate      this rank's block of the cotangent
    from_local, Partial                 all of it, on every rank; of an average a share; what a reduction over the
                                        ranks gives to a term, where the terms are those of a maximum or a product
    to_local                            a block of the cotangent; the caller may say how the blocks lie
    redistribute                        globally the identity, and so is its gradient

A gradient is never made Partial on the way back, and never multiplied by a number of ranks. Tangents of forward-mode
AD cross in the same places.

Left out: inside torch.func's transforms a tensor is torch's stand-in, which has no methods of a DTensor: redistribute,
to_local and from_local before or after them.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.comm import transport
from spmd.mesh import DeviceMesh, current_rank, device_mesh, per_rank, topology
from spmd.mesh.rank import players
from spmd.sim import LocalTensor
from spmd.tensor import explicit, hot, plain
from spmd.tensor.composites import KEYS
from spmd.tensor.copies import Copy, block, laid_out
from spmd.tensor.dispatch import dispatch
from spmd.tensor.hot import Memory
from spmd.tensor.placement import REPLICATE, Placement, Shard
from spmd.tensor.redistribute.between import between
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Order, Spec, check_placements, contiguous, remake, replicated, spec_of, strides_like

aten = torch.ops.aten


class DTensor(torch.Tensor):
    """A distributed tensor. Make one with `distribute_tensor` or `DTensor.from_local`."""

    _local_tensor: torch.Tensor
    _spec: Spec
    _memory: Memory | None = None  # shared with its views, once there are any
    _copy: Copy | None = None  # what it shows, if it is a view that had to be copied

    __slots__ = ("_local_tensor", "_spec")
    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    def __new__(cls, local_tensor: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        out = _torch.wrapper_tensor(cls, local_tensor, spec.shape, spec.stride, requires_grad, keys=KEYS)
        out._local_tensor, out._spec = local_tensor, spec
        return out

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        out = hot.run(op, args, kwargs, DTensor)
        if out is not hot.MISS:
            return out
        for t in types:
            if not issubclass(t, _DISPATCHED):
                return NotImplemented
        return dispatch(op, args, kwargs or {}, DTensor)

    # ---- what it is ---------------------------------------------------------------------------
    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What each axis does to it, in mesh order; an axis of one rank replicates."""
        return self._spec.placements

    @property
    def data(self) -> DTensor:
        """The same tensor without its history, of whose writes autograd does not know.

        Assigning another one makes this show its memory, whatever its shape.
        """
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: DTensor) -> None:
        if not isinstance(other, DTensor):
            raise TypeError(f"cannot assign a {type(other).__name__} to the data of {self._spec}; give a DTensor")
        torch.Tensor.data.__set__(self, other)
        self._local_tensor, self._spec = other._local_tensor, other._spec
        self._memory, self._copy = hot.memory_of(other), other._copy

    # ---- making one, and getting out ----------------------------------------------------------
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
        compares what the ranks give: shapes and dtypes must fit one global tensor. Differentiable.

        Raises ValueError where the local shape is not the one that the global shape gives this rank; with
        `run_check` on all ranks, whichever it is.
        """
        if isinstance(local_tensor, DTensor):
            raise TypeError("from_local: takes this rank's plain tensor, but was given a DTensor; use redistribute")
        if _torch.is_stand_in(local_tensor):
            raise TypeError("from_local: not inside of a transform of torch.func; make the DTensor before it")
        spec = _checked_together(run_check, device_mesh, lambda: _spec_from_local(
            local_tensor, device_mesh, placements, shape, stride
        ))  # fmt: skip
        local_tensor = _on_device(local_tensor, device_mesh)
        if _is_followed(local_tensor):
            return _from_local(local_tensor, spec)
        return DTensor(local_tensor.view_as(local_tensor), spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's block. `grad_placements`: how the gradients that come back lie; as this tensor, by default.

        The gradient of a replicated tensor is taken to be the same on every rank. Where each rank computes a term of
        the loss of its own, say `grad_placements=[Partial()]`. A Partial gives its unreduced part; its gradient is
        taken as replicated.
        """
        if not _is_followed(self):
            return block(self)
        return _ToLocal.apply(self, _gradient_spec(self._spec, grad_placements))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        order: Order | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        in_rank_order: bool = False,
    ) -> DTensor:
        """The same global tensor, lying otherwise, by the cheapest moves (`spmd.plan_redistribute`). Differentiable.

        Where it lies so already the result is a view; otherwise a new tensor. order: for a dim that several axes shard
        these axes, the outermost first, {0: ("tp", "dp")}; that of the mesh where it is not said. async_op: return
        before the last move is done; what reads the result waits for it, and until then nobody may write into this
        tensor, which would be an error. forward_dtype: convert to it before anything
        is sent, and give the result in it; backward_dtype: the same for gradients, which come out in the tensor's own
        dtype.
        """
        spec = self._spec
        if device_mesh is not None and device_mesh != spec.mesh:
            return self._sent_to(device_mesh, placements, order, forward_dtype, backward_dtype, in_rank_order)
        target = _placed(spec, placements or [REPLICATE] * spec.mesh.ndim, order)
        if forward_dtype not in (None, spec.dtype):
            target = target.with_tensor(spec.shape, _checked_dtype(spec, forward_dtype))
        if target is spec and (backward_dtype is None or not self.requires_grad):
            return aten.alias.default(self)
        if _is_followed(self):
            return _Redistribute.apply(self, target, async_op, backward_dtype, in_rank_order)
        return _moved(self, target, async_op, in_rank_order)

    def _sent_to(self, mesh, placements, order, forward_dtype, backward_dtype, in_rank_order) -> DTensor:
        spec = self._spec
        dtype = spec.dtype if forward_dtype in (None, spec.dtype) else _checked_dtype(spec, forward_dtype)
        if mesh.device_type != spec.mesh.device_type:
            raise ValueError(f"redistribute from {spec.mesh.device_type} to {mesh.device_type}: use .to() on blocks")
        grad = _is_followed(self)
        if grad and sorted(mesh.ranks) != sorted(spec.mesh.ranks):
            raise NotImplementedError(
                f"redistribute from {spec.mesh!r} to {mesh!r}: a gradient would have to come back to ranks that do not "
                "compute it; use detach() and send the gradient as a tensor of its own"
            )
        target = spec_of(mesh, _or_replicated(placements, mesh), spec.shape, dtype, order=order)
        if grad:
            return _Crossed.apply(self, target, backward_dtype, in_rank_order)
        return _crossed(self, target, in_rank_order)

    @staticmethod
    def elsewhere(
        device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
    ) -> DTensor:
        """A tensor that lies on other ranks: this one is not in the mesh, and has an empty block of it.

        Good for `redistribute` to a mesh that this rank is in, which all ranks of both must call.
        """
        if current_rank() in device_mesh:
            raise ValueError(f"elsewhere: rank {current_rank()} is in {device_mesh!r} with a block; use from_local")
        empty = torch.empty(0, dtype=dtype, device=device_mesh.device_type)
        return DTensor(empty, spec_of(device_mesh, placements, shape, dtype))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole global tensor, on every rank. `grad_placements`: as in `to_local`."""
        return self.redistribute().to_local(grad_placements=grad_placements)

    # ---- indices ------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> DTensor:
        return torch.Tensor.__getitem__(self, index if _is_simple(index) else self._without_lists(index))

    def __matmul__(self, other: Any) -> DTensor:
        matrices = type(other) is DTensor and self.ndim == 2 == other.ndim
        return torch.mm(self, other) if matrices else torch.Tensor.__matmul__(self, other)

    def __setitem__(self, index: Any, value: Any) -> None:
        torch.Tensor.__setitem__(self, index if _is_simple(index) else self._without_lists(index), value)

    def _without_lists(self, index: Any) -> Any:
        return plain.with_lists(index, self._replicated)

    def _replicated(self, x: torch.Tensor) -> DTensor:
        """A plain tensor that is alike on all ranks, on the mesh of this one."""
        return DTensor(x, spec_of(self._spec.mesh, [REPLICATE] * self._spec.mesh.ndim, x.shape, x.dtype))

    # ---- reading values -----------------------------------------------------------------------
    def __repr__(self, *, tensor_contents=None):
        """What it is and this rank's block: nothing is sent, so one rank alone may print."""
        return f"DTensor({self._spec}, local={self._local_tensor.detach()!r})"

    def __format__(self, spec: str) -> str:
        """With a format such as `.3f`, the number that a 0-dim tensor holds; every rank must ask for it."""
        return format(self.item(), spec) if spec and not self.ndim else format(repr(self), spec)

    def tolist(self) -> Any:
        """The whole tensor as nested lists; every rank must ask for it."""
        explicit.check("tolist", [("it", plan(self._spec, replicated(self._spec)))])
        return self.detach().full_tensor().tolist()

    def numpy(self, *, force: bool = False):
        """An error: no rank holds all of it."""
        raise TypeError("numpy: a DTensor is spread over ranks; use full_tensor().numpy(), or to_local().numpy()")

    # ---- memory -------------------------------------------------------------------------------
    # torch would ask for the memory of the whole tensor, which no rank has.
    def share_memory_(self) -> DTensor:
        """Let other processes see this rank's block."""
        block(self).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes can see this rank's block."""
        return self._local_tensor.is_shared()

    # ---- plain tensors ------------------------------------------------------------------------
    # torch reads off the first dispatch key what kind of tensor to make, and that of DTensors names none.
    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        """A plain tensor of the data, by default of this one's dtype, on its device."""
        return self._local_tensor.new_tensor(data, **kwargs)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The same in torch's old spelling."""
        return self._local_tensor.new(*args, **kwargs)

    # ---- copies -------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """The same numbers in memory of its own, whatever this is a view of; of a leaf, as in torch."""
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy: {self._spec} has a history, which no copy has; detach() it first")
        if id(self) not in memo:
            memo[id(self)] = _rebuilt(block(self).clone(), self._spec, self.requires_grad, {})
            memo[id(self)].__dict__.update(copy.deepcopy(self._attributes, memo))
            memo[id(self)].grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    @property
    def _attributes(self) -> dict[str, Any]:
        """What was said about this tensor in Python."""
        return {name: v for name, v in self.__dict__.items() if name not in ("_memory", "_copy")}

    def __reduce_ex__(self, protocol):
        return _rebuilt, (block(self), self._spec, self.requires_grad, self._attributes)

    def __tensor_flatten__(self):
        return ["_local_tensor"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner, made_of, outer_size, outer_stride):
        spec, requires_grad = made_of
        return DTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    def __coerce_tangent_metadata__(self) -> DTensor:
        """For torch.compile: a gradient that lies as this result does, but for what is still to be reduced."""
        spec = self._spec
        return _moved(self, spec.with_layout(spec.dims, spec.units)) if spec.partial else self

    def __coerce_same_metadata_as_tangent__(self, made_of: Any, expected_type: type | None = None) -> Any:
        """For torch.compile: a gradient that lies as it took for granted; None where it wants no DTensor."""
        if expected_type is not None:
            return None
        spec, _ = made_of
        return DTensor(laid_out(_moved(self, spec)._local_tensor, spec.stride), spec)


_SIMPLE = frozenset({int, slice, type(None), type(...)})


def _is_simple(index: Any) -> bool:
    """Whether an index has neither tensors nor lists, which is told in no time."""
    return type(index) in _SIMPLE or (type(index) is tuple and _SIMPLE.issuperset(map(type, index)))


_DISPATCHED = (DTensor, LocalTensor)
"""What an op on DTensors takes; a LocalTensor is the simulator's plain tensor."""


def _rebuilt(local: torch.Tensor, spec: Spec, requires_grad: bool, attributes: dict[str, Any]) -> DTensor:
    out = DTensor(local.detach(), spec, requires_grad=requires_grad)
    out.__dict__.update(attributes)
    return out


# What a saved DTensor is made of besides numbers: torch.load may take these from a file, as it does torch's own.
torch.serialization.add_safe_globals([_rebuilt, remake, device_mesh._rebuild, *topology.PARTS])


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Place a global tensor on a mesh: every rank keeps its block of what the mesh's first rank has, as a leaf.

    `src_data_rank`: the rank within each axis whose data is the truth; None takes every rank's own `tensor`, which
    must then be equal everywhere, and sends nothing.

    Raises ValueError for a Partial, a placement on a dim that the tensor has not, or a tensor with a history, whose
    gradient would end here.
    """
    target = spec_of(device_mesh, _or_replicated(placements, device_mesh), tensor.shape, tensor.dtype)
    _check_distributable(tensor, target, src_data_rank)
    whole = _on_device(tensor.detach(), device_mesh).contiguous()
    if src_data_rank is not None:
        whole = _from_one(whole, device_mesh, src_data_rank)
    local = plan(replicated(target), target).run(whole)
    if local.data_ptr() == tensor.data_ptr():
        local = local.clone()
    return DTensor(local, target, requires_grad=tensor.requires_grad)


def _check_distributable(tensor: torch.Tensor, target: Spec, src: int | None) -> None:
    if isinstance(tensor, DTensor):
        raise TypeError(f"distribute_tensor: {tensor._spec} is distributed already; use redistribute")
    if target.partial:
        raise ValueError(f"distribute_tensor: {target} would be Partial; give Shard or Replicate")
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor: the tensor was computed from others, to which no gradient would come back; distribute "
            "those, or pass tensor.detach(), or use DTensor.from_local with Replicate() and redistribute"
        )
    _check_member("distribute_tensor", target.mesh)
    if src is not None and not 0 <= src < min(target.mesh.shape):
        raise ValueError(f"src_data_rank is {src}; it is a place within each axis of the mesh {target.mesh.shape}")


def _on_device(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The tensor on the mesh's kind of device; a tensor without data stays one."""
    there = tensor.is_meta or tensor.device.type == mesh.device_type
    return tensor if there else tensor.to(mesh.device_type)


@per_rank
def _check_member(asked: str, mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise RuntimeError(f"{asked}: rank {mesh.get_rank()} is not in {mesh!r}; call it on the ranks of the mesh only")


def _from_one(tensor: torch.Tensor, mesh: DeviceMesh, src: int) -> torch.Tensor:
    """What the rank at coordinate (src, src, ...) has: handed on along one axis after the other."""
    collectives = transport()
    for axis, n in enumerate(mesh.shape):
        if n > 1 and tensor.numel() and not tensor.is_meta:
            sent = collectives.broadcast(tensor, src, collectives.group(mesh, axis))
            tensor = collectives.wait_tensor(sent)
    return tensor


# ---- specs ------------------------------------------------------------------------------------


def _or_replicated(placements: Sequence[Placement] | None, mesh: DeviceMesh) -> Sequence[Placement]:
    return [REPLICATE] * mesh.ndim if placements is None else placements


def _placed(spec: Spec, placements: Sequence[Placement], order: Order | None = None) -> Spec:
    """The spec of the same tensor placed so: itself where it lies so already, contiguous where it has to move."""
    if order:
        target = spec_of(spec.mesh, placements, spec.shape, spec.dtype, order=order)
        return spec if spec.lies_as(target) else target
    return _placed_so(spec, tuple(placements))


def _checked_dtype(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor is to be sent in; of a reduction that is still to be done only another of its kind."""
    if spec.partial and not (spec.dtype.is_floating_point and dtype.is_floating_point):
        raise TypeError(
            f"redistribute: forward_dtype is {dtype}, and {spec} is still to be reduced, which would give other "
            "numbers in it; redistribute first and convert the result"
        )
    return dtype


@functools.lru_cache(maxsize=4096)
def _placed_so(spec: Spec, placements: tuple[Placement, ...]) -> Spec:
    target = spec_of(spec.mesh, placements, spec.shape, spec.dtype)
    return spec if spec.lies_as(target) else target


def _gradient_spec(spec: Spec, placements: Sequence[Placement] | None) -> Spec:
    """How a cotangent lies that comes back to this tensor; the cotangent of a Partial is replicated."""
    return spec.with_layout(spec.dims, spec.units) if placements is None else _placed(spec, placements)


def _spec_from_local(local, mesh, placements, shape, stride) -> Spec:
    if shape is None and stride is None and players() is None:
        placed = None if placements is None else tuple(placements)
        return _spec_of_even(mesh, placed, tuple(local.shape), local.stride(), local.dtype, current_rank())
    return _checked_spec(local, mesh, placements, shape, stride)


@functools.lru_cache(maxsize=4096)
def _spec_of_even(mesh, placements, local_shape, local_stride, dtype, rank: int) -> Spec:
    """The spec of blocks like this one, which the rank has; what is found right once stays right."""
    local = torch.empty_strided(local_shape, local_stride, dtype=dtype, device="meta")
    return _checked_spec(local, mesh, placements, None, None)


def _checked_spec(local, mesh, placements, shape, stride) -> Spec:
    _check_member("from_local", mesh)
    placements = _or_replicated(placements, mesh)
    if shape is None:
        shape = list(local.shape)
        for axis, p in enumerate(check_placements(mesh, placements, local.ndim)):
            if p.is_shard():
                shape[p.dim] *= mesh.shape[axis]
    stride = _global_stride(local, shape) if stride is None else stride
    spec = spec_of(mesh, placements, shape, local.dtype, stride=stride)
    want = spec.local_shape_here()
    if tuple(local.shape) != want:
        raise ValueError(
            f"from_local: this rank's block of {spec} has shape {list(want)}, but a tensor of {list(local.shape)} was "
            "given; pass the global shape with shape="
        )
    return spec


def _global_stride(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a global tensor whose dims lie in memory as those of a dense block; else contiguous ones."""
    dense = zip(strides_like(local.shape, local.stride()), local.stride(), local.shape, strict=True)
    if len(shape) == local.ndim and all(want == have for want, have, size in dense if size > 1):
        return strides_like(shape, local.stride())
    return contiguous(shape)


def _checked_together(run_check: bool, mesh: DeviceMesh, make) -> Spec:
    """The spec that `make` gives; with `run_check` all ranks raise where one does, or where their specs differ."""
    if not run_check:
        return make()
    try:
        spec, mine = make(), None
    except (ValueError, TypeError) as error:
        spec, mine = None, error
    every = transport().gather_objects((str(spec), mine and str(mine)), mesh)
    if mine is not None:
        raise mine
    for rank, (text, error) in zip(mesh.ranks, every, strict=True):
        if error is not None:
            raise ValueError(f"on rank {rank}: {error}")
        if text != every[0][0]:
            raise ValueError(
                f"from_local: rank {mesh.ranks[0]} has a block of {every[0][0]}, but rank {rank} one of {text}; check "
                "the local tensors, or pass the global shape with shape="
            )
    return spec


# ---- autograd ---------------------------------------------------------------------------------
# The backward of each is written with the others, so that it can be differentiated in its turn.


def _is_followed(x: torch.Tensor) -> bool:
    """Whether autograd is to know what becomes of x: it wants a gradient, or may have a tangent."""
    return (x.requires_grad and torch.is_grad_enabled()) or _torch.in_forward_ad()


def _from_local(local: torch.Tensor, spec: Spec) -> DTensor:
    """The DTensor of a block, differentiable; in what is neither a sum nor an average the ranks' terms meet as such."""
    linear = all(kind in ("sum", "avg") for _, kind in spec.partial)
    return _FromLocal.apply(local, spec) if linear else _reduced(local, spec)


_REDUCTIONS = {"max": torch.amax, "min": torch.amin, "product": torch.prod}


def _reduced(local: torch.Tensor, spec: Spec) -> DTensor:
    """The maximum (minimum, product) of the ranks' terms, as that over a dim of which every rank has one index.

    It is left Partial, and what each term gets of the cotangent - of a maximum g where the term equals it, over the
    ties - is what this op gives on one device.
    """
    kind = spec.partial[0][1]  # one for all axes: others do not commute with it
    n = math.prod(spec.mesh.shape[axis] for axis, _ in spec.partial)
    places = [
        Shard(0) if p.is_partial() else Shard(p.dim + 1, p.unit) if p.is_shard() else p for p in spec.placements
    ]
    terms = _FromLocal.apply(local.unsqueeze(0), spec_of(spec.mesh, places, (n, *spec.shape), spec.dtype))
    out = _REDUCTIONS[kind](terms, 0)  # [n@axes, ...] -> [...] +max@axes
    return out if out._spec.lies_as(spec) else out.redistribute(placements=spec.placements)


class _FromLocal(torch.autograd.Function):
    """The block of the cotangent; for a Partial every rank's term has the whole one, an average's a share of it."""

    @staticmethod
    def forward(ctx, local, spec):
        ctx.spec = spec
        return DTensor(local.view_as(local), spec)

    @staticmethod
    def backward(ctx, grad):
        spec = ctx.spec
        target, share = grad._spec.moved_to(spec.dims, spec.units), 1.0
        explicit.check("the gradient of from_local", [("grad", plan(grad._spec, target))])
        for axis, kind in spec.partial:
            share /= spec.mesh.shape[axis] if kind == "avg" else 1
        # Every rank's term has a gradient of its own, though these are equal: what comes back to them is to be summed.
        terms = target.with_layout(target.dims, target.units, [(axis, "sum") for axis, _ in spec.partial])
        local = _ToLocal.apply(_Redistribute.apply(grad, target, False, None), terms)
        return (local if share == 1.0 else local * share), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return _FromLocal.apply(tangent, ctx.spec)


class _ToLocal(torch.autograd.Function):
    """The blocks that come back are blocks of the cotangent; `spec` says how they lie."""

    @staticmethod
    def forward(ctx, x, spec):
        ctx.spec, ctx.lies = spec, x._spec
        local = block(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        return _from_local(grad, ctx.spec), None

    @staticmethod
    def jvp(ctx, tangent, _):
        lies = ctx.lies
        if any(kind not in ("sum", "avg") for _, kind in lies.partial):
            raise NotImplementedError(
                f"to_local of {lies}: the tangent of one rank's part is not known; redistribute it first"
            )
        there = tangent._spec.moved_to(lies.dims, lies.units, lies.partial)
        return _Redistribute.apply(tangent, there, False, None).to_local()


def _moved(x: DTensor, target: Spec, async_op: bool = False, in_rank_order: bool = False) -> DTensor:
    """x lying otherwise, in the target's dtype; with memory of its own for its history."""
    local, spec, shown_by = block(x), x._spec, [x]
    if spec.dtype is not target.dtype:
        local, spec, shown_by = local.to(target.dtype), spec.with_tensor(spec.shape, target.dtype), []
    way = plan(spec, target, math.inf, in_rank_order)
    moved = way.launch(local, *shown_by) if async_op else way.run(local)
    return DTensor(moved.view_as(moved) if moved is x._local_tensor else moved, target)


class _Redistribute(torch.autograd.Function):
    """Globally the identity. The cotangent goes to where the input lies, and never becomes Partial again."""

    @staticmethod
    def forward(ctx, x, target, async_op, backward_dtype, in_rank_order=False):
        ctx.spec, ctx.target, ctx.backward_dtype = x._spec, target, backward_dtype
        return _moved(x, target, async_op, in_rank_order)

    @staticmethod
    def backward(ctx, grad):
        spec, dtype = ctx.spec, ctx.backward_dtype or grad.dtype
        target = grad._spec.moved_to(spec.dims, spec.units)
        if dtype != grad.dtype:
            target = target.with_tensor(target.shape, dtype)
        back = grad if target is grad._spec else _Redistribute.apply(grad, target, False, None)
        return (back if dtype == spec.dtype else back.to(spec.dtype)), None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        target, dtype = tangent._spec.moved_to(ctx.target.dims, ctx.target.units), ctx.target.dtype
        if dtype != target.dtype:
            target = target.with_tensor(target.shape, dtype)
        return _Redistribute.apply(tangent, target, False, None)


def _crossed(x: DTensor, target: Spec, in_rank_order: bool = False) -> DTensor:
    """x on another mesh, in the target's dtype."""
    local, spec = block(x), x._spec
    if spec.dtype is not target.dtype:
        local, spec = local.to(target.dtype), spec.with_tensor(spec.shape, target.dtype)
    return DTensor(between(local, spec, target, in_rank_order), target)


class _Crossed(torch.autograd.Function):
    """Globally the identity, from one mesh to another; the cotangent goes back to where the input lies."""

    @staticmethod
    def forward(ctx, x, target, backward_dtype, in_rank_order):
        ctx.spec, ctx.target, ctx.backward_dtype = x._spec, target, backward_dtype
        return _crossed(x, target, in_rank_order)

    @staticmethod
    def backward(ctx, grad):
        spec, dtype = ctx.spec, ctx.backward_dtype or grad.dtype
        home = spec.with_layout(spec.dims, spec.units).with_tensor(spec.shape, dtype)
        back = _Crossed.apply(grad, home, None, False)
        return (back if dtype == spec.dtype else back.to(spec.dtype)), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _Crossed.apply(tangent, ctx.target.with_layout(ctx.target.dims, ctx.target.units), None, False)
