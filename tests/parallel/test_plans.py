"""What a plan can get wrong is told before a model is changed; and plans that others wrote."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import spmd
from spmd import DeviceMesh, DTensor, LocalTensorMode, Replicate, Shard, distribute_module, init_device_mesh
from spmd.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)  # fmt: skip
from tests.parallel.test_styles import IDS, Attention, model, numbers  # noqa: F401 - a fixture
from tests.steps import train_step as train
from tests.tensor.single import every_rank

COL, ROW = ColwiseParallel, RowwiseParallel


def tied():
    net = model()
    net.head.weight = net.tok.weight
    return net


WRONG = {
    "nothing": ({"layer.*.up": COL()}, model, ValueError, "'layer.*.up' matches no module. Near: layers"),
    "no parameter": ({"layers.*.up.wait": Shard(0)}, model, ValueError, "matches no parameter. Near: layers"),
    "no layer": ({"norm": COL()}, model, TypeError, "'norm' is a LayerNorm; name the layers in it"),
    "no style": ({"norm": 3}, model, TypeError, "3 is no style; give one, such as ColwiseParallel"),
    "no name": ({"norm": "colwize"}, model, NotImplementedError, "'colwize' is no style that is known here"),
    "no plan": ([COL()], model, TypeError, "give a style, or a dict from names of modules to styles"),
    "heads": (
        {"[qkv]": COL(), "out": ROW()}, lambda: Attention(6, 2, heads=3), ValueError,
        "4 ranks do not divide the 3 heads of '' (num_heads)",
    ),
    "tied": (
        {"tok": ROW(input_layouts=Replicate()), "head": ROW()}, tied, ValueError,
        "tok.weight and head.weight are one tensor, and the plan places it as Shard(0) and as Shard(1)",
    ),
    "too late": ({"*.*.*.up": COL(), "layers.0.mlp.up": ROW()}, model, ValueError, "Put 'layers.0.mlp.up' first"),
    "both": ({"head": COL(), "tok.weight": Shard(0)}, model, ValueError, "has styles and placements"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_plan_that_does_not_fit_changes_nothing(what):
    plan, make, kind, message = WRONG[what]
    net = make()
    before = {name: (p, type(p)) for name, p in net.named_parameters()}
    with LocalTensorMode(4), pytest.raises(kind) as error:
        parallelize_module(net, init_device_mesh("cpu", (4,)), plan)
    assert message in str(error.value)
    assert {name: (p, type(p)) for name, p in net.named_parameters()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_style_is_for_one_axis():
    with LocalTensorMode(4), pytest.raises(ValueError, match=r"give one of them, such as mesh\['tp'\]"):
        parallelize_module(model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {"head": COL()})


@pytest.mark.parametrize(
    "inputs, message",
    [((Shard(1), Shard(1)), "was given 1 positional inputs, and there are layouts for 2"), (Shard(1), None)],
)
def test_inputs_are_counted(inputs, message):
    if message is None:
        with pytest.raises(ValueError, match="belong together; give both"):
            PrepareModuleInput(input_layouts=inputs)
        return
    with LocalTensorMode(2), pytest.raises(ValueError, match=message):
        style = PrepareModuleInput(input_layouts=inputs, desired_input_layouts=(Replicate(), Replicate()))
        parallelize_module(nn.Linear(2, 2), init_device_mesh("cpu", (2,)), style)(torch.ones(2, 2))


def test_a_tied_weight_stays_one():
    plan = {"tok": ROW(input_layouts=Replicate()), "head": COL(output_layouts=Replicate())}
    want = tied()(IDS)
    with LocalTensorMode(4):
        net = parallelize_module(tied(), init_device_mesh("cpu", (4,)), plan)
        assert net.head.weight is net.tok.weight and isinstance(net.tok.weight, DTensor)
        for block in every_rank(net(IDS)):
            torch.testing.assert_close(block, want)


class Rows(ParallelStyle):
    """As a user of torch writes one."""

    def _apply(self, module, device_mesh):
        found = distribute_module(module, device_mesh, params={"weight": [Shard(0)]})
        return nn.Sequential(found)


def test_a_style_of_the_user():
    with LocalTensorMode(2):
        net = parallelize_module(nn.Sequential(nn.Linear(2, 4)), DeviceMesh("cpu", [0, 1]), {"0": Rows()})
    assert isinstance(net[0], nn.Sequential) and str(net[0][0].weight._spec) == "f32[4@dim0, 2]"


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=20, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def test_the_plan_of_a_model_of_transformers():
    ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(0))
    one = llama()
    want = one(ids, labels=ids).loss
    want.backward()
    with LocalTensorMode(2):
        net = llama()
        parallelize_module(net, init_device_mesh("cpu", (2,)), net.tp_plan)
        got = net(ids, labels=ids).loss
        got.backward()
        assert all(isinstance(net.get_parameter(f"model.layers.{i}.mlp.up_proj.weight"), DTensor) for i in range(2))
        for name, p in one.named_parameters():
            grad = net.get_parameter(name).grad
            for block in every_rank(grad.full_tensor() if isinstance(grad, DTensor) else grad):
                torch.testing.assert_close(block, p.grad, rtol=1e-6, atol=1e-9)
    for block in every_rank(got):
        torch.testing.assert_close(block, want)
    with LocalTensorMode(4), pytest.raises(ValueError, match=r"4 ranks do not divide the 2 heads"):
        net = llama()
        parallelize_module(net, init_device_mesh("cpu", (4,)), net.tp_plan)


SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 20,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 9}
STOCK = {
    "Qwen3": {"head_dim": 4},  # norms of each head's queries and keys
    "Mixtral": {"num_local_experts": 3, **ROUTED, "intermediate_size": 9, "head_dim": 4},  # 5 and 4 features a rank
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 12, **ROUTED},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, **ROUTED,
        "num_key_value_heads": 4,
    },
    "Glm4MoeLite": {  # keys with positions, which all heads have in common
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, **ROUTED,
    },
    "GraniteSWA": {"head_dim": 4, "sliding_window": 4},  # a sink for each head
}  # fmt: skip


def stock(name: str):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | STOCK[name])
    config._experts_implementation = config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def of_experts(net: nn.Module) -> dict[str, str]:
    """transformers' plan with whole experts on each rank."""
    return {name: said for name, said in net.tp_plan.items() if ".experts" not in name} | net.ep_plan


def learnt(net: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Losses, gradients, and parameters after two steps, by name."""
    optimizer, found = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5), {}
    for i in range(2):
        optimizer.zero_grad()
        found[f"loss {i}"] = net(ids, labels=ids).loss
        found[f"loss {i}"].backward()
        optimizer.step()
    for name, p in net.named_parameters():
        found |= {name: p, f"{name}.grad": p.grad}
    return {name: x.detach().full_tensor() if isinstance(x, DTensor) else x.detach() for name, x in found.items()}


@pytest.mark.parametrize("name, plan_of, shape", [
    *[(name, lambda net: net.tp_plan, (2,)) for name in STOCK], ("Mixtral", of_experts, (2,)),
    ("Qwen3", lambda net: net.tp_plan, (2, 2)), ("Mixtral", lambda net: net.tp_plan, (2, 2)),
])  # fmt: skip
def test_stock_models_learn_by_their_own_plans(name, plan_of, shape):
    """Norms of this rank's heads, experts of which ranks have some features, and fully sharded besides."""
    ids = torch.randint(3, 20, (2, 8), generator=torch.Generator().manual_seed(0))
    want = learnt(stock(name), ids)
    with LocalTensorMode(2 ** len(shape)):
        mesh, net = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :]), stock(name)
        parallelize_module(net, mesh["tp"], plan_of(net))
        if len(shape) > 1:
            for module in (*net.model.layers, net):
                fully_shard(module, mesh=mesh["dp"])
        found = learnt(net, ids)
    assert found.keys() == want.keys()
    for key, x in want.items():
        for block in every_rank(found[key]):
            assert torch.allclose(block, x, rtol=1e-6, atol=5e-8), key  # norms and routers compute in float32


def test_entries_of_other_models_of_the_family_are_left_out():
    """Its own plan has entries for layers that this model has not; a mistake of the user matches nothing, too."""
    net = stock("Mixtral")
    own = {**net.tp_plan, "model.layers.*.mlp.gate_proj": "colwise"}
    mesh = DeviceMesh("cpu", [0])
    with pytest.raises(ValueError, match=r"'model.layers.\*.mlp.gate_proj' matches no module"):
        parallelize_module(net, mesh, own)
    net.tp_plan = own
    parallelize_module(net, mesh, own)
    assert isinstance(net.model.layers[0].self_attn.q_proj.weight, DTensor)


ALONE = {
    "a parameter": ({"model.layers.*.mlp.experts": "packed_colwise"}, "is for a parameter of a module that has an"),
    "its module": ({"model.layers.*.mlp.experts.down_proj": "rowwise"}, "matches no module"),
    "no rotary": ({"model.layers.*.self_attn.q_proj": "mla_kv_a_proj"}, "does not tell its qk_rope_head_dim"),
}  # fmt: skip


@pytest.mark.parametrize("what", ALONE)
def test_names_that_do_not_fit_are_said(what):
    plan, message = ALONE[what]
    with pytest.raises(ValueError, match=message):
        parallelize_module(stock("Mixtral"), DeviceMesh("cpu", [0]), plan)


# ---- a model on a slice of a step's mesh --------------------------------------------------------


def test_a_compiled_step_takes_parameters_of_a_slice_of_its_mesh():
    """Other axes have copies. Gradients and momentum of an eager step before it come along, and objects stay."""
    torch.manual_seed(0)
    want, x = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4)).double(), torch.randn(8, 4).double()
    net = copy.deepcopy(want)
    optimizer = torch.optim.SGD(want.parameters(), 0.1, momentum=0.5)
    losses = [train(want, optimizer, x) for _ in range(3)]
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
        held = list(net.parameters())
        mine = torch.optim.SGD(held, 0.1, momentum=0.5)
        found = [train(net, mine, x)]
        step = spmd.compile(train, mesh, inputs={"x": {"dp": Shard(0)}})
        found += [step(net, mine, x) for _ in range(2)]
        assert all(p is q and p.device_mesh == mesh for p, q in zip(net.parameters(), held, strict=True))
        pairs = [*zip(found, losses, strict=True), *zip(held, want.parameters(), strict=True)]
        for got, expected in pairs:
            got = got.detach().full_tensor() if isinstance(got, DTensor) else got
            for block in every_rank(got):
                torch.testing.assert_close(block, expected.detach(), rtol=1e-10, atol=1e-12)
