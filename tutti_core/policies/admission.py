"""Which new pages are worth writing to the devices: filters that spare writes, not room.

Pure. A page that few will ask for again costs wear and device time all the same; it may stay in
memory. A page is of no use without its ancestors, so what is admitted is a front part of the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tutti_core.errors import ConfigError, nearest
from tutti_core.policies.sketch import U64, Sketch, page_hashes

Mask = npt.NDArray[np.bool_]


class Admission(ABC):
    """Says which pages to write.

    Parameters
        capacity_pages: how many pages the devices hold; what is remembered of pages that were not
            written is bounded by it.
        seed: for those that hash.
    """

    name: ClassVar[str]

    def __init__(self, capacity_pages: int, seed: int = 0) -> None:
        self.capacity_pages = max(capacity_pages, 1)

    def admit(self, keys: bytes, width: int, first: int, now: int) -> Mask:
        """Whether to write pages `first` .. end of a chain; asking counts as a sight of each.

        The pages before `first` are taken to be stored.

        Parameters
            keys: packed chain from its first page on; keys of 8 bytes or more that are hashes.
            now: the time in nanoseconds.
        Returns
            one entry a page; True up to some page, False from there on.
        Cost       array work, linear in the pages asked for.
        """
        return np.logical_and.accumulate(self.wanted(page_hashes(keys, width, first), now))

    @abstractmethod
    def wanted(self, pages: U64, now: int) -> Mask:
        """Whether to write each page, were it alone."""


class Always(Admission):
    """Write everything."""

    name: ClassVar[str] = "always"

    def wanted(self, pages: U64, now: int) -> Mask:
        """See Admission."""
        return np.ones(len(pages), dtype=np.bool_)


class SecondTouch(Admission):
    """Write a page when it is seen again before `capacity_pages` other pages were.

    Two sets take turns, so a page may be remembered up to twice as long.
    """

    name: ClassVar[str] = "second_touch"

    def __init__(self, capacity_pages: int, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._now = Bloom(self.capacity_pages, seed)
        self._before = Bloom(self.capacity_pages, seed)

    def wanted(self, pages: U64, now: int) -> Mask:
        """See Admission."""
        seen = self._now.has(pages)
        fresh = pages[~seen]
        seen |= self._before.has(pages)
        while len(fresh):
            fresh = fresh[self._remember(fresh) :]
        return seen

    def _remember(self, pages: U64) -> int:
        """Add as many as the newer set has room for; returns how many."""
        if self._now.count == self.capacity_pages:
            self._now, self._before = self._before, self._now
            self._now.clear()
        room = self.capacity_pages - self._now.count
        self._now.add(pages[:room])
        return room


class Frequency(Admission):
    """Write a page once it was seen `sights_min` times of late.

    Half of all sights are forgotten each time that twice the capacity was seen. The period is
    shorter than that of a policy, as what was seen once must not look like more.
    """

    name: ClassVar[str] = "frequency"
    sights_min: ClassVar[int] = 2
    """As in Mooncake's count-min gate."""

    def __init__(self, capacity_pages: int, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._sketch = Sketch(2 * self.capacity_pages, seed, period=1)

    def wanted(self, pages: U64, now: int) -> Mask:
        """See Admission."""
        self._sketch.add_all(pages)
        return self._sketch.estimate_all(pages) >= self.sights_min


class Bloom:
    """A set of up to `pages_max` keys that may hold others too: one in 400 when it is full.

    Bloom, CACM 1970; 16 bits a page and four probes.
    """

    def __init__(self, pages_max: int, seed: int = 0) -> None:
        self.count = 0
        self._bit_count = np.uint64(max(16 * pages_max, 64))
        self._bytes = np.zeros(int(self._bit_count) // 8 + 1, dtype=np.uint8)
        draw = np.random.default_rng(seed)
        self._factors = draw.integers(0, 1 << 63, 4, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

    def has(self, pages: U64) -> Mask:
        """Which of the keys were added, or look like it."""
        at = self._probes(pages)
        found = self._bytes[at >> np.uint64(3)] >> (at & np.uint64(7)).astype(np.uint8) & 1
        return np.asarray(found.all(axis=1), dtype=np.bool_)

    def add(self, pages: U64) -> None:
        """Put keys in."""
        at = self._probes(pages)
        bits = np.uint8(1) << (at & np.uint64(7)).astype(np.uint8)
        np.bitwise_or.at(self._bytes, at >> np.uint64(3), bits)
        self.count += len(pages)

    def clear(self) -> None:
        """Take all keys out."""
        self._bytes[:] = 0
        self.count = 0

    def _probes(self, pages: U64) -> U64:
        mixed: U64 = pages[:, None] * self._factors
        probes: U64 = (mixed ^ mixed >> np.uint64(32)) % self._bit_count
        return probes


ADMISSIONS: dict[str, type[Admission]] = {
    admission.name: admission for admission in (Always, SecondTouch, Frequency)
}


def make_admission(name: str, capacity_pages: int, seed: int = 0) -> Admission:
    """Return a new filter.

    Raises
        ConfigError: there is none of that name.
    """
    admission = ADMISSIONS.get(name)
    if admission is None:
        raise ConfigError(f"no admission is called {name!r}", hint=nearest(name, ADMISSIONS))
    return admission(capacity_pages, seed)
