"""Random trainings: do steps with parameters in random places give on a mesh what they give on one device?

    python benchmarks/trainings.py                        # 100 trainings, from seed 0
    python benchmarks/trainings.py --seed 1000 --number 500
    python benchmarks/trainings.py --seed 4711 --number 1

A training (`tests/expand/places/random_trainings.py`) is a model of up to four layers - fused, tied, frozen, unused,
used twice, with buffers - on a mesh of 4 ranks or 2x2x2, an optimiser, micro-batches and clipping, and what is said:
places of parameters, levels of full sharding, hybrid or not, pins, precision, by op or for the program. Three steps
run on simulated ranks and on one device; losses, parameters, gradients, buffers and states have to be equal within
1e-10 in float64, 1e-4 in float32. One that differs is printed as Python. The table counts by what was said. Exits 1 if
one differs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _seeds import asked, seeds
from _table import table

from spmd import FullyShard
from tests.expand.places.random_trainings import Training, differences


def what(training: Training) -> Iterator[str]:
    """What a training is counted as."""
    yield "all"
    yield "x".join(map(str, training.mesh))
    yield f"for the {training.said['choose']}" if "choose" in training.said else "by op"
    yield from [key for key in ("params", "stored", "placements", "mixed_precision") if key in training.said]
    said = training.said.get("fully_shard")
    every = list(said.values()) if isinstance(said, dict) else [said]
    for each in {x.level if isinstance(x, FullyShard) else 3 for x in every if x is not None}:
        yield f"fully_shard, level {each}"
    if any(isinstance(x, FullyShard) and x.state is not None for x in every):
        yield "fully_shard, state over more axes"
    yield from sorted(set(training.kinds))


def main() -> int:
    ran: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for training, differs in asked(seeds(__doc__.splitlines()[0], 100, "trainings"), Training.of, differences):
        ran.update(what(training))
        wrong.update(what(training) if differs else ())
    print(table(["what", "trainings", "differ"], [[key, str(n), str(wrong[key])] for key, n in ran.items()]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
