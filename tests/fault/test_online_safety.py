"""The trial of everything at once, small, and proof that it notices broken rules."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_kit import PAGE, client, open_faulty, open_small, poll, run, small_config
from thread_kit import beside

from tutti_core import BusyError, InternalError, PrefixStore, SaveTicket, StoreClosedError
from tutti_core.index.catalog import Catalog
from tutti_core.index.pages import NamespacePages
from tutti_core.testing import Fault
from tutti_core.tiers.copier import Copier, Copy
from tutti_core.tiers.loader import LoadTicket
from tutti_core.tiers.manager import Manager
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.saver import Saver
from tutti_core.tiers.space import Space
from tutti_core.tiers.stack import TierStack
from tutti_core.trials import concurrency, exits
from tutti_core.trials.tally import Tally


def test_everything_at_once(fast_path: Path) -> None:
    tally = concurrency.run(fast_path, seed=5)
    tally.check()
    assert tally.pages_compared > 300 and tally.misses > 0
    kinds = "hold clear cancel limit flush evict fork exit close".split()
    assert all(tally.events[kind] > 0 for kind in [*kinds, "pinned full", "exit, posix"])
    assert tally.events["operations"] >= concurrency.QUICK_OPERATIONS


# ---- negative controls ----
def complaints_of(trial: Callable[[Tally], None], attempts: int = 5) -> list[str]:
    """What a trial has to say, tried again where chance left it silent."""
    for _ in range(attempts):
        tally = Tally()
        trial(tally)
        if tally.complaints:
            return tally.complaints
    return []


def mixed(path: Path, name: str, steps: int = 60) -> list[str]:
    count = iter(range(99))

    def trial(tally: Tally) -> None:
        number = next(count)
        concurrency.mixed_calls(path / str(number), name, number, steps, tally)

    return complaints_of(trial)


def test_a_slot_that_is_freed_before_its_readers_are_done_is_noticed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(self: Space) -> None:
        while self._waiting:
            self._release(self._waiting.popleft()[1])

    monkeypatch.setattr(Space, "collect", at_once)
    assert any("checksum_errors" in text for text in mixed(fast_path, "memory", 150))


def test_a_pin_that_is_ignored_is_noticed(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NamespacePages, "pin", lambda *_: None)
    monkeypatch.setattr(NamespacePages, "unpin", lambda *_: None)
    assert any("held pages" in text for text in mixed(fast_path, "files"))


def test_a_pin_that_is_left_is_noticed(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NamespacePages, "unpin", lambda *_: None)
    assert any("pins are left" in text for text in mixed(fast_path, "files", 20))


def test_a_clear_that_forgets_a_tier_is_noticed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryTier, "clear", lambda *_: None)
    assert any("after a clear" in text for text in mixed(fast_path, "files, write_through", 150))


def test_a_load_that_is_not_given_back_is_noticed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Space, "end_load", lambda *_: None)
    monkeypatch.setattr(concurrency, "CALL_S", 5.0)
    assert any("protect slots" in text for text in mixed(fast_path, "files", 2))


def test_a_save_that_does_not_hear_of_its_cancellation_is_noticed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SaveTicket, "cancel", lambda *_: None)

    def trial(tally: Tally) -> None:
        concurrency.cancelled(fast_path / "c", "memory", 1, tally)

    assert complaints_of(trial, 1)


def test_an_undocumented_exception_is_noticed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise KeyError("no such ticket")

    monkeypatch.setattr(LoadTicket, "done", broken)
    monkeypatch.setattr(LoadTicket, "wait", broken)

    count = iter(range(99))

    def trial(tally: Tally) -> None:
        number = next(count)
        concurrency.closed_under_load(fast_path / str(number), "memory", number, tally)

    assert any("KeyError" in text for text in complaints_of(trial, 20))


def test_something_that_grows_with_each_call_is_noticed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bytes] = []
    judge = Saver._end

    def leaking(self: Saver, job: Any) -> None:
        kept.append(bytes(2000))
        judge(self, job)

    monkeypatch.setattr(Saver, "_end", leaking)
    tally = Tally()
    concurrency.many_operations(fast_path / "m", 900, tally)
    assert any("more bytes are in use" in text for text in tally.complaints)


def test_a_process_that_says_something_at_its_end_is_noticed(fast_path: Path) -> None:
    tally = Tally()
    code = "import atexit, ctypes\natexit.register(lambda: 1 / 0)\n"
    exits._run_one(fast_path / "s", "posix", "noisy", code, 0, tally)
    assert any("ZeroDivisionError" in text for text in tally.complaints)


# ---- every waiter hears, whatever ends what it waits for ----
def test_a_save_in_memory_whose_end_raises_is_answered(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("an invariant broke")

    with open_small(store_dir, dram=16 * PAGE, write_policy="write_back") as store:
        monkeypatch.setattr(TierStack, "settle", broken)
        ticket = client(store).pages.save(run("a", 2), bytes(2 * PAGE))
        ticket.wait(20)
        monkeypatch.undo()


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_a_saver_that_dies_outside_a_job_answers_all(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with open_small(store_dir) as store:
        pages = client(store).pages

        def broken(wait: bool) -> Any:
            raise error

        monkeypatch.setattr(store._saver, "_take", broken)  # from the next group on
        pages.save(run("a", 2), bytes(2 * PAGE)).wait(20)
        poll(lambda: store._saver.failed, "the saver has stopped")
        assert not pages.save(run("b", 2), bytes(2 * PAGE)).wait(20).any()
        with pytest.raises(InternalError):
            pages.clear(20)
        assert store.stats().counters["internal_errors"] == 1


def test_a_copy_that_ends_its_thread_in_python_does_not_end_the_copier() -> None:
    copier = Copier(1000)

    def leave() -> None:
        raise SystemExit

    first, second = Copy(leave), Copy(lambda: None)
    assert copier.enqueue(first, 1) and copier.enqueue(second, 1)
    assert copier.drain(20) and first.failed and second.done() and copier.stop(20)


def test_taking_pages_off_the_devices_ends_when_the_saver_has_failed(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exclusive tier hands the records over to the saver, and waits for room in its queue."""
    settings = {"dram": 16 * PAGE, "dram_mode": "exclusive", "write_policy": "write_through"}
    with open_small(store_dir, **settings) as store:
        pages = client(store)
        assert all(pages.save(run("a", 4)))
        monkeypatch.setattr(store._saver, "enqueue", lambda job: False)
        monkeypatch.setattr(store._saver, "_failed", True)
        assert all(pages.load(run("a", 4)))
        mover = store._mover
        assert mover is not None
        poll(lambda: mover.wait_idle(0.1), "the mover goes on", 10)


# ---- closing ----
def test_close_is_bounded_by_its_time_where_a_load_is_stuck(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages, gate = client(store), threading.Event()
        assert all(pages.save(run("a", 2)))
        close = devices.close

        def stuck() -> None:
            assert gate.wait(60)
            close()

        devices.close = stuck  # type: ignore[method-assign]
        devices.arm(Fault("slow", "batch", polls=0))
        memory = bytearray(2 * PAGE)
        load = pages.pages.load(run("a", 2), memory)
        with beside(lambda: store.close(0.1), lambda: store.close(0.1), bound_s=30.0):
            pass
        with pytest.raises(StoreClosedError):
            pages.match(run("a", 2))
        devices.release()
        assert load.wait(20).all()
        gate.set()


def test_a_part_in_flight_is_collected_once_when_another_thread_closes(store_dir: Path) -> None:
    """The closing thread and the load's own waited for one ticket; one of them got a KeyError."""
    config = small_config(store_dir, segments=4)
    store = PrefixStore.open(config)
    pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=1, parts=(PAGE // 2,) * 2)
    assert pages.save(run("a", 2), bytes(2 * PAGE)).wait(20).all()
    for _ in range(20):
        load = pages.load_parts(run("a", 2), bytearray(2 * PAGE))
        reading = load.start(0)
        deadline = threading.Event()

        def finish(load: Any = load, reading: Any = reading) -> None:
            load.finish(reading, 20)

        def abandon(load: Any = load) -> None:
            assert load.abandon(float("inf")) or True

        with contextlib.suppress(OverflowError), beside(finish, abandon, bound_s=30.0):
            deadline.set()
        with contextlib.suppress(ValueError, StoreClosedError):
            load.finish(load.start(1), 20)
        load.end()
        load.end()
    store.close()
    with store._manager.lock:
        assert not store._manager.space._loads


def test_a_part_of_a_closed_store_is_not_good(store_dir: Path) -> None:
    store = open_small(store_dir, segments=4)
    pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=1, parts=(PAGE // 2,) * 2)
    assert pages.save(run("a", 2), bytes(2 * PAGE)).wait(20).all()
    load = pages.load_parts(run("a", 2), bytearray(2 * PAGE))
    reading = load.start(0)
    store.close()
    assert not load.finish(reading, 20).any()
    with pytest.raises(StoreClosedError):
        load.start(1)
    load.end()


def test_a_store_whose_threads_cannot_be_started_leaves_nothing(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, resources: Callable[[], tuple[int, int]]
) -> None:
    with open_small(store_dir, dram=16 * PAGE):
        pass
    before, start = resources(), threading.Thread.start
    for refused in ("tutti-copier", "tutti-saver", "tutti-mover", "tutti-restore"):

        def limited(self: threading.Thread, refused: str = refused) -> None:
            if self.name == refused:
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(BusyError, match="threads"):
            open_small(store_dir, dram=16 * PAGE)
        monkeypatch.undo()
        poll(lambda: resources() == before, "all is let go of")
        with open_small(store_dir, dram=16 * PAGE) as store:
            assert store._lease.number == 0


# ---- forks ----
def child_status(work: Callable[[], None]) -> int:
    """How a forked child that does some work ends; a hang ends it with a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_a_child_that_is_forked_while_a_store_is_closing_does_not_hang(store_dir: Path) -> None:
    """The lock of the closing thread stays taken in the child for ever."""
    with open_small(store_dir) as store:
        with store._close_lock:
            assert child_status(store.close) == 0


def test_a_child_hears_that_tickets_and_holds_are_its_parents(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 2)))
        hold = pages.pages.hold(run("a", 2))
        with devices.held():
            save = pages.pages.save(run("b", 2), bytes(2 * PAGE))
            load = pages.pages.load(run("a", 2), bytearray(2 * PAGE))

            def work() -> None:
                for ticket in (save, load):
                    with pytest.raises(StoreClosedError):
                        ticket.wait(20)
                hold.release()
                store.unregister(1)

            with store._manager.lock:  # another thread may have it at the fork
                assert child_status(work) == 0
        assert save.wait(20).all() and load.wait(20).all()
        hold.release()


def test_a_fork_waits_for_transactions_no_longer_than_it_may(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that forks inside a transaction, as a signal's handler may, waited for itself."""
    monkeypatch.setattr("tutti_core.index.catalog.FORK_WAIT_S", 0.05)
    with open_small(store_dir, segments=4, writers_max=2) as store:
        pages = client(store)
        assert all(pages.save(run("a", 2)))
        with store._catalog._begin():

            def work() -> None:
                with contextlib.suppress(Exception):  # refused, or opened: it ends
                    Catalog(store_dir / "catalog", 1 << 21, False).close()

            assert child_status(work) == 0
        assert all(pages.save(run("b", 2))) and all(pages.load(run("b", 2)))


def test_an_unfinished_ticket_of_ones_own_is_waited_for_with_a_bound() -> None:
    with pytest.raises(BusyError):
        SaveTicket(np.zeros(1, dtype=np.bool_)).wait(0.01)


# ---- holds and clears over several tiers ----
def test_a_held_run_stays_whole_where_its_pages_are_in_two_tiers(store_dir: Path) -> None:
    """A pin of the last page alone left the front to the memory tier, of which it was the leaf."""
    settings = {"dram": 8 * PAGE, "dram_mode": "exclusive", "write_policy": "write_through"}
    with open_small(store_dir, segments=2, **settings) as store:
        pages, mover = client(store), store._mover
        assert mover is not None and all(pages.save(run("k", 3)))
        assert all(pages.load(run("k", 1)))  # the first page moves up
        poll(lambda: store._tiers[0].page_count == 1 and mover.wait_idle(0.1), "it has moved")
        hold = pages.pages.hold(run("k", 3))
        assert hold.pages == 3
        for tier in (store._tiers[0]._shelves[pages.name], store._manager._entries[pages.name]):
            assert len(tier.pages.pins) == 3  # each page, wherever it is a leaf
        for i in range(12):
            pages.save(run(i, 5))
            pages.load(run(i, 5))
            mover.wait_idle(1.0)
        assert all(pages.load(run("k", 3)))
        hold.release()
        assert not any(tier._shelves[pages.name].pages.pins for tier in store._tiers)


def test_a_page_that_moves_up_while_its_namespace_is_cleared_does_not_outlive_it(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory was emptied before the devices: what was copied up in between stayed for ever."""
    with open_small(store_dir, dram=16 * PAGE) as store:
        pages, mover, clear = client(store), store._mover, Manager.clear
        assert mover is not None and all(pages.save(run("k", 4)))
        store._tiers[0].clear(store._manager._entries[pages.name])

        def late(self: Manager, entry: Any) -> int:
            if entry.digest == pages.name:
                assert all(pages.load(run("k", 4)))  # and is promoted
                assert mover.wait_idle(10)
            return clear(self, entry)

        monkeypatch.setattr(Manager, "clear", late)
        assert pages.pages.clear() == 4
        assert not any(pages.contains(run("k", 4))) and not any(pages.load(run("k", 4)))
