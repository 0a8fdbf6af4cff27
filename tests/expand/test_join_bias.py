"""A bias is added in the product where a rank's product is complete and nobody else reads it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import spmd
from spmd import Shard
from spmd.expand.passes.join_bias import join_biases
from spmd.sim import LocalTensorMode
from spmd.tensor.modes.deterministic import deterministic
from tests.expand.test_in_place import WithSpecs

aten = torch.ops.aten
X, W, B = torch.randn(3, 4, 4), torch.randn(5, 4), torch.randn(5)


def linear(x, w, b):
    return aten.add.Tensor(aten.linear.default(x, w), b)


def read_twice(x, w, b):
    y = aten.linear.default(x, w)
    return aten.mul.Tensor(aten.add.Tensor(y, b), y)


def made_later(x, w, b):
    y = aten.linear.default(x, w)
    return aten.add.Tensor(y, aten.neg.default(b))


def scaled(x, w, b):
    return aten.add.Tensor(aten.linear.default(x, w), b, alpha=2)


def of_rows(x, w, b):
    return aten.add.Tensor(aten.linear.default(x, w), x.sum(-1, keepdim=True))


def of_other_dtype(x, w, b):
    return aten.add.Tensor(aten.linear.default(x, w), b.to(torch.float64))


@pytest.mark.parametrize(
    "fn, joined",
    [(linear, 1), (read_twice, 0), (made_later, 0), (scaled, 0), (of_rows, 0), (of_other_dtype, 0)],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_bias_is_added_in_its_product(fn, joined):
    module = fx.symbolic_trace(fn)
    WithSpecs(module).run(X, W, B)
    assert join_biases(module.graph) == joined
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(X, W, B), fn(X, W, B))


def test_deterministic_mode_keeps_them_apart():
    module = fx.symbolic_trace(linear)
    WithSpecs(module).run(X, W, B)
    with deterministic():
        assert join_biases(module.graph) == 0


def test_a_rank_rounds_as_one_device_with_its_block():
    """Rows of x on one axis, columns of the result on the other."""
    x, w, b = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rows, columns = {"dp": Shard(0)}, {"tp": Shard(0)}
        step = spmd.compile(lambda x, w, b: F.linear(x, w, b), mesh, inputs={"x": rows, "w": columns, "b": columns})
        found = step(x, w, b).full_tensor().reconcile()
    blocks = zip(w.chunk(2), b.chunk(2), strict=True)
    wanted = torch.cat([torch.cat([F.linear(part, *block) for part in x.chunk(2)]) for block in blocks], 1)
    assert torch.equal(found, wanted)
