"""SGLang's direct route: its device pools linked to the store, loads layer by layer, no host pool.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "TuttiLinker",
        "linker_module_path": "tutti_sglang.linker",
        "linker_extra_config": {"path": "/mnt/nvme/tutti", "capacity": "2TiB"}}'

The engine calls from one thread, waits for layers without a limit of its own, and answers a request
whose load fails with an error. So what `lookup` reports is leased until its load ends; a load ends,
well or not, within a bound; and pages that cannot be read are not reported again.

Invariants
    - Nothing is raised into the engine, but by the constructor.
    - What `load`, `start_layer_wise_loading`, `cancel_queued_load` and `offload` answer depends on
      their arguments and on earlier calls alone, never on how this rank's store fares: the ranks of
      a group count results and so must stay in step. What a rank could not do is a failed load,
      or an offload whose result is False.

Source     SGLang 0.5.23, mem_cache/unified_cache/unified_cache_linker.py (contract),
           managers/scheduler.py, mem_cache/unified_radix_cache.py (order of the calls).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from tutti_core import (
    BusyError,
    LayerLoadError,
    LayerRead,
    LayerReader,
    PageKeys,
    PrefixStore,
    StoreClosedError,
)
from tutti_sglang.chain import Chain
from tutti_sglang.device_pools import DevicePoolPages, build_group, describe_entry, regions
from tutti_sglang.identity import model_identity, watch_weights
from tutti_sglang.internals import LINKER, require
from tutti_sglang.layer_counter import CounterSink, LoadCounter
from tutti_sglang.leases import Lease, Leases
from tutti_sglang.linked import LinkedPool, Lookup, namespace_of
from tutti_sglang.linker_setup import MemoryPath, model_name, process_count, ranks_of
from tutti_sglang.offload import Job, Offloader, PoolSave, Result
from tutti_sglang.options import parse_options
from tutti_sglang.shards import Ranks, is_replicated, shard_text, splits_heads, writer_count

logger = logging.getLogger("tutti.sglang")

LOAD_TIMEOUT_S = 600.0
"""For one part of a load to arrive; after it the load fails. As long as on the other route: ending
earlier would let the engine reuse memory that the device may still write to."""
WAIT_LIMIT_S = 3 * LOAD_TIMEOUT_S
"""For the engine to wait for a layer. Never reached: the reader fails a batch at the latest when it
has waited for a part, and then once more for what else is in flight."""
DRAIN_S = 5.0
"""How long `reset` and `close` let queued offloads be saved before they are forgotten."""
LEASED_SHARE = 0.25
"""Of this process's part of the store's capacity that leases may hold."""
WAITING_SHARE = 0.5
"""Of the device pools' bytes that may wait to be saved. The engine cannot use them meanwhile."""
READ_PAGES_MAX = 16_384  # of one LayerRead
READ_FRAGMENTS_MAX = 1 << 20

_LOG_PERIOD_S = 10.0

T = TypeVar("T")


@dataclass(slots=True)
class _QueuedLoad:
    """What `load` was asked for a request: transfers of physical pools, and the look-up's lease."""

    transfers: list[PoolTransfer]
    lease: Lease | None
    error: Exception | None = None

    def release(self) -> None:
        """Let the leased pages go. Idempotent."""
        if self.lease is not None:
            self.lease.release()

    def chain_of(self, keys: Sequence[str]) -> tuple[PageKeys, int]:
        """(chain, first) of the pages of one transfer."""
        if self.lease is None:
            return PageKeys.from_hex(keys, rooted=False), 0
        return self.lease.chain.run(keys)


class TuttiLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One rank's linker. Constructed by SGLang, see the top of the file.

    Parameters
        extra_config: options, the same as for the other route.
    Raises (constructor only)
        ConfigError, UnsupportedError: what is wrong and how to mend it.
    Threads    the engine's scheduler calls from one; `switch_off` may come from any.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        require(LINKER)
        self.forward_stream = forward_stream
        self.counters: Counter[str] = Counter()
        self._log_lock = threading.Lock()
        self._last_log_s = 0.0
        self._enabled = True
        self._closed = False
        self._ancestors: Sequence[str] | None = None
        self._queued: dict[str, _QueuedLoad] = {}
        self._last_sweep_s = 0.0

        page_size = int(params.page_size)
        self._group = build_group(params, page_size, components)
        self.pools: dict[Any, Any] = self._group.entry_map
        pages = {str(name): describe_entry(entry) for name, entry in self.pools.items()}
        ranks, shared = ranks_of(params), self._shared_pools()
        writers = writer_count(
            ranks, replicated=all(shared.values()), process_count=process_count(server_args)
        )
        self.options = parse_options(extra_config, writers)
        model = model_identity(model_name(server_args), self.options)
        with ExitStack() as undo:
            self.store = PrefixStore.open(self.options.store)
            undo.callback(self.store.close)
            self._path = MemoryPath(self.store, list(pages.values()))
            undo.callback(self._path.close)
            start = int(getattr(_kvcache(params), "start_layer", 0) or 0)
            layers = (start, start + int(self._group.num_layers))
            self._linked: dict[str, LinkedPool] = {}
            for key, entry in self.pools.items():
                name = str(key)
                namespace = namespace_of(
                    pages[name],
                    entry.device_pool,
                    page_tokens=page_size,
                    model=model,
                    shard=shard_text(ranks, replicated=shared[name], layers=layers),
                )
                self._linked[name] = LinkedPool(
                    pages[name],
                    self.store.namespace(namespace),
                    writes=not shared[name] or ranks.tp_rank == 0,
                )
            self._start_threads(list(pages.values()), undo)
            if PoolName.MAMBA in self.pools:
                counter = self.layer_done_counter
                params.req_to_token_pool.register_layer_transfer_counter(counter)
            self._log_start(ranks)
            undo.pop_all()
        watch_weights(self)

    # ---- set-up ----
    def _shared_pools(self) -> dict[str, bool]:
        """By name, whether a pool's pages are the same on all tensor-parallel ranks."""
        kv = self.pools.get(PoolName.KV)  # None where all of the KV is in compressed pools
        latent = bool(self._group.rank_replicated) or (
            kv is not None and not splits_heads(kv.device_pool)
        )
        return {
            str(name): is_replicated(str(name), entry.device_pool, latent)
            for name, entry in self.pools.items()
        }

    def _start_threads(self, pools: list[DevicePoolPages], undo: ExitStack) -> None:
        layer_count, staging = int(self._group.num_layers), self._path.staging
        self._reader = LayerReader(layer_count, stager=staging, timeout_s=LOAD_TIMEOUT_S)
        undo.callback(self._reader.close, 0.0)
        self.layer_done_counter = LoadCounter(
            layer_count,
            lambda: self._reader.alive,
            WAIT_LIMIT_S,
            lambda: self.switch_off("layers are not completed any more"),
        )
        store = self.options.store
        self._leases = Leases(int(LEASED_SHARE * int(store.capacity)) // store.writers_max)
        pool_bytes = sum(length for _, length in regions(pools))
        self._offloader = Offloader(
            wait_idle=self._yield_to_loads,
            bytes_max=int(WAITING_SHARE * pool_bytes),
            backlog_bytes=int(store.backlog),
            timeout_s=self.options.operation_timeout_s,
            tick=self._sweep,
            fail=lambda error: self._note_failure("offload", error),
            device=None if staging is None else (staging, self._path.target),
        )
        undo.callback(self._offloader.close, 0.0, DRAIN_S)

    def _log_start(self, ranks: Ranks) -> None:
        transport = self.store.stats().transport
        logger.info(
            "tutti: linker of tp rank %d/%d to the store at %s, transport %s; memory path %s: %s",
            ranks.tp_rank,
            ranks.tp_size,
            self.options.store.path,
            "; ".join([transport.name, *transport.notes]),
            self._path.name,
            self._path.reason,
        )
        for name, linked in self._linked.items():
            logger.info(
                "tutti: pool %s: pages of %d bytes in %d parts%s",
                name,
                linked.pages.page_bytes,
                len(linked.pages.layers),
                "" if linked.writes else ", saved by rank 0",
            )

    # ---- look-up ----
    def note_ancestors(self, keys: Sequence[str] | None) -> None:
        """Say what precedes the pages of the next `lookup` or `offload`: all keys from the root on.

        None: that is not known, which is also so without this call. Each serves one call.
        """
        self._ancestors = keys

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return every length of the asked chain, in pages, that can be restored; and lease it."""
        ancestors = self._take_ancestors()
        self.counters["lookups"] += 1
        self._sweep()
        if not self._works:
            return []
        return self._always("lookup", [], lambda: self._lookup(rid, transfers, ancestors))

    def _lookup(
        self, rid: str, transfers: list[PoolTransfer], ancestors: Sequence[str] | None
    ) -> list[int]:
        tail = _tail(transfers)
        expanded = self._group.resolve_transfers(transfers)
        if not expanded or not tail:
            return []
        now_s = time.monotonic()
        lease = self._leases.renew(rid, len(ancestors or ()), tail, now_s)
        if lease is not None:
            return list(lease.lengths)
        chain = Chain.of(ancestors, tail)
        found = Lookup(self._linked, chain, expanded)
        if found.lengths:
            self.counters["lookup_hits"] += 1
            lengths = tuple(found.lengths)
            self._leases.put(rid, Lease(chain, lengths, found.holds, found.held_bytes, now_s))
        else:
            self._end_lease(rid)
        return found.lengths

    def _end_lease(self, rid: str) -> None:
        lease = self._leases.take(rid)
        if lease is not None:
            lease.release()

    # ---- load ----
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Remember what to load; `start_layer_wise_loading` begins it."""
        expanded: list[PoolTransfer] = []
        error: Exception | None = None
        try:
            expanded = self._group.resolve_transfers(
                transfers, allow_partial=True, allow_missing_kv=True
            )
            if not expanded:
                return False
        except Exception as caught:  # a failed load, on this rank too
            error = caught
        queued = self._queued.get(rid)
        if queued is None:
            self._queued[rid] = _QueuedLoad(expanded, self._leases.take(rid), error)
        else:
            queued.transfers.extend(expanded)
            queued.error = queued.error or error
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not begun; False if there is none."""
        self._end_lease(rid)
        queued = self._queued.pop(rid, None)
        if queued is not None:
            queued.release()
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        """Begin the remembered loads; returns the batch's index, -1 if there are none."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = int(self.layer_done_counter.update_producer())
        futures = self.layer_done_counter.futures[index]
        sink = CounterSink(futures, lambda: _release(loads), self._note_failed_load)
        self.counters["loads"] += len(loads)
        try:
            if not self._works:
                raise StoreClosedError("the linker was switched off after the look-up", op="load")
            after = tuple(self.record_offload_ready())  # of whoever used the slots before
            self._reader.submit(lambda: self._reads(loads, after), sink)
        except Exception as error:
            sink.fail(error)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch writes nothing any more; True if all of it is in place."""
        return self._always("finish", False, lambda: self.layer_done_counter.finish(counter_index))

    def _reads(self, loads: Sequence[_QueuedLoad], after: tuple[Any, ...]) -> Iterator[LayerRead]:
        """Find the pages of a batch; on the reader's thread, which ends what was yielded."""
        # The first is that of what computed the slots. Staging makes its copies wait for the rest.
        for event in after[:1] if self._path.is_staged else after:
            event.synchronize()
        for queued in loads:
            if queued.error is not None:
                raise queued.error
            for transfer in queued.transfers:
                yield from self._reads_of(transfer, queued, after)

    def _reads_of(
        self, transfer: PoolTransfer, queued: _QueuedLoad, after: tuple[Any, ...]
    ) -> Iterator[LayerRead]:
        linked = self._linked[str(transfer.name)]
        keys, pages = list(transfer.keys), linked.pages
        rows = pages.rows(transfer.host_indices)
        if len(rows) != len(keys):
            raise ValueError(f"pool {pages.name}: {len(rows)} device pages for {len(keys)} keys")
        chain, first = queued.chain_of(keys)
        step = min(READ_PAGES_MAX, max(READ_FRAGMENTS_MAX // len(pages.length_bytes), 1))
        for low in range(0, len(keys), step):
            part = rows[low : low + step]
            if self._path.is_staged:
                memory, target = None, self._path.target(pages, part, after)
            else:
                memory, target = pages.fragments(part, transfer.host_indices), None
            load = linked.store.load_parts(chain, memory, first + low, len(part))
            yield LayerRead(load, pages.layers, target)

    def _note_failed_load(self, error: BaseException) -> None:
        """A batch did not arrive; on the reader's thread."""
        self.counters["failed_loads"] += 1
        self._leases.distrust(time.monotonic())
        self._note_failure("load", error)
        if isinstance(error, LayerLoadError) and error.still_written:
            self.switch_off("the device does not answer")

    # ---- offload ----
    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue pages to be saved; False only if the transfers name none."""
        ancestors = self._take_ancestors()
        try:
            expanded = self._group.resolve_transfers(transfers, allow_partial=True)
            if not expanded:
                return False
        except Exception as error:
            self._note_failure("offload", error)
            self._offloader.answer(False)
            return True
        self.counters["offloads"] += 1
        answered: bool | None = False
        if self._works:
            tail = _tail(transfers)
            answered = self._always(
                "offload", answered, lambda: self._offload(expanded, ancestors, tail)
            )
        if answered is not None:
            self._offloader.answer(answered)
        return True

    def _offload(
        self,
        expanded: list[PoolTransfer],
        ancestors: Sequence[str] | None,
        tail: Sequence[str],
    ) -> bool | None:
        """Queue a job; or its result, where that is known."""
        chain = Chain.of(ancestors, tail) if tail else Chain.of(None, ())
        saves = []
        for transfer in expanded:
            linked = self._linked[str(transfer.name)]
            if linked.writes:
                keys, first = chain.run(list(transfer.keys))
                save = PoolSave(linked.store, linked.pages, keys, first, transfer.host_indices)
                saves.append(save)
        if all(save.is_stored() for save in saves):
            self.counters["offloads_known"] += 1
            return True
        job = Job(tuple(saves), self.record_offload_ready(), Result())
        if not self._offloader.submit(job):
            self.counters["offloads_refused"] += 1
        return None

    def num_completed_offloads(self) -> int:
        """How many results can be taken."""
        self._sweep()
        return self._offloader.completed()

    def pop_completed_offload(self) -> bool:
        """Take the oldest result: whether all pages of that offload are stored."""
        return self._offloader.pop()

    # ---- life ----
    def reset(self) -> None:
        """Wait for all transfers, forget what is queued, and all results. Stored pages stay."""
        self._always("reset", None, lambda: self._quiesce(LOAD_TIMEOUT_S))

    def close(self) -> None:
        """Quiesce and let go of the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._always("close", None, lambda: self._quiesce(self.options.operation_timeout_s))
        self._enabled = False
        self._always("close", None, lambda: self._offloader.close(0.0, DRAIN_S))
        self._always("close", None, lambda: self._reader.close(DRAIN_S))
        self._always("close", None, self._path.close)
        self._always("close", None, self.store.close)
        logger.info("tutti: linker closed; %s", dict(self.counters))

    def switch_off(self, reason: str) -> None:
        """Report and save nothing from now on, until the server starts anew."""
        if self._enabled:
            self._enabled = False
            logger.warning("tutti: nothing is stored or loaded until the next start: %s", reason)

    def _quiesce(self, timeout_s: float) -> None:
        _release(list(self._queued.values()))
        self._queued.clear()
        self._leases.clear()
        self._ancestors = None
        idle = self._reader.wait_idle(timeout_s)
        idle &= self._offloader.reset(DRAIN_S, 2 * self.options.operation_timeout_s)
        self.layer_done_counter.reset()
        if not idle:
            self.switch_off("the device does not answer")

    # ---- inside ----
    @property
    def _works(self) -> bool:
        return self._enabled and not self._path.broken

    def _take_ancestors(self) -> Sequence[str] | None:
        ancestors, self._ancestors = self._ancestors, None
        return ancestors

    def _yield_to_loads(self, timeout_s: float) -> bool:
        return not self._reader.busy or self._reader.wait_idle(timeout_s)

    def _sweep(self) -> None:
        """End old leases, about once a second."""
        now_s = time.monotonic()
        if now_s - self._last_sweep_s >= 1.0:
            self._last_sweep_s = now_s
            self._leases.sweep(now_s)

    def _always(self, operation: str, otherwise: T, call: Callable[[], T]) -> T:
        """The result of `call`, or `otherwise` when it fails for any reason."""
        try:
            return call()
        except Exception as error:
            self._note_failure(operation, error)
            return otherwise

    def _note_failure(self, operation: str, error: BaseException) -> None:
        with self._log_lock:
            self.counters["failures"] += 1
            now_s = time.monotonic()
            if now_s - self._last_log_s < _LOG_PERIOD_S and self.counters["failures"] > 1:
                return
            self._last_log_s = now_s
            failures = self.counters["failures"]
        expected = isinstance(error, BusyError | LayerLoadError)
        logger.error(
            "tutti: %s failed (%d failures so far): %s",
            operation,
            failures,
            error,
            exc_info=None if expected else error,
        )


def _kvcache(params: Any) -> Any:
    return params.token_to_kv_pool_allocator.get_kvcache()


def _tail(transfers: Sequence[PoolTransfer]) -> Sequence[str]:
    """The keys of the pages that a call is about: each has one page in the KV pool."""
    return next((t.keys for t in transfers if t.name == PoolName.KV and t.keys), ())


def _release(loads: Sequence[_QueuedLoad]) -> None:
    for load in loads:
        load.release()


# ---- hooks, registered by the plugin ---------------------------------------------------------


def around_match(original: Callable[..., Any], self: Any, key: Any, req: Any, result: Any) -> Any:
    """Around UnifiedCacheLinkerWrapper.match: tell the linker what is in the device tree before."""
    linker = self.cache_linker
    if not isinstance(linker, TuttiLinker) or int(result.device_prefix_len) >= len(key):
        return original(self, key, req, result)  # for all of a key nothing is looked up
    linker.note_ancestors(_matched_keys(self.cache, result))
    try:
        return original(self, key, req, result)
    finally:
        linker.note_ancestors(None)


def around_offload_node(
    original: Callable[..., Any], self: Any, node_id: Any, transfers: list[PoolTransfer]
) -> Any:
    """Around UnifiedCacheLinkerWrapper._offload_node: tell the linker the node's ancestors."""
    linker = self.cache_linker
    if not isinstance(linker, TuttiLinker):
        return original(self, node_id, transfers)
    linker.note_ancestors(self.cache.tree_core.get_prefix_hash_values(node_id))
    try:
        return original(self, node_id, transfers)
    finally:
        linker.note_ancestors(None)


def _matched_keys(cache: Any, result: Any) -> list[str] | None:
    """Keys of the matched pages; None where the tree does not have them all."""
    pages = int(result.device_prefix_len) // int(cache.page_size)
    if pages == 0:
        return []
    tree, node = cache.tree_core, result.last_device_node
    keys = [*tree.get_prefix_hash_values(node), *tree.get_hash_values(node)]
    return keys if len(keys) == pages else None
