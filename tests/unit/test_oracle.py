"""The oracle and its pages: right answers pass, and every kind of mix-up is named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_core.testing import Oracle, explain, page_bytes
from tutti_core.testing.oracle import CELL_BYTES, KEY_BYTES_MAX

A, B = bytes(range(32)), bytes(range(32, 64))
SIZE = 10 * CELL_BYTES
NAMESPACE = b"model"


# -- pages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 100_001])
def test_pages_have_their_length_and_repeat(size: int) -> None:
    page = page_bytes(7, A, size)
    assert len(page) == size
    assert page == page_bytes(7, A, size)


def test_pages_differ_in_every_cell() -> None:
    pages = [page_bytes(7, A, SIZE), page_bytes(8, A, SIZE), page_bytes(7, B, SIZE)]
    cells = [page[at : at + CELL_BYTES] for page in pages for at in range(0, SIZE, CELL_BYTES)]
    assert len(set(cells)) == len(cells)


def test_keys_have_a_most() -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        page_bytes(0, bytes(KEY_BYTES_MAX + 1), SIZE)


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
@pytest.mark.parametrize("key", [b"", b"k", bytes(32), A])
def test_explain_names_a_whole_page(seed: int, key: bytes) -> None:
    assert explain(page_bytes(seed, key, SIZE)) == (
        f"bytes 0..{SIZE}: key {key.hex()} seed {seed} of {SIZE} bytes"
    )


@pytest.mark.parametrize("size", [65, 100, SIZE + 63])
def test_explain_names_a_partial_last_cell(size: int) -> None:
    text = f"key {A.hex()} seed 3 of {size} bytes"
    assert explain(page_bytes(3, A, size)) == f"bytes 0..{size}: {text}"


def test_explain_finds_a_torn_page() -> None:
    torn = page_bytes(1, A, SIZE)[:256] + page_bytes(1, B, SIZE)[256:]
    assert explain(torn) == (
        f"bytes 0..256: key {A.hex()} seed 1 of {SIZE} bytes; "
        f"bytes 256..{SIZE}: key {B.hex()} seed 1 of {SIZE} bytes"
    )


def test_explain_finds_moved_bytes() -> None:
    page = page_bytes(1, A, SIZE)
    assert "moved by 128 bytes" in explain(bytes(128) + page[:-128])
    assert "bytes 0..128: all zeros" in explain(bytes(128) + page[:-128])


def test_explain_knows_constant_memory() -> None:
    assert explain(bytes(200)) == "bytes 0..200: all zeros"
    assert explain(b"\xdb" * 64) == "bytes 0..64: all 0xdb"
    assert explain(b"") == "no bytes"
    assert explain(random.Random(1).randbytes(100)) == "bytes 0..100: damaged or foreign"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 8 * (SIZE + 30) - 1))
def test_explain_sees_every_flipped_bit(bit: int) -> None:
    page = bytearray(page_bytes(5, A, SIZE + 30))
    page[bit // 8] ^= 1 << bit % 8
    assert "damaged" in explain(page)


# -- oracle ----------------------------------------------------------------------------------------


def loaded(data: bytes | None, *saved: bytes) -> Oracle:
    oracle = Oracle()
    for payload in saved:
        oracle.save(NAMESPACE, A, payload)
    oracle.check_load(NAMESPACE, A, data)
    return oracle


def test_a_miss_is_always_right() -> None:
    assert loaded(None).misses == 1
    assert loaded(None, b"x").misses == 1


def test_any_payload_ever_saved_is_right() -> None:
    first, second = page_bytes(1, A, SIZE), page_bytes(2, A, SIZE)
    for payload in (first, second):
        oracle = loaded(payload, first, second, first)
        assert (oracle.hits, oracle.misses) == (1, 0)
    oracle.check_load(NAMESPACE, A, memoryview(bytearray(first)))
    assert oracle.keys(NAMESPACE) == [A]


def test_the_payload_is_copied() -> None:
    buffer = bytearray(b"before")
    oracle = Oracle()
    oracle.save(NAMESPACE, A, buffer)
    buffer[:] = b"after!"
    oracle.check_load(NAMESPACE, A, b"before")
    with pytest.raises(AssertionError):
        oracle.check_load(NAMESPACE, A, buffer)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (page_bytes(1, B, SIZE), f"They are: bytes 0..{SIZE}: key {B.hex()}"),
        (page_bytes(1, A, SIZE)[:-1] + b"\0", f"1 bytes differ, the first at {SIZE - 1}"),
        (page_bytes(1, A, SIZE)[:-64], r"saved lengths are \[640\]"),
        (bytes(SIZE), "all zeros"),
        (b"", r"saved lengths are \[640\]"),
    ],
)
def test_wrong_bytes_are_explained(data: bytes, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        loaded(data, page_bytes(1, A, SIZE))


def test_a_hit_on_what_was_never_saved() -> None:
    with pytest.raises(AssertionError, match="nothing was ever saved"):
        loaded(b"x")


def test_namespaces_are_apart() -> None:
    oracle = Oracle()
    oracle.save(b"one", A, b"x")
    with pytest.raises(AssertionError, match="nothing was ever saved"):
        oracle.check_load(b"two", A, b"x")


def test_nothing_comes_back_after_forget() -> None:
    oracle = Oracle()
    oracle.save(b"one", A, b"x")
    oracle.save(b"two", A, b"y")
    oracle.forget(b"one")
    oracle.check_load(b"one", A, None)
    oracle.check_load(b"two", A, b"y")
    with pytest.raises(AssertionError):
        oracle.check_load(b"one", A, b"x")
