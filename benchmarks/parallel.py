"""What `spmd.parallel` costs beside torch's own, eagerly, on 4 gloo ranks of this machine.

    python benchmarks/parallel.py                    # some minutes
    python benchmarks/parallel.py --only "fully shard" --reps 30
    python benchmarks/parallel.py --no-memory --short

The GPT of `examples/gpt.py` trains a step with AdamW: fully sharded (FSDP2 of torch), tensor-parallel
(`parallelize_module`), data-parallel (DistributedDataParallel); and the gradients of the fully sharded one are clipped,
once where their norm is small enough, and once where they are scaled.
Causal attention of a sequence that the ranks share out, forward and backward, goes round a ring, or gathers.
Both sides train copies of one model on the same batches in the same processes and take turns, in a new order each
round. The time of a step is that of the slowest rank, from a barrier on. The table has medians and their ratio, that of
the processor time of all ranks, and that of the peak of memory, which is measured in processes of their own: the
resident set at most, less what it was before the model was made. Losses are compared. Exits 1 where a ratio of times or
of memory is above its bar, or losses are further apart than 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from _table import table
from peers.context import RingAttention
from peers.dtensor import Local
from torch import nn
from torch.distributed import fsdp
from torch.distributed import tensor as theirs
from torch.distributed.tensor import parallel as styles

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import parallel as ours

RANKS = 4
SIDES = ("spmd", "torch")
BARS = {"fully shard": (0.95, 1.0), "tensor parallel": (0.8, None), "data parallel": (1.0, None), "clip": (0.3, None),
        "clip, scaled": (0.3, None), "ring": (1.0, None), "gather": (1.0, None)}  # fmt: skip
"""The most that times, and memory, may be of torch's."""

MOST = {"clip": 1e9, "clip, scaled": 1e-3}  # the norm that gradients may have

Step = Callable[[torch.Tensor], float]


def mesh_of(side: str):
    make = spmd.init_device_mesh if side == "spmd" else theirs.init_device_mesh
    return make("cpu", (RANKS,), mesh_dim_names=("all",))


def fully_shard(side: str, model: nn.Module) -> nn.Module:
    mesh, shard = mesh_of(side), ours.fully_shard if side == "spmd" else fsdp.fully_shard
    for block in model.blocks:
        shard(block, mesh=mesh)
    return shard(model, mesh=mesh)


def tensor_parallel(side: str, model: nn.Module) -> nn.Module:
    by = ours if side == "spmd" else styles
    columns = {f"blocks.*.{leaf}": by.ColwiseParallel() for leaf in ("attn.q", "attn.k", "attn.v", "mlp.up")}
    rows = {f"blocks.*.{leaf}": by.RowwiseParallel() for leaf in ("attn.out", "mlp.down")}
    by.parallelize_module(model, mesh_of(side), columns | rows)
    for block in model.blocks:
        block.attn = Local(block.attn, RANKS)  # which counts the heads that a rank has
    return model


def data_parallel(side: str, model: nn.Module) -> nn.Module:
    return ours.data_parallel(model, mesh_of(side)) if side == "spmd" else nn.parallel.DistributedDataParallel(model)


KINDS = {"fully shard": fully_shard, "tensor parallel": tensor_parallel, "data parallel": data_parallel}


def training(kind: str, side: str, model: nn.Module) -> Step:
    """A step of a model on this rank's part of the batch."""
    model = KINDS[kind](side, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: torch.Tensor) -> float:
        tokens = tokens if kind == "tensor parallel" else tokens.chunk(RANKS)[dist.get_rank()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def clipping(side: str, model: nn.Module, most: float) -> Step:
    """Clipping of the gradients of a fully sharded model, by a norm that is above or below theirs."""
    model = fully_shard(side, model)
    model(torch.ones(1, 8, dtype=torch.int64)).sum().backward()
    parameters, clip = list(model.parameters()), ours.clip_grad_norm_ if side == "spmd" else nn.utils.clip_grad_norm_

    def step(_: torch.Tensor) -> float:
        norm = clip(parameters, most)
        return (norm.full_tensor() if isinstance(norm, theirs.DTensor) else norm).item()

    return step


def attending(kind: str, side: str, model: GPT) -> Step:
    """Attention of this rank's part of a sequence to all of it, and the gradients."""
    heads, size, width = model.blocks[0].attn.n_head, 16 * model.pos_emb.weight.shape[0], model.pos_emb.weight.shape[1]
    draw = torch.Generator().manual_seed(dist.get_rank())
    part = 2, heads, size // RANKS, width // heads
    leaves, mesh = [torch.randn(part, generator=draw).requires_grad_() for _ in range(3)], mesh_of(side)

    def step(_: torch.Tensor) -> float:
        if side == "torch":
            out = RingAttention.apply(*leaves, mesh.get_group(), "alltoall" if kind == "ring" else "allgather")
        else:
            with ours.context_parallel(mesh, method="ring" if kind == "ring" else "allgather"):
                out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        return sum(x.square().sum() for x in (out, *grads)).item()

    return step


def made(kind: str, side: str, model: nn.Module) -> Step:
    if kind in ("ring", "gather"):
        return attending(kind, side, model)
    return clipping(side, model, MOST[kind]) if kind in MOST else training(kind, side, model)


def model_of(args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(args.layers, args.heads, args.width, args.block, args.vocab))


def batches(args: argparse.Namespace, n: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(args.vocab, (args.batch, args.block + 1), generator=draw) for _ in range(n)]


# ---- time -------------------------------------------------------------------------------------


def timed(step: Step, tokens: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of a step on the slowest rank, of processors on all ranks, and the average loss."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    loss = step(tokens)
    found = torch.tensor([time.perf_counter() - start, time.process_time() - used, loss], dtype=torch.float64)
    every = [torch.empty_like(found) for _ in range(RANKS)]
    dist.all_gather(every, found)
    slowest, together = torch.stack(every).amax(0), torch.stack(every).sum(0)
    return slowest[0].item(), together[1].item(), together[2].item() / RANKS


def compared(kind: str, args: argparse.Namespace) -> dict[str, list[tuple]]:
    model, order = model_of(args), random.Random(0)
    steps = {side: made(kind, side, copy.deepcopy(model)) for side in SIDES}
    found: dict[str, list[tuple]] = {side: [] for side in SIDES}
    for tokens in batches(args, 3 + args.reps):
        for side in order.sample(SIDES, 2):
            found[side].append(timed(steps[side], tokens))
    return found


# ---- memory -----------------------------------------------------------------------------------


def peak(kind: str, side: str, args: argparse.Namespace) -> float:
    """MB of the resident set at most in three steps, less before the model was made, on the rank with the most."""
    small = copy.copy(args)
    small.width, small.layers = 4 * args.heads, 1
    step = made(kind, side, model_of(small))
    for tokens in batches(small, 2):
        step(tokens)
    del step
    gc.collect()
    before = _status("VmRSS")
    step = made(kind, side, model_of(args))
    step(batches(args, 1)[0])
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    for tokens in batches(args, 3):
        step(tokens)
    most = torch.tensor(_status("VmHWM") - before)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def _status(key: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) / 1024


# ---- runs -------------------------------------------------------------------------------------


def on_rank(rank: int, port: int, what: tuple, args: argparse.Namespace, answers) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = peak(*what, args) if len(what) == 2 else compared(*what, args)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run(what: tuple, args: argparse.Namespace):
    """What four new processes find."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if len(what) == 2:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # memory that is freed goes back to the system
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(on_rank, (port, what, args, answers), RANKS)
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    return answers.get()


def row(kind: str, args: argparse.Namespace) -> tuple[list[str], bool]:
    found = run((kind,), args)
    wall, used = (
        {side: statistics.median(x[i] * 1e3 for x in found[side][3:]) for side in SIDES} for i in (0, 1)
    )  # fmt: skip
    apart = max(abs(a[2] - b[2]) / abs(b[2]) for a, b in zip(found["spmd"][:4], found["torch"][:4], strict=True))
    ratio, (most, most_memory) = wall["spmd"] / wall["torch"], BARS[kind]
    asks_memory = args.memory and most_memory is not None
    memory = run((kind, "spmd"), args) / run((kind, "torch"), args) if asks_memory else None
    right = ratio <= most and apart < 1e-4 and (memory is None or memory <= most_memory)
    cells = [
        kind, f"{wall['spmd']:.2f}", f"{wall['torch']:.2f}", f"{ratio:.3f}", f"{most}",
        f"{used['spmd'] / used['torch']:.3f}", "" if memory is None else f"{memory:.3f}", f"{apart:.0e}",
    ]  # fmt: skip
    return cells, right


HEADER = ["step", "spmd, ms", "torch, ms", "ratio", "bar", "of processors", "of memory", "losses apart"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BARS, default=list(BARS), help="these rows")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory, too")
    sizes = {"layers": 4, "heads": 4, "width": 256, "block": 64, "vocab": 512, "batch": 8, "reps": 20}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="small sizes; other options still count")
    if parser.parse_args().short:
        parser.set_defaults(layers=2, width=64, block=32, batch=4, reps=5)
    args = parser.parse_args()
    rows = [row(kind, args) for kind in args.only]
    print(table(HEADER, [cells for cells, _ in rows]))
    print(f"\nlayers {args.layers}, width {args.width}, {args.batch} x {args.block} tokens; torch {torch.__version__}")
    return int(not all(right for _, right in rows))


if __name__ == "__main__":
    sys.exit(main())
