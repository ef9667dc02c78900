"""GioRing and NvmeController as Python sees them; what lanes do is tested in tests/native."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from tutti_core._native import (
    GIO_DEPTH_MAX,
    GIO_FRAGMENTS_MAX,
    GioRing,
    NvmeController,
    SoftController,
)

PAGE = 4096
NAMESPACE_BYTES = 4 << 20
MEMORY_BYTES = 1 << 20
PATIENCE_S = 30.0
TIMEOUT = 0x10000
NOT_ISSUED = 0x10002
BAD_MEMORY = 0x10003
IDS = npt.NDArray[np.uint32]


class Rig:
    """Two software controllers, memory that both reach, and a ring over them."""

    def __init__(self, *, timeout_s: float = PATIENCE_S, depth: int = 4, threads: int = 2) -> None:
        self.softs = [
            SoftController(namespace_bytes=NAMESPACE_BYTES, serial=f"S{at}") for at in (0, 1)
        ]
        self.controllers = [NvmeController(soft, queue_pairs=2) for soft in self.softs]
        self._mapped = mmap.mmap(-1, MEMORY_BYTES)
        self.memory = np.frombuffer(self._mapped, np.uint8)
        self.base = self.memory.ctypes.data
        self.regions = [one.register_memory(self.base, MEMORY_BYTES) for one in self.controllers]
        assert min(self.regions) >= 0
        self.ring = GioRing(
            [(one, 1) for one in self.controllers],
            depth=depth,
            threads=threads,
            timeout_s=timeout_s,
        )

    def prepare(self, iocb: int, count: int, *, op: int = 0, device: int = 0) -> int:
        """Pages 0, 1, ... of a device, from and to the same pages of memory."""
        at = np.arange(count, dtype=np.uint64) * np.uint64(PAGE)
        return self.ring.prepare(
            iocb,
            op,
            np.full(count, device, np.uint32),
            at,
            at % np.uint64(MEMORY_BYTES) + np.uint64(self.base),
            np.full(count, PAGE, np.uint64),
        )

    def issue(self, count: int, *, op: int = 0, device: int = 0) -> int:
        (iocb,) = self.ring.get_iocb(1)
        assert self.prepare(iocb, count, op=op, device=device) == 0
        assert self.ring.issue_io(ids(iocb), 2) == 0
        return iocb

    def wait(self, iocb: int) -> IDS:
        statuses = self.ring.wait_cqe(iocb, PATIENCE_S)
        assert statuses is not None
        return statuses

    def wait_for_faults(self, count: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.softs[0].stats()["faults"] < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    def close(self) -> None:
        for soft in self.softs:
            soft.release()
        self.ring.close()
        for controller in self.controllers:
            controller.close()
        for soft in self.softs:
            soft.close()


def ids(*iocbs: int) -> IDS:
    return np.array(iocbs, np.uint32)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_bytes_go_there_and_back(rig: Rig) -> None:
    random = np.random.default_rng(1)
    for lap in range(3):
        for device in (0, 1):
            rig.memory[:] = random.integers(0, 256, MEMORY_BYTES, np.uint8)
            written = rig.memory.copy()
            statuses = rig.wait(rig.issue(100, op=1, device=device))
            assert statuses.dtype == np.uint32 and statuses.tolist() == [0] * 100
            media = rig.softs[device].media(1)
            assert np.array_equal(media[: 100 * PAGE], written[: 100 * PAGE])
            assert lap or not media[100 * PAGE :].any()
            rig.memory[:] = 0
            assert not rig.wait(rig.issue(100, device=device)).any()
            assert np.array_equal(rig.memory[: 100 * PAGE], written[: 100 * PAGE])
            assert not rig.memory[100 * PAGE :].any()
    stats = rig.ring.stats()
    assert stats["launches"] == stats["iocbs"] == 12 and stats["fragments"] == 1200
    assert stats["failed_fragments"] == stats["timeouts"] == stats["resets"] == 0


def test_one_launch_for_several_iocbs(rig: Rig) -> None:
    iocbs = rig.ring.get_iocb(3)
    assert sorted(iocbs) == sorted(set(iocbs)) and rig.ring.get_iocb(2) == []
    for device, iocb in enumerate(iocbs):
        assert rig.prepare(iocb, 10, device=device % 2) == 0
    assert rig.ring.issue_io(ids(*iocbs), 2) == 0
    for iocb in iocbs:
        assert not rig.wait(iocb).any()
    assert rig.ring.stats()["launches"] == 1
    assert len(rig.ring.get_iocb(4)) == 4 and rig.ring.get_iocb(0) == []


def test_a_bad_fragment_stops_no_other(rig: Rig) -> None:
    (iocb,) = rig.ring.get_iocb(1)
    at = np.arange(3, dtype=np.uint64) * np.uint64(PAGE)
    address = at + np.uint64(rig.base)
    address[1] = 64
    length = np.full(3, PAGE, np.uint64)
    assert rig.ring.prepare(iocb, 0, np.zeros(3, np.uint32), at, address, length) == 0
    rig.memory[:] = 7
    assert rig.ring.issue_io(ids(iocb), 1) == 0
    assert rig.wait(iocb).tolist() == [0, BAD_MEMORY, 0]
    assert not rig.memory[:PAGE].any() and (rig.memory[PAGE : 2 * PAGE] == 7).all()
    assert rig.ring.stats()["refused_fragments"] == 1


def test_what_does_not_fit_is_refused(rig: Rig) -> None:
    (iocb,) = rig.ring.get_iocb(1)
    assert rig.prepare(iocb, GIO_FRAGMENTS_MAX) == 0
    assert rig.prepare(iocb, GIO_FRAGMENTS_MAX + 1) == -errno.EINVAL
    assert rig.prepare(iocb, 1, op=2) == -errno.EINVAL
    assert rig.prepare(iocb, 1, device=2) == -errno.EINVAL
    assert rig.prepare(99, 1) == -errno.EINVAL
    with pytest.raises(TypeError):
        column = np.zeros(1, np.uint64)
        rig.ring.prepare(iocb, 0, column, column, column, column)  # type: ignore[arg-type]
    assert rig.ring.issue_io(ids(99), 1) == -errno.EINVAL
    assert rig.ring.issue_io(ids(), 1) == -errno.EINVAL
    for not_issued in (iocb, (iocb + 1) % 4, 99):
        with pytest.raises(OSError) as error:
            rig.ring.wait_cqe(not_issued, 0.0)
        assert error.value.errno == errno.EINVAL
    assert rig.ring.put_back(iocb) == 0 and rig.ring.put_back(iocb) == -errno.EINVAL
    for wrong in ({"depth": 0}, {"depth": GIO_DEPTH_MAX + 1}):
        with pytest.raises(OSError, match="1 to 256"):
            GioRing([(rig.controllers[0], 1)], threads=1, timeout_s=1.0, **wrong)
    with pytest.raises(OSError, match="namespace 2"):
        GioRing([(rig.controllers[0], 2)], depth=1, threads=1, timeout_s=1.0)


def test_other_threads_run_while_one_waits(rig: Rig) -> None:
    rig.softs[0].inject("hold")
    iocb = rig.issue(2)
    assert rig.ring.wait_cqe(iocb, 0.01) is None and rig.ring.wait_cqe(iocb, -1.0) is None
    rig.wait_for_faults(1)
    timer = threading.Timer(0.05, rig.softs[0].release)
    timer.start()  # needs the interpreter while this thread waits
    assert rig.wait(iocb).tolist() == [0, 0]
    timer.join()


def test_memory_of_a_timeout_is_the_devices_until_the_reset() -> None:
    rig = Rig(timeout_s=0.1)
    rig.softs[0].inject("hold")
    assert rig.wait(rig.issue(3)).tolist() == [TIMEOUT, 0, 0]
    assert rig.controllers[0].unregister_memory(rig.regions[0]) == -errno.EBUSY
    assert rig.controllers[1].unregister_memory(rig.regions[1]) == 0
    rig.ring.reset_device(0, PATIENCE_S)
    assert rig.controllers[0].unregister_memory(rig.regions[0]) == 0
    rig.controllers[0].register_memory(rig.base, MEMORY_BYTES)
    assert not rig.wait(rig.issue(3)).any()
    # The same by way of the controller.
    rig.softs[0].inject("lose")
    assert rig.wait(rig.issue(3)).tolist() == [TIMEOUT, 0, 0]
    rig.controllers[0].reset()
    assert rig.controllers[0].unregister_memory(rig.regions[0]) == 0
    assert rig.ring.stats()["timeouts"] == 2 and rig.ring.stats()["resets"] == 1
    rig.close()


def test_counters_only_grow(rig: Rig) -> None:
    assert not rig.wait(rig.issue(50)).any()
    before = rig.controllers[0].stats()
    rig.ring.reset_device(0, PATIENCE_S)
    assert rig.controllers[0].stats() == before and before["completions"] == 50
    assert not rig.wait(rig.issue(50)).any()
    assert rig.controllers[0].stats()["completions"] == 100


def test_a_reset_of_no_device_is_an_error(rig: Rig) -> None:
    with pytest.raises(OSError) as error:
        rig.ring.reset_device(2, 1.0)
    assert error.value.errno == errno.EINVAL


def test_close_ends_what_is_in_flight() -> None:
    rig = Rig(timeout_s=0.1)
    rig.softs[0].inject("hold")
    flying, unsent = rig.issue(2), rig.ring.get_iocb(1)[0]
    assert rig.prepare(unsent, 1) == 0
    rig.wait_for_faults(1)
    threads = [threading.Thread(target=rig.ring.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.ring.issue_io(ids(unsent), 1) == -errno.ESHUTDOWN
    assert rig.ring.get_iocb(1) == []
    assert rig.wait(flying).tolist() == [TIMEOUT, 0]
    rig.ring.close()
    rig.close()


def test_a_controller_that_is_closed_under_a_ring() -> None:
    rig = Rig()
    rig.softs[0].inject("hold")
    iocb = rig.issue(2)
    rig.wait_for_faults(1)
    rig.controllers[0].close()
    assert all(status in (0x10001, NOT_ISSUED, 0) for status in rig.wait(iocb).tolist())
    assert not rig.wait(rig.issue(2, device=1)).any()
    with pytest.raises(OSError) as error:
        GioRing([(rig.controllers[0], 1)], depth=1, threads=1, timeout_s=1.0)
    assert error.value.errno == errno.EBADF
    rig.close()


def test_a_launch_that_failed() -> None:
    rig = Rig(threads=0)
    iocb = rig.issue(2)
    assert rig.ring.wait_cqe(iocb, 0.0) is None
    assert rig.ring.refuse(ids(iocb)) == 0 and rig.ring.refuse(ids(iocb)) == -errno.EINVAL
    assert rig.wait(iocb).tolist() == [NOT_ISSUED] * 2
    rig.close()


def test_everything_a_kernel_sees_is_listed(rig: Rig) -> None:
    ranges = rig.ring.shared_ranges()
    assert all(start % PAGE == 0 and length % PAGE == 0 for start, length, _ in ranges)
    assert [kind for *_, kind in ranges].count("registers") == 2
    assert any(start <= rig.ring.view_address() < start + length for start, length, _ in ranges)
    for controller in rig.controllers:
        assert set(controller.shared_ranges()) <= set(ranges)
    before = rig.ring.shared_version()
    more = mmap.mmap(-1, PAGE)
    address = np.frombuffer(more, np.uint8).ctypes.data
    region = rig.controllers[0].register_memory(address, PAGE)
    assert rig.ring.shared_version() != before and len(rig.ring.shared_ranges()) > len(ranges)
    assert rig.controllers[0].unregister_memory(region) == 0


def test_a_forked_child_leaves_it_alone(rig: Rig) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rig.ring.close()
            rig.ring.stats()
        except OSError as error:
            code = 0 if error.errno == errno.EBADF else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not rig.wait(rig.issue(5)).any()


def test_blocking_reads_and_writes_of_a_controller(rig: Rig) -> None:
    controller = rig.controllers[0]
    block = np.random.default_rng(2).integers(0, 256, 5 * PAGE, np.uint8)
    assert controller.write(1, PAGE, block, PATIENCE_S) == 0
    assert np.array_equal(rig.softs[0].media(1)[PAGE : 6 * PAGE], block)
    back = np.zeros(5 * PAGE, np.uint8)
    assert controller.read(1, PAGE, back, PATIENCE_S) == 0 and np.array_equal(back, block)
    assert controller.flush(1, PATIENCE_S) == 0
    assert controller.read(2, 0, back, PATIENCE_S) == 0x00B
    assert controller.read(1, 100, back, PATIENCE_S) == 0x002
    assert controller.read(1, NAMESPACE_BYTES, back, PATIENCE_S) & 0x7FF == 0x080
    assert controller.facts()["queue_pairs"] == 2
