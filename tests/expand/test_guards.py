"""Every call checks the Python values that the trace has read. If one has changed, another program is made."""

import copy
import functools
import gc
import io
import itertools
import threading
import types
import weakref
from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import Shard
from spmd.expand.guards import guard_key
from spmd.sim import run_ranks

X = torch.linspace(-2.0, 3.0, 24).reshape(8, 3)


def line() -> spmd.DeviceMesh:
    return spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def alone(fn, *calls):
    """The result of each call on a mesh of one rank, with one compiled step for all calls."""
    step = spmd.compile(fn, line())
    return [value(step(*args)) for args in calls]


def value(x):
    return x.full_tensor() if isinstance(x, spmd.DTensor) else x


def check(fn, *calls):
    for got, args in zip(alone(fn, *copy.deepcopy(calls)), calls, strict=True):
        torch.testing.assert_close(got, fn(*args))


# ---- guard_key --------------------------------------------------------------------------------


@dataclass
class Config:
    rate: float
    sizes: list


def test_equal_values_have_equal_keys():
    """Numbers count with type and sign, objects by their contents, functions by identity."""
    alike = [float("nan"), [1, (2, "a")], {"a": {1, 2}}, Config(0.5, [1]), F.gelu, torch.float32, None]
    unlike = [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ([], {}), (Config(0.5, [1]), Config(0.5, [2]))]
    assert all(guard_key(x) == guard_key(copy.deepcopy(x)) for x in alike)
    assert all(guard_key(a) != guard_key(b) for a, b in [*unlike, (F.gelu, F.relu)])


def test_a_key_does_not_follow_later_changes():
    values = [1, [2]]
    before = guard_key(values)
    values[1].append(3)
    assert guard_key(values) != before


# ---- modules ----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.act, self.factors, self.config = torch.tanh, [1.0], Config(1.0, [])
        for k, v in attributes.items():
            setattr(self, k, v)

    def forward(self, x):
        return self.act(x * self.weight).sum() * self.factors[0] * self.config.rate


def run(module, x):
    return module(x)


@pytest.mark.parametrize(
    "attributes",
    [{"act": torch.sigmoid}, {"factors": [3.0]}, {"factors": (3.0,)}, {"config": Config(2.0, [])}],
    ids=["function", "list", "tuple", "object"],
)
def test_modules_that_differ_in_an_attribute_have_programs_of_their_own(attributes):
    check(run, (Scaled(), X), (Scaled(**attributes), X), (Scaled(), X))


@dataclass(slots=True)
class Slotted:
    rate: float


class PrivateSlot:
    __slots__ = ("__rate",)

    def __init__(self, rate):
        self.__rate = rate

    def set(self, rate):
        self.__rate = rate

    @property
    def rate(self):
        return self.__rate


class Named(str):
    rate = 1.0


class Rates(list):
    rate = 1.0


def _set_rate(held):
    held.rate = 3.0


class Rate:
    """Has its rate from a class, in a slot of functools, or of itself."""

    scale = 1.0

    def __init__(self):
        self.own = 1.0

    def get(self):
        return self.own

    @property
    def of_class(self):
        return Rate.scale


class OtherRate(Rate):
    scale = 1.0


def function():
    """A new function, with code that can be set."""
    made = types.FunctionType((lambda x, rate=1.0, *, other=1.0: x * rate * other).__code__, globals(), "f", (1.0,))
    made.__kwdefaults__ = {"other": 1.0}
    return made


def _set(owner, name, value):
    setattr(owner, name, value)


def deep(levels):
    held = types.SimpleNamespace(inside=1.0)
    for _ in range(levels):
        held = types.SimpleNamespace(inside=held)
    return held


def deepest(held):
    return held if isinstance(held.inside, float) else deepest(held.inside)


def cyclic():
    held = Rate()
    held.rate = 1.0
    held.itself = {"again": [held, weakref.ref(held)]}
    return held


LIVES = Rate()
"""Something that weak references may refer to."""

SHARED = {"rate": 1.0}

HELD = {
    "slots": (lambda: Slotted(1.0), lambda held: held.rate, _set_rate),
    "a private slot": (lambda: PrivateSlot(1.0), lambda held: held.rate, lambda held: held.set(3.0)),
    "slots in a list": (lambda: [Slotted(1.0)], lambda held: held[0].rate, lambda held: _set_rate(held[0])),
    "an attribute of text": (lambda: Named("a"), lambda held: held.rate, _set_rate),
    "an attribute of a list": (lambda: Rates([1.0]), lambda held: held.rate, _set_rate),
    "a deque": (lambda: deque([1.0, 2.0], maxlen=2), lambda held: held[0], lambda held: held.append(3.0)),
    "defaults": (function, lambda held: held(1.0), lambda held: _set(held, "__defaults__", (3.0,))),
    "a default by name": (function, lambda held: held(1.0), lambda held: held.__kwdefaults__.update(other=3.0)),
    "code": (
        function, lambda held: held(1.0),
        lambda held: _set(held, "__code__", (lambda x, rate=1.0, *, other=1.0: x * rate * other * 3).__code__),
    ),
    "an attribute of a function": (function, lambda held: getattr(held, "rate", 1.0), _set_rate),
    "an array": (lambda: np.ones(3), lambda held: float(held[1]), lambda held: held.__setitem__(1, 3.0)),
    "a large array": (lambda: np.ones(4096), lambda held: held.sum(), lambda held: held.__setitem__(1, 3.0)),
    "an array of objects": (
        lambda: np.array([[1.0], None], dtype=object), lambda held: held[0][0],
        lambda held: held[0].__setitem__(0, 3.0),
    ),
    "bytes": (lambda: bytearray(b"a"), lambda held: held[0], lambda held: held.__setitem__(0, 3)),
    "an array of Python": (lambda: array("d", [1.0]), lambda held: held[0], lambda held: held.__setitem__(0, 3.0)),
    "a view of a dict": (
        lambda: types.MappingProxyType(SHARED), lambda held: held["rate"], lambda held: SHARED.update(rate=3.0)
    ),
    "one of two views of dicts": (
        lambda: [types.MappingProxyType({"rate": 2.0}), types.MappingProxyType(SHARED)], lambda held: held[1]["rate"],
        lambda held: SHARED.update(rate=3.0),
    ),
    "one of two arrays of objects": (
        lambda: [np.array([None, 2.0]), np.array([[1.0], None], dtype=object)], lambda held: held[1][0][0],
        lambda held: held[1][0].__setitem__(0, 3.0),
    ),
    "a weak reference": (lambda: weakref.ref(LIVES), lambda held: held().own, lambda held: _set(LIVES, "own", 3.0)),
    "a dict of weak references": (
        lambda: weakref.WeakValueDictionary(a=LIVES), lambda held: held["a"].own,
        lambda held: _set(LIVES, "own", 3.0),
    ),
    "what a method reads": (lambda: Rate().get, lambda held: held(), lambda held: _set(held.__self__, "own", 3.0)),
    "what a method of Python reads": (
        lambda: {"rate": 1.0}.get, lambda held: held("rate"), lambda held: held.__self__.update(rate=3.0)
    ),
    "an object 12 deep": (
        lambda: deep(12), lambda held: deepest(held).inside, lambda held: _set(deepest(held), "inside", 3.0)
    ),
    "an object in itself": (cyclic, lambda held: held.itself["again"][0].rate, _set_rate),
    "an attribute of a class": (Rate, lambda held: held.scale, lambda held: _set(Rate, "scale", 3.0)),
    "a class": (lambda: Rate, lambda held: held.scale, lambda held: _set(Rate, "scale", 3.0)),
    "an attribute of a class of what is held": (
        lambda: types.SimpleNamespace(rate=OtherRate()), lambda held: held.rate.scale,
        lambda held: _set(OtherRate, "scale", 3.0),
    ),
    "an attribute of another class": (Rate, lambda held: held.of_class, lambda held: _set(Rate, "scale", 3.0)),
}  # fmt: skip


@pytest.fixture
def as_before():
    yield
    LIVES.own = Rate.scale = OtherRate.scale = 1.0
    SHARED.update(rate=1.0)


class Holder(nn.Module):
    def __init__(self, held, read):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.held, self.read = held, read

    def forward(self, x):
        return (x * self.weight).sum() * self.read(self.held)


@pytest.mark.parametrize("kind", HELD)
def test_what_an_object_holds_is_a_guard(kind, as_before):
    """Also where the calls before were made again at once."""
    make, read, change = HELD[kind]
    module, alone = Holder(make(), read), Holder(make(), read)
    step = spmd.compile(lambda module, x: module(x), line())
    before = [value(step(module, X)).detach() for _ in range(4)]
    change(module.held)
    change(alone.held)
    after = [value(step(module, X)).detach() for _ in range(2)]
    for got in after:
        torch.testing.assert_close(got, alone(X).detach())
    assert all(torch.equal(before[0], each) and not torch.equal(after[0], each) for each in before)


DRAWN_FROM = {
    "count": (itertools.count, next),
    "generator": (lambda: (float(i) for i in range(9)), next),
    "in an object": (lambda: types.SimpleNamespace(numbers=iter([1.0] * 9)), lambda held: next(held.numbers)),
    "file": (lambda: io.StringIO("1\n" * 9), lambda held: float(held.readline())),
}


@pytest.mark.parametrize("kind", DRAWN_FROM)
def test_an_iterator_that_a_module_holds_is_refused_where_code_names_it(kind):
    """The capture would take a value once."""
    make, read = DRAWN_FROM[kind]
    with pytest.raises(TypeError, match=r"the step uses \w+\.\w+, a .*pass it as an argument"):
        spmd.compile(lambda module, x: module(x), line())(Holder(make(), read), X)
    unread = Holder(2.0, float)
    expected = unread(X)
    unread.numbers_not_named = make()
    torch.testing.assert_close(value(spmd.compile(lambda m, x: m(x), line())(unread, X)), expected)


def test_variables_of_one_name_in_two_files_are_two_guards():
    """So are the defaults of two functions of one name."""
    first, second = ({"RATE": 1.0, "__name__": __name__} for _ in range(2))
    source = (lambda x: x * RATE).__code__  # noqa: F821
    both = [types.FunctionType(source, variables, "scaled") for variables in (first, second)]
    twice = [function(), function()]

    def step(x):
        for f in (*both, *twice):
            x = f(x)
        return x

    ours = spmd.compile(step, line())
    assert torch.equal(value(ours(X)), X)
    second["RATE"] = 3.0
    torch.testing.assert_close(value(ours(X)), X * 3)
    twice[1].__defaults__ = (5.0,)
    torch.testing.assert_close(value(ours(X)), X * 15)


def test_a_weak_reference_keeps_nothing_alive():
    held = Rate()
    module = Holder(weakref.ref(held), lambda held: held().own)
    step = spmd.compile(lambda module, x: module(x), line())
    for _ in range(3):
        step(module, X)
    del held
    gc.collect()
    assert module.held() is None


def test_layers_of_other_types_have_programs_of_their_own():
    layers = [nn.Sequential(nn.Linear(3, 3), act) for act in (nn.Tanh(), nn.Sigmoid())]
    layers[1][0].load_state_dict(layers[0][0].state_dict())
    check(run, *((m, X) for m in layers))


def trained(module, optimizer, x):
    """The weight behind a step."""
    module(x).square().mean().backward()
    optimizer.step()
    return module.weight


def test_optimisers_of_other_types_have_programs_of_their_own():
    """Where their options that are no floats are alike, and neither has state yet."""
    made = [
        functools.partial(torch.optim.Adamax, maximize=True), functools.partial(torch.optim.ASGD, maximize=True),
        functools.partial(torch.optim.Adadelta, maximize=True),
    ]  # fmt: skip
    layers = [nn.Linear(3, 3) for _ in made]
    check(trained, *((m, of(m.parameters(), lr=0.1), X) for m, of in zip(layers, made, strict=True)))


def test_what_is_changed_between_calls_is_honoured():
    """A list edited, a config set, a hook added, a flag flipped."""
    module, ours = Scaled(), Scaled()
    step = spmd.compile(run, line())
    changes = [
        lambda m: None,
        lambda m: m.factors.__setitem__(0, 5.0),
        lambda m: setattr(m.config, "rate", 0.25),
        lambda m: m.register_forward_hook(lambda mod, args, out: out * 7),
        lambda m: m.weight.requires_grad_(False),
    ]
    for change in changes:
        change(module)
        change(ours)
        torch.testing.assert_close(value(step(module, X)), ours(X))


class Counts(Scaled):
    def forward(self, x):
        self.factors.append(1.0)
        return super().forward(x)


class Caches(Scaled):
    def forward(self, x):
        self.cached = [self.weight, x.cos()]
        return super().forward(x)


def test_what_the_step_itself_leaves_in_a_list_is_there_behind_each_call():
    module, single = Counts(), Counts()
    step = spmd.compile(run, line())
    for _ in range(3):
        torch.testing.assert_close(value(step(module, X)), run(single, X))
        assert module.factors == single.factors


def test_a_parameter_that_the_step_leaves_in_a_list_is_refused():
    """It is one of the trace. The module is unchanged."""
    module = Caches()
    before = set(vars(module))
    with pytest.raises(RuntimeError, match=r"keeps a tensor in module\.cached,"):
        spmd.compile(run, line())(module, X)
    assert set(vars(module)) == before
    assert isinstance(module.weight, nn.Parameter) and not isinstance(module.weight, spmd.DTensor)


# ---- arguments and surroundings ---------------------------------------------------------------


def test_the_shape_of_the_arguments_counts():
    """An empty list differs from an empty dict, a list from a tuple, and a dotted key from a path."""

    def kinds(x, arg):
        return x * (2 if isinstance(arg, list) else 3)

    check(kinds, (X, []), (X, {}), (X, [1.0]), (X, (1.0,)))
    check(lambda x, d: x * d["b.c"] + d["b"]["c"], (X, {"b.c": 2.0, "b": {"c": 0.5}}))


def test_a_float_that_does_not_act_as_a_symbol_is_taken_as_it_is():
    """Rounding, formatting, branching: each value has a program of its own if it needs one."""

    def step(x, a):
        return x * (a // 0.1) + len(f"{a:.2f}") + (a**2 if a > 0 else -a)

    check(step, (X, 0.5), (X, 0.25), (X, -0.5), (X, 0.0), (X, 0.5))


def test_a_float_that_only_scales_needs_one_program():
    step = spmd.compile(lambda x, a: x * a + a / 3, line())
    for a in (0.5, 0.25, -1.0, 0.0):
        torch.testing.assert_close(value(step(X, a)), X * a + a / 3)
    assert len(step.programs) == 1


def test_autocast_and_gradient_mode_are_those_of_the_call():
    module = nn.Linear(3, 2)
    step = spmd.compile(run, line())
    dtypes = []
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            dtypes.append(step(module, X).dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]

    def train(module, x):
        loss = module(x).sum()
        if torch.is_grad_enabled():
            loss.backward()
        return loss

    step = spmd.compile(train, line())
    with torch.no_grad():
        step(module, X)
    assert module.weight.grad is None
    step(module, X)
    assert module.weight.grad is not None


def test_setting_data_is_a_write():
    """`p.data = q` trains; a change of shape is refused."""

    def by_data(module, x):
        loss = (module(x) ** 2).mean()
        loss.backward()
        for p in module.parameters():
            p.data = p.data - 0.1 * p.grad
            p.grad = None
        return loss

    module = nn.Linear(3, 2)
    ours = copy.deepcopy(module)
    step = spmd.compile(by_data, line())
    for _ in range(3):
        torch.testing.assert_close(value(step(module, X)), by_data(ours, X))

    def seen_through_others(x):
        y, z = x * 1, x * 2
        view = y[:2].t()
        view.data, y.data = view * 3, z  # neither shows in the other
        z.add_(1)
        return view, y, z

    for got, want in zip(spmd.compile(seen_through_others, line())(X), seen_through_others(X), strict=True):
        torch.testing.assert_close(value(got), want)

    def reshapes(module, x):
        module.weight.data = module.weight.data[:1]
        return x.sum()

    with pytest.raises(RuntimeError, match=r"x\.data = y changes a"):
        spmd.compile(reshapes, line())(nn.Linear(3, 2), X)


def test_a_result_must_be_plain():
    with pytest.raises(TypeError, match="returns a lock; it may return tensors"):
        spmd.compile(lambda x: (x.sum(), threading.Lock()), line())(X)


SCALE, rates = 1.0, {"loss": 1.0}


class Settings:
    power = 2


settings = Settings()


class Powered(nn.Module):
    power = 1

    def forward(self, x):
        return x**self.power * SCALE


def named(module, x):
    def inner(y):
        return y * SCALE

    return inner(module(x)) * rates["loss"] + x**settings.power


@pytest.mark.parametrize("change", [
    lambda: monkey("SCALE", 3.0), lambda: rates.update(loss=0.5), lambda: setattr(Settings, "power", 1),
    lambda: setattr(settings, "power", 3), lambda: setattr(Powered, "power", 2),
])  # fmt: skip
def test_values_around_a_step_are_those_of_the_call(change):
    """Globals, items of them, attributes of objects and of classes that the code names; others play no role."""
    module = Powered()
    for _ in range(3):
        torch.testing.assert_close(value(values_step()(module, X)), named(module, X))
        settings.other = globals()["unnamed"] = object()
    programs = len(values_step().programs)
    change()
    torch.testing.assert_close(value(values_step()(module, X)), named(module, X))
    assert len(values_step().programs) == programs + 1


def monkey(name, new):
    globals()[name] = new


@functools.cache
def values_step():
    return spmd.compile(named, line())


# ---- ranks that part --------------------------------------------------------------------------


def errors_of(*calls_of):
    """For each call of two ranks with one compiled step, each rank's error or None. calls_of: rank -> arguments."""

    def scale(x, a):
        return (x * a).sum()

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step = spmd.compile(scale, mesh, inputs={"x": {"dp": Shard(0)}})
        raised = []
        for args in calls_of:
            try:
                step(*args(r))
                raised.append(None)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
        return raised

    return run_ranks(rank, 2)


def same(r):
    return X, 0.5


def test_ranks_called_with_other_shapes_part_with_an_error():
    """Also if one rank has a program for its shape and the other has none, or if each has one."""

    def other(r):
        return X[: 8 - 2 * r], 0.5

    def swapped(r):
        return X[: 6 + 2 * r], 0.5

    for raised in errors_of(same, other, same, swapped, same):
        assert [bool(e) for e in raised] == [False, True, False, True, False]
        assert "the call of scale differs between rank 0 and rank 1" in raised[1]


def test_ranks_with_other_numbers_part_with_an_error():
    """With different learning rates the replicas would silently diverge."""
    for raised in errors_of(same, lambda r: (X, 0.5 + r), same):
        assert raised[0] is None and raised[2] is None
        assert "-a: 0.5" in raised[1] and "+a: 1.5" in raised[1]


def test_a_rank_that_fails_before_the_step_fails_all():
    first, second = errors_of(same, lambda r: (X, 0.5) if r == 0 else (X, object()), same)
    assert first[1].startswith("RuntimeError: the call of scale: rank 1 failed: TypeError")
    assert second[1].startswith("TypeError: argument a is a object") and first[2] is second[2] is None


# ---- what the code finds in containers ---------------------------------------------------------

WEIGHTS, CONFIG, TABLE, ARRAY = [1.0, 2.0], {"a": {"b": 2.0}}, [{"w": 2.0}], np.array([2.0, 1.0])
KEY, KEY_OF_RECORD = "b", "v"
RECORD = types.SimpleNamespace(v=2.0, d={"q": 2.0})


def _scaled(x, record):
    return x * record.v


IN_CONTAINERS = {
    "a loop": lambda x: sum((x * w for w in WEIGHTS), x * 0), "a spread list": lambda x: x * max(*WEIGHTS),
    "a computed key": lambda x: x * CONFIG["a"][KEY], "a function of a list": lambda x: x * max(WEIGHTS),
    "a list of dicts": lambda x: sum((x * each["w"] for each in TABLE), x * 0),
    "items": lambda x: sum((x * v for _, v in CONFIG["a"].items()), x * 0), "an array": lambda x: x * float(ARRAY[0]),
    "a record that is passed on": lambda x: _scaled(x, RECORD), "a name": lambda x: x * getattr(RECORD, KEY_OF_RECORD),
    "values in a record": lambda x: x * sum(RECORD.d.values()), "a default": lambda x, given=WEIGHTS: x * given[0],
}  # fmt: skip


def _set_all(value: float) -> None:
    WEIGHTS[0] = CONFIG["a"]["b"] = TABLE[0]["w"] = ARRAY[0] = RECORD.v = RECORD.d["q"] = value


@pytest.mark.parametrize("name", IN_CONTAINERS)
def test_what_is_found_in_containers_is_a_guard(name):
    """Another value makes another program, also where the calls before were made again at once."""
    mesh, x, step = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), torch.ones(2), IN_CONTAINERS[name]
    compiled = spmd.compile(step, mesh)
    for value in (2.0, 7.0):
        _set_all(value)
        for _ in range(3):
            torch.testing.assert_close(compiled(x).full_tensor(), step(x))
    assert len(compiled.programs) == 2


def test_long_lists_count_as_short_ones_do():
    many = [2.0] * 200
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    compiled = spmd.compile(lambda x: x * many[0] if len(many) > 1 else x, mesh)
    compiled(torch.ones(2))
    many.append(3.0)
    compiled(torch.ones(2))
    assert len(compiled.programs) == 2


ITERATORS = {
    "count": lambda: itertools.count(1),
    "list": lambda: iter([1.0, 2.0]),
    "generator": lambda: (x for x in (1.0, 2.0)),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_iterators_are_refused(kind):
    """The capture would take one value of it, and the program would have that for ever."""
    iterator = ITERATORS[kind]()
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    with pytest.raises(TypeError, match=r"the step uses iterator, a .*, of which the capture would take a value once"):
        spmd.compile(lambda x: x * next(iterator), mesh).program_for(torch.ones(2))
    assert next(iterator) == 1


def test_nothing_and_an_empty_dict_of_a_module_are_two_values():
    """And a module that lacks an attribute has not None."""
    def fn(model, x):
        kept = getattr(model, "kept", 5)
        return x * (2 if kept is None else kept if kept == 5 else 3 + len(kept))

    model, step = nn.Identity(), spmd.compile(fn, line())
    for kept in (None, {}, None, {}, {"a": 1}, {}, "none", None, "none", {}):
        vars(model).pop("kept", None)
        if kept != "none":
            model.kept = kept
        torch.testing.assert_close(value(step(model, X)), fn(model, X))


GONE = None


def deletes_a_global(x):
    global GONE
    del GONE
    return x * 2


def deleting(value):
    def fn(x):
        nonlocal value
        del value
        return x * 2

    return fn, lambda: fn.__closure__[0].cell_contents


@pytest.mark.parametrize("was", [1, 0.5, "a", None, [1]])
def test_a_step_that_deletes_a_variable_is_right_or_refused(was, monkeypatch):
    """Of a number that a step sets a program has the next one. What is no number is gone behind the call."""
    monkeypatch.setitem(globals(), "GONE", was)
    fn, now = deleting(was)
    for step, kept in ((deletes_a_global, lambda: GONE), (fn, now)):
        compiled = spmd.compile(step, line())
        if type(was) in (int, float):
            with pytest.raises(RuntimeError, match=r"the step sets (GONE|value)"):
                compiled(X)
            assert kept() is was
            continue
        compiled(X)
        with pytest.raises((NameError, ValueError)):
            kept()
