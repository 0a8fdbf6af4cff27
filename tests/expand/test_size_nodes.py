"""A trace knows what it asked of sizes before, and records none of their arithmetic."""

import contextlib
from unittest import mock

import pytest
import torch

from spmd._torch.size_nodes import SizeNode
from tests.expand.test_capture import captured, ops


def test_sizes_of_one_expression_are_one_symbol():
    """However they were computed; and no node of the graph computes them."""
    seen = []

    def step(x, y):
        seen.extend([x.shape[0] * 8, (x + 1).shape[0] * 8, x.expand(8, -1).numel(), y.shape[0] * 8])
        return x.view(1, -1) * 2

    nothing = contextlib.nullcontext(mock.Mock(writes=[]))
    with mock.patch("spmd.expand.capture.undone", lambda *_: nothing):  # it would empty the list
        found = captured(step, x=torch.ones(4), y=torch.ones(4))
    nodes = [n.node for n in seen]
    assert all(type(n) is SizeNode for n in nodes)
    assert nodes[0] is nodes[1] is nodes[2] is not nodes[3]
    assert ops(found) == ["aten.view.default", "aten.mul.Tensor"]


def alike(x, y):
    """torch knows that the lengths are equal, or one of them 1, as soon as it has added the two."""
    z = x + y
    return (z * 2 if y.shape[0] == 1 else z), (z * 3 if x.shape[0] == y.shape[0] else z)


@pytest.mark.parametrize("rows, other", [(1, 4), (4, 1), (4, 5)])
def test_what_an_op_has_asked_is_asked_again_by_the_step(rows, other):
    """What was taken for granted for shapes alone is a guard as soon as the step decides by it."""
    found = captured(alike, x=torch.ones(4, 3), y=torch.ones(rows, 3))
    given = {"x": (max(4, other), 3), "y": (other, 3)}
    failed = found.assumed.failed(given, {}, lambda: True)
    assert failed is None if (rows, other) == (4, 5) else "shape[0]" in failed.condition


def test_sizes_that_became_equal_are():
    """A sum of two lengths needs them to be equal; then a decision by their difference is none by itself."""

    def step(x, y):
        z = x + y[: x.shape[0]] if x.shape[0] == y.shape[0] else x
        return z.sum() * (x.shape[0] - y.shape[0] + 2), z.view(y.shape[0], 1)

    found = captured(step, x=torch.ones(5), y=torch.ones(5))
    assert found.assumed.failed({"x": (6,), "y": (6,)}, {}, lambda: True) is None
    assert found.assumed.failed({"x": (6,), "y": (7,)}, {}, lambda: True) is not None
    assert found.at({"x": (6,), "y": (6,)}, {}).graph.output_node().args[0][1].meta["val"].shape == (6, 1)
