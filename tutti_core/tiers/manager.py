"""Decides what is where: look-ups over tree and catalog, space for new pages, eviction.

One lock guards the trees and the space map; it is held for memory work only, never over a transfer
or a catalog transaction. Look-ups may come from any thread; `reserve`, `publish`, `remove_dropped`
and `clear` belong to the store's saver thread, so that a store has one catalog writer.

Order that keeps a page bit-exact or a miss
    - bytes, then flush, then the catalog commit, then the tree (publish);
    - tree, then the catalog commit, then the slot is given up, then loads that could still be
      reading it end, then the slot is handed out again (evict).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.errors import (
    DISK_FULL,
    ConfigError,
    DeviceError,
    StoreClosedError,
    StoreFullError,
    UnsupportedError,
)
from tutti_core.format import DATA_OFFSET_BYTES, PARTS_VERSION
from tutti_core.index.catalog import (
    Catalog,
    NewPages,
    Records,
    packed_rows,
    page_keys_of,
    record_key_at,
    slots_of_records,
)
from tutti_core.index.pages import NamespacePages, Offers, Victim
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.index.restore import build_pages
from tutti_core.io.transport import BLOCK_BYTES
from tutti_core.keys import Namespace, described
from tutti_core.policies.admission import Admission, Always
from tutti_core.policies.budget import BURSTS_PER_DAY
from tutti_core.policies.choice import make_policy
from tutti_core.tiers.cipher import PageCipher
from tutti_core.tiers.clears import Clears
from tutti_core.tiers.device_calls import DeviceCalls
from tutti_core.tiers.health import Health
from tutti_core.tiers.heat import Heat
from tutti_core.tiers.lease import Lease
from tutti_core.tiers.limits import Limits, Rules, expired, expired_loose
from tutti_core.tiers.parts import PartLayout, layout_of_parts, stored_bytes
from tutti_core.tiers.pools import Layout
from tutti_core.tiers.segments import Segments
from tutti_core.tiers.space import Space

logger = logging.getLogger("tutti")

U64 = npt.NDArray[np.uint64]

EVICTION_BATCH_PAGES_MAX = 256
"""Pages evicted beyond the need at hand, so that a catalog commit serves many saves."""

EVICTION_STEP_PAGES = 64
"""Pages looked at under the lock at a time, those of other processes included."""

_EVICTION_PAUSE_S = 1e-5  # between two steps: lets whoever waits for the lock have it

CONDEMNED_MAX = 65_536
"""Unreadable pages that are remembered, so that a look-up that raced with the removal of their
records does not offer them again. Generations are never used twice."""

_RESTORE_CHUNK = 8192
_EXPIRY_STEPS = 8  # times a TTL that what is past it is looked for

SPARES_MAX = 1024
"""Leaves that one save spares because other processes read them; more go in the policy's order."""

EXPIRED_PAGES_MAX = 4096
"""Pages past their TTL that one save removes; the next one goes on."""


@dataclass(slots=True)
class Entry:
    """One namespace in memory.

    page_bytes  of a page as it is stored, with header and padding where it is stored in parts, and
                with trailers where it is encrypted.
    cipher      encrypts the pages; None: they are stored as they are.
    cleared     pages up to this generation were cleared, by whatever process.
    """

    digest: bytes
    page_bytes: int
    key_bytes: int
    pages: NamespacePages
    admission: Admission = field(default_factory=lambda: Always(1))
    limits: Limits = field(default_factory=Limits)
    parts: PartLayout | None = None
    cipher: PageCipher | None = None
    slot_bytes: int = field(init=False)
    expired_at: int = 0
    cleared: int = 0

    def __post_init__(self) -> None:
        self.slot_bytes = _slot_bytes(self.page_bytes)

    def record_keys(self, page_keys: bytes) -> bytes:
        """Catalog keys of packed page keys."""
        return hashing.record_keys(self.digest, page_keys, self.key_bytes)


@dataclass(slots=True)
class _Room:
    """Room that is being made: for pages of `entry` below `chain` that are worth `worth`."""

    entry: Entry
    chain: bytes
    sweep: Callable[[], None]
    deadline_s: float
    worth: float = math.inf
    guaranteed: bool = False
    """The pages are within the share of `entry`: others make room first, whatever that costs."""
    refused: bool = False
    """All that could still go is worth more."""
    spares: int = SPARES_MAX
    """How many leaves may still be spared because other processes read them."""
    offers: Offers = field(default_factory=Offers)
    """By namespace, what could go next; while the lock is held."""


class Manager:
    """Placement of one store's pages.

    Parameters
        owned_max: segments that this process may own.
        rules: the policy, and what may be written.
    """

    one_tree = True
    """Pages stand in one tree, whose leaves go first."""

    def __init__(
        self,
        layout: Layout,
        catalog: Catalog,
        lease: Lease,
        lease_folder: Path,
        owned_max: int,
        rules: Rules | None = None,
    ) -> None:
        self.layout = layout
        self.catalog = catalog
        self.lock = threading.Lock()
        self.slots_returned = threading.Condition(self.lock)
        self.space = Space(layout.segment_bytes)
        self.restored = threading.Event()
        """Is set: `restore` does that last, also when it fails, and opening fails without its
        thread. So waiting for it without a bound ends, once the catalog has been read."""
        self.counters: Counter[str] = Counter()
        self._counters_lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}
        self._segments = Segments(
            layout, catalog, lease, lease_folder, owned_max, self.space, self.lock, self.count
        )
        self.rules = rules or Rules()
        self.capacity_bytes = owned_max * layout.segment_bytes
        self._budget = self.rules.make_budget()
        self._clock = catalog.sequence() + 1  # newer than every restored page
        self._records_before = catalog.sequence()  # generations up to here
        self._opened = self._tick()
        self._condemned: dict[int, None] = {}  # generations of unreadable pages, latest last
        self._leaving: set[int] = set()  # of pages that moved up, until their records are removed
        self._unremoved: list[tuple[bytes, int, int]] = []  # retired, but the catalog said no
        self._owned: Counter[bytes] = Counter()
        """By namespace, pages in segments of this process that were scanned so far."""
        self._expired: list[tuple[bytes, int, int]] = []  # retired at a look-up, likewise
        self.health: Health | None = None  # set once, before the first look-up
        self._unrestored = False  # `restore` has failed
        self.heat: Heat | None = None
        """Set once, where processes share the store."""
        self._stopping = False
        self._clears = Clears(catalog)
        self.on_clear: Callable[[Entry], None] | None = None
        """Called without the lock when another process has cleared a namespace; set once."""
        self._page_count = 0

    def use(self, health: Health, calls: DeviceCalls, timeout_s: float) -> None:
        """Heed which devices are well, and wait for them no longer than that; once, at the start.

        Without it, room is set aside in the call.
        """
        self.health = health
        inner = self._segments.allocate

        def allocate(segment: int) -> None:
            def work() -> int:
                inner(segment)
                return 0

            device = segment % self.layout.pool_count
            call = calls.start(device, work)
            code = -call.status if call.wait(timeout_s) else errno.ETIMEDOUT
            if code and code not in DISK_FULL:
                health.note_trouble(device, f"room could not be set aside, errno {code}")
            if code:
                raise call.error or OSError(code, os.strerror(code))

        self._segments.allocate = allocate

    def count(self, name: str, amount: int) -> None:
        """Add to a counter. The counters have a lock of their own, held for the addition."""
        with self._counters_lock:
            self.counters[name] += amount

    # ---- namespaces ----
    def entry(self, namespace: Namespace) -> Entry:
        """The in-memory side of a namespace, registered in the catalog.

        Raises
            ConfigError: a page is more than a segment, or than the write budget ever grants.
            UnsupportedError: pages in parts, in a store that was made before there were any.
        """
        digest, trailer_bytes = namespace.digest(), self.layout.trailer_bytes
        parts = layout_of_parts(namespace.parts, trailer_bytes)
        slot_bytes = _slot_bytes(stored_bytes(namespace.page_bytes, parts, trailer_bytes))
        self._check_fits(namespace, slot_bytes)
        budget = self._budget
        if budget.bytes_per_day is not None and slot_bytes > budget.burst_bytes:
            raise ConfigError(
                f"write_budget = {budget.bytes_per_day} bytes never lets a page of "
                f"{namespace.page_bytes} bytes be written",
                hint=f"use at least {BURSTS_PER_DAY * slot_bytes}, or none",
            )
        self.catalog.register_namespace(digest, namespace.canonical())
        cleared = self.catalog.cleared(digest)
        with self.lock:
            return self._entry(digest, namespace.describe(), cleared)

    def _check_fits(self, namespace: Namespace, slot_bytes: int) -> None:
        if slot_bytes > self.layout.segment_bytes:
            raise ConfigError(
                f"page_bytes = {namespace.page_bytes} is larger than a segment of "
                f"{self.layout.segment_bytes} bytes",
                hint="make a new store with a larger `segment` or capacity",
            )
        if namespace.parts and self.layout.version < PARTS_VERSION:
            raise UnsupportedError(
                f"the store has format version {self.layout.version}, which has no pages in parts",
                hint="use another path, or `tutti init --discard`",
            )

    def _entry(self, digest: bytes, description: Mapping[str, Any], cleared: int = 0) -> Entry:
        """The entry of a namespace; `description` as `Namespace.describe` gives it.

        Parameters
            cleared: of a new entry, whose tree is empty; see `Entry`.
        """
        entry = self._entries.get(digest)
        if entry is None:
            trailer_bytes = self.layout.trailer_bytes
            parts = layout_of_parts(description.get("parts", ()), trailer_bytes)
            plain_bytes = int(description["page_bytes"])
            page_bytes = stored_bytes(plain_bytes, parts, trailer_bytes)
            key_bytes = int(description["key_bytes"])
            entry = Entry(
                digest,
                page_bytes,
                key_bytes,
                self._new_pages(page_bytes, key_bytes),
                self.rules.make_admission(self._capacity_pages(page_bytes)),
                parts=parts,
                cipher=self._cipher(digest, plain_bytes, parts),
            )
            entry.cleared = cleared
            self._entries[digest] = entry
            self._clears.look_again()
        return entry

    def _cipher(
        self, digest: bytes, page_bytes: int, parts: PartLayout | None
    ) -> PageCipher | None:
        keyring = self.layout.keyring
        if keyring is None:
            return None
        return PageCipher(keyring.namespace(digest), digest, page_bytes, parts)

    def _capacity_pages(self, page_bytes: int) -> int:
        return self.capacity_bytes // _slot_bytes(page_bytes)

    def _new_pages(self, page_bytes: int, key_bytes: int) -> NamespacePages:
        policy = make_policy(self.rules.policy, self._capacity_pages(page_bytes))
        return NamespacePages(key_bytes, policy, self._opened)

    def limit(self, entry: Entry, limits: Limits) -> None:
        """Set the limits of a namespace.

        Raises
            ConfigError: an impossible limit, or the shares add up to more than all.
        """
        with self.lock:
            limits.check(sum(e.limits.share for e in self._entries.values() if e is not entry))
            entry.limits = limits

    def _tick(self) -> int:
        """The time in nanoseconds, rising from call to call."""
        self._clock = max(self._clock + 1, time.monotonic_ns())
        return self._clock

    # ---- look-up ----
    def match(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> int:
        """Return how many pages from page `first` on are stored without a gap."""
        self.notice_clears()
        count = len(keys) // entry.key_bytes
        if rooted and not self._unwell_reads():
            with self.lock:
                count = self._shown_count(entry, keys)
                keys = keys[: count * entry.key_bytes]
                hit = entry.pages.match(keys, first, self._tick()) if first < count else 0
            chunk = 1
            while first + hit < count:
                # Pages of other processes, or not restored yet. Most misses cost one look-up.
                stop = min(first + hit + chunk, count)
                found = self._consult_catalog(entry, keys, first + hit, stop, True).slot != NO_SLOT
                gaps = np.flatnonzero(~found)
                hit += int(gaps[0]) if len(gaps) else len(found)
                if len(gaps):
                    break
                chunk *= 4
            return hit
        present = self.locate(entry, keys, first, rooted).slot != NO_SLOT
        gaps = np.flatnonzero(~present)
        return int(gaps[0]) if len(gaps) else len(present)

    def locate(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> Locations:
        """Return the locations of pages `first` .. end of the chain."""
        self.notice_clears()
        count = len(keys) // entry.key_bytes
        with self.lock:
            shown = self._shown_count(entry, keys) if rooted else self._shown_loose(entry, count)
            if shown <= first:  # without a look at what is before it, which would renew that
                return Locations.absent(count - first)
            hidden, keys = count - shown, keys[: shown * entry.key_bytes]
            found = self._locate(entry, keys, first, rooted)
        missing = np.flatnonzero(found.slot == NO_SLOT)
        if len(missing):
            low, high = first + int(missing[0]), first + int(missing[-1]) + 1
            known = self._consult_catalog(entry, keys, low, high, rooted)
            part = found.part(low - first, high - first)
            fill = part.slot == NO_SLOT
            part.slot[fill] = known.slot[fill]
            part.checksum[fill] = known.checksum[fill]
            part.generation[fill] = known.generation[fill]
        self._hide_unwell(found)
        return found.padded(hidden) if hidden else found

    def _unwell_reads(self) -> frozenset[int]:
        """Devices that cannot be read now."""
        if self.health is None or self.health.all_well:
            return frozenset()
        self.health.tick()
        return self.health.unwell_reads

    def renew(self, entry: Entry, keys: bytes) -> None:
        """The pages of a rooted chain are as if new, unless they are past the namespace's TTL."""
        with self.lock:
            keys = keys[: self._shown_count(entry, keys) * entry.key_bytes]
            entry.pages.locate(keys, 0, True, self._tick())

    def _hide_unwell(self, where: Locations) -> None:
        """Pages on a device that does not answer are misses, until it does."""
        if unwell := self._unwell_reads():
            device = (where.slot >> np.uint64(32)) % np.uint64(self.layout.pool_count)
            where.slot[np.isin(device, list(unwell))] = NO_SLOT

    def _shown_count(self, entry: Entry, keys: bytes) -> int:
        """How many leading pages of a rooted chain are not past the namespace's TTL."""
        ttl_ns = entry.limits.ttl_ns
        if ttl_ns is None:
            return len(keys) // entry.key_bytes
        self._shown_loose(entry, 0)
        return entry.pages.fresh_count(keys, self._tick() - ttl_ns)

    def _shown_loose(self, entry: Entry, count: int) -> int:
        """`count`, once pages without a known chain that are past the TTL are out of the index.

        Those of the tree that are asked for by key alone are found until they are reclaimed.
        """
        ttl_ns = entry.limits.ttl_ns
        if ttl_ns is not None and entry.pages.loose and self._segments.scanned:
            since = self._tick() - ttl_ns
            while (victim := expired_loose(entry.pages, since)) is not None:
                self._expired += self._retire(entry, victim)
        return count

    def _locate(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> Locations:
        found = entry.pages.locate(keys, first, rooted, self._tick())
        present = found.slot != NO_SLOT
        stale = present & ~self.space.holds(found.slot, found.generation)
        for i in np.flatnonzero(stale):  # normally none; see `holds`
            entry.pages.drop(keys, first + int(i), rooted, int(found.generation[i]))
        found.slot[stale] = NO_SLOT
        return found

    def _consult_catalog(
        self, entry: Entry, keys: bytes, start: int, stop: int, rooted: bool
    ) -> Locations:
        """Look pages start .. stop-1 up in the catalog and add what it has to the tree.

        A page whose chain is not known is not added: it may stand in the tree already, and a page
        that stands in two places would be evicted twice.
        """
        width = entry.key_bytes
        part = keys[start * width : stop * width]
        try:
            found, records = self.catalog.lookup(entry.record_keys(part))
        except DeviceError as error:  # what only the catalog knows is a miss until it can be read
            self._note_catalog_error(error)
            return Locations.absent(stop - start)
        found &= _same_pages(records, entry, part)
        found &= records["segment"] < self.layout.segment_count  # else: grown by another process
        found &= records["generation"] > entry.cleared
        ttl_ns = entry.limits.ttl_ns
        if rooted and ttl_ns is not None and time.monotonic_ns() - ttl_ns > self._opened:
            # What was there at opening, and was not found in the tree, was not used since.
            found &= records["generation"] > self._records_before
        where = _locations(records)
        where.slot[~found] = NO_SLOT
        if found.any():
            with self.lock:
                # A page evicted between the look-up and here must not come back.
                where.slot[~self.space.holds(where.slot, where.generation)] = NO_SLOT
                where.slot[_are_in(self._condemned, where.generation)] = NO_SLOT
                if rooted:
                    entry.pages.insert(keys[: stop * width], start, True, where, self._tick())
        return where

    def recorded(self, entry: Entry, keys: bytes) -> npt.NDArray[np.bool_]:
        """Which pages have a record in the catalog, whoever saved them and however old they are."""
        try:
            found, records = self.catalog.lookup(entry.record_keys(keys))
        except DeviceError as error:
            self._note_catalog_error(error)
            return np.zeros(len(keys) // entry.key_bytes, dtype=np.bool_)
        return np.asarray(found & _same_pages(records, entry, keys), dtype=np.bool_)

    def still_there(
        self,
        entry: Entry,
        keys: bytes,
        index: npt.NDArray[np.intp],
        where: Locations,
        started: int,
    ) -> npt.NDArray[np.bool_]:
        """Whether the pages at `index` of a chain are unchanged after a load has read them.

        Pages in segments that were this process's when the load began are protected while they are
        read; others may have been evicted and overwritten meanwhile, which shows in the generation.
        What the catalog cannot confirm counts as changed.
        """
        with self.lock:
            foreign = np.flatnonzero(~self.space.protects(where.slot, started))
        valid = np.ones(len(where), dtype=np.bool_)
        if len(foreign):
            valid[foreign] = False
            try:
                found, records = self.catalog.lookup(self.record_keys(entry, keys, index[foreign]))
            except (DeviceError, StoreClosedError) as error:
                self._note_catalog_error(error)
                return valid
            same = slots_of_records(records) == where.slot[foreign]
            valid[foreign] = found & same & (records["generation"] == where.generation[foreign])
            if self.heat is not None:
                self.heat.note(where.slot[foreign[valid[foreign]]], time.monotonic_ns())
        return valid

    def record_keys(self, entry: Entry, keys: bytes, index: npt.NDArray[np.intp]) -> bytes:
        """Packed catalog keys of the pages at `index` of a chain."""
        return entry.record_keys(packed_rows(keys, entry.key_bytes)[index].tobytes())

    def pin(self, entry: Entry, keys: bytes) -> int:
        """Pin the pages of a chain that are stored without a gap; returns how many."""
        with self.lock:
            hit = entry.pages.match(keys, 0, self._tick())
            entry.pages.pin(keys[: hit * entry.key_bytes])
        return hit

    def pin_pages(self, entry: Entry, keys: bytes) -> None:
        """Count one more pin on each of some pages, stored or not."""
        with self.lock:
            entry.pages.pin(keys)

    def unpin(self, entry: Entry, keys: bytes) -> None:
        """Take one pin off each page of a chain."""
        with self.lock:
            entry.pages.unpin(keys)

    def page_count(self) -> int:
        """Records in the catalog, of all processes; where it cannot be read, the last figure."""
        try:
            self._page_count = self.catalog.record_count()
        except DeviceError as error:
            self._note_catalog_error(error)
        return self._page_count

    def used_bytes(self) -> int:
        """Bytes of slots in use in this process's segments that were scanned so far."""
        with self.lock:
            return self.space.used_bytes

    # ---- loads ----
    def begin_load(self) -> int:
        """Protect what is located now from being overwritten; ends with `end_load`."""
        with self.lock:
            return self.space.begin_load()

    def end_load(self, start: int) -> None:
        """The load touches no slot any more."""
        with self.slots_returned:
            self.space.end_load(start)
            self.slots_returned.notify_all()

    def narrow_load(self, start: int, slots: U64) -> None:
        """A load is late and reads these slots: what is given up elsewhere does not wait for it."""
        with self.slots_returned:
            self.space.narrow_load(start, slots)
            self.slots_returned.notify_all()

    def drop(
        self,
        entry: Entry,
        keys: bytes,
        index: npt.NDArray[np.intp],
        rooted: bool,
        generations: U64,
        recorded: npt.NDArray[np.bool_],
    ) -> None:
        """Forget pages of a chain at once; `remove_dropped` removes the recorded ones for good."""
        with self.lock:
            self._drop(entry, keys, index, rooted, generations, recorded)

    def hand_up(
        self, entry: Entry, keys: bytes, index: npt.NDArray[np.intp], generations: U64
    ) -> None:
        """`drop` pages of a rooted chain that a memory tier has taken over; under the lock.

        A save that finds their records before these are removed has not stored anything.
        """
        self._leaving.update(generations.tolist())
        self._drop(entry, keys, index, True, generations, np.ones(len(index), dtype=np.bool_))

    def _drop(
        self,
        entry: Entry,
        keys: bytes,
        index: npt.NDArray[np.intp],
        rooted: bool,
        generations: U64,
        recorded: npt.NDArray[np.bool_],
    ) -> None:
        self._condemned.update(dict.fromkeys(generations[recorded].tolist()))
        while len(self._condemned) > CONDEMNED_MAX:
            del self._condemned[next(iter(self._condemned))]
        left = {
            generation
            for i, generation in zip(index.tolist(), generations.tolist(), strict=True)
            if not entry.pages.drop(keys, i, rooted, generation)
        }
        if left and not rooted:  # read by their keys alone, they may stand in the tree
            entry.pages.drop_generations(left)

    def forgive(self, generations: list[int]) -> None:
        """Offer pages again that were forgotten, whose records are there still."""
        if generations:
            with self.lock:
                for generation in generations:
                    self._condemned.pop(generation, None)

    # ---- space (saver thread) ----
    def reserve(
        self,
        entry: Entry,
        keys: bytes,
        rooted: bool,
        index: npt.NDArray[np.intp],
        sweep: Callable[[], None],
        wait_s: float,
        *,
        choosy: bool = True,
        output_tokens: int | None = None,
    ) -> U64:
        """Reserve slots for the pages at `index` of a chain, evicting where needed.

        Fewer, for a front part of them, when they are not admitted, when nothing can go, or nothing
        that is worth less. The pages of a rooted chain are not evicted for each other.

        Parameters
            index: rising; what is between them is stored.
            choosy: leave pages out that the admission refuses or that are worth too little; not for
                pages that leave memory. The write budget holds for all.
            output_tokens: see Policy.settled.
            sweep: called to let finished loads return their slots.
            wait_s: bound on waiting for loads in flight.
        """
        taken: list[U64] = []
        room = _Room(entry, keys if rooted else b"", sweep, time.monotonic() + wait_s)
        fresh = packed_rows(keys, entry.key_bytes)[index].tobytes()
        if not self._can_write():
            self.count("pages_refused_unwell", len(index))
            return np.empty(0, dtype=np.uint64)
        wanted = self._admitted_count(entry, fresh) if choosy else len(index)
        wanted = self._affordable_count(entry, wanted)
        try:
            self._remove_cleared()
            self._segments.open_pools(entry.slot_bytes)
            self._expire()
            parts = [(wanted, math.inf)]
            if choosy and rooted and wanted:
                with self.lock:
                    parts = entry.pages.worth(
                        fresh[: wanted * entry.key_bytes],
                        0,
                        len(keys) // entry.key_bytes,
                        output_tokens,
                    )
            for pages, room.worth in parts:
                if not self._reserve_part(room, pages, taken):
                    break
        except (StoreFullError, DeviceError) as error:
            self._note_catalog_error(error)
        short = wanted - sum(map(len, taken))
        if short:
            self._budget.give_back(short * entry.slot_bytes)
            why = "unwell" if self.catalog.commits.refused else "full"
            self.count(f"pages_refused_{'worth' if room.refused else why}", short)
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.uint64)

    def _can_write(self) -> bool:
        """Whether catalog and devices take anything; pools that are left alone are shut."""
        unwell: frozenset[int] = frozenset()
        if self.health is not None and not self.health.all_well:
            self.health.tick()
            unwell = self.health.unwell_writes
        with self.lock:
            self.space.shut = unwell
        return len(unwell) < self.layout.pool_count and self.catalog.takes_commits()

    def _reserve_part(self, room: _Room, count: int, taken: list[U64]) -> bool:
        """Add slots for `count` pages to `taken`; False if that is not possible for all."""
        within = self._share_pages(room.entry) - self._owned[room.entry.digest]
        within = min(max(within - sum(map(len, taken)), 0), count)
        room.guaranteed = within > 0
        if 0 < within < count:
            return self._reserve_part(room, within, taken) and self._reserve_part(
                room, count - within, taken
            )
        room.refused = False
        self._make_room_in_catalog(room, count)
        if room.refused:
            return False
        while count:
            with self.lock:
                slots = self.space.allocate(count, room.entry.slot_bytes)
            taken.append(slots)
            count -= len(slots)
            if count and not self._more_space(room, count):
                return False
        return True

    def _admitted_count(self, entry: Entry, fresh: bytes) -> int:
        """How many of some new pages the admission lets pass; a front part of them."""
        with self.lock:
            mask = entry.admission.admit(fresh, entry.key_bytes, 0, self._tick())
        admitted = int(np.count_nonzero(mask))
        if admitted < len(mask):
            self.count("pages_not_admitted", len(mask) - admitted)
        return admitted

    def _affordable_count(self, entry: Entry, count: int) -> int:
        """How many of `count` pages the budget lets be written; they are paid for."""
        length = entry.slot_bytes
        with self.lock:
            now = self._tick()
        granted = self._budget.take(count * length, now, length) // length
        if granted < count:
            self.count("pages_over_budget", count - granted)
        return granted

    def settle(self, entry: Entry, chain: bytes, kept: int, output_tokens: int | None) -> None:
        """Tell the policy that a request was saved: the first `kept` pages of its chain."""
        with self.lock:
            entry.pages.settle(chain, kept, output_tokens, self._tick())

    def cancel(self, slots: U64) -> None:
        """Give reserved slots back unused."""
        with self.lock:
            self.space.cancel(slots)

    def extents(self, slots: U64, slot_bytes: int) -> tuple[npt.NDArray[np.uint32], U64]:
        """Device index and byte offset of each slot."""
        segment = slots >> np.uint64(32)
        pools = np.uint64(self.layout.pool_count)
        offset = (
            np.uint64(DATA_OFFSET_BYTES)
            + segment // pools * np.uint64(self.layout.segment_bytes)
            + (slots & np.uint64(0xFFFFFFFF)) * np.uint64(slot_bytes)
        )
        return (segment % pools).astype(np.uint32), offset

    def _note_catalog_error(self, error: Exception) -> None:
        logger.warning("the catalog refused: %s", error)
        self.count("catalog_errors", 1)

    def _more_space(self, room: _Room, count: int) -> bool:
        """Find more free slots of this size by the cheapest means left; False if there is none."""
        slot_bytes = room.entry.slot_bytes
        if self._scan_segment() or self._segments.claim(slot_bytes, None):
            return True
        if self._segments.adopt():
            return True
        if len(self.space.shut) == self.layout.pool_count:
            return False  # nothing can be written: evicting would not help
        room.sweep()
        with self.slots_returned:
            if self.space.free_count(slot_bytes):
                return True
            if (
                self.space.waiting_count(slot_bytes) >= count
                or self.space.waiting_bytes() >= self.layout.segment_bytes
            ):
                # Enough was evicted; loads in flight are still reading it.
                left_s = room.deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self.slots_returned.wait(min(left_s, 0.01))
                return True
        return self._evict(room, count, slot_bytes)

    def _scan_segment(self) -> bool:
        """Put one more segment that this process owns into the space map; False if all are."""
        scanned = self._segments.scan_one()
        if scanned is None:
            return False
        with self.lock:
            self._owned.update(scanned.namespaces)
        if len(scanned.adopted_records):
            self._learn(scanned.adopted_keys, scanned.adopted_records)
        return True

    def _learn(self, record_keys: npt.NDArray[np.void], records: Records) -> None:
        """Put the pages of an adopted segment into the trees, from where they can be evicted."""
        order = np.argsort(record_keys)
        descriptions = self.catalog.namespaces()
        for digest in set(records["namespace"].tolist()) & descriptions.keys():
            chosen = order[records["namespace"][order] == np.void(digest)]
            description = described(digest, descriptions[digest])
            if description is None:
                continue
            width = int(description["key_bytes"])
            chosen = chosen[_named_right(digest, width, record_keys[chosen], records[chosen])]
            with self.lock:
                entry = self._entry(digest, description)
            old = records["generation"][chosen] <= entry.cleared
            with self.lock:
                self._clears.add_leftover(entry, _pages(record_keys, records, chosen[old]))
            chosen = chosen[~old]
            learnt = build_pages(width, record_keys[chosen].tobytes(), records[chosen])
            with self.lock:
                entry.pages.absorb(learnt)

    # ---- eviction (saver thread) ----
    def _make_room_in_catalog(self, room: _Room, count: int) -> None:
        excess = self.catalog.record_count() + count - self.catalog.records_max
        if excess > 0:
            self._evict(room, excess, None)

    def _expire(self) -> None:
        """Evict what is past its namespace's TTL, if that was not done of late."""
        limited: list[Entry] = []
        if self.restored.is_set():
            with self.lock:
                limited = [e for e in self._entries.values() if e.limits.ttl_ns is not None]
        while limited and self._scan_segment():  # else it would not be seen whose pages they are
            pass
        with self.lock:
            now = self._tick()
            victims, self._expired = self._expired, []
        for entry in limited:
            ttl_ns = entry.limits.ttl_ns
            if ttl_ns is None or now < entry.expired_at + ttl_ns // _EXPIRY_STEPS:
                continue
            if not self._expire_pages(entry, now - ttl_ns, victims):
                break
            entry.expired_at = now
        if victims:
            self._remove_retired(victims)
            self.count("expired_pages", len(victims))

    def _expire_pages(
        self, entry: Entry, used_since: int, victims: list[tuple[bytes, int, int]]
    ) -> bool:
        """Retire what was not used since then; False if so much was that the rest has to wait."""
        pages = entry.pages
        old = expired(pages, used_since)
        while len(victims) < EXPIRED_PAGES_MAX:
            with self.lock:
                looked_at = 0
                while looked_at < EVICTION_STEP_PAGES:
                    victim = next(old, None) if entry.pages is pages else None
                    if victim is None:
                        return True
                    looked_at += victim.span
                    victims += self._retire(entry, victim)
            time.sleep(_EVICTION_PAUSE_S)
        return False

    def _evict(self, room: _Room, count: int, slot_bytes: int | None) -> bool:
        """Evict `count` pages of one slot size (None: any), in the policy's order; False if none.

        The pages of the chain stay: room is being made for what follows them.
        Pages of another size go first where they are older; their segments are recycled when empty.
        """
        self.restored.wait()
        if self._unrestored:
            self._unrestored = False
            self.restore()
        while self._scan_segment():
            pass
        victims: list[tuple[bytes, int, int]] = []
        with self.lock:
            total = self.space.slot_count(slot_bytes)
            count = max(count, min(EVICTION_BATCH_PAGES_MAX, total // 32))
        others = self.layout.segment_bytes // BLOCK_BYTES
        left = True
        while left and count > 0 and others > 0:
            with self.lock:
                room.entry.pages.guard(room.chain)
                room.offers = Offers()
                looked_at = 0
                while count > 0 and others > 0 and looked_at < EVICTION_STEP_PAGES:
                    most = min(count, EVICTION_STEP_PAGES - looked_at)
                    choice = self._choose_victim(room, most, others)
                    if choice is None or self._is_worth_more(choice, room):
                        room.refused = choice is not None
                        left = False
                        break
                    owner, victim = choice
                    looked_at += victim.span
                    if room.spares and self._is_read_elsewhere(owner, victim):
                        room.spares -= 1
                        continue
                    retired = self._retire(owner, victim)
                    victims += retired
                    if slot_bytes is None or owner.slot_bytes == slot_bytes:
                        count -= len(retired)
                    else:
                        others -= len(retired) * (owner.slot_bytes // BLOCK_BYTES)
                room.entry.pages.unguard()
            time.sleep(_EVICTION_PAUSE_S)
        if not victims and not self._unremoved:
            return False
        self._remove_retired(victims)
        self.count("evicted_pages", len(victims))
        return True

    def evict_below(self, entry: Entry, keys: bytes) -> None:
        """Evict all that is below the last page of a rooted chain, which is in no tier any more."""
        retired: list[tuple[bytes, int, int]] = []
        while True:
            with self.lock:
                victim = entry.pages.end_below(keys)
                if victim is None:
                    break
                retired += self._retire(entry, victim)
        if not retired:
            return
        self.count("evicted_pages", len(retired))
        try:
            self._remove_retired(retired)
        except (StoreFullError, DeviceError) as error:
            self._note_catalog_error(error)

    def _is_read_elsewhere(self, owner: Entry, victim: Victim) -> bool:
        """Whether another process has read pages since they were used here; they count as used now.

        So a leaf is spared once for each such time.
        """
        if self.heat is None or victim.leaf is None:
            return False
        now = self._tick()
        if self.heat.last_read(victim.slot, now) <= victim.last_use:
            return False
        owner.pages.tree.use(victim.leaf, now)
        self.count("leaves_spared", 1)
        return True

    def _retire(self, owner: Entry, victim: Victim) -> list[tuple[bytes, int, int]]:
        """Take victims out of the index; returns (record key, slot, generation) of our own.

        Retired at once: a look-up that still finds the record must not revive it, and a page that
        stands under two chains goes once. Another process's page only it can evict.
        """
        owner.pages.forget(victim, self._tick())
        mine = np.flatnonzero(self.space.retire_held(victim.slot, victim.generation))
        if len(mine) == 0:
            return []
        self._owned[owner.digest] -= len(mine)
        record_keys = owner.record_keys(victim.keys)
        slots, generations = victim.slot.tolist(), victim.generation.tolist()
        return [(record_key_at(record_keys, i), slots[i], generations[i]) for i in mine.tolist()]

    def _remove_retired(self, pages: list[tuple[bytes, int, int]]) -> None:
        """Remove the records of retired pages and give their slots up.

        Where the catalog refuses, they stay retired and are removed with the next ones.
        """
        self._unremoved += pages
        self.catalog.remove(self._unremoved)
        slots = np.array([slot for _, slot, _ in self._unremoved], dtype=np.uint64)
        self._unremoved = []
        with self.lock:
            self.space.give_up(slots)

    def _choose_victim(
        self, room: _Room, pages_max: int, others_max: int
    ) -> tuple[Entry, Victim] | None:
        """What goes next: of what each policy offers, what is worth least.

        A namespace gives up for others only what it has beyond its share, and makes room for what
        is within its own only where no other can. Of pages of another size at most `others_max`
        blocks go.
        """
        best: tuple[Entry, Victim] | None = None
        best_order: tuple[bool, float, float] | None = None
        now = self._tick()
        for entry in self._entries.values():
            most, own = pages_max, entry is room.entry
            if entry.slot_bytes != room.entry.slot_bytes:
                most = min(most, max(others_max // (entry.slot_bytes // BLOCK_BYTES), 1))
            if entry.limits.share and not own:
                most = min(most, self._owned[entry.digest] - self._share_pages(entry))
                if most <= 0:
                    continue
            victim = room.offers.of(entry.digest, entry.pages, most, now)
            if victim is None:
                continue
            order = (own and room.guaranteed, victim.value, float(victim.last_use))
            if best_order is None or order < best_order:
                best, best_order = (entry, victim), order
        if best is not None:
            room.offers.take(best[0].digest)
        return best

    def _share_pages(self, entry: Entry) -> int:
        return int(entry.limits.share * self.capacity_bytes) // entry.slot_bytes

    @staticmethod
    def _is_worth_more(choice: tuple[Entry, Victim], room: _Room) -> bool:
        """Whether a victim is better kept than the pages that room is made for."""
        owner, victim = choice
        return victim.value > room.worth and (owner is room.entry or not room.guaranteed)

    # ---- publishing and removing (saver thread) ----
    def publish(
        self,
        groups: list[tuple[Entry, bytes, bool, npt.NDArray[np.intp], NewPages, int | None]],
    ) -> list[npt.NDArray[np.bool_]]:
        """Make written pages visible: (entry, chain, rooted, page indices, pages, last use) each.

        The last use is None for now.
        Slots of pages that another writer published first are given back.

        Returns
            for each group one bool a page: whether it is in the store now.
        """
        try:
            published = self.catalog.publish([pages for *_, pages, _ in groups])
        except (StoreFullError, DeviceError) as error:
            self._note_catalog_error(error)
            # A passing trouble must not make the store smaller, nor one that lies elsewhere.
            full = isinstance(error, StoreFullError) and not error.retryable
            if full or error.errno in DISK_FULL:
                self.catalog.note_full()
            for *_, pages, _ in groups:
                self.cancel(pages.slot)
            return [np.zeros(len(pages.slot), dtype=np.bool_) for *_, pages, _ in groups]
        stored = []
        with self.lock:
            for group, done in zip(groups, published, strict=True):
                entry, keys, rooted, index, pages, used_at = group
                generation = done.record["generation"].astype(np.uint64)
                self.space.commit(pages.slot[done.taken], generation[done.taken])
                self._owned[entry.digest] += int(np.count_nonzero(done.taken))
                self.space.cancel(pages.slot[~done.taken])
                first, stop = int(index[0]), int(index[-1]) + 1
                where = Locations.absent(stop - first)
                found = _locations(done.record)
                # Another writer's record may be of another page whose key collides, or on its way
                # out of the store.
                good = _same_pages(done.record, entry, pages.page_keys)
                good &= self.space.holds(found.slot, found.generation)
                good &= ~_are_in(self._leaving, found.generation)
                found.slot[~good] = NO_SLOT
                stored.append(good)
                where.slot[index - first] = found.slot
                where.checksum[index - first] = found.checksum
                where.generation[index - first] = found.generation
                now = self._tick() if used_at is None else min(used_at, self._tick())
                entry.pages.insert(keys[: stop * entry.key_bytes], first, rooted, where, now)
        return stored

    def remove_dropped(self, entry: Entry, pages: list[tuple[bytes, int, int]]) -> None:
        """Remove pages that turned out unreadable: (record key, slot, generation) each."""
        mine: list[tuple[bytes, int, int]] = []
        others: list[tuple[bytes, int, int]] = []
        with self.lock:
            for page in dict.fromkeys(pages):
                (mine if self.space.holds_page(*page[1:]) else others).append(page)
            self.space.retire(np.array([slot for _, slot, _ in mine], dtype=np.uint64))
            self._owned[entry.digest] -= len(mine)
        if mine:
            self._remove_retired(mine)
        self.catalog.remove(others)
        with self.lock:
            self._leaving.difference_update(generation for *_, generation in pages)

    def clear(self, entry: Entry) -> int:
        """Remove every page of a namespace; returns how many records went.

        What other processes save from now on stays.
        """
        self.restored.wait()
        while self._scan_segment():
            pass
        until = self._announce_clear(entry)
        self._empty(entry)
        with self.lock:
            expired_pages, self._expired = self._expired, []
        self._unremoved += expired_pages
        count = 0
        for keys, records, _ in self.catalog.scan_records(_RESTORE_CHUNK):
            mine = records["namespace"] == np.void(entry.digest)
            mine &= records["generation"] <= until
            if batch := _pages(np.frombuffer(keys, dtype="V16"), records, np.flatnonzero(mine)):
                self.remove_dropped(entry, batch)
                count += len(batch)
        if self._unremoved:
            self._remove_retired([])
        self._empty(entry)  # of what look-ups found in the catalog meanwhile
        self._remove_cleared()
        return count

    def _announce_clear(self, entry: Entry) -> int:
        """Let all processes know; returns the generation up to which pages go."""
        try:
            until = self.catalog.note_clear(entry.digest)
        except StoreFullError:  # no room for the note; the others find out when a load fails
            until = self.catalog.sequence()
        with self.lock:
            entry.cleared = max(entry.cleared, until)
        return until

    def _empty(self, entry: Entry) -> None:
        with self.lock:
            entry.pages = self._emptied(entry)

    def _emptied(self, entry: Entry) -> NamespacePages:
        empty = self._new_pages(entry.page_bytes, entry.key_bytes)
        empty.pins = entry.pages.pins
        return empty

    def notice_clears(self) -> None:
        """Hide what another process has cleared. Any thread.

        Cost       a look at the clock; now and then a look-up in the catalog, see `clears.LOOK_NS`.
        """
        if time.monotonic_ns() < self._clears.due_ns:
            return
        with self.lock:
            namespaces = list(self._entries)
        marks = self._clears.look(namespaces)
        emptied: list[Entry] = []
        with self.lock:
            for digest, until in marks.items():
                entry = self._entries[digest]
                if until <= entry.cleared:
                    continue
                entry.cleared = until
                emptied.append(entry)
                if entry.pages.page_count:
                    self._clears.add(entry, entry.pages)
                    entry.pages = self._emptied(entry)
        for entry in emptied:
            self.count("clears_noticed", 1)
            if self.on_clear is not None:
                self.on_clear(entry)

    def _remove_cleared(self) -> None:
        """Give up the slots of what other processes have cleared; put back what came later."""
        if not self._clears.waiting:
            return
        self.restored.wait()
        while self._scan_segment():
            pass
        with self.lock:
            aside, leftover = self._clears.take()
            for tree in aside:
                tree.put_back(tree.entry.pages)
        for tree in aside:
            leftover.append((tree.entry, tree.cleared()))
        for entry, pages in leftover:
            self.remove_dropped(entry, pages)

    # ---- restart ----
    def restore(self) -> None:
        """Fill the trees from the catalog; runs once, in the background, after opening.

        What could not be read then is read when room is needed: a page in no tree is never evicted.
        """
        try:
            self.catalog.warm(lambda: self._stopping)
            parts: dict[bytes, list[tuple[bytes, Records]]] = {}
            damaged = 0
            for keys, records, unsound in self.catalog.scan_records(_RESTORE_CHUNK):
                if self._stopping:
                    return
                damaged += unsound
                for digest in set(records["namespace"].tolist()):
                    chosen = np.flatnonzero(records["namespace"] == np.void(digest))
                    rows = np.frombuffer(keys, dtype="V16")[chosen]
                    parts.setdefault(digest, []).append((rows.tobytes(), records[chosen]))
            descriptions = self.catalog.namespaces()
            for digest, chunks in parts.items():
                description = described(digest, descriptions.get(digest, b""))
                if description is None:
                    damaged += sum(len(records) for _, records in chunks)
                elif not self._stopping:
                    damaged += self._restore_namespace(digest, description, chunks)
            if damaged:
                self.count("damaged_records", damaged)
                logger.warning(
                    "%d records in the catalog are damaged, so their pages are misses; "
                    "`tutti verify --repair` drops them",
                    damaged,
                )
        except Exception:
            self._unrestored = True
            if not self._stopping:  # else the catalog was closed meanwhile
                logger.exception("the index could not be restored; look-ups go to the catalog")
        finally:
            self.restored.set()

    def _restore_namespace(
        self, digest: bytes, description: dict[str, Any], chunks: list[tuple[bytes, Records]]
    ) -> int:
        """Build a namespace's tree; returns how many records stand under a wrong key."""
        width = int(description["key_bytes"])
        records = np.concatenate([r for _, r in chunks])
        keys = np.frombuffer(b"".join(k for k, _ in chunks), dtype="V16")
        right = _named_right(digest, width, keys, records)
        damaged = int(np.count_nonzero(~right))
        cleared = self.catalog.cleared(digest)
        with self.lock:
            entry = self._entry(digest, description, cleared)
            old = records["generation"] <= cleared
            self._clears.add_leftover(entry, _pages(keys, records, np.flatnonzero(right & old)))
        right &= ~old
        if not right.all():
            keys, records = keys[right], records[right]
        policy = make_policy(self.rules.policy, self._capacity_pages(entry.page_bytes))
        restored = build_pages(width, keys.tobytes(), records, policy)
        restored.opened = self._opened
        with self.lock:
            if self._condemned:
                restored.drop_generations(set(self._condemned))
            if entry.cleared > cleared:  # just now
                self._clears.add(entry, restored)
                return damaged
            restored.absorb(entry.pages)
            entry.pages = restored
        return damaged

    def stop(self) -> None:
        """Ask a running `restore` to end soon."""
        self._stopping = True


def _are_in(known: Collection[int], generations: U64) -> npt.NDArray[np.bool_]:
    if not known:
        return np.zeros(len(generations), dtype=np.bool_)
    return np.array([g in known for g in generations.tolist()], dtype=np.bool_)


def _slot_bytes(page_bytes: int) -> int:
    return -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _locations(records: Records) -> Locations:
    return Locations(
        slots_of_records(records),
        records["checksum"].astype(np.uint64),
        records["generation"].astype(np.uint64),
    )


def _pages(
    record_keys: npt.NDArray[np.void], records: Records, index: npt.NDArray[np.intp]
) -> list[tuple[bytes, int, int]]:
    """Record key, slot and generation of some records."""
    slots, generations = slots_of_records(records), records["generation"]
    return [(record_keys[i].tobytes(), int(slots[i]), int(generations[i])) for i in index.tolist()]


def _named_right(
    digest: bytes, width: int, record_keys: npt.NDArray[np.void], records: Records
) -> npt.NDArray[np.bool_]:
    """Whether each record stands under its own key; under another it is damage, or a second one."""
    own = hashing.record_keys(digest, page_keys_of(records, width).tobytes(), width)
    return np.asarray(np.frombuffer(own, dtype="V16") == record_keys, dtype=np.bool_)


def _same_pages(records: Records, entry: Entry, keys: bytes) -> npt.NDArray[np.bool_]:
    """Whether each record is of exactly this namespace, page key and length; hashes may collide."""
    width = entry.key_bytes
    stored = page_keys_of(records, width)
    same = (stored == packed_rows(keys, width)).all(axis=1)
    same &= records["namespace"] == np.void(entry.digest)
    same &= records["length_bytes"] == entry.page_bytes
    return np.asarray(same, dtype=np.bool_)
