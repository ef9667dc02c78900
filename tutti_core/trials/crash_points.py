"""Stops a store at every operation of its devices and its catalog in turn, and looks what is left.

A seeded history runs on devices in memory. At operation n of the devices (an item read or written,
a flush), or operation n of the catalog (a transaction begun, committed), the power goes: blocks
that were not flushed are there, lost or torn, and so is the catalog's commit in flight. The store
is opened again: each page must be bit-exact or a miss, what was durable must be there, no slot may
be lost or used twice, and no thread, descriptor or file may be left over.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError, DeviceError, TuttiError
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.index.catalog import Records
from tutti_core.io.transport import Transport
from tutti_core.keys import CHAIN_WIDTH_BYTES, PageKeys
from tutti_core.store import PrefixStore
from tutti_core.testing import FaultyDevices, Oracle
from tutti_core.trials.catalog_power import CatalogPower
from tutti_core.trials.kit import (
    PAGE,
    Client,
    chain,
    check_space,
    client,
    memory_devices,
    quiet,
    raw_records,
    small_config,
)
from tutti_core.trials.tally import Tally

SPACES: tuple[Mapping[str, Any], ...] = (
    {"model": "a"},
    {"model": "b", "page_bytes": 3 * PAGE - 7},
    {"model": "c", "page_bytes": PAGE + 9, "parts": (9, PAGE)},
)
WORDS = ("aaaa", "aab", "abab", "b", "bbbbbbb", "abc", "cab", "aaaabb")

Name = tuple[bytes, bytes]
"""A page: digest of its namespace, and its key."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of store and of history.

    room      nothing needs to be evicted.
    faulty    devices do wrong: any page may be a miss.
    settings  of the store, beyond its size.
    """

    name: str
    steps: int
    segments: int
    pools: int = 1
    room: bool = False
    faulty: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def durable(self) -> bool:
        """Whether what is in the catalog survives a power loss."""
        return self.settings.get("durability") != "none" and not self.faulty

    @property
    def exclusive(self) -> bool:
        """Whether a load takes pages off the drives."""
        return self.settings.get("dram_mode") == "exclusive"

    def config(self, folder: Path) -> StoreConfig:
        """A store of this shape."""
        pools = [folder / f"pool{i}" for i in range(self.pools)] if self.pools > 1 else []
        return small_config(
            folder / "store", segments=self.segments, pools=pools, **dict(self.settings)
        )


WRITE_BACK = {"dram": 1 << 20, "write_policy": "write_back", "huge_pages": False}

SHAPES = (
    Shape("room", 8, 12, room=True),
    Shape("two pools", 8, 6, pools=2, room=True),
    Shape("no flush", 8, 6, pools=2, room=True, settings={"durability": "none"}),
    Shape("eviction", 13, 2),
    Shape("eviction, no flush", 9, 2, settings={"durability": "none"}),
    Shape("write back", 9, 12, room=True, settings=WRITE_BACK),
    Shape("write back, eviction", 9, 3, settings=WRITE_BACK),
    Shape("exclusive", 9, 3, settings={**WRITE_BACK, "dram_mode": "exclusive"}),
)


class Life:
    """One history, until its end or until the power goes, and what it promised.

    promised  pages that a save, or a flush where saves end in memory, has reported as durable and
              that nothing has taken away since.
    recorded  pages that the catalog had at the end.
    """

    def __init__(self, shape: Shape, oracle: Oracle, tally: Tally) -> None:
        self.shape = shape
        self.oracle = oracle
        self.tally = tally
        self.promised: set[Name] = set()
        self.recorded: set[Name] = set()
        self._in_memory: set[Name] = set()
        self.store: PrefixStore | None = None
        self._clients: list[Client] = []
        self._saved: tuple[Client, PageKeys] | None = None

    def play(
        self,
        config: StoreConfig,
        devices: Transport,
        seed: int,
        off: Callable[[], bool],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the history. Whatever is raised while the power is on is a complaint."""
        rng = random.Random(seed)
        try:
            store = PrefixStore.open(config, transport_object=devices)
        except TuttiError as error:
            if not off():
                self.tally.complain(f"{self.shape.name}: it does not open: {error}")
            return
        try:
            with store:
                self.store = store
                store.wait_restored(20)
                self._clients = [
                    client(store, self.oracle, self.tally, **fields) for fields in SPACES
                ]
                for step in range(self.shape.steps):
                    self._step(store, rng, seed * 1000 + step, off)
                    on_step()
                    if off():
                        break
                    if not self.shape.room:
                        self.promised &= recorded_pages(store)  # others were evicted
        except (DeviceError, ConfigError) as error:
            if not off():
                self.tally.complain(f"{self.shape.name}: raised {error!r}")
        self.store = None
        self.recorded = names_of(raw_records(config.path))  # closing may have written, and evicted

    def _step(
        self, store: PrefixStore, rng: random.Random, seed: int, off: Callable[[], bool]
    ) -> None:
        pages, keys = rng.choice(self._clients), chain(*rng.choice(WORDS))
        roll = rng.random()
        if roll < 0.55:
            self._save(pages, keys, seed)
        elif roll < 0.85:
            pages, keys = self._saved if self._saved and rng.random() < 0.6 else (pages, keys)
            self._load(pages, keys, off)
        elif roll < 0.92:
            self._clear(pages)
        elif store.flush(20) and not off():
            flushed = self._in_memory
            self.promised |= flushed if self.shape.room else flushed & recorded_pages(store)
        if self.shape.exclusive and roll < 0.85:
            self.promised -= _pages_of(pages, keys)

    def _save(self, pages: Client, keys: PageKeys, seed: int) -> None:
        stored = pages.save(keys, seed=seed)
        good = _pages_of(pages, keys, stored)
        (self._in_memory if "dram" in self.shape.settings else self.promised).update(good)
        self._saved = pages, keys

    def _load(self, pages: Client, keys: PageKeys, off: Callable[[], bool]) -> None:
        contained = pages.contains(keys)
        loaded = pages.load(keys)
        if loaded != contained and not (off() or self.shape.faulty or self.shape.exclusive):
            self.tally.complain(f"{self.shape.name}: a page that was offered did not load")
        self._forget(_pages_of(pages, keys) - _pages_of(pages, keys, loaded))

    def _clear(self, pages: Client) -> None:
        self._forget({name for name in self.promised | self._in_memory if name[0] == pages.name})
        pages.pages.clear()
        if self.shape.durable:  # else it may be taken back
            self.oracle.forget(pages.name)

    def frozen(self) -> Life:
        """What was known, promised and recorded at this moment."""
        then = Life(self.shape, self.oracle.copy(), self.tally)
        then.promised = set(self.promised)
        then.recorded = self.recorded if self.store is None else recorded_pages(self.store)
        return then

    def _forget(self, names: set[Name]) -> None:
        self.promised -= names
        self._in_memory -= names

    def expected(self) -> set[Name]:
        """Pages that must be there after the power loss."""
        if not self.shape.durable:
            return set()
        return self.promised if self.shape.room else self.promised & self.recorded


def _pages_of(pages: Client, keys: PageKeys, chosen: list[bool] | None = None) -> set[Name]:
    """Names of the pages of a chain; of the chosen ones."""
    return {(pages.name, key) for i, key in enumerate(keys) if chosen is None or chosen[i]}


def flip_page(config: StoreConfig, record: np.void, rng: random.Random) -> None:
    """Invert a bit of a page in its pool file."""
    pools = len(config.pool_paths)
    segment, blocks = int(record["segment"]), -(-int(record["length_bytes"]) // PAGE)
    offset = DATA_OFFSET_BYTES + segment // pools * config.segment_bytes
    offset += int(record["slot"]) * blocks * PAGE
    with open(config.pool_paths[segment % pools] / "pool.tutti", "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << rng.randrange(8)]))


def recorded_pages(store: PrefixStore) -> set[Name]:
    """Pages that the catalog has, without counting as a use."""
    found: set[Name] = set()
    for _, records, _ in store._catalog.scan_records(1000):
        found |= names_of(records)
    return found


def names_of(records: Records) -> set[Name]:
    """The pages that records are of."""
    return {
        (record["namespace"].tobytes(), record["page_key"].tobytes()[:CHAIN_WIDTH_BYTES])
        for record in records
    }


def judge(life: Life, config: StoreConfig, devices: Transport | None, where: str) -> None:
    """Open what is left and compare it with what a life had promised."""
    tally, shape = life.tally, life.shape
    try:
        store = PrefixStore.open(config, transport_object=devices)
    except TuttiError as error:
        tally.complain(f"{where}: it does not open again: {error}")
        return
    with store:
        clients = [client(store, life.oracle, tally, **fields) for fields in SPACES]
        expected = life.expected()
        for pages in clients:
            for word in WORDS:
                _judge_chain(pages, chain(*word), expected, shape, tally, where)
        try:
            check_space(store)
            use_again(store, clients)
        except (AssertionError, TuttiError) as error:
            tally.complain(f"{where}: {error}")


def _judge_chain(
    pages: Client, keys: PageKeys, expected: set[Name], shape: Shape, tally: Tally, where: str
) -> None:
    contained = pages.contains(keys)
    loaded = pages.load(keys)
    if shape.exclusive and loaded != contained:  # a page that was just moving up is a miss
        loaded = pages.load(keys)
    for key, here, good in zip(keys, contained, loaded, strict=True):
        if here and not good and shape.durable:
            tally.lose(f"{where}: page {key.hex()} is in the catalog and did not survive")
        elif not good and (pages.name, key) in expected:
            tally.lose(f"{where}: page {key.hex()} was stored and is gone")
            expected.discard((pages.name, key))
    for good, is_now in zip(loaded, pages.contains(keys), strict=True):
        if is_now and not good:
            tally.complain(f"{where}: a page that did not load is offered again")


def use_again(store: PrefixStore, clients: list[Client]) -> None:
    """The store still works, and all of its room is to be had. Raises AssertionError otherwise."""
    for pages, word in zip(clients, ("bbbbbbb", "aaaa", "ab"), strict=True):
        assert all(pages.save(chain(*word), seed=99)), "the store is not usable any more"
        assert all(pages.load(chain(*word))), "what was saved just now does not load"
    check_space(store)
    for pages in clients:
        pages.pages.clear()
    check_empty(store)
    layout = store._manager.layout
    count = layout.segment_count * layout.segment_bytes // clients[0].pages._entry.slot_bytes
    keys = chain(*(("all", i) for i in range(count)))
    assert all(clients[0].save(keys)), "room was lost"
    store.flush(20)
    assert all(clients[0].load(keys)), "what fills the store does not load"
    check_space(store)


def check_empty(store: PrefixStore) -> None:
    """Raise AssertionError unless everything is free. Call when idle, after clearing all."""
    stats = store.stats()
    assert stats.pages == 0, f"{stats.pages} records are left of nothing"
    assert stats.used_bytes == 0, f"{stats.used_bytes} bytes are used by nothing"
    for number in store._catalog.segments():
        assert not store._catalog.slots_of(number), f"segment {number} has slots of no page"


def check_files(folder: Path) -> None:
    """Raise AssertionError if a store's directory has files that do not belong there."""
    known = {"pool.tutti", "data.mdb", "lock.mdb", "lock"}
    for place, _, files in os.walk(folder):
        strange = [f for f in files if f not in known and not f.endswith(".lock")]
        assert not strange, f"{strange} left over in {place}"


def resources() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@dataclass(slots=True)
class Stop:
    """Where the power goes: at operation `index` of the devices or of the catalog."""

    of: str
    index: int


def crash_once(folder: Path, shape: Shape, seed: int, stop: Stop | None, tally: Tally) -> int:
    """One history, one power loss, one reopening.

    Returns
        how many operations of the kind of `stop` there were; with None, of the devices.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before = resources()
    config = shape.config(folder)
    salt = seed * 100_003 + (stop.index * 2 + (stop.of == "catalog") if stop else 0)
    devices = memory_devices(config, seed=salt)
    life = Life(shape, Oracle(), tally)
    where = f"{shape.name}, seed {seed}, {stop}"
    count = _live(life, config, devices, seed, stop, salt)
    judge(life, config, devices.reopen(seed=salt), where)
    tally.crash_points += 1
    _check_leftovers(folder, before, tally, where)
    return count


def _live(
    life: Life,
    config: StoreConfig,
    devices: FaultyDevices,
    seed: int,
    stop: Stop | None,
    salt: int | None = None,
) -> int:
    """One history and the power loss that ends it; returns the operations of the kind of `stop`."""
    power = CatalogPower(lambda: devices.stopped, lambda: devices.stop_at(0))
    if stop is not None:
        (devices.stop_at if stop.of == "device" else power.stop_at)(stop.index)
    salt = seed if salt is None else salt
    with power.installed():
        life.play(config, devices, seed, lambda: power.stopped)
        devices.crash(seed=salt)
        power.lose(random.Random(salt))
    return power.operations if stop and stop.of == "catalog" else devices.operations


def _check_leftovers(folder: Path, before: tuple[int, int], tally: Tally, where: str) -> None:
    if (after := resources()) != before:
        tally.complain(f"{where}: descriptors and threads: {before} before, {after} after")
    try:
        check_files(folder)
    except AssertionError as error:
        tally.complain(f"{where}: {error}")


def every_stop(folder: Path, shape: Shape, seed: int, tally: Tally, end_s: float = 0.0) -> None:
    """Play one history for each operation that it makes, with the power lost at that one.

    `end_s` on the monotonic clock ends it early; 0: not.
    """
    for of in ("device", "catalog"):
        index = 0
        total = 1
        while index <= total and not (end_s and time.monotonic() > end_s):
            count = crash_once(folder, shape, seed, Stop(of, index), tally)
            total = max(total, count)  # a history that goes on to its end makes them all
            index += 1


def relapses(folder: Path, seed: int, lives: int, tally: Tally) -> None:
    """Lose the power again and again, soon after each reopening, in one store."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    shape = Shape("relapse", 6, 3)
    config = shape.config(folder)
    devices = memory_devices(config, seed=seed)
    oracle = Oracle()
    for number in range(lives):
        of, index = rng.choice(("device", "catalog")), rng.randrange(1, 25)
        life = Life(shape, oracle, tally)
        _live(life, config, devices, seed * 1000 + number, Stop(of, index))
        devices = devices.reopen(seed=seed + number)
        tally.crash_points += 1
    judge(Life(shape, oracle, tally), config, devices, f"relapse, seed {seed}")


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Stop at every operation of a history of each shape; then, until the time is over, of others.

    Parameters
        directory: an empty one; made. What is in it afterwards may be deleted.
        seconds: 0 for one history of each shape.
    """
    tally = Tally()
    end_s = time.monotonic() + seconds if seconds else 0.0
    turn = 0
    with quiet():
        while turn == 0 or time.monotonic() < end_s:
            for shape in SHAPES:
                every_stop(directory / "store", shape, seed + turn, tally, end_s if turn else 0.0)
            relapses(directory / "store", seed + turn, 12, tally)
            turn += 1
    shutil.rmtree(directory / "store", ignore_errors=True)
    return tally
