"""Products of tensors of several dims give the results of one device, and no operand is moved without need."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import hessian
from torch.nn.attention import SDPBackend, sdpa_kernel

import spmd
from spmd import _torch
from spmd.sim import LocalTensorMode
from spmd.tensor.redistribute.plan import steps_made
from spmd.tensor.rules.einsum import product
from tests.tensor.single import S0, S1, S2, SUM, R, agree, agree_at_once, mesh_of, placed

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

f64 = torch.float64


def f(*shape, dtype=f64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(dtype.is_floating_point)


S3 = spmd.Shard(3)
PRODUCTS = {
    "linear": (F.linear, [f(4, 6, 5), f(3, 5), f(3)], [
        ([S0, S1], [R, R], [R, R]),  # batch and time
        ([S0, S2], [R, S1], [R, R]),  # rows of the weight: summed, then the bias once
        ([S0, R], [R, S0], [R, S0]),  # columns
        ([SUM, S1], [R, R], [SUM, R]),
        ([S1, S1], [S0, S1], [S0, R]),
    ]),
    "linear without bias": (F.linear, [f(4, 6, 5), f(3, 5)], [
        ([S0, S1], [R, R]), ([S0, S2], [R, S1]), ([S2, S2], [S1, S1]), ([R, SUM], [S0, R]),
    ]),
    "linear of a vector": (F.linear, [f(5), f(3, 5), f(3)], [([S0, R], [S1, R], [R, R]), ([R, R], [S0, S1], [S0, R])]),
    "linear by a vector": (F.linear, [f(4, 6, 5), f(5)], [([S0, S1], [R, R]), ([S0, S2], [R, S0])]),
    "linear, empty": (F.linear, [f(0, 6, 5), f(3, 5), f(3)], [([S0, S1], [R, R], [R, R])]),
    "linear, of one": (F.linear, [f(4, 1), f(3, 1), f(3)], [([R, S1], [R, S1], [R, R])]),
    "linear, few": (F.linear, [f(1, 3, 5), f(3, 5), f(3)], [([S0, S1], [S0, R], [R, S0])]),
    "linear, few features": (F.linear, [f(4, 3, 1), f(1, 1), f(1)], [
        ([S0, S2], [R, S1], [R, R]), ([S2, R], [S1, R], [R, R]), ([R, R], [S0, S1], [S0, R]),
    ]),
    "linear of a vector, few features": (F.linear, [f(1), f(3, 1)], [([S0, R], [S1, R]), ([R, R], [R, S0])]),
    "batches": (torch.matmul, [f(4, 2, 3, 5), f(4, 2, 5, 3)], [
        ([S0, S1], [S0, S1]), ([S0, S2], [S0, R]), ([S1, S3], [S1, S2]), ([S0, R], [S0, S3]), ([SUM, S0], [R, S0]),
    ]),
    "stretched batches": (torch.matmul, [f(4, 1, 3, 5), f(2, 5, 3)], [([S0, R], [R, S0]), ([S0, S1], [S0, S1])]),
    "by a matrix": (torch.matmul, [f(4, 6, 5), f(5, 3)], [([S0, S1], [R, R]), ([S0, S2], [R, S0]), ([R, R], [S1, S0])]),
    "of a matrix": (torch.matmul, [f(4, 5), f(6, 5, 3)], [([R, R], [S0, S2]), ([S0, S1], [S0, S1])]),
    "by a vector": (torch.matmul, [f(4, 6, 5), f(5)], [([S0, S1], [R, R]), ([S2, S0], [S0, R])]),
    "of a vector": (torch.matmul, [f(5), f(4, 5, 3)], [([R, R], [S0, S2]), ([S0, R], [S1, R])]),
    "einsum of heads": (lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), [f(4, 3, 2, 5), f(4, 6, 2, 5)], [
        ([S0, S2], [S0, S2]), ([S0, S1], [S0, R]), ([S3, S0], [S3, S0]),
    ]),
    "einsum to heads": (lambda x, y: torch.einsum("btd,dhk->bthk", x, y), [f(4, 3, 5), f(5, 2, 3)], [
        ([S0, R], [R, S1]), ([S0, S1], [R, R]), ([R, S2], [R, S0]),
    ]),
    "einsum from heads": (lambda x, y: torch.einsum("bthk,hkd->btd", x, y), [f(4, 3, 2, 3), f(2, 3, 5)], [
        ([S0, S2], [R, S0]), ([S0, S1], [R, S2]),
    ]),
    "einsum of an outer product": (lambda x, y: torch.einsum("a,b->ba", x, y), [f(4), f(5)], [([S0, R], [R, S0])]),
    "einsum torch's way": (lambda x, y: torch.einsum("...ab,b->...a", x, y), [f(4, 3, 5), f(5)], [([S0, S1], [R, R])]),
    "matrices": (torch.matmul, [f(4, 5), f(5, 3)], [([S0, S1], [R, S0]), ([SUM, R], [R, S1])]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_they_are_those_of_one_device(name):
    """Forward and backward. The call is made twice: the second one takes the fast path."""
    fn, tensors, placings = PRODUCTS[name]
    agree(lambda *args: (fn(*args), fn(*args)), tensors, *placings)
    agree_at_once(fn, tensors, placings[0], mesh_shape=(3, 1))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # of a vector, by torch itself
@pytest.mark.parametrize(
    "tensors, placings",
    [
        ([f(5), f(3, 5), f(3)], [([R, R], [SUM, R], [R, S0]), ([S0, R], [S1, R], [SUM, R])]),
        ([f(5), f(3, 5)], [([S0, R], [R, S0]), ([SUM, R], [R, R])]),
        ([f(4, 5), f(5)], [([S0, S1], [R, S0]), ([R, R], [SUM, R])]),
        ([f(4, 6, 5), f(3, 5), f(3)], [([S0, S1], [R, R], [R, R]), ([S0, S2], [R, S1], [S0, R])]),
    ],
    ids=["of a vector", "of a vector without bias", "by a vector", "of more"],
)
def test_they_may_be_written_into_what_is_there(tensors, placings):
    """`linear(..., out=...)`, also with vectors as operands."""
    tensors = [t.detach() for t in tensors]
    out = torch.zeros_like(F.linear(*tensors))

    def into(out, *args):
        return torch._C._nn.linear(*args, out=out.clone())

    agree(into, [out, *tensors], *([[R, R], *placing] for placing in placings))


@pytest.mark.parametrize("name", PRODUCTS)
def test_so_are_their_second_derivatives(name):
    """A product with a gradient that torch records as one op."""
    fn, tensors, placings = PRODUCTS[name]

    def twice(*args):
        out = fn(*args)
        grads = torch.autograd.grad((out * out).sum(), args, create_graph=True)
        return sum((g * g).sum() for g in grads)

    agree_at_once(twice, tensors, *placings[:2])


@pytest.mark.parametrize(
    "fn, tensors, placing",
    [
        (F.linear, [f(4, 6, 5), f(3, 5), f(3)], ([S0, S1], [R, R], [R, R])),
        (torch.matmul, [f(4, 6, 5), f(5, 3)], ([S0, S1], [R, R])),
        (torch.matmul, [f(4, 6, 3, 5), f(4, 6, 5, 3)], ([S0, S1], [S0, S1])),
        (lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), [f(4, 6, 3, 5), f(4, 6, 2, 5)], ([S0, S1], [S0, S1])),
        (F.linear, [f(4, 6, 5), f(8, 5), f(8)], ([S0, R], [R, S0], [R, S0])),
    ],
)
def test_batch_and_time_may_be_sharded_each_by_an_axis(fn, tensors, placing):
    """Sequence parallelism, and heads beside batches: nothing is sent, forward or backward."""
    mesh = mesh_of((2, 2))
    with LocalTensorMode(4), steps_made() as steps:
        given = [placed(t, p, mesh) for t, p in zip(tensors, placing, strict=True)]
        out = fn(*given)
        out.backward(torch.ones_like(out))
        assert not [str(step) for step in steps if step.sends]
        assert out._spec.dims[:2] == given[0]._spec.dims[:2]
        assert given[1].grad._spec.dims == given[1]._spec.dims


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}])
def test_attention_made_of_products_keeps_batch_and_heads(options):
    """Attention that torch computes by products, because the fused kernel does not support the options."""
    mask = torch.tril(torch.ones(3, 3, dtype=torch.bool)) if options.pop("attn_mask", False) else None
    tensors = [f(4, 6, 3, 5), f(4, 6, 3, 5) * 2, f(4, 6, 3, 5) + 1]
    tensors = [t.detach().requires_grad_() for t in tensors]

    def attention(*qkv):
        with sdpa_kernel(SDPBackend.MATH), spmd.implicit_replication():
            return F.scaled_dot_product_attention(*qkv, attn_mask=mask, **options)

    agree_at_once(attention, tensors, [[S0, S1]] * 3, [[S1, R], [S1, S0], [R, R]])
    mesh = mesh_of((2, 2))
    with LocalTensorMode(4), steps_made() as steps:
        out = attention(*[placed(t, [S0, S1], mesh) for t in tensors])
        out.backward(torch.ones_like(out))
        assert not [str(step) for step in steps if step.sends]


def test_a_weight_that_is_not_read_waits_for_nothing():
    """The gradient of the weight alone does not depend on the placements of the weight."""
    mesh = mesh_of((2, 2))
    with LocalTensorMode(4), steps_made() as steps:
        x, w = placed(f(4, 6, 5).detach(), [S0, S1], mesh), placed(f(4, 5), [S0, R], mesh)
        out = F.linear(x, w)
        sent = len(steps)
        out.backward(torch.ones_like(out).redistribute(placements=out.placements))
        assert not [str(step) for step in steps[sent:] if step.sends and step.before.shape == w.shape]


def test_a_bias_is_added_once_to_what_was_summed():
    """One reduction for each call, on the fast path as on the first call, also with plain tensors as replicated."""
    x, w, bias = f(4, 6, 4).detach(), f(3, 4).detach(), f(3).detach()
    mesh = mesh_of((2, 2))
    with LocalTensorMode(4), spmd.implicit_replication(), steps_made() as steps:
        given = [placed(t, p, mesh) for t, p in zip((x, w, bias), ([S0, S2], [R, S1], [R, R]), strict=True)]
        for args in (given, given, [given[0], w, bias], [given[0], w, bias]):
            before = len(steps)
            out = F.linear(*args).full_tensor()
            assert len([s for s in steps[before:] if s.kind == "all_reduce"]) == 1
            assert all(torch.allclose(each, F.linear(x, w, bias)) for each in out.local.values())


def test_products_with_vectors_gather_nothing():
    """The ops are decomposed also without autograd, and with `out=`."""
    mesh = mesh_of((2, 2))
    with LocalTensorMode(4), _torch.below_autograd(), steps_made() as steps:
        x, v = placed(f(4, 6).detach(), [S0, S0], mesh), placed(f(6).detach(), [R, R], mesh)
        out = placed(f(4).detach(), [S0, S0], mesh)
        for y in (torch.matmul(x, v), torch.matmul(x, v, out=out), F.linear(v, x)):
            assert y._spec.dims == ((0, 1),)
        assert not [str(step) for step in steps if step.sends]


def test_other_dtypes():
    """Integers have no derivative, and for complex numbers torch does not record it as one op."""
    agree(F.linear, [torch.arange(24).view(2, 3, 4), torch.arange(8).view(2, 4)], ([S0, S1], [R, R]))
    z = torch.complex(f(2, 3, 4).detach(), f(2, 3, 4).detach() + 1)
    agree(lambda a, b: torch.view_as_real(F.linear(a, b)), [z.requires_grad_(), z[0].detach()], ([S0, S1], [R, R]))


def test_under_transforms_the_op_is_taken_apart():
    """torch.func, forward AD and autocast give the results of one device."""
    x, w = f(4, 6, 5), f(3, 5)
    placing = ([S0, S1], [R, R])

    def of_func(a, b):
        return torch.func.grad(lambda b: F.linear(a.detach(), b).square().sum())(b.detach())

    def of_dual(a, b):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(a.detach(), torch.ones_like(a).detach())
            return torch.autograd.forward_ad.unpack_dual(F.linear(dual, b.detach())).tangent

    def of_batches(a, b):
        return torch.func.vmap(lambda row: row @ b.detach().mT)(a.detach())

    for fn in (of_func, of_dual, of_batches):
        agree_at_once(fn, [x, w], placing)
    mesh = mesh_of((2, 2))
    with LocalTensorMode(4), torch.autocast("cpu", torch.bfloat16):
        given = [placed(t, p, mesh) for t, p in zip([f(4, 6, 5, dtype=torch.float32), f(3, 5, dtype=torch.float32)],
        placing, strict=True)]
        assert F.linear(*given).dtype == torch.bfloat16


@pytest.mark.parametrize("shapes", [((4, 6, 5), (3, 4)), ((4, 5), (5, 3, 2)), ((2, 3, 4), (3, 5, 2))])
def test_what_one_device_refuses_is_refused(shapes):
    """Shapes that do not fit."""
    for fn in (torch.matmul, F.linear):
        plain = [f(*shape) for shape in shapes]
        with pytest.raises(RuntimeError):
            fn(*plain)
        mesh = mesh_of((2, 2))
        with LocalTensorMode(4), pytest.raises(RuntimeError):
            fn(*[placed(t, [R, S0], mesh) for t in plain])


def test_the_hessian_of_one_device():
    """Second derivatives, by both of torch's APIs."""
    x, w = f(2, 3, 4).detach(), f(2, 4).detach()
    want = hessian(lambda w: F.linear(x, w).tanh().sum(), w)
    mesh = mesh_of((2, 2))
    with LocalTensorMode(4):
        a, b = placed(x, [S0, S1], mesh), placed(w, [R, R], mesh)
        got = hessian(lambda w: F.linear(a, w).tanh().sum(), b).full_tensor()
        assert all(torch.allclose(each, want) for each in got.local.values())


def test_einsum_is_torchs():
    """Values and shapes for random equations, where they are products of two operands."""
    rng, products = random.Random(0), 0
    for _ in range(400):
        sizes = {label: rng.randint(0, 4) for label in "abcde"}
        left, right = ("".join(rng.sample("abcde", rng.randint(1, 4))) for _ in range(2))
        labels = sorted({*left, *right})
        equation = f"{left},{right}->{''.join(rng.sample(labels, rng.randint(0, len(labels))))}"
        x, y = (torch.randn([sizes[label] for label in labels], dtype=f64) for labels in (left, right))
        got = product(equation, [x, y])
        if got is not NotImplemented:
            products += 1
            torch.testing.assert_close(got, torch.einsum(equation, x, y), msg=equation)
    assert products > 100
