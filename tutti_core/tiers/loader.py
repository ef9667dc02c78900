"""Loads: one ticket a load, whose pages come from the devices, from memory tiers, or from both.

What memory tiers hold is copied and the rest is read in one batch, both at once. A page is good if
it was copied whole, or if it was read, its checksum is right and its record has not changed. Pages
that fail are forgotten at once and their records removed soon.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tutti_core.arguments import seconds_of
from tutti_core.errors import BusyError
from tutti_core.geometry import PageFragments
from tutti_core.index.catalog import packed_rows, record_key_at
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.io.transport import Batch, BatchResult, Op, Transport, check_owner, start_batch
from tutti_core.keys import PageKeys
from tutti_core.tiers.cipher import Rows, new_trailers, with_trailers
from tutti_core.tiers.copier import Copy
from tutti_core.tiers.health import Health
from tutti_core.tiers.manager import Entry, Manager
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.mover import LoadGate
from tutti_core.tiers.parts_load import PartsLoad
from tutti_core.tiers.saver import DropJob, Saver, page_batch
from tutti_core.tiers.stack import Hit, TierStack
from tutti_core.tiers.suspects import Suspects

logger = logging.getLogger("tutti")

U64 = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_NOT_THE_PAGE = [-errno.EAGAIN, -errno.EINTR, -errno.ENOMEM, -errno.EFAULT]
"""Failures of a read that say nothing against the page: a passing shortage, the caller's memory."""


@dataclass(slots=True)
class _Transfer:
    """The part of a load that is read from the devices; `memory` is kept alive by it.

    trailers   of encrypted pages, read with them.
    """

    ticket: int
    started: int
    pages: Indices
    where: Locations
    memory: PageFragments
    device: npt.NDArray[np.uint32]
    submitted_s: float
    trailers: Rows | None = None


@dataclass(slots=True)
class _CopyOut:
    """A part of a load that is copied from a memory tier."""

    copy: Copy
    pages: Indices
    tier: MemoryTier


class LoadTicket:
    """Outcome of one `load`: True for each page whose memory holds the page that was asked for.

    Memory of a page that reports False is undefined and must not be used.
    Threads    any may wait; all see the same result.
    """

    def __init__(
        self, loader: Loader, entry: Entry, keys: PageKeys, first: int, count: int
    ) -> None:
        self._loader = loader
        self._entry = entry
        self._keys = keys
        self._first = first
        self._lock = threading.Lock()
        self._loaded = np.zeros(count, dtype=np.bool_)
        self._transfer: _Transfer | None = None
        self._copies: list[_CopyOut] = []
        self._ended = True  # until something is attached

    def done(self) -> bool:
        """Whether the result is there; waits for nothing. Pages that have arrived are decrypted."""
        return self._advance(0.0, 0.0)

    def wait(self, timeout_s: float | None = None) -> Mask:
        """Return one bool a page.

        Raises
            BusyError: not finished after `timeout_s`; wait again. The memory is still being written
                to and must not be reused.
            StoreClosedError: in a forked child, whose parent alone will hear the result.
        """
        timeout_s = self._loader.io_timeout_s if timeout_s is None else seconds_of(timeout_s)
        if not self._advance(timeout_s, timeout_s):
            raise BusyError(f"the load is not finished after {timeout_s} s", op="load")
        return self._loaded

    def _advance(self, lock_timeout_s: float, timeout_s: float) -> bool:
        """Collect the parts' results if they end in time; True when all are there."""
        if self._ended:
            return True
        check_owner(self._loader.pid)
        if not self._lock.acquire(timeout=min(max(lock_timeout_s, 0.0), threading.TIMEOUT_MAX)):
            return self._ended
        try:
            if self._ended:
                return True
            deadline_s = time.monotonic() + timeout_s
            if not self._advance_copies(timeout_s):
                return False
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if self._transfer is not None and not self._advance_transfer(self._transfer, left_s):
                return False
            self._ended = True
            self._loader.forget(self)
            return True
        finally:
            self._lock.release()

    def _advance_copies(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._copies:
            part = self._copies[-1]
            if not part.copy.wait(deadline_s - time.monotonic() if timeout_s else 0.0):
                return False
            self._copies.pop()
            if not part.copy.failed:
                self._loaded[part.pages] = True
                self._loader.arrived(self._entry, self._keys, self._first, part.pages, part.tier)
        return True

    def _advance_transfer(self, transfer: _Transfer, timeout_s: float) -> bool:
        result = self._loader.transport.wait(transfer.ticket, timeout_s)
        if result is None:
            where, started = transfer.where, transfer.started
            self._loader.note_late(transfer.device, transfer.submitted_s, where, started)
            return False
        self._loader.note_read(transfer.device, result.status)
        try:
            good = self._loader.judge(
                self._entry,
                self._keys,
                self._first,
                transfer.pages,
                transfer.where,
                result,
                transfer.started,
                decrypt=partial(self._decrypt, transfer),
            )
            self._loaded[transfer.pages] = good
            self._loader.count("loaded_pages", int(np.count_nonzero(good)))
        finally:
            self._transfer = None
            self._ended = not self._copies
            self._loader.end_read(transfer.started)
        self._loader.arrived(self._entry, self._keys, self._first, transfer.pages[good], None)
        return True

    def _decrypt(self, transfer: _Transfer, at: Indices) -> Mask:
        """Decrypt some of the pages that were read; returns which were right."""
        cipher, trailers = self._entry.cipher, transfer.trailers
        if cipher is None or trailers is None:
            return np.ones(len(at), dtype=np.bool_)
        keys = packed_rows(self._keys.data, self._keys.width)[transfer.pages[at] + self._first]
        memory = transfer.memory
        return cipher.decrypt(keys, 0, memory.address[at], memory.length_bytes, trailers[at])


class Loader:
    """Starts and ends the loads of one store.

    Parameters
        verify: compare the checksums of pages that are read from the devices.
        stack: the memory tiers, where there are any.
        gate: told of each load that uses the devices.
        health: told how reads end.
    Threads    any.
    """

    def __init__(
        self,
        manager: Manager,
        transport: Transport,
        gate: LoadGate,
        health: Health,
        *,
        verify: bool,
        io_timeout_s: float,
        stack: TierStack | None = None,
    ) -> None:
        self.transport = transport
        self.pid = os.getpid()
        self.io_timeout_s = io_timeout_s
        self.saver: Saver
        self.health = health
        self._manager = manager
        self._gate = gate
        self.verify = verify
        self._stack = stack
        self._lock = threading.Lock()
        self._loads: set[LoadTicket] = set()  # keeps their memory alive until they end
        self._parts_loads: set[PartsLoad] = set()
        self._suspects = Suspects()
        health.recovered = self._note_recovered

    def start(self, entry: Entry, keys: PageKeys, first: int, memory: PageFragments) -> LoadTicket:
        """Start loading the pages from `first` on; returns at once."""
        ticket = LoadTicket(self, entry, keys, first, len(keys) - first)
        if self._stack is None:
            self._read(ticket, entry, keys, first, memory, None)
        else:
            self._load_from_all(self._stack, ticket, entry, keys, first, memory)
        if ticket._transfer is not None or ticket._copies:
            ticket._ended = False
            with self._lock:
                self._loads.add(ticket)
        return ticket

    def start_parts(
        self, entry: Entry, keys: PageKeys, first: int, memory: PageFragments | None
    ) -> PartsLoad:
        """Find the pages from `first` on, for reading them part by part; reads nothing yet."""
        count = len(keys) - first
        started = self._manager.begin_load()
        hits: list[Hit] = []
        try:
            if self._stack is None:
                where = self._manager.locate(entry, keys.data, first, keys.rooted)
            else:
                hits, wanted = self._stack.take(entry, keys.data, first, keys.rooted)
                where = Locations.absent(count)
                if wanted.any():
                    pages, found = self._stack.find_wanted(
                        entry, keys.data, first, keys.rooted, wanted, hits
                    )
                    where.put(pages, found)
        except BaseException:
            if self._stack is not None:
                self._stack.give_back(hits)
            self._manager.end_load(started)
            raise
        load = PartsLoad(self, entry, keys, first, where, hits, started, memory)
        self.count("missed_pages", count - int(np.count_nonzero(load.found)))
        with self._lock:
            self._parts_loads.add(load)
        return load

    def sweep(self) -> None:
        """Collect loads that have ended but that nobody waited for."""
        for ticket in self.in_flight():
            ticket._advance(0.0, 0.0)

    def in_flight(self) -> list[LoadTicket]:
        """The loads that have not been collected."""
        with self._lock:
            return list(self._loads)

    def wait_all(self, deadline_s: float) -> bool:
        """Collect what ends before a moment of the monotonic clock; whether that is all."""
        over = True
        for ticket in self.in_flight():
            left_s = max(deadline_s - time.monotonic(), 0.0)
            over &= ticket._advance(left_s, left_s)
        with self._lock:
            unfinished = list(self._parts_loads)
        for load in unfinished:
            over &= load.abandon(deadline_s)
        return over

    # ---- starting ----
    def _load_from_all(
        self,
        stack: TierStack,
        ticket: LoadTicket,
        entry: Entry,
        keys: PageKeys,
        first: int,
        memory: PageFragments,
    ) -> None:
        hits, wanted = stack.take(entry, keys.data, first, keys.rooted)
        try:
            if wanted.any():
                self._read(ticket, entry, keys, first, memory, (wanted, hits))
        except BaseException:
            stack.give_back(hits)
            raise
        for hit in hits:
            part = memory if len(hit.pages) == memory.page_count else memory.select(hit.pages)
            for copy, pages in stack.copy_out(entry, hit, part):
                ticket._copies.append(_CopyOut(copy, pages, hit.tier))
            self._manager.count("loaded_pages", len(hit.pages))
        if wanted.any():
            self._manager.count("missed_pages", int(np.count_nonzero(wanted)))

    def _read(
        self,
        ticket: LoadTicket,
        entry: Entry,
        keys: PageKeys,
        first: int,
        memory: PageFragments,
        taken: tuple[Mask, list[Hit]] | None,
    ) -> None:
        """Start reading pages from the devices: what `take` left wanted, of which it takes off
        what is found; or all (None).
        """
        started = self._manager.begin_load()
        try:
            if self._stack is None or taken is None:
                where = self._manager.locate(entry, keys.data, first, keys.rooted)
                present = np.flatnonzero(where.slot != NO_SLOT)
                self._manager.count("missed_pages", len(where) - len(present))
                where = where.select(present)
            else:
                present, where = self._stack.find_wanted(
                    entry, keys.data, first, keys.rooted, *taken
                )
            if len(present) == 0:
                self._manager.end_load(started)
                return
            device, offset = self._manager.extents(where.slot, entry.slot_bytes)
            memory = memory.select(present)
            trailers, target = None, memory
            if entry.cipher is not None:
                trailers = new_trailers(len(present))
                target = PageFragments(
                    *with_trailers(memory.address, memory.length_bytes, trailers)
                )
            batch = page_batch(Op.READ, device, offset, target, len(present), self.verify)
            transfer = self.submit(batch)
        except BaseException:
            self._manager.end_load(started)
            raise
        if transfer is None:
            self._manager.count("loads_refused_busy", len(present))
            self._manager.end_load(started)
        else:
            ticket._transfer = _Transfer(
                transfer, started, present, where, memory, device, time.monotonic(), trailers
            )

    def submit(self, batch: Batch) -> int | None:
        """Start a batch; None when too many are in flight even after collecting finished ones.

        None, too, where the transport fails to take it.
        """
        ticket: int | None = None
        self._gate.begin()
        try:
            try:
                ticket = start_batch(self.transport, batch, self.count)
            except BusyError:
                self.sweep()
                with contextlib.suppress(BusyError):
                    ticket = start_batch(self.transport, batch, self.count)
        finally:
            if ticket is None:
                self._gate.end()
        return ticket

    def extents(self, entry: Entry, where: Locations) -> tuple[npt.NDArray[np.uint32], U64]:
        """Device and byte offset of pages."""
        return self._manager.extents(where.slot, entry.slot_bytes)

    # ---- ending ----
    def forget(self, ticket: LoadTicket) -> None:
        """All parts of a load have ended."""
        with self._lock:
            self._loads.discard(ticket)

    def forget_parts(self, load: PartsLoad, started: int) -> None:
        """A load in parts reads nothing any more."""
        self._manager.end_load(started)
        with self._lock:
            self._parts_loads.discard(load)

    def end_read(self, started: int) -> None:
        """A load does not use the devices any more."""
        self._manager.end_load(started)
        self._gate.end()

    def note_read(self, device: npt.NDArray[np.uint32], status: npt.NDArray[np.int32]) -> None:
        """A read has ended; before `judge` is asked about it."""
        self.health.note(Op.READ, device, status)
        self._manager.forgive(self._suspects.witness(device, status))

    def _note_recovered(self, op: Op, device: int, was_unwell: bool) -> None:
        if op is Op.READ:
            self._manager.forgive(self._suspects.release(device, its_fault=was_unwell))

    def note_late(
        self, device: npt.NDArray[np.uint32], submitted_s: float, where: Locations, started: int
    ) -> None:
        """A read of pages is not over: its devices are unwell if that takes too long."""
        if time.monotonic() - submitted_s >= self.io_timeout_s:
            self.health.note_late(device.tolist())
            if not self.health.unwell_reads.isdisjoint(device.tolist()):
                self._manager.narrow_load(started, where.slot)

    def end_batch(self) -> None:
        """A batch that `submit` started has ended."""
        self._gate.end()

    def count(self, name: str, amount: int) -> None:
        """Add to a counter of the store."""
        self._manager.count(name, amount)

    def arrived(
        self, entry: Entry, keys: PageKeys, first: int, pages: Indices, tier: MemoryTier | None
    ) -> None:
        """Pages of a load have arrived from a tier (None: the devices): they may move up."""
        if self._stack is not None:
            self._stack.loaded(entry, keys, pages + first, tier)

    def judge(
        self,
        entry: Entry,
        keys: PageKeys,
        first: int,
        pages: Indices,
        where: Locations,
        result: BatchResult,
        started: int,
        decrypt: Callable[[Indices], Mask],
        confirm_all: bool = True,
    ) -> Mask:
        """Which pages of a finished read are good; the others are forgotten.

        Parameters
            decrypt: decrypts those at some positions, and tells which were right.
            where: with the checksums that the bytes must have.
            confirm_all: see that the records are still there also of pages whose bytes are right.
        """
        count = self._manager.count
        read = result.status == 0
        good = read.copy()
        if self.verify:
            good &= result.checksum == where.checksum
        whole = good.copy()
        chosen = np.flatnonzero(whole)
        good[chosen] = decrypt(chosen)
        index = pages + first
        valid = np.ones(len(pages), dtype=np.bool_)
        doubtful = (
            np.flatnonzero(~good) if self.verify and not confirm_all else np.arange(len(good))
        )
        if len(doubtful):
            valid[doubtful] = self._manager.still_there(
                entry, keys.data, index[doubtful], where.select(doubtful), started
            )
        count("read_errors", int(np.count_nonzero(~read)))
        count("checksum_errors", int(np.count_nonzero(read & ~whole & valid)))
        count("decryption_errors", int(np.count_nonzero(whole & ~good & valid)))
        bad = np.flatnonzero(~(good & valid) & ~np.isin(result.status, _NOT_THE_PAGE))
        bad = self._blamed(entry, bad, where, result)
        if len(bad):
            device, _ = self._manager.extents(where.slot, entry.slot_bytes)
            hidden = self._suspects.sort(device, result.status, where.generation)[bad]
            self._hide(entry, keys, index[bad], where.select(bad), valid[bad])
            for number in set(device[bad[hidden]].tolist()):
                self.health.doubt(Op.READ, number)
            bad = bad[~hidden]
            self._drop(entry, keys, index[bad], where.select(bad), valid[bad])
        good &= valid
        return np.asarray(good, dtype=np.bool_)

    def _blamed(self, entry: Entry, bad: Indices, where: Locations, result: BatchResult) -> Indices:
        """Of pages that did not arrive, those whose own fault that is: not an unwell device's."""
        unwell = self.health.unwell_reads
        if not unwell or len(bad) == 0:
            return bad
        device, _ = self._manager.extents(where.slot[bad], entry.slot_bytes)
        own: Mask = (result.status[bad] == 0) | ~np.isin(device, list(unwell))
        return bad[np.flatnonzero(own)]

    def _hide(
        self, entry: Entry, keys: PageKeys, index: Indices, where: Locations, recorded: Mask
    ) -> None:
        """Take pages that could not be read out of the index; their records stay."""
        self._manager.drop(entry, keys.data, index, keys.rooted, where.generation, recorded)

    def _drop(
        self, entry: Entry, keys: PageKeys, index: Indices, where: Locations, recorded: Mask
    ) -> None:
        """Let the records of hidden pages be removed, soon."""
        record_keys = self._manager.record_keys(entry, keys.data, index)
        dropped = [
            (record_key_at(record_keys, i), int(where.slot[i]), int(where.generation[i]))
            for i in np.flatnonzero(recorded).tolist()
        ]
        if dropped:
            self.saver.enqueue(DropJob(entry, dropped))
            logger.warning("%d pages could not be read back and were dropped", len(dropped))
