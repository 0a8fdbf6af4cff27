"""Do scripts written for torch.distributed give the same numbers with other import lines?

    python benchmarks/scripts.py

Runs the scripts of `tests/parallel/scripts` on 4 gloo processes as they are, with torch's own DTensor and FSDP2, and
then with the import lines of `tests/parallel/test_scripts.py`. The table has the largest difference of a loss between
the two, and between the second and one device. torch has no context parallel attention for the CPU; there it says so.
Exits 1 where two differ by more than 1e-9, or what moved does not run.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _table import table

RANKS, ALLOWED = 4, 1e-9


def on_rank(rank: int, port: int, folder: str, results) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    scripts = importlib.import_module("tests.parallel.test_scripts")
    found = {}
    for name in scripts.SCRIPTS:
        text = (scripts.FOLDER / f"{name}.py").read_text()
        for side, main in (("torch", scripts.loaded(text, name)), ("spmd", scripts.moved(name))):
            try:
                found[name, side] = main(f"{folder}/{side}-{name}")
            except Exception as error:
                found[name, side] = f"{type(error).__name__}: {error}".splitlines()[0][:90]
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run() -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(on_rank, (port, folder, results), RANKS, join=False, start_method="spawn")
        found = results.get()
        while not processes.join():
            pass
    return found


def apart(a: list[float] | str, b: list[float] | str) -> float:
    if isinstance(a, str) or isinstance(b, str):
        return math.nan
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def main() -> int:
    scripts = importlib.import_module("tests.parallel.test_scripts")
    found, rows, good = run(), [], True
    for name in scripts.SCRIPTS:
        ours, theirs = found[name, "spmd"], found[name, "torch"]
        one = apart(ours, scripts.alone(0.5 if name == "fsdp2" else math.inf))
        two = apart(ours, theirs)
        good &= one <= ALLOWED and (two <= ALLOWED or isinstance(theirs, str))
        rows.append([name, f"{one:.0e}", "" if isinstance(theirs, str) else f"{two:.0e}",
                     next((x for x in (ours, theirs) if isinstance(x, str)), "")])  # fmt: skip
    print(table(["script", "to one device", "to torch", ""], rows, left=1))
    print(f"\ntorch {torch.__version__}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
