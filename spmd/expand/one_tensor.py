"""Arguments that are one tensor, with each other or with a tensor of the state or in an attribute.

    step(x, x)             x is y in the step, and what it does to x it does to y
    step(model, model.mask)

Which are one is a guard of a program; in a trace one tensor stands for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Pairs = tuple[tuple[str, str], ...]


def ones(known: Mapping[str, Any], arguments: Mapping[str, Any]) -> Pairs:
    """The arguments that are a known tensor, or an earlier argument, each with that, by path.

    >>> x = torch.ones(2)
    >>> ones({"model.mask": x}, {"a": x, "b": x + 1, "c": x})
    (('a', 'model.mask'), ('c', 'model.mask'))
    """
    tensors = {path: x for path, x in arguments.items() if isinstance(x, torch.Tensor)}
    first: dict[int, str] = {}
    for path, x in (*known.items(), *tensors.items()) if tensors else ():
        first.setdefault(id(x), path)
    return tuple([(path, first[id(x)]) for path, x in tensors.items() if first[id(x)] != path])


def places(tensors: list[Any]) -> list[int]:
    """For each of these the place of the first that is the same one.

    >>> places([a := object(), object(), a])
    [0, 1, 0]
    """
    found = list(map(id, tensors))
    return list(range(len(found))) if len(set(found)) == len(found) else [found.index(i) for i in found]
