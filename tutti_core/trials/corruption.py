"""Damages every class of bytes that a store has on disk, and sees what comes of it.

A small store on files is made once; each case puts it back, damages it in one way, and asks:

- the store opens, or is refused with one of our errors that names a remedy;
- every page is bit-exact or a miss, and what the damage did not touch is a hit;
- saving works, and what is reported as saved is there;
- `verify` notices what can cost a page; `repair` brings the store back with every page that was
  not touched, and then `verify` is clean; where it refuses, `discard` does, and the store opens;
- nothing ends the process, and nothing takes forever.

Cases run in a child that reports each one, since what goes wrong may be a signal.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import select
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from tutti_core import hashing
from tutti_core.config import StoreConfig
from tutti_core.errors import TuttiError
from tutti_core.format import (
    DATA_OFFSET_BYTES,
    PART_HEADER_BYTES,
    RECORD,
    SUPERBLOCK_BYTES,
    SegmentEntry,
    Superblock,
    seal_records,
    slot_key,
)
from tutti_core.index.catalog import DATABASES
from tutti_core.index.tree_check import Survey
from tutti_core.index.tree_file import HEADER_BYTES, Flaw, TreeFile, entries_of
from tutti_core.io.transport import BLOCK_BYTES
from tutti_core.keys import PageKeys
from tutti_core.repair import Repair, repair_store
from tutti_core.store import NamespaceStore, PrefixStore
from tutti_core.testing import page_bytes
from tutti_core.tiers.parts import PartLayout
from tutti_core.tiers.pools import discard_store
from tutti_core.trials.kit import chain, finish, quiet, small_config
from tutti_core.trials.tally import Tally
from tutti_core.verify import verify_store

CASE_TIMEOUT_S = 60.0
SEGMENT_BYTES = 65536
SEGMENTS = 10
PAGES = 9  # of each namespace
PARTS = (3000, 5000, 4096)
FOREIGN_USER = 65534
_JOBS_AT_ONCE = 50

Touched = frozenset[int]
"""Pages, by their place in `Made.pages`, that a damage may cost."""


@dataclass(frozen=True, slots=True)
class Page:
    """One stored page, and where its bytes lie."""

    namespace: int
    key: bytes
    content: bytes
    record_key: bytes
    segment: int
    slot: int
    pool: int
    offset_bytes: int
    length_bytes: int


@dataclass(slots=True)
class Made:
    """A sound store on files, and what is in it."""

    path: Path
    config: StoreConfig
    namespaces: list[dict[str, Any]]
    keys: list[PageKeys]
    files: dict[Path, bytes] = field(default_factory=dict)
    pages: list[Page] = field(default_factory=list)

    @property
    def data(self) -> Path:
        """LMDB's file."""
        return self.path / "catalog" / "data.mdb"

    @property
    def pools(self) -> list[Path]:
        """The pool files."""
        return [place / "pool.tutti" for place in self.config.pool_paths]

    def everything(self) -> Touched:
        """All pages."""
        return frozenset(range(len(self.pages)))

    def put_back(self) -> None:
        """Make the store what it was."""
        for place in {self.path, *self.config.pool_paths}:
            shutil.rmtree(place, ignore_errors=True)
        for file, content in self.files.items():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(0o600)

    def overlapped(self, pool: int, start: int, stop: int) -> Touched:
        """Pages whose bytes that count lie in a range of a pool."""
        return frozenset(
            i
            for i, page in enumerate(self.pages)
            if page.pool == pool
            and any(a < stop and start < b for a, b in _counting(page, self.namespaces))
        )

    def in_segment(self, segment: int) -> Touched:
        """Pages of one segment."""
        return frozenset(i for i, p in enumerate(self.pages) if p.segment == segment)

    def of_records(self, keys: Sequence[bytes]) -> Touched:
        """Pages by their record keys."""
        wanted = set(keys)
        return frozenset(i for i, p in enumerate(self.pages) if p.record_key in wanted)


def _counting(page: Page, namespaces: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Ranges of the pool that the checksums of a page cover: not its padding."""
    parts = namespaces[page.namespace].get("parts")
    start = page.offset_bytes
    if not parts:
        return [(start, start + page.length_bytes)]
    layout = PartLayout(parts)
    return [(start, start + PART_HEADER_BYTES)] + [
        (start + at, start + at + size) for at, size in zip(layout.offset_bytes, parts, strict=True)
    ]


# ---- the store ----
def make(directory: Path, *, pools: int = 1, version: int = 2, verify: bool = True) -> Made:
    """Make a store that has pages of several sizes; read its layout back from the catalog."""
    path = directory / "store"
    places = [directory / f"pool{i}" for i in range(pools)] if pools > 1 else []
    config = small_config(
        path, segments=SEGMENTS // pools, segment=SEGMENT_BYTES, pools=places, verify=verify
    )
    namespaces: list[dict[str, Any]] = [
        {"model": "small", "page_bytes": 4096, "page_tokens": 1},
        {"model": "odd", "page_bytes": 5000, "page_tokens": 1},
    ]
    if version > 1:
        fields: dict[str, Any] = {
            "model": "parts",
            "page_bytes": sum(PARTS),
            "page_tokens": 1,
            "parts": PARTS,
        }
        namespaces.append(fields)
    keys = [chain(*[(i, n) for n in range(PAGES)]) for i in range(len(namespaces))]
    made = Made(path, config, namespaces, keys)
    with PrefixStore.open(config) as store:
        for i, one in enumerate(namespaces):
            content = b"".join(page_bytes(i, key, one["page_bytes"]) for key in keys[i])
            assert finish(store.namespace(**one).save(keys[i], content)).all()
        if pools == 1 and version > 1:  # so that LMDB's tree has seen removals, and has free pages
            gone = store.namespace(model="gone", page_bytes=4096, page_tokens=1)
            for n in range(3):
                assert finish(gone.save(chain(("gone", n)), bytes(4096))).all()
            gone.clear()
    if version == 1:
        _set_version(made, 1)
    _read_layout(made)
    folders = {path, *config.pool_paths}
    made.files = {
        file: file.read_bytes()
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file()
    }
    return made


def _set_version(made: Made, version: int) -> None:
    """Turn a store that has nothing of a later version into one of an earlier."""
    for file in made.pools:
        with file.open("r+b") as stream:
            superblock = Superblock.decode(stream.read(SUPERBLOCK_BYTES), "pool")
            stream.seek(0)
            stream.write(replace(superblock, version=version).encode())
    with databases(made) as (txn, db):
        superblock = Superblock.decode(txn.get(b"superblock", db=db["meta"]), "catalog")
        txn.put(b"superblock", replace(superblock, version=version).encode(), db=db["meta"])


def _read_layout(made: Made) -> None:
    pools = len(made.pools)
    with databases(made, write=False) as (txn, db):
        for i, fields in enumerate(made.namespaces):
            digest = _digest(made, txn, db, fields["model"])
            for key in made.keys[i]:
                record_key = hashing.record_keys(digest, key, len(key))
                record = np.frombuffer(txn.get(record_key, db=db["records"]), dtype=RECORD)[0]
                segment, slot = int(record["segment"]), int(record["slot"])
                length = int(record["length_bytes"])
                made.pages.append(
                    Page(
                        namespace=i,
                        key=key,
                        content=page_bytes(i, key, fields["page_bytes"]),
                        record_key=record_key,
                        segment=segment,
                        slot=slot,
                        pool=segment % pools,
                        offset_bytes=DATA_OFFSET_BYTES
                        + segment // pools * SEGMENT_BYTES
                        + slot * (-(-length // BLOCK_BYTES) * BLOCK_BYTES),
                        length_bytes=length,
                    )
                )


def _digest(made: Made, txn: Any, db: dict[str, Any], model: str) -> bytes:
    with txn.cursor(db=db["namespaces"]) as cursor:
        return next(bytes(k) for k, text in cursor if f'"model":"{model}"'.encode() in bytes(text))


@contextmanager
def databases(made: Made, write: bool = True) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A transaction on a closed store's catalog, and its databases by name."""
    env = lmdb.open(str(made.data.parent), max_dbs=8, map_size=64 << 20)
    try:
        db = {name.decode(): env.open_db(name) for name in sorted(DATABASES)}
        with env.begin(write=write) as txn:
            yield txn, db
    finally:
        env.close()


# ---- damage ----
@dataclass(frozen=True, slots=True)
class Case:
    """One damage.

    kind       class of bytes, as it is counted.
    apply      does it; returns the pages that it may cost.
    hidden     whether it costs no page and a verification need not notice it.
    by_hand    whether somebody has to move something away, or back, before a command helps.
    silent     whether pages may be gone without a trace, as the catalog is one of another time.
    """

    kind: str
    apply: Callable[[Made, random.Random], Touched]
    hidden: bool = False
    by_hand: bool = False
    silent: bool = False


NONE: Touched = frozenset()
SUPERBLOCK_FIELDS = {
    "magic": (0, 8),
    "version": (8, 4),
    "flags": (12, 4),
    "store_id": (16, 16),
    "secret": (32, 16),
    "pool_index": (48, 4),
    "pool_count": (52, 4),
    "segment_bytes": (56, 8),
    "segment_count": (64, 8),
    "data_offset": (72, 8),
    "zeros": (80, 4008),
    "check": (4088, 8),
}
RECORD_FIELDS = {name: (int(at[1]), at[0].itemsize) for name, at in RECORD.fields.items()}  # type: ignore[union-attr]
PART_FIELDS = {
    "magic": (0, 8),
    "parts": (8, 4),
    "reserved": (12, 4),
    "page_key": (16, 32),
    "namespace": (48, 16),
    "checksums": (64, 8 * len(PARTS)),
    "rest": (64 + 8 * len(PARTS), 4032 - 8 * len(PARTS)),
}


def spoil(raw: bytes, start: int, length: int, rng: random.Random) -> bytes:
    """Change a range of bytes: flip a bit or all, set it to zeros, ones or noise; never nothing."""
    data = bytearray(raw)
    old = raw[start : start + length]
    how = rng.choice(["bit", "bit", "bit", "invert", "zero", "ones", "noise"])
    if how == "zero":
        new = bytes(length)
    elif how == "ones":
        new = b"\xff" * length
    elif how == "noise":
        new = rng.randbytes(length)
    elif how == "invert":
        new = bytes(byte ^ 0xFF for byte in old)
    else:
        new = old
    if new == old:
        at = rng.randrange(length)
        new = old[:at] + bytes([old[at] ^ 1 << rng.randrange(8)]) + old[at + 1 :]
    data[start : start + length] = new
    return bytes(data)


def _spoil_file(file: Path, start: int, length: int, rng: random.Random) -> None:
    raw = file.read_bytes()
    file.write_bytes(spoil(raw, start, length, rng))


def superblock_cases() -> Iterator[Case]:
    """Each field of the superblock, of a pool and of the catalog's copy."""
    for name, (start, length) in SUPERBLOCK_FIELDS.items():

        def in_pool(made: Made, rng: random.Random, at: int = start, size: int = length) -> Touched:
            _spoil_file(rng.choice(made.pools), at, size, rng)
            return NONE

        def in_catalog(
            made: Made, rng: random.Random, at: int = start, size: int = length
        ) -> Touched:
            with databases(made) as (txn, db):
                raw = txn.get(b"superblock", db=db["meta"])
                txn.put(b"superblock", spoil(raw, at, size, rng), db=db["meta"])
            return NONE

        yield Case(f"superblock.{name}", in_pool)
        yield Case(f"catalog.superblock.{name}", in_catalog)

    def whole(made: Made, rng: random.Random) -> Touched:
        file = rng.choice(made.pools)
        file.write_bytes(bytes(SUPERBLOCK_BYTES) + file.read_bytes()[SUPERBLOCK_BYTES:])
        return NONE

    def noise(made: Made, rng: random.Random) -> Touched:
        file = rng.choice(made.pools)
        file.write_bytes(rng.randbytes(SUPERBLOCK_BYTES) + file.read_bytes()[SUPERBLOCK_BYTES:])
        return made.everything()

    def behind(made: Made, rng: random.Random) -> Touched:
        at = rng.randrange(SUPERBLOCK_BYTES, DATA_OFFSET_BYTES)
        _spoil_file(rng.choice(made.pools), at, 1, rng)
        return NONE

    yield Case("superblock.zeroed", whole)
    yield Case("superblock.noise", noise, by_hand=True)
    yield Case("pool.reserved", behind, hidden=True)


def payload_cases(parts: bool) -> Iterator[Case]:
    """Page bytes, padding, free space; where there are pages in parts, their headers and parts."""

    def pick(made: Made, rng: random.Random, parts: bool) -> Page:
        fitting = [
            p for p in made.pages if bool(made.namespaces[p.namespace].get("parts")) == parts
        ]
        return rng.choice(fitting)

    def damage(made: Made, page: Page, at: int, length: int, rng: random.Random) -> Touched:
        start = page.offset_bytes + at
        _spoil_file(made.pools[page.pool], start, length, rng)
        return made.overlapped(page.pool, start, start + length)

    def byte(made: Made, rng: random.Random) -> Touched:
        page = pick(made, rng, False)
        return damage(made, page, rng.randrange(page.length_bytes), 1, rng)

    def page_whole(made: Made, rng: random.Random) -> Touched:
        page = pick(made, rng, False)
        return damage(made, page, 0, page.length_bytes, rng)

    def padding(made: Made, rng: random.Random) -> Touched:
        page = next(p for p in made.pages if p.length_bytes == 5000)
        return damage(made, page, 5000, BLOCK_BYTES * 2 - 5000, rng)

    def part(made: Made, rng: random.Random) -> Touched:
        page = pick(made, rng, True)
        start, stop = rng.choice(_counting(page, made.namespaces)[1:])
        return damage(made, page, rng.randrange(start, stop) - page.offset_bytes, 1, rng)

    def swap(made: Made, rng: random.Random) -> Touched:
        """Two pages of one size in each other's place: each sound, neither where it belongs."""
        one = pick(made, rng, False)
        other = rng.choice([p for p in made.pages if p.namespace == one.namespace and p != one])
        file, second = made.pools[one.pool], made.pools[other.pool]
        length = one.length_bytes
        a = file.read_bytes()[one.offset_bytes :][:length]
        b = second.read_bytes()[other.offset_bytes :][:length]
        for target, at, content in (
            (file, one.offset_bytes, b),
            (second, other.offset_bytes, a),
        ):
            with target.open("r+b") as stream:
                stream.seek(at)
                stream.write(content)
        return made.of_records([one.record_key, other.record_key])

    def segment(made: Made, rng: random.Random) -> Touched:
        page = rng.choice(made.pages)
        start = DATA_OFFSET_BYTES + page.segment // len(made.pools) * SEGMENT_BYTES
        _spoil_file(made.pools[page.pool], start, SEGMENT_BYTES, rng)
        return made.in_segment(page.segment)

    yield Case("payload.byte", byte)
    yield Case("payload.page", page_whole)
    yield Case("payload.padding", padding, hidden=True)
    yield Case("payload.swapped", swap)
    yield Case("payload.segment", segment, hidden=True)
    if not parts:
        return
    yield Case("payload.part", part)
    for name, (start, length) in PART_FIELDS.items():

        def in_header(
            made: Made, rng: random.Random, at: int = start, size: int = length
        ) -> Touched:
            return damage(made, pick(made, rng, True), at, size, rng)

        yield Case(f"part_header.{name}", in_header)


def record_cases() -> Iterator[Case]:
    """Each field of a record: as a disk damages it, and as a fault of ours would write it."""

    def change(
        made: Made, rng: random.Random, edit: Callable[[bytes], bytes], sealed: bool
    ) -> Touched:
        page = rng.choice(made.pages)
        with databases(made) as (txn, db):
            raw = edit(txn.get(page.record_key, db=db["records"]))
            if sealed:
                record = np.frombuffer(raw, dtype=RECORD).copy()
                seal_records(record)
                raw = record.tobytes()
            txn.put(page.record_key, raw, db=db["records"])
        return made.of_records([page.record_key])

    for name, (start, length) in RECORD_FIELDS.items():
        for sealed in (False, True):

            def field_case(
                made: Made,
                rng: random.Random,
                at: int = start,
                size: int = length,
                sealed: bool = sealed,
            ) -> Touched:
                return change(made, rng, lambda raw: spoil(raw, at, size, rng), sealed)

            if not sealed or name != "check":
                kind = f"record.{name}{'.sealed' if sealed else ''}"
                harmless = sealed and name in ("parent", "generation")
                older = sealed and name == "generation"  # it may be one that was cleared
                yield Case(kind, field_case, hidden=harmless, silent=older)

    def shortened(made: Made, rng: random.Random) -> Touched:
        return change(made, rng, lambda raw: raw[: rng.randrange(1, len(raw))], False)

    def lengthened(made: Made, rng: random.Random) -> Touched:
        return change(made, rng, lambda raw: raw + rng.randbytes(rng.randrange(1, 9)), False)

    def doubled(made: Made, rng: random.Random) -> Touched:
        """Two records on one slot."""
        page = rng.choice(made.pages)
        with databases(made) as (txn, db):
            key = rng.randbytes(16)
            txn.put(key, txn.get(page.record_key, db=db["records"]), db=db["records"])
        return NONE

    def of_another(made: Made, rng: random.Random) -> Touched:
        """A record under the key of another."""
        one, other = rng.sample(made.pages, 2)
        with databases(made) as (txn, db):
            raw = txn.get(other.record_key, db=db["records"])
            txn.put(one.record_key, raw, db=db["records"])
        return made.of_records([one.record_key])

    def beyond(made: Made, rng: random.Random) -> Touched:
        def edit(raw: bytes) -> bytes:
            record = np.frombuffer(raw, dtype=RECORD).copy()
            record["segment"] = SEGMENTS + rng.randrange(3)
            return record.tobytes()

        return change(made, rng, edit, True)

    yield Case("record.shortened", shortened)
    yield Case("record.lengthened", lengthened)
    yield Case("record.doubled", doubled)
    yield Case("record.of_another", of_another)
    yield Case("record.beyond", beyond)
    yield Case("record.deleted", _delete("records"), silent=True)


def _delete(table: str) -> Callable[[Made, random.Random], Touched]:
    def apply(made: Made, rng: random.Random) -> Touched:
        page = rng.choice(made.pages)
        with databases(made) as (txn, db):
            key = _key_of(made, txn, db, table, page)
            txn.delete(key, db=db[table])
        if table == "namespaces":
            return _of_namespace(made, page.namespace)
        return made.in_segment(page.segment) if table == "segments" else _one(made, page)

    return apply


def _one(made: Made, page: Page) -> Touched:
    return made.of_records([page.record_key])


def _of_namespace(made: Made, namespace: int) -> Touched:
    return frozenset(i for i, p in enumerate(made.pages) if p.namespace == namespace)


def _key_of(made: Made, txn: Any, db: dict[str, Any], table: str, page: Page) -> bytes:
    if table == "records":
        return page.record_key
    if table == "slots":
        return slot_key(page.segment, page.slot)
    if table == "segments":
        return slot_key(page.segment, 0)[:4]
    return _digest(made, txn, db, made.namespaces[page.namespace]["model"])


def table_cases() -> Iterator[Case]:
    """Keys and values of the other tables: slots, segments, namespaces, meta."""
    for table in ("slots", "segments", "namespaces"):

        def value(made: Made, rng: random.Random, table: str = table) -> Touched:
            page = rng.choice(made.pages)
            with databases(made) as (txn, db):
                key = _key_of(made, txn, db, table, page)
                raw = txn.get(key, db=db[table])
                at = rng.randrange(len(raw))
                txn.put(key, spoil(raw, at, 1, rng), db=db[table])
            return _reach(made, table, page)

        def other_key(made: Made, rng: random.Random, table: str = table) -> Touched:
            page = rng.choice(made.pages)
            with databases(made) as (txn, db):
                key = _key_of(made, txn, db, table, page)
                raw = txn.pop(key, db=db[table])
                txn.put(spoil(key, rng.randrange(len(key)), 1, rng), raw, db=db[table])
                hit = bytes(raw) if table == "slots" else b""
            reach = _reach(made, table, page)
            if table == "slots":  # it may have taken the place of another page's entry
                with databases(made, write=False) as (txn, db):
                    kept = {bytes(v) for _, v in txn.cursor(db=db["slots"])}
                lost = [p.record_key for p in made.pages if p.record_key not in kept]
                reach |= made.of_records([*lost, hit])
            return made.everything() if table == "segments" else reach

        def short(made: Made, rng: random.Random, table: str = table) -> Touched:
            page = rng.choice(made.pages)
            with databases(made) as (txn, db):
                key = _key_of(made, txn, db, table, page)
                raw = txn.get(key, db=db[table])
                txn.put(key, raw[: rng.randrange(1, len(raw))], db=db[table])
            return _reach(made, table, page)

        yield Case(f"{table}.value", value, hidden=table == "segments")
        yield Case(f"{table}.key", other_key)
        yield Case(f"{table}.shortened", short)
        yield Case(f"{table}.deleted", _delete(table))

    def recut(made: Made, rng: random.Random) -> Touched:
        page = rng.choice(made.pages)
        with databases(made) as (txn, db):
            key = _key_of(made, txn, db, "segments", page)
            entry = SegmentEntry.decode(txn.get(key, db=db["segments"]))
            blocks = rng.choice([1, 2, 3, 4, 5, 1 << 31, entry.slot_blocks + 1])
            blocks += blocks == entry.slot_blocks
            txn.put(key, SegmentEntry(entry.lease, blocks).encode(), db=db["segments"])
        return made.in_segment(page.segment)

    def orphan_slots(made: Made, rng: random.Random) -> Touched:
        """Slots that are in use and hold nothing: leaked."""
        with databases(made) as (txn, db):
            for _ in range(5):
                place = slot_key(rng.randrange(2 * SEGMENTS), rng.randrange(20))
                txn.put(place, rng.randbytes(16), db=db["slots"], overwrite=False)
        return NONE

    def orphan_segment(made: Made, rng: random.Random) -> Touched:
        with databases(made) as (txn, db):
            key = slot_key(rng.choice([SEGMENTS - 1, SEGMENTS, 1 << 31]), 0)[:4]
            entry = SegmentEntry(rng.randrange(5), rng.randrange(1, 30))
            txn.put(key, entry.encode(), db=db["segments"], overwrite=False)
        return NONE

    def other_namespace(made: Made, rng: random.Random) -> Touched:
        """The description of one namespace under the digest of another."""
        one, other = rng.sample(range(len(made.namespaces)), 2)
        with databases(made) as (txn, db):
            names = [_digest(made, txn, db, n["model"]) for n in made.namespaces]
            text = txn.get(names[other], db=db["namespaces"])
            txn.put(names[one], text, db=db["namespaces"])
        return _of_namespace(made, one)

    yield Case("segments.recut", recut)
    yield Case("slots.orphans", orphan_slots)
    yield Case("segments.orphan", orphan_segment, hidden=True)
    yield Case("namespaces.exchanged", other_namespace)
    yield from _meta_cases()


def _reach(made: Made, table: str, page: Page) -> Touched:
    if table == "namespaces":
        return _of_namespace(made, page.namespace)
    return made.in_segment(page.segment) if table == "segments" else _one(made, page)


def _meta_cases() -> Iterator[Case]:
    def sequence(made: Made, rng: random.Random) -> Touched:
        with databases(made) as (txn, db):
            raw = txn.get(b"sequence", db=db["meta"])
            txn.put(b"sequence", spoil(raw, 0, 8, rng), db=db["meta"])
        return NONE

    def short(made: Made, rng: random.Random) -> Touched:
        with databases(made) as (txn, db):
            txn.put(b"sequence", rng.randbytes(rng.randrange(8)), db=db["meta"])
        return NONE

    def deleted(name: bytes) -> Callable[[Made, random.Random], Touched]:
        def apply(made: Made, rng: random.Random) -> Touched:
            with databases(made) as (txn, db):
                txn.delete(name, db=db["meta"])
            return NONE

        return apply

    yield Case("meta.sequence", sequence, hidden=True)  # a larger one is as good
    yield Case("meta.sequence.shortened", short)
    yield Case("meta.sequence.deleted", deleted(b"sequence"))
    yield Case("meta.superblock.deleted", deleted(b"superblock"))

    def cleared(made: Made, rng: random.Random) -> Touched:
        """Up to where a namespace was cleared: later, and pages that were saved since are gone."""
        i = rng.randrange(len(made.namespaces))
        with databases(made) as (txn, db):
            digest = _digest(made, txn, db, made.namespaces[i]["model"])
            raw = txn.get(digest, bytes(8), db=db["meta"])
            txn.put(digest, spoil(raw, 0, 8, rng)[: rng.randrange(4, 9)], db=db["meta"])
        return _of_namespace(made, i)

    def clears(made: Made, rng: random.Random) -> Touched:
        with databases(made) as (txn, db):
            txn.put(b"clears", rng.randbytes(rng.randrange(1, 12)), db=db["meta"])
        return NONE

    yield Case("meta.cleared", cleared, hidden=True, silent=True)
    yield Case("meta.clears", clears, hidden=True)


def lmdb_cases() -> Iterator[Case]:
    """LMDB's own bytes: meta pages, page headers, offsets, nodes, keys, whole pages."""

    def reach(made: Made, pages: Sequence[int]) -> Touched:
        """Pages whose records, or whose namespaces' descriptions, lie in these pages of LMDB's."""
        if min(pages) < 2:
            return made.everything()
        lost: set[bytes] = set()
        with TreeFile(made.data) as source:
            size = source.meta().page_bytes
        raw = made.files[made.data]
        touched: Touched = NONE
        for number in pages:
            page = raw[number * size : (number + 1) * size]
            if len(page) < size or page[10:12] != b"\x02\0":
                continue  # what is not a leaf can be done without
            try:
                keys = [(key, value) for key, _, value in entries_of(page, _no_value)]
            except (Flaw, struct.error):
                continue
            lost |= {value if len(key) == 8 else key for key, value in keys}
            for key, _ in keys:
                if len(key) == 4:
                    touched |= made.in_segment(int.from_bytes(key, "big"))
            for i, fields in enumerate(made.namespaces):
                if any(f'"model":"{fields["model"]}"'.encode() in value for _, value in keys):
                    touched |= _of_namespace(made, i)
        return touched | made.of_records(list(lost))

    def pick(made: Made, rng: random.Random) -> tuple[int, int]:
        """A page in use, and the size of pages."""
        with TreeFile(made.data) as source:
            meta = source.meta()
            survey = Survey(source, meta)
            survey.check(DATABASES)
            return rng.choice(survey.pages_in_use()), meta.page_bytes

    def at_places(
        find: Callable[[bytes, random.Random], tuple[int, int]],
    ) -> Callable[[Made, random.Random], Touched]:
        def apply(made: Made, rng: random.Random) -> Touched:
            number, size = pick(made, rng)
            page = made.data.read_bytes()[number * size : (number + 1) * size]
            start, length = find(page, rng)
            _spoil_file(made.data, number * size + start, length, rng)
            return reach(made, [number])

        return apply

    def header(page: bytes, rng: random.Random) -> tuple[int, int]:
        return rng.choice([(0, 8), (8, 2), (10, 2), (12, 2), (14, 2)])

    def node(page: bytes, rng: random.Random) -> int:
        (lower,) = struct.unpack_from("<H", page, 12)
        count = max((min(lower, len(page)) - HEADER_BYTES) // 2, 1)
        (at,) = struct.unpack_from("<H", page, HEADER_BYTES + 2 * rng.randrange(count))
        return int(min(at, len(page) - 32))

    def pointer(page: bytes, rng: random.Random) -> tuple[int, int]:
        (lower,) = struct.unpack_from("<H", page, 12)
        count = max((min(lower, len(page)) - HEADER_BYTES) // 2, 1)
        return HEADER_BYTES + 2 * rng.randrange(count), 2

    def node_header(page: bytes, rng: random.Random) -> tuple[int, int]:
        return node(page, rng) + rng.choice([0, 2, 4, 6]), 2

    def key(page: bytes, rng: random.Random) -> tuple[int, int]:
        return node(page, rng) + 8 + rng.randrange(4), 1

    def value(page: bytes, rng: random.Random) -> tuple[int, int]:
        return min(node(page, rng) + 24 + rng.randrange(16), len(page) - 1), 1

    def anywhere(page: bytes, rng: random.Random) -> tuple[int, int]:
        return rng.randrange(len(page)), 1

    def whole(page: bytes, rng: random.Random) -> tuple[int, int]:
        return 0, len(page)

    yield Case("lmdb.header", at_places(header), hidden=True)
    yield Case("lmdb.pointer", at_places(pointer), hidden=True)
    yield Case("lmdb.node", at_places(node_header), hidden=True)
    yield Case("lmdb.key", at_places(key), hidden=True)
    yield Case("lmdb.value", at_places(value), hidden=True)
    yield Case("lmdb.anywhere", at_places(anywhere), hidden=True)
    yield Case("lmdb.page", at_places(whole), hidden=True)

    def meta_field(made: Made, rng: random.Random) -> Touched:
        _spoil_file(made.data, rng.randrange(2) * 4096 + rng.randrange(168), 1, rng)
        return made.everything()

    def both_metas(made: Made, rng: random.Random) -> Touched:
        _spoil_file(made.data, 0, 8192, rng)
        return made.everything()

    def exchanged(made: Made, rng: random.Random) -> Touched:
        """Two pages in each other's place, as after a misdirected write."""
        (one, size), (other, _) = pick(made, rng), pick(made, rng)
        if one == other:
            return NONE
        raw = bytearray(made.data.read_bytes())
        a, b = slice(one * size, (one + 1) * size), slice(other * size, (other + 1) * size)
        raw[a], raw[b] = raw[b], raw[a]
        made.data.write_bytes(raw)
        return made.everything()

    def free_page(made: Made, rng: random.Random) -> Touched:
        with TreeFile(made.data) as source:
            meta = source.meta()
            survey = Survey(source, meta)
            survey.check(DATABASES)
            used = set(survey.pages_in_use())
        free = [n for n in range(2, meta.last_page + 1) if n not in used]
        if free:
            number = rng.choice(free) * meta.page_bytes
            _spoil_file(made.data, number, meta.page_bytes, rng)
        return NONE

    def run_of_pages(made: Made, rng: random.Random) -> Touched:
        number, size = pick(made, rng)
        raw = made.data.read_bytes()
        last = min(number + rng.randrange(2, 6), len(raw) // size)
        made.data.write_bytes(spoil(raw, number * size, (last - number) * size, rng))
        return made.everything()

    yield Case("lmdb.meta", meta_field, hidden=True, silent=True)
    yield Case("lmdb.metas", both_metas, hidden=True, silent=True)
    yield Case("lmdb.exchanged", exchanged, hidden=True)
    yield Case("lmdb.free", free_page, hidden=True)
    yield Case("lmdb.run", run_of_pages, hidden=True)


def _no_value(page: int, length_bytes: int) -> bytes:
    raise Flaw("a value on pages of its own")


def file_cases(made: Made) -> Iterator[Case]:
    """Files that are cut, longer, empty, gone, something else, or of another store or time."""
    size = len(made.files[made.data])
    pages = [0, 4096, 8192, size // 8192 * 4096, size - 4096, size]
    for cut in sorted({n + d for n in pages for d in (-1, 0, 1) if 0 <= n + d < size}):

        def cut_catalog(made: Made, rng: random.Random, cut: int = cut) -> Touched:
            os.truncate(made.data, cut)
            return made.everything()

        yield Case("file.catalog.cut", cut_catalog, hidden=cut > 8192)  # what is cut may be free
    length = len(made.files[made.pools[0]])
    first = min(p.offset_bytes for p in made.pages)
    places = [0, 4096, DATA_OFFSET_BYTES, first + 4096, DATA_OFFSET_BYTES + SEGMENT_BYTES, length]
    for cut in sorted({n + d for n in places for d in (-1, 0, 1) if 0 <= n + d < length}):

        def cut_pool(made: Made, rng: random.Random, cut: int = cut) -> Touched:
            pool = rng.randrange(len(made.pools))
            os.truncate(made.pools[pool], cut)
            return made.everything() if cut < 4096 else made.overlapped(pool, cut, 1 << 62)

        yield Case("file.pool.cut", cut_pool, by_hand=cut < 4096)

    for more in (1, 4096, 1 << 20):

        def longer(made: Made, rng: random.Random, more: int = more) -> Touched:
            with rng.choice([made.data, *made.pools]).open("ab") as stream:
                stream.write(rng.randbytes(more))
            return NONE

        yield Case("file.longer", longer, hidden=True)

    for name, pick in _named_files(made):

        def gone(made: Made, rng: random.Random, pick: Path = pick) -> Touched:
            pick.unlink()
            return NONE if pick.name.startswith("lock") else made.everything()

        yield Case(f"file.{name}.missing", gone, hidden=True, by_hand=True)
        for kind in ("directory", "symlink", "fifo", "socket"):

            def replaced(
                made: Made, rng: random.Random, pick: Path = pick, kind: str = kind
            ) -> Touched:
                _replace(pick, kind)
                return made.everything()

            yield Case(f"file.{name}.{kind}", replaced, hidden=True, by_hand=True)

    def lock_noise(made: Made, rng: random.Random) -> Touched:
        file = made.data.with_name("lock.mdb")
        length = file.stat().st_size
        if rng.random() < 0.5:
            os.truncate(file, rng.randrange(length))
        else:
            file.write_bytes(rng.randbytes(rng.randrange(2 * length)))
        return NONE

    def folder_gone(made: Made, rng: random.Random) -> Touched:
        shutil.rmtree(made.path / rng.choice(["catalog", "leases"]))
        return made.everything()

    yield Case("file.lock_mdb.noise", lock_noise, hidden=True)
    yield Case("file.folder.missing", folder_gone, hidden=True, by_hand=True)


def _named_files(made: Made) -> list[tuple[str, Path]]:
    return [
        ("catalog", made.data),
        ("lock_mdb", made.data.with_name("lock.mdb")),
        ("pool", made.pools[-1]),
        ("lock", made.path / "lock"),
        ("lease", made.path / "leases" / "0.lock"),
    ]


def _replace(file: Path, kind: str) -> None:
    """Put something that is no file of the store in a file's place."""
    aside = file.with_name(f"{file.name}.aside")
    file.rename(aside)
    if kind == "directory":
        file.mkdir()
    elif kind == "symlink":
        file.symlink_to(aside.name)
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        with socket.socket(socket.AF_UNIX) as end:
            descriptor = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:  # the name of a socket has a bound
                end.bind(f"/proc/self/fd/{descriptor}/{file.name}")
            finally:
                os.close(descriptor)


def mixed_cases(other: Made, older: Made) -> Iterator[Case]:
    """Pools and catalogs that do not belong together.

    Parameters
        other: another store of the same layout.
        older: the same store before its later pages were saved over earlier ones.
    """

    def swapped(made: Made, rng: random.Random) -> Touched:
        one, two = made.pools[0], made.pools[-1]
        aside = one.with_name("aside")
        one.rename(aside)
        two.rename(one)
        aside.rename(two)
        return NONE

    def foreign(made: Made, rng: random.Random) -> Touched:
        i = rng.randrange(len(made.pools))
        made.pools[i].write_bytes(other.files[other.pools[i]])
        return NONE

    def foreign_catalog(made: Made, rng: random.Random) -> Touched:
        made.data.write_bytes(other.files[other.data])
        return NONE

    def old_catalog(made: Made, rng: random.Random) -> Touched:
        made.data.write_bytes(older.files[older.data])
        return made.everything()

    def old_pool(made: Made, rng: random.Random) -> Touched:
        for pool, source in zip(made.pools, older.pools, strict=True):
            pool.write_bytes(older.files[source])
        return made.everything()

    if len(other.pools) > 1:
        yield Case("mixed.pools_exchanged", swapped, by_hand=True)
    yield Case("mixed.foreign_pool", foreign, by_hand=True)
    yield Case("mixed.foreign_catalog", foreign_catalog, by_hand=True)
    yield Case("mixed.old_catalog", old_catalog, hidden=True, silent=True)
    yield Case("mixed.old_pool", old_pool, hidden=True)


# ---- judging ----
def judge(made: Made, case: Case, seed: int, tally: Tally) -> None:
    """Try one case in all ways; what must not happen is a complaint."""
    tally.bad_inputs[case.kind] += 1
    what = f"{case.kind} (seed {seed})"

    def damage() -> Touched:
        made.put_back()
        return case.apply(made, random.Random(seed))

    damage()
    noticed = _verify(made, what, tally)
    if not noticed and not case.hidden:
        tally.complain(f"{what}: verify says that it is clean")
    touched = damage()
    missed = _use(made, what, tally)
    if missed is not None and missed - touched:
        pages = [made.pages[i].key.hex()[:8] for i in sorted(missed - touched)]
        tally.lose(f"{what}: opened without pages {pages}", len(missed - touched))
    if missed and not noticed and not case.silent:
        tally.complain(f"{what}: {len(missed)} pages are gone and verify says that it is clean")
    touched = damage()
    repaired = _repair(made, what, tally)
    if repaired is not None:
        if _verify(made, what, tally):
            tally.complain(f"{what}: verify is not clean after a repair")
        missed = _use(made, f"{what}, repaired", tally)
        if missed is None:
            tally.complain(f"{what}: refused after a repair")
        else:
            _judge_repair(made, case, repaired, missed, touched, what, tally)
    elif not case.by_hand:
        tally.complain(f"{what}: cannot be repaired")
    else:
        _start_anew(made, what, tally)


def _judge_repair(
    made: Made,
    case: Case,
    repaired: Repair,
    missed: Touched,
    touched: Touched,
    what: str,
    tally: Tally,
) -> None:
    if missed - touched:
        tally.lose(f"{what}: a repair dropped good pages", len(missed - touched))
    told = sum(loss.pages for loss in repaired.lost.values())
    if told != repaired.pages_lost:
        tally.complain(f"{what}: {repaired.pages_lost} pages lost, {told} by namespace")
    if len(missed) > repaired.pages_lost and not case.silent and not repaired.rebuilt:
        tally.complain(f"{what}: {len(missed)} pages lost, {repaired.pages_lost} reported")


def _verify(made: Made, what: str, tally: Tally) -> bool:
    """Whether a verification notices anything."""
    try:
        report = verify_store(made.path, made.config.pools, transport="posix")
    except TuttiError as error:
        _judge_error(error, f"{what}, verify", tally)
        return True
    except Exception as error:
        tally.complain(f"{what}: verify raised {error!r}")
        return True
    return not report.clean


def _repair(made: Made, what: str, tally: Tally) -> Repair | None:
    try:
        return repair_store(made.path, made.config.pools, transport="posix")
    except TuttiError as error:
        _judge_error(error, f"{what}, repair", tally)
    except Exception as error:
        tally.complain(f"{what}: repair raised {error!r}")
    return None


def _judge_error(error: TuttiError, what: str, tally: Tally) -> None:
    """A refusal says what is wrong and what helps."""
    if not str(error).strip() or not error.hint:
        tally.complain(f"{what}: refused without a hint: {error}")


def _use(made: Made, what: str, tally: Tally) -> Touched | None:
    """Open, load everything, save everything, load again; returns what was missing at first.

    None where the store is refused.
    """
    try:
        store = PrefixStore.open(made.config)
    except TuttiError as error:
        _judge_error(error, what, tally)
        return None
    except Exception as error:
        tally.complain(f"{what}: open raised {error!r}")
        return None
    missed: set[int] = set()
    try:
        with store:
            if not store.wait_restored(20):
                tally.complain(f"{what}: the index is not restored")
            for i in range(len(made.namespaces)):
                missed |= _use_namespace(made, store, i, what, tally)
            if store.stats().counters.get("internal_errors", 0):
                tally.complain(f"{what}: an internal error")
    except TuttiError as error:
        _judge_error(error, f"{what}, in use", tally)
        return None
    except Exception as error:
        tally.complain(f"{what}: use raised {error!r}")
        return None
    return frozenset(missed)


def _use_namespace(made: Made, store: PrefixStore, i: int, what: str, tally: Tally) -> set[int]:
    pages = store.namespace(**made.namespaces[i])
    there = _load(made, pages, i, what, tally)
    first = i * PAGES
    missed = {first + n for n in range(PAGES) if not there[n]}
    content = b"".join(page.content for page in made.pages[first : first + PAGES])
    saved = finish(pages.save(made.keys[i], content))
    again = _load(made, pages, i, f"{what}, after saving", tally)
    for n in np.flatnonzero(np.asarray(saved) & ~np.asarray(again)):
        if not there[n]:
            tally.lose(f"{what}: page {n} of namespace {i} was saved and is missing")
    return missed


def _load(made: Made, pages: NamespaceStore, i: int, what: str, tally: Tally) -> list[bool]:
    size = pages.namespace.page_bytes
    memory = bytearray(PAGES * size)
    keys = made.keys[i]
    start = pages.load_parts if pages.namespace.parts else pages.load
    there = [bool(good) for good in finish(start(keys, memory))]
    for n, good in enumerate(there):
        if good:
            page = made.pages[i * PAGES + n]
            got = bytes(memory[n * size : (n + 1) * size])
            tally.compare(got, page.content, f"{what}: page {n} of namespace {i}")
        else:
            tally.misses += 1
    return there


def _start_anew(made: Made, what: str, tally: Tally) -> None:
    """What a refusal leaves: move away what is not a file, discard, open."""
    for _, file in _named_files(made):
        if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    for pool in made.pools:
        if pool.is_file() and pool.read_bytes()[:8] != b"TUTTIPOL":
            pool.unlink()
    try:
        discard_store(made.config)
    except TuttiError as error:
        _judge_error(error, f"{what}, discard", tally)
        for pool in made.pools:  # another store's
            pool.unlink(missing_ok=True)
        discard_store(made.config)
    if _use(made, f"{what}, discarded", tally) is None:
        tally.complain(f"{what}: refused after it was discarded")


# ---- running ----
def all_cases(made: Made, other: Made, older: Made) -> list[Case]:
    """Every case that this store can have."""
    return [
        *superblock_cases(),
        *payload_cases(any("parts" in fields for fields in made.namespaces)),
        *record_cases(),
        *table_cases(),
        *lmdb_cases(),
        *file_cases(made),
        *mixed_cases(other, older),
    ]


def run_cases(made: Made, jobs: Sequence[tuple[Case, int]]) -> Tally:
    """Judge cases, each with its seed, in children; one that dies or hangs is a complaint."""
    tally = Tally()
    at = 0
    while at < len(jobs):
        at = _run_child(made, jobs, at, tally)
    return tally


def _run_child(made: Made, jobs: Sequence[tuple[Case, int]], at: int, tally: Tally) -> int:
    """Run cases from `at` on in one child until it ends; returns the first that is left."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            faulthandler.disable()  # that it may end by a signal is what is tried
            with quiet():
                for case, seed in jobs[at:]:
                    one = Tally()
                    try:
                        judge(made, case, seed, one)
                    except Exception as error:
                        one.complain(f"{case.kind} (seed {seed}): the trial failed: {error!r}")
                    report = pickle.dumps(one)
                    os.write(writing, struct.pack("<I", len(report)) + report)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as stream:
            while at < len(jobs) and (done := _next_report(stream)) is not None:
                tally.add(done)
                at += 1
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if at < len(jobs):
        case, seed = jobs[at]
        tally.bad_inputs[case.kind] += 1
        end = f"after {CASE_TIMEOUT_S:.0f} s or by status {status}"
        tally.complain(f"{case.kind} (seed {seed}): the process ended {end}")
        at += 1
    return at


def _next_report(stream: Any) -> Tally | None:
    """The next case's counts; None when the child has ended or takes too long."""
    head = _read(stream, 4)
    if head is None:
        return None
    body = _read(stream, struct.unpack("<I", head)[0])
    if body is None:
        return None
    one: Tally = pickle.loads(body)
    return one


def _read(stream: Any, length_bytes: int) -> bytes | None:
    data = b""
    deadline_s = time.monotonic() + CASE_TIMEOUT_S
    while len(data) < length_bytes:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        if not select.select([stream], [], [], left_s)[0]:
            return None
        more = stream.read(length_bytes - len(data))
        if not more:
            return None
        data += more
    return data


def shapes(directory: Path) -> list[tuple[Made, list[Case]]]:
    """Stores of one pool, of two, and of format version 1, and their cases."""
    found = []
    for name, pools, version in (("one", 1, 2), ("two", 2, 2), ("v1", 1, 1)):
        made = make(directory / name, pools=pools, version=version)
        other = make(directory / f"{name}-other", pools=pools, version=version)
        found.append((made, all_cases(made, other, _aged(made))))
    return found


def _aged(made: Made) -> Made:
    """The store as it was before: `made` goes on, replaces what it has, and is read anew."""
    older = replace(made, files=dict(made.files))
    with PrefixStore.open(made.config) as store:
        for i, fields in enumerate(made.namespaces[:2]):
            pages = store.namespace(**fields)
            pages.clear()
            order = range(PAGES - 1, -1, -1)  # so that slots are used again by others
            for n in order:
                page = made.pages[i * PAGES + n]
                keys = PageKeys(page.key, len(page.key), rooted=False)
                assert finish(pages.save(keys, page.content)).all()
    made.pages = []
    _read_layout(made)
    made.files = {file: file.read_bytes() for file in made.files}
    return older


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Damage every class of bytes once, or go on for `seconds` with further seeds."""
    tally = Tally()
    end_s = time.monotonic() + seconds
    made_shapes = shapes(directory)
    rng = random.Random(seed)
    turn = 0
    while not turn or time.monotonic() < end_s:
        done: set[str] = set()
        for made, cases in made_shapes:
            jobs = [(case, rng.randrange(1 << 32)) for case in cases]
            if not seconds:  # the quick part: each class once, in the first store that has it
                once = {case.kind: (case, number) for case, number in reversed(jobs)}
                jobs = [job for kind, job in once.items() if kind not in done]
                done |= once.keys()
            rng.shuffle(jobs)
            for first in range(0, len(jobs), _JOBS_AT_ONCE):
                if not seconds or time.monotonic() < end_s:
                    tally.add(run_cases(made, jobs[first : first + _JOBS_AT_ONCE]))
        turn += 1
    return tally
