"""Reads a store from outside, without a lease: what is in it, and whether all of it is sound.

`describe_store` counts, `verify_store` checks every record, slot entry and payload byte. Both open
the catalog read-only and create nothing, so they work beside a server.

The databases are read raw, because `Catalog` hides what is damaged. Each chunk is read in one LMDB
transaction; a record and its slot entry change in one, so a chunk is consistent in itself whatever
a server does meanwhile. Only payloads are read after it, and those that differ are looked up again:
a slot is overwritten only after its record is gone, so an unchanged record means damage.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.config import StoreConfig
from tutti_core.errors import BusyError, ConfigError, CorruptionError, device_error
from tutti_core.format import (
    DATA_OFFSET_BYTES,
    PARTS_MAX,
    RECORD,
    RECORD_BYTES,
    SegmentEntry,
    Superblock,
    record_is_sound,
)
from tutti_core.index.catalog import RECORD_KEY_BYTES, Records, page_keys_of
from tutti_core.io.select import TransportName, open_transport
from tutti_core.io.transport import BLOCK_BYTES, Batch, Op, Transport, TransportOptions
from tutti_core.tiers.lease import held_leases
from tutti_core.tiers.parts import PartLayout, layout_of_parts
from tutti_core.tiers.pools import Layout, catalog_folder, inspect_pools, lease_folder, pool_file

CHUNK = 4096
WINDOW_BYTES = 32 << 20
"""Payload in flight at once is twice this, or two pages where those are larger."""
READ_TIMEOUT_S = 300.0

_MAP_BYTES_MIN = 64 << 30  # only address space; leaves room for a server that grows the file
_READERS_MAX = 512
_SLOT_KEY_BYTES = 8
_ANY_CAPACITY = 1 << 60

Progress = Callable[[str, int, int], None]
"""Called with (what is being checked, how many are done, how many there are)."""


class RawCatalog:
    """The catalog's databases as bytes, read-only.

    Raises
        ConfigError: there is no catalog, or this process has the store open.
        CorruptionError: LMDB or its databases cannot be read.
    """

    def __init__(self, path: Path) -> None:
        folder = catalog_folder(path)
        data = folder / "data.mdb"
        if not data.is_file():
            raise ConfigError(f"there is no store at {path}", hint="`tutti init` makes one")
        try:
            self._env = lmdb.open(
                str(folder),
                map_size=max(_MAP_BYTES_MIN, 4 * data.stat().st_size),
                max_dbs=8,
                max_readers=_READERS_MAX,
                readonly=True,
                create=False,
                lock=(folder / "lock.mdb").exists(),
                readahead=False,
            )
        except lmdb.Error as error:
            if "already open" in str(error):
                raise ConfigError(f"this process has the store at {path} open") from None
            raise CorruptionError(
                f"the catalog in {folder} cannot be opened: {error}", scope="store"
            ) from None
        try:
            names = ("meta", "namespaces", "records", "slots", "segments")
            self._db = {name: self._env.open_db(name.encode(), create=False) for name in names}
        except lmdb.Error as error:
            self._env.close()
            raise CorruptionError(
                f"the catalog in {folder} is incomplete: {error}", scope="store"
            ) from None

    def close(self) -> None:
        """Let go of the environment."""
        self._env.close()

    @contextmanager
    def view(self) -> Iterator[View]:
        """One consistent state of the catalog."""
        with self._env.begin() as transaction:
            yield View(transaction, self._db)


class View:
    """The catalog at one instant."""

    def __init__(self, transaction: Any, db: dict[str, Any]) -> None:
        self._transaction = transaction
        self._db = db

    def get(self, database: str, key: bytes) -> bytes | None:
        """One value."""
        value: bytes | None = self._transaction.get(key, db=self._db[database])
        return value

    def count(self, database: str) -> int:
        """Entries of a database."""
        return int(self._transaction.stat(self._db[database])["entries"])

    def items(
        self, database: str, after: bytes | None = None, limit: int | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Up to `limit` entries that follow the key `after`, in order."""
        found: list[tuple[bytes, bytes]] = []
        with self._transaction.cursor(db=self._db[database]) as cursor:
            more = cursor.first() if after is None else cursor.set_range(after)
            if more and after is not None and cursor.key() == after:
                more = cursor.next()
            while more and (limit is None or len(found) < limit):
                found.append(cursor.item())
                more = cursor.next()
        return found

    def superblock(self) -> Superblock | None:
        """The catalog's copy of pool 0's superblock."""
        raw = self.get("meta", b"superblock")
        return None if raw is None else Superblock.decode(raw, "the catalog")

    def segments(self) -> tuple[dict[int, SegmentEntry], list[bytes]]:
        """Assigned segments, and keys of entries that cannot be read."""
        good, bad = {}, []
        for key, value in self.items("segments"):
            try:
                good[int.from_bytes(key, "big")] = SegmentEntry.decode(value)
            except CorruptionError:
                bad.append(key)
        return good, bad


def read_layout(path: Path, pools: tuple[Path, ...], catalog: RawCatalog) -> Layout:
    """The layout of a store that exists; `pools` as it was created with, default `path` itself.

    Raises
        ConfigError: a pool is missing, or is another store's.
        UnsupportedError, CorruptionError: a superblock of another format, or damaged.
    """
    # Only the pools of the settings are looked at here.
    config = StoreConfig.parse({"path": path, "pools": pools, "capacity": _ANY_CAPACITY})
    files = tuple(pool_file(place) for place in config.pool_paths)
    found = []
    for file, superblock in zip(files, inspect_pools(config), strict=True):
        if superblock is None:
            raise ConfigError(
                f"the pool {file} is missing", hint="name the store's pools with --pool, in order"
            )
        found.append(superblock)
    with catalog.view() as view:
        known = view.superblock()
    if found[0].pool_count != len(files):
        raise ConfigError(
            f"the store at {path} has {found[0].pool_count} pools, {len(files)} named",
            hint="name them with --pool, in the order in which the store was created",
        )
    for index, (file, superblock) in enumerate(zip(files, found, strict=True)):
        owner = known.store_id if known is not None else found[0].store_id
        if (superblock.store_id, superblock.pool_index) != (owner, index):
            raise ConfigError(f"{file} belongs to another store or another place among the pools")
    return Layout(tuple(found), files)


# ---- description ----
@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """One namespace: its fields, and what is stored of it."""

    digest: str
    description: dict[str, Any]
    pages: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A store as it lies on disk.

    slot_sizes       slot size in bytes -> (segments cut so, used slots, slots).
    leases           numbers of the writer leases that are held now.
    """

    path: str
    store_id: str
    format_version: int
    pools: list[str]
    pool_bytes: int
    segment_bytes: int
    segments: int
    segments_assigned: int
    slot_sizes: dict[int, tuple[int, int, int]]
    pages: int
    payload_bytes: int
    catalog_bytes: int
    namespaces: list[NamespaceFacts]
    leases: list[int]


def describe_store(path: Path, pools: tuple[Path, ...] = ()) -> tuple[StoreFacts, Layout]:
    """Count what a store holds. Reads the catalog once, no payload.

    Raises
        ConfigError, UnsupportedError, CorruptionError: there is no store, or it cannot be read.
    """
    catalog = RawCatalog(path)
    try:
        layout = read_layout(path, pools, catalog)
        pages: Counter[bytes] = Counter()
        payload: Counter[bytes] = Counter()
        for records in _all_records(catalog):
            for digest in np.unique(records["namespace"]):
                mine = records["namespace"] == digest
                pages[digest.tobytes()] += int(mine.sum())
                payload[digest.tobytes()] += int(records["length_bytes"][mine].sum())
        with catalog.view() as view:
            names = dict(view.items("namespaces"))
            segments, _ = view.segments()
            used = _used_slots(view)
    finally:
        catalog.close()
    facts = StoreFacts(
        path=str(path),
        store_id=layout.store_id.hex(),
        format_version=layout.version,
        pools=[str(file) for file in layout.paths],
        pool_bytes=layout.segment_count * layout.segment_bytes,
        segment_bytes=layout.segment_bytes,
        segments=layout.segment_count,
        segments_assigned=len(segments),
        slot_sizes=_slot_sizes(segments, used, layout.segment_bytes),
        pages=sum(pages.values()),
        payload_bytes=sum(payload.values()),
        catalog_bytes=(catalog_folder(path) / "data.mdb").stat().st_blocks * 512,
        namespaces=[
            NamespaceFacts(digest.hex(), _fields(names.get(digest)), pages[digest], payload[digest])
            for digest in sorted(names.keys() | pages.keys(), key=lambda d: -pages[d])
        ],
        leases=held_leases(lease_folder(path)),
    )
    return facts, layout


def _all_records(catalog: RawCatalog) -> Iterator[Records]:
    after: bytes | None = None
    while True:
        with catalog.view() as view:
            items = view.items("records", after, CHUNK)
        if not items:
            return
        after = items[-1][0]
        yield np.frombuffer(b"".join(v for _, v in items if len(v) == RECORD_BYTES), dtype=RECORD)


def _used_slots(view: View) -> Counter[int]:
    used: Counter[int] = Counter()
    after: bytes | None = None
    while items := view.items("slots", after, CHUNK):
        used.update(int.from_bytes(key[:4], "big") for key, _ in items)
        after = items[-1][0]
    return used


def _slot_sizes(
    segments: dict[int, SegmentEntry], used: Counter[int], segment_bytes: int
) -> dict[int, tuple[int, int, int]]:
    sizes: dict[int, tuple[int, int, int]] = {}
    for number, entry in segments.items():
        size = entry.slot_blocks * BLOCK_BYTES
        count, taken, slots = sizes.get(size, (0, 0, 0))
        sizes[size] = (count + 1, taken + used[number], slots + segment_bytes // size)
    return dict(sorted(sizes.items()))


def _fields(description: bytes | None) -> dict[str, Any]:
    """A namespace's description; empty where it is unknown or unreadable."""
    try:
        fields = json.loads(description or b"{}")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


# ---- verification ----
@dataclass(slots=True)
class Damage:
    """One kind of damage: how often, and some examples."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Bad:
    """Catalog entries that damage was found in, by key: what a repair drops."""

    records: set[bytes] = field(default_factory=set)
    slots: set[bytes] = field(default_factory=set)
    segments: set[bytes] = field(default_factory=set)
    namespaces: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class VerifyReport:
    """Result of `verify_store`.

    records, slots   entries looked at.
    payloads         pages whose bytes were read and compared.
    changed          payloads that differed because their page was replaced meanwhile; no damage.
    damage           kind -> Damage; the kinds are in KINDS.
    """

    store_id: str
    transport: str
    records: int = 0
    slots: int = 0
    payloads: int = 0
    payload_bytes: int = 0
    changed: int = 0
    seconds: float = 0.0
    damage: dict[str, Damage] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether no damage was found."""
        return not self.damage


KINDS = {
    "record": "record of the wrong length, or whose check does not agree with its bytes",
    "record_key": "record whose key is not that of its namespace and page key",
    "namespace": "record of a namespace that the catalog does not know",
    "namespace_entry": "namespace whose digest is not that of its description",
    "length": "record whose length is not its namespace's page size",
    "generation": "record newer than the catalog's sequence",
    "segment": "record in an unassigned segment, or in one cut for another page size",
    "segment_entry": "unreadable segment entry",
    "slot": "record whose slot entry is missing or names another page",
    "slot_entry": "slot entry without a record that points back",
    "payload": "page whose bytes do not agree with their checksum",
    "read": "page that cannot be read",
    "pool": "pool file shorter than the store",
}


def verify_store(
    path: Path,
    pools: tuple[Path, ...] = (),
    *,
    online: bool = False,
    transport: TransportName = "auto",
    examples: int = 10,
    progress: Progress = lambda what, done, total: None,
    bad: Bad | None = None,
) -> VerifyReport:
    """Check every record, slot entry and payload of a store. Changes nothing.

    Parameters
        online: allow it while processes have the store open; pages that they replace meanwhile are
            not counted as damage.
        examples: how many of each kind of damage to describe.
        bad: filled with what the damage was found in.
    Raises
        BusyError: a process holds a writer lease, and not `online`.
        ConfigError, UnsupportedError, CorruptionError: there is no store, or it cannot be opened.
    Cost       reads everything once; memory is bounded whatever the size of the store.
    """
    start_s = time.perf_counter()
    held = held_leases(lease_folder(path))
    if held and not online:
        raise BusyError(
            f"the store at {path} is open in {len(held)} process(es)",
            hint="stop them, or use --online",
        )
    catalog = RawCatalog(path)
    try:
        layout = read_layout(path, pools, catalog)
        options = TransportOptions(transfer_bytes_max=1 << 20)
        reader = open_transport(transport, layout.devices(), options)
        try:
            check = _Check(catalog, layout, reader, examples, progress, bad or Bad())
            check.run()
        finally:
            reader.close()
    finally:
        catalog.close()
    check.report.seconds = time.perf_counter() - start_s
    return check.report


class _Check:
    """One verification under way."""

    def __init__(
        self,
        catalog: RawCatalog,
        layout: Layout,
        reader: Transport,
        examples: int,
        progress: Progress,
        bad: Bad,
    ) -> None:
        self._bad = bad
        self._catalog = catalog
        self._layout = layout
        self._reader = reader
        self._examples = examples
        self._progress = progress
        self._payloads = _Payloads(reader)
        self.report = VerifyReport(layout.store_id.hex(), reader.capabilities().name)

    def run(self) -> None:
        """All checks, cheap ones first."""
        self._check_pools()
        with self._catalog.view() as view:
            self._check_tables(view)
        self._check_records()
        self._check_slots()

    def _found(self, kind: str, text: str) -> None:
        damage = self.report.damage.setdefault(kind, Damage())
        damage.count += 1
        if len(damage.examples) < self._examples:
            damage.examples.append(text)

    def _found_record(self, kind: str, text: str, key: bytes) -> None:
        self._found(kind, text)
        self._bad.records.add(key)

    def _check_pools(self) -> None:
        for device in self._layout.devices():
            try:
                with open(device.path, "rb") as stream:
                    size = stream.seek(0, 2)
            except OSError as error:
                raise device_error("open", error.errno or 5, device=device.path) from None
            if size < device.capacity_bytes:
                self._found("pool", f"{device.path}: {size} of {device.capacity_bytes} bytes")

    def _check_tables(self, view: View) -> None:
        _, bad = view.segments()
        for key in bad:
            self._found("segment_entry", f"segment {key.hex()}")
            self._bad.segments.add(key)
        for digest, description in view.items("namespaces"):
            if hashing.digest(description) != digest or not _is_description(description):
                self._found("namespace_entry", f"namespace {digest.hex()}")
                self._bad.namespaces.add(digest)

    # ---- records ----
    def _check_records(self) -> None:
        after: bytes | None = None
        while True:
            with self._catalog.view() as view:
                items = view.items("records", after, CHUNK)
                if not items:
                    return
                total = view.count("records")
                self._check_record_chunk(view, items)
            after = items[-1][0]
            self.report.records += len(items)
            self._progress("records", self.report.records, total)

    def _check_record_chunk(self, view: View, items: list[tuple[bytes, bytes]]) -> None:
        good = []
        for key, raw in items:
            if len(key) == RECORD_KEY_BYTES and record_is_sound(raw):
                good.append((key, raw))
            else:
                self._found_record("record", f"record {key.hex()}", key)
        keys = [key for key, _ in good]
        records: Records = np.frombuffer(b"".join(raw for _, raw in good), dtype=RECORD)
        self._check_names(view, keys, records)
        placed = self._well_placed(view, records)
        sequence = int.from_bytes(view.get("meta", b"sequence") or b"\0", "big")
        for i, key in enumerate(keys):
            where = self._where(key, records[i])
            if not placed[i]:
                self._found_record("segment", where, key)
            if int(records[i]["generation"]) > sequence:
                text = f"{where}, generation {records[i]['generation']}"
                self._found_record("generation", text, key)
            if view.get("slots", _slot_key(records[i])) != key:
                self._found_record("slot", where, key)
            if records[i]["namespace"].tobytes() in self._bad.namespaces:
                self._bad.records.add(key)  # nobody can say what it is

    def _check_names(self, view: View, keys: list[bytes], records: Records) -> None:
        """Namespace known, length as it says, record key recomputed."""
        for digest in np.unique(records["namespace"]):
            mine = np.flatnonzero(records["namespace"] == digest)
            fields = _fields(view.get("namespaces", digest.tobytes()))
            width, size = fields.get("key_bytes"), _stored_bytes(fields)
            if not isinstance(width, int) or not 1 <= width <= 32:
                for i in mine:
                    self._found_record("namespace", self._where(keys[i], records[i]), keys[i])
                continue
            for i in mine[records["length_bytes"][mine] != size]:
                self._found_record("length", self._where(keys[i], records[i]), keys[i])
            page_keys = page_keys_of(records[mine], 32)
            packed = np.ascontiguousarray(page_keys[:, :width]).tobytes()
            expected = hashing.record_keys(digest.tobytes(), packed, width)
            padded = np.any(page_keys[:, width:] != 0, axis=1).tolist()
            for n, i in enumerate(mine):
                own = expected[n * RECORD_KEY_BYTES : (n + 1) * RECORD_KEY_BYTES]
                if own != keys[i] or padded[n]:
                    self._found_record("record_key", self._where(keys[i], records[i]), keys[i])

    def _well_placed(self, view: View, records: Records) -> npt.NDArray[np.bool_]:
        """Whether each record lies in an assigned segment that is cut for its length."""
        assigned, _ = view.segments()
        slot_bytes = np.zeros(self._layout.segment_count + 1, dtype=np.uint64)
        for number, entry in assigned.items():
            if number < self._layout.segment_count:
                slot_bytes[number] = entry.slot_blocks * BLOCK_BYTES
        segment = np.minimum(records["segment"], self._layout.segment_count)
        size = slot_bytes[segment]
        length = records["length_bytes"].astype(np.uint64)
        blocks = -(-length.astype(np.int64) // BLOCK_BYTES)
        fits = (records["slot"].astype(np.uint64) + np.uint64(1)) * size <= np.uint64(
            self._layout.segment_bytes
        )
        exact = size.astype(np.int64) == blocks * BLOCK_BYTES
        return np.asarray((size > 0) & fits & exact, dtype=np.bool_)

    # ---- slots and payloads ----
    def _check_slots(self) -> None:
        after: bytes | None = None
        while True:
            with self._catalog.view() as view:
                items = view.items("slots", after, CHUNK)
                if not items:
                    return
                total = view.count("slots")
                keys, records = self._records_of_slots(view, items)
                placed = self._well_placed(view, records)
            self._check_payloads(
                [key for key, ok in zip(keys, placed, strict=True) if ok], records[placed]
            )
            after = items[-1][0]
            self.report.slots += len(items)
            self._progress("payloads", self.report.slots, total)

    def _records_of_slots(
        self, view: View, items: list[tuple[bytes, bytes]]
    ) -> tuple[list[bytes], Records]:
        """Sound records that the slot entries name and that point back, in order of their place."""
        keys, values = [], []
        for slot, key in items:
            raw = view.get("records", key) if len(key) == RECORD_KEY_BYTES else None
            if raw is not None and not record_is_sound(raw):
                continue  # counted as a damaged record
            if raw is None or len(slot) != _SLOT_KEY_BYTES:
                self._found("slot_entry", f"slot {slot.hex()}")
                self._bad.slots.add(slot)
            elif _slot_key(np.frombuffer(raw, dtype=RECORD)[0]) != slot:
                self._found("slot_entry", f"slot {slot.hex()}, whose page is elsewhere")
                self._bad.slots.add(slot)
            else:
                keys.append(key)
                values.append(raw)
        return keys, np.frombuffer(b"".join(values), dtype=RECORD)

    def _check_payloads(self, keys: list[bytes], records: Records) -> None:
        device, offset = self._places(records)
        status, sound = self._payloads.read(device, offset, records, self._part_layouts(records))
        self.report.payloads += len(records)
        self.report.payload_bytes += int(records["length_bytes"].sum())
        bad = np.flatnonzero((status != 0) | ~sound)
        for i in bad:
            with self._catalog.view() as view:
                now = view.get("records", keys[i])
            if now != records[i].tobytes():
                self.report.changed += 1
                continue
            where = self._where(keys[i], records[i])
            where = f"{where}, {self._layout.paths[device[i]]} offset {offset[i]}"
            if status[i]:
                self._found_record("read", f"{where}: errno {-status[i]}", keys[i])
            else:
                self._found_record("payload", where, keys[i])

    def _part_layouts(self, records: Records) -> list[tuple[npt.NDArray[np.bool_], PartLayout]]:
        """Which of the records are of pages in parts, and how those are laid out."""
        layouts = []
        for digest in np.unique(records["namespace"]):
            with self._catalog.view() as view:
                fields = _fields(view.get("namespaces", digest.tobytes()))
            if parts := layout_of_parts(_parts_of(fields)):
                mine = records["namespace"] == digest
                mine &= records["length_bytes"] == parts.stored_bytes
                layouts.append((mine, parts))
        return layouts

    def _places(self, records: Records) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        segment = records["segment"].astype(np.uint64)
        pools = np.uint64(self._layout.pool_count)
        blocks = -(-records["length_bytes"].astype(np.int64) // BLOCK_BYTES)
        offset = (
            np.uint64(DATA_OFFSET_BYTES)
            + segment // pools * np.uint64(self._layout.segment_bytes)
            + records["slot"].astype(np.uint64) * (blocks * BLOCK_BYTES).astype(np.uint64)
        )
        return (segment % pools).astype(np.uint32), offset

    def _where(self, key: bytes, record: np.void) -> str:
        return f"record {key.hex()}, segment {record['segment']}, slot {record['slot']}"


class _Payloads:
    """Reads pages through a transport into two windows of memory, one filling while one is full."""

    def __init__(self, reader: Transport) -> None:
        self._reader = reader
        self._memory: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._region: int | None = None

    def read(
        self,
        device: npt.NDArray[np.uint32],
        offset: npt.NDArray[np.uint64],
        records: Records,
        layouts: list[tuple[npt.NDArray[np.bool_], PartLayout]],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Status of each page, and whether its bytes agree with its record."""
        length = records["length_bytes"]
        status = np.full(len(device), -110, dtype=np.int32)  # ETIMEDOUT unless an answer comes
        sound = np.zeros(len(device), dtype=np.bool_)
        sizes = -(-length.astype(np.int64) // BLOCK_BYTES) * BLOCK_BYTES
        window = self._window_bytes(int(sizes.max(initial=0)))
        flying: list[tuple[slice, npt.NDArray[np.uint64], int]] = []
        first = turn = 0
        while first < len(device) or flying:
            if len(flying) == 2 or first == len(device):
                part, address, ticket = flying.pop(0)
                result = self._reader.wait(ticket, READ_TIMEOUT_S)
                if result is None:
                    raise BusyError(f"a read is not finished after {READ_TIMEOUT_S:.0f} s")
                status[part] = result.status
                sound[part] = result.checksum == records["checksum"][part]
                for mine, parts in layouts:
                    chosen = np.flatnonzero(mine[part])
                    if len(chosen):
                        expected = records["checksum"][part][chosen]
                        sound[part.start + chosen] = parts.sound(address[chosen], expected)
                continue
            ends = np.cumsum(sizes[first:])
            count = int(np.searchsorted(ends, window, side="right"))
            part = slice(first, first + count)
            start = self._base + turn % 2 * window
            address = (start + ends[:count] - sizes[part]).astype(np.uint64)
            batch = Batch(
                op=Op.READ,
                device=np.ascontiguousarray(device[part]),
                offset_bytes=np.ascontiguousarray(offset[part]),
                fragment_start=np.arange(count + 1, dtype=np.uint32),
                address=address,
                length_bytes=length[part].astype(np.uint64),
                checksum=True,
            )
            flying.append((part, address, self._reader.submit(batch)))
            first, turn = first + count, turn + 1
        return status, sound

    def _window_bytes(self, page_bytes: int) -> int:
        """Make the windows large enough for a page; returns the size of one."""
        window = max(WINDOW_BYTES, page_bytes)
        if 2 * window + BLOCK_BYTES > len(self._memory):
            if self._region is not None:
                self._reader.unregister(self._region)
            self._memory = np.zeros(2 * window + BLOCK_BYTES, dtype=np.uint8)
            self._base = -(-self._memory.ctypes.data // BLOCK_BYTES) * BLOCK_BYTES
            self._region = self._reader.register(self._base, 2 * window)
        return window


def _slot_key(record: np.void) -> bytes:
    return int(record["segment"]).to_bytes(4, "big") + int(record["slot"]).to_bytes(4, "big")


def _parts_of(fields: dict[str, Any]) -> list[int]:
    """Lengths of the parts that a description names; none where there are none, or nonsense."""
    parts = fields.get("parts", [])
    known = isinstance(parts, list) and len(parts) <= PARTS_MAX
    return parts if known and all(isinstance(n, int) and n > 0 for n in parts) else []


def _stored_bytes(fields: dict[str, Any]) -> Any:
    """The length that records of a described namespace have."""
    parts = layout_of_parts(_parts_of(fields))
    return fields.get("page_bytes") if parts is None else parts.stored_bytes


def _is_description(description: bytes) -> bool:
    fields = _fields(description)
    return isinstance(fields.get("page_bytes"), int) and isinstance(fields.get("key_bytes"), int)
