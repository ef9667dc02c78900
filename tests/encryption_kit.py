"""Encrypted stores for tests, and a second implementation of the format to check the first with.

What is here follows docs/format.md with `hmac` and AESGCM alone, and shares no code with Tutti's.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from store_kit import finish, load_in_parts, open_small

from tutti_core import NamespaceStore, PrefixStore
from tutti_core.trials.kit import small_config

KEY = hashlib.sha256(b"a key for tests").digest()
SEGMENT = 128 << 10
TRAILER = 48


def key_file(folder: Path, key: bytes = KEY, name: str = "key") -> Path:
    """Make a key file as it should be."""
    file = folder / name
    file.touch(mode=0o600)
    file.write_text(key.hex() + "\n")
    return file


def open_encrypted(path: Path, **settings: Any) -> PrefixStore:
    """Open a small store with the key file next to it."""
    settings.setdefault("segments", 16)
    file = key_file(path.parent)
    return open_small(path, segment=SEGMENT, encryption_key_file=file, **settings)


def encrypted_config(path: Path, **settings: Any):
    settings.setdefault("segments", 16)
    file = key_file(path.parent)
    return small_config(path, segment=SEGMENT, encryption_key_file=file, **settings)


def pages_of(store: PrefixStore, sizes: Sequence[int], **fields: Any) -> NamespaceStore:
    """A namespace of pages of one size, or in parts of several."""
    parts = {"parts": tuple(sizes)} if len(sizes) > 1 else {}
    fields = {"model": "m", "page_tokens": 1, "page_bytes": sum(sizes), **parts, **fields}
    return store.namespace(**fields)


def random_pages(count: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


def load(pages: NamespaceStore, keys: Any, memory: Any) -> list[bool]:
    """Load all pages, in parts or not; one bool a page."""
    if pages.namespace.parts:
        return load_in_parts(pages.load_parts(keys, memory)).tolist()
    return finish(pages.load(keys, memory)).tolist()


# ---- the format, a second time ----
def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, 32 bytes."""
    pseudo = hmac.digest(salt, key, "sha256")
    return hmac.digest(pseudo, info + b"\1", "sha256")


def unit_name(digest: bytes, key: bytes, unit: int, units: int, length: int) -> bytes:
    return digest + key.ljust(32, b"\0") + struct.pack("<IIQ", unit, units, length)


def open_unit(
    stored: bytes, store_id: bytes, digest: bytes, key: bytes, unit: int = 0, units: int = 1
) -> bytes:
    """Decrypt ciphertext and trailer; raises InvalidTag."""
    text, tag, nonce, rest = stored[:-48], stored[-48:-32], stored[-32:-20], stored[-20:]
    zeros, salt = rest[:4], rest[4:]
    page_key = hkdf(hkdf(KEY, store_id, b"tutti namespace " + digest), salt, b"tutti pages")
    name = unit_name(digest, key, unit, units, len(text)) + nonce + zeros + salt
    return AESGCM(page_key).decrypt(nonce, text + tag, name)


@dataclass
class Stored:
    """One page on disk, to be looked at and changed while its store is closed.

    raw   all stored bytes; `put` writes them back with checksums that agree.
    """

    path: Path
    record_key: bytes
    record: bytearray
    store_id: bytes
    parts: tuple[int, ...]
    offset: int
    raw: bytearray

    @property
    def page_key(self) -> bytes:
        return bytes(self.record[:32])

    @property
    def digest(self) -> bytes:
        return bytes(self.record[32:48])

    def units(self) -> list[tuple[int, int]]:
        """Where each unit with its trailer lies in `raw`."""
        if not self.parts:
            return [(0, len(self.raw))]
        found, at = [], 4096
        for size in self.parts:
            found.append((at, at + size + TRAILER))
            at += -(-(size + TRAILER) // 4096) * 4096
        return found

    def put(self) -> None:
        """Write the page back, with a record (and header) that vouch for it."""
        units, covered = self.units(), bytes(self.raw)
        if self.parts:
            for i, (low, high) in enumerate(units):
                check = xxhash.xxh3_64_intdigest(bytes(self.raw[low:high]))
                struct.pack_into("<Q", self.raw, 64 + 8 * i, check)
            covered = bytes(self.raw[: units[0][1]])
        struct.pack_into("<Q", self.record, 80, xxhash.xxh3_64_intdigest(covered))
        struct.pack_into("<I", self.record, 76, 0)
        check = xxhash.xxh3_64_intdigest(bytes(self.record)) & 0xFFFFFFFF
        struct.pack_into("<I", self.record, 76, check)
        with open(self.path / "pool.tutti", "r+b") as pool:
            pool.seek(self.offset)
            pool.write(self.raw)
        env = lmdb.open(str(self.path / "catalog"), max_dbs=8, map_size=64 << 20)
        with env.begin(write=True) as txn:
            txn.put(self.record_key, bytes(self.record), db=env.open_db(b"records", txn))
        env.close()


def stored_pages(path: Path, parts: tuple[int, ...] = ()) -> list[Stored]:
    """Every page of a closed store with one pool, in order of its place."""
    pool = (path / "pool.tutti").read_bytes()
    store_id = pool[16:32]
    found = []
    env = lmdb.open(str(path / "catalog"), max_dbs=8, readonly=True)
    with env.begin() as txn:
        for key, value in txn.cursor(db=env.open_db(b"records", txn, create=False)):
            segment, slot, length = struct.unpack_from("<III", value, 64)
            offset = (1 << 20) + segment * SEGMENT + slot * -(-length // 4096) * 4096
            raw = bytearray(pool[offset : offset + length])
            found.append(Stored(path, bytes(key), bytearray(value), store_id, parts, offset, raw))
    env.close()
    return sorted(found, key=lambda page: page.offset)
