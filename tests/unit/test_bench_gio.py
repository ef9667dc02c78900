"""`tutti bench gio` runs, compares what it reads, and reports what it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti_core.bench import gio
from tutti_core.bench.gio import GioPlan, Rig, run_gio
from tutti_core.bench.measure import BenchError
from tutti_core.cli import main
from tutti_core.errors import ConfigError

PEER = """#!/bin/sh
echo "null (protocol only)  read  bs   4096 QD 128:   99999999 IOPS"
echo "memory, 1 GiB         write bs   4096 QD 128:   88888888 IOPS"
echo "memory, 1 GiB         read  bs   4096 QD 128 batch<= 32:   1000 IOPS   4.1 MB/s"
echo "memory, 1 GiB         read  bs  65536 QD 128:   77777777 IOPS"
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gio, "NAMESPACE_BYTES", 16 << 20)
    monkeypatch.setattr(gio, "PREPARES", 3)


def peer(folder: Path, text: str = PEER) -> Path:
    program = folder / "peer"
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    options = ["--rounds", "1", "--seconds", "0.05", "--peer", str(peer(tmp_path))]
    assert main(["bench", "gio", *options, "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    fields = "iocb_prepare_us commands_per_doorbell iops_4k iops_4k_ratio_lab gib_s_64k".split()
    assert all(report[field] > 0 for field in fields)
    assert report["peer_iops_4k"] == 1000
    assert report["iops_4k_ratio_lab"] == pytest.approx(report["iops_4k"] / 1000, rel=0.02)
    assert {target["name"] for target in report["targets"]} >= {"iocb_prepare_us", "gib_s_64k"}
    assert "commands_per_doorbell" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("iops", "peer_iops", "name", "met"),
    [
        (400_000.0, 900_000.0, "iops_4k", True),
        (200_000.0, 220_000.0, "iops_4k_ratio_lab", True),
        (200_000.0, 400_000.0, "iops_4k_ratio_lab", False),
        (200_000.0, None, "iops_4k", False),
    ],
)
def test_a_slow_machine_is_measured_by_the_peer(
    iops: float, peer_iops: float | None, name: str, met: bool
) -> None:
    raw = {
        key: [50.0]
        for key in ["iocb_prepare_us", "iocb_prepare_64_us", "commands_per_doorbell", "gib_s_64k"]
    }
    raw |= {"iops_4k": [iops]} | ({} if peer_iops is None else {"peer_iops_4k": [peer_iops]})
    named = {target["name"]: target["met"] for target in gio._report(raw)["targets"]}
    assert named[name] is met and len(named) == 4


def test_without_a_peer_there_is_no_ratio() -> None:
    report = run_gio(GioPlan(1, 0.02))
    assert report["iops_4k_ratio_lab"] is None and report["peer_iops_4k"] is None
    assert report["commands_per_doorbell"] > 1


def test_wrong_bytes_and_failed_reads_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(4096)
    try:
        rig.compare()
        rig._soft.inject("flip", opcode=2)
        with pytest.raises(BenchError, match="wrong bytes"):
            rig.compare()
        rig._soft.inject("status", opcode=2, status=0x281)
        with pytest.raises(BenchError, match="failed"):
            rig.compare()
        monkeypatch.setattr(gio, "TIMEOUT_S", 0.05)
        rig._soft.inject("hold", opcode=2)
        with pytest.raises(BenchError, match="did not end"):
            rig.wait(rig.issue()[0])
        rig._soft.release()
    finally:
        rig.close()


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0])
def test_impossible_plans_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="seconds"):
        run_gio(GioPlan(1, seconds))
    with pytest.raises(ConfigError, match="rounds"):
        run_gio(GioPlan(0, 1.0))


def test_a_run_compares_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control goes through the run itself: a byte that is wrong at the end of one ends it."""
    real = Rig.compare

    def flipped(rig: Rig) -> None:
        rig._soft.inject("flip", opcode=2)
        real(rig)

    monkeypatch.setattr(Rig, "compare", flipped)
    with pytest.raises(BenchError, match="wrong bytes"):
        run_gio(GioPlan(1, 0.02))


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh\nexit 3\n",
        "#!/bin/sh\necho nothing\n",
        "#!/bin/sh\nprintf '\\377\\376'\n",
        "no program at all",
    ],
)
def test_a_peer_that_says_nothing_ends_the_run(tmp_path: Path, text: str) -> None:
    with pytest.raises(BenchError, match="peer"):
        run_gio(GioPlan(1, 0.02, peer(tmp_path, text)))
    with pytest.raises(ConfigError, match="cannot be run"):
        run_gio(GioPlan(1, 0.02, tmp_path / "absent"))
