"""What users of a stock model do with it, they do when a plan was applied, too, and get what one device gives.

A use is a function of a model alone, the same for both. Names, losses and numbers are compared.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn, optim

from spmd import DeviceMesh, DTensor, LocalTensorMode, Replicate, Shard, distribute_tensor, init_device_mesh
from spmd.checkpoint import StateDictOptions, get_model_state_dict
from spmd.parallel import plan_for
from tests.tensor.single import every_rank

IDS = torch.randint(3, 30, (2, 5), generator=torch.Generator().manual_seed(1))
CONFIG = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 31, "n_positions": 16, "resid_pdrop": 0.0,
          "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def stock() -> nn.Module:
    """GPT-2: a packed weight, a tied one, positions and masks that it makes itself."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).double()


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def seen(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def logits(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"logits": model(IDS).logits}


def learn(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2, around=contextlib.nullcontext) -> dict:
    for _ in range(steps):
        optimizer.zero_grad()
        with around():
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
    return seen(model)


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.1, momentum=0.5)


# ---- the uses -----------------------------------------------------------------------------------


def generate(model):
    model.eval()
    return {"ids": model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)}


def beams(model):
    """Caches are reordered between calls of the model, which a copy does as well."""
    model = copy.deepcopy(model.eval())
    return {"ids": model.generate(IDS, max_new_tokens=3, num_beams=3, do_sample=False, pad_token_id=0)}


def load(model):
    """Whole tensors under the names that they always had."""
    state = {name: 0.5 * whole(x) for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    return seen(model) | logits(model)


def deepcopy(model):
    """A copy that learns, and an original that does not."""
    twin = copy.deepcopy(model)
    return learn(twin, sgd(twin)) | logits(model)


def blocks_compiled(model):
    for layer in model.transformer.h:
        layer.compile(backend="eager")
    return learn(model, sgd(model))


def adafactor(model):
    return learn(model, optim.Adafactor(model.parameters(), lr=0.01, foreach=False))


def muon(model):
    """Matrices by Muon, the rest by Adam: steps that look at whole matrices."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "wte" not in name]
    others = [p for p in model.parameters() if all(p is not q for q in matrices)]
    both = optim.Muon(matrices, lr=0.01), optim.AdamW(others, lr=0.01)
    learn(model, both[1], 1)  # before bfloat16 comes in: a first step of Adam asks for signs
    return learn(model, both[0], 1)


def ema(model):
    average, optimizer = optim.swa_utils.AveragedModel(model), sgd(model)
    for _ in range(2):
        learn(model, optimizer, 1)
        average.update_parameters(model)
    return seen(average)


def autocast(model):
    return learn(model, sgd(model), 1, lambda: torch.autocast("cpu", torch.bfloat16))


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return learn(model.train(), sgd(model))


def accelerate(model):
    """As loops with Accelerate: micro-batches, a scaler that looks for infinities, clipping, a schedule."""
    optimizer, scaler = optim.AdamW(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(4):
        loss = model(IDS[step % 2 :][:1], labels=IDS[step % 2 :][:1]).loss / 2
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
    return seen(model)


class Lightning:
    """As a LightningModule: the trainer calls hooks, and the optimiser a closure."""

    def __init__(self, model):
        self.model = model

    def configure_optimizers(self):
        return sgd(self.model)

    def training_step(self, batch):
        return self.model(batch, labels=batch).loss

    def fit(self):
        optimizer = self.configure_optimizers()

        def closure():
            loss = self.training_step(IDS)
            optimizer.zero_grad()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return seen(self.model) | {"state": torch.tensor(len(optimizer.state_dict()["state"]))}


def lightning(model):
    return Lightning(model).fit()


LOOSE = {"autocast": 2e-2, "muon": 2e-2, "blocks_compiled": 1e-7}
"""What computes in bfloat16, or in float32, itself."""
USES: list[Callable] = [
    generate, beams, load, deepcopy, blocks_compiled, adafactor, muon, ema, autocast, checkpointed, accelerate,
    lightning,
]  # fmt: skip


@pytest.mark.parametrize("axis", ["tp", "dp"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_use_of_a_stock_model(use, axis):
    """With tensor parallelism, and fully sharded, where all ranks see one batch."""
    want, tolerance = use(stock()), LOOSE.get(use.__name__, 1e-6)
    with LocalTensorMode(2):
        mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), stock()
        model = plan_for(model, mesh).apply(model)
        found = use(model)
        assert isinstance(model.transformer.h[0].attn.c_attn.weight, DTensor)
    assert list(found) == list(want)
    for name, x in want.items():
        for block in every_rank(found[name]):
            assert torch.allclose(block, x, rtol=tolerance, atol=tolerance / 10), name


def test_files_are_read_shard_by_shard(tmp_path):
    """`save_pretrained` of what `from_pretrained` reads; and a model that was never whole, tensor by tensor."""
    want = stock()
    with LocalTensorMode(2):
        mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), stock()
        model = plan_for(model, mesh).apply(model)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        state = {name: x.reconcile() if hasattr(x, "reconcile") else x for name, x in state.items()}
    want.save_pretrained(tmp_path / "one")
    want.save_pretrained(tmp_path / "ranks", state_dict=state)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ranks", dtype=torch.float64)
    for name, x in want.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name
    with LocalTensorMode(2), safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        with torch.device("meta"):
            mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), stock()
        model = plan_for(model, mesh).apply(model, init=False)
        for name, p in model.named_parameters():
            full = file.get_tensor(name)
            mine = distribute_tensor(full, mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else full
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, nn.Parameter(mine))
        model.tie_weights()
        for block in every_rank(model(IDS).logits.detach()):
            torch.testing.assert_close(block, want(IDS).logits.detach())


def test_autocast_around_a_mesh_of_meta_tensors():
    """Where one plans, and nothing is computed; autocast casts nothing there."""
    mesh = DeviceMesh("meta", [0, 1])
    with LocalTensorMode(2), torch.autocast("cpu", torch.bfloat16):
        x = distribute_tensor(torch.ones(4, 2, device="meta"), mesh, [Shard(0)])
        w = distribute_tensor(torch.ones(3, 2, device="meta"), mesh, [Replicate()])
        assert str(nn.functional.linear(x, w)._spec) == "f32[4@dim0, 3]"
