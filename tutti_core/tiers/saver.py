"""The saving thread: groups pages, writes them, makes them durable, publishes them.

One thread per store, and the only one that writes to its catalog: saves, removals of unreadable
pages and clears pass through one bounded queue in order. Two groups overlap: while one is flushed
and committed, the next is being written.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti_core.arguments import seconds_of
from tutti_core.errors import BusyError, DeviceError, InternalError, StoreFullError
from tutti_core.format import ROOT_PARENT, UNKNOWN_PARENT
from tutti_core.geometry import PageFragments
from tutti_core.index.catalog import RECORD_KEY_BYTES, NewPages, packed_rows
from tutti_core.io.transport import (
    BATCHES_IN_FLIGHT_MAX,
    Batch,
    BatchResult,
    Op,
    Transport,
    check_owner,
    start_batch,
)
from tutti_core.tiers.cipher import Rows, Windows, rows_of
from tutti_core.tiers.device_calls import DeviceCalls
from tutti_core.tiers.health import Health
from tutti_core.tiers.manager import Entry, Manager

logger = logging.getLogger("tutti")

GROUP_PAGES_MAX = 4096
GROUP_BYTES_MAX = 512 << 20
GROUP_JOBS_MAX = BATCHES_IN_FLIGHT_MAX // 4
"""Each job is a batch, and two groups are in flight: half of the batches are left to the loads."""
JOBS_MAX = 4096
_WINDOW_POLL_S = 0.02

Indices = npt.NDArray[np.intp]
U64 = npt.NDArray[np.uint64]


class SaveTicket:
    """Outcome of one `save`: True for each page that is in the store when it ends.

    Threads    any may wait; all see the same result.
    """

    def __init__(self, stored: npt.NDArray[np.bool_]) -> None:
        self._stored = stored
        self._done = threading.Event()
        self._pid = os.getpid()
        self.cancelled = False

    def done(self) -> bool:
        """Whether the result is there."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> npt.NDArray[np.bool_]:
        """Return one bool a page: stored (durably, unless the store was opened otherwise).

        Every ticket ends: the saver's thread, and the copier's, answer what they were given also
        when they stop or fail. How long that takes depends on the devices.

        Raises
            BusyError: not finished after `timeout_s`; wait again. The memory is still in use.
            StoreClosedError: in a forked child, whose parent alone will hear the result.
        """
        if not self._done.is_set():
            check_owner(self._pid)
        if not self._done.wait(None if timeout_s is None else seconds_of(timeout_s)):
            raise BusyError(f"the save is not finished after {timeout_s} s", op="save")
        return self._stored

    def cancel(self) -> None:
        """Give the memory back now: pages that are not written completely will not be stored.

        A transfer that is under way may go on reading the memory; what it writes is not published.
        """
        self.cancelled = True

    def settle(self, pages: Indices, stored: bool) -> None:
        """Set the outcome of some pages; for the store."""
        self._stored[pages] = stored

    def finish(self) -> None:
        """Let the waiters see the result; for the store."""
        self._done.set()


@dataclass(slots=True)
class SaveJob:
    """Pages of one chain to be written.

    keys        packed chain, from the first known page to the last page of the job.
    index       positions in the chain of the pages to write, rising.
    result      position of each of them in the ticket's result.
    fragments   their memory, one row each.
    keep        whether memory tiers may keep a copy; not of what comes out of one.
    known_from  from this page of the chain on, all ancestors were stored when the save was called;
                None: that is not known, or does not matter.
    output_tokens   what the engine generated for the request, if it said so.
    kept        pages at the front of the chain that are kept; None: all. The policy is told.
    release     called once when neither queue nor device uses the memory any more, which may be
                after the ticket's end.
    """

    entry: Entry
    keys: bytes
    rooted: bool
    index: Indices
    result: Indices
    fragments: PageFragments
    ticket: SaveTicket
    keep: bool = True
    known_from: int | None = None
    output_tokens: int | None = None
    kept: int | None = None
    release: Callable[[], None] | None = None

    @property
    def length_bytes(self) -> int:
        """Bytes to write."""
        return len(self.index) * self.entry.page_bytes

    @property
    def page_count(self) -> int:
        """Pages of the chain."""
        return len(self.keys) // self.entry.key_bytes

    def rest(self, start: int) -> SaveJob:
        """The pages from the `start`-th on, of which memory tiers keep no copy."""
        return replace(
            self,
            index=self.index[start:],
            result=self.result[start:],
            fragments=self.fragments.part(start, len(self.index)),
            keep=False,
        )

    def new_pages(self, count: int, slots: npt.NDArray[np.uint64]) -> NewPages:
        """Catalog input for the first `count` pages, checksums still zero."""
        width, low = self.entry.key_bytes, max(int(self.index[0]) - 1, 0)
        part = self.keys[low * width : (int(self.index[count - 1]) + 1) * width]
        record_keys = packed_rows(self.entry.record_keys(part), RECORD_KEY_BYTES)
        at = self.index[:count] - low
        parents = record_keys[np.maximum(at - 1, 0)].copy()
        if int(self.index[0]) == 0:
            first = ROOT_PARENT if self.rooted else UNKNOWN_PARENT
            parents[0] = np.frombuffer(first, dtype=np.uint8)
        return NewPages(
            namespace=self.entry.digest,
            length_bytes=self.entry.page_bytes,
            key_width=width,
            record_keys=record_keys[at].tobytes(),
            page_keys=packed_rows(part, width)[at].tobytes(),
            parents=parents.tobytes(),
            slot=slots,
            checksum=np.zeros(count, dtype=np.uint64),
        )


class UpperTiers(Protocol):
    """What the saver tells the memory tiers above; all calls come from its thread."""

    def before_write(self, job: SaveJob) -> None:
        """The pages of a job are about to be written: what they depend on must not be dropped."""
        ...

    def after_eviction(self) -> None:
        """Pages may have been evicted, from the devices or above: drop what depended on them."""
        ...

    def keep(self, job: SaveJob, count: int) -> Any:
        """Copy the first `count` pages of a job where there is room; None: nothing was copied."""
        ...

    def end_keep(self, job: SaveJob, kept: Any, stored: Indices, checksum: U64) -> None:
        """Of what `keep` copied, offer the pages at these positions of the job; drop the rest."""
        ...

    def sound_pages(self, job: SaveJob) -> int:
        """How many pages of a job that was written still have all their ancestors in the store."""
        ...

    def after_publish(self, job: SaveJob, stored: Indices) -> None:
        """The devices hold the pages at these positions of the job now."""
        ...

    def used_at(self, job: SaveJob) -> int | None:
        """When the pages of a job that leave a memory tier were used last; None: not known."""
        ...

    def settle(self, entry: Entry, keys: bytes, output_tokens: int | None) -> None:
        """A request was saved; see `Policy.settled`."""
        ...

    def clear(self, entry: Entry, devices: Callable[[], int]) -> int:
        """Empty a namespace, of which `devices` removes what is on those; returns its pages."""
        ...


@dataclass(slots=True)
class ClearJob:
    """Remove a namespace; once `done` is set, `removed` counts its records or `error` says why."""

    entry: Entry
    done: threading.Event = field(default_factory=threading.Event)
    removed: int = 0
    error: Exception | None = None


@dataclass(slots=True)
class DropJob:
    """Remove unreadable pages of a namespace: (record key, slot, generation) each.

    Without any: pages have left a memory tier and no other has them (`UpperTiers.after_eviction`).
    """

    entry: Entry
    pages: list[tuple[bytes, int, int]]


@dataclass(slots=True, eq=False)
class _Write:
    """A batch on its way; `window` holds its ciphertext, where pages are encrypted."""

    ticket: int
    device: npt.NDArray[np.uint32]
    window: Rows | None = None
    result: BatchResult | None = None


@dataclass(slots=True)
class _Writing:
    """A job whose first `len(pages.slot)` pages are being written, in one batch or some.

    epochs      of the devices, before the first of them was submitted; see DeviceCalls.
    """

    job: SaveJob
    pages: NewPages
    device: npt.NDArray[np.uint32]
    batches: list[_Write]
    epochs: tuple[int, ...] = ()
    kept: Any = None


Job = SaveJob | ClearJob | DropJob


class Saver:
    """Runs the saving thread of one store.

    Parameters
        health: told how writes end.
        calls: flushes, and knows which writes a flush does not cover.
        flush: make written pages durable before they are published.
        backlog_bytes: bound on page bytes that wait or are being written.
        sweep: lets finished loads return their slots.
        fail: called once if an invariant of ours breaks; nothing is saved from then on.
        upper: the memory tiers, where there are any.
    """

    def __init__(
        self,
        manager: Manager,
        transport: Transport,
        health: Health,
        *,
        calls: DeviceCalls,
        flush: bool,
        backlog_bytes: int,
        io_timeout_s: float,
        sweep: Callable[[], None],
        fail: Callable[[], None],
        upper: UpperTiers | None = None,
    ) -> None:
        self._manager = manager
        self._transport = transport
        self._health = health
        self._calls = calls
        self._flush = flush
        self._backlog_bytes = backlog_bytes
        self._io_timeout_s = io_timeout_s
        self._sweep = sweep
        self._fail = fail
        self._upper = upper
        self._jobs: deque[Job] = deque()
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._failed = False
        self._windows = Windows()
        self._encrypted: deque[_Write] = deque()
        """The batches that have a window, the oldest first."""
        self._stuck: list[_Writing] = []
        self._unanswered: list[Job] = []  # keeps the memory of their transfers alive
        self._thread = threading.Thread(target=self._run, name="tutti-saver", daemon=True)
        self._thread.start()

    # ---- any thread ----
    def enqueue(self, job: Job) -> bool:
        """Queue a job; False when the backlog is full or the saver has stopped.

        What is queued is answered: the thread ends only when the queue is empty, or by `_give_up`,
        which answers all of it and lets nothing more in.
        """
        length = job.length_bytes if isinstance(job, SaveJob) else 0
        with self._changed:
            full = len(self._jobs) >= JOBS_MAX or (
                length > 0 and self._pending_bytes + length > self._backlog_bytes
            )
            if self._stopping or self._failed or full:
                return False
            self._pending_bytes += length
            self._jobs.append(job)
            self._changed.notify()
            return True

    def pending_bytes(self) -> int:
        """Page bytes queued or being written."""
        return self._pending_bytes

    @property
    def failed(self) -> bool:
        """Whether it has stopped for good because an invariant broke."""
        return self._failed

    def stop(self, timeout_s: float) -> bool:
        """Finish what is queued, then end the thread; False if it is still busy at the deadline."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread ----
    def _run(self) -> None:
        writing: list[_Writing] = []
        group: list[Job] | None = []
        try:
            while (group := self._take(wait=not writing)) is not None:
                started = self._start([job for job in group if isinstance(job, SaveJob)])
                self._finish(writing)
                writing = started
                for job in group:
                    if not isinstance(job, SaveJob):
                        self._do(job)
        except BaseException:  # whatever it is, those who wait must hear
            logger.exception("saving stopped: an invariant of the store broke")
            self._give_up(group or [], writing)
        finally:
            if self._stopping:  # whoever stopped it may have given up waiting
                self._calls.dismiss()

    def _take(self, wait: bool) -> list[Job] | None:
        """The next group: saves up to the group's bounds, or one other job. None at the end."""
        with self._changed:
            while wait and not self._jobs and not self._stopping:
                self._changed.wait()
            if not self._jobs:
                return None if wait else []
            group: list[Job] = []
            pages = size = 0
            while self._jobs and len(group) < GROUP_JOBS_MAX:
                job = self._jobs[0]
                if not isinstance(job, SaveJob):
                    if not group:
                        group.append(self._jobs.popleft())
                    break
                pages += len(job.index)
                size += job.length_bytes
                if group and (pages > GROUP_PAGES_MAX or size > GROUP_BYTES_MAX):
                    break
                group.append(self._jobs.popleft())
            return group

    def _start(self, jobs: list[SaveJob]) -> list[_Writing]:
        """Reserve space for a group and start writing it."""
        started: list[_Writing] = []
        for job in jobs:
            if job.ticket.cancelled:
                self._end(job)
                _release(job)
                continue
            if self._upper is not None:
                self._upper.before_write(job)
            slots = self._manager.reserve(
                job.entry,
                job.keys,
                job.rooted,
                job.index,
                self._sweep,
                self._io_timeout_s,
                choosy=job.release is None,
                output_tokens=job.output_tokens,
            )
            if len(slots) < len(job.index):
                job.kept = int(job.index[len(slots)])
            if self._upper is not None:
                self._upper.after_eviction()
            if len(slots) == 0:
                self._end(job)
                _release(job)
                continue
            epochs = self._calls.epochs()
            writing = self._submit(job, slots)
            if writing is None:
                self._manager.count("pages_refused_busy", len(slots))
                self._manager.cancel(slots)
                self._end(job)
                _release(job)
            else:
                writing.epochs = epochs
                started.append(writing)
                if self._upper is not None and job.keep:
                    writing.kept = self._upper.keep(job, len(writing.pages.slot))
        return started

    def _submit(self, job: SaveJob, slots: npt.NDArray[np.uint64]) -> _Writing | None:
        """Start writing a job's pages to their slots; None if that is not possible in time."""
        if job.entry.cipher is not None:
            return self._submit_encrypted(job, slots)
        parts = job.entry.parts
        device, offset = self._manager.extents(slots, job.entry.slot_bytes)
        batch = page_batch(Op.WRITE, device, offset, job.fragments, len(slots), parts is None)
        pages = job.new_pages(len(slots), slots)
        if parts is not None:
            pages.checksum[:] = parts.record_checksums(job.fragments.part(0, len(slots)))
        ticket = self._submit_batch(batch, time.monotonic() + self._io_timeout_s)
        return None if ticket is None else _Writing(job, pages, device, [_Write(ticket, device)])

    def _submit_batch(self, batch: Batch, deadline_s: float) -> int | None:
        while True:
            try:
                return start_batch(self._transport, batch, self._manager.count)
            except BusyError:
                self._sweep()
                if time.monotonic() > deadline_s:
                    return None
                time.sleep(0.001)

    def _submit_encrypted(self, job: SaveJob, slots: npt.NDArray[np.uint64]) -> _Writing | None:
        """The same by way of windows: one is filled while others are being written.

        Pages for which there is no window in time are refused.
        """
        entry, batches, checksums = job.entry, list[_Write](), list[U64]()
        assert entry.cipher is not None
        device, offset = self._manager.extents(slots, entry.slot_bytes)
        keys = packed_rows(job.keys, entry.key_bytes)[job.index[: len(slots)]]
        deadline_s, done = time.monotonic() + self._io_timeout_s, 0
        while done < len(slots):
            window = self._take_window(entry.slot_bytes, deadline_s)
            if window is None:
                break
            rows = rows_of(window, entry.slot_bytes)
            part = slice(done, min(done + len(rows), len(slots)))
            pages = job.fragments.part(part.start, part.stop)
            stored = entry.cipher.encrypt(keys[part], pages, rows)
            batch = page_batch(
                Op.WRITE, device[part], offset[part], stored, len(keys[part]), entry.parts is None
            )
            ticket = self._submit_batch(batch, deadline_s)
            if ticket is None:
                self._windows.give_back(window)
                break
            batches.append(_Write(ticket, device[part], window))
            self._encrypted.append(batches[-1])
            if entry.parts is not None:
                checksums.append(entry.parts.record_checksums(stored))
            done = part.stop
        if done == 0:
            return None
        if done < len(slots):
            self._manager.count("pages_refused_busy", len(slots) - done)
            self._manager.cancel(slots[done:])
            job.kept = int(job.index[done])
        new = job.new_pages(done, slots[:done])
        if checksums:
            new.checksum[:] = np.concatenate(checksums)
        return _Writing(job, new, device[:done], batches)

    def _take_window(self, row_bytes: int, deadline_s: float) -> Rows | None:
        """A window that nothing uses, waiting for one; None at the deadline."""
        while True:
            window = self._windows.take(row_bytes)
            if window is not None:
                return window
            for write in list(self._encrypted):
                self._collect(write, 0.0)
            left_s = deadline_s - time.monotonic()
            if self._encrypted and left_s > 0:  # another device may answer before this one
                self._collect(self._encrypted[0], min(left_s, _WINDOW_POLL_S))
            elif left_s <= 0:
                for write in self._encrypted:
                    self._health.note_late(write.device.tolist())
                return None

    def _collect(self, write: _Write, timeout_s: float) -> bool:
        """Wait for a batch; False if it has not ended in time."""
        if write.result is None:
            write.result = self._transport.wait(write.ticket, timeout_s)
            if write.result is not None and write.window is not None:
                self._windows.give_back(write.window)
                self._encrypted.remove(write)
                write.window = None
        return write.result is not None

    def _result(self, writing: _Writing, timeout_s: float) -> BatchResult | None:
        """Wait for all batches of a job; None if one has not ended in time."""
        deadline_s = time.monotonic() + timeout_s
        for write in writing.batches:
            if not self._collect(write, max(deadline_s - time.monotonic(), 0.0)):
                return None
        results = [write.result for write in writing.batches if write.result is not None]
        if len(results) == 1:
            return results[0]
        return BatchResult(
            np.concatenate([result.status for result in results]),
            np.concatenate([result.checksum for result in results]),
        )

    def _finish(self, group: list[_Writing]) -> None:
        """Wait for a group's writes, make them durable, publish them, tell the waiters."""
        written = []
        for writing in group:
            result = self._result(writing, self._patience_s(writing))
            if result is None:
                # The memory and the slots stay taken until the device answers.
                self._health.note_late(writing.device.tolist())
                self._manager.count("writes_stuck", 1)
                self._stuck.append(writing)
                self._offer(writing, np.empty(0, dtype=np.intp))
                self._end(writing.job)
            else:
                written.append((writing, result))
                _release(writing.job)
        flushed = self._flush_devices([w for w, _ in written])
        ready = [self._select(writing, result, flushed) for writing, result in written]
        groups = [item for item in ready if item is not None]
        if groups:
            stored = self._manager.publish(
                [
                    (w.job.entry, w.job.keys, w.job.rooted, w.job.index[c], p, self._used_at(w.job))
                    for w, c, p in groups
                ]
            )
            for (writing, chosen, _), kept in zip(groups, stored, strict=True):
                writing.job.ticket.settle(writing.job.result[chosen[kept]], True)
                self._offer(writing, chosen[kept])
                if writing.job.release is None:  # else it was a save before: memory wrote it down
                    if self._upper is not None:
                        self._upper.after_publish(writing.job, chosen[kept])
                    self._manager.count("saved_pages", int(np.count_nonzero(kept)))
                elif writing.job.rooted and kept.any():  # the devices' policy learns of it now
                    job = writing.job
                    self._manager.settle(job.entry, job.keys, job.page_count, None)
        for writing, _ in written:
            self._offer(writing, np.empty(0, dtype=np.intp))
            self._end(writing.job)
        self._collect_stuck()

    def _patience_s(self, writing: _Writing) -> float:
        """How long to wait for a write: not at all if it needs a device that is left alone."""
        unwell = self._health.unwell_writes
        stalls = bool(unwell) and not unwell.isdisjoint(writing.device.tolist())
        return 0.0 if stalls else self._io_timeout_s

    def _used_at(self, job: SaveJob) -> int | None:
        """The last use of pages that leave memory, where a TTL counts from it."""
        if self._upper is None or job.release is None or job.entry.limits.ttl_ns is None:
            return None
        return self._upper.used_at(job)

    def _offer(self, writing: _Writing, stored: Indices) -> None:
        """Let the memory tiers offer what they kept of these pages; they drop the other copies."""
        if self._upper is not None and writing.kept is not None:
            kept, writing.kept = writing.kept, None
            self._upper.end_keep(writing.job, kept, stored, writing.pages.checksum)

    def _flush_devices(self, group: list[_Writing]) -> dict[int, int]:
        """Flush the devices that a group wrote to; device -> 0 or a negative errno."""
        devices = {d for writing in group for d in set(writing.device.tolist())}
        if not self._flush:
            return dict.fromkeys(devices, 0)
        flushed = self._calls.flush_all(devices, self._io_timeout_s)
        for device, status in flushed.items():
            if status == -errno.ETIMEDOUT:
                self._health.note_trouble(device, "a flush does not end")
        return flushed

    def _select(
        self, writing: _Writing, result: BatchResult, flushed: dict[int, int]
    ) -> tuple[_Writing, Indices, NewPages] | None:
        """The pages of a job that were written; the slots of the others go back."""
        status = result.status.copy()
        if writing.job.ticket.cancelled:
            status[status == 0] = -errno.ECANCELED  # the memory may have changed meanwhile
        epochs = self._calls.epochs()
        for device, code in flushed.items():
            if self._flush and code == 0 and epochs[device] != writing.epochs[device]:
                code = -errno.EIO  # written before a flush that failed: nobody knows what is left
            if code:
                status[(writing.device == device) & (status == 0)] = code
        self._health.note(Op.WRITE, writing.device, status)
        if self._upper is not None:
            sound = self._upper.sound_pages(writing.job)
            self._manager.count("pages_orphaned", int(np.count_nonzero(status[sound:] == 0)))
            status[sound:] = -errno.ESTALE
        good = np.flatnonzero(status == 0)
        pages = writing.pages
        if writing.job.entry.parts is None:
            pages.checksum[:] = result.checksum
        if len(good) < len(status):
            failed = np.count_nonzero((status != 0) & (status != -errno.ESTALE))
            self._manager.count("write_errors", int(failed))
            self._manager.cancel(pages.slot[status != 0])
            pages = pages.select(good)
        return (writing, good, pages) if len(good) else None

    def _do(self, job: ClearJob | DropJob) -> None:
        try:
            if isinstance(job, DropJob):
                self._manager.remove_dropped(job.entry, job.pages)
                if self._upper is not None:
                    self._upper.after_eviction()
            else:
                devices = partial(self._manager.clear, job.entry)
                upper = self._upper
                job.removed = devices() if upper is None else upper.clear(job.entry, devices)
        except (StoreFullError, DeviceError) as error:
            self._manager.count("catalog_errors", 1)
            if isinstance(job, ClearJob):
                job.error = error
            else:
                logger.warning("unreadable pages stay in the catalog: %s", error)
        if isinstance(job, ClearJob):
            job.done.set()

    def _end(self, job: SaveJob) -> None:
        if job.rooted and job.release is None and not job.ticket.cancelled:
            kept = job.page_count if job.kept is None else job.kept
            self._manager.settle(job.entry, job.keys, kept, job.output_tokens)
            if self._upper is not None:
                self._upper.settle(job.entry, job.keys, job.output_tokens)
        with self._changed:
            self._pending_bytes -= job.length_bytes
        job.ticket.finish()

    def _collect_stuck(self) -> None:
        """Give back the slots of writes that were given up and have ended since."""
        still = []
        for writing in self._stuck:
            if self._result(writing, 0.0) is None:
                still.append(writing)
                self._health.note_late(writing.device.tolist())
            else:
                self._manager.cancel(writing.pages.slot)
                _release(writing.job)
        self._stuck = still

    def _give_up(self, group: list[Job], writing: list[_Writing]) -> None:
        """Answer everybody after an internal error; stored pages stay readable."""
        with self._changed:
            self._failed = True
            left = [*group, *self._jobs, *(w.job for w in writing)]
            self._jobs.clear()
        self._unanswered = left
        for job in left:
            if isinstance(job, SaveJob):
                job.ticket.finish()
            elif isinstance(job, ClearJob) and not job.done.is_set():
                job.error = InternalError("the store has stopped saving", op="clear")
                job.done.set()
        self._fail()


def _release(job: SaveJob) -> None:
    if job.release is not None:
        job.release()


def page_batch(
    op: Op,
    device: npt.NDArray[np.uint32],
    offset_bytes: npt.NDArray[np.uint64],
    fragments: PageFragments,
    count: int,
    checksum: bool,
) -> Batch:
    """The transport's view of the first `count` pages of `fragments`."""
    start, address, length = fragments.part(0, count).flat()
    return Batch(
        op=op,
        device=np.ascontiguousarray(device),
        offset_bytes=np.ascontiguousarray(offset_bytes),
        fragment_start=start,
        address=address,
        length_bytes=length,
        checksum=checksum,
    )
