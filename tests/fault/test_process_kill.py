"""A real process, saving on a real file system, is killed with SIGKILL; then all is looked at.

The child is forked (the parent has no store open then), reports each stored chain through a pipe,
and dies after a seeded number of reports, wherever it is at that moment.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
from pathlib import Path

import pytest
from store_kit import check_space, client, disk_bytes, open_small, run, small_config

from tutti_core import PrefixStore, UnsupportedError

THREADS = 3
CHAINS = 10
PAGES_MAX = 9


def chain_of(name: int) -> object:
    return run(name, 1 + name * 7 % PAGES_MAX)


def child(config, seed: int, pipe: int, clears: bool) -> None:
    """Save and load for ever; report each chain that is stored."""
    store = PrefixStore.open(config)

    def work(number: int) -> None:
        rng = random.Random(seed * THREADS + number)
        pages = client(store)
        while True:
            name = rng.randrange(CHAINS)
            if rng.random() < 0.7:
                stored = pages.save(chain_of(name))
                if all(stored):
                    os.write(pipe, bytes([name]))
            elif clears and rng.random() < 0.1:
                pages.pages.clear()
            else:
                pages.load(chain_of(name))

    for number in range(THREADS):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    threading.Event().wait()


def run_and_kill(config, seed: int, reports: int, clears: bool) -> set[int]:
    """Names of the chains that the child reported before it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            child(config, seed, writer, clears)
        finally:
            os._exit(3)
    os.close(writer)
    seen = b""
    try:
        while len(seen) < reports:
            ready, _, _ = select.select([reader], [], [], 60)
            assert ready, "the child reports nothing"
            data = os.read(reader, 1)
            assert data, "the child died by itself"
            seen += data
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    while data := os.read(reader, 4096):
        seen += data
    os.close(reader)
    assert os.WIFSIGNALED(status)
    return set(seen)


def verify(config, promised: set[int]) -> int:
    """Everything that matches loads bit-exact; what was promised is there. Returns the hits."""
    with PrefixStore.open(config) as store:
        pages = client(store)
        for name in range(CHAINS):
            keys = chain_of(name)
            hit = pages.match(keys)
            contained = pages.contains(keys)
            assert pages.load(keys) == contained, "a page that is offered does not load"
            assert contained[:hit] == [True] * hit
            assert name not in promised or hit == len(keys), f"chain {name} is gone"
        check_space(store)
        assert all(pages.save(chain_of(0))) and all(pages.load(chain_of(0)))
        assert disk_bytes(config.path) <= config.capacity
        return pages.oracle.hits


def needs(transport: str, path: Path) -> None:
    try:
        open_small(path, transport=transport).close()
    except UnsupportedError as error:
        pytest.skip(f"{transport} does not work here: {error}")


@pytest.mark.parametrize("transport", ["posix", "uring"])
def test_a_store_with_room_keeps_what_it_promised(disk_dir: Path, rng, transport: str) -> None:
    needs(transport, disk_dir.parent / "probe")
    config = small_config(disk_dir, segments=10, transport=transport)
    promised: set[int] = set()
    for life in range(4):
        promised |= run_and_kill(config, rng.randrange(1 << 30), 1 + life * 2, clears=False)
        assert verify(config, promised) > 0


@pytest.mark.parametrize(("transport", "lives"), [("posix", 5), ("uring", 4)])
def test_a_store_that_evicts_and_clears_is_never_wrong(disk_dir, rng, transport, lives) -> None:
    needs(transport, disk_dir.parent / "probe")
    config = small_config(disk_dir, segments=3, transport=transport)
    hits = 0
    for _ in range(lives):
        run_and_kill(config, rng.randrange(1 << 30), rng.randrange(1, 40), clears=True)
        hits += verify(config, set())
    assert hits > 0


@pytest.mark.parametrize("moment", range(4))
def test_a_process_killed_while_it_creates_the_store(disk_dir: Path, rng, moment: int) -> None:
    """Whatever is there then, the next open works."""
    config = small_config(disk_dir)
    calls = [os.posix_fallocate, os.fsync, os.rename, os.fsync]
    pid = os.fork()
    if pid == 0:
        target = calls[moment].__name__ if moment < 3 else "rename"

        def die(*_: object, **__: object) -> None:
            if moment == 3:
                os.replace(*_)  # type: ignore[call-overload]
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, target, die)
        PrefixStore.open(config).close()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    with PrefixStore.open(config) as store:
        assert all(client(store).save(run("a", 8)))
