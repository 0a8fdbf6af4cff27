"""Steps that catch errors of ops: they raise for some sizes alone, also where nobody reads the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.expand.caught import catching
from tests.tensor.single import every_rank

CAUGHT = (RuntimeError, IndexError, ValueError, TypeError)

Op = Callable[[torch.Tensor], torch.Tensor]

OPS: dict[str, Op] = {
    "view": lambda x: x.view(4, -1, 2),
    "view of so many": lambda x: x.view(8, 2),
    "view of columns": lambda x: x.t().view(-1),
    "reshape": lambda x: x.reshape(3, -1),
    "unflatten": lambda x: x.unflatten(0, (3, -1)),
    "matmul": lambda x: x.t() @ torch.ones(4, 3),
    "linear": lambda x: F.linear(x.t(), torch.ones(3, 4)),
    "product with itself": lambda x: x @ x,
    "cat": lambda x: torch.cat([x, torch.ones(4, 3)], 1),
    "stack": lambda x: torch.stack([x, torch.ones(4, 2)]),
    "a sum": lambda x: x + torch.ones(4, 1),
    "a difference": lambda x: x - torch.ones(4, 2),
    "where": lambda x: torch.where(x > 0, x, torch.ones(4, 2)),
    "lerp": lambda x: torch.lerp(x, torch.ones(4, 2), 0.5),
    "expand": lambda x: x.expand(4, 2),
    "split": lambda x: x.split([2, 2])[0],
    "three splits": lambda x: torch.split(x, [1, 2, 3])[1],
    "chunk": lambda x: x.chunk(4)[3],
    "two rows": lambda x: (lambda a, b: a + b)(*x.unbind(0)),
    "index": lambda x: x[5],
    "a negative index": lambda x: x[-7],
    "select": lambda x: x.select(0, 5),
    "narrow": lambda x: x.narrow(0, 2, 4),
    "topk": lambda x: x.topk(5, 0)[0],
    "unfold": lambda x: x.unfold(0, 5, 1),
    "a write": lambda x: x.clone().add_(torch.ones(4, 1)),
    "a copy": lambda x: torch.zeros(4, 2).copy_(x),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "layer norm": lambda x: F.layer_norm(x.t(), (4,)),
    "convolution": lambda x: F.conv1d(x[None], torch.ones(3, 4, 1)),
    "halves": lambda x: F.glu(x, 0),
    "zeros": lambda x: torch.zeros(x.shape[0] - 5, 2),
    "a range": lambda x: torch.arange(x.shape[0] - 5),
    "no such dim": lambda x: x.sum(3),
    "no such dim of a norm": lambda x: x.norm(dim=2),
    "an empty maximum": lambda x: x[5:5].amax(0),
    "einsum": lambda x: torch.einsum("ij,ik->jk", x, torch.ones(4, 2)),
}  # fmt: skip

# Ops whose error is not seen in a trace: they are refused, or raise where the program runs.
UNSEEN: dict[str, Op] = {
    "an index in a tensor": lambda x: x[torch.tensor([5])],
    "rows": lambda x: x.index_select(0, torch.tensor([5])),
    "gather": lambda x: x.gather(0, torch.tensor([[5, 5]])),
    "embedding": lambda x: F.embedding(torch.tensor([5]), x),
    "dtypes": lambda x: x @ torch.ones(2, 3, dtype=torch.long),
    "softmax": lambda x: x.softmax(2),
    "sort": lambda x: x.sort(2)[0],
}


def catches(op: Op, is_used: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x):
        try:
            y = op(x)
        except CAUGHT:
            return x * 100
        return x * 2 + y.sum() if is_used else x * 2

    return step


def suppresses(op: Op) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x):
        factor = 100
        with contextlib.suppress(*CAUGHT):
            op(x)
            factor = 2
        return x * factor

    return step


def batch(rows: int) -> torch.Tensor:
    return torch.arange(2.0 * rows).view(rows, 2)


def check(step: Callable, sizes: list[int]) -> None:
    with LocalTensorMode(2):
        compiled = spmd.compile(step, init_device_mesh("cpu", (2,)), inputs={"x": {"dim0": Shard(0)}})
        for n in sizes:
            for got in every_rank(compiled(batch(n))):
                torch.testing.assert_close(got, step(batch(n)), msg=lambda m, n=n: f"{n} rows: {m}")


SIZES = {"raises later": [4, 8, 6, 2, 4], "raises first": [5, 4, 8, 3, 5]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_used", [True, False], ids=["read", "not read"])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_an_error_is_caught_where_one_device_raises_it(op: Op, is_used: bool, sizes: list[int]) -> None:
    check(catches(op, is_used), sizes)


@pytest.mark.parametrize("op", [OPS["view"], OPS["a sum"], OPS["topk"]])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_error_may_be_suppressed(op: Op, sizes: list[int]) -> None:
    check(suppresses(op), sizes)


def test_helpers_raise_and_callers_catch() -> None:
    def helper(x):
        return x.view(4, -1, 2)

    def step(x):
        try:
            helper(x)
        except RuntimeError as error:
            return x * len(str(error))
        finally:
            x = x + 1
        return x

    check(step, [5, 4, 5, 6, 8])


def test_a_number_may_decide_too() -> None:
    def step(x, n):
        try:
            x.view(n, -1)
        except RuntimeError:
            return x * 100
        return x * 2

    compiled = spmd.compile(step, spmd.DeviceMesh("cpu", [0]))
    for n in (3, 2, 4, 3, 5, 2):
        torch.testing.assert_close(compiled(batch(4), n).full_tensor(), step(batch(4), n))


@pytest.mark.parametrize("op", UNSEEN.values(), ids=UNSEEN)
def test_an_error_that_a_trace_does_not_see_is_not_left_out(op: Op) -> None:
    mesh = spmd.DeviceMesh("cpu", [0])
    said = r"would catch an error of .*, whose result nothing reads(?s:.)*at .*test_caught"
    with pytest.raises(RuntimeError, match=said):
        spmd.compile(catches(op, False), mesh)(batch(4))
    with pytest.raises((RuntimeError, IndexError)):
        spmd.compile(catches(op, True), mesh)(batch(4))


def test_an_error_of_the_trace_alone_may_not_be_caught() -> None:
    def step(x):
        try:
            return x * (x.data_ptr() > 0)
        except Exception:
            return x * 100

    with pytest.raises(RuntimeError, match="needs the memory of a tensor"):
        spmd.compile(step, spmd.DeviceMesh("cpu", [0]))(batch(4))


OUTSIDE = torch.ones(4, 2)


def test_what_no_program_can_do_may_not_be_caught() -> None:
    def step(x):
        try:
            return x + OUTSIDE
        except Exception:
            return x * 100

    with pytest.raises(RuntimeError, match="uses a tensor that is not among its arguments"):
        spmd.compile(step, spmd.DeviceMesh("cpu", [0]))(batch(4))


def test_sizes_stay_symbols_where_no_error_is_caught() -> None:
    """A `try` around a whole step, as for a lack of memory, captures once."""
    def step(x):
        try:
            return (x @ torch.ones(2, 2)).relu().sum()
        except RuntimeError:
            return x.sum()

    compiled = spmd.compile(step, spmd.DeviceMesh("cpu", [0]))
    for n in (4, 6, 9):
        torch.testing.assert_close(compiled(batch(n)).full_tensor(), step(batch(n)))
    assert len(list(compiled._captures._kept)) == 1


def test_what_catches() -> None:
    def plain(x):
        with x:
            return [y for y in x]

    def cleans(x):
        try:
            return x
        finally:
            x.close()

    def bare(x):
        try:
            return x
        except:  # noqa: E722
            return None

    functions = plain, cleans, bare, catches, suppresses
    assert [catching(each.__code__) for each in functions] == [False, False, True, True, True]


@pytest.mark.parametrize("dim", [2, -3, 5])
@pytest.mark.parametrize("op", ["norm", "cumsum", "logsumexp", "topk", "cummax"])
def test_a_dim_that_is_not_there_is_an_error(op: str, dim: int) -> None:
    """In compiled steps and in eager mode, wherever the tensor is sharded."""
    call = (lambda x: x.topk(1, dim)) if op == "topk" else lambda x: getattr(x, op)(dim=dim)
    with pytest.raises(IndexError, match="Dimension out of range"):
        spmd.compile(call, spmd.DeviceMesh("cpu", [0]))(batch(4))
    with LocalTensorMode(2):
        for shard in (0, 1):
            x = distribute_tensor(batch(4), init_device_mesh("cpu", (2,)), [Shard(shard)])
            with pytest.raises(IndexError, match="Dimension out of range"):
                call(x)
