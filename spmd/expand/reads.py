"""What was read of Python objects, and whether it is still so: identities are compared, in one sweep.

    reads = Reads()
    key = guard_key(model.config, reads=reads)      # notes each dict, list and object that it goes through
    same = reads.snapshot()
    same.holds()                                    # until somebody changes one of them

A key of many values takes long to make and to hash. As long as every container that it was made of has the same objects
in the same order, it would be the same key. What cannot change, such as a number or a tuple, is compared where it is
contained; tensors are compared by identity, as in the key.

A snapshot holds what it compares with, so that no other object can get its address. Of modules and optimisers that
variables name it has weak references: it shall keep no model alive.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spmd import _torch

LookUp = tuple[Callable[..., Any], Any]
"""A function and what it is called with, beside what it shall give where there is nothing."""

OF_ONE_CLASS = {dict, list, set, deque, OrderedDict, defaultdict}
"""Classes whose objects cannot get another class."""

CALLS_UNTIL_SETTLED = 256
"""To part what is told by numbers from what is looked through takes as long as some ten calls do."""

_NOTHING = object()
_mro = attrgetter("__mro__")
_parts_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Reads:
    """Notes what is read. To note a thing twice does no harm."""

    def __init__(self) -> None:
        self.boxes: dict[int, Any] = {}
        self.keys_alone: set[int] = set()
        self.objects: dict[int, Any] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.typed: dict[int, Any] = {}
        self.kinds: dict[int, type] = {}
        self._parted_kinds: set[int] = set()
        self.look_ups: list[LookUp] = []
        self.by_key: dict[int, tuple[Any, Callable[[Any], Hashable]]] = {}
        self._changing: set[tuple[int, str]] = set()

    def may_change(self, keys: Collection[tuple[int, str]]) -> None:
        """These places, by their keys (`Place.key`), are not noted, whoever notes them, before or after."""
        self._changing |= set(keys)
        if keys:
            self.look_ups = [each for each in self.look_ups if self._key(*each) not in self._changing]

    def leave_out(self, places: Collection[tuple[dict, str]]) -> None:
        """What these dicts have under these keys may change, though it was noted; that they have it may not."""
        self.may_change([(id(box), name) for box, name in places])
        whole = {id(box): box for box, _ in places if id(box) in self.boxes and id(box) not in self.keys_alone}
        self.forget(whole.values())
        for box in whole.values():
            for name in box:
                self.item(box, name)
            self.keyed(box, tuple)

    def forget(self, boxes: Collection[Any]) -> None:
        """The contents of these dicts and lists may change, though they were noted."""
        ids = frozenset(map(id, boxes))
        self.look_ups = [each for each in self.look_ups if id(getattr(each[0], "__self__", None)) not in ids]
        for key in ids:
            self.boxes.pop(key, None)
            self.by_key.pop(key, None)

    def is_changing(self, box: Any, name: Any) -> bool:
        """Whether this is such a place."""
        return bool(self._changing) and isinstance(name, str) and (id(box), name) in self._changing

    @staticmethod
    def _key(get: Callable[..., Any], of: Any) -> tuple[int, str]:
        if get is _content:
            return id(of), ""
        return (id(getattr(get, "__self__", None)), of) if isinstance(of, str) else (0, "")

    def box(self, box: Any) -> None:
        """The contents of a dict, list, set or deque, in their order."""
        self.boxes[id(box)] = box

    def keys(self, box: dict) -> None:
        """The keys of a dict, and not its values."""
        self.boxes[id(box)] = box
        self.keys_alone.add(id(box))

    def object(self, x: Any, without: Collection[str] = ()) -> None:
        """The class and the attributes of an object. without: the names of those that may change."""
        self.objects[id(x)] = x
        own = vars(x)
        if not without:
            self.boxes[id(own)] = own
            return
        for name in own:
            if name not in without:
                self.item(own, name)
        self.keyed(own, partial(_names_in, without=frozenset(without)))

    def kind(self, kind: type, without: Collection[str] = ()) -> None:
        """The attributes that a class has itself, and what it inherits from. without: the names of those that may
        change."""
        self.kinds[id(kind)] = kind
        if without:
            self._parted_kinds.add(id(kind))
            for name in vars(kind).keys() - without:
                self.item(vars(kind), name)

    def whole_kinds(self) -> list[type]:
        """The classes all of whose attributes were noted."""
        return [kind for key, kind in self.kinds.items() if key not in self._parted_kinds]

    def slot(self, x: Any, name: str) -> None:
        """What an object has in a slot, be it nothing."""
        self.look_ups.append((partial(getattr, x), name))

    def item(self, box: dict, key: Any) -> None:
        """What a dict has under a key, be it nothing."""
        if not self.is_changing(box, key):
            self.look_ups.append((box.get, key))

    def kind_of(self, x: Any) -> None:
        """The class of an object."""
        self.typed[id(x)] = x

    def place(self, x: Any) -> None:
        """The dict of an object's attributes, and not what is in it."""
        self.look_ups.append((_attributes, x))

    def function(self, fn: types.FunctionType) -> None:
        """What a function does: its code, its defaults and its attributes."""
        self.functions[id(fn)] = fn
        if fn.__kwdefaults__:
            self.box(fn.__kwdefaults__)
        self.object(fn)

    def keyed(self, x: Any, key: Callable[[Any], Hashable]) -> None:
        """What an object holds that no identities tell, such as the numbers of an array, by a key of it."""
        self.by_key[id(x)] = x, key

    def cell(self, cell: types.CellType) -> None:
        """The value of a variable around a function."""
        if not self.is_changing(cell, ""):
            self.look_ups.append((_content, cell))

    def snapshot(self) -> Snapshot:
        """What was noted, as it is now.

        >>> reads, numbers = Reads(), [1, 2]
        >>> reads.box(numbers)
        >>> same = reads.snapshot()
        >>> same.holds(), numbers.append(3), same.holds()
        (True, None, False)
        """
        return Snapshot(self)


class Snapshot:
    """What was noted, as it was when this was made.

    Dicts to which nobody has written are not looked through, be they of modules, objects or classes. One that was
    written to and holds what it held, as where a flag was set and taken back, is looked through at the next calls.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads, self._busy, self._calls = reads, frozenset[int](), 0
        self._empty = [box for box in reads.boxes.values() if not box]
        self._objects = list(reads.objects.values())
        self._attributes = list(map(vars, self._objects))
        others = (box for box in reads.boxes.values() if type(box) not in OF_ONE_CLASS)
        self._typed = [*self._objects, *reads.typed.values(), *others]
        self._types = list(map(type, self._typed))
        self._kinds = list(reads.kinds.values())
        self._mros = list(map(_mro, self._kinds))
        self._functions = list(reads.functions.values())
        self._of_functions = list(self._all_of_functions())
        self._keyed = [(x, key, key(x)) for x, key in reads.by_key.values()]
        self._part()

    def _part(self) -> None:
        """Part what is in dicts to which nobody writes from what has to be looked through."""
        empty, quiet = set(map(id, self._empty)), dict[int, dict]()
        parts = _Contents(self._reads), _Contents(self._reads)

        def part(of: Any) -> _Contents:
            behind = _torch.dict_behind(of)
            if behind is None or id(behind) in self._busy:
                return parts[0]
            quiet[id(behind)] = behind
            return parts[1]

        for box in self._reads.boxes.values():
            if id(box) not in empty:
                part(box).add_box(box)
        for kind in self._kinds:
            part(vars(kind)).add_kind(kind)
        for each in self._reads.look_ups:
            part(_box_of(each)).add_look_up(each)
        self._looked_through, self._told = (each.noted() for each in parts)
        self._unwritten = _torch.Unwritten(quiet.values())

    def _all_of_functions(self) -> chain:
        return chain.from_iterable(map(_parts_of_function, self._functions))

    def holds(self) -> bool:
        """Whether all is as it was."""
        same = (
            not any(self._empty)
            and all(map(is_, self._all_of_functions(), self._of_functions))
            and all(map(is_, map(type, self._typed), self._types))
            and all(map(is_, map(vars, self._objects), self._attributes))
            and all(map(is_, map(_mro, self._kinds), self._mros))
            and self._looked_through.hold()
            and (self._unwritten.are_so() or self._hold_though_written())
            and all(key(x) == before for x, key, before in self._keyed)  # last: they may ask for what is noted above
        )
        if same and self._busy:
            self._settle()
        return same

    def _settle(self) -> None:
        """After some calls, see whether somebody still writes: a model may have been set to evaluate once an epoch."""
        self._calls += 1
        if self._calls == CALLS_UNTIL_SETTLED:
            self._calls, self._busy = 0, frozenset()
            self._part()

    def _hold_though_written(self) -> bool:
        written = self._unwritten.written()
        if not self._told.hold():
            return False
        self._busy |= set(map(id, written))
        self._part()
        return True


class _Contents:
    """What is in boxes and classes, and what look-ups give: all of it is compared."""

    def __init__(self, reads: Reads) -> None:
        self._keys_alone, self._whole = reads.keys_alone, set(map(id, reads.whole_kinds()))
        self._boxes: list[Any] = []
        self._kinds: list[type] = []
        self._look_ups: list[LookUp] = []

    def add_box(self, box: Any) -> None:
        self._boxes.append(box)

    def add_kind(self, kind: type) -> None:
        self._kinds.append(kind)

    def add_look_up(self, each: LookUp) -> None:
        self._look_ups.append(each)

    def noted(self) -> _Contents:
        """The same with what all of it is now."""
        self._lengths = list(map(len, self._boxes))
        self._named = [box for box in self._boxes if isinstance(box, dict) and {*map(type, box)} == {str}]
        named = set(map(id, self._named))
        self._others = [box for box in self._boxes if id(box) not in named]
        self._names = list(chain.from_iterable(self._named))
        self._keys = list(chain.from_iterable(self._others))
        self._dicts = [box for box in self._boxes if isinstance(box, dict) and id(box) not in self._keys_alone]
        self._values = list(self._all_values())
        self._lengths_of_kinds = list(map(len, map(vars, self._kinds)))
        self._of_kinds = [vars(kind) for kind in self._kinds if id(kind) in self._whole]
        self._in_kinds = list(self._all_in_kinds())
        found = [(each, each[0](each[1], _NOTHING)) for each in self._look_ups]
        models = [(each, x) for each, x in found if isinstance(x, (nn.Module, Optimizer))]
        self._models = [(each, weakref.ref(x)) for each, x in models]
        others = [(each, x) for each, x in found if not isinstance(x, (nn.Module, Optimizer))]
        self._asked, self._found = [each for each, _ in others], [x for _, x in others]
        return self

    def _all_values(self) -> chain:
        return chain.from_iterable([box.values() for box in self._dicts])

    def _all_in_kinds(self) -> chain:
        return chain.from_iterable([own.values() for own in self._of_kinds])

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        return (
            list(map(len, self._boxes)) == self._lengths
            and all(map(is_, self._all_values(), self._values))
            and list(chain.from_iterable(self._named)) == self._names
            and all(map(is_, chain.from_iterable(self._others), self._keys))
            and list(map(len, map(vars, self._kinds))) == self._lengths_of_kinds
            and all(map(is_, self._all_in_kinds(), self._in_kinds))
            and all(map(is_, [get(key, _NOTHING) for get, key in self._asked], self._found))
            and all(get(key, _NOTHING) is model() for (get, key), model in self._models)
        )


def _box_of(each: LookUp) -> Any:
    """The dict in which something is looked up as any dict does it; None where it is found in another way."""
    get, _ = each
    return get.__self__ if isinstance(get, types.BuiltinMethodType) else None


def _names_in(box: dict, without: frozenset[str]) -> tuple[str, ...]:
    return tuple([name for name in box if name not in without])


def _attributes(x: Any, otherwise: Any) -> Any:
    return getattr(x, "__dict__", otherwise)


def _content(cell: types.CellType, otherwise: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return otherwise
