"""What a trial counts: what was tried, and what went wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

COMPLAINTS_MAX = 20
"""Descriptions kept; the counts go on."""


@dataclass(slots=True)
class Tally:
    """Counts of one trial, or of several added together.

    crash_points        places in a history at which everything was stopped and opened again.
    kills               processes ended by SIGKILL while they used a store.
    faults              faults injected, by kind.
    events              what else was done to it on purpose, by kind.
    bad_inputs          damaged or senseless inputs tried, by what they were given to.
    pages_compared      pages that were loaded and compared byte for byte.
    misses              pages that were asked for and answered as a miss.
    wrong_bytes         bytes handed out that were not those saved.
    durable_pages_lost  pages that a save had reported as durable, that nothing removed, and that
                        were a miss after a reopening although no fault touched them.
    complaints          everything else that must not happen, and a line on each of the above; the
                        first COMPLAINTS_MAX.

    Not thread-safe: each thread counts in its own and adds it at the end.
    """

    crash_points: int = 0
    kills: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    bad_inputs: Counter[str] = field(default_factory=Counter)
    pages_compared: int = 0
    misses: int = 0
    wrong_bytes: int = 0
    durable_pages_lost: int = 0
    complaint_count: int = 0
    complaints: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        """Note something that must not happen."""
        self.complaint_count += 1
        if len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.append(text)

    def compare(self, got: bytes | memoryview, wanted: bytes, what: str) -> None:
        """Count a page that was handed out, byte for byte."""
        self.pages_compared += 1
        if got != wanted:
            wrong = sum(a != b for a, b in zip(bytes(got), wanted, strict=False))
            self.wrong_bytes += wrong + abs(len(got) - len(wanted))
            self.complain(f"{what}: {wrong} wrong bytes")

    def lose(self, what: str, pages: int = 1) -> None:
        """Count durable pages that are gone."""
        self.durable_pages_lost += pages
        self.complain(f"{what}: {pages} durable pages lost")

    def add(self, other: Tally) -> None:
        """Add the counts of another trial."""
        self.crash_points += other.crash_points
        self.kills += other.kills
        self.faults.update(other.faults)
        self.events.update(other.events)
        self.bad_inputs.update(other.bad_inputs)
        self.pages_compared += other.pages_compared
        self.misses += other.misses
        self.wrong_bytes += other.wrong_bytes
        self.durable_pages_lost += other.durable_pages_lost
        self.complaint_count += other.complaint_count
        self.complaints = (self.complaints + other.complaints)[:COMPLAINTS_MAX]

    def check(self) -> None:
        """Raise AssertionError unless nothing went wrong."""
        if self.wrong_bytes or self.durable_pages_lost or self.complaint_count:
            raise AssertionError(
                "\n".join([f"{self.complaint_count} complaints", *self.complaints])
            )
