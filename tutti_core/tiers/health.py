"""Which devices answer: a device that fails or stalls is left alone, and probed until it is well.

Reads and writes are told apart: a file system that was mounted read-only still serves loads. While
a device is unwell, its pages are misses at once and nothing is written to the store; an engine that
asks again and again then costs nothing but a look.

A device becomes unwell when ERRORS_MAX transfers in a row fail for a reason that lies with the
device, or when one is late and for the store's `io_timeout_s` nothing has moved on any device: a
long queue is not a stall. A probe is one block: the superblock is
read, or zeros are written where a pool holds zeros. It is started and looked after by calls that
come anyway; nothing waits for it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_core.errors import DISK_FULL, BusyError, StoreClosedError
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.io.transport import BLOCK_BYTES, Batch, Op, Transport
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
    probe: _Probe | None = None


@dataclass(slots=True)
class _Probe:
    """A block on its way; its memory is kept until it has ended."""

    ticket: int
    memory: npt.NDArray[np.uint8]


class Health:
    """Health of the devices of one store. Threads: any.

    unwell_reads, unwell_writes   the devices that must not be used so; empty nearly always.

    Parameters
        count: adds to a counter of the store.
        stall_s: how long nothing moves before what is late counts as stalled.
    """

    def __init__(
        self,
        transport: Transport,
        count: Callable[[str, int], None],
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unwell_reads: frozenset[int] = frozenset()
        self.unwell_writes: frozenset[int] = frozenset()
        self._transport = transport
        self._count = count
        self._clock = clock
        self._stall_s = stall_s
        self._moved = -1  # items, when something was late last
        self._still_since_s = 0.0
        self._lock = threading.Lock()
        self._states = {
            (op, device): _State() for op in Op for device in range(len(transport.devices))
        }
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
        moved = stats.read_items + stats.write_items + stats.failed_items
        with self._lock:
            if moved != self._moved:
                self._moved, self._still_since_s = moved, now_s
            still_s = now_s - self._still_since_s
            if still_s >= self._stall_s:
                for number in set(devices):
                    for op in Op:
                        self._falls_ill(op, number, f"nothing has moved for {still_s:.0f} s")

    @property
    def all_well(self) -> bool:
        """Whether every device can be used."""
        return not self.unwell_reads and not self.unwell_writes

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
        try:
            now_s = self._clock()
            for (op, number), state in self._states.items():
                if state.since_s is None:
                    continue
                if state.probe is not None:
                    self._collect(op, number, state, now_s)
                elif now_s >= state.probe_at_s:
                    self._start(op, number, state)
        except StoreClosedError:
            return
        finally:
            self._lock.release()

    def _start(self, op: Op, number: int, state: _State) -> None:
        memory = aligned_blocks(1)[0]
        batch = Batch(
            op=op,
            device=np.array([number], dtype=np.uint32),
            offset_bytes=np.array([_WRITE_PROBE_AT if op is Op.WRITE else 0], dtype=np.uint64),
            fragment_start=np.array([0, 1], dtype=np.uint32),
            address=np.array([memory.ctypes.data], dtype=np.uint64),
            length_bytes=np.array([BLOCK_BYTES], dtype=np.uint64),
            checksum=False,
        )
        try:
            state.probe = _Probe(self._transport.submit(batch), memory)
        except BusyError:
            return  # the stalled transfers take all the room
        self._count("device_probes", 1)

    def _collect(self, op: Op, number: int, state: _State, now_s: float) -> None:
        assert state.probe is not None
        result = self._transport.wait(state.probe.ticket, 0.0)
        if result is None:
            return
        state.probe = None
        if result.status[0] == 0:
            state.since_s, state.streak, state.recovered_s = None, 0, now_s
            self._publish()
            self._count("devices_recovered", 1)
            logger.warning("%s answers again: %s", self._path(number), _verb(op))
        else:
            state.pause_s = min(2 * state.pause_s, PROBE_LAST_S)
            state.probe_at_s = now_s + state.pause_s

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


def _verb(op: Op) -> str:
    return "reads" if op is Op.READ else "writes"
