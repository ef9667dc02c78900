"""Small stores with memory tiers, and the checks of everything that must hold in them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from store_kit import PAGE, SEGMENT, check_space, memory_devices, quiesce, small_config

from tutti_core import PrefixStore, StoreConfig
from tutti_core.policies.base import NS_PER_S
from tutti_core.testing import FaultyDevices
from tutti_core.tiers.arena import HostArena
from tutti_core.tiers.memory import MemoryTier

DRAM = 16 * PAGE
"""Sixteen pages of 4 KiB, in eight segments."""


class Clock:
    """The monotonic clock, which jumps when told to."""

    def __init__(self) -> None:
        self._real = time.monotonic_ns
        self._ahead_ns = 0

    def __call__(self) -> int:
        return self._real() + self._ahead_ns

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self._ahead_ns += int(seconds * NS_PER_S)


def tiered_config(path: Path, **settings: Any) -> StoreConfig:
    """A small store with a DRAM tier, and an HBM tier where `hbm` says so."""
    settings.setdefault("dram", DRAM)
    return small_config(path, **settings)


def open_tiers(config: StoreConfig, devices: FaultyDevices) -> PrefixStore:
    """Open a store whose HBM, if it has one, is host memory."""
    arenas = {"hbm": HostArena(int(config.hbm), huge_pages=False)} if config.hbm else {}
    return PrefixStore(config, devices, arenas)


@contextlib.contextmanager
def tiered(path: Path, **settings: Any) -> Iterator[tuple[PrefixStore, FaultyDevices]]:
    """A small store with memory tiers on devices in memory that fail on command."""
    config = tiered_config(path, **settings)
    devices = memory_devices(config)
    with open_tiers(config, devices) as store:
        yield store, devices


def dram(store: PrefixStore) -> MemoryTier:
    """The DRAM tier of a store."""
    return store._tiers[-1]


def in_memory(store: PrefixStore, digest: bytes) -> dict[bytes, set[str]]:
    """Page keys of a namespace that memory tiers hold, and the names of these tiers."""
    entry = store._manager._entries[digest]
    found: dict[bytes, set[str]] = {}
    for tier in store._tiers:
        for keys, stored in tier.chains(entry):
            rows = [keys[i : i + entry.key_bytes] for i in range(0, len(keys), entry.key_bytes)][
                -len(stored) :
            ]
            for key, here in zip(rows, stored.tolist(), strict=True):
                if here:
                    found.setdefault(key, set()).add(tier.name)
    return found


def on_devices(store: PrefixStore, digest: bytes, *, living: bool = False) -> set[bytes]:
    """Page keys of a namespace in the catalog; `living`: without what the next save removes."""
    width = store._manager._entries[digest].key_bytes
    going = {generation for _, _, generation in store._manager._expired} if living else ()
    return {
        record["page_key"].tobytes()[:width]
        for _, records, _ in store._catalog.scan_records(1000)
        for record in records
        if record["namespace"].tobytes() == digest and int(record["generation"]) not in going
    }


def unsaved_keys(
    store: PrefixStore, digest: bytes, generations: set[int] | None = None
) -> set[bytes]:
    """Page keys of a namespace that the DRAM tier alone is known to hold, or those given."""
    tier = dram(store)
    shelf = tier._shelves.get(digest)
    if shelf is None:
        return set()
    width, lone = shelf.entry.key_bytes, generations
    if lone is None:
        lone = tier._unsaved | tier._fresh
    found = {key for key, page in shelf.pages.loose.items() if page.generation in lone}
    for _, node in shelf.pages.tree.chains():
        for i, generation in enumerate(node.generations):
            if generation in lone and node.slots[i] != (1 << 64) - 1:
                found.add(bytes(node.keys[i * width : (i + 1) * width]))
    return found


def check_tiers(store: PrefixStore, *, faults: bool = False) -> None:
    """Everything that must hold when nothing moves.

    Looked at again where something began to move meanwhile: room is made ahead of need.
    """
    for _ in range(4):
        begun = store._manager.counters["demotion_errors"] + _moved(store)
        try:
            return _check_tiers(store, faults)
        except AssertionError:
            quiesce(store)
            time.sleep(0.06)
            quiesce(store)
            if begun == store._manager.counters["demotion_errors"] + _moved(store):
                raise
    _check_tiers(store, faults)


def _moved(store: PrefixStore) -> int:
    """Rises with whatever moves."""
    return sum(sum(tier.counters.values()) for tier in store._tiers)


def _check_tiers(store: PrefixStore, faults: bool) -> None:
    quiesce(store)
    check_space(store)
    for tier in store._tiers:
        tier.check()
        pages = sum(
            shelf.pages.page_count * shelf.entry.slot_bytes for shelf in tier._shelves.values()
        )
        assert tier.used_bytes == pages, "slots of the arena are lost"
        used = tier.used_bytes + tier.free_bytes
        claimed = [s for s in tier._space.segments.values()]
        waste = sum(tier.segment_bytes - len(s.generation) * s.slot_bytes for s in claimed)
        assert used + waste == tier.capacity_bytes
        assert not tier._moving and not tier._writes
    if faults:
        return
    for digest in list(store._manager._entries):
        below, above = on_devices(store, digest, living=True), in_memory(store, digest)
        if store.config.dram_mode == "exclusive":
            both = {key for key in below if "dram" in above.get(key, ())}
            assert not both, "a page stands in both tiers of an exclusive store"
        lone = unsaved_keys(store, digest)
        assert not lone & below, "a page that the devices hold passes for unsaved"


def pages_equal(memory: bytearray, payload: bytes) -> bool:
    """Whether two pieces of memory are the same."""
    return bool(np.array_equal(np.frombuffer(memory, np.uint8), np.frombuffer(payload, np.uint8)))


__all__ = [
    "DRAM",
    "PAGE",
    "SEGMENT",
    "check_tiers",
    "dram",
    "in_memory",
    "on_devices",
    "open_tiers",
    "pages_equal",
    "quiesce",
    "tiered",
    "tiered_config",
    "unsaved_keys",
]
