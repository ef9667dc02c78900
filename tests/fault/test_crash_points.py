"""Stopping a store at every operation of its devices and its catalog; and that this finds faults.

The second half are negative controls: with the store broken on purpose, some crash point shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from store_kit import PAGE, chain, client, memory_devices

from tutti_core import PrefixStore
from tutti_core.index import catalog
from tutti_core.index.catalog import Catalog
from tutti_core.testing import Oracle
from tutti_core.tiers.lease import Lease
from tutti_core.tiers.manager import Manager
from tutti_core.tiers.saver import Saver
from tutti_core.tiers.space import Space
from tutti_core.trials import Tally
from tutti_core.trials.crash_points import (
    SHAPES,
    Life,
    Shape,
    Stop,
    crash_once,
    every_stop,
    judge,
    relapses,
    run,
)

SHAPE = {shape.name: shape for shape in SHAPES}
SEED = 7
POINTS_MAX = 80


@pytest.mark.parametrize("name", SHAPE)
def test_power_loss_at_every_operation(fast_path: Path, name: str) -> None:
    tally = Tally()
    every_stop(fast_path / "store", SHAPE[name], SEED, tally)
    tally.check()
    assert tally.crash_points > 20
    assert tally.pages_compared > 300
    assert tally.misses > 300


def test_power_loss_again_and_again_while_the_last_is_repaired(fast_path: Path) -> None:
    tally = Tally()
    relapses(fast_path / "store", 3, 12, tally)
    tally.check()
    assert tally.crash_points == 12
    assert tally.pages_compared > 10


def test_the_trial_ends_in_time_and_leaves_nothing(fast_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tutti_core.trials.crash_points.SHAPES", (Shape("tiny", 2, 8, room=True),))
    tally = run(fast_path, seed=SEED, seconds=0.5)
    tally.check()
    assert tally.crash_points > 12
    assert not list(fast_path.iterdir())


@pytest.mark.parametrize("seed", range(3))
def test_process_death_with_writes_in_flight(fast_path: Path, seed: int) -> None:
    """What a dead process had submitted may land in part; nobody was told that it was stored."""
    shape, tally = Shape("in flight", 8, 2), Tally()
    config = shape.config(fast_path)
    devices = memory_devices(config, seed=seed)
    life = Life(shape, Oracle(), tally)
    life.play(config, devices, seed, lambda: False)
    devices = devices.reopen(seed=seed)
    store = PrefixStore.open(config, transport_object=devices)
    pages = client(store, life.oracle)
    devices.hold()
    pages.oracle.save(pages.name, chain("late")[0], b"L" * PAGE)
    ticket = pages.pages.save(chain("late"), b"L" * PAGE)
    devices.kill()
    assert not ticket.wait(20).any()
    store.close()
    life.promised.clear()  # the late save may have evicted
    judge(life, config, devices.reopen(seed=seed), "in flight")
    tally.check()


# ---- negative controls ----
def first_complaint(folder: Path, shape: Shape, lost: bool = False) -> Tally:
    """Stop at one operation after the other until something is noticed, a `lost` page if so."""
    tally = Tally()
    for index in range(POINTS_MAX):
        for of in ("catalog", "device"):
            crash_once(folder / "store", shape, SEED, Stop(of, index), tally)
            if tally.durable_pages_lost if lost else tally.complaint_count:
                with pytest.raises(AssertionError):
                    tally.check()
                return tally
    raise AssertionError("nothing was noticed")


def test_a_page_published_before_its_flush_is_noticed(fast_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        Saver, "_flush_devices", lambda self, group: {int(d): 0 for w in group for d in w.device}
    )
    first_complaint(fast_path, SHAPE["room"], lost=True)


def test_a_record_that_stays_after_its_eviction_is_noticed(fast_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Catalog, "remove", lambda self, pages: None)
    first_complaint(fast_path, SHAPE["eviction"])


def test_a_slot_that_is_free_before_its_record_is_gone_is_noticed(
    fast_path: Path, monkeypatch
) -> None:
    """Eviction removes the records with the next commit only: the slot is overwritten before."""
    real_publish, real_clear = Catalog.publish, Manager.clear
    late: list[tuple[bytes, int, int]] = []

    def remove_retired(self: Manager, pages: list[tuple[bytes, int, int]]) -> None:
        late.extend(pages)
        with self.lock:
            self.space.give_up(np.array([slot for _, slot, _ in pages], dtype=np.uint64))

    def remove_late(catalog: Catalog) -> None:
        catalog.remove(list(late))
        late.clear()

    def publish(self: Catalog, groups: Any) -> Any:
        remove_late(self)
        return real_publish(self, groups)

    def clear(self: Manager, entry: Any) -> int:
        count = real_clear(self, entry)
        remove_late(self.catalog)
        return count

    monkeypatch.setattr(Manager, "_remove_retired", remove_retired)
    monkeypatch.setattr(Manager, "clear", clear)
    monkeypatch.setattr(Catalog, "publish", publish)
    first_complaint(fast_path, Shape("long", 30, 2), lost=True)


def test_a_catalog_that_does_not_sync_is_noticed(fast_path: Path, monkeypatch) -> None:
    class Careless:
        def __getattr__(self, name: str) -> Any:
            return getattr(lmdb, name)

        def open(self, path: str, **options: Any) -> Any:
            return lmdb.open(path, **{**options, "sync": False})

    monkeypatch.setattr(catalog, "lmdb", Careless())
    first_complaint(fast_path, SHAPE["room"])


def test_a_slot_that_is_lost_is_noticed(fast_path: Path, monkeypatch) -> None:
    real = Space.give_up
    monkeypatch.setattr(Space, "give_up", lambda self, slots: real(self, slots[1:]))
    tally = Tally()
    crash_once(fast_path / "store", SHAPE["room"], SEED, Stop("device", 0), tally)
    assert tally.complaint_count == 1


def test_a_descriptor_that_stays_open_is_noticed(fast_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Lease, "release", lambda self: None)
    tally = Tally()
    crash_once(fast_path / "store", Shape("short", 1, 8), SEED, None, tally)
    assert any("descriptors" in text for text in tally.complaints)
