"""GPU-issued NVMe over SMs: commands, bytes, what it costs a GEMM beside it, and the CPU.

The limits are what one machine can do at all: the same software controller fed by a CPU thread, and
plain copies of pinned memory to the device.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import numpy as np
from check_report import Report
from gio_rig import KIB, MIB, Machine, Rig

from tutti_core.gio.executor import CpuExecutor
from tutti_core.gio.ring import FRAGMENTS_MAX, READ

BUDGETS = (1, 2, 4, 8)
SIZES = {"4k": 4 * KIB, "64k": 64 * KIB}
AHEAD = 4
"""IOCBs in flight."""
NAMESPACE_BYTES = 256 * MIB
GEMM_SIDE = 8192
GEMMS = 20
TWO_OF_EIGHT_MIN, SLOWDOWN_PCT_MAX, CPU_US_MAX = 0.9, 3.0, 20.0


class Load:
    """Random reads by IOCBs of 2,048 fragments, some in flight at any time."""

    def __init__(self, rig: Rig, size: int, rng: np.random.Generator, sms: int) -> None:
        self.rig, self.size, self.sms = rig, size, sms
        cells = rig.memory_bytes // size
        self._plans = [rig.plan(rng, min(FRAGMENTS_MAX, cells), size, size) for _ in range(AHEAD)]
        self.commands = 0
        self.cpu_us: list[float] = []

    def _issue(self, number: int) -> int:
        began_ns = time.thread_time_ns()
        iocb = self.rig.prepare(READ, self._plans[number % AHEAD])
        if not self.rig.queue.issue_io([iocb], self.sms):
            raise RuntimeError("a launch failed")
        self.cpu_us.append((time.thread_time_ns() - began_ns) / 1e3)
        return iocb

    def run(self, seconds: float, stop: threading.Event | None = None) -> float:
        """Read for so long, or until `stop`; commands a second."""
        began_s, number, flying = time.monotonic(), 0, []
        count = len(self._plans[0].length)
        while True:
            over = stop.is_set() if stop else time.monotonic() - began_s >= seconds
            if not over:
                flying.append(self._issue(number))
                number += 1
            if flying and (over or len(flying) == AHEAD):
                statuses = self.rig.wait(flying.pop(0))
                if statuses.any():
                    raise RuntimeError(f"reads failed: {sorted(set(statuses))}")
                self.commands += count
            if over and not flying:
                return self.commands / (time.monotonic() - began_s)


def copy_engine_bytes_s(size: int = 256 * MIB, turns: int = 8) -> float:
    """Plain copies of pinned memory to the device."""
    import cupy

    host = cupy.cuda.alloc_pinned_memory(size)
    device = cupy.zeros(size, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    runtime = cupy.cuda.runtime
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for turn in range(turns + 1):
        if turn == 1:
            begin.record(stream)
        runtime.memcpyAsync(device.data.ptr, host.ptr, size, 1, stream.ptr)
    end.record(stream)
    end.synchronize()
    return size * turns / (cupy.cuda.get_elapsed_time(begin, end) / 1e3)


class Gemm:
    """Multiplications of half-precision matrices on a stream of its own."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        shape = (GEMM_SIDE, GEMM_SIDE)
        self._a, self._b, self._c = (cupy.ones(shape, cupy.float16) for _ in range(3))
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self.seconds()  # loads the library, and allocates what it needs

    def seconds(self) -> float:
        """Of GEMMS of them. Events are polled: nothing waits for other streams."""
        with self._stream:
            self._begin.record(self._stream)
            for _ in range(GEMMS):
                self._cupy.matmul(self._a, self._b, out=self._c)
            self._end.record(self._stream)
        end_s = time.monotonic() + 60
        while not self._end.done:
            if time.monotonic() >= end_s:
                raise TimeoutError("a GEMM does not end")
            time.sleep(0.0002)
        return float(self._cupy.cuda.get_elapsed_time(self._begin, self._end)) / 1e3


def _slowdown_pct(gemm: Gemm, rig: Rig, rng: np.random.Generator, sms: int, turns: int) -> float:
    alone = statistics.median(gemm.seconds() for _ in range(turns))
    stop = threading.Event()
    load, failed = Load(rig, SIZES["64k"], rng, sms), []

    def read() -> None:
        try:
            load.run(0, stop)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        time.sleep(0.05)
        beside = statistics.median(gemm.seconds() for _ in range(turns))
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return (beside / alone - 1) * 100


def _rig(machine: Machine, executor: Any, kind: str, size: int, quick: bool) -> Rig:
    namespace = NAMESPACE_BYTES // 8 if quick else NAMESPACE_BYTES
    return Rig(
        machine, executor, kind=kind, namespace_bytes=namespace,
        memory_bytes=min(FRAGMENTS_MAX * size, namespace), depth=AHEAD, queue_pairs=5,
        queue_entries=1024, shadow_doorbells=False, timeout_s=30.0,
    )  # fmt: skip


def measure(machine: Machine, report: Report, rng: np.random.Generator, quick: bool) -> None:
    """Fill `report.speed`; a target that is missed is said, and is no failure."""
    seconds, turns = (0.05, 2) if quick else (1.0, 5)
    alone = {}
    for name, size in SIZES.items():
        rig = _rig(machine, CpuExecutor(threads=1, lanes=1), "pinned", size, quick)
        alone[name] = Load(rig, size, rng, 1).run(seconds)
        rig.close()
    limits = {f"commands_s_{name}": round(rate) for name, rate in alone.items()}
    copies = copy_engine_bytes_s() if machine.cuda else None
    limits["copy_engine_gb_s"] = round(copies / 1e9, 2) if copies else None
    report.speed.append({"what": "limits: software controller fed by a CPU thread", **limits})
    gemm = _gemm(machine, report)
    rows = []
    for kind in machine.kinds():
        executor = machine.executor(max(BUDGETS))
        rigs = {name: _rig(machine, executor, kind, size, quick) for name, size in SIZES.items()}
        for sms in BUDGETS:
            row: dict[str, Any] = {"what": "gio", "data": kind, "sms": sms}
            for name, size in SIZES.items():
                before = rigs[name].controller.stats()
                load = Load(rigs[name], size, rng, sms)
                rate = load.run(seconds)
                after = rigs[name].controller.stats()
                row[f"commands_s_{name}"] = round(rate)
                row[f"gb_s_{name}"] = round(rate * size / 1e9, 3)
                row[f"of_controller_{name}"] = round(rate / alone[name], 3)
                if copies:
                    row[f"of_copy_engine_{name}"] = round(rate * size / copies, 3)
                rung = max(after["sq_doorbells"] - before["sq_doorbells"], 1)
                row[f"commands_per_doorbell_{name}"] = round(load.commands / rung, 1)
                row[f"cpu_us_iocb_{name}"] = round(statistics.median(load.cpu_us), 1)
            if gemm is not None:
                row["gemm_slowdown_pct"] = round(
                    _slowdown_pct(gemm, rigs["64k"], rng, sms, turns), 2
                )
            rows.append(row)
        for rig in rigs.values():
            rig.close()
    report.speed += rows
    report.check("speed: every read was right and ended", bool(rows))
    _print(rows, report)


def _gemm(machine: Machine, report: Report) -> Gemm | None:
    if not machine.cuda:
        report.check("speed: a GEMM beside it", None, "needs a GPU")
        return None
    try:
        return Gemm()
    except Exception as error:  # CuPy without cuBLAS
        report.check("speed: a GEMM beside it", None, f"{type(error).__name__}: {error}")
        return None


def _print(rows: list[dict[str, Any]], report: Report) -> None:
    print("data    SMs  4 KiB k/s  64 KiB GB/s  of copies  of controller  GEMM %  CPU us")
    for row in rows:
        print(
            f"{row['data']:7} {row['sms']:3}  {row['commands_s_4k'] / 1e3:9.0f}"
            f"  {row['gb_s_64k']:11.2f}  {row.get('of_copy_engine_64k') or '-':>9}"
            f"  {row['of_controller_64k']:>13}  {row.get('gemm_slowdown_pct', '-'):>6}"
            f"  {row['cpu_us_iocb_64k']:6.1f}"
        )
    for kind in sorted({row["data"] for row in rows}):
        by = {row["sms"]: row for row in rows if row["data"] == kind}
        share = by[2]["gb_s_64k"] / max(by[8]["gb_s_64k"], 1e-9)
        slower, cpu = by[2].get("gemm_slowdown_pct"), by[2]["cpu_us_iocb_64k"]
        targets = {
            "two_of_eight": (round(share, 3), share >= TWO_OF_EIGHT_MIN),
            "gemm_slowdown_pct": (slower, None if slower is None else slower <= SLOWDOWN_PCT_MAX),
            "cpu_us_iocb": (cpu, cpu <= CPU_US_MAX),
        }
        for name, (value, met) in targets.items():
            word = {True: "met", False: "MISSED", None: "not measured"}[met]
            print(f"target {name}, {kind}: {value} {word}")
        report.speed.append({"what": f"targets, {kind}", **{k: v[0] for k, v in targets.items()},
                             "met": {k: v[1] for k, v in targets.items()}})  # fmt: skip
