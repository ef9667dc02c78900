"""What no policy can beat: an unlimited cache, and the clairvoyant one of a given capacity.

Both count *leading-run hits*: the blocks at the front of a request that are stored when it starts.
A block counts only if all before it are stored, because a page is worth nothing without its prefix.

**The clairvoyant cache.** After each request it keeps, of its content and the request's blocks, the
`capacity_pages` blocks whose next use is nearest; among equals it drops the deepest first. A block
that is never used again is never kept (bypass).

*It is the optimum.* Enter each block only by being requested; a hit on it at request u then means
that it was kept from its last use t until u: one interval [t, u]. Any policy's content is a choice
of intervals of which no more than `capacity_pages` overlap between two requests, and its hits are
at most the number of intervals chosen. For intervals of equal worth, dropping the one that ends
last wherever too many overlap gives the largest number of them: Belady's MIN with bypass. A block
is used whenever a descendant is, so its next use is never later than the descendant's; dropping the
farthest, and the deepest among equals, therefore leaves the content closed under ancestors. So each
block kept is in a leading run, and the bound for single blocks is reached by leading runs.

*It equals MIN reference by reference*, with bypass. Look inside request u, after d of its blocks.
The d first have been used; of these the n that are kept afterwards are the first ones, as are the o
that were kept before; what is not of this request is the same all the while, say x blocks. So
x + min(n, d) + max(o - d, 0) <= x + max(n, o): room never runs out inside a request if it is enough
at both ends. MIN *without* bypass, which must take in each missed block, can do worse, by the hits
that one place is worth: it needs a place for the block that passes.

**In counts.** Between requests all kept blocks with next use u are a leading run of request u: they
lie on its path, and an ancestor of theirs that is used earlier than u would have been used by then.
So the cache is one number for each future request, and a request divides its blocks into few runs
of equal next use. `NextUses` holds these runs; a capacity then costs O(runs log runs).

Blocks have equal worth here; where a last block is partial, a bound in tokens could be a trifle
higher.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from tutti_core.errors import ConfigError
from tutti_core.replay.trace import I32, I64, Trace, offsets_of


@dataclass(frozen=True, slots=True)
class NextUses:
    """Runs of blocks of each request that are used next by the same later request.

    Parameters
        offset: shape (n+1,), where each request's runs start; root to leaf, so `next_use` rises.
        next_use: shape (runs,), index of the request that uses the run next.
        blocks: shape (runs,), length of the run. Blocks that are not used again are left out.
    """

    offset: I64
    next_use: I64
    blocks: I64

    @classmethod
    def of(cls, trace: Trace) -> NextUses:
        """Find the runs of `trace`. O(references), in array operations a request."""
        never = len(trace)
        next_of = np.full(len(trace.unique_ids), never, dtype=np.int32)
        uses: list[I32] = []
        lengths: list[I64] = []
        for i in range(len(trace) - 1, -1, -1):
            blocks = trace.dense[trace.offset[i] : trace.offset[i + 1]]
            after = next_of[blocks]
            next_of[blocks] = i
            starts = np.flatnonzero(np.diff(after, prepend=-1))  # a next use is never -1
            runs = after[starts]
            kept = runs != never
            uses.append(runs[kept])
            lengths.append(np.diff(starts, append=len(blocks))[kept])
        uses.reverse()
        lengths.reverse()
        offset = offsets_of(np.array([len(runs) for runs in uses], dtype=np.int64))
        empty = np.zeros(0, dtype=np.int64)
        return cls(
            offset,
            np.concatenate([empty, *uses]),
            np.concatenate([empty, *lengths]),
        )


def unlimited(trace: Trace, uses: NextUses | None = None) -> I64:
    """Return the leading-run hits of each request, in blocks, when nothing is ever evicted."""
    return clairvoyant(trace, max(len(trace.unique_ids), 1), uses)


def clairvoyant(trace: Trace, capacity_pages: int, uses: NextUses | None = None) -> I64:
    """Return the hits of each request, in blocks, of the best possible cache of this capacity.

    Parameters
        trace: must have chain ids.
        uses: `NextUses.of(trace)`, where several capacities are asked for.
    Raises
        ConfigError: capacity_pages < 1.
    Cost       O(runs log runs).
    """
    if capacity_pages < 1:
        raise ConfigError(f"capacity_pages = {capacity_pages} is not positive")
    uses = uses or NextUses.of(trace)
    hits = np.zeros(len(trace), dtype=np.int64)
    kept: dict[int, int] = {}  # next use -> blocks kept for it
    farthest: list[int] = []  # heap of -next use; may name some that are gone
    total = 0
    runs = list(zip(uses.next_use.tolist(), uses.blocks.tolist(), strict=True))
    offset = uses.offset.tolist()
    for request in range(len(trace)):
        hits[request] = found = kept.pop(request, 0)
        total -= found
        for next_use, blocks in runs[offset[request] : offset[request + 1]]:
            if next_use not in kept:
                kept[next_use] = 0
                heapq.heappush(farthest, -next_use)
            kept[next_use] += blocks
            total += blocks
        while total > capacity_pages:
            last = -farthest[0]
            dropped = min(kept[last], total - capacity_pages)
            total -= dropped
            kept[last] -= dropped
            if not kept[last]:
                del kept[last]
                heapq.heappop(farthest)
    return hits


def hit_rate(trace: Trace, hits: I64) -> float:
    """Share of all block references that were hits; 0 for a trace without blocks."""
    return float(hits.sum()) / max(len(trace.ids), 1)


def hit_rate_tokens(trace: Trace, hits: I64) -> float:
    """Share of all input tokens that were in blocks that were hits.

    Lower than `hit_rate` where a file leaves out the partial last block of a request, and different
    where it includes it.
    """
    return float(trace.tokens_of(hits).sum()) / max(int(trace.input_length.sum()), 1)
