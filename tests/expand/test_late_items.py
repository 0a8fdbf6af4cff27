"""Numbers that a step only hands out are read at its end, by one reduction for all."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import Shard
from spmd.sim import run_ranks

MESH = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))


def program(fn, *args, **inputs):
    step = spmd.compile(fn, MESH, inputs={name: {"dp": Shard(0)} for name in inputs})
    return step.program_for(*args, *inputs.values())


def names(made) -> list[str]:
    return [str(n.target) for n in made.graph.nodes if n.op == "call_function"]


def sums_of_parts(model, optimizer, x):
    optimizer.zero_grad()
    total, seen = 0.0, []
    for part in x.chunk(6):
        loss = model(part).square().sum()
        loss.backward()
        total += loss.item()
        seen.append(loss.item() * 2)
    optimizer.step()
    return total / 6, seen


def test_the_numbers_of_micro_batches_share_the_reduction_of_gradients():
    model, x = nn.Linear(3, 2), torch.randn(24, 3)
    made = program(sums_of_parts, model, torch.optim.SGD(model.parameters(), lr=0.1), x=x)
    assert [c.kind for c in made.collectives] == ["all_to_all", "all_reduce"]


def test_they_are_those_of_one_device():
    model, x = nn.Linear(3, 2).double(), torch.randn(24, 3, dtype=torch.float64)

    def trained(rank):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)
        if rank is None:
            return [sums_of_parts(mine, optimizer, x) for _ in range(3)]
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(sums_of_parts, mesh, inputs={"x": {"dp": Shard(0)}})
        return [step(mine, optimizer, x) for _ in range(3)]

    want = trained(None)
    for found in run_ranks(trained, 4):
        for (total, seen), (a, b) in zip(found, want, strict=True):
            torch.testing.assert_close([total, *seen], [a, *b])


def test_a_number_that_a_tensor_needs_is_read_before_it():
    def step(x):
        scale = x.square().sum().item()
        return F.relu(x) * scale, scale + 1

    text = names(program(step, x=torch.randn(8, 3)))
    assert text.index("aten._local_scalar_dense.default") < text.index("aten.mul.Tensor")


def test_a_number_of_a_large_tensor_does_not_keep_it():
    def step(x):
        h = torch.cat([x, x])
        first = h[0, 0].item()
        return h.sum(1).cos(), first

    text = names(program(step, torch.randn(8, 300)))
    assert text.index("aten._local_scalar_dense.default") < text.index("aten.cos.default")
