"""What does a call of a compiled step cost beside its ops? The step, and the ops that it runs, called by hand.

    python benchmarks/overhead.py                # a GPT with AdamW and an MLP with SGD: tiny sizes, one rank
    python benchmarks/overhead.py --flat 10000   # the memory of the process over so many calls

By hand are the ops of the bound program as `torch.ops` calls, one after the other in a plain function, with the same
frees. Alone is the function that the step runs for them, whose ops are called in less time. The three run in turns, and
each round counts the processor's seconds of each. What the step does besides: it finds the state in its arguments,
compares what it took for granted, tells the other ranks what it is about to run, and stores the results. Bar: 1.05.

Over many calls memory is flat: from a tenth of the calls on, which fill what is kept, to the last one what malloc has
handed out grows by at most 128 KiB, and what Python has by less than a block for each call. What the process has in the
system's memory beside that are free blocks between those in use: malloc takes some MB more while it finds places for
tensors of many sizes, at the first calls or the first thousands, and keeps them. In the second half of the calls it
takes at most 512 KiB; so memory that neither of the two knows of is seen, too. Half of the calls get another size of
the batch, which has a program of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig, train_step

Run = Callable[[], object]


def gpt(layers: int) -> tuple[Callable, tuple]:
    """A train step of a GPT with AdamW, and its arguments."""
    model = GPT(GPTConfig(n_layer=layers, n_head=4, n_embd=32, block_size=16, vocab=64))
    tokens, targets = (torch.randint(64, (4, 16)) for _ in "xy")
    return train_step, (model, torch.optim.AdamW(model.parameters()), tokens, targets)


def mlp(layers: int) -> tuple[Callable, tuple]:
    """A train step of an MLP with SGD and momentum, and its arguments."""
    model = nn.Sequential(*[each for _ in range(layers) for each in (nn.Linear(32, 32), nn.Tanh())])
    return mlp_step, (model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.rand(16, 32))


def mlp_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled(fn: Callable, given: tuple) -> tuple[Run, Run, Run, int]:
    """A call of the step, the same ops by hand and alone, and how many there are."""
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    step = spmd.compile(fn, mesh, inputs={"*": {"dp": spmd.Shard(0)}})
    for _ in range(3):
        step(*given)
    bound = step._last
    call = step._call(given, {}, False)
    leaves = call.placed_leaves()
    flat = [bound._input_value(i, call.tensors, leaves, call.numbers) for i in bound.captured.inputs]

    def by_hand() -> object:
        with torch.no_grad():
            return bound.module(*flat)

    nodes = sum(node.op == "call_function" for node in bound.module.graph.nodes)
    return lambda: step(*given), by_hand, lambda: bound.execute(flat), nodes


KINDS = {"gpt": gpt, "mlp": mlp}


def seconds(run: Run, calls: int) -> float:
    begin = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begin) / calls


class MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` gives, in bytes. uordblks: handed out of the heap. hblkhd: of pages of their own."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


@dataclass(frozen=True)
class Held:
    """The memory of the process: KiB that the system has given it, KiB that malloc has handed out, Python's blocks."""

    resident: int
    handed_out: int
    blocks: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mallinfo = ctypes.CDLL(None).mallinfo2  # glibc 2.33
        mallinfo.restype = MallInfo
        of = mallinfo()
        resident = pages * os.sysconf("SC_PAGE_SIZE") // 1024
        return cls(resident, (of.uordblks + of.hblkhd) // 1024, sys.getallocatedblocks())


def held_over(name: str, calls: int) -> list[Held]:
    """The memory after each tenth of the calls."""
    kind, layers = name.split()
    torch.manual_seed(0)
    fn, given = KINDS[kind](int(layers))
    step = spmd.compile(fn, spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    half = [x[: len(x) // 2] if isinstance(x, torch.Tensor) else x for x in given]
    found = []
    for i in range(1, calls + 1):
        step(*(half if i % 2 else given))
        if i % (calls // 10) == 0:
            found.append(Held.now())
    return found


def flat(names: list[str], calls: int) -> int:
    """The memory over many calls as a table. 1 where it grows."""
    held = {name: held_over(name, calls) for name in names}
    rows = [
        [f"{name} layers", f"{(i + 1) * calls // 10:,}", f"{h.resident:,}", f"{h.handed_out:,}", f"{h.blocks:,}"]
        for name, several in held.items() for i, h in enumerate(several)
    ]  # fmt: skip
    print(table(["step", "calls", "resident, KiB", "handed out, KiB", "blocks of Python"], rows))
    is_flat = True
    for name, several in held.items():
        first, half, last = several[0], several[4], several[-1]
        kib, blocks, late = (
            last.handed_out - first.handed_out, last.blocks - first.blocks, last.resident - half.resident
        )  # fmt: skip
        print(
            f"{name} layers, from a tenth of the calls on: {kib} KiB handed out (at most {MOST_KIB}), {blocks} blocks "
            f"(fewer than {calls}); resident in the second half: {late} KiB (at most {MOST_RESIDENT_KIB})"
        )
        is_flat &= kib <= MOST_KIB and blocks < calls and late <= MOST_RESIDENT_KIB
    return int(not is_flat)


MOST_KIB = 128
"""What malloc may have handed out meanwhile: of 9,000 calls that keep anything, each keeps more than 14 bytes."""

MOST_RESIDENT_KIB = 512
"""What the process may have got meanwhile from the system: pages of malloc that lie between blocks in use."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = ["gpt 2", "gpt 6", "mlp 8"]
    parser.add_argument("--steps", nargs="*", default=steps, help="kinds, with their layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="of each in a round (default: %(default)s)")
    parser.add_argument("--flat", type=int, metavar="CALLS", help="the memory over so many calls of each step")
    args = parser.parse_args()
    if args.flat:
        return flat(args.steps, args.flat)
    rows = []
    for name in args.steps:
        kind, layers = name.split()
        torch.manual_seed(0)
        *runs, nodes = compiled(*KINDS[kind](int(layers)))
        turns = [[seconds(run, args.calls) for run in runs] for _ in range(args.rounds)]
        ratios = [statistics.median(turn[0] / turn[i] for turn in turns) for i in (1, 2)]
        ms = [1e3 * statistics.median(column) for column in zip(*turns, strict=True)]
        rows.append([f"{name} layers", str(nodes), *(f"{x:.2f}" for x in ms), *(f"{x:.3f}" for x in ratios)])
    print(table(["step", "ops", "step, ms", "by hand, ms", "alone, ms", "of by hand", "of alone"], rows))
    return int(any(float(row[-2]) > 1.05 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
