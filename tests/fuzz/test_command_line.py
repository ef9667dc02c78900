"""Every command with nonsense in every option: a message and an exit status, never a traceback."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tutti_core import cli
from tutti_core.trials.decoders import StoredBytes
from tutti_core.trials.kit import quiet

CORPUS = Path(__file__).parent / "corpus"
NONSENSE = ("", "-1", "0", "x", "1.5", "nan", "1e999", "a\0b", "é" * 300, "\udc80", "[red]", "--")
"""Nothing that would be a huge but honest order."""
STATUSES = (0, 1, 2)


def commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a group, with its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*names, name))
        else:
            yield (*names, name), command


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


@pytest.fixture
def places(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Things that are not what a path should name."""
    monkeypatch.chdir(fast_path)
    (fast_path / "empty").mkdir()
    (fast_path / "binary").write_bytes(bytes(range(256)) * 16)
    (fast_path / "binary.toml").write_bytes(bytes(range(256)))
    (fast_path / "binary.json").write_bytes(b"\xff" * 99)
    (fast_path / "deep.json").write_bytes(b"[" * 5000)
    (fast_path / "loop").symlink_to(fast_path / "loop")
    closed = fast_path / "closed"
    closed.mkdir()
    (closed / "inside").touch()
    closed.chmod(0)
    names = ("empty", "binary", "binary.toml", "binary.json", "deep.json", "loop", "closed")
    return {name: str(fast_path / name) for name in (*names, "closed/inside", "missing/below")}


def check(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a command line; what it says fits how it ends."""
    try:
        status = cli.main(arguments)
    except SystemExit as error:  # --help
        status = int(error.code or 0)
    out, error_text = capsys.readouterr()
    assert status in STATUSES, arguments
    assert "Traceback" not in out + error_text, arguments
    if status == 2:
        assert error_text.startswith("error: ") or "Usage" in out + error_text, arguments
        assert len(error_text) < 4000, arguments
    return status


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_nonsense_in_every_option(
    words: tuple[str, ...], places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    params = [param for param in COMMANDS[words].params if param.name != "help"]
    values = (*NONSENSE, *places.values())
    if words[0] == "bench":  # many options, checked by the same code
        values = ("", "-1", "x", "\udc80", places["binary"])
    refused = 0
    for param, value in itertools.product(params, values):
        option = [param.opts[0]] if param.param_type_name == "option" else []
        given = [] if getattr(param, "is_flag", False) else [value]
        # A bench that got a sensible order would start to measure: its directory comes last.
        blocked = ["--dir", places["missing/below"]] if words[0] == "bench" else []
        small = ["--sessions", "1"] if words == ("trace", "generate") else []
        with quiet():
            refused += check([*words, *small, *option, *given, *blocked], capsys) == 2
    assert refused > len(params)


def test_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["frob"], ["--frob"], ["\0"], ["bench", "frob"], ["init", "--frob", "1"]):
        assert check(words, capsys) == 2


def test_stores_with_any_damage(fast_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kept input for the catalog, as `info`, `verify` and `verify --repair` see it."""
    stored = StoredBytes(fast_path)
    path = str(stored.config.path)
    for file in sorted((CORPUS / "catalog").iterdir()):
        with quiet(), stored.damaged(file.read_bytes()):
            for command in (["info", path], ["verify", path], ["verify", path, "--repair"]):
                check(command, capsys)


def test_what_is_no_store(places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for place in places.values():
        for command in ("info", "verify"):
            if not (os.geteuid() == 0 and "closed" in place):
                assert check([command, place], capsys) == 2, place
