"""Gradients of the ops of networks where some ranks have nothing: every rank calls the same collectives.

A batch of one image is often sharded by the op itself: over the axes that shard its pixels, or the weight. The results
and gradients of each function here are compared with one device, for random placements of operands and cotangents.
Ranks that call different collectives are an error of the simulated network.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from workers import Pool

from spmd.sim import run_ranks
from spmd.tensor.placement import Shard
from tests.tensor.single import S0, S1, R, cut, leaf, mesh_of

Placing = list


def x(*shape: int) -> torch.Tensor:
    """Numbers of this shape, all different."""
    n = torch.Size(shape).numel()
    return (torch.arange(1.0, n + 1, dtype=torch.float64).view(shape) * 0.7).sin().requires_grad_()


FUNCTIONS: dict[str, tuple[Callable, list[torch.Tensor]]] = {
    "conv_transpose1d": (F.conv_transpose1d, [x(1, 3, 6), x(3, 5, 2), x(5)]),
    "conv_transpose2d": (F.conv_transpose2d, [x(1, 3, 6, 6), x(3, 3, 2, 2), x(3)]),
    "conv_transpose3d": (F.conv_transpose3d, [x(1, 3, 4, 4, 4), x(3, 3, 2, 2, 2), x(3)]),
    "conv2d": (F.conv2d, [x(1, 3, 6, 6), x(3, 3, 2, 2), x(3)]),
    "conv2d of groups": (lambda a, w, b: F.conv2d(a, w, b, groups=3), [x(1, 3, 4, 4), x(3, 1, 2, 2), x(3)]),
    "batch_norm": (lambda a, w, b: F.batch_norm(a, None, None, w, b, True), [x(3, 3, 2, 2), x(3), x(3)]),
    "group_norm": (lambda a, w, b: F.group_norm(a, 3, w, b), [x(1, 6, 2, 2), x(6), x(6)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (3,), w, b), [x(1, 5, 3), x(3), x(3)]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (3,), w, 1e-5), [x(1, 5, 3), x(3)]),
    "attention": (F.scaled_dot_product_attention, [x(1, 3, 5, 2), x(1, 3, 5, 2), x(1, 3, 5, 2)]),
    "linear": (F.linear, [x(1, 3, 3), x(5, 3), x(5)]),
    "bilinear": (F.bilinear, [x(3, 2), x(3, 3), x(5, 2, 3), x(5)]),
    "max_pool2d": (lambda a: F.max_pool2d(a, 2), [x(1, 3, 4, 4)]),
    "adaptive_avg_pool2d": (lambda a: F.adaptive_avg_pool2d(a, 3), [x(1, 3, 4, 4)]),
    "interpolate": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), [x(1, 3, 4, 4)]),
    "grid_sample": (lambda a, g: F.grid_sample(a, g, align_corners=False), [x(1, 3, 4, 4), x(1, 3, 3, 2)]),
    "lstm_cell": (
        lambda a, h, c, w, u, b: torch.lstm_cell(a, (h, c), w, u, b, b)[1],
        [x(1, 3), x(1, 2), x(1, 2), x(8, 3), x(8, 2), x(8)],
    ),
}

SAID = [
    ("conv_transpose2d", (2, 2), [[R, Shard(3)], [S0, S1], [R, R]], [S1, S1]),
    ("conv_transpose2d", (2, 2), [[Shard(3), R], [Shard(3), R], [R, S0]], [S0, S1]),
    ("conv_transpose3d", (2, 2), [[R, Shard(2)], [Shard(2), Shard(4)], [R, S0]], [S1, Shard(2)]),
]
"""Cases that once were a hang: a rank without images reduced a bias gradient of the global size."""


def random_cases(name: str, n: int) -> list[tuple]:
    rng, (fn, operands) = random.Random(name), FUNCTIONS[name]
    out = fn(*operands)

    def placing(t: torch.Tensor, axes: int) -> Placing:
        return [rng.choice([R, *map(Shard, range(t.ndim))]) for _ in range(axes)]

    meshes = [rng.choice([(2, 2), (4,)]) for _ in range(n)]
    return [(name, m, [placing(t, len(m)) for t in operands], placing(out, len(m))) for m in meshes]


def unlike_one_device(rank: int, cases: list[tuple]) -> list[str]:
    """The cases in which some result or gradient is not that of one device."""
    wrong = []
    for name, mesh_shape, placings, placing in cases:
        fn, operands = FUNCTIONS[name]
        mesh, plain = mesh_of(mesh_shape), [t.detach().requires_grad_() for t in operands]
        want = fn(*plain)
        cotangent = x(*want.shape).detach()
        given = [leaf(cut(t, p, mesh_shape), p, t, mesh) for t, p in zip(plain, placings, strict=True)]
        out = fn(*given)
        got = torch.autograd.grad(out, given, leaf(cut(cotangent, placing, mesh_shape), placing, cotangent, mesh))
        right = [want, *torch.autograd.grad(want, plain, cotangent)]
        if not all(a.full_tensor().allclose(b) for a, b in zip([out, *got], right, strict=True)):
            wrong.append(f"{name} on {mesh_shape}: {placings}, {placing}")
    return wrong


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranks_without_a_block_take_part(name):
    cases = [case for case in SAID if case[0] == name] + random_cases(name, 4)
    assert run_ranks(lambda rank: unlike_one_device(rank, cases), 4) == [[]] * 4


def test_so_it_is_on_gloo(gloo4: Pool):
    cases = SAID + [case for name in ("conv_transpose1d", "conv2d", "group_norm") for case in random_cases(name, 1)]
    assert gloo4.run(unlike_one_device, cases) == [[]] * 4
