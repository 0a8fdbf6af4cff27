"""Fourier transforms of sizes that are symbols: one dim after the other.

    torch.fft.fft2(x)       a transform of the last dim, and of the one before it

torch's functions make numbers of all sizes of a tensor, also of those that are not transformed. Its ops for one dim do
not. What cuts or pads a dim is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.expand.symbolic_sizes import has_symbolic_size

aten = torch.ops.aten
NORMS: dict[str | None, tuple[int, int]] = {None: (0, 2), "backward": (0, 2), "ortho": (1, 1), "forward": (2, 0)}
"""How the ops say what a transform is divided by: nothing, the root of the size, the size; forwards and backwards."""


def _is(n: Any, size: Any) -> bool:
    """Whether a size that is asked for is the one that is there."""
    return n is None or (_torch.number_now(n) == _torch.number_now(size) and bool(n == size))


def _along(x: torch.Tensor, dim: int, transform: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A transform of the last dim, for another one."""
    return transform(x.movedim(dim, -1).contiguous()).movedim(-1, dim)


def _complex(forward: bool) -> Callable[..., Any]:
    """`fft` or `ifft`."""

    def run(input: torch.Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Any:
        if not _takes(input, dim, norm) or not _is(n, input.shape[dim]):
            return NotImplemented
        how = NORMS[norm][not forward]
        if forward and not input.is_complex():
            return _along(input.to(_float(input)), dim, lambda y: aten._fft_r2c.default(y, [y.ndim - 1], how, False))
        x = input if input.is_complex() else input.to(_float(input).to_complex())
        return _along(x, dim, lambda y: aten._fft_c2c.default(y, [y.ndim - 1], how, forward))

    return run


def rfft(input: torch.Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Any:
    if not _takes(input, dim, norm) or input.is_complex() or not _is(n, input.shape[dim]):
        return NotImplemented
    x, how = input.to(_float(input)), NORMS[norm][0]
    return _along(x, dim, lambda y: aten._fft_r2c.default(y, [y.ndim - 1], how, True))


def irfft(input: torch.Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Any:
    if not _takes(input, dim, norm) or not input.is_complex():
        return NotImplemented
    n = 2 * (input.shape[dim] - 1) if n is None else n
    if not _is(n // 2 + 1, input.shape[dim]):
        return NotImplemented
    how = NORMS[norm][1]
    return _along(input, dim, lambda y: aten._fft_c2r.default(y, [y.ndim - 1], how, n))


def _takes(x: Any, dim: Any, norm: Any) -> bool:
    known = isinstance(x, torch.Tensor) and isinstance(dim, int) and norm in NORMS
    return known and -x.ndim <= dim < x.ndim and has_symbolic_size(x) and _float(x) in (torch.float32, torch.float64)


def _float(x: torch.Tensor) -> torch.dtype:
    """The dtype of the real numbers that a tensor is transformed as."""
    if x.is_complex():
        return x.dtype.to_real()
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


def _several(one: Callable[..., Any], first: Callable[..., Any] | None, last: Callable[..., Any] | None, dims: Any):
    """A transform of several dims. one: of each. first, last: of the last dim instead, before the others or behind
    them. dims: which, by default."""

    def run(input: torch.Tensor, s: Any = None, dim: Any = dims, norm: str | None = None) -> Any:
        if not isinstance(input, torch.Tensor) or not has_symbolic_size(input) or s is not None or isinstance(dim, int):
            return NotImplemented
        places: Sequence[int] = range(-input.ndim, 0) if dim is None else dim
        if not places or len({d % max(input.ndim, 1) for d in places}) < len(places):
            return NotImplemented
        rest = places[:-1] if first or last else places
        steps = [(first, places[-1])] * bool(first) + [(one, d) for d in rest] + [(last, places[-1])] * bool(last)
        for step, d in steps:
            input = step(input, None, d, norm)
            if input is NotImplemented:
                break
        return input

    return run


fft, ifft = _complex(True), _complex(False)
FUNCTIONS = {torch.fft.fft: fft, torch.fft.ifft: ifft, torch.fft.rfft: rfft, torch.fft.irfft: irfft}
for _suffix, _dims in (("2", (-2, -1)), ("n", None)):
    FUNCTIONS |= {
        getattr(torch.fft, f"fft{_suffix}"): _several(fft, None, None, _dims),
        getattr(torch.fft, f"ifft{_suffix}"): _several(ifft, None, None, _dims),
        getattr(torch.fft, f"rfft{_suffix}"): _several(fft, rfft, None, _dims),
        getattr(torch.fft, f"irfft{_suffix}"): _several(ifft, None, irfft, _dims),
    }
"""From a function to one of the same arguments, which returns NotImplemented where torch is to do it."""
