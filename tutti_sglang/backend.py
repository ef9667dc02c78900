"""SGLang's HiCacheStorage over a PrefixStore: moves pages between its host pool and the store.

Every call answers once, with one answer a page, within a bound, and raises nothing into the engine:
a failure is False for its pages, a counter and a rate-limited log line. Only attaching raises, so
that a wrong setting or an unknown pool is refused in the open.

Threads    SGLang calls exists, get and set from three threads at once; all calls are safe for that.
Source     SGLang 0.5.23, mem_cache/hicache_storage.py (contract), managers/cache_controller.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from tutti_core import (
    BusyError,
    LoadTicket,
    Namespace,
    NamespaceStore,
    PageFragments,
    PageKeys,
    PrefixStore,
    SaveTicket,
    UnsupportedError,
)
from tutti_sglang.identity import model_identity, watch_weights
from tutti_sglang.options import Options, parse_options
from tutti_sglang.pools import HostPoolPages, describe_pool

logger = logging.getLogger("tutti.sglang")

KEY_BYTES = 32  # SGLang's page keys are SHA-256
STALL_LIMIT_S = 600.0
"""How long a load may hold the engine's memory before the store is given up."""

GET_PART_BYTES = 256 << 20
GET_TIME_S = 5.0
"""SGLang gives its storage threads 10 s to end when the cache is flushed, and may flush while a get
runs whose request it has given up (cache_controller.py, `_stop_storage_threads`). A get of many
bytes is therefore made in parts, and parts that would begin later than this are answered False."""

_LOG_PERIOD_S = 10.0

Result = TypeVar("Result")


class TuttiStorage(HiCacheStorage):
    """One rank's storage backend. Constructed by SGLang as `TuttiStorage(storage_config, {})`.

    Raises (constructor and registration only)
        ConfigError, UnsupportedError: what is wrong and how to mend it.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        self._config = storage_config
        if storage_config.dcp_size > 1:
            raise UnsupportedError("decode context parallelism is not supported yet")
        self.options: Options = parse_options(storage_config.extra_config, _writers(storage_config))
        self.store: PrefixStore | None = None  # opened once the host pool is known
        self._pages: HostPoolPages | None = None
        self._zero_copy: NamespaceStore | None = None
        self._flat: NamespaceStore | None = None
        self._enabled = True
        watch_weights(self)
        self._log_lock = threading.Lock()
        self._last_log_s = 0.0
        self._failures = 0
        self._metrics = _Metrics() if storage_config.enable_storage_metrics else None

    # ---- pools ----
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where the engine's host pages are, and open the store for them."""
        super().register_mem_pool_host(mem_pool_host)
        pages = describe_pool(mem_pool_host)  # refused before anything on disk is touched
        fields = _namespace_fields(self._config, self.options, mem_pool_host, pages)
        self.store = PrefixStore.open(self.options.store)
        try:
            # The generic calls move pages in another byte order, so they have a namespace apart.
            self._zero_copy = self.store.namespace(Namespace(**fields, layout=pages.layout))
            self._flat = self.store.namespace(Namespace(**fields, layout=f"{pages.layout}, flat"))
            for region in pages.regions:
                self.store.register(region)
            self._pages = pages
        except Exception:
            self.close()
            raise
        transport = self.store.stats().transport
        using = "; ".join([f"transport {transport.name}", *transport.notes])
        logger.info("tutti: store at %s, %s", self.options.store.path, using)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Accept the KV pool, which `register_mem_pool_host` described; refuse sidecar pools."""
        if str(host_pool_name) != "kv":
            self.close()
            raise UnsupportedError(
                f"pool {str(host_pool_name)!r} ({type(host_pool).__name__}) is not supported yet",
                hint="tutti stores plain MHA and MLA pools",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

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
        return self._move("get", self._load_all, keys, host_indices, extra_info)

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Save pages from the host pool; one answer a page. Stored pages cost a look-up."""
        return self._move("set", self._save_all, keys, host_indices, extra_info)

    def _exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> int:
        pages = self._zero_copy if self.options.zero_copy else self._flat
        assert pages is not None, "no host pool is registered"
        chain, first = self._chain(keys, extra_info)
        return pages.match(chain, first).pages

    def _move(
        self,
        operation: str,
        move: Callable[[NamespaceStore, PageKeys, int, PageFragments], list[bool]],
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Load or save pages of the host pool; one answer a page, whatever happens."""

        def call() -> list[bool]:
            assert self._pages is not None and self._zero_copy is not None
            chain, first = self._chain(keys, extra_info)
            start_s = time.perf_counter()
            memory = self._pages.fragments(host_indices)
            done = move(self._zero_copy, chain, first, memory)
            if self._metrics is not None:
                self._metrics.note(operation, sum(done), memory.page_bytes, start_s)
            return done

        return self._answer(operation, [False] * len(keys), call)

    # ---- generic: flat page tensors, when the zero-copy interface is not selected ----
    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Load one flat page into `target_location`; None if it is missing."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """Load flat pages into the tensors given; None for each page that is missing."""
        targets = [] if target_locations is None else list(target_locations)
        loaded = self._answer("get", [False] * len(keys), lambda: self._get_flat(keys, targets))
        return [targets[i] if ok else None for i, ok in enumerate(loaded)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Save one flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Save flat pages; True when all of them are stored."""
        tensors = [] if values is None else list(values)
        return all(self._answer("set", [False] * len(keys), lambda: self._set_flat(keys, tensors)))

    def _get_flat(self, keys: Sequence[str], targets: list[torch.Tensor]) -> list[bool]:
        assert self._flat is not None
        fragments = self._flat_fragments(keys, targets)
        return self._load_all(self._flat, PageKeys.from_hex(keys, False), 0, fragments)

    def _set_flat(self, keys: Sequence[str], tensors: list[torch.Tensor]) -> list[bool]:
        assert self._flat is not None
        fragments = self._flat_fragments(keys, [tensor.contiguous() for tensor in tensors])
        return self._save_all(self._flat, PageKeys.from_hex(keys, False), 0, fragments)

    def _flat_fragments(self, keys: Sequence[str], tensors: list[torch.Tensor]) -> PageFragments:
        assert self._flat is not None
        size = self._flat.namespace.page_bytes
        if len(tensors) != len(keys) or any(
            t.numel() * t.element_size() != size or not t.is_contiguous() for t in tensors
        ):
            raise ValueError(f"expected {len(keys)} contiguous pages of {size} bytes")
        address = np.array([[t.data_ptr()] for t in tensors], dtype=np.uint64)
        return PageFragments(address, np.array([size], dtype=np.uint64), tensors)

    # ---- the rest of the contract ----
    def clear(self) -> None:
        """Remove this rank's namespaces, and nothing of other models or ranks."""
        self._answer("clear", None, self._clear)

    def _clear(self) -> None:
        for pages in (self._zero_copy, self._flat):
            if pages is not None:
                logger.info("tutti: cleared %d pages", pages.clear())

    def get_stats(self) -> Any:
        """Return SGLang's StorageMetrics since the last call; None without `--enable-metrics`."""
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
    def _chain(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None
    ) -> tuple[PageKeys, int]:
        """The chain that ends with `keys`, and the number of ancestors in it.

        SGLang leaves `prefix_keys` out (or empty) at the root of its tree when it passes them at
        all; without the plugin it never passes them and a page's ancestors are unknown.
        """
        prefix = extra_info.prefix_keys if extra_info is not None else None
        if prefix:
            return PageKeys.from_hex([*prefix, *keys]), len(prefix)
        return PageKeys.from_hex(keys, self.options.passes_prefix_keys), 0

    def _save_all(
        self, pages: NamespaceStore, chain: PageKeys, first: int, memory: PageFragments
    ) -> list[bool]:
        """Save all pages of `memory`."""
        ticket: SaveTicket = pages.save(chain, memory, first)
        try:
            stored: list[bool] = ticket.wait(self.options.operation_timeout_s).tolist()
            return stored
        except BusyError:
            # The engine may reuse the memory after we answer, so these pages must not appear.
            ticket.cancel()
            raise

    def _load_all(
        self, pages: NamespaceStore, chain: PageKeys, first: int, memory: PageFragments
    ) -> list[bool]:
        """Load all pages of `memory`, two parts in flight; see GET_TIME_S."""
        count, loaded = memory.page_count, []
        step = max(GET_PART_BYTES // memory.page_bytes, 1)
        deadline_s = time.monotonic() + GET_TIME_S
        in_flight: deque[LoadTicket] = deque()
        for low in range(0, count, step):
            if len(in_flight) == 2:
                loaded += self._await_load(in_flight.popleft())
                if time.monotonic() > deadline_s:
                    break
            part = memory.part(low, min(low + step, count))
            in_flight.append(pages.load(chain, part, first + low, part.page_count))
        for ticket in in_flight:
            loaded += self._await_load(ticket)
        return loaded + [False] * (count - len(loaded))

    def _await_load(self, ticket: LoadTicket) -> list[bool]:
        """Wait until no transfer touches the engine's memory any more, however slow the device.

        An answer given earlier would let the engine hand the memory to another request while the
        device still writes to it.
        """
        deadline_s = time.monotonic() + STALL_LIMIT_S
        while True:
            try:
                loaded: list[bool] = ticket.wait(self.options.operation_timeout_s).tolist()
                return loaded
            except BusyError as error:
                self._note_failure("get", error)
                if time.monotonic() > deadline_s:
                    self.switch_off("the device does not answer")
                    raise

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


class _Metrics:
    """Pages and bandwidth of finished calls, handed to SGLang's collector and forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, list[tuple[int, float]]] = {"get": [], "set": []}

    def note(self, operation: str, pages: int, page_bytes: int, start_s: float) -> None:
        """A "get" or "set" of `pages` ended now."""
        elapsed_s = max(time.perf_counter() - start_s, 1e-9)
        with self._lock:
            calls = self._calls[operation]
            calls.append((pages, pages * page_bytes / elapsed_s / 1e9))
            del calls[:-1024]

    def take(self) -> Any:
        """Everything noted since the last call, as StorageMetrics (bandwidth in GB/s)."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            calls, self._calls = self._calls, {"get": [], "set": []}
        gets, sets = calls["get"], calls["set"]
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in gets],
            backup_pgs=[pages for pages, _ in sets],
            prefetch_bandwidth=[rate for _, rate in gets],
            backup_bandwidth=[rate for _, rate in sets],
        )


def _writers(config: HiCacheStorageConfig) -> int:
    """Ranks that save into one directory, taking all ranks to be on this node."""
    per_stage = 1 if config.is_mla_model else config.tp_size
    return int(per_stage * config.pp_size * config.attn_cp_size)


def _namespace_fields(
    config: HiCacheStorageConfig, options: Options, pool: Any, pages: HostPoolPages
) -> dict[str, Any]:
    """Everything but the layout that pages must have in common to be interchangeable."""
    shard = [f"layers {pool.start_layer}-{pool.end_layer}", f"pp {config.pp_rank}/{config.pp_size}"]
    if not config.is_mla_model:
        shard.append(f"tp {config.tp_rank}/{config.tp_size}")
    shard.append(f"cp {config.attn_cp_rank}/{config.attn_cp_size}")
    extra = {
        "pieces": str(len(pages.length_bytes)),
        "storage_format_tag": str(getattr(pool, "storage_format_tag", None)),
    }
    for name in ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim"):
        extra[name] = str(getattr(pool, name, None))
    model = model_identity(config.model_name, options)
    return {
        "model": model.name,
        "weights": model.weights,
        "dtype": str(pool.dtype),
        "page_tokens": pages.page_tokens,
        "page_bytes": pages.page_bytes,
        "shard": ", ".join(shard),
        "pool": f"kv {type(pool).__name__}",
        "key_bytes": KEY_BYTES,
        "extra": {**extra, **model.extra},
    }
