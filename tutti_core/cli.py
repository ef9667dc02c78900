"""The `tutti` command: init, info, verify, replay, trace, bench.

Results go to standard output, progress and errors to standard error. An error of ours is one line,
`error: …`, with exit status 2; `verify` exits with 1 when it found damage. `--json FILE` writes
what a command shows, and more, as JSON (`-`: to standard output, in place of the tables).
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tutti_core import hashing
from tutti_core.bench.commands import bench
from tutti_core.bench.machine import file_system, machine_facts, probe_transports
from tutti_core.config import StoreConfig
from tutti_core.console import (
    JsonFile,
    TransportOption,
    bar,
    check_json,
    facts_table,
    show_result,
    size_text,
    spinner,
)
from tutti_core.errors import ConfigError, TuttiError
from tutti_core.io.select import TransportName
from tutti_core.repair import Repair, repair_store
from tutti_core.replay.commands import replay, trace_app
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
app.add_typer(bench, name="bench")
app.command()(replay)
app.add_typer(trace_app, name="trace")

_StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="Directory of the store.")]
_Pools = Annotated[
    list[Path] | None,
    typer.Option("--pool", help="Place of the pages, if not PATH; repeat for several, in order."),
]
_TrustPath = Annotated[
    bool, typer.Option("--trust-path", help="Take what others own or may write; see StoreConfig.")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    for stream in (sys.stdout, sys.stderr):  # names of files may be no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if any("\0" in word for word in arguments or ()):  # no system call takes such a path
        return _fail("an argument holds a NUL character")
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
    serial: Annotated[
        list[str] | None,
        typer.Option(
            "--serial", help='Serial number of the device in each --pool, in order; or "".'
        ),
    ] = None,
    trust_path: _TrustPath = False,
    encryption_key_file: Annotated[
        Path | None,
        typer.Option("--encryption-key-file", help="Encrypt pages with the key in this file."),
    ] = None,
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
    json_file: JsonFile = None,
) -> None:
    """Create a store, or make one that exists larger."""
    check_json(json_file)
    settings: dict[str, Any] = {
        "path": path,
        "capacity": capacity,
        "pools": tuple(pool) if pool else None,
        "serials": tuple(serial) if serial else None,
        "trust_path": trust_path or None,
        "encryption_key_file": encryption_key_file,
        "segment": segment,
        "catalog": catalog,
        "preallocate": preallocate,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    wanted = StoreConfig.load(config, **settings) if config else StoreConfig.parse(settings)
    if discard:
        discard_store(wanted)
    before = [pool.segment_count for pool in inspect_pools(wanted) if pool is not None]
    with spinner("creating the store"):
        layout, opened = open_layout(wanted, create=True, format_devices=format_device)
        opened.close()
    per_pool = layout.superblocks[0].segment_count
    created = not before
    result = {
        "command": "init",
        "created": created,
        "grown": bool(before) and before[0] < per_pool,
        "discarded": discard,
        "encrypted": layout.keyring is not None,
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
        "capacity": size_text(int(wanted.capacity)),
        "for pages": f"{size_text(layout.segment_count * layout.segment_bytes)}, "
        f"{layout.segment_count} segments of {size_text(layout.segment_bytes)}",
        "for the catalog": size_text(wanted.catalog_bytes),
        "pages are": "encrypted" if layout.keyring else "not encrypted",
        "pools": "\n".join(str(file) for file in layout.paths),
    }
    show_result(result, json_file, lambda console: console.print(facts_table(title, rows)))


# ---- info ----
@app.command()
def info(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="Directory of a store.")
    ] = None,
    pool: _Pools = None,
    trust_path: _TrustPath = False,
    paths: Annotated[
        bool, typer.Option("--paths", help="Try every I/O path, not only the one in use.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Show what this machine offers, or what a store holds. Creates and locks nothing."""
    check_json(json_file)
    if path is None:
        facts = machine_facts()
        with _no_warnings():
            probes = probe_transports()
        result = {"command": "info", "machine": facts, "paths": probes}

        def show_machine(console: Console) -> None:
            console.print(facts_table("this machine", _machine_rows(facts)))
            console.print(_paths_table("I/O paths (on a scratch file)", probes))

        show_result(result, json_file, show_machine)
        return
    with spinner("reading the catalog"), _no_warnings():
        store, layout = describe_store(path, tuple(pool or ()), trust_path=trust_path)
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
        console.print(facts_table("store", _store_rows(store, layout)))
        if store.namespaces:
            console.print(_namespaces_table(store))
        console.print(_paths_table("I/O paths of this store", probes))

    show_result(result, json_file, show_store)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What Tutti would warn of is in the tables already."""
    logger = logging.getLogger("tutti")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _machine_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    native, versions = facts["native"], facts["versions"]
    locked = facts["locked_memory_bytes"]
    disabled = {"0": "allowed", "1": "for privileged processes", "2": "disabled", None: "unknown"}
    built = f"built, {native['file']}" if native["built"] else f"not built: {native['reason']}"
    return {
        "kernel": facts["kernel"],
        "processor": f"{facts['cpu']}, {facts['cpu_count']} CPUs",
        "memory": size_text(facts["memory_bytes"]),
        "python": facts["python"],
        "versions": ", ".join(f"{name} {version or '-'}" for name, version in versions.items()),
        "native extension": built,
        "liburing": native["liburing"] or "-",
        "hashing": "native" if hashing.is_native() else "xxhash package (slower)",
        "io_uring": disabled.get(facts["io_uring_disabled"], "unknown"),
        "locked memory": "unlimited" if locked is None else size_text(locked),
    }


def _store_rows(store: StoreFacts, layout: Layout) -> dict[str, str]:
    rows = {
        "path": store.path,
        "store id": store.store_id,
        "format version": str(store.format_version),
        "pages are": "encrypted" if store.encrypted else "not encrypted",
        "pools": "\n".join(
            f"{file} ({kind})"
            for file, kind in zip(store.pools, _file_systems(layout), strict=True)
        ),
        "room for pages": size_text(store.pool_bytes),
        "segments": f"{store.segments} of {size_text(store.segment_bytes)}: "
        f"{store.segments_assigned} assigned, {store.segments - store.segments_assigned} free",
        "pages": f"{store.pages}, {size_text(store.payload_bytes)}",
        "catalog": size_text(store.catalog_bytes),
        "open in": f"{len(store.leases)} process(es) that write" if store.leases else "no process",
    }
    for size, (count, used, slots) in store.slot_sizes.items():
        rows[f"slots of {size_text(size)}"] = f"{used} of {slots} used, in {count} segments"
    return rows


def _size_or_unknown(value: object) -> str:
    """A size that a description names; a damaged one may name anything."""
    return size_text(value) if isinstance(value, int) else "?"


def _namespaces_table(store: StoreFacts) -> Table:
    table = Table("namespace", "model", "page", "shard", "pages", "bytes", title="namespaces")
    for item in store.namespaces:
        fields = item.description
        size = _size_or_unknown(fields.get("page_bytes"))
        page = f"{fields.get('page_tokens', '?')} tokens, {size}"
        table.add_row(
            item.digest[:12],
            escape(str(fields.get("model", "?"))),
            page,
            escape(str(fields.get("shard", ""))),
            str(item.pages),
            size_text(item.payload_bytes),
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
    trust_path: _TrustPath = False,
    online: Annotated[
        bool, typer.Option("--online", help="Check although processes have the store open.")
    ] = False,
    transport: TransportOption = "auto",
    examples: Annotated[int, typer.Option(min=0, help="Examples of each kind of damage.")] = 10,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is bad; what is good is not touched.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Check every record and every page of a store. Exit status 1: damage was found and left."""
    check_json(json_file)
    if repair:
        if online:
            raise ConfigError("--repair needs the store for itself", hint="leave --online out")
        _repair(path, tuple(pool or ()), transport, examples, json_file, trust_path)
        return
    with bar() as step:
        report = verify_store(
            path,
            tuple(pool or ()),
            online=online,
            transport=transport,
            examples=examples,
            progress=step,
            trust_path=trust_path,
        )
    result = {"command": "verify", "clean": report.clean, **dataclasses.asdict(report)}
    show_result(result, json_file, lambda console: _show_report(console, report))
    if not report.clean:
        raise typer.Exit(EXIT_DAMAGE)


def _repair(
    path: Path,
    pools: tuple[Path, ...],
    transport: TransportName,
    examples: int,
    json_file: Path | None,
    trust_path: bool,
) -> None:
    with bar() as step:
        done = repair_store(
            path,
            pools,
            transport=transport,
            examples=examples,
            progress=step,
            trust_path=trust_path,
        )
    result = {"command": "verify", "clean": done.report.clean, **dataclasses.asdict(done)}
    show_result(result, json_file, lambda console: _show_repair(console, done))


def _show_repair(console: Console, done: Repair) -> None:
    _show_report(console, done.report)
    if done.report.clean:
        return
    rows = {
        "pages lost": f"{done.pages_lost}, {size_text(done.bytes_lost)}",
        "slot entries without a page": str(done.slots_freed),
        "unreadable segments": str(done.segments),
        "unreadable namespaces": str(done.namespaces),
        "pools cut short": str(done.pools_grown),
        "superblocks written": str(done.superblocks),
        "catalog made anew": "yes" if done.rebuilt else "no",
        "kept": f"{done.pages_kept} pages",
    }
    for digest, loss in sorted(done.lost.items()):
        name = f"of {loss.model} ({digest[:12]})" if digest else "of unknown namespaces"
        rows[f"lost {name}"] = f"{loss.pages} pages, {size_text(loss.payload_bytes)}"
    console.print(facts_table("repaired", rows))


def _show_report(console: Console, report: VerifyReport) -> None:
    size = size_text(report.payload_bytes)
    rows = {
        "store id": report.store_id,
        "records": str(report.records),
        "pages read": f"{report.payloads}, {size}, by {report.transport}",
        "time": f"{report.seconds:.1f} s",
    }
    if report.changed:
        rows["replaced meanwhile"] = f"{report.changed} pages"
    rows["result"] = "clean" if report.clean else "DAMAGE FOUND"
    console.print(facts_table("verify", rows))
    for kind, damage in sorted(report.damage.items()):
        console.print(f"{kind}: {damage.count} ({KINDS[kind]})", markup=False)
        for example in damage.examples:
            console.print(f"  {example}", markup=False, soft_wrap=True)
        if damage.count > len(damage.examples):
            console.print(f"  and {damage.count - len(damage.examples)} more", markup=False)


if __name__ == "__main__":
    sys.exit(main())
