"""tiers/limits.py and what keeps to it: shares, TTLs, admission, the write budget, bypass."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from store_kit import (
    PAGE,
    SEGMENT,
    Client,
    chain,
    check_space,
    client,
    finish,
    loose,
    open_faulty,
    open_small,
    poll,
    run,
    settle,
)
from tier_kit import DRAM, check_tiers, dram, in_memory, on_devices, quiesce, tiered

import tutti_core
from tutti_core import ConfigError, PageKeys, PrefixStore, StoreConfig
from tutti_core.index.catalog import Catalog
from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import Locations
from tutti_core.policies.admission import ADMISSIONS
from tutti_core.policies.budget import BURSTS_PER_DAY, DAY_NS, WriteBudget
from tutti_core.policies.choice import POLICIES
from tutti_core.policies.reuse import Reuse
from tutti_core.testing import Fault
from tutti_core.tiers import manager as manager_module
from tutti_core.tiers import mover
from tutti_core.tiers.limits import PIECE_PAGES_MAX, Limits, expired

SLOTS = 16  # pages in a small store of two segments
TTL_S = 100.0
HOUR_S = 3600.0


@pytest.fixture
def store(store_dir: Path) -> Iterator[PrefixStore]:
    with open_small(store_dir, policy="lru") as store:
        yield store
        check_space(store)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "FAILURE_PAUSE_S", 0.01)


def counter(store: PrefixStore, name: str) -> int:
    return store.stats().counters.get(name, 0)


# ---- settings ----
@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, math.inf, "half", True])
def test_an_impossible_share_is_refused(store, share) -> None:
    pages = client(store)
    with pytest.raises(ConfigError, match="share"):
        pages.pages.limit(share=share)
    assert all(pages.save(run("a", 4)))


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.nan, math.inf, "day", True])
def test_an_impossible_ttl_is_refused(store, ttl_s) -> None:
    with pytest.raises(ConfigError, match="ttl_s"):
        client(store).pages.limit(ttl_s=ttl_s)


def test_shares_are_parts_of_one(store) -> None:
    one, other = client(store), client(store, model="other")
    one.pages.limit(share=0.6)
    with pytest.raises(ConfigError, match=r"share = 0.5: other namespaces have 0.6"):
        other.pages.limit(share=0.5)
    other.pages.limit(share=0.4)
    one.pages.limit(share=0.5)
    one.pages.limit(share=0.6)  # in place of its own
    with pytest.raises(ConfigError):
        other.pages.limit(share=0.41)
    for i in range(10):
        client(store, model=str(i)).pages.limit(share=0.0)
    one.pages.limit()
    other.pages.limit(share=1)


def test_ten_tenths_are_one(store) -> None:
    for i in range(10):
        client(store, model=f"m{i}").pages.limit(share=0.1)
    with pytest.raises(ConfigError):
        client(store, model="one more").pages.limit(share=0.001)


def test_limits_belong_to_the_namespace_whoever_sets_them(store, clock) -> None:
    one, same = client(store), client(store)
    one.pages.limit(ttl_s=TTL_S)
    assert all(same.save(run("a", 2)))
    clock.advance(TTL_S + 1)
    assert same.match(run("a", 2)) == 0
    same.pages.limit()
    assert one.match(run("a", 2)) == 2
    assert one.pages.clear() == 2
    one.pages.limit(share=0.5)
    one.pages.clear()
    with pytest.raises(ConfigError):
        client(store, model="other").pages.limit(share=0.6)


def test_a_very_short_ttl_is_a_ttl() -> None:
    assert Limits(ttl_s=1e-12).ttl_ns == 1 and Limits().ttl_ns is None
    assert Limits(ttl_s=1e300).ttl_ns > 1 << 900


def test_names_in_the_configuration_are_those_that_there_are() -> None:
    fields = StoreConfig.model_fields
    assert list(get_args(fields["policy"].annotation)) == list(POLICIES)
    assert list(get_args(fields["admission"].annotation)) == list(ADMISSIONS)
    assert "TierStats" in tutti_core.__all__


# ---- share ----
class TestShare:
    def test_within_its_share_a_namespace_loses_nothing_to_others(self, store) -> None:
        mine, other = client(store), client(store, model="other")
        mine.pages.limit(share=0.5)
        assert all(mine.save(run("mine", 8)))
        for i in range(6):
            assert all(other.save(run(i, 8)))
        assert mine.match(run("mine", 8)) == 8
        assert other.save(run("large", SLOTS)) == [True] * 8 + [False] * 8
        assert mine.match(run("mine", 8)) == 8 and all(mine.load(run("mine", 8)))
        mine.pages.limit()
        assert all(other.save(run("large", SLOTS)))

    def test_it_borrows_what_others_leave_and_gives_that_back(self, store) -> None:
        mine, other = client(store), client(store, model="other")
        mine.pages.limit(share=0.25)
        other.pages.limit(share=0.75)
        assert all(mine.save(run("mine", SLOTS)))
        for i in range(3):  # each time the borrowed pages go first, and not one of its own
            assert all(other.save(run(i, 4)))
            assert mine.match(run("mine", SLOTS)) == SLOTS - 4 * (i + 1)
            assert [other.match(run(j, 4)) for j in range(i + 1)] == [4] * (i + 1)
        assert all(other.save(run("more", 4)))
        assert mine.match(run("mine", SLOTS)) == 4
        assert sum(other.match(run(j, 4)) for j in (0, 1, 2, "more")) == 12

    def test_within_its_share_it_takes_from_those_beyond_theirs_before_its_own(self, store) -> None:
        mine, other = client(store), client(store, model="other")
        mine.pages.limit(share=0.5)
        assert all(mine.save(run("old", 4)))
        assert all(other.save(run("other", 12)))
        assert all(mine.save(run("new", 4)))
        assert (mine.match(run("old", 4)), other.match(run("other", 12))) == (4, 8)
        other.match(run("other", 12))
        assert all(mine.save(run("newer", 4)))  # beyond its share the oldest goes, whose ever
        assert (mine.match(run("new", 4)), other.match(run("other", 12))) == (0, 8)
        assert all(mine.save(run("large", 12)))
        assert (mine.match(run("large", 12)), other.match(run("other", 12))) == (12, 4)

    def test_a_share_is_given_back_whatever_the_borrowed_pages_are_worth(
        self, store_dir, monkeypatch
    ) -> None:
        monkeypatch.setattr(Reuse, "worth", lambda self, parts, *rest: [0.0] * len(parts))
        monkeypatch.setattr(Reuse, "value", lambda self, leaf, now: 1.0)
        with open_small(store_dir) as store:
            mine, other = client(store), client(store, model="other")
            assert all(other.save(run("other", SLOTS)))
            assert mine.save(run("mine", 4)) == [False] * 4
            mine.pages.limit(share=0.25)
            assert all(mine.save(run("mine", 4)))
            assert other.match(run("other", SLOTS)) == 12
            assert mine.save(run("more", 1)) == [False]
            check_space(store)

    @pytest.mark.parametrize("large_first", [True, False])
    def test_pages_of_different_sizes(self, store_dir, large_first: bool) -> None:
        with open_small(store_dir, segments=8, policy="lru") as store:
            small, large = client(store), client(store, model="large", page_bytes=3 * PAGE)
            mine, other = (large, small) if large_first else (small, large)
            mine.pages.limit(share=0.5)
            size = 3 if large_first else 1
            count = 4 * SEGMENT // PAGE // size  # what its share is in pages
            keys = [run(("mine", i), 1) for i in range(count)]
            for key in keys:
                assert mine.save(key) == [True]
            for i in range(40):
                other.save(run(("other", i), 3))
            assert [mine.match(key) for key in keys] == [1] * count
            assert other.match(run(("other", 39), 3)) == 3, "the other half is the other's"
            check_space(store)

    def test_pages_of_other_processes_do_not_count(self, store) -> None:
        """They stand in the tree, but evicting them frees nothing."""
        mine, other = client(store), client(store, model="other")
        foreign = run("foreign", 100)
        where = Locations.absent(100)
        where.slot[:] = np.arange(100, dtype=np.uint64) | np.uint64(99 << 32)
        mine.pages.limit(share=0.5)
        assert all(mine.save(run("mine", 8)))
        with store._manager.lock:
            mine.pages._entry.pages.insert(
                foreign.data, 0, True, where, manager_module.time.monotonic_ns()
            )
        for i in range(4):
            assert all(other.save(run(i, 8)))
        assert mine.match(run("mine", 8)) == 8

    def test_pages_of_before_opening_count(self, store_dir) -> None:
        with open_small(store_dir, policy="lru") as store:
            assert all(client(store).save(run("mine", 8)))
        with open_small(store_dir, policy="lru") as store:
            mine, other = client(store), client(store, model="other")
            mine.pages.limit(share=0.5)
            for i in range(4):
                assert all(other.save(run(i, 8)))
            assert mine.match(run("mine", 8)) == 8
            check_space(store)

    def test_pages_that_were_lost_do_not_count(self, store_dir) -> None:
        with open_faulty(store_dir, policy="lru") as (store, devices):
            mine, other = client(store), client(store, model="other")
            assert all(mine.save(run("mine", 8)))
            devices.arm(Fault("error", "read", count=8))
            assert not any(mine.load(run("mine", 8)))
            settle(store)
            check_space(store)
            assert all(mine.save(run("mine", 8))) and mine.pages.clear() == 8
            assert all(other.save(run("other", SLOTS)))
            check_space(store)


# ---- ttl ----
class TestTtl:
    def test_unused_pages_are_a_miss_everywhere(self, store, clock) -> None:
        pages, keys = client(store), run("a", 6)
        pages.pages.limit(ttl_s=TTL_S)
        assert all(pages.save(keys))
        clock.advance(TTL_S - 1)
        assert pages.match(keys) == 6  # a use renews
        clock.advance(TTL_S - 1)
        assert all(pages.load(keys))  # so does a load
        clock.advance(TTL_S - 1)
        assert all(pages.contains(keys))
        clock.advance(TTL_S + 1)
        known = counter(store, "known_pages")
        for _ in range(2):  # looking does not bring them back
            assert not any(pages.contains(keys)) and not any(pages.load(keys))
            assert not any(pages.contains(keys, 4)) and not any(pages.load(keys, 2))
            assert pages.match(keys) == 0 and pages.match(keys, 3) == 0
            assert pages.pages.pin(keys) == 0
        assert all(pages.save(keys)) and counter(store, "known_pages") == known
        assert pages.match(keys) == 6 and all(pages.load(keys))
        assert store.stats().pages == 6

    def test_a_used_prefix_outlives_the_rest_of_its_chain(self, store, clock) -> None:
        pages, keys = client(store), run("a", 6)
        pages.pages.limit(ttl_s=TTL_S)
        assert all(pages.save(keys))
        clock.advance(TTL_S - 1)
        assert pages.match(PageKeys(keys.part(0, 2), 16)) == 2
        clock.advance(2)
        assert pages.contains(keys) == [True] * 2 + [False] * 4
        assert pages.load(keys) == [True] * 2 + [False] * 4
        assert pages.match(keys) == 2 and pages.match(keys, 2) == 0
        assert pages.save(keys) == [True] * 6 and all(pages.load(keys))

    def test_room_is_reclaimed_with_the_next_save(self, store, clock) -> None:
        pages, other = client(store), client(store, model="other")
        pages.pages.limit(ttl_s=TTL_S)
        assert all(pages.save(run("a", 8))) and all(pages.save(loose(run("loose", 2))))
        assert all(other.save(run("b", 4)))
        clock.advance(TTL_S + 1)
        assert store.stats().pages == 14
        assert all(other.save(run("c", 1)))
        assert store.stats().pages == 5 and store.stats().used_bytes == 5 * PAGE
        assert counter(store, "expired_pages") == 10 and counter(store, "evicted_pages") == 0
        check_space(store)
        assert pages.match(run("a", 8)) == 0 and not any(pages.contains(loose(run("a", 8))))
        assert not any(pages.contains(loose(run("loose", 2)))) and other.match(run("b", 4)) == 4

    def test_pages_without_their_chain(self, store, clock) -> None:
        pages, keys = client(store), loose(run("a", 4))
        pages.pages.limit(ttl_s=TTL_S)
        assert all(pages.save(keys))
        clock.advance(TTL_S - 1)
        assert all(pages.load(loose(run("a", 2))))
        clock.advance(2)
        assert pages.contains(keys) == [True] * 2 + [False] * 2
        clock.advance(TTL_S + 1)
        assert pages.match(run("a", 4)) == 0, "its chain becomes known, but it is too old"
        assert not any(pages.load(keys)) and not any(pages.contains(keys))
        assert all(pages.save(keys)) and all(pages.load(keys))
        check_space(store)

    def test_what_was_there_at_opening_counts_as_used_then(self, store_dir, clock) -> None:
        with open_small(store_dir) as store:
            assert all(client(store).save(run("a", 4))) and all(client(store).save(run("b", 4)))
            assert all(client(store).save(loose(run("c", 2))))
        clock.advance(10 * TTL_S)
        with open_small(store_dir) as store:
            pages = client(store)
            pages.pages.limit(ttl_s=TTL_S)
            assert store.wait_restored(20)
            clock.advance(TTL_S - 1)
            assert pages.match(run("a", 4)) == 4 and all(pages.contains(run("b", 4)))
            clock.advance(TTL_S - 1)
            assert pages.match(run("a", 4)) == 4
            clock.advance(2)
            assert pages.match(run("b", 4)) == 0 and not any(pages.load(run("b", 4)))
            assert all(pages.save(run("d", 1)))
            assert pages.match(run("a", 4)) == 4 and store.stats().pages == 5
            check_space(store)

    def test_what_only_the_catalog_knows_counts_as_used_at_opening(
        self, store_dir, clock, monkeypatch
    ) -> None:
        with open_small(store_dir) as store:
            assert all(client(store).save(run("a", 4))) and all(client(store).save(run("b", 4)))
        scan, opened = Catalog.scan_records, []

        def late(self: Catalog, chunk: int):
            poll(lambda: bool(opened), "the test lets the index be restored", 60.0)
            return scan(self, chunk)

        monkeypatch.setattr(Catalog, "scan_records", late)
        with open_small(store_dir) as store:
            pages = client(store)
            pages.pages.limit(ttl_s=TTL_S)
            clock.advance(TTL_S - 1)
            assert pages.match(run("a", 4)) == 4
            clock.advance(2)
            assert pages.match(run("b", 4)) == 0 and not any(pages.load(run("b", 4)))
            assert pages.match(run("a", 4)) == 4
            opened.append(True)
            assert store.wait_restored(20)
            assert pages.match(run("b", 4)) == 0 and pages.match(run("a", 4)) == 4
            assert all(pages.save(run("b", 4))) and all(pages.load(run("b", 4)))
            check_space(store)

    def test_pinned_pages_keep_their_room_but_not_their_life(self, store, clock) -> None:
        pages, keys = client(store), run("a", 4)
        pages.pages.limit(ttl_s=TTL_S)
        assert all(pages.save(keys)) and pages.pages.pin(keys) == 4
        clock.advance(TTL_S + 1)
        assert all(pages.save(run("b", 1)))
        assert pages.match(keys) == 0 and store.stats().pages == 5
        pages.pages.unpin(keys, 4)
        clock.advance(TTL_S / 4)
        assert all(pages.save(run("c", 1)))
        assert store.stats().pages == 2

    def test_much_that_expires_does_not_hold_the_lock(self, store_dir, clock, monkeypatch) -> None:
        monkeypatch.setattr(manager_module, "EXPIRED_PAGES_MAX", 200)
        with open_small(store_dir, segments=64) as store:
            pages, between = client(store), []
            pages.pages.limit(ttl_s=TTL_S)
            assert all(pages.save(run("long", 300)))
            for i in range(30):
                assert all(pages.save(run(i, 3)))
            clock.advance(TTL_S + 1)
            pause = manager_module.time.sleep

            def other_thread(seconds: float) -> None:
                between.append(not store._manager.lock.locked())
                pause(seconds)

            with monkeypatch.context() as patch:
                patch.setattr(manager_module.time, "sleep", other_thread)
                assert all(pages.save(run("x", 1)))
            assert len(between) >= 3 and any(between)
            assert 200 <= counter(store, "expired_pages") < 200 + manager_module.EVICTION_STEP_PAGES
            assert pages.match(run("long", 300)) == 0 and pages.match(run(3, 3)) == 0
            assert all(pages.save(run("y", 1)))  # goes on at once
            assert counter(store, "expired_pages") == 390 and store.stats().pages == 2
            check_space(store)


def test_expired_pages_come_in_pieces_and_from_the_end() -> None:
    pages, width = NamespacePages(16), 16
    trunk, count = run("a", 200), PIECE_PAGES_MAX
    branch = PageKeys(trunk.data + run("b", 5).data, width)
    where = Locations.absent(205)
    where.slot[:] = where.generation[:] = np.arange(205, dtype=np.uint64)
    pages.insert(trunk.data, 0, True, where.part(0, 200), 10)
    pages.match(trunk.data, 0, 11)
    pages.insert(branch.data, 200, True, where.part(200, 205), 12)
    assert list(expired(pages, 11)) == []
    found = []
    for victim in expired(pages, 100):
        found.append(victim.slot.tolist())
        pages.forget(victim, 100)
    assert found[0] == [200, 201, 202, 203, 204] and max(map(len, found)) == count
    assert sorted(slot for piece in found for slot in piece) == list(range(205))
    assert pages.page_count == 0
    pages.tree.check()


def test_what_is_used_between_two_pieces_stays() -> None:
    pages = NamespacePages(16)
    where = Locations.absent(150)
    where.slot[:] = where.generation[:] = np.arange(150, dtype=np.uint64)
    for name in "ab":
        pages.insert(run(name, 150).data, 0, True, where, 10)
    victims = expired(pages, 100)
    first = next(victims)
    pages.forget(first, 100)
    for name in "ab":
        pages.match(run(name, 150).data, 0, 101)
    assert list(victims) == [] and pages.page_count == 300 - len(first.slot)


class TestTtlInMemory:
    @pytest.mark.parametrize("policy", ["write_through", "write_back", "write_selective"])
    @pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
    def test_unused_pages_are_a_miss_and_stay_away(self, store_dir, clock, policy, mode) -> None:
        with tiered(store_dir, write_policy=policy, dram_mode=mode) as (store, devices):
            pages, keys, alone = client(store), run("a", 6), loose(run("loose", 2))
            pages.pages.limit(ttl_s=TTL_S)
            assert all(pages.save(keys)) and all(pages.save(alone))
            clock.advance(TTL_S - 1)
            assert pages.match(keys) == 6 and all(pages.load(alone))
            quiesce(store)
            clock.advance(TTL_S - 1)
            assert all(pages.load(keys)) and all(pages.contains(alone))
            quiesce(store)
            clock.advance(TTL_S + 1)
            before = devices.stats().write_items
            for _ in range(2):
                assert not any(pages.contains(keys)) and not any(pages.load(keys))
                assert not any(pages.contains(keys, 4)) and not any(pages.load(keys, 2))
                assert pages.match(keys) == 0 and pages.match(keys, 3) == 0
                assert not any(pages.contains(alone)) and not any(pages.load(alone))
                quiesce(store)
            assert store.flush(20), "what is past its TTL need not be written"
            assert devices.stats().write_items == before
            check_tiers(store)
            assert all(pages.save(run("x", 1)))
            quiesce(store)
            assert len(in_memory(store, pages.name)) <= 1 and dram(store).used_bytes <= PAGE
            assert all(pages.save(keys)) and pages.match(keys) == 6 and all(pages.load(keys))
            check_tiers(store)

    @pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
    def test_clearing_counts_each_page_that_is_too_old_once(self, store_dir, clock, mode) -> None:
        with tiered(store_dir, dram_mode=mode) as (store, _):
            pages, keys, alone = client(store), run("a", 4), loose(run("b", 2))
            pages.pages.limit(ttl_s=TTL_S)
            assert all(pages.save(keys)) and all(pages.save(alone)) and all(pages.load(keys))
            quiesce(store)
            clock.advance(TTL_S + 1)
            assert pages.pages.clear() == 6
            check_tiers(store)

    def test_a_second_save_of_a_page_that_is_too_old_loses_no_slot(self, store_dir, clock) -> None:
        with tiered(store_dir, write_policy="write_back") as (store, _):
            pages, keys = client(store), run("a", 4)
            pages.pages.limit(ttl_s=TTL_S)
            assert all(pages.save(keys))
            pages.pages.pin(keys)  # so that it is there still
            clock.advance(TTL_S + 1)
            assert pages.match(keys) == 0
            assert all(pages.save(keys, seed=7)) and pages.match(keys) == 4
            assert all(pages.load(keys))
            pages.pages.unpin(keys, 4)
            check_tiers(store)

    def test_writing_a_page_down_is_no_use_of_it(self, store_dir, clock) -> None:
        with tiered(store_dir, write_policy="write_back") as (store, _):
            pages, keys, alone = client(store), run("a", 4), loose(run("b", 2))
            pages.pages.limit(ttl_s=TTL_S)
            assert all(pages.save(keys)) and all(pages.save(alone))
            clock.advance(TTL_S - 10)
            assert store.flush(20) and len(on_devices(store, pages.name)) == 6
            dram(store).clear(pages.pages._entry)
            assert all(store._manager.locate(pages.pages._entry, keys.data, 0, True).slot < 1 << 63)
            clock.advance(TTL_S + 11)
            quiesce(store)
            assert pages.match(keys) == 0 and not any(pages.contains(alone))

    def test_written_down_and_left_alone(self, store_dir, clock) -> None:
        with tiered(store_dir, write_policy="write_back") as (store, _):
            pages, keys, alone = client(store), run("a", 4), loose(run("b", 2))
            pages.pages.limit(ttl_s=TTL_S)
            assert all(pages.save(keys)) and all(pages.save(alone))
            clock.advance(TTL_S - 10)
            assert store.flush(20)
            dram(store).clear(pages.pages._entry)
            clock.advance(11)
            assert pages.match(keys) == 0 and not any(pages.load(keys))
            assert not any(pages.contains(alone))
            check_tiers(store)

    def test_three_tiers(self, store_dir, clock) -> None:
        with tiered(store_dir, write_policy="write_back", hbm=DRAM) as (store, _):
            pages, keys = client(store), run("a", 6)
            pages.pages.limit(ttl_s=TTL_S)
            assert all(pages.save(keys)) and all(pages.load(keys))
            quiesce(store)
            assert len(in_memory(store, pages.name)) == 6
            clock.advance(TTL_S + 1)
            assert pages.match(keys) == 0 and not any(pages.load(keys))
            assert all(pages.save(run("x", 1))) and all(pages.load(run("x", 1)))
            check_tiers(store)
            assert not in_memory(store, pages.name).keys() & set(keys)


# ---- admission ----
class TestAdmission:
    @pytest.mark.parametrize("name", ["second_touch", "frequency"])
    def test_the_second_save_is_kept(self, store_dir, name: str) -> None:
        with open_small(store_dir, admission=name) as store:
            pages, keys = client(store), run("a", 5)
            assert pages.save(keys) == [False] * 5 and pages.match(keys) == 0
            assert counter(store, "pages_not_admitted") == 5
            assert pages.save(keys) == [True] * 5 and all(pages.load(keys))
            assert counter(store, "pages_not_admitted") == 5
            assert counter(store, "saved_pages") == 5
            assert counter(store, "pages_refused_full") == 0
            check_space(store)

    @pytest.mark.parametrize("name", ["second_touch", "frequency"])
    def test_never_a_page_without_its_ancestors(self, store_dir, name: str) -> None:
        with open_small(store_dir, admission=name, segments=4) as store:
            pages = client(store)
            trunk = [("t", i) for i in range(3)]
            one, other = chain(*trunk, "1", "2"), chain(*trunk, "3", "4")
            assert not any(pages.save(one))
            assert pages.save(other) == [True] * 3 + [False] * 2
            assert pages.save(one, first=3) == [True] * 2
            assert pages.match(one) == 5 and pages.match(other) == 3
            assert pages.save(other) == [True] * 5
            check_space(store)

    @pytest.mark.parametrize("name", ["second_touch", "frequency"])
    def test_holes(self, store_dir, name: str) -> None:
        """What is stored between the pages of a save is not asked about."""
        with open_faulty(store_dir, admission=name, segments=4) as (store, devices):
            pages, keys = client(store), run("a", 6)
            pages.save(PageKeys(keys.part(0, 4), 16))
            assert all(pages.save(PageKeys(keys.part(0, 4), 16)))
            devices.flip_bit(0, (1 << 20) + PAGE)  # the second page
            assert pages.load(PageKeys(keys.part(0, 4), 16)) == [True, False, True, True]
            settle(store)
            assert pages.save(keys) == [True] * 4 + [False] * 2
            assert pages.match(keys) == 4
            assert pages.save(keys) == [True] * 6 and all(pages.load(keys))
            check_space(store)

    def test_pages_without_their_chain_are_filtered_too(self, store_dir) -> None:
        with open_small(store_dir, admission="second_touch") as store:
            pages, keys = client(store), loose(run("a", 3))
            assert not any(pages.save(keys)) and all(pages.save(keys)) and all(pages.load(keys))

    def test_what_leaves_memory_is_not_filtered(self, store_dir) -> None:
        with tiered(store_dir, admission="second_touch", write_policy="write_back") as (store, _):
            pages = client(store)
            assert all(pages.save(run("a", 8))) and store.flush(20)
            assert len(on_devices(store, pages.name)) == 8
            assert counter(store, "pages_not_admitted") == 0
            check_tiers(store)


# ---- write budget ----
class TestWriteBudget:
    BUDGET = BURSTS_PER_DAY * 8 * PAGE

    def test_the_bytes_of_any_24_hours_hold(self, store_dir, clock, rng) -> None:
        with tiered(store_dir, dram=0, write_budget=self.BUDGET, segments=8) as (store, devices):
            written: list[tuple[int, int]] = []
            pages, large = client(store), client(store, model="large", page_bytes=2 * PAGE - 3)
            for step in range(300):
                clock.advance(rng.choice([0, 1, 600, 1200, 2400, 7200]))
                before = devices.stats().write_items
                each = rng.choice([pages, large])
                stored = [
                    each.pages.save(run((step, i), count), bytes(count * each.size))
                    for i, count in enumerate(rng.choices(range(1, 6), k=rng.randrange(1, 4)))
                ]
                count = sum(int(finish(ticket).sum()) for ticket in stored)
                assert devices.stats().write_items - before == count
                slot = PAGE if each is pages else 2 * PAGE
                written.append((time.monotonic_ns(), count * slot))
            assert counter(store, "pages_over_budget") > 0
            assert most_in_a_day(written) <= self.BUDGET
            assert sum(size for _, size in written) > self.BUDGET, "a test of something"
            check_space(store)

    def test_what_leaves_memory_is_paid_for_too(self, store_dir, clock) -> None:
        settings = {"write_budget": self.BUDGET, "write_policy": "write_back", "segments": 8}
        with tiered(store_dir, **settings) as (store, devices):
            pages = client(store)
            pages.save(run("first", 1))  # the budget begins to fill
            store.flush(20)
            written: list[tuple[int, int]] = []
            for step in range(60):
                clock.advance(HOUR_S / 2)
                before = devices.stats().write_items
                pages.save(run(step, 6))
                store.flush(20)
                written.append((time.monotonic_ns(), devices.stats().write_items - before))
            assert 0 < most_in_a_day(written) * PAGE <= self.BUDGET
            assert counter(store, "pages_over_budget") > 0
            check_tiers(store, faults=True)
            for step in range(60):
                pages.load(run(step, 6))

    def test_what_gets_no_room_is_not_paid_for(self, store_dir, clock) -> None:
        with open_small(store_dir, write_budget=self.BUDGET) as store:
            pages, filled = client(store), run("a", SLOTS)
            for count in (0, 8, SLOTS):
                pages.save(PageKeys(filled.part(0, count), 16))
                clock.advance(1.1 * HOUR_S)
            pages.save(filled)
            assert pages.pages.pin(filled) == SLOTS
            clock.advance(1.1 * HOUR_S)
            for i in range(5):
                assert not any(pages.save(run(i, 8)))
            pages.pages.unpin(filled, SLOTS)
            assert all(pages.save(run("b", 8)))
            assert pages.save(run("c", 1)) == [False]
            assert counter(store, "pages_over_budget") > 0

    def test_a_budget_that_grants_no_page_ever_is_refused(self, store_dir) -> None:
        with open_small(store_dir, write_budget=self.BUDGET // 2) as store:
            store.namespace(model="m", page_bytes=4 * PAGE, page_tokens=1)
            with pytest.raises(ConfigError, match=r"write_budget = .* never") as caught:
                store.namespace(model="m", page_bytes=4 * PAGE + 1, page_tokens=1)
            assert str(BURSTS_PER_DAY * 5 * PAGE) in str(caught.value.hint)


def most_in_a_day(grants: list[tuple[int, int]]) -> int:
    """The largest sum of any 24 hours."""
    return max(
        sum(size for at, size in grants if start <= at <= start + DAY_NS) for start, _ in grants
    )


def test_what_is_given_back_can_be_taken_again_and_no_more() -> None:
    budget = WriteBudget(24_000)
    hour = DAY_NS // 24
    budget.take(0, 0)
    assert budget.take(900, hour) == 900
    budget.give_back(900)
    assert budget.take(10**9, hour) == 958
    budget.give_back(958)
    assert budget.take(10**9, 9 * hour) == 1000
    budget.give_back(500)
    budget.give_back(10**6)
    assert budget.take(10**9, 9 * hour) == 1000


# ---- refusing ----
def test_a_store_full_of_pins_refuses_fast(store_dir: Path, monkeypatch) -> None:
    with open_small(store_dir, segments=8) as store:
        pages, asked = client(store), [0]
        chains = [run(i, 4) for i in range(16)]
        for keys in chains:
            assert all(pages.save(keys)) and pages.pages.pin(keys) == 4
        victim = NamespacePages.victim

        def counted(self: NamespacePages, pages_max: int, now: int):
            asked[0] += 1
            return victim(self, pages_max, now)

        monkeypatch.setattr(NamespacePages, "victim", counted)
        for i in range(10):
            assert not any(pages.save(run(("x", i), 8)))
        assert asked[0] <= 20
        assert counter(store, "pages_refused_full") == 80
        assert counter(store, "pages_refused_worth") == 0


class TestWorth:
    def test_pages_worth_less_than_all_victims_are_not_stored(self, store_dir, monkeypatch) -> None:
        worth = [1.0]
        monkeypatch.setattr(Reuse, "worth", lambda self, parts, *rest: worth * len(parts))
        monkeypatch.setattr(Reuse, "value", lambda self, leaf, now: 2.0)
        with open_small(store_dir, policy="reuse") as store:
            pages = client(store)
            assert all(pages.save(run("a", 12))), "there is room"
            assert pages.save(run("b", 8)) == [True] * 4 + [False] * 4
            assert counter(store, "pages_refused_worth") == 4
            assert counter(store, "evicted_pages") == counter(store, "pages_refused_full") == 0
            worth[0] = 2.0  # as much is enough
            assert all(pages.save(run("d", 8)))
            check_space(store)

    def test_with_nothing_learnt_nothing_is_refused(self, store_dir) -> None:
        with open_small(store_dir, policy="reuse") as store:
            pages = client(store)
            for i in range(40):
                assert all(pages.save(run(i, 5)))
            assert counter(store, "pages_refused_worth") == 0
            assert counter(store, "pages_refused_full") == 0

    @pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"reuse"}))
    def test_other_policies_refuse_nothing(self, store_dir, policy: str, rng, clock) -> None:
        with open_small(store_dir, policy=policy) as store:
            pages = client(store)
            for _ in range(120):
                keys = run(rng.randrange(8), rng.randrange(1, 7))
                clock.advance(rng.choice([0, 1, 60]))
                if rng.random() < 0.5:
                    pages.match(keys)
                assert all(pages.save(keys)), policy
            assert counter(store, "pages_refused_worth") == 0
            assert counter(store, "evicted_pages") > 0
            check_space(store)

    def test_what_is_never_used_again_is_refused_once_that_is_learnt(
        self, store_dir, clock
    ) -> None:
        """A loop that fits, and a scan that does not come back."""
        with open_small(store_dir, policy="reuse") as store:
            pages = client(store)
            for i in range(400):
                clock.advance(5)
                for keys in (run("loop", 10), run(("once", i), 4)):
                    first = pages.match(keys)
                    stored = pages.save(keys, output_tokens=20)
                    assert len(stored) == len(keys) >= first
            assert counter(store, "pages_refused_worth") > 100
            assert pages.match(run("loop", 10)) == 10
            check_space(store)

    def test_a_hole_is_weighed_as_what_it_is(self, store_dir, monkeypatch) -> None:
        asked: list[tuple[int, int]] = []
        worth = NamespacePages.worth

        def noted(self: NamespacePages, keys: bytes, first: int, request: int, output):
            asked.append((len(keys) // 16 - first, request))
            return worth(self, keys, first, request, output)

        monkeypatch.setattr(NamespacePages, "worth", noted)
        with open_faulty(store_dir, policy="reuse") as (store, devices):
            pages, keys = client(store), run("a", 8)
            assert all(pages.save(PageKeys(keys.part(0, 6), 16)))
            devices.flip_bit(0, (1 << 20) + PAGE)
            assert pages.load(PageKeys(keys.part(0, 6), 16)).count(False) == 1
            settle(store)
            assert all(pages.save(keys)) and pages.match(keys) == 8
            assert asked == [(6, 6), (3, 8)]
            check_space(store)


# ---- what a save says ----
class TestOutputTokens:
    @pytest.mark.parametrize("count", [-1, 1.5, "12", True, [3]])
    def test_what_is_no_count_is_refused(self, store, count) -> None:
        pages, keys = client(store), run("a", 2)
        with pytest.raises(ValueError, match="output_tokens"):
            pages.pages.save(keys, bytes(2 * PAGE), output_tokens=count)
        assert pages.match(keys) == 0

    @pytest.mark.parametrize("count", [None, 0, 17, np.int64(5), 1 << 70])
    @pytest.mark.parametrize("policy", ["reuse", "lru"])
    def test_counts_are_taken(self, store_dir, count, policy: str) -> None:
        with open_small(store_dir, policy=policy) as store:
            pages, keys = client(store), run("a", 2)
            for _ in range(2):
                assert all(pages.save(keys, output_tokens=count))
            assert all(pages.save(loose(run("b", 2)), output_tokens=count))
            assert counter(store, "internal_errors") == 0

    def test_the_policy_is_told_once_a_request(self, store_dir, monkeypatch) -> None:
        told = note_settled(monkeypatch)
        with open_small(store_dir, policy="reuse") as store:
            pages = client(store)
            pages.save(run("a", 6), output_tokens=9)
            assert told == [(6, 9)]
            pages.save(run("a", 6), output_tokens=11)  # stored already
            pages.save(run("a", 6))
            pages.save(run("a", 8), first=6, output_tokens=3)
            assert told == [(6, 9), (6, 11), (8, 3)]
            pages.pages.save(run("b", 0), b"", output_tokens=3).wait()
            check_space(store)

    def test_of_what_was_cancelled_it_is_not_told(self, store_dir, monkeypatch) -> None:
        told = note_settled(monkeypatch)
        with open_faulty(store_dir, policy="reuse") as (store, devices):
            pages = client(store)
            with devices.held():
                first = pages.pages.save(run("a", 2), bytes(2 * PAGE), output_tokens=1)
                second = pages.pages.save(run("b", 2), bytes(2 * PAGE), output_tokens=2)
                second.cancel()
                first.cancel()
            assert not finish(first).any() and not finish(second).any()
            settle(store)
            assert told == []
            check_space(store)

    def test_memory_and_drives_are_told(self, store_dir, monkeypatch) -> None:
        told = note_settled(monkeypatch)
        with tiered(store_dir, write_policy="write_back", policy="reuse") as (store, _):
            pages = client(store)
            pages.save(run("a", 6), output_tokens=9)
            assert told == [(6, 9)]
            assert store.flush(20)
            assert told == [(6, 9), (6, None)], "the drives learn of it when it comes to them"
            check_tiers(store)


def note_settled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """What policies are told of saves: pages and output tokens."""
    told: list[tuple[int, int | None]] = []
    settle_pages = NamespacePages.settle

    def noted(self: NamespacePages, keys: bytes, kept: int, output: int | None, now: int) -> None:
        told.append((len(keys) // 16, output))
        settle_pages(self, keys, kept, output, now)

    monkeypatch.setattr(NamespacePages, "settle", noted)
    return told


def test_clients_are_what_the_kit_says(store) -> None:
    assert isinstance(client(store), Client)
