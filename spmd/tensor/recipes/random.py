"""Random numbers that do not depend on the mesh.

    spmd.manual_seed(0)
    x = spmd.randn(8192, 8192, device_mesh=mesh, placements=[Shard(0), Shard(1)])

gives the same *global* tensor on any mesh and with any placements, also on one rank. So do `x.uniform_()`, dropout,
`nn.init` and all other ops that draw random numbers. A rank computes its block and little more.

One call of an op that draws is a *draw*. Draws are numbered. The global tensor is divided into tiles in a way that
depends on its shape alone. Each tile is filled by a generator that is seeded from (seed, number of the draw, number of
the tile). A rank fills the tiles that its block overlaps and keeps the part that is in its block:

    tile 0 | tile 1        of f32[256, 256@tp] the rank with the left half fills tiles 0 and 2
    tile 2 | tile 3

Tiles are nearly square in the last two dims that are longer than 1, so that the edge of a block cuts few tiles, whether
rows or columns are sharded. On CPUs, tiles are of random words, and most numbers are made from one word each
(`spmd.tensor.recipes.random_words`). torch's kernels make all other numbers, tile by tile.

The seed and the number of the draw come from the stream of all ranks (`spmd.tensor.recipes.stream`). An op that is
given a `torch.Generator` takes its key from that generator instead, and advances it.

Left out: numbers that are the same on CPU and CUDA, or on different models of CPU or GPU.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import per_rank, rank_simulator
from spmd.tensor.call import base_name
from spmd.tensor.recipes import stream
from spmd.tensor.recipes.random_words import WordFormula, word_formula
from spmd.tensor.redistribute.boxes import Box, relative_to, simple
from spmd.tensor.rules.random_ops import RANDOM_FILLS
from spmd.tensor.spec import Spec

# ---- one draw ---------------------------------------------------------------------------------

Key = bytes
"""The identity of a draw: equal keys give equal numbers."""


def key_of(seed: int, number: int) -> Key:
    return struct.pack("<cQQ", b"s", seed, number)


def next_key(op, mesh: DeviceMesh, generator: torch.Generator | None = None) -> Key:
    """The key of the next draw. Advances the stream, or the user's generator."""
    if generator is not None:
        drawn = torch.empty(2, dtype=torch.int64, device=generator.device).random_(generator=generator)
        return struct.pack("<cqq", b"g", *drawn.tolist())
    seed, number = stream.reserve_draws(mesh)
    if _torch.in_backward() and not stream.is_repeated(number):
        raise RuntimeError(
            f"{op}: draws in a backward pass. Activation checkpointing would compute with other numbers than the "
            "forward did: pass checkpoint(..., use_reentrant=False, context_fn=spmd.recompute)."
        )
    return key_of(seed, number)


def draw(
    op, spec: Spec, local: torch.Tensor, *args: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """The block of this rank that an op of `RANDOM_FILLS` fills, for a tensor with this spec.

    It is `local` itself where the op writes in place, else a new tensor. args: the op's arguments after the tensor.
    """
    key = next_key(op, spec.mesh, generator)
    if rank_simulator() is None:
        out = local if _torch.writes_first(op) else torch.empty_like(local)
        return fill_block(op, out, args, spec, spec.mesh.get_coordinate(), key)
    block = _block(op, local, args, spec, key)
    return local.copy_(block) if _torch.writes_first(op) else block


def draw_like(
    op, spec: Spec, local: torch.Tensor, *, generator: torch.Generator | None = None, **options: Any
) -> torch.Tensor:
    """A new block like this one, with the options of `empty_like`, filled by an op of `RANDOM_FILLS`."""
    return draw(op, spec, torch.empty_like(local, **options), generator=generator)


@per_rank
def _block(op, local: torch.Tensor, args: tuple, spec: Spec, key: Key) -> torch.Tensor:
    return fill_block(op, torch.empty_like(local), args, spec, spec.mesh.get_coordinate(), key)


def fill_block(op, out: torch.Tensor, args: tuple, spec: Spec, at: tuple[int, ...], key: Key) -> torch.Tensor:
    """Fill `out` with the block of the rank at this coordinate, as an op of `RANDOM_FILLS` does."""
    if out.is_meta or not out.numel():
        return out
    source = _source(out.device)
    bands = _bands(spec, at, source.least, source.most)
    formula = word_formula(op, out.dtype, *args) if source.has_words else None
    if formula is None:
        kernel = RANDOM_FILLS[op]
        _fill_by_kernel(lambda part, generator: kernel(part, *args, generator=generator), out, bands, source, key)
    else:
        _fill_by_words(formula, out, bands, source, key)
    return out


def workspace_of_fill(op, out: torch.Tensor, args: tuple, spec: Spec, at: tuple[int, ...]) -> int:
    """The bytes of tensors that `fill_block` holds for a moment beside such a block. Bands are filled one by one.

    Numbers that were made of words wait to be copied into the block. Tiles that kernels have filled wait to be put
    together; a band that is one tile is filled where it is.
    """
    if not out.numel():
        return 0
    source = _source_kind(out.device)
    found = _bands(spec, at, source.least, source.most)
    formula = word_formula(op, out.dtype, *args) if source.has_words else None
    if formula is not None:
        return formula.itemsize * max(band.inside_of(out).numel() for band in found)
    return out.itemsize * max(0 if band.is_tile_of(out) else sum(prod(t.size) for t in band.tiles) for band in found)


def _fill_by_words(formula: WordFormula, out: torch.Tensor, bands: Iterable[Band], source: _Host, key: Key) -> None:
    out = out if out.ndim else out.view(1)
    for band in bands:
        words = [t.kept_of(source.words(key, t.number, t.size or (1,), formula.wide)) for t in band.tiles]
        numbers = formula.make(words[0] if len(words) == 1 else np.concatenate(words, band.dim))
        band.inside_of(out).copy_(torch.from_numpy(numbers))


def _fill_by_kernel(
    fill: Callable, out: torch.Tensor, bands: Iterable[Band], source: _Host | _Device, key: Key
) -> None:
    def tile(number: int, room: torch.Tensor) -> torch.Tensor:
        return fill(room, generator=source.seeded_generator(key, number))

    for band in bands:
        if band.is_tile_of(out):
            tile(band.tiles[0].number, band.inside_of(out))
        else:
            made = [t.kept_of(tile(t.number, out.new_empty(t.size))) for t in band.tiles]
            torch.cat(made, band.dim, out=band.inside_of(out))
            del made  # before the next ones are made


@per_rank
def run_seeded(op, args: tuple, kwargs: dict[str, Any], device: torch.device, key: Key) -> Any:
    """Run the op with a generator that is seeded from the key. Ranks with the same operands get the same result."""
    args, kwargs = _torch.with_argument(op, args, kwargs, "generator", _source(device).seeded_generator(key, 0))
    return op(*args, **kwargs)


@dataclass(frozen=True)
class Draw:
    """A draw in a program: `op(x, rng, *args)`, where `rng` is the seed and the number of the program's first draw.

    number: the place of this draw among the program's draws. spec: the spec of x, once it is known. at: the coordinate
    of the rank, once the program is bound to one.
    """

    op: _torch.OpOverload
    number: int
    spec: Spec | None = None
    at: tuple[int, ...] | None = None

    @property
    def __name__(self) -> str:
        return f"draw{self.number}_{base_name(self.op)}"

    def __call__(self, x: torch.Tensor, rng: tuple[int, int], *args: float) -> torch.Tensor:
        seed, first = rng
        key = key_of(seed, first + self.number)
        return fill_block(self.op, torch.empty_like(x), args, self.spec, self.at, key)

    def workspace(self, x: torch.Tensor, rng: Any, *args: float) -> int:
        """The bytes that the call holds for a moment beside its result. Of x the values are not read."""
        return workspace_of_fill(self.op, x, args, self.spec, self.at)


# ---- tiles ------------------------------------------------------------------------------------


def tile_of(shape: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """The sizes of the tiles of a tensor along each dim: nearly square in the last dims, two dims at a time.

    A tile has at most `most` elements. A small tensor has about sixteen tiles, but none of fewer than `least` elements.
    A side is a dim halved some number of times, so that the blocks of 2, 4 or 8 ranks are unions of tiles if possible.

    >>> tile_of((4096, 4096), 4096, 16384), tile_of((8, 1024, 768), 4096, 16384), tile_of((99, 512, 3, 3), 4096, 16384)
    ((128, 128), (1, 128, 96), (50, 32, 3, 3))
    """
    most = min(most, max(least, prod(shape) // 16))
    sides = [1] * len(shape)
    dims = [d for d in range(len(shape)) if shape[d] > 1]
    while dims:
        pair, dims = dims[-2:], dims[:-2]
        for d in pair:
            sides[d] = shape[d]
        if prod(sides) > most:
            dims = []
        while prod(sides) > most:
            d = max(pair, key=lambda d: (sides[d], -d))
            sides[d] = -(-sides[d] // 2)
    return tuple(sides)


class Tile(NamedTuple):
    """A tile that a block overlaps: its number, the part of it that is in the block (None: all), and its size."""

    number: int
    kept: tuple[slice, ...] | None
    size: tuple[int, ...]

    def kept_of(self, tile: Any) -> Any:
        return tile if self.kept is None else tile[self.kept]


class Band(NamedTuple):
    """Tiles that are side by side along a dim, and the part of the block that they cover together (None: all)."""

    inside: tuple[slice, ...] | None
    dim: int
    tiles: tuple[Tile, ...]

    def inside_of(self, block: torch.Tensor) -> torch.Tensor:
        return block if self.inside is None else block[self.inside]

    def is_tile_of(self, block: torch.Tensor) -> bool:
        """Whether a kernel can fill it where it is: one tile as a whole, one after the other in memory."""
        return len(self.tiles) == 1 and self.tiles[0].kept is None and self.inside_of(block).is_contiguous()


MAX_CACHED_BANDS = 32
"""Bands are cached for blocks with at most this many. To fill a block with more takes so long that listing its bands
again does not matter."""


def _bands(spec: Spec, at: tuple[int, ...], least: int, most: int) -> Iterable[Band]:
    cached = _few_bands(spec, at, least, most)
    return _bands_of_block(spec, at, least, most) if cached is None else cached


@functools.lru_cache(maxsize=1024)
def _few_bands(spec: Spec, at: tuple[int, ...], least: int, most: int) -> tuple[Band, ...] | None:
    """The bands of a block with few of them; None for a block with more than are cached."""
    found = tuple(itertools.islice(_bands_of_block(spec, at, least, most), MAX_CACHED_BANDS + 1))
    return found if len(found) <= MAX_CACHED_BANDS else None


def _bands_of_block(spec: Spec, at: tuple[int, ...], least: int, most: int) -> Iterator[Band]:
    """The bands of a block; of one of packed dims those of each of its parts, one after the other."""
    box, tile = spec.box(at), tile_of(spec.shape, least, most)
    for part in simple(box):
        found = bands(spec.shape, tile, [(start, stop - start) for start, stop in part], 2 * most)
        yield from found if not spec.is_packed else (_moved(band, relative_to(part, box)) for band in found)


def _moved(band: Band, part: Box) -> Band:
    """A band of a part of a block, as a band of the block."""
    inside = band.inside or tuple(slice(0, stop - start) for start, stop in part)
    moved = zip(inside, part, strict=True)
    return band._replace(inside=tuple(slice(start + each.start, start + each.stop) for each, (start, _) in moved))


def bands(
    shape: Sequence[int], sides: Sequence[int], blocks: Sequence[tuple[int, int]], most: int
) -> Iterator[Band]:
    """The tiles that a block overlaps, in bands of at most `most` elements along the last dim with several tiles.

    >>> for band in bands((4, 6), (4, 2), [(0, 2), (0, 6)], 20):
    ...     print(band.inside, [tile.number for tile in band.tiles], band.tiles[0].size)
    (slice(0, 2, None), slice(0, 4, None)) [0, 1] (4, 2)
    (slice(0, 2, None), slice(4, 6, None)) [2] (4, 2)
    """
    along = [_intervals(*dim) for dim in zip(shape, sides, blocks, strict=True)]
    counts = [-(-n // side) for n, side in zip(shape, sides, strict=True)]
    band_dim = max((d for d, intervals in enumerate(along) if len(intervals) > 1), default=0)
    tiles_per_band = max(1, most // prod(sides))
    runs = [_runs(intervals, tiles_per_band if d == band_dim else 1) for d, intervals in enumerate(along)]
    for chosen in itertools.product(*runs):
        inside = tuple(slice(run[0].inside.start, run[-1].inside.stop) for run in chosen)
        tiles = tuple(_tile(intervals, counts) for intervals in itertools.product(*chosen))
        yield Band(None if _is_all(inside, [length for _, length in blocks]) else inside, band_dim, tiles)


def _runs(intervals: Sequence[Interval], length: int) -> list[Sequence[Interval]]:
    return [intervals[i : i + length] for i in range(0, len(intervals), length)]


def _tile(intervals: Sequence[Interval], counts: Sequence[int]) -> Tile:
    """The tile with these intervals, one for each dim; `counts` are the numbers of tiles along each dim."""
    number = 0
    for count, interval in zip(counts, intervals, strict=True):
        number = number * count + interval.number
    kept, size = tuple(i.kept for i in intervals), tuple(i.size for i in intervals)
    return Tile(number, None if _is_all(kept, size) else kept, size)


def _is_all(part: Sequence[slice], size: Sequence[int]) -> bool:
    return all(p.start == 0 and p.stop == n for p, n in zip(part, size, strict=True))


class Interval(NamedTuple):
    """A tile that a block overlaps, along one dim.

    number: of the tile. inside: their common part, as indices of the block. kept: the same, as indices of the tile.
    size: of the tile.
    """

    number: int
    inside: slice
    kept: slice
    size: int


@functools.lru_cache(maxsize=1024)
def _intervals(n: int, side: int, block: tuple[int, int]) -> tuple[Interval, ...]:
    start, length = block
    found = []
    for i in range(start // side, -(-(start + length) // side)):
        low, high = i * side, min((i + 1) * side, n)
        a, b = max(low, start), min(high, start + length)
        found.append(Interval(i, slice(a - start, b - start), slice(a - low, b - low), high - low))
    return tuple(found)


# ---- generators -------------------------------------------------------------------------------


class _Host:
    """CPUs: random words, and torch's generator for its kernels.

    Words come from SFC64, a small generator with a state of 256 bits. Its state is set to a hash of key and tile.
    torch's own generator is large, and its seeds have only 32 bits, so that some tiles would soon have the same seed.
    So its state is filled with words.
    """

    has_words = True
    least, most = 1 << 12, 1 << 15  # to start a tile takes as long as to make some 3000 words

    def __init__(self, device: torch.device):
        self._small = np.random.SFC64(0)
        self._start = self._small.state
        self._hash = self._start["state"]["state"][:3]
        self._start["state"]["state"][3] = 1
        self._twister = _torch.Twister()

    def words(self, key: Key, tile: int, size: tuple[int, ...], wide: bool) -> np.ndarray:
        """Random words for a tile: of 64 bits if wide, else of 32."""
        self._seed(key, tile)
        n = prod(size)
        if wide:
            return self._small.random_raw(n).reshape(size)
        return self._small.random_raw((n + 1) // 2).view(np.uint32)[:n].reshape(size)

    def seeded_generator(self, key: Key, tile: int) -> torch.Generator:
        self._seed(key, tile)
        return self._twister.started(self._small.random_raw(self._twister.words // 2).view(np.uint32))

    def _seed(self, key: Key, tile: int) -> None:
        self._hash[:] = np.frombuffer(hashlib.blake2b(key + struct.pack("<Q", tile), digest_size=24).digest(), "<u8")
        self._small.state = self._start


class _Device:
    """The generator of other devices, such as CUDA's Philox. Seeds have 64 bits, and kernels take long to start."""

    has_words = False
    least = most = 1 << 20

    def __init__(self, device: torch.device):
        self._generator = torch.Generator(device)

    def seeded_generator(self, key: Key, tile: int) -> torch.Generator:
        digest = hashlib.blake2b(key + struct.pack("<Q", tile), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little") % 2**63)


_sources = threading.local()


def _source(device: torch.device) -> _Host | _Device:
    """This thread's generator for a device. It is seeded before each use, so no use affects the next."""
    by_device = _sources.__dict__
    if device not in by_device:
        by_device[device] = _source_kind(device)(device)
    return by_device[device]


def _source_kind(device: torch.device) -> type[_Host | _Device]:
    return _Host if device.type == "cpu" else _Device
