"""Attention and experts for `counted.py`: what one layer of each sends forward and backward, by formula and counted.

Attention is of a batch of 2, 4 heads of queries and 2 of keys, 16 positions, on 4 ranks, causal. Experts are 8, of
which each of 32 tokens has 2, spread evenly; with a capacity for as many tokens as that is. Both are asked for the
gradients of all that they are given. What is counted are the bytes that a rank hands to collectives: of a gather its
own part, of an all-to-all what is for others and for itself, of a permutation its block.
"""

from __future__ import annotations

from math import ceil

import torch
import torch.nn.functional as F
from layer_kinds import Experts

import spmd
from spmd import LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.debug import CommDebugMode
from spmd.mesh import current_rank, per_rank
from spmd.parallel import ExpertParallel, context_parallel, parallelize_module

RANKS, ITEM = 4, 4
BATCH, HEADS, FEW, TIME, SIZE = 2, 4, 2, 16, 8
EXPERTS, TOKENS, EACH, WIDTH = 8, 32, 2, 8
METHODS = {
    "ring": "ring", "ring, balanced": "ring", "ring, pass-Q": "ring_q", "ring, gathered": "allgather",
    "Ulysses": "heads",
}  # fmt: skip
FACTORS = {"GShard": 1.0, "dropless": None}
PARTS = (*METHODS, *FACTORS)


def formula(plan: str) -> dict[str, tuple[int, int]]:
    if plan in FACTORS:
        return _formula_of_experts(FACTORS[plan])
    n, q, kv = RANKS, BATCH * HEADS * TIME * SIZE * ITEM, 2 * BATCH * FEW * TIME * SIZE * ITEM  # bytes of all ranks
    sums, every = BATCH * HEADS * TIME * ITEM, 2 * BATCH * max(FEW, n) * TIME * SIZE * ITEM  # a head for each rank
    return {
        "ring": {"all_to_all": (3 * (n - 1), 3 * kv * (n - 1) // n)},
        "ring, balanced": {"all_to_all": (3 * (n - 1) + 4, 3 * kv * (n - 1) // n + 2 * (2 * q + kv) // n)},
        "ring, pass-Q": {"all_to_all": (4 * (n - 1), (6 * q + 2 * sums) * (n - 1) // n)},
        "ring, gathered": {"all_gather": (2, 2 * kv // n), "reduce_scatter": (1, kv)},
        "Ulysses": {"all_to_all": (8, 2 * (2 * q + every) // n)},
    }[plan]


def _formula_of_experts(factor: float | None) -> dict[str, tuple[int, int]]:
    """Slots, or tokens and before them counts, which are numbers of 8 bytes."""
    own = TOKENS // RANKS
    if factor is None:
        return {"all_to_all": (1 + 4, EXPERTS * 8 + 4 * own * EACH * WIDTH * ITEM)}
    return {"all_to_all": (4, 4 * EXPERTS * ceil(factor * own * EACH / EXPERTS) * WIDTH * ITEM)}


def sent(plan: str, compiled: bool) -> list[tuple[str, int]]:
    """The collectives of one rank, of a layer forward and backward: kinds and bytes."""
    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("a",))
        run = _attention(mesh, plan, compiled) if plan in METHODS else _experts(mesh, FACTORS[plan], compiled)
        run()
        with CommDebugMode() as comm:
            run()
    return [(each.kind.removesuffix("_single"), each.nbytes) for each in comm.counted]


def _gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.sum(), leaves)


def _attention(mesh, plan: str, compiled: bool):
    given = [torch.randn(BATCH, n, TIME, SIZE) for n in (HEADS, FEW, FEW)]

    def layer(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with context_parallel(mesh, method=METHODS[plan], balanced=plan == "ring, balanced"):
            return _gradients(F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True), leaves)

    if compiled:
        step = spmd.compile(layer, mesh, inputs={name: {"a": Shard(2)} for name in "qkv"})
        return lambda: step(*given)
    placed = [distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None) for x in given]
    return lambda: layer(*placed)


@per_rank
def _own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(RANKS)[current_rank()].clone()


def _experts(mesh, factor: float | None, compiled: bool):
    style = ExpertParallel(capacity_factor=factor, padded=factor is not None)
    net = parallelize_module(Experts(EXPERTS, WIDTH), mesh, style)
    index = torch.arange(TOKENS * EACH).view(TOKENS, EACH) % EXPERTS
    given = torch.randn(TOKENS, WIDTH), index, torch.ones(TOKENS, EACH)

    def layer(net, x, index, weights):
        x = x.detach().requires_grad_()
        net(x, index, weights).sum().backward()
        return x.grad

    if compiled:
        step = spmd.compile(layer, mesh, inputs={name: {"a": Shard(0)} for name in ("x", "index", "weights")})
        return lambda: step(net, *given)
    own = [_own(x) for x in given]
    return lambda: layer(net, *own)
