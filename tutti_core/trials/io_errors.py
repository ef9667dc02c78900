"""Trial: disks that fail, fill up and stall in every way, and a store that has to serve on.

Histories in memory    faults of one kind at a time on devices in memory: reads, writes, flushes,
    submissions and catalog commits that fail, batches that are late or never end. Every byte that
    is handed out is compared, no call may hang or raise, and once the faults end everything has to
    be saved and served again within RECOVER_LOOKS_MAX looks, without reopening. A flush that fails
    loses what it was to cover, as Linux does; at the end power is lost, and every page that a save
    reported has to be there.

Histories on a disk    the same on a real file system (FUSE) whose calls fail or stall, next to a
    device that is well and must not be held up; where the machine lets us.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tutti_core.errors import BusyError, StoreFullError, TuttiError, device_error
from tutti_core.index.commits import PAUSE_LAST_S
from tutti_core.io.transport import Batch
from tutti_core.store import PrefixStore, SaveTicket
from tutti_core.testing import FOREVER, Fault, FaultPlan, FaultyDevices, Oracle, page_bytes
from tutti_core.testing.fuse_disk import FuseDisk, fuse_disk, why_not
from tutti_core.testing.media import Media
from tutti_core.tiers.health import PROBE_LAST_S
from tutti_core.tiers.saver import GROUP_JOBS_MAX
from tutti_core.trials.kit import (
    PAGE,
    check_space,
    client,
    finish,
    memory_devices,
    poll,
    quiet,
    small_config,
)
from tutti_core.trials.kit import run as chain_of
from tutti_core.trials.tally import Tally

RECOVER_LOOKS_MAX = 400
"""Looks at a store whose disks are well again until it has to save and serve everything."""
ROUNDS = 14
STEPS = 8
NAMES = 5
LAST = 2 * GROUP_JOBS_MAX - 30
"""Saves that make three groups, and fit into one pool."""
CHAIN_PAGES = 8
VAULT = "vault"
"""Pages that are saved first, and asked for only when all is well: they must always be there."""

CODES = (errno.EIO, errno.ENODEV, errno.EROFS, errno.EACCES)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
QUICK_SEEDS = 5
STALL_WAIT_S = 5.0
"""For the saver's thread to submit something that stalls."""
DISK_ROUNDS = 8


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class ForgetfulDevices(FaultyDevices):
    """Devices on which a flush that fails loses what it was to cover, and says so once."""

    def __init__(self, media: Media, **options: Any) -> None:
        super().__init__(media, **options)
        self.submit_fails = False
        self.submits_failed = 0
        self._forgotten: list[set[int]] = [set() for _ in media.capacities_bytes]

    def submit(self, batch: Batch) -> int:
        """As the others', but for a failure that no transport should have."""
        if self.submit_fails:
            self.submits_failed += 1
            raise RuntimeError("the trial lets a submission fail")
        return super().submit(batch)

    def flush(self, device: int) -> int:
        """What was not written back is taken for written from now on, though it is not."""
        with self.media.lock:
            pending = set(self.media.unflushed_blocks(device))
            status = super().flush(device)
            if status:
                self._forgotten[device] |= pending
                self.media.forget(device)
            else:
                self._forgotten[device] -= pending
            return status

    def crash(self, seed: int | None = None) -> None:
        """Power loss: what was forgotten is what it was before."""
        with self.media.lock:
            super().crash(seed)
            for device, blocks in enumerate(self._forgotten):
                self.media.go_back(device, blocks)


Trouble = tuple[str, Callable[[], None]]


class _History:
    """One store under one seed."""

    def __init__(self, store: PrefixStore, rng: random.Random, tally: Tally) -> None:
        self.store = store
        self.rng = rng
        self.tally = tally
        self.clock = Clock()
        store._loader.health._clock = self.clock
        store._catalog.commits._clock = self.clock
        self.oracle = Oracle()
        self.pages = client(store, self.oracle, tally)
        self.round = 0
        self.open: list[SaveTicket] = []

    def keys(self, *, earlier: bool = False) -> Any:
        """Some chain of this round, or of one before."""
        name = self.round - self.rng.randrange(2) if earlier else self.round
        return chain_of((name, self.rng.randrange(NAMES)), self.rng.randrange(1, CHAIN_PAGES + 1))

    def begin_save(self) -> None:
        """Start a save and leave it to itself, so that groups overlap."""
        keys = self.keys()
        payloads = [page_bytes(0, key, PAGE) for key in keys]
        for key, payload in zip(keys, payloads, strict=True):
            self.oracle.save(self.pages.name, key, payload)
        self.open.append(self.pages.pages.save(keys, b"".join(payloads)))

    def end_saves(self) -> None:
        """Hear how the saves ended."""
        for ticket in self.open:
            finish(ticket)
        self.open.clear()

    def save(self, keys: Any) -> bool:
        """Save and wait; whether all is stored."""
        return all(self.pages.save(keys))

    def many_saves(self, devices: ForgetfulDevices) -> list[int]:
        """Save so many pages that groups overlap, with a flush among them that fails.

        Returns which of them are stored for good, as far as the store says.
        """
        with devices.held():  # the first group holds up the others, which so become full
            tickets = [self._last(0)]
            poll(lambda: not self.store._saver._jobs, "the first group is being written")
            tickets += [self._last(i) for i in range(1, LAST)]
            devices.arm(Fault("error", "flush", index=self.rng.randrange(1, 3)))
            self.tally.faults["overlapping flush error"] += 1
        stored = [i for i, ticket in enumerate(tickets) if finish(ticket).all()]
        devices.disarm()
        return [i for i in stored if all(self.pages.contains(chain_of(("last", i), 1)))]

    def _last(self, number: int) -> SaveTicket:
        keys = chain_of(("last", number), 1)
        payload = page_bytes(0, keys[0], PAGE)
        self.oracle.save(self.pages.name, keys[0], payload)
        return self.pages.pages.save(keys, payload)

    def step(self) -> None:
        """Save, load or look something up while things fail."""
        choice = self.rng.random()
        if choice < 0.5:
            self.begin_save()
        elif choice < 0.6:
            self.end_saves()
        elif choice < 0.9:
            self.pages.load(self.keys(earlier=True))
        else:
            self.pages.match(self.keys(earlier=True))
            self.store.stats()

    def recover(self, what: str) -> None:
        """All is well again: within a bound everything is saved and served."""
        self.end_saves()
        every = [chain_of((self.round, name), CHAIN_PAGES) for name in range(NAMES)]
        for _ in range(RECOVER_LOOKS_MAX):
            self.clock.now_s += max(PROBE_LAST_S, PAUSE_LAST_S)
            self.store._manager._segments.claim_again()
            well = not self.store.stats().unwell
            if well and all(self.save(keys) for keys in every):
                break
            time.sleep(0.001)
        else:
            self.tally.complain(f"{what}: the store does not recover: {self.store.stats()}")
            return
        for keys in every:
            if not all(self.pages.load(keys)):
                self.tally.complain(f"{what}: pages that were saved anew are not served")
        self.look_into_the_vault(what)
        self.round += 1
        counters = self.store.stats().counters
        if counters.get("internal_errors", 0):
            self.tally.complain(f"{what}: the store has stopped saving")

    def fill_vault(self) -> None:
        """Save what has to outlive all faults, and keep it from being evicted."""
        keys = chain_of(VAULT, CHAIN_PAGES)
        for _ in range(RECOVER_LOOKS_MAX):  # on a busy machine a disk may seem to stall already
            if self.save(keys) and self.pages.pages.pin(keys) == CHAIN_PAGES:
                return
            self.clock.now_s += PROBE_LAST_S
            self.store.stats()
            time.sleep(0.001)
        self.tally.complain("nothing can be saved at the start")

    def look_into_the_vault(self, what: str) -> None:
        """The pages that no fault touched are there, once their devices are well.

        Time jumps here, so that what has been late for a moment may pass for stalled.
        """
        for _ in range(RECOVER_LOOKS_MAX):
            lost = self.pages.load(chain_of(VAULT, CHAIN_PAGES)).count(False)
            if not lost or not self.store.stats().unwell:
                break
            self.clock.now_s += PROBE_LAST_S
            time.sleep(0.001)
        if lost:
            self.tally.lose(f"{what}: vault", lost)


@contextmanager
def _catalog_fails(history: _History, kind: str, error: Callable[[], Exception]) -> Iterator[None]:
    """Let commits of the store's catalog end with an error."""
    catalog = history.store._catalog
    honest = {name: getattr(catalog, name) for name in ("publish", "remove", "claim_segment")}

    def refuse(*arguments: object) -> None:
        history.tally.faults[kind] += 1
        raise error()

    for name in honest:
        setattr(catalog, name, refuse)
    try:
        yield
    finally:
        for name in honest:
            delattr(catalog, name)


def _memory_kinds(rng: random.Random) -> list[str]:
    """Every kind of trouble once, and then at random, in seeded order."""
    kinds = [
        "read error", "write error", "flush error", "one flush error", "no room to write",
        "torn write", "submission fails", "busy", "late batches", "stalled batches",
        "catalog error", "catalog full", "read and write error",
    ]  # fmt: skip
    rng.shuffle(kinds)
    return [*kinds, *rng.choices(kinds, k=max(ROUNDS - len(kinds), 0))]


def _trouble(history: _History, devices: ForgetfulDevices, kind: str) -> None:
    """One round: something fails for some steps, in part or at all."""
    rng = history.rng
    code = rng.choice(CODES)
    device = rng.choice([None, *range(len(devices.devices))])
    count = rng.choice([1, 3, FOREVER])
    settings: dict[str, Any] = {"errno": code, "device": device, "count": count}
    if kind in ("read error", "read and write error"):
        devices.arm(Fault("error", "read", **settings))
    if kind in ("write error", "read and write error"):
        devices.arm(Fault("error", "write", **settings))
    elif kind == "flush error":
        devices.arm(Fault("error", "flush", **settings))
    elif kind == "one flush error":
        devices.arm(Fault("error", "flush", errno=code, index=rng.randrange(3)))
    elif kind == "no room to write":
        devices.arm(Fault("error", "write", **{**settings, "errno": rng.choice(NO_ROOM)}))
    elif kind == "torn write":
        devices.arm(Fault("torn", "write", **{**settings, "errno": rng.choice((*NO_ROOM, code))}))
    elif kind == "submission fails":
        devices.submit_fails = True
    elif kind == "busy":
        devices.arm(Fault("busy", "batch", count=5))
    elif kind == "late batches":
        devices.arm(Fault("slow", "batch", count=4, polls=rng.randrange(1, 4)))
    elif kind == "stalled batches":
        devices.arm(Fault("slow", "batch", count=2))
    if kind == "catalog error":
        with _catalog_fails(history, kind, lambda: device_error("commit", code)):
            _steps(history, kind)
    elif kind == "catalog full":
        with _catalog_fails(history, kind, lambda: StoreFullError("the catalog is full")):
            _steps(history, kind)
    elif kind == "stalled batches":
        before = sum(devices.injected.values())
        _steps(history, kind)
        # The saver's thread submits them, some time later.
        deadline_s = time.monotonic() + STALL_WAIT_S
        while sum(devices.injected.values()) == before and time.monotonic() < deadline_s:
            time.sleep(0.001)
    else:
        _steps(history, kind)


def _steps(history: _History, kind: str) -> None:
    for _ in range(STEPS):
        if kind == "stalled batches":  # who waits for one would wait for long
            history.begin_save()
            history.clock.now_s += 10
        else:
            history.step()
    if kind not in ("late batches", "stalled batches"):
        history.end_saves()


def _in_memory(directory: Path, seed: int, tally: Tally) -> None:
    rng = random.Random(seed)
    pools = [directory / "p0", directory / "p1"][: rng.choice((1, 2))]
    config = small_config(directory / "s", pools=pools, segments=16, io_timeout_s=0.05)
    media = memory_devices(config).media
    devices = ForgetfulDevices(media, seed=seed, plan=FaultPlan(reorder=True))
    with PrefixStore.open(config, transport_object=devices) as store:
        history = _History(store, rng, tally)
        history.fill_vault()
        for kind in _memory_kinds(rng):
            what = f"seed {seed}, {kind}"
            before = sum(devices.injected.values())
            try:
                _trouble(history, devices, kind)
                tally.faults[kind] += sum(devices.injected.values()) - before
                tally.faults[kind] += devices.submits_failed
                devices.submits_failed = 0
                devices.disarm()
                devices.submit_fails = False
                devices.release()
                history.recover(what)
            except (TuttiError, OSError, RuntimeError) as error:
                tally.complain(f"{what}: raised {error!r}")
                devices.disarm()
                devices.submit_fails = False
                devices.release()
        kept = history.many_saves(devices)
        try:
            check_space(store)
        except AssertionError as error:
            tally.complain(f"seed {seed}: {error}")
        devices.crash(seed)
    tally.faults["power loss"] += 1
    with PrefixStore.open(config, transport_object=devices.reopen(seed=seed)) as store:
        pages = client(store, history.oracle, tally)
        lost = sum(not pages.load(chain_of(("last", i), 1))[0] for i in kept)
        if lost:
            tally.lose(f"seed {seed}, after power loss", lost)
        vault = pages.load(chain_of(VAULT, CHAIN_PAGES))
        if not all(vault):
            tally.lose(f"seed {seed}, vault after power loss", vault.count(False))


# ---- on a disk ---------------------------------------------------------------------------------
DISK_KINDS = (
    ("read", CODES), ("write", CODES), ("fsync", CODES), ("fallocate", (*NO_ROOM, *CODES)),
    ("write", NO_ROOM), ("read", (0,)), ("write", (0,)), ("fsync", (0,)),
)  # fmt: skip
"""Calls, and what they may end with; 0: not at all."""


def _on_a_disk(directory: Path, disk: FuseDisk, seed: int, tally: Tally) -> None:
    rng = random.Random(seed)
    place = disk.mount / f"p{seed}"
    config = small_config(
        directory / "s",
        pools=[place, directory / "well"],
        segments=16,
        io_timeout_s=0.1,
        keep_free=0,
        transport=rng.choice(("posix", "auto")),
    )
    with PrefixStore.open(config) as store:
        history = _History(store, rng, tally)
        history.fill_vault()
        kinds = [*DISK_KINDS, *rng.choices(DISK_KINDS, k=DISK_ROUNDS)][:DISK_ROUNDS]
        rng.shuffle(kinds)
        for call, codes in kinds:
            code = rng.choice(codes)
            name = errno.errorcode.get(code, "stall")
            what = f"seed {seed}, {call} {name}"
            if code:
                disk.fail(call, code, "pool.tutti")
            else:
                disk.stall(call, "pool.tutti")
            before = disk.count(call)
            late = _disk_steps(history, stalled=not code)
            if disk.count(call) > before:
                tally.faults[f"disk: {call} {name}"] += 1
            disk.heal()
            for load in late:
                finish(load)
            history.recover(what)
        try:
            check_space(store)
        except AssertionError as error:
            tally.complain(f"seed {seed}: {error}")


def _disk_steps(history: _History, *, stalled: bool) -> list[Any]:
    """Use the store while one of its disks fails; the loads that have not ended."""
    late: list[Any] = []
    history.begin_save()
    history.begin_save()
    for _ in range(STEPS if not stalled else 3):
        if not stalled:
            history.step()
            continue
        keys = history.keys(earlier=True)
        load = history.pages.pages.load(keys, bytearray(len(keys) * PAGE))
        try:
            load.wait(0.15)
        except BusyError:
            late.append(load)
        history.clock.now_s += 1
    history.end_saves()
    return late


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Try seed after seed: the quick part, or until `seconds` are over."""
    tally = Tally()
    deadline_s = time.monotonic() + seconds
    with quiet():
        number = 0
        while number < QUICK_SEEDS or time.monotonic() < deadline_s:
            _in_memory(directory / f"memory{number}", seed + number, tally)
            number += 1
            if seconds and number >= QUICK_SEEDS:
                _some_disks(directory / f"disk{number}", seed + number, 1, tally)
        if not seconds:
            _some_disks(directory / "disk", seed, 2, tally)
    return tally


def _some_disks(directory: Path, seed: int, count: int, tally: Tally) -> None:
    """Histories on a disk, where this machine has FUSE."""
    if why_not():
        return
    with fuse_disk(directory / "mount", directory / "truth") as disk:
        for number in range(count):
            _on_a_disk(directory / f"store{number}", disk, seed + number, tally)
