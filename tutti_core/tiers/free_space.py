"""Free space that a store leaves to others on a file system: below the mark it does not grow.

What a store has set aside already it keeps; a store at the mark evicts instead of growing, and
grows again when there is room. Space that other programs use counts, for it is the file system's
own figure that is compared.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

KEEP_FREE_PARTS = 100
KEEP_FREE_MAX_BYTES = 1 << 30
"""Unless it is said, a hundredth of the file system is left free, at most 1 GiB."""


def check_free(folder: Path, need_bytes: int, keep_free_bytes: int | None) -> None:
    """See that `need_bytes` more can be taken of the file system of a folder.

    Parameters
        keep_free_bytes: what has to be left; None: the usual part.
    Raises
        OSError: ENOSPC, the mark would be crossed; or what the file system says.
    """
    facts = os.statvfs(folder)
    if keep_free_bytes is None:
        part = facts.f_blocks * facts.f_frsize // KEEP_FREE_PARTS
        keep_free_bytes = min(part, KEEP_FREE_MAX_BYTES)
    free_bytes = facts.f_bavail * facts.f_frsize
    if free_bytes - need_bytes < keep_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{free_bytes} bytes are free in {folder}, and keep_free asks for {keep_free_bytes}",
        )
