"""Experts in a compiled step, whose tensors are global: groups of tokens become groups of experts by one all-to-all.

    slots [groups@ep, experts, capacity, d]  ->  [groups, experts@ep, capacity, d]  ->  experts  ->  and back

There is a group of tokens for each rank of the axis, so tokens that are sharded over it stay where they are until
then. Each expert has `capacity` slots for each group; without a capacity as many as a group has tokens, which is the
most that can come, so nothing is dropped. No size depends on data.

GShard's formulation (arXiv:2006.16668), with indices for its products with one-hot tensors. What it says is what
`Dropless` and `Capacity` do with the tokens of a rank. The experts are computed in one batch of products, so the layer
has to have transformers' usual weights.
"""

from __future__ import annotations

from math import ceil

import torch
import torch.nn.functional as F
from torch import nn

from spmd.mesh import DeviceMesh
from spmd.tensor.eager.constrain import constrain
from spmd.tensor.placement import Shard


def whole_experts(
    module: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mesh: DeviceMesh,
    factor: float | None,
) -> torch.Tensor:  # fmt: skip
    """[tokens, d], [tokens, k], [tokens, k] -> [tokens, d], of a layer's experts. factor: as of `ExpertParallel`."""
    groups, axis, (tokens, k) = mesh.size(), mesh.axis_name(0), index.shape
    experts, size = module.gate_up_proj.shape[0], -(-tokens // groups)
    if tokens % groups:  # groups are as torch.chunk cuts the tokens; those that are added are for no expert
        index = F.pad(index, (0, 0, 0, groups * size - tokens), value=experts)
        x, weights = (F.pad(y, (0, 0, 0, groups * size - tokens)) for y in (x, weights))
    capacity = size if factor is None else ceil(factor * size * k / experts)
    slot, fits = _slots(index.reshape(groups, size * k), experts, capacity)  # [g, s k]
    x = constrain(x.reshape(groups, size, -1), {axis: Shard(0)})
    rows = x.unsqueeze(2).expand(-1, -1, k, -1).reshape(groups, size * k, -1)
    at = slot.unsqueeze(-1).expand(-1, -1, rows.shape[-1])
    slots = rows.new_zeros(groups, experts * capacity + 1, rows.shape[-1]).scatter_add(1, at, rows)
    slots = slots[:, :-1].reshape(groups, experts, capacity, -1)
    came = constrain(slots, {axis: Shard(1)})  # [g, e@ep, c, d]
    y = _computed(module, came.transpose(0, 1).flatten(1, 2)).unflatten(1, (groups, capacity)).transpose(0, 1)
    back = constrain(constrain(y, {axis: Shard(1)}), {axis: Shard(0)}).flatten(1, 2)  # [g@ep, e c, d]
    found = back.gather(1, at.clamp(max=experts * capacity - 1))
    shares = (weights.reshape(groups, size * k) * fits).unsqueeze(-1)
    return (found * shares).unflatten(1, (size, k)).sum(2).flatten(0, 1)[:tokens].to(x.dtype)


def _slots(index: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each entry of [groups, entries], and whether it has one; others get the slot behind the last."""
    chosen = (index.unsqueeze(-1) == torch.arange(experts, device=index.device)).to(torch.int64)  # [g, s k, e]
    place = ((chosen.cumsum(1) - 1) * chosen).sum(-1)
    fits = (place < capacity) & (index < experts)
    return torch.where(fits, index * capacity + place, experts * capacity), fits


def _computed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[experts, tokens, d], by each expert its own."""
    gate, up = (x @ module.gate_up_proj.mT).chunk(2, -1)
    return (module.act_fn(gate) * up) @ module.down_proj.mT


def has_usual_weights(module: nn.Module) -> bool:
    """Whether the layer's weights are gate_up_proj [experts, 2 f, d] and down_proj [experts, d, f], and no others."""
    named = dict(module.named_parameters(recurse=False))
    if named.keys() != {"gate_up_proj", "down_proj"} or not callable(getattr(module, "act_fn", None)):
        return False
    (e, f2, d), down = named["gate_up_proj"].shape, named["down_proj"].shape
    return f2 % 2 == 0 and tuple(down) == (e, d, f2 // 2)
