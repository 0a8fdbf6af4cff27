"""The layouts that a value may have, with numbers, and what it costs to come from each to each other.

    f32[8, 128, 256] on (dp, tp), alphabet R S0 S1 S2 P    25 layouts; layout 7 is S0 on dp and S1 on tp

The alphabet of a shape has the placements that the rows of its readers and writers name. A layout has one of them for
each axis of more than one rank, and its number is written in the digits of the alphabet. Specs that no such number
stands for, such as another order of axes, come after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from spmd.expand.choose.choice import Packing
from spmd.expand.places.roles import scattered_first
from spmd.mesh import DeviceMesh
from spmd.tensor.placement import REPLICATE, Partial, Placement, Shard
from spmd.tensor.redistribute.distances import distances
from spmd.tensor.spec import Spec, placed


@dataclass(eq=False)
class Layouts:
    """The layouts of all values of one shape and dtype."""

    mesh: DeviceMesh
    shape: tuple[int, ...]
    dtype: torch.dtype
    alphabet: dict[Placement, int] = field(default_factory=lambda: {REPLICATE: 0})
    extra: dict[Spec, int] = field(default_factory=dict)
    _admitted: set[Spec] = field(default_factory=set)
    _costs: np.ndarray | None = None
    _specs: list[Spec] | None = None
    _as_gradient: dict[Spec, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bare = Spec.of(self.mesh, self.shape, self.dtype)

    @property
    def axes(self) -> list[int]:
        """The axes of more than one rank."""
        return [a for a, n in enumerate(self.mesh.shape) if n > 1]

    def letter(self, p: Placement) -> int:
        """The digit of a placement; it joins the alphabet if it is new."""
        return self.alphabet.setdefault(self.plain(p), len(self.alphabet))

    def plain(self, p: Placement) -> Placement:
        """The placement without a unit that changes nothing."""
        if isinstance(p, Shard) and p.unit > 1:
            even = self.shape[p.dim] % (p.blocks * p.unit * self.mesh.size()) == 0
            return Shard(p.dim, 1, p.blocks) if even else p
        return p

    def admit(self, spec: Spec) -> None:
        """Let a spec be a layout."""
        if spec in self._admitted:
            return
        self._admitted.add(spec)
        spec = self.contiguous(spec)
        for axis in self.axes:
            self.letter(spec.on(axis))
        if placed(self._bare, spec.placements) is not spec:
            self.extra.setdefault(spec, len(self.extra))

    def number(self, spec: Spec) -> int:
        """The number of a spec that was admitted."""
        spec = self.contiguous(spec)
        if spec in self.extra:
            return len(self.alphabet) ** len(self.axes) + self.extra[spec]
        return self.number_of([self.alphabet[self.plain(spec.on(a))] for a in self.axes])

    def number_of(self, letters: Sequence[int | np.ndarray]) -> int | np.ndarray:
        """The number of the layout with these digits, one for each axis."""
        number = 0
        for letter in letters:
            number = number * len(self.alphabet) + letter
        return number

    @property
    def has_units(self) -> bool:
        """Whether some layout shards a dim in blocks or units."""
        return any(isinstance(p, Shard) and p.units != 1 for p in self.alphabet)

    @property
    def cut_alike(self) -> np.ndarray:
        """For each choice of letters whether it is a layout: axes that shard one dim cut it in the same blocks and
        units. Words over dp and heads over tp, seen as one dim, are not: no spec says which rank has what there."""
        of = [p.units if isinstance(p, Shard) else None for p in self.alphabet]
        dim = np.array([p.dim if isinstance(p, Shard) else -1 for p in self.alphabet])
        unlike = (dim[:, None] == dim) & (dim >= 0) & ~np.array([[a == b for b in of] for a in of])
        digits = np.indices([len(of)] * len(self.axes)).reshape(len(self.axes), -1)
        pairs = itertools.combinations(digits, 2)
        return ~np.logical_or.reduce([unlike[one, other] for one, other in pairs] or [np.zeros(digits.shape[1], bool)])

    def packed(self, packing: Packing) -> np.ndarray:
        """For each layout the number of the same one with dims packed."""
        letters = np.array([self.alphabet[self.plain(packing.of(p, self.shape))] for p in self.alphabet])
        digits = np.indices([len(letters)] * len(self.axes)).reshape(len(self.axes), -1)
        found = self.number_of([letters[d] for d in digits]) if len(digits) else np.zeros(1, int)
        return np.concatenate([found, np.arange(len(found), len(self.specs))])

    def reordered(self, order: Sequence[int]) -> np.ndarray:
        """For each layout the number of the same one with the axes of each dim in this order; -1 if it is no layout."""
        found = np.arange(len(self.specs))
        for n, spec in enumerate(self.specs):
            dims = [tuple(sorted(axes, key=order.index)) if set(axes) == set(order) else axes for axes in spec.dims]
            if dims != list(spec.dims):
                other = self.contiguous(spec.with_layout(dims, spec.units, spec.partial))
                found[n] = self.number(other) if other in self.extra else -1
        return found

    @property
    def reordered_dims(self) -> list[tuple[int, tuple[int, ...]]]:
        """The sizes of dims that axes shard in an order that is not that of the mesh, with these orders."""
        return [(spec.shape[d], axes) for spec in self.extra
                for d, axes in enumerate(spec.dims) if list(axes) != sorted(axes)]  # fmt: skip

    def admit_order(self, size: int, order: tuple[int, ...]) -> None:
        """Let these axes shard the dims of this size in this order, where some row shards them."""
        for d, n in enumerate(self.shape):
            if n == size and Shard(d) in self.alphabet:
                self.admit(self._bare.with_layout([order if k == d else () for k in range(len(self.shape))]))

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """The orders of axes on a dim that are not that of the mesh."""
        return list(dict.fromkeys(order for _, order in self.reordered_dims))

    @property
    def packings(self) -> list[Packing]:
        """The dims that are packed in some layout."""
        return [Packing(self.shape[p.dim], p.blocks) for p in self.alphabet
                if isinstance(p, Shard) and p.blocks > 1 and p.unit == 1]  # fmt: skip

    def contiguous(self, spec: Spec) -> Spec:
        return spec if spec.stride == self._bare.stride else spec.with_tensor(spec.shape)

    @property
    def specs(self) -> list[Spec]:
        """The spec of each layout."""
        if self._specs is None:
            letters, bare = list(self.alphabet), self._bare
            found = []
            for each in itertools.product(letters, repeat=len(self.axes)):
                given = dict(zip(self.axes, each, strict=True))
                found.append(placed(bare, [given.get(a, REPLICATE) for a in range(self.mesh.ndim)]))
            self._specs = [*found, *self.extra]
        return self._specs

    @property
    def costs(self) -> np.ndarray:
        """Microseconds from each layout to each other."""
        if self._costs is None:
            specs = list(dict.fromkeys(self.specs))
            at = {spec: i for i, spec in enumerate(specs)}
            index = [at[spec] for spec in self.specs]
            self._costs = distances(specs)[np.ix_(index, index)]
        return self._costs

    def costs_as_gradient(self, place: Spec) -> np.ndarray:
        """Microseconds from each layout to the place of a gradient, whose sums are scattered before others are reduced
        (`places.roles.scattered_first`)."""
        if place not in self._as_gradient:
            self._as_gradient[place] = self._scattered_to(place)
        return self._as_gradient[place]

    def _scattered_to(self, place: Spec) -> np.ndarray:
        costs, goal = self.costs, self.number(place)
        found = costs[:, goal].copy()
        for at, spec in enumerate(self.specs):
            first, *rest = scattered_first(spec, self.contiguous(place))
            if rest and first in self:
                found[at] = costs[at, self.number(first)] + costs[self.number(first), goal]
        return found

    def __contains__(self, spec: Spec) -> bool:
        """Whether a spec is a layout."""
        spec = self.contiguous(spec)
        letters = [self.plain(spec.on(a)) for a in self.axes]
        plain = placed(self._bare, spec.placements) is spec and all(p in self.alphabet for p in letters)
        return spec in self.extra or plain

    @property
    def local_nbytes(self) -> np.ndarray:
        """The bytes of each layout on the first rank, which has the largest blocks."""
        return np.array([float(spec.local_nbytes) for spec in self.specs])

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def sums_only(p: Placement) -> bool:
    """Whether a placement is no Partial, or a Partial sum."""
    return not isinstance(p, Partial) or p.reduce_op == "sum"
