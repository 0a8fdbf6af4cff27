"""Arguments and results that are objects with tensors inside: a tokenizer's batch, a model's output, a cache of keys.

    BatchEncoding({"input_ids": t})     ->  Opened(BatchEncoding, {"data": {"input_ids": t}, ...})
    DynamicCache(layers=[...])          ->  Opened(DynamicCache, {"layers": [Opened(DynamicLayer, {...})], ...})
    Row(x=t), with class Row(dict)      ->  Opened(Row, {}, {"x": t})

torch's trees know lists, tuples, dicts and what was registered with them. `opened` puts an `Opened`, which is
registered, in the place of every other object whose attributes are tensors and plain values, in containers or objects
of such. Whoever walks the tree then finds them, and `closed` makes objects of the same classes again. Other objects,
such as a learning-rate scheduler, stay as they are.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.guards import MAX_DEPTH
from spmd.expand.sources.layout import hides


@dataclass(frozen=True)
class Counted:
    """In a tree, in the place of a number that a step counts (`spmd.expand.counters`): it is given and set by its path,
    and not with the tree."""

    path: str


PLAIN = (torch.Tensor, int, float, bool, str, bytes, type(None), torch.dtype, torch.device, complex, Counted)
"""What may be in arguments and results."""

NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
"""The same, compared by identity."""

HOLDERS = nn.Module, Optimizer
MOST_HELD = 100
"""A list or dict with more items is data: it is not looked through for modules."""

CLOSED = (*PLAIN, *NAMED, nn.Module, Optimizer, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Never opened: what the compiler knows by itself."""


class Opened:
    """An object as its class and its attributes. like: the object, whose other contents a new one gets.

    items: what it contains where its class is a dict or a list; of a list by place.
    """

    def __init__(self, like: Any, attributes: dict[str, Any], items: dict[Any, Any] | None = None):
        self.like, self.attributes, self.items = like, attributes, items or {}


class OpenedType:
    """The type of an opened object, in the structure of a tree: equal for objects of one class."""

    def __init__(self, like: Any, names: tuple[str, ...], keys: tuple = ()):
        self.like, self.names, self.keys = like, names, keys

    def _key(self) -> tuple:
        return type(self.like), self.names, self.keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenedType) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self):
        return f"{type(self.like).__name__}({', '.join(map(str, (*self.names, *self.keys)))})"


def _flatten(x: Opened) -> tuple[list, OpenedType]:
    return [*x.attributes.values(), *x.items.values()], OpenedType(x.like, tuple(x.attributes), tuple(x.items))


def _flatten_with_keys(x: Opened) -> tuple[list, OpenedType]:
    values, kind = _flatten(x)
    keys = [*map(pytree.GetAttrKey, kind.names), *map(pytree.MappingKey, kind.keys)]
    return list(zip(keys, values, strict=True)), kind


def _unflatten(values: Any, kind: OpenedType) -> Opened:
    values, n = list(values), len(kind.names)
    attributes, items = zip(kind.names, values[:n], strict=True), zip(kind.keys, values[n:], strict=True)
    return Opened(kind.like, dict(attributes), dict(items))


pytree.register_pytree_node(
    Opened, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys, serialized_type_name="spmd.expand.Opened"
)


def opened(tree: Any) -> Any:
    """The tree with its objects opened.

    >>> class Batch:
    ...     def __init__(self, x):
    ...         self.x = x
    >>> pytree.tree_leaves(opened([Batch(torch.ones(2)), 3]))
    [tensor([1., 1.]), 3]
    """
    return with_containers(tree)[0]


def with_containers(tree: Any) -> tuple[Any, list[Any]]:
    """The tree with its objects opened, and what is in it but for leaves: the lists, dicts, tuples and objects that
    these are copies of, one for each node, in the order of torch's trees.

    >>> a = [torch.ones(2)]
    >>> tree, containers = with_containers({"a": a, "b": a})
    >>> tree["a"] is tree["b"], [x is a for x in containers]
    (False, [False, True, True])
    """
    containers: list[Any] = []
    return _opened(tree, MAX_DEPTH, frozenset(), containers), containers


def holds_state(x: Any, depth: int = 3) -> bool:
    """Whether an object has a module or an optimiser in an attribute, or in an object, a list, a tuple or a dict
    there."""
    return depth > 0 and any(
        isinstance(leaf, HOLDERS) or (hasattr(leaf, "__dict__") and not isinstance(leaf, CLOSED) and
                                      holds_state(leaf, depth - 1))
        for value in getattr(x, "__dict__", {}).values() for leaf in _few(value)
    )  # fmt: skip


def _few(x: Any) -> list[Any]:
    """What is in a small container of torch's trees, or the value itself."""
    if type(x) in (list, tuple, dict):
        inside = list(x.values()) if type(x) is dict else list(x)
        return [leaf for each in inside for leaf in _few(each)] if len(inside) <= MOST_HELD else []
    return [x]


def _opened(x: Any, depth: int, inside: frozenset[int], containers: list[Any]) -> Any:
    if (kind := kind_of_node(x)) is not None:
        containers.append(x)
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(x)
        return node(kind, context, [_opened(each, depth, inside, containers) for each in children])
    if isinstance(x, CLOSED) or not hasattr(x, "__dict__") or not depth or id(x) in inside or holds_state(x):
        return x
    if hides(type(x)):  # it is more than its attributes, as a functools.partial is
        return x
    before, within = len(containers), inside | {id(x)}
    containers.append(x)
    attributes, items = (
        {k: _opened(part, depth - 1, within, containers) for k, part in of.items()} for of in (vars(x), items_of(x))
    )
    leaves = pytree.tree_leaves([*attributes.values(), *items.values()])
    if all(isinstance(leaf, (*PLAIN, *NAMED)) or _torch.is_symbol(leaf) for leaf in leaves):
        return Opened(x, attributes, items)
    del containers[before:]
    return x


def kind_of_node(x: Any) -> Any:
    """Under which class torch's trees know how to take a value apart; None for a leaf."""
    kind = type(x)
    if kind in pytree.SUPPORTED_NODES:
        return kind
    return pytree.namedtuple if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def node(kind: Any, context: Any, children: list[Any]) -> Any:
    """A node of such a tree: a container, or an `Opened`."""
    return _torch.node(kind, context, children)


CONTAINERS = (OrderedDict, dict, list)
"""The classes of torch's trees whose subclasses are objects, with contents besides their attributes."""


def _container(x: Any) -> type:
    """The one of these that an object is, whose methods do nothing but what they say; `object` for others."""
    return next((kind for kind in CONTAINERS if isinstance(x, kind)), object)


def items_of(x: Any) -> dict[Any, Any]:
    """What an object contains besides its attributes, by key or by place."""
    kind = _container(x)
    if kind is list:
        return dict(enumerate(list.copy(x)))
    return {} if kind is object else dict(kind.items(x))


def _set_items(x: Any, items: dict[Any, Any]) -> None:
    kind = _container(x)
    if kind is list:
        list.__setitem__(x, slice(None), list(items.values()))
    elif kind is not object:
        kind.clear(x)
        for key, value in items.items():
            kind.__setitem__(x, key, value)


def closed(tree: Any) -> Any:
    """The tree with an object in the place of each that was opened: a copy of it with these attributes."""
    return pytree.tree_map(_closed, tree, is_leaf=lambda x: isinstance(x, Opened))


def _closed(x: Any) -> Any:
    if not isinstance(x, Opened):
        return x
    attributes, items = ({key: closed(value) for key, value in of.items()} for of in (x.attributes, x.items))
    return object_of(x.like, attributes, items)


def object_of(like: Any, attributes: dict[str, Any], items: dict[Any, Any]) -> Any:
    """Another object of the class of this one, with these attributes and items."""
    made = _like(like)
    fill(made, attributes, items)
    return made


def _like(x: Any) -> Any:
    """Another object of the class, with what x has besides attributes and items, which is in slots.

    Its attributes are not copied: the class may do more for that, as a GradScaler does, which reads its scale.
    """
    slots = any(vars(base).get("__slots__") for base in type(x).__mro__)
    try:
        return copy.copy(x) if slots else _container(x).__new__(type(x))
    except TypeError:  # a class of another layout
        return copy.copy(x)


def fill(target: Any, attributes: dict[str, Any], items: dict[Any, Any]) -> None:
    """Give an object these attributes and items."""
    own = vars(target)
    own.clear()
    own.update(attributes)
    _set_items(target, items)


# ---- arguments that the step changes ----------------------------------------------------------


def differs(before: Any, after: Any) -> bool:
    """Whether two trees have other structures or other leaves; leaves are compared by identity."""
    (old, was), (new, now) = pytree.tree_flatten(before), pytree.tree_flatten(after)
    return was != now or any(x is not y and not equal_numbers(x, y) for x, y in zip(old, new, strict=True))


def equal_numbers(x: Any, y: Any) -> bool:
    return type(x) is type(y) and isinstance(x, (bool, int, float, complex, str, bytes)) and x == y


# ---- numbers in them that a step counts --------------------------------------------------------


def _box(value: Any, tree: Any) -> Any:
    """The dict or list in which a value that has been opened keeps its parts; None for another one."""
    if isinstance(tree, Opened) and type(value) is type(tree.like):
        return vars(value)
    return value if type(tree) in (dict, list, tuple) and type(value) is type(tree) else None


def _parts(tree: Any) -> dict[Any, Any]:
    return tree.attributes if isinstance(tree, Opened) else tree if type(tree) is dict else dict(enumerate(tree))


def with_counted(value: Any, tree: Any, paths: Mapping[tuple[int, Any], str]) -> Any:
    """The opened tree of a value with `Counted` in the place of numbers. paths: of these, by where they are
    (`Place.key`)."""
    if (box := _box(value, tree)) is None:
        return tree
    inside = {
        key: Counted(paths[id(box), key]) if (id(box), key) in paths else with_counted(box[key], x, paths)
        for key, x in _parts(tree).items()
    }
    if isinstance(tree, Opened):
        return Opened(tree.like, inside, tree.items)
    return inside if type(tree) is dict else type(tree)(inside.values())


def twins(value: Any, other: Any, tree: Any) -> Iterator[tuple[int, Any]]:
    """For the dicts and lists in a value, by their identity, those that are in the same places of another value. tree:
    what the other one has been made of."""
    mine, its = _box(value, tree), _box(other, tree)
    if mine is None or its is None:
        return
    if type(mine) is not tuple:
        yield id(mine), its
    for key, x in _parts(tree).items():
        if key in mine if isinstance(mine, dict) else key < len(mine):
            yield from twins(mine[key], its[key], x)
