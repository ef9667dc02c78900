"""`tutti bench tiers` runs, compares what it loads, cleans up and reports what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tutti_core import ConfigError
from tutti_core.bench.measure import BenchError
from tutti_core.bench.tiers import TiersPlan, run_tiers
from tutti_core.tiers.arena import HostArena


def small(folder: Path, **settings: Any) -> TiersPlan:
    return TiersPlan(
        folder, **{"sizes": (4096,), "call_pages": 32, "rounds": 2, "seconds": 0.3, **settings}
    )


def test_the_report(tmp_path: Path) -> None:
    lines: list[str] = []
    report = run_tiers(small(tmp_path), lines.append)
    assert list(tmp_path.iterdir()) == [] and len(lines) == 2
    (row,) = report["bandwidth"]
    assert row["hit_gib_s"] > 0 and row["copy_gib_s"] > 0 and row["ratio"] > 0
    (row,) = report["latency"]
    for phase in ("quiet", "churn"):
        for kind in ("hit", "device"):
            assert row[phase][kind].keys() == {"count", "p50_ms", "p99_ms", "max_ms"}
        assert sum(row[phase][kind]["count"] for kind in ("hit", "device")) > 0
    assert row["batch_ms"] > 0 and row["moved_during_churn"]["demoted"] > 0
    assert report["targets"][0]["target"] == ">= 0.8"


def test_wrong_bytes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostArena, "copy", lambda self, target, source, length_bytes: None)
    with pytest.raises(BenchError, match="wrong"):
        run_tiers(small(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"sizes": (100,)}, "sizes"), ({"rounds": 0}, "rounds"), ({"call_pages": 1 << 40}, "memory")],
)
def test_impossible_plans_are_refused(tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_tiers(small(tmp_path, **settings))
