"""Do passes keep their word under cost tables that no machine has?

    python benchmarks/odd_costs.py                       # seven small programs, all tables, budgets, too
    python benchmarks/odd_costs.py --only net --seeds 9  # one program

Tables: sending or computing is free, or takes ages; latency alone, bytes alone; a few kinds or sizes were measured; and
prices by chance that have nothing to do with sizes (`tests/expand/odd_costs.py`). For each program and table: no pass
raises, what it makes is verified and is found twice, nothing is bigger than the program as it came, nothing that is
judged is slower, no step is below its bound, and memory budgets are kept. Exits 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from _table import table

from spmd.expand.passes.keep_gathered import copied
from spmd.expand.program import Program
from tests.expand.budgets import SMALL, program_of
from tests.expand.odd_costs import ODD, budget_faults, faults, prices_without_sense


def cases(name: str, seeds: int) -> Iterator[tuple[str, Program, contextlib.AbstractContextManager]]:
    """Tables by name, with the program, and with what makes its prices odd."""
    for machine in ODD:
        yield machine, program_of(name, ODD[machine]), contextlib.nullcontext()
    program = program_of(name)
    for seed in range(seeds):
        yield f"by chance {seed}", copied(program), prices_without_sense(seed)


def wrong(program: Program) -> list[str]:
    """What is wrong, with passes and with budgets; an error is, too."""
    found = []
    for check in (faults, budget_faults):
        try:
            found += check(program)
        except Exception as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            found.append(f"{type(e).__name__} at {last.name}:{last.lineno}: {e}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SMALL, default=list(SMALL), help="these programs")
    parser.add_argument("--seeds", type=int, default=6, help="how many tables by chance")
    args = parser.parse_args()
    rows, good = [], True
    for name in args.only:
        began, many, found = time.process_time(), 0, []
        for what, program, odd in cases(name, args.seeds):
            with odd:
                found += [f"{what}: {fault}" for fault in wrong(program)]
            many += 1
        cells = [name, str(many), "; ".join(found), f"{time.process_time() - began:.0f}"]
        print("  ".join(cells), flush=True)
        rows.append(cells)
        good &= not found
    print(table(["program", "tables", "wrong", "cpu s"], rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
