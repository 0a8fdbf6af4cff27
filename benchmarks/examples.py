"""Do the examples learn on every mesh that they offer what they learn on one device?

    python benchmarks/examples.py                        # 20 steps of each, on simulated ranks
    python benchmarks/examples.py --only llama --steps 50

Each example trains by its ready plan, in float32, from the same numbers on the same batches. The table has the largest
difference of a loss, of all ranks and steps, the first and the last loss, and how many collectives a step
sends by its plan. Exits 1 where a difference is above 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table

from examples.train import EXAMPLES, example, start, train
from spmd import init_device_mesh
from spmd.parallel import plan_for
from spmd.sim import run_ranks

ALLOWED = 1e-4


def row(name: str, axes: dict[str, int], steps: int) -> tuple[list[str], bool]:
    given = example(name)
    model = start(given)
    want = train(given, copy.deepcopy(model), steps)

    def on_rank(rank: int) -> tuple[list[float], int]:
        mesh, mine = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)), copy.deepcopy(model)
        return train(given, mine, steps, mesh), sum(send.times for send in plan_for(model, mesh).sends)

    found = run_ranks(on_rank, math.prod(axes.values()), timeout=600)
    apart = max(abs(a - b) for losses, _ in found for a, b in zip(losses, want, strict=True))
    on = " x ".join(f"{axis} {n}" for axis, n in axes.items())
    cells = [name, on, f"{apart:.1e}", f"{want[0]:.3f}", f"{want[-1]:.3f}", str(found[0][1])]
    return [*cells, "" if apart < ALLOWED else "ABOVE"], apart < ALLOWED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=EXAMPLES, help="these examples")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    args = parser.parse_args()
    rows, good = [], True
    for name in args.only:
        for axes in example(name).MESHES:
            cells, fine = row(name, axes, args.steps)
            print(*cells, sep="  ", flush=True)
            rows.append(cells)
            good &= fine
    print(table(["example", "mesh", "apart", "first loss", "last loss", "sends a step", ""], rows, left=2))
    print(f"\n{args.steps} steps; torch {torch.__version__}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
