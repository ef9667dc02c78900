"""Fixtures that all tests share: seeded randomness that names its seed, and store directories."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from thread_kit import WAIT_S, threads_left, tutti_threads

SKIPS_ALLOWED = (
    "missing capability: stall",  # a transport without a hook to hold its batches
    "loop devices need root",
    "this machine has no loop devices",
    "this kernel gives no huge pages",
    "mounting needs root",
    "this machine has no /dev/fuse",
    "the trace ",  # real traces are not part of the project
)
"""Under TUTTI_STRICT, as in CI, any other skip is a failure: it would hide a promised part."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip that is not allowed into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("TUTTI_STRICT"):
        reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else "")
        if not reason.removeprefix("Skipped: ").startswith(SKIPS_ALLOWED):
            report.outcome = "failed"
            report.longrepr = f"skipped under TUTTI_STRICT: {reason}"
    return report


@pytest.fixture(scope="module", autouse=True)
def no_threads_left() -> Iterator[None]:
    """Fails the module whose tests leave threads of a store or a transport behind, once all of its
    fixtures are gone. They would be counted against later tests, and as the product's."""
    before = tutti_threads()
    yield
    left = threads_left(before, float(os.environ.get("TUTTI_THREADS_WAIT_S", WAIT_S)))
    assert not left, f"tests of this module left threads behind: {', '.join(left)}"


class SeededRandom(random.Random):
    """A random source whose repr is its seed, so that a failing test says how to repeat it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed_value = seed

    def __repr__(self) -> str:
        return f"SeededRandom(seed={self.seed_value}; repeat with TUTTI_TEST_SEED)"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> SeededRandom:
    """Random source of one test: seeded by its name, or by TUTTI_TEST_SEED."""
    seed = os.environ.get("TUTTI_TEST_SEED")
    return SeededRandom(int(seed) if seed else zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """A path on the disk at which no store is yet."""
    return tmp_path / "store"


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """An empty directory in memory where there is a /dev/shm: tests that commit need no disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tutti-test-", dir=base))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store_dir(fast_path: Path) -> Path:
    """A path at which no store is yet, in memory where possible."""
    return fast_path / "store"


@pytest.fixture
def resources() -> Iterator[Callable[[], tuple[int, int]]]:
    """Counts this process's open files and threads."""
    yield lambda: (len(os.listdir("/proc/self/fd")), threading.active_count())
