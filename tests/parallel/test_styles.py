"""A model made parallel by a plan learns what it learns on one device: forward, backward and one optimiser step."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
import ways
from torch import nn

import spmd
from spmd import DTensor, LocalTensorMode, Replicate, Shard, distribute_tensor, init_device_mesh
from spmd.debug import CommDebugMode
from spmd.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    placements_of,
)  # fmt: skip
from tests.tensor.single import every_rank

COL, ROW = ColwiseParallel, RowwiseParallel


class Attention(nn.Module):
    """Heads are counted by what comes out of the layers, so that it works on blocks, too."""

    def __init__(self, width: int, head_dim: int, heads: int = 4):
        super().__init__()
        self.head_dim, self.num_heads = head_dim, heads
        self.q, self.k, self.v = (nn.Linear(width, heads * head_dim, bias=i == 0) for i in range(3))
        self.out = nn.Linear(heads * head_dim, width)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm, self.attn, self.last, self.mlp = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width), None
        self.mlp = Mlp(width, hidden)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.last(x))


class Model(nn.Module):
    def __init__(self, hidden: int = 16, vocabulary: int = 12, width: int = 8):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(4, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


MLP = {"layers.*.mlp.up": COL(), "layers.*.mlp.down": ROW()}
LINEAR = {"layers.*.attn.[qkv]": COL(), "layers.*.attn.out": ROW(), **MLP}
EMBEDDED = {**LINEAR, "tok": ROW(input_layouts=Replicate()), "head": COL(output_layouts=Replicate())}
BY_COLUMNS = {**LINEAR, "tok": COL(output_layouts=Replicate()), "pos": COL(output_layouts=Replicate())}
SEQUENCE = {
    "tok": ROW(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    "pos": PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False
    ),
    "layers.*.norm": SequenceParallel(), "layers.*.last": SequenceParallel(), "norm": SequenceParallel(),
    "layers.*.attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.attn.[qkv]": COL(), "layers.*.mlp.up": COL(input_layouts=Shard(1)),
    "layers.*.attn.out": ROW(output_layouts=Shard(1), use_local_output=False),
    "layers.*.mlp.down": ROW(output_layouts=Shard(1), use_local_output=False),
    "head": COL(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip
WHOLE = {**LINEAR, "layers.*.mlp": PrepareModuleInputOutput(
    input_layouts=Replicate(), desired_input_layouts=Replicate(), output_layouts=Shard(1),
    desired_output_layouts=Replicate(),
), "layers.*.mlp.down": ROW(output_layouts=Shard(1), use_local_output=False)}  # fmt: skip
PLANS = {
    "linear": LINEAR, "embeddings": EMBEDDED, "by columns": BY_COLUMNS, "sequence": SEQUENCE, "in and out": WHOLE,
    "no local outputs": {
        "layers.*.attn.[qkv]": COL(use_local_output=False), "layers.*.attn.out": ROW(),
        "layers.*.mlp.up": COL(use_local_output=False), "layers.*.mlp.down": ROW(),
    },
    "placements": {"layers.*.up.weight": Shard(0), "layers.*.down.weight": Shard(1), "tok.weight": Shard(0)},
}  # fmt: skip


@functools.cache
def _made(sizes: tuple[tuple[str, int], ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Model(**dict(sizes)).double().state_dict()


def model(**sizes) -> Model:
    """Always the same numbers; threads would mix their draws."""
    net = Model(**sizes).double()
    net.load_state_dict(_made(tuple(sizes.items())))
    return net


IDS = torch.randint(12, (3, 4), generator=torch.Generator().manual_seed(1))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(net: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Loss, gradients, and parameters after a step, by name."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with spmd.implicit_replication():
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    named = dict(net.named_parameters())
    gradients = [whole(named[name].grad) for name in sorted(named)]
    optimizer.step()
    return [whole(loss).detach(), *gradients, *(whole(named[name].detach()) for name in sorted(named))]


@pytest.fixture(autouse=True, scope="module")
def numbers():
    """Drawn on one device, before there are ranks."""
    for sizes in SIZES.values():
        _made(tuple(sizes.items()))


def parallel(plan: str, shape: tuple[int, ...], sizes: dict[str, int]) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp")[-len(shape) :])["tp"]
    return step(parallelize_module(model(**sizes), mesh, PLANS[plan]), IDS)


SIZES = {"even": {}, "uneven": {"hidden": 6, "vocabulary": 13}, "empty": {"hidden": 3, "vocabulary": 12}}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_trains_as_one_device(plan, sizes):
    want = step(model(**SIZES[sizes]), IDS)
    for shape in ((4,), (2, 2, 2)) if sizes == "even" else ((4,),):
        with LocalTensorMode(torch.Size(shape).numel()):
            got = parallel(plan, shape, SIZES[sizes])
        for x, y in zip(got, want, strict=True):
            for block in every_rank(x):
                torch.testing.assert_close(block, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ("gloo", "threads"))
def test_real_ranks_do_the_same(way, gloo4):
    want = step(model(), IDS)  # made here, before there are threads
    for rank in ways.run(way, gloo4, on_real_ranks):
        for got in rank.values():
            assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-12) for x, y in zip(got, want, strict=True))


def on_real_ranks():
    return {plan: parallel(plan, (2, 2), {}) for plan in ("embeddings", "sequence")}


# ---- what is sent -----------------------------------------------------------------------------

MEGATRON = {**LINEAR, "layers.*.attn": PrepareModuleInput(
    input_layouts=Replicate(), desired_input_layouts=Replicate()
)}  # fmt: skip
FORMULAS = {  # a layer: two in the forward, two in the backward, also where q, k and v are given the same plain tensor
    "linear": (LINEAR, {"all_reduce": 2 * 4}), "prepared": (MEGATRON, {"all_reduce": 2 * 4}),
}  # fmt: skip


@pytest.mark.parametrize("plan", FORMULAS)
def test_megatron_sends_this(plan):
    said, want = FORMULAS[plan]
    x = torch.ones(3, 4, dtype=torch.long)
    with LocalTensorMode(4):
        net = parallelize_module(model(), init_device_mesh("cpu", (4,)), said)
        with CommDebugMode() as comm:
            net(x).sum().backward()
    assert {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items()} == want


def test_what_enters_again_is_what_it_is_now():
    """A tensor that was written to in the meantime, or that autograd is to know of now, enters anew."""
    layer = nn.Linear(4, 4).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    with LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,))
        net = parallelize_module(nn.Sequential(layer), mesh, {"0": COL(output_layouts=Replicate())})
        with torch.no_grad():
            first = net(x)
            x.mul_(2.0)
            second = net(x)
        x.requires_grad_()
        net(x).sum().backward()
        weight = whole(layer.weight.detach())
    for a, b, w, g in zip(*map(every_rank, (first, second, weight, x.grad)), strict=True):
        torch.testing.assert_close(b - a, (x.detach() / 2) @ w.T)
        torch.testing.assert_close(g, w.sum(0).expand(2, 4))


def test_a_block_that_its_owner_wrote_to_is_gathered_again():
    with LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)]).requires_grad_()
        net = parallelize_module(nn.Linear(4, 4, bias=False), mesh, COL(output_layouts=Replicate()))
        first = net(x)
        with torch.no_grad():
            x.to_local().mul_(3.0)
        second = net(x)
    for a, b in zip(every_rank(first.detach()), every_rank(second.detach()), strict=True):
        torch.testing.assert_close(b, 3.0 * a)


# ---- compiled ---------------------------------------------------------------------------------


def train(net, optimizer, ids):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("plan", ["linear", "embeddings", "sequence", "placements"])
def test_a_compiled_step_takes_the_same_plan(plan):
    """By its placements, or as the model that it was given to."""
    net = model()
    want = train(net, torch.optim.SGD(net.parameters(), 0.1), IDS)
    with LocalTensorMode(4):
        mesh, net = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), model()
        said = placements_of(net, mesh, PLANS[plan] if plan != "placements" else BY_AXIS)
        compiled = spmd.compile(train, mesh=mesh, inputs={"ids": {"dp": Shard(0)}}, **said)
        first = compiled(net, torch.optim.SGD(net.parameters(), 0.1), IDS)
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        net = parallelize_module(model(), line, PLANS[plan])
        second = spmd.compile(train, mesh=line)(net, torch.optim.SGD(net.parameters(), 0.1), IDS)
    for loss in (first, second):
        for x in every_rank(loss.full_tensor()):
            torch.testing.assert_close(x, want.detach(), rtol=1e-10, atol=0)


BY_AXIS = {name: {"tp": p} for name, p in PLANS["placements"].items()}
