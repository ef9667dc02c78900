"""tiers/mover.py: who waits for whom, what is bounded, and what happens to what fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from store_kit import PAGE, client, finish, memory_devices, open_small, poll, run
from tier_kit import (
    DRAM,
    check_tiers,
    dram,
    in_memory,
    on_devices,
    open_tiers,
    quiesce,
    tiered,
    tiered_config,
)

from tutti_core import PrefixStore
from tutti_core.testing import FOREVER, Fault
from tutti_core.tiers import mover
from tutti_core.tiers import mover as mover_module
from tutti_core.tiers.mover import LoadGate, Mover
from tutti_core.tiers.shelf import MOVE_PAGES_MAX

PAGES = DRAM // PAGE


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "FAILURE_PAUSE_S", 0.01)


def forget_memory(store: PrefixStore, name: bytes) -> None:
    """As after a restart: pages are on the devices only."""
    dram(store).clear(store._manager._entries[name])


def test_the_gate_opens_when_the_last_load_has_ended() -> None:
    gate = LoadGate()
    assert gate.wait_idle(0)
    gate.begin()
    gate.begin()
    gate.end()
    assert not gate.wait_idle(0.01)
    threading.Timer(0.02, gate.end).start()
    assert gate.wait_idle(20)


def test_no_promotion_begins_while_a_load_is_in_flight(store_dir: Path) -> None:
    with tiered(store_dir, segments=8) as (store, devices):
        pages = client(store)
        pages.save(run("a", 4))
        pages.save(run("b", 4))
        forget_memory(store, pages.name)
        with devices.held():
            held = pages.pages.load(run("b", 4), bytearray(4 * PAGE))
            store._stack.loaded(pages.pages._entry, run("a", 4), np.arange(4), None)
            time.sleep(0.2)
            assert devices.stats().read_items == 0 and len(store._mover._promotions) == 1
            assert len(devices._flights) == 1
        finish(held)
        quiesce(store)
        assert len(in_memory(store, pages.name)) == 8


def test_loads_that_nobody_waits_for_do_not_hold_moves_up(store_dir: Path) -> None:
    with tiered(store_dir) as (store, _):
        pages = client(store)
        pages.save(run("a", 4))
        forget_memory(store, pages.name)
        pages.pages.load(run("a", 4), bytearray(4 * PAGE))
        poll(lambda: len(in_memory(store, pages.name)) == 4, "the load was collected and promoted")


def test_a_write_waits_for_loads_until_its_deadline(store_dir: Path) -> None:
    with tiered(store_dir, segments=8, write_policy="write_back") as (store, devices):
        pages = client(store)
        pages.save(run("a", 4))
        store.flush(20)
        forget_memory(store, pages.name)
        devices.arm(Fault("slow", "batch", polls=0))  # the load is held until `release`
        held = pages.pages.load(run("a", 4), bytearray(4 * PAGE))
        pages.save(run("b", 4))
        started_s = time.monotonic()
        assert store.flush(20), "the write waited for ever"
        assert time.monotonic() - started_s >= mover.WRITE_DEADLINE_S
        devices.release()
        finish(held)


def test_promotions_beyond_the_bound_are_forgotten(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "PROMOTIONS_MAX", 3)
    with tiered(store_dir, segments=12) as (store, devices):
        pages = client(store)
        for i in range(8):
            pages.save(run(i, 1))
        forget_memory(store, pages.name)
        with devices.held():
            held = pages.pages.load(run(0, 1), bytearray(PAGE))
            for i in range(1, 8):
                store._stack.loaded(pages.pages._entry, run(i, 1), np.arange(1), None)
            assert store.stats().counters["promotions_dropped"] == 4
        finish(held)
        quiesce(store)
        assert 3 <= len(in_memory(store, pages.name)) <= 4


def test_batches_are_bounded(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti_core.tiers.shelf.MOVE_PAGES_MAX", 3)
    with tiered(store_dir, write_policy="write_back", segments=8) as (store, devices):
        pages = client(store)
        sizes: list[int] = []
        submit = devices.submit

        def counted(batch):
            sizes.append(batch.item_count)
            return submit(batch)

        monkeypatch.setattr(devices, "submit", counted)
        pages.save(run("a", 10))
        assert store.flush(20) and sizes == [3, 3, 3, 1] and MOVE_PAGES_MAX >= 3
        forget_memory(store, pages.name)
        sizes.clear()
        pages.load(run("a", 10))
        quiesce(store)
        assert sizes == [10, 3, 3, 3, 1]


def test_a_write_that_fails_is_tried_again(store_dir: Path) -> None:
    with tiered(store_dir, segments=8, write_policy="write_back") as (store, devices):
        pages = client(store)
        devices.arm(Fault("error", "write", count=12))
        pages.save(run("a", PAGES))
        poll(lambda: store.stats().counters.get("demotion_errors", 0) >= 12, "writes failed")
        poll(lambda: len(on_devices(store, pages.name)) > 0, "a later write went well")
        assert all(pages.load(run("a", PAGES)))
        check_tiers(store, faults=True)


def test_a_read_that_hangs_keeps_its_slots_until_it_ends(store_dir: Path) -> None:
    with tiered(store_dir, io_timeout_s=0.1) as (store, devices):
        pages = client(store)
        pages.save(run("a", 4))
        forget_memory(store, pages.name)
        devices.arm(Fault("slow", "batch", index=1, polls=0))
        pages.load(run("a", 4))
        poll(lambda: store.stats().counters.get("reads_stuck", 0) == 1, "the promotion hangs")
        assert dram(store).used_bytes == 4 * PAGE and not in_memory(store, pages.name)
        devices.release()
        poll(lambda: dram(store).used_bytes == 0, "its slots came back")
        check_tiers(store)


def test_a_write_that_hangs_keeps_its_slots_until_it_ends(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back", io_timeout_s=0.1) as (store, devices):
        pages = client(store)
        pages.save(run("a", 4))
        devices.arm(Fault("slow", "batch", count=FOREVER, polls=0))
        assert not store.flush(5) and all(pages.load(run("a", 4)))
        pages.pages.clear()
        assert dram(store).used_bytes == 4 * PAGE and dram(store).page_count == 0
        devices.release()
        poll(lambda: not store._saver._stuck or not store._saver._collect_stuck(), "no stuck write")
        assert dram(store).used_bytes == 0
        check_tiers(store)


def test_a_full_saver_refuses_and_the_page_stays(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back", backlog=PAGE) as (store, _):
        pages = client(store)
        pages.save(run("a", 2))
        assert not store.flush(5), "two pages are more than the backlog takes"
        assert all(pages.load(run("a", 2)))


def test_a_broken_invariant_stops_the_moves_alone(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    with tiered(store_dir, segments=8, write_policy="write_back") as (store, _):
        pages = client(store)

        def broken(*_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(store._mover, "_write_down", broken)
        pages.save(run("a", 4))
        assert not store.flush(20)
        poll(lambda: store.stats().counters.get("internal_errors") == 1, "the mover has given up")
        assert all(pages.load(run("a", 4))) and pages.save(run("b", 2)) == [True, True]
        assert "moving pages stopped" in caplog.text


def test_arenas_are_registered_with_the_transport(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "REGISTER_STEP_BYTES", 5 * PAGE)
    config = tiered_config(store_dir)
    devices = memory_devices(config)
    known: list[tuple[int, int]] = []
    monkeypatch.setattr(devices, "register", lambda *region: known.append(region) or 1)
    with open_tiers(config, devices) as store:
        poll(lambda: sum(length for _, length in known) == DRAM, "all of it is registered")
        assert known[0][0] == dram(store).arena.address


def test_a_refused_registration_is_logged_and_costs_nothing_else(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiered_config(store_dir)
    devices = memory_devices(config)
    logged = threading.Event()

    def refuse(*_: int) -> int:
        raise OSError("no locked memory")

    class Log:
        def warning(self, text: str, *_: object) -> None:
            if text.startswith("the %s tier is not registered"):
                logged.set()

    monkeypatch.setattr(devices, "register", refuse)
    monkeypatch.setattr(mover_module, "logger", Log())
    with open_tiers(config, devices) as store:
        pages = client(store)
        assert all(pages.save(run("a", 4))) and all(pages.load(run("a", 4)))
        assert logged.wait(20)
        quiesce(store)


def test_stopping_abandons_what_waits(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back") as (store, devices):
        pages = client(store)
        pages.save(run("a", 4))
        devices.arm(Fault("error", "write", count=FOREVER))
        assert store._mover is not None and store._mover.stop(20)
        assert store._mover.room() == 0 and not store._mover.flush(1)
        tier = dram(store)
        write = tier.begin_write(
            store._manager._entries[pages.name], run("a", 4).data, True, np.arange(4)
        )
        assert write is not None
        store._mover.write(tier, write)  # answered at once
        assert not tier._writes and not tier._moving and tier.unsaved_count == 4


def test_no_promotion_follows_the_last_flush(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take pages off the drives that nothing writes back any more."""
    keys, original = run("a", 6), Mover._flush_all

    def flush_and_promote(mover: Mover) -> None:
        original(mover)
        while mover._promotions:
            mover._promote_batch()

    with open_small(store_dir) as store:
        assert all(client(store).save(keys))
    monkeypatch.setattr(Mover, "_flush_all", flush_and_promote)
    with open_small(store_dir, dram=64 << 10, dram_mode="exclusive") as store:
        store._loader._gate.begin()  # promotions wait for loads to end
        assert all(client(store).load(keys))
    with open_small(store_dir) as store:
        assert all(client(store).load(keys))
