"""Synthetic traces: what the presets promise, and that a seed repeats."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tutti_core.errors import ConfigError
from tutti_core.replay.bounds import hit_rate, unlimited
from tutti_core.replay.generate import PRESETS, Spread, generate, preset
from tutti_core.replay.mooncake import read_trace, write_trace
from tutti_core.replay.trace import Trace

SESSIONS = 12


@pytest.fixture(scope="module", params=list(PRESETS))
def trace(request: pytest.FixtureRequest) -> Trace:
    return generate(PRESETS[request.param], SESSIONS, 3, request.param)


def same(one: Trace, other: Trace) -> bool:
    arrays = ("timestamp_ms", "input_length", "output_length", "offset", "ids")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


def test_a_trace_is_whole(trace: Trace) -> None:
    assert trace.has_chain_ids()
    assert (np.diff(trace.timestamp_ms) >= 0).all()
    assert (trace.block_counts == trace.input_length // trace.block_tokens).all()
    assert (trace.output_length >= 1).all()
    assert set(trace.labels["session_id"]) == set(range(SESSIONS))
    workload = PRESETS[trace.name]
    assert trace.input_length.max() <= workload.context_tokens_max


def test_it_round_trips_through_a_file(trace: Trace, tmp_path: Path) -> None:
    file = tmp_path / f"{trace.name}.jsonl.xz"
    write_trace(trace, file)
    read = read_trace(file)
    assert same(read.trace, trace)
    assert read.trace.labels == trace.labels
    assert (read.trace.name, read.trace.block_tokens) == (trace.name, trace.block_tokens)
    assert not read.local_ids


def test_a_seed_repeats_and_another_does_not(trace: Trace) -> None:
    workload = PRESETS[trace.name]
    assert same(trace, generate(workload, SESSIONS, 3))
    assert not same(trace, generate(workload, SESSIONS, 4))


@pytest.mark.parametrize(("sessions", "seed"), [(1, 0), (20, 1), (60, 2)])
def test_the_ratio_of_the_source_page_is_met(sessions: int, seed: int) -> None:
    trace = generate(preset("agent-131"), sessions, seed)
    ratio = trace.input_length.sum() / trace.output_length.sum()
    assert ratio == pytest.approx(131, rel=0.02)


def test_all_sessions_share_the_system_prompt_and_kinds_their_tools() -> None:
    workload = preset("agent")
    trace = generate(workload, 40, 1)
    starts = trace.offset[:-1]
    system = workload.system_tokens // workload.block_tokens
    heads = {trace.ids[start : start + system].tobytes() for start in starts}
    kinds = {int(trace.ids[start + system]) for start in starts}
    assert len(heads) == 1
    assert 1 < len(kinds) <= workload.kinds


def test_agents_reuse_nearly_all_and_chats_less() -> None:
    agent = generate(preset("agent"), 40, 1)
    chat = generate(preset("chat"), 200, 1)
    assert 0.95 < hit_rate(agent, unlimited(agent)) < 0.99
    assert 0.8 < hit_rate(chat, unlimited(chat)) < 0.95


def test_contexts_grow_until_they_are_compacted() -> None:
    quiet = replace(preset("agent"), subagent_share=0.0, turns=Spread(250, 0.0))
    trace = generate(quiet, 4, 0)
    sessions = np.array(trace.labels["session_id"])
    lengths = [trace.input_length[sessions == session] for session in range(4)]
    shrunk = [bool((np.diff(each) < 0).any()) for each in lengths]
    assert any(shrunk)
    for each in lengths:
        assert (np.diff(each) > 0).mean() > 0.9


def test_sub_agents_have_histories_of_their_own_and_never_come_back() -> None:
    always = replace(preset("agent"), subagent_share=1.0, turns=Spread(3, 0.0))
    alone = replace(always, subagent_share=0.0)
    assert len(generate(always, 5, 0)) > 2 * len(generate(alone, 5, 0))
    trace = generate(always, 1, 0)
    turns = trace.labels["turn"]
    assert turns.count(0) > 2  # the session and its sub-agents each begin once


def test_sessions_at_a_time_are_bounded() -> None:
    workload = replace(preset("chat"), sessions_live_max=3, arrival_s=0.01)
    trace = generate(workload, 30, 0)
    sessions = np.array(trace.labels["session_id"])
    spans = [
        (np.flatnonzero(sessions == s)[0], np.flatnonzero(sessions == s)[-1]) for s in range(30)
    ]
    live = [sum(low <= i <= high for low, high in spans) for i in range(len(trace))]
    assert max(live) == 3


def test_gaps_are_quick_for_tools_and_heavy_tailed_for_people() -> None:
    workload = replace(preset("agent"), subagent_share=0.0, human_share=0.5, turns=Spread(250, 0.0))
    trace = generate(workload, 8, 0)
    sessions = np.array(trace.labels["session_id"])
    gaps_s = np.concatenate([np.diff(trace.timestamp_ms[sessions == s]) / 1000 for s in range(8)])
    assert np.median(gaps_s) < 60
    assert np.quantile(gaps_s, 0.99) > 20 * np.median(gaps_s)
    assert gaps_s.max() <= workload.gap_max_s + 0.01


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'agent'"):
        preset("agnet")
    with pytest.raises(ConfigError, match="not positive"):
        generate(preset("chat"), 0)
    with pytest.raises(ConfigError, match="leaves no room"):
        replace(preset("chat"), context_tokens_max=2_000)


def test_presets_differ() -> None:
    for one, other in itertools.combinations(PRESETS.values(), 2):
        assert one != other
