"""Each write to a dict is told by its number (`spmd._torch.versions`), however Python makes it."""

import gc
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from spmd._torch import Unwritten, dict_behind


class Thing:
    kind = "a"

    def __init__(self):
        self.x, self.y = "x", "y"


class Wrapper(torch.Tensor):
    pass


def set_attribute(x, new):
    x.x = new  # Python writes this line anew when it has run a few times


def merge(x, new):
    vars(x).__ior__({"x": new})


def add(x, new):
    setattr(x, new, new)


def replace(x, new):
    vars(x).pop("x", None)
    vars(x).setdefault("x", new)


def clear(x, new):
    vars(x).clear()
    vars(x)["x"] = new


WRITES = {
    "an attribute": set_attribute,
    "an attribute by name": lambda x, new: setattr(x, "x", new),
    "an item": lambda x, new: vars(x).__setitem__("x", new),
    "an update": lambda x, new: vars(x).update(x=new),
    "merged": merge,
    "added": add,
    "taken out": replace,
    "cleared": clear,
    "the last": lambda x, new: (vars(x).update(x=new), vars(x).popitem()),
}
OBJECTS = {
    "an object": lambda: Thing(),
    "a module": lambda: nn.Linear(1, 1),
    "a tensor": lambda: torch.ones(2).as_subclass(Wrapper),
}


@pytest.mark.parametrize("of", OBJECTS)
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_attributes_are_told(name, of):
    """Also the hundredth of one line. Nothing else is told: no read, nor what the collector does."""
    x = OBJECTS[of]()
    unwritten = Unwritten([vars(x)])
    assert unwritten.are_so() and unwritten.written() == []
    for i in range(100):
        WRITES[name](x, f"new {i}")
        assert not unwritten.are_so() and unwritten.written() == [vars(x)]
        unwritten = Unwritten([vars(x)])
    vars(x).get("x"), getattr(x, "x", None), list(vars(x).values()), gc.collect(0)
    assert unwritten.are_so()


@pytest.mark.parametrize("kind", [Thing, nn.Linear, torch.Tensor], ids=lambda kind: kind.__name__)
def test_writes_to_classes_are_told(kind):
    unwritten = Unwritten([dict_behind(vars(kind))])
    for i in range(50):
        kind.new_attribute = f"new {i}"
        assert not unwritten.are_so()
        unwritten = Unwritten([dict_behind(vars(kind))])
    del kind.new_attribute
    assert not unwritten.are_so()


def test_what_has_no_number_that_tells_all():
    """The order of an OrderedDict changes without a write, and a dict of another class may give what it likes."""
    boxes = OrderedDict(a=1), type("Own", (dict,), {})(), [1], None
    assert [dict_behind(box) for box in boxes] == [None] * len(boxes)
    assert all(dict_behind(box) is box for box in (vars(Thing()), {}, defaultdict(list)))
