"""Batches for tests: items as objects, and memory whose every unused byte is guarded.

`Arena` hands out fragments at odd addresses from one poisoned array. A byte that is in no fragment
must keep its poison; `check_guards` says where it did not.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_core.io.transport import BLOCK_BYTES, Batch, Op

POISON = 0xA5
GAP_BYTES_MAX = 67
"""Largest guard between two fragments; some are 0, so that neighbours in memory occur too."""

Fragment = tuple[int, int]
"""Place and length of a fragment inside an arena, in bytes."""


def extent_bytes(length_bytes: int) -> int:
    """Bytes that an item of `length_bytes` occupies on a device."""
    return -(-length_bytes // BLOCK_BYTES) * BLOCK_BYTES


def split(rng: random.Random, total_bytes: int, parts: int) -> list[int]:
    """Cut `total_bytes` into `parts` random lengths, each at least 1."""
    cuts = sorted(rng.sample(range(1, total_bytes), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total_bytes], strict=True)]


class Arena:
    """One array of poisoned memory, carved into fragments with guards between them."""

    def __init__(self, size_bytes: int, rng: random.Random) -> None:
        self.memory: npt.NDArray[np.uint8] = np.full(size_bytes, POISON, np.uint8)
        self._used = np.zeros(size_bytes, np.bool_)
        self._rng = rng
        self._next = 1  # so that the first fragment is not aligned to anything

    @property
    def address(self) -> int:
        """Virtual address of the first byte."""
        return int(self.memory.ctypes.data)

    def carve(self, lengths: Iterable[int]) -> list[Fragment]:
        """Take one fragment per length; their order in memory is not the order of the result."""
        wanted = list(enumerate(lengths))
        self._rng.shuffle(wanted)
        taken: dict[int, Fragment] = {}
        for index, length in wanted:
            place = self._next + self._rng.choice((0, self._rng.randrange(GAP_BYTES_MAX + 1)))
            self._next = place + length
            if self._next >= len(self.memory):
                raise ValueError("the arena is too small for this check")
            self._used[place : self._next] = True
            taken[index] = (place, length)
        return [taken[index] for index in range(len(taken))]

    def claim(self, fragment: Fragment) -> None:
        """Take one fragment at a place of the caller's choice; do not carve after it."""
        self._used[fragment[0] : sum(fragment)] = True

    def put(self, fragments: Sequence[Fragment], data: bytes) -> None:
        """Spread `data` over the fragments, in order."""
        done = 0
        for place, length in fragments:
            self.memory[place : place + length] = np.frombuffer(data, np.uint8, length, done)
            done += length

    def get(self, fragments: Sequence[Fragment]) -> bytes:
        """Gather the bytes of the fragments, in order."""
        return b"".join(self.memory[place : place + size].tobytes() for place, size in fragments)

    def check_guards(self) -> None:
        """Raise AssertionError if a byte outside all fragments was written."""
        bad = np.flatnonzero((self.memory != POISON) & ~self._used)
        if len(bad):
            raise AssertionError(
                f"{len(bad)} bytes outside the fragments were written, the first at {int(bad[0])}"
            )


@dataclass(frozen=True, slots=True)
class Item:
    """One transfer of a batch to be made by `make_batch`."""

    device: int
    offset_bytes: int
    fragments: Sequence[Fragment]

    @property
    def length_bytes(self) -> int:
        """Sum of the fragments' lengths."""
        return sum(length for _, length in self.fragments)


def make_batch(op: Op, arena: Arena, items: Sequence[Item], *, checksum: bool = True) -> Batch:
    """Make the arrays of a batch whose fragments lie in `arena`."""
    counts = [len(item.fragments) for item in items]
    pieces = [fragment for item in items for fragment in item.fragments]
    return Batch(
        op=op,
        device=np.array([item.device for item in items], np.uint32),
        offset_bytes=np.array([item.offset_bytes for item in items], np.uint64),
        fragment_start=np.cumsum([0, *counts]).astype(np.uint32),
        address=np.array([arena.address + place for place, _ in pieces], np.uint64),
        length_bytes=np.array([length for _, length in pieces], np.uint64),
        checksum=checksum,
    )
