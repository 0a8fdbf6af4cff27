"""One test body, three ways: all ranks simulated in one thread, a thread a rank, and a gloo process a rank.

    def total():
        mesh = init_device_mesh("cpu", (4,))
        return all_reduce(torch.full((2,), mesh.get_local_rank()), "sum", mesh)

    @pytest.mark.parametrize("way", WAYS)
    def test_total(way, gloo4):
        assert all(torch.equal(x, torch.tensor([6, 6])) for x in run(way, gloo4, total))

A body is a function of a module that takes no rank: it asks for the current one. What it gives may hold tensors,
DTensors (as this rank's blocks), numbers and plain containers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from workers import Pool

from spmd import DTensor, LocalTensorMode
from spmd._torch import pytree
from spmd.comm import wait
from spmd.sim import run_ranks
from spmd.sim.local_mode import own

WAYS = ("simulated", "threads", "gloo")


def run(way: str, gloo4: Pool, body: Callable[..., Any], *args: Any) -> list[Any]:
    """What the body gives on each of four ranks, in order of the ranks."""
    if way == "gloo":
        return gloo4.run(_on_rank, body, *args)
    if way == "threads":
        return run_ranks(lambda rank: _on_rank(rank, body, *args), 4)
    return on_ranks(lambda: body(*args), 4)


def on_ranks(body: Callable[[], Any], n: int) -> list[Any]:
    """What the body gives on each of n ranks, simulated in one thread."""
    with LocalTensorMode(n) as mode:
        found = _settled(body())
    return [pytree.tree_map(lambda leaf, rank=rank: own(leaf, rank), found) for rank in mode.ranks]


def _on_rank(rank: int, body: Callable[..., Any], *args: Any) -> Any:
    return _settled(body(*args))


def _settled(result: Any) -> Any:
    """Tensors that are here, of this rank, without history."""
    return pytree.tree_map(_block, result)


def _block(leaf: Any) -> Any:
    leaf = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    return wait(leaf).detach() if isinstance(leaf, torch.Tensor) else leaf


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, NaN being equal to NaN; containers by what is in them."""
    flat, structure = pytree.tree_flatten(a)
    others, other_structure = pytree.tree_flatten(b)
    return structure == other_structure and all(map(_same, flat, others))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
