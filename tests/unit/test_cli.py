"""The `tutti` command: what it shows, writes as JSON, refuses, and exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti_core import PrefixStore, cli
from tutti_core.format import DATA_OFFSET_BYTES

PAGES = 8


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def run_json(tmp_path: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "result.json"
    status = run(*arguments, "--json", file)
    return status, json.loads(file.read_text())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with PrefixStore.open(path, capacity="64MiB") as opened:
        pages = opened.namespace(model="tiny [red]", page_bytes=4096, page_tokens=1)
        memory = np.random.default_rng(1).bytes(4096 * PAGES)
        assert pages.save(np.arange(PAGES), memory).wait(30).all()
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail with one line; returns the line."""
    assert run(*arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1
    return error


# ---- init ----
def test_init_creates_then_keeps_then_grows(tmp_path: Path) -> None:
    path = tmp_path / "store"
    status, made = run_json(tmp_path, "init", path, "--capacity", "64MiB", "--segment", "1MiB")
    assert status == 0 and made["created"] and not made["grown"]
    assert made["segment_bytes"] == 1 << 20 and made["pools"] == [str(path / "pool.tutti")]
    assert (path / "pool.tutti").stat().st_size == made["pool_bytes"] + DATA_OFFSET_BYTES
    _, kept = run_json(tmp_path, "init", path, "--capacity", "64MiB")
    assert not kept["created"] and not kept["grown"] and kept["store_id"] == made["store_id"]
    _, grown = run_json(tmp_path, "init", path, "--capacity", "128MiB")
    assert grown["grown"] and grown["segments"] > made["segments"]


def test_init_with_pools_preallocated(tmp_path: Path) -> None:
    pools = [tmp_path / "a", tmp_path / "b"]
    options = [part for pool in pools for part in ("--pool", pool)]
    arguments = ["init", tmp_path / "store", "--capacity", "64MiB", *options]
    status, made = run_json(tmp_path, *arguments, "--preallocate", "full")
    assert status == 0 and made["preallocated"]
    for pool in pools:
        facts = (pool / "pool.tutti").stat()
        assert facts.st_blocks * 512 >= facts.st_size
    assert run("verify", tmp_path / "store", *options) == 0


def test_init_discards_only_when_told_to(tmp_path: Path, store: Path) -> None:
    _, kept = run_json(tmp_path, "init", store, "--capacity", "64MiB")
    _, new = run_json(tmp_path, "init", store, "--capacity", "64MiB", "--discard")
    assert new["created"] and new["discarded"] and new["store_id"] != kept["store_id"]
    assert run_json(tmp_path, "info", store)[1]["store"]["pages"] == 0


def test_init_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "store.toml"
    file.write_text(f'path = "{tmp_path / "store"}"\ncapacity = "64MiB"\nsegment = "2MiB"\n')
    _, made = run_json(tmp_path, "init", "--config", file, "--segment", "1MiB")
    assert made["created"] and made["segment_bytes"] == 1 << 20


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--capacity", "1KiB"], "capacity"),
        (["--capacity", "many"], "capacity"),
        ([], "capacity"),
        (["--capacity", "64MiB", "--segment", "1000"], "segment"),
        (["--capacity", "64MiB", "--preallocate", "some"], "preallocate"),
        (["--capcity", "64MiB"], "--capcity"),
        (["--capacity", "64MiB", "--json", "/nonexistent/file"], "json"),
    ],
)
def test_init_refuses_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], names: str
) -> None:
    assert names in refused(capsys, "init", tmp_path / "store", *options)
    assert list(tmp_path.iterdir()) == []


# ---- info ----
def test_info_about_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = run_json(tmp_path, "info")
    assert status == 0
    assert [path["transport"] for path in shown["paths"]] == [
        "gpu",
        "gds",
        "uring",
        "posix",
        "auto",
    ]
    assert shown["paths"][-1]["works"] and all(path["reason"] for path in shown["paths"])
    assert set(shown["machine"]["versions"]) >= {"numpy", "lmdb"}
    assert "native extension" in capsys.readouterr().out


def test_info_about_a_store(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(store.rglob("*"))
    status, shown = run_json(tmp_path, "info", store, "--paths")
    assert status == 0 and sorted(store.rglob("*")) == before
    assert shown["store"]["pages"] == PAGES and shown["store"]["leases"] == []
    assert shown["store"]["namespaces"][0]["description"]["model"] == "tiny [red]"
    assert len(shown["paths"]) == 5
    assert "tiny [red]" in capsys.readouterr().out  # no markup from names


_SERVER = """
import sys
from tutti_core import PrefixStore
with PrefixStore.open(sys.argv[1], capacity="64MiB"):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_info_and_verify_beside_a_server(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == "open\n"
        _, shown = run_json(tmp_path, "info", store)
        assert shown["store"]["leases"] == [0] and shown["store"]["pages"] == PAGES
        capsys.readouterr()
        assert "--online" in refused(capsys, "verify", store)
        assert run("verify", store, "--online") == 0
    finally:
        server.communicate("", timeout=60)


@pytest.mark.parametrize("command", ["info", "verify"])
def test_there_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "there is no store" in refused(capsys, command, tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_pool_is_refused(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "pool.tutti").write_bytes(b"something else".ljust(8192))
    for arguments in (["info", store], ["verify", store], ["init", store, "--capacity", "64MiB"]):
        assert "not a Tutti pool" in refused(capsys, *arguments)


# ---- verify ----
def test_verify_exits_with_1_on_damage(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", store) == 0
    with open(store / "pool.tutti", "r+b") as pool:
        pool.seek(DATA_OFFSET_BYTES)
        pool.write(bytes(2 * 4096))
    status, found = run_json(tmp_path, "verify", store, "--examples", 1)
    assert status == 1 and not found["clean"]
    assert found["damage"]["payload"]["count"] == 2
    assert len(found["damage"]["payload"]["examples"]) == 1
    assert "and 1 more" in capsys.readouterr().out


def test_json_to_standard_output(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", store, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["clean"]


# ---- the command line ----
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["frob"], "frob"),
        (["verify"], "PATH"),
        (["verify", "x", "--transport", "gpus"], "transport"),
        (["bench", "io", "--dir", "/nonexistent"], "dir"),
        (["bench", "io", "--dir", "/tmp", "--sizes", "big"], "sizes"),
        (["bench", "io", "--dir", "/tmp", "--sizes", "1000"], "sizes"),
        (["bench", "io", "--dir", "/tmp", "--pages", "0"], "pages"),
        (["bench", "index", "--dir", "/nonexistent"], "dir"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    assert names in refused(capsys, *arguments)


def test_without_arguments_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    out, error = capsys.readouterr()
    assert "verify" in out + error and "error:" not in error


def test_bench_io_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--pages", 4, "--rounds", 1, "--sizes", "4KiB", "--no-peers"]
    status, shown = run_json(tmp_path, "bench", "io", "--dir", tmp_path, *options)
    assert status == 0 and [row["case"] for row in shown["rows"]] == ["save 4 KiB", "load 4 KiB"]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert "load 4 KiB" in capsys.readouterr().out
