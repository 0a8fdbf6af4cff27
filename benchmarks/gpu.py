"""What one GPU can show: correctness, memory and time of compiled steps on `cuda`, in one table.

    python benchmarks/gpu.py                          # all parts, some minutes
    python benchmarks/gpu.py --only "random numbers"  # one part
    python benchmarks/gpu.py --device cpu             # a smoke test: every part that needs no GPU runs, in small sizes

- simulated ranks: trainings on 2 x 2 simulated ranks of the device, beside the same on one device;
- one rank: the same training on a mesh of one rank with a real process group, NCCL's on a GPU;
- passes: the same with the pass that GPUs have by default, "overlap", and with none;
- stamped blocks: the same with the calls of equal modules stamped;
- eager: `fully_shard` and `parallelize_module` of `spmd.parallel` on simulated ranks, step by step;
- attention: the device's kernels on simulated ranks, of DTensors and by `context_parallel`, with gradients;
- four gloo ranks: four processes that share the device, their tensors on it;
- random numbers: dropout and initialisers give one global tensor on all meshes;
- memory: what `program.memory()` predicts, and what torch's allocator has counted;
- Inductor: the regions of a step compiled, their numbers beside the ops one by one;
- CUDA graphs: a bound program recorded once and replayed, beside its calls;
- step time: of one rank, beside the plain step and torch.compile of it;
- launches: how long a call keeps the host, and how long the device works.

A part that the device cannot run says what it would have run.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from _table import table
from torch import nn, optim

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import FullyShard, LocalTensorMode, Shard, distribute_tensor
from spmd.cli.demo import PARAMS
from spmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    fully_shard,
    parallelize_module,
)

INPUTS = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
BIG, SMALL, DEEP = GPTConfig(12, 12, 768, 512, 50304), GPTConfig(1, 2, 8, 8, 32), GPTConfig(4, 2, 8, 8, 32)
WIDE = GPTConfig(2, 16, 2048, 512, 4096)
STYLES = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
PATIENCE = timedelta(minutes=5)


class Setup(NamedTuple):
    """Where the parts run. config, batch: of the GPT that is timed."""

    device: str
    config: GPTConfig
    batch: int
    repeats: int

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


class Row(NamedTuple):
    """One line of the table. ok: whether it is as it has to be; None where nothing is asked."""

    part: str
    what: str
    figure: str
    ok: bool | None = None


Rows = Iterator[tuple[str, str, bool | None]]
"""What was done, the figure, and whether it is right."""


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).mean((2, 3)))


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.5))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


def made(make: Callable[[], nn.Module], setup: Setup, lr: float = 1e-3) -> tuple[nn.Module, optim.Optimizer]:
    """A model on the device and its optimiser, the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().to(setup.device)
    return model, optim.AdamW(model.parameters(), lr=lr)


def batches(setup: Setup, *shape: int, classes: int = 3, n: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(*shape, generator=g), torch.randint(classes, shape[:1], generator=g)) for _ in range(n)]
    return [(x.to(setup.device), y.to(setup.device)) for x, y in pairs]


def text(setup: Setup, config: GPTConfig, batch: int, n: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    size = (2, batch, config.block_size)
    return [tuple(torch.randint(config.vocab, size, generator=g).to(setup.device)) for _ in range(n)]


def on_mesh(shape: tuple[int, ...], setup: Setup) -> spmd.DeviceMesh:
    return spmd.init_device_mesh(setup.device, shape, mesh_dim_names=("dp", "tp"))


def far(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


def value(loss: torch.Tensor) -> float:
    whole = loss.detach().full_tensor() if isinstance(loss, spmd.DTensor) else loss.detach()
    return (whole.reconcile() if hasattr(whole, "reconcile") else whole).item()


# ---- the parts --------------------------------------------------------------------------------


def simulated(setup: Setup) -> Rows:
    plans = {"tensor parallel": {"params": PARAMS}, "fully sharded": {"fully_shard": FullyShard("dp")}}
    models = {"GPT": (lambda: GPT(SMALL), text(setup, SMALL, 4))}
    models["convolutions"] = Convolutions, batches(setup, 5, 1, 8, 8)
    for name, (make, data) in models.items() if setup.has_gpu else [*models.items()][:1]:
        model, optimizer = made(make, setup)
        wanted = [value(train_step(model, optimizer, *batch)) for batch in data]
        for plan, given in plans.items() if setup.has_gpu else [*plans.items()][:1]:
            if name == "convolutions" and "params" in given:
                given = {}
            found = in_simulation((2, 2), setup, make, data, given)
            yield f"{name}, {plan}, 2 x 2", f"{far(found, wanted):.1e}", far(found, wanted) < 1e-4


def in_simulation(shape: tuple[int, ...], setup: Setup, make, data, given) -> list[float]:
    pair = made(make, setup)
    with LocalTensorMode(torch.Size(shape).numel()):
        spmd.manual_seed(3)
        step = spmd.compile(train_step, on_mesh(shape, setup), inputs=INPUTS, **given)
        return [value(step(*pair, *batch)) for batch in data]


def one_rank(setup: Setup) -> Rows:
    backend = "nccl" if setup.has_gpu else "gloo"
    with process_group(backend, 0, 1, free_port()):
        found = trained(setup, (1, 1), {"params": PARAMS})
    wanted = plain(setup)
    yield f"GPT, one {backend} rank", f"{far(found, wanted):.1e}", far(found, wanted) < 1e-5


def trained(setup: Setup, shape: tuple[int, ...], given) -> list[float]:
    pair = made(lambda: GPT(SMALL), setup)
    step = spmd.compile(train_step, on_mesh(shape, setup), inputs=INPUTS, **given)
    return [value(step(*pair, *batch)) for batch in text(setup, SMALL, 4)]


def plain(setup: Setup) -> list[float]:
    pair = made(lambda: GPT(SMALL), setup)
    return [value(train_step(*pair, *batch)) for batch in text(setup, SMALL, 4)]


def passes(setup: Setup) -> Rows:
    data, given = text(setup, SMALL, 4), {"fully_shard": FullyShard("dp")}
    plain, overlapped = (
        in_simulation((2, 2), setup, lambda: GPT(SMALL), data, {**given, "passes": each}) for each in ((), ("overlap",))
    )
    yield "fully sharded, 2 x 2, overlap / none", f"{far(overlapped, plain):.1e}", far(overlapped, plain) < 1e-5
    if setup.has_gpu:
        with process_group("nccl", 0, 1, free_port()):
            plain, overlapped = (trained(setup, (1, 1), {**given, "passes": each}) for each in ((), ("overlap",)))
        yield "the same, one nccl rank", f"{far(overlapped, plain):.1e}", far(overlapped, plain) < 1e-5


def stamped(setup: Setup) -> Rows:
    data = text(setup, DEEP, 4, 2)
    found = []
    for stamps in (False, True):
        began = time.perf_counter()
        found.append(in_simulation((2, 2), setup, lambda: GPT(DEEP), data, {"params": PARAMS, "stamp_blocks": stamps}))
        took = time.perf_counter() - began
        yield f"GPT of 4 blocks, 2 x 2, stamps {'on' if stamps else 'off'}", f"{took:.1f} s, all calls", None
    yield "their losses", f"{far(*found):.1e}", far(*found) < 1e-5


def eager(setup: Setup) -> Rows:
    data = text(setup, SMALL, 4)
    model, optimizer = made(lambda: GPT(SMALL), setup)
    wanted = [value(train_step(model, optimizer, *batch)) for batch in data]
    for name, share_out in {"fully_shard": _fully_sharded, "parallelize_module": _in_styles}.items():
        with LocalTensorMode(4):
            model, _ = made(lambda: GPT(SMALL), setup)
            share_out(model, spmd.init_device_mesh(setup.device, (4,)))
            optimizer = optim.AdamW(model.parameters(), lr=1e-3)
            found = [value(train_step(model, optimizer, *batch)) for batch in data]
        yield f"GPT, {name}, 4 ranks", f"{far(found, wanted):.1e}", far(found, wanted) < 1e-4


def _fully_sharded(model: GPT, mesh: spmd.DeviceMesh) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)


def _in_styles(model: GPT, mesh: spmd.DeviceMesh) -> None:
    parallelize_module(model, mesh, STYLES)


def attention(setup: Setup) -> Rows:
    g = torch.Generator().manual_seed(1)
    whole = [torch.randn(4, heads, 64, 16, generator=g) for heads in (4, 2, 2, 4)]
    for dtype, bar in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2))[: 1 + setup.has_gpu]:
        given = [x.to(setup.device, dtype) for x in whole]
        wanted = attended(given)
        found = {f"DTensors, dim {dim} sharded": _of_dtensors(setup, given, dim) for dim in range(3)}
        found.update((f"context_parallel, {how}", _of_parts(setup, given, how)) for how in ("ring", "ring_q", "heads"))
        for how, ours in found.items():
            off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, wanted, strict=True))
            yield f"{how}, 4 ranks, {str(dtype).removeprefix('torch.')}", f"{off:.1e}", off < bar


def attended(given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of q, k and v."""
    *leaves, weight = [x.detach() for x in given]
    out = F.scaled_dot_product_attention(*[x.requires_grad_() for x in leaves], is_causal=True, enable_gqa=True)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def _of_dtensors(setup: Setup, given: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh(setup.device, (4,))
        found = attended([distribute_tensor(x, mesh, [Shard(dim)]) for x in given])
        return [x.full_tensor().reconcile() for x in found]


def _of_parts(setup: Setup, given: list[torch.Tensor], method: str) -> list[torch.Tensor]:
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh(setup.device, (4,))
        parts = context_parallel_shard(mesh, given, [2] * 4)
        with context_parallel(mesh, method=method):
            found = attended(parts)
        return [x.reconcile() for x in context_parallel_unshard(mesh, found, [2] * 4)]


def four_ranks(setup: Setup) -> Rows:
    context, port = mp.get_context("spawn"), free_port()
    results = context.SimpleQueue()
    mp.start_processes(_rank, args=(setup, port, results), nprocs=4, start_method="spawn")
    wanted = plain(setup)
    found = [results.get() for _ in range(4)]
    worst = max(far(losses, wanted) for losses in found)
    yield f"GPT, 2 x 2 gloo ranks, tensors on {setup.device}", f"{worst:.1e}", worst < 1e-4


def _rank(rank: int, setup: Setup, port: int, results) -> None:
    torch.set_num_threads(1)
    with process_group("gloo", rank, 4, port):
        results.put(trained(setup, (2, 2), {"params": PARAMS}))


@contextmanager
def process_group(backend: str, rank: int, ranks: int, port: int) -> Iterator[None]:
    if backend == "nccl":
        torch.cuda.set_device(0)
    address = f"tcp://localhost:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def random_numbers(setup: Setup) -> Rows:
    shapes = (1, 1), (2, 2), (4, 1), (1, 3)
    found = [_drawn(shape, setup) for shape in shapes]
    alike = all(torch.equal(x, y) for each in found[1:] for x, y in zip(each, found[0], strict=True))
    yield f"normal, uniform and dropout on {len(shapes)} meshes", "equal" if alike else "differ", alike
    losses = [in_simulation(shape, setup, Dropped, batches(setup, 6, 8, n=2), {}) for shape in shapes[1:3]]
    worst = max(far(each, losses[0]) for each in losses)
    yield "a training with dropout", f"{worst:.1e}", worst < 1e-4


def _drawn(shape: tuple[int, ...], setup: Setup) -> list[torch.Tensor]:
    with LocalTensorMode(torch.Size(shape).numel()):
        spmd.manual_seed(3)
        mesh, split = on_mesh(shape, setup), [Shard(0), Shard(1)]
        made = [spmd.randn(70, 33, device_mesh=mesh, placements=split), spmd.rand(70, 33, device_mesh=mesh)]
        made.append(F.dropout(spmd.ones(70, 33, device_mesh=mesh, placements=split), 0.3))
        whole = [x.full_tensor() for x in made]
        return [(x.reconcile() if hasattr(x, "reconcile") else x).cpu() for x in whole]


def memory(setup: Setup) -> Rows:
    step, pair, data = ready(setup)
    predicted = step.program.memory((0, 0)).peak
    if not setup.has_gpu:
        yield "predicted peak of a rank", f"{predicted:,} bytes; torch.cuda.max_memory_allocated was not asked", None
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(*pair, *data[0])
    torch.cuda.synchronize()
    counted, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspace = kept - torch.cuda.memory_allocated()
    yield "cuBLAS's workspace, which is no tensor", f"{workspace:,}", None
    tensors = counted - workspace
    yield "peak of a rank, predicted / allocated", f"{predicted:,} / {tensors:,}", abs(predicted / tensors - 1) < 0.005


@functools.lru_cache(maxsize=1)
def ready(setup: Setup, backend: str = "eager"):
    """A step on a mesh of one rank that has its programs, with what it is called with. The last one is kept."""
    pair = made(lambda: GPT(setup.config), setup)
    data = text(setup, setup.config, setup.batch)
    step = spmd.compile(train_step, spmd.DeviceMesh(setup.device, [[0]], mesh_dim_names=("dp", "tp")), backend=backend)
    for batch in data:
        step(*pair, *batch)
    return step, pair, data


def inductor(setup: Setup) -> Rows:
    small = setup._replace(config=SMALL, batch=4)
    wanted = _losses("eager", small)
    began = time.perf_counter()
    found = _losses("inductor", small)
    yield "a small GPT, all calls", f"{time.perf_counter() - began:.1f} s", None
    yield "losses beside the ops one by one", f"{far(found, wanted):.1e}", far(found, wanted) < 1e-4


def _losses(backend: str, setup: Setup) -> list[float]:
    step, pair, data = ready(setup, backend)
    return [value(step(*pair, *batch)) for batch in data]


def cuda_graphs(setup: Setup) -> Rows:
    step, pair, (batch, *_) = ready(setup)
    if not setup.has_gpu:
        yield "would record step.program's bound code in a torch.cuda.CUDAGraph", "needs a GPU", None
        return
    bound = step._last
    static = [x.clone() if isinstance(x, torch.Tensor) else x for x in _inputs_of(step, bound, pair, batch)]
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            bound.module(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bound.module(*static)
        called = per_call(setup, lambda: bound.module(*static))
    replayed = per_call(setup, graph.replay)
    yield "the bound program: called / replayed", f"{called:.2f} / {replayed:.2f} ms", replayed <= called


def _inputs_of(step, bound, pair, batch) -> list:
    """What the bound program was called with."""
    kept = []
    run, bound.code = bound.code, lambda *given: kept.append(given) or run(*given)
    step(*pair, *batch)
    bound.code = run
    return list(kept[0])


def step_time(setup: Setup) -> Rows:
    data = text(setup, setup.config, setup.batch, 1)[0]
    pair = made(lambda: GPT(setup.config), setup)
    theirs = per_call(setup, lambda: train_step(*pair, *data))
    step, ours, _ = ready(setup)
    mine = per_call(setup, lambda: step(*ours, *data))
    yield "spmd / the plain step, one rank", f"{mine:.2f} / {theirs:.2f} ms, {mine / theirs:.2f}", None


def launches(setup: Setup) -> Rows:
    """Of a step of fewer kernels than the device's queue holds: a call that finds the queue full has to wait."""
    wide = setup._replace(config=WIDE, batch=16) if setup.has_gpu else setup
    step, pair, (batch, *_) = ready(wide)
    found = []
    for _ in range(setup.repeats):
        setup.synchronize()
        began = time.perf_counter()
        step(*pair, *batch)
        returned = time.perf_counter() - began
        setup.synchronize()
        found.append((returned, time.perf_counter() - began))
    returned, done = (1e3 * statistics.median(times) for times in zip(*found, strict=True))
    asked = "a call returns before the device is done" if setup.has_gpu else "on a CPU both are the work itself"
    is_early = returned < 0.5 * done if setup.has_gpu else None
    yield f"a call returns / is done; {asked}", f"{returned:.2f} / {done:.2f} ms", is_early


def per_call(setup: Setup, call: Callable[[], object]) -> float:
    """Milliseconds of a call: the median of several."""
    times = []
    for _ in range(setup.repeats):
        setup.synchronize()
        began = time.perf_counter()
        call()
        setup.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


PARTS = {
    "simulated ranks": simulated, "one rank": one_rank, "passes": passes, "stamped blocks": stamped, "eager": eager,
    "attention": attention, "four gloo ranks": four_ranks, "random numbers": random_numbers, "memory": memory,
    "Inductor": inductor, "CUDA graphs": cuda_graphs, "step time": step_time, "launches": launches,
}  # fmt: skip


# ---- the table --------------------------------------------------------------------------------


def rows(setup: Setup, parts: list[str]) -> Iterator[Row]:
    """The rows of these parts. A part that fails is a row, too."""
    for part in parts:
        try:
            for what, figure, ok in PARTS[part](setup):
                yield Row(part, what, figure, ok)
        except Exception as error:
            traceback.print_exc()
            yield Row(part, f"{type(error).__name__}: {error}"[:100], "failed", False)


def show(found: list[Row]) -> str:
    words = {True: "yes", False: "NO", None: ""}
    return table(["part", "what", "figure", "as it has to be"], [[*r[:3], words[r.ok]] for r in found], left=2)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, action="append", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--but", choices=PARTS, action="append", default=[], metavar="PART", help="leave a part out")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs the parts that need none")
    gpu = args.device == "cuda"
    setup = Setup(args.device, BIG if gpu else SMALL, 8 if gpu else 4, 20 if gpu else 3)
    parts = [part for part in args.only or PARTS if part not in args.but]
    found = list(rows(setup, parts))
    what = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} cores"
    print(f"torch {torch.__version__}, {args.device}: {what}\n\n{show(found)}")
    return int(any(r.ok is False for r in found))


if __name__ == "__main__":
    sys.exit(main())
