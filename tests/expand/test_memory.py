"""The memory that a program says it needs is what its ranks need: all tensors counted as they come and go."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import ways
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import spmd
from spmd import FullyShard, Shard
from spmd._torch import pytree
from spmd.comm import C10dTransport
from spmd.expand.code import code_for
from spmd.mesh import as_rank
from spmd.tensor.recipes import host
from tests.expand.side_by_side import GPT_PLAN, INPUTS, NET, Net, gpt, rows, tokens, train_step

wait_tensor = torch.ops._c10d_functional.wait_tensor.default

PLANS = {
    "data parallel": ((4, 1), {}, None), "tensor parallel": ((1, 4), {"params": GPT_PLAN}, None),
    "both": ((2, 2), {"params": GPT_PLAN}, None), "fully sharded": ((4, 1), {"fully_shard": FullyShard("dp")}, None),
    "fully sharded, tensor parallel": ((2, 2), {"params": GPT_PLAN, "fully_shard": FullyShard("dp")}, None),
    "uneven": ((4, 1), {}, 6),
}  # fmt: skip


class Counted(TorchDispatchMode):
    """Counts the bytes of all tensors that ops make, from when they are made until nobody holds them; but for those of
    host memory, as on a device that has memory of its own."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref, int]] = {}
        self.apart: dict[int, weakref.ref] = {}
        self.most = 0

    def host_room(self, x: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            made = torch.empty_like(x)
        storage = made.untyped_storage()
        self.apart[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
        return made

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.note(out)
        if op.namespace == "_c10d_functional" and op is not wait_tensor:  # how long the network takes does not count
            wait_tensor(out)
        return out

    def note(self, values) -> None:
        for x in pytree.tree_leaves(values):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if (there := self.apart.get(storage._cdata)) is not None and not there.expired():
                    continue
                self.alive[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.alive.values()))


def measured(name: str, kind: str) -> tuple[int, int]:
    """What a later step of a training needs at most on this rank: predicted, and counted while it runs."""
    shape, plan, batch = PLANS[name]
    torch.manual_seed(0)
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if kind == "gpt":
        model, data = gpt(n_layer=1, n_embd=16), tokens(batch or 8, 1)[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        model, data = Net(hidden=64), rows(batch or 8, 1)[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        plan = plan | ({"params": NET} if "params" in plan else {})
    step = spmd.compile(train_step, mesh, inputs=INPUTS, **plan)
    return counted_beside(step, mesh, lambda: step(model, optimizer, *data))


def counted_beside(step: spmd.CompiledStep, mesh: spmd.DeviceMesh, call: Callable[[], object]) -> tuple[int, int]:
    """What a later call of a step needs at most on this rank: predicted, and counted while it runs."""
    for _ in range(2):  # until there are gradients, and the state of the optimiser
        call()
    bound, counts = step._last, []
    run = bound.code

    def module(*inputs):
        counts.append(Counted())
        with counts[-1], mock.patch.object(host, "room", counts[-1].host_room):
            counts[-1].note(inputs)
            return run(*inputs)

    with mock.patch.object(bound, "code", module):
        for _ in range(5):
            call()
    # A thread of the network may hold for a moment longer what it has sent: of several runs the least is the rank's.
    return step.program.memory(mesh.get_coordinate()).peak, min(counted.most for counted in counts)


@pytest.mark.parametrize("name, kind", [*((name, "net") for name in PLANS), ("fully sharded, tensor parallel", "gpt")])
def test_a_rank_needs_what_its_program_says(name, kind, gloo4):
    for predicted, counted in ways.run("gloo", gloo4, measured, name, kind):
        assert abs(predicted - counted) <= 0.005 * counted, (predicted, counted)


def test_what_is_alive_is_said_by_name_and_kind():
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    model = Net(hidden=64)
    step = spmd.compile(train_step, mesh, params=NET, inputs=INPUTS)
    memory = step.program_for(model, torch.optim.SGD(model.parameters(), lr=0.1), *rows(8, 1)[0]).memory()
    kinds = memory.by_kind
    blocks = [64 * 4 // 2, 64 // 2, 64, 64, 64 * 3 // 2, 3]  # elements of the parameters on a rank
    assert kinds["parameter"] == 4 * sum(blocks) and sum(kinds.values()) == memory.peak
    assert memory.peak == max(nbytes for _, nbytes in memory.timeline)
    assert sum(memory.by_line.values()) == kinds["activation"]  # what is sent is a bucket of several lines
    assert {line.partition(":")[0] for line in memory.by_line} == {"side_by_side.py"}
    assert any(line.endswith(" backward") for line in memory.by_line)
    assert f" at {next(iter(memory.by_line))}" in str(memory)
    assert "model.up.weight 512" in str(memory) and str(memory).startswith(f"{memory.peak:,} bytes at most, at ")


def test_the_rank_with_the_largest_blocks_is_the_default():
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    step = spmd.compile(lambda x: (x * 2).relu(), mesh, inputs={"x": {"dp": Shard(0)}})
    program = step.program_for(torch.ones(5, 4))
    peaks = [program.memory((i,)).peak for i in range(4)]
    assert peaks == [64, 64, 32, 0] and program.memory().peak == peaks[0]


@pytest.mark.parametrize("op, most", [(lambda x: x.cumsum(0), 3 * 16), (torch.sin, 2 * 16)], ids=["cumsum", "sin"])
def test_memory_is_given_back_at_the_last_read(op, most):
    """A chain of ops needs its input, an operand and a result, however long it is; elements are written in place."""
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))

    def chain(x):
        for _ in range(10):
            x = op(x)
        return x

    step = spmd.compile(chain, mesh)
    assert step.program_for(torch.ones(4)).memory().peak == most


class _Forked(nn.Module):
    def forward(self, x):
        return x.view(2, 2).t() + x.view(2, 2)


def test_views_take_no_memory():
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    assert spmd.compile(_Forked(), mesh).program_for(torch.ones(4)).memory().peak == 2 * 16


SEED = 0, 0
DRAWS = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "uniform": lambda x: torch.rand_like(x),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "half precision": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "transposed": lambda x: torch.randn_like(x.t(), dtype=torch.bfloat16),
    "integers": lambda x: torch.randint_like(x, 0, 7, dtype=torch.int32),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("shape", [(0, 5), (30, 7), (300, 400)], ids=str)
def test_what_a_draw_holds_for_a_moment_counts(name, shape):
    """Numbers wait to be copied into the block, band after band; tiles of kernels to be put together."""
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    step, x = spmd.compile(DRAWS[name], mesh, inputs={"x": {"dp": Shard(1)}}), torch.ones(shape)
    program = step.program_for(x)
    for rank in range(4):
        specs = [n.meta["spec"] for n in program.graph.nodes if n.op == "placeholder"]
        given = [torch.ones(spec.local_shape((rank,))) if spec else SEED for spec in specs]
        with as_rank(rank):
            run = code_for(program, (rank,), C10dTransport()).module
            run(*given)  # makes the generator of this thread
            with Counted() as count:
                count.note(given)
                run(*given)
        memory = program.memory((rank,))
        assert memory.peak == count.most
        assert sum(memory.by_kind.values()) == memory.peak
