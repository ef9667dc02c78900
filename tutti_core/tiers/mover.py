"""The moving thread: promotes pages into memory tiers and writes unsaved ones down, behind loads.

One thread a store, and one background batch at a time: at most MOVE_PAGES_MAX pages and
MOVE_BYTES_MAX bytes (shelf.py), so that a load that comes meanwhile shares the device with one
batch at most. A batch begins when no load is in flight. Writes wait for that until a deadline;
promotions without one, and those that the queue has no room for are forgotten.

    promotion   reserve slots above, read the device into them, compare the checksums with the
                records, see that the records have not changed, then offer the pages above; only
                then, where the tier is exclusive, take them from the devices.
    demotion    a save like any other, straight from the arena; the saver publishes it, then the
                page may leave. What fails stays, unsaved, and is tried again after a pause.

An exclusive page leaves one place only where the other has it at that moment: one may evict what
the other is about to let go of.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tutti_core.errors import BusyError, TuttiError
from tutti_core.geometry import PageFragments
from tutti_core.index.catalog import packed_rows, record_key_at
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.io.transport import BatchResult, Op, Transport, start_batch
from tutti_core.keys import PageKeys
from tutti_core.tiers.handover import Handover
from tutti_core.tiers.health import Health
from tutti_core.tiers.manager import Entry, Manager
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.saver import DropJob, SaveJob, Saver, page_batch
from tutti_core.tiers.shelf import MOVE_BYTES_MAX, Kind, Write, pages_per_move, stored_along

logger = logging.getLogger("tutti")

U64 = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

PROMOTIONS_MAX = 64
"""Loads whose pages wait to be promoted; those of later ones are not."""

WRITES_MAX = 64
"""Runs that were taken up to make room and wait for being written."""

REQUESTS_MAX = 256
"""Second uses that wait for being written; later ones are written when they are to leave."""

TOUCHES_MAX = 1024
"""Loads out of memory that the devices have not heard of yet."""

WRITE_DEADLINE_S = 0.2
"""How long loads may keep a background write waiting."""

FLUSH_PASSES_MAX = 4
"""Passes of one flush. Writing a page may evict another from the devices, which then is unsaved."""

LOW_SHARE = 8
"""A tier with unsaved pages keeps one part in so many free, by writing and evicting ahead."""

FAILURE_PAUSE_S = 0.5
"""Rest after a write or a read of ours failed."""

REGISTER_STEP_BYTES = 1 << 30
_TICK_S = 0.05  # at most so late a change is noticed that nobody told of
_POLL_S = 0.002  # between two looks whether loads have ended


class LoadGate:
    """Counts loads that are using the devices, and lets the mover wait until there are none."""

    def __init__(self) -> None:
        self._idle = threading.Condition()
        self._count = 0

    def begin(self) -> None:
        """A load is being submitted."""
        with self._idle:
            self._count += 1

    def end(self) -> None:
        """A load has ended."""
        with self._idle:
            self._count -= 1
            if self._count == 0:
                self._idle.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no load is in flight; False at the deadline."""
        with self._idle:
            return self._idle.wait_for(lambda: self._count == 0, timeout_s)


@dataclass(slots=True)
class _Promotion:
    """Pages of a chain to be copied into `target`, from `source` or the devices."""

    target: MemoryTier
    source: MemoryTier | None
    entry: Entry
    epoch: int
    keys: bytes
    rooted: bool
    index: Indices


@dataclass(slots=True)
class _Request:
    """Pages of a rooted chain that are to be written if they are still unsaved."""

    tier: MemoryTier
    entry: Entry
    keys: bytes
    index: Indices


@dataclass(slots=True)
class _Stuck:
    """A read into an arena that the device has not answered in time."""

    ticket: int
    tier: MemoryTier
    slots: U64
    started: int
    memory: PageFragments


class Mover:
    """Runs the moving thread of one store.

    Parameters
        tiers: the memory tiers, fastest first.
        gate: counts the loads in flight.
        handover: where pages change places.
        first_gap: the first page of a rooted chain that is in no tier.
        sweep: collects loads that have ended but that nobody waited for.
        fail: called once if an invariant of ours breaks; nothing is moved from then on.
    """

    def __init__(
        self,
        manager: Manager,
        transport: Transport,
        saver: Saver,
        health: Health,
        tiers: Sequence[MemoryTier],
        *,
        gate: LoadGate,
        handover: Handover,
        io_timeout_s: float,
        first_gap: Callable[[Entry, bytes], int | None],
        sweep: Callable[[], None],
        fail: Callable[[], None],
    ) -> None:
        self._first_gap = first_gap
        self._handover = handover
        self._manager = manager
        self._transport = transport
        self._saver = saver
        self._health = health
        self._tiers = tuple(tiers)
        self._gate = gate
        self._io_timeout_s = io_timeout_s
        self._sweep = sweep
        self._fail = fail
        self._changed = threading.Condition()
        self._writes: deque[tuple[MemoryTier, Write]] = deque()
        self._requests: deque[_Request] = deque()
        self._promotions: deque[_Promotion] = deque()
        self._touches: deque[tuple[Entry, bytes, int, bool]] = deque(maxlen=TOUCHES_MAX)
        self._flushes: list[threading.Event] = []
        self._stopping = False
        self._ended = False
        self._closing = False
        self._busy = False
        self._rest_until_s = 0.0
        self._stuck: list[_Stuck] = []
        self._thread = threading.Thread(target=self._run, name="tutti-mover", daemon=True)
        self._thread.start()

    # ---- any thread ----
    def room(self) -> int:
        """How many more runs `write` takes now."""
        return max(0, WRITES_MAX - len(self._writes)) if not self._ended else 0

    def write(self, tier: MemoryTier, write: Write) -> None:
        """Have a run written that was taken up to make room."""
        with self._changed:
            if not self._ended:
                self._writes.append((tier, write))
                self._changed.notify()
                return
        _abandon(tier, write)

    def write_soon(self, tier: MemoryTier, entry: Entry, keys: bytes, index: Indices) -> None:
        """Have unsaved pages of a rooted chain written; forgotten when too much is waiting."""
        with self._changed:
            if len(self._requests) < REQUESTS_MAX:
                self._requests.append(_Request(tier, entry, keys, index))
                self._changed.notify()

    def nudge(self) -> None:
        """Pages came into memory: see whether room has to be made."""
        with self._changed:
            self._changed.notify()

    def touch_soon(self, entry: Entry, keys: bytes, first: int, rooted: bool) -> None:
        """Have the devices learn that pages, which are in memory, were loaded."""
        self._touches.append((entry, keys, first, rooted))  # the oldest goes when there are many

    def promote(
        self,
        target: MemoryTier,
        source: MemoryTier | None,
        entry: Entry,
        keys: PageKeys,
        index: Indices,
    ) -> None:
        """Have loaded pages copied into a faster tier; forgotten when too much is waiting."""
        if len(self._promotions) >= PROMOTIONS_MAX or self._ended or self._closing:
            self._manager.count("promotions_dropped", len(index))
            return
        epoch = target.epoch(entry)
        with self._changed:
            if self._closing:
                return
            self._promotions.append(
                _Promotion(target, source, entry, epoch, keys.data, keys.rooted, index)
            )
            self._changed.notify()

    def flush(self, timeout_s: float, *, closing: bool = False) -> bool:
        """Write all unsaved pages down; False if some are left at the deadline or cannot be.

        `closing` ends promotions before: after the flush one could take pages off the drives.
        """
        done = threading.Event()
        with self._changed:
            if closing:
                self._closing = True
                self._promotions.clear()
            if self._ended:
                return self._all_saved()
            self._flushes.append(done)
            self._rest_until_s = 0.0
            self._changed.notify()
        return done.wait(timeout_s) and self._all_saved()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or moving; for tests and benchmarks."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with self._changed:
                left = self._writes or self._requests or self._promotions or self._flushes
                if not self._busy and not left:
                    return True
            time.sleep(_POLL_S)
        return False

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the batch at hand; False if it is still busy at the deadline."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _all_saved(self) -> bool:
        return not any(tier.unsaved_count for tier in self._tiers)

    # ---- the thread ----
    def _run(self) -> None:
        try:
            self._register()
            while not self._stopping:
                if not self._step():
                    self._wait_for_work()
        except Exception:
            logger.exception("moving pages stopped: an invariant of the store broke")
            self._fail()
        finally:
            self._end()

    def _queued(self) -> bool:
        writable = bool(self._writes or self._requests) and time.monotonic() >= self._rest_until_s
        return writable or bool(self._promotions or self._flushes)

    def _wait_for_work(self) -> None:
        with self._changed:
            self._busy = False
            if not self._stopping and not self._queued():
                self._changed.wait(_TICK_S)

    def _step(self) -> bool:
        """Do one background batch, or nothing where there is none to do."""
        self._busy = True
        self._collect_stuck()
        self._touch()
        self._sweep()
        if self._flushes:
            self._flush_all()
            return True
        if time.monotonic() >= self._rest_until_s:
            work = self._next_write()
            if work is not None:
                self._write_down(*work)
                return True
        if not self._promotions:
            return False
        if self._wait_for_loads(_TICK_S):
            self._promote_batch()
        return True

    def _touch(self) -> None:
        while self._touches:
            entry, keys, first, rooted = self._touches.popleft()
            with self._manager.lock:
                entry.pages.locate(keys, first, rooted, time.monotonic_ns())

    def _wait_for_loads(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not self._stopping:
            self._sweep()
            if self._gate.wait_idle(_POLL_S):
                return True
            if time.monotonic() > deadline_s:
                return False
        return False

    def _end(self) -> None:
        """Answer everybody; nothing is taken any more."""
        with self._changed:
            self._ended = True
            writes, self._writes = self._writes, deque()
            flushes, self._flushes = self._flushes, []
            self._promotions.clear()
            self._busy = False
        for tier, write in writes:
            _abandon(tier, write)
        for done in flushes:
            done.set()

    def _register(self) -> None:
        """Announce the arenas to CUDA and to the transport. Here, because it takes seconds."""
        for tier in self._tiers:
            tier.arena.pin()
            start = tier.arena.address if tier.arena.on_host else 0
            end = start + tier.capacity_bytes if start else 0
            while start < end and not self._stopping:
                step = min(REGISTER_STEP_BYTES, end - start)
                try:
                    self._transport.register(start, step)
                except (TuttiError, OSError) as error:
                    logger.warning("the %s tier is not registered: %s", tier.name, error)
                    break
                start += step

    # ---- demotion ----
    def _next_write(self) -> tuple[MemoryTier, Write] | None:
        with self._changed:
            if self._writes:
                return self._writes.popleft()
        while self._requests:
            with self._changed:
                request = self._requests.popleft()
            write = request.tier.begin_write(request.entry, request.keys, True, request.index)
            if write is not None:
                left = request.index[~np.isin(request.index, write.index)]
                if len(left):
                    with self._changed:
                        request.index = left
                        self._requests.appendleft(request)
                return request.tier, write
        return self._make_room()

    def _make_room(self) -> tuple[MemoryTier, Write] | None:
        """Where a tier with unsaved pages runs low: evict, up to the first run to be written."""
        for tier in self._tiers:
            while tier.unsaved_count and tier.free_bytes < tier.capacity_bytes // LOW_SHARE:
                step = tier.next_write()
                if isinstance(step, Write):
                    return tier, step
                if not step:
                    break
        return None

    def _flush_all(self) -> None:
        """Write all unsaved pages; more than once where writing some makes others unsaved."""
        with self._changed:
            flushes, self._flushes = self._flushes, []
        try:
            while self._writes:
                with self._changed:
                    tier, write = self._writes.popleft()
                self._write_down(tier, write)
            for _ in range(FLUSH_PASSES_MAX):
                if self._all_saved() or self._stopping:
                    break
                for tier in self._tiers[::-1]:
                    self._flush_tier(tier)
        finally:
            for done in flushes:
                done.set()

    def _flush_tier(self, tier: MemoryTier) -> None:
        """One pass over the unsaved pages of a tier, ancestors first."""
        for entry, keys, rooted, index in tier.unsaved_runs():
            while len(index) and not self._stopping:
                write = tier.begin_write(entry, keys, rooted, index)
                if write is None:
                    break
                index = index[~np.isin(index, write.index)]
                self._write_down(tier, write)

    def _write_down(self, tier: MemoryTier, write: Write) -> None:
        """Save a run from the arena and wait until it is published below, or failed."""
        self._wait_for_loads(WRITE_DEADLINE_S)
        entry = write.shelf.entry
        job = SaveJob(
            entry=entry,
            keys=write.keys,
            rooted=write.rooted,
            index=write.index,
            result=np.arange(len(write.index)),
            fragments=self._source(tier, entry, write.slots),
            ticket=write.ticket,
            keep=False,
            release=partial(tier.end_copy, write.started),
        )
        if not self._saver.enqueue(job):
            _abandon(tier, write)
            self._rest_until_s = time.monotonic() + FAILURE_PAUSE_S
            return
        while not write.ticket.done():  # it ends: see `Saver.enqueue`
            try:
                write.ticket.wait(self._io_timeout_s)
            except BusyError:
                continue
        stored = self._let_go(tier, write)
        for other in self._tiers:
            if other is not tier and stored.any():
                other.note_saved(entry, write.keys, write.rooted, write.index[stored])
        if not stored.all() and not write.ticket.cancelled:
            self._manager.count("demotion_errors", int(np.count_nonzero(~stored)))
            self._rest_until_s = time.monotonic() + FAILURE_PAUSE_S

    def _let_go(self, tier: MemoryTier, write: Write) -> Mask:
        """End a write that was answered; returns which of its pages are stored below.

        Of an exclusive tier those stay that the devices have evicted again meanwhile.
        """
        stored = write.ticket.wait()
        with self._handover.move(), self._manager.lock:
            if write.rooted:  # another save may have brought them there
                below = stored_along(write.shelf.entry.pages, write.keys)[write.index]
                stored = below if tier.leave_after_write else stored | below
            tier.end_write(write, stored)
        return stored

    def _source(self, tier: MemoryTier, entry: Entry, slots: U64) -> PageFragments:
        """Slots as memory that a transport can read; those of a GPU are copied out first."""
        inside = tier.fragments(entry, slots)
        if tier.arena.on_host:
            return inside
        staged = self._stage(entry, len(slots))
        lengths = np.full(len(slots), entry.page_bytes, dtype=np.uint64)
        tier.arena.copy(staged.address[:, 0].copy(), inside.address[:, 0].copy(), lengths)
        return staged

    def _stage(self, entry: Entry, count: int) -> PageFragments:
        """Host memory for some pages on their way from or to a GPU, new for each batch."""
        memory = np.empty(max(count * entry.page_bytes, 1), dtype=np.uint8)
        assert count == 1 or memory.nbytes <= MOVE_BYTES_MAX
        start = np.uint64(memory.ctypes.data)
        address = start + np.arange(count, dtype=np.uint64) * np.uint64(entry.page_bytes)
        return PageFragments(
            address[:, None], np.array([entry.page_bytes], dtype=np.uint64), memory
        )

    # ---- promotion ----
    def _promote_batch(self) -> None:
        """Copy the next few pages of the oldest promotion."""
        with self._changed:
            if not self._promotions:  # the store is being closed
                return
            promotion = self._promotions[0]
            count = pages_per_move(promotion.entry.slot_bytes)
            index, promotion.index = promotion.index[:count], promotion.index[count:]
            if len(promotion.index) == 0:
                self._promotions.popleft()
        entry, target = promotion.entry, promotion.target
        keys = promotion.keys[: (int(index[-1]) + 1) * entry.key_bytes]
        first = int(index[0])
        held = target.holds(entry, keys, first, promotion.rooted)
        index = index[~held[index - first]]
        index = index[: self._sound(promotion, keys, index)]
        if len(index) == 0 or self._stuck:
            return
        chain = keys if promotion.rooted else b""
        slots, _ = target.reserve(entry, chain, len(index), 0)
        index = index[: len(slots)]
        if len(slots) == 0:
            self._manager.count("promotions_dropped", 1)
        elif promotion.source is not None:
            self._copy_up(promotion, promotion.source, keys, index, slots)
        else:
            self._read_up(promotion, keys, index, slots)

    def _sound(self, promotion: _Promotion, keys: bytes, index: Indices) -> int:
        """How many of some pages have all their ancestors; others are not worth promoting."""
        gap = self._first_gap(promotion.entry, keys) if promotion.rooted else None
        return len(index) if gap is None else int(np.searchsorted(index, gap))

    def _copy_up(
        self, promotion: _Promotion, source: MemoryTier, keys: bytes, index: Indices, slots: U64
    ) -> None:
        """From one memory tier into the next."""
        entry, target, first = promotion.entry, promotion.target, int(index[0])
        where, started = source.begin_copy(entry, keys, first, promotion.rooted)
        if started is None:
            target.cancel(slots)
            return
        found = where.slot[index - first]
        here = found != NO_SLOT
        try:
            address = source.addresses(found[here], entry.slot_bytes)
            lengths = np.full(len(address), entry.page_bytes, dtype=np.uint64)
            target.arena.copy(target.addresses(slots[here], entry.slot_bytes), address, lengths)
        except OSError as error:
            logger.warning("a promotion failed: %s", error)
            here[:] = False
        finally:
            source.end_copy(started)
        target.cancel(slots[~here])
        checksum = where.checksum[index - first][here]
        self._offer(promotion, keys, index[here], slots[here], checksum, Kind.SAVED)

    def _read_up(self, promotion: _Promotion, keys: bytes, index: Indices, slots: U64) -> None:
        """From the devices into a memory tier."""
        entry, first = promotion.entry, int(index[0])
        started = self._manager.begin_load()
        where = self._manager.locate(entry, keys, first, promotion.rooted)
        where = where.select(index - first)
        here = np.flatnonzero(where.slot != NO_SLOT)
        promotion.target.cancel(slots[where.slot == NO_SLOT])
        slots, index, where = slots[here], index[here], where.select(here)
        if len(here) == 0:
            self._manager.end_load(started)
            return
        memory = self._destination(promotion.target, entry, slots)
        result = self._read(promotion.target, entry, where, memory, slots, started)
        if result is None:
            return
        rows = packed_rows(keys, entry.key_bytes)[index]
        try:
            good = _arrived(entry, rows, result, where, memory)
            good &= self._manager.still_there(entry, keys, index, where, started)
        finally:
            self._manager.end_load(started)
        if not good.all():
            self._manager.count("promotion_errors", int(np.count_nonzero(~good)))
            self._rest_until_s = time.monotonic() + FAILURE_PAUSE_S
        promotion.target.cancel(slots[~good])
        chosen = np.flatnonzero(good)
        self._finish_read(
            promotion,
            keys,
            index[chosen],
            slots[chosen],
            where.select(chosen),
            memory.select(chosen),
        )

    def _destination(self, tier: MemoryTier, entry: Entry, slots: U64) -> PageFragments:
        if tier.arena.on_host:
            return tier.fragments(entry, slots)
        return self._stage(entry, len(slots))

    def _read(
        self,
        tier: MemoryTier,
        entry: Entry,
        where: Locations,
        memory: PageFragments,
        slots: U64,
        started: int,
    ) -> BatchResult | None:
        """Read pages from the devices; None where there is no result (yet): all is seen to then."""
        device, offset = self._manager.extents(where.slot, entry.slot_bytes)
        batch = page_batch(Op.READ, device, offset, memory, len(slots), entry.parts is None)
        ticket: int | None = None
        with contextlib.suppress(BusyError):
            ticket = start_batch(self._transport, batch, self._manager.count)
        if ticket is None:
            self._manager.end_load(started)
            tier.cancel(slots)
            return None
        deadline_s = time.monotonic() + self._io_timeout_s
        while True:
            result = self._transport.wait(ticket, min(self._io_timeout_s, _TICK_S))
            if result is not None:
                self._health.note(Op.READ, device, result.status)
                return result
            if time.monotonic() > deadline_s or self._stopping:
                if not self._stopping:
                    self._health.note_late(device.tolist())
                    self._manager.narrow_load(started, where.slot)
                self._manager.count("reads_stuck", 1)
                self._stuck.append(_Stuck(ticket, tier, slots, started, memory))
                return None

    def _finish_read(
        self,
        promotion: _Promotion,
        keys: bytes,
        index: Indices,
        slots: U64,
        where: Locations,
        memory: PageFragments,
    ) -> None:
        target, entry = promotion.target, promotion.entry
        if len(index) == 0:
            return
        if not target.arena.on_host:
            lengths = np.full(len(index), entry.page_bytes, dtype=np.uint64)
            inside = target.addresses(slots, entry.slot_bytes)
            target.arena.copy(inside, memory.address[:, 0].copy(), lengths)
        kind = Kind.ARRIVING if target.leave_after_write else Kind.SAVED
        offered = self._offer(promotion, keys, index, slots, where.checksum, kind)
        if target.leave_after_write:
            self._take_from_devices(target, entry, keys, index, where, offered)
            target.end_arrival(entry, keys, promotion.rooted, index)

    def _offer(
        self,
        promotion: _Promotion,
        keys: bytes,
        index: Indices,
        slots: U64,
        checksum: U64,
        kind: Kind,
    ) -> Mask:
        target, entry = promotion.target, promotion.entry
        with self._handover.move():
            offered = target.commit(
                entry, promotion.epoch, keys, promotion.rooted, index, slots, checksum, kind
            )
        # The devices may have evicted an ancestor before the pages could be seen here.
        sound = self._sound(promotion, keys, index)
        if sound < len(index):
            target.drop(entry, keys, promotion.rooted, index[sound:])
            offered[sound:] = False
        with target.lock:
            target.counters["promoted"] += int(np.count_nonzero(offered))
        return offered

    def _take_from_devices(
        self,
        target: MemoryTier,
        entry: Entry,
        keys: bytes,
        index: Indices,
        where: Locations,
        offered: Mask,
    ) -> None:
        """Exclusive: pages that were offered above, and are there still, leave the devices."""
        index, where = index[offered], where.select(np.flatnonzero(offered))
        if len(index) == 0:
            return
        with self._handover.move(), self._manager.lock:
            here = np.flatnonzero(target.must_save(entry, keys, index))
            index, where = index[here], where.select(here)
            self._manager.hand_up(entry, keys, index, where.generation)
        if len(index) == 0:
            return
        record_keys = self._manager.record_keys(entry, keys, index)
        slots, generations = where.slot.tolist(), where.generation.tolist()
        job = DropJob(
            entry,
            [(record_key_at(record_keys, i), slots[i], generations[i]) for i in range(len(slots))],
        )
        # The records must go, or the slots are lost. The queue is full, and the saver empties it;
        # one that has failed takes nothing any more, and the slots are found at the next opening.
        while not (self._saver.enqueue(job) or self._saver.failed or self._stopping):
            time.sleep(_POLL_S)

    def _collect_stuck(self) -> None:
        """Give back the slots of reads that were given up and have ended since."""
        still = []
        for stuck in self._stuck:
            if self._transport.wait(stuck.ticket, 0.0) is None:
                still.append(stuck)
            else:
                stuck.tier.cancel(stuck.slots)
                self._manager.end_load(stuck.started)
        self._stuck = still


def _arrived(
    entry: Entry,
    keys: npt.NDArray[np.uint8],
    result: BatchResult,
    where: Locations,
    memory: PageFragments,
) -> Mask:
    """Which pages of a finished read, of these keys, are there, whole, right and decrypted."""
    good: Mask = result.status == 0
    read = np.flatnonzero(good)
    if entry.parts is None:
        good &= result.checksum == where.checksum
    else:
        good[read] = entry.parts.sound(memory.address[read, 0], where.checksum[read])
    if entry.cipher is not None:
        read = np.flatnonzero(good)
        good[read] = entry.cipher.decrypt_stored(keys[read], memory.address[read, 0])
    return good


def _abandon(tier: MemoryTier, write: Write) -> None:
    """End a write that did not take place; its pages stay, unsaved."""
    tier.end_write(write, np.zeros(len(write.index), dtype=np.bool_))
    tier.end_copy(write.started)
