"""Segmented LRU on a prefix tree (Karedla, Love and Wherry, IEEE Computer 1994).

A run starts on probation and is protected once it is used again. Runs go from the old end of
probation; where the protected have more than their share, their oldest is put back on probation, at
its young end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.segments import SegmentPolicy

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

_PROBATION, _PROTECTED = range(2)


class Slru(SegmentPolicy):
    """Two LRU queues; what was used again may have most of the room, but not for ever."""

    name: ClassVar[str] = "slru"
    segment_count = 2
    protected_share: ClassVar[float] = 0.8
    """Most that may be protected, of the pages of all leaves; 60 to 80 % in the paper."""

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        self.place(run, _PROTECTED, run.last_use)

    def renewed(self, run: Node, now: int) -> None:
        """See Policy."""
        self.place(run, run.queue, run.last_use)

    def victim(self, now: int) -> Node | None:
        """See Policy. A leaf is put back on probation at most once a use."""
        probation, protected = self.queues
        while protected.page_count > self.protected_share * self.page_count():
            oldest = protected.first()
            if oldest is None:
                break
            self.place(oldest, _PROBATION, now)
        return probation.first() or protected.first()
