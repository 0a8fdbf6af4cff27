"""The ways in which a cell may run, as numbers: what it needs, what it gives, and what its work takes.

    linear on (dp, tp): rows R B T K N    25 options; each says a layout for x, for w and for the result

An option is a row for each axis of more than one rank. The rows are those of the op's rule, without laws of Partials
where the op multiplies: a sum that is owed is done before it is multiplied. To them come rows by which an operand
*arrives* at the op, which is then decomposed or runs by a recipe; they are found by trying (`arrivals.py`). All options
are made at once, in arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spmd.expand.choose.choice import Packing, Pin
from spmd.expand.choose.layouts import Layouts, sums_only
from spmd.expand.choose.work import FLOPS, Roofline, flops, is_free, read_and_written
from spmd.mesh import DeviceMesh
from spmd.tensor.call import Call
from spmd.tensor.lower.price import fullest
from spmd.tensor.placement import Placement, Shard
from spmd.tensor.recipes import RECIPES
from spmd.tensor.rules.rule import Row

Placed = tuple[Layouts, Callable[[Row], Placement]]
"""A tensor of an op, and where a row places it."""


@dataclass(frozen=True)
class Way:
    """A row that a cell may take on one axis. us: what is sent inside a decomposition. times: its work, for 1.0 of the
    op's own."""

    row: Row
    arrives: bool = False
    us: float = 0.0
    times: float = 1.0


@dataclass(eq=False)
class Options:
    """The options of a cell. needs, gives: the number of a layout for each option, by operand and by result.

    us: microseconds of local work. ways: of each axis the ways. digits: the way that each option takes on each axis.
    packings: what each option packs beside that.
    """

    needs: list[np.ndarray]
    gives: list[np.ndarray]
    us: np.ndarray
    ways: list[list[Way]]
    digits: np.ndarray
    packings: list[Packing | None]

    def pin(self, option: int, axes: Sequence[int], ndim: int) -> Pin:
        """The pin of an option."""
        taken = {a: self.ways[k][self.digits[k, option]] for k, a in enumerate(axes)}
        bare = self.ways[0][0].row if self.ways else None
        rows = tuple(taken[a].row if a in taken else bare for a in range(ndim))
        return Pin(rows, any(way.arrives for way in taken.values()), self.packings[option])

    def beside(self, op: Op, packings: Sequence[Packing], orders: Sequence[Sequence[int]]) -> Options:
        """These options, and the same ones with other orders of axes and packed dims.

        The rows say which dim an axis shards, and not in which order or parts: that follows from the operands.
        """
        found = [self]
        found += [self._changed([x.packed(p) for x in op.tensors], self._may_pack(op, p), p) for p in packings]
        found += [each._changed([x.reordered(o) for x in op.tensors], True, None) for each in found for o in orders]
        found = [each for each in found if len(each.us)]
        if len(found) == 1:
            return self
        needs, gives = [[np.concatenate(of) for of in zip(*side, strict=True)]
                        for side in zip(*[(each.needs, each.gives) for each in found], strict=True)]  # fmt: skip
        us, digits = np.concatenate([each.us for each in found]), np.concatenate([each.digits for each in found], 1)
        return Options(needs, gives, us, self.ways, digits, [p for each in found for p in each.packings])

    def _changed(self, change: Sequence[np.ndarray], keep: np.ndarray | bool, packing: Packing | None) -> Options:
        """The options whose layouts become others. change: for each tensor the new number of each layout, or -1.
        packing: what they pack now; None for what they packed."""
        old = [*self.needs, *self.gives]
        new = [numbers[n] for numbers, n in zip(change, old, strict=True)]
        if new:
            keep = keep & np.all([n >= 0 for n in new], 0) & np.any([a != b for a, b in zip(new, old, strict=True)], 0)
        else:
            keep = np.zeros(len(self.us), bool)
        new, at = [n[keep] for n in new], len(self.needs)
        packings = [packing or self.packings[i] for i in np.nonzero(keep)[0]]
        return Options(new[:at], new[at:], self.us[keep], self.ways, self.digits[:, keep], packings)

    def _may_pack(self, op: Op, packing: Packing) -> np.ndarray:
        """The options whose rows shard packed dims with packed ones alone."""
        allowed = np.ones(len(self.us), bool)
        for each, d in zip(self.ways, self.digits, strict=True):
            fits = []
            for way in each:
                shards = [(x.plain(p), x) for p, x in op.placed(way.row) if isinstance(p, Shard)]
                packs = [packing.of(p, x.shape) != p for p, x in shards]
                fits.append(not any(packs) or (all(packs) and not way.arrives))
            allowed &= np.array(fits)[d]
        return allowed


@dataclass(eq=False)
class Op:
    """An op of a cell with its rule: a call on replicated operands, and where its tensors are in the cell.

    ins: for each tensor operand its layouts; outs: for each result its layouts, None where there is no tensor.
    """

    call: Call | None
    ins: list[Layouts]
    outs: list[Layouts | None]

    @property
    def tensors(self) -> list[Layouts]:
        """The layouts of all operands and results."""
        return [*self.ins, *[x for x in self.outs if x is not None]]

    def placed(self, row: Row) -> list[tuple[Placement, Layouts]]:
        """The placements of a row, each with its tensor."""
        outs = [(p, x) for p, x in zip(row.outs, self.outs, strict=True) if x is not None]
        return [*zip(row.ins, self.ins, strict=True), *outs]

    def fraction(self, tensor: Layouts, p: Placement, axis: int) -> float:
        """The share of a tensor that the rank with most of it has."""
        if not isinstance(p, Shard):
            return 1.0
        return fullest(tensor.shape[p.dim], p.units, tensor.mesh.shape[axis])


def rows_worth_taking(op: Op, rows: Sequence[Row], mesh: DeviceMesh) -> list[Row]:
    """The rows that an option may have: those that share out a dim that is long enough, and sums that pass through."""
    shortest = min([n for n in mesh.shape if n > 1], default=1)
    multiplies = op.call.name in FLOPS
    found = []
    for row in rows:
        tensors = op.placed(row)
        law = row.factor is None and not all(p.is_replicate() for p in row.ins)
        long = all(t.shape[p.dim] >= shortest for p, t in tensors if isinstance(p, Shard))
        if long and all(sums_only(p) for p, _ in tensors) and not (law and multiplies):
            found.append(row)
    return found


def combined(op: Op, ways: list[list[Way]], axes: Sequence[int], roofline: Roofline) -> Options:
    """All combinations of one way for each axis."""
    digits = np.indices([len(each) for each in ways]).reshape(len(ways), -1) if ways else np.zeros((0, 1), int)
    if op.call is not None and op.call.op in RECIPES:
        digits = digits[:, _go_together(ways, digits)]
    ins = [(x, lambda row, i=i: row.ins[i]) for i, x in enumerate(op.ins)]
    outs = [(x, lambda row, j=j: row.outs[j]) for j, x in enumerate(op.outs) if x is not None]
    digits = digits[:, _are_layouts([*ins, *outs], ways, digits)]
    n = digits.shape[1]

    def numbers(layouts: Layouts, of: Callable[[Row], Placement]) -> np.ndarray:
        letters = [np.array([layouts.letter(of(w.row)) for w in each])[d] for each, d in zip(ways, digits, strict=True)]
        return np.broadcast_to(layouts.number_of(letters), (n,))

    def share(layouts: Layouts, of: Callable[[Row], Placement]) -> np.ndarray:
        found = np.ones(n)
        for axis, each, d in zip(axes, ways, digits, strict=True):
            found = found * np.array([op.fraction(layouts, of(w.row), axis) for w in each])[d]
        return found

    us = _work(op, [share(*each) for each in ins], [share(*each) for each in outs], ways, digits, axes, roofline)
    sent, times = np.zeros(n), np.ones(n)
    for each, d in zip(ways, digits, strict=True):
        sent = sent + np.array([w.us for w in each])[d]
        times = np.maximum(times, np.array([w.times for w in each])[d])  # it is decomposed once for all axes
    us = us * times + sent
    return Options([numbers(*each) for each in ins], [numbers(*each) for each in outs], us, ways, digits, [None] * n)


def _are_layouts(tensors: list[Placed], ways: list[list[Way]], digits: np.ndarray) -> np.ndarray:
    """The combinations whose rows cut each dim of each tensor in one way. Others say what no value can be."""
    found = np.ones(digits.shape[1], bool)
    for layouts, of in tensors:
        if layouts.has_units:
            letters = [np.array([layouts.letter(of(w.row)) for w in each])[d]
                       for each, d in zip(ways, digits, strict=True)]  # fmt: skip
            found &= layouts.cut_alike[layouts.number_of(letters)]
    return found


def _go_together(ways: list[list[Way]], digits: np.ndarray) -> np.ndarray:
    """The combinations that a recipe runs by: for what arrives on one axis it takes no terms of a sum on another."""
    arrives = takes_terms = np.zeros(digits.shape[1], bool)
    for each, d in zip(ways, digits, strict=True):
        arrives = arrives | np.array([w.arrives for w in each])[d]
        terms = [not w.arrives and any(p.is_partial() for p in w.row.ins) for w in each]
        takes_terms = takes_terms | np.array(terms)[d]
    return ~(arrives & takes_terms)


def _work(op: Op, ins, outs, ways, digits, axes, roofline: Roofline) -> np.ndarray:
    """Microseconds of the local work of each option; ins, outs: the shares of the tensors."""
    n = digits.shape[1]
    if op.call is None or is_free(op.call.op):
        return np.zeros(n)
    made = [x for x in op.outs if x is not None]
    whole = flops(op.call.name, [x.shape for x in op.ins], [x and x.shape for x in op.outs])
    operations = np.full(n, float(whole))
    for axis, each, d in zip(axes, ways, digits, strict=True):
        tensors = [*((x, lambda r, i=i: r.ins[i]) for i, x in enumerate(op.ins))]
        least = [min([op.fraction(x, of(w.row), axis) for x, of in tensors], default=1.0) for w in each]
        operations = operations * np.array(least)[d]
    read = [x.nbytes() * share for x, share in zip(op.ins, ins, strict=True)]
    written = [x.nbytes() * share for x, share in zip(made, outs, strict=True)]
    dtype = op.ins[0].dtype
    return roofline.us(operations, read_and_written(op.call.name, read, written), dtype)
