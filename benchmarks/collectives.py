"""The overhead of a functional collective over the raw c10d call, for spmd and for torch's functional collectives.

    python benchmarks/collectives.py            # 1 and 4 gloo ranks on this machine, about two minutes
    python benchmarks/collectives.py --short    # fewer rounds and sizes, under 30 seconds

Each collective is launched and waited for in three ways, on the same tensors and the same group of all ranks:

- c10d: the in-place call of torch.distributed into a buffer made for it, `async_op=True`, then `wait()`;
- torch: `torch.distributed._functional_collectives`, whose result is waited for;
- spmd: `spmd.comm`, whose result is waited for.

The three take turns: a round runs each of them a few times, in a new order, between barriers. The time of a call is
the round's time on the slowest rank, divided by the number of calls. The table has medians over the rounds. Its ratios
are medians of each round's ratio, because other programs disturb those less. With one rank nothing is sent, and all of
the time is overhead; CPU time of the calling thread is measured, which is the same on a busy machine. With four ranks
wall-clock time is measured, and the noise of the network is larger than the difference. torch's gather on dim 1 waits
before it returns, and spmd's does not; here both are waited for at once.

Left out: tensors that need a gradient, and groups given in other ways than as a ProcessGroup (see --group).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
from _table import table
from torch import Tensor

import spmd
from spmd import comm

Way = Callable[[Tensor], object]
WAYS = ("c10d", "torch", "spmd")

# torch 2.13 has new names for these and warns of the old ones.
GATHER, SCATTER, ALL_GATHER, REDUCE_SCATTER = (
    getattr(module, new, None) or getattr(module, old)
    for module, new, old in (
        (dist, "all_gather_single", "all_gather_into_tensor"),
        (dist, "reduce_scatter_single", "reduce_scatter_tensor"),
        (funcol, "all_gather_single", "all_gather_tensor"),
        (funcol, "reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


def ways(kind: str, x: Tensor, n: int, group: object) -> dict[str, Way]:
    """The three ways to call one collective. n must divide the number of rows of x."""
    world = dist.group.WORLD
    rows, columns = x.shape
    same, large, small = torch.empty_like(x), x.new_empty(n * rows, columns), x.new_empty(rows // n, columns)
    ring, line = [(i + 1) % n for i in range(n)], x.view(-1)  # torch permutes only 1-D tensors

    def c10d_all_reduce(x: Tensor) -> None:
        same.copy_(x)  # the others keep their input, so this one must, too
        dist.all_reduce(same, group=world, async_op=True).wait()

    def c10d_broadcast(x: Tensor) -> None:
        same.copy_(x)
        dist.broadcast(same, 0, group=world, async_op=True).wait()

    return {
        "all_reduce": {
            "c10d": c10d_all_reduce,
            "torch": lambda x: funcol.all_reduce(x, "sum", world).wait(),
            "spmd": lambda x: comm.all_reduce(x, "sum", group).wait(),
        },
        "all_gather_tensor": {
            "c10d": lambda x: GATHER(large, x, group=world, async_op=True).wait(),
            "torch": lambda x: ALL_GATHER(x, 0, world).wait(),
            "spmd": lambda x: comm.all_gather_tensor(x, 0, group).wait(),
        },
        "all_gather_tensor, dim 1": {
            "torch": lambda x: ALL_GATHER(x, 1, world),
            "spmd": lambda x: comm.all_gather_tensor(x, 1, group).wait(),
        },
        "reduce_scatter_tensor": {
            "c10d": lambda x: SCATTER(small, x, group=world, async_op=True).wait(),
            "torch": lambda x: REDUCE_SCATTER(x, "sum", 0, world).wait(),
            "spmd": lambda x: comm.reduce_scatter_tensor(x, "sum", 0, group).wait(),
        },
        "all_to_all_single": {
            "c10d": lambda x: dist.all_to_all_single(same, x, group=world, async_op=True).wait(),
            "torch": lambda x: funcol.all_to_all_single(x, None, None, world).wait(),
            "spmd": lambda x: comm.all_to_all_single(x, None, None, group).wait(),
        },
        "broadcast": {
            "c10d": c10d_broadcast,
            "torch": lambda x: funcol.broadcast(x, 0, world).wait(),
            "spmd": lambda x: comm.broadcast(x, 0, group).wait(),
        },
        "permute_tensor": {
            "torch": lambda x: funcol.permute_tensor(line, ring, world).wait(),
            "spmd": lambda x: comm.permute_tensor(line, ring, group).wait(),
        },
        "all_reduce_coalesced, 4": {
            "torch": lambda x: [y.wait() for y in funcol.all_reduce_coalesced([x] * 4, "sum", world)],
            "spmd": lambda x: [y.wait() for y in comm.all_reduce_coalesced([x] * 4, "sum", group)],
        },
    }[kind]  # fmt: skip


KINDS = (
    "all_reduce", "all_gather_tensor", "all_gather_tensor, dim 1", "reduce_scatter_tensor", "all_to_all_single",
    "broadcast", "permute_tensor", "all_reduce_coalesced, 4",
)  # fmt: skip


def play(rank: int, ranks: int, args: argparse.Namespace, folder: Path) -> None:
    """One rank: all collectives of all sizes. Rank 0 writes microseconds per call, by kind, size and way, to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    spellings = {"group": dist.group.WORLD, "mesh": spmd.init_device_mesh("cpu", (ranks,)), "list": list(range(ranks))}
    found = []
    for kind in KINDS:
        for size in args.sizes:
            x = torch.randn(4, size // 16)
            found.append((kind, size, measure(ways(kind, x, ranks, spellings[args.group]), x, ranks, args)))
    if rank == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(found: dict[str, Way], x: Tensor, ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds, in microseconds per call on the slowest rank, and the ratios such as "spmd / torch"."""
    times: dict[str, list[float]] = {way: [] for way in found}
    clock = time.thread_time if ranks == 1 else time.perf_counter
    order, shuffle = list(found), random.Random(0)  # the same order on all ranks
    for each in range(args.rounds + 1):
        shuffle.shuffle(order)
        for way in order:
            dist.barrier()
            start = clock()
            for _ in range(args.calls):
                found[way](x)
            took = torch.tensor((clock() - start) / args.calls * 1e6)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if each:  # the first round warms up
                times[way].append(took.item())
    medians = {way: statistics.median(values) for way, values in times.items()}
    for way in set(found) - {"spmd"}:
        pairs = zip(times["spmd"], times[way], strict=True)
        medians[f"spmd / {way}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return medians


def report(args: argparse.Namespace, busy: float, found: dict[int, list]) -> str:
    rows, ratios = [], []
    for ranks, results in found.items():
        for kind, size, us in results:
            ratios.append(us["spmd / torch"])
            over = [f"{us[ratio]:.2f}" if ratio in us else "" for ratio in ("spmd / c10d", "spmd / torch")]
            rows.append([str(ranks), kind, str(size), *[f"{us[way]:.1f}" if way in us else "" for way in WAYS], *over])
    cores = len(os.sched_getaffinity(0))
    return "\n".join([
        f"{date.today()}, torch {torch.__version__}, {cores} cores (load {busy:.1f} before), gloo; microseconds a "
        f"call, medians of {args.rounds} rounds of {args.calls} calls; group given as a {args.group}",
        "",
        table(["ranks", "collective", "bytes", *WAYS, "spmd / c10d", "spmd / torch"], rows, left=2),
        "",
        f"spmd / torch: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}",
    ])  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,4", help="numbers of ranks, such as 1,4")
    parser.add_argument("--sizes", default="1024,1048576", help="bytes of the input on a rank")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--group", choices=["group", "mesh", "list"], default="group", help="how spmd's group is given")
    parser.add_argument("--short", action="store_true", help="for CI")
    args = parser.parse_args()
    if args.short:
        args.sizes, args.rounds, args.calls = "1024", 15, 10
    args.ranks, args.sizes = ([int(n) for n in text.split(",")] for text in (args.ranks, args.sizes))
    return args


def main() -> None:
    args = arguments()
    busy = os.getloadavg()[0]
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # gloo would look up the host's name instead
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            mp.spawn(play, (ranks, args, Path(folder)), nprocs=ranks)
            found[ranks] = json.loads((Path(folder) / f"{ranks}.json").read_text())
    print(report(args, busy, found))


if __name__ == "__main__":
    main()
