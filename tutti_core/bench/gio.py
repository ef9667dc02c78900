"""`tutti bench gio`: what preparing I/O costs the CPU, and how fast the queues are without a GPU.

The peer of the queues is the software controller over memory: one thread submits, one serves.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.bench.machine import machine_facts
from tutti_core.bench.measure import (
    GIB,
    MIB,
    Arena,
    BenchError,
    Bytes,
    Progress,
    Spread,
    order_of_turn,
    target,
)
from tutti_core.errors import ConfigError
from tutti_core.io.transport import U32, U64

FRAGMENTS = 2048
"""Of one IOCB, the most it holds (gio_uring, paper section 3.2)."""
IOCBS = 4
QUEUE_ENTRIES = 256
SIZES = {"4k": 4 << 10, "64k": 64 << 10}
NAMESPACE_BYTES = GIB
TIMEOUT_S = 30.0
PREPARES = 50
PIECES = 128
"""Of memory that is read into, in turn: as many as the peer has, which stay in a CPU's cache."""
PEER_TIMEOUT_S = 120.0

PREPARE_US_MAX = 150.0
PER_DOORBELL_MIN = 32.0
IOPS_4K_MIN = 300_000.0
RATIO_MIN = 0.8
BYTES_S_64K_MIN = 4e9

METHOD = (
    "One thread places commands and polls (the CPU executor with one thread), another is the "
    "software controller; it copies between a namespace in memory and registered memory.",
    f"iops_4k, gib_s_64k: random reads, {IOCBS} IOCBs of {FRAGMENTS} fragments in flight, queues "
    f"of {QUEUE_ENTRIES} entries, into {PIECES} pieces of memory in turn. After each run one more "
    "IOCB is read into memory of its own, and every byte of it compared.",
    f"iocb_prepare_us: CPU time of this thread for get_iocb, prepare and issue_io of one IOCB of "
    f"{FRAGMENTS} fragments, from arrays; median of {PREPARES} in each round. One issue is one "
    "launch.",
    "commands_per_doorbell: commands over doorbell writes of the submission queue, of the 4 KiB "
    "reads.",
    "Per round all take a turn, in an order that changes; figures are medians.",
)


@dataclass(frozen=True, slots=True)
class GioPlan:
    """What to measure.

    seconds   of each size in each round.
    peer      program that measures 4 KiB reads of another queue pair over memory; it is run as
              `PEER bench SECONDS` and prints a line with "memory", "read", "4096" and "N IOPS".
    """

    rounds: int = 5
    seconds: float = 1.0
    peer: Path | None = None

    def check(self) -> None:
        """Raise ConfigError where the plan cannot work."""
        if self.rounds < 1:
            raise ConfigError(f"rounds: {self.rounds} is not at least 1")
        if not 0 < self.seconds <= 60:
            raise ConfigError("seconds: more than 0 and at most 60 are needed")
        if self.peer is not None and not os.access(self.peer, os.X_OK):
            raise ConfigError(f"peer: {self.peer} cannot be run")


class Rig:
    """A ring on one namespace in memory, and memory to read into."""

    def __init__(self, fragment_bytes: int) -> None:
        from tutti_core._native import GioRing, NvmeController, SoftController

        self.fragment_bytes = fragment_bytes
        self.memory = Arena(FRAGMENTS * fragment_bytes)
        self._soft = SoftController(namespace_bytes=NAMESPACE_BYTES, shadow_doorbells=False)
        self.media = self._soft.media(1)
        _fill(self.media)
        self.controller = NvmeController(
            self._soft, queue_entries=QUEUE_ENTRIES, shadow_doorbells=False
        )
        self.controller.register_memory(self.memory.bytes.ctypes.data, len(self.memory.bytes))
        self.ring = GioRing([(self.controller, 1)], depth=IOCBS, threads=1, timeout_s=TIMEOUT_S)
        self._random = np.random.default_rng(7)
        self._device = np.zeros(FRAGMENTS, np.uint32)
        self._length = np.full(FRAGMENTS, fragment_bytes, np.uint64)
        at = np.arange(FRAGMENTS, dtype=np.uint64)
        base = np.uint64(self.memory.bytes.ctypes.data)
        self._apart = base + at * np.uint64(fragment_bytes)
        self._cached = base + at % np.uint64(PIECES) * np.uint64(fragment_bytes)

    def issue(self, address: U64 | None = None) -> tuple[int, U64]:
        """Read random extents; returns the IOCB's id, and where they lie."""
        slots = self._random.integers(0, NAMESPACE_BYTES // self.fragment_bytes, FRAGMENTS)
        offset = slots.astype(np.uint64) * np.uint64(self.fragment_bytes)
        where = self._cached if address is None else address
        return self.send(self._device, offset, where, self._length), offset

    def send(self, device: U32, offset: U64, address: U64, length: U64) -> int:
        """Get, prepare and issue an IOCB of reads; returns its id."""
        (iocb,) = self.ring.get_iocb(1)
        status = self.ring.prepare(iocb, 0, device, offset, address, length)
        if status == 0:
            status = self.ring.issue_io(np.array([iocb], np.uint32), 1)
        if status != 0:
            raise BenchError(f"an IOCB was refused: {os.strerror(-status)}", op="bench gio")
        return iocb

    def wait(self, iocb: int) -> None:
        """Wait for an IOCB; all of it must have been read."""
        statuses = self.ring.wait_cqe(iocb, TIMEOUT_S)
        if statuses is None or statuses.any():
            raise BenchError("reads failed or did not end", op="bench gio")

    def compare(self) -> None:
        """Read an IOCB into memory of its own, and see that every byte is right."""
        self.memory.bytes[:] = 0
        iocb, offset = self.issue(self._apart)
        self.wait(iocb)
        size = self.fragment_bytes
        asked = self.media.reshape(-1, size)[(offset // np.uint64(size)).astype(np.intp)]
        if not np.array_equal(self.memory.bytes.reshape(FRAGMENTS, size), asked):
            raise BenchError("wrong bytes were read", op="bench gio")

    def close(self) -> None:
        """End the ring, then the controllers."""
        self.ring.close()
        self.controller.close()
        self._soft.close()


def run_gio(plan: GioPlan, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Measure and return the report: figures, targets, method, machine, raw rounds.

    Raises
        ConfigError: an impossible plan.
        BenchError: an I/O failed, bytes were wrong, or the peer printed no figure.
        UnsupportedError: this build has no native extension.
    """
    plan.check()
    raw: dict[str, list[float]] = {}
    with _rigs() as rigs:
        turns: dict[str, Callable[[], dict[str, float]]] = {
            "4k": lambda: _reads(rigs["4k"], plan.seconds, "4k"),
            "64k": lambda: _reads(rigs["64k"], plan.seconds, "64k"),
            "prepare": lambda: _prepares(rigs["4k"]),
        }
        if (peer := plan.peer) is not None:
            turns["peer"] = lambda: {"peer_iops_4k": _peer(peer, plan.seconds)}
        for turn in range(plan.rounds + 1):
            progress(f"round {turn} of {plan.rounds}")
            for name in order_of_turn(list(turns), turn):
                for figure, value in turns[name]().items():
                    if turn > 0:  # the first warms up
                        raw.setdefault(figure, []).append(value)
    return {"benchmark": "gio", "machine": machine_facts(), "rounds": plan.rounds, **_report(raw)}


def _report(raw: dict[str, list[float]]) -> dict[str, Any]:
    figures = {name: Spread.of(values).median for name, values in raw.items()}
    peer = figures.get("peer_iops_4k")
    ratio = figures["iops_4k"] / peer if peer else None
    # The bound is the number, or where a machine is too slow for that, the peer's in the same run.
    slow = figures["iops_4k"] < IOPS_4K_MIN and ratio is not None
    return {
        "iocb_prepare_us": round(figures["iocb_prepare_us"], 1),
        "iocb_prepare_64_us": round(figures["iocb_prepare_64_us"], 1),
        "commands_per_doorbell": round(figures["commands_per_doorbell"], 1),
        "iops_4k": round(figures["iops_4k"]),
        "iops_4k_ratio_lab": None if ratio is None else round(ratio, 2),
        "gib_s_64k": round(figures["gib_s_64k"], 2),
        "peer_iops_4k": None if peer is None else round(peer),
        "raw": raw,
        "method": list(METHOD),
        "targets": [
            target("iocb_prepare_us", figures["iocb_prepare_us"], PREPARE_US_MAX, False),
            target(
                "commands_per_doorbell", figures["commands_per_doorbell"], PER_DOORBELL_MIN, True
            ),
            target("iops_4k_ratio_lab", ratio, RATIO_MIN, True)
            if slow
            else target("iops_4k", figures["iops_4k"], IOPS_4K_MIN, True),
            target("gib_s_64k", figures["gib_s_64k"], BYTES_S_64K_MIN / GIB, True),
        ],
        "load_average_after": list(os.getloadavg()),
    }


@contextmanager
def _rigs() -> Iterator[dict[str, Rig]]:
    rigs: dict[str, Rig] = {}
    try:
        for name, size in SIZES.items():
            rigs[name] = Rig(size)
        yield rigs
    finally:
        for rig in rigs.values():
            rig.close()


def _fill(media: Bytes) -> None:
    """Fresh random bytes: no two blocks alike."""
    generator = np.random.default_rng()
    words = media.view(np.uint64)
    for at in range(0, len(words), MIB):
        part = words[at : at + MIB]
        part[:] = generator.integers(0, 1 << 64, size=len(part), dtype=np.uint64)


def _reads(rig: Rig, seconds: float, name: str) -> dict[str, float]:
    """Keep all IOCBs in flight for a while."""
    before = rig.controller.stats()
    begun_s = time.perf_counter()
    flying = [rig.issue()[0] for _ in range(IOCBS)]
    ended, done_s = 0, begun_s
    while flying:
        rig.wait(flying.pop(0))
        ended, done_s = ended + FRAGMENTS, time.perf_counter()
        if done_s - begun_s < seconds:
            flying.append(rig.issue()[0])
    per_s = ended / (done_s - begun_s)
    after = rig.controller.stats()
    rig.compare()
    if name != "4k":
        return {f"gib_s_{name}": per_s * rig.fragment_bytes / GIB}
    bells = after["sq_doorbells"] - before["sq_doorbells"]
    commands = after["completions"] - before["completions"]
    return {"iops_4k": per_s, "commands_per_doorbell": commands / max(bells, 1)}


def _prepares(rig: Rig) -> dict[str, float]:
    """CPU time of this thread for handing one IOCB over, full and with 64 fragments."""
    return {
        "iocb_prepare_us": _handing_over_us(rig, FRAGMENTS),
        "iocb_prepare_64_us": _handing_over_us(rig, 64),
    }


def _handing_over_us(rig: Rig, fragments: int) -> float:
    device = np.zeros(fragments, np.uint32)
    offset = np.arange(fragments, dtype=np.uint64) * np.uint64(rig.fragment_bytes)
    address = offset + np.uint64(rig.memory.bytes.ctypes.data)
    length = np.full(fragments, rig.fragment_bytes, np.uint64)
    taken: list[float] = []
    for _ in range(PREPARES):
        begun_s = time.thread_time()
        iocb = rig.send(device, offset, address, length)
        taken.append(time.thread_time() - begun_s)
        rig.wait(iocb)
    return Spread.of(taken).median * 1e6


_PEER_LINE = re.compile(r"^memory.*\bread\b.*\b4096\b.*?(\d+) IOPS", re.MULTILINE)


def _peer(program: Path, seconds: float) -> float:
    """4 KiB reads a second of another queue pair over memory."""
    command = [str(program), "bench", f"{seconds:g}"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PEER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"the peer failed: {error}", op="bench gio") from error
    found = _peer_figures(done.stdout)
    if done.returncode != 0 or not found:
        raise BenchError("the peer printed no figure", op="bench gio")
    return max(found)


def _peer_figures(text: str) -> Sequence[float]:
    return [float(number) for number in _PEER_LINE.findall(text)]
