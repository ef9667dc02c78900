"""`tutti bench safety`: what it adds up, what it says of damage, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti_core.bench import safety
from tutti_core.bench.safety import SafetyPlan, run_safety
from tutti_core.cli import main
from tutti_core.errors import ConfigError
from tutti_core.trials import TRIALS, Tally, run_trial

NOTHING_TIMED = {"index_pages": 0, "rounds": 0, "size_bytes": 0}


def fake(name: str, directory: Path, *, seed: int, seconds: float) -> Tally:
    """A trial that tries one of everything and finds nothing."""
    (directory / "left").write_bytes(b"behind")
    tally = Tally(crash_points=1, kills=2, misses=1)
    tally.faults["torn"] += 3
    tally.bad_inputs[name] += 4
    tally.compare(b"abc", b"abc", "page")
    return tally


def test_the_report_adds_up_and_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(safety, "run_trial", fake)
    report = run_safety(SafetyPlan(tmp_path, **NOTHING_TIMED))
    count = len(TRIALS)
    assert [row["trial"] for row in report["rows"]] == list(TRIALS)
    assert (report["crash_points"], report["kills"]) == (count, 2 * count)
    assert report["faults"] == {"torn": 3 * count} and report["pages_compared"] == count
    assert report["bad_inputs"] == {name: 4 for name in sorted(TRIALS)}
    met = {line["name"]: line["met"] for line in report["targets"]}
    assert met.pop("recovery_s_per_million_pages") is None, "not measured"
    assert set(met.values()) == {True} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", ["wrong_bytes", "durable_pages_lost", "complaints"])
def test_what_broke_is_said_and_is_the_exit_status(
    tmp_path: Path, monkeypatch, capsys, broken: str
) -> None:
    def breaks(name: str, directory: Path, *, seed: int, seconds: float) -> Tally:
        tally = fake(name, directory, seed=seed, seconds=seconds)
        if broken == "wrong_bytes":
            tally.compare(b"abX", b"abc", "the third page")
        elif broken == "durable_pages_lost":
            tally.lose("the third page")
        else:
            tally.complain("the third page")
        return tally

    monkeypatch.setattr(safety, "run_trial", breaks)
    file = tmp_path / "report.json"
    arguments = ["bench", "safety", "--dir", str(tmp_path), "--trials", "kills", "--rounds", "0"]
    arguments += ["--index-pages", "0", "--json", str(file)]
    assert main(arguments) == 1
    assert "the third page" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report[broken] == 1
    assert {line["name"]: line["met"] for line in report["targets"]}[broken] is False


def test_a_trial_that_tried_nothing_does_not_look_good(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(safety, "run_trial", lambda *_, **__: Tally())
    report = run_safety(SafetyPlan(tmp_path, **NOTHING_TIMED))
    met = {line["name"]: line["met"] for line in report["targets"]}
    assert not any(met[name] for name in ("crash_points", "kills", "fault_count", "pages_compared"))


@pytest.mark.parametrize(
    "fields",
    [
        {"trials": ("nonsense",)},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"index_pages": -1},
        {"rounds": -1},
    ],
)
def test_an_impossible_plan_is_refused(tmp_path: Path, fields: dict) -> None:
    with pytest.raises(ConfigError):
        run_safety(SafetyPlan(tmp_path, **fields))
    assert not list(tmp_path.iterdir())


def test_recovery_is_measured_on_a_store_of_its_own(tmp_path: Path) -> None:
    plan = SafetyPlan(tmp_path, trials=(), index_pages=2000, rounds=1, size_bytes=0)
    report = run_safety(plan)
    assert report["recovery_pages"] == 2000 and report["recovery_s_per_million_pages"] > 0
    assert report["first_answer_s"] > 0 and not list(tmp_path.iterdir())


def test_an_unknown_trial_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="crash_points"):
        run_trial("nonsense", tmp_path, seed=0)


def test_a_tally_keeps_the_first_complaints_and_counts_them_all() -> None:
    total, other = Tally(), Tally()
    for i in range(30):
        other.complain(f"number {i}")
    total.add(other)
    total.add(other)
    assert total.complaint_count == 60 and len(total.complaints) == 20
    with pytest.raises(AssertionError, match="60 complaints\nnumber 0"):
        total.check()


def test_wrong_bytes_are_counted_one_by_one() -> None:
    tally = Tally()
    tally.compare(b"abcd", b"abXY", "page")
    tally.compare(b"ab", b"abcd", "short page")
    assert tally.wrong_bytes == 4 and tally.pages_compared == 2 and tally.complaint_count == 2
