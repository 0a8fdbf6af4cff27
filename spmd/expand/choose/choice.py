"""What a choice for a program says, and how the expander follows it.

    Choice({linear: Pin((row on dp, row on tp))}, {grad: f32[8@dp, 16]})

A choice names rows and not specs, because specs follow from what really flows: the order of axes on a dim and the units
of shards are those of the operands. Where a row is not right for what flows, the op is lowered by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from spmd.tensor.placement import REPLICATE, Placement, Shard
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import Spec


@dataclass(frozen=True)
class Packing:
    """Dims of this size are so many tensors, one after the other, and a shard is a part of each of them.

    >>> Packing(12, 3).of(Shard(1), (8, 12)), Packing(12, 3).of(Shard(0), (8, 12))
    (Shard(1, blocks=3), Shard(0))
    """

    size: int
    blocks: int

    def of(self, p: Placement, shape: Sequence[int]) -> Placement:
        """The placement of a tensor of this shape, packed."""
        packs = isinstance(p, Shard) and p.blocks == p.unit == 1 and shape[p.dim] == self.size
        return Shard(p.dim, blocks=self.blocks) if packs else p


@dataclass(frozen=True)
class Pin:
    """How one op runs. rows: one for each axis of the mesh. packing: dims whose shards are
    parts of each of several blocks; operands that are shards of the whole dim are moved before.

    arrives: the rows are not those of the op's rule. The operands are moved to the placements of the rows, and then the
    op is lowered by itself, as a decomposition or a recipe for operands that arrive so.
    """

    rows: tuple[Row, ...]
    arrives: bool = False
    packing: Packing | None = None

    def placements(self, i: int, shape: Sequence[int]) -> tuple[Placement, ...]:
        """The placements of operand i, which has this shape."""
        placed = [row.ins[i] for row in self.rows]
        return tuple([self.packing.of(p, shape) for p in placed] if self.packing else placed)

    @property
    def moves_first(self) -> bool:
        """Whether operands are moved before the op is asked for its rule, which has these rows for no others."""
        return self.arrives or self.packing is not None or any(map(_is_of_blocks, self.rows))


def _is_of_blocks(row: Row) -> bool:
    return any(isinstance(p, Shard) and p.blocks > 1 for p in (*row.ins, *row.outs))


@dataclass(frozen=True)
class Choice:
    """pins: how ops run; an op without a pin is lowered by itself. held: values that are moved as soon as they are
    made, with the specs in which all their readers meet them."""

    pins: dict[fx.Node, Pin] = field(default_factory=dict)
    held: dict[fx.Node, Spec] = field(default_factory=dict)

    def spec_of(self, node: fx.Node, made: Spec) -> Spec:
        """Where a value is held that is made so. Nothing is owed there that was not owed before, and axes that shard a
        dim in an order of their own keep it, unless another one was chosen."""
        held = self.held[node]
        dims = [own if sorted(own) == list(new) else new for own, new in zip(made.dims, held.dims, strict=True)]
        return made.moved_to(dims, held.units, [each for each in held.partial if each in made.partial])


BY_OP = Choice()
"""Every op is decided by itself."""


def arriving(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Pin:
    """The pin of an op whose operands arrive with these specs, and that is then lowered by itself to these results."""
    of = [spec.placements for spec in ins]
    to = [spec.placements if spec is not None else (REPLICATE,) * ins[0].mesh.ndim for spec in outs]
    return Pin(tuple(map(Row, zip(*of, strict=True), zip(*to, strict=True))), arrives=True)
