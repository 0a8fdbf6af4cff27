"""Writes into the blocks that to_local gives: views that are copies, and their base, do not part in silence."""

from __future__ import annotations

import gc

import pytest
import torch

from spmd import LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.tensor.eager.user_writes import any_copy_held

# Each makes v, which cuts across the shards of q, writes, and reads.


def read_copy_after_write_to_base(q):
    v = q[1:]
    q.to_local().mul_(2)
    v.sum()


def base_handed_out_before_the_copy_was_made(q):
    block = q.to_local()
    v = q[1:]
    block.mul_(2)
    v.sum()


def base_is_a_view(q):
    w = q.view(12)
    block = w.to_local()
    v = w[2:]
    block.mul_(2)
    v.sum()


def base_of_a_view_is_written(q):
    w = q.view(12)
    v = w[2:]
    q.to_local().mul_(2)
    v.sum()


def copy_of_a_copy(q):
    w = q[1:][1:]
    q.to_local().mul_(2)
    w.sum()


def read_base_after_write_to_copy(q):
    v = q[1:]
    v.to_local().mul_(2)
    q.sum()


def copy_is_gone(q):
    q[1:].to_local().mul_(2)
    q + 1


def hot_call(q):
    q + 1, q + 1
    block = q[1:].to_local()
    q + 1, q + 1
    block.mul_(2)
    q + 1


def view_of_the_base(q):
    w = q[1:][1:]
    w.to_local().mul_(2)
    q.view(12) + 1


def compiled_code_writes_a_copy(q):
    v = q[1:]
    v._block.mul_(2)  # as torch.compile does, without a word
    q.sum()


def written_on_both_sides(q):
    v = q[1:]
    v.to_local().mul_(2)
    q.mul_(2)
    v.sum()


PARTED = [
    read_copy_after_write_to_base, base_handed_out_before_the_copy_was_made, base_is_a_view, base_of_a_view_is_written,
    copy_of_a_copy, read_base_after_write_to_copy, copy_is_gone, hot_call, view_of_the_base, written_on_both_sides,
    compiled_code_writes_a_copy,
]  # fmt: skip


def only_dtensor_writes(q):
    v = q[1:]
    q.to_local(), v.to_local()
    q.mul_(2)
    v.add_(1)
    return q.full_tensor(), v.full_tensor()


def written_back_by_a_later_write(q):
    v = q[1:]
    v.to_local().mul_(2)
    v.mul_(3)
    return q.full_tensor(), v.full_tensor()


def gathered_by_a_later_write(q):
    v = q[1:]
    q.to_local().mul_(2)
    q.mul_(3)
    return q.full_tensor(), v.full_tensor()


def compiled_code_writes_the_base(q):
    v = q[1:]
    q._block.mul_(6)
    return q.full_tensor(), v.full_tensor()


TOGETHER = {
    compiled_code_writes_the_base: (6, 0), only_dtensor_writes: (2, 1), written_back_by_a_later_write: (6, 0),
    gathered_by_a_later_write: (6, 0),
}  # fmt: skip


def _on_two_ranks(fn):
    with LocalTensorMode(2) as mode:
        x = torch.arange(12.0).reshape(4, 3)
        out = fn(distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)]))
        return None if out is None else [t.local[mode.ranks[0]] for t in out]


@pytest.fixture(scope="module")
def little_to_collect():
    """Whatever is there already is not looked at when garbage is collected after each test."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("fn", PARTED, ids=lambda fn: fn.__name__)
def test_parted_copies_are_an_error(fn, little_to_collect):
    """A write through to_local that another tensor of the same memory would not show is an error when that is read."""
    with pytest.raises(RuntimeError, match=r"written through to_local\(\)"):
        _on_two_ranks(fn)
    gc.collect()
    assert not any_copy_held()


def test_writes_that_come_together():
    """Writes to the DTensors, and whole copies in either direction after a write to a block, lose nothing."""
    x = torch.arange(12.0).reshape(4, 3)
    for fn, (factor, more) in TOGETHER.items():
        q, v = _on_two_ranks(fn)
        want = x.clone()
        if fn is written_back_by_a_later_write:
            want[1:] *= factor
        else:
            want *= factor
            want[1:] += more
        assert torch.equal(q, want) and torch.equal(v, want[1:]), fn


def test_storage_offset():
    """A view tells where it begins in the memory of one device, and its base's; as torch does."""
    x = torch.arange(24.0).reshape(4, 6)
    views = (
        lambda t: t[1:], lambda t: t[:, 2:], lambda t: t[1:][:, 1:].view(3, 5), lambda t: t.view(24)[5:].unsqueeze(0),
        lambda t: t.unbind(1)[3], lambda t: torch.view_as_real(torch.view_as_complex(t.view(4, 3, 2))[:, 1:]),
    )  # fmt: skip
    with LocalTensorMode(2):
        q = distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)])
        for _ in range(2):  # the second time by the fast path
            assert [f(q).storage_offset() for f in views] == [f(x).storage_offset() for f in views]
        assert q[1:].untyped_storage()._cdata == q.view(24).untyped_storage()._cdata != (q + 1).untyped_storage()._cdata
