"""Rows that are right but that no rule has: the oracle is asked about all possible rows.

    for found in missing(table()): print(found)

    convolution_backward: Shard(1), Replicate(), Shard(0) -> Partial(), Shard(0), Replicate()   for 4 of 4, such as ...

With such a row, the op would run where now its operands have to be gathered. Not every such row is useful: a row that
is right for only some samples may depend on an argument, or on the values.
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
"""Averages are left out: every law of sums holds for averages, too, and a few more laws hold for averages."""

Ins = tuple[Placement, ...]


@dataclass
class Missing:
    """A row that is right for an op and that no rule has, and for how many of the tested samples it is right."""

    op: str
    row: Row
    example: Sample
    right: int = 0
    asked: int = 0

    def __str__(self):
        return f"{self.op}: {self.row}   for {self.right} of {self.asked}, such as {self.example}"


def missing(samples: Iterable[Sample], most: int = 64) -> list[Missing]:
    """Rows on one axis that are right on 2 and on 3 ranks, and that no rule has. The most certain ones are first.

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


# ---- placements of operands -------------------------------------------------------------------


def placings(tensors: Sequence[torch.Tensor]) -> list[Ins]:
    """The placements of operands on one axis that a row could have: dims of one size sharded, or Partials of one kind.

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


# ---- testing ----------------------------------------------------------------------------------


def right_row(case: Case, ins: Ins) -> Row | None:
    """The row with these placements of the operands, if there is one that is right on 2 and on 3 ranks.

    Only on as many as have a block each: there are kernels that die of an empty one, and the process with them.
    """
    sharded = [x.shape[p.dim] for x, p in zip(case.ins, ins, strict=True) if isinstance(p, Shard)]
    outs = [_outs(case, ins, n) for n in (2, 3) if all(blocks(size, 1, (n,))[-1][1] for size in sharded)]
    return Row(ins, outs[0]) if outs and outs[0] is not None and outs[0] == outs[-1] else None


def _outs(case: Case, ins: Ins, n: int) -> Ins | None:
    """The placements of the results on n ranks; None if no placement describes them."""
    parts = [split(x, [p], (n,)) for x, p in zip(case.ins, ins, strict=True)]
    try:
        got = [_run_with(case.sample, [of[at,] for of in parts]) for at in range(n)]
    except Exception:  # these blocks do not fit together
        return None
    if any(len(results) != len(case.want) for results in got):
        return None
    outs = tuple(_placement_of(case, want, [results[j] for results in got]) for j, want in enumerate(case.want))
    return None if None in outs else outs


def _run_with(sample: Sample, tensors: Sequence[torch.Tensor]) -> list:
    rest = iter(tensors)
    args, kwargs = tree_map(lambda x: next(rest) if isinstance(x, torch.Tensor) else x, in_order(sample))
    return run(sample.op, args, kwargs)


def _placement_of(case: Case, want: Any, parts: list) -> Placement | None:
    """The first placement with which these blocks are the result."""
    if not isinstance(want, torch.Tensor):
        return REPLICATE
    for p in (*map(Shard, range(want.ndim)), REPLICATE, *(Partial(kind) for kind in _kinds(want))):
        if not p.is_shard() or _are_blocks(parts, want.shape, p.dim):
            value = join({(i,): x for i, x in enumerate(parts)}, [p], (len(parts),), case.same)
            if not isinstance(value, str) and value.shape == want.shape and case.same(value, want):
                return p
    return None


def _are_blocks(parts: list[torch.Tensor], shape: Sequence[int], dim: int) -> bool:
    """Whether the blocks differ from the global tensor only in the length of this dim, which is longer than 1."""

    def others(of: Sequence[int]) -> list[int]:
        return [n for d, n in enumerate(of) if d != dim]

    return shape[dim] > 1 and all(x.ndim == len(shape) and others(x.shape) == others(shape) for x in parts)
