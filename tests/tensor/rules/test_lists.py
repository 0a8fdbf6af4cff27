"""List ops and fused optimiser steps, decomposed into ops on one tensor, give the results of torch's own ops."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.tensor.rules.lists import list_decompositions

TABLE = list_decompositions()
aten = torch.ops.aten


class OneByOne(TorchDispatchMode):
    """Runs every list op by its decomposition and records which ones."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in TABLE:
            self.ran.add(op)
        return TABLE.get(op, op)(*args, **(kwargs or {}))


def tensors(seed: int, positive: bool = False) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g) for shape in ((3, 4), (), (5,), (0, 2))]
    return [t.abs() + 0.5 for t in made] if positive else made


X, Y, Z = tensors(0), tensors(1), tensors(2, positive=True)
S = [0.5, 2.0, -1.0, 3.0]
V = torch.tensor(S)
CALLS = [
    *((f"_foreach_{name}", "List", (X, Y), {}) for name in ("add", "sub", "mul", "maximum", "minimum", "clamp_min")),
    *((f"_foreach_{name}", "Scalar", (X, 2.0), {}) for name in ("add", "sub", "mul", "div", "maximum", "clamp_max")),
    *((f"_foreach_{name}", "ScalarList", (X, S), {}) for name in ("add", "sub", "mul", "div", "maximum", "minimum")),
    *((f"_foreach_{name}", "default", (Z,), {}) for name in ("sqrt", "neg", "exp", "abs", "reciprocal", "zero")),
    *((f"_foreach_{name}", "Tensor", (X, torch.tensor(2.0)), {}) for name in ("add", "mul", "div")),
    *((f"_foreach_{name}", "Scalar", (X, Y, Z, 0.5), {}) for name in ("addcmul", "addcdiv")),
    *((f"_foreach_{name}", "ScalarList", (X, Y, Z, S), {}) for name in ("addcmul", "addcdiv")),
    *((f"_foreach_{name}", "Tensor", (X, Y, Z, V), {}) for name in ("addcmul", "addcdiv")),
    ("_foreach_add", "List", (X, Y), {"alpha": -0.5}),
    ("_foreach_div", "List", (X, Z), {}),
    ("_foreach_lerp", "Scalar", (X, Y, 0.3), {}),
    ("_foreach_lerp", "List", (X, Y, Z), {}),
    ("_foreach_pow", "List", (Z, Y), {}),
    ("_foreach_pow", "ScalarAndTensor", (2.0, X), {}),
    ("_foreach_norm", "Scalar", (X, 2), {}),
    ("_foreach_norm", "Scalar", (X[:3], float("inf")), {}),
    ("_foreach_norm", "Scalar", (X, 1, torch.float64), {}),
    ("_foreach_copy", "default", (X, Y), {}),
]


def fresh(args):
    return [[t.clone() for t in a] if isinstance(a, list) and isinstance(a[0], torch.Tensor) else a for a in args]


@pytest.mark.parametrize("name, overload, args, kwargs", CALLS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_list_op_is_its_op_on_each_tensor(name, overload, args, kwargs):
    """Each list op, functional and in place, against torch's kernel."""
    op = getattr(getattr(aten, name), overload)
    torch.testing.assert_close(TABLE[op](*args, **kwargs), op(*args, **kwargs), equal_nan=True)
    in_place = getattr(aten, name + "_", None)
    if in_place is not None and overload in in_place.overloads():
        got, want, op_ = fresh(args), fresh(args), getattr(in_place, overload)
        TABLE[op_](*got, **kwargs)
        op_(*want, **kwargs)
        torch.testing.assert_close(got, want, equal_nan=True)


OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.0}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    (torch.optim.Adagrad, {"maximize": True}),
]


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("optimizer, options", OPTIMIZERS, ids=str)
def test_an_optimiser_step_is_the_plain_one(optimizer, options, kind):
    """Three steps of the fused and of the list implementation against one tensor at a time."""
    g = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=g, requires_grad=True) for shape in ((4, 5), (3,))]
    listed = [p.detach().clone().requires_grad_() for p in plain]
    want = optimizer(plain, lr=0.1, foreach=False, fused=False, **options)
    got = optimizer(listed, lr=0.1, **{kind: True}, **options)
    for _ in range(3):
        for p, q in zip(plain, listed, strict=True):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = p.grad.clone()
        want.step()
        with OneByOne() as mode:
            got.step()
        assert mode.ran
    torch.testing.assert_close(listed, plain, rtol=1e-5, atol=1e-6)
