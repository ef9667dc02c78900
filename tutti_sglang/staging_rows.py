"""Pages in an engine's device tensors as rows, and how rows and packed pages are copied.

A row is all that one buffer holds of one page. Packed, a page is the rows of its buffers one behind
the other, part after part, as the store has it. Copies are one indexed operation per buffer,
whatever the number of pages, on words as wide as all addresses allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.int64]

BLOCK_BYTES = 4096
ROW_ALIGN_BYTES = 16
PADDING_SHARE = 8
"""A page is padded to whole blocks where that costs at most 1/8; else to ROW_ALIGN_BYTES."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def page_rows(buffer: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Return one buffer of a pool as bytes, (pages, …) with one row a page. No copy.

    Parameters
        buffer: (slots, …), contiguous behind the first axis. A page is `page_tokens` neighbouring
            slots; 1 where each slot is a page. Slots that fill no page are left out.
    Raises
        ValueError: the buffer is not of that form.
    """
    if buffer.ndim < 1 or page_tokens < 1 or buffer.shape[0] < page_tokens or not buffer.numel():
        raise ValueError(f"a buffer of shape {tuple(buffer.shape)}, {page_tokens} slots a page")
    if not buffer[0].is_contiguous():
        raise ValueError(f"slots of shape {tuple(buffer.shape[1:])} are not contiguous")
    size = buffer[0].numel() * buffer.element_size()
    step = buffer.stride(0) * buffer.element_size() if buffer.shape[0] > 1 else size
    if step < size:
        raise ValueError(f"slots of {size} bytes overlap: they lie {step} bytes apart")
    raw = torch.empty(0, dtype=torch.uint8, device=buffer.device)
    start = buffer.storage_offset() * buffer.element_size()
    pages = buffer.shape[0] // page_tokens
    shape, strides = [pages, page_tokens * size], [page_tokens * step, 1]
    if page_tokens > 1 and step > size:  # the slots of a page do not touch
        shape, strides = [pages, page_tokens, size], [page_tokens * step, step, 1]
    return raw.set_(buffer.untyped_storage(), start, shape, strides)


def row_bytes(view: torch.Tensor) -> int:
    """Bytes of one row of a view that `page_rows` made."""
    return int(view[0].numel())


def padded(length_bytes: int) -> int:
    """Return how far apart pages of this length lie in a packed run of them."""
    blocks = -(-length_bytes // BLOCK_BYTES) * BLOCK_BYTES
    if blocks - length_bytes <= length_bytes // PADDING_SHARE:
        return blocks
    return -(-length_bytes // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


class _Copy:
    """The rows of one buffer, and where they lie in packed pages."""

    def __init__(self, view: torch.Tensor, inside_bytes: int) -> None:
        self._inside_bytes = inside_bytes
        self._dtype = _widest(view, inside_bytes)
        self._view = view.view(self._dtype)
        inner = self._view.shape[1:]
        self._shape = tuple(inner)
        self._strides = (1,) if len(inner) == 1 else (inner[1], 1)

    def scatter(self, packed: Packed, rows: torch.Tensor) -> None:
        """Copy packed pages into rows. One operation on the current stream."""
        self._view.index_copy_(0, rows, self._inside(packed, len(rows)))

    def gather(self, packed: Packed, rows: torch.Tensor) -> None:
        """Copy rows into packed pages. One operation on the current stream."""
        torch.index_select(self._view, 0, rows, out=self._inside(packed, len(rows)))

    def _inside(self, packed: Packed, pages: int) -> torch.Tensor:
        word = self._dtype.itemsize
        return packed.words[self._dtype].as_strided(
            (pages, *self._shape),
            (packed.step_bytes // word, *self._strides),
            (packed.start_bytes + self._inside_bytes) // word,
        )


def _widest(view: torch.Tensor, inside_bytes: int) -> torch.dtype:
    """The widest word by which a buffer and its place in a packed page can be addressed."""
    numbers = [inside_bytes, view.data_ptr(), view.storage_offset(), view.shape[-1]]
    numbers += view.stride()[:-1]
    for dtype in _WORDS:
        if all(number % dtype.itemsize == 0 for number in numbers):
            return dtype
    raise AssertionError("every number is a multiple of 1")


@dataclass(frozen=True, slots=True)
class Packed:
    """A run of packed pages inside a tensor of bytes.

    words        the whole tensor, by the type of word in which it is seen.
    start_bytes  of the first page; a multiple of 8.
    step_bytes   from page to page; a multiple of 8.
    """

    words: dict[torch.dtype, torch.Tensor]
    start_bytes: int
    step_bytes: int


def words_of(memory: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    """Return a tensor of bytes, a multiple of 8, as each type of word, for `Packed`."""
    return {dtype: memory.view(dtype) for dtype in _WORDS}


class DevicePool:
    """The buffers of one pool, part by part, and how to copy their rows. Made once for a pool.

    Parameters
        parts: for each part of a stored page, its buffers in the order of the page's bytes, each as
            `page_rows` returns it. All on one device, with memory that outlives this object.
    Threads    immutable.
    """

    def __init__(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        if not parts or not all(parts):
            raise ValueError("a pool has at least one part, and a part at least one buffer")
        views = [view for part in parts for view in part]
        for view in views:
            if view.dtype != torch.uint8 or view.ndim not in (2, 3) or view.stride(-1) != 1:
                raise ValueError("buffers come from page_rows")
        devices = {view.device for view in views}
        if len(devices) > 1:
            raise ValueError(f"the buffers of a pool lie on several devices: {devices}")
        self.device = views[0].device
        self.rows = min(view.shape[0] for view in views)
        """How many pages the pool has room for."""
        self.part_bytes = tuple(sum(map(row_bytes, part)) for part in parts)
        self.page_bytes = sum(self.part_bytes)
        self.part_steps = tuple(map(padded, self.part_bytes))
        """From page to page, where only one part of them is packed."""
        steps = np.cumsum([0, *self.part_steps]).tolist()
        self.part_starts, self.page_step = tuple(steps[:-1]), int(steps[-1])
        """Where each part lies in a whole packed page, and from page to page of those."""
        self._parts = tuple(_copies(part, 0) for part in parts)
        self._whole = tuple(
            copy
            for part, start in zip(parts, self.part_starts, strict=True)
            for copy in _copies(part, start)
        )

    def scatter(self, part: int, packed: Packed, rows: torch.Tensor) -> None:
        """Copy one part of packed pages into the rows of the pool, on the current stream.

        Parameters
            rows: (n,) int64 on the pool's device, each in 0 .. self.rows - 1, no two alike.
        Cost       one operation a buffer.
        """
        for copy in self._parts[part]:
            copy.scatter(packed, rows)

    def gather(self, packed: Packed, rows: torch.Tensor) -> None:
        """Copy rows of the pool into whole packed pages; otherwise as `scatter`."""
        for copy in self._whole:
            copy.gather(packed, rows)


def _copies(part: Sequence[torch.Tensor], start_bytes: int) -> tuple[_Copy, ...]:
    inside = np.cumsum([start_bytes, *map(row_bytes, part)]).tolist()
    return tuple(_Copy(view, at) for view, at in zip(part, inside[:-1], strict=True))


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Some pages of a pool.

    rows    (n,) int64: the row of each page.
    after   events that copies into or out of the rows wait for on the device: rows that an
            earlier forward pass may still read or write.
    Raises ValueError for rows that the pool does not have: on the device nothing would check them.
    """

    pool: DevicePool
    rows: Rows
    after: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.dtype != np.int64 or rows.ndim != 1:
            raise ValueError("rows must be one-dimensional int64")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.pool.rows:
            raise ValueError(f"a row outside 0 .. {self.pool.rows - 1}")
