"""Plain tensors that meet DTensors: whose they are, and what then.

A plain tensor of the user is an error, for only the user knows whether it is the same on all ranks; inside
`implicit_replication` it is taken so. Those of one element are, as Python scalars are. But torch makes some, too:

    x[[1, 0]]                                                  of lists     `DTensor.__getitem__` makes DTensors of them
    F.scaled_dot_product_attention(q, k, v, is_causal=True)    in C++       inside of an op of `composites`
    F.embedding_bag(x, w), torch.masked.mean(x)                in Python    by torch's code, given no plain tensor

The first two cannot differ between ranks: an op that is given no plain tensor has only sizes and numbers to make one
of. torch's Python code may also draw random numbers; what it makes is compared between the ranks, and what differs is
an error. A backward pass takes what comes, for it is made of what the forward pass took.

What is asked is not who holds the tensor now, but what the user's call was given: where that was no plain tensor,
torch made this one itself. In C++ that is known where the op begins (`made_by_torch`), in Python from the frame of the
function of torch's that the user called.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F

from spmd import _torch
from spmd.comm import transport, wire
from spmd.mesh import DeviceMesh
from spmd.sim import LocalTensor
from spmd.sim.exchange import is_library
from spmd.tensor import explicit

_implicit = contextvars.ContextVar("spmd_implicit_replication", default=False)
_inside_torch = contextvars.ContextVar("spmd_inside_torch", default=False)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors that meet DTensors as replicated: they must be equal on all ranks.

    Without it a plain tensor with dims among DTensors is an error, since only the user knows whether it is the
    same everywhere. A backward pass takes what its forward pass took, inside the block or out of it.
    """
    token = _implicit.set(True)
    try:
        yield
    finally:
        _implicit.reset(token)


@contextlib.contextmanager
def made_by_torch() -> Iterator[None]:
    """Inside, plain tensors are made by an op of torch's, of sizes and numbers: the same on all ranks."""
    token = _inside_torch.set(True)
    try:
        yield
    finally:
        _inside_torch.reset(token)


def check(op: object, x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise RuntimeError for a plain tensor that must not be taken as replicated.

    Not TypeError: torch's operators turn that into "unsupported operand type(s)".
    """
    if x.numel() > 1 and not (x.is_meta or _may_pass() or _is_torchs(x, mesh)):
        raise _stranger(op, x)


def check_arguments(op: object, given: Any) -> None:
    """The same for all plain tensors that an op is given before it makes its own."""
    if not _may_pass():
        for x in _plain_tensors(given):
            raise _stranger(op, x)


def _may_pass() -> bool:
    return _implicit.get() or _inside_torch.get() or _torch.in_backward()


def _stranger(op: object, x: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{op}: a plain tensor of shape {list(x.shape)} met a DTensor. If it is the same on all ranks write "
        "distribute_tensor(t, mesh, [Replicate(), ...]) or run under spmd.implicit_replication(); if it is this "
        "rank's part write DTensor.from_local(t, mesh, placements)."
    )


# ---- tensors made by torch's Python code ------------------------------------------------------

OWN_ARGUMENTS: dict[CodeType, str] = {
    F.embedding_bag.__code__: "offsets",
    F.fractional_max_pool2d_with_indices.__code__: "_random_samples",
    F.fractional_max_pool3d_with_indices.__code__: "_random_samples",
}
"""Functions of torch that fill in an argument that they were not given, by the name of the argument. Where the user
gave it, it is compared between ranks like what torch fills in."""


def _is_torchs(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether torch's Python code made x, or forward differentiation, which has formulas in C++, alike on all ranks."""
    if _torch.is_tracing(x):
        return False
    called = _called_by_user(sys._getframe(1))
    given_none = called is not None and not any(True for _ in _plain_tensors(_given(called)))
    if not (given_none or _torch.in_forward_ad()):
        return False
    return are_same_everywhere([x], mesh)


def _called_by_user(frame: FrameType) -> FrameType | None:
    """The outermost of torch's Python functions around this code; None where the user calls the op itself."""
    found = None
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        found = frame
        frame = frame.f_back
    return found


def _given(frame: FrameType) -> list:
    """What a function was called with."""
    code = frame.f_code
    several = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + several]
    own = OWN_ARGUMENTS.get(code)
    return [frame.f_locals[name] for name in names if name != own and name in frame.f_locals]


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of more than one element in an argument: in lists, tuples and dicts, and in modules."""
    if isinstance(value, torch.Tensor):
        if not _torch.has_first(value) and not _torch.is_transformed(value) and value.numel() > 1:
            yield value
    elif isinstance(value, torch.nn.Module):
        for held in (*value.parameters(), *value.buffers()):
            yield from _plain_tensors(held)
    elif isinstance(value, (list, tuple, dict)):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _plain_tensors(inside)


# ---- lists as indices -------------------------------------------------------------------------


def with_lists(index: Any, replicated: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An index whose lists of numbers are tensors that are `replicated`: torch would make plain ones of them."""
    if type(index) is tuple:
        if any(type(i) in _LISTS for i in index):
            return tuple(_as_tensor(i, replicated) if type(i) in _LISTS else i for i in index)
        return index
    flat = type(index) in _LISTS and not any(isinstance(i, (list, tuple)) for i in index)
    return _as_tensor(index, replicated) if flat else index  # a list of lists torch reads as a tuple, for now


def _as_tensor(numbers: Any, replicated: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor of numbers that are alike on all ranks; what is no list of numbers as it is."""
    if not all(isinstance(n, (bool, int)) for n in _torch.pytree.tree_leaves(list(numbers))):
        return numbers
    return replicated(torch.tensor(numbers if type(numbers) is not range else list(numbers)))


_LISTS = (list, tuple, range)


# ---- the same on all ranks --------------------------------------------------------------------


def are_same_everywhere(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> bool:
    """Whether all ranks of the mesh have the same tensors. All must ask; they are compared at once."""
    shapes = ", ".join(str(list(x.shape)) for x in tensors)
    explicit.check_message(
        f"an op on a tensor of shape {shapes} from elsewhere", "compare it between ranks",
        "Take it as replicated with distribute_tensor, or with spmd.implicit_replication() where torch makes it.",
    )  # fmt: skip
    simulated = [x for x in tensors if isinstance(x, LocalTensor)]
    if simulated:
        return all(len({_digest([own]) for own in x.local.values()}) == 1 for x in simulated)
    return len(set(transport().gather_marks(_digest(tensors), mesh))) == 1


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{tuple(x.shape)} {x.dtype} ".encode() + wire.as_bytes(x.detach().cpu()).numpy().tobytes())
    return found.digest()
