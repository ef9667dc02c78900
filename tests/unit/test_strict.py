"""The rules that all tests are under can themselves fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CASES = {"sglang isn't installed": 1, "missing capability: stall: nothing": 0}


@pytest.mark.parametrize(("reason", "status"), CASES.items())
def test_an_unexpected_skip_fails_under_strict(reason: str, status: int, tmp_path: Path) -> None:
    text = (
        f"import pytest\n\n\ndef test_a() -> None:\n    pytest.skip({reason!r})\n\n\n"
        "def test_b() -> None:\n    pass\n"
    )
    for strict, expected in (("1", status), ("", 0)):
        assert run_tests(tmp_path, text, TUTTI_STRICT=strict)[0] == expected


@pytest.mark.parametrize(("name", "status"), [("tutti-saver", 1), ("another", 0)])
def test_a_thread_that_is_left_behind_fails_its_module(
    name: str, status: int, tmp_path: Path
) -> None:
    text = (
        "import threading\nimport time\n\n\ndef test_a() -> None:\n"
        f"    threading.Thread(target=time.sleep, args=(60,), name={name!r}, daemon=True).start()\n"
    )
    done, said = run_tests(tmp_path, text, TUTTI_THREADS_WAIT_S="0.1")
    assert done == status and ("left threads behind" in said) == bool(status)


def run_tests(folder: Path, text: str, **settings: str) -> tuple[int, str]:
    """Run a module of tests under this project's rules: exit status and output."""
    for file in ("conftest.py", "thread_kit.py"):
        (folder / file).write_text((TESTS / file).read_text())
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout
