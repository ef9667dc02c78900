"""The device pools of each family of models, and what of them a prefix must have back.

A family is what SGLang's KV cache consists of for one kind of model: the main pool, pools whose
pages lie beside each of its pages, and pools of which only the end of a prefix is needed. `matrix`
puts a host tier and a storage backend behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

DEVICE_PAGES = 32
LAYER_COUNT = 4
DCP_SIZE = 2

Pages = list[list[Any]]
"""[page][buffer] -> the page's bytes in that buffer, a uint8 tensor."""


class Rows(NamedTuple):
    """Device memory with a row for each `tokens` slots of its pool."""

    memory: Any
    tokens: int = 1

    def of(self, slots: Any) -> Any:
        """The rows of whole pages."""
        return slots[:: self.tokens] // self.tokens


@dataclass
class Family:
    """Device pools with their allocators, as the scheduler makes them.

    whole       buffers that hold something of every page.
    window      the same of the pool of which a prefix needs the last `window_pages` pages.
    states      buffers of recurrent state, indexed [layer, slot]; a prefix needs one slot, its end.
    after       called once the cache has its storage backend.
    """

    page_tokens: int
    allocator: Any
    requests: Any
    components: tuple[Any, ...]
    whole: list[Rows]
    init: dict[str, Any] = field(default_factory=dict)
    window: list[Rows] = field(default_factory=list)
    window_pages: int = 0
    states: list[Any] = field(default_factory=list)
    after: Callable[[Any], None] = lambda cache: None

    def take(self, count: int) -> Any:
        """Slots for `count` tokens, with slots in the window's pool behind them."""
        if not self.window:
            return self.allocator.alloc(count)
        slots = self.allocator.full_attn_allocator.alloc(count)
        window = self.allocator.swa_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(slots, window)
        return slots

    def write(self, slots: Any, seed: int) -> Any:
        """Random bytes at all places of these slots; the state's slot, if there is one."""
        import torch

        random = torch.Generator().manual_seed(seed)

        def fill(buffer: Any, rows: Any) -> None:
            part = buffer[rows]
            noise = torch.randn(part.shape, generator=random)
            packed = part.dtype == torch.uint8
            buffer[rows] = (noise * 40 + 128).to(torch.uint8) if packed else noise.to(part.dtype)

        for held, where in ((self.whole, slots), (self.window, self._window_slots(slots))):
            for buffer in held:
                fill(buffer.memory, buffer.of(where))
        if not self.states:
            return None
        state = self.requests.mamba_allocator.alloc(1)
        for buffer in self.states:
            buffer[:, state] = torch.randn(buffer[:, state].shape, generator=random).to(
                buffer.dtype
            )
        return state

    def pages(self, slots: Any) -> Pages:
        """What the pools hold of each whole page."""
        return self._bytes(self.whole, slots)

    def window_bytes(self, slots: Any) -> Pages:
        """What the window's pool holds of each of these pages."""
        return self._bytes(self.window, self._window_slots(slots))

    def state_bytes(self, state: Any) -> list[Any]:
        """What one slot of the states holds."""
        import torch

        return [b[:, state].contiguous().view(torch.uint8).clone() for b in self.states]

    def request(self, handle: Any, found: Any) -> Any:
        """What the cache reads and writes of a request that is admitted."""
        return SimpleNamespace(
            rid=handle.rid,
            cache_request_handle=handle,
            last_node=found.last_device_node,
            swa_host_hit_length=found.swa_host_hit_length,
            mamba_host_hit_length=found.mamba_host_hit_length,
            kv=SimpleNamespace(mamba_pool_idx=None, holds_mamba=False),
        )

    def zero(self) -> None:
        """Forget everything on the device."""
        for buffer in (*self.whole, *self.window):
            buffer.memory.zero_()
        for state in self.states:
            state.zero_()

    def _window_slots(self, slots: Any) -> Any:
        return self.allocator.full_to_swa_index_mapping[slots] if self.window else slots

    def _bytes(self, buffers: list[Rows], slots: Any) -> Pages:
        import torch

        if len(slots) == 0 or not buffers:
            return []
        return [
            [b.memory[b.of(page)].reshape(-1).view(torch.uint8).clone() for b in buffers]
            for page in slots.split(self.page_tokens)
        ]


def build(kind: str) -> Family:
    """One of mha, mla, mla_dcp, swa, mamba, dsa, draft, v4; SGLang's settings must be published."""
    return _BUILDERS[kind]()


def page_tokens(kind: str) -> int:
    """Tokens in a page of this family: what its pools need at least."""
    return {"dsa": 64, "v4": 256, "mla_dcp": 16 * DCP_SIZE}.get(kind, 16)


def parallel(kind: str, rank: int) -> dict[str, Any]:
    """What SGLang's parallel context says in a rank of this family; empty: one rank alone."""
    if kind != "mla_dcp":
        return {}
    width = {f"{group}_size": DCP_SIZE for group in ("tp", "attn_tp", "moe_tp", "attn_dcp")}
    place = {"tp_rank": rank, "attn_tp_rank": rank, "attn_dcp_rank": rank}
    return {**width, **place, "dcp_size": DCP_SIZE, "dcp_enabled": True}


def _sizes(page_tokens: int) -> dict[str, Any]:
    import torch

    return {
        "size": DEVICE_PAGES * page_tokens,
        "page_size": page_tokens,
        "dtype": torch.bfloat16,
        "layer_num": LAYER_COUNT,
        "device": "cpu",
        "enable_memory_saver": False,
    }


def _requests() -> Any:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    return ReqToTokenPool(size=8, max_context_len=8192, device="cpu", enable_memory_saver=False)


def _paged(pool: Any, page_tokens: int) -> Any:
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    size = DEVICE_PAGES * page_tokens
    return PagedTokenToKVPoolAllocator(
        size, page_tokens, torch.bfloat16, "cpu", pool, need_sort=False
    )


def _by_token(*layers: Any) -> list[Rows]:
    return [Rows(memory) for group in layers for memory in group]


def _plain(pool: Any, whole: list[Rows], page_tokens: int = 16, **others: Any) -> Family:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    return Family(
        page_tokens,
        _paged(pool, page_tokens),
        _requests(),
        (ComponentType.FULL,),
        whole,
        **others,
    )


def _mha_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(head_num=2, head_dim=32, **_sizes(16))


def _mha() -> Family:
    pool = _mha_pool()
    return _plain(pool, _by_token(pool.k_buffer, pool.v_buffer))


def _mla() -> Family:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **_sizes(16))
    return _plain(pool, _by_token(pool.kv_buffer))


def _mla_dcp() -> Family:
    """Latent KV dealt out by token to two ranks of decode context parallelism: one rank's part."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **_sizes(16))
    tokens = page_tokens("mla_dcp")
    family = _plain(pool, [Rows(memory, DCP_SIZE) for memory in pool.kv_buffer], tokens)
    size = DEVICE_PAGES * tokens
    family.allocator = PagedTokenToKVPoolAllocator(
        size, tokens, torch.bfloat16, "cpu", pool, need_sort=False
    )
    return family


def _dsa() -> Family:
    """Latent KV, and an indexer whose pages go with those of the KV; pages of 64 tokens."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    pool = DSATokenToKVPool(
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        index_head_dim=128,
        kv_cache_dim=80,
        **_sizes(page_tokens("dsa")),
    )
    tokens = page_tokens("dsa")
    index = [Rows(memory, tokens) for memory in pool.index_k_with_scale_buffer]
    return _plain(pool, [*_by_token(pool.kv_buffer), *index], tokens)


def _draft() -> Family:
    """A draft model's KV beside that of the main model, registered after the storage is there."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = _mha_pool()
    draft = MHATokenToKVPool(head_num=1, head_dim=64, **{**_sizes(16), "layer_num": 1})

    def add(cache: Any) -> None:
        specs, entries = hybrid_pool_assembler.build_hicache_draft_sidecars(
            draft_device_pools=(draft,), tree_cache=cache
        )
        for spec, entry in zip(specs, entries, strict=True):
            cache.register_sidecar_pool(spec, entry)

    whole = _by_token(pool.k_buffer, pool.v_buffer, draft.k_buffer, draft.v_buffer)
    return _plain(pool, whole, after=add)


def _swa() -> Family:
    """Layers with full attention and layers with a window of 40 tokens."""
    import torch
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    size = DEVICE_PAGES * 16
    pool = SWAKVPool(
        size=size,
        size_swa=size,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=32,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        device="cpu",
    )
    full, window = pool.full_kv_pool, pool.swa_kv_pool
    return Family(
        16,
        SWATokenToKVPoolAllocator(size, size, 16, torch.bfloat16, "cpu", pool, need_sort=False),
        _requests(),
        (ComponentType.FULL, ComponentType.SWA),
        _by_token(full.k_buffer, full.v_buffer),
        init={"sliding_window_size": 40},
        window=_by_token(window.k_buffer, window.v_buffer),
        window_pages=3,
    )


def _mamba() -> Family:
    """Layers with full attention and layers with recurrent state."""
    import torch
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    requests = HybridReqToTokenPool(
        size=8,
        mamba_size=16,
        mamba_spec_state_size=0,
        max_context_len=8192,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=True,
        enable_overlap_schedule=False,
    )
    pool = HybridLinearKVPool(
        size=DEVICE_PAGES * 16,
        dtype=torch.bfloat16,
        page_size=16,
        head_num=2,
        head_dim=32,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=requests.mamba_pool,
    )
    full, state = pool.full_kv_pool, requests.mamba_pool.mamba_cache
    return Family(
        16,
        _paged(pool, 16),
        requests,
        (ComponentType.FULL, ComponentType.MAMBA),
        _by_token(full.k_buffer, full.v_buffer),
        init={"enable_mamba_extra_buffer": True},
        states=[state.temporal, *state.conv],
    )


def _v4() -> Family:
    """DeepSeek-V4: no main KV, two compressed forms with an indexer, a window and its states."""
    import torch
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    page = page_tokens("v4")
    size = DEVICE_PAGES * page
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=4,
        swa_size=size,
        c4_size=size // 4,
        c128_size=size // 128,
        c4_state_pool_size=size,
        c128_state_pool_size=size,
        page_size=page,
        swa_page_size=page,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[0, 4, 128],
        start_layer=0,
        end_layer=3,
        full_size=size,
    )
    family = Family(
        page,
        SWATokenToKVPoolAllocator(size, size, page, torch.float8_e4m3fn, "cpu", pool, False),
        _requests(),
        (ComponentType.FULL, ComponentType.SWA),
        [],
        init={"sliding_window_size": 128},
        window=[Rows(memory, page) for memory in pool.swa_kv_pool.kv_buffer],
        window_pages=1,
    )

    def find_buffers(cache: Any) -> None:
        """The rest of the device memory, as the host pools name it."""
        for entry in cache.host_pool_group.entries:
            host = entry.host_pool
            if hasattr(host, "device_page_views"):
                family.window += [Rows(memory, page) for memory in host.device_page_views]
            elif str(entry.name) not in ("kv", "swa"):
                family.whole += [Rows(memory, page) for memory in host.device_buffers]

    family.after = find_buffers
    return family


_BUILDERS: dict[str, Callable[[], Family]] = {
    "mha": _mha,
    "mla": _mla,
    "mla_dcp": _mla_dcp,
    "swa": _swa,
    "mamba": _mamba,
    "dsa": _dsa,
    "draft": _draft,
    "v4": _v4,
}
