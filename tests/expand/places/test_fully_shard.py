"""Which dim `FullyShard` shards, and in which order axes shard one dim."""

import pytest

from spmd import DeviceMesh, FullyShard, Places
from spmd.tensor.spec import parse_spec

MESH = DeviceMesh("cpu", [[0, 1], [2, 3], [4, 5], [6, 7]], mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize(
    "computed, stored",
    [
        ("f32[8, 16]", "f32[8, 16@dp]"),  # the largest that divides
        ("f32[9, 16]", "f32[9, 16@dp]"),
        ("f32[16, 16]", "f32[16@dp, 16]"),  # of equal ones the first
        ("f32[9, 7]", "f32[9, 7@dp]"),  # 1/7 of padding, where 9 has 3/9
        ("f32[16@tp, 4]", "f32[16@tp,dp, 4]"),  # inside what tp shards
        ("f32[8, 32@tp]", "f32[8, 32@tp,dp]"),
        ("f32[16, 12@tp]", "f32[16@dp, 12@tp]"),
        ("f32[3]", "f32[3]"),  # not every rank would have something
        ("f32[]", "f32[]"),
        ("f32[5]", "f32[5@dp]"),
        ("f32[0, 4]", "f32[0, 4@dp]"),  # a table of no rows
        ("f32[0]", "f32[0]"),
    ],
)
def test_the_dim_is_chosen(computed, stored):
    """The largest whose blocks are even, else the one with the least padding."""
    assert str(FullyShard("dp").places(parse_spec(computed, MESH)).stored) == stored


def test_places_print():
    """One line says where everything is."""
    spec = parse_spec("f32[16@tp, 4]", MESH)
    assert str(Places.same(spec)) == "f32[16@tp, 4]"
    assert str(FullyShard("dp", 1).places(spec)) == (
        "f32[16@tp, 4], computed f32[16@tp, 4], gradient f32[16@tp,dp, 4], state f32[16@tp,dp, 4]"
    )
