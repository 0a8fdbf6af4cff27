"""Values that differ between ranks played in one process.

    >>> n = local_int({0: 2, 1: 3})
    >>> n + 1, n * 0
    (LocalInt({0: 3, 1: 4}), 0)
    >>> pick(n, 1)
    3

An int that differs is a torch.SymInt, so torch takes it for a size or an index; each rank computes with its own.
Where all ranks agree it is a plain number again. Python cannot take a branch for some ranks only, so asking for *the*
value, as `if n == 2` does, is an error that names the values. Other things that differ travel in a `PerRank`.
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
    """Python asked for one value where ranks have several."""


class PerRank:
    """One value for each rank, of any kind; `value[rank]` is that rank's."""

    __slots__ = ("of",)

    def __init__(self, of: Mapping[int, Any]) -> None:
        self.of = dict(of)

    def __getitem__(self, rank: int) -> Any:
        return self.of[rank]

    def __bool__(self) -> bool:
        raise _branched(self.of)

    def __repr__(self) -> str:
        return f"PerRank({self.of})"


class LocalNumberNode:
    """The node of a torch.SymInt, SymFloat or SymBool whose value differs between ranks: `LocalIntNode` for all three.

    torch calls these methods by their names; which ones there are is told by its own SymNode.
    """

    def __init__(self, of: Mapping[int, Number], usually: bool | None = None) -> None:
        """usually: for a comparison what it says of numbers in general, where there is such a thing."""
        self.of, self.usually = dict(of), usually
        first = next(iter(self.of.values()))
        self.pytype = bool if isinstance(first, bool) else float if isinstance(first, float) else int

    # What it is

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
        return self.agreed() is not None

    def has_hint(self) -> bool:
        return False

    def clone(self) -> LocalNumberNode:
        return self

    def agreed(self) -> Number | None:
        """The value, if all ranks have the same."""
        values = iter(self.of.values())
        first = next(values)
        same = all(value == first or (value != value and first != first) for value in values)
        return first if same else None

    def maybe_as_int(self) -> int | None:
        return self.agreed() if self.is_int() else None

    def maybe_as_bool(self) -> bool | None:
        return self.agreed() if self.is_bool() else None

    def maybe_as_float(self) -> float | None:
        return self.agreed() if self.is_float() else None

    # The one value that Python asks for

    def the_value(self, *where: object) -> Any:
        value = self.agreed()
        if value is None:
            raise _branched(self.of)
        return value

    guard_int = guard_float = int_ = bool_ = expect_true = expect_size = the_value

    def guard_bool(self, *where: object) -> bool:
        """For torch's own code, which asks whether a size is 1 or 0 to take a short cut: the general way is right too.

        Python code, which may ask anything, comes by `bool_`.
        """
        return self.the_value(*where) if self.usually is None or self.is_constant() else self.usually

    guard_size_oblivious = guard_bool

    def guard_or_false(self, *where: object) -> bool:
        """For torch's short cuts, which may be left out."""
        return bool(self.agreed())

    def guard_or_true(self, *where: object) -> bool:
        value = self.agreed()
        return True if value is None else bool(value)

    statically_known_true = guard_or_false

    # Arithmetic

    def wrap_int(self, value: int) -> LocalNumberNode:
        return LocalNumberNode(dict.fromkeys(self.of, int(value)))

    def wrap_float(self, value: float) -> LocalNumberNode:
        return LocalNumberNode(dict.fromkeys(self.of, float(value)))

    def wrap_bool(self, value: bool) -> LocalNumberNode:
        return LocalNumberNode(dict.fromkeys(self.of, bool(value)))

    def each(self, name: str, *others: Any) -> LocalNumberNode:
        """An operation on every rank's values."""
        fn = ARITHMETIC[name]
        of = {r: fn(v, *(_on(other, r) for other in others)) for r, v in self.of.items()}
        return LocalNumberNode(of, {"eq": False, "ne": True}.get(name))

    def sym_sum(self, others: Any) -> LocalNumberNode:
        return LocalNumberNode({r: sum(_on(other, r) for other in others) for r in self.of})

    def sym_ite(self, then: Any, otherwise: Any) -> LocalNumberNode:
        return LocalNumberNode({r: _on(then if v else otherwise, r) for r, v in self.of.items()})

    def __str__(self) -> str:
        return f"LocalInt({self.of})" if self.is_int() else f"LocalNumber({self.of})"

    __repr__ = _graph_repr = str = __str__


LocalIntNode = LocalNumberNode

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
    setattr(LocalNumberNode, _name, functools.partialmethod(LocalNumberNode.each, _name))


def local_int(of: Mapping[int, Number]) -> Any:
    """The number that has these values on these ranks: a plain one where they agree."""
    node = LocalNumberNode(of)
    value = node.agreed()
    return _torch.symbolic_number(node) if value is None else value


def values_of(value: Any) -> dict[int, Any] | None:
    """The values of something that differs between ranks; None for what does not."""
    if isinstance(value, PerRank) or getattr(type(value), "differs_by_rank", False):
        return value.of
    if _torch.is_symbol(value) and isinstance(value.node, LocalNumberNode):
        return value.node.of
    return None


def pick(value: Any, rank: int) -> Any:
    """What a value is on one rank."""
    of = values_of(value)
    return value if of is None else of[rank]


def _on(other: Any, rank: int) -> Any:
    if isinstance(other, LocalNumberNode):
        return other.of[rank]
    return other


def _branched(of: Mapping[int, Any]) -> BranchOnRank:
    shown = ", ".join(f"{value} on rank {rank}" for rank, value in list(of.items())[:8])
    more = f" and {len(of) - 8} more" if len(of) > 8 else ""
    return BranchOnRank(
        f"ranks part here: the value is {shown}{more}. One process plays them all and cannot take a branch for some of "
        "them. Put what differs into a function decorated with @spmd.sim.per_rank, which runs once a rank and may not "
        "communicate, or play some ranks only: with LocalTensorMode({0}): ..."
    )
