"""Ranks that make other calls of compiled steps, or hold other values, are told before anything is sent."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim
from workers import Pool

import spmd
from spmd import DTensor, Replicate, Shard, init_device_mesh
from spmd.debug import check_equal

X = torch.linspace(-1, 1, 32).view(8, 4)


@functools.cache
def row() -> spmd.DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


class Net(nn.Module):
    """A layer, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x)


def train(model: nn.Module, optimizer: optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


def trained() -> tuple:
    """A compiled step, and two models with their optimisers after two calls each."""
    if not _trained:
        torch.manual_seed(0)
        step = spmd.compile(train, row(), inputs={"x": {"dp": Shard(0)}})
        for _ in range(2):
            model = Net()
            _trained.append((model, optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)))
            for _ in range(2):
                step(*_trained[-1], X)
        _trained.insert(0, step)
    return tuple(_trained)


_trained: list = []


def another_model(odd: bool) -> None:
    step, a, b = trained()
    step(*(b if odd else a), X)


def another_step(odd: bool) -> None:
    a, b = [spmd.compile(squared, row()) for _ in range(2)]
    a(X), b(X)
    (b if odd else a)(X)


def placed_before(odd: bool) -> None:
    """Two models that were distributed before: their first call tells them apart."""
    a, b = (spmd.distribute_module(nn.Linear(4, 4), row()) for _ in range(2))
    spmd.compile(lambda model, x: model(x), row())(b if odd else a, X)


def other_line(odd: bool) -> None:
    """Equal steps that were compiled at two lines."""
    a = spmd.compile(squared, row())
    b = spmd.compile(squared, row())
    (b if odd else a)(X)


@contextmanager
def added(x: DTensor, number: float) -> Iterator[None]:
    """Inside, this rank's block is larger by the number."""
    block = x.detach().to_local()
    before = block.clone()
    block.add_(number)
    try:
        yield
    finally:
        block.copy_(before)


def other_rate(odd: bool) -> None:
    step, (model, optimizer), _ = trained()
    with added(optimizer.param_groups[0]["lr"], odd * 0.5):
        step(model, optimizer, X)


def other_count(odd: bool) -> None:
    step, (model, optimizer), _ = trained()
    with added(optimizer.state[model.layer.weight]["step"], odd * 100):
        step(model, optimizer, X)


def other_buffer(odd: bool) -> None:
    step, (model, optimizer), _ = trained()
    with added(model.count, odd * 100):
        step(model, optimizer, X)


def other_input(odd: bool) -> None:
    """Seen where $SPMD_CHECK_EQUAL is set: at the first call."""
    spmd.compile(squared, row(), inputs={"x": {"dp": Shard(0)}})(X * 2 if odd else X)


def other_weight(odd: bool) -> None:
    """Seen at one of two calls where $SPMD_CHECK_EQUAL is 2."""
    step, (model, optimizer), _ = trained()
    with added(model.layer.weight, float(odd)):
        step(model, optimizer, X)
        step(model, optimizer, X)


def other_plain_tensor(odd: bool) -> None:
    check_equal({"a": X, "b": [X, X * 2 if odd else X]})


def other_plain_model(odd: bool) -> None:
    torch.manual_seed(odd)
    check_equal(nn.Linear(4, 4))


def other_replica(odd: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_equal(DTensor.from_local(torch.ones(4) + odd, mesh, [Shard(0), Replicate()]))


def unlike_replicas(odd: bool) -> None:
    DTensor.from_local(torch.ones(4) + odd, row(), [Replicate()], run_check=True)


def one_without_gradient(odd: bool) -> None:
    DTensor.from_local(torch.ones(4, requires_grad=not odd), row(), [Shard(0)], run_check=True)


# What rank 1 does while the others call with `odd` False, and what all ranks are told.
PARTED: dict[Callable, str] = {
    another_model: r"-model: object \d+\n-optimizer: object \d+\n\+model: object",
    another_step: r"-step: compiled at test_same_call.py:\d+, object \d+\n",
    placed_before: r"-model: object \d+\n\+model: object \d+",
    other_line: r"-step: compiled at test_same_call.py:(\d+), object \d+\n\+step: compiled at test_same_call.py:(?!\1)",
    other_rate: r"-optimizer.param_groups.0.lr: 0.1\d*\n\+optimizer.param_groups.0.lr: 0.6",
    other_count: r"-optimizer.step\[model.layer.weight\]: \d.0\n\+optimizer.step\[model.layer.weight\]: 10\d.0",
    other_buffer: r"-model.count: \d\n\+model.count: 10\d",
    other_input: r"the call of squared: x differs between ranks: ranks 0, 2, 3 have .* but rank 1 float32 \[8, 4\]",
    other_weight: r"the call of train: model.layer.weight differs between ranks: ranks 0, 2, 3 have",
    other_plain_tensor: r"check_equal: b.1 differs between ranks: ranks 0, 2, 3 have .*, but rank 1",
    other_plain_model: "check_equal: weight differs between ranks: ranks 0, 2, 3 have",
    other_replica: "check_equal: the tensor differs between ranks: rank 0 has float32 .*, but rank 1",
    unlike_replicas: "from_local: ranks 0, 2, 3 and rank 1 hold replicas of one block",
    one_without_gradient: "the block of ranks 0, 2, 3 requires a gradient, that of rank 1 does not",
}  # fmt: skip


def parted(rank: int) -> dict[str, str]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMD_CHECK_EQUAL", "2")
        for case in PARTED:
            try:
                case(rank == 1)
                found[case.__name__] = "no error"
            except (RuntimeError, ValueError) as error:
                found[case.__name__] = str(error)
    return found


def test_ranks_that_part_are_told(gloo4: Pool) -> None:
    for said in gloo4.run(parted):
        for case, text in PARTED.items():
            assert re.search(text, said[case.__name__]), (case.__name__, said[case.__name__])


def test_equal_ranks_are_not_disturbed(gloo4: Pool) -> None:
    assert gloo4.run(equal) == [True] * 4


def equal(rank: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMD_CHECK_EQUAL", "1")
        for case in PARTED:
            case(False)
        if rank == 0:  # what needs no other rank does not count
            spmd.compile(squared, row()).program_for(X)
        other_input(False)
    return True


class Noted(Net):
    """Rank 0 keeps notes in it, as those that log do."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.best, self.scale = None, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def noted(rank: int) -> list[float]:
    """All ranks make the program anew where one has to, and the numbers stay those of one device."""
    torch.manual_seed(0)
    model = Noted()
    optimizer, found = optim.SGD(model.parameters(), lr=0.1), []
    step = spmd.compile(train, row(), inputs={"x": {"dp": Shard(0)}})
    for call in range(6):
        found.append(step(model, optimizer, X).full_tensor().item())
        if rank == 0 and call % 2 == 0:
            model.losses.append(found[-1])
            model.best = max(found[-1], model.best or 0.0)
    if rank == 1:
        model.scale = 2.0
    with pytest.raises(RuntimeError, match="differ"):
        step(model, optimizer, X)
    return found


def test_one_rank_may_keep_notes(gloo4: Pool) -> None:
    torch.manual_seed(0)
    model = Noted()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    want = [train(model, optimizer, X).item() for _ in range(6)]
    for found in gloo4.run(noted):
        assert found == pytest.approx(want, rel=1e-5)


def test_simulated_ranks_are_compared_too() -> None:
    """One thread plays all ranks: what each of them holds is compared."""
    with spmd.LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,))
        rank = mesh.get_rank()
        with pytest.raises(RuntimeError, match=r"ranks 0, 2, 3 have .*, but rank 1"):
            check_equal(torch.full((3,), 1.0) * (rank == 1))
        with pytest.raises(ValueError, match="rank 0 and ranks 1, 2, 3 hold replicas"):
            DTensor.from_local(torch.ones(3) * (rank > 0), mesh, run_check=True)
        check_equal(torch.ones(3))


def test_the_switch_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_CHECK_EQUAL", "often")
    with pytest.raises(ValueError, match="CHECK_EQUAL is 'often'; give after how many calls"):
        spmd.compile(squared, spmd.DeviceMesh("cpu", [0]))
