"""Known bugs, D: full disks, capacity, and what goes first."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from store_kit import (
    MIB,
    PAGE,
    chain,
    check_space,
    client,
    disk_bytes,
    open_faulty,
    open_small,
    poll,
    run,
    settle,
)
from thread_kit import beside

from tutti_core import PrefixStore
from tutti_core.testing import FOREVER, Fault, explain, page_bytes
from tutti_core.tiers import segments


# ---- 33, 34: many pages ----
def test_bug_33_files_do_not_grow_in_number_with_the_pages(store_dir: Path) -> None:
    """Fault: a file a page; a directory of millions is full long before the disk."""
    with PrefixStore.open(
        store_dir, capacity="24MiB", segment="1MiB", transport="posix", durability="none"
    ) as store:
        pages = client(store)
        assert all(pages.save(run("first", 1)))
        before = sorted(store_dir.rglob("*"))
        for i in range(20):
            assert all(pages.save(run(i, 200)))
        assert store.stats().pages > 3000
        assert sorted(store_dir.rglob("*")) == before and len(before) < 10


def test_bug_33_a_look_up_costs_what_is_asked_and_not_what_is_stored(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: with each stored page look-ups and saves get slower; some list the whole directory."""
    with PrefixStore.open(
        store_dir, capacity="24MiB", segment="1MiB", transport="posix", durability="none"
    ) as store:
        pages = client(store).pages
        asked = [run(("none", i), 20) for i in range(30)]

        def cost_s() -> float:
            times = []
            for keys in asked:
                begun_s = time.perf_counter()
                assert pages.match(keys).pages == 0 and not pages.contains(keys).any()
                times.append(time.perf_counter() - begun_s)
            return min(times)

        assert pages.save(run("first", 1), bytes(PAGE)).wait(20).all()
        few_s = cost_s()
        for i in range(40):
            assert pages.save(run(i, 100), bytes(100 * PAGE)).wait(20).all()
        assert store.stats().pages > 3000

        def listed(*arguments: Any) -> Any:
            raise AssertionError("a directory was listed")

        for name in ("listdir", "scandir", "walk"):
            monkeypatch.setattr(os, name, listed)
        assert cost_s() < 3 * few_s + 3e-4, "with 4,000 times as many pages"


@pytest.mark.parametrize("preallocate", ["segment", "full"])
def test_bug_34_the_disk_never_holds_more_than_the_capacity(store_dir, rng, preallocate) -> None:
    """Fault: what is stored grows until the disk is full."""
    with PrefixStore.open(
        store_dir, capacity="12MiB", catalog="2MiB", transport="posix", preallocate=preallocate
    ) as store:
        a, b = client(store), client(store, model="b", page_bytes=7 * PAGE + 1)
        written = 0
        while written < 24 * MIB:
            pages = a if rng.random() < 0.5 else b
            count = rng.randrange(1, 40)
            pages.save(run((pages.size, written), count))
            written += count * pages.size
            assert disk_bytes(store_dir) <= 12 * MIB
            assert store.stats().used_bytes <= 12 * MIB
        check_space(store)


# ---- 36, 37: eviction ----
def test_bug_36_the_default_evicts_and_a_new_page_is_the_newest(store_dir: Path) -> None:
    """Fault: as delivered nothing is evicted and writes stop; or the newest page goes first."""
    with PrefixStore.open(store_dir, capacity="10MiB", transport="posix") as store:
        pages = client(store)
        for i in range(30):
            assert all(pages.save(run(("fill", i), 20)))
        for i in range(10):
            fresh, force = chain(("fresh", i)), run(("force", i), 20)
            assert all(pages.save(fresh)) and all(pages.save(force))
            assert pages.match(fresh) == 1 and all(pages.load(fresh))


def test_bug_36_holds_after_a_restart_too(store_dir: Path) -> None:
    """Fault: pages that were found at the start have no age, or all the same."""
    with open_small(store_dir) as store:
        for i in range(16):
            assert all(client(store).save(chain(i)))
        for i in range(16):
            client(store).match(chain(15 - i))  # recency of this process is not kept
    with open_small(store_dir) as store:
        assert store.wait_restored(20)
        pages = client(store)
        assert all(pages.save(chain("fresh"))) and all(pages.save(chain("force")))
        assert pages.match(chain("fresh")) == 1
        assert sum(pages.match(chain(i)) for i in range(16)) == 14


def test_bug_36_the_engine_can_go_on_saving(hicache: Any, store_dir: Path) -> None:
    """Fault: the same through the plugin, with no option set but path and capacity."""
    options = {"capacity": "12MiB", "durability": "flush"}
    with hicache.Rank(store_dir, extra=options) as rank:
        for i in range(40):
            keys = hicache.keys_of(12, str(i))
            assert rank.set(keys, range(12)) == [True] * 12
            assert rank.exists(keys) == 12 and rank.get(keys, range(12)) == [True] * 12
        assert rank.store.stats().counters["evicted_pages"] > 0


def test_bug_37_a_load_of_a_page_that_is_being_evicted(store_dir: Path) -> None:
    """Fault: the page goes while it is read; the reader gets an exception or another page."""
    keys, seen = run("k", 2), threading.Event()
    with open_small(store_dir) as store:
        pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=1)
        whole = b"".join(page_bytes(0, key, PAGE) for key in keys)

        def evict() -> None:
            for i in range(12):
                assert pages.save(keys, whole).wait(60).all()
                assert seen.wait(60)
                seen.clear()
                assert pages.save(run(i, 16), bytes(16 * PAGE)).wait(60).any()

        memory = bytearray(2 * PAGE)
        with beside(evict) as (thread,):
            while thread.running:
                for i, good in enumerate(pages.load(keys, memory).wait(60)):
                    page = memory[i * PAGE : (i + 1) * PAGE]
                    assert not good or page == page_bytes(0, keys[i], PAGE), explain(page)
                    if good:
                        seen.set()
        assert store.stats().counters["evicted_pages"] > 100
        check_space(store)


def test_bug_37_a_page_is_evicted_between_its_look_up_and_its_read(store_dir: Path) -> None:
    """Fault: the same to the byte: another page has the place before it is read."""
    keys = run("k", 4)
    with open_faulty(store_dir, segments=1, io_timeout_s=2.0) as (store, devices):  # 8 pages
        pages, memory = client(store), bytearray(4 * PAGE)
        assert all(pages.save(keys))
        devices.arm(Fault("slow", "batch"))
        load = pages.pages.load(keys, memory)  # has its places, and reads later
        others = pages.pages.save(run("other", 8), bytes(8 * PAGE))
        poll(lambda: store.stats().counters.get("evicted_pages", 0) > 0, "an eviction")
        time.sleep(0.05)
        devices.release()
        for i, good in enumerate(load.wait(20)):
            page = memory[i * PAGE : (i + 1) * PAGE]
            assert not good or page == page_bytes(0, keys[i], PAGE), explain(page)
        assert others.wait(20).any() and pages.match(keys) < 4


def test_bug_37_evicting_pages_whose_bytes_are_gone(store_dir: Path) -> None:
    """Fault: the file is gone already, and its eviction raises; or the page is evicted twice."""
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 16)))
        os.truncate(store_dir / "pool.tutti", MIB)
        assert pages.load(run("k", 4)) == [False] * 4  # some of them are dropped meanwhile
        for i in range(4):
            assert all(pages.save(run(i, 8))) and all(pages.load(run(i, 8)))
        settle(store)
        assert store.stats().counters.get("internal_errors", 0) == 0
        check_space(store)


# ---- 38: a disk that others fill ----
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_bug_38_a_capacity_above_the_free_space(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Fault: the store takes the whole disk, and everything else on the machine fails with it.

    Here the file system refuses the third segment: what there is by then is used on, and evicted.
    """
    given: list[int] = []
    real = os.posix_fallocate

    def two_segments(descriptor: int, offset: int, length: int) -> None:
        if len(given) == 2:
            raise OSError(code, os.strerror(code))
        real(descriptor, offset, length)
        given.append(offset)

    monkeypatch.setattr(segments, "_DISK_FULL_PAUSE_S", 0.0)
    with open_small(store_dir, segments=8) as store:
        pages = client(store)
        monkeypatch.setattr(os, "posix_fallocate", two_segments)
        for i in range(10):
            assert all(pages.save(run(i, 8))) and all(pages.load(run(i, 8)))
            assert store.stats().used_bytes <= 16 * PAGE
        counters = store.stats().counters
        assert counters["disk_full"] > 0 and counters["evicted_pages"] > 0
        assert counters.get("internal_errors", 0) == 0
        held = disk_bytes(store_dir)
        given.clear()  # whoever filled the disk made room
        for i in range(10, 14):
            assert all(pages.save(run(i, 8)))
        assert store.stats().used_bytes > 16 * PAGE and disk_bytes(store_dir) > held


def test_bug_38_a_full_disk_that_only_writes_notice(store_dir: Path) -> None:
    """Fault: the same where space that was set aside is not there after all (thin provisioning)."""
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("k", 4)))
        devices.arm(Fault("torn", "write", errno=errno.ENOSPC, count=FOREVER))
        for i in range(5):
            assert pages.save(run(i, 2)) == [False, False]
            assert store.stats().used_bytes == 4 * PAGE
        assert all(pages.load(run("k", 4)))
        check_space(store)


def test_bug_38_another_program_fills_the_disk(
    store_dir: Path, small_disk: Any, monkeypatch
) -> None:
    """Fault: the store and others together cross the mark at which the machine is in trouble."""
    monkeypatch.setattr(segments, "_DISK_FULL_PAUSE_S", 0.0)
    mark = 8 * MIB
    options = {"pools": [small_disk.folder / "pool"], "segment": MIB, "segments": 64}
    with open_small(store_dir, **options, keep_free=mark) as store:
        pages = client(store)
        for i in range(3):
            assert all(pages.save(run(i, 256)))
        small_disk.fill(mark + MIB + MIB // 2)
        for i in range(3, 9):  # room for one more segment above the mark
            assert all(pages.save(run(i, 256))) and all(pages.load(run(i, 256)))
            assert small_disk.free_bytes() >= mark
        assert store.stats().used_bytes == 4 * MIB, "what it has it keeps, and evicts from"
        counters = store.stats().counters
        assert counters["disk_full"] > 0 and counters["evicted_pages"] >= 5 * 256
        small_disk.clean()
        for i in range(9, 12):
            assert all(pages.save(run(i, 256)))
        assert store.stats().used_bytes == 7 * MIB and small_disk.free_bytes() >= mark


# ---- 39: restart ----
def test_bug_39_usage_after_a_restart_is_what_is_on_the_disk(store_dir: Path) -> None:
    """Fault: after a restart the store counts from zero and never begins to evict."""
    with open_small(store_dir) as store:
        assert all(client(store).save(run("old", 13)))
    with open_small(store_dir) as store:
        assert store.stats().pages == 13
        pages = client(store)
        for i in range(6):
            assert all(pages.save(chain(i)))
            assert store.stats().pages <= 16
        assert store.stats().used_bytes == 16 * PAGE
        assert pages.match(run("old", 13)) == 10
        assert disk_bytes(store_dir) <= store.config.capacity
        check_space(store)


def test_bug_39_the_first_save_after_a_restart_may_be_the_one_that_evicts(
    store_dir: Path,
) -> None:
    """Fault: the same where the store is full when it is opened."""
    for name in range(4):
        with open_small(store_dir) as store:
            pages = client(store)
            assert all(pages.save(run(name, 16))) and all(pages.load(run(name, 16)))
            assert store.stats().pages == 16 and store.stats().used_bytes == 16 * PAGE
            assert store.stats().counters.get("evicted_pages", 0) == (16 if name else 0)
            assert disk_bytes(store_dir) <= store.config.capacity
