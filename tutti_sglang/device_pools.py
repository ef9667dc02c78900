"""SGLang's device pools as pages for layer-wise reads, without a Python object per fragment.

A stored page is all layers of one page of one physical pool, in the order in which the engine uses
them: for each layer the rows of its buffers (K, then V). It is cut into parts, runs of whole layers
that are read together: the first layer alone, so that the forward pass can begin, then as many
layers as make a part worth a read. Addresses are `base + row x stride` for each fragment of a page,
so those of any number of pages are one array expression.

SGLang builds groups of such pools for hybrid models only, so the ordinary ones are built here.

Source     SGLang 0.5.23, mem_cache/hybrid_cache/linker_pool_assembler.py, memory_pool.py,
           swa_memory_pool.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tutti_core import PageFragments, UnsupportedError, group_layers

PAGE_ROW_LAYOUTS = ("hnd", "vectorized_5d")
"""MHA layouts in which a row of the buffer is a whole page; in "nhd" it is a token."""

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DevicePoolPages:
    """Where the pages of one physical pool lie, and how they are cut. f fragments a page, p parts.

    name           SGLang's name of the pool.
    page_tokens    slots of a page: what `device_indices` holds for each.
    row_span       rows of the buffers in a page: `page_tokens`, or 1 where a row is a page.
    row_count      rows of each buffer.
    base_address   (f,) address of row 0.
    stride_bytes   (f,) from one row to the next.
    length_bytes   (f,) bytes of a page's fragment.
    first_fragment (p + 1,) which fragments each part has.
    layers         for each part, the layers of the engine that it brings.
    buffers        the fragments' tensors, in the same order.
    description    what the bytes of a page are, for the namespace.
    """

    name: str
    page_tokens: int
    row_span: int
    row_count: int
    base_address: U64
    stride_bytes: U64
    length_bytes: U64
    first_fragment: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    buffers: tuple[torch.Tensor, ...]
    description: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.length_bytes.sum())

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a page, in load order."""
        starts = self.first_fragment
        return tuple(int(self.length_bytes[low:high].sum()) for low, high in pairwise(starts))

    @property
    def part_buffers(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The tensors of each part, in the order of the page's bytes."""
        starts = self.first_fragment
        return tuple(self.buffers[low:high] for low, high in pairwise(starts))

    def rows(self, slots: torch.Tensor) -> I64:
        """First row of each page that `slots` names, wherever that tensor is.

        Parameters
            slots: `page_tokens` consecutive ones a page. Shape (pages * page_tokens,).
        Raises
            ValueError: not whole, aligned pages of this pool.
        """
        index = slots.detach().to(device="cpu", dtype=torch.int64).reshape(-1).numpy()
        if len(index) % self.page_tokens:
            raise ValueError(
                f"pool {self.name}: {len(index)} slots are not whole pages of {self.page_tokens}"
            )
        pages = index.reshape(-1, self.page_tokens)
        start = pages[:, 0]
        aligned = start % self.page_tokens == 0
        if not aligned.all() or (pages != start[:, None] + np.arange(self.page_tokens)).any():
            raise ValueError(f"pool {self.name}: its slots are not aligned pages")
        row = start // self.page_tokens * self.row_span
        if len(row) and not 0 <= row.min() <= row.max() <= self.row_count - self.row_span:
            raise ValueError(
                f"pool {self.name}: rows {row.min()} .. {row.max()} of {self.row_count}"
            )
        return np.asarray(row, dtype=np.int64)

    def numbers(self, rows: I64) -> I64:
        """Which page of the pool begins at each of `rows`."""
        return np.asarray(rows // self.row_span, dtype=np.int64)

    def fragments(self, rows: I64, owner: object = None) -> PageFragments:
        """The memory of the pages that begin at `rows`.

        Parameters
            owner: kept alive with the result.
        """
        address = self.base_address + rows.astype(np.uint64)[:, None] * self.stride_bytes
        return PageFragments(address, self.length_bytes, (self.buffers, owner))


def describe_entry(entry: Any) -> DevicePoolPages:
    """Derive the page geometry of one DevicePoolEntry.

    Raises
        UnsupportedError: names the pool and what about it cannot be stored.
    """
    name = _text(entry.name)
    span = _row_span(entry)
    order, layers_of = _buffer_order(entry, name)
    buffers = [_buffer(entry, component, index) for component, index in order]
    row_count = _check_buffers(buffers, span, name)
    length = np.array(
        [b.nbytes // b.shape[0] * span if b.shape[0] else 0 for b in buffers], dtype=np.uint64
    )
    if not length.all():
        raise UnsupportedError(f"device pool {name!r} has a buffer with rows of 0 bytes")

    first_layer = [layers[0] for layers in layers_of]
    runs = [len(list(run)) for _, run in groupby(first_layer)]  # fragments of each layer
    ends = np.cumsum([0, *runs])
    layer_bytes = [int(length[a:b].sum()) for a, b in pairwise(ends)]
    starts = (*(int(ends[part[0]]) for part in group_layers(layer_bytes)), len(buffers))
    brought = tuple(
        tuple(sorted({layer for layers in layers_of[low:high] for layer in layers}))
        for low, high in pairwise(starts)
    )
    stride = [buffer.stride(0) * buffer.element_size() for buffer in buffers]
    return DevicePoolPages(
        name=name,
        page_tokens=int(entry.page_size),
        row_span=span,
        row_count=row_count,
        base_address=np.array([buffer.data_ptr() for buffer in buffers], dtype=np.uint64),
        stride_bytes=np.array(stride, dtype=np.uint64),
        length_bytes=length,
        first_fragment=starts,
        layers=brought,
        buffers=tuple(buffers),
        description=_describe(entry, buffers, layers_of),
    )


def _row_span(entry: Any) -> int:
    """Rows of a page, as SGLang's entry reckons them."""
    span = int(entry._row_span)
    if span not in (1, int(entry.page_size)):
        raise UnsupportedError(f"device pool {_text(entry.name)!r} has pages of {span} rows")
    return span


def _buffer_order(entry: Any, name: str) -> tuple[list[tuple[int, int]], list[tuple[int, ...]]]:
    """(component, buffer) of each fragment of a page in the order of use, and who uses it.

    A buffer that several layers share comes with the first of them.
    """
    users: dict[tuple[int, int], list[int]] = {}
    for layer in sorted(entry.layer_mapping):
        mapped = entry.layer_mapping[layer]
        indices = [mapped] if isinstance(mapped, int) else list(mapped)
        for component in range(len(entry.components)):
            for index in indices:
                users.setdefault((component, index), []).append(int(layer))
    if not users:
        raise UnsupportedError(f"device pool {name!r} has no layers")
    return list(users), [tuple(layers) for layers in users.values()]


def _buffer(entry: Any, component: int, index: int) -> torch.Tensor:
    buffer: torch.Tensor = entry.components[component][index]
    return buffer


def _check_buffers(buffers: Sequence[torch.Tensor], span: int, name: str) -> int:
    """The rows that all buffers have; raises unless pages of `span` rows are contiguous in each."""
    rows = {int(buffer.shape[0]) for buffer in buffers}
    if len(rows) != 1:
        raise UnsupportedError(f"device pool {name!r} has buffers of {sorted(rows)} rows")
    (row_count,) = rows
    if row_count < span:
        raise UnsupportedError(f"device pool {name!r} has {row_count} rows, less than a page")
    if len({buffer.device for buffer in buffers}) != 1:
        raise UnsupportedError(f"device pool {name!r} is spread over several devices")
    for buffer in buffers:
        row = buffer[0]
        if not row.is_contiguous() or (span > 1 and buffer.stride(0) != row.numel()):
            raise UnsupportedError(
                f"device pool {name!r} has pages that are not contiguous: buffer of shape "
                f"{tuple(buffer.shape)}, strides {buffer.stride()}"
            )
        if buffer.stride(0) < row.numel():
            raise UnsupportedError(f"device pool {name!r} has rows that overlap")
    return row_count


def _describe(
    entry: Any, buffers: Sequence[torch.Tensor], layers_of: Sequence[tuple[int, ...]]
) -> str:
    """What tells the bytes of this pool's pages from those of another one of the same size."""
    kinds = [f"{tuple(b.shape[1:])} {b.dtype}".replace("torch.", "") for b in buffers]
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    shapes = ", ".join(f"{count} x {kind}" for kind, count in runs)
    uses = ",".join("+".join(map(str, layers)) for layers in layers_of)
    layout = getattr(entry.device_pool, "kv_cache_layout", None)
    return f"{shapes}; layers {uses}; buffer layout {layout}"


def _text(name: Any) -> str:
    return str(getattr(name, "value", name))


# ---- groups ----------------------------------------------------------------------------------


def build_group(params: Any, page_size: int, components: set[Any]) -> Any:
    """The physical pools of this process's model, as a DevicePoolGroup.

    Raises
        UnsupportedError: names the pool and what about it cannot be stored.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    if type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool) and components == {ComponentType.FULL}:
        return _plain_group(kvcache, params, page_size)
    if type(kvcache) is SWAKVPool and components == {ComponentType.FULL, ComponentType.SWA}:
        return _swa_group(kvcache, params, page_size)
    if (
        type(kvcache) is HybridLinearKVPool
        and type(kvcache.full_kv_pool) is MHATokenToKVPool
        and components == {ComponentType.FULL, ComponentType.MAMBA}
    ):
        return _state_group(kvcache, params, page_size)
    try:
        return resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page_size, params=params, components=components
        )
    except (ValueError, AssertionError, NotImplementedError, AttributeError) as error:
        kinds = ", ".join(sorted(component.name for component in components))
        raise UnsupportedError(
            f"device pool {type(kvcache).__name__} ({kinds}) is not supported: {error}"
        ) from error


def _plain_group(kvcache: Any, params: Any, page_size: int) -> Any:
    _refuse_drafts(params, kvcache)
    layers = {layer: layer for layer in range(int(kvcache.layer_num))}
    entry = _kv_entry(PoolName.KV, kvcache, layers, page_size)
    replicated = isinstance(kvcache, MLATokenToKVPool)
    return DevicePoolGroup([entry], len(layers), page_size, rank_replicated=replicated)


def _swa_group(kvcache: Any, params: Any, page_size: int) -> Any:
    _refuse_drafts(params, kvcache)
    mappings: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (index, windowed) in kvcache.layers_mapping.items():
        mappings[bool(windowed)][int(layer) - int(kvcache.start_layer)] = int(index)
    if not mappings[False] or not mappings[True]:
        raise UnsupportedError(f"device pool {type(kvcache).__name__} has no layers of one kind")
    entries = [
        _kv_entry(PoolName.KV, kvcache.full_kv_pool, mappings[False], page_size),
        _kv_entry(PoolName.SWA, kvcache.swa_kv_pool, mappings[True], page_size),
    ]
    layer_count = max(max(mapping) for mapping in mappings.values()) + 1
    return DevicePoolGroup(entries, layer_count, page_size, rank_replicated=bool(kvcache.is_mla()))


def _state_group(kvcache: Any, params: Any, page_size: int) -> Any:
    """Attention with heads beside recurrent layers. SGLang builds this for latent pools only."""
    _refuse_drafts(params, kvcache)
    start, requests = int(kvcache.start_layer), params.req_to_token_pool
    attention = {
        int(layer) - start: int(index)
        for layer, index in kvcache.full_attention_layer_id_mapping.items()
    }
    entries = [
        _kv_entry(PoolName.KV, kvcache.full_kv_pool, attention, page_size),
        _state_entry(requests, start),
    ]
    layer_count = max(max(entry.layer_mapping) for entry in entries) + 1
    return DevicePoolGroup(entries, layer_count, page_size)


def _state_entry(requests: Any, start_layer: int) -> Any:
    """The recurrent state of each request: a slot is one page, its rows are those of the layers."""
    from sglang.srt.runtime_context import get_memory

    pool = requests.mamba_pool
    beside = {
        "int8 checkpoints": requests.mamba_ckpt_pool is not None,
        "short convolutions": requests.short_conv_pool.enabled,
        "n-gram context": requests.ngram_pool.enabled,
        "unified memory": get_memory().enable_unified_memory,
    }
    for what in (name for name, there in beside.items() if there):
        raise UnsupportedError(f"device pool 'mamba' ({type(pool).__name__}) with {what}")
    states = [
        state for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if state.numel()
    ]
    return DevicePoolEntry(
        name=PoolName.MAMBA,
        indices_from_pool=PoolName.MAMBA,
        device_pool=pool,
        components=[[state[i] for i in range(int(pool.num_mamba_layers))] for state in states],
        layer_mapping={int(k) - start_layer: int(i) for k, i in requests.mamba_map.items()},
        page_size=1,
        rows_are_pages=True,
    )


def _refuse_drafts(params: Any, kvcache: Any) -> None:
    """A draft model's KV that is not stored would be missing after a load."""
    for name in ("mtp_draft_device_pools", "sidecar_draft_device_pools"):
        if getattr(params, name, ()):
            raise UnsupportedError(
                f"device pool {type(kvcache).__name__}: the KV of a draft model beside it is not "
                "supported",
                hint="use --hicache-storage-backend tutti, or no speculative decoding",
            )


def _kv_entry(name: Any, pool: Any, layers: Mapping[int, int], page_size: int) -> Any:
    """An ordinary KV pool; `layers` gives the place in the pool of each layer of the engine."""
    kind = f"device pool {_text(name)!r} ({type(pool).__name__})"
    if int(pool.page_size) != page_size:
        raise UnsupportedError(f"{kind} has pages of {pool.page_size} tokens, not {page_size}")
    if type(pool) is MHATokenToKVPool:
        scales = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer")
        if any(getattr(pool, scale, None) is not None for scale in scales):
            raise UnsupportedError(f"{kind} keeps scales beside its cache")
        count = len(pool.k_buffer)
        buffers = [*pool.k_buffer, *pool.v_buffer]
        mapping: dict[int, Any] = {layer: (i, count + i) for layer, i in layers.items()}
        layout = pool.kv_cache_layout
        if layout not in ("nhd", *PAGE_ROW_LAYOUTS):
            raise UnsupportedError(f"{kind} has the layout {layout!r}")
        rows_are_pages = layout in PAGE_ROW_LAYOUTS
    elif type(pool) is MLATokenToKVPool:
        if getattr(pool, "kv_scale_buffer", None) is not None:
            raise UnsupportedError(f"{kind} keeps scales beside its cache")
        buffers, mapping, rows_are_pages = list(pool.kv_buffer), dict(layers), False
    else:
        raise UnsupportedError(f"{kind} is not supported", hint="plain MHA and MLA pools are")
    return DevicePoolEntry(
        name=name,
        indices_from_pool=name,
        device_pool=pool,
        components=[buffers],
        layer_mapping=mapping,
        page_size=page_size,
        rows_are_pages=rows_are_pages,
    )


def regions(pools: Sequence[DevicePoolPages]) -> list[tuple[int, int]]:
    """(address, length) of each allocation behind the pools, once."""
    found: dict[tuple[int, int], None] = {}
    for pool in pools:
        for buffer in pool.buffers:
            storage = buffer.untyped_storage()
            found[int(storage.data_ptr()), int(storage.nbytes())] = None
    return list(found)
