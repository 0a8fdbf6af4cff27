"""Whatever is changed in a value, the audit finds it, and says where."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import io
import itertools
import queue
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard
from spmd.expand.told import Told
from tests.audit.described import described, difference, left_behind


class Slots:
    __slots__ = ("n",)

    def __init__(self, n=1):
        self.n = n


class Plain:
    def __init__(self, n=1):
        self.n = n


class Both(Plain):
    __slots__ = ("more",)


@dataclasses.dataclass(slots=True)
class Data:
    n: int = 1


class Key:
    pass


KEY = Key()


def namespace(**own):
    return lambda: types.SimpleNamespace(**own)


def a_function():
    def fn(x=[1], *, y={"k": 1}):  # noqa: B006 (that is what is to be found)
        return x, y

    fn.tag = [1]
    return fn


def a_closure():
    n = [1]
    return lambda: n


def counts():
    n = 0

    def count():
        nonlocal n
        n += 1

    return count


def a_generator():
    n = 1
    while True:
        yield n
        n += 1


def a_cached():
    @functools.lru_cache(None)
    def cached(x):
        return [x]

    cached(1)
    return cached


def a_class():
    class Holder:
        n = 1

    return Holder()


def an_enum():
    class Kinds(enum.Enum):
        ONE = 1

    Kinds.ONE.n = 1
    return Kinds.ONE


def a_local():
    x = threading.local()
    x.n = 1
    return x


def a_context():
    x = contextvars.ContextVar("x")
    x.set(1)
    return x


def a_module():
    x = types.ModuleType("a_module_of_a_user")
    x.n = 1
    return x


def a_queue():
    x = queue.Queue()
    x.put(1)
    return x


def a_partial():
    return functools.partial(a_function(), [1], k=[2])


def a_trained():
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def an_objects_array():
    return np.array([Slots(), None], object)


CHANGES = {
    "a number": (lambda: [1], lambda x: x.__setitem__(0, 2), "[0]"),
    "a number of another type": (lambda: [1], lambda x: x.__setitem__(0, 1.0), "[0]"),
    "a bool for a number": (lambda: [1], lambda x: x.__setitem__(0, True), "[0]"),
    "a deep number": (lambda: {"a": [(0, {"b": [1]})]}, lambda x: x["a"][0][1]["b"].append(2), "['a'][0][1]['b']"),
    "the order of a dict": (lambda: {1: 0, 2: 0}, lambda x: x.__setitem__(1, x.pop(1)), ""),
    "a key": (lambda: {1: 0}, lambda x: x.clear(), ""),
    "a set": (lambda: {1, 2}, lambda x: x.add(3), ""),
    "a long list": (lambda: [0] * 500, lambda x: x.__setitem__(400, 1), "[400]"),
    "an attribute": (Plain, lambda x: setattr(x, "n", 2), ".n"),
    "a new attribute": (Plain, lambda x: setattr(x, "k", 2), ""),
    "a slot": (Slots, lambda x: setattr(x, "n", 2), ".n"),
    "a slot that is deleted": (Slots, lambda x: delattr(x, "n"), ""),
    "a slot beside attributes": (Both, lambda x: setattr(x, "more", 2), ""),
    "a dataclass": (Data, lambda x: setattr(x, "n", 2), ".n"),
    "argparse": (lambda: argparse.Namespace(n=1), lambda x: setattr(x, "n", 2), ".n"),
    "a namespace": (namespace(n=1), lambda x: setattr(x, "n", 2), ".n"),
    "a thread's own": (a_local, lambda x: setattr(x, "n", 2), ".n"),
    "a function's attribute": (a_function, lambda x: x.tag.append(2), ".tag"),
    "a default": (a_function, lambda x: x()[0].append(2), ".__defaults__[0]"),
    "a default by name": (a_function, lambda x: x()[1].clear(), ".__kwdefaults__['y']"),
    "what a closure has": (a_closure, lambda x: x().append(2), "variable n"),
    "a variable of a closure": (counts, lambda x: x(), "variable n"),
    "a partial": (a_partial, lambda x: x.args[0].append(2), ".args[0]"),
    "a partial's attribute": (a_partial, lambda x: setattr(x, "n", 2), ""),
    "a bound method": (lambda: [1, 2].pop, lambda x: x(), ".__self__"),
    "a method": (lambda: Plain([1]).__init__, lambda x: x.__self__.n.append(2), ".__self__.n"),
    "a cache": (a_cached, lambda x: x(1).append(2), ""),
    "a class": (a_class, lambda x: setattr(type(x), "n", 2), ".n"),
    "another class": (Plain, lambda x: setattr(x, "__class__", Key), ""),
    "a member of an enum": (an_enum, lambda x: setattr(x, "n", 2), ".n"),
    "a module": (a_module, lambda x: setattr(x, "n", 2), ".n"),
    "a context variable": (a_context, lambda x: x.set(2), ".get()"),
    "an iterator of a list": (lambda: iter([1, 2]), next, ""),
    "an iterator of a dict": (lambda: iter({1: 1, 2: 2}), next, ""),
    "a reversed list": (lambda: reversed([1, 2]), next, ""),
    "a count": (lambda: itertools.count(), next, ""),
    "a cycle": (lambda: itertools.cycle([1, 2, 3]), next, ""),
    "a zip": (lambda: zip([1, 2], [1, 2], strict=False), next, ""),
    "an enumeration": (lambda: enumerate([1, 2]), next, ""),
    "a map": (lambda: map(str, [1, 2]), next, ""),
    "a generator": (a_generator, next, ""),
    "random numbers": (lambda: random.Random(0), lambda x: x.random(), ""),
    "random numbers of numpy": (lambda: np.random.default_rng(0), lambda x: x.random(), ""),
    "older random numbers of numpy": (lambda: np.random.RandomState(0), lambda x: x.rand(), ""),
    "random numbers of torch": (
        lambda: torch.Generator().manual_seed(0), lambda x: torch.rand(1, generator=x), ""
    ),
    "an array": (lambda: np.zeros(3), lambda x: x.__setitem__(1, 2), ""),
    "an array of objects": (an_objects_array, lambda x: setattr(x[0], "n", 2), "[0].n"),
    "a small array": (lambda: array.array("d", [1]), lambda x: x.__setitem__(0, 2), ""),
    "bytes": (lambda: bytearray(2), lambda x: x.__setitem__(0, 2), ""),
    "a view of bytes": (lambda: memoryview(bytearray(2)), lambda x: x.__setitem__(0, 2), ""),
    "ctypes": (lambda: ctypes.c_int(1), lambda x: setattr(x, "value", 2), ""),
    "an array of ctypes": (lambda: (ctypes.c_int * 2)(), lambda x: x.__setitem__(0, 2), ""),
    "a text": (lambda: io.StringIO("a"), lambda x: x.write("b"), ""),
    "a queue": (a_queue, lambda x: x.get(), ""),
    "an event": (threading.Event, lambda x: x.set(), "._flag"),
    "a lock": (threading.Lock, lambda x: x.acquire(), ""),
    "a deque": (lambda: collections.deque([1]), lambda x: x.append(2), ""),
    "a user's dict": (lambda: collections.UserDict(n=1), lambda x: x.update(n=2), ".data['n']"),
    "a chain of dicts": (lambda: collections.ChainMap({}), lambda x: x.update(n=2), ".maps[0]"),
    "a weak dict": (lambda: weakref.WeakKeyDictionary({KEY: 1}), lambda x: x.update({KEY: 2}), ".data['key 0']"),
    "a tensor": (lambda: [torch.ones(2)], lambda x: x[0].add_(1), "[0]"),
    "a tensor of another dtype": (lambda: [torch.ones(2)], lambda x: x.__setitem__(0, x[0].double()), "[0]"),
    "an attribute of a tensor": (lambda: torch.ones(2), lambda x: setattr(x, "tag", 1), ""),
    "requires_grad": (lambda: torch.ones(2), lambda x: x.requires_grad_(), ""),
    "a gradient": (lambda: torch.ones(2).requires_grad_(), lambda x: x.sum().backward(), ".grad"),
    "a parameter": (a_trained, lambda x: x[0].weight.data.add_(1), "[0].weight"),
    "a flag of a model": (a_trained, lambda x: x[0].eval(), "[0].training"),
    "a hook": (a_trained, lambda x: x[0].register_forward_hook(print), "[0]._forward_hooks"),
    "a buffer": (a_trained, lambda x: x[0].register_buffer("n", torch.ones(1)), "[0] attributes"),
    "a rate": (a_trained, lambda x: x[1].param_groups[0].update(lr=1), "[1].param_groups[0]['lr']"),
    "a state": (a_trained, lambda x: x[1].state[x[0].bias].update(n=1), "[1].state"),
}  # fmt: skip
"""What makes a value, what changes it, and the end of the path that is to be named."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_named(name):
    make, change, where = CHANGES[name]
    one, other, third = make(), make(), make()
    assert difference(described({"x": one}), described({"x": other})) == ""
    change(third)
    found = difference(described({"x": one}), described({"x": third}))
    assert found and where in found.partition(": ")[0], found


def test_two_names_of_one_object_are_told_from_two_objects():
    a, b = [1], [1]
    assert difference(described({"x": [a, a]}), described({"x": [a, b]})).startswith("x[1]: the object at x[0]")
    assert difference(described({"x": [a, b]}), described({"x": [b, b]})).startswith("x[1]: 'list of 1'")


STANDS_FOR = {
    "a told value": lambda: Told(1, "time.time()"),
    "a symbol": lambda: torch.SymInt.__new__(torch.SymInt),
}


@pytest.mark.parametrize(
    "holder", [lambda x: [x], Slots, Plain, lambda x: functools.partial(print, x), lambda x: {1: x}]
)
@pytest.mark.parametrize("name", STANDS_FOR)
def test_what_a_capture_leaves_is_found_wherever_it_is(name, holder):
    found = left_behind({"x": {"deep": holder(STANDS_FOR[name]())}})
    assert found.startswith("x['deep']") and "was left there" in found
    assert not left_behind({"x": {"deep": holder(1)}})


def test_a_dtensor_stands_for_its_tensor():
    x = torch.arange(8.0).reshape(4, 2)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        sharded = spmd.distribute_tensor(x, mesh, [Shard(0)])
        assert difference(described({"x": x}), described({"x": sharded})) == ""
        assert difference(described({"x": x + 1}), described({"x": sharded})).startswith("x: ")
