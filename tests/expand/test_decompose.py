"""Programs decompose norms, softmaxes and look-ups over sharded dims as eager calls do: nothing large is sent."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import LocalTensorMode, Shard
from spmd.expand.program import Program
from tests.expand.side_by_side import GPT_PLAN, INPUTS, agree, step_of, tokens, train_step
from tests.tensor.rules.test_norms import OPS, smooth
from tests.tensor.rules.test_scans import SCANS
from tests.tensor.single import S0, S1, S2, SUM, R
from tests.tensor.single import agree_at_once as eager


def mesh_of(shape) -> spmd.DeviceMesh:
    """A mesh without process groups, which plans do not need."""
    ranks = torch.arange(math.prod(shape)).view(shape).tolist()
    return spmd.DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")[-len(shape) :])


def program_of(fn, mesh_shape, *inputs) -> Program:
    """The program of fn and its gradients, for tensors with these placements."""
    names = dict(zip("xyz", inputs, strict=False))
    placings = {name: p for name, (_, p) in names.items()}
    step = spmd.compile(step_of(fn), mesh_of(mesh_shape), inputs=placings, bucket_mb=None)
    return step.program_for(*(t.detach() for t, _ in names.values()))


# ---- norms and softmaxes ----------------------------------------------------------------------

LYING = [[S0, S1], [SUM, S2]]


@pytest.mark.parametrize("name", OPS)
def test_norms_are_those_of_one_device(name):
    """Forward and backward, of weight and bias too; uneven and partial as well."""
    fn, shape, channels = OPS[name]
    tensors = [smooth(*shape), smooth(*channels), smooth(*channels)]
    agree(fn, tensors, *[[placing, [R, R], [S0, R]] for placing in LYING])


@pytest.mark.parametrize("name", ["batch_norm, running", "group_norm", "layer_norm of two", "log_softmax", "logsumexp"])
def test_norms_with_empty_blocks_are_those_of_one_device(name):
    """Three rows or channels on four ranks leave one of them with none."""
    fn, shape, channels = OPS[name]
    tensors = [smooth(3, *shape[1:]), smooth(*channels), smooth(*channels)]
    agree(fn, tensors, [[S0], [R], [R]], [[S1], [R], [S0]], mesh_shape=(4,))


@pytest.mark.parametrize("name", SCANS)
def test_scans_are_those_of_one_device(name):
    """And triangles and traces, which know where a rank's block begins."""
    def fn(x, y):
        found = SCANS[name](x * y)
        return (*(found if isinstance(found, tuple) else (found,)), x.tril(1), y.trace())

    agree(fn, [smooth(4, 32), smooth(4, 32)], [[S0, S1], [R, S1]], [[S1, S1], [S0, R]])


WIDE = (8, 16, 6, 5)
SUMS = {
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), WIDE, 16, [S0, S2]),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), WIDE, 16, [S0, S2]),
    "layer_norm": (lambda x, w: F.layer_norm(x, [64], w), (8, 6, 64), 64, [S0, S2]),
    "softmax": (lambda x, w: (x * w).softmax(1), (8, 64), 64, [S0, S1]),
    "log_softmax": (lambda x, w: (x * w).log_softmax(1), (8, 64), 64, [S0, S1]),
    "logsumexp": (lambda x, w: (x * w).logsumexp(1), (8, 64), 64, [S0, S1]),
}


@pytest.mark.parametrize("name", SUMS)
def test_of_norms_only_sums_are_sent(name):
    """A few numbers per row, channel or group are sent, less than half a block of activations. Nothing is gathered."""
    fn, shape, channels, placing = SUMS[name]
    program = program_of(fn, (2, 2), (smooth(*shape), placing), (smooth(channels), [R, R]))
    assert 0 < max(c.nbytes for c in program.collectives) < math.prod(shape) * 8 / 4 / 2
    assert program.gathered == ()


def test_the_fused_op_stays_where_its_dims_are_not_sharded():
    """As eagerly: if the normalised dim is not sharded, nothing is sent for its sums."""
    for fn, name in ((lambda x, w: F.layer_norm(x, [64], w), "native_layer_norm"),
                     (lambda x, w: F.group_norm(x.unflatten(0, (1, 8)), 2), "native_group_norm"),
                     (lambda x, w: F.batch_norm(x, None, None, training=True), "native_batch_norm"),
                     (lambda x, w: x.softmax(1), "_softmax")):  # fmt: skip
        program = program_of(fn, (2, 2), (smooth(8, 64), [R, R]), (smooth(64), [R, R]))
        assert f"{name}" in str(program) and "rsqrt" not in str(program), program
        assert not program.collectives


EMPTIES = {
    "pooling": lambda x: F.max_pool2d(x, 2),
    "padding": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "transform": lambda x: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("name", EMPTIES)
def test_ops_that_refuse_empty_blocks_are_not_called_on_them(name):
    """Three images on four ranks. As eagerly, nothing is gathered."""
    x = smooth(3, 5, 4, 4)
    agree(EMPTIES[name], [x], [[S0]], [[S1]], mesh_shape=(4,))
    program = program_of(EMPTIES[name], (4,), (x, [S0]))
    assert {c.kind for c in program.collectives} <= {"all_reduce"} and "unless_empty[" in str(program)


def test_a_convolution_of_an_empty_batch_has_the_bias_gradient_of_its_block():
    """Two images on three ranks, and channels over the others; the kernel would give the bias its global size."""
    x, w, b = smooth(2, 3, 24, 24), smooth(4, 3, 3, 3), smooth(4)
    for way in (agree, eager):
        way(lambda *given: F.conv2d(*given).relu(), [x, w, b], [[R, S0], [S0, R], [S0, R]], mesh_shape=(2, 3))


# ---- looking up along a sharded dim -----------------------------------------------------------


@pytest.mark.parametrize("words", [8, 7, 2])
def test_look_ups_are_those_of_one_device(words):
    """Even, uneven and empty blocks of rows, entries and classes."""
    torch.manual_seed(0)
    table, index = smooth(words, 6), torch.randint(0, words, (3, 5))
    agree(lambda i, w: F.embedding(i, w, padding_idx=1), [index, table], [[R, S0], [S0, R]], [[R, R], [S0, S0]])
    agree(lambda x, i: x.gather(0, i), [table, index], [[S0, S1], [R, R]], [[R, S0], [S1, R]])
    scores, targets, weight = smooth(8, words), torch.randint(0, words, (8,)), torch.rand(words).double() + 0.5
    for reduction in ("mean", "sum", "none"):
        loss = functools.partial(F.cross_entropy, reduction=reduction, ignore_index=1)
        agree(
            lambda x, t, w, loss=loss: loss(x * w.sum(), t, w.detach()), [scores, targets, weight],
            [[S0, S1], [S0, R], [S0, R]], [[S1, S1], [S0, S0], [R, R]],
        )  # fmt: skip


def test_tables_and_scores_are_not_gathered():
    """Only the rows that were looked up, and some numbers for each row, are sent."""
    table, index = smooth(1000, 8), torch.arange(5)
    rows = program_of(lambda i, w: F.embedding(i, w), (4,), (index, [R]), (table, [S0]))
    assert sorted((c.kind, c.nbytes) for c in rows.collectives) == [("all_reduce", 5 * 8 * 8)]
    entries = program_of(lambda x, i: x.gather(0, i), (4,), (table, [S0]), (index.view(5, 1), [R]))
    assert max(c.nbytes for c in entries.collectives) == 5 * 8
    loss = program_of(F.cross_entropy, (4,), (smooth(8, 2000), [S1]), (index[:1].expand(8), [R]))
    assert {c.kind for c in loss.collectives} == {"all_reduce"}
    assert sorted(c.nbytes for c in loss.collectives) == [8] * 2 + [8 * 8] * 3  # a maximum and two sums of each row


def test_a_word_that_no_rank_has_is_an_error():
    """As on one device, whatever rank it would be on."""
    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        step = spmd.compile(lambda i, w: F.embedding(i, w), mesh, inputs={"w": [S0]})
        with pytest.raises(RuntimeError, match="index out of range"):
            step(torch.tensor([1, 4]), torch.ones(4, 2))


# ---- a whole model ----------------------------------------------------------------------------

VOCABULARY = GPT_PLAN | {"*.tok_emb.weight": {"tp": Shard(0)}, "*.head.weight": {"tp": Shard(0)}}


def start(tied: bool, vocab: int = 30, optimizer=optim.SGD) -> tuple[GPT, optim.Optimizer]:
    torch.manual_seed(1)
    model = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=16, block_size=6, vocab=vocab, tied=tied))
    return model, optimizer(model.parameters(), lr=0.1)


@pytest.mark.parametrize("shape, tied", [((1, 4), False), ((2, 2), True)], ids=["untied 1x4", "tied 2x2"])
def test_a_vocabulary_parallel_gpt_sends_what_megatron_sends(shape, tied):
    """For the embedding its sum is sent; for the loss, three numbers per token and two in all. Nothing is gathered."""
    pair = start(tied)
    step = spmd.compile(train_step, mesh_of(shape), params=VOCABULARY, inputs=INPUTS, bucket_mb=None)
    program = step.program_for(*pair, *tokens(4, 1, vocab=30)[0])
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    here = 4 * 6 // shape[0]
    activations, columns = here * 16 * 4, here * 4
    tp = sorted(c.nbytes for c in program.collectives if c.axis == "tp")
    assert tp == [4] * (2 if shape[0] == 1 else 0) + [columns] * 3 + [activations] * 6
    assert program.gathered == ()


@pytest.mark.parametrize("shape, vocab", [((2, 2), 30), ((1, 4), 29)], ids=["even", "uneven"])
def test_a_vocabulary_parallel_gpt_trains_as_on_one_device(shape, vocab):
    batches = tokens(4, 4, vocab=vocab)
    alone, distributed = start(True, vocab), start(True, vocab)
    want = [train_step(*alone, *batch).item() for batch in batches]
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        step = spmd.compile(train_step, mesh, params=VOCABULARY, inputs=INPUTS)
        got = [step(*distributed, *batch).full_tensor().reconcile().item() for batch in batches]
        after = [p.detach().full_tensor().reconcile() for p in distributed[0].parameters()]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for a, b in zip(after, alone[0].parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)
