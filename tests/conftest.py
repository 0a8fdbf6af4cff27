"""Fixtures for all tests."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from workers import Pool

FUNCTIONS = {name: x for name, x in vars(torch).items() if callable(x) and not name.startswith("_")}

LONG = (
    "cli/test_demo.py", "tensor/test_sweep.py", "comm/test_adjoint.py", "tensor/eager/test_dispatch.py",
    "tensor/test_oracle.py", "sim/test_ways.py", "tensor/test_fuzz.py", "cli/test_calibrate.py", "docs/",
)  # fmt: skip
"""Files with tests of many seconds. They come first, so that none of them is left to one core at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the long files to the front; all else stays in order."""
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
        return next((i for i, long in enumerate(LONG) if path.startswith(long)), len(LONG))

    items.sort(key=place)


def pytest_configure() -> None:
    """Nobody reads the trace that torch can write of its compilers.

    pytest listens to every logger that does not propagate, and for a listener torch writes down each guard on a size
    with its stack: a twelfth of the time of all tests.
    """
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()


def pytest_collection_finish() -> None:
    """The garbage collector, which took a fifth of the time, need not look at what tests and torch consist of."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    """A function of torch that a test replaced, and did not put back, would change the numbers of other tests.

    torch replaces some of its functions itself, when it compiles first.
    """
    yield
    new = {name: vars(torch).get(name) for name, x in FUNCTIONS.items() if vars(torch).get(name) is not x}
    left = [name for name, x in new.items() if not getattr(x, "__module__", "").startswith("torch")]
    vars(torch).update({name: FUNCTIONS[name] for name in left})
    assert not left, f"the test left another torch.{left[0]} behind"


@pytest.fixture(scope="session")
def gloo4() -> Iterator[Pool]:
    """Four processes on gloo, started at the first test that asks and reused by all; `gloo4.run(fn, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how many cases a test ran that counts them: `record_property("cases", ...)`."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "cases":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
