"""Processes that end while tickets are in flight: promptly, with their own status, in silence.

Part of the trial `concurrency`. Each process opens a store, starts saves and loads that nobody
waits for, and ends in one of several ways, with each transport that this machine has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tutti_core.trials.tally import Tally

EXIT_S = 60.0
"""No process may take longer, on a busy machine."""

_BEGIN = """
import os, sys, threading
from pathlib import Path
from tutti_core import PageKeys, PrefixStore
SIZE = 65536
def keys(name, count=16):
    return PageKeys(b"".join(f"{name:>8}{i:>8}".encode() for i in range(count)), 16)
store = PrefixStore.open(
    sys.argv[1], transport=sys.argv[2], capacity="48MiB", catalog="4MiB", segment="4MiB",
    dram="8MiB", write_policy="write_back",
)
pages = store.namespace(model="m", page_bytes=SIZE, page_tokens=1)
memory = bytearray(os.urandom(16 * SIZE))
assert pages.save(keys("first"), memory).wait(30).all()
store.flush(30)
tickets = [pages.save(keys(name), memory) for name in range(20)]
tickets += [pages.load(keys("first"), bytearray(16 * SIZE)) for _ in range(8)]
held = pages.hold(keys("first"))
"""

WAYS = {
    "end": ("", 0),
    "waiting threads": (
        """
for ticket in tickets * 2:
    threading.Thread(target=ticket.wait, daemon=True).start()
""",
        0,
    ),
    "sys.exit in with": ("with store:\n    sys.exit(0)\n", 0),
    "exception": ("raise ValueError('on purpose')\n", 1),
}
"""How a process ends, and the status that this has."""

_REOPEN = """
import sys
from tutti_core import PageKeys, PrefixStore
keys = PageKeys(b"".join(f"{'first':>8}{i:>8}".encode() for i in range(16)), 16)
with PrefixStore.open(sys.argv[1], transport="posix", capacity="48MiB", catalog="4MiB",
                      segment="4MiB") as store:
    pages = store.namespace(model="m", page_bytes=65536, page_tokens=1)
    assert pages.load(keys, bytearray(16 * 65536)).wait(30).shape == (16,)
"""


def exits(directory: Path, tally: Tally) -> None:
    """End a process in each way with each transport."""
    directory.mkdir(parents=True, exist_ok=True)
    for transport in transports():
        for way, (code, status) in WAYS.items():
            where = directory / f"{transport}-{way.replace(' ', '-')}"
            _run_one(where, transport, way, code, status, tally)
    done = _python(_REOPEN, str(where), "posix")
    if done.returncode:
        tally.complain(f"a store is of no use after its process ended: {done.stderr[-500:]}")


def transports() -> list[str]:
    """Those of this machine."""
    try:
        from tutti_core.io import uring  # noqa: F401

        return ["posix", "uring"]
    except ImportError:
        return ["posix"]


def _run_one(where: Path, transport: str, way: str, code: str, status: int, tally: Tally) -> None:
    try:
        done = _python(_BEGIN + code, str(where), transport)
    except subprocess.TimeoutExpired:
        tally.complain(f"{transport}, {way}: the process does not end")
        return
    if "tutti_core.errors.UnsupportedError" in done.stderr:
        return  # this machine has no such transport
    tally.events["exit"] += 1
    tally.events[f"exit, {transport}"] += 1
    said = done.stderr
    if status:
        said = said.partition("ValueError: on purpose\n")[2]  # what comes after it
    if done.returncode != status or "Traceback" in said or "Error" in said:
        tally.complain(f"{transport}, {way}: status {done.returncode}, said {done.stderr[-700:]}")


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=EXIT_S,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
