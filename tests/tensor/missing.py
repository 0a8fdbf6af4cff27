"""Rows that are right, and that no rule offers: the oracle asked about all there could be.

    for found in missing(table()): print(found)

    convolution_backward: Shard(1), Replicate(), Shard(0) -> Partial(), Shard(0), Replicate()   for 4 of 4, such as ...

A row lets an op run where it else would have to see whole tensors. Not each is worth having: what is right for some
samples only may hang on an argument, or on their values.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from spmd.comm.chunk import blocks
from spmd.debug.oracle import UNWRITTEN, Case, Sample, in_order, join, run, split
from spmd.tensor.placement import REPLICATE, Partial, Placement, Shard
from spmd.tensor.rules.rule import Row, rows

KINDS = ("sum", "max", "min", "product")
"""Of averages holds what holds for sums, and a little more."""

Ins = tuple[Placement, ...]


@dataclass
class Missing:
    """A row that is right for an op and that no rule offers: for how many samples, of how many it was asked of."""

    op: str
    row: Row
    example: Sample
    right: int = 0
    asked: int = 0

    def __str__(self):
        return f"{self.op}: {self.row}   for {self.right} of {self.asked}, such as {self.example}"


def missing(samples: Iterable[Sample], most: int = 64) -> list[Missing]:
    """Rows on one axis that are right, on 2 and on 3 ranks, though no rule offers them; the surest first.

    Of each sample up to `most` choices of placements are asked about. Left out: ops that are told the size of their
    result, and rows that tie dims of different sizes.
    """
    found: dict[tuple[str, str], Missing] = {}
    asked: Counter = Counter()
    rng = random.Random(0)
    for case in map(Case, samples):
        if case.rule is not None and (case.rule.sizes or case.call.name in UNWRITTEN):
            continue
        offered = {row.ins for row in rows(case.rule)} if case.rule is not None else set()
        ways = [ins for ins in placings(case.ins) if ins not in offered]
        for ins in rng.sample(ways, min(most, len(ways))):
            asked[case.call.name, ins] += 1
            row = right_row(case, ins)
            if row is not None:
                at = (case.call.name, str(row))
                found.setdefault(at, Missing(case.call.name, row, case.sample)).right += 1
    for entry in found.values():
        entry.asked = asked[entry.op, entry.row.ins]
    return sorted(found.values(), key=lambda m: (-m.right / m.asked, -m.right, m.op, str(m.row)))


# ---- how operands could lie -------------------------------------------------------------------


def placings(tensors: Sequence[torch.Tensor]) -> list[Ins]:
    """The ways for operands to lie on one axis that a row could have: dims of one size sharded, or partials of a kind.

    >>> [str(p) for (p,) in placings([torch.ones(4, 1)])]
    ['Shard(0)', 'Partial()', "Partial('max')", "Partial('min')", "Partial('product')"]
    """
    sizes = sorted({n for t in tensors for n in t.shape if n > 1})
    options: list[list[list[Placement]]] = [
        [[REPLICATE, *(Shard(d) for d, n in enumerate(t.shape) if n == size)] for t in tensors] for size in sizes
    ]
    options += [[[REPLICATE, Partial(kind)] if kind in _kinds(t) else [REPLICATE] for t in tensors] for kind in KINDS]
    ways = itertools.chain.from_iterable(itertools.product(*each) for each in options)
    return [ins for ins in dict.fromkeys(ways) if not all(p.is_replicate() for p in ins)]


def _kinds(t: torch.Tensor) -> Sequence[str]:
    if t.dtype == torch.bool:
        return ("max", "min")
    return ("sum", "product") if t.is_complex() else KINDS


# ---- asking -----------------------------------------------------------------------------------


def right_row(case: Case, ins: Ins) -> Row | None:
    """The row with operands that lie so, if there is one that is right on 2 and on 3 ranks.

    Only on as many as have a block each: there are kernels that die of an empty one, and the process with them.
    """
    sharded = [x.shape[p.dim] for x, p in zip(case.ins, ins, strict=True) if isinstance(p, Shard)]
    outs = [_outs(case, ins, n) for n in (2, 3) if all(blocks(size, 1, (n,))[-1][1] for size in sharded)]
    return Row(ins, outs[0]) if outs and outs[0] is not None and outs[0] == outs[-1] else None


def _outs(case: Case, ins: Ins, n: int) -> Ins | None:
    """How the results then lie on n ranks; None where there is no name for it."""
    parts = [split(x, [p], (n,)) for x, p in zip(case.ins, ins, strict=True)]
    try:
        got = [_run_with(case.sample, [of[at,] for of in parts]) for at in range(n)]
    except Exception:  # it does not fit together so
        return None
    if any(len(results) != len(case.want) for results in got):
        return None
    outs = tuple(_lies(case, want, [results[j] for results in got]) for j, want in enumerate(case.want))
    return None if None in outs else outs


def _run_with(sample: Sample, tensors: Sequence[torch.Tensor]) -> list:
    rest = iter(tensors)
    args, kwargs = tree_map(lambda x: next(rest) if isinstance(x, torch.Tensor) else x, in_order(sample))
    return run(sample.op, args, kwargs)


def _lies(case: Case, want: Any, parts: list) -> Placement | None:
    """The first placement by which these parts are the result."""
    if not isinstance(want, torch.Tensor):
        return REPLICATE
    for p in (*map(Shard, range(want.ndim)), REPLICATE, *(Partial(kind) for kind in _kinds(want))):
        if not p.is_shard() or _are_blocks(parts, want.shape, p.dim):
            value = join({(i,): x for i, x in enumerate(parts)}, [p], (len(parts),), case.same)
            if not isinstance(value, str) and value.shape == want.shape and case.same(value, want):
                return p
    return None


def _are_blocks(parts: list[torch.Tensor], shape: Sequence[int], dim: int) -> bool:
    """Whether parts differ from the whole in the length of this dim alone, of which there is something to share."""

    def others(of: Sequence[int]) -> list[int]:
        return [n for d, n in enumerate(of) if d != dim]

    return shape[dim] > 1 and all(x.ndim == len(shape) and others(x.shape) == others(shape) for x in parts)
