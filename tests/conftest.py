"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workers import Pool


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
