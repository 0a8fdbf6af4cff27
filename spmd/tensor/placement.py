"""Placements: what one axis of a mesh does to a tensor.

    Shard(0)          the ranks along the axis hold consecutive blocks of dim 0
    Replicate()       every rank along the axis holds the same tensor
    Partial("sum")    the tensor is the sum of the terms that the ranks along the axis hold

Users give one placement for each axis; `spmd.tensor.spec` has the canonical form.
"""

from __future__ import annotations

from dataclasses import dataclass

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """What one axis does to a tensor: the base of `Shard`, `Replicate` and `Partial`."""

    def is_shard(self, dim: int | None = None) -> bool:
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True)
class Shard(Placement):
    """Split a tensor dim into consecutive blocks, of the sizes that `torch.chunk` gives.

    `unit` is the number of consecutive indices that stay together: blocks begin at multiples of it.
    With 6 heads of 8 on four ranks, `Shard(0, unit=8)` gives 2, 2, 2 and 0 complete heads; `Shard(0)`
    would cut through heads.

    >>> Shard(0), Shard(-1, unit=8)
    (Shard(0), Shard(-1, unit=8))
    """

    dim: int
    unit: int = 1

    def __post_init__(self):
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise TypeError(f"Shard: dim is {self.dim!r}; it must be an int, such as Shard(0)")
        if not isinstance(self.unit, int) or self.unit < 1:
            raise ValueError(f"Shard: unit is {self.unit!r}; it must be a positive int")

    def __repr__(self):
        return f"Shard({self.dim})" if self.unit == 1 else f"Shard({self.dim}, unit={self.unit})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank along the axis holds the same tensor."""

    def __repr__(self):
        return "Replicate()"


@dataclass(frozen=True)
class Partial(Placement):
    """The tensor is the reduction of the terms that the ranks along the axis hold; no rank has the result yet.

    >>> Partial(), Partial("max")
    (Partial(), Partial('max'))
    """

    reduce_op: str = "sum"

    def __post_init__(self):
        if self.reduce_op not in REDUCE_OPS:
            raise ValueError(f"Partial: reduce_op is {self.reduce_op!r}; it must be one of {', '.join(REDUCE_OPS)}")

    def __repr__(self):
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


REPLICATE = Replicate()
