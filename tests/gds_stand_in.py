"""Stand-ins for kvikio and the CUDA driver, with host memory posing as device memory.

A device address is a host address plus SHIFT, where nothing is mapped: code that touches device
memory with the CPU dies at once, and only the stand-ins know the way back.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tutti_core.io.cuda import HOST
from tutti_core.io.gds import GdsTransport
from tutti_core.io.posix import memory_at
from tutti_core.io.transport import BLOCK_BYTES, Batch, BatchResult, Device, TransportStats

SHIFT = 1 << 60


class StandInCuda:
    """`Cuda` for addresses above SHIFT."""

    granule_bytes = 2 << 20

    def __init__(self) -> None:
        self.threads: dict[int, int] = {}
        self.asked = 0

    def device_of(self, address: int) -> int:
        self.asked += 1
        return 0 if SHIFT <= address < SHIFT + (1 << 48) else HOST

    def use(self, device: int) -> None:
        assert device == 0
        self.threads[threading.get_ident()] = device

    def check(self, address: int) -> None:
        assert threading.get_ident() in self.threads, "no context in this thread"
        assert self.device_of(address) == 0, "not device memory"

    def to_host(self, target: int, source: int, length_bytes: int) -> None:
        self.check(source)
        ctypes.memmove(target, source - SHIFT, length_bytes)

    def to_device(self, target: int, source: int, length_bytes: int) -> None:
        self.check(target)
        ctypes.memmove(target - SHIFT, source, length_bytes)


class StandInKvikio:
    """The module `kvikio`, as far as the transport uses it.

    rng      makes transfers end early, at any byte; None: never.
    errors   raised by the next calls of raw_read and raw_write, one each.
    cufile   whether there is a libcufile; `nvfs`: whether there is the kernel driver.
    """

    __version__ = "26.10.0"

    def __init__(self, cuda: StandInCuda, rng: random.Random | None = None) -> None:
        self.cuda = cuda
        self.rng = rng
        self.errors: list[Exception] = []
        self.registered: dict[int, int] = {}
        self.refuse_registration = False
        self.mode, self.cufile, self.nvfs = "CompatMode.AUTO", True, True
        self.calls = 0
        self.on_base = 0
        self.open_files = 0
        self.buffer = SimpleNamespace(
            memory_register=self._register, memory_deregister=self._deregister
        )
        self.defaults = SimpleNamespace(get=lambda name: {"compat_mode": self.mode}[name])
        self.cufile_driver = SimpleNamespace(
            get=lambda name: {"is_gds_available": self.nvfs}[name],
            driver_open=self._driver_open,
            driver_close=lambda: None,
        )

    def modules(self) -> dict[str, Any]:
        """What to put into sys.modules."""
        names = ("buffer", "cufile_driver", "defaults")
        return {
            "kvikio": self,
            **{f"kvikio.{name}": ModuleType(f"kvikio.{name}") for name in names},
        }

    def CuFile(self, path: str, flags: str) -> StandInCuFile:
        assert flags == "r+"
        return StandInCuFile(self, path)

    def _driver_open(self) -> None:
        if not self.cufile:
            raise RuntimeError("libcufile.so.0: cannot open shared object file")

    def _register(self, memory: Any) -> None:
        address, length = parse(memory)
        self.cuda.check(address)
        if self.refuse_registration:
            raise RuntimeError("cuFile error: max pinned memory exceeded")
        self.registered[address] = length

    def _deregister(self, memory: Any) -> None:
        del self.registered[parse(memory)[0]]


def parse(memory: Any) -> tuple[int, int]:
    """Address and length of an object with the CUDA array interface, version 3."""
    interface = memory.__cuda_array_interface__
    assert interface["version"] == 3 and interface["typestr"] == "|u1"
    (length,), (address, readonly) = interface["shape"], interface["data"]
    assert not readonly
    return address, length


class StandInCuFile:
    """A file of kvikio: whole blocks only, device memory only."""

    def __init__(self, kvikio: StandInKvikio, path: str) -> None:
        self.kvikio = kvikio
        self.fd = os.open(path, os.O_RDWR)
        kvikio.open_files += 1

    def close(self) -> None:
        os.close(self.fd)
        self.kvikio.open_files -= 1

    def raw_read(self, buf: Any, size: int, file_offset: int, dev_offset: int) -> int:
        return self._move(os.preadv, buf, size, file_offset, dev_offset)

    def raw_write(self, buf: Any, size: int, file_offset: int, dev_offset: int) -> int:
        return self._move(os.pwritev, buf, size, file_offset, dev_offset)

    def _move(
        self, call: Callable[..., int], buf: Any, size: int, file_offset: int, dev_offset: int
    ) -> int:
        kvikio = self.kvikio
        kvikio.calls += 1
        address, length = parse(buf)
        kvikio.cuda.check(address)
        assert 0 < size and dev_offset + size <= length, "outside of the buffer"
        assert size % BLOCK_BYTES == 0 and file_offset % BLOCK_BYTES == 0, "not whole blocks"
        if dev_offset:
            assert address in kvikio.registered, "an offset into memory that is not registered"
        kvikio.on_base += address in kvikio.registered
        if kvikio.errors:
            raise kvikio.errors.pop()
        if kvikio.rng is not None and kvikio.rng.random() < 0.5:
            size = kvikio.rng.randint(BLOCK_BYTES, size)
        view = memory_at(address + dev_offset - SHIFT, size, writable=True)
        return call(self.fd, [view], file_offset)


class Shifted:
    """A `GdsTransport` whose callers think in host addresses.

    Every fragment but each `host_each`-th is handed on as device memory; 1: all stay host memory,
    0: all become device memory.
    """

    def __init__(self, inner: GdsTransport, host_each: int) -> None:
        self.inner = inner
        self.host_each = host_each
        self._registered = 0

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.inner.devices

    def capabilities(self) -> Any:
        return self.inner.capabilities()

    def register(self, address: int, length_bytes: int) -> int:
        self._registered += 1
        host = self.host_each and self._registered % self.host_each == 0
        return self.inner.register(address if host else address + SHIFT, length_bytes)

    def unregister(self, region: int) -> None:
        self.inner.unregister(region)

    def submit(self, batch: Batch) -> int:
        address = batch.address + np.uint64(SHIFT)
        if self.host_each:
            address[:: self.host_each] -= np.uint64(SHIFT)
        return self.inner.submit(replace(batch, address=address))

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        return self.inner.wait(ticket, timeout_s)

    def flush(self, device: int) -> int:
        return self.inner.flush(device)

    def stats(self) -> TransportStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()
