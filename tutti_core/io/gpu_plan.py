"""Turns items of a batch into flat transfers for one NVMe namespace. Arrays only; no I/O.

An item is sent as its fragments are, where each of them lies in registered memory and begins and
ends with a block of the device. Every other item goes by way of the bounce arena: one transfer of
its whole extent, and copies by the CPU. A bounced item that is larger than a part of the arena is
cut into pieces first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_core.io.transport import BLOCK_BYTES, U64, Batch

MEMORY_ALIGN = 4
"""Of the first byte of a transfer (PRP1, NVMe base specification, section 4.1.1)."""

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memory:
    """Registered memory as sorted arrays: address and end of each region."""

    start: U64
    end: U64

    def holds(self, address: U64, length_bytes: U64) -> npt.NDArray[np.bool_]:
        """Whether each piece lies in one region."""
        if not len(self.start):
            return np.zeros(len(address), np.bool_)
        at = np.searchsorted(self.start, address, side="right").astype(np.int64) - 1
        end = self.end[np.maximum(at, 0)]
        return (at >= 0) & (address < end) & (length_bytes <= end - np.minimum(address, end))


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a plan.

    block_bytes     of the namespace.
    bounce_bytes    of one part of the arena; a multiple of BLOCK_BYTES.
    transfers_max   of one group, where no single item has more.
    """

    block_bytes: int
    bounce_bytes: int
    transfers_max: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """n pieces of items in order, with their fragments; a whole item is one piece.

    item            (n,) which item of the batch.
    offset_bytes    (n,) on the device.
    fragment_start  (n + 1,) into address and length_bytes.
    bounced         (n,) goes by way of the arena.
    """

    item: Index
    offset_bytes: U64
    fragment_start: Index
    address: U64
    length_bytes: U64
    bounced: npt.NDArray[np.bool_]

    def lengths(self) -> U64:
        """Bytes of each piece."""
        return np.add.reduceat(self.length_bytes, self.fragment_start[:-1])


@dataclass(frozen=True, slots=True)
class Group:
    """Transfers that are issued together, and the copies that go with them.

    first, stop      of the pieces.
    offset_bytes, address, length_bytes, piece     one entry a transfer; `piece` from `first` on.
    inner, outer, copy_bytes   copies between arena and memory, in bytes of an item's order.
    gap, gap_bytes   what follows the last byte of a bounced piece in its last block.
    """

    first: int
    stop: int
    offset_bytes: U64
    address: U64
    length_bytes: U64
    piece: Index
    inner: U64
    outer: U64
    copy_bytes: U64
    gap: U64
    gap_bytes: U64

    @property
    def bounces(self) -> bool:
        """Whether it needs a part of the arena."""
        return bool(len(self.inner))


def spans(counts: Index) -> Index:
    """0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def pieces_of(batch: Batch, items: Index, memory: Memory, limits: Limits) -> Pieces:
    """The pieces of some items, in order."""
    start = batch.fragment_start.astype(np.int64)
    counts = (start[1:] - start[:-1])[items]
    fragment = np.repeat(start[items], counts) + spans(counts)
    address, length = batch.address[fragment], batch.length_bytes[fragment]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    offset = np.repeat(batch.offset_bytes[items], counts) + _before(length, first)
    block = np.uint64(limits.block_bytes)
    fit = (
        (address % np.uint64(MEMORY_ALIGN) == 0)
        & (length % block == 0)
        & (offset % block == 0)
        & memory.holds(address, length)
    )
    bounced = ~np.logical_and.reduceat(fit, first[:-1])
    whole = Pieces(items, batch.offset_bytes[items], first, address, length, bounced)
    large = bounced & (whole.lengths() > np.uint64(limits.bounce_bytes))
    return _cut(whole, large, limits.bounce_bytes) if large.any() else whole


def _before(length: U64, first: Index) -> U64:
    """Bytes of an item before each of its fragments."""
    running = np.cumsum(length) - length
    return running - np.repeat(running[first[:-1]], first[1:] - first[:-1])


def _cut(whole: Pieces, large: npt.NDArray[np.bool_], step: int) -> Pieces:
    """Cut large pieces after every `step` bytes. Python once for a piece of at least one step."""
    item: list[int] = []
    offset: list[int] = []
    bounced: list[bool] = []
    counts: list[int] = []
    address: list[U64] = []
    length: list[U64] = []
    for number in range(len(whole.item)):
        mine = slice(int(whole.fragment_start[number]), int(whole.fragment_start[number + 1]))
        parts = [(0, whole.address[mine], whole.length_bytes[mine])]
        if large[number]:
            parts = list(_split(whole.address[mine], whole.length_bytes[mine], step))
        for at, some, bytes_of in parts:
            item.append(int(whole.item[number]))
            offset.append(int(whole.offset_bytes[number]) + at)
            bounced.append(bool(whole.bounced[number]))
            counts.append(len(some))
            address.append(some)
            length.append(bytes_of)
    return Pieces(
        np.array(item, np.int64),
        np.array(offset, np.uint64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate(address),
        np.concatenate(length),
        np.array(bounced, np.bool_),
    )


def _split(address: U64, length: U64, step: int) -> Iterator[tuple[int, U64, U64]]:
    """Runs of at most `step` bytes: where each begins, and its fragments."""
    ends = np.cumsum(length)
    begins = ends - length
    for at in range(0, int(ends[-1]), step):
        low, high = np.uint64(at), np.uint64(min(at + step, int(ends[-1])))
        first = int(np.searchsorted(ends, low, side="right"))
        stop = int(np.searchsorted(begins, high, side="left"))
        begin = np.maximum(begins[first:stop], low)
        end = np.minimum(ends[first:stop], high)
        yield at, address[first:stop] + (begin - begins[first:stop]), end - begin


def groups_of(pieces: Pieces, limits: Limits, most_pieces: int) -> Iterator[Group]:
    """Groups of consecutive pieces, within the limits; the arena's part begins at address 0.

    A group has at least one piece, so one with more fragments than `transfers_max` has a group of
    its own, which is larger.
    """
    extents = -(-pieces.lengths().astype(np.int64) // BLOCK_BYTES) * BLOCK_BYTES
    room = np.cumsum(np.where(pieces.bounced, extents, 0))
    counts = pieces.fragment_start[1:] - pieces.fragment_start[:-1]
    transfers = np.cumsum(np.where(pieces.bounced, 1, counts))
    first = 0
    while first < len(pieces.item):
        used = int(room[first - 1]) if first else 0
        begun = int(transfers[first - 1]) if first else 0
        stop = min(
            int(np.searchsorted(room, used + limits.bounce_bytes, side="right")),
            int(np.searchsorted(transfers, begun + limits.transfers_max, side="right")),
            first + most_pieces,
        )
        stop = max(stop, first + 1)
        yield _group(pieces, first, stop, extents)
        first = stop


def _group(pieces: Pieces, first: int, stop: int, extents: Index) -> Group:
    start = pieces.fragment_start[first : stop + 1]
    counts = start[1:] - start[:-1]
    mine = slice(int(start[0]), int(start[-1]))
    address, length = pieces.address[mine], pieces.length_bytes[mine]
    bounced = pieces.bounced[first:stop]
    before = _before(length, start - start[0])
    offset = np.repeat(pieces.offset_bytes[first:stop], counts) + before
    piece = np.repeat(np.arange(stop - first), counts)
    by_way = bounced[piece]
    room = np.where(bounced, extents[first:stop], 0)
    place = (np.cumsum(room) - room).astype(np.uint64)
    total = np.add.reduceat(length, start[:-1] - start[0])
    gap = extents[first:stop].astype(np.uint64) - total
    gaps = bounced & (gap > 0)
    return Group(
        first=first,
        stop=stop,
        offset_bytes=np.concatenate([offset[~by_way], pieces.offset_bytes[first:stop][bounced]]),
        address=np.concatenate([address[~by_way], place[bounced]]),
        length_bytes=np.concatenate(
            [length[~by_way], extents[first:stop][bounced].astype(np.uint64)]
        ),
        piece=np.concatenate([piece[~by_way], np.flatnonzero(bounced)]),
        inner=(np.repeat(place, counts) + before)[by_way],
        outer=address[by_way],
        copy_bytes=length[by_way],
        gap=(place + total)[gaps],
        gap_bytes=gap[gaps],
    )
