"""Values that a block sets for its thread, and for the threads in which autograd runs the backward passes it starts.

    >>> colour = Carried("colour", "grey")
    >>> token = colour.set("red")
    >>> colour.get()
    'red'
    >>> colour.reset(token)
    >>> colour.get()
    'grey'

A context variable alone is not seen there: the backward pass of tensors on a GPU, and one deep inside of others, runs
in a thread of autograd, which has the state of torch of the thread that asked for it, and nothing of Python's.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Generic, NamedTuple, TypeVar

from spmd._torch.autograd import in_backward, stash, stashed

T = TypeVar("T")
_UNSET: Any = object()


class Before(NamedTuple):
    """What a value was before it was set."""

    token: Token
    carried: tuple | None


class Carried(Generic[T]):
    """Such a value, used as a `ContextVar` is. name: no other has it."""

    def __init__(self, name: str, default: T) -> None:
        self._here: ContextVar[T] = ContextVar(name, default=_UNSET)
        self._name, self._default = name, default
        self._was_set = False

    def get(self) -> T:
        """The value that was set here, or where the backward pass was started; else the default."""
        value = self._here.get()
        if value is not _UNSET:
            return value
        carried = stashed(self._name) if self._was_set and in_backward() else None
        return self._default if carried is None else carried[0]

    def set(self, value: T) -> Before:
        """Set the value until `reset` is called with what this gives."""
        before = Before(self._here.set(value), stashed(self._name))
        stash(self._name, (value,))
        self._was_set = True
        return before

    def reset(self, before: Before) -> None:
        """Set the value to what it was."""
        stash(self._name, before.carried)
        self._here.reset(before.token)
