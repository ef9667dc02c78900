"""Choose the transport: by name, or the best one that works on this machine.

A fallback is never silent: it is logged once per process and reason, and stands in the notes of
`capabilities()`.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from tutti_core.errors import ConfigError, UnsupportedError, nearest
from tutti_core.io.posix import PosixTransport
from tutti_core.io.transport import Device, Transport, TransportOptions

TransportName = Literal["auto", "gpu", "gds", "uring", "posix"]
"""`auto`, then the ladder from the top."""

OWN_DRIVE = "pci:"
"""How the path of a drive begins that this process drives itself: `pci:0000:01:00.0/1`."""

_LOG = logging.getLogger("tutti")
_reported: set[str] = set()
_reported_lock = threading.Lock()


def open_transport(
    name: TransportName,
    devices: Sequence[Device],
    options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
) -> Transport:
    """Open the transport called `name` on `devices`.

    `auto` takes uring, or posix where this build or machine has no uring, for files and block
    devices, and gpu for drives that this process drives itself. gds is for device memory and only
    taken by name. A device that cannot be opened is an error under every name, never a reason to
    fall back.

    Raises
        ConfigError: no transport has this name, or an option is out of bounds.
        UnsupportedError: asked for by name, and something it needs is missing.
        DeviceError: a device cannot be opened.
    """
    if name not in get_args(TransportName):
        raise ConfigError(
            f"transport: {name!r} is not one of {', '.join(get_args(TransportName))}",
            op="open",
            hint=nearest(str(name), get_args(TransportName)),
        )
    if name == "posix":
        return PosixTransport(devices, options)
    if name == "gds":
        return _open_gds(devices, options)
    own = [device.path for device in devices if device.path.startswith(OWN_DRIVE)]
    if name == "gpu" or own:
        if name not in ("gpu", "auto"):
            raise UnsupportedError(
                f"transport {name} takes files and block devices, not {own[0]}",
                op="open",
                hint="such drives are the gpu transport's",
            )
        return _open_gpu(devices, options)
    try:
        return _open_uring(devices, options)
    except UnsupportedError as error:
        if name == "uring":
            raise
        note = f"transport auto: uring refused ({error}); posix is used instead"
    _report_once(note)
    return PosixTransport(devices, options, notes=(note,))


def _open_uring(devices: Sequence[Device], options: TransportOptions) -> Transport:
    return cast(Transport, _native_transport("uring").UringTransport(devices, options))


def _open_gpu(devices: Sequence[Device], options: TransportOptions) -> Transport:
    return cast(Transport, _native_transport("gpu").open_gpu(devices, options))


def _native_transport(name: str) -> Any:
    """A module imported here and not above: a build without the extension lacks it.

    Raises
        UnsupportedError: this is such a build.
    """
    try:
        return importlib.import_module(f"tutti_core.io.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"transport {name} is not in this build: {error}",
            op="open",
            hint="install liburing-dev and libxxhash-dev and then Tutti again, or choose posix",
        ) from error


def _open_gds(devices: Sequence[Device], options: TransportOptions) -> Transport:
    """Open gds, with the best other transport for host memory."""
    module = importlib.import_module("tutti_core.io.gds")
    host = open_transport("auto", devices, options)
    try:
        return cast(Transport, module.GdsTransport(devices, options, host=host))
    except BaseException:
        host.close()
        raise


def _report_once(note: str) -> None:
    """Log `note` as a warning, the first time that this process has this reason."""
    with _reported_lock:
        if note in _reported:
            return
        _reported.add(note)
    _LOG.warning("%s", note)
