"""The native hashes equal python-xxhash, which is the reference and the fallback."""

from __future__ import annotations

import random
import time

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

native = pytest.importorskip("tutti_core._native", reason="built without the native extension")


def chain(seed: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int) -> bytes:
    link, keys = seed, []
    for first in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = tokens[first : first + page_tokens].astype("<u4").tobytes()
        link = xxhash.xxh3_128(link + page).digest()
        keys.append(link)
    return b"".join(keys)


def random_tokens(count: int, seed: int = 1) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64, 129, 1000, 5000])
@pytest.mark.parametrize("seed_bytes", [0, 1, 16, 32, 240, 1000])
def test_chain(page_tokens: int, seed_bytes: int) -> None:
    seed = random.Random(seed_bytes).randbytes(seed_bytes)
    for count in (0, page_tokens - 1, page_tokens, 3 * page_tokens + page_tokens // 2):
        tokens = random_tokens(count)
        keys = native.chain_keys(seed, tokens, page_tokens)
        assert keys == chain(seed, tokens, page_tokens)
        assert len(keys) == count // page_tokens * 16


def test_chain_of_a_prefix_is_a_prefix_of_the_chain() -> None:
    tokens = random_tokens(1024)
    keys = native.chain_keys(b"seed", tokens, 64)
    assert native.chain_keys(b"seed", tokens[:640], 64) == keys[:160]
    assert native.chain_keys(keys[144:160], tokens[640:], 64) == keys[160:]


def test_chain_refuses_other_arrays() -> None:
    tokens = random_tokens(64)
    with pytest.raises(ValueError, match="page_tokens"):
        native.chain_keys(b"", tokens, 0)
    for wrong in (tokens.astype(np.int64), tokens[::2], tokens.reshape(8, 8), [1, 2]):
        with pytest.raises(TypeError):
            native.chain_keys(b"", wrong, 4)
    frozen = tokens.copy()
    frozen.flags.writeable = False
    assert native.chain_keys(b"", frozen, 4) == chain(b"", tokens, 4)


def test_chain_is_fast_enough() -> None:
    """A 4,096-page prompt of 262,144 tokens takes well under 0.8 ms; measured 0.09 ms."""
    tokens = random_tokens(262_144)
    best = 1.0
    for _ in range(50):
        begin = time.perf_counter()
        native.chain_keys(b"x" * 32, tokens, 64)
        best = min(best, time.perf_counter() - begin)
    assert best < 0.8e-3


@pytest.mark.parametrize("width", [1, 16, 32, 300])
def test_record_keys(width: int) -> None:
    data = random.Random(width).randbytes(7 * width)
    for prefix in (b"", b"namespace and pool"):
        assert native.record_keys(prefix, data, width) == b"".join(
            xxhash.xxh3_128(prefix + data[first : first + width]).digest()
            for first in range(0, len(data), width)
        )
    assert native.record_keys(b"p", b"", width) == b""
    for keys, wrong in ((data, 0), (data, -1), (data + b"x", len(data))):
        with pytest.raises(ValueError, match="width"):
            native.record_keys(b"p", keys, wrong)


def test_checksum_items() -> None:
    rng = random.Random(5)
    memory = np.frombuffer(bytearray(rng.randbytes(1 << 20)), np.uint8)
    base = memory.ctypes.data
    starts, addresses, lengths, expected = [0], [], [], []
    for item in range(200):
        content = b""
        for _ in range(1 if item % 3 == 0 else rng.randrange(1, 30)):
            place = rng.randrange(len(memory) - 1)
            length = rng.randrange(1, min(2000, len(memory) - place) + 1)
            addresses.append(base + place)
            lengths.append(length)
            content += memory[place : place + length].tobytes()
        starts.append(len(addresses))
        expected.append(xxhash.xxh3_64_intdigest(content))
    arrays = [np.array(starts, np.uint32), np.array(addresses, np.uint64)]
    sizes = np.array(lengths, np.uint64)
    assert native.checksum_items(*arrays, sizes).tolist() == expected
    assert len(native.checksum_items(np.zeros(1, np.uint32), *[np.zeros(0, np.uint64)] * 2)) == 0
    for wrong in (arrays[0][::-1].copy(), arrays[0] + np.uint32(1)):
        with pytest.raises(ValueError, match="fragment_start"):
            native.checksum_items(wrong, arrays[1], sizes)
    with pytest.raises(ValueError, match="lengths"):
        native.checksum_items(arrays[0], arrays[1], sizes[:-1])
