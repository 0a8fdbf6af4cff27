"""Plain tensors in ops on DTensors: who made them, and whether they are allowed.

    x + torch.ones(8, 16)      RuntimeError: the user made it, and may have another tensor on another rank
    x + torch.tensor(2.0)      allowed: a tensor of one element is treated as a Python number

A plain tensor of the user is an error, because only the user knows whether it is the same on all ranks. Inside
`implicit_replication` it is taken as replicated. But torch makes plain tensors, too:

    x[[1, 0]]                                                  of lists     `DTensor.__getitem__` makes DTensors of them
    F.scaled_dot_product_attention(q, k, v, is_causal=True)    in C++       inside of an op of `composites`
    F.embedding_bag(x, w), torch.masked.mean(x)                in Python    by torch's code, given no plain tensor

The first two cannot differ between ranks: an op without plain arguments makes its tensors from sizes and numbers
only. torch's Python code may also draw random numbers. So its tensors are compared between the ranks, and it is an
error if they differ. The same is true of other libraries, of which the user called one with DTensors alone:
`model.generate(ids)` of transformers makes tensors of sizes. A backward pass allows all plain tensors, because it is
computed from those that the forward pass allowed.

`model.load_state_dict` takes plain tensors as global ones, and compares them between the ranks.

Models make tensors themselves - positions, masks, tables of angles - beside what they are given. Inside of
`ComparedReplication` they are taken as replicated, and compared: in the calls 1, 2, 4, 8, ... of the model, each once.

The question is not who holds the tensor now, but which arguments the user's call had. If none of them was a plain
tensor, torch, or the library, made this one itself. For C++ that is known where the op begins (`made_by_torch`); for
Python it is read from the frame of the function of torch that the user called.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F

from spmd import _torch
from spmd.comm import transport
from spmd.comm.user_line import is_library
from spmd.mesh import DeviceMesh
from spmd.sim import LocalTensor
from spmd.sim.local_mode import BETWEEN_USER_AND_TORCH
from spmd.tensor.modes import explicit
from spmd.tensor.redistribute.replicas import digest

_implicit = _torch.Carried("spmd_implicit_replication", False)
_inside_torch = contextvars.ContextVar("spmd_inside_torch", default=False)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors among DTensors as replicated: they must be equal on all ranks.

    Without it a plain tensor with dims among DTensors is an error, since only the user knows whether it is the
    same on all ranks. A backward pass allows the tensors that its forward pass allowed, inside the block or outside.
    """
    token = _implicit.set(True)
    try:
        yield
    finally:
        _implicit.reset(token)


@contextlib.contextmanager
def made_by_torch() -> Iterator[None]:
    """Inside, an op of torch makes plain tensors from sizes and numbers: they are the same on all ranks."""
    token = _inside_torch.set(True)
    try:
        yield
    finally:
        _inside_torch.reset(token)


class ComparedReplication:
    """Plain tensors among DTensors are replicated, by a rule that is checked: they are compared between the ranks.

    One object for each model, which is entered around each of its calls. In the calls 1, 2, 4, 8, ... every tensor that
    meets a DTensor is compared the first time; RuntimeError on all ranks where one differs. All ranks call the
    model as often, so all compare the same.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._entered: list[contextvars.Token] = []
        self._seen: dict[int, torch.Tensor] = {}

    def __enter__(self) -> ComparedReplication:
        if not self._entered:
            self._calls += 1
        self._entered.append(_compared.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _compared.reset(self._entered.pop())
        if not self._entered:
            self._seen.clear()

    def __deepcopy__(self, memo: dict) -> ComparedReplication:
        return ComparedReplication()

    def require(self, op: object, x: torch.Tensor, mesh: DeviceMesh) -> None:
        """RuntimeError if x differs between the ranks of the mesh."""
        is_due = self._calls & (self._calls - 1) == 0
        if not is_due or id(x) in self._seen or _torch.is_tracing(x):
            return
        self._seen[id(x)] = x  # kept, so that its id stays its own
        if not are_same_everywhere([x.detach()], mesh):
            raise RuntimeError(
                f"{op}: a plain tensor of shape {list(x.shape)} met a DTensor in a parallel model, where it has to be "
                "the same on all ranks, and is not. Make it the same, or if it is this rank's part write "
                "DTensor.from_local(t, mesh, placements)."
            )


_compared: contextvars.ContextVar[ComparedReplication | None] = contextvars.ContextVar("spmd_compared", default=None)


def check(op: object, x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise RuntimeError for a plain tensor that must not be taken as replicated.

    Not TypeError: torch's operators turn that into "unsupported operand type(s)".
    """
    if x.numel() <= 1 or x.is_meta or _are_allowed():
        return
    compared = _compared.get()
    if compared is not None:
        compared.require(op, x, mesh)
    elif not (_is_being_loaded(x, mesh) or _was_made_by_torch(x, mesh)):
        raise _plain_tensor_error(op, x)


def check_arguments(op: object, given: Any) -> None:
    """The same for all plain tensors among the arguments of an op, which later makes its own."""
    for x in _plain_tensors(given) if not _are_allowed() else ():
        compared = _compared.get()
        if compared is None:
            raise _plain_tensor_error(op, x)
        mesh = next(y._spec.mesh for y in _torch.pytree.tree_leaves(given) if hasattr(y, "_spec"))
        compared.require(op, x, mesh)


def _are_allowed() -> bool:
    """Whether all plain tensors are allowed here."""
    return _implicit.get() or _inside_torch.get() or _torch.in_backward()


def _plain_tensor_error(op: object, x: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{op}: a plain tensor of shape {list(x.shape)} met a DTensor. If it is the same on all ranks write "
        "distribute_tensor(t, mesh, [Replicate(), ...]) or run under spmd.implicit_replication(); if it is this "
        "rank's part write DTensor.from_local(t, mesh, placements)." + _foreign_caller()
    )


def _foreign_caller() -> str:
    """What to use instead, where a function of torch.distributed goes through a model of DTensors."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("torch.distributed.fsdp.", "torch.distributed.tensor.")):
            return (
                f" {name} takes models of plain tensors; those of spmd are sharded by spmd.distribute_module, "
                "redistribute or spmd.compile."
            )
        frame = frame.f_back
    return ""


# ---- tensors made by torch's Python code ------------------------------------------------------

OWN_ARGUMENTS: dict[CodeType, str] = {
    F.embedding_bag.__code__: "offsets",
    F.fractional_max_pool2d_with_indices.__code__: "_random_samples",
    F.fractional_max_pool3d_with_indices.__code__: "_random_samples",
}
"""Functions of torch that make one of their arguments if it is not given, and the name of that argument. An argument
of that name that the user gave is compared between ranks too, as if torch had made it."""


def _was_made_by_torch(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether x is the same on all ranks, and torch's Python code made it, or a C++ formula of forward-mode AD."""
    if _torch.is_tracing(x):
        return False
    if not (_torch.in_forward_ad() or any(map(_has_no_plain_argument, _called_functions(sys._getframe(1))))):
        return False
    return are_same_everywhere([x], mesh)


def _is_being_loaded(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether load_state_dict of a module reads x into a parameter or buffer: then it is a global tensor.

    RuntimeError on all ranks if they load different tensors.
    """
    frame = sys._getframe(1)
    while frame.f_code is not _torch.LOADS_STATE:
        if frame.f_back is None or not is_library(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    if not are_same_everywhere([x], mesh):
        raise RuntimeError(
            f"a plain tensor of shape {list(x.shape)} is not the same on all ranks; load the global tensors on every "
            "rank, or DTensors"
        )
    return True


def _called_functions(frame: FrameType) -> list[FrameType]:
    """The frames of the function of torch, and of the installed library, that the user called, where there are any."""
    found = []
    for is_its_file in (is_library, _is_installed):
        outermost = None
        while frame.f_back is not None and is_its_file(frame.f_code.co_filename):
            if frame.f_code not in BETWEEN_USER_AND_TORCH:  # these are called for functions in C++, too
                outermost = frame
            frame = frame.f_back
        if outermost is not None:
            found.append(outermost)
    return found


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    """Whether a file is of a package that was installed, or of torch or spmd."""
    return "/site-packages/" in file or "/dist-packages/" in file or is_library(file)


def _has_no_plain_argument(called: FrameType) -> bool:
    return not any(True for _ in _plain_tensors(_arguments_of(called)))


def _arguments_of(frame: FrameType) -> list:
    """The arguments that the function of a frame was called with."""
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


def lists_to_tensors(index: Any, replicated: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The index with `replicated` tensors in place of lists of numbers. torch would make plain tensors of the lists."""
    if type(index) is tuple:
        if any(type(i) in _LISTS for i in index):
            return tuple(_as_tensor(i, replicated) if type(i) in _LISTS else i for i in index)
        return index
    flat = type(index) in _LISTS and not any(isinstance(i, (list, tuple)) for i in index)
    return _as_tensor(index, replicated) if flat else index  # torch still reads a list of lists as a tuple


def _as_tensor(numbers: Any, replicated: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A replicated tensor of a list of numbers; anything else as it is."""
    if not all(isinstance(n, (bool, int)) for n in _torch.pytree.tree_leaves(list(numbers))):
        return numbers
    return replicated(torch.tensor(numbers if type(numbers) is not range else list(numbers)))


_LISTS = (list, tuple, range)


# ---- comparing ranks --------------------------------------------------------------------------


def are_same_everywhere(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> bool:
    """Whether all ranks of the mesh have the same tensors. All ranks must ask. One exchange compares all tensors."""
    shapes = ", ".join(str(list(x.shape)) for x in tensors)
    explicit.check_message(
        f"an op on a tensor of shape {shapes} from elsewhere", "compare it between ranks",
        "Take it as replicated with distribute_tensor, or with spmd.implicit_replication() where torch makes it.",
    )  # fmt: skip
    simulated = [x for x in tensors if isinstance(x, LocalTensor)]
    if simulated:
        return all(len({digest(own) for own in x.local.values()}) == 1 for x in simulated)
    return len(set(transport().gather_bytes(digest(*tensors), mesh))) == 1
