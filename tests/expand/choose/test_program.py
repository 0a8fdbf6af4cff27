"""Programs whose placements are chosen together: right, never dearer than by op, and as by hand where that is known."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
import spmd.expand.choose.program as choosing
from examples.gpt import GPT, GPTConfig, train_step
from spmd import Shard
from spmd.expand.choose.price import program_cost
from tests.expand.side_by_side import Net

BATCH = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
ROWS = {"params": {"*": {"dp": Shard(0)}}}


class Tokens(nn.Module):
    """A GPT as a function of one argument."""

    def __init__(self, **config):
        super().__init__()
        self.gpt = GPT(GPTConfig(**{"n_layer": 1, "n_head": 4, "n_embd": 16, "block_size": 8, "vocab": 32, **config}))

    def forward(self, x):
        return self.gpt(x)


class Softmaxed(nn.Module):
    """Ops with decompositions and recipes: an embedding, a norm, a softmax, a mean."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        h = self.norm(self.table(x)).softmax(-1)
        return self.out(h - h.mean(1, keepdim=True))


def step_of(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


def words(n: int = 3, rows: Sequence[int] = (8, 8, 8)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(32, (row, 8), generator=g) for _ in range(2)) for row in rows[:n]]


CASES = {
    "gpt, stored in shards": (Tokens, {"inputs": BATCH, **ROWS}),
    "gpt, nothing said": (Tokens, {}),
    "gpt, fully_shard": (Tokens, {"inputs": BATCH, "fully_shard": "dp"}),
    "softmax, sequence": (Softmaxed, {"inputs": {k: {"dp": Shard(0), "tp": Shard(1)} for k in "xy"}}),
    "softmax, words": (Softmaxed, {"params": {"model.table.weight": {"tp": Shard(0)}}, "inputs": BATCH}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_chosen_program_trains_as_one_device(name):
    """Losses and parameters of three steps, in float64."""
    build, said = CASES[name]
    losses, parameters = trained(build, None, said)
    with spmd.LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found, chosen = trained(build, mesh, said)
    assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=1e-10, atol=1e-10)
    for a, b in zip(chosen, parameters, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def trained(build, mesh, said, batches=None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run = step_of if mesh is None else spmd.compile(step_of, mesh, choose="program", **said)
    losses = [run(model, optimizer, x, y) for x, y in batches or words()]
    return [_whole(x) for x in losses], [_whole(p) for p in model.parameters()]


FOLLOWED = (8, 8, 5, 1, 80)
"""Rows of a batch: even, twice (the second step has gradients), uneven, fewer than ranks, and far more."""


def test_other_sizes_follow_what_was_chosen_for_the_first():
    """Nothing is solved for them, and each trains as one device. A batch that is far larger is solved."""
    build, said = CASES["softmax, sequence"]
    batches, solved, real = words(len(FOLLOWED), FOLLOWED), [], choosing.solve
    losses, parameters = trained(build, None, said, batches)
    counted = mock.patch.object(choosing, "solve", lambda *args: solved.append(at[0]) or real(*args))
    with spmd.LocalTensorMode(4), counted:
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        at = [None]
        found, chosen = trained(build, mesh, said, noting(batches, at))
    assert 0 in solved and 4 in solved and not {2, 3} & set(solved)
    assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=1e-10, atol=1e-10)
    for a, b in zip(chosen, parameters, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def noting(batches, at: list):
    """The batches, one after the other; the number of the one under way is noted."""
    for i, batch in enumerate(batches):
        at[0] = i
        yield batch


@pytest.mark.parametrize("rows", [6, 5, 1])
def test_what_is_followed_is_never_dearer_than_by_op(rows):
    """By the sum of what is sent and computed, at sizes that nothing was solved for."""
    build, said = CASES["gpt, fully_shard"]
    mesh = spmd.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = {how: spmd.compile(step_of, mesh, choose=how, **said) for how in ("op", "program")}
    us = {}
    for how, step in steps.items():
        for batch in words(2, (8, rows)):
            _, program = step._capture_and_expand(step._call((model, optimizer, *batch), {}, True))
        us[how] = program_cost(program).us
    assert us["program"] <= us["op"] * (1 + 1e-9)


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor().reconcile() if isinstance(x, spmd.DTensor) else x


def programs(model, said, mesh_shape=(2, 4), batch=None, bucket_mb=None):
    """The programs by op and for the program. Nothing runs."""
    mesh = spmd.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    batch = batch or words(1)[0]
    made = {}
    for choose in ("op", "program"):
        step = spmd.compile(step_of, mesh, choose=choose, bucket_mb=bucket_mb, **said)
        made[choose] = step.program_for(model, optimizer, *batch)
    return made


@pytest.mark.parametrize("name, bucket_mb", [("gpt, stored in shards", None), ("softmax, sequence", 25.0)])
def test_a_chosen_program_is_never_dearer_than_by_op(name, bucket_mb):
    """The modelled cost of the programs that run, and the certificate that the program carries."""
    build, said = CASES[name]
    made = programs(build(), said, bucket_mb=bucket_mb)
    certificate = made["program"].certificate
    assert program_cost(made["program"]).us <= program_cost(made["op"]).us * (1 + 1e-9)
    assert certificate.us == pytest.approx(program_cost(made["program"]).us)
    assert certificate.by_op == pytest.approx(program_cost(made["op"]).us)
    assert certificate.at_least <= certificate.solved


def test_all_ranks_choose_alike():
    """Choosing twice gives the same text, whatever was chosen before."""
    build, said = CASES["softmax, sequence"]
    first = programs(build(), said)["program"]
    programs(Softmaxed(), CASES["softmax, words"][1])
    assert programs(build(), said)["program"].fingerprint == first.fingerprint


def test_a_step_may_begin_with_a_linear_layer():
    """Its weight is no operand of its gradients, where nobody wants that of its input."""
    mesh, net = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), nn.Linear(4, 3)
    step = spmd.compile(step_of, mesh=mesh, choose="program", inputs={"x": {"dp": Shard(0)}})
    given = net, torch.optim.SGD(net.parameters(), 0.1), torch.ones(4, 2, 4), torch.ones(4, 2).long()
    program = step.program_for(*given)
    assert program.certificate.us > 0


def test_another_word_for_choose_is_an_error():
    """It names what may be given."""
    mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match='choose is \'best\'; give "program", or "op"'):
        spmd.compile(train_step, mesh, choose="best")


def test_one_rank_has_nothing_to_choose():
    """On a mesh of one rank the program is that of one device."""
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = Net()
    step = spmd.compile(lambda model, x: model(x), mesh, choose="program")
    assert step.program_for(model, torch.randn(3, 4)).certificate is None


class Fused(nn.Module):
    """A layer whose weight is three, one after the other."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).split(64, -1)
        return self.out(q * k.relu() + v)


PACKED = {f"model.qkv.{name}": {"tp": Shard(0, blocks=3)} for name in ("weight", "bias")}
SAME_DIM = {"model.qkv.*": {"tp": Shard(0)}}


SAID = {"packed": {"params": PACKED}, "order": {"params": SAME_DIM, "fully_shard": "dp"}}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_choice_knows_packed_shards_and_orders_of_axes(said):
    """What each op does by itself is among the choices, also where shards are packed, or two axes shard one dim in
    another order than that of the mesh. So the solved choice costs no more."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model, x = Fused(), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = spmd.compile(step, mesh, choose="program", inputs={"x": {"dp": Shard(0)}}, bucket_mb=None, **said)
    certificate = compiled.program_for(model, optimizer, x).certificate
    assert certificate.solved <= certificate.by_op * (1 + 1e-9) and certificate.gap < 1e-6
