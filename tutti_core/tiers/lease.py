"""Writer leases: numbered lock files that say which process owns which segments.

A lease is an exclusive flock, so it ends with its process, however that ends. The next process
takes the lowest free number and with it the segments of whoever held that number before.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tutti_core.errors import BusyError, device_error

LEASES_MAX = 1024


class Lease:
    """The lease `number` of a store directory, held until `release`."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self._descriptor = descriptor

    def release(self) -> None:
        """Let another process have it. Idempotent."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child has a copy
            os.close(self._descriptor)
            self._descriptor = -1


def take_lease(folder: Path) -> Lease:
    """Take the lowest free lease.

    Raises
        BusyError: LEASES_MAX processes hold one each.
        DeviceError: the folder cannot be written.
    """
    for number in range(LEASES_MAX):
        lease = try_lease(folder, number)
        if lease is not None:
            return lease
    raise BusyError(f"{LEASES_MAX} processes write to {folder.parent} already")


def try_lease(folder: Path, number: int) -> Lease | None:
    """Take lease `number` if nobody holds it."""
    path = folder / f"{number}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise device_error("open", error.errno or 5, device=str(path)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return Lease(number, descriptor)


def held_leases(folder: Path) -> list[int]:
    """Numbers of the leases that some process holds now."""
    held = []
    for path in sorted(folder.glob("*.lock")):
        lease = try_lease(folder, int(path.stem))
        if lease is None:
            held.append(int(path.stem))
        else:
            lease.release()
    return held
