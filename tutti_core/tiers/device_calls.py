"""Calls that block for as long as a device likes: flushing, allocating, opening anew.

Each device has a thread for them, started at its first call, so that a device that hangs holds up
neither the saving thread nor the other devices. Calls of one device run one after another.

What a flush covers
    Linux reports a lost write-back once, to whoever flushes first, and takes the pages for written
    from then on. So a flush that succeeds says nothing of writes that began before the device's
    last failure had returned. They are told by an epoch: it moves when a flush fails and when the
    device is opened anew, and a write whose epoch has passed by the time its own flush has ended is
    not durable and must not be published.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from tutti_core.errors import StoreClosedError
from tutti_core.io.reopen import Reopens
from tutti_core.io.transport import Transport

logger = logging.getLogger("tutti")


class DeviceCall:
    """One call on its way. `status` is 0 or a negative errno once it is done.

    `error` is what it raised, if it did.
    """

    __slots__ = ("_done", "error", "status")

    def __init__(self) -> None:
        self.status = -errno.EINPROGRESS
        self.error: OSError | None = None
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False at the deadline."""
        return self._done.wait(max(timeout_s, 0.0))

    def finish(self, status: int) -> None:
        """For the device's thread."""
        self.status = status
        self._done.set()


class DeviceCalls:
    """The blocking calls of one store's devices. Threads: any.

    Parameters
        accept: whether a first block is that of the pool at a device's place; see `Reopens`.
        count: adds to a counter of the store.
    """

    def __init__(
        self,
        transport: Transport,
        accept: Callable[[int, bytes], bool],
        count: Callable[[str, int], None],
    ) -> None:
        self._transport = transport
        self._accept = accept
        self._count = count
        self._lock = threading.Lock()
        self._epochs = [0] * len(transport.devices)
        self._queues: dict[int, SimpleQueue[tuple[DeviceCall, Callable[[], int]] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def epochs(self) -> tuple[int, ...]:
        """The epoch of each device: a write belongs to the one in which it was submitted."""
        with self._lock:
            return tuple(self._epochs)

    # ---- calls ----
    def flush(self, device: int) -> DeviceCall:
        """Start making finished writes of a device durable."""
        return self.start(device, lambda: self._flush(device))

    def flush_all(self, devices: Iterable[int], timeout_s: float) -> dict[int, int]:
        """Flush devices side by side; device -> 0 or a negative errno, -ETIMEDOUT if it is late."""
        calls = {device: self.flush(device) for device in devices}
        deadline_s = time.monotonic() + timeout_s
        result = {}
        for device, call in calls.items():
            ended = call.wait(deadline_s - time.monotonic())
            result[device] = call.status if ended else -errno.ETIMEDOUT
        return result

    @property
    def can_reopen(self) -> bool:
        """Whether the transport can open a device anew."""
        return isinstance(self._transport, Reopens)

    def reopen(self, device: int) -> DeviceCall:
        """Start opening a device anew, if the same pool is there."""
        return self.start(device, lambda: self._reopen(device))

    def dismiss(self) -> None:
        """Take no more calls, and let each thread end after those it has. Does not wait."""
        with self._lock:
            self._stopped = True
            for queue in self._queues.values():
                queue.put(None)

    def stop(self, timeout_s: float) -> bool:
        """`dismiss`, and wait; False if a thread still waits for its device at the deadline."""
        self.dismiss()
        with self._lock:
            threads = list(self._threads)
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def start(self, device: int, work: Callable[[], int]) -> DeviceCall:
        """Start something that uses a device; it returns 0 or a negative errno, or raises OSError.

        Raises
            StoreClosedError: after `stop`.
        """
        call = DeviceCall()
        with self._lock:
            if self._stopped:
                raise StoreClosedError("the store is closed")
            queue = self._queues.get(device)
            if queue is None:
                queue = SimpleQueue()
                thread = threading.Thread(
                    target=self._run, args=(queue,), name=f"tutti-device-{device}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the system starts no more threads now
                    call.finish(-errno.EAGAIN)
                    return call
                self._queues[device] = queue
                self._threads.append(thread)
            queue.put((call, work))
        return call

    # ---- inside ----
    def _run(self, queue: SimpleQueue[tuple[DeviceCall, Callable[[], int]] | None]) -> None:
        while (item := queue.get()) is not None:
            call, work = item
            status = -errno.EIO
            try:
                status = work()
            except StoreClosedError:
                status = -errno.ESHUTDOWN
            except OSError as error:
                status, call.error = -(error.errno or errno.EIO), error
            except Exception:
                logger.exception("a call to a device raised; it counts as failed")
                self._count("device_call_errors", 1)
            call.finish(status)

    def _flush(self, device: int) -> int:
        status = -errno.EIO
        try:
            status = self._transport.flush(device)
        finally:
            if status:
                self._move_on(device)
        return status

    def _reopen(self, device: int) -> int:
        assert isinstance(self._transport, Reopens)
        status = self._transport.reopen_device(device, lambda block: self._accept(device, block))
        if status == 0:
            self._move_on(device)
            self._count("devices_reopened", 1)
        return status

    def _move_on(self, device: int) -> None:
        with self._lock:
            self._epochs[device] += 1
