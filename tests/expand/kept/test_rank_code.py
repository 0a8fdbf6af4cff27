"""What a rank runs is kept beside the program: the same rank binds nothing, and gets the same numbers."""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import CompiledStep, Replicate, Shard, UnreadableStep
from spmd.expand import bound_program
from spmd.expand.kept import archive
from spmd.expand.kept.rank_code import read_code
from spmd.sim import run_ranks
from tests.expand.kept.test_round_trip import refused


class Net(nn.Module):
    """A tied table, random numbers, a buffer, a constant, a sum over a dim that need not divide."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids):
        h = F.dropout(self.norm(self.table(ids)), 0.25) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.out(h)


def train(model, optimizer, ids, scale):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids), ids) * scale
    loss.backward()
    optimizer.step()
    return {"loss": loss}


def train_in_parts(model, optimizer, ids, scale):
    """Micro-batches, which are a loop."""
    optimizer.zero_grad()
    total = 0.0
    for part in ids.repeat(6).chunk(6):
        loss = F.cross_entropy(model(part), part) * scale
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return {"loss": total}


def trained(step, mesh, batches=(4, 4, 3, 4)) -> list[torch.Tensor]:
    """The losses of calls with several sizes and numbers, and the parameters at the end."""
    torch.manual_seed(0)
    spmd.manual_seed(1)
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, torch.arange(n) % 6, 0.5 + i)["loss"] for i, n in enumerate(batches)]
    return [x.full_tensor().detach().clone() for x in (*losses, *model.parameters(), *model.buffers())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def nothing_made(bind: bool = False):
    """Nothing is captured inside, and nothing is bound."""
    with mock.patch.object(CompiledStep, "_capture_and_expand", refused), contextlib.ExitStack() as stack:
        if not bind:
            stack.enter_context(mock.patch.object(bound_program, "code_for", refused))
        yield


def mesh_of(*shape: int) -> spmd.DeviceMesh:
    return spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def compiled(mesh, folder, step=train):
    return spmd.compile(
        step, mesh, params={"table.*": [Replicate()] * mesh.ndim}, inputs={"ids": {"dp": Shard(0)}}, cache=folder
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, Path, list[torch.Tensor], str]:
    """A cache folder and a file of a training on one rank, its numbers, and the text of its last program."""
    folder, mesh = tmp_path_factory.mktemp("kept"), mesh_of(1)
    step = compiled(mesh, folder / "cache")
    want = trained(step, mesh)
    step.save(folder / "step.spmd")
    return folder / "cache", folder / "step.spmd", want, str(step.program)


@pytest.mark.parametrize("how", ["cache", "file"])
def test_the_same_rank_binds_nothing(kept, how, tmp_path):
    """Until somebody asks for the program, which then is the one that was kept."""
    folder, file, want, text = kept
    mesh = mesh_of(1)
    with nothing_made():
        step = compiled(mesh, folder) if how == "cache" else spmd.load_step(file, train, mesh)
        assert same(trained(step, mesh), want)
        step.save(tmp_path / "again.spmd")
    assert str(step.program) == text
    with nothing_made():
        assert same(trained(spmd.load_step(tmp_path / "again.spmd", train, mesh), mesh), want)


def test_a_loop_is_kept_with_its_body(gloo4, tmp_path):
    for want, found, has_loop in gloo4.run(with_a_loop, str(tmp_path)):
        assert has_loop and same(found, want)


def with_a_loop(rank: int, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """A training that is captured, one that is loaded, and whether what both ran has a loop."""
    mesh = mesh_of(2, 2)
    step = compiled(mesh, folder, train_in_parts)
    want = trained(step, mesh, (4, 4))
    with nothing_made():
        loaded = compiled(mesh, folder, train_in_parts)
        found = trained(loaded, mesh, (4, 4))
    assert str(loaded.program) == str(step.program)
    return want, found, "loop_body" in str(step.program)


def parts_of(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as z:
        return {name: z.read(name) for name in z.namelist()}


@pytest.mark.parametrize("part", ["step.json", "0/key.json", "0/code.txt", "0/calling.txt", "0/program.txt", "more"])
def test_what_was_changed_is_noticed(kept, tmp_path, part):
    """Also in a sound archive: a file says what was verified when it was written, or nothing."""
    _, file, *_ = kept
    data = parts_of(file)
    data[part] = data.get(part, b"").replace(b"0", b"1")
    with zipfile.ZipFile(tmp_path / "step.spmd", "w") as z:
        for name, text in data.items():
            z.writestr(name, text)
    with pytest.raises(UnreadableStep, match="was edited after it was written"):
        spmd.load_step(tmp_path / "step.spmd", train, mesh_of(1))


@pytest.mark.parametrize(
    "line",
    [
        "x = open('f')",
        "x = op0(op0(y))",
        "x = y.__class__",
        "import os",
        "x = y[0](z)",
        "return (op0(x),)",
        "x = (a := b)",
    ],
)
def test_what_is_no_line_of_code_is_not_compiled(line):
    about = {"at": "here", "fingerprint": "", "inputs": [], "outputs": [], "unread": [], "kept": []}
    text = f"{json.dumps(about)}\nop0: aten.exp\n\ndef run(x):\n    {line}\n"
    with pytest.raises(ValueError, match="a line that its notation has not"):
        read_code(text, "here", {}, mesh_of(1))


def test_simulated_ranks_keep_programs_alone(tmp_path):
    def rank(r):
        step = compiled(mesh_of(2), tmp_path / str(r))
        trained(step, step.mesh, (4,))
        return [entry.code for file in (tmp_path / str(r)).iterdir() for entry in archive.read(file)[1]]

    assert run_ranks(rank, 2) == [[""], [""]]


def on_gloo(rank: int, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A training that is captured, and one that is loaded."""
    mesh = mesh_of(2, 2)
    want = trained(compiled(mesh, folder), mesh, (3, 3))
    with nothing_made():
        return want, trained(compiled(mesh, folder), mesh, (3, 3))


def test_each_rank_has_its_own_code(gloo4, tmp_path):
    """Batches of 3 rows on two ranks, too; all ranks share a folder."""
    for want, got in gloo4.run(on_gloo, str(tmp_path)):
        assert same(got, want)
