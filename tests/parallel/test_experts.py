"""Experts that ranks share out give what they give on one device, with their gradients."""

from __future__ import annotations

import functools
from math import ceil

import pytest
import torch
import ways
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

import spmd
from spmd import DTensor, LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.comm import all_reduce, wait
from spmd.debug import CommDebugMode
from spmd.mesh import current_rank, per_rank
from spmd.parallel import ExpertParallel, load_balancing_loss, parallelize_module
from spmd.sim import run_ranks
from tests.tensor.single import every_rank

WIDTH, RANKS = 8, 4
QWEN = {"moe_intermediate_size": 6, "shared_expert_intermediate_size": 6, "num_experts_per_tok": 2}
BLOCKS = {
    "mixtral": lambda experts: MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=WIDTH, intermediate_size=6, num_local_experts=experts, num_experts_per_tok=2)
    ),
    "qwen": lambda experts: Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(hidden_size=WIDTH, num_experts=experts, **QWEN)),
}  # fmt: skip
EXPERTS = {"even": 8, "uneven": 5, "empty": 3}


@functools.cache
def numbers(kind: str, experts: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        empty = BLOCKS[kind](experts).state_dict()
    return {name: torch.randn(x.shape, generator=draw, dtype=torch.float64) for name, x in empty.items()}


def block(kind: str, experts: int) -> nn.Module:
    net = BLOCKS[kind](experts).double()
    net.load_state_dict(numbers(kind, experts))
    return net


X = torch.randn(8, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
W = torch.randn(8, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def step(net: nn.Module, x: torch.Tensor, w: torch.Tensor, again: bool = False) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = checkpoint(net, x, use_reentrant=False) if again else net(x)
    (out * w).sum().backward()
    return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in net.named_parameters()}


@per_rank
def own(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return x.chunk(ranks)[current_rank()].clone()


def shared_out(kind: str, experts: int, again: bool = False, **said) -> dict[str, torch.Tensor]:
    """Own tokens, own loss; averages over the ranks, as of data parallelism, times the number of ranks."""
    mesh = init_device_mesh("cpu", (RANKS,))
    net = parallelize_module(block(kind, experts), mesh, {"experts": ExpertParallel(**said)})
    assert (isinstance(net.experts.down_proj, DTensor) and "SharedM" in repr(net)) or kind == "qwen"
    found = step(net, *(own(x, RANKS) for x in (X, W)), again)
    for name in found.keys() - {"out", "x"}:
        g = found[name]
        found[name] = g.full_tensor() * RANKS if isinstance(g, DTensor) else wait(all_reduce(g, "sum", mesh))
    return found


@pytest.mark.parametrize(
    "kind, experts, said",
    [("mixtral", 5, {}), ("mixtral", 5, {"again": True}), ("qwen", 3, {"capacity_factor": 4.0})],
    ids=str,
)
def test_in_one_thread_of_simulated_ranks(kind, experts, said):
    want = step(block(kind, experts), X, W)
    equal(ways.on_ranks(lambda: shared_out(kind, experts, **said), RANKS), want)


def equal(got: list[dict], want: dict) -> None:
    for name, x in want.items():
        whole = torch.cat([each[name] for each in got]) if name in ("out", "x") else None
        for each in got if whole is None else [{name: whole}]:
            torch.testing.assert_close(each[name], x, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("experts", EXPERTS)
def test_all_tokens_find_their_experts(kind, experts):
    """Of transformers' blocks, unchanged; a rank may have no expert."""
    want = step(block(kind, EXPERTS[experts]), X, W)
    equal(run_ranks(lambda rank: shared_out(kind, EXPERTS[experts]), RANKS), want)


def beside_copies(shape: tuple[int, ...], experts: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Experts shared out over the last axis; over the others are copies, whose gradients are summed."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=(*"abc"[: len(shape) - 1], "ep"))
    net = parallelize_module(block("mixtral", experts).to(dtype), mesh["ep"], {"experts": ExpertParallel()})
    found = step(net, *(x.to(dtype).chunk(mesh.size())[current_rank()] for x in (X, W)))
    for name in found.keys() - {"out", "x"}:
        g, over = found[name], mesh.axis_names
        if isinstance(g, DTensor):
            g, over = g.full_tensor() * shape[-1], over[:-1]
        for axis in over:
            g = wait(all_reduce(g, "sum", (mesh, mesh.axis(axis))))
        found[name] = g
    return found


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 2)])
def test_on_meshes_of_more_axes(shape, experts):
    want = step(block("mixtral", EXPERTS[experts]), X, W)
    ranks = 2 ** len(shape)
    equal(run_ranks(lambda rank: beside_copies(shape, EXPERTS[experts], torch.float64), ranks), want)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 2, 2)])
def test_in_bfloat16(shape):
    """As near to one device in bfloat16 as digits are; each token goes to the same experts."""
    want = step(block("mixtral", 5).bfloat16(), X.bfloat16(), W.bfloat16())
    got = run_ranks(lambda rank: beside_copies(shape, 5, torch.bfloat16), 2 ** max(2, len(shape)))
    for name in ("out", "x"):
        torch.testing.assert_close(torch.cat([each[name] for each in got]), want[name], rtol=2e-2, atol=2e-2)
    for name in want.keys() - {"out", "x"}:
        apart = (got[0][name] - want[name]).double().norm() / want[name].double().norm()
        assert apart < 2e-2, f"{name}: {apart}"


def test_on_gloo(gloo4):
    equal(ways.run("gloo", gloo4, shared_out, "mixtral", 5), step(block("mixtral", 5), X, W))


# ---- capacity -----------------------------------------------------------------------------------


def dropping(factor: float, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: nn.Module):
    """On one device: of each rank's tokens an expert takes the first ones, token by token."""
    kept = torch.ones_like(weights)
    for part, of_part in zip(index.chunk(RANKS), kept.chunk(RANKS), strict=True):
        most, seen = ceil(factor * part.numel() / experts.num_experts), [0] * experts.num_experts
        for place, e in enumerate(part.flatten().tolist()):
            seen[e] += 1
            of_part.view(-1)[place] = seen[e] <= most
    return experts(x, index, weights * kept)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("experts", [8, 5, 3])
def test_experts_take_no_more_than_their_capacity(experts, factor):
    net = block("mixtral", experts)
    x = X.flatten(0, 1).clone().requires_grad_()
    _, weights, index = net.gate(x)
    want = dropping(factor, x, index, weights, net.experts)
    (want * W.flatten(0, 1)).sum().backward()
    found = {"out": want.detach(), "x": x.grad} | {name: p.grad for name, p in net.named_parameters()}
    got = run_ranks(lambda rank: shared_out("mixtral", experts, capacity_factor=factor), RANKS)
    equal([{n: x.flatten(0, 1) if n in ("out", "x") else x for n, x in each.items()} for each in got], found)


# ---- DTensors, and what is sent -----------------------------------------------------------------


def of_dtensors() -> dict[str, torch.Tensor]:
    """Global tokens: gradients of experts are sums."""
    mesh = init_device_mesh("cpu", (RANKS,))
    net = block("mixtral", 5)
    x, w = (distribute_tensor(t.flatten(0, 1), mesh, [Shard(0)], src_data_rank=None) for t in (X, W))
    x.requires_grad_()
    with torch.no_grad():
        _, weights, index = net.gate(X.flatten(0, 1))
    index, weights = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (index, weights))
    experts = parallelize_module(net.experts, mesh, ExpertParallel())
    out = experts(x, index, weights)
    (out * w).sum().backward()
    return {k: v.full_tensor() for k, v in {"o": out.detach(), "i": x.grad, "down": experts.down_proj.grad}.items()}


def test_dtensors_of_tokens():
    net, x = block("mixtral", 5), X.flatten(0, 1).clone().requires_grad_()
    with torch.no_grad():
        _, weights, index = net.gate(x)
    out = net.experts(x, index, weights)
    (out * W.flatten(0, 1)).sum().backward()
    want = {"o": out.detach(), "i": x.grad, "down": net.experts.down_proj.grad}
    equal(run_ranks(lambda rank: of_dtensors(), RANKS), want)


@pytest.mark.parametrize("said, collectives", [({}, 1 + 2 + 2), ({"capacity_factor": 1.0}, 2 + 2)], ids=str)
def test_one_exchange_each_way(said, collectives):
    """GShard's all-to-alls, forward and backward; dropless exchanges counts before."""

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        net = parallelize_module(block("mixtral", 8), mesh, {"experts": ExpertParallel(**said)})
        with CommDebugMode() as comm:
            step(net, *(x.chunk(RANKS)[rank] for x in (X, W)))
        return {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items()}

    assert run_ranks(on_rank, RANKS) == [{"all_to_all_single": collectives}] * RANKS


def train(net, x, w):
    out = net(x)
    loss = (out * w).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("said", [{}, {"capacity_factor": 1.0}, {"padded": False}], ids=str)
def test_a_compiled_step_sends_tokens_in_one_move_each_way(said):
    """Of global tokens, padded to a bound or to the capacity; not padded, what is there is sent, as eagerly."""
    padded = said.get("padded", True)
    want = block("mixtral", 6)
    x = X.flatten(0, 1)
    _, weights, index = want.gate(x)
    (dropping(said.get("capacity_factor", 99.0), x, index, weights, want.experts) * W.flatten(0, 1)).sum().backward()
    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        net = parallelize_module(block("mixtral", 6), mesh, {"experts": ExpertParallel(**said)})
        step = spmd.compile(train, mesh=mesh, inputs={"x": {"ep": Shard(0)}, "w": {"ep": Shard(0)}})
        with CommDebugMode() as comm:
            step(net, X, W)
        got = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    sent = [(each.kind, each.nbytes) for each in comm.counted if each.kind == "all_to_all_single"]
    moves, listed = ([each.nbytes for each in found if each.kind == "all_to_all"]
                     for found in (step.program.moved, step.program.collectives))  # fmt: skip
    assert len(moves) == (3 if padded else 0)
    assert len(listed) == len(sent) and all(most >= n for most, (_, n) in zip(listed, sent, strict=True))
    if not padded:
        ours, row = index.chunk(RANKS)[0].numel(), WIDTH * 8
        assert sent[:2] == [("all_to_all_single", 6 * 8), ("all_to_all_single", ours * row)]
    assert len(sent) == (3 if padded else 4), "nobody wants the gradient of the tokens; dropless sends counts"
    assert [each.kind for each in comm.counted].count("all_reduce") == 1
    for name, p in want.named_parameters():
        for each in every_rank(got[name]):
            torch.testing.assert_close(each, p.grad, rtol=1e-10, atol=1e-12)


def compiled(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Two steps of other tokens, of which other numbers go to each rank, in one program."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "dp")[: len(shape)])
    net = parallelize_module(block("mixtral", 5), mesh["ep"], {"experts": ExpertParallel(padded=False)})
    places = dict.fromkeys(mesh.axis_names, Shard(0))
    step, found = spmd.compile(train, mesh=mesh, inputs={"x": places, "w": places}), []
    for x in (X, X.flip(2)):
        net.zero_grad()
        step(net, x, W)
        found += [p.grad.full_tensor() for p in net.parameters()]
    return found


@pytest.mark.parametrize("way, shape", [("gloo", (4,)), ("simulated", (2, 2))])
def test_a_compiled_step_takes_whatever_tokens_come(way, shape, gloo4):
    want, net = [], block("mixtral", 5)
    for x in (X, X.flip(2)):
        net.zero_grad()
        train(net, x, W)
        want += [p.grad.clone() for p in net.parameters()]
    for got in ways.run(way, gloo4, compiled, shape):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_block_that_is_compiled_leaves_its_experts_as_they_are():
    """By torch.compile: how many tokens go where is of each call, and no number of the code."""
    want, x = block("mixtral", 6), X.flatten(0, 1)
    _, weights, index = want.gate(x)
    (dropping(99.0, x, index, weights, want.experts) * W.flatten(0, 1)).sum().backward()
    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        net = parallelize_module(block("mixtral", 6), mesh, {"experts": ExpertParallel(average_gradients=False)})
        net.compile(backend="eager")
        part = [distribute_tensor(y, mesh, [Shard(0)], src_data_rank=None).to_local() for y in (X, W)]
        train(net, *part)
        got = {name: p.grad.full_tensor() for name, p in net.experts.named_parameters()}
    for name, each in got.items():
        for mine in every_rank(each):
            torch.testing.assert_close(mine, want.experts.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


# ---- balance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded, shape", [(False, (RANKS,)), (True, (RANKS,)), (True, (2, RANKS // 2))])
def test_the_balance_is_that_of_all_tokens(padded, shape):
    """transformers' number and gradient, of two layers."""
    logits = torch.randn(2, 8, 3, 5, generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(24).view(8, 3) % 5 > 0).long() if padded else None

    def loss_of(loss, logits, mask, **said):
        layers = [x.flatten(0, 1).clone().requires_grad_() for x in logits]
        value = loss(tuple(layers), 5, 2, mask, **said)
        value.backward()
        return [value.detach(), torch.stack([x.grad for x in layers])]

    def on_rank(rank):
        own = None if mask is None else mask.chunk(RANKS)[rank]
        mesh = init_device_mesh("cpu", shape)
        return loss_of(load_balancing_loss, logits.chunk(RANKS, 1)[rank], own, mesh=mesh)

    value, gradient = loss_of(load_balancing_loss_func, logits, mask)
    got = run_ranks(on_rank, RANKS)
    for own, _ in got:
        torch.testing.assert_close(own, value)
    torch.testing.assert_close(torch.cat([g for _, g in got], 1), gradient * RANKS)


def test_a_layer_that_is_no_layer_of_experts_is_said():
    with pytest.raises(TypeError, match="one tensor of all experts"):
        run_ranks(lambda rank: parallelize_module(nn.Linear(4, 3), init_device_mesh("cpu", (1,)), ExpertParallel()), 1)
    with pytest.raises(ValueError, match="positive"):
        ExpertParallel(capacity_factor=0)
    with pytest.raises(ValueError, match="sizes are known"):
        ExpertParallel(capacity_factor=1, padded=False)
