"""gio_uring through its face, on CPU threads and by the CUDA executor with a stand-in for CuPy.

The stand-in runs the lanes of the kernel in warps on CPU threads, so every byte here went through
the code that a GPU runs, and the calls, their order and their failures are real. A GPU's memory
model, its registration of memory, NVRTC's output and any speed are not: docs/paths.md lists them.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cupy_stand_in import StandInCupy, build_driver, build_runner

from tutti_core._native import NvmeController, SoftController
from tutti_core.errors import ConfigError, StoreClosedError, UnsupportedError
from tutti_core.gio import cuda_executor, nvrtc, sources
from tutti_core.gio.cuda_executor import CudaExecutor
from tutti_core.gio.executor import CpuExecutor
from tutti_core.gio.nvrtc import Image, kernel_image
from tutti_core.gio.pins import PINS
from tutti_core.gio.ring import FRAGMENTS_MAX, READ, WRITE, GioQueue, init_queue
from tutti_core.testing import CHECKS, CheckSkipped
from tutti_core.testing.soft_nvme import gpu_subject

MIB = 1 << 20
WAIT_S = 60.0
IMAGE = Image(b"\x7fELF of the stand-in", "sm_90", False)
TIMEOUT, NOT_ISSUED, DEVICE_GONE, BAD_MEMORY = 0x10000, 0x10002, 0x10001, 0x10003


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_runner(tmp_path_factory.mktemp("runner"))


@pytest.fixture
def cupy(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCupy]:
    """A stand-in in the place of CuPy; in the end nothing is registered, and warps stayed whole."""
    stand_in = StandInCupy(runner)
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield stand_in
    stand_in.close()
    PINS._users.clear()  # of a test that failed
    assert not stand_in.apart, "lanes of a warp went different ways"


class Rig:
    """A software controller, memory that it may reach, and rings on it."""

    def __init__(self, *, namespaces: int = 1, mapped_bytes: int = 4 * MIB, **options: Any) -> None:
        self.soft = SoftController(namespace_bytes=4 * MIB, namespace_count=namespaces, **options)
        self.controller = NvmeController(self.soft, queue_pairs=3, queue_entries=64)
        self._raw = np.zeros(mapped_bytes + 4096, np.uint8)
        skip = -self._raw.ctypes.data % 4096
        self.memory = self._raw[skip : skip + mapped_bytes]
        self.region = self.controller.register_memory(self.memory.ctypes.data, mapped_bytes)
        assert self.region >= 0
        self.devices = [(self.controller, nsid + 1) for nsid in range(namespaces)]
        self.queues: list[GioQueue] = []
        self._places: list[int] = []
        """In memory, of IOCBs to come: those in flight have places of their own."""

    def ring(self, executor: Any = None, *, depth: int = 4, timeout_s: float = 30.0) -> GioQueue:
        queue = init_queue(self.devices, depth=depth, executor=executor, timeout_s=timeout_s)
        self.queues.append(queue)
        return queue

    def fill(self, queue: GioQueue, rng: random.Random, op: int, count: int) -> tuple[int, Any]:
        """Prepare an IOCB with random pieces of 512 bytes to 8 KiB that lie apart; its plan."""
        (iocb,) = queue.get_iocb()
        blocks = np.array([rng.randint(1, 16) for _ in range(count)], np.uint64)
        length = blocks * np.uint64(512)
        if len(self._places) < count:
            self._places = rng.sample(range(4 * MIB // 8192), 4 * MIB // 8192)
        mine, self._places = self._places[:count], self._places[count:]
        places = rng.sample(range(4 * MIB // 8192), count), mine
        offset, where = (np.array(place, np.uint64) * np.uint64(8192) for place in places)
        device = np.array([rng.randrange(len(self.devices)) for _ in range(count)], np.uint32)
        address = where + np.uint64(self.memory.ctypes.data)
        queue.prepare(iocb, op, device, offset, address, length)
        return iocb, (device, offset, where, length)

    def same(self, plan: Any) -> bool:
        """Whether each piece is the same in memory and in the namespace."""
        return all(
            np.array_equal(
                self.memory[int(at) : int(at + size)],
                self.soft.media(int(device) + 1)[int(offset) : int(offset + size)],
            )
            for device, offset, at, size in zip(*plan, strict=True)
        )

    def close(self) -> None:
        for queue in self.queues:
            queue.close()
        self.controller.close()
        self.soft.close()


@pytest.fixture
def rig(rng: random.Random) -> Iterator[Rig]:
    rig = Rig(namespaces=2)
    _scramble(rig, rng)
    yield rig
    rig.close()


def _scramble(rig: Rig, rng: random.Random) -> None:
    source = np.random.default_rng(rng.randrange(1 << 32))
    for nsid in range(len(rig.devices)):
        rig.soft.media(nsid + 1)[:] = source.integers(0, 256, 4 * MIB, np.uint8)
    rig.memory[:] = 0xA5


def _wait(queue: GioQueue, iocb: int) -> Any:
    statuses = queue.wait_cqe(iocb, WAIT_S)
    assert statuses is not None
    return statuses


@pytest.fixture(params=["cpu", "cuda"])
def executor(request: pytest.FixtureRequest, cupy: StandInCupy) -> Any:
    return CpuExecutor(threads=2, lanes=2) if request.param == "cpu" else CudaExecutor(image=IMAGE)


# -- bytes -----------------------------------------------------------------------------------------


def test_bytes_go_both_ways(executor: Any, rig: Rig, rng: random.Random) -> None:
    queue = rig.ring(executor)
    iocb, plan = rig.fill(queue, rng, READ, 300)
    assert queue.issue_io([iocb])
    assert not _wait(queue, iocb).any() and rig.same(plan)
    touched = np.zeros(len(rig.memory), bool)
    for at, size in zip(plan[2], plan[3], strict=True):
        touched[int(at) : int(at + size)] = True
    assert (rig.memory[~touched] == 0xA5).all()
    rig.memory[:] = np.frombuffer(rng.randbytes(len(rig.memory)), np.uint8)
    iocb, plan = rig.fill(queue, rng, WRITE, 200)
    assert queue.issue_io([iocb])
    assert not _wait(queue, iocb).any() and rig.same(plan)


def test_one_launch_for_several_iocbs(executor: Any, rig: Rig, rng: random.Random) -> None:
    queue = rig.ring(executor)
    made = [rig.fill(queue, rng, READ, count) for count in (1, 90, 0, 33)]
    assert queue.issue_io([iocb for iocb, _ in made])
    for iocb, plan in made:
        assert not _wait(queue, iocb).any() and rig.same(plan)
    assert queue.stats()["launches"] == 1 and queue.stats()["iocbs"] == 4
    assert len(queue.get_iocb(4)) == 4, "all are free again"


def test_bad_fragments_have_their_status_and_the_others_go_on(
    executor: Any, rig: Rig, rng: random.Random
) -> None:
    queue = rig.ring(executor)
    (iocb,) = queue.get_iocb()
    base = np.uint64(rig.memory.ctypes.data)
    offset = np.array([0, 512, 4 * MIB, 1024], np.uint64)
    address = base + np.array([0, 4 * MIB, 1024, 2048], np.uint64)
    queue.prepare(iocb, READ, np.zeros(4, np.uint32), offset, address, np.full(4, 512, np.uint64))
    assert queue.issue_io([iocb])
    assert list(_wait(queue, iocb)) == [0, BAD_MEMORY, 0x80, 0]


def test_status_of_the_device_comes_back_by_fragment(
    executor: Any, rig: Rig, rng: random.Random
) -> None:
    queue = rig.ring(executor)
    rig.soft.inject("status", skip=10, count=3, status=0x281)
    iocb, _ = rig.fill(queue, rng, READ, 64)
    assert queue.issue_io([iocb])
    statuses = _wait(queue, iocb)
    assert sorted(statuses)[-4:] == [0, 0x281, 0x281, 0x281]


def test_a_dropped_command_times_out_and_the_device_goes_on_after_its_reset(
    executor: Any, rig: Rig, rng: random.Random
) -> None:
    queue = rig.ring(executor, timeout_s=0.3)
    rig.soft.inject("drop", count=1)
    iocb, _ = rig.fill(queue, rng, READ, 40)
    assert queue.issue_io([iocb])
    statuses = _wait(queue, iocb)
    assert sorted(set(statuses)) == [0, TIMEOUT] and list(statuses).count(TIMEOUT) == 1
    queue.reset_device(0, WAIT_S)
    iocb, plan = rig.fill(queue, rng, READ, 100)
    assert queue.issue_io([iocb])
    assert not _wait(queue, iocb).any() and rig.same(plan)


def test_a_device_that_is_gone_ends_all_of_it(executor: Any, rig: Rig, rng: random.Random) -> None:
    queue = rig.ring(executor)
    rig.soft.inject("gone", skip=5, count=1)
    iocb, _ = rig.fill(queue, rng, READ, 200)
    assert queue.issue_io([iocb])
    statuses = _wait(queue, iocb)
    assert set(statuses) <= {0, DEVICE_GONE, NOT_ISSUED} and (statuses != 0).any()


def test_the_face_says_what_was_wrong(executor: Any, rig: Rig, rng: random.Random) -> None:
    queue = rig.ring(executor)
    empty = np.zeros(0, np.uint64)
    with pytest.raises(ValueError, match="issue_io"):
        queue.issue_io([0])
    with pytest.raises(ValueError, match="put_back"):
        queue.put_back(0)
    (iocb,) = queue.get_iocb()
    many = np.zeros(FRAGMENTS_MAX + 1, np.uint64)
    with pytest.raises(ValueError, match="prepare"):
        queue.prepare(iocb, READ, many.astype(np.uint32), many, many, many)
    queue.prepare(iocb, READ, np.zeros(0, np.uint32), empty, empty, empty)
    with pytest.raises(OSError):
        queue.wait_cqe(iocb, 0)
    queue.close()
    queue.close()
    with pytest.raises(StoreClosedError):
        queue.issue_io([iocb])


def test_cpu_threads_take_no_cuda_events(rig: Rig, rng: random.Random) -> None:
    queue = rig.ring()
    iocb, plan = rig.fill(queue, rng, READ, 10)
    assert not queue.issue_io([iocb], after=[1])
    assert not _wait(queue, iocb).any() and rig.same(plan)  # it ran all the same


def test_lanes_that_go_different_ways_are_found(
    cupy: StandInCupy, rig: Rig, rng: random.Random, tmp_path: Path
) -> None:
    """The control of the warps: a loop that each lane leaves when it has done its own part."""
    shutil.copytree(sources.our_headers(), tmp_path / "include")
    file = tmp_path / "include" / "tutti" / "gio_run.h"
    loop = "while (group.any(!lane.finished())) {"
    assert file.read_text().count(loop) == 1
    file.write_text(file.read_text().replace(loop, "while (!lane.finished()) {"))
    cupy.runner = build_runner(tmp_path, tmp_path / "include")
    queue = rig.ring(CudaExecutor(image=IMAGE), timeout_s=0.5)
    rig.soft.inject("drop", count=1)  # its lane stays when the others leave
    iocb, _ = rig.fill(queue, rng, READ, 13)
    assert queue.issue_io([iocb])
    _wait_for(queue, iocb)
    cupy.settle()
    assert cupy.apart
    cupy.apart = False


@pytest.mark.parametrize("check", CHECKS)
def test_the_transport_conforms(check: str, cupy: StandInCupy, tmp_path: Path) -> None:
    executors = []

    def executor() -> CudaExecutor:
        executors.append(CudaExecutor(image=IMAGE))
        return executors[-1]

    try:
        CHECKS[check](gpu_subject(tmp_path, executor=executor))
    except CheckSkipped as reason:
        pytest.skip(f"missing capability: {reason}")
    assert executors and "launchKernel" in cupy.names() and not cupy.registered


# -- what is asked of CUDA -------------------------------------------------------------------------


def test_a_ring_is_attached_in_order(cupy: StandInCupy, rig: Rig) -> None:
    queue = rig.ring(CudaExecutor(lanes=3, block_warps=2, image=IMAGE))
    names = cupy.names()
    assert names[:2] == ["moduleLoadData", "moduleGetFunction"]
    registered = [call for call in cupy.calls if call[0] == "hostRegister"]
    after = len(names) - names[::-1].index("hostRegister")
    assert names[after:] == ["streamCreateWithPriority", "eventCreateWithFlags", "launchKernel"]
    assert cupy.calls[after][1:] == (1, -5), "non-blocking, and first in line"
    assert cupy.calls[after + 2][2:9] == (3, 1, 1, 64, 1, 1, 0), "grid, block, no shared memory"
    ranges = {(at, size) for at, size, _ in queue._ring.shared_ranges()}
    assert {(call[1], call[2]) for call in registered} == ranges
    registers = [at for at, _, kind in queue._ring.shared_ranges() if kind == "registers"]
    assert [call[3] for call in registered if call[1] in registers] == [7, 3]
    assert all(call[3] == 3 for call in registered if call[1] not in registers)


def test_real_registers_are_io_memory(cupy: StandInCupy, rig: Rig) -> None:
    cupy.registers = {at for at, _, kind in rig.controller.shared_ranges() if kind == "registers"}
    assert len(cupy.registers) == 1
    rig.ring(CudaExecutor(image=IMAGE))
    flags = {call[1]: call[3] for call in cupy.calls if call[0] == "hostRegister"}
    assert {at for at, flag in flags.items() if flag == 7} == cupy.registers


def test_an_issue_is_one_launch_between_two_events(
    cupy: StandInCupy, rig: Rig, rng: random.Random
) -> None:
    executor = CudaExecutor(lanes=2, image=IMAGE)
    queue = rig.ring(executor)
    theirs = cupy._eventCreateWithFlags(2)
    iocb, _ = rig.fill(queue, rng, READ, 50)
    cupy.calls.clear()
    assert queue.issue_io([iocb], sms=7, after=[theirs])
    assert cupy.names() == ["streamWaitEvent", "launchKernel", "eventRecord"]
    stream = executor.stream(queue._ring)
    assert cupy.calls[0][1:3] == (stream, theirs) and cupy.calls[1][2] == 7
    assert cupy.calls[2][2] == stream and cupy.calls[1][9] == stream
    executor.after(queue._ring, stream=4242)
    assert cupy.calls[3] == ("streamWaitEvent", 4242, cupy.calls[2][1])
    _wait(queue, iocb)


def test_an_iocb_without_fragments_needs_no_launch(cupy: StandInCupy, rig: Rig) -> None:
    queue = rig.ring(CudaExecutor(image=IMAGE))
    iocb, _ = rig.fill(queue, random.Random(1), READ, 0)
    cupy.calls.clear()
    assert queue.issue_io([iocb]) and len(_wait(queue, iocb)) == 0
    assert cupy.names() == []


def test_closing_waits_then_lets_go_in_order(
    cupy: StandInCupy, rig: Rig, rng: random.Random
) -> None:
    queue = rig.ring(CudaExecutor(image=IMAGE))
    iocb, _ = rig.fill(queue, rng, READ, 64)
    queue.issue_io([iocb])
    cupy.calls.clear()
    queue.close()  # the stand-in refuses to unregister while a kernel runs
    names = cupy.names()
    assert names[-2:] == ["eventDestroy", "streamDestroy"]
    assert set(names[:-2]) == {"hostUnregister"} and not cupy.registered and not len(PINS)


def test_two_rings_share_what_is_registered(
    cupy: StandInCupy, rig: Rig, rng: random.Random
) -> None:
    executor = CudaExecutor(image=IMAGE)
    first, second = rig.ring(executor), rig.ring(CudaExecutor(image=IMAGE))
    first.close()
    iocb, plan = rig.fill(second, rng, READ, 60)
    assert second.issue_io([iocb])
    assert not _wait(second, iocb).any() and rig.same(plan)
    second.close()
    assert not cupy.registered and not len(PINS)


def test_lists_of_memory_that_comes_later_are_registered_first(
    cupy: StandInCupy, rng: random.Random
) -> None:
    rig = Rig(sgl=False, shadow_doorbells=False)
    _scramble(rig, rng)
    queue = rig.ring(CudaExecutor(image=IMAGE))
    for _ in range(2):
        assert rig.controller.unregister_memory(rig.region) == 0
        more = np.zeros(600 * 4096, np.uint8)  # two list pages
        skip = -more.ctypes.data % 4096
        other = rig.controller.register_memory(more.ctypes.data + skip, 500 * 4096)
        rig.region = rig.controller.register_memory(rig.memory.ctypes.data, len(rig.memory))
        iocb, plan = rig.fill(queue, rng, READ, 60)
        assert queue.issue_io([iocb])
        assert not _wait(queue, iocb).any() and rig.same(plan), cupy.dead
        assert rig.controller.unregister_memory(other) == 0
    rig.close()
    assert not cupy.registered


def test_memory_that_was_not_registered_is_a_fault(
    cupy: StandInCupy, rig: Rig, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the stand-in does notice."""
    monkeypatch.setattr(CudaExecutor, "_renew", lambda self, state: None)
    queue = rig.ring(CudaExecutor(image=IMAGE))
    more = np.zeros(2 * 4096, np.uint8)
    page = more.ctypes.data + -more.ctypes.data % 4096
    assert rig.controller.register_memory(page, 4096) >= 0
    iocb, _ = rig.fill(queue, rng, READ, 5)
    queue.issue_io([iocb])
    cupy.settle()
    assert "IllegalAddress" in cupy.dead
    assert set(_wait_for(queue, iocb)) == {NOT_ISSUED}


def _wait_for(queue: GioQueue, iocb: int) -> Any:
    """Wait in small steps, as a caller does that has other things to do."""
    end_s = time.monotonic() + WAIT_S
    while (statuses := queue.wait_cqe(iocb, 0.05)) is None:
        assert time.monotonic() < end_s
    return statuses


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["launchKernel", "streamWaitEvent"])
def test_a_launch_that_fails_refuses_its_iocbs(
    call: str, cupy: StandInCupy, rig: Rig, rng: random.Random
) -> None:
    queue = rig.ring(CudaExecutor(image=IMAGE))
    made = [rig.fill(queue, rng, READ, count)[0] for count in (7, 30)]
    cupy.refuse_once.add(call)
    assert not queue.issue_io(made, after=[cupy._eventCreateWithFlags(2)])
    for iocb in made:
        assert set(_wait(queue, iocb)) == {NOT_ISSUED}
    iocb, plan = rig.fill(queue, rng, READ, 30)
    assert queue.issue_io([iocb])
    assert not _wait(queue, iocb).any() and rig.same(plan)


def test_an_event_that_fails_after_the_launch_refuses_nothing(
    cupy: StandInCupy, rig: Rig, rng: random.Random
) -> None:
    queue = rig.ring(CudaExecutor(image=IMAGE))
    iocb, plan = rig.fill(queue, rng, READ, 30)
    cupy.refuse["eventRecord"] = "cudaErrorUnknown"
    assert queue.issue_io([iocb])
    assert not _wait(queue, iocb).any() and rig.same(plan)
    iocb, _ = rig.fill(queue, rng, READ, 3)
    assert not queue.issue_io([iocb]), "nothing more is launched"
    assert set(_wait(queue, iocb)) == {NOT_ISSUED}


def test_a_kernel_that_is_killed_ends_its_iocbs(
    cupy: StandInCupy, rig: Rig, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    queue = rig.ring(CudaExecutor(image=IMAGE))
    cupy.killed = True
    made = [rig.fill(queue, rng, READ, 20)[0] for _ in range(2)]
    assert queue.issue_io(made)
    for iocb in made:
        assert set(_wait_for(queue, iocb)) == {NOT_ISSUED}
    iocb, _ = rig.fill(queue, rng, READ, 3)
    assert not queue.issue_io([iocb])
    assert set(_wait(queue, iocb)) == {NOT_ISSUED}
    assert "nothing more is launched" in caplog.text
    queue.close()
    assert not len(PINS)


def test_a_kernel_that_does_not_end_keeps_its_memory(
    cupy: StandInCupy, rig: Rig, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_executor, "DRAIN_EXTRA_S", 0.2)
    kept: list[Any] = []
    monkeypatch.setattr(cuda_executor, "_KEPT", kept)
    queue = rig.ring(CudaExecutor(image=IMAGE), timeout_s=0.1)
    cupy.stuck.clear()
    iocb, _ = rig.fill(queue, rng, READ, 20)
    assert queue.issue_io([iocb])
    assert queue.wait_cqe(iocb, 0.2) is None, "it is not lost: it may still come"
    began_s = time.monotonic()
    queue.close()
    assert time.monotonic() - began_s < 30 and len(cupy.registered) and len(kept) == 1
    cupy.stuck.set()
    cupy.settle()
    PINS.give(sys.modules["cupy.cuda.runtime"], kept[0].ranges)
    assert not cupy.registered


def test_memory_is_not_registered_while_a_kernel_does_not_end(
    cupy: StandInCupy, rig: Rig, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_executor, "DRAIN_EXTRA_S", 0.2)
    queue = rig.ring(CudaExecutor(image=IMAGE), timeout_s=0.1)
    cupy.stuck.clear()
    first, _ = rig.fill(queue, rng, READ, 20)
    assert queue.issue_io([first])
    more = np.zeros(2 * 4096, np.uint8)
    assert rig.controller.register_memory(more.ctypes.data + -more.ctypes.data % 4096, 4096) >= 0
    second, _ = rig.fill(queue, rng, READ, 5)
    assert not queue.issue_io([second])
    assert set(_wait(queue, second)) == {NOT_ISSUED}
    cupy.stuck.set()
    assert not set(_wait(queue, first)) - {0, TIMEOUT, NOT_ISSUED}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("hostRegister", "does not register"),
        ("streamCreateWithPriority", "cannot be run"),
        ("eventCreateWithFlags", "cannot be run"),
        ("launchKernel", "cannot be run"),
    ],
)
def test_what_fails_while_attaching_is_undone(
    call: str, said: str, cupy: StandInCupy, rig: Rig
) -> None:
    executor = CudaExecutor(image=IMAGE)
    cupy.refuse[call] = "refused"
    with pytest.raises(UnsupportedError, match=said):
        rig.ring(executor)
    assert not cupy.registered and not cupy.streams and not cupy.events and not len(PINS)
    del cupy.refuse[call]
    rig.ring(executor)


def test_memory_that_the_gpu_sees_elsewhere_is_refused(cupy: StandInCupy, rig: Rig) -> None:
    executor = CudaExecutor(image=IMAGE)
    cupy.elsewhere = True
    with pytest.raises(UnsupportedError, match="sees memory"):
        rig.ring(executor)
    assert not cupy.registered


def test_one_pair_of_queues_is_too_few(cupy: StandInCupy) -> None:
    soft = SoftController(namespace_bytes=MIB)
    controller = NvmeController(soft, queue_pairs=1)
    with pytest.raises(UnsupportedError, match="two pairs"):
        init_queue([(controller, 1)], executor=CudaExecutor(image=IMAGE))
    controller.close()


def test_machines_that_cannot_do_it_are_refused_with_a_reason(
    cupy: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, said in (
        ({"lanes": 0}, "1 to 132 SMs"),
        ({"lanes": 133}, "1 to 132 SMs"),
        ({"block_warps": 33}, "1 to 32"),
        ({"device": 1}, "no GPU 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            CudaExecutor(image=IMAGE, **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        CudaExecutor(image=Image(b"no image", "sm_90", False))
    for attribute, value, said in ((91, 0, "other addresses"), (75, 7, "capability 70")):
        monkeypatch.setitem(cupy.attributes, attribute, value)
        with pytest.raises(UnsupportedError, match=said):
            CudaExecutor(image=IMAGE)
        monkeypatch.undo()
        for name, module in cupy.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    cupy.devices = 0
    with pytest.raises(UnsupportedError, match="no GPU"):
        CudaExecutor(image=IMAGE)
    cupy.refuse["getDeviceCount"] = "cudaErrorNoDevice"
    with pytest.raises(UnsupportedError, match="cudaErrorNoDevice"):
        CudaExecutor(image=IMAGE)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UnsupportedError, match="CuPy cannot be imported"):
        CudaExecutor(image=IMAGE)


def test_it_says_what_is_in_use(cupy: StandInCupy) -> None:
    said = CudaExecutor(lanes=2, image=IMAGE).describe()
    assert said["capability"] == 90 and said["lanes"] == 2 and said["host_atomics"] is False
    assert said["local_bytes"] == 0 and "not used" in said["green_contexts"]


# -- the image -------------------------------------------------------------------------------------


def test_the_executor_compiles_the_kernel(
    cupy: StandInCupy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CudaExecutor().describe()["image_cached"] is False
    said = CudaExecutor().describe()
    assert said["image_cached"] is True and said["target"] == "sm_90"
    assert (tmp_path / "tutti" / "kernels").stat().st_mode & 0o777 == 0o700


def test_a_damaged_image_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *given: b"an image of some bytes")
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    first = kernel_image(90, folder=folder)
    (file,) = folder.iterdir()
    kept = file.read_bytes()
    for damage in (kept[:-1], b"", kept[:40] + b"?" + kept[41:], kept[:20], b"?" + kept[1:]):
        file.write_bytes(damage)
        again = kernel_image(90, folder=folder)
        assert not again.cached and again.data == first.data
    assert kernel_image(90, folder=folder) == Image(first.data, "sm_90", True)


def test_a_change_of_a_header_is_another_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = sources.our_headers()
    before = sources.sources()
    names = sources.closure(before.text, ours)
    copied = tmp_path / "include"
    (copied / "tutti").mkdir(parents=True)
    for name, body in names.items():
        (copied / name).write_text(body)
    monkeypatch.setattr(sources, "our_headers", lambda: copied)
    assert sources.sources().digest == before.digest
    for name in names:
        (copied / name).write_text(names[name] + "\n// changed\n")
        assert sources.sources().digest != before.digest, name
        (copied / name).write_text(names[name])


def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *given: b"an image")
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    assert not kernel_image(90, folder=folder).cached
    assert not list(folder.iterdir())
    folder.rmdir()
    folder.write_text("a file in its place")
    assert kernel_image(90, folder=folder).data


def test_only_so_many_images_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "KEPT_MAX", 2)
    for number in range(4):
        nvrtc._write(tmp_path / f"{number}.image", b"data")
        os.utime(tmp_path / f"{number}.image", (number, number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.image", "3.image"]


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="cuda/atomic"):
        sources.find_cccl([tmp_path])
    monkeypatch.setattr(nvrtc, "_libraries", lambda: iter(["libnothing.so"]))
    with pytest.raises(UnsupportedError, match="NVRTC was not found"):
        nvrtc.Nvrtc()


def test_a_kernel_that_does_not_compile_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not compile"):
        nvrtc.Nvrtc().compile("this is no kernel", (tmp_path,), "sm_90")


def test_a_newer_gpu_gets_ptx_and_an_older_one_a_reason() -> None:
    compiler = nvrtc.Nvrtc()
    assert compiler.target_for(999).startswith("compute_")
    with pytest.raises(UnsupportedError, match="capability 20"):
        compiler.target_for(20)


def test_the_package_ships_the_headers_of_the_kernel() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "CMakeLists.txt").read_text()
    needed = sources.closure(sources.KERNEL.read_text(), root / "csrc" / "include")
    block = text[text.index("TUTTI_KERNEL_HEADERS") :].split(")")[0]
    assert set(block.split()[1:]) == {name.removeprefix("tutti/") for name in needed}


def test_an_installed_package_finds_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="not in the package"):
        monkeypatch.setattr(sources, "PACKAGE", tmp_path / "site" / "tutti_core")
        sources.our_headers()
    (tmp_path / "site" / "tutti_core" / "include" / "tutti").mkdir(parents=True)
    (tmp_path / "site" / "tutti_core" / "include" / "tutti" / "gio_run.h").write_text("")
    assert sources.our_headers() == tmp_path / "site" / "tutti_core" / "include"


# -- data in device memory -------------------------------------------------------------------------


PROGRAM = """
import ctypes, sys
import numpy as np
from tutti_core._native import NvmeController, SoftController
from tutti_core.gio.ring import READ, WRITE, init_queue

library, mode, sgl = sys.argv[1], sys.argv[2], sys.argv[3] == "sgl"
driver = ctypes.CDLL(library)
driver.stand_in_allocate.restype = driver.stand_in_behind.restype = ctypes.c_void_p
driver.stand_in_allocate.argtypes = (ctypes.c_size_t,)
driver.stand_in_behind.argtypes = (ctypes.c_void_p,)
size = 2 << 20
device = driver.stand_in_allocate(size)
inside = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(driver.stand_in_behind(device)))
soft = SoftController(
    namespace_bytes=size, transfer_shift=7, sgl=sgl, cuda_library="" if mode == "touch" else library
)
controller = NvmeController(soft, queue_pairs=2, queue_entries=64)
assert controller.register_memory(device, size) >= 0
queue = init_queue([(controller, 1)], timeout_s=20.0)
source = np.random.default_rng(int(sys.argv[4]))
media = soft.media(1)
media[:] = source.integers(0, 256, size, np.uint8)
inside[:] = 0xA5
count, length = 256, 4096
where = source.permutation(size // length)[:count].astype(np.uint64) * np.uint64(length)
offset = source.permutation(size // length)[:count].astype(np.uint64) * np.uint64(length)


def move(op):
    (iocb,) = queue.get_iocb()
    queue.prepare(iocb, op, np.zeros(count, np.uint32), offset, where + np.uint64(device),
                  np.full(count, length, np.uint64))
    assert queue.issue_io([iocb])
    return queue.wait_cqe(iocb, 60.0)


def rows(of, at):
    return of.reshape(-1, length)[(at // np.uint64(length)).astype(int)]


if mode == "flip":
    soft.inject("flip")
if mode == "status":
    soft.inject("status", skip=20, status=0x281)
if mode == "refused":
    driver.stand_in_fail_next()
statuses = move(READ)
print("statuses", *sorted({hex(one) for one in statuses}))
good = statuses == 0
assert np.array_equal(rows(inside, where)[good], rows(media, offset)[good])
if mode == "plain":
    others = np.setdiff1d(np.arange(size // length), where // np.uint64(length))
    assert (inside.reshape(-1, length)[others] == 0xA5).all()
    inside[:] = source.integers(0, 256, size, np.uint8)
    assert not move(WRITE).any()
    assert np.array_equal(rows(inside, where), rows(media, offset))
    print("copies", driver.stand_in_count(0), "waits", driver.stand_in_count(1))
    assert driver.stand_in_count(2) == 1  # the media is pinned
queue.close()
controller.close()
soft.close()
del media, soft, controller, queue
import gc
gc.collect()
print("left", *(driver.stand_in_count(which) for which in (2, 3, 4, 5)))
"""


def on_device(tmp_path: Path, mode: str, pointers: str = "sgl") -> subprocess.CompletedProcess[str]:
    """Move data of a device's memory in a process of its own: a CPU access there ends it."""
    library = build_driver(tmp_path)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library), mode, pointers, "7"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("pointers", ["sgl", "prp"])
def test_the_software_controller_copies_to_device_memory(tmp_path: Path, pointers: str) -> None:
    done = on_device(tmp_path, "plain", pointers)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    copies, waits = int(said["copies"].split()[0]), int(said["copies"].split()[2])
    assert said["statuses"] == "0x0" and said["left"] == "0 0 0 0"
    assert copies == 512 and waits < copies, "the copies of a burst are waited for together"


def test_a_cpu_access_to_device_memory_would_end_the_process(tmp_path: Path) -> None:
    """The control: without the driver the controller copies by itself."""
    assert on_device(tmp_path, "touch").returncode == -11


@pytest.mark.parametrize(
    ("mode", "statuses"),
    [("flip", "0x0 0x4006"), ("status", "0x0 0x281"), ("refused", None)],
)
def test_what_goes_wrong_with_copies_is_a_status(
    tmp_path: Path, mode: str, statuses: str | None
) -> None:
    done = on_device(tmp_path, mode)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[0].removeprefix("statuses ")
    assert said == statuses if statuses else "0x4" in said.split()
    assert "left 0 0 0 0" in done.stdout


def test_no_driver_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no CUDA driver"):
        SoftController(namespace_bytes=MIB, cuda_library=str(tmp_path / "nothing.so"))
    hollow = tmp_path / "hollow.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(hollow)], check=True)
    with pytest.raises(OSError, match="lacks a function"):
        SoftController(namespace_bytes=MIB, cuda_library=str(hollow))
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="in files"):
        file.truncate(MIB)
        SoftController(namespace_bytes=MIB, cuda_library=str(hollow), files=[file.fileno()])
