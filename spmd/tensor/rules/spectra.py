"""Short Fourier transforms, which torch makes of `as_strided`, and of a sum of windows that it reads.

    stft(f32[8@dp, 1024], 128)          ->  c64[8@dp, 65, 29]: frames by `unfold`, and the transform of each
    istft(c64[8@dp, 65, 29], 128)       ->  f32[8@dp, 896]: the inverse of each, added where frames overlap

In the place of torch's functions: for DTensors, and for tensors of a trace. All give NotImplemented where torch raises
an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def stft(
    self: torch.Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: torch.Tensor | None = None, normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    """[batch, samples] or [samples]  ->  [batch, frequencies, frames], without the batch where there is none."""
    hop, width = n_fft // 4 if hop_length is None else hop_length, n_fft if win_length is None else win_length
    if align_to_window or self.ndim not in (1, 2) or not 0 < n_fft <= self.shape[-1]:
        return NotImplemented
    if return_complex is None or not _fit(hop, width, n_fft, window) or (window is not None and window.is_complex()):
        return NotImplemented
    x = self if self.ndim == 2 else self.unsqueeze(0)
    frames = x.unfold(1, n_fft, hop)
    if window is None and width < n_fft:
        window = torch.ones(width, dtype=self.real.dtype, device=self.device)
    if window is not None:
        frames = frames * _centred(window, n_fft)
    norm = "ortho" if normalized else "backward"
    if self.is_complex() and onesided:
        return NotImplemented
    if self.is_complex() or onesided is False:
        out = torch.fft.fft(frames, norm=norm)
    else:
        out = torch.fft.rfft(frames, norm=norm)
    out = out.transpose(1, 2)
    out = out if self.ndim == 2 else out.squeeze(0)
    return out if return_complex else torch.view_as_real(out)


def centred_stft(
    input: torch.Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: torch.Tensor | None = None, center: bool = True, pad_mode: str = "reflect", normalized: bool = False,
    onesided: bool | None = None, return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    """`torch.stft`: with half a window more on both sides, unless `center` is False."""
    if center and align_to_window is None and input.ndim in (1, 2):
        shape = [1] * (3 - input.ndim) + list(input.shape)
        input = F.pad(input.view(shape), (n_fft // 2, n_fft // 2), pad_mode).view([*input.shape[:-1], -1])
    return stft(input, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window)


def istft(
    self: torch.Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: torch.Tensor | None = None, center: bool = True, normalized: bool = False, onesided: bool | None = None,
    length: int | None = None, return_complex: bool = False, where: str = "",
) -> Any:  # fmt: skip
    """[batch, frequencies, frames] or without the batch  ->  [batch, samples]. where: of the call, for an error."""
    hop, width = n_fft // 4 if hop_length is None else hop_length, n_fft if win_length is None else win_length
    if not self.is_complex() or self.ndim not in (2, 3) or hop > width or not _fit(hop, width, n_fft, window):
        return NotImplemented
    x = (self if self.ndim == 3 else self.unsqueeze(0)).transpose(1, 2)
    halved = x.shape[2] != n_fft if onesided is None else onesided
    if x.shape[2] != (n_fft // 2 + 1 if halved else n_fft) or (halved and return_complex):
        return NotImplemented
    frames = _inverse(x, n_fft, "ortho" if normalized else "backward", return_complex)
    window = torch.ones(width, dtype=self.real.dtype, device=self.device) if window is None else window
    window = _centred(window, n_fft)
    whole = n_fft + hop * (x.shape[1] - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start
    weight = _added(window.square().expand(1, x.shape[1], n_fft), whole, hop)[:, start:end]
    said = f"istft{where}: the windows add up to zero somewhere; take longer ones, or a smaller hop"
    aten._assert_async.msg(weight.abs().min() > 1e-11, said)
    out = _added(frames * window, whole, hop)[:, start:end] / weight
    out = F.pad(out, (0, end - whole)) if end > whole else out
    return out if self.ndim == 3 else out.squeeze(0)


def _fit(hop: int, width: int, n_fft: int, window: torch.Tensor | None) -> bool:
    return hop > 0 and 0 < width <= n_fft and (window is None or tuple(window.shape) == (width,))


def _centred(window: torch.Tensor, n_fft: int) -> torch.Tensor:
    """The window, with zeros on both sides, as long as a frame."""
    more = n_fft - window.shape[0]
    return F.pad(window, (more // 2, more - more // 2)) if more else window


def _inverse(x: torch.Tensor, n: int, norm: str, is_complex: bool) -> torch.Tensor:
    if is_complex:
        return torch.fft.ifft(x, n, norm=norm)
    return torch.fft.irfft(x[..., : n // 2 + 1], n, norm=norm)


def _added(frames: torch.Tensor, length: int, hop: int) -> torch.Tensor:
    """[batch, frames, n] -> [batch, length]: each frame `hop` elements behind the one before."""
    return aten.unfold_backward(frames, [frames.shape[0], length], 1, frames.shape[2], hop)
