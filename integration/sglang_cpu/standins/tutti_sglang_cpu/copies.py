"""HiCache's device <-> host copy kernels in torch, for host pools of SGLang 0.5.23.

On CUDA the pool modules import these names from sgl_kernel.kvcacheio; on a CPU they're undefined.
Names and keyword arguments are SGLang's. `per_layer` copies host -> device, one layer a call;
`all_layer` copies device -> host; lf, pf, ph are the layouts layer_first, page_first, page_head.

Every copy is "rows at src_indices to rows at dst_indices" of one layer. Indices are token slots, so
the only thing that differs is how a layer's rows lie in a host buffer:

    layer_first         [layer][token]                      one tensor a layer, indexed by token
    page_first          [token][layer]                      buffer[:, layer], indexed by token
    page_first_direct   [page][layer][token in page]        buffer[:, layer], indexed by page, token
    page_head           [page][head][token in page][layer]  axes moved, indexed by page, token

Device pools are layer_first, given as tensors or as tables of addresses (uint64, one a layer).
Invariant: index tensors hold whole pages of valid slots, the same count on both sides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _rows_at(address: int, row_count: int, row_bytes: int) -> Tensor:
    """The memory at `address` as uint8, shape (row_count, row_bytes). Doesn't own or copy it."""
    memory = (ctypes.c_uint8 * (row_count * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(row_count, row_bytes)


def _layer_rows(table: Tensor, layer: int, indices: Tensor, row_bytes: int) -> Tensor:
    """Rows `indices` of one layer of an address table, copied out as bytes."""
    return _rows_at(int(table[layer]), int(indices.max()) + 1, row_bytes)[indices]


def _typed(rows: Tensor, like: Tensor, row_shape: Sequence[int]) -> Tensor:
    """Byte rows in the dtype of `like`, each row reshaped."""
    return rows.view(like.dtype).view(-1, *row_shape)


def _in_pages(indices: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Token slots as (page, token in page)."""
    return indices // page_size, indices % page_size


def _page_head_layer(buffer: Tensor, layer: int) -> Tensor:
    """One layer of a page_head buffer as a view (page, token in page, head, dim)."""
    return buffer[:, :, :, layer].transpose(1, 2)


# ---- layer_first, io backend `kernel` --------------------------------------------------------


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    **_: Any,
) -> None:
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    host_rows = int(dst_indices.max()) + 1
    for layer in range(num_layers):
        rows = _layer_rows(src_layers, layer, src_indices, item_size)
        _rows_at(int(dst_layers[layer]), host_rows, item_size)[dst_indices] = rows


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    **common: Any,
) -> None:
    transfer_kv_all_layer_mla(src_k_layers, dst_k_layers, **common)
    transfer_kv_all_layer_mla(src_v_layers, dst_v_layers, **common)


# ---- page_first, io backend `kernel` ---------------------------------------------------------


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, layer_id: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices, layer_id].view(-1, *dst.shape[1:])


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor, **common: Any
) -> None:
    transfer_kv_per_layer_mla_pf_lf(src_k, dst_k, **common)
    transfer_kv_per_layer_mla_pf_lf(src_v, dst_v, **common)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    for layer in range(num_layers):
        rows = _layer_rows(src_layers, layer, src_indices, item_size)
        dst[dst_indices, layer] = _typed(rows, dst, dst.shape[2:])


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor, dst_k: Tensor, src_v_layers: Tensor, dst_v: Tensor, **common: Any
) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_k_layers, dst_k, **common)
    transfer_kv_all_layer_mla_lf_pf(src_v_layers, dst_v, **common)


# ---- page_head, io backend `kernel` ----------------------------------------------------------


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
    **_: Any,
) -> None:
    where = _in_pages(src_indices, page_size)
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = _page_head_layer(src, layer_id)[where]


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    page_size: int,
    **_: Any,
) -> None:
    where = _in_pages(dst_indices, page_size)
    for table, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer in range(num_layers):
            view = _page_head_layer(dst, layer)
            rows = _layer_rows(table, layer, src_indices, item_size)
            view[where] = _typed(rows, dst, view.shape[2:])


# ---- io backend `direct`: layer_first, and page_first_direct (here `pf`) ---------------------


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    **_: Any,
) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
    **_: Any,
) -> None:
    where = _in_pages(src_indices, page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[:, layer_id][where].view(-1, *dst.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
    **_: Any,
) -> None:
    """src_ptrs: all layers of the first host buffer (K), then all of the second (V), if any."""
    where = _in_pages(dst_indices, page_size)
    layer_count = len(src_ptrs) // len(dst_ptrs)
    for i, src in enumerate(src_ptrs):
        host_layer = dst_ptrs[i // layer_count][:, i % layer_count]
        host_layer[where] = src[src_indices].view(-1, *host_layer.shape[2:])


# ---- recurrent state: one slot a page, so [slot][layer][1][...] in a host buffer ----------------


def transfer_kv_mamba_pf_lf(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, layer_id: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices, layer_id].view(-1, *dst.shape[1:])


def transfer_kv_mamba_lf_pf(
    src_ptrs: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, num_layers)


COPY_FUNCTIONS = {
    name: value for name, value in list(globals().items()) if name.startswith("transfer_kv_")
}
