"""What is known of the values of tensors of one number in a trace: counts of steps, flags, what follows from these.

    step.add(1).item() > 5      a condition on the count of steps, and no question that only the run can answer

A fake tensor has what is known of its value as `symbol`: a plain number, or what it is computed of. Results are rounded
as the dtype is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd._torch.computed import FUNCTIONS, Computed

aten = torch.ops.aten

_KNOWN = {torch.float64: float, torch.float32: float, torch.int64: int, torch.bool: bool}
"""The dtypes that what is computed is exact in, or is rounded to, with the type of their numbers."""

_READ = _KNOWN | {torch.float16: float, torch.bfloat16: float}
_READ |= dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32), int)
"""Those of which numbers are read, and compared with others of theirs."""

_EXACT_IN_ALL = range(128)
"""Whole numbers that all of these have."""


def note_value(out: Any, op: Any, args: tuple, kwargs: dict, leaves: list[Any]) -> None:
    """Note what is known of the result of an op. leaves: its operands."""
    if not isinstance(out, torch.Tensor) or out.ndim or out.dtype not in _READ:
        return
    if op in _FACTORIES:
        value = _operand(_FACTORIES[op](*args), out.dtype)
    elif op in _OPS and any(hasattr(x, "symbol") for x in leaves):
        value = _result(op, out, args, kwargs)
    else:
        return
    if value is not None:
        out.symbol = value


def _result(op: Any, out: torch.Tensor, args: tuple, kwargs: dict) -> Any:
    if kwargs.get("alpha", 1) != 1 or any(x.ndim for x in args if isinstance(x, torch.Tensor)):
        return None
    name = _OPS[op]
    computing = out.dtype if name not in _COMPARISONS else torch.result_type(*args[:2])
    if name in _TRUTHS:
        computing = torch.bool
    operands = [_operand(x, computing) for x in args if isinstance(x, (torch.Tensor, *_NUMBERS))]
    if None in operands or (out.dtype is torch.bool and name in _ARITHMETIC):
        return None
    if name in ("same", "truth"):
        return operands[0] if out.dtype is not torch.uint8 else _computed("pos", operands[0])  # a truth of bytes is one
    return as_dtype(_computed(name, *operands), out.dtype) if out.dtype in _KNOWN else None


def _operand(x: Any, dtype: torch.dtype) -> Any:
    """The value of an operand, as an op that computes in a dtype takes it; None where it is not known."""
    constant = getattr(x, "constant", None)
    if isinstance(constant, torch.Tensor) and not constant.ndim and not constant.is_complex():
        x = constant.item()
    if isinstance(x, torch.Tensor):
        value, kind = getattr(x, "symbol", None), _READ.get(x.dtype)
    elif isinstance(x, _SYMBOLS):
        value, kind = x.node.operand, x.node.pytype
    else:
        value, kind = x, type(x)
    if value is None or kind not in (bool, int, float):
        return None
    if getattr(x, "dtype", None) is dtype or (isinstance(value, (int, float)) and value in _EXACT_IN_ALL):
        return _READ[dtype](value) if isinstance(value, (int, float)) else value
    return None if dtype not in _KNOWN or (kind is float and dtype is torch.int64) else as_dtype(value, dtype)


_SYMBOLS = torch.SymInt, torch.SymFloat, torch.SymBool
_NUMBERS = (*_SYMBOLS, bool, int, float)


def as_dtype(x: Any, dtype: torch.dtype) -> Any:
    """A number as one of a dtype."""
    if dtype is torch.bool:
        return _computed("ne", x, 0)
    return _computed({torch.float32: "float32", torch.float64: "float", torch.int64: "pos"}[dtype], x)


def _computed(op: str, *args: Any) -> Any:
    plain = all(isinstance(x, (bool, int, float)) for x in args)
    return FUNCTIONS[op].run(*args) if plain else Computed(op, *args)


_TRUTHS = {"not", "truth"}
_ARITHMETIC = {"add", "sub", "mul", "neg"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}


def _ops() -> dict[Any, str]:
    """By op, the function that it computes with numbers; "same" where it gives its operand."""
    found = {aten.neg.default: "neg", aten.logical_not.default: "not"}
    found |= {getattr(aten, name).default: "same" for name in ("clone", "detach", "alias", "lift_fresh", "_to_copy")}
    found |= {aten.all.default: "truth", aten.any.default: "truth"}
    for kind in ("Tensor", "Scalar"):
        found |= {getattr(getattr(aten, name), kind): name for name in ("add", "sub", "mul", *_COMPARISONS)}
    return found


_OPS = _ops()
_FACTORIES: dict[Any, Callable] = {
    aten.ones.default: lambda size: 1, aten.zeros.default: lambda size: 0, aten.full.default: lambda size, value: value,
    aten.scalar_tensor.default: lambda value: value, aten.fill.Scalar: lambda x, value: value,
}  # fmt: skip
"""Ops that make a tensor of one number, with the number."""
