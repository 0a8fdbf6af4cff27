"""What is alive up to a place, read no further than that, is what the replay of the whole program says."""

import itertools

import pytest
import torch

import spmd
from spmd.expand.timeline.alive import alive_until
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step
from tests.expand.side_by_side import GPT_PLAN, INPUTS, gpt, tokens, train_step


def program(shape, batch=8, **how):
    mesh = spmd.DeviceMesh("cpu", torch.arange(shape[0] * shape[1]).reshape(shape), mesh_dim_names=("dp", "tp"))
    step = spmd.compile(train_step, mesh, inputs=INPUTS, **how)
    torch.manual_seed(0)
    model = gpt()
    return step.program_for(model, torch.optim.AdamW(model.parameters()), *tokens(batch)[0])


WAYS = {
    "of more ranks than a dim has indices": ((2, 64), {"params": GPT_PLAN, "bucket_mb": None}),
    "in buckets, of a large batch": ((2, 64), {"params": GPT_PLAN, "batch": 256}),
    "stored in shards": ((4, 2), {"fully_shard": "dp"}),
    "replicated": ((2, 1), {"bucket_mb": None}),
}


@pytest.mark.parametrize("how", WAYS)
def test_what_is_alive_is_that_of_the_whole_replay(how):
    """At each place up to what is asked for, and at most, wherever that is in the program."""
    shape, settings = WAYS[how]
    p = program(shape, **settings)
    work, nodes = p.work, list(p.graph.nodes)
    whole = work.memory(range(len(work.tasks)))
    single = [type(node.meta.get("spec")) is not tuple or node.op == "output" for node in nodes]
    most = max(itertools.compress(whole, single))
    sent = [node for node in nodes if isinstance(node.target, (Step, Bucket))]
    for asked in ([nodes[0]], sent[:1], sent[-1:], nodes[-1:]):
        found = alive_until(p, asked)
        assert found.most == most
        assert len(found.nbytes) > nodes.index(asked[-1])
        assert found.nbytes.tolist() == whole[: len(found.nbytes)]
        assert found.sends == [task.sends for task in work.tasks[: len(found.nbytes)]]


def test_updates_are_not_replayed_where_they_cannot_be_the_most():
    """Where activations are the most, and the rest could be there all at once beside what is left of them."""
    p = program((2, 64), batch=256, params=GPT_PLAN)
    sent = [node for node in p.graph.nodes if isinstance(node.target, (Step, Bucket))]
    assert len(alive_until(p, sent).nbytes) < len(p.graph.nodes)


def test_updates_are_replayed_where_they_may_be_the_most():
    p = program((2, 1), bucket_mb=None)
    assert len(alive_until(p, [next(iter(p.graph.nodes))]).nbytes) == len(p.graph.nodes)
