"""What autograd is doing in this thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# Inside, ops skip autograd: cheaper than no_grad where an op's gradient is written in Python, as collectives' are.
below_autograd = torch._C._AutoDispatchBelowAutograd


def in_backward() -> bool:
    """Whether this thread is in a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def is_called_by_engine(frame: types.FrameType) -> bool:
    """Whether the frame, which has called an op, is of the engine, and not of Python code that the engine runs."""
    while frame.f_code.co_filename.endswith(_OF_DYNAMO) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is _RUN_BACKWARD


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_OF_DYNAMO = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""What torch puts around each mode."""


def backward_number() -> int:
    """The number of the backward pass that this thread is in: one that is started within another has its own."""
    return torch._C._current_graph_task_id()


class LeafNodes(list):
    """The nodes of autograd that add to gradients of leaves. A copy has none: they belong to these tensors."""

    def __init__(self, leaves: Iterable[torch.Tensor] = ()):
        super().__init__(torch.autograd.graph.get_gradient_edge(x).node for x in leaves)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return LeafNodes, ()


def adds_to_leaf(node: Any) -> bool:
    """Whether the backward pass that this thread is in runs the node of a leaf. GradIsAsked where it gives back its
    gradient instead, as `torch.autograd.grad` does."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        raise GradIsAsked from error


class GradIsAsked(Exception):
    """The gradient of a leaf is given to who asked for it, and not added to what the leaf has."""


def after_backward(run: Callable[[], None]) -> None:
    """Call `run` when the backward pass that this thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(run)


def in_forward_ad() -> bool:
    """Whether a level of forward-mode AD is open, in this process, so that tensors may have tangents."""
    return torch.autograd.forward_ad._current_level >= 0


# Whether a tensor is one of autograd's zeros without memory, which no kernel can read: the tangent of a tensor that
# has none.
is_zero_without_memory = torch.Tensor._is_zerotensor


_can_forget = hasattr(torch._C, "_remove_obj_from_tls")  # since torch 2.13
_steals = torch.__version__ < (2, 12)  # torch 2.11 keeps an object without a reference of its own, and gives one back


def stash(key: str, value: Any) -> None:
    """Keep a value for this thread, and for the threads in which autograd runs the backward passes it starts."""
    if value is not None or not _can_forget:
        if _steals:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        torch._C._stash_obj_in_tls(key, value)
    elif torch._C._is_key_in_tls(key):
        torch._C._remove_obj_from_tls(key)


def stashed(key: str) -> Any:
    """The value that `stash` kept under the key; None where there is none."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def last_node_number() -> int:
    """The number of the node that autograd made last in this thread: inside a mode, that of the op being run."""
    return torch.autograd._get_sequence_nr() - 1


def running_node_number() -> int | None:
    """The number of the node whose backward runs in this thread; None outside a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def saved_tensors_are_hooked() -> bool:
    """Whether hooks get what autograd saves in this thread, such as those of an activation checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def leaves_behind(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a backward pass from x would add gradients to."""
    variables = (getattr(node, "variable", None) for node in _nodes_behind([x]))
    return [x for x in variables if x is not None]


def has_custom_functions(several: list[torch.Tensor]) -> bool:
    """Whether a backward pass from these runs a function of the user's (`torch.autograd.Function`)."""
    found = [type(n) for n in _nodes_behind(several) if isinstance(n, torch.autograd.function.BackwardCFunction)]
    return any(kind._forward_cls.__module__.partition(".")[0] not in ("torch", "spmd") for kind in found)


def _nodes_behind(several: list[torch.Tensor]) -> list[Any]:
    """The nodes of autograd's graph that a backward pass from these goes through."""
    found, left = {}, [x.grad_fn for x in several]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = None
            left += [following for following, _ in node.next_functions]
    return list(found)


@contextlib.contextmanager
def backward_under(mode: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Inside, backward passes that this thread starts run under such a mode, of torch functions.

    torch calls `backward` and `grad` with the modes of torch functions off. So the modes would not see the code of
    the user that a backward pass runs - a checkpoint that is computed again - as they saw it in the forward pass. One
    thread may be inside at a time.
    """
    run, thread = torch.autograd._engine_run_backward, threading.get_ident()

    def under(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        with mode():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = under
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run
