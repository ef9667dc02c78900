"""Staging: carries pages between storage and device memory that storage cannot reach.

Two lanes, one for loads and one for saves, so that neither waits for the other's room. A lane is a
bounded ring of pinned host memory, as much memory on the device, and a stream of its own:

    load   storage -> ring                  one fragment a page (the caller's reads)
           ring -> device memory            one copy, the row numbers with it
           device memory -> engine's rows   one indexed copy a buffer
    save   the same backwards, and then `NamespaceStore.save` out of the ring

Invariants
    - A piece of the ring, and the same piece of device memory, are used again only after the event
      behind the last copy that touches them has happened, and, for saves, after the store let go.
    - A load is reported as placed only after that event: whatever the engine launches later, on any
      stream, sees the bytes.
    - Copies wait, on the device, for the events the caller names; no thread waits for a stream.
    - After a copy that failed or never ended the lanes hand out nothing any more, and their memory
      stays mapped for as long as something may still touch it.
    - No object per page or fragment. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tutti_core import (
    BusyError,
    ConfigError,
    DeviceError,
    InternalError,
    NamespaceStore,
    PageFragments,
    PageKeys,
    SaveTicket,
    StoreClosedError,
    TuttiError,
)
from tutti_sglang.staging_ring import ALIGN_BYTES, Ring
from tutti_sglang.staging_rows import DevicePages, DevicePool, Packed, words_of

logger = logging.getLogger("tutti")

RING_BYTES = 64 << 20
"""Of each lane, on the host and again on the device. A lane has at least room for four pages."""
PIECES_PER_RING = 4
"""One piece is at most a quarter of a ring: while one drains, others are filled."""
TIMEOUT_S = 30.0
"""For a copy to or from the device. One piece takes a millisecond."""
SAVES_AHEAD = 2
"""Pieces that the store saves at once, beside the two that are being copied out."""
STOP_POLL_S = 0.05
"""How often a wait for the store asks whether it was stopped."""
ROW_BYTES = 8

_POLL_FIRST_S, _POLL_MAX_S = 20e-6, 1e-3

Path = Literal["host", "staging", "gds"]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_kept: list[object] = []
"""Memory that something may still touch although its owner was closed."""


def memory_path(device_type: str, transport: str, *, memory_tiers: bool) -> tuple[Path, str]:
    """Return how loads reach a pool, and why.

    Parameters
        device_type: of the pool's tensors, "cpu" or "cuda".
        transport: name of the transport in use (`StoreStats.transport.name`).
        memory_tiers: the store keeps pages in DRAM or HBM too; the CPU copies those.
    """
    if device_type == "cpu":
        return "host", "the pool is host memory: storage reads straight into it"
    if transport != "gds":
        return "staging", f"transport {transport} does not reach device memory"
    if memory_tiers:
        return "staging", "pages of memory tiers are copied by the CPU, which can't reach the pool"
    return "gds", "cuFile reads straight into the pool; saves go by way of staging, to be hashed"


class _Lane:
    """One direction: pinned memory, device memory of the same size, a stream.

    Parameters
        api: `torch.cuda`, or what takes its place: Stream(device), Event(), stream(stream).
    """

    def __init__(self, device: torch.device, api: Any, length_bytes: int) -> None:
        self.host = _host_memory(length_bytes, pinned=device.type == "cuda")
        self.bytes = self.host.numpy()
        self.address = self.host.data_ptr()
        self.device = torch.empty(length_bytes, dtype=torch.uint8, device=device)
        self.words = words_of(self.device)
        self.stream = api.Stream(device)
        self.ring = Ring(length_bytes)
        self._api = api

    @contextlib.contextmanager
    def order(self, after: Sequence[Any]) -> Iterator[None]:
        """Run copies on the lane's stream, behind `after`."""
        with torch.inference_mode(), self._api.stream(self.stream):
            for event in after:
                self.stream.wait_event(event)
            yield

    def mark(self) -> Any:
        """Return an event behind everything the stream was given so far."""
        event = self._api.Event()
        event.record(self.stream)
        return event

    def rows_at(self, start: int, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Write row numbers into the ring; returns where the device finds them once copied."""
        self.bytes[start : start + rows.nbytes] = rows.view(np.uint8)
        first = start // ROW_BYTES
        return self.words[torch.int64][first : first + len(rows)]


def _host_memory(length_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Aligned bytes. torch rounds pinned memory up to a power of two, so none is asked in vain."""
    for spare in (0, ALIGN_BYTES):
        raw = torch.empty(length_bytes + spare, dtype=torch.uint8, pin_memory=pinned)
        shift = -raw.data_ptr() % ALIGN_BYTES
        if shift <= spare:
            break
    return raw[shift : shift + length_bytes]


class LoadSpace:
    """Room for one part of some pages on its way to the device; made by `Staging.take`.

    address   (pages, 1) uint64: where storage shall put each page's part.
    Threads   one at a time.
    """

    def __init__(
        self, staging: Staging, target: DevicePages, part: int, low: int, high: int, start: int
    ) -> None:
        pages = np.arange(high - low, dtype=np.uint64)[:, None]
        self._step = target.pool.part_steps[part]
        self.address: U64 = pages * np.uint64(self._step)
        self.address += np.uint64(staging.loads.address + start)
        self._staging = staging
        self._target = target
        self._part = part
        self._rows = target.rows[low:high]
        self._start = start
        self._begun = False
        self._event: Any = None
        self._held = True

    def place(self) -> None:
        """The bytes arrived and are right: start to copy them on. Does not wait. At most once.

        Raises
            DeviceError: the device refused; staging is out of use.
        """
        if not self._held or self._begun:
            raise InternalError("a space is placed once, and only while it is held")
        self._begun = True
        lane, start, count = self._staging.loads, self._start, len(self._rows)
        rows_start = start + count * self._step
        rows = lane.rows_at(rows_start, self._rows)
        moved = slice(start, rows_start + count * ROW_BYTES)
        with self._staging.copying("load"), lane.order(self._target.after):
            lane.device[moved].copy_(lane.host[moved], non_blocking=True)
            self._target.pool.scatter(self._part, Packed(lane.words, start, self._step), rows)
            self._event = lane.mark()

    def placed(self, timeout_s: float) -> bool:
        """Wait until the bytes are in the engine's rows, for every stream; the room is free then.

        Raises
            DeviceError: the copy failed; staging is out of use.
        """
        if not self._held:
            return True
        if self._event is None:
            raise InternalError("the space was not placed")
        if not self._staging.happened(self._event, timeout_s):
            return False
        size = self._target.pool.part_bytes[self._part]
        self._staging.count("loaded_bytes", len(self._rows) * size)
        self._give()
        return True

    def _give(self) -> None:
        self._held = False
        self._staging.give(self._staging.loads, self._start)

    def drop(self) -> None:
        """Give the room back; nothing may be reading into it. Idempotent, no-op once placed.

        Waits for a copy that was started, at most the staging's limit; room whose copy does not
        end is lost, and staging out of use.
        """
        if not self._held:
            return
        if self._event is None:
            if not self._begun:
                self._give()
            return  # the device refused a copy that may have begun: its room stays out of use
        with contextlib.suppress(TuttiError):
            if self._staging.happened(self._event, self._staging.timeout_s):
                self._give()
                return
        self._held = False
        self._staging.lose("a copy to the device has not ended")


@dataclass(slots=True, eq=False)
class _Leaving:
    """Some pages on their way out: `event` ends their copy to the host, `ticket` their save."""

    low: int
    high: int
    start: int
    event: Any
    ticket: SaveTicket | None = None

    def ended(self) -> bool:
        """Whether the store let go of the room."""
        return self.ticket is not None and self.ticket.done()


class Staging:
    """Both lanes for the pools of one device.

    Parameters
        pools: those that will be used, at least one; the rings are made to fit their pages.
        register, unregister: announce pinned memory to the store (`PrefixStore.register`).
        ring_bytes: of each lane, on the host and on the device each.
        timeout_s: limit of every wait for the device.
        api: streams and events; default `torch.cuda`, or `torch.cpu` on the CPU.
    Raises
        ConfigError: there is no memory for the rings.
    Threads    any; one save at a time.
    """

    def __init__(
        self,
        pools: Sequence[DevicePool],
        *,
        register: Callable[[Any], int] | None = None,
        unregister: Callable[[int], None] | None = None,
        ring_bytes: int = RING_BYTES,
        timeout_s: float = TIMEOUT_S,
        api: Any = None,
    ) -> None:
        device = pools[0].device
        if any(pool.device != device for pool in pools):
            raise ValueError("the pools of one staging lie on one device")
        if api is None:
            api = torch.cuda if device.type == "cuda" else torch.cpu
        largest = max(pool.page_step for pool in pools) + ROW_BYTES
        piece = max(ring_bytes // PIECES_PER_RING, largest)
        self._piece_bytes = -(-piece // ALIGN_BYTES) * ALIGN_BYTES
        length = PIECES_PER_RING * self._piece_bytes
        self.timeout_s = timeout_s
        try:
            self.loads = _Lane(device, api, length)
            self._saves = _Lane(device, api, length)
        except RuntimeError as error:  # out of memory, on the device or for pinning
            raise ConfigError(
                f"there is no room for staging: twice {length >> 20} MiB on the host and on "
                f"{device} ({error})",
                op="open",
                hint="leave the engine a smaller share of the memory, --mem-fraction-static",
            ) from error
        self._stuck: list[_Leaving] = []
        self._counts: Counter[str] = Counter()
        self.broken = ""
        """Why nothing is handed out any more; empty while all is well."""
        self._closed = False
        self._lock = threading.Lock()
        self._save_lock = threading.Lock()
        self._unregister = unregister
        lanes = (self.loads, self._saves)
        self._regions = [register((x.address, length)) for x in lanes] if register else []

    def stats(self) -> dict[str, int]:
        """Counters: loaded_bytes, saved_bytes, full (no room at once), saves_given_up, lost."""
        with self._lock:
            return {"ring_bytes": self.loads.ring.length_bytes, **self._counts}

    # ---- loads ----
    def pages_max(self, target: object, part: int) -> int:
        """Most pages of a part that one space holds, at least 1."""
        assert isinstance(target, DevicePages)
        return self._fit(target.pool.part_steps[part])

    def _fit(self, step_bytes: int) -> int:
        return max(self._piece_bytes // (step_bytes + ROW_BYTES), 1)

    def take(self, target: object, part: int, low: int, high: int) -> LoadSpace | None:
        """Room for one part of pages low .. high-1 of `target`; None: full, ask again. No wait.

        Raises
            ValueError: more pages than `pages_max`, or none.
            DeviceError: staging is out of use.
            StoreClosedError: after `close`.
        """
        assert isinstance(target, DevicePages)
        step, count = target.pool.part_steps[part], high - low
        if not 0 < count <= self._fit(step) or not 0 <= low < high <= len(target.rows):
            raise ValueError(f"pages {low} .. {high - 1} of {len(target.rows)} in one space")
        start = self._take(self.loads, count * (step + ROW_BYTES))
        return None if start is None else LoadSpace(self, target, part, low, high, start)

    # ---- saves ----
    def save(
        self,
        pages: NamespaceStore,
        keys: PageKeys,
        first: int,
        target: DevicePages,
        *,
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Mask:
        """Save the pages of a chain from `first` on; row i of `target` is page first + i.

        Waits for the events of `target` on the device, copies the rows out piece by piece, and
        saves each piece while the next is copied. Every page is copied: leave out what is stored.
        Parameters
            timeout_s: what is not stored by then is given up, and counted.
            stopped: asked between pieces; True ends it, what was begun included.
        Returns
            one bool a page: stored. Ends at most about `timeout_s` and one device wait later.
        Raises
            DeviceError: a copy failed; staging is out of use.
        """
        count = len(keys) - first
        if len(target.rows) != count:
            raise ValueError(f"{len(target.rows)} rows for {count} pages")
        deadline_s = time.monotonic() + timeout_s
        run = _SaveRun(self, self._saves, pages, keys, first, target, stopped, deadline_s)
        if not self._save_lock.acquire(timeout=timeout_s):
            self.count("saves_given_up")
            return np.zeros(count, dtype=np.bool_)
        try:
            self.free_stuck()
            return run.run(self._fit(target.pool.page_step))
        finally:
            self._save_lock.release()

    def keep_stuck(self, piece: _Leaving) -> None:
        """Room of a cancelled save: free once the store let go of it; for the save runs."""
        with self._lock:
            self._counts["saves_given_up"] += 1
            self._stuck.append(piece)

    def free_stuck(self) -> None:
        """Take back what the store let go of since; for the save runs."""
        with self._lock:
            for piece in [piece for piece in self._stuck if piece.ended()]:
                self._stuck.remove(piece)
                self._saves.ring.give(piece.start)

    # ---- shared ----
    def _take(self, lane: _Lane, length_bytes: int) -> int | None:
        with self._lock:
            if self._closed:
                raise StoreClosedError("staging is closed", op="stage")
            if self.broken:
                raise DeviceError(f"staging is out of use: {self.broken}", op="stage")
            start = lane.ring.take(length_bytes)
            if start is None:
                self._counts["full"] += 1
            return start

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter; for the spaces."""
        with self._lock:
            self._counts[name] += amount

    def give(self, lane: _Lane, start: int) -> None:
        """Take room back; for the spaces."""
        with self._lock:
            lane.ring.give(start)

    def lose(self, reason: str) -> None:
        """Room whose last use has not ended; for the spaces."""
        with self._lock:
            self._counts["lost"] += 1
            if not self.broken:
                self.broken = reason
                logger.error("staging is out of use: %s", reason)

    @contextlib.contextmanager
    def copying(self, op: str) -> Iterator[None]:
        """What the device raises meanwhile puts staging out of use; for the spaces."""
        try:
            yield
        except Exception as error:
            self.lose(f"the device refused a copy: {error}")
            raise DeviceError(f"{op}: the device refused a copy: {error}", op=op) from error

    def happened(self, event: Any, timeout_s: float) -> bool:
        """Wait for an event with a limit; the GIL is released. For the spaces.

        torch can wait for an event without a limit or ask whether it has happened, hence the polls.
        """
        deadline_s = time.monotonic() + timeout_s
        pause_s = _POLL_FIRST_S
        with self.copying("copy"):
            while not event.query():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                time.sleep(min(pause_s, left_s))
                pause_s = min(pause_s * 2, _POLL_MAX_S)
        return True

    def close(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Wait until all room is free, then let go of the memory. Idempotent.

        Close the users first: the layer reader, and whoever saves. Returns False if room was still
        in use after `timeout_s`; its memory then stays mapped until the process ends.
        """
        with self._lock:
            self._closed = True
        deadline_s = time.monotonic() + timeout_s
        lanes = (self.loads, self._saves)
        while True:
            self.free_stuck()
            free = not any(len(lane.ring) for lane in lanes)
            if free or self.broken or time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_MAX_S)
        if not free:
            if lanes not in _kept:
                _kept.append(lanes)
            logger.warning("closing staging while some of its memory is in use; it stays mapped")
            return False
        while self._regions:
            region = self._regions.pop()
            if self._unregister is not None:
                self._unregister(region)
        return True


class _SaveRun:
    """One call of `Staging.save`: pieces that are copied out, then saved, then done, in order."""

    def __init__(
        self,
        staging: Staging,
        lane: _Lane,
        pages: NamespaceStore,
        keys: PageKeys,
        first: int,
        target: DevicePages,
        stopped: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        self._staging = staging
        self._lane = lane
        self._pages = pages
        self._keys = keys
        self._first = first
        self._target = target
        self._stopped = stopped
        self._copied: deque[_Leaving] = deque()
        self._saving: deque[_Leaving] = deque()
        self._stored = np.zeros(len(target.rows), dtype=np.bool_)
        self._deadline_s = deadline_s

    def run(self, pages_max: int) -> Mask:
        """See `Staging.save`."""
        count = len(self._stored)
        try:
            for low in range(0, count, pages_max):
                high = min(low + pages_max, count)
                start = self._room((high - low) * (self._target.pool.page_step + ROW_BYTES))
                if start is None:
                    break
                self._copied.append(self._copy_out(low, high, start))
                if len(self._copied) > 1 and not self._start_save():
                    break
            while self._copied and not self._stopped() and self._start_save():
                pass
            while self._saving and self._finish_save():
                pass
        finally:
            self._give_up()
        return self._stored

    def _left_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.0)

    def _over(self) -> bool:
        return self._stopped() or self._left_s() <= 0

    def _room(self, length_bytes: int) -> int | None:
        """Room for a piece, once earlier ones let go of theirs; None: time is up, or stopped."""
        while not self._over():
            if len(self._saving) < SAVES_AHEAD:
                start = self._staging._take(self._lane, length_bytes)
                if start is not None:
                    return start
            if not self._saving and not self._copied:  # saves that were given up keep the ring
                time.sleep(STOP_POLL_S / 10)
                self._staging.free_stuck()
            elif not (self._saving or self._start_save()) or not self._finish_save():
                return None
        return None

    def _copy_out(self, low: int, high: int, start: int) -> _Leaving:
        """Start to copy pages low .. high-1 into the ring."""
        lane, pool = self._lane, self._target.pool
        rows_start = start + (high - low) * pool.page_step
        rows = lane.rows_at(rows_start, self._target.rows[low:high])
        index = slice(rows_start, rows_start + (high - low) * ROW_BYTES)
        with self._staging.copying("save"), lane.order(self._target.after):
            lane.device[index].copy_(lane.host[index], non_blocking=True)
            pool.gather(Packed(lane.words, start, pool.page_step), rows)
            lane.host[start:rows_start].copy_(lane.device[start:rows_start], non_blocking=True)
            return _Leaving(low, high, start, lane.mark())

    def _start_save(self) -> bool:
        """Hand the oldest copied piece to the store; False if it was not copied in time."""
        piece = self._copied[0]
        if not self._staging.happened(piece.event, self._left_s()):
            return False
        low, high = self._first + piece.low, self._first + piece.high
        keys = self._keys.upto(high)
        piece.ticket = self._pages.save(keys, self._fragments(piece), low)
        self._saving.append(self._copied.popleft())
        return True

    def _fragments(self, piece: _Leaving) -> PageFragments:
        pool = self._target.pool
        page = np.arange(piece.high - piece.low, dtype=np.uint64)[:, None]
        address = page * np.uint64(pool.page_step) + np.array(pool.part_starts, dtype=np.uint64)
        address += np.uint64(self._lane.address + piece.start)
        lengths = np.array(pool.part_bytes, dtype=np.uint64)
        return PageFragments(address, lengths, self._lane.host)

    def _finish_save(self) -> bool:
        """Wait for the oldest save; False if time was up, or it was stopped, before its end."""
        piece = self._saving[0]
        assert piece.ticket is not None
        while True:
            try:
                stored = piece.ticket.wait(min(self._left_s(), STOP_POLL_S))
                break
            except BusyError:
                if self._over():
                    return False
        self._saving.popleft()
        self._stored[piece.low : piece.high] = stored
        size = self._target.pool.page_bytes
        self._staging.count("saved_bytes", int(np.count_nonzero(stored)) * size)
        self._staging.give(self._lane, piece.start)
        return True

    def _give_up(self) -> None:
        """End what did not end by itself. Its room comes back when nothing uses it any more."""
        for piece in self._saving:
            assert piece.ticket is not None
            piece.ticket.cancel()
            self._staging.keep_stuck(piece)
        for piece in self._copied:
            self._staging.count("saves_given_up")
            with contextlib.suppress(DeviceError):
                if self._staging.happened(piece.event, self._staging.timeout_s):
                    self._staging.give(self._lane, piece.start)
                    continue
            self._staging.lose("a copy from the device has not ended")
        self._saving.clear()
        self._copied.clear()
