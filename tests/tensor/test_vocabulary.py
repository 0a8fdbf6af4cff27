"""Tables and losses sharded over the vocabulary: no gather of either."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import debug
from spmd.sim import ThreadWorld
from spmd.tensor.dtensor import distribute_tensor
from tests.tensor.single import S0, S1, R, agree


@pytest.mark.parametrize("words", [8, 7, 2])
@pytest.mark.parametrize("shape", [(3, 5), (4,), ()])
def test_an_embedding_by_rows_is_the_embedding(words, shape):
    """Even, uneven and empty blocks of rows; tokens anywhere; gradients; columns sharded too."""
    torch.manual_seed(0)
    table = torch.randn(words, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, words, shape)
    lying = [R] if not shape else [R, S0]
    for t in lying:
        placings = [[t, R], [R, S0]], [[R, t], [S0, R]], [[t, t], [S0, S0]], [[t, R], [S1, S0]]
        agree(F.embedding, [tokens, table], *placings)
    agree(lambda i, w: F.embedding(i, w, padding_idx=1), [tokens, table], [[R, R], [S0, R]])


def test_the_table_is_not_gathered():
    """What is sent is the sum of the rows that were looked up."""
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


def test_a_loss_with_sharded_classes_is_the_loss():
    """Scores move from classes to rows by one all-to-all."""
    torch.manual_seed(0)
    scores, classes = torch.randn(8, 6, dtype=torch.float64, requires_grad=True), torch.randint(0, 6, (8,))
    debug.fallbacks.clear()
    agree(F.cross_entropy, [scores, classes], [[S0, S1], [S0, R]], [[R, S1], [R, R]], [[S1, S1], [R, R]])
    assert not debug.fallbacks()
