"""Drops what a verification finds damaged, and nothing else; reports what that costs.

A cache may forget: a page whose record, slot entry or bytes cannot be trusted is removed from the
catalog, and its slot is free again. What can be told from elsewhere is put right first: a catalog
that LMDB cannot use is made anew (`rebuild`), a pool's superblock is written from another copy of
it, a pool that was cut short gets its size back. While a repair runs no process can open the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from tutti_core.config import StoreConfig
from tutti_core.errors import BusyError, ConfigError, CorruptionError, TuttiError, device_error
from tutti_core.format import (
    DATA_OFFSET_BYTES,
    POOL_MAGIC,
    RECORD,
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    Superblock,
    record_is_sound,
)
from tutti_core.index.catalog import RECORD_KEY_BYTES
from tutti_core.io.select import TransportName
from tutti_core.raw_catalog import RawCatalog, namespace_fields, read_layout
from tutti_core.rebuild import rebuild_catalog
from tutti_core.tiers.lease import held_leases
from tutti_core.tiers.pools import (
    Layout,
    catalog_folder,
    check_catalog,
    check_directory,
    lease_folder,
    pool_file,
    store_lock,
)
from tutti_core.verify import Bad, Damage, Progress, VerifyReport, verify_store

CHUNK = 4096
"""Records removed in one transaction."""

_ANY_CAPACITY = 1 << 60
_STORE_ID = slice(16, 32)  # of a superblock
UNKNOWN = ""
"""Namespace of records that do not say which is theirs."""


@dataclass(slots=True)
class Loss:
    """Pages of one namespace that were dropped, and their stored bytes."""

    model: str = "?"
    pages: int = 0
    payload_bytes: int = 0


@dataclass(slots=True)
class Repair:
    """What was done.

    report        what the verification found; with "tree" or "pool_superblock" also what had to be
                  put right before it could begin.
    pages_kept    records that are left.
    pages_lost    records that were dropped, or could not be read from a damaged catalog.
    bytes_lost    their stored bytes, of those that say how many.
    lost          the same by namespace digest in hex; UNKNOWN: of records that cannot be read.
    slots_freed   slot entries that belonged to no sound record.
    segments, namespaces   entries that could not be read.
    pools_grown   pool files that were too short and have their size again.
    superblocks   superblocks that were written anew.
    rebuilt       whether the catalog was made anew.
    """

    report: VerifyReport
    pages_kept: int = 0
    pages_lost: int = 0
    bytes_lost: int = 0
    lost: dict[str, Loss] = field(default_factory=dict)
    slots_freed: int = 0
    segments: int = 0
    namespaces: int = 0
    pools_grown: int = 0
    superblocks: int = 0
    rebuilt: bool = False


def repair_store(
    path: Path,
    pools: tuple[Path, ...] = (),
    *,
    transport: TransportName = "auto",
    examples: int = 10,
    progress: Progress = lambda what, done, total: None,
    trust_path: bool = False,
) -> Repair:
    """Verify a store and drop what is bad. What is good is not touched.

    Raises
        BusyError: a process has the store open.
        ConfigError, UnsupportedError, CorruptionError: there is no store, or it cannot be repaired:
            no copy of a superblock is left.
        DeviceError: the file system refused; what was done so far is done.
    Cost       that of `verify_store`; a crash in between leaves a store that can be repaired again.
    """
    folder = catalog_folder(path)
    check_catalog(path, trusting=trust_path)
    if not (folder / "data.mdb").is_file():
        raise ConfigError(f"there is no store at {path}", hint="`tutti init` makes one")
    check_directory(path, trusting=trust_path)
    with store_lock(path):
        held = held_leases(lease_folder(path))
        if held:
            raise BusyError(
                f"the store at {path} is open in {len(held)} process(es)", hint="stop them"
            )
        repair = Repair(VerifyReport("", ""))
        before = _mend_catalog(path, repair, trust_path)
        before |= _mend_superblocks(path, pools, repair, trust_path)
        bad = Bad()
        report = verify_store(
            path,
            pools,
            transport=transport,
            examples=examples,
            progress=progress,
            bad=bad,
            trust_path=trust_path,
        )
        clean = report.clean
        report.damage = before | report.damage
        repair.report = report
        repair.pages_kept = report.records
        if clean:
            return repair
        catalog = RawCatalog(path, trusting=trust_path)
        try:
            layout = read_layout(path, pools, catalog, trusting=trust_path)
        finally:
            catalog.close()
        try:
            repair.pools_grown = _grow_pools(layout)
            _drop(folder, layout, bad, repair)
        except lmdb.Error as error:
            raise device_error("repair", 5, device=str(path), hint=str(error)) from None
        return repair


# ---- before a verification can begin ----
def _mend_catalog(path: Path, repair: Repair, trusting: bool) -> dict[str, Damage]:
    """Make the catalog anew if LMDB cannot use it; returns the damage that was there."""
    try:
        RawCatalog(path, trusting=trusting).close()
    except CorruptionError as error:
        text = str(error)
    else:
        return {}
    rebuilt = rebuild_catalog(catalog_folder(path))
    repair.rebuilt = True
    repair.pages_lost = rebuilt.lost
    if rebuilt.lost:
        repair.lost[UNKNOWN] = Loss(pages=rebuilt.lost)
    return {"tree": Damage(1, [text])}


def _mend_superblocks(
    path: Path, pools: tuple[Path, ...], repair: Repair, trusting: bool
) -> dict[str, Damage]:
    """Write damaged superblocks of pool files from another copy; returns the damage there was."""
    config = StoreConfig.parse(
        {"path": path, "pools": pools, "capacity": _ANY_CAPACITY, "trust_path": trusting}
    )
    files = [pool_file(place) for place in config.pool_paths]
    heads = [_head(file) for file in files]
    found = [_decoded(head, str(file)) for head, file in zip(heads, files, strict=True)]
    sources = [superblock for superblock in found if superblock is not None]
    catalog = RawCatalog(path, trusting=trusting)
    try:
        with catalog.view() as view:
            copy = view.superblock()
    finally:
        catalog.close()
    if copy is not None:
        sources.append(copy)
    damage = Damage()
    for index, (file, head) in enumerate(zip(files, heads, strict=True)):
        if found[index] is not None or head is None or not sources:
            continue
        if not _is_ours(head, sources[0]) or sources[0].pool_count != len(files):
            continue  # the verification says what is wrong with it
        _write_superblock(file, replace(sources[0], pool_index=index), sources)
        damage.count += 1
        damage.examples.append(str(file))
    repair.superblocks += damage.count
    return {"pool_superblock": damage} if damage.count else {}


def _head(file: Path) -> bytes | None:
    """The first bytes of a pool; None where there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.pread(descriptor, SUPERBLOCK_BYTES, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _decoded(head: bytes | None, name: str) -> Superblock | None:
    try:
        return None if head is None else Superblock.decode(head, name)
    except TuttiError:
        return None


def _is_ours(head: bytes, known: Superblock) -> bool:
    """Whether a damaged superblock is this store's: it has its id, or its magic number, or nothing.

    One whose check agrees is not damaged but another version's, and is left alone.
    """
    if Superblock.is_whole(head):
        return False
    return (
        head[_STORE_ID] == known.store_id or head[: len(POOL_MAGIC)] == POOL_MAGIC or not any(head)
    )


def _write_superblock(file: Path, superblock: Superblock, sources: list[Superblock]) -> None:
    """Write it with as many segments as the other copies say at most, or the file has."""
    count = max(source.segment_count for source in sources)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not file.is_block_device() and superblock.pool_count == 1:
                size = os.lseek(descriptor, 0, os.SEEK_END)
                count = max(count, (size - DATA_OFFSET_BYTES) // superblock.segment_bytes)
            os.pwrite(descriptor, replace(superblock, segment_count=count).encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise device_error("repair", error.errno or 5, device=str(file)) from None


# ---- after it ----
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


def _drop(folder: Path, layout: Layout, bad: Bad, repair: Repair) -> None:
    # The size that the file names for itself is not believed.
    size = 2 * (folder / "data.mdb").stat().st_size + (64 << 20)
    env = lmdb.open(
        str(folder), map_size=size, max_dbs=8, create=False, readahead=False, mode=0o600
    )
    try:
        names = ("meta", "namespaces", "records", "slots", "segments")
        db = {name: env.open_db(name.encode(), create=False) for name in names}
        for chunk in _chunks(sorted(bad.records)):
            with env.begin(write=True) as txn:
                for key in chunk:
                    _drop_record(txn, db, key, repair)
        with env.begin(write=True) as txn:
            _drop_slots(txn, db, bad.slots, repair)
            repair.segments = _drop_keys(txn, db["segments"], bad.segments)
            repair.namespaces = _drop_keys(txn, db["namespaces"], bad.namespaces)
            if bad.superblock:
                repair.superblocks += 1
                txn.put(b"superblock", layout.superblocks[0].encode(), db=db["meta"])
            if bad.sequence is not None:
                txn.put(b"sequence", bad.sequence.to_bytes(8, "big"), db=db["meta"])
    finally:
        env.close()


def _drop_record(txn: Any, db: dict[str, Any], key: bytes, repair: Repair) -> None:
    """Remove a record, and the slot entry that it names if that is its own."""
    raw = txn.get(key, db=db["records"])
    if raw is None:
        return
    txn.delete(key, db=db["records"])
    repair.pages_kept -= 1
    repair.pages_lost += 1
    digest, length = UNKNOWN, 0
    if len(raw) == RECORD_BYTES:
        record = np.frombuffer(raw, dtype=RECORD)[0]
        slot = int(record["segment"]).to_bytes(4, "big") + int(record["slot"]).to_bytes(4, "big")
        if txn.get(slot, db=db["slots"]) == key:
            txn.delete(slot, db=db["slots"])
        if record_is_sound(raw):
            digest, length = record["namespace"].tobytes().hex(), int(record["length_bytes"])
    repair.bytes_lost += length
    loss = repair.lost.get(digest)
    if loss is None:
        described = txn.get(bytes.fromhex(digest), db=db["namespaces"]) if digest else None
        model = str(namespace_fields(described).get("model", "?"))
        loss = repair.lost[digest] = Loss(model)
    loss.pages += 1
    loss.payload_bytes += length


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
