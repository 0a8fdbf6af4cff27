"""Counts of steps that are equal are one number in a program, for as long as they are equal."""

import copy

import pytest
import torch
from torch import nn, optim

import spmd
from spmd.expand.kept.library import StaleStep
from spmd.expand.kept_numbers import Apart, are_one
from spmd.expand.state import Slot
from spmd.sim import run_ranks
from tests.expand.side_by_side import tensors
from tests.expand.test_capture import captured

ITEM = torch.ops.aten._local_scalar_dense.default


class Vectors(nn.Module):
    """Four vectors, of which the last ones may be left out."""

    def __init__(self, n=4):
        super().__init__()
        self.vectors = nn.ParameterList(torch.arange(3.0, dtype=torch.float64) + i for i in range(n))

    def forward(self, x, first=None):
        for v in self.vectors[:first]:
            x = torch.tanh(x * v)
        return x


def train(model, optimizer, x, first=None):
    optimizer.zero_grad()
    loss = model(x, first).square().sum()
    loss.backward()
    optimizer.step()
    return loss


class Counting(optim.Optimizer):
    """An optimiser of the user's, which is traced parameter by parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    step = self.state[p].setdefault("step", torch.tensor(0.0))
                    step += 1
                    p.sub_(p.grad, alpha=group["lr"] / (1 - 0.5 ** step.item()))


OPTIMIZERS = {
    "AdamW": optim.AdamW, "foreach": lambda p: optim.Adam(p, foreach=True, amsgrad=True),
    "fused": lambda p: optim.AdamW(p, fused=True), "Adamax": optim.Adamax, "NAdam": optim.NAdam, "RAdam": optim.RAdam,
    "ASGD": optim.ASGD, "Adagrad": optim.Adagrad, "Adafactor": optim.Adafactor, "the user's": Counting,
    "two groups": lambda p: optim.AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], lr=torch.tensor(0.2)),
}  # fmt: skip


def begin(name: str, steps=0):
    """A model and its optimiser, which has updated half of the parameters so many times."""
    model = Vectors()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for _ in range(steps):
        train(model, optimizer, torch.ones(3, dtype=torch.float64), 2)
    optimizer.zero_grad()
    return model, optimizer


def load_more_steps(optimizer):
    """Load a state whose last parameter has made more steps."""
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][3]["step"] += 3
    optimizer.load_state_dict(state)


def write_a_count(optimizer, of=0):
    list(optimizer.state.values())[of]["step"].fill_(9.0)


def compiled(step=train):
    """The step on one rank, whose sums are in the order of one device."""
    return spmd.compile(step, spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)))


def x_of(i):
    return torch.ones(3, dtype=torch.float64) + i


@pytest.mark.parametrize("name, before", [*((name, 0) for name in OPTIMIZERS), ("AdamW", 2), ("NAdam", 2)])
def test_updates_are_those_of_one_device(name, before):
    """To the bit: counts that are equal, or are so in two parts, that differ after a load, and are written into."""
    alone, mine, step = begin(name, before), begin(name, before), compiled()
    between = {2: load_more_steps, 4: write_a_count}
    for i in range(6):
        if i in between:
            between[i](alone[1])
            between[i](mine[1])
        ours, theirs = train(*alone, x_of(i)), step(*mine, x_of(i))
        assert theirs.full_tensor().item() == ours.item()
    found, want = tensors(*mine), tensors(*alone)
    assert found.keys() == want.keys()
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


# ---- what is written once ---------------------------------------------------------------------


def numbers(n, optimizer_of, *some):
    """How many nodes of the capture of so many parameters are numbers, and how many read a count.

    some: the number of parameters that each earlier step updates.
    """
    model = Vectors(n)
    optimizer = optimizer_of(list(model.parameters()))
    for first in (n, *some):
        train(model, optimizer, x_of(0), first)
    graph = captured(train, model=model, optimizer=optimizer, x=x_of(0)).graph
    is_number = [isinstance(node.meta.get("val"), torch.SymFloat) for node in graph.nodes if node.op == "call_function"]
    return sum(is_number), len(graph.find_nodes(op="call_function", target=ITEM))


@pytest.mark.parametrize("name", ["AdamW", "foreach", "NAdam", "RAdam", "Adamax", "ASGD", "the user's"])
def test_numbers_of_equal_counts_are_written_once(name):
    """Twice as many parameters have the same numbers; counts of two values have those numbers twice at most."""
    of_four = numbers(4, OPTIMIZERS[name])
    assert of_four == numbers(8, OPTIMIZERS[name])
    assert of_four[1] == {"NAdam": 2, "ASGD": 2}.get(name, 1)  # a product and a rate are read, too
    if name != "RAdam":  # which decides by the count
        parts, reads = numbers(8, OPTIMIZERS[name], 3, 3)
        assert of_four[1] < reads <= 2 * of_four[1]
        assert of_four[0] < parts <= 2 * of_four[0]


def test_counts_of_two_optimisers_are_two_numbers():
    """Their steps may be called one without the other."""

    def step(model, first, second, x):
        model(x).sum().backward()
        first.step()
        second.step()

    model = Vectors()
    first, second = optim.Adam(model.vectors[:2]), optim.Adam(model.vectors[2:])
    step(model, first, second, x_of(0))
    found = captured(step, model=model, first=first, second=second, x=x_of(0))
    assert len(found.graph.find_nodes(op="call_function", target=ITEM)) == 2
    assert [len(several) for several in found.equal.values()] == [2, 2]


def test_two_steps_in_one_program_count_twice():
    """What both steps make of equal counts is one number each."""

    def step(model, optimizer, x):
        train(model, optimizer, x)
        train(model, optimizer, x)

    model = Vectors(6)
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, x_of(0))
    found = captured(step, model=model, optimizer=optimizer, x=x_of(0))
    assert len(found.graph.find_nodes(op="call_function", target=ITEM)) == 2


# ---- the guard --------------------------------------------------------------------------------


def test_only_counts_that_a_program_reads_need_to_be_equal():
    """Parameters that a step leaves out may have made any number of steps."""
    model, optimizer = begin("AdamW")
    step = compiled()
    for i, first in enumerate([4, 2, 2]):
        step(model, optimizer, x_of(i), first)
    made = len(step.programs)
    write_a_count(optimizer, 3)
    step(model, optimizer, x_of(0), 2)
    assert len(step.programs) == made
    write_a_count(optimizer, 1)
    step(model, optimizer, x_of(0), 2)
    assert len(step.programs) == made + 1


def test_a_program_says_which_counts_differ(caplog):
    """Another program is made, once: it takes only those for one number that were equal in both calls."""
    (model, optimizer), step = begin("AdamW"), compiled()
    for i in range(3):
        step(model, optimizer, x_of(i))
    assert len(step.programs) == 1
    assert caplog.messages == []
    load_more_steps(optimizer)
    for i in range(3):
        step(model, optimizer, x_of(i))
    assert len(step.programs) == 2
    line = (
        "the program of train is captured anew: optimizer.step[model.vectors.0] is 3.0 and "
        "optimizer.step[model.vectors.3] is 6.0; they were equal, and one number"
    )
    assert caplog.messages == [line]
    for state in optimizer.state.values():
        state["step"].fill_(20.0)
    step(model, optimizer, x_of(0))
    step.programs[-1].verify()
    assert len(step.programs) == 2  # the first one again


def test_counts_that_differed_once_are_not_taken_for_one_again():
    """Where a program has to be made anew: of the same counts with other flags, say."""
    a, b, c = (Slot("optimizer", name, "optimizer", "step") for name in "abc")
    apart = Apart()
    apart.note([a, b, c], {str(a): 1.0, str(b): 1.0, str(c): 2.0})
    assert apart.of(a) == apart.of(b) != apart.of(c)
    apart.note([a, b, c], {str(a): 3.0, str(b): 3.0, str(c): 3.0})
    assert apart.of(a) == apart.of(b) != apart.of(c)
    apart.note([a, b], {str(a): 4.0, str(b): 5.0})
    assert len({apart.of(slot) for slot in (a, b, c)}) == 3


@pytest.mark.parametrize(
    "numbers, one", [((), True), ((2.0,), True), ((2.0, 2.0), True), ((2.0, 3.0), False), ((0.0, -0.0), False),
                     ((0.0, 0.0), True), ((float("nan"),) * 2, True)]
)  # fmt: skip
def test_one_number_is_of_the_same_bits(numbers, one):
    assert are_one(numbers) == one


def test_a_saved_program_has_the_guard(tmp_path):
    """A file refuses counts that it has no program for, and names them."""
    (model, optimizer), step = begin("AdamW"), compiled()
    for i in range(2):
        step(model, optimizer, x_of(i))
    step.save(tmp_path / "step.spmd")
    loaded = spmd.load_step(tmp_path / "step.spmd", train, step.mesh)
    loaded(model, optimizer, x_of(2))
    load_more_steps(optimizer)
    with pytest.raises(StaleStep, match=r"step\[model.vectors.0\] is 3.0 and optimizer.step\[model.vectors.3\] is 6.0"):
        loaded(model, optimizer, x_of(3))


def test_ranks_whose_counts_differ_are_told():
    """Counts are the same on all ranks; where they are not, all ranks raise, and none waits."""

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model, optimizer = begin("AdamW")
        step = spmd.compile(train, mesh)
        for i in range(3):
            step(model, optimizer, x_of(i))
        optimizer.state[model.vectors[3]]["step"].to_local().add_(r)
        with pytest.raises(RuntimeError, match=r"optimizer.step\[model.vectors.3\]: 4.0"):
            step(model, optimizer, x_of(3))

    run_ranks(rank, 2)
