"""How long a step's first call takes where its program was kept, beside a first call that captures it.

    python benchmarks/kept.py                     # a GPT of 12 layers with AdamW, width 256, 8 simulated ranks
    python benchmarks/kept.py --layers 48

Each start is a process of its own: first without a cache folder, then with an empty one, then with what the second has
left there. It reports the processor's seconds from the call of `spmd.compile` until the program of the training is
bound to a rank, the least of `--rounds` turns. Imports do not count. Bar: at most 0.1 times the start that captures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _table import table

ROOT = Path(__file__).resolve().parents[1]


def start(layers: int, ranks: tuple[int, int]) -> dict[str, float]:
    """Make or load the program of a training, as rank 0 of the mesh, and bind it. Nothing is sent or run."""
    import torch

    import spmd
    from examples.gpt import GPT, GPTConfig, train_step
    from spmd import Shard
    from spmd.cli.demo import PARAMS
    from spmd.expand.bound_program import BoundProgram
    from spmd.mesh import as_rank

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers, 4, 256, 64, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = spmd.DeviceMesh("cpu", torch.arange(ranks[0] * ranks[1]).view(ranks).tolist(), mesh_dim_names=("dp", "tp"))
    batch = torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (8, 64))
    inputs = {"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}
    with as_rank(0):
        make = spmd.compile  # which is imported where it is first named
        took = {"wall": time.perf_counter(), "cpu": time.process_time()}
        step = make(train_step, mesh, params=PARAMS, inputs=inputs)
        call = step._call((model, optimizer, *batch), {}, True)
        call.find_first_specs()
        wanted = step._wanted(call)
        found = step._library.find(wanted)
        captured, source = step._capture_and_expand(call) if found is None else (found.captured, found)
        bound = BoundProgram.of(source, captured, mesh, "eager")
        if found is None:
            step._library.add(wanted, bound.entry)
    took = {"wall": time.perf_counter() - took["wall"], "cpu": time.process_time() - took["cpu"]}
    return took | {"hits": int(found is not None), "nodes": len(bound.program.graph.nodes)}


def measured(layers: int, ranks: str, folder: str) -> dict[str, float]:
    environment = os.environ | {"SPMD_CACHE": folder, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--layers", str(layers), "--mesh", ranks, "--start"]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--mesh", default="2x4", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--start", action="store_true", help="be one of the processes that are timed")
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args.layers, tuple(map(int, args.mesh.split("x"))))))
        return
    found: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, at in {"no folder": "", "empty folder": folder, "kept": folder}.items():
                took = measured(args.layers, args.mesh, at)
                found[name] = min(took, found.get(name, took), key=lambda t: t["cpu"])
    plain = found["no folder"]
    shown = [
        [name, f"{t['cpu']:.2f}", f"{t['wall']:.2f}", f"{t['cpu'] / plain['cpu']:.3f}", str(t["hits"])]
        for name, t in found.items()
    ]
    print(f"{args.layers} layers, {args.mesh}, {plain['nodes']:,} nodes\n")
    print(table(["start", "cpu s", "wall s", "of no folder", "loaded"], shown))


if __name__ == "__main__":
    main()
