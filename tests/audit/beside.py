"""Each call of a compiled step beside the same call on one device, in copies of this process.

    with audited(calls=3) as audit:
        step(model, optimizer, x)          compiled
    audit.found()                          ["train_step, call 0: model.calls: 1 on one device, and compiled 0"]

Before a call the process forks. The child has a copy of all there is: it turns what is on a mesh into the tensors of
one device, calls the function itself, which is not compiled, and writes down all that the function, its arguments and
its result then hold (`described.py`). After the compiled call another child writes down the same, and compares. So
nobody has to say what a step may change, no world has to be made twice, a call is asked whatever calls were before it,
and the process itself sees nothing of this: no collective, no view.

Where there is no such child (`Audit.alone` counts why), and in the calls after the first few, the compiled call is
asked for one thing alone: that nothing of a capture is left in what can be reached. There is none where ranks are
threads or processes, and none for steps that draw random numbers: a program has a generator that ranks can share.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import struct
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from spmd import CompiledStep, DTensor, LocalTensor
from spmd.mesh.rank import rank_simulator
from tests.audit.described import Left, Table, Walk, attributes_of, described, difference, left_behind, whole

REAL = CompiledStep.__call__


MOST_CHILDREN = 4


@dataclass
class Audit:
    """calls: how many of each step are made beside one device. checked, compared: how many calls were asked for what is
    left, and how many were compared with one device. alone: how many were not, by reason."""

    calls: int
    checked: int = 0
    compared: int = 0
    alone: Counter = field(default_factory=Counter)
    _found: list[str] = field(default_factory=list)
    _made: WeakKeyDictionary[CompiledStep, int] = field(default_factory=WeakKeyDictionary)
    _running: list[tuple[str, Child, Child]] = field(default_factory=list)

    def call(self, step: CompiledStep, args: tuple, kwargs: dict[str, Any]) -> Any:
        n = self._made.get(step, 0)
        self._made[step] = n + 1
        title = f"{getattr(step.fn, '__name__', 'the step')}, call {n}"
        one = self._one_device(step, args, kwargs) if n < self.calls else None
        try:
            result = REAL(step, *args, **kwargs)
        except BaseException:
            if one:
                one.stop()
            raise
        roots = roots_of(step, args, kwargs, result)
        self.checked += 1
        if one:
            self._running.append((title, one, Child.of(lambda: compared(one, roots))))
            self._collect(MOST_CHILDREN)
        elif problem := left_behind(roots):
            self._found.append(f"{title}: {problem}")
        return result

    def _one_device(self, step: CompiledStep, args: tuple, kwargs: dict[str, Any]) -> Child | None:
        if why := _obstacle(step):
            self.alone[why] += 1
            return None
        return Child.of(lambda: on_one_device(step, args, kwargs))

    def found(self) -> list[str]:
        """What was found in all calls so far."""
        self._collect(0)
        return self._found

    def _collect(self, most: int) -> None:
        """Wait for the first children until no more than so many are running."""
        while len(self._running) > most:
            title, one, both = self._running.pop(0)
            kind, text = both.result()
            one.stop()
            if kind == "alone":
                self.alone[text] += 1
            else:
                self.compared += 1
            if kind == "differs":
                self._found.append(f"{title}: {text}")


def compared(one: Child, roots: Table) -> tuple[str, str]:
    """In a child: whether the compiled call has left what one device has; or why that cannot be said."""
    try:
        got = described(roots)
    except Left as error:
        return "differs", str(error)
    leave_modes()  # in which tensors that are unpickled would be those of ranks
    want = one.result()
    if isinstance(want, str):
        return "alone", want
    found = difference(want, got, rtol=1e-6, atol=1e-7)  # float32 numbers may be in float64 tensors
    return ("differs", found) if found else ("same", "")


def roots_of(step: CompiledStep, args: tuple, kwargs: dict[str, Any], result: Any) -> Table:
    given = {f"argument {i}": x for i, x in enumerate(args)} | {f"argument {name}": x for name, x in kwargs.items()}
    return {**given, "the step": step.fn, "os.environ": dict(os.environ), "returned": result}


def _obstacle(step: CompiledStep) -> str:
    """Why a call cannot be made beside one device; empty if it can."""
    if threading.current_thread() is not threading.main_thread() or threading.active_count() > 1:
        return "ranks are threads"
    if step.mesh.size() > 1 and rank_simulator() is None:
        return "ranks are processes"
    if step.settings.mixed_precision is not None:
        return "computes in another dtype"
    return ""


# ---- children -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    """A copy of this process that runs a function. pipe: its result comes from there."""

    pid: int
    pipe: int

    @classmethod
    def of(cls, run: Callable[[], Any]) -> Child:
        pipe, sends = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are torch's
            pid = os.fork()
        if pid == 0:
            _send(run, sends)
        os.close(sends)
        return cls(pid, pipe)

    def result(self, seconds: float = 60.0) -> Any:
        """What the function gave, or the text of its error."""
        try:
            size = struct.unpack("q", self._read(8, seconds))[0]
            return pickle.loads(self._read(size, seconds))
        except TimeoutError:
            return "one device takes too long"
        finally:
            self.stop()

    def _read(self, size: int, seconds: float) -> bytes:
        parts, left = [], size
        while left:
            ready, _, _ = select.select([self.pipe], [], [], seconds)
            part = os.read(self.pipe, min(left, 1 << 20)) if ready else b""
            if not part:
                raise TimeoutError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def stop(self) -> None:
        with suppress(OSError):  # stopped before, or the child of another process
            os.close(self.pipe)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _send(run: Callable[[], Any], sends: int) -> None:
    """Send the result of a function, and end this process without a word."""
    try:
        gc.disable()
        for stream in (0, 1, 2):  # a step may ask its user something, and the terminal is not this process's
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        torch.set_num_threads(1)
        mock.patch.object(CompiledStep, "__call__", REAL).start()
        sent = pickle.dumps(run())
    except BaseException as error:
        sent = pickle.dumps(f"one device cannot: {type(error).__name__}: {str(error).partition(chr(10))[0][:80]}")
    try:
        with open(sends, "wb") as file:
            file.write(struct.pack("q", len(sent)) + sent)
    finally:
        os._exit(0)


def on_one_device(step: CompiledStep, args: tuple, kwargs: dict[str, Any]) -> Table:
    leave_the_mesh(roots_of(step, args, kwargs, None))
    warnings.simplefilter("ignore")
    before, result = torch.get_rng_state(), step.fn(*args, **kwargs)
    if not torch.equal(before, torch.get_rng_state()):
        raise RuntimeError("its random numbers are of another generator")
    return described(roots_of(step, args, kwargs, result))


def leave_the_mesh(roots: Table) -> None:
    """Turn all tensors of simulated ranks that can be reached into those of one device, and end the simulation."""
    tensors = Walk.tensors_in(roots)
    placed = [x for x in tensors if isinstance(x, (DTensor, LocalTensor))]
    if any(x.device.type == "meta" for x in tensors):
        raise RuntimeError("it has no tensors yet")
    memories = Counter(id(x._memory) for x in placed if getattr(x, "_memory", None) is not None)
    if max(memories.values(), default=0) > 1:
        raise RuntimeError("tensors on the mesh share memory")
    wholes, gradients = [whole("", x).clone() for x in placed], [x.grad if x.is_leaf else None for x in placed]
    state = torch.get_rng_state()
    state = whole("torch's random numbers", state)
    leave_modes()
    torch.set_rng_state(state)
    for x, value in zip(placed, wholes, strict=True):
        become_plain(x, value)
    for x, gradient in zip(placed, gradients, strict=True):
        x.grad = gradient


def leave_modes() -> None:
    while (mode := rank_simulator()) is not None:
        mode.__exit__(None, None, None)


def become_plain(x: torch.Tensor, value: torch.Tensor) -> None:
    """A tensor of a mesh becomes one of one device, and stays the object that it is."""
    kind = nn.Parameter if isinstance(x, nn.Parameter) else torch.Tensor
    own = attributes_of(x)
    value.requires_grad_(x.requires_grad and x.is_leaf)
    x.grad = None
    torch._C._swap_tensor_impl(x, value)
    x.__class__ = kind
    x.__dict__.clear()
    x.__dict__.update(own)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(x, hooks) is not None:
            setattr(x, hooks, getattr(x, hooks))


@contextmanager
def audited(calls: int) -> Iterator[Audit]:
    """Inside, compiled steps are audited. calls: how many calls of each step are made beside one device, too."""
    audit = Audit(calls)

    def call(step: CompiledStep, *args: Any, **kwargs: Any) -> Any:
        return audit.call(step, args, kwargs)

    with mock.patch.object(CompiledStep, "__call__", call):
        yield audit
