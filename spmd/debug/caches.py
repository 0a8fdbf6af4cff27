"""The caches of spmd: how many entries each has, and how many it may have.

Caches change nothing but the speed, so any of them may be cleared. They are bounded, so that a job with many shapes
needs no more memory after a million ops than after a thousand.

    >>> import spmd.debug
    >>> all(cache.most is None or cache.entries <= cache.most for cache in spmd.debug.caches())
    True

Left out: the programs of a compiled step, which belong to the step (`CompiledStep.programs`).
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
    """One cache: its entries now, and the most it may have. None: as many as there are ops, groups or live tensors."""

    name: str
    entries: int
    most: int | None

    def __str__(self) -> str:
        bound = "" if self.most is None else f" of {self.most:,}"
        return f"{self.name}: {self.entries:,}{bound}"


class CacheSizes(tuple):
    """The caches of this process, the one with most entries first."""

    @property
    def entries(self) -> int:
        """The entries of all caches together."""
        return sum(cache.entries for cache in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def caches() -> CacheSizes:
    """The sizes and bounds of all caches of this process. Print it for a table."""
    found = {
        "spmd.tensor.redistribute.plan.plan": (len(plan._plans), plan.MOST_PLANS),
        "spmd.tensor.spec.Spec": (len(_interned), None),  # the live specs
    }
    for name, module in sorted(sys.modules.items()):
        if name.startswith("spmd."):
            found.update(_caches_of(module))
    sizes = [CacheSize(name, entries, most) for name, (entries, most) in found.items()]
    return CacheSizes(sorted(sizes, key=lambda cache: (-cache.entries, cache.name)))


def _caches_of(module: ModuleType) -> Iterator[tuple[str, tuple[int, int | None]]]:
    for name, value in vars(module).items():
        if isinstance(value, Cache) and not any(vars(m).get(name) is value for m in _earlier_modules(module)):
            yield f"{module.__name__}.{name}", (len(value), value.maxsize)
        elif isinstance(value, _LRU) and value.__module__ == module.__name__:
            info = value.cache_info()
            yield f"{module.__name__}.{name}", (info.currsize, info.maxsize)


def _earlier_modules(module: ModuleType) -> Iterator[ModuleType]:
    """The modules of spmd that come before this one by name. A cache that is also in one of them is counted there."""
    return (m for name, m in sys.modules.items() if name.startswith("spmd.") and name < module.__name__)
