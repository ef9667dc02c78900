"""`tutti bench overlap`: how much a forward pass is held up by the layers that it waits for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core import hashing
from tutti_core.bench.layered import Bench, LinkerPlan, Shape, fit
from tutti_core.bench.machine import file_system, machine_facts
from tutti_core.bench.measure import (
    Progress,
    Spread,
    order_of_turn,
    removed_afterwards,
    target,
)
from tutti_core.errors import ConfigError
from tutti_core.layers import PARTS_AHEAD_MAX

SHARES = (0.5, 1.0, 2.0)
"""Compute of a layer, in I/O times of a layer, where none is named: below, at and above it."""
STEP_BYTES = 16 << 10
"""Hashed again and again as stand-in for computing: it stays in the first-level cache."""
STEPS_PER_CALL = 32
TRIAL_LOADS = 3
OVER_MAX = 0.1

METHOD = (
    "The pool, the store and the load are those of `tutti bench linker`. The caller waits for "
    "layer 0, computes, waits for layer 1, and so on, as a forward pass does.",
    "Computing is hashing of a few KiB in native code without the interpreter's lock, until the "
    "thread has used so much CPU time; it moves next to no memory. It has a core of its own, the "
    "one that devices interrupt least; the threads of the load share the others.",
    "compute_ms: of one layer, measured in passes that load nothing. io_ms: until the last layer "
    "is complete, in loads without computing. ideal_ms: the pipeline of both: layer l begins when "
    "it has arrived (at the median moment of loads without computing) and layer l-1 is done.",
    "ideal_even_ms is stricter: as if the layers of one part did not have to wait for each other.",
    "stall_ms: of a pass with a load over one without. waited_ms: of it in waiting for layers; "
    "what is more comes from cores and memory that are shared, also with other programs.",
    "Per round all of them take a turn, in an order that changes; columns are medians.",
)


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """What to measure.

    compute_ms   of one layer; none: SHARES of its I/O time, which is measured first.
    """

    folder: Path
    fragment_bytes: int = 16 << 10
    pages: int = 512
    layers: int = 32
    rounds: int = 7
    compute_ms: Sequence[float] = ()
    depth: int = 64
    transport: str = "auto"
    part_bytes: int | None = None
    ahead: int = PARTS_AHEAD_MAX

    def check(self) -> None:
        """Raise ConfigError where the plan cannot work; writes nothing."""
        if any(not 0 < time_ms <= 10_000 for time_ms in self.compute_ms):
            raise ConfigError("compute: milliseconds above 0 are needed, such as 2,4,8")
        self.load_plan().check()

    def load_plan(self) -> LinkerPlan:
        """The loads alone."""
        return LinkerPlan(
            folder=self.folder,
            fragment_bytes=(self.fragment_bytes,),
            pages=(self.pages,),
            layers=self.layers,
            rounds=self.rounds,
            depth=self.depth,
            transport=self.transport,
            part_bytes=self.part_bytes,
            ahead=self.ahead,
            peers=False,
        )


class Compute:
    """Work for one core that touches next to no memory and does not hold the interpreter's lock."""

    def __init__(self) -> None:
        self._bytes = np.arange(STEP_BYTES // 8, dtype=np.uint64)
        self._start = np.arange(STEPS_PER_CALL + 1, dtype=np.uint32)
        self._address = np.full(STEPS_PER_CALL, self._bytes.ctypes.data, dtype=np.uint64)
        self._length = np.full(STEPS_PER_CALL, STEP_BYTES, dtype=np.uint64)

    def run(self, cpu_s: float) -> None:
        """Work until this thread has used so much more CPU time."""
        end_s = time.thread_time() + cpu_s
        while time.thread_time() < end_s:
            hashing.checksum_items(self._start, self._address, self._length)


def run_overlap(plan: OverlapPlan, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Measure and return the report: rows, targets, method, machine, raw rounds.

    Raises
        ConfigError: too little room or an impossible plan; nothing was written.
        BenchError: a load failed, or a page came back wrong.
    """
    plan.check()
    load_plan = plan.load_plan()
    ((pages, _),) = fit(load_plan, plan.fragment_bytes)
    shape = Shape(plan.layers, plan.fragment_bytes, pages)
    report: dict[str, Any] = {
        "benchmark": "overlap",
        "machine": machine_facts(),
        "file_system": file_system(plan.folder),
        "geometry": shape.words(),
        "pages": pages,
        "pages_asked": plan.pages,
        "rounds": plan.rounds,
        "depth": plan.depth,
        "parts_ahead": plan.ahead,
        "method": list(METHOD),
    }
    with removed_afterwards(plan.folder) as work, _own_core() as take_core:
        progress(f"{shape.words()}: saving {pages} pages")
        with Bench(load_plan, work, shape) as bench:
            report["part_bytes"] = max(bench.part_bytes)
            report["core_of_its_own"] = take_core()
            asked = plan.compute_ms or _shares(bench)
            passes = _Passes(bench)
            for turn in range(plan.rounds + 1):
                progress(f"{shape.words()}, {pages} pages, round {turn} of {plan.rounds}")
                passes.round(turn, asked, keep=turn > 0)  # the first warms up
    report["rows"] = [passes.row(time_ms) for time_ms in asked]
    report["raw"] = passes.raw()
    report["targets"] = [
        target(f"{row['compute_ms']} ms a layer: over ideal", row["over_ideal"], OVER_MAX, False)
        for row in report["rows"]
    ]
    report["load_average_after"] = list(os.getloadavg())
    return report


@contextmanager
def _own_core() -> Iterator[Callable[[], bool]]:
    """Keep one core for this thread; yields what takes it.

    Threads that are made before it is taken, those of the load, run on the other cores. It answers
    False where there is one core only.
    """
    allowed = os.sched_getaffinity(0)
    counts = device_interrupts(Path("/proc/interrupts").read_text())
    own = {min(allowed, key=lambda core: counts.get(core, 0))}
    if len(allowed) == 1:
        yield lambda: False
        return

    def take() -> bool:
        os.sched_setaffinity(0, own)
        return True

    os.sched_setaffinity(0, allowed - own)
    try:
        yield take
    finally:
        os.sched_setaffinity(0, allowed)


def device_interrupts(table: str) -> dict[int, int]:
    """How often devices have interrupted each core, of the text of /proc/interrupts."""
    heads, *lines = table.splitlines()
    cores = [int(head.removeprefix("CPU")) for head in heads.split()]
    counts = dict.fromkeys(cores, 0)
    for line in lines:
        number, *fields = line.split()
        if number.rstrip(":").isdigit():  # others are timers and the like
            for core, field in zip(cores, fields, strict=False):
                counts[core] += int(field)
    return counts


def pipeline_s(arrival_s: Sequence[float], compute_s: float) -> float:
    """When the last layer is computed, if each begins once it is there and the one before done."""
    done_s = 0.0
    for at_s in arrival_s:
        done_s = max(done_s, at_s) + compute_s
    return done_s


def _shares(bench: Bench) -> list[float]:
    """Milliseconds to compute a layer: SHARES of what its I/O takes in a few loads."""
    pages = bench.shape.pages
    taken = [bench.layer_wise(pages).layer_s[-1] for _ in range(TRIAL_LOADS)]
    layer_ms = Spread.of(taken).median * 1e3 / bench.shape.layers
    return [round(share * layer_ms, 3) for share in SHARES]


class _Passes:
    """Passes of one kind each, round by round, in seconds."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._compute = Compute()
        self._loads: list[tuple[float, ...]] = []
        self._alone: dict[float, list[float]] = {}
        self._both: dict[float, list[float]] = {}
        self._waits: dict[float, list[float]] = {}

    def round(self, turn: int, asked: Sequence[float], keep: bool) -> None:
        """One pass of each kind."""
        kinds = [f"{kind} {time_ms}" for time_ms in asked for kind in ("alone", "both")]
        for kind in order_of_turn(["load", *kinds], turn):
            name, _, time_ms = kind.partition(" ")
            if name == "load":
                arrival_s = self._bench.layer_wise(self._bench.shape.pages).layer_s
                if keep:
                    self._loads.append(arrival_s)
                continue
            taken_s, waited_s = self._pass(float(time_ms) / 1e3, load=name == "both")
            if keep:
                into = self._both if name == "both" else self._alone
                into.setdefault(float(time_ms), []).append(taken_s)
            if keep and name == "both":
                self._waits.setdefault(float(time_ms), []).append(waited_s)

    def row(self, asked_ms: float) -> dict[str, Any]:
        """One line of the table."""
        layers = self._bench.shape.layers
        arrival_s = np.median(np.array(self._loads), axis=0)
        whole_s = float(np.median([load[-1] for load in self._loads]))
        alone, both = Spread.of(self._alone[asked_ms]), Spread.of(self._both[asked_ms])
        compute_s = alone.median / layers
        ideal_s = pipeline_s(arrival_s.tolist(), compute_s)
        even = [(layer + 1) * whole_s / layers for layer in range(layers)]
        even_s = pipeline_s(even, compute_s)
        return {
            "compute_ms": round(compute_s * 1e3, 3),
            "io_ms": round(whole_s * 1e3, 2),
            "ideal_ms": round(ideal_s * 1e3, 2),
            "measured_ms": round(both.median * 1e3, 2),
            "over_ideal": round(both.median / ideal_s - 1, 4),
            "compute_asked_ms": asked_ms,
            "compute_all_ms": round(alone.median * 1e3, 2),
            "stall_ms": round((both.median - alone.median) * 1e3, 2),
            "waited_ms": round(Spread.of(self._waits[asked_ms]).median * 1e3, 2),
            "io_layer_ms": round(whole_s * 1e3 / layers, 3),
            "ideal_even_ms": round(even_s * 1e3, 2),
            "over_ideal_even": round(both.median / even_s - 1, 4),
            "measured_ms_min": round(both.low * 1e3, 2),
            "measured_ms_max": round(both.high * 1e3, 2),
        }

    def raw(self) -> dict[str, Any]:
        """All rounds: when layers arrived in loads alone, and the length of the other passes."""
        return {
            "loads_s": self._loads,
            "compute_alone_s": {str(key): value for key, value in self._alone.items()},
            "both_s": {str(key): value for key, value in self._both.items()},
            "waited_s": {str(key): value for key, value in self._waits.items()},
        }

    def _pass(self, compute_s: float, load: bool) -> tuple[float, float]:
        """One forward pass, with a load or without; seconds of all, and of waiting for layers."""
        bench = self._bench
        pages, layers = bench.shape.pages, bench.shape.layers
        if load:
            bench.pool.wipe()
        waited_s = 0.0
        start_s = time.perf_counter()
        clock = bench.submit(pages) if load else None
        for layer in range(layers):
            if clock is not None:
                before_s = time.perf_counter()
                clock.wait(layer)
                waited_s += time.perf_counter() - before_s
            self._compute.run(compute_s)
        taken_s = time.perf_counter() - start_s
        if load:
            bench.check(pages, "overlapped load")
        return taken_s, waited_s
