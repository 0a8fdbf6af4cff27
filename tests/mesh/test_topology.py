"""Links are read off the ranks; costs are the ring's, in microseconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spmd.mesh import (
    AxisLink,
    DeviceMesh,
    MeshTopoInfo,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    as_rank,
    broadcast_cost,
    init_device_mesh,
    reduce_scatter_cost,
)

COSTS = [all_gather_cost, all_reduce_cost, all_to_all_cost, broadcast_cost, reduce_scatter_cost]
LINE = MeshTopoInfo((AxisLink(4, hop_us=0.5, gb_per_s=100.0),), base_latency_us=6.0)


def hosts(mesh: DeviceMesh, ranks_per_host: int | None = None) -> list[bool]:
    """For each axis, whether it stays inside a host."""
    return [link.gb_per_s == 87.7 for link in MeshTopoInfo.from_mesh(mesh, ranks_per_host).links]


@pytest.mark.parametrize(
    "mesh, ranks_per_host, inside",
    [
        (init_device_mesh("cpu", (2, 4)), None, [True, True]),
        (init_device_mesh("cpu", (2, 4)), 8, [True, True]),
        (init_device_mesh("cpu", (2, 4)), 4, [False, True]),
        (init_device_mesh("cpu", (2, 4)), 2, [False, False]),
        (init_device_mesh("cpu", (4, 2)), 2, [False, True]),
        # The sizes say 4 ranks on 4-rank hosts, the ranks say that every second one is elsewhere.
        (DeviceMesh("cpu", [[0, 4, 1, 5], [2, 6, 3, 7]]), 4, [True, False]),
        # One straddling group is enough.
        (DeviceMesh("cpu", [[0, 1], [3, 4]]), 4, [False, False]),
        (init_device_mesh("cpu", (8, 1)), 1, [False, True]),
    ],
)
def test_an_axis_is_inside_a_host_only_if_all_its_groups_are(
    mesh: DeviceMesh, ranks_per_host: int | None, inside: list[bool]
) -> None:
    assert hosts(mesh, ranks_per_host) == inside


def test_the_launcher_says_how_many_ranks_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mesh = init_device_mesh("cpu", (2, 4))
    assert hosts(mesh) == [False, True] and hosts(mesh, 8) == [True, True]
    assert mesh.topology == MeshTopoInfo.from_mesh(mesh, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(ValueError, match=r"\$LOCAL_WORLD_SIZE is 'many'"):
        hosts(mesh)
    with pytest.raises(ValueError, match="ranks_per_host is 0"):
        hosts(mesh, 0)


def test_a_slice_keeps_its_parents_links() -> None:
    """By itself the slice 0, 1 would be on one host; its sister 3, 4 is not, and plans must be the same on both."""
    mesh = DeviceMesh("cpu", [[0, 1], [3, 4]], mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, 4))
    with as_rank(0):
        assert mesh["tp"].topology == mesh.topology.take((1,)) != MeshTopoInfo.from_mesh(mesh["tp"], 4)
        assert mesh["tp", "dp"]["dp"].topology == mesh.topology.take((0,))


def test_the_textbook_numbers() -> None:
    inside, outside = MeshTopoInfo.textbook((8, 2), intra_host=(True, False)).links
    assert inside == AxisLink(8, hop_us=0.6, gb_per_s=87.7)
    assert outside == AxisLink(2, hop_us=2.7, gb_per_s=19.294)
    assert MeshTopoInfo.textbook((2,), (True,)).base_latency_us == 6.6


@pytest.mark.parametrize(
    "cost, us",
    [
        (all_gather_cost, 6.0 + 3 * 0.5 + 7.5),  # 750 kB at 100 GB/s are 7.5 us
        (reduce_scatter_cost, 6.0 + 3 * 0.5 + 7.5),
        (all_to_all_cost, 6.0 + 3 * 0.5 + 7.5),
        (all_reduce_cost, 6.0 + 6 * 0.5 + 15.0),
        (broadcast_cost, 6.0 + 3 * 0.5 + 10.0),
    ],
)
def test_a_megabyte_on_a_ring_of_four(cost: Callable, us: float) -> None:
    assert cost(1_000_000, 0, LINE) == pytest.approx(us)


@pytest.mark.parametrize("cost", COSTS)
def test_costs_grow_with_the_bytes_and_do_not_jump(cost: Callable) -> None:
    sizes = [0, 1, 2, 1000, 1 << 20, (1 << 20) + 1, 1 << 21, 1 << 30]
    costs = [cost(n, 0, LINE) for n in sizes]
    assert costs == sorted(set(costs))
    assert cost((1 << 20) + 1, 0, LINE) - cost(1 << 20, 0, LINE) < 1e-4


@pytest.mark.parametrize("cost", COSTS)
def test_one_rank_talks_for_free(cost: Callable) -> None:
    assert cost(1 << 30, 0, MeshTopoInfo.textbook((1, 4), (True, True))) == 0.0


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: AxisLink(0, 1.0, 1.0), ValueError, "size must be at least 1"),
        (lambda: AxisLink(2, 1.0, 0.0), ValueError, "gb_per_s more than 0"),
        (lambda: MeshTopoInfo((), base_latency_us=-1), ValueError, "base_latency_us is -1"),
        (lambda: MeshTopoInfo.textbook((2, 2), (True,)), ValueError, "2 sizes but 1 entries"),
        (lambda: LINE.link(1), IndexError, "axis 1 is not in a topology of 1 axes"),
        (lambda: all_gather_cost(-4, 0, LINE), ValueError, "cannot move"),
    ],
)
def test_a_mistake_is_named(make: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_topology_is_a_value() -> None:
    assert MeshTopoInfo(list(LINE.links), 6.0) == LINE and hash(MeshTopoInfo(list(LINE.links), 6.0)) == hash(LINE)
    assert eval(repr(LINE), {"MeshTopoInfo": MeshTopoInfo, "AxisLink": AxisLink}) == LINE
