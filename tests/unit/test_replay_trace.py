"""Traces and their files: what is read, what is refused, what comes back after writing."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import lzma
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_core.errors import ConfigError
from tutti_core.replay.mooncake import infer_block_tokens, read_trace, trace_name, write_trace
from tutti_core.replay.trace import KEY_BYTES, Trace


def request(timestamp: float = 0, tokens: int = 1000, ids: Any = (1, 2), **more: Any) -> str:
    fields = {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": ids}
    return json.dumps({**fields, **more})


GOOD = [request(0, 1000, [1, 2]), request(5, 1500, [1, 2, 3]), request(5, 1024, [1, 4])]


def written(folder: Path, lines: list[str], name: str = "day.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n")
    return file


def rows(trace: Trace) -> list[tuple[int, int, int, list[int]]]:
    return [
        (
            int(trace.timestamp_ms[i]),
            int(trace.input_length[i]),
            int(trace.output_length[i]),
            trace.ids[trace.offset[i] : trace.offset[i + 1]].tolist(),
        )
        for i in range(len(trace))
    ]


def test_reads_requests_as_arrays(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, [*GOOD, ""]))
    trace = read.trace
    assert rows(trace) == [(0, 1000, 5, [1, 2]), (5, 1500, 5, [1, 2, 3]), (5, 1024, 5, [1, 4])]
    assert trace.name == "day"
    assert trace.block_tokens == 512
    assert trace.unique_ids.tolist() == [1, 2, 3, 4]
    assert trace.dense.tolist() == [0, 1, 0, 1, 2, 0, 3]
    assert not read.problem_count and not read.local_ids


def test_a_trace_whose_file_has_no_newline_at_its_end_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(GOOD))
    assert len(read_trace(file).trace) == 3


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_compression_is_told_from_the_content(tmp_path: Path, pack: Any) -> None:
    file = tmp_path / "misnamed.jsonl"
    file.write_bytes(pack("\n".join(GOOD).encode()))
    assert len(read_trace(file).trace) == 3


def test_zstd_is_read_through_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd" + "\n".join(GOOD).encode())

    class Decompressor:
        def stream_reader(self, stream: Any, read_across_frames: bool) -> io.BytesIO:
            assert read_across_frames
            return io.BytesIO(stream.read()[4:])

    module = ModuleType("zstandard")
    module.ZstdDecompressor = Decompressor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zstandard", module)
    assert len(read_trace(file).trace) == 3
    assert trace_name(file) == "x"


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd....")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        read_trace(file)


def test_the_real_zstandard_is_used_where_it_is_installed(tmp_path: Path) -> None:
    if importlib.util.find_spec("zstandard") is None:
        return  # covered by the stand-in above
    zstandard = importlib.import_module("zstandard")
    file = tmp_path / "x.jsonl.zst"
    file.write_bytes(zstandard.ZstdCompressor().compress("\n".join(GOOD).encode()))
    assert len(read_trace(file).trace) == 3


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(gzip.compress("\n".join(GOOD).encode())))
    monkeypatch.setattr(sys, "stdin", stream)
    read = read_trace("-")
    assert len(read.trace) == 3
    assert read.trace.name == "stdin"


def test_progress_ends_with_the_whole_file(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD * 1)
    seen: list[tuple[int, int]] = []
    read_trace(file, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (file.stat().st_size, file.stat().st_size)


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, [*GOOD, "nonsense"]), limit=2).trace) == 2


# ---- malformed lines ----
MALFORMED = {
    "not JSON": "{",
    "not a JSON object": "[1]",
    "timestamp is missing": '{"input_length": 1, "output_length": 1, "hash_ids": []}',
    "output_length is missing": '{"timestamp": 9, "input_length": 1, "hash_ids": []}',
    "input_length = -1": request(9, -1, []),
    "input_length = 1.5": request(9, 1.5, []),  # type: ignore[arg-type]
    "input_length = true": request(9, True, []),
    "timestamp = NaN": request(float("nan")),
    'timestamp = "9"': request("9"),  # type: ignore[arg-type]
    "timestamp = 99999999999999999999": request(99999999999999999999),
    "hash_ids is missing": '{"timestamp": 9, "input_length": 1, "output_length": 1}',
    "hash_ids is not a list": request(9, 1000, "12"),
    "the id -1": request(9, 1000, [1, -1]),
    "the id 18446744073709551616": request(9, 1000, [1, 1 << 64]),
    "the id 2.0": request(9, 1000, [1, 2.0]),
    "the id true": request(9, 1000, [1, True]),
    'the id "2"': request(9, 1000, [1, "2"]),
    "the id null": request(9, 1000, [1, None]),
    "timestamp 4 is before 5": request(4),
    "2 ids for 9000 tokens do not fit blocks of 512": request(9, 9000, [1, 2]),
    "2 ids for 512 tokens do not fit blocks of 512": request(9, 512, [1, 2]),
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_a_malformed_line_is_refused_with_its_place(tmp_path: Path, reason: str) -> None:
    file = written(tmp_path, [*GOOD, MALFORMED[reason]])
    with pytest.raises(ConfigError) as caught:
        read_trace(file)
    assert reason in str(caught.value)
    assert "line 4" in str(caught.value) and "day.jsonl" in str(caught.value)


@pytest.mark.parametrize("reason", MALFORMED)
def test_or_skipped_and_reported(tmp_path: Path, reason: str) -> None:
    read = read_trace(written(tmp_path, [*GOOD, MALFORMED[reason], request(9)]), on_error="skip")
    assert len(read.trace) == 4
    assert read.problem_count == 1
    assert read.problems[0].line == 4
    assert reason in read.problems[0].reason


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "turn"]),
        JSON_VALUES,
    )
)
def test_no_line_does_more_than_be_malformed(fields: dict[str, Any]) -> None:
    line = {"timestamp": 9, "input_length": 512, "output_length": 1, "hash_ids": [5], **fields}
    stream = io.TextIOWrapper(io.BytesIO("\n".join([*GOOD, json.dumps(line)]).encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stream)
        read = read_trace("-", on_error="skip")
    assert len(read.trace) + read.problem_count == 4


def test_bytes_that_are_no_text_are_malformed(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(GOOD[0].encode() + b"\n\xff\xfe\x80\n" + b"[" * 100_000 + b"\n")
    read = read_trace(file, on_error="skip")
    assert [problem.reason for problem in read.problems] == ["not JSON", "not JSON"]


def test_all_problems_are_counted_and_some_kept(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, [*GOOD, *["x"] * 50]), on_error="skip", problems_max=3)
    assert read.problem_count == 50
    assert [problem.line for problem in read.problems] == [4, 5, 6]


def test_tolerated(tmp_path: Path) -> None:
    lines = [
        request(0.4, 512, [7]),
        request(0.6, 0, []),
        request(7, 300, [1 << 63], extra={"a": 1}),
    ]
    trace = read_trace(written(tmp_path, lines)).trace
    assert trace.timestamp_ms.tolist() == [0, 1, 7]
    assert trace.ids.tolist() == [7, 1 << 63]


@pytest.mark.parametrize("text", ["", "\n\n", "nonsense\n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(file, on_error="skip")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_damaged_file_is_refused(tmp_path: Path, pack: Any) -> None:
    data = bytearray(pack("\n".join(GOOD * 50).encode()))
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"damaged|cannot be read"):
        read_trace(file)


# ---- the size of a block ----
@pytest.mark.parametrize(
    ("counts", "tokens", "size"),
    [
        ([14, 15, 1], [6758, 7322, 30], 512),  # the partial block counted
        ([2847, 4605, 10], [182258, 294776, 700], 64),  # left out
        ([10, 20, 7], [10 * 48 - 1, 20 * 48 - 5, 7 * 48], 48),  # no power of two fits
        ([1], [300], 512),
        ([0, 0], [100, 40], 128),
    ],
)
def test_block_size_is_told_from_lengths(counts: list[int], tokens: list[int], size: int) -> None:
    assert infer_block_tokens(np.array(counts), np.array(tokens)) == size


def test_a_block_size_that_cannot_be_told_must_be_given(tmp_path: Path) -> None:
    lines = [request(i, tokens, [1, 2, 3, 4]) for i, tokens in enumerate((10, 1000, 90_000))]
    with pytest.raises(ConfigError, match="--block-tokens"):
        read_trace(written(tmp_path, lines))
    with pytest.raises(ConfigError, match="fits no request"):
        read_trace(written(tmp_path, GOOD), block_tokens=3, on_error="skip")


# ---- chain ids ----
def test_ids_of_blocks_alone_become_ids_of_prefixes(tmp_path: Path) -> None:
    lines = [
        request(0, 1500, [1, 9, 9]),  # 9 after 1, and after itself
        request(1, 1500, [2, 9, 3]),
        request(2, 1500, [1, 9, 3]),
    ]
    read = read_trace(written(tmp_path, lines))
    assert read.local_ids
    first, second, third = (ids for *_, ids in rows(read.trace))
    assert read.trace.has_chain_ids()
    assert first[:2] == third[:2]
    assert len({*first, *second, *third}) == 3 + 3 + 1


def test_chaining_keeps_which_requests_share_what(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, GOOD)).trace
    chained = trace.with_chain_ids()
    assert chained.has_chain_ids()
    _, old = np.unique(trace.ids, return_inverse=True)
    _, new = np.unique(chained.ids, return_inverse=True)
    assert len(set(zip(old.tolist(), new.tolist(), strict=True))) == len(chained.unique_ids)


@pytest.mark.parametrize(
    ("ids", "chained"),
    [([[1, 2], [1, 2, 3], [4]], True), ([[1, 2], [2]], False), ([[1, 2], [3, 2]], False)],
)
def test_local_ids_are_found(tmp_path: Path, ids: list[list[int]], chained: bool) -> None:
    lines = [request(i, 512 * len(each), each) for i, each in enumerate(ids)]
    assert read_trace(written(tmp_path, lines)).local_ids is not chained


# ---- keys, parts, labels ----
def test_keys_are_ids_of_fixed_width(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, GOOD)).trace
    assert trace.keys(2) == b"".join(i.to_bytes(KEY_BYTES, "little") for i in (1, 4))


def test_tokens_of_blocks_end_with_the_request(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, GOOD)).trace
    assert trace.tokens_of(np.array([1, 3, 2])).tolist() == [512, 1500, 1024]


def test_labels_are_kept_where_there_are_any(tmp_path: Path) -> None:
    lines = [request(0), request(1, turn=3, type="text"), request(2, session_id="s")]
    trace = read_trace(written(tmp_path, lines)).trace
    assert trace.labels == {
        "turn": [None, 3, None],
        "type": [None, "text", None],
        "session_id": [None, None, "s"],
    }


def test_parts_of_a_trace(tmp_path: Path) -> None:
    lines = [request(0, turn=1), request(1, 1500, [1, 2, 3], turn=2), request(2, 512, [9], turn=3)]
    trace = read_trace(written(tmp_path, lines)).trace
    part = trace.select(np.array([True, False, True]))
    assert rows(part) == [rows(trace)[0], rows(trace)[2]]
    assert part.labels == {"turn": [1, 3]}


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.xz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    trace = read_trace(written(tmp_path, [*GOOD, request(9, session_id=4)])).trace
    write_trace(trace, tmp_path / name)
    back = read_trace(tmp_path / name).trace
    assert rows(back) == rows(trace)
    assert back.labels == trace.labels
    assert back.name == "x"
