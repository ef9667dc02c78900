"""TuttiLinker by way of staging, on a stand-in device that runs copies late and in any order."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from delayed_device import DelayedDevice
from linker_kit import KINDS, Rig, keys_of, make_pools, published

from tutti_sglang import linker_setup
from tutti_sglang.staging import Staging


@pytest.fixture(scope="module")
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> DelayedDevice:
    """The path is staging, its rings are small, and the device is late."""
    device = DelayedDevice(rng, steps=2)
    late = functools.partial(Staging, api=device, ring_bytes=1)
    monkeypatch.setattr(linker_setup, "Staging", late)
    monkeypatch.setattr(linker_setup, "memory_path", lambda *_, **__: ("staging", "for this test"))
    return device


@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_are_byte_exact(
    kind: str, device: DelayedDevice, server_args: Any, store_folder: Path
) -> None:
    pools = make_pools(kind)
    with Rig(server_args, pools, store_folder) as rig:
        for turn in range(4):
            pools.fill(turn)
            keys, source = keys_of(f"{turn}", 6), device.rng.sample(range(1, 16), 6)
            target = device.rng.sample(range(16, 31), 6)
            if "swa" in pools.buffers:
                source = [3, 4, 5, 9, 10, 11]  # its window has to be neighbours
            before = {"kv": [pools.read("kv", page) for page in source]}
            if "swa" in pools.buffers:
                before["swa"] = [pools.read("swa", page) for page in (10, 11)]
            if "mamba" in pools.buffers:
                before["mamba"] = [pools.read("mamba", 3)]
            assert rig.offload(keys, source, state=3)
            for tensors in pools.buffers.values():
                for tensor in tensors:
                    tensor.zero_()
            assert rig.lookup(keys)[-1] == 6
            assert rig.load(keys, target, swa=12, state=7)
            assert [pools.read("kv", page) for page in target] == before["kv"]
            if "swa" in pools.buffers:
                assert [pools.read("swa", page) for page in (12, 13)] == before["swa"]
            if "mamba" in pools.buffers:
                assert [pools.read("mamba", 7)] == before["mamba"]
        assert rig.linker.counters["failures"] == 0
    assert device.idle()


def test_a_device_that_refuses_fails_loads_and_offloads_and_no_more(
    device: DelayedDevice, server_args: Any, store_folder: Path
) -> None:
    pools = make_pools("mha")
    pools.fill()
    with Rig(server_args, pools, store_folder) as rig:
        keys = keys_of("good", 4)
        assert rig.offload(keys, [1, 2, 3, 4])
        device.fail_at = device.queued
        assert not rig.load(keys, [5, 6, 7, 8])
        assert not rig.offload(keys_of("late", 4), [1, 2, 3, 4])
        assert not rig.load(keys, [5, 6, 7, 8]) if rig.lookup(keys) else True
