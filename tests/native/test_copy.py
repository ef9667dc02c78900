"""Copies of memory pieces: the native code and the fallback move the same bytes and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from thread_kit import beside

from tutti_core import memcopy

SIZE = 1 << 16


@pytest.fixture(params=["native", "fallback"])
def copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    if request.param == "fallback":
        monkeypatch.setattr(memcopy, "_native", None)
    elif memcopy._native is None:
        pytest.skip("built without the native extension")
    return memcopy.copy_pieces


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_pieces_arrive_and_nothing_else_changes(copy, rng) -> None:
    source = np.frombuffer(rng.randbytes(SIZE), dtype=np.uint8)
    target = np.full(SIZE, 0xA5, dtype=np.uint8)
    expected = target.copy()
    at, pieces = 0, []
    while at < SIZE - 600:
        length = rng.choice((1, 7, 64, 500))
        start = rng.choice((at, rng.randrange(SIZE - length)))  # some touch on both sides
        pieces.append((at, start, length))
        expected[at : at + length] = source[start : start + length]
        at += length + rng.choice((0, 0, 3))
    base, origin = target.ctypes.data, source.ctypes.data
    copy(
        u64([base + to for to, _, _ in pieces]),
        u64([origin + start for _, start, _ in pieces]),
        u64([length for _, _, length in pieces]),
    )
    assert (target == expected).all()


@pytest.mark.parametrize("skew", [(0, 0), (1, 0), (0, 5), (63, 17)])
@pytest.mark.parametrize("length", [(128 << 10) - 1, 128 << 10, (1 << 20) + 77])
def test_large_pieces_at_odd_places(copy, rng, skew: tuple[int, int], length: int) -> None:
    source = np.frombuffer(rng.randbytes(length + 64), dtype=np.uint8)
    target = np.full(length + 192, 0xA5, dtype=np.uint8)
    to, start = 64 + skew[0], skew[1]
    copy(u64([target.ctypes.data + to]), u64([source.ctypes.data + start]), u64([length]))
    assert (target[to : to + length] == source[start : start + length]).all()
    assert (target[:to] == 0xA5).all() and (target[to + length :] == 0xA5).all()


def test_none_is_a_copy_too(copy) -> None:
    copy(u64([]), u64([]), u64([]))


def test_arrays_of_different_lengths_are_refused(copy) -> None:
    with pytest.raises(ValueError, match="different lengths"):
        copy(u64([1]), u64([1, 2]), u64([1]))


def test_other_types_are_refused() -> None:
    native = pytest.importorskip("tutti_core._native")
    good = u64([1])
    for wrong in (good.astype(np.int64), [1], good.reshape(1, 1)):
        with pytest.raises(TypeError):
            native.copy_pieces(good, good, wrong)
    with pytest.raises(ValueError, match="different lengths"):
        native.copy_pieces(good, good, u64([]))


def test_other_threads_run_meanwhile() -> None:
    """The GIL is released: a thread of Python advances while a large copy is under way."""
    pytest.importorskip("tutti_core._native")
    source, target = np.ones(256 << 20, dtype=np.uint8), np.zeros(256 << 20, dtype=np.uint8)
    arrays = u64([target.ctypes.data]), u64([source.ctypes.data]), u64([len(source)])
    turns, stop = [0], threading.Event()

    def spin() -> None:
        while not stop.is_set():
            turns[0] += 1

    with beside(spin, stop=stop.set):
        before = turns[0]
        memcopy.copy_pieces(*arrays)
        advanced = turns[0] - before
    assert advanced > 0 and target[-1] == 1
