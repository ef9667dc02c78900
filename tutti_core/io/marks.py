"""Advisory locks on bytes beyond the end of a pool, which tell who uses it.

They are locks of the open file (F_OFD_SETLK): they end with its last user, and each transfer that
is in flight is one. So the mark of a process that was killed stays until the last of its writes has
landed or failed, also where the process itself is gone before that, as with io_uring. Where a file
system has no such locks, nothing is ever marked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path
from typing import Protocol, runtime_checkable

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid

MARKS_BYTES = 1 << 62
"""Offset of the first mark; no pool is so large."""


@runtime_checkable
class Marks(Protocol):
    """A transport that can mark its devices."""

    def mark(self, number: int) -> None:
        """Mark every device with a number until `close` and the end of all transfers; once."""
        ...


def set_mark(descriptor: int, number: int) -> bool:
    """Mark an open file, for reading and writing; False where its file system has no marks.

    Several open files may have the same mark.
    """
    return _set(descriptor, fcntl.F_RDLCK, number)


def take_mark_off(descriptor: int, number: int) -> None:
    """Take a mark off, for all copies of the descriptor."""
    _set(descriptor, fcntl.F_UNLCK, number)


def _set(descriptor: int, kind: int, number: int) -> bool:
    lock = _FLOCK.pack(kind, os.SEEK_SET, MARKS_BYTES + number, 1, 0)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        return True
    return False


def is_marked(descriptor: int, first: int, count: int = 1) -> bool:
    """Whether another open file has one of `count` marks from `first` on."""
    if count <= 0:
        return False
    lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, MARKS_BYTES + first, count, 0)
    with contextlib.suppress(OSError):
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    return False


def is_marked_path(path: Path, number: int) -> bool:
    """Whether somebody has marked a pool; a pool that cannot be opened is not."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return is_marked(descriptor, number)
        finally:
            os.close(descriptor)
    return False


class Marked:
    """Descriptors that carry a mark; `release` takes it off and closes them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._descriptors: list[int] = []

    def add(self, descriptor: int) -> None:
        """Mark an open file. The descriptor belongs to this object from now on."""
        set_mark(descriptor, self.number)
        self._descriptors.append(descriptor)

    def release(self) -> None:
        """Idempotent."""
        while self._descriptors:
            descriptor = self._descriptors.pop()
            with contextlib.suppress(OSError):  # of a device that is gone; both go with it
                take_mark_off(descriptor, self.number)  # a forked child has a copy
            with contextlib.suppress(OSError):
                os.close(descriptor)
