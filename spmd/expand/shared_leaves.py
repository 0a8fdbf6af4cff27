"""Which leaves of what a step gives are one tensor with others, with what it was given, or show a part of one memory.

    return h, h; self.a = h            the second leaf and the third are the first
    self.a = self.b                    the leaf is what is at b
    return h; self.first = h[0]        the second leaf is to be a view of the first, if the graph says how
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd import _torch
from spmd.expand.captured import Argument


@dataclass
class SharedLeaves:
    """The leaves of what a step gives, by number.

    found: those that are outputs: symbols, each tensor once, and none that an attribute or a container of the caller's
    is set to and that the step was given. same: those that are the tensor of an earlier leaf, with that one. given:
    those that the step was given, with their place. detached: of both, those that share all of its memory, and are
    another tensor. bases: for those that share memory with something else, with what. copies: the returned ones of
    state.
    """

    found: list[int] = field(default_factory=list)
    same: dict[int, int] = field(default_factory=dict)
    given: dict[int, Any] = field(default_factory=dict)
    detached: list[int] = field(default_factory=list)
    bases: dict[int, list[Any]] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, leaves: Sequence[Any], returned: int, there: Mapping[Any, Any]) -> SharedLeaves:
        """returned: how many leaves the step returns; the others are what attributes and containers of the caller's are
        set to. there: what the step was given. If it returns that, the caller gets a copy of state, and of what is no
        DTensor.
        """
        self = cls()
        given_back, kept, first, found = _Met(), _Met(), _Met(), self.found
        for where, x in there.items():
            for met in (kept, given_back)[: 1 + isinstance(where, Argument)] if isinstance(x, torch.Tensor) else ():
                met.meet(x, where)
        for i, x in enumerate(leaves):
            given = given_back if i < returned else kept
            if _torch.is_symbol(x):
                found.append(i)
            elif isinstance(x, torch.Tensor):
                was_met = first.shows(x) and not (first.find(x) < returned <= i and kept.parts(x))
                is_met = was_met and first.has(x)
                if (given.has(x) and (i >= returned or not is_met)) or (given.shows(x) and not is_met):
                    self.given[i] = given.find(x)
                elif was_met:
                    self.same[i] = first.find(x)
                if i not in self.same and (i < returned or i not in self.given):
                    found.append(i)
                if (i in self.given and not given.has(x)) or (i in self.same and not first.has(x)):
                    self.detached.append(i)
                first.meet(x, i, instead=kept.parts(x) and i >= returned)
        self._take_kept(leaves, returned, kept)
        for i in (i for i in found if isinstance(leaves[i], torch.Tensor) and i not in self.given):
            given = given_back if i < returned else kept
            others = [j for j in first.parts(leaves[i]) if j != i and j in found and j not in self.given]
            if others or given.parts(leaves[i]):
                self.bases[i] = [*given.parts(leaves[i]), *others]
            if i < returned and kept.parts(leaves[i]):
                self.copies.add(i)
        return self

    def _take_kept(self, leaves: Sequence[Any], returned: int, kept: _Met) -> None:
        """Let what is returned of the memory of state, which would be a copy, be what an attribute is set to, where
        that is the same tensor, or shows the same."""
        set_to = _Met()
        for j, x in enumerate(leaves[returned:], returned):
            if isinstance(x, torch.Tensor) and kept.parts(x):
                set_to.meet(x, j)
        firsts = {i: self.same.get(i, i) for i in range(returned)}
        copies = [i for i, first in firsts.items() if first not in self.given or first in self.detached]
        for i in [i for i in copies if isinstance(leaves[i], torch.Tensor) and set_to.shows(leaves[i])]:
            self.given.pop(i, None)
            self.detached = [j for j in self.detached if j != i] + [i] * (not set_to.has(leaves[i]))
            self.same[i] = set_to.find(leaves[i])
        self.found[:] = [i for i in self.found if i not in self.same]
        self.same = _in_order(self.same, self.detached)


def _in_order(same: Mapping[int, int], detached: Collection[int]) -> dict[int, int]:
    """Leaves with the ones that they are, so that each stands behind the one that it is. Others of its memory
    (`detached`) come first: they are made of one that is none of these."""

    def of(i: int, passes: bool) -> int:
        while i in same and (passes or i not in detached):
            i = same[i]
        return i

    found = {i: of(same[i], i in detached) for i in same}
    return dict(sorted(found.items(), key=lambda each: each[0] not in detached))


class _Met:
    """Where tensors were first met, by identity, and by the memory that they show."""

    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}
        self._memories: dict[Any, Any] = {}
        self._parts: dict[Any, list[Any]] = {}

    def meet(self, x: torch.Tensor, where: Any, instead: bool = False) -> None:
        """instead: whether it counts from now on, and not what was met before."""
        shown = _torch.memory_shown(x)
        if instead:
            self._tensors[id(x)] = self._memories[shown] = where
        self._tensors.setdefault(id(x), where)
        self._memories.setdefault(shown, where)
        self._parts.setdefault(shown[0], []).append(where)

    def parts(self, x: torch.Tensor) -> list[Any]:
        """Where tensors were met that show any part of the memory of this one."""
        return self._parts.get(_torch.memory_shown(x)[0], [])

    def has(self, x: torch.Tensor) -> bool:
        return id(x) in self._tensors

    def shows(self, x: torch.Tensor) -> bool:
        """Whether it was met, or another that shows the same memory."""
        return self.has(x) or _torch.memory_shown(x) in self._memories

    def find(self, x: torch.Tensor) -> Any:
        """Where it was met, or else the other."""
        return self._tensors[id(x)] if self.has(x) else self._memories[_torch.memory_shown(x)]
