"""The page cipher alone: any cut of any page, and that no changed byte of a unit gets through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from encryption_kit import TRAILER
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_core import PageFragments
from tutti_core.tiers.cipher import PageCipher, Windows, new_trailers, rows_of
from tutti_core.tiers.encryption import Keyring, MasterKey
from tutti_core.tiers.parts import layout_of_parts

KEYS = Keyring(MasterKey(bytes(range(32))), b"s" * 16).namespace(b"d" * 16)

sizes_of_parts = st.lists(st.integers(1, 9000), min_size=1, max_size=5)


def make_cipher(sizes: Sequence[int]) -> PageCipher:
    parts = layout_of_parts(sizes, TRAILER) if len(sizes) > 1 else None
    return PageCipher(KEYS, b"d" * 16, sum(sizes), parts)


def names(count: int, width: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


def cut(memory: np.ndarray, cuts: Sequence[int]) -> PageFragments:
    """Pages, one a row of `memory`, in fragments that end at `cuts` and at their end."""
    count, size = memory.shape
    ends = np.array(sorted({*cuts, size}), dtype=np.uint64)
    lengths = np.diff(ends, prepend=np.uint64(0)).astype(np.uint64)
    rows = np.uint64(memory.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(
        memory.strides[0]
    )
    return PageFragments(rows[:, None] + (ends - lengths), lengths, memory)


def seal(cipher: PageCipher, keys: np.ndarray, pages: PageFragments) -> np.ndarray:
    """Pages as they are stored, one a row."""
    size = -(-cipher.stored_bytes // 4096) * 4096
    window = np.full((len(keys) + 1, size), 0xDB, dtype=np.uint8)
    stored = cipher.encrypt(keys, cipher.plain_form(pages), window)
    assert stored.page_bytes == cipher.stored_bytes and stored.page_count == len(keys)
    assert (window[len(keys) :] == 0xDB).all()
    return window[: len(keys), : cipher.stored_bytes].copy()


def unseal(
    cipher: PageCipher, sizes: Sequence[int], keys: np.ndarray, stored: np.ndarray, unit: int
) -> tuple[np.ndarray, list[bool]]:
    """Decrypt one unit of each stored page into memory of its own."""
    low = unit_start(sizes, unit)
    end = low + sizes[unit]
    memory = stored[:, low:end].copy()
    trailers = new_trailers(len(stored))
    trailers[:] = stored[:, end : end + TRAILER]
    address = memory.ctypes.data + np.arange(len(stored)) * sizes[unit]
    good = cipher.decrypt(
        keys,
        unit,
        address.astype(np.uint64)[:, None],
        np.array([sizes[unit]], dtype=np.uint64),
        trailers,
    )
    return memory, good.tolist()


def unit_start(sizes: Sequence[int], unit: int) -> int:
    if len(sizes) == 1:
        return 0
    return 4096 + sum(-(-(size + TRAILER) // 4096) * 4096 for size in sizes[:unit])


@settings(max_examples=60, deadline=None)
@given(sizes=sizes_of_parts, count=st.integers(1, 4), data=st.data())
def test_any_page_in_any_fragments_comes_back(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    cipher, keys = make_cipher(sizes), names(count, data.draw(st.integers(16, 32)))
    memory = np.random.default_rng(1).integers(0, 256, (count, sum(sizes)), dtype=np.uint8)
    before = memory.copy()
    cuts = [int(end) for end in np.cumsum(sizes)]
    cuts += data.draw(st.lists(st.integers(1, sum(sizes)), max_size=6))
    stored = seal(cipher, keys, cut(memory, cuts))
    assert (memory == before).all()
    at = 0
    for unit, size in enumerate(sizes):
        got, good = unseal(cipher, sizes, keys, stored, unit)
        assert good == [True] * count
        assert (got == memory[:, at : at + size]).all()
        at += size
    whole = stored.copy()
    address = whole.ctypes.data + np.arange(count) * whole.shape[1]
    assert cipher.decrypt_stored(keys, address.astype(np.uint64)).all()
    again = seal(cipher, keys, cut(memory, cuts))
    if sum(sizes) >= 16:
        assert (again != stored).any()  # other nonces


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    bit=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_a_flipped_bit_of_a_unit_or_of_its_name_never_decrypts(
    sizes: list[int], bit: int, data: st.DataObject
) -> None:
    cipher, keys = make_cipher(sizes), names(2)
    memory = np.random.default_rng(2).integers(0, 256, (2, sum(sizes)), dtype=np.uint8)
    stored = seal(cipher, keys, cut(memory, np.cumsum(sizes).tolist()))
    unit = data.draw(st.integers(0, len(sizes) - 1))
    start = unit_start(sizes, unit)
    if data.draw(st.booleans()):
        bit %= (sizes[unit] + TRAILER) * 8
        stored[1, start + bit // 8] ^= 1 << bit % 8
    else:
        bit %= keys.shape[1] * 8
        keys = keys.copy()
        keys[1, bit // 8] ^= 1 << bit % 8
    got, good = unseal(cipher, sizes, keys, stored, unit)
    assert good == [True, False]
    assert not got[1].any()  # wiped


@settings(max_examples=40, deadline=None)
@given(one=sizes_of_parts, other=sizes_of_parts)
def test_a_unit_of_another_layout_or_length_never_decrypts(
    one: list[int], other: list[int]
) -> None:
    """The namespace's digest is the same here, which it never is for two layouts."""
    keys = names(1)
    memory = np.zeros((1, sum(one)), dtype=np.uint8)
    stored = seal(make_cipher(one), keys, cut(memory, np.cumsum(one).tolist()))
    padded = np.zeros((1, 100_000), dtype=np.uint8)
    padded[:, : stored.shape[1]] = stored
    for unit in range(len(other)):
        same = unit < len(one) and (len(one), one[unit]) == (len(other), other[unit])
        same &= unit_start(one, unit) == unit_start(other, unit) if unit < len(one) else False
        _, good = unseal(make_cipher(other), other, keys, padded, unit)
        assert good == [same]


def test_a_key_of_zeros_at_its_end_is_another_key_of_another_width() -> None:
    """Keys are padded; the namespace says how wide they are, and keeps those apart."""
    cipher, keys = make_cipher([100]), names(1)
    wide = np.zeros((1, 32), dtype=np.uint8)
    wide[:, :16] = keys
    memory = np.zeros((1, 100), dtype=np.uint8)
    stored = seal(cipher, keys, cut(memory, []))
    assert unseal(cipher, [100], wide, stored, 0)[1] == [True]  # why the digest is in the name
    other = PageCipher(KEYS, b"e" * 16, 100, None)
    assert unseal(other, [100], keys, stored, 0)[1] == [False]


def test_padding_is_zero_although_windows_are_used_again() -> None:
    sizes = [4090, 10, 4048]
    cipher, keys = make_cipher(sizes), names(3)
    memory = np.full((3, sum(sizes)), 0xAA, dtype=np.uint8)
    stored = seal(cipher, keys, cut(memory, np.cumsum(sizes).tolist()))
    for unit, size in enumerate(sizes):
        end = unit_start(sizes, unit) + size + TRAILER
        stop = unit_start(sizes, unit + 1)
        assert not stored[:, end:stop].any()


def test_windows_are_bounded_and_aligned() -> None:
    windows = Windows()
    taken = [windows.take(4096) for _ in range(windows.count_max)]
    assert windows.take(4096) is None
    for window in taken:
        assert window is not None and window.ctypes.data % 4096 == 0
        assert rows_of(window, 8192).shape[1] == 8192
        windows.give_back(window)
    assert windows.take(4096) is not None
    assert windows.take(100 << 20) is not None and windows.count_max == 2
    assert windows.take(4096) is None


@pytest.mark.parametrize("cuts", [[], [1], list(range(64, 6400, 64))])
def test_the_caller_s_memory_may_be_read_only(cuts: list[int]) -> None:
    import mmap

    cipher, keys = make_cipher([6400]), names(1)
    with mmap.mmap(-1, 8192, prot=mmap.PROT_READ) as frozen:
        memory = np.frombuffer(frozen, dtype=np.uint8, count=6400).reshape(1, 6400)
        stored = seal(cipher, keys, cut(memory, cuts))
        got, good = unseal(cipher, [6400], keys, stored, 0)
        assert good == [True] and not got.any()
        del memory
