"""Parameters that are stored, computed with and updated in different places train as on one device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import spmd
from spmd import FullyShard, LocalTensorMode, Replicate, Shard
from spmd.expand.places.roles import phase_of
from tests.expand.places.trained import TP, Odd, check, plain_step, planned, whole
from tests.expand.side_by_side import seeded

OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "foreach": lambda params: optim.AdamW(params, 1e-2, weight_decay=0.1, foreach=True),
    "fused": lambda params: optim.AdamW(params, 1e-2, fused=True),
    "loop": lambda params: optim.AdamW(params, 1e-2, foreach=False),
}


@pytest.mark.parametrize(
    "axes, optimizer, said",
    [
        ({"dp": 3}, "foreach", {"fully_shard": "dp"}),
        ({"dp": 2}, "sgd", {"fully_shard": FullyShard("dp", 2)}),
        ({"dp": 2}, "fused", {"fully_shard": FullyShard("dp", 1)}),
        ({"dp": 2, "tp": 2}, "foreach", {"fully_shard": "dp", "params": TP}),
        ({"dp": 2, "tp": 2}, "sgd", {"fully_shard": FullyShard("dp", 1), "params": TP}),
        ({"dp": 1, "tp": 2}, "sgd", {"stored": {"up.*": {"dp": Shard(0)}, "words.weight": {"tp": Shard(0)}}}),
        ({"rep": 2, "dp": 2}, "loop", {"fully_shard": "dp"}),
        ({"rep": 2, "dp": 2}, "foreach", {"fully_shard": FullyShard("dp", state=("dp", "rep"))}),
    ],
)
def test_training_is_that_of_one_device(axes, optimizer, said):
    """Micro-batches, clipping and update, three steps: everything that is returned or kept, within 1e-10."""
    check(axes, OPTIMIZERS[optimizer], **said)


def test_shards_may_be_empty():
    """A dim of 3 over 4 ranks, where it is named."""
    trained = check({"dp": 4}, OPTIMIZERS["foreach"], plain_step, 2, stored={"unused": {"dp": Shard(0)}, "up.*": {
        "dp": Shard(0)}, "norm.*": {"dp": Shard(0)}, "words.weight": {"dp": Shard(0)}})  # fmt: skip
    assert str(trained.model.unused._spec) == "f64[3@dp, 4]"


def test_what_is_kept_is_sharded_by_level():
    """Level 1 shards the optimiser's state, 2 gradients too, 3 parameters too. Objects stay the objects they are."""
    kept = {}
    for level in (1, 2, 3):
        trained = check({"dp": 2}, OPTIMIZERS["foreach"], n=1, fully_shard=FullyShard("dp", level))
        p = trained.model.up.weight
        assert p is trained.optimizer.param_groups[0]["params"][3]
        kept[level] = [str(x._spec) for x in (p, p.grad, trained.optimizer.state[p]["exp_avg"])]
    whole, part = "f64[10, 6]", "f64[10@dp, 6]"
    assert kept == {1: [whole, part, part], 2: [whole, part, part], 3: [part, part, part]}


def test_a_parameter_is_gathered_once_a_pass_and_its_gradient_scattered():
    """Of two tied readers one gather in the forward and one in the backward; no gradient is reduced whole."""
    model = seeded(Odd)
    batch = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    program = planned(plain_step, model, optim.SGD(model.parameters(), 0.1), {"dp": 2}, batch, fully_shard="dp")
    table = next(n for n, (name, _) in zip(program.graph.nodes, program.inputs, strict=False) if "words" in name)
    sent = [n.target.kind for n in table.users if n.name.startswith(("all_gather", "bucket"))]
    assert sent == ["all_gather"] * 2
    large = [c for c in program.collectives if c.kind == "all_reduce" and c.nbytes > 4 * 10]
    assert not large, large


def test_at_level_1_one_gather_brings_the_new_parameter():
    """The update runs on the shard; forward and backward gather nothing."""
    model = seeded(Odd)
    batch = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    said = FullyShard("dp", 1)
    program = planned(plain_step, model, optim.AdamW(model.parameters()), {"dp": 2}, batch, fully_shard=said)
    gathers = [c for c in program.collectives if c.kind == "all_gather"]
    trained = [p for p in model.parameters() if p.requires_grad and p.ndim and p is not model.unused]
    assert len(gathers) == len(trained)
    assert all(c.spec.dims != ((),) * c.spec.ndim for c in gathers)


def two_updates(model, optimizer, x, y):
    """Two updates in one step: the second reads what the first has made."""
    for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(part).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("level, gathers", [(1, 2), (3, 4)])
def test_new_values_have_the_places_of_their_parameters(level, gathers):
    """A parameter that is updated twice in one step is gathered for the readers of its second value, too."""
    check({"dp": 2}, OPTIMIZERS["sgd"], two_updates, 2, fully_shard=FullyShard("dp", level))
    model = seeded(Odd)
    batch = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    said = {"fully_shard": FullyShard("dp", level), "bucket_mb": None}
    program = planned(two_updates, model, optim.SGD(model.parameters(), 0.1), {"dp": 2}, batch, **said)
    found = [c for c in program.collectives if c.kind == "all_gather" and c.spec.shape == (10, 6)]
    assert len(found) == gathers


def test_an_open_parameter_is_read_as_it_is_stored():
    """`params={...: None}` leaves it to every op where it reads the parameter."""
    check({"dp": 2}, OPTIMIZERS["sgd"], plain_step, 1, params={"up.*": None}, fully_shard="dp")


def test_phases_count_forward_and_backward_passes():
    """Nodes know which pass made them, whatever they compute."""
    import spmd
    from spmd.expand.capture import capture
    from spmd.expand.state import State
    from tests.expand.places.trained import train_step

    model = seeded(Odd)
    x = torch.zeros(4, 4, dtype=torch.int64)
    given = {"model": model, "optimizer": optim.SGD(model.parameters(), 0.1), "x": x, "y": x}
    mesh = spmd.DeviceMesh("cpu", [0, 1])
    graph = capture(train_step, given, lambda named: train_step(**named), State.of(given), mesh).graph
    assert sorted({phase_of(n) for n in graph.nodes}) == [0, 1, 2, 3, 4]
    marks = [phase_of(n) for n in graph.nodes if n.target is torch.ops.spmd.gradient.default]
    assert sorted(set(marks)) == [1, 3]
    assert len(marks) == 2 * sum(p.requires_grad and p is not model.unused for p in model.parameters())


@pytest.mark.parametrize(
    "said, error, text",
    [
        ({"fully_shard": "pp"}, ValueError, "fully_shard '*': no axis 'pp'"),
        ({"fully_shard": 3}, TypeError, "fully_shard has 3; give an axis"),
        ({"fully_shard": {"uq.weight": "dp"}}, ValueError, "fully_shard 'uq.weight' matches nothing. Near: up.weight"),
        ({"stored": {"up.*": [Replicate(), Replicate()]}}, ValueError, "gives no placements"),
    ],
)
def test_mistakes_are_said(said, error, text):
    """Before anything is moved."""
    model = seeded(Odd)
    batch = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    with pytest.raises(error) as raised:
        planned(plain_step, model, optim.SGD(model.parameters(), 0.1), {"dp": 2}, batch, **said)
    assert text in str(raised.value)


@pytest.mark.parametrize("wrong", [{"level": 4}, {"reshard_after_forward": "maybe"}, {"state": "rep"}])
def test_a_wrong_value_of_fully_shard_is_said(wrong):
    """When it is made."""
    with pytest.raises(ValueError, match=r"level|reshard_after_forward|state"):
        FullyShard("dp", **wrong)


ON_VIEWS = {
    "product": lambda w, x: torch.einsum("nd,edh->neh", x, w),
    "permuted": lambda w, x: w.permute(1, 0, 2) * 2.0 * x.sum(),
    "copied": lambda w, x: w.permute(2, 1, 0).contiguous() * x.sum(),
    "two views": lambda w, x: w.transpose(0, 1).transpose(1, 2).relu() * x.sum(),
}


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("kind", ON_VIEWS)
def test_arithmetic_on_views_of_what_is_stored_in_shards(kind, level):
    """Also as the first thing that reads the parameter, before the view was written for another reader."""
    torch.manual_seed(0)
    model, x = torch.nn.ParameterDict({"w": torch.randn(4, 6, 8)}), torch.randn(8, 6)

    def step(model, x):
        loss = ON_VIEWS[kind](model.w, x).square().sum()
        loss.backward()
        return loss

    alone = copy.deepcopy(model)
    expected = step(alone, x)
    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        got = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}, fully_shard=FullyShard("dp", level))(model, x)
        torch.testing.assert_close(whole(got), expected.detach())
        torch.testing.assert_close(whole(model.w.grad), alone.w.grad)
