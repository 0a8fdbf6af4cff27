"""Cost tables that no machine has: of nothing, of ages, of few sizes, and of larger that takes less time.

Passes judge by costs. Whatever these are, a pass that promises time makes nothing slower, none makes anything bigger,
none raises, and all find the same program twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from unittest import mock
from zlib import crc32

from spmd.expand.passes.memory_budget import BudgetError, within
from spmd.expand.passes.passes import PASSES, with_passes
from spmd.expand.program import Program
from spmd.expand.timeline.prices import Prices, Sending
from spmd.mesh import PRESETS, Compute, Link, Machine, Measured, Way
from spmd.mesh.machine import LocalOp

NOTHING, AGES = Link(0.0, 1e30), Link(1e9, 1e-9)
QUICK, SLOW = (Compute(x, (("float32", x),)) for x in (1e30, 1e-12))
BESIDE = Link(0.5, 400.0)


def _machine(name: str, link: Link, base: float, **more) -> Machine:
    return Machine(name, (Way("ring", base, (link, link)),), **{"host": BESIDE, **more})


def _measured(*lines: tuple[float, float]) -> tuple[Measured, ...]:
    return tuple(Measured(kind, n, 1, lines) for kind in ("all_reduce", "all_gather") for n in (2, 4))


ODD = {
    "all free": _machine("free", NOTHING, 0.0, memory=NOTHING, compute=QUICK, host=NOTHING),
    "sending free": _machine("sends", NOTHING, 0.0, memory=NOTHING, compute=SLOW),
    "computing free": _machine("computes", AGES, 1e12, memory=NOTHING, compute=QUICK, host=AGES),
    "all ages": _machine("ages", AGES, 1e12, memory=AGES, compute=SLOW, host=AGES),
    "latency alone": _machine("latency", Link(1e3, 1e30), 1e3, compute=QUICK),
    "no latency": _machine("bytes", Link(0.0, 1.0), 0.0, memory=Link(0.0, 1.0), compute=QUICK),
    "nothing known": _machine("unknown", Link(1.0, 1.0), 1.0, host=None),
    "steps": replace(PRESETS["hopper"], measured=_measured((5.0, 0.0), (0.0, 1e3))),
    "one point": replace(PRESETS["hopper"], measured=_measured((0.0, 0.0))),
    "one kind": replace(PRESETS["hopper"], local_ops=(LocalOp("pointwise", "float64", ((0.0, 0.0),)),)),
}
"""Machines with odd figures, by name."""
US = (0.0, 1e-12, 0.3, 7.0, 7.0, 450.0, 1e9)


def _drawn(seed: int, *what: object) -> float:
    return US[crc32(repr((seed, *what)).encode()) % len(US)]


@contextmanager
def prices_without_sense(seed: int) -> Iterator[None]:
    """Each op, and each collective, takes one of a few times, whatever its size is."""
    known = Prices._sending

    def sending(self, step):
        found: Sending | None = known(self, step)
        if found is None:
            return None
        us = _drawn(seed, step.kind, step.nbytes)
        links = tuple([(level, us * _drawn(seed, level, step.nbytes) / max(US)) for level, _ in found.links])
        return replace(found, us=us, links=links, joined_us=_drawn(seed, "joined", step.nbytes) / 10)

    def op_us(self, node):
        return _drawn(seed, str(node.target), self._nbytes(node))

    with mock.patch.object(Prices, "_sending", sending), mock.patch.object(Prices, "_op_us", op_us):
        yield


JUDGED = (("overlap",), ("schedule",), ("chunks",), ("fewer_moves",), ("numbers_late", "buckets", "schedule"))


def faults(program: Program, lists: Sequence[tuple[str, ...]] = JUDGED) -> list[str]:
    """What is wrong with what passes make of a program, which `verify()` checks as well; under costs as they are."""
    before, found = program.timeline(), []
    if not isfinite(before.us):
        return [f"the step takes {before.us}"]
    for names in lists:
        once, again = (with_passes(program, [PASSES[name] for name in names]) for _ in range(2))
        after = once.timeline()
        if str(once) != str(again):
            found.append(f"{names}: another program the second time")
        if after.peak > before.peak:
            found.append(f"{names}: {before.peak:,} -> {after.peak:,} bytes")
        if len(names) == 1 and after.us > before.us * (1 + 1e-12):
            found.append(f"{names}: {before.us} -> {after.us} us")
        if after.bound_us > after.us * (1 + 1e-9):
            found.append(f"{names}: the bound is {after.bound_us}, and the step {after.us} us")
    return found


def budget_faults(program: Program) -> list[str]:
    """The same of memory budgets, with and without host memory: from the smallest to what the program needs."""
    most, found = program.memory().peak, []
    for offload in (False, True):
        try:
            least = within(program, 1, _same, _same, offload).memory().peak
        except BudgetError as e:
            least = e.smallest
        for budget in (least, (least + most) // 2):
            peaks = [within(program, budget, _same, _same, offload).memory().peak for _ in range(2)]
            if max(peaks) > budget or peaks[0] != peaks[1]:
                found.append(f"offload={offload}: {peaks} bytes in {budget:,}")
    return found


def _same(program: Program) -> Program:
    return program
