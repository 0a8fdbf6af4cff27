"""What a step with places leaves behind: on real ranks, in eager code, in checkpoints."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim

import spmd
from spmd import DTensor, FullyShard, LocalTensorMode, Shard
from spmd.checkpoint import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from tests.expand.places.trained import TP, Odd, alone, batches, plain_step, steps
from tests.expand.side_by_side import seeded

OVER = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}


def adamw(params):
    return optim.AdamW(params, 1e-2)


def compiled(model: nn.Module, **said):
    """A step on dp x tp, and an optimiser of what the model trains."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    step = spmd.compile(plain_step, mesh, inputs=OVER, params=TP, **said)
    return step, adamw([p for p in model.parameters() if p.requires_grad])


def trained_and_saved(rank: int, folder: str) -> tuple[dict, list[str]]:
    """On one of four ranks: train with shards over dp and tp, save, and load where parameters are stored otherwise."""
    model = seeded(Odd).double()
    step, optimizer = compiled(model, fully_shard="dp")
    seen = steps_here(step, model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    other = Odd().double()
    step, optimizer = compiled(other, fully_shard=FullyShard("dp", 1))
    step(other, optimizer, *batches(1)[0])
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, optimizer)}
    dcp.load(loaded, checkpoint_id=folder)
    wrong = differing(saved["model"], loaded["model"])
    for kept, found in zip(saved["optimizer"]["state"].values(), loaded["optimizer"]["state"].values(), strict=True):
        wrong += differing(kept, found)
    return seen, wrong


def steps_here(step, model, optimizer) -> dict[str, torch.Tensor]:
    """The losses and parameters of three steps, whole, on a real rank."""
    returned = [step(model, optimizer, *batch).full_tensor() for batch in batches()]
    return {f"returned {i}": x for i, x in enumerate(returned)} | {
        name: p.detach().full_tensor() for name, p in model.named_parameters()
    }


def differing(one: dict, other: dict) -> list[str]:
    """The names of tensors that are not bitwise the same, whole."""

    def whole(x):
        return x.full_tensor() if isinstance(x, DTensor) else x

    return [name for name in one if not torch.equal(whole(one[name]), whole(other[name]))]


def test_real_ranks_train_as_one_device_and_load_elsewhere(gloo4, tmp_path: Path):
    """Four gloo ranks: the numbers of one device, and a checkpoint of level 3 in a model of level 1."""
    want = alone(adamw, plain_step)
    for seen, wrong in gloo4.run(trained_and_saved, str(tmp_path / "saved"), timeout=120):
        assert not wrong
        for name, x in seen.items():
            torch.testing.assert_close(x, want[name], rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("level", [1, 2, 3])
def test_eager_steps_go_on_where_a_compiled_one_ended(level):
    """The same step, not compiled, on the stored parameters: one object each, and the numbers of one device."""
    model = seeded(Odd).double()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    want = steps(plain_step, model, optimizer, 2)
    with LocalTensorMode(4):
        model = seeded(Odd).double()
        held = dict(model.named_parameters())
        step, optimizer = compiled(model, fully_shard=FullyShard("dp", level))
        first, second = batches(2)
        step(model, optimizer, *first)
        assert all(p is held[name] for name, p in model.named_parameters())
        with spmd.implicit_replication():
            loss = plain_step(model, optimizer, *second)
        torch.testing.assert_close(loss.full_tensor().reconcile(), want["returned 1"], rtol=0, atol=1e-10)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach().full_tensor().reconcile(), want[name], rtol=0, atol=1e-10)


def test_state_dicts_have_the_stored_shards_and_can_be_set():
    """Whole values from shards, and back."""
    with LocalTensorMode(4):
        model = seeded(Odd).double()
        step, optimizer = compiled(model, fully_shard="dp")
        step(model, optimizer, *batches(1)[0])
        kept = get_model_state_dict(model)
        assert str(kept["up.bias"]._spec) == "f64[10@tp,dp]"
        before = {name: x.full_tensor().reconcile().clone() for name, x in kept.items() if isinstance(x, DTensor)}
        whole = {name: 2 * x for name, x in copy.deepcopy(kept).items()}
        set_model_state_dict(model, whole)
        for name, p in model.named_parameters():
            assert torch.equal(p.detach().full_tensor().reconcile(), 2 * before[name]), name
        step(model, optimizer, *batches(1)[0])
