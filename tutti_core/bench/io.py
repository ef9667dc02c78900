"""`tutti bench io`: save until durable and load cold, against fio and SGLang's HiCacheFile."""

from __future__ import annotations

import importlib.util
import os
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.bench.engines import (
    CALL_PAGES,
    KEY_BYTES,
    LOADS_IN_FLIGHT_MAX,
    Engine,
    FileEngine,
    FioEngine,
    Task,
    TuttiEngine,
    disk_bytes,
)
from tutti_core.bench.machine import file_system, machine_facts
from tutti_core.bench.measure import (
    GIB,
    MIB,
    Arena,
    BenchError,
    Progress,
    Sample,
    Spread,
    equal_pages,
    need_memory,
    need_space,
    order_of_turn,
    removed_afterwards,
    sync_filesystem,
    target,
)
from tutti_core.errors import ConfigError

PHASES = ("save", "load")
METHOD = (
    "Per round all contestants save, then all load, in an order that changes from round to round. "
    "The file system is synced before each timed run. Columns are medians; ratios are of medians.",
    f"Pages are fresh random bytes in one page-aligned arena, in calls of {CALL_PAGES} pages. "
    f"Tutti queues all saves at once and keeps {LOADS_IN_FLIGHT_MAX} load calls in flight; "
    "HiCacheFile's calls block.",
    "Tutti: save until every ticket reports durable; checksums on; loads with O_DIRECT. Round 0 "
    "writes fresh segments (first_fill, not in the medians); later rounds overwrite them.",
    "fio: io_uring, direct=1, sequential, registered buffers, the same block size, depth and bytes "
    "in one file; end_fsync=1 inside its own clock (start-up excluded); overwrites as the store "
    "does.",
    "HiCacheFile: one new file a page, syncfs at the end of a save; its files are dropped from "
    "the page cache before a load. The kernel's write-back CPU time is not in its figure.",
    "The arena is allocated in 4 KiB pages; with huge_pages, the default, the store puts it into "
    "huge pages when it is registered, as it does with a server's host pool. fio's buffers (depth "
    "times block size) are in 4 KiB pages in either case, its default.",
    "Every page that Tutti and HiCacheFile load is compared with what was saved, in every round.",
)


@dataclass(frozen=True, slots=True)
class IoPlan:
    """What to measure.

    peers       also measure fio and HiCacheFile.
    huge_pages  let the store put the registered arena into huge pages, as it does by default.
    """

    folder: Path
    sizes: Sequence[int] = (256 << 10, 2 << 20)
    page_count: int = 1000
    rounds: int = 5
    depth: int = 64
    transport: str = "auto"
    peers: bool = True
    huge_pages: bool = True

    def check(self) -> None:
        """Raise ConfigError where the plan cannot work; writes nothing."""
        if not self.sizes or any(size < 4096 or size % 4096 for size in self.sizes):
            raise ConfigError("sizes: multiples of 4 KiB are needed, such as 256KiB,2MiB")
        for name in ("page_count", "rounds", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        if not self.folder.is_dir():
            raise ConfigError(f"dir = {str(self.folder)!r} is not a directory")
        size = max(self.sizes)
        need_memory(2 * size * self.page_count + 512 * MIB)
        need_space(self.folder, disk_bytes(size, self.page_count) * 21 // 20 + 128 * MIB)


def run_io(plan: IoPlan, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Measure and return the report: rows, first_fill, targets, method, machine, raw rounds.

    Raises
        ConfigError: too little room or an impossible plan; nothing was written.
        BenchError: a contestant failed, or a page came back wrong.
    """
    plan.check()
    report: dict[str, Any] = {
        "benchmark": "io",
        "machine": machine_facts(),
        "file_system": file_system(plan.folder),
        "pages": plan.page_count,
        "rounds": plan.rounds,
        "depth": plan.depth,
        "huge_pages": plan.huge_pages,
        "method": list(METHOD),
        "absent": {},
        "rows": [],
        "first_fill": [],
        "contestants": {},
        "raw": [],
    }
    with removed_afterwards(plan.folder) as work:
        for size in plan.sizes:
            _one_size(plan, work, size, report, progress)
    report["targets"] = _targets(report["rows"])
    report["load_average_after"] = list(os.getloadavg())
    return report


def _one_size(
    plan: IoPlan, work: Path, size: int, report: dict[str, Any], progress: Progress
) -> None:
    folder = work / str(size)
    folder.mkdir()
    arena = Arena(2 * size * plan.page_count)
    task = Task(folder, arena, size, plan.page_count, plan.depth, plan.transport, plan.huge_pages)
    engines, absent = _open_engines(task, plan.peers)
    report["absent"].update(absent)
    generator = np.random.Generator(np.random.SFC64(secrets.randbits(128)))
    samples: dict[tuple[str, str], list[Sample]] = {}
    try:
        for turn in range(plan.rounds + 1):
            arena.fill_random(generator, 0, task.total_bytes)
            keys = generator.bytes(plan.page_count * KEY_BYTES)
            for phase in PHASES:
                for name in order_of_turn(list(engines), turn):
                    progress(f"{_words(size)} round {turn} of {plan.rounds}: {name} {phase}s")
                    sample = _run(task, name, engines[name], phase, keys)
                    samples.setdefault((phase, name), []).append(sample)
            for engine in engines.values():
                engine.forget()
        report["contestants"][_words(size)] = {n: e.describe() for n, e in engines.items()}
    finally:
        for engine in engines.values():
            engine.close()
    for phase in PHASES:
        rounds = {name: samples[phase, name] for name in engines}
        case = f"{phase} {_words(size)}"
        first = {name: part[:1] for name, part in rounds.items()}
        report["rows"].append(_row(case, {n: r[1:] for n, r in rounds.items()}, task.total_bytes))
        report["first_fill"].append(_row(case, first, task.total_bytes))
        report["raw"].append(
            {"case": case, **{n: [[s.seconds, s.cpu_s] for s in r] for n, r in rounds.items()}}
        )


def _open_engines(task: Task, peers: bool) -> tuple[dict[str, Engine], dict[str, str]]:
    """The contestants that can run here, and why the others cannot."""
    makers: dict[str, Callable[[Task], Engine]] = {"tutti": TuttiEngine}
    absent: dict[str, str] = {}
    if peers:
        makers["fio"] = FioEngine
        if importlib.util.find_spec("sglang") is None:
            absent["file"] = "SGLang is not installed, so HiCacheFile was not measured"
        else:
            makers["file"] = FileEngine
    engines: dict[str, Engine] = {}
    for name, make in makers.items():
        try:
            engines[name] = make(task)
        except (BenchError, ImportError, AttributeError, TypeError) as error:
            if name == "tutti":
                raise
            absent[name] = f"{name} was not measured: {error}"
    return engines, absent


def _run(task: Task, name: str, engine: Engine, phase: str, keys: bytes) -> Sample:
    """One timed run, with a settled disk before it and a comparison of bytes after it."""
    half = task.total_bytes
    if phase == "load":
        task.arena.bytes[half:] = 0
    sync_filesystem(task.folder)
    sample = engine.save(keys) if phase == "save" else engine.load(keys)
    if phase == "load" and name != "fio":
        good = equal_pages(task.arena.bytes[:half], task.arena.bytes[half:], task.page_bytes)
        if good != task.page_count:
            wrong = task.page_count - good
            raise BenchError(f"{name}: {wrong} of {task.page_count} pages came back wrong")
    return sample


def _row(case: str, rounds: dict[str, list[Sample]], total_bytes: int) -> dict[str, Any]:
    """One line of the table; a contestant that did not run has None."""
    row: dict[str, Any] = {"case": case}
    speed: dict[str, Spread] = {}
    for name in ("tutti", "fio", "file"):
        part = rounds.get(name, [])
        prefix = "" if name == "tutti" else f"{name}_"
        if part:
            speed[name] = Spread.of([total_bytes / MIB / s.seconds for s in part])
            cpu = statistics.median(s.cpu_s for s in part) / (total_bytes / GIB)
        one = speed.get(name)
        row[f"{name}_mib_s"] = round(one.median, 1) if one else None
        row[f"{name}_mib_s_min"] = round(one.low, 1) if one else None
        row[f"{name}_mib_s_max"] = round(one.high, 1) if one else None
        row[f"{prefix}cpu_s_per_gib"] = round(cpu, 3) if one else None
    for name in ("fio", "file"):
        if name in speed:
            row[f"ratio_{name}"] = round(speed["tutti"].median / speed[name].median, 3)
            paired = zip(rounds["tutti"], rounds[name], strict=True)
            row[f"ratio_{name}_by_round"] = [round(b.seconds / a.seconds, 3) for a, b in paired]
        else:
            row[f"ratio_{name}"] = row[f"ratio_{name}_by_round"] = None
    return row


def _targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's bounds for these rows."""
    found = []
    for row in rows:
        found.append(target(f"{row['case']}: of fio", row["ratio_fio"], 0.9, True))
        if row["case"] == f"load {_words(256 << 10)}":
            found.append(target(f"{row['case']}: of HiCacheFile", row["ratio_file"], 1.5, True))
        if row["case"] == f"load {_words(2 << 20)}":
            found.append(target(f"{row['case']}: of HiCacheFile", row["ratio_file"], 1.0, True))
            share = None
            if row["file_cpu_s_per_gib"]:
                share = round(row["cpu_s_per_gib"] / row["file_cpu_s_per_gib"], 3)
            found.append(target(f"{row['case']}: CPU of HiCacheFile's", share, 0.5, False))
    return found


def _words(size: int) -> str:
    return f"{size >> 20} MiB" if size % MIB == 0 else f"{size >> 10} KiB"
