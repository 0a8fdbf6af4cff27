"""Buckets: what is sent together gives the same results as when each is sent alone."""

import copy
import re
from collections import Counter
from math import ceil

import pytest
import torch
import ways
from torch import fx, nn, optim

import spmd
from spmd import MeshTopoInfo, Replicate, Shard
from spmd.expand.nodes import is_backward
from spmd.expand.passes.bucket import KINDS, bucketed
from spmd.expand.passes.packed import NO_BUCKET, NO_OTHER, TOO_EARLY, in_buckets
from spmd.expand.passes.passes import Buckets, usual_passes, with_passes
from spmd.expand.program import Program
from spmd.mesh import Link, Machine, Way, as_rank
from spmd.mesh.layout import HostGrid
from spmd.tensor.redistribute.bucket import bucket_key
from spmd.tensor.redistribute.collective_moves import AllGather, ReduceScatter
from spmd.tensor.redistribute.plan import Step, plan
from spmd.tensor.spec import parse_spec
from tests.expand.side_by_side import GPT_PLAN, Case, Net, gpt, rows, tokens
from tests.steps import train_step


def program(case: Case, shape, bucket_mb, **said):
    """The program of the second step, planned without ranks."""
    model, optimizer = case.begin()
    case.step(model, optimizer, *copy.deepcopy(case.batches[0]))
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    with as_rank(0):
        step = spmd.compile(case.step, mesh, params=case.params, inputs=case.inputs, bucket_mb=bucket_mb, **said)
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
    small = bucketed(alone, 0.0, 0.0)
    assert [c.tensors for c in small.collectives] == [c.tensors for c in alone.collectives]
    two = bucketed(alone, 1e-4, 1e-4)
    assert 2 < len(two.collectives) < len(alone.collectives)
    assert str(alone) == text


@pytest.mark.parametrize("mb", [0.05, 1.0])
def test_few_collectives_are_sent(mb):
    """Of gradients, and of parameters in shards each way, one more than there are full buckets, at most. By default
    shards travel in smaller ones where larger ones would need more memory."""
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    case = Case(model=lambda: gpt(n_embd=64), batches=tokens(8), inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}})
    model, optimizer = case.begin()
    most = 1 + ceil(sum(p.numel() * p.element_size() for p in model.parameters()) / (mb * (1 << 20)))
    sent = {}
    by_hand = {"fully_shard": "dp", "passes": ("numbers_late", Buckets(mb, mb))}
    for name, said in {"dp": {"bucket_mb": mb}, "zero3": by_hand}.items():
        step = spmd.compile(case.step, mesh, inputs=case.inputs, **said)
        found = step.program_for(model, optimizer, *case.batches[0])
        sent[name] = Counter(c.kind for c in found.collectives)
    assert 1 <= sent["dp"]["all_reduce"] <= most
    assert 1 <= sent["zero3"]["all_gather"] <= 2 * most and 1 <= sent["zero3"]["reduce_scatter"] <= most


def test_only_like_goes_with_like():
    """A bucket has one axis, one reduce kind and one dtype."""

    def step(x, y):
        return x.sum(0), y.sum(0), x.amax(0), (x * x).sum(0), y.double().sum(0)

    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with as_rank(0):
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}, "y": {"tp": Shard(0)}})
        found = compiled.program_for(torch.ones(4, 3), torch.ones(4, 3))
    assert sorted((c.axis, c.tensors) for c in found.collectives) == [("dp", 1), ("dp", 2), ("tp", 1), ("tp", 1)]


# ---- gathers, reduce-scatters, all-to-alls ------------------------------------------------------


def moved_twice(*xs):
    """Each tensor moves along one axis, then along the other."""
    found = []
    for x in xs:
        once = spmd.constrain(x, {"dp": Shard(1), "tp": Shard(2)})
        found.append(spmd.constrain(once, {"dp": Shard(1), "tp": Shard(0)}))
    return [x * 2 for x in found]


@pytest.mark.parametrize("mb, sent_then", [(100.0, [4, 4]), (0.0, [1] * 8), (4e-4, None)])
def test_moves_that_read_each_other_wait_together(mb, sent_then):
    """What is sent along one axis waits for others, though it waits to be sent along the other, too."""
    xs = [torch.arange(4.0 * n * 4).view(4, n, 4) for n in (4, 6, 5, 8)]

    def ranks(passes):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step = spmd.compile(moved_twice, mesh, inputs={"*": {"dp": Shard(0), "tp": Shard(2)}}, passes=passes)
        return [r.full_tensor() for r in step(*xs)], [c.tensors for c in step.program.collectives]

    for found, sent in ways.on_ranks(lambda: ranks((Buckets(mb, mb),)), 4):
        assert ways.same(found, [x * 2 for x in xs])
        assert sum(sent) == 8 and sent == (sent_then or sent)


def exchanged(x, y):
    """Each tensor moves from rows to columns."""
    a, b = spmd.constrain(x * 2, {"dp": Shard(1)}), spmd.constrain(y * 3, {"dp": Shard(1)})
    return a + 1, b + 1


@pytest.mark.parametrize("n", [8, 7, 3])
def test_all_to_alls_in_a_bucket(n):
    """Even, uneven and empty blocks."""
    x, y = torch.randn(n, 5, generator=torch.Generator().manual_seed(0)), torch.arange(float(n * 6)).view(n, 6)

    def ranks(passes):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(exchanged, mesh, inputs={"*": {"dp": Shard(0)}}, passes=passes)
        return [r.full_tensor() for r in step(x, y)], [(c.kind, c.tensors) for c in step.program.collectives]

    for (alone, sent), (packed, sent_packed) in zip(
        ways.on_ranks(lambda: ranks(()), 4), ways.on_ranks(lambda: ranks((Buckets(100.0),)), 4), strict=True
    ):
        assert ways.same(alone, packed)
        assert ways.same(alone, [x * 2 + 1, y * 3 + 1])
        assert ("all_to_all", 1) in sent and sent_packed == [("all_to_all", 2)]


@pytest.mark.parametrize("shape, hidden", [((4, 1), 8), ((4, 1), 7), ((4, 1), 3), ((2, 2), 8)], ids=str)
def test_parameters_in_shards_travel_in_buckets(shape, hidden, monkeypatch):
    """Stored even, uneven and empty. A gather forward, one backward, one reduce-scatter; the training is that of one
    device."""
    case = Case(model=lambda: Net(hidden=hidden), batches=rows(8), params={})
    compile = spmd.compile
    said = {"fully_shard": "dp", "passes": (Buckets(100.0), "schedule")}
    monkeypatch.setattr(spmd, "compile", lambda *a, **k: compile(*a, **k, **said))
    program = case.check(shape, lambda step, *_: step.program)
    kinds = [(c.kind, c.tensors) for c in program.collectives]
    assert ("all_gather", 1) not in kinds or hidden != 8
    assert len([c for c in program.collectives if c.kind == "reduce_scatter"]) <= 2
    program.verify()


def test_sizes_by_the_cost_model_and_by_hand():
    """A bucket ends where its latency is a tenth of its time, or where the megabytes end that were given."""
    topology = MeshTopoInfo(HostGrid((4,)), "hopper")
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)).with_topology(topology)

    def step(*xs):
        return [x.sum(0) for x in xs]

    names = [torch.empty(4, 1 << 20, device="meta") for _ in range(20)]  # sums of four megabytes
    with as_rank(0):
        compiled = spmd.compile(step, mesh, inputs={"*": {"dp": Shard(0)}}, passes=())
        program = compiled.program_for(*names)
    modelled = [b for _, b in bucketed(program).steps() if b.sends]
    full = modelled[1]
    assert full.latency_us / full.parts.sent < 0.12 < modelled[0].latency_us / modelled[0].parts.sent
    by_hand = [b.tensors for _, b in bucketed(program, 16.0, 8.0).steps() if b.sends]
    assert by_hand == [2, 4, 4, 4, 4, 2]
    assert [b.tensors for _, b in bucketed(program, kinds=("all_gather",)).steps() if b.sends] == [1] * 20


def test_what_may_not_be_in_one_bucket():
    """Another dtype, axis, reduction, or kind has another key; maxima that carry marks have none."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))

    def keys(kind, *pairs):
        return [bucket_key(Step(kind(axes), parse_spec(a, mesh), parse_spec(b, mesh))) for axes, a, b in pairs]

    found = keys(
        AllGather, ((0,), "f32[8@dp]", "f32[8]"), ((0,), "f32[4, 6@dp]", "f32[4, 6]"), ((1,), "f32[8@tp]", "f32[8]"),
        ((0,), "bf16[8@dp]", "bf16[8]"),
    )  # fmt: skip
    assert found[0] == found[1] and len(set(found)) == 3
    found = keys(
        ReduceScatter, ((0,), "f32[8] +sum@dp", "f32[8@dp]"), ((0,), "f32[8] +avg@dp", "f32[8@dp]"),
        ((1,), "f32[8] +sum@tp", "f32[8@tp]"), ((0,), "f64[8] +sum@dp", "f64[8@dp]"),
    )  # fmt: skip
    assert len(set(found)) == 4 and None not in found
    assert keys(ReduceScatter, ((0,), "f32[8] +max@dp", "f32[8@dp]")) == [None]


def test_what_is_cut_out_of_a_bucket_is_alive_until_it_is_read():
    """The replay counts tensors that were gathered together one by one, as the program's memory does."""
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), torch.zeros(4, 64)

    said = {"fully_shard": "dp", "passes": (Buckets(100.0, kinds=("all_gather",)),)}
    compiled = spmd.compile(train_step, mesh, inputs={"x": {"dp": Shard(0)}}, **said)
    program = compiled.program_for(model, optim.SGD(model.parameters(), 0.1), x)
    estimate, exact = max(program.work.memory(range(len(program.work.tasks)))), program.memory().peak
    assert abs(estimate - exact) < 0.05 * exact


@pytest.mark.parametrize("kinds", [("all_reduce",), ("reduce_scatter", "all_gather")])
@pytest.mark.parametrize("said", [{}, {"fully_shard": "dp"}], ids=["plain", "sharded"])
def test_a_report_counts_what_is_in_buckets_and_says_why_the_rest_is_not(kinds, said):
    """Each collective of these kinds is in one sentence, and nothing else is."""
    case = Case(model=gpt, params=GPT_PLAN, batches=tokens(4), inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}})
    plain = program(case, (2, 2), None, **said)
    after = with_passes(plain, (Buckets(25.0, kinds=kinds),))
    (report,) = after.reports
    counted = [int(re.search(r", (\d+) of them", each)[1]) for each in (*report.did, *report.left)]
    assert sum(counted) == len([each for each in plain.collectives if each.kind in kinds])
    assert all(each in str(report) for each in (*report.did, *report.left))
    assert sum(counted[: len(report.did)]) == sum(each.tensors for each in after.collectives if each.tensors > 1)


def test_why_a_collective_is_in_no_bucket():
    """Alone of its kind; read at once; or with marks in its elements."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    moved = [("+sum@dp", "[8]"), ("+sum@tp", "[8]"), ("+sum@tp", "[8]"), ("+max@dp", "[8@dp]")]
    graph = fx.Graph()
    for owed, goal in moved:
        (step,) = plan(parse_spec(f"f32[8] {owed}", mesh), parse_spec(f"f32{goal}", mesh)).steps
        graph.call_function(step, (graph.placeholder("x"),))
    did, left = in_buckets(Program("f", mesh, graph, {}, (), ()), KINDS)
    assert not did and left == (
        f"all_reduce over dp, 1 of them: {NO_OTHER}", f"all_reduce over tp, 2 of them: {TOO_EARLY}",
        f"reduce_scatter over dp, 1 of them: {NO_BUCKET}",
    )  # fmt: skip


@pytest.mark.parametrize("n_embd", [64, 128])
def test_shards_travel_together_as_far_as_the_memory_allows(n_embd):
    """By default. Where there is room, as in the forward, no more gathers are sent than one more than full buckets; and
    no more is alive than without buckets, by the replay and by the count of the rank's code."""
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    inputs = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
    case = Case(model=lambda: gpt(n_embd=n_embd), batches=tokens(8), inputs=inputs)
    model, optimizer = case.begin()
    step = spmd.compile(case.step, mesh, inputs=inputs, fully_shard="dp", passes=())
    alone = step.program_for(model, optimizer, *case.batches[0])
    packed = with_passes(alone, usual_passes("cpu", 25.0))
    sent = [(node, move.kind) for node, move in packed.steps() if move.sends]
    assert len([1 for node, kind in sent if kind == "all_gather" and not is_backward(next(iter(node.users)))]) <= 2
    assert Counter(kind for _, kind in sent)["reduce_scatter"] <= 5
    peaks = [max(each.work.memory(range(len(each.work.tasks)))) for each in (alone, packed)]
    assert peaks[1] <= peaks[0] and packed.memory().peak <= alone.memory().peak


def test_what_was_gathered_together_is_there_once():
    """Beside what came for all there is what was sent, then one tensor that is cut out, whatever dim is in shards."""
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    weights = [torch.zeros(64, 64) for _ in range(8)]

    def step(x, *weights):
        for w in weights:
            x = x @ spmd.constrain(w, {})
        return x

    for dim in (0, 1):
        inputs = {"x": {"dp": Shard(0)}, "*": {"dp": Shard(dim)}}
        compiled = spmd.compile(step, mesh, inputs=inputs, passes=(Buckets(100.0, kinds=("all_gather",)),))
        program = compiled.program_for(torch.zeros(4, 64), *weights)
        assert [c.tensors for c in program.collectives if c.kind == "all_gather"] == [8]
        came, one, given = 8 * 64 * 64 * 4, 64 * 64 * 4, 8 * 16 * 64 * 4
        assert program.memory().peak <= given + came + max(given, one) + 8 * 64 * 4


def test_sums_and_shards_are_sent_in_buckets_by_one_pass():
    """Of the kinds that two of `Buckets` name, the first are joined as if there was no second, and all in one pass."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    case = Case(model=lambda: Net(hidden=8), batches=rows(8), params={})
    model, optimizer = case.begin()
    said = {"inputs": case.inputs, "fully_shard": "tp"}
    program = spmd.compile(case.step, mesh, **said).program_for(model, optimizer, *case.batches[0])
    sums, shards = Buckets(25.0, 1.0, ("all_reduce",)), Buckets(25.0, 25.0, ("all_gather", "reduce_scatter"))
    one_by_one = "numbers_late", sums, shards
    apart = spmd.compile(case.step, mesh, **said, passes=one_by_one).program_for(model, optimizer, *case.batches[0])
    assert [r.name for r in program.reports].count("buckets") == 1
    assert Counter(c.kind for c in program.collectives).keys() == Counter(c.kind for c in apart.collectives).keys()
    assert max(c.tensors for c in program.collectives if c.kind == "all_reduce") > 1
    assert max(c.tensors for c in program.collectives if c.kind == "all_gather") > 1


# ---- exchanges that gather ----------------------------------------------------------------------


def whole_and_twice(*xs):
    """Each tensor is whole on every rank."""
    return [spmd.constrain(x, {"dp": Replicate()}) * torch.ones((), dtype=x.dtype) for x in xs]


def uneven(ranks):
    """Blocks of which some ranks have less, and some have none, along the first dim and along the last; two dtypes."""
    drawn = torch.Generator().manual_seed(0)
    shapes = [(ranks - 1, 3), (1,), (2 * ranks + 1, 2, 2), (ranks // 2 + 1,), (2, ranks - 1), (2, 3, ranks + 1)]
    found = [torch.randn(shape, generator=drawn) for shape in shapes]
    return found + [x.double() for x in found[:3]]


def gathered(ranks, passes):
    """What a rank has of tensors that were gathered, and what was sent for them."""
    xs = uneven(ranks)
    mesh = spmd.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    given = {f"xs.{i}": {"dp": Shard(0 if i not in (4, 5) else x.ndim - 1)} for i, x in enumerate(xs)}
    step = spmd.compile(whole_and_twice, mesh, inputs=given, passes=passes)
    found = [r.to_local() for r in step(*xs)]
    step.program.verify()
    return found, [(c.kind, c.tensors) for c in step.program.collectives]


def check_gathered(ranks, alone, packed):
    """Bits are those of the tensors; each dtype travels by itself."""
    for (one, sent), (other, sent_packed) in zip(alone, packed, strict=True):
        assert ways.same(one, uneven(ranks)) and ways.same(other, uneven(ranks))
        assert ("exchange", 1) in sent
        assert sorted(sent_packed) == [("all_gather", 3), ("all_gather", 6)]


@pytest.mark.parametrize("way", ways.WAYS)
def test_exchanges_that_gather_travel_as_gathers(way, gloo4):
    """One gather for each dtype takes the place of the exchanges."""
    check_gathered(4, *[ways.run(way, gloo4, gathered, 4, passes) for passes in ((), (Buckets(100.0),))])


@pytest.mark.parametrize("ranks", [3, 40])
def test_exchanges_of_few_and_of_many_ranks_travel_as_gathers(ranks):
    """The blocks of forty ranks are counted in runs."""
    each = (), (Buckets(100.0),)
    check_gathered(ranks, *[ways.on_ranks(lambda passes=passes: gathered(ranks, passes), ranks) for passes in each])


def weights(hop_us, gb_per_s):
    """A program of 64 ranks that gathers four weights of which most of them have nothing."""
    link = Link(hop_us, gb_per_s)
    topology = MeshTopoInfo(HostGrid((64,)), Machine("links", (Way("ring", 0.0, (link,)),)))
    mesh = spmd.DeviceMesh("cpu", list(range(64)), mesh_dim_names=("dp",)).with_topology(topology)
    compiled = spmd.compile(whole_and_twice, mesh, inputs={"*": {"dp": Shard(0)}}, passes=())
    return compiled.program_for(*[torch.empty(3, 1 << 14, device="meta") for _ in range(4)])


@pytest.mark.parametrize("hop_us, gb_per_s, kinds", [(100.0, 100.0, ["all_gather"]), (0.01, 1.0, ["exchange"] * 4)])
def test_a_bucket_of_exchanges_is_never_slower(hop_us, gb_per_s, kinds):
    """Where its padding takes longer than the latencies that it saves, each stays an exchange."""
    program = weights(hop_us, gb_per_s)
    packed = bucketed(program, 100.0)
    assert [c.kind for c in program.collectives] == ["exchange"] * 4
    assert [c.kind for c in packed.collectives] == kinds
    assert packed.comm_time() <= program.comm_time()


def test_a_bucket_of_exchanges_needs_no_more_memory():
    """Where that is asked for; and what is cut out of a bucket keeps none of its padding alive."""
    program = weights(100.0, 100.0)
    assert bucketed(program, 100.0, keeps_memory=True).memory().peak <= program.memory().peak
    packed = bucketed(program, 100.0)
    after = dict(packed.memory().timeline)
    whole = sum(spec.local_nbytes for _, spec in program.outputs)
    last = [after[name] for name in after if name.startswith("mul")][-1]
    assert last < 3 * whole
