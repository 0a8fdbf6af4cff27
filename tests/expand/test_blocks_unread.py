"""Layers that differ in a plain attribute, such as their number, are stamped where no code reads it."""

import copy
import operator

import pytest

from spmd.expand.stamp.unread import Reads
from tests.expand.test_blocks import Block, Stack, captures, evaluate, train, trained


class Numbered(Block):
    """A layer that may know its number, as in transformers. read: how it reads it."""

    read = staticmethod(lambda self: 0)

    def __init__(self):
        super().__init__()
        self.number = 0

    def forward(self, x):
        return super().forward(x) * (1.0 + self.read(self))


def numbered(model, number=lambda i: i):
    for i, block in enumerate(model.blocks):
        block.number = number(i)
    return model


READ = {
    "an attribute": lambda self: self.number,
    "a computed name": lambda self: getattr(self, "num" + "ber"),
    "by torch's way": lambda self: object.__getattribute__(self, "number"),
    "a function of C": operator.attrgetter("number"),
    "vars": lambda self: vars(self)["number"],
    "get": lambda self: self.__dict__.get("number", 0),
    "a copy of the dict": lambda self: dict(vars(self))["number"],
    "as keywords": lambda self: (lambda **own: own["number"])(**vars(self)),
    "all of it": lambda self: next(v for k, v in self.__dict__.items() if k == "number"),
    "a copy": lambda self: copy.copy(self).number,
    "written": lambda self: setattr(self, "number", self.number) or 0,
}


@pytest.mark.parametrize("name", READ)
def test_reads_are_noted(name):
    """However it is read; and what was there is there again, with what was written."""
    block = Numbered()
    own, before = vars(block), dict(vars(block))
    with Reads(block, {"number"}) as reads:
        READ[name](block)
        block.other = 1
        del block.training
    assert reads.names == {"number"}
    before.pop("training")
    assert vars(block) is own and type(own) is dict and own == before | {"other": 1}
    assert "number" not in vars(Numbered)


def test_what_is_not_read_is_not_noted():
    """Nor what a class has under the name, for all its objects."""
    block = Numbered()
    with Reads(block, {"number"}) as reads:
        block(block.layer.weight)
        assert hasattr(block, "layer") and not reads.names
        assert not hasattr(block, "missing")
    with Reads(block, {"read"}) as reads:
        pass
    assert not reads.names
    block.read = 1
    with Reads(block, {"read"}) as reads:
        pass
    assert reads.names == {"read"}


class Read(Numbered):
    read = staticmethod(lambda self: self.number)


class Conditional(Numbered):
    """Reads its number if another attribute, which differs, too, says so."""

    last = False

    def forward(self, x):
        return super().forward(x) * (2.0 if self.kind == 1 and self.number > 0 else 1.0)


def test_layers_that_differ_in_what_nobody_reads_are_stamped():
    """A number that is read tells layers apart; those that have the same one are stamped."""
    assert captures(train, **trained(numbered(Stack(Numbered))))[1] == 2
    assert captures(evaluate, **trained(numbered(Stack(Read))))[1] == 0
    assert captures(evaluate, **trained(numbered(Stack(Read, layers=6), lambda i: i // 3)))[1] == 2
    model = numbered(Stack(Conditional, layers=6))
    for i, block in enumerate(model.blocks):
        block.kind = int(i > 2)
    assert captures(evaluate, **trained(model))[1] == 1


class Nested(Read):
    """A layer that is told apart by its number, with one inside that is not."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return self.inner(super().forward(x))


def test_equal_layers_inside_of_those_that_differ_are_stamped():
    """The first one is traced in one piece: only then is it known that its number is read."""
    assert captures(evaluate, **trained(numbered(Stack(Nested))))[1] == 1
