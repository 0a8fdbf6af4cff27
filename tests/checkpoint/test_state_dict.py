"""State dicts of distributed models and optimisers: whole, on the CPU, broadcast; the files of other libraries."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from ways import WAYS, run

from spmd import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from spmd.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from spmd.mesh import DeviceMesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SQUARE = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
WHOLE = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Tied(nn.Module):
    """A table of an uneven number of rows whose weight is also that of the head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("count", torch.tensor(0))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(ids))).square().mean()


LAYOUT = {"table.weight": ([S0, S1], {}), "middle.weight": ([S0, S0], {0: ("tp", "dp")}), "middle.bias": ([R, S0], {})}


def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Lay out the parameters by the table; the head's weight is that of the table."""
    for key, p in list(module.named_parameters(recurse=False)):
        if f"{name}.{key}" in LAYOUT:
            placements, order = LAYOUT[f"{name}.{key}"]
            x = distribute_tensor(p.detach(), mesh, src_data_rank=None).redistribute(placements=placements, order=order)
            module.register_parameter(key, nn.Parameter(x.detach()))


def pair(seed: int, *, on_mesh: bool = True, steps: int = 2) -> tuple[nn.Module, optim.Optimizer]:
    """A model and its optimiser after some steps."""
    model = Tied()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_((torch.arange(float(p.numel())).view(p.shape) + i + 10 * seed).sin())
    model = distribute_module(model, SQUARE, place) if on_mesh else model
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = torch.arange(8) % 7
    ids = distribute_tensor(ids, SQUARE, [S0, R], src_data_rank=None) if on_mesh else ids
    for _ in range(steps):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def differences(found: Any, want: Any, path: str = "") -> list[str]:
    """Where two state dicts differ; the found one may have no DTensors."""
    if isinstance(want, dict):
        wrong = [f"{path}: {list(found)}"] if list(found) != list(want) else []
        return wrong + [each for key in want for each in differences(found.get(key), want[key], f"{path}.{key}")]
    if isinstance(want, (list, tuple)):
        return [each for i, x in enumerate(want) for each in differences(found[i], x, f"{path}.{i}")]
    if isinstance(want, torch.Tensor):
        is_right = isinstance(found, torch.Tensor) and not isinstance(found, DTensor) and found.shape == want.shape
        return [] if is_right and torch.allclose(found, want, atol=1e-5) else [path]
    return [] if found == want else [path]


def whole_of(model: nn.Module, optimizer: optim.Optimizer) -> tuple:
    return get_state_dict(model, optimizer, options=WHOLE)


def round_trip(path: str) -> list[str]:
    """What is wrong in whole state dicts, and after they were loaded in each way."""
    alone, here, other = pair(0, on_mesh=False), pair(0), pair(1)
    want = get_state_dict(*alone)
    wrong = differences(whole_of(*here), want, "whole")
    model, state = whole_of(*here)
    wrong += [] if model["table.weight"] is model["head.weight"] else ["the tied weight is two"]
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    wrong += differences(
        get_optimizer_state_dict(*here, options=flat),
        get_optimizer_state_dict(*alone, options=StateDictOptions(flatten_optimizer_state_dict=True)),
    )
    before = [p for p in other[0].parameters()]
    set_state_dict(*other, model_state_dict=model, optim_state_dict=copy.deepcopy(state), options=WHOLE)
    wrong += differences(whole_of(*other), want, "set")
    wrong += [] if all(a is b for a, b in zip(before, other[0].parameters(), strict=True)) else ["other parameters"]
    other = pair(1)
    set_optimizer_state_dict(*other, get_optimizer_state_dict(*here, options=flat), options=flat)
    wrong += differences(whole_of(*other)[1], want[1], "flat")
    meta = pair(1, steps=0)[0].to("meta")
    set_model_state_dict(meta, model, options=WHOLE)
    return wrong + differences(get_model_state_dict(meta, options=WHOLE), want[0], "meta")


@pytest.mark.parametrize("way", WAYS)
def test_whole_state_dicts_are_those_of_one_device(way, gloo4):
    """Of a model with uneven shards and a tied weight, and of its optimiser; and so after they were loaded."""
    assert run(way, gloo4, round_trip, "") == [[]] * 4


def from_rank_0(rank: int, path: str) -> list:
    """Whole state dicts on rank 0 alone, and loaded from there; then saved by torch and by safetensors."""
    want = get_state_dict(*pair(0, on_mesh=False))
    here, other = pair(0), pair(1)
    model, state = get_state_dict(*here, options=ON_RANK_0)
    wrong = differences(model, want[0]) + differences(state, want[1]) if rank == 0 else [model, state]
    blocks = get_model_state_dict(here[0], options=StateDictOptions(cpu_offload=True))
    wrong += [] if blocks["table.weight"]._spec is here[0].table.weight._spec else ["blocks"]
    set_state_dict(*other, model_state_dict=model, optim_state_dict=state, options=BROADCAST)
    wrong += differences(whole_of(*other), want, "broadcast")
    with pytest.raises(TypeError, match=r"broadcast_from_rank0: .* is a DTensor"):
        set_model_state_dict(other[0], here[0].state_dict() if rank == 0 else {}, options=BROADCAST)
    with pytest.raises(ValueError, match=r"table.weight has shape \[2, 2\] .* and is f32\[7@dp, 5@tp\]"):
        set_model_state_dict(other[0], {"table.weight": torch.zeros(2, 2)} if rank == 0 else {}, options=BROADCAST)
    return wrong


def test_one_rank_keeps_and_gives_the_whole_state(gloo4):
    assert gloo4.run(from_rank_0, "") == [[], [{}, {}], [{}, {}], [{}, {}]]


def test_what_is_missing_is_an_error():
    """As in load_state_dict."""
    model = distribute_module(nn.Linear(3, 2), DeviceMesh("cpu", [0]))
    whole = get_model_state_dict(model, options=WHOLE)
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"'):
        set_model_state_dict(model, {"bias": whole["bias"]}, options=WHOLE)
    assert set_model_state_dict(
        model, {"bias": whole["bias"]}, options=StateDictOptions(full_state_dict=True, strict=False)
    ).missing_keys == ["weight"]
    with pytest.raises(RuntimeError, match="Unexpected key"):
        set_model_state_dict(model, whole | {"more": torch.zeros(1)}, options=WHOLE)


def test_frozen_parameters_can_be_left_out():
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    assert "frozen" not in get_model_state_dict(distribute_module(Tied(), DeviceMesh("cpu", [0])), options=options)


def test_torchs_own_functions_refuse_to_gather_what_they_do_not_know():
    """They would give blocks under the name of a full state dict. Sharded state dicts are right."""
    from torch.distributed.checkpoint import state_dict as torchs

    model = distribute_module(nn.Linear(3, 2), DeviceMesh("cpu", [0]))
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    whole = get_model_state_dict(model, options=WHOLE)
    for ask in (
        lambda options: torchs.get_model_state_dict(model, options=options),
        lambda options: torchs.set_model_state_dict(model, whole, options=options),
        lambda options: torchs.get_state_dict(model, optimizer, options=options),
        lambda options: torchs.get_optimizer_state_dict(model, optimizer, options=options),
    ):
        for options in (WHOLE, ON_RANK_0, BROADCAST):
            with pytest.raises(TypeError, match=r"same names in spmd\.checkpoint"):
                ask(options)
    sharded, state = torchs.get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert sharded["weight"]._spec is state["state"]["weight"]["momentum_buffer"]._spec is model.weight._spec


# ---- other libraries --------------------------------------------------------------------------


def test_the_storage_of_all_blocks_is_an_error():
    """Libraries that write memory into files would get an error that says nothing."""
    with pytest.raises(TypeError, match=r"f32\[4\] is spread over ranks.*full_tensor\(\).*get_model_state_dict"):
        distribute_tensor(torch.zeros(4), DeviceMesh("cpu", [0])).storage()


def test_safetensors_get_whole_tensors(tmp_path):
    """A sharded state dict is refused, and a whole one is written; tied weights by save_model's sister."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = distribute_module(nn.Linear(3, 2), DeviceMesh("cpu", [0]))
    path = tmp_path / "model.safetensors"
    for save in (lambda: safetensors.save_file(model.state_dict(), path), lambda: safetensors.save_model(model, path)):
        with pytest.raises(TypeError, match="get_model_state_dict"):
            save()
    whole = get_model_state_dict(model, options=WHOLE)
    safetensors.save_file(whole, path)
    with torch.no_grad():
        model.weight.zero_()
    set_model_state_dict(model, safetensors.load_file(path), options=WHOLE)
    assert torch.equal(model.weight.full_tensor(), whole["weight"])


def test_save_pretrained_of_a_sharded_model(tmp_path):
    """With whole tensors it writes what one device writes; without it is an error that says how."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    alone = transformers.GPT2LMHeadModel(config)
    model = distribute_module(copy.deepcopy(alone), init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="get_model_state_dict"):
        model.save_pretrained(tmp_path / "sharded")
    model.save_pretrained(tmp_path / "whole", state_dict=get_model_state_dict(model, options=WHOLE))
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), alone.parameters(), strict=True))
    assert again.lm_head.weight is again.transformer.wte.weight
