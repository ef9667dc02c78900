"""Lets devices do every wrong thing that the format survives, and looks that no byte is wrong.

Histories run on devices that fail in one way each, often; then, half of the time, the power goes.
With `verify` on each page must be bit-exact or a miss, and the store must go on with all its room.
The table of what is survived, and at which price, is in docs/format.md.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tutti_core.store import PrefixStore
from tutti_core.testing import FaultPlan, FaultyDevices, Oracle
from tutti_core.testing.faults import FaultKind, FaultOp
from tutti_core.trials.crash_points import SPACES, WORDS, Life, Shape, judge
from tutti_core.trials.kit import chain, client, memory_devices, quiet
from tutti_core.trials.tally import Tally

FAULTS: tuple[tuple[FaultKind, FaultOp], ...] = (
    ("error", "read"),
    ("error", "write"),
    ("error", "flush"),
    ("torn", "write"),
    ("lost", "write"),
    ("lost", "flush"),
    ("misdirected", "read"),
    ("misdirected", "write"),
    ("short", "read"),
    ("short", "write"),
    ("duplicated", "write"),
    ("reordered", "write"),
    ("stale", "read"),
    ("flip", "read"),
    ("flip", "write"),
)
ROT = "bit rot"
REORDER = "any order"
"""Items and batches in flight run in any order."""

NAMES = (*(f"{kind} {op}" for kind, op in FAULTS), ROT, REORDER)
RATE = 0.2
FLUSH_RATE = 0.6
"""Flushes are few, and the next one makes up for one that was lost."""

ROTTEN_BITS_MAX = 64


def history(
    folder: Path, name: str, seed: int, tally: Tally, *, verify: bool = True, crash: bool
) -> None:
    """One history with one kind of fault, of NAMES, and a look at what is left of it.

    `verify` = False is for the negative control: then wrong bytes are to be found.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    segments = 2 + seed // 2 % 2 * 2  # with and without eviction
    shape = Shape(f"{name}, seed {seed}", 24, segments, faulty=True, settings={"verify": verify})
    config = shape.config(folder)
    devices = memory_devices(config, seed=seed, plan=_plan(name))
    rng = random.Random(seed)
    life = Life(shape, Oracle(), tally)
    rot = _rot(devices, rng, tally) if name == ROT else lambda: None
    life.play(config, devices, seed, lambda: False, rot)
    if name == REORDER:
        tally.faults[name] += 1
    for (kind, op), count in devices.injected.items():
        tally.faults[f"{kind} {op}"] += count
    if crash:
        devices.crash(seed=seed)
        tally.crash_points += 1
    again = devices.reopen(seed=seed)
    if verify:
        judge(life, config, again, shape.name)
        return
    with PrefixStore.open(config, transport_object=again) as store:
        for fields in SPACES:
            pages = client(store, life.oracle, tally, **fields)
            for word in WORDS:
                pages.load(chain(*word))


def _plan(name: str) -> FaultPlan:
    if name == REORDER:
        return FaultPlan(reorder=True)
    return FaultPlan(
        rates={
            (kind, op): FLUSH_RATE if op == "flush" else RATE
            for kind, op in FAULTS
            if name == f"{kind} {op}"
        }
    )


def _rot(devices: FaultyDevices, rng: random.Random, tally: Tally) -> Callable[[], None]:
    """Flip bits of what is stored, wherever that is, from time to time."""
    size = devices.devices[0].capacity_bytes

    def flip() -> None:
        for _ in range(rng.randrange(ROTTEN_BITS_MAX)):
            devices.flip_bit(0, rng.randrange(1 << 20, size), rng.randrange(8))
            tally.faults[ROT] += 1

    return flip


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Two histories with each kind of fault; then, until the time is over, more.

    Parameters
        directory: an empty one; made. What is in it afterwards may be deleted.
    """
    tally = Tally()
    end_s = time.monotonic() + seconds if seconds else 0.0
    turn = 0
    with quiet():
        while turn == 0 or time.monotonic() < end_s:
            for name in NAMES:
                for crash in (False, True):
                    number = (seed + turn) * 2 + crash
                    history(directory / "store", name, number, tally, crash=crash)
            turn += 1
    shutil.rmtree(directory / "store", ignore_errors=True)
    return tally
