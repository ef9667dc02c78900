"""Exclusive DRAM: no page loses its ancestors or is lost on the way, and none is missed on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_kit import PAGE, Client, chain, client, poll, run
from tier_kit import DRAM, Clock, check_tiers, dram, in_memory, on_devices, quiesce, tiered

from tutti_core import PageKeys, PrefixStore
from tutti_core.tiers import mover as mover_module
from tutti_core.tiers.handover import Handover
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.mover import Mover
from tutti_core.tiers.saver import DropJob
from tutti_core.tiers.stack import TierStack

TTL_S = 100.0
ABC = chain(*"abc")


@contextlib.contextmanager
def exclusive(path: Path, **settings: Any) -> Iterator[tuple[PrefixStore, Client]]:
    settings.setdefault("write_policy", "write_back")
    with tiered(path, dram_mode="exclusive", **settings) as (store, _):
        yield store, client(store)


def first_page_above(store: PrefixStore, pages: Client) -> None:
    """Save a, b, c: a is in memory then, b and c on the devices."""
    assert all(pages.save(ABC)) and store.flush(20)
    assert all(pages.load(chain("a")))
    quiesce(store)
    places(store, pages, above="a", below="bc")


def places(store: PrefixStore, pages: Client, *, above: str, below: str) -> None:
    """What of a, b, c is where."""
    quiesce(store)
    names = dict(zip(ABC, "abc", strict=True))
    assert {names[key] for key in in_memory(store, pages.name)} == set(above)
    assert {names[key] for key in on_devices(store, pages.name, living=True)} == set(below)


# ---- ancestors that are past their TTL ----
def first_page_expires(store: PrefixStore, pages: Client, clock: Clock) -> None:
    """The first page, in memory, is past its TTL, which those below it are not."""
    first_page_above(store, pages)
    pages.pages.limit(ttl_s=TTL_S)
    clock.advance(TTL_S - 1)
    entry = pages.pages._entry
    with store._manager.lock:  # not by a load or a look-up: these would renew the first page
        entry.pages.match(ABC.data, 1, store._manager._tick())
    clock.advance(2)
    dram(store).expire()
    assert not in_memory(store, pages.name)


def test_what_the_devices_hold_below_an_expired_page_goes(store_dir: Path, clock: Clock) -> None:
    with exclusive(store_dir) as (store, pages):
        first_page_expires(store, pages, clock)
        places(store, pages, above="", below="")
        check_tiers(store)
        assert all(pages.save(ABC)) and all(pages.load(ABC))


def test_only_telling_of_it_makes_them_go(
    store_dir: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(TierStack, "_left_memory", lambda self, departures: None)
    with exclusive(store_dir) as (store, pages):
        first_page_expires(store, pages, clock)
        places(store, pages, above="", below="bc")


def test_a_run_that_comes_again_in_part_keeps_only_what_is_below_that(
    store_dir: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the expired pages is saved again before the saver looks what was below them."""
    with exclusive(store_dir) as (store, pages):
        keys, enqueue = chain(*"abcd"), store._saver.enqueue
        assert all(pages.save(keys)) and store.flush(20) and all(pages.load(ABC))
        quiesce(store)
        assert on_devices(store, pages.name) == set(keys) - set(ABC)
        pages.pages.limit(ttl_s=TTL_S)
        clock.advance(TTL_S - 1)
        with store._manager.lock:
            pages.pages._entry.pages.match(keys.data, 3, store._manager._tick())
        clock.advance(2)
        held: list[DropJob] = []
        monkeypatch.setattr(store._saver, "enqueue", held.append)
        dram(store).expire()
        assert len(held) == 1 and all(pages.save(chain("a")))
        monkeypatch.setattr(store._saver, "enqueue", enqueue)
        assert enqueue(held[0])
        places(store, pages, above="a", below="")
        check_tiers(store)


@pytest.mark.parametrize("secured", [True, False])
def test_a_page_that_comes_above_what_the_devices_hold_is_written(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, secured: bool
) -> None:
    """Under write_selective, too, which drops what was used once; else it is lost (the control)."""
    if not secured:
        monkeypatch.setattr(TierStack, "_secure_fresh", lambda self, tier, job: None)
    with exclusive(store_dir, write_policy="write_selective", segments=8) as (store, pages):
        assert all(pages.save(ABC)) and pages.match(ABC) == 3 and store.flush(20)
        places(store, pages, above="", below="abc")
        assert all(pages.load(chain("a")))
        quiesce(store)
        entry = pages.pages._entry
        dram(store).clear(entry)  # as if expired, before the saver has heard of it
        places(store, pages, above="", below="bc")
        assert all(pages.save(chain("a")))
        for i in range(2 * DRAM // PAGE):
            assert all(pages.save(run(i, 1)))
        quiesce(store)
        assert (pages.match(ABC) == 3 and all(pages.load(ABC))) is secured
        check_tiers(store)


@pytest.mark.parametrize("use", ["match", "save"])
def test_an_ancestor_elsewhere_is_as_new_as_what_is_used(
    store_dir: Path, clock: Clock, use: str
) -> None:
    with exclusive(store_dir, write_policy="write_through") as (store, pages):
        first_page_above(store, pages)
        pages.pages.limit(ttl_s=TTL_S)
        clock.advance(TTL_S - 1)
        if use == "match":
            assert pages.match(ABC, 1) == 2
        else:
            assert all(pages.save(chain(*"abcd"), 3))
        clock.advance(2)
        dram(store).expire()
        quiesce(store)
        assert pages.match(ABC) == 3 and all(pages.load(ABC))


def test_a_page_past_its_ttl_is_not_renewed_by_what_is_below_it(
    store_dir: Path, clock: Clock
) -> None:
    with exclusive(store_dir) as (store, pages):
        first_page_above(store, pages)
        pages.pages.limit(ttl_s=TTL_S)
        clock.advance(TTL_S + 1)
        assert pages.match(ABC, 1) == 0 and pages.match(ABC) == 0
        pages.save(chain(*"abcd"), 3)
        assert pages.match(ABC) == 0 and not any(pages.load(ABC))


# ---- two who let go at once ----
def evict_from_devices(store: PrefixStore, pages: Client, keys: PageKeys) -> None:
    """As the saver does when it needs room."""
    manager, entry = store._manager, pages.pages._entry
    with manager.lock:
        node = entry.pages.tree.nodes_along(keys.data)[-1][0]
        retired = manager._retire(entry, entry.pages.tail(node, 1, 0.0))
    manager._remove_retired(retired)


def written_and_evicted(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, let_go: Callable[..., Any]
) -> bool:
    """Whether a page is left that is evicted below after it was written, before it leaves above."""
    with exclusive(store_dir) as (store, pages):
        keys = chain("a")
        assert all(pages.save(keys))
        times: list[int] = []

        def evict_first(self: Mover, *rest: Any) -> Any:
            if not times:
                times.append(1)
                evict_from_devices(store, pages, keys)
            return let_go(self, *rest)

        monkeypatch.setattr(Mover, "_let_go", evict_first)
        assert store.flush(20) and times
        check_tiers(store)
        return pages.match(keys) == 1 and all(pages.load(keys))


def test_a_page_that_is_evicted_below_stays_above(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "FAILURE_PAUSE_S", 0.01)
    assert written_and_evicted(store_dir, monkeypatch, Mover._let_go)


def test_a_page_that_is_let_go_unseen_is_lost(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what was answered is believed."""

    def believe(self: Mover, tier: MemoryTier, write: Any) -> Any:
        stored = write.ticket.wait()
        tier.end_write(write, stored)
        return stored

    assert not written_and_evicted(store_dir, monkeypatch, believe)


@pytest.mark.parametrize("seen", [True, False])
def test_a_page_leaves_the_devices_only_where_memory_has_it(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Offered above, and gone from there again; unless that is seen, it is lost (the control)."""
    with exclusive(store_dir) as (store, pages):
        keys, take = chain("a"), Mover._take_from_devices
        assert all(pages.save(keys)) and store.flush(20)

        def drop_first(self: Mover, target: MemoryTier, *rest: Any) -> None:
            target.clear(pages.pages._entry)
            take(self, target, *rest)

        monkeypatch.setattr(Mover, "_take_from_devices", drop_first)
        if not seen:
            every = lambda self, entry, keys, index: np.ones(len(index), dtype=np.bool_)  # noqa: E731
            monkeypatch.setattr(MemoryTier, "must_save", every)
        assert all(pages.load(keys))
        quiesce(store)
        assert not in_memory(store, pages.name)
        assert (pages.match(keys) == 1) is seen


@pytest.mark.parametrize("heeded", [True, False])
def test_a_record_that_is_about_to_go_stores_nothing(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, heeded: bool
) -> None:
    """A page moves up and is written down before its old record is removed (control: is lost)."""
    monkeypatch.setattr(mover_module, "FAILURE_PAUSE_S", 0.01)
    with exclusive(store_dir) as (store, pages):
        keys, enqueue = chain("a"), store._saver.enqueue
        held: list[DropJob] = []

        def hold(job: Any) -> bool:
            if not isinstance(job, DropJob):
                return enqueue(job)
            held.append(job)
            return True

        assert all(pages.save(keys)) and store.flush(20)
        monkeypatch.setattr(store._saver, "enqueue", hold)
        assert all(pages.load(keys))
        quiesce(store)
        assert len(held) == 1 and set(in_memory(store, pages.name)) == set(keys)
        if not heeded:
            store._manager._leaving.clear()
        assert store.flush(20) is not heeded
        monkeypatch.setattr(store._saver, "enqueue", enqueue)
        assert enqueue(held[0])
        quiesce(store)
        assert (store.flush(20) and all(pages.load(keys))) is heeded
        if heeded:
            check_tiers(store)
            assert not store._manager._leaving


# ---- looking for a page that moves ----
def ask_match(pages: Client, keys: PageKeys) -> bool:
    return pages.match(keys) == len(keys)


def ask_contains(pages: Client, keys: PageKeys) -> bool:
    return all(pages.contains(keys))


def ask_load(pages: Client, keys: PageKeys) -> bool:
    return all(pages.load(keys))


def ask_load_in_parts(pages: Client, keys: PageKeys) -> bool:
    load = pages.pages.load_parts(keys)
    load.end()
    return bool(load.found.all())


QUESTIONS = [ask_match, ask_contains, ask_load, ask_load_in_parts]


def found_while_moving(
    store: PrefixStore,
    monkeypatch: pytest.MonkeyPatch,
    question: Callable[[Client, PageKeys], bool],
) -> bool:
    """Whether pages are found that are above only while the devices are asked for them."""
    keys, manager, armed = run("a", 3), store._manager, [True]
    pages = client(store, model="in parts", page_bytes=3000, parts=(3000,))
    assert all(pages.save(keys)) and store.flush(20)

    def moving(real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            if not armed:
                return real(*arguments)
            armed.clear()
            assert ask_load(pages, keys)
            quiesce(store)
            assert set(in_memory(store, pages.name)) == set(keys)
            found = real(*arguments)
            assert store.flush(20) and not in_memory(store, pages.name)
            return found

        return ask

    monkeypatch.setattr(manager, "match", moving(manager.match))
    monkeypatch.setattr(manager, "locate", moving(manager.locate))
    return question(pages, keys)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_page_that_moves_up_and_down_meanwhile_is_found(
    store_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    question: Callable[[Client, PageKeys], bool],
) -> None:
    with exclusive(store_dir) as (store, _):
        assert found_while_moving(store, monkeypatch, question)


@pytest.mark.parametrize("question", QUESTIONS)
def test_such_a_page_is_a_miss_for_who_asks_once(
    store_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    question: Callable[[Client, PageKeys], bool],
) -> None:
    """Negative control: nobody looks again."""
    with exclusive(store_dir) as (store, _):
        store._stack._exclusive = False
        assert not found_while_moving(store, monkeypatch, question)


def test_a_move_waits_while_a_look_up_looks_again(store_dir: Path) -> None:
    with exclusive(store_dir) as (store, pages):
        keys = run("a", 3)
        assert all(pages.save(keys)) and store.flush(20)
        handover = store._stack.handover
        with handover.still():
            before = handover._moves
            target = bytearray(3 * PAGE)
            ticket = pages.pages.load(keys, target)
            assert ticket.wait(20).all()
            poll(lambda: not store._mover._promotions, "the promotion was taken up")
            assert not in_memory(store, pages.name) and handover._moves == before
        quiesce(store)
        assert set(in_memory(store, pages.name)) == set(keys) and handover.moves > before


def test_moves_are_counted_also_where_one_fails() -> None:
    handover = Handover()
    with handover.still():
        pass
    assert handover.moves == 0
    with pytest.raises(ValueError), handover.move():
        raise ValueError
    assert handover.moves == 1
