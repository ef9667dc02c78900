"""Checks every record, slot entry and payload byte of a store, from outside and without a lease.

The catalog is opened read-only and nothing is created, so this works beside a server.

The databases are read raw, because `Catalog` hides what is damaged. Each chunk is read in one LMDB
transaction; a record and its slot entry change in one, so a chunk is consistent in itself whatever
a server does meanwhile. Only payloads are read after it, and those that differ are looked up again:
a slot is overwritten only after its record is gone, so an unchanged record means damage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.describe import NamespaceFacts, StoreFacts, describe_store
from tutti_core.errors import BusyError, device_error
from tutti_core.format import DATA_OFFSET_BYTES, RECORD, record_is_sound, slot_key
from tutti_core.index.catalog import GENERATION_MAX, RECORD_KEY_BYTES, Records, page_keys_of
from tutti_core.io.select import TransportName, open_transport
from tutti_core.io.transport import BLOCK_BYTES, Batch, Op, Transport, TransportOptions
from tutti_core.raw_catalog import (
    RawCatalog,
    View,
    is_description,
    namespace_fields,
    parts_of,
    read_layout,
    stored_length,
)
from tutti_core.tiers.lease import held_leases
from tutti_core.tiers.parts import PartLayout, layout_of_parts
from tutti_core.tiers.pools import Layout, check_catalog, lease_folder

__all__ = [
    "KINDS",
    "Bad",
    "Damage",
    "NamespaceFacts",
    "Progress",
    "RawCatalog",
    "StoreFacts",
    "VerifyReport",
    "View",
    "describe_store",
    "read_layout",
    "verify_store",
]

CHUNK = 4096
WINDOW_BYTES = 32 << 20
"""Payload in flight at once is twice this, or two pages where those are larger."""
READ_TIMEOUT_S = 300.0

_SLOT_KEY_BYTES = 8

Progress = Callable[[str, int, int], None]
"""Called with (what is being checked, how many are done, how many there are)."""


@dataclass(slots=True)
class Damage:
    """One kind of damage: how often, and some examples."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Bad:
    """What damage was found in: entries by key, which a repair drops, and what it puts right."""

    records: set[bytes] = field(default_factory=set)
    slots: set[bytes] = field(default_factory=set)
    segments: set[bytes] = field(default_factory=set)
    namespaces: set[bytes] = field(default_factory=set)
    superblock: bool = False
    sequence: int | None = None
    """What the sequence must be at least, where it is not."""


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
    "generation": "record with an impossible generation",
    "sequence": "sequence that is unreadable or older than a record",
    "superblock": "catalog without a readable copy of the superblock",
    "segment": "record in an unassigned segment, or in one cut for another page size",
    "segment_entry": "segment entry that is unreadable, or of a segment beyond the pools",
    "slot": "record whose slot entry is missing or names another page",
    "slot_entry": "slot entry without a record that points back",
    "payload": "page whose bytes do not agree with their checksum",
    "read": "page that cannot be read",
    "pool": "pool file shorter than the store",
    "tree": "catalog that LMDB cannot use; made anew by a repair",
    "pool_superblock": "damaged superblock of a pool; written anew by a repair",
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
    trust_path: bool = False,
) -> VerifyReport:
    """Check every record, slot entry and payload of a store. Changes nothing.

    Parameters
        online: allow it while processes have the store open; pages that they replace meanwhile are
            not counted as damage.
        examples: how many of each kind of damage to describe.
        bad: filled with what the damage was found in.
        trust_path: as in StoreConfig.
    Raises
        BusyError: a process holds a writer lease, and not `online`.
        ConfigError, UnsupportedError, CorruptionError: there is no store, or it cannot be opened.
    Cost       reads everything once; memory is bounded whatever the size of the store.
    """
    start_s = time.perf_counter()
    check_catalog(path, trusting=trust_path)
    held = held_leases(lease_folder(path))
    if held and not online:
        raise BusyError(
            f"the store at {path} is open in {len(held)} process(es)",
            hint="stop them, or use --online",
        )
    catalog = RawCatalog(path, trusting=trust_path)
    try:
        layout = read_layout(path, pools, catalog, trusting=trust_path)
        options = TransportOptions(transfer_bytes_max=1 << 20)
        reader = open_transport(transport, layout.devices(), options)
        try:
            check = _Check(catalog, layout, reader, examples, progress, bad or Bad(), online)
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
        online: bool,
    ) -> None:
        self._bad = bad
        self._online = online
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
        good, bad = view.segments()
        if not self._online:  # else a process may have made the store larger just now
            bad += [slot_key(n, 0)[:4] for n in good if n >= self._layout.segment_count]
        for key in bad:
            self._found("segment_entry", f"segment {key.hex()}")
            self._bad.segments.add(key)
        if view.superblock() is None:
            self._found("superblock", "in the catalog")
            self._bad.superblock = True
        self._check_sequence(view, np.empty(0, dtype=np.uint64))
        for digest, description in view.items("namespaces"):
            if hashing.digest(description) != digest or not is_description(description):
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
        self._check_sequence(view, records["generation"])
        for i, key in enumerate(keys):
            where = self._where(key, records[i])
            if not placed[i]:
                self._found_record("segment", where, key)
            if int(records[i]["generation"]) >= GENERATION_MAX:
                text = f"{where}, generation {records[i]['generation']}"
                self._found_record("generation", text, key)
            if view.get("slots", _slot_key(records[i])) != key:
                self._found_record("slot", where, key)
            if records[i]["namespace"].tobytes() in self._bad.namespaces:
                self._bad.records.add(key)  # nobody can say what it is

    def _check_sequence(self, view: View, generations: npt.NDArray[np.uint64]) -> None:
        """Whether the sequence is at least as large as every generation that can be one."""
        newest = int(generations[generations < GENERATION_MAX].max(initial=0))
        sequence = view.sequence()
        if sequence is not None and newest <= sequence:
            return
        if self._bad.sequence is None:
            self._found("sequence", f"sequence {sequence}, generation {newest}")
        self._bad.sequence = max(self._bad.sequence or 0, newest)

    def _check_names(self, view: View, keys: list[bytes], records: Records) -> None:
        """Namespace known, length as it says, record key recomputed."""
        for digest in np.unique(records["namespace"]):
            mine = np.flatnonzero(records["namespace"] == digest)
            fields = namespace_fields(view.get("namespaces", digest.tobytes()))
            width, size = fields.get("key_bytes"), stored_length(fields, self._layout.trailer_bytes)
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
                fields = namespace_fields(view.get("namespaces", digest.tobytes()))
            if parts := layout_of_parts(parts_of(fields), self._layout.trailer_bytes):
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
    return slot_key(int(record["segment"]), int(record["slot"]))
