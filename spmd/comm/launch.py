"""Collectives on plain tensors, launched on the current transport; without gradients.

In a trace the transport is always torch.distributed's dispatcher ops, which any rank can run later, and the wait
directly follows each collective. Otherwise the result is an AsyncTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from spmd import _torch
from spmd.comm import packing as p
from spmd.comm.added import adds_terms
from spmd.comm.async_tensor import AsyncTensor, unless_written, wait
from spmd.comm.check import compare_call, compare_splits, comparing
from spmd.comm.group import Members
from spmd.comm.transport import C10dTransport, Transport, transport
from spmd.mesh.rank import rank_simulator

_C10D = C10dTransport()


def _on_each_played_rank(launch: Callable) -> Callable:
    """Decorates a launch: where one thread plays several ranks, each of them launches and waits for its own result."""

    @functools.wraps(launch)
    def run(*args):
        if rank_simulator() is None or _torch.in_trace():
            return launch(*args)
        return transport().step(launch, _wait_for_all, *args)

    return run


def _wait_for_all(came):
    return [wait(y) for y in came] if isinstance(came, list) else wait(came)


@_on_each_played_rank
def all_reduce(x: torch.Tensor, reduce_op: str, to: Members) -> torch.Tensor:
    """See `spmd.comm.all_reduce`, here and below."""
    x = wait(x)
    packed, carrier = p.pack_all_reduce(x, reduce_op, to.size), _transport_of(x)
    carrier = _compared(carrier, "all_reduce", [x], (reduce_op,), to)
    return _result(_launch(carrier, carrier.all_reduce, packed.sent, packed.op, to.name), packed, carrier)


@_on_each_played_rank
def all_gather(x: torch.Tensor, dim: int, to: Members) -> torch.Tensor:
    x = wait(x)
    packed, carrier = p.pack_all_gather(x, dim, to.size), _transport_of(x)
    carrier = _compared(carrier, "all_gather_tensor", [x], (dim,), to)
    raw = _launch(carrier, carrier.all_gather_into_tensor, packed.sent, to.size, to.name)
    return _result(raw, packed, carrier, "all_gather_tensor")


@_on_each_played_rank
def reduce_scatter(x: torch.Tensor, reduce_op: str, dim: int, to: Members) -> torch.Tensor:
    x = wait(x)
    packed, carrier = p.pack_reduce_scatter(x, reduce_op, dim, to.size), _transport_of(x)
    carrier = _compared(carrier, "reduce_scatter_tensor", [x], (reduce_op, dim), to)
    if carrier is _C10D or not adds_terms(carrier, x.device.type, packed.sent.dtype, packed.op):
        raw = _launch(carrier, carrier.reduce_scatter_tensor, packed.sent, packed.op, to.size, to.name)
        return _result(raw, packed, carrier, "reduce_scatter_tensor")
    rows = [len(packed.sent) // to.size] * to.size
    raw = _launch(carrier, carrier.all_to_all_single, packed.sent, rows, rows, to.name)
    return _result(raw, p.of_terms(packed, rows), carrier, "reduce_scatter_tensor")


@_on_each_played_rank
def all_to_all(
    x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], to: Members, shape: p.Shape | None = None
) -> torch.Tensor:
    """shape: the shape of the result if its rows differ from those of x; the result is zeros if no row is received."""
    x = wait(x)
    packed, carrier = p.pack_all_to_all(x, sum(out_splits), shape), _transport_of(x)
    if carrier is not _C10D and comparing(carrier):
        carrier = compare_splits(carrier, x, out_splits, in_splits, to)
    raw = _launch(carrier, carrier.all_to_all_single, packed.sent, list(out_splits), list(in_splits), to.name)
    return _result(raw, packed, carrier, "the all-to-all")


@_on_each_played_rank
def broadcast(x: torch.Tensor, src: int, to: Members) -> torch.Tensor:
    x = wait(x)
    packed, carrier = p.pack_broadcast(x), _transport_of(x)
    carrier = _compared(carrier, "broadcast", [x], (src,), to)
    return _result(_launch(carrier, carrier.broadcast, packed.sent, src, to.name), packed, carrier)


@_on_each_played_rank
def all_reduce_coalesced(xs: Sequence[torch.Tensor], reduce_op: str, to: Members) -> list[torch.Tensor]:
    xs = [wait(x) for x in xs]
    packs = [p.pack_all_reduce(x, reduce_op, to.size) for x in xs]
    return _launch_coalesced("all_reduce_coalesced", xs, packs, (reduce_op,), to)


@_on_each_played_rank
def all_gather_coalesced(xs: Sequence[torch.Tensor], dims: Sequence[int], to: Members) -> list[torch.Tensor]:
    xs = [wait(x) for x in xs]
    packs = [p.pack_all_gather(x, dim, to.size) for x, dim in zip(xs, dims, strict=True)]
    return _launch_coalesced("all_gather_into_tensor_coalesced", xs, packs, (tuple(dims),), to)


@_on_each_played_rank
def reduce_scatter_coalesced(
    xs: Sequence[torch.Tensor], reduce_op: str, dims: Sequence[int], to: Members
) -> list[torch.Tensor]:
    xs = [wait(x) for x in xs]
    packs = [p.pack_reduce_scatter(x, reduce_op, dim, to.size) for x, dim in zip(xs, dims, strict=True)]
    return _launch_coalesced("reduce_scatter_tensor_coalesced", xs, packs, (reduce_op, tuple(dims)), to)


def _launch_coalesced(
    kind: str, xs: list[torch.Tensor], packs: list[p.Packed], arguments: tuple, to: Members
) -> list[torch.Tensor]:
    """Send all packed tensors; those of one dtype and one reduction share a launch."""
    if not packs:
        return []
    carrier = _transport_of(xs[0])
    carrier = _compared(carrier, kind, xs, arguments, to)
    alike: dict[tuple, list[int]] = {}
    for i, packed in enumerate(packs):
        alike.setdefault((packed.sent.dtype, packed.op), []).append(i)
    received: list[torch.Tensor] = [packed.sent for packed in packs]
    for (_, op), places in alike.items():
        reduction = () if kind.startswith("all_gather") else (op,)
        size = () if kind.startswith("all_reduce") else (to.size,)
        came = _launch(carrier, getattr(carrier, kind), [packs[i].sent for i in places], *reduction, *size, to.name)
        for i, raw in zip(places, came, strict=True):
            received[i] = raw
    reader = "" if kind.startswith("all_reduce") else kind
    return [_result(raw, packed, carrier, reader) for raw, packed in zip(received, packs, strict=True)]


def _transport_of(x: torch.Tensor) -> Transport:
    return _C10D if _torch.is_tracing(x) else transport()


def _launch(carrier: Transport, collective: Callable, *args):
    """Call the collective below autograd: `adjoint` has the gradients, and autograd of the ops would cost more time."""
    if carrier is _C10D:
        return collective(*args)
    with _torch.below_autograd():
        return collective(*args)


def _compared(carrier: Transport, kind: str, xs: list[torch.Tensor], arguments: tuple, to: Members) -> Transport:
    """The transport that carries the collective, after the ranks have compared it if they are to."""
    asked = carrier is not _C10D and comparing(carrier)
    return compare_call(carrier, kind, xs, arguments, to) if asked else carrier


def _result(raw: torch.Tensor, packed: p.Packed, carrier: Transport, reader: str = "") -> torch.Tensor:
    """The unpacked result. `reader`: the collective's name if it reads the sent tensor until the result has arrived;
    empty if it sends a copy.
    """
    unpack = packed.unpack
    if carrier is _C10D:
        y = carrier.wait_tensor(raw)
        return unpack(y) if unpack is not None else y
    receive = carrier.wait_tensor if unpack is None else lambda sent: unpack(carrier.wait_tensor(sent))
    if reader:
        receive = unless_written(packed.sent, receive, reader)
    return AsyncTensor(raw, packed.shape, packed.dtype, receive)
