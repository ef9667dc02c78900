"""Each way in which a device lies or fails, once: the page is a miss, its neighbours are not.

Also files that change behind the store's back.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    MIB,
    PAGE,
    Client,
    check_space,
    client,
    loose,
    memory_devices,
    open_faulty,
    open_small,
    poll,
    run,
    settle,
    small_config,
)

from tutti_core import PageFragments, PrefixStore, StoreStats
from tutti_core.errors import device_error
from tutti_core.index.catalog import Catalog
from tutti_core.testing import FOREVER, Fault, FaultyDevices, page_bytes

BAD = 2
"""Position in the chain of the page that goes wrong."""


def expect_one_miss(pages: Client, store: PrefixStore, counter: str) -> None:
    """Page BAD misses, is forgotten at once and for good; the others stay; it can be saved anew."""
    keys = run("a", 5)
    expected = [i != BAD for i in range(5)]
    before = store.stats().counters.get(counter, 0)
    assert pages.match(keys) == 5
    assert pages.load(keys) == expected
    assert pages.match(keys) == BAD and pages.contains(keys) == expected
    assert store.stats().counters[counter] == before + 1
    settle(store)
    assert store.stats().pages == 4 and pages.match(keys) == BAD
    assert pages.load(keys) == expected and store.stats().counters[counter] == before + 1
    check_space(store)
    assert all(pages.save(keys)) and all(pages.load(keys))
    check_space(store)


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (Fault("error", "read", index=BAD), "read_errors"),
        (Fault("error", "read", index=BAD, errno=errno.ENODATA), "read_errors"),
        (Fault("flip", "read", index=BAD), "checksum_errors"),
        (Fault("misdirected", "read", index=BAD), "checksum_errors"),
        (Fault("stale", "read", index=BAD), "checksum_errors"),
    ],
    ids=["error", "end of data", "flip", "misdirected", "stale"],
)
@pytest.mark.parametrize("rooted", [True, False])
def test_a_read_that_goes_wrong_is_a_miss(store_dir, fault, counter, rooted: bool) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 5)))
        devices.arm(fault)
        if not rooted:
            assert pages.load(loose(run("a", 5)))[BAD] is False
            assert pages.match(run("a", 5)) == BAD, "the tree still offers it"
            assert pages.contains(loose(run("a", 5)))[BAD] is False
        else:
            expect_one_miss(pages, store, counter)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("lost", "write", index=BAD),
        Fault("torn", "write", index=BAD, errno=0, keep_bytes=100),
        Fault("flip", "write", index=BAD),
        Fault("misdirected", "write", index=BAD, target_bytes=MIB + 15 * PAGE),
    ],
    ids=lambda f: f.kind,
)
def test_a_write_that_went_wrong_in_silence_is_a_miss(store_dir: Path, fault: Fault) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        devices.arm(fault)
        assert all(pages.save(run("a", 5)))
        assert devices.injected
        expect_one_miss(pages, store, "checksum_errors")


def test_a_write_that_hits_another_page_costs_both(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("first", 1)))
        devices.arm(Fault("misdirected", "write", target_bytes=MIB))  # the place of the first page
        assert all(pages.save(run("second", 1)))
        assert pages.load(run("first", 1)) == [False] and pages.load(run("second", 1)) == [False]
        assert pages.match(run("first", 1)) == 0 and pages.match(run("second", 1)) == 0
        check_space(store)


@pytest.mark.parametrize("bit", [0, 7, 8 * 100 + 3, 8 * PAGE - 1])
def test_a_flipped_bit_on_the_medium_is_a_miss_after_a_restart_too(store_dir, bit: int) -> None:
    config = small_config(store_dir)
    devices = memory_devices(config)
    with PrefixStore.open(config, transport_object=devices) as store:
        assert all(client(store).save(run("a", 5)))
    devices.flip_bit(0, MIB + BAD * PAGE + bit // 8, bit % 8)
    with PrefixStore.open(config, transport_object=devices.reopen()) as store:
        assert store.wait_restored(20)
        expect_one_miss(client(store), store, "checksum_errors")


def test_damage_behind_the_end_of_a_short_page_does_not_matter(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store, page_bytes=1000)
        assert all(pages.save(run("a", 1)))
        devices.flip_bit(0, MIB + 1000)
        assert all(pages.load(run("a", 1)))
        devices.flip_bit(0, MIB + 999)
        assert pages.load(run("a", 1)) == [False]


def test_the_last_request_s_bytes_are_never_passed_off_as_a_page(store_dir: Path) -> None:
    """Bug 20: the buffer holds page A; the read of B fails."""
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        first, second = run("A", 1), run("B", 1)
        assert all(pages.save(first)) and all(pages.save(second))
        for fault in (Fault("error", "read"), Fault("flip", "read")):
            memory = bytearray(PAGE)
            assert pages.pages.load(first, memory).wait(20).all()
            assert memory == page_bytes(0, first[0], PAGE)
            devices.arm(fault)
            assert not pages.pages.load(second, memory).wait(20).any()
            assert all(pages.save(second))


def test_a_passing_trouble_does_not_cost_the_page(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 3)))
        for code in (errno.EAGAIN, errno.ENOMEM, errno.EINTR):
            devices.arm(Fault("error", "read", errno=code, count=3))
            assert not any(pages.load(run("a", 3)))
            assert pages.match(run("a", 3)) == 3 and all(pages.load(run("a", 3)))


def test_memory_that_is_not_there_does_not_cost_the_page(store_dir: Path) -> None:
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("a", 3)))
        nowhere = PageFragments(np.zeros((3, 1), np.uint64), np.array([PAGE], np.uint64))
        assert not pages.pages.load(run("a", 3), nowhere).wait(20).any()
        settle(store)
        assert pages.match(run("a", 3)) == 3 and all(pages.load(run("a", 3)))


def test_a_page_that_the_catalog_cannot_confirm_is_a_miss(store_dir: Path, monkeypatch) -> None:
    config = small_config(store_dir)
    devices = memory_devices(config)
    with (
        PrefixStore.open(config, transport_object=devices) as owner,
        PrefixStore.open(config, transport_object=FaultyDevices(devices.media)) as store,
    ):
        assert all(client(owner).save(run("a", 2)))
        pages = client(store)
        ticket = pages.pages.load(run("a", 2), bytearray(2 * PAGE))

        def refuse(self: Catalog, *arguments: object) -> None:
            raise device_error("read", errno.EIO)

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "lookup", refuse)
            assert not ticket.wait(20).any()
        assert all(pages.load(run("a", 2)))


def test_a_device_that_is_gone_misses_everything_and_raises_nothing(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 8)))
        devices.arm(Fault("error", "read", count=FOREVER), Fault("error", "write", count=FOREVER))
        for _ in range(3):
            assert not any(pages.load(run("a", 8)))
            assert not any(pages.save(run("b", 8)))
        assert pages.match(run("a", 8)) == 0 and store.stats().pages <= 8
        assert not any(pages.contains(run("a", 8)))
        check_space(store)
        assert store.stats().used_bytes == 8 * PAGE, "the device may come back, with its pages"
        assert store.stats().counters.get("internal_errors", 0) == 0


def test_one_bad_device_of_two_costs_only_its_pages(fast_path: Path) -> None:
    places = [fast_path / "a", fast_path / "b"]
    with open_faulty(fast_path / "s", pools=places) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 8)))
        devices.arm(Fault("error", "read", device=1, count=FOREVER))
        assert pages.load(run("a", 8)) == [True, False] * 4
        assert pages.contains(run("a", 8)) == [True, False] * 4
        check_space(store)


def test_a_load_that_stalls_has_a_bound_and_is_collected_later(store_dir: Path) -> None:
    from tutti_core import BusyError

    with open_faulty(store_dir, io_timeout_s=0.05) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 2)))
        devices.arm(Fault("slow", "batch"))
        ticket = pages.pages.load(run("a", 2), bytearray(2 * PAGE))
        with pytest.raises(BusyError):
            ticket.wait()
        devices.release()
        assert ticket.wait(20).all()


def test_too_many_loads_in_flight_are_misses_and_cost_no_page(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 1)))
        devices.arm(Fault("busy", "batch", count=2))
        assert pages.load(run("a", 1)) == [False]
        assert store.stats().counters["loads_refused_busy"] == 1
        assert pages.match(run("a", 1)) == 1 and all(pages.load(run("a", 1)))
        check_space(store)


@pytest.mark.parametrize("faults", range(4))
def test_a_storm_of_faults_never_gives_wrong_bytes(store_dir: Path, rng, faults: int) -> None:
    from tutti_core.testing import FaultPlan

    rates = {
        ("error", "read"): 0.05,
        ("flip", "read"): 0.05,
        ("misdirected", "read"): 0.03,
        ("stale", "read"): 0.03,
        ("error", "write"): 0.05,
        ("torn", "write"): 0.05,
        ("lost", "write"): 0.03,
        ("flip", "write"): 0.03,
        ("misdirected", "write"): 0.03,
        ("error", "flush"): 0.05,
        ("lost", "flush"): 0.05,
        ("slow", "batch"): 0.1,
        ("busy", "batch"): 0.05,
    }
    config = small_config(store_dir)
    devices = memory_devices(
        config, seed=rng.randrange(1 << 30), plan=FaultPlan(rates=rates, reorder=True)
    )
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = client(store)
        for _ in range(150):
            keys = run(rng.randrange(6), rng.randrange(1, 9))
            if rng.random() < 0.5:
                pages.save(keys)
            else:
                pages.load(keys)
        assert pages.oracle.hits > 20 and pages.oracle.misses > 20
        assert store.stats().counters.get("internal_errors", 0) == 0
        settle(store)
        poll(lambda: not store._saver._stuck or not store._saver._collect_stuck(), "no stuck write")
        check_space(store)


class TestFilesBehindTheStore:
    @pytest.fixture
    def made(self, store_dir: Path) -> Path:
        with open_small(store_dir) as store:
            assert all(client(store).save(run("a", 8)))
        return store_dir

    @pytest.mark.parametrize("live", [True, False])
    @pytest.mark.parametrize("length", [MIB + 3 * PAGE, MIB + 3 * PAGE + 100, MIB, 4096])
    def test_a_pool_that_is_cut_short_gives_misses(self, made: Path, length, live: bool) -> None:
        """Bug 17: neither a wrong page nor an exception; the entries go, and a save repairs."""
        if not live:
            os.truncate(made / "pool.tutti", length)
        with open_small(made) as store:
            pages = client(store)
            if live:
                assert all(pages.load(run("a", 8)))
                os.truncate(made / "pool.tutti", length)
            good = max(0, (length - MIB) // PAGE)
            assert pages.load(run("a", 8)) == [True] * good + [False] * (8 - good)
            assert pages.match(run("a", 8)) == good
            settle(store)
            assert store.stats().pages == good
            assert all(pages.save(run("a", 8))) and all(pages.load(run("a", 8)))
            check_space(store)

    def test_a_pool_file_deleted_while_open_stays_readable(self, made: Path) -> None:
        with open_small(made) as store:
            pages = client(store)
            (made / "pool.tutti").unlink()
            assert all(pages.load(run("a", 8)))

    def test_every_single_flipped_byte_of_a_page_is_noticed(self, made: Path, rng) -> None:
        file = made / "pool.tutti"
        for _ in range(20):
            at = MIB + rng.randrange(8 * PAGE)
            with file.open("r+b") as stream:
                stream.seek(at)
                old = stream.read(1)[0]
                stream.seek(at)
                stream.write(bytes([old ^ 1 << rng.randrange(8)]))
            with open_small(made) as store:
                pages = client(store)
                bad = (at - MIB) // PAGE
                assert pages.load(run("a", 8)) == [i != bad for i in range(8)]
                assert all(pages.save(run("a", 8)))


def test_statistics_are_plain_values(store_dir: Path) -> None:
    with open_small(store_dir) as store:
        stats = store.stats()
        assert isinstance(stats, StoreStats) and isinstance(stats.counters, dict)
        assert not any(isinstance(v, np.generic) for v in stats.counters.values())
