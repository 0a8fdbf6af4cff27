"""What a capture took for granted about sizes, and whether it holds for others.

    conditions    asked by the step, or by the shape functions of its ops (docs/design/sizes.md)
    static        tensors whose sizes are no symbols: other sizes are another capture
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from spmd import _torch
from spmd.expand.sizes.size import evaluated

Shapes = Mapping[str, tuple[int, ...]]
"""The global shapes of the tensors among the arguments, by path."""


class Source(NamedTuple):
    """Where a call has the value of a symbol: the size of a dim of the argument at a path. name: of the symbol."""

    name: str
    path: str
    dim: int

    def __str__(self):
        return f"{self.path}.shape[{self.dim}]"


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
    symbols. why_static: the error of a trace with symbols, where that is the reason. is_mixed: whether something was
    decided by sizes together with other numbers, which none of the conditions says.
    """

    sources: tuple[Source, ...] = ()
    decisions: tuple[_torch.Decision, ...] = ()
    static: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    why_static: str = ""
    is_mixed: bool = False

    def values(self, shapes: Shapes) -> dict[str, int]:
        """The values of the symbols for arguments of these shapes."""
        return {source.name: shapes[source.path][source.dim] for source in self.sources}

    def failed(self, shapes: Shapes, ops_agree: Callable[[], bool]) -> Failed | None:
        """The first condition that does not hold for these sizes; None where the capture is right for them.

        ops_agree: whether the ops give the shapes that the capture says at these sizes. It is asked where an op might
        decide otherwise about shapes.
        """
        for path, shape in self.static.items():
            if shapes[path] != shape:
                return Failed(f"{path}.shape == {list(shape)}", why_static=self.why_static)
        values = self.values(shapes)
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
        for source in sorted(self.sources, key=lambda source: -len(source.name)):
            condition = condition.replace(source.name, str(source))
        return condition


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
