"""Shadows of evicted runs: the bound, where runs that come back are cut, and what is forgotten."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import Locations, Node
from tutti_core.policies.lru_k import Lru2
from tutti_core.policies.shadows import RUN_PAGES, Shadow, Shadows

WIDTH = 8
QUEUE = 7


def key_of(word: str) -> bytes:
    return hashlib.sha256(word.encode()).digest()[:WIDTH]


def chain_of(word: str, first: int = 0) -> bytes:
    """Keys of the chain along a word, from one page on."""
    return b"".join(key_of(word[: i + 1]) for i in range(first, len(word)))


def run_of(word: str, first: int = 0, uses: int = 1) -> Node:
    """The run with the pages of a word from `first` on."""
    node = Node(1, None, first, 100)
    node.keys = bytearray(chain_of(word, first))
    node.slots = array("Q", [1] * (len(word) - first))
    node.uses, node.last_use, node.previous_use, node.queue = uses, 200, 150, 2
    return node


def recalled(shadows: Shadows, word: str, first: int = 0) -> list[tuple[int, int]]:
    """(pages, uses) of each part; 0 uses for what is not known."""
    parts = shadows.recall(chain_of(word, first), WIDTH)
    return [(pages, shadow.uses if shadow else 0) for pages, shadow in parts]


def test_a_run_comes_back_with_its_history() -> None:
    shadows = Shadows(100)
    shadows.remember(run_of("abcd", uses=3), 0, WIDTH, QUEUE, 300)
    assert len(shadows) == 1 and shadows.page_count == 4
    ((pages, shadow),) = shadows.recall(chain_of("abcd"), WIDTH)
    assert pages == 4 and shadow is not None and len(shadow) == 4
    assert (shadow.born, shadow.last_use, shadow.previous_use) == (100, 200, 150)
    assert (shadow.uses, shadow.queue, shadow.gone) == (3, QUEUE, 300)


def test_what_was_recalled_is_dropped() -> None:
    shadows = Shadows(100)
    shadows.remember(run_of("abcd"), 0, WIDTH, QUEUE, 1)
    assert recalled(shadows, "abcd") == [(4, 1)]
    assert len(shadows) == 0 and shadows.page_count == 0
    assert recalled(shadows, "abcd") == [(4, 0)]


@pytest.mark.parametrize(
    ("asked", "first", "parts"),
    [
        ("abcd", 0, [(4, 3)]),
        ("abcdxy", 0, [(4, 3), (2, 0)]),  # longer
        ("ab", 0, [(2, 3)]),  # shorter
        ("abxd", 0, [(2, 3), (2, 0)]),  # another way from the middle on
        ("axcd", 0, [(1, 3), (3, 0)]),
        ("abcx", 0, [(3, 3), (1, 0)]),
        ("xbcd", 0, [(4, 0)]),  # another first page
        ("abcd", 1, [(3, 0)]),  # found by its first page only
    ],
)
def test_where_a_run_that_comes_back_is_cut(
    asked: str, first: int, parts: list[tuple[int, int]]
) -> None:
    shadows = Shadows(100)
    shadows.remember(run_of("abcd", uses=3), 0, WIDTH, QUEUE, 1)
    assert recalled(shadows, asked, first) == parts


def test_the_same_letter_elsewhere_is_another_page() -> None:
    shadows = Shadows(100)
    shadows.remember(run_of("ab"), 0, WIDTH, QUEUE, 1)
    assert recalled(shadows, "xb", 1) == [(1, 0)]


@pytest.mark.parametrize("same", range(1, 70))
def test_every_point_of_divergence(same: int) -> None:
    word = "a" * 70
    shadows = Shadows(100)
    shadows.remember(run_of(word), 0, WIDTH, QUEUE, 1)
    assert recalled(shadows, word[:same] + "b" * 5) == [(same, 1), (5, 0)]


def test_parts_of_a_chain_follow_each_other() -> None:
    """A leaf loses its end first, so a chain leaves several shadows, the deepest the oldest."""
    shadows = Shadows(100)
    run = run_of("abcdefgh", uses=2)
    shadows.remember(run, 5, WIDTH, QUEUE, 1)
    del run.keys[5 * WIDTH :], run.slots[5:]
    run.uses = 4
    shadows.remember(run, 2, WIDTH, QUEUE, 2)
    assert shadows.page_count == 6
    assert recalled(shadows, "abcdefgh", 2) == [(3, 4), (3, 2)]


def test_nothing_is_known_behind_a_missing_part() -> None:
    shadows = Shadows(100)
    shadows.remember(run_of("abcdef"), 4, WIDTH, QUEUE, 1)
    assert recalled(shadows, "abcdef", 2) == [(4, 0)]


def test_the_bound_holds_to_the_page_and_the_oldest_goes_first() -> None:
    for room, kept in ((12, "bcd"), (11, "cd"), (15, "bcd"), (16, "abcd"), (3, ""), (0, "")):
        shadows = Shadows(room)
        for letter in "abcd":
            shadows.remember(run_of(letter * 4), 0, WIDTH, QUEUE, 1)
        assert len(shadows) == len(kept) and shadows.page_count == 4 * len(kept)
        for letter in "abcd":
            assert recalled(shadows, letter * 4) == [(4, int(letter in kept))]


def test_a_run_larger_than_the_bound_is_not_remembered() -> None:
    shadows = Shadows(20)
    shadows.remember(run_of("ab"), 0, WIDTH, QUEUE, 1)
    shadows.remember(run_of("x" * 30), 0, WIDTH, QUEUE, 2)
    assert len(shadows) == 0 and shadows.page_count == 0


def test_a_smaller_bound_holds_from_the_next_eviction_on() -> None:
    shadows = Shadows(100)
    for letter in "abcd":
        shadows.remember(run_of(letter * 4), 0, WIDTH, QUEUE, 1)
    shadows.pages_max = 2 * 4
    shadows.remember(run_of("eeee"), 0, WIDTH, QUEUE, 2)
    assert len(shadows) == 2 and recalled(shadows, "eeee") == [(4, 1)]


def test_the_same_run_evicted_twice_has_one_shadow() -> None:
    shadows = Shadows(100)
    shadows.remember(run_of("abcd", uses=1), 0, WIDTH, QUEUE, 1)
    shadows.remember(run_of("abx", uses=5), 0, WIDTH, QUEUE, 2)
    assert len(shadows) == 1 and shadows.page_count == 3
    assert recalled(shadows, "abcd") == [(2, 5), (2, 0)]


def test_who_is_told_of_what_is_forgotten() -> None:
    """For want of room, or because the same run was evicted anew; not what was recalled."""
    shadows, told = Shadows(10), []
    shadows.dropped = lambda shadow, now: told.append((shadow.queue, len(shadow), now))
    shadows.remember(run_of("abcd"), 0, WIDTH, 1, 10)
    shadows.remember(run_of("xyz"), 0, WIDTH, 2, 20)
    shadows.remember(run_of("abq"), 0, WIDTH, 3, 30)
    assert told == [(1, 4, 30)]
    assert recalled(shadows, "xyz") == [(3, 1)] and told == [(1, 4, 30)]
    shadows.remember(run_of("eeeeeeeee"), 0, WIDTH, 4, 40)
    assert told == [(1, 4, 30), (3, 3, 40)]
    shadows.remember(run_of("f" * 11), 0, WIDTH, 5, 50)  # more than all the room
    assert told[2:] == [(4, 9, 50), (5, 11, 50)]
    assert len(shadows) == 0 and shadows.page_count == 0


def test_looking_at_what_would_come_back_changes_nothing() -> None:
    shadows, told = Shadows(100), []
    shadows.dropped = lambda shadow, now: told.append(shadow)
    run = run_of("abcdef", uses=2)
    shadows.remember(run, 4, WIDTH, QUEUE, 1)
    del run.keys[4 * WIDTH :], run.slots[4:]
    shadows.remember(run, 0, WIDTH, QUEUE, 2)
    seen = shadows.recall(chain_of("abcdefgh"), WIDTH, take=False)
    assert [pages for pages, _ in seen] == [4, 2, 2]
    assert len(shadows) == 2 and shadows.page_count == 6
    assert shadows.recall(chain_of("abcdefgh"), WIDTH) == seen
    assert len(shadows) == 0 and shadows.page_count == 0 and not told


def test_the_tree_gives_a_part_that_comes_back_a_node_with_its_history() -> None:
    pages = NamespacePages(WIDTH, Lru2(100))
    where = Locations.absent(6)
    where.slot[:] = 1
    pages.insert(chain_of("abcdef"), 0, True, where, 10)
    pages.match(chain_of("abcd"), 0, 20)  # abcd was used twice, ef once
    for _ in range(2):
        victim = pages.victim(9, 30)
        assert victim is not None
        pages.forget(victim, 30)
    assert pages.page_count == 0
    pages.insert(chain_of("abcdef"), 0, True, where, 40)
    found = [(len(n), n.born, n.previous_use, n.uses) for n in pages.tree.nodes()]
    assert found == [(4, 10, 20, 3), (2, 10, 10, 2)]
    pages.tree.check()


class ShadowModel(RuleBasedStateMachine):
    """Shadows against a dict, in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.shadows = Shadows(40)
        self.made: dict[str, tuple[str, int]] = {}  # first page: last page, uses

    def pages_of(self, first: str) -> int:
        return len(self.made[first][0]) - len(first) + 1

    @rule(
        word=st.text("abc", min_size=1, max_size=9), first=st.integers(0, 8), uses=st.integers(1, 9)
    )
    def remember(self, word: str, first: int, uses: int) -> None:
        first = min(first, len(word) - 1)
        above = min(first, 1)  # the run begins above what is evicted
        run = run_of(word, first - above, uses)
        self.shadows.remember(run, above, WIDTH, QUEUE, 1)
        self.made.pop(word[: first + 1], None)
        self.made[word[: first + 1]] = (word, uses)
        while sum(map(self.pages_of, self.made)) > 40 or len(self.made) > 40 / RUN_PAGES:
            del self.made[next(iter(self.made))]

    @rule(word=st.text("abc", min_size=1, max_size=9), first=st.integers(0, 8), take=st.booleans())
    def recall(self, word: str, first: int, take: bool) -> None:
        at = min(first, len(word) - 1)
        keys, expected, left = chain_of(word, at), [], dict(self.made)
        while at < len(word):
            name = word[: at + 1]
            if name not in left:
                expected.append((len(word) - at, 0))
                break
            last, uses = left.pop(name)
            same = 1
            while last[: at + same + 1] == word[: at + same + 1] and at + same < min(
                len(last), len(word)
            ):
                same += 1
            expected.append((same, uses))
            at += same
        parts = self.shadows.recall(keys, WIDTH, take=take)
        assert [(pages, shadow.uses if shadow else 0) for pages, shadow in parts] == expected
        if take:
            self.made = left

    @invariant()
    def sound(self) -> None:
        assert len(self.shadows) == len(self.made)
        assert self.shadows.page_count == sum(map(self.pages_of, self.made))
        assert self.shadows.page_count <= 40 and len(self.shadows) <= 40 / RUN_PAGES


TestShadowModel = ShadowModel.TestCase
TestShadowModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_a_shadow_knows_its_length() -> None:
    assert len(Shadow(b"\0" * 12, 0, 0, 0, 1, 0, 0)) == 3
