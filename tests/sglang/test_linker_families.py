"""Families of models whose pools SGLang groups itself: an indexer beside latent KV, DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linker_kit import keys_of, published, wait_for
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang_cpu import families

from tutti_sglang.linker import TuttiLinker

KINDS = ("dsa", "v4")
PAGES = 6


@pytest.fixture(scope="module")
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


class Engine:
    """A linker over the pools of a family, driven as the tree drives it."""

    def __init__(self, server_args: Any, kind: str, folder: Path) -> None:
        self.family = families.build(kind)
        self.page = self.family.page_tokens
        params = SimpleNamespace(
            token_to_kv_pool_allocator=self.family.allocator,
            req_to_token_pool=self.family.requests,
            page_size=self.page,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            tp_cache_group=None,
            attn_tp_cache_group=None,
            mtp_draft_device_pools=(),
            sidecar_draft_device_pools=(),
        )
        self.linker = TuttiLinker(
            server_args,
            params,
            components=set(self.family.components),
            extra_config={"path": str(folder), "capacity": "256MiB", "segment": "4MiB"},
        )
        for tensor in self.buffers():
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for entry in self.linker._group.entries for buffer in entry.kv_buffer]

    def transfers(
        self, keys: Sequence[str], pages: Sequence[int] | None, window: int | None
    ) -> list[PoolTransfer]:
        """KV of some pages, and where there is a window the last page of it."""
        slots = None if pages is None else torch.cat([self.slots(p) for p in pages])
        found = [PoolTransfer(name=PoolName.KV, keys=list(keys), device_indices=slots)]
        if self.family.window_pages:
            slots = None if window is None else self.slots(window)
            found.append(
                PoolTransfer(
                    name=PoolName.SWA,
                    keys=[keys[-1]],
                    device_indices=slots,
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
        return found

    def slots(self, page: int) -> torch.Tensor:
        return torch.arange(page * self.page, (page + 1) * self.page)

    def read(self, source: PoolName, page: int) -> list[bytes]:
        """What the pools that are indexed by `source` hold of one of its pages, by SGLang."""
        found = []
        for entry in self.linker._group.entries:
            if entry.indices_from_pool == source:
                rows = slice(page, page + 1) if entry._row_span == 1 else self.slots(page)
                found += [
                    b[rows].contiguous().view(torch.uint8).numpy().tobytes()
                    for b in entry.kv_buffer
                ]
        return found

    def result(self) -> bool:
        wait_for(lambda: self.linker.num_completed_offloads() > 0, "offload")
        stored: bool = self.linker.pop_completed_offload()
        return stored


@pytest.mark.parametrize("kind", KINDS)
def test_every_pool_comes_back(kind: str, server_args: Any, store_folder: Path) -> None:
    engine = Engine(server_args, kind, store_folder)
    linker = engine.linker
    try:
        keys, source, target = keys_of(kind, PAGES), range(1, 1 + PAGES), range(11, 11 + PAGES)
        want = [engine.read(PoolName.KV, page) for page in source]
        window = engine.read(PoolName.SWA, 9)
        assert want[0] and bool(window) == (kind == "v4")
        linker.note_ancestors([])
        assert linker.offload(engine.transfers(keys, source, 9)) and engine.result()
        for buffer in engine.buffers():
            buffer.zero_()
        linker.note_ancestors([])
        lengths = linker.lookup("r", engine.transfers(keys, None, None))
        assert lengths == ([PAGES] if engine.family.window_pages else list(range(1, PAGES + 1)))
        assert linker.load("r", engine.transfers(keys, target, 20))
        index = linker.start_layer_wise_loading()
        assert linker.finish_layer_wise_loading(index)
        assert [engine.read(PoolName.KV, page) for page in target] == want
        assert engine.read(PoolName.SWA, 20) == window
        linker.note_ancestors([])
        assert linker.offload(engine.transfers(keys, target, 20)) and engine.result()
        assert linker.counters["offloads_known"] == 1
        assert linker.counters["failures"] == 0
    finally:
        linker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_missing_in_one_pool_cuts_the_prefix(
    kind: str, server_args: Any, store_folder: Path
) -> None:
    """Whatever pool it is that every page needs."""
    engine = Engine(server_args, kind, store_folder)
    linker = engine.linker
    try:
        names = [str(e.name) for e in linker._group.entries if e.indices_from_pool == PoolName.KV]
        assert len(names) > 1
        for name in names:
            keys = keys_of(f"{kind} {name}", PAGES)
            writes = linker._linked[name].writes
            for low, high in ((0, 3), (3, 4), (4, PAGES)):
                if low == 3:
                    object.__setattr__(linker._linked[name], "writes", False)
                linker.note_ancestors(keys[:low])
                transfers = engine.transfers(keys[low:high], range(1 + low, 1 + high), high)
                assert linker.offload(transfers) and engine.result()
                object.__setattr__(linker._linked[name], "writes", writes)
            linker.note_ancestors([])
            lengths = linker.lookup(name, engine.transfers(keys, None, None))
            assert lengths == ([3] if engine.family.window_pages else [1, 2, 3]), name
    finally:
        linker.close()
