"""Which places each parameter has, from what the user said.

    params=       by name pattern: where a parameter is computed with; None where every op may choose
    stored=       by name pattern: where it is kept, with its gradient and its optimiser state
    fully_shard=  for all others, or by name pattern: a `FullyShard`, or the axes of one

What `stored` shards is sharded beside what `params` shards: an axis that only `params` shards by shards in both places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spmd.expand.places.fully_shard import Axes, FullyShard, without_axes
from spmd.expand.places.places import Places
from spmd.expand.places.slices import present_spec
from spmd.expand.precision import MixedPrecision
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations import patterns as by_name
from spmd.tensor.annotations.patterns import Patterns, check_patterns, placed_spec, placements_for
from spmd.tensor.placement import Placement, Shard
from spmd.tensor.spec import Spec, reduced_spec, spec_of_value

OPEN = None
"""As a placement of `params=`: every op may choose where it reads the parameter."""

Sharding = FullyShard | Axes | Mapping[str, FullyShard | Axes | None] | None


@dataclass(frozen=True)
class PlacesTable:
    """The user's patterns on a mesh. `places` gives those of one parameter."""

    mesh: DeviceMesh
    params: Mapping[str, tuple[Placement, ...] | None]
    stored: Mapping[str, tuple[Placement, ...]]
    fully_shard: Mapping[str, FullyShard | None]
    precision: MixedPrecision | None = None
    _known: dict[tuple, Places] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, mesh: DeviceMesh, params: Patterns | None, stored: Patterns | None, sharding: Sharding, policy: Any = None
    ) -> PlacesTable:
        """The table, with everything checked that can be checked without tensors."""
        params = params or {}
        is_table = isinstance(params, Mapping)
        placed = {k: v for k, v in params.items() if v is not OPEN} if is_table else params
        placed = check_patterns(mesh, placed, "params")
        computed = {pattern: placed.get(pattern, OPEN) for pattern in params}
        stored = check_patterns(mesh, stored or {}, "stored")
        precision = None if policy is None else MixedPrecision.of(policy)
        return cls(mesh, computed, stored, _checked(mesh, sharding), precision)

    def require_matches(self, names: Sequence[str]) -> None:
        """ValueError for a pattern that matches none of the names."""
        by_name.require_matches(self.params, names, "params")
        by_name.require_matches(self.stored, names, "stored")
        by_name.require_matches([p for p in self.fully_shard if p != "*"], names, "fully_shard")

    def places(self, names: Sequence[str], t: torch.Tensor) -> Places:
        """The places of a parameter that has these names."""
        key = (tuple(names), spec_of_value(t), t.shape, t.dtype)
        if key not in self._known:
            self._known[key] = self._places(names, t)
        return self._known[key]

    def _places(self, names: Sequence[str], t: torch.Tensor) -> Places:
        wanted = placements_for(self.stored, names)
        sharding = None if wanted is not None else placements_for(self.fully_shard, names)
        computed = self._computed(names, t, self._keeping_axes(wanted, sharding))
        if wanted is not None:
            stored = _beside(computed, placed_spec(self.mesh, wanted, t, names[0]))
            found = Places(stored, computed, stored, stored, reduces_each=True, reshard=True)
        else:
            found = Places.same(computed) if sharding is None else sharding.places(computed)
        return replace(found, computed=None if self._is_open(names) else self._cast(computed))

    def _cast(self, computed: Spec) -> Spec:
        dtype = computed.dtype if self.precision is None else self.precision.computed(computed.dtype)
        return computed if dtype == computed.dtype else computed.with_tensor(computed.shape, dtype)

    def _keeping_axes(self, wanted: Sequence[Placement] | None, sharding: FullyShard | None) -> list[int]:
        """The axes that shard where a parameter is kept, and not where it is computed with."""
        if sharding is not None:
            return list(map(self.mesh.axis, sharding.state or sharding.axes))
        return [a for a, p in enumerate(wanted or ()) if isinstance(p, Shard)]

    def _computed(self, names: Sequence[str], t: torch.Tensor, keeping: Sequence[int]) -> Spec:
        """Where a parameter is computed with: by the patterns, else where it is without the axes that keep it."""
        wanted, present = placements_for(self.params, names), present_spec(t, self.mesh)
        if wanted is None and present is not None:
            return without_axes(reduced_spec(present), keeping)
        return placed_spec(self.mesh, wanted, t, names[0])

    def _is_open(self, names: Sequence[str]) -> bool:
        if OPEN not in self.params.values():
            return False
        matched = (p for p in self.params if any(by_name.matches(p, name) for name in names))
        return self.params[pattern] is OPEN if (pattern := next(matched, None)) is not None else False


def _checked(mesh: DeviceMesh, sharding: Sharding) -> dict[str, FullyShard | None]:
    if sharding is None:
        return {}
    by_pattern = sharding if isinstance(sharding, Mapping) else {"*": sharding}
    found = {pattern: _value(value) for pattern, value in by_pattern.items()}
    for pattern, value in found.items():
        if value is not None:
            try:
                value.check(mesh)
            except ValueError as error:
                raise ValueError(f"fully_shard {pattern!r}: {error}") from None
    return found


def _value(value: Any) -> FullyShard | None:
    if value is None or isinstance(value, FullyShard):
        return value
    if isinstance(value, (str, tuple, list)):
        return FullyShard(value)
    raise TypeError(
        f"fully_shard has {value!r}; give an axis, several axes, a FullyShard(...), or a dict of these by name pattern"
    )


def _beside(computed: Spec, stored: Spec) -> Spec:
    """The stored spec, with what only `computed` shards sharded alike. What both shard is outside what one shards."""
    kept = {a for axes in stored.dims for a in axes}
    dims, units = [], []
    for mine, theirs, unit, other in zip(stored.dims, computed.dims, stored.units, computed.units, strict=True):
        outer = tuple(a for a in theirs if a in mine or a not in kept)
        dims.append(outer + tuple(a for a in mine if a not in outer))
        units.append(unit if mine else other)
    return stored.with_layout(dims, units)
