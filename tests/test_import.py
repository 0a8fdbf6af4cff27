"""Importing spmd is cheap beside importing torch, and has no side effects."""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "spmd"
RUNS = 3
MOST = 0.15  # of the time that torch's own import takes

TIMED = """
import json, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import spmd
print(json.dumps([middle - start, time.perf_counter() - middle]))
"""

SEEN = """
import gc, json, os, sys, threading, warnings
import torch

def seen():
    tasks = "/proc/self/task"
    return {
        "threads": [threading.active_count(), len(os.listdir(tasks)) if os.path.isdir(tasks) else None],
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "files": sorted(os.listdir(".")),
        "random state": torch.get_rng_state().sum().item(),
        "defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads()],
        "warnings": len(warnings.filters),
        "collects garbage": gc.isenabled(),
    }

before = seen()
import spmd
print(json.dumps([before, seen(), sorted(sys.modules)]))
"""


def in_fresh_process(code: str, **more: Any) -> Any:
    """The JSON that the code prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, **more)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_import_takes_a_small_part_of_the_time_that_torch_takes():
    """The best of a few processes, each of which imports both, so that a busy machine slows both."""
    compileall.compile_dir(PACKAGE, quiet=2)  # as an installer does; torch's bytecode is there too
    torch_s, spmd_s = map(min, zip(*(in_fresh_process(TIMED) for _ in range(RUNS)), strict=True))
    assert spmd_s <= MOST * torch_s, f"import spmd took {spmd_s:.3f} s, import torch {torch_s:.3f} s"


def test_import_has_no_side_effects(tmp_path):
    """No thread, no process group, no file, no setting of torch's or Python's is other than before."""
    before, after, modules = in_fresh_process(SEEN, cwd=tmp_path)
    assert after == before
    # Each takes as long to import as all of spmd, and only captures need them.
    assert not {"sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"} & set(modules)
