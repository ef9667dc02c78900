"""The rule which prefix lengths of a chain can be restored when several pools must agree.

One rule for both routes. A prefix of n pages is restorable when the KV pool holds pages 0..n-1 and
each other pool holds what its policy asks of a prefix of exactly that length:

    all_pages       pages 0..n-1.
    trailing_pages  the last `trailing` pages, n - trailing..n-1; fewer in a shorter prefix.
    block_groups    nothing: the pool is a second form of the KV pages and never decides on them.

So the lengths are sparse where a pool keeps windows only, and 5 may be restorable while 4 is not.

Pure: imports neither torch nor sglang.
Source     SGLang 0.5.23, mem_cache/hicache_storage.py, PoolHitPolicy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Policy = Literal["all_pages", "trailing_pages", "block_groups"]


@dataclass(frozen=True, slots=True)
class PoolHits:
    """What one pool holds of the asked chain, and what it must hold.

    name         the pool.
    policy       see the top of the file.
    present      page i of the asked chain is stored in this pool. Shape (n,), bool. Pages beyond
                 its end count as missing.
    trailing     trailing_pages: pages of the window; less than 1 counts as 1.
    block_pages  block_groups: KV pages of a block. Not looked at here.
    group_pages  block_groups: keys of a group. Not looked at here.
    """

    name: str
    policy: Policy
    present: npt.NDArray[np.bool_]
    trailing: int = 1
    block_pages: int = 0
    group_pages: int = 0


def leading(present: npt.NDArray[np.bool_]) -> int:
    """Return how many leading entries are True."""
    missing = np.flatnonzero(~present)
    return int(missing[0]) if len(missing) else len(present)


def restorable_lengths(kv_hit: int, pools: Sequence[PoolHits]) -> list[int]:
    """Return every prefix length of 1..kv_hit that all of `pools` can restore, ascending.

    Parameters
        kv_hit: leading pages that the KV pool holds without a gap.
        pools: the other pools; none of them: every length is restorable.
    Raises
        ValueError: a policy that is not known.
    Cost       O(kv_hit) a pool.
    """
    kv_hit = max(kv_hit, 0)
    lengths = np.arange(1, kv_hit + 1)
    restorable = np.ones(kv_hit, dtype=np.bool_)
    for pool in pools:
        if pool.policy == "block_groups":
            continue
        present = np.zeros(kv_hit, dtype=np.bool_)
        known = min(len(pool.present), kv_hit)
        present[:known] = pool.present[:known]
        if pool.policy == "all_pages":
            restorable &= lengths <= leading(present)
        elif pool.policy == "trailing_pages":
            held = np.concatenate(([0], np.cumsum(present)))
            start = np.maximum(lengths - max(pool.trailing, 1), 0)
            restorable &= held[lengths] - held[start] == lengths - start
        else:
            raise ValueError(f"pool {pool.name}: unknown hit policy {pool.policy!r}")
    return [int(n) for n in lengths[restorable]]
