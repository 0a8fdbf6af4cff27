"""Complex numbers of Python in a step: autograd conjugates them, and a trace is given them as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.side_by_side import seeded
from tests.tensor.single import every_rank

Z = 1 + 2j

FUNCTIONS = {
    "a product": lambda x: x * Z,
    "a quotient": lambda x: x / Z,
    "a number divided": lambda x: Z / (x + 9),
    "a product in place": lambda x: (x * Z).mul_(Z),
    "a power": lambda x: (x.abs() + 1) ** Z,
    "a scaled difference": lambda x: torch.sub(x * Z, x * x, alpha=Z),
    "a scaled product added": lambda x: torch.addcmul(x * Z, x * Z, x * Z, value=Z),
    "an interpolation": lambda x: torch.lerp(x * Z, x * x * Z, Z),
    "a view as real numbers": lambda x: torch.view_as_real(x * Z).sum(-1) * Z,
}


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(5, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_complex_number_gives_what_it_gives_on_one_device(name, dtype):
    """The loss and the gradient, of an uneven shard."""

    def step(model):
        loss = FUNCTIONS[name](model.x).abs().sum()
        loss.backward()
        return loss.detach()

    one = seeded(lambda: Weight(dtype))
    wanted = step(one), one.x.grad
    with LocalTensorMode(2):
        model = seeded(lambda: Weight(dtype))
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        loss = spmd.compile(step, mesh, params={"x": {"dp": Shard(0)}})(model)
        for found, want in zip((loss, model.x.grad), wanted, strict=True):
            for block in every_rank(found.full_tensor()):
                torch.testing.assert_close(block, want, rtol=1e-12 if dtype is torch.float64 else 1e-5, atol=0)
