"""``python -m spmd calibrate`` as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spmd
from spmd.cli import main
from spmd.cli.launch import LAUNCHER_VARIABLES

ROOT = Path(__file__).parents[2]


def test_two_ranks_write_a_file_that_plans_are_priced_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    path = tmp_path / "two.json"
    options = ["--nproc", "2", "--max-bytes", "64K", "--rounds", "2", "--name", "two", "--out", str(path)]
    job = subprocess.run(
        [sys.executable, "-m", "spmd", "calibrate", *options],
        env={**plain, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    table, [counts, spread, where] = job.stdout.splitlines()[:-3], job.stdout.splitlines()[-3:]
    assert re.fullmatch(r"2 ranks, gloo, 2 rounds, load \S+ before; 8 curves", counts)
    held_out = re.fullmatch(r"held-out error: median .*%, half of them .*, largest .*% \((\d+) sizes\)", spread)
    assert where == f"wrote {path}; plans are priced by it where SPMD_TOPOLOGY={path}"
    assert sum("%" in line for line in table) == int(held_out[1]) >= 16
    assert sum("all_to_all" in line for line in table) == sum("permute" in line for line in table)

    monkeypatch.setenv("SPMD_TOPOLOGY", str(path))
    machine = spmd.init_device_mesh("cpu", (2,)).topology.machine
    assert machine.name == "two" and {curve.ranks_per_host for curve in machine.measured} == {1, 2}


@pytest.mark.parametrize(
    "options, message",
    [
        ("--mesh 2x", "'2x' is not a mesh"),
        ("--mesh 2x3", "a mesh of 2x3 has 6 ranks, and there are 4"),
        ("--nproc 1", "one rank has no other to send to"),
        ("--max-bytes 16X", "'16X' is not a number of bytes. Give one such as 4096, 64K, 16M or 1G."),
        ("--max-bytes 1K", "a bandwidth needs messages of 64K and more"),
        ("--out no/such/folder/x.json", "there is no folder"),
        ("--rounds 0", "'0' is not a whole number of at least 1"),
    ],
)
def test_bad_input_is_told_before_any_rank_starts(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("spmd.cli.calibrate.launch", None)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    try:
        code = main(["calibrate", *options.split()])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 2 and message in said.err and said.out == ""
