"""Puts registered memory into huge pages where the kernel will.

A host pool in 4 KiB pages reaches a drive as one segment per 4 KiB; in 2 MiB pages a whole KV page
is one segment, and its DMA mapping, its checksum and every copy cost less. Engines allocate their
pools without asking for huge pages, so this asks once, before the memory is pinned.
"""

from __future__ import annotations

import ctypes
import errno
import time

HUGE_PAGE_BYTES = 2 << 20
STEP_BYTES = 64 << 20
TIME_LIMIT_S = 20.0
"""A pool that takes longer keeps 4 KiB pages in its rest."""

_MADV_COLLAPSE = 25  # Linux 6.1, asm-generic/mman-common.h; not in Python's mmap module
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def collapse(address: int, length_bytes: int, time_limit_s: float = TIME_LIMIT_S) -> int:
    """Ask for huge pages under the whole 2 MiB parts of a region; returns the bytes that have them.

    Harmless where it is refused: memory that is pinned already, an older kernel, no free huge
    pages. The contents do not change and other threads may use the memory meanwhile. Untouched
    memory is committed by this, as it is by pinning.
    Cost       copies the memory once; stops after `time_limit_s`. The GIL is released.
    """
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + length_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    deadline_s = time.monotonic() + time_limit_s
    done = 0
    while start < end and time.monotonic() < deadline_s:
        step = min(STEP_BYTES, end - start)
        if _libc.madvise(start, step, _MADV_COLLAPSE) == 0:
            done += step
        elif ctypes.get_errno() == errno.EINVAL:
            break  # not known to this kernel, or not for this kind of memory
        start += step
    return done
