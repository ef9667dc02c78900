"""Clocks, spreads, page memory and cache control that the benchmarks share."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core.errors import ConfigError, TuttiError, device_error

MIB = 1 << 20
GIB = 1 << 30
_FILL_BYTES = 8 * MIB

Progress = Callable[[str], None]
"""Called with one line about what comes next."""

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class BenchError(TuttiError):
    """A contestant did not do what it was asked; its numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run: elapsed and CPU seconds (user + system, all threads)."""

    seconds: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Sample:
    """Run `work` and return what it took, with the CPU time of all threads of this process."""
    before, start_s = _cpu_s(), time.perf_counter()
    work()
    return Sample(time.perf_counter() - start_s, _cpu_s() - before)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def order_of_turn(names: Sequence[str], turn: int) -> list[str]:
    """`names` rotated, and turned round every other time.

    So going first is no one's privilege, and none always follows the same other one.
    """
    first = turn // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if turn % 2 else order


def target(name: str, value: float | None, bound: float, at_least: bool) -> dict[str, Any]:
    """One line of a report's targets; `met` is None where nothing was measured."""
    met = None if value is None else (value >= bound if at_least else value <= bound)
    sign = ">=" if at_least else "<="
    return {"name": name, "value": value, "target": f"{sign} {bound:g}", "met": met}


# ---- memory ----
class Arena:
    """Page-aligned private memory, the way a server has its host pool."""

    def __init__(self, length_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, length_bytes, flags=flags)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.bytes[:: mmap.PAGESIZE] = 0  # touch every page, so that no run pays for the first

    def fill_random(self, generator: np.random.Generator, start: int, stop: int) -> None:
        """Fill a multiple of 8 bytes with fresh random ones: incompressible, no two pages alike."""
        words = self.bytes[start:stop].view(np.uint64)
        step = _FILL_BYTES // 8
        for at in range(0, len(words), step):
            part = words[at : at + step]
            part[:] = generator.integers(0, 1 << 64, size=len(part), dtype=np.uint64)


def equal_pages(one: Bytes, other: Bytes, page_bytes: int) -> int:
    """How many pages of two runs are equal, byte for byte."""
    count = len(one) // page_bytes
    pages = range(0, count * page_bytes, page_bytes)
    return sum(np.array_equal(one[i : i + page_bytes], other[i : i + page_bytes]) for i in pages)


# ---- file system ----
def sync_filesystem(folder: Path) -> None:
    """Make everything on the folder's file system durable.

    Raises
        DeviceError: the file system refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor) != 0:
            raise device_error("syncfs", ctypes.get_errno(), device=str(folder))
    finally:
        os.close(descriptor)


def drop_cached(files: Sequence[Path]) -> float:
    """Drop clean files from the page cache; returns the share of their memory that stayed."""
    kept = total = 0
    for file in files:
        with open(file, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            resident = _resident(stream.fileno())
            kept += int(resident.sum())
            total += len(resident)
    return kept / total if total else 0.0


def _resident(descriptor: int) -> npt.NDArray[np.bool_]:
    """For each memory page of a file, whether the page cache holds it (mincore)."""
    length = os.fstat(descriptor).st_size
    if length == 0:
        return np.zeros(0, dtype=np.bool_)
    with mmap.mmap(descriptor, length, prot=mmap.PROT_READ) as view:
        whole = np.frombuffer(view, dtype=np.uint8)
        flags = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
        status = _libc.mincore(whole.ctypes.data, length, flags.ctypes.data)
        del whole
    if status != 0:
        raise device_error("mincore", ctypes.get_errno())
    return (flags & 1).astype(np.bool_)


def need_space(folder: Path, need_bytes: int) -> None:
    """Raise ConfigError unless the folder's file system has `need_bytes` to spare."""
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    if free < need_bytes:
        raise ConfigError(
            f"dir = {str(folder)!r} has {free / GIB:.1f} GiB free; this needs "
            f"{need_bytes / GIB:.1f} GiB",
            hint="name another directory, or measure fewer or smaller pages",
        )


def need_memory(need_bytes: int) -> None:
    """Raise ConfigError unless so much memory is available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            have = int(line.split()[1]) << 10
            if have < need_bytes:
                raise ConfigError(
                    f"{have / GIB:.1f} GiB of memory are available; this needs "
                    f"{need_bytes / GIB:.1f} GiB",
                    hint="measure fewer or smaller pages",
                )


@contextmanager
def removed_afterwards(folder: Path) -> Iterator[Path]:
    """A new directory below `folder` that is gone when the block ends, however it ends.

    Raises
        ConfigError: `folder` is not a writable directory.
    """
    import shutil
    import tempfile

    try:
        work = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=folder))
    except OSError as error:
        raise ConfigError(f"dir = {str(folder)!r} cannot be used: {error.strerror}") from None
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
