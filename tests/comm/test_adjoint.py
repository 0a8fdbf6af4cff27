"""Gradients through collectives, on real ranks: against finite differences, of themselves, and in traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_function
from workers import Pool

from spmd.comm import (
    all_gather_into_tensor_coalesced,
    all_gather_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    broadcast,
    permute_tensor,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
    wait,
)
from spmd.mesh import DeviceMesh

Tensors = Sequence[torch.Tensor]
STEP = 1e-6

FOUR, TWO = [3, 1, 0, 2], [[0, 2], [3, 1]]
MESH = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
TABLE = [[1, 0, 2, 1], [0, 0, 1, 0], [2, 1, 1, 3], [0, 1, 0, 0]]  # rows from place i to place j


def exchanged(x: torch.Tensor, place: int) -> torch.Tensor:
    return all_to_all_single(x, [row[place] for row in TABLE], TABLE[place], FOUR)


# What is differentiated, and the shapes of what a place gives.
CALLS: dict[str, tuple[Callable, Callable]] = {
    **{
        f"all_reduce {op} of {name}": (lambda place, x, op=op, g=group: [all_reduce(x, op, g)], lambda place: [(2, 2)])
        for op in ("sum", "avg", "min", "max", "product")
        for name, group in [("four", FOUR), ("two", TWO)]
    },
    **{
        f"reduce_scatter {op} on {dim}": (
            lambda place, x, op=op, dim=dim: [reduce_scatter_tensor(x, op, dim, (MESH, "dp"))], lambda place: [(2, 4)]
        )
        for op in ("sum", "avg", "min", "max", "product")
        for dim in (0, -1)
    },
    **{
        f"all_gather on {dim}": (
            lambda place, x, dim=dim: [all_gather_tensor(x, dim, (MESH, "tp"))], lambda place: [(1, 2, 2)]
        )
        for dim in (0, 1, -1)
    },
    "all_gather of scalars": (lambda place, x: [all_gather_tensor(x, 0, FOUR)], lambda place: [()]),
    "all_to_all": (lambda place, x: [all_to_all_single(x, None, None, FOUR)], lambda place: [(4, 2)]),
    "all_to_all of uneven rows": (lambda place, x: [exchanged(x, place)], lambda place: [(sum(TABLE[place]), 2)]),
    **{
        f"broadcast from {src}": (lambda place, x, src=src: [broadcast(x, src, FOUR)], lambda place: [(3,)])
        for src in (0, 2)
    },
    "scatter": (lambda place, x: [scatter(x, 1, FOUR)], lambda place: [(4, 2)]),
    "scatter of a list": (lambda place, *xs: [scatter(xs, 2, FOUR)], lambda place: [(2,), (0, 2), (), (1, 2)]),
    "permute in a ring": (lambda place, x: [permute_tensor(x, [1, 2, 3, 0], FOUR)], lambda place: [(2, 1)]),
    "permute of some": (lambda place, x: [permute_tensor(x, [-1, 3, 1, -1], FOUR)], lambda place: [(3,)]),
    **{
        f"all_reduce_coalesced {op}": (
            lambda place, *xs, op=op: all_reduce_coalesced(xs, op, FOUR), lambda place: [(2,), (1, 2)]
        )
        for op in ("sum", "avg", "max")
    },
    "all_gather_coalesced": (
        lambda place, *xs: all_gather_into_tensor_coalesced(xs, FOUR), lambda place: [(2,), (), (1, 2)]
    ),
    **{
        f"reduce_scatter_coalesced {op}": (
            lambda place, *xs, op=op: reduce_scatter_tensor_coalesced(xs, op, [0, 1], TWO), lambda place: [(4,), (1, 2)]
        )
        for op in ("sum", "avg", "product")
    },
    "one after the other": (
        lambda place, x: [all_reduce(all_gather_tensor(x.sin(), 0, TWO) * x.sum(), "sum", FOUR).cos()],
        lambda place: [(3,)],
    ),
}  # fmt: skip


SOME = [name for name in CALLS if not name.endswith(("two", "-1", "on 1")) and "one" not in name]


def place_of(rank: int) -> int:
    return FOUR.index(rank)


def drawn(shapes: Sequence[tuple[int, ...]], seed: int, *, zeros: bool = False) -> list[torch.Tensor]:
    """Different numbers everywhere, so that no two ranks tie; some of them zero where asked."""
    source = torch.Generator().manual_seed(seed)
    xs = [torch.rand(shape, dtype=torch.float64, generator=source) + 0.5 for shape in shapes]
    return [x.masked_fill(torch.rand(x.shape, generator=source) < 0.4, 0.0) for x in xs] if zeros else xs


def dot(xs: Tensors, ys: Tensors) -> torch.Tensor:
    return torch.stack([(wait(x) * y).sum() for x, y in zip(xs, ys, strict=True)]).sum()


def slopes(rank: int, f: Callable[..., torch.Tensor], xs: Tensors, directions: Sequence[Tensors]) -> list[torch.Tensor]:
    """The slope of the sum of all ranks' f, where this rank alone goes in each of its directions.

    All ranks perturb in step. A direction changes all numbers of a rank at once, each by another random amount; so a
    gradient that is wrong anywhere has the wrong slope, unless its errors cancel to five digits by chance.
    """
    found = []
    for who in range(4):
        for direction in directions:
            ends = []
            for step in (STEP, -STEP):
                moved = [x + step * v for x, v in zip(xs, direction, strict=True)] if who == rank else xs
                ends.append(f(*moved).detach())
            rise = ends[0] - ends[1]
            dist.all_reduce(rise)
            if who == rank:
                found.append(rise / (2 * STEP))
    return found


def along(found: Tensors, directions: Sequence[Tensors]) -> list[torch.Tensor]:
    """The slopes that these gradients say."""
    return [dot(found, direction) for direction in directions]


def has_wrong_slope(rank: int, found: Tensors, f: Callable[..., torch.Tensor], xs: Tensors) -> str | None:
    """What is wrong with the gradients of f; None if nothing is."""
    shapes = [tuple(x.shape) for x in xs]
    if [tuple(g.shape) for g in found] != shapes:
        return f"gradients of {[list(g.shape) for g in found]}, and not of {[list(shape) for shape in shapes]}"
    directions = [drawn(shapes, 60 + rank + 4 * i) for i in range(2)]
    return unlike(along(found, directions), slopes(rank, f, xs, directions))


def gradients(loss: torch.Tensor, xs: Tensors, **kwargs: bool) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, xs, allow_unused=True, **kwargs)
    return [torch.zeros_like(x) if g is None else wait(g) for g, x in zip(found, xs, strict=True)]


def unlike(found: Tensors, expected: Tensors) -> str | None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-5, atol=1e-7):
            return f"at {i}: {a.tolist()} and not {b.tolist()}"
    return None


def first_order(rank: int, name: str, zeros: bool = False) -> str | None:
    call, shapes = CALLS[name]
    place = place_of(rank)
    xs = [x.requires_grad_() for x in drawn(shapes(place), 10 + rank, zeros=zeros)]
    out = call(place, *xs)
    cotangents = drawn([y.shape for y in out], 20 + rank)
    found = gradients(dot(out, cotangents), xs)
    return has_wrong_slope(rank, found, lambda *ys: dot(call(place, *ys), cotangents), [x.detach() for x in xs])


def second_order(rank: int, name: str) -> str | None:
    """The gradient is a function of inputs and cotangents, and has one itself."""
    call, shapes = CALLS[name]
    place = place_of(rank)
    xs = drawn(shapes(place), 10 + rank)
    cotangents = drawn([wait(y).shape for y in call(place, *xs)], 20 + rank)
    weights = drawn([x.shape for x in xs], 30 + rank)

    def steep(*given: torch.Tensor) -> torch.Tensor:
        ys = [x if x.requires_grad else x.requires_grad_() for x in given[: len(xs)]]
        return dot(gradients(dot(call(place, *ys), given[len(xs) :]), ys, create_graph=True), weights)

    given = [x.clone().requires_grad_() for x in (*xs, *cotangents)]
    return has_wrong_slope(rank, gradients(steep(*given), given), steep, [x.detach() for x in given])


def in_trace(rank: int, name: str, way: str) -> str | None:
    """Forward and backward in a trace give what they give in eager mode, on fresh inputs too."""
    call, shapes = CALLS[name]
    place = place_of(rank)
    torch.compiler.reset()

    def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(call(place, *xs))

    traced = TRACED[way](f)
    for seed in (40, 50):
        xs = [x.requires_grad_() for x in drawn(shapes(place), seed + rank)]
        eager, out = f(*xs), traced(*xs)
        cotangents = drawn([y.shape for y in out], seed + 5 + rank)
        found = gradients(dot(out, cotangents), xs)
        wrong = unlike(out, [wait(y) for y in eager]) or unlike(found, gradients(dot(eager, cotangents), xs))
        if wrong:
            return wrong
    return None


TRACED: dict[str, Callable] = {
    "compile": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
    "aot": lambda f: aot_function(f, fw_compiler=lambda gm, _: gm),
}


def each(rank: int, fn: Callable, names: list[str], *args: object) -> list[str]:
    """The failures on this rank, one line each."""
    found = [(name, fn(rank, name, *args)) for name in names]
    return [f"rank {rank}, {name}: {text}" for name, text in found if text]


def check(pool: Pool, fn: Callable, *args: object) -> None:
    assert [line for lines in pool.run(each, fn, *args, timeout=200) for line in lines] == []


def test_gradients_are_those_of_the_sum_of_all_losses(gloo4: Pool) -> None:
    check(gloo4, first_order, list(CALLS))


def test_a_product_with_zeros_has_gradients(gloo4: Pool) -> None:
    check(gloo4, first_order, [name for name in CALLS if "product" in name], True)


def test_gradients_have_gradients(gloo4: Pool) -> None:
    check(gloo4, second_order, SOME)


@pytest.mark.parametrize("way", ["aot", "compile"])
def test_gradients_in_traces_are_those_of_eager_mode(gloo4: Pool, way: str) -> None:
    names = list(CALLS) if way == "aot" else list(CALLS)[::3]
    check(gloo4, in_trace, names, way)


def ties(rank: int) -> list:
    x = torch.tensor([1.0, float(rank > 1), torch.nan if rank == 2 else 0.0, float(rank)], requires_grad=True)
    y = all_reduce(x, "max", FOUR)
    (g,) = torch.autograd.grad(wait(y), x, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return g.tolist()


def test_a_maximum_shares_its_gradient_evenly_over_ties(gloo4: Pool) -> None:
    """The cotangents of four ranks add up; a NaN is where it came from."""
    last = [[0.0], [0.0], [0.0], [16.0]]
    second, third = [0.0, 0.0, 4.0, 4.0], [0.0, 0.0, 12.0, 0.0]
    assert gloo4.run(ties) == [[1.0, second[r], third[r], *last[r]] for r in range(4)]
