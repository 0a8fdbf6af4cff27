"""Folders that transformers writes are read in blocks, and what ranks write stock transformers reads."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spmd
from spmd import DTensor, LocalTensorMode, init_device_mesh
from spmd.checkpoint import load_pretrained, save_pretrained
from spmd.parallel import fully_shard, plan_for
from tests.parallel.test_stock_uses import CONFIG, IDS
from tests.tensor.single import every_rank

LLAMA = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 31, "tie_word_embeddings": False}  # fmt: skip


def gpt() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made on one rank, but for what shows the file, of which slices are read."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.shown = 0, set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        if type(out) is torch.Tensor and not out.is_meta:
            if op is torch.ops.aten.set_.source_Storage:
                self.shown.add(out.untyped_storage().data_ptr())
            if out.untyped_storage().data_ptr() not in self.shown:
                self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("make", [gpt, llama], ids=lambda make: make.__name__)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 3}], ids=str)
def test_a_model_is_read_in_blocks_and_written_again(make, axes, tmp_path):
    """Packed and tied weights, rotary tables, several files; on the meta device until then."""
    torch.manual_seed(0)
    want = make()
    want.save_pretrained(tmp_path / "one", max_shard_size="1KB")
    with LocalTensorMode(torch.Size(axes.values()).numel()):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = on_meta(make)
        model = plan_for(model, mesh).apply(model, init=False).eval()
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        keys = load_pretrained(model, tmp_path / "one")
        assert keys.missing_keys == keys.unexpected_keys == ()
        assert tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)
        for block in every_rank(model(IDS).logits.detach()):
            torch.testing.assert_close(block, want.eval()(IDS).logits.detach(), rtol=1e-5, atol=1e-6)
        save_pretrained(model, tmp_path / "ranks", max_shard_size="1KB")
    again, said = type(want).from_pretrained(tmp_path / "ranks", output_loading_info=True)
    assert not any(said.values()) and again.config.architectures == [type(want).__name__]
    assert again.state_dict().keys() == want.state_dict().keys()
    for name, x in want.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name


def test_no_rank_has_a_whole_sharded_tensor(tmp_path):
    """The largest tensor that reading makes is a block of the largest: a quarter of 64 x 512 numbers."""

    def made():
        return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))

    def on_rank(rank):
        net, mesh = on_meta(made), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        net = plan_for(net, mesh).apply(net, init=False)
        with Largest() as seen:
            load_pretrained(net, tmp_path)
        return seen.nbytes, net[0].weight.to_local().detach(), net[2].weight.to_local().detach()

    want = made()
    save_pretrained(want, tmp_path)
    for rank, (most, rows, columns) in enumerate(spmd.sim.run_ranks(on_rank, 4)):
        assert most == 64 * 512 * 4 // 4
        assert torch.equal(rows, want[0].weight.detach().chunk(4)[rank])
        assert torch.equal(columns, want[2].weight.detach().chunk(4, 1)[rank])


def on_real_ranks(rank: int, folder: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Fully sharded, in another dtype than the files; written by turns, and read again by all."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = on_meta(gpt).double()
    fully_shard(model.transformer.h[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_pretrained(model, f"{folder}/one")
    loss = model.eval()(IDS, labels=IDS).loss.item()
    save_pretrained(model, f"{folder}/ranks", max_shard_size=2000)
    again = gpt().double()
    load_pretrained(again, f"{folder}/ranks")
    return loss, dict(again.named_parameters())


def test_real_ranks_read_and_write(gloo4, tmp_path):
    torch.manual_seed(0)
    want = gpt()
    want.save_pretrained(tmp_path / "one")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "model.safetensors").write_text("of an earlier save")
    loss = want.double().eval()(IDS, labels=IDS).loss.item()
    for got, parameters in gloo4.run(on_real_ranks, str(tmp_path)):
        assert got == pytest.approx(loss, rel=1e-10)
        for name, p in want.named_parameters():
            assert torch.equal(parameters[name], p), name
    index = json.loads((tmp_path / "ranks" / "model.safetensors.index.json").read_text())
    assert {path.name for path in (tmp_path / "ranks").glob("*.safetensors")} == set(index["weight_map"].values())


def test_a_base_model_is_read_into_one_with_a_head_and_back(tmp_path):
    """What is not there keeps its numbers, or gets those of its initialiser, and is named as transformers names it."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**CONFIG | {"tie_word_embeddings": False})
    base, whole = transformers.GPT2Model(config), transformers.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "whole")
    kept = whole.lm_head.weight.detach().clone()
    with pytest.raises(ValueError, match="Missing 1: lm_head"):
        load_pretrained(whole, tmp_path / "base")
    keys = load_pretrained(whole, tmp_path / "base", strict=False)
    _, said = type(whole).from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(keys.missing_keys) == set(said["missing_keys"]) and not keys.unexpected_keys
    assert torch.equal(whole.lm_head.weight, kept) and torch.equal(whole.transformer.wte.weight, base.wte.weight)
    keys = load_pretrained(base, tmp_path / "whole", strict=False)
    assert keys.unexpected_keys == ("lm_head.weight",) and not keys.missing_keys
    with LocalTensorMode(2):
        spmd.manual_seed(0)
        model = on_meta(lambda: type(whole)(config))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = plan_for(model, mesh).apply(model, init=False)
        load_pretrained(model, tmp_path / "base", strict=False)
        assert isinstance(model.lm_head.weight, DTensor)
        assert 0.01 < model.lm_head.weight.detach().full_tensor().reconcile().std() < 0.03


MISTAKES = {
    "nothing": (lambda folder: load_pretrained(nn.Linear(2, 2), folder / "none"), FileNotFoundError, "neither"),
    "shape": (lambda folder: load_pretrained(nn.Linear(2, 3), folder), ValueError, "bias is .2. in .* and .3."),
    "names": (lambda folder: load_pretrained(nn.Sequential(nn.Linear(2, 2)), folder), ValueError, "Not expected 2"),
    "size": (lambda folder: save_pretrained(nn.Linear(2, 2), folder, max_shard_size="5 things"), ValueError, "'5GB'"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_said_before_anything_is_changed(what, tmp_path):
    mistake, kind, said = MISTAKES[what]
    save_pretrained(nn.Linear(2, 2), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(kind, match=said):
        mistake(tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
