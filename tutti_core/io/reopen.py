"""Opening the file of a device anew, for a transport whose descriptor has gone bad.

A descriptor can stay bad although the device is well again: it was unplugged and came back, the
file system was unmounted and mounted, or shut down. What is behind the path by then may be another
file, so nothing is used before its first block was looked at.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from tutti_core.io.transport import BLOCK_BYTES


@runtime_checkable
class Reopens(Protocol):
    """A transport that can open a device anew."""

    def reopen_device(self, device: int, accept: Callable[[bytes], bool]) -> int:
        """Use what is behind the device's path now. Returns 0 or a negative errno. Blocks.

        What is in flight ends on the old file. Where the status is not 0 nothing has changed.

        Parameters
            accept: told the first block; False for another file than the one that is in use.
        """
        ...


def open_again(path: str, *, direct: bool, accept: Callable[[bytes], bool]) -> int:
    """Return a new descriptor of a device, or a negative errno. Blocks; raises nothing.

    -ESTALE: something else is there now.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        return -(error.errno or errno.EIO)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:  # aligned, as direct I/O wants it
            got = os.preadv(descriptor, [block], 0)
            status = 0 if got == BLOCK_BYTES and accept(bytes(block)) else -errno.ESTALE
    except OSError as error:
        status = -(error.errno or errno.EIO)
    if status:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return status or descriptor
