"""The loss that keeps experts equally busy, of the tokens of all ranks.

    experts * sum over experts of (part of the tokens that it gets) * (its mean probability)

A mean of the ranks' own losses is another number: the product of two means is no mean of products. DTensors of logits
need no function of their own; transformers' is right on them.

W. Fedus et al., Switch Transformer, arXiv:2101.03961, equations 4 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.comm import all_reduce, transport, wait
from spmd.mesh import DeviceMesh


def load_balancing_loss(
    gate_logits: torch.Tensor | Sequence[torch.Tensor],
    num_experts: int,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
    *,
    mesh: DeviceMesh,
) -> torch.Tensor:
    """The load-balancing loss of all tokens on a mesh, whatever its axes; the same number on all ranks.

    Arguments and numbers are those of transformers' `load_balancing_loss_func` of all ranks' tokens together.
    gate_logits: of each layer, [own tokens, experts]. attention_mask: [batch, time] of this rank, zero for padding. The
    gradient is that of the sum of all ranks' results, so averages over ranks, as `data_parallel` and `fully_shard` make
    them, are the gradient of the loss. One all-reduce of 2 * experts + 1 numbers is sent.

    >>> load_balancing_loss(torch.zeros(4, 2), 2, 1, mesh=DeviceMesh("cpu", [0]))
    tensor(1.)
    """
    layers = [gate_logits] if isinstance(gate_logits, torch.Tensor) else gate_logits
    sums = torch.stack([_sums(x, num_experts, top_k, attention_mask) for x in layers]).sum(0)
    if mesh.size() > 1:
        sums = wait(all_reduce(sums, "sum", transport().group(mesh, tuple(range(mesh.ndim)))))
    taken, probability, tokens = sums[:num_experts], sums[num_experts:-1], sums[-1]
    return num_experts * (taken.detach() / tokens * (probability / tokens)).sum()


def _sums(logits: torch.Tensor, experts: int, top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """[2 * experts + 1]: how often each expert is taken, the sum of its probabilities, and the number of tokens."""
    logits = logits.to(torch.float64 if logits.dtype is torch.float64 else torch.float32)
    counts = logits.new_ones(len(logits)) if mask is None else mask.flatten().to(logits.dtype)
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(top_k, -1).indices
    taken = logits.new_zeros(experts).index_add(0, chosen.flatten(), counts.repeat_interleave(top_k))
    return torch.cat([taken, (probabilities * counts.unsqueeze(1)).sum(0), counts.sum().unsqueeze(0)])
