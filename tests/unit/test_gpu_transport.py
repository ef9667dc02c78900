"""The gpu transport on software controllers: what it moves and refuses, and what goes wrong."""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_kit import MIB, PAGE, client, run, small_config

from tutti_core import PrefixStore, UnsupportedError
from tutti_core._native import NvmeController, SoftController
from tutti_core.errors import ConfigError, TuttiError
from tutti_core.gio.executor import CpuExecutor
from tutti_core.io.gpu import GpuTransport
from tutti_core.io.gpu_device import Opened, check_ours
from tutti_core.io.select import open_transport
from tutti_core.io.transport import Batch, BatchResult, Device, Op, TransportOptions

BYTES = 4 * MIB
WAIT_S = 60.0


class Memory:
    """Page-aligned memory, filled at random."""

    def __init__(self, length_bytes: int = 2 * MIB) -> None:
        self._map = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.bytes[:] = np.random.default_rng(5).integers(0, 256, length_bytes, np.uint8)


class Rig:
    """A transport on drives in memory."""

    def __init__(self, count: int = 1, *, timeout_s: float = 10.0, **soft: Any) -> None:
        self.softs = [
            SoftController(namespace_bytes=BYTES, serial=f"S{number}", **soft)
            for number in range(count)
        ]
        self.controllers: list[NvmeController] = []
        devices = [Device(f"drive {number}", BYTES) for number in range(count)]
        self.transport = GpuTransport(devices, open_device=self._open, timeout_s=timeout_s)
        self.memory = Memory()

    def _open(self, device: Device, options: TransportOptions) -> Opened:
        soft = self.softs[int(device.path.split()[1])]
        controller = NvmeController(soft, queue_entries=64)
        self.controllers.append(controller)
        return Opened(controller, 1, "a test's drive", controller.close)

    def register(self) -> int:
        return self.transport.register(self.memory.address, len(self.memory.bytes))

    def submit(self, op: Op, items: list[tuple[int, int, list[tuple[int, int]]]]) -> int:
        """Items of device, offset, and fragments of offset in memory and length."""
        fragments = [fragment for _, _, some in items for fragment in some]
        counts = [len(some) for _, _, some in items]
        batch = Batch(
            op=op,
            device=np.array([device for device, _, _ in items], np.uint32),
            offset_bytes=np.array([offset for _, offset, _ in items], np.uint64),
            fragment_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32),
            address=np.array([self.memory.address + at for at, _ in fragments], np.uint64),
            length_bytes=np.array([length for _, length in fragments], np.uint64),
        )
        return self.transport.submit(batch)

    def move(self, op: Op, items: list[tuple[int, int, list[tuple[int, int]]]]) -> BatchResult:
        result = self.transport.wait(self.submit(op, items), WAIT_S)
        assert result is not None
        return result

    def extra(self) -> dict[str, int]:
        return self.transport.stats().extra

    def close(self) -> None:
        self.transport.close()
        for soft in self.softs:
            soft.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def one(*arguments: Any, **settings: Any) -> Rig:
        made.append(Rig(*arguments, **settings))
        return made[-1]

    yield one
    for rig in made:
        for soft in rig.softs:
            soft.clear_faults()
            soft.release()
        rig.close()


# ---- which way bytes go ----
def test_registered_blocks_are_moved_in_place_and_others_by_the_arena(make: Any) -> None:
    rig = make()
    rig.register()
    direct = [(0, 0, [(0, 4096), (8192, 512), (20480, 3584)])]
    assert rig.move(Op.WRITE, direct).status.tolist() == [0]
    assert rig.transport.stats().bounced_bytes == 0
    media, memory = rig.softs[0].media(1), rig.memory.bytes
    there = np.concatenate([memory[0:4096], memory[8192:8704], memory[20480:24064]])
    assert np.array_equal(media[:8192], there)
    for offset, fragments in ((8192, [(2, 4096)]), (12288, [(0, 100)]), (16384, [(4, 511)])):
        before = rig.transport.stats().bounced_bytes
        assert rig.move(Op.WRITE, [(0, offset, fragments)]).status.tolist() == [0]
        ((at, length),) = fragments
        assert rig.transport.stats().bounced_bytes == before + length
        assert np.array_equal(media[offset : offset + length], memory[at : at + length])


def test_unregistered_memory_goes_by_the_arena(make: Any) -> None:
    rig = make()
    assert rig.move(Op.WRITE, [(0, 0, [(0, 65536)])]).status.tolist() == [0]
    assert rig.transport.stats().bounced_bytes == 65536
    assert np.array_equal(rig.softs[0].media(1)[:65536], rig.memory.bytes[:65536])
    region = rig.register()
    rig.move(Op.WRITE, [(0, 0, [(0, 65536)])])
    assert rig.transport.stats().bounced_bytes == 65536
    rig.transport.unregister(region)
    rig.move(Op.WRITE, [(0, 0, [(0, 65536)])])
    assert rig.transport.stats().bounced_bytes == 2 * 65536
    with pytest.raises(KeyError):
        rig.transport.unregister(region)


def test_a_fragment_across_a_regions_end_goes_by_the_arena(make: Any) -> None:
    rig = make()
    rig.transport.register(rig.memory.address, 8192)
    assert rig.move(Op.WRITE, [(0, 0, [(4096, 8192)])]).status.tolist() == [0]
    assert rig.transport.stats().bounced_bytes == 8192
    assert np.array_equal(rig.softs[0].media(1)[:8192], rig.memory.bytes[4096:12288])


def test_memory_that_is_registered_twice_stays_registered_as_long_as_the_first(make: Any) -> None:
    rig = make()
    first, second = rig.register(), rig.register()
    rig.transport.unregister(second)
    rig.move(Op.WRITE, [(0, 0, [(0, 4096)])])
    assert rig.transport.stats().bounced_bytes == 0
    rig.transport.unregister(first)


@pytest.mark.parametrize("sgl", [False, True])
def test_fragments_beyond_mdts_are_split(make: Any, sgl: bool) -> None:
    rig = make(transfer_shift=1, sgl=sgl)  # 8 KiB a command
    rig.register()
    assert rig.move(Op.WRITE, [(0, 4096, [(512, MIB)])]).status.tolist() == [0]
    assert np.array_equal(
        rig.softs[0].media(1)[4096 : 4096 + MIB], rig.memory.bytes[512 : 512 + MIB]
    )
    assert rig.extra()["commands"] >= MIB // 8192 and rig.transport.stats().bounced_bytes == 0
    assert rig.softs[0].stats()["bad_pointers"] == 0 and rig.softs[0].stats()["unmapped"] == 0


def test_a_queue_deeper_than_the_controllers_is_cut(make: Any) -> None:
    rig = make(queue_entries_max=4)
    rig.register()
    items = [(0, 4096 * at, [(4096 * at, 4096)]) for at in range(200)]
    assert not rig.move(Op.WRITE, items).status.any()
    assert np.array_equal(rig.softs[0].media(1)[: 200 * 4096], rig.memory.bytes[: 200 * 4096])


def test_devices_are_striped_and_their_items_kept_apart(make: Any) -> None:
    rig = make(3)
    rig.register()
    items = [(at % 3, 4096 * (at // 3), [(4096 * at, 4096)]) for at in range(300)]
    assert not rig.move(Op.WRITE, items).status.any()
    written = rig.memory.bytes[: 300 * 4096].copy()
    rig.memory.bytes[:] = 0
    result = rig.move(Op.READ, items)
    assert not result.status.any()
    assert np.array_equal(rig.memory.bytes[: 300 * 4096], written)
    assert rig.transport.stats().device_items == [200, 200, 200]


# ---- what goes wrong ----
def test_a_status_fails_its_item_and_is_counted(make: Any) -> None:
    rig = make()
    rig.register()
    rig.softs[0].inject("status", opcode=2, skip=1, status=0x281)
    items = [(0, 4096 * at, [(4096 * at, 4096)]) for at in range(3)]
    assert rig.move(Op.READ, items).status.tolist() == [0, -errno.EIO, 0]
    assert rig.extra()["nvme_status_0x281"] == 1
    assert rig.transport.stats().failed_items == 1
    assert not rig.move(Op.READ, items).status.any()


def test_of_several_failures_an_item_has_the_first(make: Any) -> None:
    rig = make()
    rig.register()
    rig.softs[0].inject("status", opcode=2, status=0x80)
    rig.softs[0].inject("status", opcode=2, status=0x281)
    pieces = [(4096 * at, 4096) for at in range(4)]
    assert rig.move(Op.READ, [(0, 0, pieces)]).status.tolist() == [-errno.ERANGE]


@pytest.mark.parametrize("kind", ["drop", "lose", "hold"])
def test_a_command_without_an_answer_times_out_and_the_device_goes_on(make: Any, kind: str) -> None:
    rig = make(2, timeout_s=0.3)
    region = rig.register()
    rig.softs[0].inject(kind)
    items = [(at % 2, 4096 * at, [(4096 * at, 4096)]) for at in range(8)]
    status = rig.move(Op.WRITE, items).status
    assert status.tolist().count(-errno.ETIMEDOUT) == 1 and np.count_nonzero(status) == 1
    assert status[1::2].tolist() == [0] * 4
    assert rig.extra()["timeouts"] == 1 and rig.extra()["resets"] == 1
    assert not rig.move(Op.WRITE, items).status.any()
    rig.transport.unregister(region)  # nothing is lost after the reset
    assert np.array_equal(rig.softs[0].media(1)[:4096], rig.memory.bytes[:4096])


def test_a_device_that_hangs_for_good_ends_in_time_and_holds_up_no_other(make: Any) -> None:
    rig = make(2, timeout_s=0.5)
    rig.register()
    rig.softs[0].inject("lose", count=1 << 30)
    begun_s = time.monotonic()
    hung = [
        rig.submit(Op.READ, [(0, 4096 * at, [(4096 * at, 4096)]) for at in range(100)])
        for _ in range(6)
    ]
    good = rig.submit(Op.READ, [(1, 0, [(MIB, 4096)])])
    result = rig.transport.wait(good, WAIT_S)
    assert result is not None and not result.status.any()
    for ticket in hung:
        ended = rig.transport.wait(ticket, WAIT_S)
        assert ended is not None and ended.status.all()
    assert time.monotonic() - begun_s < 30  # six launches, each with a bound
    rig.softs[0].clear_faults()
    assert not rig.move(Op.READ, [(0, 0, [(0, 4096)])]).status.any()


@pytest.mark.parametrize("kind", ["gone", "fatal"])
def test_a_device_that_is_gone_fails_at_once_and_can_come_back(make: Any, kind: str) -> None:
    rig = make(2, timeout_s=20.0)
    rig.register()
    assert not rig.move(Op.WRITE, [(0, 0, [(0, 4096)])]).status.any()
    rig.softs[0].inject(kind)
    items = [(at % 2, 4096 * at, [(4096 * at, 4096)]) for at in range(64)]
    begun_s = time.monotonic()
    status = rig.move(Op.READ, items).status
    assert status[::2].all() and not status[1::2].any()
    assert rig.move(Op.READ, items).status[::2].tolist() == [-errno.ENODEV] * 32
    assert rig.transport.flush(0) == -errno.ENODEV and rig.transport.flush(1) == 0
    assert time.monotonic() - begun_s < 15  # seen by its registers, before the deadline
    if kind == "gone":
        assert rig.transport.reopen_device(0, lambda block: True) == -errno.ENODEV
        rig.softs[0].plug_in()
        deadline_s = time.monotonic() + WAIT_S  # the controller's thread does it at its next turn
        while rig.controllers[0].dead() and time.monotonic() < deadline_s:
            time.sleep(0.001)
    assert rig.transport.reopen_device(0, lambda block: False) == -errno.ESTALE
    assert rig.transport.reopen_device(0, lambda block: True) == 0
    assert not rig.move(Op.WRITE, items).status.any()


@pytest.mark.parametrize("kind", ["repeat", "torn", "wrong_id", "wrong_queue", "wrong_head"])
def test_a_controller_that_lies_in_its_completions_moves_right_bytes(make: Any, kind: str) -> None:
    rig = make()
    rig.register()
    rig.softs[0].inject(kind, count=20, turns=3)
    items = [(0, 4096 * at, [(4096 * at, 4096)]) for at in range(200)]
    assert not rig.move(Op.WRITE, items).status.any()
    assert np.array_equal(rig.softs[0].media(1)[: 200 * 4096], rig.memory.bytes[: 200 * 4096])


@pytest.mark.parametrize("kind", ["flip", "short"])
def test_a_controller_that_lies_about_bytes_is_seen_by_the_checksum(make: Any, kind: str) -> None:
    rig = make()
    rig.register()
    pages = [(0, 65536 * at, [(65536 * at, 65536)]) for at in range(4)]
    saved = rig.move(Op.WRITE, pages).checksum
    rig.memory.bytes[:] = 7
    rig.softs[0].inject(kind, opcode=2, skip=1)
    read = rig.move(Op.READ, pages)
    assert not read.status.any() and (read.checksum != saved).tolist().count(True) == 1


def test_flushes_that_fail_say_so(make: Any) -> None:
    rig = make(timeout_s=0.2)
    rig.softs[0].inject("status", opcode=0, status=0x280)
    assert rig.transport.flush(0) == -errno.EIO
    assert rig.transport.flush(0) == 0
    with pytest.raises(ValueError, match="out of range"):
        rig.transport.flush(1)


# ---- whose device it is ----
def test_files_need_software_controllers_and_drives_the_gpu_transport(tmp_path: Path) -> None:
    file = tmp_path / "pool"
    file.write_bytes(bytes(MIB))
    with pytest.raises(UnsupportedError, match="driver of the kernel"):
        open_transport("gpu", [Device(str(file), MIB)])
    with pytest.raises(UnsupportedError, match="takes files"):
        open_transport("uring", [Device("pci:0000:99:00.0/1", MIB)])
    for name in ("auto", "gpu"):
        with pytest.raises(UnsupportedError, match="cannot be taken"):
            open_transport(name, [Device("pci:0000:99:00.0/1", MIB)])  # type: ignore[arg-type]
    for path in ("pci:0000:99:00.0", "pci:/1", "pci:../../x/1", "pci:0000:99:00.0/x"):
        with pytest.raises(ConfigError, match="names no drive"):
            open_transport("gpu", [Device(path, MIB)])
    options = TransportOptions(software_nvme=True)
    with open_file(file, options) as transport:
        assert transport.capabilities().name == "gpu"


def test_who_issues_commands_is_said(tmp_path: Path) -> None:
    file = tmp_path / "pool"
    file.write_bytes(bytes(MIB))
    for name, said in (("cpu", "CPU threads"), ("auto", "no GPU issues commands")):
        with open_file(file, TransportOptions(software_nvme=True, gpu_executor=name)) as transport:
            assert said in " ".join(transport.capabilities().notes)
    with pytest.raises(UnsupportedError, match=r"CuPy|GPU"):
        open_transport(
            "gpu",
            [Device(str(file), MIB)],
            TransportOptions(software_nvme=True, gpu_executor="cuda"),
        )
    with pytest.raises(ConfigError, match="not one of"):
        open_transport(
            "gpu", [Device(str(file), MIB)], TransportOptions(software_nvme=True, gpu_executor="no")
        )


def open_file(file: Path, options: TransportOptions) -> Any:
    import contextlib

    return contextlib.closing(open_transport("gpu", [Device(str(file), MIB)], options))


def test_a_namespace_that_is_not_ours_is_refused(store_dir: Path) -> None:
    with PrefixStore.open(small_config(store_dir)) as store:
        (pool,) = {device.path for device in store._transport.devices}
    head = np.frombuffer(Path(pool).read_bytes()[:MIB], np.uint8)
    soft = SoftController(namespace_bytes=BYTES, serial="MINE")
    controller = NvmeController(soft)
    device = Device("pci:0000:01:00.0/1", BYTES)
    try:
        with pytest.raises(TuttiError):
            check_ours(device, controller, 1)  # zeros
        assert controller.write(1, 0, head, 5.0) == 0
        check_ours(device, controller, 1)
        check_ours(device, controller, 1, "MINE")
        with pytest.raises(ConfigError, match=r"another drive.*MINE"):
            check_ours(device, controller, 1, "YOURS")
        soft.inject("status", opcode=2, status=0x281)
        with pytest.raises(TuttiError, match="unrecovered read error"):
            check_ours(device, controller, 1)
        soft.media(1)[MIB - 1] = 1
        with pytest.raises(ConfigError, match="somebody else"):
            check_ours(device, controller, 1)
    finally:
        controller.close()
        soft.close()


def test_a_device_that_is_smaller_than_said_is_refused(tmp_path: Path) -> None:
    soft = SoftController(namespace_bytes=MIB)
    controller = NvmeController(soft)
    opened = Opened(controller, 1, "a drive", controller.close)
    with pytest.raises(TuttiError, match="less than its"):
        GpuTransport([Device("drive", 2 * MIB)], open_device=lambda device, options: opened)
    soft.close()


class Unattachable(CpuExecutor):
    """An executor whose kernel cannot run."""

    def attach(self, ring: Any) -> None:
        raise UnsupportedError("no kernel")


@pytest.mark.parametrize("what", ["executor", "namespace", "capacity"])
def test_a_device_that_cannot_be_used_is_given_back(what: str) -> None:
    """Fault: its controller stayed open until it was collected."""
    soft = SoftController(namespace_bytes=MIB)
    controllers = [NvmeController(soft)]
    closed: list[int] = []

    def open_device(device: Device, options: TransportOptions) -> Opened:
        def close() -> None:
            closed.append(1)
            controllers[0].close()

        return Opened(controllers[0], 2 if what == "namespace" else 1, "a drive", close)

    devices = [Device("drive", 2 * MIB if what == "capacity" else MIB)]
    executor = Unattachable() if what == "executor" else None
    with pytest.raises(TuttiError):
        GpuTransport(devices, open_device=open_device, executor=executor)
    assert closed == [1]
    soft.close()


# ---- one format for all transports ----
GPU = {"transport": "gpu", "gpu_controller": "software"}
OTHERS = {"uring": {"transport": "auto"}, "posix": {"transport": "posix"}}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("pools", [1, 3])
def test_stores_of_gpu_and_of_other_transports_are_one_format(
    disk_dir: Path, tmp_path: Path, other: str, pools: int
) -> None:
    places = tuple(tmp_path / f"drive{number}" for number in range(pools)) if pools > 1 else ()
    for place in places:
        place.mkdir()
    settings: list[dict[str, Any]] = [GPU, OTHERS[other], GPU]
    data = np.random.default_rng(3).integers(0, 256, 5 * PAGE, np.uint8)
    saved = 0
    for number, setting in enumerate(settings):
        with PrefixStore.open(small_config(disk_dir, pools=places, **setting)) as store:
            pages = client(store).pages
            for before in range(saved):
                memory = np.zeros(5 * PAGE, np.uint8)
                assert pages.load(run(f"chain {before}", 5), memory).wait(WAIT_S).all()
                assert np.array_equal(memory, np.roll(data, before))
            mine = np.roll(data, number)
            assert pages.save(run(f"chain {number}", 5), mine).wait(WAIT_S).all()
            saved += 1
            expected = "gpu" if setting is GPU else other
            assert store.stats().transport.name in (expected, "posix")
