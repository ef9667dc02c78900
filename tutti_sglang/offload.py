"""Saves device pages in the background: one thread, in bounded pieces, behind the loads.

A job is what the engine gave up in one call. Results come in the order of the calls, whether a job
was saved, was stored already, or was refused; so ranks that decide differently stay in step.

Invariants
    - Every call has exactly one result.
    - The pages of a job are not read any more once its result is there, but for a transfer that
      has not ended in time: what it writes is never published. What is forgotten by `reset` is not
      read any more when that returns, unless it says otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tutti_core import BusyError, NamespaceStore, PageKeys, SaveTicket
from tutti_sglang.device_pools import DevicePoolPages

logger = logging.getLogger("tutti.sglang")

I64 = npt.NDArray[np.int64]

PIECE_BYTES = 32 << 20
"""Of a job that are handed to the store at a time; between two pieces loads go first."""
IN_FLIGHT_BYTES = 128 << 20
"""Of pieces that the store has not finished. Several, so that it can write them in one group."""
YIELD_S = 0.2
"""How long one piece waits for the loads before it goes ahead anyway."""
IDLE_POLL_S = 1.0
FRAGMENTS_MAX = 1 << 20  # of one piece


@dataclass(frozen=True, slots=True)
class PoolSave:
    """Pages of one pool: of `chain` from page `first` on, in the device slots `slots`."""

    store: NamespaceStore
    pages: DevicePoolPages
    chain: PageKeys
    first: int
    slots: torch.Tensor

    @property
    def page_count(self) -> int:
        """How many pages."""
        return len(self.chain) - self.first

    @property
    def length_bytes(self) -> int:
        """Bytes of the pages."""
        return self.page_count * self.pages.page_bytes

    def upto(self, count: int) -> PageKeys:
        """The chain up to the first `count` of the pages."""
        return self.chain.upto(self.first + count)

    def is_stored(self) -> bool:
        """Whether all pages are stored. The last one is asked first: it mostly decides."""
        last = len(self.chain) - 1
        if not self.store.contains(self.chain, last)[0]:
            return False
        return bool(self.store.contains(self.chain, self.first).all())


class Result:
    """Outcome of one call: None until it is known."""

    def __init__(self, stored: bool | None = None) -> None:
        self.stored = stored
        self.cancelled = False


@dataclass(frozen=True, slots=True)
class Job:
    """What is saved for one call.

    after  events of the device that come first: of what computed the slots, then of what wrote the
           pages.
    """

    pools: tuple[PoolSave, ...]
    after: Sequence[Any]
    result: Result

    @property
    def length_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(pool.length_bytes for pool in self.pools)


class DeviceSaver(Protocol):
    """Saves pages that the store cannot read where they are; `staging.Staging` is one."""

    def save(
        self,
        pages: NamespaceStore,
        keys: PageKeys,
        first: int,
        target: Any,
        *,
        timeout_s: float,
        stopped: Callable[[], bool],
    ) -> npt.NDArray[np.bool_]:
        """Save pages first .. end, copied out of `target`; blocks. One bool a page."""
        ...


Target = Callable[[DevicePoolPages, npt.NDArray[np.int64], tuple[Any, ...]], Any]
"""(pool, first rows of pages, events that come first) -> what a DeviceSaver calls these pages."""


@dataclass(slots=True)
class _Progress:
    """A job under way. `left` counts its unfinished pieces, and one more until all are started."""

    job: Job
    left: int = 1
    stored: bool = True


@dataclass(slots=True)
class _Piece:
    """Pages of a job that the store is writing."""

    progress: _Progress
    ticket: SaveTicket
    length_bytes: int


class Offloader:
    """Runs the thread.

    Parameters
        wait_idle: waits until no load is under way, for so many seconds at most.
        bytes_max: of jobs that wait or are being saved; a job beyond that is refused, unless there
            is no other.
        backlog_bytes: what the store lets wait; it refuses what is more.
        timeout_s: for the store to save one piece.
        tick: called on the thread about once a second.
        fail: told of an error that made a job fail.
        device: for pools in a device's own memory: what saves them, and what it calls their pages.
    """

    def __init__(
        self,
        *,
        wait_idle: Callable[[float], bool],
        bytes_max: int,
        backlog_bytes: int,
        timeout_s: float,
        tick: Callable[[], None],
        fail: Callable[[Exception], None],
        device: tuple[DeviceSaver, Target] | None = None,
    ) -> None:
        self._wait_idle = wait_idle
        self._bytes_max = bytes_max
        self._piece_bytes = min(PIECE_BYTES, backlog_bytes // 4)
        self._in_flight_max = min(IN_FLIGHT_BYTES, backlog_bytes // 2)
        self._timeout_s = timeout_s
        self._tick = tick
        self._fail = fail
        self._device = device
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._results: deque[Result] = deque()
        self._pending_bytes = 0
        self._busy = False
        self._stopping = False
        self._in_flight: deque[_Piece] = deque()  # the thread's, like its bytes
        self._in_flight_bytes = 0
        self._thread = threading.Thread(target=self._run, name="tutti-offload", daemon=True)
        self._thread.start()

    # ---- the engine's thread ----
    def answer(self, stored: bool) -> None:
        """The result of a call that needs no job."""
        with self._changed:
            self._results.append(Result(stored))

    def submit(self, job: Job) -> bool:
        """Queue a job; False, which is its result then too, when too many bytes wait."""
        length = job.length_bytes
        with self._changed:
            refused = self._stopping or (
                self._pending_bytes > 0 and self._pending_bytes + length > self._bytes_max
            )
            self._results.append(job.result)
            if refused:
                job.result.stored = False
                return False
            self._pending_bytes += length
            self._jobs.append(job)
            self._changed.notify_all()
        return True

    def completed(self) -> int:
        """How many results can be taken."""
        with self._changed:
            count = 0
            for result in self._results:
                if result.stored is None:
                    break
                count += 1
            return count

    def pop(self) -> bool:
        """Take the oldest result."""
        with self._changed:
            if not self._results or self._results[0].stored is None:
                return False
            return bool(self._results.popleft().stored)

    @property
    def pending_bytes(self) -> int:
        """Bytes of jobs that wait or are being saved."""
        return self._pending_bytes

    def reset(self, drain_s: float, timeout_s: float) -> bool:
        """Let jobs be saved for `drain_s` seconds, then forget the rest, and all results.

        Returns
            False if pages of a job may still be read after `timeout_s` more.
        """
        with self._changed:
            self._changed.wait_for(self._idle, drain_s)
            for job in self._jobs:
                self._pending_bytes -= job.length_bytes
            self._jobs.clear()
            for result in self._results:
                result.cancelled = True
            idle = self._changed.wait_for(self._idle, timeout_s)
            self._results.clear()
            return idle

    def close(self, drain_s: float, timeout_s: float) -> bool:
        """Reset, then end the thread. Idempotent."""
        with self._changed:
            self._stopping = True
        idle = self.reset(drain_s, timeout_s)
        with self._changed:
            self._changed.notify_all()
        self._thread.join(IDLE_POLL_S if idle else 0.0)
        return not self._thread.is_alive()

    def _idle(self) -> bool:
        return not self._jobs and not self._busy

    # ---- the thread ----
    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._in_flight:
                    self._busy = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._jobs or self._stopping, IDLE_POLL_S)
                job = self._jobs.popleft() if self._jobs else None
                self._busy = job is not None or bool(self._in_flight)
                if self._stopping and not self._busy:
                    return
            self._quietly(self._tick)
            if job is not None:
                self._save(_Progress(job))
            elif self._in_flight:
                self._finish_oldest()

    def _save(self, progress: _Progress) -> None:
        """Start every piece of a job; it ends with the last one that ends."""
        job, stored = progress.job, False
        try:
            # Of a device's own memory only the slots are read here; its copies wait themselves.
            for event in job.after if self._device is None else job.after[:1]:
                event.synchronize()
            stored = all([self._save_pool(progress, pool) for pool in job.pools])
        except Exception as error:
            self._quietly(self._fail, error)
        self._settle(progress, stored)

    def _save_pool(self, progress: _Progress, pool: PoolSave) -> bool:
        """Save the pages of one pool, in pieces; False if it is known that some are not stored."""
        rows = pool.pages.rows(pool.slots)
        if len(rows) != pool.page_count:
            raise ValueError(f"{len(rows)} device pages for {pool.page_count} keys")
        if self._device is not None:
            return self._save_from_device(progress.job, pool, rows)
        fragments = len(pool.pages.length_bytes)
        step = self._piece_bytes // pool.pages.page_bytes
        step = max(min(step, FRAGMENTS_MAX // fragments), 1)
        for low in range(0, len(rows), step):
            self._wait_idle(YIELD_S)
            if progress.job.result.cancelled:
                return False
            self._start_piece(progress, pool, low, rows[low : low + step])
        return True

    def _start_piece(self, progress: _Progress, pool: PoolSave, low: int, rows: I64) -> None:
        """Hand pages to the store, which reads them where they are."""
        length = len(rows) * pool.pages.page_bytes
        while self._in_flight and self._in_flight_bytes + length > self._in_flight_max:
            self._finish_oldest()
        memory = pool.pages.fragments(rows, pool.slots)
        ticket = pool.store.save(pool.upto(low + len(rows)), memory, pool.first + low)
        progress.left += 1
        self._in_flight.append(_Piece(progress, ticket, length))
        self._in_flight_bytes += length

    def _save_from_device(self, job: Job, pool: PoolSave, rows: I64) -> bool:
        """Save what is not stored yet, run by run: here each page costs a copy."""
        assert self._device is not None
        saver, target = self._device

        def stopped() -> bool:
            """Asked between two pieces of a run."""
            self._wait_idle(YIELD_S)
            return job.result.cancelled

        missing = np.flatnonzero(~pool.store.contains(pool.chain, pool.first))
        runs = np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1)
        for low, high in ((int(run[0]), int(run[-1]) + 1) for run in runs if len(run)):
            stored = saver.save(
                pool.store,
                pool.upto(high),
                pool.first + low,
                target(pool.pages, rows[low:high], tuple(job.after)),
                timeout_s=self._timeout_s,
                stopped=stopped,
            )
            if not stored.all():
                return False
        return True

    def _finish_oldest(self) -> None:
        """Wait for the oldest piece in flight."""
        piece = self._in_flight.popleft()
        self._in_flight_bytes -= piece.length_bytes
        stored = False
        try:
            stored = bool(piece.ticket.wait(self._timeout_s).all())
        except BusyError as error:
            # The engine may reuse the memory once it has the result: these pages must not appear.
            piece.ticket.cancel()
            self._quietly(self._fail, error)
        except Exception as error:
            self._quietly(self._fail, error)
        self._settle(piece.progress, stored)

    def _settle(self, progress: _Progress, stored: bool) -> None:
        """One piece of a job is over, or all its pieces were started."""
        progress.stored &= stored
        progress.left -= 1
        if progress.left == 0:
            with self._changed:
                progress.job.result.stored = progress.stored
                self._pending_bytes -= progress.job.length_bytes
                self._changed.notify_all()

    def _quietly(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            logger.exception("tutti: the offload thread goes on")
