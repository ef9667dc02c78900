"""The policies, by examples worked out by hand from the rules of the papers.

A name of n letters is a chain of n runs; each run has as many pages as the cache under test says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import numpy as np
import pytest

from tutti_core.errors import ConfigError
from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import Locations, Node, RadixTree
from tutti_core.policies.arc import Arc
from tutti_core.policies.base import Policy
from tutti_core.policies.choice import DEFAULT, POLICIES, make_policy
from tutti_core.policies.gdsf import Gdsf
from tutti_core.policies.lru import Lru
from tutti_core.policies.segments import SegmentPolicy
from tutti_core.policies.tiny_lfu import TinyLfu

WIDTH = 8


class Cache:
    """A tree of bounded size under one policy; `get` returns what had to go."""

    def __init__(self, policy: str | Policy, capacity_runs: int, run_pages: int = 10) -> None:
        self.capacity_pages = capacity_runs * run_pages
        self.run_pages = run_pages
        if isinstance(policy, str):
            policy = make_policy(policy, self.capacity_pages)
        self.pages = NamespacePages(WIDTH, policy)
        self.names: dict[bytes, str] = {}
        self.now = 0

    @property
    def policy(self) -> Policy:
        return self.pages.tree.policy

    def chain(self, name: str) -> bytes:
        keys = []
        for depth in range(1, len(name) + 1):
            for page in range(self.run_pages):
                text = f"{name[:depth]}/{page}"
                keys.append(hashlib.sha256(text.encode()).digest()[:WIDTH])
                self.names[keys[-1]] = name[:depth]
        return b"".join(keys)

    def has(self, name: str) -> bool:
        """Whether all of a chain is stored; not a use."""
        tree, keys = self.pages.tree, self.chain(name)
        found = sum(length for _, _, length in tree._walk(keys, len(keys) // WIDTH))
        return found == len(keys) // WIDTH

    def get(self, name: str) -> list[str]:
        """Use a chain, and store what is missing; the runs of which pages were evicted."""
        keys, gone = self.chain(name), []
        self.now += 10
        hit = self.pages.match(keys, 0, self.now)
        missing = len(keys) // WIDTH - hit
        self.pages.guard(keys)
        while self.pages.page_count + missing > self.capacity_pages:
            gone += self.evict()
        self.pages.unguard()
        where = Locations.absent(missing)
        where.slot[:] = 1
        self.pages.insert(keys, hit, True, where, self.now + 1)
        self.pages.tree.check()
        return gone

    def evict(self) -> list[str]:
        """Let the next leaf go, all of it."""
        victim = self.pages.victim(10**6, self.now)
        assert victim is not None
        self.pages.forget(victim, self.now)
        self.pages.tree.check()
        keys = (victim.keys[i : i + WIDTH] for i in range(0, len(victim.keys), WIDTH))
        return list(dict.fromkeys(self.names[key] for key in keys))

    def drop(self, name: str) -> None:
        """Lose the pages of the last run of a chain, as if they were damaged."""
        keys = self.chain(name)
        for page in range(len(name) * self.run_pages - 1, (len(name) - 1) * self.run_pages - 1, -1):
            assert self.pages.drop(keys, page, True, 0)
        self.pages.tree.check()

    def leaf(self, name: str) -> Node:
        keys = self.chain(name)
        return self.pages.tree._walk(keys, len(keys) // WIDTH)[-1][0]


def drive(cache: Cache, names: str) -> list[str]:
    """Use chains of one run each; all that had to go."""
    return [gone for name in names for gone in cache.get(name)]


# ---- all of them ----
def test_names_and_default() -> None:
    assert set(POLICIES) >= {"lru", "lru2", "slru", "s3fifo", "sieve", "tinylfu", "gdsf", "arc"}
    assert DEFAULT in POLICIES
    assert all(POLICIES[name].name == name for name in POLICIES)
    assert all(isinstance(make_policy(name, 10), POLICIES[name]) for name in POLICIES)
    with pytest.raises(ConfigError, match="lruu"):
        make_policy("lruu", 10)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("capacity_pages", [0, 1, 100])
def test_an_empty_policy_names_nobody(name: str, capacity_pages: int) -> None:
    policy = make_policy(name, capacity_pages)
    assert policy.victim(1) is None and not policy.listed()
    policy.check([])
    policy.resize(7)
    assert policy.capacity_pages == 7


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_everything_can_be_evicted_from_the_leaves_up(name: str) -> None:
    cache = Cache(name, 100)
    for chain in ("abc", "abd", "xy", "abc", "x", "q"):
        cache.get(chain)
    gone = [run for _ in range(100) if cache.pages.page_count for run in cache.evict()]
    assert {"a", "ab", "abc", "abd", "x", "xy", "q"} == set(gone)
    assert cache.policy.victim(cache.now) is None and not cache.policy.listed()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_whole_prefix_outlives_what_hangs_on_it(name: str) -> None:
    cache = Cache(name, 6)
    for chain in ("ab", "ac", "xy", "ad", "pqr", "ae"):
        cache.get(chain)
    stored = [n for n in ("ab", "ac", "xy", "ad", "pqr", "ae") if cache.has(n)]
    assert stored and all(cache.has(n[:-1]) for n in stored)


HOT, SCAN = "abcd", "0123456789klmnopqrst"


@pytest.mark.parametrize(
    ("name", "kept"),
    [("lru", ""), ("lru2", HOT), ("slru", HOT), ("s3fifo", HOT), ("arc", HOT), ("tinylfu", HOT)],
)
def test_a_scan(name: str, kept: str) -> None:
    """Four runs used three times, then twenty used once, in room for ten: LRU keeps none."""
    cache = Cache(name, 10)
    drive(cache, HOT * 3 + SCAN)
    assert "".join(n for n in HOT if cache.has(n)) == kept


# ---- each of them ----
def test_lru() -> None:
    cache = Cache("lru", 3)
    assert drive(cache, "abcad") == ["b"]
    assert drive(cache, "e") == ["c"]


def test_lru2() -> None:
    cache = Cache("lru2", 3, run_pages=100)  # shadows of 300 pages, eight of them a run
    assert drive(cache, "ababcd") == ["c"]  # used once, before all that were used twice
    assert drive(cache, "c") == ["d"]  # c comes back with its history: used twice
    assert drive(cache, "e") == ["a"]  # the last use but one: a 10, b 20, c 50


def test_slru_puts_back_on_probation_what_is_too_much() -> None:
    cache = Cache("slru", 5)
    drive(cache, "abcde" * 2)  # all protected: 5 of 5, where 4 may be
    assert drive(cache, "f") == ["a"]  # a was put back, and went
    assert drive(cache, "g") == ["f"]  # b c d e are 4 of 5; f is on probation
    assert drive(cache, "gh") == ["b"]  # g is protected, so b was put back


def test_slru_protects_the_least_recently_used_least() -> None:
    cache = Cache("slru", 5)
    assert drive(cache, "abcde" * 2 + "a" + "f") == ["b"]


def test_slru_a_run_put_back_is_as_young_as_a_new_one() -> None:
    cache = Cache("slru", 10)
    drive(cache, "abcdefghi" * 2 + "x")  # 9 of 10 protected: a is put back, behind x
    cache.now += 10
    assert cache.policy.victim(cache.now) is cache.leaf("x")
    assert [cache.leaf(n).queue for n in "abx"] == [0, 1, 0]  # 8 of 10 may stay protected
    assert [cache.evict() for _ in range(3)] == [["x"], ["a"], ["b"]]


def test_s3fifo_sifts_in_the_small_queue() -> None:
    cache = Cache("s3fifo", 10)
    drive(cache, "abcdefghij" + "aab")  # used again: a twice, b once
    assert drive(cache, "k") == ["b"]  # a moves to the main queue; once is not enough
    assert drive(cache, "l") == ["c"]
    assert drive(cache, "b") == ["d"]  # it has a ghost: into the main queue
    assert drive(cache, "mnopqrs" + "012") == list("efghijkl" + "mn")
    drive(cache, "3456789")
    assert cache.has("a") and cache.has("b")


def test_s3fifo_what_goes_from_the_main_queue_has_no_ghost() -> None:
    cache = Cache("s3fifo", 4)
    drive(cache, "abce" * 3 + "d")
    assert [cache.evict() for _ in range(2)] == [["d"], ["b"]]
    drive(cache, "bd")
    assert cache.leaf("b").queue == 0  # the small queue
    assert cache.leaf("d").queue == 1  # it has a ghost


def test_s3fifo_moves_on_what_was_used_more_than_once() -> None:
    cache = Cache("s3fifo", 10)
    drive(cache, "abcdefghij" * 3)
    assert drive(cache, "k") == ["a"]  # all moved to the main queue, which forgot their uses
    drive(cache, "bkk")
    assert drive(cache, "l") == ["c"]  # k moved on as well; b went round for its use
    assert drive(cache, "m") == ["l"]  # the small queue has its share again
    drive(cache, "mm")
    assert drive(cache, "n") == ["d"]


@pytest.mark.parametrize(
    ("uses", "order"),
    [("", "bce"), ("b", "ceb"), ("bbbcce", "ecb"), ("bbbbbbbccc", "ebc"), ("ce", "bce")],
)
def test_s3fifo_goes_round_once_a_use_but_three_times_at_most(uses: str, order: str) -> None:
    cache = Cache("s3fifo", 4)
    drive(cache, "abce" * 3)
    assert drive(cache, "d") == ["a"] and cache.evict() == ["d"]  # b, c, e are in the main queue
    drive(cache, uses)
    assert [cache.evict() for _ in range(3)] == [[name] for name in order]


def test_sieve() -> None:
    cache = Cache("sieve", 4)
    drive(cache, "abcd" + "ac")
    assert drive(cache, "e") == ["b"]  # a is spared; the hand stands behind b
    assert drive(cache, "f") == ["d"]  # c is spared
    assert drive(cache, "g") == ["e"]  # the hand goes on to the young end
    assert drive(cache, "h") == ["f"]
    drive(cache, "gh")
    assert drive(cache, "i") == ["a"]  # g and h are spared, and the hand starts over
    leaf = cache.leaf("c")
    cache.pages.tree.park(leaf)
    cache.pages.tree.unpark(leaf)  # before the hand once more
    assert drive(cache, "j") == ["c"]


def test_sieve_a_leaf_comes_back_to_its_side_of_the_hand() -> None:
    cache = Cache("sieve", 4)
    assert drive(cache, "abcd" + "ab" + "e") == ["c"]  # the hand stands behind b
    for name in "ad":
        leaf = cache.leaf(name)
        cache.pages.tree.park(leaf)
        cache.pages.tree.unpark(leaf)
    assert drive(cache, "f") == ["d"]


def test_gdsf_weighs_uses_and_depth_and_ages() -> None:
    cache = Cache("gdsf", 1000, run_pages=1)
    deep = Gdsf.doubling_pages
    keys = np.arange(1, deep + 1, dtype=np.uint64).tobytes()
    cache.names = dict.fromkeys((keys[i : i + 8] for i in range(0, len(keys), 8)), "deep")
    where = Locations.absent(deep)
    where.slot[:] = 1
    cache.pages.insert(keys, 0, True, where, 1)
    drive(cache, "abb")
    # Values: a 1.00, the deep one 1.5 (its middle stands at half the doubling), b 2.00.
    assert cache.evict() == ["a"]  # and what comes from now on is worth 1.00 more
    cache.get("c")  # 2.00, just below b, as both have one page at the front; c is the newer one
    assert cache.evict() == ["deep"]  # 1.5 more
    cache.get("d")  # 1.5 + 1
    assert [cache.evict() for _ in range(3)] == [["b"], ["c"], ["d"]]


def test_tinylfu_lets_in_what_is_wanted_more() -> None:
    cache = Cache("tinylfu", 4, run_pages=1)
    drive(cache, "abcd")  # d is in the window, the others are on probation
    assert drive(cache, "e") == ["d"]  # seen as often as a: the newcomer goes
    assert drive(cache, "f") == ["e"]
    assert drive(cache, "fg") == ["a"]  # f was seen twice, a once
    assert drive(cache, "h") == ["g"]
    assert drive(cache, "g") == ["h"]
    assert drive(cache, "i") == ["b"]  # g was seen twice, though it was gone in between
    cache.get("c")  # protected
    assert drive(cache, "jk") == ["i", "j"]
    cache.policy.check([cache.leaf(n) for n in "cfgk"])


def test_tinylfu_only_what_left_the_window_can_be_protected() -> None:
    cache = Cache("tinylfu", 4, run_pages=1)
    drive(cache, "abcd" + "da")
    assert [cache.leaf(n).queue for n in "abcd"] == [2, 1, 1, 0]


def test_tinylfu_parts_of_a_run_keep_its_count() -> None:
    policy = TinyLfu(100)
    cache = Cache(policy, 10)
    drive(cache, "aaaa")
    keys = cache.chain("a")
    cache.pages.match(keys[: 4 * WIDTH], 0, 1000)  # cut after four pages
    (upper, _, _), (lower, _, _) = cache.pages.tree._walk(keys, 10)
    assert policy._seen(upper) == 5 and policy._seen(lower) == 4
    victim = cache.pages.victim(2, 1001)
    assert victim is not None and victim.leaf is lower
    cache.pages.forget(victim, 1001)
    where = Locations.absent(2)
    where.slot[:] = 1
    cache.pages.insert(keys, 8, True, where, 1002)
    (leaf, _, _) = cache.pages.tree._walk(keys, 10)[-1]
    assert len(leaf) == 2 and policy._seen(leaf) == 5


def test_arc_moves_the_split_by_what_comes_back() -> None:
    policy = Arc(100)
    cache = Cache(policy, 10)
    drive(cache, "abcdefghij" + "abcde")  # f to j were used once
    assert drive(cache, "k") == ["f"]  # the first list may have nothing yet
    assert drive(cache, "f") == ["g"]  # 10 pages of 100 came back to it, the other lost none
    assert policy.once_share == pytest.approx(0.1)
    drive(cache, "hijk")  # all were used again
    assert drive(cache, "l") == ["a"]
    assert drive(cache, "m") == ["b"]  # l is alone in the first list: 10 %, which it may have
    # From the first list g is remembered, from the second a and b: as long as mine, a step is 1.
    assert drive(cache, "a") == ["l"]  # l and m were too much
    assert policy.once_share == 0.0


def test_arc_a_rare_shadow_weighs_more() -> None:
    policy = Arc(1000)
    policy._gone = [100.0, 300.0]
    policy._adapt(0, 10)
    assert policy.once_share == pytest.approx(0.03)
    policy._gone = [100.0, 300.0]
    policy._adapt(1, 10)
    assert policy.once_share == pytest.approx(0.02)
    policy._adapt(0, 10**6)
    assert policy.once_share == 1.0 and policy._gone[0] == 0.0


def test_arc_counts_no_more_shadows_than_there_can_be() -> None:
    policy = Arc(100)
    cache = Cache(policy, 10)
    drive(cache, "abcab" + SCAN * 3)
    assert sum(policy._gone) == pytest.approx(100) and min(policy._gone) >= 0


# ---- sizes of queues ----
@pytest.mark.parametrize("name", ["slru", "s3fifo", "tinylfu", "arc"])
def test_the_size_of_a_queue_follows_its_leaves(name: str) -> None:
    policy = make_policy(name, 100)
    assert isinstance(policy, SegmentPolicy)
    pages = NamespacePages(WIDTH, policy)
    keys = np.arange(1, 10, dtype=np.uint64).tobytes()
    where = Locations(*np.ones((3, 9), np.uint64))
    pages.insert(keys[: 4 * WIDTH], 0, True, where.part(0, 4), 1)
    assert policy.page_count() == 4
    pages.insert(keys, 0, True, where, 2)  # longer, as it was not used yet
    assert policy.page_count() == 9
    victim = pages.victim(2, 3)
    assert victim is not None
    pages.forget(victim, 3)
    assert policy.page_count() == 7
    pages.match(keys[: 3 * WIDTH], 0, 4)  # cut; the upper part is no leaf
    assert policy.page_count() == 4
    assert pages.drop(keys, 6, True, 1)
    pages.match(keys, 0, 5)  # what was lost is noticed when the leaf is moved, at the latest
    if name != "s3fifo":
        assert policy.page_count() == 3
    pages.tree.check()


# ---- parking ----
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_parking_does_not_lose_the_place(name: str) -> None:
    parked, left = Cache(name, 10), Cache(name, 10)
    for cache in (parked, left):
        drive(cache, "abcdefgh")
    leaf = parked.pages.tree.victim(parked.now)
    left.pages.tree.victim(left.now)
    assert leaf is not None
    parked.pages.tree.park(leaf)
    drive(parked, "ij")
    drive(left, "ij")
    parked.pages.tree.unpark(leaf)
    assert [parked.evict() for _ in range(10)] == [left.evict() for _ in range(10)]


@pytest.mark.parametrize("name", ["s3fifo", "sieve"])
def test_a_run_that_had_children_comes_back_to_its_place(name: str) -> None:
    cache = Cache(name, 10)
    for chain in ("a", "ab", "c", "d"):
        cache.get(chain)
    cache.drop("ab")
    # a was used once on the way to ab; without children it stands first again.
    assert cache.leaf("a").rank < cache.leaf("c").rank
    if name == "s3fifo":
        assert [cache.evict() for _ in range(3)] == [["a"], ["c"], ["d"]]
    else:
        assert [cache.evict() for _ in range(3)] == [["c"], ["d"], ["a"]]


# ---- the checks themselves ----
class Forgetful(Lru):
    """Loses a leaf that was off the list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def enlist(self, leaf: Node) -> None:
        if leaf.serial not in self.seen:
            super().enlist(leaf)

    def delist(self, leaf: Node) -> None:
        self.seen.add(leaf.serial)
        super().delist(leaf)


class Clinging(Lru):
    """Keeps a leaf that is off the list."""

    def delist(self, leaf: Node) -> None:
        pass


class Doubling(Lru):
    """Lists a leaf twice."""

    def listed(self) -> Collection[Node]:
        return [*super().listed(), *super().listed()]


@pytest.mark.parametrize("broken", [Forgetful, Clinging, Doubling])
def test_check_notices_a_broken_policy(broken: type[Policy]) -> None:
    tree = RadixTree(WIDTH, broken())
    where = Locations.absent(2)
    where.slot[:] = 1
    with pytest.raises(AssertionError):
        tree.insert(b"a" * WIDTH + b"b" * WIDTH, 0, where, 1)
        tree.check()
        leaf = tree.victim(2)
        assert leaf is not None, "found too early"
        tree.park(leaf)
        tree.check()
        tree.unpark(leaf)
        tree.check()


def test_check_takes_a_sound_policy() -> None:
    tree = RadixTree(WIDTH, Lru())
    where = Locations.absent(1)
    where.slot[:] = 1
    tree.insert(b"a" * WIDTH, 0, where, 1)
    leaf = tree.victim(2)
    assert leaf is not None
    tree.park(leaf)
    tree.check()
    tree.unpark(leaf)
    tree.check()
