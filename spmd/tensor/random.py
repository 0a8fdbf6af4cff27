"""Random numbers that do not depend on the mesh.

    spmd.manual_seed(0)
    x = spmd.randn(8192, 8192, device_mesh=mesh, placements=[Shard(0), Shard(1)])

gives the same *global* tensor on any mesh, one rank included, however it lies; so do `x.uniform_()`, dropout, `nn.init`
and all other ops that draw. No rank makes more of it than its block and a little around.

One call of an op that draws is a *draw*; draws are numbered. The global tensor is cut into tiles - a cut that depends
on its shape alone - and each tile is made by a generator that is started anew from (seed, number of the draw, number
of the tile). A rank makes the tiles that its block meets and keeps what is its own of them:

    tile 0 | tile 1        of f32[256, 256@tp] the rank with the left half makes tiles 0 and 2
    tile 2 | tile 3

Tiles are nearly square in the last two dims that matter, that rows as well as columns cut few of them. On CPUs, tiles
are of random words, of which most numbers are made one by one (`spmd.tensor.words`); all else is made by torch's
kernels, tile by tile.

The state is two numbers, the seed and how many draws there were. It is the same on all ranks, because they make the
same calls. It has nothing to do with torch's own generators, from which plain tensors are drawn as ever; an op that is
given a `torch.Generator` takes its numbers from that one's state instead, and moves that on.

Left out: numbers that are the same on CPU and CUDA, or on CPUs (GPUs) of different make.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd import _torch
from spmd.comm import transport
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import per_rank, place, players
from spmd.tensor import explicit
from spmd.tensor.call import base_name
from spmd.tensor.rules.draws import FILLS
from spmd.tensor.spec import Spec
from spmd.tensor.words import Recipe, recipe

# ---- the state --------------------------------------------------------------------------------


class Stream(NamedTuple):
    """Where this rank stands: the seed and how many draws were made. `again`: it repeats what was drawn before."""

    seed: int
    drawn: int = 0
    again: bool = False


_PLACE = "random numbers"
_lock = threading.Lock()


def manual_seed(seed: int) -> None:
    """Start the random numbers of DTensors from a seed; every rank must give the same one.

    Without it they start, at the first draw, from `torch.initial_seed()` of the first rank of that tensor's mesh, so
    that `torch.manual_seed` before it is enough in many a script. Later calls of `torch.manual_seed` change nothing.

    Ranks that draw on different meshes count their draws apart; call it again before they draw on a common one.

    >>> manual_seed(7)
    >>> get_rng_state()
    {'seed': 7, 'drawn': 0}
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"manual_seed: {seed!r} must be an int")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"manual_seed: {seed} does not fit into 64 bits")
    _set(Stream(seed % 2**64))


def get_rng_state() -> dict[str, int] | None:
    """The state of the random numbers of DTensors, to be kept with a checkpoint; None before the first draw."""
    now = _now()
    return None if now is None else {"seed": now.seed, "drawn": now.drawn}


def set_rng_state(state: dict[str, int] | None) -> None:
    """Go on from a state that `get_rng_state` gave; None forgets the seed. Every rank must give the same one."""
    if state is not None and not (isinstance(state, dict) and state.keys() == {"seed", "drawn"}):
        raise TypeError(f"set_rng_state: {state!r} is no state; give what get_rng_state() returned")
    _set(None if state is None else Stream(state["seed"], state["drawn"]))


def _now() -> Stream | None:
    return place().get(_PLACE)


def _set(stream: Stream | None) -> None:
    place()[_PLACE] = stream


def take(mesh: DeviceMesh, draws: int = 1) -> tuple[int, int]:
    """The seed and the number of the next draw on this mesh, with so many draws reserved."""
    with _lock:
        now = _now()
        if now is not None:
            seed, drawn, again = now
            _set(Stream(seed, drawn + draws, again))
            return seed, drawn
    explicit.check_message("the first draw", "ask the first rank for a seed", "Call spmd.manual_seed before it.")
    seed = transport().gather_objects(torch.initial_seed() % 2**64, mesh)[0]
    _set(Stream(seed, draws))
    return seed, 0


def recompute() -> tuple[AbstractContextManager, AbstractContextManager]:
    """For activation checkpointing: what is computed again in the backward draws what it drew before.

        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=spmd.recompute)

    torch's own `preserve_rng_state` knows torch's generators only. A draw in a backward pass without this is an error.
    """
    start: list[Stream | None] = []

    @contextmanager
    def forward() -> Iterator[None]:
        start.append(_now())
        yield

    @contextmanager
    def again() -> Iterator[None]:
        now = _now()
        if now is not None:  # where nothing was drawn before the forward, it began with the first draw
            _set((start[0] or Stream(now.seed))._replace(again=True))
        try:
            yield
        finally:
            _set(now)

    return forward(), again()


# ---- one draw ---------------------------------------------------------------------------------

Key = bytes
"""What tells draws apart: of equal keys, equal numbers."""


def key_of(seed: int, number: int) -> Key:
    return struct.pack("<cQQ", b"s", seed, number)


def next_key(op, mesh: DeviceMesh, generator: torch.Generator | None = None) -> Key:
    """The key of the draw to be made now; the stream, or the user's generator, moves on."""
    if generator is not None:
        drawn = torch.empty(2, dtype=torch.int64, device=generator.device).random_(generator=generator)
        return struct.pack("<cqq", b"g", *drawn.tolist())
    if _torch.in_backward() and not ((now := _now()) and now.again):
        raise RuntimeError(
            f"{op}: draws in a backward pass. Activation checkpointing would compute with other numbers than the "
            "forward did: pass checkpoint(..., use_reentrant=False, context_fn=spmd.recompute)."
        )
    return key_of(*take(mesh))


def draw(
    op, spec: Spec, local: torch.Tensor, *args: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """What an op of `FILLS` gives on this rank, of a tensor that lies so: in `local`, or new where it does not write.

    args: its arguments but for the tensor.
    """
    key = next_key(op, spec.mesh, generator)
    if players() is None:
        out = local if _torch.writes_first(op) else torch.empty_like(local)
        return fill_block(op, out, args, spec, spec.mesh.get_coordinate(), key)
    block = _block(op, local, args, spec, key)
    return local.copy_(block) if _torch.writes_first(op) else block


def draw_like(
    op, spec: Spec, local: torch.Tensor, *, generator: torch.Generator | None = None, **options: Any
) -> torch.Tensor:
    """A new tensor like this block, but for the options of `empty_like`, filled by an op of `FILLS`."""
    return draw(op, spec, torch.empty_like(local, **options), generator=generator)


@per_rank
def _block(op, local: torch.Tensor, args: tuple, spec: Spec, key: Key) -> torch.Tensor:
    return fill_block(op, torch.empty_like(local), args, spec, spec.mesh.get_coordinate(), key)


def fill_block(op, out: torch.Tensor, args: tuple, spec: Spec, at: tuple[int, ...], key: Key) -> torch.Tensor:
    """Fill `out` with the block of the rank at this coordinate, as an op of `FILLS` does."""
    if out.is_meta or not out.numel():
        return out
    source = _source(out.device)
    bands = _bands(spec, at, source.least, source.most)
    made_of = recipe(op, out.dtype, *args) if source.has_words else None
    if made_of is None:
        _fill_by_kernel(lambda part, generator: FILLS[op](part, *args, generator=generator), out, bands, source, key)
    else:
        _fill_by_words(made_of, out, bands, source, key)
    return out


def _fill_by_words(made_of: Recipe, out: torch.Tensor, bands: Iterable[Band], source: _Host, key: Key) -> None:
    out = out if out.ndim else out.view(1)
    for inside, dim, tiles in bands:
        words = []
        for number, kept, size in tiles:
            tile = source.words(key, number, size or (1,), made_of.wide)
            words.append(tile if kept is None else tile[kept])
        numbers = made_of.make(words[0] if len(words) == 1 else np.concatenate(words, dim))
        (out if inside is None else out[inside]).copy_(torch.from_numpy(numbers))


def _fill_by_kernel(
    fill: Callable, out: torch.Tensor, bands: Iterable[Band], source: _Host | _Device, key: Key
) -> None:
    for inside, dim, tiles in bands:
        part = out if inside is None else out[inside]
        if len(tiles) == 1 and tiles[0].kept is None and part.is_contiguous():
            fill(part, generator=source.started(key, tiles[0].number))
            continue
        made = []
        for number, kept, size in tiles:
            tile = fill(out.new_empty(size), generator=source.started(key, number))
            made.append(tile if kept is None else tile[kept])
        torch.cat(made, dim, out=part)


@per_rank
def run_seeded(op, args: tuple, kwargs: dict[str, Any], device: torch.device, key: Key) -> Any:
    """The op with a generator that starts from the key: the same on every rank of the same operands."""
    args, kwargs = _torch.with_argument(op, args, kwargs, "generator", _source(device).started(key, 0))
    return op(*args, **kwargs)


@dataclass(frozen=True)
class Draw:
    """A draw in a program: `op(x, rng, *args)`, where `rng` is the seed and the number of the program's first draw.

    number: which of the program's draws it is. spec: how x lies, once that is known; at: the coordinate of the rank,
    once it is bound to one.
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


# ---- tiles ------------------------------------------------------------------------------------


def tile_of(shape: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """The sides of the tiles of a tensor: nearly square in the last dims, two at a time.

    A tile has at most `most` elements; a small tensor is cut into sixteen or so, but not below `least`. Sides are
    halves of halves of the dims, so that blocks on 2, 4 or 8 ranks are whole tiles where that can be.

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
    """A tile that a block meets: its number, the part of it that is the block's (None: all), and its size."""

    number: int
    kept: tuple[slice, ...] | None
    size: tuple[int, ...]


class Band(NamedTuple):
    """Tiles that lie side by side along a dim, and the part of the block that they make together (None: all)."""

    inside: tuple[slice, ...] | None
    dim: int
    tiles: tuple[Tile, ...]


KEPT = 32
"""A rank with at most so many bands of tiles remembers which they are; one with more is busy enough."""


def _bands(spec: Spec, at: tuple[int, ...], least: int, most: int) -> Iterable[Band]:
    found = _few_bands(spec, at, least, most)
    return _bands_here(spec, at, least, most) if found is None else found


@functools.lru_cache(maxsize=1024)
def _few_bands(spec: Spec, at: tuple[int, ...], least: int, most: int) -> tuple[Band, ...] | None:
    found = tuple(itertools.islice(_bands_here(spec, at, least, most), KEPT + 1))
    return found if len(found) <= KEPT else None


def _bands_here(spec: Spec, at: tuple[int, ...], least: int, most: int) -> Iterator[Band]:
    blocks = [spec.block(d, at) for d in range(spec.ndim)]
    return bands(spec.shape, tile_of(spec.shape, least, most), blocks, 2 * most)


def bands(
    shape: Sequence[int], sides: Sequence[int], blocks: Sequence[tuple[int, int]], most: int
) -> Iterator[Band]:
    """The tiles that a block of a tensor meets, in bands of at most `most` elements along the last dim that is cut.

    >>> for band in bands((4, 6), (4, 2), [(0, 2), (0, 6)], 20):
    ...     print(band.inside, [tile.number for tile in band.tiles], band.tiles[0].size)
    (slice(0, 2, None), slice(0, 4, None)) [0, 1] (4, 2)
    (slice(0, 2, None), slice(4, 6, None)) [2] (4, 2)
    """
    along = [_along(*dim) for dim in zip(shape, sides, blocks, strict=True)]
    counts = [-(-n // side) for n, side in zip(shape, sides, strict=True)]
    cut = max((d for d, met in enumerate(along) if len(met) > 1), default=0)
    several = max(1, most // prod(sides))
    runs = [_runs(met, several if d == cut else 1) for d, met in enumerate(along)]
    for chosen in itertools.product(*runs):
        inside = tuple(slice(run[0].inside.start, run[-1].inside.stop) for run in chosen)
        tiles = tuple(_tile(met, counts) for met in itertools.product(*chosen))
        yield Band(None if _is_all(inside, [length for _, length in blocks]) else inside, cut, tiles)


def _runs(met: Sequence[Side], several: int) -> list[Sequence[Side]]:
    return [met[i : i + several] for i in range(0, len(met), several)]


def _tile(met: Sequence[Side], counts: Sequence[int]) -> Tile:
    number = 0
    for count, side in zip(counts, met, strict=True):
        number = number * count + side.number
    kept, size = tuple(side.kept for side in met), tuple(side.size for side in met)
    return Tile(number, None if _is_all(kept, size) else kept, size)


def _is_all(part: Sequence[slice], size: Sequence[int]) -> bool:
    return all(p.start == 0 and p.stop == n for p, n in zip(part, size, strict=True))


class Side(NamedTuple):
    """Along one dim, a tile that a block meets: its number, the part of the block, that of the tile, its size."""

    number: int
    inside: slice
    kept: slice
    size: int


@functools.lru_cache(maxsize=1024)
def _along(n: int, side: int, block: tuple[int, int]) -> tuple[Side, ...]:
    start, length = block
    found = []
    for i in range(start // side, -(-(start + length) // side)):
        low, high = i * side, min((i + 1) * side, n)
        a, b = max(low, start), min(high, start + length)
        found.append(Side(i, slice(a - start, b - start), slice(a - low, b - low), high - low))
    return tuple(found)


# ---- where the numbers come from --------------------------------------------------------------


class _Host:
    """CPUs: random words, and torch's generator for its kernels.

    Words come from a small generator with a state of 256 bits, SFC64, which begins as a hash of key and tile. torch's
    own is large and has seeds of 32 bits only, of which tiles would soon be alike; so its state is made of words.
    """

    has_words = True
    least, most = 1 << 12, 1 << 15  # a tile begins in the time of some 3000 words

    def __init__(self, device: torch.device):
        self._small = np.random.SFC64(0)
        self._start = self._small.state
        self._hash = self._start["state"]["state"][:3]
        self._start["state"]["state"][3] = 1
        self._twister = _torch.Twister()

    def words(self, key: Key, tile: int, size: tuple[int, ...], wide: bool) -> np.ndarray:
        """Random words, of 64 bits if wide, else of 32."""
        self._begin(key, tile)
        n = prod(size)
        if wide:
            return self._small.random_raw(n).reshape(size)
        return self._small.random_raw((n + 1) // 2).view(np.uint32)[:n].reshape(size)

    def started(self, key: Key, tile: int) -> torch.Generator:
        self._begin(key, tile)
        return self._twister.started(self._small.random_raw(self._twister.words // 2).view(np.uint32))

    def _begin(self, key: Key, tile: int) -> None:
        self._hash[:] = np.frombuffer(hashlib.blake2b(key + struct.pack("<Q", tile), digest_size=24).digest(), "<u8")
        self._small.state = self._start


class _Device:
    """The generator of other devices, as CUDA's Philox: seeds of 64 bits, and kernels that take long to start."""

    has_words = False
    least = most = 1 << 20

    def __init__(self, device: torch.device):
        self._generator = torch.Generator(device)

    def started(self, key: Key, tile: int) -> torch.Generator:
        digest = hashlib.blake2b(key + struct.pack("<Q", tile), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little") % 2**63)


_sources = threading.local()


def _source(device: torch.device) -> _Host | _Device:
    """This thread's generator for a device; what it is used for leaves nothing behind."""
    mine = _sources.__dict__
    if device not in mine:
        mine[device] = _Host(device) if device.type == "cpu" else _Device(device)
    return mine[device]
