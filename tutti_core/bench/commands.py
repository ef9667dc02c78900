"""The commands `tutti bench …`; `cli` mounts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from tutti_core.console import (
    JsonFile,
    TransportOption,
    check_json,
    print_targets,
    rows_table,
    show_result,
    spinner,
)
from tutti_core.errors import ConfigError
from tutti_core.layers import PARTS_AHEAD_MAX
from tutti_core.trials import TRIALS

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)

_Dir = Annotated[Path, typer.Option("--dir", help="Directory on the device to measure.")]


@bench.command("io")
def bench_io(
    folder: _Dir,
    pages: Annotated[int, typer.Option(min=1, help="Pages of each size.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; 5 for a result.")] = 5,
    sizes: Annotated[str, typer.Option(help="Page sizes, with commas.")] = "256KiB,2MiB",
    depth: Annotated[int, typer.Option(min=1, max=1024, help="Transfers in flight.")] = 64,
    transport: TransportOption = "auto",
    peers: Annotated[bool, typer.Option(help="Also measure fio and HiCacheFile.")] = True,
    huge_pages: Annotated[
        bool, typer.Option(help="Let the store put registered memory into huge pages.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Save until durable and load cold: Tutti, fio, and SGLang's HiCacheFile."""
    from tutti_core.bench.io import IoPlan, run_io

    check_json(json_file)
    plan = IoPlan(folder, _sizes(sizes), pages, rounds, depth, transport, peers, huge_pages)
    with spinner("starting") as say:
        result = run_io(plan, say)

    def show(console: Console) -> None:
        names = ("case", "tutti_mib_s", "fio_mib_s", "file_mib_s", "ratio_fio", "ratio_file")
        cpu = ("cpu_s_per_gib", "fio_cpu_s_per_gib", "file_cpu_s_per_gib")
        title = f"{pages} pages, depth {depth}, medians of {rounds} rounds"
        console.print(rows_table(title, (*names, *cpu), result["rows"]))
        for why in result["absent"].values():
            console.print(why, markup=False)
        print_targets(console, result)

    show_result({"command": "bench io", **result}, json_file, show)


@bench.command("index")
def bench_index(
    folder: Annotated[
        Path, typer.Option("--dir", help="Directory for the stores that are measured.")
    ] = Path("."),
    pages: Annotated[int, typer.Option(min=1, help="Pages of the chain.")] = 4096,
    index_pages: Annotated[int, typer.Option(min=1, help="Pages of the large index.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; 5 for a result.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Key chains, matching, SGLang's batch_exists, memory a page, and reopening."""
    from tutti_core.bench.index import IndexPlan, run_index

    check_json(json_file)
    with spinner("starting") as say:
        result = run_index(IndexPlan(folder, pages, index_pages, rounds), say)

    def show(console: Console) -> None:
        title = f"{pages} pages in a chain, {index_pages} in the index, medians of {rounds} rounds"
        print_targets(console, result, title)
        console.print(f"batch_exists is {result['batch_exists_via']}", markup=False)
        console.print(result["gil_note"], markup=False)

    show_result({"command": "bench index", **result}, json_file, show)


@bench.command("tiers")
def bench_tiers(
    folder: Annotated[
        Path, typer.Option("--dir", help="Directory for the stores that are measured.")
    ] = Path("."),
    sizes: Annotated[str, typer.Option(help="Page sizes, with commas.")] = "256KiB,2MiB",
    pages: Annotated[int, typer.Option(min=1, help="Pages of a call.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the bandwidth.")] = 15,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each latency phase.")] = 8.0,
    transport: TransportOption = "auto",
    json_file: JsonFile = None,
) -> None:
    """Loads from DRAM against a memory copy; latency of loads with and without churn."""
    from tutti_core.bench.tiers import TiersPlan, run_tiers

    check_json(json_file)
    plan = TiersPlan(folder, _sizes(sizes), pages, rounds, seconds, transport)
    with spinner("starting") as say:
        result = run_tiers(plan, say)

    def show(console: Console) -> None:
        title = f"latency of loads, {seconds:g} s a phase"
        columns = ("name", "page_bytes", "count", "p50_ms", "p99_ms")
        console.print(rows_table(title, columns, _latency_rows(result["latency"])))
        print_targets(console, result)

    show_result({"command": "bench tiers", **result}, json_file, show)


_Fragments = Annotated[
    str, typer.Option(help="Bytes of one page of one layer's K (or V), with commas.")
]
_Layers = Annotated[int, typer.Option(min=1, help="Layers of a page.")]
_Depth = Annotated[int, typer.Option(min=1, max=1024, help="Transfers in flight.")]
_PartBytes = Annotated[
    str | None, typer.Option(help="Group layers of a page to about this; default: as the linker.")
]
_Ahead = Annotated[int, typer.Option(min=1, help="Parts in flight.")]


@bench.command("linker")
def bench_linker(
    folder: _Dir = Path("."),
    fragments: _Fragments = "16KiB,128KiB",
    pages: Annotated[str, typer.Option(help="Lengths of the prefix, with commas.")] = "128,1024",
    layers: _Layers = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; 5 for a result.")] = 5,
    depth: _Depth = 64,
    transport: TransportOption = "auto",
    part_bytes: _PartBytes = None,
    ahead: _Ahead = PARTS_AHEAD_MAX,
    peers: Annotated[
        bool, typer.Option(help="Also measure fio and the way by host memory.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Load a prefix into a device pool layer by layer, against fio and the way by host memory.

    Shows when layer 0 and when the last layer is there.

    The longest prefix of the defaults is 8 GiB, three times on disk and twice in memory; where
    there is less room, a shorter one is measured and the row says so.
    """
    from tutti_core.bench.layered import LinkerPlan
    from tutti_core.bench.linker import run_linker

    check_json(json_file)
    plan = LinkerPlan(
        folder=folder,
        fragment_bytes=_sizes(fragments),
        pages=_numbers("pages", pages, int),
        layers=layers,
        rounds=rounds,
        depth=depth,
        transport=transport,
        part_bytes=None if part_bytes is None else _sizes(part_bytes)[0],
        ahead=ahead,
        peers=peers,
    )
    with spinner("starting") as say:
        result = run_linker(plan, say)

    def show(console: Console) -> None:
        names = ("geometry", "pages", "layer0_ms", "all_ms", "fio_ms", "hicache_ms")
        title = f"layer-wise loads, medians of {rounds} rounds or more"
        columns = (*names, "ratio_fio", "python_us_per_layer")
        console.print(rows_table(title, columns, result["rows"]))
        for row in result["rows"]:
            if "note" in row:
                console.print(f"{row['geometry']}: {row['note']}", markup=False)
        for why in result["absent"].values():
            console.print(why, markup=False)
        print_targets(console, result)

    show_result({"command": "bench linker", **result}, json_file, show)


@bench.command("overlap")
def bench_overlap(
    folder: _Dir = Path("."),
    compute: Annotated[
        str | None,
        typer.Option(help="Milliseconds a layer, with commas; default: half, one, two I/O times."),
    ] = None,
    fragment: Annotated[str, typer.Option(help="Bytes of one page of one layer's K.")] = "16KiB",
    pages: Annotated[int, typer.Option(min=1, help="Length of the prefix.")] = 512,
    layers: _Layers = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; 7 for a result.")] = 7,
    depth: _Depth = 64,
    transport: TransportOption = "auto",
    part_bytes: _PartBytes = None,
    ahead: _Ahead = PARTS_AHEAD_MAX,
    json_file: JsonFile = None,
) -> None:
    """Compute on one core while layers are loaded; how much longer that takes than it has to."""
    from tutti_core.bench.overlap import OverlapPlan, run_overlap

    check_json(json_file)
    plan = OverlapPlan(
        folder=folder,
        fragment_bytes=_sizes(fragment)[0],
        pages=pages,
        layers=layers,
        rounds=rounds,
        compute_ms=() if compute is None else _numbers("compute", compute, float),
        depth=depth,
        transport=transport,
        part_bytes=None if part_bytes is None else _sizes(part_bytes)[0],
        ahead=ahead,
    )
    with spinner("starting") as say:
        result = run_overlap(plan, say)

    def show(console: Console) -> None:
        names = ("compute_ms", "io_ms", "ideal_ms", "measured_ms", "over_ideal")
        title = f"{result['geometry']}, {result['pages']} pages, medians of {rounds} rounds"
        console.print(rows_table(title, (*names, "over_ideal_even", "waited_ms"), result["rows"]))
        print_targets(console, result)

    show_result({"command": "bench overlap", **result}, json_file, show)


@bench.command("safety")
def bench_safety(
    folder: Annotated[
        Path, typer.Option("--dir", help="Directory for the stores that are attacked.")
    ] = Path("."),
    trials: Annotated[str, typer.Option(help="Kinds of attack, with commas.")] = ",".join(TRIALS),
    seconds: Annotated[
        float, typer.Option(min=0, help="Length of each trial; 0: the fixed quick part.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Repeats a run.")] = 0,
    index_pages: Annotated[
        int, typer.Option(min=0, help="Pages of the store that recovers; 0: leave it out.")
    ] = 1_000_000,
    rounds: Annotated[
        int, typer.Option(min=0, help="Rounds of what is timed; 0: time nothing.")
    ] = 5,
    json_file: JsonFile = None,
) -> None:
    """Try to break a store: crashes, kills, faults, damage, bad input; then time its recovery.

    Exit status 1: something broke.
    """
    from tutti_core.bench.safety import SafetyPlan, run_safety

    check_json(json_file)
    names = tuple(name.strip() for name in trials.split(",") if name.strip())
    with spinner("starting") as say:
        plan = SafetyPlan(folder, names, seconds, seed, index_pages, rounds)
        result = run_safety(plan, say)

    def show(console: Console) -> None:
        tried = ("trial", "crash_points", "kills", "fault_count", "bad_input_count")
        wrong = ("pages_compared", "wrong_bytes", "durable_pages_lost", "complaints")
        console.print(rows_table("trials", (*tried, *wrong), result["rows"]))
        for line in result["complaint_lines"]:
            console.print(line, markup=False)
        print_targets(console, result)

    show_result({"command": "bench safety", **result}, json_file, show)
    if result["wrong_bytes"] or result["durable_pages_lost"] or result["complaints"]:
        raise typer.Exit(1)


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{name} = {text!r} are not numbers", hint="separate them with commas"
        ) from None


def _latency_rows(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each page size, kind of load and phase."""
    return [
        {"name": f"{kind}, {phase}", "page_bytes": size["page_bytes"], **size[phase][kind]}
        for size in measured
        for phase in ("quiet", "churn")
        for kind in ("hit", "device")
    ]


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(TypeAdapter(ByteSize).validate_python(part)) for part in text.split(","))
    except ValidationError:
        raise ConfigError(
            f"sizes = {text!r} are not sizes", hint="separate them with commas: 256KiB,2MiB"
        ) from None


@bench.command("gio")
def bench_gio(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; 5 for a result.")] = 5,
    seconds: Annotated[float, typer.Option(help="Of each case in each round.")] = 1.0,
    peer: Annotated[
        Path | None, typer.Option(help="Program that measures another queue pair; see --json.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """GPU I/O without a GPU: CPU time to prepare it, and the queues on a software controller."""
    from tutti_core.bench.gio import GioPlan, run_gio

    check_json(json_file)
    with spinner("starting") as say:
        result = run_gio(GioPlan(rounds, seconds, peer), say)
    show_result(
        {"command": "bench gio", **result},
        json_file,
        lambda console: print_targets(console, result),
    )
