"""Pages of SGLang's host pools as memory fragments, computed without a Python object per fragment.

SGLang's `get_page_buffer_meta` returns lists with a pointer and a size for each piece of each page.
In every pool and layout the pointers of a page are an affine function of its number, so they are
asked for three pages once, at registration, and computed as arrays from then on. What pools that
refuse the question hold of a page is found from the views and buffers that they show otherwise.

Source: SGLang 0.5.23, mem_cache/pool_host/*.py, mem_cache/memory_pool_host.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_core import PageFragments, UnsupportedError

U64 = npt.NDArray[np.uint64]
Pieces = tuple[U64, U64]
"""Addresses and lengths of the pieces of one page, in the order in which they are stored."""

KNOWN_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

_REFUSALS = (AttributeError, AssertionError, NotImplementedError, TypeError, ValueError)
"""What SGLang's pools raise when they do not answer."""


@dataclass(frozen=True, slots=True)
class HostPoolPages:
    """Where the pages of one host pool lie.

    page_tokens   slots of the pool that make a page: tokens, or 1 where a page is one state.
    base_address  (f,) uint64, pieces of page 0.
    stride_bytes  (f,) uint64, from a piece of one page to that of the next.
    length_bytes  (f,) uint64, sizes of the pieces.
    regions       (address, length) of the pool's buffers.
    """

    layout: str
    page_tokens: int
    page_count: int
    base_address: U64
    stride_bytes: U64
    length_bytes: U64
    regions: tuple[tuple[int, int], ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.length_bytes.sum())

    def fragments(self, host_indices: torch.Tensor) -> PageFragments:
        """Return the fragments of the pages that `host_indices` names.

        Parameters
            host_indices: slots of the pool, `page_tokens` consecutive ones a page.
                Shape (pages * page_tokens,).
        Raises
            ValueError: not whole pages, or beyond the pool.
        """
        slots = host_indices.cpu().numpy()
        if len(slots) % self.page_tokens:
            raise ValueError(f"{len(slots)} host slots are not whole pages of {self.page_tokens}")
        first = slots[:: self.page_tokens]
        page, rest = np.divmod(first, self.page_tokens)
        if rest.any() or (len(page) and not 0 <= page.min() <= page.max() < self.page_count):
            raise ValueError("host slots are not aligned pages of the registered pool")
        address = self.base_address + page.astype(np.uint64)[:, None] * self.stride_bytes
        return PageFragments(address, self.length_bytes, host_indices)

    def groups(self, count: int) -> list[HostPoolPages]:
        """The pages cut into `count` runs of as many pieces each, in the order of the pieces."""
        step = len(self.length_bytes) // count
        runs = [slice(i * step, (i + 1) * step) for i in range(count)]
        return [
            replace(
                self,
                base_address=self.base_address[run],
                stride_bytes=self.stride_bytes[run],
                length_bytes=self.length_bytes[run],
            )
            for run in runs
        ]


def is_logical(pool: Any) -> bool:
    """Whether a pool hands out slots and holds no bytes (DeepSeek-V4's KV pool)."""
    return getattr(pool, "kv_buffer", None) is None and getattr(pool, "size_per_token", None) == 0


def describe_pool(pool: Any, name: str = "kv", *, head_groups: int = 1) -> HostPoolPages:
    """Measure the page geometry of a host pool.

    Parameters
        name: of the pool; for messages.
        head_groups: have the pieces of a page in so many groups of heads, group after group.
            Layout `page_head` only.
    Raises
        UnsupportedError: names the pool and what about it is not known.
    """
    what = f"pool {name!r} ({type(pool).__name__})"
    layout = getattr(pool, "layout", None)
    if layout not in KNOWN_LAYOUTS:
        raise UnsupportedError(
            f"{what} has layout {layout!r}", hint=f"known layouts: {', '.join(KNOWN_LAYOUTS)}"
        )
    if hasattr(pool, "owned_rows"):  # each rank has some of the pages (PageInterleaveHostPool)
        raise UnsupportedError(f"{what} deals its pages out to the ranks (KV cache sharding)")
    tokens, count = _page_tokens(pool), _page_count(pool)
    if tokens < 1 or count < 1:
        raise UnsupportedError(f"{what} has page size {tokens} and {count} pages")
    regions = _regions(pool, what)
    pieces_of = _asker(pool, tokens, head_groups, what)
    (base, lengths), (second, _) = pieces_of(0), pieces_of(min(1, count - 1))
    last, last_lengths = pieces_of(count - 1)
    if not all(_inside(address, lengths, regions) for address in (base, last)):
        raise UnsupportedError(f"{what}, layout {layout!r}: pages lie outside its buffers")
    pages = HostPoolPages(layout, tokens, count, base, second - base, lengths, regions)
    if (base + np.uint64(count - 1) * pages.stride_bytes != last).any() or (
        lengths != last_lengths
    ).any():
        raise UnsupportedError(f"{what}, layout {layout!r}: its pages are not evenly spaced")
    return pages


def _page_tokens(pool: Any) -> int:
    """Slots of a page; with decode context parallelism those of all its ranks."""
    return int(getattr(pool, "logical_page_size", pool.page_size))


def _page_count(pool: Any) -> int:
    count = getattr(pool, "page_num", None)
    if count is None and int(pool.page_size) > 0:
        count = int(pool.size) // int(pool.page_size)
    return int(count or 0)


# ---- the pieces of one page ----
def _asker(pool: Any, tokens: int, head_groups: int, what: str) -> Callable[[int], Pieces]:
    """The way in which this pool tells the pieces of a page by its number."""

    def told(page: int) -> Pieces:
        slots = torch.arange(page * tokens, (page + 1) * tokens)
        if head_groups == 1:
            pointers, sizes = pool.get_page_buffer_meta(slots)
        else:
            pointers, sizes = pool.get_split_heads_page_buffer_meta(slots, head_groups)
        return np.array(pointers, dtype=np.uint64), np.array(sizes, dtype=np.uint64)

    def seen(page: int) -> Pieces:
        return _pieces_of_view(pool.get_data_page(page * tokens, flat=False))

    def rows(page: int) -> Pieces:
        found = [_pieces_of_view(buffer[page]) for buffer in _slot_buffers(pool)]
        return np.concatenate([a for a, _ in found]), np.concatenate([n for _, n in found])

    # A pool of states holds more of a slot than its `get_page_buffer_meta` would tell.
    ways = [rows] if hasattr(pool, "slot_state_buffers") else [told, seen]
    reasons = []
    for way in ways if head_groups == 1 else [told]:
        try:
            way(0)
            return way
        except _REFUSALS as error:
            reasons.append(str(error))
    raise UnsupportedError(f"{what} does not tell where its pages are: {'; '.join(reasons)}")


def _slot_buffers(pool: Any) -> list[torch.Tensor]:
    """The buffers of a pool of states, one row a slot; without those that hold nothing."""
    buffers = [b for b in pool.get_hybrid_pool_buffer() if b.numel()]
    if int(pool.page_size) != 1 or any(len(b) != int(pool.size) for b in buffers):
        raise ValueError("its buffers do not have one row a slot")
    return buffers


def _pieces_of_view(view: torch.Tensor) -> Pieces:
    """The contiguous runs that a view of a buffer consists of, in the order of its elements."""
    item, run = view.element_size(), 1
    dims = list(zip(view.shape, view.stride(), strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] == run):
        run *= dims.pop()[0]
    offsets = np.zeros(1, dtype=np.uint64)
    for extent, stride in dims:
        step = np.arange(extent, dtype=np.uint64) * np.uint64(stride * item)
        offsets = (offsets[:, None] + step).reshape(-1)
    return np.uint64(view.data_ptr()) + offsets, np.full(len(offsets), run * item, dtype=np.uint64)


# ---- the pool's memory ----
def _regions(pool: Any, what: str) -> tuple[tuple[int, int], ...]:
    try:
        buffers = _buffers(pool)
    except _REFUSALS:
        buffers = []
    if not buffers or any(b.device.type != "cpu" or not b.is_contiguous() for b in buffers):
        raise UnsupportedError(f"{what} has no contiguous buffer in host memory")
    return tuple((b.data_ptr(), b.numel() * b.element_size()) for b in buffers)


def _buffers(pool: Any) -> list[torch.Tensor]:
    """The tensors that hold a pool's pages, whatever the pool calls them."""
    kv = getattr(pool, "kv_buffer", None)
    if isinstance(kv, torch.Tensor):
        found: Sequence[Any] = [kv]
    elif isinstance(kv, list | tuple):
        found = kv
    elif hasattr(pool, "get_hybrid_pool_buffer"):
        found = pool.get_hybrid_pool_buffer()
    else:
        found = [getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)]
    return [b for b in found if isinstance(b, torch.Tensor) and b.numel()]


def _inside(address: U64, length: U64, regions: Sequence[tuple[int, int]]) -> bool:
    end = address + length
    return all(
        any(start <= a and e <= start + size for start, size in regions)
        for a, e in zip(address.tolist(), end.tolist(), strict=True)
    )
