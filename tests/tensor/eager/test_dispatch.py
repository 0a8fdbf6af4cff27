"""The eager front end: mixed operands, writes and views, partials, caches, ops without a rule, communication."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import DTensor, debug, distribute_tensor, implicit_replication
from spmd.sim import LocalTensorMode, ThreadWorld
from spmd.tensor.cache import Cache, forget_decisions, frozen
from spmd.tensor.eager import fast_path
from spmd.tensor.eager.dispatch import lowerings
from spmd.tensor.eager.operands import with_tensors
from spmd.tensor.spec import Spec
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
    agree,
    cut,
    leaf,
    mesh_of,
    on_ranks,
    same,
    weights,
    whole,
)

F64 = torch.float64
aten = torch.ops.aten


def smooth(*shape: int) -> torch.Tensor:
    return weights(torch.empty(shape, dtype=F64))


def sent(fn: Callable) -> list[str]:
    """The kinds of collectives that rank 0 makes in fn(mesh)."""
    world = ThreadWorld(4)
    world.run(lambda rank: fn(mesh_of((2, 2))))
    return [call.kind for call in world.calls[0]]


def placed(mesh, x: torch.Tensor, placements) -> DTensor:
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


# ---- plain tensors and other meshes -----------------------------------------------------------


def test_scalars_and_0_dim_tensors_mix_with_dtensors():
    """Numbers and 0-dim tensors count as the same on all ranks; types are promoted as on one device."""
    x = torch.arange(6).reshape(2, 3)
    fns = [
        lambda x: x + 1, lambda x: 2.5 * x, lambda x: x * True, lambda x: x + torch.tensor(1), lambda x: x / 2,
        lambda x: x * torch.tensor(2.5), lambda x: torch.tensor(2.5, dtype=F64) * x, lambda x: 2**x, lambda x: x // 2,
        lambda x: torch.where(x > 2, x, torch.tensor(0.5)), lambda x: torch.clamp(x, min=torch.tensor(2)),
        lambda x: x.float() * torch.tensor(2, dtype=F64), lambda x: torch.tensor(3) - x, lambda x: 1 / (x + 1),
    ]  # fmt: skip
    for fn in fns:
        agree(fn, [x], [[R, R]], [[S0, S1]], [[SUM, S0]])


def test_a_plain_tensor_takes_in_a_number():
    """After `total += loss` a plain 0-dim `total` is still plain, and has the reduced value."""

    def rank(mesh):
        total = torch.zeros((), dtype=F64)
        with torch.no_grad():
            out = total.add_(placed(mesh, torch.ones(4, dtype=F64), [S0, R]).sum())
        return out is total, total

    assert on_ranks(rank) == [(True, torch.tensor(4.0, dtype=F64))] * 4


def test_a_plain_tensor_with_dims_is_written_where_it_is_said_to_be_replicated():
    """A copy of a DTensor into a plain tensor gives every rank the global tensor."""
    x = smooth(5, 4)

    def rank(mesh):
        plain = torch.zeros(5, 4, dtype=F64)
        with implicit_replication():
            plain.copy_(placed(mesh, x, [S0, S1]))
        return plain

    assert all(torch.equal(plain, x) for plain in on_ranks(rank))


MIXED = {
    r"a plain tensor of shape \[4\] met a DTensor.*distribute_tensor.*implicit_replication.*from_local": (
        lambda x, mesh: x + torch.ones(4)
    ),
    "that requires a gradient met a DTensor": lambda x, mesh: x * torch.ones((), requires_grad=True),
    r"operands are on two meshes, .*\[0, 1, 2, 3\]": lambda x, mesh: x + placed(mesh_of((4,)), torch.ones(4), [R]),
    "a plain tensor of shape": lambda x, mesh: torch.cat([x, torch.ones(4)]),
    "use the op that returns a new tensor": lambda x, mesh: torch.zeros(()).add_(x.requires_grad_().sum()),
}


@pytest.mark.parametrize("text", MIXED)
def test_what_does_not_mix_says_what_to_do(text):
    """Every rank raises, and the error says what would work."""

    def rank(mesh):
        with pytest.raises((RuntimeError, ValueError), match=text):
            MIXED[text](distribute_tensor(torch.ones(4), mesh, [S0, R]), mesh)
        return True

    assert on_ranks(rank) == [True] * 4


def test_under_implicit_replication_plain_tensors_count_as_replicated():
    """Also in a backward pass outside the block, because the forward pass took them as replicated."""
    x, y = smooth(4, 6).requires_grad_(), smooth(6)
    want = torch.autograd.grad((x * y).sin().sum(), x)[0]

    def rank(mesh):
        d = distribute_tensor(x, mesh, [S0, S1])
        with implicit_replication():
            out = (d * y).sin().sum()
        out.backward()
        with pytest.raises(RuntimeError, match="plain tensor"):
            d.detach() * y
        return d.grad.full_tensor()

    assert all(close(grad, want, 1e-12) for grad in on_ranks(rank))


# ---- writes -----------------------------------------------------------------------------------

WRITES: dict[str, Callable] = {
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(2.5),
    "add_ number": lambda x, y: x.add_(2),
    "add_ 0-dim": lambda x, y: x.add_(torch.tensor(2.0)),
    "add_": lambda x, y: x.add_(y, alpha=3),
    "mul_ number": lambda x, y: x.mul_(2.5),
    "mul_": lambda x, y: x.mul_(y),
    "mul_ itself": lambda x, y: x.mul_(x),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ a row": lambda x, y: x.copy_(y[:1]),
    "relu_": lambda x, y: x.relu_(),
    "cumsum_": lambda x, y: x.cumsum_(0),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, -1.5),
    "where mask": lambda x, y: x.index_put_((y > 0,), torch.tensor(1.5, dtype=F64)),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y.abs() + 1, value=0.5),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "clamp_": lambda x, y: x.clamp_(min=-0.1, max=0.3),
    "addmm_": lambda x, y: x.addmm_(y, y.t() @ y),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([0, 0, 2, 3, 4]), y),
    "scatter_": lambda x, y: x.scatter_(1, torch.zeros(5, 1, dtype=torch.int64), 9.0),
    "tril_": lambda x, y: x.tril_(),
    "sqrt_ of abs_": lambda x, y: x.abs_().sqrt_(),
    "+=": lambda x, y: x.__iadd__(y),
    "whole slice": lambda x, y: x[:].add_(y).view_as(x),
}

TARGETS = [[R, R], [S0, R], [S0, S1], [S1, S1], [SUM, R], [SUM, S0], [AVG, S1]]
SOURCES = [[R, R], [S1, S0], [SUM, R], [S0, R]]


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_those_of_one_device(name):
    """Into replicated, sharded or partial targets, from operands in other layouts; the target keeps its layout."""

    def written(x, y):
        before, spec = x, getattr(x, "_spec", None)
        out = WRITES[name](x, y)
        assert out is before or name == "whole slice"
        assert getattr(x, "_spec", None) is spec
        return x

    with implicit_replication():  # indices are plain
        agree(written, [smooth(5, 4), smooth(5, 4) + 0.1], *itertools.product(TARGETS, SOURCES))


def test_out_is_written_wherever_it_lies():
    """`out=` is one more operand that is written, and it is the result."""
    x, y = smooth(4, 6), smooth(4, 6) + 1

    def rank(mesh):
        out = placed(mesh, torch.zeros(4, 6, dtype=F64), [S1, S0])
        back = torch.mul(placed(mesh, x, [S0, R]), placed(mesh, y, [R, S1]), out=out)
        least, where = placed(mesh, torch.zeros(4, dtype=F64), [S0, R]), placed(mesh, torch.zeros(4).long(), [R, S0])
        torch.min(placed(mesh, x, [S0, S1]), 1, out=(least, where))
        return back is out, out.full_tensor(), least.full_tensor(), where.full_tensor(), out.placements

    for back, out, least, where, lies in on_ranks(rank):
        assert back and torch.equal(out, x * y) and lies == (S1, S0)
        assert torch.equal(least, x.min(1).values) and torch.equal(where, x.min(1).indices)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_written_back(momentum):
    """An op that writes into operands other than its first, here sharded ones; the second batch is averaged in."""
    x = smooth(8, 4)
    want = nn.BatchNorm1d(4, momentum=momentum).double()
    want(x * 2)
    out = want(x)

    def rank(mesh):
        norm = nn.BatchNorm1d(4, momentum=momentum).double()
        for tensors in (norm._parameters, norm._buffers):
            for name, t in tensors.items():
                tensors[name] = placed(mesh, t.detach(), [R, S0 if t.ndim else R])
        norm(placed(mesh, x * 2, [S0, R]))
        got = norm(placed(mesh, x, [S0, R]))
        return [got.full_tensor(), norm.running_mean.full_tensor(), norm.running_var.full_tensor()]

    for got in on_ranks(rank):
        for a, b in zip(got, [out, want.running_mean, want.running_var], strict=True):
            assert close(a.detach(), b.detach(), 1e-9)


def test_memory_cannot_be_set():
    """A DTensor has no single memory to point at; the error says what to use."""

    def rank(mesh):
        x = placed(mesh, torch.ones(4, 1), [S0, R])
        with pytest.raises(NotImplementedError, match=r"take full_tensor\(\) first"):
            x.set_(x.clone())
        return True

    assert on_ranks(rank) == [True] * 4


# ---- views ------------------------------------------------------------------------------------

VIEWS: dict[str, Callable] = {
    "x[:2]": lambda x: x[:2],
    "x[1]": lambda x: x[1],
    "x[:, ::2]": lambda x: x[:, ::2],
    "x[:, 1]": lambda x: x[:, 1],
    "x[None, ..., None]": lambda x: x[None, ..., None],
    "narrow": lambda x: x.narrow(1, 1, 3),
    "t": lambda x: x.t(),
    "t[1]": lambda x: x.t()[1],
    "view(-1)": lambda x: x.view(-1),
    "view(2, 2, 6)": lambda x: x.view(2, 2, 6),
    "view(4, 3, 2)": lambda x: x.view(4, 3, 2),
    "flatten of t": lambda x: x.t().unsqueeze(0).flatten(0, 1),
    "chunk(2, 0)[1]": lambda x: x.chunk(2, 0)[1],
    "split(3, 1)[0]": lambda x: x.split(3, 1)[0],
    "unbind(1)[4]": lambda x: x.unbind(1)[4],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "detach": lambda x: x.detach(),
    "alias": lambda x: x.redistribute(placements=x.placements) if isinstance(x, DTensor) else x,
    "view of a view": lambda x: x.t()[1:3].t()[:, 0],
}
BASES = {"R R": [R, R], "S0 R": [S0, R], "R S1": [R, S1], "S0 S1": [S0, S1], "S0 S0": [S0, S0], "+ S1": [SUM, S1]}


ONE_OF_MANY = {"chunk(2, 0)[1]", "split(3, 1)[0]", "unbind(1)[4]"}
"""Views that must not be written while torch records gradients."""


def through(name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Write into a view: the values of base and view after it, and the gradient through it."""
    view = VIEWS[name]
    x = x.detach().clone().requires_grad_()
    if name in ONE_OF_MANY:
        with torch.no_grad():
            return [view(x).mul_(-3).clone(), x.clone()]
    base = x * 1
    shown = view(base)
    shown.mul_(-3)
    base.mul_(2)
    (base * base).sum().backward()
    return [t.detach().clone() for t in (base, shown, x.grad)]


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_is_seen_by_its_base(name):
    """Also where the view cuts through blocks, and is a copy: base, view and gradient are right."""
    x = smooth(4, 6)
    want = through(name, x)
    parts = {lies: cut(x, placements, (2, 2)) for lies, placements in BASES.items()}

    def rank(mesh):
        return {lies: [whole(t) for t in through(name, leaf(parts[lies], BASES[lies], x, mesh))] for lies in BASES}

    for found in on_ranks(rank):
        for lies, got in found.items():
            assert all(same(a, b, 1e-9) for a, b in zip(got, want, strict=True)), lies


def written_all_over(x):
    """Views of views and their bases are written in turn; all are read after each write."""
    rows, turned = x[1:], x.t()
    corner, flat = rows[:, 2:5], turned.flatten(0, 1)[:3]
    seen = []
    for views, write in itertools.product(((corner, rows), (x, turned), (turned[0], corner)), ("mul_", "add_")):
        for i, view in enumerate(views):
            getattr(view, write)(2 + i)
            seen += [t.clone() for t in (x, rows, turned, corner, flat, view.sum())]
    return tuple(seen)


def test_all_views_of_a_tensor_show_what_is_written_through_any():
    """With any number of copies between them; also in inference mode, where torch counts no versions."""
    agree(written_all_over, [smooth(4, 6)], *([lies] for lies in BASES.values()))
    with torch.inference_mode():
        agree(written_all_over, [smooth(5, 6)], [[S0, S1]], [[S1, S1]])


def test_views_of_a_tensor_from_outside_of_inference_mode():
    """Such views are no inference tensors, as on one device: autograd may use them later. New results are."""

    def rank(mesh):
        x = placed(mesh, smooth(4, 6), [S0, R])
        for _ in range(2):
            with torch.inference_mode():
                views = [x.t(), x[1:], *x.split(2), x.view(-1), x.detach(), x.redistribute(placements=x.placements)]
                views[1].mul_(2)
                made = [x * 2, x.sum(0), F.linear(x, x)]
            assert [v.is_inference() for v in views + made] == [False] * len(views) + [True] * 3
        (views[1] * x.detach().requires_grad_()[1:]).sum().backward()
        return x.full_tensor()

    want = smooth(4, 6)
    want[1:] *= 4
    assert all(torch.equal(found, want) for found in on_ranks(rank))


def test_a_view_goes_on_showing_the_memory_it_was_taken_of():
    """Its base may be transposed in place, or get other data: the view does not change."""

    def rank(mesh):
        x, y = placed(mesh, torch.ones(4, 2), [S0, R]), placed(mesh, torch.ones(4, 2), [S0, R])
        turned, kept = x[1:], y[1:]
        x.t_()
        x[0].mul_(3)
        before = y.detach()
        y.data = placed(mesh, torch.zeros(4, 2), [S0, R])
        before.mul_(5)
        kept.add_(1)
        shown = y[2:]
        y.data = after = placed(mesh, torch.arange(6), [R, S0])
        rows = after[1:]
        y[4:].fill_(9)
        return [t.full_tensor().tolist() for t in (turned, kept, before, y, shown, rows)]

    want = [[[3.0, 1.0]] * 3, [[6.0, 6.0]] * 3, [[5.0, 5.0]] + [[6.0, 6.0]] * 3, [0, 1, 2, 3, 9, 9], [[0.0, 0.0]] * 2]
    want.append([1, 2, 3, 9, 9])
    assert on_ranks(rank) == [want] * 4


def test_what_a_view_shows_is_moved_again_only_after_a_write():
    """One move makes the copy. A write to the base moves nothing; one more move refreshes the copy after it."""

    def rank(mesh):
        x = placed(mesh, smooth(4, 6), [S0, R])
        rows = x[:2]
        rows.sum(), rows * 2, x.mul_(2), rows.sum(), rows + 1

    assert sent(rank) == ["all_to_all_single"] * 2


def test_autograd_notices_writes_to_what_it_saved():
    """As on one device: a tensor needed for a gradient may not be overwritten, itself or through a view."""

    def rank(mesh):
        x = placed(mesh, smooth(4, 6), [S0, R]).requires_grad_()
        for spoil in (lambda y: y.add_(1), lambda y: y.t().mul_(2), lambda y: y.zero_()):
            y = x * 1
            out = (y * y).sum()
            with torch.no_grad():
                spoil(y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            x.add_(1)
        return x._version

    assert on_ranks(rank) == [0] * 4


# ---- partials ---------------------------------------------------------------------------------

OF_PARTIALS: dict[str, Callable] = {
    "x + 1": lambda x, y: x + 1,
    "1 - x": lambda x, y: 1 - x,
    "x + y": lambda x, y: x + y,
    "x * y": lambda x, y: x * y,
    "x * x": lambda x, y: x * x,
    "x / 3": lambda x, y: x / 3,
    "3 / x": lambda x, y: 3 / x,
    "x // 2": lambda x, y: x // 2,
    "x % 3": lambda x, y: x % 3,
    "div floor": lambda x, y: torch.div(x, 2, rounding_mode="floor"),
    "x ** 2": lambda x, y: x**2,
    "x > 1": lambda x, y: x > 1,
    "x == y": lambda x, y: x == y,
    "-x": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "sign": lambda x, y: x.sign(),
    "to int": lambda x, y: x.to(torch.int32),
    "to bool": lambda x, y: x.bool(),
    "to float": lambda x, y: x.float(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "clamp": lambda x, y: x.clamp(1, 3),
    "where": lambda x, y: torch.where(x > 1, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 1, 7),
    "sum": lambda x, y: (x.sum(), x.sum(0)),
    "max": lambda x, y: (x.amax(1), x.argmax(1), x.max(0)),
    "prod": lambda x, y: x.prod(0),
    "any": lambda x, y: ((x > 2).any(), (x > 0).all(1)),
    "cumsum": lambda x, y: x.cumsum(1),
    "t": lambda x, y: x.t().reshape(-1),
    "cat": lambda x, y: torch.cat([x, y, x[:1]]),
    "pad": lambda x, y: F.pad(x, (1, 1), value=2),
    "index": lambda x, y: (x[1:, 0], x[x > 1], x.nonzero()),
}
OF_FLOATS: dict[str, Callable] = {
    "exp": lambda x, y: x.exp(),
    "relu": lambda x, y: F.relu(x - 2),
    "round": lambda x, y: x.round(),
    "sqrt": lambda x, y: x.sqrt(),
    "mean": lambda x, y: (x.mean(), x.mean(0)),
    "norm": lambda x, y: (x.norm(), x.var(1)),
    "softmax": lambda x, y: x.softmax(1),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "matmul": lambda x, y: x @ y.t(),
}


def eighths(*shape: int, dtype=F64) -> torch.Tensor:
    """Numbers whose terms on the ranks add up exactly, so that rounding and comparisons can be tested."""
    return (torch.arange(torch.Size(shape).numel()) % 7 + 1).reshape(shape).to(dtype)


def exact_parts(x, placements):
    """Terms that are integers: their sum is exact."""
    parts = cut(x, placements, (2, 2))
    if not x.is_floating_point() or not any(p in (SUM, AVG) for p in placements):
        return parts
    n = {(SUM, R): 2, (R, AVG): 2, (SUM, SUM): 4}[tuple(placements)]
    terms = [x + 8 * (i - (n - 1) / 2) for i in range(n)] if AVG in placements else [x * (3 - n), *[x] * (n - 1)][:n]
    terms = [x - sum(terms[1:])] + terms[1:] if SUM in placements else terms
    order = sorted(parts)
    index = {(SUM, R): lambda at: at[0], (R, AVG): lambda at: at[1], (SUM, SUM): order.index}[tuple(placements)]
    return {at: terms[index(at)].clone() for at in order}


PARTIALS = [[SUM, R], [R, AVG], [SUM, SUM], [MAX, S0], [MIN, MIN], [PRODUCT, R]]


@pytest.mark.parametrize(
    "fns, dtype", [(OF_PARTIALS, F64), (OF_PARTIALS, torch.int64), (OF_FLOATS, F64)], ids=["f64", "i64", "only floats"]
)
def test_ops_on_partials_see_the_reduced_value(fns, dtype):
    """Affine, nonlinear, rounding and comparing ops, casts, and mixtures of two kinds."""
    x, y = eighths(4, 3, dtype=dtype), eighths(4, 3, dtype=dtype).flip(0)
    placings = [(p, q) for p in PARTIALS for q in [PARTIALS[0], PARTIALS[3], [S0, R]]]
    placings = [pq for pq in placings if dtype is F64 or AVG not in pq[0]]
    want = {name: _flat(fn(x, y)) for name, fn in fns.items()}
    pieces = [(exact_parts(x, p), exact_parts(y, q)) for p, q in placings]

    def rank(mesh):
        wrong = []
        for (p, q), (xs, ys) in zip(placings, pieces, strict=True):
            for name, fn in fns.items():
                got = _flat(fn(leaf(xs, p, x, mesh), leaf(ys, q, y, mesh)))
                if not all(same(whole(a), b) for a, b in zip(got, want[name], strict=True)):
                    wrong.append(f"{name} of {p} and {q}: {got}, not {want[name]}")
        return wrong

    for wrong in on_ranks(rank):
        assert not wrong, f"{len(wrong)} wrong: {wrong[0]}"


def _flat(out) -> list:
    return [t for x in out for t in _flat(x)] if isinstance(out, tuple) else [out]


# ---- ops without a rule -----------------------------------------------------------------------

NO_RULE: dict[str, Callable] = {
    "inv": lambda x: torch.linalg.inv(x @ x.t() + torch.eye(4, dtype=F64)),
    "svd": lambda x: torch.linalg.svdvals(x),
    "fft": lambda x: torch.fft.fft(x),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "cdist": lambda x: torch.cdist(x, x),
    "take": lambda x: x.take(torch.tensor([3, 0, 23])),
    "interpolate": lambda x: F.interpolate(x[None, None], size=(3, 3), mode="bilinear"),
    "reflect": lambda x: F.pad(x[None], (2, 2), mode="reflect"),
    "kthvalue": lambda x: x.flatten().kthvalue(5),
    "bincount": lambda x: torch.bincount((x * 5).long().flatten().abs()),
    "histc": lambda x: x.histc(4),
    "searchsorted": lambda x: torch.searchsorted(x.flatten().sort().values, x),
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "nonzero, tuple": lambda x: (x > 0).nonzero(as_tuple=True),
    "unique": lambda x: torch.unique((x * 3).long(), return_counts=True),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), 0),
    "isin": lambda x: torch.isin((x * 3).long(), torch.tensor([1, 2])),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "view of bits": lambda x: x.round().view(torch.int64),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[0, 2], [1, 1]]), x),
    "addmv of integers": lambda x: torch.addmv(x.long()[:, 0], x.long(), x.long()[0], alpha=0.6, beta=2),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "logdet": lambda x: torch.logdet(x @ x.t() + torch.eye(4, dtype=F64)),
}


@pytest.mark.parametrize("name", NO_RULE)
def test_ops_without_a_rule_run_on_whole_tensors(name):
    """Right, though expensive; also where the data decides the shape of the result."""
    with implicit_replication():
        agree(NO_RULE[name], [smooth(4, 6)], [[S0, S1]], [[SUM, R]], [[S1, S1]])


def test_ops_that_draw_nothing_are_not_random():
    """Dropout of nothing, in evaluation, and attention without it."""
    agree(lambda x: (F.dropout(x, 0.0), F.dropout(x, 0.5, training=False)), [smooth(4, 6)], [[S0, R]])
    agree(lambda x: F.scaled_dot_product_attention(x, x, x), [smooth(2, 2, 4, 3)], [[S0, S1]])


def test_a_sparse_result_is_refused():
    with pytest.raises(NotImplementedError, match="a DTensor is strided"):
        on_ranks(lambda mesh: placed(mesh, torch.eye(4), [S0, R]).to_sparse())


def test_a_mistake_of_the_user_is_torchs_error():
    """On every rank, before anything is sent, and without a line in the log."""
    logged = []
    handler = logging.Handler()
    handler.emit = logged.append
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    filters = list(log.filters)

    def rank(mesh):
        x = placed(mesh, torch.ones(4, 6), [S0, R])
        for mistake in (lambda: x + placed(mesh, torch.ones(5), [R, R]), lambda: x @ x, lambda: x.view(5)):
            with pytest.raises(RuntimeError, match=r"size|shape|reduction dim|broadcast"):
                mistake()

    assert sent(rank) == []
    log.removeHandler(handler)
    assert logged == [] and log.filters == filters


# ---- communication ----------------------------------------------------------------------------


def test_ops_that_need_nothing_send_nothing():
    """Factories do not gather their operand; nor do views along replicated dims, nor writes into partials."""

    def rank(mesh):
        x = placed(mesh, torch.ones(6, 4), [S0, S1])
        p = DTensor.from_local(torch.ones(6, 4), mesh, [SUM, R])
        made = [
            torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2), torch.empty_like(x), x.new_zeros(6, 4),
            torch.empty_like(x.t()), x.new_empty(6, 4), x.new_empty_strided((6, 4), (4, 1)), x.new_full((6, 4), 2.0),
            x.new_empty_strided((6, 4), (1, 6)), x.clone(), x.detach(), x * 2, x + x, x.t(), x.double(),
            x.view(6, 4, 1),
        ]  # fmt: skip
        lies = [m._spec.dims for m in made]
        assert all(sorted(axes for d in dims for axes in d) == [0, 1] for dims in lies), lies
        assert made[9].stride() == (1, 6)
        others = [x.new_zeros(3), x.new_full((2,), 1), torch.zeros_like(p), p.detach(), p * 2, p + p, p.zero_(), p.t()]
        p.copy_(p * 3)
        return len(others)

    assert sent(rank) == []


def test_one_tensor_in_two_places_is_moved_once():
    """`p * p` reduces p once, and so does an in-place `addcmul` with it."""

    def rank(mesh):
        p = DTensor.from_local(torch.ones(4), mesh, [SUM, R])
        x = placed(mesh, torch.ones(4), [R, R])
        return [(p * p).sum().item(), x.addcmul_(p, p).sum().item()]

    assert sent(rank) == ["all_reduce"] * 2
    assert on_ranks(rank) == [[16.0, 20.0]] * 4


def test_a_mesh_that_is_part_of_the_job_talks_among_its_own_ranks():
    """Each row of the mesh has a tensor of its own; reading its value communicates in that row only."""
    rows = [smooth(5, 3), smooth(5, 3) + 1]

    def rank(mesh):
        here = mesh["tp"]
        x = distribute_tensor(rows[mesh.get_coordinate()[0]], here, [S0])
        out = [x.sum().item(), torch.equal(x, x * 1), (x @ x.t()).full_tensor()]
        return mesh.get_coordinate()[0], out if mesh.get_coordinate()[0] else [*out, x.amax().item()]

    for row, (total, equal, product, *rest) in on_ranks(rank):
        assert abs(total - rows[row].sum().item()) < 1e-9 and equal and close(product, rows[row] @ rows[row].t(), 1e-9)
        assert not rest or rest == [rows[0].max().item()]


# ---- the cache --------------------------------------------------------------------------------


def test_a_result_does_not_depend_on_what_was_called_before():
    """Arguments that are equal in Python but not in torch do not share a lowering."""
    x = torch.arange(-3, 3).reshape(2, 3)
    calls = [
        lambda x: x + 1, lambda x: x + 1.0, lambda x: x + True, lambda x: x + torch.tensor(1), lambda x: x * 0,
        lambda x: x + torch.tensor(1.0), lambda x: x + torch.tensor(1, dtype=torch.int8), lambda x: x.double() * 0.0,
        lambda x: x.double() * -0.0, lambda x: torch.full_like(x, -0.0, dtype=F64), lambda x: x * float("nan"),
        lambda x: torch.full_like(x, 0.0, dtype=F64), lambda x: x**2, lambda x: x**2.0, lambda x: x.sum(1),
        lambda x: x.sum(1, keepdim=True), lambda x: x.sum(0), lambda x: torch.full_like(x, True, dtype=torch.bool),
        lambda x: x.clamp(min=1), lambda x: x.clamp(min=1.0), lambda x: x / 1, lambda x: x + (1 + 0j), lambda x: x // 1,
    ]  # fmt: skip
    want = [fn(x) for fn in calls]
    signs = [w.signbit() if not w.is_complex() else w.real.signbit() for w in want]
    order = list(range(len(calls)))
    for turn in (order, order[::-1], order[1::2] + order[::2]):
        forget_decisions()

        def rank(mesh, turn=turn):
            d = placed(mesh, x, [S1, R])
            return {i: calls[i](d).full_tensor() for i in turn}

        for got in on_ranks(rank):
            for i, (a, b) in enumerate(zip((got[i] for i in order), want, strict=True)):
                assert a.dtype == b.dtype and close(a, b, 0), f"call {i}: {a}, not {b}"
                assert torch.equal(a.signbit() if not a.is_complex() else a.real.signbit(), signs[i]), f"call {i}"


def test_equal_calls_share_a_lowering():
    """The second call is a look-up; so is the same call on another rank."""
    forget_decisions()

    def rank(mesh):
        x = placed(mesh, torch.ones(4, 4), [S0, R])
        return [(x * 2.0 + x).placements for _ in range(5)]

    on_ranks(rank)
    first = lowerings.misses
    on_ranks(rank)
    assert lowerings.misses == first and len(lowerings) == len(fast_path.seen) == 2 and fast_path.seen.hits >= 40


def test_the_cache_is_bounded():
    """The cache forgets the oldest entries, and goes on counting."""
    cache = Cache(3)
    for i in [0, 1, 2, 3, 4, 4, 3, 0]:
        assert cache.get(i, lambda i=i: i * 2 + 1) == i * 2 + 1
    assert len(cache) == 3 and (cache.hits, cache.misses) == (2, 6)
    assert repr(cache) == "Cache(3 of 3 entries, 2 hits, 6 misses)"
    assert lowerings.maxsize < 100_000


def test_frozen_arguments_are_equal_where_torch_cannot_tell_them_apart():
    values = [0, 0.0, -0.0, False, 1, 1.0, True, 1 + 0j, float("nan"), float("inf"), None, "1", [1], [1.0], [[1]], []]
    keys = [frozen(v) for v in values]
    assert len(set(keys)) == len(values)
    assert keys == [frozen(v) for v in [0, 0.0, -0.0, False, 1, 1.0, True, 1 + 0j, float("nan"), *values[9:]]]
    assert frozen((1, 2)) == frozen([1, 2]) and frozen({"a": 1}) != frozen({"a": 1.0})


def test_a_kept_lowering_holds_no_tensor():
    """A cache of lowerings is a cache of specs."""
    forget_decisions()

    def rank(mesh):
        placed(mesh, torch.ones(4, 4), [S0, R]) * torch.tensor(3.0)

    on_ranks(rank)
    flat = str([key for key in lowerings.entries])
    assert "tensor(" not in flat and "Spec(f32[4@dp, 4]" in flat and Spec.__name__ in flat


# ---- ranks without a block --------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), lambda x: torch.fft.rfft(x, dim=3).abs(),
        lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
    ],
    ids=["max_pool", "avg_pool", "interpolate", "pad", "fft", "adaptive"],
)  # fmt: skip
def test_a_rank_without_images_makes_empty_results(fn):
    """The kernels refuse an empty batch; five images on four ranks are 2, 2, 1 and 0, and are not moved."""
    debug.fallbacks.clear()
    x = smooth(5, 3, 4, 4).requires_grad_()
    agree(fn, [x], [[S0]], [[S1]], mesh_shape=(4,))

    def rank(mesh):
        with spmd.explicit():
            out = fn(placed(mesh, x.detach(), [S0]))
        return (out[0] if isinstance(out, tuple) else out).placements

    assert on_ranks(rank, (4,)) == [(S0,)] * 4
    assert not debug.fallbacks()


NUMBERS = {
    "mul": lambda x, n: x * n,
    "add, scaled": lambda x, n: x.add(x, alpha=n),
    "addcdiv_": lambda x, n: x.clone().addcdiv_(x, x + 3, value=n),
    "lerp_": lambda x, n: x.clone().lerp_(x + 1, n),
    "clamp": lambda x, n: x.clamp(-n, n),
    "pow": lambda x, n: x**n,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_are_one_call(name):
    """Such as the divisor of an optimiser, which changes in each step: one decision, and the right value each time."""
    fn = NUMBERS[name]
    want = torch.rand(4, 3) + 1
    with LocalTensorMode(2):
        x = distribute_tensor(want, mesh_of((2,)), [S0])
        fn(x, 0.5)
        before = lowerings.misses
        got = [fn(x, n).full_tensor() for n in (0.25, 1.5, 7.0)]
        assert lowerings.misses == before
        for n, y in zip((0.25, 1.5, 7.0), got, strict=True):
            assert all(torch.allclose(each, fn(want, n)) for each in y.local.values())


@pytest.mark.parametrize("number", [0.0, -0.0, float("inf"), float("nan"), 0, 2, -1.5, True])
def test_numbers_that_matter_are_told_apart(number):
    """A partial may be multiplied by a number before it is reduced, unless the number is infinite."""
    with LocalTensorMode(2):
        mesh = mesh_of((2,))
        parts = DTensor.from_local(torch.tensor([2.0, -1.0, 0.0]), mesh, [SUM])
        for each in (3.0, number, 3.0, number):
            got = (parts * each).full_tensor()
            want = torch.tensor([4.0, -2.0, 0.0]) * each
            assert all(torch.equal(x.nan_to_num(7), want.nan_to_num(7)) for x in got.local.values())


SLICES = [(), (0,), (1, 2), (1, None, 3), (1, -4, -1), (2, 1, 2**63 - 1, 2), (-2, 5, 2), (-3, None, None, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_slice_that_is_hot_is_the_slice(dtype):
    x = smooth(8, 7, 5).to(dtype)

    def rank(mesh):
        d = placed(mesh, x, [S0, R])
        for args in SLICES:
            want = aten.slice.Tensor(x, *args)
            first, hot = aten.slice.Tensor(d, *args), aten.slice.Tensor(d, *args)
            assert torch.equal(whole(first), want) and torch.equal(whole(hot), want), args
            assert first.stride() == hot.stride() == want.stride()
            assert first._local_tensor.stride() == hot._local_tensor.stride()

    on_ranks(rank)


def test_operands_are_free_without_the_garbage_collector():
    """No cycle holds what a `cat` or an `item` has gathered."""
    gc.disable()
    try:
        (pieces, _), kwargs = with_tensors(([1, 2, torch.ones(2)], 0), {"x": torch.ones(2)}, [torch.ones(3), "y"])
        seen = weakref.ref(pieces[2])
        assert pieces[:2] == [1, 2] and kwargs == {"x": "y"}
        del pieces, _
        assert seen() is None
    finally:
        gc.enable()
