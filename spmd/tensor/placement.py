"""Placements: what one axis of a mesh does to a tensor.

    Shard(0)          the ranks along the axis hold consecutive blocks of dim 0
    Replicate()       every rank along the axis holds the same tensor
    Partial("sum")    the tensor is the sum of the terms that the ranks along the axis hold

Users give one placement for each axis; `spmd.tensor.spec` has the canonical form.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmd.comm.chunk import Unit, joined_unit

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

    `blocks` is for dims that are several equal tensors, one after the other, such as the weight of a fused q, k and v:
    `Shard(0, blocks=3)` splits each of the three by itself. So every rank has its part of q, of k and of v, and to take
    these apart sends nothing. The dim must divide by `blocks`; `unit` then counts inside a block.

    >>> Shard(0), Shard(-1, unit=8), Shard(0, blocks=3)
    (Shard(0), Shard(-1, unit=8), Shard(0, blocks=3))
    """

    dim: int
    unit: int = 1
    blocks: int = 1

    def __post_init__(self):
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise TypeError(f"Shard: dim is {self.dim!r}; it must be an int, such as Shard(0)")
        for name in ("unit", "blocks"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"Shard: {name} is {count!r}; it must be a positive int")

    @property
    def units(self) -> Unit:
        """What stays together: the unit, and the blocks if there are several."""
        return joined_unit(self.blocks, self.unit)

    def at(self, dim: int) -> Shard:
        """The same shard of another dim."""
        return Shard(dim, self.unit, self.blocks)

    def __repr__(self):
        more = [f", {name}={n}" for name, n in (("unit", self.unit), ("blocks", self.blocks)) if n > 1]
        return f"Shard({self.dim}{''.join(more)})"


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


@dataclass(frozen=True)
class PerRank:
    """Of an argument of a compiled step: each rank gives the block that it has, in place of the global tensor.

    So a loader gives it that reads other rows on each rank, as one with torch's `DistributedSampler` does. The blocks
    side by side, in the order of the ranks, are the tensor that the step computes with; its size is the sum of theirs,
    which may be uneven. `PerRank(Shard(0))` alone is over all axes of the mesh. By axis, `{"dp": PerRank(Shard(0))}`,
    ranks that differ on other axes alone give equal blocks.

    >>> from spmd import LocalTensor, LocalTensorMode, PerRank, Shard, compile, init_device_mesh
    >>> import torch
    >>> rows = LocalTensor({0: torch.tensor([1.0, 2.0, 3.0]), 1: torch.tensor([6.0])})  # of two simulated ranks
    >>> with LocalTensorMode(2):
    ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ...     mean = compile(lambda x: x.mean(), mesh, inputs={"x": PerRank(Shard(0))})
    ...     print(mean(rows).item(), mean.program.inputs[0][1])
    3.0 f32[4@dp]
    """

    placement: Shard

    def __post_init__(self):
        if not isinstance(self.placement, Shard) or self.placement.blocks > 1:
            given = f"not {self.placement!r}"
            raise TypeError(f"PerRank: takes the dim along which the ranks' blocks lie, such as Shard(0), {given}")

    def __repr__(self):
        return f"PerRank({self.placement!r})"
