"""The persistent side of the index: page records, slots and segments in one LMDB environment.

Databases (docs/format.md has the bytes)
    meta        superblock, sequence (last generation given out)
    namespaces  digest -> canonical description
    records     record key -> record
    slots       segment, slot -> record key; one record a slot, enforced inside the transaction
    segments    segment -> owner lease and slot size

Every change is one transaction, so after a crash a record and its slot entry are both there or both
gone. Readers never block and are never blocked. Write transactions belong to one thread of a store,
its saver; LMDB serialises them between processes.

LMDB allows one environment per directory and process: stores of one process share it, and a forked
child opens its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from tutti_core.errors import (
    ConfigError,
    CorruptionError,
    StoreClosedError,
    StoreFullError,
    device_error,
)
from tutti_core.format import (
    RECORD,
    RECORD_BYTES,
    SegmentEntry,
    Superblock,
    record_is_sound,
    seal_records,
    slot_key,
)

U64 = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]  # of dtype RECORD

RECORD_KEY_BYTES = 16
CATALOG_BYTES_PER_PAGE = 512
"""Bound of what one page costs in the LMDB file, copy-on-write slack included."""

_READERS_MAX = 512
_WARM_STEP_BYTES = 4 << 20
_SEQUENCE = b"sequence"
_SUPERBLOCK = b"superblock"


@dataclass(frozen=True, slots=True)
class NewPages:
    """Pages of one namespace to be published; their bytes are on the device already.

    With n pages: record_keys and parents packed, 16 bytes each; page_keys packed, `key_width` bytes
    each; slot and checksum (n,) uint64.
    """

    namespace: bytes
    length_bytes: int
    key_width: int
    record_keys: bytes
    page_keys: bytes
    parents: bytes
    slot: U64
    checksum: U64

    def select(self, index: npt.NDArray[np.intp]) -> NewPages:
        """Some of the pages."""
        return NewPages(
            namespace=self.namespace,
            length_bytes=self.length_bytes,
            key_width=self.key_width,
            record_keys=packed_rows(self.record_keys, RECORD_KEY_BYTES)[index].tobytes(),
            page_keys=packed_rows(self.page_keys, self.key_width)[index].tobytes(),
            parents=packed_rows(self.parents, RECORD_KEY_BYTES)[index].tobytes(),
            slot=self.slot[index],
            checksum=self.checksum[index],
        )

    def records(self) -> Records:
        """The records to store, without their generations and checks."""
        records = np.zeros(len(self.slot), dtype=RECORD)
        raw = records.view(np.uint8).reshape(len(records), RECORD_BYTES)
        raw[:, : self.key_width] = packed_rows(self.page_keys, self.key_width)
        raw[:, 32:48] = np.frombuffer(self.namespace, dtype=np.uint8)
        raw[:, 48:64] = packed_rows(self.parents, RECORD_KEY_BYTES)
        records["segment"] = self.slot >> np.uint64(32)
        records["slot"] = self.slot & np.uint64(0xFFFFFFFF)
        records["length_bytes"] = self.length_bytes
        records["checksum"] = self.checksum
        return records


@dataclass(frozen=True, slots=True)
class Published:
    """Result of `Catalog.publish` for one NewPages.

    record  (n,) RECORD, what stands in the catalog now.
    taken   (n,) bool, False where another record was there first; the slot offered is not used.
    """

    record: Records
    taken: npt.NDArray[np.bool_]


class _Environment:
    """One shared LMDB environment and its databases."""

    def __init__(self, path: Path, map_bytes: int, metasync: bool) -> None:
        self.env = lmdb.open(
            str(path),
            map_size=map_bytes,
            max_dbs=8,
            max_readers=_READERS_MAX,
            mode=0o600,
            # Never sync=False: a power loss could then leave a catalog that cannot be read at all.
            metasync=metasync,
            readahead=False,
        )
        self.env.reader_check()
        self.meta = self.env.open_db(b"meta")
        self.namespaces = self.env.open_db(b"namespaces")
        self.records = self.env.open_db(b"records")
        self.slots = self.env.open_db(b"slots")
        self.segments = self.env.open_db(b"segments")
        self.users = 0
        self.idle = threading.Condition(threading.Lock())  # guards the two below
        self.active = 0  # transactions that are open now
        self.forking = False  # no transaction may begin


_environments: dict[tuple[int, str], _Environment] = {}  # (process id, real path)
_environments_lock = threading.Lock()


def _before_fork() -> None:
    """Let no transaction be open at a fork: a child could not close the environment then."""
    _environments_lock.acquire()
    for shared in _environments.values():
        shared.idle.acquire()
        shared.forking = True
        while shared.active:
            shared.idle.wait()


def _after_fork() -> None:
    for shared in _environments.values():
        shared.forking = False
        shared.idle.notify_all()
        shared.idle.release()
    _environments_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class Catalog:
    """One store's view of the catalog in `path`.

    Parameters
        map_bytes: upper bound of the file.
        metasync: whether a commit is on the device when it returns; otherwise a power loss may take
            the last one back.
    Threads    reads from any; writes from one thread at a time.
    """

    def __init__(self, path: Path, map_bytes: int, metasync: bool) -> None:
        self._key = (os.getpid(), os.path.realpath(path))
        self.records_max = map_bytes // CATALOG_BYTES_PER_PAGE
        with _environments_lock:
            for inherited in [k for k in _environments if k[1] == self._key[1] and k != self._key]:
                _environments.pop(inherited).env.close()  # the parent's, in a forked child
            shared = _environments.get(self._key)
            if shared is None:
                try:
                    shared = _Environment(path, map_bytes, metasync)
                except lmdb.Error as error:
                    raise ConfigError(
                        f"the catalog in {path} cannot be opened: {error}",
                        device=str(path),
                        hint="`tutti init --discard` makes the store anew and forgets its pages",
                    ) from None
                except OSError as error:
                    raise device_error("open", error.errno or 5, device=str(path)) from None
                _environments[self._key] = shared
            shared.users += 1
        self._shared: _Environment | None = shared
        self._active = 0  # transactions of this view that are open now

    @contextmanager
    def _begin(self, write: bool = False) -> Iterator[tuple[lmdb.Transaction[bytes], _Environment]]:
        """One transaction; committed unless the block raises.

        Raises
            StoreClosedError: after `close`, which waits for the transactions that are open.
            StoreFullError: the file has reached its bound; nothing was changed. `retryable` where
                a reader that was killed kept old pages from being used again; they are free now.
            DeviceError: the file system refused; nothing was changed.
        """
        shared = self._shared
        if shared is None or self._key[0] != os.getpid():
            raise StoreClosedError("the store is closed")
        with shared.idle:
            while shared.forking:
                shared.idle.wait()
            if self._shared is None:
                raise StoreClosedError("the store is closed")
            shared.active += 1
            self._active += 1
        try:
            with shared.env.begin(write=write) as txn:
                yield txn, shared
        except lmdb.MapFullError:
            raise StoreFullError(
                f"the catalog in {self._key[1]} is full",
                scope="store",
                retryable=shared.env.reader_check() > 0,
            ) from None
        except lmdb.Error as error:
            code = max(getattr(error, "code", 0), 0) or 5  # LMDB's own codes are negative
            raise device_error("commit", code, device=self._key[1], hint=str(error)) from None
        finally:
            with shared.idle:
                shared.active -= 1
                self._active -= 1
                shared.idle.notify_all()

    def close(self) -> None:
        """Let go of the environment; the last user closes it. Idempotent."""
        shared, self._shared = self._shared, None
        if shared is None or self._key[0] != os.getpid():
            return
        with shared.idle:
            while self._active:
                shared.idle.wait()
        with _environments_lock:
            shared.users -= 1
            if shared.users == 0:
                del _environments[self._key]
                shared.env.close()

    # ---- identity ----
    def superblock(self) -> Superblock | None:
        """The copy of pool 0's superblock, or None in a new catalog."""
        with self._begin() as (txn, db):
            data = txn.get(_SUPERBLOCK, db=db.meta)
        return None if data is None else Superblock.decode(data, "the catalog")

    def set_superblock(self, superblock: Superblock) -> None:
        """Claim a new catalog for a store."""
        with self._begin(write=True) as (txn, db):
            txn.put(_SUPERBLOCK, superblock.encode(), db=db.meta)

    def register_namespace(self, digest: bytes, description: bytes) -> None:
        """Remember what `digest` stands for.

        Raises
            CorruptionError: the digest stands for something else already.
        """
        with self._begin() as (txn, db):
            known = txn.get(digest, db=db.namespaces)
        if known is None:
            with self._begin(write=True) as (txn, db):
                txn.put(digest, description, db=db.namespaces)
        elif known != description:
            raise CorruptionError(
                f"namespace digest {digest.hex()} stands for something else in this store",
                scope="store",
            )

    def namespaces(self) -> dict[bytes, bytes]:
        """All registered namespaces: digest -> canonical description."""
        with self._begin() as (txn, db), txn.cursor(db=db.namespaces) as cursor:
            return dict(cursor)

    # ---- reading ----
    def sequence(self) -> int:
        """The last generation given out."""
        with self._begin() as (txn, db):
            return int.from_bytes(txn.get(_SEQUENCE, b"\0", db=db.meta), "big")

    def record_count(self) -> int:
        """Pages in the catalog, of all namespaces and owners."""
        with self._begin() as (txn, db):
            return int(txn.stat(db.records)["entries"])

    def note_full(self) -> None:
        """The file is full below the bound: keep fewer pages from now on."""
        self.records_max = min(self.records_max, self.record_count() * 15 // 16)

    def lookup(self, record_keys: bytes) -> tuple[npt.NDArray[np.bool_], Records]:
        """Read many records at once.

        Parameters
            record_keys: packed, 16 bytes each; n of them.
        Returns
            found (n,) bool and records (n,) of dtype RECORD; an unfound or damaged one is zeros.
        Cost       one read transaction; about a microsecond a key when the catalog is in memory.
        """
        keys = _split(record_keys, RECORD_KEY_BYTES)
        blank = bytes(RECORD_BYTES)
        with self._begin() as (txn, db):
            raw = [txn.get(key, blank, db=db.records) for key in keys]
        raw = [value if record_is_sound(value) else blank for value in raw]
        records = np.frombuffer(b"".join(raw), dtype=RECORD)
        found = np.array([value is not blank for value in raw], dtype=np.bool_)
        return found, records

    def warm(self, stopping: Callable[[], bool]) -> None:
        """Read the file into the page cache, front to back, up to a quarter of the free memory.

        A cold catalog is read in random 4 KiB pieces otherwise, which on a busy disk takes many
        times longer. An unreadable file is left to LMDB to report.
        """
        budget_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        buffer = bytearray(_WARM_STEP_BYTES)
        try:
            with open(Path(self._key[1]) / "data.mdb", "rb", buffering=0) as stream:
                while budget_bytes > 0 and not stopping() and (got := stream.readinto(buffer)):
                    budget_bytes -= got
        except OSError:
            return

    def scan_records(self, chunk: int) -> Iterator[tuple[bytes, Records, int]]:
        """All records, `chunk` at a time: (packed record keys, records, damaged ones left out).

        Each chunk is read in a transaction of its own, so a long scan holds no old pages; records
        that come or go between chunks may be missed or already be gone.
        """
        after: bytes | None = None
        while True:
            keys: list[bytes] = []
            values: list[bytes] = []
            damaged = 0
            with self._begin() as (txn, db), txn.cursor(db=db.records) as cursor:
                more = cursor.first() if after is None else cursor.set_range(after)
                if more and after is not None and cursor.key() == after:
                    more = cursor.next()
                while more and len(keys) + damaged < chunk:
                    after = cursor.key()
                    raw = cursor.value()
                    if len(after) == RECORD_KEY_BYTES and record_is_sound(raw):
                        keys.append(after)
                        values.append(raw)
                    else:
                        damaged += 1
                    more = cursor.next()
            if keys or damaged:
                yield b"".join(keys), np.frombuffer(b"".join(values), dtype=RECORD), damaged
            if not more:
                return

    def slots_of(self, segment: int) -> dict[int, bytes]:
        """Used slots of a segment: slot -> record key."""
        prefix = slot_key(segment, 0)[:4]
        used = {}
        with self._begin() as (txn, db), txn.cursor(db=db.slots) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key()[:4] == prefix:
                used[int.from_bytes(cursor.key()[4:8], "big")] = cursor.value()
                more = cursor.next()
        return used

    def segments(self) -> dict[int, SegmentEntry]:
        """Assigned segments and their owners."""
        with self._begin() as (txn, db), txn.cursor(db=db.segments) as cursor:
            return {int.from_bytes(k, "big"): SegmentEntry.decode(v) for k, v in cursor}

    # ---- writing ----
    def publish(self, groups: list[NewPages]) -> list[Published]:
        """Make pages visible, all in one transaction.

        A page that has a sound record keeps it (another writer was first), and so does a page that
        occurs twice.

        Raises
            StoreFullError, DeviceError: see `_begin`; nothing was changed.
            CorruptionError: a slot belongs to a record already; nothing was changed.
        """
        with self._begin(write=True) as (txn, db):
            sequence = int.from_bytes(txn.get(_SEQUENCE, b"\0", db=db.meta), "big")
            results = []
            for group in groups:
                result, sequence = self._publish_group(txn, db, group, sequence)
                results.append(result)
            txn.put(_SEQUENCE, sequence.to_bytes(8, "big"), db=db.meta)
        return results

    def _publish_group(
        self, txn: lmdb.Transaction[bytes], db: _Environment, group: NewPages, sequence: int
    ) -> tuple[Published, int]:
        keys = _split(group.record_keys, RECORD_KEY_BYTES)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        known = [txn.get(key, db=db.records) for key in keys]
        taken = np.array(
            [
                first[key] == i and (raw is None or not record_is_sound(raw))
                for i, (key, raw) in enumerate(zip(keys, known, strict=True))
            ],
            dtype=np.bool_,
        )
        records = group.records()
        records["generation"] = sequence + np.cumsum(taken, dtype=np.uint64)
        seal_records(records)
        raw_records = records.tobytes()
        slots = group.slot.astype(">u8").tobytes()
        for i, key in enumerate(keys):
            if not taken[i]:
                earlier = txn.get(key, b"", db=db.records)
                records[i] = np.frombuffer(earlier, dtype=RECORD)[0]
                continue
            if not txn.put(slots[i * 8 : i * 8 + 8], key, db=db.slots, overwrite=False):
                raise CorruptionError(
                    f"slot {slots[i * 8 : i * 8 + 8].hex()} has a record already", scope="store"
                )
            txn.put(key, raw_records[i * RECORD_BYTES : (i + 1) * RECORD_BYTES], db=db.records)
        return Published(records, taken), sequence + int(taken.sum())

    def remove(self, pages: list[tuple[bytes, int, int]]) -> None:
        """Remove pages: (record key, slot id, generation) each.

        A record that says something else by now stays; the slot entry goes if it is this page's.
        In a file that is nearly full this takes several smaller transactions: a removal needs room
        for the tree pages that it changes.

        Raises
            StoreFullError, DeviceError: see `_begin`; a leading part of `pages` may be gone.
        """
        step = len(pages)
        while pages:
            try:
                self._remove(pages[:step])
                pages = pages[step:]
            except StoreFullError:
                if step == 1:
                    raise
                step = max(step // 8, 1)

    def _remove(self, pages: list[tuple[bytes, int, int]]) -> None:
        with self._begin(write=True) as (txn, db):
            for record_key, slot, generation in pages:
                raw = txn.get(record_key, db=db.records)
                if raw is not None and len(raw) == RECORD_BYTES:
                    record = np.frombuffer(raw, dtype=RECORD)[0]
                    if int(record["generation"]) == generation:
                        txn.delete(record_key, db=db.records)
                    elif slot_of(record) == slot:
                        continue  # the slot holds a later page of the same key
                entry = slot.to_bytes(8, "big")
                if txn.get(entry, db=db.slots) == record_key:
                    txn.delete(entry, db=db.slots)

    def remove_slots(self, segment: int, slots: dict[int, bytes]) -> None:
        """Remove slot entries of one segment whose records are gone, damaged or point elsewhere."""
        with self._begin(write=True) as (txn, db):
            for slot, record_key in slots.items():
                raw = txn.get(record_key, db=db.records)
                if raw is not None:
                    record = np.frombuffer(raw, dtype=RECORD)[0] if record_is_sound(raw) else None
                    if record is None or slot_of(record) == segment << 32 | slot:
                        txn.delete(record_key, db=db.records)
                txn.delete(slot_key(segment, slot), db=db.slots)

    def claim_segment(
        self, candidates: list[int], entry: SegmentEntry, owned_max: int
    ) -> int | None:
        """Assign the first unassigned candidate; None if there is none or the share is used up."""
        with self._begin(write=True) as (txn, db):
            with txn.cursor(db=db.segments) as cursor:
                owned = sum(SegmentEntry.decode(v).lease == entry.lease for _, v in cursor)
            if owned >= owned_max:
                return None
            for segment in candidates:
                if txn.put(
                    segment.to_bytes(4, "big"), entry.encode(), db=db.segments, overwrite=False
                ):
                    return segment
        return None

    def reassign_segment(self, segment: int, old: SegmentEntry, new: SegmentEntry) -> bool:
        """Give a segment another owner or slot size if its entry is still `old`."""
        key = segment.to_bytes(4, "big")
        with self._begin(write=True) as (txn, db):
            if txn.get(key, db=db.segments) != old.encode():
                return False
            txn.put(key, new.encode(), db=db.segments)
        return True

    def free_segment(self, segment: int) -> None:
        """Give an empty segment back to all."""
        with self._begin(write=True) as (txn, db):
            txn.delete(segment.to_bytes(4, "big"), db=db.segments)


def slot_of(record: np.void) -> int:
    """Slot id of one RECORD: segment << 32 | slot."""
    return int(record["segment"]) << 32 | int(record["slot"])


def slots_of_records(records: Records) -> U64:
    """Slot ids of records."""
    segment = records["segment"].astype(np.uint64)
    return np.asarray(segment << np.uint64(32) | records["slot"], dtype=np.uint64)


def page_keys_of(records: Records, width: int) -> npt.NDArray[np.uint8]:
    """Page keys of contiguous records, (n, width)."""
    raw = records.view(np.uint8).reshape(len(records), RECORD_BYTES)
    return np.asarray(raw[:, :width], dtype=np.uint8)


def record_key_at(packed: bytes, index: int) -> bytes:
    """One of many packed record keys."""
    return packed[index * RECORD_KEY_BYTES : (index + 1) * RECORD_KEY_BYTES]


def packed_rows(packed: bytes, width: int) -> npt.NDArray[np.uint8]:
    """Packed keys of `width` bytes as an array (n, width), without a copy."""
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, width)


def _split(packed: bytes, width: int) -> list[bytes]:
    return [packed[i : i + width] for i in range(0, len(packed), width)]
