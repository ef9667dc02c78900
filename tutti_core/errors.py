"""What can go wrong, one type per thing the caller should do next.

A miss, a short prefix and a full queue are results, not errors. Each error says what failed
(`op`), where (`device`, `offset_bytes`, `length_bytes`), how (`errno`), and what helps (`hint`);
`retryable`, `data_lost` and `scope` say how far it reaches.
"""

from __future__ import annotations

import difflib
import errno as codes
import os
from collections.abc import Iterable
from typing import Literal

Scope = Literal["range", "file", "device", "store"]


class TuttiError(Exception):
    """Base of every error that this project raises.

    Parameters
        message: what happened, naming the field, value or file.
        op: the operation that failed ("open", "read", "write", "flush", ...).
        device: path of the file or device concerned.
        errno: the positive operating-system error number, if there was one.
        retryable: the same call may succeed later, unchanged.
        data_lost: bytes that were stored are gone.
        scope: how far the damage reaches.
        hint: what the reader can do about it; appended to the text.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        device: str = "",
        offset_bytes: int | None = None,
        length_bytes: int | None = None,
        errno: int | None = None,
        retryable: bool = False,
        data_lost: bool = False,
        scope: Scope = "range",
        hint: str = "",
    ) -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.op = op
        self.device = device
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.errno = errno
        self.retryable = retryable
        self.data_lost = data_lost
        self.scope = scope
        self.hint = hint


class ConfigError(TuttiError, ValueError):
    """Fix the setting. Raised only while opening or attaching; nothing on disk was touched."""


class UnsupportedError(TuttiError):
    """This machine or build lacks the path; choose another (`auto` already did)."""


class BusyError(TuttiError):
    """Still busy or unfinished at the deadline; retry later."""


class StoreFullError(TuttiError):
    """Nothing can be evicted; drop the write."""


class CorruptionError(TuttiError):
    """A checksum, magic number or geometry is wrong; what it guarded is a miss, never data."""


class DeviceError(TuttiError, OSError):
    """The device or file system said no; look at `retryable` and `scope`."""


class StoreClosedError(TuttiError):
    """The store was closed, or belongs to the process that this one was forked from."""


class InternalError(TuttiError):
    """An invariant of ours broke; stop using the store and report it."""


DISK_FULL = {codes.ENOSPC, codes.EDQUOT, codes.EFBIG}
"""Error numbers of a file system, quota or limit that gives no more space."""

_RETRYABLE = {
    codes.EAGAIN, codes.EINTR, codes.EIO, codes.ENOMEM, codes.ENOSPC, codes.EDQUOT, codes.ETIMEDOUT
}  # fmt: skip


def device_error(op: str, errno: int, *, device: str = "", hint: str = "") -> DeviceError:
    """Make a DeviceError of a positive `errno`; the one place that words system errors."""
    retryable = errno in _RETRYABLE
    where = f" on {device}" if device else ""
    return DeviceError(
        f"{op} failed{where}: {os.strerror(errno)} (errno {errno})",
        op=op,
        device=device,
        errno=errno,
        retryable=retryable,
        scope="file",
        hint=hint,
    )


def nearest(name: str, valid: Iterable[str]) -> str:
    """Word a suggestion for a mistyped `name`: the nearest valid one, or all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid names: {', '.join(names)}"
