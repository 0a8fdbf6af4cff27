"""Placements chosen for the whole program beside those chosen op by op, over models, plans, meshes and machines.

    python benchmarks/choose.py             # all of it: long
    python benchmarks/choose.py --layers 1 --meshes 2x2 --summary
    python benchmarks/choose.py --layers 1 --rows rows.txt --summary    # go on where an earlier run was ended
    python benchmarks/choose.py --short     # a model of each kind on one mesh and one machine, under two minutes
    python benchmarks/choose.py --train --meshes 2x2    # train each for three steps: is it what one device does?

Each row is a train step (forward, loss, backward, AdamW) of a small model under a plan - what the user says of
parameters and inputs - on a mesh of simulated links. For the choice by op and for the program's the table has the
modelled time, the bytes that a rank puts into collectives, their number, and the work of the busiest rank over an even
share of the work; then the seconds that choosing and writing took after the capture, the gap: how much dearer than
the best assignment of the model the chosen one may be at most, and what the model foresees of it. Nothing is run, and
seconds are the processor's. Exits 1 if the choice for the program costs more anywhere. Each model and plan comes once,
on some mesh and machine, before any comes again. `--summary` prints a line for each model and plan: the range over
meshes and machines.

Trained are smaller models on simulated ranks, three steps of SGD in float64, beside one device: the largest difference
of a loss or a parameter. The choice is that for `near` ranks, which spread all they can; on the other machines models
as small as these are not spread. What models compute in float32, whatever they are given, is computed in float64 here.
Exits 1 above 1e-10.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from _float64 import APART, all_in_float64
from _table import table
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import Shard
from spmd.expand.choose.price import program_cost
from spmd.mesh import Compute, Link, Machine, MeshTopoInfo, Way


@dataclass(frozen=True)
class Size:
    """Of the models and of a batch: layers, sequences, words in each, width, words of the vocabulary, heads, and the
    width of the huge layer."""

    layers: int
    batch: int
    time: int
    width: int
    words: int
    heads: int
    huge: int


PLANNED, TRAINED = Size(2, 16, 128, 256, 512, 8, 16384), Size(1, 8, 8, 32, 48, 4, 64)
GLOO = Machine(
    "gloo", (Way("ring", 150.0, (Link(60.0, 1.2), Link(120.0, 0.3))),), memory=Link(4.0, 5.0),
    compute=Compute(10.0, (("float32", 60.0),)),
)  # fmt: skip
"""Ranks on one CPU host, in round figures of a calibration."""

NEAR = Machine(
    "near", (Way("ring", 0.01, (Link(0.01, 100.0),)),), memory=Link(0.01, 100.0),
    compute=Compute(0.5, (("float64", 0.05),)),
)  # fmt: skip
"""Slow ranks on quick links, so that even the smallest model is worth to be spread."""

MACHINES = {"textbook": "textbook", "hopper": "hopper", "gloo": GLOO, "near": NEAR}
GRID = ("textbook", "hopper", "gloo")
MESHES = {"2x2": (2, 2), "2x4": (2, 4), "2x2x2": (2, 2, 2)}


class HugeLayer(nn.Module):
    """An MLP with one huge layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.up = nn.Linear(size.width // 4, size.width), nn.Linear(size.width, size.huge)
        self.down = nn.Linear(size.huge, size.width // 4)

    def forward(self, x):
        return self.down(F.relu(self.up(F.relu(self.first(x)))))


class ConvNet(nn.Module):
    """Convolutions, pooling and a classifier."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide = size.width // 8
        self.a, self.b = nn.Conv2d(3, wide, 3, padding=1), nn.Conv2d(wide, 2 * wide, 3, padding=1)
        self.head = nn.Linear(8 * wide, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.head(F.avg_pool2d(x, 2).flatten(1))


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and its tensor-parallel placements by pattern: the dim of each weight."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    tp: dict[str, int | Shard]
    loss: Callable = lambda model, x, y: F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    reads_words: bool = False


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


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA_TP = {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1, "*.gate_proj.weight": 0, "*.up_proj.weight": 0,
            "*.down_proj.weight": 1}  # fmt: skip
GPT2_TP = {"*.c_attn.*": Shard(-1, blocks=3), "*.c_fc.*": -1, "*.c_proj.weight": 0}


def cases(size: Size) -> dict[str, Case]:
    """The models in a size."""
    heads = {"num_attention_heads": size.heads, "hidden_size": size.width, "intermediate_size": 4 * size.width,
             "num_hidden_layers": size.layers}  # fmt: skip
    llama = heads | {"num_key_value_heads": size.heads // 2, "vocab_size": size.words, "use_cache": False}

    def words() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randint(3, size.words, (size.batch, size.time)) for _ in range(2))

    def images() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size.batch, 3, 16, 16), torch.randint(10, (size.batch,))

    def numbers() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(size.batch * 16, size.width // 4) for _ in range(2))

    def read(build: Callable, tp: dict[str, int | Shard], loss: Callable = logits) -> Case:
        return Case(build, words, tp, loss, reads_words=True)

    return {
        "gpt": read(lambda: GPT(GPTConfig(size.layers, size.heads, size.width, size.time, size.words)), {
            "*.attn.[qkv].weight": 0, "*.attn.out.weight": 1, "*.mlp.up.weight": 0, "*.mlp.down.weight": 1},
            Case.loss),
        "gpt2": read(stock("GPT2LMHeadModel", "GPT2Config", n_embd=size.width, n_layer=size.layers, n_head=size.heads,
                           vocab_size=size.words, n_positions=size.time, resid_pdrop=0.0, embd_pdrop=0.0,
                           attn_pdrop=0.0, use_cache=False), GPT2_TP),
        "llama": read(stock("LlamaForCausalLM", "LlamaConfig", **llama), LLAMA_TP),
        "bert": read(stock("BertForMaskedLM", "BertConfig", **heads, **NO_DROPOUT, vocab_size=size.words), {
            "*.query.weight": 0, "*.key.weight": 0, "*.value.weight": 0, "*.intermediate.dense.weight": 0}),
        "mixtral": read(stock("MixtralForCausalLM", "MixtralConfig", **llama, num_local_experts=4),
                        {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1}),
        "t5": read(stock("T5ForConditionalGeneration", "T5Config", d_model=size.width, d_kv=size.width // size.heads,
                         d_ff=4 * size.width, num_layers=size.layers, num_heads=size.heads, vocab_size=size.words,
                         dropout_rate=0.0, use_cache=False),
                   {"*.[qkv].weight": 0, "*.o.weight": 1, "*.wi.weight": 0, "*.wo.weight": 1}, sequences),
        "vit": Case(stock("ViTForImageClassification", "ViTConfig", **heads, **NO_DROPOUT, image_size=16, patch_size=4,
                          num_labels=10), images,
                    {"*.[qkv]_proj.*": 0, "*.o_proj.weight": 1, "*.fc1.*": 0, "*.fc2.weight": 1}, classes),
        "convnet": Case(lambda: ConvNet(size), images, {"*.b.weight": 0}, lambda m, x, y: F.cross_entropy(m(x), y)),
        "huge": Case(lambda: HugeLayer(size), numbers, {"*.up.weight": 0, "*.up.bias": 0, "*.down.weight": 1},
                     lambda m, x, y: F.mse_loss(m(x), y)),
    }  # fmt: skip


CASES = cases(PLANNED)


def plans(case: Case) -> Iterator[tuple[str, dict]]:
    """What a user may say to the compiler. The axes are dp, tp and, if there are three, pp."""
    inputs = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
    params = {pattern: {"tp": p if isinstance(p, Shard) else Shard(p)} for pattern, p in case.tp.items()}
    yield "nothing", {}
    yield "dp", {"inputs": inputs}
    yield "tp", {"params": params}
    yield "dp x tp", {"params": params, "inputs": inputs}
    yield "rows", {"params": {"*": {"dp": Shard(0)}}, "inputs": inputs}
    yield "zero 3", {"fully_shard": "dp", "inputs": inputs}
    yield "zero 3 x tp", {"fully_shard": "dp", "params": params, "inputs": inputs}
    yield "hybrid", {"fully_shard": "tp", "inputs": {k: {"dp": Shard(0), "tp": Shard(0)} for k in inputs}}
    if case.reads_words:
        yield "sequence", {"params": params, "inputs": {k: {"dp": Shard(0), "tp": Shard(1)} for k in inputs}}


def fitting(said: dict, model: nn.Module) -> dict:
    """The plan, with parameters that are too short for a pattern of all left replicated."""
    if "*" not in said.get("params", {}):
        return said
    short = {f"model.{name}": {} for name, p in model.named_parameters() if p.ndim == 0 or p.shape[0] < 8}
    return said | {"params": short | said["params"]}


def step_of(case: Case) -> Callable:
    def train_step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = case.loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


class Row:
    """A case under a plan: both programs, and what they cost."""

    def __init__(self, case: Case, mesh, said: dict) -> None:
        torch.manual_seed(0)
        self.model, (self.x, self.y) = case.build(), case.batch()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.case, self.mesh, self.said = case, mesh, fitting(said, self.model)
        self.step, self.captures = step_of(case), None

    def program(self, choose: str, machine: str):
        """The program by op or for the program on this machine, and the seconds of the processor that it took.

        The row is captured once: captures know no machine and no choice.
        """
        mesh = self.mesh.with_topology(MeshTopoInfo.from_mesh(self.mesh, machine=MACHINES[machine]))
        step = spmd.compile(self.step, mesh, choose=choose, bucket_mb=None, **self.said)
        self.captures = step._captures = self.captures or step._captures
        start = time.process_time()
        program = step.program_for(self.model, self.optimizer, self.x, self.y)
        return program, time.process_time() - start


def row_of(case: Case, said: dict, mesh_name: str) -> Row:
    """The case under a plan on a mesh."""
    shape = MESHES[mesh_name]
    return Row(case, spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "pp")[: len(shape)]), said)


def measured(row: Row, name: str, plan: str, mesh_name: str, machine: str) -> list[str]:
    """A row of the table. The last cell says where the program's choice costs more than the choice by op."""
    by_op, _ = row.program("op", machine)
    chosen, seconds = row.program("program", machine)
    costs = [program_cost(p) for p in (by_op, chosen)]
    sent = [sum(c.nbytes for c in p.collectives) for p in (by_op, chosen)]
    fine = costs[1].us <= costs[0].us * (1 + 1e-9)
    cells = [name, plan, mesh_name, machine, *(f"{c.us:,.0f}" for c in costs), f"{costs[1].us / costs[0].us:.3f}",
             *(f"{n / 1e6:.2f}" for n in sent), *(str(len(p.collectives)) for p in (by_op, chosen)),
             *(f"{c.work:,.0f}" for c in costs), f"{seconds:.2f}", f"{chosen.certificate.gap:.2%}",
             f"{chosen.certificate.solved:,.0f}", "" if fine else "DEARER"]  # fmt: skip
    return cells


def asked(args: argparse.Namespace) -> Iterator[tuple[str, str, dict, str, str]]:
    """Models, plans, meshes and machines. Each model and plan comes once before any comes again, and early some row of
    each model and some of each plan."""
    every = [(i, j, name, plan, said) for i, name in enumerate(args.only)
             for j, (plan, said) in enumerate(plans(CASES[name])) if not args.plans or plan in args.plans]  # fmt: skip
    every.sort(key=lambda at: (at[0] + at[1]) % 9)
    for machine, mesh in itertools.product(range(len(args.machines)), range(len(args.meshes))):
        for i, j, name, plan, said in every:
            at = (i + j + mesh) % len(args.meshes), (i + j // 3 + machine) % len(args.machines)
            yield name, plan, said, args.meshes[at[0]], args.machines[at[1]]


def known(file: Path | None) -> dict[tuple[str, ...], list[str]]:
    """The rows of an earlier run, by model, plan, mesh and machine."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {tuple(cells[:4]): cells for cells in (line.split("\t") for line in lines)}


# ---- trained ----------------------------------------------------------------------------------


def trained(case: Case, said: dict, choose: str, mesh_name: str, machine: str) -> float:
    """How far losses and parameters are from those of one device after three steps, on simulated ranks."""
    shape = MESHES[mesh_name]
    with all_in_float64():
        want = three_steps(case, None, said, choose)
        with spmd.LocalTensorMode(prod(shape)):
            mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "pp")[: len(shape)])
            mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=MACHINES[machine]))
            got = three_steps(case, mesh, said, choose)
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


def three_steps(case: Case, mesh, said: dict, choose: str) -> list[torch.Tensor]:
    """Losses and parameters."""
    torch.manual_seed(0)
    model, given = case.build().double(), [case.batch() for _ in range(3)]
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # grouped products have no kernel for float64
    given = [[x.double() if x.is_floating_point() else x for x in each] for each in given]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = step_of(case)
    if mesh is not None:
        step = spmd.compile(step, mesh, choose=choose, **fitting(said, model))
    losses = [step(model, optimizer, *each) for each in given]
    return [_whole(x) for x in (*losses, *model.parameters())]


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor().reconcile() if isinstance(x, spmd.DTensor) else x


# ---- tables -----------------------------------------------------------------------------------

HEADER = ["model", "plan", "mesh", "machine", "by op, us", "program, us", "ratio", "by op, MB", "program, MB",
          "collectives", "of program", "work, us", "of program", "choosing, s", "gap", "foreseen, us", ""]  # fmt: skip


SUMMARY = ["model", "plan", "rows", "ratio", "MB of by op", "of program", "collectives", "of program", "work of by op",
           "of program", "gap"]  # fmt: skip


def summary(rows: list[list[str]]) -> list[list[str]]:
    """A line for each model and plan: the ranges over meshes and machines; of the work the median."""
    found = []
    for key in dict.fromkeys((r[0], r[1]) for r in rows):
        own = [r for r in rows if (r[0], r[1]) == key]
        work = [f"{statistics.median(float(r[i].replace(',', '')) for r in own):,.0f}" for i in (11, 12)]
        found.append([*key, str(len(own)), *(_range([r[i] for r in own]) for i in (6, 7, 8, 9, 10)), *work,
                      max((r[14] for r in own), key=lambda x: float(x[:-1]))])  # fmt: skip
    return found


def _range(cells: list[str]) -> str:
    ordered = sorted(cells, key=float)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def train(args: argparse.Namespace) -> int:
    found, good, every = [], True, cases(TRAINED)
    for name, plan, said, mesh_name, machine in asked(args):
        for choose in args.choose:
            apart = trained(every[name], said, choose, mesh_name, machine)
            found.append([name, plan, mesh_name, choose, f"{apart:.0e}", "" if apart <= APART else "DIFFERS"])
            print(*found[-1], sep="  ", flush=True)
            good &= apart <= APART
    print(table(["model", "plan", "mesh", "chosen by", "apart", ""], found, left=4))
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models")
    parser.add_argument("--plans", nargs="+", help="these plans")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--machines", nargs="+", choices=MACHINES, help=f"(default: {' '.join(GRID)}; of --train near)")
    parser.add_argument("--layers", type=int, default=PLANNED.layers, help="of each model (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="one mesh, one machine, four plans")
    parser.add_argument("--rows", type=Path, help="a file of rows: those in it are not made again, others are added")
    parser.add_argument("--summary", action="store_true", help="a line for each model and plan")
    parser.add_argument("--train", action="store_true", help="train each for three steps instead")
    parser.add_argument("--choose", nargs="+", choices=("op", "program"), default=["op", "program"], help="of --train")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.short:
        args.meshes, args.machines = ["2x2"], args.machines or ["textbook"]
        args.plans = args.plans or ["nothing", "dp x tp", "zero 3"]
    args.machines = args.machines or (["near"] if args.train else GRID)
    if args.train:
        return train(args)
    rows = known(args.rows)
    every = cases(replace(PLANNED, layers=args.layers))
    for name, plan, said, mesh_name, machine in asked(args):
        if (name, plan, mesh_name, machine) in rows:
            continue
        cells = measured(row_of(every[name], said, mesh_name), name, plan, mesh_name, machine)
        print(*cells, sep="  ", flush=True)
        rows[tuple(cells[:4])] = cells
        if args.rows:
            with args.rows.open("a") as file:
                print(*cells, sep="\t", file=file)
    rows, dearer = list(rows.values()), sum(cells[-1] == "DEARER" for cells in rows.values())
    print(table(SUMMARY, summary(rows), left=2) if args.summary else table(HEADER, rows, left=4))
    print(f"\n{len(rows)} rows, {dearer} dearer than by op; torch {torch.__version__}")
    return int(dearer > 0)


if __name__ == "__main__":
    sys.exit(main())
