"""The captures of a step: which one is right for a call, and why a call needs another one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from spmd.expand.capture import Captured
from spmd.expand.kept_numbers import numbers_in
from spmd.expand.sizes.saying import Guards, difference
from spmd.expand.sizes.sources import Shapes
from spmd.expand.state import Tensors
from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.tensor.spec import Spec, contiguous

MOST_CAPTURES = 64
"""The most captures that a compiled step keeps."""

log = logging.getLogger("spmd")


class Captures:
    """The captures of one step, by their guards; those used last are at the end. title: of the step, for messages."""

    def __init__(self, fn: Callable, title: str, mesh: DeviceMesh):
        self._fn, self._title, self._mesh = fn, title, mesh
        self._kept: dict[tuple, list[Captured]] = {}
        self._said: set[str] = set()

    def at(self, call: Any, make: Callable[[], Captured]) -> Captured:
        """A capture that is right for a call, at its sizes. Where there is none, says once why, and makes it."""
        guards, shapes = guards_of(call.key), {path: spec.shape for path, spec in call.leaf_specs.items()}
        found = self._find(guards, call.numbers, call.tensors, shapes)
        if found is None:
            found = make()
            self._keep(guards, found)
        return found.at(shapes, call.numbers)

    def _find(
        self, guards: Guards, numbers: Mapping[str, float], tensors: Tensors, shapes: Shapes
    ) -> Captured | None:
        key = tuple(guards.items())
        why = ""
        for captured in self._kept.get(key, ()):
            if not captured.holds({**numbers, **numbers_in(tensors, captured.watched)}):
                continue  # a branch on a number: each side is a capture
            failed = captured.failed(shapes, numbers, self._mesh)
            if failed is None:
                self._kept[key] = self._kept.pop(key)
                return captured
            why = str(failed)
        if key not in self._kept and self._kept:
            why = difference(dict(next(reversed(self._kept))), guards, self._fn)
        self._say(why)
        return None

    def _keep(self, guards: Guards, captured: Captured) -> None:
        """Keep a capture. If there are too many, forget the least recently used one, the same on all ranks."""
        if captured.changes:  # what changes Python state is right for one call alone
            return
        if sum(map(len, self._kept.values())) >= MOST_CAPTURES:
            oldest = next(iter(self._kept))
            self._kept[oldest].pop(0)
            if not self._kept[oldest]:
                del self._kept[oldest]
            warnings.warn(
                f"{self._title} was captured in {MOST_CAPTURES} versions, and the oldest is forgotten: something that "
                "is neither a size nor a float changes from call to call. The log of spmd says what it is.",
                stacklevel=6,
            )
        self._kept.setdefault(tuple(guards.items()), []).append(captured)

    def _say(self, why: str) -> None:
        """One line, once for each reason."""
        if why and why not in self._said:
            self._said.add(why)
            _warn(self._mesh, f"{self._title} is captured anew: {why}")


@per_rank
def _warn(mesh: DeviceMesh, text: str) -> None:
    """Write a line into the log, from the first rank of the mesh."""
    if current_rank() == mesh.ranks[0]:
        log.warning(text)


# ---- guards -----------------------------------------------------------------------------------


def guards_of(key: tuple) -> Guards:
    """All that the key of a call has, by name, but for the sizes of its arguments."""
    structure, modes, deterministic, layout, arguments, constants = key
    found: dict[Any, Any] = {
        "the structure of the arguments": structure, "the modes around the call": modes,
        "deterministic": deterministic,
    }  # fmt: skip
    found |= {slot: tuple(rest) for slot, *rest in layout}
    found |= {path: _without_sizes(x) for path, x in arguments}
    return found | dict(constants)


def _without_sizes(x: Any) -> Any:
    if not isinstance(x, tuple) or not x or not isinstance(x[0], Spec):
        return x
    spec, device = x
    # The order of strides is that of the dims in memory.
    plain = spec.stride == contiguous(spec.shape)
    order = () if plain else tuple(sorted(range(spec.ndim), key=lambda d: (spec.stride[d], d)))
    return spec.mesh, spec.ndim, spec.dims, spec.partial, spec.dtype, order, device
