"""The catalog's databases as they lie on disk, read-only: for who looks at a store from outside.

`Catalog` hides what is damaged; here it is seen. Nothing is created or locked but an entry in
LMDB's table of readers, so this works beside a server. Each `view` is one LMDB transaction: what is
in it is consistent, whatever a server does meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError, CorruptionError, UnsupportedError
from tutti_core.format import PARTS_MAX, REPAIR_HINT, SegmentEntry, Superblock
from tutti_core.index.catalog import DATABASES, GENERATION_MAX
from tutti_core.index.tree_check import check_tree
from tutti_core.tiers.parts import layout_of_parts, stored_bytes
from tutti_core.tiers.pools import (
    Layout,
    catalog_folder,
    check_catalog,
    inspect_pools,
    pool_file,
)

_MAP_BYTES_MIN = 64 << 30  # only address space; leaves room for a server that grows the file
_READERS_MAX = 512
_ANY_CAPACITY = 1 << 60
SEGMENT_KEY_BYTES = 4


class RawCatalog:
    """The catalog's databases as bytes, read-only, after a check that LMDB can read them.

    Raises
        ConfigError: there is no catalog, it is not ours alone (see `trust`), or this process has
            the store open.
        CorruptionError: LMDB or its databases cannot be read.
    """

    def __init__(self, path: Path, *, trusting: bool = False) -> None:
        check_catalog(path, trusting=trusting)
        folder = catalog_folder(path)
        data = folder / "data.mdb"
        if not data.is_file():
            raise ConfigError(f"there is no store at {path}", hint="`tutti init` makes one")
        check_tree(data, DATABASES)
        try:
            self._env = lmdb.open(
                str(folder),
                map_size=max(_MAP_BYTES_MIN, 4 * data.stat().st_size),
                max_dbs=8,
                max_readers=_READERS_MAX,
                readonly=True,
                create=False,
                lock=(folder / "lock.mdb").exists(),
                readahead=False,
            )
        except lmdb.Error as error:
            if "already open" in str(error):
                raise ConfigError(f"this process has the store at {path} open") from None
            raise CorruptionError(
                f"the catalog in {folder} cannot be opened: {error}",
                scope="store",
                hint=REPAIR_HINT,
            ) from None
        try:
            names = ("meta", "namespaces", "records", "slots", "segments")
            self._db = {name: self._env.open_db(name.encode(), create=False) for name in names}
        except lmdb.Error as error:
            self._env.close()
            raise CorruptionError(
                f"the catalog in {folder} is incomplete: {error}", scope="store", hint=REPAIR_HINT
            ) from None

    def close(self) -> None:
        """Let go of the environment."""
        self._env.close()

    @contextmanager
    def view(self) -> Iterator[View]:
        """One consistent state of the catalog."""
        with self._env.begin() as transaction:
            yield View(transaction, self._db)


class View:
    """The catalog at one instant."""

    def __init__(self, transaction: Any, db: dict[str, Any]) -> None:
        self._transaction = transaction
        self._db = db

    def get(self, database: str, key: bytes) -> bytes | None:
        """One value."""
        value: bytes | None = self._transaction.get(key, db=self._db[database])
        return value

    def count(self, database: str) -> int:
        """Entries of a database."""
        return int(self._transaction.stat(self._db[database])["entries"])

    def items(
        self, database: str, after: bytes | None = None, limit: int | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Up to `limit` entries that follow the key `after`, in order."""
        found: list[tuple[bytes, bytes]] = []
        with self._transaction.cursor(db=self._db[database]) as cursor:
            more = cursor.first() if after is None else cursor.set_range(after)
            if more and after is not None and cursor.key() == after:
                more = cursor.next()
            while more and (limit is None or len(found) < limit):
                found.append(cursor.item())
                more = cursor.next()
        return found

    def superblock(self) -> Superblock | None:
        """The catalog's copy of pool 0's superblock; None where it is missing or damaged."""
        raw = self.get("meta", b"superblock")
        try:
            return None if raw is None else Superblock.decode(raw, "the catalog")
        except (ConfigError, CorruptionError, UnsupportedError):
            return None

    def sequence(self) -> int | None:
        """The last generation given out; None where it cannot be one."""
        raw = self.get("meta", b"sequence")
        sequence = int.from_bytes(raw or b"", "big")
        return None if sequence >= GENERATION_MAX or len(raw or bytes(8)) != 8 else sequence

    def segments(self) -> tuple[dict[int, SegmentEntry], list[bytes]]:
        """Assigned segments, and keys of entries that cannot be read."""
        good, bad = {}, []
        for key, value in self.items("segments"):
            try:
                entry = SegmentEntry.decode(value)
            except CorruptionError:
                bad.append(key)
            else:
                if len(key) == SEGMENT_KEY_BYTES:
                    good[int.from_bytes(key, "big")] = entry
                else:
                    bad.append(key)
        return good, bad


def namespace_fields(description: bytes | None) -> dict[str, Any]:
    """A namespace's description; empty where it is unknown or unreadable."""
    try:
        fields = json.loads(description or b"{}")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def parts_of(fields: dict[str, Any]) -> list[int]:
    """Lengths of the parts that a description names; none where there are none, or nonsense."""
    parts = fields.get("parts", [])
    known = isinstance(parts, list) and len(parts) <= PARTS_MAX
    return parts if known and all(isinstance(n, int) and n > 0 for n in parts) else []


def stored_length(fields: dict[str, Any], trailer_bytes: int) -> int | None:
    """The length that records of a described namespace have; `trailer_bytes` as in `Layout`."""
    parts, page_bytes = layout_of_parts(parts_of(fields), trailer_bytes), fields.get("page_bytes")
    return stored_bytes(page_bytes, parts, trailer_bytes) if isinstance(page_bytes, int) else None


def is_description(description: bytes) -> bool:
    """Whether bytes describe a namespace, as far as can be told without its digest."""
    fields = namespace_fields(description)
    return isinstance(fields.get("page_bytes"), int) and isinstance(fields.get("key_bytes"), int)


def read_layout(
    path: Path, pools: tuple[Path, ...], catalog: RawCatalog, *, trusting: bool = False
) -> Layout:
    """The layout of a store that exists; `pools` as it was created with, default `path` itself.

    Raises
        ConfigError: a pool is missing, or is another store's.
        UnsupportedError, CorruptionError: a superblock of another format, or damaged.
    """
    # Only the pools of the settings are looked at here.
    config = StoreConfig.parse(
        {"path": path, "pools": pools, "capacity": _ANY_CAPACITY, "trust_path": trusting}
    )
    files = tuple(pool_file(place) for place in config.pool_paths)
    found = []
    for file, superblock in zip(files, inspect_pools(config), strict=True):
        if superblock is None:
            raise ConfigError(
                f"the pool {file} is missing", hint="name the store's pools with --pool, in order"
            )
        found.append(superblock)
    with catalog.view() as view:
        known = view.superblock()  # None is for a verification to report
    if found[0].pool_count != len(files):
        raise ConfigError(
            f"the store at {path} has {found[0].pool_count} pools, {len(files)} named",
            hint="name them with --pool, in the order in which the store was created",
        )
    for index, (file, superblock) in enumerate(zip(files, found, strict=True)):
        owner = known.store_id if known is not None else found[0].store_id
        if (superblock.store_id, superblock.pool_index) != (owner, index):
            raise ConfigError(
                f"{file} belongs to another store or another place among the pools",
                device=str(file),
                hint="name the store's pools with --pool, in order",
            )
    return Layout(tuple(found), files)
