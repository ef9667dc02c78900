"""W-TinyLFU on a prefix tree: a newcomer must be wanted more (Einziger et al., ACM ToS 2017).

New runs enter a small LRU window. What leaves the window fights the oldest run on probation of a
segmented LRU: the one that was seen less often, lately and whether it was stored or not, goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.segments import SegmentPolicy
from tutti_core.policies.sketch import Sketch

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

_WINDOW, _PROBATION, _PROTECTED = range(3)


class TinyLfu(SegmentPolicy):
    """A window, probation and protection; a sketch of how often runs were seen.

    A run is counted under its first page. Where one is cut, both parts go on with its count.
    """

    name: ClassVar[str] = "tinylfu"
    segment_count = 3
    window_share: ClassVar[float] = 0.01
    protected_share: ClassVar[float] = 0.8
    """Of what is not in the window."""

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._sketch = Sketch(capacity_pages, seed)
        self._roomy = True
        """Nothing had to go yet, so what leaves the window need not fight."""

    def resize(self, capacity_pages: int) -> None:
        """See Policy."""
        self._roomy = self._roomy or capacity_pages > self.capacity_pages
        super().resize(capacity_pages)
        self._sketch.resize(capacity_pages)

    def arrived(self, run: Node, now: int) -> None:
        """See SegmentPolicy."""
        self._sketch.add(_name_of(run), len(run))
        self.place(run, _WINDOW, now)
        if self._roomy:
            self._shrink_window(now)

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        self._sketch.add(_name_of(run), len(run))
        segment = _WINDOW if run.queue == _WINDOW else _PROTECTED
        self.place(run, segment, run.last_use)

    def renewed(self, run: Node, now: int) -> None:
        """See Policy."""
        self.place(run, run.queue, run.last_use)

    def split(self, upper: Node, lower: Node) -> None:
        """See Policy."""
        super().split(upper, lower)
        self._sketch.raise_to(_name_of(lower), self._seen(upper))

    def evicted(self, leaf: Node, pages: int, now: int) -> None:
        """See Policy. Where something of the main part goes, what fought it takes the place."""
        winner = self._outside_window() if leaf.queue != _WINDOW else None
        super().evicted(leaf, pages, now)
        if winner is not None:
            self.place(winner, _PROBATION, now)
        if pages < len(leaf):
            self._sketch.raise_to(_name_of(leaf, len(leaf) - pages), self._seen(leaf))

    def victim(self, now: int) -> Node | None:
        """See Policy. A leaf is put back on probation at most once a use."""
        self._roomy = False
        resident, candidate = self._oldest_in_main(now), self._outside_window()
        if resident is None or candidate is None:
            return resident or self.queues[_WINDOW].first()
        return candidate if self._seen(candidate) <= self._seen(resident) else resident

    def _outside_window(self) -> Node | None:
        """The oldest leaf of the window if that is too large."""
        window = self.queues[_WINDOW]
        return window.first() if window.page_count > self.window_share * self.page_count() else None

    def _shrink_window(self, now: int) -> None:
        while (leaf := self._outside_window()) is not None:
            self.place(leaf, _PROBATION, now)

    def _oldest_in_main(self, now: int) -> Node | None:
        """The next to go of the segmented LRU, after protection has given back what is too much."""
        _, probation, protected = self.queues
        share = self.protected_share
        while protected.page_count > share * (probation.page_count + protected.page_count):
            oldest = protected.first()
            if oldest is None:
                break
            self.place(oldest, _PROBATION, now)
        return probation.first() or protected.first()

    def _seen(self, run: Node) -> int:
        return self._sketch.estimate(_name_of(run))


def _name_of(run: Node, page: int = 0) -> int:
    """The number under which the run that starts with this page is counted."""
    width = len(run.keys) // len(run)
    return int.from_bytes(run.keys[page * width : page * width + min(width, 8)], "little")
