"""A stand-in for the parts of CuPy that the executor uses: streams, events, registered memory, and
kernels that run on CPU threads in warps (warp_runner.cc).

It knows what a real GPU would refuse or fault on: memory that is not registered, handles that are
gone, a launch before the module is there. It cannot know a GPU's memory model or its timing.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "csrc" / "include"
NOT_READY, ILLEGAL_ADDRESS = 600, 700
WARPS_MAX, WIDTH = 3, 4
"""What a launch shrinks to: warps, and lanes of each."""

Call = tuple[Any, ...]


def build_runner(folder: Path, headers: Path = HEADERS) -> Any:
    """Compile the runner; a library of ctypes."""
    target = folder / "warp_runner.so"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread",
         f"-I{headers}", str(HERE / "warp_runner.cc"), "-o", str(target)],
        check=True, timeout=300,
    )  # fmt: skip
    library = ctypes.CDLL(str(target))
    library.run_launch.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
    return library


def build_driver(folder: Path) -> Path:
    """A stand-in for the CUDA driver's library; see cuda_stand_in.cc."""
    target = folder / "libcuda_stand_in.so"
    source = HERE / "cuda_stand_in.cc"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
         str(source), "-o", str(target)],
        check=True, timeout=300,
    )  # fmt: skip
    return target


class CudaError(RuntimeError):
    """What CuPy raises."""


@dataclass
class Stream:
    """Runs what is put on it in order, on a thread."""

    flags: int
    priority: int
    worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="stand-in stream")
    )
    pending: int = 0


class StandInCupy:
    """The GPU and its libraries; `modules` puts it in the place of CuPy.

    calls            what was called, in order, polls left out.
    refuse           call name -> error text: such calls are refused.
    elsewhere        the GPU sees registered memory at another address.
    killed, stuck    kernels that fault at once; kernels that do not end until `stuck` is cleared.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.calls: list[Call] = []
        self.refuse: dict[str, str] = {}
        self.refuse_once: set[str] = set()
        self.registers: set[int] = set()
        """Addresses that are I/O memory; all others are refused as such."""
        self.elsewhere = False
        self.killed = False
        self.stuck = threading.Event()
        self.stuck.set()
        self.dead = ""
        self.apart = False
        self.attributes = {16: 132, 75: 9, 76: 0, 86: 0, 91: 1}
        self.devices = 1
        self.registered: dict[int, int] = {}
        self.running: dict[int, list[int]] = {}
        """What each launch under way looks at."""
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, bool] = {}
        self._next = 1000
        self._lock = threading.Lock()

    def modules(self) -> dict[str, ModuleType]:
        """What to put into sys.modules."""
        runtime, driver = ModuleType("cupy.cuda.runtime"), ModuleType("cupy.cuda.driver")
        for name in (
            "getDeviceCount", "setDevice", "deviceGetAttribute", "hostRegister", "hostUnregister",
            "pointerGetAttributes", "streamCreateWithPriority", "streamDestroy", "streamQuery",
            "streamWaitEvent", "eventCreateWithFlags", "eventRecord", "eventDestroy",
        ):  # fmt: skip
            setattr(runtime, name, self._recorded(name))
        for name in ("moduleLoadData", "moduleGetFunction", "funcGetAttribute", "launchKernel"):
            setattr(driver, name, self._recorded(name))
        cuda = ModuleType("cupy.cuda")
        cuda.runtime, cuda.driver = runtime, driver  # type: ignore[attr-defined]
        cupy = ModuleType("cupy")
        cupy.cuda = cuda  # type: ignore[attr-defined]
        return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime,
                "cupy.cuda.driver": driver}  # fmt: skip

    def _recorded(self, name: str) -> Callable[..., Any]:
        method = getattr(self, "_" + name)
        quiet = {"getDeviceCount", "setDevice", "deviceGetAttribute", "pointerGetAttributes",
                 "streamQuery", "funcGetAttribute"}  # fmt: skip

        def call(*arguments: Any) -> Any:
            if name in self.refuse or name in self.refuse_once:
                self.refuse_once.discard(name)
                raise CudaError(self.refuse.get(name, "refused once"))
            if name not in quiet:
                self.calls.append((name, *arguments))
            return method(*arguments)

        return call

    def names(self) -> list[str]:
        """Names of the calls so far."""
        return [call[0] for call in self.calls]

    def _new(self) -> int:
        self._next += 1
        return self._next

    # ---- the runtime ----
    def _getDeviceCount(self) -> int:
        return self.devices

    def _setDevice(self, device: int) -> None:
        if device >= self.devices:
            raise CudaError("invalid device ordinal")

    def _deviceGetAttribute(self, attribute: int, device: int) -> int:
        return self.attributes[attribute]

    def _hostRegister(self, address: int, length: int, flags: int) -> None:
        assert address % 4096 == 0 and length % 4096 == 0 and length > 0
        assert flags in (3, 7), "portable and mapped; and I/O memory"
        if (flags == 7) != (address in self.registers):
            raise CudaError("cudaErrorInvalidValue: invalid argument")
        for at, size in self.registered.items():
            assert address + length <= at or at + size <= address, "registered twice"
        self.registered[address] = length

    def _hostUnregister(self, address: int) -> None:
        if self.dead:
            raise CudaError(self.dead)
        end = address + self.registered.pop(address)
        used = [at for wanted in self.running.values() for at in wanted if address <= at < end]
        assert not used, "a kernel may use it"

    def _pointerGetAttributes(self, address: int) -> Any:
        class Attributes:
            devicePointer = address + (1 << 40 if self.elsewhere else 0)

        return Attributes()

    def _streamCreateWithPriority(self, flags: int, priority: int) -> int:
        handle = self._new()
        self.streams[handle] = Stream(flags, priority)
        return handle

    def _streamDestroy(self, handle: int) -> None:
        self.streams.pop(handle).worker.shutdown()

    def _streamQuery(self, handle: int) -> int:
        if self.dead:
            return ILLEGAL_ADDRESS
        return NOT_READY if handle and self.streams[handle].pending else 0

    def _streamWaitEvent(self, stream: int, event: int) -> None:
        assert event in self.events

    def _eventCreateWithFlags(self, flags: int) -> int:
        handle = self._new()
        self.events[handle] = True
        return handle

    def _eventRecord(self, event: int, stream: int) -> None:
        assert event in self.events and stream in self.streams

    def _eventDestroy(self, event: int) -> None:
        del self.events[event]

    # ---- the driver ----
    def _moduleLoadData(self, image: bytes) -> int:
        if not image.startswith(b"\x7fELF"):
            raise CudaError("CUDA_ERROR_INVALID_IMAGE")
        return self._new()

    def _moduleGetFunction(self, module: int, name: str) -> int:
        if name != "tutti_gio_run":
            raise CudaError("CUDA_ERROR_NOT_FOUND")
        return self._new()

    def _funcGetAttribute(self, attribute: int, function: int) -> int:
        return {3: 0, 4: 64}[attribute]

    def _launchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int,
        stream: int, arguments: int, extra: int,
    ) -> None:  # fmt: skip
        if self.dead:
            raise CudaError(self.dead)
        assert (gy, gz, by, bz, shared, extra) == (1, 1, 1, 1, 0, 0) and bx % 32 == 0
        pointers = (ctypes.c_void_p * 2).from_address(arguments)
        view = ctypes.c_uint64.from_address(pointers[0] or 0).value
        launch = ctypes.string_at(pointers[1] or 0, LAUNCH_BYTES)  # copied, as by the driver
        with self._lock:
            self.streams[stream].pending += 1
        warps = min(gx * bx // 32, WARPS_MAX)
        number = self._new()
        self.running[number], reachable = self._reach(view)
        self.streams[stream].worker.submit(
            self._run, stream, number, view, launch, warps, reachable
        )

    def _run(
        self, stream: int, number: int, view: int, launch: bytes, warps: int, reachable: bool
    ) -> None:
        try:
            self.stuck.wait()
            if (self.killed and launch[8]) or not reachable:
                self.dead = "cudaErrorIllegalAddress: an illegal memory access was encountered"
            elif not self.dead:
                self.apart |= bool(self.runner.run_launch(view, launch, warps, WIDTH))
        finally:
            del self.running[number]
            with self._lock:
                self.streams[stream].pending -= 1

    def _reach(self, view: int) -> tuple[list[int], bool]:
        """What lanes look at first, the ring, its queues, their memory, and if it is registered."""
        wanted = [view]
        if not self._holds(view):
            return wanted, False
        words = ctypes.c_uint64 * 1
        read = lambda at: words.from_address(at)[0]  # noqa: E731
        wanted += [read(view), read(view + 8)]
        devices = ctypes.c_uint32.from_address(view + 20).value
        for number in range(devices):
            device = view + 24 + number * DEVICE_BYTES
            wanted.append(read(device + 64 * 8))
            queues = ctypes.c_uint32.from_address(device + 65 * 8).value
            for queue in range(queues):
                at = read(device + queue * 8)
                wanted.append(at)
                if self._holds(at):
                    wanted += [read(at + 8 * word) for word in range(11) if read(at + 8 * word)]
            regions = read(device + 64 * 8)
            if self._holds(regions):
                lists = [read(regions + 48 * row + 32) for row in range(1024)]
                wanted += [at for at in lists if at]
        return wanted, all(self._holds(at) for at in wanted)

    def _holds(self, address: int) -> bool:
        return any(at <= address < at + size for at, size in self.registered.items())

    # ---- for tests ----
    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing runs."""
        end_s = time.monotonic() + timeout_s
        while any(stream.pending for stream in self.streams.values()):
            assert time.monotonic() < end_s, "a kernel does not end"
            time.sleep(0.001)

    def close(self) -> None:
        """End the threads of streams that tests left behind on purpose."""
        self.stuck.set()
        for stream in self.streams.values():
            stream.worker.shutdown()


LAUNCH_BYTES = 2072
DEVICE_BYTES = 64 * 8 + 8 + 6 * 4
