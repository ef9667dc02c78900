"""One store's claim to its pools: a pool that two directories name is refused to the second.

All processes of a store mark its pools with a number made of its catalog's file, and look for other
such marks. Both mark before they look, so of two that come at once at least one is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import xxhash

from tutti_core.errors import ConfigError, device_error
from tutti_core.io.marks import Marked, is_marked

CLAIMS_FIRST = 1 << 32
"""Marks of leases are below."""

CLAIMS = 1 << 31


def claim_pools(catalog: Path, pools: Sequence[Path]) -> Marked:
    """Claim the pools for the store with this catalog, until the result is released.

    Parameters
        catalog: the file of the catalog; its device and inode stand for the store.
        pools: files and block devices, which exist.
    Raises
        ConfigError: a store in another directory uses one of them now.
        DeviceError: one cannot be opened.
    """
    try:
        status = os.stat(catalog)
    except OSError as error:
        raise device_error("open", error.errno or 5, device=str(catalog)) from None
    name = f"{status.st_dev} {status.st_ino}".encode()
    number = xxhash.xxh3_64_intdigest(name) % CLAIMS
    claim = Marked(CLAIMS_FIRST + number)
    with ExitStack() as undo:
        undo.callback(claim.release)
        for pool in pools:
            try:
                descriptor = os.open(pool, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise device_error("open", error.errno or 5, device=str(pool)) from None
            claim.add(descriptor)
            if is_marked(descriptor, CLAIMS_FIRST, number) or is_marked(
                descriptor, CLAIMS_FIRST + number + 1, CLAIMS - number - 1
            ):
                raise ConfigError(
                    f"{pool} is in use by a store in another directory",
                    device=str(pool),
                    hint="give each store pools of its own, or name one `path` in all processes",
                )
        undo.pop_all()
    return claim
