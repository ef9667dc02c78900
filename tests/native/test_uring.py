"""UringTransport beyond the conformance suite: what only direct I/O and io_uring can get wrong.

The suite itself runs over it in tests/conformance, with its default options; here with the most
awkward ones too.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

pytest.importorskip("tutti_core._native", reason="built without the native extension")

from thread_kit import beside

from tutti_core.errors import (
    BusyError,
    ConfigError,
    DeviceError,
    StoreClosedError,
    UnsupportedError,
)
from tutti_core.io.transport import (
    BATCHES_IN_FLIGHT_MAX,
    BLOCK_BYTES,
    Batch,
    BatchResult,
    Device,
    Op,
    TransportOptions,
)
from tutti_core.io.uring import UringTransport
from tutti_core.testing import CHECKS, CheckSkipped, Subject

Memory = npt.NDArray[np.uint8]
Item = tuple[int, int, list[Memory]]
"""Device, offset, and the fragments as views."""

WAIT_S = 60.0
MIB = 1 << 20

OPTIONS: dict[str, tuple[TransportOptions, int]] = {
    "default": (TransportOptions(), 0),
    # One transfer of one block at a time, and an arena of one block: everything has to wait.
    "tiny": (TransportOptions(queue_depth=1, transfer_bytes_max=4096, bounce_bytes=4096), 0),
    # Transfers complete short at first, in the middle of a block.
    "short": (TransportOptions(8, 64 << 10, 64 << 10), 2 * BLOCK_BYTES + 512),
}

_names = itertools.count()


@pytest.fixture(params=OPTIONS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Sequence[int]], UringTransport]]:
    """Open transports on new sparse files; they are closed at the end."""
    options, first_attempt_bytes = OPTIONS[request.param]
    opened: list[UringTransport] = []

    def open_one(capacities_bytes: Sequence[int]) -> UringTransport:
        devices = [new_file(tmp_path, capacity) for capacity in capacities_bytes]
        opened.append(open_or_skip(devices, options, first_attempt_bytes))
        return opened[-1]

    yield open_one
    for transport in opened:
        transport.close()


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[UringTransport]:
    """A transport with default options on one device of 16 MiB."""
    opened = open_or_skip([new_file(tmp_path, 16 * MIB)])
    yield opened
    opened.close()


def new_file(directory: Path, capacity_bytes: int) -> Device:
    path = directory / f"device{next(_names)}"
    with path.open("wb") as file:
        file.truncate(capacity_bytes)
    return Device(str(path), capacity_bytes)


def open_or_skip(
    devices: Sequence[Device],
    options: TransportOptions = OPTIONS["default"][0],
    first_attempt_bytes: int = 0,
) -> UringTransport:
    try:
        return UringTransport(devices, options, _first_attempt_bytes=first_attempt_bytes)
    except UnsupportedError as error:
        pytest.skip(f"missing capability: {error}")


def aligned(size_bytes: int, fill: int | None = None, seed: int = 1) -> Memory:
    """Memory that starts on a page boundary, random or filled."""
    memory = np.frombuffer(mmap.mmap(-1, -(-size_bytes // 4096) * 4096), np.uint8)[:size_bytes]
    if fill is None:
        memory[:] = np.frombuffer(random.Random(seed).randbytes(size_bytes), np.uint8)
    else:
        memory[:] = fill
    return memory


def make_batch(op: Op, items: Sequence[Item], *, checksum: bool = True) -> Batch:
    fragments = [fragment for _, _, parts in items for fragment in parts]
    return Batch(
        op=op,
        device=np.array([device for device, _, _ in items], np.uint32),
        offset_bytes=np.array([offset for _, offset, _ in items], np.uint64),
        fragment_start=np.cumsum([0, *(len(parts) for _, _, parts in items)], dtype=np.uint32),
        address=np.array([part.ctypes.data for part in fragments], np.uint64),
        length_bytes=np.array([len(part) for part in fragments], np.uint64),
        checksum=checksum,
    )


def run(
    transport: UringTransport, op: Op, items: Sequence[Item], *, checksum: bool = True
) -> BatchResult:
    result = transport.wait(transport.submit(make_batch(op, items, checksum=checksum)), WAIT_S)
    assert result is not None
    return result


def content_of(device: Device) -> bytes:
    return Path(device.path).read_bytes()


# -- conformance, under awkward options ------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_conforms(name: str, make: Callable[[Sequence[int]], UringTransport]) -> None:
    def fail_reads(transport: UringTransport, device: int) -> None:
        os.truncate(transport.devices[device].path, 0)

    try:
        CHECKS[name](Subject(make, None, fail_reads))  # type: ignore[arg-type]
    except CheckSkipped as reason:
        pytest.skip(f"missing capability: {reason}")


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_layouts_of_a_kv_cache(make: Callable[[Sequence[int]], UringTransport], seed: int) -> None:
    """Layer-major pages at any element size: many fragments, aligned to 4 KiB, 512, 64 or not."""
    rng = random.Random(seed)
    transport = make([8 * MIB, 8 * MIB])
    align = (4096, 512, 64, 1)[seed % 4]
    source, target = aligned(8 * MIB, seed=seed), aligned(8 * MIB, 0xA5)
    writes: list[Item] = []
    reads: list[Item] = []
    used = np.zeros(len(target), np.bool_)
    at = 0
    for index in range(20):
        size = rng.choice((1, 2, 9, 41 if align < 4096 else 5)) * align
        layers = rng.randrange(1, 60 if align < 512 else 8)
        pieces = []
        for _ in range(layers):
            at += rng.randrange(3) * align
            pieces.append(slice(at, at + size))
            at += size
        assert at < len(source)
        for piece in pieces:
            used[piece] = True
        place = (index % 2, index * 400 * 1024 // 4096 * 4096)
        rng.shuffle(pieces)
        writes.append((*place, [source[piece] for piece in pieces]))
        reads.append((*place, [target[piece] for piece in pieces]))
    written = run(transport, Op.WRITE, writes)
    assert not written.status.any()
    for device, offset, parts in writes:
        expected = b"".join(part.tobytes() for part in parts)
        padded = expected + bytes(-len(expected) % BLOCK_BYTES)
        with open(transport.devices[device].path, "rb") as file:
            file.seek(offset)
            assert file.read(len(padded)) == padded
    result = run(transport, Op.READ, reads)
    assert not result.status.any()
    assert result.checksum.tolist() == written.checksum.tolist()
    assert np.array_equal(target[used], source[used])
    assert np.all(target[~used] == 0xA5)


def test_only_what_is_unaligned_bounces(transport: UringTransport) -> None:
    memory = aligned(MIB)

    def bounced(op: Op, parts: list[Memory]) -> int:
        before = transport.stats().bounced_bytes
        assert run(transport, op, [(0, 0, parts)]).status[0] == 0
        return transport.stats().bounced_bytes - before

    for op in Op:
        assert bounced(op, [memory]) == 0
        assert bounced(op, [memory[i : i + 4096] for i in range(0, MIB, 8192)]) == 0
        assert bounced(op, [memory[: 64 * 1024 + 100]]) == 100  # the tail only
        # The block that two fragments share, and the tail.
        parts = [memory[: 3 * 4096 + 1024], memory[8 * 4096 + 1024 : 12 * 4096]]
        assert bounced(op, parts) == 4096
        assert bounced(op, [memory[1:]]) == MIB - 1


def test_zero_padding_reaches_the_block_and_no_further(transport: UringTransport) -> None:
    old = aligned(8 * BLOCK_BYTES, 0xEE)
    run(transport, Op.WRITE, [(0, 0, [old])])
    run(transport, Op.WRITE, [(0, BLOCK_BYTES, [aligned(100, 0x11)])])
    assert transport.flush(0) == 0
    content = content_of(transport.devices[0])
    assert content[: 3 * BLOCK_BYTES] == (
        b"\xee" * BLOCK_BYTES + b"\x11" * 100 + bytes(BLOCK_BYTES - 100) + b"\xee" * BLOCK_BYTES
    )


def test_an_item_of_many_transfers(tmp_path: Path) -> None:
    options = TransportOptions(queue_depth=4, transfer_bytes_max=64 << 10)
    with_short = open_or_skip([new_file(tmp_path, 16 * MIB)], options, 12_800)
    memory, target = aligned(9 * MIB + 77), aligned(9 * MIB + 77, 0)
    written = run(with_short, Op.WRITE, [(0, 4096, [memory])])
    read = run(with_short, Op.READ, [(0, 4096, [target])])
    assert written.status[0] == 0 and read.status[0] == 0
    assert np.array_equal(memory, target)
    assert int(written.checksum[0]) == int(read.checksum[0]) == xxhash.xxh3_64_intdigest(memory)
    stats = with_short.stats()
    assert stats.short_transfers >= 2 * 9 * 16 and stats.extra["transfers"] >= 2 * 9 * 16
    with_short.close()


# -- failures --------------------------------------------------------------------------------------


def test_failures_are_alone(transport: UringTransport) -> None:
    capacity = transport.devices[0].capacity_bytes
    memory = aligned(MIB)
    os.truncate(transport.devices[0].path, 2 * BLOCK_BYTES + 100)
    items = [
        (0, 0, [memory[:100]]),
        (0, capacity, [memory[:1]]),
        (0, capacity - BLOCK_BYTES, [memory[: BLOCK_BYTES + 1]]),
        (0, 2 * BLOCK_BYTES, [memory[:100]]),  # what is there of the last block suffices
        (0, 2 * BLOCK_BYTES, [memory[:101]]),
        (0, BLOCK_BYTES, [memory[: 512 * 1024]]),
        (0, 8 * BLOCK_BYTES, [memory[:1]]),
        (0, (1 << 64) - BLOCK_BYTES, [memory[:1]]),
        (0, BLOCK_BYTES, [memory[100:200]]),
    ]
    result = run(transport, Op.READ, items)
    assert result.status.tolist() == [
        0,
        -errno.ERANGE,
        -errno.ERANGE,
        0,
        -errno.ENODATA,
        -errno.ENODATA,
        -errno.ENODATA,
        -errno.ERANGE,
        0,
    ]
    assert transport.stats().failed_items == 6


def test_memory_that_is_not_there(transport: UringTransport) -> None:
    """The kernel says EFAULT for the parts that it moves itself; address 0 is never touched."""
    memory = aligned(BLOCK_BYTES)
    batch = make_batch(Op.READ, [(0, 0, [memory])] * 3, checksum=False)
    batch.address[0] = 0
    batch.address[2] = 4096  # below vm.mmap_min_addr: nothing is mapped there
    result = transport.wait(transport.submit(batch), WAIT_S)
    assert result is not None
    assert result.status.tolist() == [-errno.EFAULT, 0, -errno.EFAULT]


def test_a_refused_write_is_alone(tmp_path: Path) -> None:
    """The process's limit on file size stands for a full file system."""
    code = f"""
        import resource, signal, numpy as np
        from tutti_core.io.transport import *
        from tutti_core.io.uring import UringTransport
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        transport = UringTransport([Device({new_file(tmp_path, 8192).path!r}, 1 << 20)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        memory = np.full(4096, 7, np.uint8)
        batch = Batch(Op.WRITE, np.zeros(2, np.uint32), np.array([0, 65536], np.uint64),
                      np.arange(3, dtype=np.uint32), np.full(2, memory.ctypes.data, np.uint64),
                      np.full(2, 4096, np.uint64))
        print(transport.wait(transport.submit(batch), 60).status.tolist())
    """
    assert run_python(code) == f"[0, {-errno.EFBIG}]"


def test_arrays_that_do_not_fit(transport: UringTransport) -> None:
    memory = aligned(BLOCK_BYTES)
    good = make_batch(Op.READ, [(0, 0, [memory])])

    def wrong(**changes: object) -> Batch:
        values = {name: getattr(good, name) for name in Batch.__dataclass_fields__}
        return Batch(**{**values, **changes})

    none32, none64 = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
    for batch in (
        wrong(device=np.array([1], np.uint32)),
        wrong(device=np.array([0], np.int64)),
        wrong(device=np.array([[0]], np.uint32)),
        wrong(offset_bytes=np.array([512], np.uint64)),
        wrong(offset_bytes=np.array([0, 0], np.uint64)),
        wrong(fragment_start=np.array([0, 2], np.uint32)),
        wrong(fragment_start=np.array([0, 0], np.uint32)),
        wrong(fragment_start=np.array([1, 1], np.uint32)),
        wrong(fragment_start=np.array([0], np.uint32)),
        wrong(length_bytes=np.array([0], np.uint64)),
        wrong(length_bytes=np.array([1, 2], np.uint64)),
        wrong(address=np.zeros(2, np.uint64)[::2]),
        wrong(device=none32, offset_bytes=none64, fragment_start=np.zeros(1, np.uint32)),
        wrong(op=7),
    ):
        try:
            ticket = transport.submit(batch)
        except ValueError:
            continue
        assert np.array_equal(batch.address[:1], np.zeros(1)), "only the strided array is harmless"
        transport.wait(ticket, WAIT_S)
    assert transport.stats().read_items == 0


# -- life ------------------------------------------------------------------------------------------


def test_open_errors(tmp_path: Path) -> None:
    fifo, directory = tmp_path / "fifo", tmp_path / "directory"
    os.mkfifo(fifo)
    directory.mkdir()
    for path, code in (
        (tmp_path / "missing", errno.ENOENT),
        (directory, errno.EISDIR),
        (Path("/dev/null"), None),
        (fifo, None),
    ):
        with pytest.raises((DeviceError, UnsupportedError)) as caught:
            UringTransport([Device(str(path), 4096)])
        assert caught.value.device == str(path)
        assert code is None or caught.value.errno == code
    assert not (tmp_path / "missing").exists()
    good = new_file(tmp_path, 4096)
    for devices, options in (
        ([], TransportOptions()),
        ([Device(good.path, 0)], TransportOptions()),
        ([Device(good.path, 1 << 63)], TransportOptions()),
        ([good], TransportOptions(queue_depth=0)),
        ([good], TransportOptions(queue_depth=1 << 20)),
        ([good], TransportOptions(transfer_bytes_max=5000)),
        ([good], TransportOptions(transfer_bytes_max=1 << 40)),
        ([good], TransportOptions(bounce_bytes=0)),
    ):
        with pytest.raises(ConfigError):
            UringTransport(devices, options)


def test_no_direct_io_is_unsupported() -> None:
    with pytest.raises((UnsupportedError, DeviceError)) as caught:
        UringTransport([Device("/proc/self/comm", 4096)])
    assert isinstance(caught.value, UnsupportedError) and "O_DIRECT" in str(caught.value)


def test_nothing_leaks(tmp_path: Path) -> None:
    device = new_file(tmp_path, MIB)
    open_or_skip([device]).close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    for turn in range(10):
        transport = open_or_skip([device, device])
        run(transport, Op.WRITE, [(1, 0, [aligned(5000)])])
        if turn % 2:
            transport.close()
            transport.close()
        del transport
        with pytest.raises(DeviceError):
            UringTransport([device, Device("/nowhere", 4096)])
    assert held() == before


def test_closed(transport: UringTransport) -> None:
    memory = aligned(MIB)
    batch = make_batch(Op.WRITE, [(0, 0, [memory])])
    ticket, spent = transport.submit(batch), transport.submit(batch)
    region = transport.register(memory.ctypes.data, len(memory))
    assert transport.wait(spent, WAIT_S) is not None
    transport.close()
    transport.close()
    with pytest.raises(KeyError):
        transport.wait(spent, 0.0)
    for call in (
        lambda: transport.submit(batch),
        lambda: transport.flush(0),
        lambda: transport.register(memory.ctypes.data, len(memory)),
    ):
        with pytest.raises(StoreClosedError):
            call()
    transport.unregister(region)
    with pytest.raises(KeyError):
        transport.unregister(region)
    result = transport.wait(ticket, 0.0)
    assert result is not None and result.status[0] == 0
    assert transport.stats().write_items == 2


def test_unspent_tickets_are_bounded(transport: UringTransport) -> None:
    memory = aligned(64 << 10)
    batch = make_batch(Op.WRITE, [(0, 0, [memory])])
    tickets = [transport.submit(batch) for _ in range(BATCHES_IN_FLIGHT_MAX)]
    with pytest.raises(BusyError) as caught:
        transport.submit(batch)
    assert caught.value.retryable
    assert transport.wait(tickets.pop(), WAIT_S) is not None
    tickets.append(transport.submit(batch))
    for ticket in tickets:
        assert transport.wait(ticket, WAIT_S) is not None


def test_waits_end(transport: UringTransport) -> None:
    memory = aligned(MIB)
    for timeout_s in (float("inf"), 1e300, WAIT_S):
        ticket = transport.submit(make_batch(Op.WRITE, [(0, 0, [memory])]))
        assert transport.wait(ticket, timeout_s) is not None
    for timeout_s in (float("nan"), -5.0, float("-inf"), 0.0):
        ticket = transport.submit(make_batch(Op.WRITE, [(0, 0, [memory])]))
        while transport.wait(ticket, timeout_s) is None:
            time.sleep(0.001)
        with pytest.raises(KeyError):
            transport.wait(ticket, timeout_s)


# -- registration ----------------------------------------------------------------------------------


def test_registered_memory_is_used(transport: UringTransport) -> None:
    memory, target = aligned(4 * MIB), aligned(4 * MIB, 0)

    def fixed(op: Op, parts: list[Memory]) -> int:
        before = transport.stats().extra["fixed_transfers"]
        assert run(transport, op, [(0, 0, parts)]).status[0] == 0
        return transport.stats().extra["fixed_transfers"] - before

    assert transport.capabilities().registered_buffers
    assert fixed(Op.WRITE, [memory]) == 0
    region = transport.register(memory.ctypes.data, len(memory))
    other = transport.register(target.ctypes.data, MIB)
    assert region != other
    assert fixed(Op.WRITE, [memory]) == 4
    assert fixed(Op.READ, [target]) == 1  # only the first MiB is registered
    assert np.array_equal(memory, target)
    transport.unregister(other)
    assert fixed(Op.READ, [target]) == 0
    # The bounce arena is registered too.
    assert fixed(Op.READ, [target[1:MIB]]) == 1
    transport.unregister(region)
    assert fixed(Op.WRITE, [memory]) == 0
    for spent in (region, 0, -1, 1 << 40):
        with pytest.raises(KeyError):
            transport.unregister(spent)
    for address, length in ((0, 4096), (4096, 0), (-1, 1), ((1 << 64) - 1, 4096)):
        with pytest.raises(ValueError):
            transport.register(address, length)


def test_a_refused_region_is_noted_and_works(transport: UringTransport) -> None:
    memory = aligned(MIB)
    said = transport.capabilities()
    assert said.notes == ()
    region = transport.register(1 << 46, 1 << 20)  # nothing is mapped there
    notes = transport.capabilities().notes
    assert len(notes) == 1 and "registering a memory region was refused" in notes[0]
    assert run(transport, Op.WRITE, [(0, 0, [memory])]).status[0] == 0
    transport.unregister(region)


def test_registering_during_io(transport: UringTransport) -> None:
    """The table of buffers changes under transfers that use it."""
    memory, target = aligned(8 * MIB), aligned(8 * MIB, 0)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            regions = [
                transport.register(array.ctypes.data + skip, MIB)
                for array in (memory, target)
                for skip in (0, 3 * MIB)
            ]
            for region in regions:
                transport.unregister(region)

    with beside(churn, churn, stop=stop.set):
        for turn in range(30):
            memory[::4096] = turn
            pieces = [slice(i * MIB, (i + 1) * MIB) for i in range(8)]
            items = [(0, piece.start, [memory[piece]]) for piece in pieces]
            assert not run(transport, Op.WRITE, items).status.any()
            items = [(0, piece.start, [target[piece]]) for piece in pieces]
            assert not run(transport, Op.READ, items).status.any()
            assert np.array_equal(memory, target)


# -- other processes -------------------------------------------------------------------------------


def run_python(code: str) -> str:
    """Run a program in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("limit_bytes", [256 << 10, 0])
def test_without_locked_memory(tmp_path: Path, limit_bytes: int) -> None:
    """A locked-memory limit and no CAP_IPC_LOCK: nothing can be registered, everything works.

    Some kernels count the rings themselves too; with a limit of 0 those have no io_uring at all.
    """
    code = f"""
        import ctypes, resource, struct
        import numpy as np
        from tutti_core.errors import UnsupportedError
        from tutti_core.io.transport import *
        from tutti_core.io.uring import UringTransport
        libc = ctypes.CDLL(None, use_errno=True)
        header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
        data = ctypes.create_string_buffer(24)
        assert libc.capget(header, data) == 0
        sets = [word & ~(1 << 14) if i < 3 else word
                for i, word in enumerate(struct.unpack("6I", data.raw[:24]))]
        assert libc.capset(header, ctypes.create_string_buffer(struct.pack("6I", *sets))) == 0
        resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit_bytes}, {limit_bytes}))
        try:
            transport = UringTransport([Device({new_file(tmp_path, MIB).path!r}, {MIB})])
        except UnsupportedError as error:
            assert {limit_bytes} == 0
            print(error)
            raise SystemExit(0)
        memory = np.frombuffer(np.random.default_rng(1).bytes(500_000), np.uint8)
        target = np.zeros_like(memory)
        region = transport.register(target.ctypes.data, len(target))
        def batch(op, array):
            return Batch(op, np.zeros(1, np.uint32), np.zeros(1, np.uint64),
                         np.arange(2, dtype=np.uint32), np.array([array.ctypes.data], np.uint64),
                         np.array([len(array)], np.uint64))
        for op, array in ((Op.WRITE, memory), (Op.READ, target)):
            assert transport.wait(transport.submit(batch(op, array)), 60).status[0] == 0
        assert np.array_equal(memory, target)
        transport.unregister(region)
        said = transport.capabilities()
        assert not said.registered_buffers, said
        assert transport.stats().extra["fixed_transfers"] == 0
        print(*said.notes)
    """
    assert "ulimit -l" in run_python(code)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_without_io_uring(tmp_path: Path, code: int) -> None:
    """As in a container whose seccomp profile refuses io_uring_setup."""
    program = f"""
        import ctypes, struct
        from tutti_core.errors import UnsupportedError
        from tutti_core.io.transport import Device
        from tutti_core.io.uring import UringTransport
        rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | {code}),
                 (0x06, 0, 0, 0x7FFF0000)]
        filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *r) for r in rules))
        program = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(filters)))
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0
        try:
            UringTransport([Device({new_file(tmp_path, MIB).path!r}, {MIB})])
        except UnsupportedError as error:
            print(error.errno, error.hint != "")
    """
    assert run_python(program) == f"{code} True"


def test_a_forked_child_is_refused_and_ends(tmp_path: Path) -> None:
    code = f"""
        import os, sys
        import numpy as np
        from tutti_core.errors import StoreClosedError
        from tutti_core.io.transport import *
        from tutti_core.io.uring import UringTransport
        transport = UringTransport([Device({new_file(tmp_path, MIB).path!r}, {MIB})])
        memory = np.full(5000, 9, np.uint8)
        batch = Batch(Op.WRITE, np.zeros(1, np.uint32), np.zeros(1, np.uint64),
                      np.arange(2, dtype=np.uint32), np.array([memory.ctypes.data], np.uint64),
                      np.array([5000], np.uint64))
        tickets = [transport.submit(batch) for _ in range(50)]
        def refused(call):
            try:
                call()
            except StoreClosedError:
                return True
            return False
        for close in (True, False):
            child = os.fork()
            if child == 0:
                ok = all((refused(lambda: transport.submit(batch)),
                          refused(lambda: transport.flush(0)),
                          refused(lambda: transport.wait(tickets[0], 1.0)),
                          refused(lambda: transport.register(memory.ctypes.data, 4096))))
                transport.capabilities()
                if close:
                    transport.close()
                    transport.close()
                del transport  # the destructor has to leave the parent's threads alone
                sys.exit(0 if ok else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for ticket in tickets:
            assert transport.wait(ticket, 60).status[0] == 0
        assert transport.flush(0) == 0
        transport.close()
        print("ok")
    """
    assert run_python(code) == "ok"


def test_leaving_without_close(tmp_path: Path) -> None:
    """An interpreter that exits with I/O in flight ends, and without a crash."""
    code = f"""
        import numpy as np
        from tutti_core.io.transport import *
        from tutti_core.io.uring import UringTransport
        transport = UringTransport([Device({new_file(tmp_path, 64 * MIB).path!r}, {64 * MIB})])
        memory = np.full({4 * MIB}, 9, np.uint8)
        n = 16
        batch = Batch(Op.WRITE, np.zeros(n, np.uint32), np.arange(n, dtype=np.uint64) * {4 * MIB},
                      np.arange(n + 1, dtype=np.uint32), np.full(n, memory.ctypes.data, np.uint64),
                      np.full(n, {4 * MIB}, np.uint64))
        transport.submit(batch)
        print("ok")
    """
    assert run_python(code) == "ok"
