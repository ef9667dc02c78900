"""Registered memory gets huge pages where the kernel will, and keeps its contents where not."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tutti_core import PrefixStore
from tutti_core.io.huge_pages import HUGE_PAGE_BYTES, collapse

SIZE = 8 * HUGE_PAGE_BYTES


@pytest.fixture
def memory() -> np.ndarray:
    array = np.frombuffer(
        mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    array[:] = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)
    return array


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds `address`, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def test_contents_stay_and_the_kernel_agrees(memory: np.ndarray) -> None:
    before = memory.copy()
    done = collapse(memory.ctypes.data, SIZE)
    assert (memory == before).all()
    if done == 0:
        pytest.skip("this kernel gives no huge pages on request (MADV_COLLAPSE, Linux 6.1)")
    assert huge_bytes(memory.ctypes.data) >= done


def test_parts_of_huge_pages_are_left_alone(memory: np.ndarray) -> None:
    assert collapse(memory.ctypes.data + 1, HUGE_PAGE_BYTES) == 0
    assert collapse(memory.ctypes.data, 4096) == 0


def test_no_time_no_work(memory: np.ndarray) -> None:
    assert collapse(memory.ctypes.data, SIZE, time_limit_s=0.0) == 0


def test_memory_that_is_not_there_is_refused_quietly() -> None:
    assert collapse(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES) == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_the_setting_decides(wanted: bool, memory: np.ndarray, store_dir: Path) -> None:
    with PrefixStore.open(
        store_dir, capacity="64MiB", transport="auto", huge_pages=wanted
    ) as store:
        able = store.stats().transport
        region = store.register(memory)
        counted = store.stats().counters.get("huge_page_bytes", 0)
        if not wanted or not able.registered_buffers:
            assert counted == 0
        assert counted in (0, *range(HUGE_PAGE_BYTES, SIZE + 1, HUGE_PAGE_BYTES))
        store.unregister(region)
    assert os.path.exists(store_dir)
