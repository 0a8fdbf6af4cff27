"""The seconds of the processor that choosing placements for a deep program takes.

    python benchmarks/choose_deep.py                                # GPT of 12 layers on three meshes, and of 48
    python benchmarks/choose_deep.py --models llama --meshes 2x4 --layers 22

The train step (forward, loss, backward, AdamW) and the plans are those of `choose.py`, on textbook links. It is
captured, and written by op, before the clock starts; what is timed is the choice: its model, solving it, what it
settles to where the backward hides reductions, and the pins of each op of both. Each turn is a process of its own, so
that it finds nothing that another one kept; the table has the least of the turns. The programs that are then written
are not timed. Bars: 12 layers on 2x4 0.6 s, on 2x2x2 2 s, 48 layers 1.5 times 12 on 2x4, 64x64 no more than 2x4. Exits
1 where one is missed, with five in a hundred for noise of the last.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
import time
import warnings
from dataclasses import astuple, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _table import table
from choose import CASES, MESHES, PLANNED, Row, cases, plans, row_of

from spmd.expand.choose import program as choosing

DEEP = (("2x4", 12), ("2x2x2", 12), ("64x64", 12), ("2x4", 48))
HEADER = ["model", "plan", "mesh", "layers", "model, s", "solve, s", "pins, s", "all, s", "cost, us", "gap"]


@dataclass(frozen=True)
class Timed:
    """Seconds of the processor, the modelled cost in microseconds, and the gap."""

    model: float
    solve: float
    pins: float
    us: float
    gap: float

    @property
    def seconds(self) -> float:
        return self.model + self.solve + self.pins


class Done(Exception):
    """Ends a compilation when its choice has been timed."""

    def __init__(self, turns: list[Timed]) -> None:
        self.turns = turns


def timed(given, pins) -> Timed:
    """A choice, as `Chosen` makes it."""
    start = time.process_time()
    model = choosing.Model(given.mesh, given.graph, given.sources, given.output_spec, given.roles, given.places, pins)
    built = time.process_time()
    solved = choosing.solve(model.problem, [model.by_itself()])
    hiding = model.exposing(choosing.EXPOSED)
    near = choosing.settled(hiding.problem, solved.x)
    found = time.process_time()
    for each, x in ((model, solved.x), (hiding, near)):
        each.choice(x)
    return Timed(built - start, found - built, time.process_time() - found, solved.us, solved.gap)


def in_a_process(given, pins) -> Timed:
    """The same in a child, which leaves no cache warm."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        gc.collect()  # it writes to all objects, so that the child copies their pages before the clock starts
        with choosing.collector_off(), os.fdopen(writes, "wb") as file:
            pickle.dump(astuple(timed(given, pins)), file)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        found = pickle.load(file)
    os.waitpid(child, 0)
    return Timed(*found)


def least(row: Row, turns: int) -> Timed:
    """The quickest of several choices for a row."""

    def instead(given, pins):
        raise Done([in_a_process(given, pins) for _ in range(turns)])

    row.program("op", "textbook")
    kept, choosing.solved_choice = choosing.solved_choice, instead
    try:
        row.program("program", "textbook")
    except Done as done:
        return min(done.turns, key=lambda t: t.seconds)
    finally:
        choosing.solved_choice = kept
    raise RuntimeError("nothing was chosen")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=["gpt"])
    parser.add_argument("--plan", default="dp x tp")
    parser.add_argument("--meshes", nargs="+", help="such as 2x4; by default those of the bars")
    parser.add_argument("--layers", nargs="+", type=int, default=[12], help="with --meshes (default: 12)")
    parser.add_argument("--turns", type=int, default=4, help="(default: %(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    wanted = [(mesh, n) for mesh in args.meshes for n in args.layers] if args.meshes else DEEP
    rows, seconds = [], {}
    for name in args.models:
        for mesh, layers in wanted:
            MESHES.setdefault(mesh, tuple(map(int, mesh.split("x"))))
            case = cases(replace(PLANNED, layers=layers))[name]
            found = least(row_of(case, dict(plans(case))[args.plan], mesh), args.turns)
            seconds[name, mesh, layers] = found.seconds
            times = [f"{x:.2f}" for x in (found.model, found.solve, found.pins, found.seconds)]
            rows.append([name, args.plan, mesh, str(layers), *times, f"{found.us:,.2f}", f"{found.gap:.2%}"])
            print(*rows[-1], sep="  ", flush=True)
    print(table(HEADER, rows, left=3))
    return 0 if args.meshes or args.models != ["gpt"] else bars(seconds)


def bars(seconds: dict[tuple[str, str, int], float]) -> int:
    """Prints each bar of the GPT, and gives 1 if one is missed."""
    base = seconds["gpt", "2x4", 12]
    asked = {
        "12 layers on 2x4, s": (base, 0.6),
        "12 layers on 2x2x2, s": (seconds["gpt", "2x2x2", 12], 2.0),
        "48 layers over 12": (seconds["gpt", "2x4", 48] / base, 1.5),
        "64x64 over 2x4": (seconds["gpt", "64x64", 12] / base, 1.05),
    }
    print()
    for name, (got, bar) in asked.items():
        print(f"{name}: {got:.2f}, bar {bar:g}, {'met' if got <= bar else 'missed'}")
    return int(any(got > bar for got, bar in asked.values()))


if __name__ == "__main__":
    sys.exit(main())
