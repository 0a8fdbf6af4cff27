"""A mesh is a value: built, compared, sliced and printed without a process group."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

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
