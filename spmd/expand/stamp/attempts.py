"""A trace with stamps, and again without those that turn out not to be right."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from spmd.expand.equal_counts import EqualCounts
from spmd.expand.local_map import tracing_lock
from spmd.expand.modules import modules_of
from spmd.expand.stamp.blocks import CoupledBlocks
from spmd.expand.stamp.optimizers import CoupledKinds, updates_stamped
from spmd.expand.stamp.parts import Coupled
from spmd.expand.stamp.repeats import Structure, repeated
from spmd.expand.stamp.step import reach_of_step
from spmd.expand.state import State

log = logging.getLogger("spmd.expand")

T = TypeVar("T")

Trace = Callable[[Callable[[EqualCounts], contextlib.AbstractContextManager], Mapping[int, Structure]], T]
"""Traces a step. It is given what is on around updates of parameters, and the modules whose calls are stamped."""


def with_stamps(trace: Trace[T], fn: Callable, state: State, blocks: bool) -> T:
    """With stamps, or without those that cannot be shown to be right. blocks: whether those of blocks are tried.

    fn, state: the step that is traced, and what it is given.
    """
    found = _without_counters(repeated(state.modules.values()), state) if blocks else {}
    if not found:
        return _attempts(trace, fn, state, found)
    with tracing_lock:  # no other trace changes what is put back here
        return _attempts(trace, fn, state, found)


def _without_counters(blocks: Mapping[int, Structure], state: State) -> Mapping[int, Structure]:
    """The modules that keep no numbers, in which they would differ from call to call."""
    counted = {id(place.module or place.of) for place in state.counters.values()}
    if not counted:
        return blocks
    keep = {id(m) for m in state.submodules() if not counted.isdisjoint(map(id, modules_of(m)))}
    return {key: structure for key, structure in blocks.items() if key not in keep}


def _attempts(trace: Trace[T], fn: Callable, state: State, blocks: Mapping[int, Structure]) -> T:
    updates = updates_stamped
    before = reach_of_step(fn, state) if blocks else None
    if before and before.unseen:
        log.debug("calls of equal modules are traced one by one: the step reaches %s", before.unseen)
        blocks = {}
    while True:
        try:
            return trace(updates, blocks)
        except CoupledBlocks as coupled:
            log.debug("calls of equal modules are traced one by one: %s", coupled)
            blocks = {}
        except CoupledKinds as coupled:
            log.debug("updates are traced for two parameters of each kind: %s", coupled)
            updates = functools.partial(updates_stamped, by_family=False)
        except Coupled:
            updates = contextlib.nullcontext
        if before:
            before.held.put_back()
