"""`tutti bench safety`: attempts to break a store, recovery time, and what safety costs."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti_core.bench.encryption import measure as measure_encryption
from tutti_core.bench.index import fill_store, reopened
from tutti_core.bench.machine import file_system, machine_facts
from tutti_core.bench.measure import (
    GIB,
    MIB,
    Progress,
    drop_cached,
    need_space,
    removed_afterwards,
    sync_filesystem,
    target,
)
from tutti_core.errors import ConfigError
from tutti_core.tiers.pools import catalog_folder
from tutti_core.trials import TRIALS, Tally, run_trial

METHOD = (
    "trials: each row is one kind of attack (tutti_core/trials); crash_points, kills, faults and "
    "bad_inputs say how often, pages_compared how many pages were loaded and compared byte for "
    "byte. wrong_bytes, durable_pages_lost and complaints have to be 0.",
    "recovery_s_per_million_pages: in a fresh process, catalog not cached, from open() until every "
    "page is in the index with its place in the eviction order; scaled to a million pages. "
    "first_answer_s: until the first chain is answered.",
    "checksum_cost_percent, encryption_cost_percent: bandwidth of a load lost to each, against the "
    "same load without; medians of interleaved rounds.",
)


@dataclass(frozen=True, slots=True)
class SafetyPlan:
    """What to try and to measure."""

    folder: Path
    trials: tuple[str, ...] = TRIALS
    seconds: float = 0.0
    seed: int = 0
    index_pages: int = 1_000_000
    rounds: int = 5
    size_bytes: int = 256 * MIB

    def check(self) -> None:
        """Raise ConfigError where the plan cannot work; writes nothing."""
        unknown = [name for name in self.trials if name not in TRIALS]
        if unknown:
            raise ConfigError(f"trials = {unknown[0]!r} is unknown", hint=", ".join(TRIALS))
        if not self.seconds >= 0:
            raise ConfigError(f"seconds = {self.seconds} must be at least 0")
        for name in ("index_pages", "rounds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 0")
        if not self.folder.is_dir():
            raise ConfigError(f"dir = {str(self.folder)!r} is not a directory")
        need_space(self.folder, 700 * self.index_pages + 8 * self.size_bytes + 2 * GIB)


def run_safety(plan: SafetyPlan, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Try, measure, and return the report. What a trial finds is in the report, not raised.

    Raises
        ConfigError: too little room or an impossible plan; nothing was written.
        BenchError: a measurement went wrong.
    """
    plan.check()
    report: dict[str, Any] = {
        "benchmark": "safety",
        "machine": machine_facts(),
        "file_system": file_system(plan.folder),
        "seed": plan.seed,
        "seconds_per_trial": plan.seconds,
        "method": METHOD,
    }
    total, rows = Tally(), []
    for name in plan.trials:
        progress(f"trial: {name}")
        with removed_afterwards(plan.folder) as work:
            start_s = time.perf_counter()
            tally = run_trial(name, work, seed=plan.seed, seconds=plan.seconds)
            rows.append(_row(name, tally, time.perf_counter() - start_s))
        total.add(tally)
    report["rows"] = rows
    report.update(_row("all", total, sum(row["seconds"] for row in rows)))
    report["complaint_lines"] = total.complaints
    if plan.index_pages and plan.rounds:
        report.update(_measure_recovery(plan, progress))
    if plan.rounds and plan.size_bytes:
        progress("measuring what checksums and encryption cost")
        with removed_afterwards(plan.folder) as work:
            report.update(measure_encryption(work, rounds=plan.rounds, size_bytes=plan.size_bytes))
    report["targets"] = _targets(report, plan.trials)
    report["load_average_after"] = list(os.getloadavg())
    return report


def _row(name: str, tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "trial": name,
        "seconds": round(seconds, 1),
        "crash_points": tally.crash_points,
        "kills": tally.kills,
        "fault_count": tally.faults.total(),
        "faults": dict(sorted(tally.faults.items())),
        "events": dict(sorted(tally.events.items())),
        "bad_input_count": tally.bad_inputs.total(),
        "bad_inputs": dict(sorted(tally.bad_inputs.items())),
        "pages_compared": tally.pages_compared,
        "misses": tally.misses,
        "wrong_bytes": tally.wrong_bytes,
        "durable_pages_lost": tally.durable_pages_lost,
        "complaints": tally.complaint_count,
    }


def _targets(report: dict[str, Any], trials: Sequence[str]) -> list[dict[str, Any]]:
    """Nothing wrong, nothing lost; and that everything was tried that these trials promise."""
    targets = [
        target("wrong_bytes", report["wrong_bytes"], 0, False),
        target("durable_pages_lost", report["durable_pages_lost"], 0, False),
        target("complaints", report["complaints"], 0, False),
    ]
    if trials:
        targets.append(target("pages_compared", report["pages_compared"], 1, True))
    if set(trials) == set(TRIALS):
        tried = ("crash_points", "kills", "fault_count", "bad_input_count")
        targets += [target(name, report[name], 1, True) for name in tried]
    recovery_s = report.get("recovery_s_per_million_pages")
    return [*targets, target("recovery_s_per_million_pages", recovery_s, 5.0, False)]


def _measure_recovery(plan: SafetyPlan, progress: Progress) -> dict[str, Any]:
    with removed_afterwards(plan.folder) as work:
        progress(f"writing a catalog of {plan.index_pages} pages")
        fill_store(work, plan.index_pages)
        sync_filesystem(work)
        data = catalog_folder(work / "store") / "data.mdb"
        runs = []
        for turn in range(plan.rounds):
            progress(f"round {turn + 1} of {plan.rounds}: reopening")
            drop_cached([data])
            runs.append(reopened(work, "restore"))
    restored_s = statistics.median(run["restored_s"] for run in runs)
    return {
        "recovery_pages": plan.index_pages,
        "recovery_s_per_million_pages": round(restored_s * 1e6 / plan.index_pages, 2),
        "first_answer_s": round(statistics.median(run["first_answer_s"] for run in runs), 3),
        "recovery_raw": json.loads(json.dumps(runs)),
    }
