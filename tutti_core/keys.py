"""What names a page: the namespace that makes its bytes interchangeable, and its page key.

A page key names a page and its whole prefix. The standalone store chains XXH3-128 over token
chunks; SGLang brings its own SHA-256 chain. Neither contains the model, dtype or layout: the
namespace does.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core import hashing
from tutti_core.arguments import count_of, text_of
from tutti_core.errors import ConfigError
from tutti_core.format import PARTS_MAX

KEY_WIDTH_MAX_BYTES = 32
CHAIN_WIDTH_BYTES = hashing.DIGEST_BYTES
PAGE_MAX_BYTES = (1 << 32) - (8 << 20)
"""Room is left for what is stored with a page: a header, and padding of each part."""
NAMESPACE_VERSION = 1
"""Part of every digest: a change makes all stored pages those of other namespaces."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must match for page bytes to be interchangeable.

    model         served model name, exactly as given.
    page_bytes    length of one page.
    page_tokens   tokens in one page.
    weights       fingerprint of the weights; two fine-tunes under one name differ here.
    dtype         KV dtype.
    layout        order of the bytes within a page.
    shard         which part of the model this is: "tp 0/2", "layers 0-31 heads 0-7", …
    pool          pool class: "kv", "mamba", …
    key_bytes     width of a page key, 16 (standalone chain) to 32 (SHA-256).
    extra         anything else that tells pages apart.
    parts         lengths of the parts of a page that can be read one by one, in the order in which
                  they are needed; none: a page is read whole. Their sum is `page_bytes`.
    """

    model: str
    page_bytes: int
    page_tokens: int
    weights: str = ""
    dtype: str = ""
    layout: str = ""
    shard: str = ""
    pool: str = "kv"
    key_bytes: int = CHAIN_WIDTH_BYTES
    extra: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 < self.page_bytes <= PAGE_MAX_BYTES:
            raise ConfigError(
                f"page_bytes = {self.page_bytes} is not a page size", hint=f"1 to {PAGE_MAX_BYTES}"
            )
        if self.page_tokens < 1:
            raise ConfigError(f"page_tokens = {self.page_tokens} must be at least 1")
        if not 16 <= self.key_bytes <= KEY_WIDTH_MAX_BYTES:
            raise ConfigError(f"key_bytes = {self.key_bytes} must be 16 to {KEY_WIDTH_MAX_BYTES}")
        self._check_parts()

    def _check_types(self) -> None:
        """Take other kinds of integers, sequences and mappings as ours; refuse the rest.

        What only looks equal (1, 1.0, True) would give other digests, so other pages.
        """
        try:
            for name in ("page_bytes", "page_tokens", "key_bytes"):
                object.__setattr__(self, name, count_of(getattr(self, name), name))
            for name in ("model", "weights", "dtype", "layout", "shard", "pool"):
                text_of(getattr(self, name), name)
            if not isinstance(self.extra, Mapping):
                raise ValueError(f"extra = {self.extra!r} is not a mapping of texts")
            extra = {text_of(k, "extra"): text_of(v, "extra") for k, v in self.extra.items()}
            if not isinstance(self.parts, Sequence) or isinstance(self.parts, str | bytes):
                raise ValueError(f"parts = {self.parts!r} is not a sequence of lengths")
            parts = tuple(count_of(length, "parts") for length in self.parts)
        except ValueError as error:
            raise ConfigError(f"namespace: {error}") from None
        object.__setattr__(self, "extra", extra)
        object.__setattr__(self, "parts", parts)

    def _check_parts(self) -> None:
        if len(self.parts) > PARTS_MAX:
            raise ConfigError(f"parts: {len(self.parts)} of them, at most {PARTS_MAX}")
        if self.parts and (min(self.parts) < 1 or sum(self.parts) != self.page_bytes):
            raise ConfigError(
                f"parts: {len(self.parts)} of together {sum(self.parts)} bytes are not a page of "
                f"{self.page_bytes} bytes",
                hint="each is at least 1 byte, and their sum is page_bytes",
            )

    def describe(self) -> dict[str, Any]:
        """The fields as JSON-able values, with the version; `parts` only where there are any."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = values.pop("parts")
        if parts:
            values["parts"] = list(parts)
        return {**values, "extra": dict(sorted(self.extra.items())), "format": NAMESPACE_VERSION}

    def canonical(self) -> bytes:
        """One byte string for each distinct namespace: sorted JSON, nothing escaped away."""
        return json.dumps(self.describe(), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """16 bytes that stand for this namespace; part of every record key."""
        return hashing.digest(self.canonical())


def described(digest: bytes, description: bytes) -> dict[str, Any] | None:
    """The fields that a description in the catalog names; None where it is damaged."""
    if hashing.digest(description) != digest:
        return None
    fields: dict[str, Any] = json.loads(description)
    return fields


def encode_salt(**parts: str | None) -> bytes:
    """Encode named, optional strings so that no two different inputs encode alike.

    Each part is tagged with its name, with presence, and with its length: "" differs from None, and
    lora="X" from salt="X". All absent encodes as nothing at all.

    Raises
        ValueError: not text.
    """
    if all(value is None for value in parts.values()):
        return b""
    encoded = []
    for name, value in sorted(parts.items()):
        data = b"" if value is None else text_of(value, name).encode()
        tag = name.encode()
        encoded.append(struct.pack("<BBI", len(tag), value is not None, len(data)) + tag + data)
    return b"".join(encoded)


class PageKeys:
    """An immutable run of page keys in prefix order, packed in one bytes object.

    `rooted` says that the first key is the first page of its sequence; keys whose ancestors are not
    known are found through the catalog instead of the tree.
    """

    __slots__ = ("data", "rooted", "width")

    def __init__(self, data: bytes, width: int, rooted: bool = True) -> None:
        if type(data) is not bytes:  # a bytearray could change later
            raise TypeError(f"page keys are bytes, not {type(data).__name__}")
        if type(width) is not int or width < 1 or len(data) % width:
            raise ValueError(f"{len(data)} bytes of keys are not a multiple of {width!r}")
        if type(rooted) is not bool:
            raise TypeError(f"rooted = {rooted!r} is neither True nor False")
        self.data = data
        self.width = width
        self.rooted = rooted

    @classmethod
    def from_hex(cls, keys: Sequence[str], rooted: bool = True) -> PageKeys:
        """Pack hexadecimal keys of equal length (SGLang's page hashes).

        Raises
            ValueError: not hexadecimal, or lengths differ.
            TypeError: not texts.
        """
        _check_sequence(keys)
        if not keys:
            return cls(b"", KEY_WIDTH_MAX_BYTES, rooted)
        digits = len(keys[0])
        text = "".join(keys)
        if set(map(len, keys)) != {digits}:
            raise ValueError("page keys differ in length")
        if digits % 2:
            raise ValueError(f"page keys of {digits} hexadecimal digits are not whole bytes")
        data = bytes.fromhex(text)
        if len(data) * 2 != len(text):  # fromhex skips blanks
            raise ValueError("page keys are not hexadecimal")
        return cls(data, digits // 2, rooted)

    @classmethod
    def from_list(cls, keys: Sequence[bytes], rooted: bool = True) -> PageKeys:
        """Pack raw keys of equal length. Raises ValueError, or TypeError if they are not bytes."""
        _check_sequence(keys)
        width = len(keys[0]) if keys else CHAIN_WIDTH_BYTES
        if any(len(key) != width for key in keys):
            raise ValueError("page keys differ in length")
        return cls(b"".join(keys), width, rooted)

    def __len__(self) -> int:
        return len(self.data) // self.width

    def __getitem__(self, index: int) -> bytes:
        start = index * self.width
        if not 0 <= start < len(self.data):
            raise IndexError(index)
        return self.data[start : start + self.width]

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PageKeys):
            return NotImplemented
        return (self.data, self.width, self.rooted) == (other.data, other.width, other.rooted)

    def __hash__(self) -> int:
        return hash((self.data, self.width))

    def __repr__(self) -> str:
        return f"PageKeys({len(self)} of {self.width} bytes, rooted={self.rooted})"

    def upto(self, stop: int) -> PageKeys:
        """The chain that ends with key `stop` - 1."""
        return PageKeys(self.part(0, stop), self.width, self.rooted)

    def part(self, start: int, stop: int) -> bytes:
        """The packed bytes of keys start .. stop-1."""
        return self.data[start * self.width : stop * self.width]


def _check_sequence(keys: Any) -> None:
    if not isinstance(keys, Sequence) or isinstance(keys, str | bytes):
        raise TypeError(f"page keys are a sequence, not {type(keys).__name__}")


def token_array(tokens: Iterable[int] | npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return token ids as a contiguous uint32 array, without a copy where they are one already.

    Raises
        ValueError: not one-dimensional integers of 0 to 2^32 - 1.
    """
    array = np.asarray(tokens if hasattr(tokens, "__len__") else list(tokens))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("tokens must be one-dimensional integers")
    if array.size == 0:
        return np.empty(0, dtype=np.uint32)
    if array.dtype != np.uint32:
        if int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF:
            raise ValueError("token ids must be 0 to 2^32 - 1")
        array = array.astype(np.uint32)
    return np.ascontiguousarray(array)
