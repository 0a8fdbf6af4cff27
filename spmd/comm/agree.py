"""Ranks compare a text before they communicate: a divergence is an error with a diff after seconds, and no hang.

    try:
        program = build(step)
    except Exception as error:
        agree("", mesh, "building the program", error)
        raise
    agree(str(program), mesh, "the program")

Every rank must call `agree`, also a rank that failed; otherwise the other ranks would wait for it.

All comparisons of ranks begin with the same small collective (`differing`), so a rank that compares one thing notices a
rank that compares another.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from typing import NamedTuple

from spmd.comm.stuck import Place
from spmd.comm.transport import transport, uncompared
from spmd.mesh import DeviceMesh, per_rank

DIFF_LINES = 20


class RanksDiffer(RuntimeError):
    """Ranks have other texts. values: that of each rank, the same list on all of them."""

    def __init__(self, message: str, values: list[str]):
        super().__init__(message)
        self.values = values


class Statement(NamedTuple):
    """What a rank states in a comparison.

    kind: what is compared; ranks that compare different things are about to part. doing: what the rank is about to do,
    in words. lines: what must be equal on all ranks. failure: why this rank cannot go on; empty where it can. ended:
    whether this rank will compare nothing more on this mesh.
    """

    kind: str
    doing: str
    lines: tuple
    failure: str = ""
    ended: bool = False


def differing(
    key: bytes, statement: Callable[[], Statement], mesh: DeviceMesh, here: Place | None = None
) -> list[Statement] | None:
    """None if all ranks have the same key, else the statements of all ranks, which are made only then.

    The key is a digest of 32 bytes; zeros for a rank that failed. here: where the rank is, so that ranks that wait for
    each other on different meshes are named.
    """
    by = uncompared()
    if len(set(by.gather_bytes(key, mesh, here))) == 1 and key != FAILED:
        return None
    every = [Statement(*each) for each in by.gather_objects(tuple(statement()), mesh)]
    if any(each.ended for each in every):
        transport().stop_comparing(mesh)
    return every


FAILED = bytes(32)


def digest(*texts: str) -> bytes:
    """32 bytes that are equal for equal texts."""
    return hashlib.sha256("\0".join(texts).encode()).digest()


def agree(
    value: str, mesh: DeviceMesh, what: str, error: BaseException | None = None, more: Callable[[], str] | None = None,
    key: bytes = b"",
) -> None:  # fmt: skip
    """Return when every rank of the mesh has the same `value`; otherwise raise `RanksDiffer`, on every rank.

    `what` names the value in the message. A rank that failed passes its `error`: `agree` raises that error again on
    this rank, and on all other ranks a RuntimeError that says which rank failed and how. On a mesh of one rank there is
    nothing to compare; only an `error` is raised again.

    key, more: bytes that must be equal, too, and a function that writes them as lines, called only where they are not.
    """
    failure = "" if error is None else f"{type(error).__name__}: {error}"

    def mine() -> Statement:
        return Statement(what, what, (value if more is None else _joined(value, more()),), failure)

    every = differing(FAILED if error is not None else _key(digest(what, value), key), mine, mesh)
    if every is None:
        return
    if error is not None:
        raise error
    raise_if_one_failed(every, mesh)
    raise_if_other_things(every, mesh)
    values = [lines[0] for _, _, lines, *_ in every]
    raise RanksDiffer(_diff_message(values, mesh, what), values)


@per_rank
def _key(text: bytes, key: bytes) -> bytes:
    return hashlib.sha256(text + key).digest() if key else text


@per_rank
def _joined(value: str, more: str) -> str:
    return f"{value}\n{more}" if value else more


def raise_if_one_failed(every: list[Statement], mesh: DeviceMesh) -> None:
    """RuntimeError that names the first rank that failed, and why."""
    failed = [(rank, each) for rank, each in zip(mesh.ranks, every, strict=True) if each.failure]
    if failed:
        rank, first = failed[0]
        others = len(failed) - 1
        also = f" (and {others} more rank{'s' if others > 1 else ''})" if others else ""
        raise RuntimeError(f"{first.doing}: rank {rank} failed{also}: {first.failure}")


def raise_if_other_things(every: list[Statement], mesh: DeviceMesh) -> None:
    """RuntimeError if two ranks compare different things, such as a call of a step and an exchange of a DTensor."""
    other = next((i for i, each in enumerate(every) if each.kind != every[0].kind), None)
    if other is not None:
        raise RuntimeError(
            f"rank {mesh.ranks[0]} is at {every[0].doing},\nbut rank {mesh.ranks[other]} is at {every[other].doing}.\n"
            "All ranks must make the same calls in the same order; look for rank-dependent branches."
        )


def _diff_message(values: list[str], mesh: DeviceMesh, what: str) -> str:
    """The first two ranks that differ, and a short diff."""
    other = next(i for i, value in enumerate(values) if value != values[0])
    names = [f"rank {mesh.ranks[0]}", f"rank {mesh.ranks[other]}"]
    lines = list(difflib.unified_diff(values[0].splitlines(), values[other].splitlines(), *names, lineterm="", n=1))
    more = [f"... {len(lines) - DIFF_LINES + 1} more lines"] if len(lines) > DIFF_LINES else []
    shown = lines[: DIFF_LINES - len(more)] + more
    return "\n".join([
        f"{what} differs between {names[0]} and {names[1]}. All ranks must run the same code on the same sizes; "
        "look for rank-dependent branches, random order, or different versions.",
        *shown,
    ])  # fmt: skip
