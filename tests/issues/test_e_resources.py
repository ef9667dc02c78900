"""Known bugs, E: speed, restarts, and what is used up."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_kit import (
    MIB,
    PAGE,
    chain,
    check_space,
    client,
    open_faulty,
    open_small,
    run,
    settle,
    small_config,
)

from tutti_core import (
    ConfigError,
    Namespace,
    PageKeys,
    PrefixStore,
    UnsupportedError,
    as_memory,
)
from tutti_core.io.posix import PosixTransport
from tutti_core.io.transport import Device
from tutti_core.testing import page_bytes

ROOT = Path(__file__).parents[2]


# ---- 43: look-ups and waits ----
def test_bug_43_ten_thousand_misses_are_answered_from_memory(store_dir: Path) -> None:
    """Fault: each missing key costs a file operation; a miss costs more than a recompute."""
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("k", 4)))
        keys = run("none", 10_000)
        before = devices.operations
        match_s, contains_s = [], []
        for _ in range(3):  # the machine may be busy with something else
            begun_s = time.perf_counter()
            assert pages.pages.match(keys).pages == 0
            match_s.append(time.perf_counter() - begun_s)
            assert not pages.pages.contains(keys).any()
            contains_s.append(time.perf_counter() - begun_s)
        assert devices.operations == before
        assert min(match_s) < 0.05, "where the first is missing the others are not looked for"
        assert min(contains_s) < 1.0, "not even 100 us a key, on any machine"


def test_bug_43_nothing_sleeps_while_a_page_is_loaded(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the end of a transfer is looked for every 10 ms, and that is how long a load takes."""
    slept: list[str] = []
    real = time.sleep

    def sleep(seconds: float) -> None:
        slept.append(threading.current_thread().name)
        real(seconds)

    with open_small(store_dir) as store:
        pages, memory = client(store).pages, bytearray(PAGE)
        assert pages.save(run("k", 1), bytes(PAGE)).wait(20).all()
        settle(store)
        monkeypatch.setattr(time, "sleep", sleep)
        times = []
        for _ in range(50):
            begun_s = time.perf_counter()
            assert pages.load(run("k", 1), memory).wait(20).all()
            times.append(time.perf_counter() - begun_s)
        assert not slept and min(times) < 0.005


def test_bug_43_a_stale_page_costs_one_read(store_dir: Path) -> None:
    """Fault: a page that is known to be bad is read again at each request."""
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        assert all(pages.save(run("k", 1)))
        devices.flip_bit(0, MIB)
        assert pages.load(run("k", 1)) == [False]
        before = devices.stats().read_items
        for _ in range(3):
            assert pages.load(run("k", 1)) == [False] and pages.match(run("k", 1)) == 0
        assert devices.stats().read_items == before


# ---- 44: restarts ----
def test_bug_44_a_clean_restart_loses_nothing(store_dir: Path) -> None:
    """Fault: after a restart nothing is found, or keys are and their pages are not."""
    config = small_config(store_dir, segments=20)
    spaces = [{}, {"model": "b", "page_bytes": 100}, {"model": "c", "key_bytes": 32}]
    names = [("t", i) for i in range(12)]
    with PrefixStore.open(config) as store:
        for fields in spaces:
            pages = client(store, **fields)
            width = pages.pages.namespace.key_bytes
            for cut in (3, 7, 12):
                branch = chain(*names[:cut], ("end", cut), width=width)
                assert all(pages.save(branch))
            assert all(pages.save(run("x", 4, width=width, rooted=False)))
        count = store.stats().pages
    for _ in range(2):
        with PrefixStore.open(config) as store:
            assert store.stats().pages == count
            for fields in spaces:
                pages = client(store, **fields)
                width = pages.pages.namespace.key_bytes
                for cut in (3, 7, 12):
                    branch = chain(*names[:cut], ("end", cut), width=width)
                    assert pages.match(branch) == cut + 1 and all(pages.load(branch))
                assert all(pages.load(run("x", 4, width=width, rooted=False)))
            check_space(store)


KILLED = """
import os, signal, sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from store_kit import client, open_small, run
from tutti_core.testing import page_bytes
store = open_small(Path(sys.argv[2]), segments=8)
pages = client(store)
print(sum(pages.save(run("told", 20))), flush=True)
data = b"".join(page_bytes(0, key, 4096) for key in run("untold", 30))
pages.pages.save(run("untold", 30), data)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_bug_44_after_a_kill_what_is_found_is_whole(store_dir: Path) -> None:
    """Fault: the same where the process did not get to close."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(ROOT / "tests"), str(store_dir)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == -signal.SIGKILL and process.stdout == "20\n", process.stderr
    with open_small(store_dir, segments=8) as store:
        pages = client(store)
        for name, least in (("told", 20), ("untold", 0)):
            keys = run(name, 30)
            found = pages.match(keys)
            assert found >= least
            assert pages.load(keys) == [True] * found + [False] * (30 - found)
        check_space(store)


# ---- 46: file handles ----
def test_bug_46_no_file_handle_is_left_behind(
    store_dir: Path, resources: Callable[[], tuple[int, int]]
) -> None:
    """Fault: each transfer leaves a file open, and after some hours none can be opened."""
    with open_small(store_dir) as store:
        pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=1)
        memory = bytearray(4 * PAGE)

        def work(start: int, stop: int) -> None:
            for i in range(start, stop):
                keys = run(i % 40, 4)
                pages.save(keys, memory).wait(20)
                pages.load(keys, memory).wait(20)
                pages.load(run("none", 4), memory).wait(20)
                with pytest.raises(ValueError):
                    pages.save(keys, memory[:10])

        work(0, 20)
        before = resources()
        work(20, 400)
        assert resources() == before


def test_bug_46_calls_that_fail_leave_none_either(
    store_dir: Path,
    resources: Callable[[], tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: the same, only where a transfer or an open fails."""

    def refused(*arguments: object) -> int:
        raise OSError(5, "planted")

    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 2)))
        before = resources()
        for i in range(40):
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", refused)
                assert not any(pages.save(run(i, 2)))
                patch.setattr(os, "preadv", refused)
                pages.load(run("k", 2))
            with pytest.raises(ConfigError):
                open_small(store_dir, segment=65536)  # of another size than it was made with
        assert resources() == before


# ---- 48: O_DIRECT ----
@pytest.mark.parametrize("shift", [0, 1, 64, 511, 4095])
@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 999])
@pytest.mark.parametrize("transport", ["posix", "auto", "posix with O_DIRECT"])
def test_bug_48_no_memory_is_too_odd(disk_dir: Path, transport: str, shift: int, size: int) -> None:
    """Fault: memory that is not aligned to blocks is refused with EINVAL, or moved wrongly."""
    chosen = "auto" if transport == "auto" else "posix"
    config = small_config(disk_dir, transport=chosen, durability="none")
    direct = None
    if transport.endswith("DIRECT"):
        PrefixStore.open(config).close()
        try:
            pool = disk_dir / "pool.tutti"
            direct = PosixTransport([Device(str(pool), pool.stat().st_size)], direct=True)
        except UnsupportedError as error:
            pytest.skip(f"no O_DIRECT here: {error}")
    with PrefixStore.open(config, transport_object=direct) as store:
        pages = store.namespace(model="m", page_bytes=size, page_tokens=1)
        keys = run("k", 3)
        memory = np.zeros(3 * size + 2 * PAGE, np.uint8)
        start = -as_memory(memory).address % PAGE + shift
        view = memory[start : start + 3 * size]
        data = b"".join(page_bytes(0, key, size) for key in keys)
        view[:] = np.frombuffer(data, np.uint8)
        assert pages.save(keys, view).wait(20).all()
        view[:] = 0
        assert pages.load(keys, view).wait(20).all() and view.tobytes() == data
        assert not memory[:start].any() and not memory[start + 3 * size :].any()


@pytest.mark.parametrize("has_uring", [True, False])
def test_bug_48_what_was_fallen_back_to_is_said(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch, has_uring: bool
) -> None:
    """Fault: nobody can see that transfers go through the page cache."""
    if not has_uring:
        monkeypatch.setitem(sys.modules, "tutti_core.io.uring", None)
    with open_small(disk_dir, transport="auto", durability="none") as store:
        transport = store.stats().transport
        said = any("uring" in note for note in transport.notes)
        assert said if transport.name == "posix" else has_uring


@pytest.mark.parametrize("transport", ["posix", "auto"])
@pytest.mark.parametrize("registered", [True, False])
def test_bug_48_memory_that_is_shared_with_other_processes(
    disk_dir: Path, transport: str, registered: bool
) -> None:
    """Fault: memory that is a shared mapping, as the engine's may be, cannot be registered."""
    with open_small(disk_dir, transport=transport, durability="none") as store:
        pages, keys = client(store).pages, run("k", 2)
        data = b"".join(page_bytes(0, key, PAGE) for key in keys)
        memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_SHARED)
        region = store.register(memory) if registered else None
        memory[:] = data
        assert pages.save(keys, memory).wait(20).all()
        memory[:] = bytes(len(memory))
        assert pages.load(keys, memory).wait(20).all() and memory[:] == data
        if region is not None:
            store.unregister(region)


@pytest.mark.parametrize("transport", ["posix", "auto"])
def test_bug_48_a_file_system_that_may_lack_it(store_dir: Path, transport: str) -> None:
    """Fault: on a file system in memory, or one of layers, the open of the files fails."""
    with open_small(store_dir, transport=transport) as store:  # in /dev/shm where there is one
        assert all(client(store).save(run("k", 3)))
    with open_small(store_dir, transport="posix") as store:
        assert all(client(store).load(run("k", 3))), "the same bytes whatever moved them"


# ---- 49: models of another shape ----
@pytest.mark.parametrize("field", ["page_bytes", "page_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_bug_49_a_page_of_no_size_is_refused(field: str, value: int) -> None:
    """Fault: a pool without pages is taken, and some later call divides by zero."""
    with pytest.raises(ConfigError, match=field):
        Namespace(**{"model": "m", "page_bytes": PAGE, "page_tokens": 1, field: value})


def test_bug_49_a_pool_without_pages_fails_the_attach(hicache: Any, store_dir: Path) -> None:
    """Fault: the same where the engine registers such a pool."""
    pool = hicache.make_host_pool("mha", "page_first")
    pool.page_size = 0
    with pytest.raises(UnsupportedError, match=r"'kv'.*page size 0"):
        hicache.Rank(store_dir, pool)
    assert not store_dir.exists(), "nothing was touched"


def test_bug_49_a_device_pool_without_layers_or_rows_is_refused(hicache: Any) -> None:
    """Fault: the same on the direct route."""
    import torch

    from tutti_sglang.device_pools import describe_entry

    def entry(**changes: Any) -> Any:
        whole = {
            "name": "odd",
            "page_size": 16,
            "_row_span": 16,
            "layer_mapping": {0: 0},
            "components": [[torch.zeros(64, 8)]],
        }
        return SimpleNamespace(**{**whole, **changes})

    for changes, word in (
        ({"layer_mapping": {}}, "no layers"),
        ({"components": [[torch.zeros(64, 0)]]}, "(0 bytes|contiguous)"),
        ({"components": [[torch.zeros(8, 8)]]}, "less than a page"),
    ):
        with pytest.raises(UnsupportedError, match=f"'odd'.*{word}"):
            describe_entry(entry(**changes))


@pytest.mark.parametrize(
    ("name", "kind", "policy", "last"),
    [
        ("swa", "mha", "trailing_pages", 2),
        ("mamba", "mamba", "trailing_pages", 1),
        ("indexer", "index_k", "all_pages", 6),
    ],
)
def test_bug_49_a_hit_is_what_every_pool_can_restore(
    hicache: Any, store_dir: Path, name: str, kind: str, policy: str, last: int
) -> None:
    """Fault: windows, states or indices are not stored, and a full hit is announced."""
    pools = {
        "kv": hicache.make_host_pool("mha", "page_first"),
        name: hicache.make_host_pool(kind, "page_first"),
    }
    keys = hicache.keys_of(6)

    def hit() -> int:
        found = rank.exists_with(keys, name, policy, last)
        pages: int = found.kv_hit_pages
        assert pages == 0 or max(found.restorable_prefix_pages) == pages
        return pages

    with hicache.Rank(store_dir, pools) as rank:
        assert rank.set(keys, range(6)) == [True] * 6
        assert rank.exists(keys) == 6 and hit() == 0
        assert rank.set_pool(name, keys[:3], [0, 1, 2]) == [True] * 3
        assert hit() == 3
        assert rank.set_pool(name, keys[4:], [4, 5]) == [True] * 2
        assert hit() == (3 if policy == "all_pages" else 6)
        assert rank.set_pool(name, keys[3:4], [3]) == [True] and hit() == 6


def test_bug_49_pages_of_keys_alone_come_back_whole(hicache: Any, store_dir: Path) -> None:
    """Fault: a page without values is taken for one of twice its size."""
    pools = {
        "kv": hicache.make_host_pool("mha", "page_first"),
        "indexer": hicache.make_host_pool("index_k", "page_first"),
    }
    keys = hicache.keys_of(3)
    with hicache.Rank(store_dir, pools) as rank:
        rank.fill(1)
        before = [rank.read(page, "indexer") for page in range(3)]
        assert rank.storage._pools["indexer"].pages.page_bytes == len(before[0])
        assert rank.set_pool("indexer", keys, [0, 1, 2]) == [True] * 3
        rank.fill(2)
        assert rank.get_pool("indexer", keys, [6, 5, 4]) == [True] * 3
        assert [rank.read(page, "indexer") for page in (6, 5, 4)] == before


def test_bug_49_a_window_that_is_not_stored_restores_nothing(
    linker: Any, hicache: Any, store_dir: Path
) -> None:
    """Fault: the same on the direct route."""
    keys = hicache.keys_of(4)
    for number, kind in enumerate(("swa", "mamba")):
        with linker(hicache.make_device_pools(kind), store_dir / str(number)) as rig:
            assert rig.linker.offload(rig.transfers(keys, [1, 2, 3, 4])[:1]) and rig.result()
            assert rig.lookup(keys) == []
            assert rig.offload(keys, [1, 2, 3, 4]) and rig.lookup(keys)[-1] == 4


def test_the_keys_of_these_tests_are_packed(store_dir: Path) -> None:
    """What the short names of the tests' kit stand for."""
    assert isinstance(run("k", 2), PageKeys) and len(run("k", 2).data) == 32
