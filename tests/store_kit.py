"""Small stores, chains of page keys and checked clients, for the tests of the core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti_core import PrefixStore
from tutti_core.testing import FaultyDevices
from tutti_core.trials.kit import (
    MIB,
    NAMESPACE,
    PAGE,
    SEGMENT,
    Client,
    chain,
    check_space,
    client,
    disk_bytes,
    finish,
    finish_part,
    load_in_parts,
    loose,
    memory_devices,
    poll,
    quiesce,
    run,
    settle,
    small_config,
    start_part,
)

__all__ = [
    "MIB",
    "NAMESPACE",
    "PAGE",
    "SEGMENT",
    "Client",
    "chain",
    "check_space",
    "client",
    "disk_bytes",
    "finish",
    "finish_part",
    "load_in_parts",
    "loose",
    "memory_devices",
    "open_faulty",
    "open_small",
    "poll",
    "quiesce",
    "run",
    "settle",
    "small_config",
    "snapshot",
    "start_part",
]


def open_small(path: Path, **settings: Any) -> PrefixStore:
    """Open a small store on files."""
    return PrefixStore.open(small_config(path, **settings))


@contextlib.contextmanager
def open_faulty(path: Path, **settings: Any) -> Iterator[tuple[PrefixStore, FaultyDevices]]:
    """Open a small store on devices in memory that fail on command."""
    config = small_config(path, **settings)
    devices = memory_devices(config)
    with PrefixStore.open(config, transport_object=devices) as store:
        yield store, devices


def snapshot(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below `path` with its size, time of change and bytes (a sparse file's ends)."""
    found = {}
    for folder, names, files in os.walk(path):
        for name in names:
            found[os.path.join(folder, name)] = (0, 0, b"")
        for name in files:
            file = Path(folder, name)
            status = file.stat()
            with file.open("rb") as stream:
                data = stream.read(2 * MIB)
            found[str(file)] = (status.st_size, status.st_mtime_ns, data)
    return found
