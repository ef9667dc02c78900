"""The whole public API in any order, with faults, power losses and flipped bits on the way.

Hypothesis chooses the calls; the model is the oracle: a page comes back bit-exact or as a miss.
What is exact where nothing fails (who is evicted, which page must be there) is in
test_store_model.py and test_tiers_model.py; this machine has all that can be called in one.

Threads do not repeat a history to the last step, so nothing is made smaller: a failure prints the
calls that led to it. TUTTI_FUZZ_SECONDS and TUTTI_FUZZ_SEED run it for longer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tutti_core import (
    CorruptionError,
    Hold,
    LayerRead,
    LayerReader,
    NamespaceStore,
    PageFragments,
    PageKeys,
    PrefixStore,
    TuttiError,
)
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.testing import Fault, FaultyDevices, Oracle, page_bytes
from tutti_core.tiers.arena import HostArena
from tutti_core.tiers.hold import Hold as HoldClass
from tutti_core.trials.kit import (
    PAGE,
    Client,
    chain,
    check_space,
    client,
    finish,
    loose,
    memory_devices,
    quiesce,
    quiet,
    small_config,
)
from tutti_core.verify import verify_store

SECONDS = float(os.environ.get("TUTTI_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("TUTTI_FUZZ_SEED", "0"))
WAIT_S = 20.0

SPACES: tuple[dict[str, Any], ...] = (
    {"model": "a"},
    {"model": "b", "page_bytes": 2 * PAGE - 5},
    {"model": "c", "page_bytes": 100, "key_bytes": 32},
    {"model": "d", "page_bytes": 5000, "parts": (4, 4096, 900)},
)
LAYERED = 3
"""The one in parts, which are its layers."""

TIERS: tuple[dict[str, Any], ...] = (
    {},
    {"dram": 32 * PAGE},
    {"dram": 32 * PAGE, "write_policy": "write_back"},
    {"dram": 32 * PAGE, "write_policy": "write_selective", "policy": "lru"},
    {"dram": 32 * PAGE, "dram_mode": "exclusive", "hbm": 32 * PAGE},
)
FAULTS = (
    *(("error", "read"), ("flip", "read"), ("misdirected", "read"), ("short", "read")),
    *(("stale", "read"), ("error", "write"), ("torn", "write"), ("lost", "write")),
    *(("flip", "write"), ("short", "write"), ("duplicated", "write"), ("reordered", "write")),
    *(("error", "flush"), ("lost", "flush"), ("busy", "batch"), ("slow", "batch")),
)

spaces = st.integers(0, len(SPACES) - 1)
words = st.text("ab", min_size=1, max_size=9)
firsts = st.sampled_from((0, 0, 0, 1, 2, 5))


class Sink:
    """Hears how a batch of layers went."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.error: BaseException | None = None
        self.over = threading.Event()

    def complete(self, layer: int) -> None:
        self.layers.append(layer)
        if layer == 2:
            self.over.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.over.set()


class StoreMachine(RuleBasedStateMachine):
    """One store, its namespaces, and what was ever saved in them."""

    failures: ClassVar[list[Exception]] = []
    """What ended a history. Hypothesis repeats it and may then say only that it went otherwise."""

    on_files = False
    """Whether pages are on files, which can be verified, or on devices that fail."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = contextlib.ExitStack()
        self.logs.enter_context(quiet())
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="tutti-machine-", dir=base))
        self.oracle = Oracle()
        self.disturbed = False
        self.holds: list[tuple[int, PageKeys, int, Hold]] = []
        self.pins: list[tuple[int, PageKeys, int]] = []
        self.devices: FaultyDevices | None = None

    # ---- opening and closing ----
    @initialize(tiers=st.sampled_from(TIERS), pools=st.sampled_from((1, 1, 2)))
    def start(self, tiers: dict[str, Any], pools: int) -> None:
        places = [self.folder / f"pool{i}" for i in range(pools)] if pools > 1 else []
        self.config = small_config(
            self.folder / "store", segments=4, pools=places, huge_pages=False, **tiers
        )
        if not self.on_files:
            self.devices = memory_devices(self.config)
        self.open()

    def make_store(self) -> PrefixStore:
        hbm = int(self.config.hbm)
        arenas = {"hbm": HostArena(hbm, huge_pages=False)} if hbm else {}
        return PrefixStore(self.config, self.devices, arenas)

    def open(self) -> None:
        self.store = self.make_store()
        self.clients = [client(self.store, self.oracle, **fields) for fields in SPACES]
        self.reader = LayerReader(3, parts_ahead_max=2, timeout_s=WAIT_S)

    def close(self) -> None:
        assert self.reader.close(WAIT_S)
        self.store.close()
        self.store.close()
        self.holds, self.pins = [], []

    def teardown(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception):  # not one that Hypothesis ends a history with
            self.failures.append(error)
        try:
            if hasattr(self, "store"):
                self.close()
        finally:
            self.logs.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    @rule(wait=st.booleans())
    def reopen(self, wait: bool) -> None:
        self.close()
        if self.on_files and not self.disturbed:
            report = verify_store(self.config.path, self.config.pools, transport="posix")
            assert report.clean, f"damage without a fault: {report.damage}"
        if self.devices is not None:
            self.devices = self.devices.reopen()
        self.open()
        if wait:
            assert self.store.wait_restored(WAIT_S)

    @rule(chance=st.integers(0, 1 << 30))
    def lose_power(self, chance: int) -> None:
        if self.devices is None:
            return
        self.devices.crash(chance)
        self.close()
        self.disturbed = True  # pages in memory only, and duplicated writes, may be gone
        self.devices = self.devices.reopen(seed=chance)
        self.open()

    @rule(space=spaces, word=words, content=st.integers(0, 3))
    def another_writer(self, space: int, word: str, content: int) -> None:
        """A second store of the same directory finds what this one saved, and the reverse."""
        if not self.on_files:
            return
        keys = self.chain(space, word)
        with self.make_store() as other:
            pages = client(other, self.oracle, **SPACES[space])
            pages.load(keys)
            pages.save(keys, seed=content)
            self.clients[space].load(keys)
        self.clients[space].load(keys)

    # ---- faults ----
    @rule(kind=st.sampled_from(FAULTS), index=st.integers(0, 6), count=st.integers(1, 3))
    def fault(self, kind: tuple[Any, Any], index: int, count: int) -> None:
        if self.devices is not None:
            fault = Fault(*kind, index=index, count=count, polls=1)
            self.devices.arm(fault)
            self.disturbed = True

    @rule(block=st.integers(0, 15), byte=st.integers(0, 4095), bit=st.integers(0, 7), space=spaces)
    def flip(self, block: int, byte: int, bit: int, space: int) -> None:
        """A bit of what is stored changes."""
        self.disturbed = True
        if self.devices is not None:
            self.devices.flip_bit(0, DATA_OFFSET_BYTES + block * 4096 + byte, bit)
        elif not self.config.pools:
            with open(self.config.path / "pool.tutti", "r+b", buffering=0) as pool:
                pool.seek(DATA_OFFSET_BYTES + block * 4096 + byte)
                old = pool.read(1)
                pool.seek(-1, os.SEEK_CUR)
                pool.write(bytes([old[0] ^ 1 << bit]))
        self.look_at_everything(space)

    # ---- saves and loads ----
    def chain(self, space: int, word: str, rooted: bool = True) -> PageKeys:
        keys = chain(*word, width=self.clients[space].pages.namespace.key_bytes)
        return keys if rooted else loose(keys)

    @rule(
        space=spaces,
        word=words,
        first=firsts,
        rooted=st.booleans(),
        content=st.integers(0, 3),
        output=st.sampled_from((None, 0, 9)),
    )
    def save(
        self, space: int, word: str, first: int, rooted: bool, content: int, output: int | None
    ) -> None:
        keys = self.chain(space, word, rooted)
        self.clients[space].save(keys, min(first, len(keys)), content, output_tokens=output)

    @rule(space=spaces, word=words, first=firsts, rooted=st.booleans())
    def load(self, space: int, word: str, first: int, rooted: bool) -> None:
        keys = self.chain(space, word, rooted)
        first = min(first, len(keys))
        pages = self.clients[space]
        known = set(self.oracle.keys(pages.name))
        hit = pages.match(keys, first)
        assert hit <= len(keys) - first
        assert all(key in known for key in list(keys)[first : first + hit]), "never saved"
        assert not any(
            here and key not in known
            for key, here in zip(list(keys)[first:], pages.contains(keys, first), strict=True)
        ), "contains what was never saved"
        pages.load(keys, first)

    @rule(space=spaces)
    def look_at_everything(self, space: int) -> None:
        """Each page that was ever saved, by its key alone."""
        pages = self.clients[space]
        width = pages.pages.namespace.key_bytes
        pages.load(PageKeys(b"".join(self.oracle.keys(pages.name)), width, rooted=False))

    @rule(space=spaces, word=words, first=firsts, count=st.integers(0, 6), shift=st.integers(0, 65))
    def load_some(self, space: int, word: str, first: int, count: int, shift: int) -> None:
        """A count, slots in reverse, memory that is not aligned."""
        pages, keys = self.clients[space], self.chain(space, word)
        first = min(first, len(keys))
        some = list(keys)[first : first + count]
        memory = np.zeros(shift + len(some) * pages.size, np.uint8)[shift:]
        slots = list(reversed(range(len(some))))
        call: Any = pages.pages.load_parts if space == LAYERED else pages.pages.load
        good = finish(call(keys, memory, first, count, slots))
        for key, slot, right in zip(some, slots, good, strict=True):
            data = memory[slot * pages.size : (slot + 1) * pages.size].tobytes()
            self.oracle.check_load(pages.name, key, data if right else None)

    @rule(space=st.sampled_from((0, 1)), tokens=st.lists(st.integers(0, 2), max_size=5),
          salt=st.sampled_from((None, "", "x")))  # fmt: skip
    def by_tokens(self, space: int, tokens: list[int], salt: str | None) -> None:
        """Keys of the store's own making, with salts that never share."""
        pages = self.clients[space]
        keys = pages.pages.keys(tokens, salt=salt)
        other = pages.pages.keys(tokens, tenant="t")
        assert not set(keys) & set(other)
        pages.load(other)
        pages.save(keys, seed=4)
        pages.load(keys)

    @rule(space=spaces, some=st.lists(words, min_size=2, max_size=4), cancel=st.booleans())
    def at_once(self, space: int, some: list[str], cancel: bool) -> None:
        """Saves and loads of the same pages under way together."""
        pages = self.clients[space]
        tickets, loads = [], []
        for turn, word in enumerate(some):
            keys = self.chain(space, word)
            payload = [page_bytes(10 + turn, key, pages.size) for key in keys]
            for key, page in zip(keys, payload, strict=True):
                self.oracle.save(pages.name, key, page)
            tickets.append(pages.pages.save(keys, b"".join(payload)))
            memory = bytearray(len(keys) * pages.size)
            loads.append((keys, memory, pages.begin_load(keys, memory)))
            if cancel and turn % 2:
                tickets[-1].cancel()
        for keys, memory, ticket in loads:
            for i, (key, right) in enumerate(zip(keys, finish(ticket), strict=True)):
                data = bytes(memory[i * pages.size : (i + 1) * pages.size])
                self.oracle.check_load(pages.name, key, data if right else None)
        for ticket in tickets:
            finish(ticket)

    @rule(word=words, spread=st.booleans())
    def read_layers(self, word: str, spread: bool) -> None:
        """Layer by layer: what is completed is right; a batch that fails says why."""
        pages, keys = self.clients[LAYERED], self.chain(LAYERED, word)
        lengths = np.array(SPACES[LAYERED]["parts"], np.uint64)
        memory = np.zeros((len(keys), pages.size + 100 * spread), np.uint8)
        start = np.uint64(memory.ctypes.data) + np.cumsum(lengths) - lengths
        rows = np.arange(len(keys), dtype=np.uint64) * np.uint64(memory.shape[1])
        where = PageFragments(rows[:, None] + start, lengths, memory)
        sink = Sink()
        layers = ((0,), (1,), (2,))
        self.reader.submit(lambda: [LayerRead(pages.pages.load_parts(keys, where), layers)], sink)
        assert sink.over.wait(3 * WAIT_S), "a batch does not end"
        assert self.reader.wait_idle(WAIT_S)
        assert sink.layers == [0, 1, 2] or sink.error is not None
        if sink.error is None:
            for key, row in zip(keys, memory, strict=True):
                self.oracle.check_load(pages.name, key, row[: pages.size].tobytes())

    @rule(word=words)
    def read_by_hand(self, word: str) -> None:
        """Parts started and finished out of order, some of them twice."""
        pages, keys = self.clients[LAYERED], self.chain(LAYERED, word)
        memory = bytearray(len(keys) * pages.size)
        load = pages.pages.load_parts(keys, memory)
        with contextlib.suppress(TuttiError):  # busy devices: then the load is given up
            early = load.start(2)
            late = load.start(0)
            load.finish(early, WAIT_S)
            load.finish(late, WAIT_S)
            load.finish(late, WAIT_S)
            good = load.finish(load.start(1), WAIT_S) & load.finish(load.start(2), WAIT_S)
            for i, (key, right) in enumerate(zip(keys, good, strict=True)):
                data = bytes(memory[i * pages.size : (i + 1) * pages.size])
                self.oracle.check_load(pages.name, key, data if right else None)
        with contextlib.suppress(TuttiError):
            load.end()

    # ---- what keeps pages, and what takes them away ----
    @rule(space=spaces, word=words, first=firsts, rooted=st.booleans())
    def hold(self, space: int, word: str, first: int, rooted: bool) -> None:
        keys = self.chain(space, word, rooted)
        first = min(first, len(keys))
        if len(self.holds) < 3:
            held = self.clients[space].pages.hold(keys, first, 3)
            self.holds.append((space, keys, first, held))

    @rule()
    def release(self) -> None:
        if self.holds:
            *_, held = self.holds.pop(0)
            held.release()
            held.release()

    @rule(space=spaces, word=words)
    def pin(self, space: int, word: str) -> None:
        if len(self.pins) < 3:
            keys = self.chain(space, word[:3])
            self.pins.append((space, keys, self.clients[space].pages.pin(keys)))

    @rule()
    def unpin(self) -> None:
        if self.pins:
            space, keys, count = self.pins.pop(0)
            self.clients[space].pages.unpin(keys, count)

    @rule(space=spaces, share=st.sampled_from((0.0, 0.1, 0.25)), ttl=st.sampled_from((None, 999.0)))
    def limit(self, space: int, share: float, ttl: float | None) -> None:
        self.clients[space].pages.limit(share=share, ttl_s=ttl)

    @rule(space=spaces)
    def clear(self, space: int) -> None:
        pages = self.clients[space]
        saved = set(self.oracle.keys(pages.name))
        assert pages.pages.clear() <= len(saved)
        self.oracle.forget(pages.name)
        self.holds = [held for held in self.holds if held[0] != space or held[3].release()]
        for pinned in [p for p in self.pins if p[0] == space]:
            pages.pages.unpin(*pinned[1:])
            self.pins.remove(pinned)
        for key in list(saved)[:3]:
            keys = PageKeys(key, pages.pages.namespace.key_bytes, rooted=False)
            assert pages.load(keys) == [False], "a page was cleared and is there"

    @rule()
    def flush(self) -> None:
        self.store.flush(WAIT_S)

    @rule()
    def rest(self) -> None:
        """With nothing moving, every slot is accounted for."""
        if self.disturbed:
            quiesce(self.store)
        else:
            check_space(self.store)

    @rule(value=st.sampled_from((-1, True, 1.5, None, "x", 2**70, b"", [])))
    def nonsense(self, value: Any) -> None:
        """Calls that are refused leave everything as it was."""
        pages, keys = self.clients[0].pages, self.chain(0, "ab")
        calls: tuple[Callable[[], object], ...] = (
            lambda: pages.match(keys, value),
            lambda: pages.save(keys, value),
            lambda: pages.load(keys, bytearray(2 * PAGE), 0, 2, value or (7, 7)),
            lambda: pages.unpin(keys, value if value != b"" else 99),
            lambda: pages.limit(share=value),
            lambda: self.store.unregister(value),
        )
        for call in calls:
            with pytest.raises((TuttiError, ValueError, TypeError)):
                call()

    # ---- what always holds ----
    @invariant()
    def nothing_is_broken(self) -> None:
        if not hasattr(self, "store"):
            return
        stats = self.store.stats()
        assert stats.counters.get("internal_errors", 0) == 0
        assert 0 <= stats.used_bytes <= stats.capacity_bytes and stats.pages >= 0
        assert self.disturbed or not stats.counters.get("checksum_errors", 0)
        for tier in stats.tiers:
            assert 0 <= tier.used_bytes <= tier.capacity_bytes and tier.hits >= 0

    @invariant()
    def what_is_kept_stays(self) -> None:
        if self.disturbed:
            return
        for space, keys, first, held in self.holds:
            now = self.clients[space].match(keys, first)
            assert now >= held.pages, f"{held.pages} pages are held, {now} are there"
        for space, keys, count in self.pins:
            assert self.clients[space].match(keys) >= count, "a pinned page has gone"


class FileMachine(StoreMachine):
    """The same on files."""

    on_files = True


def play(machine: type[StoreMachine], examples: int, chance: int | None) -> None:
    """Run `examples` histories: the same ones always, or those of a seed."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=45,
        deadline=None,
        derandomize=chance is None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    if chance is not None:
        machine = seed(chance)(type(machine.__name__, (machine,), {}))
    StoreMachine.failures.clear()
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Flaky:
        raise StoreMachine.failures[0] from None


@pytest.mark.parametrize(("machine", "examples"), [(StoreMachine, 60), (FileMachine, 25)])
def test_any_calls_in_any_order(machine: type[StoreMachine], examples: int) -> None:
    end_s, chance = time.monotonic() + SECONDS / 2, SEED
    play(machine, examples, None)
    while time.monotonic() < end_s:
        chance += 1
        play(machine, 10, chance)


# ---- negative controls ----
def unverified(patch: pytest.MonkeyPatch) -> None:
    """What the devices deliver is taken as it comes."""
    configure = small_config

    def careless(*where: Any, **rest: Any) -> Any:
        return configure(*where, **rest, verify=False)

    patch.setitem(globals(), "small_config", careless)


def unheld(patch: pytest.MonkeyPatch) -> None:
    """Holds keep nothing."""
    patch.setattr(HoldClass, "_take", lambda self, keys, first: len(keys) - first)


def uncleared(patch: pytest.MonkeyPatch) -> None:
    """Clearing says that it did."""
    patch.setattr(NamespaceStore, "clear", lambda self, timeout_s=60.0: 0)


def mixed_up(patch: pytest.MonkeyPatch) -> None:
    """A page of the chain's neighbour is delivered."""
    begin_load = Client.begin_load

    def neighbour(self: Client, keys: PageKeys, memory: bytearray, first: int = 0) -> Any:
        data = keys.data[: -keys.width] + keys.data[: keys.width]
        swapped = PageKeys(data, keys.width, keys.rooted)
        return begin_load(self, swapped if len(keys) > 1 else keys, memory, first)

    patch.setattr(Client, "begin_load", neighbour)


@pytest.mark.parametrize("breaking", [unverified, unheld, uncleared, mixed_up])
def test_what_is_broken_is_noticed(
    monkeypatch: pytest.MonkeyPatch, breaking: Callable[[pytest.MonkeyPatch], None]
) -> None:
    breaking(monkeypatch)
    with pytest.raises((AssertionError, CorruptionError)):
        play(StoreMachine, 60, None)
