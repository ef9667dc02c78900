"""SIEVE on a prefix tree: one queue, and a hand that spares what was used (Zhang, NSDI 2024).

The hand moves from the oldest run to the youngest, then starts over. A run it finds unused goes;
one that was used since it came past last stays where it is and needs another use. A run with
children is not met by the hand.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.base import Policy
from tutti_core.policies.queue import LeafQueue

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

_USED = 1


class Sieve(Policy):
    """Leaves before the hand and leaves behind it, both by the time they came.

    `run.rank` is when a run came; `run.queue` says whether it was used.
    """

    name: ClassVar[str] = "sieve"

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._ahead = LeafQueue()
        self._behind = LeafQueue()
        self._hand: tuple[float, int] = (-1, 0)
        """Rank and serial of the last leaf that was spared in this round."""

    def admitted(self, run: Node, pages: int, now: int) -> None:
        """See Policy."""
        if pages == len(run):
            run.queue, run.rank = 0, now

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        run.queue = _USED

    def enlist(self, leaf: Node) -> None:
        """See Policy."""
        behind = (leaf.rank, leaf.serial) <= self._hand
        (self._behind if behind else self._ahead).put(leaf, leaf.rank)

    def delist(self, leaf: Node) -> None:
        """See Policy."""
        (self._ahead if leaf in self._ahead else self._behind).remove(leaf)

    def victim(self, now: int) -> Node | None:
        """See Policy. A leaf is spared at most once a use."""
        if not len(self._ahead):
            self._start_over()
        while (leaf := self._ahead.first()) is not None and leaf.queue == _USED:
            self._ahead.remove(leaf)
            self._behind.put(leaf, leaf.rank)
            self._hand = (leaf.rank, leaf.serial)
            leaf.queue = 0
            if not len(self._ahead):
                self._start_over()
        return leaf

    def _start_over(self) -> None:
        self._ahead, self._behind = self._behind, self._ahead
        self._hand = (-1, 0)

    def listed(self) -> Collection[Node]:
        """See Policy."""
        return [*self._ahead, *self._behind]
