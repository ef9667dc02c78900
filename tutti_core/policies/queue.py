"""A queue of leaves ordered by rank: the piece that most policies are made of."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

_SLACK = 64


class LeafQueue:
    """Leaves by rising `rank`, the earlier made first among equals.

    A heap from which outdated entries are dropped when they come up; it is rebuilt when more than
    half of it is outdated. An entry is valid while the leaf is in the queue with that very rank.
    Cost       amortised O(log n) a change.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._leaves: dict[int, Node] = {}  # by serial

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves.values())

    def __contains__(self, leaf: Node) -> bool:
        return leaf.serial in self._leaves

    def put(self, leaf: Node, rank: float) -> None:
        """Add a leaf, or move it to another rank."""
        leaf.rank = rank
        self._leaves[leaf.serial] = leaf
        heapq.heappush(self._heap, (rank, leaf.serial, leaf))
        if len(self._heap) > 2 * len(self._leaves) + _SLACK:
            self._heap = [(each.rank, each.serial, each) for each in self._leaves.values()]
            heapq.heapify(self._heap)

    def remove(self, leaf: Node) -> None:
        """Take a leaf out; it keeps its rank."""
        del self._leaves[leaf.serial]

    def first(self) -> Node | None:
        """The leaf of the lowest rank; None if the queue is empty."""
        heap, leaves = self._heap, self._leaves
        while heap:
            rank, serial, leaf = heap[0]
            if leaf.rank == rank and leaves.get(serial) is leaf:
                return leaf
            heapq.heappop(heap)
        return None
