"""Dropless experts in a compiled step: what is sent is what is there, as eagerly, though no size of the program is.

    arrived_rows     tokens, experts of each       ->  what came, [ranks, rows, 2 f], through the first weights
    (act_fn)         ops of the program            ->  [ranks, rows, f]
    returned_rows    through the second weights    ->  home, and for each token the weighted sum

Buffers are as long as what can come at most, and behind the rows that came they are zero. How many these are is read by
the exchange (`spmd.comm.rows`) and by the products, which take their time for these rows alone. Sizes come with one
small exchange of counts, and are kept for the way back and for the backward.

Both are functions of blocks (`local_map`), open on the axes that the experts are not on: what shares out the tokens
there shares out the buffers, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from spmd.comm import all_to_all_single, wait
from spmd.comm.chunk import lengths
from spmd.comm.rows import exchange_rows
from spmd.mesh import DeviceMesh, current_mesh
from spmd.parallel.experts.dispatch import combined
from spmd.parallel.experts.products import product_by_expert
from spmd.tensor.annotations.block_function import BlockFunction, OpenBlockFunction, current_tracer
from spmd.tensor.placement import REPLICATE, Partial, Placement, Shard
from spmd.tensor.spec import Spec


def ragged_experts(
    module: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mesh: DeviceMesh, axis: str
) -> torch.Tensor:
    """[tokens, d], [tokens, k], [tokens, k] -> [tokens, d], of a layer's experts, which are on an axis of the mesh."""
    tokens, k = map(int, index.shape)
    ranks, experts = mesh.size(mesh.axis(axis)), module.gate_up_proj.shape[0]
    rows = -(-tokens // mesh.size()) * mesh.size() * k  # so that whichever axes share out the tokens divide it
    places = torch.zeros(ranks, mesh.size() // ranks, 0, device=x.device)
    call = current_tracer()
    of_blocks = x, index, module.gate_up_proj, places, axis, experts, rows
    h, sizes = call(_function(arrived_rows, mesh, axis), of_blocks, {})
    gate, up = h.chunk(2, -1)
    y = module.act_fn(gate) * up
    return call(_function(returned_rows, mesh, axis), (y, sizes, index, weights, module.down_proj, axis), {})


# ---- of blocks --------------------------------------------------------------------------------


def arrived_rows(
    x: torch.Tensor, index: torch.Tensor, up: torch.Tensor, places: torch.Tensor, axis: str, experts: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What came for this rank's experts, times their first weights, and the sizes.

    x: [own tokens, d]. index: [own tokens, k]. up: [own experts, f, d]. places: [1, m, 0], of all ranks of the other
    axes those that have this rank's tokens. rows: of the buffers of all of them. Returns [1, own part of rows, f], and
    [1, m, 2 + experts of a rank, ranks]: how many rows go to each rank, how many come from it, and of these how many
    for each expert.
    """
    mesh = current_mesh()
    ranks, m = mesh.size(mesh.axis(axis)), places.shape[1]
    own_rows = rows // (mesh.size() // ranks // m)
    sizes = _sizes(index, lengths(experts, 1, (ranks,)), up.shape[0], (mesh, axis))
    sent = x.index_select(0, _order(index) // index.shape[1])
    came = exchange_rows(sent, sizes[:2], own_rows, (mesh, axis))
    counts = sizes[2 : 2 + len(up)]
    h = product_by_expert(came.index_select(0, _by_expert(counts, came)), up.mT, counts.sum(1))
    return h.unsqueeze(0), sizes.expand(1, m, *sizes.shape)


def returned_rows(
    y: torch.Tensor, sizes: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, down: torch.Tensor, axis: str
) -> torch.Tensor:
    """Rows times their experts' second weights, back where they came from: [own tokens, d].

    y: [1, own part of rows, f]. sizes: as from `arrived_rows`. index, weights: [own tokens, k]. down: [own experts, d,
    f].
    """
    y, sizes = y.squeeze(0), sizes[0, 0]
    counts = sizes[2 : 2 + len(down)]
    out = product_by_expert(y, down.mT, counts.sum(1)).index_select(0, _by_expert(counts, y).argsort())
    home = exchange_rows(out, sizes[:2].flip(0), index.numel(), (current_mesh(), axis))
    return combined(home, _order(index), weights)


def _order(index: torch.Tensor) -> torch.Tensor:
    """The places in the flat index of what is sent, by expert; those of no expert are the last."""
    return index.flatten().argsort(stable=True)


def _sizes(index: torch.Tensor, have: Sequence[int], own: int, group: tuple[DeviceMesh, str]) -> torch.Tensor:
    """As from `arrived_rows`, in host memory. have: how many experts each rank has. own: how many this one."""
    flat, experts, ranks = index.flatten(), sum(have), len(have)
    counts = flat.new_zeros(experts + 1).index_add(0, flat, torch.ones_like(flat))[:experts]
    came = wait(all_to_all_single(counts, [own] * ranks, list(have), group)).view(ranks, own)
    to_each = torch.stack([part.sum() for part in counts.split(list(have))])
    more = came.new_zeros(max(have) - own, ranks)
    return torch.cat([to_each.unsqueeze(0), came.sum(1).unsqueeze(0), came.T, more]).cpu()


def _by_expert(counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The places of the rows, which came rank by rank, by expert; those of no expert are the last.

    counts: [own experts, ranks]. rows: the buffer.
    """
    own, ranks = counts.shape
    ends = counts.T.flatten().cumsum(0).to(rows.device)
    part = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    return torch.where(part < own * ranks, part % max(own, 1), own).argsort(stable=True)


# ---- where tensors lie --------------------------------------------------------------------------


def _function(fn, mesh: DeviceMesh, axis: str) -> OpenBlockFunction:
    """The function, open on the other axes: there tokens are as its first operand has them."""
    place = mesh.axis(axis)

    def settled(specs: Sequence[Spec]) -> BlockFunction:
        sharing = set(specs[0].dims[0 if fn is arrived_rows else 1]) - {place}
        return BlockFunction(fn, *_placements(fn, mesh.ndim, place, sharing), None, True)

    return OpenBlockFunction(fn, *_placements(fn, mesh.ndim, place, set()), settled)


def _placements(fn, axes: int, place: int, sharing: set[int]) -> tuple[tuple, tuple, tuple]:
    """Of the results, of the arguments and of their gradients. sharing: the other axes that share out the tokens."""

    def placed(on_place: Placement, on_sharing: Placement) -> tuple[Placement, ...]:
        return tuple(on_place if a == place else on_sharing if a in sharing else REPLICATE for a in range(axes))

    tokens, rows = placed(Shard(0), Shard(0)), placed(Shard(0), Shard(1))
    experts, of_experts = placed(Shard(0), REPLICATE), placed(Shard(0), Partial())
    if fn is arrived_rows:
        rest = (None,) * 3
        return (rows, rows), (tokens, tokens, experts, rows, *rest), (tokens, None, of_experts, None, *rest)
    ins = (rows, rows, tokens, tokens, experts, None)
    return (tokens,), ins, (rows, None, None, tokens, of_experts, None)
