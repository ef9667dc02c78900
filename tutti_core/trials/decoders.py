"""Every decoder of persisted bytes and of settings, as a function of bytes that judges itself.

Each takes an input, or refuses it with one of the errors that it documents. What it takes is looked
at: a value that the format does not allow is as wrong as a traceback. AssertionError says so.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import lzma
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash

from tutti_core.config import StoreConfig
from tutti_core.describe import describe_store
from tutti_core.errors import TuttiError
from tutti_core.format import (
    DATA_OFFSET_BYTES,
    PART_HEADER,
    RECORD,
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    SegmentEntry,
    Superblock,
    record_is_sound,
    seal_records,
)
from tutti_core.geometry import PageFragments
from tutti_core.index.restore import build_pages
from tutti_core.keys import PageKeys, token_array
from tutti_core.policies.admission import ADMISSIONS, make_admission
from tutti_core.policies.choice import POLICIES, make_policy
from tutti_core.replay.mooncake import read_trace
from tutti_core.store import PrefixStore
from tutti_core.tiers.parts import PartLayout
from tutti_core.tiers.pools import catalog_folder
from tutti_core.trials.kit import small_config
from tutti_core.verify import verify_store

Decode = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder, and inputs that it takes.

    name      of its folder in a corpus.
    samples   good inputs, from which damaged ones are made.
    decode    as the module says.
    refusals  what it may raise.
    text      whether its input is text.
    cost      how many inputs of the others take the time of one of its.
    """

    name: str
    samples: tuple[bytes, ...]
    decode: Decode
    refusals: tuple[type[Exception], ...] = (TuttiError,)
    text: bool = False
    cost: int = 1

    def refusal(self, data: bytes) -> BaseException | None:
        """Decode; None where that ended as it may, else what was raised."""
        try:
            self.decode(data)
        except self.refusals:
            return None
        except Exception as error:
            return error
        return None


# ---- what stands on the devices ----
SUPERBLOCK = Superblock(bytes(range(16)), bytes(16), 0, 1, 1 << 20, 64).encode()


def decode_superblock(data: bytes) -> None:
    """Only the bytes that were written are taken."""
    found = Superblock.decode(data, "here")
    assert data[:SUPERBLOCK_BYTES] == SUPERBLOCK, f"a damaged superblock was taken: {found}"


def _sealed(data: bytes) -> bytes:
    body = data[: SUPERBLOCK_BYTES - 8].ljust(SUPERBLOCK_BYTES - 8, b"\0")
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def decode_sealed_superblock(data: bytes) -> None:
    """Fields that the check agrees with: what is taken must be a layout that can be."""
    found = Superblock.decode(_sealed(data), "here")
    assert found.pool_index < found.pool_count, f"{found}"
    assert found.segment_bytes > 0 and found.segment_bytes % 4096 == 0, f"{found}"
    assert found.data_offset_bytes == DATA_OFFSET_BYTES, f"{found}"


def _record(**fields: int) -> bytes:
    record = np.zeros(1, dtype=RECORD)
    for name, value in {"segment": 7, "length_bytes": 65536, "generation": 99, **fields}.items():
        record[name] = value
    seal_records(record)
    return record.tobytes()


RECORD_SAMPLE = _record()


def decode_record(data: bytes) -> None:
    """Only the bytes that were written are sound; the check has 32 bits, so none pass by luck."""
    assert record_is_sound(data) == (data == RECORD_SAMPLE), "a damaged record passes for sound"


def decode_records(data: bytes) -> None:
    """Records whose checks are right, with any fields: the index takes each, and stays in order."""
    count = len(data) // RECORD_BYTES
    records = np.frombuffer(data[: count * RECORD_BYTES], dtype=RECORD).copy()
    seal_records(records)
    places = {xxhash.xxh3_128_digest(row["page_key"].tobytes()): i for i, row in enumerate(records)}
    keys = sorted(places)
    pages = build_pages(32, b"".join(keys), records[[places[key] for key in keys]])
    pages.tree.check()
    assert pages.page_count <= len(keys), "more pages than records"


def _records() -> bytes:
    rows = []
    parent = bytes(16)
    for i in range(4):
        row = np.frombuffer(_record(slot=i, generation=i + 1), dtype=RECORD).copy()
        row["page_key"] = np.void(bytes([i]) * 32)
        row["parent"] = np.void(parent)
        parent = xxhash.xxh3_128_digest(bytes([i]) * 32)
        rows.append(row.tobytes())
    return b"".join(rows)


def decode_segment(data: bytes) -> None:
    """An entry has 16 bytes and a slot size, and encodes to what it was."""
    found = SegmentEntry.decode(data)
    assert len(data) == 16 and found.slot_blocks > 0, f"{found}"
    assert found.encode()[:8] == data[:8]


PARTS = PartLayout((5, 4096, 700))


def _page_in_parts() -> bytes:
    memory = np.frombuffer(np.random.default_rng(3).bytes(5 + 4096 + 700), dtype=np.uint8)
    lengths = np.array(PARTS.part_bytes, dtype=np.uint64)
    start = np.uint64(memory.ctypes.data) + np.cumsum(lengths) - lengths
    pages = PageFragments(start[None, :], lengths, memory)
    sealed = PARTS.seal(bytes(16), np.full((1, 16), 7, np.uint8), pages)
    out = bytearray()
    for address, length in zip(sealed.address[0], sealed.length_bytes, strict=True):
        out += ctypes.string_at(int(address), int(length))
    return bytes(out)


PART_PAGE = _page_in_parts()
_PAGE_MEMORY = np.frombuffer(PART_PAGE, dtype=np.uint8)
PART_CHECKSUM = PARTS.record_checksums(
    PageFragments(
        np.array([[_PAGE_MEMORY.ctypes.data]], dtype=np.uint64),
        np.array([len(PART_PAGE)], dtype=np.uint64),
    )
)


def _covered(page: bytes) -> list[bytes]:
    """What checksums cover of a page in parts: all but padding."""
    head = [page[: PART_HEADER.itemsize]]
    ends = zip(PARTS.offset_bytes, PARTS.part_bytes, strict=True)
    return head + [page[at : at + length] for at, length in ends]


def decode_page_in_parts(data: bytes) -> None:
    """A page is sound if nothing but its padding differs from what was saved."""
    page = data[: len(PART_PAGE)].ljust(len(PART_PAGE), b"\0")
    memory = np.frombuffer(page, dtype=np.uint8)
    sound = PARTS.sound(np.array([memory.ctypes.data], dtype=np.uint64), PART_CHECKSUM)
    same = _covered(page) == _covered(PART_PAGE)
    assert bool(sound[0]) == same, "a damaged page in parts passes for sound"


class StoredBytes:
    """A small store whose catalog gets one entry changed, and is then asked about and opened.

    Input: database (1 byte, modulo), which of its entries (1 byte, modulo), the new value.
    """

    DATABASES = ("namespaces", "records", "slots", "segments", "meta")

    def __init__(self, directory: Path) -> None:
        self.config = small_config(directory / "catalog-trial")
        with PrefixStore.open(self.config) as store:
            pages = store.namespace(model="m", page_bytes=4096, page_tokens=1)
            parts = store.namespace(model="p", page_bytes=4096, page_tokens=1, parts=(96, 4000))
            self.memory = bytes(range(256)) * 16 * 3
            pages.save([1, 2, 3], self.memory).wait(20)
            parts.save([1, 2, 3], self.memory).wait(20)
        self.entries = {name: self._read(name) for name in self.DATABASES}

    def samples(self) -> tuple[bytes, ...]:
        """The entries as they were written."""
        return tuple(
            bytes([place, i]) + value
            for place, name in enumerate(self.DATABASES)
            for i, (_, value) in enumerate(self.entries[name][:2])
        )

    @contextmanager
    def damaged(self, data: bytes) -> Iterator[None]:
        """The store with that entry in it; whatever was done to it is undone at the end."""
        name = self.DATABASES[data[0] % 5] if data else "meta"
        entries = self.entries[name]
        key, old = entries[data[1] % len(entries)] if len(data) > 1 else entries[0]
        self._write(name, key, data[2:])
        try:
            yield
        finally:
            for each in self.DATABASES:
                self._restore(each)
            self._write(name, key, old)

    def decode(self, data: bytes) -> None:
        """Look at the damaged store in every way."""
        with self.damaged(data):
            describe_store(self.config.path)
            verify_store(self.config.path, transport="posix")
            self._use()

    def _use(self) -> None:
        with PrefixStore.open(self.config) as store:
            store.wait_restored(20)
            for model, parts in (("m", ()), ("p", (96, 4000))):
                pages = store.namespace(model=model, page_bytes=4096, page_tokens=1, parts=parts)
                memory = bytearray(len(self.memory))
                if parts:
                    load = pages.load_parts([1, 2, 3], memory)
                    good = load.finish(load.start(0), 20) & load.finish(load.start(1), 20)
                    load.end()
                else:
                    good = pages.load([1, 2, 3], memory).wait(20)
                for i in np.flatnonzero(good):
                    page = slice(i * 4096, (i + 1) * 4096)
                    assert memory[page] == self.memory[page], f"wrong bytes of page {i} of {model}"

    def _open(self) -> Any:
        folder = str(catalog_folder(self.config.path))
        return lmdb.open(folder, max_dbs=8, map_size=4 << 20, sync=False)

    def _read(self, name: str) -> list[tuple[bytes, bytes]]:
        with self._open() as env, env.begin() as txn:
            return [*txn.cursor(db=env.open_db(name.encode(), txn))]

    def _write(self, name: str, key: bytes, value: bytes) -> None:
        with self._open() as env, env.begin(write=True) as txn:
            txn.put(key, value, db=env.open_db(name.encode(), txn))

    def _restore(self, name: str) -> None:
        with self._open() as env, env.begin(write=True) as txn:
            db = env.open_db(name.encode(), txn)
            txn.drop(db, delete=False)
            for key, value in self.entries[name]:
                txn.put(key, value, db=db)


# ---- settings, traces, keys ----
SETTINGS: Mapping[str, Any] = {
    "path": "/nowhere",
    "capacity": "2GiB",
    "pools": ["/a", "/b"],
    "io_timeout_s": 3.5,
    "segment": "4MiB",
    "verify": False,
    "policy": "lru",
    "write_budget": 1 << 30,
}
TOML = b'path = "/nowhere"\ncapacity = "2GiB"\npools = ["/a", "/b"]\nio_timeout_s = 3.5\n'
CONFIG_JSON = (
    json.dumps(SETTINGS).encode(),
    StoreConfig.parse({"path": "/nowhere", "capacity": 1 << 31, "dram": 1 << 20})
    .model_dump_json()
    .encode(),
)


def _check_config(config: StoreConfig) -> None:
    config.check()
    assert config.capacity >= config.catalog_bytes > 0
    assert config.segments_per_pool(DATA_OFFSET_BYTES) >= 1
    assert config.io_timeout_s > 0 and config.queue_depth >= 1 and config.writers_max >= 1


def _file_decoder(file: Path) -> Decode:
    def decode(data: bytes) -> None:
        file.write_bytes(data)
        _check_config(StoreConfig.load(file))

    return decode


def decode_environment(data: bytes) -> None:
    """Lines NAME=value, as a process's environment has them."""
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    pairs = [line.partition("=") for line in lines]
    _check_config(StoreConfig.from_environment({name: value for name, _, value in pairs}))


def decode_settings(data: bytes) -> None:
    """Settings as an API caller gives them, of any type that JSON has."""
    try:
        settings = json.loads(data)
    except (ValueError, RecursionError):
        return
    _check_config(StoreConfig.parse(settings))


TRACE = (
    b'{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}\n'
    b'{"timestamp": 7, "input_length": 1536, "output_length": 9, "hash_ids": [1, 2, 3]}\n'
)


def _trace_decoder(file: Path) -> Decode:
    def decode(data: bytes) -> None:
        file.write_bytes(data)
        for on_error in ("skip", "refuse"):
            trace = read_trace(file, on_error=on_error).trace
            assert len(trace) > 0 and trace.block_tokens > 0
            assert (np.diff(trace.timestamp_ms) >= 0).all() and (trace.input_length >= 0).all()
            assert int(trace.offset[-1]) == len(trace.ids)

    return decode


def decode_keys(data: bytes) -> None:
    """Page keys of any width from bytes, from hexadecimal text and from a list."""
    width = data[0] if data else 0
    keys = PageKeys(data[1:], width)
    assert b"".join(keys) == data[1:] and len(keys) * width == len(data) - 1
    texts = data.decode("latin-1").split(" ")
    keys = PageKeys.from_hex(texts)
    assert [key.hex() for key in keys] == [text.lower() for text in texts]
    assert list(PageKeys.from_list(list(keys))) == list(keys)


_TOKEN_TYPES = ("<u4", "<i4", "<i8", "<u8", "<f4", "<i2", "?", "<u1", "<c8", "S4", "<M8[s]")


def decode_tokens(data: bytes) -> None:
    """Arrays of any type as token ids."""
    kind = np.dtype(_TOKEN_TYPES[data[0] % len(_TOKEN_TYPES)] if data else "<u4")
    count = max(len(data) - 1, 0) // kind.itemsize
    given = np.frombuffer(data[1 : 1 + count * kind.itemsize], dtype=kind)
    found = token_array(given)
    assert found.dtype == np.uint32 and found.tolist() == given.tolist()


def decode_names(data: bytes) -> None:
    """A policy or an admission by name, and a capacity in pages."""
    name, _, count = data.decode("utf-8", "replace").partition(" ")
    pages = int(count) if count.isdecimal() and len(count) < 6 else 8
    if name in ADMISSIONS:
        make_admission(name, pages)
    else:
        assert make_policy(name, pages).name == name


def all_decoders(directory: Path) -> tuple[Decoder, ...]:
    """Every decoder; those that read files put them into `directory`."""
    stored = StoredBytes(directory)
    environment = b"TUTTI_STORE_PATH=/x\nTUTTI_STORE_CAPACITY=2GiB\nTUTTI_STORE_POOLS=/a:/b\n"
    trace = _trace_decoder(directory / "trace")
    return (
        Decoder("superblock", (SUPERBLOCK,), decode_superblock),
        Decoder("sealed_superblock", (SUPERBLOCK,), decode_sealed_superblock),
        Decoder("record", (RECORD_SAMPLE,), decode_record),
        Decoder("records", (_records(),), decode_records),
        Decoder("segment", (SegmentEntry(3, 64).encode(),), decode_segment),
        Decoder("page_in_parts", (PART_PAGE,), decode_page_in_parts),
        Decoder("catalog", stored.samples(), stored.decode, cost=40),
        Decoder("toml", (TOML,), _file_decoder(directory / "store.toml"), text=True),
        Decoder("json", CONFIG_JSON, _file_decoder(directory / "store.json"), text=True),
        Decoder("environment", (environment,), decode_environment, text=True),
        Decoder("settings", CONFIG_JSON, decode_settings, text=True),
        Decoder("trace", (TRACE,), trace, text=True, cost=4),
        Decoder("trace_gz", (gzip.compress(TRACE, mtime=0),), trace, cost=4),
        Decoder("trace_xz", (lzma.compress(TRACE),), trace, cost=4),
        Decoder(
            "keys",
            (b"\x10" + bytes(64), b"0a0b 0c0d", b"\x02abcd"),
            decode_keys,
            (ValueError, TypeError),
        ),
        Decoder(
            "tokens",
            tuple(bytes([kind]) + bytes(range(32)) for kind in range(len(_TOKEN_TYPES))),
            decode_tokens,
            (ValueError,),
        ),
        Decoder("names", tuple(f"{n} 9".encode() for n in (*POLICIES, *ADMISSIONS)), decode_names),
    )
