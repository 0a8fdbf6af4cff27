"""The structure of arguments and results, as values that the notation can write.

    tree of {"loss": t, "rows": [t, t]}      {'loss': Leaf(), 'rows': [Leaf(), Leaf()]}
    tree of a ModelOutput                    Branch('transformers...:CausalLMOutput', ['loss', 'logits'], (Leaf(), ...))

Lists, tuples and dicts are written as they are. What else is registered with torch's trees, such as a named tuple, a
dataclass or a `ModelOutput`, is written by the place of its class and by the context that it was registered with. Its
class is imported when the text is read; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

from spmd._torch import pytree
from spmd.expand.kept.notation import Branch, CannotKeep, Leaf, found_at, place_of
from spmd.expand.objects import Opened, node

_LEAF = Leaf()


def as_value(tree: Any) -> Any:
    """A structure as a value.

    >>> as_value(pytree.tree_structure([1, {"a": 2}]))
    [Leaf(), {'a': Leaf()}]
    """
    if tree.is_leaf():
        return _LEAF
    children, kind, context = tuple(map(as_value, tree.children())), tree.type, tree.context
    if kind in (list, tuple):
        return kind(children)
    if kind is dict:
        return dict(zip(context, children, strict=True))
    if kind is Opened:
        return Branch(place_of(type(_blank(context.like))), list(context.names), children)
    if kind is pytree.namedtuple:
        return Branch(place_of(context), None, children)
    return Branch(place_of(kind), context, children)


def _blank(like: Any) -> Any:
    """A new object of the same class, if all that an object of it is are its attributes."""
    kind = type(like)
    try:
        blank = kind.__new__(kind)
    except TypeError as error:
        raise CannotKeep(f"{kind.__qualname__} cannot be made without its arguments: {error}") from error
    if any(getattr(base, "__slots__", ()) for base in kind.__mro__) or issubclass(kind, CONTAINERS):
        raise CannotKeep(f"a {kind.__qualname__} has contents beside its attributes; return a dict or a dataclass")
    return blank


CONTAINERS = (dict, list, tuple, set, frozenset, str, bytes)
"""What has contents of its own, whatever its attributes are."""


def as_tree(value: Any) -> Any:
    """The structure that `as_value` has written."""
    return pytree.tree_structure(_object(value))


def _object(value: Any) -> Any:
    """An object with this structure; its leaves are 0, which a size may have, too."""
    if isinstance(value, Leaf):
        return 0
    if isinstance(value, Branch):
        return _made(found_at(value.kind), value.context, [_object(x) for x in value.children])
    if isinstance(value, dict):
        return {key: _object(x) for key, x in value.items()}
    return type(value)(map(_object, value))


def _made(kind: type, context: Any, children: list) -> Any:
    if kind in pytree.SUPPORTED_NODES:
        return node(kind, context, children)
    if context is None:
        return kind(*children)  # a named tuple
    return Opened(kind.__new__(kind), dict(zip(context, children, strict=True)))
