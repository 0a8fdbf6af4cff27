"""Short Fourier transforms of sharded signals are those of one device, with gradients, at once and in programs."""

from __future__ import annotations

import pytest
import torch

import spmd
from spmd import LocalTensorMode, Shard, debug
from tests.expand.test_sizes import first
from tests.tensor.rules.test_norms import smooth
from tests.tensor.single import S0, S1, S2, R, agree_at_once, mesh_of, placed

pytestmark = pytest.mark.filterwarnings("ignore:A window was not", "ignore:stft with return_complex")
HANN = torch.hann_window(16, dtype=torch.float64)


def real(x):
    return torch.view_as_real(x) if x.is_complex() else x


def spectrum(x):
    return torch.complex(x, x.cos())


def stft(*args, **options):
    return lambda x, w: real(torch.stft(x, *args, **{"window": w, "return_complex": True} | options))


def istft(*args, **options):
    return lambda x, w: real(torch.istft(spectrum(x), *args, **{"window": w} | options))


SIGNALS = {
    "stft": stft(16, 4),
    "of overlapping frames": stft(16, 5, normalized=True),
    "without a window": stft(16, window=None),
    "of a short window": stft(20, 8, 16, onesided=False),
    "of a short window of ones": stft(16, 5, 12, window=None),
    "as pairs": stft(16, 4, return_complex=False),
    "not centred": stft(16, 4, center=False),
    "padded otherwise": stft(16, 4, pad_mode="constant"),
    "of one signal": lambda x, w: torch.stft(x[0], 16, 4, window=w, return_complex=True).abs(),
    "there and back": lambda x, w: torch.istft(torch.stft(x, 16, 4, window=w, return_complex=True), 16, 4, window=w),
}
SPECTRA = {
    "istft": istft(16, 4),
    "of a length": istft(16, 4, length=40),
    "of a greater length": istft(16, 4, length=50),
    "without a window": istft(16, window=None, normalized=True),
    "not centred": istft(16, 4, window=None, center=False),
    "of one": lambda x, w: torch.istft(spectrum(x)[0], 16, 4, window=w),
    "of all frequencies": lambda x, w: torch.istft(spectrum(torch.cat([x, x[:, 1:8]], 1)), 16, 4, window=w),
    "complex": lambda x, w: real(
        torch.istft(spectrum(torch.cat([x, x[:, 1:8]], 1)), 16, 4, window=w, return_complex=True)
    ),
}
CASES = [(fn, (5, 64), (S0, S1)) for fn in SIGNALS.values()]
CASES += [(fn, (3, 9, 12), (S0, S1, S2)) for fn in SPECTRA.values()]
NAMES = [f"signals: {name}" for name in SIGNALS] + [f"spectra: {name}" for name in SPECTRA]


@pytest.mark.parametrize("fn, shape, shards", CASES, ids=NAMES)
def test_at_once(fn, shape, shards):
    debug.fallbacks.clear()
    agree_at_once(fn, [smooth(*shape), HANN], *[[[S0, shard], [R, S0]] for shard in shards])
    assert not debug.fallbacks()


@pytest.mark.parametrize("fn, shape, shards", CASES, ids=NAMES)
def test_in_programs(fn, shape, shards):
    def step(x, w):
        x = x.detach().requires_grad_()
        out = fn(x, w)
        return out, torch.autograd.grad(out.sin().sum(), x)[0]

    x = smooth(*shape).detach()
    expected = step(x, HANN)
    for shard in shards:
        with LocalTensorMode(4):
            mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
            found = spmd.compile(step, mesh, inputs={"x": {"dp": shard}})(x, HANN)
            for got, want in zip(map(first, found), expected, strict=True):
                torch.testing.assert_close(got, want)


def test_a_batch_of_signals_sends_nothing():
    with LocalTensorMode(4) as mode:
        x, w = placed(smooth(8, 64).detach(), [S0, S0], mesh_of((2, 2))), placed(HANN, [R, R], mesh_of((2, 2)))
        before = len(mode.sent)
        assert str(torch.stft(x, 16, 4, window=w, return_complex=True)._spec) == "c128[8@dp,tp, 9, 17]"
        assert len(mode.sent) == before


def test_windows_that_add_up_to_zero_are_an_error():
    step = spmd.compile(lambda x, w: torch.istft(spectrum(x), 16, 16, window=w), spmd.DeviceMesh("cpu", [0]))
    with LocalTensorMode(1), pytest.raises(RuntimeError, match=r"istft at test_spectra.py:\d+: the windows"):
        step(smooth(3, 9, 12).detach(), HANN)


def test_windows_by_strides_are_views():
    """As audio and time series are cut; with the gradient."""

    def step(x):
        x = x.detach().requires_grad_()
        frames = x.as_strided((5, 7, 16), (64, 8, 1))
        return torch.autograd.grad((frames * frames.detach().cumsum(1)).sum(), x)[0]

    x = smooth(5, 64).detach()
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        for dim in (0, 1):
            found = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(dim)}})(x)
            torch.testing.assert_close(first(found), step(x))
