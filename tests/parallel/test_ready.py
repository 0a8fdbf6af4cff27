"""Ready plans: what they say, that a stock model then learns what it learns on one device, and sends what was said."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.debug import CommDebugMode
from spmd.mesh import DeviceMesh
from spmd.parallel import GlobalBatchNorm, ReadyPlan, parallelize_module, plan_for
from spmd.sim import run_ranks
from tests.steps import train_step as step
from tests.tensor.single import every_rank, whole

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
         "vocab_size": 51, "max_position_embeddings": 16}  # fmt: skip
MOE = {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
STOCK = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 51, "n_positions": 16, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZES | {
        "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 1}),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | {
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SIZES | MOE),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic", "num_labels": 5}),
}  # fmt: skip


def made(name: str) -> nn.Module:
    kind, config, settings = STOCK[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).train()
    return model if name == "mixtral" else model.double()


def batch(name: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    if name == "resnet":
        pixels = torch.randn(8, 3, 8, 8, generator=g, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(5, (8,), generator=g)}
    ids = torch.randint(3, 51, (4, 6), generator=g)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return {"input_ids": ids, "labels": ids.clone()} | ({"attention_mask": mask} if name in ("bert", "llama") else {})


def train(model: nn.Module, given: dict[str, torch.Tensor]) -> nn.Module:
    """Two steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(**given).loss.backward()
        optimizer.step()
    return model


def trained(model: nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return seen(train(model, given))


def seen(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers."""
    return {name: whole(x.detach()) for name, x in model.state_dict().items()}


def by_plan(name: str, model: nn.Module, axes: dict[str, int], **said):
    """The same on a mesh, each rank with its part of the batch; and what a step sent, and would send."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    plan, given = plan_for(model, mesh, **said), batch(name)
    over = mesh[plan.data_axes] if plan.data_axes else None
    for key, x in given.items() if over is not None else ():
        given[key] = distribute_tensor(x, over, [Shard(0)] * over.ndim, src_data_rank=None).to_local()
    model = parallelize_module(model, mesh, plan)
    with CommDebugMode() as comm:
        train(model, given)
    sent, said = Counter(), Counter()
    for each in comm.counted:
        sent[each.kind] += each.nbytes
    tokens = {"resnet": 8}.get(name, 24) // (over.size() if over is not None else 1)
    for send in plan.sends:
        said[send.kind] += 2 * send.nbytes(tokens, 4 if name == "mixtral" else 8)
    return seen(model), sent, said


CASES = [
    ("gpt2", {"dp": 2, "tp": 2}, {}), ("llama", {"dp": 2, "tp": 4}, {}), ("qwen3", {"tp": 2}, {}),
    ("bert", {"dp": 2, "tp": 2}, {"data": "data_parallel"}), ("resnet", {"dp": 4}, {}),
]  # fmt: skip


@pytest.mark.parametrize("name, axes, said", CASES, ids=str)
def test_a_stock_model_trains_by_its_plan(name, axes, said):
    """Heads that do not divide, packed and tied weights, norms of queries, batch norms; bytes are those of the plan."""
    want = trained(made(name), batch(name))
    with LocalTensorMode(torch.Size(axes.values()).numel()):
        found, sent, promised = by_plan(name, made(name), axes, **said)
    assert set(found) == set(want)
    for key, x in want.items():
        for block in every_rank(found[key]):
            torch.testing.assert_close(block, x, rtol=1e-10, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")
    if not said:  # else the buckets' buffers are sent, too
        assert {kind: n for kind, n in sent.items() if kind != "broadcast"} == promised


@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 2}, {"dp": 2}], ids=str)
def test_experts_have_an_axis_of_their_own(axes):
    """Three experts on two ranks, stored in shards over the other axis; transformers computes routers in float32."""
    want, start = trained(made("mixtral"), batch("mixtral")), made("mixtral")

    def on_rank(rank):
        return by_plan("mixtral", copy.deepcopy(start), axes)

    for found, sent, promised in run_ranks(on_rank, 2 * len(axes)):
        for key, x in want.items():
            torch.testing.assert_close(found[key], x, rtol=1e-4, atol=1e-6)
        assert {k: v for k, v in sent.items() if k != "all_to_all_single"} == {
            k: v for k, v in promised.items() if k != "all_to_all_single"
        }


def test_a_compiled_step_takes_the_plan():
    def pair():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, x = pair()[0], torch.randn(4, 4, dtype=torch.float64)
    want = step(model, torch.optim.SGD(model.parameters(), 0.1), x)
    with LocalTensorMode(4):
        mesh, (mine, optimizer) = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), pair()
        plan = plan_for(mine, mesh)
        said = {"params": plan, "fully_shard": plan.fully_shard, "inputs": {"x": {"dp": Shard(0)}}}
        loss = spmd.compile(step, mesh, **said)(mine, optimizer, x)
        assert str(mine[0].weight._spec) == "f64[8@tp,dp, 4]" and dict(plan)["0.bias"] == {"tp": Shard(0)}
        pairs = [
            (loss, want),
            *((p.detach(), q.detach()) for p, q in zip(mine.parameters(), model.parameters(), strict=True)),
        ]
        for got, expected in pairs:
            for block in every_rank(whole(got)):
                torch.testing.assert_close(block, expected, rtol=1e-10, atol=1e-12)


# ---- what a plan says -------------------------------------------------------------------------

LINE = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
SQUARE = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


def test_it_says_what_it_would_do_and_changes_nothing():
    model = made("gpt2")
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    text = str(plan_for(model, SQUARE))
    for said in (
        "GPT2LMHeadModel on dp 2 x tp 2",
        "transformer.h.*.attn.c_attn                2 x ColwiseParallel(Replicate() -> Shard(-1, blocks=3), as DT",
        "transformer.h.*                            2 groups, and one of the rest",
        "all_reduce             tp        4 x T*16             the results of 4 pairs",
        "transformer.wpe                            1 x not the table of words: looked up on each rank",
    ):
        assert said in text
    assert {name: (id(p), type(p)) for name, p in model.named_parameters()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_it_says_that_an_axis_serves_nothing_and_counts_what_is_alike_once():
    alone = str(plan_for(nn.Conv2d(2, 4, 3), SQUARE))
    assert "note: nothing is shared out over tp: its 2 ranks do the same work" in alone
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "ep"))
    lines = str(plan_for(made("mixtral"), mesh)).splitlines()
    assert len(lines) == len(set(lines)) and any("tokens to experts and back" in line for line in lines)


class Adapter(nn.Module):
    """Narrow, then wide: no pair."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.norm = nn.Linear(8, 2), nn.Linear(2, 8), nn.LayerNorm(8)


LEFT = {
    "heads": (lambda: made("llama"), "model.layers.0.self_attn.q_proj", "4 ranks do not divide its 2 heads"),
    "adapter": (Adapter, "down", "no pair"), "norm": (Adapter, "norm", "a norm"),
    "torch's attention": (lambda: nn.TransformerEncoderLayer(8, 2), "self_attn", "its projections are no layers"),
    "hidden": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), "0", "do not divide its 6 hidden features"),
    "convolution": (
        lambda: nn.Conv2d(4, 4, 3), "parameters of the model itself", "shared out over the batch alone"),
    "experts": (lambda: made("mixtral"), "model.layers.0.mlp.experts", "over an axis 'ep'"),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_whole_has_a_reason(what):
    make, name, why = LEFT[what]
    assert why in dict(plan_for(make(), LINE).left)[name]


def other():
    return plan_for(made("bert"), LINE).apply(made("llama"))


def placed():
    model = nn.Linear(2, 2)
    with LocalTensorMode(4):
        spmd.distribute_module(model, LINE)
        return plan_for(model, LINE)


CUBE = DeviceMesh("cpu", [[[0]]], mesh_dim_names=("a", "b", "c"))
ERRORS = {
    "another model": (other, ValueError, "the model has other parameters"),
    "another mesh": (
        lambda: parallelize_module(made("bert"), SQUARE, plan_for(made("bert"), LINE)), ValueError, "the plan is for"),
    "DTensors": (placed, ValueError, "weight is a DTensor already"),
    "three axes of data": (lambda: plan_for(nn.Linear(2, 2), CUBE), ValueError, "flatten some"),
    "data": (lambda: plan_for(nn.Linear(2, 2), LINE, data="ddp"), ValueError, "'fully_shard' or 'data_parallel'"),
    "experts": (lambda: plan_for(made("mixtral"), LINE, ep="tp", tp="", data="data_parallel"), ValueError, "experts"),
    "model": (lambda: plan_for(3, LINE), TypeError, "give a module"),
    "norm": (lambda: parallelize_module(nn.Linear(2, 2), LINE, GlobalBatchNorm()), TypeError, "takes batch norms"),
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS)
def test_mistakes_are_said(what):
    make, kind, said = ERRORS[what]
    with pytest.raises(kind, match=said):
        make()


# ---- tensors that a model makes itself --------------------------------------------------------


class Makes(nn.Module):
    """A pair with a table between its layers, which the model makes in each call."""

    def __init__(self, differs_in: int):
        super().__init__()
        self.up, self.down, self.calls, self.differs_in = nn.Linear(4, 8), nn.Linear(8, 4), 0, differs_in

    def forward(self, x):
        self.calls += 1
        table = torch.arange(8.0)
        if self.calls == self.differs_in:
            table = table + torch.distributed.get_rank() if torch.distributed.is_initialized() else table * self.rank
        return self.down(self.up(x) * table)


@pytest.mark.parametrize("differs_in", [0, 1, 2, 4])
def test_they_are_replicated_by_a_rule_that_is_checked(differs_in):
    def on_rank(rank):
        model = Makes(differs_in)
        model.rank = rank
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = plan_for(model, mesh).apply(model)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
        return isinstance(plan_for(Makes(0), mesh), ReadyPlan)

    if not differs_in:
        assert run_ranks(on_rank, 2) == [True, True]
        return
    with pytest.raises(RuntimeError, match=r"has to be the same on all ranks, and is not"):
        run_ranks(on_rank, 2)
