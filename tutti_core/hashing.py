"""XXH3 over key chains, record keys and page payloads; native where the extension was built.

With `memcopy.py` and `io/uring.py` the only module that imports the native extension. Without it
the same values come from the xxhash package, several times slower for key chains (`tutti info` says
which is used).
All digests are in xxHash's canonical (big-endian) form, so they are the same on every machine.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import xxhash

try:
    from tutti_core import _native
except ImportError:  # built without liburing or xxhash headers
    _native = None  # type: ignore[assignment, unused-ignore]

DIGEST_BYTES = 16


def is_native() -> bool:
    """Whether the native extension does the hashing."""
    return _native is not None


def digest(data: bytes) -> bytes:
    """XXH3-128 of `data`, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def checksum(data: bytes | memoryview) -> int:
    """XXH3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


def chain_keys(seed: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int) -> bytes:
    """Return the page keys of a token sequence, 16 bytes a page, concatenated.

    h[0] = XXH3_128(seed ‖ chunk 0), h[i] = XXH3_128(h[i-1] ‖ chunk i), tokens as little-endian
    uint32; an incomplete last page has no key.

    Cost       one pass over the tokens.     Threads   any; the GIL is released in native code.
    """
    if _native is not None:
        return _native.chain_keys(seed, tokens, page_tokens)
    data = tokens.astype("<u4", copy=False).tobytes()
    step = page_tokens * 4
    keys, previous = [], seed
    for start in range(0, len(data) - step + 1, step):
        previous = xxhash.xxh3_128_digest(previous + data[start : start + step])
        keys.append(previous)
    return b"".join(keys)


def record_keys(prefix: bytes, keys: bytes, width: int) -> bytes:
    """Return XXH3_128(prefix ‖ key) for each `width`-byte key, 16 bytes each, concatenated."""
    if _native is not None:
        return _native.record_keys(prefix, keys, width)
    return b"".join(
        xxhash.xxh3_128_digest(prefix + keys[i : i + width]) for i in range(0, len(keys), width)
    )


def checksum_items(
    fragment_start: npt.NDArray[np.uint32],
    address: npt.NDArray[np.uint64],
    length_bytes: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """XXH3-64 of the gathered bytes of each item; arrays as in `io.transport.Batch`."""
    if _native is not None:
        return _native.checksum_items(fragment_start, address, length_bytes)
    result = np.empty(len(fragment_start) - 1, dtype=np.uint64)
    for i in range(len(result)):
        state = xxhash.xxh3_64()
        for f in range(int(fragment_start[i]), int(fragment_start[i + 1])):
            state.update((ctypes.c_char * int(length_bytes[f])).from_address(int(address[f])))
        result[i] = state.intdigest()
    return result
