"""The timeline of a program: what a GPU's streams would do with it, in small cases that can be followed by hand."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import spmd
from spmd import MeshTopoInfo, Shard
from spmd.comm.local_ops import FORMS, local_cases
from spmd.expand.timeline.replay import busy_us, critical_us, replay, step_us
from spmd.expand.timeline.timeline import timeline_of
from spmd.expand.timeline.work import Sending, Task, Work
from spmd.mesh.layout import HostGrid
from spmd.mesh.machine import LocalOp
from spmd.mesh.presets import TEXTBOOK
from tests.expand.side_by_side import GPT_PLAN, INPUTS, gpt, tokens, train_step


def task(name, reads=(), us=0.0, sends=None, waits=(), makes=0, shows=None, at=0):
    return Task(name, reads, waits, (), us, makes, at if shows is None else shows, sends, "", True)


def work(*tasks, held=0):
    """Tasks by what they say of themselves; each gets its place."""
    return Work(tuple(task(*t[:1], **{"at": i, **t[1]}) for i, t in enumerate(tasks)), held)


def sending(stream="dp", us=10.0, links=((0, 8.0),), joined_us=0.0):
    return Sending(stream, us, links, joined_us, 1)


def events(w, order=None):
    """(name, stream, start, end) of all that ran."""
    return [(w.tasks[r.task].name, r.stream, r.start, r.end) for r in replay(w, order)]


def test_a_collective_runs_beside_what_does_not_read_it():
    """It starts when what was launched before it is computed; its reader waits."""
    w = work(
        ("a", {"us": 2.0}), ("send", {"reads": (0,), "us": 1.0, "sends": sending(joined_us=0.5)}), ("b", {"us": 4.0}),
        ("c", {"reads": (1,), "waits": (1,), "us": 1.0}),
    )  # fmt: skip
    assert events(w) == [
        ("a", "compute", 0.0, 2.0), ("send", "compute", 2.0, 3.0), ("send", "dp", 3.0, 13.0),
        ("b", "compute", 3.0, 7.0), ("send", "compute", 13.0, 13.5), ("c", "compute", 13.5, 14.5),
    ]  # fmt: skip
    assert critical_us(w) == 14.5
    assert busy_us(w) == {"compute": 8.5, "dp": 10.0, "links of level 0": 8.0}


def test_a_launch_waits_for_what_was_issued_before_it():
    """A stream waits for all that was computed before a launch, so an early launch starts early."""
    w = work(("long", {"us": 9.0}), ("send", {"sends": sending()}), ("end", {"reads": (1,), "waits": (1,)}))
    assert step_us(w) == 19.0
    assert step_us(w, [1, 0, 2]) == 10.0


def test_collectives_of_a_group_run_one_by_one_and_groups_share_links():
    """Two groups on one level of links take the time of both their bytes; on two levels they do not meet."""
    one, same = ("x", {"sends": sending()}), ("y", {"sends": sending()})
    assert step_us(work(one, same)) == 20.0
    shared = ("y", {"sends": sending("tp")})
    assert step_us(work(one, shared)) == 16.0
    apart = ("y", {"sends": sending("tp", links=((1, 8.0),))})
    assert step_us(work(one, apart)) == 10.0


def test_memory_lives_until_its_last_reader():
    """A view holds what it shows; what is sent is held until it was waited for."""
    w = work(
        ("a", {"makes": 4}), ("view", {"reads": (0,), "shows": 0}), ("b", {"makes": 2}),
        ("use", {"reads": (1,), "makes": 1}), ("end", {"reads": (3,)}), held=100,
    )  # fmt: skip
    assert w.memory(range(5)) == [104, 104, 106, 105, 101]
    w = work(
        ("a", {"makes": 4}), ("send", {"reads": (0,), "makes": 4, "sends": sending()}), ("b", {}),
        ("read", {"reads": (1,), "waits": (1,)}), ("c", {}),
    )  # fmt: skip
    assert w.memory(range(5)) == [4, 8, 8, 8, 0]


@pytest.fixture(scope="module")
def program():
    """A GPT stored in shards, beside tensor parallelism, on two hosts of Hopper."""
    topology = MeshTopoInfo(HostGrid((2, 2), "0*2 1*2"), "hopper")
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")).with_topology(topology)
    model = gpt(n_layer=2, n_embd=64)
    step = spmd.compile(train_step, mesh, params=GPT_PLAN, inputs=INPUTS, fully_shard={"*.mlp.*": "dp"})
    return step.program_for(model, optim.AdamW(model.parameters()), *tokens(4)[0])


def test_the_timeline_of_a_program(program):
    """Its streams are those of its groups; the bound is below the step, and the critical path is the step."""
    found = program.timeline()
    assert found == timeline_of(program)
    assert set(found.streams) == {"compute", "dp", "tp"}
    assert sum(e.us for e in found.events if e.stream == "tp") == pytest.approx(
        sum(s.parts.sent for _, s in program.steps() if s.axes == (1,))
    )
    assert 0 < found.bound_us <= found.us
    assert 0 < found.exposed_us < found.us
    path = found.critical_path
    assert path[0].start == 0 and path[-1].end == found.us
    assert all(a.end <= b.start + 1e-6 for a, b in itertools.pairwise(path))
    assert any("gpt.py" in event.line for event in path)


def test_streams_of_a_timeline_do_one_thing_at_a_time(program):
    """Events of a stream do not overlap, and each reader starts when what it waits for has ended."""
    w = Work.of(program)
    by_stream: dict[str, float] = {}
    ends: dict[int, float] = {}
    for ran in replay(w):
        assert ran.start >= by_stream.get(ran.stream, 0.0) - 1e-9
        by_stream[ran.stream] = ran.end
        assert ran.start >= max((ends.get(i, 0.0) for i in w.tasks[ran.task].waits), default=0.0) - 1e-9
        ends[ran.task] = ran.end


def test_the_memory_of_a_timeline_is_that_of_the_run(program):
    """Near what the replay of the rank's code counts. On CPUs terms of a reduce-scatter are there until the wait."""
    assert program.timeline().peak == pytest.approx(program.memory().peak, rel=0.1)


def test_a_timeline_opens_in_perfetto(program, tmp_path):
    """Complete events on named tracks, a track of the user's lines, and a counter."""
    found = program.timeline()
    found.save(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["tid"] for e in trace if e["ph"] == "M"}
    assert set(names) == {"compute", "dp", "tp", "lines"}
    complete = [e for e in trace if e["ph"] == "X"]
    assert len([e for e in complete if e["tid"] != names["lines"]]) == len(found.events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)
    assert any("gpt.py" in e["name"] for e in complete if e["tid"] == names["lines"])
    assert max(e["args"]["bytes"] for e in trace if e["ph"] == "C") == found.peak


def test_a_program_that_sends_nothing():
    """On one rank there is one stream, and its time is the bound."""

    def double(x):
        return x * 2

    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)).with_topology(MeshTopoInfo(HostGrid((1,)), "hopper"))
    found = spmd.compile(double, mesh, inputs={"x": {"dp": Shard(0)}}).program_for(torch.ones(8)).timeline()
    assert found.streams == ("compute",) and found.exposed_us == 0 and found.gap == 0 and found.us > 0


def test_a_program_is_priced_on_other_links(program):
    """As if it had been compiled for them; on those of its mesh as without."""
    assert program.timeline(program.mesh.topology) == program.timeline()
    others = MeshTopoInfo(HostGrid((2, 2)), "textbook")
    assert program.timeline(others).us != program.timeline().us
    for _, step in program.steps():
        assert sum(step.parts_over(others)) == step.priced(others)


def test_ops_are_priced_by_what_was_measured():
    """By kind and size; a dtype that was not timed as the one that was, a kind that was not by its bytes."""
    curves = [("product", 5.0, 1e-3), ("special", 3.0, 0.01), ("pointwise", 1.0, 0.01), ("view", 0.5, 0.0)]
    ops = tuple(LocalOp(kind, "float32", ((us, rate),)) for kind, us, rate in curves)
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)).with_topology(replace(TEXTBOOK, local_ops=ops))
    step = spmd.compile(lambda x: F.gelu((x @ x).t()) + torch.softmax(x, 1), mesh)
    program = step.program_for(torch.ones(8, 8, dtype=torch.float64))
    took = {task.name: task.us for task in program.work.tasks if task.is_op}
    #       2 * 8 * 8 * 8 operations; 512 bytes read and 512 written
    assert took == {"mm": pytest.approx(6.024), "t": 0.5, "gelu": 13.24, "_softmax": 11.24, "add": 16.36}


def test_products_are_priced_by_their_form():
    """Two of as many operations: the one that reads and writes more takes longer."""
    product = LocalOp("product", "float32", ((5.0, 1e-3),), us_per_byte=0.01)
    ops = product, LocalOp("pointwise", "float32", ((1.0, 0.0),))
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)).with_topology(replace(TEXTBOOK, local_ops=ops))
    step = spmd.compile(lambda a, b, c, d: (a @ b, c @ d), mesh)
    program = step.program_for(torch.ones(64, 4), torch.ones(4, 4), torch.ones(16, 8), torch.ones(8, 8))
    took = [task.us for task in program.work.tasks if task.is_op]
    #       2,048 operations each; 528 numbers of 4 bytes, and 320
    assert took == [pytest.approx(7.048 + 21.12), pytest.approx(7.048 + 12.8)]


def test_a_calibration_times_each_form_of_a_product():
    """On the smallest memory, too, and with the operations and bytes of what is called."""
    cases = [case for case in local_cases("cpu", 1) if (case.kind, case.dtype) == ("product", "float32")]
    assert len(cases) == len(FORMS["cpu"])
    for case in cases:
        x, y = case.once.args
        assert case.x == 2.0 * x.numel() * y.shape[-1]
        assert case.nbytes == x.nbytes + y.nbytes + case.once().nbytes
