"""Compiles the kernel by NVRTC, which needs no driver and no GPU, and keeps the result on disk.

NVRTC is called by ctypes: CuPy's cache goes by the text of a kernel, not by that of its headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti_core.errors import UnsupportedError
from tutti_core.gio.sources import KERNEL, Sources, package_folders, sources

STANDARD = "--std=c++20"
KEPT_MAX = 16
"""Images that are kept on disk; the ones that were not used for longest go."""
_DIGEST_BYTES = 32
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled kernel, as the driver loads it: a cubin, or PTX for a GPU that is newer."""

    data: bytes
    target: str
    """As NVRTC names it: "sm_90" or "compute_90"."""
    cached: bool
    """It was on disk."""


def _libraries() -> Iterator[str]:
    for folder in package_folders("nvidia"):
        for place in ("cu[0-9]*", "cuda_nvrtc"):
            yield from sorted(map(str, folder.glob(f"{place}/lib/libnvrtc.so.*")), reverse=True)
    yield from _SONAMES
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if value := os.environ.get(name):
            yield from (f"{value}/lib64/{soname}" for soname in _SONAMES)


class Nvrtc:
    """The compiler.

    Raises
        UnsupportedError: the library is nowhere.
    """

    def __init__(self) -> None:
        self._library: Any = None
        for name in _libraries():
            with contextlib.suppress(OSError):
                # The library opens its other part by name, and does not look beside itself.
                for part in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(part))
                self._library = ctypes.CDLL(name)
                break
        if self._library is None:
            raise UnsupportedError(
                "NVRTC was not found",
                op="open",
                hint="install nvidia-cuda-nvrtc, or CuPy with its toolkit (cupy-cuda13x[ctk])",
            )
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            words = self._library.nvrtcGetErrorString(status).decode()
            raise UnsupportedError(f"{name} failed: {words}", op="open")

    def target_for(self, capability: int) -> str:
        """What to compile for a GPU of compute capability 90, say, for 9.0."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", known)
        if capability in known:
            return f"sm_{capability}"
        older = [one for one in known if one < capability]
        if not older:
            raise UnsupportedError(
                f"NVRTC {self.version} compiles for nothing that runs on capability {capability}",
                op="open",
            )
        return f"compute_{max(older)}"

    def compile(self, text: str, include_dirs: Sequence[Path], target: str) -> bytes:
        """Compile to a cubin (a target "sm_90") or to PTX ("compute_90"). About a second.

        Raises
            UnsupportedError: it does not compile; the compiler's words are in the error.
        """
        options = [STANDARD, f"--gpu-architecture={target}", "--generate-line-info"]
        options += [f"--include-path={folder}" for folder in include_dirs]
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), text.encode(), KERNEL.name.encode(),
            0, None, None,
        )  # fmt: skip
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            if status != 0:
                log = self._text(program, "nvrtcGetProgramLog").decode(errors="replace")
                raise UnsupportedError(f"the kernel does not compile:\n{log}", op="open")
            return self._text(
                program, "nvrtcGetCUBIN" if target.startswith("sm_") else "nvrtcGetPTX"
            )
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(name + "Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(name, program, buffer)
        return buffer.raw[: size.value]


def cache_folder() -> Path:
    """Where images are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tutti" / "kernels"


def kernel_image(
    capability: int, *, folder: Path | None = None, compiler: Nvrtc | None = None
) -> Image:
    """The kernel for a GPU of compute capability 90, say, for 9.0; compiled if need be.

    Parameters
        folder: of the cache, by default `cache_folder`. One that cannot be written, or that others
            may write, is not used.
    Raises
        UnsupportedError: NVRTC or CCCL is missing, or the kernel does not compile.
    Cost       a file's read; the first time about a second.
    """
    compiler = compiler if compiler is not None else Nvrtc()
    target = compiler.target_for(capability)
    source = sources()
    file = _usable(folder if folder is not None else cache_folder())
    if file is not None:
        file = file / _name(source, target, compiler.version)
        if data := _read(file):
            return Image(data, target, True)
    data = compiler.compile(source.text, source.include_dirs, target)
    if file is not None:
        _write(file, data)
    return Image(data, target, False)


def _name(source: Sources, target: str, version: tuple[int, int]) -> str:
    of = f"{source.digest} {target} {version} {STANDARD}"
    return f"{hashlib.sha256(of.encode()).hexdigest()[:32]}.image"


def _usable(folder: Path) -> Path | None:
    """The folder, made if need be; None: nothing may be kept in it, or taken from it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError:
        return None
    return folder if facts.st_uid == os.geteuid() and not facts.st_mode & 0o022 else None


def _read(file: Path) -> bytes:
    """What was kept, or nothing: it is not there, or damaged."""
    try:
        kept = file.read_bytes()
        os.utime(file)
    except OSError:
        return b""
    digest, data = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else b""


def _write(file: Path, data: bytes) -> None:
    """Keep an image; not being able to only costs the next process a second."""
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as new:
                new.write(hashlib.sha256(data).digest() + data)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
        kept = sorted(file.parent.glob("*.image"), key=lambda one: one.stat().st_mtime)
        for old in kept[:-KEPT_MAX]:
            old.unlink(missing_ok=True)
