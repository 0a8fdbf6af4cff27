"""Is the peak of memory that a program says the one that its ranks need? And how does it compare with a step by hand?

    python benchmarks/peaks.py                    # six models under four plans on four gloo ranks, and the peers
    python benchmarks/peaks.py --only llama t5    # some of the models, without peers
    python benchmarks/peaks.py --peers            # only beside steps by hand, and torch's FSDP2
    python benchmarks/peaks.py --steps            # kinds of steps of a small net, on each rank

Stock models of `transformers` in small configurations, a plain train step with AdamW. All tensors of each rank are
counted, from when an op makes them until nobody holds them, in later steps of a training; of several steps the least,
because a thread of the network may hold for a moment longer what it has sent. Of the four ranks the one that is
furthest off is in the table. The kinds of steps (`peak_steps.py`) are of a small net, where what an op holds for a
moment counts, too.

The peers train a GPT: the step by hand of `peers/c10d.py`, and torch's `fully_shard` on the embedding's module, each
block and the root. They are counted as our step is. Bars: predicted within 0.5 % of counted; the peak at most 1.02
times that of the step by hand, and for parameters stored in shards at most FSDP2's. Exits 1 where one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
import transformers
from _table import table
from models import STOCK, batches, made, tensor_parallel, train_step
from peak_steps import STEPS, peaks_of_step
from peers import c10d
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from workers import Pool  # starts processes

import spmd
from examples.gpt import GPT, GPTConfig
from examples.gpt import train_step as train_gpt
from spmd import Shard
from tests.expand.test_memory import Counted, counted_beside

MODELS = ("gpt2", "llama", "bert", "mixtral", "vit", "t5")
NEAR, BY_HAND, FSDP2 = 0.005, 1.02, 1.0

BY_COLUMNS = {
    "gpt2": {"*.c_fc.weight": 1, "*.c_fc.bias": 0, "*.mlp.c_proj.weight": 0},
    "bert": {
        "*.query.*": 0, "*.key.*": 0, "*.value.*": 0, "*.attention.output.dense.weight": 1, "*.intermediate.dense.*": 0,
        "*.layer.*.output.dense.weight": 1,
    },
    "vit": {"*.[qkv]_proj.*": 0, "*.o_proj.weight": 1, "*.fc1.*": 0, "*.fc2.weight": 1},
    "t5": {"*.[qkv].weight": 0, "*.o.weight": 1, "*.wi.weight": 0, "*.wo.weight": 1},
}  # fmt: skip
"""Of models without a plan of their own: the dims of parameters that are sharded along tp."""
PLANS = {
    "dp": ((4, 1), False, {}), "tp": ((1, 4), True, {}), "ZeRO-3": ((4, 1), False, {"fully_shard": "dp"}),
    "ZeRO-3 x tp": ((2, 2), True, {"fully_shard": "dp"}),
}  # fmt: skip
"""For each plan the shape of the mesh, whether parameters are sharded along tp, and what else the compiler is told."""


def sharded_along_tp(name: str, model: nn.Module) -> dict[str, dict]:
    """The parameters that are sharded along tp: by the plan of the model, or by the table."""
    own = tensor_parallel(model)
    return own or {pattern: {"tp": Shard(dim)} for pattern, dim in BY_COLUMNS[name].items()}


def peaks_of(name: str, plan: str) -> tuple[int, int]:
    """What a later step of a stock model needs at most on this rank: predicted, and counted while it runs."""
    shape, along_tp, said = PLANS[plan]
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = made(STOCK[name])
    if along_tp:
        said = said | {"params": sharded_along_tp(name, model)}
    step = spmd.compile(train_step, mesh, inputs={"batch.*": {"dp": Shard(0)}}, **said)
    optimizer, batch = torch.optim.AdamW(model.parameters()), batches(STOCK[name])[0]
    return counted_beside(step, mesh, lambda: step(model, optimizer, batch))


def model_rows(pool: Pool, names: list[str]) -> Iterator[tuple[list[str], bool]]:
    for name in names:
        for plan in PLANS:
            yield _row(name, plan, pool.run(_on_rank, peaks_of, name, plan, timeout=600.0))


def step_rows(pool: Pool, names: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Of each kind of step, under each plan, the rank and the call that are furthest off."""
    for name in names:
        for plan, asked in PLANS.items():
            found = [pair for pairs in pool.run(_on_rank, peaks_of_step, name, *asked, timeout=600.0) for pair in pairs]
            yield _row(name, plan, found)


def _row(name: str, plan: str, found: list[tuple[int, int]]) -> tuple[list[str], bool]:
    predicted, counted = max(found, key=lambda pair: abs(pair[0] - pair[1]) / pair[1])
    off = abs(predicted - counted) / counted
    fine = off <= NEAR
    return [name, plan, f"{predicted:,}", f"{counted:,}", f"{off:.2%}", "" if fine else "OFF"], fine


# ---- peers ------------------------------------------------------------------------------------

LAYERS, WIDTH, WORDS, BATCH, TIME = 4, 64, 256, 16, 32
SPLIT = {
    "*.attn.[qkv].weight": {"tp": Shard(0)}, "*.attn.[qkv].bias": {"tp": Shard(0)},
    "*.attn.out.weight": {"tp": Shard(1)}, "*.mlp.up.*": {"tp": Shard(0)}, "*.mlp.down.weight": {"tp": Shard(1)},
}  # fmt: skip
BESIDE = {
    "dp, by hand": ((4, 1), {}), "tp, by hand": ((1, 4), {"params": SPLIT}),
    "dp x tp, by hand": ((2, 2), {"params": SPLIT}), "ZeRO-3, FSDP2": ((4, 1), {"fully_shard": "dp"}),
}  # fmt: skip


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=LAYERS, n_head=4, n_embd=WIDTH, vocab=WORDS, block_size=TIME))
    return model, tuple(torch.randint(0, WORDS, (2, BATCH, TIME)))


def ours(plan: str) -> int:
    """The bytes that a later step of ours needs at most on this rank, counted."""
    shape, said = BESIDE[plan]
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    step = spmd.compile(train_gpt, mesh, inputs={"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}, **said)
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    return counted_beside(step, mesh, lambda: step(model, optimizer, *batch))[1]


def theirs(plan: str) -> int:
    """The same of the peer."""
    shape, _ = BESIDE[plan]
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model, batch = gpt()
    if plan.endswith("FSDP2"):
        return counted_peer(*fsdp2(model, mesh["dp"]), batch)
    step = c10d.train_step(model, 1e-3, mesh, flat=False)
    return counted_peer(step, model, inspect.getclosurevars(step).nonlocals["optimizer"], batch)


def fsdp2(model: nn.Module, mesh: dist.DeviceMesh) -> tuple[Callable, nn.Module, torch.optim.Optimizer]:
    """A step of torch's `fully_shard`."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        tokens, targets = (x.chunk(mesh.size())[mesh.get_local_rank()] for x in (tokens, targets))
        return train_gpt(model, optimizer, tokens, targets).item()

    return step, model, optimizer


class Counting(Counted):
    """Counts the blocks of torch's DTensors, and what is freed and made again in storages that stay, as FSDP2 does."""

    def note(self, values: Any) -> None:
        super().note([getattr(x, "_local_tensor", x) for x in tree_leaves(values)])

    @contextlib.contextmanager
    def resizes(self) -> Iterator[None]:
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            found = real(storage, size)
            self.alive[storage._cdata] = StorageWeakRef(storage), size
            self.note(())
            return found

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield


def counted_peer(step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> int:
    """The most bytes that are alive in a later step."""
    counts = []
    for i in range(4):
        grads = [p.grad for p in model.parameters()]
        with Counting() as count, count.resizes():
            count.note([*model.parameters(), *model.buffers(), *grads, list(optimizer.state.values()), batch])
            del grads
            step(*batch)
        if i > 1:
            counts.append(count.most)
    return min(counts)


def _on_rank(rank: int, ask: Callable, *args: Any) -> Any:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    return ask(*args)


def peer_rows(pool: Pool) -> Iterator[tuple[list[str], bool]]:
    for plan in BESIDE:
        mine, other = (max(pool.run(_on_rank, ask, plan, timeout=600.0)) for ask in (ours, theirs))
        fine = mine <= other * (FSDP2 if plan.endswith("FSDP2") else BY_HAND)
        yield [plan, f"{mine:,}", f"{other:,}", f"{mine / other:.3f}", "" if fine else "ABOVE"], fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=MODELS, help="these models, without peers")
    parser.add_argument("--peers", action="store_true", help="only the peers")
    parser.add_argument("--steps", nargs="*", metavar="PART", help="only the kinds of steps with these in their names")
    args = parser.parse_args()
    pool, good, names = Pool(4), True, args.only or list(MODELS)
    tables = []
    columns = ["plan", "predicted", "counted", "off", ""]
    if args.steps is not None:
        kinds = [name for name in STEPS if not args.steps or any(part in name for part in args.steps)]
        tables.append((["step", *columns], step_rows(pool, kinds)))
    elif not args.peers:
        tables.append((["model", *columns], model_rows(pool, names)))
    if args.only is None and args.steps is None:
        tables.append((["plan and peer", "ours", "theirs", "ratio", ""], peer_rows(pool)))
    for header, found in tables:
        rows = []
        for row, fine in found:
            print(*row, sep="  ", flush=True)
            rows.append(row)
            good &= fine
        print(f"\n{table(header, rows, left=2 if header[1] == 'plan' else 1)}\n")
    pool.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
