"""Compare the uring transport with fio on the same file, in interleaved rounds.

    .venv/bin/python tests/native/bench_uring.py DIRECTORY [--rounds N] [--depth N] [--items N]

Each round writes and flushes, then reads, every item PASSES times in random order: with fio
(ioengine=io_uring, direct=1, same depth and block size, end_fsync for writes) and with the
transport, registered and not, with checksums and without; who goes first rotates. Direct I/O
bypasses the page cache, so reads are cold. Prints the median of each, its ratio to fio's, the ratio
of the best rounds (on a disk that is shared or throttled the fairer one), and the CPU seconds used
per GiB, which for fio include its start.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from tutti_core.io.transport import Batch, Device, Op, TransportOptions
from tutti_core.io.uring import UringTransport

PASSES = 2
"""Enough for fio's start not to count."""

WINDOW_BYTES = 512 << 20
"""Memory that items cycle through; batches of it follow each other without a gap."""


def run_fio(path: Path, op: Op, size: int, count: int, depth: int) -> tuple[float, float]:
    """Return (bytes a second, CPU seconds)."""
    command = [
        "fio", "--name=x", f"--filename={path}", "--ioengine=io_uring", "--direct=1",
        f"--iodepth={depth}", f"--bs={size}", f"--size={size * count}",
        f"--loops={PASSES}", "--scramble_buffers=0",
        "--rw=" + ("randread" if op is Op.READ else "randwrite"), "--output-format=json",
    ]  # fmt: skip
    if op is Op.WRITE:
        command += ["--end_fsync=1", "--overwrite=1"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    job = out["jobs"][0]
    seconds = job["job_runtime"] / 1e3
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return PASSES * size * count / seconds, cpu


def run_transport(
    path: Path, op: Op, size: int, count: int, options: TransportOptions, how: str
) -> tuple[float, float]:
    """Return (bytes a second, CPU seconds).

    Opens a transport on new memory, as fio does: in a virtual machine, speed depends on which pages
    a process got.
    """
    memory = mmap.mmap(-1, WINDOW_BYTES)
    memory[:] = random.Random(1).randbytes(1 << 20) * (WINDOW_BYTES >> 20)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    transport = UringTransport([Device(str(path), size * count)], options)
    if "registered" in how:
        transport.register(base, WINDOW_BYTES)
    checksum = "no checksum" not in how
    per_batch = max(1, min(count, WINDOW_BYTES // size // 4))
    order = [item for _ in range(PASSES) for item in random.sample(range(count), count)]
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    tickets: list[int] = []
    for turn, first in enumerate(range(0, len(order), per_batch)):
        items = order[first : first + per_batch]
        n = len(items)
        room = base + (turn % 4) * (WINDOW_BYTES // 4)
        if len(tickets) == 4:
            check(transport, tickets.pop(0))
        tickets.append(
            transport.submit(
                Batch(
                    op=op,
                    device=np.zeros(n, np.uint32),
                    offset_bytes=np.array(items, np.uint64) * np.uint64(size),
                    fragment_start=np.arange(n + 1, dtype=np.uint32),
                    address=np.arange(n, dtype=np.uint64) * np.uint64(size) + np.uint64(room),
                    length_bytes=np.full(n, size, np.uint64),
                    checksum=checksum,
                )
            )
        )
    for ticket in tickets:
        check(transport, ticket)
    if op is Op.WRITE and transport.flush(0) != 0:
        raise SystemExit("flush failed")
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    transport.close()
    return PASSES * size * count / seconds, cpu


def check(transport: UringTransport, ticket: int) -> None:
    result = transport.wait(ticket, 120)
    if result is None or result.status.any():
        raise SystemExit("a batch failed or hung")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256 << 10, 2 << 20])
    parser.add_argument("--transfer", type=int, default=TransportOptions().transfer_bytes_max)
    arguments = parser.parse_args()
    path = arguments.directory / "bench_uring.dat"
    try:
        for size in arguments.sizes:
            compare(path, size, arguments)
    finally:
        path.unlink(missing_ok=True)


def rotated(names: list[str], turn: int) -> list[str]:
    """Each goes first in turn: what runs right after the other direction is at a disadvantage."""
    first = turn % len(names)
    return names[first:] + names[:first]


def compare(path: Path, size: int, arguments: argparse.Namespace) -> None:
    count, depth = arguments.items, arguments.depth
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size * count)
    options = TransportOptions(queue_depth=depth, transfer_bytes_max=arguments.transfer)
    names = ["fio", "uring registered", "uring", "uring registered, no checksum"]
    run_transport(path, Op.WRITE, size, count, options, "")  # all extents are written from here
    speeds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(arguments.rounds):
        for op in (Op.WRITE, Op.READ):
            for name in rotated(names, turn):
                speed = (
                    run_fio(path, op, size, count, depth)
                    if name == "fio"
                    else run_transport(path, op, size, count, options, name)
                )
                speeds.setdefault((op.name, name), []).append(speed)
    for (op_name, name), row in sorted(speeds.items()):
        speed = statistics.median(bps for bps, _ in row)
        fio = statistics.median(bps for bps, _ in speeds[op_name, "fio"])
        best, fio_best = (max(bps for bps, _ in rows) for rows in (row, speeds[op_name, "fio"]))
        cpu = statistics.median(cpu for _, cpu in row) / (PASSES * size * count / (1 << 30))
        print(
            f"{size >> 10:5d} KiB x {count} depth {depth} {op_name:5s} {name:30s}"
            f"{speed / 1e9:7.3f} GB/s  ratio {speed / fio:5.2f}  of bests {best / fio_best:5.2f}  "
            f"CPU {cpu:6.3f} s/GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
