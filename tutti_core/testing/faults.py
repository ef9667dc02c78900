"""Devices in memory that fail on command, behind the same door as the real ones.

Operations are what a device sees: one item read or written, or one flush. Each kind is counted
apart from 0, and all of them together in `operations`. Items that end with -ERANGE, or whose memory
is at address 0 and that end with -EFAULT, never reach a device and are not counted.

Faults
    kind         of               effect                                         status
    error        read             destination is filled with SCRIBBLE            -errno
    error        write, flush     nothing lands, nothing becomes durable         -errno
    torn         write            a prefix lands (`keep_bytes`, or seeded)       -errno; errno=0: 0
    lost         write, flush     nothing lands, nothing becomes durable         0
    misdirected  read, write      another extent is read or written
                                  (`target_bytes`, or seeded)                    0
    short        read, write      the front moves, the rest stays what it was
                                  (`keep_bytes`, or seeded)                      0
    duplicated   write            lands, and lands again some operations later   0
    reordered    write            lands some operations later only, whatever
                                  was written or flushed meanwhile               0
    stale        read             the extent as it was before its last write     0
    flip         read             one seeded bit of what is delivered            0
    flip         write            one seeded bit of what was stored              0
    slow         batch            unfinished for `polls` waits, or for ever      (late)
    busy         batch            `submit` raises BusyError                      none
    reorder      (plan)           items, and batches in flight, run in seeded order
    stop_at(n)   (call)           operation n and all later ones                 -EIO
    kill()       (call)           process death: writes in flight land, in part or not
    crash()      (call)           power loss: also, each unflushed block is kept, dropped or torn

With a status of 0 a fault is silent: only a checksum, key or generation kept elsewhere can tell.
What is to land later does so at most LATER_OPERATIONS_MAX operations later, or in `close`; in a
`kill` or `crash` before that, by chance. `slow` with polls=0 and `hold` end with `release`.

A batch runs inside the `wait` that returns its result, or in `close`. That is as late as the
protocol allows, so a caller that reuses memory or flushes before waiting is found out.
One seed and one order of calls give one outcome.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from errno import EFAULT, EIO, ERANGE
from typing import Literal

import numpy as np
import xxhash

from tutti_core.errors import BusyError, StoreClosedError
from tutti_core.io.posix import check_options, memory_at
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
    checked_copy,
)
from tutti_core.testing.batches import extent_bytes
from tutti_core.testing.media import Bytes, Media

SCRIBBLE = 0xDB
"""What a failed read leaves in memory; a caller that uses it anyway stores recognisable junk."""

FOREVER = 1 << 62

LATER_OPERATIONS_MAX = 8
"""Bound on how many operations later a duplicated or reordered write lands."""

FaultKind = Literal[
    "error",
    "torn",
    "lost",
    "misdirected",
    "short",
    "duplicated",
    "reordered",
    "stale",
    "flip",
    "slow",
    "busy",
]
FaultOp = Literal["read", "write", "flush", "batch"]

_SUITED: Mapping[FaultKind, tuple[FaultOp, ...]] = {
    "error": ("read", "write", "flush"),
    "torn": ("write",),
    "lost": ("write", "flush"),
    "misdirected": ("read", "write"),
    "short": ("read", "write"),
    "duplicated": ("write",),
    "reordered": ("write",),
    "stale": ("read",),
    "flip": ("read", "write"),
    "slow": ("batch",),
    "busy": ("batch",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table above, at operations `index` .. `index + count - 1` of kind `op`.

    `op` "batch" counts calls of `submit`. Fields that a kind does not use are ignored. A `count` of
    FOREVER does not end. `device` limits it to one device; the index counts operations of all.
    """

    kind: FaultKind
    op: FaultOp
    index: int = 0
    count: int = 1
    errno: int = EIO
    device: int | None = None
    keep_bytes: int | None = None
    target_bytes: int | None = None
    polls: int = 0

    def __post_init__(self) -> None:
        if self.op not in _SUITED.get(self.kind, ()):
            raise ValueError(f"there is no fault {self.kind!r} of {self.op!r}; see the table")
        if self.target_bytes is not None and self.target_bytes % BLOCK_BYTES:
            raise ValueError(f"target_bytes is not a multiple of {BLOCK_BYTES}")
        if self.errno < (0 if self.kind == "torn" else 1):
            raise ValueError("errno is positive; only a torn write may report success, 0")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong, and when.

    faults    at stated operations; the first that fits is used.
    rates     probability of each (kind, op) at every operation that has no stated fault.
    reorder   run items and batches in seeded order.
    """

    faults: tuple[Fault, ...] = ()
    rates: Mapping[tuple[FaultKind, FaultOp], float] = field(default_factory=dict)
    reorder: bool = False

    def __post_init__(self) -> None:
        for kind, op in self.rates:
            Fault(kind, op)  # raises for a pair that does not exist


@dataclass(slots=True)
class _Flight:
    """A batch between `submit` and the `wait` that returns its result."""

    batch: Batch
    status: I32
    checksum: U64
    polls_left: int = 0
    held: bool = False
    ran: bool = False
    in_time: bool = True
    """Submitted before the device stopped: its writes may land although their status is -EIO."""


class FaultyDevices:
    """A `Transport` over `Media`, with the faults of this module's table.

    Parameters
        media: the bytes to work on, or the capacities of new, zeroed devices.
        seed: decides everything that a fault leaves open.
        plan: see FaultPlan; `arm` adds to it later.
        options: reported by `capabilities`; bounds nothing here.
    Threads    any; one lock, shared by all transports on the same media.
    """

    def __init__(
        self,
        media: Media | Sequence[int],
        *,
        seed: int = 0,
        plan: FaultPlan = FaultPlan(),
        options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.media = media if isinstance(media, Media) else Media(media)
        self._devices = tuple(
            Device(f"memory:{index}", size)
            for index, size in enumerate(self.media.capacities_bytes)
        )
        check_options(self._devices, options)
        self._options = options
        self._plan = plan
        self._armed: list[Fault] = []
        self._rng = random.Random(seed)
        self._changed = threading.Condition(self.media.lock)
        self._flights: dict[int, _Flight] = {}
        self._later: list[tuple[int, int, int, Bytes]] = []  # when, and what: device, offset, bytes
        self._next_ticket = 1
        self._regions = Regions()
        self._counts: dict[FaultOp, int] = {"read": 0, "write": 0, "flush": 0, "batch": 0}
        self._operations = 0
        self._stop: int | None = None
        self._stopped = False
        self._holding = False
        self._closed = False
        self._dead = False
        self._stats = TransportStats()
        self.injected: dict[tuple[FaultKind, FaultOp], int] = {}
        """How often each fault happened, so that a test can tell that it tested something."""

    # -- the protocol ------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, with invented paths."""
        return self._devices

    def capabilities(self) -> Capabilities:
        """Constant; `direct` because nothing is cached above the media."""
        return Capabilities(
            name="faulty",
            direct=(True,) * len(self._devices),
            registered_buffers=False,
            registered_files=False,
            queue_depth=self._options.queue_depth,
            transfer_bytes_max=self._options.transfer_bytes_max,
            notes=("faulty: devices in memory, for tests",),
        )

    def register(self, address: int, length_bytes: int) -> int:
        """Return an id for `unregister`; registration changes nothing here."""
        with self._changed:
            self._check_open("register")
            return self._regions.add(address, length_bytes)

    def unregister(self, region: int) -> None:
        """Forget a region. Raises KeyError for an unknown or forgotten id."""
        with self._changed:
            self._regions.remove(region)

    def submit(self, batch: Batch) -> int:
        """Accept a batch; it runs when it is waited for. See `Transport.submit`."""
        batch = checked_copy(batch, len(self._devices))
        with self._changed:
            self._check_open("submit")
            fault = self._fault("batch")
            if len(self._flights) >= BATCHES_IN_FLIGHT_MAX or (fault and fault.kind == "busy"):
                raise BusyError(
                    f"{len(self._flights)} batches are in flight", op="submit", retryable=True
                )
            flight = _Flight(
                batch,
                status=np.full(batch.item_count, -EIO, np.int32),
                checksum=np.zeros(batch.item_count, np.uint64),
                in_time=not self._stopped,
            )
            if fault:  # slow
                flight.polls_left, flight.held = fault.polls, fault.polls == 0
            ticket = self._next_ticket
            self._next_ticket += 1
            self._flights[ticket] = flight
            return ticket

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """Run a batch and return its result. See `Transport.wait`.

        A batch that is slow by `polls` answers None at once, whatever the timeout; one that is held
        blocks until `release`, for at most `timeout_s`.
        """
        deadline_s = time.monotonic() + min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        with self._changed:
            flight = self._flights[ticket]
            if flight.polls_left:
                flight.polls_left -= 1
                return None
            while self._is_held(flight):
                left_s = min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
                flight = self._flights[ticket]  # KeyError: another thread was faster
            if self._plan.reorder:
                self._run_some_others(flight)
            self._run(flight)
            del self._flights[ticket]
            self._changed.notify_all()
            return BatchResult(status=flight.status, checksum=flight.checksum)

    def flush(self, device: int) -> int:
        """Make what ran so far durable. Returns 0 or a negative errno."""
        if not 0 <= device < len(self._devices):
            raise ValueError(f"device {device} out of range; there are {len(self._devices)}")
        with self._changed:
            self._check_open("flush")
            if not self._begin_operation():
                return -EIO
            fault = self._fault("flush", device)
            self._stats.flushes += 1
            if fault:
                return -fault.errno if fault.kind == "error" else 0
            self.media.flush(device)
            return 0

    def stats(self) -> TransportStats:
        """A copy of the counters so far."""
        return replace(self._stats, extra=dict(self._stats.extra))

    def close(self) -> None:
        """Run what is in flight, held or not. Idempotent. The media stays; see `reopen`."""
        with self._changed:
            self._release(None)
            for flight in self._flights.values():
                self._run(flight)
            self._land_later(FOREVER)
            self._closed = True
            self._changed.notify_all()

    # -- control -----------------------------------------------------------------------------

    @property
    def operations(self) -> int:
        """Reads, writes and flushes that the devices were asked for; stands still once stopped."""
        return self._operations

    @property
    def stopped(self) -> bool:
        """Whether `stop_at`, `kill` or `crash` has taken effect."""
        return self._stopped

    def arm(self, *faults: Fault) -> None:
        """Add faults whose `index` counts from now on: 0 is the next operation of its kind."""
        with self._changed:
            for fault in faults:
                self._armed.append(replace(fault, index=fault.index + self._counts[fault.op]))

    def disarm(self) -> None:
        """Forget the faults that `arm` added."""
        with self._changed:
            self._armed.clear()

    def stop_at(self, operation: int) -> None:
        """Let operation number `operation` of all, and every later one, end with -EIO.

        Writes of batches submitted before that moment may still land, as on a device whose host
        lost it; no flush happens any more. `crash` then decides what was left.
        """
        with self._changed:
            self._stop = operation
            self._stopped = self._stopped or operation <= self._operations

    def hold(self) -> None:
        """Let no batch finish until `release`."""
        with self._changed:
            self._holding = True

    def release(self, ticket: int | None = None) -> None:
        """Let held and slow batches finish: one of them, or all, which also ends `hold`."""
        with self._changed:
            self._release(ticket)
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """`hold` for the length of a with statement."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def kill(self) -> None:
        """Process death: writes in flight land, in part or not; from then on all is -EIO."""
        with self._changed:
            self._stopped = True
            for flight in self._flights.values():
                self._run(flight)
            self._later = [late for late in self._later if self._rng.random() < 0.5]
            self._land_later(FOREVER)
            self._dead = True
            self._release(None)
            self._changed.notify_all()

    def crash(self, seed: int | None = None) -> None:
        """Power loss: `kill`, then keep, drop or tear every block that was not flushed.

        `seed` replaces this transport's own randomness, to lose power in several ways from one
        `snapshot`.
        """
        with self._changed:
            if seed is not None:
                self._rng = random.Random(seed)
            self.kill()
            self.media.lose_power(self._rng)

    def reopen(self, *, seed: int = 0, plan: FaultPlan = FaultPlan()) -> FaultyDevices:
        """Return a new transport on the same media; kills this one unless it was closed."""
        with self._changed:
            if not (self._closed or self._dead):
                self.kill()
            return FaultyDevices(self.media, seed=seed, plan=plan, options=self._options)

    def snapshot(self) -> Media:
        """Return a copy of the media; batches in flight are not part of it."""
        with self._changed:
            return self.media.snapshot()

    def restore(self, snapshot: Media) -> None:
        """Put the media back to what it was at `snapshot`."""
        with self._changed:
            self.media.restore(snapshot)

    def flip_bit(self, device: int, offset_bytes: int, bit: int = 0) -> None:
        """Damage one stored bit."""
        with self._changed:
            self.media.flip(device, offset_bytes, bit)

    # -- inside; the lock is held --------------------------------------------------------------

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise StoreClosedError(f"{op}: the transport is closed", op=op)

    def _is_held(self, flight: _Flight) -> bool:
        return (self._holding or flight.held) and not flight.ran

    def _release(self, ticket: int | None) -> None:
        if ticket is None:
            self._holding = False
        for flight in self._flights.values() if ticket is None else [self._flights[ticket]]:
            flight.polls_left, flight.held = 0, False

    def _begin_operation(self) -> bool:
        """Count one operation, unless the devices have stopped."""
        if self._stop is not None and self._operations >= self._stop:
            self._stopped = True
        if self._stopped:
            return False
        self._land_later(self._operations)
        self._operations += 1
        return True

    def _land_later(self, operation: int) -> None:
        """Let the writes land that were put off to `operation` or before it."""
        if self._later:
            due = [late for late in self._later if late[0] <= operation]
            self._later = [late for late in self._later if late[0] > operation]
            for _, device, offset, data in due:
                self.media.write(device, offset, data)

    def _put_off(self, device: int, offset: int, data: Bytes) -> None:
        when = self._operations + self._rng.randrange(LATER_OPERATIONS_MAX)
        self._later.append((when, device, offset, data))

    def _fault(self, op: FaultOp, device: int | None = None) -> Fault | None:
        """Count one `op` and return what goes wrong with it."""
        index = self._counts[op]
        self._counts[op] += 1
        found: Fault | None = None
        for fault in (*self._plan.faults, *self._armed):
            if (
                fault.op == op
                and fault.index <= index < fault.index + fault.count
                and fault.device in (None, device)
            ):
                found = fault
                break
        else:
            for (kind, rate_op), rate in sorted(self._plan.rates.items()):
                if rate_op == op and self._rng.random() < rate:
                    found = Fault(kind, op, polls=self._rng.randrange(1, 4))
                    break
        if found:
            key = (found.kind, op)
            self.injected[key] = self.injected.get(key, 0) + 1
        return found

    def _run_some_others(self, wanted: _Flight) -> None:
        """Run a seeded choice of the other batches in flight, before the one that is wanted."""
        others = [
            flight
            for flight in self._flights.values()
            if flight is not wanted and not self._is_held(flight) and not flight.polls_left
        ]
        for flight in self._rng.sample(others, self._rng.randint(0, len(others))):
            self._run(flight)

    def _run(self, flight: _Flight) -> None:
        """Run all items of a batch, once."""
        if flight.ran:
            return
        flight.ran = True
        order = list(range(flight.batch.item_count))
        if self._plan.reorder:
            self._rng.shuffle(order)
        for item in order:
            flight.status[item] = self._run_item(flight, item)
        self._stats.failed_items += int(np.count_nonzero(flight.status))

    def _run_item(self, flight: _Flight, item: int) -> int:
        """Run one item; returns its status and stores its checksum."""
        batch = flight.batch
        mine = slice(int(batch.fragment_start[item]), int(batch.fragment_start[item + 1]))
        addresses, lengths = batch.address[mine].tolist(), batch.length_bytes[mine].tolist()
        length = sum(lengths)
        device, offset = int(batch.device[item]), int(batch.offset_bytes[item])
        if offset + extent_bytes(length) > self._devices[device].capacity_bytes:
            return -ERANGE
        if 0 in addresses:
            return -EFAULT
        reading = batch.op is Op.READ
        running = self._begin_operation()
        if not running and (reading or self._dead or not flight.in_time):
            return -EIO
        parts = [
            np.frombuffer(memory_at(address, size, writable=reading), np.uint8)
            for address, size in zip(addresses, lengths, strict=True)
        ]
        if reading:
            status, data = self._read(device, offset, length)
            _scatter(data, parts)  # all of it, or what a short read brought
            if len(data) < length:
                data = np.concatenate(parts)
            self._stats.read_items += status == 0
            self._stats.read_bytes += length if status == 0 else 0
        else:
            data = np.concatenate(parts)
            if running:
                status = self._write(device, offset, data)
            else:
                status = -EIO
                self._write_in_part(device, offset, _padded(data))
            self._stats.write_items += status == 0
            self._stats.write_bytes += length if status == 0 else 0
        if status == 0 and batch.checksum:
            flight.checksum[item] = xxhash.xxh3_64_intdigest(data.data)
        return status

    def _read(self, device: int, offset: int, length: int) -> tuple[int, Bytes]:
        """One read operation: a status, and the bytes that arrive in memory."""
        fault = self._fault("read", device)
        if fault is None:
            return 0, self.media.read(device, offset, length)
        if fault.kind == "error":
            return -fault.errno, np.full(length, SCRIBBLE, np.uint8)
        if fault.kind == "stale":
            return 0, self.media.read_stale(device, offset, length)
        if fault.kind == "misdirected":
            target = self._elsewhere(fault, device, offset, length)
            return 0, self.media.read(device, target, length)
        if fault.kind == "short":
            return 0, self.media.read(device, offset, self._kept(fault, length))
        data = self.media.read(device, offset, length)  # flip
        data[self._rng.randrange(length)] ^= 1 << self._rng.randrange(8)
        return 0, data

    def _write(self, device: int, offset: int, source: Bytes) -> int:
        """One write operation; returns its status."""
        data = _padded(source)
        fault = self._fault("write", device)
        if fault is None:
            self.media.write(device, offset, data)
            return 0
        if fault.kind == "torn":
            self.media.write(device, offset, data[: self._kept(fault, len(data))])
            return -fault.errno
        if fault.kind == "short":
            self.media.write(device, offset, data[: self._kept(fault, len(source))])
            return 0
        if fault.kind in ("duplicated", "reordered"):
            if fault.kind == "duplicated":
                self.media.write(device, offset, data)
            self._put_off(device, offset, data)
            return 0
        if fault.kind == "misdirected":
            target = self._elsewhere(fault, device, offset, len(source))
            if target != offset:  # else there is no other place: the write is lost
                self.media.write(device, target, data)
            return 0
        if fault.kind == "flip":
            self.media.write(device, offset, data)
            place = offset + self._rng.randrange(len(source))
            self.media.flip(device, place, self._rng.randrange(8))
            return 0
        return -fault.errno if fault.kind == "error" else 0  # or lost

    def _kept(self, fault: Fault, length: int) -> int:
        """How many bytes of a torn or short transfer move: fewer than all."""
        return self._rng.randrange(length) if fault.keep_bytes is None else fault.keep_bytes

    def _write_in_part(self, device: int, offset: int, data: Bytes) -> None:
        """Land none, all, or the first blocks of a write that nobody will hear about."""
        blocks = len(data) // BLOCK_BYTES
        keep = self._rng.choice((0, self._rng.randrange(blocks), blocks))
        self.media.write(device, offset, data[: keep * BLOCK_BYTES])

    def _elsewhere(self, fault: Fault, device: int, offset: int, length: int) -> int:
        """Choose another extent of the same size on the same device."""
        last = self._devices[device].capacity_bytes - extent_bytes(length)
        if fault.target_bytes is not None:
            if fault.target_bytes > last:
                raise ValueError(f"target_bytes {fault.target_bytes} is beyond the device")
            return fault.target_bytes
        places = last // BLOCK_BYTES
        if places == 0:
            return offset
        block = self._rng.randrange(places)
        return (block + (block >= offset // BLOCK_BYTES)) * BLOCK_BYTES


def _padded(data: Bytes) -> Bytes:
    """Extend to whole blocks, with zeros."""
    return np.concatenate([data, np.zeros(-len(data) % BLOCK_BYTES, np.uint8)])


def _scatter(data: Bytes, parts: Sequence[Bytes]) -> None:
    done = 0
    for part in parts:
        piece = data[done : done + len(part)]
        part[: len(piece)] = piece
        done += len(part)
