"""Containers of what a step is given and gives: which of them are one object, and which is there already.

    self.l[0] = h; self.k = self.l      model.l and model.k: There("model.l", 0), the list that is there, with h in it
    self.k = [h, h + 1]                 model.k: a new list; the old one stays as it was, whoever holds it
    self.k = new = [h]; return new      both: 0, one new list

A trace runs on copies of lists, dicts, tuples and objects, one copy for each of them, wherever it is. Behind it each
container in what it gives is such a copy, and so stands for one that is there, or it was made by the step. A container
that the step has written, and that nothing holds any more but the user, is written, too (`Outcome`).

A container is known by where it is: under a path, by its number among the containers there, in the order of torch's
trees (`objects.with_containers`). Which are one object is a guard of a program (`shared`). A tuple of nothing but
constants is no container: Python makes one of several as it likes.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from spmd._torch import pytree
from spmd.expand.objects import (
    Counted,
    Opened,
    OpenedType,
    equal_numbers,
    fill,
    items_of,
    kind_of_node,
    node,
    object_of,
)
from spmd.expand.sources.layout import COMPARED_BY_VALUE, put

FILLED = {list, dict, OrderedDict, defaultdict, deque, Opened}
"""What can be given other contents in place, of the kinds of torch's trees. The others are tuples, and what libraries
have registered."""

AROUND = "around "
"""Before the name of a container that a step's code finds beside its arguments and the attributes of its state."""


class There(NamedTuple):
    """A container that is there before a step. path: of an argument, of an attribute, or a name `AROUND` the step.
    number: among the containers there."""

    path: str
    number: int


Containers = Mapping[str, Sequence[Any]]
"""By path, the containers that are there, in order."""


def in_arguments(containers: Containers) -> Containers:
    """Those in arguments, which a step gets copies of."""
    return {path: several for path, several in containers.items() if not path.startswith(AROUND)}


def is_constant(x: Any) -> bool:
    """Whether it is a tuple of nothing but plain values."""
    return isinstance(x, tuple) and all(isinstance(each, COMPARED_BY_VALUE) or is_constant(each) for each in x)


def shared(containers: Containers) -> tuple[tuple[str, str], ...]:
    """Where containers are that are elsewhere, too, each with the first place.

    >>> a = [1]
    >>> shared({"model.k": [a], "model.l": [[a], a]})
    (('model.l 1', 'model.k 0'),)
    """
    first: dict[int, str] = {}
    pairs = ((f"{path} {i}", x) for path, several in containers.items() for i, x in enumerate(several))
    named = [(name, first.setdefault(id(x), name)) for name, x in pairs if not is_constant(x)]
    return tuple([(name, other) for name, other in named if name != other])


# ---- copies of them ---------------------------------------------------------------------------


def _closed_node(kind: Any, context: Any, children: list[Any]) -> Any:
    if kind is not Opened:
        return node(kind, context, children)
    return object_of(context.like, *_attributes_and_items(context, children))


def _attributes_and_items(context: OpenedType, children: list[Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
    n = len(context.names)
    attributes, items = zip(context.names, children[:n], strict=True), zip(context.keys, children[n:], strict=True)
    return dict(attributes), dict(items)


class Copies:
    """Copies of containers, one for each, wherever it is. make: makes one of a kind, a context and children."""

    def __init__(self, make: Callable[[Any, Any, list[Any]], Any] = _closed_node) -> None:
        self._make = make
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, tree: Any, containers: Iterable[Any], leaf: Callable[[Any], Any] = lambda x: x) -> Any:
        """The copy of a value, of which the opened tree and the containers are given. leaf: what is in it in the place
        of a leaf."""
        return self._of(tree, iter(containers), leaf)

    def _of(self, tree: Any, containers: Iterator[Any], leaf: Callable[[Any], Any]) -> Any:
        if (kind := kind_of_node(tree)) is None:
            return leaf(tree)
        container = next(containers)
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
        inside = [self._of(each, containers, leaf) for each in children]
        if id(container) not in self._made:
            self._made[id(container)] = container, self._make(kind, context, inside)
        return self._made[id(container)][1]


# ---- in a trace -------------------------------------------------------------------------------


class Before:
    """The containers that a traced step is given: where each is, and what is in it then.

    constant: further ones that the trace does not copy. What a step changes in these is no business of this.
    """

    def __init__(self, given: Containers, constant: Containers) -> None:
        self._alive = given, constant
        self._places: dict[int, There] = {}
        for path, several in (*given.items(), *constant.items()):
            for i, x in enumerate(several):
                self._places.setdefault(id(x), There(path, i))
        self._copies = {id(x): x for several in given.values() for x in several}
        self._contents = [(x, _contents(x)) for x in self._copies.values()]

    def place(self, x: Any) -> There | None:
        """Where a container is; None for one that the step has made."""
        return self._places.get(id(x))

    def copied(self, x: Any) -> There | None:
        """The same of those that the trace has copied."""
        return self._places[id(x)] if id(x) in self._copies else None

    def written(self) -> list[Any]:
        """Those that have other contents now."""
        return [x for x, old in self._contents if not _same(_contents(x), old)]

    def numbers(self, containers: Sequence[Any]) -> dict[int, There | int]:
        """Of all containers that a step gives, in order, by number: where one is, or which of the new ones that are
        there more than once."""
        times, new = Counter(map(id, containers)), dict[int, int]()
        found: dict[int, There | int] = {}
        for n, x in enumerate(containers):
            if is_constant(x):
                continue
            if (place := self.place(x)) is not None:
                found[n] = place
            elif times[id(x)] > 1:
                found[n] = new.setdefault(id(x), len(new))
        return found


def check_not_parted(originals: Before) -> None:
    """Raise RuntimeError where a step that got copies of these has written one itself: it has found it elsewhere, too.
    """
    for x in originals.written():
        raise RuntimeError(parted(originals.place(x).path))


def parted(path: str) -> str:
    """Why a step is refused that finds what it was given in another way, too, and writes it in one of them."""
    return (
        f"the step is given {path} as an argument, and what it calls finds it in another way, too; one of them writes "
        "it, which the other would not see in its program: let all of them use the argument"
    )


def is_filled(x: Any) -> bool:
    """Whether a container can be given other contents in place."""
    return (kind_of_node(x) or Opened) in FILLED


def _contents(x: Any) -> tuple[Any, Any, list[Any]]:
    """The kind of a container, its keys, and what is in it."""
    if (kind := kind_of_node(x)) is not None:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(x)
        return kind, context, list(children)  # torch gives a list as it is
    items = items_of(x)
    return Opened, OpenedType(x, tuple(vars(x)), tuple(items)), [*vars(x).values(), *items.values()]


def _same(one: tuple[Any, Any, list[Any]], other: tuple[Any, Any, list[Any]]) -> bool:
    """Whether two contents are the same objects, or equal numbers."""
    (kind, context, children), (its_kind, its_context, its_children) = one, other
    if kind is not its_kind or context != its_context or len(children) != len(its_children):
        return False
    return all(map(is_, children, its_children)) or all(
        x is y or equal_numbers(x, y) for x, y in zip(children, its_children, strict=True)
    )


def _keys(kind: Any, context: Any, n: int) -> Sequence[Any]:
    """What tells the children of a container apart, of which there are n."""
    if kind is Opened:
        return [*((False, name) for name in context.names), *((True, key) for key in context.keys)]
    if kind is defaultdict:
        return context[1]
    return context if kind in (dict, OrderedDict) else range(n)


# ---- behind a call ----------------------------------------------------------------------------


class Node(NamedTuple):
    """A container in what a step gives. children: nodes, and the numbers of leaves. identity: as `Before.numbers`."""

    kind: Any
    context: Any
    children: list[Any]
    identity: There | int | None


class Outcome:
    """What a step gives, to be made of leaves: what it returns, what it changes, by path, and the containers that it
    has written besides. tree: of the three. identities: as `Before.numbers` gives them. places: of the containers that
    are there."""

    def __init__(self, tree: Any, identities: Mapping[int, There | int]) -> None:
        self._identities, self._nodes, self._leaves = identities, itertools.count(), itertools.count()
        self.result, changed, written = self._node(tree).children
        self.changed: dict[str, Any] = dict(zip(changed.context, changed.children, strict=True))
        self._written = written.children
        self.places = frozenset(x for x in identities.values() if isinstance(x, There))

    def _node(self, tree: Any) -> Any:
        if tree.is_leaf():
            return next(self._leaves)
        identity = self._identities.get(next(self._nodes))
        return Node(tree.type, tree.context, list(map(self._node, tree.children())), identity)

    def keep(self, leaves: Sequence[Any], there: Mapping[There, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
        """What the step changes. Containers that are there are given their new contents. Also given is what was made,
        for `returned`. there: the containers at `places`."""
        done: dict[Any, Any] = {}
        changed = {path: _kept(each, leaves, there, done) for path, each in self.changed.items()}
        for each in self._written:
            _kept(each, leaves, there, done)
        return changed, done

    def returned(self, leaves: Sequence[Any], there: Mapping[There, Any], done: dict[Any, Any]) -> Any:
        """What the step returns."""
        return _returned(self.result, leaves, there, done)


def _kept(of: Any, leaves: Sequence[Any], there: Mapping[There, Any], done: dict[Any, Any]) -> Any:
    """A container that stays, with what is in it."""
    if type(of) is int:
        return leaves[of]
    kind, context, children, identity = of
    if identity in done:
        return done[identity]
    target = there[identity] if type(identity) is There else None
    if target is not None and kind in FILLED:
        done[identity] = target
    inside = [_kept(each, leaves, there, done) for each in children]
    if target is None:
        made = _closed_node(kind, context, inside)
    else:
        made = _filled(target, kind, context, inside)
    if identity is not None:
        done[identity] = made
    return made


def _filled(target: Any, kind: Any, context: Any, inside: list[Any]) -> Any:
    """A container that is there, with these contents; another one if it cannot have them. Numbers that are counted stay
    as they are: they are set by themselves."""
    before = _contents(target)
    if any(isinstance(x, Counted) for x in inside):
        old = dict(zip(_keys(*before[:2], len(before[2])), before[2], strict=True))
        keys = _keys(kind, context, len(inside))
        inside = [old.get(key) if isinstance(x, Counted) else x for key, x in zip(keys, inside, strict=True)]
    if _same(before, (kind, context, inside)):
        return target
    if kind not in FILLED:
        return _closed_node(kind, context, inside)
    if kind is Opened:
        fill(target, *_attributes_and_items(context, inside))
    elif kind in (list, deque):
        put([(target, inside)])
    else:
        put([(target, dict(zip(_keys(kind, context, len(inside)), inside, strict=True)))])
    return target


def _returned(of: Any, leaves: Sequence[Any], there: Mapping[There, Any], done: dict[Any, Any]) -> Any:
    """A container that is returned: one that stays, if it holds just that. What is returned of parameters, and of
    arguments that are no DTensors, is a copy, and so is then what it is returned in."""
    if type(of) is int:
        return leaves[of]
    kind, context, children, identity = of
    if identity in done:
        return done[identity]
    inside = [_returned(each, leaves, there, done) for each in children]
    if type(identity) is There and _same(_contents(there[identity]), (kind, context, inside)):
        return there[identity]
    made = _closed_node(kind, context, inside)
    if identity is not None:
        done[identity] = made
    return made
