"""Processes that are killed while they use, create or repair a store on real files."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from store_kit import client, run, small_config

from tutti_core import ConfigError, PrefixStore, StoreConfig
from tutti_core.trials import Tally, kills
from tutti_core.trials.kit import quiet

SEED = 1


def test_killed_at_random_moments(tmp_path: Path) -> None:
    tally = kills.run(tmp_path, seed=SEED)
    tally.check()
    assert tally.kills >= 5  # one a habitat; a machine may lack io_uring
    assert tally.faults["flipped bit on a file"] > 0
    assert tally.pages_compared > 100
    assert not list(tmp_path.iterdir())


def family(tmp_path: Path, number: int, lives: int, setup: str = "") -> Tally:
    """Some kills in one habitat, with the children's store broken by `setup`."""
    tally = Tally()
    with quiet(), kills.nursery(setup) as process:
        members = kills.Family(number, tmp_path, process, tally)
        for life in range(lives):
            members.life(SEED + life)
            if tally.complaint_count:
                break
    return tally


def test_a_store_that_evicts_and_clears_keeps_pages_too(tmp_path: Path) -> None:
    tally = family(tmp_path, 1, 4)
    tally.check()
    assert tally.pages_compared > 0


# ---- negative controls ----
HALF_PUBLISHED = """
import time
from tutti_core.index.catalog import Catalog
real = Catalog.publish
def publish(self, groups):
    done = real(self, groups)
    with self._begin() as (txn, db), txn.cursor(db=db.slots) as cursor:
        slots = dict(cursor)
    with self._begin(write=True) as (txn, db):
        for slot in slots:
            txn.delete(slot, db=db.slots)
    time.sleep(0.05)
    with self._begin(write=True) as (txn, db):
        for slot, key in slots.items():
            txn.put(slot, key, db=db.slots)
    return done
Catalog.publish = publish
"""

REPORTED_TOO_SOON = """
import numpy as np
from tutti_core.tiers.saver import SaveTicket
def wait(self, timeout_s=None):
    return np.ones(len(self._stored), dtype=bool)
SaveTicket.wait = wait
"""


def test_records_and_slots_that_are_not_one_transaction_are_noticed(tmp_path: Path) -> None:
    tally = family(tmp_path, 0, 20, HALF_PUBLISHED)
    assert any("verify finds" in text for text in tally.complaints)


def test_saves_that_are_reported_too_soon_are_noticed(tmp_path: Path) -> None:
    assert family(tmp_path, 0, 20, REPORTED_TOO_SOON).durable_pages_lost > 0


def test_a_page_that_is_damaged_after_the_kill_is_noticed(tmp_path: Path, monkeypatch) -> None:
    real = kills.Family._bear

    def bear(self: kills.Family, order: kills.Order) -> None:
        real(self, order)
        file = self.config.path / "pool.tutti"
        if file.exists():  # else it was killed before that
            data = file.read_bytes()
            file.write_bytes(data[: 1 << 20] + bytes(len(data) - (1 << 20)))

    monkeypatch.setattr(kills.Family, "_bear", bear)
    tally = family(tmp_path, 0, 4)
    assert any("payload" in text for text in tally.complaints)
    assert any("offered does not load" in text for text in tally.complaints)
    assert tally.wrong_bytes == 0


# ---- creation ----
def killed_at(config: StoreConfig, call: str, count: int) -> None:
    """Open a store in a child that is killed at call number `count` of a function of `os`."""
    pid = os.fork()
    if pid == 0:
        try:
            real, left = getattr(os, call), [count]

            def die(*given: object, **named: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*given, **named)

            setattr(os, call, die)
            PrefixStore.open(config).close()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"{call} is not called {count + 1} times"


@pytest.mark.parametrize(
    ("call", "count"),
    [("posix_fallocate", 0), ("fsync", 0), ("rename", 0), ("rename", 1), ("fsync", 3)],
)
def test_a_store_whose_creation_was_cut_off_opens(disk_dir: Path, call: str, count: int) -> None:
    """Between two renames one pool has its name and the other has not."""
    config = small_config(disk_dir, pools=[disk_dir / "a", disk_dir / "b"])
    killed_at(config, call, count)
    with PrefixStore.open(config) as store:
        assert all(client(store).save(run("a", 8)))
    assert sorted(file.name for file in disk_dir.rglob("pool*")) == ["pool.tutti"] * 2


def test_a_pool_that_is_missing_is_not_made_from_another_store_s_draft(disk_dir: Path) -> None:
    config = small_config(disk_dir / "s", pools=[disk_dir / "a", disk_dir / "b"])
    other = small_config(disk_dir / "t", pools=[disk_dir / "c", disk_dir / "d"])
    for each in (config, other):
        PrefixStore.open(each).close()
    (disk_dir / "b" / "pool.tutti").unlink()
    (disk_dir / "d" / "pool.tutti").rename(disk_dir / "b" / "pool.tutti.new")
    with pytest.raises(ConfigError, match="missing"):
        PrefixStore.open(config)
