"""A part of a graph, with all that is known of its nodes, to be written again for the call of another module.

What is known besides ops and arguments is where nodes come from: the modules, lines and sites of the step. A call also
notes sites at what it is given: its inner modules may take the value as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from spmd.expand.draws import Numbering
from spmd.expand.origins import GRADIENT_OF, SITES, renamed
from spmd.expand.stamp.parts import Env, Part, stamp

Notes = tuple[dict[str, tuple], ...]
"""For each of several nodes, the sites that are noted at it, by key."""


def notes_of(nodes: Sequence[fx.Node]) -> Notes:
    """What is noted at nodes now."""
    return tuple({key: n.meta.get(key, ()) for key in (SITES, GRADIENT_OF)} for n in nodes)


@dataclass(frozen=True, eq=False)
class Stencil:
    """A part, the metadata of its nodes, and what the call noted at its inputs. path: of the module."""

    part: Part
    path: str
    metas: tuple[dict[str, Any], ...]
    notes: Notes

    @classmethod
    def of(cls, part: Part, path: str, before: Notes) -> Stencil:
        """Of a part as it is now. before: what was noted at its inputs before it was traced."""
        now = notes_of(part.inputs)
        notes = tuple({k: new[k][len(old[k]) :] for k in new} for old, new in zip(before, now, strict=True))
        return cls(part, path, tuple(dict(n.meta) for n in part.nodes), notes)

    def write(self, env: Env, path: str, numbering: Numbering) -> list[fx.Node]:
        """Write the part at the end of its graph, for the module of this path. env: as for `stamp`."""
        is_here = path == self.path
        stamp(self.part, env, self.metas if is_here else (renamed(meta, self.path, path) for meta in self.metas))
        copies = [env[n] for n in self.part.nodes]
        for n in copies:
            if "draw" in n.meta:
                n.meta["draw"] = numbering.next(n.target)
        for n, noted in zip(self.part.inputs, self.notes, strict=True):
            meta = env.get(n, n).meta
            for key, sites in (noted if is_here else renamed(noted, self.path, path)).items():
                if sites:
                    meta[key] = (*meta.get(key, ()), *sites)
        return copies
