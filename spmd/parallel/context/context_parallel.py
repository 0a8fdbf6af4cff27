"""context_parallel: attention over a sequence that is shared out, as a context around an unmodified model.

    with context_parallel(mesh["cp"], buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 0]):
        loss = F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())

Inside, the buffers are this rank's part of the sequence, and `scaled_dot_product_attention` sees all of it. Names and
arguments are those of torch.distributed.tensor.experimental, with `method` and `balanced` besides. DTensors whose dim
of the sequence is sharded over the axis need no buffers: their positions are global already, as those of all tensors of
a compiled step are (`captured.py`). Without the context they are lowered as any op is
(`spmd.tensor.recipes.attention`), also in a compiled step.

Left out: dropout in the attention; gradients of masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from math import prod

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from spmd.comm import all_gather_tensor, wait
from spmd.comm.chunk import lengths
from spmd.mesh import DeviceMesh, per_rank
from spmd.parallel.context import layout as layouts
from spmd.parallel.context.balance import balanced_attention, wants_balance
from spmd.parallel.context.captured import captured_attention
from spmd.parallel.context.heads import attention_by_heads, check_heads
from spmd.parallel.context.layout import Layout, in_order
from spmd.parallel.context.ring import Ring, RingAttention, added_mask
from spmd.tensor.annotations.constraint import capturing
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import REPLICATE

METHODS = "ring", "ring_q", "allgather", "heads"


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Set[torch.Tensor] | None = None,
    method: str = "ring",
    balanced: bool | None = None,
) -> Iterator[None]:
    """Inside, `F.scaled_dot_product_attention` of parts of a sequence is that of the whole.

    mesh: of one axis. buffers: tensors that have the sequence, each along its dim of `buffer_seq_dims`: inside they are
    this rank's part, in place; after it they are as before, but for those in `no_restore_buffers`. Give what depends on
    positions, too. All sequences are equally long, and the ranks divide their length.

    method: "ring", keys and values go round the ranks; "ring_q", queries do, which is less to send where keys and
    values are longer; "allgather", keys and values are gathered at once; "heads", each rank computes some heads.
    balanced: a rank has a part from the front and one from the back, so that causal attention is as much work for all.
    Buffers are cut so, but for False, where twice the number of ranks divides their length; else parts are in order.
    DTensors, and the tensors of a compiled step, lie in order: their queries, keys and values are exchanged before a
    causal ring, and results behind it. True: always; None: where that pays by the figures of the mesh's machine.

    A mask may be of this rank's keys, [b, h, 1, part], and of all keys, [b, h, part, all] with all positions in order.

    >>> mesh, x = DeviceMesh("cpu", [0]), torch.ones(1, 2, 4, 8)
    >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
    ...     F.scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 4, 8])
    """
    _check(mesh, method)
    given, dims, lost = list(buffers or ()), list(buffer_seq_dims or ()), list(no_restore_buffers or ())
    if len(given) != len(dims):
        raise ValueError(f"context_parallel: {len(given)} buffers and {len(dims)} buffer_seq_dims; give one for each")
    if any(all(x is not y for y in given) for x in lost):
        raise ValueError("context_parallel: no_restore_buffers has a tensor that is not in buffers")
    if any(x.requires_grad for x in given):
        raise ValueError("context_parallel: a buffer requires a gradient; buffers are data, and no parameters")
    if capturing() is not None:  # tensors are global in a compiled step, buffers too
        with _Attention(mesh, method, balanced):
            yield
        return
    kept = [None if any(x is y for y in lost) else x.clone() for x in given]
    for x, part in zip(given, _shards(mesh, given, dims, balanced is not False), strict=True):
        _become(x, part)
    try:
        with _Attention(mesh, method, balanced):
            yield
    finally:
        for x, whole in zip(given, kept, strict=True):
            if whole is not None:
                _become(x, whole)


def context_parallel_shard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], *, balanced: bool = True
) -> list[torch.Tensor]:
    """This rank's parts of sequences, as `context_parallel` makes them of its buffers; new tensors.

    >>> [part] = context_parallel_shard(DeviceMesh("cpu", [0]), [torch.arange(4)], [0])
    >>> part
    tensor([0, 1, 2, 3])
    """
    _check(mesh)
    return _shards(mesh, buffers, seq_dims, balanced)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], *, balanced: bool = True
) -> list[torch.Tensor]:
    """The whole sequences of which ranks have parts, in order of their positions, on each rank.

    >>> from spmd import LocalTensorMode, init_device_mesh
    >>> with LocalTensorMode(2):
    ...     mesh = init_device_mesh("cpu", (2,))
    ...     parts = context_parallel_shard(mesh, [torch.arange(8)], [0])
    ...     [whole] = context_parallel_unshard(mesh, parts, [0])
    >>> [x.tolist() for x in parts[0].local.values()], whole.reconcile().tolist()
    ([[0, 1, 6, 7], [2, 3, 4, 5]], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    _check(mesh)
    n, found = mesh.size(), []
    for x, dim in zip(buffers, seq_dims, strict=True):
        order = torch.tensor(_equal_parts(x.shape[dim] * n, n, balanced).order, device=x.device)
        every = wait(all_gather_tensor(x.contiguous(), dim % x.ndim, (mesh, 0)))
        found.append(every.index_select(dim, order.argsort()))
    return found


# ---- buffers ----------------------------------------------------------------------------------


def _check(mesh: DeviceMesh, method: str = "ring") -> None:
    if mesh.ndim != 1:
        raise ValueError(f"context_parallel: the mesh has {', '.join(mesh.axis_names)}; give one, such as mesh['cp']")
    if method not in METHODS:
        raise ValueError(f"context_parallel: method is {method!r}; it may be {', '.join(map(repr, METHODS))}")


def _equal_parts(size: int, n: int, want_balanced: bool) -> Layout:
    if size % n:
        raise ValueError(
            f"context_parallel: {n} ranks do not divide a sequence of {size}; pad it to {size + -size % (2 * n)} and "
            "mask what was added, or use DTensors, whose parts may differ"
        )
    return layouts.balanced(size, n) if want_balanced and size % (2 * n) == 0 else in_order((size // n,) * n)


def _shards(mesh: DeviceMesh, buffers: Sequence, dims: Sequence[int], want_balanced: bool) -> list[torch.Tensor]:
    layouts = [_equal_parts(x.shape[dim], mesh.size(), want_balanced) for x, dim in zip(buffers, dims, strict=True)]
    return [_part(mesh, x.detach(), dim, each) for x, dim, each in zip(buffers, dims, layouts, strict=True)]


@per_rank
def _part(mesh: DeviceMesh, x: torch.Tensor, dim: int, layout: Layout) -> torch.Tensor:
    return torch.cat([x.narrow(dim, a, b - a) for a, b in layout.chunks[mesh.get_local_rank(0)]], dim)


@torch.no_grad()
def _become(x: torch.Tensor, y: torch.Tensor) -> None:
    """Give x the shape and the values of y."""
    x.resize_(y.shape)
    x.copy_(y)


# ---- attention --------------------------------------------------------------------------------


class _Attention(TorchFunctionMode):
    """Takes the calls of `scaled_dot_product_attention`."""

    def __init__(self, mesh: DeviceMesh, method: str, want_balanced: bool | None):
        super().__init__()
        self.mesh, self.method, self.balanced = mesh, method, want_balanced

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        if fn is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return fn(*args, **(kwargs or {}))

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):  # fmt: skip
        q, k, v = query, key, value
        if dropout_p:
            raise NotImplementedError(f"context_parallel: dropout_p is {dropout_p}; attention over ranks has none")
        if attn_mask is not None and is_causal:
            raise ValueError("scaled_dot_product_attention: give attn_mask or is_causal=True, not both")
        if k.shape[1] != q.shape[1] and not (enable_gqa and q.shape[1] % k.shape[1] == 0):
            raise ValueError(
                f"scaled_dot_product_attention: {q.shape[1]} heads of queries and {k.shape[1]} of keys; with "
                "enable_gqa=True each of the latter serves several of the former, if it divides their number"
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if isinstance(q, DTensor):
            return self._of_dtensors(q, k, v, attn_mask, is_causal, scale)
        if capturing() is not None:
            return captured_attention(self.mesh, self.method, q, k, v, attn_mask, is_causal, scale, self.balanced)
        n = self.mesh.size()
        rows, keys = (_equal_parts(x.shape[2] * n, n, self.balanced is not False) for x in (q, k))
        return self._run(q, k, v, attn_mask, rows, keys, is_causal, scale)

    def _run(
        self, q, k, v, mask, rows: Layout, keys: Layout, causal: bool, scale: float, is_exchanged: bool = False
    ) -> torch.Tensor:
        """Attention of this rank's parts. is_exchanged: whether they are brought into balanced order and back."""
        if causal and rows != keys:
            raise ValueError(
                f"context_parallel: causal attention of {sum(rows.lengths)} rows to {sum(keys.lengths)} keys; both "
                "have to be of the same sequence"
            )
        mask_is = _kind_of_mask(mask, q, k, sum(keys.lengths))
        mask = mask if mask is None else added_mask(mask, q, mask_is)
        ring = Ring(self.mesh, self.mesh.axis_name(0), self.method, rows, keys, causal, scale, mask_is)
        if self.method == "heads":
            return attention_by_heads(q, k, v, mask, ring)
        if is_exchanged:
            return balanced_attention(q, k, v, ring)
        return RingAttention.apply(q, k, v, mask, ring)

    def _of_dtensors(self, q: DTensor, k: DTensor, v: DTensor, mask, causal: bool, scale: float) -> torch.Tensor:
        if not self._shares_out(q, k):
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        if self.method == "heads":
            for heads in self._heads_of_ranks(q):  # so that no rank is refused alone
                check_heads(heads, self.mesh.size())
        k, v = (x.redistribute(placements=q.placements) for x in (k, v))
        rows, keys = (in_order(lengths(x.shape[2], x._spec.units[2], (self.mesh.size(),))) for x in (q, k))
        mask = None if mask is None else _block_of_mask(mask, q)
        axis = self.mesh.axis_name(0)
        is_exchanged = causal and rows == keys and wants_balance(self.mesh, axis, rows, q, k, v, self.balanced)
        out = self._run(*(x.to_local() for x in (q, k, v)), mask, rows, keys, causal, scale, is_exchanged)
        return DTensor.from_local(out, q.device_mesh, q.placements, shape=(*q.shape[:3], v.shape[3]))

    def _shares_out(self, q: DTensor, k: DTensor) -> bool:
        """Whether this axis alone shards the sequence, and others at most the batch, and heads with all that is theirs.
        """
        spec, axis = q._spec, self.mesh.axis_name(0)
        if axis not in spec.mesh.axis_names or spec.mesh[axis] != self.mesh or spec.partial or spec.dims[3]:
            return False
        ranks = prod(spec.mesh.shape[a] for a in spec.dims[1])
        whole_heads = spec.units[1] == 1 and (q.shape[1] == k.shape[1] or k.shape[1] % ranks == 0)
        return spec.dims[2] == (spec.mesh.axis(axis),) and spec.units[2] == 1 and (ranks == 1 or whole_heads)


    @staticmethod
    def _heads_of_ranks(q: DTensor) -> list[int]:
        """How many heads of queries ranks have, where other axes share them out."""
        spec = q._spec
        return lengths(q.shape[1], spec.units[1], tuple(spec.mesh.shape[a] for a in spec.dims[1]))


# ---- masks ------------------------------------------------------------------------------------


def _kind_of_mask(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, keys: int) -> str | None:
    """Whether the last dim of a mask is all keys, or those of this rank."""
    if mask is None:
        return None
    if mask.requires_grad:
        raise NotImplementedError("context_parallel: the mask requires a gradient, which ring attention has not")
    if mask.shape[-1] == keys:
        return "rows"
    if mask.shape[-1] == k.shape[2] and (mask.ndim < 2 or mask.shape[-2] == 1):
        return "keys"
    raise ValueError(
        f"context_parallel: a mask of {list(mask.shape)} for {q.shape[2]} rows and {k.shape[2]} keys here of {keys} in "
        f"all; give one of the keys here, [b, h, 1, {k.shape[2]}], or of all, [b, h, {q.shape[2]}, {keys}]"
    )


def _block_of_mask(mask: torch.Tensor, q: DTensor) -> torch.Tensor:
    """The mask of this rank's rows and heads, and of all keys."""
    mask, mesh = mask[(None,) * (4 - mask.ndim)], q.device_mesh
    if not isinstance(mask, DTensor):
        mask = DTensor.from_local(mask, mesh)
    placements = [p if p.is_shard() and mask.shape[p.dim] == q.shape[p.dim] else REPLICATE for p in q.placements]
    return mask.redistribute(placements=placements).to_local()
