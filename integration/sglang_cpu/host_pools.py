"""SGLang's real host pools on a CPU, each a small one: by kind and host layout.

`make(kind, layout)` builds one as SGLang's pool assembler does, from a device pool or from tensors
of its shape. What each page holds is read by SGLang's own flat-page calls where the pool has them,
and else from its buffers, so that nothing here depends on how the code under test finds pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PAGE_TOKENS = 16
DEVICE_PAGES = 12
LAYERS = 3

_LAYERED = ("layer_first", "page_first", "page_first_direct")
_PAGED = ("page_first", "page_first_direct")

LAYOUTS: dict[str, tuple[str, ...]] = {
    "mha": (*_LAYERED, "page_head"),
    "asymmetric": _PAGED,
    "mla": _LAYERED,
    "mla_dcp": _LAYERED,
    "mamba": _PAGED,
    "mamba_conv_only": _PAGED,
    "mamba_side_state": _PAGED,
    "dsa_indexer": _LAYERED,
    "qsa_indexer": _LAYERED,
    "index_k": _LAYERED,
    "nvfp4_index_k": _LAYERED,
    "nvfp4_main": _LAYERED,
    "v4_paged": _LAYERED,
    "v4_state": _LAYERED,
}
"""Every kind that constructs on a CPU, with the host layouts that SGLang builds it in."""

CASES = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


def make(kind: str, layout: str, **changes: Any) -> Any:
    """Return a host pool of DEVICE_PAGES pages or more, its memory zeroed.

    Parameters
        changes: of the shape of the kind's device pool (`head_num`, `dcp_rank`, …).
    """
    _load_sglang_plugins()
    pool = _MAKERS[kind](layout, **changes)
    for buffer in buffers_of(pool):
        buffer.zero_()
    return pool


def buffers_of(pool: Any) -> list[Any]:
    """Every tensor that holds a part of the pool's pages."""
    import torch

    found: list[Any] = []
    for name in (
        "kv_buffer",
        "k_buffer",
        "v_buffer",
        "index_k_with_scale_buffer",
        "temporal_buffer",
        "conv_buffer",
        "slot_state_buffers",
    ):
        held = getattr(pool, name, None)
        found += [held] if isinstance(held, torch.Tensor) else list(held or ())
    return [b for b in found if b.numel()]


def slot_count(pool: Any) -> int:
    """Slots of one page, as the controller counts them."""
    return int(getattr(pool, "logical_page_size", pool.page_size))


def page_count(pool: Any) -> int:
    """Whole pages of the pool."""
    return int(pool.size) // int(pool.page_size)


def slots(pool: Any, pages: list[int]) -> Any:
    """The host indices of whole pages, in the order given."""
    import torch

    step = slot_count(pool)
    if not pages:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(p * step, (p + 1) * step) for p in pages])


def fill(pool: Any, seed: int) -> None:
    """Random bytes everywhere."""
    import torch

    random = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        raw = buffer.view(torch.uint8).reshape(-1)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=random, dtype=torch.uint8))


def page_bytes(pool: Any, page: int) -> bytes:
    """All bytes of one page, by SGLang's own flat page."""
    import torch

    if type(pool).__name__ == "AsymmetricMHATokenToKVPoolHost":  # has no flat pages
        row = page if pool.layout == "page_first_direct" else slice(*_token_rows(pool, page))
        parts = [pool.k_buffer[row], pool.v_buffer[row]]
        return b"".join(_raw(part) for part in parts)
    flat = pool.get_data_page(page * slot_count(pool), flat=True)
    return _raw(flat.contiguous().view(torch.uint8))


def _token_rows(pool: Any, page: int) -> tuple[int, int]:
    return page * pool.page_size, (page + 1) * pool.page_size


def _raw(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().tobytes())


# ---- one maker a kind ------------------------------------------------------------------------


def _common(**changes: Any) -> dict[str, Any]:
    import torch

    return {
        "size": DEVICE_PAGES * PAGE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        **changes,
    }


def _mha(layout: str, **changes: Any) -> Any:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    device = MHATokenToKVPool(**_common(**{"head_num": 4, "head_dim": 32, **changes}))
    host_class, info, inputs = _mha_host_inputs(device)
    return host_class(info, 1.0, 0, PAGE_TOKENS, layout, pin_memory=False, **inputs)


def _asymmetric(layout: str, **changes: Any) -> Any:
    return _mha(layout, **{"v_head_dim": 16, **changes})


def _mla_device(**changes: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(**_common(**{"kv_lora_rank": 64, "qk_rope_head_dim": 16, **changes}))


def _mla_host(device: Any, layout: str, dcp_size: int = 1, dcp_rank: int = 0) -> Any:
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_TOKENS * dcp_size,
        layout,
        pin_memory=False,
        override_kv_cache_dim=device.kv_cache_dim,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        dcp_size=dcp_size,
        dcp_rank=dcp_rank,
    )


def _mla(layout: str, **changes: Any) -> Any:
    return _mla_host(_mla_device(**changes), layout)


def _mla_dcp(layout: str, dcp_size: int = 2, dcp_rank: int = 0) -> Any:
    return _mla_host(_mla_device(), layout, dcp_size, dcp_rank)


def _mamba(layout: str, state: tuple[int, ...] = (2, 8, 16), extra: int = 0) -> Any:
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros((LAYERS, DEVICE_PAGES, *state), dtype=torch.float32),
        conv=(
            torch.zeros((LAYERS, DEVICE_PAGES, 24, 3), dtype=torch.bfloat16),
            torch.zeros((LAYERS, DEVICE_PAGES, 8, 3), dtype=torch.bfloat16),
        ),
        extra_checkpoint_buffers=tuple(
            torch.zeros((DEVICE_PAGES, 5 + i), dtype=torch.uint8) for i in range(extra)
        ),
    )
    return MambaPoolHost(
        info, 1.0, 0, device_capacity=DEVICE_PAGES, layout=layout, pin_memory=False
    )


def _mamba_conv_only(layout: str) -> Any:
    return _mamba(layout, state=(0,))


def _mamba_side_state(layout: str) -> Any:
    return _mamba(layout, extra=2)


def _dsa_indexer(layout: str) -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl

    device = DSATokenToKVPool(
        **_common(
            page_size=64,
            size=64 * DEVICE_PAGES,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            index_head_dim=128,
            kv_cache_dim=576,
            index_buf_size=64 * DEVICE_PAGES,  # else it asks how the ranks are laid out
        )
    )
    anchor = SimpleNamespace(
        page_size=64,
        layout=layout,
        size=64 * (DEVICE_PAGES + 1),
        page_num=DEVICE_PAGES + 1,
    )
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor, pin_memory=False)


def _qsa_indexer(layout: str) -> Any:
    import torch
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

    device = SimpleNamespace(
        qsa_compress_ratio=4,
        qsa_compressed_k_buffer_pool=[
            torch.zeros((DEVICE_PAGES * PAGE_TOKENS // 4, 1, 32), dtype=torch.bfloat16)
            for _ in range(LAYERS)
        ],
    )
    return QSAIndexerPoolHost(device, _anchor(layout))


def _index_k(layout: str) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

    device = MHATokenToKOnlyPool(**_common(head_num=1, head_dim=32))
    return MHATokenToKOnlyPoolHost(device, _anchor(layout), layout, pin_memory=False)


def _page_rows() -> Any:
    import torch
    from sglang.srt.mem_cache.device_pool_info import PageRowBufferInfo

    slab = torch.zeros((LAYERS, DEVICE_PAGES, 1152), dtype=torch.uint8)
    return PageRowBufferInfo(
        slab=slab,
        rows=tuple(slab.unbind(0)),
        row_bytes=1152,
        page_size=PAGE_TOKENS,
        num_pages=DEVICE_PAGES,
    )


def _nvfp4_index_k(layout: str) -> Any:
    from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4IndexKPoolHost

    return MiniMaxM3Nvfp4IndexKPoolHost(
        _page_rows(), _anchor(layout), layout, pin_memory=False, start_layer=0, end_layer=LAYERS
    )


def _nvfp4_main(layout: str) -> Any:
    from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost

    return MiniMaxM3Nvfp4MainKVPoolHost(
        _page_rows(),
        1.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=DEVICE_PAGES * PAGE_TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )


def _v4_paged(layout: str) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    return DeepSeekV4PagedHostPool(
        pool_name="deepseek_v4_c4",
        device_buffers=list(torch.zeros((LAYERS, DEVICE_PAGES, 1168), dtype=torch.uint8)),
        item_bytes=1168,
        num_host_pages=DEVICE_PAGES,
        slot_page_size=PAGE_TOKENS,
        layout=layout,
        pin_memory=False,
    )


def _v4_state(layout: str) -> Any:
    import torch
    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool

    device = [
        CompressStatePool(
            size=DEVICE_PAGES * 8,
            ring_size=8,
            overlap=True,
            head_dim=32,
            dtype=torch.float32,
            device="cpu",
            enable_memory_saver=False,
            ratio=4,
            swa_page_size=PAGE_TOKENS,
        )
        for _ in range(LAYERS)
    ]
    return DeepSeekV4StateHostPool(
        pool_name="deepseek_v4_c4_state",
        state_pools=device,
        num_host_pages=DEVICE_PAGES,
        swa_page_size=PAGE_TOKENS,
        layout=layout,
        pin_memory=False,
    )


def _anchor(layout: str) -> Any:
    """What sidecar pools read of the main pool that they are laid out on."""
    return SimpleNamespace(
        page_size=PAGE_TOKENS,
        layout=layout,
        size=PAGE_TOKENS * (DEVICE_PAGES + 1),
        page_num=DEVICE_PAGES + 1,
        device="cpu",
        pin_memory=False,
    )


_MAKERS: dict[str, Callable[..., Any]] = {
    "mha": _mha,
    "asymmetric": _asymmetric,
    "mla": _mla,
    "mla_dcp": _mla_dcp,
    "mamba": _mamba,
    "mamba_conv_only": _mamba_conv_only,
    "mamba_side_state": _mamba_side_state,
    "dsa_indexer": _dsa_indexer,
    "qsa_indexer": _qsa_indexer,
    "index_k": _index_k,
    "nvfp4_index_k": _nvfp4_index_k,
    "nvfp4_main": _nvfp4_main,
    "v4_paged": _v4_paged,
    "v4_state": _v4_state,
}


def _load_sglang_plugins() -> None:
    """The CPU stand-ins are one: host memory that is not pinned."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
