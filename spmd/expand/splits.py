"""How many rows a rank sends to each of very many ranks, written in short in its graph.

>>> Splits.of([4] * 256 + [0] * 1792)
[4] * 256 + [0] * 1792

As code it is the list; as an argument of a node it is one value, which no pass walks through.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmd.comm.added import FEW_RANKS
from spmd.tensor.redistribute.runs import Sizes


@dataclass(frozen=True, repr=False)
class Splits(Sequence[int]):
    """A list of sizes as its runs of equal ones: each the size, and how often it stands there."""

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Splits:
        """These sizes in short."""
        return cls(tuple([(size, len(list(group))) for size, group in itertools.groupby(sizes)]))

    def __len__(self) -> int:
        return sum([count for _, count in self.runs])

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(size, count) for size, count in self.runs)

    def __getitem__(self, i: Any) -> Any:
        return list(self)[i]

    def __repr__(self):
        return " + ".join([f"[{size}] * {count}" for size, count in self.runs]) or "[]"

    def __fx_create_arg__(self, tracer: Any) -> Splits:
        return self


def in_short(arg: Any) -> Any:
    """A long list of sizes as `Splits`; anything else as it is.

    >>> in_short([2, 2]), in_short([1] * 64), in_short("sum")
    ([2, 2], [1] * 64, 'sum')
    """
    if isinstance(arg, Sizes):
        return Splits(arg.runs) if len(arg) > FEW_RANKS else list(arg)
    is_long = isinstance(arg, list) and len(arg) > FEW_RANKS and isinstance(arg[0], int)
    return Splits.of(arg) if is_long else arg
