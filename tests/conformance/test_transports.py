"""Every transport passes the conformance suite, and deliberately broken ones do not.

The second half are negative controls: a check that nothing can fail proves nothing. Each check has
at least one broken transport that it, by name, has to catch.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from errno import EIO, ERANGE
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tutti_core.errors import DeviceError, UnsupportedError
from tutti_core.io.posix import PosixTransport, memory_at
from tutti_core.io.transport import (
    BLOCK_BYTES,
    Batch,
    BatchResult,
    Capabilities,
    Device,
    Op,
    Transport,
    TransportOptions,
    TransportStats,
)
from tutti_core.testing import (
    CHECKS,
    FOREVER,
    CheckSkipped,
    ConformanceError,
    Fault,
    FaultPlan,
    FaultyDevices,
    Subject,
    check_transport,
)

# -- the transports --------------------------------------------------------------------------------

OpenOn = Callable[[Sequence[Device]], Transport]
_names = itertools.count()


def on_files(directory: Path, open_on: OpenOn) -> Callable[[Sequence[int]], Transport]:
    """Make transports on new, sparse files."""

    def make(capacities_bytes: Sequence[int]) -> Transport:
        devices = []
        for capacity in capacities_bytes:
            path = directory / f"device{next(_names)}"
            with path.open("wb") as file:
                file.truncate(capacity)
            devices.append(Device(str(path), capacity))
        return open_on(devices)

    return make


def truncate_device(transport: Transport, device: int) -> None:
    """Make reads of a device on a file fail: there are no bytes any more."""
    os.truncate(transport.devices[device].path, 0)


@contextmanager
def stall_posix(transport: Transport) -> Iterator[None]:
    """Occupy every worker of a PosixTransport."""
    assert isinstance(transport, PosixTransport)
    gate = threading.Event()
    for queue in transport._queues:
        for _ in range(transport._workers):
            queue.put(gate.wait)
    try:
        yield
    finally:
        gate.set()


def stall_faulty(transport: Transport) -> AbstractContextManager[None]:
    return cast(FaultyDevices, transport).held()


def fail_faulty(transport: Transport, device: int) -> None:
    fault = Fault("error", "read", count=FOREVER, device=device)
    cast(FaultyDevices, transport).arm(fault)


def open_uring(devices: Sequence[Device]) -> Transport:
    """Open uring, or skip with what it lacks."""
    try:
        module = importlib.import_module("tutti_core.io.uring")
        return cast(Transport, module.UringTransport(devices, TransportOptions()))
    except ImportError as error:
        pytest.skip(f"missing capability: the native extension ({error})")
    except UnsupportedError as error:
        pytest.skip(f"missing capability: {error}")


def subject_posix(directory: Path) -> Subject:
    return Subject(on_files(directory, PosixTransport), stall_posix, truncate_device)


def subject_posix_small(directory: Path) -> Subject:
    """One worker and the smallest transfers: every item above one block is continued."""
    options = TransportOptions(queue_depth=1, transfer_bytes_max=BLOCK_BYTES)
    make = on_files(directory, lambda devices: PosixTransport(devices, options))
    return Subject(make, stall_posix, truncate_device)


def subject_posix_direct(directory: Path) -> Subject:
    def open_direct(devices: Sequence[Device]) -> Transport:
        try:
            return PosixTransport(devices, direct=True)
        except UnsupportedError as error:
            pytest.skip(f"missing capability: O_DIRECT ({error})")

    return Subject(on_files(directory, open_direct), stall_posix, truncate_device)


def subject_faulty(directory: Path) -> Subject:
    return Subject(FaultyDevices, stall_faulty, fail_faulty)


def subject_faulty_reordered(directory: Path) -> Subject:
    plan = FaultPlan(reorder=True)
    return Subject(lambda sizes: FaultyDevices(sizes, plan=plan), stall_faulty, fail_faulty)


def subject_uring(directory: Path) -> Subject:
    return Subject(on_files(directory, open_uring), None, truncate_device)


def gpu_on(directory: Path, options: TransportOptions) -> Subject:
    """Controllers in software over files, and CPU threads in the place of a GPU's; or skip."""
    try:
        module = importlib.import_module("tutti_core.testing.soft_nvme")
    except ImportError as error:
        pytest.skip(f"missing capability: the native extension ({error})")
    return cast(Subject, module.gpu_subject(directory, options))


def subject_gpu(directory: Path) -> Subject:
    return gpu_on(directory, TransportOptions())


def subject_gpu_small(directory: Path) -> Subject:
    """Few commands in flight, and a small arena: large items are cut, and groups wait for room."""
    return gpu_on(directory, TransportOptions(queue_depth=3, bounce_bytes=256 << 10))


SUBJECTS = {
    "posix": subject_posix,
    "posix_small": subject_posix_small,
    "posix_direct": subject_posix_direct,
    "faulty": subject_faulty,
    "faulty_reordered": subject_faulty_reordered,
    "uring": subject_uring,
    "gpu": subject_gpu,
    "gpu_small": subject_gpu_small,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_conforms(subject: str, check: str, tmp_path: Path) -> None:
    try:
        CHECKS[check](SUBJECTS[subject](tmp_path))
    except CheckSkipped as reason:
        pytest.skip(f"missing capability: {reason}")


def test_runner_reports_what_it_skipped() -> None:
    skipped = check_transport(FaultyDevices)
    assert set(skipped) == {"failed_reads", "timeouts"}
    assert all(reason for reason in skipped.values())


def test_runner_names_the_check_that_failed() -> None:
    with pytest.raises(ConformanceError, match="one_block: write: the checksum of item 0"):
        check_transport(WrongChecksum)


# -- broken transports -----------------------------------------------------------------------------


class Broken:
    """A good transport, to be spoiled in one way by each subclass."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        self.inner = FaultyDevices(capacities_bytes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.inner.devices

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def register(self, address: int, length_bytes: int) -> int:
        return self.inner.register(address, length_bytes)

    def unregister(self, region: int) -> None:
        self.inner.unregister(region)

    def submit(self, batch: Batch) -> int:
        return self.inner.submit(batch)

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        return self.inner.wait(ticket, timeout_s)

    def flush(self, device: int) -> int:
        return self.inner.flush(device)

    def stats(self) -> TransportStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class Remembering(Broken):
    """Knows the batch of each ticket."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.batches: dict[int, Batch] = {}

    def submit(self, batch: Batch) -> int:
        ticket = super().submit(batch)
        self.batches[ticket] = batch
        return ticket

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return result

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        result = super().wait(ticket, timeout_s)
        return result and self.spoil(self.batches.pop(ticket), result)


def without_fragments(batch: Batch, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Batch:
    """The batch with some fragments left out; every item keeps at least one."""
    kept = np.add.reduceat(keep.astype(np.uint32), batch.fragment_start[:-1])
    return replace(
        batch,
        fragment_start=np.concatenate([[0], np.cumsum(kept)]).astype(np.uint32),
        address=batch.address[keep],
        length_bytes=batch.length_bytes[keep],
    )


def well_formed(batch: Batch) -> bool:
    """Whether it is a batch that a subclass may take apart; others go to the check as they are."""
    start, count = batch.fragment_start, len(batch.device)
    return (
        0 < count <= 2_048
        and len(start) == count + 1
        and int(start[0]) == 0
        and int(start[-1]) == len(batch.address) == len(batch.length_bytes)
        and bool(np.all(start[1:] > start[:-1]))
    )


class DropsLastFragment(Broken):
    def submit(self, batch: Batch) -> int:
        if well_formed(batch):
            keep = np.ones(len(batch.address), np.bool_)
            last = batch.fragment_start[1:] - 1
            keep[last[np.diff(batch.fragment_start) > 1]] = False
            batch = without_fragments(batch, keep)
        return super().submit(batch)


class LosesFragmentsOfReads(Remembering):
    """Right on the device and in the checksum, but the last byte never arrives in memory."""

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if batch.op is Op.READ:
            for item in np.flatnonzero(result.status == 0):
                last = int(batch.fragment_start[item + 1]) - 1
                overrun(batch, int(item), b"\xa5", at=int(batch.length_bytes[last]) - 1)
        return result


class DropsFragmentsAbove1024(Broken):
    """As one call of preadv would."""

    def submit(self, batch: Batch) -> int:
        if well_formed(batch):
            place = np.arange(len(batch.address))
            first = np.repeat(batch.fragment_start[:-1], np.diff(batch.fragment_start))
            batch = without_fragments(batch, place - first < 1024)
        return super().submit(batch)


class SortsFragments(Broken):
    """Takes memory order for item order."""

    def submit(self, batch: Batch) -> int:
        if well_formed(batch):
            owner = np.repeat(np.arange(len(batch.device)), np.diff(batch.fragment_start))
            order = np.lexsort((batch.address, owner))
            batch = replace(
                batch, address=batch.address[order], length_bytes=batch.length_bytes[order]
            )
        return super().submit(batch)


class WrongChecksum(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return replace(result, checksum=result.checksum ^ np.uint64(1))


class ChecksumOnReadsOnly(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return replace(result, checksum=result.checksum * np.uint64(batch.op is Op.READ))


class ChecksumOnWritesOnly(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return replace(result, checksum=result.checksum * np.uint64(batch.op is Op.WRITE))


class ReportsSuccessBeyondTheEnd(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return replace(result, status=np.where(result.status == -ERANGE, 0, result.status))


class ReportsSuccessAlways(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return replace(result, status=np.zeros_like(result.status))


class ReportsPositiveErrno(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return replace(result, status=np.abs(result.status))


class ReportsWideStatus(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        return replace(result, status=result.status.astype(np.int64))


class FailsWholeBatch(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        bad = result.status[result.status != 0]
        status = np.full_like(result.status, bad[0]) if len(bad) else result.status
        return replace(result, status=status)


class ReusesResults(Remembering):
    """Returns the same arrays every time that the size fits."""

    last: BatchResult | None = None

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if self.last is None or len(self.last.status) != len(result.status):
            self.last = result
        self.last.status[:] = result.status
        self.last.checksum[:] = result.checksum
        return self.last


class ForgetsPadding(Remembering):
    """Leaves what it finds in its buffer behind the end of a write."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.junk = np.full(BLOCK_BYTES, 0x77, np.uint8)

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if batch.op is Op.READ:
            return result
        media = self.inner.media
        for item in np.flatnonzero(result.status == 0):
            mine = slice(batch.fragment_start[item], batch.fragment_start[item + 1])
            length = int(batch.length_bytes[mine].sum())
            end = int(batch.offset_bytes[item]) + length
            media.write(int(batch.device[item]), end, self.junk[: -length % BLOCK_BYTES])
        return result


class ErasesTheNextBlock(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if batch.op is Op.WRITE and batch.item_count == 1 and result.status[0] == 0:
            end = int(batch.offset_bytes[0] + batch.length_bytes.sum())
            end = -(-end // BLOCK_BYTES) * BLOCK_BYTES
            room = self.devices[0].capacity_bytes - end
            self.inner.media.write(0, end, np.zeros(min(room, BLOCK_BYTES), np.uint8))
        return result


class TouchesBeyondTheEnd(Remembering):
    """Writes what fits of an item that does not, then says -ERANGE."""

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        for item in np.flatnonzero(result.status == -ERANGE):
            offset = int(batch.offset_bytes[item])
            if batch.op is Op.WRITE and offset < 10 * BLOCK_BYTES:
                self.inner.media.write(0, offset, np.zeros(BLOCK_BYTES, np.uint8))
        return result


def overrun(batch: Batch, item: int, data: bytes, *, at: int) -> None:
    """Write to memory `at` bytes behind the start of an item's last fragment."""
    last = int(batch.fragment_start[item + 1]) - 1
    memory_at(int(batch.address[last]) + at, len(data), writable=True)[:] = data


class OverrunsMemory(Remembering):
    """Reads whole blocks into memory: one byte more than was asked for."""

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if batch.op is Op.READ and result.status[-1] == 0 and batch.length_bytes[-1] % BLOCK_BYTES:
            overrun(batch, -2, b"\0", at=int(batch.length_bytes[-1]))
        return result


class ScribblesOnRangeErrors(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        for item in np.flatnonzero(result.status == -ERANGE):
            if batch.op is Op.READ:
                overrun(batch, int(item), b"\0", at=0)
        return result


class ChangesItsSource(Remembering):
    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if batch.op is Op.WRITE and result.status[-1] == 0:
            overrun(batch, -2, b"\x13\x37", at=-1 + int(batch.length_bytes[-1]) - 1)
        return result


class IgnoresTheDevice(Broken):
    def submit(self, batch: Batch) -> int:
        return super().submit(replace(batch, device=batch.device * np.uint32(0)))


class SplitsWrongly(Broken):
    """Moves only the first transfer of items above transfer_bytes_max."""

    def submit(self, batch: Batch) -> int:
        limit = np.uint64(self.capabilities().transfer_bytes_max)
        fragments = np.minimum(batch.length_bytes, limit)
        return super().submit(replace(batch, length_bytes=fragments))


class LosesTheQueuesTail(Remembering):
    """Moves no more items than its queue is deep."""

    def submit(self, batch: Batch) -> int:
        depth = 64
        if well_formed(batch) and batch.item_count > depth:
            end = int(batch.fragment_start[depth])
            short = replace(
                batch,
                device=batch.device[:depth],
                offset_bytes=batch.offset_bytes[:depth],
                fragment_start=batch.fragment_start[: depth + 1],
                address=batch.address[:end],
                length_bytes=batch.length_bytes[:end],
            )
            ticket = self.inner.submit(short)
            self.batches[ticket] = batch
            return ticket
        return super().submit(batch)

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        missing = batch.item_count - len(result.status)
        return BatchResult(
            np.pad(result.status, (0, missing)), np.pad(result.checksum, (0, missing))
        )


class LimitsItems(Broken):
    def submit(self, batch: Batch) -> int:
        if batch.item_count > 4_096:
            raise ValueError("too many items for this queue")
        return super().submit(batch)


class WrapsOffsets(Broken):
    """Computes the end of an extent modulo 2**32."""

    def submit(self, batch: Batch) -> int:
        return super().submit(replace(batch, offset_bytes=batch.offset_bytes % np.uint64(1 << 32)))


class WrapsLengths(Remembering):
    """Sums lengths modulo 2**64, so that hostile ones look like nothing to do."""

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        total = np.add.reduceat(batch.length_bytes, batch.fragment_start[:-1])
        return replace(result, status=np.where(total == 0, np.int32(0), result.status))


class AcceptsAnything(Broken):
    """Takes malformed batches for empty ones."""

    def submit(self, batch: Batch) -> int:
        try:
            return super().submit(batch)
        except ValueError:
            return 0


class AcceptsLooseEnds(Broken):
    """Ignores fragments that no item owns."""

    def submit(self, batch: Batch) -> int:
        end = int(batch.fragment_start[-1])
        return super().submit(
            replace(batch, address=batch.address[:end], length_bytes=batch.length_bytes[:end])
        )


class ReturnsTicketTwice(Broken):
    """Keeps results after they were returned."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.kept: dict[int, BatchResult] = {}

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        if ticket not in self.kept:
            result = super().wait(ticket, timeout_s)
            if result is None:
                return None
            self.kept[ticket] = result
        return self.kept[ticket]


class AnswersUnknownTickets(Broken):
    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        try:
            return super().wait(ticket, timeout_s)
        except KeyError:
            return None


class SwapsTickets(Broken):
    """Gives results in the order of submission, whatever is waited for."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.order: list[int] = []

    def submit(self, batch: Batch) -> int:
        ticket = super().submit(batch)
        self.order.append(ticket)
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        if ticket not in self.order:
            raise KeyError(ticket)
        return super().wait(self.order.pop(0), timeout_s)


class PollSpends(Broken):
    """Forgets the batch when a poll comes too early; here every first poll does."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.forgotten: set[int] = set()

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        if ticket in self.forgotten:
            raise KeyError(ticket)
        if timeout_s == 0.0:
            self.inner.wait(ticket, 60.0)
            self.forgotten.add(ticket)
            return None
        return super().wait(ticket, timeout_s)


class FinishesEarly(Broken):
    """Answers a timeout with a result."""

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        self.inner.release()
        return super().wait(ticket, timeout_s)


class KeepsArrays(Broken):
    """Looks at the arrays of a batch only when it is waited for."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.waiting: dict[int, Batch] = {}
        self.real: dict[int, int] = {}
        self.tickets = itertools.count(1)

    def submit(self, batch: Batch) -> int:
        ticket = next(self.tickets)
        self.waiting[ticket] = batch
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        batch = self.waiting.pop(ticket)
        try:
            return self.inner.wait(self.inner.submit(batch), timeout_s)
        except ValueError:
            failed = np.full(batch.item_count, -EIO, np.int32)
            return BatchResult(failed, np.zeros(batch.item_count, np.uint64))


class HasNoLimit(Broken):
    """Never says that it is busy: waits in secret instead."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.done: dict[int, BatchResult] = {}

    def submit(self, batch: Batch) -> int:
        ticket = super().submit(batch)
        result = self.inner.wait(ticket, 60.0)
        assert result is not None
        self.done[ticket] = result
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        return self.done.pop(ticket)


class IsNotThreadSafe(Broken):
    """One batch at a time: the latest ticket is the only one it knows."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.owner = threading.get_ident()

    def submit(self, batch: Batch) -> int:
        if threading.get_ident() != self.owner:
            raise RuntimeError("submitted from another thread")
        return super().submit(batch)


class OneRegionOnly(Broken):
    def register(self, address: int, length_bytes: int) -> int:
        super().register(address, length_bytes)
        return 1

    def unregister(self, region: int) -> None:
        return


class RegisteredMemoryOnly(Broken):
    """Fails for memory that was not announced."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.regions: dict[int, range] = {}

    def register(self, address: int, length_bytes: int) -> int:
        region = super().register(address, length_bytes)
        self.regions[region] = range(address, address + length_bytes)
        return region

    def unregister(self, region: int) -> None:
        super().unregister(region)
        del self.regions[region]

    def submit(self, batch: Batch) -> int:
        known = [
            any(int(address) in region for region in self.regions.values())
            for address in batch.address[:100]
        ]
        if self.regions and not all(known):
            raise RuntimeError("unregistered memory")
        return super().submit(batch)


class NeverFlushes(Broken):
    def flush(self, device: int) -> int:
        return -EIO


class FlushesAnything(Broken):
    def flush(self, device: int) -> int:
        return super().flush(device % len(self.devices))


class FlushesAfterClose(Broken):
    def flush(self, device: int) -> int:
        try:
            return super().flush(device)
        except Exception:
            return 0


class ChangesCapabilities(Broken):
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), queue_depth=64 + self.stats().write_items)


class CountsDownwards(Broken):
    def stats(self) -> TransportStats:
        stats = super().stats()
        return replace(stats, read_bytes=1_000_000 - stats.read_bytes)


class CountsNoFailures(Broken):
    def stats(self) -> TransportStats:
        return replace(super().stats(), failed_items=0)


class ClosesOnce(Broken):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        self.closed = True
        super().close()


class WorksAfterClose(Broken):
    def submit(self, batch: Batch) -> int:
        if self.inner._closed:
            return 1
        return super().submit(batch)


class ForgetsAtClose(Broken):
    """Drops what is in flight instead of finishing it."""

    def close(self) -> None:
        self.inner._flights.clear()
        super().close()


class LocksItselfOut(Broken):
    """A close that only one thread may be in."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.closer: int | None = None

    def close(self) -> None:
        me = threading.get_ident()
        if self.closer not in (None, me) and me != threading.main_thread().ident:
            raise RuntimeError("somebody else is closing")
        self.closer = me
        super().close()


class OnlyWholeBlocks(Broken):
    """Refuses what is not a multiple of a block, as a naive O_DIRECT transport does."""

    def submit(self, batch: Batch) -> int:
        odd = well_formed(batch) and bool(np.any(batch.length_bytes % BLOCK_BYTES))
        if odd:
            batch = replace(
                batch, device=batch.device, offset_bytes=batch.offset_bytes + np.uint64(1 << 40)
            )
        return super().submit(batch)


class OnlyUnalignedMemory(Broken):
    """Wrong on the in-place path: swaps the first two aligned blocks."""

    def submit(self, batch: Batch) -> int:
        address = batch.address.copy()
        if len(address) > 1 and not np.any(address % BLOCK_BYTES):
            address[:2] = address[1::-1]
        return super().submit(replace(batch, address=address))


class FirstWriteWins(Remembering):
    """A cache that is not told about rewrites."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.seen: set[int] = set()

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if batch.op is Op.WRITE and batch.item_count == 1:
            offset, size = int(batch.offset_bytes[0]), int(batch.length_bytes.sum())
            size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            if offset in self.seen and result.status[0] == 0:
                media = self.inner.media
                media.write(0, offset, media.read_stale(0, offset, size))
            self.seen.add(offset)
        return result


class MergesEqualExtents(Remembering):
    """Reads an extent once, though several items ask for it."""

    def spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        if batch.op is Op.READ and batch.item_count == 40:
            overrun(batch, 39, b"\0\0", at=0)
        return result


class NeedsChecksum(Broken):
    def submit(self, batch: Batch) -> int:
        if not batch.checksum:
            batch = replace(batch, offset_bytes=batch.offset_bytes + np.uint64(1 << 40))
        return super().submit(batch)


CAUGHT_BY: dict[type[Broken], tuple[str, str]] = {
    LosesFragmentsOfReads: ("one_byte", "item 0 at 0 of device 0: byte 0 of 1 is 0xa5"),
    DropsLastFragment: ("odd_fragments", "the checksum of item 0"),
    DropsFragmentsAbove1024: ("many_fragments", "the checksum of item 0"),
    SortsFragments: ("block_sized_fragments", "the checksum of item 1"),
    WrongChecksum: ("one_byte", "the checksum of item 0"),
    ChecksumOnReadsOnly: ("one_block", "write: the checksum"),
    ChecksumOnWritesOnly: ("one_block", "read: the checksum"),
    ReportsSuccessBeyondTheEnd: ("reads_beyond_the_end", "ended with 0, not -34"),
    ReportsSuccessAlways: ("failed_reads", "ended with 0; device 0 fails"),
    ReportsPositiveErrno: ("writes_beyond_the_end", "a status is positive"),
    ReportsWideStatus: ("one_block", "not int32"),
    FailsWholeBatch: ("failed_reads", "item 1 of device 1 ended with -5"),
    ReusesResults: ("results_are_kept_apart", "an earlier write: the checksum"),
    ForgetsPadding: ("padding_is_zeros", "is 0x77, not 0x00"),
    ErasesTheNextBlock: ("padding_is_zeros", "is 0x00, not 0xee"),
    TouchesBeyondTheEnd: ("writes_beyond_the_end", "byte 36864 of 40960 is 0x00"),
    OverrunsMemory: ("padding_is_not_read", "1 bytes outside the fragments"),
    ScribblesOnRangeErrors: ("reads_beyond_the_end", "wrote to memory"),
    ChangesItsSource: ("one_block", "changed its source"),
    IgnoresTheDevice: ("several_devices", "item 0 at 0 of device 2: byte 0"),
    SplitsWrongly: ("large_items", "the checksum of item 0"),
    LosesTheQueuesTail: ("many_items", "the checksum of item 64"),
    LimitsItems: ("items_max", "too many items for this queue"),
    WrapsOffsets: ("writes_beyond_the_end", "at 1099511627776 ended with 0"),
    WrapsLengths: ("lengths_that_overflow", "18446744073709551616 bytes at 0 ended with 0"),
    AcceptsAnything: ("malformed_batches", "no items: raised nothing"),
    AcceptsLooseEnds: ("malformed_batches", "leaves fragments over: raised nothing"),
    ReturnsTicketTwice: ("tickets_are_spent", "spent ticket: raised nothing"),
    AnswersUnknownTickets: ("one_ticket_many_waiters", "got ..none., .none., .result"),
    SwapsTickets: ("tickets_in_any_order", "the checksum of item 0"),
    PollSpends: ("polling", "KeyError"),
    FinishesEarly: ("timeouts", "cannot have finished"),
    KeepsArrays: ("arrays_are_copied", "item 0 ended with status -5"),
    HasNoLimit: ("batches_in_flight_max", "one batch more than"),
    IsNotThreadSafe: ("many_threads", "from another thread"),
    OneRegionOnly: ("registered_memory", "the same id"),
    RegisteredMemoryOnly: ("registered_memory", "unregistered memory"),
    NeverFlushes: ("flushes", "flush of device 0 failed"),
    FlushesAnything: ("flushes", "flush of device 2, which does not exist"),
    FlushesAfterClose: ("close_is_final", "flush after close returned 0"),
    ChangesCapabilities: ("capabilities", "capabilities changed"),
    CountsDownwards: ("statistics", "read_bytes fell"),
    CountsNoFailures: ("statistics", "failed_items grew by 0"),
    ClosesOnce: ("close_is_final", "Bad file descriptor"),
    WorksAfterClose: ("close_is_final", "submit after close: raised nothing"),
    ForgetsAtClose: ("close_finishes", "is 0xa5, not"),
    LocksItselfOut: ("close_from_many_threads", "somebody else is closing"),
    OnlyWholeBlocks: ("one_byte", "item 0 ended with status -34"),
    OnlyUnalignedMemory: ("aligned_memory", "the checksum of item 0"),
    FirstWriteWins: ("last_write_wins", "byte 0 of 5700"),
    MergesEqualExtents: ("same_extent_many_times", "item 39 at 0"),
    NeedsChecksum: ("without_checksum", "item 0 ended with status -34"),
}


def broken_subject(broken: type[Broken]) -> Subject:
    def hooked(transport: Transport) -> FaultyDevices:
        assert isinstance(transport, Broken)
        return transport.inner

    return Subject(
        broken,
        lambda transport: stall_faulty(hooked(transport)),
        lambda transport, device: fail_faulty(hooked(transport), device),
    )


@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda broken: broken.__name__)
def test_broken_transport_is_caught(broken: type[Broken]) -> None:
    check, reason = CAUGHT_BY[broken]
    with pytest.raises(ConformanceError, match=reason):
        CHECKS[check](broken_subject(broken))


def test_every_check_catches_something() -> None:
    assert {check for check, _ in CAUGHT_BY.values()} == set(CHECKS)


SILENT: list[Fault] = [
    Fault("lost", "write", count=FOREVER),
    Fault("torn", "write", errno=0, count=FOREVER),
    Fault("misdirected", "write", count=FOREVER),
    Fault("misdirected", "read", count=FOREVER),
    Fault("stale", "read", count=FOREVER),
    Fault("flip", "write", count=FOREVER),
    Fault("flip", "read", count=FOREVER),
]


@pytest.mark.parametrize("fault", SILENT, ids=lambda fault: f"{fault.kind}-{fault.op}")
@pytest.mark.parametrize("check", ["one_block", "odd_fragments", "padding_is_zeros"])
def test_silent_fault_is_caught(check: str, fault: Fault) -> None:
    plan = FaultPlan((fault,))
    with pytest.raises(ConformanceError, match=r"is 0x.., not 0x..|checksum of item"):
        CHECKS[check](Subject(lambda sizes: FaultyDevices(sizes, plan=plan)))


@pytest.mark.parametrize("check", CHECKS)
def test_the_wrapper_itself_is_not_broken(check: str) -> None:
    CHECKS[check](broken_subject(Broken))


def test_a_device_error_names_the_device(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(DeviceError, match=str(missing)):
        PosixTransport([Device(str(missing), 8 * BLOCK_BYTES)])
