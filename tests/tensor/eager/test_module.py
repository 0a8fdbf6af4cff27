"""distribute_module: a module on a mesh computes what it did before, and a failure does not change it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spmd
from spmd import DTensor, Shard, distribute_module, distribute_tensor
from spmd.mesh import DeviceMesh
from tests.tensor.single import S0, S1, R, mesh_of, on_ranks, same, whole
from tests.ways import run


class Net(nn.Module):
    """Tied weights, buffers that train, one that is not saved, and a parameter that is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.scale.kept = "a note"
        self.register_buffer("shift", torch.arange(6.0), persistent=False)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens) + self.shift) * self.scale)


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def columns(name, module, mesh):
    """Shard the weight of linear layers by rows, that of embeddings by columns."""
    if isinstance(module, nn.Embedding):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [R, S1]))
    if isinstance(module, nn.Linear) and module.bias is not None:
        for key, p in list(module.named_parameters()):
            setattr(module, key, nn.Parameter(distribute_tensor(p.detach(), mesh, [R, S0])))


def step(model, tokens) -> list:
    model(tokens).square().sum().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@pytest.mark.parametrize("partition_fn", [None, columns])
def test_it_computes_what_the_module_computes(partition_fn):
    plain, models = net(), [net() for _ in range(4)]
    want = [plain(TOKENS).detach(), *step(plain, TOKENS)]

    def rank(mesh):
        model = models[mesh.get_rank()]
        out = distribute_module(
            model, mesh, partition_fn,
            input_fn=lambda module, inputs, mesh: distribute_tensor(inputs[0], mesh, [S0, R]),
            output_fn=lambda module, out, mesh: out.redistribute(placements=[R, R]),
        )  # fmt: skip
        assert out is model and model.embed.weight is model.head.weight
        assert all(isinstance(t, DTensor) for t in [*model.parameters(), *model.buffers()])
        assert not model.scale.requires_grad and model.scale.kept == "a note" and "shift" not in model.state_dict()
        first = model(TOKENS)
        assert first.placements == (R, R)
        return [whole(x) for x in [first.detach(), *step(model, TOKENS)]]

    for got in on_ranks(rank):
        assert len(got) == len(want) and all(same(a, b) for a, b in zip(got, want, strict=True))


def placed():
    own = spmd.init_device_mesh("cpu", (4,)).get_local_rank() + 1.0
    model = nn.Linear(6, 3)
    model.weight, model.bias = nn.Parameter(torch.full((3, 6), own)), nn.Parameter(torch.full((3,), own))
    distribute_module(model, mesh_of((2, 2)), lambda name, module, mesh: None)
    return model.weight.full_tensor(), model.bias.full_tensor()


@pytest.mark.parametrize("way", ["simulated", "threads", "gloo"])
def test_all_ranks_have_what_the_first_has(way, gloo4):
    for weight, bias in run(way, gloo4, placed):
        assert torch.equal(weight, torch.ones(3, 6)) and torch.equal(bias, torch.ones(3))


def test_a_gradient_and_the_mesh_of_what_is_placed_are_kept():
    def rank(mesh):
        layer = nn.Linear(4, 2)
        layer.weight.grad = torch.ones(2, 4)
        layer.bias = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [S0, R]))
        distribute_module(layer)
        return layer.weight.device_mesh == mesh and layer.bias.placements == (S0, R) and layer.weight.grad.sum().item()

    assert on_ranks(rank) == [8.0] * 4


def loaded():
    """What a distributed module holds after it has loaded plain tensors, and the error where the ranks' differ."""
    model, other = net(), net()
    for p in other.parameters():
        p.data = torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape)
    mesh = mesh_of((2, 2))
    distribute_module(model, mesh, columns)
    held, specs = list(model.parameters()), [p._spec for p in model.parameters()]
    model.load_state_dict(other.state_dict())
    assert all(p is q and p._spec is spec for p, q, spec in zip(model.parameters(), held, specs, strict=True))
    with pytest.raises(RuntimeError, match=r'(?s)"body.0.bias".*shape \[8\] is not the same on all ranks'):
        model.load_state_dict({"body.0.bias": torch.ones(8) * mesh.get_local_rank(1)}, strict=False)
    with pytest.raises(RuntimeError, match=r"a plain tensor of shape .* met a DTensor"):
        model.embed.weight.detach().copy_(other.embed.weight.detach())
    return [t.full_tensor() for t in model.state_dict().values()], list(other.state_dict().values())


@pytest.mark.parametrize("way", ["simulated", "gloo"])
def test_plain_tensors_are_loaded_as_global_ones(way, gloo4):
    for got, want in run(way, gloo4, loaded):
        assert len(got) == len(want) and all(map(torch.equal, got, want))


# ---- failures ---------------------------------------------------------------------------------


def breaks(name, module, mesh):
    columns(name, module, mesh)
    module.register_forward_hook(lambda *_: None)
    module.note = "changed"
    if name == "body.3":
        raise KeyError("body.3")


def parts_the_tied(name, module, mesh):
    if name in ("embed", "head"):
        placement = {"embed": S0, "head": S1}[name]
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [R, placement]))


def elsewhere(name, module, mesh):
    if name == "head":
        other = DeviceMesh("cpu", [0, 1, 2, 3])
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), other, [Shard(0)], src_data_rank=None))


def by_rank(name, module, mesh):
    if name == "head" and mesh.get_rank() == 2:
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [S0, R], src_data_rank=None))


def fails_on_one(name, module, mesh):
    if name == "head" and mesh.get_rank() == 2:
        raise OSError("no file")


BAD = {
    breaks: (KeyError, "body.3"),
    parts_the_tied: (ValueError, "embed.weight and head.weight are one tensor, but were placed as"),
    elsewhere: (ValueError, r"(head|embed).weight is on .* a module is on one mesh"),
    by_rank: (RuntimeError, "the layout of the tensors differs between rank 0 and rank 2"),
    fails_on_one: ((OSError, RuntimeError), "no file"),
}


@pytest.mark.parametrize("partition_fn", BAD, ids=lambda fn: fn.__name__)
def test_a_failure_leaves_the_module_as_it_was(partition_fn):
    kind, message = BAD[partition_fn]

    def rank(mesh):
        model = net()
        before = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
        attributes = {name: set(vars(m)) for name, m in model.named_modules()}
        with pytest.raises(kind, match=message):
            distribute_module(model, mesh, partition_fn, input_fn=lambda module, inputs, mesh: None)
        assert {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()} == before
        assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert model.embed.weight is model.head.weight
        distribute_module(model, mesh)  # and nothing stands in the way of a better try
        return True

    assert all(on_ranks(rank))


def test_mistakes_are_named():
    mesh, other = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [[0]])
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="pass device_mesh"):
        distribute_module(layer)
    with pytest.raises(TypeError, match=r"input_fn takes \(module, inputs, device_mesh\)"):
        distribute_module(layer, mesh, input_fn=lambda inputs, mesh: None)
    with pytest.raises(TypeError, match="is no nn"):
        distribute_module(layer.weight, mesh)
    with pytest.raises(TypeError, match="give a DeviceMesh"):
        distribute_module(layer, "cpu")
    with pytest.raises(ValueError, match=r"params 'wheight' matches nothing. Near: .*weight"):
        distribute_module(layer, mesh, params={"wheight": [Shard(0)]})
    with pytest.raises(ValueError, match=r"'weight': \[Shard\(0\), Replicate\(\)\] gives no placements on a mesh"):
        distribute_module(layer, mesh, params={"weight": [Shard(0), R]})
    with pytest.raises(ValueError, match=r"weight: .*dim"):
        distribute_module(layer, mesh, params={"weight": [Shard(2)]})
    assert type(layer.weight) is nn.Parameter
    with pytest.raises(ValueError, match="has no shape yet"):
        distribute_module(nn.LazyLinear(2), mesh)
    distribute_module(layer, mesh)
    with pytest.raises(RuntimeError, match="already"):
        distribute_module(layer, mesh)
    with pytest.raises(ValueError, match="a module is on one mesh"):
        distribute_module(nn.Sequential(layer), other)
    distribute_module(nn.Sequential(layer), mesh)
