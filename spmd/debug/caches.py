"""What spmd keeps in order to be fast, and how much of it there may be.

Nothing that is kept depends on what was called before, but for time: a cache may be cleared, and is bounded, so that a
job of many shapes runs in as much memory after a million ops as after a thousand.

    >>> import spmd.debug
    >>> all(cache.most is None or cache.entries <= cache.most for cache in spmd.debug.caches())
    True

Left out: the programs of a compiled step, which are its own (`CompiledStep.programs`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from spmd.tensor.cache import Cache
from spmd.tensor.redistribute import plan
from spmd.tensor.spec import _interned

_LRU = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True)
class CacheSize:
    """One cache: what it holds now, and at most; None where as much as there are ops, groups, or tensors alive."""

    name: str
    entries: int
    most: int | None

    def __str__(self) -> str:
        bound = "" if self.most is None else f" of {self.most:,}"
        return f"{self.name}: {self.entries:,}{bound}"


class CacheSizes(tuple):
    """The caches of this process, the fullest first."""

    @property
    def entries(self) -> int:
        """Of all of them."""
        return sum(cache.entries for cache in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def caches() -> CacheSizes:
    """How much is kept in each cache of this process, and how much may be; print it."""
    found = {
        "spmd.tensor.redistribute.plan.plan": (len(plan._plans), plan.MOST_PLANS),
        "spmd.tensor.spec.Spec": (len(_interned), None),  # those alive
    }
    for name, module in sorted(sys.modules.items()):
        if name.startswith("spmd."):
            found.update(_caches_of(module))
    sizes = [CacheSize(name, entries, most) for name, (entries, most) in found.items()]
    return CacheSizes(sorted(sizes, key=lambda cache: (-cache.entries, cache.name)))


def _caches_of(module: ModuleType) -> Iterator[tuple[str, tuple[int, int | None]]]:
    for name, value in vars(module).items():
        if isinstance(value, Cache) and not any(vars(m).get(name) is value for m in _before(module)):
            yield f"{module.__name__}.{name}", (len(value), value.maxsize)
        elif isinstance(value, _LRU) and value.__module__ == module.__name__:
            info = value.cache_info()
            yield f"{module.__name__}.{name}", (info.currsize, info.maxsize)


def _before(module: ModuleType) -> Iterator[ModuleType]:
    """Modules by whose name what this one imported is counted already."""
    return (m for name, m in sys.modules.items() if name.startswith("spmd.") and name < module.__name__)
