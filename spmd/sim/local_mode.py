"""LocalTensorMode: one process plays all ranks, step by step.

    >>> import spmd
    >>> from spmd.comm import all_reduce
    >>> with LocalTensorMode(4) as mode:
    ...     mesh = spmd.init_device_mesh("cpu", (4,))
    ...     x = torch.full((2,), mesh.get_local_rank())
    ...     total = all_reduce(x, "sum", mesh)
    ...     total.reconcile()
    tensor([6, 6])

Inside, the current rank is an int that differs between ranks, and tensors that are made from it are LocalTensors.
Every op runs once for each rank. A collective takes the tensors of all ranks and gives each rank its result. A tensor
that is made inside is each rank's own. Random numbers come from each rank's own generator, which starts from the state
of the process. Tensors made outside are taken as equal on all ranks.

Modes nest: inside `with LocalTensorMode({0, 1})` only these ranks are played.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from spmd import _torch
from spmd.comm import Transport, use_transport
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import as_rank, current_rank, rank_simulator, simulated_by
from spmd.sim.local_distributed import LocalDistributed
from spmd.sim.local_groups import join_groups, join_names
from spmd.sim.local_int import local_int, pick, values_of
from spmd.sim.local_random import Randomness
from spmd.sim.local_tensor import LocalTensor, join_values, run_op, set_storage, wrap
from spmd.sim.local_transport import LocalTransport, NoCommunication, PostingTransport
from spmd.sim.report import Report, report

pytree = _torch.pytree
Ranks = tuple[int, ...]

_HANDLED_TYPES = (LocalTensor, torch.Tensor, torch.nn.Parameter)


class LocalTensorMode(_torch.TorchDispatchMode):
    """Play ranks in this thread inside the block. `ranks`: how many, or which.

    `mode.sent` lists every rank's part of every collective, in order; `mode.ranks` are the played ranks.
    """

    def __init__(self, ranks: int | Iterable[int]) -> None:
        super().__init__()
        self.ranks: Ranks = tuple(range(ranks)) if isinstance(ranks, int) else tuple(sorted(set(ranks)))
        if not self.ranks or self.ranks[0] < 0:
            raise ValueError(f"LocalTensorMode: {ranks!r} must be a number of ranks, or ranks, of at least one")
        self.transport = LocalTransport(self)
        self._open: list[ExitStack] = []
        self._copies = WeakIdKeyDictionary()  # each rank's copies of storages

    @property
    def sent(self) -> list:
        """The part of each rank in each collective, in order."""
        return self.transport.sent

    def report(self, mesh: DeviceMesh | None = None) -> Report:
        """Bytes and modelled time of `sent`, as a table and a timeline (`sim/report.py`). mesh: gives the links."""
        return report(self.sent, self.ranks, mesh)

    def __enter__(self) -> LocalTensorMode:
        outer = rank_simulator()
        if isinstance(outer, LocalTensorMode) and not set(self.ranks) <= set(outer.ranks):
            raise ValueError(f"LocalTensorMode: ranks {list(self.ranks)} are not all among those played, {outer.ranks}")
        self._nested = isinstance(outer, LocalTensorMode)
        self.world_size = outer.world_size if isinstance(outer, LocalTensorMode) else self.ranks[-1] + 1
        self.random = outer.random if isinstance(outer, LocalTensorMode) else Randomness(self.ranks)
        self.distributed = outer.distributed if self._nested else LocalDistributed(self.world_size)
        with ExitStack() as stack:
            if not self._nested:
                stack.enter_context(self.distributed.installed())
            stack.enter_context(as_rank(local_int({r: r for r in self.ranks}), self.world_size))
            stack.enter_context(simulated_by(self))
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
            return op(*args, **kwargs)  # the trace records it once for all ranks; nothing runs
        for kind in types:
            if kind not in _HANDLED_TYPES:
                return NotImplemented
        if self._nested:  # the outer mode would make tensors for all its ranks
            with _torch.no_modes():
                return self._run(op, types, args, kwargs)
        return self._run(op, types, args, kwargs)

    def _run(self, op: Callable, types: Iterable[type], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if op.namespace == "c10d":
            raise _foreign_group_error(op)
        if op.namespace == "_c10d_functional":
            return self.transport.op(op, args, kwargs)
        if torch.Tag.nondeterministic_seeded in op.tags:
            return self._run_random(op, args, kwargs)
        if LocalTensor in types:
            return self._set_storage(*args) if op in _SETS_STORAGE else run_op(op, args, kwargs)
        return self._run_plain(op, args, kwargs)

    def each(self, fn: Callable[..., Any], args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call fn for each rank with that rank's arguments; join the results. fn may not communicate."""
        flat, structure = pytree.tree_flatten((args, kwargs or {}))
        results = []
        for rank in self.ranks:
            own_args, own_kwargs = pytree.tree_unflatten([own(leaf, rank) for leaf in flat], structure)
            with self.playing(rank, NoCommunication(rank)):
                results.append(fn(*own_args, **own_kwargs))
        return self.join(results)

    def each_with_transport(
        self, transports: Mapping[int, PostingTransport], fn: Callable[..., Any], args: list[tuple], where: str
    ) -> list:
        """Call fn for each rank with its arguments and its transport. where: the caller's line, for the transports."""
        results = []
        for (rank, carrier), given in zip(transports.items(), args, strict=True):
            carrier.where = where
            with self.playing(rank, carrier):
                results.append(fn(*pytree.tree_map(lambda leaf, rank=rank: own(leaf, rank), given)))
        return results

    @contextmanager
    def playing(self, rank: int, carrier: Transport) -> Iterator[None]:
        """Inside the block, code runs for one rank alone, with this transport."""
        with _torch.no_modes(), simulated_by(None), as_rank(rank, self.world_size), use_transport(carrier):
            yield

    def join(self, results: list) -> Any:
        """The results of all ranks as one value; leaf by leaf if they have one structure."""
        flats, structures = zip(*map(pytree.tree_flatten, results), strict=True)
        if any(structure != structures[0] for structure in structures):
            return join_values(self.ranks, results)
        leaves = [self._join_leaf(column) for column in zip(*flats, strict=True)]
        return pytree.tree_unflatten(leaves, structures[0])

    def _join_leaf(self, column: tuple) -> Any:
        if all(isinstance(x, torch.Tensor) for x in column):
            return column[0] if all(x is column[0] for x in column) else wrap(self.ranks, list(column))
        group = join_names(column) or join_groups(self.ranks, column)
        return group if group is not None else join_values(self.ranks, column)

    def _run_random(self, op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """An op that draws random numbers: each rank draws from its own stream."""
        flat, structure = pytree.tree_flatten((args, kwargs))
        generator = kwargs.get("generator") or _default_generator(flat, kwargs.get("device"))
        results, known = [], {}
        for rank in self.ranks:
            mine = [own(leaf, rank) for leaf in flat]
            own_args, own_kwargs = pytree.tree_unflatten(mine, structure)
            with self.random.drawing_as(rank, generator):
                results.append(op(*own_args, **own_kwargs))
            known.update({id(x): leaf for x, leaf in zip(mine, flat, strict=True) if type(leaf) is LocalTensor})
        return known[id(results[0])] if id(results[0]) in known else self.join(results)

    def _set_storage(self, x: LocalTensor, storage: torch.UntypedStorage, *place: Any) -> LocalTensor:
        """`x.set_(storage, ...)`, as tensors are loaded and copied: each rank gets a copy of the storage, which is one
        for all ranks; tensors that share it still do.

        Without a place torch calls it itself, to copy one storage into another; the first rank does that for all.
        """
        if _torch.is_loading_before_reading():
            raise RuntimeError(
                "torch.load inside LocalTensorMode: the file has the format before torch 1.6, in which tensors are "
                "made before they are read; load it outside of the mode, and use spmd.sim.localize"
            )
        copies = self._copies.setdefault(storage, {}) if place else {x.ranks[0]: storage}
        with _torch.no_modes():
            copies.update({rank: storage.clone() for rank in x.ranks if rank not in copies})
        return set_storage(x, [copies[rank] for rank in x.ranks], *place)

    def _run_plain(self, op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """An op without LocalTensors: a factory makes one tensor for each rank, any other op runs once."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(values_of(leaf) is not None for leaf in leaves):
            return run_op(op, args, kwargs)
        if op is torch.ops.aten._efficientzerotensor.default:  # a missing tangent: zero on all ranks
            return op(*args, **kwargs)
        if op in _LIFTS:
            return wrap(self.ranks, [args[0].clone() for _ in self.ranks])
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and _torch.returns_tensors(op):
            return self.join([op(*args, **kwargs) for _ in self.ranks])
        return _torch.run_with_bits(op, *args, **kwargs)


class _Constructors(TorchFunctionMode):
    """Runs torch.tensor once a rank if its numbers differ between ranks: it reads them before any op is called.

    Lists of which torch would make tensors in C++, where it writes into memory that a LocalTensor does not have, become
    tensors first.
    """

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        if fn in _TAKES_LENGTHS and not _torch.in_trace():
            args, kwargs = _with_tensors(args, kwargs or {})
        if fn in _CONSTRUCTORS and any(values_of(leaf) is not None for leaf in pytree.tree_leaves(args)):
            mode = rank_simulator()
            if mode is not None:
                return mode.each(fn, args, kwargs)
        return fn(*args, **(kwargs or {}))


BETWEEN_USER_AND_TORCH = frozenset({_Constructors.__torch_function__.__code__})
"""The code of the simulator that is called in the place of every function of torch. A real rank has no such frames."""

def _default_generator(leaves: list, device: torch.device | None) -> torch.Generator | None:
    """That of the GPU that an op draws on, whose arguments are given; None on the CPU."""
    device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), device or torch.get_default_device())
    device = torch.device(device)
    if device.type != "cuda":
        return None
    current = torch.cuda.current_device()  # which makes the generators, if nothing has yet
    return torch.cuda.default_generators[current if device.index is None else device.index]


def _with_tensors(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments, with tensors for all lists and tuples of numbers."""
    tensors = [torch.tensor(x) if isinstance(x, (list, tuple)) else x for x in (*args, *kwargs.values())]
    return tuple(tensors[: len(args)]), dict(zip(kwargs, tensors[len(args) :], strict=True))


_TAKES_LENGTHS = (torch.nn.functional.ctc_loss, torch.ctc_loss)

_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray)

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)
"""The ops that torch.tensor calls for a new tensor."""

_SETS_STORAGE = {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}


def _foreign_group_error(op: Callable) -> RuntimeError:
    return RuntimeError(
        f"{op} on a process group that was made outside of LocalTensorMode, which knows nothing of the simulated "
        "ranks. Inside, use the default group, mesh.get_group(...) or dist.new_group(...); in a trace, CommTensor "
        "and tracing_mode=\"fake\"."
    )


def per_rank(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that branches on the rank: where one thread plays several ranks, it runs once for each.

    Each call draws random numbers from that rank's stream, and the results of the ranks are joined. The function may
    not communicate nor have other side effects. On a real rank the function is simply called.

        >>> @per_rank
        ... def share(rows, n):
        ...     return rows // n + (1 if current_rank() < rows % n else 0)
        >>> with LocalTensorMode(2):
        ...     share(5, 2)
        LocalInt({0: 3, 1: 2})
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = rank_simulator()
        if not isinstance(mode, LocalTensorMode):
            return fn(*args, **kwargs)

        def drawing(*own_args: Any, **own_kwargs: Any) -> Any:
            with mode.random.drawing_as(current_rank()):
                return fn(*own_args, **own_kwargs)

        return mode.each(drawing, args, kwargs)

    return run


def own(value: Any, rank: int) -> Any:
    """The value, or the tensor, on one rank."""
    return value.local[rank] if type(value) is LocalTensor else pick(value, rank)


def localize(value: Any) -> Any:
    """Give each rank its own copy of a plain tensor, or of all parameters and buffers of a module, in place.

    The tensors of a module stay the objects that they are, for optimisers and others who hold them.
    """
    mode = rank_simulator()
    if not isinstance(mode, LocalTensorMode):
        raise RuntimeError("localize: there are no ranks to give copies to; call it inside LocalTensorMode")
    if isinstance(value, torch.nn.Module):
        _localize_all([*value.named_parameters(), *value.named_buffers()], mode)
        return value
    return value if type(value) is LocalTensor else _copy_for_each(value, mode)


def _localize_all(named: list[tuple[str, torch.Tensor]], mode: LocalTensorMode) -> None:
    plain = [(name, x) for name, x in named if type(x) is not LocalTensor]
    for (name, _), why in zip(plain, _torch.obstacles([x for _, x in plain], LocalTensor), strict=True):
        if why is not None:
            raise RuntimeError(f"localize: {name} {why}; delete what holds it")
    for _, x in plain:
        _torch.become(x, _copy_for_each(x, mode))


def _copy_for_each(x: torch.Tensor, mode: LocalTensorMode) -> torch.Tensor:
    copy = wrap(mode.ranks, [x.detach().clone() for _ in mode.ranks], x.requires_grad)
    if x.is_leaf and x.grad is not None:
        copy.grad = _copy_for_each(x.grad, mode)
    return torch.nn.Parameter(copy, x.requires_grad) if isinstance(x, torch.nn.Parameter) else copy
