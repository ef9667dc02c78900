"""More of the stand-in for CuPy: arrays in memory that no CPU may touch, streams and events as
objects. What integration/gpu/gio_check.py uses on a GPU, so that its code for one runs here too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from cupy_stand_in import StandInCupy

KERNEL_ENDS_S = 10.0


class DeviceArrays:
    """Puts arrays, streams and events into the modules of a stand-in.

    `driver`: the library of cuda_stand_in.cc, which has the memory.
    """

    def __init__(self, stand_in: StandInCupy, driver: Any) -> None:
        self.stand_in, self.driver = stand_in, driver
        driver.stand_in_allocate.restype = driver.stand_in_behind.restype = ctypes.c_void_p
        driver.stand_in_allocate.argtypes = (ctypes.c_size_t,)
        driver.stand_in_behind.argtypes = (ctypes.c_void_p,)
        self.current: int | None = None
        self.recorded: dict[int, Future[float]] = {}

    def add_to(self, modules: dict[str, ModuleType]) -> None:
        """Extend what `StandInCupy.modules` gave."""
        cupy, cuda, runtime = (modules[n] for n in ("cupy", "cupy.cuda", "cupy.cuda.runtime"))
        arrays = self

        class Stream:
            def __init__(self, non_blocking: bool = False) -> None:
                assert non_blocking
                self.ptr = arrays.stand_in._streamCreateWithPriority(1, 0)

            def __enter__(self) -> None:
                self.before, arrays.current = arrays.current, self.ptr

            def __exit__(self, *_: object) -> None:
                arrays.current = self.before

            def synchronize(self) -> None:
                arrays.put_on(self.ptr, lambda: None).result(60)

        class Event:
            def __init__(self) -> None:
                self.ptr = arrays.stand_in._eventCreateWithFlags(0)

            def record(self, stream: Any) -> None:
                arrays.recorded[self.ptr] = arrays.put_on(stream.ptr, lambda: None)

            @property
            def done(self) -> bool:
                return arrays.recorded[self.ptr].done()

            def synchronize(self) -> None:
                arrays.recorded[self.ptr].result(60)

        def elapsed_ms(begin: Event, end: Event) -> float:
            return (arrays.recorded[end.ptr].result() - arrays.recorded[begin.ptr].result()) * 1e3

        cuda.Stream, cuda.Event = Stream, Event  # type: ignore[attr-defined]
        cuda.get_elapsed_time = elapsed_ms  # type: ignore[attr-defined]
        cuda.alloc_pinned_memory = _pinned  # type: ignore[attr-defined]
        cupy.uint8, cupy.float16 = np.uint8, np.float16  # type: ignore[attr-defined]
        cupy.zeros = self.zeros  # type: ignore[attr-defined]
        cupy.ones = lambda shape, dtype: np.ones((8, 8), dtype)  # type: ignore[attr-defined]
        cupy.matmul = self._matmul  # type: ignore[attr-defined]
        runtime.deviceSynchronize = self._synchronize  # type: ignore[attr-defined]
        runtime.memcpyAsync = self._memcpy  # type: ignore[attr-defined]
        runtime.streamWaitEvent = self._wait_event  # type: ignore[attr-defined]
        runtime.eventRecord = self._record  # type: ignore[attr-defined]
        runtime.driverGetVersion = runtime.runtimeGetVersion = lambda: 13000  # type: ignore[attr-defined]
        runtime.getDeviceProperties = lambda device: {"name": b"stand-in"}  # type: ignore[attr-defined]

    def put_on(self, stream: int, work: Callable[[], Any]) -> Future[float]:
        """Queue work on a stream; the result is when it was done."""

        def run() -> float:
            work()
            return time.monotonic()

        return self.stand_in.streams[stream].worker.submit(run)

    def _record(self, event: int, stream: int) -> None:
        self.recorded[event] = self.put_on(stream, lambda: None)

    def _wait_event(self, stream: int, event: int) -> None:
        future = self.recorded[event]
        self.put_on(stream, lambda: future.result(60))

    def _matmul(self, a: Any, b: Any, out: Any) -> None:
        assert self.current is not None
        self.put_on(self.current, lambda: np.matmul(a, b, out=out))

    def _let_kernels_end(self, what: str) -> None:
        """A kernel whose IOCBs have ended is about to end; one that polls never does by itself."""
        deadline_s = time.monotonic() + KERNEL_ENDS_S
        while self.stand_in.running:
            assert time.monotonic() < deadline_s, what
            time.sleep(0.001)

    def _synchronize(self) -> None:
        self._let_kernels_end("a kernel polls")
        for stream in list(self.stand_in.streams):
            self.put_on(stream, lambda: None).result(60)

    def _memcpy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == 1
        self.put_on(stream, lambda: ctypes.memmove(self.behind(to), source, size))

    def zeros(self, size: int, dtype: Any) -> DeviceArray:
        """An array in memory that no CPU may touch."""
        assert dtype is np.uint8
        self._let_kernels_end("an allocation waits for kernels")
        return DeviceArray(self, int(self.driver.stand_in_allocate(-(-size // 4096) * 4096)), size)

    def behind(self, address: int) -> int:
        """Where copies find it."""
        found = self.driver.stand_in_behind(address)
        assert found, "no memory of the device"
        return int(found)


class DeviceArray:
    """Bytes of the device."""

    def __init__(self, arrays: DeviceArrays, address: int, size: int) -> None:
        self._arrays, self._size = arrays, size
        self.data = SimpleNamespace(ptr=address)

    def __getitem__(self, part: slice) -> DeviceArray:
        first, stop, _ = part.indices(self._size)
        return DeviceArray(self._arrays, self.data.ptr + first, stop - first)

    def _bytes(self) -> Any:
        kind = ctypes.c_uint8 * self._size
        return np.ctypeslib.as_array(kind.from_address(self._arrays.behind(self.data.ptr)))

    def get(self) -> Any:
        """Its bytes now."""
        return self._bytes().copy()

    def set(self, data: Any) -> None:
        """Overwrite them."""
        self._bytes()[:] = data

    def __setitem__(self, part: slice, other: DeviceArray) -> None:
        assert part == slice(None) and self._arrays.current is not None
        self._arrays.put_on(self._arrays.current, lambda: self.set(other._bytes()))


def _pinned(size: int) -> Any:
    """Pinned memory, as a buffer with an address."""
    kind = type("Pinned", (ctypes.c_uint8 * size,), {})
    memory: Any = kind()
    memory.ptr = ctypes.addressof(memory)
    return memory
