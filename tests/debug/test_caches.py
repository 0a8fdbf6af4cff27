"""Caches are counted and bounded, and they change nothing but the speed."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

import spmd
import spmd.parallel  # `import spmd` leaves it out, and it has caches
from spmd import DTensor, LocalTensorMode, Replicate, Shard
from spmd.debug import caches
from spmd.expand import compile as compiling
from spmd.sim import run_ranks
from spmd.tensor.cache import forget_decisions
from spmd.tensor.eager import dispatch, fast_path
from spmd.tensor.redistribute import plan

BY_OP = {"spmd._torch.ops", "spmd._torch.fake_results", "spmd._torch.quick_traces", "spmd.sim.local_tensor"}
"""Modules whose caches have an entry for each op at most, and so no bound of their own."""

ONE_A_GROUP = {"spmd.mesh.groups._placeholder"}
"""Caches without a bound that are not by op: they have an entry for each group of ranks."""


def test_every_cache_is_counted_and_has_a_bound():
    """All caches in the source are listed. A cache without a bound is by op, so the number of ops bounds it."""
    found = {cache.name: cache for cache in caches()}
    for path in sorted(Path(spmd.__file__).parent.rglob("*.py")):
        module = ".".join(["spmd", *path.relative_to(Path(spmd.__file__).parent).with_suffix("").parts])
        text = path.read_text()
        names = re.findall(r"^@functools\.(?:lru_)?cache\b.*\n(?:@.*\n)*def (\w+)", text, re.M)
        names += re.findall(r"^(\w+) = Cache\(", text, re.M)
        for name in names:
            cache = found[f"{module}.{name}"]
            by_op = module in BY_OP or cache.name in ONE_A_GROUP
            assert by_op or cache.entries <= cache.most, cache
    assert f"{dispatch.lowerings.maxsize:,}" in str(caches()) and caches().entries == sum(c.entries for c in caches())


def ops(i: int, mesh: spmd.DeviceMesh) -> torch.Tensor:
    """Ops on a shape that no other i has, on values whose gradient is known."""
    x = DTensor.from_local(torch.ones(1 + i % 13, 1 + i), mesh, [Shard(0)]).requires_grad_()
    y = (x * 2.0 + x).redistribute(placements=[Replicate()]).view(-1)
    y.detach().add_(1.0)
    (y.sum() * 2.0).backward()
    return x.grad.full_tensor()


def test_caches_forget_and_numbers_stay(monkeypatch):
    """More shapes than the caches can hold, again and again: no tensor outlives its round, and no cache its bound."""
    forget_decisions()
    plan.forget()
    for cache in (dispatch.lowerings, fast_path.seen):
        monkeypatch.setattr(cache, "maxsize", 25)
    monkeypatch.setattr(plan, "MOST_PLANS", 25)
    mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alive = []
    for _ in range(2):
        for i in range(18):
            with LocalTensorMode(2):
                assert (ops(i, mesh).reconcile() == 6.0).all()
        gc.collect()
        alive.append(sum(type(x) is DTensor for x in gc.get_objects()))
        assert len(dispatch.lowerings) == len(fast_path.seen) == 25 and len(plan._plans) == 25
    assert alive[0] == alive[1]
    forget_decisions()


@pytest.mark.filterwarnings("ignore:the program of repeated is kept in 3 versions")
def test_a_compiled_step_keeps_so_many_programs(monkeypatch):
    """A size that grows needs a program for each call. The last one is kept, and a forgotten one is made again."""
    monkeypatch.setattr(compiling, "MOST_PROGRAMS", 3)

    def repeated(x, times):
        return x.repeat(times)

    def rank(rank):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step = spmd.compile(repeated, mesh, inputs={"x": [Shard(0)]})
        x, found = torch.arange(4.0), []
        for times in (1, 2, 3, 1, 4, 5, 1, 2):
            assert torch.equal(step(x, times).full_tensor(), x.repeat(times))
            found.append(len(step.programs))
        programs = [str(p) for p in step.programs]
        step(x, 1)
        return found, programs == [str(p) for p in step.programs]

    for found, again in run_ranks(rank, 2):
        assert found == [1, 2, 3, 3, 3, 3, 3, 3] and not again  # the last call only put the first program last
