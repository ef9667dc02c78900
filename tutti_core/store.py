"""The public store: open, namespace, match, save, load, contains, pin, clear, stats, close."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.config import StoreConfig
from tutti_core.errors import BusyError, ConfigError, StoreClosedError, nearest
from tutti_core.geometry import Memory, PageFragments, as_memory, page_fragments
from tutti_core.index.catalog import record_key_at
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.io.huge_pages import collapse
from tutti_core.io.select import open_transport
from tutti_core.io.transport import (
    BATCH_FRAGMENTS_MAX,
    BATCH_ITEMS_MAX,
    Batch,
    BatchResult,
    Capabilities,
    Op,
    Transport,
    TransportOptions,
)
from tutti_core.keys import CHAIN_WIDTH_BYTES, Namespace, PageKeys, encode_salt, token_array
from tutti_core.tiers.lease import take_lease
from tutti_core.tiers.manager import Entry, Manager
from tutti_core.tiers.pools import lease_folder, open_layout
from tutti_core.tiers.saver import ClearJob, DropJob, SaveJob, Saver, SaveTicket, page_batch

logger = logging.getLogger("tutti")

PAGES_PER_CALL_MAX = BATCH_ITEMS_MAX
CLOSE_TIMEOUT_S = 120.0

_NOT_THE_PAGE = [-errno.EAGAIN, -errno.EINTR, -errno.ENOMEM, -errno.EFAULT]
"""Failures of a read that say nothing against the page: a passing shortage, the caller's memory."""

__all__ = [
    "LoadTicket",
    "Match",
    "NamespaceStore",
    "PrefixStore",
    "SaveTicket",
    "StoreStats",
]

_open_stores: weakref.WeakSet[PrefixStore] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Match:
    """Length of a stored prefix, in whole pages."""

    pages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store's counters. Pages are counted over all namespaces of the directory.

    pages               records in the catalog, of all processes.
    used_bytes          slots in use in this process's segments.
    capacity_bytes      the configured bound.
    pending_bytes       page bytes queued or being written.
    transport           what moves the bytes, and why not something faster.
    counters            since opening: saved_pages, loaded_pages, missed_pages, known_pages (saves
                        of pages that were stored already), evicted_pages, checksum_errors,
                        read_errors, write_errors, pages_refused_full, pages_refused_busy, ….
    """

    pages: int
    used_bytes: int
    capacity_bytes: int
    pending_bytes: int
    index_restored: bool
    transport: Capabilities
    counters: Mapping[str, int]


class LoadTicket:
    """Outcome of one `load`: True for each page whose memory holds the page that was asked for.

    Memory of a page that reports False is undefined and must not be used.
    Threads    any may wait; all see the same result.
    """

    def __init__(
        self, store: PrefixStore, entry: Entry, keys: PageKeys, first: int, count: int
    ) -> None:
        self._store = store
        self._entry = entry
        self._keys = keys
        self._first = first
        self._lock = threading.Lock()
        self._loaded = np.zeros(count, dtype=np.bool_)
        self._transfer: tuple[int, int, npt.NDArray[np.intp], Locations, PageFragments] | None
        self._transfer = None

    def done(self) -> bool:
        """Whether the result is there; does not block."""
        return self._advance(0.0, 0.0)

    def wait(self, timeout_s: float | None = None) -> npt.NDArray[np.bool_]:
        """Return one bool a page.

        Raises
            BusyError: not finished after `timeout_s`; wait again. The memory is still being written
                to and must not be reused.
        """
        timeout_s = self._store.config.io_timeout_s if timeout_s is None else timeout_s
        if not self._advance(timeout_s, timeout_s):
            raise BusyError(f"the load is not finished after {timeout_s} s", op="load")
        return self._loaded

    def _attach(
        self,
        transfer: int,
        started: int,
        pages: npt.NDArray[np.intp],
        where: Locations,
        memory: PageFragments,
    ) -> None:
        self._transfer = (transfer, started, pages, where, memory)

    def _advance(self, lock_timeout_s: float, timeout_s: float) -> bool:
        """Collect the transfer's result if it ends in time; True when there is a result."""
        if self._transfer is None:
            return True
        if not self._lock.acquire(timeout=lock_timeout_s):
            return self._transfer is None
        try:
            if self._transfer is None:
                return True
            transfer, started, pages, where, _ = self._transfer
            result = self._store._transport.wait(transfer, timeout_s)
            if result is None:
                return False
            try:
                loaded = self._store._judge(
                    self._entry, self._keys, self._first, pages, where, result, started
                )
                self._loaded[pages] = loaded
            finally:
                self._transfer = None
                self._store._end_load(self, started)
            return True
        finally:
            self._lock.release()


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
        keys = self._chain(tokens, first)
        pages = self._store._manager.match(self._entry, keys.data, first, keys.rooted)
        return Match(pages, pages * self.namespace.page_tokens)

    def contains(self, tokens: Any, first: int = 0) -> npt.NDArray[np.bool_]:
        """Return one bool a page from `first` on: whether it is stored, holes included."""
        keys = self._chain(tokens, first)
        where = self._store._manager.locate(self._entry, keys.data, first, keys.rooted)
        return np.asarray(where.slot != NO_SLOT, dtype=np.bool_)

    def save(
        self, tokens: Any, memory: Any, first: int = 0, slots: Sequence[int] | None = None
    ) -> SaveTicket:
        """Start saving the pages from `first` on; returns at once.

        Parameters
            memory: where the pages are: anything `geometry.as_memory` takes, page after page (or
                at the page-sized places that `slots` names), or PageFragments with one row a page.
        Pages that are stored already cost nothing. The memory must not change until the ticket is
        done. A page for which there is no room, or whose write fails, reports False.

        Raises
            ValueError: the memory does not hold the pages.
            StoreClosedError: after `close`.
        """
        keys = self._chain(tokens, first)
        count = len(keys) - first
        fragments = self._fragments(memory, count, slots)
        return self._store._save(self._entry, keys, first, fragments)

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
            ValueError: the memory does not hold the pages, or is read-only.
            StoreClosedError: after `close`.
        """
        keys = self._chain(tokens, first)
        if count is not None:
            keys = PageKeys(keys.part(0, first + count), keys.width, keys.rooted)
        fragments = self._fragments(memory, len(keys) - first, slots, writable=True)
        return self._store._load(self._entry, keys, first, fragments)

    def pin(self, tokens: Any) -> int:
        """Keep the stored pages of a prefix from being evicted by this process.

        Returns
            how many leading pages are pinned now; give the same prefix to `unpin`. Pins count, are
            not shared with other processes, and end with the process.
        """
        keys = self._chain(tokens, 0)
        manager = self._store._manager
        hit = manager.match(self._entry, keys.data, 0, keys.rooted)
        return manager.pin(self._entry, keys.part(0, hit))

    def unpin(self, tokens: Any, pages: int) -> None:
        """Take back one `pin` that returned `pages`."""
        keys = self._chain(tokens, 0)
        self._store._manager.unpin(self._entry, keys.part(0, pages))

    def clear(self, timeout_s: float = 60.0) -> int:
        """Remove all pages of this namespace, and of no other; returns how many there were.

        Raises
            BusyError: not done after `timeout_s`; it goes on in the background.
            StoreFullError, DeviceError: the catalog refused; some of the pages are still there.
            InternalError: the store has stopped saving; nothing was removed.
        """
        self._store._check_open()
        job = ClearJob(self._entry)
        if not self._store._saver.enqueue(job) or not job.done.wait(timeout_s):
            raise BusyError(f"the namespace is not cleared after {timeout_s} s", op="clear")
        if job.error is not None:
            raise job.error
        return job.removed

    def _chain(self, tokens: Any, first: int) -> PageKeys:
        self._store._check_open()
        keys = tokens if isinstance(tokens, PageKeys) else self.keys(tokens)
        if len(keys) and keys.width != self._entry.key_bytes:
            raise ValueError(
                f"page keys of {keys.width} bytes; this namespace has {self._entry.key_bytes}"
            )
        if not 0 <= first <= len(keys):
            raise ValueError(f"first = {first} of {len(keys)} pages")
        return keys

    def _fragments(
        self, memory: Any, count: int, slots: Sequence[int] | None, writable: bool = False
    ) -> PageFragments:
        if count > PAGES_PER_CALL_MAX:
            raise ValueError(f"more than {PAGES_PER_CALL_MAX} pages in one save or load")
        if isinstance(memory, PageFragments):
            fragments = memory
        else:
            piece = as_memory(memory)
            if writable and not piece.writable:
                raise ValueError("the memory to load into is read-only")
            fragments = page_fragments(piece, self._entry.page_bytes, count, slots)
        if fragments.address.size > BATCH_FRAGMENTS_MAX:
            raise ValueError(f"more than {BATCH_FRAGMENTS_MAX} fragments in one save or load")
        if fragments.page_count != count or fragments.page_bytes != self._entry.page_bytes:
            raise ValueError(
                f"memory of {fragments.page_count} pages of {fragments.page_bytes} bytes for "
                f"{count} pages of {self._entry.page_bytes} bytes"
            )
        return fragments


class PrefixStore:
    """A persistent store of KV-cache pages, keyed by their prefix.

    Use `PrefixStore.open`. A context manager: leaving it closes the store.
    Threads    all methods may be called from any thread. A forked child must open its own.
    """

    def __init__(self, config: StoreConfig, transport: Transport | None = None) -> None:
        self.config = config
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.Lock()
        self._loads_lock = threading.Lock()
        self._loads: set[LoadTicket] = set()  # keeps their memory alive until they end
        layout, self._catalog = open_layout(config)
        with ExitStack() as undo:
            undo.callback(self._catalog.close)
            self._lease = take_lease(lease_folder(config.path))
            undo.callback(self._lease.release)
            self._transport = transport or open_transport(
                config.transport,
                layout.devices(),
                TransportOptions(
                    queue_depth=config.queue_depth,
                    transfer_bytes_max=int(config.transfer_max),
                    bounce_bytes=int(config.bounce),
                ),
            )
            undo.callback(self._transport.close)
            self._manager = Manager(
                layout,
                self._catalog,
                self._lease,
                lease_folder(config.path),
                -(-layout.segment_count // config.writers_max),
            )
            undo.pop_all()
        self._secret = layout.secret
        self._saver = Saver(
            self._manager,
            self._transport,
            flush=config.durability == "flush",
            backlog_bytes=int(config.backlog),
            io_timeout_s=config.io_timeout_s,
            sweep=self._sweep,
            fail=lambda: self._manager.count("internal_errors", 1),
        )
        self._restorer = threading.Thread(
            target=self._manager.restore, name="tutti-restore", daemon=True
        )
        self._restorer.start()
        _open_stores.add(self)

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
        Cost       independent of the number of pages; the index fills in the background.
        """
        if not isinstance(config, StoreConfig):
            config = StoreConfig.parse({"path": Path(config), **settings})
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
            ConfigError: a field is unknown or impossible, or a page is larger than a segment.
        """
        self._check_open()
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
        if namespace.page_bytes > self._manager.layout.segment_bytes:
            raise ConfigError(
                f"page_bytes = {namespace.page_bytes} is larger than a segment of "
                f"{self._manager.layout.segment_bytes} bytes",
                hint="make a new store with a larger `segment` or capacity",
            )
        return NamespaceStore(self, namespace, self._manager.entry(namespace))

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
        """Forget registered memory; no transfer may be using it."""
        if not self._closed:
            self._transport.unregister(region)

    def wait_restored(self, timeout_s: float) -> bool:
        """Wait until the index of an existing store is in memory; answers are right before."""
        return self._manager.restored.wait(timeout_s)

    def stats(self) -> StoreStats:
        """Return a snapshot of the counters. Raises StoreClosedError after `close`."""
        self._check_open()
        return StoreStats(
            pages=self._catalog.record_count(),
            used_bytes=self._manager.used_bytes(),
            capacity_bytes=int(self.config.capacity),
            pending_bytes=self._saver.pending_bytes(),
            index_restored=self._manager.restored.is_set(),
            transport=self._transport.capabilities(),
            counters=dict(self._manager.counters),
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish saves and loads in flight, then let go of files and threads. Idempotent.

        What is not finished after `timeout_s` is abandoned: such pages are not stored.
        """
        with self._close_lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            deadline_s = time.monotonic() + timeout_s
            self._manager.stop()
            self._restorer.join(timeout_s)
            stopped = self._saver.stop(max(deadline_s - time.monotonic(), 0.0))
            with self._loads_lock:
                loads = list(self._loads)
            for ticket in loads:
                left_s = max(deadline_s - time.monotonic(), 0.0)
                ticket._advance(left_s, left_s)
            if not stopped:
                logger.warning("closing a store with saves unfinished after %s s", timeout_s)
                return  # its thread still uses the files; the process's end lets go of them
            self._transport.close()
            self._lease.release()
            self._catalog.close()
            _open_stores.discard(self)

    # ---- inside ----
    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        if self._pid != os.getpid():
            raise StoreClosedError(
                "the store belongs to the parent process", hint="open it again after the fork"
            )

    def _save(
        self, entry: Entry, keys: PageKeys, first: int, fragments: PageFragments
    ) -> SaveTicket:
        where = self._manager.locate(entry, keys.data, first, keys.rooted)
        stored = where.slot != NO_SLOT
        ticket = SaveTicket(stored)
        missing = np.flatnonzero(~stored)
        self._manager.count("known_pages", len(stored) - len(missing))
        if len(missing):
            job = SaveJob(
                entry=entry,
                keys=keys.part(0, first + int(missing[-1]) + 1),
                rooted=keys.rooted,
                index=missing + first,
                result=missing,
                fragments=fragments.select(missing),
                ticket=ticket,
            )
            if self._saver.enqueue(job):
                return ticket
            self._manager.count("pages_refused_busy", len(missing))
        ticket.finish()
        return ticket

    def _load(
        self, entry: Entry, keys: PageKeys, first: int, fragments: PageFragments
    ) -> LoadTicket:
        ticket = LoadTicket(self, entry, keys, first, len(keys) - first)
        started = self._manager.begin_load()
        try:
            where = self._manager.locate(entry, keys.data, first, keys.rooted)
            present = np.flatnonzero(where.slot != NO_SLOT)
            self._manager.count("missed_pages", len(where) - len(present))
            if len(present) == 0:
                self._manager.end_load(started)
                return ticket
            where = where.select(present)
            device, offset = self._manager.extents(where.slot, entry.slot_bytes)
            memory = fragments.select(present)
            batch = page_batch(Op.READ, device, offset, memory, len(present), self.config.verify)
            transfer = self._submit(batch)
        except BaseException:
            self._manager.end_load(started)
            raise
        if transfer is None:
            self._manager.count("loads_refused_busy", len(present))
            self._manager.end_load(started)
            return ticket
        ticket._attach(transfer, started, present, where, memory)
        with self._loads_lock:
            self._loads.add(ticket)
        return ticket

    def _end_load(self, ticket: LoadTicket, started: int) -> None:
        self._manager.end_load(started)
        with self._loads_lock:
            self._loads.discard(ticket)

    def _submit(self, batch: Batch) -> int | None:
        """Start a batch; None when too many are in flight even after collecting finished ones."""
        try:
            return self._transport.submit(batch)
        except BusyError:
            self._sweep()
        try:
            return self._transport.submit(batch)
        except BusyError:
            return None

    def _sweep(self) -> None:
        """Collect loads that have ended but that nobody waited for."""
        with self._loads_lock:
            loads = list(self._loads)
        for ticket in loads:
            ticket._advance(0.0, 0.0)

    def _judge(
        self,
        entry: Entry,
        keys: PageKeys,
        first: int,
        pages: npt.NDArray[np.intp],
        where: Locations,
        result: BatchResult,
        started: int,
    ) -> npt.NDArray[np.bool_]:
        """Which pages of a finished load are good; the others are forgotten."""
        count = self._manager.count
        read = result.status == 0
        good = read.copy()
        if self.config.verify:
            good &= result.checksum == where.checksum
        index = pages + first
        valid = self._manager.still_there(entry, keys.data, index, where, started)
        count("read_errors", int(np.count_nonzero(~read)))
        count("checksum_errors", int(np.count_nonzero(read & ~good & valid)))
        bad = np.flatnonzero(~(good & valid) & ~np.isin(result.status, _NOT_THE_PAGE))
        if len(bad):
            self._forget(entry, keys, index[bad], where.select(bad), valid[bad])
        good &= valid
        count("loaded_pages", int(np.count_nonzero(good)))
        return np.asarray(good, dtype=np.bool_)

    def _forget(
        self,
        entry: Entry,
        keys: PageKeys,
        index: npt.NDArray[np.intp],
        where: Locations,
        recorded: npt.NDArray[np.bool_],
    ) -> None:
        """Drop pages that could not be read: from memory now, their records soon."""
        record_keys = self._manager.record_keys(entry, keys.data, index)
        self._manager.drop(entry, keys.data, index, keys.rooted, where.generation, recorded)
        dropped = [
            (record_key_at(record_keys, i), int(where.slot[i]), int(where.generation[i]))
            for i in np.flatnonzero(recorded).tolist()
        ]
        if dropped:
            self._saver.enqueue(DropJob(dropped))
            logger.warning("%d pages could not be read back and were dropped", len(dropped))


@atexit.register
def _close_all() -> None:
    for store in list(_open_stores):
        try:
            store.close(10.0)
        except Exception:
            logger.exception("closing a store at exit failed")
