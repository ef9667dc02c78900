"""How often keys were seen lately, in bounded memory: a count-min sketch that ages.

Cormode and Muthukrishnan (J. Algorithms 2005), with conservative update, counters of 15 at most and
halving as in TinyLFU (Einziger, Friedman and Manes, ACM ToS 2017). Pure; seeded. An estimate is
never too low but for halving.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Counters = npt.NDArray[np.uint8]

_ROWS = 4
_COUNT_MAX = 15
_MASK = (1 << 64) - 1


def page_hashes(keys: bytes | bytearray, width: int, first: int = 0) -> U64:
    """One number a page, from `first` on: the start of its key, which is a hash already."""
    rows = np.frombuffer(keys, dtype=np.uint8).reshape(-1, width)[first:, :8]
    return np.ascontiguousarray(rows).view(np.uint64).ravel()


class Sketch:
    """Estimates for keys of 64 bits.

    Four bytes for each page of capacity, up to a power of two: good for about as many different
    keys in a period.

    Parameters
        period: counters are halved after so many additions for each page of capacity; ten in the
            paper.
    """

    def __init__(self, capacity_pages: int, seed: int = 0, period: int = 10) -> None:
        draw = random.Random(seed)
        self._factors = [draw.getrandbits(64) | 1 for _ in range(_ROWS)]
        self._since_halving = 0
        self.period = period
        self.capacity_pages = capacity_pages
        self._bits = _bits_for(capacity_pages)
        self._rows = [np.zeros(1 << self._bits, dtype=np.uint8) for _ in range(_ROWS)]

    def add(self, key: int, weight: int = 1) -> None:
        """Count a key once more; it stands for `weight` pages when it comes to ageing."""
        cells = self._cells(key)
        least = min(row[at] for row, at in cells)
        if least < _COUNT_MAX:
            for row, at in cells:
                if row[at] == least:
                    row[at] = least + 1
        self._age(weight)

    def estimate(self, key: int) -> int:
        """How often a key was counted; 15 for all above."""
        return int(min(row[at] for row, at in self._cells(key)))

    def raise_to(self, key: int, count: int) -> None:
        """A key was counted `count` times or more, under another name."""
        for row, at in self._cells(key):
            row[at] = max(int(row[at]), count)

    def add_all(self, keys: U64) -> None:
        """Count each of many different keys once more."""
        count = np.minimum(self.estimate_all(keys) + np.uint8(1), np.uint8(_COUNT_MAX))
        for row, cells in zip(self._rows, self._all_cells(keys), strict=True):
            np.maximum.at(row, cells, count)
        self._age(len(keys))

    def estimate_all(self, keys: U64) -> Counters:
        """How often each key was counted."""
        cells = self._all_cells(keys)
        found = [row[at] for row, at in zip(self._rows, cells, strict=True)]
        least: Counters = np.minimum.reduce(found)
        return least

    def resize(self, capacity_pages: int) -> None:
        """Serve another capacity; estimates never fall, and hold where it grows."""
        bits, self.capacity_pages = _bits_for(capacity_pages), capacity_pages
        # A cell is named by the upper bits of a product: neighbours are one cell with a bit less.
        if bits > self._bits:
            self._rows = [np.repeat(row, 1 << (bits - self._bits)) for row in self._rows]
        elif bits < self._bits:
            self._rows = [row.reshape(1 << bits, -1).max(axis=1) for row in self._rows]
        self._bits = bits

    def _age(self, pages: int) -> None:
        self._since_halving += pages
        if self._since_halving >= self.period * self.capacity_pages:
            self._since_halving //= 2
            for row in self._rows:
                row >>= 1

    def _cells(self, key: int) -> list[tuple[Counters, int]]:
        shift = 64 - self._bits
        places = [(key * factor & _MASK) >> shift for factor in self._factors]
        return list(zip(self._rows, places, strict=True))

    def _all_cells(self, keys: U64) -> list[npt.NDArray[np.int64]]:
        shift = np.uint64(64 - self._bits)
        return [(keys * np.uint64(f) >> shift).astype(np.int64) for f in self._factors]


def _bits_for(capacity_pages: int) -> int:
    return max(capacity_pages, 64).bit_length()
