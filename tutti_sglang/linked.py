"""One linked pool, where its pages are stored, and the look-up that spans all pools of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from tutti_core import Hold, Namespace, NamespaceStore
from tutti_sglang.chain import Chain
from tutti_sglang.device_pools import DevicePoolPages
from tutti_sglang.hits import PoolHits, restorable_lengths
from tutti_sglang.identity import ModelIdentity

KEY_BYTES = 32  # SGLang's page keys are SHA-256
LAYOUT = "linker, layer-major, K and V of a layer together"
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LinkedPool:
    """One physical pool.

    writes  whether this rank saves its pages; else another rank does, which has the same bytes.
    """

    pages: DevicePoolPages
    store: NamespaceStore
    writes: bool


def namespace_of(
    pages: DevicePoolPages, pool: Any, *, page_tokens: int, model: ModelIdentity, shard: str
) -> Namespace:
    """What pages of this pool must have in common to be interchangeable.

    Parameters
        pool: SGLang's device pool.
        page_tokens: of a page of the tree, of which this pool has one page too.
    """
    return Namespace(
        model=model.name,
        weights=model.weights,
        dtype=str(getattr(pool, "dtype", "")),
        page_tokens=page_tokens,
        page_bytes=pages.page_bytes,
        layout=LAYOUT,
        shard=shard,
        pool=f"{pages.name} {type(pool).__name__}",
        key_bytes=KEY_BYTES,
        extra={**model.extra, "buffers": pages.description},
        parts=pages.part_bytes,
    )


class Lookup:
    """What can be restored of a chain. It holds what it reports; `release` gives that back.

    lengths      every restorable length, in pages, ascending.
    holds        keep the pages.
    held_bytes   of the held pages.
    """

    def __init__(
        self,
        pools: Mapping[str, LinkedPool],
        chain: Chain,
        transfers: Sequence[PoolTransfer],
    ) -> None:
        self._chain = chain
        self.lengths: list[int] = []
        self.holds: list[Hold] = []
        self.held_bytes = 0
        try:
            self.lengths = self._restorable(pools, transfers)
        finally:
            if not self.lengths:
                self.release()

    def release(self) -> None:
        """Let the pages go. Idempotent."""
        for hold in self.holds:
            hold.release()

    def _restorable(
        self, pools: Mapping[str, LinkedPool], transfers: Sequence[PoolTransfer]
    ) -> list[int]:
        whole = [t for t in transfers if t.hit_policy != PoolHitPolicy.TRAILING_PAGES]
        hit = len(self._chain) if whole else 0
        for transfer in whole:  # loaded from the first page on, so all of it must be there
            hit = self._hold(pools[str(transfer.name)], 0, hit)
        if hit == 0:
            return []
        windows = []
        for transfer in (t for t in transfers if t.hit_policy == PoolHitPolicy.TRAILING_PAGES):
            name = str(transfer.name)
            present = pools[name].store.contains(self._chain.upto(hit), self._chain.first)
            windows.append(PoolHits(name, "trailing_pages", present, len(transfer.keys or ())))
        lengths = restorable_lengths(hit, windows)
        if lengths and not all([self._hold_windows(pools[w.name], w, lengths) for w in windows]):
            lengths = restorable_lengths(hit, windows)
        return lengths

    def _hold_windows(self, pool: LinkedPool, hit: PoolHits, lengths: Sequence[int]) -> bool:
        """Hold the windows that end at `lengths`; what is gone by now is taken off `hit.present`.

        Returns
            whether all of them are held.
        """
        needed = np.zeros(len(hit.present), dtype=np.bool_)
        for length in lengths:
            needed[max(length - max(hit.trailing, 1), 0) : length] = True
        edges = np.flatnonzero(np.diff(np.concatenate(([False], needed, [False]))))
        complete = True
        for low, high in edges.reshape(-1, 2).tolist():
            held = self._hold(pool, low, high)
            hit.present[low + held : high] = False
            complete &= held == high - low
        return complete

    def _hold(self, pool: LinkedPool, low: int, high: int) -> int:
        """Hold the asked pages low .. high-1 as far as they are stored without a gap."""
        hold = pool.store.hold(self._chain.upto(high), self._chain.first + low)
        self.holds.append(hold)
        self.held_bytes += hold.pages * pool.pages.page_bytes
        return int(hold.pages)
