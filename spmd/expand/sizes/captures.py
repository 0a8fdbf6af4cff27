"""The captures of a step: which one is right for a call, and why a call needs another one."""

from __future__ import annotations

import itertools
import logging
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from spmd._torch import OpOverload
from spmd.expand.arithmetic import FUNCTIONS
from spmd.expand.asked import environment_differs
from spmd.expand.captured import Captured
from spmd.expand.counters import CountersFound, changed_numbers
from spmd.expand.guards import FLAGS
from spmd.expand.kept_numbers import Apart
from spmd.expand.recent import Recent
from spmd.expand.sizes.saying import Guards, difference
from spmd.expand.sizes.sources import Shapes
from spmd.expand.unread_attributes import Names, changed
from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.tensor.spec import Spec, contiguous

MANY_ALONE = 3
"""Of so many captures that were right for one call alone a line in the log tells."""

MOST_CAPTURES = 64
"""The most captures that a compiled step keeps."""

log = logging.getLogger("spmd")


class Captures:
    """The captures of one step, by their guards. title: of the step, for messages. how: what else the captures of two
    steps of one function have to have in common.

    A capture is of one device. So the steps of a function on several meshes, or with several placements, share theirs.
    apart: the tensors of the state that were found not to be one number.
    """

    def __init__(self, fn: Callable, title: str, mesh: DeviceMesh, how: Hashable = ()):
        self._fn, self._title, self._mesh, self._how = fn, title, mesh, how
        self._kept: Recent[Captured] = Recent(MOST_CAPTURES)
        self.apart = Apart()
        self._last: Guards = {}
        self._said: set[str] = set()
        self._alone = 0
        self._steps = _steps_of(fn)
        self._steps.add(self)

    def of(self, call: Any, make: Callable[[Names], Captured]) -> Captured:
        """A capture that is right for a call. Where there is none, says once why, and makes it.

        make: is given the attributes of modules that are not what they were in the last call.
        """
        guards, shapes = guards_of(call.key), {path: spec.shape for path, spec in call.leaf_specs.items()}
        keys, why = [_key(guards_of(key)) for key in call.keys], [""]
        if self._last and not any(True for _ in self._kept.of(keys)):
            why = [difference(self._last, guards, self._fn)]
        with self._steps.lock:
            found = self._kept.find(keys, lambda each: self._serves(each, call, shapes, why))
            if found is None:
                self._say(why[-1])
                names = changed(self._last, guards)
                if names and (numbers := changed_numbers(self._last, guards, names)):
                    raise CountersFound(numbers)
                found = self._of_others(call, shapes) or make(names)
                if found.is_for_one_call:  # what changes Python state is right for one call alone
                    self._count(found)
                else:
                    self._keep(found, call)
        self._last = guards_of(call.key)
        return found

    def _of_others(self, call: Any, shapes: Shapes) -> Captured | None:
        """A capture of another step of the function."""
        keys = [self._anywhere(key) for key in call.keys]
        found = (step._kept.find(keys, lambda each: self._serves(each, call, shapes, [])) for step in self._steps)
        return next((captured for captured in found if captured is not None), None)

    def _anywhere(self, key: tuple) -> tuple:
        """The key of a capture for the steps of the function on other meshes."""
        return self._how, self._mesh.device_type, _key(guards_of(key, anywhere=True))

    def _serves(self, captured: Captured, call: Any, shapes: Shapes, why: list[str]) -> bool:
        """Whether a capture is right for a call. If not, adds the reason to `why`, but for branches on numbers: each
        side is a capture."""
        numbers = {**call.numbers, **call.numbers_in(captured.watched)}
        if parted := captured.parted(numbers):
            why.append(parted)
            for several in captured.equal.values():
                self.apart.note(several, numbers)
            return False
        if not captured.decides_alike(numbers, shapes):
            if asked := environment_differs(captured.environment):
                why.append(asked)
            return False
        failed = captured.failed(shapes, call.numbers, self._mesh)
        if failed is not None:
            why.append(str(failed))
        return failed is None

    def _keep(self, captured: Captured, call: Any) -> None:
        """Keep a capture. If there are too many, forget the least recently used one, the same on all ranks."""
        several = call.keys_of(captured)
        keys = [_key(guards_of(key)) for key in several]
        if _names_no_mesh(captured):
            keys += [self._anywhere(key) for key in several]
        if self._kept.keep(captured, keys):
            warnings.warn(
                f"{self._title} was captured in {MOST_CAPTURES} versions, and the oldest is forgotten: something that "
                "is neither a size nor a float changes from call to call. The log of spmd says what it is.",
                stacklevel=6,
            )

    def _count(self, found: Captured) -> None:
        """Say once where one call after the other is captured because the step changes Python values in each."""
        self._alone += 1
        if self._alone == MANY_ALONE:
            what = found.writes[0].path if found.writes else "a value in a module"
            _warn(self._mesh, f"{self._title} is captured in each call: it changes {what}, which no program does")

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


class _Steps:
    """The captures of all steps of one function, as long as they live. lock: ranks may be threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._all: weakref.WeakSet[Captures] = weakref.WeakSet()

    def add(self, captures: Captures) -> None:
        with self.lock:
            self._all.add(captures)

    def __iter__(self) -> Iterator[Captures]:
        return iter(list(self._all))


_of_functions: weakref.WeakKeyDictionary[Callable, _Steps] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _steps_of(fn: Callable) -> _Steps:
    """The steps of a function. One that cannot be a key, such as a method, has each step for itself."""
    if not isinstance(fn, types.FunctionType):
        return _Steps()
    with _lock:
        return _of_functions.setdefault(fn, _Steps())


def _names_no_mesh(captured: Captured) -> bool:
    """Whether all nodes are torch's ops, or arithmetic of numbers: none belongs to one mesh, as a `local_map` does."""
    targets = [node.target for node in captured.graph.nodes if node.op == "call_function"]
    return all(isinstance(t, (OpOverload, types.BuiltinFunctionType)) or t in FUNCTIONS for t in targets)


# ---- guards -----------------------------------------------------------------------------------


def guards_of(key: tuple, anywhere: bool = False) -> Guards:
    """All that the key of a call has, by name, but for the sizes and places of its arguments.

    A capture is of global tensors: an argument that lies elsewhere needs another program, and no other capture.
    anywhere: leave out the mesh and the places of the state, too.
    """
    structure, flags, deterministic, arguments, constants, *layouts = key
    found: dict[Any, Any] = {"the structure of the arguments": structure, "deterministic": deterministic}
    found |= {f"flag {name}": x for name, x in zip(FLAGS, flags, strict=True)}
    found |= {slot: _global(rest) if anywhere else tuple(rest) for slot, *rest in itertools.chain(*layouts)}
    found |= {path: _captured_of(x, anywhere) for path, x in arguments}
    return found | dict(constants)


def _global(layout: list) -> tuple:
    """What a capture depends on of a tensor of the state."""
    return tuple((x.shape, x.stride, x.dtype) if isinstance(x, Spec) else x for x in layout)


def _key(guards: Guards) -> tuple:
    return tuple(guards.items())


def _captured_of(x: Any, anywhere: bool) -> Any:
    if not isinstance(x, tuple) or not x or not isinstance(x[0], Spec):
        return x
    spec, device = x
    # The order of strides is that of the dims in memory.
    plain = spec.stride == contiguous(spec.shape)
    order = () if plain else tuple(sorted(range(spec.ndim), key=lambda d: (spec.stride[d], d)))
    return None if anywhere else spec.mesh, spec.ndim, spec.dtype, order, device

