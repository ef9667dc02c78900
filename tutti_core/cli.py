"""The `tutti` command: init, info, verify, replay, trace, bench.

Results go to standard output, progress and errors to standard error. An error of ours is one line,
`error: …`, with exit status 2; `verify` exits with 1 when it found damage. `--json FILE` writes
what a command shows, and more, as JSON (`-`: to standard output, in place of the tables).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tutti_core import hashing
from tutti_core.bench.machine import file_system, machine_facts, probe_transports
from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError, TuttiError
from tutti_core.io.select import TransportName
from tutti_core.layers import PARTS_AHEAD_MAX
from tutti_core.repair import Repair, repair_store
from tutti_core.replay.commands import can_write, replay, trace_app
from tutti_core.tiers.pools import Layout, discard_store, inspect_pools, open_layout
from tutti_core.verify import KINDS, StoreFacts, VerifyReport, describe_store, verify_store

EXIT_DAMAGE = 1
EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130

# Click's base class of what is wrong with a command line; newer typers bring a click of their own.
_UsageError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="tutti",
    help="A prefix store for KV-cache pages on NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.command()(replay)
app.add_typer(trace_app, name="trace")

_Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to FILE.")]
_StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="Directory of the store.")]
_Pools = Annotated[
    list[Path] | None,
    typer.Option("--pool", help="Place of the pages, if not PATH; repeat for several, in order."),
]
_Transport = Annotated[TransportName, typer.Option(help="What moves the bytes.")]
_Dir = Annotated[Path, typer.Option("--dir", help="Directory on the device to measure.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        status = app(args=arguments, prog_name="tutti", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except TuttiError as error:
        return _fail(str(error))
    except _UsageError as error:
        words = error.format_message()
        return _fail(words) if words.strip() else EXIT_ERROR  # without arguments: help was shown
    except (typer.Abort, KeyboardInterrupt):
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0
    except OSError as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_ERROR


# ---- init ----
@app.command()
def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="Directory of the store.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help='Everything the store may occupy, such as "2TiB".')
    ] = None,
    pool: _Pools = None,
    segment: Annotated[str | None, typer.Option(help="Unit of space; see StoreConfig.")] = None,
    catalog: Annotated[str | None, typer.Option(help="Share kept for the catalog.")] = None,
    preallocate: Annotated[
        Literal["segment", "full"] | None, typer.Option(help="When blocks are allocated.")
    ] = None,
    format_device: Annotated[
        bool, typer.Option("--format-device", help="Write to block devices that look unused.")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Forget the store that is there, and its pages.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings, .json or .toml; options win.")
    ] = None,
    json_file: _Json = None,
) -> None:
    """Create a store, or make one that exists larger."""
    _check_json(json_file)
    settings: dict[str, Any] = {
        "path": path,
        "capacity": capacity,
        "pools": tuple(pool) if pool else None,
        "segment": segment,
        "catalog": catalog,
        "preallocate": preallocate,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    wanted = StoreConfig.load(config, **settings) if config else StoreConfig.parse(settings)
    if discard:
        discard_store(wanted)
    before = [pool.segment_count for pool in inspect_pools(wanted) if pool is not None]
    with _spinner("creating the store"):
        layout, opened = open_layout(wanted, create=True, format_devices=format_device)
        opened.close()
    per_pool = layout.superblocks[0].segment_count
    created = not before
    result = {
        "command": "init",
        "created": created,
        "grown": bool(before) and before[0] < per_pool,
        "discarded": discard,
        "path": str(wanted.path),
        "store_id": layout.store_id.hex(),
        "capacity_bytes": int(wanted.capacity),
        "catalog_bytes": wanted.catalog_bytes,
        "segment_bytes": layout.segment_bytes,
        "segments": layout.segment_count,
        "pool_bytes": layout.segment_count * layout.segment_bytes,
        "pools": [str(file) for file in layout.paths],
        "preallocated": wanted.preallocate == "full",
    }
    if created:
        title = "store created"
    else:
        title = "store made larger" if result["grown"] else "store exists already; nothing changed"
    rows = {
        "path": str(wanted.path),
        "store id": layout.store_id.hex(),
        "capacity": _size(int(wanted.capacity)),
        "for pages": f"{_size(layout.segment_count * layout.segment_bytes)}, "
        f"{layout.segment_count} segments of {_size(layout.segment_bytes)}",
        "for the catalog": _size(wanted.catalog_bytes),
        "pools": "\n".join(str(file) for file in layout.paths),
    }
    _show(result, json_file, lambda console: console.print(_facts_table(title, rows)))


# ---- info ----
@app.command()
def info(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="Directory of a store.")
    ] = None,
    pool: _Pools = None,
    paths: Annotated[
        bool, typer.Option("--paths", help="Try every I/O path, not only the one in use.")
    ] = False,
    json_file: _Json = None,
) -> None:
    """Show what this machine offers, or what a store holds. Creates and locks nothing."""
    _check_json(json_file)
    logging.getLogger("tutti").setLevel(logging.ERROR)  # a fallback is in the table already
    if path is None:
        facts = machine_facts()
        probes = probe_transports()
        result = {"command": "info", "machine": facts, "paths": probes}

        def show_machine(console: Console) -> None:
            console.print(_facts_table("this machine", _machine_rows(facts)))
            console.print(_paths_table("I/O paths (on a scratch file)", probes))

        _show(result, json_file, show_machine)
        return
    with _spinner("reading the catalog"):
        store, layout = describe_store(path, tuple(pool or ()))
        probes = probe_transports(layout.devices())
    if not paths:
        probes = probes[-1:]
    result = {
        "command": "info",
        "store": dataclasses.asdict(store),
        "paths": probes,
        "file_systems": _file_systems(layout),
    }

    def show_store(console: Console) -> None:
        console.print(_facts_table("store", _store_rows(store, layout)))
        if store.namespaces:
            console.print(_namespaces_table(store))
        console.print(_paths_table("I/O paths of this store", probes))

    _show(result, json_file, show_store)


def _machine_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    native, versions = facts["native"], facts["versions"]
    locked = facts["locked_memory_bytes"]
    disabled = {"0": "allowed", "1": "for privileged processes", "2": "disabled", None: "unknown"}
    built = f"built, {native['file']}" if native["built"] else f"not built: {native['reason']}"
    return {
        "kernel": facts["kernel"],
        "processor": f"{facts['cpu']}, {facts['cpu_count']} CPUs",
        "memory": _size(facts["memory_bytes"]),
        "python": facts["python"],
        "versions": ", ".join(f"{name} {version or '-'}" for name, version in versions.items()),
        "native extension": built,
        "liburing": native["liburing"] or "-",
        "hashing": "native" if hashing.is_native() else "xxhash package (slower)",
        "io_uring": disabled.get(facts["io_uring_disabled"], "unknown"),
        "locked memory": "unlimited" if locked is None else _size(locked),
    }


def _store_rows(store: StoreFacts, layout: Layout) -> dict[str, str]:
    rows = {
        "path": store.path,
        "store id": store.store_id,
        "format version": str(store.format_version),
        "pools": "\n".join(
            f"{file} ({kind})"
            for file, kind in zip(store.pools, _file_systems(layout), strict=True)
        ),
        "room for pages": _size(store.pool_bytes),
        "segments": f"{store.segments} of {_size(store.segment_bytes)}: "
        f"{store.segments_assigned} assigned, {store.segments - store.segments_assigned} free",
        "pages": f"{store.pages}, {_size(store.payload_bytes)}",
        "catalog": _size(store.catalog_bytes),
        "open in": f"{len(store.leases)} process(es) that write" if store.leases else "no process",
    }
    for size, (count, used, slots) in store.slot_sizes.items():
        rows[f"slots of {_size(size)}"] = f"{used} of {slots} used, in {count} segments"
    return rows


def _namespaces_table(store: StoreFacts) -> Table:
    table = Table("namespace", "model", "page", "shard", "pages", "bytes", title="namespaces")
    for item in store.namespaces:
        fields = item.description
        page = f"{fields.get('page_tokens', '?')} tokens, {_size(int(fields.get('page_bytes', 0)))}"
        table.add_row(
            item.digest[:12],
            escape(str(fields.get("model", "?"))),
            page,
            escape(str(fields.get("shard", ""))),
            str(item.pages),
            _size(item.payload_bytes),
        )
    return table


def _paths_table(title: str, probes: list[dict[str, Any]]) -> Table:
    table = Table("path", "works", "why", title=title, title_justify="left")
    for probe in probes:
        works = f"yes: {probe['takes']}" if probe["works"] else "no"
        works = works if probe["transport"] == "auto" else works.partition(":")[0]
        table.add_row(probe["transport"], works, escape(probe["reason"]))
    return table


def _file_systems(layout: Layout) -> list[str]:
    return [
        "block device" if file.is_block_device() else file_system(file) for file in layout.paths
    ]


# ---- verify ----
@app.command()
def verify(
    path: _StorePath,
    pool: _Pools = None,
    online: Annotated[
        bool, typer.Option("--online", help="Check although processes have the store open.")
    ] = False,
    transport: _Transport = "auto",
    examples: Annotated[int, typer.Option(min=0, help="Examples of each kind of damage.")] = 10,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is bad; what is good is not touched.")
    ] = False,
    json_file: _Json = None,
) -> None:
    """Check every record and every page of a store. Exit status 1: damage was found and left."""
    _check_json(json_file)
    if repair:
        if online:
            raise ConfigError("--repair needs the store for itself", hint="leave --online out")
        _repair(path, tuple(pool or ()), transport, examples, json_file)
        return
    with _bar() as step:
        report = verify_store(
            path,
            tuple(pool or ()),
            online=online,
            transport=transport,
            examples=examples,
            progress=step,
        )
    result = {"command": "verify", "clean": report.clean, **dataclasses.asdict(report)}
    _show(result, json_file, lambda console: _show_report(console, report))
    if not report.clean:
        raise typer.Exit(EXIT_DAMAGE)


def _repair(
    path: Path,
    pools: tuple[Path, ...],
    transport: TransportName,
    examples: int,
    json_file: Path | None,
) -> None:
    with _bar() as step:
        done = repair_store(path, pools, transport=transport, examples=examples, progress=step)
    result = {"command": "verify", "clean": done.report.clean, **dataclasses.asdict(done)}
    _show(result, json_file, lambda console: _show_repair(console, done))


def _show_repair(console: Console, done: Repair) -> None:
    _show_report(console, done.report)
    if done.report.clean:
        return
    rows = {
        "pages lost": f"{done.pages_lost}, {_size(done.bytes_lost)}",
        "slot entries without a page": str(done.slots_freed),
        "unreadable segments": str(done.segments),
        "unreadable namespaces": str(done.namespaces),
        "pools cut short": str(done.pools_grown),
        "kept": f"{done.report.records - done.pages_lost} pages",
    }
    console.print(_facts_table("repaired", rows))


def _show_report(console: Console, report: VerifyReport) -> None:
    rows = {
        "store id": report.store_id,
        "records": str(report.records),
        "pages read": f"{report.payloads}, {_size(report.payload_bytes)}, by {report.transport}",
        "time": f"{report.seconds:.1f} s",
    }
    if report.changed:
        rows["replaced meanwhile"] = f"{report.changed} pages"
    rows["result"] = "clean" if report.clean else "DAMAGE FOUND"
    console.print(_facts_table("verify", rows))
    for kind, damage in sorted(report.damage.items()):
        console.print(f"{kind}: {damage.count} ({KINDS[kind]})", markup=False)
        for example in damage.examples:
            console.print(f"  {example}", markup=False, soft_wrap=True)
        if damage.count > len(damage.examples):
            console.print(f"  and {damage.count - len(damage.examples)} more", markup=False)


# ---- bench ----
@bench.command("io")
def bench_io(
    folder: _Dir,
    pages: Annotated[int, typer.Option(min=1, help="Pages of each size.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; 5 for a result.")] = 5,
    sizes: Annotated[str, typer.Option(help="Page sizes, with commas.")] = "256KiB,2MiB",
    depth: Annotated[int, typer.Option(min=1, max=1024, help="Transfers in flight.")] = 64,
    transport: _Transport = "auto",
    peers: Annotated[bool, typer.Option(help="Also measure fio and HiCacheFile.")] = True,
    huge_pages: Annotated[
        bool, typer.Option(help="Let the store put registered memory into huge pages.")
    ] = True,
    json_file: _Json = None,
) -> None:
    """Save until durable and load cold: Tutti, fio, and SGLang's HiCacheFile."""
    from tutti_core.bench.io import IoPlan, run_io

    _check_json(json_file)
    plan = IoPlan(folder, _sizes(sizes), pages, rounds, depth, transport, peers, huge_pages)
    with _spinner("starting") as say:
        result = run_io(plan, say)

    def show(console: Console) -> None:
        names = ("case", "tutti_mib_s", "fio_mib_s", "file_mib_s", "ratio_fio", "ratio_file")
        cpu = ("cpu_s_per_gib", "fio_cpu_s_per_gib", "file_cpu_s_per_gib")
        title = f"{pages} pages, depth {depth}, medians of {rounds} rounds"
        console.print(_rows_table(title, (*names, *cpu), result["rows"]))
        for why in result["absent"].values():
            console.print(why, markup=False)
        console.print(_rows_table("targets", ("name", "value", "target", "met"), result["targets"]))

    _show({"command": "bench io", **result}, json_file, show)


@bench.command("index")
def bench_index(
    folder: Annotated[
        Path, typer.Option("--dir", help="Directory for the stores that are measured.")
    ] = Path("."),
    pages: Annotated[int, typer.Option(min=1, help="Pages of the chain.")] = 4096,
    index_pages: Annotated[int, typer.Option(min=1, help="Pages of the large index.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; 5 for a result.")] = 5,
    json_file: _Json = None,
) -> None:
    """Key chains, matching, SGLang's batch_exists, memory a page, and reopening."""
    from tutti_core.bench.index import IndexPlan, run_index

    _check_json(json_file)
    with _spinner("starting") as say:
        result = run_index(IndexPlan(folder, pages, index_pages, rounds), say)

    def show(console: Console) -> None:
        title = f"{pages} pages in a chain, {index_pages} in the index, medians of {rounds} rounds"
        console.print(_rows_table(title, ("name", "value", "target", "met"), result["targets"]))
        console.print(f"batch_exists is {result['batch_exists_via']}", markup=False)
        console.print(result["gil_note"], markup=False)

    _show({"command": "bench index", **result}, json_file, show)


@bench.command("tiers")
def bench_tiers(
    folder: Annotated[
        Path, typer.Option("--dir", help="Directory for the stores that are measured.")
    ] = Path("."),
    sizes: Annotated[str, typer.Option(help="Page sizes, with commas.")] = "256KiB,2MiB",
    pages: Annotated[int, typer.Option(min=1, help="Pages of a call.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the bandwidth.")] = 15,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each latency phase.")] = 8.0,
    transport: _Transport = "auto",
    json_file: _Json = None,
) -> None:
    """Loads from DRAM against a memory copy; latency of loads with and without churn."""
    from tutti_core.bench.tiers import TiersPlan, run_tiers

    _check_json(json_file)
    plan = TiersPlan(folder, _sizes(sizes), pages, rounds, seconds, transport)
    with _spinner("starting") as say:
        result = run_tiers(plan, say)

    def show(console: Console) -> None:
        title = f"latency of loads, {seconds:g} s a phase"
        columns = ("name", "page_bytes", "count", "p50_ms", "p99_ms")
        console.print(_rows_table(title, columns, _latency_rows(result["latency"])))
        console.print(_rows_table("targets", ("name", "value", "target", "met"), result["targets"]))

    _show({"command": "bench tiers", **result}, json_file, show)


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
    transport: _Transport = "auto",
    part_bytes: _PartBytes = None,
    ahead: _Ahead = PARTS_AHEAD_MAX,
    peers: Annotated[
        bool, typer.Option(help="Also measure fio and the way by host memory.")
    ] = True,
    json_file: _Json = None,
) -> None:
    """Load a prefix into a device pool layer by layer, against fio and the way by host memory.

    Shows when layer 0 and when the last layer is there.

    The longest prefix of the defaults is 8 GiB, three times on disk and twice in memory; where
    there is less room, a shorter one is measured and the row says so.
    """
    from tutti_core.bench.layered import LinkerPlan
    from tutti_core.bench.linker import run_linker

    _check_json(json_file)
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
    with _spinner("starting") as say:
        result = run_linker(plan, say)

    def show(console: Console) -> None:
        names = ("geometry", "pages", "layer0_ms", "all_ms", "fio_ms", "hicache_ms")
        title = f"layer-wise loads, medians of {rounds} rounds or more"
        columns = (*names, "ratio_fio", "python_us_per_layer")
        console.print(_rows_table(title, columns, result["rows"]))
        for row in result["rows"]:
            if "note" in row:
                console.print(f"{row['geometry']}: {row['note']}", markup=False)
        for why in result["absent"].values():
            console.print(why, markup=False)
        console.print(_rows_table("targets", ("name", "value", "target", "met"), result["targets"]))

    _show({"command": "bench linker", **result}, json_file, show)


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
    transport: _Transport = "auto",
    part_bytes: _PartBytes = None,
    ahead: _Ahead = PARTS_AHEAD_MAX,
    json_file: _Json = None,
) -> None:
    """Compute on one core while layers are loaded; how much longer that takes than it has to."""
    from tutti_core.bench.overlap import OverlapPlan, run_overlap

    _check_json(json_file)
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
    with _spinner("starting") as say:
        result = run_overlap(plan, say)

    def show(console: Console) -> None:
        names = ("compute_ms", "io_ms", "ideal_ms", "measured_ms", "over_ideal")
        title = f"{result['geometry']}, {result['pages']} pages, medians of {rounds} rounds"
        console.print(_rows_table(title, (*names, "over_ideal_even", "waited_ms"), result["rows"]))
        console.print(_rows_table("targets", ("name", "value", "target", "met"), result["targets"]))

    _show({"command": "bench overlap", **result}, json_file, show)


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


# ---- showing ----
def _show(
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


def _check_json(json_file: Path | None) -> None:
    """Refuse a result file that cannot be written before the work, not after it."""
    if json_file is None or json_file == Path("-"):
        return
    if not can_write(json_file):
        raise ConfigError(f"json = {str(json_file)!r} cannot be written")


def _facts_table(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _rows_table(title: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        label = _LABELS.get(column, column)
        table.add_column(label, justify="left" if column in _LEFT else "right")
    words = {None: "-", True: "yes", False: "no"}
    for row in rows:
        cells = [row[column] for column in columns]
        table.add_row(*(words[c] if c is None or isinstance(c, bool) else f"{c}" for c in cells))
    return table


_LEFT = ("case", "name", "geometry")
_LABELS = {
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


def _size(size_bytes: int) -> str:
    return ByteSize(size_bytes).human_readable(separator=" ")


@contextmanager
def _spinner(what: str) -> Iterator[Callable[[str], None]]:
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
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar whose length is known only as it grows; yields (what, done, total)."""
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


if __name__ == "__main__":
    sys.exit(main())
