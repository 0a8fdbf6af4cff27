"""Autograd gives what it gives on one device: second derivatives, hooks, custom functions, conversions of blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmd import DTensor, LocalTensor, LocalTensorMode, distribute_tensor
from spmd.tensor.spec import spec_of
from tests.tensor.oracle import close
from tests.tensor.single import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    S0,
    S1,
    SUM,
    R,
    agree_at_once,
    along,
    cut,
    every_rank,
    mesh_of,
    on_ranks,
    placed,
    same,
    weights,
)  # fmt: skip

# The warning of torch when forward-mode AD is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def d(*shape: int) -> torch.Tensor:
    """Numbers that are all different, and that want a gradient."""
    return (weights(torch.empty(shape, dtype=torch.float64)) * 1.5).requires_grad_()


def e(*shape: int) -> torch.Tensor:
    return (weights(torch.empty(shape, dtype=torch.float64)).cos() + 0.1).requires_grad_()


# ---- second derivatives -----------------------------------------------------------------------


def math_attention(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written(x, y):
    x = x * y
    x.mul_(y).add_(1.0)
    return x.tanh_()


TWICE = {
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), [d(3), d(5, 6), e(6, 3)]),
    "amax": (lambda x: x.amax(1) * x[:, 0], [d(5, 6)]),
    "attention": (math_attention, [d(2, 2, 5, 4), e(2, 2, 5, 4), d(2, 2, 5, 4)]),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, w, training=True), [d(5, 6, 2), e(6)]),
    "cat": (lambda x, y: torch.cat([x, y * x[:3]], 0), [d(5, 6), e(3, 6)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2), [d(3, 4, 5, 5), e(6, 4, 3, 3), d(6)]),
    "cross_entropy": (lambda x: F.cross_entropy(x, x.detach().argmin(1), label_smoothing=0.1), [d(5, 6)]),
    "cumprod": (lambda x: x.cumprod(1), [e(5, 6)]),
    "cumsum": (lambda x: x.cumsum(0) ** 2, [d(5, 6)]),
    "embedding": (lambda x, w: F.embedding(x.detach().argmax(1), w) * x[:, :3], [d(5, 6), e(6, 3)]),
    "gelu": (lambda x: F.gelu(x) + F.silu(x) * F.softplus(x), [d(5, 6)]),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, w), [d(3, 6, 2), e(6)]),
    "in place": (written, [d(5, 6), e(5, 6)]),
    "index": (lambda x: x[[0, 2, 2, 1]] * x[1:, ::1], [d(5, 6)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [d(5, 6), e(6), d(6)]),
    "linalg": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.diag_embed(x[0] * 0 + 5)), [d(4, 4)]),
    "log_softmax": (lambda x: x.log_softmax(0) * x.softmax(1), [d(5, 6)]),
    "mse_loss": (lambda x, y: F.mse_loss(x, y) + F.huber_loss(x, y) + F.smooth_l1_loss(x, y), [d(5, 6), e(5, 6)]),
    "norm": (lambda x: x.norm(dim=1) * torch.linalg.vector_norm(x, 3), [d(5, 6)]),
    "pad": (lambda x: F.pad(x, (1, 2), mode="reflect") ** 2, [d(5, 6)]),
    "pooling": (lambda x: F.avg_pool2d(x, 2) * F.max_pool2d(x, 2), [d(2, 3, 4, 6)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), [d(5, 6), e(6)]),
    "scatter": (lambda x, y: x.scatter_add(0, y.detach().argsort(0), y) ** 2, [d(5, 6), e(5, 6)]),
    "std": (lambda x: x.var(1) + x.std(0).sum(), [d(5, 6)]),
    "views": (lambda x: x.view(3, 2, 5).transpose(0, 2).reshape(-1) ** 2, [d(5, 6)]),
}


def with_second(fn):
    """The first derivatives of a sum of squares, and the derivatives of the sum of their cubes."""

    def run(*tensors):
        leaves = [x for x in tensors if x.requires_grad]
        first = torch.autograd.grad((fn(*tensors) ** 2).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum((g**3).sum() for g in first), leaves)]

    return lambda *tensors: [x.detach() for x in run(*tensors)]


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_those_of_one_device(name):
    fn, tensors = TWICE[name]
    agree_at_once(with_second(fn), tensors, along([S0, S1], tensors), along([SUM, S0], tensors))


# ---- blocks -----------------------------------------------------------------------------------

REDUCED = {
    MAX: lambda x: x.amax(0), MIN: lambda x: x.amin(0), PRODUCT: lambda x: x.prod(0),
    SUM: lambda x: x.sum(0), AVG: lambda x: x.mean(0),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(REDUCED, key=str), ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["two axes", "one axis, sharded"])
def test_the_terms_of_a_partial_get_what_its_reduction_gives(kind, sharded):
    """First and second derivative and tangent of from_local, also with ties, zeros and an uneven shard."""
    terms = (torch.arange(4 * 5 * 3).reshape(4, 5, 3) % 7 % 4).double()
    blocks = {r: terms[r, : 2 if sharded and r % 2 else 3 if sharded else 5] for r in range(4)}  # 5 rows on 2: 3, 2
    w, t = weights(terms[0]) + 2, terms + 1

    def want():
        x = terms.clone().requires_grad_()
        y = REDUCED[kind](x)
        if sharded:  # the rows of a rank's block, and the ranks that share them
            y = torch.cat([REDUCED[kind](x[:, :3][[0, 2]]), REDUCED[kind](x[:, :2][[1, 3]])])
        (first,) = torch.autograd.grad((y * w + y**3).sum(), x, create_graph=True)
        return y.detach(), first.detach(), torch.autograd.grad((first**2).sum(), x)[0]

    value, *derivatives = want()
    with LocalTensorMode(4):
        mesh = mesh_of((2, 2))
        local = LocalTensor({r: x.clone() for r, x in blocks.items()}, requires_grad=True)
        x = DTensor.from_local(local, mesh, [kind, S0 if sharded else kind], shape=value.shape)
        assert x.placements == ((kind, S0) if sharded else (kind, kind))
        loss = (x * placed(w, [R, R], mesh) + x**3).sum().full_tensor()
        (first,) = torch.autograd.grad(loss, local, create_graph=True)
        total = DTensor.from_local((first**2).sum(), mesh, [SUM, SUM])
        (second,) = torch.autograd.grad(total.full_tensor(), local)
        with torch.autograd.forward_ad.dual_level():
            of = LocalTensor({r: t[r, : len(x)].clone() for r, x in blocks.items()})
            dual = torch.autograd.forward_ad.make_dual(local.detach(), of)
            y = DTensor.from_local(dual, mesh, [kind, S0 if sharded else kind], shape=value.shape)
            tangent = torch.autograd.forward_ad.unpack_dual(y.full_tensor()).tangent.reconcile()
        assert same(every_rank(x)[0], value)
        for got, wanted in zip((first, second), derivatives, strict=True):
            for r, g in got.detach().local.items():
                assert same(g, wanted[r, : len(g)]), (r, g, wanted[r])
    assert tangent.shape == value.shape and (kind == PRODUCT or tangent.abs().min() > 0)


# ---- functions --------------------------------------------------------------------------------


class Cubed(torch.autograd.Function):
    """A custom function whose backward can be differentiated."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(x)
        ctx.by, ctx.mark = by, x * 0
        ctx.mark_non_differentiable(ctx.mark)
        return x**3 * by, ctx.mark

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 3 * ctx.saved_tensors[0] ** 2 * ctx.by, None


class Doubled(torch.autograd.Function):
    """A custom function that writes its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def packed(x):
    seen = []
    with saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t * 1):
        y = (x.exp() * x).sigmoid()
    assert len(seen) >= 3
    return y


def on_cpu(x):
    with torch.autograd.graph.save_on_cpu():
        return (x.exp() * x).tanh()


def checkpointed(reentrant: bool):
    def fn(x, w):
        return torch.utils.checkpoint.checkpoint(
            lambda x, w: F.gelu(x @ w), x, w, use_reentrant=reentrant, preserve_rng_state=False
        )

    return fn


def watched(x, w):
    """Hooks on leaves, on intermediate tensors and on modules change the values that they get."""
    x.register_hook(lambda g: g * 2)
    between = x @ w
    between.retain_grad()
    between.register_hook(lambda g: g.clamp(min=0.1))
    layer = nn.Identity()
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
    layer.register_forward_hook(lambda m, args, out: out.sin())
    layer.register_full_backward_hook(lambda m, given, out: (given[0] + 1,))
    torch.autograd.grad(layer(between).sum(), x, retain_graph=True)
    layer(between).square().sum().backward()
    return between.grad


FUNCTIONS = {
    "a function": lambda x, w: Cubed.apply(x @ w, 2.0)[0],
    "a function twice": lambda x, w: with_second(lambda x: Cubed.apply(x, 2.0)[0])(x),
    "a function that writes": lambda x, w: Doubled.apply(x @ w),
    "anomalies": lambda x, w: _in_anomaly_mode(x, w),
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
    "hooks": watched,
    "only some leaves": lambda x, w: torch.autograd.grad((x @ w).sum(), [w], materialize_grads=True)[0],
    "saved tensors elsewhere": lambda x, w: on_cpu(x),
    "saved tensors packed": lambda x, w: packed(x),
}


def _in_anomaly_mode(x, w):
    with torch.autograd.detect_anomaly(check_nan=True):
        return torch.autograd.grad((x @ w).square().sum(), x)[0]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_autograd_lets_users_do_is_done_on_dtensors(name):
    agree_at_once(FUNCTIONS[name], [d(5, 6), e(6, 3)], [[S0, S1], [R, S0]], [[SUM, R], [S0, S0]], [[S1, S0], [S0, R]])


def test_an_anomaly_names_the_op():
    with LocalTensorMode(4):
        x = placed(torch.zeros(4), [S0, R], mesh_of((2, 2))).requires_grad_()
        expected = pytest.raises(RuntimeError, match="SqrtBackward0")
        with expected, pytest.warns(UserWarning), torch.autograd.detect_anomaly():
            (x.sqrt() * 0).sum().backward()


# ---- leaves -----------------------------------------------------------------------------------


def test_gradients_accumulate_where_they_lie_otherwise():
    """Gradients are added to one that was set by hand, or that has another layout; the sum is right in any layout."""
    x0, g0 = d(5, 3), e(5, 3).detach()
    with LocalTensorMode(4):
        mesh = mesh_of((2, 2))
        for lies in ([S0, S1], [R, R], [SUM, R], [S1, S1], [AVG, SUM]):
            x = placed(x0, [S0, S1], mesh)
            x.grad = placed(g0, lies, mesh)
            seen = []
            x.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.shape))
            (x * x).sum().backward()
            (x * x).sum().backward()
            assert seen == [x.shape] * 2
            assert all(same(g, 4 * x0.detach() + g0) for g in every_rank(x.grad)), lies


REFUSED = {
    "in-place operation": lambda x: x.mul_(2),
    "a view of a leaf Variable": lambda x: x[0].mul_(2),
    "attempting to assign a gradient of size": lambda x: setattr(x, "grad", x.detach()[:2]),
    "modified by an inplace operation": lambda x: _write_what_was_saved(x),
    "only Tensors of floating point": lambda x: (x > 0).requires_grad_(),
    "does not require grad": lambda x: x.detach().sum().backward(),
    "implicitly created only for scalar": lambda x: (x * 2).backward(),
    "backward through the graph a second time": lambda x: _twice(x),
    "you can only change requires_grad flags of leaf": lambda x: (x * 2).requires_grad_(False),
    "not have been used in the graph": lambda x: torch.autograd.grad(x.sum(), x.detach().requires_grad_()),
}


def _write_what_was_saved(x):
    y = x.exp()
    z = y * y
    y.add_(1)
    z.sum().backward()


def _twice(x):
    y = x.exp().sum()
    y.backward()
    y.backward()


@pytest.mark.parametrize("text", REFUSED)
def test_what_torch_refuses_is_refused_alike(text):
    """Leaves, version counters, freed graphs: a plain tensor and a DTensor raise the same errors."""
    with pytest.raises(RuntimeError, match=text):
        REFUSED[text](d(5, 3))
    with LocalTensorMode(4):
        x = placed(d(5, 3), [S0, S1], mesh_of((2, 2)))
        with pytest.raises(RuntimeError, match=text):
            REFUSED[text](x)


def test_flags_and_versions_are_a_tensors():
    with LocalTensorMode(4):
        x = placed(d(5, 3), [S0, S1], mesh_of((2, 2)))
        y = x * 2
        assert x.is_leaf and not y.is_leaf and y.grad_fn.name() == "MulBackward0"
        detached = y.detach()
        assert detached.is_leaf and not detached.requires_grad
        assert detached._version == (before := y._version)
        detached.add_(1)
        assert y._version == before + 1  # they share memory
        assert x.data.requires_grad is False and x.detach_().is_leaf
        assert x.requires_grad_(True) is x and x.requires_grad


# ---- on a network -----------------------------------------------------------------------------


def second_on_gloo(rank: int) -> list[torch.Tensor]:
    mesh = mesh_of((2, 2))
    x = torch.arange(15.0, dtype=torch.float64).reshape(5, 3).sub(7).div(4)
    dx = distribute_tensor(x.requires_grad_(), mesh, [S0, S1])
    found = with_second(lambda x: F.layer_norm(x, (3,)).softmax(0))(dx)
    local = torch.full((4,), float(rank % 3), requires_grad=True)
    DTensor.from_local(local, mesh, [MAX, MAX]).full_tensor().sum().backward()
    return [*(g.full_tensor() for g in found), local.grad]


def test_on_gloo(gloo4):
    x = torch.arange(15.0, dtype=torch.float64).reshape(5, 3).sub(7).div(4).requires_grad_()
    want = with_second(lambda x: F.layer_norm(x, (3,)).softmax(0))(x)
    for rank, (*got, share) in enumerate(gloo4.run(second_on_gloo)):
        assert all(same(a, b) for a, b in zip(got, want, strict=True))
        assert share.tolist() == [float(rank == 2)] * 4


def test_ranks_in_threads_have_gradients_of_their_own():
    def rank(mesh):
        local = torch.full((3,), float(mesh.get_rank() // 2), requires_grad=True)  # two ranks share the maximum
        DTensor.from_local(local, mesh, [MAX, MAX]).full_tensor().sum().backward()
        return local.grad.tolist()

    assert on_ranks(rank) == [[0.0] * 3] * 2 + [[0.5] * 3] * 2


def test_gradients_lie_as_a_compiled_backward_takes_for_granted():
    """torch.compile assumes a layout for the gradient of a result, and asks for that layout if it gets another."""
    want = torch.arange(24.0, dtype=torch.float64).view(4, 6)

    def rank(mesh):
        parts = DTensor(pieces[mesh.get_coordinate()], spec_of(mesh, [SUM, S1], want.shape, want.dtype))
        guessed = parts.__coerce_tangent_metadata__()
        came = DTensor(want.clone(), spec_of(mesh, [R, R], want.shape, want.dtype))
        _, made_of = guessed.__tensor_flatten__()
        turned = came.__coerce_same_metadata_as_tangent__(made_of)
        assert came.__coerce_same_metadata_as_tangent__(made_of, torch.Tensor) is None
        return guessed.placements, turned._spec is guessed._spec, guessed.full_tensor(), turned.full_tensor()

    pieces = cut(want, [SUM, S1], (2, 2))
    for placements, alike, *values in on_ranks(rank):
        assert placements == (R, S1) and alike
        assert all(close(x, want, 1e-9) for x in values)
