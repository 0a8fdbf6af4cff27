"""What each collective does to the tensors of a group: one function from all inputs to all results.

    >>> call = Collective("all_reduce", ("sum",), torch.float32, (2,))
    >>> play([call, call], [torch.ones(2), torch.ones(2)])
    [tensor([2., 2.]), tensor([2., 2.])]

Reductions go in rank order, so a result is the same bits in every run. Results are new tensors, one a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = list[torch.Tensor]

REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "product": torch.mul, "min": torch.fmin, "max": torch.fmax,
}  # fmt: skip
"""A maximum may lose a NaN, as it may on gloo: who needs it must send it some other way."""


@dataclass(frozen=True)
class Collective:
    """What one rank asks for: the kind, its plain arguments, and the tensor's dtype and shape."""

    kind: str
    args: tuple
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, kind: str, x: torch.Tensor, *args: object) -> Collective:
        """The description of a call with tensor `x`."""
        return cls(kind, args, x.dtype, tuple(x.shape))

    @property
    def common(self) -> tuple:
        """What must be equal on all ranks of the group; an all-to-all's rows may differ."""
        if self.kind == "all_to_all_single":
            return (self.kind, self.dtype, self.shape[1:])
        return (self.kind, self.args, self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, (f'{self.dtype} {list(self.shape)}', *self.args)))})"


def disagreement(calls: list[Collective], ranks: tuple[int, ...]) -> str | None:
    """Why the ranks' calls do not fit together, naming the first two that part; None when they do."""
    for call, rank in zip(calls, ranks, strict=True):
        if call.common != calls[0].common:
            return f"rank {ranks[0]} calls {calls[0]}, but rank {rank} calls {call}"
    return _unlike_splits(calls, ranks) if calls[0].kind == "all_to_all_single" else None


def complaint(call: Collective, n: int) -> str | None:
    """What is wrong with one rank's call in a group of `n`, as far as that rank alone can tell."""
    return CHECKS[call.kind](call, n)


def play(calls: list[Collective], xs: Tensors) -> Tensors:
    """The results of a collective that all ranks of a group have called alike."""
    with torch.no_grad():
        return PLAYS[calls[0].kind](calls, xs)


def _unlike_splits(calls: list[Collective], ranks: tuple[int, ...]) -> str | None:
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sent, expected = sender.args[1][j], receiver.args[0][i]
            if sent != expected:
                return (
                    f"all_to_all_single: rank {ranks[i]} sends {sent} rows to rank {ranks[j]}, which expects {expected}"
                )
    return None


# Checks


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


def _check_src(call: Collective, n: int) -> str | None:
    src = call.args[0]
    return None if 0 <= src < n else f"src {src} is not in 0..{n - 1}: it is a place in the group, no global rank"


CHECKS: dict[str, Callable[[Collective, int], str | None]] = {
    "all_reduce": _check_reduce_op,
    "all_gather_into_tensor": _check_size,
    "reduce_scatter_tensor": _check_reduce_scatter,
    "all_to_all_single": _check_splits,
    "broadcast": _check_src,
}


# Plays


def _reduced(call: Collective, xs: Tensors) -> torch.Tensor:
    out = xs[0].clone()
    for x in xs[1:]:
        out = REDUCE[call.args[0]](out, x)
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


PLAYS: dict[str, Callable[[list[Collective], Tensors], Tensors]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
}
