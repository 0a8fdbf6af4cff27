"""Plain tensors that torch makes inside of its ops meet DTensors, if all ranks have made the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spmd.tensor.dtensor import distribute_tensor
from tests.tensor.single import S0, S1, SUM, R, agree, on_ranks

OWN = {
    "a causal mask": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "ranks of quantiles": lambda x: torch.quantile(x, 0.3, dim=-1, interpolation="midpoint"),
    "lists as indices": lambda x: x[[1, 0], :, [2, 2]],
    "counts in Python": lambda x: torch.masked.mean(x, dim=-1),
    "an identity": lambda x: torch.linalg.matrix_power(x[..., :4], 0),
}


@pytest.mark.parametrize("name", OWN)
def test_what_torch_makes_itself_is_taken_as_replicated(name):
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    agree(OWN[name], [x], [[S0, R]], [[S1, S0]], [[SUM, R]])


def test_what_torch_makes_of_a_users_tensor_is_compared():
    """Each rank's own weights, which torch has reshaped: no number comes of it."""

    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 3, 2), mesh, [S0, R])
        own = torch.full((3, 2), float(mesh.get_rank()))
        with pytest.raises(RuntimeError, match="a plain tensor of shape"):
            torch.einsum("abc,bc->a", x, own)
        return True

    assert on_ranks(rank) == [True] * 4


def test_a_users_own_is_asked_about():
    """Also on its way through torch's Python code."""

    def rank(mesh):
        x, positions = distribute_tensor(torch.ones(4, 3), mesh, [S0, R]), torch.arange(3)
        adds, embeds = lambda: x + torch.ones(3), lambda: F.embedding(positions, x)
        for call in (adds, embeds, lambda: torch.where(positions > 0, x, x)):
            with pytest.raises(RuntimeError, match=r"implicit_replication\(\)"):
                call()
        return True

    assert on_ranks(rank) == [True] * 4
