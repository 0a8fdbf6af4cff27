"""A quick function runs the very op that it stands for, in the same way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd import _torch
from spmd._torch import pytree

aten = torch.ops.aten
X, Y, Z = (torch.rand(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
ROWS, B = torch.tensor([2, 0]), X.view(1, 4, 4)

GIVEN = [
    (
        (X, Y),
        "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum eq.Tensor mm matmul add_.Tensor sub_.Tensor "
        "mul_.Tensor div_.Tensor copy_ linear",
    ),
    ((X, 2), "mul.Scalar pow.Tensor_Scalar eq.Scalar ne.Scalar gt.Scalar ge.Scalar lt.Scalar le.Scalar"),
    (
        (X,),
        "neg exp log sqrt rsqrt reciprocal abs sin cos tanh sigmoid relu logical_not sum mean t clone detach "
        "zeros_like ones_like sqrt_ neg_ zero_ gelu silu",
    ),
    ((X, Y, Z), "addcmul addcdiv addmm addcmul_ addcdiv_"),
    ((X > 0.5, Y, Z), "where.self"),
    ((X, Y, 0.25), "lerp.Scalar lerp_.Scalar"),
    ((B, B), "bmm"),
    ((B, B, B), "baddbmm"),
    ((X, ROWS), "embedding"),
    ((X, [4], None, None, 1e-5), "native_layer_norm"),
    ((X, -1, False), "_softmax _log_softmax"),
    ((X, Y, -1, torch.float32), "_softmax_backward_data _log_softmax_backward_data"),
    ((X, [0], True), "sum.dim_IntList mean.dim amax"),
    ((X, 1), "cumsum unsqueeze"),
    ((B, 0), "squeeze.dim"),
    (([X, Y], 1), "cat stack"),
    ((X, 0, ROWS), "index_select"),
    ((X, 0, ROWS.view(2, 1)), "gather"),
    ((X, 0, 1), "transpose.int select.int"),
    ((X, [1, 0]), "permute"),
    ((X, [2, 8]), "reshape view"),
    ((X, [3, 1], 1), "split_with_sizes"),
    ((X, 3, 1), "split.Tensor"),
    ((B, [2, 4, 4]), "expand"),
    ((X, Y > 0.5, 2.0), "masked_fill.Scalar"),
    ((X[0, 0],), "_local_scalar_dense"),
]
NAMED = {
    "add.Tensor": {"alpha": 2}, "sub_.Tensor": {"alpha": 2}, "addcdiv_": {"value": -0.5}, "addmm": {"beta": 2},
    "gelu": {"approximate": "tanh"}, "sum": {"dtype": torch.float64}, "clone": {"memory_format": torch.preserve_format},
    "zeros_like": {"dtype": torch.int64},
}  # fmt: skip
CASES = {name: given for given, names in GIVEN for name in names.split()}


class Seen(TorchDispatchMode):
    """Notes the ops that run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops = [*getattr(self, "ops", []), func]
        return func(*args, **(kwargs or {}))


def overload(name: str):
    packet, _, rest = name.partition(".")
    return getattr(getattr(aten, packet), rest or "default")


def seen(function, given, named) -> tuple[list, object]:
    given = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    with Seen() as mode:
        found = function(*given, **named)
    return mode.ops, found


def test_each_has_a_case():
    assert {overload(name) for name in CASES} == set(_torch.QUICK_FUNCTIONS)


@pytest.mark.parametrize("name", CASES)
def test_it_runs_the_same_op_and_gives_the_same(name):
    op = overload(name)
    for named in ({}, NAMED.get(name, {})):
        ops, want = seen(op, CASES[name], named)
        quick, got = seen(_torch.quick_function(op), CASES[name], named)
        assert quick == ops or name == "mul.Scalar"  # which is `mul.Tensor` with a number
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
