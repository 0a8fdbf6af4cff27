"""What the arguments of a compiled function are called: they are placed by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def signature_of(fn: Callable) -> inspect.Signature:
    """The parameters of a function. A builtin names none, and arguments are placed by name."""
    try:
        return inspect.signature(fn)
    except ValueError:
        raise TypeError(
            f"compile: {fn!r} does not say what its arguments are called; write a function that calls it, such as "
            "lambda x, weight: ..."
        ) from None
