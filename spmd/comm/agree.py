"""Ranks compare notes before they talk: a divergence becomes an error in seconds, with a diff, and no hang.

    try:
        program = build(step)
    except Exception as error:
        agree("", mesh, "building the program", error)
        raise
    agree(str(program), mesh, "the program")

Everybody comes here, also the rank that failed; otherwise the others would wait for it.
"""

from __future__ import annotations

import difflib
import hashlib

from spmd.comm.transport import transport
from spmd.mesh import DeviceMesh

DIFF_LINES = 20


def agree(value: str, mesh: DeviceMesh, what: str, error: BaseException | None = None) -> None:
    """Return when every rank of the mesh has the same `value`; otherwise raise, on every rank.

    `what` names the thing in the message. A rank that failed passes its `error`: it gets that error back, and all
    the others a RuntimeError that tells who failed and how. On a mesh of one rank only the error counts.
    """
    mark = bytes(32) if error is not None else hashlib.sha256(value.encode()).digest()
    if len(set(transport().gather_marks(mark, mesh))) == 1 and error is None:
        return
    # Only now the texts travel: they may be long, and this road is taken once.
    failure = "" if error is None else f"{type(error).__name__}: {error}"
    every = transport().gather_objects((failure, value), mesh)
    if error is not None:
        raise error
    _raise_if_one_failed([text for text, _ in every], mesh, what)
    raise RuntimeError(_difference([value for _, value in every], mesh, what))


def _raise_if_one_failed(failures: list[str], mesh: DeviceMesh, what: str) -> None:
    failed = [(rank, text) for rank, text in zip(mesh.ranks, failures, strict=True) if text]
    if failed:
        rank, text = failed[0]
        others = len(failed) - 1
        also = f" (and {others} more rank{'s' if others > 1 else ''})" if others else ""
        raise RuntimeError(f"{what}: rank {rank} failed{also}: {text}")


def _difference(values: list[str], mesh: DeviceMesh, what: str) -> str:
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
