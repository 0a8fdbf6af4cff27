"""Buckets: all-reduces that are sent together give the same results as when each is sent alone."""

import copy

import pytest
import torch

import spmd
from spmd import Shard
from spmd.expand.passes.bucket import bucket_all_reduces
from spmd.mesh import as_rank
from tests.expand.side_by_side import GPT_PLAN, Case, Net, gpt, rows, tokens


def program(case: Case, shape, bucket_mb):
    """The program of the second step, planned without ranks."""
    model, optimizer = case.begin()
    case.step(model, optimizer, *copy.deepcopy(case.batches[0]))
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    with as_rank(0):
        step = spmd.compile(case.step, mesh, params=case.params, inputs=case.inputs, bucket_mb=bucket_mb)
        return step.program_for(model, optimizer, *case.batches[0])


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("batch", [8, 7, 3])
def test_a_training_in_buckets_is_that_on_one_device(shape, batch):
    """Even, uneven and empty shards."""
    Case(batches=rows(batch)).check(shape)


@pytest.mark.parametrize("bucket_mb", [None, 0.0, 1e-4, 25.0])
def test_the_size_of_a_bucket_does_not_change_the_training(bucket_mb, monkeypatch):
    """Bucket sizes from one tensor per collective to all tensors in one."""
    case = Case(batches=rows(7))
    compile = spmd.compile
    monkeypatch.setattr(spmd, "compile", lambda *a, **k: compile(*a, **k, bucket_mb=bucket_mb))
    case.check((2, 1))


def test_a_bucket_holds_what_can_wait():
    """All gradients and the loss are in one bucket. The count of targets is read at once, so it is sent alone."""
    case = Case(batches=rows(8))
    alone, packed = program(case, (2, 1), None), program(case, (2, 1), 25.0)
    parameters = len(list(Net().parameters()))
    assert [c.tensors for c in alone.collectives] == [1] * (parameters + 2)
    assert [c.tensors for c in packed.collectives] == [1, parameters + 1]
    assert sum(c.nbytes for c in packed.collectives) == sum(c.nbytes for c in alone.collectives)
    assert packed.comm_time() < alone.comm_time()


def test_what_is_read_at_once_stays_alone():
    """The all-reduces of a tensor-parallel layer are not delayed."""
    case = Case(model=gpt, params=GPT_PLAN, batches=tokens(4), inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}})
    alone, packed = program(case, (1, 2), None), program(case, (1, 2), 25.0)
    assert str(packed) == str(alone)


def test_a_full_bucket_is_sent():
    """With room for one gradient, each is sent as soon as it is made. The given program is not changed."""
    case = Case(batches=rows(8))
    alone = program(case, (2, 1), None)
    text = str(alone)
    small = bucket_all_reduces(alone, first_mb=0.0, cap_mb=0.0)
    assert [c.tensors for c in small.collectives] == [c.tensors for c in alone.collectives]
    two = bucket_all_reduces(alone, first_mb=1e-4, cap_mb=1e-4)
    assert 2 < len(two.collectives) < len(alone.collectives)
    assert str(alone) == text


def test_only_like_goes_with_like():
    """A bucket has one axis, one reduce kind and one dtype."""

    def step(x, y):
        return x.sum(0), y.sum(0), x.amax(0), (x * x).sum(0), y.double().sum(0)

    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with as_rank(0):
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}, "y": {"tp": Shard(0)}})
        found = compiled.program_for(torch.ones(4, 3), torch.ones(4, 3))
    assert sorted((c.axis, c.tensors) for c in found.collectives) == [("dp", 1), ("dp", 2), ("tp", 1), ("tp", 1)]
