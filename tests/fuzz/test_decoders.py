"""Random and mutated bytes into every decoder of persisted data and of configuration.

A decoder accepts, or raises one of our errors; nothing else. Runs briefly as a test; `make fuzz
SECONDS=… SEED=…` runs it for longer. A failure prints the seed and the input.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tutti_core import StoreConfig, TuttiError
from tutti_core.format import (
    RECORD,
    RECORD_BYTES,
    SegmentEntry,
    Superblock,
    record_is_sound,
    seal_records,
)

SECONDS = float(os.environ.get("TUTTI_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("TUTTI_FUZZ_SEED", "0"))
ROUNDS_MIN = 3000

SUPERBLOCK = Superblock(bytes(range(16)), bytes(16), 0, 1, 1 << 20, 64).encode()
SEGMENT = SegmentEntry(3, 64).encode()
TOML = b'path = "/nowhere"\ncapacity = "2GiB"\npools = ["/a", "/b"]\nio_timeout_s = 3.5\n'
JSON = b'{"path": "/nowhere", "capacity": 1073741824, "verify": false, "segment": "4MiB"}'


def _record() -> bytes:
    record = np.zeros(1, dtype=RECORD)
    record["segment"], record["length_bytes"], record["generation"] = 7, 65536, 99
    seal_records(record)
    return record.tobytes()


def _mutate(source: bytes, rng: random.Random) -> bytes:
    data = bytearray(source)
    for _ in range(rng.choice([1, 1, 2, 8])):
        kind = rng.randrange(5)
        at = rng.randrange(len(data) + 1)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 3:
            data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x80" + bytes(7)])
        else:
            del data[at:]
    return bytes(data) if rng.random() > 0.02 else rng.randbytes(rng.randrange(200))


def _fuzz(source: bytes, decode: Callable[[bytes], object]) -> None:
    rng = random.Random(SEED)
    end_s = time.monotonic() + SECONDS
    rounds = 0
    while rounds < ROUNDS_MIN or time.monotonic() < end_s:
        data = _mutate(source, rng)
        rounds += 1
        try:
            decode(data)
        except TuttiError:
            pass
        except Exception as error:
            pytest.fail(f"seed {SEED}, round {rounds}: {type(error).__name__}: {error}: {data!r}")


def test_superblock() -> None:
    def decode(data: bytes) -> None:
        found = Superblock.decode(data, "here")
        assert data[:4096] == SUPERBLOCK, f"a damaged superblock was taken: {found}"

    decode(SUPERBLOCK)
    _fuzz(SUPERBLOCK, decode)


def test_record() -> None:
    good = _record()

    def decode(data: bytes) -> None:
        # The check has 32 bits; over a few million mutations none should pass by luck.
        assert record_is_sound(data) == (data == good)

    assert len(good) == RECORD_BYTES
    decode(good)
    _fuzz(good, decode)


def test_segment_entry() -> None:
    assert SegmentEntry.decode(SEGMENT) == SegmentEntry(3, 64)
    _fuzz(SEGMENT, SegmentEntry.decode)


@pytest.mark.parametrize(("suffix", "source"), [(".toml", TOML), (".json", JSON)])
def test_config_file(suffix: str, source: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"store{suffix}"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        StoreConfig.load(file)

    decode(source)
    _fuzz(source, decode)
