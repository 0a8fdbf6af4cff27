"""A loaded program is the saved one: its text is equal, and its numbers are, to the bit."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import CompiledStep, FullyShard, LocalTensorMode, MixedPrecision, Replicate, Shard, local_map
from spmd._torch import pytree
from spmd.expand.kept import archive
from spmd.expand.kept.notation import CannotKeep, Reader, written
from spmd.expand.nodes import LINE
from spmd.tensor.spec import Spec
from tests.expand.side_by_side import INPUTS, NET, Net, rows, seeded, train_step
from tests.tensor.single import every_rank

MESH = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


class Layers(nn.Module):
    """Sums that are owed, a look-up in a sharded table, random numbers, sizes, constants, a function of blocks."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.table = nn.Embedding(16, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, ids):
        self.seen += 1
        h = torch.relu(x @ self.w + x @ self.v)
        h = F.dropout(h + self.table(ids), 0.5)
        h = (h.view(-1, 2, 4) * 2).flatten(1).t() + torch.tensor([[1.0], [2.0]] * 4)
        return halved(h.t()) * self.seen


halved = local_map(lambda x: x / 2, [Shard(0), Replicate()], ([Shard(0), Replicate()],))

LAYERS = {"w": {"tp": Shard(0)}, "v": {"tp": Shard(0)}, "table.*": {"tp": Shard(0)}}


def of_layers(model, optimizer, x, ids):
    optimizer.zero_grad()
    out = model(x, ids)
    (out * out).sum().backward()
    optimizer.step()
    return out


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 24), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q * k, -1) * v)


class Once(Net):
    """Notes things in its first forward, which has other numbers."""

    def __init__(self):
        super().__init__()
        self.ready, self.notes, self.names = False, {"old": 1}, ["a"]

    def forward(self, x):
        if self.ready:
            return super().forward(x)
        self.ready = True
        self.notes["shape"] = tuple(x.shape)
        del self.notes["old"]
        self.names.append("b")
        return super().forward(x) * 3


PACKED = {"qkv.*": {"tp": Shard(0, blocks=3)}, "out.weight": {"tp": Shard(1)}}


class Image(nn.Module):
    """Halos, forward and backward."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x):
        return F.max_pool2d(self.conv(x), 3, 1, 1).flatten(1)[:, :3]


@dataclass
class Output:
    logits: torch.Tensor
    name: str


Pair = namedtuple("Pair", "first second")


def trees(x, rate, count):
    """Results in containers of all kinds, plain values among them, and numbers that take branches."""
    y = x.softmax(0) * rate if rate > 0.5 else x * rate
    y = y * count if count < len(x) else y + 1 / count
    found = {"a": [y, None, 3], "b": (torch.float32, "text", float("inf"))}
    return Output(y + 1, "out"), Pair(x.sum(), F.gelu), OrderedDict(found), y.t().sort(0)


class Dropping(Net):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.25)


def in_micro_batches(model, optimizer, x, y):
    optimizer.zero_grad()
    losses = []
    for a, b in zip(x.chunk(6), y.chunk(6), strict=True):
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return losses[2], sum(losses)


@dataclass
class Case:
    """A step, what makes its arguments, and how it is compiled. Batches of all calls have one shape."""

    step: Callable
    make: Callable[[], tuple]
    batches: list[tuple]
    settings: dict[str, Any]


def trained(model: Callable[[], nn.Module], optimizer: Callable = optim.AdamW) -> Callable[[], tuple]:
    def make() -> tuple:
        made = seeded(model)
        return made, optimizer(made.parameters(), lr=0.01)

    return make


def momentum(params, lr):
    return optim.SGD(params, lr, momentum=0.9)


g = torch.Generator().manual_seed(0)
IMAGES = [(torch.randn(2, 1, 4, 8, generator=g), torch.tensor([0, 1]))] * 2
IDS = [(torch.randn(5, 8, generator=g), torch.randint(0, 16, (5,), generator=g)) for _ in range(2)]
NUMBERS = ((0.25, 2), (0.75, 2), (0.25, 9), (0.125, 4), (0.125, 7))
NO_STATE = [(torch.randn(5, 3, generator=g), *numbers) for numbers in NUMBERS]

CASES = {
    "tensor parallel": Case(train_step, trained(Net), rows(8), {"params": NET, "inputs": INPUTS}),
    "uneven, fully sharded": Case(
        train_step, trained(Net, momentum), rows(5, 2),
        {"fully_shard": FullyShard("dp", state=("dp", "tp")), "inputs": INPUTS},
    ),
    "stored, mixed precision": Case(
        train_step, trained(Net, momentum), rows(8, 2), {
            "params": NET, "stored": {"up.weight": [Shard(0), Replicate()]}, "inputs": INPUTS,
            "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        },
    ),
    "look-ups, draws, blocks": Case(
        of_layers, trained(Layers, momentum), IDS, {
            "params": LAYERS, "inputs": {"x": {"dp": Shard(0), "tp": Shard(1)}, "ids": {"dp": Shard(0)}},
        },
    ),
    "chosen for the program": Case(
        train_step, trained(Net, momentum), rows(8, 2),
        {"params": {"down.*": None}, "inputs": INPUTS, "choose": "program"},
    ),
    "packed": Case(
        train_step, trained(Packed, momentum), rows(8, 2), {"params": PACKED, "inputs": INPUTS, "bucket_mb": None}
    ),
    "a loop": Case(in_micro_batches, trained(Dropping), rows(24, 2), {"params": NET, "inputs": INPUTS}),
    "a loop, fully sharded": Case(
        in_micro_batches, trained(Dropping), rows(24, 2), {"fully_shard": FullyShard("dp"), "inputs": INPUTS}
    ),
    "halos": Case(train_step, trained(Image), IMAGES, {"inputs": {"x": {"dp": Shard(0), "tp": Shard(3)}}}),
    "changes in Python": Case(train_step, trained(Once, momentum), rows(8), {"inputs": INPUTS}),
    "trees and numbers": Case(trees, tuple, NO_STATE, {"inputs": {"x": {"tp": Shard(0)}}}),
}  # fmt: skip


def run(case: Case, step: CompiledStep) -> list:
    """What each call returns, and the state at the end, of every rank."""
    held = copy.deepcopy(case.make())
    spmd.manual_seed(3)
    found = [plain(step(*held, *copy.deepcopy(batch))) for batch in case.batches]
    noted = [getattr(x, name, None) for x in held for name in ("ready", "notes", "names")]
    return [*found, *(plain(dict(x.state_dict())) for x in held), *map(repr, noted)]


def plain(tree: Any) -> list:
    """The leaves, with the blocks of all ranks in the place of a tensor."""
    leaves = pytree.tree_leaves(vars(tree) if isinstance(tree, Output) else tree)
    return [every_rank(x) if isinstance(x, torch.Tensor) else x for x in leaves if not isinstance(x, Output)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def refused(*_: Any) -> None:
    raise AssertionError("a loaded step captured its function")


@pytest.mark.parametrize("name", CASES)
def test_what_is_loaded_is_what_was_saved(name, tmp_path):
    case = CASES[name]
    with LocalTensorMode(4):
        saved = spmd.compile(case.step, MESH, **case.settings)
        want = run(case, saved)
        saved.save(tmp_path / "step.spmd")
        loaded = spmd.load_step(tmp_path / "step.spmd", case.step, MESH)
        with mock.patch.object(CompiledStep, "_capture_and_expand", refused):
            got = run(case, loaded)
    assert sorted(map(str, loaded.programs)) == sorted(map(str, saved.programs))
    assert lines(loaded.program) == lines(saved.program)
    assert same(got, want)
    loaded.save(tmp_path / "again.spmd")
    assert [e.program for e in again(tmp_path, "again")] == [e.program for e in again(tmp_path, "step")]


def lines(program) -> list[str]:
    """The user's line of each node."""
    return [node.meta.get(LINE) or "" for node in program.graph.nodes if node.op != "output"]


def again(folder, name) -> list[archive.Entry]:
    return sorted(archive.read(folder / f"{name}.spmd")[1], key=lambda e: e.program)


def local_step(x):
    doubled = local_map(lambda x: x * 2, [Shard(0), Replicate()], ([Shard(0), Replicate()],))
    return doubled(x)


def test_what_has_no_name_cannot_be_saved(tmp_path):
    """A function of blocks that is made inside the step is in no other process; the cache goes on without it."""
    with LocalTensorMode(4):
        step = spmd.compile(local_step, MESH, cache=tmp_path)
        with pytest.warns(UserWarning, match=r"local_step is not kept in .* define it at the top level"):
            step(torch.ones(4))
    with pytest.raises(CannotKeep, match=r"local_step.<locals>.<lambda>: another process has to find it"):
        step.save(tmp_path / "step.spmd")
    assert not list(tmp_path.iterdir())


# ---- notation ---------------------------------------------------------------------------------

VALUES = [
    None, True, -3, 2.5, -0.0, float("inf"), float("-inf"), 1 + 2j, "it's", b"x", ..., torch.float8_e4m3fn,
    torch.Size([2]),
    torch.device("cuda", 1), torch.channels_last, torch.strided, (1,), (), [1, (2,)], {"a": {1: None}}, {3, 1},
    frozenset({"b"}), slice(None, 2), torch.ops.aten.add.Tensor, torch.ops.aten.mm.default, nn.Linear, F.cross_entropy,
    Shard(0, blocks=3), FullyShard("dp", 1), MixedPrecision(torch.bfloat16), OrderedDict,
]  # fmt: skip
SPECS = [
    Spec.of(MESH, (8, 6), torch.float32, stride=(1, 8), dims=((1,), (0,))),
    Spec.of(MESH, (6, 4), torch.bool, dims=((), (1, 0)), units=(1, 2)),
    Spec.of(MESH, (), torch.float16, partial=((0, "sum"), (1, "avg"))),
    Spec.of(MESH, (0, 3), torch.float8_e5m2),
]


@pytest.mark.parametrize("value", [*VALUES, *SPECS], ids=lambda x: repr(x)[:30])
def test_reading_undoes_writing(value):
    read = Reader(MESH).value(written(value))
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "text, why",
    [
        ("__import__('os').system('true')", "is no value that can be kept"),
        ("[x for x in (1, 2)]", "which is no value"),
        ("torch.load", "no dtype, layout or memory format"),
        ("torch.ops.aten.mm", "no dtype"),
        ("aten.no_such_op", "no op aten.no_such_op is registered here"),
        ("x", "names 'x', which it does not define before"),
        ("1 +", "cannot be read"),
        ("type('no_such_module:x')", "which is not there"),
    ],
)
def test_what_is_no_value_is_not_read(text, why):
    """Nothing is evaluated."""
    with pytest.raises(ValueError, match=why):
        Reader(MESH).value(text)


class Agent:
    """Nets, optimisers and plain values in one object, which a step is given."""

    def __init__(self):
        self.net, self.rate, self.seen = nn.Linear(4, 4), 0.5, 0
        self.optimizer = optim.Adam(self.net.parameters(), lr=0.1)

    def train(self, x):
        self.seen += 1
        self.optimizer.zero_grad()
        loss = (self.net(x) * self.rate).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def agent_step(agent, x):
    return agent.train(x)


def test_the_step_of_an_object_is_saved(tmp_path):
    """What it holds that is no plain value, such as a module, has guards of its own."""

    def trained(step):
        agent = seeded(Agent)
        return [every_rank(step(agent, torch.ones(8, 4))) for _ in range(3)]

    with LocalTensorMode(4):
        saved = spmd.compile(agent_step, MESH)
        want = trained(saved)
        saved.save(tmp_path / "step.spmd")
        loaded = spmd.load_step(tmp_path / "step.spmd", agent_step, MESH)
        with mock.patch.object(CompiledStep, "_capture_and_expand", refused):
            got = trained(loaded)
    assert same(got, want)
