"""Ranks compare what they exchange before they send it: a debug mode, off by default.

    with checked():                     # each exchange is compared, for one more small collective
        y = x.full_tensor()             # an error on all ranks if one makes another exchange
        all_reduce(z, "sum", mesh)      # or has another op, shape or dtype
    with checked(every=100):            # cheap: the last 100 exchanges are compared at once
        train()

An exchange of a DTensor is compared by its move, its specs, the op that it is for and the user's line; a collective
that the user calls by its kind, shapes and dtypes. Ranks count the exchanges of each mesh, so they compare at the same
ones. What they compare is a digest of all exchanges since they last compared. If it differs, they exchange the list and
name the first difference. At the end of the block they compare once more, so a rank that makes one exchange too many
does not wait for the others. A compiled step compares its program in each call, and is not compared move by move.

`checked()` is also on where torch's own debug level is DETAIL (TORCH_DISTRIBUTED_DEBUG=DETAIL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.comm.agree import FAILED, Statement, differing, digest, raise_if_one_failed, raise_if_other_things
from spmd.comm.group import Members
from spmd.comm.stuck import Place, Stuck, next_block, post
from spmd.comm.transport import C10dTransport, Transport, transport, uncompared, use_transport
from spmd.comm.user_line import call_site, caller
from spmd.mesh import DeviceMesh, groups
from spmd.mesh.rank import rank_simulator, world_size


class Exchange(NamedTuple):
    """An exchange of this rank. what: it prints as text. where, op: the user's line and op; compared: also the line."""

    what: object
    where: str
    op: object = None
    compared: bool = False

    def __str__(self) -> str:
        return f"{self.what}" if self.op is None else f"{self.what} for {self.op}"

    @property
    def key(self) -> str:
        return f"{self} at {self.where}" if self.compared else str(self)


class Comparison:
    """The exchanges of this rank since the ranks last compared, by mesh. every: after how many they compare.

    block: the number of the block of `checked()`, by which ranks that wait for each other are named; 0 outside of one.
    """

    def __init__(self, every: int = 1, block: int = 0) -> None:
        self.every, self.block = every, block
        self._since: dict[Ranks, tuple[DeviceMesh, list[Exchange]]] = {}
        self._ended: set[Ranks] = set()

    def add(self, exchange: Exchange, mesh: DeviceMesh) -> bool:
        """Note an exchange of the mesh's ranks. Whether the ranks compared now; RuntimeError on all if they differ."""
        if mesh.size() == 1 or mesh.ranks_key in self._ended:
            return False
        _, since = self._since.setdefault(mesh.ranks_key, (mesh, []))
        since.append(exchange)
        if len(since) < self.every:
            return False
        self._compare(mesh, since)
        return True

    def end(self, error: Exception | None = None) -> None:
        """Compare what is left, on each mesh. Where the block ends by an error, the other ranks are told."""
        found = error
        if not self._since:  # another rank may wait for this one in its first exchange, most likely one of all ranks
            self._since[tuple(range(world_size()))] = DeviceMesh("cpu", range(world_size())), []
        for mesh, since in [self._since[ranks] for ranks in sorted(self._since, key=str) if ranks not in self._ended]:
            if mesh.size() == 1:
                continue
            since.append(Exchange("the end of checked()", caller()))
            try:
                self._compare(mesh, since, "" if found is None else f"{type(found).__name__}: {found}", ended=True)
            except Stuck:
                raise
            except RuntimeError as other:
                found = found or other
        if found is not None and error is None:
            raise found

    def stop(self, mesh: DeviceMesh) -> None:
        """Compare nothing more on this mesh: one of its ranks has left the block."""
        self._ended.add(mesh.ranks_key)

    def _compare(self, mesh: DeviceMesh, since: list[Exchange], failure: str = "", ended: bool = False) -> None:
        made = since.copy()
        since.clear()
        key = FAILED if failure else digest(_KIND, *[each.key for each in made])

        def mine() -> Statement:
            doing = f"{made[-1]} at {made[-1].where}"
            return Statement(_KIND, doing, tuple((str(each), each.where, each.key) for each in made), failure, ended)

        here = Place(self.block, f"{made[-1]} at {made[-1].where}", mesh.ranks) if self.block else None
        every = differing(key, mine, mesh, here)
        if every is not None and not failure:
            raise_if_one_failed(every, mesh)
            raise_if_other_things(every, mesh)
            raise _first_difference([each.lines for each in every], mesh)


Ranks = tuple[int, ...]

_KIND = "exchanges"

_NOTHING = "nothing", "no line", ""


def _first_difference(lines: list[tuple], mesh: DeviceMesh) -> RuntimeError:
    """The error that shows the first exchange that two ranks do not have in common."""
    n = max(map(len, lines))
    columns = zip(*[[*of_rank, *[_NOTHING] * (n - len(of_rank))] for of_rank in lines], strict=True)
    i, column = next((i, column) for i, column in enumerate(columns) if any(c[2] != column[0][2] for c in column))
    at = next(at for at, (_, _, key) in enumerate(column) if key != column[0][2])
    (one, here, _), (other, there, _), ranks = column[0], column[at], (mesh.ranks[0], mesh.ranks[at])
    where = f"Both are at {here}." if here == there else f"Rank {ranks[0]} is at {here}, rank {ranks[1]} at {there}."
    count = f" It is number {i + 1} of the {n} exchanges that they compare." if n > 1 else ""
    return RuntimeError(
        f"rank {ranks[0]} calls {one},\nbut rank {ranks[1]} calls {other}.\n{where}{count}\n"
        "All ranks must make the same exchanges in the same order, on the same lines, with tensors of one shape and "
        "dtype; pad uneven ones first, or look for rank-dependent branches."
    )


# ---- the transport that compares --------------------------------------------------------------


class CheckedTransport:
    """Carries collectives by another transport, after the ranks have compared them."""

    compares = True

    def __init__(self, inner: Transport, comparison: Comparison) -> None:
        self.inner, self.comparison = inner, comparison

    def __getattr__(self, name: str) -> Any:
        """A collective that code below `spmd.comm` calls, compared over the ranks of its group."""
        method = getattr(self.inner, name)
        if name not in _COLLECTIVES:
            return method

        def compared(x: Any, *args: Any) -> Any:
            *plain, group = args if name != "all_to_all_single" else args[-1:]  # splits may differ between ranks
            xs = x if isinstance(x, list) else [x]
            what = f"{name}({', '.join(map(repr, plain))}) of {', '.join(map(describe, xs))}"
            self.comparison.add(Exchange(what, caller()), _mesh_of(group, xs))
            return method(x, *args)

        return compared

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """The objects of all ranks of the mesh."""
        self.comparison.add(Exchange("an exchange of metadata", *call_site(), compared=True), mesh)
        return self.inner.gather_objects(obj, mesh)

    def gather_bytes(self, data: bytes, mesh: DeviceMesh, here: object = None) -> list[bytes]:
        """A few bytes of all ranks of the mesh."""
        self.comparison.add(Exchange("a comparison of tensors", *call_site(), compared=True), mesh)
        return self.inner.gather_bytes(data, mesh)

    def bound(self, make: Callable[[], Any]) -> Callable[..., Any]:
        """A bound program; the ranks compare its calls, and not its moves."""
        with use_transport(self.inner):
            return self.inner.bound(make)

    def stop_comparing(self, mesh: DeviceMesh) -> None:
        """Compare nothing more on this mesh."""
        self.comparison.stop(mesh)


class _Uncompared(C10dTransport):
    """The collectives of torch.distributed, not compared even where torch's debug level is DETAIL."""

    compares = False


_COLLECTIVES = {
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "broadcast_",
    "all_reduce_", "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
}  # fmt: skip


@contextmanager
def checked(on: bool | None = True, *, every: int = 1) -> Iterator[None]:
    """Compare the exchanges of the ranks inside the block, in this thread only; all ranks must use it.

    every: how many exchanges of a mesh the ranks compare at once. 1 compares each one before it is sent, so that none
    hangs: also ranks that wait for each other on different meshes are named, after a second, and then the job has to
    end. A larger number costs little: ranks that part are noticed at the next comparison, if not by a hang before.
    on: False compares nothing, None what torch's debug level says.

    Raises RuntimeError on all ranks of a mesh where they part. It names two ranks, their exchanges and their lines.
    """
    if every < 1:
        raise ValueError(f"checked: every is {every}; give how many exchanges are compared at once, from 1")
    inner = uncompared()
    if not on or rank_simulator() is not None:  # simulated ranks of one thread are compared anyway
        with use_transport(_Uncompared() if on is False and isinstance(inner, C10dTransport) else inner):
            yield
        return
    around = getattr(getattr(transport(), "comparison", None), "block", 0)  # a block in a block counts as one with it
    comparison = Comparison(every, around or next_block())
    try:
        with use_transport(CheckedTransport(inner, comparison)):
            yield
    except Exception as error:
        _end(comparison, inner, error)
        raise
    _end(comparison, inner)
    if not around:
        _leave(comparison, inner)


def _end(comparison: Comparison, inner: Transport, error: Exception | None = None) -> None:
    if isinstance(error, Stuck):
        return  # the ranks cannot compare any more
    if dist.is_initialized() or not isinstance(inner, C10dTransport):  # the block may have destroyed all groups
        comparison.end(error)


def _leave(comparison: Comparison, inner: Transport) -> None:
    if isinstance(inner, C10dTransport) and dist.is_initialized():
        post(Place(comparison.block, "", (), ended="left"))


# ---- what is compared -------------------------------------------------------------------------

_detail = Comparison()
"""The comparison of torch's debug level DETAIL."""


def compare_move(by: Transport, what: object, mesh: DeviceMesh, block: Any) -> Transport:
    """Compare a move of a tensor between the ranks of the mesh, unless it is traced; return what is to carry it."""
    if not _torch.is_tracing(block):
        _comparison(by).add(Exchange(what, *call_site(), compared=True), mesh)
    return getattr(by, "inner", by)


def compare_call(by: Transport, kind: str, x: Sequence[torch.Tensor], plain: tuple, to: Members) -> Transport:
    """Compare a collective that the user calls between the ranks of its group; return what is to carry it."""
    what = f"{kind}({', '.join(map(repr, plain))}) of {', '.join(map(describe, x))}"
    _comparison(by).add(Exchange(what, caller()), _mesh_of(to.name, x))
    return getattr(by, "inner", by)


def compare_splits(
    by: Transport, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], to: Members
) -> Transport:
    """Compare an exchange of rows: every rank must send as many rows as the receivers expect, all of one kind."""
    mesh, inner = _mesh_of(to.name, [x]), getattr(by, "inner", by)
    if not _comparison(by).add(Exchange(f"all_to_all_single of rows of {describe(x[:0])}", caller()), mesh):
        return inner
    every = inner.gather_objects((tuple(out_splits), tuple(in_splits)), mesh)
    for i, (_, sent) in enumerate(every):
        for j, (expected, _) in enumerate(every):
            if sent[j] != expected[i]:
                raise RuntimeError(
                    f"all_to_all_single: rank {mesh.ranks[i]} sends {sent[j]} rows to rank {mesh.ranks[j]}, which "
                    f"expects {expected[i]}. Rank i's input_split_sizes[j] must be rank j's output_split_sizes[i]."
                )
    return inner


def check_metadata(what: str, tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """RuntimeError on all ranks of the mesh unless each has tensors of these shapes and dtypes; `what`: the call."""
    Comparison().add(Exchange(f"{what} of {', '.join(map(describe, tensors))}", caller()), mesh)


def comparing(by: Transport) -> bool:
    """Whether the ranks compare the collectives that the user calls."""
    return by.compares or (type(by) is C10dTransport and dist.get_debug_level() == dist.DebugLevel.DETAIL)


def describe(x: torch.Tensor) -> str:
    """Dtype, shape and device of a tensor as text: `float32 [2, 3] on cpu`."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device.type}"


def _comparison(by: Transport) -> Comparison:
    return getattr(by, "comparison", _detail)


def _mesh_of(group: str, xs: Sequence[torch.Tensor]) -> DeviceMesh:
    ranks = groups.ranks_in(group) or groups.ranks_of(groups.find_group(group))
    return DeviceMesh(xs[0].device.type if xs else "cpu", ranks)
