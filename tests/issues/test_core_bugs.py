"""Bugs that users of other stores have met, at the level of the core; one test or more each.

The numbers are those of the list that the project started from. Those that concern the SGLang
plugin or a GPU are tested there.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    MIB,
    PAGE,
    chain,
    check_space,
    client,
    disk_bytes,
    loose,
    memory_devices,
    open_faulty,
    open_small,
    run,
    settle,
    small_config,
)

from tutti_core import PageKeys, PrefixStore, as_memory
from tutti_core.io.posix import PosixTransport
from tutti_core.testing import Fault, page_bytes

ROOT = Path(__file__).parents[2]
TOKENS = list(range(64))


# ---- A. identity ----
@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp8"},
        {"weights": "revision 2"},
        {"model": "org-m"},
        {"layout": "page_first"},
        {"shard": "tp 1/2"},
        {"pool": "draft"},
        {"page_tokens": 2},
        {"extra": {"rope": "yarn"}},
    ],
    ids=lambda o: next(iter(o)),
)
def test_bugs_01_02_03_another_configuration_sees_nothing(store_dir: Path, other: dict) -> None:
    with open_small(store_dir) as store:
        mine, theirs = client(store), client(store, **other)
        assert all(mine.save(run("k", 3)))
        assert theirs.match(run("k", 3)) == 0 and not any(theirs.contains(run("k", 3)))
        assert not any(theirs.load(run("k", 3)))
        assert all(theirs.save(run("k", 3), seed=5)) and all(theirs.load(run("k", 3)))
        assert mine.match(run("k", 3)) == 3 and all(mine.load(run("k", 3)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"salt": "A"}, {"salt": "B"}),
        ({"salt": "X"}, {"lora": "X"}),
        ({"salt": "X"}, {"tenant": "X"}),
        ({"lora": "ab", "salt": "c"}, {"lora": "a", "salt": "bc"}),
        ({"salt": ""}, {}),
        ({"salt": "", "lora": ""}, {"salt": ""}),
    ],
)
def test_bugs_04_05_salt_lora_and_tenant_keep_sequences_apart(store_dir, a: dict, b: dict) -> None:
    with open_small(store_dir) as store:
        pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=16)
        first, second = pages.keys(TOKENS, **a), pages.keys(TOKENS, **b)
        assert not set(first) & set(second), "related keys"
        pages.save(first, bytes(4 * PAGE)).wait(20)
        assert pages.match(first).pages == 4 and pages.match(second).pages == 0


def test_bug_07_one_key_reaches_every_call(store_dir: Path) -> None:
    with open_small(store_dir) as store:
        pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=16)
        for tokens in (TOKENS, pages.keys(TOKENS, tenant="t")):
            assert pages.save(tokens, bytes(4 * PAGE)).wait(20).all()
            assert pages.match(tokens).pages == 4 and pages.contains(tokens).all()
            assert pages.load(tokens, bytearray(4 * PAGE)).wait(20).all()
            assert pages.pin(tokens) == 4
            pages.unpin(tokens, 4)


def test_bug_09_keys_do_not_depend_on_the_process(store_dir: Path) -> None:
    with open_small(store_dir) as store:
        pages = store.namespace(
            model="m", page_bytes=PAGE, page_tokens=16, extra={"b": "", "a": ""}
        )
        expected = pages.keys(TOKENS, salt="s", lora="l").data.hex()
        assert pages.save(pages.keys(TOKENS), bytes(4 * PAGE)).wait(20).all()
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from store_kit import open_small
with open_small(Path(sys.argv[1])) as store:
    pages = store.namespace(model="m", page_bytes=4096, page_tokens=16, extra={{"a": "", "b": ""}})
    tokens = list(range(64))
    print(pages.keys(tokens, salt="s", lora="l").data.hex(), pages.match(tokens).pages)
"""
    for seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        said = subprocess.run(
            [sys.executable, "-c", code, str(store_dir)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert said.split() == [expected, "4"]


# ---- B. corruption and partial writes ----
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_bug_11_a_failed_save_is_not_visible(store_dir: Path, code: int) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        devices.arm(Fault("torn", "write", errno=code))
        assert pages.save(run("k", 1)) == [False]
        assert pages.match(run("k", 1)) == 0 and pages.load(run("k", 1)) == [False]
        assert store.stats().used_bytes == 0
        check_space(store)


def test_bug_15_a_short_write_is_not_a_write(store_dir: Path, monkeypatch) -> None:
    """The file system takes half of the page and then no more."""
    real = os.pwritev
    with open_small(store_dir) as store:
        pages = client(store)
        calls = []

        def half(descriptor: int, buffers, offset: int) -> int:
            calls.append(offset)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "full")
            return real(descriptor, [memoryview(buffers[0])[: PAGE // 2]], offset)

        monkeypatch.setattr(os, "pwritev", half)
        assert pages.save(run("k", 1)) == [False] and len(calls) == 2
        monkeypatch.undo()
        assert pages.match(run("k", 1)) == 0 and store.stats().used_bytes == 0
        assert pages.save(run("k", 1)) == [True] == pages.load(run("k", 1))
        check_space(store)


@pytest.mark.parametrize("step", [1, 100, PAGE - 1])
def test_bug_16_short_transfers_are_continued(store_dir: Path, monkeypatch, step: int) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(
        os,
        "pwritev",
        lambda fd, b, at: write(fd, [memoryview(b[0])[: max(step, len(b[0]) // 3)]], at),
    )
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, b, at: read(fd, [memoryview(b[0])[: max(step, len(b[0]) // 3)]], at),
    )
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 2))) and all(pages.load(run("k", 2)))


@pytest.mark.parametrize("length", [0, 100, PAGE - 1])
def test_bug_17_a_page_cut_short_is_a_miss_and_can_be_saved_again(store_dir, length: int) -> None:
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 1)))
        os.truncate(store_dir / "pool.tutti", MIB + length)
        assert pages.load(run("k", 1)) == [False] and pages.match(run("k", 1)) == 0
        settle(store)
        assert store.stats().pages == 0
        assert pages.save(run("k", 1)) == [True] == pages.load(run("k", 1))


def test_bug_18_any_flipped_bit_is_noticed_and_spares_the_pages_before_it(store_dir, rng) -> None:
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        for _ in range(30):
            pages.pages.clear()
            assert all(pages.save(run("k", 4)))
            where = store._manager.locate(
                store._manager._entries[pages.name], run("k", 4).data, 2, True
            )
            _, offset = store._manager.extents(where.slot, PAGE)
            devices.flip_bit(0, int(offset[0]) + rng.randrange(PAGE), rng.randrange(8))
            assert pages.load(run("k", 4)) == [True, True, False, True]
            assert pages.match(run("k", 4)) == 2
        assert store.stats().counters["checksum_errors"] == 30


@pytest.mark.parametrize(
    ("written", "read"), [(2 * PAGE, PAGE), (PAGE, 2 * PAGE), (PAGE, PAGE - 1)]
)
def test_bug_19_a_page_of_another_length_is_not_data(store_dir, written: int, read: int) -> None:
    with open_small(store_dir) as store:
        one, other = client(store, page_bytes=written), client(store, page_bytes=read)
        assert all(one.save(run("k", 2)))
        assert other.match(run("k", 2)) == 0 and not any(other.load(run("k", 2)))
        with pytest.raises(ValueError):
            one.pages.load(run("k", 2), bytearray(2 * written - 1))


def test_bug_23_an_evicted_page_is_not_promised_from_that_moment_on(store_dir: Path) -> None:
    config = small_config(store_dir)
    devices = memory_devices(config)
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = client(store)
        assert all(pages.save(run("old", 16)))
        with devices.held():  # the new page has its slot, but is not written yet
            ticket = pages.pages.save(run("new", 1), bytes(PAGE))
            while not store.stats().counters.get("evicted_pages"):
                pass
            left = pages.match(run("old", 16))
            assert left < 16 and pages.contains(run("old", 16)).count(True) == left
        assert ticket.wait(20).all()
    with PrefixStore.open(config, transport_object=devices.reopen()) as store:
        assert client(store).match(run("old", 16)) == left


# ---- C. hangs and dead workers ----
@pytest.mark.parametrize("op", ["write", "flush", "batch"])
def test_bug_26_one_failure_does_not_end_the_saving(store_dir: Path, op: str) -> None:
    with open_faulty(store_dir, io_timeout_s=0.2) as (store, devices):
        pages = client(store)
        kind = "slow" if op == "batch" else "error"
        for i in range(5):
            devices.arm(Fault(kind, op, polls=1))  # type: ignore[arg-type]
            assert not any(pages.save(run(("bad", i), 1)))
            assert pages.match(run(("bad", i), 1)) == 0
            assert all(pages.save(run(("good", i), 1))) and all(pages.load(run(("good", i), 1)))
        assert store.stats().counters.get("internal_errors", 0) == 0


@pytest.mark.parametrize("rooted", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_bug_27_a_load_that_failed_is_not_offered_again(store_dir, rooted, restarted) -> None:
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


def test_bug_30_no_room_is_an_answer(store_dir: Path) -> None:
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 16))) and pages.pages.pin(run("k", 16)) == 16
        for i in range(3):
            assert pages.save(run(i, 4)) == [False] * 4
        assert store.stats().counters["pages_refused_full"] == 12
        pages.pages.unpin(run("k", 16), 16)
        assert pages.save(run("x", 4)) == [True] * 4


# ---- D. capacity and eviction ----
@pytest.mark.parametrize("preallocate", ["segment", "full"])
def test_bug_34_the_disk_never_holds_more_than_the_capacity(store_dir, rng, preallocate) -> None:
    with PrefixStore.open(
        store_dir, capacity="12MiB", transport="posix", preallocate=preallocate
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


def test_bug_36_the_default_evicts_and_a_new_page_is_the_newest(store_dir: Path) -> None:
    with PrefixStore.open(store_dir, capacity="10MiB", transport="posix") as store:
        pages = client(store)
        for i in range(30):
            assert all(pages.save(run(("fill", i), 20)))
        for i in range(10):
            fresh, force = chain(("fresh", i)), run(("force", i), 20)
            assert all(pages.save(fresh)) and all(pages.save(force))
            assert pages.match(fresh) == 1 and all(pages.load(fresh))


def test_bug_36_holds_after_a_restart_too(store_dir: Path) -> None:
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


def test_bug_39_usage_after_a_restart_is_what_is_on_the_disk(store_dir: Path) -> None:
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


# ---- E. restart and resources ----
def test_bug_44_a_clean_restart_loses_nothing(store_dir: Path) -> None:
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


def test_bug_46_no_file_handle_is_left_behind(store_dir: Path, resources) -> None:
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
        work(20, 700)
        assert resources() == before


@pytest.mark.parametrize("shift", [0, 1, 64, 511, 4095])
@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 999])
@pytest.mark.parametrize("transport", ["posix", "auto", "posix with O_DIRECT"])
def test_bug_48_no_memory_is_too_odd(disk_dir: Path, transport: str, shift: int, size: int) -> None:
    config = small_config(disk_dir, transport="auto" if transport == "auto" else "posix")
    direct = None
    if transport.endswith("DIRECT"):
        from tutti_core import UnsupportedError
        from tutti_core.io.transport import Device

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


def test_bug_48_what_was_fallen_back_to_is_said(disk_dir: Path) -> None:
    with PrefixStore.open(small_config(disk_dir, transport="auto")) as store:
        transport = store.stats().transport
        assert transport.name == "uring" or any("uring" in note for note in transport.notes)


def test_the_keys_of_these_tests_are_packed(store_dir: Path) -> None:
    assert isinstance(run("k", 2), PageKeys) and len(run("k", 2).data) == 32
