"""The captures of a step: which one is right for a call, and why a call needs another one."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

from spmd.expand.capture import Captured
from spmd.expand.recent import Recent
from spmd.expand.sizes.saying import Guards, difference
from spmd.expand.sizes.sources import Shapes
from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.tensor.spec import Spec, contiguous

MOST_CAPTURES = 64
"""The most captures that a compiled step keeps."""

log = logging.getLogger("spmd")


class Captures:
    """The captures of one step, by their guards. title: of the step, for messages."""

    def __init__(self, fn: Callable, title: str, mesh: DeviceMesh):
        self._fn, self._title, self._mesh = fn, title, mesh
        self._kept: Recent[Captured] = Recent(MOST_CAPTURES)
        self._last: Guards = {}
        self._said: set[str] = set()

    def of(self, call: Any, make: Callable[[], Captured]) -> Captured:
        """A capture that is right for a call. Where there is none, says once why, and makes it."""
        guards, shapes = guards_of(call.key), {path: spec.shape for path, spec in call.leaf_specs.items()}
        keys, why = [_key(guards_of(key)) for key in call.keys], [""]
        if self._last and not any(True for _ in self._kept.of(keys)):
            why = [difference(self._last, guards, self._fn)]
        found = self._kept.find(keys, lambda each: self._serves(each, call, shapes, why))
        if found is None:
            self._say(why[-1])
            found = make()
            if not found.changes:  # what changes Python state is right for one call alone
                self._keep(found, call)
        self._last = guards
        return found

    def _serves(self, captured: Captured, call: Any, shapes: Shapes, why: list[str]) -> bool:
        """Whether a capture is right for a call. If its sizes are the reason why not, adds that to `why`."""
        if not captured.holds({**call.numbers, **call.numbers_in(captured.watched)}):
            return False  # a branch on a number: each side is a capture
        failed = captured.failed(shapes, call.numbers, self._mesh)
        if failed is not None:
            why.append(str(failed))
        return failed is None

    def _keep(self, captured: Captured, call: Any) -> None:
        """Keep a capture. If there are too many, forget the least recently used one, the same on all ranks."""
        if self._kept.keep(captured, [_key(guards_of(key)) for key in call.keys_of(captured)]):
            warnings.warn(
                f"{self._title} was captured in {MOST_CAPTURES} versions, and the oldest is forgotten: something that "
                "is neither a size nor a float changes from call to call. The log of spmd says what it is.",
                stacklevel=6,
            )

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
    """All that the key of a call has, by name, but for the sizes and places of its arguments.

    A capture is of global tensors: an argument that lies elsewhere needs another program, and no other capture.
    """
    structure, modes, deterministic, arguments, constants, *layouts = key
    found: dict[Any, Any] = {
        "the structure of the arguments": structure, "the modes around the call": modes,
        "deterministic": deterministic,
    }  # fmt: skip
    found |= {slot: tuple(rest) for slot, *rest in itertools.chain(*layouts)}
    found |= {path: _captured_of(x) for path, x in arguments}
    return found | dict(constants)


def _key(guards: Guards) -> tuple:
    return tuple(guards.items())


def _captured_of(x: Any) -> Any:
    if not isinstance(x, tuple) or not x or not isinstance(x[0], Spec):
        return x
    spec, device = x
    # The order of strides is that of the dims in memory.
    plain = spec.stride == contiguous(spec.shape)
    order = () if plain else tuple(sorted(range(spec.ndim), key=lambda d: (spec.stride[d], d)))
    return spec.mesh, spec.ndim, spec.dtype, order, device
