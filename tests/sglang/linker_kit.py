"""SGLang's real device pools on the CPU, and a TuttiLinker over them, for the tests of both.

Bytes are compared through torch's own indexing of the pools' tensors, never through addresses of
the code under test.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tutti_core import PrefixStore

TOKENS = 16  # of a page
SLOTS = 512
LAYERS = 4
MAMBA_SLOTS = 16
KINDS = ("mha", "mla", "swa", "mamba", "mamba_mha", "swa_mamba")


@dataclass
class Pools:
    """Device pools of one kind, and what SGLang hands to a linker with them."""

    kind: str
    kvcache: Any
    params: Any
    components: set[Any]
    buffers: dict[str, list[torch.Tensor]]
    """By pool name, tensors whose first axis is slots (token or state), in layer order."""

    def fill(self, seed: int = 1) -> None:
        """Random bytes everywhere, no two slots alike."""
        random = torch.Generator().manual_seed(seed)
        for tensors in self.buffers.values():
            for tensor in tensors:
                raw = tensor.view(torch.uint8)
                raw.copy_(torch.randint(0, 256, raw.shape, generator=random, dtype=torch.uint8))

    def slots(self, name: str, pages: Sequence[int]) -> torch.Tensor:
        """The slots of some pages of a pool: as SGLang passes them as `device_indices`."""
        if name == "mamba":
            return torch.tensor(pages, dtype=torch.int64)
        return torch.cat([torch.arange(p * TOKENS, (p + 1) * TOKENS) for p in pages])

    def read(self, name: str, page: int) -> bytes:
        """All bytes of one page, tensor after tensor."""
        slots = self.slots(name, [page])
        return b"".join(
            t[slots].contiguous().view(torch.uint8).numpy().tobytes() for t in self.buffers[name]
        )

    def wipe(self, name: str, pages: Sequence[int]) -> None:
        """Zero some pages."""
        for tensor in self.buffers[name]:
            tensor[self.slots(name, pages)] = 0


def make_pools(kind: str, *, dtype: Any = torch.bfloat16, **changes: Any) -> Pools:
    """Build real pools. `changes` go to the KV pool's constructor."""
    from sglang.srt.mem_cache.memory_pool import (
        HybridLinearKVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType as Kind

    common = {
        "size": SLOTS,
        "page_size": TOKENS,
        "dtype": dtype,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    requests: Any = SimpleNamespace()
    if kind == "mha":
        pool = MHATokenToKVPool(
            **{**common, "head_num": 2, "head_dim": 32, "layer_num": LAYERS, **changes}
        )
        return _pools(kind, pool, requests, {Kind.FULL}, {"kv": _kv_tensors(pool)})
    if kind == "mla":
        pool = MLATokenToKVPool(
            **{**common, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "layer_num": LAYERS, **changes}
        )
        return _pools(kind, pool, requests, {Kind.FULL}, {"kv": list(pool.kv_buffer)})
    if kind in ("swa", "swa_mamba"):
        del common["enable_memory_saver"]
        layers = {"swa_attention_layer_ids": [0, 2, 3], "full_attention_layer_ids": [1, 4]}
        if kind == "swa":
            layers = {"swa_attention_layer_ids": [0, 2, 4], "full_attention_layer_ids": [1, 3, 5]}
        pool = SWAKVPool(
            **{**common, "size_swa": SLOTS // 2, "head_num": 2, "head_dim": 32, **layers, **changes}
        )
        tensors = {"kv": _kv_tensors(pool.full_kv_pool), "swa": _kv_tensors(pool.swa_kv_pool)}
        if kind == "swa":
            return _pools(kind, pool, requests, {Kind.FULL, Kind.SWA}, tensors)
        requests = _state_pool([5])
        tensors["mamba"] = _state_tensors(requests)
        return _pools(kind, pool, requests, {Kind.FULL, Kind.SWA, Kind.MAMBA}, tensors)
    assert kind in ("mamba", "mamba_mha")
    requests = _state_pool([0, 1, 3, 4])
    pool = HybridLinearKVPool(
        **{
            **common,
            "head_num": 1,
            "head_dim": 80,
            "full_attention_layer_ids": [2, 5],
            "mamba_pool": requests.mamba_pool,
            "use_mla": kind == "mamba",
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 16,
            **changes,
        }
    )
    full = pool.full_kv_pool
    tensors = {"kv": list(full.kv_buffer) if kind == "mamba" else _kv_tensors(full)}
    tensors["mamba"] = _state_tensors(requests)
    return _pools(kind, pool, requests, {Kind.FULL, Kind.MAMBA}, tensors)


def _kv_tensors(pool: Any) -> list[torch.Tensor]:
    return [t for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for t in pair]


def _state_pool(layers: list[int]) -> Any:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=8,
        mamba_size=MAMBA_SLOTS,
        mamba_spec_state_size=8,
        max_context_len=1024,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            shape=shape,
            layers=layers,
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
        ),
        mamba_layer_ids=layers,
        enable_mamba_extra_buffer=False,
    )


def _state_tensors(requests: Any) -> list[torch.Tensor]:
    cache = requests.mamba_pool.mamba_cache
    return [
        state[layer]
        for layer in range(requests.mamba_pool.num_mamba_layers)
        for state in (cache.temporal, *cache.conv)
    ]


def _pools(
    kind: str,
    pool: Any,
    requests: Any,
    components: set[Any],
    buffers: dict[str, list[torch.Tensor]],
) -> Pools:
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=requests, page_size=TOKENS, pp_rank=0, pp_size=1, attn_cp_rank=0,
        attn_cp_size=1, tp_cache_group=None, attn_tp_cache_group=None,
        mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
    )  # fmt: skip
    return Pools(kind, pool, params, components, buffers)


def keys_of(name: str, count: int) -> list[str]:
    """A chain of page keys as SGLang makes them: 64 hexadecimal digits each."""
    keys, digest = [], hashlib.sha256(name.encode())
    for _ in range(count):
        digest.update(b"next")
        keys.append(digest.hexdigest())
    return keys


@contextmanager
def published(model: Path) -> Iterator[Any]:
    """SGLang's global configuration, as a scheduler process has it; yields the server arguments."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=str(model),
        device="cpu",
        page_size=TOKENS,
        attention_backend="torch_native",
        disable_overlap_schedule=True,
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    try:
        yield server_args
    finally:
        reset_context()


class Rig:
    """A linker over some pools, driven as SGLang's tree drives one.

    transport: the option's name, or what makes one from a configuration.
    """

    def __init__(
        self, server_args: Any, pools: Pools, folder: Path, *, transport: Any = None, **options: Any
    ) -> None:
        from tutti_sglang import linker as module

        self.pools = pools
        config = {"path": str(folder), "capacity": "64MiB", "segment": "1MiB", **options}
        if isinstance(transport, str):
            config["transport"], transport = transport, None
        with pytest.MonkeyPatch.context() as patch:
            if transport is not None:
                opened = PrefixStore.open
                patch.setattr(
                    module.PrefixStore,
                    "open",
                    lambda c: opened(c, transport_object=transport(c)),
                )
            self.linker = module.TuttiLinker(
                server_args, pools.params, components=pools.components, extra_config=config
            )
        self.layer_count = self.linker.layer_done_counter.num_layers

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: object) -> None:
        self.linker.close()

    # ---- transfers, as the tree's components build them ----
    def transfers(
        self,
        keys: Sequence[str],
        pages: Sequence[int] | None = None,
        *,
        window: int = 2,
        swa: int | None = None,
        state: int = 1,
    ) -> list[Any]:
        """For each component one transfer of a chain.

        Parameters
            pages: of the KV pool; None for a look-up.
            window: pages of the sliding window, which begin at page `swa` of that pool.
            state: slot of the Mamba state.
        """
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        slots = None if pages is None else self.pools.slots("kv", pages)
        found = [PoolTransfer(name=PoolName.KV, keys=list(keys), device_indices=slots)]
        if "swa" in self.pools.buffers:
            tail = list(keys[-window:])
            first = pages[-len(tail)] if swa is None and pages is not None else (swa or 0)
            slots = None
            if pages is not None:
                slots = self.pools.slots("swa", range(first, first + len(tail)))
            found.append(
                PoolTransfer(
                    name=PoolName.SWA,
                    keys=tail,
                    device_indices=slots,
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
        if "mamba" in self.pools.buffers:
            slots = None if pages is None else self.pools.slots("mamba", [state])
            found.append(
                PoolTransfer(
                    name=PoolName.MAMBA,
                    keys=[keys[-1]],
                    device_indices=slots,
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
        return found

    # ---- what the engine does ----
    def offload(self, keys: Sequence[str], pages: Sequence[int], **places: Any) -> bool:
        """Offload a node and wait for its result."""
        assert self.linker.offload(self.transfers(keys, pages, **places))
        return self.result()

    def result(self, timeout_s: float = 20.0) -> bool:
        """The next result of an offload."""
        wait_for(lambda: self.linker.num_completed_offloads() > 0, "offload", timeout_s)
        stored: bool = self.linker.pop_completed_offload()
        return stored

    def lookup(self, keys: Sequence[str], rid: str = "r", window: int = 2) -> list[int]:
        """Look a chain up."""
        lengths: list[int] = self.linker.lookup(rid, self.transfers(keys, window=window))
        return lengths

    def load(
        self, keys: Sequence[str], pages: Sequence[int], rid: str = "r", **places: Any
    ) -> bool:
        """Load pages and wait for every layer, as a forward pass does."""
        assert self.linker.load(rid, self.transfers(keys, pages, **places))
        return self.run_batch()

    def run_batch(self) -> bool:
        """Start what is queued, and run the forward pass over it."""
        counter = self.linker.layer_done_counter
        index = self.linker.start_layer_wise_loading()
        assert index >= 0
        counter.set_consumer(index)
        for layer in range(self.layer_count):
            counter.wait_until(layer)
        landed: bool = self.linker.finish_layer_wise_loading(index)
        return landed


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come in {timeout_s} s"
        time.sleep(0.002)
