"""A dispatch key above autograd, by which spmd sees composite ops before torch decomposes them.

Tensors that carry FIRST_KEYS have the functions given to `run_first` run for their ops before all else. Such a
function runs the op `undecomposed`, with the derivative that torch has for it as one op, or `decomposed`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmd._torch.autograd import in_forward_ad
from spmd._torch.ops import OpOverload

# The name of a dispatch key above all of torch's own that see a tensor, and which no kernel of torch uses.
_FIRST = "TESTING_ONLY_GenericWrapper"

# The keys that tensors carry whose ops `run_first` may take.
FIRST_KEYS = next(
    keys for keys in (torch._C.DispatchKeySet.from_raw_repr(1 << bit) for bit in range(62)) if _FIRST in str(keys)
)


def has_first(x: torch.Tensor) -> bool:
    """Whether the tensor carries FIRST_KEYS."""
    return bool(torch._C._dispatch_keys(x).raw_repr() & FIRST_KEYS.raw_repr())


def without_first() -> contextlib.AbstractContextManager:
    """Inside, FIRST_KEYS are ignored: ops are dispatched as on tensors without them."""
    return torch._C._ExcludeDispatchKeyGuard(FIRST_KEYS)


_first = torch.library.Library("aten", "IMPL")
_any_other = torch.library.Library("_", "IMPL")
_any_other.fallback(torch.library.fallthrough_kernel, _FIRST)


def run_first(functions: Mapping[Any, Callable]) -> None:
    """On tensors with FIRST_KEYS run these functions for these aten ops, before autograd and all else."""
    for op, function in functions.items():
        _first.impl(f"{op._schema.name}.{op._overloadname}".removesuffix(".default"), function, _FIRST)


_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def undecomposed(op: OpOverload) -> Callable:
    """A function, for `run_first`, that runs a composite op with the derivative that torch has for it as one op.

    torch decomposes such an op above autograd for all tensors but nested ones. Autograd sees the op of nested tensors
    whole, and the kernel for them works for others too. An op that autograd must not see, inside a dispatch or in
    inference mode, is not decomposed either. The op is decomposed as always where more than autograd sees it
    (functorch, forward AD, autocast), and for complex numbers, which the derivatives of some ops do not support.
    """

    def run(x: torch.Tensor, *rest: Any) -> Any:
        keys = None if x.is_complex() or is_seen_by_more(x) else _KEYS_OF_WHOLE_OPS.get(x.device.type)
        if keys is None:
            with without_first():
                return op(x, *rest)
        return op.redispatch(keys[_is_excluded(_AUTOGRAD)], x, *rest)

    return run


def kept_whole(op: OpOverload) -> Callable:
    """A function that runs a composite op as one op, which autograd does not see."""

    def run(x: torch.Tensor, *rest: Any) -> Any:
        return op.redispatch(_KEYS_OF_WHOLE_OPS[x.device.type][True], x, *rest)

    return run


def decomposed(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op, in a function of `run_first`: its parts are ops that may be run first in their turn."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):  # which may cast for the op itself
        with without_first():
            return op(*args, **kwargs)
    return op.decompose(*args, **kwargs)


def is_autocast_on(device_type: str) -> bool:
    """Whether autocast casts on such devices; torch raises for those it does not know, such as "meta"."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def is_seen_by_more(x: torch.Tensor) -> bool:
    """Whether more than autograd sees ops on x: transforms of torch.func, forward-mode AD, autocast."""
    return (
        torch._C._are_functorch_transforms_active() or in_forward_ad() or is_autocast_on(x.device.type)
    )


def _keys(*names: str) -> torch._C.DispatchKeySet:
    sets = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    return functools.reduce(lambda a, b: a | b, sets)


# PythonTLSSnapshot keeps the modes of the calling thread; without it torch 2.11 does not call Python further down.
_PYTHON = ("Python",) if torch.__version__ >= (2, 13) else ("Python", "PythonTLSSnapshot")
_BITS = _keys("Conjugate", "Negative", "ZeroTensor")


def run_with_bits(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call the function inside of a `__torch_dispatch__`, with the bits of tensors heeded (`without_bits`).

    torch excludes the keys of these bits there. A kernel that conjugates a tensor on its way, as that of `linalg.pinv`
    does, would go on without the conjugate.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _BITS):
        return function(*args, **kwargs)


# By device: the keys that are left for an op that is not decomposed, and for one that autograd must not see.
_KEYS_OF_WHOLE_OPS = {
    device: (_keys(name, *_PYTHON, "AutogradNestedTensor"), _keys(name, *_PYTHON))
    for device, name in (("cpu", "CPU"), ("cuda", "CUDA"), ("meta", "Meta"))
}
