"""NVMe statuses in words, and as errnos.

Values are those of the NVM Express Base Specification 2.0, figures 94 to 97: status code in bits
7:0, its type in bits 10:8, and "do not retry" in bit 14; those above 16 bits are Tutti's own.
"""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt

CODE_MASK = 0x7FF
DO_NOT_RETRY = 0x4000

TIMEOUT = 0x10000
DEVICE_GONE = 0x10001
NOT_ISSUED = 0x10002
BAD_MEMORY = 0x10003

_KNOWN: dict[int, tuple[str, int]] = {
    0x000: ("success", 0),
    0x001: ("invalid opcode", errno.EOPNOTSUPP),
    0x002: ("invalid field", errno.EINVAL),
    0x003: ("command id conflict", errno.EIO),
    0x004: ("data transfer error", errno.EIO),
    0x005: ("aborted, power loss", errno.EIO),
    0x006: ("internal error", errno.EIO),
    0x007: ("aborted by request", errno.ECANCELED),
    0x008: ("aborted, queue deleted", errno.ECANCELED),
    0x00B: ("invalid namespace", errno.ENODEV),
    0x00F: ("invalid SGL length", errno.EINVAL),
    0x011: ("invalid SGL type", errno.EINVAL),
    0x013: ("invalid PRP offset", errno.EINVAL),
    0x020: ("namespace is write protected", errno.EROFS),
    0x080: ("LBA out of range", errno.ERANGE),
    0x081: ("capacity exceeded", errno.ENOSPC),
    0x082: ("namespace not ready", errno.EIO),
    0x180: ("conflicting attributes", errno.EINVAL),
    0x182: ("write to a read-only range", errno.EROFS),
    0x280: ("write fault", errno.EIO),
    0x281: ("unrecovered read error", errno.EIO),
    0x282: ("guard check error", errno.EIO),
    0x283: ("application tag check error", errno.EIO),
    0x284: ("reference tag check error", errno.EIO),
    0x285: ("compare failure", errno.EIO),
    0x286: ("access denied", errno.EACCES),
    0x287: ("deallocated or unwritten block", errno.EIO),
    TIMEOUT: ("no completion in time", errno.ETIMEDOUT),
    DEVICE_GONE: ("the device is gone or has failed", errno.ENODEV),
    NOT_ISSUED: ("not issued", errno.EIO),
    BAD_MEMORY: ("memory that is not registered, or misaligned", errno.EFAULT),
}


def _key(status: int) -> int:
    return status if status >= TIMEOUT else status & CODE_MASK


def errno_of(status: int) -> int:
    """The errno that says the same of an NVMe status; 0 for success, EIO where none does."""
    return _KNOWN.get(_key(status), ("", errno.EIO))[1]


def text_of(status: int) -> str:
    """An NVMe status for people, with its number."""
    words = _KNOWN.get(_key(status), ("unknown status", 0))[0]
    return f"{words} ({status:#x})"


def errnos_of(statuses: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """Negative errnos, or 0, of an array of NVMe statuses. One look-up for each different one."""
    kinds, inverse = np.unique(statuses, return_inverse=True)
    table = np.array([-errno_of(int(kind)) for kind in kinds], np.int32)
    return table[inverse]
