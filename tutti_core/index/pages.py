"""The pages of one namespace: the tree, pages whose ancestors are unknown, and pins.

Pure, like the tree. A page stands in exactly one place: in the tree under its chain, or among the
`loose` ones, from where it moves into the tree as soon as its chain is known.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from tutti_core.index.radix import NO_SLOT, U64, Locations, Node, RadixTree
from tutti_core.policies.base import Policy
from tutti_core.policies.shadows import Shadow


@dataclass(frozen=True, slots=True)
class LoosePage:
    """Location of a page that is not in the tree, and when it was used last."""

    slot: int
    checksum: int
    generation: int
    last_use: int


@dataclass(frozen=True, slots=True)
class Victim:
    """Pages offered for eviction: the stored ones at the end of a leaf, or one loose page.

    keys            packed, the deepest page last.
    slot, generation   parallel to the keys.
    last_use        when they were used last.
    value           what keeping them is worth to the policy.
    leaf            None for a loose page.
    span            pages to cut off the leaf, gaps among them included.
    """

    keys: bytes
    slot: U64
    generation: U64
    last_use: int
    leaf: Node | None
    span: int
    value: float


class Offers:
    """What each namespace would evict next, asked for once. Valid while the lock is held."""

    def __init__(self) -> None:
        self._victims: dict[bytes, Victim | None] = {}

    def of(self, digest: bytes, pages: NamespacePages, pages_max: int, now: int) -> Victim | None:
        """The offer of a namespace, of at most `pages_max` pages."""
        victim = self._victims.get(digest)
        if digest not in self._victims or (victim is not None and victim.span > pages_max):
            victim = self._victims[digest] = pages.victim(pages_max, now)
        return victim

    def take(self, digest: bytes) -> None:
        """The caller evicts what this namespace offered: it is asked anew next time."""
        del self._victims[digest]


class NamespacePages:
    """Which pages of one namespace are stored where. Not thread-safe; time is passed in."""

    def __init__(self, width: int, policy: Policy | None = None, opened: int = 0) -> None:
        self.tree = RadixTree(width, policy)
        self.opened = opened
        self.loose: OrderedDict[bytes, LoosePage] = OrderedDict()  # least recently used first
        self.pins: dict[bytes, int] = {}
        self._guarded: dict[Node, int] = {}  # pages at the front of each that must stay

    @property
    def page_count(self) -> int:
        """Stored pages known here."""
        return self.tree.page_count + len(self.loose)

    def fresh_count(self, keys: bytes, used_since: int) -> int:
        """How many leading pages of a rooted chain were used since then, or are not known here.

        Along a chain no page was used later than those before it. What this index was filled with
        counts as used when it was made (`opened`).
        """
        if used_since <= self.opened:
            return len(keys) // self.tree.width
        for node, start in self.tree.nodes_along(keys):
            if node.last_use < used_since:
                return start
        return len(keys) // self.tree.width

    def match(self, keys: bytes, first: int, now: int) -> int:
        """Stored pages without a gap from page `first` of a rooted chain on; a use of them."""
        return self.tree.match(keys, now, first)

    def locate(self, keys: bytes, first: int, rooted: bool, now: int) -> Locations:
        """Locations of pages `first` .. end; NO_SLOT where a page is not known here."""
        if rooted:
            found = self.tree.locate(keys, now, first)
        else:
            found = Locations.absent(len(keys) // self.tree.width - first)
        if self.loose:
            self._add_loose(keys, first, rooted, found, now)
        return found

    def insert(self, keys: bytes, first: int, rooted: bool, pages: Locations, now: int) -> None:
        """Record the locations of pages `first` .. end; NO_SLOT leaves a page as it is."""
        if rooted:
            if self.loose:
                for i in np.flatnonzero(pages.slot != NO_SLOT):
                    self.loose.pop(self._key(keys, first + int(i)), None)
            self.tree.insert(keys, first, pages, now)
            return
        for i in np.flatnonzero(pages.slot != NO_SLOT)[::-1]:  # the last page is evicted first
            key = self._key(keys, first + int(i))
            self.loose[key] = LoosePage(
                int(pages.slot[i]), int(pages.checksum[i]), int(pages.generation[i]), now
            )
            self.loose.move_to_end(key)

    def drop(self, keys: bytes, index: int, rooted: bool, generation: int) -> bool:
        """Forget one page if it is known with this generation."""
        if rooted and self.tree.drop(keys, index, generation):
            return True
        key = self._key(keys, index)
        page = self.loose.get(key)
        if page is None or page.generation != generation:
            return False
        del self.loose[key]
        return True

    def drop_generations(self, generations: set[int]) -> None:
        """Forget the pages with these generations, wherever they stand. O(pages)."""
        self.tree.drop_generations(generations)
        for key in [k for k, page in self.loose.items() if page.generation in generations]:
            del self.loose[key]

    def absorb(self, newer: NamespacePages) -> None:
        """Take over what another index of the same namespace knows, pins included."""
        width = self.tree.width
        for above, node in newer.tree.chains():
            where = Locations(
                np.array(node.slots, dtype=np.uint64),
                np.array(node.checksums, dtype=np.uint64),
                np.array(node.generations, dtype=np.uint64),
            )
            first = len(above) // width
            self.insert(above + bytes(node.keys), first, True, where, node.last_use)
        in_tree = set(self.tree.slots().tolist()) if newer.loose else set()
        for key, page in newer.loose.items():
            if page.slot not in in_tree:
                self.loose[key] = page
                self.loose.move_to_end(key)
        self.pins.update(newer.pins)

    # ---- pins ----
    def pin(self, keys: bytes) -> None:
        """Count one more pin on each page of `keys`."""
        for i in range(len(keys) // self.tree.width):
            key = self._key(keys, i)
            self.pins[key] = self.pins.get(key, 0) + 1

    def unpin(self, keys: bytes) -> None:
        """Take one pin off each page of `keys`; a page without a pin is left alone."""
        for i in range(len(keys) // self.tree.width):
            key = self._key(keys, i)
            count = self.pins.get(key, 0)
            if count > 1:
                self.pins[key] = count - 1
            elif count:
                del self.pins[key]
        self.tree.unpark_all()

    # ---- eviction ----
    def guard(self, keys: bytes) -> None:
        """Until `unguard`, do not offer the pages of this rooted chain for eviction.

        For the time in which room is made for its next pages: without their ancestors they would be
        worth nothing.
        """
        self._guarded = self.tree.pages_along(keys)

    def unguard(self) -> None:
        """End the last `guard`."""
        for node in self._guarded:
            self.tree.unpark(node)
        self._guarded = {}

    def victim(self, pages_max: int, now: int) -> Victim | None:
        """Up to `pages_max` pages to evict next: the end of the leaf that the policy names.

        A loose page goes instead where it is older. Leaves that end in a pinned or guarded page are
        parked on the way, so a store full of pins answers at once from the second call on.
        """
        loose = self.oldest_loose()
        policy = self.tree.policy
        while (leaf := self.tree.victim(now)) is not None:
            span = min(pages_max, len(leaf) - self.kept_pages(leaf, pages_max))
            if span <= 0:
                self.tree.park(leaf)
                continue
            value = policy.value(leaf, now)
            if loose is not None and loose.last_use <= leaf.last_use:
                return replace(loose, value=value)
            return self.tail(leaf, min(span, policy.span(leaf)), value)
        if loose is None:
            return None
        return replace(loose, value=policy.loose_value(loose.last_use, now))

    def worth(
        self, keys: bytes, first: int, request_pages: int, output_tokens: int | None
    ) -> list[tuple[int, float]]:
        """What pages `first` .. end of a chain would be worth if they were stored: (pages, value).

        `victim` offers at a value; what is worth less is better not stored.
        """
        width, policy = self.tree.width, self.tree.policy
        fresh = keys[first * width :]
        parts: list[tuple[int, Shadow | None]] = [(len(fresh) // width, None)]
        if policy.shadows is not None:
            parts = policy.shadows.recall(fresh, width, take=False)
        values = policy.worth(parts, request_pages, output_tokens)
        return [(pages, value) for (pages, _), value in zip(parts, values, strict=True)]

    def settle(self, keys: bytes, kept: int, output_tokens: int | None, now: int) -> None:
        """A request of this rooted chain was saved, its first `kept` pages; see the tree."""
        self.tree.settle(keys, kept, output_tokens, now)

    def forget(self, victim: Victim, now: int) -> None:
        """Remove what `victim` returned; no other change may have come between."""
        if victim.leaf is None:
            del self.loose[victim.keys]
        else:
            self.tree.cut_tail(victim.leaf, victim.span, now)

    def tail(self, leaf: Node, span: int, value: float) -> Victim:
        """The last `span` pages of a leaf as a victim of this value."""
        low, width = len(leaf) - span, self.tree.width
        slot = np.frombuffer(leaf.slots, dtype=np.uint64)[low:].copy()
        generation = np.frombuffer(leaf.generations, dtype=np.uint64)[low:].copy()
        keys = bytes(leaf.keys[low * width :])
        if leaf.gaps:
            stored = slot != NO_SLOT
            slot, generation = slot[stored], generation[stored]
            rows = np.frombuffer(keys, dtype=np.uint8).reshape(span, width)
            keys = rows[stored].tobytes()
        return Victim(keys, slot, generation, leaf.last_use, leaf, span, value)

    def end_below(self, keys: bytes) -> Victim | None:
        """The end of some leaf below the last page of a rooted chain; None: nothing is below."""
        count = len(keys) // self.tree.width
        along = self.tree.pages_along(keys)
        if count == 0 or sum(along.values()) != count:
            return None
        leaf, length = list(along.items())[-1]
        if leaf.children:
            length = 0
            while leaf.children:
                leaf = next(iter(leaf.children.values()))
        if len(leaf) == length:
            return None
        self.tree.unpark(leaf)
        return self.tail(leaf, len(leaf) - length, 0.0)

    def kept_pages(self, leaf: Node, count: int) -> int:
        """How many pages of `leaf` must stay because of a guard or a pin before its last `count`.

        Pins further to the front are not looked for.
        """
        kept = self._guarded.get(leaf, 0)
        if self.pins:
            for i in range(len(leaf) - 1, max(kept, len(leaf) - count) - 1, -1):
                if self._key(leaf.keys, i) in self.pins:
                    return i + 1
        return kept

    def oldest_loose(self) -> Victim | None:
        """Of the pages without a known chain, the one to go next; the pinned ones stay."""
        for key, page in self.loose.items():
            if key not in self.pins:
                slot = np.array([page.slot], dtype=np.uint64)
                generation = np.array([page.generation], dtype=np.uint64)
                return Victim(key, slot, generation, page.last_use, None, 1, page.last_use)
        return None

    def _add_loose(self, keys: bytes, first: int, rooted: bool, found: Locations, now: int) -> None:
        """Fill unknown entries of `found` from the loose pages; move them if the chain is known."""
        moved = Locations.absent(len(found))
        for i in np.flatnonzero(found.slot == NO_SLOT)[::-1]:
            key = self._key(keys, first + int(i))
            page = self.loose.get(key)
            if page is None:
                continue
            for target in (found, moved):
                target.slot[i] = page.slot
                target.checksum[i] = page.checksum
                target.generation[i] = page.generation
            if not rooted:
                self.loose[key] = LoosePage(page.slot, page.checksum, page.generation, now)
                self.loose.move_to_end(key)
        if rooted:
            self.insert(keys, first, True, moved, now)

    def _key(self, keys: bytes | bytearray, index: int) -> bytes:
        width = self.tree.width
        return bytes(keys[index * width : (index + 1) * width])
