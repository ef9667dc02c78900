"""Steps a policy through a trace, over the index that the store uses.

One request is one `match`, then, for what was missed, eviction and one `insert`: the calls that the
store makes for a prompt whose new pages are all saved. `NamespacePages` and the policies are the
real ones; here is no second cache. What differs from a store: pages that are matched are always
read, a save is done when its request is (nothing is in flight), and room is made for exactly the
pages that need it, while a store evicts some more so that a catalog commit serves many saves.

A request that is longer than the room there is keeps its first pages. What the engine generates for
a request (`output_length`) is told when the request is saved, which is when an engine knows it.

With DRAM there are two tiers, each with the whole index and policy: what is saved goes to both,
what was read from NVMe is promoted, and each tier evicts by itself (write-through, inclusive).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
    """What happened at each request, shape (n,): leading-run hits, those of DRAM, blocks saved."""

    hits: I64
    in_dram: I64
    saved: I64


def simulate(
    trace: Trace,
    policy: str,
    capacity_pages: int,
    dram_pages: int = 0,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Outcome:
    """Replay `trace` through `policy` with room for `capacity_pages` pages, DRAM included.

    Raises
        ConfigError: there is no policy of that name.
    """
    steps = step_through(trace, policy, capacity_pages, seed, on_progress, dram_pages)
    return Outcome(
        hits_blocks=int(steps.hits.sum()),
        hits_tokens=int(trace.tokens_of(steps.hits).sum()),
        hits_dram_blocks=int(steps.in_dram.sum()),
        blocks_written=int(steps.saved.sum()),
        timeline=timeline(trace, steps.in_dram, steps.hits),
    )


class Tier:
    """The pages of one tier: the real index and policy, and how many pages fit."""

    def __init__(self, policy: str, capacity_pages: int, seed: int) -> None:
        self.capacity_pages = capacity_pages
        self.pages = NamespacePages(KEY_BYTES, make_policy(policy, capacity_pages, seed))

    def save(self, keys: bytes, hit: int, output_tokens: int, now: int) -> int:
        """Keep what is worth its room of the pages from `hit` on; returns how many came."""
        count = len(keys) // KEY_BYTES
        kept = hit
        if hit < count:
            kept += self._make_room(keys, hit, output_tokens, now)
            somewhere = np.zeros(kept - hit, dtype=np.uint64)
            where = Locations(somewhere, somewhere, somewhere)
            self.pages.insert(keys[: kept * KEY_BYTES], hit, True, where, now)
        self.pages.settle(keys, kept, output_tokens, now)
        return kept - hit

    def _make_room(self, keys: bytes, hit: int, output_tokens: int, now: int) -> int:
        """Evict for pages `hit` .. end of a chain; returns how many of them may come.

        Their ancestors stay, and what is worth more than they are.
        """
        pages, made = self.pages, 0
        room = self.capacity_pages - pages.page_count
        count = len(keys) // KEY_BYTES
        if room >= count - hit:
            return count - hit
        pages.guard(keys)
        for wanted, worth in pages.worth(keys, hit, count, output_tokens):
            while room < wanted:
                victim = pages.victim(wanted - room, now)
                if victim is None or victim.value > worth:
                    break
                pages.forget(victim, now)
                room += len(victim.slot)
            taken = min(room, wanted)
            made += taken
            room -= taken
            if taken < wanted:
                break
        pages.unguard()
        return made


def step_through(
    trace: Trace,
    policy: str,
    capacity_pages: int,
    seed: int,
    on_progress: Progress | None = None,
    dram_pages: int = 0,
) -> Steps:
    """What `simulate` adds up, request by request."""
    nvme = Tier(policy, capacity_pages - dram_pages, seed)
    dram = Tier(policy, dram_pages, seed) if dram_pages else None
    steps = Steps(*np.zeros((3, len(trace)), dtype=np.int64))
    now = 0
    requests = zip(trace.timestamp_ms.tolist(), trace.output_length.tolist(), strict=True)
    for i, (timestamp_ms, output_tokens) in enumerate(requests):
        now = max(now + 1, timestamp_ms * _NS_PER_MS)
        keys = trace.keys(i)
        stored = steps.hits[i] = nvme.pages.match(keys, 0, now)
        if dram is not None:
            above = steps.in_dram[i] = dram.pages.match(keys, 0, now)
            steps.hits[i] = max(stored, above)
        now += 1
        steps.saved[i] = nvme.save(keys, stored, output_tokens, now)
        if dram is not None:
            dram.save(keys, above, output_tokens, now)
        if on_progress and i % _PROGRESS_REQUESTS == 0:
            on_progress(i, len(trace))
    if on_progress:
        on_progress(len(trace), len(trace))
    return steps


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
