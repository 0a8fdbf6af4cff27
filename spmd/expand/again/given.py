"""Whether the arguments of a call are like those of an earlier one, so that it is served in the same way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.layouts import layout_of
from spmd.expand.objects import NAMED, holds_state, kind_of_node, opened, with_containers
from spmd.expand.own_arguments import NOTHING_OWN
from spmd.expand.own_arguments import Given as Own
from spmd.tensor.spec import spec_of_value

BY_VALUE = (bool, str, bytes)
BY_IDENTITY = (type(None), torch.dtype, torch.device, *NAMED)


def likeness(x: Any) -> Callable[[Any], bool] | None:
    """Whether another argument would be given a program in the same way; None where that takes longer to say.

    >>> likeness(0.5)(0.25), likeness(0.5)(1), likeness("a")("b")
    (True, False, False)
    """
    kind = type(x)
    if isinstance(x, (nn.Module, Optimizer)):
        known = weakref.ref(x)
        return lambda y: y is known()
    if isinstance(x, torch.Tensor) and _torch.user_attributes(x):
        return None
    if kind is torch.Tensor:
        like, layout = (x.shape, x.dtype, x.device), layout_of(x)
        lies = torch.Tensor.is_contiguous if layout is None else lambda y: layout_of(y) == layout
        return lambda y: (
            type(y) is kind and (y.shape, y.dtype, y.device) == like and not y.requires_grad and not y.__dict__
            and lies(y)
        )  # fmt: skip
    if (spec := spec_of_value(x)) is not None and x._copy is None:
        return lambda y: type(y) is kind and y._spec is spec and y._copy is None and is_plain(y)
    if kind in (int, float):
        return lambda y: type(y) is kind
    if kind in BY_VALUE:
        return lambda y: type(y) is kind and y == x
    if isinstance(x, BY_IDENTITY):
        return lambda y: y is x
    if holds_state(x) and kind.__weakrefoffset__:
        known = weakref.ref(x)
        return lambda y: y is known()
    return None


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor wants no gradient, and users have set no attributes on it."""
    return not x.requires_grad and not _torch.user_attributes(x)


def _add_containers(x: Any, found: list[Any]) -> None:
    """Add the containers of torch's trees in a value, as `with_containers` gives them where there are no objects."""
    if (kind := kind_of_node(x)) is not None:
        found.append(x)
        for each in pytree.SUPPORTED_NODES[kind].flatten_fn(x)[0]:
            _add_containers(each, found)


class Given:
    """The arguments of a call, flattened, with their objects opened. tree: their structure; None where all of them are
    leaves."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], own: Own = NOTHING_OWN) -> None:
        """own: what takes the place of blocks of this rank."""
        self.count, self.names = len(args), tuple(kwargs)
        given = [*args, *kwargs.values()]
        leaves, tree = pytree.tree_flatten(given)
        self._opens = None in map(likeness, leaves)
        if self._opens:
            leaves, tree = pytree.tree_flatten(opened(given))
        self.tree = None if len(given) == len(leaves) and all(map(is_, given, leaves)) else tree
        self._alike = [likeness(own.get(id(x), x)) for x in leaves]
        self.can_repeat = None not in self._alike

    def numbered(self) -> tuple[tuple, dict[str, Any]]:
        """Arguments of the same structure, with the place of each leaf in place of the leaf."""
        places: Any = list(range(len(self._alike)))
        if self.tree is not None:
            places = _torch.unflatten(places, self.tree)
        return tuple(places[: self.count]), dict(zip(self.names, places[self.count :], strict=True))

    def containers(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """The containers in other arguments that are alike, and the objects among these that are opened."""
        if self.tree is None:
            return []
        given = *args, *kwargs.values()
        if self._opens:
            return [x for each in given for x in with_containers(each)[1]]
        found: list[Any] = []
        for each in given:
            _add_containers(each, found)
        return found

    def leaves(self, args: tuple, kwargs: dict[str, Any], own: Own = NOTHING_OWN) -> list[Any] | None:
        """The leaves of other arguments, if they are alike. own: as above."""
        if len(args) != self.count or tuple(kwargs) != self.names:
            return None
        found = [*args, *kwargs.values()]
        if self.tree is not None:
            found, tree = pytree.tree_flatten(opened(found) if self._opens else found)
            if tree != self.tree:
                return None
        if own:
            found = [own.get(id(x), x) for x in found]
        return found if all([alike(x) for alike, x in zip(self._alike, found, strict=True)]) else None
