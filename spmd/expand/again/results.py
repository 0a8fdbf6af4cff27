"""What a step returns, made of the outputs of its program, in little time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.objects import closed
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


def changed_by(tree: Any) -> dict[str, Any]:
    """What a step changes, by path, with the places of the new values among the leaves of what it gives.

    tree: the structure of the pair of what it returns, and what it changes.
    """
    return pytree.tree_unflatten(list(range(tree.num_leaves)), tree)[1]


def builder(tree: Any) -> Callable[[list[Any]], Any]:
    """Makes what a step returns of its leaves. tree: as in `changed_by`."""
    result = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)[0]
    if type(result) is int:
        return lambda leaves: leaves[result]
    if type(result) in (tuple, list) and all(type(x) is int for x in result):
        kind = type(result)
        return lambda leaves: kind([leaves[i] for i in result])
    if type(result) is dict and all(type(x) is int for x in result.values()):
        return lambda leaves: {key: leaves[i] for key, i in result.items()}
    return lambda leaves: closed(pytree.tree_unflatten(leaves, tree)[0])


def picker(places: Sequence[int]) -> Callable[[Sequence], Sequence]:
    """What is at these places of a sequence."""
    return itemgetter(*places) if len(places) > 1 else lambda x: [x[i] for i in places]
