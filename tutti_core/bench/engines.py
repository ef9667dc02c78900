"""The contestants of `tutti bench io`: Tutti, fio as the ceiling, and SGLang's HiCacheFile.

Each saves and loads the same pages through one interface. `save` ends when the pages are durable;
`load` starts with nothing in the page cache. Only what a method returns is timed.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tutti_core.bench.measure import (
    MIB,
    Arena,
    BenchError,
    Sample,
    drop_cached,
    sync_filesystem,
    timed,
)
from tutti_core.config import StoreConfig
from tutti_core.keys import PageKeys
from tutti_core.store import LoadTicket, PrefixStore

CALL_PAGES = 128
"""Pages in one call; what SGLang's storage thread passes."""
LOADS_IN_FLIGHT_MAX = 4
"""Load calls of Tutti that are under way at once; HiCacheFile blocks, so it has one."""
KEY_BYTES = 32
_SEGMENT_BYTES = 256 * MIB
_CATALOG_BYTES = 16 * MIB
_IO_TIMEOUT_S = 300.0
_FIO_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Task:
    """What every contestant moves: `page_count` pages of `page_bytes`, at queue depth `depth`.

    The first half of the arena holds the pages to save, the second half is what is loaded into.
    """

    folder: Path
    arena: Arena
    page_bytes: int
    page_count: int
    depth: int
    transport: str
    huge_pages: bool

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_bytes * self.page_count


class Engine(Protocol):
    """One contestant. `keys` are new every round, packed, 32 bytes a page."""

    def save(self, keys: bytes) -> Sample:
        """Save all pages; they are durable when the clock stops."""
        ...

    def load(self, keys: bytes) -> Sample:
        """Load all pages into the second half of the arena, from the device."""
        ...

    def forget(self) -> None:
        """Remove the pages of this round, untimed."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for the report."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def storage_config(extra_config: dict[str, Any], *, is_mla_model: bool) -> Any:
    """What SGLang hands to a storage backend on one rank of one. ImportError without SGLang."""
    module: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    return module.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla_model,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config=extra_config,
    )


def disk_bytes(page_bytes: int, page_count: int) -> int:
    """Bound of what all contestants occupy on disk at once."""
    total = page_bytes * page_count
    return 3 * total + _store_bytes(page_bytes, page_count) - total + 64 * MIB


def _store_bytes(page_bytes: int, page_count: int) -> int:
    segment = max(_SEGMENT_BYTES, 1 << (page_bytes - 1).bit_length())
    in_segment = segment // (-(-page_bytes // 4096) * 4096)
    return (-(-page_count // in_segment) + 1) * segment + _CATALOG_BYTES + 2 * MIB


class TuttiEngine:
    """A store with one namespace, its memory registered, calls of CALL_PAGES pages."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._count = task.page_count
        self._half = task.arena.bytes[: task.total_bytes]
        self._into = task.arena.bytes[task.total_bytes :]
        config = StoreConfig.parse(
            {
                "path": task.folder / "tutti",
                "capacity": _store_bytes(task.page_bytes, task.page_count),
                "segment": max(_SEGMENT_BYTES, 1 << (task.page_bytes - 1).bit_length()),
                "catalog": _CATALOG_BYTES,
                "transport": task.transport,
                "huge_pages": task.huge_pages,
                "queue_depth": task.depth,
                "backlog": 2 * task.total_bytes,
                "io_timeout_s": _IO_TIMEOUT_S,
            }
        )
        self._store = PrefixStore.open(config)
        self._store.register(task.arena.bytes)
        self._pages = self._store.namespace(
            model="bench", page_bytes=task.page_bytes, page_tokens=64, key_bytes=KEY_BYTES
        )

    def save(self, keys: bytes) -> Sample:
        """All calls are made at once: `save` queues and returns, as it does for a server."""
        stored = 0

        def work() -> None:
            nonlocal stored
            tickets = [
                self._pages.save(chain, self._part(self._half, first, stop), first)
                for first, stop, chain in self._calls(keys)
            ]
            stored = sum(int(ticket.wait(_IO_TIMEOUT_S).sum()) for ticket in tickets)

        sample = timed(work)
        if stored != self._count:
            raise BenchError(f"tutti saved {stored} of {self._count} pages")
        return sample

    def load(self, keys: bytes) -> Sample:
        """Up to LOADS_IN_FLIGHT_MAX calls are under way."""
        capabilities = self._store.stats().transport
        if not all(capabilities.direct):
            drop_cached([self._task.folder / "tutti" / "pool.tutti"])
        loaded = 0

        def work() -> None:
            nonlocal loaded
            tickets: list[LoadTicket] = []
            for first, stop, chain in self._calls(keys):
                if len(tickets) == LOADS_IN_FLIGHT_MAX:
                    loaded += int(tickets.pop(0).wait().sum())
                tickets.append(self._pages.load(chain, self._part(self._into, first, stop), first))
            loaded += sum(int(ticket.wait().sum()) for ticket in tickets)

        sample = timed(work)
        if loaded != self._count:
            raise BenchError(f"tutti loaded {loaded} of {self._count} pages")
        return sample

    def forget(self) -> None:
        """Clear the namespace; the next round writes into the same segments."""
        self._pages.clear(_IO_TIMEOUT_S)

    def describe(self) -> dict[str, Any]:
        """The transport in use."""
        able = self._store.stats().transport
        return {
            "transport": able.name,
            "direct": all(able.direct),
            "registered_buffers": able.registered_buffers,
            "transfer_bytes_max": able.transfer_bytes_max,
            "notes": list(able.notes),
        }

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _calls(self, keys: bytes) -> list[tuple[int, int, PageKeys]]:
        """(first page, end, chain up to the end) of each call."""
        steps = range(0, self._count, CALL_PAGES)
        spans = [(first, min(first + CALL_PAGES, self._count)) for first in steps]
        return [(a, b, PageKeys(keys[: b * KEY_BYTES], KEY_BYTES)) for a, b in spans]

    def _part(self, half: Any, first: int, stop: int) -> Any:
        return half[first * self._task.page_bytes : stop * self._task.page_bytes]


class FioEngine:
    """fio on one file of the same bytes: io_uring, direct, sequential, same block size and depth.

    With registered buffers and files, as the store has them; without, where the locked-memory limit
    refuses (it is a little slower then). Its clock is its own (start-up and layout do not count).
    Overwrites the same file each round, as the store overwrites its segments; the first round
    writes a fresh, preallocated file.
    """

    def __init__(self, task: Task) -> None:
        found = shutil.which("fio")
        if found is None:
            raise BenchError("fio is not installed")
        self._fio = found
        self._task = task
        self._file = task.folder / "fio.dat"
        self._registered = True

    def save(self, keys: bytes) -> Sample:
        """Write, then fsync, inside fio's clock."""
        extra = ["--overwrite=1"] if self._file.exists() else ["--fallocate=posix"]
        return self._run("write", ["--end_fsync=1", *extra])

    def load(self, keys: bytes) -> Sample:
        """Read the file front to back."""
        return self._run("read", [])

    def forget(self) -> None:
        """Keep the file laid out."""

    def describe(self) -> dict[str, Any]:
        """fio's version."""
        words = subprocess.run([self._fio, "--version"], capture_output=True, text=True, check=True)
        return {"version": words.stdout.strip(), "registered_buffers": self._registered}

    def close(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)

    def _run(self, direction: str, extra: list[str]) -> Sample:
        task = self._task
        command = [
            self._fio, "--name=bench", f"--filename={self._file}", f"--rw={direction}",
            "--ioengine=io_uring", "--direct=1", f"--iodepth={task.depth}",
            f"--bs={task.page_bytes}", f"--size={task.total_bytes}", "--output-format=json",
            f"--fixedbufs={self._registered:d}", f"--registerfiles={self._registered:d}", *extra,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FIO_TIMEOUT_S)
        if done.returncode != 0 and self._registered:
            self._registered = False
            return self._run(direction, extra)
        if done.returncode != 0:
            raise BenchError(f"fio failed: {(done.stderr or done.stdout).strip()[:200]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if job["error"] or job[direction]["io_bytes"] != task.total_bytes:
            raise BenchError(f"fio moved {job[direction]['io_bytes']} of {task.total_bytes} bytes")
        seconds = max(job["job_runtime"], 1) / 1e3  # whole milliseconds
        return Sample(seconds, seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100)


class FileEngine:
    """SGLang's HiCacheFile: one file a page, through the page cache.

    Durable means syncfs after the last call. Before a load its files are dropped from the cache.
    CPU time that the kernel spends on writing its dirty pages back is not counted.
    """

    def __init__(self, task: Task) -> None:
        self._torch: Any = importlib.import_module("torch")
        module: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        self._task = task
        self._folder = task.folder / "hicache"
        config = storage_config({"file_storage_path": str(self._folder)}, is_mla_model=False)
        self._backend = module.HiCacheFile(config)
        if Path(self._backend.file_path) != self._folder:
            raise BenchError("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR names another directory")
        logging.getLogger(module.__name__).setLevel(logging.ERROR)
        whole = self._torch.from_numpy(task.arena.bytes)
        self._rows = whole.view(2 * task.page_count, task.page_bytes)
        self.cached_share_max = 0.0

    def save(self, keys: bytes) -> Sample:
        """Calls of CALL_PAGES pages, one after the other, then syncfs."""
        names, failed = self._names(keys), 0

        def work() -> None:
            nonlocal failed
            for first, stop in self._spans():
                pages = list(self._rows[first:stop])
                failed += not self._backend.batch_set(names[first:stop], pages)
            sync_filesystem(self._folder)

        sample = timed(work)
        if failed:
            raise BenchError(f"HiCacheFile failed {failed} calls to batch_set")
        return sample

    def load(self, keys: bytes) -> Sample:
        """Calls of CALL_PAGES pages, one after the other, from a cold page cache."""
        names, missed = self._names(keys), 0
        files = [self._folder / entry for entry in os.listdir(self._folder)]
        self.cached_share_max = max(self.cached_share_max, drop_cached(files))

        def work() -> None:
            nonlocal missed
            count = self._task.page_count
            for first, stop in self._spans():
                into = list(self._rows[count + first : count + stop])
                got = self._backend.batch_get(names[first:stop], into)
                missed += sum(page is None for page in got)

        sample = timed(work)
        if missed:
            raise BenchError(f"HiCacheFile missed {missed} pages")
        return sample

    def forget(self) -> None:
        """Remove all files."""
        self._backend.clear()

    def describe(self) -> dict[str, Any]:
        """Versions, and how cold its loads were."""
        return {
            "torch": self._torch.__version__,
            "cached_share_before_load_max": self.cached_share_max,
        }

    def close(self) -> None:
        """Remove its directory."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _names(self, keys: bytes) -> list[str]:
        return [keys[i : i + KEY_BYTES].hex() for i in range(0, len(keys), KEY_BYTES)]

    def _spans(self) -> list[tuple[int, int]]:
        count = self._task.page_count
        return [(a, min(a + CALL_PAGES, count)) for a in range(0, count, CALL_PAGES)]
