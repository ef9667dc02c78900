"""Random histories over a whole store with memory tiers, against what it may answer.

After every step, with everything at rest: loads are bit-exact or misses, each tier's space adds up
to the byte, no page is in two states, the tiers agree with the catalog, and no page has lost an
ancestor. All write policies, both modes, with an HBM tier and without, with faults and crashes.
TUTTI_TEST_SEED repeats a history. (Not a hypothesis machine: that asks for the same history twice,
and threads do not oblige.)
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_kit import PAGE, chain, client, finish, loose, memory_devices
from tier_kit import (
    DRAM,
    check_tiers,
    dram,
    in_memory,
    on_devices,
    open_tiers,
    quiesce,
    tiered_config,
    unsaved_keys,
)

from tutti_core import PageKeys
from tutti_core.io.transport import BatchResult
from tutti_core.testing import Fault, Oracle, page_bytes
from tutti_core.tiers import mover
from tutti_core.tiers.arena import HostArena
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.mover import Mover
from tutti_core.tiers.stack import TierStack

SPACES: tuple[dict[str, Any], ...] = (
    {"model": "a"},
    {"model": "b", "page_bytes": 2 * PAGE - 5},
    {"model": "c", "page_bytes": 3000, "parts": (3000,)},
)


class History:
    """One store, and what is known about each page that was ever saved in it."""

    def __init__(self, rng: random.Random, folder: Path, faulty: bool, **fields: Any) -> None:
        self.rng = rng
        self.faulty = faulty
        self.config = tiered_config(folder / "store", segments=3, huge_pages=False, **fields)
        self.devices = memory_devices(self.config, seed=rng.randrange(1000))
        self.oracle = Oracle()
        self.names: list[dict[bytes, str]] = [{} for _ in SPACES]
        self.unsure: set[tuple[int, str]] = set()
        self.pinned: list[tuple[int, PageKeys, int]] = []
        self.short_lived: set[int] = set()  # namespaces with a TTL
        self.ahead_ns = 0
        self.faults = 0
        self.moved: Counter[str] = Counter()
        self.open()

    def open(self) -> None:
        self.store = open_tiers(self.config, self.devices)
        assert self.store.wait_restored(20)
        self.clients = [client(self.store, self.oracle, **fields) for fields in SPACES]

    def draw(self) -> tuple[int, PageKeys, int, str]:
        """A namespace, a chain of it, its first page, and the name of the chain."""
        space, word = self.rng.randrange(len(SPACES)), self.word()
        keys = self.keys(space, word)
        first = self.rng.choice((0, 0, 0, self.rng.randrange(len(keys))))
        return space, keys if self.rng.random() < 0.8 else loose(keys), first, word

    def word(self) -> str:
        return "".join(self.rng.choice("ab") for _ in range(self.rng.randrange(1, 11)))

    def keys(self, space: int, word: str) -> PageKeys:
        keys = chain(*word)
        for i, key in enumerate(keys):
            self.names[space][key] = word[: i + 1]
        return keys

    def present(self, space: int) -> set[str]:
        digest = self.clients[space].name
        keys = on_devices(self.store, digest) | in_memory(self.store, digest).keys()
        return {self.names[space][key] for key in keys}

    # ---- steps ----
    def save(self) -> None:
        space, keys, first, word = self.draw()
        rooted, seed = keys.rooted, self.rng.randrange(1 << 20)
        before, refused = self.present(space), self.count("pages_refused_worth")
        output_tokens = self.rng.choice((None, 0, 5, 300))
        stored = self.clients[space].save(keys, first, seed, output_tokens=output_tokens)
        refused = self.count("pages_refused_worth") - refused
        for i, good in enumerate(stored, first):
            name = word[: i + 1]
            if not good and not self.faults and space not in self.short_lived:
                assert name not in before, f"{name}, which was stored, is reported as not stored"
            if name not in before and (not rooted or (i and word[:i] not in before and i == first)):
                self.unsure.add((space, name))
        if space in self.short_lived:  # what was before `first` may have been too old
            self.unsure_orphans(space)
        self.rest()
        if rooted and first == 0 and not self.faults and not self.pinned and not refused:
            assert stored[0], "a first page was not stored in a store without pins"

    def load(self) -> None:
        space, keys, first, _ = self.draw()
        pages = self.clients[space]
        pages.match(keys, first)  # under write_selective this makes pages move
        quiesce(self.store)
        hit = pages.match(keys, first)
        quiesce(self.store)  # what moves up makes room, and so what moves down, which evicts
        contained = pages.contains(keys, first)
        quiesce(self.store)
        loaded = pages.load(keys, first)
        if not self.faults:  # else writes that failed are tried again at any time
            assert contained[:hit] == [True] * hit
            assert hit == len(contained) or not contained[hit]
            assert loaded == contained, "a page that was promised did not load"
        self.rest()

    def unsure_orphans(self, space: int) -> None:
        """Pages of a namespace without their parent may be so from now on."""
        present = self.present(space)
        orphans = {name for name in present if len(name) > 1 and name[:-1] not in present}
        self.unsure.update((space, name) for name in orphans)

    def burst(self) -> None:
        """Saves and loads that run at the same time."""
        space, seed = self.rng.randrange(len(SPACES)), self.rng.randrange(100)
        words = [self.word() for _ in range(self.rng.randrange(2, 6))]
        cancelled = self.rng.random() < 0.3
        pages, size = self.clients[space].pages, self.clients[space].size
        tickets, loads = [], []
        for at, word in enumerate(words):
            keys = self.keys(space, word)
            payload = [page_bytes(seed + at, key, size) for key in keys]
            for key, page in zip(keys, payload, strict=True):
                self.oracle.save(self.clients[space].name, key, page)
            tickets.append(pages.save(keys, b"".join(payload)))
            target = bytearray(len(keys) * size)
            loads.append((keys, target, self.clients[space].begin_load(keys, target)))
            if cancelled and at % 2:
                tickets[-1].cancel()
        for keys, target, ticket in loads:
            for i, (key, good) in enumerate(zip(keys, finish(ticket).tolist(), strict=True)):
                data = bytes(target[i * size : (i + 1) * size]) if good else None
                self.oracle.check_load(self.clients[space].name, key, data)
        for ticket in tickets:
            finish(ticket)
        quiesce(self.store)
        # Another save's pages may have taken the place of an ancestor before these were written.
        present = self.present(space)
        for name in (word[: i + 1] for word in words for i in range(1, len(word))):
            if name in present and name[:-1] not in present:
                self.unsure.add((space, name))
        self.rest()

    def pin(self) -> None:
        space, word = self.rng.randrange(len(SPACES)), self.word()[:3]
        if len(self.pinned) < 3:
            keys = self.keys(space, word)
            count = self.clients[space].pages.pin(keys)
            self.pinned.append((space, keys, count))
            self.rest()

    def unpin(self) -> None:
        if not self.pinned:
            return
        space, keys, count = self.pinned.pop()
        if not self.faults and space not in self.short_lived:
            assert self.clients[space].match(keys) >= count, "a pinned page was evicted"
        self.clients[space].pages.unpin(keys, count)
        self.rest()

    def clear(self) -> None:
        space = self.rng.randrange(len(SPACES))
        if any(s == space for s, _, _ in self.pinned):
            return
        count = len(self.present(space))
        cleared = self.clients[space].pages.clear()
        assert cleared == count or self.faults, f"{cleared} of {count} pages were cleared"
        self.oracle.forget(self.clients[space].name)
        assert not self.present(space)
        self.unsure = {(s, n) for s, n in self.unsure if s != space}
        self.rest()

    def limit(self) -> None:
        """Give a namespace a TTL, or take it away."""
        space, ttl_s = self.rng.randrange(len(SPACES)), self.rng.choice((None, 100.0))
        self.clients[space].pages.limit(ttl_s=ttl_s)
        (self.short_lived.discard if ttl_s is None else self.short_lived.add)(space)
        if ttl_s is not None:  # without one, pages are as if new where they are written down
            self.unsure.update((space, name) for name in self.present(space))

    def wait(self) -> None:
        """Let time pass: what was unused for long is a miss then, in every tier."""
        space, keys, first, _ = self.draw()
        pages = self.clients[space]
        self.ahead_ns += int(99e9)
        if keys.rooted and not self.faults:
            hit = pages.match(keys)
            quiesce(self.store)
            self.ahead_ns += int(99e9)
            assert pages.match(keys) >= hit, "a page that is used has gone"
        if space in self.short_lived:
            quiesce(self.store)
            self.ahead_ns += int(101e9)
            if keys.rooted:
                assert pages.match(keys) == 0 and not any(pages.contains(keys, first))
                assert not any(pages.load(keys, first)), "a page has outlived its time"
            # Each tier drops in its own time what is too old.
            self.unsure.update((space, name) for name in self.present(space))
        self.rest()

    def flush(self) -> None:
        before = self.count("pages_refused_full") + self.count("evicted_pages")
        flushed = self.store.flush(20)
        crowded = self.count("pages_refused_full") + self.count("evicted_pages") > before
        assert flushed or self.faults or crowded
        self.rest()

    def fault(self) -> None:
        """One operation fails; its pages may be lost, and the chain behind them has a hole."""
        if self.faulty:
            kind, op = self.rng.choice(
                [("error", "read"), ("flip", "read"), ("error", "write"), ("torn", "write"),
                 ("lost", "write"), ("flip", "write"), ("error", "flush"), ("misdirected", "read")]
            )  # fmt: skip
            later = self.rng.randrange(12)  # a load's own read, or that of a promotion behind it
            self.devices.arm(Fault(kind, op, index=later, count=self.rng.randrange(1, 4)))
            self.faults += 1

    def reopen(self) -> None:
        """Close, or lose the power, and open again."""
        power, seed = self.rng.random() < 0.5, self.rng.randrange(1000)
        if power:
            self.devices.crash(seed)
        for space, keys, count in self.pinned:
            self.clients[space].pages.unpin(keys, count)
        self.pinned = []
        for tier in self.store._tiers:
            self.moved.update(tier.counters)
        before = [self.lasting(space) for space in range(len(SPACES))]
        evicted = self.count("evicted_pages") + self.count("pages_refused_full")
        self.store.close()
        evicted = self.count("evicted_pages") + self.count("pages_refused_full") - evicted
        self.devices = self.devices.reopen(seed=seed)
        self.open()
        for space in range(len(SPACES)):
            present = self.present(space)
            if not power and not self.faults and space not in self.short_lived:
                lost = before[space] - present
                assert not lost or evicted, f"closing has lost {lost}"
            for name in present:  # ancestors may have been in memory only
                if not all(name[: i + 1] in present for i in range(len(name))):
                    self.unsure.add((space, name))
        self.short_lived = set()
        self.rest()

    def lasting(self, space: int) -> set[str]:
        """Names of the pages that are on the devices, or that closing has to write there."""
        digest, tier = self.clients[space].name, dram(self.store)
        keys = on_devices(self.store, digest) | unsaved_keys(self.store, digest, tier._unsaved)
        return {self.names[space][key] for key in keys}

    def count(self, name: str) -> int:
        return self.store._manager.counters[name]

    # ---- checks ----
    def rest(self) -> None:
        assert self.store.stats().counters.get("internal_errors", 0) == 0
        check_tiers(self.store, faults=self.faults > 0)
        if self.faults:
            return
        for space in range(len(SPACES)):
            present = self.present(space)
            for name in present:
                if any((space, name[: i + 1]) in self.unsure for i in range(len(name))):
                    continue  # this page or an ancestor was saved without what comes before
                assert len(name) == 1 or name[:-1] in present, f"{name} has lost its parent"


STEPS = 150


def play(rng: random.Random, folder: Path, **fields: Any) -> History:
    """Run one history to its end."""
    history = History(rng, folder, **fields)
    real = time.monotonic_ns
    time.monotonic_ns = lambda: real() + history.ahead_ns  # type: ignore[assignment]
    often: list[Callable[[], None]] = [history.save, history.load, history.burst] * 4
    seldom = [history.pin, history.unpin, history.unpin, history.flush, history.fault]
    seldom += [history.limit, history.wait]
    try:
        for _ in range(STEPS):
            roll = rng.random()
            if roll < 0.03:
                history.clear()
            elif roll < 0.06:
                history.reopen()
            else:
                rng.choice(often + seldom)()
        history.reopen()
    finally:
        history.store.close()
        time.monotonic_ns = real
    assert history.oracle.hits > 20 and history.oracle.misses > 20
    return history


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "FAILURE_PAUSE_S", 0.01)
    monkeypatch.setattr(mover, "WRITE_DEADLINE_S", 0.02)


POLICIES = ("write_through", "write_back", "write_selective")


@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
def test_any_history(rng, fast_path: Path, policy: str, mode: str, faulty: bool) -> None:
    history = play(rng, fast_path, faulty=faulty, write_policy=policy, dram_mode=mode)
    moved = history.moved
    assert moved["hits"] > 5 and moved["promoted"] > 0
    assert moved["demoted"] > 0 or (policy, mode) == ("write_through", "inclusive")


@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
@pytest.mark.parametrize("policy", POLICIES)
def test_any_history_with_three_tiers(rng, fast_path: Path, policy: str, mode: str) -> None:
    play(rng, fast_path, faulty=False, write_policy=policy, dram_mode=mode, hbm=DRAM)


# ---- negative controls: each breaks one rule, which some history has to show ----
def unfilled(patch: pytest.MonkeyPatch) -> None:
    """Pages are offered although nothing was copied into their slots."""
    patch.setattr(HostArena, "copy", lambda self, target, source, length_bytes: None)


def unverified(patch: pytest.MonkeyPatch) -> None:
    """What the devices deliver is offered without a look at its checksum."""
    read = Mover._read

    def trusting(self: Mover, tier: Any, entry: Any, where: Any, *rest: Any) -> Any:
        result = read(self, tier, entry, where, *rest)
        return result and BatchResult(result.status, where.checksum)

    patch.setattr(Mover, "_read", trusting)


def uncleared(patch: pytest.MonkeyPatch) -> None:
    """Clearing a namespace leaves memory alone."""
    patch.setattr(MemoryTier, "clear", lambda self, entry: None)


def orphaning(patch: pytest.MonkeyPatch) -> None:
    """Pages whose ancestor leaves the store stay."""
    patch.setattr(TierStack, "_departed", lambda self, departures: [])


def dropping(patch: pytest.MonkeyPatch) -> None:
    """Unsaved pages pass for saved before they are written."""
    take_up = MemoryTier._begin_write

    def forgetful(self: MemoryTier, *rest: Any) -> Any:
        write = take_up(self, *rest)
        self._unsaved.difference_update(write.generations.tolist())
        write.ticket.cancel()
        return write

    patch.setattr(MemoryTier, "_begin_write", forgetful)


def doubling(patch: pytest.MonkeyPatch) -> None:
    """Pages that moved up are left on the devices."""
    patch.setattr(Mover, "_take_from_devices", lambda self, *rest: None)


def leaking(patch: pytest.MonkeyPatch) -> None:
    """Slots of pages that are evicted are not given up."""
    patch.setattr(MemoryTier, "_give_up", lambda self, slots, generations: None)


@pytest.mark.parametrize(
    ("breaking", "fields"),
    [
        (unfilled, {"write_policy": "write_back"}),
        (unverified, {"faulty": True, "dram_mode": "exclusive"}),
        (uncleared, {}),
        (orphaning, {"write_policy": "write_back"}),
        (dropping, {"write_policy": "write_back"}),
        (doubling, {"dram_mode": "exclusive"}),
        (leaking, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_rule_is_seen(
    rng, fast_path: Path, monkeypatch: pytest.MonkeyPatch, breaking: Any, fields: dict[str, Any]
) -> None:
    breaking(monkeypatch)
    with pytest.raises((AssertionError, OSError, ValueError)):
        for attempt in range(12):
            play(rng, fast_path / str(attempt), **{"faulty": False, **fields})
