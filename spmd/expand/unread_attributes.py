"""Plain attributes of modules that changed since the last capture, and that the code of the step does not read.

    model.losses.append(loss.item())        between calls: another guard, so the step is captured again, once
    step(model, x)                          nothing read `losses` meanwhile: from now on it is no guard

A guard of every attribute is right, and too much for those that only code outside of the step uses: notes, counts,
histories. What code reads is known only while it runs, so it is watched in the capture that a change asks for. A later
capture that reads such an attribute makes it a guard again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from spmd import _torch
from spmd.expand.counters import Names, all_names
from spmd.expand.guards import ModuleGuard
from spmd.expand.modules import OF_ALL_MODULES
from spmd.expand.sizes.saying import is_of_module
from spmd.expand.stamp.unread import Reads

_SPMD = os.path.dirname(os.path.dirname(__file__))
_ASKING_FOR_GUARDS = tuple(os.path.join(_SPMD, name, "") for name in ("expand", "_torch"))
"""Where code of spmd looks at all attributes, and none comes of it but guards."""


def changed(before: Mapping[Any, Hashable], now: Mapping[Any, Hashable]) -> Names:
    """The attributes of modules whose guards differ, but for those that torch gives each module."""
    found = {}
    for path, guard in now.items():
        old = before.get(path, guard)
        if old is not guard and old != guard and is_of_module(old) and is_of_module(guard):
            ours, theirs = dict(old[1]), dict(guard[1])
            names = {name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)} - OF_ALL_MODULES
            if names:
                found[path] = frozenset(names)
    return found


@dataclass(frozen=True)
class UnreadAttributes:
    """Of one step. unread: what is no guard. read: what some capture has read after it changed, and stays a guard."""

    unread: Names = field(default_factory=dict)
    read: Names = field(default_factory=dict)

    def to_watch(self, changed: Names) -> Names:
        """What a capture is to tell of, where these have changed since the last call."""
        return _without(all_names(changed, self.unread), self.read)

    def after(self, watched: Names, unread: Names) -> UnreadAttributes:
        """As it is behind a capture that has not read some of what was watched."""
        return UnreadAttributes(unread, all_names(self.read, _without(watched, unread)))


def _without(names: Names, others: Names) -> Names:
    left = {path: each - others.get(path, frozenset()) for path, each in names.items()}
    return {path: each for path, each in left.items() if each}


@contextlib.contextmanager
def watched(modules: Mapping[str, nn.Module], names: Names) -> Iterator[dict[str, frozenset[str]]]:
    """Inside, it is noted which attributes are read. Given is a dict, which has those behind it that were not."""
    unread: dict[str, frozenset[str]] = {}
    with contextlib.ExitStack() as stack:
        there = {path: modules[path] for path in names if path in modules}
        reads = {path: stack.enter_context(Reads(m, names[path], _asks_for_guards)) for path, m in there.items()}
        yield unread
    unread |= {path: left for path, each in reads.items() if (left := names[path] - each.names)}


def _asks_for_guards(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_ASKING_FOR_GUARDS) and file not in _torch.INSTEAD_OF_MODULES


def _read(guard: ModuleGuard, unread: frozenset[str]) -> tuple[tuple[str, Hashable], ...]:
    return tuple([each for each in guard.attributes if each[0] not in unread])


def left_out(guards: tuple, unread: Names) -> tuple:
    """The guards by path, without those of attributes that nothing reads."""
    return tuple(
        (path, key._replace(attributes=_read(key, unread[path])) if path in unread else key)
        for path, key in guards
    )
