"""A load whose pages come part by part: each part is started and finished by the caller.

The caller decides on order and depth, which is what lets the first layers of a prefix arrive while
the rest is under way. Pages that memory tiers hold are copied from there when their part is
finished. A part is right if its checksum is the one in the page's header; the header and part 0 are
right if the record says so.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tutti_core.arguments import count_of, seconds_of
from tutti_core.errors import BusyError, StoreClosedError
from tutti_core.format import PART_HEADER_BYTES
from tutti_core.geometry import PageFragments
from tutti_core.index.catalog import packed_rows
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.io.transport import Batch, BatchResult, Op, check_owner
from tutti_core.keys import PageKeys
from tutti_core.tiers.cipher import Rows, new_trailers, with_trailers
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

    load          whose part it is.
    low, high     positions of the pages in the load.
    address       where the part goes, (high - low, f).
    length_bytes  of the fragments of each page, (f,).
    first, stop   which of the load's device pages it reads.
    ticket        of the transfer; None where all pages come from memory, or once it has ended.
    submitted_s   when that was started, by the monotonic clock.
    trailers      of an encrypted part, read with it.
    """

    load: PartsLoad
    part: int
    low: int
    high: int
    address: U64
    length_bytes: U64
    first: int
    stop: int
    ticket: int | None = None
    submitted_s: float = 0.0
    trailers: Rows | None = None


class PartsLoad:
    """The pages of one `load_parts`: start and finish their parts, then end it.

    Memory of a part that is not reported right is undefined and must not be used.
    Threads    one at a time; the store may be closed by another meanwhile.
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
        self._lock = threading.Lock()  # between who uses the load and who closes the store
        self._ended = False
        self._abandoned = False
        self._at = np.flatnonzero(where.slot != NO_SLOT)
        """Positions of the pages that are read from the devices, rising."""
        self._where = where.select(self._at)
        self._device, self._offset = loader.extents(entry, self._where)
        self._headers = aligned_blocks(len(self._at))
        self._header_at = block_addresses(self._headers)
        self._expected = np.zeros((self._parts.count, len(self._at)), dtype=np.uint64)
        """Checksum of each part of each device page; known once part 0 of the page has arrived."""
        self._opened = np.zeros(len(self._at), dtype=np.bool_)
        """Of which device pages part 0 was finished."""
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
            ValueError: no such part or pages, or no memory for them; the load has ended.
            StoreClosedError: the store was closed.
        """
        check_owner(self._loader.pid)
        with self._lock:
            if self._abandoned:
                raise StoreClosedError("the store is closed", op="load")
            return self._start(part, low, high, address)

    def _start(self, part: int, low: int, high: int | None, address: U64 | None) -> Reading:
        count = len(self.found)
        part, low = count_of(part, "part"), count_of(low, "low")
        high = count if high is None else count_of(high, "high")
        if not (part < self.part_count and low <= high <= count) or self._ended:
            raise ValueError(f"part {part} of pages {low} .. {high} of {count}: there is no such")
        i, j = np.searchsorted(self._at, (low, high)).tolist()
        reading = Reading(self, part, low, high, *self._target(part, low, high, address), i, j)
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
        Part 0 of a page has to be finished before its other parts are; else they are False. So are
        all once the store was closed.

        Raises
            BusyError: not finished after `timeout_s`; call again. The memory is still written to.
            ValueError: not a reading of this load.
            StoreClosedError: in a forked child.
        """
        timeout_s = seconds_of(timeout_s)
        if not isinstance(reading, Reading) or reading.load is not self:
            raise ValueError("this is not a reading of this load")
        check_owner(self._loader.pid)
        with self._lock:  # who closes the store waits for it no longer than it may
            return self._finish(reading, timeout_s)

    def _finish(self, reading: Reading, timeout_s: float) -> Mask:
        if reading.ticket is not None:
            result = self._loader.transport.wait(reading.ticket, timeout_s)
            if result is None:
                self._late(reading)
                raise BusyError(f"a part is not there after {timeout_s} s", op="load")
            reading.ticket = None
            self._loader.end_batch()
            self._loader.note_read(self._devices_of(reading), result.status)
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
        if self._loader.pid != os.getpid():
            return
        with self._lock:
            self._end()

    def _end(self) -> None:
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

    def abandon(self, deadline_s: float) -> bool:
        """For the store's close: end it, once what is in flight has arrived.

        Returns
            False if that takes longer than to `deadline_s`, a moment of the monotonic clock.
        """
        if not self._lock.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
            return False
        try:
            for reading in self._in_flight:
                if reading.ticket is not None:
                    left_s = max(deadline_s - time.monotonic(), 0.0)
                    if self._loader.transport.wait(reading.ticket, left_s) is None:
                        return False
                    reading.ticket = None
                    self._loader.end_batch()
            if not self._ended:
                self._ended = self._abandoned = True
                self._in_flight.clear()
                self._good[:] = False  # what arrived was not looked at
                for hit in self._hits:
                    hit.end()
                self._loader.forget_parts(self, self._started)
            return True
        finally:
            self._lock.release()

    # ---- inside ----
    def _fragment_ranges(self, memory: PageFragments | None) -> list[tuple[int, int]]:
        if memory is None:
            return []
        return self._parts.fragment_ranges(memory.length_bytes)

    def _target(self, part: int, low: int, high: int, address: U64 | None) -> tuple[U64, U64]:
        """Addresses of the pages' fragments of a part, and their lengths."""
        if address is not None:
            if not isinstance(address, np.ndarray):
                raise ValueError(f"addresses are an array, not {type(address).__name__}")
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
        address = self._device_rows(reading)
        if self._entry.cipher is not None:
            reading.trailers = new_trailers(j - i)
            address, lengths = with_trailers(address, lengths, reading.trailers)
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

    def _device_rows(self, reading: Reading) -> U64:
        """Where the part of each page goes that is read from the devices."""
        i, j = reading.first, reading.stop
        if j - i == len(reading.address):
            return reading.address
        return reading.address[self._at[i:j] - reading.low]

    def _late(self, reading: Reading) -> None:
        device = self._devices_of(reading)
        self._loader.note_late(device, reading.submitted_s, self._where, self._started)

    def _devices_of(self, reading: Reading) -> npt.NDArray[np.uint32]:
        return self._device[reading.first : reading.stop]

    def _judge(self, reading: Reading, result: BatchResult) -> None:
        """Take pages whose part is not right off the good ones; the store forgets them."""
        i, j = reading.first, reading.stop
        if reading.part == 0:
            self._expected[:, i:j] = self._parts.expected(self._headers[i:j]).T
            self._expected[0, i:j] = self._where.checksum[i:j]
            self._opened[i:j] = True
        right = np.array_equal(result.checksum, self._expected[reading.part, i:j])
        if right and self._loader.verify and not result.status.any():
            known = self._decrypt(reading, np.arange(j - i))
            if known.all():
                return
        else:
            known = None
        part = np.arange(i, j)
        if reading.part > 0:
            # Of a page whose part 0 was wrong, or is not there yet, the header is noise: nothing is
            # learnt of it.
            self._good[self._at[part[~self._opened[part]]]] = False
            part = part[self._good[self._at[part]]]
        where = self._where.select(part)
        where.checksum[:] = self._expected[reading.part, part]
        result = BatchResult(result.status[part - i], result.checksum[part - i])
        if len(part) == 0:
            return

        def decrypt(chosen: npt.NDArray[np.intp]) -> Mask:
            at = part[chosen] - i
            return known[at] if known is not None else self._decrypt(reading, at)

        good = self._loader.judge(
            self._entry,
            self._keys,
            self._first,
            self._at[part],
            where,
            result,
            self._started,
            confirm_all=False,
            decrypt=decrypt,
        )
        self._good[self._at[part[~good]]] = False

    def _decrypt(self, reading: Reading, at: npt.NDArray[np.intp]) -> Mask:
        """Decrypt the part of some of the pages that were read; returns which were right."""
        cipher = self._entry.cipher
        if cipher is None or reading.trailers is None:
            return np.ones(len(at), dtype=np.bool_)
        pages = self._at[reading.first + at] + self._first
        return cipher.decrypt(
            packed_rows(self._keys.data, self._keys.width)[pages],
            reading.part,
            self._device_rows(reading)[at],
            reading.length_bytes,
            reading.trailers[at],
        )

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
