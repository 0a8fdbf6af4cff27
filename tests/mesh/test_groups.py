"""Process groups by their ranks: names that list them, groups made at first use, errors instead of hangs."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from workers import Pool

from spmd import _torch
from spmd.mesh import DeviceMesh, groups, init_device_mesh

OPS = torch.ops._c10d_functional


@given(st.lists(st.integers(0, 40), min_size=1, unique=True).map(tuple))
def test_a_name_lists_its_ranks(ranks: tuple[int, ...]) -> None:
    assert groups.ranks_in(groups.name_of(ranks)) == ranks


@pytest.mark.parametrize(
    "ranks, name",
    [
        ((7,), "ranks:7"),
        ((0, 1), "ranks:0,1"),
        (tuple(range(1024)), "ranks:0-1023"),
        (tuple(range(3, 1024, 8)), "ranks:3-1019:8"),
        ((3, 2, 1, 0), "ranks:3,2,1,0"),
        ((9, 0, 1, 2, 4, 6, 8), "ranks:9,0-2,4-8:2"),
    ],
)
def test_names_of_regular_groups_are_short(ranks: tuple[int, ...], name: str) -> None:
    assert groups.name_of(ranks) == name


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0-", "0-3:0", "-1", "0-3:x", "0..3"])
def test_a_name_that_cannot_be_parsed_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="names no group"):
        groups.ranks_in("ranks:" + text)


def test_a_name_that_torch_made_lists_no_ranks() -> None:
    assert groups.ranks_in("0") is None


# On real processes


def ranks_of_groups(rank: int) -> dict[str, list[int]]:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    slices = {f"slice {name}": mesh[name].get_group() for name in ("tp", "dp")}
    axes = {name: mesh.get_group(name) for name in ("dp", "tp")}
    return {name: dist.get_process_group_ranks(group) for name, group in {**slices, **axes}.items()}


def test_the_place_in_a_group_is_the_place_on_the_axis(gloo4: Pool) -> None:
    """Also where ranks do not grow along an axis, and where a slice makes the group."""
    expected = {"dp": [[3, 0], [1, 2]], "tp": [[3, 1], [0, 2]]}
    for rank, found in enumerate(gloo4.run(ranks_of_groups)):
        for name, every in expected.items():
            assert found[name] == found[f"slice {name}"] == next(group for group in every if rank in group)


def reused_groups(rank: int) -> tuple[bool, ...]:
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 1, 2))
    line = init_device_mesh("cpu", (4,))
    single = other.get_group(1)
    return (
        one.get_group("tp") is other.get_group(2),
        line.get_group() is init_device_mesh("cpu", (4,)).get_group(),
        groups.group_of((0, 1, 2, 3)) is line.get_group(),
        dist.get_process_group_ranks(single) == [rank],
    )


def test_groups_of_the_same_ranks_are_made_once(gloo4: Pool) -> None:
    assert gloo4.run(reused_groups) == [(True, True, True, True)] * 4


def concurrency(rank: int) -> list:
    group = groups.group_of((2, 1, 3, 0))
    overlaps = [_torch.collectives_may_overlap(each) for each in (group, dist.group.WORLD)]
    return [dist.get_backend(group), *overlaps]


def test_groups_of_gloo_have_one_thread(gloo4: Pool) -> None:
    """By default torch gives them two, with which several all-gathers at once corrupt memory."""
    assert gloo4.run(concurrency) == [["gloo", True, False]] * 4


def groups_with_other_histories(rank: int) -> list:
    if rank in (1, 2):
        groups.group_of((1, 2))
    if rank == 0:
        groups.group_of((0,))
    group = groups.group_of((0, 1, 2)) if rank < 3 else None
    x = torch.tensor([rank])
    dist.all_reduce(x, group=group) if group else None
    mesh = DeviceMesh("cpu", [[1, 2], [3, 0]])
    return [x.item(), dist.get_process_group_ranks(mesh.get_group(1))]


def test_only_its_members_make_a_group(gloo4: Pool) -> None:
    """Other ranks need not come; members may have made other groups before, and different numbers of them."""
    assert gloo4.run(groups_with_other_histories) == [[3, [3, 0]], [3, [1, 2]], [3, [1, 2]], [3, [3, 0]]]


def traced_before(rank: int) -> list[float]:
    mine = (rank, (rank + 1) % 4) if rank in (0, 2) else ((rank - 1) % 4, rank)
    store = _torch.default_store()
    dist.destroy_process_group()
    name = groups.registered_name(mine)
    graph = make_fx(lambda x: OPS.wait_tensor(OPS.all_reduce(x, "sum", name)), tracing_mode="fake")(torch.ones(1))
    dist.init_process_group("gloo", store=dist.PrefixStore("after", store), rank=rank, world_size=4)
    first = graph(torch.tensor([float(rank)])).item()
    return [first, graph(torch.tensor([10.0 * rank])).item(), _torch.c10d._resolve_process_group(name).size()]


def test_a_graph_traced_before_there_was_a_process_group_runs_on_one(gloo4: Pool) -> None:
    assert gloo4.run(traced_before) == [[1, 10, 2], [1, 10, 2], [5, 50, 2], [5, 50, 2]]


def test_without_a_process_group_such_a_graph_raises() -> None:
    with pytest.raises(RuntimeError, match=r"before torch\.distributed is initialised"):
        OPS.all_reduce(torch.ones(1), "sum", groups.registered_name((0, 1)))


def too_large_a_mesh(rank: int) -> None:
    init_device_mesh("cpu", (8,)).get_group()


def another_ranks_group(rank: int) -> None:
    groups.group_of(((rank + 1) % 4,))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (too_large_a_mesh, "mentions rank 7, but the job has 4 ranks"),
        (another_ranks_group, r"rank \d is not in the group of ranks \[\d\]"),
    ],
)
def test_a_group_that_cannot_be_is_an_error_at_once(gloo4: Pool, wrong: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        gloo4.run(wrong)


def groups_in_two_orders(rank: int) -> str:
    mesh = DeviceMesh("cpu", [[2, 1], [0, 3]] if rank != 3 else [[3, 2], [1, 0]])
    said = "no error"
    try:
        mesh.get_group(0)
    except RuntimeError as error:
        said = str(error)
    return said


def test_other_meshes_on_other_ranks_are_an_error_and_no_hang(gloo4: Pool) -> None:
    """Rank 3 waits for rank 1 and rank 1 for rank 3: both raise, and so do the ranks that wait for them."""
    said = gloo4.run(groups_in_two_orders)
    gloo4.kill()  # after such an error a job ends
    assert all("Every rank must use the same meshes and groups in the same order" in text for text in said[1::2])
    assert "[1, 3]" in said[1] and "[3, 1]" in said[1]


def late_rank(rank: int) -> str:
    """Rank 2 never comes. Rank 0 is the last of the others, and the only one that soon gives up."""
    everybody, seconds = (3, 2, 1, 0), 0.2 if rank == 0 else 60
    while rank == 0 and any(groups._announced_by(other) != groups.name_of(everybody) for other in (1, 3)):
        pass
    try:
        with mock.patch.object(_torch, "group_timeout", lambda: timedelta(seconds=seconds)):
            return "none" if rank == 2 else str(groups.group_of(everybody))
    except (TimeoutError, RuntimeError) as error:  # the first rank to time out stops the others
        return str(error)


def test_a_rank_that_never_comes_is_named_at_the_timeout(gloo4: Pool) -> None:
    said = gloo4.run(late_rank)
    gloo4.kill()
    assert said[2] == "none"
    assert all("the others did not come: rank 2 makes none" in said[rank] for rank in (0, 1, 3))


def groups_made_anew(rank: int) -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2))
    store = _torch.default_store()
    before = dist.get_process_group_ranks(mesh.get_group(0))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=4)
    group = mesh.get_group(0)
    x = torch.tensor([rank])
    dist.all_reduce(x, group=group)
    return [before, dist.get_process_group_ranks(group), [x.item()]]


def test_groups_are_made_anew_after_destroy_and_init(gloo4: Pool) -> None:
    assert gloo4.run(groups_made_anew) == [
        [[0, 2], [0, 2], [2]], [[1, 3], [1, 3], [4]], [[0, 2], [0, 2], [2]], [[1, 3], [1, 3], [4]]
    ]  # fmt: skip


def overridden(rank: int) -> list:
    """The backends of the groups of a mesh, and what is said about another mesh that has them otherwise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": "fake"})
    found = [dist.get_backend(mesh.get_group(name)) for name in ("dp", "tp")]
    for said in ({1: "gloo"}, {0: "fake"}):
        with pytest.raises(ValueError, match="backend_override: ") as error:
            init_device_mesh("cpu", (2, 2), backend_override=said)
        found.append(str(error.value).split("ranks ")[1][:6])
    return found


def test_an_axis_has_the_backend_that_was_said(gloo4: Pool) -> None:
    """A group is one for all meshes, so two meshes may not say different things about it, nor after it was made."""
    found = gloo4.run(overridden)
    assert found == [["gloo", "fake", "[0, 1]", late] for late in ("[0, 2]", "[1, 3]") * 2]
    gloo4.kill()  # what was said stays said


@pytest.mark.parametrize(
    "said", [{"pp": "gloo"}, {2: "gloo"}, {"tp": "gloo", 1: "gloo"}, {0: ("gloo",)}, {0: (3, None)}]
)
def test_what_is_no_axis_or_no_backend_is_an_error(said: dict) -> None:
    with pytest.raises(ValueError, match="backend_override"):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=said)


def adopted(rank: int) -> list[bool]:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = []
    for mine in (pairs[rank % 2], dist.new_group([0, 1, 2, 3]), dist.group.WORLD):
        ranks = groups.adopt(mine)
        y = OPS.wait_tensor(OPS.all_reduce(torch.tensor([rank]), "sum", groups.registered_name(ranks)))
        is_used = _torch.group_named(groups.registered_name(ranks)) is mine is groups.group_of(ranks)
        found.append(is_used and y.item() == sum(ranks))
    return found


def test_an_adopted_group_is_the_one_used(gloo4: Pool) -> None:
    assert gloo4.run(adopted) == [[True] * 3] * 4
    gloo4.kill()  # the groups of these ranks stay adopted
