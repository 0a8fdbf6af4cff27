"""torch.func, torch.autograd.functional and forward-mode AD on DTensors give what they give on one device.

Ranks are played by one thread: torch has one level of forward-mode AD a process, and functional_call swaps a module's
parameters for the time of the call.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import nn
from torch.autograd import functional
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from spmd import DTensor, LocalTensorMode
from tests.tensor.single import MAX, S0, S1, SUM, R, agree_at_once, along, mesh_of, placed, weights

# The warning of torch when forward-mode AD is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

LINEAR = nn.Linear(6, 3).double().requires_grad_(False)


def d(*shape: int) -> torch.Tensor:
    return weights(torch.empty(shape, dtype=torch.float64)) * 1.5


def e(*shape: int) -> torch.Tensor:
    return d(*shape).cos() + 0.1


def f(x):
    return (x.softmax(-1) * x).sum()


def through(module: nn.Module, x, w, b):
    return functional_call(module, {"weight": w, "bias": b}, (x,))


TRANSFORMS = {
    "autograd.functional.hessian": (lambda x: functional.hessian(lambda x: (x**3).sum() * x.sum(), x), [d(5)]),
    "autograd.functional.hvp": (lambda x, t: functional.hvp(f, x, t), [d(5), e(5)]),
    "autograd.functional.jacobian": (lambda x: functional.jacobian(lambda x: x.softmax(0), x), [d(5)]),
    "autograd.functional.jacobian vectorize": (
        lambda x: functional.jacobian(lambda x: x.softmax(0), x, vectorize=True), [d(5)]
    ),
    "autograd.functional.jvp": (lambda x, t: functional.jvp(lambda x: x.softmax(0), x, t), [d(5), e(5)]),
    "autograd.functional.vhp": (lambda x, t: functional.vhp(f, x, t), [d(5), e(5)]),
    "functional_call": (lambda x, w, b: through(LINEAR, x, w, b), [d(5, 6), e(3, 6), d(3)]),
    "functional_call grad": (
        lambda x, w, b: grad(lambda w, b: (through(LINEAR, x, w, b) ** 2).sum(), (0, 1))(w, b), [d(5, 6), e(3, 6), d(3)]
    ),
    "grad": (grad(f), [d(5, 6)]),
    "grad of a grad": (grad(lambda x: (grad(f)(x) ** 2).sum()), [d(5, 6)]),
    "grad of several": (grad(lambda x, w: (x @ w).tanh().sum(), argnums=(0, 1)), [d(5, 6), e(6, 3)]),
    "grad per sample": (vmap(grad(lambda r, w: ((r @ w) ** 2).sum(), 1), (0, None)), [d(5, 6), e(6, 3)]),
    "grad_and_value": (grad_and_value(f), [d(5, 6)]),
    "hessian": (hessian(lambda x: (x**3).sum() * x.sum()), [d(5)]),
    "jacfwd": (jacfwd(lambda x: x.softmax(0)), [d(5)]),
    "jacrev": (jacrev(lambda x, w: x @ w, argnums=(0, 1)), [d(3, 4), e(4, 2)]),
    "jvp": (lambda x, w, t, u: jvp(lambda x, w: x @ w * 2, (x, w), (t, u)), [d(5, 6), e(6, 3), e(5, 6), d(6, 3)]),
    "jvp of layer_norm": (
        lambda x, w, t, u: jvp(lambda x, w: F.layer_norm(x, (6,), w, w), (x, w), (t, u)), [d(5, 6), e(6), e(5, 6), d(6)]
    ),
    "vjp": (lambda x, w: vjp(torch.mm, x, w)[1](x @ w), [d(5, 6), e(6, 3)]),
    "vmap": (vmap(lambda r: r.softmax(0) * 2), [d(5, 6)]),
    "vmap along dim 1": (vmap(torch.sin, in_dims=1, out_dims=1), [d(5, 6)]),
    "vmap in vmap": (lambda x, y: vmap(lambda a: vmap(lambda b: a @ b)(y))(x), [d(5, 6), e(3, 6)]),
    "vmap of a product": (vmap(lambda r, w: r @ w, in_dims=(0, None)), [d(5, 6), e(6, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions(name):
    fn, tensors = TRANSFORMS[name]
    agree_at_once(fn, tensors, along([S0, S1], tensors), along([S1, SUM], tensors))


def moved(x):
    return x.redistribute(placements=[R, S0]) if isinstance(x, DTensor) else x


TANGENTS = {
    "a list as index": lambda x: x[[0, 2, 1]],
    "a redistribution": lambda x: moved(x * 2) * x,
    "constants": lambda x: torch.cat([x.detach(), x * 2, 1 / x], 1) + 1,
    "convolution": lambda x: F.conv1d(x[None], x[None, :, :2]),
    "cross_entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1)),
    "norms": lambda x: F.layer_norm(x, (6,)) * x.norm(),
    "products": lambda x: x @ x.mT,
    "softmax": lambda x: x.softmax(0).log_softmax(1),
    "a view of a part": lambda x: x[1:] * 2,
    "views": lambda x: (x * 2).t()[1:3].reshape(-1).cumsum(0),
    "writes": lambda x: torch.zeros_like(x).copy_(x).mul_(x).add_(x.detach()),
}


@pytest.mark.parametrize("name", TANGENTS)
def test_tangents(name):
    """Forward-mode AD; the tangent may have another layout than its tensor."""

    def fn(x, t):
        with forward.dual_level():
            return tuple(forward.unpack_dual(TANGENTS[name](forward.make_dual(x, t))))

    placings = [[S0, S1], [S0, R]], [[R, S1], [SUM, S0]], [[S0, S0], [R, R]]
    agree_at_once(fn, [d(5, 6), e(5, 6)], *placings)


def test_a_tangent_of_a_gradient_is_a_product_with_the_hessian():
    def fn(x, t):
        x = x.detach().requires_grad_()
        with forward.dual_level():
            x = forward.make_dual(x, t)
            (g,) = torch.autograd.grad((x**3).sum() * x.sum(), x, create_graph=True)
            return tuple(y.detach() for y in forward.unpack_dual(g))

    agree_at_once(fn, [d(5, 6), e(5, 6)], [[S0, S1], [S0, R]], [[R, SUM], [S1, S0]])


def test_tangents_leave_and_enter_blocks():
    """to_local returns the tangent's block. One term of a maximum has no tangent, and an error says so."""
    x, t = d(4, 3), e(4, 3)
    with LocalTensorMode(4):
        mesh = mesh_of((2, 2))
        with forward.dual_level():
            dual = forward.make_dual(placed(x, [S0, SUM], mesh), placed(t, [R, R], mesh))
            local = dual.to_local() * 2
            back = DTensor.from_local(local, mesh, [S0, SUM], shape=x.shape).full_tensor()
            got = forward.unpack_dual(back)
            for value, want in ((got.primal, 2 * x), (got.tangent, 2 * t)):
                assert torch.allclose(value.reconcile(), want)
            with pytest.raises(NotImplementedError, match="the tangent of one rank's part is not known"):
                forward.make_dual(placed(x, [MAX, R], mesh), placed(t, [R, R], mesh)).to_local()


def test_inside_a_transform_there_are_no_methods_of_dtensors():
    """Inside a transform the tensor is a wrapper of torch, no DTensor; the error names the missing method."""
    with LocalTensorMode(4):
        x = placed(d(5, 3), [S0, S1], mesh_of((2, 2)))
        with pytest.raises(AttributeError, match="redistribute"):
            grad(lambda x: x.redistribute(placements=[R, R]).sum())(x)
        with pytest.raises(TypeError, match="not inside of a transform"):
            vmap(lambda r: DTensor.from_local(r, x.device_mesh, [R, R]))(torch.ones(2, 3))
