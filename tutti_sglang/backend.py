"""SGLang's HiCacheStorage over a PrefixStore: moves pages between its host pools and the store.

Every call answers once, with one answer a page, within a bound, and raises nothing into the engine:
a failure is False for its pages, a counter and a rate-limited log line. Only attaching raises, so
that a wrong setting or an unknown pool is refused in the open.

Pools      Each has a namespace of its own. All that are known at attach are measured before the
           store is opened, so a refused one leaves nothing behind; later ones are added as they
           come. A pool that is refused closes everything.
Threads    SGLang calls exists, get and set from three threads at once; all calls are safe for that.
Source     SGLang 0.5.23, mem_cache/hicache_storage.py (contract), managers/cache_controller.py,
           mem_cache/hybrid_cache/hybrid_cache_controller.py (v2 calls).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from tutti_core import BusyError, NamespaceStore, PageKeys, PrefixStore, UnsupportedError
from tutti_sglang.flat import FlatCalls
from tutti_sglang.identity import (
    draft_identity,
    expects_draft,
    model_identity,
    processes_on_node,
    watch_weights,
)
from tutti_sglang.internals import HICACHE, require
from tutti_sglang.lookup import usable_prefix
from tutti_sglang.metrics import CallMetrics
from tutti_sglang.moves import Bools, Move, Mover
from tutti_sglang.options import Options, parse_options
from tutti_sglang.pools import is_logical
from tutti_sglang.shards import HeadGroup, Ranks, is_replicated, splits_heads, writer_count
from tutti_sglang.stored_pool import PoolPages, ServedModel, StoredPool

logger = logging.getLogger("tutti.sglang")

KV = "kv"
_LOG_PERIOD_S = 10.0

Result = TypeVar("Result")


class TuttiStorage(FlatCalls, HiCacheStorage):
    """One rank's storage backend. Constructed by SGLang as `TuttiStorage(storage_config, {})`.

    Raises (constructor and registration only)
        ConfigError, UnsupportedError: what is wrong and how to mend it.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        require(HICACHE)
        self._config = storage_config
        self._ranks = Ranks.of_config(storage_config)
        self.options: Options = parse_options(storage_config.extra_config, writers=1)
        self.store: PrefixStore | None = None  # opened once the host pools are known
        self._measured: dict[str, PoolPages] = {}
        self._pools: dict[str, StoredPool] = {}
        self._flat: NamespaceStore | None = None
        self._logical = False
        self._model: ServedModel | None = None
        self._mover = Mover(
            self.options.operation_timeout_s,
            lambda error: self._note_failure("get", error),
            self.switch_off,
        )
        self._enabled = True
        watch_weights(self)
        self._log_lock = threading.Lock()
        self._last_log_s = 0.0
        self._failures = 0
        self._metrics = CallMetrics() if storage_config.enable_storage_metrics else None

    # ---- pools ----
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where the engine's host pages of the main pool are."""
        super().register_mem_pool_host(mem_pool_host)
        self._logical = is_logical(mem_pool_host)
        if not self._logical:
            self._add(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Learn where the engine's host pages of another pool are."""
        if str(host_pool_name) != KV:
            self._add(str(host_pool_name), host_pool)
        elif host_pool is not self.mem_pool_host:
            self.close()
            raise UnsupportedError("pool 'kv' is not the pool that was registered first")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Open the store for the pools that are known; nothing on disk was touched before."""
        if self.store is not None:
            return
        try:
            self._open()
        except Exception:
            self.close()
            raise
        assert self.store is not None
        transport = self.store.stats().transport
        using = "; ".join([f"transport {transport.name}", *transport.notes])
        names = ", ".join(self._pools)
        logger.info("tutti: store at %s, pools %s, %s", self.options.store.path, names, using)

    def _add(self, name: str, pool: Any) -> None:
        """Measure a pool, and open its namespace if the store is open already."""
        try:
            if self._measured.get(name) is not None:
                raise UnsupportedError(f"pool {name!r} is registered already")
            replicated = is_replicated(name, pool, self._config.is_mla_model)
            self._check_writers(name, pool)
            heads = self._head_groups(pool) if name == KV else []
            measured = PoolPages.measure(name, pool, replicated=replicated, heads=heads)
            if self.store is not None:
                assert self._model is not None
                self._pools[name] = measured.open(self.store, self._model, self._ranks)
            self._measured[name] = measured
        except Exception:
            self.close()
            raise

    def _check_writers(self, name: str, pool: Any) -> None:
        """Refuse a pool that the ranks do not share and that SGLang has only one of them save."""
        alone = self._config.is_mla_model and self._ranks.tp_size > 1
        if alone and splits_heads(pool) and not self.options.backs_up_drafts:
            raise UnsupportedError(
                f"pool {name!r} ({type(pool).__name__}) has heads of its own on each rank, and "
                "SGLang saves only those of rank 0 beside a latent KV pool",
                hint="use --hicache-storage-backend tutti, whose plugin has all ranks save theirs",
            )

    def _head_groups(self, pool: Any) -> list[HeadGroup]:
        """The groups of heads of this rank, where pages are shared across sizes of the group."""
        count = self._config.tp_lcm_size
        if not count or self._config.is_mla_model:
            return []
        if pool.layout != "page_head":
            logger.warning("tutti: tp_lcm_size has no effect with host layout %r", pool.layout)
            return []
        own = count // self._ranks.tp_size
        return [HeadGroup(self._ranks.tp_rank * own + i, count) for i in range(own)]

    def _open(self) -> None:
        alike = all(pool.replicated for pool in self._measured.values())
        processes = processes_on_node(self._ranks)
        writers = writer_count(
            self._ranks, replicated=alike and not expects_draft(), process_count=processes
        )
        self.options = parse_options(self._config.extra_config, writers)
        identity = model_identity(self._config.model_name, self.options)
        model = self._model = ServedModel(identity, draft_identity(self.options))
        store = self.store = PrefixStore.open(self.options.store)
        for name, measured in self._measured.items():
            self._pools[name] = measured.open(store, model, self._ranks)
        if KV in self._measured:
            flat = self._measured[KV].flat_namespace(model, self._ranks)
            self._flat = store.namespace(flat)

    # ---- zero copy ----
    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading keys are stored without a gap.

        SGLang asks this for both interfaces, so the answer is that of the one it will load with.
        """
        return self._answer("exists", 0, lambda: self._exists(keys, extra_info))

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the host pool; one answer a page."""
        return self._move("get", self._mover.load, keys, host_indices, extra_info)

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Save pages from the host pool; one answer a page. Stored pages cost a look-up."""
        return self._move("set", self._mover.save, keys, host_indices, extra_info)

    def _exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> int:
        if self._logical:
            return 0  # without the other pools nothing is known of it
        chain, first = self._asked_chain(keys, extra_info)
        return self._match_kv(chain, first)

    def _match_kv(self, chain: PageKeys, first: int) -> int:
        if self.options.zero_copy:
            return self._pools[KV].match(chain, first)
        assert self._flat is not None
        return self._flat.match(chain, first).pages

    def _move(
        self,
        operation: str,
        move: Callable[[Sequence[Move]], list[Bools]],
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Load or save pages of the main pool; one answer a page, whatever happens."""

        def call() -> list[bool]:
            if self._logical:
                return [True] * len(keys)
            chain, first = self._moved_chain(keys, extra_info)
            start_s = time.perf_counter()
            moves = self._pools[KV].moves(chain, first, host_indices)
            done: list[bool] = np.logical_and.reduce(move(moves)).tolist()
            if self._metrics is not None:
                page_bytes = self._pools[KV].pages.page_bytes
                self._metrics.note(operation, sum(done), page_bytes, start_s)
            return done

        return self._answer(operation, [False] * len(keys), call)

    # ---- several pools at once ----
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which prefixes of `keys` can be restored with all pools; see `lookup`."""
        return self._answer(
            "exists",
            PoolTransferResult.empty(),
            lambda: self._exists_v2(keys, pool_transfers or [], extra_info),
        )

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load pages of several pools; for each of them one answer a page."""
        return self._move_v2("get", self._mover.load, transfers, extra_info)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Save pages of several pools; for each of them one answer a page."""
        return self._move_v2("set", self._mover.save, transfers, extra_info)

    def _exists_v2(
        self,
        keys: Sequence[str],
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> PoolTransferResult:
        chain, first = self._asked_chain(keys, extra_info)

        def present(name: str, pages: int) -> Bools:
            return self._pools[name].contains(chain.upto(first + pages), first)

        kv_pages = None if self._logical else self._match_kv(chain, first)
        return usable_prefix(len(keys), kv_pages, transfers, present)

    def _move_v2(
        self,
        operation: str,
        move: Callable[[Sequence[Move]], list[Bools]],
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> dict[str, list[bool]]:
        """Load or save pages of several pools. One that cannot be moved leaves the others alone."""
        none: list[Any] = []
        moves: list[Move] = []
        spans: list[slice] = []  # which of the moves are a transfer's
        for transfer in transfers:
            ask = partial(self._moves_of, transfer, extra_info)
            found: list[Move] = self._answer(operation, none, ask)
            spans.append(slice(len(moves), len(moves) + len(found)))
            moves += found
        results: list[Bools] = self._answer(operation, none, lambda: move(moves))
        answers: dict[str, list[bool]] = {}
        for transfer, span in zip(transfers, spans, strict=True):
            parts = results[span]  # none where it could not be moved, or nothing was
            answer = np.logical_and.reduce(parts).tolist() if parts else None
            answers[transfer.name] = answer or [False] * len(transfer.keys or ())
        return answers

    def _moves_of(
        self, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[Move]:
        keys = transfer.keys or []
        if not keys:
            return []
        pool = self._pools.get(str(transfer.name))
        if pool is None or transfer.host_indices is None:
            raise ValueError(f"pool {str(transfer.name)!r} is not registered, or has no slots")
        chain, first = self._moved_chain(keys, extra_info)
        return pool.moves(chain, first, transfer.host_indices)

    # ---- the rest of the contract ----
    def clear(self) -> None:
        """Remove this rank's namespaces, and nothing of other models or ranks."""
        self._answer("clear", None, self._clear)

    def _clear(self) -> None:
        pages = sum(pool.clear() for pool in self._pools.values())
        if self._flat is not None:
            pages += self._flat.clear()
        logger.info("tutti: cleared %d pages", pages)

    def get_stats(self) -> Any:
        """Return SGLang's StorageMetrics since the last call; None without `--enable-metrics`.

        Pages and bandwidth are those of the main pool.
        """
        return None if self._metrics is None else self._metrics.take()

    def close(self) -> None:
        """Finish what is in flight and let go of the store. Idempotent."""
        self._enabled = False
        if self.store is None:
            return
        try:
            self.store.close()  # which forgets the registered memory once nothing uses it
        except Exception:
            logger.exception("tutti: closing the store failed")

    def switch_off(self, reason: str) -> None:
        """Answer "not stored" to everything from now on, until SGLang attaches anew."""
        if self._enabled:
            self._enabled = False
            logger.warning("tutti: nothing is stored or loaded until the next attach: %s", reason)

    # ---- inside ----
    def _asked_chain(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None
    ) -> tuple[PageKeys, int]:
        """The chain that a look-up of `keys` is about, and the number of ancestors in it.

        SGLang leaves `prefix_keys` out at the root of its tree when it passes them at all. Without
        the plugin the ancestors are unknown: SGLang passes none, or leaves some out.
        """
        if not self.options.passes_prefix_keys:
            return PageKeys.from_hex(keys, False), 0
        prefix = (extra_info.prefix_keys if extra_info is not None else None) or []
        return PageKeys.from_hex([*prefix, *keys]), len(prefix)

    def _moved_chain(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None
    ) -> tuple[PageKeys, int]:
        """The chain that ends with pages that are loaded or saved; see `_asked_chain`.

        At the root `prefix_keys` is empty here. Where it is left out nothing is known of what comes
        before the pages, which may be the last ones of a chain.
        """
        prefix = extra_info.prefix_keys if extra_info is not None else None
        if prefix is None or not self.options.passes_prefix_keys:
            return PageKeys.from_hex(keys, False), 0
        return PageKeys.from_hex([*prefix, *keys]), len(prefix)

    def _answer(self, operation: str, otherwise: Result, call: Callable[[], Result]) -> Result:
        """The result of `call`, or `otherwise` when it fails for any reason."""
        if not self._enabled:
            return otherwise
        try:
            return call()
        except Exception as error:
            self._note_failure(operation, error)
            return otherwise

    def _note_failure(self, operation: str, error: Exception) -> None:
        with self._log_lock:
            self._failures += 1
            now_s = time.monotonic()
            if now_s - self._last_log_s < _LOG_PERIOD_S and self._failures > 1:
                return
            self._last_log_s = now_s
            failures = self._failures
        logger.error(
            "tutti: %s failed (%d failures so far): %s",
            operation,
            failures,
            error,
            exc_info=not isinstance(error, BusyError),
        )
