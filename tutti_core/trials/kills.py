"""Kills processes that use a store on real files, at random moments, and looks what is left.

A nursery, one process that has imported everything, forks each child; the child opens the store,
saves, loads and clears from several threads, and reports through a pipe what was stored. After a
random time it gets SIGKILL. Then `verify_store` must find nothing bad, each page must load
bit-exact or miss, what was reported must be there unless it may have been evicted, all slots must
be accounted for, and the store must work. Some children are killed while they repair a store that
was damaged on purpose.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tutti_core.config import StoreConfig
from tutti_core.errors import TuttiError, UnsupportedError
from tutti_core.keys import PageKeys
from tutti_core.repair import repair_store
from tutti_core.store import PrefixStore
from tutti_core.testing import Oracle, page_bytes
from tutti_core.trials.crash_points import Name, check_files, flip_page, names_of, resources
from tutti_core.trials.kit import (
    PAGE,
    check_space,
    client,
    disk_bytes,
    finish,
    quiet,
    raw_records,
    small_config,
)
from tutti_core.trials.kit import (
    run as chain_of_name,
)
from tutti_core.trials.tally import Tally
from tutti_core.verify import verify_store

SPACES: tuple[Mapping[str, Any], ...] = (
    {"model": "plain"},
    {"model": "parts", "page_bytes": PAGE + 9, "parts": (9, PAGE)},
)
CHAINS = 10
"""Chains in each namespace, of 1 to PAGES_MAX pages."""

PAGES_MAX = 9
THREADS = 3
LIVES = 8
"""Kills in one store before a new one is made."""

REPORTS_MAX = 60
"""A child is killed after at most so many reports: what it does counts, not how fast it is."""

DELAY_MAX_S = 0.01
"""How long after the last of them; in a repair, REPAIR_DELAY_MAX_S after its beginning."""

REPAIR_DELAY_MAX_S = 0.03

REPORT_TIMEOUT_S = 60.0
DAMAGED_PAGES_MAX = 4

_OPENED = 255
_CLEARED = 254


@dataclass(frozen=True, slots=True)
class Habitat:
    """One kind of store for children to live in.

    room    nothing needs to be evicted or is cleared: what is reported stays.
    repair  children repair instead of saving.
    """

    name: str
    segments: int
    room: bool
    pools: int = 1
    repair: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


HABITATS = (
    Habitat("posix", 48, True, settings={"transport": "posix"}),
    Habitat("eviction and clears", 3, False, settings={"transport": "posix"}),
    Habitat("uring, two pools", 24, True, pools=2, settings={"transport": "uring"}),
    Habitat(
        "write back",
        48,
        True,
        settings={"transport": "posix", "dram": 1 << 20, "write_policy": "write_back"},
    ),
    Habitat("no flush", 48, True, settings={"transport": "posix", "durability": "none"}),
    Habitat("repair", 48, True, repair=True, settings={"transport": "posix"}),
)


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is to do, and when it is to be killed.

    life     seeds what it does, and marks the pages that it saves.
    reports  to wait for; the first says that the store is open. 0: it may be opening.
    delay_s  from then to the kill.
    """

    habitat: int
    folder: str
    life: int
    reports: int
    delay_s: float


def config_of(habitat: Habitat, folder: Path) -> StoreConfig:
    """The store of a habitat."""
    pools = [folder / f"pool{i}" for i in range(habitat.pools)] if habitat.pools > 1 else []
    return small_config(
        folder / "store",
        segments=habitat.segments,
        pools=pools,
        huge_pages=False,
        **habitat.settings,
    )


def chain_at(number: int) -> PageKeys:
    """One of the chains of a namespace."""
    return chain_of_name(number, 1 + number * 7 % PAGES_MAX)


# ---- the child ----
def _live(order: Order, pipe: int) -> None:
    """Use a store until the end; never returns but by an error."""
    habitat = HABITATS[order.habitat]
    config = config_of(habitat, Path(order.folder))
    if habitat.repair:
        os.write(pipe, bytes([_OPENED]))
        while True:
            repair_store(config.path, config.pools, transport="posix")
    store = PrefixStore.open(config)
    os.write(pipe, bytes([_OPENED]))
    for number in range(THREADS):
        threading.Thread(
            target=_work, args=(store, habitat, order.life, number, pipe), daemon=True
        ).start()
    threading.Event().wait()


def _work(store: PrefixStore, habitat: Habitat, life: int, number: int, pipe: int) -> None:
    """One thread of a child: save, load, clear; report what is durable, a byte a chain."""
    rng = random.Random(life * THREADS + number)
    clients = [client(store, **fields) for fields in SPACES]
    for pages in clients:
        pages.trusting = False  # the parent compares; here loads are only load
    waiting: list[int] = []
    while True:
        space, name = rng.randrange(len(SPACES)), rng.randrange(CHAINS)
        pages, keys, roll = clients[space], chain_at(name), rng.random()
        if roll < 0.6:
            if all(pages.save(keys, seed=life)):
                waiting.append(space * CHAINS + name)
        elif roll > 0.97 and not habitat.room:
            os.write(pipe, bytes([_CLEARED]))
            pages.pages.clear()
        else:
            memory = bytearray(len(keys) * pages.size)
            finish(pages.begin_load(keys, memory))
        if waiting and ("dram" not in habitat.settings or (roll > 0.9 and store.flush(20))):
            os.write(pipe, bytes(waiting))
            waiting = []


# ---- the nursery ----
def serve() -> None:
    """Bear a child for each order on standard input; answer with its reports, as JSON lines."""
    for line in sys.stdin:
        print(json.dumps(_bear(Order(**json.loads(line)))), flush=True)


def _bear(order: Order) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            with quiet():
                _live(order, writer)
        finally:
            os._exit(3)
    os.close(writer)
    seen = b""
    try:
        while len(seen) < order.reports and select.select([reader], [], [], REPORT_TIMEOUT_S)[0]:
            if not (data := os.read(reader, 1)):
                break
            seen += data
        time.sleep(order.delay_s)
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    while data := os.read(reader, 65536):
        seen += data
    os.close(reader)
    return {"reports": list(seen), "killed": os.WIFSIGNALED(status)}


@contextmanager
def nursery(setup: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that bears children; see `serve`. `setup` is a program to run in it before."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{setup}\nfrom tutti_core.trials.kills import serve\nserve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.wait(REPORT_TIMEOUT_S)
        process.stdout.close()


# ---- the parent ----
class Family:
    """Children that live in one store, one after the other, and what they reported."""

    def __init__(self, number: int, folder: Path, process: subprocess.Popen[str], tally: Tally):
        self.number = number
        self.habitat = HABITATS[number]
        self.folder = folder
        self.config = config_of(self.habitat, folder)
        self.tally = tally
        self.promised: set[int] = set()
        self.lives: list[int] = []
        self._process = process
        self._where = ""

    def life(self, seed: int) -> None:
        """Bear a child, kill it, and look what is left."""
        rng = random.Random(seed)
        damaged: set[Name] = set()
        before: set[Name] = set()
        self._where = f"{self.habitat.name}, life {seed}"
        if self.habitat.repair:
            self._fill(seed)
            damaged, before = self._damage(rng)
            reports, delay_s = 1, rng.uniform(0.0, REPAIR_DELAY_MAX_S)
        else:
            reports, delay_s = rng.randrange(REPORTS_MAX), rng.uniform(0.0, DELAY_MAX_S)
        self._bear(Order(self.number, str(self.folder), seed, reports, delay_s))
        self.lives.append(seed)
        self.tally.kills += 1
        if self.habitat.repair:
            self._finish_repair(damaged, before)
        self._verify()
        self._look()
        try:
            for place in (self.config.path, *self.config.pools):
                check_files(place)
        except AssertionError as error:
            self.tally.complain(f"{self._where}: {error}")

    def _bear(self, order: Order) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if not answer["killed"] or len(answer["reports"]) < order.reports:
            self.tally.complain(f"{self._where}: the child ended by itself, or hung")
        for report in answer["reports"]:
            if report == _CLEARED:
                self.promised.clear()
            elif report != _OPENED:
                self.promised.add(report)

    def _verify(self) -> None:
        try:
            report = verify_store(self.config.path, self.config.pools, transport="posix")
        except TuttiError as error:
            if (self.config.path / "catalog" / "data.mdb").exists() and self.promised:
                self.tally.complain(f"{self._where}: verify refuses: {error}")
            return
        if not report.clean:
            self.tally.complain(f"{self._where}: verify finds {report.damage}")

    def _look(self) -> None:
        """Open the store: everything loads or misses, what was promised is there, all works."""
        before = resources()
        try:
            with PrefixStore.open(self.config) as store:
                self._look_at(store)
        except (AssertionError, TuttiError) as error:
            self.tally.complain(f"{self._where}: {error}")
        if (after := resources()) != before:
            self.tally.complain(f"{self._where}: descriptors and threads {before}, then {after}")
        if disk_bytes(self.config.path) > self.config.capacity:
            self.tally.complain(f"{self._where}: more than its capacity is on the disk")

    def _look_at(self, store: PrefixStore) -> None:
        oracle = Oracle()
        clients = [client(store, oracle, self.tally, **fields) for fields in SPACES]
        for number in range(CHAINS * len(SPACES)):
            pages, keys = clients[number // CHAINS], chain_at(number % CHAINS)
            for key in keys:
                for life in self.lives:
                    oracle.save(pages.name, key, page_bytes(life, key, pages.size))
            hit, contained = pages.match(keys), pages.contains(keys)
            if pages.load(keys) != contained or not all(contained[:hit]):
                self.tally.complain(f"{self._where}: a page that is offered does not load")
            if self.habitat.room and number in self.promised and not all(contained):
                self.tally.lose(f"{self._where}: chain {number}", contained.count(False))
        check_space(store)
        seed = self.lives[-1]
        assert all(clients[0].save(chain_at(0), seed=seed)), "the store does not save any more"
        assert all(clients[0].load(chain_at(0))), "what was saved just now does not load"

    # ---- damage and repair ----
    def _fill(self, seed: int) -> None:
        with PrefixStore.open(self.config) as store:
            for space, fields in enumerate(SPACES):
                pages = client(store, **fields)
                for name in range(CHAINS):
                    if all(pages.save(chain_at(name), seed=seed)):
                        self.promised.add(space * CHAINS + name)
        self.lives.append(seed)

    def _damage(self, rng: random.Random) -> tuple[set[Name], set[Name]]:
        """Flip a bit of some pages; returns which, and all that there were."""
        records = raw_records(self.config.path)
        chosen = rng.sample(range(len(records)), min(DAMAGED_PAGES_MAX, len(records)))
        for i in chosen:
            flip_page(self.config, records[i], rng)
            self.tally.faults["flipped bit on a file"] += 1
        self.promised.clear()  # `_finish_repair` looks page by page
        return names_of(records[sorted(chosen)]), names_of(records)

    def _finish_repair(self, damaged: set[Name], before: set[Name]) -> None:
        """After a killed repair: nothing good is gone, and a second one drops what is bad."""
        lost = before - damaged - names_of(raw_records(self.config.path))
        if lost:
            self.tally.lose(f"{self._where}: a killed repair", len(lost))
        repair_store(self.config.path, self.config.pools, transport="posix")
        now = names_of(raw_records(self.config.path))
        if now != before - damaged:
            self.tally.complain(f"{self._where}: a repair left {len(now)} of {len(before)} pages")


def _usable(habitat: Habitat, folder: Path) -> bool:
    """Whether this machine has the transport."""
    try:
        PrefixStore.open(config_of(habitat, folder)).close()
    except UnsupportedError:
        return False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Kill one child in each habitat; then, until the time is over, LIVES in each, in turn.

    Parameters
        directory: an empty one on the file system to be tried; made.
    """
    tally = Tally()
    end_s = time.monotonic() + seconds
    usable = [i for i, h in enumerate(HABITATS) if _usable(h, directory / "probe")]
    turn = 0
    with quiet(), nursery() as process:
        while turn == 0 or time.monotonic() < end_s:
            for number in usable:
                folder = directory / f"family{number}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                family = Family(number, folder, process, tally)
                for life in range(LIVES if turn else 1):
                    family.life((seed + turn) * 1000 + life * 10 + number)
                shutil.rmtree(folder, ignore_errors=True)
            turn += 1
    return tally
