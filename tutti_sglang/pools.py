"""Pages of SGLang's host pools as memory fragments, computed without a Python object per fragment.

SGLang's `get_page_buffer_meta` returns lists with a pointer and a size for each piece of each page.
In every layout the pointers of a page are an affine function of its number, so they are asked for
three pages once, at registration, and computed as arrays from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_core import PageFragments, UnsupportedError

U64 = npt.NDArray[np.uint64]

KNOWN_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@dataclass(frozen=True, slots=True)
class HostPoolPages:
    """Where the pages of one host pool lie.

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
            host_indices: token slots of the pool, `page_tokens` consecutive ones a page, on the
                CPU. Shape (pages * page_tokens,).
        Raises
            ValueError: not whole pages, or beyond the pool.
        """
        slots = host_indices.numpy()
        if len(slots) % self.page_tokens:
            raise ValueError(f"{len(slots)} host slots are not whole pages of {self.page_tokens}")
        first = slots[:: self.page_tokens]
        page, rest = np.divmod(first, self.page_tokens)
        if rest.any() or (len(page) and not 0 <= page.min() <= page.max() < self.page_count):
            raise ValueError("host slots are not aligned pages of the registered pool")
        address = self.base_address + page.astype(np.uint64)[:, None] * self.stride_bytes
        return PageFragments(address, self.length_bytes, host_indices)


def describe_pool(pool: Any) -> HostPoolPages:
    """Measure the page geometry of a host pool (MHA or MLA, any host layout).

    Raises
        UnsupportedError: names the pool and what about it is not known.
    """
    name = f"host pool {type(pool).__name__}"
    layout = getattr(pool, "layout", None)
    if layout not in KNOWN_LAYOUTS:
        raise UnsupportedError(
            f"{name} has layout {layout!r}", hint=f"known layouts: {', '.join(KNOWN_LAYOUTS)}"
        )
    tokens, count = int(pool.page_size), int(pool.page_num)
    if tokens < 1 or count < 1:
        raise UnsupportedError(f"{name} has page size {tokens} and {count} pages")
    regions = _regions(pool, name)
    try:
        base, lengths = _page_meta(pool, 0)
        second, _ = _page_meta(pool, min(1, count - 1))
        last, last_lengths = _page_meta(pool, count - 1)
    except (AttributeError, AssertionError, NotImplementedError, ValueError) as error:
        raise UnsupportedError(f"{name} does not tell where its pages are: {error}") from error
    pages = HostPoolPages(layout, tokens, count, base, second - base, lengths, regions)
    if (base + np.uint64(count - 1) * pages.stride_bytes != last).any() or (
        lengths != last_lengths
    ).any():
        raise UnsupportedError(f"{name}, layout {layout!r}: its pages are not evenly spaced")
    for address, length in ((base, lengths), (last, lengths)):
        if not _inside(address, length, regions):
            raise UnsupportedError(f"{name}, layout {layout!r}: pages lie outside its buffers")
    return pages


def _page_meta(pool: Any, page: int) -> tuple[U64, U64]:
    tokens = int(pool.page_size)
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(page * tokens, (page + 1) * tokens))
    return np.array(pointers, dtype=np.uint64), np.array(sizes, dtype=np.uint64)


def _regions(pool: Any, name: str) -> tuple[tuple[int, int], ...]:
    buffers: Sequence[torch.Tensor]
    if isinstance(getattr(pool, "kv_buffer", None), torch.Tensor):
        buffers = [pool.kv_buffer]
    else:
        buffers = [
            buffer
            for buffer in (getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None))
            if isinstance(buffer, torch.Tensor)
        ]
    if not buffers or any(b.device.type != "cpu" or not b.is_contiguous() for b in buffers):
        raise UnsupportedError(f"{name} has no contiguous buffer in host memory")
    return tuple((b.data_ptr(), b.numel() * b.element_size()) for b in buffers)


def _inside(address: U64, length: U64, regions: Sequence[tuple[int, int]]) -> bool:
    end = address + length
    return all(
        any(start <= a and e <= start + size for start, size in regions)
        for a, e in zip(address.tolist(), end.tolist(), strict=True)
    )
