"""torch's trees, but for one thing: torch makes a tuple of what was a `torch.Size`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def node(kind: Any, context: Any, children: list[Any]) -> Any:
    """A node of a tree: a container of this kind with these children."""
    if kind is torch.Size and all(isinstance(x, (int, torch.SymInt)) for x in children):
        return torch.Size(children)
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


def unflatten(leaves: Iterable[Any], structure: pytree.TreeSpec) -> Any:
    """The tree of these leaves.

    >>> found, structure = pytree.tree_flatten({"a": torch.Size([1, 2])})
    >>> unflatten(found, structure)
    {'a': torch.Size([1, 2])}
    """
    return _made(iter(leaves), structure)


def _made(leaves: Iterator[Any], structure: pytree.TreeSpec) -> Any:
    if structure.is_leaf():
        return next(leaves)
    return node(structure.type, structure.context, [_made(leaves, each) for each in structure.children()])
