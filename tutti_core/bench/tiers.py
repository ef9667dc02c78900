"""`tutti bench tiers`: DRAM hits against a plain copy; latencies while pages move behind loads."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.bench.machine import file_system, machine_facts
from tutti_core.bench.measure import (
    GIB,
    MIB,
    Arena,
    BenchError,
    Progress,
    Spread,
    need_memory,
    need_space,
    order_of_turn,
    removed_afterwards,
    target,
)
from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError
from tutti_core.keys import PageKeys
from tutti_core.store import NamespaceStore, PrefixStore
from tutti_core.tiers.arena import HostArena
from tutti_core.tiers.shelf import MOVE_BYTES_MAX, MOVE_PAGES_MAX, pages_per_move

KEY_BYTES = 16
LOAD_PAGES = 8
"""Pages of one load whose latency is measured."""
CHAIN_PAGES = 16
WAIT_S = 120.0
METHOD = (
    "Bandwidth: loads of `call_pages` pages that DRAM holds, against one memmove a page of as many "
    "bytes from memory of the same kind into the same target, taking turns; medians.",
    f"Latency: loads of {LOAD_PAGES} neighbouring pages, one at a time, of a working set of chains "
    f"of {CHAIN_PAGES} pages that is twice as large as DRAM; a load that found all pages in DRAM "
    "counts as a hit, else as a device load. Every byte is compared with what was saved, outside "
    "the clock.",
    "Churn: another thread saves new pages under write_back while less than a quarter of DRAM is "
    "unsaved, so pages are evicted, written down and promoted all the time.",
    "batch_ms: one background batch (bounds in `move`) written until durable, without other load.",
)


@dataclass(frozen=True, slots=True)
class TiersPlan:
    """What to measure. `seconds` is the length of each latency phase."""

    folder: Path
    sizes: Sequence[int] = (256 << 10, 2 << 20)
    call_pages: int = 128
    rounds: int = 15
    seconds: float = 8.0
    transport: str = "auto"

    def check(self) -> None:
        """Raise ConfigError where the plan cannot work; writes nothing."""
        if not self.sizes or any(size < 4096 or size % 4096 for size in self.sizes):
            raise ConfigError("sizes: multiples of 4 KiB are needed, such as 256KiB,2MiB")
        for name in ("call_pages", "rounds", "seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be above 0")
        if not self.folder.is_dir():
            raise ConfigError(f"dir = {str(self.folder)!r} is not a directory")
        need_memory(5 * max(self.sizes) * self.call_pages + 256 * MIB)
        need_space(self.folder, 8 * max(self.sizes) * self.call_pages + 256 * MIB)


@dataclass(slots=True)
class _Latencies:
    """Milliseconds of the loads of one phase."""

    hit: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def rows(self) -> dict[str, Any]:
        """Count and percentiles of each kind."""
        return {name: _percentiles(getattr(self, name)) for name in ("hit", "device")}


def run_tiers(plan: TiersPlan, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Measure and return the report: bandwidth, latency, targets, method, machine.

    Raises
        ConfigError: too little room or an impossible plan; nothing was written.
        BenchError: a page came back wrong, or did not come.
    """
    plan.check()
    report: dict[str, Any] = {
        "benchmark": "tiers",
        "machine": machine_facts(),
        "file_system": file_system(plan.folder),
        "method": list(METHOD),
        "move": {"pages_max": MOVE_PAGES_MAX, "bytes_max": MOVE_BYTES_MAX},
        "bandwidth": [],
        "latency": [],
    }
    for size in plan.sizes:
        with removed_afterwards(plan.folder) as work:
            progress(f"{size >> 10} KiB: bandwidth of DRAM hits, {plan.rounds} rounds")
            report["bandwidth"].append(_bandwidth(plan, work / "hits", size))
            progress(f"{size >> 10} KiB: latencies, twice {plan.seconds:.0f} s")
            report["latency"].append(_latency(plan, work / "churn", size))
    report["targets"] = [
        target(
            f"DRAM hits of {row['page_bytes'] >> 10} KiB pages: of a copy", row["ratio"], 0.8, True
        )
        for row in report["bandwidth"]
    ]
    report["load_average_after"] = list(os.getloadavg())
    return report


def _open(
    plan: TiersPlan, folder: Path, size: int, dram_pages: int, pages: int, **settings: Any
) -> tuple[PrefixStore, NamespaceStore]:
    segment = max(16 * MIB, 1 << (size - 1).bit_length())
    config = StoreConfig.parse(
        {
            "path": folder,
            "capacity": pages * size + 4 * segment + 64 * MIB,
            "segment": segment,
            "catalog": 16 * MIB,
            "transport": plan.transport,
            "dram": max(dram_pages, 8) * size,
            "backlog": GIB,
            "io_timeout_s": WAIT_S,
            **settings,
        }
    )
    store = PrefixStore.open(config)
    return store, store.namespace(model="bench", page_bytes=size, page_tokens=64)


# ---- bandwidth ----
def _bandwidth(plan: TiersPlan, folder: Path, size: int) -> dict[str, Any]:
    """DRAM hits against a plain copy of the same fragments, in turns."""
    count = plan.call_pages
    store, pages = _open(plan, folder, size, 2 * count, 2 * count)
    with store:
        memory = Arena(2 * count * size)
        half = count * size
        memory.fill_random(np.random.default_rng(1), 0, half)
        keys = PageKeys(np.random.default_rng(2).bytes(count * KEY_BYTES), KEY_BYTES)
        if not pages.save(keys, memory.bytes[:half]).wait(WAIT_S).all():
            raise BenchError("the pages could not be saved")
        plain = _plain_copy(memory, count, size)
        into = memory.bytes[half:]

        def hit() -> None:
            if not pages.load(keys, into).wait(WAIT_S).all():
                raise BenchError("a page did not come back")

        work = {"hit": hit, "copy": plain}
        taken: dict[str, list[float]] = {"hit": [], "copy": []}
        for turn in range(plan.rounds + 1):
            for name in order_of_turn(list(work), turn):
                start_s = time.perf_counter()
                work[name]()
                if turn:  # the first warms up
                    taken[name].append(time.perf_counter() - start_s)
        hit()
        if not np.array_equal(into, memory.bytes[:half]):
            raise BenchError("a page came back wrong")
        if store.stats().tiers[-1].hits:
            raise BenchError("not all pages were in DRAM")
    return _bandwidth_row(size, count, taken)


def _plain_copy(memory: Arena, count: int, size: int) -> Callable[[], None]:
    """One memmove a page, from an arena of its own into the second half of `memory`."""
    source = HostArena(count * size)
    start, base = source.address, int(memory.bytes.ctypes.data)
    ctypes.memmove(start, base, count * size)
    pairs = [(base + (count + i) * size, start + i * size) for i in range(count)]

    def copy() -> None:
        for to, page in pairs:
            ctypes.memmove(to, page, size)
        assert source.length_bytes  # keeps the memory mapped

    return copy


def _bandwidth_row(size: int, count: int, taken: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"page_bytes": size, "pages": count}
    for name, seconds in taken.items():
        speed = Spread.of([count * size / GIB / s for s in seconds])
        row[f"{name}_gib_s"] = round(speed.median, 2)
        row[f"{name}_gib_s_min"] = round(speed.low, 2)
        row[f"{name}_gib_s_max"] = round(speed.high, 2)
    row["ratio"] = round(row["hit_gib_s"] / row["copy_gib_s"], 3)
    return row


# ---- latency ----
def _latency(plan: TiersPlan, folder: Path, size: int) -> dict[str, Any]:
    """Loads alone, then while another thread keeps pages moving."""
    count = plan.call_pages
    store, pages = _open(plan, folder, size, count, 6 * count, write_policy="write_back")
    with store:
        memory = Arena(2 * count * size)
        memory.fill_random(np.random.default_rng(3), 0, 2 * count * size)
        chains = _chains(2 * count // CHAIN_PAGES)
        for at, keys in enumerate(chains):
            part = memory.bytes[at * CHAIN_PAGES * size : (at + 1) * CHAIN_PAGES * size]
            pages.save(keys, part).wait(WAIT_S)
        store.flush(WAIT_S)
        batch_ms = _batch_ms(pages, memory, size)
        loads = _Loads(store, pages, chains, memory, size)
        quiet = loads.run(plan.seconds)
        stop = threading.Event()
        writer = threading.Thread(target=_churn, args=(store, pages, memory, size, stop))
        before = _moved(store)
        writer.start()
        try:
            churn = loads.run(plan.seconds)
        finally:
            stop.set()
            writer.join()
        moved = {name: value - before[name] for name, value in _moved(store).items()}
    return {
        "page_bytes": size,
        "pages": LOAD_PAGES,
        "batch_ms": batch_ms,
        "quiet": quiet.rows(),
        "churn": churn.rows(),
        "moved_during_churn": moved,
    }


class _Loads:
    """Loads a random half of a random chain of the working set, one after the other."""

    def __init__(
        self,
        store: PrefixStore,
        pages: NamespaceStore,
        chains: list[PageKeys],
        memory: Arena,
        size: int,
    ) -> None:
        self._store, self._pages, self._chains, self._size = store, pages, chains, size
        self._saved = memory
        self._into = Arena(LOAD_PAGES * size)
        self._rng = np.random.default_rng(5)

    def run(self, seconds: float) -> _Latencies:
        """Load for a while."""
        found = _Latencies()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            chain = int(self._rng.integers(len(self._chains)))
            first = int(self._rng.integers(CHAIN_PAGES // LOAD_PAGES)) * LOAD_PAGES
            keys = self._chains[chain].upto(first + LOAD_PAGES)
            hits = self._hits()
            start_s = time.perf_counter()
            loaded = self._pages.load(keys, self._into.bytes, first).wait(WAIT_S)
            taken_ms = (time.perf_counter() - start_s) * 1e3
            self._compare(chain * CHAIN_PAGES + first, loaded.tolist())
            if not loaded.all():
                raise BenchError("a page of the working set is gone")
            all_hits = self._hits() - hits == LOAD_PAGES
            (found.hit if all_hits else found.device).append(taken_ms)
            time.sleep(0.001)  # what is between two loads of an engine
        return found

    def _hits(self) -> int:
        return self._store.stats().tiers[0].hits

    def _compare(self, first: int, loaded: list[bool]) -> None:
        for i, good in enumerate(loaded):
            saved = self._saved.bytes[(first + i) * self._size : (first + i + 1) * self._size]
            got = self._into.bytes[i * self._size : (i + 1) * self._size]
            if good and not np.array_equal(saved, got):
                raise BenchError(f"page {first + i} came back wrong")


def _chains(count: int) -> list[PageKeys]:
    rng = np.random.default_rng(4)
    return [PageKeys(rng.bytes(CHAIN_PAGES * KEY_BYTES), KEY_BYTES) for _ in range(count)]


def _batch_ms(pages: NamespaceStore, memory: Arena, size: int) -> float:
    """One background batch: pages saved in DRAM, then written down until durable."""
    count = pages_per_move(size)
    taken = []
    for turn in range(5):
        keys = PageKeys(np.random.default_rng(10 + turn).bytes(count * KEY_BYTES), KEY_BYTES)
        pages.save(keys, memory.bytes[: count * size]).wait(WAIT_S)
        start_s = time.perf_counter()
        pages._store.flush(WAIT_S)
        taken.append((time.perf_counter() - start_s) * 1e3)
    return round(float(np.median(taken)), 2)


def _churn(
    store: PrefixStore, pages: NamespaceStore, memory: Arena, size: int, stop: threading.Event
) -> None:
    """Save new pages whenever DRAM has room for them, until told to stop."""
    rng = np.random.default_rng(6)
    tier = store._tiers[-1]
    count = max(1, min(LOAD_PAGES, tier.capacity_bytes // size // 16))
    while not stop.is_set():
        if tier.unsaved_count * size > tier.capacity_bytes // 4:  # else it would write through
            time.sleep(0.0005)
            continue
        keys = PageKeys(rng.bytes(count * KEY_BYTES), KEY_BYTES)
        pages.save(keys, memory.bytes[: count * size]).wait(WAIT_S)


def _moved(store: PrefixStore) -> dict[str, int]:
    stats = store.stats()
    return {name: getattr(stats.tiers[0], name) for name in ("promoted", "demoted", "evicted")}


def _percentiles(milliseconds: list[float]) -> dict[str, Any]:
    if not milliseconds:
        return {"count": 0, "p50_ms": None, "p99_ms": None, "max_ms": None}
    p50, p99 = np.percentile(milliseconds, [50, 99])
    return {
        "count": len(milliseconds),
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "max_ms": round(max(milliseconds), 3),
    }
