"""GPU Direct Storage: device memory read and written straight by cuFile, by way of kvikio.

Items whose fragments are all host memory go to another transport, unchanged; the others are moved
by a few threads (`gds_item.py`).

What it costs
    - A call a fragment, made by Python: some tens of microseconds each. Large fragments suit it;
      for many small ones staging is faster.
    - XXH3 is computed by the CPU, so with `checksum` device bytes are copied to the host once more,
      in steps of `transfer_bytes_max`. That is not refused: a page that nobody compared may be
      wrong.

Invariants
    - A status starts as -EIO and becomes 0 only after the last byte of its item moved.
    - cuFile's calls return when the bytes have moved. What the GPU does with the memory before and
      after is ordered by the caller.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from errno import EIO
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core.errors import StoreClosedError
from tutti_core.io.cuda import HOST, Cuda, CudaDriver
from tutti_core.io.cufile import DeviceBytes, how_it_moves, import_kvikio, open_cufile
from tutti_core.io.gds_item import Bounce, ItemMover, Means, open_blocks
from tutti_core.io.posix import check_options
from tutti_core.io.transport import (
    BATCHES_IN_FLIGHT_MAX,
    I32,
    U64,
    Batch,
    BatchResult,
    Capabilities,
    Device,
    Regions,
    Transport,
    TransportOptions,
    TransportStats,
    check_owner,
    checked_copy,
    count_items,
    too_many_batches,
)
from tutti_core.io.workers import Workers

WORKERS_MAX = 16
CHUNKS_PER_WORKER = 4
"""A batch is cut into this many runs of items per worker, so that one slow run idles nobody."""

_LOG = logging.getLogger("tutti")
_Places = npt.NDArray[np.int16]


@dataclass(slots=True)
class _Region:
    """Registered memory: of a GPU, or, with its id there, of the host's transport."""

    address: int
    end: int
    device: int
    memory: DeviceBytes | None
    host_region: int = 0


class _Known:
    """Registered memory as arrays; replaced as a whole, so that readers need no lock."""

    def __init__(self, regions: Sequence[_Region]) -> None:
        self.regions = tuple(regions)
        self.start = np.array([region.address for region in regions], np.uint64)
        self.end = np.array([region.end for region in regions], np.uint64)
        self.device = np.array([region.device for region in regions], np.int16)
        self._starts = [region.address for region in regions]

    def base_of(self, address: int) -> DeviceBytes | None:
        """The registered device memory of an address: cuFile wants where that begins."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self.regions[at].end:
            return None
        return self.regions[at].memory


@dataclass(slots=True)
class _Flight:
    """A batch between `submit` and the `wait` that returns its result."""

    batch: Batch
    place: _Places
    status: I32
    checksum: U64
    chunks_left: int
    done: threading.Event
    host_ticket: int | None = None
    host_items: npt.NDArray[np.intp] | None = None

    def places(self, item: int) -> list[int]:
        """The GPU of each fragment of an item, or HOST."""
        start = self.batch.fragment_start
        places: list[int] = self.place[int(start[item]) : int(start[item + 1])].tolist()
        return places


class GdsTransport:
    """`Transport` over cuFile, on files or block devices that exist already.

    Parameters
        devices: at least one; each is opened read-write.
        options: `queue_depth` bounds the calls of cuFile in flight, at most WORKERS_MAX.
        host: moves items in host memory, on the same devices; closed with this transport.
        cuda: tells memory apart; default the driver of this machine.
    Raises
        ConfigError: an option is out of bounds.
        UnsupportedError: kvikio, the driver or a GPU is missing; the text says which.
        DeviceError: a device cannot be opened.
    Threads    any. cuFile, copies and hashes run without the GIL.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
        *,
        host: Transport,
        cuda: Cuda | None = None,
    ) -> None:
        check_options(devices, options)
        self._kvikio = import_kvikio()
        self._cuda: Cuda = cuda if cuda is not None else CudaDriver()
        self._devices = tuple(devices)
        self._transfer_bytes_max = options.transfer_bytes_max
        self._workers = min(WORKERS_MAX, options.queue_depth)
        self._host = host
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._flights: dict[int, _Flight] = {}
        self._next_ticket = 1
        self._ids = Regions()
        self._regions: dict[int, _Region] = {}
        self._known = _Known(())
        self._refused = ""
        self._stats = TransportStats(extra={"gds_bytes": 0, "hashed_device_bytes": 0})
        self._close_lock = threading.Lock()
        self._files: list[Any] = []
        self._fds: list[int] = []
        self._direct: list[bool] = []
        self._open_files()
        self._means = Means(
            cuda=self._cuda,
            capacities=tuple(device.capacity_bytes for device in devices),
            files=tuple(self._files),
            fds=tuple(self._fds),
            bounce=Bounce(options.transfer_bytes_max),
            base_of=self._base_of,
        )
        straight, note = how_it_moves(self._kvikio)
        self._notes = (note, *self._own_notes())
        self._direct = [direct and straight for direct in self._direct]
        self._pool = Workers(self._workers, "tutti-gds")
        weakref.finalize(self, self._pool.dismiss).atexit = False

    def _open_files(self) -> None:
        try:
            for device in self._devices:
                fd, direct = open_blocks(device.path)
                self._fds.append(fd)
                self._direct.append(direct)
                self._files.append(open_cufile(self._kvikio, device.path))
        except BaseException:
            self._close_files()
            raise

    def _own_notes(self) -> tuple[str, ...]:
        host = self._host.capabilities()
        return (
            f"gds: host memory goes through {host.name}",
            "gds: checksums of device memory are computed on the host, from a copy",
            *host.notes,
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices this transport was opened on, in the order that batches index them."""
        return self._devices

    def capabilities(self) -> Capabilities:
        """What is in use. The notes grow when cuFile refuses a later `register`."""
        host = self._host.capabilities()
        return Capabilities(
            name="gds",
            direct=tuple(a and b for a, b in zip(self._direct, host.direct, strict=True)),
            registered_buffers=host.registered_buffers,
            registered_files=host.registered_files,
            queue_depth=self._workers,
            transfer_bytes_max=self._transfer_bytes_max,
            notes=(*self._notes, self._refused) if self._refused else self._notes,
        )

    # ---- memory ----
    def register(self, address: int, length_bytes: int) -> int:
        """Announce host memory to the host's transport, device memory to cuFile.

        A refusal of cuFile (too little memory of the GPU can be mapped) is noted, not raised.
        """
        check_owner(self._pid)
        with self._lock:
            self._check_open("register")
            region = self._ids.add(address, length_bytes)
        entry = _Region(address, address + length_bytes, self._cuda.device_of(address), None)
        if entry.device == HOST:
            entry.host_region = self._host.register(address, length_bytes)
        else:
            entry.memory = self._register_device(entry)
        with self._lock:
            self._regions[region] = entry
            self._note_regions()
        return region

    def _register_device(self, entry: _Region) -> DeviceBytes | None:
        memory = DeviceBytes(entry.address, entry.end - entry.address)
        try:
            self._cuda.use(entry.device)
            self._kvikio.buffer.memory_register(memory)
        except Exception as error:
            self._refused = f"gds: cuFile refused to register device memory ({error})"
            return None
        return memory

    def unregister(self, region: int) -> None:
        """Forget a region. Raises KeyError for an unknown or forgotten id."""
        with self._lock:
            self._ids.remove(region)
            entry = self._regions.pop(region)
            self._note_regions()
        if entry.device == HOST:
            self._host.unregister(entry.host_region)
        elif entry.memory is not None:
            with contextlib.suppress(Exception):  # at worst it stays mapped
                self._cuda.use(entry.device)
                self._kvikio.buffer.memory_deregister(entry.memory)

    def _places(self, address: U64) -> _Places:
        """The GPU of each address, or HOST.

        Registered memory costs array work; other memory a call of the driver for each granule.
        """
        known = self._known
        place = np.full(len(address), HOST, np.int16)
        unknown = np.ones(len(address), np.bool_)
        if len(known.start):
            at = np.searchsorted(known.start, address, side="right").astype(np.intp) - 1
            inside = (at >= 0) & (address < known.end[at])
            place[inside] = known.device[at[inside]]
            unknown = ~inside
        if unknown.any():
            size = np.uint64(self._cuda.granule_bytes)
            which, inverse = np.unique(address[unknown] // size, return_inverse=True)
            kinds = [self._cuda.device_of(int(granule)) for granule in which * size]
            place[unknown] = np.array(kinds, np.int16)[inverse]
        return place

    def _base_of(self, address: int) -> DeviceBytes | None:
        return self._known.base_of(address)

    def _note_regions(self) -> None:
        """Make the table of registered memory anew. Called with the lock held."""
        self._known = _Known(sorted(self._regions.values(), key=lambda region: region.address))

    # ---- batches ----
    def submit(self, batch: Batch) -> int:
        """Give host items to the host's transport and the others to the workers."""
        batch = checked_copy(batch, len(self._devices))
        check_owner(self._pid)
        place = self._places(batch.address)
        mixed = np.logical_or.reduceat(place != HOST, batch.fragment_start[:-1].astype(np.intp))
        own, others = np.flatnonzero(mixed), np.flatnonzero(~mixed)
        count = batch.item_count
        size = max(-(-len(own) // (self._workers * CHUNKS_PER_WORKER)), 1)
        starts = range(0, len(own), size)
        flight = _Flight(
            batch=batch,
            place=place,
            status=np.full(count, -EIO, np.int32),
            checksum=np.zeros(count, np.uint64),
            chunks_left=len(starts),
            done=threading.Event(),
        )
        with self._lock:
            self._check_open("submit")
            if len(self._flights) >= BATCHES_IN_FLIGHT_MAX:
                raise too_many_batches()
            if len(others):
                flight.host_items = others
                flight.host_ticket = self._host.submit(_items(batch, others))
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._flights[ticket] = flight
            self._schedule(flight, own, starts)
        return ticket

    def _schedule(self, flight: _Flight, own: npt.NDArray[np.intp], starts: range) -> None:
        """Give the chunks of a batch to the workers. Called with the lock held."""
        if not len(starts):
            flight.done.set()
        for index, first in enumerate(starts):
            try:
                self._pool.submit(self._run_chunk, flight, own[first : first + starts.step])
            except RuntimeError:  # there is no thread: what was not started stays -EIO
                flight.chunks_left -= len(starts) - index
                if flight.chunks_left == 0:
                    flight.done.set()
                return

    def _run_chunk(self, flight: _Flight, items: npt.NDArray[np.intp]) -> None:
        """Move some items. Never raises, and always counts itself as finished."""
        tally = TransportStats(extra={"gds_bytes": 0, "hashed_device_bytes": 0})
        failed: Exception | None = None
        for item in items.tolist():
            try:
                mover = ItemMover(self._means, flight.batch, flight.places(item), item, tally)
                flight.status[item] = mover.run()
                flight.checksum[item] = mover.checksum
            except Exception as error:  # of kvikio, of the driver, of the file system
                flight.status[item] = -(getattr(error, "errno", None) or EIO)
                failed = error
        if failed is not None:
            _LOG.warning("gds: items failed, the last one with: %s", failed)
        with self._lock:
            self._count(tally)
            flight.chunks_left -= 1
            if flight.chunks_left == 0:
                flight.done.set()

    def _count(self, tally: TransportStats) -> None:
        """Add to the counters. Called with the lock held."""
        self._stats.bounced_bytes += tally.bounced_bytes
        self._stats.short_transfers += tally.short_transfers
        for name, value in tally.extra.items():
            self._stats.extra[name] += value

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """Return the result of a batch, or None if it is not finished; see `Transport.wait`."""
        check_owner(self._pid)
        timeout_s = min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            flight = self._flights[ticket]
        if not flight.done.wait(timeout_s):
            return None
        part = None
        if flight.host_ticket is not None:
            part = self._host.wait(flight.host_ticket, max(deadline_s - time.monotonic(), 0.0))
            if part is None:
                return None
        with self._lock:
            del self._flights[ticket]  # KeyError: another thread that waited was faster
            if part is not None:
                flight.status[flight.host_items] = part.status
                flight.checksum[flight.host_items] = part.checksum
            count_items(self._stats, flight.batch, flight.status)
        return BatchResult(status=flight.status, checksum=flight.checksum)

    def flush(self, device: int) -> int:
        """Make finished writes durable: fdatasync covers those of cuFile, it is the same file."""
        status = self._host.flush(device)
        with self._lock:
            self._stats.flushes += 1
        return status

    def stats(self) -> TransportStats:
        """Counters so far; `extra`: bytes that cuFile moved, device bytes hashed on the host."""
        host = self._host.stats()
        with self._lock:
            return replace(
                self._stats,
                bounced_bytes=self._stats.bounced_bytes + host.bounced_bytes,
                short_transfers=self._stats.short_transfers + host.short_transfers,
                extra=dict(self._stats.extra),
            )

    def close(self) -> None:
        """Finish what is in flight, then let go of threads, files and the host's transport."""
        if os.getpid() != self._pid:  # the child's copies; what cuFile has is the parent's
            self._host.close()
            while self._fds:
                os.close(self._fds.pop())
            return
        with self._lock:
            self._closed = True
        self._pool.shutdown()
        with self._close_lock:
            self._host.close()
            self._close_files()

    def _close_files(self) -> None:
        while self._files:
            self._files.pop().close()
        while self._fds:
            os.close(self._fds.pop())

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise StoreClosedError(f"{op}: the transport is closed", op=op)


def _items(batch: Batch, items: npt.NDArray[np.intp]) -> Batch:
    """Some items of a batch as a batch of their own."""
    starts = batch.fragment_start.astype(np.int64)
    counts = (starts[1:] - starts[:-1])[items]
    ends = np.cumsum(counts)
    pieces = np.arange(int(ends[-1])) + np.repeat(starts[items] - (ends - counts), counts)
    return Batch(
        op=batch.op,
        device=batch.device[items],
        offset_bytes=batch.offset_bytes[items],
        fragment_start=np.concatenate([[0], ends]).astype(np.uint32),
        address=batch.address[pieces],
        length_bytes=batch.length_bytes[pieces],
        checksum=batch.checksum,
    )
