"""Counts what a store holds, from outside: pages by namespace, space, leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.format import RECORD, RECORD_BYTES, SegmentEntry
from tutti_core.index.catalog import Records
from tutti_core.io.transport import BLOCK_BYTES
from tutti_core.raw_catalog import RawCatalog, View, namespace_fields, read_layout
from tutti_core.tiers.lease import held_leases
from tutti_core.tiers.pools import Layout, catalog_folder, lease_folder

_CHUNK = 4096


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
    encrypted: bool
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


def describe_store(
    path: Path, pools: tuple[Path, ...] = (), *, trust_path: bool = False
) -> tuple[StoreFacts, Layout]:
    """Count what a store holds. Reads the catalog once, no payload.

    Raises
        ConfigError, UnsupportedError, CorruptionError: there is no store, or it cannot be read.
    """
    catalog = RawCatalog(path, trusting=trust_path)
    try:
        layout = read_layout(path, pools, catalog, trusting=trust_path)
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
        encrypted=layout.trailer_bytes > 0,
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
            NamespaceFacts(
                digest.hex(), namespace_fields(names.get(digest)), pages[digest], payload[digest]
            )
            for digest in sorted(names.keys() | pages.keys(), key=lambda d: -pages[d])
        ],
        leases=held_leases(lease_folder(path)),
    )
    return facts, layout


def _all_records(catalog: RawCatalog) -> Iterator[Records]:
    after: bytes | None = None
    while True:
        with catalog.view() as view:
            items = view.items("records", after, _CHUNK)
        if not items:
            return
        after = items[-1][0]
        yield np.frombuffer(b"".join(v for _, v in items if len(v) == RECORD_BYTES), dtype=RECORD)


def _used_slots(view: View) -> Counter[int]:
    used: Counter[int] = Counter()
    after: bytes | None = None
    while items := view.items("slots", after, _CHUNK):
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
