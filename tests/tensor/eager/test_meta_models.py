"""A model on the meta device gets its blocks: its initialisers' numbers on any mesh, and no rank has all of it."""

from __future__ import annotations

import copy
from contextlib import suppress
from unittest import mock

import pytest
import torch
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import FullyShard, LocalTensorMode, Shard, distribute_module
from spmd._torch import TorchDispatchMode, pytree
from spmd.checkpoint import set_model_state_dict
from spmd.expand.bound_program import BoundProgram
from tests.expand.side_by_side import train_step
from tests.tensor.single import every_rank


class Rotary(nn.Module):
    """A table that its constructor computes, and that no state dict has."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.register_buffer("table", self.computed(width), persistent=False)

    @staticmethod
    def computed(width):
        return 1.0 / 10.0 ** (torch.arange(0, width, 2).float() / width)


class Layers(nn.Module):
    """Initialisers of all kinds: children before parents, tied tensors, buffers, assignments."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 6, padding_idx=3), nn.Linear(6, 10)
        self.head.weight = self.words.weight
        self.attention, self.norm = nn.MultiheadAttention(6, 2), nn.BatchNorm1d(6)
        self.conv, self.rotary = nn.Conv2d(1, 3, 3), Rotary()
        self.scale = nn.Parameter(torch.ones(5))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.trunc_normal_(self.scale)
        self.head.bias.fill_(0.5) if not torch.is_grad_enabled() else None


def init(module):
    if isinstance(module, Rotary):
        module.table = Rotary.computed(6)
    if isinstance(module, nn.Conv2d):
        nn.init.orthogonal_(module.weight)


def on_meta(make):
    with torch.device("meta"):
        return make()


PARAMS = {"words.weight": {"tp": Shard(0)}, "attention.in_proj_weight": {"dp": Shard(0), "tp": Shard(1)}}


def made(shape, make=Layers, **given) -> dict[str, list[torch.Tensor]]:
    """All tensors as every rank sees them, non-persistent buffers too."""
    with LocalTensorMode(torch.Size(shape).numel()):
        spmd.manual_seed(5)
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = distribute_module(on_meta(make), mesh, **given)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: every_rank(x.detach()) for name, x in named}


def test_numbers_do_not_depend_on_the_mesh():
    """They are those that the initialisers give to a model on one rank, one after the other."""
    one, many = made((1, 1), init=init), made((2, 2), params=PARAMS, init=init)
    for name, (want,) in one.items():
        assert all(torch.equal(x, want) for x in many[name]), name
    (words,), (head,) = one["words.weight"], one["head.weight"]
    assert torch.equal(words, head) and not words[3].any() and words.std() > 0.5  # an embedding's, not a linear layer's
    assert torch.equal(one["rotary.table"][0], Rotary.computed(6))
    assert one["head.bias"][0].eq(0.5).all() and not one["attention.out_proj.bias"][0].any()
    assert one["norm.running_var"][0].eq(1).all() and one["norm.num_batches_tracked"][0].item() == 0


def test_they_are_those_of_the_initialisers_run_by_hand():
    """`reset_parameters` of each layer of a model that is on a mesh already, children first."""
    make = lambda: nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2)))  # noqa: E731
    found = made((2, 1), make)
    with LocalTensorMode(1):
        model = distribute_module(make(), spmd.init_device_mesh("cpu", (1,)))
        spmd.manual_seed(5)
        for layer in (model[0], model[1][0], model[1][1]):
            layer.reset_parameters()
        for name, p in model.named_parameters():
            assert torch.equal(found[name][0], every_rank(p.detach())[0]), name


def test_it_stays_the_same_objects():
    """Optimisers that were made before train the blocks; what is not on the meta device keeps its numbers."""
    with LocalTensorMode(2):
        model = on_meta(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
        model[1] = kept = nn.Linear(6, 2)
        want, first = kept.weight.detach().clone(), model[0].weight
        distribute_module(model, spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), params=TP)
        assert model[0].weight is first and first.placements == (Shard(0),) and not first.is_meta
        assert all(torch.equal(x, want) for x in every_rank(kept.weight.detach()))


TP = {"0.weight": {"tp": Shard(0)}}


def test_what_nothing_initialises_is_named():
    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for given in ({}, {"init": lambda module: None}):
            with pytest.raises(ValueError, match=r"rotary.table is on the meta device, .*no initialiser .*init="):
                distribute_module(on_meta(Layers), mesh, **given)


def test_a_checkpoint_instead():
    """init=False draws nothing; the state dict of a whole model is then loaded into the blocks."""
    whole = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    with LocalTensorMode(2):
        spmd.manual_seed(5)
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = on_meta(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
        distribute_module(model, mesh, params=TP, init=False)
        assert spmd.get_rng_state() == {"seed": 5, "drawn": 0}
        set_model_state_dict(model, copy.deepcopy(whole.state_dict()))
        for name, x in whole.state_dict().items():
            assert all(torch.equal(y, x) for y in every_rank(model.state_dict()[name])), name


# ---- memory -----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that an op has made in one tensor with memory."""

    most = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(t, spmd.DTensor) for t in types):
            return NotImplemented  # the ops on its block are seen
        out = op(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in pytree.tree_leaves(out) if is_real(x)]
        self.most = max([self.most, *sizes])
        return out


def is_real(x) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and not x.is_meta and x.is_floating_point()


CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab=512)


def _drill(rank: int) -> None:
    """A compiled step trains a model on the meta device, in shards, as one that was there and has the same numbers."""
    mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    batch = tuple(torch.randint(0, 512, (2, 4, 8), generator=torch.Generator().manual_seed(1)))
    losses = []
    for way in ("compiled", "distributed"):
        model = on_meta(lambda: GPT(CONFIG))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = spmd.compile(train_step, mesh, fully_shard=FullyShard("dp"))
        spmd.manual_seed(7)
        with Largest() as largest:
            if way == "distributed":
                distribute_module(model, mesh, params={"*.weight": {"dp": Shard(0)}})
            else:
                with mock.patch.object(BoundProgram, "run", side_effect=InterruptedError), suppress(InterruptedError):
                    step(model, optimizer, *batch)
        whole = max(p.numel() for p in model.parameters())
        assert whole // 4 <= largest.most < whole // 2, (way, largest.most, whole)
        assert all(p.to_local().numel() * 4 == p.numel() for p in model.parameters() if p.ndim == 2)
        losses.append([step(model, optimizer, *batch).item() for _ in range(1)])
    assert losses[0] == losses[1], losses


def test_no_rank_has_all_of_a_parameter(gloo4):
    gloo4.run(_drill)
