"""Device bytes in memory: what a read sees, what survives power loss, and what may survive it.

Invariants
    - `flush` makes exactly the bytes that are visible at that moment durable.
    - After `lose_power`, a block holds its durable content, the content after any one write since
      the last flush, or, torn between sectors, a mix of two of these in order of time.
    - Blocks that were not written since the last flush never change in a power loss.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tutti_core.io.transport import BLOCK_BYTES

SECTOR_BYTES = 512
"""A device writes this much or nothing; a block is several of them."""

VERSIONS_MAX = 8
"""Contents remembered per unflushed block; of more, the oldest are forgotten."""

Bytes = npt.NDArray[np.uint8]


class Media:
    """The bytes of some devices. Outlives the transports that are opened on it.

    Every method expects the caller to hold `lock`, which all transports on this media share.
    """

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        self.capacities_bytes = tuple(capacities_bytes)
        self.lock = threading.RLock()
        self._visible: list[Bytes] = [np.zeros(size, np.uint8) for size in capacities_bytes]
        self._durable: list[Bytes] = [np.zeros(size, np.uint8) for size in capacities_bytes]
        self._before: list[Bytes] = [np.zeros(size, np.uint8) for size in capacities_bytes]
        self._unflushed: list[dict[int, list[bytes]]] = [{} for _ in capacities_bytes]

    def write(self, device: int, offset_bytes: int, data: Bytes) -> None:
        """Make `data` visible. Durable only after `flush`."""
        if len(data) == 0:
            return
        end = offset_bytes + len(data)
        visible = self._visible[device]
        self._before[device][offset_bytes:end] = visible[offset_bytes:end]
        visible[offset_bytes:end] = data
        for block in range(offset_bytes // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            versions = self._unflushed[device].setdefault(block, [])
            versions.append(self._block(self._visible, device, block))
            del versions[:-VERSIONS_MAX]

    def read(self, device: int, offset_bytes: int, length_bytes: int) -> Bytes:
        """Return a copy of visible bytes."""
        return self._visible[device][offset_bytes : offset_bytes + length_bytes].copy()

    def read_stale(self, device: int, offset_bytes: int, length_bytes: int) -> Bytes:
        """Return a copy of what each byte was before it was last written."""
        return self._before[device][offset_bytes : offset_bytes + length_bytes].copy()

    def flip(self, device: int, offset_bytes: int, bit: int) -> None:
        """Invert one stored bit wherever it is remembered: damage that no flush repairs."""
        mask = 1 << bit
        self._visible[device][offset_bytes] ^= mask
        self._durable[device][offset_bytes] ^= mask
        block, inside = divmod(offset_bytes, BLOCK_BYTES)
        versions = self._unflushed[device].get(block, [])
        for index, version in enumerate(versions):
            damaged = bytearray(version)
            damaged[inside] ^= mask
            versions[index] = bytes(damaged)

    def flush(self, device: int) -> None:
        """Make what is visible on one device durable."""
        for block in self._unflushed[device]:
            where = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            self._durable[device][where] = self._visible[device][where]
        self._unflushed[device].clear()

    def forget(self, device: int) -> None:
        """Take what was written since the last flush for flushed, without making it durable."""
        self._unflushed[device].clear()

    def go_back(self, device: int, blocks: Iterable[int]) -> None:
        """Let blocks hold what they durably held."""
        for block in blocks:
            where = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            self._visible[device][where] = self._durable[device][where]

    def lose_power(self, rng: random.Random) -> None:
        """Keep, drop or tear every block that was written since its last flush."""
        for device, unflushed in enumerate(self._unflushed):
            for block in sorted(unflushed):
                left = self._survivor(device, block, rng)
                where = slice(block * BLOCK_BYTES, block * BLOCK_BYTES + len(left))
                for array in (self._visible, self._durable):
                    array[device][where] = np.frombuffer(left, np.uint8)
            unflushed.clear()

    def _survivor(self, device: int, block: int, rng: random.Random) -> bytes:
        """Choose what is left of one unflushed block."""
        history = [self._block(self._durable, device, block), *self._unflushed[device][block]]
        outcome = rng.choice(("kept", "dropped", "torn"))
        if outcome == "dropped":
            return history[0]
        newer = rng.randrange(1, len(history))
        if outcome == "kept":
            return history[newer]
        cut = SECTOR_BYTES * rng.randrange(1, BLOCK_BYTES // SECTOR_BYTES)
        return history[newer][:cut] + history[rng.randrange(newer)][cut:]

    def unflushed_blocks(self, device: int) -> list[int]:
        """Indexes of the blocks that a power loss may change."""
        return sorted(self._unflushed[device])

    def snapshot(self) -> Media:
        """Return an independent copy, with a lock of its own."""
        taken = Media(())
        taken.capacities_bytes = self.capacities_bytes
        taken._take(self)
        return taken

    def restore(self, snapshot: Media) -> None:
        """Become a copy of `snapshot`, which has to have the same capacities."""
        if snapshot.capacities_bytes != self.capacities_bytes:
            raise ValueError("the snapshot is of other devices")
        self._take(snapshot)

    def _take(self, other: Media) -> None:
        self._visible = [array.copy() for array in other._visible]
        self._durable = [array.copy() for array in other._durable]
        self._before = [array.copy() for array in other._before]
        self._unflushed = copy.deepcopy(other._unflushed)

    @staticmethod
    def _block(arrays: list[Bytes], device: int, block: int) -> bytes:
        return arrays[device][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].tobytes()
