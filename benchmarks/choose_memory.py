"""Placements chosen within a memory budget: the cheapest programs that fit, with and without anything computed again.

    python benchmarks/choose_memory.py                          # four models under four plans on 2x2, a layer each
    python benchmarks/choose_memory.py --models gpt --plans "zero 3" --layers 12 --mesh 2x4
    python benchmarks/choose_memory.py --exact                  # small graphs beside all programs there are

Models, plans and train steps are those of `choose.py`, on textbook links. Nothing is run. The budgets are parts of what
the choice without a budget needs, and the least that was found. For each of them three programs: `freed`, the first
choice with all computed again that does not fit, as it was before placements knew of memory; `placed`, the cheapest one
whose placements fit with nothing freed, beside the bound for such programs; and `both`, which `memory_budget=` gives,
with the bytes that it needs, what a rank sends, and in how many collectives. Costs are modelled microseconds; `none`
where nothing fits. Turns are how often the choice was solved, programs how many of what came of it differ, and seconds
those of the processor for all of them, which only the least budget asks for, with what `both` then takes in brackets.
Exits 1 where a program needs more than
its budget, where `both` comes behind `freed` or `placed`, or where more memory makes it worse; a program that costs
more or takes longer than by op comes behind all others, whatever it costs.

`--exact` writes and counts the programs of all assignments of small random graphs on two ranks. The table says how
often what is found costs as much as the cheapest that fits, and the largest ratio of the two.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path as File

sys.path.insert(0, str(File(__file__).resolve().parents[1]))

from _table import table
from choose import CASES, MESHES, PLANNED, Row, cases, plans, row_of

from spmd.expand.choose.budget import NEVER, Budget, Rank, Taken, Weighed, cheapest
from spmd.expand.choose.lighter import Lighter, Path
from spmd.expand.choose.program import Chosen
from spmd.expand.passes.memory_budget import BudgetError
from tests.expand.choose.small_budgets import choices, small_budgets

PARTS = (0.9, 0.75, 0.6)
MODELS, PLANS = ("huge", "convnet", "gpt", "llama"), ("nothing", "dp", "zero 3", "tp")
HEADER = ["model", "plan", "budget", "bytes", "freed", "placed", "bound", "both", "needs", "sent, MB", "collectives",
          "again, us", "turns", "programs", "seconds"]  # fmt: skip
ROUNDING = 1e-9


def first_choice(row: Row) -> Chosen:
    """The choice for a row where nothing is said of memory."""
    with choices() as found:
        row.program("program", "textbook")
    return found[0]


def within(path: Path, nbytes: int) -> Taken | BudgetError:
    """The cheapest program of a path that keeps to a budget."""
    as_run = path.first.end.as_run
    try:
        return cheapest(path, Budget(nbytes, as_run, as_run))
    except BudgetError as error:
        return error


def rank_of(path: Path, one: Lighter, nbytes: int) -> Rank:
    """The rank of a program of a path within a budget, with as much computed again as it takes."""
    as_run = path.first.end.as_run
    try:
        return Weighed(one, path.first, Budget(nbytes, as_run, as_run)).rank
    except BudgetError:
        return NEVER


def is_behind(path: Path, us: float, step: float) -> bool:
    """Whether a program costs more or takes longer than by op: then it comes behind all that do not."""
    by_op = path.first.by_op
    return us > by_op.cost.us * (1 + ROUNDING) or step > by_op.step * (1 + ROUNDING)


def is_no_worse(one: tuple, other: tuple) -> bool:
    """Whether a program, by whether it is behind and what it costs, comes before another one, or costs as much."""
    return (one[0], one[1] * (1 - ROUNDING)) <= tuple(other[:2])


def rows_of(row: Row, name: str, plan: str) -> tuple[list[list[str]], bool]:
    """A row for each budget, and whether all of them are as they have to be."""
    first = first_choice(row)
    start, path = time.process_time(), Path(first)
    peak, rows, fine, before = first.end.memory.peak, [], True, (False, 0.0)
    least = within(path, 1).smallest  # all of the path is written for it
    seconds = time.process_time() - start
    budgets = [(f"{part:.0%}", int(part * peak)) for part in PARTS if part * peak > least]
    for said, nbytes in [("none", peak), *budgets, ("least", least)]:
        freed, start = rank_of(path, path.known[0], nbytes), time.process_time()
        program = within(path, nbytes).program
        took = time.process_time() - start
        fits = [each for each in path.known if each.candidate.memory.peak <= nbytes]
        placed = min([rank_of(path, each, nbytes) for each in fits], default=NEVER)
        us, needs = program.certificate.us, program.memory().peak
        both = is_behind(path, us, program.timeline().us), us
        fine &= needs <= nbytes and all(is_no_worse(*pair) for pair in ((both, placed), (both, freed), (before, both)))
        again = sum(freed.us for report in program.reports for freed in report.freed)
        before, sent = both, sum(c.nbytes for c in program.collectives) / 1e6
        rows.append([name, plan, said, f"{nbytes:,}", *map(_us, (freed[1], placed[1], path.at_least(nbytes), us)),
                     f"{needs:,}", f"{sent:.2f}", str(len(program.collectives)), f"{again:.1f}", str(len(path.turns)),
                     str(len(path.known)), f"{seconds:.1f} ({took:.1f})"])  # fmt: skip
        print(*rows[-1], "" if fine else "WRONG", sep="  ", flush=True)
    return rows, fine


def _us(us: float) -> str:
    return "none" if us == float("inf") else f"{us:,.1f}"


def exact(graphs: int) -> tuple[list[str], bool]:
    """A row: how many graphs and budgets, how often the cheapest is found, the largest ratio, where none is found."""
    ratios, none, done = [], 0, 0
    for seed in itertools.count():
        found = list(small_budgets(seed))
        done += bool(found)
        for least, got in found:
            if isinstance(got, BudgetError):
                none += 1
            else:
                ratios.append(got.program.certificate.us / least)
        if done == graphs:
            break
    best = sum(ratio <= 1 + 1e-6 for ratio in ratios)
    cells = [str(done), str(len(ratios) + none), str(best), f"{max(ratios):.3f}", str(none)]
    return cells, min(ratios) >= 1 - 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--mesh", default="2x2", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--exact", action="store_true", help="small graphs beside all programs there are")
    parser.add_argument("--graphs", type=int, default=40, help="of --exact (default: %(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.exact:
        cells, fine = exact(args.graphs)
        print(table(["graphs", "budgets", "the cheapest found", "at most times it", "none found"], [cells], left=0))
        return int(not fine)
    MESHES.setdefault(args.mesh, tuple(map(int, args.mesh.split("x"))))
    found, rows = True, []
    for name in args.models:
        case = cases(replace(PLANNED, layers=args.layers))[name]
        for plan, said in plans(case):
            if plan in args.plans:
                more, fine = rows_of(row_of(case, said, args.mesh), name, plan)
                rows, found = rows + more, found and fine
    print(table(HEADER, rows, left=3))
    return int(not found)


if __name__ == "__main__":
    sys.exit(main())
