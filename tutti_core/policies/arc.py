"""ARC on a prefix tree: the split between new and used again adapts (Megiddo, Modha, FAST 2003).

Runs used once and runs used again are two LRU lists. What comes back soon after it was evicted
shows which list was too small, and moves the share that the first may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.segments import SegmentPolicy

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

_ONCE, _AGAIN = range(2)


class Arc(SegmentPolicy):
    """Two LRU lists, and shadows of as many pages again that move the split between them."""

    name: ClassVar[str] = "arc"
    segment_count = 2
    shadow_share: ClassVar[float] = 1.0

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self.once_share = 0.0
        """What the list of runs used once may have, of the pages of all leaves."""
        self._gone = [0.0, 0.0]
        """Evicted pages remembered of each list. The shadows forget without a word, so both shrink
        in proportion where there are more than can be remembered."""

    def arrived(self, run: Node, now: int) -> None:
        """See SegmentPolicy."""
        if run.uses > 1:
            self._adapt(run.queue & 3, len(run))
            self.place(run, _AGAIN, now)
        else:
            self.place(run, _ONCE, now)

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        self.place(run, _AGAIN, run.last_use)

    def renewed(self, run: Node, now: int) -> None:
        """See Policy."""
        self.place(run, run.queue, run.last_use)

    def evicted(self, leaf: Node, pages: int, now: int) -> None:
        """See Policy."""
        super().evicted(leaf, pages, now)
        self._gone[leaf.queue] += pages
        excess = sum(self._gone) / max(self.capacity_pages, 1)
        if excess > 1:
            self._gone = [pages / excess for pages in self._gone]

    def victim(self, now: int) -> Node | None:
        """See Policy."""
        once, again = self.queues
        if once.page_count > self.once_share * self.page_count():
            return once.first() or again.first()
        return again.first() or once.first()

    def _adapt(self, queue: int, pages: int) -> None:
        """`pages` that went from `queue` came back: it gets a larger share."""
        mine, other = self._gone[queue], self._gone[1 - queue]
        step = pages * max(1.0, other / max(mine, 1.0)) / max(self.capacity_pages, 1)
        self._gone[queue] = max(mine - pages, 0.0)
        share = self.once_share + (step if queue == _ONCE else -step)
        self.once_share = min(max(share, 0.0), 1.0)
