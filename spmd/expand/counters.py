"""Numbers that a step keeps in Python, from call to call: ints and floats in attributes and variables that it sets.

    self.updates += 1                                    in a module, an optimiser, or an object around the step
    decay = min(0.99, (1 + self.updates) / (10 + self.updates))

    state["step"] += 1                                   in what an optimiser keeps for a parameter, or for a group

Such a number is an input of the program and a symbol, as an int among the arguments is, and what the step makes of it
is a result. Branches on it are conditions of the program, as those on arguments.

Which numbers these are is read off the code: those in attributes and variables that the user's code sets. What other
code sets, as that of a library, is found by the first capture, which then begins again (`CountersFound`). So are
numbers of classes, and those deeper in what modules and optimisers hold, also beside tensors. So are numbers that have
changed between two calls, such as `model.temperature *= 0.99`: they are symbols from then on.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from spmd import _torch
from spmd.expand.bytecode import instructions
from spmd.expand.closed_over import MAKING, Search
from spmd.expand.modules import OF_ALL_MODULES
from spmd.expand.python_state import RENEWED, PythonState
from spmd.expand.state import IS_COUNTER, State, held_by, own_attributes
from spmd.expand.variables import Place, assigned_variables

KINDS = (int, float)

Names = Mapping[str, frozenset[Any]]
"""Names of attributes, by the path of the module or the optimiser; of what is in one, the steps that lead there."""

Counters = dict[str, Place]
"""Where the numbers are, by path."""


class CountersFound(BaseException):
    """A capture took numbers for constants that are none. names: which.

    It is no error of the step, and none that a capture would try to do without.
    """

    def __init__(self, names: Names) -> None:
        super().__init__(f"numbers that change: {dict(names)}")
        self.names = names


def counters_of(state: State, search: Search, known: Names) -> Counters:
    """The numbers that a step keeps. search: what its code names. known: those that were found besides."""
    codes = [fn.__code__ for fn in search.functions if fn.__name__ not in MAKING]
    assigned = frozenset().union(*map(_assigned_attributes, codes))
    found = _Found()
    owners = owners_of(state)
    held = _Held(owners)
    known = all_names(known, _inner_names(known, held))
    for path, owner in owners.items():
        _add(found, path, owner, assigned | known.get(path, frozenset()))
        inner = [each for each in known.get(path, ()) if isinstance(each, tuple)]
        for steps in sorted(inner, key=lambda each: RENEWED not in each):
            if (place := _inside(held[path], owner, steps)) is not None:
                _put(found, _path_of(path, owner, steps), place)
    for kind in dict.fromkeys(base for each in search.classes for base in each.__mro__) if known else ():
        _add(found, path := path_of_class(kind), kind, known.get(path, frozenset()))
    for name, place in assigned_variables(search):
        if type(place.value) in KINDS:
            _put(found, f"{name} around the step", place)  # no argument has such a name
    return dict(found)


def _add(found: _Found, path: str, owner: Any, names: frozenset[str]) -> None:
    """The numbers among the attributes of an object that have one of these names."""
    for name in numbers_of(owner) if names else ():
        if name in names:
            _put(found, f"{path}.{name}", Place(owner, name))


class _Held(dict):
    """What each of these holds (`held_by`), by path, found when it is asked for first: of an optimiser that is all that
    it keeps for its parameters."""

    def __init__(self, owners: Mapping[str, Any]) -> None:
        super().__init__()
        self.owners = owners

    def __missing__(self, path: str) -> dict[str, Any]:
        self[path] = held_by(self.owners[path])
        return self[path]


def path_of_class(kind: type) -> str:
    """The path of a class, whose numbers a step may count: no argument has such a name."""
    return f"class {kind.__qualname__}"


def _inner_names(known: Names, held: _Held) -> Names:
    """For names of what is in no owner itself, as a saved step has them: the steps from the owner around it."""
    found: dict[str, frozenset[Any]] = {}
    owners = held.owners
    inner = [(path, name) for path in sorted(known.keys() - owners.keys()) for name in sorted(known[path])]
    for path, name in inner:
        around = max((each for each in owners if path.startswith(f"{each}.")), key=len, default=None)
        if around is not None:
            steps = _steps(held[around], f"{path}.{name}".removeprefix(f"{around}.").split("."))
            found[around] = found.get(around, frozenset()) | ({steps} if steps else frozenset())
    return found


def _steps(held: dict[str, Any], parts: list[str]) -> tuple:
    """The keys and places that lead to what is called so in what an owner holds; empty where there is no such thing."""
    x, steps = held, []
    for at, part in enumerate(parts):
        if isinstance(x, types.MethodType):
            x = x.__self__
            steps.append("__self__")
        if not isinstance(x, dict | list | tuple) and hasattr(x, "__dict__"):
            x = vars(x)
            steps.append("__dict__")
        within = x if isinstance(x, dict) else range(len(x)) if isinstance(x, list | tuple) else ()
        keys = {str(key): key for key in within}
        if at == 1 and _are_hooks(parts[0]):
            keys = {str(i): key for i, key in enumerate(within)}
        if part not in keys:
            return ()
        steps.append(keys[part])
        x = x[keys[part]]
    return tuple(steps)


def _path_of(path: str, owner: Any, steps: tuple) -> str:
    """The path of what such steps lead to. Hooks are named by their places, and not by torch's numbers, which count all
    hooks of the process."""
    if len(steps) > 1 and _are_hooks(steps[0]):
        steps = (steps[0], list(vars(owner)[steps[0]]).index(steps[1]), *steps[2:])
    return ".".join([path, *(str(step) for step in steps if step not in _THROUGH)])


def _are_hooks(name: Any) -> bool:
    return isinstance(name, str) and "_hooks" in name


_THROUGH = {"__dict__": vars, "__self__": operator.attrgetter("__self__"), RENEWED: lambda x: x}
"""The steps to the attributes of an object, to the object that a method is bound to, and to a list that is made anew:
no path names them."""


def _inside(held: dict[str, Any], module: Any, steps: tuple) -> Place | None:
    """The place of a number in what a module holds; None where there is none now."""
    x = _box(held, steps)
    try:
        around = (_box(held, steps[:-2]), steps[-3]) if RENEWED in steps[-2:] else None
        return Place(x, steps[-1], module, around) if type(x[steps[-1]]) in KINDS else None
    except (KeyError, IndexError, TypeError):
        return None


def _box(held: dict[str, Any], steps: tuple) -> Any:
    """The container in what an owner holds to which all steps but the last lead; None where there is none now."""
    x: Any = held
    try:
        for step in steps[:-1]:
            x = _THROUGH[step](x) if step in _THROUGH else x[step]
        return x
    except (KeyError, IndexError, TypeError):
        return None


class _Found(dict[str, Place]):
    """Counters by path, each place once. places: their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[Any] = set()


def _put(found: _Found, path: str, place: Place) -> None:
    if place.key not in found.places:
        found.places.add(place.key)
        several = sum(path == other or other.startswith(f"{path} (") for other in found) if path in found else 0
        found[f"{path} ({several + 1})" if several else path] = place


@functools.lru_cache(maxsize=1024)
def _assigned_attributes(code: types.CodeType) -> frozenset[str]:
    """The names of attributes that a function, or one inside of it, sets."""
    inner = [_assigned_attributes(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return frozenset(i.value for i in instructions(code) if i.name == "STORE_ATTR").union(*inner)


def numbers_of(owner: Any) -> dict[str, float]:
    """The attributes of an object that are numbers, but for those that torch gives each module or optimiser.

    >>> layer = torch.nn.Linear(2, 3); layer.updates = 1
    >>> numbers_of(layer)
    {'in_features': 2, 'out_features': 3, 'updates': 1}
    """
    own = dict(own_attributes(owner)) if isinstance(owner, Optimizer) else vars(owner)
    return {name: x for name, x in own.items() if type(x) in KINDS and name not in OF_ALL_MODULES}


def all_numbers(state: State) -> dict[tuple[str, Any], float]:
    """Those of all modules and optimisers, by path and name; and the numbers that optimisers keep for parameters, and
    the ints that they keep for groups, by path and steps. Floats of groups are hyper-parameters."""
    found = {(path, name): x for path, owner in owners_of(state).items() for name, x in numbers_of(owner).items()}
    kept = state.kept_by_optimizers().items()
    found |= {(root, ("state", i, key)): x for (root, i, key), x in kept if type(x) in KINDS and type(i) is int}
    for root, optimizer in state.optimizers.items():
        for i, group in enumerate(optimizer.param_groups):
            found |= {(root, ("param_groups", i, *steps)): x for steps, x in _ints_in(group)}
    return found


def _ints_in(box: dict) -> Iterator[tuple[tuple, int]]:
    """The ints in a dict, and in dicts in it, with the keys that lead there."""
    for key, x in box.items():
        if type(x) is int:
            yield (key,), x
        elif type(x) is dict:
            yield from (((key, *steps), n) for steps, n in _ints_in(x))


def owners_of(state: State) -> dict[str, Any]:
    """What may have numbers that a step counts, by path."""
    return state.wholes() | state.optimizers | state.objects


def check_constant(before: Mapping[tuple[str, Any], float], state: State, python: PythonState) -> None:
    """Raise CountersFound if the step has set one of these numbers, which are no counters, to another number, or one in
    what modules hold."""
    owners = owners_of(state)
    held = _Held(owners)
    paths = {id(owner): path for path, owner in owners.items()}
    found: dict[str, frozenset[Any]] = {}
    for (path, name), old in before.items():
        steps = name if isinstance(name, tuple) else (name,)
        now = (_box(held[path], steps) or {}).get(steps[-1]) if path in owners else None
        if now is not old and is_number_or_symbol(now) and not _is_same(old, now):
            found[path] = found.get(path, frozenset()) | {name}
    for module, steps in python.numbers_set(is_number_or_symbol):
        path = paths[id(module)]
        counter = state.counters.get(_path_of(path, module, steps))
        if counter is None or (RENEWED in steps and counter.around is None):
            found[path] = found.get(path, frozenset()) | {steps}
    if found:
        raise CountersFound(found)


def is_number_or_symbol(x: Any) -> bool:
    """Whether a program can have it as a result."""
    return type(x) in KINDS or (_torch.is_symbol(x) and not isinstance(x, torch.SymBool))


def _is_same(old: float, now: Any) -> bool:
    return type(now) is type(old) and repr(now) == repr(old)


def names_of(guards: Iterable[str]) -> Names:
    """The counters among the names of guards, as attributes of what they are attributes of.

    >>> names_of(["model.updates is a counter", "model.p"])
    {'model': frozenset({'updates'})}
    """
    paths = [name.removesuffix(IS_COUNTER).rpartition(".") for name in guards if name.endswith(IS_COUNTER)]
    found: dict[str, frozenset[str]] = {}
    for owner, _, name in paths:
        found[owner] = found.get(owner, frozenset()) | {name}
    return found


def all_names(one: Names, other: Names) -> Names:
    """Those of both."""
    return {path: one.get(path, frozenset()) | other.get(path, frozenset()) for path in {**one, **other}}


def changed_numbers(before: Mapping[Any, Hashable], now: Mapping[Any, Hashable], names: Names) -> Names:
    """Of these attributes, those that were numbers and are numbers. before, now: guards."""
    found = {}
    for path, several in names.items():
        ours, theirs = dict(before[path][1]), dict(now[path][1])
        found[path] = frozenset(x for x in several if _is_number(ours.get(x)) and _is_number(theirs.get(x)))
    return {path: several for path, several in found.items() if several}


def _is_number(guard: Hashable) -> bool:
    return isinstance(guard, tuple) and len(guard) == 2 and guard[0] in KINDS
