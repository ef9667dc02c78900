"""integration/gpu/check.sh runs where there is no GPU, says what it did not run, and can fail."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cupy_arrays import DeviceArrays
from cupy_stand_in import StandInCupy, build_driver, build_runner

from tutti_core.gio.cuda_executor import CudaExecutor

FOLDER = Path(__file__).resolve().parents[2] / "integration" / "gpu"
STEPS = {"machine", "queue", "ring", "order", "transport", "memcheck", "racecheck", "speed"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FOLDER / "check.sh"), *arguments], capture_output=True, text=True, timeout=600,
        check=False, env={**os.environ, "PYTHON": sys.executable, **environment},
    )  # fmt: skip


def test_a_dry_run_runs_all_that_needs_no_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("--dry-run", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert {entry["step"] for entry in found["checks"]} == STEPS
    assert all(entry["ok"] is not False for entry in found["checks"])
    left_out = {entry["check"] for entry in found["checks"] if entry["ok"] is None}
    assert left_out == {
        "memcheck", "racecheck", "order: a stream after a launch", "speed: a GEMM beside it",
    }  # fmt: skip
    assert all(f"not run {name}" in re.sub(" +", " ", done.stdout) for name in left_out)
    rows = {(row["data"], row["sms"]): row for row in found["speed"] if row["what"] == "gio"}
    assert rows.keys() == {("pinned", sms) for sms in (1, 2, 4, 8)}
    assert all(row["commands_s_4k"] > 0 and row["cpu_us_iocb_64k"] > 0 for row in rows.values())
    assert found["environment"]["executor"] == "cpu" and found["seeds"]["ring"]


def test_without_a_gpu_it_says_so_and_exits_77(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('there is none')\n")
    report = tmp_path / "report.json"
    done = run("--json", str(report), PYTHONPATH=str(tmp_path))
    assert done.returncode == 77 and "no GPU check: CuPy cannot be imported" in done.stderr
    assert not report.exists()


def on_stand_ins(
    sections: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict[str, Any]]:
    """Run the script as on a GPU; exit status and report."""
    library = build_driver(tmp_path)
    stand_in = StandInCupy(build_runner(tmp_path))
    modules = stand_in.modules()
    DeviceArrays(stand_in, ctypes.CDLL(str(library))).add_to(modules)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(FOLDER))
    report = tmp_path / "report.json"
    given = ["gio_check", "--quick", "--sections", sections, "--json", str(report)]
    monkeypatch.setattr(sys, "argv", given)
    try:
        rig, check = (importlib.import_module(name) for name in ("gio_rig", "gio_check"))
        monkeypatch.setattr(rig, "CUDA_LIBRARY", str(library))
        status = check.main()
    finally:
        stand_in.close()
        for name in ("gio_rig", "gio_check", "gio_speed", "check_report"):
            sys.modules.pop(name, None)
    assert not stand_in.apart
    return status, json.loads(report.read_text())


@pytest.mark.parametrize("sections", ["machine,order,small", "ring", "speed"])
def test_what_it_does_with_a_gpu_runs_against_stand_ins(
    sections: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = on_stand_ins(sections, tmp_path, monkeypatch)
    assert status == 0 and all(entry["ok"] for entry in found["checks"]), found["checks"]
    assert found["environment"]["gpu"] == "stand-in"
    if sections == "ring":
        names = {entry["check"] for entry in found["checks"]}
        assert {"ring, data in device memory, SGL", "ring, data in device memory, PRP"} <= names
    if sections == "speed":
        rows = [row for row in found["speed"] if row["what"] == "gio"]
        assert {(row["data"], row["sms"]) for row in rows} >= {("device", 8), ("pinned", 1)}
        assert all("gemm_slowdown_pct" in row and row["of_copy_engine_64k"] > 0 for row in rows)


def test_the_check_of_order_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaExecutor, "after", lambda self, ring, stream: None)
    status, found = on_stand_ins("order", tmp_path, monkeypatch)
    assert status == 1 and [entry["ok"] for entry in found["checks"]] == [False]


BROKEN = {
    # bytes that are not what was asked for
    "wrong_bytes": (
        "import gio_rig as r; p = r.Rig.prepare\n"
        "def prepare(self, op, plan):\n"
        "    self.soft.inject('flip', count=1)\n"
        "    return p(self, op, plan)\n"
        "r.Rig.prepare = prepare",
        "ring",
    ),
    # bytes where none were asked for
    "stray_bytes": (
        "import gio_rig as r; w = r.Rig.wait\n"
        "def wait(self, iocb):\n"
        "    found = w(self, iocb)\n"
        "    self.memory.bytes[:] = self.memory.bytes + (self.memory.bytes == r.POISON)\n"
        "    return found\n"
        "r.Rig.wait = wait",
        "ring",
    ),
    # commands that never end
    "lost": (
        "import gio_rig as r; p = r.Rig.prepare; r.WAIT_S = 1.0\n"
        "def prepare(self, op, plan):\n"
        "    self.soft.inject('lose', count=1)\n"
        "    return p(self, op, plan)\n"
        "r.Rig.prepare = prepare",
        "small",
    ),
    # a ring that has nothing
    "nothing": ("import gio_check as c; c.SECTIONS['ring'] = lambda run: None", "ring"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_finds_what_is_broken_on_purpose(name: str, tmp_path: Path) -> None:
    prelude, section = BROKEN[name]
    report = tmp_path / "report.json"
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{prelude}\n"
        "import gio_check; sys.exit(gio_check.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--executor", "cpu", "--quick", "--sections", section,
         "--json", str(report)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    checks: list[dict[str, Any]] = json.loads(report.read_text())["checks"]
    assert any(entry["ok"] is False for entry in checks) or not checks


def test_a_step_without_a_report_fails(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text('{"checks": [{"check": "a", "ok": true, "detail": ""}]}')
    for steps, status in (
        (["good=good.json"], 0),
        (["good=good.json", "killed=killed.json"], 1),
        (["killed=killed.json"], 1),
    ):
        done = subprocess.run(
            [sys.executable, str(FOLDER / "check_report.py"), "out.json", *steps],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr


def test_the_limits_of_the_steps_are_below_six_minutes() -> None:
    text = (FOLDER / "check.sh").read_text()
    steps = re.search(r"^steps=\((.*)\)$", text, re.MULTILINE)
    assert steps
    limits = [int(step.split(":")[1]) for step in steps[1].split()]
    sanitizer = re.search(r"^sanitizer_limit=(\d+)$", text, re.MULTILINE)
    assert sanitizer and sum(limits) + 2 * int(sanitizer[1]) <= 360
