"""`x[mask]` in a trace: all of x, with a mask that says which rows count.

    loss[mask].mean()                       where(mask, loss, 0).sum() / mask.sum()
    x[mask] = y[mask]; x[mask] *= 0.5       x = where(mask, y, x); x = where(mask, x * 0.5, x)
    F.cross_entropy(out[mask], y[mask])     where the mask is False, the target is ignore_index
    head(h[mask])                           of all rows

On one device `x[mask]` has a size that values decide, and a program has one size for each tensor. So it stays a
`Masked` until something is done with it that has a size: a sum, a mean, a loss, a write under the same mask. What it
cannot do is an error that names the line. Rows that do not count hold ones, so that nothing infinite comes of them, and
no gradient goes back through them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from spmd import _torch
from spmd.expand.user_code import at_user_line, current_frames
from spmd.expand.value_sizes import advice, of_unknown_size

OF_ELEMENTS = frozenset(
    "abs add bool clamp clamp_max clamp_min clip clone detach div double eq exp expm1 float floor floor_divide ge gt "
    "isfinite isnan le log log1p logical_and logical_not logical_or long lt maximum minimum mul ne neg pow relu round "
    "rsqrt sigmoid sign sqrt square sub tanh to true_divide".split()
)
"""Methods of tensors, and functions of torch, of each element."""

ALONG = frozenset("argmax argmin log_softmax logsumexp softmax".split())
"""Functions of torch along a dim."""

OF_ROWS = frozenset({F.linear, F.gelu, F.silu, F.relu, F.elu, F.leaky_relu, F.softplus, F.layer_norm})
"""Functions of each row, whose other arguments all rows share."""

LOSSES = frozenset({
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
})  # fmt: skip
"""Losses of each element."""

OPERATORS = "add sub mul truediv floordiv mod pow eq ne lt le gt ge and or xor".split()
MIRRORED = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
"""What torch calls an operator whose second operand alone is masked."""


class Masked:
    """rows: [*mask, *rest], of which those count where the mask is true. On one device it is [count, *rest]. made: at
    which line, for errors."""

    __slots__ = "made", "mask", "rows"

    def __init__(self, rows: torch.Tensor, mask: torch.Tensor, made: str) -> None:
        self.rows, self.mask, self.made = rows, mask, made

    @property
    def ndim(self) -> int:
        return 1 + self.rows.ndim - self.mask.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def counted(self, empty: Any = 0) -> torch.Tensor:
        """All rows, with this value in those that do not count."""
        return self.rows.masked_fill(~_beside(self.mask, self.rows), empty)

    def map(self, function: Callable, *args: Any, **kwargs: Any) -> Masked:
        """A function of each element, or of what is in a row. args: numbers, what all rows share, or as many rows."""
        given, named = [self._operand(x) for x in args], {k: self._operand(x) for k, x in kwargs.items()}
        return Masked(function(self.rows, *given, **named), self.mask, self.made)

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Masked):
            return x.rows if x.mask is self.mask and x.ndim == self.ndim else refuse()
        return refuse() if isinstance(x, torch.Tensor) and x.ndim >= self.ndim else x

    def sum(self, dim: int | None = None, **kwargs: Any) -> Any:
        """The sum of all that counts, over the rows, or in each row."""
        if dim is None:
            return self.counted().sum(**kwargs)
        if (at := self._dim(dim)) is not None:
            return self.map(torch.sum, at, **kwargs)
        return refuse() if kwargs else self.counted().sum(list(range(self.mask.ndim)))

    def mean(self, dim: int | None = None) -> Any:
        """The mean of all that counts, over the rows, or in each row."""
        if dim is not None and (at := self._dim(dim)) is not None:
            return self.map(torch.mean, at)
        each = math.prod(self.rows.shape[self.mask.ndim :]) if dim is None else 1
        return self.sum(dim) / (self.mask.sum() * each) if self.rows.is_floating_point() else refuse()

    def _dim(self, dim: Any) -> int | None:
        """A dim of what is there on one device as one of the rows; None for the first."""
        if type(dim) is not int or not -self.ndim <= dim < self.ndim:
            refuse()
        return dim % self.ndim + self.mask.ndim - 1 if dim % self.ndim else None

    def _along(self, function: Callable, dim: Any = None, **kwargs: Any) -> Masked:
        at = self._dim(dim)
        return refuse() if at is None else self.map(function, at, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in OF_ELEMENTS:
            return lambda *args, **kwargs: self.map(getattr(torch.Tensor, name), *args, **kwargs)
        if name in ALONG:
            return lambda *args, **kwargs: self._along(getattr(torch, name), *args, **kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse()

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first, *rest = args or (None,)
        if function in LOSSES:
            return _loss(function, first, *rest, **kwargs)
        if function is F.cross_entropy:
            return _cross_entropy(first, *rest, **kwargs)
        if not isinstance(first, Masked):
            mirrored = MIRRORED.get(_name(function))
            return refuse() if mirrored is None or kwargs else rest[0].map(lambda x, y: mirrored(y, x), first)
        if function in OF_ROWS:
            is_shared = not any(isinstance(x, Masked) for x in (*rest, *kwargs.values()))
            return Masked(function(first.rows, *rest, **kwargs), first.mask, first.made) if is_shared else refuse()
        return getattr(first, _name(function))(*rest, **_without_nothing(kwargs))

    def __neg__(self) -> Masked:
        return self.map(operator.neg)

    def __invert__(self) -> Masked:
        return self.map(operator.invert)

    __hash__ = None

    def __len__(self) -> int:
        return refuse()

    def __iter__(self) -> Any:
        return refuse()

    def __bool__(self) -> bool:
        return refuse()

    def __float__(self) -> float:
        return refuse()

    def __getitem__(self, index: Any) -> Any:
        return refuse()

    def __setitem__(self, index: Any, value: Any) -> None:
        refuse()


def _operator(name: str) -> None:
    plain = getattr(operator, f"{name}_" if name in ("and", "or") else name)
    setattr(Masked, f"__{name}__", lambda x, y: x.map(plain, y))
    setattr(Masked, f"__r{name}__", lambda x, y: x.map(lambda a, b: plain(b, a), y))


for _each in OPERATORS:
    _operator(_each)


def refuse() -> NoReturn:
    """Raise the error for what needs the size."""
    raise of_unknown_size(_INDEX, advice(_INDEX))


def check_not_kept(x: Any) -> None:
    """Raise that error if it is such a tensor: results and attributes have sizes."""
    if type(x) is Masked:
        raise of_unknown_size(_INDEX, advice(_INDEX), x.made)


_INDEX = torch.ops.aten.index.Tensor


def get(x: torch.Tensor, mask: Any) -> Any:
    """x[mask]. NotImplemented where that is no mask of the first dims."""
    if not isinstance(_torch.unwrapped(x), _torch.FunctionalTensor):  # of a block in a local_map, say
        return NotImplemented
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or not 0 < mask.ndim <= x.ndim:
        return NotImplemented
    if any(n != m for n, m in zip(mask.shape, x.shape, strict=False)):
        return NotImplemented
    return Masked(x.masked_fill(~_beside(mask, x), 1), mask, at_user_line(current_frames()))


def put(x: torch.Tensor, mask: Any, value: Any) -> Any:
    """x[mask] = value, where that was made under the same mask. NotImplemented for another value."""
    if not isinstance(value, Masked):
        return NotImplemented
    if value.mask is not mask or value.rows.ndim != x.ndim:
        refuse()
    x.copy_(torch.where(_beside(mask, x), value.rows.to(x.dtype), x))
    return None


FUNCTIONS = {torch.Tensor.__getitem__: get, torch.Tensor.__setitem__: put}
"""From a function to one of the same arguments, which returns NotImplemented where torch is to do it."""


def _beside(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask of the first dims as one of all."""
    return mask.view(*mask.shape, *[1] * (x.ndim - mask.ndim))


def _name(function: Callable) -> str:
    return getattr(function, "__name__", "").strip("_")


def _without_nothing(options: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in options.items() if x is not None and k not in ("_stacklevel", "inplace")}


def _loss(function: Callable, input: Any, target: Any, *rest: Any, reduction: str = "mean", **options: Any) -> Any:
    """A loss of elements, of those that count."""
    options = _without_nothing(options)
    if any(x is not None for x in rest) or any(isinstance(x, (torch.Tensor, Masked)) for x in options.values()):
        refuse()
    if not isinstance(input, Masked) or not isinstance(target, Masked):
        refuse()
    each = input.map(lambda x, y: function(x, y, reduction="none", **options), target)
    return each if reduction == "none" else getattr(each, reduction)()


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """The loss of classes, for which rows that do not count are ignored."""
    both = isinstance(input, Masked) and isinstance(target, Masked) and input.mask is target.mask
    if not both or target.dtype.is_floating_point or size_average is not None or reduce is not None:
        refuse()
    of_rows = input.mask.ndim - 1
    rows, classes = input.rows.flatten(0, of_rows), target.counted(ignore_index).flatten(0, of_rows)
    loss = F.cross_entropy(
        rows, classes, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return Masked(loss, input.mask.flatten(), input.made) if reduction == "none" else loss
