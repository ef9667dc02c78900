"""Pages in parts: layout, reading part by part, and that nothing wrong is ever reported right."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    SEGMENT,
    chain,
    client,
    finish,
    finish_part,
    load_in_parts,
    loose,
    memory_devices,
    open_faulty,
    open_small,
    poll,
    run,
    settle,
    small_config,
)

from tutti_core import (
    BusyError,
    ConfigError,
    Namespace,
    NamespaceStore,
    PageFragments,
    PrefixStore,
    UnsupportedError,
)
from tutti_core.format import SUPERBLOCK_BYTES, Superblock
from tutti_core.testing import FOREVER, Fault
from tutti_core.tiers.parts import PartLayout
from tutti_core.verify import verify_store

PARTS = (5000, 4096, 100)
SIZE = sum(PARTS)
STORED = 4096 + 8192 + 4096 + 4096


def pages_of(store: PrefixStore, **fields: object) -> NamespaceStore:
    settings = {"model": "m", "page_bytes": SIZE, "page_tokens": 1, "parts": PARTS, **fields}
    return store.namespace(**settings)


def random_pages(count: int, seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


@pytest.fixture(params=["posix", "uring"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrefixStore]:
    with open_small(tmp_path / "s", segments=40, transport=request.param) as store:
        yield store


# ---- layout ----
def test_layout_of_a_stored_page() -> None:
    layout = PartLayout(PARTS)
    assert layout.offset_bytes == (4096, 4096 + 8192, 4096 + 8192 + 4096)
    assert layout.stored_bytes == STORED and layout.count == 3


def test_fragments_end_where_parts_end() -> None:
    layout = PartLayout((10, 20))
    lengths = np.array([4, 6, 20], dtype=np.uint64)
    assert layout.fragment_ranges(lengths) == [(0, 2), (2, 3)]
    for bad in ([10, 19], [10, 20, 1], [11, 19], [30], []):
        with pytest.raises(ValueError, match="do not end where"):
            layout.fragment_ranges(np.array(bad, dtype=np.uint64))


@pytest.mark.parametrize("parts", [(SIZE - 1,), (SIZE, 0), (-1, SIZE + 1), (1,) * 505])
def test_parts_that_are_no_page_are_refused(parts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="parts"):
        Namespace("m", SIZE, 1, parts=parts)


def test_parts_tell_namespaces_apart() -> None:
    plain = Namespace("m", SIZE, 1)
    assert "parts" not in plain.describe()
    digests = {replace(plain, parts=p).digest() for p in ((), PARTS, PARTS[::-1], (SIZE,))}
    assert len(digests) == 4


# ---- reading ----
def test_parts_arrive_one_by_one(store: PrefixStore) -> None:
    pages, keys, saved = pages_of(store), run("a", 30), random_pages(30)
    assert pages.save(keys, saved).wait(20).all()
    memory = np.zeros_like(saved)
    load = pages.load_parts(keys, memory)
    assert load.found.all() and load.part_count == 3
    low = 0
    for part, size in enumerate(PARTS):
        assert load.finish(load.start(part), 20).all()
        assert (memory[:, low : low + size] == saved[:, low : low + size]).all()
        assert not memory[:, low + size :].any(), "a part arrived before it was started"
        low += size
    load.end()
    load.end()
    assert store.stats().counters["loaded_pages"] == 30


def test_any_order_of_starts_and_any_ranges(store: PrefixStore) -> None:
    pages, keys, saved = pages_of(store), run("a", 12), random_pages(12)
    assert pages.save(keys, saved).wait(20).all()
    memory = np.zeros_like(saved)
    load = pages.load_parts(keys, memory, 2)
    late = load.start(2)
    first = [load.start(0, 0, 5), load.start(0, 5, 10)]
    middle = [load.start(1, 7, 10), load.start(1, 0, 7)]
    for reading in (*first, *middle, late):
        good = load.finish(reading, 20)
        assert good.all() and len(good) == reading.high - reading.low
    load.end()
    assert (memory[:10] == saved[2:]).all() and not memory[10:].any()


def test_places_named_at_the_start_of_a_part(store: PrefixStore) -> None:
    pages, keys, saved = pages_of(store), run("a", 4), random_pages(4)
    assert pages.save(keys, saved).wait(20).all()
    memory = np.zeros((4, 8192), dtype=np.uint8)
    rows = np.uint64(memory.ctypes.data) + np.arange(4, dtype=np.uint64) * np.uint64(8192)
    load = pages.load_parts(keys)
    halves = np.stack((rows, rows + np.uint64(2500)), axis=1)
    assert load.finish(load.start(0, address=halves), 20).all()
    assert (memory[:, :5000] == saved[:, :5000]).all()
    assert load.finish(load.start(1, 1, 3, rows[1:3, None]), 20).all()
    assert (memory[1:3, :4096] == saved[1:3, 5000:9096]).all()
    for bad in (None, rows, rows[:2, None], halves[:, :0], np.stack([rows] * 3, axis=1)):
        with pytest.raises(ValueError, match=r"pages|fragments|memory"):
            load.start(1, address=bad)
    with pytest.raises(ValueError, match="no such"):
        load.start(3, address=rows[:, None])
    load.end()


def test_missing_pages_are_misses_and_others_arrive(store: PrefixStore) -> None:
    pages, keys, saved = pages_of(store), run("a", 8), random_pages(8)
    some = chain(*[("a", i) for i in range(3)])
    assert pages.save(some, saved[:3]).wait(20).all()
    memory = np.full_like(saved, 7)
    load = pages.load_parts(keys, memory)
    assert load.found.tolist() == [True] * 3 + [False] * 5
    assert finish(load).tolist() == [True] * 3 + [False] * 5
    assert (memory[:3] == saved[:3]).all() and (memory[3:] == 7).all()
    empty = pages.load_parts(run("b", 2), memory[:2].copy())
    assert not load_in_parts(empty).any()
    assert pages.load_parts(keys, None, 8).found.tolist() == []


def test_whole_and_parted_pages_keep_to_their_own_calls(store: PrefixStore) -> None:
    parted, whole = pages_of(store), store.namespace(model="m", page_bytes=SIZE, page_tokens=1)
    keys, saved = run("a", 2), random_pages(2)
    assert parted.save(keys, saved).wait(20).all()
    assert whole.match(keys).pages == 0, "a page of one route was taken for the other's"
    with pytest.raises(ValueError, match="load_parts"):
        parted.load(keys, saved.copy())
    with pytest.raises(ValueError, match="use load"):
        whole.load_parts(keys, saved.copy())
    address = np.full((2, 1), saved.ctypes.data, dtype=np.uint64)
    with pytest.raises(ValueError, match="do not end where"):
        parted.save(run("b", 2), PageFragments(address, np.array([SIZE], dtype=np.uint64), saved))


def test_saving_again_writes_nothing(store: PrefixStore) -> None:
    pages, keys, saved = pages_of(store), run("a", 5), random_pages(5)
    assert pages.save(keys, saved).wait(20).all()
    before = store._transport.stats().write_bytes
    assert pages.save(keys, random_pages(5, seed=1)).wait(20).all()
    assert store._transport.stats().write_bytes == before
    memory = np.zeros_like(saved)
    assert load_in_parts(pages.load_parts(keys, memory)).all() and (memory == saved).all()


def test_a_reopened_store_has_the_pages(tmp_path: Path) -> None:
    keys, saved = run("a", 20), random_pages(20)
    with open_small(tmp_path / "s", segments=20) as store:
        assert pages_of(store).save(keys, saved).wait(20).all()
    with open_small(tmp_path / "s", segments=20) as store:
        assert store.wait_restored(20)
        pages, memory = pages_of(store), np.zeros_like(saved)
        assert pages.match(keys).pages == 20
        assert load_in_parts(pages.load_parts(keys, memory)).all() and (memory == saved).all()


# ---- damage ----
def slot_offset(store: PrefixStore, pages: NamespaceStore, keys, index: int) -> int:
    """Byte offset of a stored page in the pool."""
    manager = store._manager
    where = manager.locate(pages._entry, keys.data, index, True)
    return int(manager.extents(where.slot[:1], pages._entry.slot_bytes)[1][0])


LATER = [(9096, None), (12288, 1), (12288 + 4095, 1), (STORED - 4096, 2), (STORED - 1, None)]


@pytest.mark.parametrize(
    ("inside", "reported"),
    [*((place, 0) for place in (0, 8, 20, 50, 70, 4000, 4096, 9095)), *LATER],
)
def test_each_flipped_byte_is_found_with_its_part(
    tmp_path: Path, inside: int, reported: int | None
) -> None:
    """Magic, key, namespace, checksums, first and last byte of each part; padding is nobody's."""
    keys, saved = run("a", 6), random_pages(6)
    with open_small(tmp_path / "s", segments=20) as store:
        pages = pages_of(store)
        assert pages.save(keys, saved).wait(20).all()
        offset = slot_offset(store, pages, keys, 3)
        with open(tmp_path / "s" / "pool.tutti", "r+b") as pool:
            pool.seek(offset + inside)
            byte = pool.read(1)[0]
            pool.seek(offset + inside)
            pool.write(bytes([byte ^ 0x40]))
        memory = np.zeros_like(saved)
        load = pages.load_parts(keys, memory)
        for part in range(3):
            good = finish_part(load, load.start(part)).tolist()
            bad = reported is not None and part >= reported
            assert good == [not (bad and i == 3) for i in range(6)]
        load.end()
        settle(store)
        assert pages.match(keys).pages == (6 if reported is None else 3)
        assert store.stats().counters.get("checksum_errors", 0) == (reported is not None)
        right = np.flatnonzero(np.arange(6) != 3)
        assert (memory[right] == saved[right]).all()


def test_verify_finds_what_is_flipped_and_only_that(tmp_path: Path) -> None:
    keys, saved = run("a", 6), random_pages(6)
    with open_small(tmp_path / "s", segments=20) as store:
        pages = pages_of(store)
        assert pages.save(keys, saved).wait(20).all()
        whole = store.namespace(model="w", page_bytes=5000, page_tokens=1)
        assert whole.save(run("w", 3), random_pages(3, size=5000)).wait(20).all()
        offsets = [slot_offset(store, pages, keys, i) for i in range(6)]
    assert verify_store(tmp_path / "s").clean
    flips = {0: 0, 1: 4096, 2: STORED - 4096, 3: STORED - 1, 4: 4096 + 8192 + 7}
    with open(tmp_path / "s" / "pool.tutti", "r+b") as pool:
        for page, inside in flips.items():
            pool.seek(offsets[page] + inside)
            byte = pool.read(1)[0]
            pool.seek(offsets[page] + inside)
            pool.write(bytes([byte ^ 1]))
    report = verify_store(tmp_path / "s")
    assert {kind: damage.count for kind, damage in report.damage.items()} == {"payload": 4}
    assert report.payloads == 9


def test_a_header_of_an_earlier_save_is_not_believed(tmp_path: Path) -> None:
    """Header and parts of the page as it was saved before agree with each other, and are stale."""
    keys = run("a", 1)
    with open_faulty(tmp_path / "s", segments=1) as (store, devices):
        pages = pages_of(store)
        assert pages.save(keys, random_pages(1, seed=1)).wait(20).all()
        offset = slot_offset(store, pages, keys, 0)
        pages.clear()
        devices.arm(Fault("lost", "write"))
        assert pages.save(keys, random_pages(1, seed=2)).wait(20).all()
        assert slot_offset(store, pages, keys, 0) == offset, "the case needs the same slot"
        assert not load_in_parts(pages.load_parts(keys, random_pages(1))).any()
        settle(store)
        assert pages.match(keys).pages == 0


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_that_cannot_be_read_fails_its_page_alone(tmp_path: Path, part: int) -> None:
    keys, saved = run("a", 4), random_pages(4)
    with open_faulty(tmp_path / "s", segments=20) as (store, devices):
        pages = pages_of(store)
        assert pages.save(keys, saved).wait(20).all()
        devices.arm(Fault("error", "read", index=part * 4 + 2, errno=errno.EIO))
        assert load_in_parts(pages.load_parts(keys, saved.copy())).tolist() == [1, 1, 0, 1]
        settle(store)
        assert pages.match(keys).pages == 2 and pages.contains(keys).tolist() == [1, 1, 0, 1]


def test_a_passing_shortage_does_not_cost_the_page(tmp_path: Path) -> None:
    keys, saved = run("a", 2), random_pages(2)
    with open_faulty(tmp_path / "s", segments=20) as (store, devices):
        pages = pages_of(store)
        assert pages.save(keys, saved).wait(20).all()
        devices.arm(Fault("error", "read", errno=errno.ENOMEM))
        assert load_in_parts(pages.load_parts(keys, saved.copy())).tolist() == [False, True]
        assert load_in_parts(pages.load_parts(keys, saved.copy())).all()


def test_without_verification_a_failed_read_is_still_a_miss(tmp_path: Path) -> None:
    keys, saved = run("a", 3), random_pages(3)
    with open_faulty(tmp_path / "s", segments=20, verify=False) as (store, devices):
        pages, memory = pages_of(store), np.zeros_like(saved)
        assert pages.save(keys, saved).wait(20).all()
        assert load_in_parts(pages.load_parts(keys, memory)).all() and (memory == saved).all()
        devices.arm(Fault("error", "read", index=4))
        assert load_in_parts(pages.load_parts(keys, memory)).tolist() == [True, False, True]


# ---- waiting, holding, ending ----
def test_a_slow_part_is_waited_for_in_turns(tmp_path: Path) -> None:
    keys, saved = run("a", 2), random_pages(2)
    with open_faulty(tmp_path / "s", segments=20) as (store, devices):
        pages, memory = pages_of(store), np.zeros_like(saved)
        assert pages.save(keys, saved).wait(20).all()
        load = pages.load_parts(keys, memory)
        devices.arm(Fault("slow", "batch", polls=1))
        reading = load.start(0)
        with pytest.raises(BusyError, match="not there"):
            load.finish(reading, 0.0)
        with pytest.raises(BusyError, match="still being read"):
            load.end()
        assert load.finish(reading, 20).all() and load.finish(reading, 20).all()
        devices.arm(Fault("busy", "batch", count=2))
        with pytest.raises(BusyError, match="too many"):
            load.start(1)
        assert load.finish(load.start(1), 20).all() and load.finish(load.start(2), 20).all()
        load.end()
        assert (memory == saved).all()
        with pytest.raises(ValueError, match="no such"):
            load.start(0)


def test_an_open_load_protects_what_it_found(tmp_path: Path) -> None:
    """Pages that are evicted between two parts are still read right, and their slots are reused."""
    with open_small(tmp_path / "s", segments=6) as store:
        pages, saved = pages_of(store), random_pages(6)
        assert pages.save(run("a", 6), saved).wait(20).all()
        memory = np.zeros_like(saved)
        load = pages.load_parts(run("a", 6), memory)
        assert load.finish(load.start(0), 20).all()
        ticket = pages.save(run("b", 6), random_pages(6, seed=1))
        poll(lambda: pages.match(run("a", 6)).pages < 6, "something was evicted")
        assert load.finish(load.start(1), 20).all() and load.finish(load.start(2), 20).all()
        assert (memory == saved).all()
        load.end()
        ticket.wait(20)
        assert pages.save(run("b", 6), random_pages(6, seed=1)).wait(20).all()


def test_closing_a_store_ends_open_loads(tmp_path: Path) -> None:
    keys, saved = run("a", 4), random_pages(4)
    store = open_small(tmp_path / "s", segments=20)
    pages = pages_of(store)
    assert pages.save(keys, saved).wait(20).all()
    load = pages.load_parts(keys, saved.copy())
    load.start(0)
    start_s = time.monotonic()
    store.close(30)
    assert time.monotonic() - start_s < 20
    load.end()


@pytest.mark.parametrize("rooted", [True, False])
@pytest.mark.parametrize("tiers", [{}, {"dram": "256KiB"}])
def test_held_pages_stay_until_they_are_released(tmp_path: Path, rooted: bool, tiers) -> None:
    with open_small(tmp_path / "s", segments=4, policy="lru", **tiers) as store:
        pages = client(store)
        keys = run("held", 8)
        held_keys = keys if rooted else loose(keys)
        assert all(pages.save(held_keys))
        hold = pages.pages.hold(held_keys, 2, 4)
        assert hold.pages == 4
        for i in range(12):
            pages.save(run(("other", i), 8))
        assert pages.contains(held_keys)[2:6] == [True] * 4
        assert store.stats().counters["evicted_pages"] > 0
        hold.release()
        hold.release()
        for i in range(12):
            pages.save(run(("more", i), 8))
        assert pages.contains(held_keys)[2:6] != [True] * 4, "a released page stays for ever"
        assert not store._manager._entries[pages.name].pages.pins


def test_a_hold_counts_what_is_there(store: PrefixStore) -> None:
    pages = client(store)
    assert pages.pages.hold(run("a", 3)).pages == 0
    assert all(pages.save(run("a", 3)))
    longer = chain(*[("a", i) for i in range(3)], "x")
    assert pages.pages.hold(longer).pages == 3
    assert pages.pages.hold(longer, 1, 1).pages == 1
    assert pages.pages.hold(longer, 3).pages == 0


# ---- memory tiers ----
@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_selective"])
def test_parts_come_from_memory_tiers_too(tmp_path: Path, mode: str, write_policy: str) -> None:
    keys, saved = run("a", 20), random_pages(20)
    tiers = {"dram": "1MiB", "dram_mode": mode, "write_policy": write_policy}
    with open_small(tmp_path / "s", segments=40, **tiers) as store:
        pages = pages_of(store)
        assert pages.save(keys, saved).wait(20).all()
        for _ in range(4):  # from where it is first, then from where that has put it
            memory = np.zeros_like(saved)
            assert finish(pages.load_parts(keys, memory)).all() and (memory == saved).all()
            time.sleep(0.05)
        assert sum(tier.hits for tier in store.stats().tiers) == 80
        assert store.flush(20)
    with open_small(tmp_path / "s", segments=40, **tiers) as store:
        assert store.wait_restored(20)
        pages = pages_of(store)
        for _ in range(3):
            memory = np.zeros_like(saved)
            good = finish(pages.load_parts(keys, memory))
            assert good.all() and (memory == saved).all()
            poll(lambda: not store._mover._promotions, "promotions are done")
            time.sleep(0.05)
        tiers_now = {tier.name: tier for tier in store.stats().tiers}
        assert tiers_now["dram"].promoted == 20 and tiers_now["dram"].hits > 0
        assert "promotion_errors" not in store.stats().counters
    assert verify_store(tmp_path / "s").clean


def test_a_damaged_page_is_not_promoted(tmp_path: Path) -> None:
    keys, saved = run("a", 4), random_pages(4)
    with open_small(tmp_path / "s", segments=40) as store:
        pages = pages_of(store)
        assert pages.save(keys, saved).wait(20).all()
        offset = slot_offset(store, pages, keys, 2)
    with open(tmp_path / "s" / "pool.tutti", "r+b") as pool:
        pool.seek(offset + STORED - 4096)
        pool.write(bytes([int(saved[2, -100]) ^ 1]))
    with open_small(tmp_path / "s", segments=40, dram="1MiB") as store:
        assert store.wait_restored(20)
        pages = pages_of(store)
        load = pages.load_parts(keys, np.zeros_like(saved))
        reading = load.start(0)  # part 0 of all pages is right
        assert load.finish(reading, 20).all()
        load.end()  # not loaded whole, so nothing moves up
        store._stack.mover.promote(store._tiers[0], None, pages._entry, keys, np.arange(4))
        poll(lambda: store.stats().counters.get("promotion_errors", 0) == 1, "it was found")
        poll(lambda: store.stats().tiers[0].pages >= 2, "its ancestors were promoted")
        memory = np.zeros_like(saved)
        assert finish(pages.load_parts(keys, memory)).tolist() == [True, True, False, True]
        assert (memory[:2] == saved[:2]).all() and (memory[3] == saved[3]).all()


# ---- format ----
def test_a_store_of_version_1_keeps_its_pages_and_takes_none_in_parts(tmp_path: Path) -> None:
    with open_small(tmp_path / "s", segments=20) as store:
        whole = client(store)
        assert all(whole.save(run("a", 3)))
    make_version_1(tmp_path / "s")
    with open_small(tmp_path / "s", segments=20) as store:
        assert all(client(store).load(run("a", 3)))
        with pytest.raises(UnsupportedError, match="version 1"):
            pages_of(store)
        assert all(client(store).save(run("b", 3)))
    assert verify_store(tmp_path / "s").clean
    pool = (tmp_path / "s" / "pool.tutti").read_bytes()
    assert Superblock.decode(pool[:SUPERBLOCK_BYTES], "pool").version == 1


def make_version_1(path: Path) -> None:
    """Rewrite a store's superblocks as an earlier Tutti wrote them."""
    import lmdb

    with open(path / "pool.tutti", "r+b") as pool:
        old = replace(Superblock.decode(pool.read(SUPERBLOCK_BYTES), "pool"), version=1).encode()
        pool.seek(0)
        pool.write(old)
    with lmdb.open(str(path / "catalog"), max_dbs=8) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"superblock", old, db=meta)


def test_a_page_with_its_header_must_fit_a_segment(tmp_path: Path) -> None:
    with (
        open_small(tmp_path / "s") as store,
        pytest.raises(ConfigError, match="larger than a segment"),
    ):
        store.namespace(model="m", page_bytes=SEGMENT, page_tokens=1, parts=(SEGMENT,))


def test_the_reading_of_many_parts_is_bounded_by_the_device(tmp_path: Path) -> None:
    """A device that never answers holds the reading, not the caller."""
    config = small_config(tmp_path / "s", segments=20)
    devices = memory_devices(config)
    store = PrefixStore.open(config, transport_object=devices)
    pages, saved = pages_of(store), random_pages(2)
    assert pages.save(run("a", 2), saved).wait(20).all()
    devices.arm(Fault("slow", "batch", count=FOREVER, polls=0))
    load = pages.load_parts(run("a", 2), saved.copy())
    reading = load.start(0)
    for _ in range(3):
        with pytest.raises(BusyError):
            load.finish(reading, 0.001)
    devices.release()
    assert load.finish(reading, 20).all()
    load.end()
    store.close()
