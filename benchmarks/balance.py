"""What balanced rings save in a compiled step: the processor time of each rank of 4 gloo processes.

    python benchmarks/balance.py
    python benchmarks/balance.py --size 2048

Causal attention of 1 x 4 heads x 8,192 x 64, forward and backward, whose sequence the ranks share out. In order the
last rank sees most keys; balanced, queries, keys and values are exchanged before the ring, and results behind it. Times
are those of some rounds in which both take turns, a round each; work is the pairs of a row and a key that the rank with
the most has, by the mean.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from _table import table

import spmd
from spmd import Shard, init_device_mesh
from spmd.parallel import context_parallel
from spmd.parallel.context.balance import most_work
from spmd.parallel.context.layout import balanced, in_order

RANKS, ROUNDS = 4, 4
WAYS = {"in order": False, "balanced": True}


def on_rank(rank: int, folder: str, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 4, size, 64, generator=draw) for _ in range(3)]
    steps = {name: _step(mesh, is_balanced) for name, is_balanced in WAYS.items()}
    results = {name: step(*given) for name, step in steps.items()}  # which compiles
    spent = dict.fromkeys(WAYS, 0.0)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step(*given)
            spent[name] += time.process_time() - start
    pairs = zip(*results.values(), strict=True)
    off = max((a.to_local() - b.to_local()).abs().max().item() for a, b in pairs)
    Path(folder, str(rank)).write_bytes(pickle.dumps((spent, off)))
    dist.barrier()
    dist.destroy_process_group()


def _step(mesh, is_balanced: bool):
    def layer(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with context_parallel(mesh["cp"], balanced=is_balanced):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    return spmd.compile(layer, mesh, inputs={name: {"cp": Shard(2)} for name in "qkv"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="positions of the sequence")
    size = parser.parse_args().size
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next((n for _, n in socket.if_nameindex() if n.startswith("lo")), ""))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (folder, size), nprocs=RANKS)
        found = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(RANKS)]
    layouts = {"in order": in_order((size // RANKS,) * RANKS), "balanced": balanced(size, RANKS)}
    rows = []
    for name in WAYS:
        spent = [1e3 * each[name] / ROUNDS for each, _ in found]
        mean = sum(spent) / RANKS
        work = most_work(layouts[name]) / (size * size / 2 / RANKS)
        rows.append([name, *(f"{x:.1f}" for x in spent), f"{mean:.1f}", f"{max(spent) / mean:.2f}", f"{work:.2f}"])
    print(table(["ring", *(f"rank {i}, ms" for i in range(RANKS)), "mean", "most by mean", "work, most by mean"], rows))
    print(f"\nresults apart: {max(off for _, off in found):.0e}")


if __name__ == "__main__":
    main()
