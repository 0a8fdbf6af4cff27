"""DTensor: a tensor with the global shape, of which this rank holds a block.

    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Replicate()])
    y = x @ w                     # any op gives the same result as on the global tensors
    y.full_tensor()               # the global tensor, as a plain tensor on every rank

Ops go through `spmd.tensor.eager.dispatch`. Autograd runs above it, so the backward consists of the same ops. Only
where plain tensors become DTensors, and back, autograd has to know how the ranks' gradients make up one gradient
(`spmd.tensor.eager.conversions`):

    from_local, Shard or Replicate      the gradient is this rank's block of the cotangent
    from_local, Partial                 all of the cotangent, on every rank; for an average a share of it; for a
                                        maximum, minimum or product the gradient of that reduction, for this term
    to_local                            the gradient is a block of the cotangent; the caller may give its placements
    redistribute                        the identity of the global tensor, and so is its gradient

A gradient is never made Partial on the way back, and never multiplied by a number of ranks. Tangents of forward-mode
AD are converted in the same places.

Left out: inside the transforms of torch.func a tensor is a wrapper of torch's, without the methods of a DTensor. Call
redistribute, to_local and from_local before or after the transform.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.comm import transport, wait
from spmd.mesh import DeviceMesh, current_rank, device_mesh, foreign, or_current, topology
from spmd.sim import LocalTensor
from spmd.tensor.eager import chunks, fast_path, pickled, plain_tensors
from spmd.tensor.eager.block_specs import agreed_spec, check_member, or_replicated, spec_from_block
from spmd.tensor.eager.composites import DISPATCH_KEYS
from spmd.tensor.eager.conversions import (
    Redistribute,
    Send,
    ToLocal,
    block_gradient_spec,
    checked_dtype,
    gradient_spec,
    is_differentiated,
    redistributed,
    sent,
    to_dtensor,
    with_placements,
)
from spmd.tensor.eager.dispatch import dispatch
from spmd.tensor.eager.fast_path import Memory
from spmd.tensor.eager.traced_from_local import traced_distribute, traced_from_local
from spmd.tensor.eager.view_copies import ViewCopy, block, copied_block, handed_out, in_stride_order, note_write
from spmd.tensor.modes import explicit
from spmd.tensor.placement import REPLICATE, Placement
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Order, Spec, remake, replicated, spec_of

aten = torch.ops.aten


class DTensor(torch.Tensor):
    """A distributed tensor. Make one with `distribute_tensor` or `DTensor.from_local`."""

    _local_tensor: torch.Tensor
    _spec: Spec
    _memory: Memory | None = None  # shared with its views, once there are any
    _copy: ViewCopy | None = None  # the copy that it shows, if it is a view that had to be copied
    _reduced: tuple | None = None  # what its last reduction gave (`reduced_once`)
    _offset: int = 0  # where a view begins in the memory that one device would have

    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    @_torch.not_compiled
    def __new__(cls, local_tensor: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        out = _torch.wrapper_tensor(cls, local_tensor, spec.shape, spec.stride, requires_grad, keys=DISPATCH_KEYS)
        out._local_tensor, out._spec = _torch.without_bits(local_tensor), spec  # ops run on blocks below those bits
        return out

    @classmethod
    @_torch.not_compiled
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        out = fast_path.run(op, args, kwargs, DTensor)
        if out is not fast_path.MISS:
            return out
        for t in types:
            if not issubclass(t, _DISPATCHED):
                return NotImplemented
        return dispatch(op, args, kwargs or {}, DTensor)

    # ---- attributes ---------------------------------------------------------------------------
    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement of each axis, in mesh order. An axis of one rank replicates."""
        return self._spec.placements

    @property
    def data(self) -> DTensor:
        """The same tensor without its history. Autograd does not see writes to it.

        After an assignment this tensor has the memory and the shape of the other one.
        """
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: DTensor) -> None:
        if not isinstance(other, DTensor):
            raise TypeError(f"cannot assign a {type(other).__name__} to the data of {self._spec}; give a DTensor")
        torch.Tensor.data.__set__(self, other)
        self._local_tensor, self._spec = other._local_tensor, other._spec
        self._memory, self._copy, self._offset = fast_path.memory_of(other), other._copy, other._offset

    # ---- from blocks, to blocks, to another layout --------------------------------------------
    @staticmethod
    @_torch.not_compiled
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The DTensor with these placements and `local_tensor` as this rank's block. Differentiable.

        device_mesh: by default that of the `with mesh:` block around the call. placements: replicated by default.
        shape: the global shape. Without it all blocks are taken as equal; give it where they are not. stride: the
        global strides. Without them the dims have the order in memory that they have in the blocks; they are stored by
        rows where some rank has at most one row, which does not say. run_check: compare the ranks' blocks. Their
        shapes, dtypes and strides must fit one global tensor, all or none must require a gradient, and replicas must
        be equal. If one differs, the error names its ranks; nothing is repaired, where torch broadcasts the block of
        the first rank. grad_placements: of the gradient that the block gets: Partial() on an axis that replicates
        leaves each rank its own term, not reduced. By default the gradient has no Partial.

        The block is not copied, unless it is a view that torch conjugates or negates when it is read (`is_conj`).

        Raises ValueError where the local shape is not the one that the global shape gives this rank; with `run_check`
        on all ranks, if it is wrong on one.
        """
        if isinstance(local_tensor, DTensor):
            raise TypeError("from_local: takes this rank's plain tensor, but was given a DTensor; use redistribute")
        if torch.compiler.is_dynamo_compiling():
            if device_mesh is not None and not run_check:
                return traced_from_local(
                    local_tensor, device_mesh, placements, shape, stride, grad_placements, DTensor
                )
        elif _torch.is_functorch_wrapper(local_tensor):
            raise TypeError("from_local: not inside of a transform of torch.func; make the DTensor before it")
        device_mesh = or_current(device_mesh, "from_local")
        spec = agreed_spec(run_check, device_mesh, lambda: spec_from_block(
            local_tensor, device_mesh, placements, shape, stride
        ), local_tensor)  # fmt: skip
        local_tensor, gradient = _on_device(local_tensor, device_mesh), block_gradient_spec(spec, grad_placements)
        if is_differentiated(local_tensor):
            return to_dtensor(local_tensor, spec, DTensor, gradient)
        return DTensor(local_tensor.view_as(local_tensor), spec)

    @_torch.not_compiled
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's block. `grad_placements`: of the gradient that comes back; by default those of this tensor.

        The gradient of a replicated tensor is taken to be the same on every rank. Where each rank computes its own
        term of the loss, give `grad_placements=[Partial()]`. A Partial gives this rank's term, not reduced; its
        gradient is taken as replicated.
        """
        if not is_differentiated(self):
            return handed_out(self)
        return ToLocal.apply(self, gradient_spec(self._spec, grad_placements))

    @_torch.not_compiled
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
        """The same global tensor in another layout, by the cheapest moves (`spmd.plan_redistribute`). Differentiable.

        If it has that layout already the result is a view; otherwise a new tensor.

        placements: replicated by default. order: for a dim that several axes shard, these axes, the outermost first:
        {0: ("tp", "dp")}; by default the order of the mesh. async_op: return before the last move is done. A reader of
        the result waits for it; a write into this tensor before that is an error. forward_dtype: convert to this dtype
        before anything is sent; the result has it. backward_dtype: the same for gradients; they are converted to the
        tensor's own dtype in the end. in_rank_order: reduce in the order of the ranks (`spmd.deterministic`).
        """
        spec = self._spec
        if device_mesh is not None and device_mesh != spec.mesh:
            return self._sent_to(device_mesh, placements, order, forward_dtype, backward_dtype, in_rank_order)
        target = with_placements(spec, placements or [REPLICATE] * spec.mesh.ndim, order)
        if forward_dtype not in (None, spec.dtype):
            target = target.with_tensor(spec.shape, checked_dtype(spec, forward_dtype))
        if target is spec and (backward_dtype is None or not self.requires_grad):
            return aten.alias.default(self)
        if is_differentiated(self):
            return Redistribute.apply(self, target, async_op, backward_dtype, in_rank_order)
        return redistributed(self, target, async_op, in_rank_order)

    def _sent_to(self, mesh, placements, order, forward_dtype, backward_dtype, in_rank_order) -> DTensor:
        """The tensor on another mesh."""
        spec = self._spec
        dtype = spec.dtype if forward_dtype in (None, spec.dtype) else checked_dtype(spec, forward_dtype)
        if mesh.device_type != spec.mesh.device_type:
            raise ValueError(f"redistribute from {spec.mesh.device_type} to {mesh.device_type}: use .to() on blocks")
        wants_gradient = is_differentiated(self)
        if wants_gradient and sorted(mesh.ranks) != sorted(spec.mesh.ranks):
            raise NotImplementedError(
                f"redistribute from {spec.mesh!r} to {mesh!r}: a gradient would have to come back to ranks that do not "
                "compute it; use detach() and send the gradient as a tensor of its own"
            )
        target = spec_of(mesh, or_replicated(placements, mesh), spec.shape, dtype, order=order)
        if wants_gradient:
            return Send.apply(self, target, backward_dtype, in_rank_order)
        return sent(self, target, in_rank_order)

    @staticmethod
    def elsewhere(
        device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
    ) -> DTensor:
        """A tensor on the ranks of a mesh that this rank is not in; this rank has an empty block.

        It serves to `redistribute` the tensor to a mesh that this rank is in. All ranks of both meshes must call that.
        """
        if current_rank() in device_mesh:
            raise ValueError(f"elsewhere: rank {current_rank()} is in {device_mesh!r} with a block; use from_local")
        empty = torch.empty(0, dtype=dtype, device=device_mesh.device_type)
        return DTensor(empty, spec_of(device_mesh, placements, shape, dtype))

    @_torch.not_compiled
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The global tensor as a plain tensor, on every rank. `grad_placements`: as in `to_local`."""
        return self.redistribute().to_local(grad_placements=grad_placements)

    # ---- indices ------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> DTensor:
        if type(index) in _SIMPLE or (type(index) is tuple and _SIMPLE.issuperset(map(type, index))):
            return _item(self, index)  # almost no time is left to ask whether there are lists or tensors
        return _item(self, self._without_lists(index))

    def __matmul__(self, other: Any) -> DTensor:
        matrices = type(other) is DTensor and self.ndim == 2 == other.ndim
        return torch.mm(self, other) if matrices else torch.Tensor.__matmul__(self, other)

    def __setitem__(self, index: Any, value: Any) -> None:
        torch.Tensor.__setitem__(self, self._without_lists(index), value)

    def _without_lists(self, index: Any) -> Any:
        return plain_tensors.lists_to_tensors(index, self._replicated)

    def _replicated(self, x: torch.Tensor) -> DTensor:
        """A plain tensor that is the same on all ranks, as a DTensor on the mesh of this one."""
        return DTensor(x, spec_of(self._spec.mesh, [REPLICATE] * self._spec.mesh.ndim, x.shape, x.dtype))

    # ---- reading values -----------------------------------------------------------------------
    def __repr__(self, *, tensor_contents=None):
        """The spec and this rank's block. Nothing is sent, so one rank alone may print."""
        return f"DTensor({self._spec}, local={self._local_tensor.detach()!r})"

    def __format__(self, spec: str) -> str:
        """With a format such as `.3f`, the number that a 0-dim tensor holds; every rank must ask for it."""
        return format(self.item(), spec) if spec and not self.ndim else format(repr(self), spec)

    def tolist(self) -> Any:
        """The global tensor as nested lists; every rank must ask for it."""
        explicit.check("tolist", [("it", plan(self._spec, replicated(self._spec)))])
        return self.detach().full_tensor().tolist()

    def numpy(self, *, force: bool = False):
        """An error: no rank holds the global tensor."""
        raise TypeError("numpy: a DTensor is spread over ranks; use full_tensor().numpy(), or to_local().numpy()")

    # ---- memory -------------------------------------------------------------------------------
    # torch would ask for the memory of the global tensor, which no rank has.
    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage without data, one for a tensor and all its views: torch.compile asks which tensors share memory."""
        memory = self._memory
        if memory is None:
            return torch.Tensor.untyped_storage(self)
        if memory.storage is None:
            memory.storage = torch.Tensor.untyped_storage(self)
        return memory.storage

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the global tensor would be contiguous on one device."""
        if not torch.compiler.is_compiling():
            foreign.check_is_not_fsdp(f"the DTensor {self._spec}")
        return torch.Tensor.is_contiguous(self, memory_format=memory_format)

    def storage_offset(self) -> int:
        """Where it begins in the memory of the global tensor that it is a view of, on one device."""
        return self._offset

    def share_memory_(self) -> DTensor:
        """Let other processes see this rank's block."""
        block(self).share_memory_()
        return self

    def storage(self) -> torch.TypedStorage:
        """An error: no rank has the memory of the global tensor. Libraries that write files ask for it."""
        raise TypeError(
            f"storage: {self._spec} is spread over ranks, and no rank has its memory. To write one file give whole "
            "tensors: x.full_tensor(), or for a model spmd.checkpoint.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)). To load them use set_model_state_dict with these options."
        )

    def is_shared(self) -> bool:
        """Whether other processes can see this rank's block."""
        return self._local_tensor.is_shared()

    # ---- plain tensors ------------------------------------------------------------------------
    # torch picks the kind of the new tensor by the first dispatch key. That of a DTensor names no kind.
    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        """A plain tensor of the data, by default of this one's dtype, on its device."""
        return self._local_tensor.new_tensor(data, **kwargs)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The same, under the older name that torch has for it."""
        return self._local_tensor.new(*args, **kwargs)

    def __hash__(self) -> int:
        foreign.check_asks_for_no_whole_state()
        return id(self)

    # ---- copies -------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A copy with memory of its own, which it shares with the copies of its views. Only leaves can be copied.

        As with torch's own, the copy of a parameter has no gradient.
        """
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy: {self._spec} has a history, which no copy has; detach() it first")
        if id(self) not in memo:
            local = copied_block(wait(self._local_tensor), memo)
            out = memo[id(self)] = DTensor(local, self._spec, requires_grad=self.requires_grad)
            out.__dict__.update(copy.deepcopy(pickled.attributes(self), memo))
            out.grad = None if isinstance(self, torch.nn.Parameter) else copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        attributes = pickled.attributes(self, "_memory", "_copy")
        return _rebuilt, (pickled.saved(self), self._spec, self.requires_grad, attributes)

    # ---- checkpoints --------------------------------------------------------------------------
    # torch.distributed.checkpoint asks a tensor that is a shard for these (`chunks.py`).
    def __create_write_items__(self, fqn: str, object: DTensor) -> list[Any]:
        return chunks.write_items(fqn, object)

    def __create_chunk_list__(self) -> list[Any]:
        return chunks.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return chunks.memory_of_chunk(self, index)

    # ---- for readers and writers of blocks outside of this folder -----------------------------
    @property
    def _current_block(self) -> torch.Tensor:
        """This rank's block, up to date. All ranks must ask: a view that had to be copied may be gathered again."""
        return block(self)

    def _note_write(self) -> None:
        """Note that the block was written. All ranks must: the base of a view that had to be copied gets the write."""
        note_write(self)

    def _share_memory_with(self, other: DTensor) -> None:
        """Note that another tensor, of the same spec, has the block of this one, as `detach` gives it."""
        other._memory = fast_path.memory_of(self)

    # ---- torch.compile ------------------------------------------------------------------------
    @property
    @_torch.not_compiled  # Dynamo would ask for the block in order to compile this
    def _block(self) -> torch.Tensor:
        """For torch.compile: this rank's block, which compiled code may write, and does not say so."""
        if _torch.is_fake(self._local_tensor):
            with _torch.functional_mode_of(self._local_tensor):
                return block(self)
        if self._memory is None:
            return self._local_tensor
        with _torch.untraced():  # torch asks for the blocks of arguments while it traces, too
            return handed_out(self, to_compiled_code=True)

    def __tensor_flatten__(self):
        _torch.frozen_are_constants()
        return ["_block"], (self._spec, self.requires_grad, self._offset)

    @staticmethod
    def __tensor_unflatten__(inner, made_of, outer_size, outer_stride):
        spec, requires_grad, offset = made_of
        out = DTensor(inner["_block"], spec, requires_grad=requires_grad)
        if offset:
            out._offset = offset
        return out

    def __coerce_tangent_metadata__(self) -> DTensor:
        """For torch.compile: a gradient in the layout of this result, with reductions done."""
        spec = self._spec
        return redistributed(self, spec.with_layout(spec.dims, spec.units)) if spec.partial else self

    def __coerce_same_metadata_as_tangent__(self, made_of: Any, expected_type: type | None = None) -> Any:
        """For torch.compile: a gradient in the layout that it assumed; None if it assumed no DTensor."""
        if expected_type is not None:
            return None
        spec = made_of[0]
        out = DTensor(in_stride_order(redistributed(self, spec)._local_tensor, spec.stride), spec)
        out._offset = made_of[2]
        return out


_SIMPLE = frozenset({int, slice, type(None), type(...)})
"""Types of indices that are neither tensors nor lists."""

_item = torch.Tensor.__getitem__

_DISPATCHED = (DTensor, LocalTensor)
"""The tensor types that an op on DTensors takes. A LocalTensor is the simulator's plain tensor."""


def _rebuilt(saved: pickled.Saved, spec: Spec, requires_grad: bool, attributes: dict[str, Any]) -> DTensor:
    """The DTensor that was pickled; an error if this rank has another block."""
    out = DTensor(pickled.loaded(saved, spec), spec, requires_grad=requires_grad)
    out.__dict__.update(attributes)
    out._memory, out._copy = saved.memory, saved.copy
    return out


# A saved DTensor is made of these and of plain data. torch.load may read them from a file, as it reads torch's own.
torch.serialization.add_safe_globals([
    _rebuilt, remake, device_mesh._rebuild, pickled.Saved, Memory, ViewCopy, *topology.PARTS
])  # fmt: skip


@_torch.not_compiled
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Place a global tensor on a mesh: every rank gets its block of the tensor of the mesh's first rank, as a leaf.

    device_mesh: by default that of the `with mesh:` block around the call.
    src_data_rank: the rank within each axis whose data is used. None uses every rank's own `tensor` and sends nothing;
    then the tensor must be equal on all ranks.

    Raises ValueError for a Partial, for a placement on a dim that the tensor does not have, and for a tensor with a
    history, whose gradient would end here.
    """
    device_mesh = or_current(device_mesh, "distribute_tensor")
    if torch.compiler.is_dynamo_compiling():
        return traced_distribute(tensor, device_mesh, placements, src_data_rank, distributed)
    target = spec_of(device_mesh, or_replicated(placements, device_mesh), tensor.shape, tensor.dtype)
    return distributed(tensor, target, src_data_rank)


def distributed(tensor: torch.Tensor, target: Spec, src_data_rank: int | None = 0) -> DTensor:
    """`distribute_tensor` to a spec, which may say what placements cannot: in which order axes shard one dim."""
    _check_distributable(tensor, target, src_data_rank)
    source = _on_device(tensor.detach(), target.mesh).contiguous()
    if src_data_rank is not None:
        source = _broadcast(source, target.mesh, src_data_rank)
    local = plan(replicated(target), target).run(source)
    own = local.clone() if _torch.is_tracing(local) or local.data_ptr() == tensor.data_ptr() else local
    return DTensor(own, target, requires_grad=tensor.requires_grad)


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
    check_member("distribute_tensor", target.mesh)
    if src is not None and not 0 <= src < min(target.mesh.shape):
        raise ValueError(f"src_data_rank is {src}; it is a place within each axis of the mesh {target.mesh.shape}")


def _on_device(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The tensor on the device type of the mesh. A tensor without data stays without data."""
    is_there = tensor.is_meta or tensor.device.type == mesh.device_type
    return tensor if is_there else tensor.to(mesh.device_type)


def _broadcast(tensor: torch.Tensor, mesh: DeviceMesh, src: int) -> torch.Tensor:
    """The tensor of the rank at coordinate (src, src, ...), broadcast along one axis after the other."""
    collectives = transport()
    for axis, n in enumerate(mesh.shape):
        if n > 1 and tensor.numel() and not tensor.is_meta:
            tensor = collectives.wait_tensor(collectives.broadcast(tensor, src, collectives.group(mesh, axis)))
    return tensor
