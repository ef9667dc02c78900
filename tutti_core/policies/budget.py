"""How many bytes may be written a day: a token bucket that keeps its word in every 24 hours.

Pure. Invariant: the grants of any 24 hours, wherever they begin and both ends included, add up to
at most `bytes_per_day`.

A bucket of B bytes that fills at r bytes a day grants at most B + r in any 24 hours. So B, the
burst, is what an hour has of the budget, and r is the rest: 23/24 of the budget is what can be
written day after day. A bucket starts empty, so the invariant holds across any number of restarts.
"""

from __future__ import annotations

DAY_NS = 86_400 * 1_000_000_000
BURSTS_PER_DAY = 24


class WriteBudget:
    """Grants of bytes to write. None or 0 sets no limit. Not thread-safe.

    Time is nanoseconds and may stand still or step back; nothing is granted for that.
    """

    def __init__(self, bytes_per_day: int | None) -> None:
        self.bytes_per_day = bytes_per_day or None
        self.burst_bytes = (bytes_per_day or 0) // BURSTS_PER_DAY
        """Most that is ever granted at once. A unit larger than this is never granted."""
        self._level = 0  # bytes times DAY_NS, so that filling needs no rounding
        self._filled_to: int | None = None

    def take(self, wanted_bytes: int, now: int, unit_bytes: int = 1) -> int:
        """Return how many of the bytes may be written now, in whole units; they are spent."""
        if self.bytes_per_day is None:
            return wanted_bytes
        self._fill(self.bytes_per_day - self.burst_bytes, now)
        granted = min(wanted_bytes, self._level // DAY_NS)
        granted -= granted % unit_bytes
        self._level -= granted * DAY_NS
        return granted

    def give_back(self, unused_bytes: int) -> None:
        """Bytes that were granted a moment ago were not written after all.

        The level is never above that of a bucket which had not granted them.
        """
        self._level = min(self._level + unused_bytes * DAY_NS, self.burst_bytes * DAY_NS)

    def _fill(self, bytes_per_day: int, now: int) -> None:
        if self._filled_to is None:
            self._filled_to = now
        elapsed = max(now - self._filled_to, 0)
        self._filled_to += elapsed
        self._level = min(self._level + elapsed * bytes_per_day, self.burst_bytes * DAY_NS)
