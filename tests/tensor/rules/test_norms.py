"""Norms and softmaxes over sharded dims give the results of one device, and nothing is gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd.tensor.rules.norms import norm_decompositions
from tests.tensor.oracle import close
from tests.tensor.single import S0, S1, S2, SUM, R, agree, mesh_of, on_ranks

aten = torch.ops.aten


def smooth(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


IMAGE, CHANNELS = (6, 4, 3, 5), (4,)
IMAGES = [[S0, S1], [S0, S0], [R, S1], [S2, S0], [SUM, S0], [R, R]]
OPS = {
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), IMAGE, CHANNELS),
    "batch_norm, running": (
        lambda x, w, b: F.batch_norm(x, w.detach().clone(), b.detach().square() + 1, w, b, True), IMAGE, CHANNELS
    ),
    "batch_norm, evaluation": (
        lambda x, w, b: F.batch_norm(x, w.detach(), b.detach().square() + 1, w, b), IMAGE, CHANNELS
    ),
    "batch_norm, bare": (
        lambda x, w, b: F.batch_norm(x * w.sum() * b.sum(), None, None, training=True), IMAGE, CHANNELS
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, CHANNELS),
    "group_norm, bare": (lambda x, w, b: F.group_norm(x * w.sum() * b.sum(), 4), IMAGE, CHANNELS),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), IMAGE, CHANNELS),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), (6, 5, 4), CHANNELS),
    "layer_norm of two": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), (6, 5, 4), (5, 4)),
    "softmax": (lambda x, w, b: (x * w + b).softmax(2), (6, 3, 4), CHANNELS),
    "log_softmax": (lambda x, w, b: (x * w + b).log_softmax(0), (6, 3, 4), CHANNELS),
    "logsumexp": (lambda x, w, b: (x * w + b).logsumexp([0, 2]), (6, 3, 4), CHANNELS),
    "logsumexp, kept": (lambda x, w, b: (x * w + b).logsumexp(1, True), (6, 3, 4), CHANNELS),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_they_are_those_of_one_device(name):
    """Forward and backward, with weight and bias, for all placements of the input, uneven and partial ones too."""
    fn, shape, channels = OPS[name]
    tensors = [smooth(*shape), smooth(*channels), smooth(*channels)]
    agree(fn, tensors, *[[placing, [R, R], [S0, R]] for placing in IMAGES])


NOT_GATHERED = {
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [S0, S2], [S0, S2]),
    "group_norm": (lambda x: F.group_norm(x, 2), [S0, S2], [S0, S2]),
    "layer_norm": (lambda x: F.layer_norm(x, [5]), [S0, spmd.Shard(3)], [S0, spmd.Shard(3)]),
    "softmax": (lambda x: x.softmax(1), [S0, S1], [S0, S1]),
    "log_softmax": (lambda x: x.log_softmax(1), [S0, S1], [S0, S1]),
}


@pytest.mark.parametrize("name", NOT_GATHERED)
def test_what_is_sent_is_sums(name):
    """The result has the placements of the input, and ranks exchange only sums, which are small."""
    fn, given, want = NOT_GATHERED[name]
    with spmd.LocalTensorMode(4) as mode:
        x = spmd.distribute_tensor(smooth(4, 16, 6, 5).detach(), mesh_of((2, 2)), given)
        before = sum(line.sent for line in mode.report().lines)
        y = fn(x)
        sent = sum(line.sent for line in mode.report().lines) - before
        assert list(y.placements) == want
        assert 0 < sent < 4 * 16 * 6 * 5 * 8 / 4  # the bytes that a gather would send


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_single(dtype):
    """Half precision is summed as in the kernels: a batch of 300 does not overflow, and the dtypes are the same."""
    x = (smooth(300, 4, 2).detach() * 20 + 300).to(dtype)

    def rank(mesh):
        d = spmd.distribute_tensor(x, mesh, [S0, spmd.Shard(2)])
        return [fn(d).full_tensor() for fn in FNS]

    want = [fn(x) for fn in FNS]
    for got in on_ranks(rank):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and close(a, b, 2e-2)


FNS = [
    lambda x: F.batch_norm(x, None, None, training=True), lambda x: F.group_norm(x, 2), lambda x: x.softmax(0),
    lambda x: x.log_softmax(2), lambda x: F.layer_norm(x, [2]),
]  # fmt: skip


def test_extremes_are_those_of_one_device():
    """Infinities and NaN are in the same places as on one device, also for a row of only -inf."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, -inf, 2.0, 3.0], [-inf] * 4, [inf, 1, 2, 3], [nan, 1, 2, 3]])
    fns = [lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: x.logsumexp(1)]

    def rank(mesh):
        d = spmd.distribute_tensor(x, mesh, [R, S1])
        return [fn(d).full_tensor() for fn in fns]

    for got in on_ranks(rank):
        for a, fn in zip(got, fns, strict=True):
            torch.testing.assert_close(a, fn(x), equal_nan=True)


def test_blocks_of_a_flattened_batch_may_be_empty():
    """instance_norm views [5, 5, 3] as [1, 25, 3]: on four ranks 10, 10, 5 and 0 channels, not 7, 7, 7 and 4."""
    agree(lambda x: F.instance_norm(x), [smooth(5, 5, 3)], [[S0]], mesh_shape=(4,))
    agree(lambda x: x.view(25, 3).amax(0), [smooth(5, 5, 3)], [[S0]], mesh_shape=(4,))


def test_one_number_a_channel_is_refused_as_on_one_device():
    with spmd.LocalTensorMode(2):
        x = spmd.distribute_tensor(torch.randn(1, 4), mesh_of((2,)), [S0])
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            F.batch_norm(x, None, None, training=True)


def test_the_fused_op_stays_where_it_is_as_good():
    """An op is decomposed if its dims are sharded, and only then."""
    x = smooth(8, 4, 6, 5).detach()
    with spmd.LocalTensorMode(4):
        d = spmd.distribute_tensor(x, mesh_of((2, 2)), [S0, S1])
        for op, whole, cut in ((aten._softmax, (3, False), (1, False)), (aten._log_softmax, (2, False), (0, False)),
                               (aten.logsumexp, ([2, 3],), ([1, 2],))):  # fmt: skip
            spelled = norm_decompositions[op.default]
            assert spelled(d, *whole) is NotImplemented and spelled(d, *cut) is not NotImplemented
        spelled = norm_decompositions[aten.native_layer_norm.default]
        assert spelled(d, [6, 5], None, None, 1e-5) is NotImplemented
