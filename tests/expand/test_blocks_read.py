"""What the code of equal modules reads besides what it is given: a change is seen, and so is what cannot be seen."""

import collections
import contextvars
import functools
import gc
import itertools
import math
import os
import random
import threading
import time
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd.expand.stamp.reach import Reach
from spmd.expand.stamp.watch import Watch
from tests.expand.test_blocks import Block, Stack, Writes, captures, trained


class Context:
    layer = 0


class Slots:
    __slots__ = ("layer",)


class Counting:
    def __getattr__(self, name):
        return Context.layer


def with_default(numbers=[0]):  # noqa: B006 - what is tested
    return numbers[0]


def counted():
    return counted.layer


counted.layer = 0


def closure():
    layer = 0

    def get():
        return layer

    def set_to(i):
        nonlocal layer
        layer = i

    return get, set_to


SPACE = types.SimpleNamespace(layer=0, inner=types.SimpleNamespace(layer=0))
BOX, DEQUE, SLOTS, NUMBER = {"layer": 0}, collections.deque([0]), Slots(), 0
SLOTS.layer = 0
GET, SET = closure()
PART, WEAK = functools.partial(BOX.get, "layer"), weakref.ref(Context)
DYNAMIC, TENSOR = Counting(), torch.tensor(0.0)
READERS = [lambda: 0]


def set_number(i):
    global NUMBER
    NUMBER = i


def set_attribute(owner):
    return lambda i: setattr(owner, "layer", i)


def set_item(box, key):
    return lambda i: box.__setitem__(key, i)


SEEN = {
    "a class": (lambda: Context.layer, set_attribute(Context)),
    "an object": (lambda: SPACE.layer, set_attribute(SPACE)),
    "an object inside": (lambda: SPACE.inner.layer, set_attribute(SPACE.inner)),
    "a computed name": (lambda: getattr(SPACE, "lay" + "er"), set_attribute(SPACE)),
    "its dict": (lambda: SPACE.__dict__["lay" + "er"], set_attribute(SPACE)),
    "a dict": (lambda: BOX["layer"], set_item(BOX, "layer")),
    "a deque": (lambda: DEQUE[0], set_item(DEQUE, 0)),
    "a global": (lambda: NUMBER, set_number),
    "a slot": (lambda: SLOTS.layer, set_attribute(SLOTS)),
    "a variable around": (lambda: GET(), SET),
    "a default": (with_default, set_item(with_default.__defaults__[0], 0)),
    "an attribute of a function": (counted, set_attribute(counted)),
    "a partial": (lambda: PART(), set_item(BOX, "layer")),
    "a weak reference": (lambda: WEAK().layer, set_attribute(Context)),
    "__getattr__": (lambda: DYNAMIC.any, set_attribute(Context)),
    "a tensor": (lambda: TENSOR.item(), TENSOR.fill_),
    "a function of a list": (lambda: READERS[0](), lambda i: READERS.__setitem__(0, lambda: i)),
}


def reach(code, watch):
    return Reach.of(watch.codes, [], functions=[code], whole=watch.names_computed)


@pytest.mark.parametrize("name", SEEN)
def test_a_change_is_seen(name):
    """The key of what code reaches is the same until what it reads is changed; and that can be put back."""
    code, change = SEEN[name]
    with Watch() as watch:
        before = code()
    found = reach(code, watch)
    assert not watch.unseen and not found.unseen and found.finds(watch.codes)
    assert found.key == reach(code, watch).key
    change(3)
    assert code() != before and found.key != reach(code, watch).key
    change(0) if name == "a tensor" else found.held.put_back()
    assert code() == before


VARIABLE, NUMBERS, CYCLE, CACHED = contextvars.ContextVar("layer"), random.Random(0), itertools.cycle([1]), []
VARIABLE.set(0)


@functools.lru_cache
def cached():
    return len(CACHED)


@pytest.mark.parametrize(
    "code",
    [
        lambda: next(CYCLE), lambda: NUMBERS.random(), lambda: random.random(), lambda: VARIABLE.get(),
        lambda: cached(), lambda: time.monotonic(), lambda: os.getcwd(), lambda: globals()["NUMBER"],
        lambda: id(BOX), lambda: torch.initial_seed(), lambda: hash(SLOTS), lambda: eval("NUMBER"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_known(code):
    """Iterators, caches, generators, clocks: nothing is said of a call that asks them."""
    with Watch() as watch:
        code()
    assert watch.unseen or watch.asks_identity or reach(code, watch).unseen


def test_variables_of_the_context_are_put_back():
    """Also those that had only their default, and locks that are held."""
    unset, lock = contextvars.ContextVar("unset", default=1), threading.Lock()
    found = Reach.of([], [], functions=[VARIABLE, unset, lock])
    assert not found.unseen and found.key == Reach.of([], [], functions=[VARIABLE, unset, lock]).key
    for change in (lambda: VARIABLE.set(3), lambda: unset.set(2), lock.acquire):
        before = Reach.of([], [], functions=[VARIABLE, unset, lock]).key
        change()
        assert before != Reach.of([], [], functions=[VARIABLE, unset, lock]).key
    found.held.put_back()
    assert (VARIABLE.get(), unset.get()) == (0, 1)
    assert Reach.of([], [], functions=[contextvars.ContextVar("never set")]).unseen


def test_plain_code_is_seen():
    """What computes by its arguments."""

    def code(x=2.0):
        return [math.sqrt(v) for v in (x, max(x, 1.0))], F.relu(torch.ones(2) * x).shape, isinstance(x, float)

    with Watch() as watch:
        code()
    assert not watch.unseen and not reach(code, watch).unseen


# ---- in a capture -----------------------------------------------------------------------------


class OfEnvironment(Block):
    def forward(self, x):
        return super().forward(x) * (2.0 if os.environ.get("LAYER") else 1.0)


def third_has_a_variable(model, x):
    """The environment is part of what code reads."""
    x = model.emb(x)
    for i, block in enumerate(model.blocks):
        os.environ["LAYER"] = "1" if i == 2 else ""
        x = block(x)
    del os.environ["LAYER"]
    return x.sum()


class Layered(Block):
    def forward(self, x):
        return super().forward(x) * (1.0 + Context.layer)


def third_is_another(model, x):
    """Two calls show nothing of the third one."""
    x = model.emb(x)
    for i, block in enumerate(model.blocks):
        Context.layer = int(i == 2)
        x = block(x)
    Context.layer = 0
    return x.sum()


def third_is_patched(model, x):
    """The class of a module inside gets another method."""
    x, plain = model.emb(x), nn.Linear.forward
    for i, block in enumerate(model.blocks):
        nn.Linear.forward = plain if i != 2 else lambda self, x: F.linear(x, self.weight)
        x = block(x)
    nn.Linear.forward = plain
    return x.sum()


SCALES, KEPT = [2.0, 3.0], []


def takes_a_scale(model, x):
    """What is found out in the middle of a step is traced again: from what was there."""
    scale = SCALES.pop()
    loss = model(x).sum() * scale
    SCALES.append(scale)
    return loss


class KeepsStandIn(Block):
    def forward(self, x):
        if not KEPT:
            KEPT.append(self.layer.weight)
        return super().forward(x)


def decays_kept(model, x):
    loss = model(x).sum() + KEPT.pop().square().sum()
    loss.backward()
    return loss


class AsksForLeaves(Block):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.is_leaf else 1.0)


READ = {
    "a context": (Layered, third_is_another, 1),
    "the environment": (OfEnvironment, third_has_a_variable, 1),
    "a method": (Block, third_is_patched, 1),
    "traced again": (Writes, takes_a_scale, 0),
    "a parameter that is kept": (KeepsStandIn, decays_kept, 0),
    "autograd": (AsksForLeaves, lambda model, x: model(x).sum(), 0),
}


@pytest.mark.parametrize("name", READ)
def test_calls_that_read_something_else_are_traced(name):
    """The capture equals the one without stamps."""
    kind, step, stamped = READ[name]
    given = trained(Stack(kind))
    assert captures(step, model=given["model"], x=given["x"])[1] == stamped


class Finalized:
    """Is garbage that only the collector finds, and runs code then."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.time()


def test_finalizers_are_no_code_of_a_call():
    """The collector, which may come at any allocation, waits: what it would run says nothing about a call."""
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(1)
        with Watch() as watch:
            Finalized()
            made = [[] for _ in range(100)]
    finally:
        gc.set_threshold(*thresholds)
    assert made and not watch.unseen and "__del__" not in {code.code.co_name for code in watch.codes}
    assert gc.isenabled()
