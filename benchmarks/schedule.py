"""What passes hide of what is sent: modelled on known machines, without a GPU and without ranks.

    python benchmarks/schedule.py                         # all models, plans, machines and hosts: half an hour
    python benchmarks/schedule.py --short                 # two layers of GPT-2 XL, on two machines: a minute
    python benchmarks/schedule.py --only "gpt2-xl, zero3" --machines hopper --hosts 1 2

Models are on the meta device, in bf16 with gradients reduced in fp32, trained by AdamW; 8 sequences of 1,024 tokens for
each data-parallel rank of GPT-2 XL, one of 4,096 for Llama. Hosts have 8 GPUs; tp has 4 of them.
For each program the table has, as it came and after `overlap`: the step, what of it waits for what is sent, the gap to
the lower bound, the gap to the bound of all orders that need no more memory than the program as it came, the most bytes
alive, and how many collectives are sent; and the processor's seconds of the pass.

Left out: what the host takes to launch, and what collectives take from the kernels beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from _table import table

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import MeshTopoInfo, Shard
from spmd.expand.collector import collector_off
from spmd.expand.passes.passes import Overlap

GPUS = 8
TP = 4
MOST_LEFT = 0.4
"""The bar: the part of the waiting that may be left."""

GPT_TP = {
    "*.attn.[qkv].weight": {"tp": Shard(0)}, "*.attn.[qkv].bias": {"tp": Shard(0)},
    "*.attn.out.weight": {"tp": Shard(1)}, "*.mlp.up.*": {"tp": Shard(0)}, "*.mlp.down.weight": {"tp": Shard(1)},
}  # fmt: skip
LLAMA_TP = {
    "*.[qkv]_proj.weight": {"tp": Shard(0)}, "*.o_proj.weight": {"tp": Shard(1)},
    "*.gate_proj.weight": {"tp": Shard(0)}, "*.up_proj.weight": {"tp": Shard(0)},
    "*.down_proj.weight": {"tp": Shard(1)},
}  # fmt: skip


def gpt2_xl(layers: int):
    return GPT(GPTConfig(n_layer=layers, n_head=25, n_embd=1600, block_size=1024, vocab=50257))


class Llama(torch.nn.Module):
    """The logits of Hugging Face's Llama of 8B parameters."""

    def __init__(self, layers: int):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # heavy, and for this model alone

        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, x):
        return self.model(input_ids=x).logits


@dataclass(frozen=True)
class Model:
    build: object
    layers: int
    batch: int
    time: int
    tp: dict


MODELS = {
    "gpt2-xl": Model(gpt2_xl, 48, 8, 1024, GPT_TP),
    "llama-8b": Model(Llama, 32, 1, 4096, LLAMA_TP),
}
PLANS = ("dp", "zero3", "zero3 x tp")


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass
class Row:
    """A model under a plan on so many hosts."""

    name: str
    plan: str
    hosts: int
    layers: int

    def program(self, machine: str):
        """The program as it comes, on this machine."""
        kind, ranks = MODELS[self.name], GPUS * self.hosts
        tp = TP if "tp" in self.plan else 1
        mesh = spmd.DeviceMesh("cpu", torch.arange(ranks).view(-1, tp).tolist(), mesh_dim_names=("dp", "tp"))
        mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=GPUS, machine=machine))
        with torch.device("meta"):
            model = kind.build(self.layers)
        said = {"fully_shard": "dp"} if "zero3" in self.plan else {}
        said |= {"params": kind.tp} if tp > 1 else {}
        step = spmd.compile(
            train_step, mesh, inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}, passes=(), **said,
            mixed_precision=spmd.MixedPrecision(torch.bfloat16, torch.float32),
        )  # fmt: skip
        x = torch.zeros(kind.batch * ranks // tp, kind.time, dtype=torch.int64)
        return step.program_for(model, torch.optim.AdamW(model.parameters()), x, x)


def measured(row: Row, machine: str) -> tuple[list[str], bool]:
    """A row of the table, and whether it keeps the bars."""
    program = row.program(machine)
    start = time.process_time()
    with collector_off():  # as compile does
        after = Overlap()(program)
    seconds = time.process_time() - start
    a, b = program.timeline(), after.timeline()
    kept = b.exposed_us / a.exposed_us if a.exposed_us else 0.0
    fine = kept <= MOST_LEFT and b.peak <= a.peak
    nodes, sent = len(program.graph.nodes), [str(len(p.collectives)) for p in (program, after)]
    cells = [row.name, row.plan, str(row.hosts), machine, f"{nodes:,}", *(f"{t.us / 1e3:,.1f}" for t in (a, b))]
    within = b.us / b.bound_within(a.peak) - 1
    cells += [*(f"{t.exposed_us / 1e3:,.1f}" for t in (a, b)), f"{kept - 1:+.0%}", f"{b.gap:.1%}", f"{within:.1%}"]
    return [*cells, f"{a.peak / 2**30:.1f}", f"{b.peak / 2**30:.1f}", *sent, f"{seconds:.1f}"], fine


HEAD = [
    "model", "plan", "hosts", "machine", "nodes", "ms", "after", "waits ms", "after", "change", "gap", "within", "GiB",
    "after", "sends", "after", "pass s",
]  # fmt: skip


def rows_of(args: argparse.Namespace) -> Iterator[tuple[Row, str]]:
    for name, kind in MODELS.items():
        for plan in PLANS:
            if args.only and f"{name}, {plan}" not in args.only:
                continue
            for hosts in args.hosts:
                for machine in args.machines:
                    yield Row(name, plan, hosts, args.layers or kind.layers), machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two layers of GPT-2 XL")
    parser.add_argument("--only", nargs="*", help='such as "gpt2-xl, zero3"')
    parser.add_argument("--layers", type=int, help="how many layers; by default all")
    parser.add_argument("--hosts", nargs="*", type=int, default=[1, 2, 16])
    parser.add_argument("--machines", nargs="*", default=["hopper", "ampere"])
    args = parser.parse_args()
    if args.short:
        args.only, args.layers, args.hosts = [f"gpt2-xl, {plan}" for plan in PLANS], 2, [1, 2]
    found, all_fine = [], True
    for row, machine in rows_of(args):
        cells, fine = measured(row, machine)
        found.append(cells)
        all_fine &= fine
        print("  ".join(cells), flush=True)
    print(table(HEAD, found))
    sys.exit(not all_fine)


if __name__ == "__main__":
    main()
