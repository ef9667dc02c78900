"""tiers/manager.py: look-ups over tree and catalog, room for new pages, and what is evicted."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    PAGE,
    SEGMENT,
    chain,
    check_space,
    client,
    loose,
    open_faulty,
    open_small,
    run,
    settle,
    small_config,
)

from tutti_core import PageKeys, PrefixStore, StoreFullError, hashing
from tutti_core.errors import device_error
from tutti_core.index.catalog import Catalog
from tutti_core.index.radix import Locations
from tutti_core.testing import Fault
from tutti_core.tiers import manager as manager_module
from tutti_core.tiers import segments as segments_module
from tutti_core.tiers.manager import Entry

SLOTS = 16  # pages in a small store of two segments


@pytest.fixture
def store(store_dir: Path):
    with open_small(store_dir) as store:
        yield store
        check_space(store)


class TestEviction:
    def test_the_oldest_chain_goes_first_and_its_end_before_its_start(self, store) -> None:
        pages = client(store)
        old, new = run("old", 8), run("new", 8)
        pages.save(old)
        pages.save(new)
        assert pages.save(run("x", 3)) == [True] * 3
        assert (pages.match(old), pages.match(new)) == (5, 8)

    def test_a_match_protects_a_chain(self, store) -> None:
        pages = client(store)
        pages.save(run("a", 8))
        pages.save(run("b", 8))
        pages.match(run("a", 8))
        pages.save(run("x", 3))
        assert (pages.match(run("a", 8)), pages.match(run("b", 8))) == (8, 5)

    def test_a_chain_does_not_evict_its_own_ancestors(self, store) -> None:
        pages = client(store)
        pages.save(run("a", SLOTS))
        assert pages.save(run("a", SLOTS + 4)) == [True] * SLOTS + [False] * 4
        assert pages.match(run("a", SLOTS + 4)) == SLOTS

    def test_a_chain_larger_than_the_store_keeps_its_first_pages(self, store) -> None:
        pages = client(store)
        pages.save(run("other", SLOTS))
        assert pages.save(run("a", 3 * SLOTS)) == [True] * SLOTS + [False] * 2 * SLOTS
        assert pages.match(run("a", 3 * SLOTS)) == SLOTS

    def test_a_branch_takes_the_place_of_the_older_branch_not_of_their_trunk(self, store) -> None:
        pages = client(store)
        trunk = [("t", i) for i in range(6)]
        first = chain(*trunk, *[("1", i) for i in range(10)])
        second = chain(*trunk, *[("2", i) for i in range(10)])
        assert all(pages.save(first))
        assert all(pages.save(second))
        assert (pages.match(first), pages.match(second)) == (6, 16)

    def test_a_page_under_two_chains_is_evicted_once(self, store_dir: Path) -> None:
        """An engine that leaves ancestors out gives a page a second place in the tree."""
        with open_small(store_dir, segments=4) as store:
            pages, keys = client(store), run("a", 6)
            assert all(pages.save(keys))
            assert pages.match(PageKeys(keys.part(2, 6), 16)) == 4
            assert all(pages.save(run("b", 26))) and all(pages.save(run("c", 26)))
            check_space(store)

    def test_pages_of_others_do_not_hold_the_lock(self, store, monkeypatch) -> None:
        pages, foreign = client(store), run("foreign", 1000)
        where = Locations.absent(1000)
        where.slot[:] = np.arange(1000, dtype=np.uint64) | np.uint64(99 << 32)
        manager, looked_at, between = store._manager, [0], [0]
        manager._entries[pages.name].pages.insert(foreign.data, 0, True, where, 0)
        choose, pause = manager._choose_victim, manager_module.time.sleep

        def counted(room, pages_max: int, others_max: int):
            choice = choose(room, pages_max, others_max)
            looked_at[-1] += choice[1].span if choice else 0
            return choice

        def other_thread(seconds: float) -> None:
            between[0] += not manager.lock.locked()
            looked_at.append(0)
            pause(seconds)

        monkeypatch.setattr(manager, "_choose_victim", counted)
        monkeypatch.setattr(manager_module.time, "sleep", other_thread)
        assert all(pages.save(run("a", SLOTS))) and all(pages.save(run("b", SLOTS)))
        assert between[0] > 15 and max(looked_at) <= manager_module.EVICTION_STEP_PAGES

    def test_pages_of_another_size_make_room(self, store) -> None:
        small, large = client(store), client(store, model="large", page_bytes=3 * PAGE)
        assert all(small.save(run("a", SLOTS)))
        assert all(large.save(run("b", 2)))
        assert large.match(run("b", 2)) == 2 and small.match(run("a", SLOTS)) == 8
        assert all(small.save(run("c", SLOTS)))
        assert small.match(run("c", SLOTS)) == SLOTS and large.match(run("b", 2)) == 0

    def test_a_pin_keeps_pages_until_it_is_taken_off(self, store) -> None:
        pages = client(store)
        pages.save(run("a", SLOTS))
        assert pages.pages.pin(run("a", 5)) == 5
        assert all(pages.save(run("b", 11)))
        assert pages.save(run("c", 12)) == [True] * 11 + [False]
        assert pages.match(run("a", SLOTS)) == 5
        pages.pages.unpin(run("a", 5), 5)
        assert all(pages.save(run("d", SLOTS)))

    def test_a_page_in_two_places_is_not_given_up_twice(self, store) -> None:
        pages = client(store)
        pages.save(run("a", 8))
        assert all(pages.contains(loose(run("a", 8)))) and all(pages.load(loose(run("a", 8))))
        for i in range(12):
            assert all(pages.save(run(i, 8)))
        assert store.stats().counters.get("internal_errors", 0) == 0
        assert pages.match(run("a", 8)) == 0

    def test_a_page_dropped_by_its_key_alone_is_not_evicted_later(self, store_dir: Path) -> None:
        with open_faulty(store_dir) as (store, devices):
            pages = client(store)
            pages.save(run("a", 8))
            devices.arm(Fault("error", "read", count=8))
            assert not any(pages.load(loose(run("a", 8))))
            settle(store)
            assert pages.match(run("a", 8)) == 0 or not any(pages.load(run("a", 8)))
            assert pages.match(run("a", 8)) == 0
            for i in range(6):
                assert all(pages.save(run(i, 8)))
            check_space(store)

    def test_memory_that_is_out_of_date_does_not_free_a_slot_in_use(self, store) -> None:
        """Whatever the index believes: the space map knows what a slot holds."""
        pages = client(store)
        assert all(pages.save(run("good", 8)))
        entry = store._manager._entries[pages.name]
        where = store._manager.locate(entry, run("good", 8).data, 0, True)
        old = Locations(where.slot, where.checksum, where.generation + np.uint64(1 << 40))
        with store._manager.lock:
            entry.pages.insert(run("stale", 8).data, 0, True, old, 1)
            entry.pages.insert(run("other", 8).data, 0, False, old, 1)
        pages.match(run("good", 8))
        assert all(pages.save(run("x", 12)))
        assert pages.match(run("good", 8)) == 4 and all(pages.load(run("good", 4)))
        assert store.stats().counters["evicted_pages"] == 4

    def test_a_load_in_flight_keeps_its_slots_and_costs_no_other_pages(self, store_dir) -> None:
        with open_faulty(store_dir, segments=4) as (store, devices):
            pages, large = client(store), client(store, model="large", page_bytes=2 * PAGE)
            pages.save(run("a", 32))
            memory = bytearray(PAGE)
            with devices.held():
                ticket = pages.pages.load(run("a", 1), memory)
                save = large.pages.save(run("b", 1), bytes(2 * PAGE))
                with pytest.raises(Exception, match="not finished"):
                    save.wait(0.3)
                assert store.stats().counters["evicted_pages"] <= 2 * SEGMENT // PAGE
            assert save.wait(30).all() and ticket.wait(30).all()
            check_space(store)


class TestLookUp:
    def test_a_page_that_occurs_twice_in_a_call_takes_one_slot(self, store) -> None:
        pages = client(store)
        twice = PageKeys(run("a", 1).data * 2, 16, rooted=False)
        assert pages.save(twice) == [True, True] == pages.load(twice)
        assert store.stats().pages == 1 and store.stats().used_bytes == PAGE

    def test_dropping_a_page_that_occurs_twice_frees_one_slot(self, store_dir: Path) -> None:
        with open_faulty(store_dir) as (store, devices):
            pages = client(store)
            twice = PageKeys(run("a", 1).data * 2, 16, rooted=False)
            pages.save(twice)
            devices.arm(Fault("flip", "read", count=2))
            assert pages.load(twice) == [False, False]
            check_space(store)
            assert all(pages.save(run("b", SLOTS)))

    def test_a_collision_of_record_keys_is_a_miss(self, store, monkeypatch) -> None:
        monkeypatch.setattr(
            hashing, "record_keys", lambda prefix, keys, width: b"same" * 4 * (len(keys) // width)
        )
        pages = client(store)
        assert pages.save(run("a", 1)) == [True]
        assert pages.match(run("b", 1)) == 0 and pages.contains(run("b", 1)) == [False]
        assert pages.save(run("b", 1)) == [False]
        assert pages.load(run("b", 1)) == [False] and pages.load(run("a", 1)) == [True]

    def test_a_collision_between_namespaces_is_a_miss(self, store, monkeypatch) -> None:
        monkeypatch.setattr(
            hashing, "record_keys", lambda prefix, keys, width: b"same" * 4 * (len(keys) // width)
        )
        client(store).save(run("a", 1))
        other = client(store, model="other")
        assert other.match(run("a", 1)) == 0 and other.save(run("a", 1)) == [False]
        assert other.load(run("a", 1)) == [False]

    def test_holes_are_seen_by_contains_and_end_a_match(self, store) -> None:
        pages = client(store)
        keys = run("a", 6)
        pages.save(PageKeys(keys.part(0, 2), 16))
        pages.save(keys, first=4)
        assert pages.contains(keys) == [True, True, False, False, True, True]
        assert pages.match(keys) == 2 and pages.match(keys, 4) == 2 and pages.match(keys, 2) == 0
        assert pages.load(keys) == [True, True, False, False, True, True]
        assert pages.save(keys) == [True] * 6 and pages.match(keys) == 6

    def test_unrooted_keys_find_rooted_pages_and_the_other_way_round(self, store) -> None:
        pages = client(store)
        keys = run("a", 6)
        pages.save(PageKeys(keys.part(0, 3), 16))
        pages.save(PageKeys(keys.part(3, 6), 16, rooted=False))
        assert pages.match(loose(keys)) == 6 and pages.match(keys) == 6
        assert all(pages.load(keys)) and all(pages.load(loose(keys)))


class TestClear:
    def test_it_takes_its_own_namespace_and_no_other(self, store) -> None:
        pages, other = client(store), client(store, dtype="fp8")
        pages.save(run("a", 5))
        other.save(run("a", 4))
        assert pages.pages.clear() == 5
        assert pages.match(run("a", 5)) == 0 and not any(pages.contains(run("a", 5)))
        assert other.match(run("a", 4)) == 4 and all(other.load(run("a", 4)))
        assert pages.pages.clear() == 0 and all(pages.save(run("a", 5)))

    def test_a_look_up_meanwhile_does_not_bring_pages_back(self, store, monkeypatch) -> None:
        pages = client(store)
        pages.save(run("a", 8))
        remove = store._manager.remove_dropped

        def look_up_first(entry: Entry, dropped: list[tuple[bytes, int, int]]) -> None:
            assert pages.match(run("a", 8)) == 0  # although their records are still there
            remove(entry, dropped)

        monkeypatch.setattr(store._manager, "remove_dropped", look_up_first)
        pages.pages.clear()
        assert pages.match(run("a", 8)) == 0

    def test_a_pin_outlives_it(self, store) -> None:
        pages = client(store)
        pages.save(run("a", 4))
        pages.pages.pin(run("a", 4))
        pages.pages.clear()
        pages.save(run("a", 4))
        pages.save(run("b", SLOTS))
        assert pages.match(run("a", 4)) == 4
        pages.pages.unpin(run("a", 4), 4)


class TestCatalogTrouble:
    @pytest.mark.parametrize("call", ["remove", "publish", "claim_segment", "record_count"])
    def test_saving_goes_on_after_the_catalog_refused(self, store, monkeypatch, call) -> None:
        pages = client(store)
        assert all(pages.save(run("a", 12)))

        def refuse(self: Catalog, *arguments: object) -> None:
            raise StoreFullError("the catalog is full")

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, call, refuse)
            stored = pages.save(run("b", 8))
            assert not all(stored)
        assert store.stats().counters["catalog_errors"] >= 1
        assert store.stats().counters.get("internal_errors", 0) == 0
        assert all(pages.save(run("c", 8))) and all(pages.load(run("c", 8)))
        assert pages.match(run("b", 8)) <= sum(stored)

    def test_pages_whose_removal_failed_are_not_served(self, store, monkeypatch) -> None:
        pages = client(store)
        pages.save(run("a", SLOTS))

        def refuse(self: Catalog, *arguments: object) -> None:
            raise StoreFullError("the catalog is full")

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "remove", refuse)
            assert pages.save(run("b", 1)) == [False]
            left = pages.match(run("a", SLOTS))
            assert left < SLOTS and pages.contains(run("a", SLOTS)) == [True] * left + [False] * (
                SLOTS - left
            )
            assert pages.save(run("a", SLOTS))[left:] == [False] * (SLOTS - left)
        assert all(pages.save(run("b", 8)))

    def test_a_passing_trouble_does_not_make_the_store_smaller(self, store, monkeypatch) -> None:
        pages = client(store)

        def refuse(self: Catalog, *arguments: object) -> None:
            raise device_error("commit", errno.EIO)

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "publish", refuse)
            assert pages.save(run("a", 1)) == [False]
        for name in ("b", "c"):
            assert all(pages.save(run(name, SLOTS // 2)))
        assert pages.match(run("b", SLOTS // 2)) == SLOTS // 2

    def test_clear_reports_a_catalog_that_refuses(self, store, monkeypatch) -> None:
        pages = client(store)
        pages.save(run("a", 4))

        def refuse(self: Catalog, *arguments: object) -> None:
            raise StoreFullError("the catalog is full")

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "remove", refuse)
            with pytest.raises(StoreFullError):
                pages.pages.clear()
        assert all(pages.save(run("b", SLOTS)))

    def test_more_pages_than_the_catalog_holds_are_evicted_in_time(self, store_dir, rng) -> None:
        with open_small(store_dir, segments=40, segment=1 << 20, durability="none") as store:
            pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=1, key_bytes=32)
            memory = bytes(256 * PAGE)
            late = []
            for _ in range(36):
                keys = PageKeys(rng.randbytes(32 * 256), 32)
                late.append(bool(pages.save(keys, memory).wait(60).all()))
            counters = store.stats().counters
            assert counters.get("internal_errors", 0) == 0 and sum(late) > 30
            assert (store_dir / "catalog" / "data.mdb").stat().st_size <= 2 << 20


class TestRestart:
    def test_everything_is_there_again_and_in_the_same_order(self, store_dir: Path) -> None:
        with open_small(store_dir) as store:
            client(store).save(run("old", 8))
            client(store).save(run("new", 6))
        with open_small(store_dir) as store:
            assert store.wait_restored(20)
            pages = client(store)
            assert (pages.match(run("old", 8)), pages.match(run("new", 6))) == (8, 6)
            assert store._manager._entries[pages.name].pages.page_count == 14
            pages.match(run("old", 8))
            pages.save(run("x", 4))
            assert (pages.match(run("old", 8)), pages.match(run("new", 6))) == (8, 4)
            check_space(store)

    def test_answers_are_right_before_the_index_is_restored(self, store_dir, monkeypatch) -> None:
        with open_small(store_dir) as store:
            client(store).save(run("a", 8))
        gate = threading.Event()
        scan = Catalog.scan_records

        def late(self: Catalog, chunk: int):
            gate.wait(30)
            return scan(self, chunk)

        monkeypatch.setattr(Catalog, "scan_records", late)
        with open_small(store_dir) as store:
            pages = client(store)
            assert not store.wait_restored(0)
            assert pages.match(run("a", 8)) == 8 and all(pages.load(run("a", 8)))
            assert all(pages.save(run("b", 4))) and pages.pages.pin(run("b", 4)) == 4
            assert all(pages.save(loose(run("c", 2))))
            gate.set()
            assert store.wait_restored(30)
            assert pages.match(run("a", 8)) == 8 and pages.match(run("b", 4)) == 4
            assert store.stats().pages == store._manager._entries[pages.name].pages.page_count
            assert all(pages.save(run("d", 12))) and pages.match(run("b", 4)) == 4
            check_space(store)

    def test_a_damaged_record_costs_one_page(self, store_dir: Path) -> None:
        with open_small(store_dir) as store:
            pages = client(store)
            pages.save(run("a", 8))
            entry = store._manager._entries[pages.name]
            key = entry.record_keys(run("a", 8)[4])
            with store._catalog._begin(write=True) as (txn, db):
                raw = bytearray(txn.get(key, db=db.records))
                raw[80] ^= 1  # its checksum of the payload
                txn.put(key, bytes(raw), db=db.records)
        with open_small(store_dir) as store:
            assert store.wait_restored(20)
            pages = client(store)
            assert pages.contains(run("a", 8)) == [True] * 4 + [False] + [True] * 3
            assert pages.save(run("a", 8)) == [True] * 8 and all(pages.load(run("a", 8)))
            check_space(store)

    def test_segments_beyond_this_process_s_layout_are_left_alone(self, store_dir: Path) -> None:
        with open_small(store_dir, writers_max=2) as small:
            with open_small(store_dir, segments=6, writers_max=2) as large:
                assert client(large).save(run("a", 24)).count(True) == 24
                pages = client(small)
                for _ in range(2):
                    loaded = pages.load(run("a", 24))
                    assert loaded == pages.contains(run("a", 24))
                settle(small)
                assert large.stats().pages == 24, "a page out of reach was taken for unreadable"
                assert all(client(large).load(run("a", 24)))


def test_pages_are_striped_over_the_pools(fast_path: Path) -> None:
    pools = [fast_path / name for name in "abc"]
    with open_small(fast_path / "s", pools=pools) as store:
        pages = client(store)
        assert all(pages.save(run("a", 24)))
        found = store._manager.locate(
            store._manager._entries[pages.name], run("a", 24).data, 0, True
        )
        devices, _ = store._manager.extents(found.slot, PAGE)
        assert np.bincount(devices).tolist() == [8, 8, 8]
        assert devices.tolist()[:6] == [0, 1, 2, 0, 1, 2]
        assert all(pages.save(run("b", 48))) and all(pages.load(run("b", 48)))
        check_space(store)


def test_a_disk_that_is_full_below_the_capacity_makes_room_by_evicting(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    with open_small(store_dir, segments=4) as store:
        pages = client(store)
        assert all(pages.save(run("a", 8)))

        def full(layout: object, segment: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(segments_module, "preallocate_segment", full)
        assert all(pages.save(run("b", 6)))
        assert (pages.match(run("a", 8)), pages.match(run("b", 6))) == (2, 6)
        assert store.stats().counters["disk_full"] == 1
        check_space(store)


def test_the_default_configuration_of_a_small_store_evicts(store_dir: Path) -> None:
    with PrefixStore.open(store_dir, capacity="10MiB", transport="posix") as store:
        pages = client(store)
        for i in range(20):
            assert all(pages.save(run(i, 32)))
            assert pages.match(run(i, 32)) == 32
        assert store.stats().counters["evicted_pages"] > 0


def test_small_config_is_what_it_says(store_dir: Path) -> None:
    assert small_config(store_dir).segments_per_pool(1 << 20) == 2
