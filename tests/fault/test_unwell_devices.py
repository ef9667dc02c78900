"""A device that fails or stalls is left alone and probed; its pages are there when it is back."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from store_kit import PAGE, check_space, client, finish, open_faulty, poll, run, settle

from tutti_core import BusyError, PrefixStore
from tutti_core.errors import device_error
from tutti_core.index import commits
from tutti_core.index.catalog import Catalog
from tutti_core.io.transport import Device, Op
from tutti_core.testing import FOREVER, Fault, FaultyDevices
from tutti_core.tiers.health import ERRORS_MAX, NOT_THE_DEVICE, PROBE_FIRST_S, PROBE_LAST_S, Health


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def opened(path: Path, **settings: object) -> Iterator[tuple[PrefixStore, FaultyDevices, Clock]]:
    clock = Clock()
    with open_faulty(path, segments=12, **settings) as (store, devices):
        store._loader.health._clock = clock
        yield store, devices, clock


def recover(store: PrefixStore) -> None:
    """Look at the statistics, which looks after the probes, until all devices are well."""
    poll(lambda: store.stats().unwell == (), "the devices are well again")


def test_failing_reads_end_after_some_and_the_pages_are_kept(fast_path: Path) -> None:
    with opened(fast_path / "s") as (store, devices, clock):
        pages = client(store)
        assert all(pages.save(run("a", 64)))
        devices.arm(Fault("error", "read", count=FOREVER))
        assert not any(pages.load(run("a", 64)))
        assert store.stats().unwell == (f"{devices.devices[0].path}: reads",)
        before = devices.operations
        for _ in range(5):
            assert pages.match(run("a", 64)) == 0 and not any(pages.contains(run("a", 64)))
            assert not any(pages.load(run("a", 64)))
        assert devices.operations == before, "a device that is left alone was asked"
        assert all(pages.save(run("b", 4), seed=0)), "writes are not concerned"
        devices.disarm()
        clock.now_s += PROBE_FIRST_S
        recover(store)
        assert store.stats().unwell == () and devices.operations > before
        assert all(pages.load(run("a", 64))), "a page was dropped for its device's sake"
        counters = store.stats().counters
        assert (counters["devices_unwell"], counters["devices_recovered"]) == (1, 1)
        check_space(store)


def test_a_few_bad_pages_are_not_a_bad_device(fast_path: Path) -> None:
    with opened(fast_path / "s") as (store, devices, _):
        pages = client(store)
        assert all(pages.save(run("a", 64)))
        devices.arm(*[Fault("error", "read", index=i) for i in range(0, 64, 2)])
        loaded = pages.load(run("a", 64))
        assert loaded == [False, True] * 32 and store.stats().unwell == ()
        settle(store)
        assert pages.contains(run("a", 64)) == loaded


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENODATA, errno.ENOMEM])
def test_failures_that_are_not_the_device_s_do_not_count(fast_path: Path, code: int) -> None:
    with opened(fast_path / "s") as (store, devices, _):
        pages = client(store)
        devices.arm(Fault("error", "write", count=64, errno=code))
        assert not any(pages.save(run("a", 64)))
        assert store.stats().unwell == () and -code in NOT_THE_DEVICE


def test_a_read_only_device_serves_loads_and_takes_no_saves(fast_path: Path) -> None:
    with opened(fast_path / "s") as (store, devices, clock):
        pages = client(store)
        assert all(pages.save(run("a", 8)))
        devices.arm(Fault("error", "write", count=FOREVER, errno=errno.EROFS))
        while not store.stats().unwell:
            assert not any(pages.save(run("b", ERRORS_MAX)))
        assert store.stats().unwell == (f"{devices.devices[0].path}: writes",)
        before = devices.operations
        assert not any(pages.save(run("b", 40))) and devices.operations == before
        assert store.stats().counters["pages_refused_unwell"] == 40
        assert all(pages.load(run("a", 8)))
        devices.disarm()
        clock.now_s += PROBE_FIRST_S
        for i in range(1000):
            if pages.save(run(i, 1))[0]:  # a refused save looks after the probe too
                break
            time.sleep(0.001)
        assert all(pages.save(run("b", 8))) and store.stats().unwell == ()
        check_space(store)


def test_flushes_that_fail_count_as_writes(fast_path: Path) -> None:
    with opened(fast_path / "s") as (store, devices, _):
        pages = client(store)
        devices.arm(Fault("error", "flush", count=FOREVER))
        for i in range(ERRORS_MAX + 1):
            assert not any(pages.save(run(i, 1)))
        # A write that ends well in between does not help: it is not durable.
        assert store.stats().unwell == (f"{devices.devices[0].path}: writes",)


def test_a_stalled_load_makes_the_device_unwell_and_is_collected_later(fast_path: Path) -> None:
    with opened(fast_path / "s", io_timeout_s=0.05) as (store, devices, clock):
        pages = client(store)
        assert all(pages.save(run("a", 4)))
        devices.arm(Fault("slow", "batch"))
        memory = bytearray(4 * PAGE)
        ticket = pages.pages.load(run("a", 4), memory)
        for _ in range(4):  # late, seen not to move, and seen again
            with pytest.raises(BusyError):
                ticket.wait()
            clock.now_s += 0.1
        path = devices.devices[0].path
        assert store.stats().unwell == (f"{path}: reads", f"{path}: writes")
        assert pages.match(run("a", 4)) == 0 and not any(pages.save(run("b", 2)))
        devices.release()
        assert ticket.wait(20).all(), "what was under way still ends"
        assert store.stats().unwell, "only a probe says that it is well"
        clock.now_s += PROBE_FIRST_S
        recover(store)
        assert store.stats().unwell == () and all(pages.load(run("a", 4)))
        assert all(pages.save(run("b", 2)))


def test_a_long_queue_is_not_a_stall(fast_path: Path) -> None:
    """One load is late for ever, but the device does other work meanwhile."""
    with opened(fast_path / "s", io_timeout_s=0.01) as (store, devices, clock):
        pages = client(store)
        assert all(pages.save(run("a", 4)))
        devices.arm(Fault("slow", "batch"))
        ticket = pages.pages.load(run("a", 4), bytearray(4 * PAGE))
        for _ in range(4):
            with pytest.raises(BusyError):
                ticket.wait()
            clock.now_s += 10
            assert all(pages.load(run("a", 1)))
        assert store.stats().unwell == ()
        devices.release()
        assert ticket.wait(20).all()


def test_a_stalled_part_makes_the_device_unwell(fast_path: Path) -> None:
    with opened(fast_path / "s", io_timeout_s=0.02) as (store, devices, clock):
        parts = client(store, model="p", page_bytes=5000, parts=(4000, 1000))
        assert all(parts.save(run("a", 2)))
        load = parts.pages.load_parts(run("a", 2), bytearray(10_000))
        devices.arm(Fault("slow", "batch"))
        reading = load.start(0)
        for _ in range(4):
            with pytest.raises(BusyError):
                load.finish(reading, 0.05)
            clock.now_s += 0.1
        assert len(store.stats().unwell) == 2 and parts.match(run("a", 2)) == 0
        devices.release()
        assert load.finish(reading, 20).all()
        load.end()


def test_a_stalled_write_does_not_stop_the_store(fast_path: Path) -> None:
    with opened(fast_path / "s", io_timeout_s=0.05) as (store, devices, clock):
        pages = client(store)
        devices.arm(Fault("slow", "batch", count=2))
        for name in ("a", "c"):
            assert not any(finish(pages.pages.save(run(name, 2), bytes(2 * PAGE))))
            clock.now_s += 0.1
        assert len(store.stats().unwell) == 2
        assert not any(pages.save(run("b", 2)))
        devices.release()
        clock.now_s += PROBE_FIRST_S
        recover(store)
        assert all(pages.save(run("b", 2))) and all(pages.load(run("b", 2)))
        check_space(store)


def test_one_bad_device_of_two_leaves_the_other_s_pages(fast_path: Path) -> None:
    places = [fast_path / "a", fast_path / "b"]
    with opened(fast_path / "s", pools=places) as (store, devices, clock):
        pages = client(store)
        assert all(pages.save(run("a", 64)))
        devices.arm(Fault("error", "read", device=1, count=FOREVER))
        first = pages.load(run("a", 64))
        assert 0 < sum(first) < 64 and store.stats().unwell == (
            f"{devices.devices[1].path}: reads",
        )
        before = devices.operations
        assert pages.load(run("a", 64)) == first == pages.contains(run("a", 64))
        assert devices.operations - before == sum(first), "the bad device was asked again"
        devices.disarm()
        clock.now_s += PROBE_FIRST_S
        recover(store)
        assert all(pages.load(run("a", 64)))


def test_probes_come_less_and_less_often_while_they_fail(fast_path: Path) -> None:
    with opened(fast_path / "s") as (store, devices, clock):
        pages = client(store)
        assert all(pages.save(run("a", 32)))
        devices.arm(Fault("error", "read", count=FOREVER))
        assert not any(pages.load(run("a", 32)))
        times = []
        start_s = clock.now_s
        while clock.now_s < start_s + 1000:
            probes = store.stats().counters.get("device_probes", 0)
            if len(times) < probes:
                times.append(clock.now_s - start_s)
            clock.now_s += 0.5
        gaps = np.diff(times)
        assert times[0] <= PROBE_FIRST_S + 1 and (np.diff(gaps[:-1]) >= -1).all()
        assert max(gaps) <= PROBE_LAST_S + 2 and len(times) < 30
        devices.disarm()
        clock.now_s += PROBE_LAST_S
        recover(store)
        assert store.stats().unwell == ()


def test_a_relapse_is_probed_later_than_the_first_illness(fast_path: Path) -> None:
    with opened(fast_path / "s") as (store, _, clock):
        health = store._loader.health
        status = np.full(ERRORS_MAX, -errno.EIO, dtype=np.int32)
        device = np.zeros(ERRORS_MAX, dtype=np.uint32)
        pauses = []
        for _ in range(4):
            health.note(Op.READ, device, status)
            state = health._states[Op.READ, 0]
            pauses.append(state.pause_s)
            clock.now_s += state.pause_s
            for _ in range(2):
                health.tick()
            assert health.all_well
        assert pauses == [1, 2, 4, 8]
        clock.now_s += 1000
        health.note(Op.READ, device, status)
        assert health._states[Op.READ, 0].pause_s == PROBE_FIRST_S


def test_the_write_probe_changes_nothing_that_matters(fast_path: Path) -> None:
    with opened(fast_path / "s") as (store, devices, clock):
        pages = client(store)
        assert all(pages.save(run("a", 8)))
        for _ in range(2):
            store._loader.health.note_late([0])
            clock.now_s += store.config.io_timeout_s
        clock.now_s += PROBE_FIRST_S
        recover(store)
        assert store.stats().unwell == ()
        config, devices = store.config, devices
    again = devices.reopen(seed=1)
    with PrefixStore.open(config, transport_object=again) as store:
        assert all(client(store, pages.oracle).load(run("a", 8)))


def test_health_asks_nothing_of_well_devices() -> None:
    class Untouchable:
        devices = (Device("nowhere", 1),)

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was called")

    health = Health(Untouchable(), lambda name, amount: None, 30.0)  # type: ignore[arg-type]
    health.tick()
    health.note(Op.READ, np.zeros(3, dtype=np.uint32), np.zeros(3, dtype=np.int32))
    assert health.all_well and health.unwell() == ()


def test_a_catalog_that_cannot_be_read_gives_misses_and_raises_nothing(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(fast_path / "s") as (store, _, _):
        pages = client(store)
        assert all(pages.save(run("a", 4)))

        def refuse(*arguments: object) -> None:
            raise device_error("read", errno.EIO)

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "lookup", refuse)
            patch.setattr(Catalog, "record_count", refuse)
            assert pages.match(run("b", 4)) == 0 and not any(pages.contains(run("b", 4)))
            assert all(pages.load(run("a", 4))) and not any(pages.load(run("b", 4)))
            assert store.stats().pages == 0, "the last figure that is known"
        assert store.stats().pages == 4 and store.stats().counters["catalog_errors"] > 0


def test_one_pool_that_takes_no_writes_leaves_saving_to_the_other(fast_path: Path) -> None:
    """Fault: one read-only device of several, and nothing is saved any more."""
    places = [fast_path / "a", fast_path / "b"]
    with opened(fast_path / "s", pools=places) as (store, devices, clock):
        pages = client(store)
        devices.arm(Fault("error", "write", device=1, count=FOREVER, errno=errno.EROFS))
        i = 0
        while not store.stats().unwell:
            assert any(pages.save(run(i, ERRORS_MAX))) and i < 10
            i += 1
        assert store.stats().unwell == (f"{devices.devices[1].path}: writes",)
        before = devices.injected["error", "write"]
        for i in range(30):  # more than fits into one pool
            assert all(pages.save(run(("more", i), 8))) and all(pages.load(run(("more", i), 8)))
        assert devices.injected["error", "write"] == before
        assert "pages_refused_unwell" not in store.stats().counters
        devices.disarm()
        clock.now_s += PROBE_LAST_S
        recover(store)
        assert all(pages.save(run("b", 16)))
        assert devices.injected["error", "write"] == before
        check_space(store)


def test_commits_that_are_refused_and_a_bound_that_rises_again() -> None:
    clock = Clock()
    state = commits.Commits(1600, clock)
    state.begin()
    assert state.unwell(30.0) == ""
    clock.now_s += 31
    assert "31 s" in state.unwell(30.0)
    pauses = []
    for _ in range(8):
        state.end("Read-only file system")
        assert state.refused and not state.due and state.unwell(30.0) == "Read-only file system"
        pauses.append(state._next_s - clock.now_s)
        clock.now_s += pauses[-1]
        assert state.due
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    state.end(None)
    assert state.refused, "a commit that was given up says nothing"
    state.end("")
    assert not state.refused and state.unwell(30.0) == ""
    state.note_full(800)
    assert state.records_max == 750
    state.note_full(320)
    assert state.records_max == 750, "it was lowered just now"
    clock.now_s += commits.ROOM_PAUSE_S
    assert state.records_max == 850
    state.note_full(320)
    assert state.records_max == 850
    clock.now_s += commits.ROOM_PAUSE_S
    state.note_full(320)
    assert state.records_max == 300
    clock.now_s += 3.5 * commits.ROOM_PAUSE_S
    assert state.records_max == 600
    clock.now_s += 100 * commits.ROOM_PAUSE_S
    assert state.records_max == 1600
