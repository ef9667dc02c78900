"""The reference transport: blocking preadv and pwritev on a few threads.

Written to be obviously right rather than fast; every other transport is compared with this one.

Invariants
    - A status starts as -EIO and becomes 0 only after the last byte of its item moved.
    - One item is moved by one worker from front to back, in steps of at most `transfer_bytes_max`
      bytes and IOV_MAX fragments. What landed of a failed write, and what arrived of a failed read,
      may be any prefix: nothing may be assumed about it.
    - Workers touch the memory of a batch only before its result is ready.
    - Each device has workers of its own: one that stalls holds up nobody else's items.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from errno import EAGAIN, EFAULT, EINVAL, EIO, ENODATA, ERANGE
from functools import partial
from queue import SimpleQueue
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from tutti_core.errors import (
    ConfigError,
    StoreClosedError,
    UnsupportedError,
    device_error,
)
from tutti_core.io.marks import Marked
from tutti_core.io.reopen import open_again
from tutti_core.io.transport import (
    BATCHES_IN_FLIGHT_MAX,
    BLOCK_BYTES,
    I32,
    U64,
    Batch,
    BatchResult,
    Capabilities,
    Device,
    Op,
    Regions,
    TransportOptions,
    TransportStats,
    check_owner,
    checked_copy,
    too_many_batches,
)

WORKERS_MAX = 4
CHUNKS_PER_WORKER = 4
"""A device's part of a batch is cut into this many runs of items per worker, so that one slow run
idles nobody."""

RETRIES_MAX = 16
RETRY_DELAY_S = 0.001
"""EAGAIN is tried again this often, with this pause; no local file system is expected to say it."""

IOV_MAX = 1024
"""Fragments in one call; Linux UIO_MAXIOV."""

_LOG = logging.getLogger("tutti")
_ZEROS = memoryview(bytes(BLOCK_BYTES))
_PYBUF_READ, _PYBUF_WRITE = 0x100, 0x200
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def memory_at(address: int, length_bytes: int, *, writable: bool) -> memoryview:
    """Return a view of raw memory, which the caller keeps mapped for as long as the view lives."""
    flags = _PYBUF_WRITE if writable else _PYBUF_READ
    return cast(memoryview, _memory_view(address, length_bytes, flags))


def check_options(devices: Sequence[Device], options: TransportOptions) -> None:
    """Raise ConfigError unless `devices` and `options` are within the bounds of a transport."""
    if not devices:
        raise ConfigError("devices: a transport needs at least one", op="open")
    for device in devices:
        if not BLOCK_BYTES <= device.capacity_bytes < 1 << 63:  # file offsets are signed
            raise ConfigError(
                f"capacity_bytes of {device.path}: {device.capacity_bytes} is not between one "
                f"block, {BLOCK_BYTES}, and 2**63 - 1",
                op="open",
                device=device.path,
            )
    if options.queue_depth < 1:
        raise ConfigError(f"queue_depth: {options.queue_depth} is not at least 1", op="open")
    size = options.transfer_bytes_max
    if size < BLOCK_BYTES or size % BLOCK_BYTES:
        raise ConfigError(
            f"transfer_bytes_max: {size} is not a positive multiple of {BLOCK_BYTES}", op="open"
        )


class _Cursor:
    """A place in the bytes of one item, which are spread over `parts`."""

    __slots__ = ("_index", "_inside", "done_bytes", "parts")

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts
        self.done_bytes = 0
        self._index = 0
        self._inside = 0

    def window(self, bytes_max: int, parts_max: int) -> list[memoryview]:
        """Return the bytes that follow, as at most `parts_max` pieces; does not move."""
        pieces: list[memoryview] = []
        inside = self._inside
        for part in self.parts[self._index : self._index + parts_max]:
            piece = part[inside : inside + bytes_max]
            pieces.append(piece)
            bytes_max -= len(piece)
            inside = 0
            if bytes_max == 0:
                break
        return pieces

    def advance(self, count_bytes: int) -> None:
        """Move on by what was transferred; at most to the end."""
        self.done_bytes += count_bytes
        while count_bytes:
            step = min(len(self.parts[self._index]) - self._inside, count_bytes)
            count_bytes -= step
            self._inside += step
            if self._inside == len(self.parts[self._index]):
                self._index, self._inside = self._index + 1, 0


@dataclass(slots=True)
class _Flight:
    """A batch between `submit` and the `wait` that returns its result.

    order       its items by device; a chunk is a run of these.
    """

    batch: Batch
    order: list[int]
    status: I32
    checksum: U64
    chunks_left: int
    done: threading.Event


Task = Callable[[], None]


class PosixTransport:
    """The reference `Transport`, on files or block devices that exist already.

    Never creates, truncates or locks a file. A batch is in flight until its result was returned, so
    results that nobody collects count against BATCHES_IN_FLIGHT_MAX. Results of batches that
    `close` drained can still be collected after it.

    Parameters
        devices: at least one; each is opened read-write.
        options: `queue_depth` bounds the workers of each device, beyond WORKERS_MAX it changes
            nothing; `bounce_bytes` is not used.
        direct: bypass the page cache (O_DIRECT). All bytes then go through one aligned buffer of
            `transfer_bytes_max` per worker.
        notes: sentences to put before those of this transport in `capabilities`.
    Raises
        ConfigError: an option is out of bounds.
        UnsupportedError: `direct`, and the file system refuses O_DIRECT.
        DeviceError: a file is missing or may not be opened for reading and writing, or the system
            starts no more threads.
    Threads    any; one lock around the table of batches, one per device around flush.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
        *,
        direct: bool = False,
        notes: tuple[str, ...] = (),
    ) -> None:
        check_options(devices, options)
        self._devices = tuple(devices)
        self._transfer_bytes_max = options.transfer_bytes_max
        self._direct = direct
        self._workers = min(WORKERS_MAX, options.queue_depth)
        self._notes = (*notes, self._note())
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._flights: dict[int, _Flight] = {}
        self._next_ticket = 1
        self._regions = Regions()
        self._stats = TransportStats(device_items=[0] * len(devices))
        self._submitted = [0] * len(devices)
        self._flush_locks = [threading.Lock() for _ in devices]
        self._bounces = threading.local()
        self._fds = _open_all(self._devices, direct)
        self._marked: Marked | None = None
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in devices]
        self._threads: list[threading.Thread] = []
        self._finalize = weakref.finalize(self, _let_go, self._fds, self._queues, self._workers)
        self._finalize.atexit = False  # stores that are open at the exit are closed after that
        self._start_workers()

    def _note(self) -> str:
        how = (
            "O_DIRECT through one aligned buffer per worker"
            if self._direct
            else "buffered I/O through the page cache"
        )
        return f"posix: blocking preadv and pwritev on {self._workers} threads a device, {how}"

    def _start_workers(self) -> None:
        """All at once: a thread that the system refuses is noticed while opening, not in a batch.

        They do not keep the interpreter from ending; a device may not answer any more.
        """
        try:
            for queue in self._queues:
                for _ in range(self._workers):
                    worker = threading.Thread(
                        target=_work, args=(queue,), name="tutti-posix", daemon=True
                    )
                    worker.start()
                    self._threads.append(worker)
        except RuntimeError:
            self._finalize()
            raise device_error(
                "start a thread", EAGAIN, hint="raise the limit of threads, ulimit -u"
            ) from None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices this transport was opened on, in the order that batches index them."""
        return self._devices

    def capabilities(self) -> Capabilities:
        """What is in use. `queue_depth` is the number of workers of each device."""
        return Capabilities(
            name="posix",
            direct=(self._direct,) * len(self._devices),
            registered_buffers=False,
            registered_files=False,
            queue_depth=self._workers,
            transfer_bytes_max=self._transfer_bytes_max,
            notes=self._notes,
        )

    def register(self, address: int, length_bytes: int) -> int:
        """Return an id for `unregister`; registration changes nothing here."""
        check_owner(self._pid)
        with self._lock:
            self._check_open("register")
            return self._regions.add(address, length_bytes)

    def unregister(self, region: int) -> None:
        """Forget a region. Raises KeyError for an unknown or forgotten id."""
        with self._lock:
            self._regions.remove(region)

    def submit(self, batch: Batch) -> int:
        """Queue a batch for the workers and return its ticket; see `Transport.submit`."""
        batch = checked_copy(batch, len(self._devices))
        count = batch.item_count
        order = np.argsort(batch.device, kind="stable")
        chunks = _chunks(batch.device[order], self._workers * CHUNKS_PER_WORKER)
        flight = _Flight(
            batch=batch,
            order=order.tolist(),
            status=np.full(count, -EIO, np.int32),
            checksum=np.zeros(count, np.uint64),
            chunks_left=len(chunks),
            done=threading.Event(),
        )
        check_owner(self._pid)
        with self._lock:
            self._check_open("submit")
            if len(self._flights) >= BATCHES_IN_FLIGHT_MAX:
                raise too_many_batches()
            ticket = self._next_ticket
            self._next_ticket += 1
            self._flights[ticket] = flight
            # Under the lock: nothing may reach a queue after `close` has.
            for device, first, last in chunks:
                self._submitted[device] += last - first
                self._queues[device].put(partial(self._run_chunk, flight, first, last))
        return ticket

    def _run_chunk(self, flight: _Flight, first: int, last: int) -> None:
        """Move a run of items, all of one device. Never raises; always counts itself finished."""
        items = flight.order[first:last]
        tally = TransportStats()
        device = int(flight.batch.device[items[0]])
        done = 0
        try:
            for item in items:
                flight.status[item] = self._run_item(flight, item, tally)
                done += 1
                with self._lock:  # at once: who waits may see that it moves
                    self._stats.device_items[device] += 1
        except Exception:
            _LOG.exception("posix transport: a worker failed; its items end with EIO")
        tally.failed_items = int(np.count_nonzero(flight.status[items]))
        with self._lock:
            self._stats.device_items[device] += len(items) - done
            self._count(tally)
            flight.chunks_left -= 1
            if flight.chunks_left == 0:
                flight.done.set()

    def _count(self, tally: TransportStats) -> None:
        """Add to the counters. Called with the lock held."""
        total = self._stats
        total.read_items += tally.read_items
        total.read_bytes += tally.read_bytes
        total.write_items += tally.write_items
        total.write_bytes += tally.write_bytes
        total.failed_items += tally.failed_items
        total.bounced_bytes += tally.bounced_bytes
        total.short_transfers += tally.short_transfers

    def _run_item(self, flight: _Flight, item: int, tally: TransportStats) -> int:
        """Move one item and return its status; stores its checksum."""
        batch = flight.batch
        mine = slice(int(batch.fragment_start[item]), int(batch.fragment_start[item + 1]))
        lengths = batch.length_bytes[mine].tolist()
        addresses = batch.address[mine].tolist()
        length = sum(lengths)  # Python integers: the sum of hostile lengths does not wrap
        extent = -(-length // BLOCK_BYTES) * BLOCK_BYTES
        device, offset = int(batch.device[item]), int(batch.offset_bytes[item])
        if offset + extent > self._devices[device].capacity_bytes:
            return -ERANGE
        if 0 in addresses:
            return -EFAULT
        reading = batch.op is Op.READ
        parts = [
            memory_at(address, size, writable=reading)
            for address, size in zip(addresses, lengths, strict=True)
        ]
        if not reading and batch.checksum:
            flight.checksum[item] = _checksum(parts)
        status = self._move(batch.op, device, offset, parts, length, tally)
        if status == 0 and reading:
            tally.read_items += 1
            tally.read_bytes += length
            if batch.checksum:
                flight.checksum[item] = _checksum(parts)
        elif status == 0:
            tally.write_items += 1
            tally.write_bytes += length
        return status

    def _move(
        self,
        op: Op,
        device: int,
        offset: int,
        parts: list[memoryview],
        length: int,
        tally: TransportStats,
    ) -> int:
        """Transfer the bytes of one item in as many steps as it takes. Returns a status."""
        gap = -length % BLOCK_BYTES
        needed = length
        if op is Op.WRITE:
            needed += gap
            parts = [*parts, _ZEROS[:gap]] if gap else parts
        elif gap and self._direct:  # an O_DIRECT read has to take whole blocks
            parts = [*parts, memoryview(bytearray(gap))]
        cursor = _Cursor(parts)
        step = self._step_direct if self._direct else self._step
        retries_left = RETRIES_MAX
        while cursor.done_bytes < needed:
            try:
                wanted, moved = step(op, self._fds[device], offset + cursor.done_bytes, cursor)
            except OSError as error:
                if error.errno == EAGAIN and retries_left:
                    retries_left -= 1
                    time.sleep(RETRY_DELAY_S)
                    continue
                return -(error.errno or EIO)
            tally.bounced_bytes += moved if self._direct else 0
            if moved < wanted:
                tally.short_transfers += 1
                if self._direct and cursor.done_bytes + moved < needed:
                    moved -= moved % BLOCK_BYTES  # the next step has to start on a block again
            if moved == 0:
                return -ENODATA if op is Op.READ else -EIO
            cursor.advance(moved)
        return 0

    def _step(self, op: Op, fd: int, offset: int, cursor: _Cursor) -> tuple[int, int]:
        """One call to the kernel. Returns the bytes asked for and the bytes moved."""
        pieces = cursor.window(self._transfer_bytes_max, IOV_MAX)
        wanted = sum(map(len, pieces))
        call = os.preadv if op is Op.READ else os.pwritev
        return wanted, call(fd, pieces, offset)

    def _step_direct(self, op: Op, fd: int, offset: int, cursor: _Cursor) -> tuple[int, int]:
        """As `_step`, by way of this worker's aligned buffer."""
        bounce: memoryview | None = getattr(self._bounces, "view", None)
        if bounce is None:
            bounce = memoryview(mmap.mmap(-1, self._transfer_bytes_max))
            self._bounces.view = bounce
        pieces = cursor.window(len(bounce), len(cursor.parts))
        wanted = sum(map(len, pieces))
        if op is Op.WRITE:
            place = 0
            for piece in pieces:
                bounce[place : place + len(piece)] = piece
                place += len(piece)
            return wanted, os.pwritev(fd, [bounce[:wanted]], offset)
        moved = os.preadv(fd, [bounce[:wanted]], offset)
        place = 0
        for piece in pieces:
            arrived = bounce[place : min(place + len(piece), moved)]
            piece[: len(arrived)] = arrived
            place += len(arrived)
        return wanted, moved

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """Return the result of a batch, or None if it is not finished; see `Transport.wait`."""
        check_owner(self._pid)
        with self._lock:
            flight = self._flights[ticket]
        if not flight.done.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            return None
        with self._lock:
            del self._flights[ticket]  # KeyError: another thread that waited was faster
        return BatchResult(status=flight.status, checksum=flight.checksum)

    def flush(self, device: int) -> int:
        """Make finished writes durable with fdatasync; see `Transport.flush`."""
        if not 0 <= device < len(self._devices):
            raise ValueError(f"device {device} out of range; there are {len(self._devices)}")
        check_owner(self._pid)
        with self._flush_locks[device]:
            self._check_open("flush")
            status = 0
            try:
                os.fdatasync(self._fds[device])
            except OSError as error:
                status = -(error.errno or EIO)
        with self._lock:
            self._stats.flushes += 1
        return status

    def reopen_device(self, device: int, accept: Callable[[bytes], bool]) -> int:
        """Open a device's path anew and go on with that; see `Reopens`."""
        check_owner(self._pid)
        fresh = open_again(self._devices[device].path, direct=self._direct, accept=accept)
        if fresh < 0:
            return fresh
        if self._marked is not None:
            self._marked.add(os.dup(fresh))
        try:
            with self._flush_locks[device]:
                self._check_open("reopen")
                # The number stays the same, so that no worker can meet somebody else's file.
                os.dup2(fresh, self._fds[device], inheritable=False)
        except OSError as error:
            return -(error.errno or EIO)
        finally:
            os.close(fresh)
        return 0

    def mark(self, number: int) -> None:
        """Mark the files that the transfers use; see `Marks`."""
        self._marked = Marked(number)
        for descriptor in self._fds:
            self._marked.add(os.dup(descriptor))

    def stats(self) -> TransportStats:
        """A copy of the counters so far."""
        with self._lock:
            return replace(
                self._stats,
                extra=dict(self._stats.extra),
                device_items=(ended := self._stats.device_items.copy()),
                device_pending=[n - e for n, e in zip(self._submitted, ended, strict=True)],
            )

    def close(self) -> None:
        """Finish what is in flight, then let go of threads and files. Idempotent.

        In a forked child it only closes the child's copies of the files.
        """
        if os.getpid() != self._pid:
            _close_all(self._fds)
            return
        with self._lock:
            was_closed, self._closed = self._closed, True
            if not was_closed:
                _stop(self._queues, self._workers)
        for worker in self._threads:
            worker.join()
        for lock in self._flush_locks:  # a flush that began before is finished by its own thread
            with lock:
                pass
        if self._marked is not None:
            self._marked.release()
        self._finalize()

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise StoreClosedError(f"{op}: the transport is closed", op=op)


def _checksum(parts: list[memoryview]) -> int:
    """XXH3-64 over the parts, as if they were one run of bytes."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())


def _open_all(devices: Sequence[Device], direct: bool) -> list[int]:
    """Open every device, or none."""
    fds: list[int] = []
    for device in devices:
        try:
            fds.append(
                os.open(device.path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
            )
        except OSError as error:
            _close_all(fds)
            if direct and error.errno == EINVAL:
                raise UnsupportedError(
                    f"the file system of {device.path} refuses O_DIRECT",
                    op="open",
                    device=device.path,
                    errno=EINVAL,
                    hint="open it without direct",
                ) from error
            raise device_error(
                "open",
                error.errno or EIO,
                device=device.path,
                hint="it has to exist and to be readable and writable",
            ) from error
    return fds


def _chunks(device: npt.NDArray[np.uint32], per_device: int) -> list[tuple[int, int, int]]:
    """Cut items that are ordered by device into runs of one device: (device, first, last + 1)."""
    cuts = (np.flatnonzero(device[1:] != device[:-1]) + 1).tolist()
    chunks = []
    for low, high in zip([0, *cuts], [*cuts, len(device)], strict=True):
        size = -(-(high - low) // per_device)
        for first in range(low, high, size):
            chunks.append((int(device[low]), first, min(first + size, high)))
    return chunks


def _work(queue: SimpleQueue[Task | None]) -> None:
    """What a worker does, until it is told to stop. It holds its transport for a task only."""
    while (task := queue.get()) is not None:
        task()
        del task


def _stop(queues: Sequence[SimpleQueue[Task | None]], workers: int) -> None:
    """Let the workers end once they have done what is queued."""
    for queue in queues:
        for _ in range(workers):
            queue.put(None)


def _let_go(fds: list[int], queues: Sequence[SimpleQueue[Task | None]], workers: int) -> None:
    """End what is left of a transport that is closed or that nobody holds any more."""
    _stop(queues, workers)
    _close_all(fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):  # of a device that is gone; the descriptor goes anyhow
            os.close(fds.pop())
