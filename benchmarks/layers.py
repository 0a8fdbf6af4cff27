"""Each layer of `spmd.parallel` beside one device: forward, backward and a step of SGD.

    python benchmarks/layers.py                  # all of it, some ten minutes of processor time
    python benchmarks/layers.py --short          # one mesh and one sort of blocks for each layer, in turn
    python benchmarks/layers.py ring experts     # layers whose names have one of these

Each style, loss, attention and layer of experts (`layer_kinds.py`) runs on meshes of 4, 2 x 2 and 2 x 2 x 2 simulated
ranks, with even, uneven and empty blocks, in float64 and in bfloat16, and once on 2 x 2 gloo processes with uneven
blocks. Results, gradients and parameters after the step are compared with those of one device.

In float64 the bar is 1e-10 of the largest number of a tensor. In bfloat16 both, the ranks and one device, are compared
with float64 on one device, from the same numbers: an error is the norm of the difference by the norm of the truth.
Ranks may be off by twice what one device is, and by 2^-7, which is one unit of the last place: sums over ranks round
once more for each axis, in the order of the ranks and not of one device. Exits 1 where a layer misses it, or does not
run.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import product
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _table import table
from layer_kinds import KINDS, Step, World

from spmd import LocalTensorMode, init_device_mesh
from spmd.sim import LocalTensor

SHAPES, SORTS = ((4,), (2, 2), (2, 2, 2)), ("even", "uneven", "empty")
EXACT, HALF = 1e-10, 2.0**-7
AXES = ("rep", "dp", "ax")


@dataclass
class Row:
    """The largest errors of a layer, and what went wrong."""

    exact: float = 0.0
    half: float = 0.0
    alone: float = 0.0
    gloo: float = 0.0
    cases: int = 0
    wrong: list[str] = field(default_factory=list)


def blocks(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.local.values()) if isinstance(x, LocalTensor) else [x]


def on_ranks(name: str, world: World) -> Step:
    with LocalTensorMode(prod(world.shape)):
        return KINDS[name](on_mesh(world))


def on_mesh(world: World) -> World:
    mesh = init_device_mesh("cpu", world.shape, mesh_dim_names=AXES[-len(world.shape) :])
    return World(world.shape, world.sort, world.dtype, mesh)


def largest(got: Step, want: Step) -> float:
    """The largest difference of an element, by the largest element of its tensor, or by one."""
    _check_alike(got, want)
    errors = [0.0]
    for key, x in want.items():
        for block in blocks(got[key]) if x.numel() else []:
            errors.append(((block - x).abs().max() / max(1.0, x.abs().max().item())).item())
    return max(errors)


def off(got: Step, truth: Step) -> dict[str, float]:
    """The norm of the difference by that of the truth, for each tensor."""
    _check_alike(got, truth)
    found = {}
    for key, x in truth.items():
        norm = max(x.norm().item(), 1e-2 * x.numel() ** 0.5)
        found[key] = max([(b.double() - x).norm().item() / norm for b in blocks(got[key])]) if x.numel() else 0.0
    return found


def _check_alike(got: Step, want: Step) -> None:
    if got.keys() != want.keys():
        raise ValueError(f"gives {sorted(got.keys() ^ want.keys())} only on one side")
    for key, x in want.items():
        shapes = {tuple(block.shape) for block in blocks(got[key])}
        if shapes != {tuple(x.shape)}:
            raise ValueError(f"{key} is {sorted(shapes)} for {tuple(x.shape)}")


def sweep(name: str, shape: tuple[int, ...], sort: str, row: Row) -> None:
    """One layer on one mesh, in both precisions."""
    world, low = World(shape, sort, torch.float64), World(shape, sort, torch.bfloat16)
    truth = KINDS[name](world)
    error = largest(on_ranks(name, world), truth)
    row.exact, row.cases = max(row.exact, error), row.cases + 2
    if not error <= EXACT:
        row.wrong.append(f"{shape} {sort}: {error:.1e}")
    alone, ranks = off(KINDS[name](low), truth), off(on_ranks(name, low), truth)
    row.alone, row.half = max(row.alone, *alone.values()), max(row.half, *ranks.values())
    worst = max(truth, key=lambda key: ranks[key] - 2 * alone[key])
    if not ranks[worst] <= 2 * alone[worst] + HALF:
        row.wrong.append(f"{shape} {sort} bfloat16: {worst} {ranks[worst]:.1e}, alone {alone[worst]:.1e}")


def cases(short: bool, n: int) -> list[tuple[tuple[int, ...], str]]:
    """Meshes and sorts; in the short mode the n-th layer has the n-th of them."""
    every = list(product(SHAPES, SORTS))
    return [every[n % len(every)]] if short else every


# ---- gloo -------------------------------------------------------------------------------------


def gloo(names: Sequence[str]) -> dict[str, float | str]:
    """The largest error of each layer on four processes, or why it does not run."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next((n for _, n in socket.if_nameindex() if n.startswith("lo")), ""))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_gloo_rank, (list(names), folder), nprocs=4)
        found = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(4)]
    return {name: max((each[name] for each in found), key=lambda x: (isinstance(x, str), x)) for name in names}


def _gloo_rank(rank: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/meet", timeout=timedelta(minutes=5), rank=rank, world_size=4)
    found: dict[str, float | str] = {}
    for name in names:
        world = World((2, 2), "uneven", torch.float64)
        found[name] = largest(KINDS[name](on_mesh(world)), KINDS[name](world))
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


# ---- all --------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", help="parts of names (default: all layers)")
    parser.add_argument("--short", action="store_true", help="one case a layer, and no gloo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = {n: Row() for n in KINDS if not args.layers or any(part in n for part in args.layers)}
    for n, (name, row) in enumerate(rows.items()):
        for shape, sort in cases(args.short, n):
            try:
                sweep(name, shape, sort, row)
            except Exception as error:  # a layer that does not run is a row, too
                row.wrong.append(f"{shape} {sort}: {type(error).__name__}: {str(error).splitlines()[0]}")
    for name, error in ({} if args.short else gloo(list(rows))).items():
        rows[name].gloo = error
        if not error <= EXACT:
            rows[name].wrong.append(f"gloo: {error:.1e}")
    print(f"{date.today()}, torch {torch.__version__}, {sum(row.cases for row in rows.values())} cases\n")
    header = ["layer", "cases", "float64", "gloo", "bfloat16", "one device in it"]
    lines = [
        [name, str(r.cases), f"{r.exact:.0e}", f"{r.gloo:.0e}", f"{r.half:.4f}", f"{r.alone:.4f}"]
        for name, r in rows.items()
    ]
    print(table(header, lines))
    wrong = [f"{name}, {each}" for name, row in rows.items() for each in row.wrong]
    print("\n".join(["", *wrong, f"{len(wrong)} wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
