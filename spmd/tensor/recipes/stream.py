"""The stream of random numbers of DTensors: a seed and the count of draws, the same on all ranks.

    spmd.manual_seed(7)          the stream begins at draw 0 of seed 7
    torch.manual_seed(7)         so it does at the next draw, if all ranks call it

Plain tensors use torch's generators as always: a DTensor draws none of their numbers. But what is done to torch's
default generator (`torch.manual_seed`, `get_rng_state` and `set_rng_state`, `torch.random.fork_rng`, the checkpoints of
`torch.utils.checkpoint`) is done to the stream, too. For that the generator carries the place of the stream, in the
number that it keeps as its seed and does not draw from:

    bit 63   bit 62      bits 32 to 61    bits 0 to 31
    1        listed      draws            the seed; where `listed`, a line of the list of this process

Each draw reads this number, and writes the next one. Where it is not what the last draw wrote, the user has seeded the
generator or set it to another state since. Then the ranks tell each other, in one small exchange, what they found:
after a seed all take that of the first rank; after another state all must have come to one place. Other draws send
nothing.

So `torch.initial_seed()` has the seed of the stream in its lower 32 bits, and these are all that torch's CPU generator
takes of a seed. Left out: seeds of more than 32 bits in states that `torch.get_rng_state` has made in another process
(`get_rng_state` below has them).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from spmd import _torch
from spmd.comm import transport
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import rank_state
from spmd.tensor.modes import explicit


class Stream(NamedTuple):
    """The state of this rank: the seed and the count of draws.

    known: the number of the first draw that is new, if a backward pass repeats those before it; else 0.
    """

    seed: int
    drawn: int = 0
    known: int = 0


_STATE_KEY, _TORCH_SEED_KEY = "random numbers", "seed of torch"
_lock = threading.Lock()


# ---- for the user -----------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Set the seed of the random numbers of DTensors. Every rank must give the same seed.

    Without this call, and after each later `torch.manual_seed`, the next draw takes the seed of torch's default
    generator on the first rank of the tensor's mesh, modulo 2**32. All ranks of that mesh must have called
    `torch.manual_seed` then, with any seeds.

    Ranks that draw on different meshes count their draws separately. Call this again before they draw on a common mesh.

    >>> manual_seed(7)
    >>> get_rng_state()
    {'seed': 7, 'drawn': 0}
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"manual_seed: {seed!r} must be an int")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"manual_seed: {seed} does not fit into 64 bits")
    _set_stream(Stream(seed % 2**64))


def get_rng_state() -> dict[str, int] | None:
    """The state of the random numbers of DTensors, to save with a checkpoint. None if the next draw takes torch's seed.
    """
    stream = _stream()
    return None if stream is None else {"seed": stream.seed, "drawn": stream.drawn}


def set_rng_state(state: dict[str, int] | None) -> None:
    """Continue from a state that `get_rng_state` returned. None forgets the seed. Every rank must give the same state.
    """
    if state is not None and not (isinstance(state, dict) and state.keys() == {"seed", "drawn"}):
        raise TypeError(f"set_rng_state: {state!r} is no state; give what get_rng_state() returned")
    _set_stream(None if state is None else Stream(state["seed"], state["drawn"]))


def recompute() -> tuple[AbstractContextManager, AbstractContextManager]:
    """For activation checkpointing: the recomputed forward draws the same numbers as the first one, and sends nothing.

        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=spmd.recompute)

    torch's own `preserve_rng_state`, which is on by default, does the same with an exchange before and after each
    recomputation. A draw in a backward pass without either is an error.
    """
    repeated: list[Stream] = []

    @contextmanager
    def forward() -> Iterator[None]:
        start = _stream()
        yield
        end = _stream()
        if end is not None:  # without a start, the forward began with draw 0 of a new seed
            repeated.append(_repeating(start or Stream(end.seed), end))

    @contextmanager
    def recomputation() -> Iterator[None]:
        stream = _stream()
        for start in repeated:
            _set_stream(start)
        try:
            yield
        finally:
            _set_stream(stream)

    return forward(), recomputation()


# ---- for those who draw -----------------------------------------------------------------------


def reserve_draws(mesh: DeviceMesh, draws: int = 1) -> tuple[int, int]:
    """Reserve the next few draws on this mesh: the seed and the number of the first of them."""
    with _lock:
        stream = _known_stream()
        if stream is not None:
            return _reserved(stream, draws)
    stream = _agreed_stream(mesh)  # not under the lock: other ranks may be threads
    with _lock:
        _set_stream(stream)
        return _reserved(stream, draws)


def later(rng: tuple[int, int], draws: int) -> tuple[int, int]:
    """What `reserve_draws` gave, some draws later.

    >>> later((7, 100), 3)
    (7, 103)
    """
    seed, number = rng
    return seed, number + draws


def is_repeated(number: int) -> bool:
    """Whether the draw of this number, which is the last one, was made before a backward pass and is made in it again.
    """
    return number < rank_state()[_STATE_KEY][0].known


@contextmanager
def traced() -> Iterator[None]:
    """Inside, a step is traced, and its draws count from zero (`next_in_trace`). Afterwards all is as before."""
    kept, states = _torch.kept_seed(), {key: rank_state().get(key) for key in (_STATE_KEY, _TORCH_SEED_KEY)}
    numbers = torch.get_rng_state()
    _set_stream(Stream(0))
    try:
        yield
        stream = _stream()  # where a checkpoint that draws again has gone back, it is what the generator carries
        seeded = stream is None or stream.seed != 0
    finally:
        if _stream() is None:  # torch.manual_seed sets the numbers of plain tensors, too
            torch.set_rng_state(numbers)
        _torch.keep_seed(kept)
        rank_state().update({key: value for key, value in states.items() if value is not None})
    if seeded:
        raise RuntimeError("the step seeds torch's generator, each time alike; seed it before the step or between")


def next_in_trace() -> int | None:
    """The number of the next draw of a trace; None where the step has seeded torch's generator."""
    stream = _stream()
    return None if stream is None or stream.seed else _reserved(stream, 1)[1]


def _reserved(stream: Stream, draws: int) -> tuple[int, int]:
    seed, drawn, known = stream
    after = Stream(seed, drawn + draws, known)
    _write(after, _mark(after))
    return seed, drawn


# ---- the state --------------------------------------------------------------------------------


def _set_stream(stream: Stream | None) -> None:
    kept = _torch.kept_seed()
    if _place(kept) is None:
        rank_state()[_TORCH_SEED_KEY] = kept
    _write(stream, rank_state().get(_TORCH_SEED_KEY, kept % _SEEDS) if stream is None else _mark(stream))


def _write(stream: Stream | None, mark: int) -> None:
    _torch.keep_seed(mark)
    rank_state()[_STATE_KEY] = stream, mark


def _known_stream() -> Stream | None:
    """The stream where the last draw left it. None if torch's default generator was seeded or set since."""
    stream, mark = rank_state().get(_STATE_KEY, (None, None))
    return stream if mark == _torch.kept_seed() else None


def _stream() -> Stream | None:
    """The stream as this rank has it. None if the next draw takes torch's seed."""
    return _known_stream() or _place(_torch.kept_seed())


def _agreed_stream(mesh: DeviceMesh) -> Stream:
    """The stream after torch's default generator was seeded or set, as all ranks of the mesh have it."""
    explicit.check_message("the first draw", "ask the first rank for a seed", "Call spmd.manual_seed before it.")
    kept = _torch.kept_seed()
    place = _place(kept)
    mine = struct.pack("<?QQ", True, kept % 2**32, 0) if place is None else struct.pack("<?QQ", False, *place[:2])
    every = [struct.unpack("<?QQ", told) for told in transport().gather_bytes(mine, mesh)]
    seeded, seed, drawn = every[0]
    other = next((i for i, found in enumerate(every) if found != every[0] and not (seeded and found[0])), None)
    if other is not None:
        raise RuntimeError(
            f"random numbers: rank {mesh.ranks[0]} has {_told(*every[0])}, but rank {mesh.ranks[other]} "
            f"{_told(*every[other])}. Call torch.manual_seed, torch.set_rng_state and torch.random.fork_rng on all "
            "ranks alike, or spmd.manual_seed before the draw."
        )
    before = rank_state().get(_STATE_KEY, (None, None))[0]
    return _repeating(Stream(seed, drawn), before) if _torch.in_backward() else Stream(seed, drawn)


def _repeating(stream: Stream, before: Stream | None) -> Stream:
    """The stream at an earlier place, where draws are repeated, that was at the place `before` until now."""
    if before is None or before.seed != stream.seed:
        return stream._replace(known=2**64)  # the place where the forward ended is not known
    return stream._replace(known=max(before.drawn, before.known))


def _told(seeded: bool, seed: int, drawn: int) -> str:
    return f"a new seed of torch, {seed}" if seeded else f"gone back to draw {drawn} of seed {seed}"


# ---- what torch's generator carries -----------------------------------------------------------

_MARK, _LISTED = 1 << 63, 1 << 62
_DRAWS, _SEEDS = 1 << 30, 1 << 32
_list: dict[tuple[int, int], int] = {}
"""Seeds and counts of draws that are too large for a mark: the line by (seed, draws // 2**30)."""


def _mark(stream: Stream) -> int:
    """The number that stands for this place of the stream.

    >>> _place(_mark(Stream(7, 3)))
    Stream(seed=7, drawn=3, known=0)
    """
    high, low = divmod(stream.drawn, _DRAWS)
    if stream.seed < _SEEDS and not high:
        return _MARK | low << 32 | stream.seed
    return _MARK | _LISTED | low << 32 | _list.setdefault((stream.seed, high), len(_list))


def _place(kept: int) -> Stream | None:
    """The place that the number stands for; None for a seed of the user's, also for a negative one."""
    if not kept & _MARK:
        return None
    drawn, low = kept >> 32 & _DRAWS - 1, kept % _SEEDS
    if not kept & _LISTED:
        return Stream(low, drawn)
    if low >= len(_list):
        return None
    seed, high = list(_list)[low]
    return Stream(seed, high * _DRAWS + drawn)
