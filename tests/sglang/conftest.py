"""Tests against the real SGLang on a CPU, in the environment of integration/sglang_cpu/setup.sh.

TUTTI_TEST_BACKEND=file runs the same tests with SGLang's own file backend: it validates the
harness, and shows that the checks of damaged pages can fail (that backend verifies nothing).
No __init__.py here: this folder must never be importable as `sglang`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integration"))

from sglang_cpu.backends import Backend
from sglang_cpu.make_model import ensure_model

SGLANG_VERSION = "0.5.23"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sglang: needs SGLang (integration/sglang_cpu/setup.sh)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = _missing_capability()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # SGLang's and torch's, many
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


def backend_under_test() -> str:
    return os.environ.get("TUTTI_TEST_BACKEND", "tutti")


def _missing_capability() -> str | None:
    """What this environment lacks, or None. By metadata: importing sglang takes seconds."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return "sglang isn't installed; run integration/sglang_cpu/setup.sh"
    if found != SGLANG_VERSION:
        return f"sglang {found} is installed, the harness is written for {SGLANG_VERSION}"
    plugins = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
    if "tutti_sglang_cpu" not in plugins:
        return "the CPU stand-ins aren't installed; run integration/sglang_cpu/setup.sh"
    name = backend_under_test()
    if name == "tutti" and "tutti" not in plugins:
        return "tutti isn't installed, so SGLang can't see its plugin; pip install -e ."
    if not shutil.which("g++"):
        return "g++ is missing, SGLang compiles its page hash with it"
    return None


@pytest.fixture(scope="session")
def backend_name() -> str:
    return backend_under_test()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder for one store, removed afterwards: a store may reserve much space."""
    folder = tmp_path / "store"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def backend(backend_name: str, store_folder: Path) -> Backend:
    return Backend(backend_name, store_folder)
