"""Small stores, chains of page keys and checked clients, for the tests of the core."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core import (
    BusyError,
    LoadTicket,
    NamespaceStore,
    PageKeys,
    PartsLoad,
    PrefixStore,
    Reading,
    SaveTicket,
    StoreConfig,
)
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.testing import FaultyDevices, Oracle, page_bytes

MIB = 1 << 20
PAGE = 4096
SEGMENT = 32768
NAMESPACE = {"model": "org/m", "page_bytes": PAGE, "page_tokens": 1}


def small_config(path: Path, *, segments: int = 2, pools: Sequence[Path] = (), **settings: Any):
    """A store with exactly `segments` segments per pool; 32 KiB each, so eight 4 KiB pages."""
    segment = settings.setdefault("segment", SEGMENT)
    catalog = settings.setdefault("catalog", 2 * MIB)
    share = DATA_OFFSET_BYTES + segments * segment
    settings.setdefault("capacity", catalog + max(len(pools), 1) * share)
    settings.setdefault("transport", "posix")
    settings.setdefault("io_timeout_s", 20.0)
    return StoreConfig.parse({"path": path, "pools": tuple(pools), **settings})


def open_small(path: Path, **settings: Any) -> PrefixStore:
    """Open a small store on files."""
    return PrefixStore.open(small_config(path, **settings))


def memory_devices(config: StoreConfig, **options: Any) -> FaultyDevices:
    """Devices in memory of the size that `config` gives each pool."""
    size = DATA_OFFSET_BYTES + config.segments_per_pool(DATA_OFFSET_BYTES) * config.segment_bytes
    return FaultyDevices([size] * len(config.pool_paths), **options)


@contextlib.contextmanager
def open_faulty(path: Path, **settings: Any) -> Iterator[tuple[PrefixStore, FaultyDevices]]:
    """Open a small store on devices in memory that fail on command."""
    config = small_config(path, **settings)
    devices = memory_devices(config)
    with PrefixStore.open(config, transport_object=devices) as store:
        yield store, devices


def chain(*ids: object, width: int = 16, rooted: bool = True) -> PageKeys:
    """Page keys of a sequence whose pages are named by `ids`: equal prefixes give equal keys."""
    digest, keys = hashlib.sha256(), []
    for part in ids:
        digest.update(repr(part).encode() + b"\0")
        keys.append(digest.digest()[:width])
    return PageKeys(b"".join(keys), width, rooted)


def run(name: object, count: int, **options: Any) -> PageKeys:
    """A chain of `count` pages that shares no page with that of another name."""
    return chain(*[(name, i) for i in range(count)], **options)


def loose(keys: PageKeys) -> PageKeys:
    """The same keys without the promise that the first is a first page."""
    return PageKeys(keys.data, keys.width, rooted=False)


class Client:
    """One namespace of a store, every answer of which is checked against an oracle.

    Without an oracle of the caller's, pages of seed 0 that another client saved are right too.
    """

    def __init__(self, pages: NamespaceStore, oracle: Oracle | None = None) -> None:
        self.pages = pages
        self.trusting = oracle is None
        self.oracle = oracle or Oracle()
        self.size = pages.namespace.page_bytes
        self.name = pages.namespace.digest()

    def save(
        self, keys: PageKeys, first: int = 0, seed: int = 0, *, output_tokens: Any = None
    ) -> list[bool]:
        """Save pages that know their name, and wait; one bool a page."""
        payloads = [page_bytes(seed, key, self.size) for key in list(keys)[first:]]
        for key, payload in zip(list(keys)[first:], payloads, strict=True):
            self.oracle.save(self.name, key, payload)
        ticket = self.pages.save(keys, b"".join(payloads), first, output_tokens=output_tokens)
        return finish(ticket).tolist()

    def load(self, keys: PageKeys, first: int = 0) -> list[bool]:
        """Load pages, check each byte, and return which were hits."""
        count = len(keys) - first
        memory = bytearray(b"\x5a" * (count * self.size))
        loaded = finish(self.begin_load(keys, memory, first)).tolist()
        for i, (key, good) in enumerate(zip(list(keys)[first:], loaded, strict=True)):
            if self.trusting:
                self.oracle.save(self.name, key, page_bytes(0, key, self.size))
            data = memory[i * self.size : (i + 1) * self.size]
            self.oracle.check_load(self.name, key, bytes(data) if good else None)
        return loaded

    def begin_load(
        self, keys: PageKeys, memory: bytearray, first: int = 0
    ) -> LoadTicket | PartsLoad:
        """Start a load, in parts where the namespace has them; for `finish`."""
        if self.pages.namespace.parts:
            return self.pages.load_parts(keys, memory, first)
        return self.pages.load(keys, memory, first)

    def match(self, keys: PageKeys, first: int = 0) -> int:
        """Length of the stored prefix in pages."""
        return self.pages.match(keys, first).pages

    def contains(self, keys: PageKeys, first: int = 0) -> list[bool]:
        """Which pages are stored."""
        return self.pages.contains(keys, first).tolist()


def finish(ticket: LoadTicket | SaveTicket | PartsLoad) -> npt.NDArray[np.bool_]:
    """Wait for a ticket; a device that is slow by some polls answers "not yet" a few times."""
    if isinstance(ticket, PartsLoad):
        return load_in_parts(ticket)
    for _ in range(20):
        with contextlib.suppress(BusyError):
            return ticket.wait(60)
    raise AssertionError("the transfer does not end")


def load_in_parts(load: PartsLoad) -> npt.NDArray[np.bool_]:
    """Read all parts, two ahead of the one that is waited for; one bool a page."""
    good = load.found.copy()
    flying: list[Reading] = []
    for part in range(load.part_count):
        if len(flying) == 2:
            good &= finish_part(load, flying.pop(0))
        flying.append(start_part(load, part))
    for reading in flying:
        good &= finish_part(load, reading)
    load.end()
    return good


def start_part(load: PartsLoad, part: int, **options: Any) -> Reading:
    """Start a part; devices that are busy for some calls refuse it a few times."""
    for _ in range(20):
        with contextlib.suppress(BusyError):
            return load.start(part, **options)
    raise AssertionError("the part cannot be started")


def finish_part(load: PartsLoad, reading: Reading) -> npt.NDArray[np.bool_]:
    """Wait for a part, several times if need be."""
    for _ in range(20):
        with contextlib.suppress(BusyError):
            return load.finish(reading, 60)
    raise AssertionError("the part does not arrive")


def client(store: PrefixStore, oracle: Oracle | None = None, **fields: Any) -> Client:
    """A checked client of one namespace."""
    return Client(store.namespace(**{**NAMESPACE, **fields}), oracle)


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until `condition` holds; fail with `what` after a generous bound."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.001)


def settle(store: PrefixStore) -> None:
    """Wait until everything queued before, removals of unreadable pages included, was done."""
    saver = store._saver
    poll(lambda: not saver._jobs and not saver.pending_bytes(), "the saver is idle")
    namespace = store.namespace(model="settle", page_bytes=PAGE, page_tokens=1)
    namespace.clear()  # passes through the same queue


def check_space(store: PrefixStore) -> None:
    """Slots in the catalog and taken slots in the space map must be the same. Call when idle."""
    settle(store)
    manager = store._manager
    store._sweep()
    owned: Counter[bytes] = Counter()
    with manager.lock:
        manager.space.collect()
        manager.space.check()
    for number, piece in manager.space.segments.items():
        used = store._catalog.slots_of(number)
        taken = {i for i in range(len(piece.generation)) if piece.generation[i]}
        assert set(used) == taken, f"segment {number}: catalog {set(used)}, space {taken}"
        found, records = store._catalog.lookup(b"".join(used.values()))
        assert found.all(), "a slot entry without a record"
        for slot, record in zip(used, records, strict=True):
            assert (int(record["segment"]), int(record["slot"])) == (number, slot)
            if piece.generation[slot] == record["generation"]:  # else retired, to be removed soon
                owned[record["namespace"].tobytes()] += 1
    assert +manager._owned == owned, "pages of namespaces are counted wrong"
    for entry in manager._entries.values():
        entry.pages.tree.check()


def disk_bytes(path: Path) -> int:
    """Bytes that a directory occupies on its disk, directories included."""
    total = path.stat().st_blocks * 512
    for folder, names, files in os.walk(path):
        for name in (*names, *files):
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def snapshot(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below `path` with its size, time of change and bytes (a sparse file's ends)."""
    found = {}
    for folder, names, files in os.walk(path):
        for name in names:
            found[os.path.join(folder, name)] = (0, 0, b"")
        for name in files:
            file = Path(folder, name)
            status = file.stat()
            with file.open("rb") as stream:
                data = stream.read(2 * MIB)
            found[str(file)] = (status.st_size, status.st_mtime_ns, data)
    return found
