"""CommTensor: the in-place collectives of torch.distributed, in programs traced by make_fx.

    def step(x, y):
        dist.all_reduce(CommTensor(x), async_op=True)
        z = y * 2
        return x + z

The step is traced on some tensors and runs on others, on all ranks. The traced program launches the collective,
multiplies, waits, and adds:

    all_reduce = spmd_comm_comm_tensor_ops_all_reduce([x_1], 'sum', 'ranks:0-3')  launch; returns the work of this run
    pair = spmd_comm_comm_tensor_ops_pair([x_1], all_reduce)                      each output with its work
    getitem = pair[0]
    mul = torch.ops.aten.mul.Tensor(y_1, 2)
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default(getitem)         before the first reader
    add = torch.ops.aten.add.Tensor(wait_tensor, mul)

Every collective becomes these three steps: launch, pair and wait (`comm_tensor_ops`). The waits are placed when the
trace ends (`place_waits`). So a reader may hold the tensor that was wrapped or a view of it, `work.wait()` may be
called at any time, and the call may or may not use `async_op`: no data is read or returned before it has arrived.

The graph holds plain data: a reduction as a word, a group as its name. The names of the groups that spmd makes, and of
the group of all ranks, list the ranks; such a group is found or made wherever the program runs. Every other group keeps
the name that torch gave it. The program then communicates over that same group, in the order in which the user's own
code uses it, and not over a second group of the same ranks. To run it in another process, make the group there in the
same order.

A trace treats the network as make_fx treats every op: tracing_mode "fake" and "symbolic" send nothing; "real" runs each
collective, so all ranks must trace.

Left out: receiving from any rank; `ReduceOp.PREMUL_SUM`; sparse tensors; gradients, which in-place collectives do not
have (use the functional collectives); AOTAutograd, torch.compile and torch.func, where no op is in place; `x.data = y`,
which make_fx does not see. The split sizes of `all_to_all_single` are numbers in the graph, also in a symbolic trace.
If two collectives use parts of one tensor, the second waits for the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.comm.comm_tensor_ops import COLLECTIVES, Collective, record
from spmd.comm.place_waits import place_waits
from spmd.mesh import groups


class CommTensor:
    """Marks the tensor argument of an in-place collective, so that a surrounding trace records the collective.

        dist.all_reduce(CommTensor(x), async_op=True)
        dist.all_gather([CommTensor(out) for out in outs], CommTensor(x))

    CommTensor(x) is x itself, in a trace and outside of it. So wrapping twice changes nothing, a write to one is a
    write to the other, and eager code only pays for one check whether there is a trace. After the first CommTensor, the
    trace records all collectives; it is enough to wrap one tensor of a call.

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

    launched: list[dist.Work] = []  # a trace on tensors with data sends them, and its later ops read the results

    def wait_for_launched() -> None:
        while launched:
            launched.pop().wait()

    def dispatch_or_record(_: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "namespace", None) == "c10d":
            results, work = _record_call(func, args, kwargs or {}, tracer)
            launched.append(work)
            return results
        wait_for_launched()
        return dispatch(func, types, args, kwargs)

    def finish() -> None:
        wait_for_launched()
        place_waits(tracer.graph, _nodes_sharing_memory(tracer))

    dispatch_or_record.records_collectives = True
    mode.__torch_dispatch__ = MethodType(dispatch_or_record, mode)
    _call_at_output(tracer.graph, finish)


def _call_at_output(graph: torch.fx.Graph, finish: Callable[[], None]) -> None:
    """Call `finish` once, when the graph gets its output node."""
    create_node = graph.create_node

    def create_node_and_finish(kind: str, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = create_node(kind, *args, **kwargs)
        if kind == "output":
            del graph.create_node  # restores the method of the class; the graph keeps nothing of the trace
            finish()
        return node

    graph.create_node = create_node_and_finish


def _nodes_sharing_memory(tracer: torch.fx.Tracer) -> list[tuple[torch.fx.Node, ...]]:
    """Groups of nodes whose tensors share memory, of tensors that are alive: the trace's inputs and constants are."""
    nodes = defaultdict(list)
    for x, node in _torch.traced_tensors(tracer):
        nodes[_torch.memory_of(x)].append(node)
    nodes.pop(None, None)
    return [tuple(group) for group in nodes.values()]


# ---- from the dispatcher to the graph ---------------------------------------------------------


def _record_call(func: _torch.OpOverload, args: tuple, kwargs: dict, tracer: torch.fx.Tracer) -> tuple[Any, dist.Work]:
    """Record the launch; return the op's results and the work.

    The caller of the op gets a work whose `wait()` does nothing: waits are placed when the trace is complete.
    """
    name = _torch.qualified_name(func).removeprefix("c10d::")
    if name not in COLLECTIVES:
        raise NotImplementedError(
            f"{name} cannot be traced. In a trace there are "
            f"{', '.join(c.launch.__name__ for c in COLLECTIVES.values())}; a recv names its source."
        )
    work = record(COLLECTIVES[name], _plain_arguments(COLLECTIVES[name], _named_arguments(func, args, kwargs)), tracer)
    given = _torch.FakeWork().boxed()
    return (given if len(func._schema.returns) == 1 else (args[0], given)), work


def _named_arguments(func: _torch.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    return dict(zip((a.name for a in _torch.arguments(func)), args, strict=False)) | kwargs


def _plain_arguments(collective: Collective, given: dict[str, Any]) -> tuple:
    """The arguments of the launch: those of the op, with group and reduction as plain data."""
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
    """The name that lists the group's ranks, if it leads to this same group; otherwise the name that torch gave it.

    The default group has all ranks, and its name always lists them.
    """
    if groups.lists_in(group.group_name) is not None:
        return group.group_name
    ranks = groups.ranks_of(group)
    if group is dist.group.WORLD:
        return groups.registered_name(ranks)
    name = groups.name_of(ranks)
    return name if _torch.is_group(name) and groups.find_group(name) is group else group.group_name
