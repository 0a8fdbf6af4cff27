"""Does a program compute the same bits after each pass, and after every pair of passes?

    python benchmarks/bitwise.py                     # all models, plans, passes and pairs on simulated ranks
    python benchmarks/bitwise.py --only llama        # some models
    python benchmarks/bitwise.py --gloo              # each model under each plan once, on four gloo ranks
    python benchmarks/bitwise.py --short             # a GPT under two plans, for CI

A small GPT, and Llama, BERT and a mixture of experts of `transformers`, are trained for two steps of AdamW in
deterministic mode on four ranks

    dp 4      the batch sharded
    tp 4      weights sharded, the batch whole
    2x2       both
    ZeRO-3    parameters, gradients and the optimiser's state stored in shards, gathered to compute with
    hybrid    the batch sharded along two axes, parameters stored in shards along one of them

as the program came, and after each pass and each pair of passes, one of them twice included. `verify()` follows each
pass. Losses, parameters and the optimiser's state are compared with those of the program as it came: bit by bit, where
the passes say that bits stay, and within a rounding of float32 where they may change (`fused_updates`, and products in
`pieces`, which have another kernel where rows are few). Costs are those of Hopper, where buckets are large and nothing
is hidden by itself. Equal programs are run once. Exits 1 if a value differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import transformers
from _table import table
from models import STOCK, batches, made, tensor_parallel
from models import train_step as train_stock
from peaks import BY_COLUMNS
from torch import nn
from workers import Pool  # starts processes

import spmd
from examples.gpt import GPT, GPTConfig
from examples.gpt import train_step as train_gpt
from spmd import MeshTopoInfo, Shard
from spmd.expand.passes.chunks import in_pieces
from spmd.expand.passes.passes import PASSES, Buckets, with_passes
from spmd.expand.program import Program
from spmd.expand.verify import ProgramFault
from spmd.mesh import as_rank

ROUNDING = 2e-5
"""What float32 may differ by after two steps, relative to the largest value of a tensor, where bits may change."""
LEAST = 1e-3
"""A smaller tensor is compared as if its largest value were this: some gradients are nothing but roundings. For the
same reason AdamW has an epsilon of that size, as it would make whole steps of them."""


def pieces(program: Program) -> Program:
    """All products beside a collective in two pieces, whether that pays or not."""
    return in_pieces(program, 2)


def tried() -> dict[str, Any]:
    """The passes by name. In place of `chunks`, which cuts only what pays, what it would do everywhere."""
    found = {name: one for name, one in PASSES.items() if name != "chunks"}
    return found | {"pieces": pieces, "small buckets": Buckets(0.01, 0.01)}


TENSOR_PARALLEL = {
    "*.attn.[qkv].weight": {"tp": Shard(0)}, "*.attn.[qkv].bias": {"tp": Shard(0)},
    "*.attn.out.weight": {"tp": Shard(1)}, "*.mlp.up.*": {"tp": Shard(0)}, "*.mlp.down.weight": {"tp": Shard(1)},
}  # fmt: skip
ROWS = {"dp": Shard(0)}
PLANS = {
    "dp 4": ((4, 1), False, ROWS, {}),
    "tp 4": ((1, 4), True, ROWS, {}),
    "2x2": ((2, 2), True, ROWS, {}),
    "ZeRO-3": ((4, 1), False, ROWS, {"fully_shard": "dp"}),
    "hybrid": ((2, 2), False, {"dp": Shard(0), "tp": Shard(0)}, {"fully_shard": "tp"}),
}
"""By plan the shape of the mesh, whether weights are sharded along tp, where the batch is, and what else is said."""


@dataclass(frozen=True)
class Subject:
    """A model with its step. given: a model, and two batches, the same each time. tp: weights that are sharded."""

    given: Callable[[], tuple[nn.Module, Sequence[tuple]]]
    step: Callable
    inputs: tuple[str, ...]
    tp: Callable[[nn.Module], dict]


def small_gpt() -> tuple[nn.Module, list[tuple]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, vocab=96, block_size=16))
    return model, [tuple(torch.randint(0, 96, (2, 8, 16))) for _ in range(2)]


def stock(name: str) -> Subject:
    def given() -> tuple[nn.Module, list[tuple]]:
        model, each = made(STOCK[name]), batches(STOCK[name])
        return model.float(), [(batch,) for batch in each]

    def tp(model: nn.Module) -> dict:
        columns = {pattern: {"tp": Shard(dim)} for pattern, dim in BY_COLUMNS.get(name, {}).items()}
        return tensor_parallel(model) or columns

    return Subject(given, train_stock, ("batch.*",), tp)


SUBJECTS = {
    "gpt": Subject(small_gpt, train_gpt, ("tokens", "targets"), lambda model: TENSOR_PARALLEL),
    "llama": stock("llama"), "bert": stock("bert"), "mixtral": stock("mixtral"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model under a plan."""

    model: str
    plan: str

    def compiled(self, passes: Sequence[Any]) -> tuple[spmd.CompiledStep, nn.Module, Any, Sequence[tuple]]:
        """The step, a model, its optimiser, and the batches."""
        subject = SUBJECTS[self.model]
        shape, along_tp, batch, said = PLANS[self.plan]
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=4, machine="hopper"))
        model, given = subject.given()
        said = said | ({"params": subject.tp(model)} if along_tp else {})
        inputs = dict.fromkeys(subject.inputs, batch)
        step = spmd.compile(subject.step, mesh, inputs=inputs, passes=passes, **said)
        return step, model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), given

    def program(self) -> Program:
        """The program of a later step as it comes, made without ranks."""
        with as_rank(0):
            step, model, optimizer, given = self.compiled(())
            SUBJECTS[self.model].step(model, optimizer, *given[0])
            return step.program_for(model, optimizer, *given[1])

    def trained(self, passes: Sequence[Any]) -> list[torch.Tensor]:
        """What two steps return, and all state behind them, on these ranks."""
        torch.use_deterministic_algorithms(True)
        step, model, optimizer, given = self.compiled(passes)
        found = [step(model, optimizer, *batch) for batch in given]
        state = [x for p in model.parameters() for x in optimizer.state[p].values()]
        return [_whole(x) for x in (*found, *model.parameters(), *state)]

    def simulated(self, passes: Sequence[Any]) -> list[torch.Tensor]:
        """The same on simulated ranks, which must agree."""
        with spmd.LocalTensorMode(4):
            return [x.reconcile() if isinstance(x, spmd.LocalTensor) else x for x in self.trained(passes)]


def _whole(x: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        return torch.tensor(x)
    x = x.detach()
    return (x.full_tensor() if isinstance(x, spmd.DTensor) else x).clone()


def far_off(found: list[torch.Tensor], want: list[torch.Tensor], same_bits: bool) -> str:
    """How far values are from those of the program as it came, if that is too far."""
    worst = 0.0
    for a, b in zip(found, want, strict=True):
        if not torch.equal(a, b):
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(LEAST)))
    return f"{worst:.0e}" if worst > (0.0 if same_bits else ROUNDING) else ""


def lists(names: Sequence[str], singly: bool) -> Iterator[tuple[str, ...]]:
    """Each pass alone, and every pair in both orders."""
    yield from ((name,) for name in names)
    if not singly:
        yield from itertools.product(names, repeat=2)


def row(case: Case, singly: bool) -> tuple[list[str], bool]:
    """How many lists of passes were tried, how many programs they made, and what differs."""
    began, passes = time.process_time(), tried()
    as_it_came = case.program()
    runs: dict[str, tuple[bool, str]] = {str(as_it_came): (True, "")}
    want, wrong, many = case.simulated(()), [], 0
    for names in lists(tuple(passes), singly):
        chosen = [passes[name] for name in names]
        same_bits = all(getattr(one, "same_bits", False) for one in chosen)
        many += 1
        try:
            text = str(with_passes(as_it_came, chosen))
        except ProgramFault as e:
            wrong.append(f"{', '.join(names)}: {str(e)[:160]}")
            continue
        if text not in runs or (same_bits and not runs[text][0]):
            runs[text] = same_bits, far_off(case.simulated(chosen), want, same_bits)
        if runs[text][1]:
            wrong.append(f"{', '.join(names)}: {runs[text][1]}")
    cells = [case.model, case.plan, str(many), str(len(runs)), "; ".join(wrong), f"{time.process_time() - began:.0f}"]
    return cells, not wrong


ON_GLOO = {
    "orders": ("fewer_moves", "numbers_late", "schedule"),
    "buckets": ("fewer_moves", "numbers_late", "buckets", "schedule"),
    "small buckets": ("numbers_late", Buckets(0.01, 0.01)),
}
"""The passes on a real network, by what they change."""


def on_gloo(case: Case) -> str:
    """How far a rank of a real network is from the program as it came, after many passes; empty if it is not.

    In `spmd.deterministic()`: gloo itself adds an element up in an order that follows from its place in the buffer, so
    that buckets may change roundings otherwise. Simulated ranks add in the order of the ranks in any case.
    """
    with spmd.deterministic():
        want = case.trained(())
        found = {text: far_off(case.trained(passes), want, True) for text, passes in ON_GLOO.items()}
    return "; ".join(f"{text} {off}" for text, off in found.items() if off)


def _on_rank(rank: int, model: str, plan: str) -> str:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    return on_gloo(Case(model, plan))


def gloo_rows(cases: Sequence[Case]) -> Iterator[tuple[list[str], bool]]:
    pool = Pool(4)
    for case in cases:
        wrong = sorted({found for found in pool.run(_on_rank, case.model, case.plan, timeout=600.0) if found})
        yield [case.model, case.plan, "; ".join(wrong)], not wrong
    pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="these models")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), help="these plans")
    parser.add_argument("--gloo", action="store_true", help="on four gloo ranks, many passes at once")
    parser.add_argument("--singly", action="store_true", help="each pass alone, without pairs")
    parser.add_argument("--short", action="store_true", help="a GPT under two plans, each pass alone")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    cases = [Case(model, plan) for model in args.only for plan in args.plans]
    if args.short:
        cases = [Case("gpt", "2x2"), Case("gpt", "ZeRO-3")]
    rows, good = [], True
    made = gloo_rows(cases) if args.gloo else (row(case, args.short or args.singly) for case in cases)
    for cells, fine in made:
        print("  ".join(cells), flush=True)
        rows.append(cells)
        good &= fine
    head = ["model", "plan", "differs"] if args.gloo else ["model", "plan", "lists", "programs", "differs", "cpu s"]
    print(table(head, rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
