"""A number in a captured graph that depends on sizes: Python text over the names of symbols.

    view(x, [Size("x0 * x1"), 8])     at {"x0": 4, "x1": 6}      view(x, [24, 8])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmd import _torch


@dataclass(frozen=True)
class Size:
    """A number that follows from symbols. text: an expression that may use `math` and `torch`."""

    text: str

    def __repr__(self):
        return self.text


Shape = tuple[int | Size, ...]


def evaluated(texts: tuple[str, ...], values: Mapping[str, float]) -> tuple[Any, ...]:
    """The values of expressions, in order.

    >>> evaluated(("x0 * x1", "x0 // 3 == 1"), {"x0": 4, "x1": 6})
    (24, True)
    """
    return _function(texts, tuple(values))(*values.values())


@functools.lru_cache(maxsize=256)
def _function(texts: tuple[str, ...], names: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    code = f"lambda {', '.join(names)}: ({''.join(f'({text}), ' for text in texts)})"
    return eval(code, dict(_torch.NAMES))
