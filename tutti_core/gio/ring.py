"""gio_uring as the paper has it: init_queue, get_iocb, issue_io, wait_cqe (section 3.2).

A face of the native ring, with an executor that runs its launches. Python works once for an IOCB,
never for a fragment.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core._native import GIO_FRAGMENTS_MAX, GioRing, NvmeController
from tutti_core.errors import BusyError, StoreClosedError, UnsupportedError
from tutti_core.gio.executor import CpuExecutor, Executor

FRAGMENTS_MAX = GIO_FRAGMENTS_MAX
READ, WRITE = 0, 1

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


def init_queue(
    devices: Sequence[tuple[NvmeController, int]],
    *,
    depth: int = 8,
    executor: Executor | None = None,
    timeout_s: float = 10.0,
) -> GioQueue:
    """Make a ring of `depth` IOCBs over namespaces: pairs of controller and namespace id.

    Parameters
        executor: runs the launches; one CPU thread by default. Others need controllers with two
            pairs of queues.
        timeout_s: of each launch.
    Raises
        UnsupportedError: the executor cannot do it, or a controller does not fit.
    """
    executor = executor if executor is not None else CpuExecutor()
    try:
        ring = GioRing(list(devices), depth=depth, threads=executor.threads, timeout_s=timeout_s)
    except OSError as error:
        raise UnsupportedError(str(error), op="open", errno=error.errno) from error
    try:
        executor.attach(ring)
    except BaseException:
        ring.close()
        raise
    return GioQueue(ring, executor)


class GioQueue:
    """A ring of IOCBs. Threads: any; an IOCB is one thread's at a time."""

    def __init__(self, ring: GioRing, executor: Executor) -> None:
        self._ring, self._executor = ring, executor
        self._closed = False
        self._lock = threading.Lock()

    def get_iocb(self, count: int = 1) -> list[int]:
        """Take IOCBs; none where fewer are free."""
        return self._ring.get_iocb(count)

    def put_back(self, iocb: int) -> None:
        """Give one back that was not issued. Raises ValueError for another one."""
        _check(self._ring.put_back(iocb), "put_back")

    def prepare(
        self, iocb: int, op: int, device: U32, offset_bytes: U64, address: U64, length_bytes: U64
    ) -> None:
        """Fill an IOCB with fragments: READ or WRITE, at most FRAGMENTS_MAX.

        A fragment that cannot be sent gets its status now, and the others go on.
        Raises
            ValueError: the IOCB was not taken, or the arrays do not fit.
        """
        status = self._ring.prepare(iocb, op, device, offset_bytes, address, length_bytes)
        _check(status, "prepare")

    def issue_io(self, iocbs: Sequence[int], sms: int = 0, after: Sequence[int] = ()) -> bool:
        """Send prepared IOCBs by one asynchronous launch.

        Parameters
            sms: SMs (or CPU threads) that take part at most; 0: as the executor has it.
            after: CUDA events (cudaEvent_t) that the launch waits for, on the device.
        Returns
            False: the launch failed. The IOCBs have ended all the same, and `wait_cqe` says so.
        Raises
            ValueError: one of them was not prepared. BusyError: a device is being reset.
            StoreClosedError. Nothing was sent, and the IOCBs are as they were.
        """
        ids = np.array(iocbs, np.uint32)
        with self._lock:
            lanes = sms or self._executor.lanes
            _check(self._ring.issue_io(ids, lanes), "issue_io")
            try:
                self._executor.launch(self._ring, sms, after)
            except RuntimeError:
                if self._executor.threads == 0:
                    self._ring.refuse(ids)
                return False
        return True

    def wait_cqe(self, iocb: int, timeout_s: float) -> U32 | None:
        """NVMe statuses of an IOCB's fragments, which frees it; None: not yet.

        Where its kernel was killed, what has not ended ends here, with a timeout or "not issued".
        Raises
            OSError: it was not issued.
        """
        statuses = self._ring.wait_cqe(iocb, timeout_s)
        if statuses is not None:
            return statuses
        with self._lock:  # nothing is between issue and launch
            if self._closed or not self._executor.lost(self._ring):
                return None
            statuses = self._ring.wait_cqe(iocb, 0)
            if statuses is not None:
                return statuses
            self._ring.refuse(np.array([iocb], np.uint32))
            return self._ring.wait_cqe(iocb, 0)

    def reset_device(self, device: int, timeout_s: float) -> None:
        """After timeouts: wait until nothing is in flight, reset the controller. Raises OSError."""
        self._ring.reset_device(device, timeout_s)

    def stats(self) -> dict[str, Any]:
        """Counters of the ring."""
        return dict(self._ring.stats())

    def close(self) -> None:
        """Take nothing more, wait for what was issued, let go of the executor. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ring.close()
            self._executor.detach(self._ring)


def _check(status: int, what: str) -> None:
    if status == -errno.EBUSY:
        raise BusyError(f"{what}: a device is being reset", op=what, retryable=True)
    if status == -errno.ESHUTDOWN:
        raise StoreClosedError(f"{what}: the ring is closed", op=what)
    if status:
        raise ValueError(f"{what}: {os.strerror(-status)}")
