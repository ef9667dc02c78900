"""hashing.py: the native code and the fallback give the same values, which are XXH3's."""

import itertools

import numpy as np
import pytest
import xxhash

from tutti_core import hashing


@pytest.fixture(params=["native", "fallback"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fallback":
        monkeypatch.setattr(hashing, "_native", None)
    elif not hashing.is_native():
        pytest.skip("built without the native extension")
    return str(request.param)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 200])
def test_chain_is_a_hash_of_each_page_behind_the_last_key(path, rng, page_tokens, count) -> None:
    seed = rng.randbytes(rng.randrange(0, 80))
    tokens = np.array([rng.randrange(1 << 32) for _ in range(count)], np.uint32)
    expected, last = [], seed
    for i in range(count // page_tokens):
        chunk = tokens[i * page_tokens : (i + 1) * page_tokens].astype("<u4").tobytes()
        last = xxhash.xxh3_128_digest(last + chunk)
        expected.append(last)
    assert hashing.chain_keys(seed, tokens, page_tokens) == b"".join(expected)


@pytest.mark.parametrize("width", [16, 20, 32])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_record_keys_are_hashes_of_prefix_and_key(path, rng, width: int, count: int) -> None:
    prefix, keys = rng.randbytes(16), rng.randbytes(width * count)
    expected = b"".join(
        xxhash.xxh3_128_digest(prefix + keys[i * width : (i + 1) * width]) for i in range(count)
    )
    assert hashing.record_keys(prefix, keys, width) == expected


def test_checksum_of_items_is_that_of_their_gathered_bytes(path, rng) -> None:
    data = np.frombuffer(rng.randbytes(5000), np.uint8).copy()
    lengths, starts, base = [1, 99, 2900, 2000], [0, 1, 3, 4], int(data.ctypes.data)
    address = np.cumsum([0, *lengths[:-1]]).astype(np.uint64) + np.uint64(base)
    got = hashing.checksum_items(np.array(starts, np.uint32), address, np.array(lengths, np.uint64))
    cuts = [0, 1, 3000, 5000]
    expected = [hashing.checksum(data[a:b].tobytes()) for a, b in itertools.pairwise(cuts)]
    assert got.tolist() == expected


def test_known_values_do_not_depend_on_the_machine(path: str) -> None:
    assert hashing.digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert hashing.checksum(b"") == 0x2D06800538D394C2
