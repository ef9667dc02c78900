"""Checks GPU-issued NVMe against the software controller on one machine, then measures it.

    integration/gpu/check.sh            runs all of it, with limits; see there
    python integration/gpu/gio_check.py --executor cuda --sections ring --json ring.json

With `--executor cpu` CPU threads run the same lanes, which proves the script and not the GPU.

    machine     what is there, and that the kernel compiles, loads and runs
    queue       laps of small queues; commands late, repeated, torn, with lies in completions
    ring        IOCBs of every size, both ways, poisoned memory, random bytes new in each turn, data
                in pinned and in device memory; bad fragments; hung and dead controllers
    order       what a stream does after a launch's event sees what the launch brought
    transport   the conformance suite of the gpu transport
    small       a few fragments, for compute-sanitizer
    speed       over SMs: see gio_speed.py

Exit status 0: everything that ran was right; 1: something was not; 77: there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from check_report import Report
from gio_rig import KIB, MIB, POISON, Machine, Plan, Rig

from tutti_core import UnsupportedError
from tutti_core.gio.ring import FRAGMENTS_MAX, READ, WRITE
from tutti_core.testing import CHECKS, CheckSkipped, ConformanceError
from tutti_core.testing.soft_nvme import gpu_subject

TIMEOUT, DEVICE_GONE, NOT_ISSUED, BAD_MEMORY = 0x10000, 0x10001, 0x10002, 0x10003
LBA_RANGE, READ_ERROR = 0x80, 0x281
NO_GPU = 77


class Run:
    """One run: the machine, what was found, and randomness whose seed is printed."""

    def __init__(self, machine: Machine, report: Report, quick: bool, folder: Path) -> None:
        self.machine, self.report, self.quick, self.folder = machine, report, quick, folder
        self.seed = int.from_bytes(os.urandom(4), "little")
        self.rng = np.random.default_rng(self.seed)
        print(f"seed {self.seed}")

    def rig(self, **options: Any) -> Rig:
        """A rig with scrambled namespaces and poisoned memory."""
        rig = Rig(self.machine, self.machine.executor(), **options)
        rig.scramble(self.rng)
        rig.poison()
        return rig


# -- machine ---------------------------------------------------------------------------------------


def machine(run: Run) -> None:
    """The kernel is there and runs."""
    began_s = time.monotonic()
    executor = run.machine.executor()
    took_s = time.monotonic() - began_s
    if run.machine.cuda:
        facts = executor.describe()  # type: ignore[attr-defined]
        run.report.check(
            "kernel: no local memory", facts["local_bytes"] == 0, f"{facts['registers']} registers"
        )
        run.report.speed.append({"what": "executor", **facts, "ready_s": round(took_s, 2)})
    rig = Rig(run.machine, executor)
    (statuses,) = rig.run(READ, [rig.plan(run.rng, 1, 4 * KIB, 4 * KIB)])
    run.report.check("one command", not statuses.any(), f"ready after {took_s:.1f} s")
    rig.close()


# -- queue -----------------------------------------------------------------------------------------


def queue(run: Run) -> None:
    """Laps of the queues, and controllers that are late or lie."""
    for entries in (2, 3, 16, 256):
        rig = run.rig(queue_pairs=2, queue_entries=entries, shadow_doorbells=entries != 16)
        plans = [rig.plan(run.rng, 1024, 4 * KIB, 4 * KIB) for _ in range(2)]
        right = _round(run, rig, READ, plans[:1])
        stats = rig.controller.stats()
        right &= not (stats["unknown"] or stats["bad_head"] or stats["late"])
        detail = f"1024 commands, {stats['sq_doorbells']} doorbells"
        run.report.check(f"queue of {entries} entries", right, detail)
        rig.close()
    for fault, options in (
        ("delay", {"turns": 50, "count": 40}),
        ("repeat", {"count": 5}),
        ("torn", {"turns": 50, "count": 20}),
        ("wrong_id", {"count": 5}),
        ("wrong_queue", {"count": 5}),
        ("wrong_head", {"count": 5}),
    ):
        rig = run.rig(queue_pairs=3, queue_entries=64)
        rig.soft.inject(fault, skip=20, **options)
        right = _round(run, rig, READ, [rig.plan(run.rng, 512, 4 * KIB, 4 * KIB)])
        run.report.check(f"queue, completions: {fault}", right)
        rig.close()


def _round(run: Run, rig: Rig, op: int, plans: list[Plan]) -> bool:
    """Move fragments by one launch, and compare every byte of the memory."""
    if op == READ:
        rig.poison()
    else:
        rig.memory.put(run.rng.integers(0, 256, rig.memory_bytes, np.uint8))
    good = all(not statuses.any() for statuses in rig.run(op, plans))
    held = rig.memory.get()
    good &= not any(rig.wrong(plan, held) for plan in plans)
    return good and (op == WRITE or rig.untouched(plans, held))


# -- ring ------------------------------------------------------------------------------------------


def ring(run: Run) -> None:
    """Bytes both ways for every kind of memory and of data pointer, and what goes wrong."""
    for kind in run.machine.kinds():
        for sgl in (True, False):
            rig = run.rig(kind=kind, namespaces=2, sgl=sgl, transfer_shift=5)
            counts = (1, 2, 31, 33, 500) if run.quick else (1, 2, 31, 32, 33, 700, FRAGMENTS_MAX)
            right, moved = True, 0
            for count in counts:
                rig.scramble(run.rng)
                for op in (READ, WRITE):
                    plan = rig.plan(run.rng, count, 8 * KIB - 512, 8 * KIB)
                    right &= _round(run, rig, op, [plan])
                    moved += int(plan.length.sum())
            large = rig.plan(run.rng, 12, MIB, MIB)
            right &= _round(run, rig, READ, [large])
            several = _apart(rig, run, 4)
            right &= _round(run, rig, READ, several)
            name = f"ring, data in {kind} memory, {'SGL' if sgl else 'PRP'}"
            run.report.check(name, right, f"{moved / MIB:.0f} MiB")
            rig.close()
    _bad_input(run)
    _trouble(run)


def _apart(rig: Rig, run: Run, count: int) -> list[Plan]:
    """IOCBs for one launch, whose memory does not overlap."""
    whole = rig.plan(run.rng, 200 * count, 4 * KIB, 4 * KIB)
    parts = [slice(200 * at, 200 * (at + 1)) for at in range(count)]
    return [
        Plan(whole.device[at], whole.offset[at], whole.place[at], whole.length[at]) for at in parts
    ]


def _bad_input(run: Run) -> None:
    rig = run.rig()
    plan = rig.plan(run.rng, 4, 4 * KIB, 4 * KIB)
    plan.offset[1] = rig.namespace_bytes
    plan.place[2] = rig.memory_bytes
    (statuses,) = rig.run(READ, [plan])
    right = list(statuses) == [0, LBA_RANGE, BAD_MEMORY, 0]
    rig.soft.inject("status", status=READ_ERROR, skip=3, count=2)
    (statuses,) = rig.run(READ, [rig.plan(run.rng, 64, 4 * KIB, 4 * KIB)])
    right &= sorted(statuses)[-3:] == [0, READ_ERROR, READ_ERROR]
    run.report.check("ring: statuses by fragment", right)
    rig.close()


def _trouble(run: Run) -> None:
    rig = run.rig(timeout_s=0.5)
    rig.soft.inject("drop", count=1)
    (statuses,) = rig.run(READ, [rig.plan(run.rng, 200, 4 * KIB, 4 * KIB)])
    right = sorted(set(statuses)) == [0, TIMEOUT] and list(statuses).count(TIMEOUT) == 1
    rig.queue.reset_device(0, 30.0)
    right &= _round(run, rig, READ, [rig.plan(run.rng, 200, 4 * KIB, 4 * KIB)])
    run.report.check("ring: a hung command, then a reset", right)
    rig.close()
    rig = run.rig()
    rig.soft.inject("gone", skip=50)
    (statuses,) = rig.run(READ, [rig.plan(run.rng, 500, 4 * KIB, 4 * KIB)])
    right = (statuses != 0).any() and set(statuses) <= {0, DEVICE_GONE, NOT_ISSUED}
    run.report.check("ring: a device that goes away", bool(right))
    rig.close()


def small(run: Run) -> None:
    """Little enough for a checker that makes everything a hundred times slower."""
    rig = run.rig(memory_bytes=MIB, namespace_bytes=MIB, queue_entries=16, timeout_s=30.0)
    for op in (READ, WRITE):
        right = _round(run, rig, op, [rig.plan(run.rng, 70, 4 * KIB, 4 * KIB)])
        run.report.check(f"small, {'read' if op == READ else 'write'}", right)
    rig.close()


# -- order -----------------------------------------------------------------------------------------


def order(run: Run) -> None:
    """A stream that waits for a launch's event copies what that brought, with no host between."""
    if not run.machine.cuda:
        run.report.check("order: a stream after a launch", None, "needs streams")
        return
    import cupy

    rig = run.rig(kind="device")
    copy = cupy.zeros(rig.memory_bytes, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    array = rig.memory.array  # type: ignore[attr-defined]
    with stream:
        copy[:] = array  # loads what the copy needs
    stream.synchronize()
    right = True
    for turn in range(5):
        plan = rig.plan(run.rng, 500, 4 * KIB, 4 * KIB)
        rig.soft.inject("delay", turns=2000, count=20, skip=100)
        iocb = rig.prepare(READ, plan)
        right &= rig.queue.issue_io([iocb])
        rig.executor.after(rig.queue._ring, stream.ptr)  # type: ignore[attr-defined]
        with stream:
            copy[:] = array
        right &= not rig.wait(iocb).any()
        stream.synchronize()
        right &= rig.wrong(plan, copy.get()) == 0
        rig.poison()
        print(f"         turn {turn}", flush=True)
    run.report.check("order: a stream after a launch", right, "5 turns")
    rig.close()


# -- transport -------------------------------------------------------------------------------------


def transport(run: Run) -> None:
    """Every check of the conformance suite."""
    done = skipped = 0
    names = list(CHECKS)[:6] if run.quick else list(CHECKS)
    for name in names:
        folder = run.folder / name
        folder.mkdir()
        try:
            CHECKS[name](gpu_subject(folder, executor=run.machine.executor))
            done += 1
        except CheckSkipped:
            skipped += 1
        except ConformanceError as error:
            run.report.check(f"transport: {name}", False, str(error))
    run.report.check("transport conforms", done > 0, f"{done} checks, {skipped} do not apply")


# -- all -------------------------------------------------------------------------------------------


def speed(run: Run) -> None:
    """See gio_speed.py."""
    from gio_speed import measure

    measure(run.machine, run.report, run.rng, run.quick)


SECTIONS: dict[str, Callable[[Run], None]] = {
    one.__name__: one for one in (machine, queue, ring, order, transport, small, speed)
}


def environment(machine: Machine) -> dict[str, Any]:
    """What this ran on."""
    facts: dict[str, Any] = {"executor": "cuda" if machine.cuda else "cpu", "poison": POISON}
    for name in ("tutti", "numpy", "cupy-cuda12x", "cupy-cuda13x", "torch"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = None
    if machine.cuda:
        import cupy

        runtime = cupy.cuda.runtime
        facts["gpu"] = runtime.getDeviceProperties(0)["name"].decode()
        facts["driver"], facts["runtime"] = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    return facts


def missing_gpu() -> str:
    """Why there is no GPU to use, or nothing."""
    from tutti_core.gio.cuda_executor import _cupy

    try:
        _cupy()
    except UnsupportedError as error:
        return str(error)
    return ""


def main() -> int:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--executor", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--quick", action="store_true", help="small: to try the script")
    given = parser.parse_args()
    if given.executor == "cuda" and (why := missing_gpu()):
        print(f"no GPU check: {why}", file=sys.stderr)
        return NO_GPU
    at, report = Machine(given.executor == "cuda"), Report()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tutti-gio-") as folder:
        run = Run(at, report, given.quick, Path(folder))
        for name in given.sections.split(","):
            try:
                SECTIONS[name](run)
            except Exception as error:  # the rest is still worth knowing
                report.check(f"{name} runs", False, f"{type(error).__name__}: {error}")
    if given.json:
        facts = {"environment": environment(at), "seed": run.seed, **asdict(report)}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    left_out = sum(entry["ok"] is None for entry in report.checks)
    print(
        f"{given.sections}: {len(report.checks)} checks, {left_out} not run, "
        f"{'FAILED' if report.failed else 'all right'}, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if report.failed or not report.checks else 0


if __name__ == "__main__":
    sys.exit(main())
