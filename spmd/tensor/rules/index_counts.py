"""Numbers of indices of a packed dim, such as those before a slice, as a rank counts the indices that it has.

    slice(f32[3x256@tp], 0, 256, 512)      on four ranks each rank takes 64 to 128 of its 192 indices

Of one or more whole blocks of a dim a rank has as large a part as of the dim. A rule names the arguments of its op that
are such numbers (`Rule.counts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd import _torch
from spmd.tensor.spec import Spec


@dataclass(frozen=True)
class Counts:
    """The arguments of these names count indices of a dim of a tensor of this spec."""

    names: tuple[str, ...]
    spec: Spec
    dim: int

    def localized(self, value: Any, length: Any) -> Any:
        """A number, or a list of them, for a rank that has `length` indices of the dim."""
        if isinstance(value, (list, tuple)):
            return [self.localized(v, length) for v in value]
        size = self.spec.shape[self.dim]
        return place_within(value, size) * length // size

    def in_arguments(self, op: _torch.OpOverload, args: tuple, kwargs: dict, replace: Any) -> tuple[tuple, dict]:
        """The arguments of the op with each of these numbers replaced by `replace` of it."""
        for name in self.names:
            i = _torch.argument_index(op, name)
            value = args[i] if i < len(args) else kwargs.get(name)
            if value is not None:
                args, kwargs = _torch.with_argument(op, args, kwargs, name, replace(value))
        return args, kwargs

    def here(self, op: _torch.OpOverload, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of the op as this rank counts."""
        length = self.spec.local_shape_here()[self.dim]
        return self.in_arguments(op, args, kwargs, lambda value: self.localized(value, length))


def place_within(value: int, size: int) -> int:
    """A place as torch reads it: a negative one counts from the end, and none is beyond the end.

    >>> [place_within(i, 8) for i in (3, -3, 99)]
    [3, 5, 8]
    """
    return min(max(value + size if value < 0 else value, 0), size)
