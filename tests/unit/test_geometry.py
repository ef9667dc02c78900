"""geometry.py: every kind of memory by address and length, without a copy; nothing unsafe."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from tutti_core import Memory, PageFragments, as_memory, page_fragments

SOURCES = {
    "bytes": (lambda: b"x" * 64, False),
    "bytearray": (lambda: bytearray(64), True),
    "memoryview": (lambda: memoryview(bytearray(64)), True),
    "read-only memoryview": (lambda: memoryview(bytes(64)), False),
    "slice of a memoryview": (lambda: memoryview(bytearray(80))[8:72], True),
    "uint8 array": (lambda: np.zeros(64, np.uint8), True),
    "float16 array": (lambda: np.zeros((4, 8), np.float16), True),
    "read-only array": (lambda: np.frombuffer(bytes(64), np.uint8), False),
    "structured array": (lambda: np.zeros(4, np.dtype("u8,u8")), True),
}


@pytest.mark.parametrize("name", SOURCES)
def test_memory_of_each_kind_is_where_its_bytes_are(name: str) -> None:
    make, writable = SOURCES[name]
    source = make()
    piece = as_memory(source)
    array = np.frombuffer(source, np.uint8) if not hasattr(source, "ctypes") else source
    assert (piece.address, piece.length_bytes, piece.writable) == (
        array.ctypes.data,
        64,
        writable,
    )


def test_a_memory_and_a_pointer_with_a_length_pass_through() -> None:
    piece = Memory(4096, 10, False, None)
    assert as_memory(piece) is piece
    assert as_memory((4096, 10)) == Memory(4096, 10, True, None)
    assert as_memory((np.uint64(4096), np.int64(10))).address == 4096


@pytest.mark.parametrize("pair", [(0, 10), (-1, 10), (4096, 0), (4096, -1)])
def test_impossible_pointers_are_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a pointer and a length"):
        as_memory(pair)


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((8, 8), np.uint8)[:, :4],
        np.zeros((8, 8), np.uint8).T,
        np.zeros(64, np.uint8)[::2],
        np.zeros(64, np.uint8)[::-1],
        memoryview(bytearray(64))[::2],
    ],
    ids=["columns", "transposed", "every second", "reversed", "strided view"],
)
def test_memory_with_holes_is_refused(source: Any) -> None:
    if isinstance(source, np.ndarray) and source.flags.f_contiguous and source.ndim == 2:
        source = np.zeros((8, 4), np.uint8).T
    with pytest.raises(ValueError, match="not contiguous"):
        as_memory(source)


def test_python_objects_are_not_bytes() -> None:
    with pytest.raises(ValueError, match="objects"):
        as_memory(np.array([object()]))


@pytest.mark.parametrize("source", [None, 5, "text", [1, 2], (1, 2, 3), {}])
def test_what_exposes_no_memory_is_refused_by_type(source: object) -> None:
    with pytest.raises(TypeError, match=type(source).__name__):
        as_memory(source)


def test_the_memory_keeps_its_source_alive() -> None:
    class Kept(bytearray):
        pass

    source = Kept(64)
    gone = weakref.ref(source)
    piece = as_memory(source)
    del source
    gc.collect()
    assert gone() is not None
    del piece
    gc.collect()
    assert gone() is None


class TestTensors:
    torch = None

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        TestTensors.torch = pytest.importorskip("torch", reason="torch is not installed")

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8"])
    def test_tensors_of_every_kv_dtype(self, dtype: str) -> None:
        torch = self.torch
        tensor = torch.zeros((4, 8), dtype=getattr(torch, dtype))
        piece = as_memory(tensor)
        assert piece.address == tensor.data_ptr() and piece.writable
        assert piece.length_bytes == 32 * tensor.element_size()

    def test_a_view_starts_where_it_starts(self) -> None:
        tensor = self.torch.zeros((8, 4), dtype=self.torch.bfloat16)[3:5]
        piece = as_memory(tensor)
        assert (piece.address, piece.length_bytes) == (tensor.data_ptr(), 16)

    def test_strided_tensors_are_refused(self) -> None:
        tensor = self.torch.zeros((8, 4), dtype=self.torch.bfloat16)
        for bad in (tensor[:, :2], tensor.T, tensor[::2]):
            with pytest.raises(ValueError, match="not contiguous"):
                as_memory(bad)

    def test_a_tensor_with_a_gradient_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cannot be exported"):
            as_memory(self.torch.zeros(4, requires_grad=True))

    def test_a_tensor_on_no_host_is_refused(self) -> None:
        class Elsewhere:
            def __dlpack__(self) -> None:
                raise AssertionError("must not be called")

            def __dlpack_device__(self) -> tuple[int, int]:
                return (2, 0)

        with pytest.raises(ValueError, match="not in host memory"):
            as_memory(Elsewhere())

    def test_the_storage_outlives_the_tensor(self) -> None:
        tensor = self.torch.full((1024,), 7, dtype=self.torch.uint8)
        piece = as_memory(tensor)
        del tensor
        gc.collect()
        import ctypes

        assert ctypes.string_at(piece.address, 1024) == b"\7" * 1024


def test_pages_lie_behind_each_other_or_at_their_slots() -> None:
    memory = bytearray(40)
    base = as_memory(memory).address
    assert page_fragments(memory, 10, 4).address.ravel().tolist() == [
        base + 10 * i for i in range(4)
    ]
    chosen = page_fragments(memory, 10, 2, [3, 1])
    assert chosen.address.ravel().tolist() == [base + 30, base + 10]
    assert (chosen.page_count, chosen.page_bytes) == (2, 10)
    assert page_fragments(memory, 10, 0).page_count == 0
    assert chosen.select(np.array([1])).address.ravel().tolist() == [base + 10]


@pytest.mark.parametrize(
    ("count", "slots"), [(5, None), (1, [4]), (1, [-1]), (2, [0]), (1, [0, 1]), (-1, None)]
)
def test_pages_beyond_the_memory_are_refused(count: int, slots: list[int] | None) -> None:
    with pytest.raises(ValueError):
        page_fragments(bytearray(40), 10, count, slots)


def test_fragments_must_have_one_shape() -> None:
    address = np.zeros((2, 3), np.uint64)
    assert PageFragments(address, np.array([1, 2, 3], np.uint64)).page_bytes == 6
    with pytest.raises(ValueError):
        PageFragments(address, np.array([1, 2], np.uint64))
    with pytest.raises(ValueError):
        PageFragments(address.ravel(), np.array([1, 2], np.uint64))


@pytest.mark.parametrize(
    ("address", "length"), [(np.int64, np.uint64), (np.uint64, np.int64), (np.uint64, np.uint32)]
)
def test_fragments_must_have_the_types_of_a_batch(address: type, length: type) -> None:
    with pytest.raises(ValueError, match="uint64"):
        PageFragments(np.ones((2, 1), address), np.ones(1, length))


def test_a_fragment_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="length 0"):
        PageFragments(np.ones((2, 2), np.uint64), np.array([8, 0], np.uint64))
