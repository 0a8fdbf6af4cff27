"""Costs, in microseconds: formulas worked out by hand, and laws that hold on any mesh and machine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations, permutations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.mesh import (
    PRESETS,
    AxisLink,
    HostGrid,
    Link,
    Machine,
    Measured,
    MeshTopoInfo,
    Way,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    broadcast_cost,
    copy_cost,
    exchange_cost,
    init_device_mesh,
    permute_cost,
    reduce_scatter_cost,
    scatter_cost,
    ways_cost,
)
from spmd.mesh.algorithms import STEPS
from spmd.mesh.machine import ALGORITHMS, COLLECTIVES

COSTS = {
    "all_gather": all_gather_cost,
    "all_reduce": all_reduce_cost,
    "all_to_all": all_to_all_cost,
    "broadcast": broadcast_cost,
    "permute": permute_cost,
    "reduce_scatter": reduce_scatter_cost,
    "scatter": scatter_cost,
}
MB = 1_000_000
LINE = MeshTopoInfo.by_hand([AxisLink(4, hop_us=0.5, gb_per_s=100.0)], base_latency_us=6.0)
# Inside a host 0.5 us a hop and 10 us a MB; between hosts 2 us and 50 us.
LINKS = (Link(0.5, 100.0), Link(2.0, 20.0))


def on_hosts(ways: str, places: str, sizes: tuple[int, ...], **more: object) -> MeshTopoInfo:
    return MeshTopoInfo(HostGrid(sizes, places), Machine("m", tuple(Way(w, 6.0, LINKS) for w in ways.split()), **more))


@pytest.mark.parametrize(
    "cost, us",
    [
        (all_gather_cost, 6.0 + 3 * 0.5 + 7.5),  # 750 kB at 100 GB/s are 7.5 us
        (reduce_scatter_cost, 6.0 + 3 * 0.5 + 7.5),
        (all_to_all_cost, 6.0 + 3 * 0.5 + 7.5),
        (all_reduce_cost, 6.0 + 6 * 0.5 + 15.0),
        (broadcast_cost, 6.0 + 3 * 0.5 + 10.0),
        (scatter_cost, 6.0 + 3 * 0.5 + 7.5),
        (permute_cost, 6.0 + 0.5 + 10.0),
    ],
)
def test_a_megabyte_on_a_ring_of_four(cost: Callable, us: float) -> None:
    assert cost(MB, 0, LINE) == pytest.approx(us)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, MB, 1 << 30])
@pytest.mark.parametrize("axis, n, hop, gb_per_s", [(0, 2, 2.7, 19.294), (1, 4, 0.6, 87.7)])
def test_the_textbook(axis: int, n: int, hop: float, gb_per_s: float, nbytes: int) -> None:
    """Rings only, with 6.6 us at the start; golden pages of plans are priced by it."""
    for topo in (MeshTopoInfo(HostGrid((2, 4), "0*4 1*4")), MeshTopoInfo.textbook((2, 4), (False, True))):
        part = nbytes * (n - 1) / n / gb_per_s * 1e-3
        for cost in (all_gather_cost, reduce_scatter_cost, all_to_all_cost):
            assert cost(nbytes, axis, topo) == pytest.approx(6.6 + (n - 1) * hop + part, rel=1e-14)
        assert all_reduce_cost(nbytes, axis, topo) == pytest.approx(6.6 + 2 * (n - 1) * hop + 2 * part, rel=1e-14)
        whole = nbytes / gb_per_s * 1e-3
        assert broadcast_cost(nbytes, axis, topo) == pytest.approx(6.6 + (n - 1) * hop + whole, rel=1e-14)


@pytest.mark.parametrize(
    "collective, way, us",
    [
        # 2 hosts of 4: inside 3 hops, or 2 doublings; between hosts 1 hop.
        ("all_gather", "ring", 6 + 3 * 0.5 + 2 + 0.75 * 10 + 1 / 2 / 4 * 50),
        ("all_gather", "doubling", 6 + 2 * 0.5 + 2 + 0.75 * 10 + 1 / 2 / 4 * 50),
        ("reduce_scatter", "ring", 6 + 3 * 0.5 + 2 + 0.75 * 10 + 1 / 2 / 4 * 50),
        ("all_reduce", "ring", 6 + 2 * (3 * 0.5 + 2 + 0.75 * 10 + 1 / 2 / 4 * 50)),
        ("all_reduce", "doubling", 6 + 2 * (2 * 0.5 + 2 + 0.75 * 10 + 1 / 2 / 4 * 50)),
        ("all_reduce", "tree", 6 + 2 * (3 * 0.5 + 2) + 2 * 10 + 2 / 4 * 50),
        ("all_to_all", "ring", 6 + 3 * 0.5 + 2 + 3 / 4 * 10 + 1 / 2 * 50),  # host by host, then rank by rank
        ("all_to_all", "direct", 6 + 3 * 0.5 + 4 * 2 + 3 / 8 * 10 + 4 / 8 * 50),
        ("all_to_all", "doubling", 6 + 2 * 0.5 + 2 + 2 / 2 * 10 + 1 / 2 * 50),
        ("broadcast", "ring", 6 + 3 * 0.5 + 2 + 10 + 1 / 4 * 50),
        ("broadcast", "doubling", 6 + 2 * 0.5 + 2 + 2 * 10 + 1 / 4 * 50),
        ("scatter", "direct", 6 + 3 * 0.5 + 4 * 2 + 3 / 8 * 10 + 4 / 8 * 50),
        ("permute", "ring", 6 + 2 + 50),
    ],
)
def test_a_megabyte_on_two_hosts_of_four(collective: str, way: str, us: float) -> None:
    """Bytes count on the links that carry them: a quarter of those of a gather crosses between hosts on each card."""
    topo = on_hosts("ring tree direct doubling", "0*4 1*4", (8,))
    assert ways_cost(collective, MB, 0, topo)[way] == pytest.approx(us)
    assert COSTS[collective](MB, 0, topo) == min(ways_cost(collective, MB, 0, topo).values())


@pytest.mark.parametrize(
    "collective, sharing",
    [("all_gather", 4), ("reduce_scatter", 4), ("all_reduce", 4), ("all_to_all", 4), ("permute", 4), ("scatter", 1)],
)
def test_ranks_that_share_a_card_wait(collective: str, sharing: int) -> None:
    """Eight ranks on two hosts, as one group. With one card on each host, bytes between hosts take four times as long,
    except those of a scatter, which one rank sends."""
    own, shared = (on_hosts("ring", places, (8,)) for places in ("0*4 1*4", "0.0*4 1.0*4"))
    cost = COSTS[collective]
    between = {"all_gather": 6.25, "reduce_scatter": 6.25, "all_reduce": 12.5, "permute": 50}.get(collective, 25)
    assert cost(MB, 0, shared) - cost(MB, 0, own) == pytest.approx((sharing - 1) * between)
    assert cost(0, 0, shared) == cost(0, 0, own)


@pytest.mark.parametrize("cost", COSTS.values())
def test_groups_that_send_at_once_share_a_card(cost: Callable) -> None:
    """Axis 0 has four groups between the hosts; a mesh with one of them alone has the card to itself."""
    all_four, alone = on_hosts("ring", "0.0*4 1.0*4", (2, 4)), on_hosts("ring", "0.0 1.0", (2,))
    latency = cost(0, 0, alone)
    assert cost(MB, 0, all_four) - latency == pytest.approx(4 * (cost(MB, 0, alone) - latency))
    assert cost(MB, 0, all_four.take((0,))) == cost(MB, 0, all_four)


@pytest.mark.parametrize("cost", COSTS.values())
def test_the_slowest_group_counts(cost: Callable) -> None:
    """Ranks 0, 1 are on one host, 2, 3 on two."""
    assert cost(MB, 1, on_hosts("ring", "0 0 0 1", (2, 2))) == cost(MB, 0, on_hosts("ring", "0 1", (2,)))


def test_a_host_with_few_of_the_ranks_is_the_bottleneck() -> None:
    """Three ranks on one host, one on the next: this one receives all bytes of the others."""
    assert all_gather_cost(MB, 0, on_hosts("ring", "0*3 1", (4,))) == pytest.approx(
        6 + 2 * 0.5 + 2 + 2 / 3 * 10 + 1 / 2 * 50
    )


def test_an_exchange_waits_for_the_rank_with_most_bytes() -> None:
    topo = on_hosts("ring", "0*4", (4,))
    assert exchange_cost([0, 10, 750, 3], 0, topo) == all_to_all_cost(1000, 0, topo)
    assert exchange_cost([5], 0, on_hosts("ring", "0", (1,))) == 0.0
    with pytest.raises(ValueError, match="2 numbers of bytes for a group of 4 ranks"):
        exchange_cost([1, 2], 0, topo)
    with pytest.raises(ValueError, match="cannot move -1 bytes"):
        exchange_cost([1, 2, -1, 4], 0, topo)


def test_measured_times_replace_the_model() -> None:
    """A curve is for groups of its shape alone, and the maximum of its lines counts."""
    curve = Measured("all_reduce", ranks_per_host=4, hosts=1, lines=((30.0, 0.0), (20.0, 2e-5)))
    topo = on_hosts("ring", "0*4 1*4", (2, 4), measured=(curve,))
    bare = on_hosts("ring", "0*4 1*4", (2, 4))
    assert [all_reduce_cost(x, 1, topo) for x in (0, 500_000, MB)] == pytest.approx([30.0, 30.0, 40.0])
    for axes in (0, (0, 1)):
        assert all_reduce_cost(MB, axes, topo) == all_reduce_cost(MB, axes, bare)
    assert all_gather_cost(MB, 1, topo) == all_gather_cost(MB, 1, bare)
    across = Measured("all_reduce", ranks_per_host=4, hosts=2, sharing=4, lines=((99.0, 0.0),))
    shared, own = ("0.0*4 1.0*4", "0*4 1*4")
    assert all_reduce_cost(MB, 0, on_hosts("ring", shared, (8,), measured=(across,))) == 99.0
    assert all_reduce_cost(MB, 0, on_hosts("ring", own, (8,), measured=(across,))) != 99.0
    pair = Measured("all_reduce", ranks_per_host=1, hosts=2, lines=((99.0, 0.0),))
    assert all_reduce_cost(MB, 0, on_hosts("ring", "0 1", (2,), measured=(pair,))) == 99.0
    assert all_reduce_cost(MB, 0, on_hosts("ring", "0*3 1", (4,), measured=(pair,))) != 99.0


def test_a_copy_takes_the_time_of_the_memory_or_the_measured_time() -> None:
    """A rank copies alone, so the time is the same on any mesh; the maximum of the measured lines counts."""
    known = on_hosts("ring", "0*4 1*4", (2, 4), memory=Link(2.0, 866.6))
    assert copy_cost(MB, known) == copy_cost(MB, known.view([(0, 1)])) == pytest.approx(2 + 1e6 / 866.6e3)
    assert copy_cost(MB, LINE) == 0.0  # its memory is not known
    curve = Measured("copy", 1, 1, ((5.0, 0.0), (1.0, 1e-5)))
    measured = on_hosts("ring", "0*4 1*4", (2, 4), measured=(curve,))
    assert [copy_cost(x, measured) for x in (0, 400_000, MB)] == pytest.approx([5.0, 5.0, 11.0])
    with pytest.raises(ValueError, match="cannot move -1 bytes"):
        copy_cost(-1, LINE)


@pytest.mark.parametrize("cost", COSTS.values())
def test_a_group_of_one_rank_costs_nothing(cost: Callable) -> None:
    for topo in (MeshTopoInfo.textbook((1, 4), (True, True)), MeshTopoInfo(HostGrid((1, 2), "0 1"), "hopper")):
        assert cost(1 << 30, 0, topo) == cost(1 << 30, (), topo) == 0.0
        assert cost(1 << 30, (0, 1), topo) == cost(1 << 30, 1, topo) > 0.0


@pytest.mark.parametrize("nbytes", [-4, float("nan")])
def test_a_mistake_is_named(nbytes: float) -> None:
    with pytest.raises(ValueError, match="cannot move"):
        all_gather_cost(nbytes, 0, LINE)


def test_every_collective_has_a_ring_and_every_name_is_known() -> None:
    assert {(collective, "ring") for collective in COLLECTIVES} <= set(STEPS)
    assert {collective for collective, _ in STEPS} == set(COLLECTIVES) == set(COSTS)
    assert {algorithm for _, algorithm in STEPS} == set(ALGORITHMS)


# Laws


LINES = st.lists(st.tuples(st.floats(1, 1e3), st.floats(1e-6, 1e-2)), min_size=1, max_size=3)
FEW = st.integers(1, 2)
CURVES = st.builds(Measured, st.sampled_from(COLLECTIVES), st.integers(1, 4), FEW, LINES, FEW)


@st.composite
def topologies(draw: st.DrawFn, measured: bool = False) -> MeshTopoInfo:
    """Any mesh of up to 16 ranks, on any hosts, on a preset or a machine with shared cards; with `measured`, also with
    measured curves for some groups."""
    sizes = draw(st.sampled_from([(4,), (2, 4), (3, 2), (2, 1, 4), (2, 2, 2), (2, 2, 4)]))
    mesh = init_device_mesh("cpu", sizes)
    hosts = draw(st.lists(st.integers(0, 2), min_size=mesh.size(), max_size=mesh.size()))
    machine = draw(st.sampled_from(list(PRESETS.values())))
    curves = draw(st.lists(CURVES, max_size=20 if measured else 0, unique_by=lambda curve: curve.group))
    machine = Machine("drawn", machine.ways, draw(st.sampled_from([None, 1, 2])), measured=tuple(curves))
    return MeshTopoInfo.from_mesh(mesh, machine=machine, hosts=hosts)


def subsets(n: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(n), k) for k in range(1, n + 1)))


@settings(max_examples=60, deadline=None)
@given(topologies(measured=True), st.sampled_from(sorted(COSTS)), st.data())
def test_costs_grow_with_the_bytes_and_do_not_jump(topo: MeshTopoInfo, name: str, data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from(subsets(len(topo.sizes))))
    nbytes = data.draw(st.integers(0, 1 << 34))
    here, next_to_it = COSTS[name](nbytes, axes, topo), COSTS[name](nbytes + 1, axes, topo)
    crosses = any(topo.crossings(axes))
    assert here <= next_to_it <= here + 0.02 + 1e-9 * here
    assert (here > 0) == crosses
    far = COSTS[name](nbytes * 2 + 4096, axes, topo)
    assert not crosses or far > here


@settings(max_examples=60, deadline=None)
@given(topologies(measured=True), st.integers(0, 1 << 30), st.data())
def test_views_of_one_set_of_groups_price_alike(topo: MeshTopoInfo, nbytes: int, data: st.DataObject) -> None:
    n = len(topo.sizes)
    axes = data.draw(st.sampled_from(subsets(n)))
    order = data.draw(st.sampled_from(list(permutations(range(n)))))
    turned = topo.take(order)
    for cost in COSTS.values():
        us = cost(nbytes, axes, topo)
        assert cost(nbytes, tuple(order.index(axis) for axis in reversed(axes)), turned) == us
        assert cost(nbytes, tuple(range(len(axes))), topo.take(axes)) == us
        assert cost(nbytes, 0, topo.view([axes])) == us
        assert cost(nbytes, axes, MeshTopoInfo(HostGrid((*topo.sizes, 1), topo.layout.places), topo.machine)) == us


@settings(max_examples=40, deadline=None)
@given(topologies(), st.data())
def test_a_view_of_a_view(topo: MeshTopoInfo, data: st.DataObject) -> None:
    """Transposing there and back changes nothing; flattening at once is flattening in two steps."""
    n = len(topo.sizes)
    order = data.draw(st.sampled_from(list(permutations(range(n)))))
    assert topo.take(order).take([order.index(i) for i in range(n)]) == topo
    if n == 3:
        assert topo.view([order[:2], order[2:]]).view([(0, 1)]) == topo.view([order])


@settings(max_examples=40, deadline=None)
@given(topologies(), st.integers(0, 1 << 34), st.data())
def test_an_all_reduce_costs_no_more_than_its_two_halves(topo: MeshTopoInfo, nbytes: int, data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from(subsets(len(topo.sizes))))
    halves = reduce_scatter_cost(nbytes, axes, topo) + all_gather_cost(nbytes, axes, topo)
    assert all_reduce_cost(nbytes, axes, topo) <= halves * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(topologies(), st.integers(0, 1 << 34), st.data())
def test_no_detour_is_cheaper(topo: MeshTopoInfo, nbytes: int, data: st.DataObject) -> None:
    """The triangle inequality on one group of ranks: a detour by another layout, with free slices, saves nothing."""
    axes = data.draw(st.sampled_from(subsets(len(topo.sizes))))
    n = prod(topo.sizes[axis] for axis in axes)
    part, slack = nbytes / n, 1 + 1e-12
    reduced, gathered = all_reduce_cost(nbytes, axes, topo), all_gather_cost(nbytes, axes, topo)
    assert reduce_scatter_cost(nbytes, axes, topo) <= reduced * slack  # partial, replicated, shard
    assert all_to_all_cost(part, axes, topo) <= gathered * slack  # shard, replicated, another shard
    assert exchange_cost([part * (n - 1) / n] * n, axes, topo) <= gathered * slack
    assert permute_cost(part, axes, topo) <= gathered * slack


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("machine", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("nics", [None, 1, 2])
def test_axes_as_one_send_no_more_than_one_by_one(name: str, machine: Machine, nics: int | None) -> None:
    """Bytes, level by level; one long ring may have more hops than two short ones."""
    machine = Machine("m", machine.ways, nics)
    for hosts in (1, 2, 4):
        mesh = init_device_mesh("cpu", (2, 2, 4))
        topo = MeshTopoInfo.from_mesh(mesh, machine=machine, ranks_per_host=16 // hosts)
        for one, rest in (((0,), (1, 2)), ((2,), (0, 1)), ((0, 2), (1,))):
            second = {"all_to_all": 1, "all_reduce": 1}.get(name, 1 / prod(topo.sizes[axis] for axis in rest))
            merged = per_byte(name, 1, (*one, *rest), topo)
            assert merged <= (per_byte(name, second, one, topo) + per_byte(name, 1, rest, topo)) * (1 + 1e-9)


def per_byte(name: str, share: float, axes: tuple[int, ...], topo: MeshTopoInfo) -> float:
    """Microseconds for one more byte of the global tensor, for large messages."""
    return (COSTS[name](share * 2**50, axes, topo) - COSTS[name](share * 2**49, axes, topo)) / 2**49


def test_a_preset_is_near_measured_times() -> None:
    """An all-gather of 64 MiB over the 8 GPUs of an H100 host takes about 200 us; the textbook says 680."""
    hopper, textbook = (all_gather_cost(64 << 20, 0, MeshTopoInfo(HostGrid((8,)), n)) for n in ("hopper", "textbook"))
    assert 150 < hopper < 250 < 600 < textbook
    assert 6 < all_gather_cost(1024, 0, MeshTopoInfo(HostGrid((8,)), "hopper")) < 30


def test_small_messages_go_by_tree_between_many_hosts() -> None:
    """Latency dominates there; a ring takes as many hops as there are ranks."""
    topo = MeshTopoInfo(HostGrid((512,), " ".join(f"{host}*8" for host in range(64))), "hopper")
    ways = ways_cost("all_reduce", 1024, 0, topo)
    assert min(ways, key=ways.get) == "tree LL" and ways["tree LL"] < ways["ring LL"] / 2
    ways = ways_cost("all_reduce", 1 << 34, 0, topo)
    assert min(ways, key=ways.get) == "ring Simple"
