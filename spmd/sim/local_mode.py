"""LocalTensorMode: one process plays all ranks, step by step.

    >>> import spmd
    >>> from spmd.comm import all_reduce
    >>> with LocalTensorMode(4) as mode:
    ...     mesh = spmd.init_device_mesh("cpu", (4,))
    ...     x = torch.full((2,), mesh.get_local_rank())
    ...     total = all_reduce(x, "sum", mesh)
    ...     total.reconcile()
    tensor([6, 6])

Inside, the current rank is an int that differs between ranks, and what is made of it are LocalTensors. Every op runs
once a rank; a collective takes what each rank has and gives each what it would get. Tensors made inside are each rank's
own, and random numbers come from each rank's own generator, which starts where the process's stood; tensors made
outside are taken as equal on all ranks.

Modes nest: inside `with LocalTensorMode({0, 1})` only those ranks play.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmd import _torch
from spmd.comm import Transport, use_transport
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import as_rank, current_rank, played_by, players
from spmd.sim.local_distributed import LocalDistributed
from spmd.sim.local_groups import joined_groups, joined_names
from spmd.sim.local_random import Randomness
from spmd.sim.local_tensor import LocalTensor, joined_values, run_op, wrap
from spmd.sim.local_transport import LocalTransport, Posting, Silent
from spmd.sim.report import Report, report
from spmd.sim.varying import local_int, pick, values_of

pytree = _torch.pytree
Ranks = tuple[int, ...]

_OWN = (LocalTensor, torch.Tensor, torch.nn.Parameter)


class LocalTensorMode(_torch.TorchDispatchMode):
    """Play `ranks` - how many, or which - in this thread inside the block.

    `sent` lists every collective's part of every rank, in order; `ranks` are the ranks played.
    """

    def __init__(self, ranks: int | Iterable[int]) -> None:
        super().__init__()
        self.ranks: Ranks = tuple(range(ranks)) if isinstance(ranks, int) else tuple(sorted(set(ranks)))
        if not self.ranks or self.ranks[0] < 0:
            raise ValueError(f"LocalTensorMode: {ranks!r} must be a number of ranks, or ranks, of at least one")
        self.transport = LocalTransport(self)
        self._open: list[ExitStack] = []

    @property
    def sent(self) -> list:
        """What each rank gave to each collective, in order."""
        return self.transport.sent

    def report(self, mesh: DeviceMesh | None = None) -> Report:
        """The same with bytes and modelled time, as a table and a timeline; mesh: whose links (`sim/report.py`)."""
        return report(self.sent, self.ranks, mesh)

    def __enter__(self) -> LocalTensorMode:
        outer = players()
        if isinstance(outer, LocalTensorMode) and not set(self.ranks) <= set(outer.ranks):
            raise ValueError(f"LocalTensorMode: ranks {list(self.ranks)} are not all among those played, {outer.ranks}")
        self._nested = isinstance(outer, LocalTensorMode)
        self.world_size = outer.world_size if isinstance(outer, LocalTensorMode) else self.ranks[-1] + 1
        self.random = outer.random if isinstance(outer, LocalTensorMode) else Randomness(self.ranks)
        self.distributed = outer.distributed if self._nested else LocalDistributed(self.world_size)
        with ExitStack() as stack:
            if not self._nested:
                stack.enter_context(self.distributed.around())
            stack.enter_context(as_rank(local_int({r: r for r in self.ranks}), self.world_size))
            stack.enter_context(played_by(self))
            stack.enter_context(use_transport(self.transport))
            if self.random.owner is None:
                stack.enter_context(self.random.owned_by(self))
            stack.enter_context(_Constructors())
            super().__enter__()
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._open.pop().__exit__(*exc)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if LocalTensor not in types and _torch.in_trace():
            return op(*args, **kwargs)  # written down for all ranks alike; nothing runs
        for kind in types:
            if kind not in _OWN:
                return NotImplemented
        if self._nested:  # the mode around would make tensors of all its ranks
            with _torch.no_modes():
                return self._run(op, types, args, kwargs)
        return self._run(op, types, args, kwargs)

    def _run(self, op: Callable, types: Iterable[type], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if op.namespace == "c10d":
            raise _no_such_group(op)
        if op.namespace == "_c10d_functional":
            return self.transport.op(op, args, kwargs)
        if torch.Tag.nondeterministic_seeded in op.tags:
            return self._random(op, args, kwargs)
        if LocalTensor in types:
            return run_op(op, args, kwargs)
        return self._plain(op, args, kwargs)

    def each(self, fn: Callable[..., Any], args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """fn for each rank with that rank's arguments; its results as one. It may not communicate."""
        flat, structure = pytree.tree_flatten((args, kwargs or {}))
        results = []
        for rank in self.ranks:
            own_args, own_kwargs = pytree.tree_unflatten([own(leaf, rank) for leaf in flat], structure)
            with self.playing(rank, Silent(rank)):
                results.append(fn(*own_args, **own_kwargs))
        return self.joined(results)

    def each_with(self, posting: Mapping[int, Posting], fn: Callable[..., Any], args: list[tuple], where: str) -> list:
        """fn for each rank with its arguments and its transport; where: what the transports say of the caller."""
        results = []
        for (rank, by), given in zip(posting.items(), args, strict=True):
            by.where = where
            with self.playing(rank, by):
                results.append(fn(*pytree.tree_map(lambda leaf, rank=rank: own(leaf, rank), given)))
        return results

    @contextmanager
    def playing(self, rank: int, by: Transport) -> Iterator[None]:
        """Be one rank inside the block."""
        with _torch.no_modes(), played_by(None), as_rank(rank, self.world_size), use_transport(by):
            yield

    def joined(self, results: list) -> Any:
        """The results of all ranks, alike in structure, as one."""
        flats, structures = zip(*map(pytree.tree_flatten, results), strict=True)
        if any(structure != structures[0] for structure in structures):
            return joined_values(self.ranks, results)
        leaves = [self._leaf(column) for column in zip(*flats, strict=True)]
        return pytree.tree_unflatten(leaves, structures[0])

    def _leaf(self, column: tuple) -> Any:
        if all(isinstance(x, torch.Tensor) for x in column):
            return column[0] if all(x is column[0] for x in column) else wrap(self.ranks, list(column))
        group = joined_names(column) or joined_groups(self.ranks, column)
        return group if group is not None else joined_values(self.ranks, column)

    def _random(self, op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        generator = kwargs.get("generator")
        flat, structure = pytree.tree_flatten((args, kwargs))
        results, known = [], {}
        for rank in self.ranks:
            mine = [own(leaf, rank) for leaf in flat]
            own_args, own_kwargs = pytree.tree_unflatten(mine, structure)
            with self.random.of(rank, generator):
                results.append(op(*own_args, **own_kwargs))
            known.update({id(x): leaf for x, leaf in zip(mine, flat, strict=True) if type(leaf) is LocalTensor})
        return known[id(results[0])] if id(results[0]) in known else self.joined(results)

    def _plain(self, op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """An op without LocalTensors: a factory makes one tensor a rank, any other op runs once."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(values_of(leaf) is not None for leaf in leaves):
            return run_op(op, args, kwargs)
        if op is torch.ops.aten._efficientzerotensor.default:  # a tangent that is not there: all zero, on all ranks
            return op(*args, **kwargs)
        if op in _LIFTS:
            return wrap(self.ranks, [args[0].clone() for _ in self.ranks])
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and _torch.returns_tensors(op):
            return self.joined([op(*args, **kwargs) for _ in self.ranks])
        return op(*args, **kwargs)


class _Constructors(TorchFunctionMode):
    """torch.tensor of numbers that differ between ranks: it reads them before any op is called."""

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        if fn in _CONSTRUCTORS and any(values_of(leaf) is not None for leaf in pytree.tree_leaves(args)):
            who = players()
            if who is not None:
                return who.each(fn, args, kwargs)
        return fn(*args, **(kwargs or {}))


_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray)

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)
"""How torch.tensor brings in a new tensor."""


def _no_such_group(op: Callable) -> RuntimeError:
    return RuntimeError(
        f"{op} on a process group that was made outside of LocalTensorMode, which knows nothing of the simulated "
        "ranks. Inside, use the default group, mesh.get_group(...) or dist.new_group(...); in a trace, CommTensor "
        "and tracing_mode=\"fake\"."
    )


def per_rank(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function whose way depends on the rank: where one thread plays several, it runs once for each.

    Each call draws from that rank's random numbers, and what the function gives is put together again. It may not
    communicate nor have other effects; on a real rank it is called as it is.

        >>> @per_rank
        ... def share(rows, n):
        ...     return rows // n + (1 if current_rank() < rows % n else 0)
        >>> with LocalTensorMode(2):
        ...     share(5, 2)
        LocalInt({0: 3, 1: 2})
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = players()
        if not isinstance(mode, LocalTensorMode):
            return fn(*args, **kwargs)

        def drawing(*own_args: Any, **own_kwargs: Any) -> Any:
            with mode.random.of(current_rank()):
                return fn(*own_args, **own_kwargs)

        return mode.each(drawing, args, kwargs)

    return run


def own(value: Any, rank: int) -> Any:
    """What a value is on one rank."""
    return value.local[rank] if type(value) is LocalTensor else pick(value, rank)


def localize(value: Any) -> Any:
    """Give each rank its own copy of a plain tensor, or of all parameters and buffers of a module, in place."""
    mode = players()
    if not isinstance(mode, LocalTensorMode):
        raise RuntimeError("localize: there are no ranks to give copies to; call it inside LocalTensorMode")
    if isinstance(value, torch.nn.Module):
        for module in value.modules():
            for table in (module._parameters, module._buffers):
                table.update({name: localize(x) for name, x in table.items() if x is not None})
        return value
    if type(value) is LocalTensor:
        return value
    copy = wrap(mode.ranks, [value.detach().clone() for _ in mode.ranks], value.requires_grad)
    return torch.nn.Parameter(copy, value.requires_grad) if isinstance(value, torch.nn.Parameter) else copy

