"""Order ops and launches so that what is sent runs beside what is computed; never slower, and never bigger.

    g = all_gather(w); mm(x, g); h = all_gather(v); mm(y, h)    ->    g, h, mm(x, g), mm(y, h)

Several schedules are made by `list_scheduler.py`, of more and of less freedom. The fastest one is taken, by the replay
of `spmd.expand.timeline`, among those that keep within the memory: that of the program as it came, or a limit. If none
is faster than the program as it came, that one stays. No op is changed, so no bit is.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.list_scheduler import Ways, listed
from spmd.expand.program import Program
from spmd.expand.timeline.replay import step_us

WAYS = (Ways(), Ways(sink=False), Ways(margin=1.0), Ways(sink=False, fill=False))
"""The schedules that are made, of which one is taken."""
LEAST_GAIN = 1e-3
"""A schedule is taken if it is faster by this part. Below it the model knows no difference."""


def schedule(program: Program, memory: int | None = None) -> Program:
    """The same program in a faster order, or the program itself where none is known.

    memory: bytes that may be alive on a rank; the default is what the program needs as it is.
    """
    work = program.work
    as_it_came = range(len(work.tasks))
    limit = max(work.memory(as_it_came), default=0) if memory is None else memory
    best, least = None, step_us(work, as_it_came) * (1 - LEAST_GAIN)
    for ways in WAYS:
        order = listed(work, limit, ways)
        us = step_us(work, order)
        if us < least and max(work.memory(order)) <= limit:
            best, least = order, us
    return program if best is None else reordered(program, best)


def reordered(program: Program, order: Sequence[int]) -> Program:
    """The same program with its nodes in this order: for each place, the node that stood at another one."""
    program = copied(program)
    nodes = list(program.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]  # they keep their order: it is that of the arguments
    others = [nodes[i] for i in order if nodes[i].op not in ("placeholder", "output")]
    last = None
    for node in (*inputs, *others):
        if last is not None:
            last.append(node)
        last = node
    return program
