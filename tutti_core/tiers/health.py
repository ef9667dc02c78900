"""Which devices answer: a device that fails or stalls is left alone, and probed until it is well.

Reads and writes are told apart: a file system that was mounted read-only still serves loads. While
a device is unwell, its pages are misses at once and nothing is written to the store; an engine that
asks again and again then costs nothing but a look.

A device becomes unwell when ERRORS_MAX transfers in a row fail for a reason that lies with the
device, when one is late and for the store's `io_timeout_s` nothing has moved on that device (a long
queue is not a stall, and what is late on another device says nothing), when a flush is
late, or when room cannot be set aside for another reason than a lack of it.

A probe is one block: the superblock is read, or zeros are written where a pool holds zeros, flushed
and read back. After one that failed, the next opens the device anew first: a descriptor can stay
bad although the device is back. It is started and looked after by calls that come anyway; nothing
waits for it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_core.errors import DISK_FULL, BusyError, StoreClosedError
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.io.transport import BLOCK_BYTES, Batch, Op, Transport, start_batch
from tutti_core.tiers.device_calls import DeviceCall, DeviceCalls
from tutti_core.tiers.parts import aligned_blocks

logger = logging.getLogger("tutti")

ERRORS_MAX = 16
"""Transfers that fail one after another, none of the device's having ended well in between."""
PROBE_FIRST_S = 1.0
PROBE_LAST_S = 60.0
"""Time to the first probe; it doubles with each that fails, and with each relapse, up to this."""
RELAPSE_S = 120.0

NOT_THE_DEVICE = sorted(
    {-code for code in DISK_FULL}
    | {-errno.EAGAIN, -errno.EINTR, -errno.ENOMEM, -errno.EFAULT, -errno.EINVAL}
    | {-errno.ENODATA, -errno.ERANGE, -errno.ECANCELED, -errno.ESTALE}
)
"""Failures that say nothing against the device: a shortage, the caller's memory, a short pool."""

_WRITE_PROBE_AT = DATA_OFFSET_BYTES - BLOCK_BYTES
"""The last block before segment 0: zeros, and of no use to anybody."""


@dataclass(slots=True)
class _State:
    """One direction of one device. `since_s` is None while it is well."""

    streak: int = 0
    since_s: float | None = None
    pause_s: float = PROBE_FIRST_S
    probe_at_s: float = 0.0
    recovered_s: float = -RELAPSE_S
    probe: Probe | None = None
    probe_failed: bool = False
    doubtful: bool = False


Probe = Generator[None, None, int]
"""Stops wherever it would have to wait; returns 0 or a negative errno. Its memory is kept by it."""


class Health:
    """Health of the devices of one store. Threads: any.

    unwell_reads, unwell_writes   the devices that must not be used so; empty nearly always.

    Parameters
        count: adds to a counter of the store.
        stall_s: how long nothing moves on a device before what is late counts as stalled.
        calls: for probes that flush, and that open the device anew; None: they do neither.
        flush: whether writes have to be made durable.
        recovered: told of a direction of a device that answers a probe, and whether it was unwell;
            called without the lock.
    """

    def __init__(
        self,
        transport: Transport,
        count: Callable[[str, int], None],
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
        calls: DeviceCalls | None = None,
        flush: bool = True,
    ) -> None:
        self.recovered: Callable[[Op, int, bool], None] = lambda op, device, was_unwell: None
        self.unwell_reads: frozenset[int] = frozenset()
        self.unwell_writes: frozenset[int] = frozenset()
        self._transport = transport
        self._count = count
        self._clock = clock
        self._stall_s = stall_s
        self._calls = calls
        self._flush = flush
        self._moved: dict[int, tuple[int, float]] = {}
        """Of devices on which something was late: items that had ended, and since when."""
        self._lock = threading.Lock()
        self._states = {
            (op, device): _State() for op in Op for device in range(len(transport.devices))
        }
        self._doubts = False
        self._streaks = False  # whether any streak is not 0; looked at without the lock

    # ---- what was seen ----
    def note(self, op: Op, device: npt.NDArray[np.uint32], status: npt.NDArray[np.int32]) -> None:
        """A batch has ended: its items' devices and results."""
        failed = status != 0
        if not self._streaks and not failed.any():
            return
        blamed = failed & ~np.isin(status, NOT_THE_DEVICE)
        with self._lock:
            for number in set(device.tolist()):
                mine = device == number
                state = self._states[op, number]
                if (mine & ~failed).any():
                    state.streak = 0
                elif (errors := int(np.count_nonzero(mine & blamed))) > 0:
                    state.streak += errors
                    if state.streak >= ERRORS_MAX:
                        code = int(-status[mine & blamed][-1])
                        self._falls_ill(op, number, f"errno {code}, {state.streak} times in a row")
            self._streaks = any(state.streak for state in self._states.values())

    def note_late(self, devices: Iterable[int]) -> None:
        """Transfers of these devices are not over although they should be."""
        stats, now_s = self._transport.stats(), self._clock()
        everywhere = stats.read_items + stats.write_items + stats.failed_items
        with self._lock:
            for number in set(devices):
                if stats.device_pending and stats.device_pending[number] == 0:
                    self._moved.pop(number, None)  # the batch waits for another device
                    continue
                ended = stats.device_items[number] if stats.device_items else everywhere
                known, since_s = self._moved.get(number, (-1, now_s))
                if known != ended:
                    self._moved[number] = ended, now_s
                elif now_s - since_s >= self._stall_s:
                    for op in Op:
                        reason = f"nothing has moved for {now_s - since_s:.0f} s"
                        self._falls_ill(op, number, reason)

    def note_trouble(self, device: int, reason: str) -> None:
        """A flush does not end, or room cannot be set aside: nothing is written until it can."""
        with self._lock:
            self._falls_ill(Op.WRITE, device, reason)

    def doubt(self, op: Op, device: int) -> None:
        """Something failed that may be the device's fault: see by a probe, soon, whether it is."""
        with self._lock:
            state = self._states[op, device]
            if state.since_s is None and not state.doubtful:
                state.doubtful, state.probe_at_s = True, self._clock() + PROBE_FIRST_S
                self._doubts = True

    @property
    def all_well(self) -> bool:
        """Whether every device can be used, and no probe is waited for."""
        return not self.unwell_reads and not self.unwell_writes and not self._doubts

    def unwell(self) -> tuple[str, ...]:
        """For people: which devices are left alone, and for what."""
        paths = [device.path for device in self._transport.devices]
        reads = [f"{paths[i]}: reads" for i in sorted(self.unwell_reads)]
        return (*reads, *(f"{paths[i]}: writes" for i in sorted(self.unwell_writes)))

    # ---- getting well ----
    def tick(self) -> None:
        """Look after the probes, if it is time. Never blocks; does nothing while all are well."""
        if self.all_well or not self._lock.acquire(blocking=False):
            return
        better: list[tuple[Op, int, bool]] = []
        try:
            now_s = self._clock()
            for (op, number), state in self._states.items():
                if state.since_s is None and not state.doubtful:
                    continue
                was_unwell = state.since_s is not None
                if state.probe is None and now_s >= state.probe_at_s:
                    state.probe = self._probe(op, number, state.probe_failed)
                    self._count("device_probes", 1)
                if state.probe is not None and self._go_on(op, number, state, now_s):
                    better.append((op, number, was_unwell))
        except StoreClosedError:
            return
        finally:
            self._lock.release()
        for op, number, was_unwell in better:
            self.recovered(op, number, was_unwell)

    def _go_on(self, op: Op, number: int, state: _State, now_s: float) -> bool:
        """Let a probe run to where it has to wait; True if it has ended well."""
        assert state.probe is not None
        try:
            next(state.probe)
            return False
        except StopIteration as end:
            status = int(end.value)
        state.probe, state.probe_failed = None, status != 0
        was_unwell = state.since_s is not None
        state.doubtful = False
        self._doubts = any(s.doubtful for s in self._states.values())
        if not was_unwell and status == 0:
            return True
        if not was_unwell:
            self._falls_ill(op, number, f"errno {-status} in a probe")
        elif status == 0:
            state.since_s, state.streak, state.recovered_s = None, 0, now_s
            self._moved.pop(number, None)
            self._publish()
            self._count("devices_recovered", 1)
            logger.warning("%s answers again: %s", self._path(number), _verb(op))
        else:
            state.pause_s = min(2 * state.pause_s, PROBE_LAST_S)
            state.probe_at_s = now_s + state.pause_s
        return status == 0

    def _probe(self, op: Op, number: int, anew: bool) -> Probe:
        """Try one direction of a device; `anew`: open it anew before."""
        if anew and self._calls is not None and self._calls.can_reopen:
            if status := (yield from _ended(self._calls.reopen(number))):
                return status
        memory = aligned_blocks(1)[0]
        offset_bytes = _WRITE_PROBE_AT if op is Op.WRITE else 0
        status = yield from self._transfer(op, number, offset_bytes, memory)
        if status or op is Op.READ:
            return status
        if self._flush and self._calls is not None:
            if status := (yield from _ended(self._calls.flush(number))):
                return status
        memory[:] = 0xFF
        status = yield from self._transfer(Op.READ, number, offset_bytes, memory)
        return -errno.EIO if status == 0 and memory.any() else status

    def _transfer(
        self, op: Op, number: int, offset_bytes: int, memory: npt.NDArray[np.uint8]
    ) -> Probe:
        """Move one block."""
        batch = Batch(
            op=op,
            device=np.array([number], dtype=np.uint32),
            offset_bytes=np.array([offset_bytes], dtype=np.uint64),
            fragment_start=np.array([0, 1], dtype=np.uint32),
            address=np.array([memory.ctypes.data], dtype=np.uint64),
            length_bytes=np.array([BLOCK_BYTES], dtype=np.uint64),
            checksum=False,
        )
        while True:
            try:
                ticket = start_batch(self._transport, batch, self._count)
                break
            except BusyError:
                yield  # the stalled transfers take all the room
        if ticket is None:
            return -errno.EIO
        while (result := self._transport.wait(ticket, 0.0)) is None:
            yield
        return int(result.status[0])

    def _falls_ill(self, op: Op, number: int, reason: str) -> None:
        state, now_s = self._states[op, number], self._clock()
        if state.since_s is not None:
            return
        relapse = now_s - state.recovered_s < RELAPSE_S
        state.pause_s = min(2 * state.pause_s, PROBE_LAST_S) if relapse else PROBE_FIRST_S
        state.since_s, state.probe_at_s = now_s, now_s + state.pause_s
        self._publish()
        self._count("devices_unwell", 1)
        logger.error("%s is left alone, %s: %s", self._path(number), _verb(op), reason)

    def _publish(self) -> None:
        ill = [key for key, state in self._states.items() if state.since_s is not None]
        self.unwell_reads = frozenset(number for op, number in ill if op is Op.READ)
        self.unwell_writes = frozenset(number for op, number in ill if op is Op.WRITE)

    def _path(self, number: int) -> str:
        return self._transport.devices[number].path


def _ended(call: DeviceCall) -> Probe:
    """Wait for a call, as a probe does."""
    while not call.done():
        yield
    return call.status


def _verb(op: Op) -> str:
    return "reads" if op is Op.READ else "writes"
