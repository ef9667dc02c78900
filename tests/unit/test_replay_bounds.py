"""The bounds at their edges; tests/property/test_bounds_model.py compares them with brute force."""

from __future__ import annotations

import numpy as np
import pytest

from tutti_core.errors import ConfigError
from tutti_core.replay.bounds import NextUses, clairvoyant, hit_rate, hit_rate_tokens, unlimited
from tutti_core.replay.trace import Trace, offsets_of


def trace_of(*requests: list[int], tokens: list[int] | None = None) -> Trace:
    lengths = np.array([len(ids) for ids in requests], dtype=np.int64)
    count = len(requests)
    return Trace(
        "t",
        10,
        np.arange(count, dtype=np.int64),
        np.array(tokens, dtype=np.int64) if tokens else lengths * 10,
        np.ones(count, dtype=np.int64),
        offsets_of(lengths),
        np.array([i for ids in requests for i in ids], dtype=np.uint64),
    )


def test_next_uses_are_runs_of_blocks_with_one_future() -> None:
    uses = NextUses.of(trace_of([1, 2, 3, 4], [1, 2, 5], [], [1], [1, 2, 3]))
    assert uses.offset.tolist() == [0, 2, 4, 4, 5, 5]
    assert uses.next_use.tolist() == [1, 4, 3, 4, 4]
    assert uses.blocks.tolist() == [2, 1, 1, 1, 1]


def test_a_request_too_long_for_the_cache_keeps_its_front() -> None:
    trace = trace_of([1, 2, 3, 4], [1, 2, 3, 4])
    assert clairvoyant(trace, 3).tolist() == [0, 3]
    assert unlimited(trace).tolist() == [0, 4]


def test_what_is_used_sooner_stays() -> None:
    trace = trace_of([1, 2], [5, 6], [5, 6], [1, 2])
    assert clairvoyant(trace, 2).tolist() == [0, 0, 2, 0]
    assert clairvoyant(trace, 3).tolist() == [0, 0, 2, 1]


def test_what_is_never_used_again_takes_no_room() -> None:
    trace = trace_of([1, 2], [7, 8, 9], [1, 2])
    assert clairvoyant(trace, 2).tolist() == [0, 0, 2]


@pytest.mark.parametrize("capacity", [0, -1])
def test_no_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match="not positive"):
        clairvoyant(trace_of([1]), capacity)


def test_requests_without_blocks_are_fine() -> None:
    trace = trace_of([], [])
    assert unlimited(trace).tolist() == [0, 0]
    assert hit_rate(trace, unlimited(trace)) == 0


def test_rates_by_blocks_and_by_tokens() -> None:
    trace = trace_of([1, 2], [1, 2], tokens=[15, 15])
    hits = unlimited(trace)
    assert hit_rate(trace, hits) == 0.5
    assert hit_rate_tokens(trace, hits) == 0.5
    assert hit_rate_tokens(trace, np.array([0, 1])) == 10 / 30
