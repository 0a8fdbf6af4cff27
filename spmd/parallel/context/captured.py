"""Context parallel attention in a compiled step, whose tensors are global, with positions in order.

    ring, ring_q, allgather     a function of blocks: its rounds are those of the eager ring, launched in its order
    heads                       constraints: heads over the axis before the attention, and positions again behind it;
                                of grouped heads a function of blocks, which repeats keys and values where it has to

The function of blocks is open on the other axes (`OpenBlockFunction`): there the batch and the heads stay as the
queries have them, which is known when the step is expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from spmd.comm.chunk import lengths
from spmd.mesh import DeviceMesh, current_mesh
from spmd.parallel.context.balance import balanced_attention, wants_balance
from spmd.parallel.context.heads import attention_by_heads, check_heads
from spmd.parallel.context.layout import in_order
from spmd.parallel.context.ring import Ring, RingAttention, added_mask
from spmd.tensor.annotations.block_function import BlockFunction, OpenBlockFunction, Placements, current_tracer
from spmd.tensor.annotations.constraint import capturing
from spmd.tensor.eager.constrain import constrain
from spmd.tensor.placement import REPLICATE, Shard
from spmd.tensor.spec import Spec

Shape = Sequence[int]


def captured_attention(
    mesh: DeviceMesh, method: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    causal: bool, scale: float, balanced: bool | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of all rows to all keys, whose positions the ranks of `mesh` share out by `method`.

    balanced: as of `context_parallel`.
    """
    axis, whole = mesh.axis_name(0), capturing().mesh
    if axis not in whole.axis_names or whole[axis] != mesh:
        raise ValueError(f"context_parallel: {mesh!r} is no axis of {whole!r}, which the step is compiled for")
    if method == "heads" and q.shape[1] == k.shape[1]:
        return _by_heads(axis, mesh.size(), q, k, v, mask, causal, scale)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"context_parallel: causal attention of {q.shape[2]} rows to {k.shape[2]} keys; both have to be of the "
            "same sequence"
        )
    mask = mask if mask is None else mask[(None,) * (4 - mask.ndim)]
    sizes = int(q.shape[2]), int(k.shape[2])
    fn = _function(whole, axis, q.shape, None if mask is None else mask.shape)
    in_rows = in_order(lengths(sizes[0], 1, (mesh.size(),)))
    is_balanced = causal and method != "heads" and wants_balance(whole, axis, in_rows, q, k, v, balanced)
    return current_tracer()(fn, (q, k, v, mask, axis, method, *sizes, causal, scale, is_balanced), {})


# ---- by heads -----------------------------------------------------------------------------------


def _by_heads(axis: str, n: int, q, k, v, mask, causal: bool, scale: float) -> torch.Tensor:
    check_heads(q.shape[1], n)
    q, k, v = (_placed(_placed(x, axis, 2), axis, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    return _placed(out, axis, 2)


def _placed(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    return constrain(x, dict.fromkeys(capturing().mesh.axis_names) | {axis: Shard(dim)})


# ---- of blocks ----------------------------------------------------------------------------------


def attention_of_blocks(
    q, k, v, mask, axis: str, method: str, rows: int, keys: int, causal: bool, scale: float, is_balanced: bool
):
    """Attention of this rank's rows, of so many rows and keys of all ranks. mask: of these rows, and of all keys."""
    mesh = current_mesh()
    parts = (in_order(lengths(n, 1, (mesh.size(mesh.axis(axis)),))) for n in (rows, keys))
    mask = mask if mask is None else added_mask(mask, q, "rows")
    ring = Ring(mesh, axis, method, *parts, causal, scale, None if mask is None else "rows")
    if is_balanced:
        return balanced_attention(q, k, v, ring)
    return attention_by_heads(q, k, v, mask, ring) if method == "heads" else RingAttention.apply(q, k, v, mask, ring)


def _function(mesh: DeviceMesh, axis: str, q: Shape, mask: Shape | None) -> OpenBlockFunction:
    rows = tuple(Shard(2) if name == axis else REPLICATE for name in mesh.axis_names)

    def settled(specs: Sequence[Spec]) -> BlockFunction:
        outs, ins = _placements(_of_rows(*specs[:2], axis), q, mask)
        return BlockFunction(attention_of_blocks, outs, ins, ins, None, True)

    outs, ins = _placements(rows, q, mask)
    return OpenBlockFunction(attention_of_blocks, outs, ins, ins, settled)


def _of_rows(q: Spec, k: Spec, axis: str) -> Placements:
    """The placements of the queries: batch and heads as they lie, where keys and values can lie alike."""
    ranks = prod(q.mesh.shape[a] for a in q.dims[1])
    dims = (0, 1) if q.shape[1] == k.shape[1] or k.shape[1] % ranks == 0 else (0,)
    kept = {a: Shard(dim) for dim in dims for a in q.dims[dim]}
    return tuple(Shard(2) if name == axis else kept.get(a, REPLICATE) for a, name in enumerate(q.mesh.axis_names))


def _placements(rows: Placements, q: Shape, mask: Shape | None) -> tuple[tuple, tuple]:
    """The placements of the result, and of the arguments of `attention_of_blocks`: a mask has those dims of the queries
    that it has not broadcast, and all keys."""
    of_mask = mask and tuple(p if isinstance(p, Shard) and mask[p.dim] == q[p.dim] else REPLICATE for p in rows)
    return (rows,), (rows, rows, rows, of_mask, *[None] * 7)
