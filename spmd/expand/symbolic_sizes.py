"""Functions whose code in C++ makes numbers of sizes, written with ops that keep them as symbols.

    torch.linspace(0, 1, x.shape[0])      an arange, of any size
    torch.kron(x, y)                      a product of views

They are called where a size is a symbol; where none is, torch does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd import _torch


def has_symbolic_size(*tensors: torch.Tensor) -> bool:
    """Whether a size of one of these tensors is a symbol."""
    return any(isinstance(n, torch.SymInt) for x in tensors for n in x.shape)


def linspace(start: Any, end: Any, steps: Any = None, **options: Any) -> Any:
    """The first half counted from the start, and the second from the end, as torch has it."""
    dtype = options.get("dtype") or torch.get_default_dtype()
    numbers = all(isinstance(x, (int, float)) for x in (start, end))
    if not isinstance(steps, torch.SymInt) or not (numbers and dtype.is_floating_point) or steps < 2:
        return NotImplemented
    at = torch.arange(steps, **{**options, "dtype": dtype})
    step = torch.full_like(at, end - start) / (steps - 1)
    return torch.where(at < steps / 2, start + step * at, end - step * (steps - 1 - at))


def logspace(start: Any, end: Any, steps: Any = None, base: float = 10.0, **options: Any) -> Any:
    """A number to the powers of a linspace."""
    powers = linspace(start, end, steps, **options)
    return powers if powers is NotImplemented else base**powers


def polar(abs: torch.Tensor, angle: torch.Tensor) -> Any:
    """The complex numbers of their two parts."""
    if not has_symbolic_size(abs, angle) or abs.dtype is not angle.dtype:
        return NotImplemented
    return complex_of(abs * angle.cos(), abs * angle.sin())


def complex_of(real: torch.Tensor, imag: torch.Tensor) -> Any:
    """The pairs of their parts, as complex numbers."""
    if not has_symbolic_size(real, imag) or real.dtype is not imag.dtype:
        return NotImplemented
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imag), -1))


def kron(input: torch.Tensor, other: torch.Tensor) -> Any:
    """Each element of the first times all of the second."""
    if not has_symbolic_size(input, other):
        return NotImplemented
    dims = max(input.ndim, other.ndim)
    one, two = ([1] * (dims - x.ndim) + list(x.shape) for x in (input, other))
    first = input.reshape([n for size in one for n in (size, 1)])
    return (first * other.reshape([n for size in two for n in (1, size)])).reshape(
        [n * m for n, m in zip(one, two, strict=True)]
    )


def vander(x: torch.Tensor, N: Any = None, increasing: bool = False) -> Any:
    """The powers of each element, as running products."""
    if not has_symbolic_size(x) or x.ndim != 1:
        return NotImplemented
    powers = _powers(x, x.shape[0] if N is None else N)
    return powers if increasing else powers.flip(-1)


def linalg_vander(x: torch.Tensor, *, N: Any = None) -> Any:
    if not has_symbolic_size(x) or not x.ndim or (isinstance(N, int) and N < 2):
        return NotImplemented
    return _powers(x, x.shape[-1] if N is None else N)


def _powers(x: torch.Tensor, count: Any) -> torch.Tensor:
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        x = x.to(torch.int64)
    ones = torch.ones_like(x).unsqueeze(-1)
    if not isinstance(count, torch.SymInt) and count < 2:
        return ones[..., :count]
    return torch.cat([ones, x.unsqueeze(-1).expand(*x.shape, count - 1).cumprod(-1)], -1)


def take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Any:
    """A gather of what is expanded to one shape but for the dim."""
    if not has_symbolic_size(input, indices):
        return NotImplemented
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.ndim != indices.ndim or not -input.ndim <= dim < input.ndim:
        return NotImplemented
    dim %= input.ndim
    sizes = [(n, m) for n, m in zip(input.shape, indices.shape, strict=True)]
    shape = [m if isinstance(n, int) and n == 1 else n for n, m in sizes]
    there, wanted = ([*shape[:dim], size, *shape[dim + 1 :]] for size in sizes[dim])
    return input.expand(there).gather(dim, indices.expand(wanted))


def gradient(
    input: torch.Tensor, *, spacing: Any = 1, dim: int | Sequence[int] | None = None, edge_order: int = 1
) -> Any:
    """Differences of the neighbours on both sides, and at the edges of one side."""
    if not has_symbolic_size(input) or input.is_complex():
        return NotImplemented
    dims = range(input.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    steps = [spacing] * len(dims) if isinstance(spacing, (int, float)) else spacing
    known = isinstance(steps, (list, tuple)) and all(isinstance(h, (int, float)) for h in steps)
    few = any(_torch.number_now(input.shape[d]) <= edge_order for d in dims)
    if not known or len(steps) != len(dims) or few or edge_order not in (1, 2):
        return NotImplemented
    if not input.is_floating_point():
        input = input.to(torch.get_default_dtype())
    return tuple(_differences(input, d, h, edge_order) for d, h in zip(dims, steps, strict=True))


def _differences(x: torch.Tensor, dim: int, step: float, edge_order: int) -> torch.Tensor:
    n = x.shape[dim]

    def part(begin: Any, length: Any) -> torch.Tensor:
        return x.narrow(dim, begin, length)

    if edge_order == 1:
        begin, end = part(1, 1) - part(0, 1), part(n - 1, 1) - part(n - 2, 1)
    else:
        begin = -1.5 * part(0, 1) + 2 * part(1, 1) - 0.5 * part(2, 1)
        end = 1.5 * part(n - 1, 1) - 2 * part(n - 2, 1) + 0.5 * part(n - 3, 1)
    return torch.cat([begin, (part(2, n - 2) - part(0, n - 2)) / 2, end], dim) / step


FUNCTIONS = {
    torch.linspace: linspace, torch.logspace: logspace, torch.polar: polar, torch.complex: complex_of,
    torch.kron: kron, torch.Tensor.kron: kron,
    torch.vander: vander, torch.linalg.vander: linalg_vander, torch.gradient: gradient,
    torch.take_along_dim: take_along_dim, torch.Tensor.take_along_dim: take_along_dim,
}  # fmt: skip
"""From a function to one of the same arguments, which returns NotImplemented where torch is to do it."""
