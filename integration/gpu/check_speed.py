"""Measures the memory paths next to what bounds them: copies of pinned memory, and the drive."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from check_pools import GEOMETRIES, MIB, EnginePool, Geometry, Route, Sink, chain, opened

from tutti_sglang.staging_rows import DevicePages

ROUNDS = 5
PIECE_BYTES = 16 * MIB
FIO_S = 300


def measure(bench: Any, paths: list[str], mib: int) -> None:
    """Measure every path on two geometries; add rows to the report and print them."""
    rows = bench.report.speed
    rows += _plain_copies(bench, mib)
    for geometry in GEOMETRIES[:2]:
        pages = max(mib * MIB // geometry.page_bytes, 4)
        for path in paths:
            rows += _loads_and_saves(bench, path, geometry, pages)
        rows += _fio(bench, geometry, pages)
    print(f"\n{'what':44} {'ms':>10} {'GB/s':>8}  more")
    for row in rows:
        print(f"{row['what']:44} {row['ms']:10.1f} {row['GBps']:8.2f}  {row.get('more', '')}")


def _row(what: str, seconds: float, size: int, **more: Any) -> dict[str, Any]:
    return {"what": what, "ms": 1e3 * seconds, "GBps": size / seconds / 1e9, "bytes": size, **more}


def _median(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _plain_copies(bench: Any, mib: int) -> list[dict[str, Any]]:
    """Pinned memory to the device and back, in pieces as staging copies them, nothing else."""
    size = min(mib * MIB, 1024 * MIB)
    host = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    device = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=bench.device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(max(size // PIECE_BYTES, 1)):
            target.copy_(source, non_blocking=True)
        bench.api.synchronize()

    size = max(size // PIECE_BYTES, 1) * PIECE_BYTES
    return [
        _row("plain copy, pinned to device", _median(lambda: copy(device, host)), size),
        _row("plain copy, device to pinned", _median(lambda: copy(host, device)), size),
    ]


def _loads_and_saves(bench: Any, path: str, geometry: Geometry, pages: int) -> list[dict[str, Any]]:
    pool, folder = EnginePool(geometry, pages, bench.device), bench.new_folder()
    rows = np.random.default_rng(1).permutation(pages).astype(np.int64)
    content, index = pool.content(pages, 1), bench.index(rows)
    size, name = pages * geometry.page_bytes, f"{path}, {geometry.name}"
    found: list[dict[str, Any]] = []
    with opened(folder, pool, path, pages=pages * (ROUNDS + 2)) as route:
        pool.write(index, content)
        bench.api.synchronize()
        if path == "staging":
            found.append(_row(f"staging alone, {geometry.name}", _staging(route, rows), size))
            pool.write(index, content)
            bench.api.synchronize()
        saves = []
        for turn in range(ROUNDS):
            began_s = time.perf_counter()
            if not route.save(chain(f"{name} {turn}", pages), rows):
                bench.report.check(f"speed, {name}: save", False, "pages were not stored")
                return found
            saves.append(time.perf_counter() - began_s)
        if path == "staging":  # the others save by way of it too
            found.append(_row(f"save, {name}", statistics.median(saves), size))
        first, whole, cpu = [], [], []
        for turn in range(ROUNDS):
            pool.poison()
            bench.api.synchronize()
            sink, cpu_s, began_s = Sink(), time.process_time(), time.perf_counter()
            route.load(chain(f"{name} {turn}", pages), rows, sink)
            cpu.append(time.process_time() - cpu_s)
            if sink.error is not None or not pool.same(index, content):
                detail = str(sink.error or "wrong bytes")
                bench.report.check(f"speed, {name}: load", False, detail)
                return found
            first.append(sink.at_s[0] - began_s)
            whole.append(sink.at_s[-1] - began_s)
        found.append(
            _row(
                f"load, {name}",
                statistics.median(whole),
                size,
                layer0_ms=1e3 * statistics.median(first),
                cpu_ms=1e3 * statistics.median(cpu),
                transport=route.store.stats().transport.name,
                more=f"layer 0 after {1e3 * statistics.median(first):.1f} ms, "
                f"{1e3 * statistics.median(cpu):.0f} ms CPU of all threads, "
                f"{route.store.stats().transport.name}",
            )
        )
    bench.report.check(f"speed, {name}", True, f"{ROUNDS} saves and loads, all bytes right")
    bench.drop(folder)
    return found


def _staging(route: Route, rows: np.ndarray) -> float:
    """Copies and scatters of a whole load, without storage: what staging itself can do."""
    target, staging = DevicePages(route.pool.pool, rows), route.staging

    def work() -> None:
        flying: deque[Any] = deque()
        for part in range(len(route.pool.layers)):
            most = staging.pages_max(target, part)
            for low in range(0, len(rows), most):
                space = staging.take(target, part, low, min(low + most, len(rows)))
                while space is None:
                    assert flying.popleft().placed(60.0)
                    space = staging.take(target, part, low, min(low + most, len(rows)))
                space.place()
                flying.append(space)
        while flying:
            assert flying.popleft().placed(60.0)

    return _median(work)


def _fio(bench: Any, geometry: Geometry, pages: int) -> list[dict[str, Any]]:
    """The drive itself: sequential direct reads of as many bytes, a part of a page at a time."""
    if shutil.which("fio") is None:
        bench.report.check(f"fio, {geometry.name}", None, "fio is not installed")
        return []
    size = pages * geometry.page_bytes
    block = max(min(geometry.layer_bytes, MIB) // 4096 * 4096, 4096)
    file = bench.folder / "fio.bin"
    with file.open("wb") as target:
        piece = np.random.default_rng(2).bytes(8 * MIB)
        for _ in range(-(-size // len(piece))):
            target.write(piece)
    command = [
        "fio", "--name=read", f"--filename={file}", "--rw=read", f"--bs={block}", "--direct=1",
        "--ioengine=io_uring", "--iodepth=64", f"--size={size // block * block}",
        "--output-format=json",
    ]  # fmt: skip
    seconds = []
    try:
        for _ in range(ROUNDS):
            seconds.append(_fio_s(command))
    except (subprocess.SubprocessError, KeyError, ValueError) as error:
        bench.report.check(f"fio, {geometry.name}", None, str(error))
        return []
    finally:
        Path(file).unlink()
    return [_row(f"fio read, {block >> 10} KiB", statistics.median(seconds), size)]


def _fio_s(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_S, check=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0]["read"]["runtime"]) / 1e3
