"""`tutti replay` and `tutti trace`: options, outputs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from tutti_core.errors import ConfigError
from tutti_core.policies.choice import DEFAULT, POLICIES
from tutti_core.replay import commands
from tutti_core.replay.generate import generate, preset
from tutti_core.replay.mooncake import read_trace, write_trace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command("replay")(commands.replay)
app.add_typer(commands.trace_app, name="trace")

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; gives standard output and standard error."""

    def call(*arguments: object) -> tuple[str, str]:
        status = app([str(each) for each in arguments], prog_name="tutti", standalone_mode=False)
        assert not status
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("traces") / "chat.jsonl.gz"
    write_trace(generate(preset("chat"), 20, 1), file)
    return file


def result_of(run: Run, *arguments: object) -> dict[str, Any]:
    out, _ = run("replay", *arguments, "--json", "-")
    found: dict[str, Any] = json.loads(out)
    return found


def test_replay_shows_a_table(run: Run, chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = run("replay", chat)
    assert "chat: " in out and f"{DEFAULT} *" in out
    assert "clair-" in out and "unlimited: 0." in out
    assert "…" not in out  # nothing is cut off


def test_the_defaults(run: Run, chat: Path) -> None:
    result = result_of(run, chat)
    assert [row["policy"] for row in result["rows"]] == [DEFAULT] * 5
    assert result["parameters"]["capacity_pct"] == [2, 5, 10, 25, 50]
    assert result["traces"][0]["page_bytes"] == 64 * 128 * 1024


def test_all_policies_and_capacities_in_pages(run: Run, chat: Path) -> None:
    result = result_of(
        run, chat, "--policy", "all", "--capacity-pages", "50,70", "--page-bytes", "2MiB"
    )
    assert [(row["policy"], row["capacity_pages"]) for row in result["rows"]] == [
        (policy, pages) for pages in (50, 70) for policy in POLICIES
    ]
    assert all(row["bytes_written"] % (2 << 20) == 0 for row in result["rows"])


def test_several_traces_and_names_that_are_equal(run: Run, chat: Path, tmp_path: Path) -> None:
    twin = tmp_path / "chat.jsonl"
    write_trace(read_trace(chat, limit=30).trace, twin)
    result = result_of(run, chat, twin, "--capacity-pct", "10", "--jobs", "2")
    assert [trace["name"] for trace in result["traces"]] == ["chat", "chat'"]
    assert [row["trace"] for row in result["rows"]] == ["chat", "chat'"]


def test_a_limit_and_a_block_size(run: Run, chat: Path) -> None:
    facts = result_of(run, chat, "--limit", "10", "--block-tokens", "64")["traces"][0]
    assert (facts["requests"], facts["block_tokens"]) == (10, 64)


def test_results_go_to_files(run: Run, chat: Path, tmp_path: Path) -> None:
    out, _ = run("replay", chat, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert "chat" in out
    assert json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    out, _ = run("replay", chat, "--html", "-")
    assert out.startswith("<!DOCTYPE html>") and out.endswith("</html>\n")


def test_malformed_lines_are_refused_or_told_on_standard_error(
    run: Run, chat: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    write_trace(read_trace(chat).trace, bad)
    bad.write_text(bad.read_text() + "nonsense\n" * 9)
    with pytest.raises(ConfigError, match=r"line \d+: not JSON"):
        run("replay", bad)
    _, err = run("replay", bad, "--on-error", "skip")
    assert "bad: 9 malformed lines were left out" in err
    assert err.count("not JSON") == 5


def test_ids_of_blocks_alone_are_told(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "local.jsonl"
    line = '{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [%s]}\n'
    file.write_text((line % "1, 1") * 40)
    _, err = run("replay", file, "--capacity-pct", "100")
    assert "ids name blocks alone" in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--capacity-pct", "0"], "capacity_pct = 0 "),
        (["--capacity-pct", "5,-3"], "capacity_pct = -3 "),
        (["--capacity-pct", "101"], "capacity_pct = 101 "),
        (["--capacity-pct", "nan"], "capacity_pct = nan "),
        (["--capacity-pct", "5,,6"], "capacity_pct = '' is not a number"),
        (["--capacity-pct", "many"], "capacity_pct = 'many' is not a number"),
        (["--capacity-pages", "0"], "capacity_pages = 0 "),
        (["--capacity-pages", "1.5"], "capacity_pages = '1.5' are not whole"),
        (["--capacity-pages", "999999999"], "above 100 %"),
        (["--dram-pct", "150"], "dram_pct = 150 "),
        (["--dram-pct", "half"], "dram_pct = 'half' is not a number"),
        (["--page-bytes", "big"], "page_bytes = 'big' is not a size"),
        (["--page-bytes", "0"], "page_bytes = 0 "),
        (["--policy", "lur"], "did you mean 'lru'"),
        (["--policy", ""], "no policy is called ''"),
        (["--json", "-", "--html", "-"], "only one"),
        (["--json", "/absent/x.json"], "cannot be written"),
        (["--html", "."], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, chat: Path, options: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run("replay", chat, *options)


def test_generate_writes_what_replay_reads(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "made.jsonl.xz"
    _, err = run(
        "trace", "generate", "--preset", "chat", "--seed", 3, "--sessions", 9, "--out", file
    )
    assert err.startswith("made: ") and "tokens in for each out" in err
    assert result_of(run, file)["rows"][0]["trace"] == "made"
    again = tmp_path / "again.jsonl.xz"
    run("trace", "generate", "--preset", "chat", "--seed", 3, "--sessions", 9, "--out", again)
    assert again.read_bytes() == file.read_bytes()


def test_generate_refuses_what_cannot_be(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no preset is called 'chta'"):
        run("trace", "generate", "--preset", "chta", "--out", tmp_path / "x")
    with pytest.raises(ConfigError, match="cannot be written"):
        run("trace", "generate", "--out", tmp_path / "absent" / "x")
    with pytest.raises(ConfigError, match="zstd is read, not written"):
        run("trace", "generate", "--sessions", 1, "--out", tmp_path / "x.zst")
    assert not list(tmp_path.iterdir())


def test_generate_writes_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    arguments = ["trace", "generate", "--preset", "chat", "--sessions", "2", "--out", "-"]
    app(arguments, prog_name="tutti", standalone_mode=False)
    out, err = capfdbinary.readouterr()
    assert json.loads(out.splitlines()[0])["timestamp"] == 0
    assert err.startswith(b"chat: ")
