"""Every host pool of SGLang in every layout: its pages through the store, byte by byte."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang_cpu.host_pools import CASES, fill, make, page_bytes, slots
from sglang_cpu.matrix import flip_stored_bit
from v2_kit import attach, chain, prefix, register, storage_config, transfer

from tutti_core import ConfigError, UnsupportedError
from tutti_sglang.backend import TuttiStorage
from tutti_sglang.pools import describe_pool

PAGES = 6
ELSEWHERE = [9, 3, 11, 0, 7, 5]

MAIN = {"mha", "asymmetric", "mla", "nvfp4_main"}
NAMES = {
    "mamba": "mamba",
    "mamba_conv_only": "mamba",
    "mamba_side_state": "mamba",
    "dsa_indexer": "indexer",
    "qsa_indexer": "indexer",
    "index_k": "indexer",
    "nvfp4_index_k": "indexer",
    "v4_paged": "deepseek_v4_c4",
    "v4_state": "deepseek_v4_c4_state",
}


def ids(case: Any) -> str:
    return str(case)


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=ids)
def test_addresses_hold_what_the_pool_calls_a_page(kind: str, layout: str) -> None:
    pool = make(kind, layout)
    pages = describe_pool(pool, kind)
    fill(pool, 1)
    chosen = np.random.default_rng(3).permutation(min(pages.page_count, 12)).tolist()
    memory = pages.fragments(slots(pool, chosen))
    for row, page in zip(memory.address, chosen, strict=True):
        held = b"".join(_at(a, n) for a, n in zip(row, memory.length_bytes, strict=True))
        assert sorted(held) == sorted(page_bytes(pool, page)), "the same bytes"
    starts = np.sort(memory.address.reshape(-1))
    by_start = np.argsort(memory.address.reshape(-1))
    ends = (memory.address + memory.length_bytes).reshape(-1)[by_start]
    assert (ends[:-1] <= starts[1:]).all(), "no piece of a page reaches into another"


def _at(address: Any, length: Any) -> bytes:
    import ctypes

    return ctypes.string_at(int(address), int(length))


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=ids)
def test_pages_come_back_exactly(kind: str, layout: str, store_folder: Path) -> None:
    """As the main pool where SGLang has one of the kind, and as a pool beside it."""
    pool = make(kind, layout)
    keys = chain(PAGES)
    for name, pools in _placed(kind, pool).items():
        storage = attach(store_folder / name, pools)
        fill(pool, 1)
        before = [page_bytes(pool, p) for p in range(PAGES)]
        assert _save(storage, name, pool, keys, list(range(PAGES))) == [True] * PAGES
        storage.close()
        fill(pool, 2)
        storage = attach(store_folder / name, pools)  # a restarted engine
        untouched = [page_bytes(pool, p) for p in (1, 2, 4)]
        assert _load(storage, name, pool, keys, ELSEWHERE) == [True] * PAGES
        assert [page_bytes(pool, p) for p in ELSEWHERE] == before
        assert [page_bytes(pool, p) for p in (1, 2, 4)] == untouched, "nothing beside the pages"
        storage.close()


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=ids)
def test_a_flipped_bit_is_a_miss_of_that_page(kind: str, layout: str, store_folder: Path) -> None:
    pool = make(kind, layout)
    name, pools = list(_placed(kind, pool).items())[-1]
    keys = chain(PAGES)
    storage = attach(store_folder, pools)
    fill(pool, 1)
    _save(storage, name, pool, keys, list(range(PAGES)))
    row = describe_pool(pool, name).fragments(slots(pool, [2]))
    piece = len(row.length_bytes) - 1  # the last piece, so that it is checked as well
    needle = _at(row.address[0, piece], row.length_bytes[piece])
    storage.close()
    flip_stored_bit(store_folder, needle)
    storage = attach(store_folder, pools)
    expected = [True, True, False, True, True, True]
    assert _load(storage, name, pool, keys, ELSEWHERE) == expected
    policy = "trailing_pages" if name == "mamba" else "all_pages"
    if name != "kv":  # and it is found missing from now on
        kv = pools["kv"]
        assert all(storage.batch_set_v1(keys, slots(kv, list(range(PAGES))), prefix([])))
        found = storage.batch_exists_v2(keys, [transfer(name, pool, keys[:1], [0], policy)])
        reachable = [1, 2] if policy == "all_pages" else [1, 2, 4, 5, 6]
        assert found.restorable_prefix_pages == reachable
    else:
        assert storage.batch_exists(keys) == 2
    storage.close()


def _placed(kind: str, pool: Any) -> dict[str, dict[str, Any]]:
    """Where SGLang has pools of this kind: as the main pool, beside one, or both."""
    if kind == "mla_dcp":  # the main pool only
        return {"kv": {"kv": pool}}
    main = {"kv": {"kv": pool}} if kind in MAIN else {}
    name = NAMES.get(kind, "swa")
    layout = pool.layout if pool.layout != "page_head" else "page_first"
    return {**main, name: {"kv": make("mha", layout), name: pool}}


def _save(storage: Any, name: str, pool: Any, keys: list[str], pages: list[int]) -> list[bool]:
    if name == "kv":
        return storage.batch_set_v1(keys, slots(pool, pages), prefix([]))
    return storage.batch_set_v2([transfer(name, pool, keys, pages)], prefix([]))[name]


def _load(storage: Any, name: str, pool: Any, keys: list[str], pages: list[int]) -> list[bool]:
    if name == "kv":
        return storage.batch_get_v1(keys, slots(pool, pages), prefix([]))
    return storage.batch_get_v2([transfer(name, pool, keys, pages)], prefix([]))[name]


# ---- what is refused ---------------------------------------------------------------------------


class Mxfp8(SimpleNamespace):
    """A KV pool whose scales are outside of its pages, as SGLang's MXFP8 host pool says."""

    def get_page_buffer_meta(self, indices: Any) -> Any:
        raise NotImplementedError("MXFP8 KV host pool does not expose flat storage pages yet")

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        raise NotImplementedError("MXFP8 KV host pool does not expose flat storage pages yet")


def _strange(name: str) -> tuple[Any, str]:
    """A pool that cannot be stored, and a word of the reason."""
    pool = make("mha", "page_first")
    if name == "layout":
        pool.layout = "page_unified"
        return pool, "page_unified"
    if name == "sharded":
        pool.owned_rows = lambda *_: None
        return pool, "sharding"
    if name == "no memory":
        pool.kv_buffer = None
        return pool, "no contiguous buffer"
    if name == "mxfp8":
        shown = {k: getattr(pool, k) for k in ("layout", "page_size", "page_num", "kv_buffer")}
        return Mxfp8(**shown), "MXFP8"
    if name == "copies":  # its flat pages are no views, and it has no others
        pool.get_page_buffer_meta = lambda _: (_ for _ in ()).throw(ValueError("not this layout"))
        whole = pool.get_data_page
        pool.get_data_page = lambda i, flat=True: whole(i, flat).clone()
        return pool, "outside its buffers"
    pool = make("mamba_side_state", "page_first")
    pool.slot_state_buffers[0] = torch.zeros(3, 5)
    pool.kv_buffer[-1] = pool.slot_state_buffers[0]
    return pool, "one row a slot"


STRANGE = ["layout", "sharded", "no memory", "mxfp8", "copies", "state rows"]


@pytest.mark.parametrize("case", STRANGE)
@pytest.mark.parametrize("name", ["kv", "swa"])
def test_a_pool_that_cannot_be_stored_is_refused_by_name(
    name: str, case: str, store_folder: Path
) -> None:
    pool, word = _strange(case)
    pools = {"kv": make("mha", "page_first"), "indexer": make("index_k", "page_first")}
    storage = TuttiStorage(storage_config(store_folder), {})
    with pytest.raises(UnsupportedError, match=f"'{name}'.*{word}"):
        register(storage, {**pools, name: pool})
    assert list(store_folder.iterdir()) == [], "nothing on disk was touched"
    assert storage.store is None and not storage._pools, "nothing is registered in part"
    assert storage.batch_exists(chain(1)) == 0
    again = attach(store_folder, pools)  # the attach can be repeated without the pool
    assert again.batch_exists(chain(1)) == 0 and set(again._pools) == {"kv", "indexer"}
    again.close()


@pytest.mark.parametrize("case", STRANGE)
def test_a_later_pool_that_is_refused_closes_everything(case: str, store_folder: Path) -> None:
    pool, word = _strange(case)
    main = make("mha", "page_first")
    storage = attach(store_folder, {"kv": main})
    assert all(storage.batch_set_v1(chain(2), slots(main, [0, 1]), prefix([])))
    with pytest.raises(UnsupportedError, match=f"'draft'.*{word}"):
        storage.register_mem_host_pool_v2(pool, PoolName.DRAFT)
    assert storage.batch_exists(chain(2)) == 0 and storage.store._closed
    again = attach(store_folder, {"kv": main})
    assert again.batch_exists(chain(2)) == 2
    again.close()


def test_pages_larger_than_the_store_takes_are_refused_by_name(store_folder: Path) -> None:
    pools = {
        "kv": make("mha", "page_first"),
        "deepseek_v4_c4_state": make("v4_state", "page_first"),
    }
    small = {"capacity": "16MiB", "segment": "8KiB"}  # a page of the main pool has 24 KiB
    with pytest.raises(ConfigError, match=r"pool 'kv'.*larger than a segment"):
        attach(store_folder, pools, extra=small)
    few = {**pools, "kv": make("mha", "page_first", head_num=1)}
    storage = TuttiStorage(storage_config(store_folder / "b", extra=small), {})
    with pytest.raises(ConfigError, match=r"pool 'deepseek_v4_c4_state'.*larger than a segment"):
        register(storage, few)
    assert storage.store._closed and storage.batch_exists(chain(1)) == 0


# ---- pools that come later, and pools without bytes ------------------------------------------


def test_a_pool_registered_later_works(store_folder: Path) -> None:
    kv, draft, keys = make("mha", "page_first"), make("mla", "page_first"), chain(4)
    storage = attach(store_folder, {"kv": kv})
    assert all(storage.batch_set_v1(keys, slots(kv, [0, 1, 2, 3]), prefix([])))
    asked = [transfer("draft", draft, keys, [0, 1, 2, 3])]
    assert storage.batch_set_v2(asked, prefix([])) == {"draft": [False] * 4}, "not known yet"
    storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    fill(draft, 1)
    before = [page_bytes(draft, p) for p in range(4)]
    assert storage.batch_set_v2(asked, prefix([])) == {"draft": [True] * 4}
    fill(draft, 2)
    assert storage.batch_get_v2(asked, prefix([])) == {"draft": [True] * 4}
    assert [page_bytes(draft, p) for p in range(4)] == before
    with pytest.raises(UnsupportedError, match="'draft' is registered already"):
        storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)


def test_a_main_pool_without_bytes_is_there_when_the_others_are(store_folder: Path) -> None:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    kv = LogicalHostPool(12 * 16, 16, "page_first")
    c4, c128 = make("v4_paged", "page_first"), make("v4_paged", "page_first")
    swa = make("v4_paged", "page_first")
    pools = {"kv": kv, "deepseek_v4_c4": c4, "deepseek_v4_c128": c128, "swa": swa}
    storage, keys = attach(store_folder, pools, is_mla_model=True), chain(5)

    def asked() -> list[PoolTransfer]:
        return [
            transfer("deepseek_v4_c4", c4, keys, [0, 1, 2, 3, 4]),
            transfer("deepseek_v4_c128", c128, keys, [0, 1, 2, 3, 4]),
            transfer("swa", swa, keys[3:], [3, 4], "trailing_pages"),
        ]

    assert storage.batch_set_v1(keys, slots(c4, [0, 1, 2, 3, 4]), prefix([])) == [True] * 5
    assert storage.batch_get_v1(keys, slots(c4, [0, 1, 2, 3, 4]), prefix([])) == [True] * 5
    found = storage.batch_exists_v2(keys, asked())
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {})
    storage.batch_set_v2(asked()[:1], prefix([]))
    assert storage.batch_exists_v2(keys, asked()).kv_hit_pages == 0, "c128 is not there"
    c128_pages = transfer("deepseek_v4_c128", c128, keys[:4], [0, 1, 2, 3])
    storage.batch_set_v2([c128_pages], prefix([]))
    storage.batch_set_v2([transfer("swa", swa, keys[1:3], [1, 2])], prefix(keys[:1]))
    found = storage.batch_exists_v2(keys, asked())
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    assert found.extra_pool_hit_pages == {
        "kv": 4, "deepseek_v4_c4": 4, "deepseek_v4_c128": 4, "swa": 3,
    }  # fmt: skip
    assert storage.batch_exists(keys) == 0, "of the main pool alone nothing is known"
    assert storage.batch_exists_v2(keys, asked()[2:]).kv_hit_pages == 0
    assert storage.batch_set(keys, [torch.empty(0, dtype=torch.uint8)] * 5)
    storage.close()


def test_pools_of_one_model_are_kept_apart(store_folder: Path) -> None:
    """The same keys and the same page size: a page of one pool is never taken for another's."""
    kv, swa, draft = (make("mha", "page_first") for _ in range(3))
    storage = attach(store_folder, {"kv": kv, "swa": swa, "draft": draft})
    keys = chain(3)
    contents = {}
    for seed, (name, pool) in enumerate({"kv": kv, "swa": swa, "draft": draft}.items()):
        fill(pool, seed)
        contents[name] = [page_bytes(pool, p) for p in range(3)]
        assert _save(storage, name, pool, keys, [0, 1, 2]) == [True] * 3
    for name, pool in {"kv": kv, "swa": swa, "draft": draft}.items():
        fill(pool, 9)
        assert _load(storage, name, pool, keys, [5, 6, 7]) == [True] * 3
        assert [page_bytes(pool, p) for p in (5, 6, 7)] == contents[name]
    storage.clear()
    found = storage.batch_exists_v2(keys, [transfer("swa", swa, keys, [0, 1, 2])])
    assert found.kv_hit_pages == 0
    assert _load(storage, "swa", swa, keys, [5, 6, 7]) == [False] * 3
    storage.close()


def test_one_pool_that_fails_leaves_the_others_alone(store_folder: Path) -> None:
    kv, swa = make("mha", "page_first"), make("mha", "page_first")
    mamba = make("mamba", "page_first")
    storage = attach(store_folder, {"kv": kv, "swa": swa, "mamba": mamba})
    keys = chain(3)
    wrong = PoolTransfer(name=PoolName.MAMBA, keys=keys[:2], host_indices=torch.arange(3))
    unknown = PoolTransfer(name=PoolName.INDEXER, keys=keys[:2], host_indices=torch.arange(2))
    bare = PoolTransfer(name=PoolName.DRAFT, hit_policy=PoolHitPolicy.ALL_PAGES)
    right = transfer("swa", swa, keys, [0, 1, 2])
    expected = {"swa": [True] * 3, "mamba": [False] * 2, "indexer": [False] * 2, "draft": []}
    assert storage.batch_set_v2([wrong, right, unknown, bare], prefix([])) == expected
    assert storage.batch_get_v2([unknown, right, bare, wrong], prefix([])) == expected
    storage.close()
    closed = {"swa": [False] * 3, "mamba": [False] * 2}
    assert storage.batch_get_v2([right, wrong], prefix([])) == closed
    assert storage.batch_set_v2([right, wrong], prefix([])) == closed
    assert storage.batch_exists_v2(keys, [right]).kv_hit_pages == 0


def test_a_pool_named_twice_is_answered(store_folder: Path) -> None:
    kv, swa = make("mha", "page_first"), make("mha", "page_first")
    storage = attach(store_folder, {"kv": kv, "swa": swa})
    keys = chain(5)
    twice = [transfer("swa", swa, keys[:2], [0, 1]), transfer("swa", swa, keys[2:], [2, 3, 4])]
    assert storage.batch_set_v2(twice, prefix(None)) == {"swa": [True] * 3}, "as the last one"
    assert storage.batch_get_v2(twice, prefix(None)) == {"swa": [True] * 3}
    storage.close()
