"""`tutti bench linker`: a prefix loaded layer by layer, against fio and the way by host memory."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tutti_core.bench.engines import (
    CALL_PAGES,
    LOADS_IN_FLIGHT_MAX,
    FioEngine,
    Task,
)
from tutti_core.bench.layered import TENSORS, Bench, LinkerPlan, Loaded, Shape, fit
from tutti_core.bench.machine import file_system, machine_facts
from tutti_core.bench.measure import (
    MIB,
    BenchError,
    Progress,
    Spread,
    order_of_turn,
    removed_afterwards,
    sync_filesystem,
    target,
)

SMALL_BYTES = 512 * MIB
"""Loads shorter than this have more rounds, up to four times as many."""

METHOD = (
    "The device pool is host memory, [layer][K or V][slot]; each page of the prefix has a random "
    "slot. One fragment is one page of one layer's K or V. The store has the pool registered.",
    "Layer-wise: the time from the submission of the batch until layer 0, and until the last "
    "layer, is complete. A page is stored as one object, its layers in order, K then V of each; "
    "parts of it are read in the order of layers, checksums on.",
    "python_us_per_layer: CPU time of the caller's and the reader's thread, with what they spend "
    "in native code and system calls, over the number of layers.",
    "HiCache path: the same bytes as whole pages into one host buffer, in calls of "
    f"{CALL_PAGES} pages, {LOADS_IN_FLIGHT_MAX} in flight, then one native copy of all fragments "
    "into the pool, in the order of layers.",
    "fio: io_uring, direct=1, sequential, registered buffers, the same depth and number of bytes "
    "in one file. fio_ms has the block size of one part, fio_two_fragments_ms that of one layer "
    "of one page. Its clock is its own, in whole milliseconds.",
    "Per round all of them take a turn, in an order that changes; columns are medians, ratios are "
    "of medians. After each load all fragments in the pool are compared, by checksum, with what "
    "was saved; before it the pool is wiped.",
)


def run_linker(plan: LinkerPlan, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Measure and return the report: rows, targets, method, machine, raw rounds.

    Raises
        ConfigError: too little room or an impossible plan; nothing was written.
        BenchError: a contestant failed, or a page came back wrong.
    """
    plan.check()
    report: dict[str, Any] = {
        "benchmark": "linker",
        "machine": machine_facts(),
        "file_system": file_system(plan.folder),
        "rounds": plan.rounds,
        "depth": plan.depth,
        "parts_ahead": plan.ahead,
        "method": list(METHOD),
        "absent": {},
        "rows": [],
        "raw": [],
    }
    for size in plan.fragment_bytes:
        with removed_afterwards(plan.folder) as work:
            _one_geometry(plan, work, size, report, progress)
    report["targets"] = _targets(report["rows"])
    report["load_average_after"] = list(os.getloadavg())
    return report


def _one_geometry(
    plan: LinkerPlan, work: Path, size: int, report: dict[str, Any], progress: Progress
) -> None:
    lengths = fit(plan, size)
    shape = Shape(plan.layers, size, lengths[-1][0])
    progress(f"{shape.words()}: saving {shape.pages} pages")
    with Bench(plan, work, shape) as bench, ExitStack() as undo:
        has_fio = plan.peers and _lay_out_fio(bench, work, undo, report["absent"])
        for pages, asked in lengths:
            fio = _fio_reads(bench, work, pages * shape.page_bytes) if has_fio else {}
            row, raw = _one_length(bench, fio, pages, progress)
            row["pages_asked"] = asked
            if asked != pages:
                row["note"] = f"{asked} pages were asked for; this machine has room for {pages}"
            report["rows"].append(row)
            report["raw"].append({"geometry": row["geometry"], "pages": pages, **raw})
        able = bench.store.stats().transport
        report["transport"] = {"name": able.name, "direct": list(able.direct)}


def _lay_out_fio(bench: Bench, work: Path, undo: ExitStack, absent: dict[str, str]) -> bool:
    """Write the file that fio reads, as long as the prefix; False where there is no fio."""
    try:
        engine = _fio(bench, work, MIB, -(-bench.shape.total_bytes // MIB))
    except BenchError as error:
        absent["fio"] = str(error)
        return False
    undo.callback(engine.close)
    engine.save(b"")
    return True


def _fio(bench: Bench, work: Path, block_bytes: int, blocks: int) -> FioEngine:
    plan = bench.plan
    task = Task(work, bench.pool.arena, block_bytes, blocks, plan.depth, plan.transport, True)
    return FioEngine(task)


def _fio_reads(bench: Bench, work: Path, total_bytes: int) -> dict[str, Callable[[], float]]:
    """fio at the block size of a part, and of a layer of a page; each returns seconds.

    Reads whole blocks; the time is scaled to the bytes that were asked for.
    """
    found: dict[str, Callable[[], float]] = {}
    for name, block in (
        ("fio", max(bench.part_bytes)),
        ("fio_two_fragments", bench.shape.layer_bytes),
    ):
        blocks = max(total_bytes // block, 1)
        engine = _fio(bench, work, block, blocks)
        found[name] = _timed_read(engine, total_bytes / (blocks * block))
    return found


def _timed_read(engine: FioEngine, scale: float) -> Callable[[], float]:
    return lambda: engine.load(b"").seconds * scale


def _one_length(
    bench: Bench, fio: dict[str, Callable[[], float]], pages: int, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    shape, plan = replace(bench.shape, pages=pages), bench.plan
    makers: dict[str, Callable[[], Any]] = {"layers": lambda: bench.layer_wise(pages)}
    makers.update(fio)
    if bench.host is not None:
        makers["hicache"] = lambda: bench.by_host(pages)
    rounds = plan.rounds * max(1, min(4, SMALL_BYTES // shape.total_bytes))
    taken: dict[str, list[Any]] = {name: [] for name in makers}
    for turn in range(rounds + 1):
        for name in order_of_turn(list(makers), turn):
            progress(f"{shape.words()}, {pages} pages, round {turn} of {rounds}: {name}")
            if name in ("layers", "hicache"):
                bench.pool.wipe()
            sync_filesystem(plan.folder)
            result = makers[name]()
            if name in ("layers", "hicache"):
                bench.check(pages, name)
            if turn:  # the first warms up
                taken[name].append(result)
    return _row(bench, shape, taken), _raw(taken)


def _row(bench: Bench, shape: Shape, taken: dict[str, list[Any]]) -> dict[str, Any]:
    loads = cast(list[Loaded], taken["layers"])
    layer0 = Spread.of([load.layer_s[0] * 1e3 for load in loads])
    whole = Spread.of([load.layer_s[-1] * 1e3 for load in loads])
    python = Spread.of([load.python_s * 1e6 / shape.layers for load in loads])
    fio = [seconds * 1e3 for seconds in taken.get("fio", [])]
    two = [seconds * 1e3 for seconds in taken.get("fio_two_fragments", [])]
    host = taken.get("hicache", [])
    row = {
        "geometry": shape.words(),
        "pages": shape.pages,
        "layer0_ms": round(layer0.median, 2),
        "all_ms": round(whole.median, 2),
        "fio_ms": _median(fio),
        "hicache_ms": _median([total * 1e3 for _, total in host]),
        "python_us_per_layer": round(python.median, 1),
        "layer0_bound_ms": round(whole.median * 2 / shape.layers + 5, 2),
        "ratio_fio": round(statistics.median(fio) / whole.median, 3) if fio else None,
        "ratio_fio_by_round": [
            round(ms / (load.layer_s[-1] * 1e3), 3) for ms, load in zip(fio, loads, strict=False)
        ],
        "fio_two_fragments_ms": _median(two),
        "hicache_read_ms": _median([read * 1e3 for read, _ in host]),
        "bytes": shape.total_bytes,
        "fragments": shape.pages * shape.layers * TENSORS,
        "parts": len(bench.groups),
        "part_bytes": max(bench.part_bytes),
        "fio_bs": max(bench.part_bytes),
        "rounds": len(loads),
    }
    for name, spread in (("layer0_ms", layer0), ("all_ms", whole), ("python_us", python)):
        row[f"{name}_min"], row[f"{name}_max"] = round(spread.low, 2), round(spread.high, 2)
    return row


def _raw(taken: dict[str, list[Any]]) -> dict[str, Any]:
    """All rounds in seconds; of the layer-wise loads layer 0, the last, and CPU time."""
    loads = [[load.layer_s[0], load.layer_s[-1], load.python_s] for load in taken["layers"]]
    return {**taken, "layers": loads}


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def _targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's bounds for these rows."""
    found = []
    for row in rows:
        case = f"{row['geometry']}, {row['pages']} pages"
        found.append(target(f"{case}: of fio", row["ratio_fio"], 0.85, True))
        bound = row["layer0_bound_ms"]
        found.append(target(f"{case}: layer 0, ms", row["layer0_ms"], bound, False))
        python = row["python_us_per_layer"]
        found.append(target(f"{case}: Python a layer, us", python, 200, False))
    return found
