"""Rows of device tensors and packed pages: every byte where it belongs, whatever the layout."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tutti_sglang.staging_ring import ALIGN_BYTES, Ring
from tutti_sglang.staging_rows import (
    DevicePages,
    DevicePool,
    Packed,
    padded,
    page_rows,
    row_bytes,
    words_of,
)

POISON = 0xA5


def poisoned(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor whose every byte is POISON."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.full((size,), POISON, dtype=torch.uint8).view(dtype).view(*shape)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


# -- the ring --------------------------------------------------------------------------------------


def test_a_ring_wraps_and_reuses_in_order() -> None:
    ring = Ring(4 * ALIGN_BYTES)
    a, b, c = (ring.take(ALIGN_BYTES) for _ in range(3))
    assert (a, b, c) == (0, ALIGN_BYTES, 2 * ALIGN_BYTES)
    assert ring.take(2 * ALIGN_BYTES) is None
    ring.give(b)
    assert ring.take(2 * ALIGN_BYTES) is None  # a is older and still out
    ring.give(a)
    assert ring.take(2 * ALIGN_BYTES) == 0  # one block is free at the end, two at the front
    assert ring.take(1) is None
    ring.give(c)
    assert ring.take(1) == 2 * ALIGN_BYTES


def test_a_ring_is_full_where_its_end_meets_its_oldest_piece() -> None:
    ring = Ring(4 * ALIGN_BYTES)
    a, b = ring.take(2 * ALIGN_BYTES), ring.take(2 * ALIGN_BYTES)
    ring.give(0)
    assert (a, b, ring.take(2 * ALIGN_BYTES)) == (0, 2 * ALIGN_BYTES, 0)
    ring.give(0)  # the newest: what it had is behind the oldest
    assert ring.take(1) is None
    ring.give(2 * ALIGN_BYTES)
    assert ring.take(4 * ALIGN_BYTES) == 0


def test_a_ring_full_to_the_last_byte_is_full() -> None:
    ring = Ring(2 * ALIGN_BYTES)
    assert ring.take(2 * ALIGN_BYTES) == 0
    assert ring.take(1) is None
    ring.give(0)
    assert len(ring) == 0 and ring.take(1) == 0


@pytest.mark.parametrize("wrong", [0, -ALIGN_BYTES, ALIGN_BYTES + 1])
def test_a_ring_has_whole_blocks(wrong: int) -> None:
    with pytest.raises(ValueError, match="a ring of"):
        Ring(wrong)


def test_only_what_is_out_comes_back() -> None:
    ring = Ring(ALIGN_BYTES)
    ring.take(1)
    ring.give(0)
    with pytest.raises(KeyError):
        ring.give(0)


def test_pieces_of_a_ring_never_overlap(rng: random.Random) -> None:
    for _ in range(40):
        blocks = rng.randint(1, 12)
        ring, out = Ring(blocks * ALIGN_BYTES), dict[int, int]()
        for _ in range(200):
            if out and rng.random() < 0.5:
                start = rng.choice(list(out))
                ring.give(start)
                del out[start]
            else:
                size = rng.randint(1, blocks * ALIGN_BYTES)
                start = ring.take(size)
                if start is None:
                    assert out
                    continue
                assert start % ALIGN_BYTES == 0 and start + size <= ring.length_bytes
                for other, length in out.items():
                    assert start + size <= other or other + length <= start
                out[start] = size
        for start in list(out):
            ring.give(start)
        assert len(ring) == 0 and ring.take(blocks * ALIGN_BYTES) == 0


# -- rows ------------------------------------------------------------------------------------------


def test_rows_of_a_plain_pool_are_its_pages() -> None:
    buffer = torch.arange(40 * 3, dtype=torch.bfloat16).reshape(40, 3)
    rows = page_rows(buffer, 4)
    assert rows.shape == (10, 24) and row_bytes(rows) == 24
    assert rows[3].tolist() == raw(buffer[12:16]).tolist()
    rows[3] = 0
    assert not buffer[12:16].any() and buffer[11].any() and buffer[16].any()


def test_slots_that_fill_no_page_are_left_out() -> None:
    assert page_rows(torch.zeros(11, 2), 4).shape == (2, 32)


def test_rows_of_slots_that_lie_apart() -> None:
    wide = torch.arange(12 * 8, dtype=torch.uint8).reshape(12, 8)
    rows = page_rows(wide[:, 2:5], 3)
    assert rows.shape == (4, 3, 3)
    assert rows[1].flatten().tolist() == wide[3:6, 2:5].flatten().tolist()
    single = page_rows(wide[:, 2:5], 1)
    assert single.shape == (12, 3) and single[7].tolist() == wide[7, 2:5].tolist()


def test_rows_of_a_slice_of_a_fused_buffer() -> None:
    fused = torch.arange(2 * 8 * 4, dtype=torch.float32).reshape(2, 8, 4)
    rows = page_rows(fused[1, :8], 2)
    assert rows[1].tolist() == raw(fused[1, 2:4]).tolist()


@pytest.mark.parametrize(
    ("buffer", "page_tokens", "said"),
    [
        (torch.zeros(4, 3, 2).transpose(1, 2), 1, "not contiguous"),
        (torch.zeros(4, 3), 5, "slots a page"),
        (torch.zeros(4, 0), 1, "slots a page"),
        (torch.zeros(4, 3), 0, "slots a page"),
        (torch.zeros(1, 3).expand(4, 3), 1, "overlap"),
    ],
)
def test_buffers_of_another_form_are_refused(
    buffer: torch.Tensor, page_tokens: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        page_rows(buffer, page_tokens)


def test_padding_is_blocks_where_it_is_cheap() -> None:
    assert padded(4096) == 4096
    assert padded(64 * 4096 - 8) == 64 * 4096
    assert padded(4097) == 4112
    assert padded(3) == 16


def random_pool(rng: random.Random, pages: int) -> tuple[DevicePool, list[list[torch.Tensor]]]:
    """A pool of random layout, and its buffers part by part as (pages, bytes) views."""
    page_tokens = rng.choice((1, 2, 4))
    parts = []
    for _ in range(rng.randint(1, 3)):
        part = []
        for _ in range(rng.randint(1, 3)):
            dtype = rng.choice((torch.uint8, torch.bfloat16, torch.float32))
            width, extra = rng.randint(1, 70), rng.choice((0, 0, 5))
            whole = poisoned(pages * page_tokens, width + extra, dtype=dtype)
            part.append(page_rows(whole[:, :width], page_tokens))
        parts.append(part)
    return DevicePool(parts), parts


def flat(view: torch.Tensor) -> np.ndarray:
    """Rows as (pages, bytes), a copy."""
    return view.reshape(len(view), -1).numpy().copy()


def test_scatter_and_gather_are_byte_exact(rng: random.Random) -> None:
    for _ in range(30):
        pages = rng.randint(2, 20)
        pool, parts = random_pool(rng, pages)
        count = rng.randint(1, pages)
        rows = np.array(rng.sample(range(pages), count), dtype=np.int64)
        untouched = np.setdiff1d(np.arange(pages), rows)
        memory = torch.zeros(8 * (pages + 1) * pool.page_step, dtype=torch.uint8)
        words, index = words_of(memory), torch.from_numpy(rows)
        data = np.frombuffer(rng.randbytes(count * pool.page_bytes), np.uint8)
        data = data.reshape(count, pool.page_bytes)
        at = 0
        for part, size in enumerate(pool.part_bytes):
            step, start = pool.part_steps[part], 8 * rng.randint(0, 9)
            place = np.arange(count)[:, None] * step + np.arange(size) + start
            memory.numpy()[place] = data[:, at : at + size]
            pool.scatter(part, Packed(words, start, step), index)
            at += size
        at = 0
        for view in (view for part in parts for view in part):
            size, got = row_bytes(view), flat(view)
            assert (got[rows] == data[:, at : at + size]).all()
            assert (got[untouched] == POISON).all()
            at += size
        memory.fill_(0)
        start = 8 * rng.randint(0, 9)
        pool.gather(Packed(words, start, pool.page_step), index)
        at = 0
        for size, inside in zip(pool.part_bytes, pool.part_starts, strict=True):
            place = np.arange(count)[:, None] * pool.page_step + np.arange(size) + start + inside
            assert (memory.numpy()[place] == data[:, at : at + size]).all()
            at += size


def test_bytes_beside_strided_rows_keep_their_values() -> None:
    whole = poisoned(6, 16)
    pool = DevicePool([[page_rows(whole[:, 4:12], 2)]])
    memory = torch.zeros(64, dtype=torch.uint8)
    pool.scatter(0, Packed(words_of(memory), 0, 16), torch.tensor([1]))
    assert (whole[:, :4] == POISON).all() and (whole[:, 12:] == POISON).all()
    assert not whole[2:4, 4:12].any()


def test_what_is_no_pool_is_refused() -> None:
    good = page_rows(torch.zeros(4, 8), 1)
    for parts in ([], [[good], []], [[torch.zeros(4, 8)]], [[good[:, ::2]]]):
        with pytest.raises(ValueError):
            DevicePool(parts)


@pytest.mark.parametrize(
    "rows", [np.array([4]), np.array([-1]), np.array([[0]]), np.array([0], dtype=np.int32)]
)
def test_rows_that_a_pool_does_not_have_are_refused(rows: np.ndarray) -> None:
    pool = DevicePool([[page_rows(torch.zeros(4, 8), 1)]])
    with pytest.raises(ValueError, match="row"):
        DevicePages(pool, rows)
