"""GdsTransport against stand-ins: it conforms, never touches device memory, and says what it uses.

What a stand-in cannot show, real DMA and its speed, is listed in docs/paths.md.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gds_stand_in import SHIFT, Shifted, StandInCuda, StandInKvikio

from tutti_core import Namespace, PageFragments, PageKeys, PrefixStore
from tutti_core.errors import ConfigError, DeviceError, UnsupportedError
from tutti_core.io import cuda as cuda_module
from tutti_core.io.cuda import HOST, CudaDriver
from tutti_core.io.gds import GdsTransport
from tutti_core.io.posix import PosixTransport
from tutti_core.io.select import open_transport
from tutti_core.io.transport import BLOCK_BYTES, Batch, Device, Op, Transport, TransportOptions
from tutti_core.testing import CHECKS, Arena, CheckSkipped, Item, Subject, make_batch

WAIT_S = 60.0
CAPACITY = 64 * BLOCK_BYTES
_names = itertools.count()


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> StandInKvikio:
    """A stand-in in the place of the module."""
    stand_in = StandInKvikio(StandInCuda())
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return stand_in


def files(folder: Path, capacities: Sequence[int]) -> list[Device]:
    devices = []
    for capacity in capacities:
        path = folder / f"device{next(_names)}"
        with path.open("wb") as file:
            file.truncate(capacity)
        devices.append(Device(str(path), capacity))
    return devices


def open_gds(
    kvikio: StandInKvikio,
    folder: Path,
    *capacities: int,
    options: TransportOptions = TransportOptions(),  # noqa: B008
) -> GdsTransport:
    devices = files(folder, capacities or (CAPACITY,))
    return GdsTransport(devices, options, host=PosixTransport(devices, options), cuda=kvikio.cuda)


# -- conformance -----------------------------------------------------------------------------------


@contextmanager
def stall(transport: Transport) -> Iterator[None]:
    """Occupy every worker of the transport and of the one for host memory."""
    assert isinstance(transport, Shifted) and isinstance(transport.inner._host, PosixTransport)
    gate = threading.Event()
    try:
        for _ in range(transport.inner._workers):
            transport.inner._pool.submit(gate.wait)
        for queue in transport.inner._host._queues:
            for _ in range(transport.inner._host._workers):
                queue.put(gate.wait)
        yield
    finally:
        gate.set()


def truncate_device(transport: Transport, device: int) -> None:
    os.truncate(transport.devices[device].path, 0)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("memory", ["device", "host", "mixed", "short"])
def test_conforms(
    memory: str, check: str, kvikio: StandInKvikio, tmp_path: Path, rng: random.Random
) -> None:
    """All device memory; none; some of each, also within items; transfers that end early."""
    host_each = {"device": 0, "host": 1, "mixed": 3, "short": 5}[memory]
    options = TransportOptions()
    if memory == "short":
        kvikio.rng = rng
        options = TransportOptions(queue_depth=2, transfer_bytes_max=4 * BLOCK_BYTES)

    def make(capacities: Sequence[int]) -> Transport:
        return Shifted(open_gds(kvikio, tmp_path, *capacities, options=options), host_each)

    try:
        CHECKS[check](Subject(make, stall, truncate_device))
    except CheckSkipped as reason:
        pytest.skip(f"missing capability: {reason}")
    assert kvikio.open_files == 0 and not kvikio.registered


# -- what moves how --------------------------------------------------------------------------------


class Bench:
    """A transport with one device, and memory that poses as device memory."""

    def __init__(self, transport: GdsTransport) -> None:
        self.transport = transport
        self.arena = Arena(1 << 20, random.Random(1))

    def batch(
        self, op: Op, *items: Sequence[int], device: bool = True, checksum: bool = True
    ) -> Batch:
        block, made = 0, []
        for lengths in items:
            made.append(Item(0, block * BLOCK_BYTES, self.arena.carve(lengths)))
            block += -(-sum(lengths) // BLOCK_BYTES)
        batch = make_batch(op, self.arena, made, checksum=checksum)
        if device:
            batch.address[:] += np.uint64(SHIFT)
        return batch

    def run(self, batch: Batch) -> list[int]:
        result = self.transport.wait(self.transport.submit(batch), WAIT_S)
        assert result is not None
        return result.status.tolist()


@pytest.fixture
def bench(kvikio: StandInKvikio, tmp_path: Path) -> Iterator[Bench]:
    transport = open_gds(kvikio, tmp_path)
    yield Bench(transport)
    transport.close()


def test_whole_blocks_of_a_fragment_move_straight(bench: Bench, kvikio: StandInKvikio) -> None:
    block = BLOCK_BYTES
    assert bench.run(bench.batch(Op.WRITE, [3 * block, 2 * block], [block])) == [0, 0]
    stats = bench.transport.stats()
    assert kvikio.calls == 3 and stats.bounced_bytes == 0
    assert stats.extra == {"gds_bytes": 6 * block, "hashed_device_bytes": 6 * block}
    assert bench.run(bench.batch(Op.READ, [6 * block], checksum=False)) == [0]
    stats = bench.transport.stats()
    assert kvikio.calls == 4
    assert stats.extra == {"gds_bytes": 12 * block, "hashed_device_bytes": 6 * block}


def test_blocks_where_fragments_meet_or_end_are_bounced(
    bench: Bench, kvikio: StandInKvikio
) -> None:
    block = BLOCK_BYTES
    # 0..1.5, 1.5..4, 4..4.25 blocks: block 1 straddles, block 4 is not full
    assert bench.run(bench.batch(Op.WRITE, [3 * block // 2, 5 * block // 2, block // 4])) == [0]
    assert kvikio.calls == 2
    assert bench.transport.stats().bounced_bytes == 2 * block
    assert bench.transport.stats().extra["gds_bytes"] == 3 * block


def test_host_memory_goes_to_the_other_transport(bench: Bench, kvikio: StandInKvikio) -> None:
    assert bench.run(bench.batch(Op.WRITE, [BLOCK_BYTES], device=False)) == [0]
    assert kvikio.calls == 0
    assert bench.transport._host.stats().write_items == 1
    assert bench.transport.stats().write_items == 1


def test_a_batch_is_split_and_its_results_come_together(
    bench: Bench, kvikio: StandInKvikio
) -> None:
    batch = bench.batch(Op.WRITE, *[[BLOCK_BYTES]] * 4)
    batch.address[::2] -= np.uint64(SHIFT)
    batch.length_bytes[2] = CAPACITY + 1
    assert bench.run(batch) == [0, 0, -errno.ERANGE, 0]
    stats = bench.transport.stats()
    assert (stats.write_items, stats.write_bytes, stats.failed_items) == (3, 3 * BLOCK_BYTES, 1)
    assert kvikio.calls == 2


def test_registered_memory_is_named_by_its_base(bench: Bench, kvikio: StandInKvikio) -> None:
    address, length = bench.arena.address + SHIFT, len(bench.arena.memory)
    region = bench.transport.register(address, length)
    assert kvikio.registered == {address: length}
    asked = kvikio.cuda.asked
    assert bench.run(bench.batch(Op.WRITE, [BLOCK_BYTES, BLOCK_BYTES], checksum=False)) == [0]
    assert kvikio.on_base == kvikio.calls == 2
    assert kvikio.cuda.asked == asked + 2, "the driver was asked about registered memory"
    bench.transport.unregister(region)
    assert not kvikio.registered
    assert bench.run(bench.batch(Op.READ, [2 * BLOCK_BYTES])) == [0]
    assert kvikio.on_base == 2


def test_registration_that_is_refused_is_noted(bench: Bench, kvikio: StandInKvikio) -> None:
    kvikio.refuse_registration = True
    region = bench.transport.register(bench.arena.address + SHIFT, 1 << 20)
    assert "max pinned memory" in bench.transport.capabilities().notes[-1]
    assert bench.run(bench.batch(Op.WRITE, [BLOCK_BYTES])) == [0]
    bench.transport.unregister(region)
    with pytest.raises(KeyError):
        bench.transport.unregister(region)
    with pytest.raises(ValueError, match="cannot register"):
        bench.transport.register(0, 1)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("cuFile error: internal"), -errno.EIO),
        (OSError(errno.ENOSPC, "no space"), -errno.ENOSPC),
    ],
)
def test_what_cufile_raises_fails_one_item(
    error: Exception, status: int, bench: Bench, kvikio: StandInKvikio
) -> None:
    kvikio.errors = [error]
    statuses = bench.run(bench.batch(Op.WRITE, *[[BLOCK_BYTES]] * 5))
    assert sorted(statuses) == [status, 0, 0, 0, 0]
    assert bench.transport.stats().failed_items == 1


def test_address_zero_fails_its_item(bench: Bench) -> None:
    batch = bench.batch(Op.READ, [BLOCK_BYTES, BLOCK_BYTES])
    batch.address[1] = 0
    assert bench.run(batch) == [-errno.EFAULT]


def test_the_number_of_calls_in_flight_is_bounded(kvikio: StandInKvikio, tmp_path: Path) -> None:
    transport = open_gds(kvikio, tmp_path, options=TransportOptions(queue_depth=3))
    assert transport.capabilities().queue_depth == transport._pool._count == 3
    transport.close()


def test_a_device_address_kills_who_touches_it() -> None:
    """The stand-in proves something: the CPU can't read what it calls device memory."""
    code = (
        "import ctypes; memory = (ctypes.c_char * 8)(); "
        f"ctypes.string_at(ctypes.addressof(memory) + {SHIFT}, 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode < 0


# -- with a store ----------------------------------------------------------------------------------


SETTINGS = {"capacity": "64MiB", "transport": "posix", "segment": "1MiB"}


def in_host_memory(data: np.ndarray, parts: tuple[int, ...]) -> PageFragments:
    """Pages of contiguous bytes, a fragment a part."""
    starts = np.cumsum([0, *parts[:-1]]).astype(np.uint64)
    rows = np.arange(len(data), dtype=np.uint64)[:, None] * np.uint64(data.shape[1])
    address = rows + starts + np.uint64(data.ctypes.data)
    return PageFragments(address, np.array(parts, np.uint64), data)


@pytest.mark.parametrize("parts", [(3 * BLOCK_BYTES, 5 * BLOCK_BYTES), (100, 5000)])
def test_a_store_loads_into_device_memory(
    parts: tuple[int, ...], kvikio: StandInKvikio, store_dir: Path, rng: random.Random
) -> None:
    count, size = 20, sum(parts)
    data = np.frombuffer(rng.randbytes(count * size), np.uint8).reshape(count, size)
    keys = PageKeys(rng.randbytes(16 * count), 16)
    namespace = Namespace(model="m", page_tokens=1, page_bytes=size, parts=parts)
    with PrefixStore.open(store_dir, **SETTINGS) as store:
        assert store.namespace(namespace).save(keys, in_host_memory(data, parts)).wait(WAIT_S).all()
        devices = store._transport.devices
    transport = GdsTransport(devices, host=PosixTransport(devices), cuda=kvikio.cuda)
    target = np.full((count, size), 0xA5, np.uint8)

    def read(part: int) -> np.ndarray:
        start = target.ctypes.data + SHIFT + sum(parts[:part])
        address = (start + np.arange(count) * size).astype(np.uint64)[:, None]
        return load.finish(load.start(part, address=address), WAIT_S)

    with PrefixStore.open(store_dir, **SETTINGS, transport_object=transport) as store:
        load = store.namespace(namespace).load_parts(keys, None)
        assert load.found.all() and read(0).all() and read(1).all()
        load.end()
        assert (target == data).all()
        assert store.stats().transport.name == "gds"
        assert transport.stats().extra["hashed_device_bytes"] == data.nbytes
        whole = parts[0] % BLOCK_BYTES == 0
        assert transport.stats().extra["gds_bytes"] == (data.nbytes if whole else count * 4096)
        if whole:
            kvikio.errors = [RuntimeError("cuFile error: internal")]
            load = store.namespace(namespace).load_parts(keys, None)
            assert np.count_nonzero(read(0)) == count - 1
            load.end()


# -- what is missing, and what is said -------------------------------------------------------------


@pytest.fixture
def devices(tmp_path: Path) -> list[Device]:
    return files(tmp_path, [CAPACITY])


def test_by_name_without_kvikio(devices: list[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    files_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError, match=r"gds needs kvikio.*tutti\[gds\]"):
        open_transport("gds", devices)
    assert len(os.listdir("/proc/self/fd")) == files_before


def test_by_name_without_a_driver(
    devices: list[Device], kvikio: StandInKvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_module.ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match=r"no CUDA driver: libcuda\.so\.1"):
        open_transport("gds", devices)


def test_by_name_with_everything(
    devices: list[Device], kvikio: StandInKvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti_core.io.gds.CudaDriver", lambda: kvikio.cuda)
    transport = open_transport("gds", devices)
    assert transport.capabilities().name == "gds"
    transport.close()


def test_auto_never_takes_it(devices: list[Device], kvikio: StandInKvikio) -> None:
    transport = open_transport("auto", devices)
    assert transport.capabilities().name != "gds" and kvikio.open_files == 0
    transport.close()


def test_a_missing_device(kvikio: StandInKvikio, tmp_path: Path, devices: list[Device]) -> None:
    wrong = [*devices, Device(str(tmp_path / "missing"), CAPACITY)]
    with posix_on(devices) as host, pytest.raises(DeviceError, match="missing"):
        GdsTransport(wrong, host=host, cuda=kvikio.cuda)
    assert kvikio.open_files == 0


@contextmanager
def posix_on(devices: Sequence[Device]) -> Iterator[PosixTransport]:
    transport = PosixTransport(devices)
    yield transport
    transport.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("cuFile error: unsupported file system"), UnsupportedError),
        (OSError(errno.EACCES, "denied"), DeviceError),
    ],
)
def test_a_file_that_cufile_does_not_take(
    error: Exception,
    expected: type[Exception],
    kvikio: StandInKvikio,
    devices: list[Device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str, flags: str) -> None:
        raise error

    monkeypatch.setattr(kvikio, "CuFile", refuse)
    with posix_on(devices) as host, pytest.raises(expected):
        GdsTransport(devices, host=host, cuda=kvikio.cuda)


@pytest.mark.parametrize(
    ("change", "said", "direct"),
    [
        (lambda k: None, "cuFile and nvidia-fs, compatibility mode AUTO", True),
        (lambda k: setattr(k, "mode", "CompatMode.ON"), "compatibility mode (ON)", False),
        (lambda k: setattr(k, "cufile", False), "found no cuFile (libcufile", False),
        (lambda k: setattr(k, "nvfs", False), "without nvidia-fs", True),
        (lambda k: setattr(k, "nvfs", None), "without nvidia-fs", True),
    ],
)
def test_the_mode_of_kvikio_is_said(
    change: Callable[[StandInKvikio], None],
    said: str,
    direct: bool,
    kvikio: StandInKvikio,
    devices: list[Device],
) -> None:
    change(kvikio)
    options = TransportOptions()
    host = PosixTransport(devices, options, direct=True)
    transport = GdsTransport(devices, options, host=host, cuda=kvikio.cuda)
    able = transport.capabilities()
    assert said in able.notes[0] and able.direct == (direct,)
    assert any("computed on the host" in note for note in able.notes)
    assert any("host memory goes through posix" in note for note in able.notes)
    transport.close()


def test_settings_of_older_kvikio(
    kvikio: StandInKvikio, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    kvikio.defaults = SimpleNamespace(compat_mode=lambda: "CompatMode.AUTO")
    kvikio.cufile_driver = SimpleNamespace(
        DriverProperties=lambda: SimpleNamespace(is_gds_available=True),
        driver_open=lambda: None,
        driver_close=lambda: None,
    )
    with posix_on(devices) as host:
        transport = GdsTransport(devices, host=host, cuda=kvikio.cuda)
        assert "compatibility mode AUTO" in transport.capabilities().notes[0]
        transport.close()


def test_options_are_checked(kvikio: StandInKvikio, devices: list[Device]) -> None:
    options = TransportOptions(transfer_bytes_max=BLOCK_BYTES + 1)
    with posix_on(devices) as host, pytest.raises(ConfigError):
        GdsTransport(devices, options, host=host, cuda=kvikio.cuda)


# -- the driver ------------------------------------------------------------------------------------


class Library:
    """libcuda with one GPU: device memory from 1 << 40 on, managed memory from 1 << 41 on."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        self.current: list[int] = []

    def cuInit(self, flags: int) -> int:
        return 0 if self.gpus else 100

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0 if ordinal < self.gpus else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 4096 + handle.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current.append(context.value)
        return 0

    def cuPointerGetAttribute(self, value: Any, attribute: int, address: Any) -> int:
        if address.value < 1 << 40:
            return 1
        managed = address.value >= 1 << 41
        value._obj.value = {2: 2, 8: int(managed), 9: 0}[attribute]
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, length: Any) -> int:
        ctypes.memmove(target.value, source.value - SHIFT, length.value)
        return 0

    def cuMemcpyHtoD_v2(self, target: Any, source: Any, length: Any) -> int:
        ctypes.memmove(target.value - SHIFT, source.value, length.value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    monkeypatch.setattr(cuda_module.ctypes, "CDLL", lambda name: Library())
    return CudaDriver()


def test_the_driver_tells_memory_apart(driver: CudaDriver) -> None:
    assert driver.device_of(4096) == HOST
    assert driver.device_of(1 << 40) == 0
    assert driver.device_of(1 << 41) == HOST


def test_the_driver_copies_both_ways(driver: CudaDriver) -> None:
    here, there = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    driver.to_device(there.ctypes.data + SHIFT, here.ctypes.data, 64)
    assert (there == here).all()
    here[:] = 0
    driver.to_host(here.ctypes.data, there.ctypes.data + SHIFT, 64)
    assert (there == here).all() and here.any()


def test_the_driver_sets_one_context_a_gpu(driver: CudaDriver) -> None:
    driver.use(0)
    driver.use(0)
    assert driver._library.current == [4096, 4096]
    with pytest.raises(DeviceError, match="cuDeviceGet failed with status 101"):
        driver.use(3)


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module.ctypes, "CDLL", lambda name: Library(gpus=0))
    with pytest.raises(UnsupportedError, match="finds no GPU"):
        CudaDriver()
