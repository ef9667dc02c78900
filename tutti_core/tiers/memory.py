"""One memory tier: which pages lie in its arena, and which of them go when room is needed.

Memory work only. The tier's lock is never held over a copy, a transfer or a call of another tier.
The index, its policy and the slot map are those of the NVMe tier: a tree for each namespace over
the pages held here, eviction in runs from the leaves, a slot id of segment and index. A location's
generation counts the pages that ever came to this tier; its checksum is 0 where it is not known.

Order that keeps a page bit-exact or a miss
    - fill: the slot is reserved, then written whole, then committed together with the index entry;
      so what a look-up finds is complete. What is committed twice keeps its first slot.
    - evict: the page leaves the index, then the slot is given up, then copies that began before
      end, then the slot is handed out again.
    - an *unsaved* page, which no lower tier is known to hold, is not evicted. It is written below
      first (`Write`), and stays here, pinned, until it is published there. The write counts as a
      copy out of the slot until its transfer has ended, whatever became of the page meanwhile.
    - clear: the namespace's epoch changes; a fill that began in an older one is not committed, a
      write that began in an older one is cancelled and changes nothing any more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from tutti_core.errors import ConfigError
from tutti_core.geometry import PageFragments
from tutti_core.index.catalog import packed_rows
from tutti_core.index.pages import NamespacePages, Offers, Victim
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.policies.choice import DEFAULT, make_policy
from tutti_core.tiers.arena import Arena
from tutti_core.tiers.limits import expired, expired_loose
from tutti_core.tiers.manager import Entry
from tutti_core.tiers.shelf import (
    MOVE_PAGES_MAX,
    SMALL_SEGMENTS,
    Departure,
    Indices,
    Kind,
    Mask,
    Shelf,
    Write,
    below,
    first_of_each,
    pages_by_key,
    pages_per_move,
    path_of,
    round_up,
    segment_bytes_for,
    slots_and_generations,
    stored_along,
)
from tutti_core.tiers.space import Space

U64 = npt.NDArray[np.uint64]

EVICTION_STEP_PAGES = 64
"""Pages evicted under the lock at a time."""

BY_KEY_MIN = 1024
"""The look-up by key is made anew when it has so many more entries than twice the pages."""


class MemoryTier:
    """Placement in one arena. Threads: all methods may be called from any thread.

    Parameters
        name: of the setting that made it, "dram" or "hbm".
        leave_after_write: a page leaves this tier once it is written below (exclusive tiers).
        policy: in which order pages leave it.
    """

    def __init__(
        self,
        name: str,
        arena: Arena,
        *,
        leave_after_write: bool = False,
        policy: str = DEFAULT,
    ) -> None:
        self.name = name
        self.arena = arena
        self.segment_bytes = segment_bytes_for(arena.length_bytes)
        self.leave_after_write = leave_after_write
        self._policy = policy
        self.counters: Counter[str] = Counter()  # guarded by the lock, as all below
        self.lock = threading.Lock()
        self.on_departure: Callable[[list[Departure]], None] | None = None
        """Told, without the lock, of pages that were dropped which no lower tier holds."""
        self.tells_all = False
        """It is told of what a lower tier holds, too: a faster tier may have more below it."""
        self._departed: list[Departure] = []
        self._space = Space(self.segment_bytes)
        self._unclaimed = list(range(arena.length_bytes // self.segment_bytes))[::-1]
        self.capacity_bytes = len(self._unclaimed) * self.segment_bytes
        self._shelves: dict[bytes, Shelf] = {}
        self._unsaved: set[int] = set()  # generations, as the next two
        self._fresh: set[int] = set()
        self._moving: set[int] = set()  # of the unsaved, those in a Write or arriving
        self._arriving: dict[int, tuple[Shelf, bytes]] = {}  # by generation: namespace and key
        self._writes: set[Write] = set()
        self._generation = 0
        self._now = 0

    # ---- namespaces ----
    def check_fits(self, entry: Entry) -> None:
        """Raise ConfigError unless a page of this namespace fits into a segment."""
        if entry.slot_bytes > self.segment_bytes:
            raise ConfigError(
                f"{self.name} = {self.arena.length_bytes} bytes is too small for pages of "
                f"{entry.page_bytes} bytes",
                hint=f"use at least {SMALL_SEGMENTS * round_up(entry.slot_bytes)} bytes, or none",
            )

    def epoch(self, entry: Entry) -> int:
        """Changes with every `clear` of the namespace."""
        with self.lock:
            return self._shelf(entry).epoch

    def _shelf(self, entry: Entry) -> Shelf:
        shelf = self._shelves.get(entry.digest)
        if shelf is None:
            shelf = Shelf(entry, self._new_pages(entry))
            self._shelves[entry.digest] = shelf
        return shelf

    def _new_pages(self, entry: Entry) -> NamespacePages:
        policy = make_policy(self._policy, self.capacity_bytes // entry.slot_bytes)
        return NamespacePages(entry.key_bytes, policy)

    def settle(self, entry: Entry, keys: bytes, output_tokens: int | None) -> None:
        """A request of this rooted chain was saved; see `Policy.settled`."""
        with self.lock:
            pages = self._shelf(entry).pages
            pages.settle(keys, len(keys) // entry.key_bytes, output_tokens, self._tick())

    def _tick(self) -> int:
        self._now = max(self._now + 1, time.monotonic_ns())
        return self._now

    # ---- look-up ----
    def match(self, entry: Entry, keys: bytes, first: int) -> int:
        """Pages of a rooted chain held here without a gap from page `first` on; a use of them."""
        with self.lock:
            shelf = self._shelf(entry)
            pages = shelf.pages
            self._expire_loose(shelf)
            keys = keys[: self._shown_count(shelf, keys) * entry.key_bytes]
            if len(keys) <= first * entry.key_bytes:
                return 0
            if pages.loose:
                pages.locate(keys, first, True, self._tick())  # moves them into the tree
            return pages.match(keys, first, self._tick())

    def _shown_count(self, shelf: Shelf, keys: bytes) -> int:
        """How many leading pages of a rooted chain are not past the namespace's TTL."""
        ttl_ns = shelf.entry.limits.ttl_ns
        if ttl_ns is None:
            return len(keys) // shelf.entry.key_bytes
        return shelf.pages.fresh_count(keys, self._tick() - ttl_ns)

    def holds(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> Mask:
        """Which of the pages `first` .. end of the chain are here; makes them as if new."""
        with self.lock:
            found = self._locate_shown(self._shelf(entry), keys, first, rooted)
        return np.asarray(found.slot != NO_SLOT, dtype=np.bool_)

    def peek(self, entry: Entry, keys: bytes) -> Mask:
        """Which pages of a rooted chain are here; changes nothing."""
        with self.lock:
            return stored_along(self._shelf(entry).pages, keys)

    def begin_copy(
        self, entry: Entry, keys: bytes, first: int, rooted: bool
    ) -> tuple[Locations, int | None]:
        """Locate pages and keep their slots from being reused; None: none of them is here.

        Else `end_copy` has to follow.
        """
        with self.lock:
            found = self._locate_shown(self._shelf(entry), keys, first, rooted)
            if not (found.slot != NO_SLOT).any():
                return found, None
            return found, self._space.begin_load()

    def _locate_shown(self, shelf: Shelf, keys: bytes, first: int, rooted: bool) -> Locations:
        """`_locate`, but without what is past the namespace's TTL; that is left as it is."""
        ttl_ns, count = shelf.entry.limits.ttl_ns, len(keys) // shelf.entry.key_bytes
        if ttl_ns is None:
            return self._locate(shelf, keys, first, rooted)
        self._expire_loose(shelf)
        shown = self._shown_count(shelf, keys) if rooted else count
        if shown <= first:  # without a look at what is before it, which would renew that
            return Locations.absent(count - first)
        found = self._locate(shelf, keys[: shown * shelf.entry.key_bytes], first, rooted)
        return found.padded(count - shown) if shown < count else found

    def _locate(self, shelf: Shelf, keys: bytes, first: int, rooted: bool) -> Locations:
        found = shelf.pages.locate(keys, first, rooted, self._tick())
        if not rooted:
            self._locate_by_key(shelf, keys, first, found)
        if not shelf.repeats:
            return found
        present = found.slot != NO_SLOT
        # A key that stands twice in a chain may name a slot twice; the first eviction takes it.
        stale = present & ~self._space.holds(found.slot, found.generation)
        for i in np.flatnonzero(stale):
            shelf.pages.drop(keys, first + int(i), rooted, int(found.generation[i]))
        found.slot[stale] = NO_SLOT
        return found

    def _find(self, shelf: Shelf, keys: bytes, first: int, rooted: bool) -> Locations:
        """`_locate` for what is no use of the pages: changes nothing."""
        pages, width, at = shelf.pages, shelf.entry.key_bytes, 0
        found = Locations.absent(len(keys) // width - first)
        for node, length in pages.tree.pages_along(keys).items() if rooted else ():
            low = max(at, first)
            if low < at + length:
                inside, target = slice(low - at, length), slice(low - first, at + length - first)
                found.slot[target] = np.frombuffer(node.slots, dtype=np.uint64)[inside]
                found.checksum[target] = np.frombuffer(node.checksums, dtype=np.uint64)[inside]
                found.generation[target] = np.frombuffer(node.generations, dtype=np.uint64)[inside]
            at += length
        for i in np.flatnonzero(found.slot == NO_SLOT).tolist() if pages.loose else ():
            page = pages.loose.get(keys[(first + i) * width : (first + i + 1) * width])
            if page is not None:
                found.slot[i], found.checksum[i] = page.slot, page.checksum
                found.generation[i] = page.generation
        if not rooted:
            self._locate_by_key(shelf, keys, first, found)
        if shelf.repeats:
            found.slot[~self._space.holds(found.slot, found.generation)] = NO_SLOT
        return found

    def _locate_by_key(self, shelf: Shelf, keys: bytes, first: int, found: Locations) -> None:
        """Fill in pages of the tree whose chain the caller does not know."""
        width = shelf.entry.key_bytes
        if shelf.by_key is None or len(shelf.by_key) > 2 * shelf.pages.page_count + BY_KEY_MIN:
            shelf.by_key = dict(pages_by_key(shelf.pages))
        for i in np.flatnonzero(found.slot == NO_SLOT).tolist():
            at = (first + i) * width
            page = shelf.by_key.get(keys[at : at + width])
            if page is not None and self._space.holds_page(*page):
                found.slot[i], found.generation[i] = page

    def end_copy(self, started: int) -> None:
        """The copy touches no slot any more."""
        with self.lock:
            self._space.end_load(started)

    def addresses(self, slots: U64, slot_bytes: int) -> U64:
        """Where in memory each slot begins."""
        segment = slots >> np.uint64(32)
        inside = (slots & np.uint64(0xFFFFFFFF)) * np.uint64(slot_bytes)
        return np.uint64(self.arena.address) + segment * np.uint64(self.segment_bytes) + inside

    def fragments(self, entry: Entry, slots: U64) -> PageFragments:
        """The pages in some slots, as a transport wants them."""
        address = self.addresses(slots, entry.slot_bytes)[:, None]
        return PageFragments(address, np.array([entry.page_bytes], dtype=np.uint64), self.arena)

    # ---- filling ----
    def reserve(
        self, entry: Entry, chain: bytes, count: int, writes_max: int
    ) -> tuple[U64, list[Write]]:
        """Reserve slots for `count` pages, evicting what may go; fewer where too little may.

        Parameters
            chain: packed keys of a rooted chain whose pages stay: room is made for what follows
                them; may be b"".
            writes_max: how many runs of unsaved pages to take up for being written.
        Returns
            the slots, and the runs: the caller has them written, which makes room for later calls.
        """
        taken: list[U64] = []
        writes: list[Write] = []
        left = True
        self.expire()
        while left and count:
            with self.lock:
                slots = self._allocate(entry.slot_bytes, count)
                taken.append(slots)
                count -= len(slots)
                left = count > 0 and self._evict(entry, chain, count, writes, writes_max)
        self._report_departures()
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.uint64), writes

    def cancel(self, slots: U64) -> None:
        """Give reserved slots back unused. Nothing may be filling them any more."""
        with self.lock:
            self._space.cancel(slots)

    def commit(
        self,
        entry: Entry,
        epoch: int,
        keys: bytes,
        rooted: bool,
        index: Indices,
        slots: U64,
        checksum: U64,
        kind: Kind,
    ) -> Mask:
        """Let look-ups find pages whose slots are filled; one bool a page: whether it is here now.

        Parameters
            epoch: of the namespace when the fill was asked for.
            index: positions of the pages in the chain, rising.
        """
        if len(index) == 0:
            return np.zeros(0, dtype=np.bool_)
        first, stop = int(index[0]), int(index[-1]) + 1
        keys = keys[: stop * entry.key_bytes]
        with self.lock:
            shelf = self._shelf(entry)
            if shelf.epoch != epoch:
                self._space.cancel(slots)
                return np.zeros(len(index), dtype=np.bool_)
            known = self._locate(shelf, keys, first, rooted).slot[index - first]
            new = known == NO_SLOT
            once = first_of_each(packed_rows(keys, entry.key_bytes)[index])
            shelf.repeats |= not rooted or not once.all()
            new &= once
            self._space.cancel(slots[~new])
            generations = np.arange(self._generation + 1, self._generation + 1 + int(new.sum()))
            self._generation += len(generations)
            where = Locations.absent(stop - first)
            at = index[new] - first
            where.slot[at] = slots[new]
            where.checksum[at] = checksum[new]
            where.generation[at] = generations
            self._space.commit(slots[new], generations.astype(np.uint64))
            shelf.pages.insert(keys, first, rooted, where, self._tick())
            if shelf.by_key is not None:
                rows = packed_rows(keys, entry.key_bytes)[index[new]]
                located = zip(slots[new].tolist(), generations.tolist(), strict=True)
                shelf.by_key.update(zip((r.tobytes() for r in rows), located, strict=True))
            if kind is Kind.UNSAVED:
                self._unsaved.update(generations.tolist())
            elif kind is Kind.FRESH:
                self._fresh.update(generations.tolist())
            elif kind is Kind.ARRIVING:
                self._begin_arrival(shelf, keys, index[new], generations.tolist())
        return np.ones(len(index), dtype=np.bool_)

    def _begin_arrival(
        self, shelf: Shelf, keys: bytes, index: Indices, generations: list[int]
    ) -> None:
        self._unsaved.update(generations)
        self._moving.update(generations)
        rows = packed_rows(keys, shelf.entry.key_bytes)[index]
        shelf.pages.pin(rows.tobytes())
        for row, generation in zip(rows, generations, strict=True):
            self._arriving[generation] = (shelf, row.tobytes())

    def end_arrival(self, entry: Entry, keys: bytes, rooted: bool, index: Indices) -> None:
        """The lower tier has let go of the pages at `index` of a chain: they are unsaved now."""
        with self.lock:
            here, found = self._held(self._shelf(entry), keys, rooted, index)
            self._forget_arrivals(set(found.generation[here].tolist()))

    def _held(
        self, shelf: Shelf, keys: bytes, rooted: bool, index: Indices
    ) -> tuple[Indices, Locations]:
        """Those of the pages at `index` of a chain that are here, and where its pages are."""
        stop = int(index[-1]) + 1
        found = self._find(shelf, keys[: stop * shelf.entry.key_bytes], 0, rooted)
        return index[found.slot[index] != NO_SLOT], found

    def _forget_arrivals(self, generations: set[int]) -> None:
        for generation in generations & self._arriving.keys():
            shelf, key = self._arriving.pop(generation)
            shelf.pages.unpin(key)
            self._moving.discard(generation)

    def _allocate(self, slot_bytes: int, count: int) -> U64:
        taken = [self._space.allocate(count, slot_bytes)]
        while (short := count - sum(map(len, taken))) > 0:
            empty = self._space.empty_segments(other_than=slot_bytes)
            if self._unclaimed:
                number = self._unclaimed.pop()
            elif empty:
                number = empty[0]
                self._space.remove(number)
            else:
                break
            self._space.add(number, 0, slot_bytes)
            taken.append(self._space.allocate(short, slot_bytes))
        return np.concatenate(taken)

    # ---- eviction ----
    def expire(self) -> None:
        """Drop what is past its namespace's TTL, also what no lower tier holds."""
        with self.lock:
            limited = [s for s in self._shelves.values() if s.entry.limits.ttl_ns is not None]
        for shelf in limited:
            left = True
            while left:
                with self.lock:
                    left = self._expire(shelf)
        self._report_departures()

    def _expire(self, shelf: Shelf) -> bool:
        """Drop some of what is past the TTL; False if that was all. Pages on their way stay."""
        ttl_ns = shelf.entry.limits.ttl_ns
        looked_at = 0
        if ttl_ns is not None:
            for victim in expired(shelf.pages, self._tick() - ttl_ns):
                self._drop_expired(shelf, victim)
                looked_at += victim.span
                if looked_at >= EVICTION_STEP_PAGES:
                    return True
        return False

    def _expire_loose(self, shelf: Shelf) -> None:
        """Drop pages past the TTL whose chain is not known: a look-up would make them new."""
        ttl_ns = shelf.entry.limits.ttl_ns
        if ttl_ns is not None and shelf.pages.loose:
            used_since = self._tick() - ttl_ns
            while (victim := expired_loose(shelf.pages, used_since)) is not None:
                self._drop_expired(shelf, victim)

    def _drop_expired(self, shelf: Shelf, victim: Victim) -> None:
        self._drop_victim(shelf, victim)
        self.counters["expired"] += len(victim.slot)

    def used_at(self, entry: Entry, keys: bytes, rooted: bool) -> int | None:
        """When the last page of a chain was used, if it is here; changes nothing."""
        width = entry.key_bytes
        with self.lock:
            pages = self._shelf(entry).pages
            if not rooted:
                page = pages.loose.get(keys[-width:])
                return page.last_use if page is not None else None
            nodes = pages.tree.nodes_along(keys)
            whole = sum(pages.tree.pages_along(keys).values()) * width == len(keys)
            return nodes[-1][0].last_use if nodes and whole else None

    def _evict(
        self, entry: Entry, chain: bytes, count: int, writes: list[Write], writes_max: int
    ) -> bool:
        """Evict some pages in the policy's order; False when no more can come of it now."""
        if self._space.waiting_count(entry.slot_bytes) >= count:
            return False  # enough was evicted; copies are still reading it
        guarded = self._shelf(entry).pages
        guarded.guard(chain)
        offers = Offers()
        try:
            evicted = looked_at = 0
            while evicted < count and looked_at < EVICTION_STEP_PAGES:
                most = min(count - evicted, EVICTION_STEP_PAGES - looked_at)
                choice = self._choose_victim(most, offers)
                if choice is None:
                    break
                shelf, victim = choice
                looked_at += victim.span
                dropped = self._drop_saved(shelf, victim)
                if dropped == 0:
                    if len(writes) >= writes_max:
                        break
                    writes.append(self._write_victim(shelf, victim))
                evicted += dropped
        finally:
            guarded.unguard()
        return evicted > 0

    def _choose_victim(self, pages_max: int, offers: Offers) -> tuple[Shelf, Victim] | None:
        """What goes next."""
        best: tuple[Shelf, Victim] | None = None
        now = self._tick()
        for digest, shelf in self._shelves.items():
            victim = offers.of(digest, shelf.pages, pages_max, now)
            if victim is None:
                continue
            order = (victim.value, victim.last_use)
            if best is None or order < (best[1].value, best[1].last_use):
                best = (shelf, victim)
        if best is not None:
            offers.take(best[0].entry.digest)
        return best

    def _drop_saved(self, shelf: Shelf, victim: Victim) -> int:
        """Drop the end of a victim that needs no write; returns how many pages went."""
        unsaved = np.flatnonzero(self._are(self._unsaved, victim.generation))
        if len(unsaved):
            end = len(victim.generation) - 1 - int(unsaved[-1])
            if end == 0:
                return 0
            gaps = victim.leaf is not None and victim.leaf.gaps
            again = shelf.pages.victim(1 if gaps else end, self._tick())
            if again is None or again.leaf is not victim.leaf:
                return 0
            victim = again
        self._drop_victim(shelf, victim)
        self.counters["evicted"] += len(victim.slot)
        return len(victim.slot)

    def _drop_victim(self, shelf: Shelf, victim: Victim) -> None:
        alone = self.tells_all or bool(self._are(self._unsaved, victim.generation).any())
        if self.on_departure is not None and victim.leaf is not None and alone:
            keys, slots, _ = path_of(victim.leaf)
            self._departed.append((shelf.entry, keys, len(slots) - victim.span))
        shelf.pages.forget(victim, self._tick())
        self._unsaved.difference_update(victim.generation.tolist())
        self._fresh.difference_update(victim.generation.tolist())
        self._give_up(victim.slot, victim.generation)

    def _give_up(self, slots: U64, generations: U64) -> None:
        self._space.give_up(slots[self._space.retire_held(slots, generations)])

    def _are(self, generations: set[int], of: U64) -> Mask:
        if not generations:
            return np.zeros(len(of), dtype=np.bool_)
        return np.fromiter((g in generations for g in of.tolist()), dtype=np.bool_, count=len(of))

    # ---- writing down ----
    def next_write(self) -> Write | bool:
        """Make room in the background, one step in the policy's order.

        Returns
            a run that has to be written first; else whether something was evicted.
        """
        self.expire()
        with self.lock:
            choice = self._choose_victim(MOVE_PAGES_MAX, Offers())
            if choice is None:
                return False
            step = self._drop_saved(*choice) > 0 or self._write_victim(*choice)
        self._report_departures()
        return step

    def _report_departures(self) -> None:
        if self.on_departure is not None and self._departed:
            with self.lock:
                departed, self._departed = self._departed, []
            self.on_departure(departed)

    def begin_write(self, entry: Entry, keys: bytes, rooted: bool, index: Indices) -> Write | None:
        """Take up those of the pages at `index` that are unsaved; None if there are none."""
        with self.lock:
            shelf = self._shelf(entry)
            chosen, found = self._held(shelf, keys, rooted, index)
            chosen = chosen[self._waits(found.generation[chosen])]
            chosen = chosen[: pages_per_move(entry.slot_bytes)]
            if len(chosen) == 0:
                return None
            return self._begin_write(
                shelf, keys, rooted, chosen, found.slot[chosen], found.generation[chosen]
            )

    def end_write(self, write: Write, stored: Mask) -> None:
        """A write was answered; `stored` pages are published below. `end_copy` comes apart."""
        with self.lock:
            self._writes.discard(write)
            if write.shelf.epoch != write.epoch:
                return
            self._unpin_moving(write)
            self.counters["demoted"] += int(np.count_nonzero(stored))
            self._saved(
                write.shelf,
                write.keys,
                write.rooted,
                write.index[stored],
                write.slots[stored],
                write.generations[stored],
            )

    def note_saved(self, entry: Entry, keys: bytes, rooted: bool, index: Indices) -> None:
        """The devices hold the pages at `index` of a chain, which need not be here, by other ways.

        Those that are being written are left to that.
        """
        with self.lock:
            if not self._unsaved and not self._fresh:
                return
            shelf = self._shelf(entry)
            here, found = self._held(shelf, keys, rooted, index)
            alone = self._waits(found.generation[here])
            alone |= self._are(self._fresh, found.generation[here])
            here = here[alone]
            self._saved(shelf, keys, rooted, here, found.slot[here], found.generation[here])

    def _saved(
        self,
        shelf: Shelf,
        keys: bytes,
        rooted: bool,
        index: Indices,
        slots: U64,
        generations: U64,
    ) -> None:
        """Pages are held below; those of an exclusive tier leave it."""
        self._unsaved.difference_update(generations.tolist())
        self._fresh.difference_update(generations.tolist())
        if self.leave_after_write:
            self._remove(shelf, keys, rooted, index, slots, generations)

    def drop(self, entry: Entry, keys: bytes, rooted: bool, index: Indices) -> None:
        """Drop the pages at `index` of a chain that a lower tier holds."""
        with self.lock:
            shelf = self._shelf(entry)
            here, found = self._held(shelf, keys, rooted, index)
            arriving = {g for g in found.generation[here].tolist() if g in self._arriving}
            self._forget_arrivals(arriving)
            self._unsaved -= arriving
            here = here[~self._are(self._unsaved | self._fresh, found.generation[here])]
            self._remove(shelf, keys, rooted, here, found.slot[here], found.generation[here])

    def _remove(
        self,
        shelf: Shelf,
        keys: bytes,
        rooted: bool,
        index: Indices,
        slots: U64,
        generations: U64,
    ) -> None:
        moved = {  # from among the loose pages into the tree, since the write began
            generation
            for i, generation in zip(index[::-1].tolist(), generations[::-1].tolist(), strict=True)
            if not shelf.pages.drop(keys, i, rooted, generation)
        }
        if moved:
            shelf.pages.drop_generations(moved)
        self._give_up(slots, generations)

    def unsaved_runs(self) -> list[tuple[Entry, bytes, bool, Indices]]:
        """All unsaved pages as (namespace, chain, rooted, positions), ancestors first. O(pages)."""
        self.expire()
        with self.lock:
            found = []
            for shelf in self._shelves.values():
                for keys, rooted, index in self._unsaved_of(shelf):
                    found.append((shelf.entry, keys, rooted, index))
            return found

    def _unsaved_of(self, shelf: Shelf) -> Iterator[tuple[bytes, bool, Indices]]:
        for above, node in shelf.pages.tree.chains():
            index = np.flatnonzero(self._waits(np.array(node.generations, dtype=np.uint64)))
            if len(index):
                yield above + bytes(node.keys), True, index + len(above) // shelf.pages.tree.width
        for key, page in shelf.pages.loose.items():
            if page.generation in self._unsaved and page.generation not in self._moving:
                yield key, False, np.zeros(1, dtype=np.intp)

    def _waits(self, generations: U64) -> Mask:
        return self._are(self._unsaved, generations) & ~self._are(self._moving, generations)

    def _write_victim(self, shelf: Shelf, victim: Victim) -> Write:
        """Take up a run that is to leave; unless exclusive, its unsaved ancestors before it.

        So that a crash leaves no page below without its ancestors. An exclusive tier keeps the
        ancestors, which other runs use.
        """
        if victim.leaf is None:
            index = np.zeros(1, dtype=np.intp)
            return self._begin_write(
                shelf, victim.keys, False, index, victim.slot, victim.generation
            )
        keys, slots, generations = path_of(victim.leaf)
        chosen = np.flatnonzero(self._waits(generations))
        most = pages_per_move(shelf.entry.slot_bytes)
        if self.leave_after_write:
            chosen = chosen[chosen >= len(slots) - victim.span][-most:]
        chosen = chosen[:most]
        return self._begin_write(shelf, keys, True, chosen, slots[chosen], generations[chosen])

    def _begin_write(
        self,
        shelf: Shelf,
        keys: bytes,
        rooted: bool,
        index: Indices,
        slots: U64,
        generations: U64,
    ) -> Write:
        assert len(index) > 0
        keys = keys[: (int(index[-1]) + 1) * shelf.entry.key_bytes]
        started = self._space.begin_load()
        write = Write(shelf, shelf.epoch, keys, rooted, index, slots, generations, started)
        self._moving.update(generations.tolist())
        self._writes.add(write)
        shelf.pages.pin(write.page_keys())
        return write

    def _unpin_moving(self, write: Write) -> None:
        write.shelf.pages.unpin(write.page_keys())
        self._moving.difference_update(write.generations.tolist())

    # ---- what other tiers say ----
    def must_save(self, entry: Entry, keys: bytes, index: Indices) -> Mask:
        """The pages at `index` of a rooted chain, if here, must not be dropped without a write.

        For ancestors of a page that a lower tier gets, where that tier has not got them.

        Returns
            one bool a page: whether it is here.
        """
        with self.lock:
            found = self._find(self._shelf(entry), keys, 0, True)
            here: Mask = found.slot[index] != NO_SLOT
            generations = found.generation[index][here].tolist()
            self._unsaved.update(generations)
            self._fresh.difference_update(generations)
            return here

    def second_use(self, entry: Entry, keys: bytes, rooted: bool) -> Indices:
        """Of the pages of a chain, those that were fresh; from now on they must be saved."""
        with self.lock:
            if not self._fresh:
                return np.empty(0, dtype=np.intp)
            found = self._locate_shown(self._shelf(entry), keys, 0, rooted)
            present = np.flatnonzero(found.slot != NO_SLOT)
            index = present[self._are(self._fresh, found.generation[present])]
            used = found.generation[index].tolist()
            self._fresh.difference_update(used)
            self._unsaved.update(used)
            return index

    def drop_below(self, entry: Entry, keys: bytes) -> int:
        """Drop all pages below the last one of a rooted chain: it is in no tier any more."""
        with self.lock:
            shelf = self._shelf(entry)
            found = list(below(shelf.pages, keys))
            if not found:
                return 0
            slots = np.concatenate([slot for slot, _ in found])
            generations = np.concatenate([generation for _, generation in found])
            stored = slots != NO_SLOT
            gone = set(generations[stored].tolist())
            for write in [w for w in self._writes if not gone.isdisjoint(w.generations.tolist())]:
                write.ticket.cancel()
            self._forget_arrivals(gone)
            shelf.pages.tree.drop_generations(gone)
            self._unsaved -= gone
            self._fresh -= gone
            self._give_up(slots[stored], generations[stored])
            self.counters["evicted"] += len(gone)
            return len(gone)

    # ---- pins, clear, figures ----
    def pin(self, entry: Entry, keys: bytes) -> None:
        """Count one more pin on each page of `keys`, here or not."""
        with self.lock:
            self._shelf(entry).pages.pin(keys)

    def unpin(self, entry: Entry, keys: bytes) -> None:
        """Take one pin off each page of `keys`."""
        with self.lock:
            self._shelf(entry).pages.unpin(keys)

    def chains(self, entry: Entry) -> list[tuple[bytes, Mask]]:
        """The chains held here and which of their last pages are stored. O(pages)."""
        with self.lock:
            pages = self._shelf(entry).pages
            found = []
            for above, node in pages.tree.chains():
                stored = np.array(node.slots, dtype=np.uint64) != NO_SLOT
                found.append((above + bytes(node.keys), stored))
            return found + [(key, np.ones(1, dtype=np.bool_)) for key in pages.loose]

    def clear(self, entry: Entry) -> None:
        """Forget every page of a namespace, also those on their way in or down."""
        with self.lock:
            shelf = self._shelf(entry)
            for write in [w for w in self._writes if w.shelf is shelf]:
                write.ticket.cancel()
                if write.epoch == shelf.epoch:
                    self._unpin_moving(write)
            old = shelf.pages
            held = np.array(list(slots_and_generations(old)), dtype=np.uint64).reshape(-1, 2)
            self._give_up(held[:, 0], held[:, 1])
            gone = set(held[:, 1].tolist())
            self._forget_arrivals(gone)
            self._unsaved -= gone
            self._fresh -= gone
            shelf.epoch += 1
            shelf.by_key = None
            shelf.pages = self._new_pages(entry)
            shelf.pages.pins = old.pins

    @property
    def page_count(self) -> int:
        """Pages held here."""
        with self.lock:
            return sum(shelf.pages.page_count for shelf in self._shelves.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        with self.lock:
            return self._space.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that could be handed out now, to slots of whatever size."""
        with self.lock:
            claimed = len(self._space.segments) * self.segment_bytes
            return self.capacity_bytes - claimed + self._free_in_segments()

    def _free_in_segments(self) -> int:
        self._space.collect()
        return sum(s.free_count * s.slot_bytes for s in self._space.segments.values())

    @property
    def unsaved_count(self) -> int:
        """Pages that no lower tier is known to hold and that must get there."""
        return len(self._unsaved)

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold. O(pages); for tests."""
        with self.lock:
            self._space.check()
            known: dict[int, int] = {}
            for shelf in self._shelves.values():
                shelf.pages.tree.check()
                for slot, generation in slots_and_generations(shelf.pages):
                    assert slot not in known, "one slot, two pages"
                    known[slot] = generation
            held = {
                piece.segment << 32 | i: int(generation)
                for piece in self._space.segments.values()
                for i, generation in enumerate(piece.generation.tolist())
                if generation not in (0, (1 << 64) - 1)
            }
            assert held == known, "the index and the slot map disagree"
            generations = set(known.values())
            assert self._unsaved <= generations and self._fresh <= generations
            assert not self._unsaved & self._fresh
            moving = {g for w in self._writes for g in w.generations.tolist()}
            assert self._moving <= moving | self._arriving.keys()
