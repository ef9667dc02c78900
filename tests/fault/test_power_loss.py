"""Power losses under a store on real files; and the smallest inputs of what they have found."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from store_kit import client, run, small_config

from tutti_core import ConfigError, CorruptionError, PrefixStore, StoreConfig
from tutti_core.format import SUPERBLOCK_BYTES, Superblock
from tutti_core.tiers import pools, trust
from tutti_core.tiers.saver import Saver
from tutti_core.trials import Tally, power_loss
from tutti_core.trials.catalog_power import CatalogPower
from tutti_core.trials.kit import quiet
from tutti_core.trials.power_loss import SHAPES

SEED = 2
SHAPE = {shape.name: shape for shape in SHAPES}


def test_power_losses_at_many_moments(fast_path: Path) -> None:
    tally = power_loss.run(fast_path, seed=SEED)
    tally.check()
    assert tally.crash_points > 50
    assert tally.pages_compared > 1000
    assert tally.faults["flipped bit on a file"] > 0
    assert not list(fast_path.iterdir())


# ---- negative controls ----
def used(fast_path: Path, name: str = "files", share: float = 0.5) -> Tally:
    tally = Tally()
    with quiet():
        power_loss.use(fast_path / "use", SHAPE[name], SEED, share, tally)
    return tally


def test_a_page_published_before_its_flush_is_noticed(fast_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        Saver, "_flush_devices", lambda self, group: {int(d): 0 for w in group for d in w.device}
    )
    assert used(fast_path).durable_pages_lost > 0


def test_names_that_are_not_durable_are_noticed(fast_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pools, "_sync_folder", lambda folder: None)
    monkeypatch.setattr(trust, "_sync_directory", lambda descriptor: None)
    assert used(fast_path, "two pool files").complaint_count > 0


def test_a_catalog_that_does_not_sync_is_noticed(fast_path: Path, monkeypatch) -> None:
    from tutti_core.index import catalog

    class Careless:
        def __getattr__(self, name: str) -> Any:
            return getattr(lmdb, name)

        def open(self, path: str, **options: Any) -> Any:
            return lmdb.open(path, **{**options, "sync": False})

    monkeypatch.setattr(catalog, "lmdb", Careless())
    assert used(fast_path).complaint_count > 0


def test_a_growth_without_a_draft_is_noticed(fast_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pools, "_read_draft", lambda file, trusting: None)
    tally = Tally()
    with quiet():
        for seed in range(3):
            power_loss.grow(fast_path / "grow", SHAPE["files"], seed, tally)
    assert any("does not open" in text for text in tally.complaints)


# ---- what it found, in small ----
@pytest.mark.parametrize("left", [b"", bytes(4096), bytes(8192), bytes(16384)])
def test_a_catalog_whose_first_pages_were_lost_is_made_anew(disk_dir: Path, left: bytes) -> None:
    """LMDB syncs the first two pages with the first commit; before that there are no pools."""
    config = small_config(disk_dir)
    folder = disk_dir / "catalog"
    for path in (disk_dir, folder):
        path.mkdir(mode=0o700)
    (folder / "data.mdb").write_bytes(left)
    (folder / "data.mdb").chmod(0o600)
    with PrefixStore.open(config) as store:
        assert all(client(store).save(run("a", 3)))


def test_a_catalog_whose_first_pages_are_lost_beside_pools_is_refused(disk_dir: Path) -> None:
    config = small_config(disk_dir)
    PrefixStore.open(config).close()
    data = disk_dir / "catalog" / "data.mdb"
    data.write_bytes(bytes(4096) + data.read_bytes()[4096:])
    with pytest.raises((ConfigError, CorruptionError)):
        PrefixStore.open(config)
    assert data.exists()


def torn_growth(path: Path, with_draft: bool) -> StoreConfig:
    """A store whose growth from 2 to 6 segments tore its superblock; returns the larger one."""
    with PrefixStore.open(small_config(path, segments=2)) as store:
        assert all(client(store).save(run("a", 8)))
    file = path / "pool.tutti"
    old = file.read_bytes()[:SUPERBLOCK_BYTES]
    whole = Superblock.decode(old, "pool")
    new = replace(whole, segment_count=6).encode()
    with open(file, "r+b") as stream:
        stream.write(new[:512] + old[512:])
    if with_draft:
        draft = path / "pool.tutti.new"
        draft.write_bytes(new)
        draft.chmod(0o600)
    return small_config(path, segments=6)


def test_a_superblock_that_was_torn_while_the_store_grew_is_mended(disk_dir: Path) -> None:
    config = torn_growth(disk_dir, with_draft=True)
    for _ in range(2):
        with PrefixStore.open(config) as store:
            assert all(client(store).load(run("a", 8)))
    assert not (disk_dir / "pool.tutti.new").exists()


def test_a_torn_superblock_without_a_draft_is_refused(disk_dir: Path) -> None:
    config = torn_growth(disk_dir, with_draft=False)
    with pytest.raises(CorruptionError):
        PrefixStore.open(config)


def test_a_draft_of_another_store_mends_nothing(disk_dir: Path) -> None:
    config = torn_growth(disk_dir / "s", with_draft=True)
    PrefixStore.open(small_config(disk_dir / "t", segments=6)).close()
    other = (disk_dir / "t" / "pool.tutti").read_bytes()[:SUPERBLOCK_BYTES]
    (disk_dir / "s" / "pool.tutti.new").write_bytes(other)
    with pytest.raises(CorruptionError):
        PrefixStore.open(config)


# ---- the model of the catalog ----
def test_a_commit_is_kept_or_taken_back_as_a_whole(tmp_path: Path) -> None:
    """Each image of the file opens, and has all of a transaction or nothing of it."""
    seen = set()
    for stop in range(12):
        folder = tmp_path / str(stop)
        folder.mkdir()
        power = CatalogPower()
        power.stop_at(stop)
        with power.installed():
            committed = write_numbers(folder)
        for seed in range(12):
            power.lose(random.Random(seed))
            numbers = read_numbers(folder)
            assert numbers in (committed, committed + 1) or (stop < 3 and numbers is None)
            seen.add((stop, numbers))
    assert {numbers for stop, numbers in seen if stop == 11} != {None}
    assert any({(stop, n), (stop, n + 1)} <= seen for stop in range(3, 12) for n in range(9))


def write_numbers(folder: Path) -> int:
    """Write n as 0..9 into ten pages' worth of keys, once a transaction; returns the last n."""
    done = 0
    try:
        env = lmdb.open(str(folder), max_dbs=2)
    except lmdb.Error:
        return 0
    try:
        db = env.open_db(b"numbers")
        for number in range(1, 9):
            with env.begin(write=True) as txn:
                for key in range(40):
                    txn.put(b"%04d" % key, b"%d" % number * 200, db=db)
            done = number
    except lmdb.Error:
        pass
    finally:
        env.close()
    return done


def read_numbers(folder: Path) -> int | None:
    """The number in all keys; 0 where there are none, None where LMDB cannot open the file."""
    try:
        env = lmdb.open(str(folder), max_dbs=2)
    except lmdb.Error:
        return None
    try:
        db = env.open_db(b"numbers")
        with env.begin() as txn, txn.cursor(db=db) as cursor:
            values = {bytes(value[:1]) for value in cursor.iternext(keys=False)}
        assert len(values) <= 1, "a transaction in part"
        return int(values.pop()) if values else 0
    finally:
        env.close()
