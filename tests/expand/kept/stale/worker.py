"""Runs steps of the table of changes, each in a process of its own that is forked when torch has been imported.

    python worker.py FOLDER fill|again|changed|between_calls < names        a line of JSON for each row
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import torch

import spmd
from spmd import LocalTensorMode
from spmd.expand.compile import CompiledStep
from tests.expand.kept.stale.changes import CHANGES, Change

CALLS = 3


def imported(change: Change, file: Path, name: str) -> types.ModuleType:
    """The user's file, with arguments made."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    vars(module)["spmd"] = spmd
    spec.loader.exec_module(module)
    vars(module)["ARGS"] = module.make()
    return module


def write(change: Change, folder: Path, is_changed: bool) -> Path:
    """The user's file, as it is in a run."""
    file = folder / f"user_{CHANGES.index(change)}.py"
    text = change.source
    if change.edit and is_changed:
        assert change.edit[0] in text, change.name
        text = text.replace(*change.edit)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    return file


class User:
    """A step of the user, called as it is and compiled: of two imports of one file, so that neither sees the other."""

    def __init__(self, change: Change, folder: Path, is_changed: bool) -> None:
        file = write(change, folder, is_changed)
        self.compiled = imported(change, file, file.stem)
        self.plain = imported(change, file, f"plain_{file.stem}")
        self.cache, self.captures, self.step = folder / f"cache_{file.stem}", 0, None

    def do(self, text: str) -> None:
        """Do something in the variables of both."""
        for module in (self.plain, self.compiled):
            exec(compile(text, "<change>", "exec"), vars(module))

    def outcome(self) -> dict[str, Any]:
        """What both give, or the error of the compiled one, and how often it was captured."""
        state = torch.get_rng_state()
        wanted = [_numbers(self.plain.step(*self.plain.ARGS)) for _ in range(CALLS)]
        torch.set_rng_state(state)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = self._compiled()
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        said = [text for each in said if "is not kept" in (text := str(each.message)) or "not used" in text]
        return {"wanted": wanted, "found": found, "captures": self.captures, "said": said}

    def _compiled(self) -> list[list[float]]:
        how = dict(getattr(self.compiled, "HOW", {}))
        ranks, axis = how.pop("ranks", 2), how.pop("axis", "dp")
        with LocalTensorMode(ranks):
            if self.step is None:
                mesh = spmd.DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=(axis,))
                self.step = spmd.compile(self.compiled.step, mesh, cache=self.cache, **how)
            return [_numbers(self.step(*self.compiled.ARGS)) for _ in range(CALLS)]


def _numbers(x: Any) -> list[float]:
    if hasattr(x, "full_tensor"):
        x = x.full_tensor()
        x = x.reconcile() if hasattr(x, "reconcile") else x
    return torch.as_tensor(x).detach().double().flatten().tolist()


def run(change: Change, folder: Path, phase: str) -> list[dict[str, Any]]:
    user = User(change, folder, phase == "changed")
    real = CompiledStep._capture_and_expand

    def counted(step, call):
        user.captures += 1
        return real(step, call)

    CompiledStep._capture_and_expand = counted
    user.do(change.now if phase == "changed" else change.then)
    found = [user.outcome()]
    if phase == "between_calls":
        user.do(change.now)
        found.append(user.outcome())
    return found


def forked(change: Change, folder: Path, phase: str) -> list[dict[str, Any]]:
    """The same, in a process that is left as it was."""
    read, written = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        try:
            found = run(change, folder, phase)
        except BaseException as error:
            found = [{"broken": f"{type(error).__name__}: {error}"}]
        with open(written, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(written)
    with open(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def warm_up() -> None:
    """Import what a capture imports, before there are forks."""
    change = next(change for change in CHANGES if change.group == "optimisers")
    with tempfile.TemporaryDirectory() as folder:
        User(change, Path(folder), False).outcome()


def main() -> None:
    warnings.simplefilter("ignore")
    folder, *phases = Path(sys.argv[1]), *sys.argv[2:]
    wanted = set(sys.stdin.read().split("\n"))
    torch.set_num_threads(1)
    warm_up()
    for change in CHANGES:
        if change.name in wanted:
            found = {phase: forked(change, folder, phase) for phase in phases}
            print(json.dumps([change.name, found]), flush=True)


if __name__ == "__main__":
    main()
