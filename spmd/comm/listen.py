"""Who hears of each collective that this rank sends, such as `spmd.debug.CommDebugMode`.

    with listening(heard.append):
        y = x.full_tensor()
    heard                       # [Launched(kind='all_gather_into_tensor', nbytes=64, group='ranks:0-3', rank=0)]

Simulated ranks tell of their collectives themselves. Those of torch.distributed are ops of torch, which tell nobody; so
inside the block they go through a `HeardTransport`. What ranks send in order to compare something is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.comm.transport import C10dTransport, Transport, transport, use_transport
from spmd.mesh.rank import current_rank


class Launched(NamedTuple):
    """One rank's part of a collective: its kind as a transport names it, the bytes that the rank gives, its group."""

    kind: str
    nbytes: int
    group: str
    rank: int


Listener = Callable[[Launched], None]
_listeners: _torch.Carried[tuple[Listener, ...]] = _torch.Carried("spmd_collective_listeners", ())


def tell(kind: str, nbytes: int, group: str, rank: int) -> None:
    """Tell all who listen of a collective that a rank launches."""
    for listener in _listeners.get():
        listener(Launched(kind, nbytes, group, rank))


def is_heard() -> bool:
    """Whether anybody listens."""
    return bool(_listeners.get())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, `listener` hears of each collective of this thread, and of the threads that it starts as ranks."""
    by = transport()
    token = _listeners.set((*_listeners.get(), listener))
    try:
        if isinstance(getattr(by, "inner", by), C10dTransport):
            with use_transport(HeardTransport(by)):
                yield
        else:
            yield
    finally:
        _listeners.reset(token)


def tell_of_program(module: Any, nbytes: Sequence[int]) -> None:
    """Tell of the collectives of a bound program on torch.distributed, which runs without a transport.

    nbytes: the bytes of each; 0 is told of all where there are more or fewer than the program has.
    """
    sent = list(_sent(module)) if isinstance(module, torch.fx.GraphModule) else []
    for node, n in zip(sent, nbytes if len(nbytes) == len(sent) else [0] * len(sent), strict=True):
        kind = _torch.qualified_name(node.target).split("::")[1]
        tell(kind.removesuffix("_coalesced").removesuffix("_"), n, str(node.args[-1]), current_rank())


def _sent(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The collectives of a module in order; those of a loop (`expand/loops`) once a round."""
    for node in module.graph.nodes:
        if hasattr(node.target, "rounds"):
            yield from list(_sent(node.target.module)) * node.target.loop.times
        elif _is_collective(node.target):
            yield node


def _is_collective(target: Any) -> bool:
    return (
        isinstance(target, _torch.OpOverload)
        and target.namespace == "_c10d_functional"
        and target is not _torch.c10d_functional.wait_tensor.default
    )


def refuse_torchs_mode(*, simulated: bool) -> None:
    """RuntimeError where torch's CommDebugMode counts, and would not see a collective that is launched here."""
    if _torch.is_counted_by_torch(on_the_stack=simulated):
        raise RuntimeError(
            "torch's CommDebugMode does not see what ops on DTensors of spmd send, nor what simulated ranks do, and "
            "would count too little; use spmd.debug.CommDebugMode, which has the same methods"
        )


class HeardTransport:
    """Carries collectives by another transport, and tells of them. Several tensors in one launch count as several."""

    def __init__(self, carrier: Transport) -> None:
        self._carrier = carrier

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._carrier, name)
        if name == "inner":  # below what compares there is somebody who carries, and is heard
            return HeardTransport(found)
        return _told(name, found) if name in _COLLECTIVES else found

    def bound(self, make: Callable[[], Any]) -> Callable[..., Any]:
        """The bound program of this rank, which is told of when it runs."""
        with use_transport(self._carrier):
            return self._carrier.bound(make)


def _told(kind: str, collective: Callable) -> Callable:
    def launch(x: Any, *args: Any) -> Any:
        for each in x if isinstance(x, list) else [x]:
            tell(kind.removesuffix("_coalesced").removesuffix("_"), each.nbytes, str(args[-1]), current_rank())
        return collective(x, *args)

    return launch


_COLLECTIVES = {
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "broadcast_",
    "all_reduce_", "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
}  # fmt: skip
