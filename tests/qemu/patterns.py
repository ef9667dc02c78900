"""What guests are to write: plans of stretches with seeded patterns, and whole images compared."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Stretch:
    """Bytes of a disk, and the seed (or the checksum) of what they are to be."""

    offset_bytes: int
    length_bytes: int
    seed: int


Plan = list[Stretch]


def pattern(seed: int, length_bytes: int) -> bytes:
    """What a seed stands for: the words of guest_kit.h's `pattern`."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + np.arange(length_bytes // 8, dtype=np.uint64) * STEP
        x = (x ^ x >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ x >> np.uint64(29)) * np.uint64(0xC4CEB9FE1A85EC53)
        x = x ^ x >> np.uint64(32)
    return x.astype("<u8").tobytes()


def make_plan(
    rng: random.Random,
    first_bytes: int,
    end_bytes: int,
    count: int,
    length_bytes: tuple[int, int],
    block_bytes: int = 512,
) -> Plan:
    """Stretches of random lengths, apart from each other by random gaps, in random order."""
    low, high = (length // block_bytes for length in length_bytes)
    lengths = [rng.randint(low, high) * block_bytes for _ in range(count)]
    spare = (end_bytes - first_bytes - sum(lengths)) // block_bytes
    assert spare >= 0, "the stretches do not fit"
    cuts = sorted(rng.randint(0, spare) for _ in range(count))
    plan, used = [], 0
    for cut, length in zip(cuts, lengths, strict=True):
        plan.append(Stretch(first_bytes + cut * block_bytes + used, length, rng.getrandbits(64)))
        used += length
    rng.shuffle(plan)
    return plan


def text_of(plan: Plan) -> bytes:
    """A plan as guests read it."""
    lines = (f"{one.offset_bytes} {one.length_bytes} {one.seed}\n" for one in plan)
    return "".join(lines).encode()


def expected_image(size_bytes: int, plans: list[Plan]) -> npt.NDArray[np.uint8]:
    """Zeros, but for what the plans say."""
    image = np.zeros(size_bytes, np.uint8)
    for plan in plans:
        for one in plan:
            end = one.offset_bytes + one.length_bytes
            image[one.offset_bytes : end] = np.frombuffer(
                pattern(one.seed, one.length_bytes), np.uint8
            )
    return image


def differing_blocks(path: Path, expected: npt.NDArray[np.uint8]) -> list[int]:
    """Offsets of the 512-byte blocks of a raw image that are not as expected."""
    found = np.fromfile(path, np.uint8)
    assert found.size == expected.size, f"{path} has {found.size} bytes"
    different = (found.reshape(-1, 512) != expected.reshape(-1, 512)).any(axis=1)
    return [int(at) * 512 for at in np.flatnonzero(different)]
