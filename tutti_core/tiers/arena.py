"""The memory of a tier: an arena in host memory, or one in the memory of a GPU.

An arena is one stretch of addresses that pages are copied into and out of, whole batches at a time.
It knows nothing of pages. Copies are complete when `copy` returns; who may touch which bytes when
is the tier's business (`memory.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti_core.errors import ConfigError, UnsupportedError
from tutti_core.io.huge_pages import HUGE_PAGE_BYTES
from tutti_core.memcopy import copy_pieces

logger = logging.getLogger("tutti")

U64 = npt.NDArray[np.uint64]

_CUDA_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts
_CUDA_COPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses


class Arena(Protocol):
    """Memory of a tier. `copy` may be called from any thread."""

    @property
    def address(self) -> int:
        """Address of the first byte, aligned to 4 KiB at least."""
        ...

    @property
    def length_bytes(self) -> int:
        """Size."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether a transport can read and write this memory."""
        ...

    def copy(self, target: U64, source: U64, length_bytes: U64) -> None:
        """Copy pieces between addresses, of which one side at least is in this arena.

        Raises
            OSError: the copy failed; the targets hold anything.
        """
        ...

    def pin(self) -> None:
        """Make the memory fit for DMA where the machine allows it; may take seconds."""
        ...

    def close(self) -> None:
        """Let go of the memory. Nothing may be using it. Idempotent."""
        ...


class HostArena:
    """Anonymous host memory, in huge pages where the kernel will; pinned for CUDA where that is.

    Parameters
        huge_pages: ask for them before the memory is touched.
    Raises
        ConfigError: the machine does not give so much memory.
    """

    on_host = True

    def __init__(self, length_bytes: int, huge_pages: bool = True) -> None:
        self.length_bytes = length_bytes
        try:
            self._map = mmap.mmap(
                -1, length_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(f"dram = {length_bytes} bytes cannot be had: {error}") from None
        if huge_pages:
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        start = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._pinned_by: Any = None
        self._closed = False

    def copy(self, target: U64, source: U64, length_bytes: U64) -> None:
        """Copy pieces with the GIL released."""
        copy_pieces(target, source, length_bytes)

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies to and from a GPU run at full speed."""
        runtime = _cuda_runtime()[0]
        if runtime is None or self._closed or self._pinned_by is not None:
            return
        try:
            runtime.hostRegister(self.address, self.length_bytes, _CUDA_PORTABLE)
            self._pinned_by = runtime
        except Exception as error:  # CuPy's own types, which exist only where it does
            logger.warning("the DRAM tier is not pinned for CUDA: %s", error)

    def close(self) -> None:
        """Let go of the memory; it is unmapped when nothing refers to it any more."""
        if self._pinned_by is not None:
            self._pinned_by.hostUnregister(self.address)
            self._pinned_by = None
        self._closed = True


class CudaArena:
    """Memory of the current GPU, from CuPy. Copies run on a stream of their own, a sync a batch.

    Raises
        UnsupportedError: no CuPy, no driver or no GPU; says which.
        ConfigError: the GPU does not have so much memory free.
    """

    on_host = False

    def __init__(self, length_bytes: int) -> None:
        runtime, missing = _cuda_runtime()
        if runtime is None:
            raise UnsupportedError(
                f"hbm = {length_bytes} needs a GPU: {missing}",
                op="open",
                hint="leave hbm out, or install cupy-cuda12x or cupy-cuda13x and an NVIDIA driver",
            )
        self.length_bytes = length_bytes
        self._runtime = runtime
        self._cupy = importlib.import_module("cupy")
        try:
            self._memory = self._cupy.cuda.alloc(length_bytes)
        except Exception as error:  # cupy.cuda.memory.OutOfMemoryError and the runtime's own
            raise ConfigError(f"hbm = {length_bytes} bytes cannot be had: {error}") from None
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._device = self._cupy.cuda.Device()
        self._lock = threading.Lock()  # one batch at a time, so that a sync waits for its own
        self.address = int(self._memory.ptr)

    def copy(self, target: U64, source: U64, length_bytes: U64) -> None:
        """Queue the copies on the arena's stream and wait for all of them."""
        target, source, length_bytes = merged(target, source, length_bytes)
        try:
            with self._lock, self._device:
                if self._memory is None:  # a load that came past the store's close
                    raise OSError("the memory tier is closed")
                for to, start, length in zip(
                    target.tolist(), source.tolist(), length_bytes.tolist(), strict=True
                ):
                    self._runtime.memcpyAsync(
                        to, start, length, _CUDA_COPY_DEFAULT, self._stream.ptr
                    )
                self._stream.synchronize()
        except self._runtime.CUDARuntimeError as error:
            raise OSError(f"a copy to or from the GPU failed: {error}") from None

    def pin(self) -> None:
        """Nothing to do: it is the GPU's own."""

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._memory = None


def merged(target: U64, source: U64, length_bytes: U64) -> tuple[U64, U64, U64]:
    """The same copies with neighbours that touch on both sides made one."""
    if len(target) < 2:
        return target, source, length_bytes
    ends = length_bytes[:-1]
    touch = (target[:-1] + ends == target[1:]) & (source[:-1] + ends == source[1:])
    first = np.flatnonzero(np.concatenate(([True], ~touch)))
    return target[first], source[first], np.add.reduceat(length_bytes, first)


def _cuda_runtime() -> tuple[Any, str]:
    """CuPy's runtime module where a GPU can be used, else None and what is missing."""
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
    except ImportError:
        return None, "CuPy is not installed"
    try:
        if runtime.getDeviceCount() > 0:
            return runtime, ""
    except Exception as error:  # no driver: CUDARuntimeError, which exists only with CuPy
        return None, f"CUDA does not work here ({error})"
    return None, "there is no GPU"
