"""What steps compute of the value of a tensor with `math` is what one device has."""

from __future__ import annotations

import math

import pytest
import torch

import spmd
from spmd import LocalTensorMode, Shard
from spmd._torch.symbolic_math import NAMES
from tests.expand.call_by_call import outcome

NUMBERS = {
    "a perplexity": lambda x: math.exp(x.item()),
    "a PSNR": lambda x: round(-10 * math.log10(x.item()), 2),
    "of a tensor": lambda x: math.sqrt(x),
    "of several": lambda x: math.log(x.item(), 2) + math.hypot(x.item(), 1) + math.pow(2, x.item()),
    "of a count": lambda x: math.log1p((x > 0).sum().item()),
    "at least one": lambda x: x.sum() / max((x > 0.5).sum().item(), 1) + min(x.item(), 0.25, (x > 2).sum().item()),
    "of a tensor whose value is known": lambda x: [0.0] * int(math.sqrt(torch.tensor(9.0))),
    "back into a tensor": lambda x: x * math.tanh(x.item()),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_that_of_one_device(name):
    """The mean of a sharded batch, in two calls: the second runs the program that the first has made."""

    def step(x):
        return NUMBERS[name](x.mean())

    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}})
        for seed in (0, 1):
            x = torch.rand(8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            got, want = compiled(x), step(x)
            if isinstance(want, torch.Tensor):
                got, want = got.full_tensor().reconcile().item(), want.item()
            assert type(got) is type(want) and got == pytest.approx(want, rel=1e-14)  # of a mean of blocks
    assert math.exp.__module__ == "math" and not hasattr(math.exp, "__wrapped__")


def test_a_function_of_numbers_is_the_same_of_symbols():
    """Each of a number of the state, and of what is read of a tensor, at numbers where it is defined."""
    inside = {"acosh": (1.5,), "atan2": (0.3, -0.4), "hypot": (3.0, 4.0), "pow": (2.5, 0.5), "fmod": (7.5, -2.0)}
    inside |= {"copysign": (3.0, -0.0)}

    def step(x, k):
        numbers = {name: inside.get(name, (0.3,)) for name in NAMES}
        return [
            {name: getattr(math, name)(y * each[0], *each[1:]) for name, each in numbers.items()}
            for y in (k, x.sum().item())
        ]  # fmt: skip

    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        compiled = spmd.compile(step, mesh)
        for k in (1.0, 1.0 + 2**-30):
            x = torch.tensor([k], dtype=torch.float64)
            assert compiled(x, k) == step(x, k)


def test_where_math_raises_the_step_or_its_program_does():
    def step(x, k):
        return math.exp(x.sum().item()), math.exp(k), math.log(k)

    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        compiled = spmd.compile(step, mesh)
        for x, k in ((1.0, 2.0), (800.0, 2.0), (1.0, 800.0), (1.0, -2.0), (1.0, 3.0), (0.5, 0.25)):
            got, want = (outcome(fn, torch.tensor([x]), k) for fn in (compiled, step))
            assert got == want
