"""Placements chosen for the whole program beside those chosen op by op, over models, plans, meshes and machines.

    python benchmarks/choose.py             # all of it: some minutes
    python benchmarks/choose.py --short     # one mesh, one machine, under two minutes

Each row is a train step (forward, loss, backward, AdamW) of a small model under a plan - what the user says of
parameters and inputs - on a mesh of simulated links. For the choice by op and for the program's the table has the
modelled time, the bytes that a rank puts into collectives, their number, and the work of the busiest rank over an even
share of the work; then the seconds that choosing took, and the gap: how much dearer than the best assignment of the
model the chosen one may be at most. Nothing is run. Exits 1 if the choice for the program costs more anywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from _table import table
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import Shard
from spmd.expand.choose.price import program_cost
from spmd.mesh import Compute, Link, Machine, MeshTopoInfo, Way

LAYERS, BATCH, TIME, WIDTH, WORDS = 2, 16, 128, 256, 512
GLOO = Machine(
    "gloo", (Way("ring", 150.0, (Link(60.0, 1.2), Link(120.0, 0.3))),), memory=Link(4.0, 5.0),
    compute=Compute(10.0, (("float32", 60.0),)),
)  # fmt: skip
"""Ranks on one CPU host, in round figures of a calibration."""

MACHINES = {"textbook": "textbook", "hopper": "hopper", "gloo": GLOO}
MESHES = {"2x2": (2, 2), "2x4": (2, 4), "2x2x2": (2, 2, 2)}


class HugeLayer(nn.Module):
    """An MLP with one huge layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 16384), nn.Linear(16384, 64)

    def forward(self, x):
        return self.down(F.relu(self.up(F.relu(self.first(x)))))


class ConvNet(nn.Module):
    """Convolutions, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(64 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.head(F.avg_pool2d(x, 2).flatten(1))


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and its tensor-parallel placements by pattern: the dim of each weight."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    tp: dict[str, int]
    loss: Callable = lambda model, x, y: F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def words() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (BATCH, TIME)), torch.randint(WORDS, (BATCH, TIME))


def stock(model: str, config: str, **settings) -> Callable[[], nn.Module]:
    import transformers

    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings))


def logits(model, x, y):
    """The loss of a language model of `transformers`."""
    return F.cross_entropy(model(x).logits.flatten(0, -2), y.flatten())


def sequences(model, x, y):
    return F.cross_entropy(model(input_ids=x, decoder_input_ids=x).logits.flatten(0, -2), y.flatten())


def classes(model, x, y):
    return F.cross_entropy(model(x).logits, y)


HEADS = {"num_attention_heads": 8, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
LLAMA = HEADS | {"num_key_value_heads": 4, "vocab_size": WORDS, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA_TP = {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1, "*.gate_proj.weight": 0, "*.up_proj.weight": 0,
            "*.down_proj.weight": 1}  # fmt: skip


def images(n: int = 10, size: int = 16) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randn(BATCH, 3, size, size), torch.randint(n, (BATCH,)))


CASES = {
    "gpt": Case(lambda: GPT(GPTConfig(LAYERS, 8, WIDTH, TIME, WORDS)), words, {
        "*.attn.[qkv].weight": 0, "*.attn.out.weight": 1, "*.mlp.up.weight": 0, "*.mlp.down.weight": 1}),
    "gpt2": Case(stock("GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=LAYERS, n_head=8, vocab_size=WORDS,
                       n_positions=TIME, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False), words,
                 {"*.c_fc.weight": 1, "*.mlp.c_proj.weight": 0}, logits),
    "llama": Case(stock("LlamaForCausalLM", "LlamaConfig", **LLAMA), words, LLAMA_TP, logits),
    "bert": Case(stock("BertForMaskedLM", "BertConfig", **HEADS, **NO_DROPOUT, vocab_size=WORDS), words,
                 {"*.query.weight": 0, "*.key.weight": 0, "*.value.weight": 0, "*.intermediate.dense.weight": 0},
                 logits),
    "mixtral": Case(stock("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4), words,
                    {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1}, logits),
    "t5": Case(stock("T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_kv=32, d_ff=4 * WIDTH,
                     num_layers=LAYERS, num_heads=8, vocab_size=WORDS, dropout_rate=0.0, use_cache=False), words,
               {"*.[qkv].weight": 0, "*.o.weight": 1, "*.wi.weight": 0, "*.wo.weight": 1}, sequences),
    "vit": Case(stock("ViTForImageClassification", "ViTConfig", **HEADS, **NO_DROPOUT, image_size=16, patch_size=4,
                      num_labels=10), images(), {"*.intermediate.dense.weight": 0}, classes),
    "convnet": Case(ConvNet, images(), {"*.b.weight": 0}, lambda m, x, y: F.cross_entropy(m(x), y)),
    "huge": Case(HugeLayer, lambda: (torch.randn(256, 64), torch.randn(256, 64)),
                 {"*.up.weight": 0, "*.up.bias": 0, "*.down.weight": 1}, lambda m, x, y: F.mse_loss(m(x), y)),
}  # fmt: skip


def plans(case: Case) -> Iterator[tuple[str, dict, dict]]:
    """What a user may say: placements of parameters and of inputs. The axes are dp, tp and, if there are three, pp."""
    batch = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
    tp = {pattern: {"tp": Shard(dim)} for pattern, dim in case.tp.items()}
    zero = {"*": {"dp": Shard(0)}}
    yield "nothing", {}, {}
    yield "dp", {}, batch
    yield "tp", tp, {}
    yield "dp x tp", tp, batch
    yield "zero 3", zero, batch
    yield "zero 3 x tp", {p: {"dp": Shard(0), **placements} for p, placements in tp.items()} | zero, batch
    yield "hybrid", {"*": {"tp": Shard(0)}}, {k: {"dp": Shard(0), "tp": Shard(0)} for k in batch}
    if case.batch is words:
        yield "sequence", tp, {k: {"dp": Shard(0), "tp": Shard(1)} for k in batch}


def fits(params: dict, model: nn.Module) -> dict:
    """The placements, with what is too short for them left replicated."""
    short = {f"model.{name}": {} for name, p in model.named_parameters() if p.ndim == 0 or p.shape[0] < 8}
    return short | params if "*" in params else params


class Row:
    """A case under a plan: both programs, and what they cost."""

    def __init__(self, case: Case, mesh, params: dict, inputs: dict) -> None:
        torch.manual_seed(0)
        self.model, (self.x, self.y) = case.build(), case.batch()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss, self.mesh = case.loss, mesh
        self.said = {"params": fits(params, self.model), "inputs": inputs}

    def program(self, choose: str):
        """The program by op or for the program, and the seconds that it took."""
        loss_of = self.loss

        def train_step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        step = spmd.compile(train_step, self.mesh, choose=choose, bucket_mb=None, **self.said)
        start = time.perf_counter()
        program = step.program_for(self.model, self.optimizer, self.x, self.y)
        return program, time.perf_counter() - start


def measured(name: str, plan: str, params: dict, inputs: dict, mesh_name: str, machine: str) -> tuple[list[str], bool]:
    """A row of the table, and whether the program's choice costs at most what the choice by op costs."""
    shape = MESHES[mesh_name]
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "pp")[: len(shape)])
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=MACHINES[machine]))
    row = Row(CASES[name], mesh, params, inputs)
    by_op, first = row.program("op")
    chosen, seconds = row.program("program")
    costs = [program_cost(p) for p in (by_op, chosen)]
    sent = [sum(c.nbytes for c in p.collectives) for p in (by_op, chosen)]
    fine = costs[1].us <= costs[0].us * (1 + 1e-9)
    cells = [name, plan, mesh_name, machine, *(f"{c.us:,.0f}" for c in costs), f"{costs[1].us / costs[0].us:.3f}",
             *(f"{n / 1e6:.2f}" for n in sent), *(str(len(p.collectives)) for p in (by_op, chosen)),
             *(f"{c.work:,.0f}" for c in costs), f"{seconds - first:.2f}", f"{chosen.certificate.gap:.2%}"]  # fmt: skip
    return cells, fine


HEADER = ["model", "plan", "mesh", "machine", "by op, us", "program, us", "ratio", "by op, MB", "program, MB",
          "collectives", "of program", "work, us", "of program", "choosing, s", "gap"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models")
    parser.add_argument("--plans", nargs="+", help="these plans")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--short", action="store_true", help="one mesh, one machine, five models")
    args = parser.parse_args()
    if args.short:
        args.only, args.meshes, args.machines = ["gpt", "llama", "t5", "convnet", "huge"], ["2x4"], ["textbook"]
    rows, dearer = [], 0
    for name in args.only:
        for plan, params, inputs in plans(CASES[name]):
            for mesh_name in args.meshes if not args.plans or plan in args.plans else ():
                for machine in args.machines:
                    cells, fine = measured(name, plan, params, inputs, mesh_name, machine)
                    print(*cells, "" if fine else "DEARER", sep="  ", flush=True)
                    rows.append(cells)
                    dearer += not fine
    print(table(HEADER, rows, left=4))
    print(f"\n{len(rows)} rows, {dearer} dearer than by op; torch {torch.__version__}")
    return int(dearer > 0)


if __name__ == "__main__":
    sys.exit(main())
