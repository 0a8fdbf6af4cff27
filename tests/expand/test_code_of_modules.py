"""What modules, hooks and classes of a step read around them is a guard, and what they change there is an error."""

from __future__ import annotations

import contextvars
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import spmd
from tests.expand.side_by_side import seeded

LINE = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
X = torch.arange(8.0).reshape(2, 4) / 7
SCALE = 1.0
SEEN: list[int] = []


def scaled(x):
    return x * SCALE


@functools.lru_cache
def scale_of(n: int) -> float:
    return SCALE * n


class Linear(nn.Module):
    """A layer whose `forward` gets its scale somewhere."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.inner = seeded(lambda: nn.Linear(4, 4))

    def forward(self, x):
        return self.of(self.inner(x))

    def of(self, x):
        return x


class ByHelper(Linear):
    def of(self, x):
        return scaled(x)


class ByMethod(Linear):
    def of(self, x):
        return x * SCALE


class ByClass(Linear):
    def of(self, x):
        return x * type(self).scale


class Config:
    scale = 1.0
    count = 0

    @classmethod
    def counted(cls):
        cls.count += 1
        return cls.count


class ByOtherClass(Linear):
    def of(self, x):
        return x * self.rate

    @property
    def rate(self):
        return Config.scale * 2


class ByCachedFunction(Linear):
    def of(self, x):
        return x * scale_of(2)


class Scaling(torch.autograd.Function):
    scale = 1.0
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * Scaling.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaling.scale


class ByFunction(Linear):
    def of(self, x):
        return Scaling.apply(x)


class ByHook(Linear):
    def __init__(self):
        super().__init__()
        self.inner.register_forward_hook(lambda module, args, out: scaled(out))


class ByOwnHook(Linear):
    def __init__(self):
        super().__init__()
        self.inner.register_forward_pre_hook(self.before)

    def before(self, module, args):
        return scaled(args[0])


class ByAttribute(Linear):
    """Holds a function."""

    def __init__(self):
        super().__init__()
        self.act = scaled

    def of(self, x):
        return self.act(x)


class Scaler:
    def __call__(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * SCALE


class ByObject(Linear):
    """Holds objects with code in a list."""

    def __init__(self):
        super().__init__()
        self.scalers = [Scaler()]

    def of(self, x):
        return self.scalers[0](x)


class ByHiddenMethod(ByMethod):
    def of(self, x):
        return super().of(x)


CONTEXT = contextvars.ContextVar("scale", default=1.0)


class ByContext(Linear):
    def of(self, x):
        return x * CONTEXT.get()


class Made:
    def __init__(self):
        self.scale = SCALE


class ByMadeObject(Linear):
    """Makes an object that takes the scale when it is made."""

    def of(self, x):
        return x * Made().scale


class MadeInside(Made):
    """Its own `__init__` names nothing."""

    def __init__(self):
        super().__init__()


class ByHiddenInit(Linear):
    def of(self, x):
        return x * MadeInside().scale


class New:
    def __new__(cls):
        new = super().__new__(cls)
        new.scale = SCALE
        return new


class ByNew(Linear):
    def of(self, x):
        return x * New().scale


@dataclass
class Record:
    scale: float = field(default_factory=lambda: SCALE)
    twice: float = 0.0

    def __post_init__(self):
        self.twice = 2 * SCALE


class ByFactory(Linear):
    def of(self, x):
        return x * Record().scale


class ByPostInit(Linear):
    def of(self, x):
        return x * Record(1.0).twice


class Scaled:
    def __enter__(self):
        return SCALE

    def __exit__(self, *error):
        pass

    def __invert__(self):
        return SCALE


class ByWith(Linear):
    def of(self, x):
        with Scaled() as scale:
            return x * scale


class ByOperator(Linear):
    """Holds an object that says what an operator does."""

    def __init__(self):
        super().__init__()
        self.factor = Scaled()

    def of(self, x):
        return x * ~self.factor


class LossWithScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = SCALE

    def forward(self, x):
        return x * self.scale


class ByMadeModule(Linear):
    def of(self, x):
        return LossWithScale()(x)


def train_step(model, x):
    loss = model(x).square().mean()
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


def _set_all(value: float) -> None:
    global SCALE
    SCALE = ByClass.scale = Config.scale = Scaling.scale = value
    CONTEXT.set(value)
    scale_of.cache_clear()


READS = (
    ByHelper, ByMethod, ByClass, ByOtherClass, ByCachedFunction, ByFunction, ByHook, ByOwnHook, ByAttribute, ByObject,
    ByHiddenMethod, ByContext, ByMadeObject, ByHiddenInit, ByNew, ByFactory, ByPostInit, ByWith, ByOperator,
    ByMadeModule,
)  # fmt: skip


@pytest.fixture
def ones() -> Iterator[None]:
    _set_all(1.0)
    yield
    _set_all(1.0)


@pytest.mark.parametrize("kind", READS)
def test_what_the_code_of_a_module_reads_is_a_guard(kind, ones):
    """Another value makes another program, also where the calls before were made again at once."""
    model, plain = kind(), kind()
    step = spmd.compile(train_step, LINE)
    for value in (1.0, 3.0):
        _set_all(value)
        for _ in range(3):
            for mine, want in zip(step(model, X), train_step(plain, X), strict=True):
                torch.testing.assert_close(mine.full_tensor(), want)
    assert len(step.programs) == 2


class Descent(torch.optim.Optimizer):
    rate = 1.0

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * self.rate * SCALE)


@dataclass
class Options:
    factor: float = 2.0

    def of(self, x):
        return x * self.factor * SCALE


def descend(model, optimizer, options, x):
    loss = options.of(model(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_the_code_of_optimisers_and_arguments_is_looked_through(ones):
    ours, alone = ((m := Linear(), Descent(m.parameters()), Options()) for _ in range(2))
    step = spmd.compile(descend, LINE)
    with pytest.MonkeyPatch.context() as patch:
        for value in (1.0, 3.0):
            _set_all(value)
            patch.setattr(Descent, "rate", value)
            for _ in range(3):
                torch.testing.assert_close(step(*ours, X).full_tensor(), descend(*alone, X))
    torch.testing.assert_close(ours[0].inner.weight.full_tensor(), alone[0].inner.weight)


# ---- what would be frozen ---------------------------------------------------------------------


class NotesInAList(Linear):
    def of(self, x):
        SEEN.append(1)
        return x * len(SEEN)


class CountsInItsClass(Linear):
    calls = 0

    def of(self, x):
        type(self).calls += 1
        return x * type(self).calls


class AddsToItsClass(Linear):
    def of(self, x):
        type(self).first = 3.0
        return x * 3


class GrowsItsClass(Linear):
    seen: list[int] = []

    def of(self, x):
        self.seen.append(1)
        return x * len(self.seen)


class CallsAClass(Linear):
    def of(self, x):
        return x * Config.counted()


class CountsInAFunction(Linear):
    class Counting(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            CountsInAFunction.Counting.calls += 1
            return x * CountsInAFunction.Counting.calls

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def of(self, x):
        return CountsInAFunction.Counting.apply(x)


class SetsTheContext(Linear):
    def of(self, x):
        CONTEXT.set(CONTEXT.get() + 1)
        return x * CONTEXT.get()


class CountsOnAParameter(Linear):
    def of(self, x):
        self.inner.weight.calls = getattr(self.inner.weight, "calls", 0) + 1
        return x * self.inner.weight.calls


NUMBERS = iter([1.0, 2.0, 3.0])


class TakesTheNext(Linear):
    def of(self, x):
        return x * next(NUMBERS)


CHANGES = {
    CountsOnAParameter: "sets the attribute calls of the parameter model.inner.weight",
    TakesTheNext: "uses NUMBERS, a list_iterator",
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_what_the_code_of_a_module_changes_around_it_is_refused(kind):
    """And all is as it was."""
    model = kind()
    with pytest.raises((RuntimeError, TypeError), match=CHANGES[kind]):
        spmd.compile(train_step, LINE)(model, X)
    assert not hasattr(model.inner.weight, "calls")


def whole(x):
    return x.full_tensor() if isinstance(x, spmd.DTensor) else x


def _around():
    return list(SEEN), list(GrowsItsClass.seen), vars(AddsToItsClass).get("first"), CONTEXT.get()


@pytest.mark.parametrize("kind", [NotesInAList, AddsToItsClass, GrowsItsClass, SetsTheContext])
def test_what_the_code_of_a_module_changes_around_it_is_changed_in_each_call(kind):
    def steps(run):
        model = kind()
        found = [([whole(x).detach() for x in run(model, X)], _around()) for _ in range(3)]
        SEEN.clear()
        GrowsItsClass.seen.clear()
        CONTEXT.set(1.0)
        if "first" in vars(AddsToItsClass):
            del AddsToItsClass.first
        return found

    torch.manual_seed(0)
    want = steps(lambda model, x: train_step(model, x))
    torch.manual_seed(0)
    for (loss, around), (expected, single) in zip(steps(spmd.compile(train_step, LINE)), want, strict=True):
        torch.testing.assert_close(loss, expected)
        assert around == single


COUNTS = {
    CountsInItsClass: (CountsInItsClass, "calls"), CallsAClass: (Config, "count"),
    CountsInAFunction: (CountsInAFunction.Counting, "calls"),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTS)
def test_numbers_of_classes_are_counted(kind):
    """As on one device, in each call; an error puts them back."""
    model, (of, name) = kind(), COUNTS[kind]
    compiled, begin = spmd.compile(train_step, LINE), getattr(of, name)
    found = []
    for step in (train_step, compiled):
        setattr(of, name, begin)
        found.append([(*step(model, X), getattr(of, name)) for _ in range(4)])
    setattr(of, name, begin)
    for want, got in zip(*found, strict=True):
        assert want[-1] == got[-1] and type(got[-1]) is int
        for x, y in zip(want[:-1], got[:-1], strict=True):
            torch.testing.assert_close(y.full_tensor(), x)


# ---- functions with a cache -------------------------------------------------------------------


@functools.lru_cache
def mask(n: int) -> torch.Tensor:
    return torch.ones(n, n).tril()


class Masks(Linear):
    def of(self, x):
        return x @ mask(4) @ self.own(4)

    @functools.lru_cache  # noqa: B019
    def own(self, n: int) -> torch.Tensor:
        return torch.ones(n, n).triu()


def test_a_cache_keeps_no_traced_tensor():
    """The function is called without its cache, which is as it was, and later calls outside find plain tensors."""
    mask.cache_clear()
    model, plain = Masks(), Masks()
    step = spmd.compile(train_step, LINE)
    for x in (X, X[:1]):
        for mine, want in zip(step(model, x), train_step(copy.deepcopy(plain), x), strict=True):
            torch.testing.assert_close(mine.full_tensor(), want)
    assert type(mask(4)) is torch.Tensor and type(model.own(4)) is torch.Tensor
    assert mask.cache_info().currsize == 1


# ---- settings of torch, and errors that are caught --------------------------------------------


def leaves_gradients_off(model, x):
    torch.set_grad_enabled(False)
    return model(x)


def leaves_another_dtype(model, x):
    torch.set_default_dtype(torch.float64)


def changes_the_dtype_inside(model, x):
    torch.set_default_dtype(torch.float64)
    third = torch.ones(4) / 3
    torch.set_default_dtype(torch.float32)
    return model(x) * third


def catches(model, x):
    y = model(x)
    try:
        return y * 2 if y.sum() > 0 else y
    except Exception:
        return y * 3


SETTINGS: list[tuple[Callable, str]] = [
    (leaves_gradients_off, "leaves torch.set_grad_enabled changed"),
    (leaves_another_dtype, "leaves torch.set_default_dtype changed"),
    (changes_the_dtype_inside, "changes torch's default dtype, .*test_code_of_modules.py:"),
    (catches, "decides by a value in a tensor, .*test_code_of_modules.py:"),
]


@pytest.mark.parametrize("step, message", SETTINGS, ids=lambda x: getattr(x, "__name__", ""))
def test_settings_that_are_left_changed_and_errors_that_are_caught(step, message):
    with pytest.raises((RuntimeError, NotImplementedError), match=f"(?s){message}"):
        spmd.compile(step, LINE)(Linear(), X)
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
