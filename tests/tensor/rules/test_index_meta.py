"""Shapes and strides of `x[indices]` are those that torch's kernel gives."""

from __future__ import annotations

import random

import torch

from spmd.tensor.rules.index_meta import index_result
from tests.tensor.single import S0, S1, SUM, R, agree


def turned(rng: random.Random, shape: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros of the shape, with the dims in a random order in memory."""
    order = rng.sample(range(len(shape)), len(shape))
    return torch.zeros([shape[d] for d in order], dtype=dtype).permute([order.index(d) for d in range(len(shape))])


def drawn(rng: random.Random) -> tuple[torch.Tensor, list]:
    """A tensor with random order of dims, sometimes sliced or expanded, and indices of any shape along some dims."""
    x = turned(rng, [rng.choice([1, 2, 3, 4, 0][: 4 + (rng.random() < 0.2)]) for _ in range(rng.randint(1, 4))])
    x = x[..., ::2] if rng.random() < 0.2 else x
    x = x[:1].expand(3, *x.shape[1:]) if rng.random() < 0.1 and x.shape[0] else x
    shape = [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 3))]
    at = rng.sample(range(x.ndim), rng.randint(1, x.ndim))

    def index() -> torch.Tensor:
        return turned(rng, [rng.choice([n, n, n, 1]) for n in shape[rng.randint(0, len(shape)) :]], torch.int64)

    return x, [index() if d in at else None for d in range(x.ndim)]


def test_they_are_those_of_the_kernel():
    rng, asked = random.Random(0), 0
    while asked < 2000:
        x, indices = drawn(rng)
        try:
            want = torch.ops.aten.index.Tensor(x, indices)
        except IndexError:  # the dim is empty, so no index is valid
            continue
        got = index_result(x.to("meta"), [i if i is None else i.to("meta") for i in indices])
        assert (got.shape, got.stride, got.dtype) == (tuple(want.shape), want.stride(), want.dtype), (x.shape, indices)
        asked += 1


def test_what_is_taken_of_a_turned_tensor_lies_as_on_one_device():
    """A view of the result needs its strides, and an index of one element is broadcast with a longer one."""
    x, i, one = torch.randn(4, 6, dtype=torch.float64), torch.tensor([2, 0, 1]), torch.tensor(1)
    placings = [[S0, R], [R, R], [R, R]], [[S1, S0], [S0, R], [R, R]], [[SUM, S0], [R, S0], [R, R]]

    def fn(x, i, one):
        y = x.t().unsqueeze(0)[:, i]
        return y, y.view(-1), torch.tensor(y.stride()), torch.ops.aten.index.Tensor(x, [i, one])

    agree(fn, [x, i, one], *placings)
