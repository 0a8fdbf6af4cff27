"""Six notations of a group: the meaning of each on a rank, and the errors."""

from __future__ import annotations

import pytest
import torch
from workers import Pool

from spmd.comm import Members, all_reduce, members, wait
from spmd.mesh import DeviceMesh, as_rank
from tests.comm.plain import GRID, LINE, NOTATIONS, TURNED, WITHOUT_PROCESS_GROUP, group_of


@pytest.mark.parametrize("spelling", WITHOUT_PROCESS_GROUP)
@pytest.mark.parametrize("rank", range(4))
def test_a_spelling_means_the_name_the_size_and_the_place_of_the_rank(spelling: str, rank: int) -> None:
    """Without a process group."""
    with as_rank(rank):
        group, place, ranks = group_of(spelling, rank)
        name, *rest = members(group)
        assert rest == [len(ranks), place]
        assert members(name) == Members(name, len(ranks), place) == members(ranks)


def read_all(rank: int) -> list[tuple]:
    return [(members(group)[1:], (len(ranks), place)) for group, place, ranks in (group_of(s, rank) for s in NOTATIONS)]


def test_process_groups_and_names_mean_the_same(gloo4: Pool) -> None:
    assert all(found == expected for rank in gloo4.run(read_all) for found, expected in rank)


REFUSED = {
    "rank not in the list": ([0, 1], ValueError, r"rank 2 is not in \[0, 1\]"),
    "rank in none of the lists": ([[0, 1], [3]], ValueError, r"rank 2 is not in \[\[0, 1\], \[3\]\]"),
    "rank not in the mesh": (DeviceMesh("cpu", [0, 1]), ValueError, "rank 2 is not in DeviceMesh"),
    "rank not in the name": ("ranks:0,1", ValueError, r"rank 2 is not in the group of ranks \[0, 1\]"),
    "a rank twice": ([2, 2, 1], ValueError, r"ranks \[2\] appear twice"),
    "a rank in two lists": ([[0, 2], [2, 1]], ValueError, r"ranks \[2\] appear twice"),
    "a negative rank": ([2, -1], ValueError, "rank -1 is negative"),
    "a mesh of several axes": (GRID, ValueError, r"say which axis, such as \(mesh, 'tp'\)"),
    "no such axis": ((GRID, "pp"), ValueError, "no axis 'pp' in a mesh with axes dp, tp"),
    "no such axis by number": ((GRID, 2), ValueError, "no axis 2 in a mesh"),
    "an unknown name": ("dp", ValueError, "there is no process group of name 'dp'"),
    "ranks of no numbers": ("ranks:a,b", ValueError, "a"),
    "an empty list": ([], TypeError, r"group is \[\]"),
    "no list": (3, TypeError, "group is 3"),
    "nothing": (None, TypeError, "group is None"),
    "a set": ({0, 2}, TypeError, "give a list of ranks"),
    "ranks that are no ints": (["0", "2"], TypeError, "'0'"),
    "half a rank": ([0.5, 2], TypeError, "0.5"),
    "lists and ranks": ([[0, 1], 2], TypeError, r"group is \[\[0, 1\], 2\]"),
    "ranks and lists": ([2, [0, 1]], TypeError, r"\[0, 1\]"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_no_group_of_this_rank_is_refused(case: str) -> None:
    group, error, text = REFUSED[case]
    with as_rank(2), pytest.raises(error, match=text):
        members(group)


def refused_on_ranks(rank: int) -> list[bool]:
    """All ranks raise an error; afterwards the group still works."""
    found = []
    for group in (GRID, "dp", [[0], [1], [2, 2, 3]], [7, 8], 3):
        with pytest.raises((ValueError, TypeError)):
            all_reduce(torch.ones(1), "sum", group)
        found.append(wait(all_reduce(torch.ones(1), "sum", LINE)).item() == 4)
    return found


def test_a_refusal_leaves_the_group_usable(gloo4: Pool) -> None:
    assert all(map(all, gloo4.run(refused_on_ranks)))


def test_a_mesh_of_one_rank_is_a_group() -> None:
    with as_rank(3):
        assert members(DeviceMesh("cpu", [3])) == Members("ranks:3", 1, 0)
        assert members((TURNED, "dp")) == Members("ranks:3,0", 2, 0)
