"""The few calls of the CUDA driver that a transport needs, by ctypes: no toolkit, no torch.

Which memory an address is, a context for a thread, and blocking copies. Function names and enum
values are those of the CUDA driver API (cuda.h).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Protocol

from tutti_core.errors import DeviceError, UnsupportedError

HOST = -1
"""What `device_of` says of memory that the CPU reads."""

_SUCCESS, _INVALID_VALUE = 0, 1
_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL = 2, 8, 9  # CU_POINTER_ATTRIBUTE_…
_TYPE_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class Cuda(Protocol):
    """What `gds.py` asks of CUDA; tests put a stand-in here.

    granule_bytes   memory within one aligned granule of this size is all of one kind.
    """

    granule_bytes: int

    def device_of(self, address: int) -> int:
        """Number of the GPU whose memory this is, or HOST. Never raises for a wild address."""
        ...

    def use(self, device: int) -> None:
        """Make this GPU's context the one of the calling thread."""
        ...

    def to_host(self, target: int, source: int, length_bytes: int) -> None:
        """Copy device memory to host memory; back when it is there."""
        ...

    def to_device(self, target: int, source: int, length_bytes: int) -> None:
        """Copy host memory to device memory; back when it is there."""
        ...


class CudaDriver:
    """`Cuda` by libcuda.so.1.

    Copies are synchronous and do not wait for streams that were made non-blocking, as those of
    torch are. Managed memory counts as host memory.
    Raises
        UnsupportedError: no driver, or no GPU.
    Threads    any.
    """

    granule_bytes = 2 << 20
    """The driver maps device memory in pages of 2 MiB, in address ranges of its own."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedError(
                f"there is no CUDA driver: {error}", op="open", hint="install the NVIDIA driver"
            ) from error
        count = ctypes.c_int()
        status = self._library.cuInit(0)
        if status == _SUCCESS:
            status = self._library.cuDeviceGetCount(ctypes.byref(count))
        if status != _SUCCESS or count.value < 1:
            raise UnsupportedError(f"the CUDA driver finds no GPU (status {status})", op="open")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def device_of(self, address: int) -> int:
        """See `Cuda`. About a microsecond."""
        kind = self._attribute(ctypes.c_uint(), _MEMORY_TYPE, address)
        managed = self._attribute(ctypes.c_uint(), _IS_MANAGED, address)
        if kind != _TYPE_DEVICE or managed:
            return HOST
        return self._attribute(ctypes.c_int(), _DEVICE_ORDINAL, address)

    def _attribute(self, value: Any, attribute: int, address: int) -> int:
        """A pointer's attribute, or 0 for memory that CUDA does not know."""
        status = self._library.cuPointerGetAttribute(
            ctypes.byref(value), attribute, ctypes.c_uint64(address)
        )
        return int(value.value) if status == _SUCCESS else 0

    def use(self, device: int) -> None:
        """See `Cuda`. The primary context, which torch and CuPy use too; kept until the end."""
        with self._lock:
            if device not in self._contexts:
                context, handle = ctypes.c_void_p(), ctypes.c_int()
                self._call("cuDeviceGet", ctypes.byref(handle), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])

    def to_host(self, target: int, source: int, length_bytes: int) -> None:
        """See `Cuda`."""
        self._copy(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(target), ctypes.c_uint64(source), length_bytes
        )

    def to_device(self, target: int, source: int, length_bytes: int) -> None:
        """See `Cuda`."""
        self._copy(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(target), ctypes.c_void_p(source), length_bytes
        )

    def _copy(self, name: str, target: Any, source: Any, length_bytes: int) -> None:
        self._call(name, target, source, ctypes.c_size_t(length_bytes))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the driver; ctypes lets go of the GIL meanwhile."""
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise DeviceError(f"{name} failed with status {status}", op="copy")
