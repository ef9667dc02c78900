"""The layer reader on a real store, over devices that fail, are slow, or return wrong bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_kit import memory_devices, open_faulty, open_small, poll, run, settle, small_config

from tutti_core import (
    LayerLoadError,
    LayerRead,
    LayerReader,
    NamespaceStore,
    PageFragments,
    PageKeys,
    PrefixStore,
    group_layers,
)
from tutti_core.testing import FOREVER, Fault, FaultPlan, FaultyDevices

LAYERS = 5
PAGES = 6
HALF = 2048
LAYER_BYTES = 2 * HALF
PAGE_BYTES = LAYERS * LAYER_BYTES
GROUPS = ((0,), (1, 2), (3, 4))
WAIT_S = 20.0


class Sink:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.error: BaseException | None = None
        self.over = threading.Event()

    def complete(self, layer: int) -> None:
        self.layers.append(layer)
        if layer == LAYERS - 1:
            self.over.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.over.set()


class Pool:
    """A device pool in host memory, [layer][K or V][slot], and pages that were saved from it."""

    def __init__(self, store: PrefixStore, name: str = "kv") -> None:
        self.parts = tuple(len(group) * LAYER_BYTES for group in GROUPS)
        self.pages: NamespaceStore = store.namespace(
            model="m", page_bytes=PAGE_BYTES, page_tokens=1, pool=name, parts=self.parts
        )
        self.memory = np.random.default_rng(1).integers(
            0, 256, (LAYERS, 2, PAGES, HALF), dtype=np.uint8
        )
        slots = np.random.default_rng(2).permutation(PAGES)
        row = np.arange(LAYERS * 2, dtype=np.uint64) * np.uint64(PAGES)
        places = row + slots.astype(np.uint64)[:, None]
        address = np.uint64(self.memory.ctypes.data) + places * np.uint64(HALF)
        lengths = np.full(LAYERS * 2, HALF, dtype=np.uint64)
        self.fragments = PageFragments(address, lengths, self.memory)
        self.keys: PageKeys = run(name, PAGES)
        assert self.pages.save(self.keys, self.fragments).wait(WAIT_S).all()
        self.saved = self.memory.copy()
        self.memory[:] = 0

    def reads(self) -> list[LayerRead]:
        """What one batch needs of this pool."""
        return [LayerRead(self.pages.load_parts(self.keys, self.fragments), GROUPS)]

    def right_layers(self) -> list[int]:
        """Which layers hold what was saved."""
        same = (self.memory == self.saved).all(axis=(1, 2, 3))
        return np.flatnonzero(same).tolist()


@pytest.fixture
def reader() -> Iterator[LayerReader]:
    one = LayerReader(LAYERS, parts_ahead_max=2, timeout_s=0.2)
    yield one
    assert one.close(WAIT_S)


@pytest.fixture
def faulty(store_dir: Path) -> Iterator[tuple[PrefixStore, FaultyDevices]]:
    with open_faulty(store_dir, segments=16) as opened:
        yield opened


def load(reader: LayerReader, *pools: Pool) -> Sink:
    """Load all pages of some pools; what was completed must be right at that moment and after."""
    sink = Sink()
    reader.submit(lambda: [read for pool in pools for read in pool.reads()], sink)
    assert sink.over.wait(WAIT_S), "the batch does not end"
    for pool in pools:
        assert set(sink.layers) <= set(pool.right_layers()), "a layer was completed too early"
    assert sink.layers == list(range(len(sink.layers)))
    return sink


@pytest.mark.parametrize("transport", ["posix", "uring"])
def test_all_layers_arrive_from_files(tmp_path: Path, transport: str, reader: LayerReader) -> None:
    with open_small(tmp_path / "s", segments=16, transport=transport) as store:
        pool, other = Pool(store), Pool(store, "other")
        assert pool.right_layers() == []
        sink = load(reader, pool, other)
        assert sink.error is None and sink.layers == list(range(LAYERS))
        assert pool.right_layers() == other.right_layers() == list(range(LAYERS))
        assert reader.wait_idle(WAIT_S)


def test_each_layer_is_right_when_it_is_completed(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader
) -> None:
    pool = Pool(faulty[0])
    seen: list[bool] = []

    class Looking(Sink):
        def complete(self, layer: int) -> None:
            seen.append(bool((pool.memory[layer] == pool.saved[layer]).all()))
            super().complete(layer)

    sink = Looking()
    reader.submit(pool.reads, sink)
    assert sink.over.wait(WAIT_S) and seen == [True] * LAYERS


@pytest.mark.parametrize("kind", ["error", "flip", "misdirected"])
@pytest.mark.parametrize("part", range(len(GROUPS)))
def test_a_bad_read_fails_the_batch_and_the_page_is_forgotten(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader, kind: str, part: int
) -> None:
    store, devices = faulty
    pool = Pool(store)
    devices.arm(Fault(kind, "read", index=part * PAGES + 3))  # type: ignore[arg-type]
    sink = load(reader, pool)
    assert isinstance(sink.error, LayerLoadError) and not sink.error.still_written
    assert sink.layers == [layer for group in GROUPS[:part] for layer in group]
    assert devices.injected == {(kind, "read"): 1}
    assert reader.wait_idle(WAIT_S)
    settle(store)
    assert pool.pages.contains(pool.keys).tolist() == [page != 3 for page in range(PAGES)]
    again = load(reader, pool)
    assert "1 of 6 pages" in str(again.error) and again.layers == []


def test_damage_on_the_device_is_found_by_the_part_it_is_in(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader
) -> None:
    store, devices = faulty
    pool = Pool(store)
    last = bytes(pool.saved[LAYERS - 1, 1, 0])  # the end of some page
    medium = devices.media.read(0, 0, devices.media.capacities_bytes[0]).tobytes()
    at = medium.find(last)
    assert at > 0 and medium.count(last) == 1
    devices.flip_bit(0, at + 17, 3)
    sink = load(reader, pool)
    assert isinstance(sink.error, LayerLoadError) and sink.layers == [0, 1, 2]


def test_without_a_fault_nothing_fails(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader
) -> None:
    pool = Pool(faulty[0])
    for _ in range(3):
        pool.memory[:] = 0
        assert load(reader, pool).error is None
    assert faulty[1].injected == {}


def test_slow_devices_are_waited_for(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader
) -> None:
    pool = Pool(faulty[0])
    faulty[1].arm(Fault("slow", "batch", count=FOREVER, polls=5))
    assert load(reader, pool).error is None


def test_a_full_transport_is_asked_again(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader
) -> None:
    pool = Pool(faulty[0])
    faulty[1].arm(Fault("busy", "batch", index=1, count=4))
    assert load(reader, pool).error is None
    assert faulty[1].injected[("busy", "batch")] == 4


def test_a_device_that_hangs_fails_the_batch_and_keeps_the_memory(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader
) -> None:
    store, devices = faulty
    pool = Pool(store)
    with devices.held():
        sink = load(reader, pool)
        assert isinstance(sink.error, LayerLoadError) and sink.error.still_written
        assert reader.busy and not reader.wait_idle(0.05)
        assert store._loader._parts_loads, "the pages are not protected any more"
    assert reader.wait_idle(WAIT_S) and not store._loader._parts_loads
    pool.memory[:] = 0
    assert load(reader, pool).error is None


def test_an_evicted_page_is_missing(
    faulty: tuple[PrefixStore, FaultyDevices], reader: LayerReader
) -> None:
    store, _ = faulty
    pool = Pool(store)
    assert pool.pages.clear() == PAGES
    sink = load(reader, pool)
    assert isinstance(sink.error, LayerLoadError) and "6 of 6 pages" in str(sink.error)


def test_closing_the_store_under_a_load_ends_it(store_dir: Path, reader: LayerReader) -> None:
    with open_faulty(store_dir, segments=16) as (store, devices):
        pool, sink = Pool(store), Sink()
        devices.hold()
        reader.submit(pool.reads, sink)
        poll(lambda: bool(devices._flights), "parts are in flight")
        store.close(0.3)
    assert sink.over.wait(WAIT_S) and sink.error is not None
    assert reader.wait_idle(WAIT_S)


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_faults_ends_and_completes_nothing_wrong(store_dir: Path, seed: int) -> None:
    config = small_config(store_dir, segments=16)
    rates = {
        ("error", "read"): 0.01, ("flip", "read"): 0.01, ("stale", "read"): 0.01,
        ("misdirected", "read"): 0.01, ("slow", "batch"): 0.2, ("busy", "batch"): 0.1,
    }  # fmt: skip
    devices = memory_devices(config, seed=seed)
    good = bad = 0
    with (
        PrefixStore.open(config, transport_object=devices) as store,
        LayerReaderClosed() as reader,
    ):
        pools = [Pool(store), Pool(store, "other")]
        devices._plan = FaultPlan(rates=rates, reorder=True)  # type: ignore[arg-type]
        for _ in range(12):
            for pool in pools:
                pool.memory[:] = 0
            sink = load(reader, *pools)
            good, bad = good + (sink.error is None), bad + (sink.error is not None)
            assert reader.wait_idle(WAIT_S)
            for pool in pools:  # pages that were forgotten are saved again
                pool.memory[:] = pool.saved
                devices._plan = FaultPlan()
                pool.pages.save(pool.keys, pool.fragments).wait(WAIT_S)
                devices._plan = FaultPlan(rates=rates, reorder=True)  # type: ignore[arg-type]
    assert good and bad, f"{good} good and {bad} bad batches test nothing"


class LayerReaderClosed(LayerReader):
    """A reader that a with statement closes."""

    def __init__(self) -> None:
        super().__init__(LAYERS, parts_ahead_max=3, timeout_s=5.0)

    def __enter__(self) -> LayerReaderClosed:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.close(WAIT_S)


def test_the_groups_of_these_tests_are_a_cut_into_parts() -> None:
    assert group_layers([LAYER_BYTES] * LAYERS, 2 * LAYER_BYTES) == GROUPS
