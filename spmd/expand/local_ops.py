"""What stands in a program in the place of an op or of an argument whose local form differs between ranks.

    view(x, LocalShape(f32[8@dp, 4]))      each rank views its block with the shape of its block
    slice(x, 0, LocalCount(256), ...)      each rank counts those of the indices that it has
    UnlessEmpty(max_pool2d)                ranks whose results are empty do not call the op

`spmd.expand.bind` replaces them by what a rank needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.rules.index_counts import Counts
from spmd.tensor.spec import Spec

SAFE_LOCALLY = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""For ops that depend on strides, ops that do not. A move makes a block contiguous, whatever strides the trace saw."""


@dataclass(frozen=True)
class LocalShape:
    """An argument that stands for the local shape of a spec, which depends on a rank's coordinate."""

    spec: Spec

    def __repr__(self):
        return f"local({list(self.spec.shape)})" if not any(self.spec.dims) else f"local({self.spec})"


@dataclass(frozen=True)
class LocalCount:
    """An argument that stands for how many of the first indices of a dim a rank has, or for a list of such numbers."""

    counts: Counts
    value: Any

    def at(self, coordinate: tuple[int, ...]) -> Any:
        """The number on the rank at this coordinate."""
        return self.counts.localized(self.value, self.counts.spec.length(self.counts.dim, coordinate))

    def __repr__(self):
        return f"local({self.value})"


@dataclass(frozen=True)
class UnlessEmpty:
    """An op that raises on an empty block. Ranks whose results are empty do not call it. outs: specs of the results."""

    op: _torch.OpOverload
    outs: tuple[Spec, ...]

    @property
    def __name__(self) -> str:
        return f"unless_empty[{op_text(self.op)}]"

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("bind replaces this by the op or by an empty tensor")


def op_text(target: Any) -> str:
    """The name of an op or function, as a program prints it."""
    if isinstance(target, _torch.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))
