"""Pages that are stored in parts: where each part lies, their headers, and whether they are sound.

    | header, 4 KiB | part 0, padded | part 1, padded | ...

A part is padded to whole blocks, so that each can be read alone. The header has a checksum for each
part; the record's checksum covers the header and part 0. See `format.PART_HEADER`. In an encrypted
store a trailer follows each part, before its padding, and counts as of the part for the checksums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.format import PART_HEADER, PART_HEADER_BYTES, PART_MAGIC
from tutti_core.geometry import PageFragments
from tutti_core.io.transport import BLOCK_BYTES
from tutti_core.memcopy import copy_pieces

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

assert PART_HEADER_BYTES == BLOCK_BYTES
_KEY_AT = PART_HEADER.fields["page_key"][1]  # type: ignore[index]


class PartLayout:
    """How the pages of one namespace are stored in parts.

    Parameters
        part_bytes: lengths of the parts, in order.
        trailer_bytes: of what follows each part.
    """

    def __init__(self, part_bytes: Sequence[int], trailer_bytes: int = 0) -> None:
        self.part_bytes = tuple(part_bytes)
        self.unit_bytes = tuple(size + trailer_bytes for size in part_bytes)
        """Lengths of the parts with their trailers: what the checksums cover."""
        padded = [-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in self.unit_bytes]
        self.pad_bytes = [p - size for p, size in zip(padded, part_bytes, strict=True)]
        """How far each part is from the next one."""
        ends = np.cumsum([PART_HEADER_BYTES, *padded])
        self.offset_bytes = tuple(ends[:-1].tolist())
        """Where each part starts in the stored page."""
        self.stored_bytes = int(ends[-1])
        self.first_bytes = PART_HEADER_BYTES + self.unit_bytes[0]
        """What the record's checksum covers."""

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.part_bytes)

    def fragment_ranges(self, length_bytes: U64) -> list[tuple[int, int]]:
        """Which fragments of a page each part has: first, and one behind the last.

        Raises
            ValueError: a fragment crosses the boundary of a part, or there is too much or little.
        """
        ends = np.cumsum(length_bytes, dtype=np.uint64)
        borders = np.cumsum(self.part_bytes).astype(np.uint64)
        at = np.searchsorted(ends, borders)
        if not len(ends) or ends[-1] != borders[-1] or (ends[at] != borders).any():
            raise ValueError(
                f"fragments of {length_bytes.tolist()[:8]} … bytes do not end where the parts of a "
                f"page end, of {list(self.part_bytes)[:8]} … bytes"
            )
        stops = (at + 1).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def seal(
        self, digest: bytes, keys: npt.NDArray[np.uint8], pages: PageFragments
    ) -> PageFragments:
        """Return pages as they are stored: with headers of their own, and padding.

        Parameters
            keys: (n, width) uint8, the page keys.
            pages: (n, f), no fragment in two parts; the memory must not change any more.
        Cost       one pass over the bytes, with the GIL released.
        """
        ranges = self.fragment_ranges(pages.length_bytes)
        headers = self._headers(digest, keys, self._checksums(pages, ranges))
        address, lengths = self._padded(pages, ranges, block_addresses(headers))
        return PageFragments(address, lengths, (headers, _ZEROS, pages.owner))

    def padded(self, pages: PageFragments) -> PageFragments:
        """Pages with zeros where they are stored with headers, trailers and padding."""
        ranges = self.fragment_ranges(pages.length_bytes)
        headers = np.full(pages.page_count, zeros_address(), dtype=np.uint64)
        address, lengths = self._padded(pages, ranges, headers)
        return PageFragments(address, lengths, pages.owner)

    def finish_encrypted(
        self, digest: bytes, keys: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]
    ) -> None:
        """Put headers and padding to pages, one a row, whose parts and trailers are in place."""
        address = np.uint64(rows.ctypes.data) + np.arange(len(rows), dtype=np.uint64) * np.uint64(
            rows.strides[0]
        )
        for offset, unit in zip(self.offset_bytes, self.unit_bytes, strict=True):
            padded = offset + -(-unit // BLOCK_BYTES) * BLOCK_BYTES
            rows[:, offset + unit : padded] = 0
        headers = self._headers(digest, keys, self._checksums(*self._units_at(address)))
        rows[:, :PART_HEADER_BYTES] = headers

    def _headers(
        self, digest: bytes, keys: npt.NDArray[np.uint8], checksums: U64
    ) -> npt.NDArray[np.uint8]:
        """Headers of pages, as blocks."""
        headers = aligned_blocks(len(keys))
        head = headers.view(PART_HEADER)[:, 0]
        head["magic"] = np.void(PART_MAGIC)
        head["parts"] = self.count
        headers[:, _KEY_AT : _KEY_AT + keys.shape[1]] = keys
        head["namespace"] = np.void(digest)
        head["checksum"][:, : self.count] = checksums
        return headers

    def _units_at(self, address: U64) -> tuple[PageFragments, list[tuple[int, int]]]:
        """The parts of whole stored pages in memory, each with its trailer; one fragment a part."""
        offsets = np.array(self.offset_bytes, dtype=np.uint64)
        parts = PageFragments(
            address[:, None] + offsets, np.array(self.unit_bytes, dtype=np.uint64)
        )
        return parts, [(i, i + 1) for i in range(self.count)]

    def _checksums(self, pages: PageFragments, ranges: list[tuple[int, int]]) -> U64:
        """(n, parts): XXH3-64 of each part of each page."""
        count, each = pages.address.shape
        starts = np.array([low for low, _ in ranges], dtype=np.uint32)
        rows = np.arange(count, dtype=np.uint32) * np.uint32(each)
        start = np.append((rows[:, None] + starts).reshape(-1), np.uint32(count * each))
        address = np.ascontiguousarray(pages.address).reshape(-1)
        lengths = np.tile(pages.length_bytes, count)
        return hashing.checksum_items(start, address, lengths).reshape(count, self.count)

    def _padded(
        self, pages: PageFragments, ranges: list[tuple[int, int]], headers: U64
    ) -> tuple[U64, U64]:
        """Addresses and lengths of whole stored pages: header, then each part and its padding."""
        zeros = np.full((pages.page_count, 1), _ZEROS.ctypes.data, dtype=np.uint64)
        columns: list[U64] = [headers[:, None]]
        lengths: list[U64] = [np.array([PART_HEADER_BYTES], dtype=np.uint64)]
        for (low, high), pad in zip(ranges, self.pad_bytes, strict=True):
            columns.append(pages.address[:, low:high])
            lengths.append(pages.length_bytes[low:high])
            if pad:
                columns.append(zeros)
                lengths.append(np.array([pad], dtype=np.uint64))
        return np.concatenate(columns, axis=1), np.concatenate(lengths)

    def record_checksums(self, stored: PageFragments) -> U64:
        """What the records of stored pages have as checksum: of the header and part 0 of each."""
        ends = np.cumsum(stored.length_bytes, dtype=np.uint64)
        last = int(np.searchsorted(ends, np.uint64(self.first_bytes)))
        lengths = stored.length_bytes[: last + 1].copy()
        lengths[last] -= ends[last] - np.uint64(self.first_bytes)
        return hashing.checksum_items(*PageFragments(stored.address[:, : last + 1], lengths).flat())

    def sound(self, address: U64, checksum: U64) -> Mask:
        """Whether whole stored pages in memory are what their records say.

        Parameters
            address: (n,) where each page begins; it is in one piece.
            checksum: (n,) of the records.
        """
        count = len(address)
        lengths = np.array([self.stored_bytes], dtype=np.uint64)
        good = self.record_checksums(PageFragments(address[:, None], lengths)) == checksum
        headers = aligned_blocks(count)
        copy_pieces(
            block_addresses(headers),
            np.ascontiguousarray(address),
            np.full(count, PART_HEADER_BYTES, dtype=np.uint64),
        )
        found = self._checksums(*self._units_at(address))
        good &= (found == self.expected(headers)).all(axis=1)
        return np.asarray(good, dtype=np.bool_)

    def expected(self, headers: npt.NDArray[np.uint8]) -> U64:
        """(n, parts): the checksums that headers, (n, 4096) uint8, name."""
        checksums: U64 = headers.view(PART_HEADER)[:, 0]["checksum"][:, : self.count]
        return checksums


def layout_of_parts(part_bytes: Sequence[int], trailer_bytes: int = 0) -> PartLayout | None:
    """The layout of pages in these parts; None for pages that are stored whole."""
    return PartLayout(part_bytes, trailer_bytes) if part_bytes else None


def stored_bytes(page_bytes: int, parts: PartLayout | None, trailer_bytes: int = 0) -> int:
    """How many bytes of a slot a page takes."""
    return page_bytes + trailer_bytes if parts is None else parts.stored_bytes


def aligned_blocks(count: int) -> npt.NDArray[np.uint8]:
    """(count, 4096) zeros that start at a multiple of their size, as direct I/O wants them."""
    memory = np.zeros((count + 1) * PART_HEADER_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % PART_HEADER_BYTES
    return memory[skip : skip + count * PART_HEADER_BYTES].reshape(count, PART_HEADER_BYTES)


def block_addresses(blocks: npt.NDArray[np.uint8]) -> U64:
    """Address of each of the blocks that `aligned_blocks` returned."""
    start = np.uint64(blocks.ctypes.data)
    return start + np.arange(len(blocks), dtype=np.uint64) * np.uint64(PART_HEADER_BYTES)


def zeros_address() -> int:
    """Where there are as many zeros as any padding needs, for as long as the process lives."""
    return int(_ZEROS.ctypes.data)


_ZEROS = aligned_blocks(2).reshape(-1)
"""Padding, a trailer included, is less than a block and a trailer."""
