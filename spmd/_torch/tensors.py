"""Tensor subclasses, and what a tensor is to torch: its memory, a wrapper of a transform."""

from __future__ import annotations

import sys

import torch

from spmd._torch.functionalize import FunctionalTensor

# For subclasses that take part in dispatch only, not in __torch_function__.
disabled_torch_function = torch._C._disabled_torch_function_impl

# Inside, attributes of tensors of a subclass are read without asking the subclass, as if it had the line above.
without_torch_function = torch._C.DisableTorchFunctionSubclass

# A tensor of a subclass, with a shape and no data: wrapper_tensor without its conveniences.
new_wrapper = torch.Tensor._make_wrapper_subclass

NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


def wrapper_tensor(
    cls: type, like: torch.Tensor, shape, stride, requires_grad: bool, dtype: torch.dtype | None = None, keys=None
) -> torch.Tensor:
    """A tensor of the subclass with this shape and no data, of the device of `like` and, by default, of its dtype."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype or like.dtype, device=like.device, layout=like.layout,
        requires_grad=requires_grad, _extra_dispatch_keys=keys or NO_KEYS,
    )  # fmt: skip


def memory_of(x: torch.Tensor) -> int | None:
    """The same for two tensors alive that share memory, fake ones too; None for a tensor without memory of its own."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def tensors_on(x: torch.Tensor) -> int:
    """How many tensors show the memory of x, itself included."""
    alone = torch.empty(1)
    mine, its = x.untyped_storage(), alone.untyped_storage()
    return 1 + torch._C._storage_Use_Count(mine._cdata) - torch._C._storage_Use_Count(its._cdata)


def is_loading_before_reading() -> bool:
    """Whether torch.load reads a file of the format before torch 1.6: it makes all tensors first, then reads them."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.serialization._legacy_load.__code__:
        frame = frame.f_back
    return frame is not None


def without_bits(x: torch.Tensor) -> torch.Tensor:
    """x itself; a copy if it has a bit that says how to read its memory: as conjugated, as negated, as all zeros.

    torch heeds these bits above `__torch_dispatch__`. A kernel that is called below it reads the bare memory.
    """
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def copy_bits(source: torch.Tensor, wrapper: torch.Tensor) -> None:
    """Give a wrapper the bits of the tensor that it wraps, so that torch heeds them before it calls the subclass."""
    if source.is_conj():
        torch._C._set_conj(wrapper, True)
    if source.is_neg():
        torch._C._set_neg(wrapper, True)


# Whether x is the wrapper that a transform of torch.func shows in the place of a tensor.
is_functorch_wrapper = torch._C._functorch.is_functorch_wrapped_tensor


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """The tensor inside of all wrappers of torch.func around x."""
    while is_functorch_wrapper(x) and not torch._is_functional_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_transformed(x: torch.Tensor) -> bool:
    """Whether x is a wrapper of torch.func or of functionalisation, whose memory is not what in-place ops write."""
    return isinstance(x, FunctionalTensor) or torch._is_functional_tensor(x) or is_functorch_wrapper(x)


LOADS_STATE = torch.nn.Module._load_from_state_dict.__code__
"""The code that copies the tensors of a state dict into a module's own."""
