"""LocalTensors and numbers that differ between ranks do on each rank what that rank would do by itself."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd import LocalTensor, LocalTensorMode
from spmd.mesh import as_rank, current_rank, init_device_mesh, world_size
from spmd.sim import BranchOnRank, PerRank, localize, per_rank
from spmd.sim.local_int import local_int
from spmd.sim.local_mode import own

A, B = {0: 2, 1: -3, 2: 7}, {0: 5, 1: 2, 2: 1}

BINARY = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "/": operator.truediv, "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<<": operator.lshift, ">>": operator.rshift, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "min": torch.sym_min, "max": torch.sym_max,
}  # fmt: skip
UNARY = {"-": operator.neg, "abs": abs, "float": torch.sym_float, "not": torch.sym_not}


def each(value: object, ranks: object = A) -> list:
    """The value on each rank."""
    return [own(value, rank) for rank in ranks]


def tensors(*shapes: tuple[int, ...]) -> LocalTensor:
    """A LocalTensor with a different tensor on each rank."""
    return LocalTensor({r: torch.arange(float(torch.Size(s).numel())).reshape(s) + r for r, s in enumerate(shapes)})


# Numbers


@pytest.mark.parametrize("name", BINARY)
def test_arithmetic_is_that_of_every_rank(name: str) -> None:
    fn = BINARY[name]
    if name in ("<<", ">>", "**"):
        assert each(fn(local_int(A), 2)) == [fn(a, 2) for a in A.values()]
        return
    assert each(fn(local_int(A), local_int(B))) == [fn(a, B[r]) for r, a in A.items()]
    assert each(fn(local_int(A), 3)) == [fn(a, 3) for a in A.values()]
    assert each(fn(3, local_int(B))) == [fn(3, b) for b in B.values()]


@pytest.mark.parametrize("name", UNARY)
def test_so_are_operations_on_one_number(name: str) -> None:
    values = {0: True, 1: False} if name == "not" else A
    found = UNARY[name](local_int(values))
    assert each(found, values) == [not v if name == "not" else UNARY[name](v) for v in values.values()]


def test_numbers_on_which_all_ranks_agree_are_plain() -> None:
    n = local_int(A)
    assert type(n - n) is int and (n * 0, n - n + 4) == (0, 4)
    assert (n == n) is True and (n != n) is False
    assert type(local_int({0: 3, 1: 3})) is int


ASK: dict[str, Callable] = {
    "if": lambda n: 1 if n == 2 else 0,
    "int": int,
    "bool": lambda n: bool(n > 0),
    "and": lambda n: n > 0 and n < 5,
    "index": lambda n: [1, 2, 3][n],
    "range": range,
    "while": lambda n: next(iter(()), None) if not n < 0 else None,
}


@pytest.mark.parametrize("name", ASK)
def test_python_cannot_go_several_ways(name: str) -> None:
    """A branch on `rank == 0` for several ranks is an error with the values and what to do; it is never False."""
    with pytest.raises(BranchOnRank, match=r"on rank 0, .* on rank 1, .* on rank 2.*@spmd\.sim\.per_rank"):
        ASK[name](local_int(A))


def test_a_branch_on_the_rank_names_the_values() -> None:
    with LocalTensorMode(2), pytest.raises(BranchOnRank, match="the value is True on rank 0, False on rank 1"):
        "first" if current_rank() == 0 else "other"


# Tensors

X, Y, UNEVEN = tensors((2, 3), (2, 3)), tensors((3, 3), (3, 3)), tensors((2, 3), (1, 3), (0, 3))

OPS: dict[str, Callable] = {
    "x + x": lambda x: x + x,
    "x * 2.0": lambda x: x * 2.0,
    "x @ w": lambda x: x @ torch.ones(3, 4),
    "linear": lambda x: F.linear(x, torch.ones(4, 3), torch.ones(4)),
    "sum": lambda x: x.sum(),
    "sum dim 0": lambda x: x.sum(0),
    "cat": lambda x: torch.cat([x, torch.ones(1, 3), x]),
    "split": lambda x: x.split([1, 2], 1)[1],
    "view": lambda x: x.reshape(-1),
    "transpose": lambda x: x.t().contiguous(),
    "slice": lambda x: x[: x.shape[0] // 2],
    "mask": lambda x: x[x > 2],
    "nonzero": lambda x: (x > 2).nonzero(),
    "where": lambda x: torch.where(x > 1, x, torch.zeros(())),
    "norm": lambda x: F.layer_norm(x, (3,)),
    "softmax": lambda x: x.softmax(1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 2, -1),
    "pad": lambda x: F.pad(x, (0, 1)),
    "new size": lambda x: x.new_ones(x.shape[0] + 1, 2),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1.0)[1],
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "in place": lambda x: x.clone().add_(x).mul_(2),
    "write through a view": lambda x: fill_first_column(x.clone()),
    "topk": lambda x: torch.topk(x, 2, dim=1),
    "stack": lambda x: torch.stack([x, x], 1),
    "item": lambda x: x.numel() * 2,
    "value": lambda x: x.sum().item(),
}


def fill_first_column(x: torch.Tensor) -> torch.Tensor:
    x[:, 0].fill_(7)
    return x


@pytest.mark.parametrize("shapes", ["even", "uneven"])
@pytest.mark.parametrize("name", OPS)
def test_an_op_is_that_of_every_rank(name: str, shapes: str) -> None:
    x = X if shapes == "even" else UNEVEN
    found = OPS[name](x)
    for rank in x.ranks:
        wanted = OPS[name](x.local[rank])
        mine = torch.utils._pytree.tree_map(lambda leaf, rank=rank: own(leaf, rank), found)
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shapes", ["even", "uneven"])
def test_gradients_are_those_of_every_rank(shapes: str) -> None:
    x = X if shapes == "even" else UNEVEN
    w = torch.linspace(-1, 1, 12).reshape(3, 4)

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, own_w = x.detach().clone().requires_grad_(), w.clone().requires_grad_()
        F.layer_norm((x @ own_w).relu(), (4,)).pow(2).sum().backward()
        return x.grad, own_w.grad

    found = gradients(x)
    for rank in x.ranks:
        for a, b in zip(found, gradients(x.local[rank]), strict=True):
            torch.testing.assert_close(a.local[rank], b, rtol=0, atol=0)


def test_shapes_that_differ_are_told() -> None:
    assert each(UNEVEN.shape[0], UNEVEN.local) == [2, 1, 0] and UNEVEN.shape[1] == 3
    assert each(UNEVEN.numel(), UNEVEN.local) == [6, 3, 0]


def test_reconcile_gives_what_all_ranks_have() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert torch.equal(LocalTensor({0: nan, 3: nan.clone()}).reconcile()[0], torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"in 6 of 6 elements, the first at \[0, 0\]: 0\.0 on rank 0, 1\.0 on rank 1"):
        X.reconcile()
    with pytest.raises(ValueError, match=r"rank 0 has torch.float32 \[2, 3\], rank 1 torch.float32 \[1, 3\]"):
        UNEVEN.reconcile()


def test_copies_and_pickles_are_apart() -> None:
    file = io.BytesIO()
    torch.save({"x": X}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["x"]
    for other in (copy.deepcopy(X), pickle.loads(pickle.dumps(X)), X.clone(), loaded):
        other.zero_()
        assert other.local[1].sum() == 0 and X.local[1].sum() != 0


def test_data_can_be_replaced() -> None:
    p = nn.Parameter(X.clone())
    p.data = Y.clone()
    assert torch.equal(p.local[1], Y.local[1]) and p.shape == (3, 3)
    p.data = torch.ones(2)
    p.local[0].zero_()
    assert each(p.detach(), (0, 1))[0].tolist() == [0, 0] and p.local[1].tolist() == [1, 1]


def test_views_in_inference_mode_are_what_their_base_is() -> None:
    """As torch has it: a view of what was made outside trains afterwards, and what is made inside does not."""
    with LocalTensorMode(2):
        x = localize(torch.ones(2, 2))
        with torch.inference_mode():
            made = [x + 1, (x + 1).t()]
            views = [x.t(), x.detach(), x.data, x.view(-1)]
        assert not any(view.is_inference() for view in views) and all(y.is_inference() for y in made)


def test_ops_that_change_the_shape_in_place() -> None:
    """The memory stays: views see writes, another LocalTensor of the same tensors keeps its shape, gradients flow."""
    base = X.clone()
    row, x = base[0], base.detach()
    x.data = base
    for change, shape in (
        (lambda: x.t_(), (3, 2)), (lambda: x.unsqueeze_(1), (3, 1, 2)), (lambda: x.transpose_(1, 2), (3, 2, 1)),
        (lambda: x.squeeze_(2), (3, 2)), (lambda: x.detach_(), (3, 2)), (lambda: x.resize_(2, 2), (2, 2)),
    ):  # fmt: skip
        assert change() is x and x.shape == shape and all(of.shape == shape for of in x.local.values())
    assert base.shape == (2, 3)
    x.zero_()
    assert not row.reconcile().any()
    uneven = UNEVEN.clone()
    stride = [of.stride() for of in UNEVEN.local.values()]
    assert [of.stride()[::-1] for of in uneven.t_().local.values()] == stride
    leaf = X.clone().requires_grad_()
    (leaf * 2).t_().sum().backward()
    assert leaf.grad.reconcile().eq(2).all()
    with torch.inference_mode():
        assert X.clone().detach_().t_().shape == (3, 2)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: torch.zeros(2, 3).add_(X), "into a plain tensor, which is one for all of them"),
        (lambda: torch.add(X, 1, out=torch.zeros(2, 3)), "into a plain tensor"),
        (lambda: torch._foreach_add_([torch.zeros(2, 3)], [X]), "into a plain tensor"),
        (lambda: X + UNEVEN, r"tensors of ranks \[0, 1\] and of ranks \[0, 1, 2\] meet"),
        (lambda: torch.zeros(2, 3).resize_as_(UNEVEN), "into a plain tensor"),
        (lambda: LocalTensor({0: torch.ones(1), 1: torch.ones(1, dtype=torch.int)}), "ranks may differ in sizes only"),
        (lambda: LocalTensor({0: torch.ones(1), 1: torch.ones(1, 1)}), "1 dims on rank 0 and .* 2 dims on rank 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error(wrong: Callable, message: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        wrong()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((0, 1), 5.0),
        lambda x: x.__setitem__((0, 1), float("nan")),
        lambda x: x.__setitem__(x > 0, 7),
        lambda x: x.copy_(torch.arange(3.0)),
        lambda x: x.masked_fill_(torch.tensor([True, False, True]), 3.0),
    ],
)
def test_a_plain_tensor_can_be_given_what_is_the_same_on_all_ranks(write: Callable) -> None:
    """A number that is assigned becomes a tensor of each rank on its way."""
    x, expected = torch.ones(2, 3), torch.ones(2, 3)
    write(expected)
    with LocalTensorMode(2):
        write(x)
    assert type(x) is torch.Tensor
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


def test_a_plain_tensor_is_left_as_it_was_where_it_cannot_be_written() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError):
        x.add_(X)
    assert not x.any()


# The mode


def test_inside_the_rank_is_every_rank() -> None:
    with LocalTensorMode(3) as mode:
        assert each(current_rank(), range(3)) == [0, 1, 2] and world_size() == 3
        mesh = init_device_mesh("cpu", (3,))
        assert each(mesh.get_coordinate()[0], range(3)) == [0, 1, 2]
        with LocalTensorMode({0, 2}) as part:
            assert each(current_rank(), (0, 2)) == [0, 2] and world_size() == 3
            assert torch.ones(1).ranks == part.ranks == (0, 2)
        assert torch.ones(1).ranks == mode.ranks
        with pytest.raises(ValueError, match=r"ranks \[3\] are not all among those played"), LocalTensorMode({3}):
            pass
    assert current_rank() == 0 and type(torch.ones(1)) is torch.Tensor


def test_a_mode_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), LocalTensorMode(2):
        raise KeyError("mine")
    assert type(torch.ones(1)) is torch.Tensor and current_rank() == 0


MAKE: dict[str, Callable] = {
    "full": lambda r: torch.full((2,), r),
    "zeros": lambda r: torch.zeros(r, 2),
    "arange": lambda r: torch.arange(r, r + 2),
    "tensor": lambda r: torch.tensor([1, r, [r, 2][0]]),
    "as_tensor": lambda r: torch.as_tensor(r),
    "mul": lambda r: torch.ones(2) * r,
    "item": lambda r: torch.tensor([r, 5])[0].item(),
}


@pytest.mark.parametrize("name", MAKE)
def test_what_is_made_of_the_rank_differs(name: str) -> None:
    with LocalTensorMode(3):
        found = MAKE[name](current_rank())
    for rank in range(3):
        assert torch.equal(torch.as_tensor(own(found, rank)), torch.as_tensor(MAKE[name](rank))), rank


def test_a_model_made_inside_trains_on_every_rank_by_itself() -> None:
    def trained(rank: int | torch.SymInt) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(2, 3) * rank).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    with LocalTensorMode(3):
        found = trained(current_rank())
    for rank in range(3):
        for a, b in zip(found, trained(rank), strict=True):
            torch.testing.assert_close(a.local[rank], b, rtol=0, atol=0)


def test_a_model_made_outside_is_one_for_all_until_localized() -> None:
    net = nn.Linear(2, 1)
    with LocalTensorMode(2):
        x = torch.ones(1, 2) * current_rank()
        localize(net)
        net(x).sum().backward()
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        first, second = net.weight.local.values()
    assert torch.equal(first - second, torch.ones(1, 2))


# Once a rank


@per_rank
def share(total: int, x: torch.Tensor) -> tuple[int, torch.Tensor, str]:
    rank = current_rank()
    return (total // 2 + (1 if rank < total % 2 else 0), x[:rank], f"rank {rank}")


def test_a_per_rank_function_may_branch() -> None:
    with LocalTensorMode(3):
        n, part, text = share(5, torch.arange(3))
    assert each(n, range(3)) == [3, 2, 2]
    assert [part.local[r].tolist() for r in range(3)] == [[], [0], [0, 1]]
    assert isinstance(text, PerRank) and each(text, range(3)) == ["rank 0", "rank 1", "rank 2"]


def test_on_one_rank_it_is_the_function_itself() -> None:
    assert share(5, torch.arange(3))[0] == 3 and share(5, torch.arange(3))[2] == "rank 0"


# Random numbers


def drawn(seed: int | None, rank_seed: bool, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    if rank_seed:
        seed_each()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2)
    y = torch.zeros(3).uniform_(generator=generator)
    z = F.dropout(torch.ones(8), 0.5)
    return [x, y, z, torch.randperm(4), torch.rand(2, generator=generator)]


@per_rank
def seed_each() -> None:
    torch.manual_seed(100 + current_rank())


@pytest.mark.parametrize("rank_seed", [False, True], ids=["one seed", "a seed a rank"])
def test_random_numbers_are_those_of_real_ranks(rank_seed: bool) -> None:
    with LocalTensorMode(3):
        found = drawn(3, rank_seed, 0)
    for rank in range(3):
        with as_rank(rank, 3):
            wanted = drawn(3, rank_seed, rank)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(own(a, rank), b), rank


def test_afterwards_the_process_draws_on_from_rank_0() -> None:
    torch.manual_seed(1)
    with LocalTensorMode(2):
        torch.rand(3)
    inside_then = torch.rand(1)
    torch.manual_seed(1)
    torch.rand(3)
    assert torch.equal(inside_then, torch.rand(1))
