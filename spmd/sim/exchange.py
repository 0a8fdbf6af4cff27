"""One exchange of a simulation: the ranks post collectives, and each post gets its result.

Each rank posts a collective: its kind, its tensor and its group. The posts of a group must match, or no rank gets a
result. A rank that does not take part, calls another collective or has another shape is an error. The error shows both
calls and their lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmd.sim.collectives import Collective, call_error, mismatch, run_collective

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
    """The result of each post. `ranks`: all ranks that could have posted."""
    by_rank = {post.rank: post for post in posts}
    results: dict[int, torch.Tensor] = {}
    for post in posts:
        if post.rank not in results:
            members = [_member(rank, post, by_rank, ranks) for rank in post.group]
            _check(members)
            outs = run_collective([m.call for m in members], [m.tensor for m in members])
            results.update(zip(post.group, outs, strict=True))
    return [results[post.rank] for post in posts]


def _member(rank: int, post: Post, by_rank: dict[int, Post], ranks: Ranks) -> Post:
    """The post of one rank of the group of `post`; RuntimeError if there is none."""
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
        wrong = call_error(post.call, len(post.group))
        if wrong is not None:
            raise ValueError(f"{post}: {wrong}")
    wrong = mismatch([m.call for m in members], first.group)
    if wrong is not None:
        sides = {m.where for m in members}
        raise RuntimeError(f"group {list(first.group)}: {wrong}; at {' and '.join(sorted(sides))}")
