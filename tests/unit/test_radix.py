"""index/radix.py: matching, gaps, splits, and the order of eviction, case by case."""

import numpy as np
import pytest

from tutti_core.index.radix import NO_SLOT, Locations, RadixTree

KEYS = [bytes([i]) * 4 for i in range(256)]


def path(text: str) -> bytes:
    """One 4-byte key a letter."""
    return b"".join(KEYS[ord(letter)] for letter in text)


def where(*slots: int | None) -> Locations:
    slot = np.array([NO_SLOT if s is None else s for s in slots], np.uint64)
    return Locations(slot, slot + np.uint64(1000), slot + np.uint64(2000))


@pytest.fixture
def tree():
    tree = RadixTree(4)
    yield tree
    tree.check()


def put(tree: RadixTree, text: str, *slots: int | None, first: int = 0, now: int = 1) -> None:
    tree.insert(path(text), first, where(*slots), now)
    tree.check()


def evict_all(tree: RadixTree) -> list[int]:
    slots = []
    while (leaf := tree.victim(99)) is not None:
        slots.append(leaf.slots[-1])
        tree.cut_tail(leaf, 1, 99)
        tree.check()
    return slots


def test_an_empty_tree_has_nothing(tree) -> None:
    assert tree.match(path("ab"), 1) == 0 and tree.match(b"", 1) == 0
    assert len(tree.locate(b"", 1)) == 0 and tree.victim(9) is None
    assert not tree.drop(path("a"), 0, 1)


@pytest.mark.parametrize(
    ("asked", "hit"),
    [("", 0), ("a", 1), ("abc", 3), ("abcd", 3), ("abx", 2), ("xbc", 0), ("ba", 0)],
)
def test_match_is_the_common_prefix(tree, asked: str, hit: int) -> None:
    put(tree, "abc", 1, 2, 3)
    assert tree.match(path(asked), 2) == hit


@pytest.mark.parametrize("cut", range(1, 40))
def test_match_finds_every_point_of_divergence(cut: int) -> None:
    tree = RadixTree(4)
    text = "".join(chr(33 + i) for i in range(40))
    put(tree, text, *range(40))
    assert tree.match(path(text[:cut] + "\x01" + text[cut + 1 :]), 2) == cut


@pytest.mark.parametrize(("first", "hit"), [(0, 4), (1, 3), (3, 1), (4, 0)])
def test_match_from_a_later_page(tree, first: int, hit: int) -> None:
    put(tree, "abcd", 1, 2, 3, 4)
    assert tree.match(path("abcdx"), 2, first) == hit


def test_branches_share_their_prefix(tree) -> None:
    put(tree, "abcd", 1, 2, 3, 4)
    put(tree, "abxy", 1, 2, 5, 6)
    put(tree, "ab", 1, 2)
    assert tree.page_count == 6
    assert tree.locate(path("abxyz"), 2).slot.tolist() == [1, 2, 5, 6, NO_SLOT]
    assert tree.locate(path("abcd"), 2, 2).checksum.tolist() == [1003, 1004]
    assert tree.locate(path("abcd"), 2, 2).generation.tolist() == [2003, 2004]


def test_a_longer_run_extends_the_leaf(tree) -> None:
    put(tree, "ab", 1, 2)
    put(tree, "abcd", 3, 4, first=2)
    assert tree.match(path("abcd"), 2) == 4
    assert sum(1 for _ in tree.nodes()) == 1


def test_unknown_ancestors_become_a_gap(tree) -> None:
    put(tree, "abcd", 3, 4, first=2)
    assert tree.match(path("abcd"), 2) == 0 and tree.match(path("abcd"), 2, 2) == 2
    assert tree.page_count == 2
    put(tree, "ab", 1, 2)
    assert tree.match(path("abcd"), 2) == 4


def test_pages_that_are_not_stored_leave_the_tree_as_it_is(tree) -> None:
    put(tree, "abc", 1, None, None)
    assert tree.page_count == 1
    put(tree, "abc", None, None, None)
    put(tree, "abc", None, 2, None)
    put(tree, "abcde", None, None, 3, None, 5)
    assert tree.locate(path("abcde"), 1).slot.tolist() == [1, 2, 3, NO_SLOT, 5]


def test_a_known_page_gets_the_new_location(tree) -> None:
    put(tree, "abc", 1, 2, 3)
    tree.insert(path("ab"), 1, where(9), 2)
    assert tree.locate(path("abc"), 3).slot.tolist() == [1, 9, 3]
    assert tree.page_count == 3


def test_dropping_needs_the_right_generation(tree) -> None:
    put(tree, "abc", 1, 2, 3)
    assert not tree.drop(path("abc"), 1, 1)
    assert tree.drop(path("abc"), 1, 2002)
    tree.check()
    assert not tree.drop(path("abc"), 1, 2002)
    assert not tree.drop(path("abx"), 2, 2003)
    assert tree.match(path("abc"), 2) == 1 and tree.page_count == 2


def test_dropping_the_tail_takes_gaps_with_it(tree) -> None:
    put(tree, "abc", 1, 2, 3)
    assert tree.drop(path("abc"), 1, 2002) and tree.drop(path("abc"), 2, 2003)
    tree.check()
    assert sum(len(node) for node in tree.nodes()) == 1


def test_dropping_the_last_page_of_a_branch_frees_what_only_it_held(tree) -> None:
    put(tree, "abcd", None, None, None, 4)
    put(tree, "abxy", None, None, 5, 6)
    assert tree.drop(path("abcd"), 3, 2004)
    tree.check()
    assert evict_all(tree) == [6, 5]
    assert not tree.root.children


def test_leaves_go_first_and_from_their_ends(tree) -> None:
    put(tree, "abcd", 1, 2, 3, 4, now=1)
    put(tree, "abxy", 1, 2, 5, 6, now=2)
    assert evict_all(tree) == [4, 3, 6, 5, 2, 1]


def test_a_match_makes_its_path_the_newest(tree) -> None:
    put(tree, "ab", 1, 2, now=1)
    put(tree, "xy", 3, 4, now=2)
    tree.match(path("ab"), 3)
    assert evict_all(tree) == [4, 3, 2, 1]


def test_an_older_time_does_not_make_a_page_older(tree) -> None:
    put(tree, "ab", 1, 2, now=9)
    put(tree, "xy", 3, 4, now=5)
    tree.match(path("ab"), 3)
    assert evict_all(tree) == [4, 3, 2, 1]


def test_parked_leaves_are_not_offered(tree) -> None:
    put(tree, "ab", 1, 2, now=1)
    put(tree, "xy", 3, 4, now=2)
    tree.park(tree.victim(9))
    tree.check()
    assert tree.victim(9).slots[-1] == 4
    tree.match(path("ab"), 3)
    tree.check()
    put(tree, "abc", 5, first=2, now=4)  # the leaf has got longer: its end is another page
    assert evict_all(tree) == [4, 3, 5, 2, 1]


def test_unpark_all_brings_them_back(tree) -> None:
    put(tree, "ab", 1, 2, now=1)
    tree.park(tree.victim(9))
    assert tree.victim(9) is None
    tree.unpark_all()
    assert evict_all(tree) == [2, 1]


def test_splitting_a_parked_leaf_keeps_it_parked(tree) -> None:
    put(tree, "abcd", 1, 2, 3, 4, now=1)
    tree.park(tree.victim(9))
    put(tree, "abx", 1, 2, 5, now=2)
    assert tree.victim(9).slots[-1] == 5
    assert evict_all(tree) == [5]
    tree.unpark_all()
    assert evict_all(tree) == [4, 3, 2, 1]


def test_long_runs_cost_one_node_and_few_bytes() -> None:
    tree = RadixTree(16)
    keys = np.random.default_rng(1).integers(0, 256, 16 * 4096, np.uint8).tobytes()
    slots = np.arange(4096, dtype=np.uint64)
    tree.insert(keys, 0, Locations(slots, slots, slots), 1)
    assert sum(1 for _ in tree.nodes()) == 1
    assert tree.match(keys, 2) == 4096
    assert tree.locate(keys, 3).slot.tolist() == list(range(4096))
