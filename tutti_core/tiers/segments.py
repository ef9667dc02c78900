"""Segments of one process: claiming unassigned ones, adopting those of the dead, reading slot maps.

A segment belongs to a lease and is cut into slots of one size; the catalog says both. All methods
belong to the store's saver thread. The store's lock is held for changes of the space map only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti_core.errors import DISK_FULL
from tutti_core.format import SegmentEntry
from tutti_core.index.catalog import Catalog, Records, slots_of_records
from tutti_core.io.transport import BLOCK_BYTES
from tutti_core.tiers.lease import Lease, try_lease
from tutti_core.tiers.pools import Layout, preallocate_segment
from tutti_core.tiers.space import Space

logger = logging.getLogger("tutti")

_CANDIDATES_MAX = 64
_DISK_FULL_PAUSE_S = 10.0
_CLAIM_PAUSE_S = 1.0
"""How long to leave the catalog in peace after it had no segment to give."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan found.

    adopted_keys, adopted_records   what the trees do not know: pages of a segment that was adopted.
    namespaces      of each page in the segment.
    """

    adopted_keys: npt.NDArray[np.void]
    adopted_records: Records
    namespaces: list[bytes]


class Segments:
    """Which segments this process owns, beyond those that are in the space map already.

    Parameters
        owned_max: segments that this process may own.
        space, lock: the store's space map and the lock that guards it.
        count: adds to a counter.
    """

    def __init__(
        self,
        layout: Layout,
        catalog: Catalog,
        lease: Lease,
        lease_folder: Path,
        owned_max: int,
        space: Space,
        lock: threading.Lock,
        count: Callable[[str, int], None],
    ) -> None:
        self._layout = layout
        self._catalog = catalog
        self._lease = lease
        self._lease_folder = lease_folder
        self._owned_max = owned_max
        self._space = space
        self._lock = lock
        self._count = count
        self._unscanned = {  # segments of this lease that are not in the space map yet
            number: entry
            for number, entry in catalog.segments().items()
            if entry.lease == lease.number and number < layout.segment_count
        }
        self._adopted: set[int] = set()  # of `_unscanned`, those whose pages the trees lack
        self.allocate: Callable[[int], None] = lambda n: preallocate_segment(layout, n)
        """Sets a segment's room aside; raises OSError."""
        self._unreturned: set[int] = set()  # claimed, without room on the disk
        self._no_claims_until_s = 0.0
        self._no_opening_until_s = 0.0
        self._no_adoption_until_s = 0.0

    def open_pools(self, slot_bytes: int) -> None:
        """See that every pool has room while there is unclaimed space, so that pages stripe."""
        with self._lock:
            have = self._space.pools_with_space(slot_bytes)
        now_s = time.monotonic()
        pause = now_s < max(self._no_claims_until_s, self._no_opening_until_s)
        if len(have | self._space.shut) == self._layout.pool_count or pause or self._unscanned:
            return
        for pool in range(self._layout.pool_count):
            if pool in self._space.shut:
                continue
            if pool not in have and not self.claim(slot_bytes, pool):
                self._no_opening_until_s = now_s + _CLAIM_PAUSE_S

    def claim_again(self) -> None:
        """Ask for segments without waiting for the pause after a full disk to be over."""
        self._no_claims_until_s = self._no_opening_until_s = 0.0

    @property
    def scanned(self) -> bool:
        """Whether all segments that this process owns are in the space map."""
        return not self._unscanned

    def scan_one(self) -> Scanned | None:
        """Read the slot map of one more segment that this lease owns already; None if all are."""
        if not self._unscanned:
            return None
        return self._take_over(*self._unscanned.popitem())

    def _take_over(self, number: int, entry: SegmentEntry) -> Scanned:
        """Put an owned segment into the space map, with the slots that the catalog has as used."""
        slot_bytes = entry.slot_blocks * BLOCK_BYTES
        used = self._catalog.slots_of(number)
        found, records = self._catalog.lookup(b"".join(used.values()))
        slots = np.fromiter(used, dtype=np.uint64, count=len(used))
        good = found & (slots < self._layout.segment_bytes // slot_bytes)
        good &= slots_of_records(records) == slots | np.uint64(number << 32)
        # What is cut for another size, or of a namespace that nothing describes, is damage.
        good &= -(-records["length_bytes"].astype(np.int64) // BLOCK_BYTES) == entry.slot_blocks
        described = self._catalog.namespaces()
        good &= np.array([n in described for n in records["namespace"].tolist()], dtype=np.bool_)
        generations = records["generation"][good].tolist()
        taken = dict(zip(slots[good].tolist(), generations, strict=True))
        lost = {slot: key for slot, key in used.items() if slot not in taken}
        if lost:
            self._catalog.remove_slots(number, lost)
            self._count("slots_reclaimed", len(lost))
        with self._lock:
            self._space.add(number, number % self._layout.pool_count, slot_bytes, taken)
        keys = np.array(list(used.values()), dtype="V16")
        new = good & (number in self._adopted)
        self._adopted.discard(number)
        return Scanned(keys[new], records[new], records["namespace"][good].tolist())

    def claim(self, slot_bytes: int, pool: int | None) -> bool:
        """Take an unassigned segment, or turn an empty one of ours to this slot size."""
        if time.monotonic() < self._no_claims_until_s:
            return self._recycle(slot_bytes)
        self._return_segments()
        assigned = self._catalog.segments()
        step = self._layout.pool_count if pool is not None else 1
        free = (s for s in range(pool or 0, self._layout.segment_count, step) if s not in assigned)
        shut = self._space.shut
        open_ones = (s for s in free if s % self._layout.pool_count not in shut)
        candidates = [s for s, _ in zip(open_ones, range(_CANDIDATES_MAX), strict=False)]
        wanted = SegmentEntry(self._lease.number, slot_bytes // BLOCK_BYTES)
        number = None
        if candidates or not shut:
            number = self._catalog.claim_segment(candidates, wanted, self._owned_max)
        if number is None:
            if pool is None and not shut:  # else there may be some once all devices are well
                self._no_claims_until_s = time.monotonic() + _CLAIM_PAUSE_S
            return self._recycle(slot_bytes)
        try:
            self.allocate(number)
        except OSError as error:
            self._unreturned.add(number)
            if error.errno in DISK_FULL:
                self._note_disk_full(error)
                self._return_segments()
                return self._recycle(slot_bytes)
            self._note_trouble(number, error)
            self._return_segments()
            return self.claim(slot_bytes, pool) if pool is None else False
        with self._lock:
            self._space.add(number, number % self._layout.pool_count, slot_bytes)
        return True

    def _return_segments(self) -> None:
        """Give back what was claimed in vain; where the catalog refuses, the next claim does it."""
        for number in list(self._unreturned):
            self._catalog.free_segment(number)
            self._unreturned.discard(number)

    def adopt(self) -> bool:
        """Take over the segments of leases whose processes are gone, up to this process's share."""
        if time.monotonic() < self._no_adoption_until_s:
            return False
        self._no_adoption_until_s = time.monotonic() + _CLAIM_PAUSE_S
        segments = self._catalog.segments()
        owned = sum(e.lease == self._lease.number for e in segments.values())
        adopted = False
        for number in {e.lease for e in segments.values()} - {self._lease.number}:
            lease = try_lease(self._lease_folder, number, self._layout.paths)
            if lease is None:
                continue
            try:
                for segment, old in segments.items():
                    known = segment < self._layout.segment_count  # else: grown by another process
                    if old.lease != number or not known or owned >= self._owned_max:
                        continue
                    new = SegmentEntry(self._lease.number, old.slot_blocks)
                    if self._catalog.reassign_segment(segment, old, new):
                        self._unscanned[segment] = new
                        self._adopted.add(segment)
                        owned += 1
                        adopted = True
            finally:
                lease.release()
        return adopted

    def _recycle(self, slot_bytes: int) -> bool:
        with self._lock:
            self._space.collect()
            empty = self._space.empty_segments(other_than=slot_bytes)
            if not empty:
                return False
            was = self._space.segments[empty[0]].slot_bytes
        old = SegmentEntry(self._lease.number, was // BLOCK_BYTES)
        new = SegmentEntry(self._lease.number, slot_bytes // BLOCK_BYTES)
        if not self._catalog.reassign_segment(empty[0], old, new):
            return False
        with self._lock:
            self._space.remove(empty[0])
            self._space.add(empty[0], empty[0] % self._layout.pool_count, slot_bytes)
        return True

    def _note_trouble(self, number: int, error: OSError) -> None:
        """The device refuses for another reason than a lack of room: evicting would not help."""
        self._count("preallocation_errors", 1)
        with self._lock:  # until the next save looks which devices are well
            self._space.shut |= {number % self._layout.pool_count}
        logger.warning("no room was set aside: %s", error.strerror)

    def _note_disk_full(self, error: OSError) -> None:
        self._count("disk_full", 1)
        self._no_claims_until_s = time.monotonic() + _DISK_FULL_PAUSE_S
        logger.warning(
            "the file system refuses more space below the configured capacity (%s); "
            "evicting instead",
            error.strerror,
        )
