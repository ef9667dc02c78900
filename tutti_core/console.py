"""How the commands show results: JSON where it is asked for, tables, and progress.

Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tutti_core.errors import ConfigError
from tutti_core.io.select import TransportName

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to FILE.")]
"""The option that every command has."""

TransportOption = Annotated[TransportName, typer.Option(help="What moves the bytes.")]


def show_result(
    result: Mapping[str, Any], json_file: Path | None, show: Callable[[Console], None]
) -> None:
    """Write the JSON where it is asked for, and tables to standard output."""
    text = json.dumps(result, indent=2, default=str)
    if json_file == Path("-"):
        print(text)
        return
    if json_file is not None:
        json_file.write_text(text + "\n")
    show(Console())


def check_json(json_file: Path | None) -> None:
    """Refuse a result file that cannot be written before the work, not after it."""
    if json_file is None or json_file == Path("-"):
        return
    if not can_write(json_file):
        raise ConfigError(f"json = {str(json_file)!r} cannot be written")


def can_write(file: Path) -> bool:
    """Whether a result file can be made or replaced."""
    place = file if file.exists() else file.parent
    return os.access(place, os.W_OK) and not file.is_dir()


def facts_table(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and texts."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def rows_table(title: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> Table:
    """A table of measured rows; None is shown as a dash."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        label = _LABELS.get(column, column)
        left = column in _LEFT
        table.add_column(label, justify="left" if left else "right", no_wrap=left)
    words = {None: "-", True: "yes", False: "no"}
    for row in rows:
        cells = [row[column] for column in columns]
        table.add_row(*(words[c] if c is None or isinstance(c, bool) else f"{c}" for c in cells))
    return table


def print_targets(console: Console, result: Mapping[str, Any], title: str = "targets") -> None:
    """Show what a benchmark aimed at, and whether it got there."""
    console.print(rows_table(title, ("name", "value", "target", "met"), result["targets"]))


_LEFT = ("case", "name", "geometry", "trial")
_LABELS = {
    "crash_points": "crash\npoint",
    "fault_count": "fault",
    "bad_input_count": "bad\ninput",
    "pages_compared": "pages\nread",
    "wrong_bytes": "wrong\nbytes",
    "durable_pages_lost": "pages\nlost",
    "complaints": "other",
    "tutti_mib_s": "tutti\nMiB/s",
    "layer0_ms": "layer 0\nms",
    "all_ms": "all\nms",
    "fio_ms": "fio\nms",
    "hicache_ms": "by host\nms",
    "python_us_per_layer": "Python\nus/layer",
    "compute_ms": "compute\nms/layer",
    "io_ms": "I/O\nms",
    "ideal_ms": "ideal\nms",
    "measured_ms": "measured\nms",
    "over_ideal": "over\nideal",
    "over_ideal_even": "over even\nideal",
    "waited_ms": "waited\nms",
    "fio_mib_s": "fio\nMiB/s",
    "file_mib_s": "file\nMiB/s",
    "ratio_fio": "of\nfio",
    "ratio_file": "of\nfile",
    "cpu_s_per_gib": "CPU s\n/GiB",
    "fio_cpu_s_per_gib": "fio's",
    "file_cpu_s_per_gib": "file's",
}


def size_text(size_bytes: int) -> str:
    """A size for people."""
    return ByteSize(size_bytes).human_readable(separator=" ")


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """Show that something slow goes on; yields a function that says what."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda line: progress.update(task, description=line)


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar whose length is known only as it grows; yields (what, done, total)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"))
    hidden = not console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden
    ) as progress:
        tasks: dict[str, Any] = {}

        def step(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield step
