"""Choices for random small graphs beside exhaustive search under the same cost.

    python benchmarks/choose_exact.py               # 500 graphs
    python benchmarks/choose_exact.py --graphs 40

The graphs are those of `tests/expand/choose/small_graphs.py`: up to seven ops, on a mesh of 2 or of 2x2 ranks, with
plain inputs, packed ones, and ones that both axes shard in either order. All assignments of the problem that a choice
solves are priced at once, in numpy. Graphs with more than 400,000 assignments are drawn again. Exits 1 if the solver is
above the best assignment, or its bound is not the best, on any graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _table import table

from tests.expand.choose.small_graphs import MESHES, compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=500)
    args = parser.parse_args()
    rows, wrong = [], 0
    for mesh_name in MESHES:
        seed = above = loose = assignments = done = 0
        start = time.perf_counter()
        while done < args.graphs // len(MESHES):
            found = compared(seed, mesh_name)
            seed += 1
            if found is None:
                continue
            best, solved, number = found
            done, assignments = done + 1, assignments + number
            above += solved.us > best + 1e-6
            loose += solved.at_least > best + 1e-6 or solved.gap > 1e-6
        wrong += above + loose
        rows.append(
            [mesh_name, str(done), f"{assignments:,}", str(above), str(loose), f"{time.perf_counter() - start:.0f}"]
        )
    print(table(["mesh", "graphs", "assignments", "above the best", "bound not the best", "seconds"], rows, left=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
