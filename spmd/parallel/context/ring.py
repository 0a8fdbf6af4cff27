"""Ring attention: parts of the sequence go round the ranks, and each rank computes with what is there.

    pass-KV     keys and values go round, the results of a rank's rows stay      n - 1 times |k| + |v| a rank
    pass-Q      queries go round, and results follow them home                   n - 1 times |q| + |out| + sums
    all at once keys and values are gathered in one collective                   as many bytes as pass-KV

While one part is computed with, the next is on its way. A part comes home after n steps, so what it collects on its
way - results, gradients - is sent n - 1 times: what its own rank adds stays there until it is back. Results are merged
by the logarithms of their sums, in float32 at least.

H. Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889; A. Yang et al., Context Parallelism for
Scalable Million-Token Inference, arXiv:2411.01783, for pass-Q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F

from spmd.comm import all_gather_tensor, permute_tensor, reduce_scatter_tensor, wait
from spmd.mesh import DeviceMesh, per_rank
from spmd.parallel.context.kernel import attend, gradients
from spmd.parallel.context.layout import Chunk, Layout, Tile, tiles
from spmd.tensor.recipes.attention import merged

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Ring:
    """How a call of attention goes round: over which axis, by which schedule, and which positions ranks have.

    method: "ring" for pass-KV, "ring_q" for pass-Q, "allgather". mask_is: of "keys", [b, h, 1, keys of the rank], or of
    "rows", [b, h, rows of the rank, all keys in order]; None where there is no mask.
    """

    mesh: DeviceMesh
    axis: str
    method: str
    rows: Layout
    keys: Layout
    causal: bool
    scale: float
    mask_is: str | None

    @property
    def n(self) -> int:
        return len(self.rows.chunks)

    def place(self) -> int:
        """Of this rank, on the axis."""
        return self.mesh.get_local_rank(self.axis)

    def layout(self, side: str) -> Layout:
        return self.rows if side == "rows" else self.keys

    def places(self, i: int) -> tuple[int, int]:
        """At the i-th step, whose rows are computed with here, and whose keys."""
        here, other = self.place(), (self.place() - i) % self.n
        return (other, here) if self.method == "ring_q" else (here, other)

    def tiles(self, i: int) -> tuple[Tile, ...]:
        return tiles(self.rows, self.keys, *self.places(i), self.causal)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's rows to the keys of all ranks."""

    @staticmethod
    def forward(ctx, q, k, v, mask, ring: Ring):
        out, sums = _attention(ring, q, k, v, mask)
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, sums, *(() if mask is None else (mask,)))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, k, v, out, sums, *mask = ctx.saved_tensors
        return *_gradients(ctx.ring, (q, g, out, sums), (k, v), *mask or (None,)), None, None


def _attention(ring: Ring, q, k, v, mask) -> Tensors:
    rows, keys = _sides(ring, (q,), (k, v), mask)
    if ring.method == "ring_q":
        own = _go_round(ring, _packed(ring, "rows", rows), functools.partial(_rows_visit, ring, keys), _merged)
        return _cut(ring, "rows", own)
    results: list[Tensors] = []

    def visit(luggage: Tensors, i: int) -> None:
        results[:] = [_results(ring, i, rows, luggage, *results)]

    (_all_at_once if ring.method == "allgather" else _go_round)(ring, _packed(ring, "keys", keys), visit, _added)
    return results[0]


def _rows_visit(ring: Ring, keys: Tensors, luggage: Tensors, i: int) -> Tensors:
    return _results(ring, i, luggage, keys)


def _gradients(ring: Ring, rows: Tensors, keys: Tensors, mask) -> Tensors:
    wanted = [x.dtype for x in (rows[0], *keys)]
    rows, keys = _sides(ring, rows, keys, mask)
    by_rows, stays = ring.method == "ring_q", []

    def visit(luggage: Tensors, i: int) -> Tensors:
        if by_rows:
            of_q, *stays[:] = _terms(ring, i, luggage, keys, (None, *(stays or (None, None))))
            return (of_q,)
        of_q, *of_keys = _terms(ring, i, rows, luggage, (*(stays or (None,)), None, None))
        stays[:] = [of_q]
        return tuple(of_keys)

    side, tensors = ("rows", rows) if by_rows else ("keys", keys)
    go = _all_at_once if ring.method == "allgather" else _go_round
    home = _cut(ring, side, go(ring, _packed(ring, side, tensors), visit, _added))
    found = (*home, *stays) if by_rows else (*stays, *home)
    return tuple(x.to(dtype) for x, dtype in zip(found, wanted, strict=True))


def _sides(ring: Ring, rows: Tensors, keys: Tensors, mask) -> tuple[Tensors, Tensors]:
    """What belongs to the rows and what to the keys: the mask goes with one of them, as its last tensor."""
    if ring.mask_is == "rows":
        return (*rows, mask), keys
    return rows, (*keys, mask) if ring.mask_is == "keys" else keys


# ---- on the way -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Luggage:
    """Tensors packed in one flat tensor for each dtype, as they are sent."""

    flats: Tensors
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Luggage:
        kinds = dict.fromkeys(x.dtype for x in tensors)
        flats = tuple(_flat([x for x in tensors if x.dtype is kind]) for kind in kinds)
        return cls(flats, tuple((x.dtype, tuple(x.shape)) for x in tensors))

    def unpacked(self) -> Tensors:
        kinds = dict.fromkeys(dtype for dtype, _ in self.tensors)
        rest = {
            kind: iter(flat.split([prod(shape) for dtype, shape in self.tensors if dtype is kind]))
            for kind, flat in zip(kinds, self.flats, strict=True)
        }
        return tuple(next(rest[dtype]).view(shape) for dtype, shape in self.tensors)

    def to_next(self, ring: Ring) -> Luggage:
        """What comes from the rank before, while this goes to the rank behind. It is on its way."""
        behind = [(i + 1) % ring.n for i in range(ring.n)]
        return replace(self, flats=tuple(permute_tensor(x, behind, (ring.mesh, ring.axis)) for x in self.flats))

    def arrived(self) -> Luggage:
        return replace(self, flats=tuple(map(wait, self.flats)))


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all, each copied once, however they lie in memory."""
    sizes = [x.numel() for x in tensors]
    flat = tensors[0].new_empty(sum(sizes))
    for part, x in zip(flat.split(sizes), tensors, strict=True):
        part.view(x.shape).copy_(x)
    return flat


Visit = Callable[[Tensors, int], Tensors | None]
"""Computes with the luggage of the rank i places before; what it gives goes home to that rank."""
Join = Callable[[Tensors, Tensors], Tensors]


def _go_round(ring: Ring, luggage: Luggage, visit: Visit, join: Join) -> Tensors | None:
    """What this rank's luggage brings home: all that `visit` gave for it, joined."""
    own = following = None
    for i in range(ring.n):
        coming = luggage.to_next(ring) if i < ring.n - 1 else None
        takes = visit(luggage.unpacked(), i)
        if i == 0:
            own = takes
        elif takes is not None:
            takes = takes if following is None else join(following.arrived().unpacked(), takes)
            following = Luggage.of(takes).to_next(ring)
        luggage = coming and coming.arrived()
    return own if following is None else join(own, following.arrived().unpacked())


def _all_at_once(ring: Ring, luggage: Luggage, visit: Visit, join: Join) -> Tensors | None:
    """As `_go_round`, with one gather, and one reduction of sums."""
    group = ring.mesh, ring.axis
    coming = [all_gather_tensor(x.unsqueeze(0), 0, group) for x in luggage.flats]
    taken = [visit(luggage.unpacked(), 0)]
    every = [wait(x) for x in coming]
    taken += [visit(replace(luggage, flats=_before(ring, every, i)).unpacked(), i) for i in range(1, ring.n)]
    if taken[0] is None:
        return None
    packed = [Luggage.of(x) for x in taken]
    by_owner = [_by_owner(ring, [p.flats[j] for p in packed]) for j in range(len(packed[0].flats))]
    sums = [wait(reduce_scatter_tensor(x, "sum", 0, group)) for x in by_owner]
    return replace(packed[0], flats=tuple(sums)).unpacked()


@per_rank
def _before(ring: Ring, every: Sequence[torch.Tensor], i: int) -> Tensors:
    """Of tensors of all ranks, that of the rank i places before."""
    return tuple(x[(ring.place() - i) % ring.n] for x in every)


@per_rank
def _by_owner(ring: Ring, taken: Sequence[torch.Tensor]) -> torch.Tensor:
    """What is for all ranks, in their order, of what is for the ranks 0, 1, ... places before."""
    return torch.cat([taken[(ring.place() - owner) % ring.n] for owner in range(ring.n)])


def _added(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Tensors:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _merged(a: Tensors, b: Tensors) -> Tensors:
    return merged(*a, *b)


# ---- of a rank --------------------------------------------------------------------------------


def _packed(ring: Ring, side: str, tensors: Tensors) -> Luggage:
    return Luggage.of(_padded(ring, side, tensors) if len(set(ring.layout(side).lengths)) > 1 else tensors)


@per_rank
def _padded(ring: Ring, side: str, tensors: Tensors) -> Tensors:
    """The tensors as long as those of the rank with the most positions."""
    lengths = ring.layout(side).lengths
    more = max(lengths) - lengths[ring.place()]
    dims = (2, 2, 3) if side == "keys" else (2,) * len(tensors)  # those of positions; a mask of keys has them last
    return tuple(F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, more]) for x, dim in zip(tensors, dims, strict=False))


@per_rank
def _cut(ring: Ring, side: str, tensors: Tensors) -> Tensors:
    return tuple(x[:, :, : ring.layout(side).lengths[ring.place()]] for x in tensors)


@per_rank
def _results(ring: Ring, i: int, rows: Tensors, keys: Tensors, before: Tensors | None = None) -> Tensors:
    """Results of rows and their sums, in the precision of the sums: to these keys, and what was found before."""
    q, (k, v) = rows[0], keys[:2]
    for tile in ring.tiles(i):
        mask = _mask(ring, i, tile, rows, keys)
        out, sums = attend(_at(q, tile.rows), _at(k, tile.keys), _at(v, tile.keys), mask, tile.causal, ring.scale)
        found = out.to(sums.dtype), sums
        if before is not None:
            found = merged(*(_at(x, tile.rows) for x in before), *found)
        if tile.rows != (0, q.shape[2]):
            before = before or _nothing(q, v, sums.dtype)
            found = tuple(_put(x, tile.rows, y) for x, y in zip(before, found, strict=True))
        before = found
    return before or _nothing(q, v, torch.float64 if q.dtype is torch.float64 else torch.float32)


def _nothing(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """The results of no keys."""
    return q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)


@per_rank
def _terms(ring: Ring, i: int, rows: Tensors, keys: Tensors, before: tuple[torch.Tensor | None, ...]) -> Tensors:
    """The gradients of rows, keys and values from what these rows see of these keys, in the precision of the sums.

    before: of each, what they are added to, in place.
    """
    (q, g, out, sums), (k, v), found = rows[:4], keys[:2], list(before)
    for tile in ring.tiles(i):
        at, of = tile.rows, tile.keys
        mask = _mask(ring, i, tile, rows, keys)
        given = _at(g, at), _at(q, at), _at(k, of), _at(v, of), _at(out, at), _at(sums, at)
        terms = gradients(*given, mask, tile.causal, ring.scale)
        for j, (x, part) in enumerate(((q, at), (k, of), (v, of))):
            if found[j] is not None:
                _at(found[j], part).add_(terms[j])
            elif part == (0, x.shape[2]):
                found[j] = terms[j].to(sums.dtype)
            else:
                found[j] = _put(torch.zeros_like(x, dtype=sums.dtype), part, terms[j])
    pairs = zip((q, k, v), found, strict=True)
    return tuple(torch.zeros_like(x, dtype=sums.dtype) if y is None else y for x, y in pairs)


@per_rank
def added_mask(mask: torch.Tensor, q: torch.Tensor, kind: str) -> torch.Tensor:
    """What is added to the scores, with four dims."""
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return mask.expand(-1, -1, q.shape[2], -1).to(q.dtype) if kind == "rows" else mask.to(q.dtype)


def _mask(ring: Ring, i: int, tile: Tile, rows: Tensors, keys: Tensors) -> torch.Tensor | None:
    if ring.mask_is == "keys":
        return keys[2][..., slice(*tile.keys)]
    if ring.mask_is is None:
        return None
    mask, owner = rows[-1], ring.places(i)[1]
    columns = ring.keys.positions(owner)[slice(*tile.keys)]
    return _at(mask, tile.rows)[..., columns]


def _at(x: torch.Tensor, part: Chunk) -> torch.Tensor:
    return x if part == (0, x.shape[2]) else x[:, :, slice(*part)]


def _put(x: torch.Tensor, part: Chunk, y: torch.Tensor) -> torch.Tensor:
    x[:, :, slice(*part)] = y
    return x
