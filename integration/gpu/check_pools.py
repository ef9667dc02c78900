"""Device pools as an engine has them, with known bytes; and stores and loads of their pages."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti_core import (
    LayerRead,
    LayerReader,
    Namespace,
    NamespaceStore,
    PageFragments,
    PageKeys,
    PrefixStore,
    group_layers,
)
from tutti_sglang.staging import Staging
from tutti_sglang.staging_rows import DevicePages, DevicePool, page_rows, row_bytes

MIB = 1 << 20
POISON = 0xA5
WAIT_S = 120.0


@dataclass(frozen=True)
class Geometry:
    """A pool: for each layer, buffers of `token_bytes` a token; pages of `page_tokens` tokens."""

    name: str
    layers: int
    token_bytes: tuple[int, ...]
    page_tokens: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page."""
        return sum(self.token_bytes) * self.page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layers * self.layer_bytes


GEOMETRIES = (
    Geometry("mha 16 KiB", 32, (256, 256), 64),
    Geometry("mha 128 KiB", 8, (2048, 2048), 64),
    Geometry("mla", 27, (1152,), 64),
    Geometry("odd sizes", 5, (333, 72, 2), 3),
)


class EnginePool:
    """The tensors of a pool on a device, poisoned, and how Tutti sees them."""

    def __init__(self, geometry: Geometry, pages: int, device: torch.device) -> None:
        self.geometry, self.pages, self.device = geometry, pages, device
        slots = pages * geometry.page_tokens
        self.layers = group_layers([geometry.layer_bytes] * geometry.layers)
        self.views: list[list[torch.Tensor]] = []
        """By layer: each buffer as bytes, one row a page."""
        for _ in range(geometry.layers):
            buffers = [
                torch.full((slots, size), POISON, dtype=torch.uint8, device=device)
                for size in geometry.token_bytes
            ]
            self.views.append([page_rows(buffer, geometry.page_tokens) for buffer in buffers])
        parts = [[view for layer in group for view in self.views[layer]] for group in self.layers]
        self.pool = DevicePool(parts)

    def poison(self) -> None:
        """Forget all pages."""
        for view in self.flat():
            view.fill_(POISON)

    def flat(self) -> list[torch.Tensor]:
        """All buffers, in the order of a page's bytes."""
        return [view for layer in self.views for view in layer]

    def content(self, count: int, seed: int) -> list[torch.Tensor]:
        """Random bytes of `count` pages, as one (count, row bytes) tensor a buffer."""
        source = torch.Generator(device=self.device).manual_seed(seed)
        return [
            torch.randint(
                0, 256, (count, row_bytes(view)), dtype=torch.uint8, device=self.device,
                generator=source,
            )
            for view in self.flat()
        ]  # fmt: skip

    def write(self, rows: torch.Tensor, content: Sequence[torch.Tensor]) -> None:
        """What a forward pass does: put pages into rows, on the current stream."""
        for view, data in zip(self.flat(), content, strict=True):
            view.index_copy_(0, rows, data)

    def same(
        self, rows: torch.Tensor, content: Sequence[torch.Tensor], layer: int | None = None
    ) -> bool:
        """Whether rows hold the content; of one layer or of all. Waits for the current stream."""
        each = len(self.geometry.token_bytes)
        chosen = slice(None) if layer is None else slice(layer * each, (layer + 1) * each)
        pairs = zip(self.flat()[chosen], content[chosen], strict=True)
        return all(torch.equal(view.index_select(0, rows), data) for view, data in pairs)

    def poisoned_except(self, rows: np.ndarray) -> bool:
        """Whether all other rows are as they were."""
        others = np.setdiff1d(np.arange(self.pages), rows)
        index = torch.from_numpy(others).to(self.device)
        return all(bool((view.index_select(0, index) == POISON).all()) for view in self.flat())

    def fragments(self, rows: np.ndarray) -> PageFragments:
        """Where the pages lie, for a transport that reaches device memory."""
        base = np.array([view.data_ptr() for view in self.flat()], dtype=np.uint64)
        step = np.array([view.stride(0) for view in self.flat()], dtype=np.uint64)
        lengths = np.array([row_bytes(view) for view in self.flat()], dtype=np.uint64)
        address = base + rows.astype(np.uint64)[:, None] * step
        return PageFragments(np.asfortranarray(address), lengths, self)


class Sink:
    """When each layer was complete, and whether `look` liked what it saw then."""

    def __init__(self, look: Callable[[int], bool] | None = None) -> None:
        self.at_s: list[float] = []
        self.wrong: list[int] = []
        self.error: BaseException | None = None
        self._look = look

    def complete(self, layer: int) -> None:
        """Called by the reader's thread."""
        self.at_s.append(time.perf_counter())
        if self._look is not None and not self._look(layer):
            self.wrong.append(layer)

    def fail(self, error: BaseException) -> None:
        """Called by the reader's thread."""
        self.error = error


class Route:
    """A store, a pool and the memory path between them."""

    def __init__(
        self, store: PrefixStore, pool: EnginePool, path: str, *, ring_bytes: int, api: Any = None
    ) -> None:
        self.store, self.pool, self.path = store, pool, path
        geometry = pool.geometry
        self.pages: NamespaceStore = store.namespace(
            Namespace(
                model=geometry.name,
                page_tokens=geometry.page_tokens,
                page_bytes=geometry.page_bytes,
                parts=pool.pool.part_bytes,
                layout=f"gpu check, {geometry.name}",
            )
        )
        self.staging = Staging(
            [pool.pool],
            register=store.register,
            unregister=store.unregister,
            ring_bytes=ring_bytes,
            api=api,
        )
        self._regions = []
        if path != "staging":
            memory = [(view.data_ptr(), view.numel()) for view in pool.flat()]
            self._regions = [store.register(piece) for piece in memory]
        self.reader = LayerReader(geometry.layers, stager=self.staging, timeout_s=WAIT_S)

    def save(self, keys: PageKeys, rows: np.ndarray, after: tuple[Any, ...] = ()) -> bool:
        """Save pages out of the pool; whether all are stored."""
        target = DevicePages(self.pool.pool, rows, after)
        return bool(self.staging.save(self.pages, keys, 0, target, timeout_s=WAIT_S).all())

    def submit(
        self, keys: PageKeys, rows: np.ndarray, sink: Sink, after: tuple[Any, ...] = ()
    ) -> None:
        """Begin to load pages into rows of the pool."""
        staged = self.path == "staging"

        def make() -> list[LayerRead]:
            if not staged:
                for event in after:
                    event.synchronize()
            memory = None if staged else self.pool.fragments(rows)
            target = DevicePages(self.pool.pool, rows, after) if staged else None
            return [LayerRead(self.pages.load_parts(keys, memory), self.pool.layers, target)]

        self.reader.submit(make, sink)

    def load(
        self, keys: PageKeys, rows: np.ndarray, sink: Sink, after: tuple[Any, ...] = ()
    ) -> Sink:
        """Load pages and wait for the end."""
        self.submit(keys, rows, sink, after)
        if not self.reader.wait_idle(WAIT_S):
            raise TimeoutError(f"a load has not ended after {WAIT_S} s")
        return sink

    def close(self) -> None:
        """Let go of everything but the store and the pool."""
        self.reader.close(WAIT_S)
        for region in self._regions:
            self.store.unregister(region)
        if not self.staging.close(WAIT_S):
            raise RuntimeError("staging did not let go of its memory")


@contextmanager
def opened(
    folder: Path, pool: EnginePool, path: str, *, pages: int, ring_bytes: int = 64 * MIB
) -> Iterator[Route]:
    """A new store for some pages of a pool, and the route to it."""
    transport = "gds" if path == "gds" else "auto"
    size = pages * (pool.pool.page_bytes + 4096 * (2 + len(pool.pool.part_bytes)))
    segment = 64 * MIB if size > 1024 * MIB else 8 * MIB
    capacity = size + size // 4 + 4 * segment + 64 * MIB
    with PrefixStore.open(
        folder, capacity=capacity, segment=segment, catalog=32 * MIB, transport=transport
    ) as store:
        route = Route(store, pool, path, ring_bytes=ring_bytes)
        try:
            yield route
        finally:
            route.close()


def chain(name: str, count: int) -> PageKeys:
    """Page keys that no other name has."""
    return PageKeys(random.Random(name).randbytes(16 * count), 16)
