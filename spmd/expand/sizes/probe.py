"""Other sizes at which a program would be decided alike: they show which of its numbers depend on sizes.

    a batch of 4 on two ranks, 8 tokens      a batch of 6 and 11 tokens: even as before, none empty

Two symbols that the capture needs to be equal change together. A symbol for which no other value is decided alike stays
what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from torch import fx

from spmd.comm import chunk
from spmd.comm.chunk import Unit, split_unit
from spmd.expand.sizes.assumed import Assumed
from spmd.expand.sizes.lift import SIZED
from spmd.expand.sizes.size import Size, evaluated
from spmd.tensor.call import TensorMeta
from spmd.tensor.spec import Spec

Values = Mapping[str, float]
MOST_TRIED = 64
"""How far from the present value of a symbol another one is looked for."""


class Cut(NamedTuple):
    """A dim of this size, cut by groups of so many ranks, outermost first; by none where it is whole."""

    size: int
    unit: Unit
    ns: tuple[int, ...]


def decided(cut: Cut) -> tuple:
    """What is decided about a dim: whether it is empty or one, divides, and gives each rank something."""
    size, unit, ns = cut
    blocks, inner = split_unit(unit)
    even = size % (blocks * inner * prod(ns)) == 0
    last = tuple(n - 1 for n in ns)
    return size == 0, size == 1, even, even or chunk.length_of(size, unit, ns, last) > 0


def cuts(spec: Spec) -> Iterator[Cut]:
    """How each dim of a spec is cut."""
    for size, unit, axes in zip(spec.shape, spec.units, spec.dims, strict=True):
        yield Cut(size, unit, tuple(spec.mesh.shape[a] for a in axes))


def texts_of(graph: fx.Graph, assumed: Assumed) -> tuple[str, ...]:
    """The texts of all sizes in the graph of a capture: of dims, strides, elements, arguments."""
    found: dict[str, None] = {source.name: None for source in assumed.sources if source.name not in assumed.arguments}

    def note(x: object) -> None:
        if isinstance(x, Size):
            found[x.text] = None
        elif isinstance(x, TensorMeta):
            for n in (*x.shape, *x.stride, x.offset):
                note(n)
            found[" * ".join(f"({n})" for n in x.shape)] = None

    for node in graph.nodes:
        if node.meta.get(SIZED):
            fx.node.map_aggregate((node.args, dict(node.kwargs), node.meta.get("val")), note)
    found.pop("", None)
    return tuple(found)


class Probe:
    """Finds other values of the symbols of a capture. present: their values. sharded: how a program at these is cut."""

    def __init__(self, assumed: Assumed, texts: tuple[str, ...], present: Values, sharded: set[Cut]):
        self.assumed, self.present = assumed, present
        self._answers = assumed.answers(present)
        self._dims = {source.name: source.dim for source in assumed.sources}
        now = dict(zip(texts, evaluated(texts, present), strict=True))
        by_size: dict[object, list[str]] = {}
        for text, size in now.items():
            by_size.setdefault(size, []).append(text)
        pairs = [(text, cut) for cut in sharded for text in by_size.get(cut.size, ())]
        self._texts = tuple(text for text, _ in pairs)
        self._cuts = tuple(cut._replace(unit=1) for _, cut in pairs)

    def values(self) -> dict[str, float] | None:
        """Other values; None where there are none. A symbol that cannot change has its value."""
        new = dict(self.present)
        for name in self.present:
            if name not in self.assumed.arguments and new[name] == self.present[name]:
                new |= next(self._changes(name, new), {})
        return new if new != self.present else None

    def _changes(self, name: str, new: Values) -> Iterator[dict[str, float]]:
        """Changes of a symbol that fit: by itself, or together with another one that has its value."""
        now, taken = self.present[name], set(self.present.values()) | set(new.values())
        tied = [other for other in self.present if other != name and self.present[other] == now == new[other]]
        tied.sort(key=lambda other: self._dims[other] != self._dims[name])
        for together in ([name], *([name, other] for other in tied)):
            for n in (*range(now + 1, now + MOST_TRIED), *range(now - 1, -1, -1)):
                if n not in taken and self._fits(new | dict.fromkeys(together, n)):
                    yield dict.fromkeys(together, n)

    def _fits(self, values: Values) -> bool:
        """Whether the capture holds for these values, and the program is decided alike."""
        if self.assumed.answers(values) != self._answers:
            return False
        try:
            sizes = evaluated(self._texts, values)
        except (ArithmeticError, ValueError):
            return False
        return all(decided(cut._replace(size=n)) == decided(cut) for n, cut in zip(sizes, self._cuts, strict=True))
