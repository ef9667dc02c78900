"""kvikio's face of cuFile: found at run time, asked what it does, and its files opened.

Source: kvikio's documentation of CuFile, defaults, buffer and cufile_driver (25.x and 26.x).
"""

from __future__ import annotations

import importlib
from typing import Any

from tutti_core.errors import UnsupportedError, device_error


class DeviceBytes:
    """Device memory as kvikio takes it: an object with the CUDA array interface, version 3."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def import_kvikio() -> Any:
    """Return the module. Raises UnsupportedError where there is none, or where it fails."""
    try:
        kvikio = importlib.import_module("kvikio")
        for name in ("buffer", "cufile_driver", "defaults"):
            importlib.import_module(f"kvikio.{name}")
    except Exception as error:  # ImportError, or what a missing CUDA library raises
        raise UnsupportedError(
            f"transport gds needs kvikio: {error}",
            op="open",
            hint="pip install 'tutti[gds]' (kvikio-cu12; kvikio-cu13 for CUDA 13), or choose uring",
        ) from error
    return kvikio


def how_it_moves(kvikio: Any) -> tuple[bool, str]:
    """Whether bytes pass kvikio straight, as far as can be known, and a note that says how."""
    name = f"gds: kvikio {getattr(kvikio, '__version__', '')}".strip()
    mode = str(_setting(kvikio.defaults, "compat_mode")).rpartition(".")[2]
    if mode in ("ON", "True"):
        return False, f"{name} is in compatibility mode ({mode}): bytes pass through host memory"
    try:
        kvikio.cufile_driver.driver_open()
        kvikio.cufile_driver.driver_close()
    except Exception as error:
        return False, f"{name} found no cuFile ({error}): bytes pass through host memory"
    if _setting(kvikio.cufile_driver, "is_gds_available") is True:
        return True, f"{name} with cuFile and nvidia-fs, compatibility mode {mode}"
    return True, (
        f"{name} with cuFile, but without nvidia-fs: cuFile moves bytes peer to peer where the "
        "kernel can, else through host memory"
    )


def _setting(module: Any, name: str) -> Any:
    """A setting of kvikio: by `get` (25.x and later), by function or by property before."""
    try:
        if hasattr(module, "get"):
            return module.get(name)
        if hasattr(module, "DriverProperties"):
            return getattr(module.DriverProperties(), name)
        return getattr(module, name)()
    except Exception as error:
        return f"unknown ({error})"


def open_cufile(kvikio: Any, path: str) -> Any:
    """Open a file for reading and writing by cuFile.

    Raises
        DeviceError: the file system refuses.
        UnsupportedError: cuFile refuses.
    """
    try:
        return kvikio.CuFile(path, "r+")
    except Exception as error:  # OSError, or RuntimeError with cuFile's words
        number = getattr(error, "errno", None)
        if number:
            raise device_error("open", number, device=path) from error
        raise UnsupportedError(
            f"cuFile does not take {path}: {error}",
            op="open",
            device=path,
            hint="use a file system that GPU Direct Storage supports, or another transport",
        ) from error
