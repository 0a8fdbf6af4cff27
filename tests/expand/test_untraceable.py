"""What no program can hold is an error that names the user's line and what to write, and changes nothing."""

from __future__ import annotations

import io
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from tests.expand.side_by_side import Net, rows, same, seeded, tensors

X, Y = rows(6)[0]
LOSSES: list[torch.Tensor] = []
SEEN: dict[str, torch.Tensor] = {}
LAST = deque([1], 2)
SCALER = torch.amp.GradScaler("cpu")
OUTSIDE = torch.ones(3)


@dataclass
class Trainer:
    """An object of the user, whose method is the step."""

    is_on: bool = True
    history: list = field(default_factory=list)

    def sets_a_flag(self, model, optimizer, x, y):
        self.is_on = False
        return model(x).sum()

    def keeps_history(self, model, optimizer, x, y):
        self.history.append(model(x).sum())


TRAINER = Trainer()


# ---- values that only the run knows -----------------------------------------------------------


def branches(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    if loss > 1:
        loss.backward()
    return loss


def asserts(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    assert torch.isfinite(loss), "not finite"
    return loss


def loops(model, optimizer, x, y):
    while x.sum() > 1:
        x = x / 2
    return x


def takes_a_float(model, optimizer, x, y):
    return x * float(x.sum())


def counts_to(model, optimizer, x, y):
    return [x for _ in range(y.sum().item())]


def makes_a_size(model, optimizer, x, y):
    return torch.zeros(int(y.sum()))


def leaves_torch(model, optimizer, x, y):
    return x * x.numpy().sum()


def shows(model, optimizer, x, y):
    return f"{x.sum().item():.3f}"


def names(model, optimizer, x, y):
    return f"{x.sum().item()}"


def prints(model, optimizer, x, y):
    print(x.sum())
    return x


def looks_up(model, optimizer, x, y):
    return x * {3: 1.0}.get(y.sum().item(), 2.0)


def selects(model, optimizer, x, y):
    return x[y > 0].median()


def finds(model, optimizer, x, y):
    return y.nonzero().sum()


def distinct(model, optimizer, x, y):
    return torch.unique(y)


# ---- Python values ----------------------------------------------------------------------------


def appends(model, optimizer, x, y):
    loss = model(x).sum()
    LOSSES.append(loss)
    return loss


def notes(model, optimizer, x, y):
    SEEN["loss"] = model(x).sum()


def pushes(model, optimizer, x, y):
    LAST.append(2)
    return model(x).sum()


def sets_a_rate(model, optimizer, x, y):
    optimizer.param_groups[0]["lr"] = 0.5
    return model(x).sum()


def sets_a_flag(model, optimizer, x, y):
    optimizer.param_groups[0]["maximize"] = True
    return model(x).sum()


def returns_a_set(model, optimizer, x, y):
    return {x.sum()}


# ---- random numbers ---------------------------------------------------------------------------


def draws_in_python(model, optimizer, x, y):
    return x * random.random()


def draws_in_numpy(model, optimizer, x, y):
    return x * np.random.rand()


def seeds(model, optimizer, x, y):
    torch.manual_seed(3)
    return F.dropout(x)


def seeds_and_draws_none(model, optimizer, x, y):
    torch.manual_seed(3)
    return x * 2


def draws_from_its_own(model, optimizer, x, y):
    return x.clone().uniform_(generator=torch.Generator())


# ---- what is not among the arguments ----------------------------------------------------------


def scales(model, optimizer, x, y):
    SCALER.scale(F.cross_entropy(model(x), y)).backward()


def uses_a_tensor(model, optimizer, x, y):
    return x * OUTSIDE.sum()


def writes(model, optimizer, x, y):
    x.mul_(2)
    return x.sum()


def formats(model, optimizer, x, y):
    return f"{model(x).mean():.3f}"


def saves_the_state(model, optimizer, x, y):
    torch.save(model.state_dict(), io.BytesIO())
    return model(x).sum()


def asks_for_a_pointer(model, optimizer, x, y):
    return x.sum() if x.data_ptr() else y.sum()


@torch.library.custom_op("test_untraceable::counted", mutates_args={"seen"})
def counted(seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    seen.add_(1)
    return x * 2


counted.register_fake(lambda seen, x: torch.empty_like(x))


def writes_in_a_custom_op(model, optimizer, x, y):
    return counted(x.sum().detach().clone(), x)


@torch.library.custom_op("test_untraceable::noted", mutates_args=())
def noted(x: torch.Tensor) -> None:
    SEEN["noted"] = True


noted.register_fake(lambda x: None)


def notes_in_a_custom_op(model, optimizer, x, y):
    noted(x)
    return model(x).sum()


def adds_a_module(model, optimizer, x, y):
    model.extra = nn.Linear(3, 3)
    return model.extra(model(x)).sum()


def adds_up_over_ranks(model, optimizer, x, y):
    loss = model(x).sum()
    return torch.ops._c10d_functional.all_reduce(loss, "sum", "0")


def makes_sparse(model, optimizer, x, y):
    return torch.sparse.mm(x.to_sparse_csr(), x.t())


def updates_sparsely(model, optimizer, x, y):
    table = torch.zeros(5, 3, requires_grad=True)
    F.embedding(y, table, sparse=True).sum().backward()
    return table.grad.to_dense()


def seeds_in_a_fork(model, optimizer, x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return model(x) * torch.randn(3)


UNKNOWN = r"decides by a value in a tensor, .* such as torch.where"
READS = "reads the value of a tensor in Python .*; return the tensor, and read it after the step"
SIZE = "the size of its result depends on values, .*torch.where"
KEPT = "which its program would not; .* let the step return it"

TABLE = [
    (branches, RuntimeError, UNKNOWN),
    (asserts, RuntimeError, UNKNOWN),
    (loops, RuntimeError, UNKNOWN),
    (takes_a_float, RuntimeError, UNKNOWN),
    (counts_to, RuntimeError, UNKNOWN),
    (makes_a_size, RuntimeError, UNKNOWN),
    (leaves_torch, RuntimeError, READS),
    (shows, RuntimeError, READS),
    (names, RuntimeError, READS),
    (prints, RuntimeError, READS),
    (looks_up, RuntimeError, READS),
    (formats, RuntimeError, READS),
    (saves_the_state, RuntimeError, r"needs the memory of a tensor, .* save after the step"),
    (asks_for_a_pointer, RuntimeError, r"needs the memory of a tensor, .* copy with x.clone\(\)"),
    (notes_in_a_custom_op, NotImplementedError, "gives nothing, so its program would leave it out; let the op return"),
    (writes_in_a_custom_op, NotImplementedError, r"\(mutates_args\), .* let the op return the new values"),
    (selects, NotImplementedError, SIZE),
    (finds, NotImplementedError, SIZE),
    (distinct, NotImplementedError, SIZE),
    (appends, RuntimeError, f"keeps a tensor in LOSSES, {KEPT}"),
    (notes, RuntimeError, rf"keeps a tensor in SEEN\['loss'\], {KEPT}"),
    (TRAINER.keeps_history, RuntimeError, f"keeps a tensor in self.history, {KEPT}"),
    (sets_a_rate, RuntimeError, r"sets optimizer.param_groups.0.lr itself, .* change it between steps"),
    (sets_a_flag, RuntimeError, r"changes a Python value in optimizer.param_groups.0.maximize"),
    (returns_a_set, TypeError, "the step returns a set; it may return tensors"),
    (draws_in_python, RuntimeError, "draws random numbers of Python or numpy, .* use torch's"),
    (draws_in_numpy, RuntimeError, "draws random numbers of Python or numpy, .* use torch's"),
    (seeds, NotImplementedError, "has seeded torch's generator, .* seed outside the step"),
    (seeds_in_a_fork, NotImplementedError, "has seeded torch's generator, .* make them before the step and pass them"),
    (seeds_and_draws_none, RuntimeError, "seeds torch's generator, .* seed it before the step"),
    (draws_from_its_own, NotImplementedError, "draws from a generator of its own, .* use spmd.manual_seed"),
    (scales, TypeError, "the step uses SCALER, a GradScaler, .* pass it as an argument"),
    (uses_a_tensor, RuntimeError, "uses a tensor that is not among its arguments, .* pass it as an argument"),
    (adds_up_over_ranks, NotImplementedError, "with global tensors, .* or call it in a spmd.local_map"),
    (updates_sparsely, NotImplementedError, "gives a tensor of layout torch.sparse_coo, .* leave out sparse=True"),
    (makes_sparse, NotImplementedError, "gives a tensor of layout torch.sparse_csr, .* compute with a dense tensor"),
    (adds_a_module, RuntimeError, "adds or removes model.extra.bias; register what a module holds before the step"),
    (writes, RuntimeError, "writes into its argument x; let it return the new value instead"),
]

NO_LINE = (sets_a_rate, sets_a_flag, returns_a_set, scales, writes, seeds_and_draws_none, adds_a_module)
"""What is found when the step has run: the error says what it is, by name."""


@pytest.mark.parametrize("step, error, message", TABLE, ids=lambda x: getattr(x, "__name__", ""))
def test_the_error_says_what_and_where(step, error, message):
    """The model, the optimiser, Python's values and all generators are as they were, and the right step then works."""
    model = seeded(Net)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    before, state = tensors(model, optimizer), _python_state(optimizer)
    if step not in NO_LINE:
        message += rf".*test_untraceable.py:\d+, in {step.__name__}"
    with pytest.raises(error, match="(?s)" + message):
        spmd.compile(step, mesh)(model, optimizer, X.clone(), Y)
    assert type(model.up.weight) is nn.Parameter and not optimizer.state
    same(tensors(model, optimizer), before, "state", rtol=0, atol=0)
    assert _python_state(optimizer) == state


@pytest.mark.parametrize("kind", [pushes, TRAINER.sets_a_flag], ids=lambda x: x.__name__)
def test_plain_values_that_a_step_changes_are_changed_in_each_call(kind):
    model = seeded(Net)
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    step = spmd.compile(kind, mesh)
    before = list(LAST), TRAINER.is_on
    for _ in range(2):
        step(model, None, X.clone(), Y)
    assert (list(LAST), TRAINER.is_on) == (([2, 2], True) if kind is pushes else ([1], False))
    LAST.clear()
    LAST.extend(before[0])
    TRAINER.is_on = before[1]


def _python_state(optimizer: optim.Optimizer) -> list:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), spmd.get_rng_state()
    values = list(LOSSES), dict(SEEN), list(LAST), TRAINER.is_on, list(TRAINER.history), SCALER.state_dict()
    return [groups, numbers, values]
