"""The collectives of all ranks that one thread plays, in the shape of `spmd.comm.Transport`.

Code that runs once for all ranks calls a collective with LocalTensors (`all_reduce`, ...). Code that has to run once a
rank, since its way depends on the rank, does so in three beats (`step`): every rank starts and posts what it sends, the
posts are exchanged, every rank finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from spmd import _torch
from spmd.mesh import DeviceMesh, current_rank, groups
from spmd.sim.collectives import Collective
from spmd.sim.exchange import Post, caller, exchange
from spmd.sim.local_tensor import LocalTensor, wrap
from spmd.sim.lockstep import Walk, walk_together
from spmd.sim.varying import pick

if TYPE_CHECKING:
    from spmd.sim.local_mode import LocalTensorMode


@dataclass(frozen=True)
class Sent:
    """What one rank gave to one collective: the n-th exchange of the simulation. `args`: as in `Collective`."""

    step: int
    rank: int
    kind: str
    group: tuple[int, ...]
    nbytes: int
    where: str
    args: tuple = ()


class _Collectives:
    """The methods of a transport, all handed to `_call`."""

    def _call(self, kind: str, x: Any, args: tuple, group: Any) -> Any:
        raise NotImplementedError

    def all_reduce(self, x, op, group):
        """See `spmd.comm.Transport`, here and below."""
        return self._call("all_reduce", x, (op,), group)

    def all_gather_into_tensor(self, x, n, group):
        return self._call("all_gather_into_tensor", x, (n,), group)

    def reduce_scatter_tensor(self, x, op, n, group):
        return self._call("reduce_scatter_tensor", x, (op, n), group)

    def all_to_all_single(self, x, out_splits, in_splits, group):
        return self._call("all_to_all_single", x, (tuple(out_splits), tuple(in_splits)), group)

    def broadcast(self, x, src, group):
        return self._call("broadcast", x, (src,), group)

    def broadcast_(self, x, src, group):
        came = self.wait_tensor(self.broadcast(x, src, group))
        with torch.no_grad():
            return x.copy_(came)

    def all_reduce_coalesced(self, xs, op, group):
        return [self.all_reduce(x, op, group) for x in xs]

    def all_gather_into_tensor_coalesced(self, xs, n, group):
        return [self.all_gather_into_tensor(x, n, group) for x in xs]

    def reduce_scatter_tensor_coalesced(self, xs, op, n, group):
        return [self.reduce_scatter_tensor(x, op, n, group) for x in xs]

    def wait_tensor(self, x):
        return x


class LocalTransport(_Collectives):
    """Carries the collectives of all ranks of a mode."""

    def __init__(self, mode: LocalTensorMode) -> None:
        self.mode = mode
        self.sent: list[Sent] = []
        self._steps = 0

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        """`finish(start(*args))` for every rank with its arguments, the collectives of `start` exchanged in between."""
        where, posting = caller(), {rank: Posting(rank) for rank in self.mode.ranks}
        started = self.mode.each_with(posting, start, [args] * len(posting), where)
        self._deliver(posting)
        return self.mode.joined(self.mode.each_with(posting, finish, [(x,) for x in started], where))

    def _deliver(self, posting: dict[int, Posting]) -> None:
        """Exchange all that was posted. What does not fit together is an error."""
        while self._deliver_some(posting):
            pass
        self._check_delivered(posting)

    def _deliver_some(self, posting: dict[int, Posting]) -> bool:
        """Exchange what the groups have that are complete, each rank's posts in their order; whether there was any."""
        heads = {rank: p.due[0] for rank, p in posting.items() if p.due}
        ready = [r for r, (post, _) in heads.items() if all(_comes(heads.get(m), post) for m in post.group)]
        if ready:
            results = self.exchange([heads[rank][0] for rank in ready])
            for rank, result in zip(ready, results, strict=True):
                posting[rank].deliver(result)
        return bool(ready)

    def _check_delivered(self, posting: dict[int, Posting]) -> None:
        """Nothing may be left over: exchanging it says why it does not fit."""
        heads = [p.due[0][0] for p in posting.values() if p.due]
        if heads:
            self.exchange(heads)

    def exchange(self, posts: list[Post]) -> list[torch.Tensor]:
        """What each post gets; noted in `sent`."""
        results = exchange(posts, self.mode.ranks)
        self.note(posts)
        return results

    def note(self, posts: list[Post]) -> None:
        """Write down what each rank sends."""
        self.sent += [Sent(self._steps, p.rank, p.call.kind, p.group, p.nbytes, p.where, p.call.args) for p in posts]
        self._steps += 1

    def bound(self, make: Callable[[], fx.GraphModule]) -> Callable[..., Any]:
        """The program that `make` gives each rank, as one function of what differs between ranks."""
        posting = {rank: Posting(rank) for rank in self.mode.ranks}
        modules = self.mode.each_with(posting, make, [()] * len(posting), "")

        def run(*inputs: Any) -> Any:
            where = caller()
            walks = [
                Walk(module, by, [_own(x, rank) for x in inputs])
                for module, (rank, by) in zip(modules, posting.items(), strict=True)
            ]

            def playing(i: int) -> AbstractContextManager:
                rank = self.mode.ranks[i]
                posting[rank].where = where
                return self.mode.playing(rank, posting[rank])

            results = walk_together(walks, playing, lambda: self._deliver_some(posting))
            self._check_delivered(posting)
            return self.mode.joined(results)

        return run

    def _call(self, kind: str, x: Any, args: tuple, group: Any) -> Any:
        ranks = x.ranks if type(x) is LocalTensor else self.mode.ranks
        where = caller()
        with _torch.no_modes():
            posts = [_post(rank, kind, _own(x, rank), _own(args, rank), _own(group, rank), where) for rank in ranks]
            return wrap(ranks, self.exchange(posts))

    def op(self, op: Callable, args: tuple, kwargs: dict) -> Any:
        """One of torch's functional collectives, as traced programs call it."""
        name = _torch.qualified_name(op).split("::")[1]
        if name.endswith("_out"):
            with torch.no_grad():
                return kwargs["out"].copy_(getattr(self, name.removesuffix("_out"))(*args))
        if name in ("all_reduce_", "all_reduce_coalesced_"):
            return _written_back(args[0], getattr(self, name[:-1])(*args, **kwargs))
        if name == "_wrap_tensor_autograd":  # torch's own asynchronous tensor: here nothing is on its way
            return wrap(args[0].ranks, args[0]._of)
        if not hasattr(_Collectives, name):
            raise NotImplementedError(f"{op} cannot be simulated; use the collectives of spmd.comm")
        return getattr(self, name)(*args, **kwargs)

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> Any:
        """The names of all groups along an axis: each rank's own."""
        return self.mode.each(_group_here, (mesh, axis))

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """Each rank's object; of what all ranks have alike, as many."""
        return [_own(obj, rank) for rank in mesh.ranks]

    def gather_marks(self, mark: bytes, mesh: DeviceMesh) -> list[bytes]:
        return self.gather_objects(mark, mesh)


class Posting(_Collectives):
    """One rank's collectives in a step: posted while it starts, arrived when it finishes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.where = rank, ""
        self.due: deque[tuple[Post, torch.Tensor]] = deque()  # with what stands for the result until it is there
        self._arrived: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _call(self, kind: str, x: torch.Tensor, args: tuple, group: str) -> torch.Tensor:
        token = x.new_empty(0)
        self.due.append((_post(self.rank, kind, x, args, group, self.where), token))
        return token

    def deliver(self, result: torch.Tensor) -> None:
        """The result of what is due first."""
        _, token = self.due.popleft()
        self._arrived[id(token)] = (token, result)  # the token is kept, so that no other gets its id

    def has(self, x: torch.Tensor) -> bool:
        """Whether nothing is still to come for it."""
        return all(token is not x for _, token in self.due)

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        _, result = self._arrived.pop(id(x), (x, x))
        return result

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        return _group_here(mesh, axis)

    def refuse(self, kind: str) -> None:
        """RuntimeError: this rank may not communicate now."""
        raise _no_talking(self.rank, kind)

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        raise _no_talking(self.rank, "gather_objects")

    gather_marks = gather_objects

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        raise _no_talking(self.rank, "a step of its own")


class Silent(Posting):
    """The transport of a function that runs once a rank: there nothing can be sent."""

    def _call(self, kind: str, x: torch.Tensor, args: tuple, group: str) -> torch.Tensor:
        raise _no_talking(self.rank, kind)


def _comes(head: tuple[Post, torch.Tensor] | None, post: Post) -> bool:
    return head is not None and head[0].group == post.group


def _no_talking(rank: int, kind: str) -> RuntimeError:
    return RuntimeError(
        f"rank {rank} calls {kind} at {caller()}, in a function that runs once a rank: the other ranks have not come "
        "there, and a real job might hang. Communicate outside of it, or play whole ranks with spmd.sim.run_ranks."
    )


def _post(rank: int, kind: str, x: torch.Tensor, args: tuple, group: str, where: str) -> Post:
    ranks = groups.ranks_in(group, rank)
    if ranks is None:
        ranks = groups.ranks_of(groups.called(group))
    if rank not in ranks:
        raise ValueError(f"rank {rank} calls {kind} on group {list(ranks)} at {where}, which it is not in")
    return Post(rank, ranks, Collective.of(kind, x.detach(), *args), x.detach(), where)


def _own(value: Any, rank: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_own(v, rank) for v in value)
    return value.local[rank] if type(value) is LocalTensor else pick(value, rank)


def _written_back(into: Any, came: Any) -> Any:
    with torch.no_grad():
        for x, y in zip(into, came, strict=True) if isinstance(into, (list, tuple)) else [(into, came)]:
            x.copy_(y)
    return into


def _group_here(mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
    return groups.name_of(mesh.ranks_along(axis, mesh.coordinate_of(current_rank())))
