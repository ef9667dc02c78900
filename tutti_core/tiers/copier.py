"""The copying thread: moves batches of pages between memory tiers and callers' memory, in order.

One thread and one bounded queue. The bytes move in native code with the GIL released, so a load
returns while its copy is still under way. A job that the queue has no room for is refused; the
caller does it then, or goes another way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("tutti")

COPIES_MAX = 256
"""Jobs that may wait."""


class Copy:
    """One job: `work` runs once, on the copier's thread, or by who waits for it and is earlier."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._started = False
        self._done = threading.Event()
        self.failed = False

    def done(self) -> bool:
        """Whether it ran."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, doing it here if nobody has begun; False at the deadline."""
        if timeout_s > 0 and not self._done.is_set():
            self.run()
        return self._done.wait(max(timeout_s, 0.0))

    def run(self) -> None:
        """Do the work unless somebody has begun it. Never raises; `failed` says how it went."""
        with self._lock:
            if self._started:
                return
            self._started = True
        try:
            self._work()
        except BaseException:  # whatever it is, the thread must go on: others wait for it
            self.failed = True
            logger.exception("a copy of pages in memory failed")
        finally:
            self._work = _nothing  # lets go of the memory that it held
            self._done.set()


class Copier:
    """Runs the copying thread of one store.

    Parameters
        backlog_bytes: bound on the page bytes of jobs that wait.
    """

    def __init__(self, backlog_bytes: int) -> None:
        self._backlog_bytes = backlog_bytes
        self._jobs: deque[tuple[Copy, int]] = deque()
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tutti-copier", daemon=True)
        self._thread.start()

    def enqueue(self, job: Copy, length_bytes: int) -> bool:
        """Queue a job; False when the queue is full or the copier has stopped.

        What is queued is run: the thread ends only when the queue is empty, and no job can end it.
        """
        with self._changed:
            over = self._pending_bytes + length_bytes > self._backlog_bytes and self._jobs
            if self._stopping or len(self._jobs) >= COPIES_MAX or over:
                return False
            self._pending_bytes += length_bytes
            self._jobs.append((job, length_bytes))
            self._changed.notify()
            return True

    def pending_bytes(self) -> int:
        """Page bytes queued or being copied."""
        return self._pending_bytes

    def stop(self, timeout_s: float) -> bool:
        """Do what is queued, then end the thread; False if it is still busy at the deadline."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was queued before has run; False at the deadline."""
        marker = Copy(_nothing)
        deadline_s = time.monotonic() + timeout_s
        while not self.enqueue(marker, 0):
            if self._stopping or time.monotonic() > deadline_s:
                return self._stopping and not self._jobs
            time.sleep(0.001)
        return marker._done.wait(max(deadline_s - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if not self._jobs:
                    return
                job, length = self._jobs[0]
            job.run()
            with self._changed:
                self._jobs.popleft()
                self._pending_bytes -= length


def _nothing() -> None:
    """No work."""
