"""integration/gpu/linker_check.py runs where there is no GPU, and can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "integration" / "gpu" / "linker_check.py"


def run(tmp_path: Path, prelude: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the script after `prelude`; returns its exit status and report."""
    report = tmp_path / "report.json"
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); {prelude}\n"
        "import linker_check; sys.exit(linker_check.main())"
    )
    given = ["--device", "cpu", "--quick", "--dir", str(tmp_path), "--json", str(report)]
    done = subprocess.run(
        [sys.executable, "-c", code, *given, *arguments],
        check=False, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert report.exists(), done.stderr
    return done.returncode, json.loads(report.read_text())


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    status, report = run(tmp_path, "", "--sections", "round,order,speed")
    assert status == 0
    found = {entry["check"]: entry["ok"] for entry in report["checks"]}
    assert found["round trip, staging, odd sizes, ring 0 KiB"]
    assert found["order, staging: others meanwhile"] and found["speed, staging, mha 16 KiB"]
    assert found["control, staging: rows in use, without the event, is found"] is None
    named = {row["what"] for row in report["speed"]}
    assert {"plain copy, pinned to device", "load, staging, mha 128 KiB"} <= named
    assert report["environment"]["versions"]["torch"]


@pytest.mark.parametrize(
    "broken",
    [
        # rows of the wrong pages
        "S.take = lambda self, t, part, low, high, take=S.take: take("
        "self, type(t)(t.pool, __import__('numpy').roll(t.rows, 1)), part, low, high)",
        # bytes that are reported before they are copied
        "L.place = lambda self: None; L.placed = lambda self, timeout_s: self.drop() or True",
    ],
)
def test_it_finds_a_broken_path(broken: str, tmp_path: Path) -> None:
    prelude = f"import tutti_sglang.staging as m; S, L = m.Staging, m.LoadSpace; {broken}"
    status, report = run(tmp_path, prelude, "--sections", "round")
    assert status == 1
    wrong = [entry for entry in report["checks"] if entry["ok"] is False]
    assert wrong and all("staging" in entry["check"] for entry in wrong)
