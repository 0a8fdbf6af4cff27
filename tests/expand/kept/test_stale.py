"""Nothing stale: one thing is changed between two runs, or between two calls, and what a program was made for counts.

The table is in `stale/changes.py`. All of it runs nightly (`-m nightly`), a run in a process of its own; the test
command runs some rows, of each kind that was once not seen.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.expand.kept.stale.changes import CHANGES, Change

ROOT = Path(__file__).parents[3]
WORKER = ROOT / "tests/expand/kept/stale/worker.py"

SOME = (
    "another tie of weights", "UserDict", "ctypes number", "methodcaller", "global of a function made by exec",
    "a replaced builtin", "attribute of a module in a plain list",
    "formula of a gradient of a custom op", "value of a replaced method", "a file", "the working directory", "seed",
    "strides of a parameter", "whether it is contiguous",
)  # fmt: skip
"""The rows that the test command runs."""

Outcomes = dict[str, list[dict[str, Any]]]
"""Of a row: by the kind of run, what it has given, once or before and after the change."""


def ran(folder: Path, names: list[str], *phases: str, seed: int = 0) -> dict[str, Outcomes]:
    """The outcomes of rows, in a process with this hash seed, which forks one for each."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(WORKER), str(folder), *phases]
    done = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(map(json.loads, done.stdout.splitlines()))


def faults(change: Change, found: Outcomes) -> list[str]:
    """What is wrong in the runs of a row."""
    (fill,), (again,), (changed,), calls = (found[phase] for phase in ("fill", "again", "changed", "between_calls"))
    runs = {"first run": fill, "second run": again, "changed run": changed}
    if change.between_calls:
        runs |= {"first call": calls[0], "changed call": calls[-1]}
    broken = [f"{name}: {run['broken']}" for name, run in runs.items() if "broken" in run]
    if broken:
        return broken
    said = {name: f"the {name} gives {run['found']}, not {run['wanted']}" for name, run in runs.items()}
    wrong = [said[name] for name, run in runs.items() if is_wrong(change, run)]
    if change.is_kept and (again["captures"] or isinstance(again["found"], str)):
        wrong.append(f"the second run uses no kept program: {again['said'] or again['found']}")
    is_seen = changed["captures"] or isinstance(changed["found"], str)
    if near(change, fill["wanted"], changed["wanted"]) and not is_seen:
        wrong.append("the change changes nothing, and nothing is captured anew")
    return wrong


def is_wrong(change: Change, run: dict[str, Any]) -> bool:
    """Whether a run gives other numbers than one device; an error is none."""
    return not isinstance(run["found"], str) and not near(change, run["found"], run["wanted"])


def near(change: Change, ours: list[list[float]], theirs: list[list[float]]) -> bool:
    sizes = [[len(x) for x in each] for each in (ours, theirs)]
    pairs = [pair for each in zip(ours, theirs, strict=True) for pair in zip(*each, strict=False)]
    return sizes[0] == sizes[1] and all(
        math.isclose(a, b, rel_tol=change.rel_tol, abs_tol=1e-5) or (math.isnan(a) and math.isnan(b)) for a, b in pairs
    )


def test_some_changes_are_seen(tmp_path):
    found = ran(tmp_path, list(SOME), "fill", "again", "changed", "between_calls")
    rows = {change.name: change for change in CHANGES}
    assert {name: wrong for name in SOME if (wrong := faults(rows[name], found[name]))} == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_changes_are_seen(tmp_path, record_property):
    """Each run in a process with another hash seed."""
    names = [change.name for change in CHANGES]
    phases = ("fill",), ("again",), ("changed", "between_calls")
    parts = [ran(tmp_path, names, *each, seed=seed) for seed, each in enumerate(phases)]
    found = {change: {**parts[0][change.name], **parts[1][change.name], **parts[2][change.name]} for change in CHANGES}
    between = sum(change.between_calls for change in found)
    record_property("cases", f"{len(found)} changes, {between} of them between calls, too")
    assert {change.name: wrong for change in found if (wrong := faults(change, found[change]))} == {}


def test_the_table_is_long_enough():
    assert len({change.name for change in CHANGES}) == len(CHANGES) >= 150
    assert sum(change.between_calls for change in CHANGES) >= 34
