"""index/radix.py: matching, gaps, splits, and the order of eviction, case by case."""

import numpy as np
import pytest

from tutti_core.index.radix import NO_SLOT, Locations, Node, RadixTree
from tutti_core.policies.lru import Lru
from tutti_core.policies.shadows import Shadows

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


# ---- requests as a whole, and joins ----
class Alike(Lru):
    """LRU that takes runs used equally often for the same, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple] = []

    def asked(self, pages: int, now: int) -> None:
        self.told.append(("asked", pages))

    def settled(self, runs, request_pages, output_tokens, now) -> None:
        self.told.append(("settled", [len(run) for run in runs], request_pages, output_tokens))

    def alike(self, upper: Node, lower: Node) -> bool:
        return upper.uses == lower.uses

    def removed(self, run: Node) -> None:
        self.told.append(("removed", run.depth))


def runs_of(tree: RadixTree) -> list[tuple[int, list[int], int]]:
    """(depth, slots, gaps) of each node, by depth and first slot."""
    return sorted((node.depth, list(node.slots), node.gaps) for node in tree.nodes())


def test_the_policy_hears_of_each_request() -> None:
    policy = Alike()
    tree = RadixTree(4, policy)
    put(tree, "abcd", 1, 2, 3, 4)
    assert tree.match(path("abxy"), 2) == 2 and tree.match(path("q"), 3) == 0
    tree.settle(path("abxy"), 2, 77, 4)
    matched = [("asked", 4), ("settled", [2], 4, None)]
    assert policy.told == [*matched, ("asked", 1), ("settled", [2], 4, 77)]


def test_neighbours_of_one_history_become_one_run() -> None:
    policy = Alike()
    tree = RadixTree(4, policy)
    put(tree, "abcdef", 1, 2, 3, 4, 5, 6)
    put(tree, "abcdxy", 1, 2, 3, 4, 7, 8)
    tree.match(path("ab"), 2)
    tree.check()
    assert [slots for _, slots, _ in runs_of(tree)] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert tree.match(path("abcd"), 3) == 4  # ab was used three times by now, cd twice
    assert len(runs_of(tree)) == 4
    next(n for n in tree.nodes() if n.depth == 2).uses = 4
    assert tree.match(path("abcd"), 4) == 4  # four and five: still not
    next(n for n in tree.nodes() if n.depth == 2).uses = 4
    assert tree.match(path("abcdzz"), 5) == 4
    tree.check()
    assert runs_of(tree) == [(0, [1, 2, 3, 4], 0), (4, [5, 6], 0), (4, [7, 8], 0)]
    for word, slots in (("abcdef", [1, 2, 3, 4, 5, 6]), ("abcdxy", [1, 2, 3, 4, 7, 8])):
        found = tree.locate(path(word), 6)
        assert found.slot.tolist() == slots
        assert found.checksum.tolist() == [slot + 1000 for slot in slots]
        assert found.generation.tolist() == [slot + 2000 for slot in slots]
    assert sorted(evict_all(tree)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_join_keeps_gaps_and_the_place_among_the_leaves() -> None:
    tree = RadixTree(4, Alike())
    put(tree, "abcd", None, 2, None, 4)
    put(tree, "abxx", None, 2, 5, 6)
    tree.drop(path("abxx"), 3, 2006)
    tree.drop(path("abxx"), 2, 2005)
    tree.check()
    assert runs_of(tree) == [(0, [NO_SLOT, 2], 1), (2, [NO_SLOT, 4], 1)]
    assert tree.match(path("ab"), 3, 1) == 1
    put(tree, "abc", 1, None, 3, now=4)
    tree.settle(path("abcd"), 4, None, 5)
    tree.check()
    assert [len(node) for node in tree.nodes()] == [2, 2]  # used once and twice
    next(tree.nodes()).uses = 1
    tree.settle(path("abcd"), 4, None, 6)
    tree.check()
    assert runs_of(tree) == [(0, [1, 2, 3, 4], 0)]
    assert evict_all(tree) == [4, 3, 2, 1]


def test_each_run_that_leaves_the_tree_is_told_of_once() -> None:
    policy = Alike()
    tree = RadixTree(4, policy)
    put(tree, "abcd", None, None, 3, 4)
    put(tree, "abxy", None, None, 5, 6)
    policy.told.clear()
    evict_all(tree)
    assert policy.told == [("removed", 2), ("removed", 2), ("removed", 0)]


def test_what_was_not_kept_leaves_a_shadow() -> None:
    policy = Alike()
    policy.shadows = Shadows(10)
    tree = RadixTree(4, policy)
    put(tree, "ab", 1, 2)
    tree.settle(path("abcd"), 2, 5, 7)
    tree.check()
    assert tree.page_count == 2 and policy.told[-1] == ("settled", [2, 2], 4, 5)
    assert policy.shadows.page_count == 2
    tree.settle(path("abcd"), 2, 5, 9)  # and again: it would have been used twice
    ((pages, shadow),) = policy.shadows.recall(path("cd"), 4)
    assert pages == 2 and shadow is not None and (shadow.uses, shadow.last_use) == (2, 9)
