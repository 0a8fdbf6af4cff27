"""The text of what is computed has the value that it is computed to have, with the errors that Python raises."""

from __future__ import annotations

import math
import random

import pytest

from spmd._torch import Conditions
from spmd._torch.computed import FUNCTIONS, Computed, checked, compiled, text_of, value_of

NUMBERS = [0.5, -0.0, 0.0, 3.0, -2.25, math.inf, -math.inf, math.nan, 1e16, 1e-300, 7.0]
BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "min", "max", "math.hypot", "math.copysign"]
UNARY = ["neg", "pos", "abs", "float", "float32", "math.exp", "math.sqrt", "math.log", "math.atan"]
COMPARED = ["eq", "ne", "lt", "le", "gt", "ge"]


def made(rng: random.Random, depth: int, names: list):
    if depth == 0:
        return rng.choice([*names, *NUMBERS, 2, -1])
    op = rng.choice(BINARY if rng.random() < 0.6 else UNARY)
    return Computed(op, *(made(rng, depth - 1, names) for _ in range(1 if op in UNARY else 2)))


def outcome(run):
    try:
        return repr(run())
    except (ArithmeticError, ValueError) as error:
        return type(error).__name__
    except TypeError:
        return "complex"  # of a power, which nothing compares


class Name:
    """What stands for a number."""

    def __init__(self, name):
        self.name, self.free_symbols = name, frozenset({name})

    def __repr__(self):
        return self.name


@pytest.mark.parametrize("seed", range(80))
def test_a_text_has_the_value(seed):
    rng = random.Random(seed)
    names = [Name("a"), Name("b")]
    left, right = (made(rng, rng.randint(0, 3), names) for _ in range(2))
    condition = Computed(rng.choice(COMPARED), left, right)
    text = text_of(condition, str)
    holds = compiled([text], ["a", "b"])
    for a in NUMBERS:
        for b in rng.sample(NUMBERS, 3):
            at = {"a": a, "b": b}
            want = outcome(lambda at=at: value_of(condition, lambda x: at[x.name]))
            assert outcome(lambda at=at: holds(**at)) == want, (text, at)


def test_one_number_is_one_object():
    a = Name("a")
    assert Computed("add", a, 1.0) is Computed("add", a, 1.0)
    assert Computed("add", a, 0.0) is not Computed("add", a, -0.0)
    assert Computed("add", a, 1) is not Computed("add", a, 1.0)


def test_a_text_that_doubles_is_an_error():
    x = Name("a")
    for _ in range(40):
        x = Computed("mul", x, x)
    with pytest.raises(OverflowError, match="functions"):
        text_of(x, str)
    assert value_of(x, lambda _: 1.0) == 1.0


@pytest.mark.parametrize("text", ["open('x')", "n0.__class__", "(lambda: n0)()", "[n0]", "n1 > 0", "__import__('os')"])
def test_a_text_of_a_file_computes_and_does_nothing_else(text):
    with pytest.raises(ValueError, match="no arithmetic"):
        checked(text, ["n0"])
    with pytest.raises(ValueError, match="no arithmetic"):
        Conditions({"n0": "lr"}, (text,))


def test_all_functions_have_a_name_in_texts():
    a = Name("a")
    for op in FUNCTIONS:
        checked(text_of(Computed(op, a, a, a), str) if op == "ite" else text_of(Computed(op, a, a), str), ["a"])
