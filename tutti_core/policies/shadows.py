"""Shadows of evicted runs: what was known of their use, should they come back.

Pure. Bounded in pages, and in number; the shadow that was made first is forgotten first. A shadow
is found by the key of its first page, which names the whole prefix before it; of the others four
bytes are kept, to see how far the run that comes back is the same. (A wrong answer, one in four
billion, costs a wrong guess of a policy.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

RUN_PAGES = 4
"""There is at most one shadow for so many pages of the bound: each costs some hundred bytes."""

_DIGEST_BYTES = 4


@dataclass(frozen=True, slots=True)
class Shadow:
    """History of a run that was evicted; fields as in Node. `gone` is when it was evicted."""

    digests: bytes
    born: int
    last_use: int
    previous_use: int
    uses: int
    queue: int
    gone: int

    def __len__(self) -> int:
        return len(self.digests) // _DIGEST_BYTES


class Shadows:
    """Shadows of up to `pages_max` evicted pages of one tree.

    Cost       O(log pages) a run, and a copy of four bytes a page.
    """

    def __init__(self, pages_max: int) -> None:
        self.pages_max = pages_max
        self.page_count = 0
        self._runs: OrderedDict[bytes, Shadow] = OrderedDict()  # by first key; oldest first
        self.dropped: Callable[[Shadow, int], None] | None = None
        """Told of each shadow, and the time, that is forgotten for want of room."""

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Shadow]:
        return iter(self._runs.values())

    def remember(self, run: Node, first: int, width: int, queue: int, now: int) -> None:
        """The pages of `run` from `first` on are evicted; `queue` is for the policy."""
        key = bytes(run.keys[first * width : (first + 1) * width])
        self._drop(self._runs.pop(key, None), now)
        self._runs[key] = Shadow(
            _digests(run.keys, first, len(run), width),
            run.born,
            run.last_use,
            run.previous_use,
            run.uses,
            queue,
            now,
        )
        self.page_count += len(run) - first
        while self.page_count > self.pages_max or len(self._runs) > self.pages_max / RUN_PAGES:
            self._drop(self._runs.popitem(last=False)[1], now)

    def _drop(self, shadow: Shadow | None, now: int) -> None:
        if shadow is not None:
            self.page_count -= len(shadow)
            if self.dropped is not None:
                self.dropped(shadow, now)

    def check(self) -> None:
        """Raise AssertionError unless pages are counted and bounded; for tests."""
        assert self.page_count == sum(len(shadow) for shadow in self._runs.values())

    def recall(self, keys: bytes, width: int, take: bool = True) -> list[tuple[int, Shadow | None]]:
        """Cut a run that comes into parts of one history each.

        Parameters
            take: the run comes now: its shadows are given up, without a word to `dropped`.
        Returns
            (pages, shadow) in order; the shadow is None for pages that are not known.
        """
        count, at = len(keys) // width, 0
        parts: list[tuple[int, Shadow | None]] = []
        while at < count:
            key = keys[at * width : (at + 1) * width]
            shadow = self._runs.get(key)
            if shadow is None:
                # Shadows of one chain follow each other; where one is missing, nothing follows.
                parts.append((count - at, None))
                break
            if take:
                del self._runs[key]
                self.page_count -= len(shadow)
            same = _equal_pages(shadow.digests, _digests(keys, at, count, width))
            parts.append((same, shadow))
            at += same
        return parts


def _digests(keys: bytes | bytearray, first: int, stop: int, width: int) -> bytes:
    rows = np.frombuffer(keys, dtype=np.uint8)[first * width : stop * width].reshape(-1, width)
    return rows[:, :_DIGEST_BYTES].tobytes()


def _equal_pages(one: bytes, other: bytes) -> int:
    """How many leading digests agree; at least 1, as the first keys do."""
    low = 1
    high = min(len(one), len(other)) // _DIGEST_BYTES
    if one[: high * _DIGEST_BYTES] == other[: high * _DIGEST_BYTES]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[: middle * _DIGEST_BYTES] == other[: middle * _DIGEST_BYTES]:
            low = middle
        else:
            high = middle
    return low
