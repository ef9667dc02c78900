"""The catalog's file when the power goes: LMDB's commits counted, stopped, and taken back in part.

While a CatalogPower is installed, every `lmdb.open` of this process goes through it. What LMDB
does, and what may therefore be on the disk:

    commit            writes tree pages in any order, syncs, writes one meta page (inside a sector),
                      syncs that. Not finished: the old meta page, with any of the new tree pages
                      there, missing or torn; or the new meta page and all tree pages.
                      Returned: the file as it is.
    metasync=False    returned: the new meta page or the old one, all tree pages.
    sync=False        returned: every block since the file was opened there, missing or torn.
    creation          the first two pages are not synced before the first commit.

An operation is the begin of a write transaction, or a commit (the creation of a database or of the
file counts as one). Reads change nothing and are not counted. Names in directories are not part of
this; see power_loss.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from tutti_core.io.transport import BLOCK_BYTES
from tutti_core.testing.media import SECTOR_BYTES

META_BLOCKS = 2
"""Blocks at the front of the file that LMDB writes in turn, after the rest is synced."""


@dataclass(slots=True)
class _File:
    """One data.mdb: what is surely on the disk, and what may be.

    durable    content that a power loss cannot take back.
    written    content after the last write.
    ordered    every block but the meta pages is on the disk where a meta page of `written` is.
    """

    durable: bytes
    written: bytes
    ordered: bool = True

    def survivor(self, rng: random.Random) -> bytes:
        """One content that the file may have after a power loss."""
        if self.durable == self.written:
            return self.written
        if self.ordered and rng.random() < 0.5:
            return self.written
        blocks = max(len(self.durable), len(self.written)) // BLOCK_BYTES
        first = META_BLOCKS if self.ordered else 0
        left = [_block(self.durable, i) for i in range(first)]
        left += [
            _torn(_block(self.durable, i), _block(self.written, i), rng)
            for i in range(first, blocks)
        ]
        longest = rng.choice((len(self.durable), len(self.written)))
        return b"".join(left)[: max(longest, len(self.durable))]


class CatalogPower:
    """Counts what is done to catalogs, stops it, and decides what a power loss leaves.

    Parameters
        is_off: whether the power went elsewhere, for instance at a device.
        on_stop: called at the operation at which it goes here, so that it goes everywhere.
    Threads    any; one lock, held over each commit.
    """

    def __init__(
        self,
        is_off: Callable[[], bool] = lambda: False,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = threading.RLock()
        self.operations = 0
        self.watch: Callable[[str], None] | None = None
        """Told of each operation while it is under way, "begin" or "commit", with the lock held."""
        self._is_off = is_off
        self._on_stop = on_stop
        self._stop: int | None = None
        self._stopped = False
        self._files: dict[Path, _File] = {}

    @property
    def stopped(self) -> bool:
        """Whether the power is off."""
        return self._stopped or self._is_off()

    def stop_at(self, operation: int) -> None:
        """Let the power go at operation number `operation`; later ones fail."""
        self._stop = operation

    @contextmanager
    def installed(self) -> Iterator[CatalogPower]:
        """Let all catalogs that are opened in the block pass through here."""
        real = lmdb.open

        def opened(path: str, **options: Any) -> Any:
            return self._open(real, path, **options)

        lmdb.open = opened  # type: ignore[assignment]
        try:
            yield self
        finally:
            lmdb.open = real

    def images(self, rng: random.Random) -> dict[Path, bytes]:
        """What each file may hold after a power loss at this moment."""
        with self.lock:
            return {path: file.survivor(rng) for path, file in self._files.items()}

    def lose(self, rng: random.Random) -> None:
        """Lose the power: put on each file what may be left of it. No catalog may be open."""
        for path, left in self.images(rng).items():
            path.write_bytes(left)
            if rng.random() < 0.5:
                path.with_name("lock.mdb").unlink(missing_ok=True)

    # ---- inside ----
    def _open(self, real: Callable[..., Any], path: str, **options: Any) -> Any:
        data = Path(path) / "data.mdb"
        with self.lock:
            before = _read(data)
            if self.stopped and not before:
                raise lmdb.DiskError("the power is off")
            env = real(path, **options)
            if options.get("readonly"):
                return env
            self._files.setdefault(data, _File(before, before))
            if not before:
                try:
                    self._end(data, ordered=False, durable=b"")
                except lmdb.Error:
                    env.close()
                    raise
            return _Environment(env, self, data, options)

    def begin(self) -> None:
        """A write transaction begins. Raises lmdb.DiskError where the power is off."""
        with self.lock:
            if not self.stopped:
                self._note("begin")
                self._count()
            if self.stopped:
                raise lmdb.DiskError("the power is off")

    def change(self, env: _Environment, work: Callable[[], Any]) -> Any:
        """Run what changes a file, as one operation; what turns out to change nothing is none."""
        with self.lock:
            if self.stopped:
                raise lmdb.DiskError("the power is off")
            before = _read(env.data)
            result = work()
            if (after := _read(env.data)) != before:
                durable: bytes | None = None
                if env.syncs:
                    metas = META_BLOCKS * BLOCK_BYTES
                    durable = after if env.metasyncs else before[:metas] + after[metas:]
                self._end(env.data, ordered=env.syncs, durable=durable)
            return result

    def sync(self, env: _Environment, work: Callable[[], Any]) -> None:
        """Run what syncs a file; from then on all of it is durable."""
        with self.lock:
            if self.stopped:
                raise lmdb.DiskError("the power is off")
            work()
            file = self._files[env.data]
            file.durable = file.written = _read(env.data)

    def _end(self, data: Path, *, ordered: bool, durable: bytes | None) -> None:
        """A file was written; `durable` is what is sure once the operation ends."""
        file = self._files[data]
        file.written, file.ordered = _read(data), ordered
        self._note("commit")
        self._count()
        if self._stopped:
            raise lmdb.DiskError("the power is off")
        if durable is not None:
            file.durable = durable

    def _count(self) -> None:
        self.operations += 1
        if self._stop is not None and self.operations > self._stop:
            self._stopped = True
            self._on_stop()

    def _note(self, what: str) -> None:
        if self.watch is not None:
            self.watch(what)


class _Environment:
    """An LMDB environment whose write transactions pass through a CatalogPower."""

    def __init__(self, env: Any, power: CatalogPower, data: Path, options: dict[str, Any]) -> None:
        self._env = env
        self._power = power
        self.data = data
        self.syncs = bool(options.get("sync", True))
        self.metasyncs = bool(options.get("metasync", True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def begin(self, *args: Any, write: bool = False, **options: Any) -> Any:
        """As `lmdb.Environment.begin`; a write transaction has to be used in a with statement."""
        if not write:
            return self._env.begin(*args, **options)
        return self._write(*args, **options)

    @contextmanager
    def _write(self, *args: Any, **options: Any) -> Iterator[Any]:
        self._power.begin()
        txn = self._env.begin(*args, write=True, **options)
        try:
            yield txn
        except BaseException:
            txn.abort()
            raise
        self._power.change(self, txn.commit)

    def sync(self, force: bool = False) -> None:
        """As `lmdb.Environment.sync`."""
        self._power.sync(self, lambda: self._env.sync(force))

    def open_db(self, *args: Any, **options: Any) -> Any:
        """As `lmdb.Environment.open_db`, which commits where it creates a database."""
        return self._power.change(self, lambda: self._env.open_db(*args, **options))


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _block(content: bytes, index: int) -> bytes:
    return content[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")


def _torn(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """One block after a power loss: old, new, or torn between two sectors."""
    cut = rng.choice((0, BLOCK_BYTES, SECTOR_BYTES * rng.randrange(1, BLOCK_BYTES // SECTOR_BYTES)))
    return new[:cut] + old[cut:]
