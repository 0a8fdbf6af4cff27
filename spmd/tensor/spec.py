"""A spec says how one tensor is laid out on a mesh.

Canonical form: for each tensor dim the *ordered* tuple of axes that shard it, outermost first, and its unit; for each
axis at most one reduce kind; the global shape, stride and dtype. An axis that is not named replicates. Specs are
immutable and interned: equal specs are one object. So two specs are compared by `is`, and a cache key is a tuple of
identities.

    f32[8@dp, 16@tp] +sum@pp        dim 0 is sharded over dp, dim 1 over tp, and a sum over pp is still owed
    i64[30@dp/5]                    sharded over dp, in units of 5
    f32[8@dp,tp, 16]                dim 0 is sharded over dp, and each block of it over tp
    f32[3x256@tp, 64]               dim 0, of 768, is three blocks of 256; each of the three is sharded over tp

Users give one placement for each axis; the property `placements` has this form. It can only express the mesh's order
of axes; `Spec.of(..., dims=...)` can express any order.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

import torch

from spmd.comm import chunk
from spmd.comm.chunk import Packed, Side, Unit, joined_unit, smallest_unit, split_unit
from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.tensor.placement import REDUCE_OPS, REPLICATE, Partial, Placement, Replicate, Shard

_interned: weakref.WeakValueDictionary[tuple, Spec] = weakref.WeakValueDictionary()
_lock = threading.Lock()

DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "b8",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


class Spec:
    """How one tensor is laid out on a mesh. Made by `spec_of` (placements) or `Spec.of` (canonical form)."""

    mesh: DeviceMesh
    dims: tuple[tuple[int, ...], ...]
    units: tuple[Unit, ...]
    partial: tuple[tuple[int, str], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(mesh, shape, dtype, *, stride=None, dims=None, units=None, partial=()) -> Spec:
        """The one spec with this content. Axes are numbers; axes of size 1 are dropped from `dims` and `partial`."""
        shape = tuple(shape)
        live = [n > 1 for n in mesh.shape]
        dims = tuple(tuple(a for a in axes if live[a]) for axes in dims) if dims else ((),) * len(shape)
        ns = [tuple(mesh.shape[a] for a in axes) for axes in dims]
        units = units or (1,) * len(shape)
        units = tuple(smallest_unit(s, u, n) if n else 1 for s, u, n in zip(shape, units, ns, strict=True))
        partial = tuple(sorted((a, kind) for a, kind in partial if live[a]))
        stride = contiguous(shape) if stride is None else tuple(stride)
        key = (mesh, dims, units, partial, shape, stride, dtype)
        found = _interned.get(key)
        return found if found is not None else _intern(key)

    def __reduce__(self):
        return remake, (self.mesh, self.dims, self.units, self.partial, self.shape, self.stride, self.dtype)

    def with_layout(self, dims=None, units=None, partial=()) -> Spec:
        """The spec of the same tensor with this layout; all else is equal."""
        if type(dims) is type(units) is type(partial) is tuple:  # in canonical form it is its own key
            found = _interned.get((self.mesh, dims, units, partial, self.shape, self.stride, self.dtype))
            if found is not None:
                return found
        return Spec.of(
            self.mesh, self.shape, self.dtype, stride=self.stride, dims=dims, units=units, partial=partial
        )

    def same_layout(self, other: Spec) -> bool:
        """Whether two specs of one tensor differ at most in strides, so that no move is needed between them."""
        return (self.dims, self.units, self.partial) == (other.dims, other.units, other.partial)

    def moved_to(self, dims=None, units=None, partial=()) -> Spec:
        """The spec after moves to this layout. Moves leave contiguous blocks; if nothing moves, the strides stay."""
        target = self.with_layout(dims, units, partial)
        return target if target is self else target.with_tensor(self.shape)

    def with_tensor(self, shape, dtype=None, stride=None) -> Spec:
        """The same layout over a tensor of another shape with as many dims."""
        return Spec.of(
            self.mesh, shape, dtype or self.dtype, stride=stride, dims=self.dims, units=self.units, partial=self.partial
        )

    # ---- placements ---------------------------------------------------------------------------
    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each axis of the mesh, as users give them."""
        return tuple(self.on(axis) for axis in range(self.mesh.ndim))

    def on(self, axis: int) -> Placement:
        """The placement on this axis."""
        return self._placement_by_axis.get(axis, REPLICATE)

    @cached_property
    def _placement_by_axis(self) -> dict[int, Placement]:
        units = [split_unit(unit) for unit in self.units]
        shards = {a: Shard(d, *reversed(units[d])) for d, axes in enumerate(self.dims) for a in axes}
        return shards | {a: Partial(kind) for a, kind in self.partial}

    @cached_property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    # ---- sizes --------------------------------------------------------------------------------
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def local_nbytes(self) -> int:
        """Bytes of the largest block, the one at coordinate 0."""
        return prod(self.local_shape((0,) * self.mesh.ndim)) * self.dtype.itemsize

    @cached_property
    def is_packed(self) -> bool:
        """Whether the block of some rank has several intervals of a dim."""
        return any([isinstance(unit, Packed) for unit in self.units])

    @cached_property
    def is_reordered(self) -> bool:
        """Whether several axes shard a dim in another order than that of the mesh."""
        return any([list(axes) != sorted(axes) for axes in self.dims])

    def side(self, dim: int, coordinate: Sequence[int]) -> Side:
        """Which indices of `dim` the rank at `coordinate` has."""
        return chunk.side(*self._cut_of(dim, coordinate)) if self.dims[dim] else (0, self.shape[dim])

    def length(self, dim: int, coordinate: Sequence[int]) -> int:
        """How many indices of `dim` the rank at `coordinate` has."""
        return chunk.length_of(*self._cut_of(dim, coordinate)) if self.dims[dim] else self.shape[dim]

    def block(self, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Start and length along `dim`, which is not packed, of the block of the rank at `coordinate`."""
        start, stop = self.side(dim, coordinate)
        return start, stop - start

    def _cut_of(self, dim: int, coordinate: Sequence[int]) -> tuple:
        axes = self.dims[dim]
        ns = tuple(self.mesh.shape[a] for a in axes)
        return self.shape[dim], self.units[dim], ns, tuple(coordinate[a] for a in axes)

    def box(self, coordinate: Sequence[int]) -> tuple[Side, ...]:
        """For each dim, which indices of the global tensor the rank at `coordinate` has: where they start and stop."""
        found = self._boxes.get(coordinate)
        if found is None:
            found = tuple(self.side(d, coordinate) for d in range(len(self.shape)))
            self._boxes[tuple(coordinate)] = found
        return found

    @cached_property
    def _boxes(self) -> dict[tuple[int, ...], tuple[Side, ...]]:
        return {}

    def aligned(self, dim: int, unit: Unit) -> bool:
        """Whether every rank's block of `dim` begins at a multiple of `unit` (`spmd.comm.chunk.aligned`)."""
        ns = tuple(self.mesh.shape[a] for a in self.dims[dim])
        return chunk.aligned(self.shape[dim], self.units[dim], ns, unit)

    @cached_property
    def _local_shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    @cached_property
    def _shapes_here(self) -> dict[int, tuple[int, ...]]:
        return {}

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape of the block of the rank at `coordinate`."""
        found = self._local_shapes.get(coordinate)
        if found is None:
            found = tuple(self.length(d, coordinate) if axes else self.shape[d] for d, axes in enumerate(self.dims))
            self._local_shapes[tuple(coordinate)] = found
        return found

    @per_rank
    def local_shape_here(self) -> tuple[int, ...]:
        """The shape of the current rank's block; (0,) if the rank is not in the mesh and so holds nothing."""
        rank = current_rank()
        found = self._shapes_here.get(rank)
        if found is None:
            at = self.mesh.get_coordinate()
            found = self._shapes_here[rank] = (0,) if at is None else self.local_shape(at)
        return found

    def local_stride(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Strides of the block, with the same order of dims as in the global tensor."""
        return strides_like(self.local_shape(coordinate), self.stride)

    # ---- text ---------------------------------------------------------------------------------
    def __str__(self):
        return "".join(_parts(self))

    def __repr__(self):
        return f"Spec({self!s} on {self.mesh!r})"


def _intern(key: tuple) -> Spec:
    mesh, dims, units, partial, shape, _, dtype = key
    _check_layout(mesh, dims, units, partial, shape)
    _check_kinds([kind for _, kind in partial], dtype)
    spec = object.__new__(Spec)
    spec.mesh, spec.dims, spec.units, spec.partial, spec.shape, spec.stride, spec.dtype = key
    with _lock:
        return _interned.setdefault(key, spec)


def remake(mesh, dims, units, partial, shape, stride, dtype) -> Spec:
    """The spec with this content; unpickling a spec calls it."""
    return Spec.of(mesh, shape, dtype, stride=stride, dims=dims, units=units, partial=partial)


def _check_layout(mesh, dims, units, partial, shape) -> None:
    if len(dims) != len(shape):
        raise ValueError(f"a tensor of shape {list(shape)} has {len(shape)} dims, but {len(dims)} are laid out")
    used = [a for axes in dims for a in axes] + [a for a, _ in partial]
    twice = [mesh.axis_name(a) for a in sorted(set(used)) if used.count(a) > 1]
    if twice:
        raise ValueError(f"axis {twice[0]} is used twice in one spec; it shards one dim, or is partial, or neither")
    for size, unit, axes in zip(shape, units, dims, strict=True):
        blocks, inner = split_unit(unit)
        if axes and size % blocks:
            raise ValueError(f"a dim of {size} does not divide into {blocks} blocks; the number must divide the dim")
        if axes and not chunk.is_unit_of(size, unit):
            of = f"a dim of {size}" if blocks == 1 else f"a block of {size // blocks}"
            raise ValueError(f"{of} does not divide into units of {inner}; the unit must divide it")


def commute(kinds: Iterable[str]) -> bool:
    """Whether reductions of these kinds may be done in any order. Only then may one spec have all of them.

    >>> commute(["max", "max"]), commute(["sum", "avg"]), commute(["sum", "max"])
    (True, True, False)
    """
    found = set(kinds)
    return len(found) < 2 or found == {"sum", "avg"}


def _check_kinds(kinds: Sequence[str], dtype: torch.dtype) -> None:
    if not commute(kinds):
        raise ValueError(
            f"{' and '.join(dict.fromkeys(kinds))} in one spec: they give another tensor in another order; "
            "reduce one of them first"
        )
    for kind in kinds:
        if not _supports(dtype, kind):
            raise ValueError(f"there is no {WORDS[kind]} of {DTYPES.get(dtype, dtype)}; Partial({kind!r}) does not fit")


WORDS = {"sum": "sum", "avg": "average", "max": "maximum", "min": "minimum", "product": "product"}


def _supports(dtype: torch.dtype, kind: str) -> bool:
    """Whether tensors of this dtype can be reduced so.

    Integers have no average; bools have only a maximum (any) and a minimum (all). Complex numbers have no order, and no
    backend multiplies them.
    """
    if dtype.is_floating_point:
        return True
    if dtype.is_complex:
        return kind in ("sum", "avg")
    return kind in ("max", "min") if dtype is torch.bool else kind != "avg"


# ---- from placements --------------------------------------------------------------------------


Order = Mapping[int, Sequence[int | str]]
"""For a dim that several axes shard: these axes, outermost first."""


def spec_of_value(x: object) -> Spec | None:
    """The spec that a value carries, as a DTensor does; None for a plain tensor."""
    return getattr(x, "_spec", None)


def spec_of(
    mesh: DeviceMesh, placements: Sequence[Placement], shape, dtype=torch.float32, *, stride=None,
    order: Order | None = None,
) -> Spec:  # fmt: skip
    """The spec of a tensor of global `shape` with these placements, one for each axis of the mesh.

    Several axes may shard one dim. Then the order is that of the mesh, with the first axis outermost, unless `order`
    gives another.

    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> print(spec_of(mesh, [Shard(0), Partial()], (8, 16)))
    f32[8@dp, 16] +sum@tp
    >>> print(spec_of(mesh, [Shard(0), Shard(0)], (8, 16), order={0: ("tp", "dp")}))
    f32[8@tp,dp, 16]
    """
    shape = tuple(shape)
    placements = check_placements(mesh, placements, len(shape))
    dims: list[tuple[int, ...]] = [()] * len(shape)
    units: list[Unit] = [1] * len(shape)
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            if dims[p.dim]:
                _check_cut_alike(p.dim, units[p.dim], p.units)
            dims[p.dim] += (axis,)
            units[p.dim] = p.units
    partial = [(a, p.reduce_op) for a, p in enumerate(placements) if isinstance(p, Partial)]
    for dim, axes in (order or {}).items():
        dims[dim] = _checked_order(mesh, dims, dim, axes)
    return Spec.of(mesh, shape, dtype, stride=stride, dims=dims, units=tuple(units), partial=partial)


def _check_cut_alike(dim: int, one: Unit, other: Unit) -> None:
    (blocks, unit), (more_blocks, more_units) = split_unit(one), split_unit(other)
    if blocks != more_blocks:
        raise ValueError(f"two axes shard dim {dim} in {blocks} and in {more_blocks} blocks; give one number of blocks")
    if unit != more_units:
        raise ValueError(f"two axes shard dim {dim} in units of {unit} and {more_units}; give one unit")


def _checked_order(
    mesh: DeviceMesh, dims: list[tuple[int, ...]], dim: int, axes: Sequence[int | str]
) -> tuple[int, ...]:
    """The axes as numbers; they have to be those that the placements shard the dim by."""
    if not -len(dims) <= dim < len(dims):
        raise ValueError(f"order names dim {dim} of a tensor of {len(dims)} dims")
    found = tuple(mesh.axis(a) for a in axes)
    if sorted(found) != sorted(dims[dim]):
        sharding = ", ".join(map(mesh.axis_name, dims[dim])) or "none"
        raise ValueError(
            f"order {tuple(axes)} of dim {dim}: the placements shard it by {sharding}; name each of these axes once"
        )
    return found


def placed(spec: Spec, placements: Sequence[Placement]) -> Spec:
    """The spec of the same tensor with these placements; its own order of axes where they shard the same dims."""
    dims: list[tuple[int, ...]] = [()] * spec.ndim
    units: list[Unit] = [1] * spec.ndim
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            units[p.dim] = max(units[p.dim], p.units, key=split_unit) if dims[p.dim] else p.units
            dims[p.dim] = (*dims[p.dim], axis)
    kept = [own if sorted(own) == sorted(new) else new for own, new in zip(spec.dims, dims, strict=True)]
    partial = [(axis, p.reduce_op) for axis, p in enumerate(placements) if isinstance(p, Partial)]
    layout = spec.with_layout(kept, units, partial)
    return layout if layout is spec else layout.with_tensor(spec.shape)


def check_placements(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """The placements, with dims counted from the front. If one does not fit, an error names it."""
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{len(placements)} placements {list(placements)} for a mesh of {mesh.ndim} axes; give one per axis"
        )
    return tuple(_check_placement(mesh, axis, p, ndim) for axis, p in enumerate(placements))


def _check_placement(mesh, axis, p, ndim) -> Placement:
    if not isinstance(p, Placement):
        raise TypeError(f"placement on {mesh.axis_name(axis)} is {p!r}; use Shard(dim), Replicate() or Partial(op)")
    if not isinstance(p, Shard):
        return p
    if not -ndim <= p.dim < ndim:
        allowed = f"-{ndim} to {ndim - 1}" if ndim else "none: it has no dims"
        raise ValueError(f"{p} on {mesh.axis_name(axis)}: the tensor has {ndim} dims; allowed dims are {allowed}")
    return p.at(p.dim % ndim)


# ---- notation ---------------------------------------------------------------------------------


def _parts(spec: Spec) -> Iterator[str]:
    name = spec.mesh.axis_name
    dims = []
    for size, axes, unit in zip(spec.shape, spec.dims, spec.units, strict=True):
        at = f"@{','.join(map(name, axes))}" if axes else ""
        blocks, inner = split_unit(unit)
        blocks_of = f"{blocks}x{size // blocks}" if blocks > 1 else str(size)
        dims.append(f"{blocks_of}{at}{f'/{inner}' if inner > 1 else ''}")
    yield f"{DTYPES.get(spec.dtype, str(spec.dtype).removeprefix('torch.'))}[{', '.join(dims)}]"
    for axis, kind in spec.partial:
        yield f" +{kind}@{name(axis)}"


_SPEC = re.compile(r"(\w+)\[(.*)\]((?: \+\w+@\w+)*)")
_DIM = re.compile(r"(?:(\d+)x)?(\d+)(?:@([\w,]+))?(?:/(\d+))?(?:, |$)")


def parse_spec(text: str, mesh: DeviceMesh) -> Spec:
    """The spec that prints as `text`, with contiguous strides.

    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> parse_spec("f32[8@tp,dp, 16]", mesh).dims
    ((1, 0), ())
    >>> parse_spec("f32[3x256@tp, 64]", mesh).placements
    (Replicate(), Shard(0, blocks=3))
    """
    found = _SPEC.fullmatch(text.strip())
    kinds = {name: dtype for dtype, name in DTYPES.items()}
    dtype = kinds.get(found[1], getattr(torch, found[1], None)) if found else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is no spec; one reads like f32[8@dp, 16@tp] +sum@pp")
    entries = _DIM.findall(found[2])
    dims = [tuple(mesh.axis(a) for a in axes.split(",") if a) for _, _, axes, _ in entries]
    partial = [part.split("@") for part in found[3].replace("+", "").split()]
    bad = [kind for kind, _ in partial if kind not in REDUCE_OPS]
    if bad:
        raise ValueError(f"{text!r}: {bad[0]} is no reduce kind; use one of {', '.join(REDUCE_OPS)}")
    return Spec.of(
        mesh, [int(blocks or 1) * int(size) for blocks, size, _, _ in entries], dtype, dims=dims,
        units=tuple(joined_unit(int(blocks or 1), int(unit or 1)) for blocks, _, _, unit in entries),
        partial=[(mesh.axis(a), kind) for kind, a in partial],
    )


# ---- strides ----------------------------------------------------------------------------------


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def strides_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dense strides for `shape` with the order of dims that `stride` has; expanded dims stay expanded.

    >>> strides_like((2, 3), (1, 4))
    (1, 2)
    """
    order = sorted(range(len(shape)), key=lambda d: (stride[d], -d))
    out, step = [0] * len(shape), 1
    for d in order:
        if stride[d] == 0 and shape[d] != 1:
            continue
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def dense_strides(shape: Sequence[int], stride: Sequence[int], thin: Collection[int]) -> tuple[int, ...]:
    """Dense strides for `shape`, with the order of dims of a block that has these strides. The block may have gaps.

    thin: dims whose strides are not read, because they say nothing on some rank. Where the other dims are in the order
    of a contiguous tensor, so are these; else they come first in memory, with the largest strides.

    >>> dense_strides((5, 3, 4), (12, 1, 3), thin={0}), dense_strides((5, 3, 4), (99, 4, 1), thin={0})
    ((12, 1, 3), (12, 4, 1))
    """
    order = sorted((d for d in range(len(shape)) if d not in thin), key=lambda d: (stride[d], -d))
    expanded = [d for d in order if stride[d] == 0]
    if not expanded and order == sorted(order, reverse=True):
        return contiguous(shape)
    out, step = [0] * len(shape), 1
    for d in (*order[len(expanded) :], *sorted(thin, reverse=True)):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def replicated(spec: Spec) -> Spec:
    """The spec of the same tensor, replicated on every rank."""
    return spec.with_layout()


def reduced_spec(spec: Spec) -> Spec:
    """The same layout with all reductions done."""
    return spec.with_layout(spec.dims, spec.units)


__all__ = [
    "Replicate", "Spec", "check_placements", "contiguous", "dense_strides", "parse_spec", "reduced_spec", "replicated",
    "spec_of", "strides_like",
]  # fmt: skip
