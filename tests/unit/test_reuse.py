"""The default policy through the real index: what it keeps, what it refuses, and its books.

A page is named by a number; a request is a list of them, each standing for all before it as well.
"""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import Locations, Node, RadixTree
from tutti_core.policies import reuse
from tutti_core.policies.base import Policy
from tutti_core.policies.lru import Lru
from tutti_core.policies.rates import buckets_of
from tutti_core.policies.reuse import REFRESH_REQUESTS, Reuse
from tutti_core.replay.generate import PRESETS, generate, preset
from tutti_core.replay.simulate import step_through

WIDTH = 8
SECOND = 1_000_000_000
RARE, OFTEN = 1, 1000
"""Output tokens of the two kinds of requests in most scenarios."""


def keys_of(pages: range | list[int]) -> bytes:
    return np.array(pages, dtype="<u8").tobytes()


def pages_of(keys: bytes) -> list[int]:
    return np.frombuffer(keys, dtype="<u8").tolist()


class Store:
    """A tree of bounded size under the policy; `serve` is one request from look-up to save."""

    def __init__(self, capacity: int, policy: Policy | None = None) -> None:
        self.capacity = capacity
        self.pages = NamespacePages(WIDTH, policy or Reuse(capacity, seed=3))
        self.now = SECOND
        self.gone: list[int] = []

    @property
    def policy(self) -> Reuse:
        policy = self.pages.tree.policy
        assert isinstance(policy, Reuse)
        return policy

    def serve(
        self, pages: range | list[int], output: int | None = None, step_s: float = 1.0
    ) -> tuple[int, int]:
        """Returns (pages found, pages kept in the end)."""
        keys, count = keys_of(pages), len(pages)
        self.now += int(step_s * SECOND)
        hit = kept = self.pages.match(keys, 0, self.now)
        self.pages.guard(keys)
        for wanted, worth in self.pages.worth(keys, hit, count, output):
            while self.pages.page_count + kept - hit + wanted > self.capacity:
                victim = self.pages.victim(10**6, self.now)
                if victim is None or victim.value > worth:
                    break
                self.gone += pages_of(victim.keys)
                self.pages.forget(victim, self.now)
            room = max(self.capacity - self.pages.page_count - (kept - hit), 0)
            kept += min(wanted, room)
            if room < wanted:
                break
        self.pages.unguard()
        slots = np.array(pages[hit:kept], dtype=np.uint64)
        self.pages.insert(keys[: kept * WIDTH], hit, True, Locations(slots, slots, slots), self.now)
        self.pages.settle(keys, kept, output, self.now)
        return hit, kept

    def evict(self, most: int = 10**6) -> list[int]:
        victim = self.pages.victim(most, self.now)
        assert victim is not None
        self.pages.forget(victim, self.now)
        return pages_of(victim.keys)

    def has(self, pages: range | list[int]) -> bool:
        tree, keys = self.pages.tree, keys_of(pages)
        return sum(length for *_, length in tree._walk(keys, len(pages))) == len(pages)

    def check(self) -> None:
        self.pages.tree.check()

    def rows_in_use(self) -> int:
        return self.policy._made - 1 - len(self.policy._free)


# ---- what goes ----
def test_what_never_comes_back_goes_first_though_it_is_newer() -> None:
    """Of two kinds of requests the one comes back after four seconds, the other never does."""

    def last_to_go(policy: Policy) -> set[int]:
        store = Store(1000, policy)
        for i in range(40):
            store.serve(range(1000 + 10 * (i // 2), 1010 + 10 * (i // 2)), OFTEN, 2.0)
            store.serve(range(10**6 + 10 * i, 10**6 + 10 * i + 10), RARE, 2.0)
        for i in range(3):
            store.serve(range(5000 + 10 * i, 5010 + 10 * i), OFTEN, 0.1)
        for i in range(3):
            store.serve(range(6000 + 10 * i, 6010 + 10 * i), RARE, 0.1)
        store.check()
        while store.pages.page_count > 30:
            store.evict(store.pages.page_count - 30)
        return set(store.pages.tree.slots().tolist())

    assert last_to_go(Reuse(1000)) == set(range(5000, 5030))
    assert last_to_go(Lru(1000)) == set(range(6000, 6030))


def test_what_is_worth_less_than_all_else_is_not_stored() -> None:
    store = Store(300)
    for i in range(200):
        store.serve(range(100 * (i % 30), 100 * (i % 30) + 10), OFTEN, 1.0)  # thirty, all in use
        if i % 5 == 0:
            store.serve(range(10**6 + 10 * i, 10**6 + 10 * i + 10), RARE, 0.1)
    assert store.pages.page_count == 300 and not store.policy.guarded
    before, shadows = list(store.gone), store.policy.shadows
    assert shadows is not None
    known = shadows.page_count
    assert store.serve(range(7000, 7010), RARE, 0.1) == (0, 0)
    assert store.gone == before and shadows.page_count == known + 10
    store.check()
    (other,) = store.policy.worth([(10, None)], 10, OFTEN)
    assert other > 10 * store.policy.worth([(10, None)], 10, RARE)[0]


def test_until_something_came_back_everything_is_stored() -> None:
    store = Store(50)
    for i in range(100):
        assert store.serve(range(100 * i, 100 * i + 10), RARE) == (0, 10)
    assert not store.policy.guarded
    assert [g // 100 for g in store.gone[::10]] == sorted(g // 100 for g in store.gone[::10])


def test_the_last_page_of_a_request_goes_alone() -> None:
    store = Store(1000)
    for i in range(40):  # conversations whose last page is never seen again
        a = 1000 * i
        store.serve([*range(a, a + 10), a + 500], OFTEN)
        store.serve([*range(a, a + 10), a + 600], OFTEN)
    victim = store.pages.victim(100, store.now)
    assert victim is not None and victim.span == 1 and pages_of(victim.keys)[0] % 1000 in (500, 600)
    store.check()


# ---- refusals ----
def test_refused_pages_come_back_with_their_history() -> None:
    store = Store(0)
    assert store.policy.shadows is not None
    store.policy.shadows.pages_max = 100
    for uses in range(1, 6):
        assert store.serve(range(10), OFTEN) == (0, 0)
        ((pages, shadow),) = store.policy.shadows.recall(keys_of(range(10)), WIDTH, take=False)
        assert pages == 10 and shadow is not None and shadow.uses == uses
        store.check()


def test_what_is_in_the_tree_all_the_same_was_not_refused() -> None:
    store = Store(100)
    store.serve(range(10), OFTEN)
    store.pages.settle(keys_of(range(15)), 4, None, store.now + 1)
    shadows = store.policy.shadows
    assert shadows is not None and shadows.page_count == 5
    assert shadows.recall(keys_of(range(15))[10 * WIDTH :], WIDTH, take=False)[0][1] is not None
    store.check()


# ---- joins ----
def test_what_was_evicted_in_pieces_becomes_one_run_again() -> None:
    store = Store(100)
    store.serve(range(40), OFTEN)
    while store.pages.page_count:
        store.evict(7)
        store.check()
    assert store.policy.shadows is not None and len(store.policy.shadows) >= 6
    assert store.serve(range(40), OFTEN) == (0, 40)
    (node,) = store.pages.tree.nodes()
    assert len(node) == 40 and node.uses == 2
    assert list(node.slots) == list(node.checksums) == list(node.generations) == list(range(40))
    assert store.policy._weight[node.queue] == pytest.approx(1.0)
    store.check()


def test_what_was_used_differently_is_not_joined() -> None:
    store = Store(100)
    store.serve(range(40), OFTEN)
    store.serve(range(20), OFTEN)
    assert [(len(n), n.uses) for n in store.pages.tree.nodes()] == [(20, 2), (20, 1)]
    store.serve(range(40), OFTEN)
    assert [(len(n), n.uses) for n in store.pages.tree.nodes()] == [(20, 3), (20, 2)]
    store.serve(range(40), OFTEN)  # three times or more are one class
    assert [(len(n), n.uses) for n in store.pages.tree.nodes()] == [(40, 3)]
    store.check()


def test_a_branch_or_a_parked_run_is_not_joined() -> None:
    store = Store(100)
    for _ in range(4):
        store.serve(range(20), OFTEN)
        store.serve([*range(10), *range(90, 95)], OFTEN)
    assert {len(n) for n in store.pages.tree.nodes()} == {10, 5}
    tree = Store(100)
    tree.serve(range(10), OFTEN)
    tree.serve(range(20), OFTEN)
    tree.pages.pin(keys_of(range(20)))
    assert tree.pages.victim(9, tree.now) is None  # parked
    for _ in range(4):
        assert tree.pages.match(keys_of(range(20)), 0, tree.now + 1) == 20
        tree.check()
    assert len(list(tree.pages.tree.nodes())) == 2
    tree.pages.unpin(keys_of(range(20)))
    assert tree.pages.match(keys_of(range(20)), 0, tree.now + 2) == 20
    assert len(list(tree.pages.tree.nodes())) == 1
    tree.check()


# ---- the guard ----
def turned(policy: Policy, taught: int = 400) -> tuple[float, int, Store]:
    """A stream that turns round when the cache is shrunk: what always came back never does again,
    and the kind that never did comes back at once.

    Returns
        share of the second kind that was found when it came back; the requests under guard.
    """
    store = Store(1000, policy)
    for i in range(taught):
        at = i if i // 15 % 2 == 0 else i - 15
        store.serve(range(1000 + 10 * at, 1010 + 10 * at), OFTEN, 2.0)
        store.serve(range(10**6 + 10 * i, 10**6 + 10 * i + 10), RARE, 2.0)
    policy.resize(100)
    store.capacity, found, guarded = 100, 0, 0
    for i in range(100):
        at = 2 * 10**6 + 10 * (i // 2)
        found += store.serve(range(at, at + 10), RARE, 2.0)[0]
        store.serve(range(10**5 + 10 * i, 10**5 + 10 * i + 10), OFTEN, 2.0)
        guarded += isinstance(policy, Reuse) and policy.guarded
    store.check()
    return found / 500, guarded, store


class Unguarded(Reuse):
    """Never evicts as LRU does."""

    guarded = False  # type: ignore[assignment]


def test_a_stream_that_turns_round_is_served_as_by_lru_until_that_is_learnt() -> None:
    found, guarded, _ = turned(Reuse(1000))
    assert 20 < guarded < 100 and found > 0.8
    assert turned(Lru(1000))[0] == 1.0
    assert turned(Unguarded(1000))[0] < 0.7


def test_under_guard_the_order_is_that_of_lru() -> None:
    _, _, store = turned(Reuse(1000))
    policy = store.policy
    policy._ahead = -1e9
    assert policy.guarded
    leaf = store.pages.tree.victim(store.now)
    assert leaf is not None
    used = [policy._used_ms[each.queue] for each in policy.listed()]
    assert policy._used_ms[leaf.queue] == min(used) and policy.span(leaf) == len(leaf)
    assert policy.worth([(3, None), (4, None)], 7, RARE) == [math.inf] * 2
    # Beside other namespaces it still says what its victim is worth.
    row = leaf.queue
    own = int(policy._class[row]) % (reuse._TIP_CLASSES if policy._tip[row] else 10**6)
    age_ms = store.now / 1e6 - policy._used_ms[row]
    expected = policy._rates.value(np.array([own], np.int32), np.array([age_ms]))[0]
    assert policy.value(leaf, store.now) == expected
    assert store.serve(range(5), RARE) == (0, 5)


def test_lru_is_granted_no_more_room_than_there_is() -> None:
    """Where namespaces share, each policy is told of all the room; so this one has a part of it."""
    store = Store(300, Reuse(10**6))
    for i in range(200):
        store.serve(range(100 * (i % 30), 100 * (i % 30) + 10), OFTEN, 1.0)
        store.serve(range(10**6 + 10 * i, 10**6 + 10 * i + 10), RARE, 0.1)
    assert not store.policy.guarded  # LRU would have found nothing in 300 pages
    assert store.serve(range(0, 10), OFTEN)[0] + store.serve(range(100, 110), OFTEN)[0] > 0


def test_the_guard_lets_go_when_lru_is_not_ahead_any_more() -> None:
    policy = Reuse(100)
    policy._ahead, policy._asked = -20.0, 1000.0
    assert policy.guarded
    for _ in range(200):
        policy.asked(100, SECOND)
    assert not policy.guarded


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_replays_are_never_much_below_lru(name: str, seed: int) -> None:
    trace = generate(preset(name), 60 if name == "chat" else 5, seed)
    for share in (2, 5, 10, 20, 40):
        pages = max(len(trace.unique_ids) * share // 100, 1)
        lru = step_through(trace, "lru", pages, 0).hits.sum() / len(trace.ids)
        own = step_through(trace, "reuse", pages, 0).hits.sum() / len(trace.ids)
        assert own >= lru - 0.01, (share, own, lru)


# ---- accounts ----
def test_a_life_is_counted_once_at_every_age() -> None:
    """Learnt from at odd times, split, and used: one run of weight 1 reached each age up to it."""
    policy = Reuse(100)
    store = Store(100, policy)
    store.serve(range(10), OFTEN)
    (node,) = store.pages.tree.nodes()
    run_class = int(policy._class[node.queue])
    for age_s in (0.1, 1, 1, 30, 31, 400):
        policy._learn(store.now / 1e6 + age_s * 1000)
    keys = keys_of(range(10))
    assert store.pages.match(keys[: 4 * WIDTH], 0, store.now + 500 * SECOND) == 4
    used = int(buckets_of(np.array([500_000.0]))[0])
    assert policy._rates._uses[run_class, used] == pytest.approx(0.4)
    policy._learn(store.now / 1e6 + 1e7)  # the lower part goes on
    reached = np.cumsum(policy._rates._reached_steps[run_class])
    assert reached[: used + 1] == pytest.approx(1.0)
    assert reached[used + 1 : int(buckets_of(np.array([1e7]))[0])] == pytest.approx(0.6)
    # Its last page is a class of its own, of weight 1.
    tip = np.cumsum(policy._rates._reached_steps[run_class % reuse._TIP_CLASSES])
    assert tip[: int(buckets_of(np.array([1e7]))[0])] == pytest.approx(1.0)
    store.check()


def test_an_evicted_run_is_learnt_from_until_it_is_forgotten() -> None:
    policy = Reuse(100)
    store = Store(100, policy)
    store.serve(range(10), OFTEN)
    (node,) = store.pages.tree.nodes()
    run_class = int(policy._class[node.queue])
    while store.pages.page_count:
        store.evict(4)
    policy._learn(store.now / 1e6 + 1e6)
    until = int(buckets_of(np.array([1e6]))[0])
    # The last page alone speaks for its own class only.
    assert np.cumsum(policy._rates._reached_steps[run_class])[:until] == pytest.approx(0.9)
    tip = policy._rates._reached_steps[run_class % reuse._TIP_CLASSES]
    assert np.cumsum(tip)[:until] == pytest.approx(1.0)
    store.check()
    assert policy.shadows is not None
    policy.resize(0)
    store.serve(range(100, 110), OFTEN)
    store.evict()
    store.check()
    assert not len(policy.shadows) and store.rows_in_use() == len(list(store.pages.tree.nodes()))


def test_what_is_older_than_the_last_bucket_was_exposed_to_it() -> None:
    policy = Reuse(100)
    store = Store(100, policy)
    for i in range(50):
        store.serve(range(10 * i, 10 * i + 2), OFTEN, 0.001)
    days_10 = 10 * 86_400 * SECOND
    for _ in range(9):
        policy._learn((store.now + days_10) / 1e6)
    assert store.pages.match(keys_of(range(2)), 0, store.now + days_10) == 2
    policy._rates.refresh()
    policy._rates.check()
    at_last = policy._rates.value(np.array([reuse._class_of(1, 5, 0)], np.int32), np.array([1e12]))
    assert float(at_last[0]) < 0.1 / 86_400_000  # one of fifty, in days


def test_restored_runs_are_no_evidence_until_a_request_claims_them() -> None:
    policy = Reuse(100)
    tree = RadixTree(WIDTH, policy)
    slots = np.arange(10, dtype=np.uint64)
    node = tree.grow(tree.root, keys_of(range(10)), Locations(slots, slots, slots), 77)
    tree.check()
    policy._learn(1e12)
    assert not policy._rates._reached_steps.any()
    assert 0 <= policy.loose_value(77, 10**18) < math.inf
    assert tree.victim(10**18) is node
    assert tree.match(keys_of(range(10)), 10**18) == 10
    assert not policy._rates._uses.any() and policy._weight[node.queue] == 1.0
    tree.check()


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_tiny_capacities(capacity: int) -> None:
    store, dice = Store(capacity), Random(1)
    for _ in range(300):
        a = 100 * dice.randrange(5)
        store.serve(range(a, a + dice.randrange(1, 5)), dice.choice([None, 0, 9]))
        store.check()
    assert store.pages.page_count <= capacity
    assert store.policy.shadows is not None and store.policy.shadows.page_count <= 4 * capacity


def test_time_that_goes_backwards_is_no_harm() -> None:
    store, dice = Store(100), Random(2)
    for _ in range(500):
        a = 100 * dice.randrange(20)
        store.serve(range(a, a + dice.randrange(1, 15)), None, dice.uniform(-5, 5))
    store.check()
    store.policy._rates.refresh()
    assert np.isfinite(store.policy._rates._values).all()


def test_one_huge_run_and_a_resize() -> None:
    store = Store(5000)
    assert store.serve(range(20_000), OFTEN) == (0, 5000)
    assert store.policy.shadows is not None and store.policy.shadows.page_count == 15_000
    store.check()
    store.policy.resize(10)
    store.serve(range(10**6, 10**6 + 3), OFTEN)
    store.evict()
    store.check()
    assert store.policy.shadows.page_count <= 40


def test_empty_requests() -> None:
    store = Store(10)
    assert store.serve([], None) == (0, 0)
    assert store.pages.worth(b"", 0, 0, None) == []
    assert reuse._newness(0, 0) == 0 and reuse._newness(3, 9) == 0
    store.check()


def test_classes() -> None:
    assert [reuse._output(t) for t in (None, 0, 2, 3, 14, 15, 62, 63, 254, 255)] == [
        *(0, 1, 1, 2, 2, 3, 3, 4, 4, 5)
    ]
    assert reuse._output(10**9) == reuse.OUTPUTS - 1
    assert [reuse._newness(16, n) for n in (16, 9, 8, 5, 4, 3, 2, 1, 0)] == [
        *(0, 0, 1, 1, 2, 2, 3, 4, 4)
    ]
    classes = {
        reuse._class_of(u, o, n)
        for u in range(reuse.USES)
        for o in range(reuse.OUTPUTS)
        for n in range(reuse.NEWNESS)
    }
    assert classes == set(range(reuse.USES * reuse.OUTPUTS * reuse.NEWNESS))


# ---- cost ----
def random_stream(store: Store, requests: int, seed: int = 5, check_every: int = 0) -> list[int]:
    """Branching chains of all lengths, some of which come back; what was found each time."""
    dice, found = Random(seed), []
    for i in range(requests):
        a = 1000 * dice.randrange(40)
        branch = a + 100 * dice.randrange(4)
        pages = [
            *range(a, a + dice.randrange(1, 9)),
            *range(branch + 10, branch + 10 + dice.randrange(9)),
        ]
        found.append(store.serve(pages, dice.choice([None, 1, 50, 2000]), dice.expovariate(0.2))[0])
        if check_every and i % check_every == 0:
            store.check()
    return found


def test_rows_are_bounded_by_what_is_remembered() -> None:
    store = Store(100)
    random_stream(store, 1500, check_every=10)
    assert store.policy.shadows is not None
    runs, shadows = len(list(store.pages.tree.nodes())), len(store.policy.shadows)
    assert store.rows_in_use() == runs + shadows
    assert store.policy._made <= 1 + 100 + 400 + 20
    store.pages.drop_generations(set(range(10**6)))
    assert store.pages.page_count == 0
    store.check()
    assert store.rows_in_use() == len(store.policy.shadows)


def test_the_same_seed_gives_the_same_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "LEAVES_SCANNED_MAX", 4)
    monkeypatch.setattr(reuse, "ROWS_LEARNT_MAX", 16)

    def run(seed: int) -> tuple[list[int], list[int]]:
        store = Store(100, Reuse(100, seed))
        return random_stream(store, 500), store.gone

    assert run(1) == run(1)
    assert run(1) != run(2)  # lots are drawn


def test_of_many_leaves_a_listed_one_goes_and_seldom_a_valuable_one() -> None:
    store = Store(10**6)
    count = 4 * reuse.LEAVES_SCANNED_MAX
    for i in range(count):
        store.serve(range(10 * i, 10 * i + 1), OFTEN, 1.0)
    policy, tree = store.policy, store.pages.tree
    ages = []
    for _ in range(50):
        leaf = tree.victim(store.now)
        assert leaf is not None and leaf.listed and any(leaf is each for each in policy.listed())
        ages.append(int(leaf.slots[0]) // 10)
        tree.cut_tail(leaf, 1, store.now)
    assert max(ages) < count // 16  # the oldest of 512 that are drawn
    store.check()


def test_learning_in_turns_sees_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(at_once: int) -> np.ndarray:
        monkeypatch.setattr(reuse, "ROWS_LEARNT_MAX", at_once)
        store = Store(1000)
        for i in range(REFRESH_REQUESTS - 1):
            store.serve(range(10 * i, 10 * i + 5), OFTEN, 0.001)
        for _ in range(70):
            store.policy._learn(store.now / 1e6 + 1e6)
        return np.cumsum(store.policy._rates._reached_steps, axis=1)

    assert reached(1) == pytest.approx(reached(8192))


# ---- controls: broken books are noticed ----
class KeepsRowsOfRemoved(Reuse):
    def removed(self, run: Node) -> None:
        pass


class KeepsRowsOfShadows(Reuse):
    def _dropped(self, shadow, now: int) -> None:
        pass


class KeepsRowsOfMerged(Reuse):
    def merged(self, upper: Node, lower: Node) -> None:
        self._weight[upper.queue] += self._weight[lower.queue]


class SharesRowsOfSplit(Reuse):
    def split(self, upper: Node, lower: Node) -> None:
        upper.queue = lower.queue


class SharesRowsOfShadows(Reuse):
    def evicted(self, leaf: Node, pages: int, now: int) -> None:
        self._shadow_row = leaf.queue


class LosesPages(Reuse):
    def merged(self, upper: Node, lower: Node) -> None:
        pages = self._pages[upper.queue]
        super().merged(upper, lower)
        self._pages[upper.queue] = pages


class WeighsTwice(Reuse):
    def split(self, upper: Node, lower: Node) -> None:
        super().split(upper, lower)
        self._weight[lower.queue] += 1.0


class UsesWithoutLife(Reuse):
    def _count_use(self, run: Node, now: int, resident: bool) -> None:
        self._rates._uses[int(self._class[run.queue]), 9] += 1.0


class ForgetsTips(Reuse):
    def _free_row(self, row: int) -> None:
        tip = bool(self._tip[row])
        super()._free_row(row)
        self._tip[row] = tip


@pytest.mark.parametrize(
    "broken",
    [
        KeepsRowsOfRemoved,
        KeepsRowsOfShadows,
        KeepsRowsOfMerged,
        SharesRowsOfSplit,
        SharesRowsOfShadows,
        LosesPages,
        WeighsTwice,
        UsesWithoutLife,
        ForgetsTips,
    ],
)
def test_the_check_notices_broken_books(broken: type[Reuse]) -> None:
    def stream(policy: Reuse) -> None:
        store = Store(60, policy)
        dice = Random(1)
        for i in range(400):
            random_stream(store, 1, seed=i, check_every=1)
            if i % 20 == 19:  # all of it, so that there are runs that go as a whole
                store.pages.drop_generations(set(range(0, 40_000, 1 + dice.randrange(3))))
                store.check()

    stream(Reuse(60, seed=1))
    with pytest.raises(AssertionError):
        stream(broken(60, seed=1))
