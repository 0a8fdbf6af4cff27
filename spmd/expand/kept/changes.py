"""What a step changes in the Python state of modules, by the place of each container that it changes.

    [("model", (), {"ready": True}, ())]                            vars(model)["ready"] = True
    [("model.layers.0", ("config", "__dict__"), {"rate": 0.5}, ())]   an attribute of an object
    [("model", ("names",), ["a", "b"], None)]                       a list gets these contents

A program with such changes is right for modules that were not changed yet. Its key says so: it has their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from spmd.expand.guards import GUARDED_APART, MAX_DEPTH
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.modules import named_within
from spmd.expand.python_state import LEFT, Container, Contents, boxes

Changes = list[tuple[str, tuple, Any, tuple | None]]
"""For each container: the module and the keys that lead to it; what it gets, and of a dict the keys that go."""


def as_value(changes: Contents, modules: Mapping[str, nn.Module]) -> Changes:
    """Changes that were not made yet, by place. modules: the modules that a step is given, by path."""
    places = {id(box): place for place, box in _places(modules)}
    if any(id(box) not in places for box, _ in changes):
        raise CannotKeep("the step changes Python values outside of modules")
    return [(*places[id(box)], *_difference(box, new)) for box, new in changes]


def contents_of(value: Changes, modules: Mapping[str, nn.Module]) -> Contents:
    """The same changes for the containers of these modules."""
    found = dict(_places(modules)) if value else {}
    return [(found[path, steps], _changed(found[path, steps], new, gone)) for path, steps, new, gone in value]


def _places(modules: Mapping[str, nn.Module]) -> Iterator[tuple[tuple[str, tuple], Container]]:
    named = named_within(modules)
    seen = {id(vars(m)[name]) for _, m in named for name in GUARDED_APART if name in vars(m)}
    for path, m in named:
        for steps, box in boxes(vars(m), seen, MAX_DEPTH):
            yield (path, steps), box


def _difference(box: Container, new: Any) -> tuple[Any, tuple | None]:
    if not isinstance(box, dict):
        return type(box)(new), None
    changed = {key: x for key, x in new.items() if x is not LEFT and (key not in box or box[key] is not x)}
    gone = tuple(key for key in box if key not in new)
    if list(_changed(box, changed, gone)) != list(new):
        raise CannotKeep("the step brings entries of a dict of a module into another order")
    return changed, gone


def _changed(box: Container, new: Any, gone: tuple | None) -> Any:
    return new if gone is None else {key: x for key, x in {**box, **new}.items() if key not in gone}
