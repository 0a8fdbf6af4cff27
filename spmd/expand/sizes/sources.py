"""The symbols of a capture: the sizes of its tensor arguments, and its ints.

    tokens: i64[8, 64]      tokens0 = tokens.shape[0], tokens1 = tokens.shape[1]
    steps: 3                steps
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.expand.sizes.assumed import Assumed, Shapes, Source
from spmd.expand.user_code import at_user_line, current_frames
from spmd.mesh import DeviceMesh
from spmd.tensor.spec import contiguous, spec_of_value

__all__ = ["Shapes", "Sizes"]


class Sizes:
    """Makes the tensors that a trace is given. static: tensors whose sizes are no symbols."""

    def __init__(self, symbols: _torch.Symbols, mesh: DeviceMesh | None, is_symbolic: bool):
        self.symbols = _torch.SizeSymbols(symbols, lambda: at_user_line(current_frames()))
        self.found: list[Source] = []
        self.static: dict[str, tuple[int, ...]] = {}
        self._mode, self._mesh, self._is_symbolic = symbols.fake_mode(), mesh, is_symbolic

    def states(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Fake global tensors of the state, with the strides that they have after they are placed on the mesh."""
        with _torch.no_function_modes(), _torch.no_modes():
            return list(map(self._state, tensors))

    def _state(self, t: torch.Tensor) -> torch.Tensor:
        shape = tuple(t.shape)
        return self._empty(t, shape, contiguous(shape) if spec_of_value(t) is None else t.stride())

    def argument(self, path: str, t: torch.Tensor) -> torch.Tensor:
        """A fake global tensor for an argument, whose sizes are symbols."""
        order = _order(t) if self._is_symbolic else None
        if order is None:
            self.static[path] = tuple(t.shape)
            return self.states([t])[0]
        shape = [self._symbol(path, d, n) for d, n in enumerate(t.shape)]
        stride: list[Any] = [1] * t.ndim
        for inner, outer in itertools.pairwise(order):
            stride[outer] = stride[inner] * torch.sym_max(shape[inner], 1)
        with _torch.no_function_modes(), _torch.no_modes():
            return self._empty(t, shape, stride)

    def attribute(self, path: str, t: torch.Tensor) -> torch.Tensor:
        """A fake global tensor for one in an attribute of a module, whose sizes are no symbols."""
        self.static[path] = tuple(t.shape)
        return self.states([t])[0]

    def integer(self, path: str, n: int) -> torch.SymInt:
        """A symbol for an int among the arguments."""
        return self._symbol(path, None, n)

    def forget(self, paths: Collection[str]) -> None:
        """Forget tensors that the graph does not read."""
        for path in paths:
            self.static.pop(path, None)

    def assumed(self, why_static: str) -> Assumed:
        """What the trace has taken for granted. To be asked when it is complete."""
        symbols = self.symbols
        given = tuple(self.found), symbols.decisions, self.static, why_static
        return Assumed(*given, arguments=symbols.arguments)

    def _symbol(self, path: str, dim: int | None, n: int) -> torch.SymInt:
        name = f"{_identifier(path)}{'' if dim is None else dim}"
        while any(name == other.name for other in self.found):
            name += "_"
        self.found.append(Source(name, path, dim))
        make = self.symbols.integer if dim is None else self.symbols.size
        return make(name, str(self.found[-1]), n)

    def _empty(self, t: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> torch.Tensor:
        device = self._mesh.device_type if t.is_meta and self._mesh is not None else t.device  # is made on the mesh
        return _torch.empty_fake(self._mode, shape, stride, t.dtype, device)


def _identifier(path: str) -> str:
    return re.sub(r"\W", "_", path) if path[:1].isalpha() else "_" + re.sub(r"\W", "_", path)


def _order(t: torch.Tensor) -> list[int] | None:
    """The dims from the innermost to the outermost; None for a tensor without dims, or not dense in any order."""
    if not t.ndim or spec_of_value(t) is None:
        return [*reversed(range(t.ndim))] or None
    order = sorted(reversed(range(t.ndim)), key=lambda d: t.stride(d))
    step = 1
    for d in order:
        if t.stride(d) != step:
            return None
        step *= max(t.shape[d], 1)
    return order
