"""Leaf-first LRU: the run that was used least recently goes first. The yardstick of all others."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.base import Policy
from tutti_core.policies.queue import LeafQueue

if TYPE_CHECKING:
    from tutti_core.index.radix import Node


class Lru(Policy):
    """Least recently used leaf first; of equals, the one that was made first."""

    name: ClassVar[str] = "lru"

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._queue = LeafQueue()

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        if run.listed:
            self._queue.put(run, run.last_use)

    renewed = used

    def enlist(self, leaf: Node) -> None:
        """See Policy."""
        self._queue.put(leaf, leaf.last_use)

    def delist(self, leaf: Node) -> None:
        """See Policy."""
        self._queue.remove(leaf)

    def victim(self, now: int) -> Node | None:
        """See Policy."""
        return self._queue.first()

    def listed(self) -> Collection[Node]:
        """See Policy."""
        return list(self._queue)
