"""What a memory budget costs: the time that is computed again, and how near it is to the least of all choices.

    python benchmarks/recompute.py                        # GPT-2 XL under three plans: ten budgets each
    python benchmarks/recompute.py --layers 48 --plans dp # one plan
    python benchmarks/recompute.py --exhaustive           # small programs, beside all choices of what to free
    python benchmarks/recompute.py --measured             # a training on four gloo ranks: bytes counted as it runs
    python benchmarks/recompute.py --offload [...]        # each of these where values may wait in host memory, too
    python benchmarks/recompute.py --bits 25              # random nets, trained so and without, to the bit

Nothing is run but with `--measured`. Modelled on Hopper. For each budget: what is needed at most as foreseen, by the
count of the rank's code (with --measured: by counting all tensors of the run), the time that is computed again or
waited for copies, and the processor's seconds: to read the program, to find the ways to run its segments, and to choose
among them for a budget. `step` is what the replay of the written program takes longer than of the one that came.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from _table import table
from schedule import Row

from spmd.expand.passes.memory_budget import Plan
from spmd.expand.program import Program
from spmd.expand.timeline.replay import step_us
from tests.expand.budgets import SMALL, all_choices, all_choices_with_host, measured, program_of
from tests.expand.random_nets import differences

BUDGETS = 10
MOST_OF_TWO, MOST_OF_THREE = 16, 7
"""Of how many units all choices are tried: to keep or to compute again, and also to send to host memory."""
MOST_ABOVE = 1.05
"""The bar: the time beside the least of all choices."""


def limits(plan: Plan) -> list[int]:
    """Budgets from the smallest to what the program needs as it came."""
    low = plan.choice.least_peak().peak
    return [low + (plan.peak - low) * k // (BUDGETS - 1) for k in range(BUDGETS)]


def chosen_rows(name: str, program: Program, offload: bool) -> Iterator[list[str]]:
    """A row for each budget: what is chosen, how long that takes, and the program that is written."""
    start, came = time.process_time(), step_us(program.work)
    plan = Plan.of(program, offload)
    read = time.process_time() - start
    ways = len(plan.choice.ways)
    found = time.process_time() - start - read
    for limit in limits(plan):
        start = time.process_time()
        chosen = plan.choice.least_time(limit) or plan.choice.least_peak()
        seconds = time.process_time() - start
        work = plan.program(chosen).verify().work
        built = max(work.memory(range(len(work.tasks))))
        added = chosen.us - plan.choice.unlimited.us
        sent = sum([r.nbytes for copy in plan.copies(chosen) for r in plan.lookup.values.units[copy.unit]])
        cells = [f"{x / 2**30:.2f}" for x in (limit, chosen.peak, built, sent)]
        cells += [f"{us / 1e3:.2f}" for us in (added, step_us(work) - came)]
        cells += [f"{read:.2f}", f"{found:.2f}", f"{seconds:.2f}"]
        yield [name, str(len(plan.spans.units)), str(ways), *cells]


def exhaustive_rows(name: str, offload: bool) -> Iterator[tuple[list[str], bool]]:
    """A row for each budget, beside the least time of all sets of the largest units."""
    plan = Plan.of(program_of(name), offload)
    every = all_choices_with_host(plan, MOST_OF_THREE) if offload else all_choices(plan, MOST_OF_TWO)
    base = min(us for _, us in every)
    for limit in limits(plan):
        chosen = plan.choice.least_time(limit) or plan.choice.least_peak()
        best = min([us for peak, us in every if peak <= limit], default=chosen.us)
        ours, least = chosen.us - base, best - base
        fine = ours <= least * MOST_ABOVE + 1e-6
        yield [name, f"{limit:,}", f"{chosen.peak:,}", f"{ours:.2f}", f"{least:.2f}", "" if fine else "above"], fine


def measured_rows(names: list[str], offload: bool) -> Iterator[tuple[list[str], bool]]:
    """A row for each budget of trainings on gloo: of the four ranks the one that needs most."""
    from workers import Pool  # starts processes

    pool = Pool(4)
    for name in names:
        (least, most), *_ = pool.run(measured, name, None, offload, timeout=600.0)
        for k in range(BUDGETS):
            budget = least + (most - least) * k // (BUDGETS - 1)
            ranks = pool.run(measured, name, budget, offload, timeout=600.0)
            predicted, counted = max(ranks, key=lambda pair: pair[1])
            apart = max(abs(p - c) / c for p, c in ranks)
            fine = counted <= budget and apart <= 0.005
            yield [name, f"{budget:,}", f"{predicted:,}", f"{counted:,}", f"{apart:.2%}"], fine
    pool.close()


def bits_rows(nets: int) -> Iterator[tuple[list[str], bool]]:
    """A row for each random net: what differs from the plain training."""
    for seed in range(nets):
        found = differences(seed)
        yield [str(seed), "; ".join(found)], not found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--plans", nargs="*", default=["dp", "zero3", "zero3 x tp"])
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--bits", type=int, help="how many random nets")
    parser.add_argument("--measured", nargs="*", help="names of small programs; by default three")
    args = parser.parse_args()
    if args.bits:
        head, rows = ["net", "differs"], bits_rows(args.bits)
    elif args.measured is not None:
        head = ["program", "budget", "predicted", "counted", "apart"]
        rows = measured_rows(args.measured or ["net", "block, zero3", "gpt, zero3 x tp"], args.offload)
    elif args.exhaustive:
        head = ["program", "budget", "bytes", "again us", "least us", ""]
        rows = (row for name in SMALL for row in exhaustive_rows(name, args.offload))
    else:
        head = ["plan", "segments", "ways", "GiB", "foreseen", "written", "to host", "lost ms", "step ms"]
        head += ["read s", "ways s", "choose s"]
        programs = ((plan, Row("gpt2-xl", plan, 2, args.layers).program("hopper")) for plan in args.plans)
        rows = ((row, True) for plan, program in programs for row in chosen_rows(plan, program, args.offload))
    found, all_fine = [], True
    for cells, fine in rows:
        found.append(cells)
        all_fine &= fine
        print("  ".join(cells), flush=True)
    print(table(head, found))
    sys.exit(not all_fine)


if __name__ == "__main__":
    main()
