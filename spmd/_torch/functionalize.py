"""Python functionalisation, as in AOTAutograd: in-place writes and views under autograd become new values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses import functional_tensor

from spmd._torch.fakes import modes_aside
from spmd._torch.modes import no_function_modes
from spmd._torch.quick_views import are_sizes
from spmd._torch.size_nodes import elements_of

FunctionalTensor = functional_tensor.FunctionalTensor
FunctionalTensorMode = functional_tensor.FunctionalTensorMode


def to_functional(x: torch.Tensor) -> torch.Tensor:
    """x under functionalisation; a FunctionalTensorMode must be active."""
    return all_to_functional([x])[0]


def all_to_functional(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors under functionalisation; a FunctionalTensorMode must be active."""
    mode = functional_tensor._detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    # What torch does in a third of the time: no mode needs to hear of the questions after flags, sizes and devices.
    with no_function_modes():
        if mode is not None and not any([x.requires_grad for x in tensors]):
            with modes_aside(tensors):
                return [functional(torch._to_functional_tensor(x), mode) for x in tensors]
    return [FunctionalTensor.to_functional(x) for x in tensors]


def functional(elem: torch.Tensor, mode: FunctionalTensorMode) -> FunctionalTensor:
    """The functional tensor of what torch's C++ code has wrapped. To be called with `no_function_modes`, `modes_aside`.

    torch finds out how many bytes the memory of each has, in 100 us of questions if sizes are symbols. Here they are
    computed once for each layout. Sparse tensors, which have no strides, take torch's way, and so does inference mode,
    in which torch notes the memory of each.
    """
    if elem.layout is not torch.strided or torch.is_inference_mode_enabled():
        return FunctionalTensor(elem, mode)
    shape, stride, offset = elem.shape, elem.stride(), elem.storage_offset()
    bytes_of: dict[str, Any] = {}
    if not all([type(n) is int for n in (*shape, *stride, offset)]):
        if not are_sizes((*shape, *stride, offset)):
            return FunctionalTensor(elem, mode)
        bytes_of["storage_size"] = elements_of(shape, stride, offset) * elem.dtype.itemsize
    keys = FunctionalTensor._extra_dispatch_keys & torch._C._dispatch_keys(elem)
    made = torch.Tensor._make_wrapper_subclass(
        FunctionalTensor, shape, stride, offset, None, elem.dtype, elem.layout, elem.device, False, elem.requires_grad,
        None, False, False, keys, **bytes_of,
    )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(made)
    made.elem = elem
    return made


def same_value(x: torch.Tensor) -> torch.Tensor:
    """Another functional tensor for the value of x, without autograd: a write into the one is one into the other."""
    mode = functional_tensor._detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    with no_function_modes(), modes_aside([x]), torch.no_grad():
        return functional(x.elem, mode)


def as_parameter(x: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A new functional tensor as an nn.Parameter, without a view of it, which a trace would record."""
    x.requires_grad_(requires_grad)._is_param = True
    return x


def from_functional(x: torch.Tensor) -> torch.Tensor:
    """The present value of a functional tensor, after all writes to it and its views."""
    elem = x.elem
    mode = _set_aside(_FUNCTIONAL)  # it would take the views that are made anew for code of the step
    try:
        torch._functionalize_sync(elem)
    finally:
        if mode is not None:
            _put_back(mode)
    return torch._from_functional_tensor(elem)


_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL
_set_aside, _put_back = torch._C._unset_dispatch_mode, torch._C._set_dispatch_mode


def memory_shown(x: torch.Tensor) -> tuple:
    """Which memory a functional tensor shows, and how: equal for tensors of which each shows all writes to another."""
    layout = (*map(str, x.shape), *map(str, x.stride()), str(x.storage_offset()))
    return x.elem.untyped_storage()._cdata, layout, x.dtype, x.is_conj(), x.is_neg()


def write_functional(x: torch.Tensor, value: torch.Tensor) -> None:
    """Let a functional tensor have this value, as after a write in place; tensors that share its memory see it."""
    with torch.no_grad():
        torch._functionalize_replace(x.elem, value)
        torch._functionalize_commit_update(x.elem)
        torch._functionalize_sync(x.elem)


def functional_mode_of(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """The mode in which ops on x may run, where x is a functional tensor that was left by its mode."""
    return FunctionalTensorMode() if isinstance(x, FunctionalTensor) else contextlib.nullcontext()


@contextlib.contextmanager
def assignable_data() -> Iterator[None]:
    """Inside, `x.data = y` lets a functional tensor show the memory of y, which it otherwise would not notice.

    Views of x keep the old value of x, and writes into y are seen in x, as in torch.
    """

    def write(x: torch.Tensor, y: torch.Tensor) -> None:
        if x.shape != y.shape or x.dtype != y.dtype:
            raise RuntimeError(
                f"x.data = y changes a {x.dtype} tensor of {list(x.shape)} to {y.dtype} {list(y.shape)}, which a "
                "compiled step cannot; do it outside the step"
            )
        same = isinstance(y, FunctionalTensor) and x.stride() == y.stride()
        with torch.no_grad():
            x.elem = (y if same else torch.empty_like(x).copy_(y)).elem

    FunctionalTensor.data = property(torch.Tensor.data.__get__, write)
    try:
        yield
    finally:
        del FunctionalTensor.data


@contextlib.contextmanager
def copied_deeply() -> Iterator[None]:
    """Inside, `copy.deepcopy` of a functional tensor, as of a model that a step trains for a while, is a clone, a leaf
    with memory of its own. Torch asks for the memory of what it copies."""

    def copied(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not x.is_leaf:
            return torch.Tensor.__deepcopy__(x, memo)  # which says why it does not
        if id(x) not in memo:
            with torch.no_grad():
                new = x.detach().clone()
            if isinstance(x, torch.nn.Parameter):
                new = as_parameter(new, x.requires_grad)
            memo[id(x)] = new.requires_grad_(x.requires_grad)
        return memo[id(x)]

    FunctionalTensor.__deepcopy__ = copied
    try:
        yield
    finally:
        del FunctionalTensor.__deepcopy__


@contextlib.contextmanager
def gradients_seen(
    before_read: Callable[[torch.Tensor], None], after_write: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Inside, these functions hear of Python code that reads or writes `x.grad` of a functional tensor."""
    grad = torch.Tensor.grad

    def read(x: torch.Tensor) -> torch.Tensor | None:
        before_read(x)
        return grad.__get__(x)

    def write(x: torch.Tensor, new: torch.Tensor | None) -> None:
        grad.__set__(x, new)
        after_write(x)

    FunctionalTensor.grad = property(read, write, grad.__delete__)
    try:
        yield
    finally:
        del FunctionalTensor.grad
