"""tiers/space.py: slots are handed out once, striped over pools, and not while somebody reads."""

import numpy as np
import pytest

from tutti_core.tiers.space import Space

U64 = np.uint64


@pytest.fixture
def space():
    space = Space(32768)
    yield space
    space.check()


def slot(segment: int, index: int) -> int:
    return segment << 32 | index


def commit(space: Space, slots: np.ndarray, start: int = 1) -> np.ndarray:
    generations = np.arange(start, start + len(slots), dtype=U64)
    space.commit(slots, generations)
    return generations


def test_slots_of_a_segment_are_handed_out_in_order_and_once(space) -> None:
    space.add(3, 0, 4096)
    first, second = space.allocate(5, 4096), space.allocate(9, 4096)
    assert first.tolist() == [slot(3, i) for i in range(5)]
    assert second.tolist() == [slot(3, i) for i in range(5, 8)]
    assert len(space.allocate(1, 4096)) == 0 and space.free_count(4096) == 0


def test_another_slot_size_gets_nothing(space) -> None:
    space.add(0, 0, 4096)
    assert len(space.allocate(1, 8192)) == 0
    assert len(space.allocate(0, 4096)) == 0


def test_what_does_not_fill_a_slot_at_the_end_is_left_over(space) -> None:
    space.add(0, 0, 12288)
    assert len(space.allocate(9, 12288)) == 2


def test_pages_go_round_the_pools(space) -> None:
    for number in range(6):
        space.add(number, number % 3, 4096)
    pools = [int(s) >> 32 for s in space.allocate(7, 4096)]
    assert [p % 3 for p in pools] == [0, 1, 2, 0, 1, 2, 0]
    assert [int(s) >> 32 for s in space.allocate(2, 4096)] == [1, 2]  # the next turn


def test_a_full_pool_is_made_up_for_by_the_others(space) -> None:
    space.add(0, 0, 4096)
    space.add(1, 1, 4096, taken={i: 9 for i in range(7)})
    got = space.allocate(9, 4096)
    assert len(got) == 9 and sum(int(s) >> 32 == 1 for s in got) == 1
    assert len(set(got.tolist())) == 9


def test_taken_slots_are_not_handed_out(space) -> None:
    space.add(0, 0, 4096, taken={0: 5, 2: 6})
    assert space.allocate(9, 4096).tolist() == [slot(0, i) for i in (1, 3, 4, 5, 6, 7)]
    slots = np.array([slot(0, 0), slot(0, 2), slot(0, 1), slot(7, 0)], U64)
    assert space.holds(slots, np.array([5, 7, 0, 1], U64)).tolist() == [True, False, False, True]
    assert space.protects(slots, space.begin_load()).tolist() == [True, True, True, False]


def test_a_slot_beyond_the_segment_as_it_is_cut_now_is_not_held(space) -> None:
    space.add(0, 0, 16384, taken={1: 5})
    assert space.holds(np.array([slot(0, 7)], U64), np.array([5], U64)).tolist() == [False]
    assert not space.holds_page(slot(0, 7), 5) and space.holds_page(slot(0, 1), 5)
    assert not space.holds_page(slot(9, 1), 5)


def test_cancelled_slots_are_free_again(space) -> None:
    space.add(0, 0, 4096)
    slots = space.allocate(8, 4096)
    space.cancel(slots[2:4])
    assert space.allocate(9, 4096).tolist() == slots[2:4].tolist()


def test_a_slot_that_was_given_up_is_free_at_once_without_readers(space) -> None:
    space.add(0, 0, 4096)
    slots = space.allocate(8, 4096)
    commit(space, slots)
    assert space.used_bytes == 8 * 4096
    space.give_up(slots[:3])
    assert space.allocate(9, 4096).tolist() == slots[:3].tolist()


def test_a_load_that_began_earlier_keeps_the_slot(space) -> None:
    space.add(0, 0, 4096)
    slots = space.allocate(8, 4096)
    generations = commit(space, slots)
    early = space.begin_load()
    space.retire(slots[:1])
    assert not space.holds(slots[:1], generations[:1]).any()
    space.give_up(slots[:1])
    late = space.begin_load()
    assert len(space.allocate(1, 4096)) == 0
    assert (space.waiting_count(4096), space.waiting_count(8192)) == (1, 0)
    assert space.waiting_bytes() == 4096
    space.end_load(early)
    assert space.allocate(1, 4096).tolist() == slots[:1].tolist()
    space.end_load(late)


def test_the_oldest_load_decides(space) -> None:
    space.add(0, 0, 4096)
    slots = space.allocate(8, 4096)
    commit(space, slots)
    first = space.begin_load()
    space.give_up(slots[:1])
    second = space.begin_load()
    space.give_up(slots[1:2])
    space.end_load(first)
    assert space.allocate(9, 4096).tolist() == slots[:1].tolist()
    space.end_load(second)
    assert space.allocate(9, 4096).tolist() == slots[1:2].tolist()


def test_an_empty_segment_can_be_cut_anew(space) -> None:
    space.add(0, 0, 4096)
    slots = space.allocate(8, 4096)
    commit(space, slots)
    assert space.empty_segments(other_than=8192) == []
    space.give_up(slots)
    space.collect()
    assert space.empty_segments(other_than=8192) == [0]
    assert space.empty_segments(other_than=4096) == []
    space.remove(0)
    space.add(0, 0, 8192)
    assert len(space.allocate(9, 8192)) == 4 and len(space.allocate(1, 4096)) == 0


def test_a_waiting_segment_is_not_empty(space) -> None:
    space.add(0, 0, 4096)
    slots = space.allocate(1, 4096)
    commit(space, slots)
    load = space.begin_load()
    space.give_up(slots)
    space.collect()
    assert space.empty_segments(other_than=8192) == []
    space.end_load(load)


def test_slots_of_others_are_ignored(space) -> None:
    foreign = np.array([slot(5, 1)], U64)
    space.give_up(foreign)
    space.retire(foreign)
    assert space.protects(foreign, space.begin_load()).tolist() == [False] and space.used_bytes == 0


@pytest.mark.parametrize("change", ["commit", "cancel"])
def test_a_slot_cannot_be_used_twice(space, change: str) -> None:
    space.add(0, 0, 4096)
    slots = space.allocate(1, 4096)
    commit(space, slots)
    with pytest.raises(AssertionError):
        commit(space, slots) if change == "commit" else space.cancel(slots)
