"""S3-FIFO on a prefix tree: a small queue sifts what the main one keeps (Yang et al., SOSP 2023).

New runs enter the small queue. At its end, a run that was used more than once there moves to the
main queue; any other goes, and its ghost is kept. A run that comes back while it has a ghost enters
the main queue at once. At the end of the main queue a run that was used goes round again, for one
use less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.segments import SegmentPolicy

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

_SMALL, _MAIN = range(2)
_USE = 4
"""One use, in `run.queue`: the uses that count stand above the number of the queue."""
_USES_MAX = 3


class S3Fifo(SegmentPolicy):
    """Two FIFO queues, and a ghost as large as the main one."""

    name: ClassVar[str] = "s3fifo"
    segment_count = 2
    small_share: ClassVar[float] = 0.1
    shadow_share: ClassVar[float] = 0.9

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._turn = 0

    def arrived(self, run: Node, now: int) -> None:
        """See SegmentPolicy. What went from the main queue has no ghost, whatever is remembered."""
        if run.uses > 1 and run.queue & 3 == _SMALL:
            self.place(run, _MAIN, self._next_turn(now))
        else:
            self.place(run, _SMALL, now)

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        if run.queue < _USES_MAX * _USE:
            run.queue += _USE

    def victim(self, now: int) -> Node | None:
        """See Policy. A leaf is moved on at most once a use."""
        while (leaf := self._oldest()) is not None:
            uses, in_main = leaf.queue // _USE, leaf.queue & 3 == _MAIN
            if uses < (1 if in_main else 2):
                return leaf
            self.place(leaf, _MAIN, self._next_turn(now))
            if in_main:
                leaf.queue += (uses - 1) * _USE
        return None

    def _oldest(self) -> Node | None:
        """The end of the small queue, or of the main one while the small one is below its share."""
        small, main = self.queues
        if small.page_count < self.small_share * self.page_count():
            return main.first() or small.first()
        return small.first() or main.first()

    def _next_turn(self, now: int) -> int:
        """A place at the young end of the main queue."""
        self._turn = max(self._turn + 1, now)
        return self._turn
