"""The commands `tutti replay` and `tutti trace`; `cli` mounts them.

Tables go to standard output, progress and what was wrong with a trace to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tutti_core.console import can_write
from tutti_core.errors import ConfigError
from tutti_core.policies.choice import DEFAULT, POLICIES
from tutti_core.replay.evaluate import CAPACITY_PCT, JOBS_MAX, Evaluation, Plan, evaluate
from tutti_core.replay.generate import PRESETS, generate, preset
from tutti_core.replay.mooncake import (
    BLOCK_TOKENS_MAX,
    ReadTrace,
    read_trace,
    trace_name,
    write_trace,
)
from tutti_core.replay.page import html_page
from tutti_core.replay.report import Report, tables, trace_facts

_PROBLEMS_SHOWN = 5
_REDRAW_S = 0.1
_CAPACITY_PCT_WORDS = ",".join(f"{share:g}" for share in CAPACITY_PCT)
_Step = Callable[[str, int, int], None]

trace_app = typer.Typer(help="Traces of requests, for `tutti replay`.", no_args_is_help=True)


# ---- replay ----
def replay(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help="JSON lines in Mooncake's format, plain or .gz, .xz, .zst; - is standard input.",
        ),
    ],
    policy: Annotated[
        str, typer.Option(help=f"Policies, with commas, or all: {', '.join(POLICIES)}.")
    ] = DEFAULT,
    capacity_pct: Annotated[
        str | None,
        typer.Option(
            help="Capacities in percent of a trace's unique blocks, with commas.",
            show_default=_CAPACITY_PCT_WORDS,
        ),
    ] = None,
    capacity_pages: Annotated[
        str | None, typer.Option(help="Capacities in pages, with commas; instead of percent.")
    ] = None,
    dram_pct: Annotated[
        str, typer.Option(help="Share of each capacity that is DRAM, in percent.")
    ] = "0",
    page_bytes: Annotated[
        str | None,
        typer.Option(help='Size of a page, such as "8MiB".', show_default="128 KiB a token"),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=BLOCK_TOKENS_MAX,
            help="Tokens of a block.",
            show_default="told from the lengths",
        ),
    ] = None,
    on_error: Annotated[
        Literal["skip", "refuse"], typer.Option(help="What to do about malformed lines.")
    ] = "refuse",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Replay this many requests of each trace at most.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For policies that draw lots.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=JOBS_MAX, help="Processes.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result as JSON to FILE.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write charts as one HTML page to FILE.")
    ] = None,
) -> None:
    """Replay traces through eviction policies, next to what no policy can beat."""
    _check_outputs(json_file, html_file)
    plan = Plan(
        policies=_policies(policy),
        capacity_pct=_capacity_pct(capacity_pct, capacity_pages),
        capacity_pages=_whole_numbers("capacity_pages", capacity_pages),
        dram_pct=_number("dram_pct", dram_pct),
        page_bytes=_page_bytes(page_bytes),
        seed=seed,
        jobs=jobs,
    )
    found: list[tuple[dict[str, Any], Evaluation]] = []
    with _bar() as step:
        for name, source in _names(traces).items():
            read = read_trace(
                source,
                block_tokens=block_tokens,
                on_error=on_error,
                limit=limit,
                progress=partial(step, f"{name}: reading"),
            )
            read = replace(read, trace=replace(read.trace, name=name))
            _say_what_was_read(read)
            found.append((trace_facts(read, plan), evaluate(read.trace, plan, step)))
    report = Report.of(plan, found)
    _write(json_file, lambda: json.dumps(report.as_json(), indent=2) + "\n")
    _write(html_file, lambda: html_page(report))
    if Path("-") not in (json_file, html_file):
        console = Console()
        for table in tables(report):
            console.print(table)


def _names(sources: Sequence[str]) -> dict[str, str]:
    """Sources by the names of their traces, which are made different where they are not."""
    named: dict[str, str] = {}
    for source in sources:
        name = trace_name(source)
        while name in named:
            name += "'"
        named[name] = source
    return named


def _say_what_was_read(read: ReadTrace) -> None:
    name = read.trace.name
    if read.local_ids:
        _say(f"{name}: ids name blocks alone; prefixes were made of them")
    if read.problem_count:
        _say(f"{name}: {read.problem_count} malformed lines were left out")
        for problem in read.problems[:_PROBLEMS_SHOWN]:
            _say(f"  line {problem.line}: {problem.reason}")


# ---- values of options ----
def _policies(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(POLICIES)
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _capacity_pct(text: str | None, pages: str | None) -> tuple[float, ...]:
    if text is None:
        return () if pages else CAPACITY_PCT
    return tuple(_number("capacity_pct", part) for part in text.split(","))


def _whole_numbers(name: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"{name} = {text!r} are not whole numbers with commas") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} = {text.strip()!r} is not a number") from None


def _page_bytes(text: str | None) -> int | None:
    try:
        return None if text is None else int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(f"page_bytes = {text!r} is not a size", hint='such as "8MiB"') from None


# ---- trace ----
@trace_app.command("generate")
def trace_generate(
    out: Annotated[
        Path, typer.Option(help="File to write; .gz and .xz are compressed, - is standard output.")
    ],
    preset_name: Annotated[
        str, typer.Option("--preset", help=f"Kind of traffic: {', '.join(PRESETS)}.")
    ] = "agent",
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions that arrive.")] = 100,
) -> None:
    """Make a synthetic trace of agent or chat traffic."""
    _check_outputs(out)
    name = preset_name if out == Path("-") else trace_name(out)
    trace = generate(preset(preset_name), sessions, seed, name)
    write_trace(trace, out)
    inputs, outputs = int(trace.input_length.sum()), int(trace.output_length.sum())
    _say(
        f"{trace.name}: {len(trace)} requests, {len(trace.ids)} blocks, "
        f"{len(trace.unique_ids)} of them unique, {inputs / outputs:.0f} tokens in for each out"
    )


# ---- showing ----
def _check_outputs(*files: Path | None) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    if files.count(Path("-")) > 1:
        raise ConfigError("only one result can go to standard output")
    for file in files:
        if file is None or file == Path("-"):
            continue
        if not can_write(file):
            raise ConfigError(f"{str(file)!r} cannot be written")


def _write(file: Path | None, text: Callable[[], str]) -> None:
    if file == Path("-"):
        print(text(), end="")
    elif file is not None:
        file.write_text(text(), encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[_Step]:
    """Bars on standard error where that is a terminal; yields (what, done, total)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    hidden = not console.is_terminal
    # Drawn by `step` and not by a thread: the processes of `evaluate` are forked meanwhile.
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=hidden,
        auto_refresh=False,
    ) as progress:
        task = progress.add_task("", total=None)
        shown, drawn_s = "", 0.0

        def step(what: str, done: int, total: int) -> None:
            nonlocal shown, drawn_s
            if what != shown:
                progress.reset(task, description=what, total=total or None)
                shown, drawn_s = what, 0.0
            progress.update(task, completed=done)
            if time.monotonic() - drawn_s > _REDRAW_S:
                progress.refresh()
                drawn_s = time.monotonic()

        yield step
