"""CommTensor: the in-place collectives of torch.distributed, in programs traced by make_fx.

    def step(x, y):
        dist.all_reduce(CommTensor(x), async_op=True)
        z = y * 2
        return x + z

Traced on any tensors and run on others, on all ranks, it launches the collective, multiplies, waits, and adds:

    all_reduce = spmd_comm_comm_launch_all_reduce([x_1], 'sum', 'ranks:0-3')      launch; gives the work of this run
    pair = spmd_comm_comm_launch_pair([x_1], all_reduce)                          each output with its work
    getitem = pair[0]
    mul = torch.ops.aten.mul.Tensor(y_1, 2)
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default(getitem)         before the first reader
    add = torch.ops.aten.add.Tensor(wait_tensor, mul)

All collectives take these three steps (`comm_launch`); where to wait is decided when the trace ends (`comm_waits`). So
it does not matter whether a reader holds the tensor that was wrapped or a view of it, when `work.wait()` is called,
nor whether the call was made with `async_op`: nothing is read, and nothing returned, before it has arrived.

The graph holds plain data: a reduction as a word, a group as its name. Groups that spmd made, and that of all ranks,
spell their ranks and are found or made anew wherever the program runs. Another group keeps the name that torch gave it:
the program talks over that very group, in the order in which the user's own code uses it, and not over a second one of
the same ranks; to run it in another process, make the group there in the same order.

What a trace does with the network is what make_fx does with any op: tracing_mode "fake" and "symbolic" send nothing,
"real" runs each collective, so all ranks must trace.

Left out: receiving from any rank, `ReduceOp.PREMUL_SUM`, sparse tensors, and gradients, which an in-place collective
does not have (use the functional ones); AOTAutograd, torch.compile and torch.func, where nothing is in place;
`x.data = y`, which make_fx does not see. The split sizes of `all_to_all_single` are numbers in the graph, also in a
symbolic trace. Of two collectives on parts of one tensor the second waits for the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.comm.comm_launch import COLLECTIVES, Collective, record
from spmd.comm.comm_waits import place_waits
from spmd.mesh import groups


class CommTensor:
    """Marks a tensor that an in-place collective is given, so that the trace around it records the collective.

        dist.all_reduce(CommTensor(x), async_op=True)
        dist.all_gather([CommTensor(out) for out in outs], CommTensor(x))

    CommTensor(x) is x itself, in a trace and outside: wrapping twice is as wrapping once, what is written to one is
    seen by the other, and eager code pays for one look whether there is a trace. From the first CommTensor on, the
    trace records all collectives: one wrapped tensor of a call is enough.

        >>> x = torch.ones(2)
        >>> CommTensor(x) is x
        True
    """

    def __new__(cls, x: torch.Tensor) -> torch.Tensor:
        mode = _torch.proxy_mode()
        if mode is not None:
            _check(x)
            _record_collectives(mode)
        return x


def comm_tensors(nested: Any) -> Any:
    """The same lists, tuples and dicts with each tensor a CommTensor.

        dist.all_gather(comm_tensors(outs), comm_tensors(x))

        >>> x = torch.ones(2)
        >>> comm_tensors([x, [x, None]])[1][0] is x
        True
    """
    return _torch.pytree.tree_map_only(torch.Tensor, CommTensor, nested)


def _check(x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"CommTensor takes a tensor, not {type(x).__name__}. For lists of tensors there is comm_tensors([...])."
        )
    if _torch.is_transformed(x):
        raise RuntimeError(
            "CommTensor: an in-place collective cannot be traced under torch.func transforms, AOTAutograd or "
            "torch.compile, where a write makes a new value. Use the functional collectives of spmd.comm, which return "
            "new tensors."
        )


# ---- a trace that records collectives ---------------------------------------------------------


def _record_collectives(mode: Any) -> None:
    """Have the trace record collectives from now on, and place waits when its graph is complete."""
    dispatch, tracer = mode.__torch_dispatch__, mode.tracer
    if getattr(dispatch, "records_collectives", False):
        return

    in_flight: list[dist.Work] = []  # of a trace on tensors with data, which later ops of the trace read

    def land() -> None:
        while in_flight:
            in_flight.pop().wait()

    def dispatch_or_record(_: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "namespace", None) == "c10d":
            results, work = _recorded(func, args, kwargs or {}, tracer)
            in_flight.append(work)
            return results
        land()
        return dispatch(func, types, args, kwargs)

    def finish() -> None:
        land()
        place_waits(tracer.graph, _alike(tracer))

    dispatch_or_record.records_collectives = True
    mode.__torch_dispatch__ = MethodType(dispatch_or_record, mode)
    _at_the_end(tracer.graph, finish)


def _at_the_end(graph: torch.fx.Graph, finish: Callable[[], None]) -> None:
    """Call `finish` when the graph gets its output, once."""
    create_node = graph.create_node

    def create_node_and_finish(kind: str, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = create_node(kind, *args, **kwargs)
        if kind == "output":
            del graph.create_node  # the method of the class shows again, and nothing of the trace stays with the graph
            finish()
        return node

    graph.create_node = create_node_and_finish


def _alike(tracer: torch.fx.Tracer) -> list[tuple[torch.fx.Node, ...]]:
    """The nodes whose tensors share memory, as far as they are alive: the inputs and constants of the trace are."""
    nodes = defaultdict(list)
    for x, node in _torch.traced_tensors(tracer):
        nodes[_torch.memory_of(x)].append(node)
    nodes.pop(None, None)
    return [tuple(alike) for alike in nodes.values()]


# ---- from the dispatcher to the graph ---------------------------------------------------------


def _recorded(func: _torch.OpOverload, args: tuple, kwargs: dict, tracer: torch.fx.Tracer) -> tuple[Any, dist.Work]:
    """What the op returns, and the work, after the launch has been written down.

    The caller of the op gets a work whose `wait()` does nothing: where to wait is decided when the trace is complete.
    """
    name = _torch.qualified_name(func).removeprefix("c10d::")
    if name not in COLLECTIVES:
        raise NotImplementedError(
            f"{name} cannot be traced. In a trace there are "
            f"{', '.join(c.launch.__name__ for c in COLLECTIVES.values())}; a recv names its source."
        )
    work = record(COLLECTIVES[name], _plain_data(COLLECTIVES[name], _by_name(func, args, kwargs)), tracer)
    given = _torch.FakeWork().boxed()
    return (given if len(func._schema.returns) == 1 else (args[0], given)), work


def _by_name(func: _torch.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    return dict(zip((a.name for a in _torch.arguments(func)), args, strict=False)) | kwargs


def _plain_data(collective: Collective, given: dict[str, Any]) -> tuple:
    """The arguments of the launch: those of the op, without objects of this run."""
    write: dict[str, Callable] = {
        "process_group": lambda boxed: _group_name(_torch.unboxed_group(boxed)),
        "reduce_op": lambda boxed: _reduction(boxed, collective.launch.__name__),
    }
    return tuple(write.get(name, lambda x: x)(given[name]) for name in collective.parameters)


def _reduction(boxed: torch.ScriptObject, name: str) -> str:
    word = _torch.unboxed_reduce_op(boxed)
    if word == "premul_sum":
        raise NotImplementedError(
            f"{name}: the factor of ReduceOp.PREMUL_SUM is hidden from the trace. "
            "Multiply first, x.mul_(factor), and reduce with ReduceOp.SUM."
        )
    return word


def _group_name(group: dist.ProcessGroup) -> str:
    """The name that spells the group's ranks, if it leads to this very group; otherwise the one torch gave it.

    The default group is the one of all ranks, and always spelled.
    """
    if groups.lists_in(group.group_name) is not None:
        return group.group_name
    ranks = groups.ranks_of(group)
    if group is dist.group.WORLD:
        return groups.named(ranks)
    name = groups.name_of(ranks)
    return name if _torch.is_group(name) and groups.called(name) is group else group.group_name
