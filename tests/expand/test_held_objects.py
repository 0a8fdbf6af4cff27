"""Objects of the user that hold models, optimisers and tensors: trainers, averages, optimisers around others."""

import types

import pytest
import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.side_by_side import seeded
from tests.expand.test_counters import (
    PLANS,
    Average,
    Linear,
    Trainer,
    Training,
    X,
    check_on_a_mesh,
    of_model,
    train,
    whole,
)
from tests.expand.test_sizes import captures


def parts():
    """A model and its optimiser, with what is seen of them."""
    training, found = of_model(Linear), []
    training.call(lambda model, optimizer, x: found.extend((model, optimizer)), None)
    return *found, training.seen


class Tensors:
    """An average without a module of its own."""

    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates, self.last, self.mean = 0, None, [torch.zeros((), dtype=torch.float64)]

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for name, p in model.named_parameters():
            self.shadow[name].mul_(decay).add_(p, alpha=1 - decay)
        self.last = self.shadow["weight"].sum()
        self.mean[0] = self.mean[0] * 0.9 + self.last * 0.1

    def seen(self):
        return [*self.shadow.values(), *([] if self.last is None else [self.last]), *self.mean]


class Slow(torch.optim.Optimizer):
    """Lookahead with its slow weights in a list of lists, and the parameters in a list of its own."""

    def __init__(self, inner, every=3):
        self.inner, self.every, self.calls = inner, every, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        self.params = list(self.param_groups[0]["params"])
        self.slow = [[p.detach().clone() for p in self.params]]

    def zero_grad(self):
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.calls += 1
        if self.calls % self.every == 0:
            for p, q in zip(self.params, self.slow[0], strict=True):
                q.add_(p - q, alpha=0.5)
                p.copy_(q)


class Both(torch.optim.Optimizer):
    """Several optimisers in one."""

    def __init__(self, *inner):
        self.inner = list(inner)
        self.param_groups = [group for each in inner for group in each.param_groups]
        self.defaults, self.state = {}, {}

    def zero_grad(self):
        for each in self.inner:
            each.zero_grad()

    def step(self):
        for each in self.inner:
            each.step()


def trainer_argument():
    model, optimizer, seen = parts()
    trainer = Trainer(model, optimizer)
    of_average = lambda: [*seen()[0], *trainer.average.shadow.parameters()]  # noqa: E731
    return Training(
        lambda trainer, x: trainer.step(x), lambda f, x: f(trainer, x),
        lambda: (of_average(), [trainer.steps, trainer.average.updates]),
    )  # fmt: skip


def deep_argument():
    """In a list, and an object within an object, with a plain value that the step reads."""
    model, optimizer, seen = parts()
    held = types.SimpleNamespace(inner=types.SimpleNamespace(model=model, scale=0.5), optimizer=optimizer)

    def step(all_of_it, x):
        held = all_of_it[0]
        return train(held.inner.model, held.optimizer, x, held.inner.scale)

    def call(f, x):
        found = f([held], x)
        held.inner.scale = 0.75
        return found

    return Training(step, call, seen)


def average(kind, as_argument):
    def make():
        model, optimizer, seen = parts()
        mean = kind(model)

        def around(model, optimizer, x):
            loss = train(model, optimizer, x)
            mean.update(model)
            return loss

        def given(model, optimizer, mean, x):
            loss = train(model, optimizer, x)
            mean.update(model)
            return loss

        if as_argument:
            step, call = given, lambda f, x: f(model, optimizer, mean, x)
        else:
            step, call = around, lambda f, x: f(model, optimizer, x)
        tensors = mean.seen if kind is Tensors else lambda: list(mean.shadow.parameters())
        return Training(step, call, lambda: ([*seen()[0], *tensors()], [mean.updates]))

    return make


def nested(many):
    """An average without a module, in a trainer, or in a list of the trainer's."""

    class Averaging:
        def __init__(self, model, optimizer):
            self.model, self.optimizer, self.steps = model, optimizer, 0
            self.average, self.averages = Tensors(model), [Tensors(model), Tensors(model)]

        def step(self, x):
            self.steps += 1
            loss = train(self.model, self.optimizer, x, 1 / self.steps)
            if not many:
                self.average.update(self.model)
            else:
                for average in self.averages:
                    average.update(self.model)
            return loss

    def make():
        model, optimizer, seen = parts()
        trainer = Averaging(model, optimizer)
        every = trainer.averages if many else [trainer.average]

        def now():
            tensors = [x for each in every for x in each.seen()]
            return [*seen()[0], *tensors], [trainer.steps, *(each.updates for each in every)]

        return Training(trainer.step, lambda f, x: f(x), now)

    return make


def slow():
    model, optimizer, seen = parts()
    around = Slow(optimizer)
    return Training(
        train, lambda f, x: f(model, around, x), lambda: ([*seen()[0], *around.slow[0]], [around.calls])
    )  # fmt: skip


def both():
    model, _, seen = parts()
    around = Both(torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([model.bias], lr=0.1))
    return Training(train, lambda f, x: f(model, around, x), seen)


class Keeping:
    """A trainer that keeps what it saw last, for those that look at it between steps."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.loss = model, optimizer, None

    def step(self, x):
        self.loss = train(self.model, self.optimizer, x)
        self.largest = x.abs().amax()
        return self.loss


def keeping():
    model, optimizer, seen = parts()
    trainer = Keeping(model, optimizer)

    def kept():
        tensors, numbers = seen()
        return [*tensors, trainer.loss, trainer.largest], numbers

    return Training(trainer.step, lambda f, x: f(x), kept)


KINDS = {
    "a trainer that keeps its loss": (keeping, 2),
    "a trainer": (trainer_argument, 3),
    "objects in objects": (deep_argument, 2),
    "an average": (average(Average, True), 2),
    "an average around": (average(Average, False), 2),
    "tensors": (average(Tensors, True), 2),
    "tensors around": (average(Tensors, False), 2),
    "tensors in a trainer": (nested(False), 2),
    "tensors in a list in a trainer": (nested(True), 2),
    "slow weights": (slow, 3),
    "two optimisers": (both, 2),
}
"""What a user has, and the most captures of it."""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_objects_hold_what_they_hold_on_one_device(kind, plan):
    check_on_a_mesh(*KINDS[kind], plan)


class Mean:
    def __init__(self):
        self.mean, self.rate = torch.zeros((), dtype=torch.float64), 0.9

    def of(self, x):
        self.mean = self.mean * self.rate + x.sum()
        return self.mean


class Stepping(Linear):
    """A module whose method is the step, with objects of its own, as those of some trainers are."""

    def __init__(self):
        super().__init__()
        self.means = [Mean(), Mean()]
        self.one = Mean()

    def step(self, optimizer, x):
        return train(self, optimizer, x) + self.one.of(x) + sum(mean.of(x) for mean in self.means)


def test_objects_of_modules_are_looked_at_with_the_module():
    def stepped(prepare):
        model = seeded(Stepping)
        step, optimizer = prepare(model.step), torch.optim.SGD(model.parameters(), lr=0.1)
        return [(whole(step(optimizer, x)), *(whole(each.mean) for each in (model.one, *model.means))) for x in X]

    want = stepped(lambda step: step)
    with LocalTensorMode(2), captures() as made:
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        got = stepped(lambda step: spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}))
    torch.testing.assert_close(got, want)
    assert len(made) == 1


class Noting:
    """What it does beside its work, a program does not."""

    def __init__(self, model):
        self.model, self.losses, self.is_on, self.note = model, [], False, "before"

    def appends(self, x):
        self.losses.append(1.0)
        return self.model(x).sum()

    def switches(self, x):
        self.is_on = True
        return self.model(x).sum()

    def writes(self, x):
        self.note = "after"
        return self.model(x).sum()

    def keeps(self, x):
        self.losses.append(self.model(x).sum())
        return self.losses[-1]


GIVEN = {
    "appends": lambda noting, x: noting.appends(x),
    "switches": lambda noting, x: noting.switches(x),
    "writes": lambda noting, x: noting.writes(x),
    "keeps": lambda noting, x: noting.keeps(x),
}


@pytest.mark.parametrize("as_argument", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_plain_values_that_a_step_changes_are_changed_in_each_call(name, as_argument):
    """Also where the object is an argument. A tensor beside them is an error, and all is taken back."""
    noting, single = Noting(parts()[0]), Noting(None)
    before = dict(vars(noting))
    fn = GIVEN[name] if as_argument else getattr(noting, name)
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    with LocalTensorMode(1):
        step = spmd.compile(fn, mesh)
        if name == "keeps":
            with pytest.raises(RuntimeError, match=r"the step keeps a tensor in \w+.losses"):
                step(*([noting] * as_argument), X[0])
            assert vars(noting) == before and noting.losses == []
            return
        single.model = torch.detach
        for _ in range(3):
            step(*([noting] * as_argument), X[0])
            GIVEN[name](single, X[0])
            assert vars(noting) == {**vars(single), "model": noting.model}


def test_what_a_hook_holds_may_not_change():
    """It was put back behind the capture, and so changed in no call."""
    model, optimizer, _ = parts()
    seen = []
    model.weight.register_hook(lambda g: seen.append(1) or g * len(seen))
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    with LocalTensorMode(1), pytest.raises(RuntimeError, match="the step changes a list that a hook"):
        spmd.compile(train, mesh)(model, optimizer, X[0])
    assert seen == []


def test_a_plain_value_of_an_object_is_a_guard():
    model, _, _ = parts()
    held = types.SimpleNamespace(model=model, words="a", sizes=[1])

    def step(held, x):
        return held.model(x).sum() * len(held.words) * sum(held.sizes)

    with LocalTensorMode(2), captures() as made:
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}})
        for change, times in (("words", 1), ("words", 3), ("words", 3)):
            setattr(held, change, "a" * times)
            torch.testing.assert_close(whole(compiled(held, X[0])), model_sum(model, X[0]) * times)
        held.sizes.append(2)
        torch.testing.assert_close(whole(compiled(held, X[0])), model_sum(model, X[0]) * 9)
        held.model = nn.Linear(4, 2, dtype=torch.float64)
        torch.testing.assert_close(whole(compiled(held, X[0])), model_sum(held.model, X[0]) * 9)
    assert len(made) == 4


def model_sum(model, x):
    return torch.nn.functional.linear(x, whole(model.weight), whole(model.bias)).sum()
