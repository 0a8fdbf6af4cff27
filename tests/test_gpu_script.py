"""The script for machines with a GPU runs on a CPU, where each part that needs a GPU says what it would do."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

LONG = "four gloo ranks", "one rank", "Inductor", "passes", "stamped blocks"
FILE = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def test_all_parts_run_on_a_cpu(capsys):
    """Without the processes, the compiler and what is compiled twice, which take long; other tests run these."""
    with mock.patch.object(sys, "path", [str(FILE.parent), *sys.path]):
        spec = importlib.util.spec_from_file_location("gpu", FILE)
        gpu = importlib.util.module_from_spec(spec)
        sys.modules["gpu"] = gpu
        spec.loader.exec_module(gpu)
    try:
        status = gpu.main(["--device", "cpu", *(x for part in LONG for x in ("--but", part))])
    finally:
        del sys.modules["gpu"]
    shown = capsys.readouterr().out
    assert status == 0 and " NO " not in shown, shown
    for part in (
        "simulated ranks", "eager", "attention", "random numbers", "memory", "CUDA graphs", "step time", "launches"
    ):  # fmt: skip
        assert f"| {part} " in shown
    assert "would record" in shown and "needs a GPU" in shown
