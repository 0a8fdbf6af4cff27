"""Parts of a sharded dim. Where each rank can have some of each part, the dim is packed once, and they stay with it."""

import pytest
import torch

import spmd
from spmd import LocalTensorMode, Replicate, Shard, distribute_tensor
from spmd.tensor.redistribute.plan import steps_made

S0, S1 = Shard(0), Shard(1)


def parts_of(x, text):
    return eval(text, {"x": x})


def sent(fn):
    with steps_made() as steps:
        out = fn()
    return [step.kind for step in steps if step.sends], out


@pytest.mark.parametrize(
    ("size", "text", "kinds", "placement"),
    [
        (64, "x.chunk(4)", ["all_to_all"], S0),
        (64, "x.chunk(2)", ["all_to_all"], S0),
        (60, "x.split(12)", ["all_to_all"], S0),
        (60, "x.split([12, 24, 24])", ["all_to_all"], None),
        (64, "[x[16:32]]", ["all_to_all"], S0),
        (64, "[x[-16:]]", ["all_to_all"], S0),
        (64, "[x[i::8] for i in range(8)]", [], S0),  # each rank has whole eights
        (60, "[x[3::4]]", ["all_to_all"], S0),
        (60, "[x[1:60:3]]", [], S0),
        (64, "x.split(2)", ["all_to_all"], S1),  # parts shorter than there are ranks
        (61, "x.chunk(4)", ["all_to_all"], S1),  # the last one is shorter
        (64, "[x[8:32]]", ["all_to_all"], S1),  # begins within a part of its length
        (64, "[x[:60:8]]", ["all_to_all"], S1),
        (0, "x.chunk(4)", [], None),
    ],
)
def test_parts_stay_with_the_ranks_that_have_rows(size, text, kinds, placement):
    whole = torch.arange(size * 8.0, dtype=torch.float64).view(size, 8)
    with LocalTensorMode(4):
        x = distribute_tensor(whole, spmd.init_device_mesh("cpu", (4,)), [S0])
        found, parts = sent(lambda: parts_of(x, text))
        assert found == kinds
        for part, want in zip(parts, parts_of(whole, text), strict=True):
            assert placement is None or part.placements == (placement,)
            assert torch.equal(part.full_tensor().reconcile(), want)


PARTS = ["x.chunk(4)", "x.split([16, 48])", "[x[16:32], x[48:]]", "[x[1::4], x[::2]]", "[x[:8]]"]


@pytest.mark.parametrize("text", PARTS)
@pytest.mark.parametrize("placements", [(S0, Replicate()), (S0, S1), (S0, S0), (S1, S0)])
def test_gradients_of_parts(text, placements):
    whole = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    loss = sum((part * part.sum(0)).sum() for part in parts_of(whole, text))
    loss.backward()
    with LocalTensorMode(8):
        mesh = spmd.init_device_mesh("cpu", (4, 2))
        x = distribute_tensor(whole.detach(), mesh, placements).requires_grad_()
        found = sum((part * part.sum(0)).sum() for part in parts_of(x, text))
        found.backward()
        torch.testing.assert_close(found.full_tensor().reconcile(), loss.detach())
        torch.testing.assert_close(x.grad.full_tensor().reconcile(), whole.grad)


def test_other_dims_stay_where_they_are():
    with LocalTensorMode(8):
        mesh = spmd.init_device_mesh("cpu", (4, 2))
        x = distribute_tensor(torch.randn(64, 8), mesh, [S0, S1])
        found, parts = sent(lambda: x.chunk(4))
        assert found == ["all_to_all"]
        assert {part.placements for part in parts} == {(S0, S1)}
