"""A program is used again for what it was made for, in any process, and for nothing else; what differs is named."""

from __future__ import annotations

import contextvars
import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import types
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn, optim

import spmd
from spmd import CompiledStep, LocalTensorMode, Replicate, Shard, StaleStep, UnreadableStep
from spmd.expand.kept import archive
from spmd.expand.kept.library import Folder

ROOT = Path(__file__).parents[3]

SOURCE = """
    import contextvars
    import functools

    import torch
    from torch import nn
    from {helper} import bent

    SCALE, FACTOR, TABLE, NAME = 2.0, 1.0, [1.0] * 200, "neddih"
    CONTEXT = contextvars.ContextVar("context", default=1.0)

    @functools.lru_cache
    def factor():
        return FACTOR

    def scaled(module, args):
        return args[0] * RATE

    RATE = 1.0

    def doubled(x):
        from {late} import twice

        return twice(x)

    def hidden(x):
        return x * 1.0

    class Net(nn.Module):
        kept = 1.0

        def __init__(self):
            super().__init__()
            self.up, self.down, self.p = nn.Linear(4, 8), nn.Linear(8, 2), 0.5
            self.down.register_forward_pre_hook(scaled)

        def forward(self, x):
            x = globals()[NAME[::-1]](doubled(self.down(bent(self.up(x)))))
            return x * SCALE * self.p * factor() * self.kept * TABLE[len(TABLE) // 2] * CONTEXT.get()

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss
"""
HELPER = """
    import torch

    def bent(x):
        return torch.relu(x)
"""
PARAMS = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
INPUTS = {"x": {"dp": Shard(0)}}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The user's files: the first imports the second, and when it runs the third."""
    folder = tmp_path_factory.mktemp("user")
    names = tuple(f"{name}_{folder.name}" for name in ("train", "helper", "late"))
    (folder / f"{names[0]}.py").write_text(textwrap.dedent(SOURCE).format(helper=names[1], late=names[2]))
    (folder / f"{names[1]}.py").write_text(textwrap.dedent(HELPER))
    (folder / f"{names[2]}.py").write_text("def twice(x):\n    return x * 2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        yield importlib.import_module(names[0])
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def user(imported):
    """The first of the user's files. What a test writes into the files is undone."""
    files = {file: file.read_text() for file in Path(imported.__file__).parent.glob("*.py")}
    yield imported
    for file, text in files.items():
        if file.read_text() != text:
            file.write_text(text)


def mesh_of(*shape, names=("dp", "tp")) -> spmd.DeviceMesh:
    return spmd.DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape).tolist(), mesh_dim_names=names)


def started(user, width=4):
    torch.manual_seed(0)
    model = user.Net()
    model.up = nn.Linear(width, 8)
    return model, optim.SGD(model.parameters(), lr=0.1)


def called(step, user, rows=4, width=4, before=lambda model, optimizer: None):
    model, optimizer = started(user, width)
    before(model, optimizer)
    return step(model, optimizer, torch.ones(rows, width)).full_tensor().reconcile()


def count_captures():
    real = CompiledStep._capture_and_expand
    return mock.patch.object(CompiledStep, "_capture_and_expand", autospec=True, side_effect=real)


@pytest.fixture(scope="module")
def saved(imported, tmp_path_factory):
    """A file that the step was saved in; beside it a cache folder that has the program."""
    folder = tmp_path_factory.mktemp("saved")
    with LocalTensorMode(4):
        step = spmd.compile(imported.step, mesh_of(2, 2), params=PARAMS, inputs=INPUTS, cache=folder / "cache")
        called(step, imported)
        step.save(folder / "step.spmd")
    return folder / "step.spmd"


# ---- what differs is named --------------------------------------------------------------------


def rewritten(user, name, old, new):
    file = Path(sys.modules[name].__file__)
    source = file.read_text()
    assert old in source
    file.write_text(source.replace(old, new))
    os.utime(file, ns=(1, 1))  # another time, however fast this is


def changed_line(user, patch):
    rewritten(user, user.__name__, "* self.p", "/ self.p")
    return {}


def changed_helper(user, patch):
    rewritten(user, user.bent.__module__, "torch.relu(x)", "torch.tanh(x)")
    return {}


def changed_later_import(user, patch):
    rewritten(user, user.__name__.replace("train", "late"), "x * 2", "x * 3")
    return {}


def changed_global(user, patch):
    patch.setattr(user, "SCALE", 3.0)
    return {}


def changed_table(user, patch):
    patch.setattr(user, "TABLE", [2.0] * 200)
    return {}


def changed_context(user, patch):
    patch.setattr(user, "CONTEXT", contextvars.ContextVar("context", default=3.0))
    return {}


def changed_in_memory(user, patch):
    """As where the file was edited after it was imported, and code reaches the function by a computed name."""
    patch.setattr(user.hidden, "__code__", (lambda x: x * 3.0).__code__)
    return {}


def changed_beneath_a_cache(user, patch):
    patch.setattr(user, "FACTOR", 3.0)
    return {}


def changed_class_attribute(user, patch):
    patch.setattr(user.Net, "kept", 3.0)
    return {}


def changed_behind_a_hook(user, patch):
    patch.setattr(user, "RATE", 3.0)
    return {}


def changed_attribute(user, patch):
    return {"before": lambda model, optimizer: setattr(model, "p", 0.25)}


def changed_flag(user, patch):
    return {"before": lambda model, optimizer: model.eval()}


def changed_class(user, patch):
    return {"before": lambda model, optimizer: setattr(model, "down", nn.Bilinear(8, 8, 2))}


def changed_option(user, patch):
    return {"before": lambda model, optimizer: optimizer.param_groups[0].update(nesterov=True)}


def other_rows(user, patch):
    return {"rows": 6}


def other_width(user, patch):
    return {"width": 5}


MUTATIONS = {
    changed_line: "code of train_.*: it has changed",
    changed_helper: "code of helper_.*: it has changed",
    changed_later_import: "code of late_.*: it has changed",
    changed_global: r"value train_.*\.SCALE: '2.0' was saved, and here it is '3.0'",
    changed_table: r"value train_.*\.TABLE: '200 items .*' was saved, and here it is '200 items",
    changed_context: "CONTEXT around the step: '1.0' was saved, and here it is '3.0'",
    changed_in_memory: "code of train_.*: it has changed",
    changed_beneath_a_cache: r"value train_.*\.FACTOR: '1.0' was saved, and here it is '3.0'",
    changed_class_attribute: r"value train_.*Net\.kept: '1.0' was saved, and here it is '3.0'",
    changed_behind_a_hook: r"value train_.*\.RATE: '1.0' was saved, and here it is '3.0'",
    changed_attribute: r"model\.p: '0.5' was saved, and here it is '0.25'",
    changed_flag: r"model\.training: 'True' was saved, and here it is 'False'",
    changed_class: r"model\.down: 'type torch.nn.modules.linear.Linear' was saved, and here it is '.*Bilinear'",
    changed_option: r"optimizer\.param_groups\.0\.nesterov: 'False' was saved, and here it is 'True'",
    other_rows: r"argument x: .*f32\[4@dp, 4\].* was saved, and here it is .*f32\[6@dp, 4\]",
    other_width: r"parameter model\.up\.weight: 'f32\[8@tp, 4\], requires gradient' was saved, and here .*\[8@tp, 5\]",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_call_that_nothing_was_saved_for_names_what_differs(mutate, user, saved, monkeypatch):
    with LocalTensorMode(4):
        step = spmd.load_step(saved, user.step, mesh_of(2, 2))
        with pytest.raises(StaleStep, match=MUTATIONS[mutate]):
            called(step, user, **mutate(user, monkeypatch))


def applied(function, x):
    return function(x)


def test_the_file_of_a_function_that_is_given_counts(user):
    """Also where no file of the step imports it."""
    late = importlib.import_module(user.__name__.replace("train", "late"))
    step = spmd.compile(applied, mesh_of(2, 2))
    assert f"code of {late.__name__}" in step._wanted(step._call((late.twice, torch.ones(4)), {}, True)).key


def looked_up(several, x):
    return x * several.get("factor", 2.0)


def test_no_address_is_in_a_key():
    """A dict that calls a function, as a GradScaler has, is the same in another process."""
    step = spmd.compile(looked_up, mesh_of(2, 2))
    dicts = [defaultdict(types.FunctionType(looked_up.__code__, globals())) for _ in range(2)]
    a, b = [step._wanted(step._call((each, torch.ones(4)), {}, True)).key for each in dicts]
    assert a == b


def test_what_differs_before_any_call(user, saved, monkeypatch):
    with pytest.raises(StaleStep, match=r"mesh tp: '2' was saved, and here there is none"):
        spmd.load_step(saved, user.step, mesh_of(2, 2, names=("dp", "cp")))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(StaleStep, match=r"torch: '2.*' was saved, and here it is '2.99.0'"):
        spmd.load_step(saved, user.step, mesh_of(2, 2))


def test_other_placements_are_other_programs(user, tmp_path):
    """A tensor that is placed otherwise is another input."""
    with LocalTensorMode(4):
        mesh = mesh_of(2, 2)
        compiled = spmd.compile(user.step, mesh, params=PARAMS)
        model, optimizer = started(user)
        compiled(model, optimizer, spmd.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()]))
        compiled.save(tmp_path / "step.spmd")
        step = spmd.load_step(tmp_path / "step.spmd", user.step, mesh)
        with pytest.raises(StaleStep, match=r"argument x: .*4@dp, 4.* was saved, and here .*f32\[4, 4@tp\]"):
            model, optimizer = started(user)
            step(model, optimizer, spmd.distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(1)]))


# ---- other numbers of ranks -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 2), (1, 2), (3, 1)], ids=str)
def test_other_numbers_of_ranks(user, saved, shape):
    """Nothing in this program was made for a number of ranks, as long as there is more than one, or it says so."""
    with LocalTensorMode(torch.Size(shape).numel()):
        step = spmd.load_step(saved, user.step, mesh_of(*shape))
        if 1 in shape:
            with pytest.raises(StaleStep, match="f32"):
                called(step, user)
            return
        compiled = spmd.compile(user.step, mesh_of(*shape), params=PARAMS, inputs=INPUTS)
        torch.testing.assert_close(called(step, user), called(compiled, user))


def rowed(x):
    return x.cumsum(0)


def test_what_was_made_for_a_number_of_ranks_says_so(tmp_path):
    with LocalTensorMode(4):
        step = spmd.compile(rowed, mesh_of(2, 2), inputs=INPUTS)
        step(torch.ones(8, 4))
        step.save(tmp_path / "step.spmd")
    with LocalTensorMode(8), pytest.raises(StaleStep, match=r"does not fit other numbers of ranks, dp from 2 to 4"):
        spmd.load_step(tmp_path / "step.spmd", rowed, mesh_of(4, 2))(torch.ones(8, 4))


# ---- a folder ---------------------------------------------------------------------------------


def test_a_second_start_captures_nothing(user, tmp_path):
    folder = tmp_path / "cache"
    with LocalTensorMode(4), count_captures() as captures:
        texts = []
        for _ in range(2):
            step = spmd.compile(user.step, mesh_of(2, 2), params=PARAMS, inputs=INPUTS, cache=folder)
            called(step, user)
            texts.append(str(step.program))
        assert captures.call_count == 1 and texts[0] == texts[1]
        called(spmd.compile(user.step, mesh_of(2, 2), params=PARAMS, inputs=INPUTS, cache=folder), user, rows=6)
        assert captures.call_count == 2 and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "bits", "text", "line"])
def test_a_damaged_file_is_told_and_replaced(user, saved, tmp_path, damage):
    with LocalTensorMode(4), count_captures() as captures:
        shutil.copytree(saved.parent / "cache", tmp_path / "cache")
        (file,) = (tmp_path / "cache").iterdir()
        damaged(file, damage)
        again = spmd.compile(user.step, mesh_of(2, 2), params=PARAMS, inputs=INPUTS, cache=tmp_path / "cache")
        with pytest.warns(UserWarning, match="it is not used|is not used, and will be replaced"):
            called(again, user)
        assert captures.call_count == 1
        called(spmd.compile(user.step, mesh_of(2, 2), params=PARAMS, inputs=INPUTS, cache=tmp_path / "cache"), user)
        assert captures.call_count == 1
    file.write_bytes(b"nothing")
    with pytest.raises(UnreadableStep, match="is no saved step, or it is damaged"):
        spmd.load_step(file, user.step, mesh_of(2, 2))


def damaged(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif how == "bits":
        with zipfile.ZipFile(file) as z:
            at = z.getinfo("0/program.txt").header_offset + 60
        file.write_bytes(data[:at] + bytes(x ^ 255 for x in data[at : at + 8]) + data[at + 8 :])
    else:  # a program that no other process would run: sound as an archive
        settings, (entry,) = archive.read(file)
        text = entry.program.replace("all_reduce(", "no_such_move(" if how == "text" else "slice(", 1)
        assert text != entry.program
        archive.write(file, settings, [archive.Entry(entry.key, text, entry.calling, entry.constants)])


def test_a_folder_of_others_is_read(user, saved, monkeypatch):
    """One may not write there: what is kept is used, and what is not is told."""
    monkeypatch.setattr(os, "utime", mock.Mock(side_effect=PermissionError))
    monkeypatch.setattr(archive, "write_in_one_go", mock.Mock(side_effect=PermissionError("no place")))
    with LocalTensorMode(4), count_captures() as captures:
        step = spmd.compile(user.step, mesh_of(2, 2), params=PARAMS, inputs=INPUTS, cache=saved.parent / "cache")
        called(step, user)
        assert not captures.call_count
        with pytest.warns(UserWarning, match="is not kept in .* no place"):
            called(step, user, rows=6)


def test_a_full_disk_loses_nothing(saved, tmp_path, monkeypatch):
    settings, entries = archive.read(saved)
    archive.write(tmp_path / "x.spmd", settings, entries)
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        archive.write(tmp_path / "x.spmd", settings, [])
    assert archive.read(tmp_path / "x.spmd")[1] == entries and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "y").touch()
    assert (tmp_path / "x.spmd").stat().st_mode == (tmp_path / "y").stat().st_mode  # others may read it


def test_many_write_at_once(user, saved, tmp_path):
    """Every reader sees a whole file, and nothing is left behind."""
    settings, entries = archive.read(saved)
    file = tmp_path / "shared" / "x.spmd"
    file.parent.mkdir()
    archive.write(file, settings, entries)

    def work(i):
        archive.write(file, settings, entries)
        return archive.read(file)[1] == entries

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))
    assert [f.name for f in file.parent.iterdir()] == ["x.spmd"]


def test_a_folder_has_a_bound(user, saved, tmp_path):
    """The files that were used last are kept."""
    (entry,) = archive.read(saved)[1]
    folder = Folder(tmp_path / "cache", most_bytes=0)
    folder.path.mkdir()
    files = [folder.path / f"{i}.spmd" for i in range(3)]
    for i, file in enumerate(files):
        archive.write(file, "", [entry])
        os.utime(file, (100 - i, 100 - i))
    folder.most_bytes = 2 * files[0].stat().st_size
    folder._trim(keep=files[2])
    assert sorted(folder.path.iterdir()) == [files[0], files[1], files[2]][:2] + [files[2]]


def started_anew(train: str) -> tuple[int, str, float]:
    """How often the step of this module is captured here, the program's fingerprint, and the loss of its first call."""
    user = importlib.import_module(train)
    with LocalTensorMode(4), count_captures() as captures:
        step = spmd.compile(user.step, mesh_of(2, 2), params=PARAMS, inputs=INPUTS)
        loss = called(step, user).item()
        return captures.call_count, step.program.fingerprint, loss


def test_other_processes_with_other_hash_seeds(user, saved, gloo4):
    """One makes the same program of the same files; one, with a folder in its environment, takes it from there."""
    folder = str(Path(user.__file__).parent)
    with LocalTensorMode(4):
        step = spmd.load_step(saved, user.step, mesh_of(2, 2))
        loss = called(step, user).item()
    for captures, *found in gloo4.run(_captured_there, user.__name__, folder):
        assert (captures, *found) == (1, step.program.fingerprint, loss)
    script = "import sys; from tests.expand.kept.test_library import started_anew; print(*started_anew(sys.argv[1]))"
    path = os.pathsep.join([str(ROOT), folder])
    environment = os.environ | {"PYTHONPATH": path, "SPMD_CACHE": str(saved.parent / "cache"), "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, user.__name__], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["0", step.program.fingerprint, str(loss)], done.stderr


def _captured_there(rank: int, train: str, folder: str) -> tuple[int, str, float]:
    """On a process of the pool. It forgets the user's files again."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return started_anew(train)
    finally:
        sys.path.remove(folder)


def test_a_file_is_text_and_tensors(saved):
    """No part is a pickle but that of torch's tensors, which loads no code."""
    with zipfile.ZipFile(saved) as z:
        names = sorted(z.namelist())
        assert names == ["0/calling.txt", "0/constants.pt", "0/key.json", "0/program.txt", "step.json"]
        key, program = json.loads(z.read("0/key.json")), z.read("0/program.txt").decode()
    assert key["mesh dp"] == "2" and key["torch"] == torch.__version__
    assert "= all_reduce('tp')(" in program and "bucket(all_reduce('dp'))([" in program
