"""Plans of the gpu transport: every byte of every item is in exactly one transfer or copy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tutti_core.io.gpu_plan import Limits, Memory, groups_of, pieces_of
from tutti_core.io.transport import BLOCK_BYTES, Batch, Op

BASE = 1 << 30
SIZE = 64 << 20


def memory(*regions: tuple[int, int]) -> Memory:
    ranges = sorted(regions)
    return Memory(
        np.array([start for start, _ in ranges], np.uint64),
        np.array([end for _, end in ranges], np.uint64),
    )


def batch_of(items: list[tuple[int, list[tuple[int, int]]]]) -> Batch:
    fragments = [fragment for _, some in items for fragment in some]
    counts = [len(some) for _, some in items]
    return Batch(
        op=Op.READ,
        device=np.zeros(len(items), np.uint32),
        offset_bytes=np.array([offset for offset, _ in items], np.uint64),
        fragment_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32),
        address=np.array([address for address, _ in fragments], np.uint64),
        length_bytes=np.array([length for _, length in fragments], np.uint64),
    )


def run_plan(items: list[Any], known: Memory, limits: Limits, most: int = 64) -> dict[int, int]:
    """Follow a plan: where each byte of memory goes on the device. Checks bounds on the way."""
    batch = batch_of(items)
    pieces = pieces_of(batch, np.arange(len(items)), known, limits)
    moved: dict[int, int] = {}
    at = 0
    for group in groups_of(pieces, limits, most):
        assert group.first == at and group.stop > at
        at = group.stop
        arena: dict[int, int] = {}
        bounced = pieces.bounced[group.first : group.stop][group.piece]
        for offset, address, length, by_way in zip(
            group.offset_bytes.tolist(),
            group.address.tolist(),
            group.length_bytes.tolist(),
            bounced.tolist(),
            strict=True,
        ):
            assert length % limits.block_bytes == 0 and offset % limits.block_bytes == 0
            if by_way:
                assert address + length <= limits.bounce_bytes
                arena.update((address + i, offset + i) for i in range(length))
            else:
                assert address % 4 == 0
                assert known.holds(np.array([address], np.uint64), np.array([length], np.uint64))[0]
                assert not moved.keys() & set(range(address, address + length))
                moved.update((address + i, offset + i) for i in range(length))
        used = set()
        for inner, outer, length in zip(
            group.inner.tolist(), group.outer.tolist(), group.copy_bytes.tolist(), strict=True
        ):
            for i in range(length):
                assert outer + i not in moved
                moved[outer + i] = arena[inner + i]
                used.add(inner + i)
        for gap, length in zip(group.gap.tolist(), group.gap_bytes.tolist(), strict=True):
            assert 0 < length < BLOCK_BYTES
            used.update(range(gap, gap + length))
        assert used == arena.keys(), "bytes of the arena that nobody fills"
    assert at == len(pieces.item)
    return moved


def expected(items: list[Any]) -> dict[int, int]:
    where: dict[int, int] = {}
    for offset, fragments in items:
        for address, length in fragments:
            where.update((address + i, offset + i) for i in range(length))
            offset += length
    return where


LIMITS = Limits(512, 4 * BLOCK_BYTES, 8)


@pytest.mark.parametrize(
    "fragments",
    [
        [(BASE, 4096)],
        [(BASE, 512), (BASE + 8192, 3584)],
        [(BASE + 2, 4096)],  # misaligned
        [(BASE, 100)],  # not whole blocks
        [(BASE, 511), (BASE + 1024, 3585)],
        [(BASE - 4096, 8192)],  # across the beginning of a region
        [(BASE + SIZE - 4096, 8192)],  # across its end
        [(BASE, 9 * 4096 + 5)],  # larger than the arena's part, and not whole
        [(BASE + 1, 40_000), (BASE + 80_000, 3), (BASE + 90_000, 50_000)],
        [(BASE + 8192 * at, 512) for at in range(40)],  # more than a group holds
    ],
)
def test_every_byte_is_moved_once(fragments: list[tuple[int, int]]) -> None:
    items = [(0, [(BASE + (16 << 20), 4096)]), (BLOCK_BYTES, fragments)]
    assert run_plan(items, memory((BASE, BASE + SIZE)), LIMITS) == expected(items)


@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_random_batches(block_bytes: int) -> None:
    rng = random.Random(block_bytes)
    known = memory((BASE, BASE + SIZE // 2), (BASE + SIZE // 2 + 4096, BASE + SIZE))
    for _ in range(60):
        items, place, offset = [], BASE - 8192, 0
        for _ in range(rng.randint(1, 12)):
            fragments = []
            for _ in range(rng.choice([1, 1, 2, 7])):
                length = rng.choice([1, 511, 512, 4096, 8192, 9000, 20_000])
                place += rng.choice([0, 1, 4, 512, 4096])
                fragments.append((place, length))
                place += length
            items.append((offset, fragments))
            total = sum(length for _, length in fragments)
            offset += -(-total // BLOCK_BYTES) * BLOCK_BYTES
        limits = Limits(block_bytes, rng.choice([1, 2, 5]) * BLOCK_BYTES, rng.choice([1, 3, 100]))
        assert run_plan(items, known, limits, rng.choice([1, 4])) == expected(items)


def test_what_fits_is_not_bounced() -> None:
    items = [(0, [(BASE + 4 * at, 4096)]) for at in (0, 1024)]
    pieces = pieces_of(batch_of(items), np.arange(2), memory((BASE, BASE + SIZE)), LIMITS)
    assert not pieces.bounced.any()
    (group,) = groups_of(pieces, LIMITS, 64)
    assert not group.bounces and group.address.tolist() == [BASE, BASE + 4096]


def test_a_plan_with_a_hole_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tutti_core.io import gpu_plan

    real = gpu_plan._before
    monkeypatch.setattr(gpu_plan, "_before", lambda length, first: real(length, first) // 2)
    items = [(0, [(BASE, 511), (BASE + 1024, 3585)])]
    with pytest.raises((AssertionError, KeyError)):
        assert run_plan(items, memory((BASE, BASE + SIZE)), LIMITS) == expected(items)
