"""Writer leases: numbered lock files that say which process owns which segments.

A lease is an exclusive flock, so it ends with its process, however that ends. The next process
takes the lowest free number and with it the segments of whoever held that number before.

A process may be gone while its last writes are still on their way to the device. Its transport has
marked the pools with the number of its lease; until that mark is gone, nobody gets the lease.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from tutti_core.errors import BusyError, ConfigError, device_error
from tutti_core.io.marks import is_marked_path
from tutti_core.tiers.trust import open_file

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


def take_lease(folder: Path, pools: Sequence[Path] = ()) -> Lease:
    """Take the lowest free lease.

    Parameters
        pools: of the store; a lease whose last holder still writes to one is not free.
    Raises
        BusyError: LEASES_MAX processes hold one each.
        DeviceError: the folder cannot be written.
    """
    for number in range(LEASES_MAX):
        lease = try_lease(folder, number, pools)
        if lease is not None:
            return lease
    raise BusyError(f"{LEASES_MAX} processes write to {folder.parent} already")


def try_lease(folder: Path, number: int, pools: Sequence[Path] = ()) -> Lease | None:
    """Take lease `number` if nobody holds it, nor writes to `pools` under it."""
    path = folder / f"{number}.lock"
    try:
        # Whose the files are was looked at when the store was opened; see `pools.check_catalog`.
        descriptor = open_file(path, os.O_RDWR, create=True, trusting=True)
    except ConfigError as error:  # put there since; a lease is no place to follow it to
        raise device_error("open", errno.EINVAL, device=str(path), hint=str(error)) from None
    except OSError as error:
        raise device_error("open", error.errno or 5, device=str(path)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    lease = Lease(number, descriptor)
    if any(is_marked_path(pool, number) for pool in pools):
        lease.release()
        return None
    return lease


def held_leases(folder: Path) -> list[int]:
    """Numbers of the leases that some process holds now."""
    held = []
    names = {path.stem for path in folder.glob("*.lock")}
    for number in (n for n in range(LEASES_MAX) if str(n) in names):  # others are not ours
        lease = try_lease(folder, number)
        if lease is None:
            held.append(number)
        else:
            lease.release()
    return held
