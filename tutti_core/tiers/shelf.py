"""What a memory tier keeps of one namespace, and how its tree is read without changing it.

Pure, but for the ticket of a `Write`. The caller holds the lock of the tier, or that of the manager
where the pages are those of the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from tutti_core.index.catalog import packed_rows
from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import NO_SLOT, Node
from tutti_core.io.transport import BLOCK_BYTES
from tutti_core.tiers.manager import Entry
from tutti_core.tiers.saver import SaveTicket

U64 = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

SEGMENTS = 64
"""An arena is cut into about so many segments, each of one slot size."""

SEGMENT_MAX_BYTES = 1 << 30
_SMALL_SEGMENT_BYTES = 4 << 20
SMALL_SEGMENTS = 8

MOVE_PAGES_MAX = 64
MOVE_BYTES_MAX = 16 << 20
"""Bounds of one background batch, whichever is met first (one page always goes)."""


Departure = tuple[Entry, bytes, int]
"""Pages at the end of a rooted chain that were evicted, and how many before them were not."""


class Kind(Enum):
    """What becomes of a page of this tier that has to go."""

    SAVED = "a lower tier holds it: it is dropped"
    UNSAVED = "no lower tier holds it: it is written there first"
    FRESH = "no lower tier holds it, and none will unless it is used: it is dropped"
    ARRIVING = "unsaved as soon as the lower tier has let go of it, until when it stays"


@dataclass(slots=True)
class Shelf:
    """One namespace in one memory tier."""

    entry: Entry
    pages: NamespacePages
    epoch: int = 0
    repeats: bool = False
    """A slot may be named twice: a chain had a key twice, or a page came without its chain."""
    by_key: dict[bytes, tuple[int, int]] | None = None
    """Slot and generation of each page, and of some that are gone: for chains that are not rooted.
    Made when the first of these is asked for; what the slot map contradicts is gone."""


@dataclass(eq=False, slots=True)
class Write:
    """Unsaved pages of one chain on their way down; made by the tier, ended by `end_write`.

    keys        packed chain up to the last page of the write.
    index       positions in the chain, rising; one each in slots and generations.
    started     start of this copy out of the arena, for `end_copy`.
    """

    shelf: Shelf
    epoch: int
    keys: bytes
    rooted: bool
    index: Indices
    slots: U64
    generations: U64
    started: int
    ticket: SaveTicket = field(init=False)

    def __post_init__(self) -> None:
        self.ticket = SaveTicket(np.zeros(len(self.index), dtype=np.bool_))

    def page_keys(self) -> bytes:
        """Packed keys of the pages that are written."""
        return packed_rows(self.keys, self.shelf.entry.key_bytes)[self.index].tobytes()


def segment_bytes_for(length_bytes: int) -> int:
    """Size of a segment: 1/64 of the arena as a power of two; of a small arena, more."""
    small = min(_SMALL_SEGMENT_BYTES, _power_of_two(length_bytes // SMALL_SEGMENTS))
    size = min(max(_power_of_two(length_bytes // SEGMENTS), small), SEGMENT_MAX_BYTES)
    return max(size, BLOCK_BYTES)


def _power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1) if size else 0


def pages_per_move(page_bytes: int) -> int:
    """Pages of one background batch."""
    return max(1, min(MOVE_PAGES_MAX, MOVE_BYTES_MAX // page_bytes))


def path_of(leaf: Node) -> tuple[bytes, U64, U64]:
    """The chain from the first page to the end of a node: keys, slots, generations."""
    nodes: list[Node] = []
    node: Node | None = leaf
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    keys = b"".join(bytes(n.keys) for n in nodes)
    slots = np.concatenate([np.array(n.slots, dtype=np.uint64) for n in nodes])
    generations = np.concatenate([np.array(n.generations, dtype=np.uint64) for n in nodes])
    return keys, slots, generations


def below(pages: NamespacePages, keys: bytes) -> Iterator[tuple[U64, U64]]:
    """Slots and generations of everything under the last page of a rooted chain, by node."""
    count = len(keys) // pages.tree.width
    along = pages.tree.pages_along(keys)
    if count == 0 or sum(along.values()) != count:
        return
    node, length = list(along.items())[-1]
    yield _arrays(node, length)
    stack = list(node.children.values()) if node.children else []
    while stack:
        node = stack.pop()
        yield _arrays(node, 0)
        stack.extend(node.children.values() if node.children else ())


def _arrays(node: Node, start: int) -> tuple[U64, U64]:
    slots = np.array(node.slots, dtype=np.uint64)[start:]
    return slots, np.array(node.generations, dtype=np.uint64)[start:]


def slots_and_generations(pages: NamespacePages) -> Iterator[tuple[int, int]]:
    """Slot and generation of every page."""
    for node in pages.tree.nodes():
        for slot, generation in zip(node.slots, node.generations, strict=True):
            if slot != NO_SLOT:
                yield slot, generation
    for page in pages.loose.values():
        yield page.slot, page.generation


def pages_by_key(pages: NamespacePages) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Key, slot and generation of every page."""
    width = pages.tree.width
    for node in pages.tree.nodes():
        for i, (slot, generation) in enumerate(zip(node.slots, node.generations, strict=True)):
            if slot != NO_SLOT:
                yield bytes(node.keys[i * width : (i + 1) * width]), (slot, generation)
    for key, page in pages.loose.items():
        yield key, (page.slot, page.generation)


def stored_along(pages: NamespacePages, keys: bytes) -> Mask:
    """Which pages of a rooted chain an index holds; changes nothing. The caller has its lock."""
    result = np.zeros(len(keys) // pages.tree.width, dtype=np.bool_)
    at = 0
    for node, length in pages.tree.pages_along(keys).items():
        slots = np.frombuffer(node.slots, dtype=np.uint64)[:length]
        result[at : at + length] = slots != NO_SLOT
        at += length
    if pages.loose:
        for i in np.flatnonzero(~result).tolist():
            result[i] = keys[i * pages.tree.width : (i + 1) * pages.tree.width] in pages.loose
    return result


def first_of_each(rows: npt.NDArray[np.uint8]) -> Mask:
    """Where each different row stands first."""
    packed = [row.tobytes() for row in rows]
    if len(set(packed)) == len(packed):
        return np.ones(len(packed), dtype=np.bool_)
    first = {row: i for i, row in reversed(list(enumerate(packed)))}
    return np.array([first[row] == i for i, row in enumerate(packed)], dtype=np.bool_)


def round_up(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
