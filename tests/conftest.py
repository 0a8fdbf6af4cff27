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
