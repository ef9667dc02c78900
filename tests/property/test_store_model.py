"""Random histories over the whole public store, on tiny capacities, against what it may answer.

After every step: loads are bit-exact or misses, the directory is within its capacity, no page has
lost an ancestor to eviction, and the newest pages are there. TUTTI_TEST_SEED repeats a history.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from store_kit import (
    PAGE,
    Client,
    chain,
    check_space,
    client,
    disk_bytes,
    loose,
    memory_devices,
    small_config,
)

from tutti_core import BusyError, PageKeys, PrefixStore
from tutti_core.testing import Fault, Oracle

STEPS = 350
SPACES = (
    {"model": "a"},
    {"model": "b", "page_bytes": PAGE},
    {"model": "c", "page_bytes": 3 * PAGE - 5},
    {"model": "d", "page_bytes": 100, "key_bytes": 32},
    {"model": "e", "page_bytes": 5000, "parts": (4, 4096, 900)},
)


class History:
    """One store, and what is known about each page that was ever saved in it."""

    def __init__(
        self, rng: random.Random, folder: Path, memory: bool, pools: int, **settings: Any
    ) -> None:
        self.rng = rng
        places = [folder / f"pool{i}" for i in range(pools)] if pools > 1 else []
        self.config = small_config(folder, segments=5, pools=places, io_timeout_s=20.0, **settings)
        self.places = [folder, *places] if places and places[0].parent != folder else [folder]
        self.devices = memory_devices(self.config) if memory else None
        self.oracle = Oracle()
        self.words: list[dict[str, PageKeys]] = [{} for _ in SPACES]
        self.names: list[dict[bytes, str]] = [{} for _ in SPACES]
        self.unsure: set[tuple[int, str]] = set()  # pages that may stand without their ancestors
        self.pinned: list[tuple[int, PageKeys, int]] = []
        self.shares: dict[int, float] = {}
        self.short_lived: set[int] = set()  # namespaces with a TTL
        self.ahead_ns = 0
        self.faults = 0
        self.evicted = 0
        self.open()

    def open(self) -> None:
        if self.devices is not None:
            self.devices = self.devices.reopen(seed=self.rng.randrange(1 << 30))
        self.store = PrefixStore.open(self.config, transport_object=self.devices)
        self.clients = [client(self.store, self.oracle, **fields) for fields in SPACES]

    def word(self) -> str:
        return "".join(self.rng.choice("ab") for _ in range(self.rng.randrange(1, 13)))

    def keys(self, space: int, word: str) -> PageKeys:
        if word not in self.words[space]:
            keys = chain(*word, width=self.clients[space].pages.namespace.key_bytes)
            self.words[space][word] = keys
            for i, key in enumerate(keys):
                self.names[space][key] = word[: i + 1]
        return self.words[space][word]

    def present(self, space: int) -> set[str]:
        """Names of the stored pages, from the catalog: looking does not count as use."""
        found, width = set(), self.clients[space].pages.namespace.key_bytes
        for _, records, _ in self.store._catalog.scan_records(1000):
            for record in records:
                if record["namespace"].tobytes() == self.clients[space].name:
                    found.add(self.names[space][record["page_key"].tobytes()[:width]])
        return found

    # ---- steps ----
    def save(self) -> None:
        space, word = self.rng.randrange(len(SPACES)), self.word()
        keys = self.keys(space, word)
        first = self.rng.choice((0, 0, 0, self.rng.randrange(len(keys) + 1)))
        rooted = self.rng.random() < 0.8
        before = self.present(space)
        if not rooted:
            keys = loose(keys)
        seed, output_tokens = self.rng.randrange(1 << 20), self.rng.choice((None, 0, 5, 300))
        refused = self.refused()
        stored = self.clients[space].save(keys, first, seed, output_tokens=output_tokens)
        refused = self.refused() - refused
        now = self.present(space)
        for i, good in enumerate(stored, first):
            name = word[: i + 1]
            if name not in before and not self.faults:
                assert good == (name in now), f"{name} was reported {good}"
            fresh = name in now and (name not in before or space in self.short_lived)
            if fresh and (not rooted or (i and word[:i] not in now)):
                self.unsure.add((space, name))  # what was before `first` may have expired, too
        free = not self.faults and not self.pinned and not any(self.shares.values())
        if rooted and first == 0 and free and not refused:
            assert word[:1] in now, "a first page was not stored in a store without pins"

    def refused(self) -> int:
        """Pages that were not stored because they are not worth it."""
        counters = self.store.stats().counters
        return sum(counters.get(name, 0) for name in ("pages_refused_worth", "pages_not_admitted"))

    def load(self) -> None:
        space, word = self.rng.randrange(len(SPACES)), self.word()
        keys = self.keys(space, word)
        if self.rng.random() < 0.2:
            keys = loose(keys)
        first = self.rng.choice((0, self.rng.randrange(len(keys) + 1)))
        pages: Client = self.clients[space]
        hit = pages.match(keys, first)
        contained = pages.contains(keys, first)
        assert contained[:hit] == [True] * hit and (hit == len(contained) or not contained[hit])
        loaded = pages.load(keys, first)
        if not self.faults:
            assert loaded == contained, "a page that was promised did not load"
        for i, (was, is_now) in enumerate(zip(loaded, pages.contains(keys, first), strict=True)):
            assert was or not is_now or self.faults, f"failed page {i} is offered again"

    def pin(self) -> None:
        space, word = self.rng.randrange(len(SPACES)), self.word()
        keys = self.keys(space, word)
        count = self.clients[space].pages.pin(keys)
        assert count == self.clients[space].match(keys)
        self.pinned.append((space, keys, count))

    def unpin(self) -> None:
        if self.pinned:
            space, keys, count = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            if not self.faults and space not in self.short_lived:
                assert self.clients[space].match(keys) >= count, "a pinned page was evicted"
            self.clients[space].pages.unpin(keys, count)

    def clear(self) -> None:
        space = self.rng.randrange(len(SPACES))
        if any(s == space for s, _, _ in self.pinned):
            return
        count = len(self.present(space))
        assert self.clients[space].pages.clear() == count or self.faults
        self.oracle.forget(self.clients[space].name)
        assert not self.present(space)
        for word, keys in self.words[space].items():
            assert self.clients[space].match(keys) == 0, word
        self.unsure = {(s, n) for s, n in self.unsure if s != space}

    def limit(self) -> None:
        """Give a namespace other limits. With a TTL, its pages may be gone at any time."""
        space, share = self.rng.randrange(len(SPACES)), self.rng.choice((0.0, 0.1, 0.25))
        ttl_s = self.rng.choice((None, None, 100.0))
        self.clients[space].pages.limit(share=share, ttl_s=ttl_s)
        self.shares[space] = share
        (self.short_lived.discard if ttl_s is None else self.short_lived.add)(space)

    def wait(self) -> None:
        """Let time pass: what was unused for long is a miss then, and what is used is not."""
        space, word = self.rng.randrange(len(SPACES)), self.word()
        keys = self.keys(space, word)
        pages = self.clients[space]
        for _ in range(3):
            hit = pages.match(keys)
            self.ahead_ns += int(99e9)
            assert pages.match(keys) == hit, "a page that is used has gone"
        if space in self.short_lived:
            self.ahead_ns += int(101e9)
            assert pages.match(keys) == 0 and not any(pages.contains(keys))
            assert not any(pages.load(keys)), "a page has outlived its time"

    def fault(self) -> None:
        """One operation fails; its pages may be lost, and the chain behind them has a hole."""
        if self.devices is not None:
            kind, op = self.rng.choice(
                [("error", "read"), ("flip", "read"), ("error", "write"), ("torn", "write"),
                 ("lost", "write"), ("flip", "write"), ("error", "flush"), ("misdirected", "read")]
            )  # fmt: skip
            self.devices.arm(Fault(kind, op, count=self.rng.randrange(1, 4)))
            self.faults += 1

    def reopen(self) -> None:
        for space, keys, count in self.pinned:
            self.clients[space].pages.unpin(keys, count)
        self.pinned = []
        self.shares, self.short_lived = {}, set()
        counters = self.store.stats().counters
        self.evicted += counters.get("evicted_pages", 0) + counters.get("expired_pages", 0)
        self.store.close()
        self.store.close()
        self.open()
        if self.rng.random() < 0.6:
            assert self.store.wait_restored(30)
        for space in range(len(SPACES)):
            present = self.present(space)
            for name in present:  # what has no complete chain is found by key alone from now on
                if not all(name[: i + 1] in present for i in range(len(name))):
                    self.unsure.add((space, name))
            for _, keys in zip(range(5), self.words[space].values(), strict=False):
                self.clients[space].load(keys)

    # ---- checks ----
    def check(self, step: int) -> None:
        assert self.store.stats().counters.get("internal_errors", 0) == 0
        assert sum(map(disk_bytes, self.places)) <= self.config.capacity
        if not self.faults:
            for space in range(len(SPACES)):
                present = self.present(space)
                for name in present:
                    if any((space, name[: i + 1]) in self.unsure for i in range(len(name))):
                        continue  # this page or an ancestor was saved without what comes before
                    lost = len(name) > 1 and name[:-1] not in present
                    assert not lost, f"{name} of {space} has lost its parent to eviction"
        if step % 50 == 0:
            check_space(self.store)


@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize(
    ("memory", "pools", "faulty"),
    [(False, 1, False), (True, 1, False), (True, 2, False), (True, 1, True), (True, 2, True)],
    ids=["files", "memory", "two pools", "faults", "two pools and faults"],
)
def test_any_history(
    rng, store_dir: Path, monkeypatch, memory: bool, pools: int, faulty: bool, repeat
) -> None:
    settings = {"admission": "second_touch"} if repeat == 2 else {}
    history = History(rng, store_dir, memory, pools, **settings)
    real = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: real() + history.ahead_ns)
    steps = [history.save] * 10 + [history.load] * 8 + [history.pin, history.unpin, history.unpin]
    steps += [history.limit, history.wait]
    steps += [history.fault] * 2 if faulty else []
    try:
        for step in range(STEPS):
            roll = rng.random()
            if roll < 0.015:
                history.clear()
            elif roll < 0.03:
                history.reopen()
            else:
                rng.choice(steps)()
            history.check(step)
        history.reopen()
        assert history.oracle.hits > 20 and history.oracle.misses > 20
        assert history.evicted > 20 or settings  # a filter leaves little to evict
    finally:
        history.store.close()


def test_nothing_can_be_stored_where_everything_is_pinned(store_dir: Path) -> None:
    """Bug 30: no spinning; False at once, and True again after an unpin."""
    config = small_config(store_dir)
    with PrefixStore.open(config) as store:
        pages = client(store)
        keys = chain(*range(16))
        assert all(pages.save(keys)) and pages.pages.pin(keys) == 16
        ticket = pages.pages.save(chain("x"), bytes(PAGE))
        try:
            assert not ticket.wait(20).any()
        except BusyError as error:
            raise AssertionError("the save hangs") from error
        pages.pages.unpin(keys, 16)
        assert pages.save(chain("x")) == [True]
