"""Drops what a verification finds damaged, and nothing else; reports what that costs.

A cache may forget: a page whose record, slot entry or bytes cannot be trusted is removed from the
catalog, and its slot is free again. Superblocks are not mended; `verify_store` refuses those first.
While a repair runs no process can open the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from tutti_core.errors import device_error
from tutti_core.format import RECORD, RECORD_BYTES
from tutti_core.index.catalog import RECORD_KEY_BYTES
from tutti_core.io.select import TransportName
from tutti_core.tiers.pools import Layout, catalog_folder, check_directory, store_lock
from tutti_core.verify import Bad, Progress, RawCatalog, VerifyReport, read_layout, verify_store

CHUNK = 4096
"""Records removed in one transaction."""


@dataclass(slots=True)
class Repair:
    """What was done.

    report        what the verification found.
    pages_lost    records that were dropped.
    bytes_lost    their stored bytes, of those that say how many.
    slots_freed   slot entries that belonged to no sound record.
    segments, namespaces   entries that could not be read.
    pools_grown   pool files that were too short and have their size again.
    """

    report: VerifyReport
    pages_lost: int = 0
    bytes_lost: int = 0
    slots_freed: int = 0
    segments: int = 0
    namespaces: int = 0
    pools_grown: int = 0


def repair_store(
    path: Path,
    pools: tuple[Path, ...] = (),
    *,
    transport: TransportName = "auto",
    examples: int = 10,
    progress: Progress = lambda what, done, total: None,
) -> Repair:
    """Verify a store and drop what is bad. What is good is not touched.

    Raises
        BusyError: a process has the store open.
        ConfigError, UnsupportedError, CorruptionError: there is no store, or it cannot be opened.
        DeviceError: the file system refused; what was done so far is done.
    Cost       that of `verify_store`; a crash in between leaves a store that can be repaired again.
    """
    RawCatalog(path).close()  # says what is wrong before anything is touched
    check_directory(path)
    with store_lock(path):
        bad = Bad()
        report = verify_store(
            path, pools, transport=transport, examples=examples, progress=progress, bad=bad
        )
        repair = Repair(report)
        if report.clean:
            return repair
        catalog = RawCatalog(path)
        try:
            layout = read_layout(path, pools, catalog)
        finally:
            catalog.close()
        try:
            repair.pools_grown = _grow_pools(layout)
            _drop(catalog_folder(path), bad, repair)
        except lmdb.Error as error:
            raise device_error("repair", 5, device=str(path), hint=str(error)) from None
        return repair


def _grow_pools(layout: Layout) -> int:
    """Give pool files that were cut short their size back, with zeros; returns how many."""
    grown = 0
    for device in layout.devices():
        try:
            descriptor = os.open(device.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.lseek(descriptor, 0, os.SEEK_END) < device.capacity_bytes:
                    os.truncate(descriptor, device.capacity_bytes)
                    os.fsync(descriptor)
                    grown += 1
            finally:
                os.close(descriptor)
        except OSError as error:
            raise device_error("repair", error.errno or 5, device=device.path) from None
    return grown


def _drop(folder: Path, bad: Bad, repair: Repair) -> None:
    env = lmdb.open(str(folder), map_size=0, max_dbs=8, create=False, readahead=False)
    try:
        names = ("namespaces", "records", "slots", "segments")
        db = {name: env.open_db(name.encode(), create=False) for name in names}
        for chunk in _chunks(sorted(bad.records)):
            with env.begin(write=True) as txn:
                for key in chunk:
                    _drop_record(txn, db, key, repair)
        with env.begin(write=True) as txn:
            _drop_slots(txn, db, bad.slots, repair)
            repair.segments = _drop_keys(txn, db["segments"], bad.segments)
            repair.namespaces = _drop_keys(txn, db["namespaces"], bad.namespaces)
    finally:
        env.close()


def _drop_record(txn: Any, db: dict[str, Any], key: bytes, repair: Repair) -> None:
    """Remove a record, and the slot entry that it names if that is its own."""
    raw = txn.get(key, db=db["records"])
    if raw is None:
        return
    txn.delete(key, db=db["records"])
    repair.pages_lost += 1
    if len(raw) == RECORD_BYTES:
        record = np.frombuffer(raw, dtype=RECORD)[0]
        repair.bytes_lost += int(record["length_bytes"])
        slot = int(record["segment"]).to_bytes(4, "big") + int(record["slot"]).to_bytes(4, "big")
        if txn.get(slot, db=db["slots"]) == key:
            txn.delete(slot, db=db["slots"])


def _drop_slots(txn: Any, db: dict[str, Any], found: set[bytes], repair: Repair) -> None:
    """Remove slot entries without a record that points back: those found, and new ones."""
    orphans = set(found)
    with txn.cursor(db=db["slots"]) as cursor:
        for slot, key in cursor:
            if len(key) != RECORD_KEY_BYTES or txn.get(key, db=db["records"]) is None:
                orphans.add(bytes(slot))
    repair.slots_freed = _drop_keys(txn, db["slots"], orphans)


def _drop_keys(txn: Any, db: Any, keys: Iterable[bytes]) -> int:
    return sum(bool(txn.delete(key, db=db)) for key in keys)


def _chunks(keys: list[bytes]) -> Iterable[list[bytes]]:
    return (keys[i : i + CHUNK] for i in range(0, len(keys), CHUNK))
