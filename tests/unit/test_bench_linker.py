"""`tutti bench linker` and `overlap` run, check what they load, and report what they promise."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti_core import ConfigError
from tutti_core.bench import engines, layered, linker
from tutti_core.bench.layered import Bench, DevicePool, LinkerPlan, Shape, fit
from tutti_core.bench.linker import run_linker
from tutti_core.bench.measure import BenchError
from tutti_core.bench.overlap import OverlapPlan, device_interrupts, pipeline_s, run_overlap
from tutti_core.cli import main

LINKER_FIELDS = {
    "geometry", "pages", "layer0_ms", "all_ms", "fio_ms", "hicache_ms", "python_us_per_layer"
}  # fmt: skip
OVERLAP_FIELDS = {"compute_ms", "io_ms", "ideal_ms", "measured_ms", "over_ideal"}


def small(folder: Path, **settings: Any) -> LinkerPlan:
    return LinkerPlan(
        folder,
        **{"fragment_bytes": (2048,), "pages": (3, 6), "layers": 5, "rounds": 1, **settings},
    )


@pytest.fixture(autouse=True)
def no_extra_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker, "SMALL_BYTES", 0)


# ---- linker ----
@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_the_report(tmp_path: Path) -> None:
    lines: list[str] = []
    report = run_linker(small(tmp_path, fragment_bytes=(2048, 4096)), lines.append)
    assert list(tmp_path.iterdir()) == [] and lines
    assert [(row["geometry"], row["pages"]) for row in report["rows"]] == [
        ("5 x 2 x 2 KiB", 3), ("5 x 2 x 2 KiB", 6), ("5 x 2 x 4 KiB", 3), ("5 x 2 x 4 KiB", 6)
    ]  # fmt: skip
    for row in report["rows"]:
        assert row.keys() >= LINKER_FIELDS and "note" not in row
        assert 0 < row["layer0_ms"] <= row["all_ms"] and row["python_us_per_layer"] > 0
        assert row["fio_ms"] > 0 and row["hicache_ms"] >= row["hicache_read_ms"] > 0
        assert row["fragments"] == row["pages"] * 10
    assert len(report["targets"]) == 3 * len(report["rows"])
    assert report["raw"][0]["layers"] and report["method"]


def test_alone_nothing_else_is_measured(tmp_path: Path) -> None:
    report = run_linker(small(tmp_path, pages=(4,), peers=False))
    (row,) = report["rows"]
    assert row["fio_ms"] is row["hicache_ms"] is row["ratio_fio"] is None and row["all_ms"] > 0
    assert report["targets"][0]["met"] is None


def test_without_fio_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    report = run_linker(small(tmp_path, pages=(4,)))
    (row,) = report["rows"]
    assert "fio is not installed" in report["absent"]["fio"]
    assert row["fio_ms"] is None and row["hicache_ms"] > 0


@pytest.mark.parametrize("name", ["layer_wise", "by_host"])
def test_wrong_bytes_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load = getattr(Bench, name)

    def load_wrong(self: Bench, pages: int) -> Any:
        result = load(self, pages)
        self.pool.arena.bytes[5000] ^= 1
        return result

    monkeypatch.setattr(Bench, name, load_wrong)
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    with pytest.raises(BenchError, match="of 6 pages came back wrong"):
        run_linker(small(tmp_path, pages=(6,)))
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_save", lambda self, pages: None)
    with pytest.raises(BenchError, match="the load failed: 4 of 4 pages"):
        run_linker(small(tmp_path, pages=(4,), peers=False))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fragment_bytes": ()}, "fragments"),
        ({"fragment_bytes": (1000,)}, "fragments"),
        ({"pages": ()}, "pages"),
        ({"pages": (0,)}, "pages"),
        ({"layers": 0}, "layers"),
        ({"rounds": 0}, "rounds"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"ahead": 0}, "ahead"),
        ({"fragment_bytes": (1 << 40,)}, "memory"),
    ],
)
def test_impossible_plans_are_refused(tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_linker(small(tmp_path, **settings))
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_without_room_is_made_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LinkerPlan(tmp_path, pages=(128, 1024))
    least = Shape(32, 128 << 10, 256).memory_bytes(peers=True)
    monkeypatch.setattr(layered, "available_memory_bytes", lambda: least / layered.SHARE_MAX)
    assert fit(plan, 128 << 10) == [(128, 128), (256, 1024)]
    monkeypatch.setattr(layered, "available_memory_bytes", lambda: 1e15)
    free = os.statvfs(tmp_path)
    if free.f_bavail * free.f_frsize * layered.SHARE_MAX > Shape(32, 2048, 1024).disk_bytes(True):
        assert fit(plan, 2048) == [(128, 128), (1024, 1024)]


def test_the_row_says_that_it_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker, "fit", lambda plan, size: [(2, 8)])
    (row,) = run_linker(small(tmp_path, pages=(8,), peers=False))["rows"]
    assert (row["pages"], row["pages_asked"]) == (2, 8) and "room for 2" in row["note"]


def test_the_pool_is_laid_out_by_layers_and_slots() -> None:
    shape = Shape(layers=3, fragment_bytes=2048, pages=4)
    pool = DevicePool(shape, np.random.default_rng(1))
    assert shape.page_bytes == 3 * 2 * 2048
    pool.fill(np.random.default_rng(2))
    rows = pool.arena.bytes.reshape(3, 2, 4, 2048)
    offset = pool.prefix(4).address - np.uint64(pool.arena.bytes.ctypes.data)
    for page in range(4):
        assert offset[page].tolist() == [
            ((layer * 2 + tensor) * 4 + int(pool.slots[page])) * 2048
            for layer in range(3)
            for tensor in range(2)
        ]
    before = pool.checksums(4)
    rows[2, 1, pool.slots[3], 100] ^= 1
    assert (pool.checksums(4) == before).tolist() == [True, True, True, False]


# ---- overlap ----
def test_the_report_of_overlap(tmp_path: Path) -> None:
    lines: list[str] = []
    allowed = os.sched_getaffinity(0)
    plan = OverlapPlan(tmp_path, fragment_bytes=4096, pages=8, layers=4, rounds=2)
    report = run_overlap(plan, lines.append)
    assert list(tmp_path.iterdir()) == [] and lines and os.sched_getaffinity(0) == allowed
    assert len(report["rows"]) == len(report["targets"]) == 3
    asked = [row["compute_asked_ms"] for row in report["rows"]]
    assert asked == sorted(asked)
    for row in report["rows"]:
        assert row.keys() >= OVERLAP_FIELDS
        assert row["io_ms"] > 0 and row["ideal_ms"] >= 4 * row["compute_ms"]
        assert row["compute_ms"] >= row["compute_asked_ms"] * 0.999


def test_named_times_are_used(tmp_path: Path) -> None:
    plan = OverlapPlan(
        tmp_path, fragment_bytes=2048, pages=2, layers=2, rounds=1, compute_ms=(0.5,)
    )
    (row,) = run_overlap(plan)["rows"]
    assert row["compute_asked_ms"] == 0.5 and row["measured_ms"] >= 1.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"compute_ms": (0.0,)}, "compute"), ({"compute_ms": (1e6,)}, "compute"),
     ({"fragment_bytes": 100}, "fragments"), ({"pages": 0}, "pages"), ({"rounds": 0}, "rounds")],
)  # fmt: skip
def test_impossible_overlaps_are_refused(tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_overlap(OverlapPlan(tmp_path, **settings))


@pytest.mark.parametrize(
    ("arrival_s", "compute_s", "done_s"),
    [
        ([1, 2, 3, 4], 0.5, 4.5),  # reading is slower: the last layer, and then its computing
        ([1, 2, 3, 4], 2, 9),  # computing is slower: the first layer, and then all computing
        ([1, 2, 3, 4], 1, 5),
        ([1, 4, 4, 4], 1, 7),  # layers of one part come together
        ([], 1, 0),
    ],
)
def test_the_ideal_pipeline(arrival_s: list[float], compute_s: float, done_s: float) -> None:
    assert pipeline_s(arrival_s, compute_s) == done_s


def test_device_interrupts_are_counted_by_core() -> None:
    table = """           CPU0       CPU3
 28:          5          0 PCI-MSIX-0000:00:01.0   0-edge      virtio0
 36:         10     112837 PCI-MSIX-0000:00:02.0   1-edge      virtio1-req.0
LOC:     900000     900001   Local timer interrupts
ERR:          0
"""
    assert device_interrupts(table) == {0: 15, 3: 112837}


# ---- the commands ----
def test_the_commands_write_their_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    file = tmp_path / "report.json"
    common = ["--dir", str(work), "--layers", "4", "--rounds", "1", "--json", str(file)]
    options = ["--fragments", "2KiB", "--pages", "2,4", "--no-peers"]
    assert main(["bench", "linker", *common, *options]) == 0
    report = json.loads(file.read_text())
    assert report["command"] == "bench linker" and len(report["rows"]) == 2
    assert "layer-wise loads" in capsys.readouterr().out
    options = ["--fragment", "2KiB", "--pages", "2", "--compute", "0.2,0.4"]
    assert main(["bench", "overlap", *common, *options]) == 0
    report = json.loads(file.read_text())
    assert [row["compute_asked_ms"] for row in report["rows"]] == [0.2, 0.4]
    assert "over" in capsys.readouterr().out and list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["linker", "--pages", "x"], "pages = 'x'"),
        (["linker", "--fragments", "big"], "sizes = 'big'"),
        (["linker", "--dir", "/nonexistent"], "dir"),
        (["overlap", "--compute", "1,two"], "compute = '1,two'"),
        (["overlap", "--json", "/nonexistent/x"], "json"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], command: list[str], said: str
) -> None:
    assert main(["bench", *command]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
