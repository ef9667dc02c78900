"""An NVMe controller in this process, for tests of what drives one: registers, queues, faults.

It is strict where drives may be lax (every rule of PRPs and SGLs, memory that was not registered),
and does on demand what drives do once a month. Over memory, or over files that stay the caller's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from tutti_core._native import NvmeController, SoftController
from tutti_core.gio.executor import Executor
from tutti_core.io.gpu import GPU_QUEUE_PAIRS, GpuTransport
from tutti_core.io.gpu_device import Opened, open_soft
from tutti_core.io.transport import Device, Transport, TransportOptions
from tutti_core.testing.conformance import Subject

FOREVER = 1 << 30
"""As the count of a fault: more commands than any test sends."""
READ, READ_ERROR = 2, 0x281

NvmeFault = Literal[
    "status",
    "drop",
    "lose",
    "delay",
    "hold",
    "repeat",
    "torn",
    "wrong_id",
    "wrong_queue",
    "wrong_head",
    "short",
    "flip",
    "fatal",
    "gone",
]
"""What can go wrong: a status; moved and never completed; neither moved nor completed; served late;
served when `release` is called; completed twice; a completion in two steps; one with a wrong id,
queue or SQ head besides; half of the bytes; a flipped bit; CSTS.CFS; registers of all ones."""


class SoftNvme:
    """One controller in software, of one or more namespaces.

    Parameters
        namespace_bytes: of each namespace.
        settings: as of `_native.SoftController`: namespace_count, block_bytes, transfer_shift
            (MDTS), queue_entries_max, queue_pairs_max, sgl, shadow_doorbells, serial, files, and
            null_backend.
    Raises
        ValueError: a setting is out of bounds.
    Threads    any. It runs on a thread of its own, until it and all controllers on it are closed.
    """

    def __init__(self, namespace_bytes: int, **settings: Any) -> None:
        self.native = SoftController(namespace_bytes=namespace_bytes, **settings)
        self.namespace_bytes = namespace_bytes
        self._media: Any = None

    def inject(
        self,
        kind: NvmeFault,
        *,
        opcode: int = -1,
        skip: int = 0,
        count: int = 1,
        status: int = 0,
        turns: int = 0,
    ) -> None:
        """Let `count` commands go wrong, after `skip` that fit; opcode 0 flush, 1 write, 2 read."""
        self.native.inject(kind, opcode=opcode, skip=skip, count=count, status=status, turns=turns)

    def release(self) -> None:
        """Serve what is held."""
        self.native.release()

    def heal(self) -> None:
        """Forget faults that have not struck yet, and serve what is held."""
        self.native.clear_faults()
        self.native.release()

    def plug_in(self) -> None:
        """Bring the device back after "gone"; its thread does it at its next turn."""
        self.native.plug_in()

    def media(self, nsid: int = 1) -> Any:
        """The bytes of a namespace that lies in memory: (namespace_bytes,) uint8."""
        return self.native.media(nsid)

    def stats(self) -> dict[str, int]:
        """commands, faults, bad_pointers, unmapped, doorbells."""
        return self.native.stats()

    def open(self, **options: Any) -> NvmeController:
        """Bring the controller up; options as of `_native.NvmeController`. Raises OSError."""
        return NvmeController(self.native, **options)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self.native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def gpu_transport(
    drives: Sequence[SoftNvme],
    options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
    *,
    queue_entries: int = 64,
    timeout_s: float = 10.0,
) -> GpuTransport:
    """The gpu transport with the first namespace of each controller as a device."""
    devices = [Device(f"soft {at}", one.namespace_bytes) for at, one in enumerate(drives)]

    def open_device(device: Device, options: TransportOptions) -> Opened:
        controller = drives[devices.index(device)].open(queue_entries=queue_entries)
        return Opened(controller, 1, "a controller in software", controller.close)

    return GpuTransport(devices, options, open_device=open_device, timeout_s=timeout_s)


def gpu_subject(
    directory: Path,
    options: TransportOptions = TransportOptions(),  # noqa: B008 (frozen)
    *,
    executor: Callable[[], Executor | None] = lambda: None,
) -> Subject:
    """For the conformance suite: the gpu transport on sparse files in `directory`.

    Its controllers in software hold commands where batches have to stall, and fail reads.

    Parameters
        executor: makes one for each transport; None: CPU threads.
    """
    numbers = itertools.count()
    drives: dict[int, list[SoftController]] = {}

    def make(capacities_bytes: Sequence[int]) -> Transport:
        devices, softs = [], []
        for capacity in capacities_bytes:
            path = directory / f"drive{next(numbers)}"
            with path.open("wb") as file:
                file.truncate(capacity)
            devices.append(Device(str(path), capacity))

        def open_device(device: Device, options: TransportOptions) -> Opened:
            opened = open_soft(
                device, queue_depth=options.queue_depth, queue_pairs=1 + GPU_QUEUE_PAIRS
            )
            assert opened.soft is not None
            softs.append(opened.soft)
            return opened

        transport = GpuTransport(devices, options, open_device=open_device, executor=executor())
        drives[id(transport)] = softs
        return transport

    @contextmanager
    def stall(transport: Transport) -> Iterator[None]:
        softs = drives[id(transport)]
        for soft in softs:
            soft.inject("hold", count=FOREVER)
        try:
            yield
        finally:
            for soft in softs:
                soft.clear_faults()
                soft.release()

    def fail_reads(transport: Transport, device: int) -> None:
        drives[id(transport)][device].inject(
            "status", opcode=READ, count=FOREVER, status=READ_ERROR
        )

    return Subject(make, stall, fail_reads)
