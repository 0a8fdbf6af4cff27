"""Ranks that wait for each other on different meshes are named after a second, where they compare what they exchange.

    rank 0 compares with ranks 0, 1, 2, 3        and rank 1 has come to an exchange of ranks 1, 0: neither goes on

A rank that waits longer than LOOK_AFTER_S posts in the store of the default group where it is, and reads where the
ranks are that it waits for. If one of them waits elsewhere for a rank that waits for it, or has left `checked()`, all
raise. Nothing is posted as long as nobody waits. The groups are in use afterwards, so the job has to end.
"""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from spmd import _torch

LOOK_AFTER_S = 1.0
PAUSE_S = 0.1

_numbers = itertools.count(1)


class Stuck(RuntimeError):
    """Ranks wait for each other, or for one that does not come."""


class Place(NamedTuple):
    """Where a rank is: in which block of `checked()`, what it is about to do, and with which ranks; or why it ended."""

    block: int
    doing: str
    ranks: tuple[int, ...]
    ended: str = ""


def next_block() -> int:
    """The number of a new block. All ranks use the same blocks, so they number them alike."""
    return next(_numbers)


def wait_or_name(work: dist.Work, here: Place) -> None:
    """Wait for a collective. `Stuck` if its ranks wait elsewhere. here: where this rank is."""
    try:
        work.wait(timedelta(seconds=LOOK_AFTER_S))
        return
    except RuntimeError:
        if work.is_completed():
            raise
    post(here)
    problem = ""
    while not work.is_completed():
        before, problem = problem, _problem(here)
        if problem and problem == before:  # nobody has moved in between
            post(here._replace(ended=problem))
            raise Stuck(problem)
        time.sleep(PAUSE_S)
    post(here._replace(ranks=()))
    work.wait()


def post(place: Place) -> None:
    """Say where this rank is."""
    _torch.default_store().set(_key(dist.get_rank()), json.dumps(place))


def _key(rank: int) -> str:
    return f"spmd/stuck/{rank}"


def _place_of(rank: int) -> Place | None:
    store = _torch.default_store()
    if not store.check([_key(rank)]):
        return None
    block, doing, ranks, ended = json.loads(store.get(_key(rank)))
    return Place(block, doing, tuple(ranks), ended)


def _problem(here: Place) -> str:
    """Why this rank can wait for ever; empty if it need not. It follows who waits for whom until one comes again."""
    rank, place, seen = dist.get_rank(), here, []
    while rank not in seen:
        seen.append(rank)
        others = {other: _place_of(other) for other in place.ranks if other != rank}
        told = next((p.ended for p in others.values() if p and p.ended and p.block == here.block and p.ranks), "")
        if told:
            return told
        gone = next((other for other, p in others.items() if p and (p.block > here.block or _has_left(p, here))), None)
        if gone is not None:
            return f"{_at(rank, place)}, but rank {gone} has left checked(). {_ADVICE}"
        elsewhere = [(other, p) for other, p in others.items() if p and p.ranks not in ((), place.ranks)]
        if not elsewhere:
            return ""
        waiting, (rank, place) = _at(rank, place), elsewhere[0]
    return f"{waiting},\nbut {_at(rank, place)}: they wait for each other. {_ADVICE}"


def _has_left(place: Place, here: Place) -> bool:
    return place.block == here.block and bool(place.ended) and not place.ranks


def _at(rank: int, place: Place) -> str:
    return f"rank {rank} waits at {place.doing} for ranks {list(place.ranks)}"


_ADVICE = "All ranks must make the same exchanges in the same order; look for rank-dependent branches."
