"""A hold: stored pages that stay until they are released, as between a look-up and its load."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from tutti_core.keys import PageKeys

if TYPE_CHECKING:
    from tutti_core.tiers.manager import Entry, Manager
    from tutti_core.tiers.stack import TierStack

_ATTEMPTS_MAX = 3


class Hold:
    """Pages from `first` on that are held; made by `NamespaceStore.hold`.

    Leaves of the tree go first, so the pin of its last page holds a run whose chain is known; pages
    that are known by their keys alone are pinned one by one. Where there are memory tiers, so is
    the whole chain: part of it may be a leaf of one tier while the last page is in another.
    Threads    any may release.
    """

    def __init__(
        self, placement: Manager | TierStack, entry: Entry, keys: PageKeys, first: int
    ) -> None:
        self._placement = placement
        self._entry = entry
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._pinned = b""
        self.pages = self._take(keys, first)
        """How many pages from `first` on are stored without a gap."""

    def _take(self, keys: PageKeys, first: int) -> int:
        """Pin, and look again whether what was found is still there: it may have gone before."""
        stored = self._placement.match(self._entry, keys.data, first, keys.rooted)
        for _ in range(_ATTEMPTS_MAX):
            if stored == 0:
                return 0
            low = first
            if keys.rooted:
                low = first + stored - 1 if self._placement.one_tree else 0
            self._pinned = keys.part(low, first + stored)
            self._placement.pin_pages(self._entry, self._pinned)
            held = keys.part(0, first + stored)
            now = self._placement.match(self._entry, held, first, keys.rooted)
            if now == stored:
                return stored
            self.release()
            stored = now
        return 0

    def release(self) -> None:
        """Let the pages go. Idempotent; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with self._lock:
            pinned, self._pinned = self._pinned, b""
        if pinned:
            self._placement.unpin(self._entry, pinned)
