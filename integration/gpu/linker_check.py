"""Checks the memory paths between a store and device pools on one machine, then measures them.

    python integration/gpu/linker_check.py --device cuda --dir /mnt/nvme/check --json check.json

Needs torch and Tutti; no network. With SGLang installed it also drives a real TuttiLinker, with
kvikio it also takes GPU Direct Storage, with fio it compares. A few minutes on a GPU; with
`--device cpu` the same code runs on host memory, which proves the script and not the paths.

    round trips   random pages out of random rows and into others, compared at the moment at which
                  each layer is reported, all other rows untouched; a flipped byte fails the load
    order         kernels that are late: rows that an earlier kernel still writes, pages saved
                  while they are computed, other rows written meanwhile; and with the events left
                  out the same checks have to fail
    speed         against plain copies of pinned memory and fio at the same size

Exit status 0: everything that ran was right.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from check_pools import GEOMETRIES, MIB, EnginePool, Geometry, Sink, chain, opened
from check_report import Report

from tutti_core import TuttiError, UnsupportedError

LATE_S = 1.0
"""How late the kernels of the order checks are: longer than their loads and saves take."""


@dataclass
class Bench:
    """The machine: a device, a folder for stores, and the paths to check."""

    device: torch.device
    folder: Path
    quick: bool
    report: Report

    @property
    def api(self) -> Any:
        """Streams and events of the device."""
        return torch.cuda if self.device.type == "cuda" else torch.cpu

    def new_folder(self) -> Path:
        """A path at which there is no store."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "store"

    def rows(self, rng: random.Random, pages: int, count: int) -> np.ndarray:
        """Some rows, in no order."""
        return np.array(rng.sample(range(pages), count), dtype=np.int64)

    def index(self, rows: np.ndarray) -> torch.Tensor:
        """Rows on the device."""
        return torch.from_numpy(rows).to(self.device)

    def late_stream(self) -> Any:
        """A stream that is busy for LATE_S; on the CPU one that is not."""
        stream = self.api.Stream(self.device)
        if self.device.type == "cuda":
            with self.api.stream(stream):
                torch.cuda._sleep(int(LATE_S * 1.7e9))  # clock cycles
        return stream

    def mark(self, stream: Any) -> Any:
        """An event behind what the stream has now."""
        event = self.api.Event()
        event.record(stream)
        return event

    def drop(self, folder: Path) -> None:
        """Remove a store."""
        shutil.rmtree(folder.parent, ignore_errors=True)


# -- round trips -----------------------------------------------------------------------------------


def round_trips(bench: Bench, path: str, geometry: Geometry, ring_bytes: int) -> None:
    """Save random pages, load them into other rows, compare layer by layer."""
    rng, count = random.Random(geometry.name), 12 if bench.quick else 40
    pool = EnginePool(geometry, 2 * count + 5, bench.device)
    folder = bench.new_folder()
    name = f"round trip, {path}, {geometry.name}, ring {ring_bytes >> 10} KiB"
    with opened(folder, pool, path, pages=4 * count, ring_bytes=ring_bytes) as route:
        for turn in range(3):
            source, target = (bench.rows(rng, pool.pages, count) for _ in range(2))
            content, keys = pool.content(count, turn), chain(f"{name} {turn}", count)
            pool.poison()
            pool.write(bench.index(source), content)
            event = bench.mark(None)
            if not route.save(keys, source, (event,)):
                return bench.report.check(name, False, "pages were not stored")
            pool.poison()
            event = bench.mark(None)
            index = bench.index(target)
            sink = route.load(keys, target, Sink(_looker(bench, pool, index, content)), (event,))
            if sink.error is not None:
                return bench.report.check(name, False, f"the load failed: {sink.error}")
            if sink.wrong or not pool.same(index, content):
                return bench.report.check(name, False, f"wrong bytes in layers {sink.wrong}")
            if not pool.poisoned_except(target):
                return bench.report.check(name, False, "bytes in rows of others")
        detail = f"{3 * count * geometry.page_bytes / MIB:.0f} MiB"
        bench.report.check(name, *_flipped(bench, route, keys, target, content[0], detail))
    bench.drop(folder)


def _looker(
    bench: Bench, pool: EnginePool, index: torch.Tensor, content: list[torch.Tensor]
) -> Callable[[int], bool]:
    """Compare a layer when it is reported, on a stream that waits for nothing else."""

    def look(layer: int) -> bool:
        with bench.api.stream(bench.api.Stream(bench.device)):
            return pool.same(index, content, layer)

    bench.mark(None).synchronize()  # index and content are there
    return look


def _flipped(
    bench: Bench, route: Any, keys: Any, rows: np.ndarray, data: torch.Tensor, detail: str
) -> tuple[bool, str]:
    """Flip a byte of a stored page: the load has to fail, and no other time."""
    needle = bytes(data[0].cpu().numpy()[: min(64, data.shape[1])])
    for device in route.store._transport.devices:
        with open(device.path, "r+b") as file:
            place = file.read().find(needle)
            if place < 0:
                continue
            file.seek(place)
            file.write(bytes([needle[0] ^ 1]))
        sink = route.load(keys, rows, Sink())
        ok = isinstance(sink.error, TuttiError)
        return ok, f"{detail}; a flipped byte {'fails the load' if ok else 'was NOT found'}"
    return False, "the stored bytes were not found on the device"


# -- order -----------------------------------------------------------------------------------------


def rows_in_use(bench: Bench, path: str, with_event: bool) -> bool:
    """Load into rows that a late kernel still writes; whether the loaded bytes are what stays."""
    geometry, count = GEOMETRIES[0], 16
    pool, folder = EnginePool(geometry, 40, bench.device), bench.new_folder()
    with opened(folder, pool, path, pages=2 * count) as route:
        rows = np.arange(count, dtype=np.int64)
        content, old = pool.content(count, 1), pool.content(count, 2)
        keys, index = chain("in use", count), bench.index(rows)
        pool.write(index, content)
        assert route.save(keys, rows, (bench.mark(None),))
        bench.api.synchronize()
        engine = bench.late_stream()
        with bench.api.stream(engine):
            pool.write(index, old)
        after = (bench.mark(engine),) if with_event else ()
        sink = route.load(keys, rows, Sink(), after)
        bench.api.synchronize()
        right = sink.error is None and pool.same(index, content)
    bench.drop(folder)
    return right


def pages_in_work(bench: Bench, path: str, with_event: bool) -> bool:
    """Save pages that a late kernel still computes; whether what is stored is what it computed."""
    geometry, count = GEOMETRIES[0], 16
    pool, folder = EnginePool(geometry, 40, bench.device), bench.new_folder()
    with opened(folder, pool, path, pages=2 * count) as route:
        rows = np.arange(count, dtype=np.int64)
        content, keys, index = pool.content(count, 1), chain("in work", count), bench.index(rows)
        bench.api.synchronize()
        engine = bench.late_stream()
        with bench.api.stream(engine):
            pool.write(index, content)
        after = (bench.mark(engine),) if with_event else ()
        assert route.save(keys, rows, after)
        bench.api.synchronize()
        pool.poison()
        sink = route.load(keys, rows, Sink(), (bench.mark(None),))
        right = sink.error is None and pool.same(index, content)
    bench.drop(folder)
    return right


def others_meanwhile(bench: Bench, path: str) -> bool:
    """Loads and saves run while kernels write other rows of the same tensors, over and over."""
    geometry, count = GEOMETRIES[0], 8 if bench.quick else 48
    pool, folder = EnginePool(geometry, 4 * count, bench.device), bench.new_folder()
    rng, stop, written = random.Random(3), threading.Event(), [0]
    loaded, saved, computed = np.split(bench.rows(rng, 4 * count, 3 * count), 3)
    fixed = pool.content(count, 9)
    patterns = [pool.content(count, 100 + turn) for turn in range(2)]
    index = bench.index(computed)

    def compute() -> None:
        stream = bench.api.Stream(bench.device)
        with bench.api.stream(stream):
            while not stop.is_set() or written[0] < 2:
                pool.write(index, patterns[written[0] % 2])
                written[0] += 1
                if written[0] % 16 == 0:
                    bench.mark(stream).synchronize()

    right = True
    with opened(folder, pool, path, pages=20 * count) as route:
        pool.write(bench.index(saved), fixed)
        bench.api.synchronize()
        thread = threading.Thread(target=compute)
        thread.start()
        try:
            for turn in range(6):
                keys = chain(f"meanwhile {turn}", count)
                right &= route.save(keys, saved)
                sink = route.load(
                    keys, loaded, Sink(_looker(bench, pool, bench.index(loaded), fixed))
                )
                right &= sink.error is None and not sink.wrong
        finally:
            stop.set()
            thread.join()
        bench.api.synchronize()
        right &= pool.same(index, patterns[(written[0] - 1) % 2])
        right &= pool.same(bench.index(saved), fixed) and pool.same(bench.index(loaded), fixed)
    bench.drop(folder)
    return right


def order(bench: Bench, path: str) -> None:
    """The order checks of a path, and that they can fail."""
    report = bench.report
    late = "" if bench.device.type == "cuda" else "no streams on the CPU: nothing is late"
    report.check(f"order, {path}: rows in use", rows_in_use(bench, path, True), late)
    report.check(f"order, {path}: pages in work", pages_in_work(bench, path, True), late)
    report.check(f"order, {path}: others meanwhile", others_meanwhile(bench, path))
    for name, check in (("rows in use", rows_in_use), ("pages in work", pages_in_work)):
        title = f"control, {path}: {name}, without the event, is found"
        if bench.device.type != "cuda":
            report.check(title, None, "needs streams")
        else:
            report.check(title, not check(bench, path, False))


# -- all -------------------------------------------------------------------------------------------


def paths_of(bench: Bench) -> list[str]:
    """The memory paths that this machine has for its device pools."""
    if bench.device.type == "cpu":
        return ["host", "staging"]
    try:
        pool = EnginePool(GEOMETRIES[-1], 4, bench.device)
        folder = bench.new_folder()
        with opened(folder, pool, "gds", pages=4) as route:
            print("gds:", "; ".join(route.store.stats().transport.notes))
        bench.drop(folder)
    except (UnsupportedError, TuttiError) as error:
        bench.report.check("gds", None, str(error))
        return ["staging"]
    return ["staging", "gds"]


def environment(device: torch.device) -> dict[str, Any]:
    """What this ran on."""
    versions = {}
    for name in ("tutti", "torch", "sglang", "kvikio-cu12", "kvikio-cu13"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    facts: dict[str, Any] = {"device": str(device), "versions": versions}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def run(bench: Bench, sections: list[str], mib: int) -> None:
    """Run the sections that were asked for."""
    paths = paths_of(bench)
    if "round" in sections:
        for path in paths:
            for geometry in GEOMETRIES:
                for ring_bytes in (1, 64 * MIB) if path == "staging" else (64 * MIB,):
                    round_trips(bench, path, geometry, ring_bytes)
    if "order" in sections:
        for path in paths:
            order(bench, path)
    if "linker" in sections:
        from check_sglang import check_linker

        check_linker(bench)
    if "speed" in sections:
        from check_speed import measure

        measure(bench, paths, mib)


def main() -> int:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the drive to measure")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--mib", type=int, default=2048, help="bytes of a measured load")
    parser.add_argument("--quick", action="store_true", help="small: to try the script")
    parser.add_argument("--sections", default="round,order,linker,speed")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("torch finds no CUDA GPU")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    logging.getLogger("tutti").setLevel(logging.ERROR)  # pages are damaged on purpose
    began_s, report = time.monotonic(), Report()
    with tempfile.TemporaryDirectory(prefix="tutti-check-", dir=given.dir) as folder:
        bench = Bench(device, Path(folder), given.quick, report)
        run(bench, given.sections.split(","), 32 if given.quick else given.mib)
    if given.json:
        facts = {"environment": environment(device), **asdict(report)}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    left_out = sum(entry["ok"] is None for entry in report.checks)
    print(
        f"{len(report.checks)} checks, {left_out} not run, "
        f"{'FAILED' if report.failed else 'all right'}, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
