"""NVMe statuses in words and as errnos."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tutti_core.nvme import status

CASES = {
    0x000: (0, "success"),
    0x4000: (0, "success"),
    0x281: (errno.EIO, "unrecovered read error"),
    0x4281: (errno.EIO, "unrecovered read error"),
    0x080: (errno.ERANGE, "LBA out of range"),
    0x00B: (errno.ENODEV, "invalid namespace"),
    0x7FF: (errno.EIO, "unknown status"),
    status.TIMEOUT: (errno.ETIMEDOUT, "no completion"),
    status.DEVICE_GONE: (errno.ENODEV, "gone"),
    status.NOT_ISSUED: (errno.EIO, "not issued"),
    status.BAD_MEMORY: (errno.EFAULT, "not registered"),
}


@pytest.mark.parametrize(("code", "expected"), CASES.items())
def test_a_status_has_an_errno_and_words(code: int, expected: tuple[int, str]) -> None:
    number, words = expected
    assert status.errno_of(code) == number
    assert words in status.text_of(code) and f"{code:#x}" in status.text_of(code)


def test_arrays_of_statuses() -> None:
    codes = np.array([*CASES, *CASES], np.uint32)
    expected = [-number for number, _ in CASES.values()] * 2
    assert status.errnos_of(codes).tolist() == expected
    assert status.errnos_of(np.zeros(0, np.uint32)).tolist() == []
