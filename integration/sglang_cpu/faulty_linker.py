"""A TuttiLinker over a device that is late, fails, and delivers wrong bytes; for the soak.

SGLang injects faults into storage backends itself, but not into linkers. This one is given to it
as a `dynamic` linker (see `flags_of`) and behaves as TuttiLinker does on a bad drive: Tutti's own
code is the same, only the transport below it is wrapped.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from errno import EIO
from typing import Any
from unittest import mock

import tutti_core.store
from tutti_core.io.posix import memory_at
from tutti_core.io.transport import Batch, BatchResult, Op, Transport
from tutti_sglang.linker import TuttiLinker

logger = logging.getLogger("tutti.faults")

REPORT_PERIOD_S = 10.0


@dataclasses.dataclass(frozen=True)
class Faults:
    """How bad the device is. Shares are of batches; one item of a batch is hit.

    delay_s  each batch ends up to this much later.
    failed   share of batches in which an item fails with EIO.
    flipped  share of reads in which an item's bytes arrive with one bit changed.
    """

    delay_s: float = 0.0
    failed: float = 0.0
    flipped: float = 0.0
    seed: int = 0


def flags_of(options: Mapping[str, Any], faults: Faults) -> list[str]:
    """Flags of a server with this linker; its PYTHONPATH must have the folder above this one."""
    config = {
        "linker": "FaultyLinker",
        "linker_module_path": "sglang_cpu.faulty_linker",
        "linker_extra_config": {**options, "faults": dataclasses.asdict(faults)},
    }
    return [
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend=dynamic",
        f"--unified-cache-external-linker-config={json.dumps(config)}",
    ]


class FaultyLinker(TuttiLinker):
    """TuttiLinker with one option more, `faults`."""

    def __init__(self, *args: Any, extra_config: dict[str, Any], **kwargs: Any) -> None:
        options = dict(extra_config)
        faults = Faults(**options.pop("faults"))
        opened = tutti_core.store.open_transport

        def open_faulty(*a: Any, **k: Any) -> Transport:
            return FaultyTransport(opened(*a, **k), faults)

        with mock.patch.object(tutti_core.store, "open_transport", open_faulty):
            super().__init__(*args, extra_config=options, **kwargs)


class FaultyTransport:
    """The real transport, made worse. What it does is counted, and told in the log."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._lock = threading.Lock()
        self._batches: dict[int, tuple[Batch, float]] = {}
        self._reported_s = 0.0
        self.done: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, batch: Batch) -> int:
        """As the real one; remembers when the batch may end."""
        with self._lock:
            end_s = time.monotonic() + self._random.uniform(0, self._faults.delay_s)
            ticket = self._inner.submit(batch)
            self._batches[ticket] = batch, end_s
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """As the real one, but not before the batch's time, and perhaps with a fault."""
        with self._lock:
            batch, end_s = self._batches[ticket]
        left_s = end_s - time.monotonic()
        if left_s > 0:
            time.sleep(min(left_s, max(timeout_s, 0.0)))
        if left_s > timeout_s:
            return None
        result = self._inner.wait(ticket, max(timeout_s - max(left_s, 0.0), 0.0))
        if result is None:
            return None
        with self._lock:
            del self._batches[ticket]
            return self._spoil(batch, result)

    def _spoil(self, batch: Batch, result: BatchResult) -> BatchResult:
        kind = "reads" if batch.op == Op.READ else "writes"
        self.done[kind] += 1
        status, checksum = result.status.copy(), result.checksum.copy()
        item = self._random.randrange(batch.item_count)
        if self._random.random() < self._faults.failed:
            self.done[f"failed {kind}"] += 1
            status[item] = -EIO
        elif batch.op == Op.READ and self._random.random() < self._faults.flipped:
            self.done["flipped reads"] += 1
            fragment = int(batch.fragment_start[item])
            address, length = int(batch.address[fragment]), int(batch.length_bytes[fragment])
            memory_at(address, length, writable=True)[self._random.randrange(length)] ^= 0x10
            checksum[item] ^= 1  # as it would be of the bytes that arrived
        self._report()
        return BatchResult(status, checksum)

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s > REPORT_PERIOD_S:
            self._reported_s = now_s
            logger.warning("injected so far: %s", json.dumps(dict(self.done)))
