"""LRU-2 on a prefix tree: the run whose last use but one is oldest goes first (SIGMOD 1993).

A run that was used once has no last use but one, so it goes before all that were used twice; among
such, the least recently used goes first. Shadows keep the history of what was evicted, as the
original does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.base import Policy
from tutti_core.policies.queue import LeafQueue

if TYPE_CHECKING:
    from tutti_core.index.radix import Node


class Lru2(Policy):
    """Oldest last use but one first."""

    name: ClassVar[str] = "lru2"
    shadow_share: ClassVar[float] = 1.0

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._once = LeafQueue()
        self._again = LeafQueue()

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        if run.listed:
            self.delist(run)
            self.enlist(run)

    renewed = used

    def enlist(self, leaf: Node) -> None:
        """See Policy."""
        if leaf.uses > 1:
            self._again.put(leaf, leaf.previous_use)
        else:
            self._once.put(leaf, leaf.last_use)

    def delist(self, leaf: Node) -> None:
        """See Policy."""
        queue = self._once if leaf in self._once else self._again
        queue.remove(leaf)

    def victim(self, now: int) -> Node | None:
        """See Policy."""
        return self._once.first() or self._again.first()

    def listed(self) -> Collection[Node]:
        """See Policy."""
        return [*self._once, *self._again]
