"""Where page bytes lie in memory: addresses of anything that exposes memory, and page fragments.

Nothing here copies page bytes. Addresses are arrays, so a batch of pages costs no Python object per
page or fragment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core.arguments import count_of

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

ADDRESS_MAX = 1 << 64
FRAGMENT_BYTES_MAX = 1 << 32
CACHED_FRAGMENTS_MAX = 1 << 16
"""Of a batch whose constant arrays are kept for the next one of its kind; 32 of them, 24 MiB."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A contiguous, host-accessible piece of memory. `owner` keeps it alive."""

    address: int
    length_bytes: int
    writable: bool
    owner: object


def as_memory(source: Any) -> Memory:
    """Return the memory behind `source` without copying it.

    Accepts a Memory, a (pointer, length in bytes) pair, and anything with `__array_interface__`,
    the buffer protocol, or DLPack on the CPU (bfloat16 and float8 tensors included).

    Raises
        ValueError: not contiguous, or on a device that the CPU cannot read, or of Python objects.
        TypeError: nothing that exposes memory.
    """
    if isinstance(source, Memory):
        return source
    if isinstance(source, tuple) and len(source) == 2:
        try:
            address, length = count_of(source[0], "pointer"), count_of(source[1], "length")
        except ValueError as error:
            raise ValueError(f"{source} is not a pointer and a length: {error}") from None
        if address == 0 or length == 0 or address + length > ADDRESS_MAX:
            raise ValueError(f"({address}, {length}) is not a pointer and a length")
        return Memory(address, length, True, None)
    if isinstance(source, np.generic):  # a value: what memory it has goes with the next copy
        raise TypeError(f"{type(source).__name__} is a number, not memory; pass an array")
    if hasattr(source, "__array_interface__"):
        array = np.asarray(source)
        if not array.flags.c_contiguous:
            raise ValueError("the array is not contiguous")
        if array.dtype.hasobject:
            raise ValueError("the array holds Python objects")
        return Memory(array.ctypes.data, array.nbytes, bool(array.flags.writeable), array)
    if hasattr(source, "__dlpack__"):
        return _dlpack_memory(source)
    try:
        view = memoryview(source)
    except TypeError:
        raise TypeError(
            f"{type(source).__name__} exposes no memory; pass a buffer, an array, a DLPack tensor, "
            "or a (pointer, length) pair"
        ) from None
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    array = np.frombuffer(view, dtype=np.uint8)
    return Memory(array.ctypes.data, array.nbytes, not view.readonly, view)


class _DLTensor(ctypes.Structure):
    """Head of a DLPack managed tensor (dlpack.h, DLTensor)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DLPACK_HOST = {1, 3}  # kDLCPU, kDLCUDAHost
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _dlpack_memory(source: Any) -> Memory:
    device_type, _ = source.__dlpack_device__()
    if int(device_type) not in _DLPACK_HOST:
        raise ValueError("the tensor is not in host memory")
    # The capsule is looked into, not consumed: dropping it calls the producer's deleter.
    try:
        capsule = source.__dlpack__()
    except BufferError as error:  # torch: requires_grad, conjugate, sparse, …
        raise ValueError(f"the tensor cannot be exported: {error}") from None
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    count, expected_stride = 1, 1
    for axis in reversed(range(tensor.ndim)):
        extent = tensor.shape[axis]
        if tensor.strides and extent > 1 and tensor.strides[axis] != expected_stride:
            raise ValueError("the tensor is not contiguous")
        expected_stride *= extent
        count *= extent
    length = count * ((tensor.bits * tensor.lanes + 7) // 8)
    return Memory((tensor.data or 0) + tensor.byte_offset, length, True, capsule)


@dataclass(frozen=True, slots=True)
class PageFragments:
    """The memory of n pages with f fragments each.

    address       (n, f) uint64, virtual addresses.
    length_bytes  (f,) uint64, the same for every page; their sum is the page's length.
    owner         keeps the memory alive until the transfer ends.

    Addresses are taken as they are: they are the caller's to get right, and where a load writes
    no two fragments may overlap.
    """

    address: U64
    length_bytes: U64
    owner: object = None

    def __post_init__(self) -> None:
        if not (isinstance(self.address, np.ndarray) and isinstance(self.length_bytes, np.ndarray)):
            raise TypeError("address and length_bytes must be arrays")
        if self.address.ndim != 2 or self.address.shape[1:] != self.length_bytes.shape:
            raise ValueError("address must be (pages, fragments), length_bytes (fragments,)")
        if self.address.dtype != np.uint64 or self.length_bytes.dtype != np.uint64:
            raise ValueError("address and length_bytes must be uint64")
        if not self.length_bytes.all():
            raise ValueError("a fragment has length 0")
        if (self.length_bytes > FRAGMENT_BYTES_MAX).any():
            raise ValueError(f"a fragment is longer than {FRAGMENT_BYTES_MAX} bytes")

    @property
    def page_count(self) -> int:
        """Number of pages, n."""
        return len(self.address)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.length_bytes.sum())

    def flat(self) -> tuple[U32, U64, U64]:
        """The fragments as a batch has them, one item a page: fragment_start, address, length."""
        count, each = self.address.shape
        address = np.ascontiguousarray(self.address).reshape(-1)
        make = _pattern if count * each <= CACHED_FRAGMENTS_MAX else _pattern.__wrapped__
        start, length = make(self.length_bytes.tobytes(), count)
        return start, address, length

    def part(self, start: int, stop: int) -> PageFragments:
        """Pages start .. stop-1, as a view."""
        return PageFragments(self.address[start:stop], self.length_bytes, self.owner)

    def select(self, pages: npt.NDArray[np.intp]) -> PageFragments:
        """The fragments of some of the pages, in the order given."""
        return PageFragments(self.address[pages], self.length_bytes, self.owner)


@lru_cache(maxsize=32)
def _pattern(lengths: bytes, count: int) -> tuple[U32, U64]:
    """What is the same in every batch of so many pages: fragment_start and length_bytes.

    Parameters
        lengths: of the fragments of a page, packed uint64.
    """
    length = np.tile(np.frombuffer(lengths, dtype=np.uint64), count)
    each = len(lengths) // 8
    start = np.arange(0, (count + 1) * each, each, dtype=np.uint32)
    start.flags.writeable = length.flags.writeable = False
    return start, length


def page_fragments(
    memory: Any, page_bytes: int, page_count: int, slots: Sequence[int] | None = None
) -> PageFragments:
    """Describe whole pages that lie in one piece of memory, page after page.

    Parameters
        memory: anything `as_memory` takes.
        slots: which page-sized place of the memory each page has; default 0 .. page_count-1.

    Raises
        ValueError: a slot reaches beyond the memory, or is no slot.
    """
    piece = as_memory(memory)
    page_bytes, page_count = count_of(page_bytes, "page_bytes"), count_of(page_count, "page_count")
    index = None if slots is None else _slot_numbers(slots, page_count)
    last = page_count - 1 if index is None else int(index.max(initial=0))
    if page_count and (last + 1) * page_bytes > piece.length_bytes:
        raise ValueError(
            f"memory of {piece.length_bytes} bytes does not hold {page_count} pages of "
            f"{page_bytes} bytes at the slots given"
        )
    if index is None:
        index = np.arange(page_count, dtype=np.uint64)
    address = (np.uint64(piece.address) + index * np.uint64(page_bytes))[:, None]
    return PageFragments(address, np.array([page_bytes], dtype=np.uint64), piece)


def _slot_numbers(slots: Sequence[int], page_count: int) -> U64:
    array = np.asarray(slots)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("slots must be one-dimensional integers")
    if len(array) != page_count:
        raise ValueError(f"{len(array)} slots for {page_count} pages")
    if array.size and int(array.min()) < 0:
        raise ValueError(f"slot {int(array.min())} is before the memory")
    return array.astype(np.uint64)
