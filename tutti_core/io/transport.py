"""The only door to storage: batches of reads and writes between memory and device extents.

A batch is arrays, never an object per I/O, and everything has a stated maximum. One *item* is one
contiguous, block-aligned extent of one device; its bytes are gathered from or scattered to a list
of memory *fragments*. Implementations: `posix.py` (the reference), `uring.py`, and
`tutti_core.testing.FaultyDevices` (memory, with faults). `tutti_core.testing.conformance` holds
the checks that each must pass.

Invariants every implementation keeps
    - A status of 0 means that all bytes of the item moved; anything else is a negative errno.
    - Items fail alone: the rest of the batch goes on.
    - Memory belongs to the batch from `submit` until its result was returned by `wait` or the
      transport was closed.
    - Nothing is promised about order between items or batches. Callers order by waiting.
    - A write is durable only after a later `flush` of its device returned 0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tutti_core.errors import BusyError, InternalError, StoreClosedError

logger = logging.getLogger("tutti")

BLOCK_BYTES = 4096
"""Device offsets are multiples of this, and so are the extents that slots occupy."""

BATCH_ITEMS_MAX = 65_536
BATCH_FRAGMENTS_MAX = 4_194_304
BATCHES_IN_FLIGHT_MAX = 256

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]


class Op(IntEnum):
    """Direction of a batch, seen from the device."""

    READ = 0
    WRITE = 1


@dataclass(frozen=True, slots=True)
class Device:
    """One pool file or block device that a transport works on.

    `capacity_bytes` bounds every extent: an item that ends beyond it fails with -ERANGE and touches
    nothing.
    """

    path: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Bounds of a transport; every one has a reason and a default that suits one NVMe drive.

    queue_depth         transfers in flight on one device.
    transfer_bytes_max  a larger item is moved in several transfers; a multiple of BLOCK_BYTES.
    bounce_bytes        memory per device for fragments that cannot be moved in place.
    software_nvme       of the gpu transport: serve files by NVMe controllers in software, for tests
                        and for machines without a drive to give away.
    gpu_executor        of the gpu transport: who issues commands, "cuda", "cpu", or with "auto" a
                        GPU if there is one.
    """

    queue_depth: int = 64
    transfer_bytes_max: int = 1 << 20
    bounce_bytes: int = 16 << 20
    software_nvme: bool = False
    gpu_executor: str = "auto"


@dataclass(frozen=True, slots=True)
class Batch:
    """Up to BATCH_ITEMS_MAX transfers in one direction, as parallel arrays.

    With n items and m fragments:

    op              READ or WRITE, for all items.
    device          (n,) uint32, index into the transport's devices.
    offset_bytes    (n,) uint64, multiples of BLOCK_BYTES.
    fragment_start  (n + 1,) uint32, rising from 0 to m; item i owns fragments
                    fragment_start[i] .. fragment_start[i+1] - 1, in the order of its bytes.
    address         (m,) uint64, virtual addresses; any alignment.
    length_bytes    (m,) uint64, each > 0.
    checksum        compute XXH3-64 of each item's bytes: of the source before a write, of the
                    destination after a read.

    An item's length is the sum of its fragments' lengths. Where it is no multiple of BLOCK_BYTES,
    the extent reaches to the next multiple; the gap is written as zeros and ignored on a read.
    All arrays are C-contiguous.
    """

    op: Op
    device: U32
    offset_bytes: U64
    fragment_start: U32
    address: U64
    length_bytes: U64
    checksum: bool = True

    @property
    def item_count(self) -> int:
        """Number of items, n."""
        return len(self.device)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Outcome of a batch, item by item.

    status      (n,) int32, 0 or a negative errno.
    checksum    (n,) uint64, XXH3-64 of each item with status 0; undefined where the status is not 0
                or the batch asked for none.
    """

    status: I32
    checksum: U64


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport does on these devices, and why it is not doing better.

    `direct` says for each device whether the page cache is bypassed (O_DIRECT). `notes` are
    sentences for people: what was refused by the machine and what is used instead.
    """

    name: str
    direct: tuple[bool, ...]
    registered_buffers: bool
    registered_files: bool
    queue_depth: int
    transfer_bytes_max: int
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class TransportStats:
    """Counters since the transport was opened; monotonic, read without a lock.

    device_items    items that ended, well or not, by device; empty where that is not counted.
    device_pending  items that were submitted and have not ended, likewise.
    """

    read_items: int = 0
    read_bytes: int = 0
    write_items: int = 0
    write_bytes: int = 0
    failed_items: int = 0
    bounced_bytes: int = 0
    short_transfers: int = 0
    flushes: int = 0
    device_items: list[int] = field(default_factory=list)
    device_pending: list[int] = field(default_factory=list)
    extra: dict[str, int] = field(default_factory=dict)


@runtime_checkable
class Transport(Protocol):
    """Moves batches. All methods may be called from any thread; only `flush` and `wait` block."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices this transport was opened on, in the order that batches index them."""
        ...

    def capabilities(self) -> Capabilities:
        """What is in use on this machine. Constant for the life of the transport."""
        ...

    def register(self, address: int, length_bytes: int) -> int:
        """Announce memory that later batches will use; returns an id for `unregister`.

        Registration is an optimisation: unregistered memory works too, and a machine that refuses
        (locked-memory limit) is reported by `capabilities`, not raised. The memory must stay mapped
        until `unregister` or `close`.
        """
        ...

    def unregister(self, region: int) -> None:
        """Forget registered memory. No batch that uses it may be in flight."""
        ...

    def submit(self, batch: Batch) -> int:
        """Start a batch and return its ticket without waiting for I/O.

        Copies the arrays; the memory they point at is used until the batch ends.

        Raises
            ValueError: the arrays do not fit together (a mistake of the caller).
            BusyError: BATCHES_IN_FLIGHT_MAX batches are in flight; nothing was started.
            StoreClosedError: after `close`.
        """
        ...

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """Return the result of a batch, or None if it is not finished after `timeout_s` seconds.

        A ticket is spent once its result was returned. `timeout_s` of 0 polls.

        Raises
            KeyError: unknown or spent ticket.
        """
        ...

    def flush(self, device: int) -> int:
        """Make finished writes to one device durable. Returns 0 or a negative errno. Blocks.

        A success covers the writes that began after the last failure of the device had returned,
        and no others: the system reports a lost write once, to whoever flushes first, and takes it
        for written from then on.
        """
        ...

    def stats(self) -> TransportStats:
        """Counters so far."""
        ...

    def close(self) -> None:
        """Finish what is in flight, then let go of files, rings and threads. Idempotent."""
        ...


def start_batch(
    transport: Transport, batch: Batch, count: Callable[[str, int], None]
) -> int | None:
    """Submit a batch; None where the transport fails to take it, which is counted and logged.

    Such a batch was not started. That costs its pages, and not the thread that came with it.

    Raises
        BusyError, StoreClosedError: see `Transport.submit`.
        InternalError: an invariant broke.
    """
    try:
        return transport.submit(batch)
    except (BusyError, StoreClosedError, InternalError):
        raise
    except Exception:
        logger.exception("a batch of %d transfers could not be started", batch.item_count)
        count("submit_errors", 1)
        return None


class Regions:
    """Ids of registered memory, for transports to which registration changes nothing.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._next = 1
        self._known: set[int] = set()

    def add(self, address: int, length_bytes: int) -> int:
        """Return a new id. Raises ValueError for an impossible address or length."""
        if address <= 0 or length_bytes <= 0:
            raise ValueError(f"cannot register {length_bytes} bytes at address {address:#x}")
        region, self._next = self._next, self._next + 1
        self._known.add(region)
        return region

    def remove(self, region: int) -> None:
        """Forget an id. Raises KeyError for an unknown or forgotten one."""
        self._known.remove(region)


def too_many_batches(op: str = "submit") -> BusyError:
    """What `Transport.submit` raises at BATCHES_IN_FLIGHT_MAX."""
    return BusyError(
        f"{BATCHES_IN_FLIGHT_MAX} batches are in flight",
        op=op,
        retryable=True,
        hint="wait for one of them",
    )


def check_owner(pid: int) -> None:
    """Refuse a forked child the transport that process `pid` opened: its workers stayed there.

    Raises
        StoreClosedError
    """
    if os.getpid() != pid:
        raise StoreClosedError(
            "the transport belongs to the process that this one was forked from",
            hint="open one of its own",
        )


def check_batch(batch: Batch, device_count: int) -> None:
    """Raise ValueError unless the arrays of `batch` fit together. O(n + m), no I/O."""
    n, m = len(batch.device), len(batch.address)
    start = batch.fragment_start
    if not 0 < n <= BATCH_ITEMS_MAX or m > BATCH_FRAGMENTS_MAX:
        raise ValueError(
            f"a batch holds 1 to {BATCH_ITEMS_MAX} items and at most {BATCH_FRAGMENTS_MAX} "
            f"fragments; got {n} items, {m} fragments"
        )
    if len(batch.offset_bytes) != n or len(start) != n + 1 or len(batch.length_bytes) != m:
        raise ValueError("the arrays of a batch have different lengths")
    if int(start[0]) != 0 or int(start[-1]) != m or bool(np.any(start[1:] <= start[:-1])):
        raise ValueError("fragment_start must rise from 0 to the number of fragments")
    if bool(np.any(batch.device >= device_count)):
        raise ValueError(f"device index out of range; there are {device_count} devices")
    if bool(np.any(batch.offset_bytes % BLOCK_BYTES)):
        raise ValueError(f"offset_bytes must be a multiple of {BLOCK_BYTES}")
    if bool(np.any(batch.length_bytes == 0)):
        raise ValueError("a fragment has length 0")


def count_items(stats: TransportStats, batch: Batch, status: I32) -> None:
    """Add a finished batch to the counters of items and bytes."""
    good = status == 0
    starts = batch.fragment_start[:-1].astype(np.intp)
    length = int(np.add.reduceat(batch.length_bytes, starts)[good].sum())
    items = int(np.count_nonzero(good))
    stats.failed_items += len(good) - items
    if batch.op is Op.READ:
        stats.read_items += items
        stats.read_bytes += length
    else:
        stats.write_items += items
        stats.write_bytes += length


def checked_copy(batch: Batch, device_count: int) -> Batch:
    """Return a copy of `batch` with arrays of its own, of the types it documents.

    Raises
        ValueError: see `check_batch`.
    """
    copy = Batch(
        op=Op(batch.op),
        device=np.array(batch.device, np.uint32),
        offset_bytes=np.array(batch.offset_bytes, np.uint64),
        fragment_start=np.array(batch.fragment_start, np.uint32),
        address=np.array(batch.address, np.uint64),
        length_bytes=np.array(batch.length_bytes, np.uint64),
        checksum=batch.checksum,
    )
    check_batch(copy, device_count)
    return copy
