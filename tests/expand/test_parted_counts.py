"""Counts of steps that are equal are one number of a program; where they part, numbers are those of one device."""

import logging
import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import DTensor, LocalTensorMode, Shard, StaleStep, load_step
from spmd.expand.equal_counts import READS
from spmd.expand.kept_numbers import Apart, kept_numbers, parted
from spmd.expand.state import State
from tests.expand.test_capture import captured

OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.05),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.05, amsgrad=True, weight_decay=0.1),
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.05, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: optim.RAdam(p, lr=0.05),
    "Adamax": lambda p: optim.Adamax(p, lr=0.05),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
}


class Net(nn.Module):
    """Two layers and one that is not always used. All weights have one shape, so that updates are stamped."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, depth):
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
        return x


def train(model, optimizer, x, depth):
    optimizer.zero_grad()
    loss = model(x, depth).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(optimizer_of) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().double()
    return model, optimizer_of(model.parameters())


X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def count_on(optimizer: optim.Optimizer) -> None:
    """Load a state in which the first layer has made five steps more, as if it was trained before."""
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"][:2]:
            optimizer.state[p]["step"] += 5


def same_state(ours, theirs) -> None:
    (model, optimizer), (other, real) = ours, theirs
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.data, rtol=1e-12, atol=1e-12)
        assert list(optimizer.state[p]) == list(real.state[q])
        for key, value in real.state[q].items():
            found = optimizer.state[p][key]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("depths", [(3, 3, 3, 3), (2, 3, 3, 2, 3)], ids=["all used", "one not always"])
def test_counts_that_part_are_those_of_one_device(name, depths):
    """Counts part by what is used, and by a state that is loaded, and go on."""
    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ours, theirs = made(OPTIMIZERS[name]), made(OPTIMIZERS[name])
        step = spmd.compile(train, mesh, inputs={"x": {"dp": Shard(0)}})
        for i, depth in enumerate((*depths, *depths)):
            if i == len(depths):
                count_on(ours[1])
                count_on(theirs[1])
            torch.testing.assert_close(step(*ours, X, depth).full_tensor(), train(*theirs, X, depth))
        same_state(ours, theirs)


def numbers(found) -> Counter:
    """How often a capture reads tensors as numbers, and raises numbers to a power."""
    return Counter(n.target for n in found.graph.nodes if n.target in (READS, operator.pow, pow))


def test_a_number_is_computed_once():
    """Of six parameters that have made as many steps; of two groups of these twice; each is counted up by itself."""
    model, optimizer = made(OPTIMIZERS["AdamW"])
    train(model, optimizer, X, 3)
    given = {"model": model, "optimizer": optimizer, "x": X, "depth": 3}
    once = numbers(captured(train, **given))
    assert once[READS] == 1 and sum(once.values()) == 4  # powers of two decays, and a root
    count_on(optimizer)
    twice = captured(train, **given)
    assert numbers(twice) == {op: 2 * n for op, n in once.items()}
    assert [len(several) for several in twice.equal.values()] == [2, 4]
    counts = [to for to in twice.outputs if getattr(to, "key", "") == "step"]
    values = twice.graph.output_node().args[0]
    assert len({values[twice.outputs.index(to)] for to in counts}) == len(counts) == 6


def test_a_step_whose_counts_part_is_captured_for_each_way_once(caplog):
    """And says why, with the tensors and their numbers."""
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    model, optimizer = made(OPTIMIZERS["AdamW"])
    step = spmd.compile(train, mesh)
    step(model, optimizer, X, 3)
    step(model, optimizer, X, 3)
    count_on(optimizer)
    with caplog.at_level(logging.WARNING, "spmd"):
        for _ in range(4):
            step(model, optimizer, X, 3)
            optimizer.state[model.layers[0].weight]["step"].add_(1)
    first, *others = [r.getMessage() for r in caplog.records]
    assert "optimizer.step[model.layers.0.weight] is 7.0 and optimizer.step[model.layers.1.weight] is 2.0" in first
    assert first.startswith("the program of train is captured anew: ")
    assert len(others) == 1 and "layers.0.weight] is 9.0 and optimizer.step[model.layers.0.bias] is 8.0" in others[0]
    assert len(step.programs) == 3


def test_a_kept_step_is_refused_where_counts_differ(tmp_path):
    """A program that was saved when all were equal is not used for others."""
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    model, optimizer = made(OPTIMIZERS["AdamW"])
    step = spmd.compile(train, mesh)
    for _ in range(2):
        step(model, optimizer, X, 3)
    step.save(tmp_path / "step")
    model, optimizer = made(OPTIMIZERS["AdamW"])
    train(model, optimizer, X, 3)
    loaded = load_step(tmp_path / "step", train, mesh)
    loaded(model, optimizer, X, 3)
    count_on(optimizer)
    with pytest.raises(StaleStep, match=r"they were equal, and one number"):
        loaded(model, optimizer, X, 3)


def test_who_was_found_apart_stays_apart():
    """Though the counts are equal again; and each of the two is one number with those that it was equal to."""
    model, optimizer = made(OPTIMIZERS["AdamW"])
    train(model, optimizer, X, 3)
    tensors = State.of({"model": model, "optimizer": optimizer}).tensors()
    kept, _ = kept_numbers(tensors)
    (counts,) = [several for several in kept.values() if several[0].key == "step"]
    apart, now = Apart(), {str(slot): 7.0 if i < 2 else 2.0 for i, slot in enumerate(counts)}
    apart.note(counts, now)
    again = [several for several in kept_numbers(tensors, apart)[0].values() if several[0].key == "step"]
    assert again == [counts[:2], counts[2:]]
    apart.note(counts[2:], {str(slot): float(i) for i, slot in enumerate(counts)})
    again = [several for several in kept_numbers(tensors, apart)[0].values() if several[0].key == "step"]
    assert again == [counts[:2], *((slot,) for slot in counts[2:])]


def test_parted_names_the_first_that_differs():
    assert parted(["a", "b", "c"], {"a": 1.0, "b": 1.0, "c": 2.0}).startswith("a is 1.0 and c is 2.0")
    assert parted(["a", "b"], {"a": 1.0, "b": 1.0}) == ""


class Reads(nn.Module):
    """Buffers that hold numbers, which no optimiser keeps: each is a number of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("a", torch.tensor(2.0))
        self.register_buffer("b", torch.tensor(2.0))

    def forward(self, x):
        return F.relu(x * self.weight) * self.a.item() + self.b.item() ** 2


def test_equal_buffers_are_two_numbers():
    mesh, model = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), Reads()
    step, x = spmd.compile(lambda model, x: model(x), mesh), torch.ones(3)
    for a, b in ((2.0, 2.0), (3.0, 2.0), (2.0, 5.0)):
        model.a.fill_(a)
        model.b.fill_(b)
        torch.testing.assert_close(step(model, x).full_tensor(), x * a + b**2)
    assert len(step.programs) == 1
