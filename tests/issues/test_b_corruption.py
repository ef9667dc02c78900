"""Known bugs, B: pages that are wrong, half there, or said to be there when they are not."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from gds_stand_in import Shifted, StandInCuda, StandInKvikio
from store_kit import (
    MIB,
    PAGE,
    SEGMENT,
    Client,
    chain,
    check_space,
    client,
    load_in_parts,
    memory_devices,
    open_faulty,
    open_small,
    poll,
    run,
    settle,
    small_config,
)
from thread_kit import beside
from tier_kit import DRAM, check_tiers, dram, open_tiers, quiesce, tiered_config

from tutti_core import ConfigError, PageFragments, PageKeys, PrefixStore
from tutti_core.io.gds import GdsTransport
from tutti_core.io.posix import PosixTransport
from tutti_core.testing import FOREVER, Fault, explain, page_bytes
from tutti_core.tiers import segments

ROOT = Path(__file__).parents[2]


# ---- 11, 12, 14: pages that are being written ----
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_bug_11_a_failed_save_is_not_visible(store_dir: Path, code: int) -> None:
    """Fault: a page is announced before it is written; the write fails, and a later load hits."""
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        devices.arm(Fault("torn", "write", errno=code))
        with devices.held():
            ticket = pages.pages.save(run("k", 1), page_bytes(0, run("k", 1)[0], PAGE))
            poll(lambda: store.stats().used_bytes > 0, "the page has its slot")
            assert pages.match(run("k", 1)) == 0 and pages.contains(run("k", 1)) == [False]
        assert not ticket.wait(20).any()
        assert pages.match(run("k", 1)) == 0 and pages.load(run("k", 1)) == [False]
        assert store.stats().used_bytes == 0
        check_space(store)


def test_bug_11_the_engine_is_told_of_a_failed_save(hicache: Any, store_dir: Path) -> None:
    """Fault: the same, as the engine sees it."""
    keys = hicache.keys_of(2)
    with hicache.Rank(store_dir, faulty=True) as rank:
        rank.devices.arm(Fault("error", "write", index=1, errno=errno.ENOSPC))
        assert rank.set(keys, [0, 1]) == [True, False]
        assert rank.exists(keys) == 1 and rank.get(keys, [2, 3]) == [True, False]
        assert rank.set(keys, [0, 1]) == [True, True] and rank.exists(keys) == 2


def test_bug_11_pages_that_cannot_be_written_down_are_not_promised(store_dir: Path) -> None:
    """Fault: a save that ended in memory is announced for ever, though its write failed later."""
    config = tiered_config(store_dir, write_policy="write_back", io_timeout_s=0.3)
    devices = memory_devices(config)
    with open_tiers(config, devices) as store:
        pages = client(store)
        devices.arm(Fault("error", "write", count=FOREVER, errno=errno.ENOSPC))
        saved = {i: pages.save(chain(i)) == [True] for i in range(40)}
        assert any(saved.values()), "memory took some"
        assert not store.flush(0.3), "they are in memory only"
        found = [i for i in saved if pages.match(chain(i))]
        assert all(pages.load(chain(i)) == [True] for i in found)
        assert found == [i for i, good in saved.items() if good], "what was taken is kept"
    with open_tiers(config, devices.reopen()) as store:
        assert not any(client(store).match(chain(i)) for i in saved)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_bug_12_memory_that_is_refilled_at_once_changes_no_page(
    store_dir: Path, policy: str
) -> None:
    """Fault: a buffer is handed to the next page while the last one is still being written."""
    config = tiered_config(store_dir, segments=16, write_policy=policy)
    memory = bytearray(PAGE)  # the only one; and the DRAM tier is a sixth of what is saved
    names = [chain(i) for i in range(6 * DRAM // PAGE)]
    with open_tiers(config, memory_devices(config)) as store:  # which write as late as they may
        pages = client(store)
        for i, keys in enumerate(names):
            memory[:] = page_bytes(i, keys[0], PAGE)
            ticket = pages.pages.save(keys, memory)
            assert ticket.wait(20).all()
            memory[:] = b"\xff" * PAGE
        assert store.flush(20)
        found = 0
        for i, keys in enumerate(names):
            if pages.pages.load(keys, memory).wait(20).all():
                assert memory == page_bytes(i, keys[0], PAGE), explain(memory)
                found += 1
        assert found == len(names), "there was room for all"
        check_tiers(store)


@pytest.mark.parametrize("transport", ["posix", "auto"])
def test_bug_12_more_pages_than_bounce_memory(disk_dir: Path, transport: str) -> None:
    """Fault: the same in the memory through which pages pass that are not aligned."""
    config = small_config(
        disk_dir,
        segments=24,
        transport=transport,
        bounce=2 * PAGE,
        transfer_max=PAGE,
        durability="none",
    )
    size, count = PAGE + 1, 60
    keys = run("k", count)
    data = b"".join(page_bytes(3, key, size) for key in keys)
    memory = bytearray(count * size)
    with PrefixStore.open(config) as store:
        pages = store.namespace(model="m", page_bytes=size, page_tokens=1)
        memory[:] = data
        tickets = [
            pages.save(chain_to, memory[first * size : (first + 20) * size], first)
            for first in range(0, count, 20)
            for chain_to in [run("k", first + 20)]
        ]
        assert all(ticket.wait(20).all() for ticket in tickets)
        memory[:] = bytes(len(memory))
        assert pages.load(keys, memory).wait(20).all() and memory == data


def test_bug_14_a_load_beside_saves_is_whole_or_a_miss(store_dir: Path) -> None:
    """Fault: who reads a page while it is written gets some of the old and some of the new."""
    keys, size = run("k", 1), 8 * PAGE
    with open_small(store_dir, segments=4) as store:
        pages = store.namespace(model="m", page_bytes=size, page_tokens=1)
        seen = threading.Event()

        def rewrite() -> None:
            for seed in range(60):
                assert pages.save(keys, page_bytes(seed, keys[0], size)).wait(60).all()
                assert seen.wait(60), "a page that was saved is loaded"
                seen.clear()
                pages.clear()

        memory = bytearray(size)
        with beside(rewrite) as (writer,):
            while writer.running:
                if not pages.load(keys, memory).wait(60)[0]:
                    time.sleep(0.0002)  # a loop that never waits takes the interpreter for itself
                    continue
                seed = int.from_bytes(memory[8:16], "little")
                assert memory == page_bytes(seed, keys[0], size), explain(memory)
                seen.set()


def test_bug_14_half_of_a_new_page_over_an_old_one(store_dir: Path) -> None:
    """Fault: the same to the byte: the place is written anew, in part, before it is read."""
    keys = run("k", 1)
    with open_faulty(store_dir, segments=1, segment=PAGE) as (store, devices):  # room for one page
        pages, memory = client(store).pages, bytearray(PAGE)
        assert pages.save(keys, page_bytes(1, keys[0], PAGE)).wait(20).all()
        devices.arm(Fault("slow", "batch"))
        load = pages.load(keys, memory)  # has its place, and reads later
        pages.clear()
        devices.arm(Fault("torn", "write", keep_bytes=PAGE // 2))
        save = pages.save(keys, page_bytes(2, keys[0], PAGE))
        time.sleep(0.05)
        devices.release()
        if load.wait(20)[0]:
            assert memory in [page_bytes(seed, keys[0], PAGE) for seed in (1, 2)], explain(memory)
        assert bool(save.wait(20)[0]) == bool(pages.match(keys).pages)


# ---- 15, 16: transfers that stop half way ----
def test_bug_15_a_short_write_is_not_a_write(store_dir: Path, monkeypatch) -> None:
    """Fault: the file system takes half of the page and then no more; that counts as written."""
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


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond `size`: writes across it are short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("transport", ["posix", "auto"])
@pytest.mark.parametrize("room", [0, 1, PAGE // 2, 3 * PAGE - 512])
def test_bug_15_the_kernels_own_short_writes(
    store_dir: Path, disk_dir: Path, transport: str, room: int
) -> None:
    """Fault: an asynchronous write that the kernel cuts short is taken for a whole one."""
    size = 3 * PAGE
    folder = store_dir if transport == "posix" else disk_dir  # where io_uring can be used
    with open_small(folder, transport=transport, durability="none") as store:
        pages = client(store, page_bytes=size)
        assert pages.save(run("first", 1)) == [True]
        with files_end_at(MIB + size + room):
            assert pages.save(run("k", 1)) == [False]
        assert pages.match(run("k", 1)) == 0 and pages.load(run("k", 1)) == [False]
        assert store.stats().pages == 1 and store.stats().used_bytes == size
        assert pages.save(run("k", 1)) == [True] == pages.load(run("k", 1))
        assert pages.load(run("first", 1)) == [True]


@pytest.mark.parametrize("transport", ["posix", "auto"])
@pytest.mark.parametrize("room", [0, PAGE, 2 * PAGE])
@pytest.mark.parametrize("set_aside", [True, False])
def test_bug_15_a_file_system_that_is_full(
    store_dir: Path, small_disk: Any, monkeypatch, transport: str, room: int, set_aside: bool
) -> None:
    """Fault: the same on a file system that has room for a part of the page.

    With space set aside for each segment it refuses before the write; without, in the midst of it.
    """
    size, place = 3 * PAGE, small_disk.folder / "pool"
    if not set_aside:
        monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, offset, length: None)
    monkeypatch.setattr(segments, "_DISK_FULL_PAUSE_S", 0.0)
    options = {"transport": transport, "durability": "none", "keep_free": 0}
    with open_small(store_dir, pools=[place], **options) as store:
        pages = client(store, page_bytes=size)
        count = SEGMENT // size if set_aside else 1
        assert pages.save(run("first", count)) == [True] * count
        small_disk.fill(room)
        hold = pages.pages.hold(run("first", count))  # or it would be evicted for the new page
        assert pages.save(run("k", 1)) == [False]
        assert pages.match(run("k", 1)) == 0 and pages.load(run("k", 1)) == [False]
        assert store.stats().pages == count and store.stats().used_bytes == count * size
        assert pages.load(run("first", count)) == [True] * count
        check_space(store)
        small_disk.clean()
        assert pages.save(run("k", 1)) == [True] == pages.load(run("k", 1))
        hold.release()


@pytest.mark.parametrize("step", [1, 100, PAGE - 1])
def test_bug_16_short_transfers_are_continued(store_dir: Path, monkeypatch, step: int) -> None:
    """Fault: a call moves a piece of what it was given, and the rest is left out."""
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


@pytest.mark.parametrize("cut", ["one byte less", "one element", "half an element"])
def test_bug_16_a_vector_is_continued_at_the_exact_byte(store_dir, monkeypatch, cut: str) -> None:
    """Fault: of a page in several pieces the call moves some, and the next ones are skipped."""

    def part_of(buffers: Sequence[Any]) -> list[memoryview]:
        views = [memoryview(b).cast("B") for b in buffers]
        if cut == "one byte less" and sum(map(len, views)) > 1:
            return [*views[:-1], views[-1][:-1]]
        if cut == "one element":
            return views[:1]
        return [*views[:1], views[1][: len(views[1]) // 2]] if len(views) > 1 else views

    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: write(fd, part_of(b), at))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: read(fd, part_of(b), at))
    lengths = np.array([100, 1, 2000, PAGE - 2101], np.uint64)
    data = np.frombuffer(page_bytes(1, b"k" * 16, PAGE), np.uint8)
    with open_small(store_dir) as store:
        pages = client(store).pages
        saved, loaded = scattered(data, lengths), scattered(np.zeros(PAGE, np.uint8), lengths)
        assert pages.save(run("k", 1), saved[1]).wait(20).all()
        assert pages.load(run("k", 1), loaded[1]).wait(20).all()
        assert (gathered(loaded[0], lengths) == data).all()


def scattered(data: np.ndarray, lengths: np.ndarray) -> tuple[list[np.ndarray], PageFragments]:
    """One page in pieces that lie apart, in the order of the page."""
    ends = np.cumsum(lengths).tolist()
    pieces = [data[end - int(n) : end].copy() for end, n in zip(ends, lengths, strict=True)]
    address = np.array([[piece.ctypes.data for piece in pieces]], np.uint64)
    return pieces, PageFragments(address, lengths, pieces)


def gathered(pieces: list[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    assert [len(piece) for piece in pieces] == lengths.tolist()
    return np.concatenate(pieces)


# ---- 17, 18, 19: pages that are not what they were ----
@pytest.mark.parametrize("length", [0, 100, PAGE - 1])
def test_bug_17_a_page_cut_short_is_a_miss_and_can_be_saved_again(store_dir, length: int) -> None:
    """Fault: a file that a crash cut short ends in an exception, and its page stays announced."""
    with open_small(store_dir) as store:
        pages = client(store)
        assert all(pages.save(run("k", 1)))
        os.truncate(store_dir / "pool.tutti", MIB + length)
        assert pages.load(run("k", 1)) == [False] and pages.match(run("k", 1)) == 0
        settle(store)
        assert store.stats().pages == 0
        assert pages.save(run("k", 1)) == [True] == pages.load(run("k", 1))


def test_bug_17_the_engine_gets_an_answer_for_a_page_cut_short(
    hicache: Any, store_dir: Path
) -> None:
    """Fault: the exception ends the engine's prefetching thread."""
    keys = hicache.keys_of(2)
    with hicache.Rank(store_dir) as rank:
        assert rank.set(keys, [0, 1]) == [True, True]
        os.truncate(store_dir / "pool.tutti", MIB + 100)
        assert rank.get(keys, [2, 3]) == [False, False] and rank.exists(keys) == 0
        assert rank.set(keys, [0, 1]) == [True, True] and rank.get(keys, [2, 3]) == [True, True]


def test_bug_18_any_flipped_bit_is_noticed_and_spares_the_pages_before_it(store_dir, rng) -> None:
    """Fault: nothing checks what comes from the disk; a flipped bit is served."""
    with open_faulty(store_dir) as (store, devices):
        pages = client(store)
        for _ in range(30):
            pages.pages.clear()
            assert all(pages.save(run("k", 4)))
            at = place_of(store, pages, run("k", 4), 2) + rng.randrange(PAGE)
            devices.flip_bit(0, at, rng.randrange(8))
            assert pages.load(run("k", 4)) == [True, True, False, True]
            assert pages.match(run("k", 4)) == 2
        assert store.stats().counters["checksum_errors"] == 30


def place_of(store: PrefixStore, pages: Client, keys: PageKeys, index: int) -> int:
    """Where on its device a page lies, in bytes."""
    entry = pages.pages._entry
    where = store._manager.locate(entry, keys.data, index, keys.rooted)
    _, offset = store._manager.extents(where.slot, entry.slot_bytes)
    return int(offset[0])


def test_bug_18_a_flipped_bit_in_the_header_or_any_part(store_dir: Path) -> None:
    """Fault: the same in what describes a page on the disk, and in each part read alone."""
    parts, block = (PAGE, 100, PAGE), PAGE
    with open_faulty(store_dir) as (store, devices):
        pages = client(store, page_bytes=sum(parts), parts=parts)
        places = [0, 20, 50, 64, 71, 79, 87]  # magic … checksum of the last part
        places += [block, 2 * block - 1, 2 * block + 99, 3 * block]
        for at in places:
            pages.pages.clear()
            assert all(pages.save(run("k", 2)))
            devices.flip_bit(0, place_of(store, pages, run("k", 2), 1) + at, at % 8)
            assert pages.load(run("k", 2)) == [True, False], f"byte {at}"
            assert pages.match(run("k", 2)) == 1
        assert store.stats().counters["checksum_errors"] == len(places)


def test_bug_18_a_flipped_bit_in_the_record_of_a_page(store_dir: Path) -> None:
    """Fault: the same in the index: the record then names another place or another page."""
    keys = run("k", 3)
    for at in (0, 20, 33, 63, 64, 68, 72, 76, 80, 95):  # each field of format.py's RECORD
        with open_small(store_dir) as store:
            pages = client(store)
            pages.pages.clear()
            assert all(pages.save(keys))
            record_key = pages.pages._entry.record_keys(keys.data)[16:32]
        flip_record(store_dir, record_key, at)
        with open_small(store_dir) as store:
            assert store.wait_restored(20)
            pages = client(store)
            assert pages.match(keys) == 1 and pages.load(keys) == [True, False, True], at
            assert all(pages.save(keys)) and all(pages.load(keys)), "it can be saved anew"


def flip_record(path: Path, record_key: bytes, at: int) -> None:
    """Flip one bit of one record, as a fault of the disk would."""
    (folder,) = {file.parent for file in path.rglob("data.mdb")}
    with lmdb.open(str(folder), max_dbs=8, map_size=2 * MIB) as env:
        records = env.open_db(b"records", create=False)
        with env.begin(write=True, db=records) as txn:
            raw = bytearray(txn.get(record_key))
            raw[at] ^= 1 << at % 8
            txn.put(record_key, bytes(raw))


@pytest.mark.parametrize(
    ("written", "read"), [(2 * PAGE, PAGE), (PAGE, 2 * PAGE), (PAGE, PAGE - 1)]
)
def test_bug_19_a_page_of_another_length_is_not_data(store_dir, written: int, read: int) -> None:
    """Fault: after a change of the page size the first half of an old page passes for a page."""
    with open_small(store_dir) as store:
        one, other = client(store, page_bytes=written), client(store, page_bytes=read)
        assert all(one.save(run("k", 2)))
        assert other.match(run("k", 2)) == 0 and not any(other.load(run("k", 2)))
        with pytest.raises(ValueError):
            one.pages.load(run("k", 2), bytearray(2 * written - 1))


def test_bug_19_an_engine_with_shorter_pages_finds_none(hicache: Any, store_dir: Path) -> None:
    """Fault: the same where the engine starts with half the heads and asks with the same keys."""
    keys = hicache.keys_of(1)
    with hicache.Rank(store_dir) as rank:
        assert rank.set(keys, [0]) == [True]
    half = hicache.make_host_pool("mha", "page_first", head_num=2)
    with hicache.Rank(store_dir, half) as rank:
        assert rank.exists(keys) == 0 and rank.get(keys, [0]) == [False]


# ---- 20: a buffer that held something else before ----
@pytest.mark.parametrize("fault", ["error", "flip", "stale"])
@pytest.mark.parametrize("parts", [(), (PAGE // 2, PAGE // 2)])
def test_bug_20_what_was_in_the_buffer_before_is_no_page(store_dir, fault: Any, parts) -> None:
    """Fault: a read fails, and the last request's bytes in the buffer count as the page."""
    a, b = run("a", 1), run("b", 1)
    with open_faulty(store_dir) as (store, devices):
        pages = client(store, parts=parts).pages
        memory = bytearray(PAGE)

        def load(keys: Any) -> bool:
            if parts:
                return bool(load_in_parts(pages.load_parts(keys, memory)).all())
            return bool(pages.load(keys, memory).wait(20).all())

        for keys in (a, b):
            assert pages.save(keys, page_bytes(0, keys[0], PAGE)).wait(20).all()
        assert load(a) and memory == page_bytes(0, a[0], PAGE)
        devices.arm(Fault(fault, "read", count=2))
        assert not load(b) and pages.match(b).pages == 0
        assert not load(run("c", 1)), "never stored"


def test_bug_20_memory_of_a_gpu_that_cannot_be_registered(store_dir: Path, monkeypatch) -> None:
    """Fault: the registration of GPU memory fails; the load does nothing and reports success."""
    kvikio = StandInKvikio(StandInCuda())
    kvikio.refuse_registration = True
    for name, module in kvikio.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    config = small_config(store_dir)
    with PrefixStore.open(config) as store:
        assert all(client(store).save(run("k", 2)))
        devices = store._transport.devices
    host = PosixTransport(devices)
    transport = Shifted(GdsTransport(devices, host=host, cuda=kvikio.cuda), host_each=0)
    memory = mmap.mmap(-1, 2 * PAGE)  # poses as the memory of a GPU
    memory[:] = b"x" * len(memory)
    with PrefixStore.open(config, transport_object=transport) as store:
        pages = client(store).pages
        store.register(memory)
        assert not kvikio.registered
        assert pages.load(run("k", 2), memory).wait(20).all()
        assert memory[:PAGE] == page_bytes(0, run("k", 2)[0], PAGE)
        kvikio.errors = [RuntimeError("cuFile error"), RuntimeError("cuFile error")]
        assert not pages.load(run("k", 2), memory).wait(20).any()
        assert kvikio.calls >= 4, "it was asked for each page"


def test_bug_20_the_engine_is_told_that_its_page_did_not_come(
    hicache: Any, store_dir: Path
) -> None:
    """Fault: the same in a page of the engine's host pool."""
    a, b = hicache.keys_of(1, "a"), hicache.keys_of(1, "b")
    with hicache.Rank(store_dir, faulty=True) as rank:
        assert rank.set(a, [0]) == [True] and rank.set(b, [1]) == [True]
        assert rank.get(a, [5]) == [True]
        rank.devices.arm(Fault("error", "read"))
        assert rank.get(b, [5]) == [False] and rank.exists(b) == 0


# ---- 21: two writers ----
OTHER_WRITER = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from store_kit import client, open_small, run
with open_small(Path(sys.argv[2]), segments=4, writers_max=2) as store:
    pages = client(store)
    print(store._lease.number, all(pages.save(run("theirs", 8))), pages.save(run("both", 8)),
          flush=True)
    sys.stdin.readline()
    print(all(pages.load(run("ours", 8))), all(pages.load(run("theirs", 8))))
"""


def test_bug_21_two_processes_on_one_directory_have_areas_of_their_own(store_dir: Path) -> None:
    """Fault: two servers choose the same places in one directory and overwrite each other."""
    with open_small(store_dir, segments=4, writers_max=2) as store:
        pages = client(store)
        assert all(pages.save(run("ours", 8)))
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER_WRITER, str(ROOT / "tests"), str(store_dir)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdout is not None
        lease, *said = other.stdout.readline().split(maxsplit=1)
        assert said == [f"True {[True] * 8}\n"]
        assert int(lease) != store._lease.number
        assert all(pages.load(run("ours", 8))) and all(pages.load(run("theirs", 8)))
        assert pages.match(run("both", 8)) == 8 and all(pages.load(run("both", 8)))
        owners = {n: e.lease for n, e in store._catalog.segments().items()}
        assert sorted(owners.values()) == [0, 1, 1]
        assert other.communicate("\n", timeout=60)[0].split() == ["True", "True"]


def test_bug_21_a_pool_that_belongs_to_another_store_is_refused(fast_path: Path) -> None:
    """Fault: the same where the indexes are apart and the pages are not."""
    pool, one, two = fast_path / "pool", fast_path / "one", fast_path / "two"
    for path in (pool, one, two):
        path.mkdir()
    open_small(two).close()
    with open_small(one, pools=[pool]) as store:
        assert all(client(store).save(run("k", 4)))
        with pytest.raises(ConfigError, match="belongs to another store"):
            open_small(two, pools=[pool])
        with pytest.raises(ConfigError, match="belong to a store"):
            open_small(fast_path / "three", pools=[pool])
        assert all(client(store).load(run("k", 4)))


# ---- 23: pages that were evicted ----
def test_bug_23_an_evicted_page_is_not_promised_from_that_moment_on(store_dir: Path) -> None:
    """Fault: the bytes go first and the index is told later, or never."""
    config = small_config(store_dir)
    devices = memory_devices(config)
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = client(store)
        assert all(pages.save(run("old", 16)))
        with devices.held():  # the new page has its slot, but is not written yet
            ticket = pages.pages.save(run("new", 1), bytes(PAGE))
            poll(lambda: store.stats().counters.get("evicted_pages", 0) > 0, "an eviction")
            left = pages.match(run("old", 16))
            assert left < 16 and pages.contains(run("old", 16)).count(True) == left
        assert ticket.wait(20).all()
    with PrefixStore.open(config, transport_object=devices.reopen()) as store:
        assert client(store).match(run("old", 16)) == left


@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_bug_23_the_copy_in_memory_is_not_dropped_for_one_that_is_gone(
    store_dir: Path, mode: str, policy: str
) -> None:
    """Fault: the copy in memory is given up as "safe on disk", where it was evicted from."""
    config = tiered_config(
        store_dir, segments=4, dram=4 * DRAM, dram_mode=mode, write_policy=policy, policy="lru"
    )
    with open_tiers(config, memory_devices(config)) as store:
        pages = client(store)
        for i in range(60):  # the drives hold half as much as memory
            assert all(pages.save(chain(i)))
        assert store.flush(20)
        for i in range(60):  # which brings those up that only the drives have
            pages.load(chain(i))
            quiesce(store)
        alone = [i for i in range(60) if pages.match(chain(i)) and not on_drives(store, pages, i)]
        assert alone, "some are in memory only"
        for i in range(100, 200):  # now memory needs the room of each
            assert all(pages.save(chain(i)))
            hit = pages.match(chain(alone[0]))
            assert pages.load(chain(alone[0])) == [bool(hit)]
        for i in alone:
            assert pages.load(chain(i)) == [bool(pages.match(chain(i)))]
        assert dram(store).page_count <= 64
        check_tiers(store)


def test_bug_23_memory_keeps_what_the_drives_did_not_get(store_dir: Path) -> None:
    """Fault: the same after a write that failed: the page is in neither place."""
    config = tiered_config(store_dir, segments=16, write_policy="write_back")
    devices = memory_devices(config)
    with open_tiers(config, devices) as store:
        pages = client(store)
        devices.arm(Fault("error", "write", index=3, count=4))
        stored = [i for i in range(4 * DRAM // PAGE) if pages.save(chain(i)) == [True]]
        assert devices.injected and len(stored) > 2 * DRAM // PAGE, "some had to be written down"
        assert store.flush(20)
        assert all(pages.match(chain(i)) and pages.load(chain(i)) == [True] for i in stored)
        assert all(on_drives(store, pages, i) for i in stored)
        check_tiers(store)


def on_drives(store: PrefixStore, pages: Client, name: int) -> bool:
    """Whether the catalog has a record of the page `chain(name)`."""
    record_keys = pages.pages._entry.record_keys(chain(name).data)
    return bool(store._catalog.lookup(record_keys)[0][0])
