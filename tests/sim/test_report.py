"""Reports of what was sent: exact bytes, time by the cost model, a table, and a timeline that other tools read."""

from __future__ import annotations

import json

import pytest
import torch

from spmd.comm import all_gather_tensor, all_reduce, all_to_all_single, broadcast, reduce_scatter_tensor, transport
from spmd.mesh import AxisLink, DeviceMesh, HostGrid, MeshTopoInfo, cost, init_device_mesh
from spmd.sim import LocalTensorMode, ThreadWorld, per_rank
from spmd.sim.local_transport import Sent
from spmd.sim.report import report

MESH = init_device_mesh("cpu", (4,))
X = 400  # bytes of 100 floats


def played(fn):
    """The report of fn(x), x 100 floats on each of four ranks."""
    with LocalTensorMode(4) as mode:
        fn(torch.ones(100))
    return mode.report()


# (a collective of four ranks with 400 bytes each, bytes sent by each, modelled time)
COLLECTIVES = {
    "all_reduce": (lambda x: all_reduce(x, "sum", MESH), [600] * 4, cost.all_reduce_cost(X, 0, MESH.topology)),
    "all_gather": (lambda x: all_gather_tensor(x, 0, MESH), [1200] * 4, cost.all_gather_cost(4 * X, 0, MESH.topology)),
    "reduce_scatter": (
        lambda x: reduce_scatter_tensor(x, "sum", 0, MESH), [300] * 4, cost.reduce_scatter_cost(X, 0, MESH.topology)
    ),
    "all_to_all": (
        lambda x: all_to_all_single(x, [25] * 4, [25] * 4, MESH), [300] * 4, cost.all_to_all_cost(X, 0, MESH.topology)
    ),
    "broadcast": (lambda x: broadcast(x, 1, MESH), [0, 400, 400, 400], cost.broadcast_cost(X, 0, MESH.topology)),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_has_its_bytes_and_its_cost(name):
    """The bytes each rank is given, the bytes that leave it, and the time of the cost model for the same mesh axis."""
    fn, sent, us = COLLECTIVES[name]
    found = played(fn)
    assert [found.given(rank) for rank in range(4)] == [X] * 4
    assert [found.sent(rank) for rank in range(4)] == sent
    assert found.us == pytest.approx(us)
    assert not found.unmodelled


def test_an_uneven_all_to_all_counts_what_goes_to_others():
    """Rank 0 sends 0 1 2 3 rows to ranks 0 1 2 3, rank 1 sends 1 2 3 0, and so on."""
    rows = [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]

    @per_rank
    def splits(rank):
        return tuple(row[rank] for row in rows), tuple(rows[rank])

    with LocalTensorMode(4) as mode:
        came, sent = splits(MESH.get_local_rank())
        transport().all_to_all_single(torch.ones(6, 5), came, sent, transport().group(MESH, 0))
    found = mode.report()
    row = 5 * 4
    assert [found.sent(rank) for rank in range(4)] == [6 * row, 4 * row, 6 * row, 4 * row]
    assert found.us == pytest.approx(cost.exchange_cost([6 * row, 4 * row, 6 * row, 4 * row], 0, MESH.topology))


TOPOLOGIES = {
    "one host": None,
    "two hosts": MeshTopoInfo(HostGrid((2, 4), "0*4 1*4")),
    "hosts across rows": MeshTopoInfo(HostGrid((2, 4), "0*2 1*2 0*2 1*2")),
    "shared cards": MeshTopoInfo(HostGrid((2, 4), "0.0*2 0.1*2 1.0*2 1.1*2"), "hopper"),
    "by hand": MeshTopoInfo.by_hand([AxisLink(2, 2.7, 20.0), AxisLink(4, 0.6, 90.0)]),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("where", TOPOLOGIES)
def test_links_are_those_of_the_mesh(where, axis):
    """A collective along an axis is priced as the planner prices it; groups that run at once share their links."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(TOPOLOGIES[where]) if TOPOLOGIES[where] else mesh
    with LocalTensorMode(8) as mode:
        all_reduce(torch.ones(1000), "sum", (mesh, axis))
    assert mode.report(mesh).us == pytest.approx(cost.all_reduce_cost(4000, axis, mesh.topology))


def parts(step, kind, group, nbytes=400, args=()):
    return [Sent(step, rank, kind, group, nbytes, "train.py:1", args) for rank in group]


def test_a_collective_starts_when_the_last_rank_arrives():
    """Ranks 0 and 1 communicate twice, then all four ranks do; ranks 2 and 3 wait for them."""
    pair = [Sent(n, rank, "all_reduce", (0, 1), 8, "a.py:1") for n in (0, 1) for rank in (0, 1)]
    found = report([*pair, *parts(2, "all_reduce", (0, 1, 2, 3))], (0, 1, 2, 3))
    first, second, last = found.events
    assert (first.start_us, second.start_us, last.start_us) == (0, first.us, first.us + second.us)
    assert found.us == last.start_us + last.us


def test_groups_that_do_not_meet_run_side_by_side():
    """The clock of ranks 2 and 3 does not depend on ranks 0 and 1."""
    found = report([*parts(0, "all_reduce", (0, 1)), *parts(1, "all_reduce", (2, 3))], (0, 1, 2, 3))
    assert [event.start_us for event in found.events] == [0, 0]


ROOTED = {
    "reduce": (("sum", 2), [400, 400, 0, 400]),
    "gather": ((2,), [400, 400, 0, 400]),
    "scatter": ((2,), [0, 0, 300, 0]),
    "barrier": ((), [0, 0, 0, 0]),
}


@pytest.mark.parametrize("kind", ROOTED)
def test_collectives_with_a_root(kind):
    """The root, here at place 2, does not send what it keeps."""
    args, sent = ROOTED[kind]
    found = report(parts(0, kind, (0, 1, 2, 3), args=args), (0, 1, 2, 3))
    assert [found.sent(rank) for rank in range(4)] == sent
    assert found.us > 0 and not found.unmodelled


def test_a_message_has_one_side_that_gives():
    """The receiving rank takes part and waits, but sends nothing."""
    found = report([Sent(0, 2, "send", (0, 1, 2, 3), 400, "train.py:1", (3,))], (0, 1, 2, 3))
    assert found.events[0].group == (2, 3)
    assert [found.sent(rank) for rank in range(4)] == [0, 0, 400, 0]
    assert found.us == pytest.approx(cost.permute_cost(400, 0, init_device_mesh("cpu", (2,)).topology))


def test_an_unknown_kind_is_taken_as_sent_once_and_named():
    """A report names the collectives without a model and does not fail."""
    found = report(parts(0, "gossip", (0, 1)), (0, 1))
    assert found.sent(0) == 400 and found.unmodelled == ("gossip",)
    assert "without a model, taken as sent once: gossip" in str(found)


def test_a_group_of_one_costs_nothing():
    """A group of one rank sends nothing."""
    found = report(parts(0, "all_reduce", (0,)), (0,))
    assert (found.sent(0), found.us) == (0, 0)


def test_a_mesh_that_lacks_ranks_is_refused():
    """The links of ranks outside of the mesh are unknown."""
    with pytest.raises(ValueError, match="give a mesh of all ranks"):
        report(parts(0, "all_reduce", (0, 5)), tuple(range(6)), DeviceMesh("cpu", [0, 1]))


def test_the_table():
    """A line for each place, kind and group shape; then totals; then the clock."""
    sent = [
        *parts(0, "all_reduce", (0, 1)), *parts(0, "all_reduce", (2, 3)),
        *(Sent(1, rank, "all_reduce", group, 4000, "train.py:2") for group in ((0, 1), (2, 3)) for rank in group),
        *parts(2, "all_gather_into_tensor", (0, 1, 2, 3)),
    ]  # fmt: skip
    assert str(report(sent, (0, 1, 2, 3))) == """\
where       collective              groups  calls   given    sent    us
train.py:1  all_reduce              2 x 2       1   400 B   400 B   7.8
train.py:2  all_reduce              2 x 2       1    4 kB    4 kB   7.8
train.py:1  all_gather_into_tensor  1 x 4       1   400 B  1.2 kB   8.4
all         all_reduce              2 x 2       2  4.4 kB  4.4 kB  15.7
all         all_gather_into_tensor  1 x 4       1   400 B  1.2 kB   8.4
3 collectives, at most 5.6 kB sent by a rank, 24.1 us modelled"""


def test_nothing_sent_is_one_line():
    """Without collectives no table is printed."""
    assert str(report([], (0, 1))) == "0 collectives, at most 0 B sent by a rank, 0.0 us modelled"


def test_the_timeline_is_a_chrome_trace(tmp_path):
    """Complete events in microseconds, one named track a rank, none of them overlapping."""
    found = played(lambda x: all_reduce(all_reduce(x, "sum", MESH), "max", MESH))
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    for rank in range(4):
        track = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        assert [e["name"] for e in track] == ["all_reduce"] * 2
        assert track[0]["ts"] == 0 and track[1]["ts"] == track[0]["dur"] > 0
        assert track[0]["args"]["sent"] == 600 and track[0]["args"]["group"] == [0, 1, 2, 3]


def test_threads_send_the_same_as_one_thread():
    """The same program, played rank by rank: the same bytes, time and groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def program(rank=None):
        t, x = transport(), torch.ones(100)
        for axis in ("dp", "tp", "dp"):
            x = t.wait_tensor(t.all_reduce(x, "sum", t.group(mesh, axis)))

    with LocalTensorMode(4) as mode:
        program()
    world = ThreadWorld(4)
    world.run(program)
    ours, theirs = mode.report(mesh), world.report(mesh)
    assert [(e.kind, e.group, e.sent, e.us) for e in ours.events] == [
        (e.kind, e.group, e.sent, e.us) for e in theirs.events
    ]
    assert ours.us == theirs.us
