"""torch.distributed's process group, for all ranks that one thread plays.

    with LocalTensorMode(4):
        rows = mesh.get_group("tp")               # ranks 0, 1 on ranks 0 and 1; ranks 2, 3 on ranks 2 and 3
        dist.get_rank(rows)                       # LocalInt({0: 0, 1: 1, 2: 0, 3: 1})
        dist.all_reduce(x, group=rows)            # each rank with those of its own row

A `LocalGroup` is made from a name that lists ranks ('ranks:0,1|2,3', see `mesh/groups.py`); each rank uses the list
that contains it. Its methods are those that torch's functions call. They take LocalTensors, and write into each rank's
own tensors below autograd, as a backend does. A plain tensor is taken as the same on all ranks; it can be written only
if all ranks get the same values. A collective is finished when the call returns, and its work is done.

Left out: sparse tensors, `ReduceOp.PREMUL_SUM`, splitting and shrinking of groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.comm import no_gradient, transport, wait
from spmd.comm.user_line import caller
from spmd.mesh import current_rank, groups
from spmd.mesh.rank import rank_simulator
from spmd.sim.collectives import Collective
from spmd.sim.exchange import Post, Ranks
from spmd.sim.local_arguments import (
    OwnValues,
    as_list,
    calling_ranks,
    copy_into,
    describe,
    element_counts,
    flattened,
    list_of_rank,
    reduction_name,
    write_results,
)
from spmd.sim.local_int import PerRank, pick, values_of
from spmd.sim.local_mail import Mailbox, PendingReceive, ReceiveWork
from spmd.sim.local_tensor import LocalTensor, join_values, plain_tensor_error

if TYPE_CHECKING:
    from spmd.sim.local_mode import LocalTensorMode

pytree = _torch.pytree
Tensors = Sequence[torch.Tensor]


def _collective(method: Callable) -> Callable:
    """Decorates a collective for torch's functions: it returns a work, which is done unless the method returns one."""

    @functools.wraps(method)
    def run(self: LocalGroup, *args: Any, **kwargs: Any) -> dist.Work:
        if _torch.proxy_mode() is not None:
            return getattr(self.traced, method.__name__)(*args, **kwargs)
        if _torch.is_faking(*pytree.tree_leaves(args)):
            return _torch.FakeWork()
        no_gradient.check(method.__name__, args)
        work = method(self, *pytree.tree_map_only(torch.Tensor, wait, args), **kwargs)
        return _torch.FakeWork() if work is None else work

    return run


class LocalGroup(dist.ProcessGroup):
    """The process groups of all played ranks as one: each rank uses the list of ranks that contains it."""

    differs_by_rank = True
    bound_device_id = None
    group_desc = "simulated"

    def __init__(self, name: str, mail: Mailbox, group_named: Callable[[str], LocalGroup]) -> None:
        """group_named: returns the group of another name."""
        self.lists = groups.lists_in(name)
        super().__init__(0, len(self.lists[0]))
        self._name, self._mail, self._group_named = name, mail, group_named

    # Properties

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def by_rank(self) -> dict[int, LocalGroup]:
        """Each rank's own group, which has only the ranks of its list."""
        return {rank: self._group_named(groups.name_of(ranks)) for ranks in self.lists for rank in ranks}

    def ranks_on(self, rank: int) -> Ranks:
        """The ranks of the group of one rank; empty where it has no group."""
        return next((ranks for ranks in self.lists if rank in ranks), ())

    def place_of(self, rank: int, on: int) -> int:
        """The place of `rank` in the group of the rank `on`; -1 where it is not in that group."""
        ranks = self.ranks_on(on)
        return ranks.index(rank) if rank in ranks else -1

    @functools.cached_property
    def traced(self) -> dist.ProcessGroup:
        """The same group without Python methods: its calls are ops of the dispatcher, which a trace records."""
        return _Traced(self._name, len(self.lists[0]))

    def rank(self) -> int:
        return each_rank(lambda rank: self.place_of(rank, rank))

    def size(self) -> int:
        return each_rank(lambda rank: len(self.ranks_on(rank) or self.lists[0]))

    def name(self) -> str:
        return "spmd simulation"

    def shutdown(self) -> None: ...

    abort = shutdown

    def __repr__(self) -> str:
        return f"LocalGroup({self._name!r})"

    # Collectives

    @_collective
    def allreduce(self, tensors: Tensors, opts: Any = None) -> None:
        for x in as_list(tensors):
            received = self.exchange_all("all_reduce", [x], lambda own, x=x: (own(x), (reduction_name(opts),)))
            write_results("all_reduce", x, received)

    @_collective
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> None:
        self.allreduce(tensors, opts)

    @_collective
    def reduce(self, tensors: Tensors, opts: Any = None) -> None:
        [x] = as_list(tensors)
        received = self.exchange_all("reduce", [x], lambda own: (own(x), (reduction_name(opts), opts.rootRank)))
        write_results("reduce", x, self._at_place(opts.rootRank, received), received)

    @_collective
    def broadcast(self, tensors: Tensors, opts: Any = None) -> None:
        [x] = as_list(tensors)
        write_results("broadcast", x, self.exchange_all("broadcast", [x], lambda own: (own(x), (opts.rootRank,))))

    @_collective
    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> None:
        for outs, x in zip(output_tensors, input_tensors, strict=True):
            self._check_count("all_gather", "tensor_list", outs)
            received = self.exchange_all("all_gather", [x, *outs], lambda own, x=x: (own(x), ()))
            for i, out in enumerate(outs):
                write_results("all_gather", out, {rank: every[i] for rank, every in received.items()})

    @_collective
    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> None:
        self.allgather([list(outs) for outs in zip(*output_lists, strict=True)], input_list)

    @_collective
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> None:
        def sent(own: Callable) -> tuple:
            x = own(input)
            return x.reshape(x.shape or (1,)), (self.size_on(own.rank),)

        kind = "all_gather_into_tensor"
        write_results(kind, output, self.exchange_all(kind, [output, input], sent))

    @_collective
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)

    @_collective
    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> None:
        for out, xs in zip(output_tensors, input_tensors, strict=True):
            self._check_count("reduce_scatter", "input_list", xs)

            def sent(own: Callable, xs: Tensors = xs) -> tuple:
                parts = own(xs)
                return flattened(parts), (reduction_name(opts), tuple(tuple(part.shape) for part in parts))

            write_results("reduce_scatter", out, self.exchange_all("reduce_scatter", [out, *xs], sent))

    @_collective
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> None:
        def sent(own: Callable) -> tuple:
            x, n = own(input), self.size_on(own.rank)
            return (x if x.ndim and x.shape[0] % n == 0 else x.reshape(-1)), (reduction_name(opts), n)

        kind = "reduce_scatter_tensor"
        write_results(kind, output, self.exchange_all(kind, [output, input], sent))

    @_collective
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)

    @_collective
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> None:
        outs, xs = output_tensors, input_tensors

        def sent(own: Callable) -> tuple:
            parts = own(xs)
            return flattened(parts), (element_counts(own(outs)), element_counts(parts))

        self._check_count("all_to_all", "output_tensor_list", outs)
        self._check_count("all_to_all", "input_tensor_list", xs)
        received = self.exchange_all("all_to_all", [*outs, *xs], sent)
        parts = {rank: flat.split(element_counts(OwnValues(rank)(outs))) for rank, flat in received.items()}
        for i, out in enumerate(outs):
            write_results("all_to_all", out, {rank: part[i] for rank, part in parts.items()})

    @_collective
    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (),
        opts: Any = None,
    ) -> None:
        def splits(x: torch.Tensor, sizes: list, n: int) -> tuple:
            return tuple(sizes) or (x.shape[0] // n,) * n

        def sent(own: Callable) -> tuple:
            out, x, n = own(output), own(input), self.size_on(own.rank)
            return x, (splits(out, own(output_split_sizes), n), splits(x, own(input_split_sizes), n))

        write_results("all_to_all_single", output, self.exchange_all("all_to_all_single", [output, input], sent))

    @_collective
    def gather(self, output_tensors: Any, input_tensors: Tensors, opts: Any = None) -> None:
        """output_tensors: [list], for all ranks or as a PerRank; only the root's is written."""
        [x], dst = input_tensors, opts.rootRank
        lists = output_tensors[0] if output_tensors else None
        received = self.exchange_all("gather", [x], lambda own: (own(x), (dst,)))
        for rank, every in self._at_place(dst, received).items():
            if not (outs := list_of_rank(lists, rank)):
                raise ValueError(f"gather: rank {rank} is the destination and has no gather_list")
            self._check_count("gather", "gather_list", outs)
            for out, y in zip(outs, every, strict=True):
                if isinstance(lists, PerRank):  # its tensors belong to one rank
                    copy_into("gather", out, y, f" on rank {rank}")
                else:
                    write_results("gather", out, {rank: y}, received)

    @_collective
    def scatter(self, output_tensors: Tensors, input_tensors: Any, opts: Any = None) -> None:
        """input_tensors: [list], for all ranks or as a PerRank; only the root's is read."""
        [out], src = output_tensors, opts.rootRank
        lists = input_tensors[0] if input_tensors else None

        def sent(own: Callable) -> tuple:
            y = own(out)
            if self.place_of(own.rank, own.rank) != src:
                return y.new_empty(0), (src,), y.shape
            if not (parts := list_of_rank(lists, own.rank)):
                raise ValueError(f"scatter: rank {own.rank} is the source and has no scatter_list")
            self._check_count("scatter", "scatter_list", parts)
            parts = own(parts)
            other = next((part for part in parts if (part.shape, part.dtype) != (y.shape, y.dtype)), None)
            if other is not None:
                raise ValueError(f"scatter: rank {own.rank} gives {describe(other)} for a tensor that is {describe(y)}")
            return flattened(parts), (src,), y.shape

        write_results("scatter", out, self.exchange_all("scatter", [out], sent))

    @_collective
    def barrier(self, opts: Any = None, **kwargs: Any) -> None:
        self.exchange_all("barrier", [], lambda own: (torch.empty(0), ()))

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        self.barrier()

    def _start_coalescing(self, device: torch.device) -> None: ...

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return _torch.FakeWork()

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages between two ranks

    @_collective
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> None:
        [x] = tensors
        self.send_message("send", dst, tag, lambda own: own(x).clone(), [x])

    @_collective
    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> dist.Work:
        [x] = tensors
        mode = playing_mode("recv")
        if not isinstance(x, LocalTensor) and len(mode.ranks) > 1:
            raise plain_tensor_error("recv")

        def take(rank: int) -> Callable[[Post], None]:
            into = OwnValues(rank)(x)
            return lambda post: copy_into("recv", into, post.tensor, f"; it receives what {post}")

        return self.receive_message("recv", src, tag, take, [x])

    @_collective
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, None, tag)

    def send_message(self, kind: str, dst: int, tag: int, sent: Callable, tensors: Tensors = ()) -> None:
        """Each rank sends the tensor `sent(own)` to the rank at place dst of its group."""
        mode, where = playing_mode(kind), caller()
        posts = []
        with _torch.no_modes(), torch.no_grad():
            for rank in calling_ranks(mode.ranks, tensors, kind, where):
                x, to = sent(OwnValues(rank)), self._rank_at(pick(dst, rank), rank, kind, where)
                posts.append(self._post_of(rank, Collective.with_tensor(kind, x, to, pick(tag, rank)), x, where))
        mode.transport.record(posts)
        for post in posts:
            self._mail.send(post)

    def receive_message(
        self, kind: str, src: int | None, tag: int, take: Callable[[int], Callable], tensors: Tensors = ()
    ) -> ReceiveWork:
        """Each rank receives from the rank at place src of its group, or from any rank if src is None.

        take(rank): the function that gets the message of this rank.
        """
        mode, where = playing_mode(kind), caller()
        receives = []
        for rank in calling_ranks(mode.ranks, tensors, kind, where):
            source = None if src is None else self._rank_at(pick(src, rank), rank, kind, where)
            text = f"rank {rank} calls {kind} from {'any rank' if source is None else f'rank {source}'} at {where}"
            receives.append(PendingReceive(rank, self.ranks_on(rank), source, pick(tag, rank), take(rank), text))
        for pending in receives:
            self._mail.receive(pending)
        return ReceiveWork(receives, self._mail)

    # Helpers

    def exchange_all(self, kind: str, tensors: Tensors, sent: Callable) -> dict[int, Any]:
        """Run a collective on all ranks that call it; return the result of each rank.

        tensors: all tensors that the collective reads and writes. sent(own): the tensor that a rank sends, the plain
        arguments of its call, and the shape of the call if it is not that of the tensor. own(x): the rank's own x.
        """
        mode, where = playing_mode(kind), caller()
        posts = []
        with _torch.no_modes(), torch.no_grad():
            for rank in calling_ranks(mode.ranks, tensors, kind, where):
                x, args, *shape = sent(OwnValues(rank))
                call = Collective(kind, args, x.dtype, tuple(shape[0] if shape else x.shape))
                posts.append(self._post_of(rank, call, x.detach(), where))
            received = mode.transport.exchange(posts)
        return {post.rank: y for post, y in zip(posts, received, strict=True)}

    def size_on(self, rank: int) -> int:
        """The number of ranks in the group of a rank."""
        return len(self.ranks_on(rank))

    def _post_of(self, rank: int, call: Collective, x: torch.Tensor, where: str) -> Post:
        ranks = self.ranks_on(rank)
        if not ranks:
            shown = " or ".join(str(list(ranks)) for ranks in self.lists)
            raise ValueError(
                f"rank {rank} calls {call.kind} on group {shown} at {where}, which it is not in. Play the group's "
                f"ranks alone: with LocalTensorMode({set(self.lists[0])}): ..."
            )
        return Post(rank, ranks, call, x, where)

    def _rank_at(self, place: int, on: int, kind: str, where: str) -> int:
        ranks = self.ranks_on(on)
        if not 0 <= place < len(ranks):
            raise ValueError(f"rank {on} calls {kind} at {where} with place {place} of group {list(ranks)}")
        return ranks[place]

    def _at_place(self, place: int, received: dict[int, Any]) -> dict[int, Any]:
        """The results of the ranks at this place of their groups."""
        return {rank: y for rank, y in received.items() if self.place_of(rank, rank) == place}

    def _check_count(self, kind: str, name: str, tensors: Tensors) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{kind}: {name} has {len(tensors)} tensors for a group of {self.size()} ranks")

class _Traced(dist.ProcessGroup):
    def __init__(self, name: str, n: int) -> None:
        super().__init__(0, n)
        self._name = name

    group_name = LocalGroup.group_name


def each_rank(fn: Callable[[int], Any]) -> Any:
    """fn(rank) of the current rank; where the thread plays several ranks, the results of all as one value."""
    ranks = values_of(current_rank())
    return fn(current_rank()) if ranks is None else join_values(tuple(ranks), [fn(rank) for rank in ranks])


@runtime_checkable
class RefusesCommunication(Protocol):
    """A transport for code that may not communicate."""

    def refuse(self, kind: str) -> None:
        """Raise RuntimeError."""


def playing_mode(kind: str) -> LocalTensorMode:
    """The mode that plays the ranks. RuntimeError in a function that runs once a rank, and after the simulation."""
    mode = rank_simulator()
    if mode is None:
        if isinstance(carrier := transport(), RefusesCommunication):
            carrier.refuse(kind)
        raise RuntimeError(f"{kind}: this process group is of a LocalTensorMode that has ended, and has no ranks")
    return mode


def join_names(values: Sequence[Any]) -> str | None:
    """One name that lists the ranks of all these group names; None if the values are not group names."""
    if not all(isinstance(value, str) and value.startswith(groups.PREFIX) for value in values):
        return None
    return groups.name_of_lists(ranks for name in values for ranks in groups.lists_in(name))


def join_groups(ranks: Ranks, values: Sequence[Any]) -> Any:
    """The groups of several ranks as one group; None if the values are not groups."""
    found = [value for value in values if isinstance(value, LocalGroup)]
    none = dist.GroupMember.NON_GROUP_MEMBER
    if not found or any(not isinstance(value, LocalGroup) and value != none for value in values):
        return None
    lists = [g.ranks_on(rank) for rank, g in zip(ranks, values, strict=True) if isinstance(g, LocalGroup)]
    return found[0]._group_named(groups.name_of_lists(lists))


class PlaceByRank(Mapping):
    """The place of each rank in a group. torch looks it up by one rank, or by a number that differs between ranks."""

    def __init__(self, group: LocalGroup) -> None:
        self.group = group

    def __getitem__(self, rank: int) -> int:
        return each_rank(lambda on: self.group.place_of(pick(rank, on), on))

    def __contains__(self, rank: object) -> bool:
        here = values_of(current_rank()) or {current_rank(): None}
        found = [pick(rank, on) in self.group.ranks_on(on) for on in here]
        # For a rank without such a group torch returns the place -1.
        return any(found) if values_of(rank) is not None else any(pick(rank, 0) in ranks for ranks in self.group.lists)

    def __iter__(self) -> Iterator[int]:
        places = range(len(self.group.lists[0]))
        return iter([each_rank(lambda on, i=i: (self.group.ranks_on(on) or self.group.lists[0])[i]) for i in places])

    def __len__(self) -> int:
        return len(self.group.lists[0])
