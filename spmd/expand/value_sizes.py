"""Ops of a trace whose results have a size that depends on values: what they become where an argument says the size.

    torch.bincount(x, minlength=5)      counts of 0 to 4, and an assert that x holds no other value
    torch.bincount(x)                   an error: only the run knows how many counts there are
    torch.combinations(x, 3)            an index of x by all that there are of its length
    F.one_hot(x)                        an error: it has as many classes as values ask for

On one device `bincount` gives more counts than `minlength` where x has a greater value. A program has one size for each
result, so there such a value is an error, on all ranks, and not a result of another size.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from spmd import _torch
from spmd.expand.user_code import at_user_line, current_frames, short_place
from spmd.tensor.rules.counts import counted, is_counted

aten = torch.ops.aten


def bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: Any = 0) -> torch.Tensor:
    """The counts of 0 to minlength - 1. NotImplemented where no size is given, or torch raises an error."""
    if not is_counted(x, weights) or _torch.number_now(minlength) < 1:
        return NotImplemented
    if not x.numel():
        return aten.new_zeros.default(x, [minlength], dtype=torch.int64)
    inside = aten.logical_and.default(aten.ge.Scalar(x, 0), aten.lt.Scalar(x, minlength))
    aten._assert_async.msg(aten.all.default(inside), f"bincount{short_place(current_frames())}: {_OUTSIDE}")
    return counted(x, weights, minlength)


_OUTSIDE = (
    "a value is negative, or not smaller than minlength, which says how many counts a program gives; give a greater one"
)

SIZED = {aten.bincount.default: bincount}
"""From an op to a function of the same arguments. The function returns NotImplemented where the size stays unknown."""


def of_unknown_size(what: Any, instead: str, at: str = "") -> NotImplementedError:
    """The error for what gives a tensor of a size that values decide. instead: what to write. at: which line has asked
    for it, if that is not the one that runs."""
    return NotImplementedError(
        f"{what}: the size of its result depends on values, which only the run knows; {instead}"
        f"{at or at_user_line(current_frames())}"
    )


# ---- functions that torch makes of several ops -------------------------------------------------


def combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """An index by the places that are combined; torch would mask a grid of all."""
    if input.ndim != 1 or r < 1:
        return NotImplemented
    combine = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(itertools.chain.from_iterable(combine(range(int(input.shape[0])), r)))
    index = torch.tensor(places, dtype=torch.int64, device=input.device)
    return input.index_select(0, index).reshape(-1, r)


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> Any:
    return NotImplemented if num_classes != -1 else _refused("one_hot", "give num_classes")


def _refused(name: str, instead: str) -> Any:
    raise of_unknown_size(name, instead)


FUNCTIONS = {
    torch.combinations: combinations,
    torch.nn.functional.one_hot: _one_hot,
    torch.linalg.lstsq: lambda *_, **__: _refused(
        "lstsq", "of its results the solution is torch.linalg.pinv(A) @ B; or write it with torch.linalg.qr"
    ),
    _torch.pack_padded_sequence: lambda *_, **__: _refused(
        "pack_padded_sequence",
        "give the layer the padded batch, whose results behind a length y * mask leaves out, with the last state of "
        "each row by y.gather(1, (lengths - 1)...)",
    ),
}  # fmt: skip
"""From a function to one of the same arguments, called before torch takes it apart. The function returns NotImplemented
where torch is to do it."""

ADVICE = {
    aten.bincount.default: "give minlength, a number that is greater than all values",
    aten.nonzero.default: "use torch.where(mask, x, y), or torch.nonzero_static(mask, size=n)",
    aten.masked_select.default: "use torch.where(mask, x, y), and divide sums by mask.sum()",
    aten.index.Tensor: "use torch.where(mask, x, y), and divide sums by mask.sum()",
    aten.repeat_interleave.Tensor: "give output_size, the sum of the repeats",
}
"""What to write instead of an op. Of others, the words for all."""


def advice(op: _torch.OpOverload) -> str:
    return ADVICE.get(op, "write it with ops that keep sizes, such as torch.where")
