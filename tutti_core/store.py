"""The public store: open, namespace, match, save, load, contains, pin, clear, stats, close."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.arguments import count_of, seconds_of
from tutti_core.config import StoreConfig
from tutti_core.errors import (
    BusyError,
    ConfigError,
    InternalError,
    StoreClosedError,
    TuttiError,
    nearest,
)
from tutti_core.format import Superblock
from tutti_core.geometry import Memory, PageFragments, as_memory, page_fragments
from tutti_core.index.catalog import packed_rows
from tutti_core.index.radix import NO_SLOT
from tutti_core.io.huge_pages import collapse
from tutti_core.io.marks import Marks
from tutti_core.io.select import open_transport
from tutti_core.io.transport import (
    BATCH_FRAGMENTS_MAX,
    BATCH_ITEMS_MAX,
    Capabilities,
    Transport,
    TransportOptions,
)
from tutti_core.keys import CHAIN_WIDTH_BYTES, Namespace, PageKeys, encode_salt, token_array
from tutti_core.tiers.arena import Arena, CudaArena, HostArena
from tutti_core.tiers.claim import claim_pools
from tutti_core.tiers.copier import Copier
from tutti_core.tiers.device_calls import DeviceCalls
from tutti_core.tiers.health import Health
from tutti_core.tiers.heat import Heat
from tutti_core.tiers.hold import Hold
from tutti_core.tiers.lease import take_lease
from tutti_core.tiers.limits import Limits, Rules
from tutti_core.tiers.loader import Loader, LoadTicket
from tutti_core.tiers.manager import Entry, Manager
from tutti_core.tiers.memory import MemoryTier
from tutti_core.tiers.mover import LoadGate, Mover
from tutti_core.tiers.parts_load import PartsLoad, Reading
from tutti_core.tiers.pools import catalog_folder, lease_folder, open_layout
from tutti_core.tiers.saver import ClearJob, SaveJob, Saver, SaveTicket
from tutti_core.tiers.stack import EvictionLog, TierStack

logger = logging.getLogger("tutti")

PAGES_PER_CALL_MAX = BATCH_ITEMS_MAX
CLOSE_TIMEOUT_S = 120.0
START_TIMEOUT_S = 10.0
"""For threads to end that have nothing to do yet, where opening fails."""
END_TIMEOUT_S = 1.0
"""For a transport to let go of its files, even when the time to close in is over."""

__all__ = [
    "Hold",
    "LoadTicket",
    "Match",
    "NamespaceStore",
    "PartsLoad",
    "PrefixStore",
    "Reading",
    "SaveTicket",
    "StoreStats",
    "TierStats",
]

_open_stores: weakref.WeakSet[PrefixStore] = weakref.WeakSet()
_abandoned: list[PrefixStore] = []
"""Closed, but a device may still use their memory."""


@dataclass(frozen=True, slots=True)
class Match:
    """Length of a stored prefix, in whole pages."""

    pages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: "hbm", "dram" or "nvme". Counters are since opening.

    hits       pages that loads took from it.
    promoted   pages copied or moved into it because they were loaded from a slower one.
    demoted    pages written from it to the drives.
    evicted    pages that left it because room was needed.
    """

    name: str
    pages: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    promoted: int
    demoted: int
    evicted: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store's counters. Pages are counted over all namespaces of the directory.

    pages               records in the catalog, of all processes.
    used_bytes          slots in use in this process's segments.
    capacity_bytes      the configured bound.
    pending_bytes       page bytes queued or being written.
    tiers               each tier, the fastest first; the drives are the last.
    unwell              devices that are left alone because they fail or stall, and for what; they
                        are probed, and used again when they answer. Their pages are misses. The
                        catalog, where it cannot be written: what is stored is served, saves are
                        refused.
    transport           what moves the bytes, and why not something faster.
    counters            since opening: saved_pages, loaded_pages, missed_pages, known_pages (saves
                        of pages that were stored already), evicted_pages, checksum_errors,
                        read_errors, write_errors, pages_refused_full, pages_refused_worth,
                        pages_refused_busy, pages_not_admitted, pages_over_budget, expired_pages, ….
    """

    pages: int
    used_bytes: int
    capacity_bytes: int
    pending_bytes: int
    index_restored: bool
    transport: Capabilities
    counters: Mapping[str, int]
    tiers: tuple[TierStats, ...] = ()
    unwell: tuple[str, ...] = ()


class NamespaceStore:
    """The pages of one namespace in a store; made by `PrefixStore.namespace`.

    Methods take token ids, or PageKeys for engines that bring their own chain. `first` says with
    which page of the chain the call is concerned; the pages before it are its ancestors.
    Threads    all methods may be called from any thread.
    """

    def __init__(self, store: PrefixStore, namespace: Namespace, entry: Entry) -> None:
        self.namespace = namespace
        self._store = store
        self._entry = entry

    def keys(
        self,
        tokens: Any,
        *,
        salt: str | None = None,
        lora: str | None = None,
        tenant: str | None = None,
    ) -> PageKeys:
        """Return the page keys of a token sequence; an incomplete last page has none.

        `salt`, `lora` and `tenant` separate sequences that must not share pages.

        Raises
            ValueError: not token ids, or the namespace does not use 16-byte keys.
        Cost       about 2 ns a token.
        """
        if self.namespace.key_bytes != CHAIN_WIDTH_BYTES:
            raise ValueError("this namespace's keys come from the engine; pass PageKeys")
        seed = self._store._secret + self._entry.digest
        seed += encode_salt(salt=salt, lora=lora, tenant=tenant)
        data = hashing.chain_keys(seed, token_array(tokens), self.namespace.page_tokens)
        return PageKeys(data, CHAIN_WIDTH_BYTES)

    def match(self, tokens: Any, first: int = 0) -> Match:
        """Return how long a prefix is stored, from page `first` on, and mark it as used.

        Cost       memory compares for pages this process knows, one catalog look-up at the first
                   page it does not.
        """
        keys, first = self._chain(tokens, first)
        pages = self._store._placement.match(self._entry, keys.data, first, keys.rooted)
        return Match(pages, pages * self.namespace.page_tokens)

    def contains(self, tokens: Any, first: int = 0) -> npt.NDArray[np.bool_]:
        """Return one bool a page from `first` on: whether it is stored, holes included."""
        keys, first = self._chain(tokens, first)
        return self._store._present(self._entry, keys, first)

    def save(
        self,
        tokens: Any,
        memory: Any,
        first: int = 0,
        slots: Sequence[int] | None = None,
        *,
        output_tokens: int | None = None,
    ) -> SaveTicket:
        """Start saving the pages from `first` on; returns at once.

        Parameters
            memory: where the pages are: anything `geometry.as_memory` takes, page after page (or
                at the page-sized places that `slots` names), or PageFragments with one row a page.
            output_tokens: how many tokens the engine generated for this request, if it knows; the
                policy learns from it.
        Pages that are stored already cost nothing. New pages in parts are hashed by the caller,
        about 0.12 ms a MiB; their fragments end where the parts do. The memory must not change
        until the ticket is done. A page for which there is no room, that is worth less than what
        would have to go for it, that the admission or the write budget refuses, or whose write
        fails, reports False.

        Raises
            ValueError: the memory does not hold the pages; `output_tokens` is not a count.
            StoreClosedError: after `close`.
        """
        keys, first = self._chain(tokens, first)
        if output_tokens is not None:
            output_tokens = count_of(output_tokens, "output_tokens")
        count = len(keys) - first
        fragments = self._fragments(memory, count, slots)
        return self._store._save(self._entry, keys, first, fragments, output_tokens)

    def load(
        self,
        tokens: Any,
        memory: Any,
        first: int = 0,
        count: int | None = None,
        slots: Sequence[int] | None = None,
    ) -> LoadTicket:
        """Start loading `count` pages from `first` on (default: all); returns at once.

        Parameters
            memory: writable, otherwise as for `save`.
        Pages are loaded independently: one that is missing or damaged reports False, the others
        arrive. The memory belongs to the ticket until it is done.

        Raises
            ValueError: the memory does not hold the pages, or is read-only; the pages of this
                namespace are in parts.
            StoreClosedError: after `close`.
        """
        if self._entry.parts is not None:
            raise ValueError("pages of this namespace are in parts; use load_parts")
        keys, first = self._chain(tokens, first, count)
        fragments = self._fragments(memory, len(keys) - first, slots, writable=True)
        return self._store._loader.start(self._entry, keys, first, fragments)

    def load_parts(
        self,
        tokens: Any,
        memory: Any = None,
        first: int = 0,
        count: int | None = None,
        slots: Sequence[int] | None = None,
    ) -> PartsLoad:
        """Find `count` pages from `first` on (default: all) and read them part by part.

        Parameters
            memory: writable, otherwise as for `save`; None: each start names the place of its part.
        Nothing is read yet: start and finish the parts in the order in which they are needed, then
        `end` the load. Until then what was found is not overwritten.

        Raises
            ValueError: the namespace has no parts; the memory does not hold the pages, is
                read-only, or has a fragment in two parts.
            StoreClosedError: after `close`.
        """
        if self._entry.parts is None:
            raise ValueError("pages of this namespace have no parts; use load")
        keys, first = self._chain(tokens, first, count)
        fragments = None
        if memory is not None:
            fragments = self._fragments(memory, len(keys) - first, slots, writable=True)
            self._entry.parts.fragment_ranges(fragments.length_bytes)
        return self._store._loader.start_parts(self._entry, keys, first, fragments)

    def hold(self, tokens: Any, first: int = 0, count: int | None = None) -> Hold:
        """Keep stored pages from `first` on from being evicted by this process until `release`.

        Parameters
            count: how many pages at most; default all.
        Returns
            a Hold; its `pages` counts the ones that are stored without a gap, which are held. They
            count as used. A hold keeps off eviction for room; not `clear`, nor a page that turns
            out damaged, nor another process that owns the page's segment.
        Cost       of a match; for pages whose chain is not known, and where there are memory tiers,
                   also a few steps a page.
        """
        keys, first = self._chain(tokens, first, count)
        return Hold(self._store._placement, self._entry, keys, first)

    def pin(self, tokens: Any) -> int:
        """Keep the stored pages of a prefix from being evicted by this process.

        Returns
            how many leading pages are pinned now; give the same prefix to `unpin`. Pins count, are
            not shared with other processes, and end with the process.
        """
        keys, _ = self._chain(tokens, 0)
        placement = self._store._placement
        hit = placement.match(self._entry, keys.data, 0, keys.rooted)
        return placement.pin(self._entry, keys.part(0, hit))

    def unpin(self, tokens: Any, pages: int) -> None:
        """Take back one `pin` that returned `pages`. Raises ValueError: not a count of them."""
        keys, _ = self._chain(tokens, 0)
        pages = count_of(pages, "pages")
        if pages > len(keys):
            raise ValueError(f"pages = {pages} of {len(keys)} were never pinned")
        self._store._placement.unpin(self._entry, keys.part(0, pages))

    def limit(self, *, share: float = 0.0, ttl_s: float | None = None) -> None:
        """Set the limits of this namespace, in this process, in place of earlier ones.

        Parameters
            share: part of the drives' capacity, 0 to 1, that pages of other namespaces cannot take
                from it. It may use more while others leave it.
            ttl_s: pages whose chain was not used for so long count as gone; their room is reclaimed
                with the next saves. Those that are asked for without their chain are found until
                then, and so are those that other processes saved.
        Raises
            ConfigError: an impossible limit, or the shares add up to more than 1.
        """
        self._store._check_open()
        self._store._manager.limit(self._entry, Limits(share, ttl_s))

    def clear(self, timeout_s: float = 60.0) -> int:
        """Remove all pages of this namespace, and of no other; returns how many there were.

        Raises
            BusyError: not done after `timeout_s`; it goes on in the background.
            StoreFullError, DeviceError: the catalog refused; some of the pages are still there.
            InternalError: the store has stopped saving; nothing was removed.
        """
        self._store._check_open()
        timeout_s = seconds_of(timeout_s)
        job = ClearJob(self._entry)
        # Saves that were called before are queued before it, also those that end in memory.
        queued = self._store._drain_copies(timeout_s) and self._store._saver.enqueue(job)
        if not queued and self._store._saver.failed:
            raise InternalError("the store has stopped saving", op="clear")
        if not queued or not job.done.wait(timeout_s):
            self._store._check_open()
            raise BusyError(f"the namespace is not cleared after {timeout_s} s", op="clear")
        if job.error is not None:
            raise job.error
        return job.removed

    def _chain(self, tokens: Any, first: int, count: int | None = None) -> tuple[PageKeys, int]:
        """The keys of a chain, up to page `first` + `count`, and `first` as an int."""
        self._store._check_open()
        keys = tokens if isinstance(tokens, PageKeys) else self.keys(tokens)
        first = count_of(first, "first")
        if len(keys) and keys.width != self._entry.key_bytes:
            raise ValueError(
                f"page keys of {keys.width} bytes; this namespace has {self._entry.key_bytes}"
            )
        if first > len(keys):
            raise ValueError(f"first = {first} of {len(keys)} pages")
        if count is not None:
            keys = keys.upto(first + count_of(count, "count"))
        return keys, first

    def _fragments(
        self, memory: Any, count: int, slots: Sequence[int] | None, writable: bool = False
    ) -> PageFragments:
        page_bytes = self.namespace.page_bytes
        if count > PAGES_PER_CALL_MAX:
            raise ValueError(f"more than {PAGES_PER_CALL_MAX} pages in one save or load")
        if isinstance(memory, PageFragments):
            fragments = memory
        else:
            piece = as_memory(memory)
            if writable and not piece.writable:
                raise ValueError("the memory to load into is read-only")
            whole = page_fragments(piece, page_bytes, count, slots)
            if writable and slots is not None and len(np.unique(whole.address)) != count:
                raise ValueError("two pages to load have the same slot")
            fragments = self._cut(whole)
        trailers = count if self._entry.cipher is not None and writable else 0
        _check_fragments(fragments.address.size + trailers)
        if fragments.page_count != count or fragments.page_bytes != page_bytes:
            raise ValueError(
                f"memory of {fragments.page_count} pages of {fragments.page_bytes} bytes for "
                f"{count} pages of {page_bytes} bytes"
            )
        return fragments

    def _cut(self, whole: PageFragments) -> PageFragments:
        """Pages in one piece as one fragment for each of their parts."""
        if not self.namespace.parts:
            return whole
        lengths = np.array(self.namespace.parts, dtype=np.uint64)
        inside = np.cumsum(lengths) - lengths
        return PageFragments(whole.address + inside, lengths, whole.owner)


class PrefixStore:
    """A persistent store of KV-cache pages, keyed by their prefix.

    Use `PrefixStore.open`. A context manager: leaving it closes the store.
    Threads    all methods may be called from any thread. A forked child must open its own.
    """

    def __init__(
        self,
        config: StoreConfig,
        transport: Transport | None = None,
        arenas: Mapping[str, Arena] | None = None,
    ) -> None:
        config.check()
        self.config = config
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.Lock()
        with ExitStack() as undo:
            self._tiers = _memory_tiers(config, arenas or {}, undo)
            layout, self._catalog = open_layout(config)
            undo.callback(self._catalog.close)
            self._claim = claim_pools(catalog_folder(config.path) / "data.mdb", layout.paths)
            undo.callback(self._claim.release)
            self._lease = take_lease(lease_folder(config.path), layout.paths)
            undo.callback(self._lease.release)
            self._transport = transport or open_transport(
                config.transport,
                layout.devices(),
                TransportOptions(
                    queue_depth=config.queue_depth,
                    transfer_bytes_max=int(config.transfer_max),
                    bounce_bytes=int(config.bounce),
                    software_nvme=config.gpu_controller == "software",
                    gpu_executor=config.gpu_executor,
                ),
            )
            undo.callback(self._transport.close)
            if isinstance(self._transport, Marks):
                self._transport.mark(self._lease.number)
            self._manager = (EvictionLog if self._tiers else Manager)(
                layout,
                self._catalog,
                self._lease,
                lease_folder(config.path),
                -(-layout.segment_count // config.writers_max),
                Rules(config.policy, config.admission, config.write_budget),
            )
            if config.writers_max > 1:
                pool_bytes = layout.segment_count * layout.segment_bytes
                heat = Heat(lease_folder(config.path) / "heat", pool_bytes)
                undo.callback(heat.close)
                self._manager.heat = heat
            self._secret = layout.secret
            self._placement: Manager | TierStack = self._manager
            self._copier: Copier | None = None
            self._mover: Mover | None = None
            self._stack: TierStack | None = None
            try:
                self._start_threads(undo)
            except RuntimeError as error:
                raise BusyError(
                    f"the store's threads cannot be started: {error}",
                    op="open",
                    retryable=True,
                    hint="raise the limit on threads, ulimit -u",
                ) from None
            undo.pop_all()
        _open_stores.add(self)

    def _start_threads(self, undo: ExitStack) -> None:
        config, gate = self.config, LoadGate()
        if self._tiers:
            assert isinstance(self._manager, EvictionLog)
            self._copier = Copier(int(config.backlog))
            undo.callback(self._copier.stop, START_TIMEOUT_S)
            self._stack = TierStack(self._manager, self._tiers, self._copier, config.write_policy)
            self._placement = self._stack
        durable = config.durability == "flush"
        self._calls = DeviceCalls(self._transport, self._is_pool, self._manager.count)
        undo.callback(self._calls.stop, START_TIMEOUT_S)
        health = Health(
            self._transport,
            self._manager.count,
            config.io_timeout_s,
            calls=self._calls,
            flush=durable,
        )
        self._manager.use(health, self._calls, config.io_timeout_s)
        self._loader = Loader(
            self._manager,
            self._transport,
            gate,
            health,
            verify=config.verify,
            io_timeout_s=config.io_timeout_s,
            stack=self._stack,
        )
        self._saver = self._loader.saver = Saver(
            self._manager,
            self._transport,
            health,
            calls=self._calls,
            flush=durable,
            backlog_bytes=int(config.backlog),
            io_timeout_s=config.io_timeout_s,
            sweep=self._sweep,
            fail=self._note_internal_error,
            upper=self._stack,
        )
        undo.callback(self._saver.stop, START_TIMEOUT_S)
        if self._stack is not None:
            self._mover = Mover(
                self._manager,
                self._transport,
                self._saver,
                health,
                self._tiers,
                gate=gate,
                handover=self._stack.handover,
                io_timeout_s=config.io_timeout_s,
                first_gap=self._stack.first_gap,
                sweep=self._sweep,
                fail=self._note_internal_error,
            )
            undo.callback(self._mover.stop, START_TIMEOUT_S)
            self._stack.connect(self._saver, self._mover)
        self._restorer = threading.Thread(
            target=self._manager.restore, name="tutti-restore", daemon=True
        )
        self._restorer.start()

    @classmethod
    def open(
        cls,
        config: StoreConfig | str | os.PathLike[str],
        *,
        transport_object: Transport | None = None,
        **settings: Any,
    ) -> PrefixStore:
        """Open the store in a directory, creating it where there is none.

        Parameters
            config: a StoreConfig, or the directory; then `settings` are the other fields of
                StoreConfig (`capacity` at least).
            transport_object: moves the bytes instead of what `transport` names; for tests and for
                transports of one's own. Closed with the store.
        Raises
            ConfigError, CorruptionError: what is wrong and how to mend it; nothing on disk was
                touched.
            UnsupportedError: the store is of another format version, or this machine lacks the
                transport that was asked for by name.
            DeviceError: the file system refused.
        Cost       one pass over the catalog's file, to see that it is sound: about 0.2 s for a
                   million pages, from memory; none while another process has the store open. The
                   index fills in the background.
        """
        if not isinstance(config, StoreConfig):
            config = StoreConfig.parse({"path": config, **settings})
        elif settings:
            raise ConfigError("pass either a StoreConfig or single settings, not both")
        return cls(config, transport_object)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def namespace(self, namespace: Namespace | None = None, **fields: Any) -> NamespaceStore:
        """Return the part of the store in which pages with these properties live.

        Parameters
            namespace: a Namespace, or its fields one by one.
        Raises
            ConfigError: a field is unknown or impossible, or a page is larger than a segment, than
                an eighth of a memory tier, or than an hour's part of the write budget.
        """
        self._check_open()
        if namespace is not None and not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: {namespace!r} is not a Namespace")
        if namespace is not None and fields:
            raise ConfigError("pass either a Namespace or single fields, not both")
        if namespace is None:
            known = [f.name for f in dataclass_fields(Namespace)]
            for name in fields:
                if name not in known:
                    raise ConfigError(
                        f"namespace: unknown field {name!r}", hint=nearest(name, known)
                    )
            try:
                namespace = Namespace(**fields)
            except TypeError as error:
                raise ConfigError(f"namespace: {error}") from None
        entry = self._manager.entry(namespace)
        for tier in self._tiers:
            tier.check_fits(entry)
        return NamespaceStore(self, namespace, entry)

    def register(self, memory: Any) -> int:
        """Announce memory that many transfers will use; returns an id for `unregister`.

        Registered memory is moved with less work per transfer. It must stay mapped until
        `unregister` or `close`.
        """
        self._check_open()
        piece: Memory = as_memory(memory)
        if self.config.huge_pages and self._transport.capabilities().registered_buffers:
            huge = collapse(piece.address, piece.length_bytes)
            self._manager.count("huge_page_bytes", huge)
        return self._transport.register(piece.address, piece.length_bytes)

    def unregister(self, region: int) -> None:
        """Forget registered memory; no transfer may be using it.

        Raises
            ValueError: no region has this number, or it was forgotten already.
        """
        region = count_of(region, "region")
        if self._closed or self._pid != os.getpid():
            return
        try:
            self._transport.unregister(region)
        except KeyError:
            raise ValueError(f"region = {region} is not registered") from None

    def wait_restored(self, timeout_s: float) -> bool:
        """Wait until the index of an existing store is in memory; answers are right before."""
        return self._manager.restored.wait(seconds_of(timeout_s))

    def stats(self) -> StoreStats:
        """Return a snapshot of the counters. Raises StoreClosedError after `close`."""
        self._check_open()
        self._loader.health.tick()
        return StoreStats(
            pages=self._manager.page_count(),
            used_bytes=self._manager.used_bytes(),
            capacity_bytes=int(self.config.capacity),
            pending_bytes=self._pending_bytes(),
            index_restored=self._manager.restored.is_set(),
            transport=self._transport.capabilities(),
            counters=dict(self._manager.counters),
            tiers=self._tier_stats(),
            unwell=self._unwell(),
        )

    def _unwell(self) -> tuple[str, ...]:
        unwell = self._loader.health.unwell()
        catalog = self._catalog.commits.unwell(self.config.io_timeout_s)
        return (*unwell, f"{self.config.path}: the catalog, {catalog}") if catalog else unwell

    def _is_pool(self, device: int, block: bytes) -> bool:
        """Whether a first block is that of the pool at a place of this store."""
        known = self._manager.layout.superblocks[device]
        try:
            found = Superblock.decode(block, self._transport.devices[device].path)
        except TuttiError:
            return False
        return (found.store_id, found.pool_index) == (known.store_id, known.pool_index)

    def _pending_bytes(self) -> int:
        copying = self._copier.pending_bytes() if self._copier is not None else 0
        return copying + self._saver.pending_bytes()

    def _tier_stats(self) -> tuple[TierStats, ...]:
        counters = self._manager.counters
        above = [_stats_of(tier) for tier in self._tiers]
        drives = TierStats(
            name="nvme",
            pages=self._manager.page_count(),
            used_bytes=self._manager.used_bytes(),
            capacity_bytes=int(self.config.capacity),
            hits=counters["loaded_pages"] - sum(tier.hits for tier in above),
            promoted=0,
            demoted=0,
            evicted=counters["evicted_pages"],
        )
        return (*above, drives)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Write pages that are in memory only to the drives, which makes them durable.

        Returns
            False if some are left after `timeout_s`, or could not be written. Pages that a
            selective store has not seen used again are not written.
        Raises
            StoreClosedError: after `close`.
        """
        self._check_open()
        timeout_s = seconds_of(timeout_s)
        if self._mover is None:
            return True
        deadline_s = time.monotonic() + timeout_s
        drained = self._drain_copies(timeout_s)
        return self._mover.flush(max(deadline_s - time.monotonic(), 0.0)) and drained

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish saves and loads in flight, then let go of files and threads. Idempotent.

        What is not finished after `timeout_s` is abandoned: such pages are not stored. Where a
        device does not answer by then, its files, its memory and the lease stay the process's.
        Several threads may close; the others wait as long at most. Does nothing in a forked child.
        """
        timeout_s = seconds_of(timeout_s)
        if self._pid != os.getpid():  # before the lock, which may have been held at the fork
            return
        deadline_s = time.monotonic() + timeout_s
        if not self._close_lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            return  # another thread is at it
        try:
            if not self._closed:
                self._closed = True
                self._end(deadline_s)
        finally:
            self._close_lock.release()

    def _end(self, deadline_s: float) -> None:
        self._manager.stop()
        self._restorer.join(max(deadline_s - time.monotonic(), 0.0))
        stopped = self._stop_moves(deadline_s)
        stopped &= self._saver.stop(max(deadline_s - time.monotonic(), 0.0))
        # Else the saver still needs them.
        stopped = stopped and self._calls.stop(max(deadline_s - time.monotonic(), 0.0))
        loaded = self._loader.wait_all(deadline_s)
        # What did not end in time may do so when the transport closes.
        if not (stopped and self._close_transport(deadline_s)):
            logger.warning("closing a store with saves or loads unfinished")
            _abandoned.append(self)
            return
        if not loaded:
            self._loader.wait_all(time.monotonic() + END_TIMEOUT_S)
        for tier in self._tiers:
            tier.arena.close()
        self._lease.release()
        self._claim.release()
        if self._manager.heat is not None:
            self._manager.heat.close()
        self._catalog.close()
        _open_stores.discard(self)

    def _close_transport(self, deadline_s: float) -> bool:
        """Close it, which waits for what is in flight; False if that takes too long."""
        closing = threading.Thread(target=self._transport.close, name="tutti-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # a limit on threads, or the interpreter is exiting
            self._transport.close()
            return True
        closing.join(max(deadline_s - time.monotonic(), END_TIMEOUT_S))
        return not closing.is_alive()

    def _stop_moves(self, deadline_s: float) -> bool:
        """Write what is in memory only to the drives, then end the threads above the saver."""
        if self._copier is None or self._mover is None:
            return True
        stopped = self._copier.stop(max(deadline_s - time.monotonic(), 0.0))
        if not self._mover.flush(max(deadline_s - time.monotonic(), 0.0), closing=True):
            logger.warning("closing a store with pages that were not written to the drives")
        return self._mover.stop(max(deadline_s - time.monotonic(), 0.0)) and stopped

    # ---- inside ----
    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        if self._pid != os.getpid():
            raise StoreClosedError(
                "the store belongs to the parent process", hint="open it again after the fork"
            )

    def _present(self, entry: Entry, keys: PageKeys, first: int) -> npt.NDArray[np.bool_]:
        if self._stack is not None:
            return self._stack.present(entry, keys.data, first, keys.rooted)
        where = self._manager.locate(entry, keys.data, first, keys.rooted)
        return np.asarray(where.slot != NO_SLOT, dtype=np.bool_)

    def _save(
        self,
        entry: Entry,
        keys: PageKeys,
        first: int,
        fragments: PageFragments,
        output_tokens: int | None,
    ) -> SaveTicket:
        stored = self._present(entry, keys, first)
        ticket = SaveTicket(stored)
        missing = np.flatnonzero(~stored)
        self._manager.count("known_pages", len(stored) - len(missing))
        if len(missing):
            pages = fragments.select(missing)
            if entry.cipher is not None:
                pages = entry.cipher.plain_form(pages)  # the saver encrypts it
            elif entry.parts is not None:
                rows = packed_rows(keys.data, keys.width)[missing + first]
                pages = entry.parts.seal(entry.digest, rows, pages)
                _check_fragments(pages.address.size)
            job = SaveJob(
                entry=entry,
                keys=keys.part(0, first + int(missing[-1]) + 1),
                rooted=keys.rooted,
                index=missing + first,
                result=missing,
                fragments=pages,
                ticket=ticket,
                known_from=self._known_from(entry, keys, first),
                output_tokens=output_tokens,
            )
            if self._enqueue(job):
                return ticket
            self._manager.count("pages_refused_busy", len(missing))
        elif output_tokens is not None and keys.rooted:
            self._manager.settle(entry, keys.data, len(keys), output_tokens)
            if self._stack is not None:
                self._stack.settle(entry, keys.data, output_tokens)
        ticket.finish()
        return ticket

    def _known_from(self, entry: Entry, keys: PageKeys, first: int) -> int | None:
        if self._stack is None or not keys.rooted:
            return None
        return self._stack.known_from(entry, keys.data, first)

    def _enqueue(self, job: SaveJob) -> bool:
        if self._stack is not None and self._stack.takes_saves:
            return self._stack.save(job)
        return self._saver.enqueue(job)

    def _drain_copies(self, timeout_s: float) -> bool:
        return self._copier is None or self._copier.drain(timeout_s)

    def _sweep(self) -> None:
        """Collect loads that have ended but that nobody waited for."""
        self._loader.sweep()

    def _note_internal_error(self) -> None:
        self._manager.count("internal_errors", 1)


def _check_fragments(count: int) -> None:
    if count > BATCH_FRAGMENTS_MAX:
        raise ValueError(
            f"more than {BATCH_FRAGMENTS_MAX} fragments in one save or load, {count} with what is "
            "stored besides"
        )


def _memory_tiers(
    config: StoreConfig, arenas: Mapping[str, Arena], undo: ExitStack
) -> list[MemoryTier]:
    """The memory tiers that are configured, fastest first; `arenas` replaces memory in tests."""
    tiers = []
    if config.hbm:
        arena = arenas.get("hbm") or CudaArena(int(config.hbm))
        undo.callback(arena.close)
        tiers.append(MemoryTier("hbm", arena, policy=config.policy))
    if config.dram:
        arena = arenas.get("dram") or HostArena(int(config.dram), config.huge_pages)
        undo.callback(arena.close)
        exclusive = config.dram_mode == "exclusive"
        tier = MemoryTier("dram", arena, leave_after_write=exclusive, policy=config.policy)
        tiers.append(tier)
    return tiers


def _stats_of(tier: MemoryTier) -> TierStats:
    counters = dict(tier.counters)
    return TierStats(
        name=tier.name,
        pages=tier.page_count,
        used_bytes=tier.used_bytes,
        capacity_bytes=tier.capacity_bytes,
        hits=counters.get("hits", 0),
        promoted=counters.get("promoted", 0),
        demoted=counters.get("demoted", 0),
        evicted=counters.get("evicted", 0),
    )


@atexit.register
def _close_all() -> None:
    for store in list(_open_stores):
        try:
            store.close(10.0)
        except Exception:
            logger.exception("closing a store at exit failed")
