"""Reads cached prefixes layer by layer: one thread, parts in layer order, several in flight.

A batch is what one forward pass needs: some pages of each of its pools. Pages are read part by part
(`Namespace.parts`), in the order in which the layers will be used, across all pools of the batch.

Invariants
    - Each batch that was submitted ends: either every layer was completed, or `fail` was called,
      once, and no layer is completed after it.
    - Layers are completed in rising order. A completed layer's bytes are all in place and right.
    - The engine's memory may be reused after `fail`, unless the error says `still_written`: then a
      device has not answered in time, and what it may still write to is owned here until it does.
    - Python work per layer is a few calls on whole arrays, whatever the number of fragments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti_core.errors import BusyError, StoreClosedError, TuttiError

logger = logging.getLogger("tutti")

PARTS_AHEAD_MAX = 8
"""Parts in flight at once. Two keep a device busy; more are started together, once half of them
have arrived, because a thread that has just slept pays for cold caches."""
PART_BYTES_MIN = 64 << 10
PART_BYTES_MAX = 768 << 10
PART_SHARE = 10
"""A part is a tenth of its page, within these bounds. The layers in a part wait for each other,
which costs a pipeline of reading and computing up to one part's time. Below the lower bound a
device is far from its full speed; up to the upper one fewer parts cost the reader less CPU time.
"""
TIMEOUT_S = 600.0
"""For one part to arrive. As long as loads by way of host memory wait, for the same reason: ending
earlier would let the engine reuse memory that the device may still write to."""
BATCHES_MAX = 4096
"""Batches that wait for their turn."""
RETRY_S = 0.0005
STRAY_POLL_S = 0.05

U64 = npt.NDArray[np.uint64]


def group_layers(
    layer_bytes: Sequence[int], aim_bytes: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Cut the layers of a page into parts; returns the layers of each part, all in rising order.

    Part 0 is the first layer alone, so that it is there as soon as can be. Later parts hold as many
    layers as come nearest to `aim_bytes`, at least one.

    Parameters
        layer_bytes: bytes of each layer in a page, in the order in which they are used.
        aim_bytes: default: what PART_SHARE and its bounds say.
    """
    if aim_bytes is None:
        share = sum(layer_bytes) // PART_SHARE
        aim_bytes = min(max(share, PART_BYTES_MIN), PART_BYTES_MAX)
    parts: list[list[int]] = []
    size = 0
    for layer, length in enumerate(layer_bytes):
        if len(parts) < 2 or 2 * size + length > 2 * aim_bytes:
            parts.append([])
            size = 0
        parts[-1].append(layer)
        size += length
    return tuple(map(tuple, parts))


class LayerLoadError(TuttiError):
    """A batch's pages are missing, damaged or late: compute them.

    still_written   the device has not answered: it may still write into the memory that was given.
    """

    still_written: bool = False


class LayerSink(Protocol):
    """Hears how a batch goes, on the reader's thread. Must not block."""

    def complete(self, layer: int) -> None:
        """All bytes of this layer are in place."""
        ...

    def fail(self, error: BaseException) -> None:
        """The layers that were not completed will not be."""
        ...


class PartsSource(Protocol):
    """Pages that are read part by part; `NamespaceStore.load_parts` makes them."""

    @property
    def found(self) -> npt.NDArray[np.bool_]:
        """Which pages can be read."""
        ...

    @property
    def part_count(self) -> int:
        """Parts of each page."""
        ...

    def start(
        self, part: int, low: int = 0, high: int | None = None, address: U64 | None = None
    ) -> Any:
        """Begin to read one part of pages low .. high-1; BusyError: try again later."""
        ...

    def finish(self, reading: Any, timeout_s: float) -> npt.NDArray[np.bool_]:
        """One bool a page; BusyError: the memory is still being written to."""
        ...

    def end(self) -> None:
        """Give back what protects the pages."""
        ...


class StagingSpace(Protocol):
    """Room of a Stager for one part of some pages.

    address   (pages, 1) uint64, where the device shall put each page's part.
    """

    @property
    def address(self) -> U64:
        """See above."""
        ...

    def place(self) -> None:
        """The bytes arrived and are right: start to move them on. Does not block."""
        ...

    def placed(self, timeout_s: float) -> bool:
        """Wait until they are where the engine reads them; the room is free again then."""
        ...

    def drop(self) -> None:
        """Give the room back unused; nothing reads into it. Idempotent, no-op once placed."""
        ...


class Stager(Protocol):
    """Carries parts to memory that the device cannot reach by itself, through bounded room."""

    def pages_max(self, target: object, part: int) -> int:
        """Most pages of a part that one StagingSpace holds, at least 1."""
        ...

    def take(self, target: object, part: int, low: int, high: int) -> StagingSpace | None:
        """Room for pages low .. high-1; None: full, ask again. Does not block."""
        ...


@dataclass(frozen=True, slots=True)
class LayerRead:
    """One pool of one request.

    load     the pages. All of them are needed: a batch with a page that is not found fails.
    layers   for each part, the layers of the engine that it brings, in rising order of parts. A
             layer may come from several reads; it is complete when all of them brought it.
    target   where the reader's stager moves the bytes; None: the addresses of `load` are final.
    """

    load: PartsSource
    layers: tuple[tuple[int, ...], ...]
    target: object = None


@dataclass(slots=True)
class _Piece:
    """One part of some pages: what one reading brings."""

    read: LayerRead
    part: int
    low: int
    high: int
    reading: Any = None
    space: StagingSpace | None = None

    @property
    def in_flight(self) -> bool:
        return self.reading is not None

    def start(self, stager: Stager | None) -> bool:
        """Begin to read; False when there is no room now."""
        address = None
        if self.read.target is not None:
            assert stager is not None  # checked before
            self.space = stager.take(self.read.target, self.part, self.low, self.high)
            if self.space is None:
                return False
            address = self.space.address
        try:
            self.reading = self.read.load.start(self.part, self.low, self.high, address)
        except BaseException as error:
            self.drop()
            if isinstance(error, BusyError):
                return False
            raise
        return True

    def finish(self, deadline_s: float) -> npt.NDArray[np.bool_]:
        """Wait for the bytes.

        Raises
            BusyError: not there at the deadline; still in flight.
        """
        while True:
            try:
                good = self.read.load.finish(self.reading, max(deadline_s - time.monotonic(), 0.0))
            except BusyError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(RETRY_S)
                continue
            except BaseException:
                self.reading = None
                raise
            self.reading = None
            return good

    def place(self, timeout_s: float) -> None:
        """Move the bytes on from the stager's room, if they went there."""
        if self.space is None:
            return
        self.space.place()
        if not self.space.placed(timeout_s):
            raise LayerLoadError(f"a copy to the device is not finished after {timeout_s} s")
        self.space = None

    def drop(self) -> None:
        """Give the stager's room back. Not while in flight."""
        if self.space is not None:
            self.space.drop()
            self.space = None


class _Batch:
    """One batch under way. Only the reader's thread touches it."""

    def __init__(self, reader: LayerReader, reads: Sequence[LayerRead], sink: LayerSink) -> None:
        self._reader = reader
        self._sink = sink
        self._ahead: deque[_Piece] = deque()
        self._waiting: deque[_Piece] = deque()
        self._missing = [0] * reader.layer_count
        """Pieces that each layer still needs."""
        self._next_layer = 0
        self._late = False
        for read in reads:
            self._check(read)
        for read, part in _layer_order(reads):
            for low, high in self._ranges(read, part):
                self._waiting.append(_Piece(read, part, low, high))
                for layer in read.layers[part]:
                    self._missing[layer] += 1
        self._count = len(self._waiting)
        self._started = 0
        self._may_start = self._opening()

    def run(self) -> None:
        """Read everything and complete every layer; raises where that is not possible."""
        self._complete()
        while self._ahead or self._waiting:
            if len(self._ahead) <= self._reader.parts_ahead_max // 2:
                self._start_ahead()
            self._finish_oldest()
            self._complete()

    def drain(self) -> list[_Piece]:
        """Wait for all that is in flight; returns what is not over in time."""
        wait_s = 0.0 if self._late else self._reader.timeout_s
        return _settle(self._ahead, time.monotonic() + wait_s)

    def _check(self, read: LayerRead) -> None:
        found, count = read.load.found, self._reader.layer_count
        if len(read.layers) != read.load.part_count:
            raise ValueError(f"layers of {len(read.layers)} parts; {read.load.part_count} are read")
        if any(not 0 <= layer < count for part in read.layers for layer in part):
            raise ValueError(f"a part brings a layer that is not among 0 .. {count - 1}")
        if read.target is not None and self._reader.stager is None:
            raise ValueError("a read has a target, but this reader has no stager")
        if not found.all():
            missing = len(found) - int(np.count_nonzero(found))
            raise LayerLoadError(f"{missing} of {len(found)} pages are not stored any more")

    def _ranges(self, read: LayerRead, part: int) -> Iterable[tuple[int, int]]:
        count = len(read.load.found)
        step = max(count, 1)
        if read.target is not None and self._reader.stager is not None:
            step = self._reader.stager.pages_max(read.target, part)
        return ((low, min(low + step, count)) for low in range(0, count, step))

    def _opening(self) -> int:
        """How many pieces may be started before the first layer that is read is complete.

        Transfers in flight share the device, so what comes after that layer would delay it. One
        piece more keeps the device busy until the others are started.
        """
        first = next((layer for layer, count in enumerate(self._missing) if count), None)
        bring = [first in piece.read.layers[piece.part] for piece in self._waiting]
        return len(bring) if first is None else len(bring) - bring[::-1].index(True) + 1

    def _start_ahead(self) -> None:
        deadline_s = time.monotonic() + self._reader.timeout_s
        while self._waiting and len(self._ahead) < self._reader.parts_ahead_max:
            if self._started >= self._may_start:
                return
            self._reader.check_open()
            if self._waiting[0].start(self._reader.stager):
                self._ahead.append(self._waiting.popleft())
                self._started += 1
            elif self._ahead:
                return  # what ends next makes room
            elif time.monotonic() >= deadline_s:
                raise LayerLoadError("no room to read in; others keep it all")
            else:
                time.sleep(RETRY_S)

    def _finish_oldest(self) -> None:
        piece, timeout_s = self._ahead[0], self._reader.timeout_s
        try:
            good = piece.finish(time.monotonic() + timeout_s)
        except BusyError:
            self._late = True  # the others are in flight for as long
            raise LayerLoadError(
                f"part {piece.part} has not arrived after {timeout_s} s", op="load", retryable=True
            ) from None
        if not good.all():
            wrong = len(good) - int(np.count_nonzero(good))
            raise LayerLoadError(
                f"part {piece.part} of {wrong} of {len(good)} pages is missing or damaged",
                op="load",
            )
        piece.place(timeout_s)
        self._ahead.popleft()
        for layer in piece.read.layers[piece.part]:
            self._missing[layer] -= 1

    def _complete(self) -> None:
        missing = self._missing
        while self._next_layer < len(missing) and missing[self._next_layer] == 0:
            self._sink.complete(self._next_layer)
            self._next_layer += 1
            if self._started:
                self._may_start = self._count


def _layer_order(reads: Sequence[LayerRead]) -> list[tuple[LayerRead, int]]:
    """The parts of all reads in the order in which their first layers are used.

    Within a read parts keep their order, as `PartsSource.finish` wants it.
    """
    order = []
    for index, read in enumerate(reads):
        first = -1
        for part, layers in enumerate(read.layers):
            first = max(first, min(layers, default=first))
            order.append((first, index, part))
    order.sort()
    return [(reads[index], part) for _, index, part in order]


def _settle(pieces: Iterable[_Piece], deadline_s: float) -> list[_Piece]:
    """Wait for pieces whose bytes nobody wants any more; returns those still in flight."""
    left = []
    for piece in pieces:
        try:
            if piece.in_flight:
                piece.finish(deadline_s)
            piece.drop()
        except BusyError:
            left.append(piece)
        except BaseException as error:  # its reading is over, and its outcome does not matter
            logger.debug("a part of a failed batch: %s", error)
            _quietly(piece.drop)
    return left


def _quietly(call: Callable[..., object], *arguments: object) -> None:
    """Call what cannot be helped any more where it fails."""
    try:
        call(*arguments)
    except BaseException:
        logger.exception("the end of a layer-wise load failed")


@dataclass(slots=True)
class _Stray:
    """What is left of a batch that has failed while the device was still writing."""

    pieces: list[_Piece]
    reads: Sequence[LayerRead]

    def sweep(self) -> bool:
        """Collect what has ended; True when all has."""
        self.pieces = _settle(self.pieces, 0.0)
        if not self.pieces:
            _end_loads(self.reads)
        return not self.pieces


def _end_loads(reads: Iterable[LayerRead]) -> None:
    for read in reads:
        _quietly(read.load.end)


class LayerReader:
    """Reads batches in the order of their submission, on one thread.

    Parameters
        layer_count: layers of the engine.
        stager: for reads with a target.
        parts_ahead_max: parts in flight at once.
        timeout_s: bound of each wait for one part. A batch that fails for another reason waits so
            long once more, for all that is in flight.
    Threads    any.
    """

    def __init__(
        self,
        layer_count: int,
        *,
        stager: Stager | None = None,
        parts_ahead_max: int = PARTS_AHEAD_MAX,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if layer_count < 1 or parts_ahead_max < 1:
            raise ValueError("layer_count and parts_ahead_max must be at least 1")
        self.layer_count = layer_count
        self.stager = stager
        self.parts_ahead_max = parts_ahead_max
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], Iterable[LayerRead]], LayerSink]] = deque()
        self._running = False
        self._strays: list[_Stray] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="tutti-layers", daemon=True)
        self._thread.start()

    def submit(self, make: Callable[[], Iterable[LayerRead]], sink: LayerSink) -> None:
        """Queue a batch; returns at once.

        Parameters
            make: called on the reader's thread when it is the batch's turn: waits for what has to
                come first, finds the pages. The loads that it returns, or yields before it fails,
                are ended here.
        After `close`, or with BATCHES_MAX batches waiting, `sink.fail` is called before this
        returns.
        """
        error: TuttiError | None = None
        with self._changed:
            if self._closed:
                error = StoreClosedError("the layer reader is closed", op="load")
            elif len(self._jobs) >= BATCHES_MAX:
                error = BusyError(f"{BATCHES_MAX} batches are waiting", op="load", retryable=True)
            else:
                self._jobs.append((make, sink))
                self._changed.notify_all()
        if error is not None:
            sink.fail(error)

    @property
    def busy(self) -> bool:
        """Whether a batch waits or is under way, or a device still writes for one that failed."""
        with self._changed:
            return bool(self._jobs or self._running or self._strays)

    @property
    def alive(self) -> bool:
        """Whether the thread runs: without it no batch ends any more."""
        return self._thread.is_alive()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until not busy; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Fail what waits, cut short what runs, and end the thread. Idempotent.

        Returns
            False if a device has not answered within `timeout_s`. The thread then goes on owning
            the memory until it does; the store's `close` waits for the device.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("layer-wise loads are not over after %s s", timeout_s)
        return not self._thread.is_alive()

    def check_open(self) -> None:
        """Raise StoreClosedError once `close` was called."""
        if self._closed:
            raise StoreClosedError("the layer reader was closed", op="load")

    # ---- the thread ----
    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._jobs or self._closed, STRAY_POLL_S if self._strays else None
                )
                job = self._jobs.popleft() if self._jobs else None
                self._running = job is not None
                if job is None and self._closed and not self._strays:
                    return
            if job is not None:
                self._run(*job)
            elif self._closed:
                time.sleep(STRAY_POLL_S)
            left = [stray for stray in self._strays if not stray.sweep()]
            with self._changed:
                self._strays = left
                self._running = False
                self._changed.notify_all()

    def _run(self, make: Callable[[], Iterable[LayerRead]], sink: LayerSink) -> None:
        """Run one batch to its end."""
        reads: list[LayerRead] = []
        batch: _Batch | None = None
        failure: BaseException | None = None
        try:
            self.check_open()
            for read in make():
                reads.append(read)  # one by one: a generator that raises has made some
            batch = _Batch(self, reads, sink)
            batch.run()
        except BaseException as error:
            failure = error
        pieces = batch.drain() if batch is not None and failure is not None else []
        if pieces:
            self._strays.append(_Stray(pieces, reads))
            late = LayerLoadError(f"{failure}; the device still writes", op="load")
            late.still_written, late.__cause__ = True, failure
            failure = late
        else:
            _end_loads(reads)
        if failure is not None:
            _quietly(sink.fail, failure)
