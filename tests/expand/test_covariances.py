"""`cov` and `corrcoef` in a trace are torch's own."""

from __future__ import annotations

import itertools

import pytest
import torch

import spmd
from spmd import LocalTensorMode, Shard
from spmd.expand import covariances

OF = {"rows": (3, 8), "a vector": (8,), "one row": (1, 8), "one column": (3, 1), "none": (2, 0)}


@pytest.mark.parametrize("kind", [torch.float64, torch.complex128, torch.int64], ids=str)
@pytest.mark.parametrize("shape", OF.values(), ids=OF)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_they_are_those_of_torch(shape, kind):
    """With and without weights of columns, and for divisors that are not positive."""
    g = torch.Generator().manual_seed(0)
    x = (9 * torch.randn(shape, dtype=torch.complex128, generator=g)).real.to(kind)
    n = shape[-1]
    often, much = torch.randint(1, 4, (n,), generator=g), torch.rand(n, generator=g).to(torch.cov(x).real.dtype)
    for correction, counts, weights in itertools.product((0, 1, 2), (None, often), (None, much)):
        if n or (counts is None and weights is None):  # torch refuses weights whose sum is zero
            given = {"correction": correction, "fweights": counts, "aweights": weights}
            want, got = torch.cov(x, **given), covariances.cov(x, **given)
            torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(covariances.corrcoef(x), torch.corrcoef(x), equal_nan=True)


def spread(x, w):
    w = w.detach().requires_grad_()
    z = x @ w
    loss = torch.cov(z.T).square().sum() + z.T.corrcoef().sum()
    return loss.detach(), torch.autograd.grad(loss, w)[0]


def test_a_step_has_covariances_of_its_batch():
    """Rows of the batch are columns of what is compared; the last batch is short."""
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, 6, generator=g, dtype=torch.float64) for n in (8, 5)]
    w = torch.randn(6, 3, generator=g, dtype=torch.float64)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(spread, mesh, inputs={"x": {"dp": Shard(0)}})
        for x in batches:
            for a, b in zip(step(x, w), spread(x, w), strict=True):
                torch.testing.assert_close(a.full_tensor().reconcile(), b, rtol=1e-12, atol=1e-12)
        assert not step.program.gathered
