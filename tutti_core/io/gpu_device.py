"""One NVMe namespace as a device of the gpu transport: controller, ring, registered memory.

Every device has a ring of its own, so that one that hangs or is reset holds up no other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tutti_core._native import GIO_FRAGMENTS_MAX, GioRing, NvmeController, SoftController
from tutti_core.errors import ConfigError, DeviceError, UnsupportedError, device_error
from tutti_core.format import DATA_OFFSET_BYTES, SUPERBLOCK_BYTES, Superblock
from tutti_core.gio.executor import Executor
from tutti_core.io.gpu_plan import Memory
from tutti_core.io.marks import Marked
from tutti_core.io.transport import BLOCK_BYTES, U32, U64, Device
from tutti_core.nvme.status import errno_of, text_of

RING_DEPTH = 16
"""IOCBs of a device's ring: four groups in flight of four IOCBs each."""
QUEUE_ENTRIES_MAX = 65_536
RESET_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 10.0
_DRIVE = re.compile(r"pci:(?P<address>[0-9a-fA-F:.]+)/(?P<nsid>[0-9]+)(@(?P<serial>\S+))?")

logger = logging.getLogger("tutti")


@dataclass(slots=True)
class Opened:
    """An open controller and what goes with it. `close` lets go of all of it."""

    controller: NvmeController
    nsid: int
    what: str
    close: Callable[[], None]
    path: str = ""
    """Of the file behind a software controller."""
    soft: SoftController | None = None


def open_soft(device: Device, *, queue_depth: int, queue_pairs: int = 1) -> Opened:
    """Serve a file, or a block device, by a software controller.

    Raises
        DeviceError: it cannot be opened, or is shorter than its capacity.
    """
    try:
        descriptor = os.open(device.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise device_error(
            "open",
            error.errno or errno.EIO,
            device=device.path,
            hint="it has to exist and to be readable and writable",
        ) from error
    try:
        soft = SoftController(
            namespace_bytes=-(-device.capacity_bytes // BLOCK_BYTES) * BLOCK_BYTES,
            queue_entries_max=4096,
            serial=f"FILE-{os.fstat(descriptor).st_ino}"[:20],
            files=[descriptor],
        )
        controller = NvmeController(
            soft, queue_pairs=queue_pairs, queue_entries=_entries_for(queue_depth)
        )
    except OSError as error:
        os.close(descriptor)
        raise device_error(
            "open", error.errno or errno.EIO, device=device.path, hint=str(error)
        ) from error
    except BaseException:
        os.close(descriptor)
        raise

    def close() -> None:
        controller.close()
        soft.close()
        with contextlib.suppress(OSError):
            os.close(descriptor)

    return Opened(controller, 1, "a software controller", close, device.path, soft)


def open_pci(device: Device, *, queue_depth: int, queue_pairs: int = 1) -> Opened:
    """Take a drive that is bound to vfio-pci; the path is `pci:ADDRESS/NSID`, or with the serial
    number that it must have, `pci:ADDRESS/NSID@SERIAL`.

    Its head must be that of a pool: nobody else's disk is ever written. The kernel has let go of
    such a drive, so nothing of it is mounted.

    Raises
        ConfigError: the path names no drive.
        UnsupportedError: the drive cannot be taken, or its namespace not be used.
        DeviceError: it does not answer, or is not ours.
    """
    named = _DRIVE.fullmatch(device.path)
    if named is None:
        raise ConfigError(
            f"{device.path} names no drive", op="open", hint="pci:0000:01:00.0/1, for example"
        )
    address, nsid, serial = named["address"], int(named["nsid"]), named["serial"]
    try:
        controller = NvmeController(
            address,
            access="vfio",
            queue_pairs=queue_pairs,
            queue_entries=_entries_for(queue_depth),
        )
    except OSError as error:
        raise UnsupportedError(
            f"{device.path} cannot be taken: {error.strerror}",
            op="open",
            device=device.path,
            errno=error.errno,
            hint="bind the drive to vfio-pci; see docs/paths.md",
        ) from error
    try:
        check_ours(device, controller, nsid, serial)
    except BaseException:
        controller.close()
        raise
    return Opened(controller, nsid, "vfio-pci", controller.close)


def check_ours(
    device: Device, controller: NvmeController, nsid: int, serial: str | None = None
) -> None:
    """See that a namespace is the one that was meant, and begins as a pool does.

    Raises
        ConfigError: another drive, or somebody else has written on it.
        DeviceError: it cannot be read. FormatError and the like: it is no pool.
    """
    found = controller.facts()["serial"]
    if serial is not None and found != serial:
        raise ConfigError(
            f"{device.path} is another drive: its serial number is {found!r}", device=device.path
        )
    head = np.zeros(DATA_OFFSET_BYTES, np.uint8)
    status = controller.read(nsid, 0, head, READ_TIMEOUT_S)
    if status:
        raise DeviceError(
            f"{device.path} cannot be read: {text_of(status)}", op="open", device=device.path
        )
    Superblock.decode(head[:SUPERBLOCK_BYTES].tobytes(), device.path)
    if head[SUPERBLOCK_BYTES:].any():
        raise ConfigError(
            f"{device.path}: somebody else has written behind its superblock", device=device.path
        )


def _entries_for(queue_depth: int) -> int:
    """Entries of a queue that has so many commands in flight: a ring never fills its last slot."""
    return min(max(queue_depth + 1, 2), QUEUE_ENTRIES_MAX)


class GpuDevice:
    """A namespace that can be read and written. Threads: one moves data, any registers memory.

    `opened` is its own, and closed where it cannot be used.
    Raises
        DeviceError: the namespace is too small.
        UnsupportedError: the namespace cannot hold blocks as Tutti writes them.
    """

    def __init__(
        self, device: Device, opened: Opened, executor: Executor, timeout_s: float
    ) -> None:
        self.device = device
        self._opened = opened
        self._executor = executor
        self.down = 0
        """A negative errno while nothing can be sent, else 0."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._regions: dict[int, tuple[int, int]] = {}
        self.memory = Memory(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        self._marked: Marked | None = None
        try:
            facts = opened.controller.facts()
            self.block_bytes, size_bytes = _geometry(device, facts, opened.nsid)
            self.transfer_bytes_max = int(facts["transfer_bytes_max"])
            if size_bytes < device.capacity_bytes:
                raise DeviceError(
                    f"{device.path} has {size_bytes} bytes, less than its {device.capacity_bytes}",
                    op="open",
                    device=device.path,
                )
            self._ring = self._open_ring()
        except BaseException:
            opened.close()
            raise

    def _open_ring(self) -> GioRing:
        try:
            ring = GioRing(
                [(self._opened.controller, self._opened.nsid)],
                depth=RING_DEPTH,
                threads=self._executor.threads,
                timeout_s=self._timeout_s,
            )
        except OSError as error:
            raise UnsupportedError(str(error), op="open", device=self.device.path) from error
        try:
            self._executor.attach(ring)
        except BaseException:
            ring.close()
            raise
        return ring

    @property
    def what(self) -> str:
        """What drives it, for people."""
        return self._opened.what

    def counters(self) -> dict[str, int]:
        """Of the ring and the queues."""
        queues = self._opened.controller.stats()
        ring = self._ring.stats()
        return {
            "launches": ring["launches"],
            "commands": queues["completions"],
            "doorbells": queues["sq_doorbells"] + queues["cq_doorbells"],
            "timeouts": ring["timeouts"],
            "resets": ring["resets"],
        }

    # ---- memory ----
    def register(self, address: int, length_bytes: int) -> int:
        """Let the device reach memory; an id, or a negative errno."""
        for start, end in _pages(address, length_bytes):
            if start < end:
                region = self._opened.controller.register_memory(start, end - start)
                if region != -errno.EEXIST:
                    break
        else:
            return -errno.EEXIST
        if region >= 0:
            with self._lock:
                self._regions[region] = (start, end)
                self._note_regions()
        return region

    def unregister(self, region: int) -> None:
        """Take it back. What is still in use, after a mistake of the caller, stays the device's."""
        with self._lock:
            self._regions.pop(region, None)
            self._note_regions()
        if status := self._opened.controller.unregister_memory(region):
            logger.error("gpu: memory cannot be unregistered: %s", os.strerror(-status))

    def _note_regions(self) -> None:
        ranges = sorted(self._regions.values())
        starts = np.array([start for start, _ in ranges], np.uint64)
        self.memory = Memory(starts, np.array([end for _, end in ranges], np.uint64))

    # ---- transfers ----
    def issue(self, op: int, offset_bytes: U64, address: U64, length_bytes: U64) -> list[int]:
        """Send transfers by one launch; the IOCBs that hold them, in order.

        At most RING_DEPTH IOCBs' worth, fewer what is in flight.
        """
        count = len(address)
        iocbs = self._ring.get_iocb(-(-count // GIO_FRAGMENTS_MAX))
        if not iocbs:
            raise RuntimeError("the ring has too few free IOCBs")
        ids = np.array(iocbs, np.uint32)
        try:
            self._prepare(iocbs, op, offset_bytes, address, length_bytes)
            if status := self._ring.issue_io(ids, self._executor.lanes):
                raise OSError(-status, "a launch was refused")
        except BaseException:
            for iocb in iocbs:
                self._ring.put_back(iocb)
            raise
        try:
            self._executor.launch(self._ring)
        except RuntimeError as error:
            logger.warning("gpu: a launch failed: %s", error)
            self._ring.refuse(ids)
        return iocbs

    def _prepare(
        self, iocbs: list[int], op: int, offset_bytes: U64, address: U64, length_bytes: U64
    ) -> None:
        column = np.zeros(min(len(address), GIO_FRAGMENTS_MAX), np.uint32)
        for number, iocb in enumerate(iocbs):
            part = slice(number * GIO_FRAGMENTS_MAX, (number + 1) * GIO_FRAGMENTS_MAX)
            size = len(address[part])
            status = self._ring.prepare(
                iocb, op, column[:size], offset_bytes[part], address[part], length_bytes[part]
            )
            if status:
                raise OSError(-status, "an IOCB was refused")

    def collect(self, iocb: int) -> U32:
        """NVMe statuses of an IOCB, once it has ended; its launch has a timeout."""
        while True:
            statuses = self._ring.wait_cqe(iocb, self._timeout_s + RESET_TIMEOUT_S)
            if statuses is not None:
                return statuses
            if self._executor.lost(self._ring):
                statuses = self._ring.wait_cqe(iocb, 0)
                if statuses is not None:
                    return statuses
                self._ring.refuse(np.array([iocb], np.uint32))
                continue
            logger.error("gpu: an IOCB of %s does not end", self.device.path)

    def recover(self) -> None:
        """After a timeout: reset the controller, so that the memory is the process's again."""
        try:
            self._ring.reset_device(0, self._timeout_s + RESET_TIMEOUT_S)
            logger.warning("gpu: %s did not answer; its controller was reset", self.device.path)
        except OSError as error:
            self.down = -(error.errno or errno.EIO)
            logger.error("gpu: %s is down: %s", self.device.path, error)

    def flush(self) -> int:
        """Make what was written durable; 0 or a negative errno."""
        if self.down:
            return self.down
        try:
            status = self._opened.controller.flush(self._opened.nsid, self._timeout_s)
        except OSError as error:  # closed meanwhile
            return -(error.errno or errno.EIO)
        if status:
            logger.warning("gpu: flush of %s: %s", self.device.path, text_of(status))
        return -errno_of(status)

    def reopen(self, accept: Callable[[bytes], bool]) -> int:
        """Reset the controller and look at the first block; 0 or a negative errno."""
        try:
            self._ring.reset_device(0, self._timeout_s + RESET_TIMEOUT_S)
        except OSError as error:
            return -(error.errno or errno.EIO)
        block = np.zeros(BLOCK_BYTES, np.uint8)
        status = self._opened.controller.read(self._opened.nsid, 0, block, self._timeout_s)
        if status:
            return -errno_of(status)
        if not accept(block.tobytes()):
            return -errno.ESTALE
        self.down = 0
        return 0

    def mark(self, number: int) -> None:
        """Mark the file behind a software controller; see `Marks`. A drive is one process's."""
        if self._opened.path:
            self._marked = Marked(number)
            with contextlib.suppress(OSError):
                self._marked.add(os.open(self._opened.path, os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Wait for what was issued, then let go of the controller. Once."""
        self._ring.close()
        self._executor.detach(self._ring)
        with self._lock:
            self._regions.clear()
        self._opened.close()
        if self._marked is not None:
            self._marked.release()


def _geometry(device: Device, facts: dict[str, object], nsid: int) -> tuple[int, int]:
    """Bytes of a block, and of the namespace."""
    namespaces = facts["namespaces"]
    assert isinstance(namespaces, list)
    for one in namespaces:
        if one["nsid"] == nsid:
            return int(one["block_bytes"]), int(one["blocks"]) * int(one["block_bytes"])
    raise UnsupportedError(
        f"{device.path}: the controller has no namespace {nsid}", op="open", device=device.path
    )


def _pages(address: int, length_bytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The pages that memory touches, and, should others have those, the pages that are all its."""
    page, end = mmap.PAGESIZE, address + length_bytes
    return (
        (address // page * page, -(-end // page) * page),
        (-(-address // page) * page, end // page * page),
    )
