"""Moves one item that has fragments in device memory; for `gds.py`.

Whole blocks inside one device fragment move straight, by cuFile, at most `transfer_bytes_max` a
call. Blocks that straddle fragments, lie in host memory or end in the gap pass through an aligned
buffer of the worker. So all I/O is in whole blocks, and zeros fill the gap.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import EFAULT, EINVAL, EIO, ENODATA, ERANGE
from typing import Any

import xxhash

from tutti_core.errors import device_error
from tutti_core.io.cuda import HOST, Cuda
from tutti_core.io.cufile import DeviceBytes
from tutti_core.io.posix import memory_at
from tutti_core.io.transport import BLOCK_BYTES, Batch, Op, TransportStats


class Bounce:
    """An aligned buffer for each worker, made when it is first needed."""

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._own = threading.local()

    def get(self) -> tuple[mmap.mmap, int]:
        """This thread's buffer and its address."""
        memory: mmap.mmap | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = mmap.mmap(-1, self.length_bytes)
            self._own.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return memory, int(self._own.address)


@dataclass(frozen=True, slots=True)
class Means:
    """What moves the items of a transport.

    capacities  bytes of each device.
    files       of kvikio, one a device.
    fds         for blocks that do not move straight, one a device.
    base_of     the registered device memory that an address lies in; cuFile wants its beginning.
    """

    cuda: Cuda
    capacities: tuple[int, ...]
    files: tuple[Any, ...]
    fds: tuple[int, ...]
    bounce: Bounce
    base_of: Callable[[int], DeviceBytes | None]


@dataclass(frozen=True, slots=True)
class _Run:
    """Whole blocks of an item: inside one device fragment, or to be bounced (fragment None)."""

    start: int
    end: int
    fragment: int | None


class ItemMover:
    """One item, moved once, by one worker.

    Parameters
        place: of each of its fragments: the GPU's number, or HOST.
        tally: counters to add to.
    """

    def __init__(
        self, means: Means, batch: Batch, place: list[int], item: int, tally: TransportStats
    ) -> None:
        mine = slice(int(batch.fragment_start[item]), int(batch.fragment_start[item + 1]))
        self._means = means
        self._cuda = means.cuda
        self._tally = tally
        self._hashing = batch.checksum
        self.checksum = 0
        self._reading = batch.op is Op.READ
        self._device = int(batch.device[item])
        self._offset = int(batch.offset_bytes[item])
        self._address: list[int] = batch.address[mine].tolist()
        self._length: list[int] = batch.length_bytes[mine].tolist()
        self._place = place
        self._start = [0]
        for length in self._length:  # Python integers: the sum of hostile lengths does not wrap
            self._start.append(self._start[-1] + length)
        self._end = self._start[-1]
        self._extent = -(-self._end // BLOCK_BYTES) * BLOCK_BYTES

    def run(self) -> int:
        """Move the item and return its status; `checksum` is there then, if one was wanted.

        Raises what kvikio, the driver or the file system raises.
        """
        if self._offset + self._extent > self._means.capacities[self._device]:
            return -ERANGE
        if 0 in self._address:
            return -EFAULT
        self._cuda.use(next(place for place in self._place if place != HOST))
        if not self._reading:
            self._hash()
        for run in self._runs():
            status = self._bounced(run) if run.fragment is None else self._straight(run)
            if status:
                return status
        if self._reading:
            self._hash()
        return 0

    def _runs(self) -> Iterator[_Run]:
        """The item as runs of whole blocks, in order and without gaps."""
        done = 0
        for index, place in enumerate(self._place):
            start = -(-self._start[index] // BLOCK_BYTES) * BLOCK_BYTES
            end = self._start[index + 1] // BLOCK_BYTES * BLOCK_BYTES
            if place == HOST or end <= start:
                continue
            if done < start:
                yield _Run(done, start, None)
            yield _Run(start, end, index)
            done = end
        if done < self._extent:
            yield _Run(done, self._extent, None)

    def _straight(self, run: _Run) -> int:
        """Blocks between the device and one fragment, by cuFile. Returns a status."""
        assert run.fragment is not None
        file = self._means.files[self._device]
        call = file.raw_read if self._reading else file.raw_write
        first = self._address[run.fragment] - self._start[run.fragment]
        done = run.start
        while done < run.end:
            wanted = min(self._means.bounce.length_bytes, run.end - done)
            memory = self._means.base_of(first + done)
            if memory is None:
                memory = DeviceBytes(first + done, wanted)
            moved = int(call(memory, wanted, self._offset + done, first + done - memory.address))
            moved = self._whole_blocks(moved, wanted)
            if moved == 0:
                return -ENODATA if self._reading else -EIO
            self._tally.extra["gds_bytes"] += moved
            done += moved
        return 0

    def _whole_blocks(self, moved: int, wanted: int) -> int:
        """What of a short transfer counts: the next one has to start on a block again."""
        if moved < wanted:
            self._tally.short_transfers += 1
            moved -= moved % BLOCK_BYTES
        return moved

    def _bounced(self, run: _Run) -> int:
        """Blocks by way of the worker's buffer, where fragments meet or end. Returns a status."""
        memory, address = self._means.bounce.get()
        for start in range(run.start, run.end, len(memory)):
            end = min(start + len(memory), run.end)
            self._tally.bounced_bytes += end - start
            view = memoryview(memory)[: end - start]
            if not self._reading:
                gap = end - max(self._end, start)
                if gap > 0:
                    view[-gap:] = bytes(gap)
                self._exchange(start, end, address, to_bounce=True)
            status = self._move_blocks(view, self._offset + start, min(self._end, end) - start)
            if status:
                return status
            if self._reading:
                self._exchange(start, end, address, to_bounce=False)
        return 0

    def _move_blocks(self, view: memoryview, offset: int, needed: int) -> int:
        """Read or write aligned host memory; a read may end with the file behind `needed`."""
        fd, done = self._means.fds[self._device], 0
        goal = needed if self._reading else len(view)
        while done < goal:
            piece = [view[done:]]
            if self._reading:
                moved = os.preadv(fd, piece, offset + done)
            else:
                moved = os.pwritev(fd, piece, offset + done)
            if done + moved < goal:
                moved = self._whole_blocks(moved, len(view) - done)
            if moved == 0:
                return -ENODATA if self._reading else -EIO
            done += moved
        return 0

    def _exchange(self, start: int, end: int, bounce: int, *, to_bounce: bool) -> None:
        """Copy what the fragments have of bytes start .. end-1 into the buffer, or out of it."""
        for address, size, at, place in self._pieces(start, end):
            inside = bounce + at - start
            if place == HOST:
                ctypes.memmove(*((inside, address) if to_bounce else (address, inside)), size)
            elif to_bounce:
                self._cuda.to_host(inside, address, size)
            else:
                self._cuda.to_device(address, inside, size)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Of each fragment in bytes start .. end-1: address, length, place in the item, GPU."""
        for index, place in enumerate(self._place):
            low, high = max(self._start[index], start), min(self._start[index + 1], end)
            if low < high:
                yield self._address[index] + low - self._start[index], high - low, low, place

    def _hash(self) -> None:
        """Compute XXH3-64 of the item's bytes; those of the device pass through the buffer."""
        if not self._hashing:
            return
        state = xxhash.xxh3_64()
        memory, bounce = self._means.bounce.get()
        for address, size, _, place in self._pieces(0, self._end):
            if place == HOST:
                state.update(memory_at(address, size, writable=False))
                continue
            self._tally.extra["hashed_device_bytes"] += size
            for done in range(0, size, len(memory)):
                step = min(len(memory), size - done)
                self._cuda.to_host(bounce, address + done, step)
                state.update(memoryview(memory)[:step])
        self.checksum = state.intdigest()


def open_blocks(path: str) -> tuple[int, bool]:
    """Open a device for the blocks that cannot move straight; whether without the page cache."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError as error:
        if error.errno != EINVAL:
            raise device_error(
                "open",
                error.errno or EIO,
                device=path,
                hint="it has to exist and to be readable and writable",
            ) from error
    return os.open(path, os.O_RDWR | os.O_CLOEXEC), False
