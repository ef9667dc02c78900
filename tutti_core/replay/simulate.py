"""Steps a policy through a trace, over the index that the store uses.

One request is one `match`, then, for what was missed, eviction and one `insert`: the calls that the
store makes for a prompt whose new pages are all saved. `NamespacePages` and the policies are the
real ones; here is no second cache. What differs from a store: pages that are matched are always
read, a save is done when its request is (nothing is in flight), and room is made for exactly the
pages that need it, while a store evicts some more so that a catalog commit serves many saves.

A request that is longer than the room there is keeps its first pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tutti_core.errors import UnsupportedError
from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import Locations
from tutti_core.policies.choice import make_policy
from tutti_core.replay.trace import I64, KEY_BYTES, Trace

BINS_MAX = 200

Progress = Callable[[int, int], None]
"""Called now and then with the requests done, and all."""

_PROGRESS_REQUESTS = 64
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Bin:
    """Blocks of the requests that came in one span of time, by where they were found."""

    time_s: float
    dram: int
    nvme: int
    missed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy did with one trace. Hits are leading-run hits (see `bounds`).

    Parameters
        blocks_written: blocks written to NVMe.
        timeline: at most BINS_MAX bins of equal length, from the first request on.
    """

    hits_blocks: int
    hits_tokens: int
    hits_dram_blocks: int
    blocks_written: int
    timeline: list[Bin]


@dataclass(frozen=True, slots=True)
class Steps:
    """What happened at each request, shape (n,): leading-run hits, and blocks saved after it."""

    hits: I64
    saved: I64


def simulate(
    trace: Trace,
    policy: str,
    capacity_pages: int,
    dram_pages: int = 0,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Outcome:
    """Replay `trace` through `policy` with room for `capacity_pages` pages.

    Raises
        ConfigError: there is no policy of that name.
        UnsupportedError: dram_pages > 0; the store has no DRAM tier yet.
    """
    if dram_pages:
        raise UnsupportedError("the store has no DRAM tier yet", hint="leave the DRAM share at 0")
    steps = step_through(trace, policy, capacity_pages, seed, on_progress)
    in_dram = np.zeros_like(steps.hits)
    return Outcome(
        hits_blocks=int(steps.hits.sum()),
        hits_tokens=int(trace.tokens_of(steps.hits).sum()),
        hits_dram_blocks=0,
        blocks_written=int(steps.saved.sum()),
        timeline=timeline(trace, in_dram, steps.hits),
    )


def step_through(
    trace: Trace, policy: str, capacity_pages: int, seed: int, on_progress: Progress | None = None
) -> Steps:
    """What `simulate` adds up, request by request."""
    pages = NamespacePages(KEY_BYTES, make_policy(policy, capacity_pages, seed))
    counts = trace.block_counts
    somewhere = Locations(*np.zeros((3, int(counts.max(initial=0))), dtype=np.uint64))
    hits = np.zeros(len(trace), dtype=np.int64)
    saved = np.zeros(len(trace), dtype=np.int64)
    now = 0
    for i, (count, timestamp_ms) in enumerate(
        zip(counts.tolist(), trace.timestamp_ms.tolist(), strict=True)
    ):
        now = max(now + 1, timestamp_ms * _NS_PER_MS)
        keys = trace.keys(i)
        hits[i] = hit = pages.match(keys, 0, now)
        if hit < count:
            now += 1
            room = _make_room(pages, keys[: hit * KEY_BYTES], count - hit, capacity_pages, now)
            saved[i] = room
            keys = keys[: (hit + room) * KEY_BYTES]
            pages.insert(keys, hit, True, somewhere.part(0, room), now)
        if on_progress and i % _PROGRESS_REQUESTS == 0:
            on_progress(i, len(trace))
    if on_progress:
        on_progress(len(trace), len(trace))
    return Steps(hits, saved)


def _make_room(
    pages: NamespacePages, prefix: bytes, count: int, capacity_pages: int, now: int
) -> int:
    """Evict until `count` more pages fit; returns how many do. `prefix`, their ancestors, stays."""
    excess = pages.page_count + count - capacity_pages
    if excess <= 0:
        return count
    pages.guard(prefix)
    while excess > 0 and (victim := pages.victim(excess, now)) is not None:
        pages.forget(victim, now)
        excess -= len(victim.slot)
    pages.unguard()
    return count - max(excess, 0)


def timeline(trace: Trace, dram: I64, hits: I64) -> list[Bin]:
    """Add hits and misses up over time; `dram` (n,) are those of `hits` that DRAM served."""
    if not len(trace):
        return []
    start_ms, span_ms = int(trace.timestamp_ms[0]), int(np.ptp(trace.timestamp_ms)) + 1
    bins = min(BINS_MAX, span_ms)
    place = (trace.timestamp_ms - start_ms) * bins // span_ms
    sums = [
        np.bincount(place, weights=values, minlength=bins).astype(np.int64).tolist()
        for values in (dram, hits - dram, trace.block_counts - hits)
    ]
    starts_s = (np.arange(bins) * span_ms / bins / 1000).tolist()
    return [Bin(*row) for row in zip(starts_s, *sums, strict=True)]
