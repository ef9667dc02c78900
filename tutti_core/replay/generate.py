"""Synthetic traces of agent and chat traffic: every property a stated parameter, the rest a seed.

A session is one conversation of one *agent kind*. All kinds share a system prompt; each has tool
definitions of its own. From there the context grows turn by turn, by what the model wrote and what
tools or a human answered. Now and then a session sends sub-agents out and waits for them: each
starts from the shared prompt, has a short history of its own, and never comes back. A context that
would grow too long is compacted: a summary takes the place of all that follows the shared prompt.

Ids are chain ids; partial blocks are left out, as in a store of whole pages. Sub-agents have the
`session_id` of their session; `turn` counts the requests of one context. The same parameters and
seed give the same trace.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tutti_core.errors import ConfigError, nearest
from tutti_core.replay.trace import I64, Trace, offsets_of


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal quantity: `median`, `sigma` of its logarithm, never above `most`."""

    median: float
    sigma: float
    most: float = math.inf

    def draw(self, random: Random) -> float:
        """One value."""
        return min(random.lognormvariate(math.log(self.median), self.sigma), self.most)

    def draw_whole(self, random: Random) -> int:
        """One value, rounded, at least 1."""
        return max(round(self.draw(random)), 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """What a synthetic trace is like. Lengths are in tokens, times in seconds.

    Parameters
        block_tokens: tokens of a block.
        system_tokens: system prompt, the same for all agents.
        kinds: agent kinds; a session's kind is drawn, the first ones more often (1 / rank).
        tool_tokens: tool definitions of a kind, drawn once a kind.
        arrival_s: mean time between two sessions that arrive (Poisson).
        sessions_live_max: sessions at a time; who arrives above that waits for one to end.
        turns: requests of a session.
        opening_tokens: first message of a session, files it brings along included.
        growth_tokens: what one turn adds to the context: the model's words and tools' answers.
        user_tokens: the same where a human answers.
        output_tokens: what the model generates in one request, reasoning that is not kept included.
        input_output_ratio: input over output tokens of the whole trace; all outputs are scaled by
            one factor to come to this. None: as drawn.
        human_share: share of turns after which a human answers, not a tool.
        tool_gap_s: from a request to the next one of its session, through a tool call.
        human_gap_s: the least time a human takes; above it a Pareto tail of exponent `human_tail`.
        gap_max_s: no gap is longer.
        subagent_share: share of a session's turns that send out sub-agents.
        subagents_max: of which 1 .. this many start at once.
        subagent_turns, subagent_tokens: requests of a sub-agent, and the task it is given.
        context_tokens_max: a context that would grow beyond is compacted.
        summary_tokens: what compaction leaves, besides the shared prompt.
    """

    block_tokens: int
    system_tokens: int
    kinds: int
    tool_tokens: Spread
    arrival_s: float
    sessions_live_max: int
    turns: Spread
    opening_tokens: Spread
    growth_tokens: Spread
    user_tokens: Spread
    output_tokens: Spread
    input_output_ratio: float | None
    human_share: float
    tool_gap_s: Spread
    human_gap_s: float
    human_tail: float
    gap_max_s: float
    subagent_share: float
    subagents_max: int
    subagent_turns: Spread
    subagent_tokens: Spread
    context_tokens_max: int
    summary_tokens: Spread

    def __post_init__(self) -> None:
        shared = self.system_tokens + self.tool_tokens.most + self.summary_tokens.most
        if shared + self.growth_tokens.most > self.context_tokens_max:
            raise ConfigError("context_tokens_max leaves no room for the prompt and one turn")


_AGENT = Workload(
    block_tokens=64,
    system_tokens=4_000,
    kinds=4,
    tool_tokens=Spread(10_000, 0.4, 24_000),
    arrival_s=45.0,
    sessions_live_max=32,
    turns=Spread(45, 1.0, 250),
    opening_tokens=Spread(30_000, 1.2, 200_000),
    growth_tokens=Spread(700, 1.4, 60_000),
    user_tokens=Spread(400, 1.0, 40_000),
    output_tokens=Spread(230, 1.1, 8_000),
    input_output_ratio=None,
    human_share=0.08,
    tool_gap_s=Spread(16, 0.9, 600),
    human_gap_s=30.0,
    human_tail=0.8,
    gap_max_s=4 * 3600.0,
    subagent_share=0.03,
    subagents_max=3,
    subagent_turns=Spread(6, 0.6, 40),
    subagent_tokens=Spread(1_500, 0.7, 10_000),
    context_tokens_max=300_000,
    summary_tokens=Spread(8_000, 0.5, 20_000),
)

_CHAT = replace(
    _AGENT,
    system_tokens=1_200,
    kinds=3,
    tool_tokens=Spread(600, 0.5, 2_000),
    arrival_s=4.0,
    sessions_live_max=256,
    turns=Spread(4, 0.9, 60),
    opening_tokens=Spread(250, 1.6, 30_000),
    growth_tokens=Spread(500, 0.8, 8_000),
    user_tokens=Spread(420, 0.9, 20_000),
    output_tokens=Spread(320, 0.7, 4_000),
    human_share=0.95,
    tool_gap_s=Spread(6, 0.6, 60),
    human_gap_s=12.0,
    human_tail=0.9,
    subagent_share=0.0,
    context_tokens_max=64_000,
    summary_tokens=Spread(1_000, 0.5, 4_000),
)

PRESETS: Mapping[str, Workload] = MappingProxyType(
    {
        "agent": _AGENT,
        "agent-131": replace(_AGENT, input_output_ratio=131.0),
        "chat": _CHAT,
    }
)
"""agent: coding agents, shaped after agent_dev. agent-131: the same at 131 input tokens for each
output token, the ratio that the project's source page gives. chat: people, short contexts."""


def preset(name: str) -> Workload:
    """Return a preset.

    Raises
        ConfigError: there is none of that name.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset is called {name!r}", hint=nearest(name, PRESETS))
    return PRESETS[name]


def generate(workload: Workload, sessions: int, seed: int = 0, name: str = "synthetic") -> Trace:
    """Return a trace of `sessions` sessions, from the first request to the end of the last one.

    Raises
        ConfigError: sessions < 1.
    """
    if sessions < 1:
        raise ConfigError(f"sessions = {sessions} is not positive")
    rows = _Traffic(workload, Random(seed)).run(sessions)
    inputs = np.array(rows.input_length, dtype=np.int64)
    return Trace(
        name,
        workload.block_tokens,
        np.array(rows.timestamp_ms, dtype=np.int64),
        inputs,
        _scaled(np.array(rows.output), int(inputs.sum()), workload.input_output_ratio),
        offsets_of(np.array(rows.counts)),
        np.frombuffer(rows.ids, dtype=np.uint64),
        {"session_id": rows.session, "turn": rows.turn},
    )


def _scaled(drawn: npt.NDArray[np.float64], input_tokens: int, ratio: float | None) -> I64:
    """Whole output lengths, of which there are input_tokens / ratio in total; 1 or more each."""
    if ratio is not None:
        drawn = drawn * (input_tokens / ratio / drawn.sum())
    whole: I64 = np.maximum(np.rint(drawn), 1).astype(np.int64)
    return whole


@dataclass(slots=True)
class _Rows:
    """Requests in the order of time."""

    timestamp_ms: list[int] = field(default_factory=list)
    input_length: list[int] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("Q"))
    session: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Context:
    """One growing context: a session's, or a sub-agent's (then it has a parent)."""

    session: int
    kind: int
    ids: array[int]
    tokens: int
    turns_left: int
    parent: _Context | None = None
    turn: int = 0
    awaited: int = 0  # sub-agents that are still at work


class _Traffic:
    """The event loop: one event is one request."""

    def __init__(self, workload: Workload, random: Random) -> None:
        self._w = workload
        self._random = random
        self._rows = _Rows()
        self._next_id = 1
        self._serial = 0
        self._events: list[tuple[float, int, _Context]] = []
        self._waiting: deque[int] = deque()  # sessions that arrived when too many were live
        self._live = 0
        system = self._fresh(workload.system_tokens // workload.block_tokens)
        self._prompts = [self._prompt(system) for _ in range(workload.kinds)]

    def run(self, sessions: int) -> _Rows:
        """Let `sessions` sessions arrive and end."""
        arrivals: deque[tuple[float, int]] = deque()
        time_s = 0.0
        for session in range(sessions):
            arrivals.append((time_s, session))
            time_s += self._random.expovariate(1 / self._w.arrival_s)
        while arrivals or self._events:
            if arrivals and (not self._events or arrivals[0][0] <= self._events[0][0]):
                self._arrive(*arrivals.popleft())
            else:
                time_s, _, context = heapq.heappop(self._events)
                self._request(time_s, context)
        return self._rows

    # ---- sessions ----
    def _arrive(self, time_s: float, session: int) -> None:
        if self._live >= self._w.sessions_live_max:
            self._waiting.append(session)
            return
        self._live += 1
        kind = self._draw_kind()
        turns = self._w.turns.draw_whole(self._random)
        context = self._start(session, kind, turns)
        self._grow(context, self._w.opening_tokens.draw_whole(self._random))
        self._schedule(time_s, context)

    def _start(
        self, session: int, kind: int, turns: int, parent: _Context | None = None
    ) -> _Context:
        ids, tokens = self._prompts[kind]
        return _Context(session, kind, array("Q", ids), tokens, turns, parent)

    def _request(self, time_s: float, context: _Context) -> None:
        """One request, and what it leads to."""
        self._emit(time_s, context)
        context.turns_left -= 1
        if context.turns_left <= 0:
            self._end(time_s, context)
            return
        human = self._random.random() < self._w.human_share and context.parent is None
        after_s = time_s + self._gap_s(human)
        spread = self._w.user_tokens if human else self._w.growth_tokens
        self._grow(context, spread.draw_whole(self._random))
        if context.parent is None and self._random.random() < self._w.subagent_share:
            self._send_out(after_s, context)
        else:
            self._schedule(after_s, context)

    def _send_out(self, time_s: float, context: _Context) -> None:
        context.awaited = self._random.randint(1, self._w.subagents_max)
        for _ in range(context.awaited):
            turns = self._w.subagent_turns.draw_whole(self._random)
            agent = self._start(context.session, self._draw_kind(), turns, context)
            self._grow(agent, self._w.subagent_tokens.draw_whole(self._random))
            self._schedule(time_s, agent)

    def _end(self, time_s: float, context: _Context) -> None:
        parent = context.parent
        if parent is not None:
            parent.awaited -= 1
            if not parent.awaited:
                self._schedule(time_s + self._gap_s(human=False), parent)
            return
        self._live -= 1
        if self._waiting:
            self._arrive(time_s, self._waiting.popleft())

    def _emit(self, time_s: float, context: _Context) -> None:
        rows = self._rows
        rows.timestamp_ms.append(round(time_s * 1000))
        rows.input_length.append(context.tokens)
        rows.output.append(self._w.output_tokens.draw(self._random))
        rows.counts.append(len(context.ids))
        rows.ids.extend(context.ids)
        rows.session.append(context.session)
        rows.turn.append(context.turn)
        context.turn += 1

    def _schedule(self, time_s: float, context: _Context) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, context))

    # ---- contexts ----
    def _prompt(self, system: array[int]) -> tuple[array[int], int]:
        """Blocks and tokens that all contexts of one kind start with."""
        tokens = self._w.system_tokens + self._w.tool_tokens.draw_whole(self._random)
        return system + self._fresh(tokens // self._w.block_tokens - len(system)), tokens

    def _grow(self, context: _Context, tokens: int) -> None:
        """Append `tokens`, after compaction where they would not fit."""
        if context.tokens + tokens > self._w.context_tokens_max:
            ids, shared = self._prompts[context.kind]
            context.ids = array("Q", ids)
            context.tokens = shared + self._w.summary_tokens.draw_whole(self._random)
            tokens = min(tokens, self._w.context_tokens_max - context.tokens)
        context.tokens += tokens
        context.ids.extend(self._fresh(context.tokens // self._w.block_tokens - len(context.ids)))

    def _fresh(self, count: int) -> array[int]:
        first, self._next_id = self._next_id, self._next_id + count
        return array("Q", range(first, self._next_id))

    # ---- draws ----
    def _draw_kind(self) -> int:
        kinds = range(self._w.kinds)
        return self._random.choices(kinds, [1 / (kind + 1) for kind in kinds])[0]

    def _gap_s(self, human: bool) -> float:
        if human:
            gap_s = self._w.human_gap_s * self._random.paretovariate(self._w.human_tail)
        else:
            gap_s = self._w.tool_gap_s.draw(self._random)
        return min(gap_s, self._w.gap_max_s)
