"""The tiers of a store as one: look-ups over all of them, copies in and out of the memory tiers.

Fastest first: memory tiers, then the devices (`Manager`). A page is in the store when any tier has
it. No lock of one tier is held while another is asked, so a page may move meanwhile:

    - down: it is published below before it leaves above, and is asked for from above; found once.
    - up, copied (inclusive): it stays below; found.
    - up, moved (exclusive): it is offered above before it leaves below. A look-up that came too
      early above and too late below sees that something has moved, and asks both once more while
      nothing does (handover.py).

What depends on a page goes with it. A page that leaves the devices and is in no memory tier takes
along what memory tiers hold below it, and one that leaves memory, as it is past its TTL, what the
devices hold (`after_eviction`). A page that the devices lack, but have, or get, something below of,
must not be dropped from memory without a write (`before_write`). Leaves go first in each tier, so
nothing else can lose its ancestors. Along a chain no page was used later than those before it, also
where these are in another tier (`_renew`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tutti_core.geometry import PageFragments
from tutti_core.index.pages import Victim
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.keys import PageKeys
from tutti_core.tiers.copier import Copier, Copy
from tutti_core.tiers.handover import Handover
from tutti_core.tiers.manager import Entry, Manager
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.mover import Mover
from tutti_core.tiers.saver import DropJob, SaveJob, Saver
from tutti_core.tiers.shelf import Departure, Kind, path_of, stored_along

U64 = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

WritePolicy = Literal["write_through", "write_back", "write_selective"]

PART_BYTES = 64 << 20
PARTS_MAX = 16
"""A large copy is made in about equal parts of at least so many bytes, at most so many of them."""

DIRECT_COPY_BYTES = 1 << 20
"""A load of no more bytes is copied by its caller at once: handing it over would take longer."""


class EvictionLog(Manager):
    """A manager that notes which runs of pages it evicts, by chain, for the tiers above."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.departed: list[Departure] = []

    def _retire(self, owner: Entry, victim: Victim) -> list[tuple[bytes, int, int]]:
        if victim.leaf is not None:
            keys, slots, _ = path_of(victim.leaf)
            self.departed.append((owner, keys, len(slots) - victim.span))
        return super()._retire(owner, victim)

    def note_departed(self, departures: list[Departure]) -> bool:
        """Add what has left a memory tier; whether there was nothing else."""
        with self.lock:
            first = not self.departed
            self.departed += departures
        return first

    def take_departed(self) -> list[Departure]:
        """What was noted since the last call."""
        with self.lock:
            departed, self.departed = self.departed, []
        return departed


@dataclass(slots=True)
class Hit:
    """Pages of a load that one memory tier holds: positions in the load, slots, start of copy."""

    tier: MemoryTier
    pages: Indices
    slots: U64
    started: int

    def end(self) -> None:
        """Nothing is copied out of the slots any more."""
        self.tier.end_copy(self.started)


@dataclass(slots=True)
class _Kept:
    """Slots of a tier that hold copies of the first pages of a job, not offered yet."""

    epoch: int
    slots: U64


class TierStack:
    """The memory tiers over one manager.

    Parameters
        tiers: fastest first; the last one takes saves if it is named "dram".
    Threads    look-ups and loads any; the methods that `UpperTiers` names, the saver's.
    """

    one_tree = False
    """Each tier has its own."""

    def __init__(
        self,
        manager: EvictionLog,
        tiers: Sequence[MemoryTier],
        copier: Copier,
        write_policy: WritePolicy,
    ) -> None:
        self.tiers = tuple(tiers)
        self._manager = manager
        self._copier = copier
        self._write_policy = write_policy
        self._dram = tiers[-1] if tiers[-1].name == "dram" else None
        for tier in tiers:
            tier.tells_all = tier is not tiers[0]
            tier.on_departure = self._left_memory
        self.handover = Handover()
        self._exclusive = any(tier.leave_after_write for tier in tiers)
        self.saver: Saver
        self.mover: Mover

    def connect(self, saver: Saver, mover: Mover) -> None:
        """Name the threads that move pages; once, before any call."""
        self.saver = saver
        self.mover = mover
        self._manager.on_clear = self._clear_above

    # ---- look-up ----
    def match(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> int:
        """Return how many pages from page `first` on are in some tier without a gap."""
        self._manager.notice_clears()
        if rooted:
            hit = self._match_rooted(entry, keys, first)
        else:
            gaps = np.flatnonzero(~self.present(entry, keys, first, False))
            hit = int(gaps[0]) if len(gaps) else len(keys) // entry.key_bytes - first
        if hit:
            keys = keys[: (first + hit) * entry.key_bytes]
            self._note_use(entry, keys, rooted)
            self._renew(entry, keys, rooted)
        return hit

    def _match_rooted(self, entry: Entry, keys: bytes, first: int) -> int:
        count, at = len(keys) // entry.key_bytes, first
        while at < count:
            start, moves = at, self.handover.moves
            at = self._match_stretch(entry, keys, start)
            if at == start and self._exclusive and moves != self.handover.moves:
                with self.handover.still():
                    at = self._match_stretch(entry, keys, start)
            if at == start:
                break
        return at - first

    def _match_stretch(self, entry: Entry, keys: bytes, start: int) -> int:
        """The end of the pages from `start` on that memory holds, and then the devices."""
        at = self._match_memory(entry, keys, start)
        if at > start:  # the devices learn of the use too
            self._use_below(entry, keys[: at * entry.key_bytes], start)
        if at < len(keys) // entry.key_bytes:
            at += self._manager.match(entry, keys, at, True)
        return at

    def _match_memory(self, entry: Entry, keys: bytes, at: int) -> int:
        while True:
            start = at
            for tier in self.tiers:
                at += tier.match(entry, keys, at)
            if at == start or len(self.tiers) == 1:
                return at

    def present(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> Mask:
        """Which of the pages `first` .. end of the chain are in some tier."""
        self._manager.notice_clears()
        moves = self.handover.moves
        held = self._present_now(entry, keys, first, rooted)
        if self._exclusive and not held.all() and moves != self.handover.moves:
            with self.handover.still():
                held |= self._present_now(entry, keys, first, rooted)
        return held

    def _present_now(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> Mask:
        held = self._in_memory(entry, keys, first, rooted)
        if held.all():
            self._renew_below(entry, keys, first, rooted)
            return held
        low, below = self.locate_below(entry, keys, first, rooted, ~held)
        held[low - first : low - first + len(below)] |= below.slot != NO_SLOT
        return held

    def _in_memory(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> Mask:
        held = self.tiers[0].holds(entry, keys, first, rooted)
        for tier in self.tiers[1:]:
            held |= tier.holds(entry, keys, first, rooted)
        return held

    def locate_below(
        self, entry: Entry, keys: bytes, first: int, rooted: bool, wanted: Mask
    ) -> tuple[int, Locations]:
        """Locations on the devices of the stretch that holds the `wanted` pages, and its start."""
        index = np.flatnonzero(wanted)
        low, high = first + int(index[0]), first + int(index[-1]) + 1
        part = keys[: high * entry.key_bytes]
        return low, self._manager.locate(entry, part, low, rooted)

    def _use_below(self, entry: Entry, keys: bytes, first: int) -> None:
        with self._manager.lock:
            entry.pages.match(keys, first, time.monotonic_ns())

    def _renew_below(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> None:
        with self._manager.lock:
            entry.pages.locate(keys, first, rooted, time.monotonic_ns())

    def _renew(self, entry: Entry, keys: bytes, rooted: bool) -> None:
        """Where there is a TTL, no page of a chain that was used is older than its end.

        Loads and saves look each page up, with those before it; a match begins somewhere.
        """
        if rooted and entry.limits.ttl_ns is not None:
            for tier in self.tiers:
                tier.holds(entry, keys, 0, True)
            self._manager.renew(entry, keys)

    def _note_use(self, entry: Entry, keys: bytes, rooted: bool) -> None:
        """Under write_selective, pages that are used again are written to the devices."""
        if self._write_policy != "write_selective" or self._dram is None:
            return
        index = self._dram.second_use(entry, keys, rooted)
        if len(index) and rooted:  # else when it leaves: with its chain, if that is known
            self.mover.write_soon(self._dram, entry, keys, index)

    # ---- loads ----
    def take(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> tuple[list[Hit], Mask]:
        """Find what memory tiers hold of a load and keep it there until it is copied.

        Returns
            the hits, each of which has to be given to `copy_out`, and which pages are still wanted.
        """
        self._manager.notice_clears()
        wanted = np.ones(len(keys) // entry.key_bytes - first, dtype=np.bool_)
        hits: list[Hit] = []
        for tier in self.tiers:
            self.take_from(tier, entry, keys, first, rooted, wanted, hits)
        if not wanted.any():
            self.mover.touch_soon(entry, keys, first, rooted)
        if hits:
            self._note_use(entry, keys, rooted)
        return hits, wanted

    def find_wanted(
        self, entry: Entry, keys: bytes, first: int, rooted: bool, wanted: Mask, hits: list[Hit]
    ) -> tuple[Indices, Locations]:
        """What the devices hold of what `take` left wanted, of which it takes off what is found.

        Where something is missing that may have moved, both are asked again. The caller has begun
        a load, so that what is found stays there.

        Returns
            positions in the load, and where these pages are.
        """
        index, where = self._take_below(entry, keys, first, rooted, wanted)
        if not self._exclusive or not wanted.any():
            return index, where
        with self.handover.still():
            self.take_from(self.tiers[-1], entry, keys, first, rooted, wanted, hits)
            more, also = self._take_below(entry, keys, first, rooted, wanted)
        return np.concatenate((index, more)), where.joined(also)

    def _take_below(
        self, entry: Entry, keys: bytes, first: int, rooted: bool, wanted: Mask
    ) -> tuple[Indices, Locations]:
        if not wanted.any():
            return np.empty(0, dtype=np.intp), Locations.absent(0)
        low, where = self.locate_below(entry, keys, first, rooted, wanted)
        at = low - first
        index = np.flatnonzero(wanted[at : at + len(where)] & (where.slot != NO_SLOT))
        wanted[index + at] = False
        return index + at, where.select(index)

    def take_from(
        self,
        tier: MemoryTier,
        entry: Entry,
        keys: bytes,
        first: int,
        rooted: bool,
        wanted: Mask,
        hits: list[Hit],
    ) -> None:
        """Add a tier's part to `hits` and take it off `wanted`."""
        where, started = tier.begin_copy(entry, keys, first, rooted)
        if started is None:
            return
        here = np.flatnonzero(wanted & (where.slot != NO_SLOT))
        if len(here) == 0:
            tier.end_copy(started)
            return
        hits.append(Hit(tier, here, where.slot[here], started))
        wanted[here] = False

    def copy_out(self, entry: Entry, hit: Hit, memory: PageFragments) -> list[tuple[Copy, Indices]]:
        """Start copying a hit into the caller's memory; small ones are done on return.

        Returns
            the parts, with their positions in the load: whoever waits for them takes some of the
            copying over, so that two threads are at it.
        """
        count = len(hit.pages)
        length = count * entry.page_bytes
        if length <= DIRECT_COPY_BYTES:
            copy = Copy(partial(_copy_out, entry, hit, memory, 0, count, hit.end))
            copy.run()
            return [(copy, hit.pages)]
        parts = min(PARTS_MAX, max(1, length // PART_BYTES), count)
        end = _LastOf(parts, hit.end).end if parts > 1 else hit.end
        cuts = [count * part // parts for part in range(parts + 1)]
        started = []
        for low, high in pairwise(cuts):
            copy = Copy(partial(_copy_out, entry, hit, memory, low, high, end))
            if not self._copier.enqueue(copy, length // parts):
                copy.run()
            started.append((copy, hit.pages[low:high]))
        return started

    def give_back(self, hits: list[Hit]) -> None:
        """The load of these hits does not take place."""
        for hit in hits:
            hit.end()

    def loaded(
        self,
        entry: Entry,
        keys: PageKeys,
        index: Indices,
        source: MemoryTier | None,
    ) -> None:
        """Pages were loaded from a tier (None: the devices): copy them into the next faster one."""
        at = len(self.tiers) if source is None else self.tiers.index(source)
        if at == 0 or len(index) == 0:
            return
        # Without its chain a page could not be dropped together with an ancestor.
        if keys.rooted:
            self.mover.promote(self.tiers[at - 1], source, entry, keys, index)

    def first_gap(self, entry: Entry, keys: bytes) -> int | None:
        """The first page of a rooted chain that is in no tier; None: all are, or it is not known.

        The last page is not asked for.
        """
        if not self._manager.restored.is_set():
            return None
        last = np.array([len(keys) // entry.key_bytes - 1], dtype=np.intp)
        return self._first_gap(entry, keys, 0, last)

    # ---- saves ----
    def known_from(self, entry: Entry, keys: bytes, first: int) -> int:
        """Where the stretch of pages that are in the store and end at page `first` begins."""
        if first == 0:
            return 0
        held = self._held(entry, keys[: first * entry.key_bytes], self.tiers)
        gaps = np.flatnonzero(~held)
        return int(gaps[-1]) + 1 if len(gaps) else 0

    @property
    def takes_saves(self) -> bool:
        """Whether saves end in memory, and are written later or never."""
        return self._dram is not None and self._write_policy != "write_through"

    def save(self, job: SaveJob) -> bool:
        """Queue a save that ends in memory; False when everything is full."""
        assert self._dram is not None
        epoch = self._dram.epoch(job.entry)
        copy = Copy(partial(self._save, job, epoch))
        return self._copier.enqueue(copy, job.length_bytes) or self.saver.enqueue(job)

    def _save(self, job: SaveJob, epoch: int) -> None:
        """Copy what there is room for; the rest of the job is written through."""
        tier = self._dram
        assert tier is not None
        count = 0
        try:
            if not job.ticket.cancelled:
                slots = self._fill(tier, job, len(job.index))
                if job.ticket.cancelled:  # the memory may have changed meanwhile
                    tier.cancel(slots)
                    return
                count = len(slots)
                kind = Kind.FRESH if self._write_policy == "write_selective" else Kind.UNSAVED
                stored = self._commit(tier, job, epoch, np.arange(count), slots, kind)
                self._note_published(tier, job, count)
                if kind is Kind.FRESH and job.rooted:
                    self._secure_fresh(tier, job)
                stored[self._keep_sound(job, job.index[:count]) :] = False
                job.ticket.settle(job.result[:count][stored], True)
                self._manager.count("saved_pages", int(np.count_nonzero(stored)))
                self.mover.nudge()
        finally:
            self._end_save(job, count)

    def _end_save(self, job: SaveJob, count: int) -> None:
        """Pass on what did not find room; else the ticket ends, also where that raises."""
        passed_on = False
        try:
            if job.ticket.cancelled or count == len(job.index):
                if job.rooted and not job.ticket.cancelled:
                    self.settle(job.entry, job.keys, job.output_tokens)
            elif not (passed_on := self.saver.enqueue(job.rest(count))):
                self._manager.count("pages_refused_busy", len(job.index) - count)
        finally:
            if not passed_on:
                job.ticket.finish()

    def _keep_sound(self, job: SaveJob, index: Indices) -> int:
        """Drop pages that were saved in memory and whose ancestors went meanwhile; how many stay.

        Devices that evict an ancestor later look here (`after_eviction`).
        """
        if not job.rooted or len(index) == 0:
            return len(index)
        self._secure(job, self.tiers[:-1])
        sound = self._sound(job, index)
        if sound < len(index):
            gap = self._first_gap(job.entry, job.keys, job.known_from or 0, job.index)
            if gap is not None:
                self._drop_below(job.entry, job.keys[: (gap + 1) * job.entry.key_bytes])
        return sound

    def _secure_fresh(self, tier: MemoryTier, job: SaveJob) -> None:
        """Pages that the devices lack, but have something below of, are not dropped unwritten.

        So it is where what a page depends on has left memory and comes again.
        """
        entry = job.entry
        with self._manager.lock:
            held = stored_along(entry.pages, job.keys)
            known = sum(entry.pages.tree.pages_along(job.keys).values())
        lacking = np.flatnonzero(~held[:known])
        if len(lacking):
            tier.must_save(entry, job.keys, lacking)

    def _note_published(self, tier: MemoryTier, job: SaveJob, count: int) -> None:
        """Another save may have brought the same pages to the devices meanwhile."""
        if count == 0:
            return
        entry, index = job.entry, job.index[:count]
        keys = job.keys[: (int(index[-1]) + 1) * entry.key_bytes]
        if job.rooted:
            self._note_held_below(entry, keys, index, (tier,))
            return
        with self.handover.move():
            held = self._manager.locate(entry, keys, 0, False).slot[index] != NO_SLOT
            if held.any():
                tier.note_saved(entry, keys, False, index[held])

    def _note_held_below(
        self, entry: Entry, keys: bytes, index: Indices, tiers: Sequence[MemoryTier]
    ) -> None:
        """Of the pages at `index` of a rooted chain, tell `tiers` which the devices hold."""
        with self.handover.move(), self._manager.lock:
            held = index[stored_along(entry.pages, keys)[index]]
            if len(held) == 0:
                return
            if entry.limits.ttl_ns is not None:  # they may be past it
                entry.pages.locate(keys, 0, True, time.monotonic_ns())
            for tier in tiers:
                tier.note_saved(entry, keys, True, held)

    def _fill(self, tier: MemoryTier, job: SaveJob, count: int) -> U64:
        """Reserve slots for the first pages of a job and copy these; returns the slots."""
        chain = job.keys if job.rooted else b""
        slots, writes = tier.reserve(job.entry, chain, count, self.mover.room())
        for write in writes:
            self.mover.write(tier, write)
        if len(slots):
            address = tier.addresses(slots, job.entry.slot_bytes)
            memory = job.fragments
            inside, outside, length = pieces(
                address, memory.address[: len(slots)], memory.length_bytes
            )
            tier.arena.copy(inside, outside, length)
        return slots

    def _commit(
        self, tier: MemoryTier, job: SaveJob, epoch: int, pages: Indices, slots: U64, kind: Kind
    ) -> Mask:
        none = np.zeros(len(slots), dtype=np.uint64)
        index = job.index[pages]
        return tier.commit(job.entry, epoch, job.keys, job.rooted, index, slots, none, kind)

    # ---- what the saver tells (its thread) ----
    def settle(self, entry: Entry, keys: bytes, output_tokens: int | None) -> None:
        """See `UpperTiers`."""
        for tier in self.tiers:
            tier.settle(entry, keys, output_tokens)

    def used_at(self, job: SaveJob) -> int | None:
        """See `UpperTiers`."""
        keys = job.keys[: (int(job.index[-1]) + 1) * job.entry.key_bytes]
        uses = [tier.used_at(job.entry, keys, job.rooted) for tier in self.tiers]
        return max((use for use in uses if use is not None), default=None)

    def before_write(self, job: SaveJob) -> None:
        """See `UpperTiers`."""
        if job.rooted:
            self._secure(job, self.tiers)

    def sound_pages(self, job: SaveJob) -> int:
        """See `UpperTiers`. Nothing is evicted between this and the publishing."""
        self.before_write(job)
        return self._sound(job, job.index)

    def after_eviction(self) -> None:
        """See `UpperTiers`. What is evicted here departs too, but nothing is below it any more."""
        while departures := self._manager.take_departed():
            for entry, keys, at in self._departed(departures):
                self._manager.evict_below(entry, keys[: (at + 1) * entry.key_bytes])

    def _left_memory(self, departures: list[Departure]) -> None:
        """Pages left a memory tier; the saver evicts what the devices hold below them.

        Its thread does, as that publishes: what it is about to is not overlooked.
        """
        gone = self._departed(departures)
        if gone and self._manager.note_departed(gone):
            self.saver.enqueue(DropJob(gone[0][0], []))  # refused: it looks when it next saves

    def _departed(self, departures: list[Departure]) -> list[Departure]:
        """Pages left a tier: what memory holds below those that are in no tier any more goes too.

        Returns
            of each run the part that begins with such a page. The whole part, as it may be looked
            at again, and its first pages may have come back by then.
        """
        left: list[Departure] = []
        for entry, keys, low in departures:
            held = self._held(entry, keys, self.tiers[-1:])
            for tier in self.tiers[:-1]:
                above = np.flatnonzero(tier.peek(entry, keys)[low:] & ~held[low:]) + low
                if len(above):  # a slower tier may hold something below these
                    held[above] = tier.must_save(entry, keys, above)
            gone = np.flatnonzero(~held[low:])
            if len(gone):
                at = low + int(gone[0])
                left.append((entry, keys, at))
                self._drop_below(entry, keys[: (at + 1) * entry.key_bytes])
        return left

    def _drop_below(self, entry: Entry, keys: bytes) -> None:
        for tier in self.tiers:
            tier.drop_below(entry, keys)

    def _held(self, entry: Entry, keys: bytes, tiers: Sequence[MemoryTier]) -> Mask:
        """Which pages of a rooted chain some of `tiers` or the devices hold."""
        with self.handover.still():
            held = np.zeros(len(keys) // entry.key_bytes, dtype=np.bool_)
            for tier in tiers:
                held |= tier.peek(entry, keys)
            with self._manager.lock:
                held |= stored_along(entry.pages, keys)
        return held

    def _secure(self, job: SaveJob, tiers: Sequence[MemoryTier]) -> None:
        """What a job's pages depend on must not be dropped from `tiers`, unless it is below them.

        Below them are the devices, and the tiers that are not named.
        """
        entry = job.entry
        keys = job.keys[: int(job.index[-1]) * entry.key_bytes]
        held = self._held(entry, keys, self.tiers[len(tiers) :])
        held[job.index[:-1]] = True  # or will be
        lacking = np.flatnonzero(~held)
        for tier in tiers if len(lacking) else ():
            tier.must_save(entry, keys, lacking)

    def _sound(self, job: SaveJob, index: Indices) -> int:
        """How many of the pages at `index` of a job's chain have all their ancestors."""
        if not job.rooted or job.known_from is None or not self._manager.restored.is_set():
            return len(index)
        gap = self._first_gap(job.entry, job.keys, job.known_from, job.index)
        return len(index) if gap is None else int(np.searchsorted(index, gap))

    def _first_gap(self, entry: Entry, keys: bytes, first: int, also: Indices) -> int | None:
        """The first page from `first` on that is in no tier, those at `also` counting as held."""
        held = self._held(entry, keys, self.tiers)
        held[also] = True
        gaps = np.flatnonzero(~held[first:])
        return first + int(gaps[0]) if len(gaps) else None

    def keep(self, job: SaveJob, count: int) -> _Kept | None:
        """See `UpperTiers`."""
        tier = self._dram
        if tier is None or self._exclusive or job.ticket.cancelled:
            return None
        epoch = tier.epoch(job.entry)
        return _Kept(epoch, self._fill(tier, job, count))

    def end_keep(self, job: SaveJob, kept: _Kept, stored: Indices, checksum: U64) -> None:
        """See `UpperTiers`."""
        assert self._dram is not None
        count = len(kept.slots)
        good = np.zeros(count, dtype=np.bool_)
        stored = stored[stored < count]
        good[stored] = True
        self._dram.cancel(kept.slots[~good])
        self._dram.commit(
            job.entry,
            kept.epoch,
            job.keys,
            job.rooted,
            job.index[stored],
            kept.slots[stored],
            checksum[stored],
            Kind.SAVED,
        )

    def after_publish(self, job: SaveJob, stored: Indices) -> None:
        """See `UpperTiers`. Another save may have brought the same pages into memory meanwhile."""
        if len(stored) == 0 or not (self.takes_saves or self._exclusive):
            return
        index = job.index[stored]
        if job.rooted:
            self._note_held_below(job.entry, job.keys, index, self.tiers)
            return
        with self.handover.move():
            for tier in self.tiers:
                tier.note_saved(job.entry, job.keys, False, index)

    def clear(self, entry: Entry, devices: Callable[[], int]) -> int:
        """See `UpperTiers`.

        The slowest first: what has moved up before its tier is cleared is cleared there; what has
        not finds nothing to move, or another epoch.
        """
        self._manager.restored.wait()
        count = self._count_in_memory_only(entry)
        try:
            return count + devices()
        finally:
            for tier in self.tiers[::-1]:
                tier.clear(entry)

    def _count_in_memory_only(self, entry: Entry) -> int:
        count = 0
        for at, tier in enumerate(self.tiers):
            for keys, stored in tier.chains(entry):
                # Not a look-up: that would not show what is past its TTL, and its records count.
                held = self._manager.recorded(entry, keys)
                for faster in self.tiers[:at]:
                    held |= faster.peek(entry, keys)
                count += int(np.count_nonzero(stored & ~held[len(held) - len(stored) :]))
        return count

    def _clear_above(self, entry: Entry) -> None:
        """Another process has cleared a namespace: what memory holds of it is gone as well."""
        for tier in self.tiers:
            tier.clear(entry)

    # ---- pins ----
    def pin(self, entry: Entry, keys: bytes) -> int:
        """Pin the pages of a rooted chain that are in some tier without a gap; returns how many."""
        count = self.match(entry, keys, 0, True)
        self.pin_pages(entry, keys[: count * entry.key_bytes])
        return count

    def pin_pages(self, entry: Entry, keys: bytes) -> None:
        """Count one more pin on each of some pages, stored or not."""
        self._manager.pin_pages(entry, keys)
        for tier in self.tiers:
            tier.pin(entry, keys)

    def unpin(self, entry: Entry, keys: bytes) -> None:
        """Take one pin off each page of a chain."""
        self._manager.unpin(entry, keys)
        for tier in self.tiers:
            tier.unpin(entry, keys)


def pieces(slot_address: U64, memory: U64, lengths: U64) -> tuple[U64, U64, U64]:
    """Pages in slots and in a caller's memory as parallel pieces: slot side, memory, lengths.

    Parameters
        memory, lengths: as in `PageFragments`, with one row of `memory` for each slot.
    """
    count = len(slot_address)
    if len(lengths) == 1:
        return slot_address, memory[:, 0].copy(), np.full(count, lengths[0])
    inside = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(lengths)[:-1]))
    slots = (slot_address[:, None] + inside[None, :].astype(np.uint64)).reshape(-1)
    return slots, np.ascontiguousarray(memory).reshape(-1), np.tile(lengths, count)


class _LastOf:
    """Calls back once, when the last of `count` parts has ended."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._then = then

    def end(self) -> None:
        """One part has ended."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


def _copy_out(
    entry: Entry,
    hit: Hit,
    memory: PageFragments,
    low: int,
    high: int,
    end: Callable[[], None],
) -> None:
    """Copy pages low .. high-1 of a hit."""
    try:
        address = hit.tier.addresses(hit.slots[low:high], entry.slot_bytes)
        inside, outside, length = pieces(address, memory.address[low:high], memory.length_bytes)
        hit.tier.arena.copy(outside, inside, length)
    finally:
        end()
    with hit.tier.lock:
        hit.tier.counters["hits"] += high - low
