"""Both routes of the SGLang plugin on small stores, whose devices can be made to fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import linker_kit
import pytest
from sglang.srt.mem_cache.hicache_storage import PoolTransferResult
from sglang_cpu import host_pools
from sglang_cpu.make_model import ensure_model
from store_kit import memory_devices
from v2_kit import attach, chain, prefix, transfer

from tutti_core import PrefixStore
from tutti_core.testing import FaultPlan, FaultyDevices
from tutti_sglang import backend

make_host_pool = host_pools.make
make_device_pools = linker_kit.make_pools
keys_of = chain

__all__ = ["Linkers", "Rank", "ensure_model", "keys_of", "make_device_pools", "make_host_pool"]


class Rank:
    """One rank's backend with its host pools, called as SGLang calls it; the main pool is "kv".

    Parameters
        faulty: keep the pages on devices in memory, in `devices`, that fail on command; or by a
            plan.
        changes: of SGLang's storage configuration; `extra` of the options.
    """

    def __init__(
        self,
        folder: Path,
        pools: dict[str, Any] | Any = None,
        *,
        faulty: FaultPlan | bool = False,
        **changes: Any,
    ) -> None:
        if not isinstance(pools, dict):
            pools = {"kv": pools if pools is not None else make_host_pool("mha", "page_first")}
        self.pools = pools
        self.devices: FaultyDevices | None = None
        self._plan = faulty if isinstance(faulty, FaultPlan) else FaultPlan()
        with pytest.MonkeyPatch.context() as patch:
            if faulty:
                patch.setattr(backend.PrefixStore, "open", self._open_faulty)
            self.storage = attach(folder, pools, **changes)
        assert self.storage.store is not None
        self.store: PrefixStore = self.storage.store

    def _open_faulty(self, config: Any) -> PrefixStore:
        self.devices = memory_devices(config, plan=self._plan)
        return PrefixStore(config, self.devices)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exception: object) -> None:
        self.storage.close()

    def fill(self, seed: int) -> None:
        """Random bytes in all pools."""
        for number, pool in enumerate(self.pools.values()):
            host_pools.fill(pool, 100 * seed + number)

    def read(self, page: int, name: str = "kv") -> bytes:
        """What SGLang itself finds in a page of a pool."""
        return bytes(host_pools.page_bytes(self.pools[name], page))

    def set(self, keys: Sequence[str], pages: Sequence[int], before: Sequence[str] = ()) -> Any:
        """Save pages of the main pool; `before` are the keys of their ancestors."""
        return self.storage.batch_set_v1(list(keys), self.slots(pages), prefix(list(before)))

    def get(self, keys: Sequence[str], pages: Sequence[int], before: Sequence[str] = ()) -> Any:
        """Load pages of the main pool."""
        return self.storage.batch_get_v1(list(keys), self.slots(pages), prefix(list(before)))

    def exists(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        """Leading pages that are stored."""
        found: int = self.storage.batch_exists(list(keys), prefix(list(before)))
        return found

    def set_pool(self, name: str, keys: Sequence[str], pages: Sequence[int]) -> Any:
        """Save pages of any pool, with the v2 call."""
        moved = transfer(name, self.pools[name], list(keys), list(pages))
        return self.storage.batch_set_v2([moved], prefix([]))[name]

    def get_pool(self, name: str, keys: Sequence[str], pages: Sequence[int]) -> Any:
        """Load pages of any pool, with the v2 call."""
        moved = transfer(name, self.pools[name], list(keys), list(pages))
        return self.storage.batch_get_v2([moved], prefix([]))[name]

    def exists_with(self, keys: Sequence[str], name: str, policy: str, last: int) -> Any:
        """What can be restored together with the pool `name`, asked for the `last` keys of it."""
        pages = list(range(last))
        asked = transfer(name, self.pools[name], list(keys[-last:]), pages, policy)
        found: PoolTransferResult = self.storage.batch_exists_v2(list(keys), [asked], prefix([]))
        return found

    def slots(self, pages: Sequence[int]) -> Any:
        """Host indices of whole pages of the main pool."""
        return host_pools.slots(self.pools["kv"], list(pages))


class Linkers:
    """Makes linkers as a scheduler process does."""

    def __init__(self, server_args: Any) -> None:
        self._server_args = server_args

    def __call__(
        self, pools: Any, folder: Path, *, faulty: bool = False, **options: Any
    ) -> linker_kit.Rig:
        """A linker over device pools, to be driven as SGLang's tree drives one.

        Parameters
            faulty: keep the pages on devices in memory, in `devices` of what is returned.
        """
        found: list[FaultyDevices] = []

        def transport(config: Any) -> FaultyDevices:
            found.append(memory_devices(config))
            return found[0]

        rig = linker_kit.Rig(
            self._server_args, pools, folder, transport=transport if faulty else None, **options
        )
        rig.devices = found[0] if faulty else None
        return rig

    def construct(self, pools: Any, **options: Any) -> Any:
        """A TuttiLinker alone, with nothing but these options."""
        from tutti_sglang.linker import TuttiLinker

        return TuttiLinker(
            self._server_args, pools.params, components=pools.components, extra_config=options
        )


@contextlib.contextmanager
def linkers(model: Path) -> Iterator[Linkers]:
    """What makes linkers, for the length of a with statement."""
    with linker_kit.published(model) as server_args:
        yield Linkers(server_args)
