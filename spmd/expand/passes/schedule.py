"""Order ops and launches so that what is sent runs beside what is computed; never slower, and never bigger.

    g = all_gather(w); mm(x, g); h = all_gather(v); mm(y, h)    ->    g, h, mm(x, g), mm(y, h)

Several schedules are made by `list_scheduler.py`, of more and of less freedom. The fastest one is taken, by the replay
of `spmd.expand.timeline`, among those that keep within the memory: that of the program as it came, or a limit. If none
is faster than the program as it came, that one stays. No op is changed, so no bit is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.list_scheduler import Start, Ways, listed
from spmd.expand.program import Program
from spmd.expand.timeline.replay import bound_us, step_us
from spmd.expand.timeline.work import Work

WAYS = (Ways(margin=16.0), Ways(margin=16.0, ahead=512), Ways(margin=1.0), Ways(sink=False))
"""The schedules that are made, of which one is taken."""
LEAST_GAIN = 1e-3
"""A schedule is taken if it is faster by this part. Below it the model knows no difference."""


@dataclass(frozen=True)
class Found:
    """An order of the tasks of a program, with the time of its step."""

    order: Sequence[int]
    us: float


def schedule(program: Program, memory: int | None = None) -> Program:
    """The same program in a faster order, or the program itself where none is known.

    memory: bytes that may be alive on a rank; the default is what the program needs as it is.
    """
    work = program.work
    as_it_came = range(len(work.tasks))
    limit = max(work.memory(as_it_came), default=0) if memory is None else memory
    found = best_order(work, limit)
    faster = found is not None and found.us < step_us(work) * (1 - LEAST_GAIN)
    return reordered(program, found.order) if faster else program


def best_order(work: Work, limit: int) -> Found | None:
    """The fastest order that keeps within the memory; None if none is found. A tenth of a percent is no difference."""
    least, best, start = bound_us(work) * (1 + LEAST_GAIN), None, Start(work, limit)
    for order in itertools.chain([range(len(work.tasks))], (listed(start, ways) for ways in WAYS)):
        if max(work.memory(order), default=0) <= limit:
            us = step_us(work, order)
            best = Found(order, us) if best is None or us < best.us * (1 - LEAST_GAIN) else best
            if best.us <= least:
                break
    return best


def reordered(program: Program, order: Sequence[int], own: bool = False) -> Program:
    """The same program with its nodes in this order: for each place, the node that stood at another one.

    own: whether the given program is not needed any more, so that its graph can be changed.
    """
    program = replace(program) if own else copied(program)
    nodes = list(program.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]  # they keep their order: it is that of the arguments
    others = [nodes[i] for i in order if nodes[i].op not in ("placeholder", "output")]
    last = None
    for node in (*inputs, *others):
        if last is not None:
            last.append(node)
        last = node
    return program
