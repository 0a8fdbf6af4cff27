"""What torch checks of values, and reads them for, is asserted by a program, on all ranks; the rest is unchanged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.test_sizes import first

torch.manual_seed(0)
X, MATRICES = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, 3, dtype=torch.float64)


def definite(x):
    return x @ x.mT + 4 * torch.eye(x.shape[-2], dtype=x.dtype)


OF_ROWS = {
    "inv": lambda x: torch.linalg.inv(definite(x)),
    "cholesky": lambda x: torch.linalg.cholesky(definite(x)),
    "solve": lambda x: torch.linalg.solve(definite(x), x),
    "lu_factor": lambda x: torch.linalg.lu_factor(definite(x))[0],
    "eigvals": lambda x: torch.linalg.eigvals(definite(x)).real.sum(-1),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x.sin(), x.exp() * (x > 0)),
    "gaussian_nll_loss of rows": lambda x: F.gaussian_nll_loss(x, x.sin(), x[..., 0].exp(), True, reduction="none"),
    "gaussian_nll_loss, one variance": lambda x: torch.nn.GaussianNLLLoss(reduction="sum")(x, x.cos(), x[..., :1] ** 2),
    "gaussian_nll_loss, a number": lambda x: F.gaussian_nll_loss(x, x.sin(), 0.5),
    "cov": lambda x: (x.flatten(1).cov(), torch.cov(x.flatten(1).T, correction=0), torch.cov(x.flatten())),
    "weighted cov": lambda x: torch.cov(
        x.flatten(1).T, aweights=x.flatten(1)[:, 0].detach().abs(), fweights=torch.tensor([1, 2, 1, 1, 2])
    ),
    "cov of one": lambda x: x.detach().flatten(1)[:, :1].cov().nan_to_num(3.0, 2.0) + x.sum(),
    "corrcoef": lambda x: (torch.corrcoef(x.flatten(1)), x.flatten(1).T.corrcoef(), x.flatten().corrcoef()),
    "complex corrcoef": lambda x: torch.view_as_real(torch.corrcoef(torch.complex(x, x.sin()).flatten(1))),
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.filterwarnings("ignore:cov\\(\\)")
def test_they_are_those_of_one_device(name):
    """With their gradients: of one matrix, whose rows or columns are sharded, and of five on four ranks."""

    def step(x):
        x = x.detach().requires_grad_()
        out = OF_ROWS[name](x)
        out = out if isinstance(out, tuple) else (out,)
        return (*out, *torch.autograd.grad(sum(each.cos().sum() for each in out), x))

    for x in (X, MATRICES):
        expected = step(x)
        for dim in range(2):
            with LocalTensorMode(4):
                mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
                found = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(dim)}})(x)
                for got, want in zip(map(first, found), expected, strict=True):
                    torch.testing.assert_close(got, want)


FAILS = {
    "inv": (torch.linalg.inv, lambda x: x * 0, r"linalg.inv at test_checks.py:\d+: a matrix is singular"),
    "cholesky": (torch.linalg.cholesky, lambda x: -x, "not positive-definite"),
    "gaussian_nll_loss": (lambda x: F.gaussian_nll_loss(x, x, x + 20), lambda x: x - 90, "a negative entry"),
}


@pytest.mark.parametrize("name", FAILS)
def test_what_a_later_call_does_not_pass_is_an_error(name):
    """It is that of one matrix of five, which one rank has."""
    fn, spoil, said = FAILS[name]
    good = definite(MATRICES)
    bad = torch.cat([good[:-1], spoil(good[-1:])])
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(lambda x: fn(x), mesh, inputs={"x": {"dp": Shard(0)}})
        step(good)
        with pytest.raises(RuntimeError, match=said):
            step(bad)
