"""The collectives of all ranks that one thread plays, with the interface of `spmd.comm.Transport`.

Code that runs once for all ranks calls a collective with LocalTensors (`all_reduce`, ...). Code that branches on the
rank must run once for each rank. It does so in three phases (`step`): every rank starts and posts its collectives, the
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
from spmd.comm.listen import is_heard, refuse_torchs_mode, tell
from spmd.comm.user_line import caller
from spmd.mesh import DeviceMesh, current_rank, groups
from spmd.sim.collectives import Collective
from spmd.sim.exchange import Post, exchange
from spmd.sim.local_int import pick, values_of
from spmd.sim.local_tensor import LocalTensor, join_values, wrap
from spmd.sim.lockstep import ProgramRun, run_together
from spmd.sim.simulated_transport import SimulatedTransport

if TYPE_CHECKING:
    from spmd.sim.local_mode import LocalTensorMode


@dataclass(frozen=True)
class Sent:
    """One rank's part of one collective. `step`: the number of the exchange; `args`: as in `Collective`."""

    step: int
    rank: int
    kind: str
    group: tuple[int, ...]
    nbytes: int
    where: str
    args: tuple = ()


class LocalTransport(SimulatedTransport):
    """Carries the collectives of all ranks of a mode."""

    def __init__(self, mode: LocalTensorMode) -> None:
        self.mode = mode
        self.sent: list[Sent] = []
        self._steps = 0

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        """`finish(start(*args))` for every rank with its arguments; the posts of `start` are exchanged in between."""
        where, transports = caller(), {rank: PostingTransport(rank) for rank in self.mode.ranks}
        started = self.mode.each_with_transport(transports, start, [args] * len(transports), where)
        self._deliver(transports)
        return self.mode.join(self.mode.each_with_transport(transports, finish, [(x,) for x in started], where))

    def _deliver(self, transports: dict[int, PostingTransport]) -> None:
        """Exchange all posts. Posts that do not match are an error."""
        while self._deliver_ready(transports):
            pass
        self._check_delivered(transports)

    def _deliver_ready(self, transports: dict[int, PostingTransport]) -> bool:
        """Exchange the posts of the groups that are complete, for each rank in order; whether there were any."""
        heads = {rank: p.posted[0] for rank, p in transports.items() if p.posted}
        ready = [r for r, (post, _) in heads.items() if all(_posts_on(heads.get(m), post) for m in post.group)]
        if ready:
            results = self.exchange([heads[rank][0] for rank in ready])
            for rank, result in zip(ready, results, strict=True):
                transports[rank].deliver(result)
        return bool(ready)

    def _check_delivered(self, transports: dict[int, PostingTransport]) -> None:
        """No post may be left over. If one is, its exchange raises the error that says why it does not match."""
        heads = [p.posted[0][0] for p in transports.values() if p.posted]
        if heads:
            self.exchange(heads)

    def exchange(self, posts: list[Post]) -> list[torch.Tensor]:
        """The result of each post; records the posts in `sent`."""
        results = exchange(posts, self.mode.ranks)
        self.record(posts)
        return results

    def record(self, posts: list[Post]) -> None:
        """Add each rank's part to `sent`."""
        self.sent += [Sent(self._steps, p.rank, p.call.kind, p.group, p.nbytes, p.where, p.call.args) for p in posts]
        self._steps += 1
        refuse_torchs_mode(simulated=True)
        if is_heard():
            for p in posts:
                tell(p.call.kind, p.nbytes, groups.name_of(p.group), p.rank)

    def bound(self, make: Callable[[], fx.GraphModule]) -> Callable[..., Any]:
        """The bound programs of all ranks, which `make` builds, as one function of LocalTensors."""
        transports = {rank: PostingTransport(rank) for rank in self.mode.ranks}
        modules = self.mode.each_with_transport(transports, make, [()] * len(transports), "")

        def run(*inputs: Any) -> Any:
            where = caller()
            runs = [
                ProgramRun(module, carrier, [_value_on(x, rank) for x in inputs])
                for module, (rank, carrier) in zip(modules, transports.items(), strict=True)
            ]

            def playing(i: int) -> AbstractContextManager:
                rank = self.mode.ranks[i]
                transports[rank].where = where
                return self.mode.playing(rank, transports[rank])

            try:
                results = run_together(runs, playing, lambda: self._deliver_ready(transports))
                self._check_delivered(transports)
            finally:
                for carrier in transports.values():
                    carrier.forget()
            return self.mode.join(results)

        return run

    def _call(self, kind: str, x: Any, args: tuple, group: Any) -> Any:
        ranks = x.ranks if type(x) is LocalTensor else self.mode.ranks
        where = caller()
        with _torch.no_modes():
            own = [(rank, *_value_on((x, args, group), rank)) for rank in ranks]
            posts = [_post(rank, kind, x, args, group, where) for rank, x, args, group in own]
            return wrap(ranks, self.exchange(posts))

    def op(self, op: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one of torch's functional collectives, as traced programs call it."""
        name = _torch.qualified_name(op).split("::")[1]
        if name.endswith("_out"):
            with torch.no_grad():
                return kwargs["out"].copy_(getattr(self, name.removesuffix("_out"))(*args))
        if name in ("all_reduce_", "all_reduce_coalesced_"):
            return _copy_back(args[0], getattr(self, name[:-1])(*args, **kwargs))
        if name == "_wrap_tensor_autograd":  # torch's own asynchronous tensor: here nothing is in flight
            return wrap(args[0].ranks, args[0]._locals)
        if not hasattr(SimulatedTransport, name):
            raise NotImplementedError(f"{op} cannot be simulated; use the collectives of spmd.comm")
        return getattr(self, name)(*args, **kwargs)

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> Any:
        """The name of each rank's own group along an axis, as one name of all groups."""
        return self.mode.each(_own_group_name, (mesh, axis))

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """The object of each rank; the same one repeated if all ranks have one object."""
        return [_value_on_each(obj, rank) for rank in mesh.ranks]


class PostingTransport(SimulatedTransport):
    """One rank's collectives in a step: posted while the rank starts, finished when the rank finishes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.where = rank, ""
        self.posted: deque[tuple[Post, torch.Tensor]] = deque()  # with the placeholder of the result
        self._results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._homes: dict[int, torch.Tensor] = {}  # of those that are written into what was sent

    def all_reduce_(self, x, op, group):
        token = self.all_reduce(x, op, group)
        self._homes[id(token)] = x
        return token

    def _call(self, kind: str, x: torch.Tensor, args: tuple, group: str) -> torch.Tensor:
        token = x.new_empty(0)
        self.posted.append((_post(self.rank, kind, x, args, group, self.where), token))
        return token

    def deliver(self, result: torch.Tensor) -> None:
        """Set the result of the first post."""
        _, token = self.posted.popleft()
        home = self._homes.pop(id(token), None)
        result = result if home is None else home.copy_(result)
        self._results[id(token)] = (token, result)  # the token is kept alive, so that its id stays unique

    def forget(self) -> None:
        """Drop what was posted and not waited for, as where an error has ended a program."""
        self.posted.clear()
        self._results.clear()
        self._homes.clear()

    def has_arrived(self, x: torch.Tensor) -> bool:
        """Whether x is not the placeholder of a result that has not been delivered."""
        return all(token is not x for _, token in self.posted)

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        _, result = self._results.pop(id(x), (x, x))
        return result

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        return _own_group_name(mesh, axis)

    def refuse(self, kind: str) -> None:
        """Raise RuntimeError: this rank may not communicate now."""
        raise _communication_error(self.rank, kind)

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        raise _communication_error(self.rank, "gather_objects")

    gather_bytes = gather_objects

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        raise _communication_error(self.rank, "a step of its own")


class NoCommunication(PostingTransport):
    """The transport of a function that runs once a rank: every collective is an error."""

    def _call(self, kind: str, x: torch.Tensor, args: tuple, group: str) -> torch.Tensor:
        raise _communication_error(self.rank, kind)


def _posts_on(head: tuple[Post, torch.Tensor] | None, post: Post) -> bool:
    """Whether a rank's first post is on the same group as `post`."""
    return head is not None and head[0].group == post.group


def _communication_error(rank: int, kind: str) -> RuntimeError:
    return RuntimeError(
        f"rank {rank} calls {kind} at {caller()}, in a function that runs once a rank: the other ranks have not come "
        "there, and a real job might hang. Communicate outside of it, or play whole ranks with spmd.sim.run_ranks."
    )


def _post(rank: int, kind: str, x: torch.Tensor, args: tuple, group: str, where: str) -> Post:
    ranks = groups.ranks_in(group, rank)
    if ranks is None:
        ranks = groups.ranks_of(groups.find_group(group))
    if rank not in ranks:
        raise ValueError(f"rank {rank} calls {kind} on group {list(ranks)} at {where}, which it is not in")
    return Post(rank, ranks, Collective.with_tensor(kind, x.detach(), *args), x.detach(), where)


def _value_on(value: Any, rank: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_value_on(v, rank) for v in value)
    return value.local[rank] if type(value) is LocalTensor else pick(value, rank)


def _value_on_each(value: Any, rank: int) -> Any:
    """The value on one rank; on a rank that differs between ranks, as in a mesh that does, what each of them gets."""
    by_rank = values_of(rank)
    if by_rank is None:
        return _value_on(value, rank)
    return join_values(tuple(by_rank), [_value_on(value, other) for other in by_rank.values()])


def _copy_back(into: Any, received: Any) -> Any:
    with torch.no_grad():
        for x, y in zip(into, received, strict=True) if isinstance(into, (list, tuple)) else [(into, received)]:
            x.copy_(y)
    return into


def _own_group_name(mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
    return groups.name_of(mesh.ranks_along(axis, mesh.coordinate_of(current_rank())))
