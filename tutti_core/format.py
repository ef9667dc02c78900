"""The bytes that outlive a process, and nothing else: superblock, record, segment entry, header.

Shared by readers and writers. `docs/format.md` is the grammar with a worked example;
`tests/format` holds golden bytes that must decode for ever. A change here raises FORMAT_VERSION.
All integers are little-endian, but for database keys, which are big-endian so that they sort.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from tutti_core.errors import ConfigError, CorruptionError, UnsupportedError

FORMAT_VERSION = 2
"""2 added pages that are stored in parts; a store of version 1 stays one and holds none."""
READABLE_VERSIONS = (1, 2)
PARTS_VERSION = 2
FLAG_ENCRYPTED = 1
"""Flag of a superblock: pages are encrypted. A Tutti refuses flags that it does not know, so adding
one needs no new version: what it concerns is unreadable to an older one, and all else unchanged."""
REPAIR_HINT = "`tutti verify --repair` makes it anew from what can still be read"
"""For errors about a catalog that is damaged."""

POOL_MAGIC = b"TUTTIPOL"
SUPERBLOCK_BYTES = 4096
DATA_OFFSET_BYTES = 1 << 20
"""Where segment 0 of a pool starts; the first MiB holds the superblock and is otherwise zero."""

ROOT_PARENT = bytes(16)
"""Parent of the first page of a sequence."""
UNKNOWN_PARENT = b"\xff" * 16
"""Parent of a page that was saved without its prefix."""

_BLOCK_BYTES = 4096
KEY_CHECK_BYTES = 16
_SUPERBLOCK = struct.Struct("<8sII16s16sIIQQQ16s")
_CHECK = struct.Struct("<Q")
_DAMAGED_HINT = (
    "`tutti verify --repair` writes it from another copy; `tutti init --discard` makes the store "
    "anew and forgets its pages"
)


@dataclass(frozen=True, slots=True)
class Superblock:
    """First 4 KiB of each pool, and a copy in the catalog.

    offset size field
    0      8    magic "TUTTIPOL"
    8      4    format version
    12     4    flags: 1 encrypted, others 0
    16     16   store id, random
    32     16   secret, random: seeds the key chains of the standalone store
    48     4    index of this pool
    52     4    number of pools
    56     8    segment size in bytes
    64     8    segments in this pool
    72     8    offset of segment 0 in bytes
    80     16   check value of the encryption key; zeros where nothing is encrypted
    96     3992 zeros
    4088   8    XXH3-64 of bytes 0..4087
    """

    store_id: bytes
    secret: bytes
    pool_index: int
    pool_count: int
    segment_bytes: int
    segment_count: int
    data_offset_bytes: int = DATA_OFFSET_BYTES
    key_check: bytes = b""
    version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """The 4,096 bytes of this superblock."""
        head = _SUPERBLOCK.pack(
            POOL_MAGIC,
            self.version,
            FLAG_ENCRYPTED if self.key_check else 0,
            self.store_id,
            self.secret,
            self.pool_index,
            self.pool_count,
            self.segment_bytes,
            self.segment_count,
            self.data_offset_bytes,
            self.key_check,
        )
        body = head.ljust(SUPERBLOCK_BYTES - _CHECK.size, b"\0")
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    def _is_possible(self) -> bool:
        """Whether the fields fit together; a program that wrote others had a fault."""
        end = self.data_offset_bytes + self.segment_count * self.segment_bytes
        return (
            self.pool_index < self.pool_count
            and self.segment_bytes > 0
            and self.segment_bytes % _BLOCK_BYTES == 0
            and self.data_offset_bytes == DATA_OFFSET_BYTES
            and end < 1 << 63
        )

    @staticmethod
    def is_whole(data: bytes) -> bool:
        """Whether the check in the last bytes agrees with those before."""
        if len(data) < SUPERBLOCK_BYTES:
            return False
        (check,) = _CHECK.unpack_from(data, SUPERBLOCK_BYTES - _CHECK.size)
        return xxhash.xxh3_64_intdigest(data[: SUPERBLOCK_BYTES - _CHECK.size]) == int(check)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Superblock:
        """Read a superblock; `where` names the file in errors.

        Raises
            ConfigError: the file is not a pool of ours.
            UnsupportedError: written by another format version.
            CorruptionError: ours, but damaged.
        """
        if len(data) < SUPERBLOCK_BYTES or data[:8] != POOL_MAGIC:
            raise ConfigError(
                f"{where} is not a Tutti pool",
                device=where,
                hint="name another path, or move this file away",
            )
        fields = _SUPERBLOCK.unpack_from(data)
        version, flags = fields[1], fields[2]
        if version not in READABLE_VERSIONS or flags & ~FLAG_ENCRYPTED:
            raise UnsupportedError(
                f"{where} has format version {version} (flags {flags}); this Tutti reads "
                f"versions {', '.join(map(str, READABLE_VERSIONS))}",
                device=where,
                hint="use the Tutti that wrote it, or another path; if none did, it is damaged, "
                "and `tutti verify --repair` writes it from another copy",
            )
        if not cls.is_whole(data):
            raise CorruptionError(
                f"the superblock of {where} is damaged",
                op="open",
                device=where,
                data_lost=True,
                scope="device",
                hint=_DAMAGED_HINT,
            )
        found = replace(cls(*fields[3:]), version=version)
        if not found._is_possible():
            raise CorruptionError(
                f"the superblock of {where} describes no layout that can be: {found}",
                op="open",
                device=where,
                data_lost=True,
                scope="device",
                hint=_DAMAGED_HINT,
            )
        return found if flags & FLAG_ENCRYPTED else replace(found, key_check=b"")


RECORD = np.dtype(
    [
        ("page_key", "V32"),
        ("namespace", "V16"),
        ("parent", "V16"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("length_bytes", "<u4"),
        ("check", "<u4"),
        ("checksum", "<u8"),
        ("generation", "<u8"),
    ]
)
"""One stored page. 96 bytes, value of the catalog's `records` database.

offset size field
0      32   page key, zero-padded when it is shorter
32     16   namespace digest
48     16   record key of the parent page; zeros for a first page, ff bytes for an unknown parent
64     4    segment
68     4    slot within the segment
72     4    stored length in bytes
76     4    low half of XXH3-64 of the record with this field zero
80     8    XXH3-64 of the stored bytes; of a page in parts, of its header and its part 0
88     8    generation: unique and rising over all puts of the store
"""
RECORD_BYTES = RECORD.itemsize
assert RECORD_BYTES == 96
_CHECK_AT = 76


def seal_records(records: np.ndarray) -> None:
    """Fill the `check` field of each record (RECORD dtype) in place."""
    records["check"] = 0
    raw = records.tobytes()
    records["check"] = [
        xxhash.xxh3_64_intdigest(raw[i : i + RECORD_BYTES]) & 0xFFFFFFFF
        for i in range(0, len(raw), RECORD_BYTES)
    ]


def record_is_sound(raw: bytes) -> bool:
    """Whether `raw` is a record whose `check` agrees with its bytes."""
    if len(raw) != RECORD_BYTES:
        return False
    blank = raw[:_CHECK_AT] + b"\0\0\0\0" + raw[_CHECK_AT + 4 :]
    (check,) = struct.unpack_from("<I", raw, _CHECK_AT)
    return bool(xxhash.xxh3_64_intdigest(blank) & 0xFFFFFFFF == check)


PART_HEADER_BYTES = 4096
PARTS_MAX = 504
PART_MAGIC = b"TUTTIPRT"
PART_HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("parts", "<u4"),
        ("reserved", "<u4"),
        ("page_key", "V32"),
        ("namespace", "V16"),
        ("checksum", "<u8", (PARTS_MAX,)),
    ]
)
"""First block of a page that is stored in parts; the parts follow, each padded to whole blocks.

offset size  field
0      8     magic "TUTTIPRT"
8      4     number of parts
12     4     zeros
16     32    page key, zero-padded when it is shorter
48     16    namespace digest
64     4032  XXH3-64 of each part without its padding; zeros behind the last

The record's checksum covers this block and part 0, so whoever has read part 0 can check the rest.
"""
assert PART_HEADER.itemsize == PART_HEADER_BYTES

TRAILER = np.dtype([("tag", "V16"), ("nonce", "V12"), ("zeros", "V4"), ("salt", "V16")])
"""What follows each encrypted page, or each encrypted part of a page in parts.

offset size field
0      16   GCM tag
16     12   nonce, random
28     4    zeros
32     16   salt of the key that encrypted it
"""
TRAILER_BYTES = TRAILER.itemsize
assert TRAILER_BYTES == 48

_SEGMENT = struct.Struct("<IIII")
SEGMENT_BYTES = _SEGMENT.size


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Who owns a segment and how it is cut; value of the catalog's `segments` database (16 bytes).

    offset size field
    0      4    lease that owns it
    4      4    slot size in 4 KiB blocks
    8      8    zeros
    """

    lease: int
    slot_blocks: int

    def encode(self) -> bytes:
        """The 16 bytes of this entry."""
        return _SEGMENT.pack(self.lease, self.slot_blocks, 0, 0)

    @classmethod
    def decode(cls, data: bytes) -> SegmentEntry:
        """Read an entry. Raises CorruptionError for another length or a slot size of 0."""
        if len(data) != SEGMENT_BYTES:
            raise CorruptionError(
                "segment entry of wrong length in the catalog", scope="store", hint=REPAIR_HINT
            )
        lease, blocks, _, _ = _SEGMENT.unpack(data)
        if blocks == 0:
            raise CorruptionError(
                "segment entry without a slot size in the catalog", scope="store", hint=REPAIR_HINT
            )
        return cls(lease, blocks)


def slot_key(segment: int, slot: int) -> bytes:
    """Key of the catalog's `slots` database: segment and slot, big-endian."""
    return struct.pack(">II", segment, slot)
