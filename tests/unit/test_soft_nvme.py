"""The controller in software: what it refuses, how long it lives, and that its faults strike."""

from __future__ import annotations

import errno
import os
import time
from typing import Any, get_args

import numpy as np
import pytest

from tutti_core.testing.soft_nvme import NvmeFault, SoftNvme, gpu_transport

MIB = 1 << 20
BLOCK = np.arange(4096, dtype=np.uint64).astype(np.uint8)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_bytes": 1024},
        {"namespace_count": 0},
        {"namespace_count": 99},
        {"queue_entries_max": 1},
        {"queue_pairs_max": 0},
        {"files": [0, 1]},
        {"serial": "x" * 21},
        {"transfer_shift": 17},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        SoftNvme(MIB, **settings)
    with pytest.raises(ValueError, match="out of bounds"):
        SoftNvme(1000)


def test_what_was_written_is_read_and_lies_in_the_media() -> None:
    with SoftNvme(MIB) as drive:
        controller = drive.open()
        assert controller.write(1, 8192, BLOCK, 5.0) == 0
        assert np.array_equal(drive.media()[8192:12288], BLOCK)
        read = np.zeros(4096, np.uint8)
        assert controller.read(1, 8192, read, 5.0) == 0 and np.array_equal(read, BLOCK)
        assert controller.read(1, 100, read, 5.0) != 0  # not whole blocks
        assert controller.read(2, 0, read, 5.0) != 0  # no such namespace
        assert controller.read(1, MIB, read, 5.0) & 0x7FF == 0x80  # LBA out of range
        controller.close()


def test_it_outlives_its_controllers_and_they_outlive_its_close() -> None:
    drive = SoftNvme(MIB)
    first = drive.open()
    first.close()
    first.close()
    second = drive.open()
    drive.close()
    drive.close()
    assert second.write(1, 0, BLOCK, 5.0) == 0
    second.close()
    with pytest.raises(OSError, match="closed") as caught:
        drive.stats()
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="closed"):
        second.facts()


def test_a_media_view_outlives_everything() -> None:
    drive = SoftNvme(MIB)
    controller = drive.open()
    assert controller.write(1, 0, BLOCK, 5.0) == 0
    media = drive.media()
    controller.close()
    drive.close()
    del drive, controller
    assert np.array_equal(media[:4096], BLOCK)


def test_a_forked_child_neither_hangs_nor_disturbs() -> None:
    with SoftNvme(MIB) as drive:
        controller = drive.open()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                controller.close()
                drive.close()
                code = 0
            finally:
                os._exit(code)
        deadline_s = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert ended == (child, 0)
        assert controller.write(1, 0, BLOCK, 5.0) == 0
        controller.close()


STRIKES = {
    "status": lambda status, same: status == 0x281,
    "drop": lambda status, same: status == 0x10000,
    "lose": lambda status, same: status == 0x10000,
    "hold": lambda status, same: status == 0x10000,
    "fatal": lambda status, same: status in (0x10000, 0x10001),
    "gone": lambda status, same: status in (0x10000, 0x10001),
    "flip": lambda status, same: status == 0 and not same,
    "short": lambda status, same: status == 0 and not same,
}
"""What a read makes of a fault; the others change nothing that a reader sees."""


@pytest.mark.parametrize("kind", get_args(NvmeFault))
def test_each_fault_strikes_once(kind: NvmeFault) -> None:
    with SoftNvme(MIB) as drive:
        controller = drive.open()
        assert controller.write(1, 0, BLOCK, 5.0) == 0
        assert controller.write(1, 8192, ~BLOCK, 5.0) == 0  # leaves the buffer other bytes
        drive.inject(kind, opcode=2, status=0x281, turns=2)
        read = np.full(4096, 0xEE, np.uint8)
        status = controller.read(1, 0, read, 0.3)
        expected = STRIKES.get(kind, lambda status, same: status == 0 and same)
        assert expected(status, np.array_equal(read, BLOCK))
        assert drive.stats()["faults"] == 1
        drive.heal()
        if kind == "gone":
            drive.plug_in()
            deadline_s = time.monotonic() + 20
            while controller.dead() and time.monotonic() < deadline_s:
                time.sleep(0.001)
        controller.reset()
        assert controller.read(1, 0, read, 5.0) == 0 and np.array_equal(read, BLOCK)
        controller.close()


def test_impossible_faults_are_refused() -> None:
    with SoftNvme(MIB) as drive:
        with pytest.raises(ValueError, match="no fault"):
            drive.inject("flood")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="once at least"):
            drive.inject("hold", count=0)


def test_a_release_is_of_what_is_held_by_then() -> None:
    """Fault: one that came when nothing was held let go of the next command that was."""
    read = np.zeros(4096, np.uint8)
    with SoftNvme(MIB) as drive:
        controller = drive.open()
        for _ in range(3):
            drive.heal()
            drive.inject("hold", opcode=2)
            assert controller.read(1, 0, read, 0.1) == 0x10000
            drive.heal()
            assert controller.read(1, 0, read, 5.0) == 0
        controller.close()


def test_a_transport_over_several() -> None:
    drives = [SoftNvme(MIB, serial=f"S{number}") for number in range(3)]
    transport = gpu_transport(drives)
    assert len(transport.devices) == 3 and transport.capabilities().name == "gpu"
    transport.close()
    for drive in drives:
        drive.close()
