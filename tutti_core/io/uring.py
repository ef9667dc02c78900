"""The io_uring transport: direct I/O by the native engine, one ring and one thread per device.

Aligned parts of fragments move in place; unaligned ones pass through a small aligned arena. This
module turns the engine's statuses into the types of `transport.py`; see csrc/include/tutti for the
engine itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tutti_core._native import QUEUE_DEPTH_MAX, TRANSFER_BYTES_MAX, UringEngine
from tutti_core.errors import (
    ConfigError,
    InternalError,
    StoreClosedError,
    TuttiError,
    UnsupportedError,
    device_error,
)
from tutti_core.io.marks import Marked
from tutti_core.io.posix import check_options
from tutti_core.io.reopen import open_again
from tutti_core.io.transport import (
    BLOCK_BYTES,
    Batch,
    BatchResult,
    Capabilities,
    Device,
    TransportOptions,
    TransportStats,
    check_batch,
    too_many_batches,
)

_BOUNCE_BYTES_MAX = 1 << 40
_HINTS = {
    errno.ENOSYS: "the kernel has no io_uring, or one older than Linux 5.7",
    errno.EPERM: "sysctl kernel.io_uring_disabled or a container's seccomp profile forbids it",
    errno.EACCES: "a security module forbids it",
    errno.ENOMEM: "raise the locked-memory limit, ulimit -l",
    errno.EINVAL: "the kernel's io_uring is too old",
}


class UringTransport:
    """`Transport` over io_uring, on files or block devices that exist already.

    Never creates, truncates or locks a file. A batch is in flight until its result was returned, so
    results that nobody collects count against BATCHES_IN_FLIGHT_MAX. Results of batches that
    `close` drained can still be collected after it. As with the posix transport, what landed of a
    failed item is unspecified.

    Parameters
        devices: at least one; each is opened read-write with O_DIRECT.
        options: `bounce_bytes` is rounded up to a block.
    Raises
        ConfigError: an option is out of bounds.
        UnsupportedError: no io_uring for this process, or no direct I/O on a device.
        DeviceError: a file is missing, may not be opened, or cannot be read.
    Threads    any. The GIL is released while the engine copies, waits or flushes.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
        *,
        _first_attempt_bytes: int = 0,
    ) -> None:
        _check(devices, options)
        self._devices = tuple(devices)
        self._options = options
        self._pid = os.getpid()
        self._marked: Marked | None = None
        self._count_lock = threading.Lock()
        self._submitted = np.zeros(len(devices), dtype=np.int64)
        try:
            self._engine = UringEngine(
                [os.fspath(device.path) for device in devices],
                [device.capacity_bytes for device in devices],
                queue_depth=options.queue_depth,
                transfer_bytes_max=options.transfer_bytes_max,
                bounce_bytes=-(-options.bounce_bytes // BLOCK_BYTES) * BLOCK_BYTES,
                first_attempt_bytes=_first_attempt_bytes,
            )
        except OSError as error:
            raise _open_error(error) from error

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices this transport was opened on, in the order that batches index them."""
        return self._devices

    def capabilities(self) -> Capabilities:
        """What is in use. The notes grow when the kernel refuses a later `register`."""
        grants = self._engine.grants()
        notes = []
        arena = int(str(grants["registered_buffers"]))
        if arena:
            notes.append(_refusal("registering the bounce memory", arena))
        region = int(str(grants["registered_regions"]))
        if region and not arena:
            notes.append(_refusal("registering a memory region", region))
        if not grants["registered_files"]:
            notes.append("uring: registered files are refused; each transfer looks its file up")
        return Capabilities(
            name="uring",
            direct=(True,) * len(self._devices),
            registered_buffers=not arena,
            registered_files=bool(grants["registered_files"]),
            queue_depth=self._options.queue_depth,
            transfer_bytes_max=self._options.transfer_bytes_max,
            notes=tuple(notes),
        )

    def register(self, address: int, length_bytes: int) -> int:
        """Pin memory for every device's ring; see `Transport.register`. Waits for the pinning.

        Raises
            ValueError: an impossible address or length.
        """
        if address <= 0 or length_bytes <= 0 or address + length_bytes >= 1 << 64:
            raise ValueError(f"cannot register {length_bytes} bytes at address {address:#x}")
        region = self._engine.register_memory(address, length_bytes)
        if region < 0:
            raise _state_error("register", region)
        return region

    def unregister(self, region: int) -> None:
        """Forget a region. Raises KeyError for an unknown or forgotten id."""
        status = self._engine.unregister_memory(region)
        if status == -errno.ENOENT:
            raise KeyError(region)
        if status < 0:
            raise _state_error("unregister", status)

    def submit(self, batch: Batch) -> int:
        """Hand a batch to the rings and return its ticket; see `Transport.submit`."""
        try:
            ticket = self._engine.submit(
                int(batch.op),
                batch.device,
                batch.offset_bytes,
                batch.fragment_start,
                batch.address,
                batch.length_bytes,
                batch.checksum,
            )
        except TypeError as error:
            raise ValueError(
                "the arrays of a batch must be one-dimensional, C-contiguous, and of the types "
                f"that Batch names: {error}"
            ) from error
        if ticket > 0:
            with self._count_lock:
                self._submitted += np.bincount(batch.device, minlength=len(self._devices))
            return ticket
        if ticket == -errno.EINVAL:
            check_batch(batch, len(self._devices))
            raise ValueError(f"op: {batch.op!r} is neither READ nor WRITE")
        raise _state_error("submit", ticket)

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """Return the result of a batch, or None if it is not finished; see `Transport.wait`."""
        result = self._engine.wait(ticket, timeout_s)
        if result is None:
            return None
        if isinstance(result, int):
            if result == -errno.ENOENT:
                raise KeyError(ticket)
            raise _state_error("wait", result)
        return BatchResult(status=result[0], checksum=result[1])

    def flush(self, device: int) -> int:
        """Make finished writes durable with fdatasync; see `Transport.flush`."""
        if not 0 <= device < len(self._devices):
            raise ValueError(f"device {device} out of range; there are {len(self._devices)}")
        status = self._engine.flush(device)
        if status in (-errno.ESHUTDOWN, -errno.ECHILD):
            raise _state_error("flush", status)
        return status

    def reopen_device(self, device: int, accept: Callable[[bytes], bool]) -> int:
        """Open a device's path anew and go on with that; see `Reopens`."""
        fresh = open_again(self._devices[device].path, direct=True, accept=accept)
        if fresh < 0:
            return fresh
        if self._marked is not None:
            self._marked.add(os.dup(fresh))
        try:
            status = self._engine.replace_file(device, fresh)
        finally:
            os.close(fresh)
        if status in (-errno.ESHUTDOWN, -errno.ECHILD):
            raise _state_error("reopen", status)
        return status

    def mark(self, number: int) -> None:
        """Mark the files that the transfers use, which are opened anew for that; see `Marks`."""
        self._marked = Marked(number)
        for index, device in enumerate(self._devices):
            with contextlib.suppress(OSError):  # then this device goes on without a mark
                fresh = os.open(device.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
                self._marked.add(fresh)
                self._engine.replace_file(index, fresh)

    def stats(self) -> TransportStats:
        """Counters so far; `extra`: transfers, those with registered buffers, kernel calls."""
        counters = self._engine.stats()
        extra = {name: counters.pop(name) for name in ("transfers", "fixed_transfers", "enters")}
        with self._count_lock:
            submitted = self._submitted.tolist()
        pending = [max(n - e, 0) for n, e in zip(submitted, counters["device_items"], strict=True)]
        return TransportStats(**counters, device_pending=pending, extra=extra)

    def close(self) -> None:
        """Finish what is in flight, then let go of files, rings and threads. Idempotent.

        In a forked child it only closes the child's copies of the files.
        """
        self._engine.close()
        if self._marked is not None and self._pid == os.getpid():
            self._marked.release()


def _check(devices: Sequence[Device], options: TransportOptions) -> None:
    """Raise ConfigError unless `devices` and `options` are within the engine's bounds."""
    check_options(devices, options)
    for name, value, most in (
        ("queue_depth", options.queue_depth, QUEUE_DEPTH_MAX),
        ("transfer_bytes_max", options.transfer_bytes_max, TRANSFER_BYTES_MAX),
        ("bounce_bytes", options.bounce_bytes, _BOUNCE_BYTES_MAX),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{name}: {value} is not between 1 and {most}", op="open")


def _open_error(error: OSError) -> TuttiError:
    """Sort a failure to open by what helps: another transport, or another device."""
    code, step, path = error.errno or errno.EIO, error.strerror, str(error.filename)
    if step == "direct" and code in (errno.EINVAL, errno.EOPNOTSUPP):
        return UnsupportedError(
            f"direct I/O (O_DIRECT) does not work on {path}: {os.strerror(code)}",
            op="open",
            device=path,
            errno=code,
            hint="use a file system that supports it, or the posix transport",
        )
    if step == "io_uring_setup":
        return UnsupportedError(
            f"io_uring cannot be set up: {os.strerror(code)}",
            op="open",
            device=path,
            errno=code,
            hint=_HINTS.get(code, "use the posix transport"),
        )
    return device_error(
        "read" if step == "direct" else str(step),
        code,
        device=path,
        hint="it has to exist and to be readable and writable" if step == "open" else "",
    )


def _refusal(what: str, status: int) -> str:
    hint = f" ({_HINTS[-status]})" if -status == errno.ENOMEM else ""
    return (
        f"uring: {what} was refused, {os.strerror(-status)}{hint}; "
        "memory is pinned for each transfer instead"
    )


def _state_error(op: str, status: int) -> TuttiError:
    """Word a status that says in what state the engine is."""
    if status == -errno.EBUSY:
        return too_many_batches(op)
    if status == -errno.ESHUTDOWN:
        return StoreClosedError(f"{op}: the transport is closed", op=op)
    if status == -errno.ECHILD:
        return StoreClosedError(
            "the transport belongs to the process that this one was forked from",
            op=op,
            hint="open one of its own",
        )
    return InternalError(f"{op}: the engine returned {status}", op=op, errno=-status)
