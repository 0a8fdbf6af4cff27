"""Fixtures for all tests."""

from __future__ import annotations

import functools
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sampled import is_sampled
from workers import Pool

from tests.audit.beside import audited

FUNCTIONS = {name: x for name, x in vars(torch).items() if callable(x) and not name.startswith("_")}

LONG = (
    "expand/test_blocks", "expand/test_loops.py", "expand/test_loop_fuzz.py", "expand/choose/test_budget.py",
    "expand/test_changes.py", "cli/test_demo.py", "parallel/test_context_parallel.py", "comm/test_adjoint.py",
    "expand/test_wild.py", "expand/test_random_sessions.py", "tensor/test_sweep.py", "tensor/eager/test_dispatch.py",
    "tensor/test_oracle.py", "sim/test_ways.py", "tensor/test_fuzz.py", "cli/test_calibrate.py", "docs/",
)  # fmt: skip
"""Files with tests of many seconds. They come first, so that none of them is left to one core at the end; first of all
those of stamped blocks, which a process in which much has run before may not stamp."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=("sampled", "rest", "all"), default="sampled",
        help="of tests with many cases: some, which is the default; the rest; or all (tests/sampled.py)",
    )  # fmt: skip
    parser.addoption(
        "--audit", type=int, default=0, metavar="CALLS",
        help="how many calls of each compiled step are made beside one device, too (tests/audit/beside.py)",
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not asked for, and sort the long files to the front; all else stays in order."""
    if "nightly" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    cases = config.getoption("cases")
    if cases != "all" and not any("::" in arg for arg in config.args):  # a test that is named is run
        sampled = is_sampled(_path(item) + item.nodeid[item.nodeid.find("::") :] for item in items)
        wanted = [item for item, is_in in zip(items, sampled, strict=True) if is_in == (cases == "sampled")]
        config.hook.pytest_deselected(items=list(set(items) - set(wanted)))
        items[:] = wanted
    items.sort(key=lambda item: next((i for i, long in enumerate(LONG) if _path(item).startswith(long)), len(LONG)))


def _path(item: pytest.Item) -> str:
    """The path of a test's file below this folder."""
    return _below(item.path)


@functools.cache
def _below(path: Path) -> str:
    root = Path(__file__).parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


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


@pytest.fixture(autouse=True)
def steps_leave_what_one_device_leaves(request: pytest.FixtureRequest) -> Iterator[None]:
    """No compiled step leaves dead tensors or symbols of a capture behind; with --audit, nothing else that one device
    would not. A test marked `not_audited` says why that is not for it."""
    if request.node.get_closest_marker("not_audited"):
        yield
        return
    with audited(request.config.getoption("audit")) as audit:
        yield
    found = audit.found()
    AUDITED.update({"checked": audit.checked, "compared": audit.compared, **audit.alone})
    assert not found, "\n".join(found)


AUDITED: Counter[str] = Counter()
"""How many calls of compiled steps were audited, and how many were not compared with one device, by reason."""


@pytest.fixture(scope="session")
def gloo4() -> Iterator[Pool]:
    """Four processes on gloo, started at the first test that asks and reused by all; `gloo4.run(fn, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """A real process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: simulated ranks are threads already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how many cases a test ran that counts them: `record_property("cases", ...)`."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "cases":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
    if terminalreporter.config.getoption("audit"):
        terminalreporter.write_line(f"audited calls: {dict(AUDITED)}")
