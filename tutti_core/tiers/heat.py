"""When pages were last read by processes that do not own them: a table that all of them share.

Advisory and small. An entry is a time of the monotonic clock, which all processes of a machine have
in common, and stands for all slots that hash to it; so a page may look used that was not, and then
stays a while longer. Times of an earlier start of the machine look old, or lie ahead and are not
believed. The table is a file mapped by all; where it cannot be had, nothing is noted.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti_core.errors import TuttiError
from tutti_core.tiers.trust import open_file

logger = logging.getLogger("tutti")

U64 = npt.NDArray[np.uint64]

UNIT_NS = 1 << 26
"""Resolution of the times, 67 ms; 32 bits last for nine years."""

TABLE_BYTES_MIN = 1 << 14
TABLE_BYTES_MAX = 1 << 22
CAPACITY_PER_TABLE = 1 << 16
"""Bytes of the pools for one byte of the table: four entries for 256 KiB."""

_HASH = np.uint64(0x9E3779B97F4A7C15)


class Heat:
    """The table of one store directory.

    Parameters
        file: made where there is none.
        pool_bytes: of all pools; says how large a new table is.
    Threads    any; a write that another one overtakes is lost, which costs nothing.
    """

    def __init__(self, file: Path, pool_bytes: int) -> None:
        self._map: mmap.mmap | None = None
        self._table = np.zeros(0, dtype=np.uint32)
        try:
            self._open(file, pool_bytes)
        except (OSError, TuttiError) as error:
            logger.warning("what other processes read is not noted: %s", error)

    def _open(self, file: Path, pool_bytes: int) -> None:
        descriptor = open_file(file, os.O_RDWR, create=True, trusting=True)
        try:
            size = os.fstat(descriptor).st_size
            if not TABLE_BYTES_MIN <= size <= TABLE_BYTES_MAX or size & (size - 1):
                wanted = min(max(pool_bytes // CAPACITY_PER_TABLE, 1), TABLE_BYTES_MAX)
                size = max(1 << (wanted.bit_length() - 1), TABLE_BYTES_MIN)
                if size < os.fstat(descriptor).st_size:
                    return  # a process that has it mapped must not lose it
            os.posix_fallocate(descriptor, 0, size)  # a full disk shows here, not at an access
            self._map = mmap.mmap(descriptor, size)
            self._table = np.frombuffer(self._map, dtype=np.uint32)
        finally:
            os.close(descriptor)

    def note(self, slots: U64, now_ns: int) -> None:
        """Pages of other processes in these slots were read."""
        table = self._table
        if len(table):
            table[self._places(table, slots)] = now_ns // UNIT_NS & 0xFFFFFFFF

    def last_read(self, slots: U64, now_ns: int) -> int:
        """When one of these slots was last read by another process, in nanoseconds; 0: never."""
        table = self._table
        if not len(table) or not len(slots):
            return 0
        times = table[self._places(table, slots)].astype(np.int64)
        times[times > now_ns // UNIT_NS] = 0
        return int(times.max()) * UNIT_NS

    @staticmethod
    def _places(table: npt.NDArray[np.uint32], slots: U64) -> U64:
        bits = len(table).bit_length() - 1
        return np.asarray(slots * _HASH >> np.uint64(64 - bits), dtype=np.uint64)

    def close(self) -> None:
        """Let go of the table. Idempotent."""
        self._table = np.zeros(0, dtype=np.uint32)
        shared, self._map = self._map, None
        if shared is not None:
            with contextlib.suppress(BufferError):  # somebody is at it; it goes with the process
                shared.close()
