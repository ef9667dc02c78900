"""Traces as files: JSON lines in Mooncake's format, plain or compressed, read and written.

A line is one request, an object with `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids` (one id a block, root to leaf), in the order of time. Other fields are ignored, except
those of LABELS, which are kept. Blank lines are skipped.

What a malformed line is (all else is tolerated): not a JSON object; one of the four fields missing;
a time or a length that is negative, or no number, or (lengths) not an integer; an id that is not an
integer of 64 bits, unsigned; a time before that of the line above; a count of ids that cannot be
`input_length` cut into blocks. Both cuts in use are taken: with the partial last block (Mooncake's
own files) and without it (agent_dev).
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tutti_core.errors import ConfigError
from tutti_core.replay.files import Progress, opened_lines, written_lines
from tutti_core.replay.trace import I64, Trace, offsets_of

LABELS = ("session_id", "chat_id", "parent_chat_id", "turn", "type")
"""Optional fields that `Trace.labels` keeps where a file has them."""

OnError = Literal["refuse", "skip"]
BLOCK_TOKENS_MAX = 1 << 20
_LENGTH_MAX = 1 << 40  # beyond is nonsense, and sums of them must fit int64
_TIMESTAMP_MAX = 1 << 53
_PROBLEMS_MAX = 20
_SUFFIXES = (".gz", ".xz", ".zst", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class Problem:
    """One malformed line, counted from 1, and what is wrong with it."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A trace, and what its file was like.

    Parameters
        problems: the first malformed lines, which were skipped.
        problem_count: all of them.
        local_ids: the file named blocks by their own content; `trace` has chain ids made of those.
    """

    trace: Trace
    problems: tuple[Problem, ...] = ()
    problem_count: int = 0
    local_ids: bool = False


# ---- reading ----
def read_trace(
    source: Path | str,
    *,
    block_tokens: int | None = None,
    on_error: OnError = "refuse",
    limit: int | None = None,
    problems_max: int = _PROBLEMS_MAX,
    progress: Progress | None = None,
) -> ReadTrace:
    """Read a trace; `-` is standard input. Compression is found by content, not by name.

    Where an id follows different predecessors, ids name a block alone and not its prefix; all ids
    are then replaced by hashes of the prefix they end (`Trace.with_chain_ids`), which changes
    nothing about which requests share which prefix.

    Parameters
        block_tokens: tokens of a block; by default the size that fits most of the lines.
        on_error: refuse the file at its first malformed line, or skip such lines and report them.
        limit: read this many requests at most.
        problems_max: malformed lines that are reported with a reason; all are counted.
    Raises
        ConfigError: the file cannot be read, holds no request, or (refuse) has a malformed line.
    """
    name = trace_name(source)
    rows = _Rows(str(source), on_error == "refuse", problems_max)
    with opened_lines(source, progress) as lines:
        for number, line in enumerate(lines, start=1):
            if len(rows.lines) == limit:
                break
            if line.strip():
                rows.add(number, line)
    if not rows.lines:
        raise ConfigError(
            f"trace = {str(source)!r} holds no request",
            hint=str(rows.problems[0]) if rows.problems else "",
        )
    trace = rows.trace(name, block_tokens)
    if trace.has_chain_ids():
        return ReadTrace(trace, tuple(rows.problems), rows.problem_count)
    chained = trace.with_chain_ids()
    return ReadTrace(chained, tuple(rows.problems), rows.problem_count, local_ids=True)


def trace_name(source: Path | str) -> str:
    """What a file's trace is called: its name without the suffixes of format and compression."""
    if str(source) == "-":
        return "stdin"
    path = Path(source)
    while path.suffix in _SUFFIXES:
        path = path.with_suffix("")
    return path.name


class _MalformedError(Exception):
    """A line is not a request; the text says why."""


@dataclass(slots=True)
class _Rows:
    """Requests as they are read, and the lines that were none."""

    source: str
    refuse: bool
    problems_max: int
    lines: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("Q"))
    labels: dict[str, list[Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    problem_count: int = 0

    def add(self, number: int, line: bytes) -> None:
        """Take one line over, or note what is wrong with it."""
        try:
            request = _parsed(line)
            timestamp = _timestamp(request)
            lengths = _length(request, "input_length"), _length(request, "output_length")
            if self.timestamps and timestamp < self.timestamps[-1]:
                raise _MalformedError(
                    f"timestamp {timestamp} is before {self.timestamps[-1]}, that of line "
                    f"{self.lines[-1]}; requests must be in the order of time"
                )
            ids = _ids(request, line)
        except _MalformedError as error:
            self.report(number, str(error))
            return
        self.lines.append(number)
        self.timestamps.append(timestamp)
        self.lengths.append(lengths)
        self.counts.append(len(ids))
        self.ids.extend(ids)
        for label in LABELS:
            if label in request or label in self.labels:
                column = self.labels.setdefault(label, [None] * (len(self.lines) - 1))
                column.append(request.get(label))

    def report(self, number: int, reason: str) -> None:
        """Count a malformed line, or refuse the file."""
        if self.refuse:
            raise ConfigError(
                f"trace = {self.source!r}, line {number}: {reason}",
                hint="on_error = skip leaves such lines out",
            )
        self.problem_count += 1
        if len(self.problems) < self.problems_max:
            self.problems.append(Problem(number, reason))

    def trace(self, name: str, block_tokens: int | None) -> Trace:
        """The requests as arrays, without those that no block of `block_tokens` tokens explains."""
        counts = np.array(self.counts, dtype=np.int64)
        lengths = np.array(self.lengths, dtype=np.int64)
        size = block_tokens or infer_block_tokens(counts, lengths[:, 0])
        trace = Trace(
            name,
            size,
            np.array(self.timestamps, dtype=np.int64),
            lengths[:, 0],
            lengths[:, 1],
            offsets_of(counts),
            np.frombuffer(self.ids, dtype=np.uint64),
            self.labels,
        )
        fits = _fits(counts, trace.input_length, size)
        if fits.all():
            return trace
        for i in np.flatnonzero(~fits).tolist():
            self.report(
                self.lines[i],
                f"{counts[i]} ids for {lengths[i, 0]} tokens do not fit blocks of {size} tokens",
            )
        self.problems.sort(key=lambda problem: problem.line)
        if not fits.any():
            raise ConfigError(f"block_tokens = {size} fits no request of {self.source!r}")
        return trace.select(fits)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise _MalformedError("not JSON") from None
    if not isinstance(request, dict):
        raise _MalformedError("not a JSON object")
    return request


def _timestamp(request: dict[str, Any]) -> int:
    value = request.get("timestamp")
    if isinstance(value, float) and math.isfinite(value):
        value = round(value)
    return _whole("timestamp", value, request, _TIMESTAMP_MAX)


def _length(request: dict[str, Any], name: str) -> int:
    return _whole(name, request.get(name), request, _LENGTH_MAX)


def _whole(name: str, value: object, request: dict[str, Any], most: int) -> int:
    if name not in request:
        raise _MalformedError(f"{name} is missing")
    if type(value) is not int or not 0 <= value <= most:
        raise _MalformedError(f"{name} = {_short(request[name])} is not an integer in 0 .. {most}")
    return value


def _ids(request: dict[str, Any], line: bytes) -> Sequence[int]:
    ids = request.get("hash_ids")
    if not isinstance(ids, list):
        raise _MalformedError("hash_ids is missing" if ids is None else "hash_ids is not a list")
    try:
        packed = array("Q", ids)
    except (TypeError, OverflowError):
        packed = None
    # A bool would pass for an integer; looked for only where the text has one.
    suspicious = packed is None or b"true" in line or b"false" in line
    for value in ids if suspicious else ():
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise _MalformedError(f"the id {_short(value)} is not an integer in 0 .. 2**64 - 1")
    assert packed is not None
    return packed


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ---- the size of a block ----
def infer_block_tokens(counts: I64, tokens: I64) -> int:
    """Return the block size that explains most requests: `counts` blocks for `tokens` tokens.

    A power of two if one explains half of them. Among sizes that explain equally many, one that
    never needs a block left out, then the smallest.
    Raises
        ConfigError: no size explains half of the requests.
    """
    some = counts > 0
    if not some.any():
        return 1 << int(tokens.max()).bit_length()  # a block that no request filled
    middle = int(np.median(tokens[some] / counts[some]))

    def rank(size: int) -> tuple[int, int, int]:
        explained = _fits(counts, tokens, size)
        whole = explained & (counts * size >= tokens)
        return int(explained.sum()), int(whole.sum()), -size

    powers = [1 << shift for shift in range(BLOCK_TOKENS_MAX.bit_length())]
    for sizes in (powers, range(max(middle - 8, 1), middle + 9)):
        best = max(sizes, key=rank)
        if 2 * rank(best)[0] >= len(counts):
            return best
    raise ConfigError(
        "block_tokens cannot be told from the lengths of the requests",
        hint="give it: --block-tokens",
    )


def _fits(counts: I64, tokens: I64, size: int) -> npt.NDArray[np.bool_]:
    """Whether `tokens` tokens make that many blocks, the partial last one counted or left out."""
    return ((counts - 1) * size < tokens) & (tokens < (counts + 1) * size)


# ---- writing ----
def write_trace(trace: Trace, target: Path | str) -> None:
    """Write a trace so that `read_trace` gives it back; `-` is standard output.

    A name that ends in .gz or .xz is compressed.
    """
    written_lines(target, _lines(trace))


def _lines(trace: Trace) -> Iterator[bytes]:
    for i in range(len(trace)):
        request = {
            "timestamp": int(trace.timestamp_ms[i]),
            "input_length": int(trace.input_length[i]),
            "output_length": int(trace.output_length[i]),
            "hash_ids": trace.ids[trace.offset[i] : trace.offset[i + 1]].tolist(),
        }
        for name, column in trace.labels.items():
            if column[i] is not None:
                request[name] = column[i]
        yield json.dumps(request, separators=(",", ":")).encode() + b"\n"
