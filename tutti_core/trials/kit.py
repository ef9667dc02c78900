"""Small stores, chains of page keys and clients whose every answer is checked, for all trials."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from tutti_core.config import StoreConfig
from tutti_core.errors import BusyError
from tutti_core.format import DATA_OFFSET_BYTES, RECORD
from tutti_core.index.catalog import Records
from tutti_core.keys import PageKeys
from tutti_core.store import (
    LoadTicket,
    NamespaceStore,
    PartsLoad,
    PrefixStore,
    Reading,
    SaveTicket,
)
from tutti_core.testing import FaultyDevices, Oracle, explain, page_bytes
from tutti_core.trials.tally import Tally

MIB = 1 << 20
PAGE = 4096
SEGMENT = 32768
NAMESPACE = {"model": "org/m", "page_bytes": PAGE, "page_tokens": 1}


def small_config(
    path: Path, *, segments: int = 2, pools: Sequence[Path] = (), **settings: Any
) -> StoreConfig:
    """A store with exactly `segments` segments per pool; 32 KiB each, so eight 4 KiB pages."""
    segment = settings.setdefault("segment", SEGMENT)
    catalog = settings.setdefault("catalog", 2 * MIB)
    share = DATA_OFFSET_BYTES + segments * segment
    settings.setdefault("capacity", catalog + max(len(pools), 1) * share)
    settings.setdefault("transport", "posix")
    settings.setdefault("io_timeout_s", 20.0)
    return StoreConfig.parse({"path": path, "pools": tuple(pools), **settings})


def memory_devices(config: StoreConfig, **options: Any) -> FaultyDevices:
    """Devices in memory of the size that `config` gives each pool."""
    size = DATA_OFFSET_BYTES + config.segments_per_pool(DATA_OFFSET_BYTES) * config.segment_bytes
    return FaultyDevices([size] * len(config.pool_paths), **options)


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
    A wrong answer raises AssertionError; with a tally it is counted there instead.
    """

    def __init__(
        self, pages: NamespaceStore, oracle: Oracle | None = None, tally: Tally | None = None
    ) -> None:
        self.pages = pages
        self.tally = tally
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
        return [bool(good) for good in finish(ticket)]

    def load(self, keys: PageKeys, first: int = 0) -> list[bool]:
        """Load pages, check each byte, and return which were hits."""
        count = len(keys) - first
        memory = bytearray(b"\x5a" * (count * self.size))
        loaded = [bool(good) for good in finish(self.begin_load(keys, memory, first))]
        for i, (key, good) in enumerate(zip(list(keys)[first:], loaded, strict=True)):
            if self.trusting:
                self.oracle.save(self.name, key, page_bytes(0, key, self.size))
            data = memory[i * self.size : (i + 1) * self.size]
            self._judge(key, bytes(data) if good else None)
        return loaded

    def _judge(self, key: bytes, data: bytes | None) -> None:
        if self.tally is None:
            self.oracle.check_load(self.name, key, data)
        elif data is None:
            self.tally.misses += 1
        else:
            known = self.oracle.payloads(self.name, key)
            wanted = data if data in known else known[-1] if known else b""
            what = explain(data)[:300] if data != wanted else ""
            self.tally.compare(data, wanted, f"page {key.hex()}: {what}")

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
        return [bool(here) for here in self.pages.contains(keys, first)]


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


def client(
    store: PrefixStore, oracle: Oracle | None = None, tally: Tally | None = None, **fields: Any
) -> Client:
    """A checked client of one namespace."""
    return Client(store.namespace(**{**NAMESPACE, **fields}), oracle, tally)


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


def quiesce(store: PrefixStore) -> None:
    """Wait until nothing moves: loads are collected, copies, promotions and writes at their end."""
    mover = store._mover
    store._sweep()
    if mover is None:
        settle(store)
        return
    assert store._drain_copies(20)
    poll(lambda: mover.wait_idle(1.0), "the mover is idle")
    settle(store)
    poll(lambda: mover.wait_idle(1.0), "the mover is idle")


def check_space(store: PrefixStore) -> None:
    """Slots in the catalog and taken slots in the space map must be the same. Call when idle."""
    quiesce(store)
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


def raw_records(path: Path) -> Records:
    """The records of a closed store, as they are; none where its catalog was never finished."""
    none: Records = np.empty(0, dtype=RECORD)
    folder = path / "catalog"
    if not (folder / "data.mdb").exists():
        return none
    try:
        env = lmdb.open(str(folder), map_size=1 << 30, max_dbs=8, readonly=True, lock=False)
    except lmdb.Error:
        return none
    try:
        records = env.open_db(b"records", create=False)
        with env.begin() as txn, txn.cursor(db=records) as cursor:
            return np.frombuffer(b"".join(value for _, value in cursor), dtype=RECORD)
    except lmdb.Error:
        return none
    finally:
        env.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the store's warnings to itself in the block: a trial makes hundreds."""
    logger = logging.getLogger("tutti")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def disk_bytes(path: Path) -> int:
    """Bytes that a directory occupies on its disk, directories included."""
    total = path.stat().st_blocks * 512
    for folder, names, files in os.walk(path):
        for name in (*names, *files):
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
