"""What cutting products into pieces hides of what tensor parallelism sends: modelled, without a GPU and without ranks.

    python benchmarks/chunks.py                 # two transformer-like blocks of width 8,192 on 8 GPUs: a minute
    python benchmarks/chunks.py --width 4096

A column-wise and a row-wise layer a block, 8 sequences of 2,048 tokens in bf16; activations whole between the blocks,
or in shards of the sequence. Each cell is the step in ms, what of it waits for what is sent, and the gap to the bound:
as the program came, with `schedule`, with `chunks`, and with both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from _table import table
from step_parts import train_step

import spmd
from spmd import MeshTopoInfo, Shard
from spmd.expand.passes.passes import Chunks, Schedule, with_passes
from spmd.mesh.layout import HostGrid
from tests.expand.test_chunks import IN_SEQUENCE, PLAN, Net

INPUTS = {
    "whole": {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}},
    "sequence": IN_SEQUENCE,
}
PASSES = {"as it came": (), "schedule": (Schedule(),), "chunks": (Chunks(),), "both": (Chunks(), Schedule())}


def program_of(machine: str, shape: tuple[int, int], inputs: str, width: int):
    """The program by op on 8 GPUs of one host, as it comes."""
    mesh = spmd.DeviceMesh("cpu", torch.arange(8).view(shape).tolist(), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Net(width)
    step = spmd.compile(
        train_step, mesh.with_topology(MeshTopoInfo(HostGrid(shape), machine)), inputs=INPUTS[inputs], params=PLAN,
        passes=(), choose="op", mixed_precision=spmd.MixedPrecision(torch.bfloat16, torch.float32),
    )  # fmt: skip
    batch = torch.empty(8, 2048, width), torch.empty(8, dtype=torch.int64)
    return step.program_for(model, torch.optim.SGD(model.parameters(), 0.1), *batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8192)
    args = parser.parse_args()
    rows = []
    for machine in ("hopper", "ampere"):
        for shape in ((1, 8), (2, 4)):
            for inputs in INPUTS:
                program = program_of(machine, shape, inputs, args.width)
                cells = []
                for passes in PASSES.values():
                    t = with_passes(program, passes).timeline()
                    cells.append(f"{t.us / 1e3:,.2f}, {t.exposed_us / 1e3:,.2f}, {t.gap:.1%}")
                rows.append([machine, "x".join(map(str, shape)), inputs, *cells])
    print(table(["machine", "dp x tp", "activations", *PASSES], rows))


if __name__ == "__main__":
    main()
