"""Random numbers that do not depend on the mesh.

    spmd.manual_seed(0)
    x = spmd.randn(8192, 8192, device_mesh=mesh, placements=[Shard(0), Shard(1)])

gives the same *global* tensor on any mesh, one rank included, however it lies; so do `x.uniform_()`, dropout, `nn.init`
and all other ops that draw. No rank makes more of it than its block and a little around.

One call of an op that draws is a *draw*; draws are numbered. The global tensor is cut into tiles - a cut that depends
on its shape alone - and each tile is made by torch's own generator, started anew from (seed, number of the draw, number
of the tile). A rank makes the tiles that its block meets and keeps what is its own of them:

    tile 0 | tile 1        of f32[256, 256@tp] the rank with the left half makes tiles 0 and 2
    tile 2 | tile 3

so the distributions are torch's, and so is most of the speed. Tiles are nearly square in the last two dims that matter,
that rows as well as columns cut few of them.

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

import torch

from spmd import _torch
from spmd.comm import transport
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import per_rank, place, players
from spmd.tensor import explicit
from spmd.tensor.call import base_name
from spmd.tensor.rules.draws import FILLS
from spmd.tensor.spec import Spec

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
            _set(now._replace(drawn=now.drawn + draws))
            return now.seed, now.drawn
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
    now = _now()
    if _torch.in_backward() and not (now and now.again):
        raise RuntimeError(
            f"{op}: draws in a backward pass. Activation checkpointing would compute with other numbers than the "
            "forward did: pass checkpoint(..., use_reentrant=False, context_fn=spmd.recompute)."
        )
    return key_of(*take(mesh))


def draw(op, local: torch.Tensor, args: Sequence, kwargs: dict[str, Any], spec: Spec) -> torch.Tensor:
    """What an op of `FILLS` gives on this rank, of a tensor that lies so: in `local`, or new where it does not write.

    args, kwargs: its arguments but for the tensor.
    """
    kwargs = dict(kwargs)
    key = next_key(op, spec.mesh, kwargs.pop("generator", None))
    fill = FILLS[op]
    if players() is None:
        return fill_block(fill, _target(op, local), args, kwargs, spec, spec.mesh.get_coordinate(), key)
    block = _block(fill, local, args, kwargs, spec, key)
    return local.copy_(block) if _torch.writes_first(op) else block


def _target(op, local: torch.Tensor) -> torch.Tensor:
    return local if _torch.writes_first(op) else torch.empty_like(local)


@per_rank
def _block(fill, local, args, kwargs, spec: Spec, key: Key) -> torch.Tensor:
    return fill_block(fill, torch.empty_like(local), args, kwargs, spec, spec.mesh.get_coordinate(), key)


def fill_block(
    fill: Callable, out: torch.Tensor, args: Sequence, kwargs: dict[str, Any], spec: Spec, at: tuple[int, ...], key: Key
) -> torch.Tensor:
    """Fill `out` with the block of the rank at this coordinate; `fill` writes random numbers into a tensor."""
    if out.is_meta or not out.numel():
        return out
    source = _source(out.device)
    buffer = None
    for number, inside, kept, size in _tiling(spec, at, source.least, source.most):
        generator = source.started(key, number)
        part = out if inside is None else out[inside]
        if kept is None and part.is_contiguous():
            fill(part, *args, **kwargs, generator=generator)
            continue
        if buffer is None or buffer.shape != size:
            buffer = torch.empty(size, dtype=out.dtype, device=out.device)
        fill(buffer, *args, **kwargs, generator=generator)
        part.copy_(buffer if kept is None else buffer[kept])
    return out


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

    def __call__(self, x: torch.Tensor, rng: tuple[int, int], *args: Any, **kwargs: Any) -> torch.Tensor:
        seed, first = rng
        key = key_of(seed, first + self.number)
        return fill_block(FILLS[self.op], torch.empty_like(x), args, kwargs, self.spec, self.at, key)


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


class Meeting(NamedTuple):
    """Where a tile and a block meet: the tile's number, the part of the block, that of the tile, the tile's size.

    A part is None where it is all.
    """

    number: int
    inside: tuple[slice, ...] | None
    kept: tuple[slice, ...] | None
    size: tuple[int, ...]


KEPT = 64
"""A rank with at most so many tiles remembers which they are; one with more is busy enough."""


def _tiling(spec: Spec, at: tuple[int, ...], least: int, most: int) -> Iterable[Meeting]:
    found = _few_tiles(spec, at, least, most)
    return _tiles_here(spec, at, least, most) if found is None else found


@functools.lru_cache(maxsize=4096)
def _few_tiles(spec: Spec, at: tuple[int, ...], least: int, most: int) -> tuple[Meeting, ...] | None:
    found = tuple(itertools.islice(_tiles_here(spec, at, least, most), KEPT + 1))
    return found if len(found) <= KEPT else None


def _tiles_here(spec: Spec, at: tuple[int, ...], least: int, most: int) -> Iterator[Meeting]:
    return tiles(spec.shape, tile_of(spec.shape, least, most), [spec.block(d, at) for d in range(spec.ndim)])


def tiles(shape: Sequence[int], sides: Sequence[int], blocks: Sequence[tuple[int, int]]) -> Iterator[Meeting]:
    """The tiles that a block of a tensor meets.

    >>> for meeting in tiles((4, 4), (4, 2), [(0, 2), (0, 4)]):
    ...     print(meeting.number, meeting.inside, meeting.size)
    0 (slice(0, 2, None), slice(0, 2, None)) (4, 2)
    1 (slice(0, 2, None), slice(2, 4, None)) (4, 2)
    """
    lengths = [length for _, length in blocks]
    counts = [-(-n // side) for n, side in zip(shape, sides, strict=True)]
    for met in itertools.product(*map(_along, shape, sides, blocks)):
        number = 0
        for count, (i, *_) in zip(counts, met, strict=True):
            number = number * count + i
        _, inside, kept, size = zip(*met, strict=True) if met else ((), (), (), ())
        yield Meeting(number, None if _is_all(inside, lengths) else inside, None if _is_all(kept, size) else kept, size)


def _is_all(part: Sequence[slice], size: Sequence[int]) -> bool:
    return all(p.start == 0 and p.stop == n for p, n in zip(part, size, strict=True))


@functools.lru_cache(maxsize=4096)
def _along(n: int, side: int, block: tuple[int, int]) -> tuple[tuple[int, slice, slice, int], ...]:
    """Along one dim, the tiles that a block meets: number, part of the block, part of the tile, size of the tile."""
    start, length = block
    found = []
    for i in range(start // side, -(-(start + length) // side)):
        low, high = i * side, min((i + 1) * side, n)
        a, b = max(low, start), min(high, start + length)
        found.append((i, slice(a - start, b - start), slice(a - low, b - low), high - low))
    return tuple(found)


# ---- where the numbers come from --------------------------------------------------------------


class _Twister:
    """torch's CPU generator. Its own seeds have 32 bits, so that tiles would soon be alike; its state has 19937."""

    least, most = 1 << 12, 1 << 15  # it starts in the time of some 2000 elements

    def __init__(self, device: torch.device):
        self._twister = _torch.Twister()

    def started(self, key: Key, tile: int) -> torch.Generator:
        return self._twister.started(hashlib.shake_128(key + struct.pack("<Q", tile)).digest(self._twister.nbytes))


class _Counter:
    """The generator of other devices, as CUDA's Philox: seeds of 64 bits, and kernels that take long to start."""

    least = most = 1 << 20

    def __init__(self, device: torch.device):
        self._generator = torch.Generator(device)

    def started(self, key: Key, tile: int) -> torch.Generator:
        digest = hashlib.blake2b(key + struct.pack("<Q", tile), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little") % 2**63)


_sources = threading.local()


def _source(device: torch.device) -> _Twister | _Counter:
    """This thread's generator for a device; what it is used for leaves nothing behind."""
    mine = _sources.__dict__
    if device not in mine:
        mine[device] = _Twister(device) if device.type == "cpu" else _Counter(device)
    return mine[device]
