"""Does every kind of step train compiled as it does on one device?

    python benchmarks/steps.py                       # all kinds, all plans, float64 and float32, simulated ranks
    python benchmarks/steps.py --only dropout GAN    # some, by parts of their names
    python benchmarks/steps.py --gloo                # each once on four gloo ranks, beside the simulation, bit by bit
    python benchmarks/steps.py --short               # a few, for CI

The kinds are those of `step_kinds.py`. Each runs five steps on four ranks

    dp 4      the batch sharded
    tp 4      weights sharded, the batch whole
    2x2       both
    zero 3    parameters, gradients and the optimiser's state stored in shards, gathered to compute with
    zero 3 tp the same on one axis, weights sharded on the other

and everything that a user can see is compared with one device: what each step returns, and after the last one each
parameter, buffer, gradient and tensor of an optimiser. The table has the largest difference, relative to the largest
value of its tensor. The bar is 1e-10 in float64 and 1e-4 in float32; a step that computes in bfloat16 rounds by itself.
The exit status is 1 if any is above.

On gloo each kind runs once, under the plans in turn, in float32 and deterministic mode, where sums are those of the
simulation to the bit, whatever is sent in one buffer. All four ranks must have what the simulation has.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from _table import table
from step_kinds import KINDS, Kind
from torch import nn
from ways import same
from workers import Pool  # starts processes

import spmd
from spmd import LocalTensorMode, Shard
from spmd._torch import pytree
from spmd.expand.objects import opened

BARS = {torch.float64: 1e-10, torch.float32: 1e-4}
SHORT = ("AdamW, foreach", "Adafactor, for-loop", "GradScaler, overflow", "checkpoint with dropout", "gradient hooks")

TENSOR_PARALLEL = {"*up.weight": Shard(0), "*up.bias": Shard(0), "*down.weight": Shard(1), "*words.weight": Shard(1)}
Plan = tuple[tuple[int, ...], tuple[str, ...], bool]
PLANS: dict[str, Plan] = {
    "dp 4": ((4,), ("dp",), False),
    "tp 4": ((4,), ("tp",), False),
    "2x2": ((2, 2), ("dp", "tp"), False),
    "zero 3": ((4,), ("dp",), True),
    "zero 3 tp": ((2, 2), ("dp", "tp"), True),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def begun(kind: Kind, dtype: torch.dtype) -> tuple[tuple, list[tuple]]:
    """What the step is given and the batches, the same each time."""
    with torch.random.fork_rng(devices=[]), default_dtype(dtype):
        torch.manual_seed(0)
        return kind.begin(), kind.batches()


def trained(kind: Kind, dtype: torch.dtype, compiled: Callable[[Callable, tuple], Callable]) -> list[torch.Tensor]:
    """What five steps return, and the state after them. compiled: makes of a step what is called in its place."""
    given, batches = begun(kind, dtype)
    steps = [compiled(step, given) for step in kind.steps()]
    found = []
    for i, batch in enumerate(batches):
        if kind.between is not None:
            kind.between(i, *given)
        found += values(steps[i % len(steps)](*given, *batch))
    return found + values(list(map(contents, given)))


def settled(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The one value that all simulated ranks have."""
    return [x.reconcile() if isinstance(x, spmd.LocalTensor) else x for x in found]


def contents(thing: Any) -> Any:
    """All tensors of what a step was given."""
    if isinstance(thing, nn.Module):
        gradients = {name: p.grad for name, p in thing.named_parameters()}
        return {**dict(thing.named_parameters()), **dict(thing.named_buffers())}, gradients
    if isinstance(thing, torch.optim.Optimizer):
        parameters = [p for group in thing.param_groups for p in group["params"]]
        return [sorted(thing.state.get(p, {}).items()) for p in parameters]
    return [contents(x) for x in thing] if isinstance(thing, list) else thing


def values(tree: Any) -> list[torch.Tensor]:
    """The tensors and numbers of a tree, whole, in memory of their own."""
    found = [x for x in pytree.tree_leaves(opened(tree)) if isinstance(x, (torch.Tensor, float, int))]
    return [whole(x) if isinstance(x, torch.Tensor) else _one(x) for x in found]


def _one(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, spmd.DTensor) else x).clone()


def compiled_for(kind: Kind, plan: Plan) -> Callable[[Callable, tuple], Callable]:
    """Compiles steps for this plan. Patterns that no parameter of the kind has are left out."""
    shape, axes, stored = plan
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=axes)

    def compiled(step: Callable, given: tuple) -> Callable:
        names = {name for m in given if isinstance(m, nn.Module) for name, _ in m.named_parameters()}
        params = {p: {"tp": place} for p, place in TENSOR_PARALLEL.items() if any(_ends(n, p) for n in names)}
        return spmd.compile(
            step, mesh,
            params=params if "tp" in axes else {},
            inputs={name: {"dp": Shard(0)} for name in kind.inputs} if "dp" in axes else {},
            fully_shard="dp" if stored else None,
        )  # fmt: skip

    return compiled


def _ends(name: str, pattern: str) -> bool:
    return name.endswith(pattern.removeprefix("*"))


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of the tensor it is in, or to one."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return float("inf")
    return max((_apart(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a.isfinite(), b.isfinite()):
        a, b = (x.to(torch.float64).nan_to_num() for x in (a, b))
        return float(((a - b).abs().max() / b.abs().max().clamp_min(1.0)) if b.numel() else 0.0)
    return float("inf")


def on_one_device(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The truth. Only spmd numbers its random numbers, so a step that draws runs compiled, on a mesh of one rank."""
    kind = KINDS[KINDS[name].reference or name]
    if not kind.draws:
        return trained(kind, dtype, lambda step, given: step)
    with LocalTensorMode(1):
        spmd.manual_seed(7)
        found = trained(kind, dtype, compiled_for(kind, ((1,), ("dp",), False)))
    return settled(found)


def on_ranks(name: str, plan: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same on four simulated ranks."""
    with LocalTensorMode(4):
        spmd.manual_seed(7)
        found = trained(KINDS[name], dtype, compiled_for(KINDS[name], PLANS[plan]))
    return settled(found)


def rows_of(
    names: list[str], plans: list[str], dtypes: list[torch.dtype], verbose: bool
) -> Iterator[tuple[list[str], bool]]:
    """Each kind in each dtype, under all plans beside one device."""
    for name, dtype in itertools.product(names, dtypes):
        wanted, bar = on_one_device(name, dtype), max(BARS[dtype], KINDS[name].precision)
        cells, errors = [], ""
        for plan in plans:
            try:
                found = apart(on_ranks(name, plan, dtype), wanted)
                cells.append(f"{found:.0e}" + ("" if found <= bar else " !"))
            except Exception as error:
                if verbose:
                    traceback.print_exc()
                errors = _in_one_line(error)
                cells.append("error")
        right = sum("!" not in cell and cell != "error" for cell in cells)
        yield [name, str(dtype).removeprefix("torch."), *cells, errors], right == len(plans)


# ---- gloo -------------------------------------------------------------------------------------


def in_rank_order(name: str, plan: str) -> list[torch.Tensor]:
    """Five steps in deterministic mode, on the ranks that are here."""
    spmd.manual_seed(7)
    with spmd.deterministic():
        return trained(KINDS[name], torch.float32, compiled_for(KINDS[name], PLANS[plan]))


def on_gloo(rank: int, name: str, plan: str) -> list[torch.Tensor]:
    warnings.simplefilter("ignore")
    return in_rank_order(name, plan)


def bits_apart(pool: Pool, name: str, plan: str) -> str:
    """The gloo ranks that have something else than the simulation, and how far off; nothing if all bits are equal."""
    with LocalTensorMode(4):
        made = in_rank_order(name, plan)
    wanted, ranks = settled(made), pool.run(on_gloo, name, plan, timeout=600.0)
    wrong = [str(rank) for rank, found in enumerate(ranks) if not same(found, wanted)]
    return f"ranks {', '.join(wrong)}: {max(apart(found, wanted) for found in ranks):.0e}" if wrong else ""


def gloo_rows(names: list[str], plans: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Each kind under one of the plans, in turn."""
    torch.set_num_threads(1)  # as the ranks have
    pool = Pool(4)
    for name, plan in zip(names, itertools.cycle(plans), strict=False):
        try:
            found = bits_apart(pool, name, plan)
        except Exception as error:
            found = _in_one_line(error)
        yield [name, plan, found or "same bits"], not found
    pool.close()


def _in_one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").replace("|", "/")[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="kinds with these in their names")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--dtypes", nargs="+", choices=("float64", "float32"), default=("float64", "float32"))
    parser.add_argument("--short", action="store_true", help="a few kinds")
    parser.add_argument("--gloo", action="store_true", help="on four gloo ranks, beside the simulation")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    names = [n for n in KINDS if not args.only or any(part in n for part in args.only)]
    names = list(SHORT) if args.short else names
    head = ["step", "plan", "gloo"] if args.gloo else ["step", "dtype", *args.plans, "error"]
    dtypes = [getattr(torch, d) for d in args.dtypes]
    made = gloo_rows(names, args.plans) if args.gloo else rows_of(names, args.plans, dtypes, args.verbose)
    rows, wrong = [], 0
    for cells, fine in made:
        print(*cells, sep="  ", flush=True)
        rows.append(cells)
        wrong += not fine
    print(table(head, rows, left=2))
    print(f"\n{len(rows) - wrong} of {len(rows)} rows right; torch {torch.__version__}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
