"""Whatever a trace has read and somebody changes between two calls is noticed: the next call is as on one device.

Each row of a table is a change. A session calls a step, makes the change, calls it again, takes the change back, and
calls it once more: with one compiled step that has made its quick calls, and with two steps that share captures.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.modules import module as of_all
from torch.optim.optimizer import register_optimizer_step_pre_hook

import spmd
from tests.expand import constants_of_changes as constants

X = torch.linspace(-1.0, 2.0, 24, dtype=torch.float64).reshape(8, 3)


def line() -> spmd.DeviceMesh:
    return spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def value(x):
    x = x.detach()
    return (x.full_tensor() if isinstance(x, spmd.DTensor) else x).clone()


def session(begin, changed, steps):
    """What each call gives, and the parameters behind it. changed: of the arguments gives a context, in which they, or
    what is around, are others. steps: are called in turns."""
    args, found = begin(), []

    def call(times):
        for step in [*steps] * times:
            result, models = step(*args), [x for x in args if isinstance(x, nn.Module)]
            found.append([value(result), *(value(p) for model in models for p in model.parameters())])

    call(4)
    with changed(*args):
        call(3)
    call(2)
    return found


def check(fn, begin, changed, shares):
    """shares: whether there are two steps."""
    turns = 2 if shares else 1
    own = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    alone = session(begin, changed, [fn] * turns)
    ours = session(begin, changed, [spmd.compile(own, line()) for _ in range(turns)])
    torch.testing.assert_close(ours, alone, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(alone[4 * turns][0], alone[4 * turns - 1][0])  # the change plays a role


both = pytest.mark.parametrize("shares", [False, True], ids=["one step", "two steps"])

# ---- modules, optimisers, and hooks on all of them ---------------------------------------------


class Scaled(optim.SGD):
    """Reads a private attribute, what its class has by default, and what it keeps for no parameter."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._scale = 1.0

    def step(self, closure=None):
        scale = self._scale * self.state["shared"].get("scale", 1.0) * self.defaults["lr"]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-10 * scale * group["lr"])


class Twice(Scaled):
    def step(self, closure=None):
        super().step()
        super().step()


class Meta(type(nn.Module)):
    rate = 1.0


class Rate:
    def __init__(self):
        self.rate = 1.0

    def __get__(self, owner, kind=None):
        return self.rate


class Base(nn.Module):
    bias = 0.0


class OtherBase(nn.Module):
    bias = 1.0


class Net(Base, metaclass=Meta):
    described = Rate()

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.up = nn.BatchNorm1d(3, momentum=0.1), nn.Tanh(), nn.Linear(3, 2)

    def forward(self, x):
        return self.up(self.act(self.norm(x))) * type(self).rate * self.described + self.bias


def train(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model(x).sum() + model.norm.running_mean.sum()


def begin():
    torch.manual_seed(0)
    model = Net().double()
    return model, Scaled(model.parameters(), lr=0.1), X


@contextlib.contextmanager
def with_attribute(x, name, new):
    """Also where Python does not let it be deleted, as `patch` does."""
    old = getattr(x, name)
    setattr(x, name, new)
    yield
    setattr(x, name, old)


@contextlib.contextmanager
def in_order(modules, names):
    old = [*modules.items()]
    modules.update((name, modules.pop(name)) for name in names)
    yield
    modules.clear()
    modules.update(old)


def tripled_gradients(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(3)


def step_after_tripling(optimizer):
    return lambda closure=None: (tripled_gradients(optimizer), type(optimizer).step(optimizer))


def five_steps(self, closure=None):
    for group in self.param_groups:
        for p in group["params"]:
            p.data.add_(p.grad, alpha=-5 * group["lr"])


def tripled(function):
    return lambda *args: 3 * function(*args)


OF_MODELS = {
    "a private attribute": lambda m, o, x: patch.object(o, "_scale", 4.0),
    "a step of its own": lambda m, o, x: patch.object(o, "step", step_after_tripling(o)),
    "the class of an optimiser": lambda m, o, x: with_attribute(o, "__class__", Twice),
    "defaults": lambda m, o, x: patch.dict(o.defaults, lr=0.5),
    "state of no parameter": lambda m, o, x: patch.dict(o.state["shared"], scale=4.0),
    "a method of an optimiser": lambda m, o, x: patch.object(Scaled, "step", five_steps),
    "a method of a layer of torch's": lambda m, o, x: patch.object(nn.Tanh, "forward", lambda self, x: x.sigmoid()),
    "a call": lambda m, o, x: patch.object(Net, "__call__", lambda self, x: self.forward(x) * 2),
    "what a class inherits from": lambda m, o, x: with_attribute(Net, "__bases__", (OtherBase,)),
    "a class of classes": lambda m, o, x: patch.object(Meta, "rate", 3.0),
    "a descriptor": lambda m, o, x: patch.object(vars(Net)["described"], "rate", 3.0),
    "no momentum": lambda m, o, x: patch.object(m.norm, "momentum", None),
    "a hook on all steps": lambda m, o, x: register_optimizer_step_pre_hook(tripled_gradients),
    "a hook on all modules": lambda m, o, x: of_all.register_module_forward_hook(lambda module, args, out: out * 2),
    "a hook before all modules": lambda m, o, x: of_all.register_module_forward_pre_hook(lambda m, args: args[0] * 2),
    "a hook on all gradients": lambda m, o, x: of_all.register_module_full_backward_pre_hook(
        lambda module, gradients: tuple(g * 2 for g in gradients)
    ),
    "a function of torch that layers call": lambda m, o, x: patch.object(F, "linear", tripled(F.linear)),
    "a method of tensors": lambda m, o, x: patch.object(torch.Tensor, "mean", lambda self: self.sum(), create=True),
}  # fmt: skip


@both
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", OF_MODELS)
def test_a_change_of_what_trains_is_noticed(name, shares):
    check(train, begin, OF_MODELS[name], shares)


def test_a_parameter_that_left_keeps_its_state():
    """One that was put in its place in the group has none yet."""
    def replaced(model, optimizer):
        new, group = nn.Parameter(torch.ones(2, 3, dtype=torch.float64)), optimizer.param_groups[0]["params"]
        group[[p is model.weight for p in group].index(True)] = model.weight = new

    def step(model, optimizer, x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.weight

    def run(step):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        found = [value(step(model, optimizer, X)) for _ in range(3)]
        replaced(model, optimizer)
        found += [value(step(model, optimizer, X)) for _ in range(3)]
        return found, len(optimizer.state)

    torch.testing.assert_close(run(spmd.compile(step, line())), run(step), rtol=1e-9, atol=1e-12)


def test_options_may_be_numbers_of_numpy():
    """And so may arguments, where they are floats of Python, too."""
    def step(model, optimizer, x, scale):
        (model(x) * scale).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.weight

    def begin():
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        return model, optim.SGD(model.parameters(), lr=0.1), X, np.float64(0.5)

    check(step, begin, lambda model, optimizer, *_: patch.dict(optimizer.param_groups[0], lr=np.float64(0.5)), True)


def test_an_option_more_is_another_program_of_a_folder(tmp_path):
    """A learning-rate scheduler adds floats, which a program has as inputs."""
    def begin():
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), X

    def step(model, optimizer, x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.weight

    for scheduled in (True, False):
        found = []
        for run in (step, spmd.compile(step, line(), cache=tmp_path)):
            args = begin()
            if scheduled:
                optim.lr_scheduler.OneCycleLR(args[1], 0.5, total_steps=9)
            found.append([value(run(*args)) for _ in range(2)])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_the_order_of_modules_counts_in_a_folder(tmp_path):
    def swapped(model):
        return in_order(model._modules, ["1", "0", "2"])

    with patch.object(spmd.expand.compile, "capture", side_effect=spmd.expand.compile.capture) as captures:
        for change in (contextlib.nullcontext, swapped):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
            with change(model):
                want = model(X)
                got = spmd.compile(lambda model, x: model(x), line(), cache=tmp_path)(model, X)
                torch.testing.assert_close(value(got), want.detach(), rtol=1e-9, atol=1e-12)
    assert captures.call_count == 2


# ---- functions, and values that code finds -----------------------------------------------------


class Config:
    base = 1.0

    def __init__(self, rate=2.0):
        self.rate, self.table, self.items = rate, {"a": 1.0}, [1.0, 2.0]

    def scaled(self, x):
        return x * self.rate

    def __getitem__(self, key):
        return self.table[key]

    def __call__(self, x):
        return x * self.rate

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)


class OtherConfig(Config):
    def scaled(self, x):
        return x * 9


class Slots:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 2.0

    def scaled(self, x):
        return x * self.rate


@dataclass(slots=True)
class SlottedData:
    rate: float = 2.0


class Names(dict):
    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Single:
    one = None

    @classmethod
    def get(cls):
        return cls.one


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def doubled(x):
    return x * 2


def by_seven(x):
    return x * 7


def scaled_by(x, rate=2.0):
    return x * rate


def scaled_with(config, x):
    return x * config.rate


def config_of_all():
    return CONFIG


Pair = namedtuple("Pair", "a b")
CONFIG, CONFIGS, SLOTS, SLOTTED, NAMES = Config(), [Config(), Config()], Slots(), SlottedData(), Names(rate=2.0)
SINGLE = Single.one = Config()
PARTIAL, ARGUMENT = functools.partial(scaled_by, rate=3.0), [2.0]
PARTIAL_OF_LIST = functools.partial(lambda rates, x: x * rates[0], ARGUMENT)
FUNCTIONS, FUNCTION, OPERATION = {"a": torch.tanh, "b": torch.exp, "c": doubled, "d": by_seven}, doubled, operator.mul
PAIR, ORDERED, SLICE, COUNTS, PART = Pair(2.0, 3.0), OrderedDict(a=1.0, b=2.0), slice(4), range(3), Fraction(1, 2)
BYTES, NUMBERS, RATE, NAME = b"a", bytearray(b"a"), 2.0, "RATE"


def imports_a_value(x):
    from tests.expand.constants_of_changes import RATE as rate

    return x * rate


def imports_a_module(x):
    import tests.expand.constants_of_changes as values

    return x * values.RATE


def imports_a_function(x):
    from tests.expand.constants_of_changes import scaled

    return scaled(x)


def gives_it_a_name(x):
    config = CONFIG
    return x * config.rate


def here(name, new):
    return patch.dict(globals(), {name: new})


AROUND = {
    "a function of torch": (lambda x: F.gelu(x), lambda x: patch.object(F, "gelu", by_seven)),
    "another function of torch": (lambda x: F.gelu(x), lambda x: patch.object(F, "gelu", F.silu)),
    "a builtin function of torch": (lambda x: torch.tanh(x), lambda x: patch.object(torch, "tanh", torch.exp)),
    "a function of Python": (lambda x: OPERATION(x, 3.0), lambda x: here("OPERATION", operator.add)),
    "a function": (lambda x: FUNCTION(x), lambda x: here("FUNCTION", by_seven)),
    "a partial function": (lambda x: PARTIAL(x), lambda x: here("PARTIAL", functools.partial(scaled_by, rate=6.0))),
    "what a partial function is given": (lambda x: PARTIAL(x), lambda x: patch.dict(PARTIAL.keywords, rate=6.0)),
    "what that holds": (lambda x: PARTIAL_OF_LIST(x), lambda x: with_item(ARGUMENT, 0, 6.0)),
    "a builtin function in a dict": (lambda x: FUNCTIONS["a"](x), lambda x: patch.dict(FUNCTIONS, a=torch.exp)),
    "functions that change places": (
        lambda x: FUNCTIONS["c"](x) + FUNCTIONS["d"](x * x), lambda x: patch.dict(FUNCTIONS, c=by_seven, d=doubled)
    ),
    "an imported value": (imports_a_value, lambda x: patch.object(constants, "RATE", 5.0)),
    "a value of an imported module": (imports_a_module, lambda x: patch.object(constants, "RATE", 5.0)),
    "what an imported function names": (imports_a_function, lambda x: patch.object(constants, "RATE", 5.0)),
    "an imported function": (imports_a_function, lambda x: patch.object(constants, "scaled", by_seven)),
    "a name as text": (lambda x: x * getattr(constants, "RATE"), lambda x: patch.object(constants, "RATE", 5.0)),  # noqa: B009
    "a name that is computed": (lambda x: x * getattr(constants, NAME), lambda x: patch.object(constants, "RATE", 5.0)),
    "a global by its name": (lambda x: x * globals()["RATE"], lambda x: here("RATE", 5.0)),
    "whether there is a global": (lambda x: x * 2 if "LATER" in globals() else x, lambda x: here("LATER", 5.0)),
    "an item of an object": (lambda x: x * CONFIG["a"], lambda x: patch.dict(CONFIG.table, a=5.0)),
    "an object that is called": (lambda x: CONFIG(x), lambda x: patch.object(CONFIG, "rate", 5.0)),
    "the length of an object": (lambda x: x * len(CONFIG), lambda x: patch.object(CONFIG, "items", [1.0])),
    "what an object gives": (lambda x: x * sum(r for r in CONFIG), lambda x: with_item(CONFIG.items, 0, 9.0)),
    "an object that is passed on": (lambda x: scaled_with(CONFIG, x), lambda x: patch.object(CONFIG, "rate", 5.0)),
    "an object by another name": (gives_it_a_name, lambda x: patch.object(CONFIG, "rate", 5.0)),
    "an attribute by its name": (lambda x: x * getattr(CONFIG, "rate"), lambda x: patch.object(CONFIG, "rate", 5.0)),  # noqa: B009
    "an attribute in a dict": (lambda x: x * vars(CONFIG)["rate"], lambda x: patch.object(CONFIG, "rate", 5.0)),
    "objects in a list": (lambda x: x * sum(c.rate for c in CONFIGS), lambda x: patch.object(CONFIGS[1], "rate", 5.0)),
    "an object that a function gives": (
        lambda x: x * config_of_all().rate, lambda x: patch.object(CONFIG, "rate", 5.0)
    ),
    "an object that a class gives": (lambda x: x * Single.get().rate, lambda x: patch.object(SINGLE, "rate", 5.0)),
    "a slot": (lambda x: x * SLOTS.rate, lambda x: with_attribute(SLOTS, "rate", 5.0)),
    "a slot that a method reads": (lambda x: SLOTS.scaled(x), lambda x: with_attribute(SLOTS, "rate", 5.0)),
    "a slot of data": (lambda x: x * SLOTTED.rate, lambda x: with_attribute(SLOTTED, "rate", 5.0)),
    "the class of an object": (lambda x: CONFIG.scaled(x), lambda x: with_attribute(CONFIG, "__class__", OtherConfig)),
    "how objects are called": (lambda x: CONFIG(x), lambda x: patch.object(Config, "__call__", lambda self, x: x * 9)),
    "a function with a gradient": (
        lambda x: Function.apply(x), lambda x: patch.object(Function, "forward", staticmethod(lambda ctx, x: x * 9))
    ),
    "a dict with attributes": (lambda x: x * NAMES.rate, lambda x: patch.dict(NAMES, rate=5.0)),
    "a named tuple": (lambda x: x * PAIR.a, lambda x: here("PAIR", Pair(5.0, 3.0))),
    "an order": (lambda x: x * [*ORDERED.values()][0], lambda x: here("ORDERED", OrderedDict(b=2.0, a=1.0))),  # noqa: RUF015
    "a slice": (lambda x: x[SLICE].sum(), lambda x: here("SLICE", slice(1, 3))),
    "a range": (lambda x: x * sum(COUNTS), lambda x: here("COUNTS", range(6))),
    "a fraction": (lambda x: x * float(PART), lambda x: here("PART", Fraction(3, 2))),
    "an item of bytes": (lambda x: x * BYTES[0], lambda x: here("BYTES", b"b")),
    "bytes that change": (lambda x: x * NUMBERS[0], lambda x: with_item(NUMBERS, 0, 9)),
}  # fmt: skip


@contextlib.contextmanager
def with_item(box, key, new):
    old = box[key]
    box[key] = new
    yield
    box[key] = old


@both
@pytest.mark.parametrize("name", AROUND)
def test_a_change_of_what_code_finds_is_noticed(name, shares):
    fn, changed = AROUND[name]
    check(fn, lambda: (X[:4],), changed, shares)


# ---- what is set around a call -----------------------------------------------------------------


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.linear else result


@contextlib.contextmanager
def set_by(function, new, old):
    function(new)
    yield
    function(old)


FLAGS = {
    "mkldnn": (
        lambda x: x * 2 if torch.backends.mkldnn.enabled else x,
        lambda x: torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled, allow_tf32=None),
    ),
    "benchmarks": (
        lambda x: x * 2 if torch.backends.cudnn.benchmark else x,
        lambda x: torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, benchmark=True),
    ),
    "precision": (
        lambda x: x * 2 if torch.get_float32_matmul_precision() == "high" else x,
        lambda x: set_by(torch.set_float32_matmul_precision, "high", "highest"),
    ),
    "deterministic algorithms": (
        lambda x: x * 2 if torch.are_deterministic_algorithms_enabled() else x,
        lambda x: set_by(torch.use_deterministic_algorithms, True, False),
    ),
    "a mode of functions": (lambda x: F.linear(x, x), lambda x: Doubling()),
    "the dtype of autocast": (
        lambda x: x * 2 if torch.get_autocast_dtype("cpu") is torch.bfloat16 else x,
        lambda x: set_by(functools.partial(torch.set_autocast_dtype, "cpu"), torch.float16, torch.bfloat16),
    ),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_those_of_the_call(name, shares):
    fn, changed = FLAGS[name]
    check(fn, lambda: (X,), changed, shares)


def test_a_partial_function_is_no_argument():
    """Its contents are no attributes, so it would be the same whatever it holds."""
    with pytest.raises(TypeError, match="argument f is a partial"):
        spmd.compile(lambda f, x: f(x), line())(functools.partial(torch.mul, other=2.0), X)


def test_unchanged_steps_are_not_captured_again():
    """Nor where a count has changed that a class of the user keeps, and that no code of the step reads."""
    with patch.object(spmd.expand.compile, "capture", side_effect=spmd.expand.compile.capture) as captures:
        step, args = spmd.compile(train, line()), begin()
        Net.seen = 0
        for _ in range(5):
            step(*args)
            Net.seen += 1
    del Net.seen
    assert captures.call_count == 1


def rate_of_begin(model, optimizer, x):
    """A step that reads what a scheduler adds."""
    group = optimizer.param_groups[0]
    return x * group.get("initial_lr", 0.0)


@pytest.mark.parametrize("fn", [train, rate_of_begin])
def test_what_a_scheduler_adds_to_groups_is_a_guard_where_a_step_reads_groups(fn):
    """No optimiser of torch reads it."""
    model = Net().double()
    args = model, optim.AdamW(model.parameters(), lr=0.1), X
    wanted = copy.deepcopy(args)
    step = spmd.compile(fn, line())
    for schedule in (False, True, True, False):
        for _, optimizer, _ in (args, wanted):
            optimizer.param_groups[0].pop("initial_lr", None)
            if schedule:
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        torch.testing.assert_close(value(step(*args)), fn(*wanted))
    assert len(step.programs) == (1 if fn is train else 2)
