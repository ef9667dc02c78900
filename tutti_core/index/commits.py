"""Whether the file system takes the catalog's commits, and how many records it has room for.

Pure but for the clock. A commit that fails for any reason but a lack of room says that the catalog
cannot be written now: read-only, unplugged, broken. Then nothing is evicted or saved, for no
eviction could be recorded; what is stored is served on. After a pause one small commit is tried.

A file that cannot grow is no such case: fewer records fit. The bound is lowered to what fits, and
rises again by steps, for whoever filled the disk may have made room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSE_FIRST_S = 1.0
PAUSE_LAST_S = 60.0
"""Time to the first attempt; it doubles with each that fails, up to this."""

ROOM_PAUSE_S = 10.0
ROOM_STEPS = 16
"""How often the bound on records rises, by which part of the most there can be; and the least time
between two times that it is lowered."""


class Commits:
    """State of one catalog's commits. Threads: any."""

    def __init__(self, records_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._most = records_max
        self._bound = records_max
        self._bound_at_s = -ROOM_PAUSE_S
        self._reason = ""
        self._pause_s = PAUSE_FIRST_S
        self._next_s = 0.0
        self._began_s: float | None = None

    # ---- whether commits are taken ----
    def begin(self) -> None:
        """A commit begins."""
        self._began_s = self._clock()

    def end(self, reason: str | None) -> None:
        """A commit has ended: well (""), refused for that reason, or as if it had not been (None).

        What is refused for a lack of room counts as well.
        """
        with self._lock:
            self._began_s = None
            if reason is None:
                return
            if not reason:
                self._reason, self._pause_s = "", PAUSE_FIRST_S
                return
            self._pause_s = min(2 * self._pause_s, PAUSE_LAST_S) if self._reason else PAUSE_FIRST_S
            self._reason = reason
            self._next_s = self._clock() + self._pause_s

    @property
    def refused(self) -> bool:
        """Whether the last commit was refused."""
        return bool(self._reason)

    @property
    def due(self) -> bool:
        """Whether it is time to try one again."""
        return self._clock() >= self._next_s

    def unwell(self, stall_s: float) -> str:
        """For people: why the catalog cannot be written; "" while it can."""
        began_s = self._began_s
        if began_s is not None and self._clock() - began_s >= stall_s:
            return f"a commit takes {self._clock() - began_s:.0f} s"
        return self._reason

    # ---- how many records there is room for ----
    @property
    def records_max(self) -> int:
        """The bound on records now."""
        if self._bound < self._most:
            with self._lock:
                steps = int((self._clock() - self._bound_at_s) / ROOM_PAUSE_S)
                if steps > 0 and self._bound < self._most:
                    rise = steps * max(self._most // ROOM_STEPS, 1)
                    self._bound = min(self._bound + rise, self._most)
                    self._bound_at_s += steps * ROOM_PAUSE_S
        return self._bound

    def grow(self, records_max: int) -> None:
        """The file may be larger than was known: another process was given more room."""
        if records_max > self._most:
            with self._lock:
                self._most = self._bound = max(records_max, self._most)

    def note_full(self, records: int) -> None:
        """The file could not grow although there are only so many records: keep fewer."""
        with self._lock:
            if self._bound < self._most and self._clock() - self._bound_at_s < ROOM_PAUSE_S:
                return  # one look at a full disk is enough; it was lowered just now
            self._bound = min(self._bound, records * 15 // 16)
            self._bound_at_s = self._clock()
