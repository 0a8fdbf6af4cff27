"""Ranks compare what they call before they send it: a debug mode, off by default.

    with checked():
        all_reduce(x, "sum", mesh)      # an error on all ranks when one has another op, shape or dtype

On where torch's own debug level is DETAIL, too (TORCH_DISTRIBUTED_DEBUG=DETAIL). Costs a small collective a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

from spmd.comm.group import Members
from spmd.comm.transport import transport
from spmd.mesh import DeviceMesh, groups

_DETAIL = dist.DebugLevel.DETAIL
_checked: ContextVar[bool | None] = ContextVar("spmd_checked_collectives", default=None)


@contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Compare every collective across its ranks inside the block, in this thread only; all ranks must do so."""
    token = _checked.set(on)
    try:
        yield
    finally:
        _checked.reset(token)


def checking() -> bool:
    """Whether ranks compare what they call."""
    on = _checked.get()
    return dist.get_debug_level() == _DETAIL if on is None else on


def check_metadata(what: str, tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """RuntimeError on all ranks of the mesh unless each has tensors of these shapes and dtypes; `what`: the call."""
    _compare(f"{what} of {', '.join(map(described, tensors))}", mesh)


def check_call(kind: str, x: Sequence[torch.Tensor], plain: tuple, to: Members) -> None:
    """The same for a collective on a group, with its plain arguments."""
    check_metadata(f"{kind}({', '.join(map(repr, plain))})", x, _mesh_of(to))


def check_splits(x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], to: Members) -> None:
    """RuntimeError on all ranks unless each sends as many rows of one kind as the others expect of it."""
    mesh = _mesh_of(to)
    row = f"rows of {described(x[:0])}"
    every = transport().gather_objects((row, tuple(out_splits), tuple(in_splits)), mesh)
    _raise_if_unlike([f"all_to_all_single of {kind}" for kind, _, _ in every], mesh)
    for i, (_, _, sent) in enumerate(every):
        for j, (_, expected, _) in enumerate(every):
            if sent[j] != expected[i]:
                raise RuntimeError(
                    f"all_to_all_single: rank {mesh.ranks[i]} sends {sent[j]} rows to rank {mesh.ranks[j]}, which "
                    f"expects {expected[i]}. Rank i's input_split_sizes[j] must be rank j's output_split_sizes[i]."
                )


def described(x: torch.Tensor) -> str:
    """`float32 [2, 3] on cpu`."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device.type}"


def _mesh_of(to: Members) -> DeviceMesh:
    ranks = groups.ranks_in(to.name) or groups.ranks_of(groups.called(to.name))
    return DeviceMesh("cpu", ranks)


def _compare(call: str, mesh: DeviceMesh) -> None:
    _raise_if_unlike(transport().gather_objects(call, mesh), mesh)


def _raise_if_unlike(calls: list[str], mesh: DeviceMesh) -> None:
    other = next((i for i, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        raise RuntimeError(
            f"rank {mesh.ranks[0]} calls {calls[0]},\nbut rank {mesh.ranks[other]} calls {calls[other]}.\n"
            "All ranks of a group must call the same collective with tensors of one shape and dtype; pad uneven "
            "ones first, or look for rank-dependent branches."
        )
