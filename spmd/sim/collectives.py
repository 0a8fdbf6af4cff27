"""The semantics of each collective: one function from the inputs of all ranks of a group to their results.

    >>> call = Collective("all_reduce", ("sum",), torch.float32, (2,))
    >>> run_collective([call, call], [torch.ones(2), torch.ones(2)])
    [tensor([2., 2.]), tensor([2., 2.])]

Reductions add in the order of the ranks, so results are bitwise equal in every run. Each rank gets a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

Tensors = list[torch.Tensor]

REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.fmin, "max": torch.fmax,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
"""The reductions of two tensors. "max" and "min" may lose a NaN, as on gloo; the callers must send NaNs another way.
"avg" divides at the end."""


@dataclass(frozen=True)
class Collective:
    """One rank's call of a collective: the kind, its plain arguments, and the tensor's dtype and shape."""

    kind: str
    args: tuple
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def with_tensor(cls, kind: str, x: torch.Tensor, *args: object) -> Collective:
        """The description of a call with tensor `x`."""
        return cls(kind, args, x.dtype, tuple(x.shape))

    @property
    def must_agree(self) -> tuple:
        """The part that must be equal on all ranks. The rows of all-to-alls and the bytes of objects may differ."""
        if self.kind in ALL_TO_ALL:
            return (self.kind, self.dtype, self.shape[1:])
        if self.kind in OBJECTS:
            return (self.kind, self.args)
        return (self.kind, self.args, self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, (f'{self.dtype} {list(self.shape)}', *self.args)))})"


ALL_TO_ALL = ("all_to_all_single", "all_to_all")
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
"""Collectives whose tensors are pickled objects."""


def mismatch(calls: list[Collective], ranks: tuple[int, ...]) -> str | None:
    """Why the calls of the ranks do not match, with the first two that differ; None if they match."""
    for call, rank in zip(calls, ranks, strict=True):
        if call.must_agree != calls[0].must_agree:
            return f"rank {ranks[0]} calls {calls[0]}, but rank {rank} calls {call}"
    return _split_mismatch(calls, ranks) if calls[0].kind in ALL_TO_ALL else None


def call_error(call: Collective, n: int) -> str | None:
    """The mistake in one rank's call in a group of `n` ranks, without the calls of the others; None if it is right."""
    return CHECKS[call.kind](call, n)


def run_collective(calls: list[Collective], xs: Tensors) -> Tensors:
    """The results of a collective, one for each rank; the calls must match."""
    with torch.no_grad():
        return RESULTS[calls[0].kind](calls, xs)


def _split_mismatch(calls: list[Collective], ranks: tuple[int, ...]) -> str | None:
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sent, expected = sender.args[1][j], receiver.args[0][i]
            if sent != expected:
                what = "rows" if sender.kind == "all_to_all_single" else "elements"
                return (
                    f"{sender.kind}: rank {ranks[i]} sends {sent} {what} to rank {ranks[j]}, which expects {expected}"
                )
    return None


# The checks of one rank's call


def _check_reduce_op(call: Collective, n: int) -> str | None:
    return None if call.args[0] in REDUCE else f"op {call.args[0]!r} is none of {', '.join(REDUCE)}"


def _check_size(call: Collective, n: int) -> str | None:
    if call.args[-1] != n:
        return f"group size {call.args[-1]} was given, but the group has {n} ranks"
    return None if call.shape else "a 0-dim tensor has no dim 0; unsqueeze it first"


def _check_reduce_scatter(call: Collective, n: int) -> str | None:
    uneven = f"dim 0 has {call.shape[:1]} rows, which {n} ranks cannot share evenly; pad it first"
    wrong = _check_reduce_op(call, n) or _check_size(call, n)
    return wrong or (uneven if call.shape[0] % n else None)


def _check_splits(call: Collective, n: int) -> str | None:
    out_splits, in_splits = call.args
    if len(out_splits) != n or len(in_splits) != n:
        return f"splits {out_splits} and {in_splits} must have one entry for each of the {n} ranks"
    if not call.shape or sum(in_splits) != call.shape[0]:
        return f"in_splits {in_splits} must add up to the rows of dim 0 of {list(call.shape)}"
    return None


def _check_reduce(call: Collective, n: int) -> str | None:
    return _check_reduce_op(call, n) or _check_src(call, n)


def _check_nothing(call: Collective, n: int) -> None:
    return None


def _check_src(call: Collective, n: int) -> str | None:
    src = call.args[-1]
    return None if 0 <= src < n else f"src {src} is not in 0..{n - 1}: it is a place in the group, no global rank"


CHECKS: dict[str, Callable[[Collective, int], str | None]] = {
    "all_reduce": _check_reduce_op,
    "all_gather_into_tensor": _check_size,
    "reduce_scatter_tensor": _check_reduce_scatter,
    "all_to_all_single": _check_splits,
    "broadcast": _check_src,
    "all_gather": _check_nothing,
    "reduce": _check_reduce,
    "reduce_scatter": _check_reduce_op,
    "all_to_all": _check_splits,
    "gather": _check_src,
    "scatter": _check_src,
    "barrier": _check_nothing,
    "all_gather_object": _check_nothing,
    "gather_object": _check_src,
    "broadcast_object_list": _check_src,
    "scatter_object_list": _check_src,
}


# The results of all ranks


def _reduced(call: Collective, xs: Tensors) -> torch.Tensor:
    out = xs[0].clone()
    for x in xs[1:]:
        out = REDUCE[call.args[0]](out, x)
    if call.args[0] == "avg":
        return out / len(xs) if out.is_floating_point() or out.is_complex() else out // len(xs)
    return out


def _all_reduce(calls: list[Collective], xs: Tensors) -> Tensors:
    out = _reduced(calls[0], xs)
    return [out.clone() for _ in xs]


def _all_gather(calls: list[Collective], xs: Tensors) -> Tensors:
    return [torch.cat(xs) for _ in xs]


def _reduce_scatter(calls: list[Collective], xs: Tensors) -> Tensors:
    return [part.clone() for part in _reduced(calls[0], xs).tensor_split(len(xs))]


def _all_to_all(calls: list[Collective], xs: Tensors) -> Tensors:
    parts = [x.split(list(call.args[1])) for call, x in zip(calls, xs, strict=True)]  # parts[from][to]
    return [torch.cat([row[to] for row in parts]) for to in range(len(xs))]


def _broadcast(calls: list[Collective], xs: Tensors) -> Tensors:
    return [xs[calls[0].args[0]].clone() for _ in xs]


def _all_stacked(calls: list[Collective], xs: Tensors) -> Tensors:
    return [torch.stack(xs) for _ in xs]


def _reduce(calls: list[Collective], xs: Tensors) -> Tensors:
    dst = calls[0].args[1]
    return [_reduced(calls[0], xs) if i == dst else x for i, x in enumerate(xs)]  # undefined on other ranks


def _reduce_lists(calls: list[Collective], xs: Tensors) -> Tensors:
    shapes = calls[0].args[1]
    parts = _reduced(calls[0], xs).split([prod(shape) for shape in shapes])
    return [part.clone().view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _gather(calls: list[Collective], xs: Tensors) -> Tensors:
    return [torch.stack(xs) if i == calls[0].args[0] else x for i, x in enumerate(xs)]


def _scatter(calls: list[Collective], xs: Tensors) -> Tensors:
    parts = xs[calls[0].args[0]].reshape(len(xs), *calls[0].shape)
    return [part.clone() for part in parts]


def _barrier(calls: list[Collective], xs: Tensors) -> Tensors:
    return xs


def _object_lists(calls: list[Collective], xs: Tensors) -> list:
    return [list(xs) for _ in xs]


RESULTS: dict[str, Callable[[list[Collective], Tensors], Tensors]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "all_gather": _all_stacked,
    "reduce": _reduce,
    "reduce_scatter": _reduce_lists,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "all_gather_object": _object_lists,
    "gather_object": _object_lists,
    "broadcast_object_list": _object_lists,
    "scatter_object_list": _object_lists,
}
