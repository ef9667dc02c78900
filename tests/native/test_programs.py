"""The C++ test programs, built plain and run; `sanitize.sh` runs them under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitize.sh")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="missing capability: cmake")
def test_programs(tmp_path: Path) -> None:
    run = subprocess.run(
        [str(SCRIPT), "plain"], capture_output=True, text=True, timeout=540, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    if "skipped" in run.stdout + run.stderr:
        pytest.skip(run.stdout + run.stderr)
    assert run.stdout.count(": ok") == 6
