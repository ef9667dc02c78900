"""open_transport: names, fallback, and that a fallback is told."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tutti_core.errors import ConfigError, DeviceError, UnsupportedError
from tutti_core.io import select
from tutti_core.io.posix import PosixTransport
from tutti_core.io.select import open_transport
from tutti_core.io.transport import BLOCK_BYTES, Device, TransportOptions

URING = "tutti_core.io.uring"


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(select, "_reported", set())
    yield


@pytest.fixture
def devices(tmp_path: Path) -> list[Device]:
    file = tmp_path / "device"
    file.write_bytes(bytes(8 * BLOCK_BYTES))
    return [Device(str(file), 8 * BLOCK_BYTES)]


def pretend_uring(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[object]:
    """Install a uring module whose transport raises `error`; returns what it was opened with."""
    opened: list[object] = []

    class Pretended(SimpleNamespace):
        def __init__(self, devices: Sequence[Device], options: TransportOptions) -> None:
            if error:
                raise error
            super().__init__(devices=tuple(devices), options=options)
            opened.append(self)

    module = ModuleType(URING)
    module.UringTransport = Pretended  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, URING, module)
    return opened


def hide_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without the extension: importing the module fails."""
    monkeypatch.setitem(sys.modules, URING, None)


def test_posix_by_name(devices: list[Device], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tutti"):
        transport = open_transport("posix", devices)
    assert isinstance(transport, PosixTransport)
    assert len(transport.capabilities().notes) == 1
    assert not caplog.records
    transport.close()


@pytest.mark.parametrize("name", ["auto", "uring"])
def test_uring_where_it_works(
    name: select.TransportName, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = pretend_uring(monkeypatch, None)
    options = TransportOptions(queue_depth=7)
    transport = open_transport(name, devices, options)
    assert opened == [transport]
    assert transport.devices == tuple(devices)
    assert opened[0].options is options  # type: ignore[attr-defined]


def test_auto_falls_back_and_says_so(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_uring(monkeypatch, UnsupportedError("io_uring_setup: Operation not permitted"))
    with caplog.at_level(logging.DEBUG, "tutti"):
        transport = open_transport("auto", devices, TransportOptions(queue_depth=2))
    assert isinstance(transport, PosixTransport)
    notes = " ".join(transport.capabilities().notes)
    assert "uring refused (io_uring_setup: Operation not permitted)" in notes
    assert "posix is used instead" in notes
    assert transport.capabilities().queue_depth == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Operation not permitted" in caplog.text
    transport.close()


def test_a_fallback_is_logged_once_per_reason(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tutti"):
        for reason in ("seccomp", "seccomp", "kernel too old", "seccomp", "kernel too old"):
            pretend_uring(monkeypatch, UnsupportedError(reason))
            transport = open_transport("auto", devices)
            assert reason in transport.capabilities().notes[0]
            transport.close()
    assert len(caplog.records) == 2


def test_auto_without_the_extension(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_uring(monkeypatch)
    with caplog.at_level(logging.WARNING, "tutti"):
        transport = open_transport("auto", devices)
    assert isinstance(transport, PosixTransport)
    assert "not in this build" in transport.capabilities().notes[0]
    assert len(caplog.records) == 1
    transport.close()


def test_uring_by_name_without_the_extension(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_uring(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"not in this build.*or choose posix"):
        open_transport("uring", devices)


def test_uring_by_name_where_the_machine_refuses(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_uring(monkeypatch, UnsupportedError("kernel 4.18 lacks io_uring"))
    with pytest.raises(UnsupportedError, match=r"kernel 4\.18 lacks io_uring"):
        open_transport("uring", devices)


@pytest.mark.parametrize("name", ["auto", "uring", "posix"])
def test_a_missing_device_is_no_reason_to_fall_back(
    name: select.TransportName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_uring(monkeypatch, DeviceError("open failed", errno=2))
    with pytest.raises(DeviceError):
        open_transport(name, [Device(str(tmp_path / "missing"), 8 * BLOCK_BYTES)])


@pytest.mark.parametrize("name", ["urng", "", "POSIX", "gpus"])
def test_unknown_name(name: str, devices: list[Device]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_transport(name, devices)  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith(f"transport: {name!r}")
    assert all(valid in text for valid in ("auto", "uring", "posix"))


def test_unknown_name_suggests_the_nearest(devices: list[Device]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'uring'"):
        open_transport("urng", devices)  # type: ignore[arg-type]
