"""Stop at every device operation in turn, reopen, and compare with what may be there.

A history runs on devices in memory that stop at operation n; then the power goes, the store is
opened again on what is left, and every page ever saved must come back bit-exact or as a miss.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from store_kit import PAGE, Client, chain, check_space, client, memory_devices, small_config

from tutti_core import PageKeys, PrefixStore
from tutti_core.testing import FaultyDevices, Oracle

SPACES = (
    {"model": "a"},
    {"model": "b", "page_bytes": 3 * PAGE - 7},
    {"model": "c", "page_bytes": PAGE + 9, "parts": (9, PAGE)},
)
WORDS = ("aaaa", "aab", "abab", "b", "bbbbbbb", "abc", "cab", "aaaabb")


@dataclass
class Run:
    """What one history did until the devices stopped."""

    oracle: Oracle = field(default_factory=Oracle)
    stored: set[tuple[int, str]] = field(default_factory=set)
    """Pages that a save has reported and nothing has taken away since."""
    evicted: bool = False


def names(word: str) -> list[str]:
    return [word[: i + 1] for i in range(len(word))]


def play(seed: int, config, devices: FaultyDevices, steps: int, clears: bool) -> Run:
    """Run a seeded history until its end or until the devices stop."""
    rng, run = random.Random(seed), Run()
    with PrefixStore.open(config, transport_object=devices) as store:
        store.wait_restored(20)
        clients = [client(store, run.oracle, **fields) for fields in SPACES]
        for step in range(steps):
            space, word, roll = rng.randrange(len(SPACES)), rng.choice(WORDS), rng.random()
            if roll < 0.65:
                stored = clients[space].save(chain(*word), seed=step)
                run.stored |= {
                    (space, name) for name, good in zip(names(word), stored, strict=True) if good
                }
            elif roll < 0.9 or not clears:
                loaded = clients[space].load(chain(*word))
                if not all(loaded):  # a read that failed takes its page along
                    gone = zip(names(word), loaded, strict=True)
                    run.stored -= {(space, name) for name, good in gone if not good}
            else:
                run.stored = {(s, name) for s, name in run.stored if s != space}
                clients[space].pages.clear()
                run.oracle.forget(clients[space].name)
            if devices.stopped:
                break
        run.evicted = store.stats().counters.get("evicted_pages", 0) > 0
    return run


def judge(run: Run, config, devices: FaultyDevices, durable: bool) -> None:
    """Open what is left and compare it with the run."""
    with PrefixStore.open(config, transport_object=devices) as store:
        clients = [client(store, run.oracle, **fields) for fields in SPACES]
        for space, pages in enumerate(clients):
            for word in WORDS:
                keys = chain(*word)
                contained = pages.contains(keys)
                loaded = pages.load(keys)  # the oracle compares each byte
                if durable:
                    assert loaded == contained, "a page in the catalog did not survive"
                    for name, good in zip(names(word), loaded, strict=True):
                        expected = not run.evicted and (space, name) in run.stored
                        assert good or not expected, f"{name} of {space} was stored and is gone"
                # What did not load is gone for good.
                for was, is_now in zip(loaded, pages.contains(keys), strict=True):
                    assert was or not is_now
        check_space(store)
        use_again(clients)
        check_space(store)


def use_again(clients: list[Client]) -> None:
    """The store still works: everything can be saved and loaded, and all space is to be had."""
    for pages, word in zip(clients, ("bbbbbbb", "aaaa", "ab"), strict=True):
        assert all(pages.save(chain(*word), seed=99)), "the store is not usable any more"
        assert all(pages.load(chain(*word)))
    for pages in clients:
        pages.pages.clear()
    keys = PageKeys(b"".join(bytes([i]) * 16 for i in range(16)), 16)
    assert all(clients[0].save(keys)), "space was lost"
    assert all(clients[0].load(keys))


def every_stop(seed: int, folder: Path, pools: int, steps: int, segments: int, **settings) -> int:
    """Play one history for each operation that it makes, with the power lost at that one."""
    places = [folder / f"pool{i}" for i in range(pools)] if pools > 1 else []
    config = small_config(folder / "store", segments=segments, pools=places, **settings)
    durable = config.durability == "flush"
    devices = memory_devices(config, seed=seed)
    play(seed, config, devices, steps, clears=True)
    total = devices.operations
    for stop in range(total + 1):
        for part in folder.iterdir():
            shutil.rmtree(part)
        devices = memory_devices(config, seed=stop)
        devices.stop_at(stop)
        run = play(seed, config, devices, steps, clears=True)
        devices.crash(seed=seed * 1000 + stop)
        judge(run, config, devices.reopen(seed=stop), durable)
    return total


@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize("durability", ["flush", "none"])
def test_power_loss_at_every_operation_of_a_store_with_room(fast_path, pools, durability) -> None:
    total = every_stop(7, fast_path, pools, 16, 8, durability=durability)
    assert total > 20


@pytest.mark.parametrize("durability", ["flush", "none"])
def test_power_loss_at_every_operation_of_a_store_that_evicts(fast_path, durability) -> None:
    total = every_stop(21, fast_path, 1, 40, 2, durability=durability)
    assert total > 50


@pytest.mark.parametrize("seed", range(3))
def test_process_death_with_writes_in_flight(fast_path: Path, seed: int) -> None:
    """What a dead process had submitted may land in part; nobody was told that it was stored."""
    config = small_config(fast_path / "store")
    devices = memory_devices(config, seed=seed)
    run = play(seed, config, devices, 12, clears=False)
    devices = devices.reopen(seed=seed)
    store = PrefixStore.open(config, transport_object=devices)
    pages = client(store, run.oracle)
    devices.hold()
    pages.oracle.save(pages.name, chain("late")[0], b"L" * PAGE)
    ticket = pages.pages.save(chain("late"), b"L" * PAGE)
    devices.kill()
    assert not ticket.wait(20).any()
    store.close()
    run.evicted = True  # the late save may have evicted
    judge(run, config, devices.reopen(seed=seed), durable=False)


def test_a_crash_while_a_crash_is_repaired(fast_path: Path) -> None:
    """Power is lost again and again, at an operation soon after each reopening."""
    config = small_config(fast_path / "store")
    devices = memory_devices(config, seed=3)
    oracle = Oracle()
    rng = random.Random(3)
    for life in range(25):
        devices.stop_at(rng.randrange(1, 25))
        with PrefixStore.open(config, transport_object=devices) as store:
            pages = client(store, oracle)
            while not devices.stopped:
                word = rng.choice(WORDS)
                pages.save(chain(*word), seed=life)
                pages.load(chain(*rng.choice(WORDS)))
        devices.crash(seed=life)
        devices = devices.reopen(seed=life)
    assert oracle.hits > 20
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = client(store, oracle)
        for word in WORDS:
            pages.load(chain(*word))
        check_space(store)


def test_the_check_itself_notices_a_page_published_before_its_flush(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the flush, some crash point must show a page that is gone."""
    from tutti_core.tiers.saver import Saver

    monkeypatch.setattr(
        Saver, "_flush_devices", lambda self, group: {int(d): 0 for w in group for d in w.device}
    )
    with pytest.raises(AssertionError, match=r"did not survive|is gone"):
        every_stop(7, fast_path, 1, 9, 8)


def test_the_check_itself_notices_a_slot_that_is_reused_too_early(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: eviction that does not remove the record first must be seen."""
    from tutti_core.index.catalog import Catalog

    monkeypatch.setattr(Catalog, "remove", lambda self, pages: None)
    with pytest.raises(AssertionError):
        every_stop(21, fast_path, 1, 22, 2)
