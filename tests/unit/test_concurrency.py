"""Threads, stores and processes that share keys, a directory, or a moment to close."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store_kit import (
    NAMESPACE,
    PAGE,
    check_space,
    client,
    memory_devices,
    open_small,
    poll,
    run,
    settle,
    small_config,
)
from thread_kit import beside, together

from tutti_core import PageKeys, PrefixStore, StoreClosedError
from tutti_core.testing import Fault, FaultPlan, FaultyDevices, explain, page_bytes

ROOT = Path(__file__).parents[2]


def check_whole(key: bytes, data: bytes) -> None:
    """A page must be one that somebody made for this key, from its first to its last byte."""
    seed = int.from_bytes(data[8:16], "little")
    assert data == page_bytes(seed, key, len(data)), f"key {key.hex()}: {explain(data)}"


def save_some(pages, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        keys = run(rng.randrange(5), rng.randrange(1, 7))
        seed = rng.randrange(1 << 40)
        pages.save(keys, b"".join(page_bytes(seed, k, PAGE) for k in keys)).wait(60)


def load_some(pages, rng: random.Random, saving: threading.Event, hits: list[int]) -> None:
    while not saving.is_set():
        keys = run(rng.randrange(5), rng.randrange(1, 7))
        memory = bytearray(PAGE * len(keys))
        loaded = pages.load(keys, memory).wait(60)
        for i in [i for i, good in enumerate(loaded) if good]:
            hits.append(i)
            check_whole(keys[i], bytes(memory[i * PAGE : (i + 1) * PAGE]))


@pytest.mark.parametrize("transport", ["posix", "auto", "memory"])
def test_threads_on_the_same_keys_never_see_a_mixture(store_dir: Path, rng, transport) -> None:
    """Bugs 14 and 37: saves, loads, evictions and clears of the same few keys."""
    config = small_config(store_dir, transport="posix" if transport == "memory" else transport)
    devices = None
    if transport == "memory":
        devices = memory_devices(config, seed=rng.randrange(99), plan=FaultPlan(reorder=True))
    hits: list[int] = []
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = store.namespace(**NAMESPACE)
        seeds = [rng.randrange(1 << 30) for _ in range(6)]

        over = threading.Event()

        def save_and_clear() -> None:
            try:
                for i in range(12):
                    save_some(pages, random.Random(seeds[0] + i), 12)
                    pages.clear()
                    save_some(pages, random.Random(seeds[1] + i), 6)
            finally:
                over.set()

        together(
            save_and_clear,
            lambda: save_some(pages, random.Random(seeds[2]), 150),
            lambda: load_some(pages, random.Random(seeds[3]), over, hits),
            lambda: load_some(pages, random.Random(seeds[4]), over, hits),
        )
        assert hits and store.stats().counters.get("internal_errors", 0) == 0
        check_space(store)


def test_look_ups_pins_and_statistics_from_many_threads(store_dir: Path, rng) -> None:
    with open_small(store_dir) as store:
        pages = store.namespace(**NAMESPACE)

        def look() -> None:
            for i in range(200):
                keys = run(i % 5, 6)
                hit = pages.match(keys).pages
                assert 0 <= hit <= 6
                pinned = pages.pin(keys)
                pages.unpin(keys, pinned)
                assert pages.contains(keys).shape == (6,)
                store.stats()
                store.namespace(**NAMESPACE)

        together(look, look, lambda: save_some(pages, rng, 100))
        check_space(store)
        assert not store._manager._entries[pages.namespace.digest()].pages.pins


class TestOneProcess:
    def test_two_stores_share_their_pages(self, store_dir: Path) -> None:
        with open_small(store_dir, segments=4, writers_max=2) as one:
            with open_small(store_dir, segments=4, writers_max=2) as two:
                a, b = client(one), client(two)
                assert all(a.save(run("a", 8))) and all(b.save(run("b", 8)))
                assert b.match(run("a", 8)) == 8 and a.match(run("b", 8)) == 8
                assert all(b.load(run("a", 8))) and all(a.load(run("b", 8)))
                assert b.save(run("a", 8)) == [True] * 8 and two.stats().pages == 16
            assert all(a.load(run("b", 8)))
            check_space(one)

    def test_a_writer_keeps_to_its_share(self, store_dir: Path) -> None:
        with open_small(store_dir, segments=4, writers_max=2) as one:
            with open_small(store_dir, segments=4, writers_max=2) as two:
                a, b = client(one), client(two)
                for i in range(8):
                    a.save(run(("a", i), 8))
                assert one.stats().used_bytes == 16 * PAGE
                assert all(b.save(run("b", 16))) and b.match(run("b", 16)) == 16
                assert two.stats().used_bytes == 16 * PAGE
                owners = [e.lease for e in one._catalog.segments().values()]
                assert sorted(owners) == [0, 0, 1, 1]
                check_space(one)
                check_space(two)

    def test_a_segment_adopted_while_it_is_read_is_checked_afterwards(self, store_dir) -> None:
        """Its former owner gave the slot up; the new one does not wait for its own load."""
        config = small_config(store_dir, verify=False)
        devices = memory_devices(config)
        mine = FaultyDevices(devices.media)
        owner = PrefixStore.open(config, transport_object=devices)
        with PrefixStore.open(config, transport_object=mine) as store:
            pages = client(store)
            assert all(client(owner).save(run("a", 2)))
            mine.arm(Fault("slow", "batch"))
            ticket = pages.pages.load(run("a", 2), bytearray(2 * PAGE))
            client(owner).pages.clear()
            owner.close()
            poll(lambda: all(pages.save(run("b", 16))), "the segment is adopted and written to")
            mine.release()
            assert not ticket.wait(20).any()

    def test_a_page_evicted_by_its_owner_is_a_miss_for_the_other(self, store_dir: Path) -> None:
        with open_small(store_dir, segments=4, writers_max=2) as one:
            with open_small(store_dir, segments=4, writers_max=2) as two:
                a, b = client(one), client(two)
                a.save(run("old", 8))
                assert all(b.load(run("old", 8)))
                for i in range(4):
                    a.save(run(i, 8))
                assert not any(b.load(run("old", 8)))
                assert b.match(run("old", 8)) == 0
                assert all(b.load(run(3, 8)))

    def test_a_reused_slot_is_a_miss_even_without_checksums(self, store_dir: Path) -> None:
        """The record's generation is looked at after the transfer; nothing else can tell here."""
        settings = {"segments": 4, "writers_max": 2, "verify": False}
        with open_small(store_dir, **settings) as one, open_small(store_dir, **settings) as two:
            a, b = client(one), client(two)
            a.save(run("old", 16))
            assert all(b.load(run("old", 16)))
            assert all(a.save(run("new", 16)))  # in the same slots
            assert not any(b.load(run("old", 16))) and all(b.load(run("new", 16)))

    def test_a_clear_by_one_is_seen_by_the_other(self, store_dir: Path) -> None:
        with open_small(store_dir, segments=4, writers_max=2) as one:
            with open_small(store_dir, segments=4, writers_max=2) as two:
                a, b = client(one), client(two)
                a.save(run("a", 4))
                assert a.pages.clear() == 4
                assert b.match(run("a", 4)) == 0 and not any(b.load(run("a", 4)))

    def test_segments_of_a_closed_store_are_adopted_with_their_pages(self, store_dir) -> None:
        with open_small(store_dir) as two:
            assert two.wait_restored(20)
            with open_small(store_dir) as one:
                assert all(client(one).save(run("a", 16)))
            b = client(two)
            assert b.match(run("a", 16)) == 16
            assert all(b.save(run("b", 6)))
            assert b.match(run("a", 16)) == 10 and all(b.load(run("a", 10)))
            check_space(two)

    def test_adopted_pages_that_nobody_looked_at_can_be_evicted(self, store_dir: Path) -> None:
        with open_small(store_dir) as two:
            assert two.wait_restored(20)
            with open_small(store_dir) as one:
                assert all(client(one).save(run("a", 8)))
                tail = PageKeys(run("b", 16).part(8, 16), 16, rooted=False)
                assert all(client(one).save(tail))
            for i in range(4):
                assert all(client(two).save(run(i, 16)))
            check_space(two)

    def test_threads_of_two_stores_never_see_a_mixture(self, store_dir: Path, rng) -> None:
        hits: list[int] = []
        settings = {"segments": 4, "writers_max": 2}
        with open_small(store_dir, **settings) as one, open_small(store_dir, **settings) as two:
            a, b = one.namespace(**NAMESPACE), two.namespace(**NAMESPACE)
            seeds = [rng.randrange(1 << 30) for _ in range(4)]
            over = threading.Event()

            def save_and_clear() -> None:
                try:
                    for i in range(8):
                        save_some(a, random.Random(seeds[0] + i), 12)
                        b.clear()
                        save_some(b, random.Random(seeds[1] + i), 6)
                finally:
                    over.set()

            together(
                save_and_clear,
                lambda: save_some(b, random.Random(seeds[1]), 100),
                lambda: load_some(a, random.Random(seeds[2]), over, hits),
                lambda: load_some(b, random.Random(seeds[3]), over, hits),
            )
            assert hits
            for store in (one, two):
                assert store.stats().counters.get("internal_errors", 0) == 0


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from store_kit import client, open_small, run
store = open_small(Path(sys.argv[1]), **eval(sys.argv[2]))
pages = client(store)
print("ready", flush=True)
for line in sys.stdin:
    word, name, count = line.split()
    call = {{"save": pages.save, "load": pages.load}}[word]
    print(sum(call(run(name, int(count)))), flush=True)
store.close()
"""


class Child:
    """Another process with the same directory open."""

    def __init__(self, path: Path, **settings: object) -> None:
        code = CHILD.format(tests=str(ROOT / "tests"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path), repr(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, word: str, name: str, count: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word} {name} {count}\n")
        self.process.stdin.flush()
        return int(self.answer())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode


class TestTwoProcesses:
    def test_pages_are_shared_and_the_segments_of_the_dead_are_adopted(self, store_dir) -> None:
        other = Child(store_dir, segments=4, writers_max=2)
        try:
            with open_small(store_dir, segments=4, writers_max=2) as store:
                pages = client(store)
                assert other.ask("save", "a", 16) == 16 and all(pages.load(run("a", 16)))
                assert all(pages.save(run("b", 12))) and other.ask("load", "b", 12) == 12
                # It evicts what this process has seen.
                assert other.ask("save", "c", 16) == 16
                assert not any(pages.load(run("a", 16))) and pages.match(run("a", 16)) == 0
                other.kill()
                assert pages.match(run("c", 16)) == 16 and all(pages.load(run("c", 16)))
        finally:
            other.kill()
        with open_small(store_dir, segments=4, writers_max=1) as store:
            pages = client(store)
            lease = store._lease.number
            poll(
                lambda: all(pages.save(run("d", 32))) and pages.match(run("d", 32)) == 32,
                "this process has all of the store",
            )
            assert {e.lease for e in store._catalog.segments().values()} == {lease}
            check_space(store)

    def test_a_process_that_closes_leaves_its_pages(self, store_dir: Path) -> None:
        other = Child(store_dir)
        assert other.ask("save", "a", 10) == 10
        assert other.close() == 0
        with open_small(store_dir) as store:
            assert all(client(store).load(run("a", 10)))


class TestFork:
    def test_a_child_must_open_its_own(self, store_dir: Path) -> None:
        with open_small(store_dir, segments=4, writers_max=2) as store:
            pages = client(store)
            assert all(pages.save(run("a", 4)))
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                said = self.in_the_child(store, pages, store_dir)
                os.write(writer, said.encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as stream:
                assert stream.read() == "fine"
            os.waitpid(child, 0)
            assert all(pages.load(run("a", 4))) and all(pages.load(run("child", 4)))
            assert all(pages.save(run("b", 4)))

    def test_a_fork_in_the_middle_of_saves_leaves_a_child_that_can_open(self, store_dir) -> None:
        with open_small(store_dir, segments=4, writers_max=2) as store:
            pages = client(store)
            over = threading.Event()

            def save() -> None:
                i = 0
                while not over.is_set():
                    pages.save(run(i % 9, 6))
                    i += 1

            with beside(save, stop=over.set):
                for _ in range(12):
                    child = os.fork()
                    if child == 0:
                        signal.alarm(30)
                        with open_small(store_dir, segments=4, writers_max=2) as own:
                            mine = client(own)
                            good = mine.match(run(1, 6)) <= 6 and len(mine.load(run(1, 6))) == 6
                        os._exit(0 if good else 1)
                    assert os.waitpid(child, 0)[1] == 0
            settle(store)
            assert all(pages.save(run("after", 6))) and all(pages.load(run("after", 6)))

    @staticmethod
    def in_the_child(store: PrefixStore, pages, store_dir: Path) -> str:
        try:
            calls = [
                lambda: pages.match(run("a", 4)),
                lambda: pages.save(run("a", 4)),
                lambda: pages.load(run("a", 4)),
                lambda: pages.pages.clear(),
                store.stats,
                lambda: store.namespace(**NAMESPACE),
            ]
            for call in calls:
                with pytest.raises(StoreClosedError, match="parent"):
                    call()
            store.close()
            with open_small(store_dir, segments=4, writers_max=2) as own:
                assert all(client(own).load(run("a", 4)))
                assert all(client(own).save(run("child", 4)))
        except BaseException as error:
            return repr(error)
        return "fine"


class TestClose:
    def test_a_hundred_times_leaves_nothing_behind(self, store_dir: Path, resources) -> None:
        """Bug 31."""

        def once() -> None:
            store = open_small(store_dir)
            pages = client(store).pages
            keys = run("a", 4)
            pages.save(keys, bytes(4 * PAGE))  # in flight when it closes
            pages.load(keys, bytearray(4 * PAGE))
            store.close()

        once()
        before = resources()
        for _ in range(100):
            once()
        assert resources() == before

    def test_many_threads_may_close(self, store_dir: Path) -> None:
        store = open_small(store_dir)
        assert all(client(store).save(run("a", 4)))
        together(*[store.close for _ in range(8)])
        with open_small(store_dir) as store:
            assert all(client(store).load(run("a", 4)))

    @pytest.mark.parametrize("repeat", range(4))
    def test_closing_under_load_ends_every_call(self, store_dir: Path, repeat: int) -> None:
        store = open_small(store_dir)
        pages = client(store).pages
        others = run("none", 300)
        busy = threading.Barrier(6)

        def until_closed(call: Callable[[], object]) -> Callable[[], None]:
            def work() -> None:
                call()
                busy.wait(30)
                with pytest.raises(StoreClosedError):
                    while True:
                        call()

            return work

        def save() -> None:
            assert pages.save(run("a", 8), bytes(8 * PAGE)).wait(60).shape == (8,)

        def load() -> None:
            memory = bytearray(8 * PAGE)
            if pages.load(run("a", 8), memory).wait(60).any():
                assert not any(memory)

        def close() -> None:
            busy.wait(30)
            store.close()

        together(
            until_closed(save),
            until_closed(load),
            until_closed(lambda: pages.match(others)),
            until_closed(lambda: pages.contains(others)),
            until_closed(store.stats),
            close,
        )

    def test_a_ticket_may_be_waited_for_after_the_close(self, store_dir: Path) -> None:
        store = open_small(store_dir)
        pages = client(store).pages
        save = pages.save(run("a", 4), bytes(4 * PAGE))
        assert save.wait(60).all()
        load = pages.load(run("a", 4), bytearray(b"x" * 4 * PAGE))
        store.close()
        assert load.wait(1).all() and save.wait(1).all()


def test_closing_while_another_store_of_the_directory_is_used(store_dir: Path) -> None:
    with open_small(store_dir, segments=4, writers_max=2) as one:
        for i in range(10):
            with open_small(store_dir, segments=4, writers_max=2) as two:
                assert all(client(two).save(run(i, 2)))
            assert all(client(one).load(run(i, 2))) or i > 6
        settle(one)
