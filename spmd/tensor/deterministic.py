"""Deterministic mode: what is reduced is added up in the order of the ranks.

    with spmd.deterministic():
        loss = step(model, batch)      # the same to the bit, whatever the plans, the links and the backend

Backends add in orders of their own, which change with sizes and algorithms; and a plan that is cheaper between hosts
may add inside each host first. Inside, each rank gets the terms themselves and adds them one by one, in the order of
the ranks: in `redistribute`, in what ops and their gradients move by themselves, in optimisers, and in compiled steps,
which are made anew for it. That takes more bytes, and none of the plans are the cheapest.

What is to be added is another matter: a matrix product whose inner dim is cut into four parts has other terms than one
that is not cut. And collectives that the user calls are the backend's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from spmd.tensor.switch import Switch

_switch = Switch("deterministic")


def deterministic(on: bool = True) -> AbstractContextManager[None]:
    """Inside, in this thread and in the backward passes that it starts, reductions go in the order of the ranks.

    `deterministic(False)` lets them be the cheapest again. Blocks nest; the innermost wins.

    >>> with deterministic():
    ...     is_on()
    True
    """
    return _switch.turned(on)


def set_deterministic(on: bool) -> None:
    """The same for all of the process, outside of `deterministic` blocks, from now on."""
    _switch.set(on)


def is_on() -> bool:
    """Whether reductions go in the order of the ranks here."""
    return _switch.is_on()
