"""Tools of the tests of known bugs; those of the plugin are skipped where tests/sglang's are.

What needs SGLang asks for the fixture `hicache` or `linker`, which import it when they are used.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROUTES = {"hicache", "linker"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sglang: needs SGLang (integration/sglang_cpu/setup.sh)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs SGLang; skip it where that is missing, which TUTTI_STRICT makes a failure."""
    ours = [
        item
        for item in items
        if Path(__file__).parent in item.path.parents and ROUTES & set(item.fixturenames)
    ]
    missing = _rule()._missing_capability() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.sglang)
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def _rule() -> ModuleType:
    """The conftest of tests/sglang, which knows what this environment lacks."""
    path = TESTS / "sglang" / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_sglang", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SmallDisk:
    """A file system of its own, which others can fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def free_bytes(self) -> int:
        facts = os.statvfs(self.folder)
        return facts.f_bavail * facts.f_frsize

    def fill(self, leave_bytes: int) -> None:
        """Another program takes all but this much."""
        size = self.free_bytes() - leave_bytes
        with open(self.folder / "others", "ab") as stream:
            stream.write(bytes(size))

    def clean(self) -> None:
        """The other program has ended, and its file is gone."""
        (self.folder / "others").unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system in memory of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    if os.geteuid() != 0:
        pytest.skip("loop devices need root, and so do mounts")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tutti-test", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine has no loop devices, nor mounts: {made.stderr.strip()}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def hicache() -> ModuleType:
    """The module `route_kit`, for tests of TuttiStorage."""
    kit = _kit()
    kit.make_host_pool("mha", "page_first")  # SGLang loads its plugins with the first one
    return kit


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a tiny model."""
    folder: Path = _kit().ensure_model(tmp_path_factory.mktemp("model"))
    return folder


@pytest.fixture
def linker(served_model: Path) -> Iterator[Any]:
    """Makes linkers over device pools; see `route_kit.Linkers`. What SGLang knows of a server while
    it lasts is taken back afterwards: other tests are outside of one."""
    with _kit().linkers(served_model) as made:
        yield made


def _kit() -> ModuleType:
    for folder in (TESTS.parent / "integration", TESTS / "sglang"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module("route_kit")
