"""The benchmarks run, check what they load, clean up, and report the fields that are promised."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti_core.bench import engines, index, io, measure
from tutti_core.bench.agents import SYSTEM_PROMPTS, agent_turns
from tutti_core.bench.index import IndexPlan, run_index
from tutti_core.bench.io import IoPlan, run_io
from tutti_core.bench.measure import BenchError
from tutti_core.errors import ConfigError

ROW_FIELDS = {
    "case", "tutti_mib_s", "fio_mib_s", "file_mib_s", "ratio_fio", "ratio_file", "cpu_s_per_gib"
}  # fmt: skip
INDEX_FIELDS = {
    "chain_match_ms", "match_us", "batch_exists_ms", "index_bytes_per_page", "reopen_first_answer_s"
}  # fmt: skip


def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "sglang" else find(n))


def test_io_alone(tmp_path: Path) -> None:
    plan = IoPlan(tmp_path, sizes=(4096, 1 << 20), page_count=5, rounds=2, depth=2, peers=False)
    lines: list[str] = []
    report = run_io(plan, lines.append)
    assert list(tmp_path.iterdir()) == []
    assert [row["case"] for row in report["rows"]] == [
        "save 4 KiB", "load 4 KiB", "save 1 MiB", "load 1 MiB"
    ]  # fmt: skip
    for row in report["rows"] + report["first_fill"]:
        assert row.keys() >= ROW_FIELDS
        assert row["tutti_mib_s"] > 0 and row["fio_mib_s"] is None and row["ratio_file"] is None
    assert all(target["met"] is None for target in report["targets"])
    assert len(lines) == 2 * 2 * 3


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_io_against_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sglang(monkeypatch)
    report = run_io(IoPlan(tmp_path, sizes=(65536,), page_count=8, rounds=1, depth=4))
    assert "SGLang is not installed" in report["absent"]["file"]
    for row in report["rows"]:
        assert row["fio_mib_s"] > 0 and row["ratio_fio"] > 0 and row["file_mib_s"] is None


def test_io_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sglang(monkeypatch)
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    report = run_io(IoPlan(tmp_path, sizes=(4096,), page_count=2, rounds=1))
    assert "fio is not installed" in report["absent"]["fio"]


def test_io_notices_wrong_bytes_and_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = engines.TuttiEngine.load

    def load_wrong(self: Any, keys: bytes) -> Any:
        sample = load(self, keys)
        self._into[5000] ^= 1
        return sample

    monkeypatch.setattr(engines.TuttiEngine, "load", load_wrong)
    plan = IoPlan(tmp_path, sizes=(4096,), page_count=4, rounds=1, peers=False)
    with pytest.raises(BenchError, match="1 of 4 pages came back wrong"):
        run_io(plan)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"sizes": ()}, "sizes"),
        ({"sizes": (1000,)}, "sizes"),
        ({"page_count": 0}, "page_count"),
        ({"rounds": 0}, "rounds"),
        ({"page_count": 1 << 40}, "memory"),
    ],
)
def test_io_refuses(tmp_path: Path, settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        run_io(IoPlan(tmp_path, **settings))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="free"):
        measure.need_space(tmp_path, 1 << 60)


def test_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_backend(folder: Path, page_count: int) -> Any:
        raise ImportError("not in this test")

    monkeypatch.setattr(index, "_backend", no_backend)
    monkeypatch.setattr(index, "_SPIN_S", 0.005)
    report = run_index(IndexPlan(tmp_path, chain_pages=16, index_pages=3000, rounds=1))
    assert list(tmp_path.iterdir()) == []
    assert report.keys() >= INDEX_FIELDS and all(report[name] > 0 for name in INDEX_FIELDS)
    assert "PageKeys.from_hex" in report["batch_exists_via"]
    assert 0 <= report["gil_held_share"] <= 1  # a small share may be lost in the noise
    assert {t["name"] for t in report["targets"]} >= INDEX_FIELDS


@pytest.mark.parametrize("branch_share", [0.0, 0.5])
def test_agent_turns_make_exactly_the_pages_asked_for(branch_share: float) -> None:
    seen: set[bytes] = set()
    roots: set[bytes] = set()
    for turn in agent_turns(np.random.default_rng(1), 16, 5000, branch_share):
        keys = [turn.keys[i : i + 16] for i in range(0, len(turn.keys), 16)]
        assert len(keys) > turn.first and not seen.intersection(keys[turn.first :])
        assert seen.issuperset(keys[: turn.first])
        seen.update(keys)
        roots.add(keys[0])
    assert len(seen) == 5000 and len(roots) <= SYSTEM_PROMPTS


def test_order_of_turn_is_fair() -> None:
    orders = [measure.order_of_turn("abc", turn) for turn in range(6)]
    assert len(set(map(tuple, orders))) == 6
    assert [order[0] for order in orders] == ["a", "c", "b", "a", "c", "b"]


def test_dropped_files_are_cold(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    measure.sync_filesystem(tmp_path)
    with file.open("rb") as stream:
        assert len(measure._resident(stream.fileno())) == (1 << 20) // 4096
    if measure.drop_cached([file]) > 0:
        pytest.skip("this file system keeps its files in memory")


def test_equal_pages_counts() -> None:
    one = np.zeros(4 * 4096, dtype=np.uint8)
    other = one.copy()
    other[4096] = 1
    assert measure.equal_pages(one, other, 4096) == 3


def test_sizes_are_worded() -> None:
    assert io._words(256 << 10) == "256 KiB" and io._words(2 << 20) == "2 MiB"
