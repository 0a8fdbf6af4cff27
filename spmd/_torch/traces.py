"""Traces by make_fx: tensors and the proxies that stand for them in the graph."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import _lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.utils import checkpoint

from spmd._torch.fakes import FakeTensor, fakes_like, modes_aside
from spmd._torch.graphs import input_named, rename_input
from spmd._torch.modes import no_function_modes
from spmd._torch.tensors import memory_of

# The mode that records the ops of this thread, with its `tracer`; None outside a make_fx.
proxy_mode = proxy_tensor.get_proxy_mode

# Inside, ops run and are not recorded.
not_traced = proxy_tensor.disable_proxy_modes_tracing

# Inside, a GraphModule writes its code when it is called, and not before.
code_when_called = functools.partial(_lazy_graph_module._use_lazy_graph_module, True)

# A GraphModule that does so wherever it is made.
GraphModuleWhenCalled = _lazy_graph_module._LazyGraphModule

# Let proxies stand for these values: later ops on the values refer to the nodes of the proxies.
track = proxy_tensor.track_tensor_tree


def proxy_of(x: torch.Tensor, by: torch.fx.Tracer) -> torch.fx.Proxy | torch.Tensor:
    """The proxy that stands for x in the graph; x itself, a constant, where the trace has not met it."""
    return proxy_tensor.get_proxy_slot(x, by, x, lambda slot: slot.proxy)


def node_of(x: torch.Tensor, by: torch.fx.Tracer) -> torch.fx.Node | None:
    """The node that gives x in the graph; None where the trace has not met it."""
    slot = by.tensor_tracker.get(x)
    return None if slot is None else slot.proxy.node


def known_constant(x: torch.Tensor, by: torch.fx.Tracer) -> torch.Tensor | None:
    """The value of x where the trace knows it, as of `torch.tensor(1.0)`: `.item()` of it is a constant."""
    return proxy_tensor.get_proxy_slot(x, by, None, lambda slot: slot.constant)


def traced_tensors(by: torch.fx.Tracer) -> list[tuple[torch.Tensor, torch.fx.Node]]:
    """The tensors of the trace that are alive, each with the last node that gave or wrote it."""
    return [(x, slot.proxy.node) for x, slot in by.tensor_tracker.items()]


def stand_ins(likes: list[torch.Tensor], nodes: list[torch.fx.Node], by: torch.fx.Tracer) -> list[torch.Tensor]:
    """Fake tensors like these, each in memory of its own, for which the nodes stand in the trace."""
    if not likes:
        return []
    different = {id(x): x for x in likes}
    with no_function_modes():
        with modes_aside([*different.values()]):
            ways = {key: fakes_like(x) for key, x in different.items()}
            made = [ways[id(x)][1]() for x in likes]
        for new, node, like in zip(made, nodes, likes, strict=True):
            proxy, are_numbers = torch.fx.Proxy(node, by), ways[id(like)][0]
            (_track_plain if are_numbers else _track)(new, proxy, by)
    return made


def stand_for(x: torch.Tensor, node: torch.fx.Node, by: torch.fx.Tracer) -> None:
    """From now on another node stands for a tensor of the trace whose sizes are numbers."""
    _track_plain(x, torch.fx.Proxy(node, by), by)


def with_more_inputs(given: list, more: list[torch.Tensor], by: torch.fx.Tracer) -> list:
    """The inputs of a trace that begins, with further ones behind the first: fake tensors, in a tenth of the time that
    torch needs for each. given: those that torch has made inputs of."""
    first, *others = by.graph.nodes
    stem = first.name.rpartition("_")[0]
    for i, node in enumerate(others, 2 + len(more)):
        rename_input(node, f"{stem}_{i}")
    with by.graph.inserting_before(others[0]) if others else contextlib.nullcontext():
        nodes = [input_named(by.graph, f"{stem}_{i}") for i in range(2, 2 + len(more))]
    with no_function_modes():
        for x, node in zip(more, nodes, strict=True):
            _track(x, torch.fx.Proxy(node, by), by)
            node.meta["val"] = x
    return [*given[:1], *more, *given[1:]]


def _track(x: torch.Tensor, proxy: torch.fx.Proxy, by: torch.fx.Tracer) -> None:
    """Let a proxy stand for a fake tensor that is new. Where its sizes are numbers, nothing else is to be noted."""
    if all([type(n) is int for n in (*x.shape, *x.stride())]):
        _track_plain(x, proxy, by)
    else:
        proxy_tensor.track_tensor(x, proxy, constant=None, tracer=by)


def _track_plain(x: torch.Tensor, proxy: torch.fx.Proxy, by: torch.fx.Tracer) -> None:
    by.tensor_tracker[x] = proxy_tensor._ProxyTensor(proxy, None)


def forget_constant(x: torch.Tensor, by: torch.fx.Tracer) -> None:
    """Call when x is written: a trace remembers the value of `torch.tensor(1.0)`, which makes `.item()` a constant."""
    if (constant := getattr(x, "constant", None)) is not None:
        x.fake_mode.fake_tensor_converter.invalidate_constant_aliases(constant)
    for other, slot in by.tensor_tracker.items():
        if slot.constant is not None and memory_of(other) == memory_of(x):
            slot.constant = None


@contextlib.contextmanager
def without_cleaning() -> Iterator[None]:
    """Inside, a trace of this thread leaves dead code in its graph, for which torch looks node by node."""
    real, thread = torch.fx.Graph.eliminate_dead_code, threading.get_ident()

    def eliminate(self: torch.fx.Graph, *args: object) -> bool:
        return False if threading.get_ident() == thread else real(self, *args)

    torch.fx.Graph.eliminate_dead_code = eliminate
    try:
        yield
    finally:
        torch.fx.Graph.eliminate_dead_code = real


@contextlib.contextmanager
def without_layouts() -> Iterator[None]:
    """Inside, a trace of this thread does not find out for each of its values in which ways it is contiguous: for
    graphs of which only `val` is read. That of an input is the fake tensor itself, where torch would keep a copy of its
    shape: under functionalisation no code changes it."""
    real, noted, thread = proxy_tensor._extract_tensor_metadata, proxy_tensor.set_meta, threading.get_ident()
    tracked = proxy_tensor.track_tensor_tree

    def note(proxy: torch.fx.Proxy, value: object) -> torch.fx.Proxy:
        mine = threading.get_ident() == thread and proxy.node.op == "placeholder"
        if not mine or type(value) is not FakeTensor or value.requires_grad:
            return noted(proxy, value)
        proxy.node.meta["val"] = value
        return proxy

    def track(values: object, proxies: object, **given: object) -> object:
        """The inputs are a list of hundreds of tensors."""
        if type(values) is not list or type(proxies) is not list or threading.get_ident() != thread:
            return tracked(values, proxies, **given)
        others = []
        for x, proxy in zip(values, proxies, strict=True):
            if type(x) is FakeTensor and not x.requires_grad:
                _track(x, proxy, given["tracer"])
                note(proxy, x)
            else:
                others.append((x, proxy))
        for x, proxy in others:
            tracked(x, proxy, **given)
        return values

    proxy_tensor._extract_tensor_metadata = lambda x: None if threading.get_ident() == thread else real(x)
    proxy_tensor.set_meta, proxy_tensor.track_tensor_tree = note, track
    try:
        yield
    finally:
        proxy_tensor._extract_tensor_metadata, proxy_tensor.set_meta = real, noted
        proxy_tensor.track_tensor_tree = tracked


@contextlib.contextmanager
def seen_as_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` says yes to models, which then leave out what no graph can hold.

    torch's own code hears what is true: its optimisers would compute with tensors in place of numbers, and round
    otherwise than on one device. Its checkpoints hear that nothing is compiled: they compute again what they are told
    to, here and now, where they would leave that to a compiler. Its checks of all values in a tensor, as distributions
    make of their parameters, become asserts that run when the graph does. One thread at a time may be inside.
    """
    real, real_of_checkpoints = torch.compiler.is_compiling, checkpoint._is_compiling
    is_all_true = torch._is_all_true

    def is_compiling() -> bool:
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return real() if asked_by.partition(".")[0] == "torch" else True

    def checkpoints_are_compiling(*given: Any) -> bool:
        return False if threading.get_ident() == thread else real_of_checkpoints(*given)

    def asserted(x: torch.Tensor) -> Any:
        if threading.get_ident() != thread:
            return is_all_true(x)
        torch.ops.aten._assert_async.msg(x.all(), f"a value is not what {_checked_by()} allows")
        return True

    thread = threading.get_ident()
    torch.compiler.is_compiling, checkpoint._is_compiling = is_compiling, checkpoints_are_compiling
    torch._is_all_true = asserted
    try:
        yield
    finally:
        torch.compiler.is_compiling, checkpoint._is_compiling = real, real_of_checkpoints
        torch._is_all_true = is_all_true


def _checked_by() -> str:
    """The class whose method asks whether all is true, with the argument that it looks at where it is named."""
    names = sys._getframe(2).f_locals
    of = type(names["self"]).__name__ if "self" in names else "torch"
    return f"{of}({names['param']})" if "param" in names else of
