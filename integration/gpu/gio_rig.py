"""Rings on software controllers, and memory of each kind, for the check of GPU-issued NVMe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti_core._native import NvmeController, SoftController
from tutti_core.gio.executor import CpuExecutor, Executor
from tutti_core.gio.ring import GioQueue, init_queue

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
POISON = 0xA5
WAIT_S = 60.0
CUDA_LIBRARY = "libcuda.so.1"

Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Memory that a controller may reach, of one kind."""

    address: int

    def get(self) -> Bytes:
        """Its bytes, on the host. Nothing may be in flight."""
        ...

    def put(self, data: Bytes) -> None:
        """Overwrite all of it; back when it is there."""
        ...


class HostMemory:
    """Pages of the host; pinned where there is a GPU."""

    def __init__(self, size: int, pinned: bool) -> None:
        if pinned:
            import cupy

            self._kept = cupy.cuda.alloc_pinned_memory(size + PAGE)
            raw = np.frombuffer(self._kept, np.uint8, size + PAGE)
        else:
            raw = np.zeros(size + PAGE, np.uint8)
        skip = -raw.ctypes.data % PAGE
        self.bytes: Bytes = raw[skip : skip + size]
        self.address = int(self.bytes.ctypes.data)

    def get(self) -> Bytes:
        """See `Memory`."""
        return self.bytes

    def put(self, data: Bytes) -> None:
        """See `Memory`."""
        self.bytes[:] = data


class DeviceMemory:
    """Pages of the GPU."""

    def __init__(self, size: int) -> None:
        import cupy

        self._kept = cupy.zeros(size + PAGE, cupy.uint8)
        skip = -self._kept.data.ptr % PAGE
        self.array = self._kept[skip : skip + size]
        self.address = int(self.array.data.ptr)

    def get(self) -> Bytes:
        """See `Memory`."""
        return self.array.get()

    def put(self, data: Bytes) -> None:
        """See `Memory`."""
        self.array.set(data)
        _settle()


def _settle() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()  # nothing polls now


@dataclass(frozen=True)
class Machine:
    """Where the lanes run: on the GPU, or on CPU threads for a dry run."""

    cuda: bool

    def executor(self, sms: int = 2) -> Executor:
        """Runs launches on so many SMs, or CPU threads."""
        if not self.cuda:
            return CpuExecutor(threads=2, lanes=min(sms, 2))
        from tutti_core.gio.cuda_executor import CudaExecutor

        return CudaExecutor(lanes=sms)

    def memory(self, kind: str, size: int) -> Memory:
        """`kind`: "pinned" or "device"."""
        if kind == "device" and self.cuda:
            return DeviceMemory(size)
        return HostMemory(size, self.cuda)

    def kinds(self) -> tuple[str, ...]:
        """Of memory that data can lie in."""
        return ("pinned", "device") if self.cuda else ("pinned",)


@dataclass
class Plan:
    """The fragments of an IOCB."""

    device: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    place: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]


class Rig:
    """Namespaces of one software controller, memory of one kind, and a ring."""

    def __init__(
        self,
        machine: Machine,
        executor: Executor,
        *,
        kind: str = "pinned",
        namespaces: int = 1,
        namespace_bytes: int = 16 * MIB,
        memory_bytes: int = 16 * MIB,
        depth: int = 8,
        queue_pairs: int = 5,
        queue_entries: int = 256,
        timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        library = CUDA_LIBRARY if machine.cuda and kind == "device" else ""
        self.soft = SoftController(
            namespace_bytes=namespace_bytes,
            namespace_count=namespaces,
            cuda_library=library,
            **options,
        )
        self.controller = NvmeController(
            self.soft, queue_pairs=queue_pairs, queue_entries=queue_entries
        )
        self.memory = machine.memory(kind, memory_bytes)
        self.memory_bytes, self.namespace_bytes = memory_bytes, namespace_bytes
        region = self.controller.register_memory(self.memory.address, memory_bytes)
        assert region >= 0, f"memory is refused: {region}"
        self.executor = executor
        self.queue: GioQueue = init_queue(
            [(self.controller, nsid + 1) for nsid in range(namespaces)],
            depth=depth,
            executor=executor,
            timeout_s=timeout_s,
        )
        self.namespaces = namespaces

    def plan(self, rng: np.random.Generator, count: int, size: int, cell: int) -> Plan:
        """Random fragments of at most `size` bytes, each in a cell of its own on both sides."""
        blocks = rng.integers(1, size // 512 + 1, count) if size < cell else size // 512
        length = np.broadcast_to(np.asarray(blocks, np.uint64) * np.uint64(512), count).copy()
        place = rng.permutation(self.memory_bytes // cell)[:count].astype(np.uint64)
        offset = rng.permutation(self.namespace_bytes // cell)[:count].astype(np.uint64)
        device = rng.integers(0, self.namespaces, count).astype(np.uint32)
        return Plan(device, offset * np.uint64(cell), place * np.uint64(cell), length)

    def prepare(self, op: int, plan: Plan) -> int:
        """An IOCB with these fragments."""
        (iocb,) = self.queue.get_iocb()
        address = plan.place + np.uint64(self.memory.address)
        self.queue.prepare(iocb, op, plan.device, plan.offset, address, plan.length)
        return iocb

    def wait(self, iocb: int) -> npt.NDArray[np.uint32]:
        """Statuses of an IOCB; not ending is an error."""
        end_s = time.monotonic() + WAIT_S
        while (statuses := self.queue.wait_cqe(iocb, 1.0)) is None:
            if time.monotonic() >= end_s:
                raise TimeoutError("an IOCB does not end")
        return statuses

    def run(self, op: int, plans: Sequence[Plan], sms: int = 0) -> list[npt.NDArray[np.uint32]]:
        """Issue IOCBs by one launch, and wait for them."""
        iocbs = [self.prepare(op, plan) for plan in plans]
        if not self.queue.issue_io(iocbs, sms):
            raise RuntimeError("a launch failed")
        return [self.wait(iocb) for iocb in iocbs]

    def scramble(self, rng: np.random.Generator) -> None:
        """New random bytes in every namespace."""
        for nsid in range(self.namespaces):
            self.soft.media(nsid + 1)[:] = rng.integers(0, 256, self.namespace_bytes, np.uint8)

    def poison(self) -> None:
        """Overwrite the memory with what no check expects."""
        self.memory.put(np.full(self.memory_bytes, POISON, np.uint8))

    def wrong(self, plan: Plan, held: Bytes) -> int:
        """How many fragments differ between memory, as it was got, and the namespaces."""
        count = 0
        rows = zip(plan.device, plan.offset, plan.place, plan.length, strict=True)
        for device, offset, place, length in rows:
            there = self.soft.media(int(device) + 1)[int(offset) : int(offset + length)]
            count += not np.array_equal(held[int(place) : int(place + length)], there)
        return count

    def untouched(self, plans: Sequence[Plan], held: Bytes) -> bool:
        """Whether all other bytes are poison still."""
        free = np.ones(self.memory_bytes, bool)
        for plan in plans:
            for place, length in zip(plan.place, plan.length, strict=True):
                free[int(place) : int(place + length)] = False
        return bool((held[free] == POISON).all())

    def close(self) -> None:
        """End the ring, then the controller."""
        self.queue.close()
        self.controller.close()
        self.soft.close()
