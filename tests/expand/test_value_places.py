"""Places in tensors that only the run knows: an index, a narrow and a select by the value of a tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.test_sizes import on_ranks
from tests.tensor.single import every_rank

X, V = torch.linspace(-2, 3, 48, dtype=torch.float64).reshape(8, 6), torch.linspace(1, 2, 8, dtype=torch.float64)
PLACED = {"x": {"dp": Shard(0)}, "v": {"tp": Shard(0)}}
T = torch.tensor


def written(x, at, v):
    """Into a copy: arguments are not written."""
    x = x.clone()
    x[at] = v
    return x


def added(x, i):
    x = x.clone()
    x[:, i] *= 3
    x[i, 1:3] += 1
    return x


def several(x, i, v):
    x = x.clone()
    x[i, i] = v.sum()
    x[1:, i][0] = 7.0
    return x


def gradients(x, i):
    w = (x * 2).requires_grad_()
    loss = w.narrow(1, i, 2).square().sum() + w[i].exp().sum() + w.select(0, i).sum()
    return torch.autograd.grad(loss, w)


KNOWN_SIZES = {
    "narrow": lambda x, i, v: x.narrow(0, i, 2),
    "narrow of another dim": lambda x, i, v: torch.narrow(x, -1, start=i, length=2),
    "narrow by a number that was read": lambda x, i, v: x.narrow(1, i.item(), 2) * i.item(),
    "select": lambda x, i, v: x.select(0, i) + torch.select(x, -1, i).sum(),
    "an index": lambda x, i, v: x[i],
    "an index of a later dim": lambda x, i, v: x[..., i] - x[:, i.item()] * 2,
    "an index from the end": lambda x, i, v: x[-i - 1, 1:],
    "among others": lambda x, i, v: x[None, i, :, None] * x[i, T([0, 2])],
    "two": lambda x, i, v: x[i, i],
    "gradients": lambda x, i, v: gradients(x, i),
    "written": lambda x, i, v: written(x, i, 0.5),
    "a row": lambda x, i, v: written(x, (i, slice(1, 4)), x[0, :3]),
    "a column": lambda x, i, v: written(x, (slice(None), i), v),
    "added": lambda x, i, v: added(x, i),
    "whole numbers": lambda x, i, v: (torch.arange(8) * i.item()).clamp(max=i.item() + 2**60) + i * i.item(),
    "combinations": lambda x, i, v: torch.combinations(x[:, 0]),
    "combinations of three": lambda x, i, v: torch.combinations(x[0], 3, with_replacement=True),
}


@pytest.mark.parametrize("name", KNOWN_SIZES)
def test_a_place_is_that_of_one_device(name):
    """Of one program, at several places; the dims are sharded and not."""
    fn, given = KNOWN_SIZES[name], [(X, T(i), V) for i in (3, 0, 4)]
    want = [fn(*args) for args in given]
    for mesh_shape in ((2, 2), (4, 1)):
        found, captures = on_ranks(fn, given, PLACED, mesh_shape)
        torch.testing.assert_close(found, want)
        assert captures == 1


def test_a_place_from_the_end():
    fn, given = (lambda x, i: x.narrow(0, i, 2) + x[i]), [(X, T(-3)), (X, T(2))]
    found, captures = on_ranks(fn, given, mesh_shape=(4, 1))
    torch.testing.assert_close(found, [fn(*args) for args in given])
    assert captures == 1


class Queue(nn.Module):
    """As contrastive learning has it: a ring of keys, and a pointer in a buffer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6).double()
        self.register_buffer("keys", torch.zeros(5, 6, dtype=torch.float64))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.up(x)
        self.keys[self.at] = h.detach().mean(0)
        self.at.copy_((self.at + 1) % 5)
        return (h @ self.keys.mT).sum() + self.keys[self.at].sum()


def test_a_ring_of_keys_is_that_of_one_device():
    alone = Queue()
    ours = copy.deepcopy(alone)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(lambda model, x: model(x), mesh, inputs={"x": {"dp": Shard(0)}})
        for i in range(7):
            torch.testing.assert_close(every_rank(step(ours, X * i))[0], alone(X * i))
        torch.testing.assert_close(every_rank(ours.keys)[0], alone.keys)
        assert len(step.programs) == 1


@pytest.mark.parametrize("name, i", [("narrow", 7), ("narrow", -9), ("select", 8), ("an index", -9), ("written", 8)])
def test_a_place_that_is_not_there_is_an_error(name, i):
    """As on one device, on all ranks."""
    fn = KNOWN_SIZES[name]
    with pytest.raises((RuntimeError, IndexError)):
        fn(X, T(i), V)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(fn, mesh, inputs={"x": {"dp": Shard(0)}})
        step(X, T(1), V)
        with pytest.raises(RuntimeError, match=r"test_value_places.py:\d+: it is out of the range of dim 0"):
            step(X, T(i), V)


# ---- writes into what is a copy ---------------------------------------------------------------


def into_the_part(x, i):
    x = x.clone()
    x.narrow(0, i, 2).mul_(2)
    return x


def into_the_tensor(x, i):
    x = x.clone()
    y = x[i]
    x.add_(1)
    return y


def read_between(x, i):
    x = x.clone()
    y = x[i]
    y += 1
    total = x.sum()
    x[i] = y
    return x, total


def behind_it(x, i):
    x = x.clone()
    y = x[i]
    y += 1
    x[i] = y
    y += 1
    return x


@pytest.mark.parametrize("fn", [into_the_part, into_the_tensor, read_between, behind_it])
def test_a_write_that_one_device_would_see_is_an_error(fn):
    with pytest.raises(RuntimeError, match=r"gives a copy. Write with x\[i\] = y(.|\n)*test_value_places.py"):
        spmd.compile(fn, LINE).program_for(X, T(1))


def alone(x, i):
    """Only what is read afterwards counts."""
    x = x.clone()
    y = x.narrow(0, i, 2)
    z = y * 1
    x.mul_(2)
    return x, z


def test_a_write_that_nobody_sees_is_none():
    torch.testing.assert_close(spmd.compile(alone, LINE)(X, T(1))[1].full_tensor(), alone(X, T(1))[1])


# ---- errors -----------------------------------------------------------------------------------

LINE = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
UNKNOWN = {
    "a slice": (lambda x, i: x[i : i + 2], r"a slice at a value .* write x\.narrow\(dim, i, n\)"),
    "tensor_split": (lambda x, i: x.tensor_split(i), "tensor_split at a value .* give the places as numbers"),
    "split": (lambda x, i: x.split([i.item(), 3]), r"split_with_sizes.* takes as split_sizes a value"),
    "roll": (lambda x, i: x.roll(i.item(), 0), r"roll.* takes as shifts a value .* x\.index_select"),
    "topk": (lambda x, i: x.topk(i.item()), "topk.* takes as k a value"),
    "arange": (lambda x, i: torch.arange(i.item()) * 2, "arange.* depends on values"),
    "zeros": (lambda x, i: x.new_zeros(i.item()), "takes as size a value"),
    "one_hot": (lambda x, i: nn.functional.one_hot(i), "one_hot.* give num_classes"),
    "lstsq": (lambda x, i: torch.linalg.lstsq(x, x), r"lstsq.* the solution is torch.linalg.pinv\(A\) @ B"),
    "print": (lambda x, i: torch.ops.aten._print("x") or x, "_print.*: prints once, .* after the step"),
    "packed": (
        lambda x, i: nn.utils.rnn.pack_padded_sequence(x[..., None], torch.arange(8, 0, -1), batch_first=True),
        r"pack_padded_sequence.* give the layer the padded batch",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_known_size_is_an_error_that_says_what_to_write(name):
    fn, said = UNKNOWN[name]
    with pytest.raises(NotImplementedError, match=rf"{said}(.|\n)*test_value_places.py"):
        spmd.compile(fn, LINE).program_for(X, T(2))


def test_what_errors_say_to_write_is_right():
    """The solution of least squares, and the states of a layer at the ends of sequences."""
    layer, lengths = nn.LSTM(1, 3, batch_first=True).double(), T([6, 5, 5, 4, 3, 2, 2, 1])

    def packed(layer, x, lengths):
        given = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True)
        y, (last, _) = layer(given)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0], last[0]

    def padded(layer, x, lengths):
        y, _ = layer(x[..., None])
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        return y * mask[..., None], y.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, y.shape[2]))[:, 0]

    want = [x.detach() for x in packed(layer, X, lengths)]
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        got = spmd.compile(padded, mesh, inputs={"x": {"dp": Shard(0)}})(layer, X, lengths)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(every_rank(x)[0], y)
        solved = spmd.compile(lambda x: torch.linalg.pinv(x) @ x[:, :2], mesh, inputs={"x": {"dp": Shard(0)}})(X + X**2)
        torch.testing.assert_close(every_rank(solved)[0], torch.linalg.lstsq(X + X**2, (X + X**2)[:, :2]).solution)
