"""Numbers that a step keeps in Python, from call to call: in modules, optimisers, objects and variables."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import nn
from workers import Pool

import spmd
from spmd import LocalTensorMode, Shard
from spmd.expand.compile import CompiledStep
from tests.expand.test_sizes import captures

CALLS = 8
X = [torch.linspace(-2.0, 3.0 + i, 24, dtype=torch.float64).reshape(6, 4) for i in range(CALLS)]

TOTAL = 0


def train(model, optimizer, x, scale=1.0):
    optimizer.zero_grad()
    loss = (model(x) * scale).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, dtype=torch.float64)
        self.calls, self.scale, self.flag = 0, 1.0, True


class Counts(Linear):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 4)


class EveryThird(Linear):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (2.0 if self.calls % 3 == 0 else 1.0)


class Decays(Linear):
    """The scale of the optimiser's step is a float that the model keeps."""

    def forward(self, x):
        y = super().forward(x) * self.scale
        self.scale = self.scale * 0.9
        return y


class InLibraryCode(Linear):
    """Sets its count in a way that its code does not say."""

    def forward(self, x):
        setattr(self, "cal" + "ls", self.calls + 1)
        return super().forward(x) * self.calls


class Inside(nn.Sequential):
    """Equal blocks that each count."""

    def __init__(self):
        super().__init__(*[nn.Sequential(Counts(), nn.Tanh()) for _ in range(4)])


class ByWholeNumbers(Linear):
    """A count that meets whole numbers in tensors."""

    def forward(self, x):
        self.calls += 2
        places = (torch.arange(4) * self.calls + self.calls) % 4
        return super().forward(x)[:, places] * places.clamp(max=self.calls - 1)


class Anneals(Linear):
    """By functions of Python's math."""

    def forward(self, x):
        self.calls += 1
        tau = 0.5 * (1 + math.cos(math.pi * self.calls / 9)) + 0.9 * (1 - math.exp(-self.calls / 3))
        return super().forward(x) * (tau + math.sqrt(self.calls)) + math.log(self.calls)


class Schedule:
    """An object of a module."""

    def __init__(self):
        self.steps, self.seen = 0, [0, 0.5]

    def scale(self):
        self.steps += 1
        self.seen[0] += 2
        self.seen[1] *= 0.9
        return 1 / (self.steps + self.seen[0] * self.seen[1])


class Holds(Linear):
    """Numbers in an object, in a list there, and in a dict."""

    def __init__(self):
        super().__init__()
        self.schedule, self.stats = Schedule(), {"calls": {"all": 0}}

    def forward(self, x):
        self.stats["calls"]["all"] += 1
        self.calls = self.stats["calls"]["all"]
        return super().forward(x) * self.schedule.scale() * self.calls


class Rows(Linear):
    """Keeps a size, and so a number of another kind of source."""

    def forward(self, x):
        y = super().forward(x) * (1 + self.calls)
        self.calls = x.shape[0]
        return y


class Average:
    """An average of a model's parameters, as it is often written."""

    def __init__(self, model):
        self.shadow, self.updates = copy.deepcopy(model), 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for p, q in zip(self.shadow.parameters(), model.parameters(), strict=True):
            p.mul_(decay).add_(q, alpha=1 - decay)


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self._steps = model, optimizer, 0
        self.average = Average(model)

    @property
    def steps(self):
        return self._steps

    @steps.setter
    def steps(self, n):
        self._steps = n

    def step(self, x):
        self.steps += 1
        loss = train(self.model, self.optimizer, x, 1 / self.steps)
        if self.steps % 2 == 0:
            self.average.update(self.model)
        return loss


class Lookahead(torch.optim.Optimizer):
    """An optimiser around another one, whose groups and state it shares."""

    def __init__(self, inner, every=3):
        self.inner, self.every, self.calls = inner, every, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        self.inner.step()
        self.calls += 1
        if self.calls % self.every == 0:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.5)


class Sharpness(torch.optim.Optimizer):
    """SAM: an optimiser around another one, with the same groups and a state of its own."""

    def __init__(self, params, **options):
        super().__init__(params, dict(rho=0.05, **options))
        self.inner = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def climb(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"])
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.inner.step()


class Restarted(torch.optim.Optimizer):
    """Counts its steps as many papers' optimisers do: for each parameter, and for a group."""

    def __init__(self, params, lr=0.1, every=3):
        super().__init__(params, dict(lr=lr, every=every, rounds=0))

    @property
    def calls(self):
        of_parameters = [x for kept in self.state.values() for x in (kept["step"], kept["scale"])]
        return [self.param_groups[0]["rounds"], *of_parameters]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["rounds"] += 1
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"], state["scale"], state["kind"], state["mean"] = 0, 1.0, "mean", torch.zeros_like(p)
                state["step"] += 1
                state["scale"] *= 0.9
                state["mean"].lerp_(p.grad, 0.5)
                if state["step"] % group["every"] == 0:
                    state["mean"].mul_(0.5)
                rate = group["lr"] * state["scale"] / (1 - 0.5 ** state["step"]) / math.sqrt(group["rounds"])
                p.sub_(state["mean"] * rate)


def sharp(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.climb()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.descend()
    return loss.detach()


@dataclass
class Training:
    """What a user has. step: to be compiled. call: calls it. seen: the tensors, and the numbers."""

    step: Callable
    call: Callable
    seen: Callable


def of_model(kind, make=lambda p: torch.optim.AdamW(p, lr=0.1), step=train):
    model = kind()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1.0, 1.0 + i / 9, p.numel()).reshape(p.shape))
    optimizer = make(model.parameters())

    def seen():
        numbers = [x for m in model.modules() if isinstance(m, Linear) for x in (m.calls, m.scale)]
        of_optimizer = getattr(optimizer, "calls", 0)
        return list(model.parameters()), [*numbers, *(of_optimizer if type(of_optimizer) is list else [of_optimizer])]

    return Training(step, lambda f, x: f(model, optimizer, x), seen)


def of_trainer():
    plain = of_model(Linear)
    model, optimizer = [], []
    plain.call(lambda m, o, x: (model.append(m), optimizer.append(o)), None)
    trainer = Trainer(model[0], optimizer[0])
    average = trainer.average

    def seen():
        return [*trainer.model.parameters(), *average.shadow.parameters()], [trainer.steps, average.updates]

    return Training(trainer.step, lambda f, x: f(x), seen)


def of_closure():
    trained, calls, average = of_model(Linear), 0, None

    def step(model, optimizer, x):
        nonlocal calls
        calls += 2
        loss = train(model, optimizer, x, calls)
        average.update(model)
        return loss

    trained.call(lambda model, optimizer, x: None, None)
    models = []
    trained.call(lambda model, optimizer, x: models.append(model), None)
    average = Average(models[0])
    return Training(step, trained.call, lambda: ([*trained.seen()[0], *average.shadow.parameters()], [calls]))


def of_global():
    global TOTAL
    TOTAL = 0

    def step(model, optimizer, x):
        global TOTAL
        TOTAL += 1
        return train(model, optimizer, x, 1 / TOTAL)

    trained = of_model(Linear)
    return Training(step, trained.call, lambda: (trained.seen()[0], [TOTAL]))


def of_names():
    """A variable around and an argument have one name, and so have attributes of two objects."""
    trained = of_model(Linear)

    class Other:
        def __init__(self):
            self.steps, self.mean = 10, torch.zeros((), dtype=torch.float64)

        def scale(self, x):
            self.steps += 2
            self.mean = self.mean * 0.9 + x.abs().sum()
            return x / self.steps

    class Step:
        def __init__(self):
            self.steps, self.mean = 0, torch.ones((), dtype=torch.float64)

        def run(self, model, optimizer, x, calls):
            self.steps += 1
            self.mean = self.mean * 0.5 + x.sum()
            return train(model, optimizer, scaled(x), self.steps + calls + counted())

    calls = 100

    def counted():
        nonlocal calls
        calls += 1
        return calls / 100

    other, step = Other(), Step()
    scaled = other.scale

    def call(f, x):
        return trained.call(lambda model, optimizer, x: f(model, optimizer, x, 3 + step.steps), x)

    return Training(
        step.run, call, lambda: ([*trained.seen()[0], other.mean, step.mean], [other.steps, step.steps, calls])
    )  # fmt: skip


def of_hook():
    trained, calls = of_model(Linear), 0

    def count(module, args, out):
        nonlocal calls
        calls += 1
        return out * calls

    trained.call(lambda model, optimizer, x: model.register_forward_hook(count), None)
    return Training(train, trained.call, lambda: (trained.seen()[0], [calls]))


class Kept:
    """An average in tensors, as an object that hangs on a module, with a count beside them."""

    def __init__(self, parameters):
        self.shadow, self.updates = [p.detach().clone() for p in parameters], 0
        self.more = {"of": [0.5, torch.zeros((), dtype=torch.float64)], "pair": (torch.zeros(()), [2])}

    def decay(self):
        self.updates += 1
        self.more["of"][0] *= 0.9
        self.more["pair"][1][0] += 3
        self.more["of"][1] = self.more["of"][1] + self.updates
        return min(0.99, (1 + self.updates) / (10 + self.updates)) * self.more["of"][0]

    @torch.no_grad()
    def update(self, parameters):
        decay = self.decay()
        self.shadow = [x * decay + p.detach() * (1 - decay) for x, p in zip(self.shadow, parameters, strict=True)]


class Written(Kept):
    """The same, written in place, every second time."""

    @torch.no_grad()
    def update(self, parameters):
        decay = self.decay()
        if self.updates % 2:
            for x, p in zip(self.shadow, parameters, strict=True):
                x.mul_(decay).add_(p.detach(), alpha=1 - decay)


def of_average(kind):
    def make():
        trained, models = of_model(Linear), []
        trained.call(lambda model, optimizer, x: models.append(model), None)
        model = models[0]
        model.average = average = kind(model.parameters())

        def step(model, optimizer, x):
            loss = train(model, optimizer, x)
            model.average.update(model.parameters())
            return loss * model.average.more["pair"][1][0]

        def seen():
            more = average.more
            tensors = [*model.parameters(), *average.shadow, more["of"][1]]
            return tensors, [average.updates, more["of"][0], more["pair"][1][0]]

        return Training(step, trained.call, seen)

    return make


class Watch:
    """What hooks call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, args, out):
        self.calls += 1
        return out / self.calls

    def of_gradient(self, gradient):
        self.calls += 2
        return gradient * self.calls

    def of_optimizer(self, optimizer, args, kwargs):
        self.calls += 1
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad / self.calls


def watched(register):
    """register: how a model and its optimiser get the hook."""

    def make():
        trained, watch = of_model(Linear), Watch()
        trained.call(lambda model, optimizer, x: register(model, optimizer, watch), None)
        return Training(train, trained.call, lambda: (trained.seen()[0], [watch.calls]))

    return make


class Slower(torch.optim.SGD):
    """An optimiser that keeps a list and a dict with numbers."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.seen = {"calls": 0, "scales": [0.5]}

    def step(self, closure=None):
        self.seen["calls"] += 1
        self.seen["scales"][0] *= 0.9
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad * self.seen["scales"][0] / self.seen["calls"]
        super().step()


def of_slower():
    trained, made = of_model(Linear, Slower), []
    trained.call(lambda model, optimizer, x: made.append(optimizer.seen), None)
    return Training(train, trained.call, lambda: (trained.seen()[0], [made[0]["calls"], *made[0]["scales"]]))


def of_class():
    """Numbers of classes: of a trainer, and of a layer, which a subclass has by inheritance."""

    class Layer(Linear):
        total = 0

        def forward(self, x):
            Layer.total += 1
            return super().forward(x) / self.total

    class Steps:
        steps = 0

        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self, x):
            type(self).steps += 2
            return train(self.model, self.optimizer, x, 1 / self.steps)

    trained, made = of_model(Layer), []
    trained.call(lambda *given: made.append(Steps(*given[:2])), None)
    return Training(made[0].step, lambda f, x: f(x), lambda: (trained.seen()[0], [Layer.total, Steps.steps]))


def annealed():
    """The number changes between calls, as a temperature does."""
    trained = of_model(Linear)

    def step(model, optimizer, x):
        return train(model, optimizer, x, model.scale)

    def call(f, x):
        trained.call(lambda model, optimizer, x: setattr(model, "scale", model.scale * 0.8), None)
        return trained.call(f, x)

    return Training(step, call, trained.seen)


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


KINDS: dict[str, tuple[Callable[[], Training], int]] = {
    "a count": (lambda: of_model(Counts), 2),
    "a branch": (lambda: of_model(EveryThird), 2),
    "by whole numbers": (lambda: of_model(ByWholeNumbers), 2),
    "a float": (lambda: of_model(Decays), 1),
    "functions of a count": (lambda: of_model(Anneals), 1),
    "in what a module holds": (lambda: of_model(Holds), 2),
    "a size": (lambda: of_model(Rows), 1),
    "set by code that is not read": (lambda: of_model(InLibraryCode), 3),
    "blocks": (lambda: of_model(Inside), 2),
    "a trainer": (of_trainer, 3),
    "a variable around": (of_closure, 2),
    "a global": (of_global, 1),
    "a hook": (of_hook, 1),
    "names": (of_names, 1),
    "an optimiser around another one": (lambda: of_model(Linear, lambda p: Lookahead(adam(p))), 2),
    "sharpness": (lambda: of_model(Linear, lambda p: Sharpness(p, lr=0.1, momentum=0.9), sharp), 2),
    "between calls": (annealed, 3),
    "beside tensors": (of_average(Kept), 3),
    "beside tensors that are written": (of_average(Written), 4),
    "an object as a hook": (watched(lambda m, o, watch: m.register_forward_hook(watch)), 2),
    "a method as a hook": (watched(lambda m, o, watch: m.register_forward_hook(watch.__call__)), 2),
    "a hook of a gradient": (watched(lambda m, o, watch: m.weight.register_hook(watch.of_gradient)), 2),
    "a hook of an optimiser": (watched(lambda m, o, watch: o.register_step_pre_hook(watch.of_optimizer)), 2),
    "in what an optimiser holds": (of_slower, 2),
    "of classes": (of_class, 3),
    "for each parameter": (lambda: of_model(Linear, Restarted), 5),
}
"""What a user has, and the most captures of it."""

PLANS = {"dp": ((3,), {}), "zero": ((2,), {"fully_shard": "dp"}), "program": ((2, 2), {"choose": "program"})}


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    x = x.full_tensor() if isinstance(x, spmd.DTensor) else x
    return x.reconcile().clone() if isinstance(x, spmd.LocalTensor) else x.clone()


def trained(make: Callable[[], Training], prepare: Callable[[Callable], Callable]) -> list:
    training = make()
    step, found = prepare(training.step), []
    for x in X:
        found.append(whole(training.call(step, x)))
        tensors, numbers = training.seen()
        found.append(([whole(p) for p in tensors], copy.deepcopy(numbers)))
    return found


def check(got, want):
    for (loss, (tensors, numbers)), (others, (theirs, counts)) in zip(
        zip(got[::2], got[1::2], strict=True), zip(want[::2], want[1::2], strict=True), strict=True
    ):
        torch.testing.assert_close(loss, others, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(tensors, theirs, rtol=1e-10, atol=1e-10)
        assert numbers == pytest.approx(counts) and [*map(type, numbers)] == [*map(type, counts)]


def check_on_a_mesh(make: Callable[[], Training], most: int, plan: str) -> None:
    """After each call: what the step returns, all tensors, and the numbers; and they ask for few captures."""
    (shape, said), want = PLANS[plan], trained(make, lambda step: step)
    with LocalTensorMode(torch.Size(shape).numel()), captures() as made:
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        got = trained(make, lambda step: spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}, **said))
    check(got, want)
    assert len(made) <= most


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_one_device(kind, plan):
    check_on_a_mesh(*KINDS[kind], plan)


CHANGES = {
    "another object": lambda model: setattr(model, "average", Kept(model.parameters())),
    "another list": lambda model: model.average.more.update(of=[0.25, torch.ones((), dtype=torch.float64)]),
    "another number": lambda model: setattr(model.average, "updates", 5),
    "a number in a list": lambda model: model.average.more["pair"][1].__setitem__(0, 11),
    "a number that is a float": lambda model: setattr(model.average, "updates", 5.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_holds_counts_beside_tensors_may_be_changed_between_calls(name):
    """Also where another object has taken its place: a later call counts in that."""

    def run(prepare):
        training, models, found = of_average(Kept)(), [], []
        training.call(lambda model, optimizer, x: models.append(model), None)
        step = prepare(training.step)
        for i, x in enumerate(X):
            if i in (4, 6):
                CHANGES[name](models[0])
            more = models[0].average.more
            found.append(whole(training.call(step, x)))
            numbers = [models[0].average.updates, more["of"][0], more["pair"][1][0]]
            found.append(([whole(p) for p in models[0].average.shadow], numbers))
        return found

    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    check(run(lambda step: spmd.compile(step, mesh)), run(lambda step: step))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_count_are_made_again_at_once(kind):
    """But for the few that find out what is counted, and those in which a branch asks for another program."""
    mesh, real = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), CompiledStep._run_anew
    make, _ = KINDS[kind]
    with mock.patch.object(CompiledStep, "_run_anew", autospec=True, side_effect=real) as anew:
        check(trained(make, lambda step: spmd.compile(step, mesh)), trained(make, lambda step: step))
    assert anew.call_count <= 5


@pytest.mark.parametrize(
    "kind", ["a count", "a branch", "a float", "set by code that is not read", "a trainer", "in what a module holds",
     "beside tensors", "of classes", "in what an optimiser holds", "for each parameter"]
)  # fmt: skip
def test_a_kept_step_counts_on(kind, tmp_path):
    """In another process nothing is captured, also where the code does not say what it counts."""
    make, _ = KINDS[kind]
    mesh, said = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), {"inputs": {"x": {"dp": Shard(0)}}}
    steps = []
    trained(make, lambda step: steps.append(spmd.compile(step, mesh, **said)) or steps[0])
    steps[0].save(tmp_path / "step.spmd")
    want = trained(make, lambda step: step)
    with captures() as made:
        got = trained(make, lambda step: spmd.load_step(tmp_path / "step.spmd", step, mesh))
    check(got, want)
    assert not made


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_start_with_a_cache_folder_captures_nothing(kind, tmp_path):
    """Also where only the first capture has found what is counted: the folder has noted it."""
    make, _ = KINDS[kind]
    mesh, want = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), trained(make, lambda step: step)
    check(trained(make, lambda step: spmd.compile(step, mesh, cache=tmp_path)), want)
    with captures() as made:
        check(trained(make, lambda step: spmd.compile(step, mesh, cache=tmp_path)), want)
    assert not made


ON_RANKS = (
    "a branch", "a trainer", "set by code that is not read", "in what a module holds", "beside tensors",
    "in what an optimiser holds", "of classes", "by whole numbers", "for each parameter",
)  # fmt: skip


def counted_on_ranks(rank: int, kind: str) -> list:
    mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    return trained(KINDS[kind][0], lambda step: spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}))


@pytest.mark.parametrize("kind", ON_RANKS)
def test_ranks_count_alike(kind, gloo4: Pool):
    """Calls that are made again at once among them; the ranks compare their numbers."""
    want = trained(KINDS[kind][0], lambda step: step)
    for got in gloo4.run(counted_on_ranks, kind):
        check(got, want)
