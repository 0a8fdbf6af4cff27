"""Numbers for objects that the ranks of a mesh have met together, such as models and compiled steps.

    met = Met.on(mesh).with_objects(step, model)
    met.number(step), met.number(model)      1, 2: in the order in which the ranks met them

All ranks of a mesh meet an object in the same call, so they number objects alike as long as they do the same. Ranks
that compare the numbers notice that one of them has an equal object in place of another. The numbers count from the
time they are kept: that is after the ranks have compared them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from spmd.mesh import DeviceMesh
from spmd.mesh.rank import rank_state


@dataclass(frozen=True)
class Met:
    """The objects that the ranks of a mesh have met, by id: a reference, the number, and how often it was called."""

    mesh: DeviceMesh
    known: dict[int, tuple[weakref.ref, int, int]] = field(default_factory=dict)
    last: int = 0

    @classmethod
    def on(cls, mesh: DeviceMesh) -> Met:
        """What the ranks of this mesh have met so far."""
        return rank_state().get(("met", mesh.ranks_key)) or cls(mesh)

    def with_objects(self, *objects: object) -> Met:
        """The same with these objects; new ones get the next numbers."""
        known, last = dict(self.known), self.last
        for obj in objects:
            if id(obj) not in known or known[id(obj)][0]() is not obj:
                known, last = {i: each for i, each in known.items() if each[0]() is not None}, last + 1
                known[id(obj)] = weakref.ref(obj), last, 0
        return Met(self.mesh, known, last)

    def number(self, obj: object) -> int:
        """The number of an object, from 1."""
        return self.known[id(obj)][1]

    def calls(self, obj: object) -> int:
        """How often the object was called."""
        return self.known[id(obj)][2]

    def called(self, obj: object) -> Met:
        """The same after one more call of the object."""
        ref, number, calls = self.known[id(obj)]
        return Met(self.mesh, {**self.known, id(obj): (ref, number, calls + 1)}, self.last)

    def keep(self) -> None:
        """Go on from this."""
        rank_state()["met", self.mesh.ranks_key] = self
