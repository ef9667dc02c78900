"""CI's rule that a promised part may not be skipped can itself fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
CASES = {"sglang isn't installed": 1, "missing capability: stall: nothing": 0}


@pytest.mark.parametrize(("reason", "status"), CASES.items())
def test_an_unexpected_skip_fails_under_strict(reason: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n\n\ndef test_a() -> None:\n    pytest.skip({reason!r})\n\n\n"
        "def test_b() -> None:\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    for strict, expected in (("1", status), ("", 0)):
        environment = {**os.environ, "TUTTI_STRICT": strict}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
        assert done.returncode == expected, done.stdout.decode()
