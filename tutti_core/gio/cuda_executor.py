"""GPU threads as the lanes of rings: one kernel a launch, on a stream of each ring's own.

CuPy reaches the CUDA runtime; NVRTC compiles the kernel (`nvrtc.py`), nobody needs nvcc.

Order and bounds
    - While a kernel polls, nothing is called that synchronises the device: no allocation, no
      default stream, no first use of a module. What does (registering memory, loading) is done when
      a ring is attached, and later only after the ring's own stream has drained.
    - A launch has the ring's timeout, and its lanes keep it; `detach` waits that long and
      DRAIN_EXTRA_S, then gives up: what is registered stays so.
    - A launch that failed to start raises, and the ring refuses its IOCBs. A kernel that was killed
      shows as a stream that is idle or in error with an IOCB not ended (`lost`); the error is the
      context's, so all rings of this GPU stop here.
    - A launch takes at most `lanes` blocks, and an SM each, if it has room. Green contexts, which
      would keep other kernels off these SMs, are not used: they hold SMs back also while no I/O is
      under way, and CuPy does not offer them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

from tutti_core._native import GioRing
from tutti_core.errors import ConfigError, UnsupportedError
from tutti_core.gio.nvrtc import Image, kernel_image
from tutti_core.gio.pins import PINS, Pins, Range
from tutti_core.gio.sources import ENTRY

WARP = 32
BLOCK_WARPS_MAX = 32
CAPABILITY_MIN = 80
"""Sums and unions over a warp in one instruction."""
DRAIN_EXTRA_S = 20.0
WARM_UP_S = 30.0
_POLL_S = 0.0005
_NOT_READY = 600  # cudaErrorNotReady
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_NO_TIMING = 2  # cudaEventDisableTiming
_PRIORITY = -5
"""The highest; the driver takes the nearest it has. A launch that waits for the engine's kernels
delays pages that they wait for."""
_HOST_POINTERS, _HOST_ATOMICS = 91, 86  # cudaDevAttr…
_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76
_LOCAL_BYTES, _REGISTERS = 3, 4  # CU_FUNC_ATTRIBUTE_…

logger = getLogger("tutti")


class _Launch(ctypes.Structure):
    """The head of csrc's `Launch`."""

    _fields_ = (("timeout_ns", ctypes.c_uint64), ("iocb_count", ctypes.c_uint32))


@dataclass(slots=True)
class _Attached:
    """What a ring has on the GPU."""

    ring: GioRing
    stream: int
    event: int
    version: int
    ranges: list[Range]
    launch: Any
    arguments: Any
    view: Any
    timeout_s: float = 0.0
    launches: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def _cupy() -> tuple[Any, Any]:
    """CUDA's runtime and driver as CuPy has them."""
    try:
        from cupy.cuda import driver, runtime

        count = runtime.getDeviceCount()
    except ImportError as error:
        raise UnsupportedError(
            f"CuPy cannot be imported: {error}", op="open", hint="pip install 'tutti[gpu]'"
        ) from error
    except RuntimeError as error:
        raise UnsupportedError(f"there is no GPU: {error}", op="open") from error
    if count < 1:
        raise UnsupportedError("there is no GPU", op="open")
    return runtime, driver


class CudaExecutor:
    """`Executor` on one GPU.

    Parameters
        lanes: SMs that a launch may occupy.
        block_warps: warps on each of them.
        device: number of the GPU.
        image: of the kernel; compiled, or read from the cache, by default.
        pins: which memory is registered.
    Raises
        ConfigError: a number is out of bounds.
        UnsupportedError: no CuPy, no GPU, one that cannot do this, or no compiler.
    Threads    any; one at a time for each ring.
    """

    name = "cuda"
    threads = 0

    def __init__(
        self,
        *,
        lanes: int = 2,
        block_warps: int = 4,
        device: int = 0,
        image: Image | None = None,
        pins: Pins = PINS,
    ) -> None:
        self._runtime, self._driver = _cupy()
        self._device, self._pins, self._pid = device, pins, os.getpid()
        self._lock = threading.Lock()
        self._rings: dict[int, _Attached] = {}
        self._broken = ""
        if device < 0 or device >= self._runtime.getDeviceCount():
            raise ConfigError(f"device: there is no GPU {device}", op="open")
        self._runtime.setDevice(device)
        sms = self._attribute(_SM_COUNT)
        if not 1 <= lanes <= sms:
            raise ConfigError(f"lanes: {lanes}; this GPU has 1 to {sms} SMs", op="open")
        if not 1 <= block_warps <= BLOCK_WARPS_MAX:
            raise ConfigError(f"block_warps: {block_warps} is not 1 to 32", op="open")
        self.lanes = lanes
        self._block = block_warps * WARP
        capability = 10 * self._attribute(_MAJOR) + self._attribute(_MINOR)
        if capability < CAPABILITY_MIN:
            raise UnsupportedError(f"compute capability {capability} is below 80", op="open")
        if not self._attribute(_HOST_POINTERS):
            raise UnsupportedError("this GPU sees host memory at other addresses", op="open")
        self._image = image if image is not None else kernel_image(capability)
        self._capability, self._sms = capability, sms
        self._load()

    def _attribute(self, number: int) -> int:
        return int(self._runtime.deviceGetAttribute(number, self._device))

    def _load(self) -> None:
        """Load the kernel now: the first launch of one that is not synchronises the device."""
        try:
            self._runtime.streamQuery(0)  # makes the context current
            self._module = self._driver.moduleLoadData(self._image.data)
            self._function = self._driver.moduleGetFunction(self._module, ENTRY)
            self._registers = int(self._driver.funcGetAttribute(_REGISTERS, self._function))
            self._local_bytes = int(self._driver.funcGetAttribute(_LOCAL_BYTES, self._function))
        except RuntimeError as error:
            raise UnsupportedError(f"the kernel cannot be loaded: {error}", op="open") from error

    def describe(self) -> dict[str, Any]:
        """What is in use, for reports."""
        return {
            "device": self._device,
            "capability": self._capability,
            "sms": self._sms,
            "lanes": self.lanes,
            "block_threads": self._block,
            "target": self._image.target,
            "image_cached": self._image.cached,
            "registers": self._registers,
            "local_bytes": self._local_bytes,
            "host_atomics": bool(self._attribute(_HOST_ATOMICS)),
            "green_contexts": "not used: they hold SMs back also while no I/O is under way",
            "broken": self._broken,
        }

    # ---- rings ----
    def attach(self, ring: GioRing) -> None:
        """Register a ring's memory, and run an empty launch: the kernel is there and ends."""
        self._runtime.setDevice(self._device)
        version = ring.shared_version()
        empty = bytes(len(ring.launch()))
        with contextlib.ExitStack() as undo:
            ranges = self._pins.take(self._runtime, ring.shared_ranges())
            undo.callback(self._pins.give, self._runtime, ranges)
            try:
                stream = self._runtime.streamCreateWithPriority(_NON_BLOCKING, _PRIORITY)
                undo.callback(self._runtime.streamDestroy, stream)
                event = self._runtime.eventCreateWithFlags(_NO_TIMING)
                undo.callback(self._runtime.eventDestroy, event)
                state = self._state(ring, stream, event, version, ranges, len(empty))
                self._start(state, empty, self.lanes)
            except RuntimeError as error:
                raise UnsupportedError(f"the kernel cannot be run: {error}", op="open") from error
            if not self._drained(state, WARM_UP_S):
                undo.pop_all()  # it may still run: nothing of this is given back
                self._broken = self._broken or "an empty launch does not end"
                raise UnsupportedError(f"the kernel cannot be run: {self._broken}", op="open")
            undo.pop_all()
        with self._lock:
            self._rings[id(ring)] = state

    @staticmethod
    def _state(
        ring: GioRing, stream: int, event: int, version: int, ranges: list[Range], size: int
    ) -> _Attached:
        view = ctypes.c_uint64(ring.view_address())
        launch = (ctypes.c_char * size)()
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(view), ctypes.addressof(launch))
        return _Attached(ring, stream, event, version, ranges, launch, arguments, view)

    def _of(self, ring: GioRing) -> _Attached:
        with self._lock:
            return self._rings[id(ring)]

    def stream(self, ring: GioRing) -> int:
        """The stream of a ring (cudaStream_t). Nothing but events may be put on it."""
        return self._of(ring).stream

    def _start(self, state: _Attached, launch: bytes, sms: int) -> None:
        ctypes.memmove(state.launch, launch, len(launch))
        self._driver.launchKernel(
            self._function, sms, 1, 1, self._block, 1, 1, 0, state.stream,
            ctypes.addressof(state.arguments), 0,
        )  # fmt: skip

    def launch(self, ring: GioRing, sms: int = 0, after: Sequence[int] = ()) -> None:
        """See `Executor.launch`. Asynchronous; the parameters are copied by the driver."""
        state = self._of(ring)
        launch = ring.launch()
        head = _Launch.from_buffer_copy(launch)
        if head.iocb_count == 0:
            return
        if not 0 <= sms <= self._sms:
            raise RuntimeError(f"{sms} SMs: this GPU has {self._sms}")
        with state.lock:
            if self._broken:
                raise RuntimeError(self._broken)
            self._runtime.setDevice(self._device)
            if ring.shared_version() != state.version:
                self._renew(state)
            for event in after:
                self._runtime.streamWaitEvent(state.stream, event)
            self._start(state, launch, sms or self.lanes)
            state.launches += 1
            state.timeout_s = max(state.timeout_s, head.timeout_ns / 1e9)
            try:
                self._runtime.eventRecord(state.event, state.stream)
            except RuntimeError as error:
                # The kernel was started: its lanes, or `lost`, end the IOCBs.
                self._break(f"no event can be recorded: {error}")

    def _renew(self, state: _Attached) -> None:
        """Register memory that is new. Lists of memory that was registered with a controller."""
        if not self._drained(state, state.timeout_s + DRAIN_EXTRA_S):
            raise RuntimeError("earlier launches do not end, so no memory can be registered")
        version, wanted = state.ring.shared_version(), set(state.ring.shared_ranges())
        known = set(state.ranges)
        self._pins.give(self._runtime, known - wanted)
        state.ranges = [one for one in state.ranges if one in wanted]
        try:
            state.ranges += self._pins.take(self._runtime, sorted(wanted - known))
        except UnsupportedError as error:
            raise RuntimeError(str(error)) from error
        state.version = version

    def after(self, ring: GioRing, stream: int) -> None:
        """Let another stream wait for all that the ring has launched so far."""
        state = self._of(ring)
        self._runtime.setDevice(self._device)
        with state.lock:
            self._runtime.streamWaitEvent(stream, state.event)

    # ---- the end ----
    def lost(self, ring: GioRing) -> bool:
        """See `Executor.lost`. A kernel that was killed takes the context with it."""
        state = self._of(ring)
        self._runtime.setDevice(self._device)
        return self._idle(state)

    def _idle(self, state: _Attached) -> bool:
        """Whether no kernel of the ring runs or will: all have ended, or the context is dead."""
        try:
            status = int(self._runtime.streamQuery(state.stream))
        except RuntimeError as error:
            self._break(f"a kernel failed: {error}")
            return True
        if status not in (0, _NOT_READY):
            self._break(f"a kernel failed with status {status}")
            return True
        return status == 0

    def _break(self, why: str) -> None:
        if not self._broken:
            logger.error("gpu: %s; nothing more is launched on this GPU", why)
        self._broken = self._broken or why

    def _drained(self, state: _Attached, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while not self._idle(state):
            if time.monotonic() >= end_s:
                return False
            time.sleep(_POLL_S)
        return True

    def detach(self, ring: GioRing) -> None:
        """See `Executor.detach`. Memory is unregistered once no kernel can reach it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            state = self._rings.pop(id(ring), None)
        if state is None:
            return
        self._runtime.setDevice(self._device)
        if not self._drained(state, state.timeout_s + DRAIN_EXTRA_S):
            logger.error("gpu: a launch does not end; its memory stays registered")
            _KEPT.append(state)
            return
        wrong = self._pins.give(self._runtime, state.ranges)
        for destroy, handle in (
            (self._runtime.eventDestroy, state.event),
            (self._runtime.streamDestroy, state.stream),
        ):
            try:
                destroy(handle)
            except RuntimeError as error:
                wrong.append(str(error))
        if wrong and not self._broken:
            logger.warning("gpu: letting go of a ring: %s", "; ".join(wrong))


_KEPT: list[_Attached] = []
"""Rings whose kernels did not end: their memory must not go away under them."""
