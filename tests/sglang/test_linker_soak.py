"""Random traffic through a linker over devices that fail and lie: late or failed, never wrong.

Each page's bytes follow from its key, so whatever a load reports as landed can be checked. The
store is too small for the traffic, so pages are evicted all the while.
"""

from __future__ import annotations

import random
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from linker_kit import Pools, Rig, keys_of, make_pools, published

from tutti_core.testing import FaultPlan, FaultyDevices

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from store_kit import memory_devices

OPTIONS = {"capacity": "5MiB", "catalog": "2MiB", "segment": "256KiB", "io_timeout_s": 20.0}
CHAINS, CHAIN_PAGES, STEPS = 30, 12, 400
FAULTS = {
    ("error", "read"): 0.01,
    ("flip", "read"): 0.01,
    ("misdirected", "read"): 0.005,
    ("stale", "read"): 0.005,
    ("error", "write"): 0.01,
    ("torn", "write"): 0.01,
    ("lost", "write"): 0.01,
    ("busy", "batch"): 0.02,
}


@pytest.fixture(scope="module")
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


def write(pools: Pools, name: str, page: int, key: str) -> None:
    """Put the bytes that belong to `key` into a page."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    slots = pools.slots(name, [page])
    for tensor in pools.buffers[name]:
        raw = tensor.view(torch.uint8)
        raw[slots] = torch.randint(0, 256, raw[slots].shape, generator=generator, dtype=torch.uint8)


def expected(pools: Pools, name: str, key: str) -> bytes:
    """The bytes that belong to `key`: written into a page that nothing else uses, and read."""
    spare = 15
    write(pools, name, spare, key)
    return pools.read(name, spare)


class Traffic:
    """One engine's calls, in a random order."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.chains = [keys_of(f"chain {i}", CHAIN_PAGES) for i in range(CHAINS)]
        self.landed = self.failed = self.reported = 0

    def run(self, steps: int) -> None:
        calls = [self.offload] * 4 + [self.load] * 4 + [self.vanish, self.cancel, self.two_at_once]
        for step in range(steps):
            if step % 150 == 149:
                self.rig.linker.reset()
            self.random.choice(calls)()

    def chosen(self) -> list[str]:
        """A chain; the first ones far more often than the last."""
        return self.chains[int(CHAINS * self.random.random() ** 3)]

    def offload(self) -> None:
        """A node of some chain: pages low .. high-1, behind its ancestors."""
        rig, pools = self.rig, self.rig.pools
        keys = self.chosen()
        low = self.random.randrange(CHAIN_PAGES - 2)
        high = self.random.randint(low + 2, CHAIN_PAGES)
        pages = list(range(1, 1 + high - low))
        for page, key in zip(pages, keys[low:high], strict=True):
            write(pools, "kv", page, key)
        if "swa" in pools.buffers:
            for page, key in ((1, keys[high - 2]), (2, keys[high - 1])):
                write(pools, "swa", page, key)
        if "mamba" in pools.buffers:
            write(pools, "mamba", 1, keys[high - 1])
        rig.linker.note_ancestors(keys[:low] if self.random.random() < 0.8 else None)
        rig.offload(keys[low:high], pages, swa=1, state=1)

    def look_up(self, rid: str) -> tuple[list[str], int, int] | None:
        keys = self.chosen()
        low = self.random.choice([0, 0, 0, 2])
        self.rig.linker.note_ancestors(keys[:low] if self.random.random() < 0.8 else None)
        lengths = self.rig.lookup(keys[low:], rid=rid)
        if not lengths:
            return None
        self.reported += 1
        return keys, low, low + self.random.choice(lengths)

    def load(self) -> None:
        found = self.look_up("one")
        if found is None:
            return
        keys, low, high = found
        if self.rig.load(keys[low:high], self.places(high - low), "one", swa=8, state=8):
            self.check(found)
        else:
            self.failed += 1

    def two_at_once(self) -> None:
        """Two requests in one batch; a batch lands or fails as one."""
        first, second = self.look_up("one"), self.look_up("two")
        if first is None or second is None:
            return
        for rid, (keys, low, high), start in (("one", first, 16), ("two", second, 0)):
            pages = self.places(high - low, start or 1)
            places = {"swa": 8 if start else 4, "state": 8 if start else 4}
            transfers = self.rig.transfers(keys[low:high], pages, **places)
            assert self.rig.linker.load(rid, transfers)
        if self.rig.run_batch():
            self.check(first)
        else:
            self.failed += 1

    def vanish(self) -> None:
        self.look_up(f"vanishing {self.random.random()}")

    def cancel(self) -> None:
        found = self.look_up("cancelled")
        if found is not None:
            keys, low, high = found
            transfers = self.rig.transfers(keys[low:high], self.places(high - low), swa=8, state=8)
            assert self.rig.linker.load("cancelled", transfers)
            assert self.rig.linker.cancel_queued_load("cancelled")

    def places(self, count: int, start: int = 16) -> list[int]:
        return list(range(start, start + count))

    def check(self, found: tuple[list[str], int, int]) -> None:
        keys, low, high = found
        pools = self.rig.pools
        self.landed += 1
        for page, key in zip(self.places(high - low), keys[low:high], strict=True):
            assert pools.read("kv", page) == expected(pools, "kv", key), "wrong bytes were served"
        if "swa" in pools.buffers:
            for page, key in zip((8, 9), keys[max(high - 2, low) : high], strict=False):
                assert pools.read("swa", page) == expected(pools, "swa", key)
        if "mamba" in pools.buffers:
            assert pools.read("mamba", 8) == expected(pools, "mamba", keys[high - 1])


@pytest.mark.parametrize("kind", ["mha", "mla", "swa_mamba"])
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_wrong_is_served(
    kind: str, seed: int, server_args: Any, store_folder: Path
) -> None:
    made: list[FaultyDevices] = []

    def transport(config: Any) -> FaultyDevices:
        plan = FaultPlan(rates=FAULTS, reorder=True)  # type: ignore[arg-type]
        made.append(memory_devices(config, seed=seed, plan=plan))
        return made[0]

    threads = threading.active_count()
    pools = make_pools(kind)
    with Rig(server_args, pools, store_folder, transport=transport, **OPTIONS) as rig:
        traffic = Traffic(rig, seed)
        traffic.run(STEPS)
        rig.linker.reset()
        assert len(rig.linker._leases) == 0
        assert rig.linker.store.stats().counters["evicted_pages"] > 0
        assert not rig.linker.store._loader._parts_loads, "a load was never ended"
        counters = dict(rig.linker.counters)
    assert threading.active_count() <= threads
    print(kind, seed, traffic.reported, traffic.landed, traffic.failed, counters)
    assert traffic.landed > 10, "little was served"
    assert traffic.failed > 0, "the faults did not reach a load"
