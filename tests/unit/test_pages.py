"""index/pages.py: tree and loose pages together, pins, guards, and taking over another index."""

import numpy as np
import pytest

from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.policies.reuse import Reuse


def path(text: str) -> bytes:
    return b"".join(bytes([ord(letter)]) * 4 for letter in text)


def where(*slots: int | None) -> Locations:
    slot = np.array([NO_SLOT if s is None else s for s in slots], np.uint64)
    return Locations(slot, slot + np.uint64(1000), slot + np.uint64(2000))


@pytest.fixture
def pages():
    pages = NamespacePages(4)
    yield pages
    pages.tree.check()


def evict_all(pages: NamespacePages) -> list[int]:
    slots = []
    while (victim := pages.victim(3, 10**6)) is not None:
        pages.forget(victim, 10**6)
        pages.tree.check()
        slots += victim.slot.tolist()[::-1]
    return slots


def test_loose_pages_are_found_by_key_alone(pages) -> None:
    pages.insert(path("cd"), 0, False, where(3, 4), 1)
    assert pages.match(path("abcd"), 0, 2) == 0
    assert pages.locate(path("xc"), 0, False, 2).slot.tolist() == [NO_SLOT, 3]
    assert pages.page_count == 2 and len(pages.loose) == 2


def test_loose_pages_move_into_the_tree_once_their_chain_is_known(pages) -> None:
    pages.insert(path("cd"), 0, False, where(3, 4), 1)
    assert pages.locate(path("abcd"), 2, True, 2).slot.tolist() == [3, 4]
    assert not pages.loose and pages.page_count == 2
    pages.insert(path("ab"), 0, True, where(1, 2), 3)
    assert pages.match(path("abcd"), 0, 4) == 4


def test_a_rooted_save_takes_the_place_of_a_loose_page(pages) -> None:
    pages.insert(path("b"), 0, False, where(7), 1)
    pages.insert(path("ab"), 0, True, where(1, 2), 2)
    assert not pages.loose and pages.locate(path("ab"), 0, True, 3).slot.tolist() == [1, 2]


def test_drop_finds_loose_pages_too(pages) -> None:
    pages.insert(path("c"), 0, False, where(3), 1)
    pages.drop(path("c"), 0, False, 1)
    assert pages.page_count == 1
    pages.drop(path("c"), 0, False, 2003)
    assert pages.page_count == 0
    pages.drop(path("c"), 0, True, 2003)


def test_the_last_page_of_a_loose_run_is_evicted_first(pages) -> None:
    pages.insert(path("abc"), 0, False, where(1, 2, 3), 1)
    assert evict_all(pages) == [3, 2, 1]


def test_looking_at_a_loose_page_makes_it_newer(pages) -> None:
    pages.insert(path("ab"), 0, False, where(1, 2), 1)
    pages.insert(path("x"), 0, False, where(3), 2)
    pages.locate(path("ab"), 0, False, 3)
    assert evict_all(pages) == [3, 2, 1]


def test_tree_and_loose_pages_share_one_order(pages) -> None:
    pages.insert(path("ab"), 0, True, where(1, 2), 1)
    pages.insert(path("x"), 0, False, where(3), 2)
    pages.insert(path("yz"), 0, True, where(4, 5), 3)
    assert evict_all(pages) == [2, 1, 3, 5, 4]


def test_pinned_pages_stay_and_so_do_their_ancestors(pages) -> None:
    pages.insert(path("abcd"), 0, True, where(1, 2, 3, 4), 1)
    pages.insert(path("x"), 0, False, where(9), 1)
    pages.pin(path("ab"))
    pages.pin(path("ab"))
    pages.pin(path("x"))
    assert evict_all(pages) == [4, 3]
    pages.unpin(path("ab"))
    assert evict_all(pages) == []
    pages.unpin(path("ab"))
    assert evict_all(pages) == [2, 1]
    pages.unpin(path("x"))
    pages.unpin(path("x"))  # nothing to take off
    assert evict_all(pages) == [9] and not pages.pins


def test_a_full_house_of_pins_answers_at_once(pages) -> None:
    for i in range(50):
        text = chr(40 + i) + "z"
        pages.insert(path(text), 0, True, where(2 * i, 2 * i + 1), i)
        pages.pin(path(text))
    assert pages.victim(1, 99) is None
    assert not pages.tree.policy.listed()  # the second call has nothing to look at
    assert pages.victim(1, 99) is None


def test_a_guarded_chain_is_not_offered_but_what_hangs_on_it_is(pages) -> None:
    pages.insert(path("abcd"), 0, True, where(1, 2, 3, 4), 1)
    pages.insert(path("xy"), 0, True, where(5, 6), 2)
    pages.guard(path("abQR"))
    assert evict_all(pages) == [4, 3, 6, 5]
    pages.unguard()
    assert evict_all(pages) == [2, 1]


def test_absorb_takes_pages_pins_and_recency(pages) -> None:
    pages.insert(path("ab"), 0, True, where(1, 2), 1)
    pages.insert(path("q"), 0, False, where(8), 2)
    newer = NamespacePages(4)
    newer.insert(path("abcd"), 1, True, where(20, None, 4), 5)
    newer.insert(path("x"), 0, False, where(9), 6)
    newer.pin(path("x"))
    pages.absorb(newer)
    assert pages.locate(path("abcd"), 0, True, 7).slot.tolist() == [1, 20, NO_SLOT, 4]
    assert pages.pins == {path("x"): 1} and pages.page_count == 5
    assert evict_all(pages) == [8, 4, 20, 1]


def test_absorb_does_not_put_a_page_in_two_places(pages) -> None:
    pages.insert(path("ab"), 0, True, where(1, 2), 1)
    newer = NamespacePages(4)
    newer.insert(path("b"), 0, False, where(2), 5)
    pages.absorb(newer)
    assert pages.page_count == 2 and not pages.loose


# ---- what the policy is asked ----
def test_a_victim_is_offered_at_what_it_is_worth(pages) -> None:
    pages.insert(path("ab"), 0, True, where(1, 2), 7)
    pages.insert(path("x"), 0, False, where(3), 9)
    victim = pages.victim(9, 20)
    assert victim.value == victim.last_use == 7
    pages.forget(victim, 20)
    assert pages.victim(9, 20).value == 9  # a loose page, and no leaf to compare it with
    assert pages.worth(path("abcd"), 1, 4, None) == [(3, float("inf"))]


def test_a_loose_page_is_valued_on_the_scale_of_the_policy() -> None:
    pages = NamespacePages(4, Reuse(100))
    pages.insert(path("x"), 0, False, where(3), 10**15)
    victim = pages.victim(9, 10**15 + 1)
    assert victim is not None and victim.value == 0.0  # nothing was ever used again


def test_pins_elsewhere_do_not_make_a_long_leaf_slow(pages) -> None:
    class Counting(dict):
        looked = 0

        def __contains__(self, key: object) -> bool:
            self.looked += 1
            return super().__contains__(key)

    keys = np.arange(1, 50_001, dtype=np.uint32).tobytes()
    slots = np.arange(50_000, dtype=np.uint64)
    pages.insert(keys, 0, True, Locations(slots, slots, slots), 1)
    pages.pins = Counting({keys[-5 * 4 : -4 * 4]: 1})
    victim = pages.victim(64, 2)
    assert victim.span == 4 and pages.pins.looked == 5
    pages.forget(victim, 2)
    assert pages.victim(64, 2) is None
    pages.pins.clear()
    pages.unpin(b"")
    pages.pin(keys[:4])
    assert pages.victim(64, 2).span == 64
    assert pages.victim(10**6, 2).span == 50_000 - 4 - 1
