"""Known bugs, C: calls that do not end, threads that die, and what a shutdown leaves behind."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_kit import (
    MIB,
    PAGE,
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
from thread_kit import beside, threads_left, tutti_threads

from tutti_core import NamespaceStore, PrefixStore, UnsupportedError
from tutti_core.io import select
from tutti_core.testing import Fault, FaultPlan

Resources = Callable[[], tuple[int, int]]

UNLUCKY = FaultPlan(
    rates={
        ("error", "read"): 0.1,
        ("flip", "read"): 0.05,
        ("error", "write"): 0.1,
        ("torn", "write"): 0.05,
        ("error", "flush"): 0.05,
        ("slow", "batch"): 0.1,
        ("busy", "batch"): 0.05,
    },
    reorder=True,
)


# ---- 25, 26, 27: failures ----
def test_bug_25_ranks_that_fail_apart_answer_alike(hicache: Any, store_dir: Path, rng) -> None:
    """Fault: storage fails on one rank, which raises or answers too little, and the others wait."""
    options = {"operation_timeout_s": 1.0, "io_timeout_s": 1.0}
    ranks = [
        hicache.Rank(store_dir / str(number), faulty=plan, extra=options)
        for number, plan in enumerate((FaultPlan(), UNLUCKY))
    ]
    chains = [hicache.keys_of(6, name) for name in "abc"]
    for step in range(30):
        keys, cut = rng.choice(chains), rng.randrange(1, 6)
        for rank in ranks:
            begun_s = time.monotonic()
            answers = [
                rank.set(keys[:cut], range(cut)),
                rank.set(keys[cut:], range(cut, 6), keys[:cut]),
                rank.get(keys, range(6)),
            ]
            assert [len(answer) for answer in answers] == [cut, 6 - cut, 6], step
            assert all(type(ok) is bool for answer in answers for ok in answer)
            assert 0 <= rank.exists(keys) <= 6
            assert time.monotonic() - begun_s < 10.0
    whole, unlucky = ranks
    assert whole.exists(chains[0]) == 6
    assert sum(unlucky.devices.injected.values()) > 10, "nothing went wrong"
    for rank in ranks:
        rank.storage.close()


@pytest.mark.parametrize("call", ["match", "contains", "save", "load"])
def test_bug_25_an_exception_is_no_answer(
    hicache: Any, store_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Fault: what goes wrong inside of the backend is raised into the engine's threads."""

    def broken(*arguments: object, **named: object) -> None:
        raise RuntimeError("planted")

    keys = hicache.keys_of(2)
    with hicache.Rank(store_dir) as rank:
        assert rank.set(keys, [0, 1]) == [True, True]
        with monkeypatch.context() as patch:
            patch.setattr(NamespaceStore, call, broken)
            said = {
                "match": rank.exists(keys),
                "save": rank.set(keys, [0, 1]),
                "load": rank.get(keys, [0, 1]),
                "contains": rank.exists_with(keys, "kv", "all_pages", 2).kv_hit_pages,
            }
            nothing: dict[str, Any] = {"match": 0, "contains": 0}
            assert said[call] == nothing.get(call, [False, False])
        assert rank.exists(keys) == 2 and rank.get(keys, [0, 1]) == [True, True]


@pytest.mark.parametrize("op", ["write", "flush", "batch"])
def test_bug_26_one_failure_does_not_end_the_saving(store_dir: Path, op: str) -> None:
    """Fault: the thread that saves ends with the first failure, and nothing is stored any more."""
    with open_faulty(store_dir, io_timeout_s=0.2) as (store, devices):
        pages = client(store)
        kind = "slow" if op == "batch" else "error"
        for i in range(5):
            devices.arm(Fault(kind, op, polls=1))  # type: ignore[arg-type]
            assert not any(pages.save(run(("bad", i), 1)))
            assert pages.match(run(("bad", i), 1)) == 0
            assert all(pages.save(run(("good", i), 1))) and all(pages.load(run(("good", i), 1)))
        assert store.stats().counters.get("internal_errors", 0) == 0


@pytest.mark.parametrize("error", [OSError(errno.EIO, "planted"), RuntimeError("planted")])
@pytest.mark.parametrize("number", [0, 1])
def test_bug_26_one_write_that_raises_costs_its_page(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, number: int
) -> None:
    """Fault: the n-th write raises; the thread ends, or the pages that were not written count."""
    real, calls = os.pwritev, []

    def fails_once(*arguments: Any) -> int:
        calls.append(arguments[2])
        if len(calls) == number + 1:
            raise error
        return real(*arguments)

    with open_small(store_dir) as store:
        pages = client(store)
        monkeypatch.setattr(os, "pwritev", fails_once)
        saved = pages.save(run("k", 2))
        assert saved == [i != number for i in range(2)] and pages.contains(run("k", 2)) == saved
        assert pages.save(run("k", 2)) == [True, True] == pages.load(run("k", 2))


def test_bug_26_one_exception_costs_the_engine_one_call(
    hicache: Any, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the same in the engine's backup thread, which calls the backend."""
    keys, honest, calls = hicache.keys_of(2), NamespaceStore.save, []

    def raises_once(self: NamespaceStore, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EIO, "planted")
        return honest(self, *arguments, **named)

    with hicache.Rank(store_dir) as rank:
        monkeypatch.setattr(NamespaceStore, "save", raises_once)
        assert rank.set(keys, [0, 1]) == [False, False] and rank.exists(keys) == 0
        assert rank.set(keys, [0, 1]) == [True, True] and rank.get(keys, [2, 3]) == [True, True]


def test_bug_26_one_exception_costs_one_offload(
    linker: Any, hicache: Any, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the same in the thread that saves on the direct route."""
    keys, honest, calls = hicache.keys_of(2), NamespaceStore.save, []

    def raises_once(self: NamespaceStore, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return honest(self, *arguments, **named)

    with linker(hicache.make_device_pools("mha"), store_dir) as rig:
        monkeypatch.setattr(NamespaceStore, "save", raises_once)
        assert not rig.offload(keys, [1, 2]) and rig.lookup(keys) == []
        assert rig.offload(keys, [1, 2]) and rig.lookup(keys) == [1, 2]


@pytest.mark.parametrize("rooted", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_bug_27_a_load_that_failed_is_not_offered_again(store_dir, rooted, restarted) -> None:
    """Fault: the look-up says hit, the load fails, and so on for ever."""
    config = small_config(store_dir)
    devices = memory_devices(config)
    store = PrefixStore.open(config, transport_object=devices)
    assert all(client(store).save(run("k", 3)))
    if restarted:
        store.close()
        devices = devices.reopen()
        store = PrefixStore.open(config, transport_object=devices)
    with store:
        pages = client(store)
        keys = run("k", 3) if rooted else loose(run("k", 3))
        assert pages.match(run("k", 3)) == 3
        devices.flip_bit(0, MIB)
        assert pages.load(keys) == [False, True, True]
        for _ in range(200):  # before, while and after its record is removed
            assert pages.match(run("k", 3)) == 0 and not pages.contains(run("k", 3))[0]
        settle(store)
        assert pages.match(run("k", 3)) == 0


def test_bug_27_pages_removed_behind_the_backend_are_reported_once(
    hicache: Any, store_dir: Path
) -> None:
    """Fault: the engine's scheduler asks again and again for a page that never comes."""
    keys = hicache.keys_of(2)
    with hicache.Rank(store_dir) as rank:
        assert rank.set(keys, [0, 1]) == [True, True]
        os.truncate(store_dir / "pool.tutti", 0)
        assert rank.exists(keys) == 2
        assert rank.get(keys, [2, 3]) == [False, False]
        assert rank.exists(keys) == 0


def test_bug_27_a_failed_load_of_the_linker_is_reported_once(
    linker: Any, hicache: Any, store_dir: Path
) -> None:
    """Fault: the same on the direct route, where the engine sends the request again."""
    keys = hicache.keys_of(3)
    with linker(hicache.make_device_pools("mha"), store_dir) as rig:
        assert rig.offload(keys, [1, 2, 3])
        os.truncate(store_dir / "pool.tutti", 0)
        assert rig.lookup(keys) == [1, 2, 3]
        assert not rig.load(keys, [11, 12, 13])
        assert rig.lookup(keys) == []


# ---- 29: no GPU-direct ----
@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing for GPUs is installed."""
    for name in ("kvikio", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(select, "_reported", set())


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("settings", "said"), [({"transport": "gds"}, "kvikio"), ({"hbm": "1MiB"}, "(?i)cupy")]
)
def test_bug_29_what_is_missing_is_said_at_once(
    store_dir: Path, resources: Resources, settings: dict[str, Any], said: str
) -> None:
    """Fault: GPU-direct is asked for on a host without it, and the first load never ends."""
    before = resources()
    with pytest.raises(UnsupportedError, match=said):
        open_small(store_dir, **settings)
    assert resources() == before
    with open_small(store_dir) as store:
        assert all(client(store).save(run("k", 1))) and all(client(store).load(run("k", 1)))


@pytest.mark.usefixtures("without_gpu")
def test_bug_29_auto_takes_the_path_through_the_host_and_says_so_once(
    store_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: left to choose, it chooses what this machine does not have."""
    monkeypatch.setitem(sys.modules, "tutti_core.io.uring", None)
    with caplog.at_level(logging.WARNING, "tutti"):
        for _ in range(2):
            with open_small(store_dir, transport="auto") as store:
                assert store.stats().transport.name == "posix"
                assert any("posix is used" in note for note in store.stats().transport.notes)
                pages = client(store)
                assert all(pages.save(run("k", 1))) and all(pages.load(run("k", 1)))
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("without_gpu")
def test_bug_29_the_linker_does_not_start_without_what_was_asked_for(
    linker: Any, hicache: Any, store_dir: Path
) -> None:
    """Fault: the same on the direct route."""
    pools, keys = hicache.make_device_pools("mha"), hicache.keys_of(1)
    threads = threading.active_count()
    with pytest.raises(UnsupportedError, match="kvikio"):
        linker.construct(pools, path=str(store_dir), capacity="64MiB", transport="gds")
    poll(lambda: threading.active_count() <= threads, "its threads have ended")
    with linker(pools, store_dir) as rig:
        assert rig.linker._path.name == "host" and rig.linker._path.reason
        assert rig.offload(keys, [1]) and rig.lookup(keys) == [1] and rig.load(keys, [2])


# ---- 30: nothing can be evicted ----
def test_bug_30_no_room_is_an_answer(store_dir: Path) -> None:
    """Fault: every page is pinned, and who needs room looks for some for ever."""
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 16))) and pages.pages.pin(run("k", 16)) == 16
        for i in range(3):
            assert pages.save(run(i, 4)) == [False] * 4
        assert store.stats().counters["pages_refused_full"] == 12
        pages.pages.unpin(run("k", 16), 16)
        assert pages.save(run("x", 4)) == [True] * 4


def test_bug_30_no_room_while_all_is_being_read(store_dir: Path) -> None:
    """Fault: the same where all pages are in flight; here the answer has a deadline."""
    with open_faulty(store_dir, io_timeout_s=0.3) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("k", 16)))
        with devices.held():
            load = pages.pages.load(run("k", 16), bytearray(16 * PAGE))
            begun_s = time.monotonic()
            ticket = pages.pages.save(run("x", 1), bytes(PAGE))
            assert not ticket.wait(20).any() and time.monotonic() - begun_s < 5.0
        load.wait(20)
        assert pages.save(run("y", 1)) == [True] == pages.load(run("y", 1))


def test_bug_30_no_room_while_all_is_held(store_dir: Path) -> None:
    """Fault: the same where look-ups hold what they found for loads that are to come."""
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 16)))
        hold = pages.pages.hold(loose(run("k", 16)))
        assert hold.pages == 16 and pages.save(run("x", 1)) == [False]
        hold.release()
        assert pages.save(run("x", 1)) == [True]


# ---- 31: attach and detach ----
def test_bug_31_a_hundred_times_leaves_nothing_behind(
    store_dir: Path, resources: Resources
) -> None:
    """Fault: threads, locks and files outlive a close; some later open fails or waits."""

    def once() -> None:
        store = open_small(store_dir)
        pages = client(store).pages
        pages.save(run("a", 4), bytes(4 * PAGE))  # in flight when it closes
        pages.load(run("a", 4), bytearray(4 * PAGE))
        store.close()
        store.close()

    once()
    before = resources()
    for _ in range(100):
        once()
    assert resources() == before
    with open_small(store_dir) as store:
        assert client(store).match(run("a", 4)) == 4


@pytest.mark.parametrize(("io_timeout_s", "close_s"), [(0.2, 2.0), (30.0, 0.3)])
def test_bug_31_closing_a_store_whose_device_is_silent_ends(
    store_dir: Path, io_timeout_s: float, close_s: float
) -> None:
    """Fault: the close waits for transfers that never end."""
    before = tutti_threads()
    config = small_config(store_dir, io_timeout_s=io_timeout_s)
    devices = memory_devices(config)
    store = PrefixStore.open(config, transport_object=devices)
    pages = client(store).pages
    devices.hold()
    save = pages.save(run("a", 4), bytes(4 * PAGE))
    begun_s = time.monotonic()
    store.close(close_s)
    assert time.monotonic() - begun_s < 5.0
    if io_timeout_s < close_s:
        assert not save.wait(1).any()
    with PrefixStore.open(config, transport_object=devices.reopen()) as store:
        assert client(store).match(run("a", 4)) == 0 and all(client(store).save(run("a", 4)))
    devices.release()  # it answers after all: now what was given up ends as well
    assert threads_left(before) == []


def test_bug_31_detaching_a_busy_backend_leaves_nothing_behind(
    hicache: Any, store_dir: Path, resources: Resources
) -> None:
    """Fault: the same where the engine's threads call while the backend is taken away."""
    keys, pool = hicache.keys_of(4), hicache.make_host_pool("mha", "page_first")
    answers: list[Any] = []

    def once() -> None:
        rank = hicache.Rank(store_dir, pool)
        over, begun = threading.Event(), threading.Event()

        def work() -> None:
            while not over.is_set():
                answers.append(rank.set(keys, range(4)))
                answers.append(rank.get(keys, range(4, 8)))
                begun.set()

        with beside(work, stop=over.set):
            assert begun.wait(20)
            rank.storage.close()
            rank.storage.close()
        assert rank.get(keys, range(4)) == [False] * 4 and rank.exists(keys) == 0

    once()
    before = resources()
    for _ in range(10):
        once()
    assert resources() == before
    assert all(len(answer) == 4 for answer in answers)
    with hicache.Rank(store_dir, pool) as rank:
        assert rank.exists(keys) == 4
