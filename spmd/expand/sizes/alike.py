"""Two values that differ in numbers alone, as one value with text in the place of these numbers.

    Alike(...).of(f32[8@dp, 4], f32[12@dp, 4])      at tokens0 = 4 and at tokens0 = 6: f32[tokens0 * 2@dp, 4]

A program that was written at two sizes shows which of its numbers depend on sizes, and the graph of the capture has the
texts by which they do. Where no text fits, or several do, the values are not alike (`NotAlike`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import fx

from spmd.expand.sizes.size import evaluated
from spmd.tensor.spec import Spec

Values = Mapping[str, float]


class NotAlike(Exception):
    """Two values differ in more than in numbers that follow from sizes."""


@dataclass(frozen=True)
class Number:
    """A number that follows from sizes: the one of this place among the texts."""

    place: int


@dataclass(frozen=True, eq=False)
class Built:
    """A value that is made of parts, some of which follow from sizes."""

    make: Callable[[list], Any]
    parts: tuple[Any, ...]


def made(form: Any, numbers: Sequence[Any], known: dict[int, Any]) -> Any:
    """The value of a form at these numbers. known: what was made before, by the identity of its form."""
    if isinstance(form, Number):
        return numbers[form.place]
    if not isinstance(form, Built):
        return form
    if id(form) not in known:
        known[id(form)] = form.make([made(part, numbers, known) for part in form.parts])
    return known[id(form)]


class Texts:
    """Which text gives which number, by the numbers that it gives at two sizes. other: sizes by which texts are told
    apart that happen to give the same at both. used: the texts that were asked for, in order."""

    def __init__(self, texts: Iterable[str], first: Values, second: Values, other: Values):
        self.used: dict[str, int] = {}
        self._found: dict[tuple, str | None] = {}
        self._by_ratio: dict[Fraction, str | None] = {}
        self._constant: set[Any] = set()
        texts = tuple(dict.fromkeys(texts))
        columns = [evaluated(texts, values) for values in (first, second, other)]
        self._values = dict(zip(texts, zip(*columns, strict=True), strict=True))
        for text, (a, b, c) in self._values.items():
            if a == b:
                self._constant |= {a} if c != a else set()
                continue
            self._note(self._found, (type(a), a, b), text)
            if type(a) is int and a and b:
                self._note(self._by_ratio, Fraction(b, a), text)

    def _note(self, table: dict, key: Any, text: str) -> None:
        known = table.setdefault(key, text)
        if known is not None and not self._is_one(known, text):
            table[key] = None

    def _is_one(self, one: str, other: str) -> bool:
        """Whether two texts are one function, up to a factor."""
        (a, _, x), (b, _, y) = self._values[one], self._values[other]
        return x * b == y * a

    def number(self, a: Any, b: Any) -> Number | None:
        """The number that is a at the one size and b at the other; None for a constant."""
        if a == b:
            if a in self._constant:
                raise NotAlike(f"{a} may be a constant, or follow from sizes")
            return None
        text = self._found.get((type(a), a, b)) or self._scaled(a, b)
        if text is None:
            raise NotAlike(f"nothing in the step says what is {a} at the one size and {b} at the other")
        return Number(self.used.setdefault(text, len(self.used)))

    def _scaled(self, a: Any, b: Any) -> str | None:
        if type(a) is float and a and b:
            return self._one_over(a, b)
        text = self._by_ratio.get(Fraction(b, a)) if type(a) is int and a and b else None
        if text is None:
            return None
        factor = Fraction(a, self._values[text][0])
        return f"({text}) * {factor.numerator} // {factor.denominator}"

    def _one_over(self, a: float, b: float) -> str | None:
        """Of a mean."""
        found = [t for t, (x, y, _) in self._values.items() if x and y and x != y and 1 / x == a and 1 / y == b]
        return f"1 / ({found[0]})" if found and all(self._is_one(found[0], t) for t in found) else None


class Alike:
    """Puts pairs of values together. nodes: for each node of the one graph, that of the other."""

    def __init__(self, texts: Texts):
        self.texts, self.nodes = texts, dict[fx.Node, fx.Node]()
        self._known: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def of(self, a: Any, b: Any) -> Any:
        """The form of two values; the value itself where they are equal. NotAlike where they have none."""
        if type(a) is not type(b):
            raise NotAlike(f"{a!r:.80} and {b!r:.80}")
        if type(a) in (int, float):
            number = self.texts.number(a, b)
            return a if number is None else number
        if a is b:
            return a
        key = id(a), id(b)
        if key not in self._known:
            self._known[key] = self._of(a, b), a, b
        return self._known[key][0]

    def _of(self, a: Any, b: Any) -> Any:
        if isinstance(a, fx.Node):
            return self._same(self.nodes.get(a) is b, a, b)
        if isinstance(a, Spec):
            return self._spec(a, b)
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            return self._built(a, b, list(a), list(b), lambda parts: type(a)(*parts))
        if isinstance(a, (tuple, list)):
            return self._built(a, b, list(a), list(b), type(a))
        if isinstance(a, dict):
            self._same(list(a) == list(b), a, b)
            return self._built(a, b, [*a.values()], [*b.values()], lambda parts: dict(zip(a, parts, strict=True)))
        if isinstance(a, slice):
            ends = [[x.start, x.stop, x.step] for x in (a, b)]
            return self._built(a, b, *ends, lambda parts: slice(*parts))
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            names = [f.name for f in dataclasses.fields(a) if f.init]
            parts = [[getattr(x, name) for name in names] for x in (a, b)]
            return self._built(a, b, *parts, lambda parts: type(a)(**dict(zip(names, parts, strict=True))))
        return self._same(bool(a == b), a, b)

    def _spec(self, a: Spec, b: Spec) -> Any:
        layouts = [(x.mesh, x.dims, x.partial, x.dtype, len(x.shape)) for x in (a, b)]
        self._same(layouts[0] == layouts[1], a, b)
        said = [[x.shape, x.stride, x.units] for x in (a, b)]

        def spec(parts: list) -> Spec:
            shape, stride, units = parts
            return Spec.of(a.mesh, shape, a.dtype, stride=stride, dims=a.dims, units=units, partial=a.partial)

        return self._built(a, b, *said, spec)

    def _built(self, a: Any, b: Any, ours: list, theirs: list, make: Callable[[list], Any]) -> Any:
        self._same(len(ours) == len(theirs), a, b)
        parts = tuple(self.of(x, y) for x, y in zip(ours, theirs, strict=True))
        if not any(isinstance(part, (Number, Built)) for part in parts):
            return a
        return Built(make, parts)

    @staticmethod
    def _same(is_so: bool, a: Any, b: Any) -> Any:
        if not is_so:
            raise NotAlike(f"{a!r:.80} and {b!r:.80}")
        return a
