"""torch.distributed's process group, for all ranks that one thread plays.

    with LocalTensorMode(4):
        rows = mesh.get_group("tp")               # ranks 0, 1 on ranks 0 and 1; ranks 2, 3 on ranks 2 and 3
        dist.get_rank(rows)                       # LocalInt({0: 0, 1: 1, 2: 0, 3: 1})
        dist.all_reduce(x, group=rows)            # each rank with those of its own row

A `LocalGroup` is made of a name that spells ranks ('ranks:0,1|2,3', see `mesh/groups.py`); each rank uses the list
that it is in. Its methods are those that torch's functions call. They take LocalTensors, and write into each rank's
own tensors below autograd, as a backend does. A plain tensor counts as the same on all ranks, and can be written only
where all ranks get the same. A collective is over when the call returns, and its work is done.

Left out: sparse tensors, `ReduceOp.PREMUL_SUM`, splitting and shrinking of groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.comm import transport, ungraded, wait
from spmd.mesh import current_rank, groups
from spmd.mesh.rank import players
from spmd.sim.collectives import Collective
from spmd.sim.exchange import Post, Ranks, caller
from spmd.sim.local_mail import Mail, Receipt, Receiving
from spmd.sim.local_tensor import LocalTensor, joined_values, same
from spmd.sim.varying import PerRank, pick, values_of

if TYPE_CHECKING:
    from spmd.sim.local_mode import LocalTensorMode

pytree = _torch.pytree
Tensors = Sequence[torch.Tensor]


def _launch(method: Callable) -> Callable:
    """A collective, as torch's functions call it: gives the work, which is done unless the method says otherwise."""

    @functools.wraps(method)
    def run(self: LocalGroup, *args: Any, **kwargs: Any) -> dist.Work:
        if _torch.proxy_mode() is not None:
            return getattr(self.traced, method.__name__)(*args, **kwargs)
        if _torch.is_faking(*pytree.tree_leaves(args)):
            return _torch.FakeWork()
        ungraded.check(method.__name__, args)
        work = method(self, *pytree.tree_map_only(torch.Tensor, wait, args), **kwargs)
        return _torch.FakeWork() if work is None else work

    return run


class LocalGroup(dist.ProcessGroup):
    """The process groups of all ranks played as one: each rank uses the list of ranks that it is in."""

    differs_by_rank = True
    bound_device_id = None
    group_desc = "simulated"

    def __init__(self, name: str, mail: Mail, called: Callable[[str], LocalGroup]) -> None:
        """called: gives the group of another name."""
        self.lists = groups.lists_in(name)
        super().__init__(0, len(self.lists[0]))
        self._name, self._mail, self._called = name, mail, called

    # What it is

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def of(self) -> dict[int, LocalGroup]:
        """The group of each rank alone."""
        return {rank: self._called(groups.name_of(ranks)) for ranks in self.lists for rank in ranks}

    def ranks_on(self, rank: int) -> Ranks:
        """The ranks of the group as one rank has it; none where it has no group."""
        return next((ranks for ranks in self.lists if rank in ranks), ())

    def place_of(self, rank: int, on: int) -> int:
        """The place of a rank in the group that the rank `on` has; -1 where it has none."""
        ranks = self.ranks_on(on)
        return ranks.index(rank) if rank in ranks else -1

    @functools.cached_property
    def traced(self) -> dist.ProcessGroup:
        """The same without methods of its own: its calls are ops of the dispatcher, for a trace to see."""
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

    @_launch
    def allreduce(self, tensors: Tensors, opts: Any = None) -> None:
        for x in _list(tensors):
            came = self.meet("all_reduce", [x], lambda mine, x=x: (mine(x), (_reduction(opts),)))
            self._write("all_reduce", x, came)

    @_launch
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> None:
        self.allreduce(tensors, opts)

    @_launch
    def reduce(self, tensors: Tensors, opts: Any = None) -> None:
        [x] = _list(tensors)
        came = self.meet("reduce", [x], lambda mine: (mine(x), (_reduction(opts), opts.rootRank)))
        self._write("reduce", x, self._at(opts.rootRank, came), came)

    @_launch
    def broadcast(self, tensors: Tensors, opts: Any = None) -> None:
        [x] = _list(tensors)
        self._write("broadcast", x, self.meet("broadcast", [x], lambda mine: (mine(x), (opts.rootRank,))))

    @_launch
    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> None:
        for outs, x in zip(output_tensors, input_tensors, strict=True):
            self._check_count("all_gather", "tensor_list", outs)
            came = self.meet("all_gather", [x, *outs], lambda mine, x=x: (mine(x), ()))
            for i, out in enumerate(outs):
                self._write("all_gather", out, {rank: every[i] for rank, every in came.items()})

    @_launch
    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> None:
        self.allgather([list(outs) for outs in zip(*output_lists, strict=True)], input_list)

    @_launch
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> None:
        def sent(mine: Callable) -> tuple:
            x = mine(input)
            return x.reshape(x.shape or (1,)), (self.size_on(mine.rank),)

        kind = "all_gather_into_tensor"
        self._write(kind, output, self.meet(kind, [output, input], sent))

    @_launch
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)

    @_launch
    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> None:
        for out, xs in zip(output_tensors, input_tensors, strict=True):
            self._check_count("reduce_scatter", "input_list", xs)

            def sent(mine: Callable, xs: Tensors = xs) -> tuple:
                parts = mine(xs)
                return _flat(parts), (_reduction(opts), tuple(tuple(part.shape) for part in parts))

            self._write("reduce_scatter", out, self.meet("reduce_scatter", [out, *xs], sent))

    @_launch
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> None:
        def sent(mine: Callable) -> tuple:
            x, n = mine(input), self.size_on(mine.rank)
            return (x if x.ndim and x.shape[0] % n == 0 else x.reshape(-1)), (_reduction(opts), n)

        kind = "reduce_scatter_tensor"
        self._write(kind, output, self.meet(kind, [output, input], sent))

    @_launch
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)

    @_launch
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> None:
        outs, xs = output_tensors, input_tensors

        def sent(mine: Callable) -> tuple:
            parts = mine(xs)
            return _flat(parts), (_sizes(mine(outs)), _sizes(parts))

        self._check_count("all_to_all", "output_tensor_list", outs)
        self._check_count("all_to_all", "input_tensor_list", xs)
        came = self.meet("all_to_all", [*outs, *xs], sent)
        parts = {rank: flat.split(_sizes(_Mine(rank)(outs))) for rank, flat in came.items()}
        for i, out in enumerate(outs):
            self._write("all_to_all", out, {rank: part[i] for rank, part in parts.items()})

    @_launch
    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (),
        opts: Any = None,
    ) -> None:
        def splits(x: torch.Tensor, sizes: list, n: int) -> tuple:
            return tuple(sizes) or (x.shape[0] // n,) * n

        def sent(mine: Callable) -> tuple:
            out, x, n = mine(output), mine(input), self.size_on(mine.rank)
            return x, (splits(out, mine(output_split_sizes), n), splits(x, mine(input_split_sizes), n))

        self._write("all_to_all_single", output, self.meet("all_to_all_single", [output, input], sent))

    @_launch
    def gather(self, output_tensors: Any, input_tensors: Tensors, opts: Any = None) -> None:
        """output_tensors: [list], for all ranks or as a PerRank; only the root's is written."""
        [x], dst = input_tensors, opts.rootRank
        lists = output_tensors[0] if output_tensors else None
        came = self.meet("gather", [x], lambda mine: (mine(x), (dst,)))
        for rank, every in self._at(dst, came).items():
            if not (outs := _list_on(lists, rank)):
                raise ValueError(f"gather: rank {rank} is the destination and has no gather_list")
            self._check_count("gather", "gather_list", outs)
            for out, y in zip(outs, every, strict=True):
                if isinstance(lists, PerRank):  # whose tensors are the rank's own
                    _copied("gather", out, y, f" on rank {rank}")
                else:
                    self._write("gather", out, {rank: y}, came)

    @_launch
    def scatter(self, output_tensors: Tensors, input_tensors: Any, opts: Any = None) -> None:
        """input_tensors: [list], for all ranks or as a PerRank; only the root's is read."""
        [out], src = output_tensors, opts.rootRank
        lists = input_tensors[0] if input_tensors else None

        def sent(mine: Callable) -> tuple:
            y = mine(out)
            if self.place_of(mine.rank, mine.rank) != src:
                return y.new_empty(0), (src,), y.shape
            if not (parts := _list_on(lists, mine.rank)):
                raise ValueError(f"scatter: rank {mine.rank} is the source and has no scatter_list")
            self._check_count("scatter", "scatter_list", parts)
            parts = mine(parts)
            unlike = next((part for part in parts if (part.shape, part.dtype) != (y.shape, y.dtype)), None)
            if unlike is not None:
                raise ValueError(f"scatter: rank {mine.rank} gives {_shown(unlike)} for a tensor that is {_shown(y)}")
            return _flat(parts), (src,), y.shape

        self._write("scatter", out, self.meet("scatter", [out], sent))

    @_launch
    def barrier(self, opts: Any = None, **kwargs: Any) -> None:
        self.meet("barrier", [], lambda mine: (torch.empty(0), ()))

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

    # From one rank to another

    @_launch
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> None:
        [x] = tensors
        self.post("send", dst, tag, lambda mine: mine(x).clone(), [x])

    @_launch
    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> dist.Work:
        [x] = tensors
        mode = player("recv")
        if not isinstance(x, LocalTensor) and len(mode.ranks) > 1:
            raise _mixed("recv")

        def take(rank: int) -> Callable[[Post], None]:
            into = _Mine(rank)(x)
            return lambda post: _copied("recv", into, post.tensor, f"; it receives what {post}")

        return self.expect("recv", src, tag, take, [x])

    @_launch
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, None, tag)

    def post(self, kind: str, dst: int, tag: int, sent: Callable, tensors: Tensors = ()) -> None:
        """Send `sent(mine)` of each rank to the place dst of its group."""
        mode, where = player(kind), caller()
        posts = []
        with _torch.no_modes(), torch.no_grad():
            for rank in _playing(mode, tensors, kind, where):
                x, to = sent(_Mine(rank)), self._rank_at(pick(dst, rank), rank, kind, where)
                posts.append(self._post(rank, Collective.of(kind, x, to, pick(tag, rank)), x, where))
        mode.transport.note(posts)
        for post in posts:
            self._mail.send(post)

    def expect(
        self, kind: str, src: int | None, tag: int, take: Callable[[int], Callable], tensors: Tensors = ()
    ) -> Receiving:
        """Receive from the place src of each rank's group; None: from any. take(rank): what to do with the message."""
        mode, where = player(kind), caller()
        receipts = []
        for rank in _playing(mode, tensors, kind, where):
            of = None if src is None else self._rank_at(pick(src, rank), rank, kind, where)
            text = f"rank {rank} calls {kind} from {'any rank' if of is None else f'rank {of}'} at {where}"
            receipts.append(Receipt(rank, self.ranks_on(rank), of, pick(tag, rank), take(rank), text))
        for receipt in receipts:
            self._mail.receive(receipt)
        return Receiving(receipts, self._mail)

    # How

    def meet(self, kind: str, tensors: Tensors, sent: Callable) -> dict[int, Any]:
        """What each rank gets of a collective.

        tensors: all that it reads and writes. sent(mine): what the rank sends, the call's plain arguments and, where
        that is no tensor's, its shape; mine(x) is the rank's own of x.
        """
        mode, where = player(kind), caller()
        posts = []
        with _torch.no_modes(), torch.no_grad():
            for rank in _playing(mode, tensors, kind, where):
                x, args, *shape = sent(_Mine(rank))
                call = Collective(kind, args, x.dtype, tuple(shape[0] if shape else x.shape))
                posts.append(self._post(rank, call, x.detach(), where))
            came = mode.transport.exchange(posts)
        return {post.rank: y for post, y in zip(posts, came, strict=True)}

    def size_on(self, rank: int) -> int:
        """How many ranks the group of a rank has."""
        return len(self.ranks_on(rank))

    def _post(self, rank: int, call: Collective, x: torch.Tensor, where: str) -> Post:
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

    def _at(self, place: int, came: dict[int, Any]) -> dict[int, Any]:
        """What came to the rank at this place of each group."""
        return {rank: y for rank, y in came.items() if self.place_of(rank, rank) == place}

    def _check_count(self, kind: str, name: str, tensors: Tensors) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{kind}: {name} has {len(tensors)} tensors for a group of {self.size()} ranks")

    def _write(self, kind: str, into: torch.Tensor, came: Mapping[int, Any], played: Any = None) -> None:
        """Put what came into each rank's own tensor; played: all ranks that took part."""
        with _torch.no_modes(), torch.no_grad():
            if isinstance(into, LocalTensor):
                local = into.local
                for rank, y in came.items():
                    _copied(kind, local[rank], y, f" on rank {rank}")
                return
            first, *others = came.values()
            if len(came) != len(played or came) or not all(same(first, y) for y in others):
                raise _mixed(kind)
            _copied(kind, into, first, "")


class _Traced(dist.ProcessGroup):
    def __init__(self, name: str, n: int) -> None:
        super().__init__(0, n)
        self._name = name

    group_name = LocalGroup.group_name


class _Mine:
    """mine(x): what one rank has where all have x."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, value: Any) -> Any:
        return pytree.tree_map(self._leaf, pick(value, self.rank))

    def _leaf(self, value: Any) -> Any:
        return value.local[self.rank] if isinstance(value, LocalTensor) else pick(value, self.rank)


def each_rank(fn: Callable[[int], Any]) -> Any:
    """fn of the current rank; of each, as one, where the thread plays several."""
    of = values_of(current_rank())
    return fn(current_rank()) if of is None else joined_values(tuple(of), [fn(rank) for rank in of])


@runtime_checkable
class Refuses(Protocol):
    """A transport of code that may not communicate."""

    def refuse(self, kind: str) -> None:
        """RuntimeError."""


def player(kind: str) -> LocalTensorMode:
    """Who plays the ranks. RuntimeError in a function that runs once a rank, and after the simulation."""
    who = players()
    if who is None:
        if isinstance(by := transport(), Refuses):
            by.refuse(kind)
        raise RuntimeError(f"{kind}: this process group is of a LocalTensorMode that has ended, and has no ranks")
    return who


def joined_names(values: Sequence[Any]) -> str | None:
    """The names of each rank's own group as one that spells them all, where that is what they are."""
    if not all(isinstance(value, str) and value.startswith(groups.PREFIX) for value in values):
        return None
    return groups.name_of_lists(ranks for name in values for ranks in groups.lists_in(name))


def joined_groups(ranks: Ranks, values: Sequence[Any]) -> Any:
    """The groups of several ranks as one, where that is what they are; otherwise None."""
    found = [value for value in values if isinstance(value, LocalGroup)]
    none = dist.GroupMember.NON_GROUP_MEMBER
    if not found or any(not isinstance(value, LocalGroup) and value != none for value in values):
        return None
    lists = [g.ranks_on(rank) for rank, g in zip(ranks, values, strict=True) if isinstance(g, LocalGroup)]
    return found[0]._called(groups.name_of_lists(lists))


class Places(Mapping):
    """The place of each rank in a group, as torch looks it up: by a rank, or by ranks that differ."""

    def __init__(self, group: LocalGroup) -> None:
        self.group = group

    def __getitem__(self, rank: int) -> int:
        return each_rank(lambda on: self.group.place_of(pick(rank, on), on))

    def __contains__(self, rank: object) -> bool:
        here = values_of(current_rank()) or {current_rank(): None}
        found = [pick(rank, on) in self.group.ranks_on(on) for on in here]
        # Where a rank has no such group, torch says that its place is -1.
        return any(found) if values_of(rank) is not None else any(pick(rank, 0) in ranks for ranks in self.group.lists)

    def __iter__(self) -> Iterator[int]:
        places = range(len(self.group.lists[0]))
        return iter([each_rank(lambda on, i=i: (self.group.ranks_on(on) or self.group.lists[0])[i]) for i in places])

    def __len__(self) -> int:
        return len(self.group.lists[0])


# ---- arguments --------------------------------------------------------------------------------


def _playing(mode: LocalTensorMode, tensors: Tensors, kind: str, where: str) -> Ranks:
    """The ranks that call: those played here that all LocalTensors have."""
    ranks = [rank for rank in mode.ranks if all(rank in x.ranks for x in tensors if isinstance(x, LocalTensor))]
    if not ranks:
        raise RuntimeError(f"{kind} at {where}: none of the ranks played here, {list(mode.ranks)}, has these tensors")
    return tuple(ranks)


def _reduction(opts: Any) -> str:
    word = "sum" if opts is None else opts.reduceOp.op.name.lower()
    if word == "premul_sum":
        raise NotImplementedError("ReduceOp.PREMUL_SUM is not simulated. Multiply first, x.mul_(factor), and use SUM.")
    return word


def _list(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _list_on(lists: Any, rank: int) -> Any:
    """The list of one rank, of LocalTensors where it is one for all ranks."""
    return pick(lists, rank) if isinstance(lists, PerRank) else lists


def _flat(parts: Tensors) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _sizes(parts: Tensors) -> tuple[int, ...]:
    return tuple(part.numel() for part in parts)


def _copied(kind: str, into: torch.Tensor, y: torch.Tensor, who: str) -> None:
    if into.numel() != y.numel() or into.dtype != y.dtype:
        raise ValueError(f"{kind}: a tensor that is {_shown(into)}{who} cannot hold what arrives, {_shown(y)}")
    with _torch.no_modes(), torch.no_grad():
        into.copy_(y.view(into.shape))


def _shown(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _mixed(kind: str) -> RuntimeError:
    return RuntimeError(
        f"{kind} writes what differs between ranks into a plain tensor, which is one for all of them. Make that tensor "
        "inside LocalTensorMode, or give each rank its own with spmd.sim.localize(tensor_or_module)."
    )
