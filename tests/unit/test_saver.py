"""tiers/saver.py: grouping, order, failures and the end of the saving thread."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from store_kit import (
    PAGE,
    chain,
    check_space,
    client,
    memory_devices,
    open_faulty,
    poll,
    run,
    settle,
    small_config,
)
from thread_kit import Beside

from tutti_core import BusyError, InternalError, PageKeys, PrefixStore
from tutti_core.testing import FOREVER, Fault


def test_saves_that_wait_are_written_together(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store).pages
        with devices.held():
            first = pages.save(run("a", 1), bytes(PAGE))
            poll(lambda: not store._saver._jobs, "the first save is being written")
            rest = [pages.save(run(i, 1), bytes(PAGE)) for i in range(10)]
            assert not first.done() and not any(t.done() for t in rest)
        assert first.wait(20).all() and all(t.wait(20).all() for t in rest)
        assert devices.stats().flushes <= 4
        check_space(store)


def test_memory_belongs_to_a_save_until_it_is_done(store_dir: Path) -> None:
    """Bug 12: the bytes written are those at the time of the save's end, never later ones."""
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        memory = bytearray(b"a" * PAGE)
        ticket = pages.pages.save(run("k", 1), memory)
        assert ticket.wait(20).all()
        memory[:] = b"b" * PAGE
        back = bytearray(PAGE)
        assert pages.pages.load(run("k", 1), back).wait(20).all() and back == b"a" * PAGE
        assert devices.stats().write_items == 1


def test_a_timeout_leaves_the_save_running(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        with devices.held():
            ticket = client(store).pages.save(run("a", 1), bytes(PAGE))
            with pytest.raises(BusyError, match=r"not finished after 0\.01 s"):
                ticket.wait(0.01)
            assert not ticket.done()
        assert ticket.wait(20).all() and ticket.done()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_failed_write_costs_its_page_alone(store_dir: Path, code: int, bad: int) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        devices.arm(Fault("error", "write", index=bad, errno=code))
        expected = [i != bad for i in range(8)]
        assert pages.save(run("a", 8)) == expected == pages.contains(run("a", 8))
        assert pages.match(run("a", 8)) == bad and pages.load(run("a", 8)) == expected
        assert store.stats().counters["write_errors"] == 1 and store.stats().pages == 7
        check_space(store)
        assert all(pages.save(run("a", 8))) and pages.match(run("a", 8)) == 8


def test_without_a_flush_nothing_is_visible(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        devices.arm(Fault("error", "flush"))
        assert not any(pages.save(run("a", 8)))
        assert pages.match(run("a", 8)) == 0 and store.stats().pages == 0
        check_space(store)
        assert all(pages.save(run("a", 8)))


def test_only_the_device_whose_flush_failed_loses_its_pages(fast_path: Path) -> None:
    pools = [fast_path / "a", fast_path / "b"]
    with open_faulty(fast_path / "s", pools=pools) as (store, devices):
        pages = client(store)
        devices.arm(Fault("error", "flush", device=1, count=1000))
        assert pages.save(run("a", 8)) == [True, False] * 4
        assert pages.load(run("a", 8)) == [True, False] * 4
        check_space(store)


def test_durability_none_does_not_flush(store_dir: Path) -> None:
    with open_faulty(store_dir, durability="none") as (store, devices):
        assert all(client(store).save(run("a", 8)))
        assert devices.stats().flushes == 0


def test_a_backlog_that_is_full_answers_not_stored_at_once(store_dir: Path) -> None:
    with open_faulty(store_dir, backlog=4 * PAGE) as (store, devices):
        pages = client(store)
        with devices.held():
            first = pages.pages.save(run("a", 4), bytes(4 * PAGE))
            second = pages.pages.save(run("b", 1), bytes(PAGE))
            assert second.done() and not second.wait(0).any()
            assert store.stats().pending_bytes == 4 * PAGE
        assert first.wait(20).all()
        poll(lambda: store.stats().pending_bytes == 0, "the backlog is empty")
        assert all(pages.save(run("b", 1)))
        assert store.stats().counters["pages_refused_busy"] == 1


def test_a_busy_transport_is_tried_again(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        devices.arm(Fault("busy", "batch", count=5))
        assert all(client(store).save(run("a", 3)))
        check_space(store)


def test_a_transport_that_stays_busy_is_given_up(store_dir: Path) -> None:
    with open_faulty(store_dir, io_timeout_s=0.05) as (store, devices):
        pages = client(store)
        devices.arm(Fault("busy", "batch", count=FOREVER))
        assert not any(pages.save(run("a", 3)))
        assert store.stats().counters["pages_refused_busy"] == 3
        check_space(store)


def test_many_small_saves_leave_batches_to_the_loads(store_dir: Path) -> None:
    with open_faulty(store_dir, segments=64) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("stored", 1)))
        with devices.held():
            first = pages.pages.save(run("first", 1), bytes(PAGE))
            poll(lambda: not store._saver._jobs, "the first save is being written")
            rest = [pages.pages.save(run(i, 1), bytes(PAGE)) for i in range(400)]
        assert all(pages.load(run("stored", 1)))
        assert first.wait(20).all() and all(t.wait(20).all() for t in rest)
        assert "loads_refused_busy" not in store.stats().counters


def test_a_stalled_write_is_reported_as_failed_and_its_slot_comes_back_late(store_dir) -> None:
    with open_faulty(store_dir, io_timeout_s=0.05) as (store, devices):
        pages = client(store)
        devices.arm(Fault("slow", "batch"))
        assert pages.save(run("a", 3)) == [False] * 3
        assert store.stats().counters["writes_stuck"] == 1
        assert store.stats().used_bytes == 3 * PAGE and pages.match(run("a", 3)) == 0
        assert all(pages.save(run("b", 13)))  # the three slots are not handed out
        devices.release()
        settle(store)
        assert all(pages.save(run("c", 1)))
        assert pages.match(run("a", 3)) == 0
        check_space(store)


def test_equal_pages_saved_at_once_are_stored_once(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        with devices.held():
            tickets = [pages.pages.save(run("a", 4), bytes(4 * PAGE)) for _ in range(3)]
        assert all(t.wait(20).all() for t in tickets)
        assert store.stats().pages == 4 and store.stats().used_bytes == 4 * PAGE
        check_space(store)


def test_a_save_of_stored_pages_writes_nothing(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        pages.save(run("a", 4))
        before = devices.stats().write_items
        ticket = pages.pages.save(run("a", 4), bytes(4 * PAGE))
        assert ticket.done() and ticket.wait(0).all()
        assert pages.save(run("a", 6)) == [True] * 6
        assert devices.stats().write_items == before + 2
        assert store.stats().counters["known_pages"] == 8
        assert all(pages.load(run("a", 6)))


def test_saves_before_a_clear_are_cleared_and_saves_after_it_are_not(store_dir: Path) -> None:
    with open_faulty(store_dir) as (store, _):
        pages = client(store)
        ticket = pages.pages.save(run("a", 4), bytes(4 * PAGE))
        assert pages.pages.clear() == 4 and ticket.wait(20).all()
        assert pages.match(run("a", 4)) == 0
        assert all(pages.save(run("a", 4)))


@pytest.mark.parametrize("rooted", [True, False])
def test_parents_are_recorded_so_that_a_restart_finds_the_chain(store_dir, rooted: bool) -> None:
    config = small_config(store_dir)
    devices = memory_devices(config)
    keys = run("a", 9)
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = client(store)
        pages.save(PageKeys(keys.part(0, 3), 16))
        later = PageKeys(keys.part(3, 9), 16, rooted=False) if not rooted else keys
        assert all(pages.save(later, first=3 if rooted else 0))
    with PrefixStore.open(config, transport_object=devices.reopen()) as store:
        assert store.wait_restored(20)
        pages = client(store)
        tree = store._manager._entries[pages.name].pages
        assert (tree.tree.page_count, len(tree.loose)) == ((9, 0) if rooted else (3, 6))
        assert pages.match(keys) == 9 and all(pages.load(keys))
        check_space(store)


def test_closing_finishes_what_is_queued(store_dir: Path) -> None:
    config = small_config(store_dir)
    devices = memory_devices(config)
    store = PrefixStore.open(config, transport_object=devices)
    tickets = [client(store).pages.save(run(i, 1), bytes(PAGE)) for i in range(16)]
    store.close()
    assert all(t.done() and t.wait(0).all() for t in tickets)
    with PrefixStore.open(config, transport_object=devices.reopen()) as store:
        assert all(client(store).match(run(i, 1)) for i in range(16))


def test_an_internal_error_answers_everybody_and_leaves_stored_pages_readable(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_faulty(store_dir) as (store, _):
        pages = client(store)
        assert all(pages.save(run("a", 4)))

        def broken(*_: object) -> None:
            raise RuntimeError("an invariant broke")

        monkeypatch.setattr(store._manager, "publish", broken)
        assert not any(pages.save(run("b", 4)))
        assert not any(pages.save(run("c", 4)))
        assert store.stats().counters["internal_errors"] == 1
        assert all(pages.load(run("a", 4))) and pages.match(run("b", 4)) == 0


def test_a_clear_that_an_internal_error_prevents_says_so(store_dir: Path, monkeypatch) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 4)))

        def broken(*_: object) -> None:
            raise RuntimeError("an invariant broke")

        monkeypatch.setattr(store._manager, "publish", broken)

        def clear() -> None:
            with pytest.raises(InternalError):
                pages.pages.clear()

        with devices.held():
            ticket = pages.pages.save(run("b", 1), bytes(PAGE))
            poll(lambda: not store._saver._jobs, "the save is being written")
            thread = Beside(clear, bound_s=60.0)
            poll(lambda: bool(store._saver._jobs) or not thread.running, "the clear is queued")
        thread.join()
        assert not ticket.wait(20).any()
        assert pages.match(run("a", 4)) == 4


def test_pages_are_named_by_chains_in_these_tests() -> None:
    assert chain(1, 2).data == chain(1, 2, 3).data[:32]
    assert chain(1, 2).data[16:] != chain(9, 2).data[16:]
