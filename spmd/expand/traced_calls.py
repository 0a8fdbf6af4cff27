"""Calls of torch that a trace takes apart, or makes of symbols.

    torch.as_tensor(lr / (1 + decay * step))      one number, as ASGD keeps it: an op of the program
    torch._fused_adamw_(ps, ..., lr=lr)           the arithmetic of the step, for each parameter
    torch.lstm(x, ...)                            its products and gates, of any batch size
    tokens.chunk(4)                               four slices of one length

Of a symbol torch would ask for the value, and freeze it. For recurrent layers torch may have one kernel of the machine,
with memory of its own that no other op can read. Parts of a batch have sizes that differ as symbols, the last one's
being what is left; where they are equal here, they are made equal symbols, so that what is computed with one part is
seen to be what is computed with the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmd import _torch
from spmd.expand import fourier, losses, masked, symbolic_sizes, value_sizes
from spmd.expand.caught import Caught
from spmd.expand.constrained_writes import ConstrainedWrites
from spmd.expand.told import FrozenValue, find_told
from spmd.expand.traced_ops import Normalise
from spmd.expand.value_places import ValuePlaces

aten = torch.ops.aten


class TracedCalls(TorchFunctionMode):
    """Inside, `torch.tensor`, `torch.as_tensor` and fused updates take symbols, recurrent layers are made of many ops,
    equal parts of a batch have one size, and places in tensors may be values of others. writes: as of
    `ValuePlaces`. layouts: what asks how tensors lie in memory (`spmd.expand.layouts.asked_for`). caught: notes
    errors."""

    def __init__(
        self, writes: ConstrainedWrites, layouts: Mapping[Callable, Callable], caught: Caught
    ) -> None:  # fmt: skip
        super().__init__()
        self._caught = caught
        self._known = _by_function(
            ValuePlaces(writes).functions, value_sizes.FUNCTIONS, symbolic_sizes.FUNCTIONS, fourier.FUNCTIONS,
            losses.FUNCTIONS, _PARTS, layouts,
        )  # fmt: skip

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            if self._caught.watches:
                return self._caught.pass_on(self._pass_on, function, args, kwargs)
            return self._pass_on(function, args, kwargs)
        except Exception as error:
            if (real := self._caught.noted(error, function, args, kwargs)) is not error:
                raise real from None
            raise

    def _pass_on(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function in RECURRENT:
            with _without_kernels_of_the_machine(), _torch.recurrent_in_python():
                return function(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor) and args:
            if (told := find_told(args[0])) is not None:
                raise FrozenValue(told._what)
            if _has_symbol(args[0]):
                return _tensor(args[0], **_options(**kwargs))
        if function in masked.FUNCTIONS and (out := masked.FUNCTIONS[function](*args)) is not NotImplemented:
            return out
        for known in self._known.get(function, ()):
            if (out := known(*args, **kwargs)) is not NotImplemented:
                return out
        if function in _torch.FUSED_STEPS and _has_symbol([*kwargs.values()]):
            return Normalise.table[_torch.FUSED_STEPS[function]](*args, **kwargs)
        return function(*args, **kwargs)


def _by_function(*tables: Mapping[Callable, Callable]) -> dict[Callable, list[Callable]]:
    """For each function those that are asked before it, in order. They give NotImplemented where it is to do it."""
    found: dict[Callable, list[Callable]] = {}
    for table in tables:
        for function, known in table.items():
            found.setdefault(function, []).append(known)
    return found


RECURRENT = {
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell,
    torch.rnn_relu_cell,
}  # fmt: skip
"""The functions of recurrent layers. Their code in C++ cuts gates by `unsafe_chunk`, which there makes numbers of all
sizes; torch has both in Python, too."""


@contextlib.contextmanager
def _without_kernels_of_the_machine() -> Iterator[None]:
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def _has_symbol(data: Any) -> bool:
    return any(map(_has_symbol, data)) if isinstance(data, (list, tuple)) else _torch.is_symbol(data)


def _options(dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any) -> dict[str, Any]:
    if requires_grad:
        raise NotImplementedError("torch.tensor(..., requires_grad=True) of a number that the step computes")
    return {"dtype": dtype, "device": device}


def _tensor(data: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_tensor(x, dtype, device) for x in data])
    if dtype is None:
        dtype = torch.get_default_dtype() if isinstance(data, (float, torch.SymFloat)) else torch.int64
    return aten.scalar_tensor.default(data, dtype=dtype, device=device)


# ---- parts of a batch -------------------------------------------------------------------------


def _chunks(input: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """What `chunk` gives where the size is a symbol: slices of one length, and a shorter last one, if there is a rest.

    A split is one op, whose parts stay together where the dim is sharded; slices go where their rows are.
    """
    if not isinstance(chunks, (int, torch.SymInt)) or not _is_cut(input, dim, count := int(chunks)):
        return NotImplemented
    size = input.shape[dim]
    if _torch.number_now(size) % count == 0:
        return _parts(input, dim, size // count, count) if size % count == 0 else NotImplemented
    length = (size + count - 1) // count
    found = int((size + length - 1) // length)
    rest = size - (found - 1) * length
    return *_parts(input, dim, length, found - 1), input.narrow(dim, (found - 1) * length, rest)


def _sections(input: torch.Tensor, indices_or_sections: Any, dim: int = 0) -> Any:
    """What `tensor_split` gives where the size is a symbol that is divisible; torch makes slices of all else."""
    count = indices_or_sections
    if not isinstance(count, (int, torch.SymInt)) or not _is_cut(input, dim, count := int(count)):
        return NotImplemented
    size = input.shape[dim]
    divides = _torch.number_now(size) % count == 0 and size % count == 0
    return _parts(input, dim, size // count, count) if divides else NotImplemented


def _pieces(tensor: torch.Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    """What `split` gives where the length of a part is a symbol, too, and divides the size."""
    length = split_size_or_sections
    if not isinstance(length, torch.SymInt) or _torch.number_now(length) < 1:
        return NotImplemented
    count, rest = divmod(_torch.number_now(tensor.shape[dim]), _torch.number_now(length))
    if rest or not _is_cut(tensor, dim, count):
        return NotImplemented
    size = tensor.shape[dim]
    fits = size % count == 0 and length == size // count
    return _parts(tensor, dim, size // count, count) if fits else NotImplemented


def _is_cut(x: torch.Tensor, dim: Any, count: int) -> bool:
    """Whether a dim is a symbol, and so long now that it has so many parts.

    Parts of what has gradients are left as they are: the gradient of a split is one op.
    """
    if type(dim) is not int or x.requires_grad or not -x.ndim <= dim < x.ndim or count < 2:
        return False
    return isinstance(x.shape[dim], torch.SymInt) and _torch.number_now(x.shape[dim]) >= count


def _parts(x: torch.Tensor, dim: int, length: Any, count: int) -> tuple[torch.Tensor, ...]:
    return tuple([x.narrow(dim, i * length, length) for i in range(count)])


_PARTS = dict.fromkeys((torch.chunk, torch.Tensor.chunk), _chunks)
_PARTS |= dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), _sections)
_PARTS |= dict.fromkeys((torch.split, torch.Tensor.split), _pieces)
"""From a function to one of the same arguments, which returns NotImplemented where torch is to do it."""
