"""Placements within a memory budget: kept by the count of the written program, and never dearer than what else fits."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import ways
from torch import nn

import spmd
from spmd.expand.choose import lighter
from spmd.expand.choose.alive import Moment
from spmd.expand.choose.budget import Budget, Weighed, cheapest
from spmd.expand.choose.lighter import Path
from spmd.expand.passes.memory_budget import BudgetError
from spmd.mesh import MeshTopoInfo
from tests.expand.choose.small_budgets import choices, first_choice, small_budgets
from tests.expand.side_by_side import INPUTS, Net, rows, seeded, train_step
from tests.expand.test_memory import counted_beside


class Pictures(nn.Module):
    """Convolutions whose activations are large beside their weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1), nn.Linear(64, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.head(F.avg_pool2d(x, 2).flatten(1))


def huge():
    return nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 16))


def pictures(dtype=torch.float32):
    return torch.randn(8, 3, 16, 16, dtype=dtype), torch.randint(4, (8,))


def classes():
    return torch.randn(128, 16), torch.randint(16, (128,))


ZERO = {"fully_shard": "dp", "inputs": INPUTS}
CASES = {
    "huge, nothing said": (huge, classes, {}),
    "pictures, dp": (Pictures, pictures, {"inputs": INPUTS}),
    "net, zero 3": (functools.partial(Net, 32, 128), lambda: rows(256, 1, 32)[0], ZERO),
}


@pytest.fixture(autouse=True, scope="module")
def few_prices():
    """Paths of few programs."""
    with mock.patch.object(lighter, "RATES", (0.1, 3.0, 30.0)):
        yield


def a_mesh():
    """Links on which small models are spread only where memory asks for it."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine="textbook"))


def program_of(name: str, **settings) -> spmd.Program:
    """The program of a train step on a mesh that is not there."""
    build, batch, said = CASES[name]
    torch.manual_seed(0)
    model = seeded(build)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = spmd.compile(train_step, a_mesh(), choose="program", bucket_mb=None, **said, **settings)
    return step.program_for(model, optimizer, *batch())


@functools.cache
def path_of(name: str) -> Path:
    """The path of a case."""
    with choices() as found:
        program_of(name)
    return Path(found[0])


def within(path: Path, nbytes: int):
    as_run = path.first.end.as_run
    return cheapest(path, Budget(nbytes, as_run, as_run)).program


def first_freed(path: Path, nbytes: int) -> Weighed:
    """The first choice, of which as much is computed again as it takes."""
    as_run = path.first.end.as_run
    return Weighed(path.known[0], path.first, Budget(nbytes, as_run, as_run))


def walked(path: Path) -> Path:
    """A path to its end."""
    k = 0
    while path.turn(k) is not None:
        path.program(k)
        k += 1
    return path


def rank_of(path: Path, program) -> tuple[bool, float]:
    """As programs are compared: first those that neither cost more nor take longer than by op, then by cost."""
    us, by_op = program.certificate.us, path.first.by_op
    return us > by_op.cost.us * (1 + 1e-9) or program.timeline().us > by_op.step * (1 + 1e-9), us


@pytest.mark.parametrize("name", CASES)
def test_budgets_are_kept_and_more_memory_is_never_worse(name):
    """At parts of what the choice without a budget needs, and the least that there is. No program is dearer than the
    first choice with as much computed again as it takes, or than one that fits as it is."""
    path = path_of(name)
    peak = path.first.end.memory.peak
    said = r"the smallest possible is [\d,]+, with .* of \d+ choices of placements, of [\d.,]+ us before anything is"
    with pytest.raises(BudgetError, match=said) as error:
        within(path, 1)
    least = error.value.smallest
    assert least <= peak
    later = (True, float("inf"))
    for budget in sorted({least, *[int(part * peak) for part in (0.6, 0.8, 1.0) if part * peak >= least]}):
        found = within(path, budget)
        assert found.memory().peak <= budget
        assert rank_of(path, found) <= later
        later = rank_of(path, found)
        assert found.certificate.budget == budget and "placed for" in str(found.reports[0])
        for other in path.known:
            if other.candidate.memory.peak <= budget and other.candidate.step <= path.first.by_op.step:
                assert found.certificate.us <= other.candidate.cost.us * (1 + 1e-9)
        first = first_freed(path, budget)
        with contextlib.suppress(BudgetError):
            assert later <= (first.rank[0], first.rank[1] * (1 + 1e-9))


def test_placements_save_what_cannot_be_computed_again():
    """Somewhere in the table a program is lighter than all that freeing makes of the first choice."""
    path = path_of("pictures, dp")
    least = []
    for find in (lambda: within(path, 1), lambda: first_freed(path, 1).program):
        with pytest.raises(BudgetError) as error:
            find()
        least.append(error.value.smallest)
    assert least[0] < 0.8 * least[1]


def test_a_budget_that_is_no_limit_changes_nothing():
    """The program is the one without a budget, with the same certificate."""
    plain = program_of("net, zero 3")
    found = program_of("net, zero 3", memory_budget=plain.memory().peak)
    assert str(found) == str(plain) and found.certificate == plain.certificate


@pytest.mark.parametrize("name", ["pictures, dp", "net, zero 3"])
def test_all_that_is_alive_is_found_in_the_graph(name):
    """What is alive where programs need the most, but for inputs, is values of the graph."""
    for each in walked(path_of(name)).known:
        candidate = each.candidate
        moment = Moment.of(candidate.run, candidate.memory, candidate.values)
        kinds = candidate.memory.by_kind
        made = sum([kinds.get(kind, 0) for kind in ("activation", "sent")])
        assert 0.95 * made <= sum(held.nbytes for held in moment.held) <= made * (1 + 1e-9)


@pytest.mark.parametrize("name", ["pictures, dp", "net, zero 3"])
def test_no_program_is_below_the_bound_of_its_bytes(name):
    """Of those that were written, as far as the model foresees their costs."""
    path = walked(path_of(name))
    bounds = [path.at_least(each.candidate.memory.peak) / each.candidate.cost.us for each in path.known]
    assert max(bounds) < 1.03
    assert max(bounds[2:]) > 0.9


@functools.cache
def of_a_small_graph(seed: int) -> list:
    return list(small_budgets(seed))


def test_small_graphs_have_the_cheapest_of_all_programs_that_fit():
    """Beside the programs of all assignments, also where no price leads to it. No bound is above the cheapest."""
    found = [each for seed in (12, 33, 103) for each in of_a_small_graph(seed)]
    assert len(found) == 12
    for least, taken in found:
        certificate = taken.program.certificate
        assert certificate.us == pytest.approx(least) and certificate.within <= least * (1 + 1e-6)


def test_a_program_of_all_assignments_is_written_again():
    """For another expansion of the same step it is the cheapest one with as few bytes where bytes were counted."""
    ((_, taken), *_) = of_a_small_graph(33)
    first = first_choice(33, (2,))
    assert str(taken.write(first.start.simple)) == str(taken.program)


def trained(budget: int | None, cache=None) -> tuple[list[torch.Tensor], spmd.Program]:
    """Losses and parameters after three steps on simulated ranks in float64, and the program."""
    torch.manual_seed(0)
    model, batches = Pictures().double(), [pictures(torch.float64) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if budget == 0:
        return [train_step(model, optimizer, *batch).detach() for batch in batches] + list(model.parameters()), None
    step = spmd.compile(train_step, a_mesh(), choose="program", inputs=INPUTS, memory_budget=budget, cache=cache)
    losses = [step(model, optimizer, *batch).detach() for batch in batches]
    return [x.full_tensor() for x in (*losses, *model.parameters())], step.program


def test_a_training_within_a_budget_is_that_of_one_device(tmp_path):
    """Half of the memory, in float64; the program that is kept of it is the same, with its certificate."""
    want, _ = trained(0)
    with spmd.LocalTensorMode(4):
        _, plain = trained(None)
        budget = plain.memory().peak // 2
        got, program = trained(budget, tmp_path)
        again, loaded = trained(budget, tmp_path)
    assert program.memory().peak <= budget < plain.memory().peak
    assert str(loaded) == str(program) and loaded.certificate == program.certificate
    for a, b, c in zip(want, got, again, strict=True):
        assert float((a - b).detach().abs().max()) <= 1e-10 and torch.equal(b, c)


def counted_within(part: float) -> tuple[int, int, int]:
    """A budget, which is a part of what the choice without one needs, and what a later step needs at most on this rank:
    predicted, and counted while it runs."""
    mesh, batch = a_mesh(), pictures()
    model = seeded(Pictures)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = {"choose": "program", "inputs": INPUTS}
    budget = int(part * spmd.compile(train_step, mesh, **said).program_for(model, optimizer, *batch).memory().peak)
    with mock.patch.object(lighter, "RATES", (0.1, 3.0, 30.0)):
        step = spmd.compile(train_step, mesh, memory_budget=budget, **said)
        return budget, *counted_beside(step, mesh, lambda: step(model, optimizer, *batch))


def test_no_rank_needs_more_than_its_budget(gloo4):
    """All tensors of each rank are counted as they come and go."""
    for budget, predicted, counted in ways.run("gloo", gloo4, counted_within, 0.5):
        assert counted <= budget and abs(predicted - counted) <= 0.005 * counted


def test_a_program_within_a_budget_can_be_explained():
    """What it was made of makes the same placements again."""
    peak = path_of("net, zero 3").first.end.memory.peak
    program = program_of("net, zero 3", memory_budget=int(0.75 * peak))
    before = program.reasons.program.memory().peak
    assert f"placed for {before:,} bytes, by the first choice {peak:,}" in str(program.reports[0])
    assert "chosen for the program" in (text := str(program.explain("up"))) and "mm " in text
