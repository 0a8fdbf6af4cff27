"""Calls of equal modules, and whether more of them may be written as they were."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from typing import Any

from spmd import _torch
from spmd.expand.stamp.given import Given
from spmd.expand.stamp.reach import Code, Reach
from spmd.expand.stamp.watch import Watch

log = logging.getLogger("spmd.expand")


class Kind:
    """Calls of a kind. calls: those that are traced. plain: why others are traced plainly; empty if they are not.

    codes: the code of the user's that ran in them. key: what it could reach, behind the last one: globals, variables
    around functions, classes, and what the modules keep. Later calls that reach something else are plain. read: the
    names of attributes in which modules of the structure differ, and those of this kind do not.
    """

    def __init__(self, couple: Callable[[str], Any], read: frozenset[str]) -> None:
        self.read = read
        self.calls: list[Any] = []
        self.plain = ""
        self._couple = couple
        self._codes: set[Code] = set()
        self._names_computed = self._reads_environment = False
        self._key: list[Hashable] = []

    def takes(self, given: Given) -> bool:
        """Whether a call is one of the two that are traced, or may be written as they were."""
        if self.plain or not self.calls:
            return not self.plain
        same = self._reach(given).key == self._key
        if not same and len(self.calls) == 1:
            self.plain = "code outside changes what two calls of equal modules read"
        return same

    def add(self, call: Any) -> None:
        """Add a call that was traced; the second one is compared with the first."""
        self.calls.append(call)
        is_second, seen = len(self.calls) == 2, call.seen
        is_new = is_second and seen.codes != self._codes
        self._codes |= seen.codes
        self._names_computed |= seen.names_computed
        self._reads_environment |= seen.reads_environment
        found = self._reach(call.given)
        traced = [x for x in found.tensors if isinstance(x, _torch.FunctionalTensor)]
        if any(map(call.has_made, traced)):
            self._couple("a module keeps a tensor for code outside of it")
        if seen.asks_identity or found.finds_given:  # it is given stand-ins, which are other objects
            self._couple("a module can see which tensor it is given")
        changes = is_second and found.key != self._key
        self._key = found.key
        self.plain = (
            seen.unseen or found.unseen or call.custom
            or (is_new and "two calls of equal modules run other code")
            or (not call.read <= self.read and "two calls of equal modules read other attributes")
            or (changes and "a module changes a Python value outside of modules")
            or (traced and "a module can reach tensors that it is not given")
            or (not found.finds(self._codes) and "a module runs code that is reached in an unknown way") or ""
        )  # fmt: skip
        if self.plain:
            log.debug("calls like %s are traced one by one: %s", call.given.path, self.plain)
        elif is_second:
            call.compare(self.calls[0])

    def note_in(self, watch: Watch) -> None:
        """Let a watch have seen what the calls that are traced have run: it sees none of those that are stamped."""
        watch.codes |= self._codes
        watch.names_computed |= self._names_computed
        watch.reads_environment |= self._reads_environment

    def _reach(self, given: Given) -> Reach:
        own = {id(x): i for i, x in enumerate((*given.module.modules(), *given.tensors, *given.buffers))}
        unread = given.structure.differing - self.read
        around = [dict(os.environ)] if self._reads_environment else []
        modules, whole = given.module.modules(), self._names_computed
        return Reach.of(self._codes, modules, functions=around, whole=whole, own=own, unread=unread)
