"""tiers/arena.py: host memory as it is, GPU memory against a runtime that plays the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from typing import Any

import numpy as np
import pytest

from tutti_core import ConfigError, UnsupportedError
from tutti_core.io.huge_pages import HUGE_PAGE_BYTES
from tutti_core.tiers.arena import CudaArena, HostArena, merged

SIZE = 1 << 20


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


class FakeRuntime:
    """cupy.cuda.runtime, with host memory for that of the GPU."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        self.calls: list[tuple[Any, ...]] = []
        self.broken = False

    def getDeviceCount(self) -> int:
        if self.gpus < 0:
            raise self.CUDARuntimeError("no driver")
        return self.gpus

    def memcpyAsync(self, to: int, start: int, length: int, kind: int, stream: int) -> None:
        if self.broken:
            raise self.CUDARuntimeError("illegal address")
        self.calls.append(("copy", length, kind, stream))
        ctypes.memmove(to, start, length)

    def hostRegister(self, address: int, length: int, flags: int) -> None:
        if self.broken:
            raise self.CUDARuntimeError("out of memory")
        self.calls.append(("register", address, length))

    def hostUnregister(self, address: int) -> None:
        self.calls.append(("unregister", address))


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, memory: bool = True) -> None:
    def alloc(length: int) -> Any:
        if not memory:
            raise MemoryError("out of memory")
        kept = np.zeros(length, dtype=np.uint8)
        return types.SimpleNamespace(ptr=kept.ctypes.data, kept=kept)

    def stream(non_blocking: bool) -> Any:
        assert non_blocking
        sync = lambda: runtime.calls.append(("sync",))  # noqa: E731
        return types.SimpleNamespace(ptr=7, synchronize=sync)

    cuda = types.SimpleNamespace(
        runtime=runtime, alloc=alloc, Stream=stream, Device=contextlib.nullcontext
    )
    module = types.ModuleType("cupy")
    module.cuda = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)


def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_host_memory_is_aligned_zero_and_can_be_copied_to_and_from() -> None:
    arena = HostArena(SIZE)
    assert arena.address % HUGE_PAGE_BYTES == 0 and arena.on_host
    source, back = np.arange(4096, dtype=np.uint8), np.full(8192, 9, dtype=np.uint8)
    arena.copy(u64(arena.address + SIZE - 4096), u64(source.ctypes.data), u64(4096))
    arena.copy(u64(back.ctypes.data), u64(arena.address + SIZE - 8192), u64(8192))
    assert not back[:4096].any() and (back[4096:] == source).all()
    arena.close()
    arena.close()


def test_impossible_host_memory_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="dram = "):
        HostArena(1 << 62)


def test_host_memory_is_pinned_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    install(monkeypatch, runtime)
    arena = HostArena(SIZE)
    arena.pin()
    arena.pin()
    arena.close()
    assert runtime.calls == [("register", arena.address, SIZE), ("unregister", arena.address)]
    arena.pin()  # closed
    assert len(runtime.calls) == 2


@pytest.mark.parametrize("gpus", [0, -1, None])
def test_without_cuda_pinning_changes_nothing(monkeypatch: pytest.MonkeyPatch, gpus) -> None:
    install(monkeypatch, FakeRuntime(gpus)) if gpus is not None else no_cupy(monkeypatch)
    arena = HostArena(SIZE)
    arena.pin()
    arena.close()


def test_a_refused_pinning_is_logged(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    runtime = FakeRuntime()
    runtime.broken = True
    install(monkeypatch, runtime)
    HostArena(SIZE).pin()
    assert "not pinned" in caplog.text


@pytest.mark.parametrize(
    ("gpus", "said"), [(None, "CuPy is not installed"), (0, "no GPU"), (-1, "no driver")]
)
def test_a_gpu_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, gpus, said: str) -> None:
    install(monkeypatch, FakeRuntime(gpus)) if gpus is not None else no_cupy(monkeypatch)
    with pytest.raises(UnsupportedError, match=said):
        CudaArena(SIZE)


def test_gpu_memory_that_is_not_there_is_a_configuration_error(monkeypatch) -> None:
    install(monkeypatch, FakeRuntime(), memory=False)
    with pytest.raises(ConfigError, match="hbm = "):
        CudaArena(SIZE)


def test_gpu_copies_are_merged_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    install(monkeypatch, runtime)
    arena = CudaArena(SIZE)
    assert not arena.on_host
    source = np.arange(256, dtype=np.uint8)
    at, base = arena.address, source.ctypes.data
    arena.copy(u64(at, at + 64, at + 512), u64(base, base + 64, base + 128), u64(64, 64, 128))
    assert runtime.calls == [("copy", 128, 4, 7), ("copy", 128, 4, 7), ("sync",)]
    back = np.zeros(128, dtype=np.uint8)
    arena.copy(u64(back.ctypes.data), u64(at + 512), u64(128))
    assert (back == source[128:]).all()
    arena.pin()
    runtime.broken = True
    with pytest.raises(OSError, match="illegal address"):
        arena.copy(u64(at), u64(base), u64(1))
    arena.close()


def test_merging_keeps_the_order_of_pieces_that_do_not_touch() -> None:
    target, source, length = merged(u64(10, 20, 40, 44), u64(0, 10, 30, 34), u64(10, 10, 4, 6))
    assert target.tolist() == [10, 40] and source.tolist() == [0, 30]
    assert length.tolist() == [20, 10]
    assert merged(u64(1), u64(2), u64(3))[2].tolist() == [3]
