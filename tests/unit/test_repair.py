"""`repair_store` drops what is damaged and nothing else: the rest is there, bit for bit."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_kit import finish
from test_verify import PAGES, SIZES, databases, describe_pool_bytes, edit_record, first, make_store
from typer.testing import CliRunner

from tutti_core import BusyError, ConfigError, CorruptionError, PrefixStore
from tutti_core.cli import app
from tutti_core.format import DATA_OFFSET_BYTES, RECORD, SegmentEntry, seal_records
from tutti_core.repair import repair_store
from tutti_core.tiers.lease import take_lease
from tutti_core.verify import verify_store


@pytest.fixture
def store(fast_path: Path) -> Path:
    make_store(fast_path / "store")
    return fast_path / "store"


def sound_pages(store: Path) -> int:
    """Load every page by its own key; each is right or a miss. Returns how many are right."""
    right = 0
    with PrefixStore.open(store, capacity="64MiB") as opened:
        assert opened.wait_restored(20)
        for size in SIZES:
            pages = opened.namespace(model=f"m{size}", page_bytes=size, page_tokens=2)
            keys = pages.keys(np.arange(2 * PAGES, dtype=np.uint32) + size)
            saved = np.frombuffer(np.random.default_rng(size).bytes(size * PAGES), dtype=np.uint8)
            memory = np.zeros_like(saved)
            good = finish(pages.load(keys, memory))
            same = (memory == saved).reshape(PAGES, size).all(axis=1)
            assert (same | ~good).all(), "a wrong page was loaded"
            right += int(good.sum())
        # The store works on: everything that is missing can be saved again.
        for size in SIZES:
            pages = opened.namespace(model=f"m{size}", page_bytes=size, page_tokens=2)
            tokens = np.arange(2 * PAGES, dtype=np.uint32) + size
            memory = np.random.default_rng(size).bytes(size * PAGES)
            assert pages.save(tokens, memory).wait(30).all()
    return right


def flip_payload(store: Path) -> None:
    with open(store / "pool.tutti", "r+b") as pool:
        pool.seek(DATA_OFFSET_BYTES + 4096 * 3)
        byte = pool.read(1)[0]
        pool.seek(DATA_OFFSET_BYTES + 4096 * 3)
        pool.write(bytes([byte ^ 1]))


def flip_record(store: Path) -> None:
    with databases(store) as (txn, db):
        key, raw = first(txn, db("records"))
        txn.put(key, raw[:40] + bytes([raw[40] ^ 1]) + raw[41:], db=db("records"))


def shorten_record(store: Path) -> None:
    with databases(store) as (txn, db):
        key, raw = first(txn, db("records"))
        txn.put(key, raw[:-1], db=db("records"))


def double_record(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.put(b"k" * 16, first(txn, db("records"))[1], db=db("records"))


def drop_first(name: str) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        with databases(store) as (txn, db):
            txn.delete(first(txn, db(name))[0], db=db(name))

    return damage


def stray_slot(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.put(b"\0\0\0\0\0\0\0\x77", b"short", db=db("slots"))


def garble_segment(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.put(first(txn, db("segments"))[0], b"short", db=db("segments"))


def recut_segment(store: Path) -> None:
    with databases(store) as (txn, db):
        key, raw = first(txn, db("segments"))
        entry = SegmentEntry.decode(raw)
        txn.put(key, SegmentEntry(entry.lease, entry.slot_blocks + 1).encode(), db=db("segments"))


def rename_namespace(store: Path) -> None:
    with databases(store) as (txn, db):
        key, description = first(txn, db("namespaces"))
        txn.put(key, description.replace(b'"model":"m', b'"model":"M'), db=db("namespaces"))


def leaked_slots(store: Path) -> None:
    """Slots that are in use and hold nothing."""
    with databases(store) as (txn, db):
        for slot in range(40, 44):
            txn.put(bytes(7) + bytes([slot]), bytes([slot]) * 16, db=db("slots"))


def two_records_on_one_slot(store: Path) -> None:
    """Of two pages, the one that the slot entry names keeps the slot."""
    with databases(store) as (txn, db):
        namespace = first(txn, db("namespaces"))[0]
        with txn.cursor(db=db("records")) as cursor:
            records = [(bytes(k), bytes(v)) for k, v in cursor if v[32:48] == namespace]
        (key, raw), (_, other) = records[:2]
        record = np.frombuffer(raw, dtype=RECORD).copy()
        record["slot"] = np.frombuffer(other, dtype=RECORD)[0]["slot"]
        seal_records(record)
        txn.put(key, record.tobytes(), db=db("records"))


def beyond_the_pool(store: Path) -> None:
    edit_record(store, "segment", 63)


def orphan_segments(store: Path) -> None:
    """One that is assigned and empty is as good as any; one behind the pools is not."""
    with databases(store) as (txn, db):
        for number in (20, 1000):
            key = number.to_bytes(4, "big")
            txn.put(key, SegmentEntry(3, 1).encode(), db=db("segments"))


def damaged_tree(store: Path) -> None:
    """The root of LMDB's main tree is zeroed, so that no table is found."""
    file = store / "catalog" / "data.mdb"
    raw = bytearray(file.read_bytes())
    (root,) = struct.unpack_from("<Q", raw, 4096 * newer_meta(raw) + 16 + 24 + 48 + 40)
    raw[root * 4096 : root * 4096 + 4096] = bytes(4096)
    file.write_bytes(raw)


def newer_meta(raw: bytes) -> int:
    at = 16 + 24 + 2 * 48 + 8
    return int(struct.unpack_from("<Q", raw, 4096 + at) > struct.unpack_from("<Q", raw, at))


def wrong(field: str, value: int) -> Callable[[Path], None]:
    return lambda store: edit_record(store, field, value)


def truncate(store: Path) -> None:
    os.truncate(store / "pool.tutti", DATA_OFFSET_BYTES + 5 * 4096)


@pytest.mark.parametrize(
    ("damage", "dropped", "missing"),
    [
        (flip_payload, 1, 1),
        (flip_record, 1, 1),
        (shorten_record, 1, 1),
        (double_record, 1, 0),  # the copy; the page itself stays
        (drop_first("slots"), 1, 1),
        (drop_first("records"), 0, 1),  # it was lost before
        (drop_first("segments"), PAGES, PAGES),
        (drop_first("namespaces"), PAGES, PAGES),
        (stray_slot, 0, 0),
        (leaked_slots, 0, 0),
        (two_records_on_one_slot, 1, 1),
        (beyond_the_pool, 1, 1),
        (orphan_segments, 0, 0),
        (garble_segment, PAGES, PAGES),
        (recut_segment, PAGES, PAGES),
        (rename_namespace, PAGES, PAGES),
        (wrong("length_bytes", 5000), 1, 1),
        (wrong("generation", 1 << 40), 0, 0),  # the sequence is put right
        (wrong("generation", 1 << 62), 1, 1),
        (wrong("segment", 1 << 30), 1, 1),
        (wrong("slot", 1 << 30), 1, 1),
        (wrong("checksum", 1), 1, 1),
    ],
)
def test_each_kind_of_damage_is_dropped_and_no_more(
    store: Path, damage: Callable[[Path], None], dropped: int, missing: int
) -> None:
    damage(store)
    assert not verify_store(store).clean
    repair = repair_store(store)
    assert not repair.report.clean and repair.pages_lost == dropped
    assert verify_store(store).clean
    assert sound_pages(store) == 2 * PAGES - missing
    assert verify_store(store).clean


def test_a_pool_that_was_cut_short_has_its_size_again(store: Path) -> None:
    truncate(store)
    repair = repair_store(store)
    assert repair.pools_grown == 1 and 0 < repair.pages_lost < 2 * PAGES
    assert (store / "pool.tutti").stat().st_size == describe_pool_bytes(store)
    assert verify_store(store).clean
    assert sound_pages(store) == 2 * PAGES - repair.pages_lost


def test_a_sound_store_is_left_alone(store: Path) -> None:
    before = (store / "catalog" / "data.mdb").read_bytes()
    repair = repair_store(store)
    assert repair.report.clean and repair.pages_lost == 0
    assert (store / "catalog" / "data.mdb").read_bytes() == before


def test_many_kinds_at_once_in_small_steps(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti_core.repair.CHUNK", 2)
    for damage in (flip_payload, drop_first("slots"), stray_slot, recut_segment):
        damage(store)
    repair = repair_store(store)
    assert verify_store(store).clean
    assert sound_pages(store) == 2 * PAGES - repair.pages_lost


def test_a_catalog_that_lmdb_cannot_use_is_made_anew(store: Path) -> None:
    damaged_tree(store)
    with pytest.raises(CorruptionError, match=r"main, is damaged.*--repair"):
        verify_store(store)
    repair = repair_store(store)
    assert repair.rebuilt and repair.report.damage.keys() == {"tree"}
    assert (repair.pages_lost, repair.pages_kept) == (0, 2 * PAGES)
    assert sound_pages(store) == 2 * PAGES and verify_store(store).clean


def test_what_was_lost_is_told_by_namespace(store: Path) -> None:
    drop_first("segments")(store)
    flip_record(store)
    repair = repair_store(store)
    assert sum(loss.pages for loss in repair.lost.values()) == repair.pages_lost
    assert sum(loss.payload_bytes for loss in repair.lost.values()) == repair.bytes_lost
    assert {loss.model for loss in repair.lost.values()} <= {"?", "m4096", "m10000"}
    assert repair.lost[""].pages == 1 and repair.pages_kept == 2 * PAGES - repair.pages_lost


def test_a_store_in_use_is_refused_untouched(store: Path) -> None:
    flip_record(store)
    lease = take_lease(store / "leases")
    try:
        with pytest.raises(BusyError, match="open in 1 process"):
            repair_store(store)
    finally:
        lease.release()
    assert not verify_store(store).clean


def test_there_is_nothing_to_repair(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no store"):
        repair_store(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_the_command(store: Path) -> None:
    flip_payload(store)
    assert CliRunner().invoke(app, ["verify", str(store)]).exit_code == 1
    refused = CliRunner().invoke(app, ["verify", str(store), "--repair", "--online"])
    assert refused.exit_code != 0
    done = CliRunner().invoke(app, ["verify", str(store), "--repair"])
    assert done.exit_code == 0 and "pages lost" in done.output and "23 pages" in done.output
    assert "of m4096" in done.output
    assert CliRunner().invoke(app, ["verify", str(store)]).exit_code == 0


def test_the_command_on_a_catalog_that_is_made_anew(store: Path, tmp_path: Path) -> None:
    damaged_tree(store)
    done = CliRunner().invoke(
        app, ["verify", str(store), "--repair", "--json", str(tmp_path / "out.json")]
    )
    assert done.exit_code == 0 and "catalog made anew" in done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["rebuilt"] and not result["clean"] and result["pages_kept"] == 2 * PAGES
