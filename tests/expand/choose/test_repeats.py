"""The layers of a model, found in the order of its cells."""

from __future__ import annotations

import pytest

from spmd.expand.choose.repeats import layers_of


def chain(n: int) -> list[list[tuple[int, int]]]:
    """Values of cells each of which reads what the one before wrote."""
    return [[(i, -1), (i + 1, 0)] for i in range(n - 1)]


@pytest.mark.parametrize("times", (4, 6))
def test_layers_of_a_chain(times):
    """What is alike does not know its layer; what meets one layer only belongs to it."""
    keys = [0, *[1, 2, 3] * times, 4]
    found = layers_of(keys, chain(len(keys)))
    assert found.places == [0, 0, 0, 0, *[1] * 3 * (times - 2), 2, 2, 2, 2]
    assert [found.like[k] for k in (1, 2, 3)] == [found.like[k] for k in (4, 5, 6)]
    assert len(set(found.like)) == 5


def test_layers_begin_where_least_goes_on():
    """What is alike around them could belong to the first layer or to the one after the last: here 1 follows 3."""
    keys = [0, *[1, 2, 3] * 4, 1, 5]
    inside = [[(k, -1), (k + 2, 1)] for k in range(1, 13, 3)]  # 3 reads what 1 wrote
    assert layers_of(keys, chain(len(keys)) + inside).places == [0, 0, 0, 0, *[1] * 6, 2, 2, 2, 2, 2]


def test_a_backward_and_updates_have_the_layers_of_the_forward():
    """The backward counts down. An update that reads a gradient is of that layer, in whatever order they are."""
    forward, backward, updates = [1, 2] * 5, [3, 4] * 5, [5] * 5
    values = chain(20) + [[(2 * k, -1), (19 - 2 * k, 1)] for k in range(5)]
    order = [3, 0, 4, 1, 2]
    values += [[(19 - 2 * k, -2), (20 + at, 0)] for at, k in enumerate(order)]
    found = layers_of([*forward, *backward, *updates], values)
    of_forward = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [layer[1] for layer in found.layer] == [*of_forward, *of_forward[::-1], *order]
    assert len(set(found.like)) == 5


def test_what_is_equal_and_no_chain_has_no_layers():
    """Equal cells that do not read each other are no stack of layers; nor are fewer than four."""
    assert set(layers_of([1, 2] * 6, [[(k, -1), (k + 1, 0)] for k in range(0, 12, 2)]).layer) == {None}
    assert set(layers_of([1, 2] * 3, chain(6)).layer) == {None}


def test_updates_one_after_the_other_have_no_layers_of_their_own():
    """1 reads what 3 wrote before it, so 2, 1, 3 is repeated and linked; but nothing passes from 2 to 3, or from 1."""
    keys = [9, 3, *[2, 1, 3] * 4, 2, 1]
    values = [[(k, -1), (k + 2, 0)] for k in range(1, 14, 3)]
    assert set(layers_of(keys, values).layer) == {None}
