"""Layers with packed weights train as on one device, and send what Megatron sends: the split of q, k and v is free."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard
from spmd.tensor.redistribute.plan import steps_made
from tests.expand.side_by_side import Case, train_step

HEAD = 4


class Block(nn.Module):
    """Attention with one weight for q, k and v, and an MLP with one weight for gate and up."""

    def __init__(self, heads: int = 4):
        super().__init__()
        d = heads * HEAD
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.gate_up, self.down = nn.Linear(d, 2 * 2 * d, bias=False), nn.Linear(2 * d, d)
        self.head = nn.Linear(d, 5)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.norm2(x)).split(self.gate_up.out_features // 2, dim=-1)
        return self.head(x + self.down(F.silu(gate) * up))


PLAN = {
    "qkv.*": {"tp": Shard(0, HEAD, blocks=3)},
    "out.weight": {"tp": Shard(1, HEAD)},
    "gate_up.weight": {"tp": Shard(0, blocks=2)},
    "down.weight": {"tp": Shard(1)},
}


def batches(heads: int, n: int = 2):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, 6, heads * HEAD, generator=g, dtype=torch.float64)
    return list(zip(x, torch.randint(0, 5, (n, 4, 6), generator=g), strict=True))


def case(heads: int, **more) -> Case:
    return Case(model=lambda: Block(heads).double(), batches=batches(heads), params=PLAN, **more)


@pytest.mark.parametrize("heads, shape", [(4, (1, 4)), (3, (1, 2)), (2, (1, 4)), (4, (2, 2))])
def test_a_compiled_step_trains_as_on_one_device(heads, shape):
    """All tensors of model and AdamW, in float64; heads and features are shared out evenly, unevenly, and to some."""
    case(heads).check(shape, rtol=1e-10, atol=1e-10)


class Stored(Case):
    """The same with parameters in shards over dp, inside those of tp."""

    def compiled(self, mesh):
        return spmd.compile(self.step, mesh, params=self.params, inputs=self.inputs, fully_shard="dp")


def test_packed_parameters_are_stored_in_shards():
    stored = Stored(model=lambda: Block(4).double(), batches=batches(4), params=PLAN)
    places = stored.check((2, 2), lambda step, *_: str(step.program.places["model.qkv.weight"].stored), rtol=1e-10,
                          atol=1e-10)  # fmt: skip
    assert places in ("f64[3x16@tp,dp, 16]", "f64[3x16@tp, 16@dp]")


def test_eager_and_compiled_send_the_all_reduces_of_megatron():
    """One for each row-parallel layer forward, and one for each column-parallel layer backward.

    Eagerly the gradients of the norms are summed by themselves.
    """
    want = ["all_reduce"] * 4
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        eager = spmd.distribute_module(Block().double(), mesh, params=PLAN)
        optimizer = torch.optim.AdamW(eager.parameters())
        x, y = (spmd.distribute_tensor(t, mesh, [spmd.Replicate()]) for t in batches(4)[0])
        with steps_made() as steps:
            train_step(eager, optimizer, x.requires_grad_(), y)
        assert [step.kind for step in steps if step.sends and step.before.ndim > 1] == want
        model = Block().double()
        step = spmd.compile(train_step, mesh, params=PLAN)
        step(model, torch.optim.AdamW(model.parameters()), *batches(4)[0])
        assert [c.kind for c in step.program.collectives] == want


def test_views_of_packed_weights_are_views():
    """A write into q's part of the weight is seen in the weight, and the other way round."""
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        w = spmd.distribute_tensor(torch.zeros(24, 4), mesh, [Shard(0, blocks=3)])
        q, k, v = w.chunk(3)
        rest = w[8:]
        k.fill_(2)
        w[16:].add_(3)
        q[:, 1:].sub_(1)
        want = torch.zeros(24, 4)
        want[8:16], want[16:] = 2, 3
        want[:8, 1:] = -1
        for x, part in ((w, want), (q, want[:8]), (k, want[8:16]), (v, want[16:]), (rest, want[8:])):
            assert torch.equal(x.full_tensor().reconcile(), part)


def conv1d_model(**_):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=32, n_positions=8, resid_pdrop=0, embd_pdrop=0,
                        attn_pdrop=0)  # fmt: skip
    return GPT2LMHeadModel(config).double()


GPT2 = {
    "*.attn.c_attn.weight": {"tp": Shard(1, blocks=3)},
    "*.attn.c_attn.bias": {"tp": Shard(0, blocks=3)},
    "*.attn.c_proj.weight": {"tp": Shard(0)},
    "*.mlp.c_fc.weight": {"tp": Shard(1)},
    "*.mlp.c_fc.bias": {"tp": Shard(0)},
    "*.mlp.c_proj.weight": {"tp": Shard(0)},
}


def language_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = model(input_ids=x, labels=y, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_gpt2_of_transformers_sends_the_all_reduces_of_megatron():
    """Its Conv1D keeps a weight as (in, out), and splits the result into q, k and v."""
    pytest.importorskip("transformers")
    g = torch.Generator().manual_seed(1)
    ids = [tuple(torch.randint(0, 32, (2, 2, 8), generator=g)) for _ in range(2)]
    gpt2 = Case(model=conv1d_model, step=language_step, batches=ids, params=GPT2, inputs={})
    sent = gpt2.check((1, 4), lambda step, *_: [c.kind for c in step.program.collectives], rtol=1e-10, atol=1e-10)
    assert sent == ["all_reduce"] * 8  # of two layers
