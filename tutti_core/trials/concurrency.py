"""Everything at once: threads that share keys, holds, cancellations, closes, forks and exits.

What a load may hand out of a key is any content whose save had begun, unless a clear began after
that save's end and ended before the load began. What is held stays. Nothing but the documented
exceptions comes out of a call, nothing hangs, and at the end all space is accounted for.

`events` of the tally counts the disturbances by kind, such as "clear", "cancel", "fork".
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.errors import BusyError, StoreClosedError
from tutti_core.keys import PageKeys
from tutti_core.store import NamespaceStore, PrefixStore, SaveTicket
from tutti_core.testing import FaultPlan, FaultyDevices, page_bytes
from tutti_core.trials.exits import exits
from tutti_core.trials.kit import (
    NAMESPACE,
    PAGE,
    check_space,
    finish,
    load_in_parts,
    loose,
    memory_devices,
    poll,
    quiesce,
    quiet,
    small_config,
)
from tutti_core.trials.kit import run as run_of
from tutti_core.trials.tally import Tally

PARTS = (PAGE // 2, PAGE // 4, PAGE // 4)
DRAM = 32 * PAGE
"""Eight segments, each of which holds a page in parts."""
NAMES, PAGES_MAX = 5, 7
"""Chains, and pages of a chain: about two times what fits."""
CALL_S = 60.0
"""No call and no thread may take longer, with all the margin that a busy machine needs."""
QUICK_STEPS, LONG_STEPS = 40, 150
QUICK_OPERATIONS, LONG_OPERATIONS = 900, 100_000
LONG_OPERATIONS_S = 180.0
"""What the long ones take, more or less; a shorter run leaves them out."""

SETTINGS: dict[str, dict[str, Any]] = {
    "files": {},
    "files, write_through": {"dram": DRAM, "write_policy": "write_through"},
    "files, write_back": {"dram": DRAM, "write_policy": "write_back"},
    "memory": {"transport": "memory"},
    "memory, write_back": {
        "transport": "memory",
        "dram": DRAM,
        "write_policy": "write_back",
        "dram_mode": "exclusive",
    },
}
"""Files are moved by io_uring where this machine has it."""


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Try everything once, small; with `seconds`, go on with further seeds and many operations."""
    tally = Tally()
    deadline_s = time.monotonic() + seconds
    _round(directory / "quick", seed, QUICK_STEPS, tally)
    exits(directory / "exits", tally)
    many_operations(directory / "many", QUICK_OPERATIONS, tally)
    number = 0
    while time.monotonic() < deadline_s:
        number += 1
        _round(directory / f"long-{number}", seed + number, LONG_STEPS, tally)
        if number == 1 and seconds >= LONG_OPERATIONS_S:
            many_operations(directory / "many-long", LONG_OPERATIONS, tally)
    return tally


def _round(directory: Path, seed: int, steps: int, tally: Tally) -> None:
    for name in SETTINGS:
        mixed_calls(directory / name.replace(", ", "-"), name, seed, steps, tally)
    for name in ("memory", "memory, write_back"):
        where = directory / name.replace(", ", "-")
        pinned_full(where / "pinned", name, tally)
        cancelled(where / "cancelled", name, seed, tally)
        for repeat in range(3):
            closed_under_load(where / f"closed-{repeat}", name, seed + repeat, tally)
        closed_while_stalled(where / "stalled", name, tally)
    forked(directory / "forked", tally)


# ---- what may be handed out ----
@dataclass(slots=True)
class _Save:
    begun_ns: int
    ended_ns: int | None = None


@dataclass(slots=True)
class History:
    """Saves and clears of one namespace. Threads: any."""

    saves: dict[int, _Save] = field(default_factory=dict)
    clears: list[list[int]] = field(default_factory=list)
    """Begin and, once it is over, end of each, in nanoseconds."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_save(self) -> int:
        """A save begins; returns the seed of its pages, which no other has."""
        with self.lock:
            seed = len(self.saves) + 1
            self.saves[seed] = _Save(time.monotonic_ns())
            return seed

    def end_save(self, seed: int) -> None:
        """The ticket of a save has ended."""
        with self.lock:
            self.saves[seed].ended_ns = time.monotonic_ns()

    def begin_clear(self) -> list[int]:
        """A clear begins; give the result to `end_clear`."""
        with self.lock:
            self.clears.append([time.monotonic_ns()])
            return self.clears[-1]

    def end_clear(self, clear: list[int]) -> None:
        """The clear has returned."""
        with self.lock:
            clear.append(time.monotonic_ns())

    def cleared_since(self, begun_ns: int) -> bool:
        """Whether a clear was under way then, or later."""
        with self.lock:
            return any(len(clear) == 1 or clear[1] >= begun_ns for clear in self.clears)

    def is_stale(self, seed: int, load_begun_ns: int) -> bool:
        """Whether a load that began then must not see this save's pages."""
        with self.lock:
            save = self.saves.get(seed)
            if save is None:
                return True
            return save.ended_ns is not None and any(
                clear[0] > save.ended_ns and len(clear) == 2 and clear[1] < load_begun_ns
                for clear in self.clears
            )


# ---- one store and its threads ----
class Rig:
    """A small store, two namespaces of it, and a tally that threads share."""

    def __init__(self, directory: Path, name: str, seed: int, tally: Tally, **more: Any) -> None:
        settings = {**SETTINGS[name], **more}
        in_memory = settings.pop("transport", "auto") == "memory"
        config = small_config(
            directory, segments=6, transport="posix" if in_memory else "auto", **settings
        )
        self.devices: FaultyDevices | None = None
        if in_memory:
            plan = FaultPlan(reorder=True, rates={("slow", "batch"): 0.05})
            self.devices = _Dawdling(memory_devices(config).media, seed=seed, plan=plan)
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.store = PrefixStore.open(config, transport_object=self.devices)
        self.plain = plain_of(self.store)
        parts: dict[str, Any] = {**NAMESPACE, "parts": PARTS}
        self.parts = self.store.namespace(**parts)
        self.histories = {id(self.plain): History(), id(self.parts): History()}
        self.tally = tally
        self._lock = threading.Lock()

    def history(self, pages: NamespaceStore) -> History:
        """What was done to a namespace."""
        return self.histories[id(pages)]

    def note(self, kind: str) -> None:
        """Count a disturbance."""
        with self._lock:
            self.tally.events[kind] += 1

    def complain(self, text: str) -> None:
        """Note what must not happen."""
        with self._lock:
            self.tally.complain(f"{self.name}: {text}")

    def judge(
        self, pages: NamespaceStore, keys: PageKeys, good: Any, memory: bytearray, begun_ns: int
    ) -> None:
        """Compare what a load handed out."""
        for i, (key, hit) in enumerate(zip(keys, good, strict=True)):
            if not hit:
                with self._lock:
                    self.tally.misses += 1
                continue
            data = bytes(memory[i * PAGE : (i + 1) * PAGE])
            seed = int.from_bytes(data[8:16], "little")
            with self._lock:
                self.tally.compare(data, page_bytes(seed, key, PAGE), f"{self.name}: a load")
            if self.history(pages).is_stale(seed, begun_ns):
                self.complain(f"seed {seed} was handed out after a clear, or was never saved")

    def save(self, pages: NamespaceStore, keys: PageKeys) -> tuple[SaveTicket, bytearray, int]:
        """Start to save new contents."""
        seed = self.history(pages).begin_save()
        memory = bytearray(b"".join(page_bytes(seed, key, PAGE) for key in keys))
        return pages.save(keys, memory), memory, seed

    def load(self, pages: NamespaceStore, keys: PageKeys, pause_s: float = 0.0) -> list[bool]:
        """Load pages, judge them, and return which were hits.

        Between the beginning and the end of the load others have `pause_s` to write.
        """
        memory, begun_ns = bytearray(PAGE * len(keys)), time.monotonic_ns()
        if pages.namespace.parts:
            load = pages.load_parts(keys, memory)
            time.sleep(pause_s)
            good = load_in_parts(load)
        else:
            ticket = pages.load(keys, memory)
            time.sleep(pause_s)
            good = finish(ticket)
        self.judge(pages, keys, good, memory, begun_ns)
        return [bool(hit) for hit in good]

    def check_end(self) -> None:
        """When all is over: space accounted for, nothing pinned, nothing in flight, no surprise."""
        store, manager = self.store, self.store._manager
        if self.devices is not None:
            self.devices.disarm()
        try:
            poll(lambda: not _in_flight(store), "all transfers are collected")
            quiesce(store)
            check_space(store)
            for tier in store._tiers:
                tier.check()
                assert not tier._writes and not tier._moving, "pages in motion are left"
            for entry in manager._entries.values():
                shelves = [
                    t._shelves[entry.digest] for t in store._tiers if entry.digest in t._shelves
                ]
                for pages in (entry.pages, *(shelf.pages for shelf in shelves)):
                    assert not pages.pins, "pins are left"
            with manager.lock:
                assert not manager.space._loads, "loads are left that protect slots"
            counters = store.stats().counters
            for name in ("internal_errors", "checksum_errors", "catalog_errors", "copy_errors"):
                assert not counters.get(name), f"{counters[name]} {name}"
        except AssertionError as error:
            self.complain(str(error))


def plain_of(store: PrefixStore) -> NamespaceStore:
    """The namespace of whole pages."""
    fields: dict[str, Any] = NAMESPACE
    return store.namespace(**fields)


class _Dawdling(FaultyDevices):
    """Devices that take a moment for some of their batches, which other threads use."""

    def wait(self, ticket: int, timeout_s: float) -> Any:
        if timeout_s > 0.0 and ticket % 3 == 0:
            time.sleep(0.0005)
        return super().wait(ticket, timeout_s)


def _in_flight(store: PrefixStore) -> bool:
    store._sweep()
    mover = store._mover
    stuck = bool(store._saver._stuck) or (mover is not None and bool(mover._stuck))
    if store._saver._stuck:  # a save lets the saver look after them
        store.namespace(model="look", page_bytes=PAGE, page_tokens=1).save(
            run_of(time.monotonic_ns(), 1), bytes(PAGE)
        ).wait(CALL_S)
    return stuck or bool(store._loader.in_flight()) or bool(store._loader._parts_loads)


@contextlib.contextmanager
def opened(directory: Path, name: str, seed: int, tally: Tally, **more: Any) -> Iterator[Rig]:
    """A rig whose end is checked."""
    rig = Rig(directory, name, seed, tally, **more)
    try:
        yield rig
        rig.check_end()
    finally:
        rig.store.close(CALL_S)


def together(rig: Rig, *works: Callable[[], object]) -> None:
    """Run all at once; an exception and a thread that does not end are complaints."""

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            rig.complain(f"{type(error).__name__} out of a call: {error}")

    threads = [threading.Thread(target=guarded, args=(w,), daemon=True) for w in works]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 2 * CALL_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
        if thread.is_alive():
            rig.complain("a thread does not end")


# ---- everything on the same keys ----
def mixed_calls(directory: Path, name: str, seed: int, steps: int, tally: Tally) -> None:
    """Four threads make `steps` calls each, of all kinds, on a few keys that do not all fit."""
    with opened(directory, name, seed, tally) as rig:
        together(rig, *(Caller(rig, random.Random(seed * 101 + i), steps).work for i in range(4)))
        evicted = rig.store.stats().counters.get("evicted_pages", 0)
        tally.events["evict"] += evicted


class Caller:
    """One thread's calls."""

    def __init__(self, rig: Rig, rng: random.Random, steps: int) -> None:
        self.rig = rig
        self.rng = rng
        self.steps = steps

    def work(self) -> None:
        """Make the calls; BusyError is an answer like others."""
        kinds: list[tuple[Callable[[NamespaceStore, PageKeys], None], int]] = [
            (self.save, 30),
            (self.load, 30),
            (self.hold, 12),
            (self.look, 10),
            (self.cancel, 8),
            (self.limit, 3),
            (self.flush, 3),
            (self.clear, 2),
        ]
        calls, weights = [call for call, _ in kinds], [weight for _, weight in kinds]
        for _ in range(self.steps):
            keys = run_of(self.rng.randrange(NAMES), self.rng.randrange(1, PAGES_MAX))
            pages = self.rig.parts if self.rng.random() < 0.3 else self.rig.plain
            with contextlib.suppress(BusyError):
                self.rng.choices(calls, weights)[0](pages, keys)

    def save(self, pages: NamespaceStore, keys: PageKeys) -> None:
        """Save, and wait."""
        ticket, _, seed = self.rig.save(pages, keys)
        finish(ticket)
        self.rig.history(pages).end_save(seed)

    def load(self, pages: NamespaceStore, keys: PageKeys) -> None:
        """Load, now and then by the keys alone."""
        pause_s = self.rng.choice((0.0, 0.0, 0.001, 0.005))
        self.rig.load(pages, loose(keys) if self.rng.random() < 0.2 else keys, pause_s)

    def hold(self, pages: NamespaceStore, keys: PageKeys) -> None:
        """What is held stays through other saves, unless the namespace is cleared."""
        begun_ns = time.monotonic_ns()
        hold = pages.hold(keys)
        try:
            for _ in range(2):
                other = run_of(("other", self.rng.randrange(4)), 5)
                finish(self.rig.save(self.rig.plain, other)[0])
            hits = self.rig.load(pages, keys)[: hold.pages]
            if not all(hits) and not self.rig.history(pages).cleared_since(begun_ns):
                self.rig.complain(f"of {hold.pages} held pages some are gone: {hits}")
        finally:
            hold.release()
        self.rig.note("hold")

    def look(self, pages: NamespaceStore, keys: PageKeys) -> None:
        """Look-ups, pins and statistics."""
        hit = pages.match(keys).pages
        if not 0 <= hit <= len(keys) or pages.contains(keys).shape != (len(keys),):
            self.rig.complain("an impossible answer of a look-up")
        pages.unpin(keys, pages.pin(keys))
        self.rig.store.stats()

    def cancel(self, pages: NamespaceStore, keys: PageKeys) -> None:
        """Cancel a save at some stage, and use the memory for something else at once."""
        ticket, memory, _ = self.rig.save(pages, keys)
        time.sleep(self.rng.choice((0.0, 0.0002, 0.002)))
        ticket.cancel()
        memory[:] = b"\xee" * len(memory)
        finish(ticket)
        self.rig.note("cancel")

    def limit(self, pages: NamespaceStore, _: PageKeys) -> None:
        """Change the limits; nothing expires that soon."""
        pages.limit(share=self.rng.choice((0.0, 0.2)), ttl_s=self.rng.choice((None, 3600.0)))
        self.rig.note("limit")

    def flush(self, *_: object) -> None:
        """Write down what is in memory only."""
        self.rig.store.flush(CALL_S)
        self.rig.note("flush")

    def clear(self, pages: NamespaceStore, _: PageKeys) -> None:
        """Empty the namespace."""
        clear = self.rig.history(pages).begin_clear()
        pages.clear(CALL_S)
        self.rig.history(pages).end_clear(clear)
        self.rig.note("clear")


# ---- full of what may not go ----
def pinned_full(directory: Path, name: str, tally: Tally) -> None:
    """With everything held, saves are refused and counted, at once; after the release they work."""
    with opened(directory, name, 0, tally, admission="always") as rig:
        pages, store = rig.plain, rig.store
        assert rig.devices is not None
        rig.devices.disarm()
        holds = []
        for i in range(40):
            keys = run_of(("held", i), 4)
            finish(rig.save(pages, keys)[0])
            holds.append(pages.hold(keys))
        full = sum(hold.pages for hold in holds)
        if full == 4 * len(holds):
            rig.complain("the store never became full")
        refused = finish(rig.save(pages, run_of("refused", 4))[0])
        if refused.all():
            rig.complain("a save found room among held pages")
        counters = store.stats().counters
        if not counters.get("pages_refused_full", 0):
            rig.complain("refused pages were not counted")
        for i, hold in enumerate(holds):
            if hold.pages and not all(rig.load(pages, run_of(("held", i), hold.pages))):
                rig.complain("a held page is gone")
        for hold in holds:
            hold.release()
            hold.release()
        if not finish(rig.save(pages, run_of("after", 4))[0]).all():
            rig.complain("after the release there is no room")
        rig.note("pinned full")


# ---- cancelled at every stage ----
def cancelled(directory: Path, name: str, seed: int, tally: Tally) -> None:
    """Before it is taken up, while it is written, and when it is over."""
    with opened(directory, name, seed, tally) as rig:
        assert rig.devices is not None
        rig.devices.disarm()
        for stage in ("queued", "written", "over"):
            keys = run_of(stage, 5)
            rig.devices.hold()
            first = rig.save(rig.plain, run_of(("before", stage), 2))[0]
            if stage != "queued":
                rig.devices.release()
                finish(first)
                rig.devices.hold()
            ticket, memory, _ = rig.save(rig.plain, keys)
            if stage == "written":
                with contextlib.suppress(AssertionError):  # what ends in memory is not submitted
                    poll(lambda: bool(rig.store._transport._flights), "it is written", 0.2)  # type: ignore[attr-defined]
            elif stage == "over":
                rig.devices.release()
                finish(ticket)
            ticket.cancel()
            memory[:] = b"\xee" * len(memory)
            rig.devices.release()
            stored = finish(ticket)
            if stage == "queued" and stored.any() and not rig.store._tiers:
                rig.complain("a save that was cancelled in the queue was stored")
            finish(first)
            rig.load(rig.plain, keys)
            rig.note("cancel")


# ---- closing ----
def closed_under_load(directory: Path, name: str, seed: int, tally: Tally) -> None:
    """Two threads close while others call: every call ends, in an answer or StoreClosedError."""
    rig = Rig(directory, name, seed, tally)
    barrier, rng = threading.Barrier(6), random.Random(seed)

    def until_closed(number: int) -> Callable[[], None]:
        caller = Caller(rig, random.Random(seed * 7 + number), 1)
        calls = [caller.save, caller.load, caller.cancel, caller.hold, caller.look]

        def work() -> None:
            barrier.wait(CALL_S)
            deadline_s = time.monotonic() + CALL_S
            with contextlib.suppress(StoreClosedError):
                while time.monotonic() < deadline_s:
                    keys = run_of(caller.rng.randrange(NAMES), 5)
                    pages = rig.parts if caller.rng.random() < 0.5 else rig.plain
                    with contextlib.suppress(BusyError):
                        calls[number](pages, keys)
                rig.complain("a closed store still takes calls")

        return work

    def close() -> None:
        barrier.wait(CALL_S)
        time.sleep(rng.random() * 0.02)
        rig.store.close(CALL_S)
        rig.store.close(CALL_S)

    # A held page may be gone in a store that was closed meanwhile: no complaint about that.
    for history in rig.histories.values():
        history.begin_clear()
    together(rig, *(until_closed(i) for i in range(4)), close, close)
    rig.note("close")


def closed_while_stalled(directory: Path, name: str, tally: Tally) -> None:
    """With a device that does not answer closing and waiting are bounded, and answers right."""
    rig = Rig(directory, name, 0, tally, io_timeout_s=1.0)
    assert rig.devices is not None
    rig.devices.disarm()
    keys, memory = run_of("k", 4), bytearray(4 * PAGE)
    finish(rig.save(rig.plain, keys)[0])
    finish(rig.save(rig.parts, keys)[0])
    rig.store.flush(CALL_S)
    rig.devices.hold()
    begun_ns = time.monotonic_ns()
    load = rig.plain.load(keys, memory)
    parts_memory = bytearray(4 * PAGE)
    parts = rig.parts.load_parts(keys, parts_memory)
    reading = parts.start(0)
    save = rig.save(rig.plain, run_of("late", 3))[0]

    def wait_parts() -> None:
        with contextlib.suppress(BusyError, StoreClosedError):
            while not parts.finish(reading, 0.05).any():
                break
        with contextlib.suppress(BusyError, StoreClosedError):
            parts.start(1)
        with contextlib.suppress(BusyError):
            parts.end()

    def wait_save() -> None:
        with contextlib.suppress(BusyError):
            save.wait(0.5)

    def wait_load() -> None:
        with contextlib.suppress(BusyError):
            rig.judge(rig.plain, keys, load.wait(0.5), memory, begun_ns)

    with quiet():
        together(rig, wait_parts, wait_save, wait_load, *[lambda: rig.store.close(0.3)] * 2)
    rig.devices.release()  # it answers after all
    finish(save)
    rig.judge(rig.plain, keys, finish(load), memory, begun_ns)
    rig.store.close(CALL_S)
    rig.note("close")


# ---- forks ----
def forked(directory: Path, tally: Tally) -> None:
    """A child that inherits tickets, holds and a store: it hears that they are not its own."""
    rig = Rig(directory, "files", 0, tally, writers_max=2)
    with contextlib.closing(rig.store):
        keys, memory = run_of("k", 6), bytearray(6 * PAGE)
        finish(rig.save(rig.plain, keys)[0])
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                finish(rig.save(rig.plain, run_of("busy", 3))[0])
                rig.load(rig.plain, keys)

        def fork() -> None:
            try:
                for _ in range(4):
                    begun_ns = time.monotonic_ns()
                    hold = rig.plain.hold(keys)
                    load = rig.plain.load(keys, memory)
                    save = rig.save(rig.plain, run_of(time.monotonic_ns(), 2))[0]
                    unknown = SaveTicket(np.zeros(1, dtype=np.bool_))
                    child = os.fork()
                    if child == 0:
                        _in_the_child(rig, directory, keys, [hold, load, save, unknown])
                    status = _wait_for(child)
                    if status:
                        rig.complain(f"a forked child ended with {status}")
                    finish(save)
                    rig.judge(rig.plain, keys, finish(load), memory, begun_ns)
                    hold.release()
                    rig.note("fork")
            finally:
                stop.set()

        together(rig, busy, fork)
        rig.check_end()


def _in_the_child(rig: Rig, directory: Path, keys: PageKeys, inherited: list[Any]) -> None:
    status = 1
    try:
        signal.alarm(int(CALL_S))  # a hang ends as a complaint
        hold, *tickets = inherited
        hold.release()
        for ticket in tickets:
            with contextlib.suppress(StoreClosedError):
                if not ticket.wait(CALL_S).all() and not ticket.done():
                    os._exit(3)
        rig.store.close()
        with PrefixStore.open(rig.store.config) as own:
            memory = bytearray(len(keys) * PAGE)
            plain_of(own).load(keys, memory).wait(CALL_S)
            plain_of(own).save(run_of("child", 2), bytes(2 * PAGE)).wait(CALL_S)
        status = 0
    finally:
        os._exit(status)


def _wait_for(child: int) -> int:
    return os.waitpid(child, 0)[1]


# ---- nothing grows ----
def many_operations(directory: Path, count: int, tally: Tally) -> None:
    """Files, threads and memory do not grow with the number of calls.

    Looked at three times. What is made once, such as a module that is imported late, may show
    between two looks; what grows with each call shows between all.
    """
    settings = {"dram": DRAM, "write_policy": "write_back"}
    rig = Rig(directory, "files", 0, tally, **settings)
    with contextlib.closing(rig.store):
        rng, part = random.Random(1), count // 3
        _operate(rig, rng, part)
        tracemalloc.start()
        try:
            _operate(rig, rng, part // 3)  # what is kept of the last calls is traced from here on
            looks = [_resources(rig)]
            for _ in range(2):
                _operate(rig, rng, part)
                looks.append(_resources(rig))
        finally:
            tracemalloc.stop()
        if len({look[:3] for look in looks}) > 1:
            rig.complain(f"files, threads and room in memory: {[look[:3] for look in looks]}")
        traced = min(looks[i + 1][3] - looks[i][3] for i in range(2))
        resident = min(looks[i + 1][4] - looks[i][4] for i in range(2))
        # A queue or a table that grows by one small object a call shows here.
        if traced > 64 * 1024 + 16 * part:
            rig.complain(f"{traced} more bytes are in use after each {part} calls")
        if resident > (8 << 20) + 16 * part:
            rig.complain(f"the process grew by {resident} bytes with each {part} calls")
        tally.events["operations"] += count
        rig.check_end()


def _operate(rig: Rig, rng: random.Random, count: int) -> None:
    for i in range(count):
        keys = run_of(rng.randrange(40), 2)
        pages = rig.parts if i % 4 == 0 else rig.plain
        match i % 3:
            case 0:
                finish(pages.save(keys, bytes(2 * PAGE)))
            case 1:
                memory = bytearray(2 * PAGE)
                if pages.namespace.parts:
                    load_in_parts(pages.load_parts(keys, memory))
                else:
                    finish(pages.load(keys, memory))
            case _:
                pages.hold(keys).release()
        if i % 500 == 499:
            pages.clear(CALL_S)
    for pages in (rig.plain, rig.parts):
        pages.clear(CALL_S)
    quiesce(rig.store)


def _resources(rig: Rig) -> tuple[int, int, int, int, int]:
    """Open files, threads, bytes in use in the arena, bytes in use by Python, resident bytes."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    arena = sum(tier.used_bytes for tier in rig.store._tiers)
    files = len(os.listdir("/proc/self/fd"))
    return files, threading.active_count(), arena, tracemalloc.get_traced_memory()[0], resident
