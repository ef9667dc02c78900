"""Every policy at every capacity on one trace, next to the bounds: the rows of a report.

A *cell* is one policy at one capacity. Cells do not depend on each other, so several processes can
share them; they are forked, and see the arrays of the trace without a copy.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tutti_core.errors import ConfigError, nearest
from tutti_core.policies.choice import DEFAULT, POLICIES
from tutti_core.policies.lru import Lru
from tutti_core.replay.bounds import NextUses, clairvoyant, hit_rate, unlimited
from tutti_core.replay.simulate import Bin, Outcome, simulate
from tutti_core.replay.trace import Trace

CAPACITY_PCT = (2.0, 5.0, 10.0, 25.0, 50.0)
"""Capacities that are tried where none is named, in percent of a trace's unique blocks."""

KV_BYTES_PER_TOKEN = 128 << 10
"""Size of what a page stores, where no page size is named: 32 layers of 8 heads of 128, keys and
values, in 16 bits (Llama-3 8B)."""

GAP_LEAST = 0.005
"""Where LRU is nearer to the clairvoyant cache than this, a share of the gap says nothing."""

JOBS_MAX = 64

Driver = Callable[[Trace, str, int, int, int, Callable[[int, int], None] | None], Outcome]
"""`simulate`, or a stand-in: trace, policy, capacity_pages, dram_pages, seed, on_progress."""

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and all of it."""


class Capacity(NamedTuple):
    """Room for so many pages, and what that is in percent of a trace's unique blocks."""

    pages: int
    pct: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to try, checked.

    Parameters
        policies: by name, each once.
        capacity_pct, capacity_pages: capacities, in percent of the unique blocks and in pages.
        dram_pct: share of each capacity that is DRAM; the rest is NVMe.
        page_bytes: what a page stores; None: KV_BYTES_PER_TOKEN for each token of a block.
        jobs: processes.
    Raises
        ConfigError: an unknown policy, or a number that cannot be.
    """

    policies: tuple[str, ...] = (DEFAULT,)
    capacity_pct: tuple[float, ...] = CAPACITY_PCT
    capacity_pages: tuple[int, ...] = ()
    dram_pct: float = 0.0
    page_bytes: int | None = None
    seed: int = 0
    jobs: int = 1

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in POLICIES:
                raise ConfigError(f"no policy is called {name!r}", hint=nearest(name, POLICIES))
        for share in self.capacity_pct:
            if not 0 < share <= 100:  # false for NaN too
                raise ConfigError(f"capacity_pct = {share:g} is not above 0 and at most 100")
        for pages in self.capacity_pages:
            if pages < 1:
                raise ConfigError(f"capacity_pages = {pages} is not positive")
        if not self.policies or not (self.capacity_pct or self.capacity_pages):
            raise ConfigError("there is nothing to try: name a policy and a capacity")
        if not 0 <= self.dram_pct <= 100:
            raise ConfigError(f"dram_pct = {self.dram_pct:g} is not in 0 .. 100")
        if self.page_bytes is not None and self.page_bytes < 1:
            raise ConfigError(f"page_bytes = {self.page_bytes} is not positive")
        if not 1 <= self.jobs <= JOBS_MAX:
            raise ConfigError(f"jobs = {self.jobs} is not in 1 .. {JOBS_MAX}")

    def capacities(self, trace: Trace) -> list[Capacity]:
        """The capacities for this trace, rising.

        Raises
            ConfigError: a capacity is below one page, or above all that the trace has.
        """
        unique = len(trace.unique_ids)
        found = {Capacity(round(share / 100 * unique), share) for share in self.capacity_pct}
        for capacity in found:
            if not capacity.pages:
                raise ConfigError(
                    f"capacity_pct = {capacity.pct:g} comes to no page: {trace.name} has {unique} "
                    "unique blocks"
                )
        known = {capacity.pages for capacity in found}
        for pages in self.capacity_pages:
            if pages > unique:
                raise ConfigError(
                    f"capacity_pages = {pages} is above 100 %: {trace.name} has {unique} unique "
                    "blocks"
                )
            if pages not in known:
                found.add(Capacity(pages, _pct(pages, unique)))
        return sorted(found)

    def dram_pages(self, capacity_pages: int) -> int:
        """How many pages of a capacity are DRAM."""
        return round(self.dram_pct / 100 * capacity_pages)

    def bytes_of_page(self, trace: Trace) -> int:
        """Bytes that one page of `trace` stores."""
        return self.page_bytes or KV_BYTES_PER_TOKEN * trace.block_tokens


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity. Rates are shares of all blocks, unless their name says tokens.

    Parameters
        capacity_pct: of the unique blocks of the trace, as asked for.
        bytes_written: to NVMe.
        unlimited, clairvoyant: the bounds at this capacity.
        lru: leaf-first LRU at this capacity.
        gap_closed: (hit_rate - lru) / (clairvoyant - lru); None where that gap is below GAP_LEAST.
        seconds: what the replay of the cell took.
    """

    trace: str
    policy: str
    default: bool
    capacity_pct: float
    capacity_pages: int
    dram_pct: float
    hit_rate: float
    hit_rate_tokens: float
    hit_rate_dram: float
    hit_rate_nvme: float
    bytes_written: int
    unlimited: float
    clairvoyant: float
    lru: float
    gap_closed: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the blocks of one cell were found, over time."""

    trace: str
    policy: str
    capacity_pct: float
    capacity_pages: int
    bins: list[Bin]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All cells of one trace; timelines of the default policy, or of the first one that was run."""

    rows: list[Row]
    timelines: list[Timeline]


Cell = tuple[int, str]  # capacity in pages, policy
_Timed = tuple[Outcome, float]


def evaluate(
    trace: Trace, plan: Plan, progress: Progress | None = None, driver: Driver = simulate
) -> Evaluation:
    """Run the cells of `plan` on `trace`.

    Raises
        ConfigError: a capacity does not fit the trace.
        TuttiError: what the driver raises.
    """
    if not len(trace.ids):
        raise ConfigError(f"{trace.name} has no blocks to find")
    capacities = plan.capacities(trace)
    policies = dict.fromkeys((*plan.policies, Lru.name))
    sizes = dict.fromkeys(capacity.pages for capacity in capacities)
    cells = [(pages, policy) for pages in sizes for policy in policies]
    done = _run(trace, plan, cells, progress or (lambda *_: None), driver)
    uses = NextUses.of(trace)
    most = hit_rate(trace, unlimited(trace, uses))
    rows = []
    for capacity in capacities:
        best = hit_rate(trace, clairvoyant(trace, capacity.pages, uses))
        yardstick = done[capacity.pages, Lru.name][0].hits_blocks / len(trace.ids)
        for policy in plan.policies:
            timed = done[capacity.pages, policy]
            rows.append(_row(trace, plan, capacity, policy, timed, (most, best, yardstick)))
    shown = DEFAULT if DEFAULT in plan.policies else plan.policies[0]
    timelines = [
        Timeline(trace.name, shown, each.pct, each.pages, done[each.pages, shown][0].timeline)
        for each in capacities
    ]
    return Evaluation(rows, timelines)


def _row(
    trace: Trace,
    plan: Plan,
    capacity: Capacity,
    policy: str,
    timed: _Timed,
    marks: tuple[float, float, float],
) -> Row:
    outcome, seconds = timed
    most, best, lru = marks
    references = len(trace.ids)
    rate = outcome.hits_blocks / references
    gap = best - lru
    return Row(
        trace=trace.name,
        policy=policy,
        default=policy == DEFAULT,
        capacity_pct=capacity.pct,
        capacity_pages=capacity.pages,
        dram_pct=plan.dram_pct,
        hit_rate=rate,
        hit_rate_tokens=outcome.hits_tokens / max(int(trace.input_length.sum()), 1),
        hit_rate_dram=outcome.hits_dram_blocks / references,
        hit_rate_nvme=(outcome.hits_blocks - outcome.hits_dram_blocks) / references,
        bytes_written=outcome.blocks_written * plan.bytes_of_page(trace),
        unlimited=most,
        clairvoyant=best,
        lru=lru,
        gap_closed=(rate - lru) / gap if gap >= GAP_LEAST else None,
        seconds=seconds,
    )


def _pct(pages: int, unique: int) -> float:
    """Percent of the unique blocks, to three digits."""
    share = 100 * pages / unique
    return round(share, 2 - math.floor(math.log10(share)))


# ---- running ----
def _run(
    trace: Trace, plan: Plan, cells: list[Cell], progress: Progress, driver: Driver
) -> dict[Cell, _Timed]:
    work = _Work(trace, plan, driver)
    if plan.jobs == 1 or len(cells) == 1:
        done = {}
        for pages, policy in cells:
            what = f"{trace.name}: {policy}, {pages} pages"

            def on_progress(count: int, total: int, what: str = what) -> None:
                progress(what, count, total)

            done[pages, policy] = work.run((pages, policy), on_progress)
        return done
    with _submitted(work, cells, plan.jobs) as futures:
        done = {}
        for cell, future in futures.items():
            done[cell] = future.result()
            progress(f"{trace.name}: cells", len(done), len(cells))
        return done


@dataclass(frozen=True, slots=True)
class _Work:
    """What all cells of a trace share."""

    trace: Trace
    plan: Plan
    driver: Driver

    def run(self, cell: Cell, on_progress: Callable[[int, int], None] | None = None) -> _Timed:
        """Run one cell; also returns the seconds it took."""
        pages, policy = cell
        dram_pages = self.plan.dram_pages(pages)
        start_s = time.perf_counter()
        outcome = self.driver(self.trace, policy, pages, dram_pages, self.plan.seed, on_progress)
        return outcome, time.perf_counter() - start_s


_work: _Work | None = None  # in a forked process: what it was forked for


def _adopt(work: _Work) -> None:
    global _work
    _work = work


def _run_adopted(cell: Cell) -> _Timed:
    assert _work is not None
    return _work.run(cell)


@contextmanager
def _submitted(work: _Work, cells: list[Cell], jobs: int) -> Iterator[dict[Cell, Future[_Timed]]]:
    """Cells at work in forked processes; what is not started when the block ends never is."""
    work.trace.dense  # computed once, before the fork  # noqa: B018
    pool = ProcessPoolExecutor(
        min(jobs, len(cells)), multiprocessing.get_context("fork"), _adopt, (work,)
    )
    try:
        yield {cell: pool.submit(_run_adopted, cell) for cell in cells}
    finally:
        pool.shutdown(cancel_futures=True)
