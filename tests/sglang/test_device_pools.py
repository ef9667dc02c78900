"""Device pools as pages: the same bytes as SGLang's own reckoning, in the order of the layers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from linker_kit import KINDS, TOKENS, Pools, make_pools, published
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry

from tutti_core import UnsupportedError
from tutti_sglang.device_pools import DevicePoolPages, build_group, describe_entry, regions


@pytest.fixture(scope="module", autouse=True)
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


def described(pools: Pools) -> list[tuple[Any, DevicePoolPages]]:
    group = build_group(pools.params, TOKENS, pools.components)
    return [(entry, describe_entry(entry)) for entry in group.entries]


@pytest.mark.parametrize("kind", KINDS)
def test_the_fragments_are_those_that_sglang_reckons(kind: str) -> None:
    pools = make_pools(kind)
    for entry, pages in described(pools):
        slots = pools.slots(pages.name, [2, 5, 1])
        memory = pages.fragments(pages.rows(slots))
        pointers, sizes = entry.get_page_buffer_meta(slots)
        fragments = len(pages.length_bytes)
        for page in range(3):
            part = slice(page * fragments, (page + 1) * fragments)
            mine = zip(memory.address[page].tolist(), memory.length_bytes.tolist(), strict=True)
            assert sorted(mine) == sorted(zip(pointers[part], sizes[part], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_its_layers_in_order(kind: str) -> None:
    """The bytes at the addresses are those of torch's indexing, layer by layer."""
    pools = make_pools(kind)
    pools.fill()
    for _, pages in described(pools):
        memory = pages.fragments(pages.rows(pools.slots(pages.name, [3])))
        found = b"".join(
            ctypes.string_at(int(address), int(length))
            for address, length in zip(memory.address[0], memory.length_bytes, strict=True)
        )
        assert found == pools.read(pages.name, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_whole_layers_and_the_first_stands_alone(kind: str) -> None:
    for entry, pages in described(make_pools(kind)):
        assert sum(pages.part_bytes) == pages.page_bytes
        assert [layer for part in pages.layers for layer in part] == sorted(entry.layer_mapping)
        assert len(pages.layers[0]) == 1
        assert [len(part) for part in pages.part_buffers] == np.diff(pages.first_fragment).tolist()


def test_each_kind_has_the_layers_that_use_it() -> None:
    layers = {
        kind: {pages.name: pages.layers for _, pages in described(make_pools(kind))}
        for kind in ("swa", "mamba", "swa_mamba")
    }
    assert layers["swa"] == {"kv": ((1,), (3, 5)), "swa": ((0,), (2, 4))}
    assert layers["mamba"] == {"kv": ((2,), (5,)), "mamba": ((0,), (1, 3, 4))}
    assert layers["swa_mamba"] == {"kv": ((1,), (4,)), "swa": ((0,), (2, 3)), "mamba": ((5,),)}


def test_rows_that_are_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout with pages in the first axis; each page is one row of each buffer."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pools = make_pools("mha")
    pool = pools.kvcache
    assert pool.kv_cache_layout == "hnd"
    [(_, pages)] = described(pools)
    for seed, buffer in enumerate([*pool.k_buffer, *pool.v_buffer]):
        raw = torch.randint(0, 255, buffer.shape, generator=torch.Generator().manual_seed(seed))
        buffer.copy_(raw.to(buffer.dtype))
    memory = pages.fragments(pages.rows(pools.slots("kv", [7])))
    pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
    want = b"".join(
        b[7].contiguous().view(torch.uint8).numpy().tobytes() for pair in pairs for b in pair
    )
    found = b"".join(
        ctypes.string_at(int(a), int(n))
        for a, n in zip(memory.address[0], memory.length_bytes, strict=True)
    )
    assert found == want


def test_a_buffer_that_two_layers_share_comes_with_the_first() -> None:
    buffers = [torch.zeros(8, 4) for _ in range(3)]
    pages = describe_entry(_entry(buffers, {0: 2, 1: (0, 2), 4: 1}))
    assert pages.layers == ((0, 1), (1, 4))
    assert [b.data_ptr() for b in pages.buffers] == [buffers[i].data_ptr() for i in (2, 0, 1)]


# ---- slots -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slots",
    [
        range(15),
        range(1, 17),
        [*range(8), *range(9, 17)],
        range(512 + 16, 512 + 32),
        range(-16, 0),
        [*range(15, -1, -1)],
    ],
)
def test_slots_that_are_not_pages_are_refused(slots: Any) -> None:
    [(_, pages)] = described(make_pools("mha"))
    with pytest.raises(ValueError, match="pool kv"):
        pages.rows(torch.tensor(list(slots)))


def test_the_last_page_and_none() -> None:
    [(_, pages)] = described(make_pools("mha"))
    assert pages.rows(torch.arange(512, 528)).tolist() == [512]
    assert pages.rows(torch.tensor([], dtype=torch.int64)).tolist() == []
    assert pages.fragments(pages.rows(torch.tensor([], dtype=torch.int64))).page_count == 0


def test_states_are_single_slots() -> None:
    pages = {pages.name: pages for _, pages in described(make_pools("mamba"))}["mamba"]
    assert pages.rows(torch.tensor([3, 1, 16])).tolist() == [3, 1, 16]
    with pytest.raises(ValueError, match="mamba"):
        pages.rows(torch.tensor([17]))


def test_addresses_cost_no_object_per_fragment() -> None:
    """1,024 pages of 8 fragments: an array, in well under the time of that many objects."""
    import time

    pools = make_pools("mha", size=16 * 1024)
    [(_, pages)] = described(pools)
    slots = torch.arange(16, 16 * 1024 + 16)
    pages.fragments(pages.rows(slots))
    started_s = time.thread_time()
    memory = pages.fragments(pages.rows(slots))
    assert time.thread_time() - started_s < 0.01
    assert memory.address.shape == (1024, 8)


# ---- refusals --------------------------------------------------------------------------------


def _entry(buffers: list[torch.Tensor], layers: Any = None, page_size: int = 1) -> Any:
    return DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=SimpleNamespace(),
        components=[buffers],
        layer_mapping=layers if layers is not None else {i: i for i in range(len(buffers))},
        page_size=page_size,
        rows_are_pages=page_size == 1,
    )


@pytest.mark.parametrize(
    ("buffers", "page_size", "word"),
    [
        ([torch.zeros(8, 4), torch.zeros(9, 4)], 1, "rows"),
        ([torch.zeros(8, 4, 2).transpose(1, 2)], 1, "contiguous"),
        ([torch.zeros(8, 8)[:, :4]], 2, "contiguous"),
        ([torch.zeros(2, 4)], 4, "less than a page"),
        ([torch.zeros(8, 0)], 1, "0 bytes"),
        ([torch.zeros(32).as_strided((8, 4), (2, 1))], 1, "overlap"),
    ],
)
def test_pools_that_cannot_be_stored(
    buffers: list[torch.Tensor], page_size: int, word: str
) -> None:
    with pytest.raises(UnsupportedError, match=word) as refused:
        describe_entry(_entry(buffers, page_size=page_size))
    assert "'kv'" in str(refused.value)


def test_strided_rows_of_single_slots_are_fine() -> None:
    """States that lie interleaved: a row is contiguous, the next one is further off."""
    whole = torch.zeros(8, 10)
    pages = describe_entry(_entry([whole[:, :4], whole[:, 4:]]))
    assert pages.length_bytes.tolist() == [16, 24]
    assert pages.stride_bytes.tolist() == [40, 40]
    assert pages.page_bytes == 40


def test_a_pool_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no layers"):
        describe_entry(_entry([torch.zeros(4, 4)], {}))


def refused(pools: Pools, word: str) -> None:
    with pytest.raises(UnsupportedError, match=word) as error:
        build_group(pools.params, TOKENS, pools.components)
    assert type(pools.kvcache).__name__ in str(error.value)


def test_scaled_caches_are_refused() -> None:
    pools = make_pools("mha")
    pools.kvcache.k_scale_buffer = [torch.zeros(4)]
    refused(pools, "scales")
    pools = make_pools("mla")
    pools.kvcache.kv_scale_buffer = [torch.zeros(4)]
    refused(pools, "scales")


def test_pools_of_other_classes_are_refused_by_name() -> None:
    """A subclass may keep more than what is known of its base."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class OtherPool(MHATokenToKVPool):  # type: ignore[misc]
        pass

    pools = make_pools("mha")
    pools.kvcache.__class__ = OtherPool
    refused(pools, "OtherPool")


def test_a_window_pool_of_another_class_is_refused() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class OtherPool(MHATokenToKVPool):  # type: ignore[misc]
        pass

    pools = make_pools("swa")
    pools.kvcache.swa_kv_pool.__class__ = OtherPool
    with pytest.raises(UnsupportedError, match="'swa'"):
        build_group(pools.params, TOKENS, pools.components)


@pytest.mark.parametrize("where", ["mtp_draft_device_pools", "sidecar_draft_device_pools"])
@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
def test_draft_pools_are_refused(where: str, kind: str) -> None:
    pools = make_pools(kind)
    setattr(pools.params, where, (object(),))
    refused(pools, "draft")


def test_unknown_layouts_are_refused() -> None:
    pools = make_pools("mha")
    pools.kvcache.kv_cache_layout = "sideways"
    refused(pools, "sideways")


def test_pages_of_another_size_are_refused() -> None:
    pools = make_pools("mha", page_size=8)
    refused(pools, "pages of 8 tokens")


@pytest.mark.parametrize("what", ["mamba_ckpt_pool", "short_conv_pool", "ngram_pool"])
def test_state_beside_the_state_is_refused(what: str) -> None:
    pools = make_pools("mamba_mha")
    setattr(pools.params.req_to_token_pool, what, SimpleNamespace(enabled=True))
    with pytest.raises(UnsupportedError, match="'mamba'"):
        build_group(pools.params, TOKENS, pools.components)


def test_what_sglang_refuses_is_refused_with_its_reason() -> None:
    pools = make_pools("mamba")
    pools.params.mtp_draft_device_pools = (object(),)
    refused(pools, "draft KV")


def test_each_allocation_is_registered_once() -> None:
    pools = make_pools("mha")
    found = regions([pages for _, pages in described(pools)])
    assert len(found) == len(pools.kvcache.k_buffer), "K and V of a layer are one allocation"
    assert all(length == 2 * 528 * 2 * 32 * 2 for _, length in found)
