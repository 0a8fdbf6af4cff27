"""`index_add` and its kin with sharded sources: each rank adds its own entries, and the sums are reduced."""

from __future__ import annotations

import pytest
import torch

import spmd
from tests.tensor.rules.test_norms import smooth
from tests.tensor.single import AVG, S0, S1, SUM, R, agree_at_once, mesh_of, placed

FNS = {
    "index_add": lambda x, i, y: x.index_add(0, i, y, alpha=2),
    "index_add_": lambda x, i, y: (x * 1).index_add_(0, i, y),
    "index_put": lambda x, i, y: x.index_put((i,), y, accumulate=True),
    "index_put_": lambda x, i, y: (x * 1).index_put_((i,), y[:, :1], accumulate=True),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i[:, None].expand(-1, 3), y),
    "scatter_add_": lambda x, i, y: (x * 1).scatter_add_(0, i[:, None].expand(-1, 3), y),
    "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, i[:, None].expand(-1, 3), y, "amax"),
    "the least": lambda x, i, y: x.detach().index_reduce(0, i, y.detach(), "amin"),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("places", [12, 7, 1])
@pytest.mark.parametrize("name", FNS)
def test_it_is_what_one_device_adds(name, places):
    """Forward and backward, with even, uneven and empty blocks, into replicated, sharded and partial targets."""
    x, y = smooth(5, 3), smooth(places, 3)
    i = (torch.arange(places) * 3 + 1) % 5
    lie = [[R, R], [S0, R], [S0, R]], [[R, S1], [S0, R], [S0, S1]], [[SUM, R], [S0, S0], [S0, S0]]
    agree_at_once(FNS[name], [x, i, y], *lie, [[S0, AVG], [R, S0], [S1, S0]])


def test_messages_of_edges_are_not_gathered():
    """As in a graph network with many edges on four ranks: only the sums at its few nodes are sent, once."""
    given = smooth(1000, 3).detach()
    with spmd.LocalTensorMode(4) as mode:
        mesh = mesh_of((4,))
        edges = placed(torch.arange(1000) % 5, [S0], mesh)
        messages = placed(given, [S0], mesh)
        nodes = placed(torch.zeros(5, 3, dtype=torch.float64), [R], mesh)
        assert str(nodes.index_add(0, edges, messages)._spec) == "f64[5, 3] +sum@dp"
        assert not mode.sent
        nodes.index_add_(0, edges, messages)
        assert [sent.nbytes for sent in mode.sent] == [5 * 3 * 8] * 4
