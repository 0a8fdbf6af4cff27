"""Fuzzing: do random programs give the same results on a mesh as on one device?

    python benchmarks/fuzz.py                          # a minute, from seed 0
    python benchmarks/fuzz.py --minutes 30 --seed 1000
    python benchmarks/fuzz.py --seed 4711 --programs 1
    python benchmarks/fuzz.py --compiled               # each program as one compiled step

Writes a program from each seed (`tests/tensor/fuzz.py`), runs it on one device and on simulated ranks, with cold caches
and with warm ones, and compares all resulting tensors. For each kind of difference, one program is shrunk and printed
as Python code that can be run. The table counts programs, steps and differences by mesh. Exits 1 if there is a
difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _table import table

from tests.tensor.fuzz import (
    MESHES,
    Program,
    compiled_differences,
    differences,
    fails_like,
    graph_of,
    shrink,
    symptom,
    write,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--programs", type=int, default=sys.maxsize, help="how many programs at most")
    parser.add_argument("--compiled", action="store_true", help="compile each program, without ops that no graph has")
    chosen = parser.parse_args()
    ask = compiled_differences if chosen.compiled else differences
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    found: dict[str, list[tuple[int, Program]]] = defaultdict(list)
    end = time.monotonic() + chosen.minutes * 60
    for seed in range(chosen.seed, chosen.seed + chosen.programs):
        if time.monotonic() > end:
            break
        program = write(random.Random(seed))
        program = graph_of(program) if chosen.compiled else program
        wrong = ask(program)
        counts.update({(program.mesh, "programs"): 1, (program.mesh, "steps"): len(program.steps)})
        if wrong:
            counts[program.mesh, "differ"] += 1
            found[symptom(wrong)].append((seed, program))
            print(f"# seed {seed}: {symptom(wrong)}", flush=True)
    for kind, programs in found.items():
        _show(kind, programs, ask)
    columns = ("programs", "steps", "differ")
    rows = [["x".join(map(str, mesh)), *(f"{counts[mesh, c]:,}" for c in columns)] for mesh in MESHES]
    print(table(["mesh", *columns], [*rows, ["all", *(f"{sum(counts[m, c] for m in MESHES):,}" for c in columns)]]))
    sys.exit(bool(found))


def _show(kind: str, programs: list[tuple[int, Program]], ask: Callable[[Program], list[str]]) -> None:
    """Print a shrunk program for a kind of difference, and the seeds of all programs with it."""
    small = min((program for _, program in programs), key=lambda program: len(program.steps))
    small = shrink(small, fails_like(small, ask))
    seeds = ", ".join(str(seed) for seed, _ in programs[:12])
    print(f"# {len(programs)} programs differ so: {kind}\n# of seeds {seeds}\n\n{small}\n")
    print(*(f"# {line}" for text in ask(small)[:2] for line in text.splitlines()), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
