"""Tables and losses that are sharded over the vocabulary are not gathered."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import debug
from spmd.sim import ThreadWorld
from spmd.tensor.eager.dtensor import distribute_tensor
from tests.tensor.single import S0, S1, R, agree


@pytest.mark.parametrize("words", [8, 7, 2])
@pytest.mark.parametrize("shape", [(3, 5), (4,), ()])
def test_an_embedding_by_rows_is_the_embedding(words, shape):
    """Even, uneven and empty blocks of rows, all placements of the tokens, gradients, and sharded columns."""
    torch.manual_seed(0)
    table = torch.randn(words, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, words, shape)
    lying = [R] if not shape else [R, S0]
    for t in lying:
        placings = [[t, R], [R, S0]], [[R, t], [S0, R]], [[t, t], [S0, S0]], [[t, R], [S1, S0]]
        agree(F.embedding, [tokens, table], *placings)
    agree(lambda i, w: F.embedding(i, w, padding_idx=1), [tokens, table], [[R, R], [S0, R]])


def test_the_table_is_not_gathered():
    """Only the sum of the looked-up rows is sent."""
    world = ThreadWorld(4)

    def rank(_):
        mesh = spmd.init_device_mesh("cpu", (4,))
        table = distribute_tensor(torch.ones(1000, 8), mesh, [S0], src_data_rank=None)
        tokens = distribute_tensor(torch.arange(5), mesh, [R], src_data_rank=None)
        out = F.embedding(tokens, table)
        return str(out._spec), out.full_tensor().sum().item()

    assert world.run(rank) == [("f32[5, 8] +sum@dim0", 40.0)] * 4
    assert [call.kind for call in world.calls[0]] == ["all_reduce"]


def test_a_token_that_no_rank_has_is_an_error():
    def rank(_):
        mesh = spmd.init_device_mesh("cpu", (2,))
        table = distribute_tensor(torch.ones(4, 2), mesh, [S0], src_data_rank=None)
        with pytest.raises(RuntimeError, match="index out of range"):
            F.embedding(distribute_tensor(torch.tensor([1, 4]), mesh, [R], src_data_rank=None), table)

    ThreadWorld(2).run(rank)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("classes", [6, 7, 2])
def test_a_loss_with_sharded_classes_is_the_loss(classes, reduction):
    """Even, uneven and empty blocks of classes, weights, ignored rows, and an infinite score of another class."""
    torch.manual_seed(0)
    scores = torch.randn(8, classes, dtype=torch.float64, requires_grad=True)
    weight, targets = torch.rand(classes, dtype=torch.float64) + 0.5, torch.randint(0, classes, (8,))
    placings = [[S0, S1], [S0, R]], [[R, S1], [R, R]], [[S1, S1], [S0, S0]], [[S1, S0], [R, S0]]
    debug.fallbacks.clear()
    for ignored in (-100, 1):
        loss = functools.partial(F.cross_entropy, reduction=reduction, ignore_index=ignored)
        agree(loss, [scores, targets], *placings)
        agree(lambda x, t, w, loss=loss: loss(x, t, w), [scores, targets, weight], *([*p, [S0, R]] for p in placings))
    assert not debug.fallbacks()
    infinite = torch.tensor([[0.0, -float("inf")]] * 4, dtype=torch.float64, requires_grad=True)
    agree(lambda x, t: F.nll_loss(x, t, reduction=reduction), [infinite, targets[:4] * 0], [[R, S1], [R, R]])


@pytest.mark.parametrize("dim, shape", [(1, (5, 1)), (1, (5, 9)), (0, (3, 7)), (-2, (5, 7))], ids=str)
def test_a_gather_along_a_sharded_dim_is_the_gather(dim, shape):
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, x.shape[dim], shape)
    placings = [[R, S1], [S0, S1]], [[S0, S1], [R, R]], [[S1, S0], [S1, S0]], [[S0, S0], [R, S0]], [[S1, S1], [S0, S0]]
    agree(lambda x, i: x.gather(dim, i), [x, index], *placings)


def test_the_scores_are_not_gathered():
    """With 2000 classes on four ranks, only a few numbers a row are sent."""
    world = ThreadWorld(4)

    def rank(_):
        mesh = spmd.init_device_mesh("cpu", (4,))
        scores = distribute_tensor(torch.randn(8, 2000), mesh, [S1]).requires_grad_()
        targets = distribute_tensor(torch.arange(8), mesh, [R])
        F.cross_entropy(scores, targets).backward()
        picked = scores.detach().log_softmax(1).gather(1, targets.unsqueeze(1))
        return str(scores.grad._spec), str(picked._spec)

    assert world.run(rank) == [("f32[8, 2000@dim0]", "f32[8, 1] +sum@dim0")] * 4
    sent = [call for call in world.calls[0] if call.kind != "broadcast"]
    assert {call.kind for call in sent} == {"all_reduce"}


def test_a_class_that_no_rank_has_is_an_error():
    def rank(_):
        mesh = spmd.init_device_mesh("cpu", (2,))
        scores = distribute_tensor(torch.ones(2, 4), mesh, [S1], src_data_rank=None)
        with pytest.raises(RuntimeError, match="index out of range"):
            F.nll_loss(scores, distribute_tensor(torch.tensor([1, 4]), mesh, [R], src_data_rank=None))

    ThreadWorld(2).run(rank)
