"""Plain tensors among DTensors: those of the user are errors; torch's own are allowed if equal on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd.mesh import current_rank, init_device_mesh
from spmd.sim import run_ranks
from spmd.tensor.eager.dtensor import distribute_tensor
from tests.tensor.single import S0, S1, SUM, R, agree, on_ranks

OWN = {
    "a causal mask": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "ranks of quantiles": lambda x: torch.quantile(x, 0.3, dim=-1, interpolation="midpoint"),
    "lists as indices": lambda x: x[[1, 0], :, [2, 2]],
    "a list as the index": lambda x: x[[2, 0, 0]],
    "lists of lists, of bools": lambda x: (x[[[0, 1], [2, 2]], 0], x[[True, False, True]], x[range(2)], x[:, (3, 0)]),
    "counts in Python": lambda x: torch.masked.mean(x, dim=-1),
    "counts and masks in Python": lambda x: torch.masked.var(x, dim=-1, mask=x > 0, unbiased=True),
    "an identity": lambda x: torch.linalg.matrix_power(x[..., :4], 0),
    "pairs": lambda x: torch.combinations(x[0, 0], 2),
}


@pytest.mark.parametrize("name", OWN)
def test_what_torch_makes_itself_is_taken_as_replicated(name):
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    agree(OWN[name], [x], [[S0, R]], [[S1, S0]], [[SUM, R]])


def test_writing_at_lists():
    def write(x):
        y = x.clone()
        y[[2, 0], 1] = 5.0
        y[[True, False, True]] = y[[0, 0]] * 2
        return y

    agree(write, [torch.randn(3, 4, dtype=torch.float64)], [[S0, R]], [[S1, S0]])


def test_offsets_that_torch_fills_in():
    table, bags = torch.randn(5, 4, dtype=torch.float64), torch.tensor([[0, 2], [3, 3], [1, 0]])
    agree(lambda w, at: F.embedding_bag(at, w, mode="sum"), [table, bags], [[S0, R]] * 2)


MINE = {
    "by an operator": lambda x, own: x * own,
    "without a name": lambda x, own: x + own.clone(),
    "by a function in Python": lambda x, own: F.embedding(own.long(), x),
    "reshaped on the way": lambda x, own: torch.einsum("ab,b->a", x, own),
    "a mask for attention": lambda x, own: F.scaled_dot_product_attention(x, x, x, own.expand(4, 4) > 0),
    "an index": lambda x, own: x[own.long()],
    "in a list": lambda x, own: torch.cat([x, own[None]]),
    "in a module": lambda x, own: held(own)(x),
    "in Python's part of torch": lambda x, own: torch.masked.sum(x, mask=own.expand(4, 4) > 0),
    "quantiles of them": lambda x, own: torch.quantile(x, own / 10),
}  # fmt: skip


def held(own: torch.Tensor) -> nn.Module:
    layer = nn.LayerNorm(4, elementwise_affine=False)
    layer.weight = nn.Parameter(own, requires_grad=False)
    return layer


@pytest.mark.parametrize("name", MINE)
def test_a_users_own_is_asked_about(name):
    """In any argument, and even if all ranks have the same; it is allowed where the user says so."""

    def rank(mesh):
        x, own = distribute_tensor(torch.ones(4, 4), mesh, [S0, R]), torch.arange(4.0)
        with pytest.raises(RuntimeError, match=r"implicit_replication\(\)"):
            MINE[name](x, own)
        with spmd.implicit_replication():
            MINE[name](x, own)
        return True

    assert on_ranks(rank) == [True] * 4


def test_what_torchs_python_code_draws_is_compared(monkeypatch):
    """svd_lowrank draws another matrix on each rank: that is an error.

    torch is one for all ranks, which are threads here. So it is changed once, and not by each of them.
    """
    drawn = torch.randn

    def rank(mesh):
        x = distribute_tensor(torch.ones(6, 4), mesh, [S0, R])
        with pytest.raises(RuntimeError, match="a plain tensor of shape"):
            torch.svd_lowrank(x, 2)
        return True

    monkeypatch.setattr(torch, "randn", lambda *size, **options: drawn(*size, **options) * 0 + current_rank())
    assert on_ranks(rank, (1, 2)) == [True] * 2


def test_explicit_mode_compares_nothing():
    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 4), mesh, [R, R])
        with spmd.explicit():
            assert x[[1, 0]].shape == (2, 4)  # of lists nothing has to be asked
            with pytest.raises(spmd.ImplicitCommunicationError, match="compare it between ranks"):
                torch.masked.mean(x, dim=-1)
            with spmd.implicit_replication():
                torch.masked.mean(x, dim=-1)
        return True

    assert on_ranks(rank) == [True] * 4


def test_one_element_just_works():
    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 4), mesh, [S0, R])
        total = x * torch.tensor(2.0) + torch.ones(1) + 3 + torch.where(x > 0, torch.tensor(1.0), 0.0)
        return total.full_tensor().sum().item()

    assert on_ranks(rank) == [16 * 7.0] * 4


LIBRARY = '''
import torch

def masked(x, fill=None):
    """Makes tensors of sizes, as generate() of transformers does."""
    alive = torch.ones(x.shape[0], 1)
    return x * alive + (torch.arange(x.shape[1]) if fill is None else fill)

def drawn(x):
    return x * torch.rand(x.shape)
'''


def test_tensors_that_an_installed_library_makes(tmp_path):
    """They are compared between ranks, and taken as replicated; not where the user gave the library a plain tensor."""
    library: dict = {}
    exec(compile(LIBRARY, str(tmp_path / "site-packages" / "maker.py"), "exec"), library)

    def rank(_):
        x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [S0])
        assert torch.equal(library["masked"](x).full_tensor(), torch.ones(4, 3) + torch.arange(3))
        for wrong in (lambda: library["masked"](x, torch.arange(3)), lambda: library["drawn"](x)):
            with pytest.raises(RuntimeError, match="a plain tensor"):
                wrong()

    run_ranks(rank, 2)
