"""The cheapest plan by Dijkstra over every state and way, nothing left out: slow, and plainly right."""

from __future__ import annotations

import heapq
import itertools

from spmd.tensor.redistribute.states import Space
from spmd.tensor.spec import Spec


def least_ps(src: Spec, dst: Spec) -> int:
    """Picoseconds of the cheapest plan."""
    space, count = Space(src, dst, src.mesh.topology), itertools.count()
    queue, done = [(0, next(count), space.start)], set()
    while queue:
        ps, _, state = heapq.heappop(queue)
        if space.reaches_goal(state):
            return ps
        if state not in done:
            done.add(state)
            for way in every_way(space, state):
                if way.to not in done:
                    heapq.heappush(queue, (ps + way.ps, next(count), way.to))
    raise AssertionError(f"no way from {src} to {dst}")


def every_way(space: Space, state):
    yield from space.slices(state)
    yield from space.reductions(state)
    yield from space.gathers(state)
    yield from space.scatters(state, lambda to: True)
    yield from space.exchanges(state, lambda to: True)
