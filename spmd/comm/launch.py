"""Collectives on plain tensors, launched by whoever carries them; no gradients.

In a trace the carrier is always torch.distributed's dispatcher ops, which any rank may run later, and the wait stands
right behind each; otherwise the result is an AsyncTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from spmd import _torch
from spmd.comm import parcel as p
from spmd.comm.async_tensor import AsyncTensor, unless_written, wait
from spmd.comm.check import check_call, check_splits, checked, checking
from spmd.comm.group import Members
from spmd.comm.transport import C10dTransport, Transport, transport
from spmd.mesh.rank import players

_OPS = C10dTransport()


def _played(launch: Callable) -> Callable:
    """Where one thread plays several ranks each launches its own, and what comes is what they have waited for."""

    @functools.wraps(launch)
    def run(*args):
        if players() is None or _torch.in_trace():
            return launch(*args)
        with checked(False):  # which whoever plays them does anyway
            return transport().step(launch, _arrived, *args)

    return run


def _arrived(came):
    return [wait(y) for y in came] if isinstance(came, list) else wait(came)


@_played
def all_reduce(x: torch.Tensor, reduce_op: str, to: Members) -> torch.Tensor:
    """See `spmd.comm.all_reduce`, here and below."""
    x = wait(x)
    parcel, by = p.to_reduce(x, reduce_op, to.size), _carrier(x)
    _check(by, "all_reduce", [x], (reduce_op,), to)
    return _result(_launched(by, by.all_reduce, parcel.sent, parcel.op, to.name), parcel, by)


@_played
def all_gather(x: torch.Tensor, dim: int, to: Members) -> torch.Tensor:
    x = wait(x)
    parcel, by = p.to_gather(x, dim, to.size), _carrier(x)
    _check(by, "all_gather_tensor", [x], (dim,), to)
    raw = _launched(by, by.all_gather_into_tensor, parcel.sent, to.size, to.name)
    return _result(raw, parcel, by, "all_gather_tensor")


@_played
def reduce_scatter(x: torch.Tensor, reduce_op: str, dim: int, to: Members) -> torch.Tensor:
    x = wait(x)
    parcel, by = p.to_reduce_scatter(x, reduce_op, dim, to.size), _carrier(x)
    _check(by, "reduce_scatter_tensor", [x], (reduce_op, dim), to)
    raw = _launched(by, by.reduce_scatter_tensor, parcel.sent, parcel.op, to.size, to.name)
    return _result(raw, parcel, by, "reduce_scatter_tensor")


@_played
def all_to_all(
    x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], to: Members, shape: p.Shape | None = None
) -> torch.Tensor:
    """shape: that of the result, where it is not rows like those of x; zeros where no row comes."""
    x = wait(x)
    parcel, by = p.to_exchange(x, sum(out_splits), shape), _carrier(x)
    if by is not _OPS and checking():
        check_splits(x, out_splits, in_splits, to)
    raw = _launched(by, by.all_to_all_single, parcel.sent, list(out_splits), list(in_splits), to.name)
    return _result(raw, parcel, by, "the all-to-all")


@_played
def broadcast(x: torch.Tensor, src: int, to: Members) -> torch.Tensor:
    x = wait(x)
    parcel, by = p.to_broadcast(x), _carrier(x)
    _check(by, "broadcast", [x], (src,), to)
    return _result(_launched(by, by.broadcast, parcel.sent, src, to.name), parcel, by)


@_played
def all_reduce_coalesced(xs: Sequence[torch.Tensor], reduce_op: str, to: Members) -> list[torch.Tensor]:
    xs = [wait(x) for x in xs]
    return _many("all_reduce_coalesced", xs, [p.to_reduce(x, reduce_op, to.size) for x in xs], (reduce_op,), to)


@_played
def all_gather_coalesced(xs: Sequence[torch.Tensor], dims: Sequence[int], to: Members) -> list[torch.Tensor]:
    xs = [wait(x) for x in xs]
    parcels = [p.to_gather(x, dim, to.size) for x, dim in zip(xs, dims, strict=True)]
    return _many("all_gather_into_tensor_coalesced", xs, parcels, (tuple(dims),), to)


@_played
def reduce_scatter_coalesced(
    xs: Sequence[torch.Tensor], reduce_op: str, dims: Sequence[int], to: Members
) -> list[torch.Tensor]:
    xs = [wait(x) for x in xs]
    parcels = [p.to_reduce_scatter(x, reduce_op, dim, to.size) for x, dim in zip(xs, dims, strict=True)]
    return _many("reduce_scatter_tensor_coalesced", xs, parcels, (reduce_op, tuple(dims)), to)


def _many(
    kind: str, xs: list[torch.Tensor], parcels: list[p.Parcel], plain: tuple, to: Members
) -> list[torch.Tensor]:
    """All parcels, those of one dtype and reduction in one launch."""
    if not parcels:
        return []
    by = _carrier(xs[0])
    _check(by, kind, xs, plain, to)
    alike: dict[tuple, list[int]] = {}
    for i, parcel in enumerate(parcels):
        alike.setdefault((parcel.sent.dtype, parcel.op), []).append(i)
    raws: list[torch.Tensor] = [parcel.sent for parcel in parcels]
    for (_, op), places in alike.items():
        reduction = () if kind.startswith("all_gather") else (op,)
        size = () if kind.startswith("all_reduce") else (to.size,)
        came = _launched(by, getattr(by, kind), [parcels[i].sent for i in places], *reduction, *size, to.name)
        for i, raw in zip(places, came, strict=True):
            raws[i] = raw
    reader = "" if kind.startswith("all_reduce") else kind
    return [_result(raw, parcel, by, reader) for raw, parcel in zip(raws, parcels, strict=True)]


def _carrier(x: torch.Tensor) -> Transport:
    return _OPS if _torch.is_tracing(x) else transport()


def _launched(by: Transport, collective: Callable, *args):
    """What the collective gives: gradients are the adjoints' affair, and the ops' own would take longer than they."""
    if by is _OPS:
        return collective(*args)
    with _torch.below_autograd():
        return collective(*args)


def _check(by: Transport, kind: str, xs: list[torch.Tensor], plain: tuple, to: Members) -> None:
    if by is not _OPS and checking():
        check_call(kind, xs, plain, to)


def _result(raw: torch.Tensor, parcel: p.Parcel, by: Transport, reader: str = "") -> torch.Tensor:
    """`reader`: the collective, where it reads what is sent until it has arrived; others take a copy first."""
    opened = parcel.opened
    if by is _OPS:
        y = by.wait_tensor(raw)
        return opened(y) if opened is not None else y
    receive = by.wait_tensor if opened is None else lambda sent: opened(by.wait_tensor(sent))
    if reader:
        receive = unless_written(parcel.sent, receive, reader)
    return AsyncTensor(raw, parcel.shape, parcel.dtype, receive)
