"""Losses over sharded classes are those of one device, with their gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
import ways
from torch.utils.checkpoint import checkpoint

from spmd import DTensor, LocalTensorMode, Replicate, Shard, distribute_tensor, implicit_replication
from spmd.parallel import linear_cross_entropy, loss_parallel
from tests.parallel.test_fully_shard import mesh_of, whole
from tests.tensor.single import every_rank

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESHES = {  # where tokens are, and classes
    "classes": ({"tp": 4}, [R], [S0]), "both": ({"dp": 2, "tp": 2}, [S0, R], [R, S0]),
    "sequence": ({"dp": 2, "tp": 2}, [S0, S1], [R, S0]), "on two": ({"dp": 2, "tp": 2}, [R, R], [S0, S0]),
    "tokens": ({"dp": 4}, [S0], [R]), "features": ({"tp": 2}, [Shard(2)], [S1]),
    "cube": ({"dp": 2, "sp": 2, "tp": 2}, [S0, S1, R], [R, R, S0]),
}  # fmt: skip
SIZES = {"even": (4, 2, 8), "uneven": (3, 3, 7), "empty": (1, 3, 3)}
SAID = {
    "as it comes": {}, "smoothed": {"label_smoothing": 0.2}, "weighted": {"weight": True, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "weight": True}, "none": {"reduction": "none"}, "z": {"z_loss": 0.1},
    "probabilities": {"probabilities": True, "label_smoothing": 0.1, "weight": True},
}  # fmt: skip


def reference(x, table, target, bias, z_loss=0.0, **said):
    logits = F.linear(x, table, bias)
    flat = target.reshape(-1, table.shape[0]) if target.is_floating_point() else target.flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), flat, **said)
    if z_loss:
        counts = (target != -100).to(logits.dtype)
        loss = loss + z_loss * (logits.logsumexp(-1).square() * counts).sum() / counts.sum()
    return loss.reshape(x.shape[:-1]) if said.get("reduction") == "none" else loss


def given(sizes, dtype=torch.float64, probabilities=False, weight=False, **said):
    batch, time, classes = sizes
    draw = torch.Generator().manual_seed(0)
    x, table, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((batch, time, 4), (classes, 4), (classes,))
    )
    target = torch.randint(classes, (batch, time), generator=draw)
    target[0, -1] = -100
    if probabilities:
        target = torch.rand(batch, time, classes, generator=draw, dtype=torch.float64).softmax(-1).to(dtype)
    said |= {"weight": torch.rand(classes, generator=draw, dtype=torch.float64).to(dtype)} if weight else {}
    return (x, table, target, bias), said


def outcome(loss, *leaves):
    (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return [whole(loss), *(whole(x.grad) for x in leaves)]


def distributed(loss, *leaves):
    factor = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    placements = [p if p.is_shard() else R for p in loss.placements]
    (loss * distribute_tensor(factor, loss.device_mesh, placements, src_data_rank=None)).sum().backward()
    return [whole(loss), *(whole(x.grad) for x in leaves)]


CASES = [
    *[(mesh, "uneven", said) for mesh in ("both", "classes") for said in SAID],
    ("classes", "empty", "probabilities"), *[(mesh, sizes, "z") for mesh, sizes in itertools.product(MESHES, SIZES)],
]  # fmt: skip


@pytest.mark.parametrize("mesh, sizes, said", CASES, ids=str)
def test_it_is_the_loss_of_one_device(mesh, sizes, said):
    """Of tokens, of the hidden features, of weight and bias; two tokens at a time."""
    (x, table, target, bias), say = given(SIZES[sizes], **SAID[said])
    want = outcome(reference(x, table, target, bias, **say), x, table, bias)
    axes, tokens, classes = MESHES[mesh]
    of_bias = [p if p == S0 else R for p in classes]
    with LocalTensorMode(torch.Size(axes.values()).numel()):
        at = mesh_of(axes)
        leaves = [
            distribute_tensor(v.detach(), at, p).requires_grad_()
            for v, p in ((x, tokens), (table, classes), (bias, of_bias))
        ]
        got = distributed(
            linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], chunk_size=2, **say), *leaves
        )
        for a, b in zip(got, want, strict=True):
            for block in every_rank(a):
                assert torch.allclose(block, b.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("said", SAID)
def test_plain_tensors_are_one_device(said):
    (x, table, target, bias), say = given(SIZES["uneven"], **SAID[said])
    want = outcome(reference(x, table, target, bias, **say), x, table, bias)
    leaves = [v.detach().clone().requires_grad_() for v in (x, table, bias)]
    got = outcome(
        linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], chunk_size=4, **say), *leaves
    )
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("ignored", [0, 3])
@pytest.mark.parametrize("said", [{}, {"label_smoothing": 0.3, "reduction": "sum"}, {"reduction": "none"}], ids=str)
def test_any_class_may_be_ignored(said, ignored):
    """Of logits whose classes or tokens are sharded, and of a table."""
    draw = torch.Generator().manual_seed(1)
    hidden, table = (torch.randn(n, 4, generator=draw, dtype=torch.float64) for n in (6, 7))
    target, said = torch.tensor([0, 3, 3, 6, 1, 3]), said | {"ignore_index": ignored}
    leaves = [x.clone().requires_grad_() for x in (hidden, table)]
    want = outcome(F.cross_entropy(leaves[0] @ leaves[1].T, target, **said), *leaves)
    for placements in ([R, S0], [S0, S0]):
        with LocalTensorMode(4):
            mesh = mesh_of({"dp": 2, "tp": 2})
            rows = [p if axis == 0 else R for axis, p in enumerate(placements)]
            table_at = [R if axis == 0 else p for axis, p in enumerate(placements)]
            for run in (in_context, of_table):
                x, y = (distribute_tensor(t, mesh, at, src_data_rank=None).requires_grad_()
                        for t, at in ((hidden, rows), (table, table_at)))  # fmt: skip
                placed = distribute_tensor(target, mesh, rows, src_data_rank=None)
                with implicit_replication():
                    found = outcome(run(x, y, placed, **said), x, y)
                for got, right in zip(found, want, strict=True):
                    for block in every_rank(got):
                        torch.testing.assert_close(block, right, rtol=1e-10, atol=1e-12)


def in_context(x, table, target, **said):
    with loss_parallel():
        return F.cross_entropy(x @ table.T, target.to_local(), **said)


def of_table(x, table, target, **said):
    return linear_cross_entropy(x, table, target, chunk_size=4, **said)


def test_halves_are_summed_in_single_precision():
    (x, table, target, _), _ = given(SIZES["even"], torch.bfloat16)
    got = linear_cross_entropy(x, table, target)
    want = F.cross_entropy(F.linear(x, table).float().flatten(0, 1), target.flatten())
    assert got.dtype is torch.float32 and torch.allclose(got, want)
    got.backward()
    assert x.grad.dtype is torch.bfloat16 and table.grad.dtype is torch.bfloat16


def test_logits_of_all_tokens_are_never_held():
    """The largest tensor of a pass forward and backward is a chunk of logits."""
    seen = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if hasattr(x, "numel"))
            return out

    x, table = torch.randn(64, 4, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    with Largest():
        linear_cross_entropy(x, table, torch.zeros(64, dtype=torch.int64), chunk_size=8).backward()
    assert max(seen) == 8 * 32


def test_a_mean_over_ranks_has_the_true_count():
    """The average over data-parallel ranks of gradients is that of all tokens, however many each rank ignores."""
    (x, table, target, _), _ = given((4, 3, 5))
    target[0] = -100
    want = outcome(reference(x, table, target, None), x, table)
    with LocalTensorMode(2):
        at = mesh_of({"dp": 2})
        mine = distribute_tensor(target, at, [S0]).to_local()
        rows = distribute_tensor(x.detach(), at, [S0]).to_local()
        w = table.detach().clone().requires_grad_()
        loss = linear_cross_entropy(rows, w * 1.0, mine, mesh=at)
        [grad] = torch.autograd.grad(loss, w)
        of = [sum(v.local.values()) / 2 for v in (loss.detach(), grad)]
    assert torch.allclose(of[0], want[0]) and torch.allclose(of[1], want[2])


def test_so_has_one_beside_shards_of_classes():
    """Parts of the batch on one axis, equal on the ranks of the other, which share out the classes."""
    (x, table, target, _), _ = given((4, 3, 5))
    target[0] = -100
    want = outcome(reference(x, table, target, None), x, table)
    with LocalTensorMode(4):
        both = mesh_of({"dp": 2, "tp": 2})
        mine, rows = (distribute_tensor(y.detach(), both["dp"], [S0]).to_local() for y in (target, x))
        w = distribute_tensor(table.detach(), both["tp"], [S0]).requires_grad_()
        loss = linear_cross_entropy(rows, w, mine, mesh=both["dp"])
        [grad] = torch.autograd.grad(loss, w)
        of = [sum(v.full_tensor().local.values()) / 4 for v in (loss.detach(), grad)]
        assert torch.allclose(of[0], want[0]) and torch.allclose(of[1], want[2])
        with pytest.raises(ValueError, match="they would be taken as equal on all ranks"):
            linear_cross_entropy(rows, w, mine, mesh=both["tp"])


@pytest.mark.parametrize("way", ("gloo", "threads"))
def test_real_ranks_do_the_same(way, gloo4):
    """Logits and embedding are one weight, sharded together; the loss of a hidden layer that is computed again."""
    want = tied(None)
    for rank in ways.run(way, gloo4, on_real_ranks):
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(rank, want, strict=True))


def on_real_ranks():
    return tied(mesh_of({"dp": 2, "tp": 2}))


def tied(mesh):
    draw = torch.Generator().manual_seed(0)
    ids, table = torch.randint(7, (4, 3), generator=draw), torch.randn(7, 4, generator=draw, dtype=torch.float64)
    if mesh is not None:
        ids = distribute_tensor(ids, mesh, [S0, R])
        table = distribute_tensor(table, mesh, [R, S0])
    table.requires_grad_()
    hidden = checkpoint(lambda t: F.embedding(ids, t).tanh(), table, use_reentrant=False)
    loss = linear_cross_entropy(hidden, table, ids, chunk_size=2, z_loss=0.01)
    loss.backward()
    return [whole(loss), whole(table.grad)]


@pytest.mark.parametrize("mesh", ["classes", "both", "on two"])
@pytest.mark.parametrize("said", ["as it comes", "weighted", "none", "probabilities"])
def test_loss_parallel_takes_plain_targets(mesh, said):
    """They are this rank's, laid out as the logits."""
    (x, table, target, _), say = given(SIZES["uneven"], **SAID[said])
    logits = F.linear(x, table).detach().flatten(0, 1).requires_grad_()
    target = target.flatten(0, 1)
    want = outcome(F.cross_entropy(logits, target, **say), logits)
    axes, tokens, classes = MESHES[mesh]
    with LocalTensorMode(4):
        at = mesh_of(axes)
        of_logits = [S1 if c == S0 else t for t, c in zip(tokens, classes, strict=True)]
        leaf = distribute_tensor(logits.detach(), at, of_logits).requires_grad_()
        of_target = of_logits if target.is_floating_point() else tokens
        mine = distribute_tensor(target, at, of_target).to_local()
        with loss_parallel():
            loss = F.cross_entropy(leaf, mine, **say)
            assert isinstance(loss, DTensor)
            got = distributed(loss, leaf)
        for a, b in zip(got, want, strict=True):
            for block in every_rank(a):
                assert torch.allclose(block, b.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "target, said, kind, match",
    [
        (torch.tensor([0, 5]), {}, RuntimeError, "not in 0..3"),
        (torch.tensor([0, 1]), {"reduction": "avg"}, ValueError, "mean"),
        (torch.rand(2, 4, requires_grad=True), {}, ValueError, "detach"),
    ],
)  # fmt: skip
def test_mistakes_are_said(target, said, kind, match):
    with pytest.raises(kind, match=match):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), target, **said)
