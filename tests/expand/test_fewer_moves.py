"""Fewer moves: whatever is moved needlessly is found, and nothing else changes."""

import random

import torch
import ways
from torch import optim

import spmd
from spmd import MeshTopoInfo, Partial, Replicate, Shard
from spmd.expand.passes.fewer_moves import fewer_moves
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.passes import FewerMoves, with_passes
from spmd.mesh.layout import HostGrid
from spmd.tensor.redistribute.plan import Step, plan
from spmd.tensor.spec import Spec, placed
from tests.expand.side_by_side import INPUTS, NET, Net, rows, seeded, train_step


def moved(graph, value, spec):
    """The value after the moves to a spec, written behind it."""
    for step in plan(value.meta["spec"], spec).steps:
        with graph.inserting_after(value):
            value = graph.create_node("call_function", step, (value,), {}, name=step.move.kind)
        value.meta["spec"] = step.after
    return value


def values(program):
    """The values that are whole or in shards, and that an op reads."""
    for node in program.graph.nodes:
        spec = node.meta.get("spec")
        read = [u for u in node.users if u.op != "output" and not isinstance(u.target, Step)]
        if node.op == "call_function" and isinstance(spec, Spec) and not spec.partial and spec.shape and read:
            yield node, spec, read


def laid_out(spec, r):
    """Another layout of a tensor, at random."""
    return placed(spec, [r.choice([Replicate(), *map(Shard, range(spec.ndim))]) for _ in spec.mesh.shape])


def with_needless(program, seed):
    """The program with values that are moved back and forth, round about, twice, and for nobody, at random."""
    program, r = copied(program), random.Random(seed)
    found = list(values(program))
    for node, spec, read in r.sample(found, min(6, len(found))):
        away = moved(program.graph, node, laid_out(spec, r))
        for reader in r.sample(read, 1) if away is not node else ():
            reader.replace_input_with(node, moved(program.graph, away, spec))
        for _ in range(2):
            moved(program.graph, node, laid_out(spec, r))
    return program


def program_of(device="cpu"):
    mesh = spmd.DeviceMesh(device, [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo(HostGrid((2, 2)), "hopper"))
    model = seeded(Net)
    step = spmd.compile(train_step, mesh, inputs=INPUTS, params=NET, passes=())
    return step.program_for(model, optim.AdamW(model.parameters()), *rows(8)[0])


def test_needless_moves_are_left_out():
    """What was put in at random is gone, the readers read what they read before, and a second time finds nothing."""
    program = program_of()
    sent = sum(c.nbytes for c in program.collectives)
    for seed in range(12):
        more = with_needless(program, seed)
        noted = fewer_moves(more)
        less = noted.program.verify()
        assert sum(c.nbytes for c in less.collectives) <= sent, (seed, noted)
        assert len(less.graph.nodes) <= len(program.graph.nodes), (seed, noted)
        assert not fewer_moves(less).did


def trained(passes):
    """Losses and parameters of three steps on this rank."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded(Net)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step = spmd.compile(train_step, mesh, inputs=INPUTS, params=NET, passes=passes)
    losses = [step(model, optimizer, *batch).detach() for batch in rows(7)]
    return losses, list(model.parameters()), step.program.reports


def test_no_bit_changes():
    """Uneven shards on simulated ranks: with needless moves that were left out, and without."""

    def all_in_one(program):
        return fewer_moves(with_needless(program, 3)).program

    both = [ways.on_ranks(lambda p=p: trained(p), 4) for p in ((), (all_in_one,))]
    for (*alone, _), (*passed, _) in zip(*both, strict=True):
        assert ways.same(alone, passed)


MESH = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)).with_topology(MeshTopoInfo(HostGrid((2,)), "hopper"))


def summed(x, w):
    return (x @ w).relu()


def sharded_sum():
    """A sum over tp that is made whole, and of which each rank reads a shard."""
    step = spmd.compile(summed, MESH, inputs={"x": {"tp": Shard(1)}, "w": {"tp": Shard(0)}}, passes=(), choose="op")
    program = copied(step.program_for(torch.randn(512, 512), torch.randn(512, 512)))
    (reader,) = [n for n in program.graph.nodes if "relu" in n.name]
    whole = reader.meta["spec"]
    reader.args = (moved(program.graph, reader.args[0], placed(whole, [Shard(0)])),)
    reader.meta["spec"] = reader.args[0].meta["spec"]
    made = moved(program.graph, reader, whole)
    for user in [u for u in reader.users if u.op == "output"]:
        user.replace_input_with(reader, made)
    return program


def test_an_all_reduce_of_which_shards_are_read_becomes_a_reduce_scatter():
    """Only where sums may be added in another order; otherwise the report says why not."""
    program = sharded_sum()
    assert Partial("sum") in [c.spec.on(0) for c in program.collectives]
    (kept,) = with_passes(program, (FewerMoves(),)).reports
    assert kept.same_bits and not kept.taken and "reductions=True" in str(kept)
    less = with_passes(program, (FewerMoves(reductions=True),))
    assert "reduce_scatter" in [c.kind for c in less.collectives]
    assert not less.reports[-1].same_bits
