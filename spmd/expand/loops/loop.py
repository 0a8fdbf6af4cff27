"""A loop as the target of a node: a body that runs several times, one round after the other.

    grads, loss = loop(weights, grads_before, (batch_1, batch_2, batch_3))

    invariants   what each round reads: the weights
    carried      what a round reads of the round before, and the first round from outside: the sums of gradients
    items        what each round reads another one of: a micro-batch

The results are the carried values as the last round leaves them, other values of the last round, and values of every
round. In a captured graph the body is a graph, in a program it is a `Program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Loop:
    """The operands of a node with this target are the invariants, the first carried values, and for each item its value
    in each round, one behind the other. The inputs of the body are the invariants, the carried values and the items;
    its outputs are the carried values, those that are read of the last round, and those that are read of every round.

    invariants, carried, items, last, every: how many there are.
    """

    body: Any
    times: int
    invariants: int
    carried: int
    items: int
    last: int = 0
    every: int = 0

    @property
    def __name__(self) -> str:
        return f"loop_{self.times}_times"

    @property
    def counts(self) -> tuple[int, ...]:
        """How often it runs, and with how many values, in the order of its fields."""
        return self.times, self.invariants, self.carried, self.items, self.last, self.every

    @property
    def outputs(self) -> int:
        """How many outputs the body has."""
        return self.carried + self.last + self.every

    @property
    def operands(self) -> int:
        """How many operands the node has."""
        return self.invariants + self.carried + self.items * self.times

    def first(self, operands: Sequence[T]) -> list[T]:
        """Of the operands those that the first round reads.

        >>> Loop(None, times=3, invariants=1, carried=1, items=2).first("wgabcxyz")
        ['w', 'g', 'a', 'x']
        """
        return [*operands[: self.invariants + self.carried], *self.of_round(operands, 0)]

    def for_all(self, inputs: Sequence[T]) -> list[T]:
        """For each operand, what its input of the body has.

        >>> Loop(None, times=3, invariants=1, carried=1, items=2).for_all("wgax")
        ['w', 'g', 'a', 'a', 'a', 'x', 'x', 'x']
        """
        once = self.invariants + self.carried
        return [*inputs[:once], *[each for each in inputs[once:] for _ in range(self.times)]]

    def of_round(self, operands: Sequence[T], number: int) -> list[T]:
        """Of the operands the items of a round.

        >>> Loop(None, times=3, invariants=1, carried=1, items=2).of_round("wgabcxyz", 1)
        ['b', 'y']
        """
        return list(operands[self.invariants + self.carried + number :: self.times]) if self.items else []

    def results(self, outputs: Sequence[T]) -> tuple[T, ...]:
        """What the results are, given what the outputs of the body are.

        >>> Loop(None, times=2, invariants=0, carried=1, items=0, last=1, every=2).results("cxyz")
        ('c', 'x', 'y', 'y', 'z', 'z')
        """
        once = self.carried + self.last
        return (*outputs[:once], *[each for each in outputs[once:] for _ in range(self.times)])
