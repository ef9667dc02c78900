"""TuttiStorage against real SGLang classes, with a small host pool made by hand."""

from __future__ import annotations

import hashlib
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from v2_kit import storage_config

from tutti_core import ConfigError, NamespaceStore, UnsupportedError
from tutti_sglang import identity as identity_module
from tutti_sglang import moves as moves_module
from tutti_sglang.backend import TuttiStorage
from tutti_sglang.options import PREFIX_KEYS
from tutti_sglang.pools import KNOWN_LAYOUTS, describe_pool

PAGE_TOKENS = 4
PAGE_COUNT = 64


class HostPool:
    """What the backend needs of an MHA host pool, in the layouts of SGLang 0.5.23."""

    def __init__(self, layout: str = "page_first", *, layers: int = 3, head_dim: int = 64) -> None:
        self.layout = layout
        self.page_size = PAGE_TOKENS
        self.page_num = PAGE_COUNT
        self.size = PAGE_COUNT * PAGE_TOKENS
        self.start_layer, self.end_layer, self.layer_num = 0, layers, layers
        self.head_num, self.head_dim = 2, head_dim
        self.dtype = torch.bfloat16
        shape = (2, layers, self.size, self.head_num, head_dim)
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base, item = self.kv_buffer.data_ptr(), self.dtype.itemsize
        row = self.head_num * self.head_dim * item
        half = self.layer_num * self.size * row
        pointers, size = [], 0
        for slot in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                size = self.page_size * row
                for layer in range(self.layer_num):
                    at = base + (layer * self.size + slot) * row
                    pointers += [at, at + half]
            else:
                size = self.page_size * self.layer_num * row
                at = base + slot * self.layer_num * row
                pointers += [at, at + half]
        return pointers, [size] * len(pointers)

    @property
    def page_bytes(self) -> int:
        _, sizes = self.get_page_buffer_meta(torch.arange(self.page_size))
        return sum(sizes)

    def fill(self, seed: int) -> None:
        raw = self.kv_buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(seed)))

    def bytes_of(self, page: int) -> bytes:
        import ctypes

        pointers, sizes = self.get_page_buffer_meta(self.slots([page]))
        return b"".join(ctypes.string_at(p, s) for p, s in zip(pointers, sizes, strict=True))

    def slots(self, pages: list[int]) -> torch.Tensor:
        return torch.cat(
            [torch.arange(p * self.page_size, (p + 1) * self.page_size) for p in pages]
        )


def attach(folder: Path, pool: Any | None = None, **changes: Any) -> TuttiStorage:
    storage = TuttiStorage(storage_config(folder, **changes), {})
    storage.register_mem_pool_host(pool or HostPool())
    storage.register_mem_host_pool_v2(storage.mem_pool_host, "kv")
    storage.on_host_pools_registered()
    return storage


def chain(count: int, name: str = "a") -> list[str]:
    keys, previous = [], b""
    for i in range(count):
        previous = hashlib.sha256(previous + f"{name}{i}".encode()).digest()
        keys.append(previous.hex())
    return keys


def prefix(keys: list[str]) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=keys)


@pytest.fixture
def pool() -> HostPool:
    return HostPool()


@pytest.fixture
def storage(store_folder: Path, pool: HostPool) -> Iterator[TuttiStorage]:
    backend = attach(store_folder, pool)
    yield backend
    backend.close()


@pytest.mark.parametrize("layout", KNOWN_LAYOUTS)
def test_pages_come_back_exactly(layout: str, store_folder: Path) -> None:
    pool = HostPool(layout)
    storage = attach(store_folder, pool)
    keys = chain(8)
    pool.fill(1)
    before = [pool.bytes_of(p) for p in range(8)]
    assert storage.batch_set_v1(keys, pool.slots(list(range(8)))) == [True] * 8
    pool.fill(2)
    elsewhere = [20, 9, 40, 11, 63, 13, 14, 0]
    assert storage.batch_get_v1(keys, pool.slots(elsewhere)) == [True] * 8
    assert [pool.bytes_of(p) for p in elsewhere] == before
    storage.close()


def test_exists_counts_the_leading_run(storage: TuttiStorage, pool: HostPool) -> None:
    keys = chain(12)
    assert storage.batch_exists(keys) == 0
    storage.batch_set_v1(keys[:8], pool.slots(list(range(8))), prefix([]))
    assert storage.batch_exists(keys) == 8
    assert storage.batch_exists(keys[5:], prefix(keys[:5])) == 3
    storage.batch_set_v1(keys[9:], pool.slots([9, 10, 11]), prefix(keys[:9]))
    assert storage.batch_exists(keys) == 8, "page 8 is missing"
    assert storage.batch_exists(keys[9:], prefix(keys[:9])) == 3
    assert storage.batch_exists([]) == 0


def test_results_are_per_page(storage: TuttiStorage, pool: HostPool) -> None:
    keys = chain(6)
    storage.batch_set_v1(keys[:2], pool.slots([0, 1]), prefix([]))
    storage.batch_set_v1(keys[4:], pool.slots([4, 5]), prefix(keys[:4]))
    expected = [True, True, False, False, True, True]
    assert storage.batch_get_v1(keys, pool.slots(list(range(10, 16)))) == expected


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_large_gets_are_made_in_parts(
    parts: int, storage: TuttiStorage, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(8)
    pool.fill(1)
    before = [pool.bytes_of(p) for p in range(8)]
    assert all(storage.batch_set_v1(keys, pool.slots(list(range(8))), prefix([])))
    monkeypatch.setattr(moves_module, "PART_BYTES", -(-8 // parts) * pool.page_bytes)
    assert storage.batch_get_v1(keys, pool.slots(list(range(8, 16))), prefix([])) == [True] * 8
    assert [pool.bytes_of(p) for p in range(8, 16)] == before
    behind = storage.batch_get_v1(keys[3:], pool.slots([20, 21, 22, 23, 24]), prefix(keys[:3]))
    assert behind == [True] * 5
    assert [pool.bytes_of(p) for p in range(20, 25)] == before[3:]


@pytest.mark.parametrize("pages_a_part", [1, 3, 8])
def test_large_sets_are_made_in_parts(
    pages_a_part: int, storage: TuttiStorage, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(20)
    pool.fill(1)
    before = [pool.bytes_of(p) for p in range(20)]
    monkeypatch.setattr(moves_module, "PART_BYTES", pages_a_part * pool.page_bytes)
    assert storage.batch_set_v1(keys[4:], pool.slots(list(range(4, 20))), prefix(keys[:4]))
    assert storage.batch_exists(keys[4:], prefix(keys[:4])) == 16
    assert storage.batch_set_v1(keys, pool.slots(list(range(20))), prefix([])) == [True] * 20
    assert storage.batch_exists(keys) == 20
    pool.fill(2)
    assert all(storage.batch_get_v1(keys, pool.slots(list(range(30, 50))), prefix([])))
    assert [pool.bytes_of(p) for p in range(30, 50)] == before


def test_a_set_that_takes_too_long_leaves_nothing(
    store_folder: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = attach(store_folder, pool, extra={"operation_timeout_s": 0.2})
    gate, keys = threading.Event(), chain(4)
    transport = storage.store._transport
    honest = transport.submit

    def late(batch: Any) -> Any:
        gate.wait(20)
        return honest(batch)

    monkeypatch.setattr(transport, "submit", late)
    monkeypatch.setattr(moves_module, "PART_BYTES", pool.page_bytes)
    assert storage.batch_set_v1(keys, pool.slots([0, 1, 2, 3]), prefix([])) == [False] * 4
    gate.set()
    monkeypatch.undo()
    pool.fill(9)  # the engine has given the memory to another request
    other = chain(1, "b")
    assert storage.batch_set_v1(other, pool.slots([9]), prefix([])) == [True], "it goes on"
    assert storage.batch_exists(keys) == 0
    storage.close()


def test_a_get_that_takes_long_starts_no_more_parts(
    storage: TuttiStorage, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(8)
    assert all(storage.batch_set_v1(keys, pool.slots(list(range(8))), prefix([])))
    monkeypatch.setattr(moves_module, "PART_BYTES", 2 * pool.page_bytes)
    monkeypatch.setattr(moves_module, "GET_TIME_S", -1.0)
    loaded = storage.batch_get_v1(keys, pool.slots(list(range(8, 16))), prefix([]))
    assert loaded == [True] * 4 + [False] * 4, "two parts were in flight, no third was started"
    assert storage.batch_exists(keys) == 8, "the others are not missing, only late"


def test_saving_again_is_cheap_and_true(storage: TuttiStorage, pool: HostPool) -> None:
    keys = chain(8)
    for _ in range(3):
        assert all(storage.batch_set_v1(keys, pool.slots(list(range(8))), prefix([])))
    assert storage.store is not None
    counters = storage.store.stats().counters
    assert (counters["saved_pages"], counters["known_pages"]) == (8, 16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weights", {"extra": {"weights": "other"}}),
        ("tenant", {"extra": {"tenant": "other"}}),
        ("model", {"model_name": "org-m"}),
        ("tp rank", {"tp_rank": 1, "tp_size": 2}),
        ("pp rank", {"pp_rank": 1, "pp_size": 2}),
        ("cp rank", {"attn_cp_rank": 1, "attn_cp_size": 2}),
    ],
)
def test_another_identity_finds_nothing(
    name: str, change: dict[str, Any], storage: TuttiStorage, pool: HostPool, store_folder: Path
) -> None:
    keys = chain(4)
    storage.batch_set_v1(keys, pool.slots([0, 1, 2, 3]), prefix([]))
    other = attach(store_folder, HostPool(), **change)
    assert other.batch_exists(keys) == 0
    assert other.batch_get_v1(keys, pool.slots([0, 1, 2, 3])) == [False] * 4
    other.close()
    same = attach(store_folder, HostPool())  # the control: nothing but the object differs
    assert same.batch_exists(keys) == 4
    same.close()


@pytest.mark.parametrize("change", ["dtype", "layout", "page size", "page bytes", "layers"])
def test_another_geometry_finds_nothing(
    change: str, storage: TuttiStorage, pool: HostPool, store_folder: Path
) -> None:
    keys = chain(4)
    storage.batch_set_v1(keys, pool.slots([0, 1, 2, 3]), prefix([]))
    other_pool = HostPool()
    if change == "dtype":  # the same number of bytes
        other_pool.dtype = torch.float16
        other_pool.kv_buffer = other_pool.kv_buffer.view(torch.float16)
    elif change == "layout":
        other_pool.layout = "page_first_direct"
    elif change == "page size":
        other_pool.page_size, other_pool.page_num = 2 * PAGE_TOKENS, PAGE_COUNT // 2
    elif change == "page bytes":
        other_pool = HostPool(head_dim=32)
    else:
        other_pool.start_layer, other_pool.end_layer = 3, 6
    other = attach(store_folder, other_pool)
    assert other.batch_exists(keys) == 0
    other.close()


def test_mla_ranks_share_pages_and_mha_ranks_do_not(store_folder: Path) -> None:
    pool, keys = HostPool(), chain(3)
    two = {"tp_size": 2, "is_mla_model": True}
    writer = attach(store_folder, pool, tp_rank=0, **two)
    reader = attach(store_folder, HostPool(), tp_rank=1, **two)
    writer.batch_set_v1(keys, pool.slots([0, 1, 2]), prefix([]))
    assert reader.batch_exists(keys) == 3
    assert reader.batch_get_v1(keys, pool.slots([5, 6, 7])) == [True] * 3
    assert reader.mem_pool_host.bytes_of(6) == pool.bytes_of(1)
    writer.close()
    reader.close()


def test_clear_removes_the_own_namespace_only(
    storage: TuttiStorage, pool: HostPool, store_folder: Path
) -> None:
    keys = chain(4)
    other = attach(store_folder, HostPool(), model_name="another")
    for backend in (storage, other):
        backend.batch_set_v1(keys, pool.slots([0, 1, 2, 3]), prefix([]))
    storage.clear()
    assert storage.batch_exists(keys) == 0
    assert other.batch_exists(keys) == 4
    assert all(storage.batch_set_v1(keys, pool.slots([0, 1, 2, 3]), prefix([])))
    other.close()


def test_generic_calls_have_their_own_pages(storage: TuttiStorage, pool: HostPool) -> None:
    keys = chain(3)
    storage.batch_set_v1(keys, pool.slots([0, 1, 2]), prefix([]))
    size = pool.page_bytes // 2
    flat = [torch.full((size,), i, dtype=torch.bfloat16) for i in range(3)]
    targets = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(3)]
    assert storage.batch_get(keys, targets) == [None, None, None]
    assert storage.batch_set(keys, flat)
    loaded = storage.batch_get(keys, targets)
    assert all(torch.equal(a, b) for a, b in zip(loaded, flat, strict=True))
    assert storage.get(keys[2], targets[0]) is targets[0]
    assert not storage.batch_set(keys[:1], [torch.zeros(3)]), "wrong page size"


def test_generic_calls_without_tensors_are_answered(storage: TuttiStorage) -> None:
    keys = chain(2)
    assert not storage.set(keys[0]) and not storage.batch_set(keys)
    assert not storage.batch_set(keys, [None, None])
    assert storage.get(keys[0]) is None and storage.batch_get(keys) == [None, None]
    size = storage._flat.namespace.page_bytes // 2
    assert not storage.batch_set(keys[:1], torch.zeros(2, size))


def test_exists_answers_for_the_interface_in_use(store_folder: Path) -> None:
    pool, keys = HostPool(), chain(3)
    storage = attach(store_folder, pool, extra={"interface_v1": 0, PREFIX_KEYS: False})
    size = pool.page_bytes // 2
    assert storage.batch_set(keys, [torch.zeros(size, dtype=torch.bfloat16) for _ in keys])
    assert storage.batch_exists(keys) == 3
    assert storage.exists(keys[1]) and not storage.exists(chain(1, "z")[0])
    storage.close()


@pytest.mark.parametrize("keys", [["zz" * 32], ["ab"], ["ab" * 32, "ab" * 31], ["ab " * 21 + "a"]])
def test_bad_keys_are_answered_not_raised(
    keys: list[str], storage: TuttiStorage, pool: HostPool
) -> None:
    slots = pool.slots(list(range(len(keys))))
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, slots, prefix([])) == [False] * len(keys)
    assert storage.batch_get_v1(keys, slots) == [False] * len(keys)


def test_slots_outside_the_pool_are_refused(storage: TuttiStorage, pool: HostPool) -> None:
    keys = chain(1)
    for first in (-PAGE_TOKENS, PAGE_COUNT * PAGE_TOKENS, 1):
        slots = torch.arange(first, first + PAGE_TOKENS)
        assert storage.batch_set_v1(keys, slots, prefix([])) == [False]
    assert storage.batch_set_v1(keys, pool.slots([0])[:3], prefix([])) == [False]
    assert storage.batch_exists(keys) == 0


def test_no_exception_reaches_the_engine(
    storage: TuttiStorage, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, slots = chain(2), pool.slots([0, 1])
    assert all(storage.batch_set_v1(keys, slots, prefix([])))

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    for name in ("submit", "wait", "flush"):
        with monkeypatch.context() as patch:
            patch.setattr(type(storage.store._transport), name, broken)
            # A load does not flush.
            assert storage.batch_get_v1(keys, slots, prefix([])) == [name == "flush"] * 2
            patch.setattr(NamespaceStore, "match", broken)
            assert storage.batch_exists(keys) == 0
    assert storage.batch_exists(keys) == 2


def test_calls_after_close_are_answered(storage: TuttiStorage, pool: HostPool) -> None:
    keys, slots = chain(2), pool.slots([0, 1])
    storage.batch_set_v1(keys, slots, prefix([]))
    storage.close()
    storage.close()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, slots) == [False, False]
    assert storage.batch_set_v1(keys, slots) == [False, False]
    assert storage.clear() is None


def _entries(folder: Path) -> list[str]:
    return sorted(str(p) for p in folder.rglob("*"))


def test_unknown_pools_are_refused_and_nothing_is_touched(store_folder: Path) -> None:
    strange = HostPool()
    strange.layout = "page_unified"
    uneven = HostPool()
    honest = uneven.get_page_buffer_meta
    uneven.get_page_buffer_meta = lambda slots: (  # type: ignore[method-assign]
        [p + 64 * (int(slots[0]) == PAGE_TOKENS) for p in honest(slots)[0]],
        honest(slots)[1],
    )
    outside = HostPool()
    outside.kv_buffer = torch.zeros(4, dtype=torch.bfloat16)
    for pool, word in ((strange, "page_unified"), (uneven, "evenly"), (outside, "outside")):
        with pytest.raises(UnsupportedError, match=word):
            attach(store_folder, pool)
        assert _entries(store_folder) == []


def test_changed_weights_end_the_use_of_what_is_stored(
    storage: TuttiStorage, pool: HostPool, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "_weights_changed", threading.Event())
    keys, slots = chain(2), pool.slots([0, 1])
    assert all(storage.batch_set_v1(keys, slots, prefix([])))
    identity_module.note_weights_change()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, slots, prefix([])) == [False, False]
    assert storage.batch_set_v1(keys, slots, prefix([])) == [False, False]
    with pytest.raises(ConfigError, match="set the option `weights`"):
        attach(store_folder, HostPool())
    named = attach(store_folder, HostPool(), extra={"weights": "step 2"})
    assert named.batch_exists(keys) == 0
    assert all(named.batch_set_v1(keys, slots, prefix([])))
    named.close()


def test_bad_options_fail_the_attach(store_folder: Path) -> None:
    with pytest.raises(ConfigError, match="capactiy"):
        attach(store_folder, extra={"capactiy": 1})
    assert _entries(store_folder) == []


def test_attach_and_detach_leave_nothing_behind(store_folder: Path) -> None:
    pool, keys = HostPool(), chain(2)
    attach(store_folder, pool).close()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for i in range(25):
        storage = attach(store_folder, pool)
        assert storage.batch_set_v1(keys, pool.slots([0, 1]), prefix([])) == [True, True], i
        storage.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_no_page_bytes_in_python_and_no_object_per_fragment(store_folder: Path) -> None:
    """128 pages of 192 fragments: the arrays that describe them are all that Python allocates."""
    pool = HostPool("layer_first", layers=96, head_dim=128)
    pool.page_num = PAGE_COUNT
    storage = attach(store_folder, pool, extra={"capacity": "256MiB"})
    pool.get_page_buffer_meta = None  # type: ignore[assignment, method-assign]
    keys, pages = chain(PAGE_COUNT), list(range(PAGE_COUNT))
    slots = pool.slots(pages)
    storage.batch_set_v1(keys, slots, prefix([]))
    fragments = PAGE_COUNT * 192
    moved_bytes = PAGE_COUNT * storage._pools["kv"].pages.page_bytes
    tracemalloc.start()
    try:
        assert all(storage.batch_get_v1(keys, slots, prefix([])))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Address and length of a fragment are 16 bytes; a Python int alone is 32.
    assert peak_bytes < 100_000 + 2 * 16 * fragments
    assert peak_bytes * 10 < moved_bytes
    storage.close()


def test_statistics_go_to_the_engine_once(store_folder: Path) -> None:
    pool, keys = HostPool(), chain(3)
    storage = attach(store_folder, pool, enable_storage_metrics=True)
    storage.batch_set_v1(keys, pool.slots([0, 1, 2]), prefix([]))
    storage.batch_get_v1(keys, pool.slots([0, 1, 2]), prefix([]))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats().prefetch_pgs == []
    storage.close()


def test_addresses_agree_with_the_pool(pool: HostPool) -> None:
    """The affine model gives what SGLang's own lists say, for any pages in any order."""
    for layout in KNOWN_LAYOUTS:
        pool.layout = layout
        pages = describe_pool(pool)
        chosen = np.random.default_rng(7).permutation(PAGE_COUNT).tolist()
        slots = pool.slots(chosen)
        pointers, sizes = pool.get_page_buffer_meta(slots)
        fragments = pages.fragments(slots)
        assert fragments.address.reshape(-1).tolist() == pointers
        assert np.tile(fragments.length_bytes, PAGE_COUNT).tolist() == sizes
