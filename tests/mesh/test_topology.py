"""The places of ranks follow from the ranks; views of a mesh have the same groups."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spmd.mesh import (
    PRESETS,
    AxisLink,
    DeviceMesh,
    HostGrid,
    Link,
    Machine,
    Measured,
    MeshTopoInfo,
    Way,
    all_gather_cost,
    as_rank,
    init_device_mesh,
    topology,
)
from spmd.mesh.calibration import save
from spmd.mesh.layout import Ladder, Rung

LINE = MeshTopoInfo.by_hand([AxisLink(4, hop_us=0.5, gb_per_s=100.0)], base_latency_us=6.0)
ONE_CARD = Machine("one card", PRESETS["textbook"].ways, nics_per_host=1)
CUBE = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
CUBE = CUBE.with_topology(MeshTopoInfo.from_mesh(CUBE, ranks_per_host=8, machine=ONE_CARD))


def levels(mesh: DeviceMesh, ranks_per_host: int | None = None) -> list[str]:
    """For each axis, the levels of links that its groups cross."""
    topo = MeshTopoInfo.from_mesh(mesh, ranks_per_host)
    return [", ".join(map(short, topo.crossings(axis))) for axis in range(mesh.ndim)]


def short(ladder: Ladder) -> str:
    return "+".join(f"{('in', 'out')[rung.level]}{rung.size}" for rung in ladder)


@pytest.mark.parametrize(
    "mesh, ranks_per_host, crossed",
    [
        (init_device_mesh("cpu", (2, 4)), None, ["in2", "in4"]),
        (init_device_mesh("cpu", (2, 4)), 8, ["in2", "in4"]),
        (init_device_mesh("cpu", (2, 4)), 4, ["out2", "in4"]),
        (init_device_mesh("cpu", (2, 4)), 2, ["out2", "in2+out2"]),
        (init_device_mesh("cpu", (4, 2)), 4, ["in2+out2", "in2"]),
        (init_device_mesh("cpu", (8, 1)), 1, ["out8", ""]),
        # By the sizes, 4 ranks are on a host of 4; by the ranks, every second one is on another host.
        (DeviceMesh("cpu", [[0, 4, 1, 5], [2, 6, 3, 7]]), 4, ["in2", "in2+out2"]),
        # Groups that differ: one inside a host, one on two hosts.
        (DeviceMesh("cpu", [[0, 1], [3, 4]]), 4, ["in2, out2", "in2, out2"]),
        # Three ranks on one host and one on the next.
        (DeviceMesh("cpu", [1, 2, 3, 4]), 4, ["in3+out2"]),
    ],
)
def test_the_links_that_an_axis_crosses_follow_from_the_ranks(
    mesh: DeviceMesh, ranks_per_host: int | None, crossed: list[str]
) -> None:
    assert levels(mesh, ranks_per_host) == crossed


def test_hosts_can_be_given_for_each_rank() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2, 5])
    assert MeshTopoInfo.from_mesh(mesh, hosts=[7, 8, 7, 9, 9, 8]).layout == HostGrid((4,), "7 8 7 8")
    with pytest.raises(ValueError, match="hosts has 3 entries and the mesh has rank 5"):
        MeshTopoInfo.from_mesh(mesh, hosts=[0, 0, 1])


@pytest.mark.parametrize(
    "nics, senders, groups",
    [(None, 1, 1), (4, 1, 1), (2, 2, 2), (1, 4, 4)],
)
def test_ranks_that_share_a_card_are_counted(nics: int | None, senders: int, groups: int) -> None:
    """Two hosts of 4 ranks: each rank sends to its counterpart on the other host, all at the same time."""
    mesh, machine = init_device_mesh("cpu", (2, 4)), Machine("m", PRESETS["textbook"].ways, nics_per_host=nics)
    topo = MeshTopoInfo.from_mesh(mesh, 4, machine)
    assert topo.crossings(0) == ((Rung(1, 2, 1, 2, senders, groups),),)
    assert topo.crossings((0, 1)) == ((Rung(0, 4, 1, 4), Rung(1, 2, 4, 8, senders, 1)),)


def test_a_group_inside_a_host_sends_through_no_card() -> None:
    """Ranks 0, 1 and 2 have one card; along axis 1 only rank 2 leaves the host."""
    assert MeshTopoInfo(HostGrid((2, 2), "0.0*3 1.0")).crossings(1) == ((Rung(0, 2, 1, 2),), (Rung(1, 2, 1, 2, 1, 1),))


def test_some_ranks_of_a_job_have_the_cards_they_have_in_all_of_it() -> None:
    """Ranks 0 and 1 of 8 on a host with 4 cards share one, also where the other ranks are not in the mesh."""
    machine = Machine("m", PRESETS["textbook"].ways, nics_per_host=4)
    topo = MeshTopoInfo.from_mesh(DeviceMesh("cpu", [0, 1, 8, 9]), 8, machine)
    assert topo.layout == HostGrid((4,), "0.0*2 1.0*2")
    assert MeshTopoInfo.from_mesh(DeviceMesh("cpu", [0, 1, 8, 9]), machine=machine, hosts=[0] * 8 + [1] * 8) == topo


# Views


def test_a_slice_keeps_its_parents_links() -> None:
    """The slice 0, 1 is on one host, its sister 3, 4 is not; plans must be the same on both."""
    mesh = DeviceMesh("cpu", [[0, 1], [3, 4]], mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, 4))
    with as_rank(0):
        assert mesh["tp"].topology == mesh.topology.take((1,)) != MeshTopoInfo.from_mesh(mesh["tp"], 4)
        assert mesh["tp", "dp"]["dp"].topology == mesh.topology.take((0,))
    assert len({part.topology for part in mesh.slices("tp")}) == 1


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_views_of_one_set_of_groups_cross_the_same(axes: tuple[int, ...]) -> None:
    topo, names = CUBE.topology, tuple(CUBE.axis_names[i] for i in axes)
    crossed = topo.crossings(axes)
    turned = CUBE["tp", "pp", "dp"]
    padded = DeviceMesh("cpu", CUBE.mesh.reshape(2, 1, 2, 4, 1))
    padded = MeshTopoInfo.from_mesh(padded, 8, ONE_CARD)
    [flat] = [i for i, name in enumerate(CUBE.flatten("flat", axes=names).axis_names) if name == "flat"]
    with as_rank(5):
        assert CUBE[names].topology.crossings(tuple(range(len(axes)))) == crossed
        assert CUBE[names[::-1]].flatten().topology.crossings(0) == crossed
    assert turned.topology.crossings(tuple(turned.axis(name) for name in names)) == crossed
    assert padded.crossings(tuple((0, 2, 3)[i] for i in axes) + (1, 4)) == crossed
    assert CUBE.flatten("flat", axes=names).topology.crossings(flat) == crossed
    assert topo.crossings(tuple(i - 3 for i in reversed(axes))) == crossed


def test_a_view_is_a_view_of_a_view() -> None:
    turned = CUBE["tp", "pp", "dp"]
    assert turned["pp", "dp", "tp"] == CUBE and turned.topology != CUBE.topology
    assert turned == DeviceMesh("cpu", turned.mesh, mesh_dim_names=turned.mesh_dim_names).with_topology(
        MeshTopoInfo.from_mesh(turned, 8, ONE_CARD)
    )
    assert CUBE.topology.view([(1, 0), (2,)]).take((1, 0)) == CUBE.topology.view([(2,), (1, 0)])


def test_sisters_have_no_order() -> None:
    assert HostGrid((2, 2), "0 1 0 2").view([(1,)]) == HostGrid((2, 2), "0 2 0 1").view([(1,)])


def test_links_by_hand_are_sliced_and_joined_too() -> None:
    fast, slow = AxisLink(4, 0.6, 90.0), AxisLink(2, 2.7, 20.0)
    topo = MeshTopoInfo.by_hand([slow, fast])
    assert topo.take((1,)) == MeshTopoInfo.by_hand([fast])
    assert topo.view([(0, 1)]) == MeshTopoInfo.by_hand([(slow, fast)]) and topo.view([(0, 1)]).sizes == (8,)
    assert topo.crossings((0, 1)) == ((Rung(0, 4, 1, 4), Rung(1, 2, 4, 8)),) == topo.view([(0, 1)]).crossings(0)
    # Equal links are one level: one ring, not a ring of rings.
    assert MeshTopoInfo.by_hand([fast, fast]).crossings((0, 1)) == ((Rung(0, 16, 1, 16),),)


def test_groups_inside_a_host_need_no_places() -> None:
    """So a slice inside a host equals a mesh that was built directly."""
    with as_rank(5):
        assert CUBE["tp"] == DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("tp",), topology=ONE_CARD)


# The sources of a topology


def test_the_launcher_gives_the_number_of_ranks_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mesh = init_device_mesh("cpu", (2, 4))
    assert levels(mesh) == ["out2", "in4"] and levels(mesh, 8) == ["in2", "in4"]
    assert mesh.topology == MeshTopoInfo.from_mesh(mesh, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(ValueError, match=r"\$LOCAL_WORLD_SIZE is 'many'"):
        levels(mesh)
    with pytest.raises(ValueError, match="ranks_per_host is 0"):
        levels(mesh, 0)


def test_hosts_with_unequal_numbers_of_ranks_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each host would take the others for like itself, and plan by a topology of its own."""
    here = HostGrid((6,), "0*4 1*2")
    for count in ("4", "2"):
        for name, value in {"WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": count}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"6 ranks on 2 hosts, {count} of them here: from that no rank can tell"):
            init_device_mesh("cpu", (6,))
        assert init_device_mesh("cpu", (6,), topology=MeshTopoInfo(here)).topology.layout == here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert init_device_mesh("cpu", (6,)).topology.layout == HostGrid((6,), "0*3 1*3")


def test_the_first_source_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An argument, a file, the environment, the textbook."""
    path = tmp_path / "machine.json"
    save(Machine("mine", PRESETS["hopper"].ways, ranks_per_host=2), path)
    mesh = init_device_mesh("cpu", (4,))
    assert mesh.topology == MeshTopoInfo(HostGrid((4,)), "textbook")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("SPMD_TOPOLOGY", "ampere")
    assert init_device_mesh("cpu", (4,)).topology == MeshTopoInfo(HostGrid((4,), "0 1 2 3"), "ampere")
    monkeypatch.setenv("SPMD_TOPOLOGY", str(path))
    found = init_device_mesh("cpu", (4,)).topology
    assert (found.machine.name, found.layout) == ("mine", HostGrid((4,), "0*2 1*2"))
    assert init_device_mesh("cpu", (4,), topology="blackwell").topology.machine == PRESETS["blackwell"]
    assert init_device_mesh("cpu", (4,), topology=str(path)).topology == found
    assert init_device_mesh("cpu", (4,), topology=LINE).topology is LINE
    monkeypatch.setenv("SPMD_TOPOLOGY", "hoper")
    with pytest.raises(ValueError, match=r"\$SPMD_TOPOLOGY is 'hoper', which is no file and none of textbook, ampere"):
        init_device_mesh("cpu", (4,))


# A value


@pytest.mark.parametrize(
    "topo",
    [
        LINE,
        MeshTopoInfo(HostGrid((2, 4))),
        CUBE.topology,
        CUBE.topology.take((2, 0)),
        MeshTopoInfo(HostGrid((3,), "0 1.2*2"), "blackwell"),
        MeshTopoInfo.by_hand([(AxisLink(2, 2.7, 20.0), AxisLink(4, 0.6, 90.0)), AxisLink(1, 0.1, 1.0)]),
    ],
)
def test_a_topology_can_be_printed_pickled_and_hashed(topo: MeshTopoInfo) -> None:
    names = {kind.__name__: kind for kind in (*topology.PARTS, AxisLink)}
    assert eval(repr(topo), names) == topo
    again = pickle.loads(pickle.dumps(topo))
    assert again == topo and hash(again) == hash(topo) and repr(again) == repr(topo)
    all_gather_cost(1, 0, topo)
    assert pickle.loads(pickle.dumps(topo)) == again == topo  # prices are not pickled


def test_a_topology_is_loaded_with_weights_only(tmp_path: Path) -> None:
    """`torch.load` then reads nothing but numbers and registered classes."""
    curve = Measured("all_reduce", 4, 1, ((1.0, 2.0),))
    topo = MeshTopoInfo(HostGrid((2,), "0.0 1"), Machine("m", PRESETS["hopper"].ways, measured=(curve,)))
    torch.save([topo, LINE], tmp_path / "topo.pt")
    torch.serialization.add_safe_globals(list(topology.PARTS))  # as importing spmd does
    assert torch.load(tmp_path / "topo.pt", weights_only=True) == [topo, LINE]


@pytest.mark.parametrize(
    "other",
    [
        MeshTopoInfo(HostGrid((2, 4)), "hopper"),
        MeshTopoInfo(HostGrid((4, 2))),
        MeshTopoInfo(HostGrid((2, 4), "0*4 1*4")),
        MeshTopoInfo(HostGrid((2, 4), "0*2 1*6")),
        MeshTopoInfo(HostGrid((2, 4), "0.0*4 1.0*4")),
        "a topology",
    ],
)
def test_any_difference_makes_another_topology(other: object) -> None:
    assert other != MeshTopoInfo(HostGrid((2, 4)))
    assert MeshTopoInfo(HostGrid((2, 4), "0*3 1*5")) != other


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_pickled_topology_is_found_under_another_hash_seed(seed: str) -> None:
    code = (
        "import pickle, sys; from spmd.mesh import HostGrid, MeshTopoInfo; "
        "print(pickle.load(sys.stdin.buffer) in {MeshTopoInfo(HostGrid((2, 2), '0*2 1*2'), 'hopper')})"
    )
    sent = pickle.dumps(MeshTopoInfo(HostGrid((2, 2), "0*2 1*2"), "hopper"))
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, env=env)
    assert done.stdout.decode().strip() == "True", done.stderr.decode()


ONE_LEVEL = Machine("one host", (Way("ring", 1.0, (Link(0.1, 10.0),)),))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: AxisLink(0, 1.0, 1.0), ValueError, "size must be at least 1"),
        (lambda: AxisLink(2, 1.0, 0.0), ValueError, "gb_per_s more than 0"),
        (lambda: MeshTopoInfo.by_hand([AxisLink(2, 1.0, 1.0)], -1), ValueError, "base_us of ring is -1"),
        (lambda: MeshTopoInfo.by_hand([]), ValueError, "one AxisLink or more"),
        (lambda: MeshTopoInfo.textbook((2, 2), (True,)), ValueError, "2 sizes but 1 entries"),
        (lambda: LINE.crossings(1), IndexError, "axis 1 is not in a topology of 1 axes"),
        (lambda: LINE.crossings("tp"), IndexError, "use mesh.axis"),
        (lambda: LINE.crossings((0, -1)), ValueError, "each may appear once"),
        (lambda: MeshTopoInfo(HostGrid((2,), "0 1"), ONE_LEVEL), ValueError, "knows links inside a host only"),
        (lambda: HostGrid((2, 2), "0 1"), ValueError, r"2 places for a mesh of shape \(2, 2\)"),
        (lambda: HostGrid((2,), "0 x1"), ValueError, "'x1' is no place; write host, host.card"),
    ],
)
def test_a_mistake_is_named(make: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
