"""Makes a damaged catalog anew from what its file still says, by one rule.

What counts is read from leaves that are whole pages of LMDB's and in use: all that the free list
does not name, or, where that cannot be read, those that hang below their tree's root. Of those

    records       count if their check agrees; of two under one key or on one slot the later one
    slots         are made from the records
    segments      count if they can be read; what is missing is made from the records
    namespaces    count if their digest agrees
    clears        count if they can be one
    superblock    counts if it can be decoded
    sequence      is the largest generation of a record, or what stood there if that is larger

and everything is written to a new file, sorted, which takes the place of the old one at once. What
records say is then for a verification to judge: a page counts if its bytes agree. Without a meta
page nothing says which pages are in use, and the catalog is discarded whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from tutti_core import hashing
from tutti_core.errors import TuttiError, device_error
from tutti_core.format import (
    RECORD,
    SEGMENT_BYTES,
    SUPERBLOCK_BYTES,
    SegmentEntry,
    Superblock,
    record_is_sound,
    slot_key,
)
from tutti_core.index.catalog import DATABASES, GENERATION_MAX, RECORD_KEY_BYTES, slot_of
from tutti_core.index.tree_check import Survey
from tutti_core.index.tree_file import Flaw, TreeFile, entries_of
from tutti_core.io.transport import BLOCK_BYTES

DRAFT_FOLDER = "rebuilt"
_SEGMENTS_MAX = 1 << 31
_SUPERBLOCK, _SEQUENCE = b"superblock", b"sequence"


@dataclass(slots=True)
class Rebuilt:
    """What came of it.

    records    in the new catalog.
    expected   records that the old one said it had; None where it did not say.
    superblock whether the new one has one.
    """

    records: int = 0
    expected: int | None = None
    superblock: bool = False

    @property
    def lost(self) -> int:
        """Records that could not be read, as far as is known."""
        return max((self.expected or 0) - self.records, 0)


def rebuild_catalog(folder: Path) -> Rebuilt:
    """Replace the catalog in `folder`; nobody may have it open.

    Raises
        DeviceError: the file system refused; the old file is as it was.
    Cost       one pass over the old file, and a put for each record; memory is bounded.
    """
    draft = folder / DRAFT_FOLDER
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        file = folder / "data.mdb"
        rebuilt = _write(draft, file)
        os.replace(draft / "data.mdb", file)
        (folder / "lock.mdb").unlink(missing_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, lmdb.Error) as error:
        if isinstance(error, TuttiError):
            raise
        code = getattr(error, "errno", None) or 5
        raise device_error("repair", code, device=str(folder), hint=str(error)) from None
    return rebuilt


def _write(draft: Path, file: Path) -> Rebuilt:
    size = file.stat().st_size if file.exists() else 0
    env = lmdb.open(str(draft), map_size=2 * size + (64 << 20), max_dbs=8, mode=0o600)
    try:
        db = {name: env.open_db(name) for name in sorted(DATABASES)}
        with TreeFile(file) as source:
            salvage = _Salvage(env, db)
            for raw in _leaves(source, salvage):
                salvage.take(source, raw)
            salvage.finish()
        env.sync(True)
    finally:
        env.close()
    return salvage.rebuilt


def _leaves(source: TreeFile, salvage: _Salvage) -> Iterator[bytes]:
    """Leaves that are in use, as far as that can be told."""
    try:
        survey = Survey(source, source.newest(), whole=True)
    except Flaw:
        return
    salvage.rebuilt.expected = survey.entry_count(b"records", DATABASES)
    for number in survey.leaves_in_use(DATABASES).tolist():
        yield source.page(number)


class _Salvage:
    """Puts what can be believed into a new catalog."""

    def __init__(self, env: Any, db: dict[bytes, Any]) -> None:
        self._env = env
        self._db = db
        self._sequence = 0
        self.rebuilt = Rebuilt()

    def take(self, source: TreeFile, raw: bytes) -> None:
        """One leaf, all of it in one transaction."""
        with self._env.begin(write=True) as txn:
            try:
                for key, _, value in entries_of(raw, source.value):
                    self._take_entry(txn, key, value)
            except Flaw:  # a value on pages of its own that are not there
                return

    def _take_entry(self, txn: Any, key: bytes, value: bytes) -> None:
        if len(key) == RECORD_KEY_BYTES and record_is_sound(value):
            self._take_record(txn, key, value)
        elif len(key) == RECORD_KEY_BYTES and hashing.digest(value) == key:
            txn.put(key, value, db=self._db[b"namespaces"])
        elif len(key) == 4 and len(value) == SEGMENT_BYTES and key < slot_key(_SEGMENTS_MAX, 0):
            try:
                SegmentEntry.decode(value)
            except TuttiError:
                return
            txn.put(key, value, db=self._db[b"segments"])
        elif len(key) == RECORD_KEY_BYTES and len(value) == 8:  # up to where it was cleared
            if int.from_bytes(value, "big") < GENERATION_MAX:
                txn.put(key, value, db=self._db[b"meta"])
        elif key == _SUPERBLOCK and len(value) == SUPERBLOCK_BYTES:
            try:
                Superblock.decode(value, "the catalog")
            except TuttiError:
                return
            txn.put(key, value, db=self._db[b"meta"])
            self.rebuilt.superblock = True
        elif key == _SEQUENCE and len(value) == 8:
            sequence = int.from_bytes(value, "big")
            self._sequence = max(self._sequence, sequence if sequence < GENERATION_MAX else 0)

    def _take_record(self, txn: Any, key: bytes, value: bytes) -> None:
        records, slots = self._db[b"records"], self._db[b"slots"]
        record = np.frombuffer(value, dtype=RECORD)[0]
        generation = int(record["generation"])
        if generation >= GENERATION_MAX:
            return
        place = slot_of(record).to_bytes(8, "big")
        other = txn.get(place, db=slots)
        for rival in {key, other or key}:
            known = txn.get(rival, db=records)
            if known is None:
                continue
            there = np.frombuffer(known, dtype=RECORD)[0]
            if int(there["generation"]) >= generation:
                return
            txn.delete(rival, db=records)
            txn.delete(slot_of(there).to_bytes(8, "big"), db=slots)
            self.rebuilt.records -= 1
        txn.put(key, value, db=records)
        txn.put(place, key, db=slots)
        self.rebuilt.records += 1
        self._sequence = max(self._sequence, generation)

    def finish(self) -> None:
        """Segments that lack an entry, and the sequence."""
        with self._env.begin(write=True) as txn:
            txn.put(_SEQUENCE, self._sequence.to_bytes(8, "big"), db=self._db[b"meta"])
            with txn.cursor(db=self._db[b"slots"]) as cursor:
                more = cursor.first()
                while more:
                    place, key = cursor.item()
                    segment = place[:4]
                    if txn.get(segment, db=self._db[b"segments"]) is None:
                        raw = txn.get(key, db=self._db[b"records"])
                        length = int(np.frombuffer(raw, dtype=RECORD)[0]["length_bytes"])
                        entry = SegmentEntry(0, max(-(-length // BLOCK_BYTES), 1))
                        txn.put(segment, entry.encode(), db=self._db[b"segments"])
                    more = cursor.set_range(segment + b"\xff" * 5)
