"""`verify_store` names each kind of damage; `describe_store` counts; both only read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tutti_core import BusyError, ConfigError, CorruptionError, PrefixStore, verify
from tutti_core.format import DATA_OFFSET_BYTES, RECORD, SegmentEntry, seal_records
from tutti_core.tiers.lease import take_lease
from tutti_core.verify import describe_store, verify_store

PAGES = 12
SIZES = (4096, 10_000)  # one slot, and one that is not full


def make_store(path: Path, pools: tuple[Path, ...] = ()) -> None:
    with PrefixStore.open(path, capacity="64MiB", segment="1MiB", pools=pools) as store:
        for size in SIZES:
            pages = store.namespace(model=f"m{size}", page_bytes=size, page_tokens=2)
            tokens = np.arange(2 * PAGES, dtype=np.uint32) + size
            memory = np.random.default_rng(size).bytes(size * PAGES)
            assert pages.save(tokens, memory).wait(30).all()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return tmp_path / "store"


@contextmanager
def databases(path: Path) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    """A write transaction on a store's catalog, and its databases by name."""
    env = lmdb.open(str(path / "catalog"), max_dbs=8, map_size=64 << 20)
    opened = {
        name: env.open_db(name.encode()) for name in ("namespaces", "records", "slots", "segments")
    }
    with env.begin(write=True) as txn:
        yield txn, opened.__getitem__
    env.close()


def first(txn: Any, db: Any) -> tuple[bytes, bytes]:
    with txn.cursor(db=db) as cursor:
        assert cursor.first()
        key, value = cursor.item()
        return bytes(key), bytes(value)


def counts(path: Path, **options: Any) -> dict[str, int]:
    return {kind: d.count for kind, d in verify_store(path, **options).damage.items()}


# ---- clean stores ----
@pytest.mark.parametrize("transport", ["auto", "posix"])
def test_a_sound_store_is_clean(store: Path, transport: Any) -> None:
    before = sorted((p, p.stat().st_size) for p in store.rglob("*"))
    report = verify_store(store, transport=transport)
    assert report.clean and report.changed == 0
    assert (report.records, report.slots, report.payloads) == (2 * PAGES,) * 3
    assert report.payload_bytes == PAGES * sum(SIZES)
    assert sorted((p, p.stat().st_size) for p in store.rglob("*")) == before


def test_small_windows_and_chunks_see_every_page(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "WINDOW_BYTES", 20_000)
    monkeypatch.setattr(verify, "CHUNK", 5)
    steps: list[tuple[str, int, int]] = []
    report = verify_store(store, progress=lambda *step: steps.append(step))
    assert report.clean and report.payloads == 2 * PAGES
    assert steps[-1] == ("payloads", 2 * PAGES, 2 * PAGES)


def test_several_pools(tmp_path: Path) -> None:
    pools = (tmp_path / "a", tmp_path / "b")
    make_store(tmp_path / "store", pools)
    assert verify_store(tmp_path / "store", pools).clean
    with pytest.raises(ConfigError, match=r"pool\.tutti is missing"):
        verify_store(tmp_path / "store")
    with pytest.raises(ConfigError, match="belongs to another"):
        verify_store(tmp_path / "store", pools[::-1])
    with pytest.raises(ConfigError, match="has 2 pools"):
        verify_store(tmp_path / "store", pools[:1])


def test_an_empty_store_is_clean(tmp_path: Path) -> None:
    PrefixStore.open(tmp_path / "store", capacity="64MiB").close()
    report = verify_store(tmp_path / "store")
    assert report.clean and report.records == 0


# ---- damage ----
def test_a_flipped_payload_byte(store: Path) -> None:
    with open(store / "pool.tutti", "r+b") as pool:
        pool.seek(DATA_OFFSET_BYTES + 100)
        byte = pool.read(1)[0]
        pool.seek(DATA_OFFSET_BYTES + 100)
        pool.write(bytes([byte ^ 1]))
    report = verify_store(store)
    assert {kind: d.count for kind, d in report.damage.items()} == {"payload": 1}
    assert f"offset {DATA_OFFSET_BYTES}" in report.damage["payload"].examples[0]


def test_a_truncated_pool(store: Path) -> None:
    os.truncate(store / "pool.tutti", DATA_OFFSET_BYTES)
    found = counts(store)
    assert found.pop("pool") == 1
    assert sum(found.values()) == 2 * PAGES  # unreadable, or zeros


def test_examples_are_bounded(store: Path) -> None:
    os.truncate(store / "pool.tutti", DATA_OFFSET_BYTES)
    report = verify_store(store, examples=3)
    assert all(len(damage.examples) <= 3 for damage in report.damage.values())
    assert set(report.damage) <= set(verify.KINDS)


def test_a_flipped_record_byte(store: Path) -> None:
    with databases(store) as (txn, db):
        key, raw = first(txn, db("records"))
        txn.put(key, raw[:40] + bytes([raw[40] ^ 1]) + raw[41:], db=db("records"))
    assert counts(store) == {"record": 1}


def test_a_record_of_the_wrong_length(store: Path) -> None:
    with databases(store) as (txn, db):
        key, raw = first(txn, db("records"))
        txn.put(key, raw[:-1], db=db("records"))
    assert counts(store) == {"record": 1}


def test_a_missing_slot_entry(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.delete(first(txn, db("slots"))[0], db=db("slots"))
    assert counts(store) == {"slot": 1}


def test_a_slot_entry_without_a_record(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.delete(first(txn, db("records"))[0], db=db("records"))
    assert counts(store) == {"slot_entry": 1}


def test_a_record_under_another_key(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.put(b"k" * 16, first(txn, db("records"))[1], db=db("records"))
    assert counts(store) == {"record_key": 1, "slot": 1}


def edit_record(store: Path, field: str, value: int) -> None:
    """Change a field of one record and seal it again, as a bug of ours would."""
    with databases(store) as (txn, db):
        key, raw = first(txn, db("records"))
        record = np.frombuffer(raw, dtype=RECORD).copy()
        record[field] = value
        seal_records(record)
        txn.put(key, record.tobytes(), db=db("records"))


@pytest.mark.parametrize(
    ("field", "value", "kinds"),
    [
        ("length_bytes", 4095, {"length", "payload"}),
        ("length_bytes", 5000, {"length"}),
        ("generation", 1 << 40, {"sequence"}),
        ("generation", 1 << 62, {"generation"}),
        ("segment", 1 << 30, {"segment", "slot", "slot_entry"}),
        ("slot", 1 << 30, {"segment", "slot", "slot_entry"}),
        ("checksum", 1, {"payload"}),
    ],
)
def test_a_wrong_field(store: Path, field: str, value: int, kinds: set[str]) -> None:
    edit_record(store, field, value)
    found = counts(store)
    assert found.keys() & kinds and all(count == 1 for count in found.values())
    assert found.keys() <= kinds | {"segment", "slot"}


def test_an_unassigned_segment(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.delete(first(txn, db("segments"))[0], db=db("segments"))
    assert counts(store) == {"segment": PAGES}


def test_a_segment_cut_for_another_size(store: Path) -> None:
    with databases(store) as (txn, db):
        key, raw = first(txn, db("segments"))
        entry = SegmentEntry.decode(raw)
        other = SegmentEntry(entry.lease, entry.slot_blocks + 1)
        txn.put(key, other.encode(), db=db("segments"))
    assert counts(store) == {"segment": PAGES}


def test_an_unreadable_segment_entry(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.put(first(txn, db("segments"))[0], b"short", db=db("segments"))
    assert counts(store) == {"segment_entry": 1, "segment": PAGES}


def test_an_unknown_namespace(store: Path) -> None:
    with databases(store) as (txn, db):
        txn.delete(first(txn, db("namespaces"))[0], db=db("namespaces"))
    assert counts(store) == {"namespace": PAGES}


def test_a_changed_namespace_description(store: Path) -> None:
    with databases(store) as (txn, db):
        key, description = first(txn, db("namespaces"))
        txn.put(key, description.replace(b'"model":"m', b'"model":"M'), db=db("namespaces"))
    assert counts(store) == {"namespace_entry": 1}


def test_a_damaged_catalog_is_an_error_not_a_traceback(store: Path) -> None:
    (store / "catalog" / "data.mdb").write_bytes(b"\xff" * 8192)
    with pytest.raises(CorruptionError, match="catalog"):
        verify_store(store)


# ---- stores in use ----
def test_a_held_lease_needs_online(store: Path) -> None:
    lease = take_lease(store / "leases")
    try:
        with pytest.raises(BusyError, match="--online"):
            verify_store(store)
        assert verify_store(store, online=True).clean
        assert describe_store(store)[0].leases == [0]
    finally:
        lease.release()


_REMOVE_ALL = """
import lmdb, sys
env = lmdb.open(sys.argv[1], max_dbs=8, map_size=64 << 20)
records = env.open_db(b"records")
with env.begin(write=True) as txn:
    txn.drop(records, delete=False)
"""


def test_pages_replaced_while_they_are_read_are_not_damage(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(store / "pool.tutti", DATA_OFFSET_BYTES)  # every payload differs
    os.truncate(store / "pool.tutti", describe_pool_bytes(store))
    read = verify._Payloads.read

    def read_then_remove(self: Any, *arguments: Any) -> Any:
        result = read(self, *arguments)
        command = [sys.executable, "-c", _REMOVE_ALL, str(store / "catalog")]
        subprocess.run(command, check=True)
        return result

    monkeypatch.setattr(verify._Payloads, "read", read_then_remove)
    report = verify_store(store, online=True)
    assert report.clean and report.changed == 2 * PAGES


def describe_pool_bytes(store: Path) -> int:
    return DATA_OFFSET_BYTES + describe_store(store)[0].pool_bytes


def test_this_process_has_the_store_open(store: Path) -> None:
    with PrefixStore.open(store, capacity="64MiB"), pytest.raises(ConfigError, match="open"):
        describe_store(store)


# ---- description ----
def test_description(store: Path) -> None:
    facts, layout = describe_store(store)
    assert facts.pages == 2 * PAGES and facts.payload_bytes == PAGES * sum(SIZES)
    assert facts.store_id == layout.store_id.hex()
    assert facts.slot_sizes == {4096: (1, PAGES, 256), 12288: (1, PAGES, 85)}
    assert (facts.segments_assigned, facts.segment_bytes) == (2, 1 << 20)
    assert {n.description["model"]: n.pages for n in facts.namespaces} == {
        f"m{size}": PAGES for size in SIZES
    }
    assert facts.leases == [] and facts.pools == [str(store / "pool.tutti")]


@pytest.mark.parametrize("call", [describe_store, verify_store])
def test_there_is_no_store(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(ConfigError, match="there is no store"):
        call(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []
