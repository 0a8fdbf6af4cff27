"""What the model of a choice foresees is what its program does; where it may not be, the choice is judged again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import MeshTopoInfo, Shard
from spmd.expand.choose import classes
from spmd.expand.choose import program as choosing
from spmd.expand.choose.choosers import Choosers
from spmd.expand.choose.layouts import Layouts
from spmd.expand.choose.price import program_cost
from spmd.expand.choose.solve import Solved
from spmd.tensor.spec import Spec
from tests.expand.choose.test_depth import certificate
from tests.expand.side_by_side import GPT_PLAN, seeded, train_step

GIVEN = {"inputs": {"x": {"dp": Shard(0)}}, "bucket_mb": None}


def mesh(*shape: int) -> spmd.DeviceMesh:
    return spmd.DeviceMesh("cpu", torch.arange(4).view(shape).tolist(), mesh_dim_names=("dp", "tp")[: len(shape)])


def step(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


def test_no_layout_cuts_a_dim_in_two_ways():
    """Words over dp and heads over tp, seen as one dim of both: no spec says so."""
    found = Layouts(mesh(2, 2), (32, 8), torch.float32)
    of = {found.letter(p): p for p in (Shard(0), Shard(0, blocks=4), Shard(1))}
    alike = found.cut_alike
    unlike = [(of[a], of[b]) for a in of for b in of if not alike[found.number_of([a, b])]]
    assert unlike == [(Shard(0), Shard(0, blocks=4)), (Shard(0, blocks=4), Shard(0))]


class Heads(nn.Module):
    """Products of heads, with sequences and heads as one dim."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        q, k = (f(x).view(8, 64, 4, 16).transpose(1, 2).reshape(32, 64, 16) for f in (self.q, self.k))
        return q.bmm(k.transpose(1, 2)).view(8, 4, 64, 64)


class Normed(nn.Module):
    """A norm over words that a product before it leaves sharded."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(64, 4096), nn.LayerNorm(4096)

    def forward(self, x):
        return self.norm(self.up(x))


@pytest.mark.parametrize("net, tp", [(Heads, {"model.[qk].weight": 0}), (Normed, {"model.up.*": 0, "model.norm.*": 0})])
def test_the_program_of_a_choice_costs_no_more_than_foreseen(net, tp):
    """By views that merge two dims, and by a norm that is decomposed where its dim is sharded."""
    model = net()
    params = {name: {"tp": Shard(dim)} for name, dim in tp.items()}
    compiled = spmd.compile(step, mesh(2, 2), choose="program", params=params, **GIVEN)
    found = compiled.program_for(model, torch.randn(8, 64, 64))
    assert found.certificate.taken
    assert program_cost(found).us <= found.certificate.solved * (1 + 1e-6)


class Huge(nn.Module):
    """A layer that is much larger than the words that come to it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 16384), nn.Linear(16384, 64)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_few_words_come_to_a_weight_that_both_axes_share(monkeypatch):
    """What tp shards, dp shards inside of that, by a slice, though nothing that is given lies so. The program costs
    what is foreseen, and less than without such layouts."""
    found = of_huge()
    specs = [node.meta.get("spec") for node in found.graph.nodes]
    assert any(isinstance(spec, Spec) and spec.is_reordered for spec in specs)
    assert program_cost(found).us <= found.certificate.solved * (1 + 1e-6)
    monkeypatch.setattr(Choosers, "admit_inside", lambda *given: None)
    assert program_cost(found).us < 0.98 * program_cost(of_huge()).us


def of_huge() -> spmd.Program:
    """The program of a huge layer with tensor parallelism."""
    near = mesh(2, 2)
    near = near.with_topology(MeshTopoInfo.from_mesh(near, machine="textbook"))
    params = {"model.up.*": {"tp": Shard(0)}, "model.down.weight": {"tp": Shard(1)}}
    compiled = spmd.compile(step, near, choose="program", params=params, **GIVEN)
    return compiled.program_for(Huge(), torch.randn(256, 256))


@pytest.mark.parametrize(
    "steps, sent, taken",
    [
        ((1.0, 1.0), (), True),
        ((2.0, 1.0, 2.0), (), False),
        ((2.0, 1.0, 0.99), (5, 5), False),
        ((2.0, 1.0, 1.0), (4, 5), True),
        ((2.0, 1.0, 0.9), (), True),
    ],
    ids=["as long", "longer", "hardly shorter at last", "as long at last with fewer collectives", "shorter at last"],
)
def test_a_choice_whose_step_is_longer_is_not_taken(steps, sent, taken, monkeypatch):
    """The sum of all that is sent and computed may be less where the step is longer, for some of it overlaps. Then
    there is one more choice. sent: the collectives of the last choice and of that by op, where they are asked for."""
    asked, counts = iter(steps), iter(sent)
    monkeypatch.setattr(spmd.Program, "timeline", lambda self: SimpleNamespace(us=next(asked)))
    monkeypatch.setattr(choosing.Candidate, "collectives", property(lambda self: next(counts)))
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False))
    compiled = spmd.compile(step, mesh(4), choose="program", fully_shard="dp", **GIVEN)
    found = compiled.program_for(model, torch.randn(16, 512)).certificate
    assert found.taken is taken
    assert found.us <= found.by_op
    assert not list(asked) and not list(counts)


@pytest.mark.parametrize(
    "part, dearer, better", [(0.97, 0.1, True), (0.99, 0.1, False), (0.99, 0.0, True), (1.0, 0.0, False)]
)
def test_a_step_is_better_that_is_clearly_shorter_or_no_dearer(part, dearer, better):
    """part: of the step of the other one. dearer: microseconds by which it costs more."""
    one, other = (choosing.Candidate(None, None, {}) for _ in range(2))
    vars(one).update(step=50.0 * part, cost=SimpleNamespace(us=70.0 + dearer))
    vars(other).update(step=50.0, cost=SimpleNamespace(us=70.0))
    assert one.is_better_than(other) is better


def test_what_is_owed_is_reduced_where_the_backward_hides_it(monkeypatch):
    """Of choices that cost the same by the sum of all moves, that with the shorter step is taken."""
    hidden = of_gpt()
    monkeypatch.setattr(choosing.Solution, "settled", lambda self, exposed: None)
    solved = of_gpt()
    assert hidden.certificate == solved.certificate and solved.certificate.taken
    assert hidden.timeline().us < 0.98 * solved.timeline().us


def of_gpt() -> spmd.Program:
    """A GPT of one layer with tensor parallelism, whose batch lies as the choice likes."""
    model = seeded(lambda: GPT(GPTConfig(1, 8, 256, 128, 512)))
    words = torch.zeros(16, 128, dtype=torch.long)
    near = mesh(2, 2)
    near = near.with_topology(MeshTopoInfo.from_mesh(near, machine="textbook"))
    compiled = spmd.compile(train_step, near, choose="program", bucket_mb=None, params=GPT_PLAN)
    return compiled.program_for(model, torch.optim.SGD(model.parameters(), 0.1), words, words)


def test_layers_are_solved_apart_where_they_leave_a_doubt(monkeypatch):
    """Then the choice is that of the graph in which each layer chooses for itself, with its certificate."""
    whole = certificate(7, (16, 64), 1000, monkeypatch)
    monkeypatch.setattr(choosing, "DOUBTFUL", 0.0)
    monkeypatch.setattr(classes, "MOST_CLASSES", 0)
    apart = certificate(7, (16, 64), 0, monkeypatch)
    assert apart.solved == pytest.approx(whole.solved)
    assert apart.gap <= whole.gap + 1e-9


def test_a_small_graph_is_solved_from_nearby_where_it_leaves_a_doubt(monkeypatch):
    """From where it leads if reductions of gradients cost less; a bad start is left, and the bound of both holds."""
    whole, real, exposures = certificate(2, (16, 64), 1000, monkeypatch), choosing._solved, []

    def doubtful(given, pins, exposed, apart=False):
        model, solved = real(given, pins, exposed, apart)
        exposures.append(exposed)
        if exposed < 1.0:
            return model, solved
        x = model.by_itself()
        return model, Solved(tuple(x), model.problem.cost(x), solved.at_least / 2)

    monkeypatch.setattr(choosing, "_solved", doubtful)
    found = certificate(2, (16, 64), 1000, monkeypatch)
    assert exposures[:2] == [1.0, choosing.EXPOSED]
    assert found.solved == pytest.approx(whole.solved) and found.gap <= whole.gap + 1e-9
