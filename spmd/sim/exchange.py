"""What ranks post meets what other ranks post: one step of all ranks of a simulation.

Each rank posts a collective - its kind, its tensor, its group. Those of a group must fit together, or nobody gets
anything: a rank that does not come, calls something else, or brings another shape is an error that shows both sides
and where they were called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spmd.sim.collectives import Collective, complaint, disagreement, play

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Post:
    """One rank's part of a collective."""

    rank: int
    group: Ranks
    call: Collective
    tensor: torch.Tensor
    where: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that the rank hands to the collective."""
        return self.tensor.numel() * self.tensor.element_size()

    def __str__(self) -> str:
        return f"rank {self.rank} calls {self.call} on group {list(self.group)} at {self.where}"


def exchange(posts: Sequence[Post], ranks: Ranks) -> list[torch.Tensor]:
    """What each post gets; `ranks` are those that could have posted."""
    by_rank = {post.rank: post for post in posts}
    results: dict[int, torch.Tensor] = {}
    for post in posts:
        if post.rank not in results:
            members = [_member(rank, post, by_rank, ranks) for rank in post.group]
            _check(members)
            outs = play([m.call for m in members], [m.tensor for m in members])
            results.update(zip(post.group, outs, strict=True))
    return [results[post.rank] for post in posts]


def _member(rank: int, post: Post, by_rank: dict[int, Post], ranks: Ranks) -> Post:
    """The post of one rank of a group."""
    if rank not in ranks:
        raise RuntimeError(
            f"{post}, but rank {rank} is not among the simulated ranks {list(ranks)}. Nothing can be sent to it: "
            "simulate all ranks of the group."
        )
    if rank not in by_rank:
        raise RuntimeError(f"{post}, but rank {rank} does not come; a real job would hang")
    return by_rank[rank]


def _check(members: list[Post]) -> None:
    first = members[0]
    for post in members:
        if post.group != first.group:
            raise RuntimeError(f"{first}, but {post}; a real job would hang")
        wrong = complaint(post.call, len(post.group))
        if wrong is not None:
            raise ValueError(f"{post}: {wrong}")
    wrong = disagreement([m.call for m in members], first.group)
    if wrong is not None:
        sides = {m.where for m in members}
        raise RuntimeError(f"group {list(first.group)}: {wrong}; at {' and '.join(sorted(sides))}")


def caller() -> str:
    """`train.py:12`: the innermost line that is neither torch's nor spmd's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_LIBRARY = (str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent), "<")


def is_library(file: str) -> bool:
    """Whether a file is torch's or spmd's own, or none at all."""
    return file.startswith(_LIBRARY) or "/contextlib.py" in file or "/functools.py" in file
