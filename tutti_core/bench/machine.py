"""What this machine and build offer: versions, native parts, and which I/O paths work and why."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tutti_core.errors import TuttiError
from tutti_core.io.select import TransportName, open_transport
from tutti_core.io.transport import BLOCK_BYTES, Device, TransportOptions

_PACKAGES = ("tutti", "numpy", "pydantic", "lmdb", "xxhash", "typer", "torch", "sglang")
_PROBE_OPTIONS = TransportOptions(queue_depth=1, transfer_bytes_max=BLOCK_BYTES, bounce_bytes=8192)
_PROBE_BYTES = 1 << 20


def machine_facts() -> dict[str, Any]:
    """Versions and settings that results depend on, JSON-able. Imports neither torch nor sglang."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "kernel": platform.release(),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "native": native_facts(),
        "io_uring_disabled": _first_line("/proc/sys/kernel/io_uring_disabled"),
        "locked_memory_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "load_average": list(os.getloadavg()),
    }


def native_facts() -> dict[str, Any]:
    """Whether the native extension was built, where it lies, and which liburing it uses."""
    try:
        module = importlib.import_module("tutti_core._native")
    except ImportError as error:
        return {"built": False, "reason": str(error), "liburing": None}
    maps = Path("/proc/self/maps").read_text().splitlines()
    linked = {line.split()[-1] for line in maps if "/liburing" in line}
    return {
        "built": True,
        "file": module.__file__,
        "liburing": sorted(linked)[0] if linked else "linked statically",
    }


def file_system(path: Path) -> str:
    """Type and mount point of the file system that holds `path`."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        fields = mount.split()
        if fields[2] == wanted:
            found = f"{rest.split()[0]} at {fields[4]}"
    return found


def probe_transports(devices: Sequence[Device] | None = None) -> list[dict[str, Any]]:
    """Open each transport on `devices` (default: a scratch file) and say how that went.

    Writes nothing to the devices. `auto` comes last and says which one it would take.
    """
    if devices is not None:
        return [_probe(name, devices) for name in (*get_args(TransportName)[1:], "auto")]
    with tempfile.NamedTemporaryFile(prefix="tutti-probe-") as scratch:
        scratch.truncate(_PROBE_BYTES)
        return probe_transports([Device(scratch.name, _PROBE_BYTES)])


def _probe(name: TransportName, devices: Sequence[Device]) -> dict[str, Any]:
    try:
        transport = open_transport(name, devices, _PROBE_OPTIONS)
    except TuttiError as error:
        return {"transport": name, "works": False, "reason": str(error)}
    try:
        able = transport.capabilities()
    finally:
        transport.close()
    direct = sum(able.direct)
    words = [f"O_DIRECT on {direct} of {len(able.direct)} device(s)"]
    if able.registered_buffers:
        words.append("registered buffers")
    if able.registered_files:
        words.append("registered files")
    return {
        "transport": name,
        "works": True,
        "takes": able.name,
        "direct": list(able.direct),
        "reason": "; ".join([", ".join(words), *able.notes]),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _field(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return None


def _first_line(file: str) -> str | None:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None
