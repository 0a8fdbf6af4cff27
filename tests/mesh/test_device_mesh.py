"""A mesh is a value: built, compared, sliced and printed without a process group."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from workers import Pool

from spmd.mesh import (
    AxisLink,
    DeviceMesh,
    MeshTopoInfo,
    as_rank,
    current_rank,
    init_device_mesh,
    topology,
    world_size,
)

NAMED = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
PLAIN = init_device_mesh("cpu", (2, 3))
CUBE = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
BY_HAND = MeshTopoInfo.by_hand([AxisLink(2, 2.0, 20.0), AxisLink(3, 0.5, 90.0)])


def test_a_mesh_tells_its_shape_and_ranks() -> None:
    assert (NAMED.device_type, NAMED.shape, NAMED.ndim, NAMED.mesh_dim_names) == ("cpu", (2, 3), 2, ("dp", "tp"))
    assert (NAMED.size(), NAMED.size(0), NAMED.size("tp"), NAMED.size(-1)) == (6, 2, 3, 3)
    assert NAMED.mesh.dtype == torch.int64 and NAMED.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert NAMED.coordinates() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert PLAIN.axis_name(1) == "dim1" and PLAIN.axis("dim1") == 1 and PLAIN.mesh_dim_names is None


def test_a_mesh_can_be_made_of_a_tensor_or_lists() -> None:
    assert DeviceMesh("cpu", torch.arange(6).view(2, 3), mesh_dim_names=("dp", "tp")) == NAMED
    assert DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp")) == NAMED


def test_the_tensor_of_ranks_is_a_copy() -> None:
    NAMED.mesh.fill_(7)
    assert NAMED.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("rank, coordinate", list(enumerate(NAMED.coordinates())))
def test_a_rank_knows_its_place(rank: int, coordinate: tuple[int, int]) -> None:
    with as_rank(rank):
        assert NAMED.get_rank() == rank
        assert NAMED.get_coordinate() == NAMED.coordinate_of(rank) == coordinate
        assert (NAMED.get_local_rank("dp"), NAMED.get_local_rank(1)) == coordinate
    assert NAMED.rank_at(coordinate) == rank


def test_a_rank_outside_has_no_place() -> None:
    with as_rank(6):
        assert NAMED.get_coordinate() is None
        with pytest.raises(RuntimeError, match="rank 6 is not in DeviceMesh"):
            NAMED.get_local_rank("dp")
        with pytest.raises(RuntimeError, match="rank 6 is not in DeviceMesh"):
            NAMED["dp"]


@pytest.mark.parametrize(
    "axis, coordinate, ranks",
    [("pp", (0, 1, 1), (3, 7)), ("dp", (1, 0, 1), (5, 7)), ("tp", (1, 1, 0), (6, 7)), (-1, (0, 0, 1), (0, 1))],
)
def test_the_ranks_along_an_axis(axis: str | int, coordinate: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    assert CUBE.ranks_along(axis, coordinate) == ranks


def test_groups_are_listed_row_major_over_the_other_axes() -> None:
    assert CUBE.groups_along("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert CUBE.groups_along("pp", "tp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert CUBE.groups_along("tp", "pp") == [(0, 4, 1, 5), (2, 6, 3, 7)]


def test_a_mesh_contains_names_and_ranks() -> None:
    assert list(NAMED) == ["dp", "tp"] and list(PLAIN) == ["dim0", "dim1"]
    assert "dp" in NAMED and "pp" not in NAMED and 5 in NAMED and 6 not in NAMED


@pytest.mark.parametrize(
    "names, ranks",
    [
        ("tp", [4, 5]),
        ("pp", [1, 5]),
        ("dp", [5, 7]),
        (("pp", "tp"), [[0, 1], [4, 5]]),
        (("tp", "pp"), [[0, 4], [1, 5]]),
        (("tp", "pp", "dp"), [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
    ],
)
def test_a_slice_goes_through_the_current_rank(names: str | tuple[str, ...], ranks: list) -> None:
    with as_rank(5):
        part = CUBE[names]
    assert part.mesh.tolist() == ranks
    assert part.mesh_dim_names == ((names,) if isinstance(names, str) else names)


def test_slices_of_slices() -> None:
    with as_rank(0):
        assert CUBE["dp", "tp"]["tp"] == CUBE["tp"] == CUBE["tp", "pp"]["tp"]
    assert CUBE["pp", "dp", "tp"] is CUBE
    assert CUBE["tp", "dp", "pp"]["pp", "dp", "tp"] == CUBE


@pytest.mark.parametrize("names", [("tp",), ("pp",), ("dp", "pp"), ("tp", "pp", "dp")])
def test_all_slices_are_known_on_any_rank(names: tuple[str, ...]) -> None:
    """Also on a rank outside the mesh; the own slice of a rank is the slice that contains it."""
    with as_rank(99):
        parts = CUBE.slices(*names)
    assert sorted(rank for part in parts for rank in part.ranks) == list(range(8))
    for rank in range(8):
        with as_rank(rank):
            assert [CUBE[names]] == [part for part in parts if rank in part]


def test_ranks_outside_have_the_parts_that_all_ranks_share() -> None:
    padded = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    with as_rank(99):
        assert NAMED["tp", "dp"].mesh.tolist() == [[0, 3], [1, 4], [2, 5]]
        assert padded["tp", "dp"].mesh.tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    "name, axes, names, ranks",
    [
        (None, None, ("pp_dp_tp",), [0, 1, 2, 3, 4, 5, 6, 7]),
        ("all", None, ("all",), [0, 1, 2, 3, 4, 5, 6, 7]),
        (None, ("pp", "dp"), ("pp_dp", "tp"), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("x", ("dp", "tp"), ("pp", "x"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("x", ("pp", "tp"), ("x", "dp"), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("x", ("tp", "pp"), ("dp", "x"), [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("x", (-1,), ("pp", "dp", "x"), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    ],
)
def test_axes_are_flattened_into_one(name: str | None, axes: tuple | None, names: tuple, ranks: list) -> None:
    with as_rank(99):
        flat = CUBE.flatten(name, axes=axes)
    assert (flat.mesh_dim_names, flat.mesh.tolist()) == (names, ranks)


def test_a_mesh_without_names_is_flattened_without() -> None:
    assert PLAIN.flatten() == DeviceMesh("cpu", range(6)) and PLAIN.flatten("dp").mesh_dim_names == ("dp",)
    assert PLAIN.flatten(axes=(1, 0)) == DeviceMesh("cpu", [0, 3, 1, 4, 2, 5])


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4), st.data())
def test_a_flat_coordinate_is_the_coordinates_in_mixed_radix(sizes: list[int], data: st.DataObject) -> None:
    names = [f"a{i}" for i in range(len(sizes))]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    order = data.draw(st.permutations(range(len(sizes))))
    merged = order[: data.draw(st.integers(1, len(sizes)))]
    flat = mesh.flatten("flat", axes=merged)
    for rank in mesh.ranks:
        at, place = mesh.coordinate_of(rank), 0
        for axis in merged:
            place = place * sizes[axis] + at[axis]
        assert flat.coordinate_of(rank)[flat.axis("flat")] == place
        for axis in set(order) - set(merged):
            assert flat.coordinate_of(rank)[flat.axis(names[axis])] == at[axis]


@given(st.permutations(range(3)))
def test_transposed_and_back_is_the_same(order: list[int]) -> None:
    names = ("a", "b", "c")
    mesh = init_device_mesh("cpu", (2, 1, 3), mesh_dim_names=names)
    turned = mesh[tuple(names[i] for i in order)]
    assert turned.mesh.tolist() == mesh.mesh.permute(order).tolist()
    assert turned[names] == mesh and hash(turned[names]) == hash(mesh)


def test_equal_meshes_are_equal_by_content() -> None:
    again = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert again == NAMED and hash(again) == hash(NAMED) and len({again, NAMED}) == 1


def test_meshes_of_many_ranks_are_compared_without_a_look_at_these() -> None:
    """Each spec that is looked up compares its mesh."""
    mesh, again = init_device_mesh("cpu", (64, 64)), init_device_mesh("cpu", (64, 64))
    assert mesh.ranks is not again.ranks and mesh._content is again._content and mesh == again


@pytest.mark.parametrize(
    "other",
    [
        PLAIN,
        init_device_mesh("cuda", (2, 3), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 3), mesh_dim_names=("tp", "dp")),
        DeviceMesh("cpu", [[0, 1, 2], [3, 5, 4]], mesh_dim_names=("dp", "tp")),
        NAMED.with_topology(MeshTopoInfo.from_mesh(NAMED, ranks_per_host=3)),
        "a mesh",
    ],
)
def test_any_difference_makes_another_mesh(other: object) -> None:
    assert other != NAMED


@pytest.mark.parametrize(
    "mesh",
    [
        NAMED,
        PLAIN,
        CUBE,
        NAMED["tp", "dp"],
        CUBE.flatten(axes=("tp", "pp")),
        NAMED.with_topology("hopper"),
        NAMED.with_topology(MeshTopoInfo.from_mesh(NAMED, 3)),
        NAMED.with_topology(MeshTopoInfo.from_mesh(NAMED, 2, "ampere")).slices("dp")[1],
        NAMED.with_topology(BY_HAND),
        NAMED.with_topology(BY_HAND).flatten(),
        init_device_mesh("cpu", (32, 4), mesh_dim_names=("dp", "tp")),
    ],
)
def test_the_repr_can_be_pasted_back_and_a_pickle_is_equal(mesh: DeviceMesh) -> None:
    names = {kind.__name__: kind for kind in (DeviceMesh, AxisLink, init_device_mesh, *topology.PARTS)}
    assert eval(repr(mesh), names) == mesh
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh and hash(again) == hash(mesh) and again.topology == mesh.topology


def test_a_pickled_mesh_is_found_in_the_tables_of_another_process() -> None:
    """Strings hash differently there, so the pickle must not contain the hash."""
    code = (
        "import pickle, sys; from spmd.mesh import init_device_mesh; "
        "mesh = pickle.load(sys.stdin.buffer); "
        "print(mesh in {init_device_mesh('cpu', (2, 3), mesh_dim_names=('dp', 'tp'))})"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r}; "
    done = subprocess.run([sys.executable, "-c", path + code], input=pickle.dumps(NAMED), capture_output=True)
    assert done.stdout.decode().strip() == "True", done.stderr.decode()


def test_a_mesh_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="a DeviceMesh is a value"):
        NAMED.shape = (1,)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DeviceMesh("cpu", [[0, 1], [1, 2]]), r"ranks \[1\] appear twice"),
        (lambda: DeviceMesh("cpu", [-1, 0]), "rank -1 is negative"),
        (lambda: DeviceMesh("cpu", []), "at least one rank"),
        (lambda: DeviceMesh("cpu", 3), "at least one rank"),
        (lambda: DeviceMesh("cpu", [0.5, 1.5]), r"mesh is of torch\.float32: .*; ranks are integers"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "ranks as lists of lists, equally long"),
        (lambda: DeviceMesh("cuda:0", [0]), "device_type is 'cuda:0'; give a type without a number"),
        (lambda: DeviceMesh("cpu", [0], topology=[]), r"topology is \[\]; give a MeshTopoInfo"),
        (lambda: DeviceMesh("cpu", [0], topology="hoper"), "no file and none of .* Did you mean 'hopper'"),
        (lambda: init_device_mesh("cpu", ()), "at least one axis"),
        (lambda: init_device_mesh("cpu", (2, 0)), "each of at least 1 rank"),
        (lambda: init_device_mesh("cpu", (2, "2")), "each of at least 1 rank"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)), "1 for a mesh of 2 axes"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "")), "a text that is not empty"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp")), "each may appear once"),
        (lambda: DeviceMesh("cpu", [0, 1], topology=NAMED.topology), r"shape \(2, 3\), and this mesh has shape \(2,\)"),
        (lambda: NAMED.axis("dq"), "no axis 'dq' in a mesh with axes dp, tp. Did you mean 'dp'?"),
        (lambda: NAMED.axis(2), "no axis 2"),
        (lambda: NAMED["tp", "tp"], "each may appear once"),
        (lambda: NAMED["tp", "dq"], "no axis 'dq' .* Did you mean 'dp'"),
        (lambda: NAMED[0], r"cannot slice by 0; give the names of one axis or more, as in mesh\['tp', 'dp'\]"),
        (lambda: NAMED[()], r"cannot slice by \(\)"),
        (lambda: NAMED.slices(), r"cannot slice by \(\)"),
        (lambda: PLAIN["dp"], "give it mesh_dim_names"),
        (lambda: CUBE.flatten(axes=("dp", 1)), "give one or more, each once"),
        (lambda: CUBE.flatten(axes=()), "give one or more, each once"),
        (lambda: CUBE.flatten("pp", axes=("dp", "tp")), "each may appear once"),
        (lambda: CUBE.flatten("pp", axes=("dp", "zp")), "no axis 'zp'"),
        (lambda: init_device_mesh("cpu", (2, 2, 2)).flatten("x", axes=(0, 1)), "'x' would be the one name in a mesh"),
        (lambda: DeviceMesh.from_group(None, "cpu"), "from_group: None is no process group; give one ProcessGroup"),
        (lambda: DeviceMesh.from_group([], "cpu", []), "from_group: no group given"),
        (lambda: NAMED.get_local_rank(), "say which axis of dp, tp"),
        (lambda: NAMED.get_group(), "say which axis of dp, tp"),
        (lambda: NAMED.coordinate_of(9), "rank 9 is not in"),
    ],
)
def test_a_mistake_is_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_coordinate_outside_is_an_error() -> None:
    with pytest.raises(IndexError, match=r"no coordinate \(0, 3\)"):
        NAMED.ranks_along("tp", (0, 3))


def test_a_group_needs_an_initialised_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"before torch\.distributed is initialised"):
        NAMED.get_group("tp")


def test_the_environment_gives_the_rank_until_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (current_rank(), world_size()) == (5, 8)
    with as_rank(1):
        assert (current_rank(), world_size()) == (1, 8)
        with as_rank(2, world_size=4):
            assert (current_rank(), world_size()) == (2, 4)
        assert current_rank() == 1
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(ValueError, match=r"\$RANK is 'five'"):
        current_rank()
    with pytest.raises(ValueError, match="rank 4 is not in"), as_rank(4, world_size=4):
        pass


# On real processes: meshes over existing groups


def made(*groups_of_ranks: list[int]) -> dist.ProcessGroup:
    """The group of the current rank among these; all ranks make all of them, anew at every call."""
    every = [dist.new_group(ranks) for ranks in groups_of_ranks]
    return next(g for g, ranks in zip(every, groups_of_ranks, strict=True) if dist.get_rank() in ranks)


def summed(rank: int, group: dist.ProcessGroup) -> int:
    x = torch.tensor([1 << rank])
    dist.all_reduce(x, group=group)
    return x.item()


def mesh_of_groups(rank: int) -> tuple:
    tp, dp = made([0, 1], [2, 3]), made([0, 2], [1, 3])
    line = DeviceMesh.from_group(tp, "cpu", mesh_dim_names=("tp",))
    mesh = DeviceMesh.from_group([dp, tp], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    used = mesh.get_all_groups() == [dp, tp] and line.get_group() is tp and mesh["tp"].get_group("tp") is tp
    return used, line.ranks, mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), summed(rank, tp)


def test_a_mesh_of_groups_uses_them(gloo4: Pool) -> None:
    assert gloo4.run(mesh_of_groups) == [
        (True, (0, 1), True, 0b0011),
        (True, (0, 1), True, 0b0011),
        (True, (2, 3), True, 0b1100),
        (True, (2, 3), True, 0b1100),
    ]


def mesh_of_all_ranks(rank: int) -> bool:
    return DeviceMesh.from_group(dist.group.WORLD, "cpu") == init_device_mesh("cpu", (4,))


def test_the_default_group_makes_a_mesh_of_all_ranks(gloo4: Pool) -> None:
    assert gloo4.run(mesh_of_all_ranks) == [True] * 4


def wrong_groups(rank: int) -> list[str]:
    tp, dp, first = made([0, 1], [2, 3]), made([0, 2], [1, 3]), dist.new_group([0, 1])
    calls = [
        lambda: DeviceMesh.from_group([dp, tp], "cpu"),
        lambda: DeviceMesh.from_group([dp, tp], "cpu", [0, 1, 2, 3]),
        lambda: DeviceMesh.from_group([tp, dp], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")),
        lambda: DeviceMesh.from_group(tp, "cpu", [1, 0] if rank < 2 else [3, 2]),
        lambda: DeviceMesh.from_group(tp, "cpu", [2, 3] if rank < 2 else [0, 1]),
        lambda: DeviceMesh.from_group(first, "cpu"),
    ]
    return [said(call) for call in calls]


def said(call: Callable) -> str:
    try:
        return repr(call())
    except ValueError as error:
        return str(error)


def test_groups_that_do_not_fit_a_mesh_are_named(gloo4: Pool) -> None:
    errors = gloo4.run(wrong_groups)
    expected = [
        "2 groups do not say how their ranks form a mesh; give mesh=",
        "2 groups for a mesh of 1 axes; give one for each axis",
        "axis dp of DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp')) has ranks (1, 3) through rank 1, "
        "and its group has (0, 1). Give the group of these ranks in this order",
        "has ranks (1, 0) through rank 1, and its group has (0, 1)",
        "rank 1 is not in DeviceMesh('cpu', [2, 3]); call it on its ranks only",
        "DeviceMesh('cpu', [0, 1])",
    ]
    assert [e for e, text in zip(expected, errors[1], strict=True) if e not in text] == []
    assert "is no process group; give one ProcessGroup" in errors[2][-1]


def groups_of_views(rank: int) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned, flat = mesh["tp", "dp"], mesh.flatten()
    same = turned.get_group("tp") is mesh.get_group("tp") and mesh["dp"].get_group() is mesh.get_group("dp")
    return same, flat.get_group() is dist.group.WORLD, dist.get_process_group_ranks(turned.flatten().get_group())


def test_views_use_the_groups_of_the_mesh(gloo4: Pool) -> None:
    assert gloo4.run(groups_of_views) == [(True, True, [0, 2, 1, 3])] * 4


def test_the_repr_of_a_large_mesh_is_short() -> None:
    """It stands in errors."""
    mesh = init_device_mesh("cpu", (128, 128), mesh_dim_names=("dp", "tp"))
    assert repr(mesh) == "init_device_mesh('cpu', (128, 128), mesh_dim_names=('dp', 'tp'))"
    turned = repr(mesh["tp", "dp"])
    assert "ranks 0, 128, 256, ..., 16383" in turned and "(128, 128)" in turned and len(turned) < 200
