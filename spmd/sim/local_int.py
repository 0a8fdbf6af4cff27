"""Values that differ between ranks played in one process.

    >>> n = local_int({0: 2, 1: 3})
    >>> n + 1, n * 0
    (LocalInt({0: 3, 1: 4}), 0)
    >>> pick(n, 1)
    3

An int that differs between ranks is a torch.SymInt with a `LocalIntNode`, so torch accepts it as a size or an index;
each rank computes with its own value. Where all ranks have the same value, it is a plain number again. Python cannot
take a branch for some ranks only. So code that asks for *the* value, as `if n == 2` does, gets an error that names the
values. Other values that differ between ranks are kept in a `PerRank`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from spmd import _torch

Number = int | float | bool


class BranchOnRank(RuntimeError):
    """Python asked for one value, but the ranks have different values."""


class PerRank:
    """One value for each rank, of any type; `value[rank]` is that of a rank. Equal if it is equal on all ranks."""

    __slots__ = ("by_rank",)

    def __init__(self, by_rank: Mapping[int, Any]) -> None:
        self.by_rank = dict(by_rank)

    def __getitem__(self, rank: int) -> Any:
        return self.by_rank[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerRank) and self.by_rank == other.by_rank

    def __hash__(self) -> int:
        return hash(tuple(self.by_rank.items()))

    def __bool__(self) -> bool:
        raise _branch_error(self.by_rank)

    __iter__ = __bool__

    def __repr__(self) -> str:
        return f"PerRank({self.by_rank})"


class LocalIntNode:
    """The node of a torch.SymInt, and of a SymFloat or SymBool, whose value differs between ranks.

    torch calls these methods by their names; torch's own SymNode shows which methods there are.
    """

    def __init__(self, by_rank: Mapping[int, Number], in_general: bool | None = None) -> None:
        """in_general: for a comparison, the answer for most pairs of numbers (`==` False, `!=` True); else None."""
        self.by_rank, self.in_general = dict(by_rank), in_general
        first = next(iter(self.by_rank.values()))
        self.pytype = bool if isinstance(first, bool) else float if isinstance(first, float) else int

    # Properties

    def is_int(self) -> bool:
        return self.pytype is int

    def is_float(self) -> bool:
        return self.pytype is float

    def is_bool(self) -> bool:
        return self.pytype is bool

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return self.common_value() is not None

    def has_hint(self) -> bool:
        return False

    def clone(self) -> LocalIntNode:
        return self

    def common_value(self) -> Number | None:
        """The value if all ranks have the same one; None otherwise."""
        values = iter(self.by_rank.values())
        first = next(values)
        same = all(value == first or (value != value and first != first) for value in values)
        return first if same else None

    def maybe_as_int(self) -> int | None:
        return self.common_value() if self.is_int() else None

    def maybe_as_bool(self) -> bool | None:
        return self.common_value() if self.is_bool() else None

    def maybe_as_float(self) -> float | None:
        return self.common_value() if self.is_float() else None

    # Methods that ask for one value

    def single_value(self, *where: object) -> Any:
        value = self.common_value()
        if value is None:
            raise _branch_error(self.by_rank)
        return value

    guard_int = guard_float = int_ = bool_ = expect_true = expect_size = single_value

    def guard_bool(self, *where: object) -> bool:
        """For torch's own code, which asks whether a size is 1 or 0 to take a shortcut; the general path is right too.

        Python code, which may ask anything, calls `bool_`.
        """
        return self.single_value(*where) if self.in_general is None or self.is_constant() else self.in_general

    guard_size_oblivious = guard_bool

    def guard_or_false(self, *where: object) -> bool:
        """For torch's shortcuts, which may be skipped."""
        return bool(self.common_value())

    def guard_or_true(self, *where: object) -> bool:
        value = self.common_value()
        return True if value is None else bool(value)

    statically_known_true = guard_or_false

    # Arithmetic

    def wrap_int(self, value: int) -> LocalIntNode:
        return LocalIntNode(dict.fromkeys(self.by_rank, int(value)))

    def wrap_float(self, value: float) -> LocalIntNode:
        return LocalIntNode(dict.fromkeys(self.by_rank, float(value)))

    def wrap_bool(self, value: bool) -> LocalIntNode:
        return LocalIntNode(dict.fromkeys(self.by_rank, bool(value)))

    def apply(self, name: str, *others: Any) -> LocalIntNode:
        """Apply an operation to the values of each rank."""
        fn = ARITHMETIC[name]
        by_rank = {r: fn(v, *(_value_on(other, r) for other in others)) for r, v in self.by_rank.items()}
        return LocalIntNode(by_rank, {"eq": False, "ne": True}.get(name))

    def sym_sum(self, others: Any) -> LocalIntNode:
        return LocalIntNode({r: sum(_value_on(other, r) for other in others) for r in self.by_rank})

    def sym_ite(self, then: Any, otherwise: Any) -> LocalIntNode:
        return LocalIntNode({r: _value_on(then if v else otherwise, r) for r, v in self.by_rank.items()})

    def __str__(self) -> str:
        return f"LocalInt({self.by_rank})" if self.is_int() else f"LocalNumber({self.by_rank})"

    __repr__ = _graph_repr = str = __str__


ARITHMETIC: dict[str, Callable[..., Number]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod, "neg": operator.neg,
    "pos": operator.pos, "abs": abs, "floordiv": operator.floordiv, "int_floordiv": operator.floordiv,
    "truediv": operator.truediv, "int_truediv": operator.truediv, "float_truediv": operator.truediv,
    "pow": operator.pow, "pow_by_natural": operator.pow, "float_pow": operator.pow, "lshift": operator.lshift,
    "rshift": operator.rshift, "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "and_": operator.and_, "or_": operator.or_, "sym_and": operator.and_, "sym_or": operator.or_,
    "sym_not": operator.not_, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "sym_min": min, "sym_max": max, "sym_float": float, "sym_int": int,
    "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "round": round, "sym_sqrt": math.sqrt,
    "is_integer": lambda x: float(x).is_integer(),
}  # fmt: skip

for _name in ARITHMETIC:
    setattr(LocalIntNode, _name, functools.partialmethod(LocalIntNode.apply, _name))


def local_int(by_rank: Mapping[int, Number]) -> Any:
    """The number that has these values on these ranks; a plain number where they agree."""
    node = LocalIntNode(by_rank)
    value = node.common_value()
    return _torch.symbolic_number(node) if value is None else value


def values_of(value: Any) -> dict[int, Any] | None:
    """The value of each rank, if the value differs between ranks; otherwise None."""
    if isinstance(value, PerRank) or getattr(type(value), "differs_by_rank", False):
        return value.by_rank
    if _torch.is_symbol(value) and isinstance(value.node, LocalIntNode):
        return value.node.by_rank
    return None


def pick(value: Any, rank: int) -> Any:
    """The value on one rank."""
    by_rank = values_of(value)
    return value if by_rank is None else by_rank[rank]


def _value_on(other: Any, rank: int) -> Any:
    if isinstance(other, LocalIntNode):
        return other.by_rank[rank]
    return other


def _branch_error(by_rank: Mapping[int, Any]) -> BranchOnRank:
    shown = ", ".join(f"{value} on rank {rank}" for rank, value in list(by_rank.items())[:8])
    more = f" and {len(by_rank) - 8} more" if len(by_rank) > 8 else ""
    return BranchOnRank(
        f"the ranks diverge here: the value is {shown}{more}. One process plays them all and cannot take a branch for "
        "some of them. Put what differs into a function decorated with @spmd.sim.per_rank, which runs once a rank and "
        "may not communicate, or play some ranks only: with LocalTensorMode({0}): ..."
    )
