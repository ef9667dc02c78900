"""Checks of what callers pass in: counts, seconds, texts and answers, used or refused by name.

A value that only looks like another (True for 1, 1.5 for a count, NaN for a time) is refused, and
not taken for what it would pass for.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

SECONDS_MAX = 1e6
"""Waits that are asked to be longer end after this long, 11 days: the clocks below have bounds."""


def count_of(value: Any, name: str) -> int:
    """Return a whole number of whatever kind that is not negative, as an int.

    Raises
        ValueError: names the argument and its value.
    """
    if type(value) is int and value >= 0:
        return value
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} = {value!r} is not an integer") from None
    if isinstance(value, bool) or count < 0:
        raise ValueError(f"{name} = {value!r} is not a count")
    return count


def seconds_of(value: Any, name: str = "timeout_s") -> float:
    """Return a time to wait: what is below zero is 0, what is beyond SECONDS_MAX is that.

    Raises
        ValueError: not a number.
    """
    number = isinstance(value, int | float | np.integer | np.floating)
    if not number or isinstance(value, bool) or value != value:
        raise ValueError(f"{name} = {value!r} is not a number of seconds")
    return float(min(max(value, 0), SECONDS_MAX))


def text_of(value: Any, name: str) -> str:
    """Return `value`, a str that UTF-8 can encode.

    Raises
        ValueError: something else.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} = {value!r} is not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} = {value!r} is not text that UTF-8 can encode") from None
    return value
