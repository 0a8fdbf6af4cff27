"""What a capture took for granted about sizes, and whether it holds for others.

    conditions    asked by the step, or by the shape functions of its ops (docs/design/sizes.md)
    static        tensors whose sizes are no symbols: other sizes are another capture
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from spmd import _torch
from spmd.expand.sizes.size import evaluated

Shapes = Mapping[str, tuple[int, ...]]
"""The global shapes of the tensors among the arguments, by path."""

Numbers = Mapping[str, float]
"""The numbers that a call is given, by path."""

_NAME = re.compile(r"[A-Za-z_]\w*")


class Source(NamedTuple):
    """Where a call has the value of a symbol: the size of a dim of the argument at a path, or the argument itself, an
    int, where dim is None. name: of the symbol."""

    name: str
    path: str
    dim: int | None

    def __str__(self):
        return self.path if self.dim is None else f"{self.path}.shape[{self.dim}]"


@dataclass(frozen=True)
class Failed:
    """A condition that does not hold, with the line where it was asked. why_static: why sizes are no symbols."""

    condition: str
    asked_at: str = ""
    why_static: str = ""

    def __str__(self):
        at = " ".join(self.asked_at.split())
        why = f", because sizes are no symbols in it ({self.why_static})" if self.why_static else ""
        return f"it holds where {self.condition}{why}{at and f', {at}'}"


@dataclass(frozen=True)
class Assumed:
    """What a capture took for granted.

    sources: its symbols. decisions: what was asked about them. static: the shapes of tensors whose sizes are no
    symbols. why_static: the error of a trace with symbols, where that is the reason. arguments: the names of
    the ints that stay inputs of the program, for no shape depends on them.
    """

    sources: tuple[Source, ...] = ()
    decisions: tuple[_torch.Decision, ...] = ()
    static: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    why_static: str = ""
    arguments: frozenset[str] = frozenset()

    def values(self, shapes: Shapes, numbers: Numbers) -> dict[str, int]:
        """The values of the symbols for arguments of these shapes, and these ints."""
        return {name: numbers[path] if dim is None else shapes[path][dim] for name, path, dim in self.sources}

    def sized(self, numbers: Numbers) -> dict[str, int]:
        """The ints, by path, that shapes depend on, with their values."""
        return {path: numbers[path] for name, path, dim in self.sources if dim is None and name not in self.arguments}

    def hold_for(self, sizes: Mapping[str, float], numbers: Numbers) -> bool:
        """Whether the conditions on ints that stay inputs hold for these numbers, at these sizes."""
        if not self._of_arguments:
            return True
        given = {name: numbers[path] for name, path, dim in self.sources if dim is None}
        return _first_wrong(self._of_arguments, {**sizes, **given}) is None

    @property
    def ask_arguments(self) -> bool:
        """Whether there are conditions on ints that stay inputs."""
        return bool(self._of_arguments)

    @cached_property
    def _of_arguments(self) -> tuple[_torch.Decision, ...]:
        return tuple(d for d in self._of_step if self.arguments & set(_NAME.findall(d.condition)))

    def conditions_at(self, sizes: Mapping[str, float]) -> tuple[dict[str, str], tuple[str, ...]]:
        """The same conditions as text at these sizes: the path of each int by its name in them, and the texts."""
        paths = {name: path for name, path, dim in self.sources if name in self.arguments}
        said = {name: f"i{k}" for k, name in enumerate(paths)}
        said |= {name: repr(n) for name, n in sizes.items() if name not in paths}
        texts = tuple(_renamed(d.condition, said) for d in self._of_arguments)
        return {said[name]: path for name, path in paths.items()} if texts else {}, texts

    def answers(self, values: Mapping[str, float]) -> list[bool]:
        """Of each decision whether it would be taken again for these values."""
        return [bool(_answer(decision.condition, values)) for decision in self.decisions]

    def failed(self, shapes: Shapes, numbers: Numbers, ops_agree: Callable[[], bool]) -> Failed | None:
        """The first condition that does not hold for these sizes; None where the capture is right for them.

        ops_agree: whether the ops give the shapes that the capture says at these sizes. It is asked where an op might
        decide otherwise about shapes.
        """
        for path, shape in self.static.items():
            if shapes[path] != shape:
                return Failed(f"{path}.shape == {list(shape)}", why_static=self.why_static)
        values = self.values(shapes, numbers)
        if (decision := _first_wrong(self._of_step, values)) is not None:
            return Failed(self._shown(decision.condition), decision.asked_at)
        if (decision := _first_wrong(self._of_ops, values)) is not None and not ops_agree():
            return Failed(self._shown(decision.condition), decision.asked_at)
        return None

    @cached_property
    def _of_step(self) -> tuple[_torch.Decision, ...]:
        return tuple(decision for decision in self.decisions if not decision.of_op)

    @cached_property
    def _of_ops(self) -> tuple[_torch.Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.of_op)

    def _shown(self, condition: str) -> str:
        """The condition in the words of the user: `tokens.shape[0]` and not `tokens0`."""
        return _renamed(condition, {source.name: str(source) for source in self.sources})


def _renamed(condition: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda found: names.get(found[0], found[0]), condition)


def _first_wrong(decisions: tuple[_torch.Decision, ...], values: Mapping[str, float]) -> _torch.Decision | None:
    """The first decision whose condition does not hold, or has no answer."""
    if not decisions:
        return None
    try:
        answers = evaluated(tuple(decision.condition for decision in decisions), values)
    except (ArithmeticError, ValueError):  # of one of them
        answers = [_answer(decision.condition, values) for decision in decisions]
    return next((decision for decision, holds in zip(decisions, answers, strict=True) if not holds), None)


def _answer(condition: str, values: Mapping[str, float]) -> Any:
    try:
        return evaluated((condition,), values)[0]
    except (ArithmeticError, ValueError):
        return False
