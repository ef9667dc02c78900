"""index/catalog.py: records, slots and segments change together, and damage reads as absence."""

import contextlib
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest
from thread_kit import together

from tutti_core import ConfigError, CorruptionError, StoreClosedError, StoreFullError, hashing
from tutti_core.format import SegmentEntry, Superblock
from tutti_core.index.catalog import Catalog, NewPages, slot_of, slots_of_records

MIB = 1 << 20
NAMESPACE = b"n" * 16


@pytest.fixture
def catalog(store_dir: Path):
    store_dir.mkdir()
    catalog = Catalog(store_dir, 4 * MIB, False)
    yield catalog
    catalog.close()


def record_key(i: int) -> bytes:
    return i.to_bytes(2, "big") * 8


def new_pages(*numbers: int, slot: int = 0, width: int = 32) -> NewPages:
    return NewPages(
        namespace=NAMESPACE,
        length_bytes=4096,
        key_width=width,
        record_keys=b"".join(map(record_key, numbers)),
        page_keys=b"".join(i.to_bytes(width, "big") for i in numbers),
        parents=bytes(16 * len(numbers)),
        slot=np.arange(slot, slot + len(numbers), dtype=np.uint64),
        checksum=np.arange(len(numbers), dtype=np.uint64) + np.uint64(100),
    )


def damage(catalog: Catalog, key: bytes, at: int) -> None:
    with catalog._begin(write=True) as (txn, db):
        raw = bytearray(txn.get(key, db=db.records))
        raw[at] ^= 1
        txn.put(key, bytes(raw), db=db.records)


def test_published_pages_are_found_with_all_their_fields(catalog) -> None:
    (done,) = catalog.publish([new_pages(1, 2, slot=5 << 32)])
    assert done.taken.all()
    found, records = catalog.lookup(record_key(1) + record_key(9) + record_key(2))
    assert found.tolist() == [True, False, True]
    record = records[2]
    assert record["page_key"].tobytes() == (2).to_bytes(32, "big")
    assert (int(record["segment"]), int(record["slot"])) == (5, 1)
    assert (int(record["length_bytes"]), int(record["checksum"])) == (4096, 101)
    assert int(record["generation"]) == 2 and slot_of(record) == 5 << 32 | 1
    assert catalog.slots_of(5) == {0: record_key(1), 1: record_key(2)}
    assert (catalog.record_count(), catalog.sequence()) == (2, 2)


@pytest.mark.parametrize("at", [0, 40, 50, 64, 68, 72, 76, 80, 88, 95])
def test_a_flipped_bit_anywhere_in_a_record_reads_as_absence(catalog, at: int) -> None:
    catalog.publish([new_pages(1, 2)])
    damage(catalog, record_key(1), at)
    found, _ = catalog.lookup(record_key(1) + record_key(2))
    assert found.tolist() == [False, True]
    ((keys, _, damaged),) = catalog.scan_records(100)
    assert keys == record_key(2) and damaged == 1


def test_a_damaged_record_can_be_saved_anew(catalog) -> None:
    catalog.publish([new_pages(1, slot=3)])
    damage(catalog, record_key(1), 80)
    (done,) = catalog.publish([new_pages(1, slot=7)])
    assert done.taken.all()
    found, records = catalog.lookup(record_key(1))
    assert found.all() and slot_of(records[0]) == 7


def test_the_first_writer_of_a_page_keeps_it(catalog) -> None:
    catalog.publish([new_pages(1, slot=3)])
    (done,) = catalog.publish([new_pages(1, 2, slot=7)])
    assert done.taken.tolist() == [False, True]
    assert slots_of_records(done.record).tolist() == [3, 8]
    assert done.record["generation"].tolist() == [1, 2]
    assert set(catalog.slots_of(0)) == {3, 8}


def test_a_page_that_occurs_twice_takes_one_slot(catalog) -> None:
    (done,) = catalog.publish([new_pages(1, 2, 1, slot=3)])
    assert done.taken.tolist() == [True, True, False]
    assert slots_of_records(done.record).tolist() == [3, 4, 3]
    assert set(catalog.slots_of(0)) == {3, 4} and catalog.record_count() == 2


def test_one_slot_cannot_hold_two_records_and_nothing_is_changed(catalog) -> None:
    catalog.publish([new_pages(1, slot=3)])
    with pytest.raises(CorruptionError, match="slot"):
        catalog.publish([new_pages(5, slot=9), new_pages(2, slot=3)])
    assert (catalog.record_count(), catalog.sequence()) == (1, 1)
    assert set(catalog.slots_of(0)) == {3}


def test_generations_rise_and_are_never_used_again(catalog) -> None:
    catalog.publish([new_pages(1, slot=1)])
    catalog.remove([(record_key(1), 1, 1)])
    (done,) = catalog.publish([new_pages(1, slot=1)])
    assert done.record["generation"].tolist() == [2]


def test_removal_takes_record_and_slot(catalog) -> None:
    catalog.publish([new_pages(1, 2, slot=3)])
    catalog.remove([(record_key(1), 3, 1), (record_key(1), 3, 1), (record_key(9), 70, 9)])
    assert catalog.record_count() == 1 and set(catalog.slots_of(0)) == {4}
    catalog.remove([])


def test_removal_spares_a_later_page_of_the_same_key(catalog) -> None:
    catalog.publish([new_pages(1, slot=3)])
    catalog.remove([(record_key(1), 3, 99)])
    assert catalog.record_count() == 1 and set(catalog.slots_of(0)) == {3}
    catalog.remove([(record_key(1), 4, 99)])
    assert catalog.record_count() == 1


def test_removal_goes_on_in_a_file_that_is_full(store_dir: Path, rng) -> None:
    store_dir.mkdir()
    catalog = Catalog(store_dir, 2 * MIB, False)
    numbers = rng.sample(range(65536), 20000)
    stored = []
    with pytest.raises(StoreFullError):
        for start in range(0, 20000, 100):
            group = numbers[start : start + 100]
            catalog.publish([new_pages(*group, slot=start)])
            stored += [(record_key(n), start + i, start + i + 1) for i, n in enumerate(group)]
    assert len(stored) > 2000
    rng.shuffle(stored)
    catalog.remove(stored)
    assert catalog.record_count() == 0 and catalog.slots_of(0) == {}
    catalog.publish([new_pages(1)])
    catalog.close()


def test_slot_entries_without_records_are_reclaimed(catalog) -> None:
    catalog.publish([new_pages(1, 2, 3, slot=3)])
    with catalog._begin(write=True) as (txn, db):
        txn.delete(record_key(1), db=db.records)
    damage(catalog, record_key(2), 0)
    catalog.remove_slots(0, catalog.slots_of(0))
    assert catalog.slots_of(0) == {} and catalog.record_count() == 0


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_scan_yields_every_record_once_in_order(catalog, chunk: int) -> None:
    catalog.publish([new_pages(*range(10))])
    keys = b"".join(k for k, _, _ in catalog.scan_records(chunk))
    assert keys == b"".join(map(record_key, range(10)))


def test_scan_survives_changes_between_its_chunks(catalog) -> None:
    catalog.publish([new_pages(*range(10))])
    seen = b""
    for keys, _, _ in catalog.scan_records(2):
        seen += keys
        catalog.remove([(record_key(i), i, i + 1) for i in range(10)])
    assert seen == record_key(0) + record_key(1)


def test_segments_belong_to_one_lease(catalog) -> None:
    mine, yours = SegmentEntry(0, 1), SegmentEntry(1, 2)
    assert catalog.claim_segment([4, 5], mine, 2) == 4
    assert catalog.claim_segment([4, 5], yours, 2) == 5
    assert catalog.claim_segment([4, 5], yours, 2) is None
    assert catalog.claim_segment([6], mine, 1) is None  # its share is used up
    assert catalog.claim_segment([], mine, 9) is None
    assert catalog.segments() == {4: mine, 5: yours}
    assert not catalog.reassign_segment(4, yours, mine)
    assert catalog.reassign_segment(4, mine, yours)
    catalog.free_segment(5)
    assert catalog.segments() == {4: yours}


def test_a_segment_entry_that_is_damaged_is_not_believed(catalog) -> None:
    with catalog._begin(write=True) as (txn, db):
        txn.put((4).to_bytes(4, "big"), b"short", db=db.segments)
    with pytest.raises(CorruptionError):
        catalog.segments()


def test_a_namespace_digest_means_one_thing(catalog) -> None:
    digest = hashing.digest(b"{1}")
    catalog.register_namespace(digest, b"{1}")
    catalog.register_namespace(digest, b"{1}")
    with pytest.raises(CorruptionError, match=digest.hex()):
        catalog.register_namespace(digest, b"{2}")
    assert catalog.namespaces() == {digest: b"{1}"}


def test_a_damaged_description_is_left_out_and_put_right(catalog) -> None:
    digest = hashing.digest(b"{1}")
    catalog.register_namespace(digest, b"{x}")
    assert catalog.namespaces() == {}
    catalog.register_namespace(digest, b"{1}")
    assert catalog.namespaces() == {digest: b"{1}"}


def test_a_record_whose_slot_is_not_its_own_can_be_saved_anew(catalog) -> None:
    catalog.publish([new_pages(1, slot=5)])
    with catalog._begin(write=True) as (txn, db):
        txn.delete((5).to_bytes(8, "big"), db=db.slots)
    (published,) = catalog.publish([new_pages(1, slot=9)])
    assert published.taken.all() and catalog.slots_of(0) == {9: record_key(1)}


@pytest.mark.parametrize("raw", [b"\xff" * 8, b"\x40" + bytes(7), bytes(7), b""])
def test_an_impossible_sequence_is_refused(catalog, raw: bytes) -> None:
    with catalog._begin(write=True) as (txn, db):
        txn.put(b"sequence", raw, db=db.meta)
    for call in (catalog.sequence, lambda: catalog.publish([new_pages(1)])):
        with pytest.raises(CorruptionError, match="--repair"):
            call()
    assert catalog.record_count() == 0


def test_the_superblock_is_kept(catalog) -> None:
    assert catalog.superblock() is None
    block = Superblock(b"i" * 16, b"s" * 16, 0, 1, MIB, 3)
    catalog.set_superblock(block)
    assert catalog.superblock() == block


def test_views_of_one_process_share_an_environment(store_dir: Path) -> None:
    store_dir.mkdir()
    first, second = Catalog(store_dir, 4 * MIB, False), Catalog(store_dir, 4 * MIB, False)
    first.publish([new_pages(1)])
    first.close()
    first.close()
    assert second.record_count() == 1
    with pytest.raises(StoreClosedError):
        first.record_count()
    second.close()
    again = Catalog(store_dir, 4 * MIB, False)
    assert again.record_count() == 1
    again.close()


def test_closing_waits_for_the_readers_of_other_threads(store_dir: Path) -> None:
    store_dir.mkdir()
    catalog = Catalog(store_dir, 4 * MIB, False)
    catalog.publish([new_pages(*range(500))])
    keys = b"".join(map(record_key, range(500)))

    def read() -> None:
        with contextlib.suppress(StoreClosedError):
            while True:
                assert catalog.lookup(keys)[0].all()

    together(*[read] * 4, catalog.close)


def test_a_file_that_is_no_catalog_is_refused(store_dir: Path) -> None:
    store_dir.mkdir()
    (store_dir / "data.mdb").write_bytes(b"precious" * 4096)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Catalog(store_dir, 4 * MIB, False)
    assert (store_dir / "data.mdb").read_bytes() == b"precious" * 4096


def test_an_error_of_the_file_system_is_a_device_error(catalog, monkeypatch) -> None:
    from tutti_core import DeviceError

    with pytest.raises(DeviceError), catalog._begin():
        raise lmdb.DiskError("mdb_txn_commit: disk", 28)
    assert catalog.record_count() == 0


def test_a_reader_that_was_killed_does_not_fill_the_file(store_dir: Path) -> None:
    store_dir.mkdir()
    catalog = Catalog(store_dir, MIB, False)
    reader = f"""
import lmdb, time
env = lmdb.open({str(store_dir)!r}, map_size={MIB}, max_dbs=8, max_readers=512)
transaction = env.begin()
transaction.get(b"x")
print("reading", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", reader], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"reading\n"
        child.kill()
    refused = []
    for i in range(300):
        try:
            done = catalog.publish([new_pages(i, slot=i)])
            generation = int(done[0].record["generation"][0])
            catalog.remove([(record_key(i), i, generation)])
        except StoreFullError as error:
            refused.append(error)
    assert not refused  # it was full once, and a look for dead readers made room
    catalog.close()
