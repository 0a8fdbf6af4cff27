"""Deterministic mode: reductions add their terms in the order of the ranks.

    with spmd.deterministic():
        loss = step(model, batch)      # the same to the bit, whatever the plans, the links and the backend

A backend adds in its own order, which changes with sizes and algorithms; and between hosts a cheaper plan may add
inside each host first. In this mode each rank receives the terms and adds them one by one, in the order of the ranks.
This holds for `redistribute`, for the moves of ops and of their gradients, for optimisers, and for compiled steps,
which are compiled again for this mode. It takes more bytes, and the plans are not the cheapest.

The mode does not change the terms: a matrix product whose inner dim is sharded in four has other terms than one whose
inner dim is not sharded. And it does not change collectives that the user calls.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from spmd.tensor.modes.switch import Switch

_switch = Switch("deterministic")


def deterministic(on: bool = True) -> AbstractContextManager[None]:
    """Inside the block, in this thread and in the backward passes that it starts, reductions add in rank order.

    `deterministic(False)` makes the cheapest plans again. Blocks nest; the innermost counts.

    >>> with deterministic():
    ...     is_on()
    True
    """
    return _switch.turned(on)


def set_deterministic(on: bool) -> None:
    """Turn the mode on or off for the process from now on. Inside `deterministic` blocks, the block counts."""
    _switch.set(on)


def is_on() -> bool:
    """Whether reductions add in the order of the ranks here."""
    return _switch.is_on()
