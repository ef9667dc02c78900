"""Bytes of format versions 1 and 2. They must decode, and encode to the same bytes, for ever.

A change that makes one of these tests fail loses every store that exists. It needs a new format
version, and golden bytes of its own beside these.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from tutti_core import (
    ConfigError,
    CorruptionError,
    Namespace,
    PageFragments,
    UnsupportedError,
    hashing,
)
from tutti_core import format as layout
from tutti_core.format import (
    RECORD,
    SegmentEntry,
    Superblock,
    record_is_sound,
    seal_records,
    slot_key,
)
from tutti_core.keys import encode_salt
from tutti_core.tiers.parts import PartLayout

SUPERBLOCK = Superblock(bytes(range(16)), bytes(range(16, 32)), 1, 3, 64 << 20, 1234, version=1)
SUPERBLOCK_HEAD = bytes.fromhex(
    "5455545449504f4c"  # TUTTIPOL
    "0100000000000000"  # format version, flags
    "000102030405060708090a0b0c0d0e0f"  # store id
    "101112131415161718191a1b1c1d1e1f"  # secret
    "0100000003000000"  # this pool, pools
    "0000000400000000"  # segment size
    "d204000000000000"  # segments
    "0000100000000000"  # offset of segment 0
)
SUPERBLOCK_CHECK = bytes.fromhex("edbff77c46505538")
SUPERBLOCK_2_CHECK = bytes.fromhex("36be4e10fe95972c")

RECORD_BYTES = bytes.fromhex(
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"  # page key
    "202122232425262728292a2b2c2d2e2f"  # namespace
    "303132333435363738393a3b3c3d3e3f"  # parent
    "04030201"  # segment
    "08070605"  # slot
    "00002000"  # length
    "14371ba3"  # check
    "8877665544332211"  # checksum
    "00ffeeddccbbaa99"  # generation
)
CANONICAL = (
    b'{"dtype":"","extra":{},"format":1,"key_bytes":16,"layout":"","model":"org/m",'
    b'"page_bytes":2097152,"page_tokens":64,"pool":"kv","shard":"","weights":""}'
)
DIGEST = bytes.fromhex("8d219a5980808d682beb23836e450da2")


def test_constants() -> None:
    assert (layout.FORMAT_VERSION, layout.READABLE_VERSIONS) == (2, (1, 2))
    assert (layout.PART_HEADER_BYTES, layout.PARTS_MAX) == (4096, 504)
    assert (layout.SUPERBLOCK_BYTES, layout.DATA_OFFSET_BYTES) == (4096, 1 << 20)
    assert layout.ROOT_PARENT == bytes(16) and layout.UNKNOWN_PARENT == b"\xff" * 16
    assert (layout.RECORD_BYTES, layout.SEGMENT_BYTES) == (96, 16)


def test_superblock() -> None:
    golden = SUPERBLOCK_HEAD.ljust(4088, b"\0") + SUPERBLOCK_CHECK
    assert SUPERBLOCK.encode() == golden
    assert Superblock.decode(golden, "pool") == SUPERBLOCK
    assert Superblock.decode(golden + b"more of the file", "pool") == SUPERBLOCK


def test_superblock_of_version_2() -> None:
    head = SUPERBLOCK_HEAD[:8] + b"\2" + SUPERBLOCK_HEAD[9:]
    golden = head.ljust(4088, b"\0") + SUPERBLOCK_2_CHECK
    assert replace(SUPERBLOCK, version=2).encode() == golden
    assert Superblock.decode(golden, "pool") == replace(SUPERBLOCK, version=2)


@pytest.mark.parametrize("bit", range(0, 4096 * 8, 517))
def test_a_superblock_with_a_flipped_bit_is_never_believed(bit: int) -> None:
    data = bytearray(SUPERBLOCK.encode())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises((ConfigError, UnsupportedError, CorruptionError)) as caught:
        Superblock.decode(bytes(data), "/mnt/pool")
    assert "/mnt/pool" in str(caught.value) and caught.value.hint


def test_a_newer_superblock_is_told_apart_from_a_damaged_one() -> None:
    data = bytearray(SUPERBLOCK.encode())
    struct.pack_into("<I", data, 8, 3)
    with pytest.raises(UnsupportedError, match="version 3"):  # whatever its check says
        Superblock.decode(bytes(data), "pool")


def test_record() -> None:
    record = np.frombuffer(RECORD_BYTES, RECORD)[0]
    assert record_is_sound(RECORD_BYTES)
    assert record["page_key"].tobytes() == bytes(range(32))
    assert record["namespace"].tobytes() == bytes(range(32, 48))
    assert record["parent"].tobytes() == bytes(range(48, 64))
    assert (int(record["segment"]), int(record["slot"])) == (0x01020304, 0x05060708)
    assert int(record["length_bytes"]) == 2 << 20
    assert int(record["checksum"]) == 0x1122334455667788
    assert int(record["generation"]) == 0x99AABBCCDDEEFF00
    again = np.frombuffer(RECORD_BYTES, RECORD).copy()
    again["check"] = 0
    seal_records(again)
    assert again.tobytes() == RECORD_BYTES


@pytest.mark.parametrize("bit", range(0, 96 * 8, 7))
def test_a_record_with_a_flipped_bit_is_never_believed(bit: int) -> None:
    data = bytearray(RECORD_BYTES)
    data[bit // 8] ^= 1 << bit % 8
    assert not record_is_sound(bytes(data))


@pytest.mark.parametrize("length", [0, 1, 95, 97, 192])
def test_a_record_of_another_length_is_never_believed(length: int) -> None:
    assert not record_is_sound((RECORD_BYTES * 2)[:length])
    assert not record_is_sound(bytes(96))


def test_segment_entry() -> None:
    golden = bytes.fromhex("07000000000200000000000000000000")
    assert SegmentEntry(7, 512).encode() == golden and SegmentEntry.decode(golden).lease == 7
    assert SegmentEntry.decode(golden) == SegmentEntry(7, 512)
    for bad in (b"", golden[:15], golden + b"\0", bytes(16)):
        with pytest.raises(CorruptionError):
            SegmentEntry.decode(bad)


def test_page_in_parts() -> None:
    """Two parts of 3 and 5,000 bytes: header, then each part padded to whole blocks."""
    parts = PartLayout((3, 5000))
    assert (parts.offset_bytes, parts.stored_bytes) == ((4096, 8192), 16384)
    page = np.frombuffer(b"abc" + b"x" * 5000, dtype=np.uint8)
    where = np.array([[page.ctypes.data, page.ctypes.data + 3]], dtype=np.uint64)
    fragments = PageFragments(where, np.array([3, 5000], dtype=np.uint64), page)
    key = np.arange(20, dtype=np.uint8)[None, :]
    stored = parts.seal(bytes(range(32, 48)), key, fragments)
    raw = b"".join(
        ctypes.string_at(int(a), int(n))
        for a, n in zip(stored.address[0], stored.length_bytes, strict=True)
    )
    header = bytes.fromhex(
        "5455545449505254"  # TUTTIPRT
        "0200000000000000"  # parts
        "000102030405060708090a0b0c0d0e0f10111213000000000000000000000000"  # page key
        "202122232425262728292a2b2c2d2e2f"  # namespace
        "50392f89945faf78903deec9cb67858d"  # XXH3-64 of each part
    ).ljust(4096, b"\0")
    assert raw == header + b"abc".ljust(4096, b"\0") + (b"x" * 5000).ljust(8192, b"\0")
    assert parts.record_checksums(stored).tolist() == [xxhash.xxh3_64_intdigest(header + b"abc")]


def test_slot_key_sorts_by_segment_and_slot() -> None:
    assert slot_key(0x01020304, 5).hex() == "0102030400000005"
    keys = [slot_key(s, i) for s in (0, 1, 255, 256) for i in (0, 1, 255, 256)]
    assert keys == sorted(keys)


def test_namespace() -> None:
    plain = Namespace(model="org/m", page_bytes=2 << 20, page_tokens=64)
    assert plain.canonical() == CANONICAL and plain.digest() == DIGEST
    full = Namespace(
        model='Lläma\u2028"x"',
        page_bytes=1,
        page_tokens=1,
        weights="rev:1",
        dtype="bf16",
        layout="page_first",
        shard="tp 1/4",
        pool="mamba",
        key_bytes=32,
        extra={"b": "2", "a": "1"},
    )
    assert full.canonical() == (
        b'{"dtype":"bf16","extra":{"a":"1","b":"2"},"format":1,"key_bytes":32,'
        b'"layout":"page_first","model":"Ll\\u00e4ma\\u2028\\"x\\"","page_bytes":1,'
        b'"page_tokens":1,"pool":"mamba","shard":"tp 1/4","weights":"rev:1"}'
    )
    assert full.digest().hex() == "0312a5ead2a4c54315c9df65042ce362"


def test_salt() -> None:
    assert encode_salt(salt=None, lora=None, tenant=None) == b""
    assert encode_salt(salt=None, lora="adapter", tenant="").hex() == (
        "0401070000006c6f726161646170746572"  # "lora", present, 7 bytes
        "04000000000073616c74"  # "salt", absent
        "06010000000074656e616e74"  # "tenant", present, empty
    )


@pytest.mark.parametrize("path", ["native", "fallback"])
def test_page_key_chain_and_record_keys(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "fallback":
        monkeypatch.setattr(hashing, "_native", None)
    elif not hashing.is_native():
        pytest.skip("built without the native extension")
    tokens = np.arange(9, dtype=np.uint32)
    seed = bytes(range(16)) + DIGEST
    assert hashing.chain_keys(seed, tokens, 4).hex() == (
        "5299207a52707f6f7474789f67592801bfc1ad7a8d32fbd82a851b0e6733cc05"
    )
    salted = seed + encode_salt(salt="s", lora=None, tenant=None)
    assert hashing.chain_keys(salted, tokens, 4).hex() == (
        "b544289359f3bb58f6325f77523b47c8ae73b1da8476f253239536accf12e3b0"
    )
    assert hashing.record_keys(DIGEST, bytes(range(64)), 32).hex() == (
        "3a0a9a1bf454898282f3883f489600fa10e172e13e093d3db2e1204fb4cf56b3"
    )


def test_digests_are_xxh3_in_canonical_byte_order() -> None:
    assert hashing.digest(b"tutti") == xxhash.xxh3_128(b"tutti").digest()
    assert hashing.digest(b"tutti").hex() == xxhash.xxh3_128(b"tutti").hexdigest()
    assert hashing.checksum(b"tutti") == xxhash.xxh3_64(b"tutti").intdigest()
