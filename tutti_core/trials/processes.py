"""Many processes on one store directory, killed and restarted at random, each checking all pages.

What a page holds follows from its key, so every process can check every page. A round is one store:

    roomy    nothing has to be evicted: what a save reported must be there for all, and for good
    tight    writers evict, segments change hands and sizes, and one namespace is cleared
    blind    tight, with `verify` off: only records, leases and generations keep pages right

Meanwhile the directory must stay within its capacity and every process within its share. In the end
all are gone, and one process looks: each byte, each slot and segment accounted for, all of the
capacity can be used again, and everything can be removed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti_core.config import StoreConfig
from tutti_core.errors import TuttiError
from tutti_core.index.catalog import Catalog
from tutti_core.store import PrefixStore
from tutti_core.tiers.lease import held_leases
from tutti_core.tiers.pools import catalog_folder, lease_folder
from tutti_core.trials import kit
from tutti_core.trials.process_life import (
    CHAINS,
    NAMESPACES,
    Life,
    Nursery,
    chain_of,
    content,
    load_and_compare,
    read_reports,
    wait_for,
)
from tutti_core.trials.tally import Tally
from tutti_core.verify import verify_store

LIVES = 5
"""Processes at a time, of which one only reads: a writer more than there are shares."""

KILLS = 4
"""Of a quick round."""

LONG_KILLS = 25
PAUSES_S = (0.0, 0.2)
"""Bounds of the time between two deaths, beyond what it takes until something has happened."""

PROGRESS_BYTES = 1000
"""Of reports, between two deaths: about 50 calls."""

PROGRESS_TIMEOUT_S = 60.0

FILL_TIMEOUT_S = 60.0
WRITERS_MAX = 3


@dataclass(frozen=True, slots=True)
class Round:
    """One store and what is done to it."""

    kind: str
    settings: dict[str, Any]
    names: int
    spaces: tuple[str, ...]

    @property
    def keeps(self) -> bool:
        """Whether everything that was saved must be there in the end."""
        return self.kind == "roomy"


def make_round(kind: str, transport: str) -> Round:
    """The settings of one kind of round."""
    settings: dict[str, Any] = {"transport": transport, "writers_max": WRITERS_MAX}
    if kind == "roomy":
        settings["segments"] = 96
        return Round(kind, settings, 12, ("small", "large"))
    settings["segments"] = 15
    if kind == "blind":
        settings["verify"] = False
    return Round(kind, settings, CHAINS, tuple(NAMESPACES))


def run(
    directory: Path,
    *,
    seed: int,
    seconds: float = 0.0,
    kinds: tuple[str, ...] = ("roomy", "tight", "blind"),
    kills: int = KILLS,
    broken: str = "",
) -> Tally:
    """Run a round of each kind, and go on with further seeds until `seconds` are over.

    Parameters
        directory: empty; a store is made below it for each round.
        kills: deaths of a round; LONG_KILLS from the second seed on.
        broken: what is broken in the processes on purpose; see `process_life.BREAKS`.
    """
    tally = Tally()
    deadline_s = time.monotonic() + seconds
    turn = 0
    with Nursery() as nursery:
        while turn == 0 or time.monotonic() < deadline_s:
            for kind in kinds:
                transport = "auto" if turn % 2 else "posix"
                place = directory / f"{turn}-{kind}"
                place.mkdir(mode=0o700)
                plan = make_round(kind, transport)
                deaths = kills if turn == 0 else LONG_KILLS
                _Play(nursery, place, plan, seed + turn, deaths, broken, tally).run()
                if turn and time.monotonic() >= deadline_s:
                    break
            turn += 1
    return tally


@dataclass(slots=True)
class _Play:
    """One round."""

    nursery: Nursery
    place: Path
    plan: Round
    seed: int
    kills: int
    broken: str
    tally: Tally
    rng: random.Random = field(init=False)
    config: StoreConfig = field(init=False)
    living: dict[int, Life] = field(default_factory=dict)
    reports: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.config = kit.small_config(self.place / "store", **self.plan.settings)

    def run(self) -> None:
        for number in range(LIVES):
            self._start(number)
        for _ in range(self.kills):
            self._await_progress()
            time.sleep(self.rng.uniform(*PAUSES_S))
            self._one_dies()
            self._look_from_outside()
            if self.rng.random() < 0.7 or len(self.living) < 2:
                self._start(len(self.reports))
        while self.living:
            self._one_dies()
        self._hear()
        with kit.quiet():
            self._inspect()

    def complain(self, text: str) -> None:
        self.tally.complain(f"{self.plan.kind}, seed {self.seed}: {text}")

    # ---- lives ----
    def _start(self, number: int) -> None:
        report = self.place / f"report-{len(self.reports)}"
        self.reports.append(report)
        life = Life(
            path=str(self.config.path),
            settings=dict(self.plan.settings),
            seed=self.rng.randrange(1 << 30),
            page_seed=self.seed,
            names=self.plan.names,
            spaces=self.plan.spaces,
            saves=0.0 if number % LIVES == LIVES - 1 else self.rng.choice((0.3, 0.6)),
            report=str(report),
            broken=self.broken,
        )
        self.living[self.nursery.start(life)] = life

    def _await_progress(self) -> None:
        """Until the lives have reported some more, however slow the machine is."""
        deadline_s = time.monotonic() + PROGRESS_TIMEOUT_S
        wanted = self._reported_bytes() + PROGRESS_BYTES
        while self._reported_bytes() < wanted:
            if time.monotonic() > deadline_s:
                self.complain(f"nothing was done for {PROGRESS_TIMEOUT_S} s")
                return
            time.sleep(0.01)

    def _reported_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.reports if file.exists())

    def _one_dies(self) -> None:
        """Mostly by SIGKILL, wherever it is at that moment."""
        pid = self.rng.choice(sorted(self.living))
        life = self.living.pop(pid)
        gently = self.rng.random() < 0.2
        code = self.nursery.end(pid) if gently else self.nursery.kill(pid)
        if code == -9 and not gently:
            self.tally.kills += 1
        elif code != 0:
            self.complain(f"a process ended with {code}: {life.report}")

    # ---- meanwhile ----
    def _look_from_outside(self) -> None:
        used = kit.disk_bytes(self.config.path) if self.config.path.exists() else 0
        if used > self.config.capacity:
            self.complain(f"{used} bytes on disk, {int(self.config.capacity)} allowed")
        with self._catalog() as catalog:
            if catalog is not None:
                self._check_shares(catalog)

    def _catalog(self) -> _Peek:
        return _Peek(self.config)

    def _check_shares(self, catalog: Catalog) -> None:
        total = self.plan.settings["segments"]
        share = -(-total // WRITERS_MAX)
        segments = catalog.segments()
        owned = Counter(entry.lease for entry in segments.values())
        if any(count > share for count in owned.values()):
            self.complain(f"a process owns more than its share of {share}: {dict(owned)}")
        if any(number >= total for number in segments):
            self.complain(f"segments beyond the last, {total - 1}: {sorted(segments)}")

    # ---- afterwards ----
    def _hear(self) -> None:
        """Count what the processes said."""
        for kind, *what in read_reports(self.reports):
            if kind == "loaded":
                self.tally.pages_compared += what[0]
                self.tally.misses += what[1]
            elif kind == "wrong":
                self.tally.wrong_bytes += what[1]
                self.complain(what[0])
            elif kind == "raised":
                self.complain(f"raised {what[0]}")
            elif kind == "counter":
                self.complain(f"counted {what[0]}")
            elif kind == "ended" and any(what[0].values()):
                self.complain(f"counted {what[0]}")

    def _promised(self) -> set[tuple[str, int]]:
        return {(what[0], what[1]) for kind, *what in read_reports(self.reports) if kind == "saved"}

    def _inspect(self) -> None:
        if held := held_leases(lease_folder(self.config.path)):
            self.complain(f"leases of the dead are held: {held}")
        report = verify_store(self.config.path)
        if not report.clean:
            self.complain(f"verify found {report.damage}"[:300])
        try:
            # Alone, so that its share is everything.
            alone = self.config.model_copy(update={"writers_max": 1})
            with PrefixStore.open(alone) as store:
                self._compare_all(store)
                self._adopt_all(store)
                self._fill(store)
                self._remove_all(store)
        except (AssertionError, TuttiError) as error:
            self.complain(f"afterwards: {error!r}"[:400])
        if kit.disk_bytes(self.config.path) > self.config.capacity:
            self.complain("over capacity after filling")

    def _compare_all(self, store: PrefixStore) -> None:
        promised = self._promised() if self.plan.keeps else set()
        for space in self.plan.spaces:
            pages = store.namespace(**NAMESPACES[space])
            for name in range(self.plan.names):
                keys = chain_of(name)
                offered = int(pages.contains(keys).sum())
                hits, wrong = load_and_compare(pages, space, keys, self.seed)
                self.tally.pages_compared += hits
                self.tally.misses += len(keys) - hits
                for text, count in wrong:
                    self.tally.wrong_bytes += count
                    self.complain(text)
                if hits < offered:
                    self.complain(f"{space} {name}: {hits} of {offered} offered pages load")
                if (space, name) in promised and hits < len(keys):
                    self.tally.lose(f"{self.plan.kind}: {space} {name}", len(keys) - hits)

    def _adopt_all(self, store: PrefixStore) -> None:
        kit.settle(store)
        pages = store.namespace(**NAMESPACES["small"])
        slots = self.plan.settings["segments"] * kit.SEGMENT // kit.PAGE
        deadline_s = time.monotonic() + FILL_TIMEOUT_S
        turn = 0
        while len(self._foreign(store)) and time.monotonic() < deadline_s:
            self._save(pages, ("adopt", turn), min(8, slots))
            turn += 1
        if foreign := self._foreign(store):
            self.complain(f"segments that nobody can get: {foreign}")

    @staticmethod
    def _foreign(store: PrefixStore) -> list[int]:
        mine = store._lease.number
        return [s for s, entry in store._catalog.segments().items() if entry.lease != mine]

    def _fill(self, store: PrefixStore) -> None:
        """As many new pages as there are slots, all of them there together."""
        pages = store.namespace(**NAMESPACES["small"])
        slots = self.plan.settings["segments"] * kit.SEGMENT // kit.PAGE
        deadline_s = time.monotonic() + FILL_TIMEOUT_S
        stored = 0
        while stored < slots and time.monotonic() < deadline_s:
            for start in range(0, slots, 8):
                self._save(pages, ("fill", start), 8)
            stored = sum(
                int(pages.contains(kit.run(("fill", start), 8)).sum())
                for start in range(0, slots, 8)
            )
        if stored < slots:
            self.complain(f"{stored} of {slots} slots can be filled")
        kit.check_space(store)

    def _save(self, pages: Any, name: object, count: int) -> None:
        keys = kit.run(name, count)
        wait_for(pages.save(keys, b"".join(content(self.seed, "small", key) for key in keys)))

    def _remove_all(self, store: PrefixStore) -> None:
        for space in NAMESPACES:
            store.namespace(**NAMESPACES[space]).clear()
        kit.check_space(store)
        left = store._catalog.record_count(), store._manager.used_bytes()
        if left != (0, 0):
            self.complain(f"{left[0]} records and {left[1]} bytes are left after everything")


class _Peek:
    """The catalog of a store that others use, if it is there yet."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._catalog: Catalog | None = None

    def __enter__(self) -> Catalog | None:
        folder = catalog_folder(self._config.path)
        if (folder / "data.mdb").exists() and (folder / "lock.mdb").exists():
            self._catalog = Catalog(folder, self._config.catalog_bytes, False)
        return self._catalog

    def __exit__(self, *_: object) -> None:
        if self._catalog is not None:
            self._catalog.close()
