"""A mesh is a value: built, compared, sliced and printed without a process group."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from workers import Pool, unsorted_ranks

from spmd import _torch
from spmd.mesh import AxisLink, DeviceMesh, MeshTopoInfo, as_rank, current_rank, init_device_mesh, world_size

NAMED = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
PLAIN = init_device_mesh("cpu", (2, 3))
CUBE = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


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


@pytest.mark.parametrize(
    "names, ranks", [("tp", [4, 5]), ("pp", [1, 5]), (("pp", "tp"), [[0, 1], [4, 5]]), (("tp", "pp"), [[0, 4], [1, 5]])]
)
def test_a_slice_goes_through_the_current_rank(names: str | tuple[str, ...], ranks: list) -> None:
    with as_rank(5 if names == "tp" else 1):
        part = CUBE[names]
    assert part.mesh.tolist() == ranks
    assert part.mesh_dim_names == ((names,) if isinstance(names, str) else names)
    assert part.root is CUBE


def test_a_slice_of_a_slice_knows_its_root() -> None:
    with as_rank(0):
        part = CUBE["dp", "tp"]["tp"]
    assert part.root is CUBE and part.axes_of_root == (2,) and part.ranks == (0, 1)
    assert CUBE["pp", "dp", "tp"] is CUBE


def test_equal_meshes_are_equal_by_content() -> None:
    again = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert again == NAMED and hash(again) == hash(NAMED) and len({again, NAMED}) == 1


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
def test_whatever_differs_makes_another_mesh(other: object) -> None:
    assert other != NAMED


@pytest.mark.parametrize("mesh", [NAMED, PLAIN, CUBE, NAMED.with_topology(MeshTopoInfo.from_mesh(NAMED, 3))])
def test_the_repr_can_be_pasted_back_and_a_pickle_is_equal(mesh: DeviceMesh) -> None:
    assert eval(repr(mesh), {"DeviceMesh": DeviceMesh, "MeshTopoInfo": MeshTopoInfo, "AxisLink": AxisLink}) == mesh
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh and hash(again) == hash(mesh) and again.topology == mesh.topology


def test_a_pickled_mesh_is_found_in_the_tables_of_another_process() -> None:
    """Strings hash differently there, so the hash must not travel."""
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
        (lambda: init_device_mesh("cpu", ()), "at least one axis"),
        (lambda: init_device_mesh("cpu", (2, 0)), "each of at least 1 rank"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)), "1 for a mesh of 2 axes"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp")), "each may appear once"),
        (lambda: DeviceMesh("cpu", [0, 1], topology=NAMED.topology), r"shape \(2, 3\), and this mesh has shape \(2,\)"),
        (lambda: NAMED.axis("dq"), "no axis 'dq' in a mesh with axes dp, tp. Did you mean 'dp'?"),
        (lambda: NAMED.axis(2), "no axis 2"),
        (lambda: NAMED["tp", "tp"], "each may appear once"),
        (lambda: PLAIN["dp"], "give it mesh_dim_names"),
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


def test_the_environment_says_the_rank_until_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
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


# On real processes


def ranks_of_groups(rank: int) -> dict[str, list[int]]:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    slices = {f"slice {name}": mesh[name].get_group() for name in ("tp", "dp")}
    axes = {name: mesh.get_group(name) for name in ("dp", "tp")}
    return {name: dist.get_process_group_ranks(group) for name, group in {**slices, **axes}.items()}


@unsorted_ranks
def test_the_place_in_a_group_is_the_place_on_the_axis(gloo4: Pool) -> None:
    """Also where ranks do not grow along an axis, and where a slice asks first."""
    groups = {"dp": [[3, 0], [1, 2]], "tp": [[3, 1], [0, 2]]}
    for rank, found in enumerate(gloo4.run(ranks_of_groups)):
        for name, ranks in groups.items():
            assert found[name] == found[f"slice {name}"] == next(group for group in ranks if rank in group)


def reused_groups(rank: int) -> tuple[bool, ...]:
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 1, 2))
    line = init_device_mesh("cpu", (4,))
    single = other.get_group(1)
    return (
        one.get_group("tp") is other.get_group(2),
        line.get_group() is dist.group.WORLD,
        dist.get_process_group_ranks(single) == [rank],
    )


def test_groups_of_the_same_ranks_are_made_once(gloo4: Pool) -> None:
    assert gloo4.run(reused_groups) == [(True, True, True)] * 4


def groups_of_a_part_first(rank: int) -> list[int]:
    part, whole = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [[1, 2], [3, 0]])
    part.make_groups()
    return dist.get_process_group_ranks(whole.get_group(1))


@unsorted_ranks
def test_a_mesh_of_some_ranks_does_not_part_the_others(gloo4: Pool) -> None:
    """Two ranks know one of the groups before, two do not; all of them still make the same new ones."""
    assert gloo4.run(groups_of_a_part_first) == [[3, 0], [1, 2], [1, 2], [3, 0]]


def too_large_a_mesh(rank: int) -> None:
    init_device_mesh("cpu", (8,)).get_group()


def test_a_mesh_larger_than_the_job_is_an_error(gloo4: Pool) -> None:
    with pytest.raises(RuntimeError, match="mentions rank 7, but the job has 4 ranks"):
        gloo4.run(too_large_a_mesh)


def groups_in_two_orders(rank: int) -> str:
    names = ("a", "b") if rank != 3 else ("c", "d")
    said = "no error"
    try:
        DeviceMesh("cpu", [[2, 1], [0, 3]], mesh_dim_names=names).get_group(0)
    except RuntimeError as error:
        said = str(error)
    return said


def test_other_meshes_on_other_ranks_are_an_error_and_no_hang(gloo4: Pool) -> None:
    said = gloo4.run(groups_in_two_orders)
    gloo4.kill()  # after such an error a job ends
    assert all("Every rank must use the same meshes in the same order" in text for text in said)
    assert all("('a', 'b')" in text and "('c', 'd')" in text for text in said)


def groups_again(rank: int) -> list[list[int]]:
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
    assert gloo4.run(groups_again) == [
        [[0, 2], [0, 2], [2]], [[1, 3], [1, 3], [4]], [[0, 2], [0, 2], [2]], [[1, 3], [1, 3], [4]]
    ]  # fmt: skip
