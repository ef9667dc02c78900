"""Room in a ring of bytes: handed out in order, given back in any order, reused in order.

Pure arithmetic on offsets; it holds no memory. Not thread-safe.

Invariants
    - Pieces that are out never overlap, and each lies in one run of bytes.
    - What is free is the run from the end of the newest piece to the start of the oldest that is
      out. So a piece's space comes back with that of all pieces before it.
"""

from __future__ import annotations

ALIGN_BYTES = 4096
"""Pieces start on this, so that storage moves their bytes without a bounce."""


class Ring:
    """Offsets into `length_bytes` of memory, a positive multiple of ALIGN_BYTES."""

    def __init__(self, length_bytes: int) -> None:
        if length_bytes <= 0 or length_bytes % ALIGN_BYTES:
            raise ValueError(f"a ring of {length_bytes} bytes; multiples of {ALIGN_BYTES} work")
        self.length_bytes = length_bytes
        self._out: dict[int, None] = {}
        """Where the pieces that are out start; a dict keeps their order, oldest first."""
        self._next = 0

    def __len__(self) -> int:
        """Pieces that are out."""
        return len(self._out)

    def take(self, length_bytes: int) -> int | None:
        """Return where a piece starts, or None while there is no room for it. O(1)."""
        if length_bytes <= 0:
            raise ValueError(f"a piece of {length_bytes} bytes")
        size = -(-length_bytes // ALIGN_BYTES) * ALIGN_BYTES
        start = self._place(size)
        if start is not None:
            self._next = start + size
            self._out[start] = None
        return start

    def _place(self, size: int) -> int | None:
        if not self._out:
            return 0 if size <= self.length_bytes else None
        oldest = next(iter(self._out))
        if self._next > oldest:  # free: from next to the end, and from 0 to the oldest
            if self._next + size <= self.length_bytes:
                return self._next
            return 0 if size <= oldest else None
        return self._next if self._next + size <= oldest else None

    def give(self, start: int) -> None:
        """Take a piece back. O(1). Raises KeyError if none that is out starts there."""
        del self._out[start]
