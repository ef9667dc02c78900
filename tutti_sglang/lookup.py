"""Answers HiCache's question which prefix of a chain is usable when several pools must agree.

The answer equals that of SGLang's own file backend: the same lengths, and for each pool how far it
reaches on its own. Block groups, which that backend refuses, are answered as their policy says.

Source: SGLang 0.5.23, mem_cache/hicache_storage.py (PoolHitPolicy, HiCacheFile.batch_exists_v2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, PoolTransferResult

from tutti_sglang.hits import PoolHits, leading, restorable_lengths

Bools = npt.NDArray[np.bool_]


def usable_prefix(
    page_count: int,
    kv_pages: int | None,
    transfers: Sequence[PoolTransfer],
    present: Callable[[str, int], Bools],
) -> PoolTransferResult:
    """Return which prefixes can be restored, and how far each pool reaches.

    Parameters
        page_count: pages of the chain that was asked for.
        kv_pages: leading ones that the KV pool has; None: it holds no bytes, and a page of it is
            stored when all pools that must have every page have it.
        transfers: the other pools and their policies. A trailing pool's window is as long as its
            `keys`.
        present: (pool, n) -> which of the first n pages the pool has. Shape (n,).
    Cost       one look-up a pool; none of those after the one that leaves nothing usable.
    """
    known: dict[str, Bools] = {}

    def hits_of(transfer: PoolTransfer, pages: int) -> PoolHits:
        name = str(transfer.name)
        if name not in known or len(known[name]) < pages:
            known[name] = present(name, pages)
        return PoolHits(
            name,
            transfer.hit_policy.value,
            known[name],
            len(transfer.keys or ()),
            transfer.block_pages,
            transfer.group_pages,
        )

    if kv_pages is None:
        whole = [t for t in transfers if t.hit_policy.value == "all_pages"]
        kv_pages = page_count if whole else 0
        for transfer in whole:
            kv_pages = min(kv_pages, leading(hits_of(transfer, kv_pages).present))
    reached = {PoolName.KV: kv_pages} if kv_pages else {}
    restorable = list(range(1, kv_pages + 1))
    for transfer in transfers:
        if transfer.hit_policy.value == "block_groups":
            verdict = _covered(hits_of(transfer, page_count))
        elif not restorable:
            continue  # neither asked nor reported
        else:
            alone = restorable_lengths(kv_pages, [hits_of(transfer, kv_pages)])
            verdict = alone[-1] if alone else 0
            agreed = set(alone)
            restorable = [length for length in restorable if length in agreed]
        if verdict:
            reached[transfer.name] = verdict
    return PoolTransferResult(restorable[-1] if restorable else 0, reached, restorable)


def _covered(pool: PoolHits) -> int:
    """The pages that a pool's leading complete groups cover.

    A block of `block_pages` pages is one group of keys, the last `group_pages` of it.
    """
    block, group = pool.block_pages, min(pool.group_pages, pool.block_pages)
    if block < 1 or group < 1:
        return 0
    whole = len(pool.present) // block
    ends = pool.present[: whole * block].reshape(whole, block)[:, block - group :]
    return leading(np.asarray(ends.all(axis=1))) * block
