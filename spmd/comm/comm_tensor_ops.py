"""The in-place collectives of torch.distributed as nodes of a graph: tensors, plain data and the name of a group.

    work = all_reduce([x], "sum", "ranks:0-3")     # launched: x is in flight
    (x,) = pair([x], work)                         # wait_tensor(x) will wait for this work
    x    = wait_tensor(x)                          # x has arrived

Each function has the parameters of the dispatcher's op, with the same names. The process group is given by its name and
the reduction as a word. The function returns the work, which is a value of this run, as a tensor is, and not a part of
the program. A trace records the call as it is and sends nothing, so a traced program can be traced again.

Timeouts are those of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.mesh import groups

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Collective:
    """How a collective is launched, and which of its parameters are tensors that it writes and reads."""

    launch: Callable[..., dist.Work]
    run: Callable[..., dist.Work]  # the same without recording: it sends even inside a trace
    writes: tuple[str, ...]
    reads: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, in order."""
        return tuple(signature(self.run).parameters)

    def written(self, args: tuple) -> list:
        """The tensors among the arguments that the collective writes, or the nodes in their place."""
        return self._flat(self.writes, args)

    def read(self, args: tuple) -> list:
        """The tensors among the arguments that it only reads, or the nodes in their place."""
        return self._flat(self.reads, args)

    def _flat(self, names: tuple[str, ...], args: tuple) -> list:
        given = dict(zip(self.parameters, args, strict=True))
        return list(leaves([given[name] for name in names]))


COLLECTIVES: dict[str, Collective] = {}
"""All collectives, by the name of the dispatcher's op: `allreduce_` for `c10d::allreduce_`."""


def collective_of(target: Any) -> Collective | None:
    """The collective that a node with this target launches; None for other nodes."""
    return next((c for c in COLLECTIVES.values() if c.launch is target), None)


def leaves(nested: Any) -> Iterator[Any]:
    """The entries of nested lists and tuples, in order."""
    if isinstance(nested, (list, tuple)):
        for part in nested:
            yield from leaves(part)
    else:
        yield nested


def _graph_node(op: str, writes: str = "", reads: str = "") -> Callable:
    """Decorates a function that is the graph node for `c10d::op`."""

    def register(body: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        @functools.wraps(body)
        def launch(*args: Any) -> dist.Work:
            mode = _torch.proxy_mode()
            if mode is not None:
                return record(COLLECTIVES[op], args, mode.tracer)
            if (tracer := _symbolic_tracer(args)) is not None:
                return tracer.create_proxy("call_function", launch, args, {})
            if _torch.is_faking(*leaves(args)):
                return _torch.FakeWork()
            if _torch.in_symbolic_trace():
                raise RuntimeError(
                    f"{body.__name__}: all that it is given is constant, and would be sent now, while torch.fx traces "
                    "the program symbolically, as unpickling does. Make the tensor an input of the program."
                )
            return body(*args)

        COLLECTIVES[op] = Collective(launch, body, tuple(writes.split()), tuple(reads.split()))
        return torch.fx.has_side_effect(launch)

    return register


# ---- launching --------------------------------------------------------------------------------


@_graph_node("allreduce_", writes="tensors")
def all_reduce(tensors: Tensors, reduce_op: str, process_group: str) -> dist.Work:
    """`dist.all_reduce`, of one tensor."""
    return _group(process_group).allreduce(tensors, _options("Allreduce", reduce_op))


@_graph_node("allreduce_coalesced_", writes="tensors")
def all_reduce_coalesced(tensors: Tensors, reduce_op: str, process_group: str) -> dist.Work:
    """`dist.all_reduce_coalesced`, of several."""
    return _group(process_group).allreduce_coalesced(tensors, _options("AllreduceCoalesced", reduce_op))


@_graph_node("reduce_", writes="tensors")
def reduce(tensors: Tensors, reduce_op: str, root_rank: int, process_group: str) -> dist.Work:
    """`dist.reduce`: on ranks other than the root the tensor's contents are undefined."""
    return _group(process_group).reduce(tensors, _options("Reduce", reduce_op, rootRank=root_rank))


@_graph_node("broadcast_", writes="tensors")
def broadcast(tensors: Tensors, root_rank: int, process_group: str) -> dist.Work:
    """`dist.broadcast`."""
    return _group(process_group).broadcast(tensors, _options("Broadcast", rootRank=root_rank))


@_graph_node("allgather_", writes="output_tensors", reads="input_tensors")
def all_gather(output_tensors: list[Tensors], input_tensors: Tensors, process_group: str) -> dist.Work:
    """`dist.all_gather`."""
    return _group(process_group).allgather(output_tensors, input_tensors, _options("Allgather"))


@_graph_node("_allgather_base_", writes="output_tensor", reads="input_tensor")
def all_gather_into_tensor(output_tensor: torch.Tensor, input_tensor: torch.Tensor, process_group: str) -> dist.Work:
    """`dist.all_gather_into_tensor`."""
    return _group(process_group)._allgather_base(output_tensor, input_tensor, _options("Allgather"))


@_graph_node("allgather_coalesced_", writes="output_lists", reads="input_list")
def all_gather_coalesced(output_lists: list[Tensors], input_list: Tensors, process_group: str) -> dist.Work:
    """`dist.all_gather_coalesced`."""
    return _group(process_group).allgather_coalesced(output_lists, input_list, _options("Allgather"))


@_graph_node("allgather_into_tensor_coalesced_", writes="outputs", reads="inputs")
def all_gather_into_tensor_coalesced(outputs: Tensors, inputs: Tensors, process_group: str) -> dist.Work:
    """Several `dist.all_gather_into_tensor` at once."""
    return _group(process_group).allgather_into_tensor_coalesced(outputs, inputs, _options("Allgather"))


@_graph_node("gather_", writes="output_tensors", reads="input_tensors")
def gather(output_tensors: list[Tensors], input_tensors: Tensors, root_rank: int, process_group: str) -> dist.Work:
    """`dist.gather`: only the root has outputs."""
    return _group(process_group).gather(output_tensors, input_tensors, _options("Gather", rootRank=root_rank))


@_graph_node("scatter_", writes="output_tensors", reads="input_tensors")
def scatter(output_tensors: Tensors, input_tensors: list[Tensors], root_rank: int, process_group: str) -> dist.Work:
    """`dist.scatter`: only the root has inputs."""
    return _group(process_group).scatter(output_tensors, input_tensors, _options("Scatter", rootRank=root_rank))


@_graph_node("reduce_scatter_", writes="output_tensors", reads="input_tensors")
def reduce_scatter(
    output_tensors: Tensors, input_tensors: list[Tensors], reduce_op: str, process_group: str
) -> dist.Work:
    """`dist.reduce_scatter`."""
    return _group(process_group).reduce_scatter(output_tensors, input_tensors, _options("ReduceScatter", reduce_op))


@_graph_node("_reduce_scatter_base_", writes="output_tensor", reads="input_tensor")
def reduce_scatter_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, reduce_op: str, process_group: str
) -> dist.Work:
    """`dist.reduce_scatter_tensor`."""
    options = _options("ReduceScatter", reduce_op)
    return _group(process_group)._reduce_scatter_base(output_tensor, input_tensor, options)


@_graph_node("reduce_scatter_tensor_coalesced_", writes="outputs", reads="inputs")
def reduce_scatter_tensor_coalesced(outputs: Tensors, inputs: Tensors, reduce_op: str, process_group: str) -> dist.Work:
    """Several `dist.reduce_scatter_tensor` at once."""
    options = _options("ReduceScatter", reduce_op)
    return _group(process_group).reduce_scatter_tensor_coalesced(outputs, inputs, options)


@_graph_node("alltoall_", writes="output_tensors", reads="input_tensors")
def all_to_all(output_tensors: Tensors, input_tensors: Tensors, process_group: str) -> dist.Work:
    """`dist.all_to_all`."""
    return _group(process_group).alltoall(output_tensors, input_tensors, _options("AllToAll"))


@_graph_node("alltoall_base_", writes="output", reads="input")
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    process_group: str,
) -> dist.Work:
    """`dist.all_to_all_single`; without sizes it sends equal parts."""
    splits = output_split_sizes, input_split_sizes
    return _group(process_group).alltoall_base(output, input, *splits, _options("AllToAll"))


@_graph_node("send", reads="tensors")
def send(tensors: Tensors, dst: int, tag: int, process_group: str) -> dist.Work:
    """`dist.send` and `dist.isend`."""
    return _group(process_group).send(tensors, dst, tag)


@_graph_node("recv_", writes="tensors")
def recv(tensors: Tensors, src: int, tag: int, process_group: str) -> dist.Work:
    """`dist.recv` and `dist.irecv` from a given rank."""
    return _group(process_group).recv(tensors, src, tag)


@_graph_node("barrier")
def barrier(tensor: torch.Tensor, process_group: str) -> dist.Work:
    """`dist.barrier` on the tensor's device. It returns when all ranks have called it, so no wait follows."""
    options = _options("Barrier")
    options.device = tensor.device
    work = _group(process_group).barrier(options)
    if work is not None:
        work.wait()
    return _torch.FakeWork()


@torch.fx.has_side_effect
def pair(tensors: Tensors, work: dist.Work | None) -> Tensors:
    """The same tensors; `wait_tensor` of each will wait for the work."""
    if (tracer := _symbolic_tracer(tensors)) is not None:
        return tracer.create_proxy("call_function", pair, (tensors, work), {})
    if work is not None and not isinstance(work, _torch.FakeWork):
        for x in tensors:
            _torch.register_work(x, work)
    return tensors


def _symbolic_tracer(nested: Any) -> torch.fx.Tracer | None:
    """The tracer of a surrounding torch.fx.symbolic_trace; unpickling a GraphModule also runs one."""
    return next((x.tracer for x in leaves(nested) if isinstance(x, torch.fx.Proxy)), None)


def _group(name: str) -> dist.ProcessGroup:
    """The group of this name. If the name lists ranks, the first collective makes the group where it does not exist."""
    return groups.find_group(name if groups.lists_in(name) is None else groups.registered(name))


def _options(kind: str, reduce_op: str | None = None, **given: Any) -> Any:
    options = getattr(_torch.c10d, kind + "Options")()
    options.asyncOp = True
    if reduce_op is not None:
        options.reduceOp = getattr(dist.ReduceOp, reduce_op.upper())
    for name, value in given.items():
        setattr(options, name, value)
    return options


# ---- tracing ----------------------------------------------------------------------------------


def record(collective: Collective, args: tuple, tracer: torch.fx.Tracer) -> dist.Work:
    """Record the launch and the pair nodes. Tensors with data are also sent, as such a trace runs all its ops."""
    tensors = [x for x in leaves(args) if isinstance(x, torch.Tensor)]
    for x in tensors:
        _check_traceable(x, collective.launch.__name__)
    with _torch.not_traced():
        now = _torch.FakeWork() if _torch.is_faking(*tensors) else collective.run(*args)
    proxies = {id(x): _proxy_of(x, tracer) for x in tensors}
    in_graph = _torch.pytree.tree_map_only(torch.Tensor, lambda x: proxies[id(x)], args)
    name = collective.launch.__name__
    work = tracer.create_proxy("call_function", collective.launch, in_graph, {}, name=name)
    work.node.meta["val"] = None
    if arriving := collective.written(args) or collective.read(args):
        pairs = tracer.create_proxy("call_function", pair, ([proxies[id(x)] for x in arriving], work), {})
        _torch.track(arriving, pairs, constant=None, tracer=tracer)
    for x in collective.written(args):
        _torch.forget_constant(x, tracer)
    return now


def _proxy_of(x: torch.Tensor, tracer: torch.fx.Tracer) -> torch.fx.Proxy:
    """The proxy of x; the proxy of a constant if x comes from outside the traced function."""
    known = _torch.proxy_of(x, tracer)
    return known if isinstance(known, torch.fx.Proxy) else torch.fx.Proxy(tracer.create_arg(x), tracer)


def _check_traceable(x: torch.Tensor, name: str) -> None:
    if x.layout is not torch.strided:
        raise NotImplementedError(f"{name}: a sparse tensor cannot be traced; give x.to_dense()")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} is not differentiable, but a tensor of {list(x.shape)} that it is given requires grad: gradients "
            "would be silently wrong. Give x.detach(), or call it under torch.no_grad(); if gradients shall flow "
            "through it, use the functional collectives of spmd.comm."
        )
