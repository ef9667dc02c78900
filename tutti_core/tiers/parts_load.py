"""A load whose pages come part by part: each part is started and finished by the caller.

The caller decides on order and depth, which is what lets the first layers of a prefix arrive while
the rest is under way. Pages that memory tiers hold are copied from there when their part is
finished. A part is right if its checksum is the one in the page's header; the header and part 0 are
right if the record says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tutti_core.errors import BusyError
from tutti_core.format import PART_HEADER_BYTES
from tutti_core.geometry import PageFragments
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.io.transport import Batch, BatchResult, Op
from tutti_core.keys import PageKeys
from tutti_core.tiers.manager import Entry
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.parts import aligned_blocks, block_addresses
from tutti_core.tiers.saver import page_batch
from tutti_core.tiers.stack import Hit, pieces

if TYPE_CHECKING:
    from tutti_core.tiers.loader import Loader

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Reading:
    """One part of some pages on its way; made by `PartsLoad.start`.

    low, high     positions of the pages in the load.
    address       where the part goes, (high - low, f).
    length_bytes  of the fragments of each page, (f,).
    first, stop   which of the load's device pages it reads.
    ticket        of the transfer; None where all pages come from memory, or once it has ended.
    submitted_s   when that was started, by the monotonic clock.
    """

    part: int
    low: int
    high: int
    address: U64
    length_bytes: U64
    first: int
    stop: int
    ticket: int | None = None
    submitted_s: float = 0.0


class PartsLoad:
    """The pages of one `load_parts`: start and finish their parts, then end it.

    Memory of a part that is not reported right is undefined and must not be used.
    Threads    one at a time.
    """

    def __init__(
        self,
        loader: Loader,
        entry: Entry,
        keys: PageKeys,
        first: int,
        where: Locations,
        hits: list[Hit],
        started: int,
        memory: PageFragments | None,
    ) -> None:
        assert entry.parts is not None
        self._loader = loader
        self._entry = entry
        self._parts = entry.parts
        self._keys = keys
        self._first = first
        self._started = started
        self._hits = hits
        self._memory = memory
        self._ended = False
        self._at = np.flatnonzero(where.slot != NO_SLOT)
        """Positions of the pages that are read from the devices, rising."""
        self._where = where.select(self._at)
        self._device, self._offset = loader.extents(entry, self._where)
        self._headers = aligned_blocks(len(self._at))
        self._header_at = block_addresses(self._headers)
        self._expected = np.zeros((self._parts.count, len(self._at)), dtype=np.uint64)
        """Checksum of each part of each device page; known once part 0 of the page has arrived."""
        self._ranges = self._fragment_ranges(memory)
        self.found = np.asarray(where.slot != NO_SLOT, dtype=np.bool_)
        for hit in hits:
            self.found[hit.pages] = True
        self._good = self.found.copy()
        self._parts_done = np.zeros(len(where), dtype=np.int64)
        self._in_flight: list[Reading] = []

    @property
    def part_count(self) -> int:
        """Parts of a page."""
        return self._parts.count

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Length of each part."""
        return self._parts.part_bytes

    def start(
        self, part: int, low: int = 0, high: int | None = None, address: U64 | None = None
    ) -> Reading:
        """Start reading a part of pages `low` .. `high` - 1 (default: all); never blocks.

        Parameters
            address: (high - low, f) uint64, where it goes instead of the memory of the load; the
                fragments are equally long.
        Raises
            BusyError: too many transfers are in flight; nothing was started. Finish one first.
            ValueError: no such part or pages, or no memory for them.
            StoreClosedError: the store was closed.
        """
        count = len(self.found)
        high = count if high is None else high
        if not (0 <= part < self.part_count and 0 <= low <= high <= count) or self._ended:
            raise ValueError(f"part {part} of pages {low} .. {high} of {count}: there is no such")
        i, j = np.searchsorted(self._at, (low, high)).tolist()
        reading = Reading(part, low, high, *self._target(part, low, high, address), i, j)
        if i < j:
            batch = self._batch(reading)
            reading.ticket = self._loader.submit(batch)
            if reading.ticket is None:
                raise BusyError("too many transfers are in flight", op="load")
            reading.submitted_s = time.monotonic()
        self._in_flight.append(reading)
        return reading

    def finish(self, reading: Reading, timeout_s: float) -> Mask:
        """Wait for a part; returns one bool for each of its pages.

        True: this part, and every part of the page that was finished before, is in place and right.
        Part 0 of a page has to be finished before its other parts are.

        Raises
            BusyError: not finished after `timeout_s`; call again. The memory is still written to.
        """
        if reading.ticket is not None:
            result = self._loader.transport.wait(reading.ticket, timeout_s)
            if result is None:
                self._loader.note_late(self._devices_of(reading), reading.submitted_s)
                raise BusyError(f"a part is not there after {timeout_s} s", op="load")
            reading.ticket = None
            self._loader.end_batch()
            self._loader.health.note(Op.READ, self._devices_of(reading), result.status)
            self._judge(reading, result)
        if reading in self._in_flight:
            self._in_flight.remove(reading)
            self._copy(reading)
            self._parts_done[reading.low : reading.high] += 1
        return self._good[reading.low : reading.high].copy()

    def end(self) -> None:
        """Give back what protects the pages. Every reading must have been finished. Idempotent.

        Raises
            BusyError: a reading is still under way.
        """
        if self._ended:
            return
        if any(reading.ticket is not None for reading in self._in_flight):
            raise BusyError("a part is still being read", op="load")
        self._ended = True
        for hit in self._hits:
            hit.end()
        self._loader.forget_parts(self, self._started)
        whole = self._good & (self._parts_done >= self.part_count)
        self._loader.count("loaded_pages", int(np.count_nonzero(whole)))
        for hit in self._hits:
            self._arrived(hit.pages[whole[hit.pages]], hit.tier)
        self._arrived(self._at[whole[self._at]], None)

    def abandon(self, deadline_s: float) -> None:
        """For the store's close: wait for what is in flight, to a moment of the monotonic clock."""
        for reading in list(self._in_flight):
            if reading.ticket is not None:
                left_s = max(deadline_s - time.monotonic(), 0.0)
                if self._loader.transport.wait(reading.ticket, left_s) is None:
                    return
                reading.ticket = None
                self._loader.end_batch()
        if not self._ended:
            self._ended = True
            for hit in self._hits:
                hit.end()
            self._loader.forget_parts(self, self._started)

    # ---- inside ----
    def _fragment_ranges(self, memory: PageFragments | None) -> list[tuple[int, int]]:
        if memory is None:
            return []
        return self._parts.fragment_ranges(memory.length_bytes)

    def _target(self, part: int, low: int, high: int, address: U64 | None) -> tuple[U64, U64]:
        """Addresses of the pages' fragments of a part, and their lengths."""
        if address is not None:
            if address.ndim != 2 or len(address) != high - low or address.dtype != np.uint64:
                raise ValueError(f"addresses of {high - low} pages as (pages, fragments) uint64")
            each = address.shape[1]
            size = self._parts.part_bytes[part]
            if each == 0 or size % each:
                raise ValueError(f"a part of {size} bytes in {each} equal fragments")
            return address, np.full(each, size // each, dtype=np.uint64)
        if self._memory is None:
            raise ValueError("the load has no memory; pass addresses")
        first, stop = self._ranges[part]
        lengths = self._memory.length_bytes[first:stop]
        return self._memory.address[low:high, first:stop], lengths

    def _batch(self, reading: Reading) -> Batch:
        """The read of one part of device pages; that of part 0 brings the header."""
        i, j = reading.first, reading.stop
        start, lengths = self._parts.offset_bytes[reading.part], reading.length_bytes
        address = reading.address
        if j - i < len(address):
            address = address[self._at[i:j] - reading.low]
        if reading.part == 0:
            start -= PART_HEADER_BYTES
            address = np.concatenate((self._header_at[i:j, None], address), axis=1)
            lengths = np.concatenate((np.array([PART_HEADER_BYTES], dtype=np.uint64), lengths))
        return page_batch(
            Op.READ,
            self._device[i:j],
            self._offset[i:j] + np.uint64(start),
            PageFragments(address, lengths),
            j - i,
            self._loader.verify,
        )

    def _devices_of(self, reading: Reading) -> npt.NDArray[np.uint32]:
        return self._device[reading.first : reading.stop]

    def _judge(self, reading: Reading, result: BatchResult) -> None:
        """Take pages whose part is not right off the good ones; the store forgets them."""
        i, j = reading.first, reading.stop
        if reading.part == 0:
            self._expected[:, i:j] = self._parts.expected(self._headers[i:j]).T
            self._expected[0, i:j] = self._where.checksum[i:j]
        right = np.array_equal(result.checksum, self._expected[reading.part, i:j])
        if right and self._loader.verify and not result.status.any():
            return
        part = np.arange(i, j)
        if reading.part > 0:
            # Of a page whose part 0 was wrong the header is noise: nothing new is learnt of it.
            part = part[self._good[self._at[part]]]
        where = self._where.select(part)
        where.checksum[:] = self._expected[reading.part, part]
        result = BatchResult(result.status[part - i], result.checksum[part - i])
        if len(part) == 0:
            return
        good = self._loader.judge(
            self._entry,
            self._keys,
            self._first,
            self._at[part],
            where,
            result,
            self._started,
            confirm_all=False,
        )
        self._good[self._at[part[~good]]] = False

    def _copy(self, reading: Reading) -> None:
        """Bring what memory tiers hold of a part into place."""
        for hit in self._hits:
            i, j = np.searchsorted(hit.pages, (reading.low, reading.high)).tolist()
            if i == j:
                continue
            start = hit.tier.addresses(hit.slots[i:j], self._entry.slot_bytes)
            start += np.uint64(self._parts.offset_bytes[reading.part])
            target = reading.address[hit.pages[i:j] - reading.low]
            inside, outside, length = pieces(start, target, reading.length_bytes)
            try:
                hit.tier.arena.copy(outside, inside, length)
            except OSError:
                self._loader.count("copy_errors", j - i)
                self._good[hit.pages[i:j]] = False

    def _arrived(self, pages: npt.NDArray[np.intp], tier: MemoryTier | None) -> None:
        if tier is not None:
            with tier.lock:
                tier.counters["hits"] += len(pages)
        self._loader.arrived(self._entry, self._keys, self._first, pages, tier)
