"""TuttiStorage with several real host pools, for the tests of the v2 calls."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang_cpu import host_pools

from tutti_sglang.backend import TuttiStorage
from tutti_sglang.options import PREFIX_KEYS, RANK_DRAFTS


def storage_config(folder: Path, **changes: Any) -> HiCacheStorageConfig:
    extra = {
        "path": str(folder),
        "capacity": "64MiB",
        "durability": "none",
        PREFIX_KEYS: True,
        RANK_DRAFTS: True,
        "interface_v1": 1,
        **changes.pop("extra", {}),
    }
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "org/m",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**fields, **changes, "extra_config": extra})


def attach(folder: Path, pools: dict[str, Any], **changes: Any) -> TuttiStorage:
    """A backend with these pools registered in the order in which SGLang does it."""
    storage = TuttiStorage(storage_config(folder, **changes), {})
    register(storage, pools)
    return storage


def register(storage: Any, pools: dict[str, Any]) -> None:
    storage.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, PoolName(name))
    storage.on_host_pools_registered()


def chain(count: int, name: str = "a") -> list[str]:
    keys, previous = [], b""
    for i in range(count):
        previous = hashlib.sha256(previous + f"{name}{i}".encode()).digest()
        keys.append(previous.hex())
    return keys


def prefix(keys: list[str] | None) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=keys)


def transfer(
    name: str, pool: Any, keys: list[str], pages: list[int], policy: str = "all_pages"
) -> PoolTransfer:
    return PoolTransfer(
        name=PoolName(name),
        host_indices=host_pools.slots(pool, pages),
        keys=keys,
        hit_policy=PoolHitPolicy(policy),
    )
