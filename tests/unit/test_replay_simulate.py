"""The driver: the real index and policies, stepped through traces, and the figures they must give.

The traces of the figures are looked for in $TUTTI_TRACES, or in shared/data beside the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tutti_core.errors import ConfigError
from tutti_core.policies.choice import POLICIES
from tutti_core.replay.bounds import NextUses, clairvoyant, hit_rate, unlimited
from tutti_core.replay.generate import generate, preset
from tutti_core.replay.mooncake import read_trace
from tutti_core.replay.simulate import BINS_MAX, simulate, step_through, timeline
from tutti_core.replay.trace import Trace, offsets_of

FOLDER = Path(os.environ.get("TUTTI_TRACES") or Path(__file__).parents[3] / "shared" / "data")

# Block hit rates at 2, 5 and 10 % of the unique blocks, and without a limit.
FIGURES = {
    "agent_dev": ((0.421, 0.752, 0.918), (0.648, 0.866, 0.947), 0.969),
    "mooncake_conversation": ((0.079, 0.196, 0.279), (0.314, 0.366, 0.366), 0.366),
    "mooncake_synthetic": ((0.078, 0.157, 0.262), (0.261, 0.396, 0.506), 0.640),
}
TOLERANCE = 0.005


def trace_of(*requests: list[int], times_ms: list[int] | None = None) -> Trace:
    lengths = np.array([len(ids) for ids in requests], dtype=np.int64)
    times = np.array(times_ms or range(len(requests)), dtype=np.int64)
    ids = np.array([i for ids in requests for i in ids], dtype=np.uint64)
    return Trace("t", 10, times, lengths * 10, lengths, offsets_of(lengths), ids)


@pytest.fixture(scope="module")
def agents() -> Trace:
    return generate(preset("agent"), 10, 5)


def known_trace(name: str) -> Trace:
    file = FOLDER / f"{name}.jsonl.xz"
    if not file.exists():
        pytest.skip(f"the trace {name} is not on this machine")
    return read_trace(file).trace


@pytest.mark.parametrize("name", FIGURES)
def test_lru_and_the_bounds_give_the_known_figures(name: str) -> None:
    trace = known_trace(name)
    lru, best, most = FIGURES[name]
    uses = NextUses.of(trace)
    assert hit_rate(trace, unlimited(trace, uses)) == pytest.approx(most, abs=TOLERANCE)
    for share, least, limit in zip((2, 5, 10), lru, best, strict=True):
        pages = round(share / 100 * len(trace.unique_ids))
        bound = hit_rate(trace, clairvoyant(trace, pages, uses))
        rate = simulate(trace, "lru", pages).hits_blocks / len(trace.ids)
        assert bound == pytest.approx(limit, abs=TOLERANCE)
        assert rate == pytest.approx(least, abs=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [1, 5, 20, 100])
def test_no_policy_beats_the_bounds(agents: Trace, policy: str, share: int) -> None:
    pages = len(agents.unique_ids) * share // 100
    steps = step_through(agents, policy, pages, seed=1)
    found = unlimited(agents)
    assert (steps.hits <= found).all()
    assert (steps.hits + steps.saved <= agents.block_counts).all()
    assert steps.hits.sum() <= clairvoyant(agents, pages).sum()
    if share == 100:
        assert (steps.hits == found).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_outcome(agents: Trace, policy: str) -> None:
    assert simulate(agents, policy, 900, 0, 7) == simulate(agents, policy, 900, 0, 7)


def test_an_outcome_adds_up(agents: Trace) -> None:
    seen: list[tuple[int, int]] = []
    outcome = simulate(
        agents, "lru", 2000, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (len(agents), len(agents))
    assert sum(each.nvme for each in outcome.timeline) == outcome.hits_blocks
    assert sum(each.missed for each in outcome.timeline) == len(agents.ids) - outcome.hits_blocks
    assert outcome.hits_tokens == outcome.hits_blocks * agents.block_tokens
    assert outcome.hits_dram_blocks == 0
    assert len(outcome.timeline) <= BINS_MAX


def test_a_request_longer_than_the_cache_keeps_its_front() -> None:
    steps = step_through(trace_of([1, 2, 3, 4], [1, 2, 3, 4]), "lru", 3, 0)
    assert steps.hits.tolist() == [0, 3]
    assert steps.saved.tolist() == [3, 0]


def test_the_ancestors_of_new_pages_are_not_evicted_for_them() -> None:
    steps = step_through(trace_of([1, 2], [8, 9], [1, 2, 3, 4], [1, 2, 3, 4]), "lru", 4, 0)
    assert steps.hits.tolist() == [0, 0, 2, 4]


def test_two_tiers_by_hand() -> None:
    """Three pages of NVMe, two of DRAM, the newest in both."""
    trace = trace_of([1, 2], [3], [1, 2], [4], [3], [4])
    outcome = simulate(trace, "lru", 5, dram_pages=2)
    steps = step_through(trace, "lru", 5, 0, dram_pages=2)
    # 1 2 | 3 1 over 2 ... DRAM holds [1 2], [1 3], [1 2], [1 4], [3 4], [3 4]
    assert steps.hits.tolist() == [0, 0, 2, 0, 0, 1]
    assert steps.in_dram.tolist() == [0, 0, 1, 0, 0, 1]
    assert outcome.hits_dram_blocks == 2 and outcome.hits_blocks == 3
    assert sum(each.dram for each in outcome.timeline) == 2
    assert sum(each.nvme for each in outcome.timeline) == 1


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_dram_adds_its_hits_to_those_of_nvme(agents: Trace, policy: str) -> None:
    pages = len(agents.unique_ids) // 10
    both = step_through(agents, policy, pages + pages // 4, 0, dram_pages=pages // 4)
    alone = step_through(agents, policy, pages, 0)
    assert (both.in_dram <= both.hits).all() and both.in_dram.any()
    assert (both.hits >= alone.hits).all() and (both.saved == alone.saved).all()
    assert (both.hits <= unlimited(agents)).all()


def test_requests_of_one_moment_are_steps_apart() -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2], [5], [3, 4], times_ms=[5, 5, 5, 5, 5])
    assert step_through(trace, "lru", 4, 0).hits.tolist() == [0, 0, 2, 0, 1]


def test_the_timeline_bins_by_time() -> None:
    trace = trace_of([1], [1], [1], times_ms=[1000, 1000, 5000])
    hits = np.array([0, 1, 1])
    bins = timeline(trace, np.array([0, 0, 1]), hits)
    assert len(bins) == BINS_MAX
    assert (bins[0].time_s, bins[0].nvme, bins[0].missed) == (0.0, 1, 1)
    assert (bins[-1].dram, bins[-1].nvme) == (1, 0)
    assert 3.9 < bins[-1].time_s < 4.0
    assert len(timeline(trace_of([1], [1], times_ms=[7, 7]), hits[:2], hits[:2])) == 1


def test_what_cannot_be_is_refused(agents: Trace) -> None:
    with pytest.raises(ConfigError, match="did you mean 'lru'"):
        simulate(agents, "lur", 100)
