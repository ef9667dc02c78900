"""Damaged copies of an input: bits, bytes, runs, cuts, splices and texts that often mean something.

Equal seeds give equal copies.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

BYTES_MAX = 1 << 16
"""Inputs do not grow beyond this."""

_TOKEN = re.compile(rb'"[^"]*"|[^\s,:=\[\]{}"]+')

NUMBERS = (
    bytes(8),
    b"\xff" * 8,
    b"\x80" + bytes(7),
    bytes(7) + b"\x80",
    b"\x7f" + b"\xff" * 7,
    b"\xff\xff\xff\x7f",
    b"\x01\0\0\0",
)
WORDS = (
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e999",
    b"1e3",
    b"3600",
    b'"1KiB"',
    b'"-5GiB"',
    b"1152921504606846976",
    b"NaN",
    b"9" * 40,
    b"0.5",
    b'""',
    b"[]",
    b"{}",
    b'"\\ud800"',
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\n",
    b'"',
    b"[" * 3000,
    b'{"a":' * 3000,
)


def mutate(source: bytes, others: Sequence[bytes], rng: random.Random, text: bool = False) -> bytes:
    """Return a damaged copy of `source`; now and then one that has nothing to do with it.

    Parameters
        others: inputs to take pieces from.
        text: put in words that mean something in JSON, TOML and numbers.
    """
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    data = bytearray(source)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 3:
            number = rng.choice(NUMBERS)
            at = at // 4 * 4
            data[at : at + len(number)] = number
        elif kind == 4:
            del data[at:]
        elif kind == 5 and others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            piece = other[start : start + rng.randrange(1, 64)]
            data[at : at + rng.choice((0, len(piece)))] = piece
        elif text and kind == 6:
            stop = at + rng.randrange(0, 12)
            data[at:stop] = rng.choice(WORDS)
        elif text:
            _swap_token(data, others, rng)
        elif at < len(data):
            data[at] = rng.randrange(256)
    return bytes(data[:BYTES_MAX])


def _swap_token(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    """Put another word where one stands, so that the text around it goes on meaning something."""
    tokens = [*_TOKEN.finditer(data)]
    if not tokens:
        return
    new = rng.choice(WORDS)
    if others and rng.random() < 0.5:
        new = rng.choice(_TOKEN.findall(rng.choice(others)) or [new])
    start, stop = rng.choice(tokens).span()
    data[start:stop] = new
