"""Devices that do every wrong thing in docs/format.md's table: bit-exact or a miss, each time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tutti_core.index.radix import Locations
from tutti_core.io.transport import BatchResult
from tutti_core.trials import Tally
from tutti_core.trials.device_faults import NAMES, history, run
from tutti_core.trials.kit import quiet

REPORTED = {"error read", "error write", "error flush", "torn write"}
HARMLESS = {"any order"}
FORMAT = Path(__file__).parents[2] / "docs" / "format.md"


def test_every_fault_ends_in_the_right_bytes_or_a_miss(fast_path: Path) -> None:
    tally = run(fast_path, seed=1)
    tally.check()
    assert all(tally.faults[name] > 0 for name in NAMES), tally.faults
    assert tally.pages_compared > 500
    assert not list(fast_path.iterdir())


@pytest.mark.parametrize("name", sorted(set(NAMES) - REPORTED - HARMLESS))
def test_without_verification_the_same_fault_gives_wrong_bytes(fast_path: Path, name: str) -> None:
    """Negative control: each silent fault is one that the histories can tell."""
    tally = Tally()
    with quiet():
        for seed in range(12):
            crash = name == "lost flush" or bool(seed % 2)
            history(fast_path / "store", name, seed, tally, verify=False, crash=crash)
            if tally.wrong_bytes:
                return
    raise AssertionError(f"{name}: no wrong byte in {tally.pages_compared} pages")


def test_checksums_that_are_ignored_are_noticed(fast_path: Path, monkeypatch) -> None:
    """Negative control: `verify` is on, and the transport says what the record wants to hear."""
    from tutti_core.tiers.loader import Loader

    real = Loader.judge

    def judge(self, entry, keys, first, pages, where, result, *others, **named):
        result = agreeing(result, where)
        return real(self, entry, keys, first, pages, where, result, *others, **named)

    monkeypatch.setattr(Loader, "judge", judge)
    tally = Tally()
    with quiet():
        history(fast_path / "store", "short read", 1, tally, crash=False)
    assert tally.wrong_bytes > 0


def agreeing(result: BatchResult, where: Locations) -> BatchResult:
    return BatchResult(result.status, where.checksum)


def test_every_fault_is_in_the_table_of_the_format() -> None:
    table = FORMAT.read_text().split("### Faults of devices")[1]
    for name in NAMES:
        assert re.search(rf"^\| {name} +\|", table, re.M), name
