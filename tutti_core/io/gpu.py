"""The gpu transport: NVMe commands issued by GPU threads, or by CPU threads in their place.

Each device is one namespace with a ring of its own (`gpu_device.py`) and a thread here, which turns
the items of batches into groups of transfers (`gpu_plan.py`), issues a few groups ahead, and
collects them. Python works once for a group, never for a transfer.

Memory
    Fragments in registered memory that fit the device's blocks are moved in place. Everything else
    goes through a bounce arena of `bounce_bytes` a device, by copies of the CPU.

When a device does not answer
    A transfer that has no completion in time fails with -ETIMEDOUT, after the controller was reset:
    until then its memory is the device's. A device that is gone, or cannot be reset, fails all its
    items with -ENODEV at once. The other devices go on.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np

from tutti_core import hashing
from tutti_core.errors import ConfigError, StoreClosedError, UnsupportedError
from tutti_core.gio.executor import CpuExecutor, Executor
from tutti_core.io.gpu_device import GpuDevice, Opened, open_pci, open_soft
from tutti_core.io.gpu_plan import Group, Index, Limits, Pieces, groups_of, pieces_of
from tutti_core.io.posix import check_options
from tutti_core.io.transport import (
    BATCHES_IN_FLIGHT_MAX,
    BLOCK_BYTES,
    I32,
    U32,
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
    count_items,
    too_many_batches,
)
from tutti_core.memcopy import copy_pieces
from tutti_core.nvme.status import TIMEOUT, errnos_of

DEVICES_MAX = 16
GROUPS_AHEAD = 4
"""Groups of one device in flight; each has a part of the bounce arena."""
GROUP_TRANSFERS_MAX = 4096
GROUP_PIECES_MAX = 4096
GPU_QUEUE_PAIRS = 8
"""For GPU threads; one more is the CPU's, because a GPU's atomics are not atomic to it."""
TIMEOUT_S = 10.0
STATUSES_MAX = 64
"""Different NVMe statuses that are counted."""

_LOG = logging.getLogger("tutti")

Opener = Callable[[Device, TransportOptions], Opened]


@dataclass(slots=True)
class _Flight:
    """A batch between `submit` and the `wait` that returns its result."""

    batch: Batch
    status: I32
    checksum: U64
    parts_left: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Part:
    """What a batch has for one device."""

    flight: _Flight
    items: Index


@dataclass(slots=True)
class _Flying:
    """A group that was issued."""

    part: _Part
    pieces: Pieces
    group: Group
    iocbs: list[int]
    slot: int
    last: bool
    """No further group of this part comes after it."""


class GpuTransport:
    """`Transport` over NVMe namespaces that this process drives itself.

    Parameters
        devices: at most DEVICES_MAX. What a path names is the opener's matter; by default files,
            or block devices, each served by a software controller.
        options: `queue_depth` commands in flight on a device; `bounce_bytes` a device.
        open_device: opens the controller of a device.
        executor: runs the launches.
        timeout_s: of one launch.
    Raises
        ConfigError: an option is out of bounds.
        DeviceError, UnsupportedError: a device cannot be opened, or not be used.
    Threads    any. One thread a device moves data; the GIL is released around all that takes time.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
        *,
        open_device: Opener | None = None,
        executor: Executor | None = None,
        timeout_s: float = TIMEOUT_S,
        notes: tuple[str, ...] = (),
    ) -> None:
        check_options(devices, options)
        if len(devices) > DEVICES_MAX:
            raise ConfigError(f"devices: {len(devices)} are more than {DEVICES_MAX}", op="open")
        if options.bounce_bytes < GROUPS_AHEAD * BLOCK_BYTES:
            raise ConfigError(
                f"bounce_bytes: {options.bounce_bytes} is less than {GROUPS_AHEAD} blocks",
                op="open",
            )
        self._devices = tuple(devices)
        self._options = options
        self._executor = executor if executor is not None else CpuExecutor()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._flights: dict[int, _Flight] = {}
        self._next_ticket = 1
        self._ids = Regions()
        self._regions: dict[int, list[tuple[_Mover, int]]] = {}
        self._refused = ""
        self._stats = TransportStats(
            device_items=[0] * len(devices), device_pending=[0] * len(devices)
        )
        self._statuses: dict[int, int] = {}
        self._close_lock = threading.Lock()
        self._at_end: tuple[Capabilities, dict[str, int]] | None = None
        self._movers: list[_Mover] = []
        opener = open_device if open_device is not None else _open_file
        with contextlib.ExitStack() as undo:
            for number, device in enumerate(devices):
                opened = opener(device, options)
                namespace = GpuDevice(device, opened, self._executor, timeout_s)
                undo.callback(namespace.close)
                mover = _Mover(namespace, number, options, self)
                self._movers.append(mover)
                undo.callback(mover.join)
            undo.pop_all()
        self._notes = (*self._own_notes(), *notes)

    def _own_notes(self) -> tuple[str, ...]:
        ways = sorted({mover.device.what for mover in self._movers})
        who = "GPU threads" if self._executor.name == "cuda" else "CPU threads"
        return (
            f"gpu: {who} issue commands to {' and '.join(ways)}",
            "gpu: checksums are computed on the host",
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices this transport was opened on, in the order that batches index them."""
        return self._devices

    def capabilities(self) -> Capabilities:
        """What is in use. The notes grow when memory cannot be registered."""
        if self._at_end is not None:
            return self._at_end[0]
        return Capabilities(
            name="gpu",
            direct=tuple(mover.device.what != "a software controller" for mover in self._movers),
            registered_buffers=not self._refused,
            registered_files=False,
            queue_depth=self._options.queue_depth,
            transfer_bytes_max=min(mover.device.transfer_bytes_max for mover in self._movers),
            notes=(*self._notes, self._refused) if self._refused else self._notes,
        )

    # ---- memory ----
    def register(self, address: int, length_bytes: int) -> int:
        """Let every device reach memory; see `Transport.register`."""
        check_owner(self._pid)
        with self._lock:
            self._check_open("register")
            region = self._ids.add(address, length_bytes)
        parts = []
        for mover in self._movers:
            known = mover.device.register(address, length_bytes)
            if known >= 0:
                parts.append((mover, known))
            elif known != -errno.EEXIST:  # else other regions have it already
                self._refused = (
                    f"gpu: registering memory was refused ({os.strerror(-known)}); it goes "
                    "through the bounce arena"
                )
        with self._lock:
            self._regions[region] = parts
        return region

    def unregister(self, region: int) -> None:
        """Forget a region. Raises KeyError for an unknown or forgotten id."""
        check_owner(self._pid)
        with self._lock:
            self._ids.remove(region)
            parts = self._regions.pop(region)
        for mover, known in parts:
            mover.device.unregister(known)

    # ---- batches ----
    def submit(self, batch: Batch) -> int:
        """Give each device's thread its items; see `Transport.submit`."""
        batch = checked_copy(batch, len(self._devices))
        check_owner(self._pid)
        count = batch.item_count
        status = self._hopeless(batch)
        flight = _Flight(batch, status, np.zeros(count, np.uint64), 0)
        order = np.argsort(batch.device, kind="stable")
        order = order[status[order] == 0]
        bounds = np.searchsorted(batch.device[order], np.arange(len(self._devices) + 1))
        parts = [
            (mover, _Part(flight, order[bounds[at] : bounds[at + 1]].astype(np.int64)))
            for at, mover in enumerate(self._movers)
            if bounds[at] < bounds[at + 1]
        ]
        flight.parts_left = len(parts)
        with self._lock:
            self._check_open("submit")
            if len(self._flights) >= BATCHES_IN_FLIGHT_MAX:
                raise too_many_batches()
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._flights[ticket] = flight
            self._note_devices(batch.device, 1)
            self._note_ended(batch.device[status != 0])
            if not parts:
                flight.done.set()
            for mover, part in parts:
                mover.push(part)
        return ticket

    def _hopeless(self, batch: Batch) -> I32:
        """Statuses of items that no device can be asked for; 0 for the others."""
        starts = batch.fragment_start[:-1].astype(np.intp)
        whole = np.uint64(1 << 63)
        # Sums of hostile lengths wrap; one length beyond any device is beyond them all.
        absurd = np.logical_or.reduceat(batch.length_bytes >= whole, starts)
        length = np.add.reduceat(np.minimum(batch.length_bytes, whole).astype(np.float64), starts)
        absurd |= length >= float(whole)
        exact = np.add.reduceat(
            np.where(batch.length_bytes >= whole, 0, batch.length_bytes), starts
        )
        exact = exact.astype(np.uint64)
        block = np.uint64(BLOCK_BYTES)
        extent = (np.where(absurd, 0, exact).astype(np.uint64) + block - np.uint64(1)) // block
        extent *= block
        capacity = np.array([device.capacity_bytes for device in self._devices], np.uint64)
        room = capacity[batch.device]
        outside = absurd | (extent > room)
        outside |= batch.offset_bytes > room - np.minimum(extent, room)
        null = np.logical_or.reduceat(batch.address == 0, starts)
        status = np.where(null, -errno.EFAULT, 0)
        return np.where(outside, -errno.ERANGE, status).astype(np.int32)

    def _note_devices(self, device: U32, sign: int) -> None:
        """Count items that were submitted, or ended. Called with the lock held."""
        for number, more in enumerate(np.bincount(device, minlength=len(self._devices)).tolist()):
            self._stats.device_pending[number] += sign * more

    def _note_ended(self, device: U32) -> None:
        """Called with the lock held."""
        self._note_devices(device, -1)
        for number, more in enumerate(np.bincount(device, minlength=len(self._devices)).tolist()):
            self._stats.device_items[number] += more

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """Return the result of a batch, or None if it is not finished; see `Transport.wait`."""
        check_owner(self._pid)
        with self._lock:
            flight = self._flights[ticket]
        if not flight.done.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            return None
        with self._lock:
            del self._flights[ticket]  # KeyError: another thread that waited was faster
            count_items(self._stats, flight.batch, flight.status)
        return BatchResult(status=flight.status, checksum=flight.checksum)

    def flush(self, device: int) -> int:
        """Make finished writes durable by an NVMe Flush; see `Transport.flush`."""
        if not 0 <= device < len(self._devices):
            raise ValueError(f"device {device} out of range; there are {len(self._devices)}")
        check_owner(self._pid)
        with self._lock:
            self._check_open("flush")
            mover = self._movers[device]
        status = mover.device.flush()
        with self._lock:
            self._stats.flushes += 1
        return status

    def reopen_device(self, device: int, accept: Callable[[bytes], bool]) -> int:
        """Bring a device that is down up again; see `Reopens`."""
        check_owner(self._pid)
        with self._lock:
            self._check_open("reopen")
            mover = self._movers[device]
        return mover.device.reopen(accept)

    def mark(self, number: int) -> None:
        """Mark the files behind software controllers; see `Marks`."""
        for mover in self._movers:
            mover.device.mark(number)

    def stats(self) -> TransportStats:
        """Counters so far; `extra`: launches, commands, doorbells, and failures by NVMe status."""
        at_end = self._at_end
        extra = self._counters() if at_end is None else dict(at_end[1])
        with self._lock:
            extra |= {f"nvme_status_{status:#x}": n for status, n in self._statuses.items()}
            return replace(
                self._stats,
                device_items=list(self._stats.device_items),
                device_pending=list(self._stats.device_pending),
                extra=extra,
            )

    def close(self) -> None:
        """Finish what is in flight, then let go of threads and controllers. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
        with self._close_lock:
            for mover in self._movers:
                mover.dismiss()
            for mover in self._movers:
                mover.join()
            if self._at_end is None:
                self._at_end = self.capabilities(), self._counters()
            # With the last reference to a device its controller goes, and that one's thread.
            with self._lock:
                movers, self._movers = self._movers, []
                self._regions = {region: [] for region in self._regions}
            for mover in movers:
                mover.close()

    def _counters(self) -> dict[str, int]:
        """Of all rings and queues together."""
        total: dict[str, int] = {}
        for mover in self._movers:
            for name, value in mover.device.counters().items():
                total[name] = total.get(name, 0) + value
        return total

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise StoreClosedError(f"{op}: the transport is closed", op=op)

    # ---- called by the movers ----
    def part_ended(self, part: _Part) -> None:
        """All items of a part have their status."""
        flight = part.flight
        with self._lock:
            self._note_ended(flight.batch.device[part.items])
            flight.parts_left -= 1
            if flight.parts_left == 0:
                flight.done.set()

    def note_statuses(self, statuses: U32) -> None:
        """Count failures."""
        kinds, counts = np.unique(statuses[statuses != 0], return_counts=True)
        with self._lock:
            for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
                if kind in self._statuses or len(self._statuses) < STATUSES_MAX:
                    self._statuses[kind] = self._statuses.get(kind, 0) + count

    def note_bounced(self, length_bytes: int) -> None:
        """Count bytes that went through the arena."""
        with self._lock:
            self._stats.bounced_bytes += length_bytes


class _Mover:
    """The thread of one device, and its bounce arena."""

    def __init__(
        self, device: GpuDevice, number: int, options: TransportOptions, transport: GpuTransport
    ) -> None:
        self.device = device
        self._transport = transport
        part_bytes = options.bounce_bytes // GROUPS_AHEAD // BLOCK_BYTES * BLOCK_BYTES
        self._limits = Limits(device.block_bytes, part_bytes, GROUP_TRANSFERS_MAX)
        self._arena = mmap.mmap(-1, part_bytes * GROUPS_AHEAD, flags=mmap.MAP_PRIVATE)
        self._base = np.frombuffer(self._arena, np.uint8).ctypes.data
        self._region = device.register(self._base, part_bytes * GROUPS_AHEAD)
        self._slots = list(range(GROUPS_AHEAD))
        self._jobs: SimpleQueue[_Part | None] = SimpleQueue()
        self._flying: deque[_Flying] = deque()
        self._thread = threading.Thread(target=self._run, name=f"tutti-gpu-{number}", daemon=True)
        self._thread.start()

    def push(self, part: _Part) -> None:
        """Give the thread something to move."""
        self._jobs.put(part)

    def dismiss(self) -> None:
        """Let the thread end after what it has. Does not wait."""
        self._jobs.put(None)

    def join(self) -> None:
        """`dismiss`, and wait for the thread."""
        self.dismiss()
        self._thread.join()

    def close(self) -> None:
        """End the thread, then the device."""
        self.join()
        self.device.close()

    # ---- the thread ----
    def _run(self) -> None:
        ended = False
        while not ended or self._flying:
            part = None
            if not ended and (not self._flying or len(self._flying) < GROUPS_AHEAD):
                try:
                    part = self._jobs.get(block=not self._flying)
                    ended = part is None
                except Empty:
                    pass
            if part is not None:
                self._start(part)
            elif self._flying:
                self._collect()

    def _start(self, part: _Part) -> None:
        """Issue a part's groups; collects older ones where there is no room."""
        try:
            if self.device.down:
                raise OSError(-self.device.down, "the device is down")
            batch = part.flight.batch
            pieces = pieces_of(batch, part.items, self.device.memory, self._limits)
            groups = groups_of(pieces, self._limits, GROUP_PIECES_MAX)
            for group, last in _with_last(groups):
                while not self._slots:
                    self._collect()
                self._issue(part, pieces, group, last)
        except Exception as error:
            self._fail(part, error)

    def _issue(self, part: _Part, pieces: Pieces, group: Group, last: bool) -> None:
        batch = part.flight.batch
        slot = self._slots.pop()
        try:
            base = np.uint64(self._base + slot * self._limits.bounce_bytes)
            address = group.address.copy()
            bounced = pieces.bounced[group.first : group.stop][group.piece]
            address[bounced] += base
            if batch.op is Op.WRITE:
                self._checksums(part, pieces, group)
                if group.bounces:
                    copy_pieces(group.inner + base, group.outer, group.copy_bytes)
                    _zero(group.gap + base, group.gap_bytes)
            iocbs = self.device.issue(
                int(batch.op), group.offset_bytes, address, group.length_bytes
            )
        except BaseException:
            self._slots.append(slot)
            raise
        self._flying.append(_Flying(part, pieces, group, iocbs, slot, last))
        if group.bounces:
            self._transport.note_bounced(int(group.copy_bytes.sum()))

    def _collect(self) -> None:
        """Wait for the oldest group and settle it."""
        flying = self._flying.popleft()
        part, pieces, group = flying.part, flying.pieces, flying.group
        try:
            statuses = np.concatenate([self.device.collect(iocb) for iocb in flying.iocbs])
            if statuses.any():
                self._transport.note_statuses(statuses)
                if (statuses == TIMEOUT).any():
                    self.device.recover()  # all that is in flight has ended first, in its time
                self._settle_failures(part, pieces, group, statuses)
            if part.flight.batch.op is Op.READ:
                if group.bounces:
                    base = np.uint64(self._base + flying.slot * self._limits.bounce_bytes)
                    copy_pieces(group.outer, group.inner + base, group.copy_bytes)
                self._checksums(part, pieces, group)
        except Exception:  # who waits must hear of it, and the thread go on
            _LOG.exception("gpu: a group of %s could not be settled", self.device.device.path)
            part.flight.status[pieces.item[group.first : group.stop]] = -errno.EIO
        self._slots.append(flying.slot)
        if flying.last:
            self._transport.part_ended(part)

    def _settle_failures(self, part: _Part, pieces: Pieces, group: Group, statuses: U32) -> None:
        """Give items the status of their first transfer that failed."""
        errnos = errnos_of(statuses)
        bad = np.flatnonzero(errnos)[::-1]  # of several, the first is written last
        items = pieces.item[group.first + group.piece[bad]]
        part.flight.status[items] = errnos[bad]

    def _checksums(self, part: _Part, pieces: Pieces, group: Group) -> None:
        """Hash the items that end in this group, from the caller's memory."""
        batch = part.flight.batch
        if not batch.checksum:
            return
        item = pieces.item
        stop = group.stop
        ends = np.append(item[1:] != item[:-1], True)[group.first : stop]
        items = item[group.first : stop][ends]
        if not len(items):
            return
        start = batch.fragment_start.astype(np.int64)
        counts = start[items + 1] - start[items]
        first = np.concatenate([[0], np.cumsum(counts)])
        fragment = np.arange(int(first[-1])) + np.repeat(start[items] - first[:-1], counts)
        part.flight.checksum[items] = hashing.checksum_items(
            first.astype(np.uint32), batch.address[fragment], batch.length_bytes[fragment]
        )

    def _fail(self, part: _Part, error: Exception) -> None:
        """End what was not issued of a part, once what was issued has ended."""
        code = -(getattr(error, "errno", None) or errno.EIO)
        if not isinstance(error, OSError):
            _LOG.exception("gpu: a batch could not be issued on %s", self.device.device.path)
        issued = -1
        for flying in self._flying:
            if flying.part is part:
                issued = max(issued, int(flying.pieces.item[flying.group.stop - 1]))
        while any(flying.part is part for flying in self._flying):
            self._collect()
        status = part.flight.status
        mine = part.items
        late = mine if issued < 0 else mine[np.flatnonzero(mine == issued)[0] :]
        status[late] = np.where(status[late] == 0, code, status[late])
        self._transport.part_ended(part)


def _with_last(groups: Iterator[Group]) -> Iterator[tuple[Group, bool]]:
    """Each group, and whether it is the last."""
    group = next(groups)
    for following in groups:
        yield group, False
        group = following
    yield group, True


def _zero(address: U64, length_bytes: U64) -> None:
    """Zero the ends of last blocks in the arena; less than a block each."""
    if len(address):
        zeros = np.zeros(BLOCK_BYTES, np.uint8)
        source = np.full(len(address), zeros.ctypes.data, np.uint64)
        copy_pieces(address, source, length_bytes)


def _open_file(device: Device, options: TransportOptions) -> Opened:
    return open_soft(device, queue_depth=options.queue_depth, queue_pairs=1 + GPU_QUEUE_PAIRS)


def open_gpu(devices: Sequence[Device], options: TransportOptions) -> GpuTransport:
    """Open the gpu transport as the options say: on drives, or with software controllers on files.

    Raises
        UnsupportedError: files, without software controllers; no GPU, where one was asked for; or
            what `GpuTransport` raises.
    """
    for device in devices:
        if not options.software_nvme and not device.path.startswith("pci:"):
            raise UnsupportedError(
                f"gpu takes NVMe drives that are bound to vfio-pci, and {device.path} is behind a "
                "driver of the kernel",
                op="open",
                device=device.path,
                hint="gds or uring are for files; gpu_controller=software serves them for tests",
            )
    executor, notes = _executor_for(options.gpu_executor)
    opener = open_soft if options.software_nvme else open_pci
    pairs = 1 if executor.threads else 1 + GPU_QUEUE_PAIRS

    def open_device(device: Device, options: TransportOptions) -> Opened:
        return opener(device, queue_depth=options.queue_depth, queue_pairs=pairs)

    return GpuTransport(devices, options, open_device=open_device, executor=executor, notes=notes)


def _executor_for(name: str) -> tuple[Executor, tuple[str, ...]]:
    """Who issues the commands, and why it is not a GPU."""
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"gpu_executor: {name!r} is not one of auto, cuda, cpu", op="open")
    if name == "cpu":
        return CpuExecutor(), ()
    module = importlib.import_module("tutti_core.gio.cuda_executor")
    try:
        return module.CudaExecutor(), ()
    except UnsupportedError as error:
        if name == "cuda":
            raise
        return CpuExecutor(), (f"gpu: no GPU issues commands ({error})",)
