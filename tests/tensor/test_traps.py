"""Known mistakes of distributed tensors, each with the test that shows that ours does not make it.

    mean losses take the local count; NaN on empty shards                 test_losses_are_those_of_one_device
    a 0-dim tensor taken for a Python number, in a cache                  test_a_number_is_not_a_tensor
    a search whose result depends on earlier calls                        test_dispatch.py, ..._called_before
    partial + number, partial * partial, casts, rounding                  test_what_is_not_linear_is_reduced_first
    terms of a sum times infinity are +inf and -inf                       test_terms_times_infinity
    item, bool, tolist, format read the block                             test_values_are_read_of_the_whole
    writes through views of a sharded dim vanish                          test_dispatch.py, TestViews
    nested uneven shards come back with their padding                     test_nested_uneven_shards_have_no_padding
    max, argmax, the inf-norm and pooling fail on a rank with no element  test_empty_blocks_fail_nobody
    an integer Partial becomes float; Partial + Replicate changes dtype   test_dtypes_stay
    redistribute keeps the old mesh                                       test_another_mesh_is_another_mesh
    equal and similar ops communicate with ranks outside of the mesh      test_values_are_compared_within_the_mesh
    gradients through to_local, Partial(avg), Partial(max)                test_gradients_through_local_tensors
    every shard draws the same numbers                                    test_random.py
    x.numel(), arange(n), shape[0] * k are the rank's                     test_sizes_are_global
    BatchNorm normalises by the block                                     test_batch_norm_sees_the_whole_batch
    a tuple that is always true in a check of layer-norm                  test_layer_norm_over_a_sharded_dim
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from versions import aminmax

import spmd
from spmd import Partial, Replicate, Shard
from spmd.sim import ThreadWorld
from spmd.tensor.eager.dtensor import DTensor, distribute_tensor
from tests.tensor.single import AVG, MAX, MIN, PRODUCT, S0, S1, SUM, R, agree, mesh_of, on_ranks


def d(*shape, grad=True):
    torch.manual_seed(len(shape) + grad)
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


LOSSES = {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss,
    "kl_div": lambda x, y, **how: F.kl_div(x.log_softmax(-1), y.softmax(-1), **how),
    "bce": lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **how),
    "bce of logits": lambda x, y, **how: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **how),
    "soft_margin": lambda x, y, **how: F.soft_margin_loss(x, y.sign(), **how),
    "poisson": F.poisson_nll_loss,
    "gaussian": lambda x, y, **how: F.gaussian_nll_loss(x, y, x.exp(), **how),
    "cosine": lambda x, y, **how: F.cosine_embedding_loss(x, y, y[:, 0].sign(), **how),
    "triplet": lambda x, y, **how: F.triplet_margin_loss(x, y, x.flip(0), **how),
    "cross entropy": lambda x, y, **how: F.cross_entropy(x, y.abs().argmax(-1), **how),
    "cross entropy, classes ignored": lambda x, y, **how: F.cross_entropy(x, y.argmax(-1), ignore_index=1, **how),
    "soft cross entropy": lambda x, y, **how: F.cross_entropy(x, y.softmax(-1), label_smoothing=0.1, **how),
    "multi margin": lambda x, y, **how: F.multi_margin_loss(x, y.argmax(-1), **how),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_one_device(name, rows):
    """Even, uneven and empty blocks. The gradient of the mean is not multiplied by the number of ranks."""
    for reduction in ("mean", "sum"):
        fn = lambda x, y, how=reduction: LOSSES[name](x, y, reduction=how)  # noqa: E731
        agree(fn, [d(rows, 6), d(rows, 6, grad=False)], [[S0, R], [S0, R]], [[S0, S1], [S0, S0]], [[SUM, R], [R, R]])


def test_a_number_is_not_a_tensor():
    """A 0-dim tensor promotes dtypes by other rules than a number of the same value, whichever was used first."""

    def rank(mesh):
        x = distribute_tensor(torch.ones(4, dtype=torch.int32), mesh, [S0, R])
        two = distribute_tensor(torch.tensor(2.0, dtype=torch.float64), mesh, [R, R])
        dtypes = [(x * y).dtype for y in (2, 2.0, two, True, 2, two)]
        return dtypes, [(x / y).full_tensor().tolist() for y in (2, two, torch.tensor(4.0), 2)]

    want = [torch.int32, torch.float32, torch.float64, torch.int32, torch.int32, torch.float64]
    assert on_ranks(rank) == [(want, [[0.5] * 4, [0.5] * 4, [0.25] * 4, [0.5] * 4])] * 4


NOT_LINEAR = {
    "plus a number": lambda x, y: x + 2.0,
    "a number minus": lambda x, y: 2.0 - x,
    "partial * partial": lambda x, y: x * y,
    "square": lambda x, y: x * x,
    "matmul of partials": lambda x, y: x @ y.t(),
    "to int": lambda x, y: (x * 3).to(torch.int64),
    "to bool": lambda x, y: x.to(torch.bool),
    "rounding division": lambda x, y: torch.div(x * 5, 2, rounding_mode="floor"),
    "floor": lambda x, y: torch.floor(x * 3) // 2,
    "remainder": lambda x, y: torch.remainder(x, 0.5),
    "absolute": lambda x, y: x.abs() + y.abs(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "softmax": lambda x, y: x.softmax(-1),
    "norm": lambda x, y: x.norm() + torch.linalg.vector_norm(y, 3),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "to bfloat16": lambda x, y: x.to(torch.bfloat16).to(torch.float64),
}


@pytest.mark.parametrize("kind", [SUM, AVG, MAX, MIN, PRODUCT], ids=str)
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_is_reduced_first(name, kind):
    x, y = d(4, 5, grad=False), d(4, 5, grad=False) + 0.1
    agree(NOT_LINEAR[name], [x, y], [[kind, R], [kind, R]], [[R, kind], [R, R]])


def test_terms_times_infinity():
    """If the factor is a number, the sum is reduced first. A tensor is not searched for infinities. With terms of both
    signs the product is then NaN and not infinite, and all other elements are right. Reduce first to avoid that.
    """
    inf = float("inf")
    agree(lambda x: x * inf + x / 0 - x / -0.0, [d(5, grad=False)], [[SUM, R]], [[SUM, SUM]], [[AVG, S0]])

    def rank(mesh):
        x = DTensor.from_local(torch.full((3,), [3.0, -1.0, 0.0, 0.0][mesh.get_rank()]), mesh, [SUM, SUM])
        y = distribute_tensor(torch.tensor([2.0, inf, 0.0]), mesh, [R, R])
        first = x.redistribute(placements=[R, R])
        return (x * y).full_tensor().isfinite().tolist(), (x * y).full_tensor()[::2].tolist(), (first * y).tolist()

    assert on_ranks(rank) == [([True, False, True], [4.0, 0.0], [4.0, inf, 0.0])] * 4


def test_values_are_read_of_the_whole():
    """The values are equal on all ranks, so a branch on them is the same on all ranks."""

    def rank(mesh):
        part = DTensor.from_local(torch.tensor(1.5), mesh, [Partial(), Partial()])
        rows = distribute_tensor(torch.tensor([1, 0, 0, 0]), mesh, [S0, S0])
        one = distribute_tensor(torch.tensor([3.5]), mesh, [S0, S0])
        return (
            part.item(), float(part), int(part), bool(part > 5), f"{part:.2f}", part.tolist(), rows.tolist(),
            one.item(), bool(rows.any()), bool(rows.all()), rows.nonzero().tolist(), int(rows.count_nonzero()),
            bool(one),
            torch.is_nonzero(part),
        )  # fmt: skip

    want = (6.0, 6.0, 6, True, "6.00", 6.0, [1, 0, 0, 0], 3.5, True, False, [[0]], 1, True, True)
    assert on_ranks(rank) == [want] * 4


def test_nested_uneven_shards_have_no_padding():
    """5 rows on (2, 4) ranks are 1, 1, 1, 0 | 1, 1, 0, 0; a move over both axes at once gives 5 again."""
    x = torch.arange(10.0).view(5, 2)

    def rank(mesh):
        rows = distribute_tensor(x, mesh, [S0, S0])
        back = rows.redistribute(placements=[S1, R]).redistribute(placements=[S0, S0])
        return rows.full_tensor().tolist(), back.full_tensor().tolist(), (rows * 1).t().full_tensor().tolist()

    assert on_ranks(rank, (2, 4)) == [(x.tolist(), x.tolist(), x.t().tolist())] * 8


EMPTY = {
    "max": lambda x: x.max(),
    "max of a dim": lambda x: x.max(0).values,
    "amin": lambda x: x.amin(0),
    "argmax": lambda x: x.argmax(),
    "argmin of a dim": lambda x: x.argmin(0),
    "inf norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "aminmax": lambda x: torch.stack(list(aminmax(x))),
    "median": lambda x: x.median(0).values,
    "logsumexp": lambda x: x.logsumexp(0),
    "max pool": lambda x: F.max_pool2d(x.view(1, 1, 1, 6).expand(1, 1, 2, 6) if x.numel() == 6 else x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool1d(x.view(1, 1, 6), 2),
    "reflect": lambda x: F.pad(x.view(1, 1, 6), (1, 2), mode="reflect"),
    "softmax": lambda x: x.softmax(0),
    "topk": lambda x: x.topk(1, 0).values,
    "cummax": lambda x: x.cummax(0).values,
    "inverse": lambda x: torch.linalg.inv(x[:, :1, None] + 2),
    "conv": lambda x: F.conv1d(x.view(1, 1, 6), x.view(1, 1, 6)[..., :3]),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_blocks_fail_nobody(name):
    """One row on four ranks: three of them have empty blocks."""
    agree(EMPTY[name], [d(1, 6)], [[S0, S0]], [[S0, R]], [[R, S0]])


def test_dtypes_stay():
    def rank(mesh):
        whole = distribute_tensor(torch.arange(4), mesh, [R, R])
        part = whole.redistribute(placements=[Partial(), R])
        low = distribute_tensor(torch.ones(4, dtype=torch.bfloat16), mesh, [R, R])
        summed = DTensor.from_local(torch.ones(4, dtype=torch.bfloat16), mesh, [Partial(), R]) + low
        ints = part.dtype, part.to_local().dtype, part.full_tensor().tolist()
        return *ints, summed.dtype, summed.full_tensor().tolist()

    assert on_ranks(rank) == [(torch.int64, torch.int64, [0, 1, 2, 3], torch.bfloat16, [3.0] * 4)] * 4


def test_another_mesh_is_another_mesh():
    """The complete tensor is on the given mesh."""

    def rank(mesh):
        x, other = distribute_tensor(torch.arange(4.0), mesh, [S0, R]), mesh_of((4,))
        moved = x.redistribute(other, [S0])
        return moved.device_mesh == other, moved.full_tensor().tolist()

    assert on_ranks(rank) == [(True, [0.0, 1.0, 2.0, 3.0])] * 4


def test_values_are_compared_within_the_mesh():
    """Half of the ranks compare, and do not communicate with the others."""
    world = ThreadWorld(4)

    def rank(number):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        if number >= 2:
            return None
        x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh, [Shard(0)])
        y = distribute_tensor(torch.tensor([1.0, 2.0, 4.0]), mesh, [Replicate()])
        return torch.equal(x, x * 1), torch.equal(x, y), torch.allclose(x, y), torch.allclose(x, y, atol=2)

    assert world.run(rank) == [(True, False, False, True)] * 2 + [None] * 2
    assert {call.group for calls in world.calls for call in calls} <= {"0,1"}


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_gradients_through_local_tensors(kind):
    """The gradient of a rank's block is the gradient of that part of the global tensor."""
    want = {"sum": 2.0, "avg": 0.5}[kind]

    def rank(mesh):
        local = torch.ones(4, requires_grad=True)
        part = DTensor.from_local(local, mesh, [Partial(kind), R])
        (part.redistribute(placements=[S0, R]) * (2.0 if kind == "sum" else 1.0)).sum().backward()
        x = distribute_tensor(torch.ones(5, requires_grad=True), mesh, [S0, S0])
        (x * 2).to_local().sum().backward()
        return local.grad.tolist(), x.grad.full_tensor().tolist()

    assert on_ranks(rank) == [([want] * 4, [2.0] * 5)] * 4


def test_gradients_of_maxima_go_to_the_term_that_is_the_maximum():
    """Rank 2 i + j has 4 i + j. The ranks of one column have a common maximum, that of the lower rank."""

    def rank(mesh):
        i, j = mesh.get_coordinate()
        local = torch.full((4,), 4.0 * i + j, requires_grad=True)
        part = DTensor.from_local(local, mesh, [Partial("max"), S0])
        part.redistribute(placements=[R, R]).sum().backward()
        return local.grad.tolist()

    assert on_ranks(rank) == [[0.0] * 4] * 2 + [[1.0] * 4] * 2
    agree(lambda x: x.amax(0) + x.max(), [d(5, 3)], [[S0, R]], [[S0, S1]])


def test_sizes_are_global():
    def sized(x):
        return x.reshape(x.shape[0] * x.shape[1], -1) * x.numel() + torch.zeros_like(x).sum() + len(x)

    agree(sized, [d(5, 3, 2)], [[S0, R]], [[S0, S1]], [[SUM, R]])


@pytest.mark.parametrize("rows", [8, 5])
def test_batch_norm_sees_the_whole_batch(rows):
    """Mean, variance and running statistics are those of all rows."""
    x, w = d(rows, 3, 4), d(3)

    def fn(x, w):
        mean, var = torch.zeros_like(w).detach(), torch.ones_like(w).detach()
        out = F.batch_norm(x, mean, var, w, w * 2, training=True)
        return out, mean, var

    agree(fn, [x, w], [[S0, R], [R, R]], [[S0, S1], [R, R]], [[SUM, R], [R, S0]])


def test_layer_norm_over_a_sharded_dim():
    agree(lambda x, w: F.layer_norm(x, (6,), w, w), [d(5, 6), d(6)], [[S1, R], [S0, R]], [[S1, S0], [R, R]])
    agree(lambda x, w: F.layer_norm(x, (5, 6), w, w), [d(4, 5, 6), d(5, 6)], [[S1, S0], [R, S0]], [[R, SUM], [R, R]])
