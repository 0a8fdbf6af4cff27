"""`interpolate` in a trace gives what torch's gives, or leaves it to torch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from spmd.expand.interpolate import OPS, interpolate

HOW = (
    {"size": 4}, {"scale_factor": 2}, {"scale_factor": 1.5}, {"scale_factor": 0.7}, {"size": 4, "scale_factor": 2},
    {"scale_factor": 2, "recompute_scale_factor": True}, {}, {"size": [4, 4, 4, 4]}, {"scale_factor": [2, 2, 2, 2]},
)  # fmt: skip
LEFT_TO_TORCH = ("size", "scale_factor"), ("scale_factor", "recompute_scale_factor"), ()


@pytest.mark.parametrize("mode, n", OPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_is_that_of_torch(mode, n):
    """A size or a scale for each dim or for all; what torch refuses is left to it."""
    x = torch.linspace(0, 1, 6 * 5**n).reshape(2, 3, *[5] * n)
    for how, corners in itertools.product(HOW, (None, False, True)):
        got = interpolate(x, mode=mode, align_corners=corners, **how)
        refused = ("nearest" in mode and corners is not None) or 4 in [len(v) for v in how.values() if type(v) is list]
        assert (got is NotImplemented) == (refused or tuple(how) in LEFT_TO_TORCH)
        if got is not NotImplemented:
            assert torch.equal(got, F.interpolate(x, mode=mode, align_corners=corners, **how))


def test_other_modes_are_left_to_torch():
    x = torch.ones(1, 1, 4, 4)
    assert interpolate(x, 2, mode="area") is NotImplemented
    assert interpolate(x, 2, mode="bilinear", antialias=True) is NotImplemented
    assert interpolate(x, 2, mode="trilinear") is NotImplemented
