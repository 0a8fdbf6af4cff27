"""A loop as the target of a node: a body that runs several times, one round after the other.

    grads, loss = loop(weights, grads_before, (batch_1, batch_2, batch_3))

    invariants   what each round reads: the weights
    carried      what a round reads of the round before, and the first round from outside: the sums of gradients
    items        what each round reads another one of: a micro-batch

The results are the carried values as the last round leaves them, other values of the last round, and values of every
round. In a captured graph the body is a graph, in a program it is a `Program`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
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

    def output_of(self, result: int) -> int:
        """The output of the body that a result is, of one round or another.

        >>> loop = Loop(None, times=2, invariants=0, carried=1, items=0, last=1, every=2)
        >>> [loop.output_of(i) for i in range(6)]
        [0, 1, 2, 2, 3, 3]
        """
        once = self.carried + self.last
        return result if result < once else once + (result - once) // self.times

    def results(self, outputs: Sequence[T]) -> tuple[T, ...]:
        """What the results are, given what the outputs of the body are.

        >>> Loop(None, times=2, invariants=0, carried=1, items=0, last=1, every=2).results("cxyz")
        ('c', 'x', 'y', 'y', 'z', 'z')
        """
        once = self.carried + self.last
        return (*outputs[:once], *[each for each in outputs[once:] for _ in range(self.times)])

    def run(self, body: Callable[[list[Any]], Sequence[Any]], operands: Sequence[Any]) -> tuple:
        """The results, where a function gives the outputs of the body for its inputs.

        >>> loop = Loop(None, times=3, invariants=1, carried=1, items=1, every=1)
        >>> loop.run(lambda inputs: [inputs[1] + inputs[0] * inputs[2], inputs[2]], [10, 0, 1, 2, 3])
        (60, 1, 2, 3)
        """
        rounds = self.rounds(operands)
        inputs = next(rounds)
        try:
            while True:
                inputs = rounds.send(body(inputs))
        except StopIteration as end:
            return end.value

    def rounds(self, operands: Sequence[Any]) -> Generator[list[Any], Sequence[Any], tuple]:
        """Gives the inputs of each round, is sent its outputs, and returns the results of all."""
        operands, first, behind = list(operands), self.invariants, self.invariants + self.carried
        invariants, carried = operands[:first], operands[first:behind]
        every: list[list[Any]] = [[] for _ in range(self.every)]
        for number in range(self.times):
            inputs = [*invariants, *carried, *self.of_round(operands, number)]
            carried, operands[first:behind] = [], [None] * self.carried  # the body's caller alone holds them now
            outputs = yield inputs
            del inputs
            carried, last = list(outputs[: self.carried]), outputs[self.carried :][: self.last]
            for values, value in zip(every, outputs[self.carried + self.last :], strict=True):
                values.append(value)
            if number + 1 < self.times:
                last = ()
            del outputs
        return (*carried, *last, *[value for values in every for value in values])
