"""What the cost of a choice is made of: moves as the planner makes them, local work, and what is owed at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spmd
from spmd import MeshTopoInfo, Program, Replicate, Shard
from spmd.expand.choose.price import program_cost
from spmd.expand.choose.work import Roofline
from spmd.mesh import Compute, Link, Machine, Way
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import parse_spec

SQUARE = (256, 256)


def machine(us_of_link: float, gb_of_link: float, gflops: float) -> Machine:
    """A machine of so quick links and ranks."""
    ways = (Way("ring", us_of_link, (Link(us_of_link, gb_of_link),)),)
    return Machine("odd", ways, compute=Compute(1000.0, (("float32", gflops),)))


QUICK_LINKS, QUICK_RANKS = machine(0.01, 1000.0, 1.0), machine(1000.0, 0.01, 1e6)
WHOLE = {"result": [Replicate(), Replicate()]}


def chosen(fn: Callable, *shapes: tuple[int, ...], of: Machine = QUICK_LINKS, **said) -> Program:
    """The program of a function of tensors, for two times two ranks that do not exist."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=of))
    step = spmd.compile(fn, mesh, choose="program", bucket_mb=None, **said)
    return step.program_for(*map(torch.zeros, shapes))


def test_a_replicated_product_costs_more_than_a_shared_one():
    """Slow ranks on quick links share a product out, for a fourth of its work, though nobody asked for it; quick ranks
    on slow links all do all of it, and send nothing."""

    def fn(x, w):
        return x @ w

    shared, alone = [chosen(fn, SQUARE, SQUARE, of=each, outputs=WHOLE) for each in (QUICK_LINKS, QUICK_RANKS)]
    assert shared.collectives and not alone.collectives
    whole = float(Roofline(shared.mesh.topology).us(2 * 256**3, 0, torch.float32))
    assert program_cost(shared).work == pytest.approx(whole / 4)


def test_what_is_owed_at_an_output_is_paid():
    """The terms of a product over shards are added up for the result, and the choice has foreseen it."""
    said = {"inputs": {"x": {"dp": Shard(1)}, "w": {"dp": Shard(0)}}}
    found = chosen(lambda x, w: x @ w, SQUARE, SQUARE, of=QUICK_RANKS, **said)
    assert found.certificate.solved == pytest.approx(program_cost(found).us)
    assert found.certificate.at_least == pytest.approx(found.certificate.solved)
    assert program_cost(found).moves > 1000


def test_a_move_over_several_axes_is_one():
    """Shards over both axes are gathered as the planner gathers them, with one latency."""
    said = {"inputs": {"x": {"dp": Shard(0), "tp": Shard(0)}}, "outputs": WHOLE}
    found = chosen(lambda x: x, SQUARE, of=QUICK_RANKS, **said)
    src, dst = [parse_spec(text, found.mesh) for text in ("f32[256@dp,tp, 256]", "f32[256, 256]")]
    assert found.certificate.solved == pytest.approx(plan(src, dst).modelled_us)
    assert len(found.collectives) == 1


def fingerprint() -> str:
    def fn(x, a, b):
        y = x @ a
        return (y.relu() @ b).softmax(-1) + y.sum(0, True)

    said = {"inputs": {"x": {"dp": Shard(0)}, "a": {"tp": Shard(0)}}}
    return chosen(fn, SQUARE, SQUARE, SQUARE, **said).fingerprint


def test_a_choice_is_the_same_in_another_process():
    """Hashes of strings differ between processes: no choice may depend on the order of a set."""
    root = Path(__file__).parents[3]
    code = "from tests.expand.choose.test_objective import fingerprint; print(fingerprint())"
    env = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == fingerprint(), out.stderr
