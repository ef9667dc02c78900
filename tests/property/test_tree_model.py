"""The index of one namespace against a dict, step by step, with its invariants checked each time.

A page is named by its prefix, a short word over three letters, so that chains branch and meet.
"""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tutti_core.format import RECORD, ROOT_PARENT
from tutti_core.index.pages import NamespacePages, Victim
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.index.restore import build_pages

WIDTH = 16
WORDS = st.text("abc", min_size=1, max_size=7)
OUTPUTS = st.one_of(st.none(), st.integers(0, 100_000))
Location = tuple[int, int, int]


def key_of(word: str) -> bytes:
    """Key of the last page of a chain."""
    return hashlib.sha256(word.encode()).digest()[:WIDTH]


def chain_of(word: str) -> bytes:
    return b"".join(key_of(word[: i + 1]) for i in range(len(word)))


def record_key_of(word: str) -> bytes:
    return hashlib.sha256(b"record" + word.encode()).digest()[:16]


class TreeModel(RuleBasedStateMachine):
    """`tree` and `loose` say where each page must be found; slots are never used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = self.new_pages()
        self.tree: dict[str, Location] = {}
        self.loose: dict[str, Location] = {}
        self.pins: dict[str, int] = {}
        self.now = 0
        self.serial = 0

    def new_pages(self) -> NamespacePages:
        return NamespacePages(WIDTH)

    def tick(self) -> int:
        self.now += 1
        return self.now

    def new_locations(self, mask: list[bool]) -> tuple[Locations, list[Location | None]]:
        where = Locations.absent(len(mask))
        model: list[Location | None] = []
        for i, stored in enumerate(mask):
            if not stored:
                model.append(None)
                continue
            self.serial += 1
            model.append((self.serial, self.serial + 10_000, self.serial + 20_000))
            where.slot[i], where.checksum[i], where.generation[i] = model[-1]
        return where, model

    @rule(word=WORDS, first=st.integers(0, 6), bits=st.integers(0, 255), rooted=st.booleans())
    def insert(self, word: str, first: int, bits: int, rooted: bool) -> None:
        first = min(first, len(word))
        places = range(first, len(word))
        # A page is inserted without its chain only if the tree lacks it; see Manager.
        mask = [bool(bits >> i & 1) and (rooted or word[: i + 1] not in self.tree) for i in places]
        where, model = self.new_locations(mask)
        self.pages.insert(chain_of(word), first, rooted, where, self.tick())
        for i, location in zip(places, model, strict=True):
            if location and rooted:
                self.tree[word[: i + 1]] = location
                self.loose.pop(word[: i + 1], None)
            elif location:
                self.loose[word[: i + 1]] = location

    @rule(word=WORDS, first=st.integers(0, 6))
    def match(self, word: str, first: int) -> None:
        first = min(first, len(word))
        hit = 0
        while first + hit < len(word) and word[: first + hit + 1] in self.tree:
            hit += 1
        assert self.pages.match(chain_of(word), first, self.tick()) == hit

    @rule(word=WORDS, first=st.integers(0, 6), rooted=st.booleans())
    def locate(self, word: str, first: int, rooted: bool) -> None:
        first = min(first, len(word))
        found = self.pages.locate(chain_of(word), first, rooted, self.tick())
        for i in range(first, len(word)):
            name = word[: i + 1]
            expected = self.loose.get(name) or (self.tree.get(name) if rooted else None)
            at = i - first
            if expected is None:
                assert found.slot[at] == NO_SLOT
                continue
            got = (int(found.slot[at]), int(found.checksum[at]), int(found.generation[at]))
            assert got == expected
            if rooted and name in self.loose:
                self.tree[name] = self.loose.pop(name)

    @rule(word=WORDS, right=st.booleans(), rooted=st.booleans())
    def drop(self, word: str, right: bool, rooted: bool) -> None:
        known = self.loose.get(word) or (self.tree.get(word) if rooted else None)
        generation = known[2] if known and right else 1
        self.pages.drop(chain_of(word), len(word) - 1, rooted, generation)
        if known and right:
            self.loose.pop(word, None)
            if rooted:
                self.tree.pop(word, None)

    @rule(word=WORDS)
    def pin(self, word: str) -> None:
        self.pages.pin(chain_of(word))
        for i in range(len(word)):
            self.pins[word[: i + 1]] = self.pins.get(word[: i + 1], 0) + 1

    @rule(word=WORDS)
    def unpin(self, word: str) -> None:
        self.pages.unpin(chain_of(word))
        for i in range(len(word)):
            left = self.pins.pop(word[: i + 1], 0) - 1
            if left > 0:
                self.pins[word[: i + 1]] = left

    @rule(count=st.integers(1, 6), most=st.integers(1, 4), guard=st.one_of(st.just(""), WORDS))
    def evict(self, count: int, most: int, guard: str) -> None:
        guarded = {guard[: i + 1] for i in range(len(guard))}
        self.pages.guard(chain_of(guard))
        for _ in range(count):
            victim = self.pages.victim(most, self.now)
            if victim is None:
                # Nothing may be left that is neither pinned, guarded, nor an ancestor of such.
                kept = guarded | set(self.pins)
                assert not set(self.loose) - set(self.pins)
                for name in self.tree:
                    assert any(k.startswith(name) for k in kept), f"{name} could be evicted"
                break
            assert victim.span <= most
            self.forget(victim, guarded)
        self.pages.unguard()

    def forget(self, victim: Victim, guarded: set[str]) -> None:
        """Evict a victim, which must be what may go."""
        names = {key_of(n): n for n in (*self.tree, *self.loose)}
        model = self.loose if victim.leaf is None else self.tree
        assert 1 <= len(victim.slot) <= victim.span
        gone = [names[victim.keys[i * WIDTH : (i + 1) * WIDTH]] for i in range(len(victim.slot))]
        for i, name in reversed(list(enumerate(gone))):
            assert model[name][0] == victim.slot[i] and model[name][2] == victim.generation[i]
            assert name not in self.pins
            if victim.leaf is not None:
                assert name not in guarded
                below = [n for n in self.tree if n != name and n.startswith(name)]
                assert not below, "not a leaf"
            del model[name]
        self.pages.forget(victim, self.tick())
        self.pages.tree.check()

    @rule(word=WORDS, kept=st.integers(0, 7), output=OUTPUTS)
    def settle(self, word: str, kept: int, output: int | None) -> None:
        """Says how a request went, whatever of it is stored; moves no page."""
        self.pages.settle(chain_of(word), min(kept, len(word)), output, self.tick())

    @rule(word=WORDS, output=OUTPUTS, room=st.integers(4, 16))
    def serve(self, word: str, output: int | None, room: int) -> None:
        """A request as the store sees it: look up, make room, save what is worth it, settle."""
        keys = chain_of(word)
        hit = self.pages.match(keys, 0, self.tick())
        kept = hit
        self.pages.guard(keys)
        for pages, worth in self.pages.worth(keys, hit, len(word), output):
            assert worth >= 0
            left = pages
            while left and self.pages.page_count + kept - hit + left > room:
                victim = self.pages.victim(2, self.tick())
                if victim is None or victim.value > worth:
                    left -= 1
                    continue
                self.forget(victim, {word[: i + 1] for i in range(len(word))})
            kept += left
            if left < pages:
                break
        self.pages.unguard()
        where, model = self.new_locations([True] * (kept - hit))
        self.pages.insert(chain_of(word[:kept]), hit, True, where, self.tick())
        for i, location in enumerate(model, hit):
            assert location is not None
            self.tree[word[: i + 1]] = location
            self.loose.pop(word[: i + 1], None)
        self.pages.settle(keys, kept, output, self.tick())

    @rule(bits=st.integers(0, 2**32 - 1), everything=st.booleans())
    def drop_generations(self, bits: int, everything: bool) -> None:
        known = [*self.tree.items(), *self.loose.items()]
        gone = [(n, p) for i, (n, p) in enumerate(known) if everything or bits >> i % 32 & 1]
        self.pages.drop_generations({page[2] for _, page in gone} | {1})
        for name, _ in gone:
            self.tree.pop(name, None)
            self.loose.pop(name, None)

    @rule(words=st.lists(st.tuples(WORDS, st.booleans(), st.integers(0, 255)), max_size=4))
    def absorb(self, words: list[tuple[str, bool, int]]) -> None:
        newer = self.new_pages()
        for word, rooted, bits in words:
            mask = [
                bool(bits >> i & 1)
                and (
                    rooted or (word[: i + 1] not in self.tree and not self.in_tree(newer, word, i))
                )
                for i in range(len(word))
            ]
            where, model = self.new_locations(mask)
            newer.insert(chain_of(word), 0, rooted, where, self.tick())
            for i, location in enumerate(model):
                if location and rooted:
                    self.tree[word[: i + 1]] = location
                    self.loose.pop(word[: i + 1], None)
                elif location:
                    self.loose[word[: i + 1]] = location
        self.pages.absorb(newer)

    @staticmethod
    def in_tree(pages: NamespacePages, word: str, index: int) -> bool:
        found = pages.tree.locate(chain_of(word), 0, index)
        return bool(found.slot[0] != NO_SLOT)

    @precondition(lambda self: not self.pins)
    @rule()
    def restart(self) -> None:
        """The index built from the records finds each page where it was."""
        stored = sorted(
            [*self.tree.items(), *self.loose.items()], key=lambda p: record_key_of(p[0])
        )
        records = np.zeros(len(stored), RECORD)
        for record, (name, (slot, checksum, generation)) in zip(records, stored, strict=True):
            parent = record_key_of(name[:-1]) if len(name) > 1 else ROOT_PARENT
            record["page_key"] = np.void(key_of(name).ljust(32, b"\0"))
            record["parent"] = np.void(parent)
            record["slot"], record["checksum"], record["generation"] = slot, checksum, generation
        keys = b"".join(record_key_of(name) for name, _ in stored)
        self.pages = build_pages(WIDTH, keys, records)
        pages = dict(stored)
        self.tree = {n: p for n, p in stored if all(n[: i + 1] in pages for i in range(len(n)))}
        self.loose = {n: p for n, p in stored if n not in self.tree}
        self.now = max(self.now, self.serial + 20_000)

    @invariant()
    def sound(self) -> None:
        self.pages.tree.check()
        found = {}
        for node in self.pages.tree.nodes():
            where = zip(node.slots, node.checksums, node.generations, strict=True)
            for i, location in enumerate(where):
                if location[0] != NO_SLOT:
                    found[bytes(node.keys[i * WIDTH : (i + 1) * WIDTH])] = location
        assert found == {key_of(name): location for name, location in self.tree.items()}
        assert self.pages.tree.page_count == len(self.tree)
        assert set(self.pages.loose) == {key_of(name) for name in self.loose}
        assert self.pages.page_count == len(self.tree) + len(self.loose)
        assert self.pages.pins == {key_of(name): count for name, count in self.pins.items()}


TestTreeModel = TreeModel.TestCase
TestTreeModel.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
