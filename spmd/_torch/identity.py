"""A tensor that becomes another one and stays the object that it is, for everybody who holds it.

    become(weight, distributed)       # optimisers, lists and modules that hold `weight` now hold the distributed one

torch has no public way to do this in all cases: `torch.utils.swap_tensors` refuses weak references, which may stay, and
tensors that a graph of autograd has saved, which may stay too as long as nobody goes back through that graph.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd._torch.modes import no_modes

_swap_impls = torch._C._swap_tensor_impl


def obstacles(tensors: Sequence[torch.Tensor], kind: type) -> list[str | None]:
    """For each tensor why it cannot become a tensor of this class, as the end of a sentence; None if it can."""
    viewed = _viewed() if any(x._use_count() > 1 for x in tensors) else set()
    return [_HAS_VIEWS if id(x) in viewed else _obstacle(x, kind) for x in tensors]


_HAS_VIEWS = "has a view that is alive, and that would keep the memory it has now"


def _obstacle(x: torch.Tensor, kind: type) -> str | None:
    own = type(x)
    try:
        x.__class__ = kind
        x.__class__ = own
    except TypeError:
        return f"is of the class {own.__name__}, whose objects have another layout (__slots__)"
    with no_modes():
        other = torch.empty(0)
    try:
        _swap_impls(x, other)
        _swap_impls(x, other)
    except RuntimeError as error:
        return f"is held inside of torch ({str(error).strip()})"
    return None


def shows_what_is_held(x: torch.Tensor) -> bool:
    """Whether another tensor, which somebody holds, shows memory of this one. Its base may be there for it alone."""
    own, base = x.untyped_storage(), [x._base] if x._is_view() else []
    if torch._C._storage_Use_Count(own._cdata) > len([x, own, *base]):
        return True
    return bool(base) and _holders(base, 0) > (base[0]._use_count() > 1)


def _viewed() -> set[int]:
    """The ids of all tensors of which somebody holds a view. One that only a graph of autograd holds does not count,
    because nobody writes into it."""
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    views = [x for x in found if x._is_view()]
    del found
    return {id(views[i]._base) for i in range(len(views)) if _holders(views, i) > (views[i]._use_count() > 1)}


def _holders(values: list, i: int) -> int:
    """How many hold values[i], apart from the list. A graph of autograd is one of them."""
    return sys.getrefcount(values[i]) - sys.getrefcount(_ALONE[0])


_ALONE = [object()]


def become(x: torch.Tensor, new: torch.Tensor) -> None:
    """x takes over the memory, class, gradient and attributes of `new`, which gets what x had.

    The attributes that were set on x and its gradient hooks stay with x. A backward pass through a graph that was
    recorded before is an error: its gradient would not come here. Ask `obstacles` first.
    """
    if isinstance(x, nn.Parameter):
        new._is_param = True
    take_grad_dtype(new, x)
    own = declared(type(x)) | vars(new).keys()
    vars(new).update({name: value for name, value in vars(x).items() if name not in own})
    _refuse_old_graphs(x)
    _swap_impls(x, new)
    x.__class__, new.__class__ = type(new), type(x)
    x.__dict__, new.__dict__ = new.__dict__, x.__dict__
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(x, hooks) is not None:
            setattr(x, hooks, getattr(x, hooks))  # registers the table of hooks with what x is now


def grad_dtype(x: torch.Tensor) -> torch.dtype | None:
    """In which dtype gradients of a leaf come; None for that in which they are made. torch has it since 2.11."""
    return getattr(x, "grad_dtype", x.dtype)


def take_grad_dtype(new: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Let gradients of a leaf come in the dtype that was said of another one. Returns the leaf."""
    if x.is_leaf and new.is_leaf and grad_dtype(x) != x.dtype:
        new.grad_dtype = x.grad_dtype
    return new


@functools.lru_cache(maxsize=256)
def declared(kind: type) -> frozenset[str]:
    """The attributes that a class of tensors declares: they say what a tensor is, and are not the user's."""
    return frozenset(name for base in kind.__mro__ for name in vars(base).get("__annotations__", ()))


def user_attributes(x: torch.Tensor) -> dict[str, Any]:
    """What users have set on a tensor, by name."""
    own = vars(x)
    if own.keys() <= (not_theirs := _not_of_users(type(x))):
        return {}
    return {name: value for name, value in own.items() if name not in not_theirs}


@functools.lru_cache(maxsize=256)
def _not_of_users(kind: type) -> frozenset[str]:
    return declared(kind) | _UNDECLARED


_UNDECLARED = {"_mode_key", "_export"}
"""What torch keeps in functional tensors, and does not declare."""

KEPT_ON_FUNCTIONS = frozenset({"__dynamo_disable"})
"""What torch sets on functions of its own when they are first called."""


def _refuse_old_graphs(x: torch.Tensor) -> None:
    node, shape = _accumulating_node(x), list(x.shape)
    if node is not None:
        node.register_prehook(lambda _: _raise_old_graph(shape))


def _accumulating_node(x: torch.Tensor):
    if not (x.requires_grad and x.is_leaf) or x.is_inference():
        return None
    with torch.inference_mode(False), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(x).node


def _raise_old_graph(shape: list[int]) -> None:
    raise RuntimeError(
        f"backward: this pass goes through a graph that was recorded before a parameter of shape {shape} was placed on "
        "a mesh, and its gradient would not reach the parameter. Call backward before, or run the forward pass again."
    )
