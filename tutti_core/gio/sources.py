"""What the kernel is compiled from: our headers in the package, and CCCL's on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti_core.errors import UnsupportedError

PACKAGE = Path(__file__).resolve().parents[1]
KERNEL = PACKAGE / "gio" / "kernel.cu"
ENTRY = "tutti_gio_run"
"""Of the kernel."""
_INCLUDE = re.compile(r'^#include "(tutti/[a-z_]+\.h)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sources:
    """A kernel's text, and where its headers are.

    include_dirs   ours first, then CCCL's.
    digest         of everything that the compiler reads, CCCL's part by its version file.
    """

    text: str
    include_dirs: tuple[Path, ...]
    digest: str


def our_headers() -> Path:
    """The folder that has `tutti/gio_run.h`: in an installed package, or in a checkout."""
    for folder in (PACKAGE / "include", PACKAGE.parent / "csrc" / "include"):
        if (folder / "tutti" / "gio_run.h").is_file():
            return folder
    raise UnsupportedError(
        "the headers of the kernel are not in the package",
        op="open",
        hint="the native extension was not built when Tutti was installed",
    )


def closure(text: str, folder: Path) -> dict[str, str]:
    """Our headers that a text includes, directly or not, by name."""
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (folder / name).read_text()
            waiting += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def package_folders(name: str) -> Iterator[Path]:
    """Where a package is, also one of several parts; nothing of it is executed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(place)


def _cccl_candidates() -> Iterator[Path]:
    for folder in package_folders("nvidia"):
        yield from sorted(folder.glob("cu[0-9]*/include/cccl"), reverse=True)
        yield folder / "cuda_cccl" / "include"
    for folder in package_folders("cupy"):
        yield folder / "_core" / "include" / "cupy" / "_cccl" / "libcudacxx"
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if value := os.environ.get(name):
            yield Path(value) / "include" / "cccl"
            yield Path(value) / "include"
    yield Path("/usr/local/cuda/include/cccl")
    yield Path("/usr/local/cuda/include")


def find_cccl(candidates: Sequence[Path] = ()) -> Path:
    """The folder that has `cuda/atomic`: of NVIDIA's wheel, of CuPy, or of a toolkit.

    Raises
        UnsupportedError: it is nowhere.
    """
    for folder in candidates or _cccl_candidates():
        if (folder / "cuda" / "atomic").is_file():
            return folder
    raise UnsupportedError(
        "the headers of CCCL (cuda/atomic) were not found",
        op="open",
        hint="install CuPy, or nvidia-cuda-cccl, or set CUDA_PATH",
    )


def sources() -> Sources:
    """The kernel and its headers on this machine. Raises UnsupportedError."""
    ours, cccl = our_headers(), find_cccl()
    text = KERNEL.read_text()
    digest = hashlib.sha256(text.encode())
    for name, body in closure(text, ours).items():
        digest.update(f"{name}\0{len(body)}\0{body}".encode())
    version = cccl / "cuda" / "std" / "__cccl" / "version.h"
    digest.update(str(cccl).encode())
    digest.update(version.read_bytes() if version.is_file() else b"")
    return Sources(text, (ours, cccl), digest.hexdigest())
