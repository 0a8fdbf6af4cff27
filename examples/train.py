"""Train an example on a mesh by its ready plan, and then on one device, and compare the losses.

    python -m examples.train llama --mesh dp=2,tp=2          # starts four ranks on this machine
    python -m examples.train diffusion --mesh tp=4 --steps 100
    torchrun --nproc-per-node 4 -m examples.train bert --mesh dp=4

An example is a module with `make()`, a model; `batches()`, its data; `loss_of(model, *batch)`; and the meshes that it
offers. None of them knows of ranks: all that does is `train` below, in five lines.
"""

from __future__ import annotations

import argparse
import importlib
import math
from datetime import timedelta
from itertools import islice
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

import spmd
from spmd import Shard
from spmd.cli.launch import join, launch, launched, run_launched
from spmd.comm import all_reduce, wait
from spmd.parallel import clip_grad_norm_, plan_for

EXAMPLES = ("gpt_small", "llama", "bert", "mixtral", "diffusion", "convnet")


def example(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


def train(given: ModuleType, model: nn.Module, steps: int, mesh: spmd.DeviceMesh | None = None) -> list[float]:
    """The losses of so many steps, of the whole batch; on a mesh if there is one."""
    over = None
    if mesh is not None:
        plan = plan_for(model, mesh)
        model = plan.apply(model)
        over = mesh[plan.data_axes] if plan.data_axes else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    losses = []
    for batch in islice(given.batches(), steps):
        optimizer.zero_grad()
        loss = given.loss_of(model, *(part(x, over) for x in batch))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean(loss.detach(), over))
    return losses


def part(x: Tensor, over: spmd.DeviceMesh | None) -> Tensor:
    """This rank's part of a batch."""
    if over is None:
        return x
    return spmd.distribute_tensor(x, over, [Shard(0)] * over.ndim, src_data_rank=None).to_local()


def mean(loss: Tensor, over: spmd.DeviceMesh | None) -> float:
    """The loss of the whole batch."""
    for axis in range(over.ndim if over is not None else 0):
        loss = wait(all_reduce(loss, "avg", (over, axis)))
    return loss.item()


def start(given: ModuleType) -> nn.Module:
    """The model before the first step, the same each time."""
    torch.manual_seed(0)
    return given.make()


def mesh_of(text: str) -> dict[str, int]:
    """The axes of a mesh, and their sizes.

    >>> mesh_of("dp=2,tp=4")
    {'dp': 2, 'tp': 4}
    """
    return {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}


def on_rank(args: argparse.Namespace) -> None:
    join("cpu", timedelta(minutes=5))
    given, axes = example(args.example), args.mesh
    mesh = spmd.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if dist.get_rank() == 0:
        print(plan_for(start(given), mesh))
    found = train(given, start(given), args.steps, mesh)
    if dist.get_rank() == 0:
        wanted = train(given, start(given), args.steps)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            print(f"step {i:>3}  loss {a:.4f}  on one device {b:.4f}")
        print(f"largest difference: {max(abs(a - b) for a, b in zip(found, wanted, strict=True)):.1e}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--mesh", type=mesh_of, default={"dp": 2, "tp": 2}, help="axes and sizes (dp=2,tp=2)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    args = parser.parse_args()
    if launched():
        run_launched(on_rank, args)
    else:
        mesh = ",".join(f"{name}={size}" for name, size in args.mesh.items())
        command = ["-m", "examples.train", args.example, "--mesh", mesh, "--steps", str(args.steps)]
        launch(command, math.prod(args.mesh.values()))


if __name__ == "__main__":
    main()
