"""A fit recovers the costs that the times were made from, despite noise, and planning can rely on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.mesh import HostGrid, Link, Machine, Measured, MeshTopoInfo, Way, ways_cost
from spmd.mesh.cost import all_reduce_cost
from spmd.mesh.fit import MOST_LINES, Sample, errors, fit_curve, fit_ring, fit_sum
from spmd.mesh.machine import COLLECTIVES, LocalOp

SIZES = [2**k for k in range(10, 25)]
REGIMES = {
    "one line": ((30.0, 1e-4),),
    "a latency, then a bandwidth": ((250.0, 0.0), (20.0, 1e-3)),
    "three regimes": ((100.0, 0.0), (80.0, 5e-4), (0.0, 7e-4)),
}


def times(lines: tuple, sizes: list[int] = SIZES) -> np.ndarray:
    return np.max([us + us_per_byte * np.array(sizes, float) for us, us_per_byte in lines], 0)


@pytest.mark.parametrize("lines", REGIMES.values(), ids=REGIMES)
def test_regimes_without_noise_are_found(lines: tuple) -> None:
    between = [int(size * 1.4) for size in SIZES]
    curve = fit_curve(SIZES, times(lines))
    assert np.abs(errors(curve, between, times(lines, between))).max() < 0.02
    assert len(curve) == len(lines)


@pytest.mark.parametrize("lines", REGIMES.values(), ids=REGIMES)
def test_noise_and_a_few_wrong_times_do_not_matter_much(lines: tuple) -> None:
    """With 10% noise, and two of fifteen times measured while something else ran."""
    for seed in range(5):
        noise = np.random.default_rng(seed)
        us = times(lines) * np.exp(noise.normal(0, 0.1, len(SIZES)))
        us[noise.choice(len(SIZES), 2, replace=False)] *= 4
        curve = fit_curve(SIZES, us)
        assert np.median(np.abs(errors(curve, SIZES, times(lines)))) < 0.1


def test_a_curve_through_few_points() -> None:
    assert fit_curve([1000], [7.0])[0] == pytest.approx((7.0, 0.0))
    assert fit_curve([1000, 2000], [7.0, 5.0])[0][1] == 0.0
    assert fit_curve([2000, 1000], [20.0, 10.0])[0] == pytest.approx((0.0, 0.01))
    for wrong in (([], []), ([1], [0.0]), ([-1], [1.0]), ([1, 2], [1.0])):
        with pytest.raises(ValueError, match="give one size or more"):
            fit_curve(*wrong)


points = st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0.1, 1e6)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(points)
def test_any_times_give_a_curve_to_plan_by(found: list[tuple[int, float]]) -> None:
    """It can be stored, grows with the bytes and never jumps, and costs are the maximum of its lines."""
    curve = fit_curve(*zip(*found, strict=True))
    measured = Measured("all_reduce", 4, 1, curve)
    machine = Machine("m", (Way("ring", 6.0, (Link(0.5, 100.0),)),), measured=(measured,))
    topo = MeshTopoInfo(HostGrid((4,)), machine)
    asked = sorted({nbytes + more for nbytes, _ in found for more in (0, 1)})
    prices = [all_reduce_cost(nbytes, 0, topo) for nbytes in asked]
    assert prices == sorted(prices)
    assert prices == pytest.approx([max(us + us_per_byte * x for us, us_per_byte in curve) for x in asked])
    assert 1 <= len(curve) <= MOST_LINES


@pytest.mark.parametrize("places, levels", [("0*8", 1), ("0*4 1*4", 2), ("0 1 2 3 4 5 6 7", 2)])
def test_a_ring_is_found_again(places: str, levels: int) -> None:
    """The ring that made the times of groups of 2, 4 and 8 ranks; a level that no group crosses gets other links."""
    ring = Way("ring", 12.0, (Link(0.7, 80.0), Link(3.0, 20.0))[:levels], "measured")
    topo = MeshTopoInfo(HostGrid((2, 2, 2), places), Machine("m", (ring,)))
    samples = [
        Sample(collective, topo.crossings(axes)[0], nbytes, ways_cost(collective, nbytes, axes, topo)["ring measured"])
        for collective in COLLECTIVES
        for axes in (0, 2, (1, 2), (0, 1, 2))
        for nbytes in SIZES[::3]
    ]
    found = fit_ring(samples, levels)
    assert found.base_us == pytest.approx(12.0, rel=1e-3)
    for level, link in enumerate(found.links):
        known = ring.links[level if topo.crossings(2)[0][0].level == 0 else 1]
        assert (link.hop_us, link.gb_per_s) == pytest.approx((known.hop_us, known.gb_per_s), rel=1e-3)


SHAPES = [(8, 8, 8), (128, 128, 128), (512, 512, 512), (1024, 128, 128), (128, 1024, 128), (16, 768, 768), (99, 32, 99)]
"""(m, k, n) of products: square, of many rows, of long sums, of few rows, and as the scores of attention."""


def amounts(m: int, k: int, n: int) -> tuple[float, float]:
    """Operations of a product, and the bytes that it reads and writes."""
    return 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)


@pytest.mark.parametrize("made_of", [(5.0, 1e-5, 2e-4), (0.0, 2e-5, 0.0), (3.0, 0.0, 1e-4), (4.0, 1e-6, 1e-3)])
def test_products_without_noise_are_found(made_of: tuple[float, float, float]) -> None:
    """Of a call, operations and bytes, from products of several forms; so those that were not timed have their time."""
    flops, nbytes = zip(*[amounts(*shape) for shape in SHAPES], strict=True)
    us = [made_of[0] + made_of[1] * x + made_of[2] * y for x, y in zip(flops, nbytes, strict=True)]
    a_call, per_flop, per_byte = fit_sum([flops, nbytes], us)
    op = LocalOp("product", "float32", ((a_call, per_flop),), per_byte)
    for shape in [*SHAPES, (64, 256, 96), (2048, 16, 16)]:
        x, y = amounts(*shape)
        assert op.us(x, y) == pytest.approx(made_of[0] + made_of[1] * x + made_of[2] * y, rel=1e-3)


@given(st.lists(st.floats(0.1, 1e6), min_size=len(SHAPES), max_size=len(SHAPES)), st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_whatever_was_timed_prices_grow_with_each_dim(us: list[float], dim: int) -> None:
    op = LocalOp("product", "float32", *_fitted(us))
    for shape in SHAPES:
        larger = tuple([size * (2 if at == dim else 1) for at, size in enumerate(shape)])
        assert 0 <= op.us(*amounts(*shape)) <= op.us(*amounts(*larger))


def _fitted(us: list[float]) -> tuple:
    a_call, per_flop, per_byte = fit_sum(list(zip(*[amounts(*shape) for shape in SHAPES], strict=True)), us)
    return ((a_call, per_flop),), per_byte


def test_sums_need_times() -> None:
    with pytest.raises(ValueError, match="fit_sum: give times above 0"):
        fit_sum([[1.0, 2.0]], [1.0, 0.0])
    with pytest.raises(ValueError, match="for each as many terms"):
        fit_sum([[1.0]], [1.0, 2.0])
