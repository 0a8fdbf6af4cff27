"""Gathers stand right before the first reader of each pass, reductions right behind the gradient, for each level."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import FullyShard, Program, Shard
from spmd.expand.passes.keep_gathered import gathered_bytes
from tests.expand.places.standing import KEPT, Standing, standing
from tests.expand.places.trained import TP, Odd, plain_step, train_step
from tests.expand.side_by_side import seeded

LINE, HYBRID, SQUARE = {"dp": 2}, {"rep": 2, "dp": 2}, {"dp": 2, "tp": 2}
WIDTH = 64


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def gpt() -> nn.Module:
    return GPT(GPTConfig(n_layer=1, n_head=4, n_embd=WIDTH, block_size=8, vocab=32))


def squared(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


WORDS = torch.zeros(4096, 4, dtype=torch.int64), torch.zeros(4096, 4, dtype=torch.int64)
"""So many that to gather large weights sends less than to move activations."""

MODELS = {
    "mlp": (mlp, squared, (torch.zeros(65536, WIDTH), torch.zeros(65536, WIDTH))),
    "gpt": (gpt, plain_step, WORDS),
    "odd": (Odd, plain_step, WORDS),
    "odd, two batches": (Odd, train_step, WORDS),
}
TENSOR_PARALLEL = {"mlp": {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}, "odd": TP}


@functools.cache
def program(name: str, sharding: FullyShard, axes: tuple[tuple[str, int], ...], choose: str) -> Program:
    """A program without buckets and passes, for ranks that do not exist."""
    make, step, batch = MODELS[name]
    model, size = seeded(make), torch.Size([n for _, n in axes])
    mesh = spmd.DeviceMesh("cpu", torch.arange(size.numel()).view(size).tolist(), mesh_dim_names=[a for a, _ in axes])
    over = {axis: Shard(0) for axis, _ in axes if axis != "tp"}
    params = TENSOR_PARALLEL[name.split(",")[0]] if "tp" in dict(axes) else None
    compiled = spmd.compile(
        step, mesh, inputs={"x": over, "y": over}, params=params, fully_shard=sharding, choose=choose, bucket_mb=None,
        passes=(),
    )  # fmt: skip
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    return compiled.program_for(model, optimizer, *batch)


def written(name: str, sharding: FullyShard, axes: dict[str, int], choose: str) -> Program:
    return program(name, sharding, tuple(axes.items()), choose)


CASES = [
    ("mlp", LINE, "program"),
    *[(name, LINE, "op") for name in MODELS],
    *[(name, axes, "op") for name in ("mlp", "odd") for axes in (HYBRID, SQUARE)],
]


def are_gathers(of: Standing, sharding: FullyShard, is_trained: bool) -> bool:
    """Whether a parameter that is kept in shards is gathered where it should be: at level 3 for each pass that reads
    it, once for all, or by cost once for some that follow each other; below for what the step leaves."""
    if sharding.level < 3:
        return of.gathers == ((KEPT,) if is_trained else ())
    fewest, most = min(1, len(of.read_by)), len(of.read_by)
    allowed = {True: (most,), False: (fewest,), "cost": range(fewest, most + 1)}[sharding.reshard_after_forward]
    return "+".join(of.gathers) == "+".join(of.read_by) and len(of.gathers) in allowed


def reductions(name: str, sharding: FullyShard, axes: dict[str, int]) -> list[str]:
    """What ends the sums of a gradient: at level 1 once for all backward passes, above for each."""
    passes = 2 if "two" in name and sharding.level > 1 else 1
    return ["reduce_scatter", *["all_reduce"] * ("rep" in axes)] * passes


SHARDINGS = [FullyShard("dp", 1), FullyShard("dp", 2), *[FullyShard("dp", 3, again) for again in (True, False, "cost")]]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda s: f"{s.level}, {s.reshard_after_forward}")
@pytest.mark.parametrize("name, axes, choose", CASES)
def test_moves_stand_where_they_should(name, axes, choose, sharding):
    """Of each parameter: trained, tied, frozen, unused, or a number, which no axis shards and all ranks reduce."""
    found = written(name, sharding, axes, choose)
    named = dict(seeded(MODELS[name][0]).named_parameters())
    for path, of in standing(found).items():
        is_trained, state = named[path].requires_grad and bool(of.read_by), found.places[f"model.{path}"].state
        is_sharded = state.mesh.axis("dp") in {a for dim in state.dims for a in dim}
        sums = reductions(name, sharding, axes) if is_trained else []
        assert are_gathers(of, sharding, is_trained) if is_sharded else not of.gathers, (path, of)
        assert list(of.reductions) == sums or (not is_sharded and "reduce_scatter" not in of.reductions), (path, of)
        assert not of.misplaced, (path, of)


@pytest.mark.parametrize("sharding", SHARDINGS[1:4], ids=lambda s: f"{s.level}, {s.reshard_after_forward}")
@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_a_choice_for_the_program_leaves_moves_out(name, sharding):
    """And has no others: it may compute where a parameter is stored, or with all words on every rank. What is gathered
    and reduced stands where it should, and what is to be freed behind a pass is gathered for one."""
    for path, of in standing(written(name, sharding, LINE, "program")).items():
        allowed = set(of.read_by) if sharding.level == 3 else {KEPT}
        kept = sharding.level == 3 and sharding.reshard_after_forward is not True
        assert allowed.issuperset("+".join(of.gathers).split("+") if kept and of.gathers else of.gathers), (path, of)
        assert list(of.reductions) in ([], ["reduce_scatter"], ["all_reduce"]), (path, of)
        assert not of.misplaced, (path, of)


@pytest.mark.parametrize("name", ["mlp", "gpt", "odd"])
def test_what_is_gathered_is_freed_between_the_passes(name):
    """Nothing that was gathered is alive when the update begins, and at level 3 no more at once than a pass needs: with
    all of it kept, the last reader of the forward finds everything."""
    freed, kept, by_cost = [written(name, FullyShard("dp", 3, again), LINE, "op") for again in (True, False, "cost")]
    most = {again: max(gathered_bytes(p)) for again, p in (("freed", freed), ("kept", kept), ("cost", by_cost))}
    assert gathered_bytes(freed)[-1] == gathered_bytes(kept)[-1] == 0
    assert most["freed"] == most["cost"] < most["kept"]
