"""The bytes of an LMDB file, read without LMDB: meta pages, trees, and the entries of leaves.

Data format 1 (LMDB 0.9, 64 bit, little-endian):

    page    16-byte header: u64 own number, u16 0, u16 flags, u16 lower, u16 upper; then one u16 for
            each node, its offset; nodes fill the page from `upper` to its end. On a value's own
            pages the last four bytes of the header are their number.
    node    u16 low, u16 high, u16 flags, u16 key length, key, value; padded to an even length.
            On a leaf, low and high are the value's length; on a branch, with the flags, the number
            of the page below.
    meta    pages 0 and 1: header, u32 magic, u32 version, u64, u64 map size, two trees (free pages,
            main), u64 last page, u64 transaction. The newer one counts.
    tree    u32 pad, u16 flags, u16 depth, u64 branches, u64 leaves, u64 pages of values,
            u64 entries, u64 root
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tutti_core.errors import UnsupportedError, device_error

FIRST_PAGE = 2
"""Pages 0 and 1 are meta pages."""
HEADER_BYTES = 16
KEY_BYTES_MAX = 511
DEPTH_MAX = 32
NO_ROOT = (1 << 64) - 1

BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
"""What a page is; OVERFLOW: the first of a value's own pages."""
VALUE_ELSEWHERE, VALUE_IS_TREE = 1, 2
"""What a leaf's node has for a value: the number of its first own page, or a tree."""

PAGE_NUMBER_MAX = 1 << 62
"""Larger numbers, which are damage, are read as this one."""

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_META_END = 152
_PAGE_BYTES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_META_STRUCT = struct.Struct("<QHHHH IIQQ 48s48s QQ")
_TREE_STRUCT = struct.Struct("<IHHQQQQQ")
_NODE_STRUCT = struct.Struct("<HHHH")


class Flaw(Exception):
    """What is wrong with the file."""


class Tree(NamedTuple):
    """Where a tree of LMDB's begins, and what it says of itself."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int

    @classmethod
    def decode(cls, raw: bytes) -> Tree | None:
        """Read one; None where the length is another."""
        return cls._make(_TREE_STRUCT.unpack(raw)) if len(raw) == _TREE_STRUCT.size else None


@dataclass(frozen=True, slots=True)
class Meta:
    """The newer of the two meta pages."""

    page_bytes: int
    free: Tree
    main: Tree
    last_page: int
    transaction: int


class TreeFile:
    """An LMDB file, read with pread: a file that ends early is an answer and no signal.

    Raises
        DeviceError: it cannot be opened; the methods: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor = os.open(file, flags)
        except OSError as error:
            raise device_error("open", error.errno or 5, device=str(file)) from None
        self._name = str(file)
        self.page_bytes = 4096

    def __enter__(self) -> TreeFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def size_bytes(self) -> int:
        """Length of the file; raises Flaw where it is no file."""
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Flaw("it is not a file")
        return status.st_size

    def at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        try:
            return os.pread(self._descriptor, length_bytes, offset_bytes)
        except OSError as error:
            raise device_error("read", error.errno or 5, device=self._name) from None

    def fill(self, offset_bytes: int, buffer: memoryview) -> bool:
        """Read into memory; whether the file is that long."""
        try:
            return os.preadv(self._descriptor, [buffer], offset_bytes) == len(buffer)
        except OSError as error:
            raise device_error("read", error.errno or 5, device=self._name) from None

    def page(self, number: int, count: int = 1) -> bytes:
        """Whole pages. Raises Flaw where the file ends before."""
        begin, length = number * self.page_bytes, count * self.page_bytes
        data = self.at(begin, length) if begin + length <= self.size_bytes() else b""
        if len(data) != length:
            raise Flaw(f"page {number} lies behind its end")
        return data

    def meta(self) -> Meta:
        """The newer meta page. Raises Flaw where one of them is damaged."""
        self.size_bytes()
        first = self._meta_at(0, 0)
        self.page_bytes = first.page_bytes
        second = self._meta_at(1, first.page_bytes)
        if second.page_bytes != first.page_bytes:
            raise Flaw("its meta pages name different page sizes")
        if first.transaction and first.transaction == second.transaction:
            raise Flaw("its meta pages are of one transaction")
        return second if second.transaction > first.transaction else first

    def newest(self) -> Meta:
        """The newer meta page that can be read, of a damaged file. Raises Flaw where none can."""
        found = []
        for number, offset in ((0, 0), *((1, size) for size in _PAGE_BYTES)):
            try:
                meta = self._meta_at(number, offset)
            except Flaw:
                continue
            if not number or meta.page_bytes == offset:
                found.append(meta)
        if not found:
            raise Flaw("neither of its meta pages can be read")
        best = max(found, key=lambda meta: meta.transaction)
        self.page_bytes = best.page_bytes
        return best

    def still(self, meta: Meta) -> bool:
        """Whether nothing was committed since `meta` was read."""
        try:
            return self.meta() == meta
        except Flaw:
            return True

    def _meta_at(self, number: int, offset_bytes: int) -> Meta:
        raw = self.at(offset_bytes, _META_END)
        if number == 0 and raw[24:28] == _MAGIC.to_bytes(4, "little"):
            raise UnsupportedError(
                f"the catalog {self._name} is of another LMDB",
                device=self._name,
                hint="use the LMDB that wrote it",
            )
        if len(raw) < _META_END:
            raise Flaw("it is shorter than its meta pages")
        own, _, flags, _, _, magic, version, _, _, free, main, last, txn = _META_STRUCT.unpack(raw)
        free_tree, main_tree = (Tree._make(_TREE_STRUCT.unpack(t)) for t in (free, main))
        size = free_tree.pad
        good = own == number and flags == META and magic == _MAGIC and version == _VERSION
        if not good or size not in _PAGE_BYTES or (txn and txn % 2 != number) or last < 1:
            raise Flaw(f"meta page {number} is not one")
        return Meta(size, free_tree, main_tree, last_page=last, transaction=txn)

    def value(self, page: int, length_bytes: int) -> bytes:
        """A value on pages of its own."""
        raw = self.page(page, value_pages(length_bytes, self.page_bytes))
        return raw[HEADER_BYTES : HEADER_BYTES + length_bytes]


def entries_of(
    raw: bytes, value: Callable[[int, int], bytes]
) -> Iterator[tuple[bytes, int, bytes]]:
    """Key, flags and value of each entry of a leaf that was found sound.

    Parameters
        value: reads a value on pages of its own: first page, length in bytes.
    """
    (lower,) = struct.unpack_from("<H", raw, 12)
    for (at,) in struct.iter_unpack("<H", raw[HEADER_BYTES:lower]):
        low, high, flags, key_bytes = _NODE_STRUCT.unpack_from(raw, at)
        length, begin = low | high << 16, at + 8 + key_bytes
        if flags == VALUE_ELSEWHERE:
            content = value(int.from_bytes(raw[begin : begin + 8], "little"), length)
        else:
            content = raw[begin : begin + length]
        yield raw[at + 8 : begin], flags, content


def value_pages(length_bytes: int, page_bytes: int) -> int:
    """Pages that a value on pages of its own takes: a header, then the bytes."""
    return (HEADER_BYTES - 1 + length_bytes) // page_bytes + 1
