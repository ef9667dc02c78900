"""tiers/memory.py: slots, visibility, eviction order, unsaved pages and epochs of one tier."""

from __future__ import annotations

import numpy as np
import pytest
from store_kit import PAGE, chain, loose, run

from tutti_core import ConfigError, PageKeys
from tutti_core.index.pages import NamespacePages
from tutti_core.tiers.arena import HostArena
from tutti_core.tiers.manager import Entry
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.shelf import (
    MOVE_BYTES_MAX,
    MOVE_PAGES_MAX,
    Kind,
    Write,
    pages_per_move,
    segment_bytes_for,
)

ALL = 16


def entry(page_bytes: int = PAGE, name: bytes = b"n" * 16) -> Entry:
    return Entry(name, page_bytes, 16, NamespacePages(16))


def tier(exclusive: bool = False) -> MemoryTier:
    return MemoryTier("dram", HostArena(ALL * PAGE, False), leave_after_write=exclusive)


def put(
    where: MemoryTier, of: Entry, keys: PageKeys, kind: Kind = Kind.SAVED, first: int = 0
) -> list[bool]:
    """Reserve and commit the pages from `first` on, as far as there is room."""
    index = np.arange(first, len(keys))
    slots, writes = where.reserve(of, keys.data if keys.rooted else b"", len(index), 0)
    assert not writes
    index = index[: len(slots)]
    sums = np.zeros(len(slots), dtype=np.uint64)
    epoch = where.epoch(of)
    return where.commit(of, epoch, keys.data, keys.rooted, index, slots, sums, kind).tolist()


def held(where: MemoryTier, of: Entry, keys: PageKeys) -> list[bool]:
    return where.holds(of, keys.data, 0, keys.rooted).tolist()


@pytest.mark.parametrize(
    ("arena", "segment"),
    [(32768, 4096), (65536, 8192), (16 << 20, 2 << 20), (1 << 30, 16 << 20), (1 << 40, 1 << 30)],
)
def test_segments_suit_the_arena(arena: int, segment: int) -> None:
    assert segment_bytes_for(arena) == segment


def test_a_background_batch_is_bounded_by_pages_and_bytes() -> None:
    assert pages_per_move(4096) == MOVE_PAGES_MAX
    assert pages_per_move(2 << 20) == MOVE_BYTES_MAX // (2 << 20)
    assert pages_per_move(1 << 30) == 1


def test_a_page_is_seen_once_it_is_committed() -> None:
    where, of, keys = tier(), entry(), run("a", 4)
    slots, _ = where.reserve(of, keys.data, 4, 0)
    assert len(set(slots.tolist())) == 4 and not any(held(where, of, keys))
    assert where.used_bytes == 4 * PAGE and where.page_count == 0
    none = np.zeros(4, dtype=np.uint64)
    done = where.commit(of, 0, keys.data, True, np.arange(4), slots, none, Kind.SAVED)
    assert done.all() and all(held(where, of, keys)) and where.match(of, keys.data, 1) == 3
    addresses = where.addresses(slots, PAGE)
    assert len(set(addresses.tolist())) == 4
    assert all(0 <= int(a) - where.arena.address < ALL * PAGE for a in addresses)
    where.check()


def test_what_is_there_already_keeps_its_slot() -> None:
    where, of, keys = tier(), entry(), run("a", 4)
    assert put(where, of, keys) == [True] * 4
    before = where.begin_copy(of, keys.data, 0, True)
    assert put(where, of, keys) == [True] * 4 and where.used_bytes == 4 * PAGE
    assert where.begin_copy(of, keys.data, 0, True)[0].slot.tolist() == before[0].slot.tolist()
    where.check()


def test_a_key_that_stands_twice_has_one_slot() -> None:
    where, of = tier(), entry()
    key = b"k" * 16
    twice = PageKeys(key + b"x" * 16 + key, 16)
    put(where, of, twice)
    put(where, of, PageKeys(key + key, 16, rooted=False))
    where.check()
    assert where.page_count <= 3
    where.clear(of)
    assert where.used_bytes == 0


def test_leaves_go_first_and_in_order_of_use() -> None:
    where, of = tier(), entry()
    put(where, of, run("a", 8))
    put(where, of, run("b", 8))
    where.match(of, run("a", 8).data, 0)
    put(where, of, run("c", 3))
    assert held(where, of, run("b", 8)) == [True] * 5 + [False] * 3
    assert all(held(where, of, run("a", 8))) and all(held(where, of, run("c", 3)))
    assert where.counters["evicted"] == 3
    where.check()


def test_a_chain_is_not_evicted_for_its_own_next_pages() -> None:
    where, of, keys = tier(), entry(), run("a", 20)
    assert put(where, of, keys) == [True] * ALL
    assert put(where, of, keys, first=ALL) == []
    assert held(where, of, keys) == [True] * ALL + [False] * 4


def test_a_slot_that_is_being_copied_is_not_handed_out() -> None:
    where, of = tier(), entry()
    put(where, of, run("a", ALL))
    found, started = where.begin_copy(of, run("a", ALL).data, 0, True)
    assert started is not None
    slots, _ = where.reserve(of, b"", 4, 0)
    assert len(slots) == 0 and where.counters["evicted"] == 4  # evicted, but still being read
    slots, _ = where.reserve(of, b"", 4, 0)
    assert len(slots) == 0 and where.counters["evicted"] == 4  # and not more than that
    where.end_copy(started)
    slots, _ = where.reserve(of, b"", 4, 0)
    assert set(slots.tolist()) == set(found.slot[-4:].tolist())


def test_unsaved_pages_stay_until_they_are_written() -> None:
    where, of, keys = tier(), entry(), run("a", ALL)
    put(where, of, keys, Kind.UNSAVED)
    slots, writes = where.reserve(of, b"", 4, 1)
    assert len(slots) == 0 and len(writes) == 1 and all(held(where, of, keys))
    (write,) = writes
    assert write.index.tolist() == list(range(ALL)), "ancestors are written first"
    assert where.reserve(of, b"", 4, 1)[1] == [], "what is being written is not taken up again"
    where.check()
    where.end_write(write, np.arange(ALL) < 14)
    where.end_copy(write.started)
    assert where.unsaved_count == 2 and where.counters["demoted"] == 14
    slots, writes = where.reserve(of, b"", 4, 0)
    assert len(slots) == 0, "the end of the chain was not written, so nothing can go"
    again = where.next_write()
    assert isinstance(again, Write) and again.index.tolist() == [14, 15]
    where.end_write(again, np.ones(2, dtype=np.bool_))
    where.end_copy(again.started)
    assert len(where.reserve(of, b"", 4, 0)[0]) == 4
    where.check()


def test_a_slot_that_is_being_written_outlives_its_page() -> None:
    where, of, keys = tier(), entry(), run("a", ALL)
    put(where, of, keys, Kind.UNSAVED)
    write = where.begin_write(of, keys.data, True, np.arange(ALL))
    assert write is not None
    where.clear(of)
    assert write.ticket.cancelled and where.page_count == 0 and where.unsaved_count == 0
    assert len(where.reserve(of, b"", 1, 0)[0]) == 0, "the device may still be reading it"
    where.end_write(write, np.ones(ALL, dtype=np.bool_))  # of an older epoch: changes nothing
    where.end_copy(write.started)
    assert len(where.reserve(of, b"", ALL, 0)[0]) == ALL
    where.check()


def test_pages_of_an_exclusive_tier_leave_when_they_are_written() -> None:
    where, of, keys = tier(exclusive=True), entry(), run("a", ALL)
    put(where, of, keys, Kind.UNSAVED)
    write = where.next_write()
    assert isinstance(write, Write)
    where.end_write(write, np.ones(len(write.index), dtype=np.bool_))
    where.end_copy(write.started)
    assert where.page_count == ALL - len(write.index) and where.unsaved_count == where.page_count
    where.check()


def test_arriving_pages_can_neither_leave_nor_be_written() -> None:
    where, of, keys = tier(exclusive=True), entry(), run("a", ALL)
    put(where, of, keys, Kind.ARRIVING)
    slots, writes = where.reserve(of, b"", 1, 9)
    assert where.next_write() is False and len(slots) == len(writes) == 0
    where.note_saved(of, keys.data, True, np.arange(ALL))
    assert all(held(where, of, keys)), "the devices hold them still, but not for long"
    where.end_arrival(of, keys.data, True, np.arange(ALL))
    assert isinstance(where.next_write(), Write)
    where.check()


def test_fresh_pages_go_unwritten_unless_they_are_used_again() -> None:
    where, of = tier(), entry()
    put(where, of, run("a", 8), Kind.FRESH)
    put(where, of, run("b", 8), Kind.FRESH)
    assert where.second_use(of, run("b", 8).data, True).tolist() == list(range(8))
    assert where.second_use(of, run("b", 8).data, True).tolist() == []
    assert where.unsaved_count == 8
    slots, writes = where.reserve(of, b"", 8, 0)
    assert len(slots) == 8 and not writes and not any(held(where, of, run("a", 8)))
    where.check()


def test_what_others_depend_on_must_be_saved() -> None:
    where, of, keys = tier(), entry(), run("a", 4)
    put(where, of, keys, Kind.FRESH)
    where.must_save(of, keys.data, np.arange(2))
    assert where.unsaved_count == 2
    where.note_saved(of, keys.data, True, np.arange(4))
    assert where.unsaved_count == 0
    where.check()


def test_pages_without_their_ancestor_are_dropped() -> None:
    where, of = tier(), entry()
    put(where, of, chain(*"abcd"), Kind.UNSAVED, first=2)
    put(where, of, chain(*"abxy"), first=2)
    put(where, of, run("other", 3))
    write = where.begin_write(of, chain(*"abcd").data, True, np.arange(4))
    assert write is not None and where.drop_below(of, chain(*"abcd").part(0, 2)) == 4
    assert write.ticket.cancelled and where.page_count == 3 and where.unsaved_count == 0
    where.end_write(write, np.zeros(2, dtype=np.bool_))
    where.end_copy(write.started)
    assert where.drop_below(of, b"z" * 16) == 0
    where.check()


def test_a_fill_of_an_older_epoch_is_dropped() -> None:
    where, of, keys = tier(), entry(), run("a", 4)
    epoch = where.epoch(of)
    slots, _ = where.reserve(of, keys.data, 4, 0)
    where.clear(of)
    none = np.zeros(4, dtype=np.uint64)
    args = (of, epoch, keys.data, True, np.arange(4), slots, none, Kind.SAVED)
    assert not where.commit(*args).any()
    assert where.used_bytes == 0 and where.free_bytes == where.capacity_bytes


def test_pins_hold_and_survive_a_clear() -> None:
    where, of, keys = tier(), entry(), run("a", 8)
    put(where, of, keys)
    where.pin(of, keys.data)
    put(where, of, run("b", ALL))
    assert all(held(where, of, keys))
    where.clear(of)
    put(where, of, keys)
    put(where, of, run("c", ALL))
    assert all(held(where, of, keys))
    where.unpin(of, keys.data)
    put(where, of, run("d", ALL))
    assert not all(held(where, of, keys))


def test_two_slot_sizes_share_the_arena() -> None:
    where, small, large = tier(), entry(), entry(2 * PAGE - 5, b"m" * 16)
    put(where, small, run("a", ALL))
    assert put(where, large, run("b", 4)) == [True] * 4
    assert all(held(where, large, run("b", 4))) and where.free_bytes < ALL * PAGE
    where.check()
    where.clear(large)
    assert put(where, small, run("c", 8)) == [True] * 8
    where.check()


def test_a_page_may_be_found_without_its_chain() -> None:
    where, of, keys = tier(), entry(), run("a", 6)
    put(where, of, keys)
    part = loose(PageKeys(keys.part(2, 5), 16))
    assert held(where, of, part) == [True] * 3
    assert put(where, of, part) == [True] * 3 and where.page_count == 6
    put(where, of, run("b", ALL))
    assert not any(held(where, of, part))
    put(where, of, part)
    assert where.match(of, keys.data, 2) == 3, "they move into the tree with their chain"
    where.check()


def test_a_page_that_is_too_large_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="dram = 65536 bytes is too small") as error:
        tier().check_fits(entry(2 * PAGE + 1))
    assert str(8 * 4 * PAGE) in str(error.value)
    tier().check_fits(entry(2 * PAGE))
