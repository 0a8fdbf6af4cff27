"""Moves are right for values that a backend's reduction would lose or refuse: NaN, bools, small integers."""

import pytest
import torch
from workers import Pool

from spmd.mesh import init_device_mesh
from spmd.sim import run_ranks
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Spec

NAN, INF = float("nan"), float("inf")


def reduced(rank: int, kind: str, dtype: torch.dtype, terms: list) -> list:
    """The reduction of one term on each rank: to a replicated tensor, and to shards that are joined again."""
    mesh = init_device_mesh("cpu", (len(terms),))
    mine = torch.tensor(terms[mesh.get_local_rank()], dtype=dtype)
    src = Spec.of(mesh, mine.shape, dtype, partial=[(0, kind)])
    whole, shard = src.with_layout(), src.with_layout([(0,)])
    return [plan(src, whole).run(mine), plan(shard, whole).run(plan(src, shard).run(mine))]


CASES = [
    ("max", torch.float32, [[1.0, 2.0, NAN], [3.0, NAN, 0.0], [0.0, 1.0, -INF], [INF, 5.0, 1.0]], [INF, NAN, NAN]),
    ("min", torch.float64, [[1.0, 2.0, NAN], [3.0, NAN, 0.0], [0.0, 1.0, INF], [-INF, 5.0, 1.0]], [-INF, NAN, NAN]),
    ("max", torch.bfloat16, [[NAN, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, -1.0]], [NAN, 3.0]),
    ("sum", torch.int16, [[1, 2], [30000, 2], [-29999, 3], [5, 4]], [7, 11]),
    ("max", torch.int16, [[1, -2], [30000, -3], [-29999, -9], [5, -4]], [30000, -2]),
    ("avg", torch.float32, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, NAN]], [4.0, NAN]),
    ("product", torch.int64, [[1, 2], [3, 4], [5, 6], [7, 0]], [105, 0]),
]


@pytest.mark.parametrize("kind, dtype, terms, want", CASES, ids=str)
def test_a_reduction_keeps_nan_and_narrow_integers(kind, dtype, terms, want):
    """A NaN in the term of any one rank is kept, and so is the dtype."""
    want = torch.tensor(want, dtype=dtype)
    for results in run_ranks(lambda rank: reduced(rank, kind, dtype, terms), 4):
        for got in results:
            torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


MOVED = [torch.complex64, torch.int16, torch.bool, torch.float16, torch.uint8]


def turned(rank: int, dtype: torch.dtype) -> bool:
    """From sharded rows to sharded columns and back, with uneven blocks."""
    mesh = init_device_mesh("cpu", (4,))
    whole = (torch.arange(35).reshape(5, 7) % 3).to(dtype)
    layouts = ([(0,), ()], [(), (0,)], None)
    rows, columns, all_of_it = (Spec.of(mesh, whole.shape, dtype).with_layout(dims) for dims in layouts)
    mine = plan(all_of_it, rows).run(whole)
    there = plan(rows, columns).run(mine)
    back = plan(columns, rows).run(there)
    return torch.equal(there, plan(all_of_it, columns).run(whole)) and torch.equal(back, mine)


def all_cases(rank: int) -> list:
    return [reduced(rank, kind, dtype, terms) for kind, dtype, terms, _ in CASES]


def all_turned(rank: int) -> list[bool]:
    return [turned(rank, dtype) for dtype in MOVED]


def test_all_dtypes_turn_on_gloo(gloo4: Pool):
    assert gloo4.run(all_turned) == [[True] * len(MOVED)] * 4


def test_so_it_is_on_gloo(gloo4: Pool):
    for results in gloo4.run(all_cases):
        for got, (_, dtype, _, want) in zip(results, CASES, strict=True):
            for one in got:
                torch.testing.assert_close(one, torch.tensor(want, dtype=dtype), equal_nan=True, rtol=0, atol=0)
