"""Fourier transforms keep the sizes of a step as symbols: one capture serves all batches and lengths."""

from __future__ import annotations

import pytest
import torch

from spmd import Replicate, Shard
from tests.expand.test_sizes import on_ranks, tensor

fft = torch.fft

def grid(x):
    """With a dim of six between."""
    return x[:, None] * torch.arange(1, 7, dtype=x.dtype)[:, None] / 5


def gradient(of):
    def step(x):
        w = (x * 1.5).requires_grad_()
        return torch.autograd.grad(of(w), w)

    return step


TRANSFORMS = {
    "fft": lambda x: fft.fft(x, dim=1),
    "fft of a sharded dim": lambda x: fft.fft(x, dim=0, norm="ortho").real,
    "ifft of real numbers": lambda x: fft.ifft(x, dim=-2, norm="forward").imag,
    "of whole numbers": lambda x: fft.fft((x * 9).long()),
    "rfft": lambda x: fft.rfft(x, dim=0).abs(),
    "there and back": lambda x: fft.irfft(fft.rfft(x, dim=0), n=x.shape[0], dim=0) + fft.ifft(fft.fft(x)).real,
    "an even size": lambda x: fft.irfft(fft.rfft(x) * 2, norm="ortho"),
    "two dims": lambda x: fft.ifft2(fft.fft2(grid(x), norm="ortho") * 2, dim=(0, 2)).real,
    "real ones": lambda x: fft.irfft2(fft.rfft2(grid(x), norm="ortho") * 2, norm="ortho"),
    "all dims": lambda x: fft.fftn(grid(x), norm="forward").imag + fft.ifftn(grid(x)).real,
    "of several": lambda x: fft.irfftn(fft.rfftn(grid(x), dim=(0, 1)), dim=(2, 1)),
    "padded": lambda x: fft.ifft(fft.fft(x, n=16, dim=1) * 2, dim=1).real[:, :4],
    "viewed": lambda x: torch.view_as_real(fft.fft(x.t().contiguous(), dim=0)).transpose(0, 1).reshape(-1),
    "shifted": lambda x: fft.fftshift(fft.fft(x, dim=0), dim=0).abs(),
    "gradient": gradient(lambda w: (fft.fft(w, dim=1, norm="ortho").imag * w).square().sum()),
    "gradient of a sharded dim": gradient(lambda w: (fft.fft(w * (2 + 1j), dim=0).abs() * w).sum()),
    "gradient of real ones": gradient(lambda w: (fft.irfft(fft.rfft(w, dim=0) * 2, w.shape[0], 0) * w).square().sum()),
    "gradient of two dims": gradient(lambda w: fft.irfft2(fft.rfft2(grid(w)) * (1 + 2j)).square().sum()),
    "gradient of a dtype": gradient(lambda w: (w.to(torch.complex128) * (2 + 1j)).imag.square().sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_that_of_one_device(name):
    """Of several batches, with the dim that is transformed sharded and whole."""
    given = [(tensor(n, 4),) for n in (8, 12, 7)]
    want = [TRANSFORMS[name](*args) for args in given]
    for placement in (Shard(0), Replicate()):
        found, captured = on_ranks(TRANSFORMS[name], given, {"x": {"dp": placement}})
        torch.testing.assert_close(found, want)
        assert captured == 1
