"""Policies made of several queues: `run.queue` names the queue, `run.rank` the place in it.

Both stay with a run while it is off the list, so it comes back to where it was. The size of a queue
is the pages of the leaves in it: a run with children is in no queue, as the tree protects it
already. Shares, too, are of the pages of all leaves.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.base import Policy
from tutti_core.policies.queue import LeafQueue

if TYPE_CHECKING:
    from tutti_core.index.radix import Node


class SizedQueue(LeafQueue):
    """A queue that knows how many pages its leaves have.

    A leaf counts with the pages it had when it was put in or `recount`ed, so the sum is right again
    after the next call for a leaf that shrank unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.page_count = 0
        self._pages: dict[int, int] = {}  # by serial

    def put(self, leaf: Node, rank: float) -> None:
        """See LeafQueue."""
        super().put(leaf, rank)
        self.recount(leaf, len(leaf))

    def remove(self, leaf: Node) -> None:
        """See LeafQueue."""
        super().remove(leaf)
        self.page_count -= self._pages.pop(leaf.serial)

    def recount(self, leaf: Node, pages: int) -> None:
        """A leaf that is in the queue has so many pages now."""
        self.page_count += pages - self._pages.get(leaf.serial, 0)
        self._pages[leaf.serial] = pages


class SegmentPolicy(Policy):
    """A policy of `segment_count` queues; what goes where is left to `arrived`, `used`, `victim`.

    `run.queue` holds the number of the queue in its lowest two bits; those above are free for the
    policy, and are cleared by `place`.
    """

    segment_count: ClassVar[int]

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self.queues = [SizedQueue() for _ in range(self.segment_count)]

    def arrived(self, run: Node, now: int) -> None:
        """`run` is new in the tree; give it its place."""
        self.place(run, 0, now)

    def place(self, run: Node, segment: int, rank: float) -> None:
        """Move a run, listed or not, to a place in a queue."""
        if not run.listed:
            run.queue, run.rank = segment, rank
            return
        if run.queue & 3 != segment:
            self.queues[run.queue & 3].remove(run)
        run.queue = segment
        self.queues[segment].put(run, rank)

    def page_count(self) -> int:
        """Pages of all leaves."""
        return sum(queue.page_count for queue in self.queues)

    def admitted(self, run: Node, pages: int, now: int) -> None:
        """See Policy."""
        if pages == len(run):
            self.arrived(run, now)
        elif run.listed:
            self.queues[run.queue & 3].recount(run, len(run))

    def split(self, upper: Node, lower: Node) -> None:
        """See Policy."""
        super().split(upper, lower)
        if lower.listed:
            self.queues[lower.queue & 3].recount(lower, len(lower))

    def evicted(self, leaf: Node, pages: int, now: int) -> None:
        """See Policy."""
        if leaf.listed:
            self.queues[leaf.queue & 3].recount(leaf, len(leaf) - pages)

    def enlist(self, leaf: Node) -> None:
        """See Policy."""
        self.queues[leaf.queue & 3].put(leaf, leaf.rank)

    def delist(self, leaf: Node) -> None:
        """See Policy."""
        self.queues[leaf.queue & 3].remove(leaf)

    def listed(self) -> Collection[Node]:
        """See Policy."""
        return [leaf for queue in self.queues for leaf in queue]
