"""A prefix in a store and a device pool in host memory: what linker and overlap benchmarks load.

The pool is laid out as an engine has it, [layer][K or V][slot]: a slot holds one page of the K or V
of one layer, and the pages of the prefix have random slots.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tutti_core import hashing
from tutti_core.bench.engines import CALL_PAGES, KEY_BYTES, LOADS_IN_FLIGHT_MAX
from tutti_core.bench.measure import (
    GIB,
    MIB,
    Arena,
    BenchError,
    need_memory,
    need_space,
)
from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError
from tutti_core.geometry import U64, PageFragments
from tutti_core.keys import PageKeys
from tutti_core.layers import PARTS_AHEAD_MAX, LayerRead, LayerReader, group_layers
from tutti_core.memcopy import copy_pieces
from tutti_core.store import LoadTicket, NamespaceStore, PrefixStore

TENSORS = 2
"""K and V."""
WAIT_S = 300.0
SHARE_MAX = 0.8
"""Of the free memory and of the free disk; a row that would need more is measured smaller."""
_SEGMENT_BYTES = 256 * MIB
_CATALOG_BYTES = 16 * MIB
_SPARE_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class LinkerPlan:
    """What to measure.

    fragment_bytes  of one page of one layer's K or V; one geometry each.
    pages           lengths of the prefixes.
    part_bytes      what the layers of a page are grouped to; None: what `group_layers` chooses.
    ahead           parts in flight.
    peers           also measure fio and the way by host memory.
    """

    folder: Path
    fragment_bytes: Sequence[int] = (16 << 10, 128 << 10)
    pages: Sequence[int] = (128, 1024)
    layers: int = 32
    rounds: int = 5
    depth: int = 64
    transport: str = "auto"
    part_bytes: int | None = None
    ahead: int = PARTS_AHEAD_MAX
    peers: bool = True

    def check(self) -> None:
        """Raise ConfigError where the plan cannot work; writes nothing."""
        sizes = self.fragment_bytes
        if not sizes or any(size < 2048 or size % 2048 for size in sizes):
            raise ConfigError("fragments: multiples of 2 KiB are needed, such as 16KiB,128KiB")
        if not self.pages or min(self.pages) < 1:
            raise ConfigError("pages: numbers of at least 1 are needed, such as 128,1024")
        for name in ("layers", "rounds", "depth", "part_bytes", "ahead"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        if not self.folder.is_dir():
            raise ConfigError(f"dir = {str(self.folder)!r} is not a directory")
        for size in sizes:
            shape = Shape(self.layers, size, 1)
            need_memory(shape.memory_bytes(self.peers))
            need_space(self.folder, shape.disk_bytes(self.peers))


@dataclass(frozen=True, slots=True)
class Shape:
    """A prefix: `pages` pages of `layers` layers, K and V of `fragment_bytes` each."""

    layers: int
    fragment_bytes: int
    pages: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page."""
        return TENSORS * self.fragment_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layers * self.layer_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the prefix."""
        return self.pages * self.page_bytes

    def memory_bytes(self, peers: bool) -> int:
        """The pool, a host buffer for the peers, and some room."""
        return (2 if peers else 1) * self.total_bytes + _SPARE_BYTES

    def disk_bytes(self, peers: bool) -> int:
        """Pages in parts, whole pages and fio's file for the peers, and some room."""
        copies = 3 if peers else 1
        return copies * self.total_bytes * 9 // 8 + 4 * _SEGMENT_BYTES + _SPARE_BYTES

    def words(self) -> str:
        """For people: layers, tensors of each, bytes of one page of one of them."""
        return f"{self.layers} x {TENSORS} x {_words(self.fragment_bytes)}"


class DevicePool:
    """Host memory laid out as an engine's device pool: [layer][K or V][slot], a page a slot."""

    def __init__(self, shape: Shape, generator: np.random.Generator) -> None:
        self.shape = shape
        self.arena = Arena(shape.total_bytes)
        self.slots = generator.permutation(shape.pages)
        self.fragments = self._fragments()

    def prefix(self, pages: int) -> PageFragments:
        """Where the first pages lie: K and V of layer 0, of layer 1, …"""
        return self.fragments.part(0, pages)

    def fill(self, generator: np.random.Generator) -> None:
        """New random bytes."""
        self.arena.fill_random(generator, 0, self.shape.total_bytes)

    def wipe(self) -> None:
        """Zeros."""
        self.arena.bytes[:] = 0

    def checksums(self, pages: int) -> U64:
        """One checksum for each of the first pages."""
        where = self.prefix(pages)
        each = where.address.shape[1]
        start = np.arange(0, (pages + 1) * each, each, dtype=np.uint32)
        address = np.ascontiguousarray(where.address).reshape(-1)
        return hashing.checksum_items(start, address, np.tile(where.length_bytes, pages))

    def _fragments(self) -> PageFragments:
        shape = self.shape
        rows = np.arange(shape.layers * TENSORS, dtype=np.uint64) * np.uint64(shape.pages)
        places = rows + self.slots.astype(np.uint64)[:, None]
        base = np.uint64(self.arena.bytes.ctypes.data)
        length = np.full(len(rows), shape.fragment_bytes, dtype=np.uint64)
        address = base + places * np.uint64(shape.fragment_bytes)
        return PageFragments(np.asfortranarray(address), length, self.arena)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One layer-wise load: seconds from the submission to each layer; CPU seconds of Python."""

    layer_s: tuple[float, ...]
    python_s: float


class LayerClock:
    """A sink that notes when each layer is complete, and lets others wait for it."""

    def __init__(self, layers: int) -> None:
        self.at_s = [0.0] * layers
        self.error: BaseException | None = None
        self._ready = [threading.Event() for _ in range(layers)]

    def complete(self, layer: int) -> None:
        """Note the moment."""
        self.at_s[layer] = time.perf_counter()
        self._ready[layer].set()

    def fail(self, error: BaseException) -> None:
        """Let everyone go on, to find the error."""
        self.error = error
        for event in self._ready:
            event.set()

    def wait(self, layer: int) -> None:
        """Wait for a layer. Raises BenchError if the load failed."""
        if not self._ready[layer].wait(WAIT_S):
            raise BenchError(f"layer {layer} is not there after {WAIT_S} s")
        if self.error is not None:
            raise BenchError(f"the load failed: {self.error}")


class Bench:
    """One geometry: a store with the same prefix in parts and as whole pages, and its peers.

    With `peers` off there are no whole pages and no host buffer.
    """

    def __init__(self, plan: LinkerPlan, folder: Path, shape: Shape) -> None:
        self.plan, self.shape, self._folder = plan, shape, folder
        generator = np.random.Generator(np.random.SFC64(1))
        self.keys = PageKeys(generator.bytes(shape.pages * KEY_BYTES), KEY_BYTES)
        self.pool = DevicePool(shape, generator)
        self.groups = group_layers([shape.layer_bytes] * shape.layers, plan.part_bytes)
        self.part_bytes = tuple(len(group) * shape.layer_bytes for group in self.groups)
        self.host = Arena(shape.total_bytes) if plan.peers else None
        with ExitStack() as undo:
            self.store = self._open()
            undo.callback(self.store.close)
            self._in_parts = self._namespace("layer-major", parts=self.part_bytes)
            self._whole = self._namespace("whole")
            self.reader = LayerReader(shape.layers, parts_ahead_max=plan.ahead)
            undo.callback(self.reader.close, WAIT_S)
            self.pool.fill(generator)
            self.expected = self.pool.checksums(shape.pages)
            self._save(self._in_parts)
            if self.host is not None:
                self._save(self._whole)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Let go of everything."""
        self._undo.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- what is timed ----
    def layer_wise(self, pages: int) -> Loaded:
        """Load the first pages by the layer reader."""
        before_s = self._reader_cpu_s()
        caller_s, start_s = time.thread_time(), time.perf_counter()
        clock = self.submit(pages)
        clock.wait(self.shape.layers - 1)
        caller_s = time.thread_time() - caller_s
        reader_s = self._reader_cpu_s() - before_s
        return Loaded(tuple(at - start_s for at in clock.at_s), caller_s + reader_s)

    def submit(self, pages: int) -> LayerClock:
        """Begin to load the first pages."""
        clock = LayerClock(self.shape.layers)
        memory = self.pool.prefix(pages)

        def make() -> list[LayerRead]:
            load = self._in_parts.load_parts(self.keys, memory, 0, pages)
            return [LayerRead(load, self.groups)]

        self.reader.submit(make, clock)
        return clock

    def by_host(self, pages: int) -> tuple[float, float]:
        """Whole pages into the host buffer, then a copy into the pool: seconds of both, of all."""
        assert self.host is not None
        size, where = self.shape.page_bytes, self.pool.prefix(pages)
        target, source, length = self._copies(where)
        start_s = time.perf_counter()
        good, tickets = 0, list[LoadTicket]()
        for first in range(0, pages, CALL_PAGES):
            stop = min(first + CALL_PAGES, pages)
            if len(tickets) == LOADS_IN_FLIGHT_MAX:
                good += int(tickets.pop(0).wait(WAIT_S).sum())
            into = self.host.bytes[first * size : stop * size]
            tickets.append(self._whole.load(self.keys, into, first, stop - first))
        good += sum(int(ticket.wait(WAIT_S).sum()) for ticket in tickets)
        read_s = time.perf_counter() - start_s
        copy_pieces(target, source, length)
        if good != pages:
            raise BenchError(f"{pages - good} of {pages} whole pages did not come")
        return read_s, time.perf_counter() - start_s

    def check(self, pages: int, who: str) -> None:
        """Compare the pool with what was saved.

        Raises
            BenchError: a page is wrong.
        """
        wrong = int(np.count_nonzero(self.pool.checksums(pages) != self.expected[:pages]))
        if wrong:
            raise BenchError(f"{who}: {wrong} of {pages} pages came back wrong")

    # ---- inside ----
    def _open(self) -> PrefixStore:
        shape, plan = self.shape, self.plan
        slots = (shape.page_bytes + 4096 * (1 + shape.layers), shape.page_bytes)
        segment = max(_SEGMENT_BYTES, 1 << (slots[0] - 1).bit_length())
        room = sum(-(-shape.pages // (segment // slot)) + 1 for slot in slots) * segment
        config = StoreConfig.parse(
            {
                "path": self._folder / "store",
                "capacity": room + _CATALOG_BYTES + 2 * MIB,
                "segment": segment,
                "catalog": _CATALOG_BYTES,
                "transport": plan.transport,
                "queue_depth": plan.depth,
                "backlog": 2 * shape.total_bytes + GIB,
                "io_timeout_s": WAIT_S,
            }
        )
        store = PrefixStore.open(config)
        store.register(self.pool.arena.bytes)
        if self.host is not None:
            store.register(self.host.bytes)
        return store

    def _namespace(self, layout: str, parts: tuple[int, ...] = ()) -> NamespaceStore:
        return self.store.namespace(
            model="bench",
            page_bytes=self.shape.page_bytes,
            page_tokens=64,
            layout=layout,
            key_bytes=KEY_BYTES,
            parts=parts,
        )

    def _save(self, pages: NamespaceStore) -> None:
        count, stored = self.shape.pages, 0
        for first in range(0, count, CALL_PAGES):
            stop = min(first + CALL_PAGES, count)
            chain = self.keys.upto(stop)
            where = self.pool.fragments.part(first, stop)
            stored += int(pages.save(chain, where, first).wait(WAIT_S).sum())
        if stored != count:
            raise BenchError(f"{stored} of {count} pages were saved")

    def _copies(self, where: PageFragments) -> tuple[U64, U64, U64]:
        """Target, source and length of each fragment's copy out of the host buffer, by layer."""
        assert self.host is not None
        pages, each = where.address.shape
        rows = np.arange(pages, dtype=np.uint64) * np.uint64(self.shape.page_bytes)
        inside = np.arange(each, dtype=np.uint64) * np.uint64(self.shape.fragment_bytes)
        source = np.uint64(self.host.bytes.ctypes.data) + rows + inside[:, None]
        length = np.full(pages * each, self.shape.fragment_bytes, dtype=np.uint64)
        return np.ascontiguousarray(where.address.T).reshape(-1), source.reshape(-1), length

    def _reader_cpu_s(self) -> float:
        """CPU time of the reader's thread so far; waits until it has nothing else to do."""
        noted: list[float] = []
        clock = LayerClock(self.shape.layers)

        def note() -> list[LayerRead]:
            noted.append(time.thread_time())
            return []

        self.reader.submit(note, clock)
        clock.wait(self.shape.layers - 1)
        if not self.reader.wait_idle(WAIT_S):
            raise BenchError("the reader does not come to rest")
        return noted[0]


def fit(plan: LinkerPlan, fragment_bytes: int) -> list[tuple[int, int]]:
    """The lengths to measure, each with the one that was asked for: halved until there is room."""
    facts = os.statvfs(plan.folder)
    disk = SHARE_MAX * facts.f_bavail * facts.f_frsize
    memory = SHARE_MAX * available_memory_bytes()
    found: dict[int, int] = {}
    for asked in plan.pages:
        pages = asked
        while pages > 1:
            shape = Shape(plan.layers, fragment_bytes, pages)
            if shape.memory_bytes(plan.peers) <= memory and shape.disk_bytes(plan.peers) <= disk:
                break
            pages //= 2
        found[pages] = max(asked, found.get(pages, 0))
    return sorted(found.items())


def available_memory_bytes() -> int:
    """What the kernel says could be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _words(size: int) -> str:
    return f"{size >> 20} MiB" if size % MIB == 0 else f"{size >> 10} KiB"
