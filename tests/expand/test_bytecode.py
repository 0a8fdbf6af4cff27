"""What code names is found in all versions of Python, whatever instructions they have for it."""

from __future__ import annotations

import pytest
import torch

import spmd
from spmd.expand.bytecode import instructions
from spmd.expand.named_values import chains_in

LINE = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
X = torch.ones(2, 4)


def scaled(x, rate):
    return x * rate


class Base:
    rate = 1.0


class Scaler(Base):
    """Objects whose methods read an attribute: behind another variable, behind `super()`, inside a function."""

    def __init__(self):
        self.own = 1.0

    def as_second(self, x):
        return scaled(x, self.own)

    def after_a_write(self, x):
        y = x
        return scaled(self.own, y)

    def of_super(self, x):
        return x * super().rate

    def in_a_loop(self, x):
        return sum([x * self.own for _ in range(2)])

    def in_a_function(self, x):
        return (lambda: x * self.own)()


SETS = {
    "as_second": lambda scaler, monkeypatch: setattr(scaler, "own", 2.0),
    "after_a_write": lambda scaler, monkeypatch: setattr(scaler, "own", 2.0),
    "of_super": lambda scaler, monkeypatch: monkeypatch.setattr(Base, "rate", 2.0),
    "in_a_loop": lambda scaler, monkeypatch: setattr(scaler, "own", 2.0),
    "in_a_function": lambda scaler, monkeypatch: setattr(scaler, "own", 2.0),
}


@pytest.mark.parametrize("name", SETS)
def test_what_a_method_reads_is_a_guard(name, monkeypatch):
    scaler = Scaler()
    step = spmd.compile(getattr(scaler, name), LINE)
    with spmd.LocalTensorMode(1):
        first = step(X).to_local()
        SETS[name](scaler, monkeypatch)
        assert torch.equal(torch.as_tensor(step(X).to_local()), 2 * torch.as_tensor(first))


def _names(x, config):
    y = x
    z, y = y, config.rates[0]
    return scaled(y, config.rates["loss"]) + z


def test_each_instruction_is_of_one_variable():
    found = [(i.name, i.value) for i in instructions(_names.__code__) if i.name in ("LOAD_FAST", "STORE_FAST")]
    assert [value for name, value in found if name == "LOAD_FAST"] == ["x", "y", "config", "y", "config", "z"]
    assert sorted(value for name, value in found if name == "STORE_FAST") == ["y", "y", "z"]


def test_chains_follow_attributes_and_keys():
    config = ("local", "config"), ("attribute", "rates")
    assert {(*config, ("key", 0)), (*config, ("key", "loss")), (("global", "scaled"),)} <= {*chains_in(_names.__code__)}


def test_lines_are_numbers():
    first = _names.__code__.co_firstlineno
    assert {i.line for i in instructions(_names.__code__)} <= {*range(first, first + 4)}
