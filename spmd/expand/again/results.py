"""What a step returns, made of the outputs of its program, in little time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.wrappers import wrap, wrapper
from spmd.tensor.spec import Spec


class Made:
    """A tensor that a program makes, of which the caller gets a DTensor."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._wrapper: tuple | None = None

    def of(self, block: torch.Tensor) -> DTensor:
        block = _torch.without_bits(block)
        if self._wrapper is None:
            self._wrapper = wrapper(DTensor, block, self.spec)
        return wrap(self._wrapper, block, self.spec)

    def beside(self, x: DTensor) -> DTensor:
        """Another one that shows the memory of one of these, as `x.detach()` in less time."""
        other = wrap(self._wrapper, x._local_tensor, self.spec)
        x._share_memory_with(other)
        return other


def builder(result: Any) -> Callable[[list[Any]], Any] | None:
    """Makes what a step returns of its leaves; None where that takes longer. result: of an `Outcome`."""
    if type(result) is int:
        return lambda leaves: leaves[result]
    kind, context, places, identity = result
    if identity is not None or not all(type(x) is int for x in places):
        return None
    if kind in (tuple, list):
        return lambda leaves: kind([leaves[i] for i in places])
    if kind is dict:
        named = dict(zip(context, places, strict=True))
        return lambda leaves: {key: leaves[i] for key, i in named.items()}
    return None


def picker(places: Sequence[int]) -> Callable[[Sequence], Sequence]:
    """What is at these places of a sequence."""
    return itemgetter(*places) if len(places) > 1 else lambda x: [x[i] for i in places]
