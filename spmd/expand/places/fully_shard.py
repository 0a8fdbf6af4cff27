"""`FullyShard`: the common places of parameters, by one word.

    fully_shard="dp"                                       ZeRO-3 over dp
    fully_shard=FullyShard("dp", level=1)                  ZeRO-1
    fully_shard=FullyShard("host", state=("host", "pod"))  in shards over host, with optimiser state over both
    fully_shard={"*.mlp.*": "dp", "*": FullyShard("dp", 1)}

An axis of the data that is not named replicates parameters, which is hybrid sharding. Axes that `params=` shards by
keep what they shard, so tensor parallelism goes beside it, on another dim or on the same. On the same dim, the shards
of fully sharded training are inside those of tensor parallelism: a gather over dp gives the block of tp.

The dim that is sharded is the largest whose blocks can be shared out evenly, else the one with the least padding. A
tensor without a dim that has an index for every rank, such as a number, stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from spmd.comm.chunk import lengths
from spmd.expand.places.places import Places, Reshard
from spmd.mesh import DeviceMesh
from spmd.tensor.spec import Spec

Axes = str | Sequence[str]

LEVELS = {1: "the optimiser's state", 2: "state and gradients", 3: "state, gradients and parameters"}


@dataclass(frozen=True)
class FullyShard:
    """Keep the state of training in shards over an axis of the mesh, or over several.

    axes: an axis or several, the outermost first. level: 1 for the optimiser's state, 2 for gradients too, 3 for
    parameters too. reshard_after_forward: whether a parameter that was gathered for the forward is freed after its
    last reader there, and gathered again for the backward: True, False, or "cost" to keep those that do not add to the
    most bytes that are gathered at once. state: the axes of the optimiser's state where there are more than `axes`.

    The meanings are those of torch's `fully_shard`; level 1 and `state` are not in torch.

    >>> FullyShard("dp", level=2)
    FullyShard(axes=('dp',), level=2, reshard_after_forward=True, state=None)
    """

    axes: Axes
    level: int = 3
    reshard_after_forward: Reshard = True
    state: Axes | None = None

    def __post_init__(self):
        object.__setattr__(self, "axes", _names(self.axes))
        object.__setattr__(self, "state", None if self.state is None else _names(self.state))
        if self.level not in LEVELS:
            levels = ", ".join(f"{n} ({what})" for n, what in LEVELS.items())
            raise ValueError(f"FullyShard(level={self.level!r}): the levels are {levels}")
        if self.reshard_after_forward not in (True, False, "cost"):
            raise ValueError(f"reshard_after_forward is {self.reshard_after_forward!r}; give True, False or 'cost'")
        if self.state is not None and not set(self.axes) <= set(self.state):
            raise ValueError(f"state={self.state} has to name {', '.join(self.axes)} too: state is where shards are")

    def check(self, mesh: DeviceMesh) -> None:
        """ValueError for an axis that the mesh does not have."""
        for axis in (*self.axes, *(self.state or ())):
            mesh.axis(axis)

    def places(self, computed: Spec) -> Places:
        """The places of a parameter that is computed with in this place."""
        shard = sharded_over(computed, self.axes)
        state = shard if self.state is None else sharded_over(shard, self.state)
        stored = shard if self.level == 3 else computed
        reshard = self.reshard_after_forward if self.level == 3 else False  # what is kept whole is not gathered twice
        return Places(stored, computed, state, state, self.level > 1, reshard)


def _names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def sharded_over(spec: Spec, axes: Sequence[str]) -> Spec:
    """The spec with one dim sharded over these axes too, inside what shards it already. Axes in use are left out."""
    used = {a for dim in spec.dims for a in dim}
    new = tuple(a for a in map(spec.mesh.axis, axes) if a not in used and spec.mesh.shape[a] > 1)
    dim = best_dim(spec, new)
    return spec if dim is None else sharded_on(spec, dim, new)


def sharded_on(spec: Spec, dim: int, axes: Sequence[int]) -> Spec:
    """The spec with this dim sharded over these axes too, inside what shards it already."""
    dims = [(*at, *axes) if d == dim else at for d, at in enumerate(spec.dims)]
    return spec.with_layout(dims, spec.units)


def best_dim(spec: Spec, axes: Sequence[int]) -> int | None:
    """The dim that shares a tensor out over axes with the least padding, of equal ones the largest; None where no dim
    has something for every rank."""
    n = prod(spec.mesh.shape[a] for a in axes)
    if n == 1:
        return None
    local = spec.local_shape((0,) * spec.mesh.ndim)
    ranked = [(padding(spec, d, axes), -local[d], d) for d in range(spec.ndim) if local[d] >= n]
    return min(ranked, default=(0, 0, None))[-1]


def padding(spec: Spec, dim: int, axes: Sequence[int]) -> float:
    """How much more than an even share the fullest rank would have, if the axes sharded this dim too."""
    ns = tuple(spec.mesh.shape[a] for a in (*spec.dims[dim], *axes))
    most = max(lengths(spec.shape[dim], spec.units[dim], ns))
    return most * prod(ns) / spec.shape[dim] - 1


def without_axes(spec: Spec, axes: Sequence[int]) -> Spec:
    """The spec with nothing sharded over these axes."""
    return spec.with_layout([tuple(a for a in at if a not in axes) for at in spec.dims], spec.units)
