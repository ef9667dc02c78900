"""A whole store with memory tiers: what each policy promises, and that loads go first."""

from __future__ import annotations

import errno
import shutil
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_kit import PAGE, chain, client, finish, loose, memory_devices, poll, run
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
    unsaved_keys,
)

from tutti_core import ConfigError, PageFragments, PrefixStore, StoreConfig, UnsupportedError
from tutti_core.io.transport import Batch, BatchResult
from tutti_core.testing import FOREVER, Fault, FaultyDevices
from tutti_core.tiers import mover
from tutti_core.tiers.arena import HostArena
from tutti_core.tiers.copier import Copy

PAGES = DRAM // PAGE
MEMORY_POLICIES = ("write_back", "write_selective")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "FAILURE_PAUSE_S", 0.01)


# ---- configuration ----
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"write_policy": "write_back"}, "write_policy"),
        ({"write_policy": "write_selective"}, "write_policy"),
        ({"dram_mode": "exclusive"}, "dram_mode"),
        ({"write_policy": "write_around"}, "write_policy"),
        ({"dram": 4096}, "dram"),
        ({"dram": -1}, "dram"),
        ({"hbm": 100}, "hbm"),
    ],
)
def test_impossible_settings_are_named(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StoreConfig.parse({"path": tmp_path, "capacity": "1GiB", **settings})


def test_hbm_without_a_gpu_is_refused_before_anything_is_touched(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"hbm = .* needs a GPU"):
        PrefixStore.open(store_dir, capacity="1GiB", hbm="1GiB")
    assert not store_dir.exists()


def test_a_tier_smaller_than_its_pages_is_refused_when_they_are_named(store_dir: Path) -> None:
    with tiered(store_dir, dram=8 * PAGE) as (store, _):
        store.namespace(model="small", page_bytes=PAGE, page_tokens=1)
        with pytest.raises(ConfigError, match=r"dram = .* too small for pages of 4097"):
            store.namespace(model="large", page_bytes=PAGE + 1, page_tokens=1)


def test_a_store_without_tiers_has_none(store_dir: Path, resources) -> None:
    with tiered(store_dir, dram=0) as (store, _):
        names = {thread.name for thread in threading.enumerate()}
        assert not names & {"tutti-mover", "tutti-copier"}
        assert [tier.name for tier in store.stats().tiers] == ["nvme"]
        assert store.flush()


# ---- write_through ----
def test_write_through_puts_pages_into_both(store_dir: Path) -> None:
    with tiered(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 8))) and devices.stats().write_items == 8
        assert len(in_memory(store, pages.name)) == len(on_devices(store, pages.name)) == 8
        assert all(pages.load(run("a", 8))) and devices.stats().read_items == 0
        stats = {tier.name: tier for tier in store.stats().tiers}
        assert stats["dram"].hits == 8 and stats["nvme"].hits == 0 and stats["dram"].pages == 8
        assert stats["dram"].used_bytes == 8 * PAGE and stats["dram"].capacity_bytes == DRAM
        check_tiers(store)


@pytest.mark.parametrize("failing", [("error", "write"), ("error", "flush")])
def test_what_is_not_written_through_is_not_offered(store_dir: Path, failing: Any) -> None:
    with tiered(store_dir) as (store, devices):
        pages = client(store)
        devices.arm(Fault(*failing, count=8))
        assert not any(pages.save(run("a", 8))) and not any(pages.contains(run("a", 8)))
        check_tiers(store)
        assert dram(store).used_bytes == 0


def test_a_cancelled_save_is_in_no_tier(store_dir: Path) -> None:
    with tiered(store_dir) as (store, devices):
        pages = client(store)
        with devices.held():
            ticket = pages.pages.save(run("a", 4), bytes(4 * PAGE))
            poll(lambda: dram(store).used_bytes == 4 * PAGE, "the copy is made")
            ticket.cancel()
        assert not ticket.wait(20).any() and pages.match(run("a", 4)) == 0
        check_tiers(store)


def test_a_load_mixes_tiers(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "PROMOTIONS_MAX", 0)
    with tiered(store_dir, segments=8) as (store, devices):
        pages = client(store)
        pages.save(run("a", 12))
        pages.save(run("b", 12))  # takes the end of the first chain out of DRAM
        in_dram = len(in_memory(store, pages.name).keys() & set(run("a", 12)))
        assert 0 < in_dram < 12
        assert pages.match(run("a", 12)) == 12 and all(pages.contains(run("a", 12)))
        assert all(pages.load(run("a", 12)))
        assert devices.stats().read_items == 12 - in_dram
        assert all(pages.load(loose(run("b", 12)), 3))


# ---- promotion ----
def cold(store: PrefixStore, devices: FaultyDevices, count: int = 8) -> Any:
    """A client whose chain "a" is on the devices only, as after a restart."""
    pages = client(store)
    assert all(pages.save(run("a", count)))
    dram(store).clear(store._manager._entries[pages.name])
    assert not in_memory(store, pages.name)
    return pages


def test_loaded_pages_are_promoted(store_dir: Path) -> None:
    with tiered(store_dir) as (store, devices):
        pages = cold(store, devices)
        assert all(pages.load(run("a", 8)))
        quiesce(store)
        reads = devices.stats().read_items
        assert reads == 16 and all(pages.load(run("a", 8)))
        assert devices.stats().read_items == reads
        assert store.stats().tiers[0].promoted == 8 and len(on_devices(store, pages.name)) == 8
        check_tiers(store)


@pytest.mark.parametrize("kind", ["flip", "error", "misdirected", "stale"])
def test_a_page_that_arrives_damaged_is_not_promoted(store_dir: Path, kind: Any) -> None:
    with tiered(store_dir) as (store, devices):
        pages = cold(store, devices)
        devices.arm(Fault(kind, "read", index=8, count=8))
        assert all(pages.load(run("a", 8)))
        quiesce(store)
        assert not in_memory(store, pages.name) and store.stats().counters["promotion_errors"] == 8
        assert all(pages.load(run("a", 8)))
        check_tiers(store)


def test_an_exclusive_page_moves(store_dir: Path) -> None:
    with tiered(store_dir, dram_mode="exclusive") as (store, _):
        pages = client(store)
        pages.save(run("a", 8))
        assert not in_memory(store, pages.name)
        assert all(pages.load(run("a", 8)))
        quiesce(store)
        assert len(in_memory(store, pages.name)) == 8 and not on_devices(store, pages.name)
        assert pages.match(run("a", 8)) == 8 and all(pages.load(run("a", 8)))
        check_tiers(store)
        assert store.flush(20) and len(on_devices(store, pages.name)) == 8
        assert not in_memory(store, pages.name) and all(pages.load(run("a", 8)))
        check_tiers(store)


# ---- write_back and write_selective ----
@pytest.mark.parametrize("policy", MEMORY_POLICIES)
def test_a_save_ends_in_memory(store_dir: Path, policy: str) -> None:
    with tiered(store_dir, write_policy=policy) as (store, devices):
        pages = client(store)
        with devices.held():
            assert all(pages.save(run("a", 8))) and pages.match(run("a", 8)) == 8
            assert all(pages.load(run("a", 8))) and devices.stats().write_items == 0


def test_closing_writes_what_is_unsaved(store_dir: Path) -> None:
    config = tiered_config(store_dir, write_policy="write_back")
    devices = memory_devices(config)
    with open_tiers(config, devices) as store:
        pages = client(store)
        pages.save(run("a", 8))
        assert unsaved_keys(store, pages.name) == set(run("a", 8))
    with open_tiers(config, devices.reopen()) as store:
        assert all(client(store, pages.oracle).load(run("a", 8)))


def test_flush_writes_what_is_unsaved_and_keeps_it(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back") as (store, devices):
        pages = client(store)
        pages.save(run("a", 8))
        assert store.flush(20) and devices.stats().write_items == 8
        assert len(in_memory(store, pages.name)) == 8 and not unsaved_keys(store, pages.name)
        check_tiers(store)
        devices.arm(Fault("error", "write", count=FOREVER))
        pages.save(run("b", 2))
        assert not store.flush(20) and all(pages.load(run("b", 2)))


def test_more_than_memory_takes_is_written_through(store_dir: Path) -> None:
    with tiered(store_dir, segments=8, write_policy="write_back") as (store, _):
        pages = client(store)
        assert all(pages.save(run("a", 40))) and all(pages.load(run("a", 40)))
        quiesce(store)
        assert len(on_devices(store, pages.name) | in_memory(store, pages.name).keys()) == 40
        check_tiers(store)


def test_memory_that_fills_is_written_ahead(store_dir: Path) -> None:
    with tiered(store_dir, segments=8, write_policy="write_back") as (store, devices):
        pages = client(store)
        for i in range(PAGES):
            assert all(pages.save(run(i, 1)))
        low = DRAM // mover.LOW_SHARE
        poll(lambda: dram(store).free_bytes >= low, "room is made ahead of need")
        assert devices.stats().write_items
        assert all(all(pages.load(run(i, 1))) for i in range(PAGES))
        check_tiers(store)


def test_what_cannot_be_written_stays_in_memory(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back") as (store, devices):
        pages = client(store)
        devices.arm(Fault("error", "write", count=FOREVER, errno=errno.EIO))
        assert all(pages.save(run("a", PAGES)))
        poll(lambda: store.stats().counters.get("demotion_errors", 0) > 0, "a write has failed")
        assert not any(pages.save(run("b", 4))), "neither memory nor devices took them"
        assert all(pages.load(run("a", PAGES)))


def test_selective_writes_at_the_second_use_only(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_selective") as (store, devices):
        pages = client(store)
        pages.save(run("used", 4))
        pages.save(run("unused", 4))
        quiesce(store)
        assert devices.stats().write_items == 0
        assert pages.match(run("used", 4)) == 4
        quiesce(store)
        assert on_devices(store, pages.name) == set(run("used", 4))
        assert store.flush(20) and on_devices(store, pages.name) == set(run("used", 4))
        for i in range(PAGES):
            pages.save(run(i, 1))
        quiesce(store)
        assert all(pages.contains(run("used", 4))) and not any(pages.contains(run("unused", 4)))
        check_tiers(store)


def test_a_cancelled_save_is_not_kept_in_memory(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back") as (store, _):
        pages = client(store)
        assert store._copier is not None
        gate = threading.Event()
        store._copier.enqueue(Copy(lambda: gate.wait(20) and None), 0)
        ticket = pages.pages.save(run("a", 4), bytes(4 * PAGE))
        ticket.cancel()
        gate.set()
        assert not ticket.wait(20).any() and pages.match(run("a", 4)) == 0
        check_tiers(store)


@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
@pytest.mark.parametrize("policy", ["write_through", *MEMORY_POLICIES])
def test_clear_empties_every_tier_and_what_is_on_its_way(
    store_dir: Path, policy: str, mode: str
) -> None:
    with tiered(store_dir, write_policy=policy, dram_mode=mode) as (store, _):
        pages, other = client(store), client(store, model="other")
        pages.save(run("a", 6))
        other.save(run("o", 3))
        pages.load(run("a", 6))
        store.flush(20)
        pages.load(run("a", 6))  # promoted, or about to be
        ticket = pages.pages.save(run("b", 3), bytes(3 * PAGE))
        pages.pages.clear()
        assert ticket.done()
        quiesce(store)
        assert not in_memory(store, pages.name) and not on_devices(store, pages.name)
        assert pages.match(run("a", 6)) == 0 and all(other.load(run("o", 3)))
        check_tiers(store)


def test_pins_hold_in_every_tier(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_selective") as (store, _):
        pages = client(store)
        pages.save(run("a", 4))
        assert pages.pages.pin(run("a", 4)) == 4
        for i in range(3 * PAGES):
            pages.save(run(i, 1))
        assert pages.match(run("a", 4)) == 4 and all(pages.load(run("a", 4)))
        pages.pages.unpin(run("a", 4), 4)
        check_tiers(store)


def test_an_ancestor_that_leaves_the_store_takes_its_descendants_along(store_dir: Path) -> None:
    """The devices evict a page; what memory holds below it goes too."""
    with tiered(store_dir, segments=2) as (store, _):
        pages = client(store)
        tier, entry = dram(store), store._manager._entries[pages.name]
        assert all(pages.save(chain(*"ab")))
        tier.clear(entry)
        assert all(pages.save(chain(*"abcd"), first=2))
        assert set(in_memory(store, pages.name)) == set(list(chain(*"abcd"))[2:])
        for i in range(5):
            pages.save(run(i, 4))
        quiesce(store)
        for key in chain(*"abcd"):
            assert key not in in_memory(store, pages.name) or key in on_devices(store, pages.name)
        check_tiers(store)


# ---- HBM ----
def test_three_tiers(store_dir: Path) -> None:
    with tiered(store_dir, hbm=8 * PAGE) as (store, devices):
        pages = client(store)
        pages.save(run("a", 6))
        assert all(pages.load(run("a", 6)))
        quiesce(store)
        held = in_memory(store, pages.name)
        assert all(held[key] == {"hbm", "dram"} for key in run("a", 6))
        assert all(pages.load(run("a", 6))) and devices.stats().read_items == 0
        names = [tier.name for tier in store.stats().tiers]
        assert names == ["hbm", "dram", "nvme"] and store.stats().tiers[0].hits == 6
        check_tiers(store)


def test_hbm_memory_that_transports_cannot_reach_is_staged(store_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(HostArena, "on_host", False)
    config = tiered_config(store_dir, hbm=8 * PAGE, dram=0)
    with open_tiers(config, memory_devices(config)) as store:
        pages = client(store)
        pages.save(run("a", 4))
        assert all(pages.load(run("a", 4)))
        quiesce(store)
        assert len(in_memory(store, pages.name)) == 4 and all(pages.load(run("a", 4)))
        (tier,) = store._tiers
        tier.must_save(store._manager._entries[pages.name], run("a", 4).data, np.arange(4))
        assert store.flush(20) and tier.unsaved_count == 0


# ---- loads first ----
class SlowDevice(FaultyDevices):
    """Runs its batches one after the other, in the order of `submit`, a while each."""

    BATCH_S = 0.03

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._queue: deque[tuple[int, bool]] = deque()
        self._results: dict[int, BatchResult] = {}
        self._work = threading.Condition()
        self._off = False
        self.ahead: list[int] = []
        """For each batch of a load: background batches that were not finished when it came."""
        self.background = 0
        self._device = threading.Thread(target=self._serve, daemon=True)
        self._device.start()

    def submit(self, batch: Batch) -> int:
        behind = threading.current_thread().name in ("tutti-mover", "tutti-saver")
        with self._work:
            ticket = super().submit(batch)
            if behind:
                self.background += 1
            else:
                self.ahead.append(sum(other for _, other in self._queue))
            self._queue.append((ticket, behind))
            self._work.notify_all()
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        with self._work:
            self._work.wait_for(lambda: ticket in self._results, timeout_s)
            return self._results.pop(ticket, None)

    def _serve(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._queue or self._off)
                if not self._queue:
                    return
                ticket = self._queue[0][0]
            time.sleep(self.BATCH_S)
            result = super().wait(ticket, 20)
            assert result is not None
            with self._work:
                self._queue.popleft()
                self._results[ticket] = result
                self._work.notify_all()

    def close(self) -> None:
        with self._work:
            self._off = True
            self._work.notify_all()
        self._device.join(20)
        super().close()


@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
def test_a_load_waits_for_one_background_batch_at_most(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("tutti_core.tiers.shelf.MOVE_PAGES_MAX", 4)
    config = tiered_config(store_dir, segments=12, write_policy="write_back", dram_mode=mode)
    plain = memory_devices(config)
    devices = SlowDevice(plain.media)
    with open_tiers(config, devices) as store:
        pages = client(store)
        for i in range(6):
            pages.save(run(i, 4))
        assert store.flush(60)
        devices.ahead.clear()
        devices.background = 0
        started_s, longest_s = time.monotonic(), 0.0
        for turn in range(12):
            pages.save(run(("new", turn), 4))  # makes evictions and demotions pending
            begun_s = time.monotonic()
            assert all(pages.load(run(turn % 6, 4)))  # makes promotions pending
            longest_s = max(longest_s, time.monotonic() - begun_s)
            time.sleep(0.01)
        assert time.monotonic() - started_s < 60
        quiesce(store)
        assert devices.ahead and devices.background > 5, "nothing moved behind the loads"
        assert max(devices.ahead) <= 1, f"batches ahead of loads: {devices.ahead}"
        check_tiers(store)


def test_the_measure_above_sees_batches_that_are_ahead(store_dir: Path) -> None:
    """Negative control: saves, which do not wait for loads, are seen ahead of one."""
    config = tiered_config(store_dir, segments=12)
    devices = SlowDevice(memory_devices(config).media)
    with open_tiers(config, devices) as store:
        pages = client(store)
        pages.save(run(0, 4))
        dram(store).clear(store._manager._entries[pages.name])
        tickets = [pages.pages.save(run(("more", i), 4), bytes(4 * PAGE)) for i in range(4)]
        poll(lambda: devices.background > 3, "saves are being written")
        finish(pages.pages.load(run(0, 4), bytearray(4 * PAGE)))
        assert all(finish(ticket).all() for ticket in tickets)
        assert max(devices.ahead) > 1


# ---- ends ----
@pytest.mark.parametrize("policy", ["write_through", *MEMORY_POLICIES])
def test_closing_ends_every_thread(store_dir: Path, policy: str, resources) -> None:
    before = resources()
    for _ in range(3):
        with tiered(store_dir, write_policy=policy, hbm=8 * PAGE) as (store, _):
            client(store).save(run("a", 3))
            client(store).load(run("a", 3))
        shutil.rmtree(store_dir)
    assert resources() == before


def test_closing_is_bounded_when_the_device_hangs(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back", io_timeout_s=0.2) as (store, devices):
        pages = client(store)
        pages.save(run("a", 4))
        devices.hold()
        started_s = time.monotonic()
        store.close(0.5)
        assert time.monotonic() - started_s < 10
        devices.release()


def test_a_small_load_from_memory_is_there_at_once(store_dir: Path) -> None:
    with tiered(store_dir) as (store, _):
        pages = client(store)
        pages.save(run("a", 4))
        assert pages.pages.load(run("a", 4), bytearray(4 * PAGE)).done()


def test_fragments_of_a_page_are_gathered_and_scattered(store_dir: Path) -> None:
    with tiered(store_dir, write_policy="write_back") as (store, devices):
        pages = client(store)
        source, back = np.arange(2 * PAGE, dtype=np.uint16).view(np.uint8), np.zeros(4 * PAGE, "u1")
        lengths = np.array([1000, 96, PAGE - 1096], dtype=np.uint64)

        def pieces(array: np.ndarray) -> PageFragments:
            base = array.ctypes.data
            rows = [[p * PAGE, p * PAGE + 1000, p * PAGE + 1096] for p in (2, 0, 3)]
            return PageFragments(np.array(rows, dtype=np.uint64) + np.uint64(base), lengths, array)

        assert pages.pages.save(run("a", 3), pieces(source)).wait(20).all()
        assert pages.pages.load(run("a", 3), pieces(back)).wait(20).all()
        kept = np.r_[0:PAGE, 2 * PAGE : 4 * PAGE]
        assert (back[kept] == source[kept]).all() and not back[PAGE : 2 * PAGE].any()
        assert devices.stats().read_items == 0
