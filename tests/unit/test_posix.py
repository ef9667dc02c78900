"""PosixTransport: what the conformance suite cannot provoke from outside."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti_core.errors import (
    ConfigError,
    DeviceError,
    StoreClosedError,
    UnsupportedError,
)
from tutti_core.io import posix
from tutti_core.io.posix import IOV_MAX, RETRIES_MAX, PosixTransport
from tutti_core.io.transport import (
    BLOCK_BYTES,
    Batch,
    BatchResult,
    Device,
    Op,
    TransportOptions,
)
from tutti_core.testing import Arena, Item, make_batch

WAIT_S = 60.0
CAPACITY = 64 * BLOCK_BYTES


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "device"
    file.write_bytes(bytes(CAPACITY))
    return str(file)


@pytest.fixture
def transport(path: str) -> Iterator[PosixTransport]:
    transport = PosixTransport([Device(path, CAPACITY)])
    yield transport
    transport.close()


def run(transport: PosixTransport, batch: Batch) -> BatchResult:
    result = transport.wait(transport.submit(batch), WAIT_S)
    assert result is not None
    return result


_arenas: list[Arena] = []  # a batch names addresses; something must own what is there


@pytest.fixture(autouse=True)
def _free_arenas() -> Iterator[None]:
    yield
    _arenas.clear()


def arena(seed: int = 1) -> Arena:
    _arenas.append(Arena(1 << 20, random.Random(seed)))
    return _arenas[-1]


def one(memory: Arena, op: Op, offset: int, *lengths: int) -> tuple[Item, Batch]:
    item = Item(0, offset, memory.carve(lengths))
    return item, make_batch(op, memory, [item])


def open_files() -> set[str]:
    """What the descriptors of this process refer to."""
    names = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the descriptor of this very listing
    return names


# -- opening ---------------------------------------------------------------------------------------


def test_says_that_it_is_buffered(transport: PosixTransport) -> None:
    said = transport.capabilities()
    assert said.name == "posix"
    assert said.direct == (False,)
    assert not said.registered_buffers
    assert not said.registered_files
    assert any("page cache" in note for note in said.notes)


def test_missing_file_is_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(DeviceError) as caught:
        PosixTransport([Device(str(missing), CAPACITY)])
    assert caught.value.errno == errno.ENOENT
    assert caught.value.device == str(missing)
    assert not missing.exists()


def test_forbidden_file(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        PosixTransport([Device(str(tmp_path), CAPACITY)])
    assert caught.value.errno == errno.EISDIR


def test_failed_open_leaves_no_descriptor(path: str, tmp_path: Path) -> None:
    devices = [Device(path, CAPACITY), Device(str(tmp_path / "missing"), CAPACITY)]
    with pytest.raises(DeviceError):
        PosixTransport(devices)
    assert path not in open_files()


def test_descriptor_does_not_survive_exec(transport: PosixTransport) -> None:
    assert not any(os.get_inheritable(fd) for fd in transport._fds)


def test_open_and_close_change_no_byte(tmp_path: Path) -> None:
    file = tmp_path / "device"
    file.write_bytes(b"short")
    PosixTransport([Device(str(file), CAPACITY)]).close()
    assert file.read_bytes() == b"short"


@pytest.mark.parametrize(
    ("capacity", "options", "field"),
    [
        (BLOCK_BYTES - 1, TransportOptions(), "capacity_bytes"),
        (1 << 63, TransportOptions(), "capacity_bytes"),
        (CAPACITY, TransportOptions(queue_depth=0), "queue_depth"),
        (CAPACITY, TransportOptions(transfer_bytes_max=0), "transfer_bytes_max"),
        (CAPACITY, TransportOptions(transfer_bytes_max=5000), "transfer_bytes_max"),
    ],
)
def test_bad_options(path: str, capacity: int, options: TransportOptions, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        PosixTransport([Device(path, capacity)], options)


def test_no_devices() -> None:
    with pytest.raises(ConfigError, match="devices"):
        PosixTransport([])


def test_direct_on_a_file_system_without_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnsupportedError, match="O_DIRECT"):
        PosixTransport([Device(path, CAPACITY)], direct=True)


def test_files_close_with_the_object(path: str) -> None:
    transport = PosixTransport([Device(path, CAPACITY)])
    run(transport, one(arena(), Op.READ, 0, 10)[1])
    assert path in open_files()
    del transport
    gc.collect()
    assert path not in open_files()


# -- transfers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_short_transfers_continue_exactly(
    transport: PosixTransport, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The kernel may move any prefix of what was asked for."""
    rng = random.Random(seed)

    def cut(pieces: list[memoryview]) -> list[memoryview]:
        left = rng.randint(1, max(1, sum(map(len, pieces)) - 1))
        kept = []
        for piece in pieces:
            kept.append(piece[:left])
            left -= len(kept[-1])
            if left == 0:
                break
        return kept

    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, v, o: pwritev(fd, cut(v), o))
    monkeypatch.setattr(os, "preadv", lambda fd, v, o: preadv(fd, cut(v), o))
    memory = arena(seed)
    content = rng.randbytes(30_001)
    source, write = one(memory, Op.WRITE, 2 * BLOCK_BYTES, 1, 9_999, 20_000, 1)
    target, read = one(memory, Op.READ, 2 * BLOCK_BYTES, 10_000, 3, 19_998)
    memory.put(source.fragments, content)
    assert run(transport, write).status.tolist() == [0]
    assert run(transport, read).status.tolist() == [0]
    assert memory.get(target.fragments) == content
    memory.check_guards()
    assert transport.stats().short_transfers > 2


def test_calls_are_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def note(fd: int, pieces: list[memoryview], offset: int) -> int:
        calls.append((len(pieces), sum(map(len, pieces))))
        return preadv(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", note)
    options = TransportOptions(transfer_bytes_max=2 * BLOCK_BYTES)
    transport = PosixTransport([Device(path, CAPACITY)], options)
    memory = arena()
    run(transport, one(memory, Op.READ, 0, *[3] * (2 * IOV_MAX + 5), 5 * BLOCK_BYTES)[1])
    transport.close()
    assert max(pieces for pieces, _ in calls) == IOV_MAX
    assert max(size for _, size in calls) == 2 * BLOCK_BYTES
    assert sum(size for _, size in calls) == 3 * (2 * IOV_MAX + 5) + 5 * BLOCK_BYTES


def fail_with(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[int]:
    """Let the first `times` calls of preadv fail; returns the list of calls."""
    calls: list[int] = []
    preadv = os.preadv

    def call(fd: int, pieces: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return preadv(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", call)
    monkeypatch.setattr(posix, "RETRY_DELAY_S", 0.0)
    return calls


def test_eagain_is_tried_again(transport: PosixTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail_with(monkeypatch, errno.EAGAIN, RETRIES_MAX)
    assert run(transport, one(arena(), Op.READ, 0, 100)[1]).status.tolist() == [0]
    assert len(calls) == RETRIES_MAX + 1


def test_eagain_is_not_tried_for_ever(
    transport: PosixTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fail_with(monkeypatch, errno.EAGAIN, 1 << 30)
    result = run(transport, one(arena(), Op.READ, 0, 100)[1])
    assert result.status.tolist() == [-errno.EAGAIN]
    assert len(calls) == RETRIES_MAX + 1


def test_error_is_the_items_own(transport: PosixTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, errno.EIO, 1)
    memory = arena()
    items = [Item(0, block * BLOCK_BYTES, memory.carve([9])) for block in range(5)]
    result = run(transport, make_batch(Op.READ, memory, items))
    assert sorted(result.status.tolist()) == [-errno.EIO, 0, 0, 0, 0]
    assert transport.stats().failed_items == 1


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("file_bytes", [0, 100, BLOCK_BYTES, 2 * BLOCK_BYTES + 99])
def test_end_of_file(tmp_path: Path, file_bytes: int, direct: bool) -> None:
    """A read past the file's last byte is -ENODATA; one that ends with it is whole."""
    file = tmp_path / "device"
    content = random.Random(5).randbytes(file_bytes)
    file.write_bytes(content)
    transport = open_direct(str(file)) if direct else PosixTransport([Device(str(file), CAPACITY)])
    memory = arena()
    short = run(transport, one(memory, Op.READ, 0, file_bytes // 2 + 1, file_bytes // 2 + 1)[1])
    assert short.status.tolist() == [-errno.ENODATA]
    if file_bytes:
        item, batch = one(memory, Op.READ, 0, file_bytes)
        assert run(transport, batch).status.tolist() == [0]
        assert memory.get(item.fragments) == content
    memory.check_guards()
    transport.close()


def open_direct(path: str) -> PosixTransport:
    try:
        return PosixTransport([Device(path, CAPACITY)], direct=True)
    except UnsupportedError as error:
        pytest.skip(f"missing capability: O_DIRECT ({error})")


def test_direct_counts_what_it_bounces(path: str) -> None:
    transport = open_direct(path)
    assert transport.capabilities().direct == (True,)
    run(transport, one(arena(), Op.WRITE, 0, 100)[1])
    assert transport.stats().bounced_bytes == BLOCK_BYTES
    transport.close()


def test_direct_continues_on_a_block(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short transfer that ends inside a block, that block is moved again."""
    transport = open_direct(path)
    offsets: list[int] = []
    pwritev, preadv = os.pwritev, os.preadv

    def cut(pieces: list[memoryview], offset: int) -> list[memoryview]:
        offsets.append(offset)
        return [pieces[0][: 2 * BLOCK_BYTES]]  # what O_DIRECT can move; 100 less is reported

    def write(fd: int, pieces: list[memoryview], offset: int) -> int:
        return pwritev(fd, cut(pieces, offset), offset) - 100

    def read(fd: int, pieces: list[memoryview], offset: int) -> int:
        return preadv(fd, cut(pieces, offset), offset) - 100

    memory = arena()
    content = random.Random(3).randbytes(20_000)
    source, batch = one(memory, Op.WRITE, BLOCK_BYTES, 7_000, 13_000)
    memory.put(source.fragments, content)
    monkeypatch.setattr(os, "pwritev", write)
    # The last block is never whole, so the write ends as one that moves nothing.
    assert run(transport, batch).status.tolist() == [-errno.EIO]
    monkeypatch.setattr(os, "preadv", read)
    target, batch = one(memory, Op.READ, BLOCK_BYTES, 9_000, 7_000)
    assert run(transport, batch).status.tolist() == [0]
    assert memory.get(target.fragments) == content[:16_000]
    assert offsets == [BLOCK_BYTES * block for block in (1, 2, 3, 4, 5, 1, 2, 3)]
    transport.close()


def test_write_that_moves_nothing_ends(
    transport: PosixTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    assert run(transport, one(arena(), Op.WRITE, 0, 10)[1]).status.tolist() == [-errno.EIO]


def test_null_address(transport: PosixTransport) -> None:
    memory = arena()
    for op in Op:
        batch = one(memory, op, 0, 10, 10)[1]
        batch.address[1] = 0
        assert run(transport, batch).status.tolist() == [-errno.EFAULT]


def test_read_into_read_only_memory(transport: PosixTransport) -> None:
    page = mmap.mmap(-1, BLOCK_BYTES, prot=mmap.PROT_READ)
    array = np.frombuffer(page, np.uint8)
    batch = one(arena(), Op.READ, 0, BLOCK_BYTES)[1]
    batch.address[0] = array.ctypes.data
    assert run(transport, batch).status.tolist() == [-errno.EFAULT]


def test_write_extends_a_short_file_within_capacity(tmp_path: Path) -> None:
    file = tmp_path / "device"
    file.touch()
    transport = PosixTransport([Device(str(file), CAPACITY)])
    memory = arena()
    item, batch = one(memory, Op.WRITE, 3 * BLOCK_BYTES, 5)
    memory.put(item.fragments, b"hello")
    assert run(transport, batch).status.tolist() == [0]
    transport.close()
    assert file.read_bytes() == bytes(3 * BLOCK_BYTES) + b"hello".ljust(BLOCK_BYTES, b"\0")


# -- workers, tickets, life ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000])
def test_chunks_cover_every_item_once(
    transport: PosixTransport, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    chunks: list[tuple[int, int]] = []
    run_chunk = PosixTransport._run_chunk

    def note(self: PosixTransport, flight: Any, first: int, last: int) -> None:
        chunks.append((first, last))
        run_chunk(self, flight, first, last)

    monkeypatch.setattr(PosixTransport, "_run_chunk", note)
    memory = arena()
    items = [Item(0, 0, memory.carve([1])) for _ in range(count)]
    run(transport, make_batch(Op.READ, memory, items))
    assert len(chunks) <= posix.WORKERS_MAX * posix.CHUNKS_PER_WORKER
    assert len(chunks) >= min(count, posix.WORKERS_MAX)
    covered = [item for first, last in sorted(chunks) for item in range(first, min(last, count))]
    assert covered == list(range(count))


def test_a_failing_worker_fails_its_items(
    transport: PosixTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> int:
        raise MemoryError("no memory for views")

    monkeypatch.setattr(PosixTransport, "_run_item", explode)
    memory = arena()
    items = [Item(0, 0, memory.carve([1])) for _ in range(40)]
    with caplog.at_level(logging.ERROR, "tutti"):
        result = run(transport, make_batch(Op.READ, memory, items))
    assert set(result.status.tolist()) == {-errno.EIO}
    assert "no memory for views" in caplog.text
    assert transport.stats().failed_items == 40


def test_threads_that_the_system_refuses_are_noticed_at_opening(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a batch, which would end while one of its chunks is still queued."""
    start, started = threading.Thread.start, []

    def refuse_the_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_the_third)
        with pytest.raises(DeviceError, match="ulimit -u"):
            PosixTransport([Device(path, CAPACITY)])
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
    assert os.listdir("/proc/self/fd") == before


def test_a_device_that_stalls_leaves_the_others_their_workers(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(CAPACITY))
    transport = PosixTransport([Device(path, CAPACITY), Device(str(other), CAPACITY)])
    gate, move = threading.Event(), PosixTransport._move

    def stall(self: PosixTransport, op: Op, device: int, *rest: Any) -> int:
        return (
            gate.wait(20) and move(self, op, device, *rest) if device else move(self, op, 0, *rest)
        )

    monkeypatch.setattr(PosixTransport, "_move", stall)
    memory = arena()
    items = [Item(1, 0, memory.carve([1])) for _ in range(100)]
    late = transport.submit(make_batch(Op.READ, memory, items))
    both = transport.submit(
        make_batch(Op.READ, memory, [Item(i % 2, 0, memory.carve([1])) for i in range(8)])
    )
    assert run(transport, one(memory, Op.READ, 0, 1)[1]).status.tolist() == [0]
    assert transport.wait(late, 0.0) is None and transport.wait(both, 0.0) is None
    assert transport.stats().device_items == [5, 0]
    gate.set()
    for ticket in (late, both):
        result = transport.wait(ticket, 20)
        assert result is not None and not result.status.any()
    assert transport.stats().device_items == [5, 104]
    transport.close()


def test_any_timeout_is_accepted(transport: PosixTransport) -> None:
    ticket = transport.submit(one(arena(), Op.READ, 0, 1)[1])
    result = transport.wait(ticket, float("inf"))
    assert result is not None


def test_results_can_be_collected_after_close(path: str) -> None:
    transport = PosixTransport([Device(path, CAPACITY)])
    ticket = transport.submit(one(arena(), Op.READ, 0, 1)[1])
    transport.close()
    result = transport.wait(ticket, 0.0)
    assert result is not None
    assert result.status.tolist() == [0]
    with pytest.raises(StoreClosedError):
        transport.register(4096, 10)
    with pytest.raises(StoreClosedError):
        transport.flush(0)


def test_regions(transport: PosixTransport) -> None:
    region = transport.register(4096, 10)
    transport.unregister(region)
    with pytest.raises(KeyError):
        transport.unregister(region)
    with pytest.raises(ValueError, match="cannot register"):
        transport.register(4096, 0)


def test_a_flush_that_failed_can_be_tried_again(
    transport: PosixTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before it is not durable, whatever comes: that is the caller's to know."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    assert transport.flush(0) == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        assert transport.flush(0) == -errno.EIO
    assert transport.flush(0) == 0


@pytest.mark.parametrize("direct", [False, True])
def test_a_device_is_opened_anew_where_the_same_file_is_there(path: str, direct: bool) -> None:
    """Fault: a descriptor that went bad stays bad although the device is back."""
    transport = PosixTransport([Device(path, CAPACITY)], direct=direct)
    memory = arena()
    item, batch = one(memory, Op.WRITE, 0, 5)
    memory.put(item.fragments, b"first")
    assert run(transport, batch).status.tolist() == [0]
    count = len(os.listdir("/proc/self/fd"))
    shutil.copy(path, f"{path}.new")
    os.replace(f"{path}.new", path)
    assert transport.reopen_device(0, lambda block: block[:5] == b"other") == -errno.ESTALE
    memory.put(item.fragments, b"old!!")
    assert run(transport, batch).status.tolist() == [0]
    assert Path(path).read_bytes()[:5] == b"first", "the file was changed without being accepted"
    assert transport.reopen_device(0, lambda block: block[:5] == b"first") == 0
    memory.put(item.fragments, b"again")
    assert run(transport, batch).status.tolist() == [0] and transport.flush(0) == 0
    assert Path(path).read_bytes()[:5] == b"again"
    os.unlink(path)
    assert transport.reopen_device(0, lambda block: True) == -errno.ENOENT
    assert run(transport, batch).status.tolist() == [0]
    assert len(os.listdir("/proc/self/fd")) == count
    transport.close()


def test_flush_fails_for_its_own_device_only(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(CAPACITY))
    transport = PosixTransport([Device(path, CAPACITY), Device(str(other), CAPACITY)])
    fdatasync, bad = os.fdatasync, transport._fds[0]

    def fail(fd: int) -> None:
        if fd == bad:
            raise OSError(errno.ENOSPC, "No space left on device")
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", fail)
    assert [transport.flush(0), transport.flush(1)] == [-errno.ENOSPC, 0]
    transport.close()


def test_stats_are_a_copy(transport: PosixTransport) -> None:
    stats = transport.stats()
    stats.extra["mine"] = 1
    stats.read_items = 99
    assert transport.stats().read_items == 0
    assert transport.stats().extra == {}


def test_forked_child_is_refused(transport: PosixTransport) -> None:
    """The workers stayed in the parent. The child says so instead of hanging."""
    batch = one(arena(), Op.READ, 0, 1)[1]
    ticket = transport.submit(batch)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: transport.submit(batch),
            lambda: transport.wait(ticket, 1.0),
            lambda: transport.flush(0),
            lambda: transport.register(4096, 1),
        ):
            try:
                call()
            except StoreClosedError:
                refused += 1
        transport.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert transport.wait(ticket, WAIT_S) is not None
    assert run(transport, batch).status.tolist() == [0]
