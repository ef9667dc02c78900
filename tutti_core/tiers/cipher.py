"""Encrypts pages into memory of our own before they are written, decrypts them where they arrive.

A *unit* is what can be read alone: a whole page, or one part of a page in parts. On the device it
is its AES-256-GCM ciphertext, of the same length, and a trailer (`format.TRAILER`). What is
authenticated with it says whose page it is, which, which of its units, and how long: a unit in
another's place does not decrypt, whatever its checksum says.

Memory tiers hold the *plain form* of a page: laid out as it is stored, so that both take the same
slots, with the bytes of headers, trailers and padding undefined.

Invariants
    - Only ciphertext reaches a transport as the source of a write.
    - Memory of a page whose tag is wrong is wiped: what was not authenticated is seen by nobody.
    - The caller's memory is never written to by an encryption.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tutti_core.format import TRAILER_BYTES
from tutti_core.geometry import PageFragments
from tutti_core.memcopy import copy_pieces
from tutti_core.tiers.encryption import PageKeyring, new_decryptor, new_encryptor
from tutti_core.tiers.parts import PartLayout, aligned_blocks, zeros_address

U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

WINDOW_BYTES = 16 << 20
WINDOWS_BYTES = 64 << 20
"""Ciphertext that waits for the end of its write: so much, or two pages where those are larger."""

_TAG_BYTES, _NONCE_BYTES, _NONCE_END, _SALT_AT = 16, 12, 28, 32
_ZEROS = bytes(_SALT_AT - _NONCE_END)
_NAMED = struct.Struct("<16s32sIIQ")  # digest, page key, unit, units, length in bytes

Piece = tuple[int, int, int]
"""Fragment, start in it, length: a stretch of a unit in a page's memory."""


class PageCipher:
    """The encryption of one namespace's pages. Threads: any.

    Parameters
        page_bytes: of a page as the caller has it; parts: how it is cut, or None.
    """

    def __init__(
        self, keys: PageKeyring, digest: bytes, page_bytes: int, parts: PartLayout | None
    ) -> None:
        self._keys = keys
        self._digest = digest
        self._parts = parts
        if parts is None:
            self._units = [(0, page_bytes)]
            self.stored_bytes = page_bytes + TRAILER_BYTES
        else:
            self._units = list(zip(parts.offset_bytes, parts.part_bytes, strict=True))
            self.stored_bytes = parts.stored_bytes
        self._pieces = lru_cache(16)(self._find_pieces)

    # ---- saving ----
    def plain_form(self, pages: PageFragments) -> PageFragments:
        """A caller's pages with as many bytes as are stored; what is not theirs is zero."""
        if self._parts is not None:
            return self._parts.padded(pages)
        zeros = np.full((pages.page_count, 1), zeros_address(), dtype=np.uint64)
        return PageFragments(
            np.concatenate((pages.address, zeros), axis=1),
            np.append(pages.length_bytes, np.uint64(TRAILER_BYTES)),
            pages.owner,
        )

    def encrypt(self, page_keys: Rows, pages: PageFragments, window: Rows) -> PageFragments:
        """Write pages, encrypted, into the rows of `window`; returns these, to be stored.

        Parameters
            page_keys: (n, width).
            pages: n pages in plain form; read, and not needed any more afterwards.
            window: (at least n, slot size), memory that nobody else uses; see `rows_of`.
        Cost       about 0.06 ms a MiB with AES instructions; the GIL is released.
        """
        count, units = pages.page_count, len(self._units)
        rows = window[:count]
        key, salt = self._keys.writing(count * units)
        names = page_names(page_keys)
        nonces = os.urandom(_NONCE_BYTES * units * count)
        layout = self._pieces(pages.length_bytes.tobytes())
        self._gather(pages, layout, rows)
        for unit, (offset, length) in enumerate(self._units):
            end = offset + length
            mine = nonces[unit * count * _NONCE_BYTES :][: count * _NONCE_BYTES]
            rows[:, end + _TAG_BYTES : end + _NONCE_END] = np.frombuffer(
                mine, dtype=np.uint8
            ).reshape(count, _NONCE_BYTES)
            rows[:, end + _NONCE_END : end + _SALT_AT] = 0
            rows[:, end + _SALT_AT : end + TRAILER_BYTES] = np.frombuffer(salt, dtype=np.uint8)
            targets = (_row_addresses(rows) + np.uint64(offset)).tolist()
            sources = targets  # where the unit was gathered
            if len(layout[unit]) == 1:
                fragment, start, _ = layout[unit][0]
                sources = (pages.address[:, fragment] + np.uint64(start)).tolist()
            for page in range(count):
                nonce = mine[page * _NONCE_BYTES : (page + 1) * _NONCE_BYTES]
                encryptor = new_encryptor(key, nonce)
                named = self._named(names[page], unit, nonce + _ZEROS + salt)
                encryptor.authenticate_additional_data(named)
                encryptor.update_into(
                    _memory(sources[page], length), _memory(targets[page], length)
                )
                encryptor.finalize()
                ctypes.memmove(targets[page] + length, encryptor.tag, _TAG_BYTES)
        if self._parts is not None:
            self._parts.finish_encrypted(self._digest, page_keys, rows)
        lengths = np.array([self.stored_bytes], dtype=np.uint64)
        return PageFragments(_row_addresses(rows)[:, None], lengths, window)

    def _find_pieces(self, lengths: bytes) -> list[list[Piece]]:
        """Where in a page's fragments, of packed lengths, each unit lies."""
        length_bytes = np.frombuffer(lengths, dtype=np.uint64).astype(np.int64)
        ends = np.cumsum(length_bytes)
        found = []
        for offset, length in self._units:
            pieces = []
            at = int(np.searchsorted(ends, offset, side="right"))
            start, left = offset - int(ends[at] - length_bytes[at]), length
            while left:
                size = min(left, int(length_bytes[at]) - start)
                pieces.append((at, start, size))
                at, start, left = at + 1, 0, left - size
            found.append(pieces)
        return found

    def _gather(self, pages: PageFragments, layout: list[list[Piece]], rows: Rows) -> None:
        """Copy the units that lie in several fragments to their places, to be encrypted there."""
        fragment, start, length, target = [], [], [], []
        for (offset, _), pieces in zip(self._units, layout, strict=True):
            if len(pieces) > 1:
                for at, inside, size in pieces:
                    fragment.append(at)
                    start.append(inside)
                    length.append(size)
                    target.append(offset)
                    offset += size
        if fragment:
            source = pages.address[:, fragment] + np.array(start, dtype=np.uint64)
            to = _row_addresses(rows)[:, None] + np.array(target, dtype=np.uint64)
            sizes = np.tile(np.array(length, dtype=np.uint64), len(rows))
            copy_pieces(to.reshape(-1), np.ascontiguousarray(source).reshape(-1), sizes)

    # ---- loading ----
    def decrypt(
        self, page_keys: Rows, unit: int, address: U64, length_bytes: U64, trailers: Rows
    ) -> Mask:
        """Decrypt one unit of some pages where it lies; returns which were right.

        Parameters
            page_keys: (n, width).
            address, length_bytes: (n, f) and (f,), the memory of the unit without its trailer.
            trailers: (n, 48).
        Cost       as of `encrypt`, and a few us a fragment.
        """
        from cryptography.exceptions import InvalidTag

        good = np.ones(len(address), dtype=np.bool_)
        lengths, names = length_bytes.tolist(), page_names(page_keys)
        for page, starts in enumerate(address.tolist()):
            trailer = trailers[page].tobytes()
            named = self._named(names[page], unit, trailer[_TAG_BYTES:])
            decryptor = new_decryptor(
                self._keys.reading(trailer[_SALT_AT:]),
                trailer[_TAG_BYTES:_NONCE_END],
                trailer[:_TAG_BYTES],
            )
            decryptor.authenticate_additional_data(named)
            for start, length in zip(starts, lengths, strict=True):
                memory = _memory(start, length)
                decryptor.update_into(memory, memory)
            try:
                decryptor.finalize()
            except InvalidTag:
                good[page] = False
                for start, length in zip(starts, lengths, strict=True):
                    ctypes.memset(start, 0, length)
        return good

    def decrypt_stored(self, page_keys: Rows, address: U64) -> Mask:
        """Decrypt whole stored pages where they lie, each in one piece; returns which were right.

        All of a page that is not right is wiped.
        """
        good = np.ones(len(address), dtype=np.bool_)
        for unit, (offset, length) in enumerate(self._units):
            at = address + np.uint64(offset)
            trailers = new_trailers(len(at))
            copy_pieces(
                trailer_addresses(trailers),
                at + np.uint64(length),
                np.full(len(at), TRAILER_BYTES, dtype=np.uint64),
            )
            lengths = np.array([length], dtype=np.uint64)
            good &= self.decrypt(page_keys, unit, at[:, None], lengths, trailers)
        for start in address[~good].tolist():
            ctypes.memset(start, 0, self.stored_bytes)
        return good

    def _named(self, name: bytes, unit: int, trailer: bytes) -> bytes:
        """What is authenticated besides the bytes: their name, and the trailer behind the tag."""
        _, length = self._units[unit]
        return _NAMED.pack(self._digest, name, unit, len(self._units), length) + trailer


def page_names(page_keys: Rows) -> list[bytes]:
    """Page keys as they are authenticated: (n, width) as 32 bytes each, zero-padded."""
    return [row.tobytes() for row in page_keys]  # `struct` pads them


def new_trailers(count: int) -> Rows:
    """Memory for the trailers of some units, to be read into."""
    return np.zeros((count, TRAILER_BYTES), dtype=np.uint8)


def trailer_addresses(trailers: Rows) -> U64:
    """Where each of the trailers of `new_trailers` goes, (n,)."""
    start = np.uint64(trailers.ctypes.data)
    return start + np.arange(len(trailers), dtype=np.uint64) * np.uint64(TRAILER_BYTES)


def with_trailers(address: U64, length_bytes: U64, trailers: Rows) -> tuple[U64, U64]:
    """Memory of units as a transport reads them: the fragments, then the trailer."""
    return (
        np.concatenate((address, trailer_addresses(trailers)[:, None]), axis=1),
        np.append(length_bytes, np.uint64(TRAILER_BYTES)),
    )


class Windows:
    """Memory for pages between their encryption and the end of their write. One thread."""

    def __init__(self) -> None:
        self._size = WINDOW_BYTES
        self._free: list[Rows] = []
        self._taken = 0

    @property
    def count_max(self) -> int:
        """How many there are at most."""
        return max(2, WINDOWS_BYTES // self._size)

    def take(self, row_bytes: int) -> Rows | None:
        """At least so many bytes, from a multiple of 4096 on; None: all windows are taken."""
        if row_bytes > self._size:
            self._size, self._free = row_bytes, []
        if self._taken >= self.count_max:
            return None
        self._taken += 1
        if self._free:
            return self._free.pop()
        return aligned_blocks(-(-self._size // 4096)).reshape(-1)

    def give_back(self, window: Rows) -> None:
        """Nothing uses a window of `take` any more."""
        self._taken -= 1
        if len(window) >= self._size:
            self._free.append(window)


def rows_of(window: Rows, row_bytes: int) -> Rows:
    """A window as rows of so many bytes, a multiple of 4096."""
    count = len(window) // row_bytes
    return window[: count * row_bytes].reshape(count, row_bytes)


def _row_addresses(rows: Rows) -> U64:
    start, step = np.uint64(rows.ctypes.data), np.uint64(rows.strides[0])
    return start + np.arange(len(rows), dtype=np.uint64) * step


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200  # PyBUF_WRITE


def _memory(address: int, length: int) -> memoryview:
    """Memory that somebody else keeps alive, for a call that takes buffers."""
    view: memoryview = _view(address, length, _WRITABLE)
    return view
