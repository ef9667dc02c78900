"""The persistent side of the index: page records, slots and segments in one LMDB environment.

Databases (docs/format.md has the bytes)
    meta        superblock, sequence (last generation given out), clears (how many there were),
                and for each namespace that was cleared the generation up to which its pages went
    namespaces  digest -> canonical description
    records     record key -> record
    slots       segment, slot -> record key; one record a slot, enforced inside the transaction
    segments    segment -> owner lease and slot size

Every change is one transaction, so after a crash a record and its slot entry are both there or both
gone. Readers never block and are never blocked. Write transactions belong to one thread of a store,
its saver; LMDB serialises them between processes.

LMDB allows one environment per directory and process: stores of one process share it, and a forked
child opens its own. Where another process has made the file larger than this one's map, the map is
made anew between two transactions. The slots of readers that were killed are given back when the
catalog is opened, and when the lack of them, or of the space that they keep, is felt.

A write waits for those of other processes without a bound: LMDB's lock has none. It ends with its
process, so only one that was stopped (SIGSTOP) can hold it for long.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.errors import (
    DISK_FULL,
    ConfigError,
    CorruptionError,
    DeviceError,
    StoreClosedError,
    StoreFullError,
    device_error,
)
from tutti_core.format import (
    RECORD,
    RECORD_BYTES,
    REPAIR_HINT,
    SegmentEntry,
    Superblock,
    record_is_sound,
    seal_records,
    slot_key,
)
from tutti_core.index.commits import Commits

U64 = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]  # of dtype RECORD

logger = logging.getLogger("tutti")

RECORD_KEY_BYTES = 16
CATALOG_BYTES_PER_PAGE = 512
"""Bound of what one page costs in the LMDB file, copy-on-write slack included."""

DATABASES = frozenset([b"meta", b"namespaces", b"records", b"slots", b"segments"])
GENERATION_MAX = 1 << 62
"""A larger one, of a record or as the last given out, is damage."""

RESIZE_WAIT_S = 30.0
"""How long a larger map waits for this process's transactions to end."""

_T = TypeVar("_T")

_BEGIN_ATTEMPTS_MAX = 4
_READERS_MAX = 512
_FULL_BYTES = 64 << 10
"""Less free space than this counts as none."""
_WARM_STEP_BYTES = 4 << 20
_SEQUENCE = b"sequence"
_CLEARS = b"clears"
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
        self._path, self.map_bytes, self._metasync = path, map_bytes, metasync
        self.users = 0
        self.idle = threading.Condition(threading.Lock())  # guards what follows
        self.active = 0  # transactions that are open now
        self.forking = False  # no transaction may begin
        self.resizing = 0  # threads that make the map anew; no transaction may begin
        self.broken = False  # LMDB refuses everything until the file is opened anew
        self._open()

    def _open(self) -> None:
        self.env = lmdb.open(
            str(self._path),
            map_size=self.map_bytes,
            max_dbs=8,
            max_readers=_READERS_MAX,
            mode=0o600,
            # Never sync=False: a power loss could then leave a catalog that cannot be read at all.
            metasync=self._metasync,
            readahead=False,
        )
        try:
            self.env.reader_check()
            self.meta = self.env.open_db(b"meta")
            self.namespaces = self.env.open_db(b"namespaces")
            self.records = self.env.open_db(b"records")
            self.slots = self.env.open_db(b"slots")
            self.segments = self.env.open_db(b"segments")
        except BaseException:
            self.env.close()  # LMDB lets a process have a file open once
            raise

    def resize(self, map_bytes: int) -> bool:
        """Make the map this large (0: as large as the file says); False if transactions go on.

        The caller has none open, and does not count among `active`.
        """
        with self.idle:
            self.resizing += 1
            try:
                if not self.idle.wait_for(lambda: not self.active, RESIZE_WAIT_S):
                    return False
                self.env.set_mapsize(map_bytes)
                self.map_bytes = int(self.env.info()["map_size"])
            finally:
                self.resizing -= 1
                self.idle.notify_all()
        return True

    def mend(self) -> None:
        """Open the file anew after LMDB gave up on it: the root page could not be written.

        Called with `idle` held. Not while a transaction is open; if it fails, the next one tries.
        """
        if self.active == 0:
            self.env.close()
            self._open()
            self.broken = False
            logger.warning("the catalog in %s was opened anew", self._path)


_environments: dict[tuple[int, str], _Environment] = {}  # (process id, real path)
_environments_lock = threading.Lock()


_held: list[_Environment] = []  # by the thread that forks, whose lock each is

FORK_WAIT_S = 30.0
"""How long a fork waits for transactions that are open, all environments together."""


def _before_fork() -> None:
    """Let no transaction be open at a fork: a child could not close the environment then.

    Goes on after FORK_WAIT_S: one that waits for another process's may take for ever, and the
    thread that forks may have one open itself (a signal's handler). The child leaves such an
    environment alone.
    """
    _environments_lock.acquire()  # held for bounded work elsewhere
    deadline_s = time.monotonic() + FORK_WAIT_S
    for shared in _environments.values():
        shared.idle.acquire()  # likewise
        _held.append(shared)
        shared.forking = True
        left_s = max(deadline_s - time.monotonic(), 0.0)
        shared.idle.wait_for(lambda shared=shared: not shared.active, left_s)  # type: ignore[misc]


def _after_fork() -> None:
    """Let everybody go on. Runs after `_before_fork` whatever became of that or of the fork."""
    while _held:
        shared = _held.pop()
        shared.forking = False
        shared.idle.notify_all()
        shared.idle.release()
    _environments_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

_left_alone: list[_Environment] = []
"""In a child: inherited with a transaction open, so they cannot be closed."""


class Catalog:
    """One store's view of the catalog in `path`.

    Parameters
        map_bytes: upper bound of the file; that of another process counts where it is larger.
        metasync: whether a commit is on the device when it returns; otherwise a power loss may take
            the last one back.
    Threads    reads from any; writes from one thread at a time.
    """

    def __init__(self, path: Path, map_bytes: int, metasync: bool) -> None:
        self._key = (os.getpid(), os.path.realpath(path))
        self.commits = Commits(map_bytes // CATALOG_BYTES_PER_PAGE)
        with _environments_lock:
            for key in [k for k in _environments if k[1] == self._key[1] and k != self._key]:
                inherited = _environments.pop(key)  # the parent's, in a forked child
                if inherited.active:
                    _left_alone.append(inherited)
                else:
                    inherited.env.close()
            shared = _environments.get(self._key)
            if shared is None:
                try:
                    shared = _Environment(path, map_bytes, metasync)
                except lmdb.Error as error:
                    if (code := getattr(error, "code", 0)) > 0:  # the file system's, not LMDB's
                        raise device_error(
                            "open", code, device=str(path), hint=str(error)
                        ) from None
                    raise ConfigError(
                        f"the catalog in {path} cannot be opened: {error}",
                        device=str(path),
                        hint="`tutti init --discard` makes the store anew and forgets its pages",
                    ) from None
                except OSError as error:
                    raise device_error("open", error.errno or 5, device=str(path)) from None
                _environments[self._key] = shared
            elif shared.map_bytes < map_bytes:
                self._enlarge(shared, map_bytes)
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
            while shared.forking or shared.resizing:  # whoever sets one takes it back, and tells
                shared.idle.wait()
            if self._shared is None:
                raise StoreClosedError("the store is closed")
            if shared.broken:
                self._mend(shared)
            shared.active += 1
            self._active += 1
        refused: str | None = None
        if write:
            self.commits.begin()
        try:
            with self._open_transaction(shared, write) as txn:
                yield txn, shared
            refused = ""
        except lmdb.MapFullError:
            refused = ""
            raise StoreFullError(
                f"the catalog in {self._key[1]} is full",
                scope="store",
                retryable=shared.env.reader_check() > 0,
            ) from None
        except lmdb.Error as error:
            code = max(getattr(error, "code", 0), 0) or errno.EIO  # LMDB's own codes are negative
            if write and code == errno.EIO and self._disk_is_full():
                code = errno.ENOSPC  # LMDB calls a write that ends early an EIO
            shared.broken |= isinstance(error, lmdb.PanicError)
            refused = "" if code in DISK_FULL else f"{os.strerror(code)} ({error})"
            raise device_error("commit", code, device=self._key[1], hint=str(error)) from None
        finally:
            if write:
                self.commits.end(refused)
            with shared.idle:
                shared.active -= 1
                self._active -= 1
                shared.idle.notify_all()

    def _disk_is_full(self) -> bool:
        try:
            facts = os.statvfs(self._key[1])
        except OSError:
            return False
        return facts.f_bavail * facts.f_frsize < _FULL_BYTES

    def _mend(self, shared: _Environment) -> None:
        try:
            shared.mend()
        except (lmdb.Error, OSError) as error:
            code = max(getattr(error, "code", 0), 0) or getattr(error, "errno", None) or 5
            raise device_error("open", code, device=self._key[1], hint=str(error)) from None

    def _open_transaction(self, shared: _Environment, write: bool) -> lmdb.Transaction[bytes]:
        """Begin, and mend what other processes have done: grown the file, or died as readers."""
        for _ in range(_BEGIN_ATTEMPTS_MAX - 1):
            try:
                return shared.env.begin(write=write)
            except lmdb.MapResizedError:
                with shared.idle:
                    shared.active -= 1  # nothing was opened
                    shared.idle.notify_all()
                try:
                    self._enlarge(shared, 0)
                finally:
                    with shared.idle:
                        shared.active += 1
            except lmdb.ReadersFullError:
                if not shared.env.reader_check():
                    raise
        return shared.env.begin(write=write)

    def _enlarge(self, shared: _Environment, map_bytes: int) -> None:
        if not shared.resize(map_bytes):
            raise device_error(
                "map",
                errno.EBUSY,
                device=self._key[1],
                hint=f"the catalog has grown, and transactions did not end for {RESIZE_WAIT_S:g} s",
            )

    def _change(self, work: Callable[[lmdb.Transaction[bytes], _Environment], _T]) -> _T:
        """`work` in a write transaction; once more where killed readers had kept the file full."""
        try:
            with self._begin(write=True) as (txn, db):
                return work(txn, db)
        except StoreFullError as error:
            if not error.retryable:
                raise
        with self._begin(write=True) as (txn, db):
            return work(txn, db)

    def close(self) -> None:
        """Let go of the environment; the last user closes it. Idempotent."""
        shared, self._shared = self._shared, None
        if shared is None or self._key[0] != os.getpid():
            return
        with shared.idle:
            while self._active:  # each ends by itself, and tells
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
        """Remember what `digest` stands for; a damaged description is put right.

        Raises
            CorruptionError: the digest stands for something else already.
        """
        with self._begin() as (txn, db):
            known = txn.get(digest, db=db.namespaces)
        if known is None or (known != description and hashing.digest(known) != digest):
            with self._begin(write=True) as (txn, db):
                txn.put(digest, description, db=db.namespaces)
        elif known != description:
            raise CorruptionError(
                f"namespace digest {digest.hex()} stands for something else in this store",
                scope="store",
            )

    def namespaces(self) -> dict[bytes, bytes]:
        """All registered namespaces: digest -> canonical description; damaged ones are left out."""
        with self._begin() as (txn, db), txn.cursor(db=db.namespaces) as cursor:
            return {key: text for key, text in cursor if hashing.digest(text) == key}

    # ---- reading ----
    def sequence(self) -> int:
        """The last generation given out.

        Raises
            CorruptionError: it cannot be one.
        """
        with self._begin() as (txn, db):
            return _sequence_of(txn.get(_SEQUENCE, db=db.meta))

    def record_count(self) -> int:
        """Pages in the catalog, of all namespaces and owners."""
        with self._begin() as (txn, db):
            return int(txn.stat(db.records)["entries"])

    def note_full(self) -> None:
        """The file is full below the bound: keep fewer pages for a while."""
        self.commits.note_full(self.record_count())

    @property
    def records_max(self) -> int:
        """How many records there is room for, as far as is known."""
        if (shared := self._shared) is not None:
            self.commits.grow(shared.map_bytes // CATALOG_BYTES_PER_PAGE)
        return self.commits.records_max

    def clears(self) -> int:
        """How often a namespace was cleared, by any process: changes with each `note_clear`."""
        with self._begin() as (txn, db):
            return int.from_bytes(txn.get(_CLEARS, b"", db=db.meta)[:8], "big")

    def cleared(self, namespace: bytes) -> int:
        """Generation up to which the pages of a namespace were cleared; 0: it never was."""
        with self._begin() as (txn, db):
            raw = txn.get(namespace, b"", db=db.meta)
            generation = int.from_bytes(raw, "big") if len(raw) == 8 else 0
            if generation > _sequence_of(txn.get(_SEQUENCE, db=db.meta)):
                return 0  # damage
        return generation

    def takes_commits(self) -> bool:
        """Whether the catalog can be written; where it could not be, tries after a pause."""
        if not self.commits.refused:
            return True
        if not self.commits.due:
            return False
        try:
            with self._begin(write=True) as (txn, db):
                sequence = _sequence_of(txn.get(_SEQUENCE, db=db.meta))
                txn.put(_SEQUENCE, sequence.to_bytes(8, "big"), db=db.meta)
        except (StoreFullError, DeviceError):
            return not self.commits.refused
        return True

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

        A page that has a sound record, whose slot is its own, keeps it (another writer was first),
        and so does a page that occurs twice.

        Raises
            StoreFullError, DeviceError: see `_begin`; nothing was changed.
            CorruptionError: a slot belongs to a record already; nothing was changed.
        """

        def publish(txn: lmdb.Transaction[bytes], db: _Environment) -> list[Published]:
            sequence = _sequence_of(txn.get(_SEQUENCE, db=db.meta))
            results = []
            for group in groups:
                result, sequence = self._publish_group(txn, db, group, sequence)
                results.append(result)
            txn.put(_SEQUENCE, sequence.to_bytes(8, "big"), db=db.meta)
            return results

        return self._change(publish)

    def _publish_group(
        self, txn: lmdb.Transaction[bytes], db: _Environment, group: NewPages, sequence: int
    ) -> tuple[Published, int]:
        keys = _split(group.record_keys, RECORD_KEY_BYTES)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        known = [txn.get(key, db=db.records) for key in keys]
        taken = np.array(
            [
                first[key] == i and (raw is None or not _stands(txn, db, key, raw))
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
        def remove(txn: lmdb.Transaction[bytes], db: _Environment) -> None:
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

        self._change(remove)

    def note_clear(self, namespace: bytes) -> int:
        """Tell all processes that the pages of a namespace are about to go, up to now.

        Returns
            the generation up to which they go: that of the last page saved by anyone.
        Raises
            StoreFullError, DeviceError: see `_begin`; nothing was changed.
        """

        def note(txn: lmdb.Transaction[bytes], db: _Environment) -> int:
            sequence = _sequence_of(txn.get(_SEQUENCE, db=db.meta))
            count = int.from_bytes(txn.get(_CLEARS, b"", db=db.meta)[:8], "big")
            txn.put(namespace, sequence.to_bytes(8, "big"), db=db.meta)
            txn.put(_CLEARS, (count + 1 & (1 << 64) - 1).to_bytes(8, "big"), db=db.meta)
            return sequence

        return self._change(note)

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


def _stands(txn: lmdb.Transaction[bytes], db: _Environment, key: bytes, raw: bytes) -> bool:
    """Whether a record is sound and its slot entry names it; else it is nobody's page."""
    if not record_is_sound(raw):
        return False
    slot = slot_of(np.frombuffer(raw, dtype=RECORD)[0])
    return bool(txn.get(slot.to_bytes(8, "big"), db=db.slots) == key)


def _sequence_of(raw: bytes | None) -> int:
    """The last generation given out, as `meta` has it; 0 in a new catalog."""
    if raw is None:
        return 0
    sequence = int.from_bytes(raw, "big")
    if len(raw) != 8 or sequence >= GENERATION_MAX:
        raise CorruptionError(
            "the catalog's sequence is damaged", op="open", scope="store", hint=REPAIR_HINT
        )
    return sequence


def _split(packed: bytes, width: int) -> list[bytes]:
    return [packed[i : i + width] for i in range(0, len(packed), width)]
